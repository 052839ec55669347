"""Decoding: B streams of a trained model, token by token, in memory that never moves.

    for token in Decoder(model, B, temperature=0.8, top_k=200).generate(prompt, 500): ...

A token runs through layer.layer, the same equations as in training, with cache.Ring for keys and
values. On a GPU the whole step, sampling included, is one CUDA graph from the fourth token on.
"""

import copy
import itertools
import math
import sys
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from cache import Ring, RingPosition
from kernels import choose_forms, cuda_seconds, fused, graphed, norm, rotate, softcap, using
from layer import head_input, layer, step
from model import LanguageModel, State, randomize
from stream import Stream, replace


# Tried in this order: two Triton forms, and 'split', a way to run them (triton_kernels.py)
FORMS_TO_TRY = ('attention', 'experts', 'split')


def progress(line: str) -> None:
    """Print a line about the reading of a long text where it does not mix with samples."""
    print(line, file=sys.stderr)


@fused
def embed(ids: Tensor, embedding: Tensor) -> Tensor:
    """Return z (B, D), the normalized embedding of tokens ids (B,)."""
    return norm(F.embedding(ids, embedding))


def argmax(x: Tensor) -> Tensor:
    """Return the index of the largest entry of each row of x (B, V), in two steps: reducing B rows
    at once would leave most of a GPU idle."""
    B, V = x.shape
    n_parts = math.gcd(V, 128)
    parts = x.view(B, n_parts, V // n_parts).max(-1)
    best = parts.values.argmax(-1, keepdim=True)  # (B, 1), the part with the largest entry
    index = best * (V // n_parts) + parts.indices.gather(1, best)
    return index.squeeze(1)


def sample(logits: Tensor, noise: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """Sample tokens (B,) from logits (B, V): keep the top_k largest, divide by the temperature, and
    keep the likeliest tokens that add up to top_p.

    With p the softmax of what is left and noise from Exp(1), the argmax of p / noise is distributed
    as p."""
    if 0 < top_k < logits.size(-1):
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -math.inf)
    logits = logits / temperature
    if top_p < 1:
        p, order = F.softmax(logits, -1).sort(descending=True)
        beyond = p.cumsum(-1) - p >= top_p  # likelier tokens already add up to top_p
        logits = logits.masked_fill(beyond.scatter(-1, order, beyond), -math.inf)
    return argmax(logits - noise.log())


@fused
def head_and_sample(
    s: Tensor,
    head: Tensor,
    noise: Tensor | None,
    temperature: float,
    top_k: int,
    top_p: float,
    config: object,
) -> tuple[Tensor, Tensor]:
    """Return logits (B, V) and the next tokens (B,) from the last layer's output s (B, D): sampled
    with the noise (see `sample`), or the likeliest if there is none."""
    logits = softcap(F.linear(head_input(s, config).to(head.dtype), head).to(s.dtype))
    if noise is None:
        return logits, argmax(logits)
    return logits, sample(logits, noise, temperature, top_k, top_p)


class Decoder:
    """B streams of a model whose weights do not change. `logits` (B, V) are those of the last step.

    amp: torch.bfloat16, or torch.float32 for products in the model's dtype; temperature = 0 is
    greedy; top_k = 0 and top_p = 1 keep every token; seed: an int, a torch.Generator, or None for
    torch's default generator. Functions are compiled while kernels.fused.enabled. `lines` reports
    on the Triton forms that were tried, one line each."""

    @torch.no_grad()
    def __init__(
        self,
        model: LanguageModel,
        B: int,
        amp: torch.dtype = torch.float32,
        temperature: float = 0,
        top_k: int = 0,
        seed: int | torch.Generator | None = 0,
        top_p: float = 1.0,
    ):
        c = model.config
        device = model.embedding.device
        wide = model.embedding.dtype  # of everything but matrix products
        dtype = amp if amp == torch.bfloat16 else wide  # of matrix products
        self.model = model
        self.config = c
        self.recurrent = model.recurrent
        self.amp = amp
        self.temperature = temperature
        self.top_k = top_k
        self.top_p = top_p
        self.generator = seed
        if isinstance(seed, int):
            self.generator = torch.Generator(device).manual_seed(seed)
        self.weights = [module.weights(B, dtype) for module in model.layers]  # cast once
        self.embedding = model.embedding.detach()
        self.head = model.head.detach().to(dtype)
        self.position = RingPosition(B, c.window, c.head_dim, wide, device)
        # (L, N, W, K) each; empty slots are read with weight 0, so they must be finite
        shape = (2, c.n_layer, B * model.heads.C, c.window, c.head_dim)
        self.keys, self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.rings = [
            Ring(self.position, model.heads, keys, values)
            for keys, values in zip(self.keys, self.values, strict=True)
        ]
        self.s = model.init_state(B).s
        self.logits = torch.zeros(B, c.vocab_size, dtype=wide, device=device)
        self.token = torch.zeros(B, dtype=torch.int64, device=device)
        self.steps = 0  # since the last load
        self.graphs = {}  # kernels.graphed
        self.forms = frozenset()
        self.lines = []
        if device.type == 'cuda' and wide == torch.float32:
            with torch.cuda.device_of(self.token):
                self.choose_forms()

    def choose_forms(self) -> None:
        """Choose Triton forms (kernels.choose_forms) for these sizes, and empty the rings."""
        self.forms, self.lines = choose_forms(FORMS_TO_TRY, self.trial, cuda_seconds)
        self.position.reset()

    def trial(self) -> Callable[[bool], list[Tensor]]:
        """Return the function trial(exact) that kernels.choose_forms needs. It runs one token on
        random weights and full windows, and returns the last layer's output and the new entries of
        the rings. exact: whether products are in the wider dtype."""
        B = len(self.token)
        W = self.position.W
        layers = randomize(copy.deepcopy(self.model.layers))
        random = torch.Generator().manual_seed(1)
        keys, values = torch.randn(2, *self.keys.shape, generator=random).to(self.keys.device)
        s, z = torch.randn(2, B, self.config.n_embd, generator=random).to(self.logits)
        inputs = {}
        for exact, product_dtype in ((True, self.logits.dtype), (False, self.keys.dtype)):
            weights = [module.weights(B, product_dtype) for module in layers]
            pairs = zip(keys.to(product_dtype), values.to(product_dtype), strict=True)
            rings = [Ring(self.position, self.model.heads, k, v) for k, v in pairs]
            inputs[exact] = weights, rings

        @torch.no_grad()
        def trial(exact):
            weights, rings = inputs[exact]
            self.position.head.fill_(W + W // 2)  # in the middle of a ring
            self.position.count.fill_(2 * W)
            out = self.run_layers(weights, s, z, rings)
            slot = (W // 2 + 1) % W
            new = [x[:, slot] for ring in rings for x in (ring.keys, ring.values)]
            return [out, *(x.clone() for x in new)]

        return trial

    @torch.no_grad()
    def load(self, state: State) -> None:
        """Continue from a state of the model for B streams. The next call of `step` must pass a
        token."""
        cos, sin = self.position.rope[:-1].unbind(1)  # (W, K) each
        # oldest entry in slot 0, newest in slot W - 1
        self.keys.copy_(rotate(state.k, cos, sin).view(self.keys.shape))
        self.values.copy_(state.v.reshape(self.values.shape))
        self.s.copy_(state.s)
        self.position.count.copy_(state.count)
        self.position.head.fill_(self.position.W - 1)
        self.steps = 0

    @torch.no_grad()
    def state(self) -> State:
        """Return a copy of the model's state: keys not rotated, oldest first."""
        W, slot = self.position.W, self.position.slot
        newest = self.position.head % W
        order = (newest + 1 + slot) % W  # slots from the oldest to the newest entry
        angle = slot - W * (slot > newest)  # negative for entries of the last turn
        cos, sin = self.position.rope[angle.abs()].unbind(1)
        k = rotate(self.keys, cos, -sin * angle.sign()[:, None]).to(self.keys.dtype)
        shape = (len(self.rings), len(self.token), -1, W, self.config.head_dim)
        k, v = (x[..., order, :].view(shape) for x in (k, self.values))
        return State(self.s.clone(), k, v, self.position.count.clamp(max=W))

    def run_layers(self, weights: list, s: Tensor, z: Tensor, rings: list[Ring]) -> Tensor:
        """Run one token per stream through all layers from s and z, (B, D) each; return the last
        layer's output (B, D)."""
        cos, sin = self.position.advance()
        if self.recurrent:
            return step(weights, s, z, cos, sin, rings, self.config)
        for w, ring in zip(weights, rings, strict=True):
            s = layer(w, s, z, cos, sin, ring, self.config)
        return s

    def run_token(self) -> None:
        """Run one token per stream on the device alone, so that a CUDA graph can hold it."""
        with using(self.forms):
            z = embed(self.token, self.embedding)
            s = self.run_layers(self.weights, self.s if self.recurrent else z, z, self.rings)
            noise = None
            if self.temperature:
                noise = torch.empty_like(self.logits).exponential_(generator=self.generator)
            logits, token = head_and_sample(
                s, self.head, noise, self.temperature, self.top_k, self.top_p, self.config
            )
        if self.recurrent:
            self.s.copy_(s)
        self.logits.copy_(logits)
        self.token.copy_(token)

    @torch.no_grad()
    def step(self, token: Tensor | None = None) -> Tensor:
        """Feed `token` (B,), by default the one sampled last, and return the next sample (B,), a
        tensor that the next step overwrites."""
        if token is not None:
            self.token.copy_(token)
        if self.steps % self.position.W == 0:  # slot 0 is next (see cache.RingPosition)
            cos, sin = self.position.rope[-1]
            self.keys.copy_(rotate(self.keys, cos, -sin))
        self.steps += 1
        if self.token.is_cuda:
            with torch.cuda.device_of(self.token):
                graphed(self.graphs, 'step', self.run_token, generator=self.generator)
        else:
            self.run_token()
        return self.token

    @torch.no_grad()
    def prefill(self, idx: Tensor, state: State | None = None) -> State:
        """Read tokens idx (B, T), block_size at a time, from a state, by default the initial one.
        Load the state after them into the decoder, and return it."""
        rows, T = len(idx), self.model.config.block_size
        stream = Stream(self.model, rows, T, rows, amp=self.amp)
        if state is not None:
            replace(stream.state, state)
        stream.read(idx, progress)
        self.load(stream.state)
        return stream.state

    def generate(
        self, idx: Tensor, max_new_tokens: int, state: State | None = None
    ) -> Iterator[Tensor]:
        """Continue prompts idx (B, T >= 1) from a state, by default the initial one. Yields tokens
        (B,), max_new_tokens times, or without end if that is negative."""
        if max_new_tokens == 0:
            return
        self.prefill(idx[:, :-1], state)
        yield self.step(idx[:, -1]).clone()
        remaining = itertools.count() if max_new_tokens < 0 else range(max_new_tokens - 1)
        for _ in remaining:
            yield self.step().clone()

"""Decoding: B streams of a trained model, token by token, in memory that never moves.

    ids = generate(model, ids, 500, temperature=0.8, top_k=200)  # continue texts (B, T)

    for token in Decoder(model, B, temperature=0.8, top_k=200).generate(prompt, 500): ...

A token runs through model.run_layer, the same equations as in training, with a RingCache for keys
and values. On a GPU the whole step, sampling included, is one CUDA graph from the fourth token on.

Shapes as in model.py; W attention window, N = B * C cache heads of all streams.
"""

import itertools
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from model import (
    LanguageModel,
    State,
    head_input,
    logits_of,
    refuse_other_forward,
    run_layer,
    step,
)
from ops import Heads, in_window, rope_table, rotate, to_experts
from support.compiling import fused, graphed, use_overrides
from support.ranks import evaluating
from support.stream import Stream, copy_state

# ---- the ring cache ----------------------------------------------------------------------------


class RingPosition:
    """The position of B streams in their rings, which all layers share. It is on the device, so
    that a CUDA graph can advance it.

    A new key in slot j is rotated by position j. Before slot 0 is written again, Decoder.step
    rotates all keys back by W: the keys of the last turn then have positions -W .. -1. A key is
    overwritten after W steps, so no angle exceeds W, and streams of any length stay exact."""

    def __init__(
        self,
        B: int,
        W: int,
        widths: list[int],
        K: int,
        state_dtype: torch.dtype,
        device: torch.device,
    ):
        """W: the number of slots of a ring; widths: of the layers' windows, W at most."""
        self.W = W
        self.widths = tuple(set(widths))
        # [head, count of each stream]: the newest entry is in slot head % W; count is the number of
        # entries so far
        self.counters = torch.zeros(1 + B, dtype=torch.int64, device=device)
        self.head, self.count = self.counters[:1], self.counters[1:]
        like = torch.empty((), dtype=torch.float64)  # on the CPU: Apple's GPUs have no float64
        self.rope = torch.stack(rope_table(W + 1, K, like), 1).to(
            device, state_dtype
        )  # (W + 1, 2, K)
        self.slot = torch.arange(W, device=device)
        self.newest = self.angles = self.biases = None  # of the current token, set by `advance`
        self.start(self.count)

    def start(self, count: Tensor) -> None:
        """Let the next entry go into slot 0, after `count` (B,) entries in the slots before it."""
        self.head.fill_(self.W - 1)
        self.count.copy_(count)

    def advance(self) -> None:
        """Advance to the next slot."""
        self.newest, angles, biases = next_slot(self.counters, self.rope, self.widths)
        self.angles = angles.unbind(0)
        self.biases = dict(zip(self.widths, biases, strict=True))


@fused
def next_slot(counters: Tensor, rope: Tensor, widths: tuple) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Add 1 to all counters (1 + B,), in place. Return the newest slot (1,), its cos and sin (2,
    K), and for each width the bias (B, W) of all slots: 0, or -inf for those that are not seen."""
    counters.add_(1)
    head, count = counters[:1], counters[1:]
    W = len(rope) - 1
    age = (head - torch.arange(W, device=head.device)) % W  # 0 for the newest slot
    zero = torch.zeros((), dtype=rope.dtype, device=head.device)
    biases = [
        torch.where(in_window(age, count[:, None], width), zero, -math.inf) for width in widths
    ]
    newest = head % W
    return newest, rope.index_select(0, newest)[0], biases


@dataclass
class RingCache:
    """Keys, rotated by their slots, and values of one layer, (N, W, K) each: the cache of
    model.run_layer in decoding. A token sees the last `width` entries."""

    position: RingPosition
    heads: Heads
    keys: Tensor
    values: Tensor
    width: int

    def angles(self) -> tuple[Tensor, Tensor]:
        """Return cos and sin (K,) of the token's position."""
        return self.position.angles

    def attend(self, q: Tensor, k: Tensor, unrotated: Tensor, v: Tensor) -> Tensor:
        """Store a token's keys and values (B, C, K), attend from its queries (B, C M, K), and
        return the attended values (E, B, H K)."""
        newest, bias = self.position.newest, self.position.biases[self.width]
        return ring_attention(q, k, v, self.keys, self.values, newest, bias, self.heads)


@fused
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    newest: Tensor,
    bias: Tensor,
    heads: Heads,
) -> Tensor:
    """Store a token's keys and values in slot `newest` (1,) of a ring, attend from its queries, and
    return the attended values; bias (B, W)."""
    N, W, K = keys.shape
    B = len(bias)
    keys.index_copy_(1, newest, k.reshape(N, 1, K))
    values.index_copy_(1, newest, v.reshape(N, 1, K))
    scores = torch.bmm(q.reshape(N, -1, K), keys.mT).to(bias.dtype)  # (N, M, W)
    scores = scores.view(B, -1, W) + bias[:, None]
    p = F.softmax(scores, -1).to(keys.dtype).view(N, -1, W)
    return to_experts(torch.bmm(p, values), heads)


# ---- sampling ----------------------------------------------------------------------------------


def progress(line: str) -> None:
    """Print a line about the reading of a long text where it does not mix with samples."""
    print(line, file=sys.stderr)


def sample(logits: Tensor, noise: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """Sample tokens (B,) from logits (B, V): keep the top_k largest, divide by the temperature, and
    keep the likeliest tokens that add up to top_p.

    With p the softmax of what is left and noise from Exp(1), the argmax of p / noise is distributed
    as p. Both are in fp32 or wider, because bf16 would make many ratios equal."""
    scaled = logits.to(noise.dtype) / temperature
    if 0 < top_k < logits.size(-1):
        scaled = scaled.masked_fill(logits < logits.topk(top_k).values[:, -1:], -math.inf)
    if top_p < 1:
        p, order = F.softmax(scaled, -1).sort(descending=True)
        beyond = p.cumsum(-1) - p >= top_p  # likelier tokens already add up to top_p
        scaled = scaled.masked_fill(beyond.scatter(-1, order, beyond), -math.inf)
    # Noise of 0, which Apple's GPUs draw, would choose an unlikely token, because -log(0) is inf,
    # and one that was left out, because -inf + inf is NaN. So the noise is at least the distance
    # between random numbers in fp32.
    return (scaled - noise.clamp(min=2**-24).log()).argmax(-1)


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
    logits = logits_of(head_input(s, config), head)
    if noise is None:
        return logits, logits.argmax(-1)
    return logits, sample(logits, noise, temperature, top_k, top_p)


def versions_of(model: LanguageModel) -> list[int]:
    """Return torch's version counter of each weight. Changes in place increase it, except those by
    CUDA graphs, through `.data` or in inference mode."""
    return [0 if p.is_inference() else p._version for p in model.parameters()]


class Decoder:
    """B streams of a model whose weights do not change. `logits` (B, V) are those of the last step.

    compute_dtype: torch.bfloat16, or torch.float32 for products in the model's dtype; temperature =
    0 is greedy; top_k = 0 and top_p = 1 keep every token; seed: an int, a torch.Generator, or None
    for torch's default generator. Functions are compiled while compiling.fused.enabled, and those
    that have a Triton override in model.overrides (overrides.choose_overrides) run in it."""

    @torch.no_grad()
    def __init__(
        self,
        model: LanguageModel,
        B: int,
        compute_dtype: torch.dtype = torch.float32,
        temperature: float = 0,
        top_k: int = 0,
        seed: int | torch.Generator | None = 0,
        top_p: float = 1.0,
    ):
        refuse_other_forward(model)
        if temperature < 0 or top_k < 0 or not 0 < top_p <= 1:
            settings = f'temperature = {temperature}, top_k = {top_k}, top_p = {top_p}'
            raise ValueError(f'{settings}: expected at least 0, and top_p above 0 and at most 1')
        c = model.config
        device = model.embedding.device
        state_dtype = model.embedding.dtype  # of everything but matrix products
        dtype = state_dtype if compute_dtype == torch.float32 else compute_dtype  # of products
        self.model = model
        self.compute_dtype = compute_dtype
        self.temperature = temperature
        self.top_k = top_k
        self.top_p = top_p
        self.generator = seed
        if isinstance(seed, int):
            self.generator = torch.Generator(device).manual_seed(seed)
        # the layers cast explicitly
        with evaluating(model), torch.autocast(device.type, enabled=False):
            self.weights = model.bind_weights(B, dtype)  # cast once
        self.head = model.head.detach().to(dtype)
        self.versions = versions_of(model)
        widths = [w.window for w in self.weights]
        self.position = RingPosition(B, c.window, widths, c.head_dim, state_dtype, device)
        # (L, N, W, K) each; empty slots are read with weight 0, so they must be finite
        shape = (2, len(widths), B * model.heads.C, c.window, c.head_dim)
        self.keys, self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.rings = [
            RingCache(self.position, model.heads, keys, values, width)
            for keys, values, width in zip(self.keys, self.values, widths, strict=True)
        ]
        self.s = model.init_state(B).s
        self.logits = torch.zeros(B, c.vocab_size, dtype=state_dtype, device=device)
        self.token = torch.zeros(B, dtype=torch.int64, device=device)
        self.steps = 0  # since the last load
        self.graphs = {} if self.token.is_cuda else None  # compiling.graphed

    @torch.no_grad()
    def load(self, state: State) -> None:
        """Continue from a state of the model for B streams. The next call of `step` must pass a
        token. Raises ValueError if the weights have changed: some of them are copies here."""
        if versions_of(self.model) != self.versions:
            raise ValueError('the weights have changed: make another Decoder')
        cos, sin = self.position.rope[:-1].unbind(1)  # (W, K) each
        # oldest entry in slot 0, newest in slot W - 1
        self.keys.copy_(rotate(state.k, cos, sin).view(self.keys.shape))
        self.values.copy_(state.v.reshape(self.values.shape))
        self.s.copy_(state.s)
        self.position.start(state.count)
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
        shape = (len(self.rings), len(self.token), -1, W, self.keys.size(-1))
        k, v = (x[..., order, :].view(shape) for x in (k, self.values))
        return State(self.s.clone(), k, v, self.position.count.clamp(max=W))

    def run_token(self) -> None:
        """Run one token per stream on the device alone, so that a CUDA graph can hold it."""
        model, config = self.model, self.model.config
        autocast = torch.autocast(self.token.device.type, enabled=False)
        with use_overrides(model.overrides), evaluating(model), autocast:
            self.position.advance()
            z = model.embed(self.token)
            if model.recurrent:
                s = step(self.weights, self.s, z, self.rings, config)
            else:
                s = z
                for w, ring in zip(self.weights, self.rings, strict=True):
                    s = run_layer(w, s, z, ring, config)
            noise = None
            if self.temperature:
                dtype = torch.promote_types(self.logits.dtype, torch.float32)
                noise = torch.empty_like(self.logits, dtype=dtype)
                noise.exponential_(generator=self.generator)
            logits, token = head_and_sample(
                s, self.head, noise, self.temperature, self.top_k, self.top_p, config
            )
        if model.recurrent:
            self.s.copy_(s)
        self.logits.copy_(logits)
        self.token.copy_(token)

    @torch.no_grad()
    def step(self, token: Tensor | None = None) -> Tensor:
        """Feed `token` (B,), by default the one sampled last, and return the next sample (B,), a
        tensor that the next step overwrites."""
        if token is not None:
            self.token.copy_(token)
        if self.steps % self.position.W == 0:  # slot 0 is next (see RingPosition)
            cos, sin = self.position.rope[-1]
            self.keys.copy_(rotate(self.keys, cos, -sin))
        self.steps += 1
        with torch.cuda.device_of(self.token):
            graphed(self.graphs, 'step', self.run_token, generator=self.generator)
        return self.token

    @torch.no_grad()
    def prefill(self, idx: Tensor, state: State | None = None) -> State:
        """Read tokens idx (B, T), block_size at a time, from a state, by default the initial one.
        Load the state after them into the decoder, and return it."""
        rows, T = len(idx), self.model.config.block_size
        stream = Stream(self.model, rows, T, rows, compute_dtype=self.compute_dtype)
        if state is not None:
            copy_state(stream.state, state)
        with evaluating(self.model):
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
        token = idx[:, -1]
        steps = itertools.count() if max_new_tokens < 0 else range(max_new_tokens)
        for _ in steps:
            yield self.step(token).clone()
            token = None  # from now on the token that was sampled last


def generate(
    model: LanguageModel,
    ids: Tensor,
    n: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int | torch.Generator | None = None,
) -> Tensor:
    """Continue texts ids (B, T) by n tokens each, (B, T + n). Products have the dtype of the
    model's weights.

    temperature = 0 is greedy; top_k = 0 and top_p = 1 keep every token; seed: as in Decoder, by
    default torch's generator. A text starts with the tokenizer's end-of-text token. Raises
    ValueError if a text is empty or n is negative.

        import torch
        from decode import generate
        from model import LanguageModel

        model = LanguageModel.from_pretrained('PATH/pretrained/lm')  # PATH: this file's folder
        ids = torch.tensor([[255, *b'Fellow citizens']])  # of bytes; 255 starts a document
        print(bytes(generate(model, ids, 200, temperature=0.8)[0, 1:].tolist()))
    """
    if ids.dim() != 2 or ids.size(1) == 0 or n < 0:
        expected = 'expected texts (B, T) with T of at least 1, and n of at least 0'
        raise ValueError(f'ids of shape {tuple(ids.shape)}, n = {n}: {expected}')
    ids = ids.to(model.embedding.device)
    options = {'temperature': temperature, 'top_k': top_k, 'top_p': top_p, 'seed': seed}
    tokens = list(Decoder(model, len(ids), **options).generate(ids, n))
    return torch.cat([ids, *(token[:, None] for token in tokens)], 1)

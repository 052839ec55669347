"""
Decoding at the memory limit: one token for each of B streams a step, in memory that never moves or grows.

    decoder = Decoder(model, B, amp=torch.bfloat16, temperature=0.8, top_k=200)
    for token in decoder.generate(prompt, 500):                # prompt (B, T), token (B,)

  - Keys and values lie in rings of W slots a level. A key is rotated by the slot it is written to, and when the head comes round to
    slot 0, the whole ring is rotated back by W, once in W steps: with the newest entry in slot h, slot j then has angle j where j <= h,
    else j - W, and the query angle h. A key lives for W steps, so it is turned back once. No angle passes W, no absolute position
    exists, and an endless stream stays exact.
  - Weights are cast and merged once; the E key-value matrices of a shared cache are one.
  - The ring's head, the valid counts, the token and the draw of the next one are tensors on the device, and on a GPU a step is one
    CUDA graph.

Shape letters as in model.py; C cache heads (G, or E*G where experts own their cache), M = E*H / C query heads a cache head. `dt` is
the dtype of matrix products; the state, norms, softmax and logits are `wide`: the model's own.
"""

import math
import sys
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from configurator import every
from kernels import apply_rope, by_expert, compiled, rope_table, softcap
from model import LanguageModel, Rules, State, level, levels, norm, plain_weights, token


class Ring:
    """A level's window for one token: the model's `attend`. keys and values (B*C, W, K) are the rings, written
    in slot head (1,). rope (2, K/2): cos and sin of angle head. bias (B, 1, 1, W): -inf in empty slots."""

    def __init__(self, keys, values, head, rope, bias):
        self.keys, self.values, self.head, self.rope, self.bias = keys, values, head, rope, bias

    def __call__(self, heads, qkv, h, wide):
        q, k, v = heads(qkv, h, wide)  # (B, C*M, K), (B, C, K)
        (B, C, K), dt = k.shape, self.keys.dtype
        q, k = apply_rope(torch.cat([q, k], 1), *self.rope).to(dt).split([C * h.M, C], 1)
        self.keys.index_copy_(1, self.head, k.reshape(B * C, 1, K))
        self.values.index_copy_(1, self.head, v.to(dt).reshape(B * C, 1, K))
        scores = torch.bmm(q.reshape(B * C, h.M, K), self.keys.transpose(1, 2)).to(wide)
        scores = torch.add(self.bias, scores.view(B, C, h.M, -1), alpha=1 / math.sqrt(K))
        p = F.softmax(scores, -1).to(dt).view(B * C, h.M, -1)
        return by_expert(torch.bmm(p, self.values), h)


def level_step(
    w: dict, s: torch.Tensor, z: torch.Tensor, ring: tuple, rules: Rules
) -> torch.Tensor:
    """One level for one token: the new s (B, D), from s and the token's embedding z (B, D). w: tensors."""
    return level(plain_weights(w, ring[0].dtype), s, z, Ring(*ring), rules)


class Decoder:
    """Streams of a model, one token a step. Takes the model's weights as they are now: after more training, make a new one.
    amp: torch.bfloat16, or torch.float32 for products in the model's own dtype. temperature 0 is greedy; top_k 0 keeps every token.
    seed: an int, a torch.Generator of the model's device, or None for torch's own. compile: a level's step with torch.compile.
    `logits` (B, V) holds the last step's, soft-capped."""

    @torch.no_grad()
    def __init__(
        self,
        model: LanguageModel,
        B: int,
        amp: torch.dtype = torch.float32,
        temperature: float = 0.0,
        top_k: int = 0,
        seed: int | torch.Generator | None = 0,
        compile: bool = False,
    ):
        c, device, wide = model.config, model.embedding.device, model.embedding.dtype
        dt = amp if amp == torch.bfloat16 else wide
        C, K, W = model.levels[0].rules().heads.C, c.head_dim, c.window
        self.model, self.amp, self.temperature, self.top_k = model, amp, temperature, top_k
        self.generator = (
            torch.Generator(device).manual_seed(seed) if isinstance(seed, int) else seed
        )
        self.rules = model.levels[0].rules()
        self.levels = []
        for one in model.levels:
            tensors = {
                name: x.detach().to(dt)
                if x.dim() > 1
                else x.detach().view(-1)  # 0-dim is traced twice
                for name, x in one.weights().items()
            }
            self.levels.append(plain_weights(tensors, dt) | {'tensors': tensors})
        self.embedding, self.readout = model.embedding.detach(), model.head.detach().to(dt)
        self.level_step = compiled(level_step) if compile else None
        self.k, self.v = (
            torch.zeros(c.n_layer, B * C, W, K, dtype=dt, device=device) for _ in range(2)
        )  # empty slots must be finite
        self.s = torch.zeros(B, c.n_embd if model.recurrent else 0, dtype=wide, device=device)
        self.logits = torch.zeros(B, c.vocab_size, dtype=wide, device=device)
        self.token, self.count = torch.zeros(2, B, dtype=torch.int64, device=device)
        self.head = torch.full((1,), W - 1, device=device)  # slot of the newest entry
        self.slot = torch.arange(W, device=device)
        angles = rope_table(
            W + 1, K, torch.empty((), dtype=torch.float64, device=device)
        )  # rounded once, not also as angles
        self.rope = torch.stack(angles, 1).to(wide)  # (W + 1, 2, K/2), cos and sin
        self.steps, self.warm, self.graph = 0, 0, None  # steps since the load

    @torch.no_grad()
    def load(self, state: State) -> None:
        """Go on from a state of the model (B streams); the next step wants a token."""
        (L, _, W, K), B, C = self.k.shape, self.token.numel(), self.rules.heads.C
        if state.k.shape != (L, B, C, W, K):
            raise ValueError(
                f'load: keys of shape {tuple(state.k.shape)} do not fit this decoder: {L} levels, {B} streams, {C} heads, '
                f'a window of {W}, head size {K}'
            )
        for keys, k in zip(self.k, state.k, strict=True):  # oldest in slot 0, newest in slot W - 1
            keys.copy_(apply_rope(k, *self.rope[:-1].unbind(1)).view(keys.shape))
        self.v.copy_(state.v.reshape(self.v.shape))
        self.s.copy_(state.s)
        self.count.copy_(state.count)
        self.head.fill_(W - 1)
        self.steps = 0

    @torch.no_grad()
    def state(self) -> State:
        """The model's state now, a copy: keys not rotated, oldest first."""
        C, K, W = self.rules.heads.C, self.rules.heads.K, self.slot.numel()
        order = (self.head + 1 + self.slot) % W
        cos, sin = self.rope[torch.where(self.slot <= self.head, self.slot, W - self.slot)].unbind(
            1
        )
        sin = torch.where(
            (self.slot <= self.head)[:, None], sin, -sin
        )  # beyond the head the angle is j - W
        shape = len(self.k), self.token.numel(), C, W, K
        k = torch.stack([apply_rope(keys, cos, -sin).to(keys.dtype)[:, order] for keys in self.k])
        return State(
            self.s.clone(), k.view(shape), self.v[:, :, order].view(shape), self.count.clone()
        )

    def draw(self, logits: torch.Tensor) -> torch.Tensor:
        """The next token (B,) for logits (B, V). Softmax sampling without its sum: argmax of p / x with x ~ Exp(1)."""
        if self.temperature == 0:
            return logits.argmax(-1)
        if 0 < self.top_k < logits.size(-1):
            logits = logits.masked_fill(logits < logits.topk(self.top_k).values[:, -1:], -math.inf)
        x = torch.empty_like(logits).exponential_(generator=self.generator)
        return (logits / self.temperature - x.log()).argmax(-1)

    def rewind(self) -> None:
        """Rotate all keys back by a turn of the ring, in place."""
        cos, sin = self.rope[-1]
        for keys in self.k:
            keys.copy_(apply_rope(keys, cos, -sin))

    def advance(self) -> None:
        """One token for each stream; only device tensors, so that a CUDA graph can hold it."""
        W = self.slot.numel()
        self.head.add_(1).remainder_(W)
        self.count.add_(1).clamp_(max=W)
        rope = self.rope.index_select(0, self.head)[0]
        empty = (self.head - self.slot) % W >= self.count[:, None]  # older than the stream: (B, W)
        bias = torch.zeros_like(empty, dtype=self.s.dtype).masked_fill_(empty, -math.inf)[
            :, None, None
        ]
        z = norm(F.embedding(self.token, self.embedding))
        s = (
            self.s if self.rules.recurrent else z.clone()
        )  # not z itself: torch.compile would trace the first level apart
        rings = [
            (keys, values, self.head, rope, bias)
            for keys, values in zip(self.k, self.v, strict=True)
        ]

        def one(w, s, z, ring, rules):
            if self.level_step is None:
                return level(w, s, z, Ring(*ring), rules)
            return self.level_step(w['tensors'], s, z, ring, rules)

        step = token if self.rules.recurrent else levels
        s = step(self.levels, s, z, rings, self.rules, one)
        if self.rules.recurrent:
            self.s.copy_(s)
        self.logits.copy_(
            softcap(F.linear(norm(s).to(self.readout.dtype), self.readout).to(s.dtype))
        )
        self.token.copy_(self.draw(self.logits))

    @torch.no_grad()
    def step(self, token: torch.Tensor | None = None) -> torch.Tensor:
        """Feed token (B,), by default the last one drawn, and draw the next: (B,) int64. The result is the same memory every time:
        clone it to keep it. On a GPU the first three steps run as they are, the fourth is captured, and all from there on replay it."""
        if token is not None:
            self.token.copy_(token)
        if self.steps % self.slot.numel() == 0:  # once a turn: outside the graph
            self.rewind()
        self.steps += 1
        if not self.token.is_cuda or self.warm < 3:
            self.warm += 1
            self.advance()
            return self.token
        with torch.cuda.device_of(self.token):
            if self.graph is None:  # kernels.graphed, with a generator
                graph = torch.cuda.CUDAGraph()
                if self.generator is not None:
                    graph.register_generator_state(self.generator)
                with torch.cuda.graph(graph, capture_error_mode='thread_local'):
                    self.advance()
                self.graph = graph
            self.graph.replay()
        return self.token

    @torch.no_grad()
    def prefill(self, idx: torch.Tensor) -> None:
        """Start anew with the tokens idx (B, T) by the model's chunk path, block_size at a time, which bounds the memory."""
        due, read = every(), 0
        with torch.autocast(idx.device.type, torch.bfloat16, enabled=self.amp == torch.bfloat16):
            state = self.model.init_state(idx.size(0))
            for chunk in idx.split(self.model.config.block_size, dim=1) if idx.size(1) else ():
                state = self.model.core(chunk, state)[1]
                read += chunk.size(1)
                if due():
                    print(
                        f'    prompt: {read:,} of {idx.size(1):,} tokens',
                        file=sys.stderr,
                        flush=True,
                    )
        self.load(state)

    def generate(self, idx: torch.Tensor, max_new_tokens: int) -> Iterator[torch.Tensor]:
        """Continue prompts idx (B, T >= 1): yields (B,) tokens one at a time, for ever with max_new_tokens < 0."""
        if idx.size(1) == 0:
            raise ValueError('generate needs a prompt of at least one token')
        if max_new_tokens == 0:
            return
        self.prefill(idx[:, :-1])
        yield self.step(idx[:, -1]).clone()
        n = 1
        while n != max_new_tokens:
            yield self.step().clone()
            n += 1


def generate(
    model: LanguageModel,
    idx: torch.Tensor,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int = 0,
    seed: int | torch.Generator | None = None,
    amp: torch.dtype = torch.float32,
) -> Iterator[torch.Tensor]:
    """Continue prompts idx (B, T >= 1) with a Decoder of its own: see there. Yields (B,) tokens, each a new tensor."""
    yield from Decoder(model, idx.size(0), amp, temperature, top_k, seed).generate(
        idx, max_new_tokens
    )

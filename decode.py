"""
Decoding, one token for each of B streams a step:

    for token in Decoder(model, B, temperature=0.8, top_k=200).generate(prompt, 500): ...
"""

import itertools
import math
import sys
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from configurator import every
from kernels import apply_rope, by_expert, compiled, graphed, rope_table, softcap
from model import State, level, levels, norm, plain_weights, token


def level_step(w, s, z, ring, rules):
    """One level for one token: s and its embedding z (B, D) -> the new s. w: tensors; ring: keys,
    values (B*C, W, K), slot to write (1,), its cos and sin, bias (B, W): -inf where empty."""
    keys, values, head, rope, bias = ring

    def attend(heads, qkv, h, wide):
        q, k, v = heads(qkv, h, wide)  # (B, C*M, K), (B, C, K)
        (B, C, K), dt = k.shape, keys.dtype
        q, k = apply_rope(torch.cat([q, k], 1), *rope).to(dt).split([C * h.M, C], 1)
        keys.index_copy_(1, head, k.reshape(B * C, 1, K))
        values.index_copy_(1, head, v.to(dt).reshape(B * C, 1, K))
        scores = torch.bmm(q.reshape(B * C, h.M, K), keys.transpose(1, 2)).to(wide)
        scores = torch.add(bias[:, None, None], scores.view(B, C, h.M, -1), alpha=1 / math.sqrt(K))
        p = F.softmax(scores, -1).to(dt).view(B * C, h.M, -1)
        return by_expert(torch.bmm(p, values), h)

    return level(plain_weights(w, keys.dtype), s, z, attend, rules)


def begin(token, embedding, rope, head, count):
    """A slot for a token (B,): its embedding z (B, D), cos and sin (2, K/2), bias (B, W) of all
    slots. rope (W + 1, 2, K/2); head (1,), the newest entry's slot, and count (B,) go on."""
    slot = torch.arange(len(rope) - 1, device=head.device)
    head.copy_((head + 1) % len(slot))
    count.copy_((count + 1).clamp(max=len(slot)))
    older = (head - slot) % len(slot) >= count[:, None]  # than the stream
    bias = torch.where(older, -math.inf, torch.zeros((), dtype=rope.dtype, device=head.device))
    return norm(F.embedding(token, embedding)), rope.index_select(0, head)[0], bias


def end(s, readout, logits):
    """logits (B, V) of the last level's s."""
    x = norm(s).to(readout.dtype)
    logits.copy_(softcap(F.linear(x, readout).to(s.dtype)))


class Decoder:
    """B streams of a model with its weights as they are now, in memory that never moves. amp:
    torch.bfloat16, or torch.float32 for products in the model's own dtype; temperature 0 is greedy;
    top_k 0 keeps every token; seed: an int, a torch.Generator, or None for torch's own. `logits`
    (B, V): the last.

    Keys and values lie in rings of W slots, a key rotated by its slot; when the head comes round to
    slot 0, all are rotated back by W: with the newest in slot h, slot j has angle j where j <= h,
    else j - W, and the query h. A key lives for W steps: no angle passes W, a stream without end
    stays exact."""

    @torch.no_grad()
    def __init__(self, model, B, amp=torch.float32, temperature=0, top_k=0, seed=0, compile=False):
        c, device, wide = model.config, model.embedding.device, model.embedding.dtype
        dt, W = amp if amp == torch.bfloat16 else wide, c.window
        self.rules = model.levels[0].rules()
        self.model, self.amp, self.temperature, self.top_k = model, amp, temperature, top_k
        self.random = torch.Generator(device).manual_seed(seed) if isinstance(seed, int) else seed
        self.piece = compiled if compile else lambda f: f
        self.weights = []  # cast once; 0-dim would be traced twice
        for one in model.levels:
            w = {name: x.detach() for name, x in one.weights().items()}
            self.weights.append({n: x.to(dt) if x.dim() > 1 else x.view(-1) for n, x in w.items()})
        self.embedding, self.readout = model.embedding.detach(), model.head.detach().to(dt)
        shape = 2, c.n_layer, B, self.rules.heads.C, W, c.head_dim
        self.k, self.v = torch.zeros(shape, dtype=dt, device=device)  # empty slots must be finite
        self.s = torch.zeros(B, c.n_embd if model.recurrent else 0, dtype=wide, device=device)
        self.logits = torch.zeros(B, c.vocab_size, dtype=wide, device=device)
        self.token, self.count = torch.zeros(2, B, dtype=torch.int64, device=device)
        self.slot = torch.arange(W, device=device)
        self.head = self.slot[-1:].clone()  # slot of the newest entry
        # cos and sin (W + 1, 2, K/2), rounded once, not also as angles
        self.rope = torch.stack(rope_table(W + 1, c.head_dim, self.head.double()), 1).to(wide)
        self.steps, self.graphs = 0, {}  # steps since the load

    @torch.no_grad()
    def load(self, state: State) -> None:
        """Go on from a state of the model (B streams); the next step wants a token."""
        if self.k.shape != state.k.shape:
            sizes = 'levels, streams, heads, window, head size'
            raise ValueError(f'load: {sizes} are {(*state.k.shape,)}, not {(*self.k.shape,)}')
        self.k.copy_(apply_rope(state.k, *self.rope[:-1].unbind(1)))  # the newest in slot W - 1
        for x, given in zip((self.s, self.v, self.count), (state.s, *state[2:]), strict=True):
            x.copy_(given)
        self.head.fill_(self.slot.numel() - 1)
        self.steps = 0

    @torch.no_grad()
    def state(self) -> State:
        """The model's state now, a copy: keys not rotated, oldest first."""
        W = self.slot.numel()
        order, angle = (self.head + 1 + self.slot) % W, self.slot - W * (self.slot > self.head)
        cos, sin = self.rope[angle.abs()].unbind(1)
        k = apply_rope(self.k, cos, -sin * angle.sign()[:, None]).to(self.k.dtype)
        return State(self.s.clone(), k[..., order, :], self.v[..., order, :], self.count.clone())

    def draw(self, logits: torch.Tensor) -> torch.Tensor:
        """The next token (B,) for logits (B, V): argmax of p / x with x ~ Exp(1) draws from p."""
        if self.temperature == 0:
            return logits.argmax(-1)
        if 0 < self.top_k < logits.size(-1):
            logits = logits.masked_fill(logits < logits.topk(self.top_k).values[:, -1:], -math.inf)
        x = torch.empty_like(logits).exponential_(generator=self.random)
        return (logits / self.temperature - x.log()).argmax(-1)

    def advance(self) -> None:
        """One token for each stream, by tensors on the device alone: a CUDA graph can hold it."""
        memory = self.rope, self.head, self.count
        z, rope, bias = self.piece(begin)(self.token, self.embedding, *memory)
        caches = self.k.flatten(1, 2), self.v.flatten(1, 2)  # (L, B*C, W, K)
        rings = [(k, v, self.head, rope, bias) for k, v in zip(*caches, strict=True)]
        # not z itself: torch.compile would trace the first level apart
        step, s = (token, self.s) if self.rules.recurrent else (levels, z.clone())
        s = step(self.weights, s, z, rings, self.rules, self.piece(level_step))
        if self.rules.recurrent:
            self.s.copy_(s)
        self.piece(end)(s, self.readout, self.logits)
        self.token.copy_(self.draw(self.logits))

    @torch.no_grad()
    def step(self, token: torch.Tensor | None = None) -> torch.Tensor:
        """Feed token (B,), by default the last one drawn, and draw the next: (B,), always in the
        same memory. On a GPU a CUDA graph from the fourth step on."""
        if token is not None:
            self.token.copy_(token)
        if self.steps % self.slot.numel() == 0:  # a turn, outside the graph: all keys back by W
            cos, sin = self.rope[-1]
            self.k.copy_(apply_rope(self.k, cos, -sin))
        self.steps += 1
        if self.token.is_cuda:
            with torch.cuda.device_of(self.token):
                graphed(self.graphs, 'step', self.advance, generator=self.random)
        else:
            self.advance()
        return self.token

    @torch.no_grad()
    def prefill(self, idx: torch.Tensor) -> None:
        """Start anew with the tokens idx (B, T) by the model's chunk path, block_size at a time."""
        due, n = every(), self.model.config.block_size
        with torch.autocast(idx.device.type, torch.bfloat16, enabled=self.amp == torch.bfloat16):
            state = self.model.init_state(len(idx))
            for t in range(0, idx.size(1), n):
                state = self.model.core(idx[:, t : t + n], state)[1]
                if due():
                    print(f'    {t + n:,} of {idx.size(1):,} tokens of the prompt', file=sys.stderr)
        self.load(state)

    def generate(self, idx: torch.Tensor, max_new_tokens: int) -> Iterator[torch.Tensor]:
        """Continue prompts idx (B, T >= 1): yields (B,) tokens, for ever where max_new_tokens <
        0."""
        if idx.size(1) == 0:
            raise ValueError('generate needs a prompt of at least one token')
        if max_new_tokens:
            self.prefill(idx[:, :-1])
            yield self.step(idx[:, -1]).clone()
        for _ in itertools.count() if max_new_tokens < 0 else range(max_new_tokens - 1):
            yield self.step().clone()

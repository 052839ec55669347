"""Where keys and values go: the caches that layer.layer is given.

- `Window` in training and validation of the recurrent model: a chunk of T tokens in a buffer of
  W + T slots, which the token loop (unroll.py) fills one by one;
- `Sequence` in GPT: whole sequences at once;
- `Ring` in decoding: W slots for a stream without end.

All have `heads` (kernels.Heads) and `attend(q, k, unrotated, v)`, which stores keys and values and
returns attended values. Queries come divided by sqrt(K); keys come rotated by the position of their
slot, and unrotated for the caches that carry them to another position.

Shapes: B streams, C cache heads, N = B * C, M query heads per cache head, E experts, H query heads
per expert, K head size, W attention window, S slots.
"""

import functools
import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from kernels import Heads, fused, rope_table, rotate, to_cache_heads, to_experts, window_mask

BLOCK = 64  # tokens whose attention reads the same W + BLOCK slots of a Window
GROUP = 8  # tokens whose dK and dV of earlier slots are added by one product


# ---- Window: a sliding window over a chunk -----------------------------------------------------


class Slots:
    """What the windows of all layers share. Slots 0 .. W - 1 hold the carried entries, of which
    `count` (B,) are filled; token t has slot W + t and sees slots t + 1 .. W + t. Angles are those
    of slots: scores depend on differences of slots only, so that no position ever exceeds S.

    first: slots from there on get a gradient (carried entries do inside a chunk, not before it)."""

    def __init__(self, T: int, W: int, count: Tensor, heads: Heads, wide: torch.dtype, first: int):
        self.T, self.W, self.count, self.heads, self.wide, self.first = (
            T,
            W,
            count,
            heads,
            wide,
            first,
        )
        like = torch.empty((), dtype=wide, device=count.device)
        self.cos, self.sin = rope_table(W + T, heads.K, like)  # (S, K)
        self.angles = list(zip(self.cos[W:].unbind(0), self.sin[W:].unbind(0), strict=True))
        self.bias = ()

    def start_block(self, t: int) -> None:
        """Prepare the biases of the block that starts with token t: 0 for slots that a token sees,
        -inf for the others; (B, 1, W + n) for each of its n tokens."""
        seen = window_mask(self.count + t, min(BLOCK, self.T - t), self.W).movedim(2, 0)
        bias = torch.zeros(seen.shape, dtype=self.wide, device=seen.device)
        self.bias = bias.masked_fill_(~seen, -math.inf).unbind(0)

    def group_of(self, t: int) -> tuple[int, int, int]:
        """Return the first token of t's block, and the first and the last + 1 of its group."""
        start = t - t % BLOCK
        first = t - (t - start) % GROUP
        return start, first, min(first + GROUP, start + BLOCK, self.T)


@fused
def store(slots: tuple, k: Tensor, unrotated: Tensor, v: Tensor) -> None:
    """Copy keys and values (B, C, K) into slots (N, K) of the three buffers."""
    for slot, x in zip(slots, (k, unrotated, v), strict=True):
        slot.copy_(x.reshape(slot.shape))


@fused
def probabilities(scores: Tensor, bias: Tensor) -> Tensor:
    """Return the attention weights (N, M, S) of scores; bias (B, 1, S)."""
    wide = scores.to(bias.dtype).view(bias.size(0), -1, scores.size(-1)) + bias
    return F.softmax(wide, -1).to(scores.dtype).view(scores.shape)


@fused
def scores_backward(dp: Tensor, p: Tensor, wide: torch.dtype) -> Tensor:
    """Return the gradient of the scores from that of their softmax p."""
    ds = torch._softmax_backward_data(dp.to(wide), p.to(wide), -1, wide)
    return ds.to(p.dtype)


class Window:
    """Keys and values of one layer in slots: the cache of layer.layer in training."""

    def __init__(self, slots: Slots, k: Tensor, v: Tensor):
        """k, v: carried entries (N, W, K), keys not rotated."""
        self.slots, self.heads, self.t = slots, slots.heads, 0
        (N, W, K), T = k.shape, slots.T
        # later slots must be finite, hence zeros
        self.k, self.unrotated, self.v = (k.new_zeros(N, W + T, K) for _ in range(3))
        self.unrotated[:, :W], self.v[:, :W] = k, v
        self.k[:, :W] = rotate(k, slots.cos[:W], slots.sin[:W])
        spans = [slice(t, W + min(t + BLOCK, T)) for t in range(0, T, BLOCK)]
        self.blocks = [(self.k[:, span], self.v[:, span]) for span in spans]
        buffers = (self.k, self.unrotated, self.v)
        self.own = list(zip(*(x[:, W:].unbind(1) for x in buffers), strict=True))
        # Of the backward: its latest token, the gradients of all slots, those of the own slots from
        # later blocks of the chunk, and what is still to be added to slots before the group.
        self.last, self.dk, self.dv = 0, None, None
        self.later_grads, self.pending = None, []

    def attend(self, q: Tensor, k: Tensor, unrotated: Tensor, v: Tensor) -> Tensor:
        """Store the next token's key and value, (B, C, K) each, and attend its queries (B, C M, K)
        -> (E, B, H K)."""
        t, self.t = self.t, self.t + 1
        return WindowAttention.apply(self, t, q, k, unrotated, v)

    def start_backward(self, t: int) -> None:
        """Begin token t's backward; the first token of a backward starts the gradients at zero."""
        if t >= self.last:
            slots, own = self.slots, slice(self.slots.W, None)
            self.dk, self.dv = torch.zeros(2, *self.k.shape, dtype=slots.wide, device=self.k.device)
            if self.later_grads is not None:
                dk, dv = self.later_grads
                self.dk[:, own] = rotate(dk, slots.cos[own], slots.sin[own])
                self.dv[:, own] = dv
        self.last = t

    def add(self, first: int, end: int, offset: int, rows: tuple) -> None:
        """Add to the gradients of slots first .. end - 1. rows: queries (N, tokens * M, K),
        attention weights and gradients of scores (of the slots from `offset` on), gradients of
        attended values. A baddbmm_ into a slice would go through the batch one by one."""
        q, p, ds, do = rows
        columns = slice(first - offset, end - offset)
        self.dk[:, first:end].add_(torch.bmm(ds[..., columns].mT, q))
        self.dv[:, first:end].add_(torch.bmm(p[..., columns].mT, do))

    def add_before_group(self, t: int, offset: int, rows: tuple) -> None:
        """Add to the slots before the group that starts with token t. It begins at slot t, which no
        token of the group sees and whose weights are zero, so that products are aligned."""
        first = max(self.slots.first, t)
        if first < self.slots.W + t:
            self.add(first, self.slots.W + t, offset, rows)


class WindowAttention(torch.autograd.Function):
    """Attention of token t over its window. q (B, C M, K); k, unrotated, v (B, C, K)."""

    @staticmethod
    def forward(ctx, window, t, q, k, unrotated, v):
        store(window.own[t], k, unrotated, v)
        keys, values = window.blocks[t // BLOCK]
        q = q.reshape(len(keys), -1, keys.size(2))  # (N, M, K)
        p = probabilities(torch.bmm(q, keys.mT), window.slots.bias[t % BLOCK])
        ctx.window, ctx.t = window, t
        ctx.save_for_backward(q, p)
        return to_experts(torch.bmm(p, values), window.heads)

    @staticmethod
    def backward(ctx, grad):
        window, t, (q, p) = ctx.window, ctx.t, ctx.saved_tensors
        slots, heads, (keys, values) = window.slots, window.heads, window.blocks[t // BLOCK]
        window.start_backward(t)
        do = to_cache_heads(grad, heads)  # (N, M, K)
        ds = scores_backward(torch.bmm(do, values.mT), p, slots.wide)  # (N, M, S)
        start, first, end = slots.group_of(t)
        rows = (q, p, ds, do)
        window.add(slots.W + first, slots.W + end, start, rows)
        window.pending.append(rows)
        if t == first:
            group = tuple(torch.cat(x, 1) for x in zip(*window.pending, strict=True))
            window.add_before_group(t, start, group)
            window.pending.clear()
        dq = torch.bmm(ds, keys).view(len(slots.count), -1, heads.K)
        dk, dv = (x[:, slots.W + t].view(-1, heads.C, heads.K) for x in (window.dk, window.dv))
        return None, None, dq, dk, None, dv


# ---- Sequence: whole sequences at once ---------------------------------------------------------


class Band(NamedTuple):
    """What each new token sees of W cached and T new slots (window_mask), as flex_attention takes
    it: blocks outside the window are skipped."""

    blocks: BlockMask  # slots t + 1 .. t + W
    first: Tensor  # (B,): the first filled slot


@functools.cache
def band_blocks(T: int, W: int, device: torch.device) -> BlockMask:
    def seen(b, h, t, slot):
        return (slot > t) & (slot <= t + W)

    return create_block_mask(seen, None, None, T, W + T, device)


def band_attention(q: Tensor, k: Tensor, v: Tensor, band: Band) -> Tensor:
    """Sliding-window attention by a kernel that costs O(T W); compiled callers on a GPU only."""

    def filled(score, b, h, t, slot):
        return torch.where(slot >= band.first[b], score, -math.inf)

    gqa = q.size(1) != k.size(1)
    return flex_attention(
        q, k, v, score_mod=filled, block_mask=band.blocks, scale=1.0, enable_gqa=gqa
    )


@dataclass
class Sequence:
    """Keys and values of one layer over whole sequences: the cache of layer.layer in GPT."""

    B: int
    T: int
    heads: Heads
    past: tuple[Tensor, Tensor] | None  # cached keys, rotated, and values (B, C, W, K)
    mask: Tensor | Band | None  # (B, 1, T, W + T) bool; None: causal
    new: tuple = field(default=(None, None))  # this chunk's keys, not rotated, and values

    def attend(self, q: Tensor, k: Tensor, unrotated: Tensor, v: Tensor) -> Tensor:
        """Attend queries (B T, C M, K) to keys and values (B T, C, K) -> (E, B T, H K)."""
        q, k, unrotated, v = (  # (B, heads, T, K)
            x.unflatten(0, (self.B, self.T)).transpose(1, 2) for x in (q, k, unrotated, v)
        )
        self.new = (unrotated, v)
        if self.past is not None:
            k, v = (torch.cat(pair, 2) for pair in zip(self.past, (k, v), strict=True))
        y = attention(q, k, v, self.mask)  # (B, E H, T, K)
        y = y.unflatten(1, (self.heads.E, -1))  # (B, E, H, T, K)
        return y.permute(1, 0, 3, 2, 4).reshape(self.heads.E, self.B * self.T, -1)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | Band | None) -> Tensor:
    """Causal (mask = None) or masked attention without scaling: q (B, A, T, K), k and v (B, C, S,
    K), A / C query heads per key-value head -> (B, A, T, K)."""
    (B, A, T, K), C = q.shape, k.size(1)
    if isinstance(mask, Band):
        return band_attention(q, k, v, mask)
    sdpa = functools.partial(
        F.scaled_dot_product_attention,
        attn_mask=mask,
        is_causal=mask is None,
        scale=1.0,
        enable_gqa=A != C,
    )
    if q.is_cuda:  # cuDNN's kernel refuses some sizes, such as T = 32 with grouped heads
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
            return sdpa(q, k, v)
    if mask is not None or T > 512 or q.dtype != torch.bfloat16:
        return sdpa(q, k, v)
    # Short chunks in bf16 on a CPU: three plain products are faster than the fused kernel (LOG.md).
    future = q.new_full((T, T), -math.inf).triu(1).repeat(A // C, 1)
    q, k, v = (x.reshape(B * C, -1, K) for x in (q, k, v))
    p = F.softmax(torch.baddbmm(future, q, k.mT), -1)  # (B*C, A/C*T, T)
    return (p @ v).view(B, A, T, K)


# ---- Ring: a window over a stream without end --------------------------------------------------


class Place:
    """The position of B streams in their rings, which all layers share, on the device, so that a
    CUDA graph can advance it.

    Slot j's key is rotated by the angle of position j. With the newest entry in slot h, slots above
    h hold entries older by a full turn: before slot 0 is written again, Ring.turn rotates all keys
    back by W. A key lives for W steps, so no angle exceeds W, and a stream without end stays exact.
    """

    def __init__(self, B: int, W: int, K: int, wide: torch.dtype, device: torch.device):
        self.W = W
        # the newest entry's slot, not yet modulo W, then the number of entries of each stream
        self.place = torch.zeros(1 + B, dtype=torch.int64, device=device)
        self.head, self.count = self.place[:1], self.place[1:]
        like = torch.empty((), dtype=torch.float64, device=device)
        self.rope = torch.stack(rope_table(W + 1, K, like), 1).to(wide)  # (W + 1, 2, K)
        self.slot = torch.arange(W, device=device)
        self.reset()

    def reset(self) -> None:
        """Empty the rings; the next entry goes into slot 0."""
        self.head.fill_(self.W - 1)
        self.count.zero_()

    def advance(self) -> tuple[Tensor, Tensor]:
        """Move on by one slot and return cos and sin (K,) of the new one."""
        self.newest, (cos, sin), self.bias = advance(self.place, self.rope)
        return cos, sin


@fused
def advance(place: Tensor, rope: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Advance `place` (1 + B,) in place. Return the newest slot (1,), its cos and sin (2, K), and
    the bias (B, W) of all slots, -inf where a stream has no entry yet."""
    place.add_(1)
    head, slot = place[:1], torch.arange(len(rope) - 1, device=place.device)
    missing = (head - slot) % len(slot) >= place[1:, None]  # older than the stream
    bias = torch.where(missing, -math.inf, torch.zeros((), dtype=rope.dtype, device=place.device))
    newest = head % len(slot)
    return newest, rope.index_select(0, newest)[0], bias


@dataclass
class Ring:
    """Keys, rotated by their slots, and values of one layer, (N, W, K) each."""

    place: Place
    heads: Heads
    keys: Tensor
    values: Tensor

    def attend(self, q: Tensor, k: Tensor, unrotated: Tensor, v: Tensor) -> Tensor:
        """Store a token's key and value (B, C, K), and attend its queries (B, C M, K) -> (E, B,
        H K)."""
        p = self.place
        return ring_attention(q, k, v, self.keys, self.values, p.newest, p.bias, self.heads)


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
    """Attend a token's queries to a ring, into whose slot `newest` its key and value go first."""
    N, W, K = keys.shape
    B = len(bias)
    keys.index_copy_(1, newest, k.reshape(N, 1, K))
    values.index_copy_(1, newest, v.reshape(N, 1, K))
    scores = torch.bmm(q.reshape(N, -1, K), keys.mT).to(bias.dtype)  # (N, M, W)
    scores = scores.view(B, -1, W) + bias[:, None]
    p = F.softmax(scores, -1).to(keys.dtype).view(N, -1, W)
    return to_experts(torch.bmm(p, values), heads)

"""Caches of keys and values, and attention to them: the argument `cache` of layer.layer.

- `Window`, in training and validation of the recurrent model: a chunk of T tokens in buffers of
  W + T slots, which the token loop (unroll.py) fills one by one;
- `Sequence`, in GPT: whole sequences at once;
- `Ring`, in decoding: W slots for a stream of any length.

Each has `heads` (kernels.Heads) and `attend(q, k, unrotated, v)`, which stores keys and values and
returns the attended values. Queries are already divided by sqrt(K). Keys are passed twice: rotated
by the position of their slot, and unrotated for caches that carry them to another position.

Shapes: B streams, C cache heads, N = B * C, M query heads per cache head, E experts, H query heads
per expert, K head size, W attention window, S slots.
"""

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels import (
    Heads,
    bf16_is_fast,
    fused,
    in_window,
    rope_table,
    rotate,
    to_cache_heads,
    to_experts,
    window_mask,
)

BLOCK = 64  # tokens whose attention reads the same W + BLOCK slots of a Window
GROUP = 8  # tokens whose dK and dV of earlier slots are added by one product
CPU_BF16_IS_FAST = bf16_is_fast('cpu')  # a constant, because compiled functions read it


# ---- Window: a sliding window over a chunk -----------------------------------------------------


class Slots:
    """The layout of the slots, which the windows of all layers share. Slots 0 .. W - 1 hold the
    carried entries, the last `count` (B,) of which are filled (from count = W on, all of them);
    token t has slot W + t and sees slots t + 1 .. W + t. A key is rotated by the number of its
    slot: scores depend only on differences of positions, so that positions need not grow from chunk
    to chunk.

    wide: dtype of everything but matrix products. first_with_grad: the first slot whose entry gets
    a gradient, which is W for a whole chunk, at whose start gradients end, and 0 for a block of a
    chunk (unroll.Block)."""

    def __init__(
        self,
        T: int,
        W: int,
        count: Tensor,
        heads: Heads,
        wide: torch.dtype,
        first_with_grad: int,
    ):
        self.T = T
        self.W = W
        self.count = count
        self.heads = heads
        self.wide = wide
        self.first_with_grad = first_with_grad
        like = torch.empty((), dtype=wide, device=count.device)
        self.cos, self.sin = rope_table(W + T, heads.K, like)  # (S, K)
        # cos and sin (K,) of each token
        self.angles = list(zip(self.cos[W:].unbind(0), self.sin[W:].unbind(0), strict=True))
        self.bias = ()  # of each token of the current block

    def start_block(self, t: int) -> None:
        """Prepare the biases of the n tokens of the block that starts with token t, (B, 1, W + n)
        each: 0 for the slots that a token sees, -inf for the others."""
        n = min(BLOCK, self.T - t)
        seen = window_mask(self.count + t, n, self.W).movedim(2, 0)  # (n, B, 1, W + n)
        bias = torch.zeros(seen.shape, dtype=self.wide, device=seen.device)
        self.bias = bias.masked_fill_(~seen, -math.inf).unbind(0)

    def group_of(self, t: int) -> tuple[int, int, int]:
        """Return the first token of t's block, the first token of t's group, and the end of the
        group: its last token + 1."""
        block = t - t % BLOCK
        group = t - (t - block) % GROUP
        return block, group, min(group + GROUP, block + BLOCK, self.T)


@fused
def store(slot: Tensor, k: Tensor, unrotated: Tensor, v: Tensor) -> None:
    """Copy keys and values (B, C, K) into a slot (3, N, K)."""
    for part, x in zip(slot.unbind(0), (k, unrotated, v), strict=True):
        part.copy_(x.reshape(part.shape))


@fused
def probabilities(scores: Tensor, bias: Tensor) -> Tensor:
    """Return the attention weights of scores (N, M, S), in their dtype; bias (B, 1, S)."""
    B, S = bias.size(0), bias.size(-1)
    biased = scores.to(bias.dtype).view(B, -1, S) + bias  # (B, C M, S)
    return F.softmax(biased, -1).to(scores.dtype).view(scores.shape)


@fused
def scores_backward(dp: Tensor, p: Tensor, wide: torch.dtype) -> Tensor:
    """Return the gradient of the scores from the gradient dp of their softmax p, in p's dtype."""
    ds = torch._softmax_backward_data(dp.to(wide), p.to(wide), -1, wide)
    return ds.to(p.dtype)


class Window:
    """Keys and values of one layer in slots: the cache of layer.layer in training.

    The backward visits tokens in descending order and adds to the gradients `dk` and `dv` of the
    slots in place. It adds to the slots of a token's group of GROUP tokens at once, because the
    tokens that come next need them complete, and to earlier slots by one product per group."""

    def __init__(self, slots: Slots, k: Tensor, v: Tensor):
        """k, v: carried entries (N, W, K), keys not rotated."""
        N, W, K = k.shape
        T = slots.T
        self.slots = slots
        self.heads = slots.heads
        self.t = 0  # the next token
        # One tensor, so that storing a token is one kernel. It starts at zero, because slots that
        # are not filled yet are read with weight 0 and must be finite.
        buffers = k.new_zeros(3, N, W + T, K)
        self.k, self.unrotated, self.v = buffers.unbind(0)
        self.k[:, :W] = rotate(k, slots.cos[:W], slots.sin[:W])
        self.unrotated[:, :W] = k
        self.v[:, :W] = v
        # the slots that a block reads, (N, W + n, K) each, and those that a token writes, (3, N, K)
        spans = [slice(t, W + min(t + BLOCK, T)) for t in range(0, T, BLOCK)]
        self.block_slots = [(self.k[:, span], self.v[:, span]) for span in spans]
        self.token_slots = buffers[:, :, W:].unbind(2)
        # state of the backward
        self.last_backward = 0  # the token whose backward ran last
        self.grads = None  # gradients of the rotated keys and of the values, (2, N, S, K)
        self.dk = self.dv = None  # views of its two halves
        # gradients (2, N, T, K) of the new keys, not rotated, and values, from later blocks of a
        # chunk (unroll.Block)
        self.later_grads = None
        # a group's rows (see `add`) that are not yet added to the slots before the group; in the
        # Triton form [buffers, queries] (triton_kernels.AttendWindow)
        self.pending = []

    def attend(self, q: Tensor, k: Tensor, unrotated: Tensor, v: Tensor) -> Tensor:
        """Store the next token's keys and values, (B, C, K) each, attend from its queries (B, C M,
        K), and return the attended values (E, B, H K)."""
        t = self.t
        self.t += 1
        return WindowAttention.apply(self, t, q, k, unrotated, v)

    def start_backward(self, t: int) -> None:
        """Prepare the backward of token t. Tokens come in descending order: if t is not below the
        previous token, a new backward starts, and its gradients start at zero."""
        if t >= self.last_backward:
            slots = self.slots
            size = (2, *self.k.shape)
            self.grads = torch.zeros(size, dtype=slots.wide, device=self.k.device)
            self.dk, self.dv = self.grads.unbind(0)
            if self.later_grads is not None:
                dk, dv = self.later_grads
                self.dk[:, slots.W :] = rotate(dk, slots.cos[slots.W :], slots.sin[slots.W :])
                self.dv[:, slots.W :] = dv
        self.last_backward = t

    def add(self, first: int, end: int, offset: int, rows: tuple) -> None:
        """Add to the gradients of slots first .. end - 1.

        rows: for one or more tokens, queries (N, tokens * M, K), attention weights and gradients of
        scores (N, tokens * M, slots), whose first column is slot `offset`, and gradients of
        attended values (N, tokens * M, K)."""
        q, p, ds, do = rows
        columns = slice(first - offset, end - offset)
        # not baddbmm_, which would go through the batch of a slice one by one
        self.dk[:, first:end].add_(torch.bmm(ds[..., columns].mT, q))
        self.dv[:, first:end].add_(torch.bmm(p[..., columns].mT, do))

    def add_before_group(self, t: int, offset: int, rows: tuple) -> None:
        """Add the rows of the group that starts with token t to the slots before the group."""
        # no token of the group sees slot t, so its weights are zero; a range of W slots keeps the
        # products aligned
        first = max(self.slots.first_with_grad, t)
        if first < self.slots.W + t:
            self.add(first, self.slots.W + t, offset, rows)


class WindowAttention(torch.autograd.Function):
    """Attention of token t to its window. q (B, C M, K); k, unrotated and v (B, C, K)."""

    @staticmethod
    def forward(ctx, window, t, q, k, unrotated, v):
        store(window.token_slots[t], k, unrotated, v)
        keys, values = window.block_slots[t // BLOCK]  # (N, W + n, K)
        q = q.reshape(len(keys), -1, keys.size(2))  # (N, M, K)
        p = probabilities(torch.bmm(q, keys.mT), window.slots.bias[t % BLOCK])  # (N, M, W + n)
        ctx.window, ctx.t = window, t
        ctx.save_for_backward(q, p)
        return to_experts(torch.bmm(p, values), window.heads)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        window, t = ctx.window, ctx.t
        slots, heads = window.slots, window.heads
        q, p = ctx.saved_tensors
        keys, values = window.block_slots[t // BLOCK]
        window.start_backward(t)
        do = to_cache_heads(grad, heads)  # (N, M, K)
        ds = scores_backward(torch.bmm(do, values.mT), p, slots.wide)  # (N, M, W + n)
        block, group, end = slots.group_of(t)
        rows = (q, p, ds, do)
        window.add(slots.W + group, slots.W + end, block, rows)
        window.pending.append(rows)
        if t == group:
            rows = tuple(torch.cat(x, 1) for x in zip(*window.pending, strict=True))
            window.add_before_group(t, block, rows)
            window.pending.clear()
        dq = torch.bmm(ds, keys).view(len(slots.count), -1, heads.K)
        # complete: all tokens that see this slot have had their backward
        grads = window.grads[:, :, slots.W + t].to(q.dtype)  # (2, N, K)
        dk, dv = grads.view(2, -1, heads.C, heads.K).unbind(0)
        return None, None, dq, dk, None, dv


# ---- Sequence: whole sequences at once ---------------------------------------------------------


class Band(NamedTuple):
    """The mask of kernels.window_mask in the form that flex_attention takes, which skips blocks of
    scores outside the window. flex_attention is imported where it is used, because the import takes
    seconds and 150 MB."""

    blocks: object  # flex_attention's BlockMask: token t sees slots t + 1 .. t + W
    first: Tensor  # (B,): the first filled slot


@functools.cache
def band_blocks(T: int, W: int, device: torch.device) -> object:
    """Return the blocks of a Band of T tokens over W cached and T new slots."""
    from torch.nn.attention.flex_attention import create_block_mask

    def seen(b, h, t, slot):
        return in_window(t, slot, W)

    return create_block_mask(seen, None, None, T, W + T, device)


def band_attention(q: Tensor, k: Tensor, v: Tensor, band: Band) -> Tensor:
    """Attend in a sliding window at a cost of O(T W). Only for compiled callers on a GPU."""
    from torch.nn.attention.flex_attention import flex_attention

    def filled(score, b, h, t, slot):
        return torch.where(slot >= band.first[b], score, -math.inf)

    gqa = q.size(1) != k.size(1)
    return flex_attention(
        q, k, v, score_mod=filled, block_mask=band.blocks, scale=1.0, enable_gqa=gqa
    )


@dataclass
class Sequence:
    """Keys and values of one layer for whole sequences: the cache of layer.layer in GPT."""

    B: int
    T: int
    heads: Heads
    past: tuple[Tensor, Tensor] | None  # cached keys, rotated, and values (B, C, W, K)
    mask: Tensor | Band | None  # (B, 1, T, W + T) bool; None: causal
    new: tuple = (None, None)  # after `attend`: its keys, not rotated, and values (B, C, T, K)

    def attend(self, q: Tensor, k: Tensor, unrotated: Tensor, v: Tensor) -> Tensor:
        """Attend from queries (B T, C M, K) to the cached and the new keys and values (B T, C, K),
        and return the attended values (E, B T, H K)."""
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
    """Return the attended values (B, A, T, K) of queries q (B, A, T, K) over k and v (B, C, S, K),
    with A / C query heads per key-value head. Scores are not scaled. mask = None is causal."""
    B, A, T, K = q.shape
    C = k.size(1)
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
    short_in_bf16 = mask is None and T <= 512 and q.dtype == torch.bfloat16
    if not (short_in_bf16 and CPU_BF16_IS_FAST):
        return sdpa(q, k, v)
    # Two plain products and a softmax are then faster than the fused kernel (LOG.md).
    future = q.new_full((T, T), -math.inf).triu(1).repeat(A // C, 1)
    q, k, v = (x.reshape(B * C, -1, K) for x in (q, k, v))
    p = F.softmax(torch.baddbmm(future, q, k.mT), -1)  # (B*C, A/C*T, T)
    return (p @ v).view(B, A, T, K)


# ---- Ring: a window over a stream of any length ------------------------------------------------


class RingPosition:
    """The position of B streams in their rings, which all layers share. It is on the device, so
    that a CUDA graph can advance it.

    A new key in slot j is rotated by position j. Before slot 0 is written again, Decoder.step
    rotates all keys back by W: the keys of the last turn then have positions -W .. -1. A key is
    overwritten after W steps, so no angle exceeds W, and streams of any length stay exact."""

    def __init__(self, B: int, W: int, K: int, wide: torch.dtype, device: torch.device):
        self.W = W
        # [head, count of each stream]: the newest entry is in slot head % W; count is the number of
        # entries so far
        self.counters = torch.zeros(1 + B, dtype=torch.int64, device=device)
        self.head, self.count = self.counters[:1], self.counters[1:]
        like = torch.empty((), dtype=torch.float64)  # on the CPU: Apple's GPUs have no float64
        self.rope = torch.stack(rope_table(W + 1, K, like), 1).to(device, wide)  # (W + 1, 2, K)
        self.slot = torch.arange(W, device=device)
        self.newest = self.bias = None  # of the current token, set by `advance`
        self.reset()

    def reset(self) -> None:
        """Empty the rings; the next entry goes into slot 0."""
        self.head.fill_(self.W - 1)
        self.count.zero_()

    def advance(self) -> tuple[Tensor, Tensor]:
        """Advance to the next slot and return its cos and sin (K,)."""
        self.newest, (cos, sin), self.bias = next_slot(self.counters, self.rope)
        return cos, sin


@fused
def next_slot(counters: Tensor, rope: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Add 1 to all counters (1 + B,), in place. Return the newest slot (1,), its cos and sin (2,
    K), and the bias (B, W) of all slots: 0, or -inf where a stream has no entry yet."""
    counters.add_(1)
    head, count = counters[:1], counters[1:]
    W = len(rope) - 1
    age = (head - torch.arange(W, device=head.device)) % W  # 0 for the newest slot
    zero = torch.zeros((), dtype=rope.dtype, device=head.device)
    bias = torch.where(age >= count[:, None], -math.inf, zero)  # (B, W)
    newest = head % W
    return newest, rope.index_select(0, newest)[0], bias


@dataclass
class Ring:
    """Keys, rotated by their slots, and values of one layer, (N, W, K) each."""

    position: RingPosition
    heads: Heads
    keys: Tensor
    values: Tensor

    def attend(self, q: Tensor, k: Tensor, unrotated: Tensor, v: Tensor) -> Tensor:
        """Store a token's keys and values (B, C, K), attend from its queries (B, C M, K), and
        return the attended values (E, B, H K)."""
        newest, bias = self.position.newest, self.position.bias
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

"""Fused batched-expert operations: Triton kernels, and what each of them replaces.

They were written for Hopper GPUs: operands in bf16, sums and norms in fp32. Three functions of
model.py have an override: `attend` (norm, RoPE, cache and attention in one kernel), `experts` (the
output projection, the FFN and the aggregation of all experts) and `slice_loss` (soft-cap, loss and
gradient). overrides.py decides which are used. With TRITON_INTERPRET=1 in the environment the
kernels run on the CPU, in fp32, because the interpreter's bf16 product is wrong.

Shapes as in model.py, except that N = B * C counts the cache heads of all streams (in `product`, N
is the number of output features). A row of qkv holds queries (C, M, K), keys (C, K) and values (C,
K). A chunk of T tokens has S = W + T slots as in unroll.CacheLayout: 0 .. W - 1 are carried entries
(those below W - count are empty); token t has slot W + t and sees the last `width` slots up to its
own. No function here waits for the device. The token t and the first token of its group are
integers on which no kernel is specialized, so that a loop over tokens compiles once.

In a kernel, as in NumPy, x[:, None] is a column, and a vector beside a tile (rows, columns) is a
row.
"""

import copy
import functools
import math
from collections import namedtuple
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton.language import constexpr

import decode
import model
import ops
import unroll
from decode import RingCache
from ops import Heads, Linear, gate_weights
from support import compiling
from support.compiling import fused
from support.random_states import continuing_from, get_random_states, randomize
from unroll import ChunkCache, DeferredLinear

EPS = constexpr(ops.EPS)
SOFTCAP = constexpr(model.SOFTCAP)
F32 = constexpr(tl.float32)
LOG2E = constexpr(math.log2(math.e))  # the hardware's exponential is base 2
H100_SMS = 132


@triton.constexpr_function
def padded(n: int, least: int = 16) -> int:
    """Return the size of a tile that holds n elements: a power of two, and by default at least 16,
    the smallest that tensor cores multiply."""
    return max(least, triton.next_power_of_2(n))


# ---- attention ---------------------------------------------------------------------------------

# The fields of ops.Heads; its properties C and M, because a kernel sees fields only; BS, the
# slots per step of a kernel's loop.
Sizes = namedtuple('Sizes', (*Heads._fields, 'C', 'M', 'BS'))


@triton.jit
def _tile(h: constexpr):
    """Lay out a cache head's queries as a tile (queries, columns). Each half of the columns is
    padded, because RoPE pairs dimension j with j + K/2. Returns the numbers of the queries; each
    column's offset in a head, the offset of its RoPE partner, and whether the column is in the head
    rather than padding; and whether each element of the tile is."""
    P: constexpr = padded(h.K // 2)
    m = tl.arange(0, padded(h.M))
    half = tl.arange(0, 2 * P) // P
    j = tl.arange(0, 2 * P) % P
    real = j < h.K // 2
    own = half * (h.K // 2) + j
    return m, own, (1 - half) * (h.K // 2) + j, real, (m < h.M)[:, None] & real[None, :]


@triton.jit
def _by_expert(b, c, m, h: constexpr):
    """Return the offsets (M, 1) of query heads m of stream b and cache head c in a tensor (E, B,
    G*R*K)."""
    if h.shared:
        e = m // h.R
        head = c * h.R + m % h.R
    else:
        e = c // h.G + m * 0
        head = c % h.G * h.R + m
    return (((e * tl.num_programs(1) + b) * (h.G * h.R) + head) * h.K)[:, None]  # b has 64 bits


@triton.jit
def _normed(row, col, other, mask, K: constexpr):
    """Return heads of a row after the norm, their RoPE partners, both in fp32, and the factors of
    the norms. col, other: offsets of the columns and of their partners."""
    x = tl.load(row + col, mask, 0.0).to(F32)
    r = tl.rsqrt(tl.sum(x * x, len(x.shape) - 1, keep_dims=True) / K + EPS)
    return x * r, tl.load(row + other, mask, 0.0).to(F32) * r, r


@triton.jit
def _token(qkv, b, c, cos, sin, h: constexpr):
    """Read the heads of stream b and cache head c. Returns queries and key after norm and RoPE, the
    key before RoPE, the value, the factors of both norms, and the angles. cos, sin: pointers to the
    angles."""
    K: constexpr = h.K
    dt = qkv.dtype.element_ty
    m, col, other, real, mask = _tile(h)
    cos = tl.load(cos + col, real, 0.0)
    sin = tl.load(sin + col, real, 0.0)
    qkv += b * ((h.M + 2) * h.C * K)
    q, pair, r_q = _normed(qkv + (c * h.M + m[:, None]) * K, col, other, mask, K)
    q = (q * cos + pair * sin).to(dt)
    row = qkv + (h.C * h.M + c) * K
    kn, pair, r_k = _normed(row, col, other, real, K)
    kn = kn.to(dt)  # rounded as in the cache
    k = (kn.to(F32) * cos + pair.to(dt).to(F32) * sin).to(dt)
    v = tl.load(row + h.C * K + col, real, 0.0)
    return q, k, kn, v, r_q, r_k, cos, sin


@triton.jit
def _weights(q, keys, values, n, seen, top, scale, h: constexpr):
    """Return keys and values of slots n, and their weights exp(score - top), zero where not seen.
    top is in units of log 2."""
    _, col, _, real, _ = _tile(h)
    at = n[:, None] * h.K + col
    mask = seen[:, None] & real[None, :]
    k = tl.load(keys + at, mask, 0.0)
    v = tl.load(values + at, mask, 0.0)
    score = tl.dot(q, tl.trans(k), input_precision='ieee') * (scale * LOG2E)
    return k, v, tl.where(seen[None, :], tl.exp2(score - top[:, None]), 0.0)


# For one token: norm of queries and key, RoPE, store into the cache and attention, in one pass over
# the window. PyTorch takes a dozen launches, and scores go through memory. One program handles
# a cache head of a stream with all its M query heads, so that a key is read once. The key of the
# token itself is used from registers, so its store needs no barrier. The softmax subtracts its
# score instead of the maximum: scores of normalized vectors lie within +-sqrt(K), and no
# exponential overflows in fp32.
#
# The cache is the ChunkCache of a chunk, or a RingCache of W slots, whose `head` is not None. A
# CUDA graph replays the latter, so its newest slot is read from memory (decode.RingPosition). Its
# slots are visited in the order of memory; a slot's age decides whether it is seen.
#
# With `totals`, each of several programs reads a part of a ring, and _combine adds their sums.
@triton.jit(do_not_specialize=['t'])
def _attention_kernel(qkv, cache, out, totals, t, W, width, S, scale, h: constexpr):
    keys, values, count, cos, sin, angle_stride, unrotated, lse, head = cache
    BS: constexpr = h.BS
    c = tl.program_id(0)
    b = tl.program_id(1).to(tl.int64)
    m, col, _, real, mask = _tile(h)
    count = tl.minimum(tl.load(count + b), W).to(tl.int32)  # of an endless stream it needs 64 bits
    if head is None:
        slot = W + t
        first = tl.maximum(slot + 1 - width, W - count)
        end = slot
    else:
        slot = (tl.load(head) % W).to(tl.int32)
        first = 0
        end = W
    if totals is not None:
        part = tl.program_id(2)
        steps = tl.cdiv(tl.cdiv(W, BS), tl.num_programs(2))
        first = part * steps * BS
        end = tl.minimum(first + steps * BS, W)
        # The first part stores the token, and counts it. The interpreter of Triton 3.9 takes no
        # mask that was combined with a scalar.
        real = real & (col < tl.where(part == 0, h.K, 0))
    angle = slot * angle_stride
    q, k, kn, v, _, _, _, _ = _token(qkv, b, c, cos + angle, sin + angle, h)
    window = (b * h.C + c) * S * h.K  # 64 bits; offsets within a window have 32
    new = slot * h.K + col
    keys += window
    values += window
    tl.store(keys + new, k, real)
    tl.store(values + new, v, real)
    if head is None:
        tl.store(unrotated + window + new, kn, real)

    top = tl.sum(q.to(F32) * k.to(F32), 1) * (scale * LOG2E)
    # weights, summed over the steps of the loop and over neighbors, which one thread holds
    parts = tl.zeros([padded(h.M), BS // 2], F32)
    o = tl.zeros(q.shape, F32) + v.to(F32)  # the token itself has weight exp(0)
    if totals is not None:
        o = tl.where(part == 0, o, 0.0)
    for start in range(first, end, BS):
        n = start + tl.arange(0, BS)
        seen = n < end
        if head is not None:
            age = slot - n + tl.where(n > slot, W, 0)
            seen = seen & (age > 0) & (age < tl.minimum(count, width))
        _k, old, p = _weights(q, keys, values, n, seen, top, scale, h)
        o = tl.dot(p.to(q.dtype), old, o, input_precision='ieee')
        parts += tl.sum(tl.reshape(p, (padded(h.M), BS // 2, 2)), 2)
    total = 1 + tl.sum(parts, 1)
    if totals is not None:
        at = _by_expert(b, c, m, h) + col
        at += part * (h.E * h.G * h.R * h.K * tl.num_programs(1))
        total -= tl.where(part == 0, 0.0, 1.0)
        tl.store(totals + at, total[:, None] + tl.zeros_like(o), mask)
        tl.store(out + at, o, mask)
    else:
        tl.store(out + _by_expert(b, c, m, h) + col, o / total[:, None], mask)
    if head is None:
        tl.store(lse + (b * h.C + c) * h.M + m, top + tl.log2(total), m < h.M)


@triton.jit
def _probabilities(q, do, lse, delta, keys, values, n, seen, scale, h: constexpr):
    """Return the attention weights of slots n, the gradient of their scores, both zero where not
    seen, and their keys. delta: the sum of do * o."""
    k, v, p = _weights(q, keys, values, n, seen, lse, scale, h)
    ds = p * (tl.dot(do, tl.trans(v), input_precision='ieee') - delta[:, None]) * scale
    return p.to(q.dtype), ds.to(q.dtype), k


@triton.jit
def _add_rows(grads, mask, weights, rows, is_token):
    """Add weights^T rows to the gradients of slots, and return the gradient of the token's slot."""
    g = tl.dot(tl.trans(weights), rows, tl.load(grads, mask, 0.0), input_precision='ieee')
    tl.store(grads, g, mask)
    return tl.sum(tl.where(is_token[:, None], g, 0.0), 0)


@triton.jit
def _before_norm(g, x, r, cos, sin, K: constexpr):
    """Return the gradient of `input` from the gradient g of x = RoPE(norm(input)), (rows, columns).
    r: the factors of the norm. A rotation keeps lengths, so the norm's backward may come first."""
    x = x.to(F32)
    g = r * (g - x * (tl.sum(g * x, 1) / K)[:, None])
    halves = tl.reshape(g, (g.shape[0], 2, padded(K // 2)))
    g1, g2 = tl.split(tl.trans(halves, 0, 2, 1))
    pair = tl.reshape(tl.trans(tl.join(g2, g1), 0, 2, 1), g.shape)
    return g * cos - pair * sin


# The backward recomputes the attention weights from the log-sum-exp, and takes the gradients of
# queries, keys and values back through RoPE and the norms into the row of dqkv. Adding to dk and dv
# over the whole window in fp32 would be the largest traffic of the loop. So this kernel adds only
# to the slots of the token's group of F tokens, which the next tokens of the backward need at once.
# For earlier slots it stores p and ds, 2 * M * S numbers per token instead of 2 * S * K, and one
# product per group adds them (unroll.ChunkCache.add_before_group).
#
# first_stored: None, or the first slot of which p and ds are stored.
@triton.jit(do_not_specialize=['t', 'group'])
def _attention_backward_kernel(
    datt,
    saved,
    cache,
    grads,
    rows,
    dqkv,
    t,
    group,
    W,
    width,
    S,
    F,
    first_stored,
    scale,
    h: constexpr,
):
    qkv, att, lse = saved
    keys, values, count, cos, sin = cache
    dk, dv = grads
    Q, P, DS, DO = rows
    K: constexpr = h.K
    c = tl.program_id(0)
    b = tl.program_id(1).to(tl.int64)
    m, col, _, real, mask = _tile(h)
    head = b * h.C + c
    slot = W + t
    cos += slot * K
    sin += slot * K
    q = _token(qkv, b, c, cos, sin, h)[0]
    window = head * S * K  # the first slot of this head
    keys += window
    values += window
    dk += window
    dv += window
    at = _by_expert(b, c, m, h) + col
    do = tl.load(datt + at, mask, 0.0)
    o = tl.load(att + at, mask, 0.0)
    row = (head * F + (t - group)) * h.M + m[:, None]  # this token's, in Q, P, DS and DO
    tl.store(Q + row * K + col, q, mask)
    tl.store(DO + row * K + col, do, mask)
    delta = tl.sum(do.to(F32) * o.to(F32), 1)
    lse = tl.load(lse + head * h.M + m, m < h.M, 0.0)
    first = tl.maximum(slot + 1 - width, W - tl.load(count + b).to(tl.int32))
    dq = tl.zeros(q.shape, F32)

    # Slots before the group. The start is a multiple of 8, so that stores are wide. So zeros
    # are stored for up to 7 slots before those that the group reads; nothing reads them.
    for start in range((W - width + group) // 8 * 8, W + group, h.BS):
        n = start + tl.arange(0, h.BS)
        seen = (n >= first) & (n < W + group)
        p, ds, old = _probabilities(q, do, lse, delta, keys, values, n, seen, scale, h)
        inside = (m < h.M)[:, None] & (n < S)[None, :]
        if first_stored is not None:
            inside = inside & (n >= first_stored)[None, :]
        tl.store(P + row * S + n, p, inside)
        tl.store(DS + row * S + n, ds, inside)
        dq = tl.dot(ds, old, dq, input_precision='ieee')

    # slots of the group up to the token's; the sums at the token's slot are complete after this
    # (one step, so that the stages of longer windows would only cost registers)
    dk_token = tl.zeros(col.shape, F32)
    dv_token = tl.zeros(col.shape, F32)
    for start in tl.range(W + group, slot + 1, 16, num_stages=2):
        n = start + tl.arange(0, 16)
        seen = (n >= first) & (n <= slot)
        p, ds, old = _probabilities(q, do, lse, delta, keys, values, n, seen, scale, h)
        offsets = n[:, None] * K + col
        inside = (n <= slot)[:, None] & real[None, :]
        dk_token += _add_rows(dk + offsets, inside, ds, q, n == slot)
        dv_token += _add_rows(dv + offsets, inside, p, do, n == slot)
        dq = tl.dot(ds, old, dq, input_precision='ieee')

    # read again, because registers are scarce in the loops
    q, k, _, _, r_q, r_k, cos, sin = _token(qkv, b, c, cos, sin, h)
    dqkv += b * ((h.M + 2) * h.C * K) + col
    tl.store(dqkv + (c * h.M + m[:, None]) * K, _before_norm(dq, q, r_q, cos, sin, K), mask)
    dqkv += (h.C * h.M + c) * K
    dk_row = _before_norm(dk_token[None, :], k[None, :], r_k, cos, sin, K)
    tl.store(dqkv[None, :], dk_row, real[None, :])
    tl.store(dqkv + h.C * K, dv_token, real)


def _launch(kernel, h: Heads, B: int, width: int, parts: int = 1) -> Callable:
    """Return an attention kernel ready to launch for these sizes, with one program per cache head,
    stream and part of the window."""
    # More stages hide the latency of more steps, but take shared memory, of which two programs on
    # one SM get half each.
    if width <= 128:  # two steps
        stages = 2
    elif B * h.C > H100_SMS:
        stages = 3
    else:
        stages = 4
    sizes = Sizes(**h._asdict(), C=h.C, M=h.M, BS=min(64, padded(width)))
    # Four warps have too few registers for the queries of more than 32 heads.
    options = {'num_warps': 8 if h.M > 32 else 4, 'num_stages': stages}
    return functools.partial(kernel[h.C, B, parts], scale=1 / math.sqrt(h.K), h=sizes, **options)


class AttendWindow(torch.autograd.Function):
    """Compute model.attend with a ChunkCache for token t: norm, RoPE, store and attention, in one
    kernel in the forward and one in the backward."""

    @staticmethod
    def forward(ctx, cache, t, qkv):
        layout, h = cache.layout, cache.heads
        N, S, _ = cache.k.shape
        out = qkv.new_empty(h.E, len(qkv), h.G * h.R * h.K)
        lse = qkv.new_empty(N, h.M, dtype=layout.state_dtype)  # log2 of the sum of exponentials
        angles = (layout.cos, layout.sin, h.K)
        arrays = (cache.k, cache.v, layout.count, *angles, cache.unrotated, lse, None)
        run = _launch(_attention_kernel, h, len(qkv), cache.width)
        run(qkv, arrays, out, None, t, layout.W, cache.width, S)
        ctx.cache, ctx.t = cache, t
        ctx.save_for_backward(qkv, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, datt):
        cache, t = ctx.cache, ctx.t
        layout, h = cache.layout, cache.heads
        qkv, out, lse = ctx.saved_tensors
        N, S, K = cache.k.shape
        F = unroll.GROUP
        cache.start_backward(t)
        _, group, end = layout.group_of(t)
        # Queries, weights, gradients of scores and of attended values (ChunkCache.add) of the group
        # so far, in buffers that the kernel fills token by token.
        if not cache.pending:
            cache.pending = [qkv.new_empty(N, F, h.M, columns) for columns in (K, S, S, K)]
        dqkv = torch.empty_like(qkv)
        arrays = (cache.k, cache.v, layout.count, layout.cos, layout.sin)
        run = _launch(_attention_backward_kernel, h, len(qkv), cache.width)
        run(
            datt.contiguous(),
            (qkv, out, lse),
            arrays,
            tuple(cache.grads),
            tuple(cache.pending),
            dqkv,
            t,
            group,
            layout.W,
            cache.width,
            S,
            F,
            layout.first_with_grad if 'stores' in compiling.candidates else None,
        )
        if t == group:
            rows = [x[:, : end - group].flatten(1, 2) for x in cache.pending]
            cache.add_before_group(t, 0, rows)
            cache.pending = []
        return None, None, dqkv


def attend(qkv: Tensor, cache: object) -> Tensor:
    """Compute model.attend with a ChunkCache or a RingCache; return NotImplemented for another
    cache."""
    if isinstance(cache, ChunkCache):
        t = cache.t
        cache.t += 1
        return AttendWindow.apply(cache, t, qkv)
    if not isinstance(cache, RingCache):
        return NotImplemented
    h, position = cache.heads, cache.position
    W = position.W
    out = qkv.new_empty(h.E, len(qkv), h.G * h.R * h.K)
    angles = (*position.rope.unbind(1), 2 * h.K)
    ring = (cache.keys, cache.values, position.count, *angles, None, None, position.head)
    parts = min(W // 128, H100_SMS // (h.C * len(qkv)))
    if 'split' in compiling.candidates and len(qkv) < 8 and parts > 1:
        sums = out.new_empty(2, parts, *out.shape, dtype=position.rope.dtype)
        run = _launch(_attention_kernel, h, len(qkv), W, parts)
        run(qkv, ring, *sums, 0, W, cache.width, W)
        return _combine(*sums, out.dtype)
    _launch(_attention_kernel, h, len(qkv), W)(qkv, ring, out, None, 0, W, cache.width, W)
    return out


@fused
def _combine(out: Tensor, totals: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the attended values from weighted sums of values and from sums of weights, both
    (parts, E, B, H K)."""
    return (out.sum(0) / totals.sum(0)).to(dtype)


# ---- the experts' products, fused with the operations around them ------------------------------


@triton.jit
def _factor(ss, rows, real, D: constexpr, P: constexpr):
    """Return the RMSNorm's factors of rows of length D from partial sums of their squares, ss (...,
    P)."""
    p = tl.arange(0, padded(P, 1))
    parts = tl.load(ss + rows[:, None] * P + p, real[:, None] & (p < P)[None, :], 0.0)
    return tl.rsqrt(tl.sum(parts, 1) / D + EPS)


# Each expert's x @ w together with the operations before and after it, so that neither is a pass
# over memory. A residual is added while y is in fp32 registers, and the sums of squares for the
# next norm are taken there, one partial sum per tile of columns (atomics would add in no fixed
# order). A norm before the product gets its factors r from those sums. Each tile of columns then
# reads y in fp32, twice the bytes of bf16, which is cheap while one tile holds all rows and most
# traffic is weights.
#
# Computes x @ w for x (B, K) and w (K, N). A program computes a tile (BM, BN) in steps of BK. P:
# partial sums of squares per row; normed, after: see `product`.
@triton.jit
def _expert_kernel(
    x,
    w,
    beside,
    out,
    ss,
    f,
    r,
    B,
    strides,
    K: constexpr,
    N: constexpr,
    P: constexpr,
    BM: constexpr,
    BN: constexpr,
    BK: constexpr,
    normed: constexpr,
    after: constexpr,
):
    w_e, w_n, w_k, beside_e = strides
    e = tl.program_id(2).to(tl.int64)
    # tiles of rows are neighbors, so that they share a tile of weights in L2
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    stored = rows < tl.where(tl.program_id(1) == 0, B, 0)  # the first tile of columns stores norms
    x += e * B * K
    if normed:
        factor = _factor(ss, e * B + rows, rows < B, K, P)
        tl.store(r + e * B + rows, factor, stored)
        f += e * B * K
    acc = tl.full((BM, BN), 0.0, F32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        at = rows[:, None] * K + k
        mask = (rows < B)[:, None] & (k < K)[None, :]
        a = tl.load(x + at, mask, 0.0)
        if normed:
            a = (a * factor[:, None]).to(w.dtype.element_ty)
            tl.store(f + at, a, mask & stored[:, None])
        weights = w + e * w_e + cols * w_n + k[:, None] * w_k
        b = tl.load(weights, (k < K)[:, None] & (cols < N)[None, :], 0.0)
        acc = tl.dot(a, b, acc, input_precision='ieee')
    at = rows[:, None] * N + cols
    mask = (rows < B)[:, None] & (cols < N)[None, :]
    if after == 'relu':
        acc = tl.maximum(acc, 0.0) * tl.maximum(acc, 0.0)
    else:
        other = tl.load(beside + e * beside_e + at, mask, 0.0).to(F32)
        acc = acc + other if after == 'add' else acc * 2 * tl.sqrt(other)
    tl.store(out + e * B * N + at, acc, mask)
    if after == 'add':
        tl.store(ss + (e * B + rows) * P + tl.program_id(1), tl.sum(acc * acc, 1), rows < B)


def product(
    x: Tensor, w: Tensor, after: str, beside: Tensor | None = None, ss: Tensor | None = None
) -> tuple[Tensor | None, ...]:
    """Compute after(x @ w^T), (E, B, N), for x (E, B, K) and w (E, N, K), or after(norm(x) @ w^T)
    if ss (E, B, P), partial sums of the squares of x, is given.

    after: 'relu' squares the positive part, 'times' is its backward, which multiplies by 2
    sqrt(beside), and 'add' adds beside; beside: (E, B, N), or (B, N) for all experts. Returns the
    result; after 'add' its partial sums of squares, otherwise `ss`; and norm(x) in the dtype of w
    and its factors (E, B, 1), or None twice."""
    E, B, K = x.shape
    N = w.size(1)
    # Up to 128 rows are one tile, so that weights are read once. Of the widths of a tile, take the
    # widest that leaves about one program per SM.
    BM = min(128, padded(B))
    BN = 128
    while BN > 32 and E * triton.cdiv(B, BM) * triton.cdiv(N, BN) < 128:
        BN //= 2
    bytes_per_row = 256 if BM <= 32 else 128  # of a step's tile of x or of weights
    BK = min(bytes_per_row // w.element_size(), padded(K))
    warps, stages = (8, 3) if BM * BN >= 128 * 128 else (4, 4)
    if 'tile' in compiling.candidates and after == 'add' and warps == 8:
        BN, warps, stages = 64, 4, 3  # 3 programs per SM instead of 1
    f = r = None
    normed = ss is not None and B <= 128
    if normed:
        f, r = w.new_empty(x.shape), x.new_empty(E, B, 1)
    elif ss is not None:  # a pass over x is cheaper than a norm in every tile of columns
        _, f, r = norm_sum(x, ss, w.dtype)
        x = f
    out = (beside if after == 'add' else w).new_empty(E, B, N)
    if after == 'add':
        ss = out.new_empty(E, B, triton.cdiv(N, BN))
    P = 0 if ss is None else ss.size(2)
    beside_stride = 0 if beside is None or beside.dim() == 2 else B * N  # of experts
    strides = (*w.stride(), beside_stride)
    run = _expert_kernel[triton.cdiv(B, BM), triton.cdiv(N, BN), E]
    tile = {'BM': BM, 'BN': BN, 'BK': BK, 'num_warps': warps, 'num_stages': stages}
    run(x, w, beside, out, ss, f, r, B, strides, K, N, P, normed=normed, after=after, **tile)
    return out, ss, f, r


# Each expert's norm and the weighted sum over experts in one read of x. A program holds a slice of
# BD columns of all experts of one stream, so that their loads are in flight together.
@triton.jit
def _norm_sum_kernel(
    x,
    ss,
    coef,
    s,
    h,
    r,
    B,
    coef_e,
    coef_b,
    E: constexpr,
    D: constexpr,
    P: constexpr,
    BD: constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, padded(E, 1)).to(tl.int64)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    at = (e * B + b)[:, None] * D + d
    mask = (e < E)[:, None] & (d < D)[None, :]
    factor = _factor(ss, e * B + b, e < E, D, P)
    hat = tl.load(x + at, mask, 0.0) * factor[:, None]
    tl.store(r + e * B + b, factor, e < tl.where(tl.program_id(1) == 0, E, 0))
    tl.store(h + at, hat, mask)
    if s is not None:
        weight = tl.load(coef + e * coef_e + b * coef_b, e < E, 0.0)
        tl.store(s + b * D + d, tl.sum(weight[:, None] * hat, 0), d < D)


def norm_sum(
    x: Tensor, ss: Tensor, dtype: torch.dtype, coef: Tensor | None = None
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Normalize x (E, B, D), whose partial sums of squares are ss (E, B, P). Return the sum over
    experts of coef * norm(x), (B, D); norm(x) in `dtype`; and its factors (E, B, 1). coef: (E, B,
    1) or 0-dim; without it the sum is None."""
    E, B, D = x.shape
    # at most 4,096 elements per program, over all experts
    BD = min(128 if B <= 64 else 256, max(16, 4096 // padded(E, 1)), padded(D))
    h, r = torch.empty_like(x, dtype=dtype), x.new_empty(E, B, 1)
    s = None
    coef_e = coef_b = 0
    if coef is not None:
        s = x.new_empty(B, D)
        coef_e, coef_b, _ = coef.expand(E, B, 1).stride()
    run = _norm_sum_kernel[B, triton.cdiv(D, BD)]
    run(x, ss, coef, s, h, r, B, coef_e, coef_b, E, D, ss.size(2), BD)
    return s, h, r


# ---- model.experts as a whole ------------------------------------------------------------------


def _norm_backward(g: Tensor, x_hat: Tensor, r: Tensor) -> Tensor:
    """Return the gradient of x from the gradient g of x_hat = norm(x) = x * r."""
    x_hat = x_hat.to(g.dtype)
    return r * (g - x_hat * (g * x_hat).mean(-1, keepdim=True))


@fused
def _output_backward(ds: Tensor, coef: Tensor, h: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of x in s = sum(coef * norm(x)) from the gradient ds, where h = norm(x);
    and the same rounded to the dtype of h."""
    dx = _norm_backward(coef * ds, h, r)
    return dx, dx.to(h.dtype)


@fused
def _input_backward(
    dx: Tensor, dact: Tensor, r: Tensor, f: Tensor, wo: Tensor, up: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of u, of y = u + wo attended (rounded to the dtype of wo), and of
    `attended`. dx: the part of y's gradient that comes through the residual; dact: the gradient of
    up norm(y); f, r: norm(y) and its factors."""
    dy = dx + _norm_backward(torch.bmm(dact, up).to(dx.dtype), f, r)
    low = dy.to(wo.dtype)
    return dy.sum(0), low, torch.bmm(low, wo)


class Experts(torch.autograd.Function):
    """Compute s = sum over experts of coef * norm(x), where x = y + down relu(up norm(y))^2 and y =
    u + wo attended.

    wo, up and down are DeferredLinears, in which the backward records inputs and gradients; where
    no gradient is wanted, they may be Linears."""

    @staticmethod
    def forward(ctx, linears, u, attended, coef):
        wo, up, down = linears
        y, ss, _, _ = product(attended, wo.w, 'add', u)
        act, _, f, ry = product(y, up.w, 'relu', ss=ss)
        x, ss, _, _ = product(act, down.w, 'add', y)
        s, h, rx = norm_sum(x, ss, f.dtype, coef)
        ctx.linears = linears
        ctx.save_for_backward(attended, coef, act, f, ry, h, rx)
        return s

    @staticmethod
    @once_differentiable
    def backward(ctx, ds):
        wo, up, down = ctx.linears
        attended, coef, act, f, ry, h, rx = ctx.saved_tensors
        dx, dx_low = _output_backward(ds, coef, h, rx)
        dact, _, _, _ = product(dx_low, down.w.mT, 'times', act)
        du, dy, dattended = _input_backward(dx, dact, ry, f, wo.w, up.w)
        for linear, x, grad in ((down, act, dx_low), (up, f, dact), (wo, attended, dy)):
            if linear.weight.requires_grad:
                # detached, or autograd's graph would hold itself if the backward is interrupted
                linear.record(x.detach(), grad)
        dcoef = (h * ds).sum(-1, keepdim=True).to(ds.dtype) if ctx.needs_input_grad[3] else None
        return None, du, dattended, dcoef


@functools.cache  # one tensor for all tokens: filling it would be a kernel per token
@torch.inference_mode(False)  # a backward may save it
def _constant_coef(E: int, aggregation: str, device: torch.device) -> Tensor:
    """Return the coefficient () of each expert's output in the aggregation 'sqrt_sum' or 'mean'."""
    return torch.full((), E**-0.5 if aggregation == 'sqrt_sum' else 1 / E, device=device)


def experts(
    w: model.LayerWeights, u: Tensor, attended: Tensor, gates: Tensor | None, config: object
) -> Tensor:
    """Compute model.experts. In the recurrent model the kernels do all of it; in GPT the first two
    products and the operations around them, without a backward. Returns NotImplemented where
    gradients are wanted that the kernels do not compute."""
    differentiable = w.recurrent and isinstance(w.up, DeferredLinear)
    if torch.is_grad_enabled() and not differentiable:
        return NotImplemented
    attended = attended.contiguous()
    if not w.recurrent:
        y, ss, _, _ = product(attended, w.wo.w, 'add', u)
        act, _, _, _ = product(y, w.up.w, 'relu', ss=ss)
        return model.combine_experts(y, w.down(act), u, gates, config.aggregation, config.residual)
    if gates is None:
        coef = _constant_coef(len(w.up.w), config.aggregation, u.device)
    else:
        coef = gate_weights(gates, config.aggregation).t()[..., None]  # (E, B, 1)
    return Experts.apply((w.wo, w.up, w.down), u, attended, coef)


# ---- loss --------------------------------------------------------------------------------------


@triton.jit
def _capped(logits, mask):
    """Load logits, and return tanh(logit / SOFTCAP)."""
    return 1 - 2 / (tl.exp(tl.load(logits, mask, 0.0).to(F32) * (2 / SOFTCAP)) + 1)


# Soft-cap, log-sum-exp, the target's score and the gradient, in two reads and one write of a row;
# compiled PyTorch takes eight passes in fp32. Capped scores lie in [-15, 15]: exp(score - 15) can
# neither overflow nor vanish, so no maximum is needed first.
@triton.jit
def _cross_entropy_kernel(logits, targets, losses, scale, V, BV: constexpr):
    i = tl.program_id(0).to(tl.int64)
    row = logits + i * V
    target = tl.load(targets + i)
    is_known = (target >= 0) & (target < V)  # else the loss is NaN
    score = tl.where(is_known, _capped(row + target, is_known) * SOFTCAP, float('nan'))
    total = tl.zeros([BV], F32)  # of exp(score - SOFTCAP)
    for start in range(0, V, BV):
        v = start + tl.arange(0, BV)
        total += tl.where(v < V, tl.exp((_capped(row + v, v < V) - 1) * SOFTCAP), 0.0)
    lse = tl.log(tl.sum(total, 0)) + SOFTCAP
    tl.store(losses + i, lse - score)
    for start in range(0, V, BV):
        v = start + tl.arange(0, BV)
        tanh = _capped(row + v, v < V)
        g = tl.exp(tanh * SOFTCAP - lse) - tl.where(v == target, 1.0, 0.0)
        tl.store(row + v, g * (1 - tanh * tanh) * scale, v < V)


def slice_loss(
    logits: Tensor, targets: Tensor, scale: float, config: object
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute model.slice_loss. The gradient overwrites the logits."""
    rows, V = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    run = _cross_entropy_kernel[(rows,)]
    run(logits, targets.contiguous(), losses, scale, V, min(4096, padded(V)), num_warps=8)
    total = losses.sum()
    return total, total, logits


# ---- what each replaces ------------------------------------------------------------------------
# An override is registered only while the functions that it replaces, in REPLACES, have the hash in
# CODE. After an edit of one of them tests/test_triton.py shows the new hash: enter it here if the
# override still computes the same. (The trial in overrides.py has a tolerance, which a small edit
# could pass.)

OVERRIDES = {'attention': attend, 'experts': experts, 'loss': slice_loss}
REPLACES = {
    'attention': (
        model.attend,
        model.split_heads,
        ops.norm,
        ops.rotate,
        ops.in_window,
        ops.window_mask,
        ops.to_experts,
        ops.to_cache_heads,
        unroll.CacheLayout.bias,
        ChunkCache.attend,
        unroll.WindowAttention,
        unroll.store,
        unroll.probabilities,
        unroll.scores_backward,
        RingCache.attend,
        decode.ring_attention,
        decode.next_slot,
    ),
    'experts': (
        model.experts,
        model.add_norm,
        model.activation,
        model.combine_experts,
        model.aggregate,
        ops.norm,
        ops.gate_weights,
        ops.linear,
        Linear,
        DeferredLinear.__call__,
    ),
    'loss': (model.slice_loss, model.losses, model.softcap),
}
CODE = {
    'attention': '99d08eae5f229939',
    'experts': '51048fe1f27972f1',
    'loss': 'f752eb03438ad3a7',
}
for _name, _override in OVERRIDES.items():
    if compiling.code_hash(REPLACES[_name]) == CODE[_name]:
        compiling.registered[_name] = _override


# ---- the trial by which overrides.py chooses ----


def make_trial(
    lm: model.LanguageModel, B: int, compute_dtype: torch.dtype
) -> Callable[[bool], list[torch.Tensor]]:
    """Return the function trial(exact) of overrides.find_agreeing for a language model and B
    streams with full windows: a training chunk or, in evaluation mode, a prompt and a token that is
    decoded. It runs on a copy of the model with random weights. exact: whether all products are in
    fp32."""
    lm = randomize(copy.deepcopy(lm))
    device, is_wide = lm.head.device, compute_dtype == torch.float32
    rng = torch.Generator().manual_seed(1)
    # Tokens in two groups of the unroll; without recurrence, as many as a prompt's product has.
    T = unroll.GROUP + 1 if lm.recurrent else lm.config.block_size
    x, y = torch.randint(len(lm.head), (2, B, T), generator=rng).to(device)
    with torch.autocast(device.type, compute_dtype, enabled=not is_wide):
        empty = lm.init_state(B)  # keys and values in the dtype of products
    s, k, v = (torch.randn(t.shape, generator=rng).to(t) for t in empty[:3])
    state = model.State(s, k, v, torch.full_like(empty.count, lm.config.window))
    random_states = get_random_states(device)  # so that a dropout drops the same in every call

    def run_chunk(exact: bool) -> list[torch.Tensor]:
        """Run a chunk of two groups of tokens forward and backward; return the loss, the new state
        and all gradients."""
        lm.overrides = compiling.enabled_overrides()
        enabled = not (is_wide or exact)
        autocast = torch.autocast(device.type, compute_dtype, enabled=enabled)
        with continuing_from(random_states, device), torch.enable_grad(), autocast:
            loss, new = lm(x, y, state)
        parameters = list(lm.parameters())  # a hack may leave some of them unused
        grads = torch.autograd.grad(loss.objective, parameters, materialize_grads=True)
        return [loss.objective.detach(), *new[:3], *grads]

    if lm.training:
        return run_chunk
    decoders = [decode.Decoder(lm, B, dtype) for dtype in (compute_dtype, torch.float32)]

    @torch.no_grad()
    def run_decoder(exact: bool) -> list[torch.Tensor]:
        """Read a prompt and decode a token; return the state after the prompt, the logits, s, and
        the token's keys and values."""
        lm.overrides = compiling.enabled_overrides()
        decoder = decoders[exact]
        after_prompt = decoder.prefill(x, state)[:3]
        decoder.load(state)
        decoder.token.copy_(x[:, 0])
        decoder.run_token()
        entries = (decoder.keys[:, :, 0], decoder.values[:, :, 0])
        return [t.clone() for t in (*after_prompt, decoder.logits, decoder.s, *entries)]

    return run_decoder

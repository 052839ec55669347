"""Triton forms of functions of layer.py, unroll.py, decode.py and kernels.py, written for Hopper
GPUs: operands in bf16, sums and norms in fp32. The last section registers them (graphs.register).

With TRITON_INTERPRET=1 in the environment the kernels run on the CPU, in fp32, because the
interpreter's bf16 product is wrong.

Shapes as in layer.py, except that N = B * C counts the cache heads of all streams (in `product`, N
is the number of output features). A row of qkv holds queries (C, M, K), keys (C, K) and values (C,
K). A chunk of T tokens has S = W + T slots as in unroll.Slots: 0 .. W - 1 are carried entries
(those below W - count are empty); token t has slot W + t and sees the last `width` slots up to its
own. No function here waits for the device. The token t and the first token g0 of its group are
integers on which no kernel is specialized, so that a loop over tokens compiles once.
"""

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
import graphs
import kernels
import layer
import unroll
from decode import Ring
from graphs import enabled_forms, fused, using
from kernels import Heads, Linear, gate_weights
from unroll import DeferredLinear, Window

EPS = constexpr(kernels.EPS)
SOFTCAP = constexpr(kernels.SOFTCAP)
F32 = constexpr(tl.float32)
LOG2E = constexpr(math.log2(math.e))  # the hardware's exponential is base 2
H100_SMS = 132


@triton.constexpr_function
def padded(n: int, least: int = 16) -> int:
    """Return the size of a tile that holds n elements: a power of two, and by default at least 16,
    the smallest that tensor cores multiply."""
    return max(least, triton.next_power_of_2(n))


# ---- attention ---------------------------------------------------------------------------------

# The fields of kernels.Heads; its properties C and M, because a kernel sees fields only; BS, the
# slots per step of a kernel's loop.
Sizes = namedtuple('Sizes', (*Heads._fields, 'C', 'M', 'BS'))


@triton.jit
def _columns(K: constexpr):
    """Lay out a head as a tile of columns, each half padded, because RoPE pairs dimension j with
    j + K/2. Returns each column's offset, the offset of its RoPE partner, and whether the column is
    in the head rather than padding."""
    P: constexpr = padded(K // 2)
    half = tl.arange(0, 2 * P) // P
    j = tl.arange(0, 2 * P) % P
    return half * (K // 2) + j, (1 - half) * (K // 2) + j, j < K // 2


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
def _normed(row, at, pair, mask, K: constexpr):
    """Return heads of a row after the norm, their RoPE partners, both in fp32, and the factors of
    the norms. at, pair: offsets of the columns and of their partners."""
    x = tl.load(row + at, mask, 0.0).to(F32)
    r = tl.rsqrt(tl.sum(x * x, len(x.shape) - 1, keep_dims=True) / K + EPS)
    return x * r, tl.load(row + pair, mask, 0.0).to(F32) * r, r


@triton.jit
def _token(qkv, b, c, cos, sin, h: constexpr):
    """Read the heads of stream b and cache head c. Returns queries and key after norm and RoPE, the
    key before RoPE, the value, and the factors of both norms. cos, sin: pointers to the angles."""
    C: constexpr = h.C
    M: constexpr = h.M
    K: constexpr = h.K
    dt = qkv.dtype.element_ty
    col, other, real = _columns(K)
    m = tl.arange(0, padded(M))[:, None]
    cos = tl.load(cos + col, real, 0.0)
    sin = tl.load(sin + col, real, 0.0)
    qkv += b * ((M + 2) * C * K)
    row = qkv + c * M * K
    mask = (m < M) & real[None, :]
    q, pair, r_q = _normed(row, m * K + col[None, :], m * K + other[None, :], mask, K)
    q = (q * cos[None, :] + pair * sin[None, :]).to(dt)
    row = qkv + (C * M + c) * K
    k, pair, r_k = _normed(row, col, other, real, K)
    kn, pair = k.to(dt), pair.to(dt)  # rounded as in the cache
    k = (kn.to(F32) * cos + pair.to(F32) * sin).to(dt)
    v = tl.load(row + C * K + col, real, 0.0)
    return q, k, kn, v, r_q, r_k


@triton.jit
def _weights(q, keys, values, n, seen, top, scale, K: constexpr):
    """Return keys and values of slots n, and their weights exp(score - top), zero where not seen.
    top is in units of log 2."""
    col, _, real = _columns(K)
    at = n[:, None] * K + col[None, :]
    mask = seen[:, None] & real[None, :]
    k = tl.load(keys + at, mask, 0.0)
    v = tl.load(values + at, mask, 0.0)
    score = tl.dot(q, tl.trans(k), input_precision='ieee') * (scale * LOG2E)
    return k, v, tl.where(seen[None, :], tl.exp2(score - top[:, None]), 0.0)


@triton.jit
def _slots(q, keys, values, n, seen, top, scale, o, parts, K: constexpr):
    """Add slots n to the attended values o, and their weights to `parts`, column by column; the
    caller adds up the columns at the end."""
    _, v, p = _weights(q, keys, values, n, seen, top, scale, K)
    return tl.dot(p.to(q.dtype), v, o, input_precision='ieee'), parts + p


# For one token: norm of queries and key, RoPE, store into the cache and attention, in one pass over
# the window. PyTorch takes a dozen launches, and scores go through memory. One program handles
# a cache head of a stream with all its M query heads, so that a key is read once. The key of the
# token itself is used from registers, so its store needs no barrier. The softmax subtracts its
# score instead of the maximum: scores of normalized vectors lie within +-sqrt(K), and no
# exponential overflows in fp32.
@triton.jit(do_not_specialize=['t'])
def _attention_kernel(qkv, memory, out, kept, t, W, width, S, scale, h: constexpr):
    kbuf, vbuf, kn, count, cos, sin = memory
    rq, rk, q_rot, lse = kept
    BS: constexpr = h.BS
    M: constexpr = h.M
    K: constexpr = h.K
    c = tl.program_id(0)
    b = tl.program_id(1).to(tl.int64)
    col, _, real = _columns(K)
    m = tl.arange(0, padded(M))
    mask = (m < M)[:, None] & real[None, :]
    head = b * h.C + c
    slot = W + t
    q, k, k_n, v, r_q, r_k = _token(qkv, b, c, cos + slot * K, sin + slot * K, h)
    window = head * S * K  # 64 bits; offsets within a window have 32
    new = slot * K + col
    kbuf += window
    vbuf += window
    tl.store(kn + window + new, k_n, real)
    tl.store(kbuf + new, k, real)
    tl.store(vbuf + new, v, real)
    tl.store(rq + (head * M + m)[:, None], r_q, (m < M)[:, None])
    tl.store(rk + head + tl.arange(0, 1), r_k)
    tl.store(q_rot + (head * M + m)[:, None] * K + col[None, :], q, mask)

    top = tl.sum(q.to(F32) * k.to(F32)[None, :], 1) * (scale * LOG2E)
    parts = tl.zeros([padded(M), BS], F32)
    o = tl.zeros(q.shape, F32) + v.to(F32)[None, :]  # the token itself has weight exp(0)
    first = tl.maximum(slot + 1 - width, W - tl.load(count + b).to(tl.int32))
    for start in range(first, slot, BS):
        n = start + tl.arange(0, BS)
        o, parts = _slots(q, kbuf, vbuf, n, n < slot, top, scale, o, parts, K)
    total = 1 + tl.sum(parts, 1)
    tl.store(out + _by_expert(b, c, m, h) + col[None, :], o / total[:, None], mask)
    tl.store(lse + head * M + m, (top + tl.log2(total)) / LOG2E, m < M)


@triton.jit
def _probabilities(q, do, lse2, delta, keys, values, n, seen, scale, K: constexpr):
    """Return the attention weights of slots n, the gradient of their scores, both zero where not
    seen, and their keys. lse2: log-sum-exp in units of log 2; delta: the sum of do * o."""
    k, v, p = _weights(q, keys, values, n, seen, lse2, scale, K)
    ds = p * (tl.dot(do, tl.trans(v), input_precision='ieee') - delta[:, None]) * scale
    return p.to(q.dtype), ds.to(q.dtype), k


@triton.jit
def _before_norm(g, x, r, cos, sin, K: constexpr):
    """Return the gradient of `input` from the gradient g of x = RoPE(norm(input)), (rows, columns).
    r: the factors of the norm. A rotation keeps lengths, so the norm's backward may come first."""
    rows: constexpr = x.shape[0]
    x = x.to(F32)
    g = r * (g - x * (tl.sum(g * x, 1) / K)[:, None])
    g1, g2 = tl.split(tl.trans(tl.reshape(g, (rows, 2, padded(K // 2))), 0, 2, 1))
    g = tl.join(g1 * cos + g2 * sin, g2 * cos - g1 * sin)
    return tl.reshape(tl.trans(g, 0, 2, 1), x.shape)


# The backward recomputes the attention weights from the log-sum-exp, and takes the gradients of
# queries, keys and values back through RoPE and the norms into the row of dqkv. Adding to dk and dv
# over the whole window in fp32 would be the largest traffic of the loop. So this kernel adds only
# to the slots of the token's group of F tokens, which the next tokens of the backward need at once.
# For earlier slots it stores p and ds, 2 * M * S numbers per token instead of 2 * S * K, and one
# product per group adds them (unroll.Window.add_before_group).
@triton.jit(do_not_specialize=['t', 'g0'])
def _attention_backward_kernel(
    datt, kept, memory, grads, dqkv, t, g0, W, width, S, F, scale, h: constexpr
):
    att, q_rot, rq, rk, lse = kept
    kbuf, vbuf, count, cos, sin = memory
    dk, dv, P, DS, DO = grads
    BS: constexpr = h.BS
    C: constexpr = h.C
    M: constexpr = h.M
    K: constexpr = h.K
    c = tl.program_id(0)
    b = tl.program_id(1).to(tl.int64)
    col, _, real = _columns(K)
    m = tl.arange(0, padded(M))
    j = tl.arange(0, padded(K // 2))
    mk = m < M
    mask = mk[:, None] & real[None, :]
    head = b * C + c
    slot = W + t
    window = head * S * K  # the first slot of this head
    kbuf += window
    vbuf += window
    dk += window
    dv += window
    rows = (head * F + (t - g0)) * M  # the first row of this token in P, DS and DO
    P += rows * S
    DS += rows * S
    at = _by_expert(b, c, m, h) + col[None, :]
    do = tl.load(datt + at, mask, 0.0)
    o = tl.load(att + at, mask, 0.0)
    q = tl.load(q_rot + (head * M + m)[:, None] * K + col[None, :], mask, 0.0)
    tl.store(DO + (rows + m)[:, None] * K + col[None, :], do, mask)
    delta = tl.sum(do.to(F32) * o.to(F32), 1)
    lse2 = tl.load(lse + head * M + m, mk, 0.0) * LOG2E
    first = tl.maximum(slot + 1 - width, W - tl.load(count + b).to(tl.int32))
    dq = tl.zeros(q.shape, F32)

    # Slots before the group. The start is a multiple of 8, so that stores are wide; the zeros that
    # are stored before the `width` slots that the group reads are never read.
    for start in range((W - width + g0) // 8 * 8, W + g0, BS):
        n = start + tl.arange(0, BS)
        seen = (n >= first) & (n < W + g0)
        p, ds, k = _probabilities(q, do, lse2, delta, kbuf, vbuf, n, seen, scale, K)
        offsets = m[:, None] * S + n[None, :]
        inside = mk[:, None] & (n < S)[None, :]
        tl.store(P + offsets, p, inside)
        tl.store(DS + offsets, ds, inside)
        dq = tl.dot(ds, k, dq, input_precision='ieee')

    # slots of the group up to the token's; the sums at the token's slot are complete after this
    dk_token = tl.zeros(col.shape, F32)
    dv_token = tl.zeros(col.shape, F32)
    for start in range(W + g0, slot + 1, 16):
        n = start + tl.arange(0, 16)
        seen = (n >= first) & (n <= slot)
        p, ds, k = _probabilities(q, do, lse2, delta, kbuf, vbuf, n, seen, scale, K)
        offsets = n[:, None] * K + col[None, :]
        inside = (n <= slot)[:, None] & real[None, :]
        is_token = (n == slot)[:, None]
        g = tl.dot(tl.trans(ds), q, tl.load(dk + offsets, inside, 0.0), input_precision='ieee')
        tl.store(dk + offsets, g, inside)
        dk_token += tl.sum(tl.where(is_token, g, 0.0), 0)
        g = tl.dot(tl.trans(p), do, tl.load(dv + offsets, inside, 0.0), input_precision='ieee')
        tl.store(dv + offsets, g, inside)
        dv_token += tl.sum(tl.where(is_token, g, 0.0), 0)
        dq = tl.dot(ds, k, dq, input_precision='ieee')

    cos = tl.load(cos + slot * K + j, j < K // 2, 0.0)
    sin = tl.load(sin + slot * K + K // 2 + j, j < K // 2, 0.0)
    dqkv += b * ((M + 2) * C * K)
    r = tl.load(rq + head * M + m, mk, 0.0)[:, None]
    dq = _before_norm(dq, q, r, cos, sin, K)
    tl.store(dqkv + (c * M + m)[:, None] * K + col[None, :], dq, mask)
    k = tl.load(kbuf + slot * K + col, real, 0.0)
    dk_row = _before_norm(dk_token[None, :], k[None, :], tl.load(rk + head), cos, sin, K)
    tl.store(dqkv + (C * M + c) * K + col[None, :], dk_row, real[None, :])
    tl.store(dqkv + (C * M + C + c) * K + col, dv_token, real)


def _launch(kernel, h: Heads, B: int, width: int) -> Callable:
    """Return an attention kernel ready to launch for these sizes, with one program per cache head
    and stream."""
    # More stages hide the latency of more steps, but take shared memory, of which two programs on
    # one SM get half each.
    if width <= 128:  # two steps
        stages = 2
    elif B * h.C > H100_SMS:
        stages = 3
    else:
        stages = 4
    sizes = Sizes(**h._asdict(), C=h.C, M=h.M, BS=min(64, padded(width)))
    options = {'num_warps': 4, 'num_stages': stages}
    return functools.partial(kernel[h.C, B], scale=1 / math.sqrt(h.K), h=sizes, **options)


def window_attention(window: Window, t: int, qkv: Tensor, out: Tensor, kept: tuple) -> None:
    """Store the keys and values of token t, attend from its queries, and write the attended values
    to `out` (E, B, G*R*K).

    qkv (B, (C*M + 2*C)*K); kept: (rq, rk, q_rot, lse), to be written for the backward: the norms'
    factors (B*C, M) and (B*C,), rotated queries (B*C, M, K) and the log-sum-exp (B*C, M)."""
    slots, S = window.slots, window.k.size(1)
    memory = (window.k, window.v, window.unrotated, slots.count, slots.cos, slots.sin)
    run = _launch(_attention_kernel, window.heads, len(qkv), window.width)
    run(qkv, memory, out, kept, t, slots.W, window.width, S)


def window_attention_backward(
    window: Window, t: int, g0: int, datt: Tensor, kept: tuple, buffers: list[Tensor]
) -> Tensor:
    """Return the gradient of qkv's row from the gradient datt (E, B, G*R*K) of the attended values.

    kept: attended values, q_rot, rq, rk and lse of the forward; g0: the first token of t's group.
    Updates the slots of g0 .. t in window.dk and window.dv in place; buffers: P, DS (B*C, F, M, S)
    and DO (B*C, F, M, K), which receive the token's p, ds and do for the group's product over
    earlier slots."""
    slots, h = window.slots, window.heads
    B, S, F = datt.size(1), window.k.size(1), buffers[0].size(1)
    memory = (window.k, window.v, slots.count, slots.cos, slots.sin)
    grads = (window.dk, window.dv, *buffers)
    dqkv = datt.new_empty(B, (h.M + 2) * h.C * h.K)
    run = _launch(_attention_backward_kernel, h, B, window.width)
    run(datt, kept, memory, grads, dqkv, t, g0, slots.W, window.width, S, F)
    return dqkv


# ---- the experts' products, fused with the operations around them ------------------------------

# Sizes of x @ w for x (B, K) and w (K, N). A program computes a tile (BM, BN) in steps of BK. P:
# partial sums of squares per row; before, after: see `product`.
Tile = namedtuple('Tile', 'K N P BM BN BK before after')


@triton.jit
def _factor(ss, rows, real, D: constexpr, P: constexpr):
    """Return the RMSNorm's factors of rows of length D from partial sums of their squares, ss (...,
    P)."""
    p = tl.arange(0, padded(P, 1))
    parts = tl.load(ss + rows[:, None] * P + p[None, :], real[:, None] & (p < P)[None, :], 0.0)
    return tl.rsqrt(tl.sum(parts, 1) / D + EPS)


# Each expert's x @ w together with the operations before and after it, so that neither is a pass
# over memory. A residual is added while y is in fp32 registers, and the sums of squares for the
# next norm are taken there, one partial sum per tile of columns (atomics would add in no fixed
# order). A norm before the product gets its factors r from those sums. Each tile of columns then
# reads y in fp32, twice the bytes of bf16, which is cheap while one tile holds all rows and most
# traffic is weights.
@triton.jit
def _expert_kernel(x, w, beside, out, ss, f, r, B, strides, c: constexpr):
    w_e, w_n, w_k, beside_e = strides
    e = tl.program_id(2).to(tl.int64)
    # tiles of rows are neighbors, so that they share a tile of weights in L2
    rows = tl.program_id(0) * c.BM + tl.arange(0, c.BM)
    cols = tl.program_id(1) * c.BN + tl.arange(0, c.BN)
    stored = rows < tl.where(tl.program_id(1) == 0, B, 0)  # the first tile of columns stores norms
    if c.before == 'norm':
        factor = _factor(ss, e * B + rows, rows < B, c.K, c.P)
        tl.store(r + e * B + rows, factor, stored)
    acc = tl.full((c.BM, c.BN), 0.0, F32)
    for start in range(0, c.K, c.BK):
        k = start + tl.arange(0, c.BK)
        at = rows[:, None] * c.K + k[None, :]
        mask = (rows < B)[:, None] & (k < c.K)[None, :]
        a = tl.load(x + e * B * c.K + at, mask, 0.0)
        if c.before == 'norm':
            a = (a * factor[:, None]).to(w.dtype.element_ty)
            tl.store(f + e * B * c.K + at, a, mask & stored[:, None])
        weights = w + e * w_e + cols[None, :] * w_n + k[:, None] * w_k
        b = tl.load(weights, (k < c.K)[:, None] & (cols < c.N)[None, :], 0.0)
        acc = tl.dot(a, b, acc, input_precision='ieee')
    at = rows[:, None] * c.N + cols[None, :]
    mask = (rows < B)[:, None] & (cols < c.N)[None, :]
    if c.after == 'relu':
        acc = tl.maximum(acc, 0.0) * tl.maximum(acc, 0.0)
    else:
        other = tl.load(beside + e * beside_e + at, mask, 0.0).to(F32)
        acc = acc + other if c.after == 'add' else acc * 2 * tl.sqrt(other)
    tl.store(out + e * B * c.N + at, acc, mask)
    if c.after == 'add':
        tl.store(ss + (e * B + rows) * c.P + tl.program_id(1), tl.sum(acc * acc, 1), rows < B)


def product(
    x: Tensor,
    w: Tensor,
    before: str,
    after: str,
    beside: Tensor | None = None,
    ss: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """Compute after(before(x) @ w^T), (E, B, N), for x (E, B, K) and w (E, N, K).

    before: '' or 'norm'; after: 'relu' squares the positive part, 'times' is its backward, which
    multiplies by 2 sqrt(beside), and 'add' adds beside; beside: (E, B, N), or (B, N) for all
    experts; ss (E, B, P): partial sums of squares of x, for 'norm'. Returns the result; after 'add'
    its partial sums of squares, otherwise `ss`; and for 'norm' norm(x) in the dtype of w and its
    factors (E, B, 1), otherwise None twice."""
    E, B, K = x.shape
    N = w.size(1)
    # Up to 128 rows are one tile, so that weights are read once. Of the widths of a tile, take the
    # widest that leaves about one program per SM. A width of 256 would spill registers after 'add';
    # elsewhere it is used if it leaves about four per SM. By arithmetic, not measured: an SM then
    # has at least 24 KiB of weights in flight.
    BM = min(128, padded(B))
    programs = {BN: E * triton.cdiv(B, BM) * triton.cdiv(N, BN) for BN in (256, 128, 64)}
    if B > 128 and programs[256] >= 512 and after != 'add':
        BN = 256
    elif programs[128] >= 128:
        BN = 128
    elif programs[64] >= 128:
        BN = 64
    else:
        BN = 32
    bytes_per_row = 256 if BM <= 32 else 128  # of a step's tile of x or of weights
    BK = min(bytes_per_row // w.element_size(), padded(K))
    warps, stages = (8, 3) if BM * BN >= 128 * 128 else (4, 4)
    f = r = None
    if before == 'norm':
        f, r = w.new_empty(x.shape), x.new_empty(E, B, 1)
        if B > 128:  # a pass over x is cheaper than a norm in every tile of columns
            norm_sum(x, ss, None, f, r)
            x = f
            before = ''
    out = (beside if after == 'add' else w).new_empty(E, B, N)
    if after == 'add':
        ss = out.new_empty(E, B, triton.cdiv(N, BN))
    P = 0 if ss is None else ss.size(2)
    c = Tile(K=K, N=N, P=P, BM=BM, BN=BN, BK=BK, before=before, after=after)
    beside_stride = 0 if beside is None or beside.dim() == 2 else B * N  # of experts
    strides = (*w.stride(), beside_stride)
    run = _expert_kernel[triton.cdiv(B, BM), triton.cdiv(N, BN), E]
    run(x, w, beside, out, ss, f, r, B, strides, c, num_warps=warps, num_stages=stages)
    return out, ss, f, r


Sums = namedtuple('Sums', 'E D P BD')  # BD: columns per program


# Each expert's norm and the weighted sum over experts in one read of x. A program holds a slice of
# columns of all experts of one stream, so that their loads are in flight together.
@triton.jit
def _norm_sum_kernel(x, ss, coef, s, h, r, B, coef_e, coef_b, c: constexpr):
    b = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, padded(c.E, 1)).to(tl.int64)
    d = tl.program_id(1) * c.BD + tl.arange(0, c.BD)
    at = (e * B + b)[:, None] * c.D + d[None, :]
    mask = (e < c.E)[:, None] & (d < c.D)[None, :]
    factor = _factor(ss, e * B + b, e < c.E, c.D, c.P)
    hat = tl.load(x + at, mask, 0.0) * factor[:, None]
    tl.store(r + e * B + b, factor, e < tl.where(tl.program_id(1) == 0, c.E, 0))
    tl.store(h + at, hat, mask)
    if s is not None:
        weight = tl.load(coef + e * coef_e + b * coef_b, e < c.E, 0.0)
        tl.store(s + b * c.D + d, tl.sum(weight[:, None] * hat, 0), d < c.D)


def norm_sum(x: Tensor, ss: Tensor, coef: Tensor | None, h: Tensor, r: Tensor) -> Tensor | None:
    """Normalize x (E, B, D), whose partial sums of squares are ss (E, B, P): write norm(x) to h and
    its factors to r (E, B, 1), and return the sum over experts of coef * h, (B, D). coef: (E, B, 1)
    or 0-dim; without it no sum is computed, and None is returned."""
    E, B, D = x.shape
    BD = 128 if B <= 64 else 256
    BD = min(BD, 4096 // padded(E, 1))  # at most 4,096 elements per program, over all experts
    BD = min(max(BD, 16), padded(D))
    s = None
    coef_e = coef_b = 0
    if coef is not None:
        s = x.new_empty(B, D)
        coef_e, coef_b, _ = coef.expand(E, B, 1).stride()
    c = Sums(E=E, D=D, P=ss.size(2), BD=BD)
    run = _norm_sum_kernel[B, triton.cdiv(D, BD)]
    run(x, ss, coef, s, h, r, B, coef_e, coef_b, c)
    return s


# ---- layer.experts as a whole ------------------------------------------------------------------


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
        attended = attended.contiguous()
        y, ss, _, _ = product(attended, wo.w, '', 'add', u)
        act, _, f, r = product(y, up.w, 'norm', 'relu', None, ss)
        x, ss, _, _ = product(act, down.w, '', 'add', y)
        h, rx = torch.empty_like(f), torch.empty_like(r)  # norm(x) and its factors
        ctx.linears, ctx.forms = linears, enabled_forms()
        ctx.save_for_backward(attended, coef, act, f, r, h, rx)
        return norm_sum(x, ss, coef, h, rx)

    @staticmethod
    @once_differentiable
    def backward(ctx, ds):
        wo, up, down = ctx.linears
        attended, coef, act, f, r, h, rx = ctx.saved_tensors
        with using(ctx.forms):
            dx, dx_low = _output_backward(ds, coef, h, rx)
            dact, _, _, _ = product(dx_low, down.w.mT, '', 'times', act)
            du, dy, dattended = _input_backward(dx, dact, r, f, wo.w, up.w)
        for linear, x, grad in ((down, act, dx_low), (up, f, dact), (wo, attended, dy)):
            if linear.weight.requires_grad:
                linear.record(x, grad)
        dcoef = (h * ds).sum(-1, keepdim=True).to(ds.dtype) if ctx.needs_input_grad[3] else None
        return None, du, dattended, dcoef


@functools.cache  # one tensor for all tokens: filling it would be a kernel per token
@torch.inference_mode(False)  # a backward may save it
def _constant_coef(E: int, aggregation: str, device: torch.device) -> Tensor:
    """Return the coefficient () of each expert's output in the aggregation 'sqrt_sum' or 'mean'."""
    return torch.full((), E**-0.5 if aggregation == 'sqrt_sum' else 1 / E, device=device)


def experts(
    w: layer.LayerWeights, u: Tensor, attended: Tensor, gates: Tensor | None, config: object
) -> Tensor:
    """Compute layer.experts. In the recurrent model the kernels do all of it; in GPT, which uses
    them only where no gradient is wanted, the first two products and the operations around them."""
    if not w.recurrent:
        y, ss, _, _ = product(attended.contiguous(), w.wo.w, '', 'add', u)
        act, _, _, _ = product(y, w.up.w, 'norm', 'relu', None, ss)
        return layer.merge(y, w.down(act), u, gates, config.aggregation, config.residual)
    if gates is None:
        coef = _constant_coef(len(w.up.w), config.aggregation, u.device)
    else:
        coef = gate_weights(gates, config.aggregation).t()[..., None]  # (E, B, 1)
    return Experts.apply((w.wo, w.up, w.down), u, attended, coef)


def suits_experts(
    w: layer.LayerWeights, u: Tensor, attended: Tensor, gates: Tensor | None, config: object
) -> bool:
    """Return whether `experts` can run on these arguments."""
    linears = (w.wo, w.up, w.down)
    differentiable = all(type(x) is DeferredLinear for x in linears) and w.recurrent
    plain_ffn = w.up.w.dim() == 3 and w.up.w.size(1) == w.down.w.size(2)
    known = gates is not None or config.aggregation in ('sqrt_sum', 'mean')
    may_run = differentiable or not torch.is_grad_enabled()
    return u.dtype == torch.float32 and plain_ffn and known and may_run


# ---- decoding ----------------------------------------------------------------------------------


# _attention_kernel for a ring of W slots. A CUDA graph replays it, so the slot of the newest entry
# is read from memory (decode.RingPosition). Slots are visited in the order of memory; a slot's age
# decides whether it is seen.
@triton.jit
def _ring_kernel(qkv, ring, counters, rope, out, W, width, scale, h: constexpr):
    keys, values = ring
    BS: constexpr = h.BS
    M: constexpr = h.M
    K: constexpr = h.K
    c = tl.program_id(0)
    b = tl.program_id(1).to(tl.int64)
    col, _, real = _columns(K)
    m = tl.arange(0, padded(M))
    slot = (tl.load(counters) % W).to(tl.int32)
    count = tl.minimum(tl.load(counters + 1 + b), width)
    rope += slot * 2 * K
    q, k, _, v, _, _ = _token(qkv, b, c, rope, rope + K, h)
    keys += (b * h.C + c) * W * K
    values += (b * h.C + c) * W * K
    tl.store(keys + slot * K + col, k, real)
    tl.store(values + slot * K + col, v, real)

    top = tl.sum(q.to(F32) * k.to(F32)[None, :], 1) * (scale * LOG2E)
    parts = tl.zeros([padded(M), BS], F32)
    o = tl.zeros(q.shape, F32) + v.to(F32)[None, :]  # the token itself has weight exp(0)
    for start in range(0, W, BS):
        n = start + tl.arange(0, BS)
        age = (slot + W - n) % W
        seen = (age > 0) & (age < count) & (n < W)
        o, parts = _slots(q, keys, values, n, seen, top, scale, o, parts, K)
    total = 1 + tl.sum(parts, 1)
    mask = (m < M)[:, None] & real[None, :]
    tl.store(out + _by_expert(b, c, m, h) + col[None, :], o / total[:, None], mask)


def ring_attention(qkv: Tensor, ring: Ring) -> Tensor:
    """Store a token's keys and values in a ring, attend from its queries, and return the attended
    values (E, B, G*R*K). qkv (B, (C*M + 2*C)*K)."""
    B, h, position = len(qkv), ring.heads, ring.position
    out = qkv.new_empty(h.E, B, h.G * h.R * h.K)
    memory = (ring.keys, ring.values)
    run = _launch(_ring_kernel, h, B, position.W)
    run(qkv, memory, position.counters, position.rope, out, position.W, ring.width)
    return out


# ---- loss --------------------------------------------------------------------------------------


# Soft-cap, log-sum-exp, the target's score and the gradient, in two reads and one write of a row;
# compiled PyTorch takes eight passes in fp32. Capped scores lie in [-15, 15]: exp(score - 15) can
# neither overflow nor vanish, so no maximum is needed first.
@triton.jit
def _cross_entropy_kernel(logits, target, loss, scale, V, BV: constexpr):
    i = tl.program_id(0).to(tl.int64)
    row = logits + i * V
    goal = tl.load(target + i).to(tl.int32)
    total = tl.zeros([BV], F32)  # of exp(score - SOFTCAP)
    right = tl.zeros([BV], F32)  # the target's score, in one element
    for start in range(0, V, BV):
        v = start + tl.arange(0, BV)
        x = tl.load(row + v, v < V, 0.0).to(F32) * (2 / SOFTCAP)
        score = SOFTCAP - 2 * SOFTCAP / (tl.exp(x) + 1)  # SOFTCAP * tanh(logit / SOFTCAP)
        total += tl.where(v < V, tl.exp(score - SOFTCAP), 0.0)
        right += tl.where(v == goal, score, 0.0)
    lse = tl.log(tl.sum(total, 0)) + SOFTCAP
    tl.store(loss + i, lse - tl.sum(right, 0))
    for start in range(0, V, BV):
        v = start + tl.arange(0, BV)
        x = tl.load(row + v, v < V, 0.0).to(F32) * (2 / SOFTCAP)
        tanh = 1 - 2 / (tl.exp(x) + 1)
        g = tl.exp(tanh * SOFTCAP - lse) - tl.where(v == goal, 1.0, 0.0)
        tl.store(row + v, g * (1 - tanh * tanh) * scale, v < V)


def cross_entropy(logits: Tensor, target: Tensor, grad_scale: float) -> tuple[Tensor, Tensor]:
    """Soft-cap logits (rows, V); return their cross-entropy with target (rows,), summed over rows,
    and grad_scale times its gradient, which overwrites the logits."""
    rows, V = logits.shape
    loss = torch.empty(rows, dtype=torch.float32, device=logits.device)
    BV = min(4096, padded(V))
    run = _cross_entropy_kernel[(rows,)]
    run(logits, target.contiguous(), loss, float(grad_scale), V, BV, num_warps=8)
    return loss.sum(), logits


# ---- layer.attend, for both caches -------------------------------------------------------------


class AttendWindow(torch.autograd.Function):
    """Compute layer.attend with a Window for token t: norm, RoPE, store and attention, in one
    kernel in the forward and one in the backward. qkv (B, (C M + 2 C) K)."""

    @staticmethod
    def forward(ctx, window, t, qkv):
        slots, heads = window.slots, window.heads
        N, _, K = window.k.shape
        M = heads.M
        out = qkv.new_empty(heads.E, len(qkv), heads.G * heads.R * K)
        q = qkv.new_empty(N, M, K)
        rq = qkv.new_empty(N, M, dtype=slots.wide)  # factors of the queries' norms
        rk = qkv.new_empty(N, dtype=slots.wide)  # and of the keys'
        lse = qkv.new_empty(N, M, dtype=slots.wide)
        window_attention(window, t, qkv, out, (rq, rk, q, lse))
        ctx.window, ctx.t, ctx.forms = window, t, enabled_forms()
        ctx.save_for_backward(out, q, rq, rk, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, datt):
        window, t = ctx.window, ctx.t
        out, q, rq, rk, lse = ctx.saved_tensors
        N, S, K = window.k.shape
        M = q.size(1)
        window.start_backward(t)
        _, group, end = window.slots.group_of(t)
        # Of the group so far: weights, gradients of scores and of attended values, in buffers that
        # the kernel fills token by token, and the queries of its tokens.
        if not window.pending:
            sizes = [(N, unroll.GROUP, M, columns) for columns in (S, S, K)]
            window.pending = [[q.new_empty(size) for size in sizes], []]
        buffers, queries = window.pending
        queries.insert(0, q)  # tokens come in descending order
        with using(ctx.forms):
            kept = (out, q, rq, rk, lse)
            dqkv = window_attention_backward(window, t, group, datt.contiguous(), kept, buffers)
        if t == group:
            p, ds, do = (x[:, : end - group].flatten(1, 2) for x in buffers)  # (N, tokens * M, ...)
            window.add_before_group(t, 0, (torch.cat(queries, 1), p, ds, do))
            window.pending = []
        return None, None, dqkv


def attend(qkv: Tensor, cache: Window | Ring) -> Tensor:
    """Compute layer.attend."""
    if isinstance(cache, Ring):
        return ring_attention(qkv, cache)
    t = cache.t
    cache.t += 1
    return AttendWindow.apply(cache, t, qkv)


def suits_attend(qkv: Tensor, cache: object) -> bool:
    """Return whether `attend` can run on these arguments."""
    return isinstance(cache, Window | Ring) and cache.angles()[0].dtype == torch.float32


def suits_loss(logits: Tensor, targets: Tensor, scale: float, config: object) -> bool:
    """Return whether `slice_loss` can run on these arguments."""
    return logits.dtype != torch.float64


def slice_loss(
    logits: Tensor, targets: Tensor, scale: float, config: object
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute kernels.slice_loss. The gradient overwrites the logits."""
    loss, gradient = cross_entropy(logits, targets, scale)
    return loss, loss, gradient


# ---- registration ------------------------------------------------------------------------------
# REPLACES lists the functions that each form replaces, CODE the hash of their code when the form
# was written. After an edit of one of these functions, tests/test_triton.py shows the new hash:
# enter it here if the form still computes the same.

REPLACES = {
    'attention': (
        layer.attend,
        layer.split_heads,
        kernels.norm,
        kernels.rotate,
        kernels.in_window,
        kernels.window_mask,
        kernels.to_experts,
        kernels.to_cache_heads,
        unroll.Slots.bias,
        Window.attend,
        unroll.WindowAttention,
        unroll.store,
        unroll.probabilities,
        unroll.scores_backward,
        Ring.attend,
        decode.ring_attention,
        decode.next_slot,
    ),
    'experts': (
        layer.experts,
        layer.add_norm,
        layer.activation,
        layer.merge,
        layer.aggregate,
        kernels.norm,
        kernels.gate_weights,
        kernels.linear,
        Linear,
        DeferredLinear.__call__,
    ),
    'loss': (kernels.slice_loss, kernels.losses, kernels.softcap),
}
CODE = {
    'attention': '9aa08ec2dc92f00f',
    'experts': 'a77dd09b6f27c49c',
    'loss': 'ed3be8cc73266f3a',
}
FORMS = {
    'attention': (attend, suits_attend),
    'experts': (experts, suits_experts),
    'loss': (slice_loss, suits_loss),
}
for name, (form, suits) in FORMS.items():
    graphs.register(name, form, suits, replaces=REPLACES[name], code=CODE[name])

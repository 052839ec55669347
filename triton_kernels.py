"""Triton forms of functions of layer.py, cache.py and kernels.py, for Hopper: bf16 operands, fp32
sums and norms. The last section registers them (kernels.Form).

Under TRITON_INTERPRET=1 the kernels run on the CPU, in fp32 (the interpreter's bf16 product is
wrong).

Shapes as in layer.py; N = B * C cache heads of all streams. A row of q, k and v holds queries (C,
M, K), keys (C, K) and values (C, K). A block of n tokens has S = W + n slots: 0 .. W - 1 are
carried entries (those below W - count are empty), token t has slot W + t and sees slots t + 1 ..
W + t. Nothing here synchronizes; t and g0 are plain ints that specialize no kernel, so that a loop
over t compiles once.

Two ways to run are chosen like forms (kernels.using): 'split' (see `product`), and 'pdl',
programmatic dependent launch: the next kernel is set up while this one still runs.
"""

import functools
import math
from collections import namedtuple
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

import cache
import kernels
import layer
from cache import Ring, Window
from kernels import Heads, Linear, enabled_forms, forms, fused, gate_weights, using
from unroll import DeferredLinear

EPS, SOFTCAP, F32 = (constexpr(x) for x in (kernels.EPS, kernels.SOFTCAP, tl.float32))
LOG2E = constexpr(math.log2(math.e))  # the hardware's exponential is base 2


@triton.constexpr_function
def padded(n: int, least: int = 16) -> int:
    """Return the size of a tile that holds n: a power of two, at least the smallest that tensor
    cores multiply."""
    return max(least, triton.next_power_of_2(n))


@triton.jit
def _begin(pdl: constexpr):
    """Let the next kernel be launched, and wait for the end of the one before, which has waited for
    all others. Call it before anything is read."""
    if pdl:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


# ---- attention ----

# Fields of kernels.Heads, its properties C and M (a kernel sees fields only), and N, the number of
# slots per step of a loop.
Sizes = namedtuple('Sizes', (*Heads._fields, 'C', 'M', 'N', 'pdl'))


@triton.jit
def _columns(K: constexpr):
    """Lay a head out as a tile of columns. RoPE pairs dimension j with j + K/2, so each half is
    padded. Returns each column's offset, its partner's offset, and whether it is in the head."""
    P: constexpr = padded(K // 2)
    half, j = tl.arange(0, 2 * P) // P, tl.arange(0, 2 * P) % P
    return half * (K // 2) + j, (1 - half) * (K // 2) + j, j < K // 2


@triton.jit
def _by_expert(b, c, m, h: constexpr):
    """Return the offsets (M, 1) of query heads m of cache head c in a tensor (E, B, G*R*K)."""
    if h.shared:
        e, head = m // h.R, c * h.R + m % h.R
    else:
        e, head = c // h.G + m * 0, c % h.G * h.R + m
    return (((e * tl.num_programs(1) + b) * (h.G * h.R) + head) * h.K)[:, None]  # b has 64 bits


@triton.jit
def _normed(row, at, pair, mask, K: constexpr):
    """Return the normalized heads of a row and their RoPE partners, in fp32, and the factors of the
    norms."""
    x = tl.load(row + at, mask, 0.0).to(F32)
    r = tl.rsqrt(tl.sum(x * x, len(x.shape) - 1, keep_dims=True) / K + EPS)
    return x * r, tl.load(row + pair, mask, 0.0).to(F32) * r, r


@triton.jit
def _token(qkv, b, c, cos, sin, h: constexpr):
    """Read stream b's row of cache head c. Returns queries and key after norm and RoPE, the key
    before RoPE, the value, and the factors of both norms. cos, sin: pointers to the angles."""
    C: constexpr = h.C
    M: constexpr = h.M
    K: constexpr = h.K
    dt = qkv.dtype.element_ty
    col, other, real = _columns(K)
    m = tl.arange(0, padded(M))[:, None]
    cos, sin = tl.load(cos + col, real, 0.0), tl.load(sin + col, real, 0.0)
    qkv += b * ((M + 2) * C * K)
    mask, row = (m < M) & real[None, :], qkv + c * M * K
    q, pair, r_q = _normed(row, m * K + col[None, :], m * K + other[None, :], mask, K)
    q = (q * cos[None, :] + pair * sin[None, :]).to(dt)
    row = qkv + (C * M + c) * K
    k, pair, r_k = _normed(row, col, other, real, K)
    kn, pair = k.to(dt), pair.to(dt)  # as the cache keeps them
    k = (kn.to(F32) * cos + pair.to(F32) * sin).to(dt)
    return q, k, kn, tl.load(row + C * K + col, real, 0.0), r_q, r_k


@triton.jit
def _weights(q, keys, values, n, seen, top, scale, K: constexpr):
    """Return keys and values of slots n, and their weights exp(score - top), zero if not seen."""
    col, _, real = _columns(K)
    at, some = n[:, None] * K + col[None, :], seen[:, None] & real[None, :]
    k, v = tl.load(keys + at, some, 0.0), tl.load(values + at, some, 0.0)
    score = tl.dot(q, tl.trans(k), input_precision='ieee') * (scale * LOG2E)
    return k, v, tl.where(seen[None, :], tl.exp2(score - top[:, None]), 0.0)


@triton.jit
def _slots(q, keys, values, n, seen, top, scale, o, parts, K: constexpr):
    """Add slots n to the attended values o, and to the weights `parts`, summed at the end."""
    _, v, p = _weights(q, keys, values, n, seen, top, scale, K)
    return tl.dot(p.to(q.dtype), v, o, input_precision='ieee'), parts + p


# Norm of queries and key, RoPE, push into the cache and window attention of one token, in one pass
# over the window. PyTorch takes a dozen launches, and scores go through memory. One program handles
# a cache head of a stream with all its M query heads, so that a key is read once. The token's own
# key never leaves the registers: its store needs no barrier, and its score is what the softmax
# subtracts (scores of normalized vectors lie within +-sqrt(K), so fp32 needs no running maximum).
@triton.jit(do_not_specialize=['t'])
def _attention_kernel(qkv, memory, out, kept, t, W, S, scale, h: constexpr):
    _begin(h.pdl)
    kbuf, vbuf, kn, count, cos, sin = memory
    rq, rk, q_rot, lse = kept
    N: constexpr = h.N
    M: constexpr = h.M
    K: constexpr = h.K
    c, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    col, _, real = _columns(K)
    m = tl.arange(0, padded(M))
    slot, head, mask = W + t, b * h.C + c, (m < M)[:, None] & real[None, :]
    q, k, k_n, v, r_q, r_k = _token(qkv, b, c, cos + slot * K, sin + slot * K, h)
    window, own = head * S * K, slot * K + col  # 64 bits once, then 32
    kbuf, vbuf = kbuf + window, vbuf + window
    tl.store(kn + window + own, k_n, real)
    tl.store(kbuf + own, k, real)
    tl.store(vbuf + own, v, real)
    tl.store(rq + (head * M + m)[:, None], r_q, (m < M)[:, None])
    tl.store(rk + head + tl.arange(0, 1), r_k)
    tl.store(q_rot + (head * M + m)[:, None] * K + col[None, :], q, mask)

    top = tl.sum(q.to(F32) * k.to(F32)[None, :], 1) * (scale * LOG2E)
    parts, o = tl.zeros([padded(M), N], F32), tl.zeros(q.shape, F32) + v.to(F32)[None, :]
    first = tl.maximum(t + 1, W - tl.load(count + b).to(tl.int32))
    for start in range(first, slot, N):
        n = start + tl.arange(0, N)
        o, parts = _slots(q, kbuf, vbuf, n, n < slot, top, scale, o, parts, K)
    total = 1 + tl.sum(parts, 1)
    tl.store(out + _by_expert(b, c, m, h) + col[None, :], o / total[:, None], mask)
    tl.store(lse + head * M + m, (top + tl.log2(total)) / LOG2E, m < M)


@triton.jit
def _probabilities(q, do, lse2, delta, keys, values, n, seen, scale, K: constexpr):
    """Return attention weights of slots n, the gradient of their scores (zero if not seen), and
    their keys."""
    k, v, p = _weights(q, keys, values, n, seen, lse2, scale, K)
    ds = p * (tl.dot(do, tl.trans(v), input_precision='ieee') - delta[:, None]) * scale
    return p.to(q.dtype), ds.to(q.dtype), k


@triton.jit
def _before_norm(g, x, r, cos, sin, K: constexpr):
    """Return the gradient of x's input from the gradient g of x = RoPE(norm(input)), (rows, X). r:
    the factors of the norm. A rotation keeps lengths, so the norm's backward may come first."""
    rows: constexpr = x.shape[0]
    x = x.to(F32)
    g = r * (g - x * (tl.sum(g * x, 1) / K)[:, None])
    g1, g2 = tl.split(tl.trans(tl.reshape(g, (rows, 2, padded(K // 2))), 0, 2, 1))
    g = tl.join(g1 * cos + g2 * sin, g2 * cos - g1 * sin)
    return tl.reshape(tl.trans(g, 0, 2, 1), x.shape)


# The backward: attention weights from the log-sum-exp, gradients of queries, keys and values, then
# the backward of RoPE and the norms, written into the row of dqkv. Adding to dk and dv over the
# whole window in fp32 would be the largest traffic of the loop. So only the slots of the token's
# own group of F tokens, which the group's other tokens need at once, are added here. For the others
# p and ds are kept (M * S numbers per token instead of 2 * S * K) and added by one product per
# group.
@triton.jit(do_not_specialize=['t', 'g0'])
def _attention_backward_kernel(datt, kept, memory, sums, dqkv, t, g0, W, S, F, scale, h: constexpr):
    _begin(h.pdl)
    att, q_rot, rq, rk, lse = kept
    kbuf, vbuf, count, cos, sin = memory
    dk, dv, P, DS, DO = sums
    N: constexpr = h.N
    C: constexpr = h.C
    M: constexpr = h.M
    K: constexpr = h.K
    c, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    col, _, real = _columns(K)
    m, j = tl.arange(0, padded(M)), tl.arange(0, padded(K // 2))
    slot, head, mk = W + t, b * C + c, m < M
    mask = mk[:, None] & real[None, :]
    # where this head's slots begin, and this token's rows of P, DS and DO
    window, rows = head * S * K, (head * F + (t - g0)) * M
    kbuf, vbuf, dk, dv = kbuf + window, vbuf + window, dk + window, dv + window
    P, DS = P + rows * S, DS + rows * S
    at = _by_expert(b, c, m, h) + col[None, :]
    do, o = tl.load(datt + at, mask, 0.0), tl.load(att + at, mask, 0.0)
    q = tl.load(q_rot + (head * M + m)[:, None] * K + col[None, :], mask, 0.0)
    tl.store(DO + (rows + m)[:, None] * K + col[None, :], do, mask)
    delta = tl.sum(do.to(F32) * o.to(F32), 1)
    lse2 = tl.load(lse + head * M + m, mk, 0.0) * LOG2E
    first = tl.maximum(t + 1, W - tl.load(count + b).to(tl.int32))
    dq = tl.zeros(q.shape, F32)

    # an even start lets stores be wide; what is written outside g0 .. W+g0-1 is zero and never read
    for start in range(g0 // 8 * 8, W + g0, N):
        n = start + tl.arange(0, N)
        seen = (n >= first) & (n < W + g0)
        p, ds, k = _probabilities(q, do, lse2, delta, kbuf, vbuf, n, seen, scale, K)
        to, some = m[:, None] * S + n[None, :], mk[:, None] & (n < S)[None, :]
        tl.store(P + to, p, some)
        tl.store(DS + to, ds, some)
        dq = tl.dot(ds, k, dq, input_precision='ieee')

    dk_own, dv_own = tl.zeros(col.shape, F32), tl.zeros(col.shape, F32)
    for start in range(W + g0, slot + 1, 16):
        n = start + tl.arange(0, 16)
        seen = (n >= first) & (n <= slot)
        p, ds, k = _probabilities(q, do, lse2, delta, kbuf, vbuf, n, seen, scale, K)
        to, some = n[:, None] * K + col[None, :], (n <= slot)[:, None] & real[None, :]
        own = (n == slot)[:, None]
        g = tl.dot(tl.trans(ds), q, tl.load(dk + to, some, 0.0), input_precision='ieee')
        tl.store(dk + to, g, some)
        dk_own += tl.sum(tl.where(own, g, 0.0), 0)
        g = tl.dot(tl.trans(p), do, tl.load(dv + to, some, 0.0), input_precision='ieee')
        tl.store(dv + to, g, some)
        dv_own += tl.sum(tl.where(own, g, 0.0), 0)
        dq = tl.dot(ds, k, dq, input_precision='ieee')

    cos = tl.load(cos + slot * K + j, j < K // 2, 0.0)
    sin = tl.load(sin + slot * K + K // 2 + j, j < K // 2, 0.0)
    dqkv += b * ((M + 2) * C * K)
    r = tl.load(rq + head * M + m, mk, 0.0)[:, None]
    dq = _before_norm(dq, q, r, cos, sin, K)
    tl.store(dqkv + (c * M + m)[:, None] * K + col[None, :], dq, mask)
    k = tl.load(kbuf + slot * K + col, real, 0.0)
    dk_own = _before_norm(dk_own[None, :], k[None, :], tl.load(rk + head), cos, sin, K)
    tl.store(dqkv + (C * M + c) * K + col[None, :], dk_own, real[None, :])
    tl.store(dqkv + (C * M + C + c) * K + col, dv_own, real)


def _launch(kernel, h: Heads, B: int, W: int) -> Callable:
    """Return a launcher of an attention kernel for these sizes, one program per cache head and
    stream."""
    stages = 2 if W <= 128 else 3 if B * h.C > 132 else 4
    sizes = Sizes(*h, h.C, h.M, min(64, padded(W)), 'pdl' in enabled_forms())
    options = {'num_warps': 4, 'num_stages': stages} | ({'launch_pdl': True} if sizes.pdl else {})
    return functools.partial(kernel[h.C, B], scale=1 / math.sqrt(h.K), h=sizes, **options)


def window_attention(
    qkv: Tensor, memory: tuple, at: tuple, h: Heads, out: Tensor, keep: tuple
) -> Tensor:
    """Store the key and value of token t of a block, and return its attended values `out` (E, B,
    G*R*K), which are written in place.

    qkv (B, (C*M + 2*C)*K); memory: buffers of rotated keys, values and unrotated keys (B*C, S, K),
    count (B,), cos and sin (S, K); at: (t, W); keep: (rq, rk, q_rot, lse), written for the
    backward: factors of the norms, rotated queries and the log-sum-exp."""
    run = _launch(_attention_kernel, h, len(qkv), at[1])
    run(qkv, memory, out, keep, *at, memory[0].size(1))
    return out


def window_attention_backward(
    datt: Tensor,
    kept: tuple,
    memory: tuple,
    at: tuple,
    h: Heads,
    sums: tuple,
) -> Tensor:
    """Return the gradient of qkv's row from that of the attended values, datt (E, B, G*R*K).

    kept: attended values, q_rot, rq, rk and lse of the forward; memory: keys, values, count, cos
    and sin; at: (t, g0, W), where g0 is the first token of t's group; sums: dk and dv (B*C, S, K),
    which are added to at slots W + g0 .. W + t, and P, DS (B*C, F, M, S) and DO (B*C, F, M, K),
    where p, ds and do are left for the group's one product over the other slots."""
    B, sizes = datt.size(1), (*at, memory[0].size(1), sums[2].size(1))
    dqkv = datt.new_empty(B, (h.M + 2) * h.C * h.K)
    _launch(_attention_backward_kernel, h, B, at[2])(datt, kept, memory, sums, dqkv, *sizes)
    return dqkv


# ---- experts' products, with what stands around them ----

# A tile (BM, BN) of x @ w, x (B, K), w (K, N), BK of K per step, in S parts; P partial sums of
# squares per row; before and after as in `product`.
Tile = namedtuple('Tile', 'K N P S BM BN BK before after pdl')


@triton.jit
def _factor(ss, rows, real, D: constexpr, P: constexpr):
    """Return the factors of the RMSNorm of rows from partial sums of their squares, ss (..., P)."""
    p = tl.arange(0, padded(P, 1))
    parts = tl.load(ss + rows[:, None] * P + p[None, :], real[:, None] & (p < P)[None, :], 0.0)
    return tl.rsqrt(tl.sum(parts, 1) / D + EPS)


# Each expert's x @ w with what stands before and after it, so that neither is a pass over memory. A
# residual is added while y is in fp32 registers, and the sums of squares for the norm that follows
# are taken there, one partial sum per tile of columns (atomics would add in no fixed order). A norm
# on load gets its factors r from those sums. Each tile of columns then reads y in fp32, twice the
# bytes of bf16, which is cheap while one tile holds all rows and the weights are the traffic. With
# S > 1, S programs share the K of a tile, and the last one to finish adds all parts, in order.
@triton.jit
def _expert_kernel(x, w, beside, out, ss, f, r, sums, ready, B, strides, c: constexpr):
    _begin(c.pdl)
    w_e, w_n, w_k, beside_e = strides
    e, part = tl.program_id(2).to(tl.int64) // c.S, tl.program_id(2) % c.S
    # tiles of rows run beside each other, to share a tile of weights in L2
    rows = tl.program_id(0) * c.BM + tl.arange(0, c.BM)
    cols = tl.program_id(1) * c.BN + tl.arange(0, c.BN)
    own = rows < tl.where(tl.program_id(1) == 0, B, 0)  # the first tile of columns keeps the norm
    if c.before == 'norm':
        factor = _factor(ss, e * B + rows, rows < B, c.K, c.P)
        tl.store(r + e * B + rows, factor, own)
    acc = tl.full((c.BM, c.BN), 0.0, F32)
    for start in range(part * (c.K // c.S), (part + 1) * (c.K // c.S), c.BK):
        k = start + tl.arange(0, c.BK)
        at, mask = rows[:, None] * c.K + k[None, :], (rows < B)[:, None] & (k < c.K)[None, :]
        a = tl.load(x + e * B * c.K + at, mask, 0.0)
        if c.before == 'norm':
            a = (a * factor[:, None]).to(w.dtype.element_ty)
            tl.store(f + e * B * c.K + at, a, mask & own[:, None])
        weights = w + e * w_e + cols[None, :] * w_n + k[:, None] * w_k
        b = tl.load(weights, (k < c.K)[:, None] & (cols < c.N)[None, :], 0.0)
        acc = tl.dot(a, b, acc, input_precision='ieee')
    if c.S > 1:
        tile = (e * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(0) + tl.program_id(0)
        parts = sums + tile * (c.S * c.BM * c.BN) + tl.arange(0, c.BM)[:, None] * c.BN
        parts += tl.arange(0, c.BN)[None, :]
        tl.store(parts + part * (c.BM * c.BN), acc)
        tl.debug_barrier()  # all of the program's threads have stored
        if tl.atomic_add(ready + tile, 1) < c.S - 1:
            return
        tl.store(ready + tile, 0)
        acc = tl.full((c.BM, c.BN), 0.0, F32)
        for i in range(c.S):  # past the L1, which does not see others' stores
            acc += tl.load(parts + i * (c.BM * c.BN), cache_modifier='.cg')
    at, mask = rows[:, None] * c.N + cols[None, :], (rows < B)[:, None] & (cols < c.N)[None, :]
    if c.after == 'relu':
        acc = tl.maximum(acc, 0.0) * tl.maximum(acc, 0.0)
    else:
        other = tl.load(beside + e * beside_e + at, mask, 0.0).to(F32)
        acc = acc + other if c.after == 'add' else acc * 2 * tl.sqrt(other)
    tl.store(out + e * B * c.N + at, acc, mask)
    if c.after == 'add':
        tl.store(ss + (e * B + rows) * c.P + tl.program_id(1), tl.sum(acc * acc, 1), rows < B)


@functools.cache
def _ready(device: torch.device) -> Tensor:
    """Return counters of the parts of a tile that are done; zeros between kernels."""
    return torch.zeros(2**14, dtype=torch.int32, device=device)


def product(
    x: Tensor,
    w: Tensor,
    before: str,
    after: str,
    beside: Tensor | None = None,
    ss: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """Compute after(before(x) @ w^T), (E, B, N), for x (E, B, K) and w (E, N, K).

    before: '' or 'norm'; after: 'relu' (squared), 'times' (its backward, * 2 sqrt(beside)) or 'add'
    (+ beside); beside: (E, B, N), or (B, N) for all experts; ss (E, B, P): partial sums of squares
    of x for 'norm'. Returns the result, its partial sums of squares after 'add', and for 'norm'
    norm(x) in w's dtype and its factors (E, B, 1). With the way 'split' (kernels.using), K is
    divided among programs where there are too few tiles for an H100's 132 SMs."""
    (E, B, K), N, f, r = x.shape, w.size(1), None, None
    # up to 128 rows are one tile, so that weights are streamed once; columns are cut until each of
    # an H100's 132 SMs has work (the widest tile, which spills registers after 'add': four times).
    # By arithmetic, not measured: 24 KiB and more of weights in flight on an SM
    BM = min(128, padded(B))
    programs = {BN: E * triton.cdiv(B, BM) * triton.cdiv(N, BN) for BN in (256, 128, 64)}
    BN = next((n for n in (128, 64) if programs[n] >= 128), 32)
    if B > 128 and programs[256] >= 512 and after != 'add':
        BN = 256
    BK = min((128 if BM <= 32 else 64) * 2 // w.element_size(), padded(K))
    warps, stages = (8, 3) if BM * BN >= 128 * 128 else (4, 4)
    if before == 'norm':
        f, r = w.new_empty(x.shape), x.new_empty(E, B, 1)
        if B > 128:
            norm_sum(x, ss, None, f, r)
            x, before = f, ''
    out = (beside if after == 'add' else w).new_empty(E, B, N)
    if after == 'add':
        ss = out.new_empty(E, B, triton.cdiv(N, BN))
    tiles, S, pdl = E * triton.cdiv(B, BM) * triton.cdiv(N, BN), 1, 'pdl' in enabled_forms()
    if 'split' in enabled_forms() and K % BK == 0:
        S = max([n for n in range(1, K // BK + 1) if K // BK % n == 0 and n * tiles <= 144] or [1])
    sums = out.new_empty(tiles * S * BM * BN, dtype=torch.float32) if S > 1 else None
    c = Tile(K, N, 0 if ss is None else ss.size(2), S, BM, BN, BK, before, after, pdl)
    strides = *w.stride(), 0 if beside is None or beside.dim() == 2 else B * N
    options = {'num_warps': warps, 'num_stages': stages} | ({'launch_pdl': True} if pdl else {})
    run = _expert_kernel[triton.cdiv(B, BM), triton.cdiv(N, BN), E * S]
    run(x, w, beside, out, ss, f, r, sums, _ready(x.device), B, strides, c, **options)
    return out, ss, f, r


Sums = namedtuple('Sums', 'E D P BD pdl')


# Each expert's norm and the weighted sum over experts in one read of x. A program holds a slice of
# columns of all experts of one stream, so that their loads are in flight together.
@triton.jit
def _norm_sum_kernel(x, ss, coef, s, h, r, B, coef_e, coef_b, c: constexpr):
    _begin(c.pdl)
    b, e = tl.program_id(0).to(tl.int64), tl.arange(0, padded(c.E, 1)).to(tl.int64)
    d = tl.program_id(1) * c.BD + tl.arange(0, c.BD)
    at, mask = (e * B + b)[:, None] * c.D + d[None, :], (e < c.E)[:, None] & (d < c.D)[None, :]
    factor = _factor(ss, e * B + b, e < c.E, c.D, c.P)
    hat = tl.load(x + at, mask, 0.0) * factor[:, None]
    tl.store(r + e * B + b, factor, e < tl.where(tl.program_id(1) == 0, c.E, 0))
    tl.store(h + at, hat, mask)
    if s is not None:
        weight = tl.load(coef + e * coef_e + b * coef_b, e < c.E, 0.0)
        tl.store(s + b * c.D + d, tl.sum(weight[:, None] * hat, 0), d < c.D)


def norm_sum(x: Tensor, ss: Tensor, coef: Tensor | None, h: Tensor, r: Tensor) -> Tensor:
    """Normalize x (E, B, D), whose partial sums of squares are ss (E, B, P): write h = norm(x) and
    its factors r (E, B, 1), and return the sum over experts of coef * h (B, D). coef: (E, B, 1) or
    0-dim; None: no sum is made or returned."""
    E, B, D = x.shape
    BD = min(padded(D), max(16, min(128 if B <= 64 else 256, 4096 // padded(E, 1))))
    s = None if coef is None else x.new_empty(B, D)
    strides, pdl = (
        (0, 0) if coef is None else coef.expand(E, B, 1).stride()[:2],
        'pdl' in enabled_forms(),
    )
    c, options = Sums(E, D, ss.size(2), BD, pdl), {'launch_pdl': True} if pdl else {}
    _norm_sum_kernel[B, triton.cdiv(D, BD)](x, ss, coef, s, h, r, B, *strides, c, **options)
    return s


# ---- layer.experts as a whole ----


def _norm_backward(g: Tensor, x_hat: Tensor, r: Tensor) -> Tensor:
    """Return the gradient of x from that of x_hat = norm(x) = x * r, g."""
    x_hat = x_hat.to(g.dtype)
    return r * (g - x_hat * (g * x_hat).mean(-1, keepdim=True))


@fused
def _output_backward(ds: Tensor, coef: Tensor, h: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    dx = _norm_backward(coef * ds, h, r)
    return dx, dx.to(h.dtype)


@fused
def _input_backward(
    dx: Tensor, dact: Tensor, r: Tensor, f: Tensor, wo: Tensor, up: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    dy = dx + _norm_backward(torch.bmm(dact, up).to(dx.dtype), f, r)
    low = dy.to(wo.dtype)
    return dy.sum(0), low, torch.bmm(low, wo)


class Experts(torch.autograd.Function):
    """Compute s = sum of coef * norm(x), x = y + down relu(up norm(y))^2, y = u + wo attended. wo,
    up and down are DeferredLinears, which note their inputs and gradients, or, without gradients,
    Linears."""

    @staticmethod
    def forward(ctx, linears, u, attended, coef):
        (wo, up, down), attended = linears, attended.contiguous()
        y, ss, _, _ = product(attended, wo.w, '', 'add', u)
        act, _, f, r = product(y, up.w, 'norm', 'relu', None, ss)
        x, ss, _, _ = product(act, down.w, '', 'add', y)
        h, rx = torch.empty_like(f), torch.empty_like(r)
        ctx.linears, ctx.ways = linears, enabled_forms()
        ctx.save_for_backward(attended, coef, act, f, r, h, rx)
        return norm_sum(x, ss, coef, h, rx)

    @staticmethod
    def backward(ctx, ds):
        (wo, up, down), (attended, coef, act, f, r, h, rx) = ctx.linears, ctx.saved_tensors
        with using(ctx.ways):
            dx, low = _output_backward(ds, coef, h, rx)
            dact = product(low, down.w.mT, '', 'times', act)[0]
            du, dy, dattended = _input_backward(dx, dact, r, f, wo.w, up.w)
        for linear, x, g in ((down, act, low), (up, f, dact), (wo, attended, dy)):
            if linear.weight.requires_grad:
                linear.record(x, g)
        dcoef = (h * ds).sum(-1, keepdim=True).to(ds.dtype) if ctx.needs_input_grad[3] else None
        return None, du, dattended, dcoef


SCALES = {'sqrt_sum': lambda E: E**-0.5, 'mean': lambda E: 1 / E}  # of aggregations without router


def experts(
    w: layer.LayerWeights, u: Tensor, attended: Tensor, gates: Tensor | None, config: object
) -> Tensor:
    """Compute layer.experts: all of it in the recurrent model; in GPT, without gradients, the first
    two products and what stands around them."""
    if w.a is None:
        y, ss, _, _ = product(attended.contiguous(), w.wo.w, '', 'add', u)
        act = product(y, w.up.w, 'norm', 'relu', None, ss)[0]
        return layer.merge(y, w.down(act), u, gates, config.aggregation, config.residual)
    if gates is None:
        coef = torch.full((), SCALES[config.aggregation](len(w.up.w)), device=u.device)
    else:
        coef = gate_weights(gates, config.aggregation).t()[..., None]  # (E, B, 1)
    return Experts.apply((w.wo, w.up, w.down), u, attended, coef)


def suits_experts(
    w: layer.LayerWeights, u: Tensor, attended: Tensor, gates: Tensor | None, config: object
) -> bool:
    linears = (w.wo, w.up, w.down)
    differentiable = all(type(x) is DeferredLinear for x in linears) and w.a is not None
    plain_ffn = w.up.w.dim() == 3 and w.up.w.size(1) == w.down.w.size(2)
    known = gates is not None or config.aggregation in SCALES
    may_run = differentiable or not torch.is_grad_enabled()
    return u.dtype == torch.float32 and plain_ffn and known and may_run


# ---- decoding ----


# _attention_kernel for a ring of W slots. A graph replays it, so the slot of the newest entry is
# read from memory (cache.Place). Slots are read in the order of memory: only their age decides
# which are seen.
@triton.jit
def _ring_kernel(qkv, ring, place, rope, out, W, scale, h: constexpr):
    keys, values = ring
    N: constexpr = h.N
    M: constexpr = h.M
    K: constexpr = h.K
    c, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    col, _, real = _columns(K)
    m = tl.arange(0, padded(M))
    slot, count = (tl.load(place) % W).to(tl.int32), tl.load(place + 1 + b)
    rope += slot * 2 * K
    q, k, _, v, _, _ = _token(qkv, b, c, rope, rope + K, h)
    keys, values = keys + (b * h.C + c) * W * K, values + (b * h.C + c) * W * K
    tl.store(keys + slot * K + col, k, real)
    tl.store(values + slot * K + col, v, real)

    top = tl.sum(q.to(F32) * k.to(F32)[None, :], 1) * (scale * LOG2E)
    parts, o = tl.zeros([padded(M), N], F32), tl.zeros(q.shape, F32) + v.to(F32)[None, :]
    for start in range(0, W, N):
        n = start + tl.arange(0, N)
        age = (slot + W - n) % W
        seen = (age > 0) & (age < count) & (n < W)
        o, parts = _slots(q, keys, values, n, seen, top, scale, o, parts, K)
    total = 1 + tl.sum(parts, 1)
    mask = (m < M)[:, None] & real[None, :]
    tl.store(out + _by_expert(b, c, m, h) + col[None, :], o / total[:, None], mask)


def ring_attention(qkv: Tensor, ring: tuple, place: Tensor, rope: Tensor, h: Heads) -> Tensor:
    """Store a token's key and value in the ring, (keys, values) of (B*C, W, K) each, and return its
    attended values (E, B, G*R*K). qkv (B, (C*M + 2*C)*K); place (1 + B,) int64 and rope (W + 1, 2,
    K) as in cache.Place."""
    B, W, out = len(qkv), ring[0].size(1), qkv.new_empty(h.E, len(qkv), h.G * h.R * h.K)
    _launch(_ring_kernel, h, B, W)(qkv, ring, place, rope, out, W)
    return out


# ---- loss ----


# Soft cap, log-sum-exp, the target's score and the gradient, in two reads and one write of a row
# (compiled PyTorch: eight passes in fp32). Capped scores lie in [-15, 15]: exp(score - 15) can
# neither overflow nor vanish, so no maximum is needed first.
@triton.jit
def _cross_entropy_kernel(logits, target, loss, scale, V, BV: constexpr):
    i = tl.program_id(0).to(tl.int64)
    row, goal = logits + i * V, tl.load(target + i).to(tl.int32)
    total, right = tl.zeros([BV], F32), tl.zeros([BV], F32)
    for start in range(0, V, BV):
        v = start + tl.arange(0, BV)
        x = tl.load(row + v, v < V, 0.0).to(F32) * (2 / SOFTCAP)
        score = SOFTCAP - 2 * SOFTCAP / (tl.exp(x) + 1)
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
    """Return the summed cross-entropy of soft-capped logits (rows, V) against target (rows,), and
    grad_scale times its gradient, which overwrites the logits."""
    rows, V = logits.shape
    loss, block = torch.empty(rows, dtype=torch.float32, device=logits.device), min(4096, padded(V))
    sizes = float(grad_scale), V, block
    _cross_entropy_kernel[rows,](logits, target.contiguous(), loss, *sizes, num_warps=8)
    return loss.sum(), logits


# ---- layer.attend, for both caches -------------------------------------------------------------


class AttendWindow(torch.autograd.Function):
    """Compute layer.attend with a cache.Window: norm, RoPE, push and attention of token t from qkv
    (B, (C M + 2 C) K), in one kernel each way."""

    @staticmethod
    def forward(ctx, window, t, qkv):
        slots, heads, (N, _, K) = window.slots, window.heads, window.k.shape
        wide = functools.partial(qkv.new_empty, dtype=slots.wide)
        out, q = (
            qkv.new_empty(heads.E, len(qkv), heads.G * heads.R * K),
            qkv.new_empty(N, heads.M, K),
        )
        # factors of the norms, and the log-sum-exp
        rq, rk, lse = wide(N, heads.M), wide(N), wide(N, heads.M)
        memory = window.k, window.v, window.unrotated, slots.count, slots.cos, slots.sin
        window_attention(qkv, memory, (t, slots.W), heads, out, (rq, rk, q, lse))
        ctx.window, ctx.t, ctx.ways = window, t, enabled_forms()
        ctx.save_for_backward(out, q, rq, rk, lse)
        return out

    @staticmethod
    def backward(ctx, datt):
        window, t, (out, q, rq, rk, lse) = ctx.window, ctx.t, ctx.saved_tensors
        slots, (N, S, K), M = window.slots, window.k.shape, q.size(1)
        window.start_backward(t)
        _, g, end = slots.group_of(t)
        if not window.pending:  # a group's weights, and gradients of its scores and outputs
            sizes = (N, cache.GROUP, M, S), (N, cache.GROUP, M, S), (N, cache.GROUP, M, K)
            window.pending = [[q.new_empty(size) for size in sizes], []]
        sums, queries = window.pending
        queries.insert(0, q)
        memory = window.k, window.v, slots.count, slots.cos, slots.sin
        with using(ctx.ways):
            dqkv = window_attention_backward(
                datt.contiguous(),
                (out, q, rq, rk, lse),
                memory,
                (t, g, slots.W),
                window.heads,
                (window.dk, window.dv, *sums),
            )
        if t == g:
            p, ds, do = (x[:, : end - g].flatten(1, 2) for x in sums)
            window.add_before_group(t, 0, (torch.cat(queries, 1), p, ds, do))
            window.pending = []
        return None, None, dqkv


def attend(qkv: Tensor, cos: Tensor, sin: Tensor, where: Window | Ring) -> Tensor:
    """Compute layer.attend. The angles are read from the cache, for its slots."""
    if isinstance(where, Ring):
        place = where.place
        rings = (where.keys, where.values)
        return ring_attention(qkv, rings, place.place, place.rope, where.heads)
    t, where.t = where.t, where.t + 1
    return AttendWindow.apply(where, t, qkv)


def suits_attend(qkv: Tensor, cos: Tensor, sin: Tensor, where: object) -> bool:
    return isinstance(where, (Window, Ring)) and cos.dtype == torch.float32


def suits_loss(logits: Tensor, targets: Tensor, scale: float, config: object) -> bool:
    return logits.dtype != torch.float64


def slice_loss(
    logits: Tensor, targets: Tensor, scale: float, config: object
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute kernels.slice_loss. The gradient overwrites the logits."""
    loss, gradient = cross_entropy(logits, targets, scale)
    return loss, loss, gradient


# ---- registration ------------------------------------------------------------------------------
# What each form replaces, and a hash of that source when the form was written. After an edit of one
# of these functions, tests/test_triton.py names the new hash: enter it here if the form still
# computes the same.

REPLACES = {
    'attention': (
        layer.attend,
        layer.split_heads,
        kernels.norm,
        kernels.rotate,
        Window.attend,
        cache.WindowAttention,
        cache.store,
        cache.probabilities,
        cache.scores_backward,
        Ring.attend,
        cache.ring_attention,
        cache.advance,
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
    ),
    'loss': (kernels.slice_loss, kernels.losses, kernels.softcap),
}
SOURCES = {
    'attention': '380f991c91e86535',
    'experts': '16def2a4f64393b1',
    'loss': 'f2f168ecaa1a6d05',
}
FORMS = {
    'attention': (attend, suits_attend),
    'experts': (experts, suits_experts),
    'loss': (slice_loss, suits_loss),
}
for name, (form, suits) in FORMS.items():
    forms[name].register(form, suits, replaces=REPLACES[name], source=SOURCES[name])

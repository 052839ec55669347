"""
Triton kernels of the recurrent unroll (unroll.py), for Hopper: bf16 operands, fp32 accumulators, sums and norms.
unroll.py and kernels.py call them where they measure faster than compiled PyTorch, which stands beside each call. Under
TRITON_INTERPRET=1 they run on the CPU, in fp32 (the interpreter's bf16 product is wrong).

h: kernels.Heads; C cache heads (G, or E*G where experts own their cache), M query heads a cache head (E*R, or R).
A row of q, k and v: queries (C, M, K), keys (C, K), values (C, K). A block of n tokens has S = W + n slots: 0..W-1 are carried
entries (those below W - count are empty), token t's is W + t; it sees slots t+1 .. W+t. `dt` is the dtype of matrix products,
`wide` is fp32. RoPE pairs dimension j with j + K/2: a head is handled as two halves of K/2, each padded to a power of two.
What is by expert, (E, rows, X), may be a slice of rows of a larger (E, n, X) buffer, inputs and outputs alike: a row lies together, rows
follow each other, experts any distance apart. Outputs that only a backward reads are written where the caller gives memory for them.
Nothing here synchronises; t and g0 are plain ints that change no kernel, so that a loop over t compiles once.
"""

import math
from collections.abc import Callable

import torch
import triton
import triton.language as tl

from kernels import Heads, compiled, gate_weights

EPS = tl.constexpr(1e-6)  # of every RMSNorm
SOFTCAP = tl.constexpr(15.0)
LOG2E = tl.constexpr(math.log2(math.e))  # the hardware's exponential is base 2


def padded(n: int, least: int = 16) -> int:
    """The tile that holds n: a power of two, at least what a tensor-core product takes."""
    return max(least, triton.next_power_of_2(n))


# ---- attention ----


@triton.jit
def _rotate(x1, x2, cos, sin):
    return x1 * cos - x2 * sin, x2 * cos + x1 * sin


@triton.jit
def _dot2(a1, a2, b1, b2):
    """a @ b over both halves of a head, in fp32."""
    return tl.dot(a2, b2, tl.dot(a1, b1, input_precision='ieee'), input_precision='ieee')


@triton.jit
def _load2(x, mask, HALF: tl.constexpr):
    """Both halves of heads that start at x."""
    return tl.load(x, mask, 0.0), tl.load(x + HALF, mask, 0.0)


@triton.jit
def _store2(x, x1, x2, mask, HALF: tl.constexpr):
    tl.store(x, x1.to(x.dtype.element_ty), mask)
    tl.store(x + HALF, x2.to(x.dtype.element_ty), mask)


@triton.jit
def _by_expert(
    b, c, m, stride_e, G: tl.constexpr, R: tl.constexpr, K: tl.constexpr, SHARED: tl.constexpr
):
    """Where query head m of cache head c lies in (E, B, G*R*K)."""
    if SHARED:
        at = (m // R).to(tl.int64) * stride_e + (b * (G * R) + c * R + m % R) * K
    else:
        at = (c // G).to(tl.int64) * stride_e + (b * (G * R) + (c % G) * R + m) * K
    return at


# Norm of queries and key, RoPE, push into the cache and window attention of one token, in one pass over the window: in PyTorch
# these are a dozen launches and the scores go through memory. One program a cache head and stream, all its M query heads together,
# so that a key is read once. The token's own key never leaves the registers, so that its store needs no barrier; its score is what the
# softmax subtracts: scores of normalised vectors lie within +-sqrt(K), so fp32 needs no running maximum. Empty slots are skipped.
@triton.jit(do_not_specialize=['t'])
def _attention_kernel(
    qkv,
    kbuf,
    vbuf,
    kn,
    count,
    cos,
    sin,
    att,
    rq,
    rk,
    q_rot,
    lse,
    t,
    W,
    S,
    att_e,
    scale,
    C: tl.constexpr,
    M: tl.constexpr,
    G: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    SHARED: tl.constexpr,
    KEEP: tl.constexpr,
    MP: tl.constexpr,
    HP: tl.constexpr,
    N: tl.constexpr,
):
    HALF: tl.constexpr = K // 2
    dt = qkv.dtype.element_ty
    c, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    m, h = tl.arange(0, MP), tl.arange(0, HP)
    hk = h < HALF
    mh = (m < M)[:, None] & hk[None, :]
    slot, head = W + t, b * C + c
    row = qkv + b * ((M + 2) * C * K)
    cos_t, sin_t = tl.load(cos + slot * HALF + h, hk, 0.0), tl.load(sin + slot * HALF + h, hk, 0.0)

    q1, q2 = _load2(row + (c * M + m)[:, None] * K + h[None, :], mh, HALF)
    q1, q2 = q1.to(tl.float32), q2.to(tl.float32)
    r = tl.rsqrt((tl.sum(q1 * q1, 1) + tl.sum(q2 * q2, 1)) / K + EPS)
    q1, q2 = _rotate(q1 * r[:, None], q2 * r[:, None], cos_t[None, :], sin_t[None, :])
    q1, q2 = q1.to(dt), q2.to(dt)

    k1, k2 = _load2(row + (C * M + c) * K + h, hk, HALF)
    v1, v2 = _load2(row + (C * M + C + c) * K + h, hk, HALF)
    k1, k2 = k1.to(tl.float32), k2.to(tl.float32)
    r_k = tl.rsqrt((tl.sum(k1 * k1, 0) + tl.sum(k2 * k2, 0)) / K + EPS)
    k1, k2 = (k1 * r_k).to(dt), (k2 * r_k).to(dt)
    kbuf, vbuf, kn, own = (
        kbuf + head * S * K,
        vbuf + head * S * K,
        kn + head * S * K,
        slot * K + h,
    )  # 64 bits once, then 32
    _store2(kn + own, k1, k2, hk, HALF)
    k1, k2 = _rotate(k1.to(tl.float32), k2.to(tl.float32), cos_t, sin_t)
    k1, k2 = k1.to(dt), k2.to(dt)
    _store2(kbuf + own, k1, k2, hk, HALF)
    _store2(vbuf + own, v1, v2, hk, HALF)

    top = tl.sum(q1.to(tl.float32) * k1.to(tl.float32)[None, :], 1) + tl.sum(
        q2.to(tl.float32) * k2.to(tl.float32)[None, :], 1
    )
    top = top * (scale * LOG2E)  # base 2
    parts = tl.zeros([MP, N], tl.float32)  # summed once, after the loop: slots lie across warps
    o1 = tl.zeros([MP, HP], tl.float32) + v1.to(tl.float32)[None, :]
    o2 = tl.zeros([MP, HP], tl.float32) + v2.to(tl.float32)[None, :]
    first = tl.maximum(t + 1, W - tl.load(count + b).to(tl.int32))
    for start in range(first, slot, N):
        n = start + tl.arange(0, N)
        nh = (n < slot)[:, None] & hk[None, :]
        at = n[:, None] * K + h[None, :]
        keys1, keys2 = _load2(kbuf + at, nh, HALF)
        values1, values2 = _load2(vbuf + at, nh, HALF)
        score = tl.where(
            (n < slot)[None, :],
            _dot2(q1, q2, tl.trans(keys1), tl.trans(keys2)) * (scale * LOG2E),
            float('-inf'),
        )
        p = tl.exp2(score - top[:, None])
        parts += p
        o1 = tl.dot(p.to(dt), values1, o1, input_precision='ieee')
        o2 = tl.dot(p.to(dt), values2, o2, input_precision='ieee')
    total = 1 + tl.sum(parts, 1)
    to = att + _by_expert(b, c, m, att_e, G, R, K, SHARED)[:, None] + h[None, :]
    _store2(to, o1 / total[:, None], o2 / total[:, None], mh, HALF)
    if KEEP:
        tl.store(rq + head * M + m, r, m < M)
        tl.store(rk + head, r_k)
        _store2(q_rot + (head * M + m)[:, None] * K + h[None, :], q1, q2, mh, HALF)
        tl.store(lse + head * M + m, (top + tl.log2(total)) / LOG2E, m < M)


@triton.jit
def _probabilities(
    q1,
    q2,
    do1,
    do2,
    lse2,
    delta,
    kbuf,
    vbuf,
    n,
    seen,
    h,
    scale,
    HALF: tl.constexpr,
    K: tl.constexpr,
):
    """p, the gradient of the scores, and the keys, of slots n; zero where not seen."""
    nh = seen[:, None] & (h < HALF)[None, :]
    at = n[:, None] * K + h[None, :]
    k1, k2 = _load2(kbuf + at, nh, HALF)
    v1, v2 = _load2(vbuf + at, nh, HALF)
    score = _dot2(q1, q2, tl.trans(k1), tl.trans(k2)) * (scale * LOG2E)
    p = tl.where(seen[None, :], tl.exp2(score - lse2[:, None]), 0.0)
    ds = p * (_dot2(do1, do2, tl.trans(v1), tl.trans(v2)) - delta[:, None]) * scale
    return p.to(q1.dtype), ds.to(q1.dtype), k1, k2


# Its backward for one token: probabilities again from the log-sum-exp, gradients of queries, keys and values, then RoPE's and the
# norms' backward straight into the row of dqkv. fp32 read-modify-write of dk and dv over the whole window would be the largest
# traffic of the loop: only the slots of the token's own group of F (which the group's other tokens need at once) are added here; for the
# others p and ds are kept (M * S numbers a token, not 2 * S * K), to be added by one product a group.
@triton.jit(do_not_specialize=['t', 'g0'])
def _attention_backward_kernel(
    datt,
    att,
    q_rot,
    rq,
    rk,
    lse,
    kbuf,
    vbuf,
    count,
    cos,
    sin,
    dk,
    dv,
    P,
    DS,
    DO,
    dqkv,
    t,
    g0,
    W,
    S,
    datt_e,
    att_e,
    F,
    scale,
    C: tl.constexpr,
    M: tl.constexpr,
    G: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    SHARED: tl.constexpr,
    MP: tl.constexpr,
    HP: tl.constexpr,
    N: tl.constexpr,
):
    HALF: tl.constexpr = K // 2
    c, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    m, h = tl.arange(0, MP), tl.arange(0, HP)
    hk, mk = h < HALF, m < M
    mh = mk[:, None] & hk[None, :]
    slot, head = W + t, b * C + c
    window, kept = (
        head * S * K,
        (head * F + (t - g0)) * M,
    )  # where this head's slots begin, and this token's rows of P, DS and DO
    kbuf, vbuf, dk, dv, P, DS, DO = (
        kbuf + window,
        vbuf + window,
        dk + window,
        dv + window,
        P + kept * S,
        DS + kept * S,
        DO + kept * K,
    )
    do1, do2 = _load2(
        datt + _by_expert(b, c, m, datt_e, G, R, K, SHARED)[:, None] + h[None, :], mh, HALF
    )
    o1, o2 = _load2(
        att + _by_expert(b, c, m, att_e, G, R, K, SHARED)[:, None] + h[None, :], mh, HALF
    )
    q1, q2 = _load2(q_rot + (head * M + m)[:, None] * K + h[None, :], mh, HALF)
    _store2(DO + m[:, None] * K + h[None, :], do1, do2, mh, HALF)
    delta = tl.sum(do1.to(tl.float32) * o1.to(tl.float32), 1) + tl.sum(
        do2.to(tl.float32) * o2.to(tl.float32), 1
    )
    lse2 = tl.load(lse + head * M + m, mk, 0.0) * LOG2E
    first = tl.maximum(t + 1, W - tl.load(count + b).to(tl.int32))
    dq1, dq2 = tl.zeros([MP, HP], tl.float32), tl.zeros([MP, HP], tl.float32)

    for start in range(
        g0 // 8 * 8, W + g0, N
    ):  # a start known to be even lets stores be wide; what is
        n = start + tl.arange(0, N)  # written outside g0 .. W+g0-1 is zero and never read
        seen = (n >= first) & (n < W + g0)
        p, ds, k1, k2 = _probabilities(
            q1, q2, do1, do2, lse2, delta, kbuf, vbuf, n, seen, h, scale, HALF, K
        )
        to, mn = m[:, None] * S + n[None, :], mk[:, None] & (n < S)[None, :]
        tl.store(P + to, p, mn)
        tl.store(DS + to, ds, mn)
        dq1 = tl.dot(ds, k1, dq1, input_precision='ieee')
        dq2 = tl.dot(ds, k2, dq2, input_precision='ieee')

    dk1, dk2 = (
        tl.zeros([HP], tl.float32),
        tl.zeros([HP], tl.float32),
    )  # of the token's own key and value
    dv1, dv2 = tl.zeros([HP], tl.float32), tl.zeros([HP], tl.float32)
    for start in range(W + g0, slot + 1, 16):
        n = start + tl.arange(0, 16)
        own, nh = (n == slot)[:, None], (n <= slot)[:, None] & hk[None, :]
        p, ds, k1, k2 = _probabilities(
            q1,
            q2,
            do1,
            do2,
            lse2,
            delta,
            kbuf,
            vbuf,
            n,
            (n >= first) & (n <= slot),
            h,
            scale,
            HALF,
            K,
        )
        dq1 = tl.dot(ds, k1, dq1, input_precision='ieee')
        dq2 = tl.dot(ds, k2, dq2, input_precision='ieee')
        to = n[:, None] * K + h[None, :]
        g1, g2 = _load2(dk + to, nh, HALF)
        g1, g2 = (
            tl.dot(tl.trans(ds), q1, g1, input_precision='ieee'),
            tl.dot(tl.trans(ds), q2, g2, input_precision='ieee'),
        )
        _store2(dk + to, g1, g2, nh, HALF)
        dk1, dk2 = dk1 + tl.sum(tl.where(own, g1, 0.0), 0), dk2 + tl.sum(tl.where(own, g2, 0.0), 0)
        g1, g2 = _load2(dv + to, nh, HALF)
        g1, g2 = (
            tl.dot(tl.trans(p), do1, g1, input_precision='ieee'),
            tl.dot(tl.trans(p), do2, g2, input_precision='ieee'),
        )
        _store2(dv + to, g1, g2, nh, HALF)
        dv1, dv2 = dv1 + tl.sum(tl.where(own, g1, 0.0), 0), dv2 + tl.sum(tl.where(own, g2, 0.0), 0)

    cos_t, sin_t = tl.load(cos + slot * HALF + h, hk, 0.0), -tl.load(sin + slot * HALF + h, hk, 0.0)
    row = dqkv + b * ((M + 2) * C * K)
    q1, q2 = (
        q1.to(tl.float32),
        q2.to(tl.float32),
    )  # a rotation keeps lengths: the norm's backward first
    r = tl.load(rq + head * M + m, mk, 0.0)[:, None]
    along = ((tl.sum(dq1 * q1, 1) + tl.sum(dq2 * q2, 1)) / K)[:, None]
    dq1, dq2 = _rotate(
        r * (dq1 - q1 * along), r * (dq2 - q2 * along), cos_t[None, :], sin_t[None, :]
    )
    _store2(row + (c * M + m)[:, None] * K + h[None, :], dq1, dq2, mh, HALF)
    k1, k2 = _load2(kbuf + slot * K + h, hk, HALF)
    k1, k2, r_k = k1.to(tl.float32), k2.to(tl.float32), tl.load(rk + head)
    along_k = (tl.sum(dk1 * k1, 0) + tl.sum(dk2 * k2, 0)) / K
    dk1, dk2 = _rotate(r_k * (dk1 - k1 * along_k), r_k * (dk2 - k2 * along_k), cos_t, sin_t)
    _store2(row + (C * M + c) * K + h, dk1, dk2, hk, HALF)
    _store2(row + (C * M + C + c) * K + h, dv1, dv2, hk, HALF)


def _attention_constants(h, B, W):
    sizes = dict(
        C=h.C, M=h.M, G=h.G, R=h.R, K=h.K, SHARED=h.shared, MP=padded(h.M), HP=padded(h.K // 2)
    )
    stages = 2 if W <= 128 else 3 if B * h.C > 132 else 4
    return (h.C, B), sizes | dict(N=min(64, padded(W)), num_warps=4, num_stages=stages)


def window_attention(
    qkv: torch.Tensor,
    memory: tuple,
    at: tuple[int, int],
    h: Heads,
    out: torch.Tensor,
    keep: tuple | None,
) -> torch.Tensor:
    """Token t of a block, at = (t, W): its key into kn and kbuf, its value into vbuf (B*C, S, K), and its
    attended values into out (E, B, G*R*K). qkv (B, (C*M + 2*C)*K); memory: kbuf, vbuf, kn, count, cos and
    sin (S, K/2); keep: None, or (rq, rk, q_rot, lse), written for the backward."""
    (kbuf, vbuf, kn, count, cos, sin), (t, W) = memory, at
    grid, constants = _attention_constants(h, qkv.size(0), W)
    sizes = t, W, kbuf.size(1), out.stride(0), 1 / math.sqrt(h.K)
    kept, constants = keep or (None,) * 4, constants | {'KEEP': keep is not None}
    _attention_kernel[grid](qkv, kbuf, vbuf, kn, count, cos, sin, out, *kept, *sizes, **constants)
    return out


def window_attention_backward(
    datt: torch.Tensor,
    kept: tuple,
    memory: tuple,
    at: tuple,
    h: Heads,
    sums: tuple,
    place: torch.Tensor | None,
) -> torch.Tensor:
    """From datt (E, B, G*R*K): the gradient of qkv's row, in `place` where given. kept: att, q_rot, rq, rk,
    lse; memory: kbuf, vbuf, count, cos, sin; at = (t, g0, W), g0 the first token of t's group; sums: dk, dv
    (B*C, S, K), added to at slots W+g0 .. W+t, and P, DS (B*C, F, M, S) with DO (B*C, F, M, K), where the
    other slots' p and ds go for the group's one product."""
    (att, q_rot, rq, rk, lse), (kbuf, vbuf, count, cos, sin), (t, g0, W) = kept, memory, at
    B = datt.size(1)
    grid, constants = _attention_constants(h, B, W)
    dqkv = datt.new_empty(B, (h.C * h.M + 2 * h.C) * h.K) if place is None else place
    sizes = (
        t,
        g0,
        W,
        kbuf.size(1),
        datt.stride(0),
        att.stride(0),
        sums[2].size(1),
        1 / math.sqrt(h.K),
    )
    tensors = datt, att, q_rot, rq, rk, lse, kbuf, vbuf, count, cos, sin, *sums, dqkv
    _attention_backward_kernel[grid](*tensors, *sizes, **constants)
    return dqkv


# ---- experts' products, with what stands around them ----


def tiles(E: int, B: int, N: int, K: int, size: int) -> dict:
    """Tile sizes of (B, K) @ (K, N) for E experts, elements of `size` bytes. Up to 128 rows are one tile, so that weights are streamed
    once; columns are cut until each of an H100's 132 SMs has work (the widest tile: four times). Chosen by arithmetic, not measured: 24 KiB
    and more of weights in flight on an SM."""
    BM = min(128, padded(B))
    programs = {BN: E * triton.cdiv(B, BM) * triton.cdiv(N, BN) for BN in (256, 128, 64)}
    BN = (
        256
        if B > 128 and programs[256] >= 512
        else next((n for n in (128, 64) if programs[n] >= 128), 32)
    )
    BK = min((128 if BM <= 32 else 64) * 2 // size, padded(K))
    return dict(
        BM=BM,
        BN=BN,
        BK=BK,
        num_warps=8 if BM * BN >= 128 * 128 else 4,
        num_stages=3 if BM * BN >= 128 * 128 else 4,
    )


@triton.jit
def _product(
    x,
    w,
    r,
    f,
    rows,
    cols,
    B,
    N,
    stride_k,
    K: tl.constexpr,
    SQUARED: tl.constexpr,
    NORM: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """(BM, BN) tile of x @ w in fp32: x points at (B, K), w at the tile's columns of a matrix whose next row is stride_k away. NORM: rows
    of x are scaled by r, and as scaled and rounded written to f (if there is one) by the first tile of columns."""
    acc = tl.zeros([BM, BN], tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        mask = (rows < B)[:, None] & (k < K)[None, :]
        a = tl.load(x + rows[:, None] * K + k[None, :], mask, 0.0)
        if NORM:
            a = (a * r[:, None]).to(w.dtype.element_ty)
            if f is not None:
                tl.store(f + rows[:, None] * K + k[None, :], a, mask & (tl.program_id(1) == 0))
        if SQUARED:
            a = (a.to(tl.float32) * a.to(tl.float32)).to(w.dtype.element_ty)
        acc = tl.dot(
            a,
            tl.load(w + k[:, None] * stride_k, (k < K)[:, None] & (cols < N)[None, :], 0.0),
            acc,
            input_precision='ieee',
        )
    return acc


@triton.jit
def _tile(BM: tl.constexpr, BN: tl.constexpr):
    """Rows, columns and expert of this program. Tiles of rows run beside each other, to share a tile of weights in L2."""
    return (
        tl.program_id(0) * BM + tl.arange(0, BM),
        tl.program_id(1) * BN + tl.arange(0, BN),
        tl.program_id(2).to(tl.int64),
    )


# Output projections (attention's, and the FFN's with its squared input): the residual is added in the epilogue while y is still in fp32
# registers, and the row's sum of squares is taken there, so that the norm that follows needs no pass of its own over y. One partial sum
# a tile of columns: atomics would make the result depend on their order.
@triton.jit
def _expert_residual_kernel(
    x,
    w,
    residual,
    y,
    ss,
    B,
    P,
    x_e,
    residual_e,
    D: tl.constexpr,
    I: tl.constexpr,
    SQUARED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    rows, cols, e = _tile(BM, BN)
    acc = _product(
        x + e * x_e,
        w + e * D * I + cols[None, :] * I,
        None,
        None,
        rows,
        cols,
        B,
        D,
        1,
        I,
        SQUARED,
        False,
        BM,
        BN,
        BK,
    )
    mask, at = (rows < B)[:, None] & (cols < D)[None, :], rows[:, None] * D + cols[None, :]
    acc += tl.load(residual + e * residual_e + at, mask, 0.0)
    tl.store(y + e * B * D + at, acc, mask)
    tl.store(ss + (e * B + rows) * P + tl.program_id(1), tl.sum(acc * acc, 1), rows < B)


def expert_residual(
    x: torch.Tensor, w: torch.Tensor, residual: torch.Tensor, squared: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """y (E, B, D) = residual + x @ w^T, x (E, B, I) squared first where `squared`, w (E, D, I), residual (B, D) or (E, B, D); and partial
    row sums of y's squares (E, B, P)."""
    (E, B, I), D = x.shape, w.size(1)
    sizes = tiles(E, B, D, I, x.element_size())
    P = triton.cdiv(D, sizes['BN'])
    y, ss = residual.new_empty(E, B, D), residual.new_empty(E, B, P)
    _expert_residual_kernel[triton.cdiv(B, sizes['BM']), P, E](
        x,
        w,
        residual,
        y,
        ss,
        B,
        P,
        x.stride(0),
        residual.stride(0) if residual.dim() == 3 else 0,
        D,
        I,
        squared,
        **sizes,
    )
    return y, ss


# The FFN's first half: norm on load (its factor is known from the partial sums) and ReLU in the epilogue. Every tile of columns reads y
# in fp32, twice the bytes of its bf16: cheap while a tile holds all rows and weights are the traffic, not beyond 128 rows, where the norm
# is a kernel before.
@triton.jit
def _expert_relu_kernel(
    x,
    ss,
    up,
    act,
    f,
    r,
    B,
    x_e,
    act_e,
    f_e,
    r_e,
    O: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    NORM: tl.constexpr,
    KEEP: tl.constexpr,
    PP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    rows, cols, e = _tile(BM, BN)
    factor, normed = None, None
    if NORM:
        p = tl.arange(0, PP)
        parts = tl.load(
            ss + (e * B + rows)[:, None] * P + p[None, :],
            (rows < B)[:, None] & (p < P)[None, :],
            0.0,
        )
        factor = tl.rsqrt(tl.sum(parts, 1) / D + EPS)
        if KEEP:
            normed = f + e * f_e
            tl.store(r + e * r_e + rows, factor, (rows < B) & (tl.program_id(1) == 0))
    acc = _product(
        x + e * x_e,
        up + e * O * D + cols[None, :] * D,
        factor,
        normed,
        rows,
        cols,
        B,
        O,
        1,
        D,
        False,
        NORM,
        BM,
        BN,
        BK,
    )
    tl.store(
        act + e * act_e + rows[:, None] * O + cols[None, :],
        tl.maximum(acc, 0.0).to(act.dtype.element_ty),
        (rows < B)[:, None] & (cols < O)[None, :],
    )


def expert_relu(
    y: torch.Tensor,
    ss: torch.Tensor,
    up: torch.Tensor,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """act (E, B, O) = relu(f @ up^T), f (E, B, D) = y * r, from y (E, B, D), its partial sums of squares, up (E, O, D).
    out: None, or (act, f, r): where they go, r (E, B, 1)."""
    (E, B, D), O = y.shape, up.size(1)
    sizes = tiles(E, B, O, D, up.element_size())
    act, f, r = out or (up.new_empty(E, B, O), None, None)
    fused = B <= 128
    if not fused:
        f = up.new_empty(E, B, D) if f is None else f
        _normalise(y, ss, None, None, f, r)
    x = y if fused else f
    _expert_relu_kernel[triton.cdiv(B, sizes['BM']), triton.cdiv(O, sizes['BN']), E](
        x,
        ss,
        up,
        act,
        f,
        r,
        B,
        x.stride(0),
        act.stride(0),
        *(0 if a is None else a.stride(0) for a in (f, r)),
        O,
        D,
        ss.size(2),
        fused,
        out is not None,
        padded(ss.size(2), 1),
        **sizes,
    )
    return act


# The FFN's backward through squared ReLU: 2 * act is the derivative, zero where ReLU was off; multiplied in the epilogue.
@triton.jit
def _expert_relu_backward_kernel(
    dx,
    down,
    act,
    dact,
    B,
    dx_e,
    act_e,
    dact_e,
    O: tl.constexpr,
    D: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    rows, cols, e = _tile(BM, BN)
    acc = _product(
        dx + e * dx_e,
        down + e * D * O + cols[None, :],
        None,
        None,
        rows,
        cols,
        B,
        O,
        O,
        D,
        False,
        False,
        BM,
        BN,
        BK,
    )
    mask, at = (rows < B)[:, None] & (cols < O)[None, :], rows[:, None] * O + cols[None, :]
    a = tl.load(act + e * act_e + at, mask, 0.0).to(tl.float32)
    tl.store(dact + e * dact_e + at, (2 * a * acc).to(dact.dtype.element_ty), mask)


def expert_relu_backward(
    dx: torch.Tensor, down: torch.Tensor, act: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """dact (E, B, O) = 2 * act * (dx @ down): dx (E, B, D), down (E, D, O), act (E, B, O). out: where it goes."""
    (E, B, D), O = dx.shape, down.size(2)
    sizes = tiles(E, B, O, D, dx.element_size())
    dact = act.new_empty(E, B, O) if out is None else out
    _expert_relu_backward_kernel[triton.cdiv(B, sizes['BM']), triton.cdiv(O, sizes['BN']), E](
        dx, down, act, dact, B, dx.stride(0), act.stride(0), dact.stride(0), O, D, **sizes
    )
    return dact


# ---- norm and sum over experts ----


# Each expert's norm (its factor from the partial sums) and the weighted sum over experts, in one read of x. A program holds a slice of
# columns of all experts of one stream, so that their loads are in flight together.
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
    h_e,
    r_e,
    E: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    EP: tl.constexpr,
    PP: tl.constexpr,
    BD: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    e, p, d = (
        tl.arange(0, EP).to(tl.int64),
        tl.arange(0, PP),
        tl.program_id(1) * BD + tl.arange(0, BD),
    )
    mask = (e < E)[:, None] & (d < D)[None, :]
    parts = tl.load(
        ss + (e * B + b)[:, None] * P + p[None, :], (e < E)[:, None] & (p < P)[None, :], 0.0
    )
    factor = tl.rsqrt(tl.sum(parts, 1) / D + EPS)
    hat = tl.load(x + (e * B + b)[:, None] * D + d[None, :], mask, 0.0) * factor[:, None]
    if r is not None:
        tl.store(r + e * r_e + b, factor, (e < E) & (tl.program_id(1) == 0))
    if h is not None:
        tl.store(h + (e * h_e + b * D)[:, None] + d[None, :], hat.to(h.dtype.element_ty), mask)
    if s is not None:
        weight = tl.load(coef + e * coef_e + b * coef_b, e < E, 0.0)
        tl.store(s + b * D + d, tl.sum(weight[:, None] * hat, 0), d < D)


def _normalise(x, ss, coef, s, h, r):
    (E, B, D), P = x.shape, ss.size(2)
    EP = padded(E, 1)
    BD = min(padded(D), max(16, min(128 if B <= 64 else 256, 4096 // EP)))
    coef_e, coef_b = (0, 0) if coef is None else coef.expand(E, B, 1).stride()[:2]
    h_e, r_e = (0 if a is None else a.stride(0) for a in (h, r))
    _norm_sum_kernel[B, triton.cdiv(D, BD)](
        x,
        ss,
        coef,
        s,
        h,
        r,
        B,
        coef_e,
        coef_b,
        h_e,
        r_e,
        E,
        D,
        P,
        EP,
        padded(P, 1),
        BD,
        num_warps=4,
    )


def norm_sum(
    x: torch.Tensor,
    ss: torch.Tensor,
    coef: torch.Tensor,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """s (B, D) = sum over experts of coef * h, h (E, B, D) = x * r, from x (E, B, D) and its partial sums of squares ss (E, B, P).
    coef: (E, B, 1) or a 0-dim tensor. out: None, or (h, r): where they go, r (E, B, 1)."""
    s = x.new_empty(x.shape[1:])
    _normalise(x, ss, coef, s, *(out or (None, None)))
    return s


# ---- a level's `leave` as a whole: stands in where it agrees with the model's ----


def _rms_backward(g, x_hat, r):
    """Gradient of x -> x_hat = x * r, r = (mean(x^2) + eps)^-1/2, for the output's gradient g."""
    x_hat = x_hat.to(g.dtype)
    return r * (g - x_hat * (g * x_hat).mean(-1, keepdim=True))


def _output_back(ds, coef, h, r):
    dx = _rms_backward(coef * ds, h, r)
    return dx, dx.to(h.dtype)


def _input_back(dx, dact, r, f, wo, up):
    dy = dx + _rms_backward(torch.bmm(dact, up).to(dx.dtype), f, r)
    low = dy.to(wo.dtype)
    return dy.sum(0), low, torch.bmm(low, wo)


def coefficients(gates: torch.Tensor, name: str) -> torch.Tensor:
    return gate_weights(gates, name).t().unsqueeze(-1)


class Leave(torch.autograd.Function):
    """s = sum of coef * norm(x), x = y + down relu(up norm(y))^2, y = u + wo att, of unroll.Products wo, up,
    down, which get what they multiplied and the gradients in the backward."""

    @staticmethod
    def forward(ctx, products, u, att, coef):
        (wo, up, down), att = products, att.contiguous()
        (E, B, _), D = att.shape, u.size(1)
        f, h = att.new_empty(2, E, B, D)
        r, rx = u.new_empty(2, E, B, 1)
        act = att.new_empty(E, B, down.w.size(2))
        y, squares = expert_residual(att, wo.w, u, False)
        expert_relu(y, squares, up.w, (act, f, r))
        ctx.products = products
        ctx.save_for_backward(att, coef, act, f, r, h, rx)
        return norm_sum(*expert_residual(act, down.w, y, True), coef, (h, rx))

    @staticmethod
    def backward(ctx, ds):
        (wo, up, down), (att, coef, act, f, r, h, rx) = ctx.products, ctx.saved_tensors
        dx, low = compiled(_output_back)(ds, coef, h, rx)
        dact = expert_relu_backward(low, down.w, act)
        du, dy, datt = compiled(_input_back)(dx, dact, r, f, wo.w, up.w)
        for one, x, g in ((down, act.square(), low), (up, f, dact), (wo, att, dy)):
            one.note(x, g)
        dcoef = (h * ds).sum(-1, keepdim=True).to(ds.dtype) if ctx.needs_input_grad[3] else None
        return None, du, datt, dcoef


def leave_of(name: str, E: int, like: torch.Tensor) -> Callable | None:
    """-> what stands in for model.leave; None where it does not know the aggregation."""
    scale = {'sqrt_sum': E**-0.5, 'mean': 1 / E, 'softmax_mean': 0.0, 'softmax_l2': 0.0}.get(name)
    if scale is None:
        return None
    coef = torch.full((), scale, dtype=like.dtype, device=like.device)

    def leave(w, u, att, gates, rules):
        products = w['wo'], w['up'], w['down']
        mine = coef if gates is None else w['piece'](coefficients, gates, name=name)
        return Leave.apply(products, u, att, mine)

    return leave


# ---- loss ----


# Soft cap, log-sum-exp, the target's score and the gradient, in two reads and one write of a row (PyTorch's twin: eight passes in fp32).
# Capped scores lie in [-15, 15]: exp(score - 15) can neither overflow nor vanish, so no maximum is needed first.
@triton.jit
def _cross_entropy_kernel(logits, target, loss, d, scale, V, GRAD: tl.constexpr, BV: tl.constexpr):
    i = tl.program_id(0).to(tl.int64)
    row, goal = logits + i * V, tl.load(target + i).to(tl.int32)
    total, right = tl.zeros([BV], tl.float32), tl.zeros([BV], tl.float32)
    for start in range(0, V, BV):
        v = start + tl.arange(0, BV)
        score = (
            1 - 2 / (tl.exp(tl.load(row + v, v < V, 0.0).to(tl.float32) * (2 / SOFTCAP)) + 1)
        ) * SOFTCAP
        total += tl.where(v < V, tl.exp(score - SOFTCAP), 0.0)
        right += tl.where(v == goal, score, 0.0)
    lse = tl.log(tl.sum(total, 0)) + SOFTCAP
    tl.store(loss + i, lse - tl.sum(right, 0))
    if GRAD:
        for start in range(0, V, BV):
            v = start + tl.arange(0, BV)
            tanh = 1 - 2 / (tl.exp(tl.load(row + v, v < V, 0.0).to(tl.float32) * (2 / SOFTCAP)) + 1)
            g = (
                (tl.exp(tanh * SOFTCAP - lse) - tl.where(v == goal, 1.0, 0.0))
                * (1 - tanh * tanh)
                * scale
            )
            tl.store(d + i * V + v, g.to(d.dtype.element_ty), v < V)


def cross_entropy(
    logits: torch.Tensor, target: torch.Tensor, grad_scale: float | None, dt: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Summed cross-entropy of 15 * tanh(logits / 15), logits (rows, V), against target (rows,), and its gradient times grad_scale in
    dtype dt (in the logits' place where that is theirs; None without a grad_scale)."""
    rows, V = logits.shape
    loss = torch.empty(rows, dtype=torch.float32, device=logits.device)
    d = (
        None
        if grad_scale is None
        else logits
        if logits.dtype == dt
        else torch.empty_like(logits, dtype=dt)
    )
    _cross_entropy_kernel[(rows,)](
        logits,
        target,
        loss,
        d,
        float(grad_scale or 0),
        V,
        d is not None,
        min(4096, padded(V)),
        num_warps=8,
    )
    return loss.sum(), d

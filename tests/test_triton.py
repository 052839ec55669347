"""
triton_kernels.py against plain PyTorch. Without a GPU: under Triton's interpreter, in fp32, and compiled for an H100 without running.
Both in a process of their own: the interpreter must be chosen before anything imports triton, and a process is one or the other.
pytest -m gpu: in bf16 on a GPU, against float64. `python tests/test_triton.py` prints what each kernel takes of an H100.
"""

import functools
import math
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

triton = pytest.importorskip('triton', reason='triton is not installed: its kernels are not tested')
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import kernels as plain  # noqa: E402
import triton_kernels as tk  # noqa: E402

INTERPRETED = os.environ.get('TRITON_INTERPRET') == '1'
interpreted = pytest.mark.skipif(
    not INTERPRETED, reason='TRITON_INTERPRET=1 not set: test_under_the_interpreter runs it'
)
no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason='no CUDA device')
close = functools.partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)


# ---- plain PyTorch, any dtype ----
# layout: B, then kernels.Heads


def heads(layout):
    h = plain.Heads(*layout[1:])
    return h.C, h.M


def rms(x):
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def rms_backward(g, x_hat, r):
    return r * (g - x_hat * (g * x_hat).mean(-1, keepdim=True))


def by_expert(o, layout):
    return plain.by_expert(o, plain.Heads(*layout[1:]))


def by_cache_head(o, layout):
    return plain.by_cache_head(o, plain.Heads(*layout[1:]))


def kernel_forward(qkv, kbuf, vbuf, kn, count, t, W, cos, sin, layout, keep):
    h = plain.Heads(*layout[1:])
    out = qkv.new_empty(h.E, len(qkv), h.G * h.R * h.K) if keep is None else keep[4]
    return tk.window_attention(
        qkv, (kbuf, vbuf, kn, count, cos, sin), (t, W), h, out, keep and tuple(keep[:4])
    )


def kernel_backward(
    datt, att, q_rot, rq, rk, lse, kbuf, vbuf, count, t, g0, W, cos, sin, layout, *sums
):
    h, memory = plain.Heads(*layout[1:]), (kbuf, vbuf, count, cos, sin)
    place = torch.full(
        (2 * layout[0], (h.M + 2) * h.C * h.K), math.nan, dtype=datt.dtype, device=datt.device
    )[layout[0] :]
    found = tk.window_attention_backward(
        datt, (att, q_rot, rq, rk, lse), memory, (t, g0, W), h, sums, place
    )
    assert found is place and place._base[: layout[0]].isnan().all()
    return found


def window_attention(qkv, kbuf, vbuf, kn, count, t, W, cos, sin, layout, keep):
    (B, _, _, _, K, _), (C, M), dt, wide = layout, heads(layout), qkv.dtype, cos.dtype
    q, k, v = qkv.split([C * M * K, C * K, C * K], -1)
    q, k = q.view(B, C, M, K).to(wide), k.view(B, C, K).to(wide)
    rq, rk = rms(q), rms(k)
    q_rot = plain.apply_rope(q * rq, cos[W + t], sin[W + t]).to(dt)
    kn[:, W + t] = (k * rk).to(dt).view(B * C, K)
    kbuf[:, W + t] = plain.apply_rope(kn[:, W + t], cos[W + t], sin[W + t]).to(dt)
    vbuf[:, W + t] = v.reshape(B * C, K)
    slot = torch.arange(kbuf.size(1), device=qkv.device)
    hidden = ((slot <= t) | (slot > W + t) | (slot < W - count[:, None])).repeat_interleave(C, 0)[
        :, None
    ]
    score = (q_rot.view(B * C, M, K).to(wide) @ kbuf.to(wide).mT / math.sqrt(K)).masked_fill(
        hidden, -math.inf
    )
    att = by_expert((score.softmax(-1) @ vbuf.to(wide)).to(dt), layout)
    if keep is not None:
        for buffer, x in zip(
            keep, (rq, rk, q_rot, score.logsumexp(-1, keepdim=True), att), strict=True
        ):
            buffer.copy_(x)
    return att


def window_attention_backward(
    datt, att, q_rot, rq, rk, lse, kbuf, vbuf, count, t, g0, W, cos, sin, layout, dk, dv, P, DS, DO
):
    (B, _, _, _, K, _), (C, M), dt, wide = layout, heads(layout), datt.dtype, cos.dtype
    do, o = (by_cache_head(x, layout).to(wide) for x in (datt, att))
    q = q_rot.reshape(B * C, M, K).to(wide)
    slot = torch.arange(kbuf.size(1), device=datt.device)
    hidden = ((slot <= t) | (slot > W + t) | (slot < W - count[:, None])).repeat_interleave(C, 0)[
        :, None
    ]
    p = (q @ kbuf.to(wide).mT / math.sqrt(K) - lse).exp().masked_fill(hidden, 0)
    ds = p * (do @ vbuf.to(wide).mT - (do * o).sum(-1, keepdim=True)) / math.sqrt(K)
    old, now = slice(g0, W + g0), slice(W + g0, W + t + 1)
    P[:, t - g0, :, old], DS[:, t - g0, :, old], DO[:, t - g0] = (
        p[..., old].to(dt),
        ds[..., old].to(dt),
        do.to(dt),
    )
    dk[:, now] += ds[..., now].mT @ q
    dv[:, now] += p[..., now].mT @ do
    dq = rms_backward((ds @ kbuf.to(wide)).view(B, C, M, K), q_rot, rq)
    dkey = rms_backward(dk[:, W + t].view(B, C, K), kbuf[:, W + t].view(B, C, K), rk)
    dq, dkey = (plain.apply_rope(x, cos[W + t], -sin[W + t]).reshape(B, -1) for x in (dq, dkey))
    return torch.cat([dq, dkey, dv[:, W + t].reshape(B, -1)], -1).to(dt)


def expert_residual(x, w, residual, squared):
    wide = residual.dtype
    y = residual + (x.square() if squared else x).to(wide) @ w.to(wide).mT
    return y, y.square().sum(-1, keepdim=True)


def expert_relu(y, ss, up, out=None):
    r = torch.rsqrt(ss.sum(-1, keepdim=True) / y.size(-1) + 1e-6)
    f = (y * r).to(up.dtype)
    act = (f.to(y.dtype) @ up.to(y.dtype).mT).relu().to(up.dtype)
    for buffer, value in zip(out or (), (act, f, r), strict=False):
        buffer.copy_(value)
    return act


def norm_sum(x, ss, coef, out=None):
    r = torch.rsqrt(ss.sum(-1, keepdim=True) / x.size(-1) + 1e-6)
    for buffer, value in zip(out or (), (x * r, r), strict=False):
        buffer.copy_(value)
    return (coef * x * r).sum(0)


def expert_relu_backward(dx, down, act, out=None):
    dact = 2 * act * (dx @ down)
    return dact if out is None else out.copy_(dact)


def cross_entropy(logits, target, grad_scale, dt):
    x = logits.detach().clone().requires_grad_()
    loss = F.cross_entropy(15 * torch.tanh(x / 15), target, reduction='sum')
    return loss.detach(), None if grad_scale is None else torch.autograd.grad(loss, x)[0].mul(
        grad_scale
    ).to(dt)


# ---- inputs ----


def attention_inputs(layout, W, n, F_, dt=torch.float32, device='cpu', seed=0):
    """A block's buffers with carried entries, and random qkv (n rows) and gradients of att; some windows empty, some full. att and its
    gradients are (E, n*B, D), as a block keeps them: a token's are a slice of it."""
    g = torch.Generator(device).manual_seed(seed)
    (B, E, G, R, K, _), (C, M) = layout, heads(layout)
    S, wide = W + n, torch.float32

    def normal(*shape, dtype=dt):
        return torch.randn(*shape, generator=g, device=device).to(dtype)

    cos, sin = plain.rope_table(S, K, torch.zeros((), device=device))
    kn = normal(B * C, S, K, dtype=wide)
    kn = (kn * rms(kn)).to(dt)
    kbuf, vbuf = plain.apply_rope(kn, cos, sin).to(dt), normal(B * C, S, K)
    count = torch.tensor([0, W, W // 2, 1][:B] + [W] * (B - 4), device=device)
    x = {
        'qkv': normal(n, B, (C * M + 2 * C) * K),
        'kbuf': kbuf,
        'vbuf': vbuf,
        'kn': kn,
        'count': count,
        'cos': cos,
        'sin': sin,
        'datt': normal(E, n * B, G * R * K),
        'dk': normal(B * C, S, K, dtype=wide),
        'dv': normal(B * C, S, K, dtype=wide),
    }
    keep = {
        'rq': torch.zeros(n, B, C, M, 1),
        'rk': torch.zeros(n, B, C, 1),
        'q_rot': torch.zeros(n, B, C, M, K, dtype=dt),
        'lse': torch.zeros(n, B * C, M, 1),
        'att': torch.zeros(E, n * B, G * R * K, dtype=dt),
    }
    rows = {
        name: torch.full((B * C, F_, M, X), math.nan, dtype=dt)
        for name, X in (('P', S), ('DS', S), ('DO', K))
    }
    return (
        x,
        {name: v.to(device) for name, v in keep.items()},
        {name: v.to(device) for name, v in rows.items()},
    )


def wide64(tree):
    return {k: v.double() if v.is_floating_point() else v.clone() for k, v in tree.items()}


def copies(tree):
    return {k: v.clone() for k, v in tree.items()}


def token(op, backward, x, keep, rows, t, W, g0, layout):
    """One token, forward or backward, with either implementation."""
    rq, rk, q_rot, lse = (keep[name][t] for name in ('rq', 'rk', 'q_rot', 'lse'))
    saved = rq, rk, q_rot, lse, att = (
        rq,
        rk,
        q_rot,
        lse,
        keep['att'].narrow(1, t * layout[0], layout[0]),
    )
    if not backward:
        return op(
            x['qkv'][t],
            x['kbuf'],
            x['vbuf'],
            x['kn'],
            x['count'],
            t,
            W,
            x['cos'],
            x['sin'],
            layout,
            saved,
        )
    datt = x['datt'].narrow(1, t * layout[0], layout[0])
    return op(
        datt,
        att,
        q_rot,
        rq,
        rk,
        lse,
        x['kbuf'],
        x['vbuf'],
        x['count'],
        t,
        g0,
        W,
        x['cos'],
        x['sin'],
        layout,
        x['dk'],
        x['dv'],
        rows['P'],
        rows['DS'],
        rows['DO'],
    )


# ---- the interpreter, fp32 ----

SHARED, OWN, SMALL, TALL = (
    (3, 3, 2, 2, 64, True),
    (3, 3, 1, 3, 96, False),
    (4, 1, 1, 2, 10, True),
    (2, 10, 1, 2, 128, True),
)


@interpreted
@pytest.mark.parametrize(
    'layout, W, n, F_',
    [
        (SHARED, 5, 4, 3),
        (SHARED, 37, 2, 1),
        (OWN, 37, 3, 4),
        (OWN, 1, 2, 1),
        (SMALL, 70, 3, 4),
        ((1, 1, 1, 2, 10, True), 3, 18, 18),
        (TALL, 5, 2, 2),
    ],
    ids=str,
)
def test_window_attention_token_by_token(layout, W, n, F_):
    x, keep, rows = attention_inputs(layout, W, n, F_)
    y, keep_y, rows_y = copies(x), copies(keep), copies(rows)
    for t in range(n):
        before = x['kbuf'].clone()
        att, want = (
            token(op, False, *args, t, W, 0, layout)
            for op, *args in (
                (kernel_forward, x, keep, rows),
                (window_attention, y, keep_y, rows_y),
            )
        )
        close(att, want)
        for name in ('kbuf', 'vbuf', 'kn'):
            close(x[name], y[name])
        assert not torch.equal(x['kbuf'], before)
    for name in keep:
        close(keep[name], keep_y[name])
    alone = token(
        lambda *args: kernel_forward(*args[:-1], None), False, x, keep, rows, n - 1, W, 0, layout
    )
    assert torch.equal(alone, att)  # without `keep` the same
    assert alone.data_ptr() != att.data_ptr() and torch.equal(att, keep['att'][:, -layout[0] :])
    keep['att'].copy_(x['datt'] + 0.5)  # any values: the backward takes o as it is given
    for t in reversed(range(n)):
        g0 = t // F_ * F_
        close(
            token(kernel_backward, True, x, keep, rows, t, W, g0, layout),
            token(window_attention_backward, True, y, keep, rows_y, t, W, g0, layout),
            rtol=1e-4,
            atol=1e-4,
        )
        for name in ('dk', 'dv'):
            close(x[name], y[name], rtol=1e-4, atol=1e-4)
        for name in ('P', 'DS'):
            close(
                rows[name][:, t - g0, :, g0 : W + g0],
                rows_y[name][:, t - g0, :, g0 : W + g0],
                rtol=1e-4,
                atol=1e-4,
            )
        assert torch.equal(rows['DO'][:, t - g0], rows_y['DO'][:, t - g0])


def block_by_kernels(x, keep, rows, layout, W, n, F_):
    """n tokens forward and backward. Returns the attended values and the gradient of qkv."""
    for t in range(n):
        token(kernel_forward, False, x, keep, rows, t, W, 0, layout)
    x['dk'].zero_()
    x['dv'].zero_()
    grad = torch.empty_like(x['qkv'])
    for g0 in reversed(range(0, n, F_)):
        group = range(g0, min(n, g0 + F_))
        for t in reversed(group):
            grad[t] = token(kernel_backward, True, x, keep, rows, t, W, g0, layout)
        P, DS, DO = (rows[name][:, : len(group)].flatten(1, 2) for name in ('P', 'DS', 'DO'))
        Q = keep['q_rot'][g0 : g0 + len(group)].flatten(1, 2).transpose(0, 1).reshape(DO.shape)
        x['dk'][:, g0 : W + g0] += (DS[..., g0 : W + g0].mT @ Q).float()
        x['dv'][:, g0 : W + g0] += (P[..., g0 : W + g0].mT @ DO).float()
    return keep['att'], grad


def block_by_autograd(x, layout, W, n):
    """The same from the definition: all queries against all slots, masked."""
    (B, _, _, _, K, _), (C, M) = layout, heads(layout)
    qkv = x['qkv'].clone().requires_grad_()
    q, k, v = qkv.split([C * M * K, C * K, C * K], -1)
    q, k, v = q.reshape(n, B * C, M, K), *(x.reshape(n, B * C, K).transpose(0, 1) for x in (k, v))
    keys, values = torch.cat([x['kn'][:, :W], k * rms(k)], 1), torch.cat([x['vbuf'][:, :W], v], 1)
    keys = plain.apply_rope(keys, x['cos'], x['sin'])
    q = plain.apply_rope(q * rms(q), x['cos'][W:, None, None], x['sin'][W:, None, None])
    slot, at = torch.arange(W + n, device=q.device), torch.arange(n, device=q.device)[:, None]
    empty = (slot < W - x['count'][:, None]).repeat_interleave(C, 0)
    hidden = ((slot <= at) | (slot > W + at))[:, None] | empty  # (n, B*C, S)
    p = (
        (torch.einsum('tbmk,bsk->tbms', q, keys) / math.sqrt(K))
        .masked_fill(hidden[:, :, None], -math.inf)
        .softmax(-1)
    )
    o = torch.einsum('tbms,bsk->tbmk', p, values)
    att = torch.cat([by_expert(o_t, layout) for o_t in o], 1)
    return att.detach(), torch.autograd.grad(att, qkv, x['datt'])[0]


@interpreted
@pytest.mark.parametrize(
    'layout, W, n, F_',
    [((3, 3, 1, 2, 64, True), 5, 7, 3), ((2, 3, 1, 3, 96, False), 37, 4, 4), (SMALL, 1, 5, 2)],
    ids=str,
)
def test_block_equals_autograd(layout, W, n, F_):
    x, keep, rows = attention_inputs(layout, W, n, F_)
    want = block_by_autograd(x, layout, W, n)
    for mine, theirs in zip(block_by_kernels(x, keep, rows, layout, W, n, F_), want, strict=True):
        close(mine, theirs, rtol=1e-4, atol=1e-4)


def expert_inputs(E, B, D, O, dt=torch.float32, device='cpu'):
    g = torch.Generator(device).manual_seed(1)

    def normal(*shape):
        return torch.randn(*shape, generator=g, device=device)

    x = {
        'y': normal(E, B, D),
        'up': normal(E, O, D) / D**0.5,
        'down': normal(E, D, O) / O**0.5,
        'wo': normal(E, D, D) / D**0.5,
        'act': normal(E, B, O).relu(),
        'att': normal(E, B, D),
        'u': normal(B, D),
        'coef': normal(B, E).t()[..., None],
    }
    return {k: v.to(dt) if k in ('up', 'down', 'wo', 'act', 'att') else v for k, v in x.items()}


def slices(x, *sizes):
    """Memory for (E, B, X) outputs amid larger buffers (E, 3*B, X), in the dtypes given."""
    return [
        torch.full(
            (*shape[:-2], 3 * shape[-2], shape[-1]), math.nan, dtype=dtype, device=x.device
        ).narrow(-2, shape[-2], shape[-2])
        for *shape, dtype in sizes
    ]


def expert_results(op, x):
    """Every expert kernel's outputs, as one list. op: triton_kernels, or this file's plain functions. Inputs and outputs are slices."""
    (E, B, D), O, dt, wide = x['att'].shape, x['up'].size(1), x['up'].dtype, x['y'].dtype
    att, act_in = slices(x['y'], (E, B, D, dt), (E, B, O, dt))
    att.copy_(x['att'])
    act_in.copy_(x['act'])
    act, f, r, h, rx, dact = slices(
        x['y'],
        (E, B, O, dt),
        (E, B, D, dt),
        (E, B, 1, wide),
        (E, B, D, dt),
        (E, B, 1, wide),
        (E, B, O, dt),
    )
    y, ss = op['expert_residual'](att, x['wo'], x['u'], False)
    squares = x['y'].square().sum(-1, keepdim=True)
    kept = op['expert_relu'](x['y'], squares, x['up'], (act, f, r))
    assert kept.data_ptr() == act.data_ptr() or op is not vars(tk)
    assert torch.equal(op['expert_relu'](x['y'], squares, x['up']), kept)
    x2, ss2 = op['expert_residual'](act_in, x['down'], x['y'], True)
    sums = [
        op['norm_sum'](x2, ss2, coef, (h, rx))
        for coef in (x['coef'], torch.tensor(0.3, device=y.device, dtype=y.dtype))
    ]
    assert torch.equal(op['norm_sum'](x2, ss2, x['coef']), sums[0])
    assert torch.equal(
        op['expert_relu_backward'](att, x['down'], act_in, dact),
        op['expert_relu_backward'](att, x['down'], act_in),
    )
    for out in (act, f, r, h, rx, dact):  # nothing outside its slice
        assert out._base.isnan().sum() == out._base.numel() * 2 // 3
    return [y, ss.sum(-1), act, f, r, x2, ss2.sum(-1), *sums, h, rx, dact]


@interpreted
@pytest.mark.parametrize('E, B, D, O', [(3, 3, 36, 70), (1, 17, 130, 64), (1, 131, 20, 9)])
def test_expert_products(E, B, D, O):
    x = expert_inputs(E, B, D, O)
    results = expert_results(vars(tk), x), expert_results(globals(), x)
    for i, (mine, theirs) in enumerate(zip(*results, strict=True)):
        close(mine, theirs, rtol=2e-5, atol=2e-5, msg=lambda text, i=i: f'output {i}: {text}')


@interpreted
@pytest.mark.parametrize('rows, V', [(3, 50304), (5, 1001), (2, 7)])
def test_cross_entropy(rows, V):
    torch.manual_seed(0)
    logits, target = torch.randn(rows, V) * 20, torch.randint(V, (rows,))
    logits[0, :2] = torch.tensor([1e4, -1e4])  # far beyond the cap
    logits[-1] -= 200  # all scores at the lower cap
    want, dwant = cross_entropy(logits.double(), target, 0.25, torch.float64)
    loss, d = tk.cross_entropy(logits.clone(), target, None, torch.float32)
    assert d is None
    close(loss.double(), want)
    mine = logits.clone()
    loss, d = tk.cross_entropy(mine, target, 0.25, torch.float32)
    close(loss.double(), want)
    close(d.double(), dwant, rtol=1e-4, atol=1e-7)
    assert d.data_ptr() == mine.data_ptr()


def run_interpreted(file, select):
    """The tests of a file that `select` picks, in a process with the interpreter -> what pytest printed."""
    command = [
        sys.executable,
        '-m',
        'pytest',
        '-q',
        '-x',
        '-p',
        'no:cacheprovider',
        file,
        '-k',
        select,
    ]
    done = subprocess.run(
        command,
        env=dict(os.environ, TRITON_INTERPRET='1', OMP_NUM_THREADS='1'),
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and 'passed' in done.stdout, done.stdout[-4000:]
    return done.stdout


can_interpret = pytest.mark.skipif(
    triton.__version__ < '3.7' and np.lib.NumpyVersion(np.__version__) >= '2.4.0',
    reason="Triton 3.6's interpreter takes loops' bounds only with NumPy < 2.4",
)


@can_interpret
def test_under_the_interpreter():
    run_interpreted(__file__, 'not under_the and not compile')


# ---- compiled for an H100, without one ----


def record(launches, cells):
    """Calls every wrapper on tensors without memory, at the sizes of the speed tables, and records the launches."""

    def empty(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype, device='meta')

    from triton.runtime.jit import JITFunction

    wide, K, G, R = torch.float32, 96, 4, 2
    D, O = G * R * K, 4 * G * R * K
    JITFunction.run = lambda self, *args, grid, warmup, **kwargs: launches.append(
        (self, args, kwargs)
    )
    for E, W, B in cells:
        layout, C, M, S, t = (B, E, G, R, K, True), G, E * R, 2 * W, 13
        kbuf, table, att = empty(B * C, S, K), empty(S, K // 2, dtype=wide), empty(E, B, D)
        lse, rk, q_rot, count = (
            empty(B * C, M, 1, dtype=wide),
            empty(B, C, 1, dtype=wide),
            empty(B, C, M, K),
            empty(B, dtype=torch.int64),
        )
        P, grads = empty(B * C, 8, M, S), empty(B * C, S, K, dtype=wide)
        h = plain.Heads(*layout[1:])
        for keep in (None, (lse, rk, q_rot, lse)):
            tk.window_attention(
                empty(B, (C * M + 2 * C) * K),
                (kbuf, kbuf, kbuf, count, table, table),
                (t, W),
                h,
                att,
                keep,
            )
        tk.window_attention_backward(
            att,
            (att, q_rot, lse, rk, lse),
            (kbuf, kbuf, count, table, table),
            (t, 8, W),
            h,
            (grads, grads, P, P, empty(B * C, 8, M, K)),
            None,
        )
        y, ss = tk.expert_residual(att, empty(E, D, D), empty(B, D, dtype=wide), False)
        act, r = empty(E, B, O), empty(E, B, 1, dtype=wide)
        x, ss_x = tk.expert_residual(act, empty(E, D, O), y, True)
        for out in (None, (act, att, r)):
            tk.expert_relu(y, ss, empty(E, O, D), out)
            tk.norm_sum(x, ss_x, empty(dtype=wide), out and (att, r))
        tk.expert_relu_backward(att, empty(E, D, O), act)
    for dtype in (torch.bfloat16, wide):
        tk.cross_entropy(
            empty(333, 50304, dtype=dtype), empty(333, dtype=torch.int64), 0.1, torch.bfloat16
        )


def compile_for_h100(fn, args, kwargs):
    """The kernel as Triton would compile it for these arguments: shared memory in bytes, and its PTX's figures by ptxas."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {torch.bfloat16: '*bf16', torch.float32: '*fp32', torch.int64: '*i64'}
    signature, constants, attrs = {}, {}, {}
    options = {k: kwargs.pop(k) for k in ('num_warps', 'num_stages') if k in kwargs}
    for i, p in enumerate(fn.params):
        value = args[i] if i < len(args) else kwargs[p.name]
        if (
            p.is_constexpr
            or value is None
            or (isinstance(value, int) and value == 1 and not p.do_not_specialize)
        ):
            signature[p.name], constants[p.name] = 'constexpr', value
        elif isinstance(value, torch.Tensor):
            signature[p.name], attrs[(i,)] = types[value.dtype], [['tt.divisibility', 16]]
        else:
            signature[p.name] = 'fp32' if isinstance(value, float) else 'i32'
            if isinstance(value, int) and value % 16 == 0 and not p.do_not_specialize:
                attrs[(i,)] = [['tt.divisibility', 16]]
    done = triton.compile(
        ASTSource(fn, signature, constants, attrs),
        target=GPUTarget('cuda', 90, 32),
        options=options,
    )
    with tempfile.NamedTemporaryFile(suffix='.cubin') as file:
        file.write(done.asm['cubin'])
        file.flush()
        tool = Path(triton.__file__).parent / 'backends/nvidia/bin/cuobjdump'
        usage = subprocess.run(
            [tool, '-res-usage', file.name], capture_output=True, text=True
        ).stdout
    figures = {name: int(n) for name, n in re.findall(r'(REG|STACK|SHARED|LOCAL):(\d+)', usage)}
    ptx = done.asm['ptx']
    return dict(
        shared=done.metadata.shared,
        **figures,
        wgmma=ptx.count('wgmma.mma_async'),
        mma=ptx.count('mma.sync'),
        cp_async=len(re.findall(r'cp\.async\.c[ag]', ptx)),
        **options,
    )


def report(cells):
    """Compiles each kernel once for every set of tile sizes that the cells (E, W, B) need."""
    launches, seen = [], {}
    record(launches, cells)
    for fn, args, kwargs in launches:
        tile = {
            k: v
            for k, v in kwargs.items()
            if k in ('KEEP', 'MP', 'N', 'BM', 'BN', 'BK', 'num_stages')
        }
        key = f'{fn.__name__} {args[0].dtype} {tile} {[a for a in args if a is None or isinstance(a, bool)]}'
        if key not in seen:
            seen[key] = compile_for_h100(fn, args, kwargs)
            print(key, seen[key], flush=True)
            assert seen[key]['shared'] < 227 * 1024, 'an H100 has 227 KiB of shared memory a block'
            assert seen[key]['STACK'] <= 16, 'registers spill'
    assert {fn.__name__ for fn, _, _ in launches} == {
        name for name in vars(tk) if name.endswith('_kernel')
    }
    print(f'compiled {len(seen)}')


def test_kernels_compile_for_an_h100():
    env = {k: v for k, v in os.environ.items() if k != 'TRITON_INTERPRET'}
    done = subprocess.run(
        [sys.executable, __file__, '16,2048,16', '2,128,256'],
        env=env,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and 'compiled ' in done.stdout, done.stdout + done.stderr[-3000:]


# ---- bf16 on a GPU against float64 ----


def alike(mine, exact):
    mine, exact = mine.double().flatten(), exact.double().flatten()
    assert mine.isfinite().all()
    assert F.cosine_similarity(mine, exact, 0) > 0.999 and 0.98 < mine.norm() / exact.norm() < 1.02


def check_attention(layout, W, n, F_, dt, device):
    x, keep, rows = attention_inputs(layout, W, n, F_, dt, device)
    y, keep_y, rows_y = wide64(x), wide64(keep), wide64(rows)
    exact = block_by_autograd(wide64(x), layout, W, n)
    for mine, theirs in zip(
        block_by_kernels(copies(x), copies(keep), rows, layout, W, n, F_), exact, strict=True
    ):
        alike(mine, theirs)
    for t in range(n):
        alike(
            token(kernel_forward, False, x, keep, rows, t, W, 0, layout),
            token(window_attention, False, y, keep_y, rows_y, t, W, 0, layout),
        )
    for name in ('kbuf', 'vbuf', 'kn'):
        alike(x[name][:, W:], y[name][:, W:])
    for name in keep:
        alike(keep[name], keep_y[name])
    keep['att'].copy_(x['datt'].roll(1, 0))  # any values
    keep_y['att'].copy_(y['datt'].roll(1, 0))
    for t in reversed(range(n)):
        g0 = t // F_ * F_
        alike(
            token(kernel_backward, True, x, keep, rows, t, W, g0, layout),
            token(window_attention_backward, True, y, keep_y, rows_y, t, W, g0, layout),
        )
        for name, columns in (
            ('P', slice(g0, W + g0)),
            ('DS', slice(g0, W + g0)),
            ('DO', slice(None)),
        ):
            alike(rows[name][:, t - g0, :, columns], rows_y[name][:, t - g0, :, columns])
    alike(x['dk'], y['dk'])
    alike(x['dv'], y['dv'])


def check_experts(E, B, D, O, dt, device):
    x = expert_inputs(E, B, D, O, dt, device)
    results = expert_results(vars(tk), x), expert_results(globals(), wide64(x))
    for mine, exact in zip(*results, strict=True):
        alike(mine, exact)
    assert all(
        torch.equal(a, b) for a, b in zip(results[0], expert_results(vars(tk), x), strict=True)
    )  # deterministic


def check_cross_entropy(rows, V, dt, device):
    logits, target = (
        torch.randn(rows, V, device=device) * 10,
        torch.randint(V, (rows,), device=device),
    )
    for dtype in (dt, torch.float32):
        x = logits.to(dtype)
        want, dwant = cross_entropy(x.double(), target, 0.25, torch.float64)
        loss, d = tk.cross_entropy(x, target, 0.25, dt)
        assert abs(loss - want) < 1e-4 * want and d.dtype == dt
        alike(d, dwant)


GPU_ATTENTION = [
    ((16, 16, 4, 2, 96, True), 128, 24, 8),
    ((3, 2, 4, 2, 96, True), 100, 9, 4),
    ((4, 8, 4, 2, 64, False), 1000, 5, 8),
    ((2, 1, 8, 1, 128, True), 33, 40, 16),
    ((2, 3, 1, 3, 10, True), 5, 12, 4),
]


@no_gpu
@pytest.mark.gpu
@pytest.mark.parametrize('layout, W, n, F_', GPU_ATTENTION, ids=str)
def test_attention_on_gpu(layout, W, n, F_):
    check_attention(layout, W, n, F_, torch.bfloat16, 'cuda')


@no_gpu
@pytest.mark.gpu
@pytest.mark.parametrize(
    'E, B, D, O',
    [
        (16, 16, 768, 3072),
        (8, 64, 768, 3072),
        (2, 130, 768, 3072),
        (16, 1024, 768, 3072),
        (3, 17, 130, 70),
    ],
)
def test_experts_on_gpu(E, B, D, O):
    check_experts(E, B, D, O, torch.bfloat16, 'cuda')


@no_gpu
@pytest.mark.gpu
def test_cross_entropy_on_gpu():
    check_cross_entropy(333, 50304, torch.bfloat16, 'cuda')
    check_cross_entropy(5, 1001, torch.bfloat16, 'cuda')


if __name__ == '__main__':  # cells as E,W,B; the speed tables' where none is named
    report(
        [tuple(map(int, cell.split(','))) for cell in sys.argv[1:]]
        or [
            (16, 128, 128),
            (16, 2048, 16),
            (8, 128, 256),
            (8, 2048, 16),
            (2, 128, 1024),
            (2, 2048, 16),
            (16, 32, 1024),
        ]
    )

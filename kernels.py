"""
What the models' fast paths are made of, in plain PyTorch on every device: the recurrent step's pieces with their backwards (unroll.py
runs them token by token), head and loss in slices of rows, CUDA graphs, and the choice between a compiled piece and its Triton twin
(triton_kernels.py).

Shape letters as in model.py; C cache heads (G, or E*G where experts own their cache), M = E*H / C query heads a cache head, S slots of the
work buffers. `dt` is the dtype of matrix products (bf16 under autocast); states, norms, softmax and sums stay in the state's dtype.
"""
import functools
import importlib.util
import math
import sys
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import torch
import torch.nn.functional as F

EPS = 1e-6               # of every RMSNorm and of the routed aggregations' denominators
ROPE_BASE = 10000.0
SOFTCAP = 15.0           # logits are SOFTCAP * tanh(x / SOFTCAP), in fp32
LOGITS_PER_SLICE = 2**24   # head and loss: logits held at a time, 64 MiB in fp32; eight times as many on a GPU


def compute_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype of matrix products for x: autocast's where it is on, else x's own."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def softcap(x: torch.Tensor) -> torch.Tensor:
    return SOFTCAP * torch.tanh(x / SOFTCAP)


def rope_table(n: int, K: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of slots 0..n-1: (n, K/2) each, in like's dtype (at least fp32) and on its device."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    freq = ROPE_BASE ** (-torch.arange(0, K, 2, device=like.device, dtype=dtype) / K)
    angle = torch.arange(n, device=like.device, dtype=dtype)[:, None] * freq
    return angle.cos(), angle.sin()


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x (..., K), pairing dimension j with j + K/2. cos, sin broadcast over (..., K/2); -sin rotates back."""
    x1, x2 = x.to(cos.dtype).chunk(2, -1)
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1)


def gate_weights(a: torch.Tensor, mode: str) -> torch.Tensor:
    """Routed aggregations' coefficients of h_i from the gates a (..., E): Level.aggregate in model.py."""
    if mode == 'softmax_mean':
        return a / (a.sum(-1, keepdim=True) + EPS)
    return a / (a.square().sum(-1, keepdim=True) + EPS).sqrt()                               # softmax_l2


# ---- one level, one token: the loop's body, in pieces that torch.compile can fuse ----
# `keep` arguments are slices of the block's buffers, written for the backward; None where no gradient is wanted.

def rms(x: torch.Tensor) -> torch.Tensor:
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)


def rms_backward(g: torch.Tensor, x_hat: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    """Gradient of x -> x_hat = x * r, r = (mean(x^2) + eps)^-1/2, for the output's gradient g."""
    x_hat = x_hat.to(g.dtype)
    return r * (g - x_hat * (g * x_hat).mean(-1, keepdim=True))


def enter(s: torch.Tensor, z: torch.Tensor, a: torch.Tensor, b: torch.Tensor, wqkv: torch.Tensor, keep: list[torch.Tensor] | None) -> tuple[torch.Tensor, torch.Tensor]:
    """u = a*s + b*z (B, D), and the queries, keys and values of its norm (B, (C*M + 2*C) * K)."""
    u = a * s + b * z
    ru = rms(u)
    n = (u * ru).to(wqkv.dtype)
    if keep is not None:
        for buffer, x in zip(keep, (s, ru, n), strict=True):
            buffer.copy_(x)
    return u, F.linear(n, wqkv)


def enter_backward(du: torch.Tensor, dqkv: torch.Tensor, s: torch.Tensor, ru: torch.Tensor, n: torch.Tensor, z: torch.Tensor,
                   a: torch.Tensor, b: torch.Tensor, wqkv: torch.Tensor, keep: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """From the gradients of u's other uses and of the queries, keys and values: those of s and z."""
    du = du + rms_backward((dqkv @ wqkv).to(du.dtype), n, ru)
    keep[0].copy_(du)
    keep[1].copy_(dqkv)
    return a * du, b * du


def rotate(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layout: tuple, keep: list[torch.Tensor] | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Normalised, rotated queries (B, C, M, K); the normalised key rotated and not, and the value, each (B*C, K)."""
    C, M, K = heads(layout)
    B, dt, wide = qkv.size(0), qkv.dtype, cos.dtype
    q, k, v = qkv.split([C * M * K, C * K, C * K], -1)
    q, k = q.view(B, C, M, K).to(wide), k.view(B, C, K).to(wide)
    rq, rk = rms(q), rms(k)
    kn = (k * rk).to(dt)                                       # as the cache keeps it, and then rotated: a later chunk does the same
    q_rot = apply_rope(q * rq, cos, sin).to(dt)
    if keep is not None:
        for buffer, x in zip(keep, (rq, rk, q_rot), strict=True):
            buffer.copy_(x)
    return q_rot, apply_rope(kn, cos, sin).to(dt).view(B * C, K), kn.view(B * C, K), v.reshape(B * C, K)


def rotate_backward(dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, q_rot: torch.Tensor, k_rot: torch.Tensor, rq: torch.Tensor,
                    rk: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layout: tuple) -> torch.Tensor:
    """From the gradients of the rotated queries and key, and of the value: that of qkv. A rotation keeps lengths, so the
    norm's backward may run on the rotated vectors, before rotating back."""
    C, M, K = heads(layout)
    B, dt = layout[0], q_rot.dtype
    dq = apply_rope(rms_backward(dq.view(B, C, M, K).to(rq.dtype), q_rot, rq), cos, -sin)
    dk = apply_rope(rms_backward(dk.view(B, C, K).to(rk.dtype), k_rot.view(B, C, K), rk), cos, -sin)
    return torch.cat([dq.view(B, -1), dk.view(B, -1), dv.reshape(B, -1).to(dk.dtype)], -1).to(dt)


def probabilities(q_rot: torch.Tensor, keys: torch.Tensor, bias: torch.Tensor, keep: torch.Tensor | None) -> torch.Tensor:
    """Attention weights (B*C, M, S) of q_rot (B, C, M, K) over all slots of the buffer, keys (B*C, S, K): whole buffers are
    contiguous, which a window of them is not. bias (B, 1, 1, S): -inf outside the window and where a slot is empty."""
    B, C, M, K = q_rot.shape
    scores = torch.bmm(q_rot.view(B * C, M, K), keys.transpose(1, 2)).to(bias.dtype).view(B, C, M, -1)
    p = F.softmax(scores / math.sqrt(K) + bias, -1).view(B * C, M, -1).to(keys.dtype)
    if keep is not None:
        keep.copy_(p)
    return p


def attend(q_rot: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor, layout: tuple, keep: list[torch.Tensor | None] | None) -> torch.Tensor:
    """Attended values, by expert (E, B, H*K). keep: their place, and the attention weights' or None."""
    att = by_expert(torch.bmm(probabilities(q_rot, keys, bias, None if keep is None else keep[1]), values), layout)
    if keep is not None:
        keep[0].copy_(att)
    return att


def attend_backward(datt: torch.Tensor, p: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, wide: torch.dtype, layout: tuple, keep: list[torch.Tensor]) -> torch.Tensor:
    """Gradient of the rotated queries (B*C, M, K). p (B*C, M, S): attention weights. keep: the scores' gradients (B*C, M, S) and the output's
    (B*C, M, K)."""
    do = by_cache_head(datt, layout)
    dp, p = torch.bmm(do, values.transpose(1, 2)).to(wide), p.to(wide)                       # (B*C, M, S)
    ds = (p * (dp - (dp * p).sum(-1, keepdim=True)) / math.sqrt(keys.size(-1))).to(keys.dtype)
    keep[0].copy_(ds)
    keep[1].copy_(do)
    return torch.bmm(ds, keys)


def product(a: torch.Tensor, b: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    """a @ b, matrices or stacks of them, as the accumulator holds it where the device can give that, else rounded first."""
    if a.is_cuda and a.dtype != wide:
        return (torch.mm if a.dim() == 2 else torch.bmm)(a, b, out_dtype=wide)
    return (a @ b).to(wide)


def add_product(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """out += a^T @ b: out (N, X, Y) in the same or a wider dtype, a (N, rows, X), b (N, rows, Y)."""
    if out.dtype == a.dtype:
        out.baddbmm_(a.transpose(1, 2), b)
    else:
        out.add_(torch.bmm(a.transpose(1, 2), b))


def heads(layout: tuple) -> tuple[int, int, int]:
    """C cache heads, M query heads a cache head, K their size."""
    _, E, G, R, K, shared = layout
    return (G, E * R, K) if shared else (E * G, R, K)


def by_expert(o: torch.Tensor, layout: tuple) -> torch.Tensor:
    """Attended values (B*C, M, K) -> (E, B, H*K)."""
    B, E, G, R, K, shared = layout
    o = o.view(B, G, E, R, K).permute(2, 0, 1, 3, 4) if shared else o.view(B, E, G, R, K).transpose(0, 1)
    return o.reshape(E, B, G * R * K)


def by_cache_head(o: torch.Tensor, layout: tuple) -> torch.Tensor:
    """The inverse of by_expert: (E, B, H*K) -> (B*C, M, K)."""
    B, E, G, R, K, shared = layout
    o = o.view(E, B, G, R, K)
    return o.permute(1, 2, 0, 3, 4).reshape(B * G, E * R, K) if shared else o.transpose(0, 1).reshape(B * E * G, R, K)


def mix(u: torch.Tensor, att: torch.Tensor, coef: torch.Tensor, wo: torch.Tensor, up: torch.Tensor, down: torch.Tensor, keep: list[torch.Tensor] | None) -> torch.Tensor:
    """Output projection, FFN, norm and sum over experts. coef: (E, B, 1) or a 0-dim tensor. Returns the new s (B, D)."""
    dt = wo.dtype
    y = u + torch.bmm(att, wo.transpose(1, 2))                 # (E, B, D)
    ry = rms(y)
    f = (y * ry).to(dt)
    act = F.relu(torch.bmm(f, up.transpose(1, 2)))             # (E, B, 4D)
    x = y + torch.bmm(act.square(), down.transpose(1, 2))
    rx = rms(x)
    h = x * rx
    if keep is not None:
        for buffer, value in zip(keep, (ry, f, act, rx, h), strict=True):
            buffer.copy_(value)
    return (coef * h).sum(0)


def norm_sum_backward(ds: torch.Tensor, coef: torch.Tensor, h: torch.Tensor, rx: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """From the gradient of s (B, D): that of the experts' sums before their norm (E, B, D)."""
    dx = rms_backward(coef * ds, h, rx)
    keep.copy_(dx)
    return dx


def ffn_backward(dx: torch.Tensor, dact: torch.Tensor, ry: torch.Tensor, f: torch.Tensor, wo: torch.Tensor, up: torch.Tensor, keep: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """From dx and the gradient before the ReLU (E, B, 4D): those of u (B, D) and of the attended values (E, B, H*K)."""
    dy = dx + rms_backward(torch.bmm(dact, up).to(dx.dtype), f, ry)
    keep.copy_(dy)
    return dy.sum(0), torch.bmm(dy.to(wo.dtype), wo)


def mix_backward(ds: torch.Tensor, coef: torch.Tensor, ry: torch.Tensor, f: torch.Tensor, act: torch.Tensor, rx: torch.Tensor,
                 h: torch.Tensor, wo: torch.Tensor, up: torch.Tensor, down: torch.Tensor, keep: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """mix's backward: as ffn_backward, from the gradient of s (B, D). keep: dy, dact, dx."""
    dx = norm_sum_backward(ds, coef, h, rx, keep[2])
    dact = 2 * act * torch.bmm(dx.to(wo.dtype), down)
    keep[1].copy_(dact)
    return ffn_backward(dx, dact, ry, f, wo, up, keep[0])


def route(s: torch.Tensor, z: torch.Tensor, wq: torch.Tensor, bq: torch.Tensor, keys: torch.Tensor, mode: str, keep: list[torch.Tensor] | None) -> torch.Tensor:
    """Router (model.Level.aggregate): the coefficients of the experts' outputs (E, B, 1)."""
    c = torch.cat([z, s], -1).to(wq.dtype)
    q = F.linear(c, wq, bq)
    a = F.softmax((q @ keys.t()).to(s.dtype) / math.sqrt(q.size(-1)), -1)
    coef = gate_weights(a, mode).t().unsqueeze(-1)
    if keep is not None:
        for buffer, x in zip(keep, (coef, a, c, q), strict=True):
            buffer.copy_(x)
    return coef


def route_backward(ds: torch.Tensor, h: torch.Tensor, a: torch.Tensor, q: torch.Tensor, wq: torch.Tensor, keys: torch.Tensor, mode: str,
                   keep: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """From the gradient of the level's output (B, D) and its experts' outputs h (E, B, D): those of z and s, by way of the router."""
    dcoef = (h.to(ds.dtype) * ds).sum(-1).t()                  # (B, E)
    if mode == 'softmax_mean':
        total = a.sum(-1, keepdim=True) + EPS
        da = dcoef / total - (dcoef * a).sum(-1, keepdim=True) / total.square()
    else:
        length = (a.square().sum(-1, keepdim=True) + EPS).sqrt()
        da = dcoef / length - a * (dcoef * a).sum(-1, keepdim=True) / length**3
    dscore = (a * (da - (a * da).sum(-1, keepdim=True)) / math.sqrt(q.size(-1))).to(wq.dtype)
    dq = dscore @ keys
    keep[0].copy_(dscore)
    keep[1].copy_(dq)
    return (dq @ wq).to(a.dtype).chunk(2, -1)


class Ops(NamedTuple):
    """The loop's body. torch.compile fuses each piece's norms, rotations and sums around its products."""
    enter: object = enter
    rotate: object = rotate
    attend: object = attend
    probabilities: object = probabilities
    mix: object = mix
    mix_backward: object = mix_backward
    norm_sum_backward: object = norm_sum_backward
    ffn_backward: object = ffn_backward
    attend_backward: object = attend_backward
    rotate_backward: object = rotate_backward
    enter_backward: object = enter_backward


EAGER = Ops()


@functools.cache
def compiled(op: Callable) -> Callable:
    """op compiled, once in a process, for each of the sizes that it meets."""
    torch._dynamo.config.recompile_limit = 256                 # past it a piece would run eagerly from then on
    torch._dynamo.config.accumulated_recompile_limit = 4096
    return torch.compile(op, dynamic=False)


# ---- Triton or not: measured, for the sizes at hand ----

@functools.cache
def triton_module() -> ModuleType | None:
    """triton_kernels.py; None where triton is not installed."""
    if importlib.util.find_spec('triton') is None:
        return None
    import triton_kernels
    return triton_kernels


def seconds_of(run: Callable[[], object], repeats: int = 10) -> float:
    """Device time of run(), the least of a few: replays of a CUDA graph of it, so that launches from Python do not count, as they do not
    in training."""
    for _ in range(2):                                         # the first compiles
        run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode='thread_local'):       # other threads load data
        for _ in range(repeats):
            run()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(5):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return min(times) / 1e3 / repeats


@torch.no_grad()
def compare(run: Callable[[bool], tuple | list]) -> dict:
    """run(triton): seconds compiled and as Triton kernels, and the largest relative difference of their results (NaN if there is one); why
    not, where it fails: a kernel that does not compile, or asks for more shared memory than the card has, is a TritonError."""
    found = {'compiled': seconds_of(lambda: run(False))}
    try:
        mine, plain = ([x.to(torch.float64, copy=True) for x in run(triton)] for triton in (True, False))    # both may lie in one memory
        off = [(x - y).norm() / y.norm().clamp(min=1e-30) for x, y in zip(mine, plain, strict=True)]
        found['difference'] = torch.stack(off).max().item()
        found['triton'] = seconds_of(lambda: run(True))
    except (sys.modules['triton'].TritonError, RuntimeError) as error:
        found['error'] = f'{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ""}'
    return found


chosen: dict[tuple, dict] = {}   # what was measured, by sizes and name


def agrees(found: dict) -> bool:
    return found.get('difference', 1) < 0.03


def wins(found: dict) -> bool:
    return agrees(found) and found.get('triton', math.inf) < found['compiled']


def chosen_lines() -> list[str]:
    """What was measured and chosen so far, one line a set of sizes; empty where there is no GPU."""
    def told(found):
        if 'error' in found:
            return f'compiled ({found["error"]})'
        return f'{"Triton" if wins(found) else "compiled"} ({1e6 * found.get("triton", math.nan):.0f} against {1e6 * found["compiled"]:.0f} us)'
    return [', '.join(f'{name}: {told(found)}' for name, found in trials.items()) for trials in chosen.values()]


# ---- head and loss ----

def cross_entropy(logits: torch.Tensor, target: torch.Tensor, grad_scale: float | None, dt: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Summed cross-entropy of softcap(logits) (rows, V) against target (rows, 1), and its gradient times grad_scale in dtype dt
    (None without a grad_scale). Works in the logits' place."""
    tanh = torch.tanh(logits / SOFTCAP)
    capped = SOFTCAP * tanh
    lse = torch.logsumexp(capped, -1, keepdim=True)
    loss = (lse - capped.gather(1, target)).sum()
    if grad_scale is None:
        return loss, None
    d = capped.sub_(lse).exp_()                                # softmax
    d -= (torch.arange(d.size(1), device=d.device) == target).to(d.dtype)
    return loss, d.mul_(tanh.square_().neg_().add_(1)).mul_(grad_scale).to(dt)


def slice_loss(logits: torch.Tensor, target: torch.Tensor, grad_scale: float | None, dt: torch.dtype, compile: bool, triton: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """cross_entropy by the fastest of its kinds; logits in the dtype of products."""
    if triton:
        return triton_module().cross_entropy(logits, target, grad_scale, dt)
    return (compiled(cross_entropy) if compile else cross_entropy)(logits.to(torch.promote_types(logits.dtype, torch.float32)), target, grad_scale, dt)


def loss_by_triton(rows: int, V: int, dt: torch.dtype, device: torch.device) -> bool:
    """Whether the Triton kernel beats the compiled twin here, for slices of this size. Not measured while a CUDA graph is captured."""
    if device.type != 'cuda' or dt == torch.float64 or triton_module() is None:
        return False
    if (rows, V, dt) not in chosen:
        if torch.cuda.is_current_stream_capturing():
            return False
        random = torch.Generator(device).manual_seed(0)
        logits = (torch.randn(rows, V, device=device, generator=random) * 5).to(dt)
        target = torch.randint(V, (rows, 1), device=device, generator=random)
        chosen[rows, V, dt] = {'loss': compare(lambda triton: slice_loss(logits.clone(), target, 1 / rows, dt, True, triton))}
    return wins(chosen[rows, V, dt]['loss'])


def rows_per_slice(N: int, V: int, kind: str) -> int:
    """Of N rows, how many have their logits at a time; kind: 'cpu' or 'cuda'."""
    return min(N, max(1, LOGITS_PER_SLICE * (8 if kind == 'cuda' else 1) // V))


class HeadLoss(torch.autograd.Function):
    """Mean soft-capped cross-entropy in slices of rows, so that few logits exist at a time; the gradients are made in the forward."""

    @staticmethod
    def forward(ctx, x, weight, targets, dt, grad, compile):
        N, V = x.size(0), weight.size(0)
        grad = grad and any(ctx.needs_input_grad)
        rows = rows_per_slice(N, V, x.device.type)
        compile = compile and grad
        triton = compile and loss_by_triton(rows, V, dt, x.device)
        w = weight.to(dt)
        loss = torch.zeros((), dtype=x.dtype, device=x.device)
        if grad:
            dx, dw = torch.empty_like(x), torch.zeros_like(weight)
        for i in range(0, N, rows):
            x_i = x[i:i + rows].to(dt)
            loss_i, d = slice_loss(x_i @ w.t(), targets[i:i + rows, None], 1 / N if grad else None, dt, compile, triton)
            loss += loss_i
            if grad:
                dx[i:i + rows] = d @ w
                dw += product(d.t(), x_i, dw.dtype)
        if grad:
            ctx.save_for_backward(dx, dw)
        return loss / N

    @staticmethod
    def backward(ctx, g):
        dx, dw = ctx.saved_tensors
        return g * dx, g * dw, None, None, None, None


def head_loss(x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, compile: bool = False) -> torch.Tensor:
    """Mean cross-entropy (nats) of softcap(x @ weight.T) against targets. x (N, D), weight (V, D), targets (N,) int64."""
    dt = compute_dtype(x)
    with torch.autocast(x.device.type, enabled=False):
        return HeadLoss.apply(x, weight, targets, dt, torch.is_grad_enabled(), compile)


# ---- CUDA graphs ----

def graphed(graphs: dict, name: str, function: Callable, *args: object) -> object:
    """function(*args) as a CUDA graph: the first three calls run as they are; the fourth is captured, and it and all later calls replay
    that: the arguments are read from, and the results lie in, the same memory every time. graphs: where they are kept, by name; those of
    one dict share memory and must be called in the same order again and again, so that one may use another's activations. Nothing may
    keep an eager call's loss alive: its gradient nodes belong to another stream."""
    calls, graph, result = graphs.get(name, (0, None, None))
    if graph is None and calls < 3:
        result = function(*args)
        graphs[name] = calls + 1, None, None
        return result
    if graph is None:
        pool = next((g.pool() for _, g, _ in graphs.values() if g is not None), None)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode='thread_local'):
            result = function(*args)
        graphs[name] = calls, graph, result
    graph.replay()
    return result

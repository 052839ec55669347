"""
The fast path of the recurrent unroll, and the fused head and loss. Plain PyTorch, on every device.

A general nonlinear recurrence cannot be scanned: tokens must run one after another. What can leave the loop, leaves it:
  - queries, keys and values of all E experts are one dense product (they read the same input); the rest are batched products
    over experts;
  - the weights' gradients are one product over T*B rows a weight, after the backward loop (also more accurate in bf16);
  - keys and values live in one preallocated buffer of W + T slots a level, written in place: the W carried keys rotated by
    slots 0..W-1, token t's by slot W + t. Scores depend on differences of slots only, so no angle passes W + T;
  - embedding, final norm, head and loss see the whole chunk at once, the logits in slices of rows.
`Unroll` is the loop with its backward written by hand, so that autograd records one node a chunk. Its plain twin is
`RecurrentGPT.plain_step` in model.py; tests/test_model.py compares values and gradients in float64.

Shape letters as in model.py; C cache heads (G, or E*G where experts own their cache), M = E*H / C query heads a cache head.
`dt` is the dtype of matrix products (bf16 under autocast); states, norms, softmax and sums stay in the state's dtype.
"""
import functools
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F

EPS = 1e-6               # of every RMSNorm and of the routed aggregations' denominators
ROPE_BASE = 10000.0
SOFTCAP = 15.0           # logits are SOFTCAP * tanh(x / SOFTCAP), in fp32
LOGITS_PER_SLICE = 2**24   # head and loss: logits held at a time; 64 MiB in fp32


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
# `keep` arguments are slices of the chunk's buffers, written for the backward; None where no gradient is wanted.

def rms(x: torch.Tensor) -> torch.Tensor:
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)


def rms_backward(g: torch.Tensor, x_hat: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    """Gradient of x -> x_hat = x * r, r = (mean(x^2) + eps)^-1/2, for the output's gradient g."""
    x_hat = x_hat.to(g.dtype)
    return r * (g - x_hat * (g * x_hat).mean(-1, keepdim=True))


def project(s, z, a, b, wqkv, cos, sin, heads, keep):
    """u = a*s + b*z (B, D), its rotated queries (B, C, M, K), the key (B, C, K) rotated and not, and the value."""
    (C, M, K), B, dt = heads, s.size(0), wqkv.dtype
    u = a * s + b * z
    ru = rms(u)
    n = (u * ru).to(dt)
    q, k, v = F.linear(n, wqkv).split([C * M * K, C * K, C * K], -1)
    q, k = q.view(B, C, M, K).to(u.dtype), k.view(B, C, K).to(u.dtype)
    rq, rk = rms(q), rms(k)
    kn = k * rk
    q_rot = apply_rope(q * rq, cos, sin).to(dt)
    if keep is not None:
        for buffer, x in zip(keep, (s, ru, n, rq, rk, q_rot), strict=True):
            buffer.copy_(x)
    return u, q_rot, apply_rope(kn, cos, sin).to(dt), kn.to(dt), v.view(B, C, K)


def project_backward(du, dq, dk, dv, q_rot, k_rot, s, ru, n, rq, rk, a, b, wqkv, cos, sin, keep):
    """From the gradients of u's other use, of the rotated queries and key, and of the value: those of s and z.
    A rotation keeps lengths, so the norm's backward may run on the rotated vectors, before rotating back."""
    B, dt = n.size(0), wqkv.dtype
    dq = apply_rope(rms_backward(dq.to(rq.dtype), q_rot, rq), cos, -sin)
    dk = apply_rope(rms_backward(dk.to(rk.dtype), k_rot, rk), cos, -sin)
    dqkv = torch.cat([dq.view(B, -1), dk.view(B, -1), dv.reshape(B, -1).to(dk.dtype)], -1).to(dt)
    du = du + rms_backward((dqkv @ wqkv).to(du.dtype), n, ru)
    keep[0].copy_(du)
    keep[1].copy_(dqkv)
    return a * du, b * du


def attend(q_rot, keys, values, bias, keep):
    """Attention of q_rot (B, C, M, K) over all slots S of the buffers, keys and values (B*C, S, K): whole buffers are
    contiguous, which a window of them is not. bias (B, 1, 1, S): -inf outside the window and where a slot is empty."""
    B, C, M, K = q_rot.shape
    scores = torch.bmm(q_rot.view(B * C, M, K), keys.transpose(1, 2)).to(bias.dtype).view(B, C, M, -1)
    p = F.softmax(scores / math.sqrt(K) + bias, -1).to(q_rot.dtype).view(B * C, M, -1)
    if keep is not None:
        keep.copy_(p)
    return torch.bmm(p, values)                                # (B*C, M, K)


def attend_backward(do, p, keys, values, q_rot, dk, dv):
    """Adds to dk, dv (B*C, T, K), the gradients of the chunk's own slots, and returns that of q_rot (B*C, M, K)."""
    T, K, wide = dk.size(1), do.size(-1), dk.dtype
    dp, pw = torch.bmm(do, values.transpose(1, 2)).to(wide), p.to(wide)                      # (B*C, M, S)
    dscore = pw * (dp - (dp * pw).sum(-1, keepdim=True)) / math.sqrt(K)
    dk.baddbmm_(dscore[..., -T:].transpose(1, 2), q_rot.to(wide))
    dv.baddbmm_(pw[..., -T:].transpose(1, 2), do.to(wide))
    return torch.bmm(dscore.to(do.dtype), keys)


def by_expert(o, layout):
    """Attended values (B*C, M, K) -> (E, B, H*K)."""
    B, E, G, R, K, shared = layout
    o = o.view(B, G, E, R, K).permute(2, 0, 1, 3, 4) if shared else o.view(B, E, G, R, K).transpose(0, 1)
    return o.reshape(E, B, G * R * K)


def by_cache_head(o, layout):
    """The inverse of by_expert: (E, B, H*K) -> (B*C, M, K)."""
    B, E, G, R, K, shared = layout
    o = o.view(E, B, G, R, K)
    return o.permute(1, 2, 0, 3, 4).reshape(B * G, E * R, K) if shared else o.transpose(0, 1).reshape(B * E * G, R, K)


def mix(u, o, coef, wo, up, down, layout, keep):
    """Output projection, FFN, norm and sum over experts. coef: (E, B, 1) or a 0-dim tensor. Returns the new s (B, D)."""
    dt = wo.dtype
    att = by_expert(o, layout)                                 # (E, B, H*K)
    y = u + torch.bmm(att, wo.transpose(1, 2))                 # (E, B, D)
    ry = rms(y)
    f = (y * ry).to(dt)
    act = F.relu(torch.bmm(f, up.transpose(1, 2)))             # (E, B, 4D)
    x = y + torch.bmm(act.square(), down.transpose(1, 2))
    rx = rms(x)
    h = x * rx
    if keep is not None:
        for buffer, value in zip(keep, (att, ry, f, act, rx, h), strict=True):
            buffer.copy_(value)
    return (coef * h).sum(0)


def mix_backward(ds, coef, ry, f, act, rx, h, wo, up, down, layout, keep):
    """From the gradient of s (B, D): those of u (B, D) and of the attended values (B*C, M, K)."""
    dt = wo.dtype
    dx = rms_backward(coef * ds, h, rx)                        # (E, B, D)
    dx_ = dx.to(dt)
    dact = 2 * act * torch.bmm(dx_, down)                      # (E, B, 4D)
    dy = dx + rms_backward(torch.bmm(dact, up).to(dx.dtype), f, ry)
    dy_ = dy.to(dt)
    for buffer, value in zip(keep, (dy_, dact, dx_), strict=True):
        buffer.copy_(value)
    return dy.sum(0), by_cache_head(torch.bmm(dy_, wo), layout)


def route(s, z, wq, bq, keys, mode):
    """Router (model.Level.aggregate): coefficients (B, E), gates a (B, E), the router's input c (B, 2D) and query."""
    c = torch.cat([z, s], -1).to(wq.dtype)
    q = F.linear(c, wq, bq)
    a = F.softmax((q @ keys.t()).to(s.dtype) / math.sqrt(q.size(-1)), -1)
    return gate_weights(a, mode), a, c, q


def route_backward(dcoef, a, q, wq, keys, mode):
    """From the coefficients' gradient (B, E): those of the scores and of q (for the weights), of z and s."""
    if mode == 'softmax_mean':
        total = a.sum(-1, keepdim=True) + EPS
        da = dcoef / total - (dcoef * a).sum(-1, keepdim=True) / total.square()
    else:
        length = (a.square().sum(-1, keepdim=True) + EPS).sqrt()
        da = dcoef / length - a * (dcoef * a).sum(-1, keepdim=True) / length**3
    dscore = (a * (da - (a * da).sum(-1, keepdim=True)) / math.sqrt(q.size(-1))).to(wq.dtype)
    dq = dscore @ keys
    dz, ds = (dq @ wq).to(a.dtype).chunk(2, -1)
    return dscore, dq, dz, ds


class Ops(NamedTuple):
    """The loop's body. torch.compile fuses each piece's norms, rotations and sums around its products."""
    project: object = project
    attend: object = attend
    mix: object = mix
    mix_backward: object = mix_backward
    attend_backward: object = attend_backward
    project_backward: object = project_backward


EAGER = Ops()


@functools.cache
def compiled(op):
    """op compiled, once in a process."""
    return torch.compile(op, dynamic=False)


# ---- a chunk's buffers ----
# Kept between chunks: fresh memory costs a page fault every 4 KiB, on some machines more than the arithmetic that fills it.
_free: dict[tuple, list[dict[str, torch.Tensor]]] = {}


def take_buffers(T, L, W, layout, heads, dt, wide, device) -> tuple[tuple, dict[str, torch.Tensor]]:
    """Buffers of one chunk with a backward. Rows of experts' activations are (L, E, T*B, X), so that a weight's gradient is
    one product over T*B rows. Returns (key, buffers); give them back with _free[key].append(buffers)."""
    key = (T, L, W, layout, heads, dt, wide, device)
    if _free.get(key):
        return key, _free[key].pop()
    B, E, G, R, K, _ = layout
    C, M, _ = heads
    N, D = T * B, G * R * K
    shapes = {'s': (N, D, wide), 'ru': (N, 1, wide), 'n': (N, D, dt), 'rq': (T, B, C, M, 1, wide), 'rk': (T, B, C, 1, wide),
              'q_rot': (T, B, C, M, K, dt), 'p': (T, B * C, M, W + T, dt),
              'att': (E, N, D, dt), 'ry': (E, N, 1, wide), 'f': (E, N, D, dt), 'act': (E, N, 4 * D, dt),
              'rx': (E, N, 1, wide), 'h': (E, N, D, dt),
              'du': (N, D, wide), 'dqkv': (N, (C * M + 2 * C) * K, dt),
              'dy': (E, N, D, dt), 'dact': (E, N, 4 * D, dt), 'dx': (E, N, D, dt),
              'dk': (B * C, T, K, wide), 'dv': (B * C, T, K, wide)}
    return key, {name: torch.empty(L, *shape, dtype=dtype, device=device) for name, (*shape, dtype) in shapes.items()}


BY_TOKEN = ('rq', 'rk', 'q_rot', 'p')                          # first dimension T; all others hold T*B rows


def at(buffers: dict[str, torch.Tensor], names: tuple[str, ...], l: int, t: int, B: int) -> list[torch.Tensor]:
    """Level l's, token t's slices of the named buffers."""
    return [buffers[name][l, t] if name in BY_TOKEN else buffers[name][l].narrow(-2, t * B, B) for name in names]


# ---- the loop ----

class Unroll(torch.autograd.Function):
    """T tokens through L levels. Inputs: meta (plain values), z (T, B, D), the carried state, then 6 weights a level
    (9 with a router). Outputs: s[L] of each token (T, B, D) and the new k, v; only the first is differentiable."""

    @staticmethod
    def forward(ctx, meta, z, s, k, v, count, *weights):
        layout, heads, mode, ops, per_level, dt, grad = meta
        (T, B, _), (L, _, C, W, K) = z.shape, k.shape
        levels = [weights[i:i + per_level] for i in range(0, len(weights), per_level)]
        grad = grad and any(ctx.needs_input_grad)              # the latter alone is true of parameters under no_grad too
        key, buf = take_buffers(T, L, W, layout, heads, dt, s.dtype, z.device) if grad else (None, None)
        cos, sin = rope_table(W + T, K, s)
        slot, minus_inf = torch.arange(W + T, device=z.device), torch.tensor(-math.inf, dtype=s.dtype, device=z.device)
        empty = torch.where(slot < W - count[:, None], minus_inf, 0)[:, None, None]          # (B, 1, 1, W + T)
        kbuf = torch.zeros(L, B * C, W + T, K, dtype=dt, device=z.device)                    # slots to come must be finite
        vbuf = torch.zeros_like(kbuf)
        kbuf[:, :, :W] = apply_rope(k, cos[:W], sin[:W]).view(L, B * C, W, K)
        vbuf[:, :, :W] = v.reshape(L, B * C, W, K)
        new_k = torch.empty(L, B * C, W + T, K, dtype=dt, device=z.device)                   # as kbuf, not rotated
        new_k[:, :, :W] = k.reshape(L, B * C, W, K)
        coef = torch.tensor(1 / layout[1] if mode == 'mean' else 1 / math.sqrt(layout[1]), dtype=s.dtype, device=z.device)
        routes = []                                            # of each token and level, where there is a router
        out = torch.empty_like(z)
        for t in range(T):
            bias = empty.masked_fill((slot <= t) | (slot > t + W), -math.inf)                # token t sees slots t+1 .. t+W
            for l, (a, b, wqkv, wo, up, down, *router) in enumerate(levels):
                if router:
                    c, *gates = route(s, z[t], *router, mode)
                    coef = c.t().unsqueeze(-1)                 # (E, B, 1)
                    routes.append((coef, *gates))
                keep = (None, None, None)
                if grad:
                    keep = (at(buf, ('s', 'ru', 'n', 'rq', 'rk', 'q_rot'), l, t, B), buf['p'][l, t],
                            at(buf, ('att', 'ry', 'f', 'act', 'rx', 'h'), l, t, B))
                u, q_rot, k_rot, kn, v_t = ops.project(s, z[t], a, b, wqkv, cos[W + t], sin[W + t], heads, keep[0])
                kbuf[l, :, W + t], new_k[l, :, W + t], vbuf[l, :, W + t] = (x.reshape(B * C, K) for x in (k_rot, kn, v_t))
                o = ops.attend(q_rot, kbuf[l], vbuf[l], bias, keep[1])
                s = ops.mix(u, o, coef, wo, up, down, layout, keep[2])
            out[t] = s
        if grad:
            ctx.save_for_backward(z, *weights)
            ctx.meta, ctx.chunk = meta, (key, buf, kbuf, vbuf, cos, sin, coef, routes)
        new_k, new_v = (x[:, :, T:].reshape(L, B, C, W, K) for x in (new_k, vbuf))
        if grad:
            new_v = new_v.clone()                              # the backward reads vbuf; a state may be reset in place before
        ctx.mark_non_differentiable(new_k, new_v)
        return out, new_k, new_v

    @staticmethod
    def backward(ctx, dout, _dk, _dv):
        layout, heads, mode, ops, per_level, _, _ = ctx.meta
        z, *weights = ctx.saved_tensors
        levels = [weights[i:i + per_level] for i in range(0, len(weights), per_level)]
        if ctx.chunk is None:
            raise RuntimeError('Unroll: its buffers are used up by the first backward; a second one needs a new forward')
        key, buf, kbuf, vbuf, cos, sin, coef, routes = ctx.chunk
        (T, B, _), (L, _, S, K), (C, M, _) = z.shape, kbuf.shape, heads
        buf['dk'].zero_()
        buf['dv'].zero_()
        dz, ds, dgates = torch.zeros_like(z), torch.zeros_like(z[0]), []
        for t in reversed(range(T)):
            ds = ds + dout[t]
            for l in reversed(range(L)):
                a, b, wqkv, wo, up, down, *router = levels[l]
                if router:
                    coef, gate, c, query = routes.pop()
                    h = buf['h'][l].narrow(-2, t * B, B)
                    dcoef = (h.to(ds.dtype) * ds).sum(-1).t()  # (B, E)
                    *dgate, dz_router, ds_router = route_backward(dcoef, gate, query, router[0], router[2], mode)
                    dgates.append((*dgate, c, query))
                du, do = ops.mix_backward(ds, coef, *at(buf, ('ry', 'f', 'act', 'rx', 'h'), l, t, B), wo, up, down, layout,
                                          at(buf, ('dy', 'dact', 'dx'), l, t, B))
                dk, dv, q_rot, p = buf['dk'][l], buf['dv'][l], buf['q_rot'][l, t], buf['p'][l, t]
                dq = ops.attend_backward(do, p, kbuf[l], vbuf[l], q_rot.view(B * C, M, K), dk, dv).view(q_rot.shape)
                dk, dv, k_rot = (x.view(B, C, K) for x in (dk[:, t], dv[:, t], kbuf[l, :, S - T + t]))
                ds, dz_t = ops.project_backward(du, dq, dk, dv, q_rot, k_rot, *at(buf, ('s', 'ru', 'n', 'rq', 'rk'), l, t, B),
                                                a, b, wqkv, cos[S - T + t], sin[S - T + t], at(buf, ('du', 'dqkv'), l, t, B))
                if router:
                    ds, dz_t = ds + ds_router, dz_t + dz_router
                dz[t] += dz_t
        grads = []
        for l in range(L):                                     # dgates run from the last token's last level backward
            grads += weight_gradients({name: x[l] for name, x in buf.items()}, z, dgates[L - 1 - l::L])
        ctx.chunk = None
        _free.setdefault(key, []).append(buf)
        return None, dz, None, None, None, None, *grads


def weight_gradients(buf: dict[str, torch.Tensor], z: torch.Tensor, dgates: list[tuple]) -> list[torch.Tensor]:
    """A level's weight gradients, in the order of its weights: one product over T*B rows each."""
    def over_rows(g, x):                                       # (..., T*B, O), (..., T*B, I) -> (..., O, I)
        return g.transpose(-1, -2) @ x
    du = buf['du']
    grads = [(du * buf['s']).sum(), (du * z.flatten(0, 1)).sum(), over_rows(buf['dqkv'], buf['n']), over_rows(buf['dy'], buf['att']),
             over_rows(buf['dact'], buf['f']), over_rows(buf['dx'], buf['act'].square_())]
    if dgates:
        dscore, dq, c, q = (torch.cat(x) for x in zip(*dgates, strict=True))                 # (T*B, ...)
        grads += [over_rows(dq, c), dq.sum(0), over_rows(dscore, q)]
    return grads


def unroll(z, s, k, v, count, levels: list[dict[str, torch.Tensor]], aggregation: str, share_kv: bool, compile: bool = False):
    """Run a chunk of the recurrent model. z (T, B, D); the state (s, k, v, count) of model.State, not differentiated;
    levels: model.level_weights of each level. Returns s[L] of each token (T, B, D) and the new state's four tensors."""
    (T, B, _), (_, _, C, W, K) = z.shape, k.shape
    dt = compute_dtype(z)
    E, HK = levels[0]['wo'].size(0), levels[0]['wo'].size(2)
    M = E * HK // (C * K)
    G, R = (C, M // E) if share_kv else (C // E, M)
    names = ['a', 'b', 'wqkv', 'wo', 'up', 'down', 'router_q', 'router_q_bias', 'router_keys'][:len(levels[0])]
    weights = [level[name] if name in 'ab' else level[name].to(dt) for level in levels for name in names]
    meta = ((B, E, G, R, K, share_kv), (C, M, K), aggregation, Ops(*map(compiled, EAGER)) if compile else EAGER, len(names), dt,
            torch.is_grad_enabled())
    with torch.autocast(z.device.type, enabled=False):         # dtypes are ours from here on
        out, new_k, new_v = Unroll.apply(meta, z, s, k, v, count, *weights)
    return out, (out[-1].detach(), new_k, new_v, (count + T).clamp(max=W))


# ---- head and loss ----

def cross_entropy(logits: torch.Tensor, target: torch.Tensor, grad_scale: float | None, dt: torch.dtype):
    """Summed cross-entropy of softcap(logits) (rows, V) against target (rows, 1), and its gradient times grad_scale in dtype dt
    (None without a grad_scale). Works in the logits' place."""
    tanh = torch.tanh(logits.div_(SOFTCAP))
    capped = SOFTCAP * tanh
    lse = torch.logsumexp(capped, -1, keepdim=True)
    loss = (lse - capped.gather(1, target)).sum()
    if grad_scale is None:
        return loss, None
    d = capped.sub_(lse).exp_()                                # softmax
    d -= (torch.arange(d.size(1), device=d.device) == target).to(d.dtype)
    return loss, d.mul_(tanh.square_().neg_().add_(1)).mul_(grad_scale).to(dt)


class HeadLoss(torch.autograd.Function):
    """Mean soft-capped cross-entropy in slices of rows, so that few logits exist at a time; the gradients are made in the forward."""

    @staticmethod
    def forward(ctx, x, weight, targets, dt, grad, compile):
        N, V = x.size(0), weight.size(0)
        grad = grad and any(ctx.needs_input_grad)
        ce = compiled(cross_entropy) if compile and grad else cross_entropy
        w = weight.to(dt)
        loss = torch.zeros((), dtype=x.dtype, device=x.device)
        if grad:
            dx, dw = torch.empty_like(x), torch.zeros_like(weight)
        rows = max(1, LOGITS_PER_SLICE // V)
        for i in range(0, N, rows):
            x_i = x[i:i + rows].to(dt)
            loss_i, d = ce((x_i @ w.t()).to(x.dtype), targets[i:i + rows, None], 1 / N if grad else None, dt)
            loss += loss_i
            if grad:
                dx[i:i + rows] = d @ w
                dw += d.t() @ x_i
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

def graphed(graphs: dict, name: str, function, *args):
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

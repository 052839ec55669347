"""
The fast unroll of the recurrent model. A general nonlinear recurrence cannot be scanned: tokens must run one after another. What can
leave the loop, leaves it:
  - queries, keys and values of all E experts are one dense product (they read the same input); the rest are batched products
    over experts;
  - the weights' gradients are one product over n*B rows a weight, after the backward loop (also more accurate in bf16), and
    those of keys and values of earlier slots one product a group of tokens;
  - a chunk runs in blocks of n <= BLOCK tokens, so that attention reads W + n slots: the W carried keys rotated by slots 0..W-1,
    token t's by slot W + t. Scores depend on differences of slots only, so no angle passes W + n. Nothing is cut between blocks;
  - on CUDA a block is a graph, captured once and replayed (path 'graphed').
`Unroll` has its backward written by hand, so that autograd records one node a chunk. Its plain twin is `RecurrentGPT.plain_step` in
model.py; tests/test_model.py compares values and gradients in float64.

Shape letters as in model.py; C cache heads (G, or E*G where experts own their cache), M = E*H / C query heads a cache head, S slots.
"""
import math
from typing import NamedTuple

import torch

from kernels import EAGER, Ops, add_product, apply_rope, chosen, compare, compiled, compute_dtype, graphed, heads, product, rope_table, route
from kernels import route_backward, triton_module, wins

# ---- a block's memory ----
# A chunk runs in blocks of at most BLOCK tokens: attention reads W + BLOCK slots at a time, whatever the chunk's length.

BLOCK = 64
KEPT_WEIGHTS = 2**30     # bytes of a chunk's attention weights that a CPU keeps for the backward; more are made again, and on a GPU all
GROUP = 8                # tokens whose dK, dV of slots before them are added by one product, not one a token


class Plan(NamedTuple):
    """What a chunk is, apart from its tensors and its length."""
    layout: tuple        # B, E, G, R, K, one cache entry for all experts or one each
    L: int
    W: int
    mode: str            # aggregation
    router: int          # width of the router, 0: none
    dt: torch.dtype      # of products and caches
    wide: torch.dtype    # of everything else
    device: torch.device
    triton: frozenset    # names of those kernels of triton_kernels.py that stand in for the plain pieces
    grad: bool
    graphs: bool         # blocks are captured as CUDA graphs and replayed
    ops: Ops
    keep_p: bool = False # attention weights are kept for the backward


def shapes(plan: Plan, n: int) -> tuple[dict, dict]:
    """Of a block of n tokens: what the forward keeps for the backward; what both need while they run. Rows of experts'
    activations are (L, E, n*B, X), so that a weight's gradient is one product over n*B rows."""
    (B, E, G, R, K, _), (C, M, _), L, S, dt, wide = plan.layout, heads(plan.layout), plan.L, plan.W + n, plan.dt, plan.wide
    N, D, F = n * B, G * R * K, min(GROUP, n)
    keep = {'s': (N, D, wide), 'ru': (N, 1, wide), 'n': (N, D, dt),
            'rq': (n, B, C, M, 1, wide), 'rk': (n, B, C, 1, wide), 'q_rot': (n, B, C, M, K, dt), 'lse': (n, B * C, M, 1, wide),
            'att': (E, N, D, dt), 'ry': (E, N, 1, wide), 'f': (E, N, D, dt), 'act': (E, N, 4 * D, dt), 'rx': (E, N, 1, wide), 'h': (E, N, D, dt)}
    work = {name: (B * C, S, K, dt) for name in ('kbuf', 'vbuf', 'kn')}      # keys rotated, values, keys not rotated
    if plan.grad:
        work |= {'du': (N, D, wide), 'dqkv': (N, (C * M + 2 * C) * K, dt),
                 'dy': (E, N, D, dt), 'dact': (E, N, 4 * D, dt), 'dx': (E, N, D, dt), 'dk': (B * C, S, K, wide), 'dv': (B * C, S, K, wide),
                 'dscores': (B * C, F, M, S, dt), 'do': (B * C, F, M, K, dt)}
        weights = B * C, F, M, S, dt                           # of a group of tokens
        if plan.keep_p:
            keep['p'] = -(-n // GROUP), *weights
        else:
            work['p'] = 1, *weights
    if plan.router:
        keep |= {'coef': (E, N, 1, wide), 'gate': (N, E, wide), 'c': (N, 2 * D, dt), 'query': (N, plan.router, dt)}
        work |= {'dgate': (N, E, dt), 'dquery': (N, plan.router, dt)}
    return tuple({name: (L, *shape) for name, shape in x.items()} for x in (keep, work))


class Buffers(dict):
    """Tensors by name, and the CUDA graphs that read and write them: they live and die together."""

    def __init__(self, plan: Plan, sizes: dict):
        super().__init__({name: torch.empty(size, dtype=dtype, device=plan.device) for name, (*size, dtype) in sizes.items()})
        self.graphs = {}


# Kept from chunk to chunk: fresh memory costs a page fault every 4 KiB, on some machines more than the arithmetic that fills it.
_free: dict[tuple, list[Buffers]] = {}                         # what forwards keep, given back by their backwards
_work: dict[tuple, Buffers] = {}                               # what a block needs while it runs, and graphs' arguments


def release() -> None:
    """Gives the memory back that is kept from chunk to chunk."""
    _free.clear()
    _work.clear()


def take_buffers(plan: Plan, n: int) -> Buffers:
    """What the forward of a block of n tokens keeps. Give them back with _free[plan, n].append(buffers)."""
    pool = _free.setdefault((plan, n), [])
    return pool.pop() if pool else Buffers(plan, shapes(plan, n)[0])


@torch.inference_mode(False)                                   # outlives the mode it is made in
def workspace(plan: Plan, n: int) -> Buffers:
    """What a block needs while it runs."""
    if (plan, n) not in _work:
        work, (B, E, *_), W = Buffers(plan, shapes(plan, n)[1]), plan.layout, plan.W
        slot, t = torch.arange(W + n, device=plan.device), torch.arange(n, device=plan.device)[:, None]
        work['band'] = torch.zeros(n, 1, W + n, dtype=plan.wide, device=plan.device)         # token t sees slots t+1 .. t+W
        work['band'].masked_fill_(((slot <= t) | (slot > t + W))[:, None], -math.inf)
        work['bias'] = torch.empty(n, B, W + n, dtype=plan.wide, device=plan.device)         # the same, and -inf where it is empty
        work['count'] = torch.zeros(B, dtype=torch.int64, device=plan.device)
        work['cos'], work['sin'] = rope_table(W + n, plan.layout[4], work['band'])
        work['coef'] = torch.tensor(1 / E if plan.mode == 'mean' else 1 / math.sqrt(E), dtype=plan.wide, device=plan.device)
        _work[plan, n] = work
    return _work[plan, n]


ATTENTION, EXPERTS = ('rq', 'rk', 'q_rot', 'lse', 'att'), ('ry', 'f', 'act', 'rx', 'h')
BY_TOKEN = ('rq', 'rk', 'q_rot', 'lse')                        # first dimension n; all others hold n*B rows


def at(buffers: dict[str, torch.Tensor], names: tuple[str, ...], l: int, t: int, B: int) -> list[torch.Tensor]:
    """Level l's, token t's slices of the named buffers."""
    return [buffers[name][l, t] if name in BY_TOKEN else buffers[name][l].narrow(-2, t * B, B) for name in names]


# ---- the loop ----

def load_caches(plan: Plan, n: int, work: Buffers, k: torch.Tensor, v: torch.Tensor, count: torch.Tensor) -> None:
    """The W entries before a block, or with the block's own n, into the work buffers, keys rotated by slot; and the mask.
    k, v (L, B*C, W or W + n, K); count (B,): filled ones of the W."""
    W, S = plan.W, k.size(2)
    cos, sin = work['cos'][:S], work['sin'][:S]
    work['kn'][:, :, :S], work['vbuf'][:, :, :S], work['kbuf'][:, :, :S] = k, v, apply_rope(k, cos, sin)
    work['kbuf'][:, :, S:].zero_()                             # slots to come must be finite
    work['vbuf'][:, :, S:].zero_()
    filled = torch.arange(W + n, device=k.device) >= W - count[:, None]                      # (B, S)
    work['count'].copy_(count)
    work['bias'].copy_(work['band'].masked_fill(~filled, -math.inf))


def weights_of(plan: Plan, work: Buffers, keep: Buffers, l: int, t: int) -> torch.Tensor:
    """The place of the attention weights of token t's group at level l: (B*C, F, M, S)."""
    return keep['p'][l, t // GROUP] if plan.keep_p else work['p'][l, 0]


def window_attention(plan: Plan, work: Buffers, keep: dict | None, qkv: torch.Tensor, l: int, t: int) -> torch.Tensor:
    """Token t of a block at level l: norms and rotates its queries and key, pushes key and value into slot W + t of the work buffers, and
    attends. qkv (B, (C*M + 2*C) * K) -> (E, B, H*K). Where there are gradients keep takes ATTENTION, and p where that is kept."""
    W, layout, slot, kept, place = plan.W, plan.layout, plan.W + t, None, None
    kbuf, vbuf, kn = (work[name][l] for name in ('kbuf', 'vbuf', 'kn'))
    if plan.grad:
        kept = at(keep, ATTENTION, l, t, layout[0])
        place = [kept[4], weights_of(plan, work, keep, l, t)[:, t % GROUP] if plan.keep_p else None]
    if 'attention' in plan.triton:
        return triton_module().window_attention(qkv, kbuf, vbuf, kn, work['count'], t, W, work['cos'], work['sin'], layout, kept)
    q_rot, kbuf[:, slot], kn[:, slot], vbuf[:, slot] = plan.ops.rotate(qkv, work['cos'][slot], work['sin'][slot], layout, kept and kept[:3])
    return plan.ops.attend(q_rot, kbuf, vbuf, work['bias'][t, :, None, None], layout, place)


def window_attention_backward(plan: Plan, work: Buffers, keep: Buffers, datt: torch.Tensor, l: int, t: int, g: int, size: int) -> torch.Tensor:
    """The gradient of qkv's row, from that of the attended values. g: the first token of t's group of `size`. dK, dV of the group's slots
    are added to work['dk'], ['dv']; what the others' need is left in weights_of the group and in work['dscores'], ['do']."""
    rq, rk, q_rot, lse, att = at(keep, ATTENTION, l, t, plan.layout[0])
    W, layout, slot, group = plan.W, plan.layout, plan.W + t, slice(plan.W + g, plan.W + g + size)
    kbuf, vbuf, dk, dv, dscores, do = (work[name][l] for name in ('kbuf', 'vbuf', 'dk', 'dv', 'dscores', 'do'))
    weights = weights_of(plan, work, keep, l, t)
    if 'attention' in plan.triton:
        return triton_module().window_attention_backward(datt, att, q_rot, rq, rk, lse, kbuf, vbuf, work['count'], t, g, W, work['cos'],
                                                          work['sin'], layout, dk, dv, weights, dscores, do)
    p, ds, do = mine = [x[:, t - g] for x in (weights, dscores, do)]
    if not plan.keep_p:
        plan.ops.probabilities(q_rot, kbuf, work['bias'][t, :, None, None], p)
    dq = plan.ops.attend_backward(datt, p, kbuf, vbuf, plan.wide, layout, mine[1:])
    add_product(dk[:, group], ds[..., group], q_rot.view_as(do))
    add_product(dv[:, group], p[..., group], do)
    return plan.ops.rotate_backward(dq, dk[:, slot], dv[:, slot], q_rot, kbuf[:, slot], rq, rk, work['cos'][slot], work['sin'][slot], layout)


def experts(plan: Plan, u: torch.Tensor, att: torch.Tensor, coef: torch.Tensor, weights: list[torch.Tensor], keep: list[torch.Tensor] | None) -> torch.Tensor:
    """The rest of a level: output projection, FFN, norm and sum over experts -> the new s (B, D). keep: ry, f, act, rx, h, or None."""
    if 'experts' not in plan.triton:
        return plan.ops.mix(u, att, coef, *weights, keep)
    (wo, up, down), k = weights, triton_module()
    if att.stride(1) != att.size(2):                           # by_expert may give a view; the kernels want whole rows
        att = att.contiguous()
    ry, f, act, rx, h = keep or [None] * 5
    y, squares = k.expert_residual(att, wo, u, False)
    act = k.expert_relu(y, squares, up, keep and (act, f, ry))
    return k.norm_sum(*k.expert_residual(act, down, y, True), coef, keep and (h, rx))


def experts_backward(plan: Plan, ds: torch.Tensor, coef: torch.Tensor, kept: list[torch.Tensor], weights: list[torch.Tensor],
                     keep: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """From the gradient of s (B, D): those of u (B, D) and of the attended values (E, B, H*K). kept: ry, f, act, rx, h; keep: dy, dact, dx."""
    if 'experts_backward' not in plan.triton:
        return plan.ops.mix_backward(ds, coef, *kept, *weights, keep)
    ry, f, act, rx, h = kept
    wo, up, down = weights
    dx = plan.ops.norm_sum_backward(ds, coef, h, rx, keep[2])
    triton_module().expert_relu_backward(keep[2], down, act, keep[1])
    return plan.ops.ffn_backward(dx, keep[1], ry, f, wo, up, keep[0])


def forward_block(plan: Plan, levels: list[list[torch.Tensor]], work: Buffers, keep: Buffers | None, z: torch.Tensor, s: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """z (n, B, D), s (B, D) -> out (n, B, D); returns the last s. The W entries before are in work['kbuf'], ['vbuf']; the block's own
    are left there, and in work['kn']."""
    B, kept, coef = z.size(1), [None] * 2, work['coef']
    for t in range(z.size(0)):
        for l, (a, b, wqkv, *weights) in enumerate(levels):
            if plan.grad:
                kept = [at(keep, names, l, t, B) for names in (('s', 'ru', 'n'), EXPERTS)]
            if plan.router:
                coef = route(s, z[t], *weights[3:], plan.mode, at(keep, ('coef', 'gate', 'c', 'query'), l, t, B) if plan.grad else None)
            u, qkv = plan.ops.enter(s, z[t], a, b, wqkv, kept[0])
            att = window_attention(plan, work, keep, qkv, l, t)
            s = experts(plan, u, att, coef, weights[:3], kept[1])
        out[t] = s
    return s


def backward_block(plan: Plan, levels: list[list[torch.Tensor]], work: Buffers, keep: Buffers, z: torch.Tensor, dout: torch.Tensor,
                   ds: torch.Tensor, dz: torch.Tensor, first: int) -> torch.Tensor:
    """Writes dz and returns the gradient of the s before the block. work['kbuf'], ['vbuf'] hold the W entries before and the block's own;
    work['dk'], ['dv'] later blocks' gradients where it starts, and where it ends those of slots from `first` on."""
    W, B, n, coef = plan.W, z.size(1), z.size(0), work['coef']
    dz.zero_()
    for g in reversed(range(0, n, GROUP)):                     # a group of tokens
        size = min(GROUP, n - g)
        for t in reversed(range(g, g + size)):
            ds = ds + dout[t]
            for l in reversed(range(plan.L)):
                a, b, wqkv, *weights = levels[l]
                kept = at(keep, EXPERTS, l, t, B)
                if plan.router:
                    coef, gate, query = at(keep, ('coef', 'gate', 'query'), l, t, B)
                    dz_router, ds_router = route_backward(ds, kept[-1], gate, query, weights[3], weights[5], plan.mode,
                                                          at(work, ('dgate', 'dquery'), l, t, B))
                du, datt = experts_backward(plan, ds, coef, kept, weights[:3], at(work, ('dy', 'dact', 'dx'), l, t, B))
                dqkv = window_attention_backward(plan, work, keep, datt, l, t, g, size)
                ds, dz_t = plan.ops.enter_backward(du, dqkv, *at(keep, ('s', 'ru', 'n'), l, t, B), z[t], a, b, wqkv,
                                                   at(work, ('du', 'dqkv'), l, t, B))
                if plan.router:
                    ds, dz_t = ds + ds_router, dz_t + dz_router
                dz[t] += dz_t
        before = slice(max(first, g + 1), W + g)               # slots of the group's windows before the group
        if before.start < before.stop:
            for l in range(plan.L):
                flush(work, weights_of(plan, work, keep, l, g), keep['q_rot'][l, g:g + size], l, before)
    return ds


def flush(work: Buffers, p: torch.Tensor, q_rot: torch.Tensor, l: int, before: slice) -> None:
    """A group's share of dK and dV of the slots before it, by one product each. p: weights_of the group; q_rot (F, B, C, M, K)."""
    F, B, C, M, K = q_rot.shape
    p, ds, do = (x[:, :F].reshape(B * C, F * M, -1) for x in (p, work['dscores'][l], work['do'][l]))
    add_product(work['dk'][l, :, before], ds[..., before], q_rot.view(F, B * C, M, K).transpose(0, 1).reshape(B * C, F * M, K))
    add_product(work['dv'][l, :, before], p[..., before], do)


# ---- Triton or not: measured, for the sizes at hand ----

TRITON = ('attention', 'experts', 'experts_backward')


@torch.no_grad()                                               # as a Function's forward: torch.compile would make other graphs
def trials(plan: Plan, n: int) -> dict:
    """{name: function(triton)} of the last token of a block of n at one level, windows full, on made-up numbers: by Triton kernels or by
    plan.ops; with what belongs to the backward where the plan has gradients. They return all that such a token leaves behind, as views
    of memory that the next call writes over."""
    plan = plan._replace(L=1, router=0, keep_p=False)
    (B, E, G, R, K, _), (C, M, _), t = plan.layout, heads(plan.layout), n - 1
    work, keep, D, g = workspace(plan, n), Buffers(plan, shapes(plan, n)[0]) if plan.grad else {}, G * R * K, t // GROUP * GROUP
    random_numbers = torch.Generator(plan.device).manual_seed(0)           # the training's own go on as if nothing had been measured

    def random(*shape, dtype=plan.dt, scale=1.0):
        return (torch.randn(shape, device=plan.device, generator=random_numbers) * scale).to(dtype)
    load_caches(plan, n, work, *(random(1, B * C, plan.W + n, K) for _ in range(2)), torch.full_like(work['count'], plan.W))
    qkv, att, ds, u = random(B, (C * M + 2 * C) * K), random(E, B, D), random(B, D, dtype=plan.wide), random(B, D, dtype=plan.wide)
    weights = [random(E, *shape, scale=shape[1]**-0.5) for shape in ((D, D), (4 * D, D), (D, 4 * D))]
    attention_keep, experts_keep, grads = (at(memory, names, 0, t, B) if plan.grad else None for memory, names in
                                           ((keep, ATTENTION), (keep, EXPERTS), (work, ('dy', 'dact', 'dx'))))
    own, before = slice(plan.W + g, plan.W + n), slice(g + 1, plan.W + g)  # the group's slots; those of its windows that flush adds to
    plans = {triton: plan._replace(triton=frozenset(TRITON if triton else ())) for triton in (True, False)}

    def attention(triton):
        out = [window_attention(plans[triton], work, keep, qkv, 0, t)]
        out += [work[name][0, :, plan.W + t] for name in ('kbuf', 'vbuf', 'kn')]
        if not plan.grad:
            return out
        for name in ('dk', 'dv'):
            work[name][:, :, own].zero_()
        dqkv = window_attention_backward(plans[triton], work, keep, att, 0, t, g, n - g)
        later = [x[:, t - g, :, before] for x in (work['p'][0, 0], work['dscores'][0])] if before.start < before.stop else []
        return *out, *attention_keep[:3], dqkv, *later, work['do'][0, :, t - g], *(work[name][0, :, own] for name in ('dk', 'dv'))

    def forward(triton):
        return experts(plans[triton], u, att, work['coef'], weights, experts_keep), *(experts_keep or ())

    def backward(triton):
        return *experts_backward(plans[triton], ds, work['coef'], experts_keep, weights, grads), *grads
    forward(False)                                             # what the backward reads
    return {'attention': attention, 'experts': forward} | ({'experts_backward': backward} if plan.grad else {})


def trial_cost(plan: Plan, n: int) -> dict:
    """{name: (FLOPs of products, bytes)} of each trial with gradients: what must be read and written once at least,
    nothing between its pieces."""
    (B, E, G, R, K, _), (C, M, _), W = plan.layout, heads(plan.layout), plan.W
    size, wide, D = plan.dt.itemsize, plan.wide.itemsize, G * R * K
    rows, window, weights, own = E * B * D, B * C * M * W, 9 * E * D * D, n - (n - 1) // GROUP * GROUP
    cache = 2 * B * C * W * K * size
    # attention: keys and values twice, queries, outputs and their gradients in and out, p and ds; dk, dv of the group read and written
    return {'attention': (2 * 5 * window * K, 2 * cache + 8 * rows * size + 2 * window * size + 4 * B * C * own * K * wide),
            'experts': (2 * B * weights, (weights + 7 * rows) * size + 2 * B * D * wide),               # att, f, act, h
            'experts_backward': (2 * B * weights, (weights + 13 * rows) * size + 2 * B * D * wide)}     # f, act, h, dx, dact, dy, datt


@torch.autocast('cuda', enabled=False)                         # as in the loop
def choose(plan: Plan, n: int) -> frozenset:
    """The Triton kernels that beat the compiled twins of this plan's pieces here, and agree with them. CUDA only; measured once a plan, by
    CUDA graphs: so not while another is captured, where what was not measured before stays compiled."""
    if plan.device.type != 'cuda' or plan.wide != torch.float32 or triton_module() is None:
        return frozenset()
    plan = plan._replace(L=1, router=0, graphs=False, keep_p=False, triton=None)     # None: no chunk's own plan, so its memory may go
    if (plan, n) not in chosen:
        if torch.cuda.is_current_stream_capturing():
            return frozenset()
        try:
            chosen[plan, n] = {name: compare(run) for name, run in trials(plan, n).items()}
        finally:
            _work.pop((plan, n), None)
            torch.cuda.empty_cache()
    return frozenset(name for name, found in chosen[plan, n].items() if wins(found))


class Unroll(torch.autograd.Function):
    """T tokens through L levels. Inputs: plan, z (T, B, D), the carried state, then 6 weights a level (9 with a router), in the
    master dtype. Outputs: s[L] of each token (T, B, D) and the new k, v; only the first is differentiable."""

    @staticmethod
    def forward(ctx, plan, z, s, k, v, count, *weights):
        plan = plan._replace(grad=plan.grad and any(ctx.needs_input_grad))    # the latter alone is true of parameters under no_grad too
        (T, B, _), (L, _, C, W, K) = z.shape, k.shape
        levels = cast(plan, weights)
        k_all, v_all = (torch.empty(L, B * C, W + T, K, dtype=plan.dt, device=z.device) for _ in range(2))   # keys not rotated
        k_all[:, :, :W], v_all[:, :, :W] = k.view(L, B * C, W, K), v.view(L, B * C, W, K)
        out, kept, spans = torch.empty_like(z), [], blocks(T)
        for t, n in spans:
            work, keep = workspace(plan, n), take_buffers(plan, n) if plan.grad else None
            load_caches(plan, n, work, k_all[:, :, t:t + W], v_all[:, :, t:t + W], count + t)
            s = run_forward(plan, levels, n, work, keep, z[t:t + n], s, out[t:t + n], len(spans) == 1)
            k_all[:, :, t + W:t + W + n], v_all[:, :, t + W:t + W + n] = work['kn'][:, :, W:], work['vbuf'][:, :, W:]
            kept.append(keep)
        if plan.grad:
            ctx.save_for_backward(z, count, *weights)
            ctx.chunk = plan, None if plan.graphs else levels, k_all, v_all, kept
        new_k, new_v = (x[:, :, T:].clone().view(L, B, C, W, K) for x in (k_all, v_all))     # the backward reads k_all, v_all
        ctx.mark_non_differentiable(new_k, new_v)
        return out, new_k, new_v

    @staticmethod
    def backward(ctx, dout, _dk, _dv):
        z, count, *weights = ctx.saved_tensors
        if ctx.chunk is None:
            raise RuntimeError('Unroll: its buffers are used up by the first backward; a second one needs a new forward')
        plan, levels, k_all, v_all, kept = ctx.chunk
        ctx.chunk, levels = None, levels or cast(plan, weights)              # a graph's weights may have been another model's since
        W, spans = plan.W, blocks(len(z))
        dz, ds, grads = torch.empty_like(z), torch.zeros_like(z[0]), None
        # of all the chunk's slots, keys not rotated; one block needs only its own
        dk_all, dv_all = (torch.zeros(x.shape, dtype=plan.wide, device=z.device) for x in (k_all, v_all)) if len(spans) > 1 else (None, None)
        for (t, n), keep in zip(reversed(spans), reversed(kept), strict=True):
            work, mine = workspace(plan, n), slice(t, t + W + n)
            load_caches(plan, n, work, k_all[:, :, mine], v_all[:, :, mine], count + t)
            carry_gradients(work, dk_all, dv_all, t, n, W)
            ds = run_backward(plan, levels, n, work, keep, z[t:t + n], dout[t:t + n], ds, dz[t:t + n], len(spans) == 1)
            if t > 0:
                dk_all[:, :, t:t + W] += apply_rope(work['dk'][:, :, :W], work['cos'][:W], -work['sin'][:W])
                dv_all[:, :, t:t + W] += work['dv'][:, :, :W]
            grads = weight_gradients(plan, work, keep, z[t:t + n], grads)
            _free.setdefault((plan, n), []).append(keep)
        return None, dz, None, None, None, None, *grads


def carry_gradients(work: Buffers, dk_all: torch.Tensor | None, dv_all: torch.Tensor | None, t: int, n: int, W: int) -> None:
    """dK and dV of a block's slots before its backward: what later blocks gave to its own n tokens, keys rotated by slot."""
    for name, x in (('dk', dk_all), ('dv', dv_all)):
        work[name].zero_()
        if x is not None:
            own = x[:, :, t + W:t + W + n]
            work[name][:, :, W:] = apply_rope(own, work['cos'][W:], work['sin'][W:]) if name == 'dk' else own


def blocks(T: int) -> list[tuple[int, int]]:
    """(first token, tokens) of each block of a chunk."""
    return [(t, min(BLOCK, T - t)) for t in range(0, T, BLOCK)]


def cast(plan: Plan, weights: tuple[torch.Tensor, ...] | list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """The weights of each level, a and b as they are, matrices in the dtype of products; for graphs always in the same memory."""
    if plan.graphs:
        names = plan.device, plan.dt, tuple(w.shape for w in weights)      # filled before every use: chunks of other shapes share them
        if names not in _work:
            with torch.inference_mode(False):                  # they outlive the mode they are made in
                _work[names] = [torch.empty_like(w, dtype=plan.wide if w.dim() == 0 else plan.dt) for w in weights]
        for fixed, w in zip(_work[names], weights, strict=True):
            fixed.copy_(w)
        weights = _work[names]
    per_level = len(weights) // plan.L
    return [[w if w.dim() == 0 else w.to(plan.dt) for w in weights[l:l + per_level]] for l in range(0, len(weights), per_level)]


# A captured block reads and writes fixed memory. What the forward keeps is that memory itself where a chunk is one block, and is copied
# out of it and back where it is many: then one graph serves all. Elsewhere the block just runs.

def run_forward(plan: Plan, levels: list[list[torch.Tensor]], n: int, work: Buffers, keep: Buffers | None, z: torch.Tensor,
                s: torch.Tensor, out: torch.Tensor, alone: bool) -> torch.Tensor:
    if not plan.graphs:
        return forward_block(plan, levels, work, keep, z, s, out)
    fixed = graph_memory(plan, n, 'arguments')
    mine = keep if alone or not plan.grad else graph_memory(plan, n, 'kept')
    copy_all(fixed, {'z': z, 's': s})
    s = graphed((mine or work).graphs, 'forward', forward_block, plan, levels, work, mine, fixed['z'], fixed['s'], fixed['out'])
    out.copy_(fixed['out'])
    if mine is not keep:
        copy_all(keep, mine)
    return s


def run_backward(plan: Plan, levels: list[list[torch.Tensor]], n: int, work: Buffers, keep: Buffers, z: torch.Tensor, dout: torch.Tensor,
                 ds: torch.Tensor, dz: torch.Tensor, alone: bool) -> torch.Tensor:
    first = plan.W if alone else 0
    if not plan.graphs:
        return backward_block(plan, levels, work, keep, z, dout, ds, dz, first)
    fixed = graph_memory(plan, n, 'arguments')
    mine = keep if alone else graph_memory(plan, n, 'kept')
    if mine is not keep:
        copy_all(mine, keep)
    copy_all(fixed, {'z': z, 'out': dout, 's': ds})
    ds = graphed(mine.graphs, 'backward', backward_block, plan, levels, work, mine, fixed['z'], fixed['out'], fixed['s'], fixed['dz'], first)
    dz.copy_(fixed['dz'])
    return ds


def copy_all(to: dict, source: dict) -> None:
    for name, x in source.items():
        to[name].copy_(x)


@torch.inference_mode(False)
def graph_memory(plan: Plan, n: int, what: str) -> Buffers:
    """A graph's 'arguments', or what a block of a long chunk 'kept'."""
    if (plan, n, what) not in _work:
        B, E, G, R, K, _ = plan.layout
        sizes = {'z': (n, B, G * R * K), 'out': (n, B, G * R * K), 'dz': (n, B, G * R * K), 's': (B, G * R * K)}
        arguments = {name: (*size, plan.wide) for name, size in sizes.items()}
        _work[plan, n, what] = Buffers(plan, arguments if what == 'arguments' else shapes(plan, n)[0])
    return _work[plan, n, what]


def weight_gradients(plan: Plan, work: Buffers, keep: Buffers, z: torch.Tensor, sums: list[torch.Tensor] | None) -> list[torch.Tensor]:
    """All weights' gradients in the master dtype, in their order: one product over a block's n*B rows each, added to sums."""
    def over_rows(g, x):                                       # (..., n*B, O), (..., n*B, I) -> (..., O, I)
        return product(g.transpose(-1, -2), x, plan.wide)
    grads = []
    for l in range(plan.L):
        du, dqkv, dy, dact, dx = (work[name][l] for name in ('du', 'dqkv', 'dy', 'dact', 'dx'))
        grads += [(du * keep['s'][l]).sum(), (du * z.flatten(0, 1)).sum(), over_rows(dqkv, keep['n'][l]), over_rows(dy, keep['att'][l]),
                  over_rows(dact, keep['f'][l]), over_rows(dx, keep['act'][l].square_())]
        if plan.router:
            dgate, dquery = work['dgate'][l], work['dquery'][l]
            grads += [over_rows(dquery, keep['c'][l]), dquery.sum(0).to(plan.wide), over_rows(dgate, keep['query'][l])]
    return grads if sums is None else [x.add_(y) for x, y in zip(sums, grads, strict=True)]


def can_capture(x: torch.Tensor) -> bool:
    return x.is_cuda and not torch.cuda.is_current_stream_capturing()      # inside a capture a block becomes a part of that graph


def unroll(z: torch.Tensor, s: torch.Tensor, k: torch.Tensor, v: torch.Tensor, count: torch.Tensor, levels: list[dict[str, torch.Tensor]],
           aggregation: str, share_kv: bool, compile: bool = False,
           graphs: bool = False) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Run a chunk of the recurrent model. z (T, B, D); the state (s, k, v, count) of model.State, not differentiated;
    levels: model.level_weights of each level. Returns s[L] of each token (T, B, D) and the new state's four tensors."""
    (T, B, _), (L, _, C, W, K) = z.shape, k.shape
    dt = compute_dtype(z)
    E, HK = levels[0]['wo'].size(0), levels[0]['wo'].size(2)
    M = E * HK // (C * K)
    G, R = (C, M // E) if share_kv else (C // E, M)
    weights = [w for level in levels for w in level.values()]
    router = levels[0]['router_q'].size(0) if 'router_q' in levels[0] else 0
    kept = L * B * C * M * sum(n * (W + n) for _, n in blocks(T)) * dt.itemsize
    plan = Plan((B, E, G, R, K, share_kv), L, W, aggregation, router, dt, s.dtype, z.device, frozenset(), torch.is_grad_enabled(),
                False, Ops(*map(compiled, EAGER)) if compile else EAGER, not z.is_cuda and kept <= KEPT_WEIGHTS)
    if compile:
        plan = plan._replace(triton=choose(plan, min(T, BLOCK)), graphs=graphs and can_capture(z))
    with torch.autocast(z.device.type, enabled=False), torch.cuda.device_of(z):              # dtypes are ours from here on
        out, new_k, new_v = Unroll.apply(plan, z, s, k.contiguous(), v.contiguous(), count, *weights)
    return out, (out[-1].detach().clone(), new_k, new_v, (count + T).clamp(max=W))

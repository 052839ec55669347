"""
The fast unroll of the recurrent model. It knows no equation: a level is model.py's, called
token by token, and autograd differentiates it. A general nonlinear recurrence cannot be scanned,
but much can leave the loop:
  - `Product`, W x: its backward gives x its gradient at once and puts W's off: what was multiplied
    and the result's gradients are noted, and a block's tokens give one product, in fp32 (more
    accurate in bf16, too);
  - `Window`, a level's keys and values in their slots: the backward adds dK and dV in place, those
    of earlier slots by one product a group of tokens. The W carried keys are rotated by slots
    0..W-1, token t's by slot W + t: scores depend on differences of slots only. Attention reads a
    block's W + BLOCK slots;
  - compiled, what stands between products is one kernel each way;
  - `Again`, where a chunk's intermediates would take too much, and on CUDA (path 'graphed'): blocks
    keep nothing but their inputs, and run forward again before their backward, from fixed memory;
    on CUDA these are two graphs that every block of every chunk replays. Nothing is cut between
    blocks.

Shape letters as in model.py; N = B * C cache heads of all streams, S = W + T slots. `dt` is the
dtype of products, `wide` of everything else.
"""

import collections
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import apply_rope, by_cache_head, by_expert, by_triton, compiled, graphed, linear
from kernels import made_up, outputs, product, rope_table, triton_module, window_mask

BLOCK = 64  # tokens
# a CPU multiplies the rows of CPU_BYTES / itemsize tokens at once, 16 in fp32 and 32 in bf16: fewer
# take less memory and more products, whose sum costs bf16 more
CPU_BYTES = 64
GROUP = 8  # tokens whose dK, dV of slots before them are added by one product, not one a token
ADDED = 16  # tokens whose gradients of a level's vectors are added in one pass
# bytes of a chunk's attention weights that a CPU keeps for the backward; beyond, blocks run again
KEPT_WEIGHTS = 2**30


class Recipe(NamedTuple):
    """What the model says of itself, and how it is to run."""

    token: Callable  # token(ws, s, z, attends, rules) -> the next s: all levels
    rules: NamedTuple  # with .heads: kernels.Heads, .aggregation
    dt: torch.dtype
    wide: torch.dtype
    compile: bool
    graphs: bool
    pdl: bool = False  # programmatic dependent launch of what is compiled

    def piece(self, f: Callable) -> Callable:
        if not self.compile:
            return f
        return compiled(f, pdl=True) if self.pdl else compiled(f)


# ---- products ----


@functools.cache
def cast(f: Callable, dt: torch.dtype) -> Callable:
    """f, its last result in dt."""

    def run(*args, **static):
        *rest, x = outputs(f(*args, **static))
        return (*rest, x.to(dt))

    return run


_free: dict[tuple, list[Tensor]] = collections.defaultdict(list)  # rows by shape and dtype


def take(like: Tensor, rows: int) -> Tensor:
    """Memory for `rows` rows like those of `like`. A CPU's is kept from chunk to chunk: fresh
    memory costs a page fault every 4 KiB."""
    shape = torch.Size((*like.shape[:-2], rows, like.size(-1)))
    kept = None if like.is_cuda else _free[shape, like.dtype]
    return kept.pop() if kept else like.new_empty(shape)


def give(x: Tensor) -> None:
    if not x.is_cuda:
        _free[x.shape, x.dtype].append(x)


class Product:
    """y = W x, the gradient of W put off. Called as the equations want it: product(f, *args)
    multiplies the last result of f and returns the others before it; product(x) multiplies x."""

    def __init__(self, w: Tensor, recipe: Recipe, n: int):
        """n: uses whose rows are multiplied at once."""
        self.recipe, self.w, self.n, self.total = recipe, w.detach().to(recipe.dt), n, None
        self.uses, self.rows, self.count = [], None, 0  # the last; those before, side by side
        self.keep = torch.is_grad_enabled() and w.requires_grad

    def __call__(self, f: Callable | Tensor, *args: Tensor, **static: object):
        if callable(f):
            *rest, x = self.recipe.piece(cast(f, self.recipe.dt))(*args, **static)
        else:
            rest, x = (), f.to(self.recipe.dt)
        y = linear(x, self.w)
        if self.keep:
            y.register_hook(functools.partial(self.note, [x.detach()]))
        return (*rest, y) if rest else y

    def note(self, held: list[Tensor], g: Tensor) -> None:
        """A use: [x] was multiplied and is let go, g is the result's gradient. What nothing depends
        on is never noted."""
        if not held:
            raise RuntimeError('a second backward needs a new forward')
        self.uses.append((held.pop(), g))
        if len(self.uses) == min(GROUP, self.n - self.count):
            self.gather()

    def gather(self, last: bool = False) -> None:
        """The last uses beside those before; n, or at last what there is, are multiplied."""
        if self.uses:
            some, m = list(zip(*self.uses, strict=True)), self.uses[0][0].size(-2)
            if self.rows is None:
                self.rows = [take(x[0], self.n * m) for x in some]
            for rows, x in zip(self.rows, some, strict=True):
                torch.cat(x, -2, out=rows.narrow(-2, self.count * m, len(x) * m))
            self.count += len(self.uses)
            self.uses.clear()
        if self.count == self.n or (last and self.count):
            part = self.count * (self.rows[0].size(-2) // self.n)
            x, g = (rows.narrow(-2, 0, part) for rows in self.rows)
            self.total = product(g.mT, x, self.recipe.wide, self.total)
            for rows in self.rows:
                give(rows)
            self.rows, self.count = None, 0

    def flush(self) -> Tensor:
        """W's gradient, of all uses noted since the last time."""
        self.gather(last=True)
        total, self.total = self.total, None
        return torch.zeros_like(self.w, dtype=self.recipe.wide) if total is None else total


class Start(torch.autograd.Function):
    """z and s before all tokens of a chunk: when the backward comes here, all uses of its weights
    are noted."""

    @staticmethod
    def forward(ctx, products, z, s, *weights):
        ctx.products = products
        return z.view_as(z), s.view_as(s)

    @staticmethod
    def backward(ctx, dz, ds):
        return None, dz, ds, *(one.flush() for one in ctx.products)


def bind(weights: dict, recipe: Recipe, like: Tensor, n: int, triton: frozenset) -> dict:
    """A level's weights for the equations; like (B, D), n tokens of a block. Vectors are rows, one
    a stream: their gradients add up as rows, and are reduced once."""
    w = {'piece': lambda f, *args, **static: recipe.piece(f)(*args, **static)}
    for name, x in weights.items():
        rows = like.shape if x.dim() == 0 else (len(like), -1)
        w[name] = Product(x, recipe, n) if x.dim() > 1 else x.expand(rows)
    if 'experts' in triton:
        E = len(weights['wo'])
        w['leave'] = triton_module().leave_of(recipe.rules.aggregation, E, like, triton)
    return w


def by_token(w: dict, n: int) -> list[dict]:
    """A level's weights for n tokens: their gradients of vectors are added up in one pass."""
    vectors = ((name, x) for name, x in w.items() if isinstance(x, Tensor))
    rows = {name: x.expand(n, *x.shape).unbind(0) for name, x in vectors}
    return [w | {name: x[i] for name, x in rows.items()} for i in range(n)]


# ---- attention ----


class Run:
    """What the levels of a run share: T tokens after W carried entries, `count` (B,) of these
    filled. Slots from `first` on have a gradient. triton: the kernels chosen."""

    def __init__(self, recipe: Recipe, count: Tensor, sizes: tuple, triton: frozenset):
        self.recipe, self.count = recipe._replace(pdl='pdl' in triton), count
        self.triton, self.heads = triton, recipe.rules.heads
        self.T, self.W, self.first = sizes
        like = torch.empty((), dtype=recipe.wide, device=count.device)
        self.rope = rope_table(self.W + self.T, self.heads.K, like)  # (S, K)
        scale = 1 / math.sqrt(self.heads.K)
        rows = (x[self.W :].unbind(0) for x in (*self.rope, *(x * scale for x in self.rope)))
        self.angles = list(zip(*rows, strict=True))  # of tokens: for keys, and with scores' scale
        self.bias = []

    def start(self, t: int) -> None:
        """The block that begins with token t: its tokens t + i see slots i+1 .. i+W of its own, if
        filled."""
        seen = window_mask(self.count + t, min(BLOCK, self.T - t), self.W).movedim(2, 0)
        bias = torch.zeros(seen.shape, dtype=self.recipe.wide, device=seen.device)
        self.bias = bias.masked_fill_(~seen, -math.inf).unbind(0)  # n of (B, 1, W + n)


@functools.cache
def turned(f: Callable) -> Callable:
    """f, the model's queries, key and value of a token, as a window takes them. slots: for the
    rotated key, the key as the cache keeps it and the value. Returns rotated queries, scaled, in
    the slots' dtype, and rotated key and value."""

    def run(slots, cos, sin, q_cos, q_sin, *args, **static):
        q, k, v = f(*args, **static)
        dt = slots[0].dtype
        kept = k.to(dt)
        k, v = apply_rope(kept, cos, sin), v.to(cos.dtype)
        for slot, x in zip(slots, (k, kept, v), strict=True):
            slot.copy_(x.detach().reshape(slot.shape))
        return apply_rope(q, q_cos, q_sin).to(dt), k, v

    return run


def probabilities(scores: Tensor, bias: Tensor) -> Tensor:
    """Attention weights (N, M, S) of scores; bias (B, 1, S): -inf in slots not seen."""
    wide = scores.to(bias.dtype).view(bias.size(0), -1, scores.size(-1)) + bias
    return F.softmax(wide, -1).to(scores.dtype).view(scores.shape)


def scores_back(dp: Tensor, p: Tensor, wide: torch.dtype) -> Tensor:
    """The gradient of scores, from that of their softmax p."""
    ds = torch._softmax_backward_data(dp.to(wide), p.to(wide), -1, wide)
    return ds.to(p.dtype)


class Window:
    """A level's keys and values, buffers (N, S, K): the model's `attend`."""

    def __init__(self, run: Run, k: Tensor, v: Tensor):
        """k, v (N, W, K): the carried entries, keys not rotated."""
        (N, W, K), T, self.run, self.t = k.shape, run.T, run, 0
        # slots to come must be finite
        self.k, self.v, self.kn = (k.new_zeros(N, W + T, K, dtype=run.recipe.dt) for _ in range(3))
        self.kn[:, :W], self.v[:, :W] = k, v
        self.k[:, :W] = apply_rope(self.kn[:, :W], *(x[:W] for x in run.rope))
        blocks = (slice(t, W + min(t + BLOCK, T)) for t in range(0, T, BLOCK))
        self.blocks = [(self.k[:, block], self.v[:, block]) for block in blocks]
        own = (x[:, W:].unbind(1) for x in (self.k, self.kn, self.v))
        self.own = list(zip(*own, strict=True))
        # in the backward: its last token, gradients of the slots, those of the own slots from later
        # runs, and what is to be added for slots before the group
        self.last, self.dk, self.dv, self.given, self.later = 0, None, None, None, []

    def __call__(self, f: Callable, *args: Tensor, **static: object) -> Tensor:
        """The next token's key and value into their slots; its queries' attended values (E, B,
        H*K)."""
        t, self.t = self.t, self.t + 1
        if 'attention' in self.run.triton:
            return AttendByTriton.apply(self, t, *args)
        made = self.run.recipe.piece(turned(f))
        return Attend.apply(self, t, *made(self.own[t], *self.run.angles[t], *args, **static))

    def group(self, t: int) -> tuple[int, int, int]:
        """First token of t's block, first and last + 1 of its group."""
        start = t - t % BLOCK
        g = t - (t - start) % GROUP
        return start, g, min(g + GROUP, start + BLOCK, self.run.T)

    def start_back(self, t: int) -> None:
        """Token t's backward begins: no gradients yet, where it is the first."""
        if t >= self.last:
            wide = self.run.recipe.wide
            self.dk, self.dv = torch.zeros(2, *self.k.shape, dtype=wide, device=self.k.device)
            if self.given is not None:
                own = self.run.W
                self.dk[:, own:] = apply_rope(self.given[0], *(x[own:] for x in self.run.rope))
                self.dv[:, own:] = self.given[1]
        self.last = t

    def add(self, slots: slice, start: int, rows: tuple) -> None:
        """To the gradients of these slots. rows (N, tokens * M, .): queries, weights and gradients
        of scores (of the slots from `start` on), gradients of attended values. (baddbmm_ into a
        slice would go through the batch one by one.)"""
        q, p, ds, do = rows
        columns = slice(slots.start - start, slots.stop - start)
        self.dk[:, slots].add_(torch.bmm(ds[..., columns].mT, q))
        self.dv[:, slots].add_(torch.bmm(p[..., columns].mT, do))

    def add_before(self, t: int, start: int, rows: tuple) -> None:
        """To slots before the group that begins with t. Slot t is seen by no token of it, its
        weights are zero, and products begin aligned."""
        first = max(self.run.first, t)
        if first < self.run.W + t:
            self.add(slice(first, self.run.W + t), start, rows)


class Attend(torch.autograd.Function):
    """Token t's attention over its window. q (B, C*M, K), k, v (B, C, K), as `turned` gives
    them."""

    @staticmethod
    def forward(ctx, window, t, q, k, v):
        run, (keys, values) = window.run, window.blocks[t // BLOCK]
        q = q.reshape(len(keys), -1, keys.size(2))
        scores = torch.bmm(q, keys.transpose(1, 2))
        p = run.recipe.piece(probabilities)(scores, run.bias[t % BLOCK])
        ctx.window, ctx.t = window, t
        ctx.save_for_backward(q, p)
        return by_expert(torch.bmm(p, values), run.heads)

    @staticmethod
    def backward(ctx, datt):
        window, t, (q, p) = ctx.window, ctx.t, ctx.saved_tensors
        run, (keys, values) = window.run, window.blocks[t // BLOCK]
        window.start_back(t)
        do = by_cache_head(datt, run.heads)
        dp = torch.bmm(do, values.transpose(1, 2))
        ds = run.recipe.piece(scores_back)(dp, p, run.recipe.wide)
        start, g, end = window.group(t)
        rows, slot = (q, p, ds, do), run.W + t
        window.add(slice(run.W + g, run.W + end), start, rows)
        window.later.append(rows)
        if t == g:
            every = zip(*window.later, strict=True)
            window.add_before(t, start, tuple(torch.cat(rows, 1) for rows in every))
            window.later.clear()
        B, h = len(run.count), run.heads
        dk, dv = (x[:, slot].view(B, h.C, h.K) for x in (window.dk, window.dv))
        return None, None, torch.bmm(ds, keys).view(B, -1, h.K), dk, dv


class AttendByTriton(torch.autograd.Function):
    """The same from the row that the model's `heads` takes, qkv (B, (C*M + 2*C) * K), by Triton
    kernels."""

    @staticmethod
    def forward(ctx, window, t, qkv):
        run, h, (N, _, K) = window.run, window.run.heads, window.k.shape
        wide = functools.partial(qkv.new_empty, dtype=run.recipe.wide)
        out, q = qkv.new_empty(h.E, len(qkv), h.G * h.R * K), qkv.new_empty(N, h.M, K)
        # the norms' factors and the log-sum-exp
        rq, rk, lse = wide(N, h.M), wide(N), wide(N, h.M)
        memory = window.k, window.v, window.kn, run.count, *run.rope
        keep = rq, rk, q, lse
        triton_module().window_attention(qkv, memory, (t, run.W), h, out, keep, run.triton)
        ctx.window, ctx.t = window, t
        ctx.save_for_backward(out, q, rq, rk, lse)
        return out

    @staticmethod
    def backward(ctx, datt):
        window, t, (out, q, rq, rk, lse) = ctx.window, ctx.t, ctx.saved_tensors
        run, (N, S, K), M = window.run, window.k.shape, q.size(1)
        window.start_back(t)
        _, g, end = window.group(t)
        if not window.later:  # a group's weights, scores' and outputs' gradients
            sizes = (N, GROUP, M, S), (N, GROUP, M, S), (N, GROUP, M, K)
            window.later = [[q.new_empty(size) for size in sizes], []]
        sums, queries = window.later
        queries.insert(0, q)
        memory = window.k, window.v, run.count, *run.rope
        kept, at = (out, q, rq, rk, lse), (t, g, run.W)
        dqkv = triton_module().window_attention_backward(
            datt.contiguous(),
            kept,
            memory,
            at,
            run.heads,
            (window.dk, window.dv, *sums),
            run.triton,
        )
        if t == g:
            p, ds, do = (x[:, : end - g].flatten(1, 2) for x in sums)
            window.add_before(t, 0, (torch.cat(queries, 1), p, ds, do))
            window.later = []
        return None, None, dqkv


# ---- the chunk ----


def run_chunk(
    run: Run, weights: list[dict], z: Tensor, s: Tensor, entries: tuple
) -> tuple[Tensor, list[Window]]:
    """z (T, B, D), s (B, D), entries k and v (L, N, W, K) -> s of each token (T, B, D), the
    windows."""
    n = min(run.T, BLOCK if z.is_cuda else CPU_BYTES // run.recipe.dt.itemsize)
    ws = [bind(w, run.recipe, s, n, run.triton) for w in weights]
    windows, out = [Window(run, *x) for x in zip(*entries, strict=True)], []
    if torch.is_grad_enabled():
        levels = zip(ws, weights, strict=True)
        pairs = [(one[name], x) for one, w in levels for name, x in w.items()]
        put_off = [(one, x) for one, x in pairs if isinstance(one, Product) and one.keep]
        z, s = Start.apply([one for one, _ in put_off], z, s, *(x for _, x in put_off))
    for t, z_t in enumerate(z.unbind(0)):
        if t % BLOCK == 0:
            run.start(t)
        if t % ADDED == 0:
            every = zip(*(by_token(w, min(ADDED, run.T - t)) for w in ws), strict=True)
        s = run.recipe.token(next(every), s, z_t, windows, run.recipe.rules)
        out.append(s)
    return torch.stack(out), windows


def unroll(z: Tensor, state: tuple, weights: list[dict], recipe: Recipe) -> tuple[Tensor, tuple]:
    """Run a chunk of the recurrent model. z (T, B, D); state (s, k, v, count) as model.State, not
    differentiated; weights: model.Level.weights of each level. Returns s[L] of each token (T, B, D)
    and the new state's four tensors."""
    (s, k, v, count), (T, B, D), (L, _, C, W, K) = state, z.shape, state[1].shape
    n, grad = min(T, BLOCK), torch.is_grad_enabled()
    entries = [x.reshape(L, B * C, W, K) for x in (k, v)]
    kept = L * B * C * recipe.rules.heads.M * T * (W + n) * recipe.dt.itemsize
    again = can_capture(z) if recipe.graphs else grad and not z.is_cuda and kept > KEPT_WEIGHTS
    with torch.cuda.device_of(z):
        triton = choose(recipe, weights[0], (B, D, W, n))
        if again:
            how = recipe, (B, D, W), triton, tuple(tuple(w) for w in weights)
            made = functools.partial(blocks_of, how)
            every = [x for w in weights for x in w.values()]
            out, *entries = Again.apply(made, z, s, *entries, count, *every)
        else:
            out, windows = run_chunk(Run(recipe, count, (T, W, W), triton), weights, z, s, entries)
            entries = [torch.stack([getattr(w, x)[:, T:] for w in windows]) for x in ('kn', 'v')]
    k, v = (x.view(k.shape) for x in entries)
    return out, (out[-1].detach().clone(), k, v, (count + T).clamp(max=W))


# ---- a block's forward again before its backward, from fixed memory ----

_blocks: dict[tuple, 'Block'] = {}


def release() -> None:
    """Gives the memory back that is kept from chunk to chunk."""
    _blocks.clear()
    _free.clear()


def blocks_of(how: tuple, T: int, every: list[Tensor]) -> list[tuple[int, 'Block']]:
    """A chunk's blocks, with the tokens they begin with. every: its weights, which they get; how:
    see Block."""
    spans = [(t, min(BLOCK, T - t)) for t in range(0, T, BLOCK)]
    key = how, every[0].device, *((x.shape, x.dtype) for x in every)
    for n in {n for _, n in spans}:
        if (key, n) not in _blocks:
            _blocks[key, n] = Block(how, n, every)
        _blocks[key, n].load(every)
    return [(t, _blocks[key, n]) for t, n in spans]


def can_capture(x: Tensor) -> bool:
    # inside a capture a chunk becomes a part of that graph
    return x.is_cuda and not torch.cuda.is_current_stream_capturing()


class Block:
    """n tokens on fixed memory, where graphs find it: the forward alone, and the forward again with
    its backward."""

    @torch.inference_mode(False)
    def __init__(self, how: tuple, n: int, every: list[Tensor]):
        """how: recipe, (B, D, W), the Triton kernels, names of each level's weights."""
        (recipe, (B, D, W), triton, names), self.graphs = how, {}
        h = recipe.rules.heads
        make = functools.partial(torch.zeros, device=every[0].device)
        self.every = [torch.zeros_like(x).requires_grad_() for x in every]
        rest = iter(self.every)
        self.weights = [dict(zip(some, rest, strict=False)) for some in names]
        self.z, self.dout = make(2, n, B, D, dtype=recipe.wide)
        self.s, self.count = make(B, D, dtype=recipe.wide), make(B, dtype=torch.int64)
        # keys, not rotated, and values that are carried; gradients given to the block's own
        shape = 2, len(names), B * h.C
        self.kv = make(*shape, W, h.K, dtype=recipe.dt)
        self.given = make(*shape, n, h.K, dtype=recipe.wide)
        self.make_run = functools.partial(Run, recipe, self.count, (n, W, 0), triton)
        self.call = functools.partial(graphed, self.graphs) if recipe.graphs else lambda _, f: f()

    @torch.no_grad()
    def load(self, every: list[Tensor]) -> None:
        for x, mine in zip(every, self.every, strict=True):
            mine.copy_(x)

    def fill(self, t: int, z: Tensor, s: Tensor, kv: Tensor, count: Tensor) -> None:
        """The chunk's tokens from t on, s and the entries before them."""
        self.z.copy_(z[t : t + len(self.z)])
        self.s.copy_(s)
        self.count.copy_(count + t)
        self.kv.copy_(kv[:, :, :, t : t + self.kv.size(3)])

    @torch.no_grad()
    def forward(self) -> tuple[Tensor, Tensor]:
        """-> s of each token, own keys and values (2, L, N, n, K)."""
        out, windows = run_chunk(self.make_run(), self.weights, self.z, self.s, self.kv)
        own = slice(-len(out), None)
        return out, torch.stack([torch.stack([x[:, own] for x in (w.kn, w.v)]) for w in windows], 1)

    @torch.enable_grad()
    def backward(self) -> tuple:
        """-> gradients of z, s, carried keys and values, weights."""
        z, s = (x.detach().requires_grad_() for x in (self.z, self.s))
        out, windows = run_chunk(run := self.make_run(), self.weights, z, s, self.kv)
        for l, window in enumerate(windows):
            window.given = self.given[:, l]
        inputs = z, s, *self.every
        dz, ds, *grads = torch.autograd.grad(out, inputs, self.dout, materialize_grads=True)
        dk, dv = (torch.stack([getattr(w, x)[:, : run.W] for w in windows]) for x in ('dk', 'dv'))
        cos, sin = (x[: run.W] for x in run.rope)
        return dz, ds, torch.stack([apply_rope(dk, cos, -sin), dv]), grads


class Again(torch.autograd.Function):
    """A chunk by its blocks, made(T, weights): z (T, B, D), s (B, D), k and v (L, N, W, K) -> s of
    each token, new k and v."""

    @staticmethod
    def forward(ctx, made, z, s, k, v, count, *weights):
        T, W, out = len(z), k.size(2), torch.empty_like(z)
        kv = torch.stack([F.pad(x, (0, 0, 0, T)) for x in (k, v)])  # (2, L, N, W + T, K)
        for t, block in made(T, weights):
            end = t + len(block.z)
            block.fill(t, z, out[t - 1] if t else s, kv, count)
            out[t:end], kv[:, :, :, W + t : W + end] = block.call('forward', block.forward)
        ctx.made = made
        ctx.save_for_backward(z, s, kv, count, out, *weights)
        return out, *kv[:, :, :, T:].unbind(0)

    @staticmethod
    def backward(ctx, dout, *_):
        z, s, kv, count, out, *weights = ctx.saved_tensors
        dz, ds, dkv = torch.empty_like(z), 0, torch.zeros_like(kv, dtype=z.dtype)
        totals, W = [torch.zeros_like(x) for x in weights], kv.size(3) - len(z)
        for t, block in reversed(ctx.made(len(z), weights)):
            end = t + len(block.z)
            block.fill(t, z, out[t - 1] if t else s, kv, count)
            block.dout.copy_(dout[t:end])
            block.dout[-1] += ds
            block.given.copy_(dkv[:, :, :, W + t : W + end])
            dz[t:end], ds, carried, grads = block.call('backward', block.backward)
            dkv[:, :, :, t : t + W] += carried
            torch._foreach_add_(totals, grads)
        return None, dz, None, None, None, None, *totals


# ---- Triton or not: measured, for the sizes at hand ----


def trials(recipe: Recipe, weights: dict, sizes: tuple, base: frozenset = frozenset()) -> dict:
    """{name: function(triton)}: a block's last group of tokens, windows full, through a level and
    back, on made-up numbers, by what is chosen already (base; at first the model's own pieces) or
    with the kernel, or the way to run, of that name besides. No token reads the one before but by
    the window, so that roundings do not build up. sizes B, D, W, n."""
    (B, D, W, n), dt, device = sizes, recipe.dt, weights['wqkv'].device
    m, windows = n - (n - 1) // GROUP * GROUP, {}
    normal, turns = made_up(weights, dt)
    entries = normal(2, B * recipe.rules.heads.C, W, recipe.rules.heads.K).to(dt)
    z, ds = normal(2, m, B, D)
    s = normal(B, D)

    @torch.no_grad()
    def run(name, triton):
        names = base | {name} if triton else base
        if names not in windows:
            one = Run(recipe, torch.full((B,), W, device=device), (n, W, 0), names)
            one.start(0)
            windows[names] = Window(one, *entries)
        window, own = windows[names], slice(W + n - m, W + n)
        window.t, inputs = n - m, [x.detach().requires_grad_() for x in (z, s)]
        with torch.enable_grad():
            ws = [bind(next(turns), window.run.recipe, s, 2, names) for _ in z]
            pairs = zip(ws, inputs[0], strict=True)
            out = [recipe.token([w], inputs[1], x, [window], recipe.rules) for w, x in pairs]
        found = [*torch.autograd.grad(out, inputs, list(ds)), window.dk, window.dv]
        found += [x[:, own] for x in (window.k, window.v, window.kn)]
        # a token's weights' gradients too: what the kernels leave for them must be right
        found += [w.flush() for w in ws[0].values() if isinstance(w, Product)]
        return torch.stack(out).detach(), *found

    # whether the kernels could be this model's experts: of these sizes
    fits = weights['up'].size(1) == weights['down'].size(2)
    fits = fits and triton_module().leave_of(recipe.rules.aggregation, len(weights['wo']), s)
    able = {'attention': not base, 'experts': not base and fits, 'split': 'experts' in base}
    able['pdl'] = base and device.type == 'cuda' and torch.cuda.get_device_capability() >= (9, 0)
    return {name: functools.partial(run, name) for name, yes in able.items() if yes}


@torch.inference_mode(False)
@torch.autocast('cuda', enabled=False)  # as in the loop
def choose(recipe: Recipe, weights: dict, sizes: tuple) -> frozenset:
    """The Triton kernels that agree with the model's own pieces here, in values and gradients, and
    beat them compiled; and of the ways to run them those that are faster still."""
    device = weights['wqkv'].device
    if not recipe.compile or recipe.wide != torch.float32:
        return frozenset()
    key = recipe._replace(graphs=False), sizes, device
    base = by_triton(key, device, lambda: trials(recipe, weights, sizes))
    return base and base | by_triton(
        (*key, base), device, lambda: trials(recipe, weights, sizes, base)
    )

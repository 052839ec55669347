"""
The fast unroll of the recurrent model. It knows no equation: a level is model.py's, called token by token,
and autograd differentiates it. A general nonlinear recurrence cannot be scanned, but much can leave the loop:
  - `Product`, W x: its backward gives x its gradient at once and puts W's off: one product over all tokens,
    in fp32 (also more accurate in bf16). What it multiplies is written once, where that product reads it;
  - `Window`, a level's keys and values in their slots: its backward adds dK and dV in place, those of earlier
    slots by one product a group of tokens. A chunk runs in blocks of n <= BLOCK tokens, so that attention
    reads W + n slots: the W carried keys rotated by slots 0..W-1, token t's by slot W + t. Scores depend on
    differences of slots only, so no angle passes W + n. Nothing is cut between blocks;
  - compiled, what stands between products is one kernel each way: a piece keeps its inputs, and its backward
    runs it again (torch.func.vjp) and writes gradients where the products before it want them;
  - `Block`, on CUDA (path 'graphed'): a block's forward, and its forward again with its backward, as two CUDA
    graphs that every block of a long chunk replays.

Shape letters as in model.py; S = W + n slots. `dt` is the dtype of products, `wide` of everything else.
"""

import functools
import math
import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch

from kernels import Heads, add_product, apply_rope, attend, attend_backward, by_cache_head, chosen
from kernels import compare, compiled, graphed, linear, outputs, probabilities, product, rope_table
from kernels import triton_module, wins

BLOCK = 64
GROUP = 8  # tokens whose dK, dV of slots before them are added by one product, not one a token
# bytes of a chunk's attention weights that a CPU keeps for the backward; more are made again, on a GPU all
KEPT_WEIGHTS = 2**30


class Recipe(NamedTuple):
    """What the model says of itself, and how it is to run."""

    token: Callable  # token(ws, s, z, attends, kind) -> the next s: all levels
    # the named pieces that Triton kernels may stand in for: before attention (with it), and after
    heads: Callable
    leave: Callable
    kind: NamedTuple  # with .heads: kernels.Heads, .aggregation
    dt: torch.dtype
    wide: torch.dtype
    compile: bool
    graphs: bool


# ---- memory ----
# Kept from chunk to chunk: fresh memory costs a page fault every 4 KiB.

_free: dict[tuple, list[torch.Tensor]] = {}
_blocks: dict[
    tuple, dict
] = {}  # captured blocks: their graphs, and the memory these read and write


def release() -> None:
    """Gives the memory back that is kept from chunk to chunk."""
    _free.clear()
    _blocks.clear()


@torch.inference_mode(False)  # outlives the mode it is made in
def take(shape: tuple, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    pool = _free.get((*shape, dtype, device))
    return pool.pop() if pool else torch.empty(shape, dtype=dtype, device=device)


def give(*tensors: torch.Tensor | None) -> None:
    for x in tensors:
        if x is not None:
            _free.setdefault((*x.shape, x.dtype, x.device), []).append(x)


# ---- pieces and products ----


@functools.cache
def forward_of(f: Callable) -> Callable:
    def run(args, static, slot):
        """f's results, the last in `slot` where there is one."""
        out = outputs(f(*args, **static))
        if slot is None:
            return out
        slot.copy_(out[-1])
        return out[:-1]

    return run


@functools.cache
def row_of(f: Callable) -> Callable:
    def run(x, slot):
        slot.copy_(x)
        return f(x)

    return run


@functools.cache
def backward_of(f: Callable) -> Callable:
    def run(args, static, needs, grads, places, adds):
        """The gradients of the args that need one, from those of f's results: None where it went to its
        place, copied or added."""

        def call(*some):
            rest = iter(some)
            full = [next(rest) if need else x for x, need in zip(args, needs, strict=True)]
            return outputs(f(*full, **static))

        wanted = [x for x, need in zip(args, needs, strict=True) if need]
        out, pull = torch.func.vjp(call, *wanted)
        found = pull(tuple(g.to(y.dtype) for g, y in zip(grads, out, strict=True)))
        left = []
        for x, place, more in zip(found, places, adds, strict=True):
            if place is None:
                left.append(x)
            else:
                left.append(None)
                place.add_(x) if more else place.copy_(x)
        return left

    return run


def run_again(f: Callable, args: tuple, static: dict, needs: tuple, grads: tuple) -> list:
    """As backward_of, eagerly."""
    with torch.enable_grad():
        args = [
            x.detach().requires_grad_() if need else x for x, need in zip(args, needs, strict=True)
        ]
        out = outputs(f(*args, **static))
    wanted = [x for x, need in zip(args, needs, strict=True) if need]
    return list(torch.autograd.grad(out, wanted, grads))


def pull_back(
    f: Callable, args: tuple, static: dict, needs: tuple, grads: tuple, places: list
) -> list:
    """Gradients of all args, None where not needed or already in the place."""
    if not any(needs):
        return [None] * len(args)
    places = [place if need else None for place, need in zip(places, needs, strict=True)]
    spots = [place and place[0].place(place[1]) for place in places]
    mine = [spot for spot, need in zip(spots, needs, strict=True) if need]
    adds = tuple(
        place is not None and place[0].adds for place, n in zip(places, needs, strict=True) if n
    )
    found = iter(compiled(backward_of(f))(args, static, needs, grads, mine, adds))
    found = [next(found) if need else None for need in needs]
    return [
        spot if g is None and p and not p[0].adds else g
        for g, spot, p in zip(found, spots, places, strict=True)
    ]


def claim(x: torch.Tensor | None) -> tuple | None:
    """Where x's gradient may be written: the place is its first reader's. (A second one's is added.)"""
    place = getattr(x, 'place', None)
    if place is not None and not place[0].adds:
        del x.place
    return place


class Weight(torch.autograd.Function):
    """A weight as a chunk uses it; its gradient is what holder() has gathered when all uses are through."""

    @staticmethod
    def forward(ctx, w, holder, x):
        ctx.holder = holder
        ctx.set_materialize_grads(False)
        return x

    @staticmethod
    def backward(ctx, g):
        total = ctx.holder().flush()
        return total if g is None else total + g.sum_to_size(total.shape), None, None


class Vector:
    """A scalar or vector weight, expanded to a row a stream, so that its gradient is a sum of rows that
    pieces add up in place, and is reduced once."""

    adds = True

    def __init__(self, w: torch.Tensor, B: int, D: int):
        self.like, self.sum = w.detach(), None
        self.wide = self.like.expand(B, D if w.dim() == 0 else w.size(0))

    def place(self, i: int) -> torch.Tensor:
        if self.sum is None:
            self.sum = torch.zeros_like(self.wide, memory_format=torch.contiguous_format)
        return self.sum

    def flush(self) -> torch.Tensor:
        total = self.place(0).sum_to_size(self.like.shape)
        self.sum = None
        return total


class Product:
    """y = W x, the gradient of W put off. Called as the equations want it: product(f, *args) multiplies the
    last result of f, and returns the others before it; product(x) multiplies x. Rows of all uses of a chunk
    lie together: what was multiplied, and the result's gradients (for a rowwise f what it was given, so that
    f(x) need not be kept)."""

    adds = False

    def __init__(self, w: torch.Tensor, recipe: Recipe, uses: int, B: int):
        self.dt, self.compile, self.uses, self.B = recipe.dt, recipe.compile, uses, B
        self.keep = torch.is_grad_enabled() and w.requires_grad
        self.wide = recipe.wide
        self.f, self.count, self.x, self.g, self.given = None, 0, [], [], set()
        cast = w.detach().to(self.dt)
        # a weak reference: a graph that nobody runs backward must not keep itself alive
        self.w = Weight.apply(w, weakref.ref(self), cast) if self.keep else cast

    def __call__(self, f: Callable | torch.Tensor, *args: torch.Tensor, **static: object):
        if isinstance(f, torch.Tensor):
            return run_piece(self, None, (f,), static)
        if self.compile or (getattr(f, 'rowwise', False) and self.keep):
            return run_piece(self, f, args, static)
        *rest, x = outputs(f(*args, **static))
        y = run_piece(self, None, (x,), static)
        return (*rest, y) if rest else y

    def rows(self, buffers: list[torch.Tensor], i: int, width: int) -> torch.Tensor:
        """Use i's rows of the buffers for what is `width` wide."""
        while len(buffers) <= i // self.uses:
            shape = *self.w.shape[:-2], self.uses * self.B, width
            buffers.append(take(shape, self.dt, self.w.device))
        return buffers[i // self.uses].narrow(-2, i % self.uses * self.B, self.B)

    def next(self, width: int) -> torch.Tensor | None:
        """The rows that the next use reads."""
        return self.rows(self.x, self.count, width) if self.keep else None

    def place(self, i: int) -> torch.Tensor:
        """Use i's rows for its result's gradient."""
        if self.f is Product:
            raise RuntimeError(
                'a second backward needs a new forward: the chunk gave its memory back'
            )
        return self.rows(self.g, i, self.w.size(-2))

    def gradient(self, i: int, g: torch.Tensor) -> torch.Tensor:
        place = self.place(i)
        self.given.add(i)
        return place if g.data_ptr() == place.data_ptr() else place.copy_(g)

    def flush(self) -> torch.Tensor:
        """W's gradient; the memory goes back."""
        total = None
        for i in set(range(self.count)) - self.given:  # a result that nothing depends on
            self.place(i).zero_()
        for j, (x, g) in enumerate(zip(self.x, self.g, strict=True)):
            rows = min(self.uses, self.count - j * self.uses) * self.B
            one = self.total(x.narrow(-2, 0, rows), g.narrow(-2, 0, rows))
            total = one if total is None else total.add_(one)
        give(*self.x, *self.g)
        self.f, self.x, self.g = Product, [], []
        return torch.zeros_like(self.w, dtype=self.wide) if total is None else total

    def total(self, x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        if self.f is None:
            return product(g.transpose(-1, -2), x, self.wide)
        f = compiled(self.f) if self.compile else self.f
        if x.is_cuda or x.dim() == 2:
            return product(g.transpose(-1, -2), f(x), self.wide)
        total = torch.empty(self.w.shape, dtype=self.wide)
        for e in range(len(x)):  # f(x) of one expert at a time
            total[e] = product(g[e].t(), f(x[e]), self.wide)
        return total


def run_piece(mine: Product | None, f: Callable | None, args: tuple, static: dict):
    """Piece, with places asked for and offered."""
    places = [claim(x) for x in args]
    index = mine.count if mine else 0
    out = Piece.apply(mine, f, static, places, mine and mine.w, *args)
    if mine and mine.keep:
        outputs(out)[-1].place = mine, index
    return out


class Piece(torch.autograd.Function):
    """f(*args), with a Product the last result multiplied. Keeps the args, and runs f again on the way back.
    Without a Product it is compiled."""

    @staticmethod
    def forward(ctx, mine, f, static, places, w, *args):
        compile = mine is None or mine.compile
        keep, row = mine is not None and mine.keep, f is not None and getattr(f, 'rowwise', False)
        ctx.mine, ctx.f, ctx.static, ctx.places = mine, f, static, places
        ctx.compile, ctx.row, ctx.dtype, slot = compile, row and keep, args[0].dtype, None
        run = compiled if compile else (lambda function: function)
        if keep:
            ctx.index = mine.count
            slot = mine.next(args[0].size(-1) if row or f is None else w.size(-1))
            mine.count += 1
        if f is None:
            x = args[0].to(mine.dt) if slot is None else slot
            if slot is not None and slot.data_ptr() != args[0].data_ptr():
                slot.copy_(args[0])
            rest = ()
        elif ctx.row:
            mine.f, rest = f, ()
            x = run(row_of(f))(args[0], slot).to(mine.dt)
        else:
            rest = run(forward_of(f))(args, static, slot)
            if mine is not None:
                *rest, x = (*rest, slot) if slot is not None else rest
                x = x.to(mine.dt)
        if f is not None and not ctx.row:
            ctx.save_for_backward(*args)
        if mine is None:
            return tuple(rest) if len(rest) > 1 else rest[0]
        y = linear(x, w)
        return (*rest, y) if rest else y

    @staticmethod
    def backward(ctx, *grads):
        mine, f, needs = ctx.mine, ctx.f, ctx.needs_input_grad[5:]
        if mine is not None:
            g = mine.gradient(ctx.index, grads[-1]) if mine.keep else grads[-1].to(mine.dt)
            grads = *grads[:-1], g @ mine.w
        if f is None:
            found = [grads[0].to(ctx.dtype)]
        else:
            args = ctx.saved_tensors
            if ctx.row:
                args = (mine.rows(mine.x, ctx.index, 0),)
            if ctx.compile:
                found = pull_back(f, args, ctx.static, needs, grads, ctx.places)
            else:
                found = run_again(f, args, ctx.static, needs, grads)
        return None, None, None, None, None, *found


def bind(
    weights: dict, recipe: Recipe, uses: int, sizes: tuple[int, int], triton: frozenset
) -> dict:
    """A level's weights for the equations; sizes B, D."""
    w = {}
    for name, x in weights.items():
        if x.dim() > 1:
            w[name] = Product(x, recipe, uses, sizes[0])
        elif recipe.compile and torch.is_grad_enabled() and x.requires_grad:
            vector = Vector(x, *sizes)
            w[name] = Weight.apply(x, lambda vector=vector: vector, vector.wide)
            w[name].place = vector, 0
        else:
            w[name] = x
    if not recipe.compile:
        return w | {'piece': lambda f, *args, **static: f(*args, **static)}
    w |= {'piece': lambda f, *args, **static: run_piece(None, f, args, static)}
    if 'experts' in triton and stands_in(recipe, weights):
        E, like = recipe.kind.heads.E, weights['wo'].detach().to(recipe.wide)
        w['leave'] = triton_module().leave_of(recipe.kind.aggregation, E, like)
    return w


def stands_in(recipe: Recipe, weights: dict) -> bool:
    """Whether the Triton experts could be this model's: of these sizes, all to be trained, or none."""
    up, down, wo = (weights[name] for name in ('up', 'down', 'wo'))
    known = triton_module().leave_of(recipe.kind.aggregation, 1, up) is not None
    return (
        known
        and up.size(1) == down.size(2)
        and up.requires_grad == down.requires_grad == wo.requires_grad
    )


# ---- attention ----


def rotated(args: tuple, static: dict, f: Callable, rope: tuple, dt: torch.dtype) -> tuple:
    """f(*args), the model's queries, key and value of a token, as the window takes them: queries and key
    rotated, the key as the cache keeps it, the value."""
    q, k, v = f(*args, **static)
    k = k.to(dt)
    return apply_rope(q, *rope).to(dt), apply_rope(k, *rope).to(dt), k, v.to(dt)


@functools.cache
def push_of(f: Callable) -> Callable:
    def run(args, static, rope, slots, q_out):
        q, *entries = rotated(args, static, f, rope, slots[0].dtype)
        for slot, x in zip(slots, entries, strict=True):
            slot.copy_(x.reshape(slot.shape))
        if q_out is None:
            return q
        q_out.copy_(q.reshape(q_out.shape))

    return run


@functools.cache
def before_window(f: Callable) -> Callable:
    """rotated, as a piece: without the key that only the cache reads."""

    def run(*args, rope, dt, **static):
        q, k, _, v = rotated(args, static, f, rope, dt)
        return q, k, v

    return run


class Block(NamedTuple):
    """What the windows of a block share."""

    n: int
    W: int
    heads: Heads
    recipe: Recipe
    rope: tuple[torch.Tensor, torch.Tensor]  # cos, sin of slots (S, K/2)
    bias: torch.Tensor  # (n, B, 1, 1, S): token t sees slots t+1 .. t+W, where they are filled
    count: torch.Tensor  # (B,) filled ones of the W carried
    keep_p: bool
    first: (
        int  # slots from here on have a gradient: the carried ones' is wanted only between blocks
    )
    triton: frozenset


class Window:
    """A level's keys and values for a block of tokens: the model's `attend`. Buffers (B*C, S, K)."""

    def __init__(self, block: Block, into: Product | None):
        self.block, self.into, self.t, self.back = block, into, 0, None
        self.handle, self.carried = (
            None,
            False,
        )  # what Load gave, and whether its backward is to come
        h, (n, B), S, grad = (
            block.heads,
            block.bias.shape[:2],
            block.W + block.n,
            torch.is_grad_enabled(),
        )
        self.B, self.dt, self.wide, self.device = (
            B,
            block.recipe.dt,
            block.bias.dtype,
            block.bias.device,
        )
        self.k, self.v, self.kn = (self.take(B * h.C, S, h.K) for _ in range(3))
        self.q = self.take(n, B * h.C, h.M, h.K) if grad else None
        weights = B * h.C, GROUP, h.M, S
        self.p = self.take(-(-n // GROUP), *weights) if grad and block.keep_p else None
        self.extra = None
        if (
            grad and 'attention' in block.triton
        ):  # norms' factors, log-sum-exp and output of each token
            sizes = (B, h.C, h.M, 1), (B, h.C, 1), (B * h.C, h.M, 1)
            self.extra = [
                torch.empty(n, *size, dtype=self.wide, device=self.device) for size in sizes
            ]

    def take(self, *shape: int, wide: bool = False) -> torch.Tensor:
        return take(shape, self.wide if wide else self.dt, self.device)

    def load(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """The W carried entries (B*C, W, K), keys not rotated."""
        W, (cos, sin) = self.block.W, self.block.rope
        self.kn[:, :W], self.v[:, :W], self.k[:, :W] = k, v, apply_rope(k, cos[:W], sin[:W])
        self.k[:, W:].zero_()  # slots to come must be finite
        self.v[:, W:].zero_()

    def __call__(self, f: Callable, *args: torch.Tensor, **static: object) -> torch.Tensor:
        """The next token's key and value into their slots, and its queries' attended values (E, B, H*K)."""
        t, slot, self.t = self.t, self.block.W + self.t, self.t + 1
        static = static | {'rope': tuple(x[slot] for x in self.block.rope), 'dt': self.dt}
        if not self.block.recipe.compile:
            rope, dt = static.pop('rope'), static.pop('dt')
            args, f = rotated(args, static, f, rope, dt), None
        places = [claim(x) for x in args]
        return Attend.apply(self, t, f, static, places, self.handle, *args)

    def forward(self, t: int, f: Callable | None, args: tuple, static: dict) -> torch.Tensor:
        block, slot, grad = self.block, self.block.W + t, self.q is not None
        out = self.into.next(block.heads.G * block.heads.R * block.heads.K) if self.into else None
        if f is not None and 'attention' in block.triton:
            return self.forward_triton(t, args[0], out)
        slots, q = (self.k[:, slot], self.kn[:, slot], self.v[:, slot]), self.q[t] if grad else None
        if f is None:
            for place, x in zip(slots, args[1:], strict=True):
                place.copy_(x.reshape(place.shape))
            q = args[0].reshape(self.k.size(0), -1, self.k.size(2))
            if grad:
                self.q[t] = q
        else:
            sizes = {name: x for name, x in static.items() if name not in ('rope', 'dt')}
            made = compiled(push_of(f))(args, sizes, static['rope'], slots, q)
            q = made.reshape(self.k.size(0), -1, self.k.size(2)) if q is None else q
        p = self.p[t // GROUP, :, t % GROUP] if self.p is not None else None
        run = compiled(attend) if f is not None else attend
        return run(q, self.k, self.v, block.bias[t], block.heads, out, p)

    def forward_triton(self, t: int, qkv: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        block, h, keep = self.block, self.block.heads, None
        if out is None:
            out = qkv.new_empty(h.E, self.B, h.G * h.R * h.K)
        if self.q is not None:
            rq, rk, lse = (x[t] for x in self.extra)
            keep = rq, rk, self.q[t], lse
        memory = self.k, self.v, self.kn, block.count, *block.rope
        return triton_module().window_attention(qkv, memory, (t, block.W), h, out, keep)

    def start_back(self) -> None:
        """Memory of the backward: gradients of the slots, and a group's weights, scores' and outputs'."""
        block, h = self.block, self.block.heads
        dk, dv = (self.take(*self.k.shape, wide=True).zero_() for _ in range(2))
        weights = self.B * h.C, GROUP, h.M, self.k.size(1)
        p = None if block.keep_p else self.take(*weights)
        self.back = dk, dv, p, self.take(*weights), self.take(*weights[:-1], h.K)

    def backward(
        self, t: int, datt: torch.Tensor, triton_args: tuple | None
    ) -> tuple | torch.Tensor:
        """Gradients of the rotated queries (B*C, M, K), and of the slot's key and value; with triton_args
        (att, place) the Triton kernel's: that of qkv."""
        if self.k is None:
            raise RuntimeError(
                'a second backward needs a new forward: the chunk gave its memory back'
            )
        if self.back is None:
            self.start_back()
        block, W, g = self.block, self.block.W, t // GROUP * GROUP
        size = min(GROUP, block.n - g)
        dk, dv, p_group, ds_group, do_group = self.back
        p_group = self.p[t // GROUP] if block.keep_p else p_group
        if triton_args is not None:
            rq, rk, lse = (x[t] for x in self.extra)
            memory = self.k, self.v, block.count, *block.rope
            kept = triton_args[0], self.q[t], rq, rk, lse
            sums = dk, dv, p_group, ds_group, do_group
            found = triton_module().window_attention_backward(
                datt, kept, memory, (t, g, W), block.heads, sums, triton_args[1]
            )
        else:
            q, p, ds, do = self.q[t], *(x[:, t - g] for x in (p_group, ds_group, do_group))
            one = compiled(token_back) if block.recipe.compile else token_back
            own = slice(W + g, W + g + size)
            dq = one(
                datt, q, self.k, self.v, block.bias[t], block.heads, (p, ds, do), not block.keep_p
            )
            add_product(dk[:, own], ds[..., own], q)
            add_product(dv[:, own], p[..., own], do)
            found = dq, dk[:, W + t], dv[:, W + t]
        # slot g is seen by no token of the group: its weights are zero, and products begin aligned
        before = slice(max(block.first, g), W + g)
        if t == g and before.start < before.stop:
            q = self.q[g : g + size].transpose(0, 1).reshape(dk.size(0), -1, dk.size(2))
            p, ds, do = (x[:, :size].flatten(1, 2) for x in (p_group, ds_group, do_group))
            add_product(dk[:, before], ds[..., before], q)
            add_product(dv[:, before], p[..., before], do)
        return found

    def end(self) -> None:
        """The memory goes back."""
        give(self.k, self.v, self.kn, self.q, self.p, *(self.back or ()))
        self.k = self.v = self.kn = self.q = self.p = self.back = None


def token_back(
    datt: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor,
    h: Heads,
    keep: tuple[torch.Tensor, ...],
    again: bool,
) -> torch.Tensor:
    """The queries' gradient; fills keep: p (`again`), the scores' gradient, the output's."""
    p, ds_out, do_out = keep
    do = by_cache_head(datt, h).to(k.dtype)
    if again:
        p = p.copy_(probabilities(q, k, bias))
    ds, dq = attend_backward(do, p, k, v, bias.dtype)
    ds_out.copy_(ds)
    do_out.copy_(do)
    return dq


class Attend(torch.autograd.Function):
    """Token t of a window. args: f's, or with f None the results of `rotated`. handle: what `Load` gave, so
    that its backward comes after all of these."""

    @staticmethod
    def forward(ctx, window, t, f, static, places, handle, *args):
        ctx.window, ctx.t, ctx.f, ctx.static, ctx.places = window, t, f, static, places
        out = window.forward(t, f, args, static)
        ctx.shapes = [x.shape for x in args]
        ctx.triton = f is not None and 'attention' in window.block.triton
        if f is not None and not ctx.triton:
            ctx.save_for_backward(*args)
        if ctx.triton and window.q is not None:
            ctx.att = out.detach()
        return out.view_as(out)

    @staticmethod
    def backward(ctx, datt):
        window, needs = ctx.window, ctx.needs_input_grad[6:]
        if ctx.triton:
            place = ctx.places[0] and ctx.places[0][0].place(ctx.places[0][1])
            found = [window.backward(ctx.t, datt, (ctx.att, place))]
        else:
            dq, dk, dv = window.backward(ctx.t, datt, None)
            if ctx.f is None:
                shapes = ctx.shapes[0], ctx.shapes[1], ctx.shapes[3]
                dq, dk, dv = (x.view(shape) for x, shape in zip((dq, dk, dv), shapes, strict=True))
                found = [dq, dk.to(dq.dtype), None, dv.to(dq.dtype)]
            else:
                h, f = window.block.heads, before_window(ctx.f)
                sizes = (h.C * h.M, h.K), (h.C, h.K), (h.C, h.K)
                grads = (x.view(-1, *size) for x, size in zip((dq, dk, dv), sizes, strict=True))
                found = pull_back(f, ctx.saved_tensors, ctx.static, needs, tuple(grads), ctx.places)
        if ctx.t == 0 and not window.carried:
            window.end()
        return None, None, None, None, None, None, *found


class Load(torch.autograd.Function):
    """The carried entries (L, B*C, W, K) into the windows; between blocks their gradient goes on."""

    @staticmethod
    def forward(ctx, windows, k, v):
        ctx.windows = windows
        for window, k_l, v_l in zip(windows, k, v, strict=True):
            window.load(k_l, v_l)
        return k.new_zeros(())

    @staticmethod
    def backward(ctx, _):
        W, (cos, sin), sums = ctx.windows[0].block.W, ctx.windows[0].block.rope, [[], []]
        for window in ctx.windows:
            dk, dv = (x[:, :W] for x in window.back[:2])
            sums[0].append(apply_rope(dk, cos[:W], -sin[:W]))
            sums[1].append(dv.clone())
            window.end()
        return None, *map(torch.stack, sums)


class Store(torch.autograd.Function):
    """s, and the last W entries of the windows (L, B*C, W, K), for the next block."""

    @staticmethod
    def forward(ctx, windows, s):
        ctx.windows, n = windows, windows[0].block.n
        return s.view_as(s), *(
            torch.stack([x[:, n:].to(s.dtype) for x in xs]) for xs in entries(windows)
        )

    @staticmethod
    def backward(ctx, ds, dk, dv):
        n, (cos, sin) = ctx.windows[0].block.n, ctx.windows[0].block.rope
        for window, dk_l, dv_l in zip(ctx.windows, dk, dv, strict=True):
            window.start_back()
            window.back[0][:, n:], window.back[1][:, n:] = apply_rope(dk_l, cos[n:], sin[n:]), dv_l
        return None, ds


def entries(windows: list[Window]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return [w.kn for w in windows], [w.v for w in windows]


# ---- the chunk ----


def make_block(n: int, like: torch.Tensor, count: torch.Tensor, W: int, recipe: Recipe) -> Block:
    """A block of n tokens of a chunk whose s is like `like` (B, D); what depends on the chunk is filled in
    later."""
    slot, t = torch.arange(W + n, device=like.device), torch.arange(n, device=like.device)[:, None]
    seen = ((slot > t) & (slot <= t + W))[:, None] & (slot >= W - count[:, None])  # (n, B, S)
    bias = torch.zeros(seen.shape, dtype=like.dtype, device=like.device).masked_fill_(
        ~seen, -math.inf
    )
    h = recipe.kind.heads
    rope = rope_table(W + n, h.K, like)
    return Block(n, W, h, recipe, rope, bias[:, :, None, None], count, False, W, frozenset())


def run_block(
    ws: list[dict], block: Block, z: torch.Tensor, s: torch.Tensor, kv: tuple, carry: bool
) -> tuple[torch.Tensor, torch.Tensor, tuple]:
    """z (n, B, D), s (B, D), kv (L, B*C, W, K) each -> s of each token, the last one, and the last W entries.
    carry: differentiable in kv, and in the new ones."""
    windows = [Window(block, w['wo']) for w in ws]
    handle = Load.apply(windows, *kv)
    for window in windows:
        window.handle, window.carried = handle, handle.requires_grad
    out, recipe = [], block.recipe
    for z_t in z.unbind(0):
        s = recipe.token(ws, s, z_t, windows, recipe.kind)
        out.append(s)
    for window in windows:
        window.handle = None  # its graph holds the windows
    if carry:
        s, *kv = Store.apply(windows, s)
    else:
        kv = [torch.stack([x[:, block.n :] for x in xs]) for xs in entries(windows)]
    if not torch.is_grad_enabled():
        for window in windows:
            window.end()
    return torch.stack(out), s, tuple(kv)


def blocks(T: int) -> list[tuple[int, int]]:
    """(first token, tokens) of each block of a chunk."""
    return [(t, min(BLOCK, T - t)) for t in range(0, T, BLOCK)]


def unroll(
    z: torch.Tensor, state: tuple, weights: list[dict], recipe: Recipe
) -> tuple[torch.Tensor, tuple]:
    """Run a chunk of the recurrent model. z (T, B, D); state (s, k, v, count) as model.State, not
    differentiated; weights: model.Level.weights of each level. Returns s[L] of each token (T, B, D) and the
    new state's four tensors."""
    s, k, v, count = state
    (T, B, D), (L, _, C, W, K), spans = z.shape, k.shape, blocks(len(z))
    grad, out, kv = torch.is_grad_enabled(), [], tuple(x.reshape(L, B * C, W, K) for x in (k, v))
    weights_bytes = L * B * C * recipe.kind.heads.M * sum(n * (W + n) for _, n in spans)
    keep_p = grad and not z.is_cuda and weights_bytes * recipe.dt.itemsize <= KEPT_WEIGHTS
    with torch.cuda.device_of(z):
        triton = (
            choose(recipe, weights[0], (B, D, W, min(T, BLOCK)), grad)
            if recipe.compile
            else frozenset()
        )
        rest = {'keep_p': keep_p, 'triton': triton}
        if recipe.graphs and can_capture(z):
            run = replayed_blocks(weights, recipe, (B, D, W), rest)
        else:
            ws = [bind(w, recipe, T, (B, D), triton) for w in weights]

            def run(last, z, s, kv, count):
                carry = grad and len(spans) > 1
                block = make_block(len(z), s, count, W, recipe)._replace(
                    **rest, first=0 if carry else W
                )
                return run_block(
                    ws,
                    block,
                    z,
                    s,
                    tuple(x.to(s.dtype) for x in kv) if carry else kv,
                    carry and not last,
                )

        for t, n in spans:
            out_t, s, kv = run(t + n == T, z[t : t + n], s, kv, count + t)
            out.append(out_t)
    out = torch.cat(out) if len(out) > 1 else out[0]
    new_k, new_v = (x.detach().to(k.dtype).view(k.shape) for x in kv)
    return out, (out[-1].detach().clone(), new_k, new_v, (count + T).clamp(max=W))


# ---- a block as two CUDA graphs ----


def can_capture(x: torch.Tensor) -> bool:
    # inside a capture a block becomes a part of that graph
    return x.is_cuda and not torch.cuda.is_current_stream_capturing()


class Replay:
    """Blocks of n tokens by graphs on fixed memory: the forward alone, and the forward again with its
    backward. A chunk keeps a block's inputs for that, and nothing else."""

    @torch.inference_mode(False)
    def __init__(self, n: int, weights: list[dict], recipe: Recipe, sizes: tuple, rest: dict):
        (B, D, W), h, self.recipe, self.rest, self.graphs = (
            sizes,
            recipe.kind.heads,
            recipe,
            rest,
            {},
        )
        self.sizes, device = sizes, weights[0]['wqkv'].device
        cache = len(weights), B * h.C, W, h.K
        shapes = {'z': (n, B, D), 's': (B, D), 'k': cache, 'v': cache}
        shapes |= {'out': (n, B, D), 's_out': (B, D), 'k_out': cache, 'v_out': cache}
        self.x = {
            name: torch.zeros(x, dtype=recipe.wide, device=device) for name, x in shapes.items()
        }
        self.d = {name: torch.zeros_like(x) for name, x in self.x.items()}
        self.count = torch.zeros(B, dtype=torch.int64, device=device)

    def block(self) -> Block:
        n, s, W = len(self.x['z']), self.x['s'], self.sizes[2]
        return make_block(n, s, self.count, W, self.recipe)._replace(**self.rest, first=0)

    @torch.no_grad()
    def forward(self, weights: list[dict]) -> torch.Tensor:
        ws = [
            bind(w, self.recipe, len(self.x['z']), self.sizes[:2], self.rest['triton'])
            for w in weights
        ]
        x = self.x
        out, s, kv = run_block(ws, self.block(), x['z'], x['s'], (x['k'], x['v']), False)
        for name, y in zip(('out', 's_out', 'k_out', 'v_out'), (out, s, *kv), strict=True):
            x[name].copy_(y)
        return x['out']

    @torch.enable_grad()
    def backward(self, weights: list[dict], totals: list[dict]) -> torch.Tensor:
        ws = [
            bind(w, self.recipe, len(self.x['z']), self.sizes[:2], self.rest['triton'])
            for w in weights
        ]
        inputs = [self.x[name].detach().requires_grad_() for name in 'zskv']
        z, s, *kv = inputs
        out, s, kv = run_block(ws, self.block(), z, s, tuple(kv), True)
        given = [self.d[name] for name in ('out', 's_out', 'k_out', 'v_out')]
        vectors = [(l, name) for l, w in enumerate(weights) for name, x in w.items() if x.dim() < 2]
        inputs += [weights[l][name] for l, name in vectors]
        found = torch.autograd.grad((out, s, *kv), inputs, given)
        for name, g in zip('zskv', found, strict=False):
            self.d[name].copy_(g)
        for (l, name), g in zip(vectors, found[4:], strict=True):
            totals[l][name].add_(g)
        for w, total in zip(ws, totals, strict=True):
            for name in total:
                if isinstance(w[name], Product):
                    total[name].add_(w[name].flush())
        return self.d['z']


class Replayed(torch.autograd.Function):
    """A block of a chunk by a Replay. used: what `Weight` gave, so that its backward comes after all."""

    @staticmethod
    def forward(ctx, replay, fixed, last, count, z, s, k, v, *used):
        ctx.replay, ctx.fixed, ctx.last = replay, fixed, last
        ctx.save_for_backward(count, z, s, k, v)
        fill(replay, count, z, s, k, v)
        graphed(replay.graphs, 'forward', replay.forward, fixed.weights)
        return tuple(replay.x[name].clone() for name in ('out', 's_out', 'k_out', 'v_out'))

    @staticmethod
    def backward(ctx, *grads):
        replay, fixed = ctx.replay, ctx.fixed
        if ctx.last:
            fixed.start()
        fill(replay, *ctx.saved_tensors)
        for name, g in zip(('out', 's_out', 'k_out', 'v_out'), grads, strict=True):
            replay.d[name].copy_(g)
        graphed(replay.graphs, 'backward', replay.backward, fixed.weights, fixed.totals)
        return (
            None,
            None,
            None,
            None,
            *(replay.d[name].clone() for name in 'zskv'),
            *[None] * len(fixed.own),
        )


def fill(replay: Replay, count: torch.Tensor, *inputs: torch.Tensor) -> None:
    replay.count.copy_(count)
    for name, x in zip('zskv', inputs, strict=True):
        replay.x[name].copy_(x)


class Fixed:
    """Weights and their gradients where graphs of blocks find them. own: a chunk's."""

    @torch.inference_mode(False)
    def __init__(self, weights: list[dict], recipe: Recipe):
        def like(x):
            return torch.zeros_like(
                x, dtype=recipe.dt if x.dim() > 1 else recipe.wide
            ).requires_grad_()

        self.weights = [{name: like(x) for name, x in w.items()} for w in weights]
        self.totals = [
            {n: torch.zeros_like(x, dtype=recipe.wide) for n, x in w.items()} for w in self.weights
        ]

    def start(self) -> None:
        """This chunk's weights; no gradients yet."""
        with torch.no_grad():
            for fixed, x in zip(
                (x for w in self.weights for x in w.values()), self.own, strict=True
            ):
                fixed.copy_(x)
        for total in (x for w in self.totals for x in w.values()):
            total.zero_()

    def of(self, weights: list[dict]) -> 'Fixed':
        """The same memory, for a chunk with these weights."""
        mine = object.__new__(Fixed)
        mine.weights, mine.totals = self.weights, self.totals
        mine.own = [x.detach() for w in weights for x in w.values()]
        mine.start()
        return mine


class Total(NamedTuple):
    total: torch.Tensor

    def __call__(self) -> 'Total':
        return self

    def flush(self) -> torch.Tensor:
        return self.total.clone()


def replayed_blocks(weights: list[dict], recipe: Recipe, sizes: tuple, rest: dict) -> Callable:
    """-> run(last, z, s, kv, count), a block of this chunk."""
    shapes = tuple(tuple((name, x.shape) for name, x in w.items()) for w in weights)
    key = recipe, shapes, weights[0]['wqkv'].device
    if key not in _blocks:
        _blocks[key] = {'fixed': Fixed(weights, recipe)}
    mine = _blocks[key]
    fixed = mine['fixed'].of(weights)
    totals = [x for w in fixed.totals for x in w.values()]
    every = [x for w in weights for x in w.values()]
    used = [
        Weight.apply(x, Total(total), x.detach()) for x, total in zip(every, totals, strict=True)
    ]

    def run(last, z, s, kv, count):
        name = len(z), *sizes, rest['triton']
        if name not in mine:
            mine[name] = Replay(len(z), weights, recipe, sizes, rest)
        kv = (x.to(recipe.wide) for x in kv)
        out, s, *kv = Replayed.apply(mine[name], fixed, last, count, z, s, *kv, *used)
        return out, s, tuple(kv)

    return run


# ---- Triton or not: measured, for the sizes at hand ----

TRITON = ('attention', 'experts')


def trials(recipe: Recipe, weights: dict, sizes: tuple, grad: bool) -> dict:
    """{name: function(triton)} of one token, windows full, on made-up numbers: by the model's own piece or by
    the kernel that may stand in for it, with its backward where there are gradients. sizes B, D, W, n."""
    (B, D, W, n), h, device = sizes, recipe.kind.heads, weights['wqkv'].device
    made = torch.Generator(device).manual_seed(
        0
    )  # training's own goes on as if nothing were measured

    def random(*shape, dtype=recipe.dt):
        return torch.randn(shape, device=device, generator=made).to(dtype)

    s, count = random(B, D, dtype=recipe.wide), torch.full((B,), W, device=device)
    qkv, datt = random(B, weights['wqkv'].size(0)), random(h.E, B, h.G * h.R * h.K)
    cache, t, windows = [random(B * h.C, W + n, h.K) for _ in range(2)], n - 1, {}
    g = t // GROUP * GROUP
    own, before = slice(W + g, W + n), slice(g + 1, W + g)

    def attention(triton):
        with torch.set_grad_enabled(grad):
            if triton not in windows:
                names = frozenset(TRITON if triton else ())
                block = make_block(n, s, count, W, recipe)._replace(triton=names)
                windows[triton] = window = Window(block, None)
                window.load(*(x[:, :W] for x in cache))
                for buffer, x in zip((window.k, window.v), cache, strict=True):
                    buffer[:, W:] = x[:, W:]
                window.carried = True  # the memory stays
            window = windows[triton]
            window.t, x = t, qkv.detach().requires_grad_(grad)
            att = window(recipe.heads, x, h=h, wide=recipe.wide)
            out = [att.detach(), *(buffer[:, W + t] for buffer in (window.k, window.v, window.kn))]
            if not grad:
                return out
            for buffer in window.back[:2] if window.back else ():
                buffer[:, own].zero_()
            out += torch.autograd.grad(att, x, datt)
        dk, dv, p, ds, do = window.back
        later = [x[:, t % GROUP, :, before] for x in (p, ds)] if before.start < before.stop else []
        return *out, *later, do[:, t % GROUP], dk[:, own], dv[:, own]

    some = {
        name: random(*weights[name].shape) * weights[name].size(-1) ** -0.5
        for name in ('wo', 'up', 'down')
    }
    gates = torch.softmax(random(B, h.E, dtype=recipe.wide), -1) if 'router_q' in weights else None

    def experts(triton):
        with torch.set_grad_enabled(grad):
            own = {name: x.detach().requires_grad_(grad) for name, x in some.items()}
            w = bind(own, recipe, 1, (B, D), frozenset({'experts'} if triton else ()))
            inputs = [x.detach().requires_grad_(grad) for x in (s, datt)]
            out = w.get('leave', recipe.leave)(w, *inputs, gates, recipe.kind)
            if not grad:
                return [out]
            # weights' gradients too: what the kernels leave for them must be right
            return out.detach(), *torch.autograd.grad(out, [*inputs, *own.values()], s)

    return {'attention': attention} | ({'experts': experts} if stands_in(recipe, weights) else {})


def trial_cost(recipe: Recipe, sizes: tuple) -> dict:
    """{name: (FLOPs of products, bytes)} of each trial with gradients: what must be read and written once at
    least, nothing between its pieces."""
    (B, D, W, n), h, size, wide = sizes, recipe.kind.heads, recipe.dt.itemsize, recipe.wide.itemsize
    rows, window, own = h.E * B * h.G * h.R * h.K, B * h.C * h.M * W, n - (n - 1) // GROUP * GROUP
    cache = 2 * B * h.C * W * h.K * size
    # keys and values twice, queries, outputs and their gradients in and out, p and ds; dk, dv of the group
    # read and written
    moved = 2 * cache + 8 * rows * size + 2 * window * size + 4 * B * h.C * own * h.K * wide
    weights = (
        9 * h.E * D * D
    )  # read twice, and their gradients written; 20: what stands between products
    experts = 3 * 2 * B * weights, (2 * weights + 20 * rows) * size + weights * wide
    return {'attention': (2 * 5 * window * h.K, moved), 'experts': experts}


@torch.autocast('cuda', enabled=False)  # as in the loop
def choose(recipe: Recipe, weights: dict, sizes: tuple, grad: bool) -> frozenset:
    """The Triton kernels that agree with the model's own pieces here, in values and gradients, and beat them
    compiled. CUDA only; measured once, by CUDA graphs: so not while another is captured, where what was not
    measured before stays compiled."""
    device = weights['wqkv'].device
    if device.type != 'cuda' or recipe.wide != torch.float32 or triton_module() is None:
        return frozenset()
    key = recipe._replace(graphs=False), sizes, device, grad
    if key not in chosen:
        if torch.cuda.is_current_stream_capturing():
            return frozenset()
        tried = trials(recipe, weights, sizes, grad)
        chosen[key] = {name: compare(run) for name, run in tried.items()}
    return frozenset(name for name, found in chosen[key].items() if wins(found))

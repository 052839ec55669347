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


def run_piece(
    mine: Product | None, f: Callable | None, args: tuple, static: dict
) -> torch.Tensor | tuple[torch.Tensor, ...]:
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
        return Attend.apply(self, t, f, static, places, *args)

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
    """Token t of a window. args: f's, or with f None the results of `rotated`."""

    @staticmethod
    def forward(ctx, window, t, f, static, places, *args):
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
        window, needs = ctx.window, ctx.needs_input_grad[5:]
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
        return None, None, None, None, None, *found


class Entries:
    """All keys, not rotated, and values of a chunk (L, B*C, W + T, K), the W carried ones first; and what
    blocks give to the gradients of those before them."""

    def __init__(self, k: torch.Tensor, v: torch.Tensor, W: int, T: int, wide: torch.dtype):
        (L, N, _, K), self.W = k.shape, W
        self.k, self.v = (x.new_empty(L, N, W + T, K) for x in (k, v))
        self.k[:, :, :W], self.v[:, :, :W], self.wide, self.sums = k, v, wide, None

    def gradients(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self.sums is None:
            self.sums = tuple(torch.zeros_like(x, dtype=self.wide) for x in (self.k, self.v))
        return self.sums

    def load(self, windows: list[Window], t: int) -> None:
        for window, k, v in zip(windows, self.k, self.v, strict=True):
            window.load(k[:, t : t + self.W], v[:, t : t + self.W])

    def store(self, windows: list[Window], t: int) -> None:
        own = slice(self.W + t, self.W + t + windows[0].block.n)
        for window, k, v in zip(windows, self.k, self.v, strict=True):
            k[:, own], v[:, own] = window.kn[:, self.W :], window.v[:, self.W :]


class Load(torch.autograd.Function):
    """Before a block: its windows' carried entries; on the way back their gradients. s as it is, so that the
    block lies between."""

    @staticmethod
    def forward(ctx, windows, entries, t, s):
        ctx.windows, ctx.entries, ctx.t = windows, entries, t
        entries.load(windows, t)
        return s.view_as(s)

    @staticmethod
    def backward(ctx, ds):
        W, t, (cos, sin) = ctx.entries.W, ctx.t, ctx.windows[0].block.rope
        for window, dk, dv in zip(ctx.windows, *ctx.entries.gradients(), strict=True):
            dk[:, t : t + W] += apply_rope(window.back[0][:, :W], cos[:W], -sin[:W])
            dv[:, t : t + W] += window.back[1][:, :W]
            window.end()
        return None, None, None, ds


class Store(torch.autograd.Function):
    """After a block that another follows: its windows' new entries; on the way back their gradients."""

    @staticmethod
    def forward(ctx, windows, entries, t, s):
        ctx.windows, ctx.entries, ctx.t = windows, entries, t
        entries.store(windows, t)
        return s.view_as(s)

    @staticmethod
    def backward(ctx, ds):
        W, (cos, sin) = ctx.entries.W, ctx.windows[0].block.rope
        own = slice(W + ctx.t, W + ctx.t + ctx.windows[0].block.n)
        for window, dk, dv in zip(ctx.windows, *ctx.entries.gradients(), strict=True):
            window.start_back()
            window.back[0][:, W:] = apply_rope(dk[:, own], cos[W:], sin[W:])
            window.back[1][:, W:] = dv[:, own]
        return None, None, None, ds


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
    ws: list[dict],
    block: Block,
    z: torch.Tensor,
    s: torch.Tensor,
    entries: Entries,
    at: tuple[int, bool],
) -> tuple[torch.Tensor, torch.Tensor]:
    """z (n, B, D), s (B, D) -> s of each token, and the last one. at: the block's first token in `entries`,
    and whether gradients come from later blocks."""
    (t, more), out, recipe = at, [], block.recipe
    windows = [Window(block, w['wo']) for w in ws]
    carried = block.first == 0 and s.requires_grad
    if carried:
        s = Load.apply(windows, entries, t, s)
    else:
        entries.load(windows, t)
    for window in windows:
        window.carried = carried
    for z_t in z.unbind(0):
        s = recipe.token(ws, s, z_t, windows, recipe.kind)
        out.append(s)
    if more and s.requires_grad:
        s = out[-1] = Store.apply(windows, entries, t, s)
    else:
        entries.store(windows, t)
    if not torch.is_grad_enabled():
        for window in windows:
            window.end()
    return torch.stack(out), s


def blocks(T: int) -> list[tuple[int, int]]:
    """(first token, tokens) of each block of a chunk."""
    return [(t, min(BLOCK, T - t)) for t in range(0, T, BLOCK)]


def unroll(
    z: torch.Tensor, state: tuple, weights: list[dict], recipe: Recipe
) -> tuple[torch.Tensor, tuple]:
    """Run a chunk of the recurrent model. z (T, B, D); state (s, k, v, count) as model.State, not
    differentiated; weights: model.Level.weights of each level. Returns s[L] of each token (T, B, D) and the
    new state's four tensors."""
    (s, k, v, count), grad, out = state, torch.is_grad_enabled(), []
    (T, B, D), (L, _, C, W, K), spans = z.shape, k.shape, blocks(len(z))
    kept = L * B * C * recipe.kind.heads.M * sum(n * (W + n) for _, n in spans) * recipe.dt.itemsize
    triton, sizes = frozenset(), (B, D, W, min(T, BLOCK))
    with torch.cuda.device_of(z):
        entries = Entries(*(x.reshape(L, B * C, W, K) for x in (k, v)), W, T, recipe.wide)
        if recipe.compile:
            triton = choose(recipe, weights[0], sizes, grad)
        keep_p = grad and not z.is_cuda and kept <= KEPT_WEIGHTS
        if recipe.graphs and can_capture(z):
            run = replayed_blocks(weights, recipe, sizes[:3], {'triton': triton, 'keep_p': keep_p})
        else:
            ws = [bind(w, recipe, T, (B, D), triton) for w in weights]

            def run(at, z, s, entries, count):
                block = make_block(len(z), s, count, W, recipe)
                block = block._replace(keep_p=keep_p, triton=triton, first=0 if at[0] else W)
                return run_block(ws, block, z, s, entries, at)

        for t, n in spans:
            out_t, s = run((t, t + n < T), z[t : t + n], s, entries, count + t)
            out.append(out_t)
    out = torch.cat(out) if len(out) > 1 else out[0]
    new_k, new_v = (x[:, :, T:].clone().view(k.shape) for x in (entries.k, entries.v))
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
        (B, D, self.W), h, self.recipe, self.rest = sizes, recipe.kind.heads, recipe, rest
        self.graphs, self.sizes, device = {}, (B, D), weights[0]['wqkv'].device
        self.z, self.out, self.dz, self.dout = torch.zeros(
            4, n, B, D, dtype=recipe.wide, device=device
        )
        self.s, self.ds = torch.zeros(2, B, D, dtype=recipe.wide, device=device)
        cache = torch.zeros(len(weights), B * h.C, self.W, h.K, dtype=recipe.dt, device=device)
        self.entries = Entries(cache, cache, self.W, n, recipe.wide)
        self.entries.gradients()
        self.count = torch.zeros(B, dtype=torch.int64, device=device)

    def run(self, weights: list[dict], z: torch.Tensor, s: torch.Tensor) -> tuple:
        ws = [bind(w, self.recipe, len(z), self.sizes, self.rest['triton']) for w in weights]
        block = make_block(len(z), s, self.count, self.W, self.recipe)._replace(
            **self.rest, first=0
        )
        return ws, run_block(ws, block, z, s, self.entries, (0, True))[0]

    @torch.no_grad()
    def forward(self, weights: list[dict]) -> torch.Tensor:
        return self.out.copy_(self.run(weights, self.z, self.s)[1])

    @torch.enable_grad()
    def backward(self, weights: list[dict], totals: list[dict]) -> torch.Tensor:
        z, s = (x.detach().requires_grad_() for x in (self.z, self.s))
        ws, out = self.run(weights, z, s)
        vectors = [(l, name) for l, w in enumerate(weights) for name, x in w.items() if x.dim() < 2]
        inputs = z, s, *(weights[l][name] for l, name in vectors)
        dz, ds, *found = torch.autograd.grad(out, inputs, self.dout)
        self.ds.copy_(ds)
        for (l, name), g in zip(vectors, found, strict=True):
            totals[l][name].add_(g)
        for w, total in zip(ws, totals, strict=True):
            for name in total:
                if isinstance(w[name], Product):
                    total[name].add_(w[name].flush())
        return self.dz.copy_(dz)

    def fill(
        self, entries: Entries, t: int, count: torch.Tensor, z: torch.Tensor, s: torch.Tensor
    ) -> None:
        for mine, x in zip((self.count, self.z, self.s), (count, z, s), strict=True):
            mine.copy_(x)
        for mine, x in zip((self.entries.k, self.entries.v), (entries.k, entries.v), strict=True):
            mine[:, :, : self.W] = x[:, :, t : t + self.W]


class Replayed(torch.autograd.Function):
    """A block of a chunk by a Replay. used: what `Weight` gave, so that its backward comes after all."""

    @staticmethod
    def forward(ctx, replay, fixed, entries, at, count, z, s, *used):
        ctx.rest = replay, fixed, entries, at
        ctx.save_for_backward(count, z, s)
        replay.fill(entries, at[0], count, z, s)
        graphed(replay.graphs, 'forward', replay.forward, fixed.weights)
        own = slice(at[0] + replay.W, at[0] + replay.W + len(z))
        for x, mine in zip(
            (entries.k, entries.v), (replay.entries.k, replay.entries.v), strict=True
        ):
            x[:, :, own] = mine[:, :, replay.W :]
        return replay.out.clone()

    @staticmethod
    def backward(ctx, dout):
        replay, fixed, entries, (t, more) = ctx.rest
        if not more:
            fixed.start()
        replay.fill(entries, t, *ctx.saved_tensors)
        replay.dout.copy_(dout)
        pairs = list(zip(replay.entries.gradients(), entries.gradients(), strict=True))
        for mine, x in pairs:
            mine.zero_()
            mine[:, :, replay.W :] = x[:, :, t + replay.W : t + replay.W + len(dout)]
        graphed(replay.graphs, 'backward', replay.backward, fixed.weights, fixed.totals)
        for mine, x in pairs:
            x[:, :, t : t + replay.W] += mine[:, :, : replay.W]
        return (
            None,
            None,
            None,
            None,
            None,
            replay.dz.clone(),
            replay.ds.clone(),
            *[None] * len(fixed.own),
        )


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
    """-> run(at, z, s, entries, count), a block of this chunk."""
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

    def run(at, z, s, entries, count):
        name = len(z), *sizes, rest['triton']
        if name not in mine:
            mine[name] = Replay(len(z), weights, recipe, sizes, rest)
        out = Replayed.apply(mine[name], fixed, entries, at, count, z, s, *used)
        return out, out[-1]

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

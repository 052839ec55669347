"""The token loop of the recurrent model over a chunk of T tokens.

The loop calls layer.step token by token and knows none of its equations; autograd differentiates
it. A nonlinear recurrence cannot be computed by a scan, but much can leave the loop:

- `DeferredLinear` postpones the gradients of weights: one product per group of tokens, not one per
  token. It is accumulated in fp32, which is also more accurate in bf16.
- `cache.Window` keeps the keys and values of a layer in one preallocated buffer of W + T slots and
  accumulates their gradients there in place.
- Compiled (kernels.fused), what stands between two products is one kernel each way.
- `Recompute` runs a chunk that is too long for memory, or for one CUDA graph, in blocks: a block
  keeps only its inputs and runs forward again before its backward, so that every block of every
  chunk can replay the same two CUDA graphs. Gradients are not cut between blocks.

Shapes as in layer.py; N = B * C cache heads of all streams, S = W + T slots. `wide` is the dtype of
everything but matrix products.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

import cache
from cache import Slots, Window
from kernels import Heads, Linear, can_capture, enabled_forms, fused, graphed, linear, matmul_into
from kernels import rotate, using
from layer import LayerWeights, step

# Tokens whose rows a CPU multiplies at once for a weight's gradient, times the bytes of an element:
# 16 in fp32, 32 in bf16. Fewer take less memory but more products, whose sum is rounded in bf16.
CPU_BYTES = 64
# A chunk is recomputed in blocks beyond these: bytes of attention weights kept by a CPU, and layers
# x tokens of one CUDA graph.
KEPT_BYTES = 2**30
WHOLE_GRAPH = 2048


# ---- deferred weight gradients -----------------------------------------------------------------


class DeferredLinear(Linear):
    """y = x W^T whose weight gradient is made later, by `weight_grad`, for many calls at once."""

    def __init__(self, weight: Tensor, dtype: torch.dtype):
        self.weight, self.w = weight, weight.detach().to(dtype)
        self.group = cache.BLOCK if weight.is_cuda else CPU_BYTES // dtype.itemsize
        self.calls, self.total = [], None

    def __call__(self, x: Tensor) -> Tensor:
        y = linear(x, self.w)
        if y.requires_grad and self.weight.requires_grad:
            held = [x.detach()]  # released once noted, to save memory
            y.register_hook(lambda dy: self.note(held, dy))
        return y

    def note(self, held: list[Tensor], dy: Tensor) -> None:
        """Record that held[0] was multiplied and dy is the gradient of the result."""
        if not held:
            raise RuntimeError('a second backward needs a new forward')
        self.calls.append((held.pop(), dy))
        if len(self.calls) == self.group:
            self.accumulate()

    def accumulate(self) -> None:
        x, dy = (torch.cat(rows, -2) for rows in zip(*self.calls, strict=True))
        self.calls.clear()
        self.total = matmul_into(dy.mT, x, self.weight.dtype, self.total)

    def weight_grad(self) -> Tensor:
        """Return the gradient of all calls since the last time."""
        if self.calls:
            self.accumulate()
        total, self.total = self.total, None
        return torch.zeros_like(self.weight) if total is None else total


class EmitWeightGrads(torch.autograd.Function):
    """The identity on a chunk's inputs. Its backward runs last, after every DeferredLinear has seen
    all its calls, and hands their gradients to the weights."""

    @staticmethod
    def forward(ctx, linears, z, s, *weights):
        ctx.linears = linears
        return z.view_as(z), s.view_as(s)

    @staticmethod
    def backward(ctx, dz, ds):
        return None, dz, ds, *(linear.weight_grad() for linear in ctx.linears)


def per_token(w: LayerWeights, T: int) -> Iterator[LayerWeights]:
    """Yield the layer's weights for each of T tokens. A vector is one view per token, whose
    gradients autograd stacks and sums once, rather than adding them one by one."""
    views = {
        name: x.expand(T, *x.shape).unbind(0)
        for name, x in w._asdict().items()
        if isinstance(x, Tensor)
    }
    for t in range(T):
        yield w._replace(**{name: x[t] for name, x in views.items()})


# ---- a chunk -----------------------------------------------------------------------------------


def run_tokens(
    z: Tensor, s: Tensor, kv: Tensor, layers: list[LayerWeights], slots: Slots, config: object
) -> tuple[Tensor, list[Window]]:
    """Run layer.step over z (T, B, D) from the state s. kv: carried keys and values (2, L, N, W,
    K). Returns the state after every token (T, *s.shape), and the windows."""
    T, out = len(z), []
    windows = [Window(slots, k, v) for k, v in kv.unbind(1)]
    if torch.is_grad_enabled():
        linears = [x for w in layers for x in w if isinstance(x, DeferredLinear)]
        linears = [x for x in linears if x.weight.requires_grad]
        z, s = EmitWeightGrads.apply(linears, z, s, *(x.weight for x in linears))
    inputs = z.unbind(0)  # autograd stacks their gradients; z[t] would add each to all of z's
    tokens = zip(*(per_token(w, T) for w in layers), strict=True)
    for t, weights in enumerate(tokens):
        if t % cache.BLOCK == 0:
            slots.start_block(t)
        s = step(weights, s, inputs[t], *slots.angles[t], windows, config)
        out.append(s)
    return torch.stack(out), windows


def recomputes(L: int, N: int, M: int, W: int, T: int, dtype: torch.dtype, device: str) -> bool:
    """Return whether a training chunk of T tokens runs in blocks that are recomputed. device: 'cpu'
    or 'cuda'."""
    if device == 'cuda':
        return L * T > WHOLE_GRAPH
    return L * N * M * T * (W + min(T, cache.BLOCK)) * dtype.itemsize > KEPT_BYTES


def unroll(
    z: Tensor,
    state: tuple,
    layers: list[LayerWeights],
    heads: Heads,
    config: object,
    graphs: bool = False,
) -> tuple[Tensor, tuple]:
    """Run a chunk of the recurrent model.

    z (T, B, D); state (s, k, v, count) as in model.State, not differentiated; graphs: blocks are
    replayed as CUDA graphs. Returns the last layer's output at every token (T, B, ...), and the new
    state's four tensors."""
    (s, k, v, count), T = state, len(z)
    L, B, C, W, K = k.shape
    N, dtype = B * C, layers[0].dtype
    kv = torch.stack([x.reshape(L, N, W, K) for x in (k, v)])
    long = recomputes(L, N, heads.M, W, T, dtype, z.device.type)
    graphs = graphs and long and can_capture(z)
    with torch.cuda.device_of(z):
        if graphs or (long and torch.is_grad_enabled() and not capturing(z)):
            blocks = find_blocks(T, B, W, z, s, heads, layers, config, graphs)
            out, kv = Recompute.apply(blocks, z, s, kv, count, *tensors_of(layers))
        else:
            slots = Slots(T, W, count, heads, z.dtype, first=W)
            out, windows = run_tokens(z, s, kv, layers, slots, config)
            carried = [torch.stack([x[:, T:] for x in (w.unrotated, w.v)]) for w in windows]
            kv = torch.stack(carried, 1)
    k, v = (x.view(L, B, C, W, K) for x in kv.unbind(0))
    return out, (out[-1].detach().clone(), k, v, (count + T).clamp(max=W))


def capturing(x: Tensor) -> bool:
    """Return whether a CUDA graph is being captured: then a chunk becomes part of that graph."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


# ---- blocks that run forward again before their backward, on fixed memory ----------------------

_blocks: dict[tuple, 'Block'] = {}


def release() -> None:
    """Free the memory of all blocks."""
    _blocks.clear()


def tensors_of(layers: list[LayerWeights]) -> list[Tensor]:
    """Return all weights of the layers as tensors, in order."""
    fields = (x for w in layers for x in w if x is not None)
    return [x.weight if isinstance(x, Linear) else x for x in fields]


def with_tensors(layers: list[LayerWeights], tensors: list[Tensor]) -> list[LayerWeights]:
    """Return layers of the same kinds with other weights: the inverse of tensors_of."""
    rest = iter(tensors)

    def replaced(x):
        if x is None:
            return None
        return type(x)(next(rest), x.w.dtype) if isinstance(x, Linear) else next(rest)

    return [LayerWeights(*(replaced(x) for x in w)) for w in layers]


def find_blocks(
    T: int,
    B: int,
    W: int,
    z: Tensor,
    s: Tensor,
    heads: Heads,
    layers: list[LayerWeights],
    config: object,
    graphs: bool,
) -> list[tuple[int, 'Block']]:
    """Return the blocks of a chunk of T tokens and the tokens they start with, with their weights
    loaded. Blocks are kept from chunk to chunk, by their sizes."""
    tensors, starts = tensors_of(layers), range(0, T, cache.BLOCK)
    kinds = tuple(type(x) for w in layers for x in w)
    shapes = tuple((x.shape, x.dtype) for x in tensors)
    what = (B, W, s.shape, z.dtype, z.device, layers[0].dtype, heads, repr(config))
    key = (what, kinds, shapes, graphs, enabled_forms(), fused.enabled)
    for n in {min(cache.BLOCK, T - t) for t in starts}:
        if (key, n) not in _blocks:
            _blocks[key, n] = Block(n, W, z, s, heads, layers, config, graphs)
        _blocks[key, n].load(tensors)
    return [(t, _blocks[key, min(cache.BLOCK, T - t)]) for t in starts]


class Block:
    """n tokens of a chunk on fixed memory, where CUDA graphs find it."""

    @torch.inference_mode(False)
    def __init__(
        self,
        n: int,
        W: int,
        z: Tensor,
        s: Tensor,
        heads: Heads,
        layers: list[LayerWeights],
        config: object,
        graphs: bool,
    ):
        """z, s, layers: only their shapes, dtypes and device count."""
        self.heads, self.config, self.forms = heads, config, enabled_forms()
        self.graphs = {} if graphs else None
        L, (_, B, D), dtype = len(layers), z.shape, layers[0].dtype
        zeros = z.new_zeros
        self.weights = [torch.zeros_like(x).requires_grad_() for x in tensors_of(layers)]
        # The kinds of linears. Detached: a gradient node of a weight that outlives the eager calls
        # would tie a captured backward to their stream.
        self.layers = with_tensors(layers, [x.detach().to('meta') for x in self.weights])
        self.z, self.s, self.count = zeros(n, B, D), zeros(s.shape), zeros(B, dtype=torch.int64)
        self.out_grad = zeros(n, *s.shape)
        # carried entries, keys not rotated; gradients of the own entries from later blocks
        self.kv = zeros(2, L, B * heads.C, W, heads.K, dtype=dtype)
        self.later_grads = zeros(2, L, B * heads.C, n, heads.K)

    @torch.no_grad()
    def load(self, weights: list[Tensor]) -> None:
        torch._foreach_copy_(self.weights, list(weights))

    def fill(self, t: int, z: Tensor, s: Tensor, kv: Tensor, count: Tensor) -> None:
        """Copy the chunk's tokens from t on, the state and the entries before them."""
        self.z.copy_(z[t : t + len(self.z)])
        self.s.copy_(s)
        self.count.copy_(count + t)
        self.kv.copy_(kv[:, :, :, t : t + self.kv.size(3)])

    def run(self, z: Tensor, s: Tensor) -> tuple[Tensor, list[Window], Slots]:
        with using(self.forms):
            layers = with_tensors(self.layers, self.weights)
            n, W = len(z), self.kv.size(3)
            slots = Slots(n, W, self.count, self.heads, z.dtype, first=0)
            return *run_tokens(z, s, self.kv, layers, slots, self.config), slots

    @torch.no_grad()
    def forward(self) -> tuple[Tensor, Tensor]:
        """Return the state after every token, and the own keys and values (2, L, N, n, K)."""
        out, windows, slots = self.run(self.z, self.s)
        own = [torch.stack([x[:, slots.W :] for x in (w.unrotated, w.v)]) for w in windows]
        return out, torch.stack(own, 1)

    @torch.enable_grad()
    def backward(self) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """Return the gradients of z, s, the carried entries (2, L, N, W, K) and the weights."""
        z, s = (x.detach().requires_grad_() for x in (self.z, self.s))
        out, windows, slots = self.run(z, s)
        for window, grads in zip(windows, self.later_grads.unbind(1), strict=True):
            window.later_grads = grads
        inputs = (z, s, *self.weights)
        dz, ds, *grads = torch.autograd.grad(out, inputs, self.out_grad, materialize_grads=True)
        W, carried = slots.W, []
        for window in windows:
            dk = rotate(window.dk[:, :W], slots.cos[:W], -slots.sin[:W])
            carried.append(torch.stack([dk, window.dv[:, :W]]))
        return dz, ds, torch.stack(carried, 1), grads


class Recompute(torch.autograd.Function):
    """A chunk in blocks: z (T, B, D), s (B, ...), kv (2, L, N, W, K) -> the state after every token
    and the new kv."""

    @staticmethod
    def forward(ctx, blocks, z, s, kv, count, *weights):
        T, W = len(z), kv.size(3)
        out = s.new_empty(T, *s.shape)
        kv = F.pad(kv, (0, 0, 0, T))  # (2, L, N, W + T, K)
        for t, block in blocks:
            end = t + len(block.z)
            block.fill(t, z, out[t - 1] if t else s, kv, count)
            out[t:end], kv[:, :, :, W + t : W + end] = graphed(
                block.graphs, 'forward', block.forward
            )
        ctx.blocks = blocks
        ctx.save_for_backward(z, s, kv, count, out, *weights)
        return out, kv[:, :, :, T:].clone()

    @staticmethod
    def backward(ctx, out_grad, _):
        z, s, kv, count, out, *weights = ctx.saved_tensors
        W = kv.size(3) - len(z)
        dz, ds, dkv = torch.empty_like(z), 0, torch.zeros_like(kv, dtype=z.dtype)
        totals = [torch.zeros_like(x) for x in weights]
        for block in {block for _, block in ctx.blocks}:
            block.load(weights)
        for t, block in reversed(ctx.blocks):
            end = t + len(block.z)
            block.fill(t, z, out[t - 1] if t else s, kv, count)
            block.out_grad.copy_(out_grad[t:end])
            block.out_grad[-1] += ds
            block.later_grads.copy_(dkv[:, :, :, W + t : W + end])
            dz[t:end], ds, carried, grads = graphed(block.graphs, 'backward', block.backward)
            dkv[:, :, :, t : t + W] += carried
            torch._foreach_add_(totals, grads)
        return None, dz, None, None, None, *totals

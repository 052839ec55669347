"""The token loop of the recurrent model over a chunk of T tokens.

The loop calls layer.step token by token and knows none of its equations; autograd differentiates
it. A nonlinear recurrence cannot be computed by a scan, but much can leave the loop:

- `DeferredLinear` postpones the gradients of weights: one product for many tokens, not one per
  token. Products are accumulated in fp32, which is also more accurate than bf16.
- `cache.Window` keeps the keys and values of a layer in preallocated buffers of W + T slots and
  accumulates their gradients in place.
- Where functions are compiled (kernels.fused), the operations between two matrix products are one
  kernel in the forward and one in the backward.
- `Recompute` runs a chunk that is too long for memory, or for one CUDA graph, in blocks: a block
  keeps only its inputs and runs forward again before its backward, so that all full blocks of all
  chunks can replay the same two CUDA graphs. Gradients flow from block to block.

Shapes as in layer.py, except that N = B * C counts the cache heads of all streams; S = W + T slots.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

import cache
from cache import Slots, Window
from kernels import (
    Heads,
    Linear,
    can_capture,
    capturing,
    enabled_forms,
    fused,
    graphed,
    linear,
    matmul_into,
    rotate,
    using,
)
from layer import LayerWeights, step

# On a CPU, one product computes a weight's gradient for CPU_BYTES / (bytes per element) tokens: 16
# in fp32, 32 in bf16. Fewer tokens would take less memory but more products, each of which a CPU
# rounds to bf16 (kernels.matmul_into).
CPU_BYTES = 64
# A chunk beyond these limits is recomputed in blocks.
KEPT_BYTES = 2**30  # on a CPU: attention weights kept for the backward
WHOLE_GRAPH = 2048  # on a GPU: layers x tokens in one CUDA graph


# ---- deferred weight gradients -----------------------------------------------------------------


class DeferredLinear(Linear):
    """y = x W^T, whose weight gradient is computed for many calls at once.

    The backward of a call only records the input and the gradient of the output. `weight_grad`
    returns the weight's gradient over all calls (see EmitWeightGrads)."""

    def __init__(self, weight: Tensor, dtype: torch.dtype):
        self.weight = weight
        self.w = weight.detach().to(dtype)
        self.calls_at_once = cache.BLOCK if weight.is_cuda else CPU_BYTES // dtype.itemsize
        self.calls = []  # (input, gradient of the output) of calls that `total` does not include
        self.total = None

    def __call__(self, x: Tensor) -> Tensor:
        y = linear(x, self.w)
        if y.requires_grad and self.weight.requires_grad:
            # a list, so that the hook can free x: the hook itself lives as long as the graph of y
            inputs = [x.detach()]

            def hook(dy: Tensor) -> None:
                if not inputs:
                    raise RuntimeError('a second backward needs a new forward')
                self.record(inputs.pop(), dy)

            y.register_hook(hook)
        return y

    def record(self, x: Tensor, dy: Tensor) -> None:
        """Record a call's input x and the gradient dy of its output."""
        self.calls.append((x, dy))
        if len(self.calls) == self.calls_at_once:
            self.accumulate()

    def accumulate(self) -> None:
        """Add the weight gradient of the recorded calls to `total` by one product."""
        inputs, grads = zip(*self.calls, strict=True)
        x, dy = torch.cat(inputs, -2), torch.cat(grads, -2)  # (..., rows of all calls, in or out)
        self.calls.clear()
        self.total = matmul_into(dy.mT, x, self.weight.dtype, self.total)

    def weight_grad(self) -> Tensor:
        """Return the weight's gradient over the calls recorded so far, and forget them."""
        if self.calls:
            self.accumulate()
        total, self.total = self.total, None
        return torch.zeros_like(self.weight) if total is None else total


class EmitWeightGrads(torch.autograd.Function):
    """Return a chunk's inputs z and s unchanged. Every token depends on them, so this backward runs
    last, when every DeferredLinear has recorded its calls, and returns their weight gradients."""

    @staticmethod
    def forward(ctx, linears, z, s, *weights):
        ctx.linears = linears
        return z.view_as(z), s.view_as(s)

    @staticmethod
    @once_differentiable
    def backward(ctx, dz, ds):
        grads = [w.weight_grad() for w in ctx.linears]
        return None, dz, ds, *grads


def per_token(w: LayerWeights, T: int) -> Iterator[LayerWeights]:
    """Yield the layer's weights for each of T tokens.

    A linear is the same object for all tokens. Of every other weight each token gets a separate
    view: autograd then stacks the T gradients and sums them once, instead of one by one."""
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
    """Run layer.step over the tokens z (T, B, D) from the state s. kv: the carried keys, not
    rotated, and values (2, L, N, W, K). Returns the state after every token, (T, *s.shape), and the
    layers' windows."""
    T = len(z)
    windows = [Window(slots, k, v) for k, v in kv.unbind(1)]  # one per layer
    if torch.is_grad_enabled():
        linears = [x for w in layers for x in w if isinstance(x, DeferredLinear)]
        linears = [x for x in linears if x.weight.requires_grad]
        z, s = EmitWeightGrads.apply(linears, z, s, *(x.weight for x in linears))
    # unbind's backward stacks the tokens' gradients; that of z[t] would add T tensors of z's size
    inputs = z.unbind(0)
    out = []
    weights_by_token = zip(*(per_token(w, T) for w in layers), strict=True)
    for t, weights in enumerate(weights_by_token):
        if t % cache.BLOCK == 0:
            slots.start_block(t)
        cos, sin = slots.angles[t]
        s = step(weights, s, inputs[t], cos, sin, windows, config)
        out.append(s)
    return torch.stack(out), windows


def entries(windows: list[Window], first: int) -> Tensor:
    """Return the unrotated keys and the values of all layers from the slot `first` on, (2, L, N,
    S - first, K)."""
    keys = torch.stack([window.unrotated[:, first:] for window in windows])
    values = torch.stack([window.v[:, first:] for window in windows])
    return torch.stack([keys, values])


def recomputes(L: int, N: int, M: int, W: int, T: int, dtype: torch.dtype, device: str) -> bool:
    """Return whether a training chunk of T tokens runs in blocks that are recomputed. device: 'cpu'
    or 'cuda'."""
    if device == 'cuda':
        return L * T > WHOLE_GRAPH
    attention_weights = L * N * M * T * (W + min(T, cache.BLOCK))
    return attention_weights * dtype.itemsize > KEPT_BYTES


def unroll(
    z: Tensor,
    state: tuple,
    layers: list[LayerWeights],
    heads: Heads,
    config: object,
    graphs: bool = False,
) -> tuple[Tensor, tuple]:
    """Run a chunk of the recurrent model.

    z (T, B, D); state: (s, k, v, count) as in model.State, which gets no gradient; graphs: whether
    to replay the blocks of a long chunk as CUDA graphs. Returns s after every token, (T,
    *s.shape), and the new (s, k, v, count)."""
    s, k, v, count = state
    T = len(z)
    L, B, C, W, K = k.shape
    N = B * C
    kv = torch.stack([x.reshape(L, N, W, K) for x in (k, v)]).to(layers[0].dtype)
    long = recomputes(L, N, heads.M, W, T, layers[0].dtype, z.device.type)
    replays = long and graphs and can_capture(z)
    # without gradients there is nothing to recompute: blocks are then only for their graphs
    recompute = long and torch.is_grad_enabled() and not capturing(z)
    with torch.cuda.device_of(z):
        if replays or recompute:
            blocks = find_blocks(T, B, W, z, s, heads, layers, config, replays)
            out, kv = Recompute.apply(blocks, z, s, kv, count, *tensors_of(layers))
        else:
            slots = Slots(T, W, count, heads, z.dtype, first_with_grad=W)
            out, windows = run_tokens(z, s, kv, layers, slots, config)
            kv = entries(windows, T)  # the last W
    k, v = kv.view(2, L, B, C, W, K).unbind(0)
    return out, (out[-1].detach().clone(), k, v, (count + T).clamp(max=W))


# ---- blocks that run forward again before their backward, on fixed memory ----------------------

_blocks: dict[tuple, 'Block'] = {}  # by sizes and settings; kept from chunk to chunk


def release() -> None:
    """Free the memory of all blocks."""
    _blocks.clear()


def tensors_of(layers: list[LayerWeights]) -> list[Tensor]:
    """Return all weights of the layers as tensors, in order."""
    fields = (x for w in layers for x in w if x is not None)
    return [x.weight if isinstance(x, Linear) else x for x in fields]


def with_tensors(layers: list[LayerWeights], tensors: list[Tensor]) -> list[LayerWeights]:
    """Return a copy of `layers` with other weights: `tensors`, in the order of tensors_of. Linears
    keep their class and dtype."""
    remaining = iter(tensors)

    def replace(x: Linear | Tensor | None) -> Linear | Tensor | None:
        if x is None:
            return None
        tensor = next(remaining)
        return type(x)(tensor, x.w.dtype) if isinstance(x, Linear) else tensor

    return [LayerWeights(*(replace(x) for x in w)) for w in layers]


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
    """Return the blocks of a chunk of T tokens as pairs (first token, block), with the weights of
    `layers` loaded. Blocks of one length are the same object."""
    tensors = tensors_of(layers)
    classes = tuple(type(x) for w in layers for x in w)
    shapes = tuple((x.shape, x.dtype) for x in tensors)
    sizes = (B, W, s.shape, z.dtype, z.device, layers[0].dtype, heads, repr(config))
    key = (sizes, classes, shapes, graphs, enabled_forms(), fused.enabled)
    blocks = []
    for t in range(0, T, cache.BLOCK):
        n = min(cache.BLOCK, T - t)
        if (key, n) not in _blocks:
            _blocks[key, n] = Block(n, W, z, s, heads, layers, config, graphs)
        blocks.append((t, _blocks[key, n]))
    for block in {block for _, block in blocks}:
        block.load(tensors)
    return blocks


class Block:
    """Forward and backward of n tokens of a chunk. Inputs and weights are copied into memory that
    never moves, because CUDA graphs read them there."""

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
        """Allocate memory for shapes, dtypes and device of z, s and layers; no value is read."""
        L, dtype = len(layers), layers[0].dtype
        _, B, D = z.shape
        N, K = B * heads.C, heads.K
        self.heads = heads
        self.config = config
        self.forms = enabled_forms()
        self.graphs = {} if graphs else None
        self.weights = [torch.zeros_like(x).requires_grad_() for x in tensors_of(layers)]
        # `run` takes only the linears' classes and dtypes from these; tensors on 'meta' use no
        # memory. They are detached, because a gradient node that outlives the eager calls would tie
        # a captured backward to the stream of those calls.
        self.layers = with_tensors(layers, [x.detach().to('meta') for x in self.weights])
        self.z = z.new_zeros(n, B, D)
        self.s = z.new_zeros(s.shape)
        self.count = z.new_zeros(B, dtype=torch.int64)
        self.kv = z.new_zeros(2, L, N, W, K, dtype=dtype)  # carried entries, keys not rotated
        self.out_grad = z.new_zeros(n, *s.shape)
        # gradients of this block's keys, not rotated, and values that come from later blocks
        self.later_grads = z.new_zeros(2, L, N, n, K)

    @torch.no_grad()
    def load(self, weights: list[Tensor]) -> None:
        """Copy weights, in the order of tensors_of, into this block."""
        torch._foreach_copy_(self.weights, list(weights))

    def fill(self, t: int, z: Tensor, s: Tensor, kv: Tensor, count: Tensor) -> None:
        """Copy the chunk's tokens from t on, the state s before them and the W entries before them
        into this block. kv: all entries of the chunk, (2, L, N, W + T, K); count: (B,), as at the
        start of the chunk."""
        self.z.copy_(z[t : t + len(self.z)])
        self.s.copy_(s)
        self.count.copy_(count + t)
        self.kv.copy_(kv[:, :, :, t : t + self.kv.size(3)])

    def run(self, z: Tensor, s: Tensor) -> tuple[Tensor, list[Window], Slots]:
        """Call run_tokens on z and s with this block's weights, entries and Triton forms; return
        its results and the slots."""
        with using(self.forms):
            layers = with_tensors(self.layers, self.weights)
            W = self.kv.size(3)
            slots = Slots(len(z), W, self.count, self.heads, z.dtype, first_with_grad=0)
            out, windows = run_tokens(z, s, self.kv, layers, slots, self.config)
            return out, windows, slots

    @torch.no_grad()
    def forward(self) -> tuple[Tensor, Tensor]:
        """Return the state after every token, and this block's keys, not rotated, and values (2, L,
        N, n, K)."""
        out, windows, slots = self.run(self.z, self.s)
        return out, entries(windows, slots.W)

    @torch.enable_grad()
    def backward(self) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """Return the gradients of z, s, the carried entries (2, L, N, W, K) and the weights."""
        z = self.z.detach().requires_grad_()
        s = self.s.detach().requires_grad_()
        out, windows, slots = self.run(z, s)
        for window, grads in zip(windows, self.later_grads.unbind(1), strict=True):
            window.later_grads = grads
        inputs = (z, s, *self.weights)
        dz, ds, *grads = torch.autograd.grad(out, inputs, self.out_grad, materialize_grads=True)
        W = slots.W
        # slots hold rotated keys, blocks exchange unrotated ones: rotate their gradients back
        cos, sin = slots.cos[:W], slots.sin[:W]
        dk = torch.stack([rotate(window.dk[:, :W], cos, -sin) for window in windows])
        dv = torch.stack([window.dv[:, :W] for window in windows])
        return dz, ds, torch.stack([dk, dv]), grads


class Recompute(torch.autograd.Function):
    """Run a chunk in blocks. From z (T, B, D), s (B, ...) and the carried kv (2, L, N, W, K),
    return the state after every token (T, B, ...) and the kv that the next chunk starts with."""

    @staticmethod
    def forward(ctx, blocks, z, s, kv, count, *weights):
        T, W = len(z), kv.size(3)
        out = s.new_empty(T, *s.shape)
        kv = F.pad(kv, (0, 0, 0, T))  # (2, L, N, W + T, K)
        for t, block in blocks:
            end = t + len(block.z)
            block.fill(t, z, out[t - 1] if t else s, kv, count)
            states, new_entries = graphed(block.graphs, 'forward', block.forward)
            out[t:end] = states
            kv[:, :, :, W + t : W + end] = new_entries
        ctx.blocks = blocks
        ctx.save_for_backward(z, s, kv, count, out, *weights)
        return out, kv[:, :, :, T:].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, out_grad, _):
        z, s, kv, count, out, *weights = ctx.saved_tensors
        W = kv.size(3) - len(z)
        dz = torch.empty_like(z)
        ds = 0  # gradient of the state after a block, from later blocks
        dkv = torch.zeros_like(kv, dtype=z.dtype)
        totals = [torch.zeros_like(x) for x in weights]
        for block in {block for _, block in ctx.blocks}:
            block.load(weights)  # another model may have used the block since the forward
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

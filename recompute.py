"""Chunks of the recurrent model: whole, or in blocks where they are too long for memory or for one
CUDA graph.

A block keeps only its inputs and runs forward again before its backward, on fixed memory, so that
all full blocks of all chunks can replay the same two CUDA graphs. Gradients flow from block to
block. Shapes as in unroll.py.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

import unroll
from graphs import can_capture, capturing, enabled_forms, fused, graphed, using
from kernels import Heads, Linear, rotate
from layer import LayerWeights
from unroll import Slots, Window, entries, run_tokens

# A chunk beyond these limits is recomputed in blocks.
KEPT_BYTES = 2**30  # on a CPU: attention weights kept for the backward
WHOLE_GRAPH = 2048  # on a GPU: layers x tokens in one CUDA graph
_blocks: dict[tuple, 'Block'] = {}  # by sizes and settings; kept from chunk to chunk


def recomputes(L: int, N: int, M: int, W: int, T: int, dtype: torch.dtype, device: str) -> bool:
    """Return whether a training chunk of T tokens runs in blocks that are recomputed. device: 'cpu'
    or 'cuda'."""
    if device == 'cuda':
        return L * T > WHOLE_GRAPH
    attention_weights = L * N * M * T * (W + min(T, unroll.BLOCK))
    return attention_weights * dtype.itemsize > KEPT_BYTES


def run_chunk(
    z: Tensor,
    state: tuple,
    layers: list[LayerWeights],
    heads: Heads,
    config: object,
    graphs: bool = False,
) -> tuple[Tensor, tuple]:
    """Run the token loop over a chunk.

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
            blocks = find_blocks(z, s, kv, layers, heads, config, replays)
            out, kv = Recompute.apply(blocks, z, s, kv, count, *tensors_of(layers))
        else:
            slots = Slots(T, W, count, heads, z.dtype, first_with_grad=W)
            out, windows = run_tokens(z, s, kv, layers, slots, config)
            kv = entries(windows, T)  # the last W
    k, v = kv.view(2, L, B, C, W, K).unbind(0)
    return out, (out[-1].detach().clone(), k, v, (count + T).clamp(max=W))


# ---- blocks ------------------------------------------------------------------------------------


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
    z: Tensor,
    s: Tensor,
    kv: Tensor,
    layers: list[LayerWeights],
    heads: Heads,
    config: object,
    graphs: bool,
) -> list[tuple[int, 'Block']]:
    """Return the blocks of a chunk z (T, B, D) as pairs (first token, block), with the weights of
    `layers` loaded. Blocks of one length are the same object."""
    tensors = tensors_of(layers)
    classes = tuple(type(x) for w in layers for x in w)
    shapes = tuple((x.shape, x.dtype) for x in (z[0], s, kv, *tensors))
    key = (z.device, heads, repr(config), classes, shapes, graphs, enabled_forms(), fused.enabled)
    blocks = []
    for t in range(0, len(z), unroll.BLOCK):
        part = z[t : t + unroll.BLOCK]
        if (key, len(part)) not in _blocks:
            _blocks[key, len(part)] = Block(part, s, kv, layers, heads, config, graphs)
        blocks.append((t, _blocks[key, len(part)]))
    for block in {block for _, block in blocks}:
        block.load(tensors)
    return blocks


class Block:
    """Forward and backward of n tokens of a chunk. Inputs and weights are copied into memory that
    never moves, because CUDA graphs read them there."""

    @torch.inference_mode(False)
    def __init__(
        self,
        z: Tensor,
        s: Tensor,
        kv: Tensor,
        layers: list[LayerWeights],
        heads: Heads,
        config: object,
        graphs: bool,
    ):
        """Allocate memory for the shapes of z (n, B, D), s, the carried entries kv (2, L, N, W, K)
        and the layers' weights; no value is read."""
        self.heads = heads
        self.config = config
        self.forms = enabled_forms()
        self.graphs = {} if graphs else None
        self.weights = [torch.zeros_like(x).requires_grad_() for x in tensors_of(layers)]
        # `run` takes only the linears' classes and dtypes from these; tensors on 'meta' use no
        # memory. They are detached, because a gradient node that outlives the eager calls would tie
        # a captured backward to the stream of those calls.
        self.layers = with_tensors(layers, [x.detach().to('meta') for x in self.weights])
        L, N, W, K = kv.shape[1:]
        n = len(z)
        self.z = z.new_zeros(z.shape)
        self.s = z.new_zeros(s.shape)
        self.count = z.new_zeros(z.size(1), dtype=torch.int64)
        self.kv = kv.new_zeros(kv.shape)  # carried entries, keys not rotated
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
        kv = kv[:, :, :, T:].clone()
        ctx.mark_non_differentiable(kv)
        return out, kv

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

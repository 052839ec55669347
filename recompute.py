"""Chunks of the recurrent model: whole, or in blocks where they are too long for memory or for one
CUDA graph.

A block keeps only its inputs and runs forward again before its backward, on fixed memory, so that
all full blocks of all chunks can replay the same two CUDA graphs. Gradients flow from block to
block. Shapes as in unroll.py.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

import unroll
from graphs import can_capture, enabled_forms, fused, graphed, using
from kernels import Heads, Linear
from layer import LayerWeights
from unroll import Slots, Window, run_tokens

# A chunk beyond these limits is recomputed in blocks.
KEPT_BYTES = 2**30  # on a CPU: attention weights kept for the backward
WHOLE_GRAPH = 2048  # on a GPU: layers x tokens in one CUDA graph
_blocks: dict[tuple, 'Block'] = {}  # by sizes and settings; kept from chunk to chunk


def recomputes(k: Tensor, M: int, T: int) -> bool:
    """Return whether a training chunk of T tokens runs in blocks that are recomputed. k: the
    carried keys (L, ..., W, K)."""
    if k.is_cuda:
        return len(k) * T > WHOLE_GRAPH
    slots = k.size(-2) + min(T, unroll.BLOCK)  # that each token reads
    attention_weights = k[..., 0, 0].numel() * M * T * slots
    return attention_weights * k.itemsize > KEPT_BYTES


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
    T, dtype = len(z), layers[0].dtype
    L, B, C, W, K = k.shape
    kv = torch.stack([x.reshape(L, B * C, W, K) for x in (k, v)]).to(dtype)
    replays = graphs and can_capture(z)
    # without gradients there is nothing to recompute: blocks are then only for their graphs
    in_blocks = replays or torch.is_grad_enabled()
    with torch.cuda.device_of(z):
        if in_blocks and recomputes(kv[0], heads.M, T):
            blocks = [
                (t, find_block((part, s, kv, count), layers, heads, config, replays))
                for t, part in zip(range(0, T, unroll.BLOCK), z.split(unroll.BLOCK), strict=True)
            ]
            out, kv = Recompute.apply(blocks, z, s, kv, count, *tensors_of(layers))
        else:
            slots = Slots(T, W, count, heads, z.dtype, first_with_grad=W)
            out, windows = run_tokens(z, s, kv, layers, slots, config)
            kv = torch.stack([window.entries for window in windows], 1)
    k, v = kv.view(2, L, B, C, W, K).unbind(0)
    return out, (out[-1].detach().clone(), k, v, (count + T).clamp(max=W))


# ---- blocks ------------------------------------------------------------------------------------


def release() -> None:
    """Free the memory of all blocks."""
    _blocks.clear()


def tensors_of(layers: list[LayerWeights]) -> list[Tensor]:
    """Return all weights of the layers as tensors, in order."""
    fields = (x for w in layers for x in w if isinstance(x, Linear | Tensor))
    return [x.weight if isinstance(x, Linear) else x for x in fields]


def map_weights(function: Callable, layers: list[LayerWeights]) -> list[LayerWeights]:
    """Return the layers with function(x) in place of every weight x. Linears keep their class and
    dtype."""

    def replace(x: object) -> object:
        if isinstance(x, Linear):
            return type(x)(function(x.weight), x.w.dtype)
        return function(x) if isinstance(x, Tensor) else x

    return [LayerWeights(*map(replace, w)) for w in layers]


def leaf(x: Tensor) -> Tensor:
    """Return x as a leaf of a new graph of autograd."""
    return x.detach().requires_grad_()


class Block:
    """Forward and backward of n tokens of a chunk. Inputs, weights and the gradients of the results
    are copied into memory that never moves, because CUDA graphs read them there."""

    @torch.inference_mode(False)
    def __init__(
        self,
        inputs: tuple,
        layers: list[LayerWeights],
        heads: Heads,
        config: object,
        replays: bool,
    ):
        """inputs: tensors like z (n, B, D), s, the carried entries kv (2, L, N, W, K), keys not
        rotated, and count (B,). Only the sizes of these and of the layers' weights are read."""
        self.inputs = [torch.zeros_like(x) for x in inputs]
        z, s, kv, _ = self.inputs
        self.out_grad = z.new_zeros(len(z), *s.shape)
        self.kv_grad = z.new_zeros(kv.shape)  # of the entries that the next block starts with
        self.layers = map_weights(torch.zeros_like, layers)
        self.heads = heads
        self.config = config
        self.forms = enabled_forms()
        self.graphs = {} if replays else None

    def load(self, t: int, chunk: tuple) -> int:
        """Copy the inputs of the tokens from t on, and return the end of the block. chunk: its z, s
        and count, its entries so far, (2, L, N, W + T, K), and its states so far."""
        z, s, kv, count, out = chunk
        n, W = len(self.inputs[0]), self.inputs[2].size(3)
        inputs = (z[t : t + n], out[t - 1] if t else s, kv[:, :, :, t : t + W], count + t)
        torch._foreach_copy_(self.inputs, inputs)
        return t + n

    def run(self) -> tuple[Tensor, list[Window], list[Tensor]]:
        """Return the state after every token, the windows, and z, s and the weights, the leaves of
        a graph of autograd that ends with this call: a node that outlives the eager calls would tie
        a captured backward to the stream of those calls."""
        z, s, kv, count = self.inputs
        z, s, layers = leaf(z), leaf(s), map_weights(leaf, self.layers)
        slots = Slots(len(z), kv.size(3), count, self.heads, z.dtype, first_with_grad=0)
        with using(self.forms):
            out, windows = run_tokens(z, s, kv, layers, slots, self.config)
        return out, windows, [z, s, *tensors_of(layers)]

    @torch.no_grad()
    def forward(self) -> tuple[Tensor, Tensor]:
        """Return the state after every token, and the entries that the next block starts with."""
        out, windows, _ = self.run()
        return out, torch.stack([window.entries for window in windows], 1)

    @torch.enable_grad()
    def backward(self) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """Return the gradients of z, s, the carried entries (2, L, N, W, K) and the weights."""
        out, windows, leaves = self.run()
        for window, grads in zip(windows, self.kv_grad.unbind(1), strict=True):
            window.later_grads = grads
        dz, ds, *grads = torch.autograd.grad(out, leaves, self.out_grad, materialize_grads=True)
        return dz, ds, torch.stack([window.carried_grads() for window in windows], 1), grads


def find_block(inputs: tuple, *options: object) -> Block:
    """Return the Block for inputs of these sizes and these options, always the same one."""
    layers, _, config, replays = options
    sizes = tuple((x.shape, x.dtype, x.device) for x in (*inputs, *tensors_of(layers)))
    others = tuple(x for w in layers for x in w if not isinstance(x, Linear | Tensor))
    key = (sizes, others, repr(config), replays, enabled_forms(), fused.enabled)
    if key not in _blocks:
        _blocks[key] = Block(inputs, *options)
    return _blocks[key]


class Recompute(torch.autograd.Function):
    """Run a chunk in blocks. From z (T, B, D), s (B, ...) and the carried kv (2, L, N, W, K),
    return the state after every token (T, B, ...) and the kv that the next chunk starts with."""

    @staticmethod
    def forward(ctx, blocks, z, s, kv, count, *weights):
        T, W = len(z), kv.size(3)
        out = s.new_empty(T, *s.shape)
        kv = F.pad(kv, (0, 0, 0, T))  # (2, L, N, W + T, K)
        chunk = (z, s, kv, count, out)
        load_weights(blocks, weights)
        for t, block in blocks:
            end = block.load(t, chunk)
            out[t:end], kv[:, :, :, end : end + W] = graphed(block.graphs, 'forward', block.forward)
        ctx.blocks = blocks
        ctx.save_for_backward(*chunk, *weights)
        kv = kv[:, :, :, T:].clone()
        ctx.mark_non_differentiable(kv)
        return out, kv

    @staticmethod
    @once_differentiable
    def backward(ctx, out_grad, _):
        chunk, weights = ctx.saved_tensors[:5], ctx.saved_tensors[5:]
        z, s, kv, _, _ = chunk
        dz = torch.empty_like(z)
        # gradients of the state and the entries after a block, from later blocks
        ds = torch.zeros_like(s)
        dkv = z.new_zeros(kv[:, :, :, len(z) :].shape)
        totals = [torch.zeros_like(x) for x in weights]
        load_weights(ctx.blocks, weights)  # another model may have used a block since the forward
        for t, block in reversed(ctx.blocks):
            end = block.load(t, chunk)
            block.out_grad.copy_(out_grad[t:end])
            block.out_grad[-1] += ds
            block.kv_grad.copy_(dkv)
            dz[t:end], ds, dkv, grads = graphed(block.graphs, 'backward', block.backward)
            torch._foreach_add_(totals, grads)
        return None, dz, None, None, None, *totals


def load_weights(blocks: list[tuple[int, Block]], weights: list[Tensor]) -> None:
    """Copy weights, in the order of tensors_of, into the blocks."""
    for block in {block for _, block in blocks}:
        torch._foreach_copy_(tensors_of(block.layers), list(weights))

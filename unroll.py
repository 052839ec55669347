"""The token loop of the recurrent model: its linears, its cache, and chunks of any length.

The loop calls a function `step` (model.step) token by token and knows none of its equations;
autograd differentiates it. A nonlinear recurrence cannot be computed by a scan, but much can leave
the loop:

- `DeferredLinear` postpones the gradients of weights: one product for many tokens, not one per
  token, accumulated in fp32 on a GPU, which is also more accurate than bf16.
- `ChunkCache` keeps the keys and values of a layer in preallocated buffers of W + T slots and
  accumulates their gradients in place.
- Where functions are compiled (compiling.fused), the operations between two matrix products are one
  kernel in the forward and one in the backward.

A chunk that is too long for memory or for one CUDA graph runs in segments of TILE tokens. A
`Segment` keeps only its inputs and runs forward again before its backward, from the same random
state and on fixed memory, so that all full segments of all chunks can replay the same two CUDA
graphs. Gradients flow from segment to segment.

Shapes as in model.py, except that N = B * C counts the cache heads of all streams; S = W + T slots.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ops import (
    Heads,
    Linear,
    linear,
    matmul_into,
    rope_table,
    rotate,
    to_cache_heads,
    to_experts,
    window_mask,
)
from support.compiling import can_capture, enabled_overrides, fused, graphed, use_overrides
from support.random_states import continuing_from, get_random_states

TILE = 64  # tokens of a segment, whose attention reads the same slots of a ChunkCache
GROUP = 8  # tokens whose dK and dV of earlier slots are added by one product
# On a CPU, one product computes a weight's gradient for CPU_BYTES / (bytes per element) tokens: 16
# in fp32, 32 in bf16. Fewer tokens would take less memory but more products, each of which a CPU
# rounds to bf16 (ops.matmul_into).
CPU_BYTES = 64


# ---- deferred weight gradients -----------------------------------------------------------------


class DeferredLinear(Linear):
    """y = x W^T, whose weight gradient is computed for many calls at once.

    The backward of a call only records the input and the gradient of the output. `weight_grad`
    returns the weight's gradient over all calls (see EmitWeightGrads)."""

    def __init__(self, weight: Tensor, dtype: torch.dtype):
        self.weight = weight
        self.w = weight.detach().to(dtype)
        self.calls_at_once = TILE if weight.is_cuda else CPU_BYTES // dtype.itemsize
        self.calls = []  # (input, gradient of the output) of calls that `total` does not include
        self.total = None

    def __call__(self, x: Tensor) -> Tensor:
        # x needs no gradient, as after x.detach(): y would need none either, and no hook would run
        if torch.is_grad_enabled() and self.weight.requires_grad and not x.requires_grad:
            return linear(x, self.weight.to(self.w.dtype))
        y = linear(x, self.w)
        if y.requires_grad and self.weight.requires_grad:
            # a list, so that the hook can drop x: autograd keeps the hook as long as y's graph
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

    def weight_grad(self) -> Tensor | None:
        """Return the weight's gradient over the calls recorded so far, if any, and forget them."""
        if self.calls:
            self.accumulate()
        total, self.total = self.total, None
        return total


class EmitWeightGrads(torch.autograd.Function):
    """Return a chunk's inputs z and s unchanged. The backward runs after that of every token, so it
    can return the weight gradients of all DeferredLinears."""

    @staticmethod
    def forward(ctx, linears, z, s, *weights):
        ctx.linears = linears
        return z.view_as(z), s.view_as(s)

    @staticmethod
    @once_differentiable
    def backward(ctx, dz, ds):
        grads = [w.weight_grad() for w in ctx.linears]
        return None, dz, ds, *grads


def per_token(w: tuple, T: int) -> Iterator[tuple]:
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


# ---- ChunkCache: a sliding window over a chunk -------------------------------------------------


@dataclass
class CacheLayout:
    """The layout of the slots, which the windows of all layers share. Slots 0 .. W - 1 hold the
    carried entries, the last `count` (B,) of which are filled (from count = W on, all of them);
    token t has slot W + t. A key is rotated by the number of its slot: scores depend only on
    differences of positions, so that positions need not grow from chunk to chunk.

    state_dtype: dtype of everything but matrix products. first_with_grad: the first slot whose
    entry gets a gradient: W for a whole chunk, which gives none to the carried entries, and 0 for a
    segment, which does."""

    T: int
    W: int
    count: Tensor
    heads: Heads
    state_dtype: torch.dtype
    first_with_grad: int

    def __post_init__(self) -> None:
        like = torch.empty((), dtype=self.state_dtype, device=self.count.device)
        self.cos, self.sin = rope_table(self.W + self.T, self.heads.K, like)  # (S, K)
        # cos and sin (K,) of each token
        self.angles = list(zip(self.cos[self.W :], self.sin[self.W :], strict=True))
        self.biases = {}  # width of a window: (tile, biases of its tokens)

    def bias(self, t: int, width: int) -> Tensor:
        """Return the bias of token t for the width + n slots that its tile of n tokens reads, (B,
        1, width + n): 0 for those that it sees, -inf for the others."""
        tile = t - t % TILE
        if self.biases.get(width, (None, None))[0] != tile:
            n = min(TILE, self.T - tile)
            seen = window_mask(self.count + tile, n, width).movedim(2, 0)  # (n, B, 1, width + n)
            bias = torch.zeros(seen.shape, dtype=self.state_dtype, device=seen.device)
            self.biases[width] = tile, bias.masked_fill_(~seen, -math.inf).unbind(0)
        return self.biases[width][1][t - tile]

    def group_of(self, t: int) -> tuple[int, int, int]:
        """Return the first token of t's tile, the first token of t's group, and the end of the
        group: its last token + 1."""
        tile = t - t % TILE
        group = t - (t - tile) % GROUP
        return tile, group, min(group + GROUP, tile + TILE, self.T)


@fused
def store(slot: Tensor, k: Tensor, unrotated: Tensor, v: Tensor) -> None:
    """Copy keys and values (B, C, K) into a slot (3, N, K)."""
    for part, x in zip(slot.unbind(0), (k, unrotated, v), strict=True):
        part.copy_(x.reshape(part.shape))


@fused
def probabilities(scores: Tensor, bias: Tensor) -> Tensor:
    """Return the attention weights of scores (N, M, S), in their dtype; bias (B, 1, S)."""
    B, S = bias.size(0), bias.size(-1)
    biased = scores.to(bias.dtype).view(B, -1, S) + bias  # (B, C M, S)
    return F.softmax(biased, -1).to(scores.dtype).view(scores.shape)


@fused
def scores_backward(dp: Tensor, p: Tensor, state_dtype: torch.dtype) -> Tensor:
    """Return the gradient of the scores from the gradient dp of their softmax p, in p's dtype."""
    ds = torch._softmax_backward_data(dp.to(state_dtype), p.to(state_dtype), -1, state_dtype)
    return ds.to(p.dtype)


class ChunkCache:
    """Keys and values of one layer in slots: the cache of model.run_layer in training. A token sees
    the last `width` slots up to its own.

    The backward visits tokens in descending order and adds to the gradients `grads` of the slots in
    place. It adds to the slots of a token's group of GROUP tokens at once, because the tokens
    before it in the group, which come next, need them complete, and to earlier slots by one product
    per group."""

    def __init__(self, layout: CacheLayout, k: Tensor, v: Tensor, width: int):
        """k, v: carried entries (N, W, K), keys not rotated; width: at most W."""
        N, W, K = k.shape
        T = layout.T
        self.layout = layout
        self.heads = layout.heads
        self.width = width
        self.skip = W - width  # slots that not even the first token sees
        self.t = 0  # the next token, counted from the start of the chunk, or of its segment
        # One tensor, so that storing a token is one kernel. It starts at zero, because slots that
        # are not filled yet are read with weight 0 and must be finite.
        buffers = k.new_zeros(3, N, W + T, K)
        self.k, self.unrotated, self.v = buffers.unbind(0)
        self.k[:, :W] = rotate(k, layout.cos[:W], layout.sin[:W])
        self.unrotated[:, :W] = k
        self.v[:, :W] = v
        self.entries = buffers[1:, :, T:]  # the last W unrotated keys and values, (2, N, W, K)
        # the slots that a tile reads, (N, width + n, K) each, and that a token writes, (3, N, K)
        spans = [slice(self.skip + t, W + min(t + TILE, T)) for t in range(0, T, TILE)]
        self.tile_slots = [(self.k[:, span], self.v[:, span]) for span in spans]
        self.token_slots = buffers[:, :, W:].unbind(2)
        self.grads = None  # gradients of the rotated keys and of the values, (2, N, S, K)
        # gradients (2, N, W, K) of the last W keys, not rotated, and values, from later segments
        self.later_grads = None
        # rows (see `add`) of the current group, not yet added to the slots before it
        self.pending = []

    def angles(self) -> tuple[Tensor, Tensor]:
        """Return cos and sin (K,) of the next token's position."""
        return self.layout.angles[self.t]

    def attend(self, q: Tensor, k: Tensor, unrotated: Tensor, v: Tensor) -> Tensor:
        """Store the next token's keys and values, (B, C, K) each, attend from its queries (B, C M,
        K), and return the attended values (E, B, H K)."""
        t = self.t
        self.t += 1
        return WindowAttention.apply(self, t, q, k, unrotated, v)

    def start_backward(self, t: int) -> None:
        """Prepare the backward of token t. A backward starts with the last token, for which the
        gradients are cleared."""
        layout = self.layout
        if self.grads is None or t == layout.T - 1:
            size = (2, *self.k.shape)
            self.grads = torch.zeros(size, dtype=layout.state_dtype, device=self.k.device)
            if self.later_grads is not None:
                W = layout.W
                dk, dv = self.later_grads
                self.grads[0, :, -W:] = rotate(dk, layout.cos[-W:], layout.sin[-W:])
                self.grads[1, :, -W:] = dv

    def carried_grads(self) -> Tensor:
        """Return the gradients of the carried keys, not rotated, and values, (2, N, W, K)."""
        layout, W = self.layout, self.layout.W
        if self.grads is None:  # no token has attended, as in an edit without attention
            self.start_backward(layout.T - 1)
        dk, dv = self.grads[:, :, :W]
        return torch.stack([rotate(dk, layout.cos[:W], -layout.sin[:W]), dv])

    def add(self, first: int, end: int, offset: int, rows: list[Tensor]) -> None:
        """Add to the gradients of slots first .. end - 1.

        rows: for one or more tokens, queries (N, tokens * M, K), attention weights and gradients of
        scores (N, tokens * M, slots), whose first column is slot `offset`, and gradients of
        attended values (N, tokens * M, K)."""
        q, p, ds, do = rows
        columns = slice(first - offset, end - offset)
        dk, dv = self.grads[:, :, first:end]
        # not baddbmm_, which would go through the batch of a slice one by one
        dk.add_(torch.bmm(ds[..., columns].mT, q))
        dv.add_(torch.bmm(p[..., columns].mT, do))

    def add_before_group(self, t: int, offset: int, rows: list[Tensor]) -> None:
        """Add the rows of the group that starts with token t to the slots before the group."""
        # no token of the group sees slot skip + t, so its weights are zero; a range of `width`
        # slots keeps the products aligned
        first = max(self.layout.first_with_grad, self.skip + t)
        if first < self.layout.W + t:
            self.add(first, self.layout.W + t, offset, rows)


class WindowAttention(torch.autograd.Function):
    """Attention of token t to its window. q (B, C M, K); k, unrotated and v (B, C, K)."""

    @staticmethod
    def forward(ctx, cache, t, q, k, unrotated, v):
        store(cache.token_slots[t], k, unrotated, v)
        keys, values = cache.tile_slots[t // TILE]  # (N, width + n, K)
        q = q.reshape(len(keys), -1, keys.size(2))  # (N, M, K)
        bias = cache.layout.bias(t, cache.width)
        p = probabilities(torch.bmm(q, keys.mT), bias)  # (N, M, width + n)
        ctx.cache, ctx.t = cache, t
        ctx.save_for_backward(q, p)
        return to_experts(torch.bmm(p, values), cache.heads)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        cache, t = ctx.cache, ctx.t
        layout, heads = cache.layout, cache.heads
        q, p = ctx.saved_tensors
        keys, values = cache.tile_slots[t // TILE]
        cache.start_backward(t)
        do = to_cache_heads(grad, heads)  # (N, M, K)
        ds = scores_backward(torch.bmm(do, values.mT), p, layout.state_dtype)  # (N, M, width + n)
        tile, group, end = layout.group_of(t)
        tile += cache.skip  # the first slot that the tile reads
        rows = (q, p, ds, do)
        cache.add(layout.W + group, layout.W + end, tile, rows)
        cache.pending.append(rows)
        if t == group:
            rows = [torch.cat(x, 1) for x in zip(*cache.pending, strict=True)]
            cache.add_before_group(t, tile, rows)
            cache.pending = []
        dq = torch.bmm(ds, keys).view(len(layout.count), -1, heads.K)
        # complete: all tokens that see this slot have had their backward
        grads = cache.grads[:, :, layout.W + t].to(q.dtype)  # (2, N, K)
        dk, dv = grads.view(2, -1, heads.C, heads.K).unbind(0)
        return None, None, dq, dk, None, dv


# ---- a chunk -----------------------------------------------------------------------------------


def run_tokens(
    step: Callable,
    z: Tensor,
    s: Tensor,
    kv: Tensor,
    layers: list[tuple],
    layout: CacheLayout,
    config: object,
) -> tuple[Tensor, list[ChunkCache]]:
    """Run model.step over the tokens z (T, B, D) from the state s. kv: the carried keys, not
    rotated, and values (2, L, N, W, K). Returns the state after every token, (T, *s.shape), and the
    layers' caches."""
    T = len(z)
    caches = [ChunkCache(layout, *x, w.window) for w, x in zip(layers, kv.unbind(1), strict=True)]
    if torch.is_grad_enabled():
        in_lists = [y for w in layers for x in w if isinstance(x, list | tuple) for y in x]
        if any(isinstance(y, Linear | Tensor) for y in in_lists):
            raise TypeError('LayerWeights has weights in a list: each must be a field')
        found = dict.fromkeys(x for w in layers for x in w if isinstance(x, DeferredLinear))
        linears = [x for x in found if x.weight.requires_grad]
        z, s = EmitWeightGrads.apply(linears, z, s, *(x.weight for x in linears))
    out = []
    # unbind's backward stacks the tokens' gradients; that of z[t] would add T tensors of z's size
    for z_t, *weights in zip(z.unbind(0), *(per_token(w, T) for w in layers), strict=True):
        s = step(weights, s, z_t, caches, config)
        out.append(s)
    return torch.stack(out), caches


# A chunk beyond these limits is recomputed in segments.
MAX_KEPT_BYTES = 2**30  # on a CPU: attention weights kept for the backward
MAX_GRAPH_SIZE = 2048  # on a GPU: layers x tokens in one CUDA graph
_segments: dict[tuple, 'Segment'] = {}  # by sizes and settings; kept from chunk to chunk


def recomputes(k: Tensor, M: int, T: int) -> bool:
    """Return whether a training chunk of T tokens runs in segments that are recomputed. k: the
    carried keys (L, ..., W, K)."""
    if k.is_cuda:
        return len(k) * T > MAX_GRAPH_SIZE
    slots = k.size(-2) + min(T, TILE)  # that each token reads
    attention_weights = k[..., 0, 0].numel() * M * T * slots
    return attention_weights * k.itemsize > MAX_KEPT_BYTES


def run_chunk(
    step: Callable,
    z: Tensor,
    state: tuple,
    layers: list[tuple],
    heads: Heads,
    config: object,
    cuda_graphs: bool = False,
) -> tuple[Tensor, tuple]:
    """Run the token loop over a chunk.

    z (T, B, D); state: (s, k, v, count) as in model.State, of which s alone may get a gradient;
    cuda_graphs: whether to replay the segments of a long chunk as CUDA graphs. Returns s after
    every token, (T, *s.shape), and the new (s, k, v, count)."""
    s, k, v, count = state
    T, dtype = len(z), layers[0].dtype
    L, B, C, W, K = k.shape
    kv = torch.stack([x.reshape(L, B * C, W, K) for x in (k, v)]).to(dtype)
    replays = cuda_graphs and can_capture(z)
    # without gradients there is nothing to recompute: segments are then only for their graphs
    in_segments = replays or torch.is_grad_enabled()
    with torch.cuda.device_of(z):
        if in_segments and recomputes(kv[0], heads.M, T):
            segments = [
                (t, get_or_make_segment((part, s, kv, count), step, layers, heads, config, replays))
                for t, part in zip(range(0, T, TILE), z.split(TILE), strict=True)
            ]
            out, kv = Recompute.apply(segments, z, s, kv, count, *tensors_of(layers))
        else:
            layout = CacheLayout(T, W, count, heads, z.dtype, first_with_grad=W)
            out, caches = run_tokens(step, z, s, kv, layers, layout, config)
            kv = torch.stack([cache.entries for cache in caches], 1)
    k, v = kv.view(2, L, B, C, W, K).unbind(0)
    return out, (out[-1].detach().clone(), k, v, (count + T).clamp(max=W))


# ---- segments ----------------------------------------------------------------------------------


def release() -> None:
    """Free the memory of all segments."""
    _segments.clear()


def tensors_of(layers: list[tuple]) -> list[Tensor]:
    """Return all weights of the layers as tensors, in order."""
    fields = (x for w in layers for x in w if isinstance(x, Linear | Tensor))
    return [x.weight if isinstance(x, Linear) else x for x in fields]


def map_weights(function: Callable, layers: list[tuple]) -> list[tuple]:
    """Return the layers with function(x) in place of every weight x. Linears keep their class and
    dtype."""

    def replace(x: object) -> object:
        if isinstance(x, Linear):
            return type(x)(function(x.weight), x.w.dtype)
        return function(x) if isinstance(x, Tensor) else x

    return [w._make(map(replace, w)) for w in layers]


def leaf(x: Tensor) -> Tensor:
    """Return x as a leaf of a new graph of autograd."""
    return x.detach().requires_grad_()


class Segment:
    """Forward and backward of n tokens of a chunk. Inputs, weights and the gradients of the results
    are copied into memory that never moves, because CUDA graphs read them there."""

    @torch.inference_mode(False)
    def __init__(
        self,
        inputs: tuple,
        step: Callable,
        layers: list[tuple],
        heads: Heads,
        config: object,
        replays: bool,
    ):
        """inputs: tensors like z (n, B, D), s, the carried entries kv (2, L, N, W, K), keys not
        rotated, and count (B,). Only the sizes of these and of the layers' weights are read."""
        self.inputs = [torch.zeros_like(x) for x in inputs]
        z, s, kv, _ = self.inputs
        self.out_grad = z.new_zeros(len(z), *s.shape)
        self.kv_grad = z.new_zeros(kv.shape)  # of the entries that the next segment starts with
        self.layers = map_weights(torch.zeros_like, layers)
        self.step = step
        self.heads = heads
        self.config = config
        self.overrides = enabled_overrides()
        self.graphs = {} if replays else None

    def load(self, t: int, chunk: tuple) -> int:
        """Copy the inputs of the tokens from t on, and return the end of the segment. chunk: its z,
        s and count, its entries so far, (2, L, N, W + T, K), and its states so far."""
        z, s, kv, count, out = chunk
        n, W = len(self.inputs[0]), self.inputs[2].size(3)
        inputs = (z[t : t + n], out[t - 1] if t else s, kv[:, :, :, t : t + W], count + t)
        torch._foreach_copy_(self.inputs, inputs)
        return t + n

    def run(self) -> tuple[Tensor, list[ChunkCache], list[Tensor]]:
        """Return the state after every token, the caches, and copies of z, s and the weights, with
        respect to which `backward` differentiates. The copies are new in each call: nodes of
        autograd that outlive an eager call would tie a captured backward to that call's stream."""
        z, s, kv, count = self.inputs
        z, s, layers = leaf(z), leaf(s), map_weights(leaf, self.layers)
        layout = CacheLayout(len(z), kv.size(3), count, self.heads, z.dtype, first_with_grad=0)
        with use_overrides(self.overrides):
            out, caches = run_tokens(self.step, z, s, kv, layers, layout, self.config)
        return out, caches, [z, s, *tensors_of(layers)]

    @torch.no_grad()
    def forward(self) -> tuple[Tensor, Tensor]:
        """Return the state after every token, and the entries that the next segment starts with."""
        out, caches, _ = self.run()
        return out, torch.stack([cache.entries for cache in caches], 1)

    @torch.enable_grad()
    def backward(self) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """Return the gradients of z, s, the carried entries (2, L, N, W, K) and the weights."""
        out, caches, leaves = self.run()
        for cache, grads in zip(caches, self.kv_grad.unbind(1), strict=True):
            cache.later_grads = grads
        dz, ds, *grads = torch.autograd.grad(out, leaves, self.out_grad, materialize_grads=True)
        return dz, ds, torch.stack([cache.carried_grads() for cache in caches], 1), grads


def get_or_make_segment(
    inputs: tuple,
    step: Callable,
    layers: list[tuple],
    heads: Heads,
    config: object,
    replays: bool,
) -> Segment:
    """Return the Segment for inputs of these sizes and these options, always the same one."""
    sizes = tuple((x.shape, x.dtype, x.device) for x in (*inputs, *tensors_of(layers)))
    others = tuple(x for w in layers for x in w if not isinstance(x, Linear | Tensor))
    key = (step, sizes, others, repr(config), replays, enabled_overrides(), fused.enabled)
    if key not in _segments:
        _segments[key] = Segment(inputs, step, layers, heads, config, replays)
    return _segments[key]


class Recompute(torch.autograd.Function):
    """Run a chunk in segments. From z (T, B, D), s (B, ...) and the carried kv (2, L, N, W, K),
    return the state after every token (T, B, ...) and the kv that the next chunk starts with."""

    @staticmethod
    def forward(ctx, segments, z, s, kv, count, *weights):
        T, W = len(z), kv.size(3)
        out = s.new_empty(T, *s.shape)
        kv = F.pad(kv, (0, 0, 0, T))  # (2, L, N, W + T, K)
        chunk = (z, s, kv, count, out)
        load_weights(segments, weights)
        ctx.random_states = []  # at the start of each segment, for its second run
        for t, segment in segments:
            end = segment.load(t, chunk)
            ctx.random_states.append(get_random_states(z.device))
            out[t:end], entries = graphed(segment.graphs, 'forward', segment.forward)
            kv[:, :, :, end : end + W] = entries
        ctx.segments = segments
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
        # gradients of the state and the entries after a segment, from later segments
        ds = torch.zeros_like(s)
        dkv = z.new_zeros(kv[:, :, :, len(z) :].shape)
        totals = [torch.zeros_like(x) for x in weights]
        load_weights(ctx.segments, weights)  # another model may have used them since the forward
        runs = list(zip(ctx.segments, ctx.random_states, strict=True))
        for (t, segment), states in reversed(runs):
            end = segment.load(t, chunk)
            segment.out_grad.copy_(out_grad[t:end])
            segment.out_grad[-1] += ds
            segment.kv_grad.copy_(dkv)
            with continuing_from(states, z.device):
                dz[t:end], ds, dkv, grads = graphed(segment.graphs, 'backward', segment.backward)
            torch._foreach_add_(totals, grads)
        # a copy of ds, which lies in the memory of a graph
        return None, dz, ds.clone(), None, None, *totals


def load_weights(segments: list[tuple[int, Segment]], weights: list[Tensor]) -> None:
    """Copy weights, in the order of tensors_of, into the segments."""
    for segment in {segment for _, segment in segments}:
        torch._foreach_copy_(tensors_of(segment.layers), list(weights))

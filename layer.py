"""One layer of E parallel experts: the equations of the language models. Edit them here.

A layer turns the state s into the next s. It also reads z, the token's normalized embedding.
Experts i = 1..E:

    u             = a s + b z                                   non-recurrent: u = s
    q_i, k_i, v_i = projections of RMSNorm(u)
    k, v          = sum(k_i) / sqrt(E), sum(v_i) / sqrt(E)      not shared: each expert its own
    y_i           = u + Wo_i attend(RMSNorm(q_i), RMSNorm(k), v)    with RoPE, over the cache
    h_i           = y_i + Down_i relu(Up_i RMSNorm(y_i))^2
    s             = A(RMSNorm(h_1), ..., RMSNorm(h_E))          non-recurrent: A(h_1, ..., h_E)

A is sum / sqrt(E) by default; `aggregate` has the other aggregations, `merge` the residuals. With
the aggregation 'mean', shared k and v are divided by E too. The first layer of the recurrent model
starts from the last layer's s at the token before (`step`), that of the non-recurrent model from s
= z. Experts share keys and values in the recurrent model, unless share_kv = False, but not in the
other.

Training in every mode, validation and decoding call `layer`. They differ in the class of the
linears (kernels.Linear or unroll.DeferredLinear), in the cache, in whether `graphs.fused`
compiles, and in the Triton forms that replace `attend` and `experts`. Autograd differentiates these
equations, except where a backward is written by hand: for attention over an unroll.Window, RMSNorm
on a CPU, the weights of a DeferredLinear and Triton forms.

The caches of keys and values are unroll.Window (training and validation of the recurrent model),
model.Sequence (whole sequences of the other) and decode.Ring (decoding). Each has `heads`
(kernels.Heads), `angles()`, the cos and sin of the rows' positions, and `attend(q, k, unrotated,
v)`, which stores keys and values and returns the attended values.

Shapes: N rows (B streams, or B * T tokens in the non-recurrent model), D width, E experts, H query
heads per expert, C key-value heads in the cache, M query heads per cache head, K head size, r width
of the router. Matrix products have the dtype `dtype`; s, z and sums over experts stay in the wider
dtype of the state.

Two choices that the paper leaves open (paper/readings.md lists all of them): every expert of a
layer reads the same u, and keys are normalized (`split_heads`) after they are summed over experts
(model.Layer.merged_qkv). The scale of the keys then does not depend on E, and the E key-value
matrices can be summed before the product without changing the result.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from graphs import fused, has_triton_form
from kernels import Linear, gate_weights, norm, rotate


class LayerWeights(NamedTuple):
    """Weights of one layer. A matrix W is a kernels.Linear: calling it on x returns x W^T, for each
    expert separately if W is a stack of E matrices. Every other weight is a tensor. To add a
    weight, or a setting that layers do not share, add a field here and fill it in
    model.Layer.weights."""

    wqkv: Linear  # ((C M + 2 C) K, D): queries, keys and values of all heads
    wo: Linear  # (E, D, H K)
    up: Linear  # (E, 4 D, D)
    down: Linear  # (E, D, 4 D)
    window: int  # W, the entries that a token sees, its own included
    a: Tensor | None = None  # (N, 1), recurrent only, in u = a s + b z
    b: Tensor | None = None  # (N, 1), recurrent only
    router_q: Linear | None = None  # (r, 2 D), routed aggregations only
    router_q_bias: Tensor | None = None  # (r,)
    router_keys: Linear | None = None  # (E, r)
    recurrent: bool = False  # whether the layer mixes s and z

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of matrix products."""
        return self.wqkv.w.dtype


# Each aggregation and the exponent of E in the scale of shared keys and values, which are
# E ** -exponent times their sum over experts.
AGGREGATIONS = {'sqrt_sum': 0.5, 'mean': 1.0, 'softmax_mean': 0.5, 'softmax_l2': 0.5}
RESIDUALS = ('expert', 'shared')  # of the non-recurrent model (see `merge`)


# ---- fused functions: one kernel each way when compiled ----------------------------------------


@fused
def mix(s: Tensor, z: Tensor, a: Tensor, b: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the experts' common input u = a s + b z (N, D), and RMSNorm(u) in `dtype`."""
    u = a * s + b * z
    return u, norm(u).to(dtype)


@fused
def norm_to(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return RMSNorm(x) in `dtype`."""
    return norm(x).to(dtype)


@fused
def split_heads(
    qkv: Tensor, cos: Tensor, sin: Tensor, C: int, M: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Split rows (N, (C M + 2 C) K) into heads, normalize queries and keys, and rotate them.

    cos, sin: the angles, (K,), or (N, 1, K) if rows differ. Returns queries (N, C M, K), rotated
    and divided by sqrt(K), the scale of the softmax; keys (N, C, K), rotated; the same keys before
    rotation, detached, which a cache carries to another position; values (N, C, K)."""
    K = cos.size(-1)
    qk, v = qkv.unflatten(-1, (-1, K)).split([C * M + C, C], -2)
    q, k = norm(qk.to(cos.dtype)).split([C * M, C], -2)
    k = k.to(qkv.dtype)
    q = rotate(q, cos, sin) / math.sqrt(K)
    return q.to(qkv.dtype), rotate(k, cos, sin).to(qkv.dtype), k.detach(), v


@fused
def add_norm(u: Tensor, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return y = u + x (E, N, D), attention's residual sum, and RMSNorm(y) in `dtype`."""
    y = u + x
    return y, norm(y).to(dtype)


@fused
def activation(x: Tensor) -> Tensor:
    """Apply squared ReLU, the FFN's nonlinearity."""
    return F.relu(x).square()


@fused
def merge(
    y: Tensor, x: Tensor, u: Tensor, gates: Tensor | None, aggregation: str, residual: str
) -> Tensor:
    """Aggregate the outputs h_i = y_i + x_i of E experts, (E, N, D), and return (N, D).

    residual: 'norm', the recurrent model's rule, returns A(norm(h_1), ..., norm(h_E)). 'expert'
    returns A(h_1, ..., h_E), in which every expert has added u; 'shared' adds u once and returns
    u + A(h_1 - u, ..., h_E - u). Raises ValueError for another name."""
    h = y + x
    if residual == 'norm':
        return aggregate(norm(h), gates, aggregation)
    if residual == 'expert':
        return aggregate(h, gates, aggregation)
    if residual == 'shared':
        return u + aggregate(h - u, gates, aggregation)
    raise ValueError(f'residual = {residual!r}: unknown')


def aggregate(h: Tensor, gates: Tensor | None, aggregation: str) -> Tensor:
    """Return A(h_1, ..., h_E), (..., D), for h (E, ..., D) and the router's gates a (..., E).

    sqrt_sum is sum(h_i) / sqrt(E); mean is sum(h_i) / E; softmax_mean is sum(a_i h_i) / sum(a_i);
    softmax_l2 is sum(a_i h_i) / sqrt(sum(a_i^2)). If all gates are equal, softmax_mean is mean and
    softmax_l2 is sqrt_sum. Raises ValueError for another name."""
    if aggregation == 'sqrt_sum':
        return h.sum(0) / math.sqrt(h.size(0))
    if aggregation == 'mean':
        return h.mean(0)
    weights = gate_weights(gates, aggregation)
    return (weights.movedim(-1, 0).unsqueeze(-1) * h).sum(0)


@fused
def router_input(z: Tensor, s: Tensor, dtype: torch.dtype) -> Tensor:
    """Return [z; s] (N, 2 D) in `dtype`."""
    return torch.cat([z, s], -1).to(dtype)


@fused
def add_bias(x: Tensor, bias: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x + bias in `dtype`."""
    return (x + bias).to(dtype)


@fused
def softmax_gates(scores: Tensor, r: int, dtype: torch.dtype) -> Tensor:
    """Return the softmax over experts of scores (N, E) / sqrt(r), in `dtype`."""
    return F.softmax(scores.to(dtype) / math.sqrt(r), -1)


# ---- one layer ---------------------------------------------------------------------------------


def route(w: LayerWeights, s: Tensor, z: Tensor) -> Tensor:
    """Return the router's gates (N, E): the softmax over experts i of q . k_i / sqrt(r), where
    q = Wq [z; s] + bq, k_i = Wk e_i + bk, and e_i is a learned embedding of expert i.

    The keys k_i do not depend on the tokens, so model.Layer.weights computes them."""
    q = w.router_q(router_input(z, s, w.dtype))  # (N, r)
    q = add_bias(q, w.router_q_bias, w.dtype)
    return softmax_gates(w.router_keys(q), q.size(-1), s.dtype)


@has_triton_form('attention')
def attend(qkv: Tensor, cache: object) -> Tensor:
    """Store the keys and values of the rows qkv (N, (C M + 2 C) K) in the cache, attend from their
    queries, and return the attended values (E, N, H K)."""
    q, k, unrotated, v = split_heads(qkv, *cache.angles(), cache.heads.C, cache.heads.M)
    return cache.attend(q, k, unrotated, v)


@has_triton_form('experts')
def experts(
    w: LayerWeights, u: Tensor, attended: Tensor, gates: Tensor | None, config: object
) -> Tensor:
    """Run output projection, FFN and aggregation: from u (N, D) and attended (E, N, H K), return
    the layer's output (N, D)."""
    y, x = add_norm(u, w.wo(attended), w.dtype)  # (E, N, D)
    x = w.down(activation(w.up(x)))
    residual = 'norm' if w.recurrent else config.residual
    return merge(y, x, u, gates, config.aggregation, residual)


def layer(w: LayerWeights, s: Tensor, z: Tensor, cache: object, config: object) -> Tensor:
    """Run one layer on the state s and the embedding z, (N, D) each, and return the next s (N, D).
    cache: this layer's keys and values; config: a model.ModelConfig."""
    gates = None if w.router_q is None else route(w, s, z)
    if w.recurrent:
        u, x = mix(s, z, w.a, w.b, w.dtype)
    else:
        u, x = s, norm_to(s, w.dtype)
    attended = attend(w.wqkv(x), cache)  # (E, N, H K)
    return experts(w, u, attended, gates, config)


def step(weights: list[LayerWeights], s: Tensor, z: Tensor, caches: list, config: object) -> Tensor:
    """Run all layers of the recurrent model on one token per stream, from the last layer's output s
    at the token before, and return the last layer's output at this token; s and z are (B, D)."""
    for w, cache in zip(weights, caches, strict=True):
        s = layer(w, s, z, cache, config)
    return s


@fused
def head_input(s: Tensor, config: object) -> Tensor:
    """Return the head's input (..., D) from the last layer's output s. config: for your edits."""
    return norm(s)

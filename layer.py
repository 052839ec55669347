"""One layer of E parallel experts: the equations of the language models, once, in ordinary calls.

The recurrent and the non-recurrent model, fast and plain training, compiled functions, CUDA graphs,
validation and decoding all call `layer`. They differ in the class of the linears (kernels.Linear or
unroll.DeferredLinear), in the cache (cache.py), and in whether `kernels.fused` compiles. Autograd
differentiates all of it. To change the model, edit this file.

Shapes: N rows (B streams, or B * T tokens in the non-recurrent model), D width, E experts, H query
heads per expert, C key-value heads in the cache, M query heads per cache head, K head size. dtype
is that of matrix products; s, z and sums over experts stay in the wider dtype of the state.

Where the paper leaves a choice (results/README.md lists all): every expert of a layer reads the
same u, and keys are normalized after their sum over experts. The scale of the keys then does not
depend on E, and the E key-value matrices can be summed before the product, exactly.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import Linear, fused, gate_weights, has_triton_form, norm, rotate


class LayerWeights(NamedTuple):
    """Weights of one layer. Matrices are linears, x -> x W^T, stacked over experts where W has E;
    everything else is a tensor, of the same shape in every mode. To add one, add a field here and
    fill it in model.Layer.weights."""

    wqkv: Linear  # ((C M + 2 C) K, D): queries, keys and values
    wo: Linear  # (E, D, H K)
    up: Linear  # (E, 4 D, D)
    down: Linear  # (E, D, 4 D)
    a: Tensor | None = None  # (N, 1), recurrent only: weight of the state in u = a s + b z
    b: Tensor | None = None  # (N, 1)
    router_q: Linear | None = None  # (r, 2 D), routed aggregations only
    router_q_bias: Tensor | None = None  # (r,)
    router_keys: Linear | None = None  # (E, r)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of matrix products."""
        return self.wqkv.w.dtype


# name: shared keys and values are the sum over experts times E ** -exponent (see `aggregate`)
AGGREGATIONS = {'sqrt_sum': 0.5, 'mean': 1.0, 'softmax_mean': 0.5, 'softmax_l2': 0.5}
RESIDUALS = ('expert', 'shared')  # of the non-recurrent model (see `merge`)


# ---- fused functions: one kernel each way when compiled ----------------------------------------


@fused
def mix(s: Tensor, z: Tensor, a: Tensor, b: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the experts' common input u = a s + b z (N, D), and its norm in `dtype`."""
    u = a * s + b * z
    return u, norm(u).to(dtype)


@fused
def norm_to(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the norm of x in `dtype`."""
    return norm(x).to(dtype)


@fused
def split_heads(
    qkv: Tensor, cos: Tensor, sin: Tensor, C: int, M: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Split rows (N, (C M + 2 C) K) into heads; normalize queries and keys, and rotate them by the
    angles cos and sin, (K,) or (N, 1, K).

    Returns queries (N, C M, K), rotated and divided by sqrt(K), the scale of the softmax; keys (N,
    C, K), rotated; the same keys before their rotation, detached, as a cache carries them; values
    (N, C, K)."""
    K = cos.size(-1)
    qk, v = qkv.unflatten(-1, (-1, K)).split([C * M + C, C], -2)
    q, k = norm(qk.to(cos.dtype)).split([C * M, C], -2)
    k = k.to(qkv.dtype)
    q = rotate(q, cos, sin) / math.sqrt(K)
    return q.to(qkv.dtype), rotate(k, cos, sin).to(qkv.dtype), k.detach(), v


@fused
def add_norm(u: Tensor, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the residual sum y = u + x (E, N, D), and its norm in `dtype`."""
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
    """Aggregate the experts' outputs y + x (E, N, D) -> (N, D). residual: 'norm' (recurrent: every
    output is normalized), 'expert' (each keeps its own residual) or 'shared' (u + A(f_1..f_E))."""
    h = y + x
    if residual == 'norm':
        return aggregate(norm(h), gates, aggregation)
    if residual == 'expert':
        return aggregate(h, gates, aggregation)
    if residual == 'shared':
        return u + aggregate(h - u, gates, aggregation)
    raise ValueError(f'residual = {residual!r}: not known')


def aggregate(h: Tensor, gates: Tensor | None, aggregation: str) -> Tensor:
    """Return A(h_1..h_E): h (E, ..., D) -> (..., D); gates (..., E) of the router.

    sqrt_sum: sum(h_i) / sqrt(E); mean; softmax_mean: sum(a_i h_i) / sum(a_i); softmax_l2:
    sum(a_i h_i) / sqrt(sum(a_i^2)). With the gates of all experts equal, both are the mean or the
    sum / sqrt(E)."""
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
    return (x + bias).to(dtype)


@fused
def softmax_gates(scores: Tensor, r: int, dtype: torch.dtype) -> Tensor:
    """Return the softmax over experts of scores (N, E) / sqrt(r)."""
    return F.softmax(scores.to(dtype) / math.sqrt(r), -1)


# ---- one layer ---------------------------------------------------------------------------------


def route(w: LayerWeights, s: Tensor, z: Tensor) -> Tensor:
    """Return the router's gates a = softmax(q.k_i / sqrt(r)), (N, E), with q = Wq [z; s] + bq and
    k_i = Wk e_i + bk, e_i a learned embedding of expert i."""
    q = add_bias(w.router_q(router_input(z, s, w.dtype)), w.router_q_bias, w.dtype)  # (N, r)
    return softmax_gates(w.router_keys(q), q.size(-1), s.dtype)


@has_triton_form('attention')
def attend(qkv: Tensor, cos: Tensor, sin: Tensor, cache: object) -> Tensor:
    """Add one row's keys and values to the cache and attend its queries -> (E, N, H K). cos, sin:
    the angles of these rows' positions in the cache."""
    q, k, unrotated, v = split_heads(qkv, cos, sin, cache.heads.C, cache.heads.M)
    return cache.attend(q, k, unrotated, v)


@has_triton_form('experts')
def experts(
    w: LayerWeights, u: Tensor, attended: Tensor, gates: Tensor | None, config: object
) -> Tensor:
    """Run output projection, FFN and aggregation: u (N, D), attended (E, N, H K) -> (N, D)."""
    y, x = add_norm(u, w.wo(attended), w.dtype)  # (E, N, D)
    x = w.down(activation(w.up(x)))
    residual = config.residual if w.a is None else 'norm'
    return merge(y, x, u, gates, config.aggregation, residual)


def layer(
    w: LayerWeights,
    s: Tensor,
    z: Tensor,
    cos: Tensor,
    sin: Tensor,
    cache: object,
    config: object,
) -> Tensor:
    """Run one layer: state s and embedding z (N, D) -> the next s (N, D).

    cos, sin: RoPE angles of the rows; cache: where keys and values go, with `heads` (kernels.Heads)
    and `attend(q, k, unrotated, v)`; config: the model's (model.ModelConfig)."""
    gates = None if w.router_q is None else route(w, s, z)
    if w.a is None:  # non-recurrent
        u, x = s, norm_to(s, w.dtype)
    else:
        u, x = mix(s, z, w.a, w.b, w.dtype)
    attended = attend(w.wqkv(x), cos, sin, cache)  # (E, N, H K)
    return experts(w, u, attended, gates, config)


def step(
    weights: list[LayerWeights],
    s: Tensor,
    z: Tensor,
    cos: Tensor,
    sin: Tensor,
    caches: list,
    config: object,
) -> Tensor:
    """Run all layers on one token per stream of the recurrent model: s is the last layer's output
    at the token before, (B, D) -> the last layer's output at this token."""
    for w, cache in zip(weights, caches, strict=True):
        s = layer(w, s, z, cos, sin, cache, config)
    return s


def head_input(s: Tensor, config: object) -> Tensor:
    """Return what the head reads of the last layer's output s (..., D)."""
    return norm(s)

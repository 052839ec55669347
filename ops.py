"""Operations that the models are built from: linears, RMSNorm, RoPE, attention heads, aggregation.

Matrix products are computed in `dtype` (bfloat16 under autocast); states, norms, softmax and sums
stay in the dtype of the state, called `state_dtype` (fp32 in training).
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

EPS = 1e-6  # in every RMSNorm and in the denominators of routed aggregations
ROPE_BASE = 10000.0


def matmul_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of matrix products with x: autocast's where it is enabled, else x's."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


# ---- norms, RoPE, head layout ------------------------------------------------------------------


class RMSNorm(torch.autograd.Function):
    """RMSNorm with a closed-form backward, for a CPU; autograd would take a dozen passes over x."""

    @staticmethod
    def forward(ctx, x):
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        r = length.square_().div_(x.size(-1)).add_(EPS).rsqrt_()
        y = x * r
        ctx.save_for_backward(y, r)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        y, r = ctx.saved_tensors
        along = (dy * y).sum(-1, keepdim=True)
        return torch.addcmul(dy, y, along, value=-1 / y.size(-1)).mul_(r)


def norm(x: Tensor) -> Tensor:
    """Apply a parameter-free RMSNorm over the last dimension."""
    eager = torch.is_grad_enabled() and not torch.compiler.is_compiling()
    if eager and not x.is_cuda:
        return RMSNorm.apply(x)
    return F.rms_norm(x, (x.size(-1),), eps=EPS)


def rope_table(n: int, K: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin, (n, K) each, of positions 0 .. n - 1, on the device of `like` and in its
    dtype (at least fp32). The sine carries the sign of each half: see `rotate`."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    frequency = ROPE_BASE ** (-torch.arange(0, K, 2, device=like.device, dtype=dtype) / K)
    angle = torch.arange(n, device=like.device, dtype=dtype)[:, None] * frequency
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE to x (..., K), pairing dimension j with j + K/2; cos and sin broadcast over x. The
    result has the dtype of cos. rotate(x, cos, -sin) is the inverse."""
    x = x.to(cos.dtype)
    # x.roll(K // 2, -1), in a form that compiles to loads of whole vectors
    swapped = x.unflatten(-1, (2, -1)).roll(1, -2).flatten(-2)
    return torch.addcmul(x * cos, swapped, sin)


class Heads(NamedTuple):
    """Layout of the attention heads of a layer."""

    E: int  # experts
    G: int  # key-value heads per expert
    R: int  # query heads per key-value head
    K: int  # head size
    shared: bool  # all experts share one cache

    @property
    def C(self) -> int:
        """Return the number of key-value heads in the cache."""
        return self.G if self.shared else self.E * self.G

    @property
    def M(self) -> int:
        """Return the number of query heads per key-value head in the cache."""
        return self.E * self.R if self.shared else self.R


def to_experts(x: Tensor, heads: Heads) -> Tensor:
    """Rearrange attended values (B*C, M, K) into rows per expert, (E, B, H*K); possibly a view."""
    E, G, R, K, shared = heads
    if shared:
        return x.reshape(-1, G, E, R, K).permute(2, 0, 1, 3, 4).flatten(2)
    return x.reshape(-1, E, G, R, K).transpose(0, 1).flatten(2)


def to_cache_heads(x: Tensor, heads: Heads) -> Tensor:
    """Rearrange rows per expert (E, B, H*K) into (B*C, M, K): the inverse of to_experts."""
    x = x.unflatten(2, (heads.G, heads.R, heads.K))  # (E, B, G, R, K)
    x = x.permute(1, 2, 0, 3, 4) if heads.shared else x.transpose(0, 1)
    return x.reshape(-1, heads.M, heads.K)


def in_window(age: Tensor, count: Tensor | int, width: int) -> Tensor:
    """Return whether a token sees an entry of its cache: one of the last `width`, if there are that
    many. age: tokens since the entry, 0 for the token's own; count: entries so far, that one
    included."""
    return (age >= 0) & (age < width) & (age < count)


def window_mask(count: Tensor, T: int, width: int) -> Tensor:
    """Return which of `width` cached and T new slots each new token sees, (B, 1, T, width + T)
    bool. Of the cached slots, the last `count` (B,) are filled."""
    slot = torch.arange(width + T, device=count.device)
    t = torch.arange(T, device=count.device)[:, None]
    return in_window(width + t - slot, count[:, None, None, None] + t + 1, width)


# ---- aggregation -------------------------------------------------------------------------------


def gate_weights(gates: Tensor, aggregation: str) -> Tensor:
    """Return the coefficients (..., E) of the experts' outputs in a routed aggregation. Raises
    ValueError for an unknown name."""
    if aggregation == 'softmax_mean':
        return gates / (gates.sum(-1, keepdim=True) + EPS)
    if aggregation == 'softmax_l2':
        return gates / (gates.square().sum(-1, keepdim=True) + EPS).sqrt()
    raise ValueError(f'aggregation = {aggregation!r}: unknown')


# ---- linears -----------------------------------------------------------------------------------


def linear(x: Tensor, w: Tensor) -> Tensor:
    """Return x @ w^T: (N, out) for x (N, in) and w (out, in), or (E, N, out) for stacks of E."""
    if w.dim() == 2:
        return F.linear(x, w)
    if w.size(0) == 1:  # bmm would copy, and indexing would make a full-size zero gradient
        return F.linear(x.squeeze(0), w.squeeze(0)).unsqueeze(0)
    if x.size(1) == 1 and not w.is_cuda and w.dtype != torch.bfloat16:
        return torch.bmm(w, x.mT).mT  # 1.5 times as fast for single rows on a CPU
    return torch.bmm(x, w.mT)


class Linear:
    """y = x W^T without bias, batched over experts where W is (E, out, in). Autograd computes a
    gradient of W for every call, and sums them, in bf16 under autocast; unroll.DeferredLinear
    computes one for many calls and sums them in fp32."""

    def __init__(self, weight: Tensor, dtype: torch.dtype):
        """weight: (out, in) or (E, out, in); dtype: of the product."""
        self.weight = weight
        self.w = weight.to(dtype)

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.w)


def matmul_into(
    a: Tensor, b: Tensor, out_dtype: torch.dtype, total: Tensor | None = None
) -> Tensor:
    """Return the product a @ b of matrices, or of stacks of them, in the dtype `out_dtype`. If
    there is a `total` of that dtype, add the product to it in place and return it.

    On a GPU, products of bf16 matrices stay in fp32; elsewhere they are rounded to bf16 first."""
    stacked = a.dim() == 3
    if a.is_cuda and a.dtype != out_dtype:
        if total is None:
            return (torch.bmm if stacked else torch.mm)(a, b, out_dtype=out_dtype)
        add = torch.baddbmm if stacked else torch.addmm
        return add(total, a, b, out_dtype=out_dtype, out=total)
    if total is None:
        return (a @ b).to(out_dtype)
    if a.dtype != out_dtype:
        return total.add_(a @ b)
    return total.baddbmm_(a, b) if stacked else total.addmm_(a, b)

"""Head and loss of the language models, in slices of rows, so that few logits exist at a time."""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from graphs import fused, has_triton_form
from kernels import compute_dtype, matmul_into

SOFTCAP = 15.0  # bound of the logits, see `softcap`
# Logits in memory at a time: 64 MiB in fp32 on a CPU (and on Apple's GPUs), 512 MiB in bf16 on a
# GPU.
LOGITS_PER_SLICE = {'cpu': 2**24, 'cuda': 2**28}


class Loss(NamedTuple):
    """Mean losses per token, in nats."""

    objective: Tensor  # minimized by training
    cross_entropy: Tensor  # reported


def softcap(x: Tensor) -> Tensor:
    """Return SOFTCAP * tanh(x / SOFTCAP), which lies between -SOFTCAP and SOFTCAP."""
    return SOFTCAP * torch.tanh(x / SOFTCAP)


@fused
def losses(logits: Tensor, targets: Tensor, config: object) -> tuple[Tensor, Tensor]:
    """Return the training objective and the cross-entropy, summed over rows, in nats. logits (N, V)
    are those before the soft-cap (`scores`, after it, are what LanguageModel returns as logits);
    targets (N,); config: the model's, for settings of the objective."""
    scores = softcap(logits.to(torch.promote_types(logits.dtype, torch.float32)))
    cross_entropy = F.cross_entropy(scores, targets, reduction='sum')
    # Add terms that only training sees, such as a z-loss of the scores, here, summed over rows: the
    # caller divides by their number.
    objective = cross_entropy
    return objective, cross_entropy


@has_triton_form('loss')
def slice_loss(
    logits: Tensor, targets: Tensor, scale: float, config: object
) -> tuple[Tensor, Tensor, Tensor]:
    """Return objective and cross-entropy as `losses`, and `scale` times the gradient of the
    objective with respect to the logits, in their dtype."""
    with torch.enable_grad():
        logits = logits.detach().requires_grad_()
        objective, cross_entropy = losses(logits, targets, config)
        (grad,) = torch.autograd.grad(objective, logits, torch.full_like(objective, scale))
    return objective.detach(), cross_entropy.detach(), grad


def rows_per_slice(N: int, V: int, device: str) -> int:
    """Return the number of rows per slice of N rows; device: 'cpu', 'cuda' or 'mps'."""
    min_slices = math.ceil(N * V / LOGITS_PER_SLICE.get(device, LOGITS_PER_SLICE['cpu']))
    # prefer slices of equal size: a shorter last one would be compiled separately
    for slices in range(min_slices, 2 * min_slices):
        if N % slices == 0:
            return N // slices
    return math.ceil(N / min_slices)


class HeadLoss(torch.autograd.Function):
    """Compute head and mean losses. If gradients are wanted, the forward computes them too, while
    it has the logits; if not, both losses are the cross-entropy."""

    @staticmethod
    def forward(ctx, x, weight, targets, dtype, config, wants_grads):
        N = len(x)
        rows = rows_per_slice(N, len(weight), x.device.type)
        w = weight.to(dtype)
        total = torch.zeros(2, dtype=x.dtype, device=x.device)
        if wants_grads:
            dx, dw = torch.empty_like(x), torch.zeros_like(weight)
            ctx.save_for_backward(dx, dw)
        for i in range(0, N, rows):
            x_i, targets_i = x[i : i + rows].to(dtype), targets[i : i + rows]
            logits = x_i @ w.t()
            if not wants_grads:
                total += losses(logits, targets_i, config)[1]
                continue
            objective, cross_entropy, dlogits = slice_loss(logits, targets_i, 1 / N, config)
            total += torch.stack([objective, cross_entropy])
            dx[i : i + rows] = dlogits @ w
            matmul_into(dlogits.t(), x_i, dw.dtype, total=dw)
        objective, cross_entropy = (total / N).unbind()
        ctx.mark_non_differentiable(cross_entropy)
        return objective, cross_entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, g, _):
        dx, dw = ctx.saved_tensors
        return g * dx, g * dw, None, None, None, None


def head_loss(x: Tensor, weight: Tensor, targets: Tensor, config: object) -> Loss:
    """Return the mean losses of the logits x @ weight^T. x (N, D), weight (V, D), targets (N,)
    int64. Where no gradient is wanted, both losses are the cross-entropy."""
    wants_grads = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    dtype = compute_dtype(x)
    with torch.autocast(x.device.type, enabled=False):
        return Loss(*HeadLoss.apply(x, weight, targets, dtype, config, wants_grads))

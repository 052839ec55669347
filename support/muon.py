"""Muon for stacks of matrices.

Muon (Keller Jordan, 2024) replaces the momentum of a matrix by a nearly orthogonal matrix with the
same singular vectors, found by five Newton-Schulz iterations. The weights of E experts are stacked
in one tensor (E, out, in), and each slice is updated as a separate matrix, as by
torch.optim.Muon(adjust_lr_fn='original'). The differences are that

- all matrices with the same two sides share one batched iteration;
- the iteration runs in bfloat16 only on a device where that is fast, and in float32 elsewhere;
- weight decay is cautious: it applies only where it and the update push a weight the same way;
- a step can be captured in a CUDA graph (the learning rate may be a 0-dim tensor);
- several ranks share the iterations and gather the results. Gradients must be equal on all ranks;
  weights and momentum then stay equal bit for bit.
"""

import math
from typing import NamedTuple

from support.script import UserError

import torch
import torch.distributed as dist

from support.compiling import fused
from support.ranks import agree, bf16_is_fast

# a, b, c of the quintic a x + b x^3 + c x^5, from Jordan's post: they have the steepest slope at 0
# for which iterating maps singular values in (0, 1] to about [0.7, 1.2].
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPS = 1e-7  # lower bound of the norm, so that a zero gradient gives a zero update, not NaN
MAX_BATCH = 2**26  # elements per batched iteration, which needs memory for about 5 times as many


def orthogonalize(x: torch.Tensor) -> torch.Tensor:
    """Return nearly orthogonal matrices with the singular vectors of x, by five steps of
    Newton-Schulz in x's dtype. x: (N, rows, columns) with rows <= columns."""
    a, b, c = COEFFICIENTS
    norm = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True)
    x = x / norm.clamp(min=EPS)  # now the Frobenius norm is 1, and the spectral norm at most 1
    for _ in range(5):
        gram = x @ x.mT  # (N, rows, rows)
        # x = a x + (b gram + c gram^2) x
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def transpose_to_wide(x: torch.Tensor) -> torch.Tensor:
    """Return x (..., out, in) as (N, rows, columns) with rows <= columns, transposed if needed: the
    Gram matrix is then the smaller of the two."""
    x = x.reshape(-1, *x.shape[-2:])
    return x.mT if x.size(1) > x.size(2) else x


class Muon(torch.optim.Optimizer):
    """Muon for parameters of shape (..., out, in); leading dimensions stack independent matrices.

    lr is a float, or a 0-dim tensor that may live on the device. A matrix's update is scaled by
    sqrt(max(1, out / in)). Weight decay is cautious: w -= lr * weight_decay * w where the update
    (the part subtracted) and w, as it was before the step, have the same sign, and no decay where
    either is zero. The state is 'momentum_buffer', of the parameter's shape and dtype."""

    def __init__(self, params, lr=0.02, momentum=0.95, weight_decay=0.01):
        """Raises UserError if the ranks would exchange matrices of different dtypes."""
        super().__init__(params, {'lr': lr, 'momentum': momentum, 'weight_decay': weight_decay})
        devices = {p.device for group in self.param_groups for p in group['params']}
        if not agree(*map(bf16_is_fast, devices)):
            raise UserError('only some of the ranks are fast at bfloat16: use devices of one kind')

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient."""
        batches = self.orthogonalize_shares()
        self.gather(batches)
        self.apply(batches)

    # The three parts of a step. A trainer captures the first and the last in CUDA graphs; `gather`,
    # which communicates, stays outside.

    @torch.no_grad()
    def orthogonalize_shares(self) -> list['Batch']:
        """Update the momentum and orthogonalize this rank's share of the matrices. Return a Batch
        for each pair of sides in each parameter group."""
        batches = []
        for group in self.param_groups:
            by_sides = {}
            for p in group['params']:
                if p.grad is not None:
                    by_sides.setdefault(tuple(sorted(p.shape[-2:])), []).append(p)
            batches += [self.make_batch(params, group) for params in by_sides.values()]
        return batches

    def gather(self, batches: list['Batch']) -> None:
        """Fill every batch with the shares of all ranks. With one rank there is nothing to do."""
        if dist.is_initialized():
            # torch 2.11 has only the old name, of which later ones warn
            gather = getattr(dist, 'all_gather_single', None) or dist.all_gather_into_tensor
            for batch in batches:
                gather(batch.matrices, batch.share)

    @torch.no_grad()
    def apply(self, batches: list['Batch']) -> None:
        """Apply the gathered updates, and cautious decay, to the parameters."""
        for batch in batches:
            lr, decay = batch.group['lr'], batch.group['weight_decay']
            counts = [count_matrices(p) for p in batch.params]
            updates = batch.matrices[: sum(counts)].split(counts)
            for p, ortho in zip(batch.params, updates, strict=True):
                change = fused(change_weights) if pays_to_compile(p, lr) else change_weights
                change(p, ortho, lr, decay)

    def make_batch(self, params: list[torch.nn.Parameter], group: dict) -> 'Batch':
        """Update the momentum of parameters that have the same two sides, orthogonalize this rank's
        share of it, at most MAX_BATCH elements at a time (but at least one matrix), and return
        both as a Batch."""
        rank, world = 0, 1
        if dist.is_initialized():
            rank, world = dist.get_rank(), dist.get_world_size()
        dtype = torch.bfloat16 if bf16_is_fast(params[0].device) else torch.float32
        counts = [count_matrices(p) for p in params]
        n = math.ceil(sum(counts) / world)  # per rank; the last shares may be padded with zeros
        sides = sorted(params[0].shape[-2:])
        matrices = params[0].new_zeros(n * world, *sides, dtype=dtype)
        for p, out in zip(params, matrices[: sum(counts)].split(counts), strict=True):
            if not self.state[p]:
                self.state[p]['momentum_buffer'] = torch.zeros_like(p)
            buffer = self.state[p]['momentum_buffer']
            average = fused(average_grad) if pays_to_compile(p, group['lr']) else average_grad
            average(p.grad, buffer, out, group['momentum'])
        share = matrices[rank * n : (rank + 1) * n]
        if world > 1:
            share = share.clone()  # `gather` sends it while `matrices` receives
        for part in share.split(max(1, MAX_BATCH // share[0].numel())):
            part.copy_(orthogonalize(part))
        return Batch(params=params, group=group, matrices=matrices, share=share)


class Batch(NamedTuple):
    """Parameters whose matrices have the same two sides, and their orthogonalized momentum."""

    params: list[torch.nn.Parameter]
    group: dict  # their optimizer settings
    matrices: torch.Tensor  # (N, rows, columns) of all ranks; the end may be padding
    share: torch.Tensor  # (N / world, rows, columns) of this rank


def is_matrix(p: torch.Tensor) -> bool:
    """Return whether p is a matrix or a stack of matrices, not of vectors or scalars."""
    return p.dim() > 1 and min(p.shape[-2:]) > 1


def count_matrices(p: torch.nn.Parameter) -> int:
    """Return the number of matrices stacked in p (..., out, in)."""
    return p[..., 0, 0].numel()


def pays_to_compile(p: torch.nn.Parameter, lr: float | torch.Tensor) -> bool:
    """Return whether to compile the elementwise passes over p: on a GPU, if the learning rate is a
    tensor. A number would become a constant of the code, and every step would compile again."""
    return p.is_cuda and isinstance(lr, torch.Tensor)


def average_grad(
    grad: torch.Tensor, buffer: torch.Tensor, out: torch.Tensor, momentum: float
) -> None:
    """Average grad into the momentum `buffer`, and write Nesterov's momentum, which is to be
    orthogonalized, to `out` (N, rows, columns)."""
    # an average differs from a sum only in scale, which orthogonalization removes
    buffer.lerp_(grad, 1 - momentum)
    out.copy_(transpose_to_wide(grad.lerp(buffer, momentum)))


def change_weights(
    w: torch.Tensor, ortho: torch.Tensor, lr: float | torch.Tensor, decay: float
) -> None:
    """Apply the update `ortho` (N, rows, columns), and cautious decay, to the weights w (..., out,
    in)."""
    out_features, in_features = w.shape[-2:]
    update = (ortho.mT if out_features > in_features else ortho).reshape(w.shape).to(w.dtype)
    step = update * (lr * math.sqrt(max(1, out_features / in_features)))
    if decay:
        step = step + torch.where(update * w > 0, w, 0) * (lr * decay)
    w.sub_(step)

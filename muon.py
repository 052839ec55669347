"""Muon for stacked matrices, and the learning-rate schedule.

Muon (Keller Jordan, 2024) replaces the momentum of a matrix by a nearly orthogonal matrix with the same singular vectors, found by five
Newton-Schulz iterations. The weights of E experts are stacked in one tensor (E, out, in), and so every slice is one matrix to Muon.
On each slice this is torch.optim.Muon(adjust_lr_fn='original'): same coefficients, eps and bfloat16 iteration. What differs:

- All matrices with the same two sides, of all parameters, go through one batched iteration: three batched GEMMs each, whatever the
  number of experts and levels. (On 2 CPU cores, 16 matrices of 256 x 256: 12 ms batched, 40 ms one by one.)
- Weight decay is cautious: only where it and the update push a weight the same way.
- `step` never waits for the device, and the learning rate may be a 0-dim tensor, so that a step can be captured in a CUDA graph.
- With several ranks (torch.distributed is initialised) the iterations are shared out and their results gathered, in bfloat16. Gradients
  must be equal on all ranks; weights and momentum then are, and a checkpoint does not depend on the number of ranks.

Gradient clipping: torch.nn.utils.get_total_norm and clip_grads_with_norm_ do what is needed, on the device.
"""

import math
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

COEFFICIENTS = (
    3.4445,
    -4.7750,
    2.0315,
)  # of the quintic: steepest slope at 0 that still maps (0, 1] into about [0.7, 1.2]
EPS = 1e-7  # the floor of the norm: a zero gradient gives a zero update, not NaN
MAX_BATCH = (
    2**26
)  # elements of one batched iteration: bounds its scratch memory, about 10 bytes an element


def orthogonalize(x: torch.Tensor, ns_steps: int = 5) -> torch.Tensor:
    """Newton-Schulz on a stack of matrices x (N, rows, columns) with rows <= columns -> bfloat16 (N, rows, columns)."""
    a, b, c = COEFFICIENTS
    x = x.bfloat16()
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(
        min=EPS
    )  # spectral norm <= Frobenius norm = 1
    for _ in range(ns_steps):
        gram = x @ x.mT  # (N, rows, rows)
        x = torch.baddbmm(
            x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a
        )  # a x + (b gram + c gram^2) x
    return x


def begin_orthogonalize(x: torch.Tensor, ns_steps: int) -> tuple[torch.Tensor, dist.Work | None]:
    """orthogonalize, each of several ranks a share of the N matrices, padded to be equal -> the result, and the message to wait for before
    it is read (None with one rank)."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world == 1:
        return orthogonalize(x, ns_steps), None
    share, (N, *sides) = -(-x.size(0) // world), x.shape
    mine, part = (
        x[dist.get_rank() * share :][:share],
        x.new_zeros(share, *sides, dtype=torch.bfloat16),
    )
    if len(mine):
        part[: len(mine)] = orthogonalize(mine, ns_steps)
    whole = part.new_empty(world * share, *sides)
    return whole[:N], dist.all_gather(list(whole.split(share)), part, async_op=True)


def stacked(x: torch.Tensor) -> torch.Tensor:
    """A view (N, out, in) of x (..., out, in), for in-place work."""
    return x.unsqueeze(0) if x.dim() == 2 else x.view(-1, *x.shape[-2:])


def batches(
    params: list[torch.nn.Parameter], max_batch: int
) -> Iterator[list[tuple[torch.nn.Parameter, int, int]]]:
    """The matrices of `params` in lists of (param, first, last slice): one list has one pair of sides, on one device, and at most
    max_batch elements (but at least one matrix). The order depends on the parameters only, so a resumed run repeats it."""
    shapes = {}
    for p in params:
        shapes.setdefault((min(p.shape[-2:]), max(p.shape[-2:]), p.device), []).append(p)
    for (rows, columns, _), members in shapes.items():
        capacity = max(1, max_batch // (rows * columns))
        batch, free = [], capacity
        for p in members:
            first, count = 0, p.numel() // (rows * columns)
            while first < count:
                last = min(count, first + free)
                batch.append((p, first, last))
                free, first = free - (last - first), last
                if free == 0:
                    yield batch
                    batch, free = [], capacity
        if batch:
            yield batch


class Muon(torch.optim.Optimizer):
    """Muon for parameters of shape (..., out, in); leading dimensions stack independent matrices. No empty parameters.

    lr: a float, or a 0-dim tensor that may live on the device. The update of a matrix is scaled by sqrt(max(1, out / in)).
    weight_decay: cautious, w -= lr * weight_decay * w where the update (the part subtracted) and w have the same sign, with w from
    before the step; where either is zero there is no decay. State: 'momentum_buffer', of the parameter's shape and dtype.
    Raises ValueError for a parameter that is no stack of real matrices."""

    def __init__(
        self, params, lr=0.02, momentum=0.95, nesterov=True, ns_steps=5, weight_decay=0.01
    ):
        super().__init__(
            params,
            dict(
                lr=lr,
                momentum=momentum,
                nesterov=nesterov,
                ns_steps=ns_steps,
                weight_decay=weight_decay,
            ),
        )
        for p in (p for group in self.param_groups for p in group['params']):
            if p.dim() < 2 or p.numel() == 0 or not p.is_floating_point():
                raise ValueError(
                    f'Muon needs real matrices (..., out, in), got shape {tuple(p.shape)}, {p.dtype}'
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [p for p in group['params'] if p.grad is not None]
            for p in params:
                if not self.state[p]:
                    self.state[p]['momentum_buffer'] = torch.zeros_like(p)
            begun = []  # a batch's results travel between ranks while the next one iterates
            for batch in batches(params, MAX_BATCH):
                begun.append((batch, *self.begin(batch, group)))
                if len(begun) > 1 or begun[0][2] is None:
                    self.end(*begun.pop(0), group)
            for rest in begun:
                self.end(*rest, group)
        return loss

    def begin(
        self, batch: list[tuple[torch.nn.Parameter, int, int]], group: dict
    ) -> tuple[torch.Tensor, dist.Work | None]:
        """Momentum and one batched Newton-Schulz for a list from `batches`: of begin_orthogonalize."""
        grads = [stacked(p.grad.contiguous())[i:j] for p, i, j in batch]
        buffers = [stacked(self.state[p]['momentum_buffer'])[i:j] for p, i, j in batch]
        torch._foreach_lerp_(
            buffers, grads, 1 - group['momentum']
        )  # an average, not a sum: the scale is lost in the iteration anyway
        updates = (
            torch._foreach_lerp(grads, buffers, group['momentum']) if group['nesterov'] else buffers
        )
        wide = [
            x.mT if x.size(1) > x.size(2) else x for x in updates
        ]  # rows <= columns: the smaller Gram matrix
        return begin_orthogonalize(torch.cat([x.bfloat16() for x in wide]), group['ns_steps'])

    def end(
        self,
        batch: list[tuple[torch.nn.Parameter, int, int]],
        ortho: torch.Tensor,
        message: dist.Work | None,
        group: dict,
    ) -> None:
        """The change of the weights."""
        if message is not None:
            message.wait()
        lr = group['lr']
        for (p, i, j), part in zip(batch, ortho.split([j - i for _, i, j in batch]), strict=True):
            out_features, in_features = p.shape[-2:]
            weights, part = stacked(p)[i:j], part.mT if out_features > in_features else part
            change = part.to(p.dtype) * (lr * math.sqrt(max(1, out_features / in_features)))
            if group['weight_decay']:
                change += torch.where(part * weights > 0, weights, 0) * (lr * group['weight_decay'])
            weights.sub_(change)


def lr_at(step: int, max_iters: int, warmup_iters: int, final_ratio: float = 0.01) -> float:
    """The learning rate of update `step` (0 .. max_iters - 1) as a fraction of its peak.

    Linear warm-up: 1 / warmup_iters at step 0 and 1 at step warmup_iters - 1. Then half a cosine, down to final_ratio at the last
    update and after it. A run not longer than its warm-up only warms up."""
    if step < warmup_iters:
        return (step + 1) / warmup_iters
    progress = min(1.0, (step + 1 - warmup_iters) / max(1, max_iters - warmup_iters))
    return final_ratio + (1 - final_ratio) * 0.5 * (1 + math.cos(math.pi * progress))

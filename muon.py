"""
Muon for stacks of matrices, the learning-rate schedule, and which optimizer trains which parameter.

Muon (Keller Jordan, 2024) replaces the momentum of a matrix by a nearly orthogonal matrix with the
same singular vectors, found by five Newton-Schulz iterations. The weights of E experts are stacked
in one tensor (E, out, in), and each slice is a matrix of its own: its update equals that of
torch.optim.Muon(adjust_lr_fn='original'). The differences are that

- all matrices with the same two sides share one batched iteration;
- the iteration runs in bfloat16 only on a device where that is fast, and in float32 elsewhere;
- weight decay is cautious: it applies only where it and the update push a weight the same way;
- a step can be captured in a CUDA graph (the learning rate may be a 0-dim tensor);
- several ranks share the iterations and gather the results. Gradients must be equal on all ranks;
  weights and momentum then stay equal bit for bit.
"""

import math
from collections.abc import Callable

import torch
import torch.distributed as dist

from kernels import bf16_is_fast, compiled

# Of the quintic a x + b x^3 + c x^5: the steepest slope at 0 that still maps (0, 1] into about
# [0.7, 1.2]. From Jordan's post.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPS = 1e-7  # lower bound of the norm: a zero gradient gives a zero update, not NaN
MAX_BATCH = 2**26  # elements of one batched iteration, whose scratch takes about 5 times its input


def orthogonalize(x: torch.Tensor, ns_steps: int = 5) -> torch.Tensor:
    """Return nearly orthogonal matrices with the singular vectors of x, by Newton-Schulz in x's
    dtype. x: (N, rows, columns) with rows <= columns."""
    a, b, c = COEFFICIENTS
    norm = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True)
    x = x / norm.clamp(min=EPS)  # the spectral norm is at most the Frobenius norm, now 1
    for _ in range(ns_steps):
        gram = x @ x.mT  # (N, rows, rows)
        # x = a x + (b gram + c gram^2) x
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def orthogonalize_shared(x: torch.Tensor, ns_steps: int) -> tuple[torch.Tensor, dist.Work | None]:
    """Orthogonalize x (N, rows, columns) in place, at most MAX_BATCH elements at a time.

    With several ranks each iterates an equal share of the N matrices. Return the result and the
    all-gather to wait for before reading it (None with one rank)."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    N, size = len(x), max(1, MAX_BATCH // x[0].numel())
    if world > 1:
        x = torch.cat([x, x.new_zeros(-N % world, *x.shape[1:])])  # equal shares
    share = x.chunk(world)[dist.get_rank() if world > 1 else 0]
    for part in share.split(size):
        part.copy_(orthogonalize(part, ns_steps))
    if world == 1:
        return x, None
    return x[:N], dist.all_gather(list(x.chunk(world)), share.clone(), async_op=True)


def wide(x: torch.Tensor) -> torch.Tensor:
    """Return x (..., out, in) as (N, rows, columns) with rows <= columns: the Gram matrix of the
    shorter side is the smaller one."""
    x = x.reshape(-1, *x.shape[-2:])
    return x.mT if x.size(1) > x.size(2) else x


class Muon(torch.optim.Optimizer):
    """Muon for parameters of shape (..., out, in); leading dimensions stack independent matrices.

    lr is a float, or a 0-dim tensor that may live on the device. A matrix's update is scaled by
    sqrt(max(1, out / in)). Weight decay is cautious: w -= lr * weight_decay * w where the update
    (the part subtracted) and w, as it was before the step, have the same sign, and no decay where
    either is zero. The state is 'momentum_buffer', of the parameter's shape and dtype. Raises
    ValueError for a parameter that is not a stack of real matrices, or is empty."""

    compile = False  # whether `average` and `change` are compiled, on a GPU

    def __init__(
        self, params, lr=0.02, momentum=0.95, nesterov=True, ns_steps=5, weight_decay=0.01
    ):
        settings = {'lr': lr, 'momentum': momentum, 'nesterov': nesterov}
        super().__init__(params, settings | {'ns_steps': ns_steps, 'weight_decay': weight_decay})
        for p in (p for group in self.param_groups for p in group['params']):
            if p.dim() < 2 or p.numel() == 0 or not p.is_floating_point():
                shape = f'got shape {tuple(p.shape)}, {p.dtype}'
                raise ValueError(f'Muon needs real matrices (..., out, in), {shape}')

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            by_sides = {}
            for p in group['params']:
                if p.grad is not None:
                    by_sides.setdefault(tuple(sorted(p.shape[-2:])), []).append(p)
            # the results of one batch travel between ranks while the next one iterates
            batches = [(params, *self.iterate(params, group)) for params in by_sides.values()]
            for params, results, gathering in batches:
                if gathering is not None:
                    gathering.wait()
                for p, ortho in zip(params, results, strict=True):
                    self.maybe_compiled(change, p)(p, ortho, group['lr'], group['weight_decay'])

    def iterate(
        self, params: list[torch.nn.Parameter], group: dict
    ) -> tuple[list[torch.Tensor], dist.Work | None]:
        """Update the momentum of parameters that have the same two sides and orthogonalize it in
        one batch. Return a tensor (N, rows, columns) for each of them, and the all-gather to wait
        for before reading it."""
        dtype = torch.bfloat16 if bf16_is_fast(params[0].device) else torch.float32
        sizes = [p[..., 0, 0].numel() for p in params]  # matrices in each parameter
        stack = params[0].new_empty(sum(sizes), *sorted(params[0].shape[-2:]), dtype=dtype)
        for p, out in zip(params, stack.split(sizes), strict=True):
            if not self.state[p]:
                self.state[p]['momentum_buffer'] = torch.zeros_like(p)
            buffer = self.state[p]['momentum_buffer']
            update = self.maybe_compiled(average, p)
            update(p.grad, buffer, out, group['momentum'], group['nesterov'])
        ortho, gathering = orthogonalize_shared(stack, group['ns_steps'])
        return ortho.split(sizes), gathering

    def maybe_compiled(self, f: Callable, p: torch.nn.Parameter) -> Callable:
        """Return f, compiled into one kernel if that pays: on a GPU, and with the learning rate in
        a tensor (a number would be compiled in, and every step would compile again)."""
        lr_is_tensor = isinstance(self.param_groups[0]['lr'], torch.Tensor)
        return compiled(f) if self.compile and lr_is_tensor and p.is_cuda else f


def average(
    grad: torch.Tensor, buffer: torch.Tensor, out: torch.Tensor, momentum: float, nesterov: bool
) -> None:
    """Add grad to the momentum and write what is to be orthogonalized to out (N, rows, columns)."""
    # an average instead of a sum: the iteration removes the scale anyway
    buffer.lerp_(grad, 1 - momentum)
    out.copy_(wide(grad.lerp(buffer, momentum) if nesterov else buffer))


def change(w: torch.Tensor, ortho: torch.Tensor, lr: float | torch.Tensor, decay: float) -> None:
    """Apply the update `ortho` (N, rows, columns), and cautious decay, to the weights w."""
    out_features, in_features = w.shape[-2:]
    update = (ortho.mT if out_features > in_features else ortho).reshape(w.shape).to(w.dtype)
    step = update * (lr * math.sqrt(max(1, out_features / in_features)))
    if decay:
        step = step + torch.where(update * w > 0, w, 0) * (lr * decay)
    w.sub_(step)


def make_optimizers(model: torch.nn.Module, settings: dict) -> list[torch.optim.Optimizer]:
    """Return Muon for a language model's matrices and AdamW for the rest, for the settings of
    train_lm.py. The rates of embedding and head are for width 768 and scale with its inverse
    square root."""
    groups = model.param_groups()
    width = (settings['n_embd'] / 768) ** -0.5
    rates = {
        'embedding': settings['embedding_lr'] * width,
        'head': settings['head_lr'] * width,
        'scalars': settings['scalar_lr'],
    }
    muon = Muon(
        groups['matrices'],
        lr=settings['learning_rate'],
        momentum=settings['momentum'],
        weight_decay=settings['weight_decay'],
    )
    muon.compile = settings['compile']
    adamw = torch.optim.AdamW(
        [{'params': groups[name], 'lr': lr} for name, lr in rates.items() if groups[name]],
        betas=settings['betas'],
        eps=settings['adam_eps'],
        weight_decay=0.0,
        fused=True,
        capturable=model.embedding.is_cuda,
    )
    adamw._warned_capturable_if_run_uncaptured = True  # its first steps are uncaptured on purpose
    return [muon, adamw]


def lr_at(step: int, max_iters: int, warmup_iters: int, final_ratio: float = 0.01) -> float:
    """Return the learning rate of update `step` (0 .. max_iters - 1) as a fraction of its peak.

    It rises linearly to 1 at step warmup_iters - 1, then follows half a cosine down to final_ratio
    at the last update, and stays there. A run that is not longer than its warm-up only warms up."""
    if step < warmup_iters:
        return (step + 1) / warmup_iters
    progress = min(1.0, (step + 1 - warmup_iters) / max(1, max_iters - warmup_iters))
    return final_ratio + (1 - final_ratio) * 0.5 * (1 + math.cos(math.pi * progress))

"""
Muon for stacked matrices, the schedule, who optimizes what; and what several ranks (torchrun)
share: states joined, sums, and gradients that travel while the backward is still running.

Muon (Keller Jordan, 2024) replaces the momentum of a matrix by a nearly orthogonal matrix with the
same singular vectors, found by five Newton-Schulz iterations. The weights of E experts are stacked
in one tensor (E, out, in), and every slice is one matrix to Muon. On each slice this is
torch.optim.Muon(adjust_lr_fn='original'); but all matrices with the same two sides go through one
batched iteration, weight decay is cautious (only where it and the update push a weight the same
way), a step can be captured in a CUDA graph (the learning rate may be a 0-dim tensor), and several
ranks share the iterations out and gather the results in bfloat16: gradients must be equal on all,
weights and momentum then are.
"""

import math
from collections.abc import Callable

import torch
import torch.distributed as dist

from kernels import compiled

# the quintic's: steepest slope at 0 that still maps (0, 1] into about [0.7, 1.2]
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPS = 1e-7  # the floor of the norm: a zero gradient gives a zero update, not NaN
MAX_BATCH = 2**26  # elements of one batched iteration: its scratch takes about 10 bytes each


def orthogonalize(x: torch.Tensor, ns_steps: int = 5) -> torch.Tensor:
    """Newton-Schulz on matrices x (N, rows, columns), rows <= columns -> the same in bfloat16."""
    a, b, c = COEFFICIENTS
    x = x.bfloat16()
    norm = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True)
    x = x / norm.clamp(min=EPS)  # spectral norm <= Frobenius norm = 1
    for _ in range(ns_steps):
        gram = x @ x.mT  # (N, rows, rows)
        # x <- a x + (b gram + c gram^2) x
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def orthogonalize_shared(x: torch.Tensor, ns_steps: int) -> tuple[torch.Tensor, dist.Work | None]:
    """orthogonalize in the place of x (N, rows, columns) bfloat16, MAX_BATCH elements at a time,
    each of several ranks a share of the N -> the result, and the message to wait for before it is
    read (one rank: None)."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    N, size = len(x), max(1, MAX_BATCH // x[0].numel())
    if world > 1:
        x = torch.cat([x, x.new_zeros(-N % world, *x.shape[1:])])  # equal shares
    mine = x.chunk(world)[dist.get_rank() if world > 1 else 0]
    for part in mine.split(size):
        part.copy_(orthogonalize(part, ns_steps))
    if world == 1:
        return x, None
    return x[:N], dist.all_gather(list(x.chunk(world)), mine.clone(), async_op=True)


def wide(x: torch.Tensor) -> torch.Tensor:
    """(..., out, in) -> (N, rows, columns) with rows <= columns, which have the smaller Gram
    matrix."""
    x = x.reshape(-1, *x.shape[-2:])
    return x.mT if x.size(1) > x.size(2) else x


class Muon(torch.optim.Optimizer):
    """Muon for parameters of shape (..., out, in); leading dimensions stack independent matrices.

    lr: a float, or a 0-dim tensor that may live on the device. A matrix's update is scaled by
    sqrt(max(1, out / in)). weight_decay: cautious, w -= lr * weight_decay * w where the update (the
    part subtracted) and w, from before the step, have the same sign; where either is zero there is
    no decay. State: 'momentum_buffer', of the parameter's shape and dtype. ValueError for a
    parameter that is no stack of real matrices, or empty."""

    compile = False  # its passes over parameters on a GPU

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
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            alike = {}
            for p in group['params']:
                if p.grad is not None:
                    alike.setdefault(tuple(sorted(p.shape[-2:])), []).append(p)
            # one lot's results travel between ranks while the next iterates
            begun = [(params, *self.begin(params, group)) for params in alike.values()]
            for params, parts, message in begun:
                if message is not None:
                    message.wait()
                for p, part in zip(params, parts, strict=True):
                    self.piece(p)(change)(p, part, group['lr'], group['weight_decay'])

    def begin(
        self, params: list[torch.nn.Parameter], group: dict
    ) -> tuple[list[torch.Tensor], dist.Work | None]:
        """Momentum, and the iteration for parameters with the same two sides: each one's (N, rows,
        columns), and the message to wait for."""
        sizes = [p[..., 0, 0].numel() for p in params]
        shape = sum(sizes), *sorted(params[0].shape[-2:])
        stack = params[0].new_empty(shape, dtype=torch.bfloat16)
        for p, part in zip(params, stack.split(sizes), strict=True):
            if not self.state[p]:
                self.state[p]['momentum_buffer'] = torch.zeros_like(p)
            how = group['momentum'], group['nesterov']
            self.piece(p)(average)(p.grad, self.state[p]['momentum_buffer'], part, *how)
        ortho, message = orthogonalize_shared(stack, group['ns_steps'])
        return ortho.split(sizes), message

    def piece(self, p: torch.nn.Parameter) -> Callable:
        """Compiled, a pass over a parameter is one kernel; a learning rate that is a number would
        be compiled in, and a CPU gains nothing."""
        tensors = isinstance(self.param_groups[0]['lr'], torch.Tensor)
        return compiled if self.compile and tensors and p.is_cuda else lambda f: f


def average(
    grad: torch.Tensor, buffer: torch.Tensor, out: torch.Tensor, momentum: float, nesterov: bool
) -> None:
    """The momentum goes on; out (N, rows, columns): what is to be orthogonalized."""
    # an average, not a sum: the scale is lost in the iteration anyway
    buffer.lerp_(grad, 1 - momentum)
    out.copy_(wide(grad.lerp(buffer, momentum) if nesterov else buffer))


def change(w: torch.Tensor, ortho: torch.Tensor, lr: float | torch.Tensor, decay: float) -> None:
    """The update of a parameter; ortho (N, rows, columns)."""
    out_features, in_features = w.shape[-2:]
    update = (ortho.mT if out_features > in_features else ortho).reshape(w.shape).to(w.dtype)
    step = update * (lr * math.sqrt(max(1, out_features / in_features)))
    if decay:
        step = step + torch.where(update * w > 0, w, 0) * (lr * decay)
    w.sub_(step)


def make_optimizers(model: torch.nn.Module, settings: dict) -> list[torch.optim.Optimizer]:
    """Muon for a language model's matrices, AdamW for the rest, by train_lm.py's settings."""
    groups, s = model.param_groups(), settings
    width = (s['n_embd'] / 768) ** -0.5
    rates = {'embedding': s['embedding_lr'] * width, 'head': s['head_lr'] * width}
    rates |= {'scalars': s['scalar_lr']}
    params = [{'params': groups[name], 'lr': rates[name]} for name in rates if groups[name]]
    how = {'momentum': s['momentum'], 'weight_decay': s['weight_decay']}
    muon = Muon(groups['matrices'], s['learning_rate'], **how)
    muon.compile = s['compile']
    how = {'fused': True, 'capturable': model.embedding.is_cuda, 'weight_decay': 0.0}
    adamw = torch.optim.AdamW(params, betas=s['betas'], eps=s['adam_eps'], **how)
    adamw._warned_capturable_if_run_uncaptured = True  # its first steps are, on purpose
    return [muon, adamw]


def lr_at(step: int, max_iters: int, warmup_iters: int, final_ratio: float = 0.01) -> float:
    """The learning rate of update `step` (0 .. max_iters - 1) as a fraction of its peak: linear
    warm-up, 1 at step warmup_iters - 1, then half a cosine, down to final_ratio at the last update
    and after it. A run not longer than its warm-up only warms up."""
    if step < warmup_iters:
        return (step + 1) / warmup_iters
    progress = min(1.0, (step + 1 - warmup_iters) / max(1, max_iters - warmup_iters))
    return final_ratio + (1 - final_ratio) * 0.5 * (1 + math.cos(math.pi * progress))

"""Several processes as one run (torchrun): parts joined, sums, and gradients in a few flat tensors that travel while the backward runs."""

import functools

import torch
import torch.distributed as dist

from checkpoint import fill

ALIGN = (
    32  # elements: each gradient begins at a multiple of 128 bytes, which vectorised kernels want
)
SLOTS = (0, 1, 1, 0)  # the dimension of model.State's tensors that counts streams


def gather(local: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """All ranks' parts of a tensor joined along dim, on rank 0 and the CPU (the GPUs may have no room); elsewhere the local part."""
    local = local.cpu()
    if not dist.is_initialized():
        return local
    first = dist.get_rank() == 0
    parts = [torch.empty_like(local) for _ in range(dist.get_world_size())] if first else None
    dist.gather(local, parts)
    return torch.cat(parts, dim) if first else local


def gather_state(states: list) -> list[torch.Tensor] | None:
    """All ranks' slots of recurrent states on rank 0, in the order of the slots, from one model.State a micro-batch; None without one."""
    if states[0] is None:
        return None
    return [
        gather(torch.cat([part.cpu() for part in parts], dim), dim)
        for parts, dim in zip(zip(*states, strict=True), SLOTS, strict=True)
    ]


def scatter_state(whole: list[torch.Tensor], states: list, world: int, rank: int) -> None:
    """The inverse: this rank's slots into `states`, in place. ValueError for other shapes."""
    sizes = [len(state.count) for state in states]
    for parts, t, dim in zip(zip(*states, strict=True), whole, SLOTS, strict=True):
        for part, source in zip(parts, t.chunk(world, dim)[rank].split(sizes, dim), strict=True):
            fill(part, source)


def sum_over_ranks(model: torch.nn.Module, extra: torch.Tensor) -> torch.Tensor:
    """Sums gradients and the vector `extra` over ranks, in one message -> extra's sum."""
    if not dist.is_initialized():
        return extra
    params = [p for p in model.parameters() if p.grad is not None]
    flat = torch.cat([*(p.grad.flatten() for p in params), extra])
    dist.all_reduce(flat)
    *grads, extra = flat.split([*(p.numel() for p in params), len(extra)])
    for p, grad in zip(params, grads, strict=True):
        p.grad.copy_(grad.view_as(p))
    return extra


class Buckets:
    """Gradients as views of a few flat tensors, the buckets: they stay in one place, as a CUDA graph needs them, and are summed over ranks
    in few messages that travel while the backward is still busy with other gradients.

    params: in the order in which a backward ends them, of one dtype and device. A bucket has at most `size` elements, or one parameter.
    extra: a vector of n_extra numbers that is summed with the last bucket, and so is the last to leave.

    An update: zero(); backwards, which add; before the last of them sending = True, so that a bucket leaves when all of its gradients are
    there; finish(). Buckets leave in their order on every rank, whatever the order of the gradients: ranks that disagreed would wait
    for each other for ever. A parameter without a gradient has zeros, and keeps its bucket and later ones until finish()."""

    def __init__(self, params, n_extra=1, size=2**25):
        self.members, self.flats, self.views, self.sending = [[]], [], [], False
        for p in params:
            if self.members[-1] and sum(q.numel() for q in self.members[-1]) + p.numel() > size:
                self.members.append([])
            self.members[-1].append(p)
        for i, members in enumerate(self.members):
            ends = [0]
            for p in members:
                ends.append(ends[-1] + -(-p.numel() // ALIGN) * ALIGN)
            self.flats.append(
                torch.zeros(
                    ends[-1] + n_extra * (i + 1 == len(self.members)),
                    dtype=members[0].dtype,
                    device=members[0].device,
                )
            )
            self.views += [
                (p, self.flats[i][end : end + p.numel()].view_as(p))
                for p, end in zip(members, ends[:-1], strict=True)
            ]
            for p in members if dist.is_initialized() else ():
                p.register_post_accumulate_grad_hook(functools.partial(self.arrived, i))
        self.extra = self.flats[-1][ends[-1] :]
        self.zero()

    def zero(self) -> None:
        """Begins an update: gradients and extra are zero, and every p.grad is its view again, whoever has replaced it."""
        for flat in self.flats:
            flat.zero_()
        for p, view in self.views:
            if p.grad is not view:
                p.grad = view
        self.missing, self.works = [len(members) for members in self.members], []

    def arrived(self, i: int, _: torch.Tensor) -> None:
        """A gradient of bucket i is complete."""
        if self.sending:
            self.missing[i] -= 1
            while len(self.works) < len(self.flats) - 1 and self.missing[len(self.works)] == 0:
                self.send()

    def send(self) -> None:
        self.works.append(dist.all_reduce(self.flats[len(self.works)], async_op=True))

    def finish(self) -> None:
        """Ends an update's backwards: gradients and extra are sums over all ranks."""
        self.sending = False
        while dist.is_initialized() and len(self.works) < len(self.flats):
            self.send()
        for work in self.works:
            work.wait()

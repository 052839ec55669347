"""The states of torch's random number generators, and random weights for trials.

The models draw random numbers for their initial weights only. In training, edits may draw some, for
dropout for example. Then a segment that is recomputed must draw the same numbers again, and a run
that is resumed those that it would have drawn.
"""

import contextlib
from collections.abc import Iterator

from support.script import print0

import torch
import torch.distributed as dist
from torch import Tensor, nn

from support.muon import is_matrix
from support.ranks import gather


def get_random_states(device: str | torch.device) -> dict[str, Tensor]:
    """Return the states of the generators from which a model on `device` draws, by type of device:
    that of the CPU and, of a GPU, that of the current one."""
    states = {'cpu': torch.get_rng_state()}
    kind = torch.device(device).type
    if kind != 'cpu':
        states[kind] = torch.get_device_module(kind).get_rng_state()
    return states


def set_random_states(states: dict[str, Tensor]) -> None:
    """Set the states of the generators to those that get_random_states has returned."""
    for kind, state in states.items():
        (torch if kind == 'cpu' else torch.get_device_module(kind)).set_rng_state(state)


@contextlib.contextmanager
def continuing_from(states: dict[str, Tensor], device: str | torch.device) -> Iterator[None]:
    """Within a with statement, draw the numbers that follow on earlier states of the generators;
    afterwards continue as if nothing had been drawn. A CUDA graph that is replayed draws them, too:
    it reads the state of torch's default generator at the start of each replay."""
    before = get_random_states(device)
    set_random_states(states)
    try:
        yield
    finally:
        set_random_states(before)


# ---- the states of all ranks, in a checkpoint ----


def gather_random_states(device: str) -> dict[str, Tensor]:
    """Return the states of all ranks, (ranks, bytes) each; complete on rank 0."""
    return {kind: gather(state[None]) for kind, state in get_random_states(device).items()}


def restore_random_states(saved: dict[str, Tensor], device: str) -> None:
    """Give every rank its saved states. Ranks and devices that had none keep the state that they
    have; a line says so."""
    states = get_random_states(device)
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    # clones, because set_rng_state crashes with a part of a tensor
    found = {kind: saved[kind][rank].clone() for kind in states if rank < len(saved.get(kind, ()))}
    set_random_states(found)
    before = f'{len(saved["cpu"])} x {"+".join(saved)}'
    now = f'{world} x {"+".join(states)}'
    if now != before:
        text = 'random numbers drawn in training, such as dropout, are others than they would be'
        print0(f'{now} instead of {before}: {text}')


# ---- random weights, for trials ----


@torch.no_grad()
def randomize(module: nn.Module) -> nn.Module:
    """Fill all parameters with random numbers for a trial, and return the module. Matrices have
    standard deviation 0.5 / sqrt(fan_in); vectors and scalars are near 1."""
    device = next(module.parameters()).device  # a GPU draws in no time, a CPU takes seconds
    random = torch.Generator(device).manual_seed(0)
    for p in module.parameters():
        noise = torch.randn(p.shape, generator=random, device=device)
        p.copy_(0.5 * noise * p.size(-1) ** -0.5 if is_matrix(p) else 1 + 0.1 * noise)
    return module

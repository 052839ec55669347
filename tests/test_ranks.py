"""ranks.py and Muon's shared iterations, over real processes (gloo): equal to one rank's, and no rank waits for ever."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import forks
import pytest
import torch

from ranks import ALIGN, Buckets

ROOT = Path(__file__).resolve().parent.parent

RANKS = """
import os
import sys
import torch
import torch.distributed as dist
import muon
import ranks
world = int(sys.argv[1])
torch.set_num_threads(1)

# Muon: gradients and weights equal on all ranks; one rank's result first
def weights():
    g = torch.Generator().manual_seed(0)
    shapes = [(3, 32, 16), (2, 16, 32), (5, 24, 24), (48, 16), (2, 3, 16, 32), (1, 8, 40)]
    return [torch.nn.Parameter(torch.randn(s, generator=g)) for s in shapes]
def three_steps():
    params, g = weights(), torch.Generator().manual_seed(1)
    optimizer = muon.Muon(params, lr=0.05, weight_decay=0.1)
    for _ in range(3):
        for p in params:
            p.grad = torch.randn(p.shape, generator=g)
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in params]), optimizer
alone, _ = three_steps()
rank = next((r for r in range(1, world) if os.fork() == 0), 0)   # here: torch is imported once, and has no threads yet
dist.init_process_group('gloo', init_method='file://' + sys.argv[2], rank=rank, world_size=world)
real, iterated = muon.orthogonalize, []
muon.orthogonalize = lambda x, n: iterated.append(len(x)) or real(x, n)
for max_batch in (2**26, 2000):
    muon.MAX_BATCH = max_batch
    shared, optimizer = three_steps()
    moved = (alone - torch.cat([p.detach().flatten() for p in weights()])).norm()
    assert (shared - alone).norm() < 0.01 * moved, (shared - alone).norm() / moved
    everyone = [torch.empty_like(shared) for _ in range(world)]
    dist.all_gather(everyone, shared)
    assert all(torch.equal(shared, x) for x in everyone)
    assert all(s['momentum_buffer'].shape == p.shape for p, s in optimizer.state.items())
assert sum(iterated) < 0.8 * 2 * 3 * 18          # not all 18 matrices of each step

# Buckets: two updates of two micro-batches; rank 1 never uses `extra_head`, and its gradients end in another order
def parts(rank):
    torch.manual_seed(0)
    net = torch.nn.ModuleDict({name: torch.nn.Linear(7, 7) for name in ('a', 'b', 'extra_head')})
    net['a'].weight.data *= rank + 1
    return net
def loss_of(net, rank, micro):
    x = torch.full((3, 7), rank + micro + 1.0)
    if rank == 1:
        return net['a'](net['b'](x)).square().sum()
    x = net['b'](net['a'](x))
    return (x.square().sum() + net['extra_head'](x).sum()) if rank == 0 else x.square().sum()
for size in (1, 60, 10**6):
    net, other = parts(rank), parts(rank)
    buckets, sent = ranks.Buckets(reversed(list(net.parameters())), 2, size), []
    for update in range(2):
        buckets.zero()
        other.zero_grad(set_to_none=False) if update else [setattr(p, 'grad', torch.zeros_like(p)) for p in other.parameters()]
        for micro in range(2):
            assert not buckets.works
            buckets.sending = micro == 1
            loss_of(net, rank, micro).backward()
            loss_of(other, rank, micro).backward()
        sent.append(len(buckets.works))
        buckets.extra.copy_(torch.tensor([rank, 1.0]))
        buckets.finish()
        extra = ranks.sum_over_ranks(other, torch.tensor([rank, 1.0]))
        for p, q in zip(net.parameters(), other.parameters(), strict=True):
            close = torch.equal if world == 2 else torch.allclose
            assert close(p.grad, q.grad) and p.grad.abs().sum() > 0
        assert torch.equal(buckets.extra, extra) and extra.tolist() == [sum(range(world)), world]
    if rank == 0 and size < 10**6:
        assert min(sent) > 0                     # some left while the backward was running
dist.barrier()
dist.destroy_process_group()
if rank:
    os._exit(0)
for _ in range(world - 1):
    assert os.wait()[1] == 0
print('fine')
"""


@pytest.mark.parametrize('world', [2, 4])
def test_ranks_equal_one(tmp_path, world):
    """Sharded Muon: the weights of all ranks bit for bit the same, and one rank's to bfloat16's rounding (1% of the way that they moved).
    Buckets: sum_over_ranks' gradients, bit for bit with two ranks (one sum has one order), with a parameter that one rank alone uses."""
    process = forks.Popen(
        [sys.executable, '-c', RANKS, str(world), str(tmp_path / 'meet')],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, 'OMP_NUM_THREADS': '1'},
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=600)  # a rank that fails leaves the others waiting
        assert process.returncode == 0 and out == 'fine\n', err
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def test_buckets_of_one_process():
    """Every gradient is an aligned view of the one bucket it fits in, and stays one whoever replaces it."""
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in [(5, 7), (), (40,), (3, 2, 2)]]
    buckets = Buckets(params, 2, size=60)
    assert [len(members) for members in buckets.members] == [2, 2] and [
        len(flat) for flat in buckets.flats
    ] == [64 + 32, 64 + 32 + 2]
    assert [p.grad.storage_offset() for p in params] == [0, 64, 0, 64] and ALIGN == 32
    for _ in range(2):
        params[1].grad = None  # as zero_grad(set_to_none=True) does
        buckets.zero()
        sum(((i + 1) * p).sum() for i, p in enumerate(params)).backward()
        sum(p.sum() for p in params).backward()
        buckets.extra.fill_(7)
        buckets.finish()
        assert all((p.grad == i + 2).all() for i, p in enumerate(params)) and buckets.flats[-1][
            -2:
        ].tolist() == [7, 7]
        assert sum(flat.sum() for flat in buckets.flats) == 2 * 35 + 3 + 4 * 40 + 5 * 12 + 14
    buckets.zero()
    assert not any(flat.any() for flat in buckets.flats)

"""Muon against torch.optim.Muon on each slice; cautious decay by its formula."""

import functools
import sys

import forks
import pytest
import torch
from test_train import ROOT

import muon
from muon import Muon

# tall, wide, square, one matrix, 4-D
SHAPES = [(3, 32, 16), (2, 16, 32), (4, 24, 24), (48, 16), (16, 48), (2, 3, 16, 32), (1, 8, 40)]


def parameters(shapes=SHAPES):
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def set_gradients(params, step):
    """Gradients of very different sizes, one expert's zero in one step."""
    generator = torch.Generator().manual_seed(step + 1)
    for i, p in enumerate(params):
        p.grad = torch.randn(p.shape, generator=generator) * 10.0 ** (i - 3)
    if step == 1:
        params[0].grad[1] = 0


def slices(tensors):
    return [m.clone() for t in tensors for m in t.detach().reshape(-1, *t.shape[-2:])]


@pytest.mark.parametrize('momentum, nesterov, traced', [(0.95, True, False), (0.5, False, True)])
@pytest.mark.parametrize('max_batch', [2**26, 2000, 1])
def test_equals_torch_muon_on_each_slice(monkeypatch, momentum, nesterov, traced, max_batch):
    """Also where an iteration ends inside a parameter, or takes one matrix; with the passes traced,
    as a GPU has them, with a learning rate in a tensor."""
    if traced:
        aot = functools.partial(torch.compile, backend='aot_eager', dynamic=False)
        monkeypatch.setattr(Muon, 'piece', lambda self, p: aot)
    real, sizes = muon.orthogonalize, []
    monkeypatch.setattr(muon, 'MAX_BATCH', max_batch)
    monkeypatch.setattr(muon, 'orthogonalize', lambda x, n: sizes.append(x.numel()) or real(x, n))
    ours, alone = parameters(), [torch.nn.Parameter(m) for m in slices(parameters())]
    settings = {'lr': 0.02, 'momentum': momentum, 'nesterov': nesterov, 'weight_decay': 0.0}
    optimizer = Muon(ours, **settings | {'lr': torch.tensor(0.02) if traced else 0.02})
    reference = torch.optim.Muon(alone, adjust_lr_fn='original', **settings)
    for step in range(4):
        before = torch.cat([m.flatten() for m in slices(ours)])
        set_gradients(ours, step)
        for m, grad in zip(alone, slices([p.grad for p in ours]), strict=True):
            m.grad = grad
        optimizer.step()
        reference.step()
        after, want = (torch.cat([m.flatten() for m in slices(ps)]) for ps in (ours, alone))
        assert (after - before).norm() > 0.1
        # bfloat16 rounds at 0.4%: other orders of a sum may move an entry by a few such steps
        assert (after - want).norm() < 0.01 * (after - before).norm()
    assert len(sizes) == 4 * {2**26: 4, 2000: 8, 1: 18}[max_batch]
    assert max(sizes) <= max(max_batch, 48 * 16)


def test_cautious_decay():
    """Of what the update makes smaller anyway; where there is no gradient nothing changes."""
    params, plain = parameters(), parameters()
    ours, without = (Muon(ps, lr=0.05, weight_decay=x) for ps, x in ((params, 0.3), (plain, 0)))
    for step in range(3):
        before = [p.detach().clone() for p in params]
        for p, w in zip(plain, before, strict=True):
            p.data.copy_(w)
        for ps, optimizer in ((params, ours), (plain, without)):
            set_gradients(ps, step)
            ps[2].grad.zero_()
            ps[3].grad = None
            optimizer.step()
        for i, (w, p, q) in enumerate(zip(before, params, plain, strict=True)):
            agree = (w - q.detach()) * w > 0  # w - q is what is subtracted
            want = q.detach() - 0.05 * 0.3 * w * agree
            torch.testing.assert_close(p.detach(), want, rtol=1e-5, atol=1e-6)
            assert torch.equal(w, p) if i in (2, 3) else 0.2 < agree.float().mean() < 0.8


# gradients and weights equal on all ranks; one rank's result first
RANKS = """
import torch
import torch.distributed as dist
import muon

SHAPES = [(3, 32, 16), (2, 16, 32), (5, 24, 24), (48, 16), (2, 3, 16, 32), (1, 8, 40)]
def three_steps():
    g = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, generator=g)) for shape in SHAPES]
    begun, optimizer = [p.detach().clone() for p in params], muon.Muon(params, lr=0.05)
    for _ in range(3):
        for p in params:
            p.grad = torch.randn(p.shape, generator=g)
        optimizer.step()
    return torch.cat([(p - b).detach().flatten() for p, b in zip(params, begun)])
alone = three_steps()
dist.init_process_group('gloo')
rank, world, real, iterated = dist.get_rank(), dist.get_world_size(), muon.orthogonalize, []
muon.orthogonalize = lambda x, n: iterated.append(len(x)) or real(x, n)
for muon.MAX_BATCH in (2**26, 2000):
    shared = three_steps()
    assert (shared - alone).norm() < 0.01 * alone.norm()  # bfloat16's rounding
    everyone = [torch.empty_like(shared) for _ in range(world)]
    dist.all_gather(everyone, shared)
    assert all(torch.equal(shared, x) for x in everyone)
assert sum(iterated) < 0.8 * 2 * 3 * 18  # not all 18 matrices of each step

dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize('world', [2, 4])
def test_ranks_equal_one(world):
    """All ranks' weights bit for bit the same, each with a share of the work."""
    command = [sys.executable, f'--ranks={world}', '-c', RANKS]
    done = forks.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

"""Muon against torch.optim.Muon and against an SVD; cautious decay by its formula."""

import functools
import os

import pytest
import torch
from conftest import ROOT, run
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import common
import kernels
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
    """In bfloat16, as torch.optim.Muon iterates; also where an iteration ends inside a parameter,
    or takes one matrix, and with the passes traced, as on a GPU, and the rate in a tensor."""
    monkeypatch.setattr(muon, 'bf16_is_fast', lambda device: True)
    if traced:
        aot = functools.partial(torch.compile, backend='aot_eager', dynamic=False)
        monkeypatch.setattr(muon, 'fused', aot)
        monkeypatch.setattr(muon, 'pays_to_compile', lambda p, lr: True)
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


def test_float32_iteration_applies_the_quintic_to_singular_values(monkeypatch):
    """Where bfloat16 is slow: U p(p(p(p(p(S / |S|))))) V', from an SVD in float64."""
    monkeypatch.setattr(muon, 'bf16_is_fast', lambda device: False)
    params = parameters()
    set_gradients(params, 1)
    before = [m.double() for m in slices(params)]
    grads = [m.double() for m in slices([p.grad for p in params])]
    Muon(params, lr=0.02, weight_decay=0.0).step()
    for w, grad, after in zip(before, grads, slices(params), strict=True):
        U, S, Vh = torch.linalg.svd(grad, full_matrices=False)
        S = S / S.norm().clamp(min=1e-7)
        for _ in range(5):
            S = 3.4445 * S - 4.7750 * S**3 + 2.0315 * S**5
        out_features, in_features = w.shape
        update = 0.02 * max(1, out_features / in_features) ** 0.5 * (U * S) @ Vh
        assert (after - (w - update)).norm() <= 1e-3 * update.norm()


class Dtypes(TorchDispatchMode):
    """Collect the dtypes of all tensors that operations return."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        tensors = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        self.seen |= {x.dtype for x in tensors}
        return result


@pytest.mark.parametrize(
    'capability, amx, avx512_bf16, fast',
    [
        ('AVX512', True, True, True),  # Sapphire Rapids
        ('AVX512', False, True, True),  # Zen 4
        ('AVX512', False, False, False),  # Skylake
        ('AVX2', False, False, False),  # Zen 3
        ('AVX2', True, True, False),  # Sapphire Rapids under ATEN_CPU_CAPABILITY=avx2
        ('DEFAULT', False, False, False),  # Arm
    ],
)
def test_bfloat16_only_where_it_is_fast(monkeypatch, capability, amx, avx512_bf16, fast):
    """Processors without bfloat16 instructions emulate it, 30 times slower than float32."""
    monkeypatch.setattr(torch.backends.cpu, 'get_cpu_capability', lambda: capability)
    monkeypatch.setattr(torch.cpu, '_is_amx_tile_supported', lambda: amx)
    monkeypatch.setattr(torch.cpu, '_is_avx512_bf16_supported', lambda: avx512_bf16)
    assert kernels.bf16_is_fast('cpu') == fast
    assert common.pick_dtype('auto', 'cpu') == (torch.bfloat16 if fast else torch.float32)
    params = parameters()
    set_gradients(params, 0)
    with Dtypes() as dtypes:
        Muon(params).step()
    assert (torch.bfloat16 in dtypes.seen) == fast


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
    initial, optimizer = [p.detach().clone() for p in params], muon.Muon(params, lr=0.05)
    for _ in range(3):
        for p in params:
            p.grad = torch.randn(p.shape, generator=g)
        optimizer.step()
    return torch.cat([(p - q).detach().flatten() for p, q in zip(params, initial)])
alone = three_steps()
dist.init_process_group('gloo')
rank, world, real, iterated = dist.get_rank(), dist.get_world_size(), muon.orthogonalize, []
muon.orthogonalize = lambda x, n: iterated.append(len(x)) or real(x, n)
for muon.MAX_BATCH in (2**26, 2000):
    shared = three_steps()
    assert (shared - alone).norm() < 0.01 * alone.norm()  # rounding, of bfloat16 at most
    everyone = [torch.empty_like(shared) for _ in range(world)]
    dist.all_gather(everyone, shared)
    assert all(torch.equal(shared, x) for x in everyone)
assert sum(iterated) < 0.8 * 2 * 3 * 18  # not all 18 matrices of each step

dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize('world', [2, 4])
def test_ranks_equal_one(tmp_path, world):
    """All ranks' weights bit for bit the same, each with a share of the work."""
    (tmp_path / 'ranks.py').write_text(RANKS)
    done = run([tmp_path / 'ranks.py'], world, env=os.environ | {'PYTHONPATH': str(ROOT)})
    assert done.returncode == 0, done.stderr

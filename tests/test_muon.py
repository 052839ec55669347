"""Test muon.py: against torch.optim.Muon, against an SVD, cautious decay by its formula, ranks."""

import functools

import pytest
import torch
import torch.distributed as dist
from processes import run_ranks

from support import muon, ranks
from support.muon import Muon

# tall, wide, square, one matrix, 4-D: 18 matrices
SHAPES = [(3, 32, 16), (2, 16, 32), (4, 24, 24), (48, 16), (16, 48), (2, 3, 16, 32), (1, 8, 40)]


def make_parameters():
    rng = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=rng)) for shape in SHAPES]


def set_gradients(params, step):
    """Set random gradients of very different sizes; in step 1 that of one expert is zero."""
    rng = torch.Generator().manual_seed(step + 1)
    for i, p in enumerate(params):
        p.grad = torch.randn(p.shape, generator=rng) * 10.0 ** (i - 3)
    if step == 1:
        params[0].grad[1] = 0


def matrices_of(tensors):
    """Return copies of all matrices in the last two dimensions of the tensors."""
    return [m.clone() for t in tensors for m in t.detach().reshape(-1, *t.shape[-2:])]


def flatten(tensors):
    return torch.cat([t.detach().flatten() for t in tensors])


# ---- the update ----


@pytest.mark.parametrize('momentum, traced', [(0.95, False), (0.5, True)])
def test_equals_torch_muon_on_each_matrix(monkeypatch, momentum, traced):
    """Four steps are taken in bfloat16. With traced passes and a learning rate in a tensor, they
    are those of a GPU."""
    monkeypatch.setattr(muon, 'bf16_is_fast', lambda device: True)
    if traced:
        trace = functools.partial(torch.compile, backend='aot_eager', dynamic=False)
        monkeypatch.setattr(muon, 'fused', trace)
        monkeypatch.setattr(muon, 'pays_to_compile', lambda p, lr: True)
    params = make_parameters()
    matrices = [torch.nn.Parameter(m) for m in matrices_of(params)]
    settings = {'momentum': momentum, 'weight_decay': 0.0}
    optimizer = Muon(params, lr=torch.tensor(0.02) if traced else 0.02, **settings)
    reference = torch.optim.Muon(matrices, lr=0.02, adjust_lr_fn='original', **settings)
    for step in range(4):
        before = flatten(params)
        set_gradients(params, step)
        for matrix, grad in zip(matrices, matrices_of(p.grad for p in params), strict=True):
            matrix.grad = grad
        optimizer.step()
        reference.step()
        update = flatten(params) - before
        assert update.norm() > 0.1
        # bfloat16 rounds at 0.4%: other orders of a sum may move an entry by a few such steps
        assert (flatten(params) - flatten(matrices)).norm() < 0.02 * update.norm()


def test_float32_iteration_applies_the_quintic_to_singular_values(monkeypatch):
    """CPUs on which bfloat16 is slow iterate in float32. The expected U p(p(p(p(p(S / |S|))))) V',
    where p is the quintic polynomial, comes from an SVD in float64."""
    monkeypatch.setattr(muon, 'bf16_is_fast', lambda device: False)
    params = make_parameters()
    set_gradients(params, 1)
    before = [m.double() for m in matrices_of(params)]
    grads = [m.double() for m in matrices_of(p.grad for p in params)]
    Muon(params, lr=0.02, weight_decay=0.0).step()
    for w, grad, after in zip(before, grads, matrices_of(params), strict=True):
        U, S, Vh = torch.linalg.svd(grad, full_matrices=False)
        S = S / S.norm().clamp(min=1e-7)
        for _ in range(5):
            S = 3.4445 * S - 4.7750 * S**3 + 2.0315 * S**5
        out_features, in_features = w.shape
        update = 0.02 * max(1, out_features / in_features) ** 0.5 * (U * S) @ Vh
        assert (after - (w - update)).norm() <= 1e-3 * update.norm()


def test_decay_is_cautious():
    """Weights decay only where the update makes them smaller anyway, by lr * weight_decay * w. A
    parameter whose gradient is missing or zero does not change."""
    decayed, plain = make_parameters(), make_parameters()
    initial = [p.detach().clone() for p in plain]
    for params, weight_decay in ((decayed, 0.3), (plain, 0.0)):
        set_gradients(params, 0)
        params[2].grad.zero_()
        params[3].grad = None
        Muon(params, lr=0.05, weight_decay=weight_decay).step()
    for i, (w, p, q) in enumerate(zip(initial, decayed, plain, strict=True)):
        if i in (2, 3):
            assert torch.equal(p, w)
            continue
        shrinks = (w - q) * w > 0
        assert 0.2 < shrinks.float().mean() < 0.8
        torch.testing.assert_close(p, q - 0.05 * 0.3 * w * shrinks, rtol=1e-5, atol=1e-6)


# ---- bfloat16 ----


@pytest.mark.parametrize(
    'capability, amx, avx512_bf16, fast',
    [
        ('AVX512', False, True, True),  # Zen 4
        ('AVX512', False, False, False),  # Skylake
        ('AVX2', True, True, False),  # Sapphire Rapids under ATEN_CPU_CAPABILITY=avx2
    ],
)
def test_bfloat16_is_chosen_only_where_it_is_fast(monkeypatch, capability, amx, avx512_bf16, fast):
    """CPUs without bfloat16 instructions emulate it, 30 times slower than float32."""
    monkeypatch.setattr(torch.backends.cpu, 'get_cpu_capability', lambda: capability)
    monkeypatch.setattr(torch.cpu, '_is_amx_tile_supported', lambda: amx)
    monkeypatch.setattr(torch.cpu, '_is_avx512_bf16_supported', lambda: avx512_bf16)
    assert ranks.bf16_is_fast('cpu') == fast
    assert ranks.pick_dtype('auto', 'cpu') == (torch.bfloat16 if fast else torch.float32)


# ---- ranks ----


def three_steps():
    """Return the sum of three updates of all parameters, (n,)."""
    params = make_parameters()
    before, optimizer = flatten(params), Muon(params, lr=0.05)
    for step in range(3):
        set_gradients(params, step)
        optimizer.step()
    return flatten(params) - before


def three_steps_as_rank():
    """Return three_steps() of one rank, and how many matrices it has orthogonalized."""
    counts, orthogonalize = [], muon.orthogonalize

    def count(x):
        assert x.numel() <= 2000
        counts.append(len(x))
        return orthogonalize(x)

    muon.MAX_BATCH, muon.orthogonalize = 2000, count
    dist.init_process_group('gloo')
    updates = three_steps()
    dist.barrier()
    dist.destroy_process_group()
    return updates.tolist(), sum(counts)


def test_ranks_share_the_work_in_batches_and_have_bit_equal_weights():
    """A batch has at most MAX_BATCH elements, and may end inside a parameter."""
    expected = three_steps()
    (update, count), (update_1, count_1) = run_ranks(2, three_steps_as_rank)
    assert update == update_1
    # rounding, of bfloat16 at most
    assert (torch.tensor(update) - expected).norm() < 0.02 * expected.norm()
    assert max(count, count_1) < 0.8 * 3 * 18

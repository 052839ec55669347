"""muon.py against torch.optim.Muon on each slice, cautious decay and the schedule against their formulas."""

import io
import math

import pytest
import torch

import muon
from muon import Muon, lr_at

SHAPES = [
    (3, 32, 16),
    (2, 16, 32),
    (4, 24, 24),
    (48, 16),
    (16, 48),
    (2, 3, 16, 32),
    (1, 8, 40),
]  # tall, wide, square, one matrix, 4-D


@pytest.fixture(autouse=True)
def one_thread():
    """Matrices this small are slow with more threads when the processor is busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def parameters(shapes=SHAPES, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for shape in shapes
    ]


def set_gradients(params, step):
    """Gradients of very different sizes, one expert's zero in one step."""
    generator = torch.Generator().manual_seed(step + 1)
    for i, p in enumerate(params):
        p.grad = torch.randn(p.shape, generator=generator) * 10.0 ** (i - 3)
    if step == 1:
        params[0].grad[1] = 0


@pytest.mark.parametrize('momentum, nesterov', [(0.95, True), (0.5, False), (0.0, True)])
@pytest.mark.parametrize('max_batch', [2**26, 2000, 1])
def test_equals_torch_muon_on_each_slice(monkeypatch, momentum, nesterov, max_batch):
    monkeypatch.setattr(
        muon, 'MAX_BATCH', max_batch
    )  # batches that end inside a parameter, and single matrices
    ours = parameters()
    slices = [
        torch.nn.Parameter(m.clone()) for p in ours for m in p.detach().reshape(-1, *p.shape[-2:])
    ]
    optimizer = Muon(ours, lr=0.02, momentum=momentum, nesterov=nesterov, weight_decay=0.0)
    reference = torch.optim.Muon(
        slices,
        lr=0.02,
        momentum=momentum,
        nesterov=nesterov,
        weight_decay=0.0,
        adjust_lr_fn='original',
    )
    for step in range(4):
        before = torch.cat([p.detach().flatten() for p in ours])
        set_gradients(ours, step)
        for s, g in zip(
            slices, [g for p in ours for g in p.grad.reshape(-1, *p.shape[-2:])], strict=True
        ):
            s.grad = g.clone()
        optimizer.step()
        reference.step()
        after, expected = (
            torch.cat([p.detach().flatten() for p in params]) for params in (ours, slices)
        )
        assert (after - before).norm() > 0.1
        # bfloat16 rounds at 0.4%: other summation orders on other machines may move single entries by a few such steps
        assert (after - expected).norm() < 0.01 * (after - before).norm()


@pytest.mark.parametrize('max_batch', [2**26, 2000, 1])
def test_batches_hold_every_slice_once_and_are_bounded(max_batch):
    params = parameters()
    lists = list(muon.batches(params, max_batch))
    seen = [(id(p), k) for batch in lists for p, i, j in batch for k in range(i, j)]
    assert len(set(seen)) == len(seen) == sum(p[..., 0, 0].numel() for p in params)
    for batch in lists:
        assert len({tuple(sorted(p.shape[-2:])) for p, _, _ in batch}) == 1
        matrices = sum(j - i for _, i, j in batch)
        assert matrices == 1 or matrices * math.prod(batch[0][0].shape[-2:]) <= max_batch
    assert len(lists) == {2**26: 4, 2000: 8, 1: 18}[max_batch]


def test_the_update_is_nearly_orthogonal_and_scaled_by_the_sides():
    for shape, scale in [((2, 64, 16), 2.0), ((2, 16, 64), 1.0), ((2, 32, 32), 1.0)]:
        (p,) = parameters([shape])
        before = p.detach().clone()
        p.grad = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        Muon([p], lr=0.1, weight_decay=0.0).step()
        singular = torch.linalg.svdvals(before - p.detach()) / (0.1 * scale)
        assert singular.max() < 1.3 and singular.median() > 0.6


def test_cautious_decay():
    params, plain = parameters(), parameters()
    lr, decay = 0.05, 0.3
    optimizer, reference = (
        Muon(params, lr=lr, weight_decay=decay),
        Muon(plain, lr=lr, weight_decay=0.0),
    )
    for step in range(3):
        with torch.no_grad():
            for p, q in zip(params, plain, strict=True):
                q.copy_(p)
        before = [p.detach().clone() for p in params]
        set_gradients(params, step)
        set_gradients(plain, step)
        optimizer.step()
        reference.step()
        for w, p, q in zip(before, params, plain, strict=True):
            update = w - q.detach()  # what is subtracted
            expected = q.detach() - lr * decay * w * (update * w > 0)
            torch.testing.assert_close(p.detach(), expected, rtol=1e-5, atol=1e-6)
            assert 0.2 < (update * w > 0).float().mean() < 0.8


def test_zero_gradient_and_no_gradient_change_nothing():
    params = parameters()
    before = [p.detach().clone() for p in params]
    optimizer = Muon(params, weight_decay=0.5)
    for p in params[1:]:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True))
    assert params[0] not in optimizer.state


def test_a_tensor_learning_rate_gives_the_same_step():
    results = []
    for lr in (0.02, torch.tensor(0.02)):
        params = parameters()
        set_gradients(params, 0)
        Muon(params, lr=lr, weight_decay=0.1).step()
        results.append(params)
    for p, q in zip(*results, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


def test_a_loaded_state_goes_on_bit_for_bit():
    params = parameters()
    optimizer = Muon(params)
    for step in range(2):
        set_gradients(params, step)
        optimizer.step()
    file = io.BytesIO()
    torch.save({'params': [p.detach() for p in params], 'optimizer': optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    others = [torch.nn.Parameter(p.clone()) for p in saved['params']]
    resumed = Muon(others, lr=1.0, momentum=0.1)
    resumed.load_state_dict(saved['optimizer'])
    for step in range(2, 4):
        for ps, o in ((params, optimizer), (others, resumed)):
            set_gradients(ps, step)
            o.step()
    assert all(torch.equal(p, q) for p, q in zip(params, others, strict=True))


@pytest.mark.parametrize('shape', [(5,), (0, 3, 3), ()])
def test_refuses_what_is_no_matrix(shape):
    with pytest.raises(ValueError, match='Muon needs'):
        Muon([torch.nn.Parameter(torch.zeros(shape))])


def test_schedule():
    assert lr_at(0, 1000, 100) == pytest.approx(0.01)
    assert lr_at(49, 1000, 100) == pytest.approx(0.5)
    assert lr_at(99, 1000, 100) == 1.0
    assert lr_at(100, 1000, 100) < 1.0
    middle = 99 + (999 - 99) / 2
    assert lr_at(middle, 1000, 100) == pytest.approx((1 + 0.01) / 2)
    assert lr_at(324, 1000, 100) == pytest.approx(0.01 + 0.99 * (1 + math.cos(math.pi / 4)) / 2)
    assert lr_at(999, 1000, 100) == pytest.approx(0.01) == lr_at(5000, 1000, 100)
    values = [lr_at(step, 1000, 100) for step in range(1000)]
    assert values[:100] == sorted(values[:100]) and values[99:] == sorted(values[99:], reverse=True)
    assert lr_at(0, 10, 0) < 1 and lr_at(9, 10, 0, final_ratio=0.5) == pytest.approx(
        0.5
    )  # no warm-up
    assert lr_at(4, 5, 100) == 0.05  # shorter than its warm-up

"""
The unroll with Triton kernels in it (unroll.py, kernels.py), and the choice between them and the compiled pieces. The kernels run under
Triton's interpreter in fp32, in a process of their own as in test_triton.py; the choice is tested on given times.
"""

import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

triton = pytest.importorskip('triton', reason='triton is not installed: its kernels are not tested')
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / 'tests')]
import kernels  # noqa: E402
import model as model_file  # noqa: E402
import unroll  # noqa: E402
from model import RecurrentGPT  # noqa: E402
import reference  # noqa: E402
from reference import (  # noqa: E402
    assert_close,
    assert_same_gradients,
    assert_same_state,
    gradients,
    make,
    tokens,
)
from test_triton import can_interpret, interpreted, run_interpreted  # noqa: E402


@can_interpret
def test_under_the_interpreter():
    printed = run_interpreted(__file__, 'interpreted')
    assert 'skipped' not in printed, printed[-4000:]


def with_triton(monkeypatch, calls, names=unroll.TRITON):
    """The compiled path takes every Triton kernel, counted in calls, and runs what else it would compile as it is."""
    module = kernels.triton_module()
    monkeypatch.setattr(unroll, 'compiled', lambda op: op)
    monkeypatch.setattr(kernels, 'compiled', lambda op: op)
    monkeypatch.setattr(unroll, 'choose', lambda *_: frozenset(names))
    monkeypatch.setattr(module, 'compiled', lambda op: op)
    monkeypatch.setattr(kernels, 'loss_by_triton', lambda *sizes: True)

    def counted(name, function):
        def call(*args):
            calls[name] = calls.get(name, 0) + 1
            return function(*args)

        monkeypatch.setattr(module, name, call)

    for name in (
        'window_attention',
        'window_attention_backward',
        'expert_relu',
        'expert_relu_backward',
        'norm_sum',
        'cross_entropy',
    ):
        counted(name, getattr(module, name))


@interpreted
@pytest.mark.parametrize(
    'changes',
    [
        {'n_expert': 2, 'share_kv': False, 'n_layer': 1},
        {'n_expert': 3, 'aggregation': 'softmax_l2'},
    ],
    ids=str,
)
def test_interpreted_unroll_is_the_reference(monkeypatch, changes):
    """Several blocks of 3 tokens, dK and dV in groups of 2, windows that fill up; and evaluation."""
    monkeypatch.setattr(unroll, 'BLOCK', 3)
    monkeypatch.setattr(unroll, 'GROUP', 2)
    calls = {}
    with_triton(monkeypatch, calls)
    model = make(
        RecurrentGPT,
        seed=7,
        dtype=torch.float32,
        n_embd=24,
        n_head=2,
        n_kv_head=1,
        window=5,
        **changes,
    )
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.7)  # fp32's own error stays small
    T, B, state, exact = 4, 2, None, reference.exact(model)
    model.config.path, history = 'compiled', reference.History(exact, B)
    for chunk in range(2):
        x, y = tokens(B, T, seed=chunk), tokens(B, T, seed=chunk + 10)
        loss, state = model(x, y, state)
        logits, history = reference.run(exact, x, history)
        expected = reference.loss_of(logits, y)
        assert_close(loss, expected, rtol=1e-5)
        assert_same_gradients(model, gradients(model, loss), gradients(exact, expected), rtol=2e-5)
        assert_same_state(state, history.state(), rtol=1e-5)
    steps = 2 * T * model.config.n_layer
    assert calls == {
        'window_attention': steps,
        'window_attention_backward': steps,
        'expert_relu': steps,
        'expert_relu_backward': steps,
        'norm_sum': steps,
        'cross_entropy': 2,
    }
    with torch.no_grad():
        logits, end = model(x, state=state)
        expected, history = reference.run(exact, x, history)
    assert calls['window_attention'] == steps * 3 // 2
    assert_close(logits, expected, rtol=1e-5)
    assert_same_state(end, history.state(), rtol=1e-5)


@interpreted
@pytest.mark.parametrize('name', unroll.TRITON)
@pytest.mark.parametrize('share_kv', [True, False])
def test_interpreted_kernels_beside_compiled_pieces(monkeypatch, share_kv, name):
    """One of the two alone: what it gets from the others' pieces may lie otherwise in memory."""
    monkeypatch.setattr(unroll, 'BLOCK', 3)
    calls = {}
    with_triton(monkeypatch, calls, [name])
    model, x = (
        make(RecurrentGPT, dtype=torch.float32, n_layer=1, share_kv=share_kv, path='compiled'),
        tokens(2, 4),
    )
    loss, _ = model(x, x)
    grads = gradients(model, loss)
    assert len(calls) == {'attention': 3, 'experts': 4}[name]  # the loss is one of them
    exact = reference.exact(model)
    expected = reference.loss_of(reference.run(exact, x)[0], x)
    assert_close(loss, expected, rtol=1e-5)
    assert_same_gradients(model, grads, gradients(exact, expected), rtol=1e-4)


def made_recipe(share_kv=True, aggregation='sqrt_sum', device='cpu'):
    model = make(
        RecurrentGPT,
        dtype=torch.float32,
        n_embd=24,
        n_head=2,
        n_kv_head=1,
        n_expert=3,
        share_kv=share_kv,
        aggregation=aggregation,
    )
    first = model.levels[0].to(device)
    return unroll.Recipe(
        model_file.token,
        model_file.heads,
        model_file.leave,
        first.rules(),
        torch.float32,
        torch.float32,
        True,
        False,
    ), first.weights()


@interpreted
@pytest.mark.parametrize(
    'share_kv, aggregation, W, n, grad',
    [
        (True, 'sqrt_sum', 5, 4, True),
        (False, 'softmax_l2', 3, 7, True),
        (True, 'mean', 5, 1, True),
        (True, 'softmax_mean', 5, 4, False),
    ],
)
def test_interpreted_trials_agree(monkeypatch, share_kv, aggregation, W, n, grad):
    """What choose() measures: both ways the same, in values and gradients, and compare() finds what is not, in a kernel and in the model."""
    monkeypatch.setattr(unroll, 'GROUP', 3)
    with_triton(monkeypatch, {})
    recipe, weights = made_recipe(share_kv, aggregation)
    trials = unroll.trials(recipe, weights, (2, 24, W, n), grad)
    assert set(trials) == set(unroll.TRITON) == set(unroll.trial_cost(recipe, (2, 24, W, n)))
    monkeypatch.setattr(kernels, 'seconds_of', lambda run: (run(), 1.0)[1])
    for name, run in trials.items():
        for i, y in enumerate(run(False)):
            assert y.norm() > 1e-3, f'{name} {i}: nothing to compare'
        assert kernels.compare(run)['difference'] < 1e-4
    module = kernels.triton_module()
    for name, kernel in (
        ('attention', 'window_attention'),
        ('experts', 'norm_sum'),
        ('experts', 'expert_relu_backward'),
    ):
        right = getattr(module, kernel)
        with monkeypatch.context() as patch:
            patch.setattr(module, kernel, lambda *args, right=right: right(*args).mul_(1.1))
            wrong = kernels.compare(trials[name])['difference'] > 0.05
            assert wrong or not grad and kernel == 'expert_relu_backward'
    edited = recipe._replace(
        heads=lambda *args, **sizes: [2 * x for x in model_file.heads(*args, **sizes)],
        leave=lambda *args: 2 * model_file.leave(*args),
    )  # an edited equation is not the kernels'
    for run in unroll.trials(edited, weights, (2, 24, W, n), grad).values():
        assert not kernels.agrees(kernels.compare(run))


def test_an_aggregation_that_the_kernels_do_not_know():
    recipe, weights = made_recipe()
    assert set(unroll.trials(recipe, weights, (2, 24, 3, 2), True)) == {'attention', 'experts'}
    edited = recipe._replace(rules=recipe.rules._replace(aggregation='max'))
    assert set(unroll.trials(edited, weights, (2, 24, 3, 2), True)) == {'attention'}


# ---- the choice ----


class Clock:
    """A trial of given results and times; seconds_of reads the time of what ran last."""

    def __init__(self, mine, plain, times, error=None):
        self.results, self.times, self.error, self.memory = (
            {True: mine, False: plain},
            times,
            error,
            torch.zeros(3),
        )

    def __call__(self, by_triton):
        assert not torch.is_grad_enabled() and not torch.is_autocast_enabled(
            'cuda'
        )  # as the loop runs
        if by_triton and self.error is not None:
            raise self.error
        Clock.now = self.times[by_triton]
        return self.memory.copy_(torch.tensor(self.results[by_triton])), torch.ones(2)


def seconds_of(run):
    run()
    return Clock.now


@pytest.fixture
def autocast():
    torch.set_autocast_enabled('cuda', True)
    yield
    torch.set_autocast_enabled('cuda', False)


ONE, FAST, SLOW = (1.0, 2.0, 3.0), {True: 1e-6, False: 2e-6}, {True: 2e-6, False: 1e-6}


@pytest.mark.parametrize(
    'trial, wins, reason',
    [
        (Clock(ONE, ONE, FAST), True, ''),
        (Clock(ONE, ONE, SLOW), False, ''),
        (Clock((0.0,) * 3, (0.0,) * 3, FAST), True, ''),
        (Clock((1.0, 2.0, 3.05), ONE, FAST), True, ''),
        (Clock((1.0, 2.0, 3.3), ONE, FAST), False, ''),
        (Clock((1.0, 2.0, math.nan), ONE, FAST), False, ''),
        (Clock(ONE, (math.nan,) * 3, FAST), False, ''),
        (
            Clock(
                ONE,
                ONE,
                FAST,
                triton.runtime.errors.OutOfResources(300_000, 232_448, 'shared memory'),
            ),
            False,
            'OutOfResources: out of resource: shared',
        ),
        (
            Clock(ONE, ONE, FAST, triton.runtime.errors.PTXASError('no such target')),
            False,
            'PTXASError: PTXAS error: no such target',
        ),
        (
            Clock(ONE, ONE, FAST, RuntimeError('CUDA error\nmore')),
            False,
            'RuntimeError: CUDA error',
        ),
        (Clock(ONE, ONE, FAST, RuntimeError()), False, 'RuntimeError: '),
    ],
)
def test_what_wins_is_chosen(monkeypatch, autocast, trial, wins, reason):
    """Faster and no more than 3% off; the reason is kept. `loss` by the same rule."""
    measured = []

    def trials(recipe, weights, sizes, grad):
        measured.append((*sizes, grad))
        return {'attention': trial, 'experts': Clock(ONE, ONE, FAST)}

    monkeypatch.setattr(kernels, 'chosen', {})
    monkeypatch.setattr(kernels, 'seconds_of', seconds_of)
    monkeypatch.setattr(unroll, 'trials', trials)
    monkeypatch.setattr(torch.cuda, 'is_current_stream_capturing', lambda: False)
    recipe, weights = made_recipe()
    on_gpu = {name: SimpleNamespace(device=torch.device('cuda')) for name in weights}
    names = {'experts'} | ({'attention'} if wins else set())
    for again in (recipe, recipe._replace(graphs=True)):  # the same kernels: measured once
        assert unroll.choose(again, on_gpu, (2, 24, 5, 4), True) == names
    assert measured == [(2, 24, 5, 4, True)]
    ((found, _),) = (tuple(x.values()) for x in kernels.chosen.values())
    assert found.get('error', '').startswith(reason) and ('error' in found) == (
        trial.error is not None
    )
    assert found['compiled'] == trial.times[False]
    (line,) = kernels.chosen_lines()
    assert line.startswith(f'attention: {"Triton" if wins else "compiled"} (') and line.endswith(
        'experts: Triton (1 against 2 us)'
    )
    for sizes, grad in (((2, 24, 6, 4), True), ((2, 24, 5, 5), True), ((2, 24, 5, 5), False)):
        unroll.choose(recipe, on_gpu, sizes, grad)
    unroll.choose(recipe._replace(leave=print), on_gpu, (2, 24, 5, 4), True)  # other equations
    assert len(measured) == 5
    assert unroll.choose(recipe, weights, (2, 24, 5, 4), True) == frozenset()


def test_an_error_of_another_kind_is_a_bug(monkeypatch):
    monkeypatch.setattr(kernels, 'seconds_of', seconds_of)
    with pytest.raises(ZeroDivisionError):
        kernels.compare(Clock(ONE, ONE, FAST, ZeroDivisionError()))


def test_nothing_is_measured_during_a_capture(monkeypatch):
    capturing = [True]
    monkeypatch.setattr(kernels, 'chosen', {})
    monkeypatch.setattr(torch.cuda, 'is_current_stream_capturing', lambda: capturing[0])
    monkeypatch.setattr(
        unroll, 'trials', lambda *_: dict.fromkeys(unroll.TRITON, Clock(ONE, ONE, FAST))
    )
    monkeypatch.setattr(kernels, 'seconds_of', seconds_of)
    recipe, weights = made_recipe()
    weights = {name: SimpleNamespace(device=torch.device('cuda')) for name in weights}
    chunk, sizes = (
        (recipe, weights, (2, 24, 5, 4), True),
        (model_file.losses, 6, 11, torch.float32, torch.device('cuda')),
    )
    with monkeypatch.context() as patch:
        patch.setattr(kernels, 'compare', lambda run: pytest.fail('measured'))
        assert (
            unroll.choose(*chunk) == frozenset()
            and not kernels.loss_by_triton(*sizes)
            and not kernels.chosen
        )
    capturing[0] = False  # what was not measured then is, later
    assert unroll.choose(*chunk) == frozenset(unroll.TRITON)
    kernels.chosen[sizes[:4]] = {'loss': {'compiled': 2, 'triton': 1, 'difference': 0}}
    capturing[0] = True  # and what was measured serves captures
    assert unroll.choose(*chunk) == frozenset(unroll.TRITON) and kernels.loss_by_triton(*sizes)

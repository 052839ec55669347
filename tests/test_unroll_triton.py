"""
The unroll with Triton kernels in it (unroll.py, kernels.py), and the choice between them and the compiled pieces. The kernels run under
Triton's interpreter in fp32, in a process of their own as in test_triton.py; the choice is tested on given times.
"""
import math
import sys
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip('triton', reason='triton is not installed: its kernels are not tested')
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / 'tests')]
import kernels  # noqa: E402
import unroll  # noqa: E402
from model import RecurrentGPT  # noqa: E402
import reference  # noqa: E402
from reference import assert_close, assert_same_gradients, assert_same_state, gradients, make, tokens  # noqa: E402
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
    monkeypatch.setattr(unroll, 'choose', lambda plan, n: frozenset(names))
    monkeypatch.setattr(kernels, 'loss_by_triton', lambda *sizes: True)

    def counted(name, function):
        def call(*args):
            calls[name] = calls.get(name, 0) + 1
            return function(*args)
        monkeypatch.setattr(module, name, call)
    for name in ('window_attention', 'window_attention_backward', 'expert_relu', 'expert_relu_backward', 'norm_sum', 'cross_entropy'):
        counted(name, getattr(module, name))


@interpreted
@pytest.mark.parametrize('changes', [{'n_expert': 1, 'n_layer': 1}, {'n_expert': 2, 'share_kv': False, 'n_layer': 1},
                                     {'n_expert': 3, 'aggregation': 'softmax_l2'}], ids=str)
def test_interpreted_unroll_is_the_reference(monkeypatch, changes):
    """Several blocks of 3 tokens, dK and dV in groups of 2, windows that fill up; and evaluation."""
    monkeypatch.setattr(unroll, 'BLOCK', 3)
    monkeypatch.setattr(unroll, 'GROUP', 2)
    calls = {}
    with_triton(monkeypatch, calls)
    model = make(RecurrentGPT, dtype=torch.float32, n_embd=24, n_head=2, n_kv_head=1, window=5, **changes)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.7)                                        # fp32's own error stays small
    T, B, state, exact = 4, 2, None, reference.exact(model)
    model.config.path, history = 'compiled', reference.History(exact, B)
    for chunk in range(2):
        x, y = tokens(B, T, seed=chunk), tokens(B, T, seed=chunk + 10)
        loss, state = model(x, y, state)
        logits, history = reference.run(exact, x, history)
        expected = reference.loss_of(logits, y)
        assert_close(loss, expected, rtol=1e-5)
        assert_same_gradients(model, gradients(model, loss), gradients(exact, expected), rtol=1e-4)
        assert_same_state(state, history.state(), rtol=1e-5)
    steps = 2 * T * model.config.n_layer
    assert calls == {'window_attention': steps, 'window_attention_backward': steps, 'expert_relu': steps, 'expert_relu_backward': steps,
                     'norm_sum': steps, 'cross_entropy': 2}
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
    """One of the three alone: what it gets from the others' pieces may lie otherwise in memory."""
    monkeypatch.setattr(unroll, 'BLOCK', 3)
    calls = {}
    with_triton(monkeypatch, calls, [name])
    model, x = make(RecurrentGPT, dtype=torch.float32, n_layer=1, share_kv=share_kv, path='compiled'), tokens(2, 4)
    loss, _ = model(x, x)
    grads = gradients(model, loss)
    assert len(calls) == {'attention': 3, 'experts': 3, 'experts_backward': 2}[name]         # the loss is one of them
    exact = reference.exact(model)
    expected = reference.loss_of(reference.run(exact, x)[0], x)
    assert_close(loss, expected, rtol=1e-5)
    assert_same_gradients(model, grads, gradients(exact, expected), rtol=1e-4)


def made_plan(device='cpu', E=3, share_kv=True, W=5, grad=True):
    return unroll.Plan((2, E, 1, 2, 12, share_kv), 2, W, 'sqrt_sum', 0, torch.float32, torch.float32, torch.device(device), frozenset(),
                       grad, False, unroll.EAGER)


@interpreted
@pytest.mark.parametrize('share_kv, W, n, grad', [(True, 5, 4, True), (False, 3, 7, True), (True, 5, 1, True), (True, 5, 4, False)])
def test_interpreted_trials_agree(monkeypatch, share_kv, W, n, grad):
    """What choose() measures: both ways the same, and compare() finds that out though they write to the same memory."""
    monkeypatch.setattr(unroll, 'GROUP', 3)
    trials = unroll.trials(made_plan(share_kv=share_kv, W=W, grad=grad), n)
    assert set(unroll.TRITON) == set(unroll.trial_cost(made_plan(), n)) == set(trials) | (set() if grad else {'experts_backward'})
    for name, run in trials.items():
        mine = [x.clone() for x in run(True)]
        for i, (x, y) in enumerate(zip(mine, run(False), strict=True)):
            assert y.norm() > 1e-3, f'{name} {i}: nothing to compare'
            assert_close(x, y, rtol=1e-4, what=f'{name} {i}')
    module = kernels.triton_module()
    kernel_of = {'attention': 'window_attention', 'experts': 'expert_relu', 'experts_backward': 'expert_relu_backward'}
    for name, kernel in ((name, kernel_of[name]) for name in trials):
        right = getattr(module, kernel)
        with monkeypatch.context() as patch:
            patch.setattr(kernels, 'seconds_of', lambda run: (run(), 1.0)[1])
            assert kernels.compare(trials[name])['difference'] < 1e-4
            patch.setattr(module, kernel, lambda *args, right=right: right(*args).mul_(1.1))
            assert kernels.compare(trials[name])['difference'] > 0.05


# ---- the choice ----

class Clock:
    """A trial of given results and times; seconds_of reads the time of what ran last."""

    def __init__(self, mine, plain, times, error=None):
        self.results, self.times, self.error, self.memory = {True: mine, False: plain}, times, error, torch.zeros(3)

    def __call__(self, by_triton):
        assert not torch.is_grad_enabled() and not torch.is_autocast_enabled('cuda')      # as the loop runs
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


@pytest.mark.parametrize('trial, wins, reason', [
    (Clock(ONE, ONE, FAST), True, ''), (Clock(ONE, ONE, SLOW), False, ''), (Clock((0.0,) * 3, (0.0,) * 3, FAST), True, ''),
    (Clock((1.0, 2.0, 3.05), ONE, FAST), True, ''),
    (Clock((1.0, 2.0, 3.3), ONE, FAST), False, ''), (Clock((1.0, 2.0, math.nan), ONE, FAST), False, ''),
    (Clock(ONE, (math.nan,) * 3, FAST), False, ''),
    (Clock(ONE, ONE, FAST, triton.runtime.errors.OutOfResources(300_000, 232_448, 'shared memory')), False,
     'OutOfResources: out of resource: shared'),
    (Clock(ONE, ONE, FAST, triton.runtime.errors.PTXASError('no such target')), False, 'PTXASError: PTXAS error: no such target'),
    (Clock(ONE, ONE, FAST, RuntimeError('CUDA error\nmore')), False, 'RuntimeError: CUDA error'),
    (Clock(ONE, ONE, FAST, RuntimeError()), False, 'RuntimeError: ')])
def test_what_wins_is_chosen(monkeypatch, autocast, trial, wins, reason):
    """Faster and no more than 3% off; the reason is kept. `loss` by the same rule."""
    unroll.release()                                           # of earlier tests
    measured = []

    def trials(plan, n):
        measured.append(n)
        return {'attention': trial, 'experts': Clock(ONE, ONE, FAST)}
    monkeypatch.setattr(kernels, 'chosen', {})
    monkeypatch.setattr(unroll, 'chosen', kernels.chosen)
    monkeypatch.setattr(kernels, 'seconds_of', seconds_of)
    monkeypatch.setattr(unroll, 'trials', trials)
    monkeypatch.setattr(torch.cuda, 'is_current_stream_capturing', lambda: False)
    plan, names = made_plan('cuda'), {'experts'} | ({'attention'} if wins else set())
    for again in (plan, plan._replace(L=7, router=5, graphs=True)):         # the same kernels: measured once
        assert unroll.choose(again, 4) == names
    assert measured == [4]
    (found, _), = (tuple(x.values()) for x in kernels.chosen.values())
    assert found.get('error', '').startswith(reason) and ('error' in found) == (trial.error is not None)
    assert found['compiled'] == trial.times[False]
    line, = kernels.chosen_lines()
    assert line.startswith(f'attention: {"Triton" if wins else "compiled"} (') and line.endswith('experts: Triton (1 against 2 us)')
    unroll.choose(plan._replace(W=6), 4)
    unroll.choose(plan, 5)
    unroll.choose(plan._replace(grad=False), 5)
    assert measured == [4, 4, 5, 5]
    assert unroll.choose(plan._replace(device=torch.device('cpu')), 4) == frozenset()
    assert unroll.choose(made_plan('cuda'), 4) == names and not unroll._work


def test_an_error_of_another_kind_is_a_bug(monkeypatch):
    monkeypatch.setattr(kernels, 'seconds_of', seconds_of)
    with pytest.raises(ZeroDivisionError):
        kernels.compare(Clock(ONE, ONE, FAST, ZeroDivisionError()))


def test_nothing_is_measured_during_a_capture(monkeypatch):
    capturing = [True]
    monkeypatch.setattr(kernels, 'chosen', {})
    monkeypatch.setattr(unroll, 'chosen', kernels.chosen)
    monkeypatch.setattr(torch.cuda, 'is_current_stream_capturing', lambda: capturing[0])
    monkeypatch.setattr(unroll, 'trials', lambda plan, n: dict.fromkeys(unroll.TRITON, Clock(ONE, ONE, FAST)))
    monkeypatch.setattr(kernels, 'seconds_of', seconds_of)
    plan, sizes = made_plan('cuda'), (6, 11, torch.float32, torch.device('cuda'))
    with monkeypatch.context() as patch:
        patch.setattr(kernels, 'compare', lambda run: pytest.fail('measured'))
        patch.setattr(unroll, 'compare', kernels.compare)
        assert unroll.choose(plan, 4) == frozenset() and not kernels.loss_by_triton(*sizes) and not kernels.chosen
    capturing[0] = False                                       # what was not measured then is, later
    assert unroll.choose(plan, 4) == frozenset(unroll.TRITON)
    kernels.chosen[sizes[:3]] = {'loss': {'compiled': 2, 'triton': 1, 'difference': 0}}
    capturing[0] = True                                        # and what was measured serves captures
    assert unroll.choose(plan, 4) == frozenset(unroll.TRITON) and kernels.loss_by_triton(*sizes)

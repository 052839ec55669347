"""
The Triton kernels in the unroll, and the choice between them and the model's own pieces. Without a
GPU: under Triton's interpreter, in fp32, and compiled for an H100 without running, each in a
process of its own (the interpreter must be chosen before anything imports triton). test_gpu.py has
them in bf16. `python tests/test_triton.py 8,128,256` prints what each kernel takes of an H100.
"""

import math
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

triton = pytest.importorskip('triton', reason='triton is not installed: its kernels are not tested')
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / 'tests')]
from reference import assert_close, edit_equations, make  # noqa: E402
from test_model import compare, no_memory_kept  # noqa: E402, F401  a fixture

import kernels  # noqa: E402
import model as model_file  # noqa: E402
import triton_kernels as tk  # noqa: E402
import unroll  # noqa: E402

interpreted = pytest.mark.skipif(
    os.environ.get('TRITON_INTERPRET') != '1',
    reason='test_in_a_process_with_the_interpreter runs it',
)


def run(*command, **env):
    options = {'env': os.environ | {'OMP_NUM_THREADS': '1'} | env, 'cwd': ROOT, 'text': True}
    done = subprocess.run(command, capture_output=True, **options)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.skipif(
    triton.__version__ < '3.7' and np.lib.NumpyVersion(np.__version__) >= '2.4.0',
    reason="Triton 3.6's interpreter takes loops' bounds only with NumPy < 2.4",
)
def test_in_a_process_with_the_interpreter():
    options = '-q', '-x', '-p', 'no:cacheprovider', '-k', 'not in_a_process and (triton or kernels)'
    files = __file__, str(ROOT / 'tests' / 'test_decode.py')
    printed = run(sys.executable, '-m', 'pytest', *files, *options, TRITON_INTERPRET='1')
    assert 'passed' in printed and 'skipped' not in printed, printed[-4000:]


# ---- the unroll with kernels in it ----


@pytest.fixture
def calls(monkeypatch):
    """The wrappers, watched. What else would be compiled runs as it is."""
    for where in (unroll, kernels, tk):
        monkeypatch.setattr(where, 'compiled', lambda f: f)
    monkeypatch.setattr(kernels, 'loss_by_triton', lambda *sizes: True)
    names = 'window_attention window_attention_backward product norm_sum cross_entropy'
    mocks = {name: Mock(wraps=getattr(tk, name)) for name in names.split()}
    for name, mock in mocks.items():
        monkeypatch.setattr(tk, name, mock)
    return mocks


# E, G, R, K, W; streams, tokens of a chunk, block, group; aggregation, own caches, kernels
CASES = """
3,1,2,12,5 2,4,3,2 sqrt_sum False attention,experts
3,1,2,12,5 2,4,3,2 softmax_l2 True attention,experts
2,1,2,12,5 2,4,3,2 sqrt_sum False attention
2,1,2,12,5 2,4,3,2 mean True experts
1,1,2,64,3 2,2,2,4 sqrt_sum False experts,split
1,1,2,10,70 2,3,3,4 softmax_mean False attention
1,1,2,10,3 131,1,2,4 softmax_mean False experts
2,2,1,34,1 1,4,5,2 mean False attention,experts
1,1,2,10,3 1,18,18,18 sqrt_sum False attention
2,1,3,96,37 2,2,3,4 sqrt_sum True attention
10,1,2,128,5 1,2,2,2 sqrt_sum False attention
"""


@interpreted
@pytest.mark.parametrize('case', CASES.strip().splitlines())
def test_unroll_is_the_reference(monkeypatch, calls, case):
    """Windows empty, full, between; heads of all layouts; one kernel alone too: what it gets from
    the model's own pieces may lie otherwise in memory."""
    heads, sizes, aggregation, own, names = case.split()
    (E, G, R, K, W), (B, T, block, group) = ([int(n) for n in x.split(',')] for x in (heads, sizes))
    monkeypatch.setattr(unroll, 'BLOCK', block)
    monkeypatch.setattr(unroll, 'GROUP', group)
    monkeypatch.setattr(unroll, 'choose', lambda *_: frozenset(names.split(',')))
    sizes = {'n_expert': E, 'n_embd': G * R * K, 'n_head': G * R, 'n_kv_head': G, 'window': W}
    sizes |= {'aggregation': aggregation, 'share_kv': own == 'False', 'n_layer': 1}
    model = make(model_file.RecurrentGPT, 7, torch.float32, **sizes)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.7)  # fp32's own error stays small
    compare(model, T, 2, 1 if B > 1 else None, ['compiled'], rtol=2e-5, B=B)
    wanted = {'cross_entropy'}
    if 'attention' in names:
        wanted |= {'window_attention', 'window_attention_backward'}
    if 'experts' in names:
        wanted |= {'product', 'norm_sum'}
    assert {name for name, mock in calls.items() if mock.called} == wanted


def asked(**changes):
    """What the unroll of a small model asks `choose`: recipe, weights of a level."""
    sizes = {'n_embd': 24, 'n_head': 2, 'n_kv_head': 1, 'n_expert': 3, **changes}
    level = make(model_file.RecurrentGPT, dtype=torch.float32, **sizes).levels[0]
    dtypes = torch.float32, torch.float32
    return unroll.Recipe(model_file.token, level.rules(), *dtypes, True, False), level.weights()


TRIALS = [({}, 5, 4), ({'share_kv': False, 'aggregation': 'softmax_l2'}, 3, 7)]


@interpreted
@pytest.mark.parametrize('changes, W, n', TRIALS, ids=str)
def test_trials_agree(monkeypatch, calls, changes, W, n):
    """What choose() measures: both ways the same, with gradients; compare() finds what is not."""
    monkeypatch.setattr(unroll, 'GROUP', 3)
    recipe, weights = asked(**changes)
    trials = unroll.trials(recipe, weights, (2, 24, W, n))
    assert set(trials) == {'attention', 'experts'}
    monkeypatch.setattr(kernels, 'seconds_of', lambda run: (run(), 1.0)[1])
    for run in trials.values():
        for i, y in enumerate(run(False)):
            assert y.norm() > 1e-3, f'{i}: nothing to compare'
        assert kernels.compare(run)['difference'] < 1e-4
    for name, kernel in (('attention', 'window_attention'), ('experts', 'norm_sum')):
        right = getattr(tk, kernel)
        with monkeypatch.context() as patch:
            patch.setattr(tk, kernel, lambda *args, right=right: right(*args).mul_(1.1))
            assert kernels.compare(trials[name])['difference'] > 0.05
    edit_equations(monkeypatch)
    for run in unroll.trials(recipe, weights, (2, 24, W, n)).values():
        assert kernels.compare(run)['difference'] > 0.05


def test_an_aggregation_that_the_kernels_do_not_know(monkeypatch):
    assert tk.leave_of('max', 2, torch.zeros(())) is None
    monkeypatch.setattr(tk, 'leave_of', lambda *_: None)
    assert set(unroll.trials(*asked(), (2, 24, 3, 2))) == {'attention'}


# ---- loss ----


@interpreted
@pytest.mark.parametrize('rows, V', [(3, 50304), (5, 1001), (2, 7)])
def test_cross_entropy(rows, V):
    made = torch.Generator().manual_seed(0)
    logits, target = torch.randn(rows, V, generator=made) * 20, torch.arange(rows) * 3 % V
    logits[0, :2] = torch.tensor([1e4, -1e4])  # far beyond the cap
    logits[-1] -= 200  # all scores at the lower cap
    x = logits.double().requires_grad_()
    want = model_file.losses(x, target)
    (exact,) = torch.autograd.grad(want, x)  # a far score's is next to nothing
    loss, d = tk.cross_entropy(logits, target, 0.25)
    assert abs(loss.item() - want.item()) < 1e-4 * want
    assert_close(d.double(), 0.25 * exact, 2e-5, size=max(0.25 * exact.norm().item(), 0.1))


# ---- compiled for an H100, without one ----


class H100:
    """What triton asks a driver for."""

    get_current_target = staticmethod(lambda: triton.backends.compiler.GPUTarget('cuda', 90, 32))
    get_current_device = get_current_stream = staticmethod(lambda *_: 0)


def report(cells):
    """Compiles all that is launched at the cells' sizes (E, W, B), a kernel once a set of tiles."""
    jit, seen = triton.runtime.jit.JITFunction, {}
    triton.runtime.driver.set_active(H100)
    start, tools = jit.run, Path(triton.__file__).parent / 'backends/nvidia/bin'

    def compiled_only(self, *args, grid, warmup, **options):
        done = start(self, *args, grid=grid, warmup=True, **options)
        if id(done) in seen:
            return
        seen[id(done)] = done
        with tempfile.NamedTemporaryFile(suffix='.cubin') as file:
            file.write(done.asm['cubin'])
            file.flush()
            usage = run(str(tools / 'cuobjdump'), '-res-usage', file.name)
        figures = {name: int(n) for name, n in re.findall(r'(REG|STACK):(\d+)', usage)}
        sizes = [x for x in (*args, *options.values()) if isinstance(x, tk.Tile | kernels.Heads)]
        print(self.__name__, *sizes, figures, done.metadata.shared, flush=True)
        assert done.metadata.shared < 227 * 1024, 'an H100 has 227 KiB of shared memory a block'
        assert figures['STACK'] <= 16, 'registers spill'

    jit.run, unroll.compiled, tk.compiled = compiled_only, *[lambda f, **_: f] * 2
    with torch.device('meta'):
        for E, W, B in cells:
            level, bf16 = model_file.Level(model_file.ModelConfig(n_expert=E), True), torch.bfloat16
            equations, h = (model_file.token, level.rules()), level.rules().heads
            recipe = unroll.Recipe(*equations, bf16, torch.float32, True, False)
            for base in (), ('attention', 'experts', 'pdl'):  # then also 'split'
                sizes = (B, 768, W, 9), frozenset(base)
                for trial in unroll.trials(recipe, level.weights(), *sizes).values():
                    trial(True)
            qkv = torch.empty(B, 96, dtype=bf16)
            ring = torch.empty(2, B * h.C, W, h.K, dtype=bf16).unbind(0)
            place, rope = torch.empty(9, dtype=torch.int64), torch.empty(9)
            tk.ring_attention(qkv, ring, place, rope, h)
        for dtype in (torch.bfloat16, torch.float32):
            logits, target = torch.empty(333, 50304, dtype=dtype), torch.empty(333).long()
            tk.cross_entropy(logits, target, 0.1)
    names = {name for name in vars(tk) if name.endswith('_kernel')}
    assert {done.metadata.name for done in seen.values()} == names
    print(f'compiled {len(seen)}')


def test_kernels_compile_for_an_h100_in_a_process():
    cells = '1,2048,16', '2,128,256'
    assert 'compiled ' in run(sys.executable, __file__, *cells, TRITON_INTERPRET='0')


# ---- the choice ----

FAST, SLOW = {True: 1e-6, False: 2e-6}, {True: 2e-6, False: 1e-6}
CUDA, ERRORS = torch.device('cuda'), triton.runtime.errors


def clock(mine=(1.0, 2.0, 3.0), times=FAST, error=None):
    """A trial of given results and times; seconds_of reads the time of what ran last."""
    memory = torch.zeros(3)

    def trial(by_triton):
        if by_triton and error is not None:
            raise error
        clock.now = times[by_triton]
        return memory.copy_(torch.tensor(mine if by_triton else (1.0, 2.0, 3.0))), torch.ones(2)

    return trial


@pytest.fixture
def capturing(monkeypatch):
    """Measuring as on a GPU; whether a capture is going on."""
    monkeypatch.setattr(kernels, 'chosen', {})
    monkeypatch.setattr(kernels, 'seconds_of', lambda run: (run(), clock.now)[1])
    mock = Mock(return_value=False)
    monkeypatch.setattr(torch.cuda, 'is_current_stream_capturing', mock)
    return mock


MEASURED = [  # a trial; is it chosen, and why not
    ({}, True, ''),
    ({'times': SLOW}, False, ''),
    ({'mine': (1.0, 2.0, 3.05)}, True, ''),
    ({'mine': (1.0, 2.0, 3.3)}, False, ''),
    ({'mine': (1.0, 2.0, math.nan)}, False, ''),
    ({'error': ERRORS.OutOfResources(3, 2, 'x')}, False, 'OutOfResources: out of resource'),
    ({'error': RuntimeError('CUDA error\nmore')}, False, 'RuntimeError: CUDA error'),
]


@pytest.mark.parametrize('trial, wins, reason', MEASURED, ids=str)
def test_what_wins_is_chosen(capturing, trial, wins, reason):
    """Faster and no more than 3% off; the reason is kept, and printed."""
    trials = Mock(return_value={'attention': clock(**trial), 'experts': clock()})
    for _ in range(2):  # measured once
        found = kernels.by_triton(('key',), CUDA, trials)
        assert found == {'experts'} | ({'attention'} if wins else set())
    assert kernels.chosen['key',]['attention'].get('error', '').startswith(reason)
    (line,) = kernels.chosen_lines()
    assert line.startswith(f'attention: {"" if wins else "not "}taken (')
    assert line.endswith('experts: taken (1 against 2 us, 0.0% apart)')
    assert not kernels.by_triton(('key',), torch.device('cpu'), trials)
    assert trials.call_count == 1


def test_nothing_is_measured_during_a_capture(capturing):
    """What was not measured then is, later; and what was measured serves captures. An error of
    another kind is a bug."""
    for now, found in ((True, set()), (False, {'x'}), (True, {'x'})):
        capturing.return_value = now
        assert kernels.by_triton(('key',), CUDA, lambda: {'x': clock()}) == found
    capturing.return_value = False
    with pytest.raises(ZeroDivisionError):
        kernels.by_triton(('other',), CUDA, lambda: {'x': clock(error=ZeroDivisionError())})


if __name__ == '__main__':
    report([tuple(map(int, cell.split(','))) for cell in sys.argv[1:]])  # cells as E,W,B

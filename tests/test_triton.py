"""Test Triton forms in training, and the choice between them and the functions they replace.

Without a GPU the kernels run in Triton's interpreter, in fp32, and are compiled for an H100 without
running, each in a process of its own, because the interpreter must be chosen before anything
imports triton. test_gpu.py runs them in bf16. `python tests/test_triton.py 8,128,256` prints what
each kernel takes of an H100.
"""

import itertools
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

triton = pytest.importorskip('triton', reason='triton is not installed: its kernels are not tested')
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / 'tests')]
from reference import assert_close, make  # noqa: E402
from test_model import compare, default_mode  # noqa: E402, F401  a fixture

import decode  # noqa: E402
import forms  # noqa: E402
import graphs  # noqa: E402
import layer  # noqa: E402
import loss as loss_file  # noqa: E402
import triton_kernels as tk  # noqa: E402
import unroll  # noqa: E402
from model import ModelConfig, RecurrentGPT  # noqa: E402

triton_version = [int(part) for part in triton.__version__.split('.')[:2]]
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
    triton_version < [3, 7] and np.lib.NumpyVersion(np.__version__) >= '2.4.0',
    reason="Triton 3.6's interpreter takes loops' bounds only with NumPy < 2.4",
)
def test_in_a_process_with_the_interpreter(request):
    options = ['-q', '-x', '-p', 'no:cacheprovider', '-k', 'not in_a_process and triton']
    options += ['--long'] if request.config.getoption('--long') else ['-m', 'not gpu and not long']
    files = __file__, str(ROOT / 'tests' / 'test_decode.py')
    printed = run(sys.executable, '-m', 'pytest', *files, *options, TRITON_INTERPRET='1')
    assert 'passed' in printed and 'skipped' not in printed, printed[-4000:]


# ---- training with Triton forms ----


class Case(NamedTuple):
    """Sizes of a model of one layer, of a chunk, and the forms in use beside 'loss'."""

    forms: tuple[str, ...]
    E: int = 2  # experts
    G: int = 1  # key-value heads per expert
    R: int = 2  # query heads per key-value head
    K: int = 12  # head size
    W: int = 5  # window
    B: int = 2  # streams
    T: int = 3  # tokens per chunk
    block: int = 2  # unroll.BLOCK
    group: int = 2  # unroll.GROUP
    aggregation: str = 'sqrt_sum'
    share_kv: bool = True


BOTH = ('attention', 'experts')
CASES = [
    Case(BOTH, E=3),
    Case(BOTH, T=2, aggregation='softmax_l2', share_kv=False),
    Case(('experts',), E=1, R=1, K=64, W=3, T=2, group=4),
    Case(('attention',), E=1, K=10, W=70, T=3, group=4, aggregation='softmax_mean'),
    Case(BOTH, G=2, R=1, K=18, W=1, B=1, T=2, block=5, aggregation='mean'),
    Case(('attention',), R=3, K=96, W=37, T=2, group=4, share_kv=False),
]
LONG_CASES = [
    Case(('experts',), E=1, K=10, W=3, B=131, T=1, group=4, aggregation='softmax_mean'),
    Case(('attention',), E=1, K=10, W=3, B=1, T=18, block=18, group=18),
    Case(('attention',), E=10, K=128, B=1, T=2),
]
ALL_CASES = [*CASES, *(pytest.param(case, marks=pytest.mark.long) for case in LONG_CASES)]


@interpreted
@pytest.mark.parametrize('case', ALL_CASES, ids=str)
def test_unroll_is_the_reference(monkeypatch, case):
    """The cases have empty, full and partly filled windows, all layouts of heads, and forms alone
    and together. What a form replaces cannot be called."""
    for name, replaced in (('attention', 'split_heads'), ('experts', 'add_norm')):
        if name in case.forms:
            monkeypatch.setattr(layer, replaced, None)
    monkeypatch.setattr(loss_file, 'losses', None)
    monkeypatch.setattr(unroll, 'BLOCK', case.block)
    monkeypatch.setattr(unroll, 'GROUP', case.group)
    model = make(
        RecurrentGPT,
        7,
        torch.float32,
        n_layer=1,
        n_expert=case.E,
        n_embd=case.G * case.R * case.K,
        n_head=case.G * case.R,
        n_kv_head=case.G,
        window=case.W,
        aggregation=case.aggregation,
        share_kv=case.share_kv,
    )
    model.forms = frozenset({'loss', *case.forms})
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.7)  # the rounding of fp32 stays small
    reset_before = 1 if case.B > 1 else None
    compare(model, case.T, 2, reset_before, ['fast'], rtol=2e-5, B=case.B)


TRIALS = [(False, 'attention', ('experts', 'loss')), (True, 'experts', ('attention',))]


@interpreted
@pytest.mark.parametrize('decoding, broken, expected', TRIALS, ids=str)
def test_a_form_that_agrees_in_the_trial_is_used_and_one_that_is_off_by_10_percent_is_not(
    monkeypatch, decoding, broken, expected
):
    """Of a training chunk, or of a token that is decoded, which has no loss. Every run seems faster
    than the one before, so that each form that agrees is chosen."""
    monkeypatch.setattr(unroll, 'GROUP', 2)
    monkeypatch.setattr(forms, 'GROUP', 2)
    times = (0.9**i for i in itertools.count())
    monkeypatch.setattr(forms, 'cuda_seconds', lambda run: (run(), next(times))[1])
    sizes = {'n_layer': 1, 'n_expert': 1, 'n_embd': 24, 'n_head': 2, 'n_kv_head': 1}
    options = {'share_kv': False, 'aggregation': 'softmax_l2'}
    model = make(RecurrentGPT, dtype=torch.float32, **sizes, **options)
    model.train(not decoding)
    form = graphs.registered[broken]
    monkeypatch.setitem(graphs.registered, broken, lambda *args: 1.1 * form(*args))
    chosen, lines = forms.choose(lambda: forms.make_trial(model, 2), sorted({broken, *expected}))
    assert chosen == set(expected), lines


@interpreted
@pytest.mark.parametrize('rows, V', [(3, 50304), (5, 1001), (2, 7)])
def test_loss(rows, V):
    rng = torch.Generator().manual_seed(0)
    logits, target = torch.randn(rows, V, generator=rng) * 20, torch.arange(rows) * 3 % V
    logits[0, :2] = torch.tensor([1e4, -1e4])  # far beyond the cap
    logits[-1] -= 200  # all scores at the lower cap
    x = logits.double().requires_grad_()
    expected, _ = loss_file.losses(x, target, None)
    (grad,) = torch.autograd.grad(expected, x)  # almost zero for logits beyond the cap
    loss, _, d = tk.slice_loss(logits, target, 0.25, None)
    assert abs(loss.item() - expected.item()) < 1e-4 * expected
    assert_close(d.double(), 0.25 * grad, 2e-5, size=max(0.25 * grad.norm().item(), 0.1))


# ---- a form is for the code that it was written for ----


def test_forms_are_those_of_the_code():
    """A failure means that a function which a form replaces was edited: see
    triton_kernels.REPLACES."""
    assert {name: graphs.code_hash(functions) for name, functions in tk.REPLACES.items()} == tk.CODE


FUNCTION = """    @fused
    def f(x: Tensor) -> Tensor:
        '''Return x + 1.'''
        return x + 1
"""
EDITS = [  # what is replaced, by what, whether the code is another
    ('        return', '        # why\n\n        return', False),
    ('Return x + 1.', 'Add one.', False),
    ('x + 1\n', '(x\n            + 1)  # one\n', False),
    ('x + 1\n', 'x + 2\n', True),
    ('    @fused\n', '', True),
]


@pytest.mark.parametrize('old, new, is_another', EDITS)
def test_comments_docstrings_and_layout_do_not_turn_a_form_off(monkeypatch, old, new, is_another):
    monkeypatch.setattr(graphs.inspect, 'getsource', lambda text: text)
    before, after = (graphs.code_hash((x,)) for x in (FUNCTION, FUNCTION.replace(old, new)))
    assert (before != after) == is_another


def test_forms_and_fused_functions_take_keyword_arguments(monkeypatch):
    monkeypatch.setattr(graphs, 'compiled', lambda f: f)
    monkeypatch.setattr(graphs.fused, 'enabled', True)
    monkeypatch.setitem(graphs.registered, 'form', lambda x, y: NotImplemented if y else -x)
    f = graphs.has_triton_form('form')(graphs.fused(lambda x, y: x + y))
    assert f(1, y=2) == 3
    with graphs.using({'form'}):
        assert f(1, y=2) == 3 and f(1, y=0) == -1


# ---- the choice ----

# By the forms in use: the result over the exact one, or an error, and the seconds it takes. Then
# the forms chosen among 'a', 'b' and 'c', of which 'c' is not registered, and a part of the lines.
SECONDS = {'': 4.0, 'a': 3.0, 'b': 4.0, 'ab': 2.0}
TOO_LARGE = triton.runtime.errors.OutOfResources(3, 2, 'x')
CHOICES = [
    ({}, {}, 'ab', 'a: Triton form used: 3000000 us, without it 4000000 us'),
    ({}, {'ab': 2.9}, 'a', 'b: Triton form not used: 2900000 us'),
    ({'a': 1.01}, {}, '', 'largest error 1.00%, without it 0.10%'),
    ({'a': 1.003}, {}, 'ab', 'largest error 0.30%'),
    ({'ab': float('nan')}, {}, 'a', 'largest error inf%'),
    ({'ab': TOO_LARGE}, {}, 'a', 'b: Triton form not used: OutOfResources'),
    ({'a': KeyError('gate')}, {}, '', "a: Triton form not used: KeyError: 'gate'"),
    ({}, {}, 'ab', 'c: Triton form not used: a function that it replaces was edited'),
    ({'': float('nan')}, {}, '', 'a: Triton form not used'),
    ({'': RuntimeError('no gradient')}, {}, '', 'Triton forms not used: RuntimeError: no gradient'),
]


@pytest.mark.parametrize('results, seconds, expected, line', CHOICES, ids=str)
def test_forms_that_agree_and_are_5_percent_faster_are_used(
    monkeypatch, results, seconds, expected, line
):
    results = dict.fromkeys(SECONDS, 1.001) | results
    seconds = SECONDS | seconds
    exact = torch.tensor([1.0, 2.0, 3.0])

    def in_use():
        return ''.join(sorted(graphs.enabled_forms()))

    def trial(is_exact):
        result = 1.0 if is_exact else results[in_use()]
        if isinstance(result, Exception):
            raise result
        return [result * exact]

    monkeypatch.setattr(forms, 'cuda_seconds', lambda run: seconds[in_use()])
    monkeypatch.setattr(forms, 'registered', {'a', 'b'})
    chosen, lines = forms.choose(lambda: trial, ('a', 'b', 'c'))
    assert ''.join(sorted(chosen)) == expected and line in '\n'.join(lines)


def test_if_triton_kernels_cannot_be_imported_no_form_is_used(monkeypatch):
    """As after a hack that renames a function which a form replaces."""
    monkeypatch.setitem(sys.modules, 'triton_kernels', None)
    chosen, (line,) = forms.choose(None)
    assert not chosen and line.startswith('Triton forms not used: ModuleNotFoundError')


# ---- compiled for an H100, without one ----


class H100:
    """Answer what triton asks a driver for."""

    get_current_target = staticmethod(lambda: triton.backends.compiler.GPUTarget('cuda', 90, 32))
    get_current_device = get_current_stream = staticmethod(lambda *_: 0)


def report(cells):
    """Compile all kernels that are launched at these sizes (E, W, B), each once per set of tiles;
    print and check what they take of an H100."""
    jit = triton.runtime.jit.JITFunction
    jit_run = jit.run
    cuobjdump = Path(triton.__file__).parent / 'backends/nvidia/bin/cuobjdump'
    seen = {}
    triton.runtime.driver.set_active(H100)

    def compiled_only(self, *args, grid, warmup, **options):
        done = jit_run(self, *args, grid=grid, warmup=True, **options)
        if id(done) in seen:
            return
        seen[id(done)] = done
        with tempfile.NamedTemporaryFile(suffix='.cubin') as file:
            file.write(done.asm['cubin'])
            file.flush()
            usage = run(str(cuobjdump), '-res-usage', file.name)
        figures = {name: int(n) for name, n in re.findall(r'(REG|STACK):(\d+)', usage)}
        print(self.__name__, figures, done.metadata.shared, flush=True)
        assert done.metadata.shared < 227 * 1024, 'an H100 has 227 KiB of shared memory a block'
        assert figures['STACK'] <= 16, 'registers spill'

    jit.run = compiled_only
    with torch.device('meta'), graphs.using({'attention', 'experts'}), torch.enable_grad():
        for E, W, B in cells:
            model = RecurrentGPT(ModelConfig(n_expert=E, n_layer=1, window=W))
            heads, bf16 = model.heads, torch.bfloat16
            (weights,) = model.layer_weights(B, bf16, unroll.DeferredLinear)
            slots = unroll.Slots(9, W, torch.zeros(B).long(), heads, torch.float32, W)
            kv = torch.empty(2, B * heads.C, W, heads.K, dtype=bf16)
            window, s = unroll.Window(slots, *kv, W), torch.empty(B, 768, requires_grad=True)
            for _ in slots.angles:
                s = layer.layer(weights, s, s.detach(), window, model.config)
            s.sum().backward()
            position = decode.RingPosition(B, [W], heads.K, torch.float32, torch.device('meta'))
            qkv = torch.empty(B, len(weights.wqkv.w), dtype=bf16)
            tk.attend(qkv, decode.Ring(position, heads, *kv, W))
        for dtype in (torch.bfloat16, torch.float32):
            logits, target = torch.empty(333, 50304, dtype=dtype), torch.empty(333).long()
            tk.slice_loss(logits, target, 0.1, None)
    kernels = {name for name in vars(tk) if name.endswith('_kernel')}
    assert {done.metadata.name for done in seen.values()} == kernels
    print(f'compiled {len(seen)}')


def test_kernels_compile_for_an_h100_in_a_process():
    cells = '1,2048,16', '2,128,256'
    assert 'compiled ' in run(sys.executable, __file__, *cells, TRITON_INTERPRET='0')


if __name__ == '__main__':
    report([tuple(map(int, cell.split(','))) for cell in sys.argv[1:]])  # cells as E,W,B

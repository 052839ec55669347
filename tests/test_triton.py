"""Test Triton overrides in training, and the choice between them and the functions they replace.

Without a GPU the kernels run in Triton's interpreter, in fp32, in a process of their own, because
the interpreter must be chosen before anything imports triton; and they are compiled for an H100
without running. test_gpu.py runs them in bf16.
"""

import gc
import os
import weakref
from pathlib import Path

import processes
import pytest
import torch
from reference import assert_close, make
from test_model import compare, default_mode  # noqa: F401  a fixture

import decode
import kernels
import model as model_file
import overrides
import unroll
from model import ModelConfig, RecurrentGPT
from support import compiling

triton = pytest.importorskip('triton', reason='triton is not installed: its kernels are not tested')

interpreted = pytest.mark.skipif(
    os.environ.get('TRITON_INTERPRET') != '1', reason='test_in_the_interpreter runs it'
)


def test_in_the_interpreter(request):
    files = __file__, Path(__file__).with_name('test_decode.py')
    tests = 'triton and not in_the_interpreter and not h100'
    options = ['--long'] if request.config.getoption('--long') else ['-m', 'not gpu and not long']
    command = ['-m', 'pytest', '-q', '-x', '-p', 'no:cacheprovider', '-k', tests, *options, *files]
    done = processes.run(command, env=os.environ | {'TRITON_INTERPRET': '1'})
    assert done.returncode == 0 and 'skipped' not in done.stdout, done.stdout[-4000:]


# ---- training with Triton overrides ----


CASES = [  # forms in use beside 'loss', streams, tokens per chunk, sizes of the model
    ('attention', 2, 4, {'n_expert': 3}),
    ('attention', 2, 2, {'n_expert': 1, 'n_embd': 20, 'window': 70, 'aggregation': 'softmax_mean'}),
    (
        'attention experts',
        2,
        2,
        {'n_embd': 36, 'n_head': 3, 'window': 37, 'aggregation': 'softmax_l2', 'share_kv': False},
    ),
    ('attention experts', 1, 2, {'n_embd': 36, 'n_kv_head': 2, 'window': 1, 'aggregation': 'mean'}),
    pytest.param('experts', 131, 1, {'n_expert': 1, 'n_embd': 20}, marks=pytest.mark.long),
]


@interpreted
@pytest.mark.parametrize('names, B, T, sizes', CASES, ids=str)
def test_unroll_is_the_reference(monkeypatch, names, B, T, sizes):
    """The cases have empty, full and partly filled windows, all layouts of heads, and forms alone
    and together, in blocks of 3 tokens and groups of 2. What a form replaces cannot be called."""
    for name, replaced in (('attention', 'split_heads'), ('experts', 'add_norm')):
        if name in names:
            monkeypatch.setattr(model_file, replaced, None)
    monkeypatch.setattr(model_file, 'losses', None)
    monkeypatch.setattr(unroll, 'TILE', 3)
    monkeypatch.setattr(unroll, 'GROUP', 2)
    small = {'n_layer': 1, 'n_embd': 24, 'n_head': 2, 'n_kv_head': 1, 'window': 5}
    model = make(RecurrentGPT, 7, torch.float32, **small | sizes)
    model.overrides = frozenset({'loss', *names.split()})
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.7)  # the rounding of fp32 stays small
    compare(model, T, 2, 1 if B > 1 else None, ['fast'], rtol=2e-5, B=B)


@interpreted
def test_a_backward_that_is_interrupted_frees_its_memory(monkeypatch):
    """When the memory runs out, a trial with fewer streams needs all that this one has taken."""
    monkeypatch.setattr(unroll, 'GROUP', 2)
    sizes = {'n_layer': 1, 'n_expert': 2, 'n_embd': 24, 'n_head': 2, 'n_kv_head': 1, 'window': 5}
    model = make(RecurrentGPT, dtype=torch.float32, **sizes)
    model.overrides = frozenset({'attention', 'experts'})
    backward, calls = kernels.AttendWindow.backward, []

    def fail_once(ctx, grad):
        calls.append(1)
        if len(calls) == 3:
            raise torch.OutOfMemoryError('of 80 GB')
        return backward(ctx, grad)

    monkeypatch.setattr(kernels.AttendWindow, 'backward', fail_once)
    x, y = torch.randint(len(model.head), (2, 2, 4))
    loss, _ = model(x, y)
    nodes, found = [loss.objective.grad_fn], set()
    for node in nodes:  # all nodes of autograd's graph; the list grows
        if node not in found:
            found.add(node)
            nodes += [x for x, _ in node.next_functions if x is not None]
    markers = {type('Marker', (), {})() for _ in found}
    refs = [weakref.ref(x) for x in markers]
    for node in found:
        if 'AccumulateGrad' not in node.name():
            node.metadata['marker'] = markers.pop()
    markers.clear()
    with pytest.raises(torch.OutOfMemoryError):
        loss.objective.backward()
    del loss, node, nodes, found
    gc.collect()
    assert not any(ref() for ref in refs)


TRIALS = [(False, 'attention', {'experts', 'loss'}), (True, 'experts', {'attention'})]


@interpreted
@pytest.mark.parametrize('decoding, broken, expected', TRIALS, ids=['training', 'decoding'])
def test_a_form_that_is_off_by_10_percent_is_not_used(monkeypatch, decoding, broken, expected):
    """In the trial of a training chunk, or of a token that is decoded, which has no loss."""
    monkeypatch.setattr(unroll, 'GROUP', 2)
    monkeypatch.setattr(overrides, 'GROUP', 2)
    sizes = {'n_layer': 1, 'n_expert': 1, 'n_embd': 24, 'n_head': 2, 'n_kv_head': 1}
    options = {'share_kv': False, 'aggregation': 'softmax_l2'}
    model = make(RecurrentGPT, dtype=torch.float32, **sizes, **options)
    model.train(not decoding)
    form = compiling.registered[broken]
    monkeypatch.setitem(compiling.registered, broken, lambda *args: 1.1 * form(*args))
    trial = overrides.make_trial(model, 2, torch.float32)
    agreeing, lines = overrides.find_agreeing(trial, sorted({broken, *expected}))
    assert agreeing == expected and len(lines) == 1, lines


@interpreted
def test_loss():
    """The vocabulary is larger than a step of the kernel."""
    rng = torch.Generator().manual_seed(0)
    logits, target = torch.randn(3, 5003, generator=rng) * 20, torch.tensor([0, 3, 5002])
    logits[0, :2] = torch.tensor([1e4, -1e4])  # far beyond the cap
    logits[-1] -= 200  # all scores at the lower cap
    x = logits.double().requires_grad_()
    expected, _ = model_file.losses(x, target, None)
    (grad,) = torch.autograd.grad(expected, x)  # almost zero for logits beyond the cap
    loss, _, d = kernels.slice_loss(logits, target, 0.25, None)
    assert abs(loss.item() - expected.item()) < 1e-4 * expected
    assert_close(d.double(), 0.25 * grad, 2e-5, size=max(0.25 * grad.norm().item(), 0.1))


# ---- a form is for the code that it was written for ----


def test_forms_are_those_of_the_code():
    """A failure means that a function which a form replaces was edited: see
    kernels.REPLACES."""
    assert {
        name: compiling.code_hash(functions) for name, functions in kernels.REPLACES.items()
    } == kernels.CODE


FUNCTION = """    @fused
    def f(x: Tensor) -> Tensor:
        '''Return x + 1.'''
        return x + 1
"""
COMMENTED = """    @fused
    def f(x: Tensor) -> Tensor:
        '''Add one.'''
        # why

        return x + 1
"""


def test_an_edit_turns_a_form_off_and_a_comment_does_not(monkeypatch):
    monkeypatch.setattr(compiling.inspect, 'getsource', lambda text: text)
    code = compiling.code_hash((FUNCTION,))
    assert compiling.code_hash((COMMENTED,)) == code
    assert compiling.code_hash((FUNCTION.replace('x + 1\n', 'x + 2\n'),)) != code
    assert compiling.code_hash((FUNCTION.replace('    @fused\n', ''),)) != code


# ---- which are used ----

# By the overrides in use: the result over the exact one, or an error. Then those found among 'a',
# 'b' and 'c', of which 'c' is not registered, and the lines.
EDITED = "Triton override 'c' is not used: a function that it replaces was edited"
TOO_LARGE = triton.runtime.errors.OutOfResources(3, 2, 'x')
AGREEMENTS = [
    ({}, 'ab', [EDITED]),
    (
        {'a': 1.01, 'b': 1.002},
        'b',
        ["'a' is not used: largest error 1.00%, without it 0.10%", EDITED],
    ),
    ({'ab': float('nan')}, 'a', ["'b' is not used: largest error inf%", EDITED]),
    ({'ab': TOO_LARGE}, 'a', ["'b' is not used: OutOfResources", EDITED]),
    ({'': float('nan')}, '', ["'a' is not used", "'b' is not used", EDITED]),
]


@pytest.mark.parametrize('results, expected, expected_lines', AGREEMENTS, ids=str)
def test_overrides_that_agree_are_used(monkeypatch, results, expected, expected_lines):
    results = dict.fromkeys(['', 'a', 'b', 'ab'], 1.001) | results

    def trial(is_exact):
        result = 1.0 if is_exact else results[''.join(sorted(compiling.enabled_overrides()))]
        if isinstance(result, Exception):
            raise result
        return [result * torch.tensor([1.0, 2.0, 3.0])]

    monkeypatch.setattr(overrides, 'registered', {'a', 'b'})
    agreeing, lines = overrides.find_agreeing(trial, ('a', 'b', 'c'))
    assert ''.join(sorted(agreeing)) == expected
    for line, part in zip(lines, expected_lines, strict=True):
        assert part in line


# ---- compiled for an H100, without one ----


class H100:
    """Answer what triton asks a driver for."""

    get_current_target = staticmethod(lambda: triton.backends.compiler.GPUTarget('cuda', 90, 32))
    get_current_device = get_current_stream = staticmethod(lambda *_: 0)


def test_kernels_compile_for_an_h100(monkeypatch):
    """All kernels that are launched for these sizes, E experts, a window of W and B streams, are
    compiled, and take no more shared memory than an H100 has."""
    jit = triton.runtime.jit.JITFunction
    jit_run = jit.run
    compiled = set()

    def compile_only(self, *args, grid, warmup, **options):
        done = jit_run(self, *args, grid=grid, warmup=True, **options)
        assert done.metadata.shared < 227 * 1024, 'an H100 has 227 KiB of shared memory a block'
        compiled.add(done.metadata.name)

    monkeypatch.setattr(jit, 'run', compile_only)
    monkeypatch.setattr(triton.runtime.driver, '_active', H100)
    with torch.device('meta'), compiling.use_overrides({'attention', 'experts'}):
        for E, W, B in (1, 2048, 16), (2, 128, 256):
            model = RecurrentGPT(ModelConfig(n_expert=E, n_layer=1, window=W))
            heads, bf16 = model.heads, torch.bfloat16
            (weights,) = model.bind_weights(B, bf16, unroll.DeferredLinear)
            slots = unroll.CacheLayout(9, W, torch.zeros(B).long(), heads, torch.float32, W)
            kv = torch.empty(2, B * heads.C, W, heads.K, dtype=bf16)
            window, s = unroll.ChunkCache(slots, *kv, W), torch.empty(B, 768, requires_grad=True)
            for _ in slots.angles:
                s = model_file.run_layer(weights, s, s.detach(), window, model.config)
            s.sum().backward()
            position = decode.RingPosition(B, W, [W], heads.K, torch.float32, torch.device('meta'))
            qkv = torch.empty(B, len(weights.wqkv.w), dtype=bf16)
            kernels.attend(qkv, decode.RingCache(position, heads, *kv, W))
        logits, target = torch.empty(333, 50304, dtype=bf16), torch.empty(333).long()
        kernels.slice_loss(logits, target, 0.1, None)
    assert compiled == {name for name in vars(kernels) if name.endswith('_kernel')}

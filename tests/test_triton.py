"""Test Triton overrides in training, and the choice between them and the functions they replace.

Without a GPU the kernels run in Triton's interpreter, in fp32, in a process of their own, because
the interpreter must be chosen before anything imports triton; and they are compiled ahead of time,
without running, for GPUs that are not there. test_gpu.py runs them in bf16.
"""

import gc
import os
import re
import subprocess
import weakref
from pathlib import Path

import processes
import pytest
import torch
from reference import assert_close, make
from test_model import compare, default_mode  # noqa: F401  a fixture

import decode
import model as model_file
import overrides
import unroll
from model import ModelConfig, RecurrentGPT
from support import compiling

triton = pytest.importorskip('triton', reason='triton is not installed: its kernels are not tested')
import kernels  # noqa: E402  it imports triton

interpreted = pytest.mark.skipif(
    os.environ.get('TRITON_INTERPRET') != '1', reason='test_in_the_interpreter runs it'
)


def test_in_the_interpreter(request):
    processes.skip_without_interpreter()
    files = __file__, Path(__file__).with_name('test_decode.py')
    tests = 'triton and not in_the_interpreter and not ahead_of_time'
    options = ['--long'] if request.config.getoption('--long') else ['-m', 'not gpu and not long']
    command = ['-m', 'pytest', '-q', '-x', '-p', 'no:cacheprovider', '-k', tests, *options, *files]
    done = processes.run(command, env=os.environ | {'TRITON_INTERPRET': '1'})
    assert done.returncode == 0 and 'skipped' not in done.stdout, done.stdout[-4000:]


# ---- training with Triton overrides ----


CASES = [  # overrides in use beside 'loss', streams, tokens per chunk, sizes of the model
    ('attention', 2, 4, {'n_expert': 3}),
    ('attention stores', 2, 5, {'n_expert': 2}),
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
    """The cases have empty, full and partly filled windows, all layouts of heads, and overrides
    alone and together, in segments of 3 tokens and groups of 2. What an override replaces cannot be
    called. With 'stores', attention is this candidate."""
    monkeypatch.setattr(compiling, 'candidates', {'stores'} & set(names.split()))
    for name, replaced in (('attention', 'split_heads'), ('experts', 'add_norm')):
        if name in names:
            monkeypatch.setattr(model_file, replaced, None)
    monkeypatch.setattr(model_file, 'losses', None)
    monkeypatch.setattr(unroll, 'TILE', 3)
    monkeypatch.setattr(unroll, 'GROUP', 2)
    small = {'n_layer': 1, 'n_embd': 24, 'n_head': 2, 'n_kv_head': 1, 'window': 5}
    model = make(RecurrentGPT, 7, torch.float32, **small | sizes)
    model.overrides = frozenset({'loss', *names.split()}) - {'stores'}
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


@interpreted
def test_a_stream_may_have_any_number_of_tokens():
    """As many as 64 bits count."""
    sizes = {'n_layer': 1, 'n_embd': 8, 'n_head': 2, 'n_kv_head': 1}
    model = make(RecurrentGPT, dtype=torch.float32, window=5, **sizes)
    found = []
    for names in (set(), {'attention'}):
        model.overrides = frozenset(names)
        decoder = decode.Decoder(model, 1)
        for token in range(9):
            if token == 6:
                decoder.position.count.fill_(2**31 + 5)
            decoder.step(torch.tensor([token]))
        found.append(decoder.logits.clone())
    assert_close(found[1], found[0], 1e-4)


TRIALS = [  # decoding, the override that is wrong, in which calls, the others
    (False, 'attention', object, {'experts', 'loss'}),
    (True, 'experts', object, {'attention'}),
    (True, 'attention', unroll.ChunkCache, {'experts'}),
]


@interpreted
@pytest.mark.parametrize(
    'decoding, broken, last_argument, expected', TRIALS, ids=['training', 'decoding', 'prompt']
)
def test_an_override_that_is_off_by_10_percent_is_not_used(
    monkeypatch, decoding, broken, last_argument, expected
):
    """In the trial of a training chunk, or of a prompt and a token after it, which have no loss."""
    monkeypatch.setattr(unroll, 'GROUP', 2)
    sizes = {'n_layer': 1, 'n_expert': 1, 'n_embd': 24, 'n_head': 2, 'n_kv_head': 1}
    options = {'share_kv': False, 'aggregation': 'softmax_l2'}
    model = make(RecurrentGPT, dtype=torch.float32, **sizes, **options)
    model.train(not decoding)
    override = compiling.registered[broken]

    def wrong(*args):
        return override(*args) * (1.1 if isinstance(args[-1], last_argument) else 1)

    monkeypatch.setitem(compiling.registered, broken, wrong)
    trial = kernels.make_trial(model, 2, torch.float32)
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
    assert kernels.slice_loss(logits, torch.tensor([0, -100, 2]), 1.0, None)[0].isnan()


# ---- an override is for the code that it was written for ----


def test_overrides_are_those_of_the_code():
    """A failure means that a function which an override replaces was edited: see
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


def test_an_edit_turns_an_override_off_and_a_comment_does_not(monkeypatch):
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


# ---- compiled ahead of time ----

# Experts, tokens of a window, and streams: those of the paper's tables, on one of four GPUs.
TRAINED = [(E, W, 32768 // W) for W in (32, 64, 128, 256, 1024, 2048) for E in (16, 8, 4, 2)]
TRAINED += [(32, 128, 512)]  # of the plan lm-medium
DECODED = [(E, W, B) for W in (128, 2048) for E in (16, 8, 4, 2, 1) for B in (16, 1)]
AHEAD_OF_TIME = [
    pytest.param([(8, 128, 512), (1, 2048, 16)], [(8, 128, 16), (1, 2048, 1)], id='few'),
    pytest.param(TRAINED, DECODED, marks=pytest.mark.long, id='paper'),
]


class Driver:
    """Answer what triton asks a driver for. A capability is the number of its device as well,
    because triton keeps kernels by device."""

    def __init__(self, capability):
        self.get_current_target = lambda: triton.backends.compiler.GPUTarget('cuda', capability, 32)
        self.get_current_device = lambda: capability
        self.get_current_stream = lambda device=None: 0


def run_on_meta(E, W, B, training):
    """Launch the kernels of a layer, in training for 16 tokens, with tensors without memory."""
    model = RecurrentGPT(ModelConfig(n_expert=E, n_layer=1, window=W))
    heads, bf16, meta = model.heads, torch.bfloat16, torch.device('meta')
    linear = unroll.DeferredLinear if training else model_file.Linear
    (weights,) = model.bind_weights(B, bf16, linear)
    kv = torch.empty(2, B * heads.C, W, heads.K, dtype=bf16)
    s = torch.empty(B, 768, requires_grad=training)
    if not training:
        position = decode.RingPosition(B, W, [W], heads.K, torch.float32, meta)
        position.advance()
        with torch.no_grad():
            cache = decode.RingCache(position, heads, *kv, W)
            model_file.run_layer(weights, s, s, cache, model.config)
        return
    layout = unroll.CacheLayout(16, W, torch.zeros(B).long(), heads, torch.float32, W)
    cache = unroll.ChunkCache(layout, *kv, W)
    for _ in layout.angles:
        s = model_file.run_layer(weights, s, s.detach(), cache, model.config)
    s.sum().backward()


def resources(path, cubin):
    """Return the registers and the bytes of stack, where spilled registers go, per thread."""
    path.write_bytes(cubin)
    command = [triton.knobs.nvidia.cuobjdump.path, '-res-usage', path]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [int(n) for n in re.search(r'REG:(\d+) STACK:(\d+)', done.stdout).groups()]


@pytest.mark.parametrize('capability', [90, 100])
@pytest.mark.parametrize('trained, decoded', AHEAD_OF_TIME)
def test_kernels_compiled_ahead_of_time_fit_the_gpu(
    monkeypatch, tmp_path, capability, trained, decoded
):
    """For Hopper and Blackwell, no kernel and no candidate spills registers or takes more shared
    memory than there is. `make aot` prints what they take."""
    jit = triton.runtime.jit.JITFunction
    jit_run, found = jit.run, {}

    def compile_only(self, *args, grid, warmup, **options):
        done = jit_run(self, *args, grid=grid, warmup=True, **options)
        found.setdefault(done.hash, (done, sizes))

    monkeypatch.setattr(jit, 'run', compile_only)
    monkeypatch.setattr(triton.runtime.driver, '_active', Driver(capability))
    with torch.device('meta'), compiling.use_overrides({'attention', 'experts'}):
        for candidates in (set(), {'tile', 'stores', 'split'}):
            monkeypatch.setattr(compiling, 'candidates', candidates)
            for training, all_sizes in ((True, trained), (False, decoded)):
                for sizes in all_sizes:
                    run_on_meta(*sizes, training)
        sizes = (512, 50304)
        logits, target = torch.empty(sizes, dtype=torch.bfloat16), torch.empty(512).long()
        kernels.slice_loss(logits, target, 0.1, None)
    compiled = {done.metadata.name for done, _ in found.values()}
    assert compiled == {name for name in vars(kernels) if name.endswith('_kernel')}
    lines, too_large = [], []
    for done, sizes in found.values():
        registers, stack = resources(tmp_path / 'cubin', done.asm['cubin'])
        shared, warps = done.metadata.shared / 1024, done.metadata.num_warps
        numbers = f'{registers} registers, {stack} bytes of stack, {shared:.0f} KiB, {warps} warps'
        lines.append(f'{done.metadata.name} at {sizes}: {numbers}')
        if stack or shared > 227:
            too_large.append(lines[-1])
    print(f'sm_{capability}, triton {triton.__version__}, {len(lines)} kernels', *lines, sep='\n')
    assert not too_large

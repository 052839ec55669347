"""
The Triton kernels, the unroll with them in it, and the choice between them and the model's own
pieces. Without a GPU: under Triton's interpreter, in fp32, and compiled for an H100 without
running, each in a process of its own (the interpreter must be chosen before anything imports
triton). pytest -m gpu: in bf16 on a GPU, against float64. `python tests/test_triton.py` prints what
each kernel takes of an H100.
"""

import math
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

triton = pytest.importorskip('triton', reason='triton is not installed: its kernels are not tested')
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / 'tests')]
import reference  # noqa: E402
from reference import assert_close, make, tokens  # noqa: E402

import kernels  # noqa: E402
import model as model_file  # noqa: E402
import triton_kernels as tk  # noqa: E402
import unroll  # noqa: E402
from kernels import Heads, apply_rope, by_expert, rms_norm, rope_table  # noqa: E402

interpreted = pytest.mark.skipif(
    os.environ.get('TRITON_INTERPRET') != '1',
    reason='test_in_a_process_with_the_interpreter runs it',
)
gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason='no CUDA device')]


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


def cases(cpu, cuda):
    """Sizes of the kernels' tests: in fp32 under the interpreter, in bf16 on a GPU."""
    ways = (cpu, ('cpu', torch.float32), interpreted), (cuda, ('cuda', torch.bfloat16), gpu)
    rows = [
        pytest.param([int(n) for n in case.split(',')], *way, id=f'{case} {way[0]}', marks=marks)
        for text, way, marks in ways
        for case in text.split()
    ]
    return pytest.mark.parametrize('sizes, device, dt', rows)


def alike(mine, exact, dt, what='', size=None):
    limit = {torch.float32: 2e-5, torch.bfloat16: 2e-2}[dt]
    assert_close(mine.double(), exact.double(), limit, size, what)


def normal(*shape, device='cpu', dtype=torch.float32, seed=0):
    if device == 'meta':
        return torch.empty(shape, device=device, dtype=dtype)
    made = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=made).to(dtype).to(device)


def wide(x):
    return x.detach().to('cpu', torch.float64)


# ---- attention ----


def attention_inputs(B, h, W, n, device, dt):
    """A block's rows of qkv, gradients of att, carried entries and counts: windows empty, full,
    between."""
    made = {'device': device, 'dtype': dt}
    qkv = normal(n, B, (h.M + 2) * h.C * h.K, **made)
    datt = normal(n, h.E, B, h.G * h.R * h.K, **made, seed=2)
    keys = rms_norm(normal(B * h.C, W, h.K, seed=1)).to(device, dt)
    count = torch.tensor([0, W, W // 2, 1][:B] + [W] * (B - 4)).to(device)
    return qkv, datt, keys, normal(B * h.C, W, h.K, **made, seed=3), count


def attention_by_kernels(inputs, h, W, F):
    """A block's attended values, the gradients of qkv and of the carried entries, and the
    buffers."""
    qkv, datt, keys, values, count = inputs
    n, S, f32 = len(qkv), W + len(qkv), {'dtype': torch.float32, 'device': qkv.device}
    N, rope = len(keys), rope_table(S, h.K, torch.empty((), **f32))
    buffers = [values.new_full((N, S, h.K), math.nan) for _ in range(3)]
    kbuf, vbuf, _ = buffers
    kbuf[:, :W], vbuf[:, :W] = apply_rope(keys, *(x[:W] for x in rope)), values
    kept, dqkv, (dk, dv) = [], torch.empty_like(qkv), torch.zeros(2, N, S, h.K, **f32)
    for t in range(n):
        rq, lse, rk = torch.empty(N, h.M, **f32), torch.empty(N, h.M, **f32), torch.empty(N, **f32)
        att, q = torch.empty_like(datt[t]), values.new_empty(N, h.M, h.K)
        memory = *buffers, count, *rope
        tk.window_attention(qkv[t], memory, (t, W), h, att, (rq, rk, q, lse))
        kept.append((att, q, rq, rk, lse))
    for g0 in reversed(range(0, n, F)):
        P, DS = (values.new_full((N, F, h.M, S), math.nan) for _ in range(2))
        group, DO = range(g0, min(n, g0 + F)), values.new_full((N, F, h.M, h.K), math.nan)
        for t in reversed(group):
            memory, sums = (kbuf, vbuf, count, *rope), (dk, dv, P, DS, DO)
            dqkv[t] = tk.window_attention_backward(datt[t], kept[t], memory, (t, g0, W), h, sums)
        before = slice(g0, W + g0)  # by one product a group, as unroll.Window does
        P, DS, DO = (x[:, : len(group)].flatten(1, 2) for x in (P, DS, DO))
        Q = torch.cat([kept[t][1] for t in group], 1)
        dk[:, before] += (DS[..., before].mT @ Q).to(dk.dtype)
        dv[:, before] += (P[..., before].mT @ DO).to(dv.dtype)
    att = torch.stack([each[0] for each in kept])
    return att, dqkv, dk[:, :W], dv[:, :W], *(x[:, W:] for x in buffers)


def attention_by_autograd(inputs, h, W):
    """The same from the definition, in float64: all queries against all slots, masked."""
    qkv, datt, keys, values = (wide(x) for x in inputs[:4])
    n, K, count = len(qkv), h.K, inputs[4].cpu()
    cos, sin = rope_table(W + n, K, qkv)
    keys = apply_rope(keys, cos[:W], sin[:W])
    for x in (qkv, keys, values):
        x.requires_grad_()
    q, k, v = qkv.split([h.C * h.M * K, h.C * K, h.C * K], -1)
    q = apply_rope(rms_norm(q.reshape(n, -1, h.M, K)), cos[W:, None, None], sin[W:, None, None])
    k, v = (x.reshape(n, -1, K).transpose(0, 1) for x in (k, v))
    kn = rms_norm(k)
    k = torch.cat([keys, apply_rope(kn, cos[W:], sin[W:])], 1)
    slot, t = torch.arange(W + n), torch.arange(n)[:, None]
    empty = (slot < W - count[:, None]).repeat_interleave(h.C, 0)
    hidden = ((slot <= t) | (slot > W + t))[:, None] | empty  # (n, B*C, S)
    scores = torch.einsum('tbmk,bsk->tbms', q, k) / math.sqrt(K)
    p = scores.masked_fill(hidden[:, :, None], -math.inf).softmax(-1)
    o = torch.einsum('tbms,bsk->tbmk', p, torch.cat([values, v], 1))
    att = torch.stack([by_expert(x, h) for x in o])
    grads = torch.autograd.grad(att, (qkv, keys, values), datt)
    return att, *grads, k[:, W:], v, kn


# B, Heads, W, n, F
@cases(
    """3,3,2,2,64,1,5,4,3 3,3,2,2,64,1,37,2,1 3,3,1,3,96,0,37,3,4 4,1,1,2,10,1,70,3,4
    4,1,1,2,10,1,1,5,2 1,1,1,2,10,1,3,18,18 2,10,1,2,128,1,5,2,2""",
    """16,16,4,2,96,1,128,24,8 3,2,4,2,96,1,100,9,4 4,8,4,2,64,0,1000,5,8 2,1,8,1,128,1,33,40,16
    2,3,1,3,10,1,5,12,4""",
)
def test_attention(sizes, device, dt):
    B, *h, W, n, F = sizes
    h, names = Heads(*h), 'att dqkv dk dv keys values kn'.split()
    inputs = attention_inputs(B, h, W, n, device, dt)
    found, exact = attention_by_kernels(inputs, h, W, F), attention_by_autograd(inputs, h, W)
    for name, mine, theirs in zip(names, found, exact, strict=True):
        alike(wide(mine), theirs, dt, name)


# ---- experts and loss ----


class Noted:
    """A product that keeps its weight's gradient."""

    total = None

    def __init__(self, w):
        self.w = w

    def note(self, held, g):
        self.total = wide(g).mT @ wide(held.pop())


def experts_by_kernels(name, weights, u, att, gates, ds):
    w = dict(zip(('wo', 'up', 'down'), map(Noted, weights), strict=True))
    leave, inputs = tk.leave_of(name, len(att), u), [u, att]
    inputs += [gates] if name.startswith('softmax') else []
    inputs = [x.detach().requires_grad_() for x in inputs]
    products = w | {'piece': lambda f, *args, **static: f(*args, **static)}
    s = leave(products, *inputs[:2], inputs[2] if len(inputs) > 2 else None, None)
    return s.detach(), *torch.autograd.grad(s, inputs, ds), *(one.total for one in w.values())


def experts_by_autograd(name, weights, u, att, gates, ds):
    inputs = [u, att, gates][: 3 if name.startswith('softmax') else 2] + weights
    u, att, *some = (wide(x).requires_grad_() for x in inputs)
    *gates, wo, up, down = some
    y = u + att @ wo.mT
    x = y + (rms_norm(y) @ up.mT).relu().square() @ down.mT
    s = model_file.aggregate(rms_norm(x), gates[0] if gates else None, name)
    return s.detach(), *torch.autograd.grad(s, [u, att, *some], wide(ds))


def experts_inputs(E, B, D, O, device, dt):
    one, two = {'device': device, 'dtype': dt}, {'device': device}
    sizes = (E, D, D), (E, O, D), (E, D, O)
    weights = [(normal(*size, **two, seed=4) / size[2] ** 0.5).to(dt) for size in sizes]
    gates = torch.softmax(normal(B, E, **two), -1)
    return weights, normal(B, D, **two), normal(E, B, D, **one, seed=5), gates, normal(B, D, **two)


# aggregation, E, B, D, O
@cases(
    '0,3,3,36,70 1,1,17,130,64 3,2,131,20,9 2,4,5,48,96',
    '0,16,16,768,3072 3,8,64,768,3072 1,2,130,768,3072 0,16,1024,768,3072 2,3,17,130,70',
)
def test_experts(monkeypatch, sizes, device, dt):
    monkeypatch.setattr(tk, 'compiled', lambda f: f)
    name, inputs = list(model_file.AGGREGATIONS)[sizes[0]], experts_inputs(*sizes[1:], device, dt)
    found, exact = experts_by_kernels(name, *inputs), experts_by_autograd(name, *inputs)
    for i, (mine, theirs) in enumerate(zip(found, exact, strict=True)):
        alike(wide(mine), theirs, dt, f'{name} {i}')
    again = experts_by_kernels(name, *inputs)  # deterministic
    assert all(torch.equal(x, y) for x, y in zip(found, again, strict=True))


@cases('3,50304 5,1001 2,7', '333,50304 5,1001')
def test_cross_entropy(sizes, device, dt):
    rows, V = sizes
    logits, target = normal(rows, V, device=device) * 20, torch.arange(rows, device=device) * 3 % V
    logits[0, :2] = torch.tensor([1e4, -1e4])  # far beyond the cap
    logits[-1] -= 200  # all scores at the lower cap
    for dtype in {dt, torch.float32}:
        mine = logits.to(dtype)
        x = wide(mine).requires_grad_()
        want = model_file.losses(x, target.cpu())
        loss, d = tk.cross_entropy(mine.clone(), target, None, dt)
        assert d is None and abs(loss.item() - want.item()) < 1e-4 * want
        alike(wide(tk.cross_entropy(mine, target, 0.25, dt)[0]), want.detach(), torch.float32)
        again, d = tk.cross_entropy(x.detach().to(mine), target, 0.25, dt)
        assert again == loss and d.dtype == dt
        exact = 0.25 * torch.autograd.grad(want, x)[0]  # a far score's is next to nothing
        alike(wide(d), exact, dt, size=max(exact.norm().item(), 0.1))


# ---- compiled for an H100, without one ----


class H100:
    """What triton asks a driver for."""

    get_current_target = staticmethod(lambda: triton.backends.compiler.GPUTarget('cuda', 90, 32))
    get_current_device = get_current_stream = staticmethod(lambda *_: 0)


def report(cells):
    """Compiles all that is launched at the cells' sizes (E, W, B), each kernel once a set of
    tiles."""
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
        sizes = [x for x in (*args, *options.values()) if isinstance(x, tk.Tile | Heads)]
        print(self.__name__, *sizes, figures, done.metadata.shared, flush=True)
        assert done.metadata.shared < 227 * 1024, 'an H100 has 227 KiB of shared memory a block'
        assert figures['STACK'] <= 16, 'registers spill'

    jit.run, tk.compiled, Noted.note = compiled_only, lambda f: f, lambda *_: None
    for E, W, B in cells:
        h = Heads(E, 4, 2, 96, True)
        attention_by_kernels(attention_inputs(B, h, W, 9, 'meta', torch.bfloat16), h, W, 8)
        experts_by_kernels('sqrt_sum', *experts_inputs(E, B, 768, 3072, 'meta', torch.bfloat16))
    target = torch.empty(333, dtype=torch.int64, device='meta')
    for dtype in (torch.bfloat16, torch.float32):
        logits = normal(333, 50304, device='meta', dtype=dtype)
        tk.cross_entropy(logits, target, 0.1, torch.bfloat16)
    names = {name for name in vars(tk) if name.endswith('_kernel')}
    for E, W, B in cells:
        h, made = kernels.Heads(E, 4, 2, 96, True), {'device': 'meta', 'dtype': torch.bfloat16}
        qkv, ring = torch.empty(B, 96, **made), torch.empty(2, B * h.C, W, h.K, **made)
        types = torch.int64, torch.float32
        place, rope = (torch.empty(9, device='meta', dtype=dtype) for dtype in types)
        tk.ring_attention(qkv, ring.unbind(0), place, rope, h)
    assert {done.metadata.name for done in seen.values()} == names
    print(f'compiled {len(seen)}')


def test_kernels_compile_for_an_h100_in_a_process():
    cells = '16,2048,16', '2,128,256'
    assert 'compiled ' in run(sys.executable, __file__, *cells, TRITON_INTERPRET='0')


# ---- the unroll with kernels in it ----


@pytest.fixture
def calls(monkeypatch):
    """Counts the wrappers' calls. What else would be compiled runs as it is."""
    for where in (unroll, kernels, tk):
        monkeypatch.setattr(where, 'compiled', lambda f: f, raising=False)
    monkeypatch.setattr(kernels, 'loss_by_triton', lambda *sizes: True)
    names = 'window_attention window_attention_backward product norm_sum cross_entropy'
    mocks = {name: Mock(wraps=getattr(tk, name)) for name in names.split()}
    for name, mock in mocks.items():
        monkeypatch.setattr(tk, name, mock)
    return lambda: {name: mock.call_count for name, mock in mocks.items() if mock.called}


OWN, L2 = {'share_kv': False, 'n_layer': 1}, {'n_expert': 3, 'aggregation': 'softmax_l2'}


@interpreted
@pytest.mark.parametrize(
    'changes, names',
    [(OWN, unroll.TRITON), (L2, unroll.TRITON)]
    + [(sizes, [name]) for name in unroll.TRITON for sizes in (OWN, {'n_layer': 1})],
    ids=str,
)
def test_unroll_is_the_reference(monkeypatch, calls, changes, names):
    """Several blocks of 3 tokens, dK and dV in groups of 2, windows that fill up; and evaluation.
    One kernel alone too: what it gets from the model's own pieces may lie otherwise in memory."""
    monkeypatch.setattr(unroll, 'BLOCK', 3)
    monkeypatch.setattr(unroll, 'GROUP', 2)
    monkeypatch.setattr(unroll, 'choose', lambda *_: frozenset(names))
    sizes = {'dtype': torch.float32, 'n_embd': 24, 'n_head': 2, 'n_kv_head': 1, 'window': 5}
    model = make(model_file.RecurrentGPT, seed=7, **sizes | changes)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.7)  # fp32's own error stays small
    T, B, state, exact = 4, 2, None, reference.exact(model)
    model.config.path, history = 'compiled', reference.History(exact, B)
    for chunk in range(2):
        x, y = tokens(B, T, seed=chunk), tokens(B, T, seed=chunk + 10)
        loss, state = model(x, y, state)
        logits, history = reference.run(exact, x, history)
        expected, grads = reference.loss_of(logits, y), reference.gradients(model, loss)
        assert_close(loss, expected, rtol=1e-5)
        wanted = reference.gradients(exact, expected)
        reference.assert_same_gradients(model, grads, wanted, rtol=2e-5)
        reference.assert_same_state(state, history.state(), rtol=1e-5)
    steps = 2 * T * model.config.n_layer
    wanted = {'cross_entropy': 2}
    if 'attention' in names:
        wanted |= {'window_attention': steps, 'window_attention_backward': steps}
    if 'experts' in names:
        wanted |= {'product': 4 * steps, 'norm_sum': steps}
    assert calls() == wanted
    with torch.no_grad():
        logits, end = model(x, state=state)
        expected, history = reference.run(exact, x, history)
    assert_close(logits, expected, rtol=1e-5)
    reference.assert_same_state(end, history.state(), rtol=1e-5)


def asked(monkeypatch, **changes):
    """What the unroll of a small model asks `choose`: recipe, weights of a level."""
    sizes, seen = {'n_embd': 24, 'n_head': 2, 'n_kv_head': 1, 'n_expert': 3}, []
    model = make(model_file.RecurrentGPT, dtype=torch.float32, path='compiled', **sizes | changes)
    with monkeypatch.context() as patch, pytest.raises(StopIteration):
        patch.setattr(unroll, 'choose', lambda *args: seen.append(args) or next(iter(())))
        model(tokens(2, 4))
    return seen[0][:2]


@interpreted
@pytest.mark.parametrize(
    'changes, W, n, grad',
    [
        ({}, 5, 4, True),
        ({'share_kv': False, 'aggregation': 'softmax_l2'}, 3, 7, True),
        ({'aggregation': 'mean'}, 5, 1, True),
        ({'aggregation': 'softmax_mean'}, 5, 4, False),
    ],
    ids=str,
)
def test_trials_agree(monkeypatch, calls, changes, W, n, grad):
    """What choose() measures: both ways the same, with gradients; compare() finds what is not."""
    monkeypatch.setattr(unroll, 'GROUP', 3)
    recipe, weights = asked(monkeypatch, **changes)
    sizes = 2, 24, W, n
    trials = unroll.trials(recipe, weights, sizes, grad)
    assert set(trials) == set(unroll.TRITON) == set(unroll.trial_cost(recipe, sizes))
    monkeypatch.setattr(kernels, 'seconds_of', lambda run: (run(), 1.0)[1])
    for name, run in trials.items():
        for i, y in enumerate(run(False)):
            assert y.norm() > 1e-3, f'{name} {i}: nothing to compare'
        assert kernels.compare(run)['difference'] < 1e-4
    for name, kernel in (('attention', 'window_attention'), ('experts', 'norm_sum')):
        right = getattr(tk, kernel)
        with monkeypatch.context() as patch:
            patch.setattr(tk, kernel, lambda *args, right=right: right(*args).mul_(1.1))
            assert kernels.compare(trials[name])['difference'] > 0.05
    edited = recipe._replace(
        heads=lambda *args, **sizes: [2 * x for x in model_file.heads(*args, **sizes)],
        leave=lambda *args: 2 * model_file.leave(*args),
    )  # an edited equation is not the kernels'
    for run in unroll.trials(edited, weights, sizes, grad).values():
        assert not kernels.agrees(kernels.compare(run))


def test_an_aggregation_that_the_kernels_do_not_know(monkeypatch):
    assert tk.leave_of('max', 2, torch.zeros(())) is None
    monkeypatch.setattr(tk, 'leave_of', lambda *_: None)
    trials = unroll.trials(*asked(monkeypatch), (2, 24, 3, 2), True)
    assert set(trials) == {'attention'}


# ---- the choice ----

ONE, FAST, SLOW = (1.0, 2.0, 3.0), {True: 1e-6, False: 2e-6}, {True: 2e-6, False: 1e-6}


def clock(mine=ONE, plain=ONE, times=FAST, error=None):
    """A trial of given results and times; seconds_of reads the time of what ran last."""
    memory = torch.zeros(3)

    def trial(by_triton):
        assert not torch.is_grad_enabled()  # as the loop runs
        assert not torch.is_autocast_enabled('cuda')
        if by_triton and error is not None:
            raise error
        clock.now = times[by_triton]
        return memory.copy_(torch.tensor(mine if by_triton else plain)), torch.ones(2)

    return trial


@pytest.fixture
def measured(monkeypatch):
    """`choose` asked for a GPU's weights, with the trial of attention given; what was measured."""
    found = SimpleNamespace(trial=clock(), sizes=[], capturing=False)

    def trials(recipe, weights, sizes, grad):
        found.sizes.append((*sizes, grad))
        return {'attention': found.trial, 'experts': clock()}

    recipe, weights = asked(monkeypatch)
    found.recipe, cuda = recipe, SimpleNamespace(device=torch.device('cuda'))
    found.choose = lambda recipe, sizes=(2, 24, 5, 4), grad=True: unroll.choose(
        recipe, dict.fromkeys(weights, cuda), sizes, grad
    )
    monkeypatch.setattr(kernels, 'chosen', {})
    monkeypatch.setattr(unroll, 'chosen', kernels.chosen, raising=False)
    monkeypatch.setattr(kernels, 'seconds_of', lambda run: (run(), clock.now)[1])
    monkeypatch.setattr(unroll, 'trials', trials)
    monkeypatch.setattr(torch.cuda, 'is_current_stream_capturing', lambda: found.capturing)
    torch.set_autocast_enabled('cuda', True)
    yield found
    torch.set_autocast_enabled('cuda', False)
    assert unroll.choose(recipe, weights, (2, 24, 5, 4), True) == frozenset()  # on a CPU


ERRORS = triton.runtime.errors


@pytest.mark.parametrize(
    'trial, wins, reason',
    [
        ({}, True, ''),
        ({'times': SLOW}, False, ''),
        ({'mine': (0.0,) * 3, 'plain': (0.0,) * 3}, True, ''),
        ({'mine': (1.0, 2.0, 3.05)}, True, ''),
        ({'mine': (1.0, 2.0, 3.3)}, False, ''),
        ({'mine': (1.0, 2.0, math.nan)}, False, ''),
        ({'plain': (math.nan,) * 3}, False, ''),
        ({'error': ERRORS.OutOfResources(3, 2, 'x')}, False, 'OutOfResources: out of resource'),
        ({'error': ERRORS.PTXASError('no such')}, False, 'PTXASError: PTXAS error: no such'),
        ({'error': RuntimeError('CUDA error\nmore')}, False, 'RuntimeError: CUDA error'),
        ({'error': RuntimeError()}, False, 'RuntimeError: '),
    ],
    ids=str,
)
def test_what_wins_is_chosen(measured, trial, wins, reason):
    """Faster and no more than 3% off; the reason is kept, and printed."""
    measured.trial, recipe = clock(**trial), measured.recipe
    for again in (recipe, recipe._replace(graphs=True)):  # the same kernels: measured once
        assert measured.choose(again) == {'experts'} | ({'attention'} if wins else set())
    assert measured.sizes == [(2, 24, 5, 4, True)]
    ((found, _),) = (tuple(x.values()) for x in kernels.chosen.values())
    assert found.get('error', '').startswith(reason) and ('error' in found) == ('error' in trial)
    (line,) = kernels.chosen_lines()
    assert line.startswith(f'attention: {"Triton" if wins else "compiled"} (')
    assert line.endswith('experts: Triton (1 against 2 us)')
    for sizes, grad in (((2, 24, 6, 4), True), ((2, 24, 5, 5), True), ((2, 24, 5, 5), False)):
        measured.choose(recipe, sizes, grad)
    measured.choose(recipe._replace(leave=print))  # other equations
    assert len(measured.sizes) == 5


def test_an_error_of_another_kind_is_a_bug(measured):
    measured.trial = clock(error=ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        measured.choose(measured.recipe)


def test_nothing_is_measured_during_a_capture(measured):
    """What was not measured then is, later; and what was measured serves captures."""
    loss = model_file.losses, 6, 11, torch.float32, torch.device('cuda')
    measured.capturing = True
    assert measured.choose(measured.recipe) == frozenset()
    assert not kernels.loss_by_triton(*loss) and not kernels.chosen and not measured.sizes
    measured.capturing = False
    assert measured.choose(measured.recipe) == frozenset(unroll.TRITON)
    kernels.chosen[loss[:4]] = {'loss': {'compiled': 2, 'triton': 1, 'difference': 0}}
    measured.capturing = True
    assert measured.choose(measured.recipe) == frozenset(unroll.TRITON)
    assert kernels.loss_by_triton(*loss)


if __name__ == '__main__':  # cells as E,W,B; the speed tables' where none is named
    named = [tuple(map(int, cell.split(','))) for cell in sys.argv[1:]]
    long = [(16, 2048, 16), (8, 2048, 16), (2, 2048, 16), (16, 32, 1024)]
    report(named or [(16, 128, 128), (8, 128, 256), (2, 128, 1024), *long])

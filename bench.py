"""
Speed and memory of the models on whatever device there is, beside the paper's and a roofline.

    python bench.py                               # updates, plain against fast, for 2 CPU cores
    python bench.py --suite=first --budget=540    # a GPU's first half-hour; the same again goes on
    python bench.py --suite=train --budget=540    # the paper's throughput table; tells how to go on
    python bench.py --suite=train --paths=lstm,compiled   # beside torch.nn.LSTM of equal size
    python bench.py --suite=decode                # and its latency table
    python bench.py --suite=sokoban --paths=compiled,compiled_recompute
    python bench.py --compare=A.json,B.json       # or --compare A.json B.json: the rows they share

train      updates of train_lm.py, loader and optimizer included, T = W = C, on one of the paper's 4
           GPUs: B = tokens an update / 4 / C streams, held to a quarter of the paper's figure
decode     a token for each of B streams after a cache filled to C = W; the paper's is of 4 GPUs
sokoban    updates of train_sokoban.py on generated levels, in environment steps a second
first      yardsticks, smoke tests of tests/test_gpu.py, the suites' cells, most telling first, the
           other tests: each checked, in a process and with a time limit of its own, its result
           written at once; a failure is told and passed by (exit status 1)
A cell is (L, E, C, B), in train (L, E, C, tokens an update), in sokoban (L, E, d), in first a
suite's name and such a cell; a shorter one stands for all of the suite's own that begin so.

Another process measures. On a CPU every variant has its own, and all take turns with the
yardsticks, so that a drift of the machine falls on all; on a GPU one measures all, in turn. One
that dies or runs out of memory costs its variant alone. The yardsticks: a large product in each
dtype, a large copy, for sokoban a 3x3 convolution with its backward. "Of roofline": the time of
`floor` at their rates over that measured; "of conv rate": multiply-adds executed over the
convolution's. Memory: on a GPU torch's peak, warm-up and capture included; on a CPU the process's
peak resident memory less what it held after importing torch.
"""

import contextlib
import copy
import datetime
import functools
import gc
import importlib.util
import json
import math
import multiprocessing
import os
import platform
import re
import shlex
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from types import ModuleType

# before torch: how threads wait, what ctrl-C does
from configurator import configure, fail, first_line, gathered, run_script, write_json, write_text

import numpy as np
import torch
import torch.nn.functional as F

import baselines
import kernels
import train_lm
import train_sokoban
from checkpoint import commit, device_name, keep_memory, out_of_memory, pick_device, pick_dtype
from convlstm import AgentConfig
from data_fineweb import REAL_VOCAB, VOCAB, open_meta, write_meta, write_shard
from model import ModelConfig, State, build_model
from sample import Decoder
from unroll import release

# fmt: off
# what
suite = 'train'    # train, decode, sokoban or first
cells = ()         # such as (2,8,128,16),(4,4): see above. (): the suite's own, the paper's
paths = ''         # plain, fast, compiled, gpt (not recurrent, L*E levels of one expert), ..., with
                   # _bf16 for that dtype; a wrong one lists all. '': the suite's own
n_embd = 0         # D; 0: the suite's own
block_size = 0     # train: T, tokens of a chunk; 0: C
dtype = ''         # float32, bfloat16 (autocast; sokoban: convolutions), or auto: bfloat16 where
                   # that is fast; '': float32 on a CPU but for sokoban, else auto
# sokoban
arch = 'convlstm'  # or convglu
recurrent = True   # or the twin that carries nothing
n_envs = 32        # boards
unroll = 20        # steps an update
# how
rounds = 3         # measurements of each variant; the median and the range are reported
seconds = 0.5      # least length of one measurement: short runs are repeated to fill it
check = False      # train, decode, sokoban: gradients (logits) against the plain pieces' on this
                   # device; a cell that differs does not count. first: always
budget = 0         # seconds after which no new cell begins; what is left is told. 0: none
device = 'auto'    # auto: cuda if there is one; or cpu, cuda, cuda:1
threads = 0        # CPU threads; 0: torch's choice
out = ''           # JSON file, the table beside it as .md; '': results/<device>/<suite>.json
append = False     # go on with that file, of the same commit, device and dtype. first: always
compare = ''       # A.json,B.json: print the ratios of the rows they share, measure nothing
# fmt: on
RANGES = {'suite': 'train decode sokoban first'.split()}
RANGES['arch'] = ['convlstm', 'convglu']
RANGES |= dict.fromkeys('rounds n_envs unroll'.split(), (1, math.inf))
RANGES |= dict.fromkeys('n_embd block_size threads seconds budget'.split(), (0, math.inf))

LEVELS = (1, 16), (2, 8), (4, 4), (8, 2), (16, 1)
CONTEXTS = {'train': (32, 64, 128, 256, 1024, 2048), 'decode': (128, 2048)}
OWN = {  # suite: (L, E) of its cells, their C, their last number, D, V; on a GPU the paper's
    'train': (LEVELS, CONTEXTS['train'], (131072, 262144), 768, 50304),
    'decode': (LEVELS, CONTEXTS['decode'], (16,), 768, 50304),
}
OWN_CPU = {'train': (((2, 8),), (128,), (4096,), 256, 256)}
OWN_CPU['decode'] = ((2, 8),), (128,), (16,), 256, 256
PATHS = {  # all of a suite; its own on a GPU, and at E = 1, where the paper has the Transformer too
    'train': (
        'plain,fast,compiled,gpt,gpt_compiled,lstm,transformer',
        'compiled',
        'gpt_compiled',  # it trains only that
    ),
    'decode': (
        'plain,fast,ring,ring_compiled,gpt,gpt_ring,gpt_ring_compiled',
        'ring,ring_compiled',
        'ring,ring_compiled,gpt_ring,gpt_ring_compiled',
    ),
    'sokoban': (  # _recompute: the update runs its own forward instead of keeping the rollout's
        'plain,fast,compiled,plain_recompute,fast_recompute,compiled_recompute',
        'fast,compiled',
        'fast,compiled',
    ),
}
PATHS_CPU = {'train': 'plain,fast', 'decode': 'fast,ring', 'sokoban': 'plain,fast,compiled'}
TOKENIZER = {V: name for name, V in VOCAB.items()}

# The paper's tables, 4 H100: 1000 tokens/s at C = 32, 64, 128, 256, 1024, 2048 by tokens an update,
# or ms a token at C = 128, 2048 by streams, of a model, L, E (OOM: out of memory); and the targets
# planned for one H100, calculated, not measured.
FIGURES = """\
paper train 131072 transformer 16 1: 967.7 1027.4 1025.3 1054.3 1016.9 968.1
paper train 131072 recurrent 1 16: 505.4 445.7 349.5 229.4 51.1 OOM
paper train 131072 recurrent 2 8: 265.8 209.5 145.2 85.8 OOM OOM
paper train 131072 recurrent 4 4: 189.7 148.7 99.1 OOM OOM OOM
paper train 131072 recurrent 8 2: 118.3 88.4 OOM OOM OOM OOM
paper train 262144 transformer 16 1: 886.9 1031.5 1095.8 1132.0 1095.8 1071.5
paper train 262144 recurrent 1 16: 556.2 526.4 447.7 313.1 OOM OOM
paper train 262144 recurrent 2 8: 306.0 264.6 190.2 OOM OOM OOM
paper train 262144 recurrent 4 4: 199.9 170.8 OOM OOM OOM OOM
paper train 262144 recurrent 8 2: OOM OOM OOM OOM OOM OOM
paper decode 16 transformer 16 1: 0.565 0.670
paper decode 16 recurrent 1 16: 0.108 0.131
paper decode 16 recurrent 2 8: 0.431 0.554
paper decode 16 recurrent 4 4: 0.552 0.637
paper decode 16 recurrent 8 2: 0.815 0.935
paper decode 16 recurrent 16 1: 1.402 1.577
target train 131072 transformer 16 1: 400 - - 500 500 500
target train 131072 recurrent 1 16: 525 495 430 312 117 64
target train 131072 recurrent 2 8: 463 428 361 248 85 45
target train 131072 recurrent 4 4: 383 335 272 176 54 28
target train 131072 recurrent 8 2: 281 236 181 108 31 16
target decode 16 transformer 16 1: 0.304 0.555
target decode 16 recurrent 1 16: 0.105 0.120
target decode 16 recurrent 2 8: 0.121 0.153
target decode 16 recurrent 4 4: 0.147 0.210
target decode 16 recurrent 8 2: 0.199 0.325
target decode 16 recurrent 16 1: 0.304 0.555"""
FIGURES = dict(line.split(': ') for line in FIGURES.splitlines())
TARGET_SOKOBAN = {(1, 1, 128): 55600, (4, 1, 64): 27800}  # 50M steps in 15 and 30 minutes

# Suite first: what comes after the yardsticks and the smoke tests, then what is left of the suites
TRAIN_FIRST = ((2, 8, 64), (1, 16, 64), (4, 4, 128), (8, 2, 256), (2, 8, 2048), (16, 1, 256))
FIRST = (
    *(('train', *cell) for cell in TRAIN_FIRST),
    *(('decode', L, E, C) for L, E in ((2, 8), (1, 16)) for C in (128, 2048)),
    *(('sokoban', *cell) for cell in TARGET_SOKOBAN),
    *(('decode', L, E, C) for C in (128, 2048) for L, E in ((16, 1), (4, 4), (8, 2))),
    *(('train', L, E, C) for C in (256, 2048, 32, 128, 64, 1024) for L, E in LEVELS),
    *(('train', L, E, C, 262144) for C in (64, 256, 2048, 32, 128, 1024) for L, E in LEVELS),
)
SMALL_FIRST = ('train', 2, 8, 32, 1024), ('decode', 2, 8), ('sokoban', 1, 1, 32)
GPU_TESTS = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'tests', 'test_gpu.py')
SMOKE = 'triton or graph'  # of these: every capture and kernel
LIMITS = {'smoke': 180, 'train': 240, 'tests': 400}  # seconds of a step
LIMIT = 150  # of another
LEAST = 60  # seconds of budget for which a step is begun; one that the budget cuts is begun again
FAR = 0.1  # relative difference of a gradient or of logits that is no rounding of bfloat16's


# ---- the work: make(row, config) -> ({part: function to time}, what is known of it) ----
# Known of it may be 'check': a function that gives {name: (tensor, the plain pieces' tensor)}.


def model_config(row: dict) -> ModelConfig:
    """ValueError for sizes that do not fit together."""
    how = row['path'].removesuffix('_bf16')
    if how != 'plain':
        how = 'compiled' if how.endswith('compiled') else 'fast'
    sizes = {'window': row['C'], 'block_size': row['T'], 'path': how}
    return ModelConfig(row['V'], row['L'], row['E'], row['D'], **sizes)


def make_token(row: dict, config: dict) -> tuple[dict[str, Callable], dict]:
    """Part 'token': one greedy token for each of B streams, from a cache of W entries; by
    sample.Decoder (paths ring) or by model.step."""
    at, B, dt = config['device'], row['B'], getattr(torch, row['dtype'])
    torch.manual_seed(0)
    model = build_model(model_config(row), row['model'] == 'recurrent').to(at)
    for p in model.parameters():
        if p.dim() > 1 and not p.any():  # a processor may be faster at zeros than at numbers
            torch.nn.init.normal_(p, 0, 0.02)
    with train_lm.autocast(at, dt):
        empty = model.init_state(B)
    full = torch.full_like(empty.count, row['C'])
    state = State(*(torch.randn_like(x) for x in empty[:3]), full)
    carried = [torch.randint(row['V'], (B,), device=at), state]

    @torch.no_grad()
    def step(tokens, state):
        with train_lm.autocast(at, dt):
            return model.step(tokens, state)

    def greedy():
        logits, carried[1] = step(*carried)
        carried[0] = logits.argmax(-1)

    if 'ring' not in row['path']:
        return {'token': greedy}, {}
    decoder = Decoder(model, B, amp=dt, compile='compiled' in row['path'])
    decoder.load(state)
    decoder.step(carried[0])

    def check():
        decoder.load(state)
        after, pairs = state, {}
        for i, tokens in enumerate(torch.randint(row['V'], (4, B), device=at)):
            decoder.step(tokens)
            logits, after = step(tokens, after)
            pairs[f'logits of token {i}'] = decoder.logits.clone(), logits
        return pairs

    return {'token': decoder.step}, {'check': check}


def make_run(script: ModuleType, settings: dict, row: dict, config: dict) -> object:
    """A trainer's run, as the user has it."""
    settings |= {'n_layer': row['L'], 'n_expert': row['E'], 'n_embd': row['D']}
    settings |= {'dtype': row['dtype'], 'device': config['device'], 'threads': config['threads']}
    settings['path'] = 'plain' if row['path'].startswith('plain') else 'fast'
    argv = [f'--{name}={value}' for name, value in settings.items()]
    return script.make_run(configure(vars(script), argv, quiet=True))


def make_update(row: dict, config: dict) -> tuple[dict[str, Callable], dict]:
    """Part 'update': a whole one of train_lm.py."""
    settings = {'window': row['C'], 'block_size': row['T'], 'tokens_per_step': row['B'] * row['T']}
    settings |= {'tokenizer': TOKENIZER[row['V']], 'data_dir': config['data_dir']}
    settings |= {'val_tokens': 64, 'val_streams': 1, 'max_iters': 10**6}
    baseline = row['path'].removesuffix('_bf16') in baselines.LEARNING_RATE
    settings |= {'arch': row['model'] if baseline else 'experts'}
    settings |= {'recurrent': row['model'] != 'transformer'}
    settings |= {'compile': row['path'].removesuffix('_bf16').endswith(('compiled', 'transformer'))}
    run = make_run(train_lm, settings, row, config)
    train_lm.prepare(run)
    if settings['compile'] and run.model.config.path == 'fast':
        raise RuntimeError('torch.compile does not work here')

    def update():
        loss, _, _ = train_lm.train_update(run, False)
        run.step += 1
        if not math.isfinite(loss):  # the optimizer would be left out
            raise RuntimeError('the loss is not finite')

    def gradients(state):
        """Of a micro-batch from this state, as train_update has them."""
        x, y, carried = run.inputs
        run.buckets.zero()
        for to, source in zip(carried or (), state, strict=True):
            to.copy_(source)
        chunk = 'chunk', train_lm.forward_backward, run, x, y, carried
        kernels.graphed(run.chunk_graphs, *chunk)
        found = {name: p.grad.clone() for name, p in run.model.named_parameters()}
        return {'loss': run.buckets.extra[0].clone(), **found}

    def check():
        state = [x.clone() for x in run.inputs[2] or ()]
        mine = gradients(state)
        run.model.config.path, run.chunk_graphs, run.graphs = 'fast', None, None
        empty(config['device'])  # the graphs' memory is needed
        plain = gradients(state)
        return {name: (mine[name], plain[name]) for name in mine}

    info = {'tokens': settings['tokens_per_step'], 'params': run.model.num_params()['total']}
    info['pieces'] = kernels.chosen_lines()
    return {'update': update}, {**info, 'check': check}


def make_agent(row: dict, config: dict) -> tuple[dict[str, Callable], dict]:
    """Part 'update': a whole one of train_sokoban.py on generated levels, its games counted."""
    path, _, recompute = row['path'].removesuffix('_bf16').partition('_')
    settings = {name: config[name] for name in ('arch', 'recurrent', 'n_envs', 'unroll')}
    settings |= {'reuse': not recompute, 'eval_games': 1}
    settings |= {'split': 'generated', 'eval_split': 'generated', 'n_levels': 5000}
    run = make_run(train_sokoban, settings, row, config)
    run.model.config.path = path

    def update():
        stats, games, _ = train_sokoban.update(run, False)
        train_sokoban.count_games(run, games, stats)

    def check():
        """Rewards and gradients of an update at rate 0, and by the plain equations of the same
        actions: a rounding may tip one."""
        found, actions, sample = [], [], train_sokoban.sample
        begun = copy.deepcopy((run.env, run.state, run.count))

        def record(*args):
            actions.append(sample(*args))
            return actions[-1]

        train_sokoban.learning_rate, train_sokoban.sample = 0.0, record
        for _ in range(2):
            stats, games, _ = train_sokoban.update(run, False)
            clipped = max(1.0, stats['grad_norm'] / (train_sokoban.grad_clip or math.inf))
            mine = {name: clipped * p.grad for name, p in run.model.named_parameters()}
            found.append({**mine, 'games': games, 'loss': torch.tensor(stats['loss'])})
            if run.graphs:  # a replay calls nothing
                actions = run.graphs['rollout'][2]['action'].clone()
            played = iter(actions)
            train_sokoban.sample = lambda *_, played=played: next(played)
            run.env, run.state, run.count = begun
            run.model.config.path, run.graphs = 'plain', None
        train_sokoban.sample = sample
        return {name: (found[0][name], found[1][name]) for name in found[0]}

    steps, macs = config['n_envs'] * config['unroll'], run.model.macs_per_step()
    info = {'env_steps': steps, 'params': run.model.num_params()['total'], 'macs_per_step': macs}
    # forward, twice as much backward, a second forward without reuse; not encoder, head, last value
    info['macs'] = (4 if recompute else 3) * macs['executed'] * steps
    return {'update': update}, {**info, 'check': check}


def make_yardsticks(row: dict, config: dict) -> tuple[dict[str, Callable], dict]:
    """A product of two large square matrices in each dtype, FLOPs; a copy too large for a cache,
    bytes read and written; a convolution of boards enough to fill the device, multiply-adds."""
    at = config['device']
    n, size = (2048, 2**28) if at == 'cpu' else (8192, 2**30)
    parts, work = {}, {}
    for name in row['dtypes']:
        a, b = torch.randn(2, n, n, device=at, dtype=getattr(torch, name))
        parts[f'matmul {name}'] = functools.partial(torch.matmul, a, b)
        work[f'matmul {name}'] = 2 * n**3
    source, target = torch.ones(2, size, dtype=torch.uint8, device=at)
    parts['copy'], work['copy'] = functools.partial(target.copy_, source), 2 * size
    if row['conv']:
        keep_memory()
        shapes, dt = ((640, 128, 10, 10), (512, 128, 3, 3), (640, 512, 10, 10)), row['conv']
        made = [torch.randn(shape, device=at, dtype=getattr(torch, dt)) for shape in shapes]
        x, w, dy = (tensor.to(memory_format=torch.channels_last) for tensor in made)
        xw = x.requires_grad_(), w.requires_grad_()
        parts['conv'] = lambda: torch.autograd.grad(F.conv2d(*xw, padding=1), xw, dy)
        work['conv'] = 3 * 640 * 100 * 9 * 128 * 512
    return parts, {'work': work}


def make_tests(row: dict, config: dict) -> tuple[dict[str, Callable], dict]:
    """Runs those GPU_TESTS that the row chooses. RuntimeError: one did not pass."""
    if importlib.util.find_spec('pytest') is None:
        raise RuntimeError('pytest is not installed')
    import pytest

    class Told:
        bad = []

        def pytest_runtest_logreport(self, report: object) -> None:
            if report.failed:
                self.bad.append(report.nodeid.rpartition('::')[2])

    options = [
        '-v',
        '--tb=short',
        '--show-capture=no',
        '--noconftest',
        '-o',
        'addopts=',
        '-p',
        'no:cacheprovider',
    ]
    code = pytest.main([*options, '-m', 'gpu', '-k', row['tests'], GPU_TESTS], [Told()])
    if code:
        raise RuntimeError(f'{len(Told.bad)} tests: {", ".join(Told.bad)} (pytest {int(code)})')
    return {}, {}


MAKERS = {'train': make_update, 'decode': make_token}
MAKERS |= {'sokoban': make_agent, 'yardsticks': make_yardsticks, 'tests': make_tests}


# ---- the process that measures ----


def timed(run: Callable, repeats: int, device: str) -> float:
    """Seconds of one run(), the mean of `repeats`, with the device idle at both ends."""
    wait = torch.cuda.synchronize if device != 'cpu' else time.time
    wait()
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    wait()
    return (time.perf_counter() - start) / repeats


def memory(device: str, peak: bool) -> int:
    """Bytes in use now or at the peak. Not getrusage's: a child's figure starts at its parent's."""
    if device != 'cpu':
        return torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()
    if not os.path.exists('/proc/self/status'):  # only Linux tells
        return 0
    with open('/proc/self/status') as file:
        found = re.search(r'VmHWM:\s*(\d+)' if peak else r'VmRSS:\s*(\d+)', file.read())
    return 1024 * int(found[1])


def empty(device: str) -> None:
    """Gives back what the variant before left, but not compiled code: the next may need it."""
    release()
    gc.collect()
    if device != 'cpu':
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def difference(pairs: dict[str, tuple]) -> tuple[float, str]:
    """The largest relative difference of {name: (tensor, reference)}, and whose it is. Vectors and
    scalars count as one: a single number may be all rounding."""
    groups = {}
    for name, pair in pairs.items():
        small = pair[1].dim() == 1 or name.endswith(('.a', '.b'))
        groups.setdefault('vectors' if small else name, []).append(pair)
    off = {}
    for name, group in groups.items():
        mine, plain = (
            torch.cat([x.double().flatten() for x in part]) for part in zip(*group, strict=True)
        )
        far = ((mine - plain).norm() / plain.norm().clamp(min=1e-30)).item()
        off[name] = math.inf if math.isnan(far) else far
    worst = max(off, key=off.get)
    return off[worst], worst


def answer_to(message: dict | float | str, made: dict, config: dict) -> dict:
    """What the process says to a row, to be made and run once (compiling included), to the seconds
    of a round of it, or to 'check'. made: what is kept from message to message."""
    device, start = config['device'], time.perf_counter()
    if message == 'check':
        if made['check'] is None:
            return {}
        off, name = difference(made['check']())
        far = {} if off < FAR else {'status': f'differs by {off:.1%} in {name}'}
        return {'check': f'{off:.2%}', **far}
    new = isinstance(message, dict)
    if new:
        made.clear()
        empty(device)
        base = memory(device, peak=False)
        parts, info = MAKERS[message['suite']](message, config)
        made |= {'parts': parts, 'base': base, 'check': info.pop('check', None)}
    parts = made['parts']
    if new or device == 'cpu':  # after the others' turns caches and clocks are cold
        for _ in range(1 if device == 'cpu' else 5):  # three as they are, the capture, a replay
            made['once'] = {part: timed(run, 1, device) for part, run in parts.items()}
    if new:
        if device == 'cpu':
            with contextlib.suppress(OSError), open('/proc/self/clear_refs', 'w') as file:
                file.write('5')  # forgets the peak; where this is not allowed, compiling counts
        return {**info, 'first_run_s': time.perf_counter() - start}
    repeats = {part: max(1, math.ceil(message / once)) for part, once in made['once'].items()}
    figures = {part: timed(run, repeats[part], device) for part, run in parts.items()}
    return {'seconds': figures, 'memory_bytes': memory(device, peak=True) - made['base']}


def work(pipe: multiprocessing.connection.Connection, config: dict) -> None:
    """The process: messages in, answers out; None ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C is the parent's business, which ends us
    os.setsid()  # its children end with it
    if config['device'] != 'cpu':
        torch.cuda.set_device(config['device'])
        torch.set_float32_matmul_precision('high')  # as train_lm.py
    if config['threads']:
        torch.set_num_threads(config['threads'])
    made = {}
    while (message := pipe.recv()) is not None:
        try:
            pipe.send(answer_to(message, made, config))
        except (RuntimeError, MemoryError, ValueError) as error:  # must not end the others
            told = 'OOM' if out_of_memory(error) else f'failed: {first_line(error)}'
            pipe.send({'check' if message == 'check' else 'status': told})


# ---- measuring ----


def begin(config: dict) -> tuple:
    """-> (process, pipe)."""
    context = multiprocessing.get_context('spawn')
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(theirs, config), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def kill(process: multiprocessing.Process) -> None:
    """And its children, which it leads."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()


def end(pool: dict) -> None:
    """Ends the processes {name: (process, pipe)}, and empties it."""
    while pool:
        process, pipe = pool.popitem()[1]
        with contextlib.suppress(OSError):
            pipe.send(None)
        process.join(5)
        kill(process)


def ask(worker: tuple, message: dict | float | str, record: dict, until: float) -> str:
    """One message to `work`, answered before `until`: the record gets the answer. -> a line."""
    process, pipe = worker
    try:
        pipe.send(message)
        while not pipe.poll(max(0.0, min(10.0, until - time.perf_counter()))):
            print('    ...', flush=True)  # a first run compiles
            if time.perf_counter() > until:
                kill(process)
        answer = pipe.recv()
    except (EOFError, OSError):  # it is gone; Linux kills one that takes the last of the memory
        process.join()
        ended = f'failed: its process ended with {process.exitcode}'
        ended = 'OOM' if process.exitcode == -signal.SIGKILL else ended
        ended = 'failed: late' if time.perf_counter() > until else ended
        answer = {'check' if message == 'check' else 'status': ended}
    figures = answer.pop('seconds', {})
    for part, value in figures.items():
        record['seconds'].setdefault(part, []).append(value)
    record.update(answer)
    if record['status'] != 'ok' or message == 'check':
        return answer.get('status') or answer.get('check', 'nothing to compare')
    figures = figures or {'first run': answer['first_run_s']}
    return ', '.join(f'{part} {value:.4g} s' for part, value in figures.items())


def measure(group: dict[str, dict], config: dict, pool: dict, until: float = math.inf) -> dict:
    """{label: row} -> {label: record}: status, first_run_s, memory_bytes, seconds {part: [one a
    round]} and what `make` told. pool: {name: (process, pipe)}, which whoever gives it ends."""
    cuda, labels, n = config['device'] != 'cpu', list(group), config['rounds']
    records = {label: {'status': 'ok', 'seconds': {}} for label in labels}
    turns = [(number, label) for number in range(n + 1 + config['check']) for label in labels]
    if cuda:  # one after another
        turns.sort(key=lambda turn: labels.index(turn[1]))
    for number, label in turns:
        record, name = records[label], 'gpu' if cuda else label
        last = {'tests': 0, 'yardsticks': n}.get(group[label]['suite'], n + 1)
        if record['status'] == 'ok' and time.perf_counter() > until:
            record['status'] = 'failed: late'
        if record['status'] != 'ok' or number > last:
            continue
        if name not in pool:
            pool[name] = begin(config)
        message = group[label] if number == 0 else config['seconds'] if number <= n else 'check'
        line = ask(pool[name], message, record, until)
        turn = f'round {number}/{n}' if number <= n else 'check'
        print(f'{turn}  {label}: {line}', flush=True)
        if record['status'] != 'ok' or not pool[name][0].is_alive():
            end({name: pool.pop(name)})  # gives its memory back at once
    return records


# ---- the floor, the paper, the figures of a row ----


def floor(row: dict, rate: float, bandwidth: float) -> float:
    """Least seconds of a token of each of B streams (trained in chunks of T), for products at
    `rate` FLOP/s and memory at `bandwidth` bytes/s. Nothing overlaps but a product with the
    streaming of its own weights:

        product = max(2 n B / rate, n size / bandwidth)  a level's n weights, a shared cache's E
                                                         key-value matrices as one
        forward = L (product + keys and values of W slots, read once)
        backward= L (the same + dk, dv)                  in fp32, read and written at the own slots
        weights = L 2 n B / rate                         their gradients, over many tokens at once
        head    = 3 x 2 D V B / rate                     with its gradients

    Decoding: forward, and the head as one more product. GPT trains on whole sequences: all is
    dense, causal attention too. Not counted: activations, norms, the optimizer. A code that adds dk
    and dv for several tokens at once may go below."""
    c, B, size = model_config(row), row['B'], 2 if row['dtype'] == 'bfloat16' else 4
    L, E, D, K, W, T = c.n_layer, c.n_expert, c.n_embd, c.head_dim, c.window, c.block_size
    recurrent = row['model'] == 'recurrent'
    C = c.n_kv_head * (1 if recurrent and c.share_kv else E)  # cache heads
    n = E * (2 * D * D + 8 * D * D) + 2 * D * C * K
    weights, head = L * 2 * n * B / rate, 2 * D * c.vocab_size * B / rate
    step = max(2 * n * B / rate, n * size / bandwidth) + W * 2 * C * K * size * B / bandwidth
    if row['suite'] == 'decode':
        return L * step + max(head, D * c.vocab_size * size / bandwidth)
    if not recurrent:
        return 2 * L * (2 * n + 4 * (T + 1) / 2 * E * D) * B / rate + weights + 3 * head
    slots = sum(min(t + 1, W) for t in range(T)) / T
    back = step + slots * 2 * C * K * 4 * 2 * B / bandwidth
    return L * (step + back) + weights + 3 * head


def published(row: dict) -> dict[str, float | str]:
    """FIGURES of a row: paper and target, in tokens/s of one GPU (the paper's a quarter of its
    four's) or ms a token."""
    suite = row['suite']
    if suite == 'sokoban':
        target = TARGET_SOKOBAN.get((row['L'], row['E'], row['D']))
        return {'target': target} if target else {}
    if suite not in CONTEXTS or (row['D'], row['V'], row['T']) != (768, 50304, row['C']):
        return {}
    n, found = row.get('tokens_per_update', row['B']), {}
    for name in ('paper', 'target'):
        who = f'{name} {suite} {n} {row["model"]} {row["L"]} {row["E"]}'
        words = dict(zip(CONTEXTS[suite], FIGURES.get(who, '').split(), strict=False))
        word = words.get(row['C'], '-')
        if word != '-':
            unit = 1 if suite == 'decode' else 250 if name == 'paper' else 1000
            found[name] = word if word == 'OOM' else float(word) * unit
    return found


METRICS = {  # of a row: 1 where more is better, unit, digits
    'tokens_per_s': (1, 'tokens/s', 0),
    'env_steps_per_s': (1, 'env steps/s', 0),
    'ms_per_token': (-1, 'ms/token', 3),
}


def derive(record: dict, row: dict, rates: dict[str, float]) -> dict:
    """The row of a finished record: `row`, its path and sizes, with rates and shares of the
    yardsticks' rates."""
    row = row | record
    suite, rate, bandwidth = row['suite'], rates.get(f'matmul {row["dtype"]}'), rates.get('copy')
    row |= published(row)
    if not row['seconds']:
        return row
    (times,) = row['seconds'].values()
    if suite == 'decode':
        name, values = 'ms_per_token', [1e3 * t for t in times]
    else:
        name, part = (
            ('env_steps_per_s', 'env_steps') if suite == 'sokoban' else ('tokens_per_s', 'tokens')
        )
        values = [row[part] / t for t in times]
    row[name] = spread(values)
    value, sign = row[name]['median'], METRICS[name][0]
    for other in ('paper', 'target'):
        if isinstance(row.get(other), (int, float)):
            row[f'over_{other}'] = (value / row[other]) ** sign
    if suite == 'sokoban' and 'conv' in rates:
        row['share_of_conv'] = row['macs'] / row['env_steps'] * value / rates['conv']
    elif suite in CONTEXTS and rate and bandwidth and row['model'] != 'lstm':
        least = floor(row, rate, bandwidth)
        row['share_of_roofline'] = 1e3 * least / value if sign < 0 else least * value / row['B']
    return row


def spread(values: Iterable[float]) -> dict[str, float]:
    values = list(values)
    return {'median': statistics.median(values), 'min': min(values), 'max': max(values)}


# ---- reports: what a figure needs to be repeated ----

# what tells two rows apart; of two reports whose rows may be joined; of rows that are compared
KEYS = 'suite cell path model L E C B T D V tokens_per_update'.split()
SAME = 'suite device dtype torch commit threads'.split()
CELL = 'suite cell D'.split()


def header(config: dict) -> dict:
    at, kept = config['device'], {'config': config, 'command': shlex.join(['python', *sys.argv])}
    kept |= {'device': device_name(at), 'dtype': config['dtype'], 'commit': commit()}
    kept |= {'threads': config['threads'] or torch.get_num_threads(), 'torch': torch.__version__}
    kept['date'] = datetime.datetime.now().astimezone().isoformat(timespec='seconds')
    kept['python'] = platform.python_version()
    if at != 'cpu':
        kept['triton'] = kernels.triton_module() and sys.modules['triton'].__version__
        kept |= {'cuda': torch.version.cuda, 'cudnn': torch.backends.cudnn.version()}
        kept['card'] = str(torch.cuda.get_device_properties(at))
    return kept


def results_path(report: dict, out: str) -> str:
    """`out`, or results/<device>/<suite>.json; its folder is made."""
    folder = re.sub('[^a-z0-9]+', '-', report['device'].lower()).strip('-')
    if out.endswith('.md'):
        fail(f'out = {out!r}: name the JSON file; its table goes beside it as .md')
    out = out or os.path.join('results', folder, f'{report["suite"]}.json')
    os.makedirs(os.path.dirname(out) or '.', exist_ok=True)
    return out


def read_report(path: str) -> dict:
    """A JSON file of an earlier run; ends the script where it is none."""
    try:
        with open(path, encoding='utf-8') as file:
            report = json.load(file)
    except (OSError, ValueError) as error:
        fail(f'{path}: cannot be read: {first_line(error)}')
    rows = report.get('results') if isinstance(report, dict) and 'suite' in report else None
    if not isinstance(rows, list) or not all(isinstance(r, dict) and 'status' in r for r in rows):
        fail(f'{path}: is no report of bench.py')
    for row in rows:  # older ones have it in the report alone
        row.setdefault('suite', report['suite'])
    return report


def earlier(report: dict, path: str) -> dict:
    """What there is of the report that this one goes on with, whose command goes before."""
    if not os.path.exists(path):
        return {}
    old, how = read_report(path), '' if report['suite'] == 'first' else 'append = True: '
    for name in SAME:
        if old.get(name) != report[name]:
            was = f'{path} is of {name} {old.get(name)!r}, this run of {report[name]!r}'
            fail(f'{how}{was}: choose another --out')
    if report['command'] not in old['command']:
        report['command'] = f'{old["command"]}; {report["command"]}'
    return {name: old[name] for name in ('steps', 'yardsticks', 'results') if name in old}


# ---- tables ----


def key(row: dict, names: list[str] = KEYS) -> tuple:
    return tuple(row.get(name) for name in names)


def metric(row: dict) -> str | None:
    return next((name for name in METRICS if name in row), None)


def show(figures: dict[str, float], digits: int = 0) -> str:
    """median (min..max)"""
    median, low, high = (f'{figures[name]:,.{digits}f}' for name in ('median', 'min', 'max'))
    return f'{median} ({low}..{high})'


def figure(row: dict) -> str:
    """A row's result, or why it has none."""
    if row['status'] != 'ok':
        return row['status'].replace('|', '/')
    _, unit, digits = METRICS[metric(row)]
    return f'{show(row[metric(row)], digits)} {unit}'


def ratio(a: dict, b: dict) -> str:
    """Speed of row b over that of row a; '' where one has none."""
    name = metric(b)
    if not a['status'] == b['status'] == 'ok' or name not in a:
        return ''
    return f'{(b[name]["median"] / a[name]["median"]) ** METRICS[name][0]:.2f}x'


COLUMNS = {
    'tokens_per_update': ('tokens an update, 4 GPUs', '{:,}'),
    **{name: (name, '{}') for name in 'LEDCBT'},
    'path': ('path', '{}'),
    'figure': ('median (min..max)', '{}'),
    'ratio': ('speed-up', '{}'),
    'share_of_roofline': ('of roofline', '{:.1%}'),
    'share_of_conv': ('of conv rate', '{:.1%}'),
    'paper': ('paper: tokens/s a GPU, ms on 4', '{:,.6g}'),
    'over_paper': ('over paper', '{:.2f}x'),
    'target': ('target, one H100', '{:,.6g}'),
    'over_target': ('over target', '{:.2f}x'),
    'check': ('off the plain pieces', '{}'),
    'first_run_s': ('first run, s', '{:.1f}'),
    'memory_bytes': ('memory, bytes', '{:,}'),
}


def markdown(rows: list[dict], columns: dict[str, tuple[str, str]]) -> str:
    """columns: title and form of a row's value, texts as they are. One in which no row has anything
    is left out."""
    lines = []
    for name, (title, form) in columns.items():
        values = (row.get(name) or '' for row in rows)
        texts = [x if isinstance(x, str) else form.format(x) for x in values]
        lines += [[title, '---', *texts]] if any(texts) else []
    return '\n'.join('| ' + ' | '.join(line) + ' |' for line in zip(*lines, strict=True))


def table(results: list[dict]) -> str:
    """Markdown of rows, each with its speed-up over the first of its cell."""
    rows, first = [], {}
    for row in results:
        if row['status'] == 'ok':
            first.setdefault(key(row, CELL), row)
        over = ratio(first.get(key(row, CELL), row), row)
        rows.append({**row, 'figure': figure(row), 'ratio': over})
    return markdown(rows, COLUMNS)


def describe(report: dict) -> str:
    """The lines above the table."""
    rates = []
    for name, figures in report['yardsticks'].items():
        unit, giga = 'GB/s' if name == 'copy' else 'GFLOP/s', 2e-9 if name == 'conv' else 1e-9
        # a multiply-add is two FLOPs
        rates.append(f'{name} {show({k: giga * v for k, v in figures.items()})} {unit}')
    words = '{device}, {threads} threads, torch {torch}, commit {commit}, {dtype}'.format(**report)
    return f'{words}; {", ".join(rates)}\n`{report["command"]}`'


def compare_reports(text: str) -> None:
    """Prints the rows that two reports share, 'A.json,B.json', and how fast the second's are."""
    names = [name.strip() for name in text.split(',')]
    if len(names) != 2 or not all(names):
        fail(f'compare = {text!r}: expected two files, A.json,B.json')
    a, b = (read_report(name) for name in names)
    if a['suite'] != b['suite']:
        fail(f'compare: {names[0]} is of suite {a["suite"]!r}, {names[1]} of {b["suite"]!r}')
    old = {key(row): row for row in a['results']}
    pairs = [(old[key(row)], row) for row in b['results'] if key(row) in old]
    if not pairs:
        fail(f'compare: {names[0]} and {names[1]} have no row in common')
    for letter, name, r in zip('AB', names, (a, b), strict=True):
        print(f'{letter}: {name}:', *(r.get(k) for k in ('device', 'dtype', 'commit', 'date')))
    rows = [{**y, 'A': figure(x), 'B': figure(y), 'ratio': ratio(x, y)} for x, y in pairs]
    columns = {name: (name, '{}') for name in [*KEYS, 'A', 'B']}
    print('\n' + markdown(rows, columns | {'ratio': ('speed of B over A', '{}')}))


# ---- what is to be measured ----


def own_sizes(config: dict, suite: str) -> tuple:
    return (OWN_CPU if config['device'] == 'cpu' else OWN)[suite]


def all_cells(config: dict, suite: str) -> list[tuple]:
    """Each cell whole; shorter ones filled up from the suite's own."""
    given, boards = config['cells'], suite == 'sokoban'
    given = (given,) if given and all(type(n) is int for n in given) else given
    for cell in given:
        sizes = cell if isinstance(cell, (tuple, list)) else ()
        fits = len(sizes) in ((3,) if boards else (2, 3, 4))
        if not fits or not all(type(n) is int and n > 0 for n in sizes):
            words = '(L, E, d)' if boards else '(L, E, C, B) or its first two or three'
            fail(f'cells: {cell} is not {words}, integers above 0')
    if boards:
        return list(given or TARGET_SOKOBAN)
    full, (levels, contexts, last) = {}, own_sizes(config, suite)[:3]
    for cell in given or levels:
        for n in cell[3:] or last:
            full |= {(*cell[:2], C, n): None for C in cell[2:3] or contexts}
    return list(full)


def chosen_paths(config: dict, suite: str, E: int) -> list[str]:
    """The paths of a cell: those given, in suite first that the cell's suite has; or its own."""
    own = PATHS_CPU[suite] if config['device'] == 'cpu' else PATHS[suite][1 + (E == 1)]
    known, given = PATHS[suite][0].split(','), (config['paths'] or own).replace(' ', '').split(',')
    first = config['suite'] == 'first'
    possible = ','.join(PATHS[name][0] for name in PATHS).split(',') if first else known
    if not {path.removesuffix('_bf16') for path in given} <= set(possible):
        words = f'expected some of {",".join(known)}, with _bf16 for that dtype'
        fail(f'paths = {config["paths"]!r}: {words}')
    return [path for path in given if path.removesuffix('_bf16') in known] or own.split(',')


def row_of(config: dict, suite: str, cell: tuple, path: str) -> dict:
    """A variant's row: what it is, and its sizes. ValueError for sizes that do not fit together."""
    dt = 'bfloat16' if path.endswith('_bf16') else config['dtype']
    row = {'suite': suite, 'cell': str(cell).replace(' ', ''), 'path': path, 'dtype': dt}
    if suite == 'sokoban':
        row |= dict(zip('LED', cell, strict=True))
        AgentConfig(config['arch'], config['recurrent'], *cell)
        return row | {'model': config['arch'] + ', not recurrent' * (not config['recurrent'])}
    D, V = own_sizes(config, suite)[3:]
    (L, E, C, B), model = cell, 'lstm' if path.startswith('lstm') else 'recurrent'
    T = config['block_size'] if suite == 'train' and config['block_size'] else C
    if suite == 'train':
        if B % (4 * T):
            fail(f'cells: {B} tokens are not a whole number of rows of {T} on each of 4 GPUs')
        row, B = {**row, 'tokens_per_update': B}, B // 4 // T
    if path.startswith(('gpt', 'transformer')):
        L, E, model = L * E, 1, 'transformer'
    row |= {'L': L, 'E': E, 'C': C, 'B': B, 'T': T, 'D': config['n_embd'] or D, 'V': V}
    model_config(row)
    return row | {'model': model}


def plan(config: dict, suite: str, name: str = '') -> dict[str, dict[str, dict]]:
    """{cell: {label: row}}, or all cells under one name. Refuses what makes no sense."""
    groups = {}
    for cell in all_cells(config, suite):
        for path in chosen_paths(config, suite, cell[1]):
            row = row_of(config, suite, cell, path)
            groups.setdefault(name or row['cell'], {})[f'{row["cell"]} {path}'] = row
    return groups


def plan_first(config: dict) -> dict[str, dict[str, dict]]:
    """{step: {label: row}} of suite first, in its order."""
    cuda, groups = config['device'] != 'cpu', {}
    for step in config['cells'] or (FIRST if cuda else SMALL_FIRST):
        which, *sizes = step if isinstance(step, (tuple, list)) else (step,)
        if which not in PATHS:
            fail(f'cells: {which!r} is no suite: suite first wants cells such as ("train", 2, 8)')
        name = ' '.join(map(str, (which, *sizes)))
        if which == 'train' and len(sizes) == 3 and cuda:
            sizes.append(131072)
        groups |= plan({**config, 'cells': (tuple(sizes),)}, which, name)
    smoke, rest = ({'suite': 'tests', 'tests': which} for which in (SMOKE, f'not ({SMOKE})'))
    return {'smoke': {'smoke': smoke}, **groups, 'tests': {'tests': rest}} if cuda else groups


# ---- a suite ----


def run_group(group: dict[str, dict], config: dict, report: dict, pool: dict, until: float) -> str:
    """Measures it, and puts its rows into the report. -> 'ok', or what went wrong."""
    records = measure(group, config, pool, until)
    for part, times in records.get('yardsticks', {}).get('seconds', {}).items():
        seen = report['rates'].setdefault(part, [])
        seen += [records['yardsticks']['work'][part] / t for t in times]
        report['yardsticks'][part] = spread(seen)
    rates = {part: figures['median'] for part, figures in report['yardsticks'].items()}
    new = [derive(records[x], row, rates) for x, row in group.items() if 'L' in row]
    kept = {key(row): row for row in report['results']} | {key(row): row for row in new}
    cells = [key(row, CELL) for row in kept.values()]  # those to be compared stand together
    report['results'] = sorted(kept.values(), key=lambda row: cells.index(key(row, CELL)))
    bad = [record['status'] for record in records.values() if record['status'] != 'ok']
    bad += [f'not checked: {r["check"]}' for r in new if r.get('check', '%')[-1] != '%']
    return '; '.join(bad) or 'ok'


def write(report: dict, path: str) -> str:
    """The report as JSON at `path`, its table beside it as .md. -> the table."""
    steps = report.get('steps', {}).items()
    bad = [f'- {name}: {step["status"]}' for name, step in steps if step['status'] != 'ok']
    tail = '\n\nNot done, or not as it should be:\n' + '\n'.join(bad) if bad else ''
    text = f'{describe(report)}\n\n{table(report["results"])}{tail}'
    write_json({name: value for name, value in report.items() if name != 'rates'}, path)
    write_text(text + '\n', os.path.splitext(path)[0] + '.md')
    return text


def run(config: dict, groups: dict[str, dict[str, dict]]) -> int:
    """Measures what the report does not hold yet, group by group, the report written after each.
    -> the exit status."""
    start, pool, begun = time.perf_counter(), {}, 0
    first, budget = config['suite'] == 'first', config['budget'] or math.inf
    report = {'suite': config['suite'], **header(config)}
    path = results_path(report, config['out'])
    old = earlier(report, path) if config['append'] or first else {}
    report |= {'steps': {}, 'yardsticks': {}, 'results': []} | old | {'rates': {}}
    have, steps = {key(row) for row in report['results']}, report['steps']
    rows = {name: [row for row in group.values() if 'L' in row] for name, group in groups.items()}
    done = {name for name in steps if all(key(row) in have for row in rows.get(name, ()))}
    left = [name for name in groups if name not in done]
    try:
        while left:
            name, now = left[0], time.perf_counter()
            if begun and now - start > budget - LEAST * first:
                break
            until = now + LIMITS.get(name.split()[0], LIMIT) if first else math.inf
            cut = first and begun and until > start + budget
            until, before = min(until, start + budget) if cut else until, report['results']
            status = run_group(groups[name], config, report, pool, until)
            if cut and 'late' in status:  # the next call gives it all its time
                report['results'] = before
                break
            begun += name != 'yardsticks'
            left.pop(0)
            if first or config['device'] == 'cpu':
                end(pool)
            steps[name] = {'status': status, 'seconds': time.perf_counter() - now}
            write(report, path)
            told = f'{len(groups) - len(left)} of {len(groups)} done'
            print(f'{name}: {status}; {told}, {time.perf_counter() - start:.0f} s', flush=True)
    finally:
        end(pool)
    print(f'\n{write(report, path)}\n\n{path}')
    if left:
        again = ['python', 'bench.py', *sys.argv[1:]]
        again += ['--append=True'] if not (first or config['append']) else []
        print(f'\nbudget = {budget} s is used up, cells left: {len(left)}. To go on:')
        print(shlex.join(again))
    return int(first and any(step['status'] != 'ok' for step in steps.values()))


def write_data(folder: str, rows: list[dict]) -> None:
    """Suite train's: a shard of random tokens, and a small one to validate on."""
    V, size = rows[0]['V'], 33 * max(row['B'] * (row['T'] + 1) for row in rows)
    tokenizer, rng = TOKENIZER[V], np.random.default_rng(0)
    for name, n in (('val_000000', 1000), ('train_000001', size)):
        path = os.path.join(folder, f'fineweb_{name}.bin')
        write_shard(path, rng.integers(0, REAL_VOCAB[tokenizer], n))
    write_meta(folder, open_meta(folder, tokenizer=tokenizer, source='bench.py'))


def run_suite(config: dict) -> int:
    """config: the settings, with the device and dtype that were picked. -> the exit status."""
    first = config['suite'] == 'first'
    groups = plan_first(config) if first else plan(config, config['suite'])
    rows = [row for group in groups.values() for row in group.values() if 'L' in row]
    dtypes = {r['dtype'] for r in rows}
    conv = [r['dtype'] for r in rows if r['suite'] == 'sokoban'][:1]
    yardsticks = {'suite': 'yardsticks', 'dtypes': sorted(dtypes), 'conv': ''.join(conv)}
    if first or config['device'] != 'cpu':
        groups = {'yardsticks': {'yardsticks': yardsticks}, **groups}
    else:
        groups = {name: {'yardsticks': yardsticks, **group} for name, group in groups.items()}
    with tempfile.TemporaryDirectory() as folder:
        if trained := [r for r in rows if r['suite'] == 'train']:
            write_data(folder, trained)
        return run({**config, 'data_dir': folder}, groups)


def main() -> int:
    argv = gathered(sys.argv[1:], 'compare')  # --compare A.json B.json
    if '--compare=' in argv:
        fail('compare: expected two files, --compare A.json B.json')
    config = configure(globals(), argv)
    if compare:
        compare_reports(compare)
        return 0
    try:
        at = pick_device(device)
        wanted = dtype or ('float32' if at == 'cpu' and suite != 'sokoban' else 'auto')
        config |= {'device': at, 'dtype': str(pick_dtype(wanted, at))[6:]}
        return run_suite({**config, 'check': check or suite == 'first'})
    except ValueError as error:
        fail(error)


if __name__ == '__main__':
    run_script(main, 'interrupted: what was finished is written')

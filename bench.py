"""
Speed and memory of the models on whatever device there is, beside the paper's and a roofline.

    python bench.py                               # updates, plain against fast, for 2 CPU cores
    python bench.py --suite=first --budget=540    # a GPU's first half-hour; the same again goes on
    python bench.py --suite=train --budget=540    # the paper's throughput table; tells how to go on
    python bench.py --suite=train --paths=lstm,compiled   # beside torch.nn.LSTM of equal size
    python bench.py --suite=decode                # and its latency table
    python bench.py --suite=sokoban --paths=compiled,compiled_recompute

train      updates of train_lm.py, loader and optimizer included, T = W = C, on one of the paper's 4
           GPUs: B = tokens an update / 4 / C streams, held to a quarter of the paper's figure
decode     a token for each of B streams after a cache filled to C = W; the paper's is of 4 GPUs
sokoban    updates of train_sokoban.py on generated levels, in environment steps a second
first      yardsticks, smoke tests of tests/test_gpu.py, the suites' cells, most telling first, the
           other tests: each checked, with a time limit of its own, its result written at once; a
           failure is told and passed by (exit status 1)
A cell is (L, E, C, B), in train (L, E, C, tokens an update), in sokoban (L, E, d), in first a
suite's name and such a cell; a shorter one stands for all of the suite's own that begin so.

Every variant has a process of its own, so one that dies or runs out of memory costs itself alone.
On a CPU all of a cell take turns with the yardsticks, so that a drift of the machine falls on all.
The yardsticks: a large product, a large copy, for sokoban a 3x3 convolution with its backward. "Of
roofline": the time of `floor` at their rates over that measured; "of conv rate": multiply-adds
executed over the convolution's. Memory, on a GPU: torch's peak, warm-up and capture included.
"""

import contextlib
import copy
import datetime
import functools
import gc
import itertools
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
from collections.abc import Callable, Iterator
from types import ModuleType

# before torch: how threads wait, what ctrl-C does
from configurator import configure, fail, first_line, read_json, run_script, write_json, write_text

import numpy as np
import torch
import torch.nn.functional as F

import baselines
import kernels
import train_lm
import train_sokoban
from common import commit, device_name, keep_memory, out_of_memory, pick_device, pick_dtype
from convlstm import AgentConfig
from data_fineweb import REAL_VOCAB, VOCAB, open_meta, shard_path, write_meta, write_shard
from figures import markdown, read_csv
from model import ModelConfig, State, build_model
from decode import Decoder
from unroll import release

# fmt: off
# what
suite = 'train'    # train, decode, sokoban or first
cells = ()         # such as (2,8,128,16),(4,4): see above. (): the suite's own, the paper's
paths = ''         # plain, fast, compiled, gpt (not recurrent, L*E levels of one expert), ...; a
                   # wrong one lists all. '': the suite's own
n_embd = 0         # train, decode: D; 0: the suite's own
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
# fmt: on
RANGES = {'suite': 'train decode sokoban first'.split(), 'arch': ['convlstm', 'convglu']}
RANGES |= dict.fromkeys('rounds n_envs unroll'.split(), (1, math.inf))
RANGES |= dict.fromkeys('n_embd block_size threads seconds budget'.split(), (0, math.inf))

HERE = os.path.dirname(os.path.abspath(__file__))
LEVELS = (1, 16), (2, 8), (4, 4), (8, 2), (16, 1)
CONTEXTS = {'train': (32, 64, 128, 256, 1024, 2048), 'decode': (128, 2048)}
OWN = {  # suite: (L, E) of its cells, their C, their last number; on a GPU the paper's
    'train': (LEVELS, CONTEXTS['train'], (131072, 262144)),
    'decode': (LEVELS, CONTEXTS['decode'], (16,)),
}
OWN_CPU = {'train': (((2, 8),), (128,), (4096,)), 'decode': (((2, 8),), (128,), (16,))}
PATHS = {  # all; _recompute: the update runs its own forward instead of keeping the rollout's
    'train': 'plain,fast,compiled,gpt,gpt_compiled,lstm,transformer',
    'decode': 'ring,ring_compiled,gpt_ring,gpt_ring_compiled',
    'sokoban': 'plain,fast,compiled,plain_recompute,fast_recompute,compiled_recompute',
}
OWN_PATHS = {  # on a CPU, on a GPU, there at E = 1, where the paper has the Transformer too
    'train': ('plain,fast', 'compiled', 'gpt_compiled'),  # it trains only that
    'decode': ('ring', 'ring,ring_compiled', 'ring,ring_compiled,gpt_ring,gpt_ring_compiled'),
    'sokoban': ('plain,fast,compiled', 'fast,compiled', 'fast,compiled'),
}
TOKENIZER = {V: name for name, V in VOCAB.items()}

# The paper's tables, of 4 H100: tokens/s of one of them by n tokens an update, ms a token of all by
# n streams; and targets planned for one H100, calculated, not measured: the same, and steps/s
SPEED = os.path.join(HERE, 'results', 'paper', 'speed.csv')
BOARDS = (1, 1, 128), (4, 1, 64)  # 50M steps in 15 and 30 minutes

# Suite first: what comes after the yardsticks and the smoke tests, then what is left of the suites
TRAIN_FIRST = ((2, 8, 64), (1, 16, 64), (4, 4, 128), (8, 2, 256), (2, 8, 2048), (16, 1, 256))
FIRST = (
    *(('train', *cell, 131072) for cell in TRAIN_FIRST),
    *(('decode', 2, 8), ('decode', 1, 16), ('sokoban',), ('decode',)),
    *(('train', *LE, C, 131072) for C in (256, 2048, 32, 128, 64, 1024) for LE in LEVELS),
    ('train',),
)
SMALL_FIRST = ('train', 2, 8, 32, 1024), ('decode', 2, 8), ('sokoban', 1, 1, 32)
GPU_TESTS = os.path.join(HERE, 'tests', 'test_gpu.py')
# of these: every capture and kernel, those of one setting that compiles
SMOKE = 'measured or sqrt_sum or replay and (compile or not lm)'
LIMITS = {'smoke': 180, 'train': 240, 'tests': 400}  # seconds of a step; of another 150
LEAST = 60  # seconds of budget for which a step is begun; one that the budget cuts is begun again
FAR = 0.1  # relative difference of a gradient or of logits that is no rounding of bfloat16's


# ---- the work: make(row, config) -> ({part: function to time}, what is known of it) ----
# Known of it may be 'check': a function that gives {name: (tensor, the plain pieces' tensor)}.


def model_config(row: dict) -> ModelConfig:
    """ValueError for sizes that do not fit together."""
    sizes = {'window': row['C'], 'block_size': row['T']}
    return ModelConfig(row['V'], row['L'], row['E'], row['D'], **sizes)


def make_token(row: dict, config: dict) -> tuple[dict[str, Callable], dict]:
    """Part 'token': one greedy token for each of B streams by sample.Decoder, from a cache of W
    entries."""
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
    kernels.fused.enabled = 'compiled' in row['path']
    decoder = Decoder(model, B, amp=dt)
    decoder.load(state)
    decoder.step(torch.randint(row['V'], (B,), device=at))

    @torch.no_grad()
    def check():
        decoder.load(state)
        after, pairs = state, {}
        for i, tokens in enumerate(torch.randint(row['V'], (4, B), device=at)):
            decoder.step(tokens)
            with train_lm.autocast(at, dt):
                logits, after = model.step(tokens, after)
            pairs[f'logits of token {i}'] = decoder.logits.clone(), logits
        return pairs

    return {'token': decoder.step}, {'pieces': decoder.lines, 'check': check}


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
    settings |= {'arch': row['path'] if row['path'] in baselines.LEARNING_RATE else 'experts'}
    settings |= {'recurrent': row['model'] != 'transformer'}
    settings |= {'compile': row['path'].endswith(('compiled', 'transformer'))}
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
        x, y, carried = run.batch
        run.gradients.zero()
        for to, source in zip(carried, state, strict=True):
            to.copy_(source)
        chunk = 'chunk', train_lm.forward_backward, run, x, y, carried
        kernels.graphed(run.graphs if run.capture_chunk else None, *chunk)
        found = {name: p.grad.clone() for name, p in run.model.named_parameters()}
        return {'loss': run.gradients.extra[0].clone(), **found}

    def check():
        state = [x.clone() for x in run.batch[2]]
        mine = gradients(state)
        run.model.config.path, run.graphs = 'fast', None
        release()
        gc.collect()
        if config['device'] != 'cpu':
            torch.cuda.empty_cache()  # the graphs' memory is needed
        plain = gradients(state)
        return {name: (mine[name], plain[name]) for name in mine}

    info = {'work': settings['tokens_per_step'], 'params': run.model.num_params()['total']}
    return {'update': update}, {**info, 'pieces': kernels.chosen_lines(), 'check': check}


def make_agent(row: dict, config: dict) -> tuple[dict[str, Callable], dict]:
    """Part 'update': a whole one of train_sokoban.py on generated levels, its games counted."""
    path, _, recompute = row['path'].partition('_')
    settings = {name: config[name] for name in ('arch', 'recurrent', 'n_envs', 'unroll')}
    settings |= {'reuse': not recompute, 'eval_games': 1}
    settings |= {'split': 'generated', 'eval_split': 'generated', 'n_levels': 5000}
    run = make_run(train_sokoban, settings, row, config)

    def update():
        kernels.fused.enabled = path == 'compiled'
        stats, episodes, _ = train_sokoban.update(run, False)
        train_sokoban.count_episodes(run, episodes, stats)

    def gradients(actions=None):
        """A rollout, what it and its backward give. actions: (T, B), or None: sampled."""
        kernels.fused.enabled = path == 'compiled' and actions is None
        learn = 'rollout and backward', train_sokoban.rollout_and_backward
        batch = kernels.graphed(run.graphs, *learn, run, actions)
        found = {'loss': run.gradients.extra[0].clone(), 'return': batch['return'].clone()}
        named = run.model.named_parameters()
        found |= {name: p.grad.clone() for name, p in named if p.numel()}
        return batch['action'].clone(), found

    def check():
        """By the plain equations of the same actions: a rounding may tip one."""
        begun = copy.deepcopy((run.env, run.state, run.count))
        actions, mine = gradients()
        run.env, run.state, run.count = begun
        run.model.config.mode, run.graphs = 'plain', None
        plain = gradients(actions)[1]
        return {name: (mine[name], plain[name]) for name in mine}

    steps, macs = config['n_envs'] * config['unroll'], run.model.macs_per_step()
    info = {'work': steps, 'params': run.model.num_params()['total'], 'macs_per_step': macs}
    # forward, twice as much backward, a second forward without reuse; not encoder, head, last value
    info['macs'] = (4 if recompute else 3) * macs['executed'] * steps
    return {'update': update}, {**info, 'check': check}


def make_yardsticks(row: dict, config: dict) -> tuple[dict[str, Callable], dict]:
    """A product of two large square matrices, FLOPs; a copy too large for a cache, bytes read and
    written; a convolution of boards enough to fill the device, multiply-adds."""
    at, dt = config['device'], getattr(torch, config['dtype'])
    n, size = (2048, 2**28) if at == 'cpu' else (8192, 2**30)
    parts = {'matmul': functools.partial(torch.matmul, *torch.randn(2, n, n, device=at, dtype=dt))}
    source, target = torch.ones(2, size, dtype=torch.uint8, device=at)
    parts['copy'] = functools.partial(target.copy_, source)
    work = {'matmul': 2 * n**3, 'copy': 2 * size}
    if row['conv']:
        keep_memory()
        torch.backends.cudnn.benchmark = True  # as train_sokoban.py has it
        shapes = (640, 128, 10, 10), (512, 128, 3, 3), (640, 512, 10, 10)
        made = [torch.randn(shape, device=at, dtype=dt) for shape in shapes]
        x, w, dy = (tensor.to(memory_format=torch.channels_last) for tensor in made)
        xw = x.requires_grad_(), w.requires_grad_()
        parts['conv'] = lambda: torch.autograd.grad(F.conv2d(*xw, padding=1), xw, dy)
        work['conv'] = 3 * 640 * 100 * 9 * 128 * 512
    return parts, {'work': work}


def make_tests(row: dict, config: dict) -> tuple[dict[str, Callable], dict]:
    """Runs those GPU_TESTS that the row chooses. RuntimeError: one did not pass."""
    import pytest

    class Told:
        bad = []

        def pytest_runtest_logreport(self, report: object) -> None:
            if report.failed:
                self.bad.append(report.nodeid.rpartition('::')[2])

    words = '-v --tb=short --show-capture=no --noconftest -o addopts= -p no:cacheprovider -m gpu'
    code = pytest.main([*words.split(), '-k', row['tests'], GPU_TESTS], [Told()])
    if code:
        raise RuntimeError(f'{len(Told.bad)} tests: {", ".join(Told.bad)} (pytest {int(code)})')
    return {}, {}


MAKERS = {'train': make_update, 'decode': make_token}
MAKERS |= {'sokoban': make_agent, 'yardsticks': make_yardsticks, 'tests': make_tests}


# ---- a variant's process, and taking turns with it ----


def timed(run: Callable, repeats: int, device: str) -> float:
    """Seconds of one run(), the mean of `repeats`, with the device idle at both ends."""
    wait = torch.cuda.synchronize if device != 'cpu' else time.time
    wait()
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    wait()
    return (time.perf_counter() - start) / repeats


def difference(pairs: dict[str, tuple]) -> tuple[float, str]:
    """The largest relative difference of {name: (tensor, reference)}, and whose it is. Vectors and
    scalars count as one: a single number may be all rounding."""
    groups = {}
    for name, pair in pairs.items():
        small = pair[1].dim() == 1 or name.endswith(('.a', '.b'))
        groups.setdefault('vectors' if small else name, []).append(pair)
    off = {}
    for name, group in groups.items():
        both = zip(*group, strict=True)
        mine, plain = (torch.cat([x.double().flatten() for x in part]) for part in both)
        far = ((mine - plain).norm() / plain.norm().clamp(min=1e-30)).item()
        off[name] = math.inf if math.isnan(far) else far
    worst = max(off, key=off.get)
    return off[worst], worst


def why(error: Exception) -> str:
    return 'OOM' if out_of_memory(error) else f'failed: {first_line(error)}'


def turns(row: dict, config: dict) -> Iterator[dict]:
    """What each turn of a variant tells: of being made and run once, compiling included, of
    `rounds` measurements, of the check."""
    device, start = config['device'], time.perf_counter()
    parts, info = MAKERS[row['suite']](row, config)
    check = info.pop('check', None)
    for _ in range(1 if device == 'cpu' else 5):  # three as they are, the capture, a replay
        for run in parts.values():
            timed(run, 1, device)
    yield {**info, 'first_run_s': time.perf_counter() - start}
    seconds = {part: [] for part in parts}
    for _ in range(config['rounds'] if parts else 0):
        for part, run in parts.items():
            once = timed(run, 1, device)  # after the others' turns caches and clocks are cold
            seconds[part].append(timed(run, max(1, math.ceil(config['seconds'] / once)), device))
        memory = 0 if device == 'cpu' else torch.cuda.max_memory_allocated()
        yield {'seconds': seconds, 'memory_bytes': memory}
    if check and config['check']:
        try:
            off, name = difference(check())
            far = {} if off < FAR else {'status': f'differs by {off:.1%} in {name}'}
            yield {'check': f'{off:.2%}', **far}
        except (RuntimeError, MemoryError) as error:  # it may need more memory
            yield {'check': why(error)}


def work(pipe: multiprocessing.connection.Connection, row: dict, config: dict) -> None:
    """The process: a turn for each message, None after the last."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C is the parent's business, which ends us
    os.setsid()  # its children end with it
    if config['device'] != 'cpu':
        torch.cuda.set_device(config['device'])
        torch.set_float32_matmul_precision('high')  # as train_lm.py
    if config['threads']:
        torch.set_num_threads(config['threads'])
    told = turns(row, config)
    while True:
        pipe.recv()
        try:
            pipe.send(next(told, None))
        except (RuntimeError, MemoryError, ValueError, ImportError) as error:
            pipe.send({'status': why(error)})


def kill(process: multiprocessing.Process, pipe: object) -> None:
    """Also its children, which it leads; the pipe is open until then."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


def ask(process: multiprocessing.Process, pipe: object, until: float) -> dict | None:
    """A variant's next turn, or before what it ended; None: it is through."""
    try:
        pipe.send(True)
        while not pipe.poll(max(0.0, min(10.0, until - time.perf_counter()))):
            print('    ...', flush=True)  # a first run compiles
            if time.perf_counter() > until:
                return {'status': 'failed: late'}
        return pipe.recv()
    except (EOFError, OSError):  # it is gone; Linux kills one that takes the last of the memory
        process.join()
        ended = f'failed: its process ended with {process.exitcode}'
        return {'status': 'OOM' if process.exitcode == -signal.SIGKILL else ended}


def measure(group: dict[str, dict], config: dict, until: float = math.inf) -> dict:
    """{label: row} -> {label: record}: status, first_run_s, memory_bytes, seconds {part: [one a
    round]}, check, and what `make` told. On a GPU one variant after another."""
    records = {label: {'status': 'ok', 'seconds': {}} for label in group}
    queue, workers, context = list(group), {}, multiprocessing.get_context('spawn')
    try:
        while queue:
            label = queue.pop(0)
            if label not in workers:
                ours, theirs = context.Pipe()
                args = theirs, group[label], config
                process = context.Process(target=work, args=args, daemon=True)
                process.start()
                theirs.close()
                workers[label] = process, ours
            answer = ask(*workers[label], until)
            if answer is None or 'status' in answer:
                kill(*workers.pop(label))  # gives its memory back at once
            else:
                queue.insert(len(queue) if config['device'] == 'cpu' else 0, label)
            if answer is not None:
                records[label] |= answer
                times = answer.get('seconds', {}).items()
                told = ', '.join(f'{part} {its[-1]:.4g} s' for part, its in times)
                told = told or answer.get('status') or answer.get('check') or 'first run done'
                print(f'{label}: {told}', flush=True)
    finally:
        for worker in workers.values():
            kill(*worker)
    return records


# ---- the floor, the paper, the figures of a row ----


def floor(row: dict, rate: float, bandwidth: float) -> float:
    """Least seconds of a token of each of B streams (trained in chunks of T), for products at
    `rate` FLOP/s and memory at `bandwidth` bytes/s. Nothing overlaps but a product with the
    streaming of its own weights:

        product = max(2 n B / rate, n size / bandwidth)  a level's n weights (shared: one k, v)
        forward = L (product + keys and values of W slots, read once)
        backward= L (the same + dk, dv)                  in fp32, read and written at the own slots
        weights = L 2 n B / rate                         their gradients, over many tokens at once
        head    = 3 x 2 D V B / rate                     with its gradients

    Decoding: forward, and the head as one more product. GPT trains on whole sequences: all is
    dense, attention six products over (T + 1) / 2 slots. Not counted: activations, norms, the
    optimizer."""
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
        return 2 * L * (2 * n + 3 * (T + 1) * E * D) * B / rate + weights + 3 * head
    slots = sum(min(t + 1, W) for t in range(T)) / T
    back = step + slots * 2 * C * K * 4 * 2 * B / bandwidth
    return L * (step + back) + weights + 3 * head


@functools.cache
def speeds() -> dict[tuple, str]:
    names = 'source suite model L E C n'.split()
    return {tuple(r[name] for name in names): r['figure'] for r in read_csv(SPEED)}


def published(row: dict) -> dict[str, float | str]:
    """SPEED of a row: paper and target."""
    if row['suite'] != 'sokoban' and (row['D'], row['V'], row['T']) != (768, 50304, row['C']):
        return {}
    n = row.get('tokens_per_update', row.get('B', ''))
    sizes = row['L'], row['E'], row.get('C', row['D']), n
    who = [str(x) for x in (row['suite'], row['model'], *sizes)]
    found = {name: speeds().get((name, *who)) for name in ('paper', 'target')}
    return {name: x if x == 'OOM' else float(x) for name, x in found.items() if x}


METRICS = {  # suite: a row's figure, 1 where more is better, unit, digits
    'train': ('tokens_per_s', 1, 'tokens/s', 0),
    'sokoban': ('env_steps_per_s', 1, 'env steps/s', 0),
    'decode': ('ms_per_token', -1, 'ms/token', 3),
}


def derive(record: dict, row: dict, rates: dict[str, float]) -> dict:
    """The row of a finished record: `row`, its path and sizes, with rates and shares of the
    yardsticks' rates."""
    row = row | record | published(row)
    if row['seconds']:
        (times,), (name, sign, _, _) = row['seconds'].values(), METRICS[row['suite']]
        row[name] = [row['work'] / t if sign > 0 else 1e3 * t for t in times]
        value = statistics.median(row[name])
        for other in ('paper', 'target'):
            if isinstance(row.get(other), (int, float)):
                row[f'over_{other}'] = (value / row[other]) ** sign
        if rates and row['suite'] == 'sokoban':
            row['share_of_conv'] = row['macs'] / row['work'] * value / rates['conv']
        elif rates and row['model'] != 'lstm':
            least = floor(row, rates['matmul'], rates['copy'])
            row['share_of_roofline'] = least * (1e3 / value if sign < 0 else value / row['B'])
    return row | {'figure': figure(row)}


# ---- reports, with what a figure needs to be repeated, and tables ----

# what tells two rows apart; of two reports whose rows may be joined; of rows that are compared
KEYS = 'suite cell path model D V B T'.split()
SAME = 'suite device dtype torch commit threads'.split()
CELL = 'suite cell D'.split()


def header(config: dict) -> dict:
    at, kept = config['device'], {'config': config, 'command': shlex.join(['python', *sys.argv])}
    kept |= {'device': device_name(at), 'dtype': config['dtype'], 'commit': commit()}
    kept |= {'threads': torch.get_num_threads(), 'torch': torch.__version__}
    kept['date'] = datetime.datetime.now().astimezone().isoformat(timespec='seconds')
    kept['python'] = platform.python_version()
    if at != 'cpu':
        kept['triton'] = kernels.triton_module() and sys.modules['triton'].__version__
        kept |= {'cuda': torch.version.cuda, 'cudnn': torch.backends.cudnn.version()}
        kept['card'] = str(torch.cuda.get_device_properties(at))
    return kept


def key(row: dict, names: list[str] = KEYS) -> tuple:
    return tuple(row.get(name) for name in names)


def show(values: list[float], unit: str, digits: int = 0) -> str:
    median, low, high = (f'{f(values):,.{digits}f}' for f in (statistics.median, min, max))
    return f'{median} ({low}..{high}) {unit}'


def figure(row: dict) -> str:
    """A row's result, or why it has none."""
    name, _, unit, digits = METRICS[row['suite']]
    return show(row[name], unit, digits) if row['status'] == 'ok' else row['status']


COLUMNS = {
    'tokens_per_update': ('tokens an update, 4 GPUs', '{:,}'),
    **{name: (name, '{}') for name in 'LEDCBT'},
    'path': ('path', '{}'),
    'figure': ('median (min..max)', '{}'),
    'ratio': ('speed-up', '{:.2f}x'),
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


def beside(results: list[dict]) -> str:
    """The table of rows, each with its speed-up over the first of its cell; a column in which no
    row has anything is left out."""
    rows, first, found = [], {}, []
    for row in results:
        if row['status'] == 'ok':
            name, sign, _, _ = METRICS[row['suite']]
            value = statistics.median(row[name])
            row = row | {'ratio': (value / first.setdefault(key(row, CELL), value)) ** sign}
        rows.append(row)
    for name, (title, form) in COLUMNS.items():
        values = (row.get(name) or '' for row in rows)
        texts = [x.replace('|', '/') if isinstance(x, str) else form.format(x) for x in values]
        found += [[title, *texts]] if any(texts) else []
    return markdown(list(zip(*found, strict=True))) if found else ''


def write(report: dict, path: str) -> str:
    """The report as JSON at `path`, its table beside it as .md. -> the table."""
    rates = []
    for name, seen in report['yardsticks'].items():
        unit, giga = 'GB/s' if name == 'copy' else 'GFLOP/s', 2e-9 if name == 'conv' else 1e-9
        # a multiply-add is two FLOPs
        rates.append(f'{name} {show([giga * rate for rate in seen], unit)}')
    words = '{device}, {threads} threads, torch {torch}, commit {commit}, {dtype}'.format(**report)
    text = f'{words}; {", ".join(rates)}\n`{report["command"]}`\n\n{beside(report["results"])}'
    steps = report['steps'].items()
    bad = [f'- {name}: {step["status"]}\n' for name, step in steps if step['status'] != 'ok']
    text += '\nNot done, or not as it should be:\n' + ''.join(bad) if bad else ''
    write_json(report, path)
    write_text(text, os.path.splitext(path)[0] + '.md')
    return text


# ---- what is to be measured, and measuring it ----


def cells_of(config: dict) -> list[tuple]:
    """(suite, L, E, ...) of each cell, whole: shorter ones filled up from the suite's own."""
    cpu, suite, given = config['device'] == 'cpu', config['suite'], config['cells']
    if given and not all(isinstance(cell, tuple) for cell in given):
        given = (given,)  # one
    if suite == 'first':
        given = given or (SMALL_FIRST if cpu else FIRST)
    else:
        given = [(suite, *cell) for cell in given] or [(suite,)]
    full = {}
    for which, *sizes in given:
        fits = not sizes or len(sizes) in ((3,) if which == 'sokoban' else (2, 3, 4))
        if which not in PATHS or not fits or not all(type(n) is int and n > 0 for n in sizes):
            words = '(L, E, C, B) or its first two or three; sokoban: (L, E, d); suite first: a '
            fail(f"cells: {(which, *sizes)}: expected {words}suite's name and such a cell")
        if which == 'sokoban':
            full |= {(which, *cell): None for cell in ([sizes] if sizes else BOARDS)}
            continue
        levels, contexts, last = (OWN_CPU if cpu else OWN)[which]
        parts = [sizes[:2]] if sizes else levels, sizes[2:3] or contexts, sizes[3:] or last
        full |= {(which, *LE, C, n): None for LE, C, n in itertools.product(*parts)}
    return list(full)


def row_of(config: dict, suite: str, sizes: tuple, path: str) -> dict:
    """A variant's row: what it is, and its sizes. ValueError for sizes that do not fit together."""
    row = {'suite': suite, 'cell': str(sizes).replace(' ', ''), 'path': path}
    row['dtype'] = config['dtype']
    if suite == 'sokoban':
        AgentConfig(config['arch'], config['recurrent'], *sizes)
        row |= dict(zip('LEDBT', (*sizes, config['n_envs'], config['unroll']), strict=True))
        return row | {'model': config['arch'] + ', not recurrent' * (not config['recurrent'])}
    (L, E, C, B), T, model = sizes, sizes[2], 'lstm' if path == 'lstm' else 'recurrent'
    if suite == 'train':
        T, row['tokens_per_update'] = config['block_size'] or C, B
        if B % (4 * T):
            fail(f'cells: {B} tokens are not a whole number of rows of {T} on each of 4 GPUs')
        B = B // 4 // T
    if path.startswith(('gpt', 'transformer')):
        L, E, model = L * E, 1, 'transformer'
    D, V = (256, 256) if config['device'] == 'cpu' else (768, 50304)
    row |= {'L': L, 'E': E, 'C': C, 'B': B, 'T': T, 'D': config['n_embd'] or D, 'V': V}
    model_config(row)
    return row | {'model': model}


def plan(config: dict) -> dict[str, dict[str, dict]]:
    """{step: {label: row}}, a cell or what stands beside the cells, in order."""
    groups, first, cuda = {}, config['suite'] == 'first', config['device'] != 'cpu'
    for suite, *sizes in cells_of(config):
        name = f'{suite} {",".join(map(str, sizes))}'
        own, on_gpu, one_expert = OWN_PATHS[suite]
        if cuda:
            own = one_expert if sizes[1] == 1 else on_gpu
        known, given = PATHS[suite].split(','), (config['paths'] or own).replace(' ', '').split(',')
        if not set(given) <= set(','.join(PATHS.values()).split(',') if first else known):
            fail(f'paths = {config["paths"]!r}: expected some of {",".join(known)}')
        paths = [path for path in given if path in known] or own.split(',')  # of first the suite's
        rows = [row_of(config, suite, tuple(sizes), path) for path in paths]
        groups[name] = {f'{name} {row["path"]}': row for row in rows}
    conv = config['suite'] in ('sokoban', 'first')
    before = {'yardsticks': {'yardsticks': {'suite': 'yardsticks', 'conv': conv}}}
    if not first and not cuda:
        return {name: before['yardsticks'] | group for name, group in groups.items()}
    if first and cuda:
        before['smoke'] = {'smoke': {'suite': 'tests', 'tests': SMOKE}}
        groups['tests'] = {'tests': {'suite': 'tests', 'tests': f'not ({SMOKE})'}}
    return before | groups


def add(records: dict, group: dict[str, dict], report: dict) -> str:
    """Puts a group's records into the report. -> 'ok', or what went wrong."""
    bad = [record['status'] for record in records.values() if record['status'] != 'ok']
    for part, times in records.get('yardsticks', {}).get('seconds', {}).items():
        work = records['yardsticks']['work'][part]
        report['yardsticks'].setdefault(part, []).extend(work / t for t in times)
    rates = {part: statistics.median(seen) for part, seen in report['yardsticks'].items()}
    new = [derive(records[label], row, rates) for label, row in group.items() if 'L' in row]
    kept = {key(row): row for row in (*report['results'], *new)}
    report['results'] = list(kept.values())
    bad += [f'not checked: {r["check"]}' for r in new if r.get('check', '%')[-1] != '%']
    return '; '.join(bad) or 'ok'


def run(config: dict, groups: dict[str, dict[str, dict]]) -> int:
    """Measures what the report does not hold yet, group by group, the report written after each.
    -> the exit status."""
    start, begun, first = time.perf_counter(), 0, config['suite'] == 'first'
    budget, goes_on = config['budget'] or math.inf, config['append'] or first
    report = {'suite': config['suite'], **header(config)}
    folder = re.sub('[^a-z0-9]+', '-', report['device'].lower()).strip('-')
    path = config['out'] or os.path.join('results', folder, f'{config["suite"]}.json')
    os.makedirs(os.path.dirname(path) or '.', exist_ok=True)
    report |= {'steps': {}, 'yardsticks': {}, 'results': []}
    if goes_on and os.path.exists(path):
        old, names = read_json(path), ('steps', 'yardsticks', 'results', 'command')
        if not set(names) <= set(old):
            fail(f'{path}: no report of bench.py: choose another --out')
        for name in SAME:
            if old.get(name) != report[name]:
                was = f'{path}: {name} {old.get(name)!r}, not {report[name]!r}'
                fail(f'{was}: choose another --out')
        if report['command'] not in old['command']:
            old['command'] += f'; {report["command"]}'
        report |= {name: old[name] for name in names}
    have = {key(row) for row in report['results'] if 'check' in row or not config['check']}
    rows = {name: {key(x) for x in group.values() if 'L' in x} for name, group in groups.items()}
    left = [name for name in groups if name not in report['steps'] or rows[name] - have]
    while left:
        name, now = left[0], time.perf_counter() - start
        if begun and now > budget - LEAST * first:
            break
        limit = LIMITS.get(name.split()[0], 150) if first else math.inf
        cut = first and begun and now + limit > budget
        records = measure(groups[name], config, start + (budget if cut else now + limit))
        if cut and any('late' in record['status'] for record in records.values()):
            break  # the next call gives it all its time
        begun += name != 'yardsticks'
        left.pop(0)
        status, seconds = add(records, groups[name], report), time.perf_counter() - start
        report['steps'][name] = {'status': status, 'seconds': seconds - now}
        write(report, path)
        done = f'{len(groups) - len(left)} of {len(groups)} done'
        print(f'{name}: {status}; {done}, {seconds:.0f} s', flush=True)
    print(f'\n{write(report, path)}\n{path}')
    if left:
        again = ['python', 'bench.py', *sys.argv[1:], *(() if goes_on else ['--append=True'])]
        print(f'\nbudget = {budget} s is used up, cells left: {len(left)}. To go on:')
        print(shlex.join(again))
    return int(first and any(step['status'] != 'ok' for step in report['steps'].values()))


def run_suite(config: dict) -> int:
    """config: the settings, with the device and dtype that were picked. -> the exit status."""
    groups = plan(config)
    rows = [row for group in groups.values() for row in group.values() if row['suite'] == 'train']
    with tempfile.TemporaryDirectory() as folder:
        if rows:  # a shard of random tokens, and a small one to validate on
            V, size = rows[0]['V'], 33 * max(row['B'] * (row['T'] + 1) for row in rows)
            tokenizer, rng = TOKENIZER[V], np.random.default_rng(0)
            for index, n in enumerate((1000, size)):
                write_shard(shard_path(folder, index), rng.integers(0, REAL_VOCAB[tokenizer], n))
            meta = open_meta(folder, tokenizer=tokenizer, source='bench.py')
            write_meta(folder, meta | {'finished': True})
        return run({**config, 'data_dir': folder}, groups)


def main() -> int:
    config = configure(globals())
    try:
        at = pick_device(device, threads)
        wanted = dtype or ('float32' if at == 'cpu' and suite != 'sokoban' else 'auto')
        config |= {'device': at, 'dtype': str(pick_dtype(wanted, at))[6:]}
        return run_suite({**config, 'check': check or suite == 'first'})
    except ValueError as error:
        fail(error)


if __name__ == '__main__':
    run_script(main, 'interrupted: what was finished is written')

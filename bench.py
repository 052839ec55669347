"""Measure the speed and memory of the models on this device, and compare it with the paper's.

$ python bench.py                              # on a CPU: updates of one model, plain and fast
$ python bench.py --suite=first --budget=540   # the first half-hour on a new GPU, in parts of 540 s
$ python bench.py --suite=train --budget=540   # the paper's throughput table, for one of its 4 GPUs
$ torchrun --standalone --nproc_per_node=4 bench.py --suite=train --out=out/four_gpus.json
$ python bench.py --suite=train --modes=lstm --append=True   # add torch.nn.LSTM of equal size
$ python bench.py --suite=decode               # the paper's latency table
$ python bench.py --suite=sokoban --modes=compiled,compiled_recompute
$ python bench.py --script=my_train.py --out=out/my_train.json   # updates of your trainer

train      updates of train_lm.py, with loader and optimizer, for T = W = C. Each GPU has as many
           streams as each of the paper's four, B = tokens per update / 4 / C. Results are per GPU
           and, under torchrun, also for all GPUs
decode     one token for each of B streams, with caches of W = C entries that are full
sokoban    updates of train_sokoban.py on generated levels, in environment steps/s
first      the steps for a new GPU: yardsticks, the smoke tests of tests/test_gpu.py, cells of all
           suites, the most informative first, and the other tests of tests/test_gpu.py. Each step
           has a time limit, and its result is written at once. The exit status is 1 if any failed

A cell is a shape to measure: (L, E, C, B) in decode, (L, E, C, tokens per update) in train,
(L, E, d) in sokoban, and in first the name of a suite followed by one of these. A cell whose last
numbers are left out stands for all default cells of the suite that start with the given numbers.

A variant is a cell in one mode. Each runs in a process of its own (under torchrun, one per rank),
so that one that fails or runs out of memory does not affect the others. On a CPU the variants of a
cell and the yardsticks take turns, so that changes in the machine's speed affect all of them. The
yardsticks are a large matrix product, a large copy and, for sokoban, a 3x3 convolution with its
backward.

"Of roofline" is the least possible time (`roofline_seconds`, at the rates of the yardsticks) over
the measured time. "Of conv rate" is the multiply-adds per second over those of the convolution.
Targets are modeled. Memory is torch's peak on a GPU, with warm-up and capture, but without the
search for the size of micro-batches.
"""

import contextlib
import copy
import datetime
import functools
import gc
import importlib
import io
import itertools
import math
import multiprocessing
import multiprocessing.connection
import os
import platform
import re
import shlex
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import NamedTuple

from configurator import Mistake, configure, first_line, run_script
from files import read_json, write_json, write_text

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

import baselines
import kernels
from common import commit, device_name, keep_memory, out_of_memory, pick_device, pick_dtype
from convlstm import AgentConfig
from data_fineweb import REAL_VOCAB, VOCAB, open_meta, shard_path, write_meta, write_shard
from decode import Decoder
from figures import markdown, read_csv, variant_of
from model import ModelConfig, State, build_model, randomize
from unroll import release as release_blocks

# -----------------------------------------------------------------------------
# fmt: off
# what
suite = 'train'    # 'train', 'decode', 'sokoban' or 'first'
cells = ()         # such as (2,8,128,131072),(4,4), see above; () = the suite's default cells
modes = ''         # such as 'plain,fast,compiled,nonrecurrent' (L*E layers of one expert); an
                   # unknown mode lists all; '' = the default modes of the suite
n_embd = 0         # train, decode: D; 0 = the paper's on a GPU, 256 on a CPU
block_size = 0     # train: T, tokens per chunk; 0 = C
dtype = ''         # 'float32', 'bfloat16' (autocast; sokoban: convolutions), or 'auto' (bfloat16
                   # if the device is fast at it); '' = float32 for language models on a CPU, else
                   # 'auto'
script = ''        # train, sokoban: your copy of the trainer; '' = train_lm.py or train_sokoban.py
# sokoban
arch = 'convlstm'  # 'convlstm' or 'convglu'
recurrent = True   # False = the non-recurrent agent
n_envs = 32        # boards
unroll = 20        # steps per update and board
# measurement
rounds = 3         # measurements of each variant; their median and range are reported
seconds = 0.5      # shortest measurement: runs are repeated to fill it
check = False      # compare gradients (decode: logits) with those of a slower mode on this device;
                   # a cell that differs counts as failed; always done in first
budget = 0         # seconds after which no new cell starts; 0 = no limit
device = 'auto'    # 'auto' (cuda if there is one), 'cpu', 'cuda' or 'cuda:1'
threads = 0        # CPU threads; 0 = torch's choice
out = ''           # JSON file; the table goes beside it as .md; '' = out/bench/DEVICE/SUITE.json
append = False     # continue `out` if it has the same commit, device and dtype; always in first
# fmt: on
# -----------------------------------------------------------------------------
RANGES = {
    'suite': ['train', 'decode', 'sokoban', 'first'],
    'arch': ['convlstm', 'convglu'],
    **dict.fromkeys(('rounds', 'n_envs', 'unroll'), (1, math.inf)),
    **dict.fromkeys(('n_embd', 'block_size', 'threads', 'seconds', 'budget'), (0, math.inf)),
}
RENAMED = {'paths': 'modes'}  # old name: new name
HERE = os.path.dirname(os.path.abspath(__file__))

# Modes of each suite. _recompute: the update runs a second forward (train_sokoban.py's reuse).
MODES = {
    'train': [
        'plain',
        'fast',
        'compiled',
        'nonrecurrent',
        'nonrecurrent_compiled',
        'lstm',
        'transformer',
    ],
    'decode': ['fast', 'compiled', 'nonrecurrent', 'nonrecurrent_compiled'],
    'sokoban': [
        'plain',
        'fast',
        'compiled',
        'plain_recompute',
        'fast_recompute',
        'compiled_recompute',
    ],
}
OLD_MODES = {  # old name: new name
    'gpt': 'nonrecurrent',
    'gpt_compiled': 'nonrecurrent_compiled',
    'ring': 'fast',
    'ring_compiled': 'compiled',
    'gpt_ring': 'nonrecurrent',
    'gpt_ring_compiled': 'nonrecurrent_compiled',
}
# Modes that are measured by default.
CPU_MODES = {
    'train': ['plain', 'fast'],
    'decode': ['fast'],
    'sokoban': ['plain', 'fast', 'compiled'],
}
GPU_MODES = {'train': ['compiled'], 'decode': ['fast', 'compiled'], 'sokoban': ['fast', 'compiled']}
# On a GPU at E = 1, where the paper has the non-recurrent Transformer, and no other in training.
ONE_EXPERT_MODES = {
    'train': ['nonrecurrent_compiled'],
    'decode': MODES['decode'],
    'sokoban': GPU_MODES['sokoban'],
}

# Default cells: all combinations of (L, E), C, and B or tokens per update.
SHAPES = [(1, 16), (2, 8), (4, 4), (8, 2), (16, 1)]
CONTEXTS = {'train': [32, 64, 128, 256, 1024, 2048], 'decode': [128, 2048]}
GPU_CELLS = {
    'train': (SHAPES, CONTEXTS['train'], [131072, 262144]),
    'decode': (SHAPES, CONTEXTS['decode'], [16]),
}
CPU_CELLS = {'train': ([(2, 8)], [128], [4096]), 'decode': ([(2, 8)], [128], [16])}
AGENTS = [(1, 1, 128), (4, 1, 64)]  # (L, E, d)

# Suite first: these cells in this order, then the other cells of the suites.
GPU_FIRST = [
    *(('train', *cell, 131072) for cell in [(2, 8, 64), (1, 16, 64), (4, 4, 128), (8, 2, 256)]),
    *(('train', *cell, 131072) for cell in [(2, 8, 2048), (16, 1, 256)]),
    *[('decode', 2, 8), ('decode', 1, 16), ('sokoban',), ('decode',)],
    *(('train', *shape, C, 131072) for C in (256, 2048, 32, 128, 64, 1024) for shape in SHAPES),
    ('train',),
]
CPU_FIRST = [('train', 2, 8, 32, 1024), ('decode', 2, 8), ('sokoban', 1, 1, 32)]
GPU_TESTS = os.path.join(HERE, 'tests', 'test_gpu.py')
LIMITS = {'smoke': 180, 'train': 240, 'tests': 400}  # seconds per step; other steps have 150
# Seconds of budget that must be left to start a step. A step that the budget cuts off runs again.
LEAST = 60

# The paper's tables (4 H100; tokens/s of one of them, ms per token of all four), and modeled
# targets for one H100.
SPEED = os.path.join(HERE, 'results', 'paper', 'speed.csv')
PAPER_GPUS = 4
TOKENIZERS = {vocab_size: name for name, vocab_size in VOCAB.items()}
LATE = 'failed: over its time limit'  # status of a variant
# A relative difference of gradients or logits that rounding to bfloat16 does not explain.
TOLERANCE = 0.1


class Metric(NamedTuple):
    """The quantity that a suite measures."""

    name: str
    unit: str
    digits: int  # printed after the decimal point
    sign: int  # 1: more is better; -1: less is better


METRICS = {
    'train': Metric('tokens_per_s', 'tokens/s', 0, 1),
    'decode': Metric('ms_per_token', 'ms/token', 3, -1),
    'sokoban': Metric('env_steps_per_s', 'env steps/s', 0, 1),
}


# ---- cells and rows ----
# A row is a dict: the suite, cell and mode, sizes by their shape letters, and later the results.


def find_cells(config: dict) -> list[tuple]:
    """Return (suite, L, E, ...) of every cell to measure. Cells that lack their last numbers are
    completed from the default cells. Ends the script for an invalid cell."""
    on_cpu = config['device'] == 'cpu'
    suite = config['suite']
    cells = config['cells']
    if cells and not all(isinstance(cell, tuple) for cell in cells):
        cells = (cells,)  # a single cell
    if suite == 'first':
        cells = cells or (CPU_FIRST if on_cpu else GPU_FIRST)
    else:
        cells = [(suite, *cell) for cell in cells] or [(suite,)]
    found = []
    for name, *sizes in cells:
        lengths = (0, 3) if name == 'sokoban' else (0, 2, 3, 4)
        fits = len(sizes) in lengths and all(type(n) is int and n > 0 for n in sizes)
        if name not in MODES or not fits:
            raise Mistake(
                f'cells: {(name, *sizes)}: expected (L, E, C, tokens per update), for decode '
                '(L, E, C, B), or the first two or three of it; for sokoban (L, E, d); for first '
                "a suite's name and such a cell"
            )
        if name == 'sokoban':
            found += [(name, *cell) for cell in ([sizes] if sizes else AGENTS)]
            continue
        shapes, contexts, numbers = (CPU_CELLS if on_cpu else GPU_CELLS)[name]
        if sizes:
            shapes = [sizes[:2]]
        contexts = sizes[2:3] or contexts
        numbers = sizes[3:] or numbers  # B, or tokens per update
        found += [
            (name, *shape, C, n) for shape, C, n in itertools.product(shapes, contexts, numbers)
        ]
    return list(dict.fromkeys(found))  # without duplicates


def find_modes(config: dict, suite: str, E: int) -> list[str]:
    """Return the modes in which to measure a cell of this suite with E experts."""
    if config['device'] == 'cpu':
        default = CPU_MODES[suite]
    else:
        default = (ONE_EXPERT_MODES if E == 1 else GPU_MODES)[suite]
    modes = [mode.strip() for mode in config['modes'].split(',') if mode.strip()]
    modes = list(dict.fromkeys(OLD_MODES.get(mode, mode) for mode in modes))
    known = MODES[suite]
    if config['suite'] == 'first':  # a mode applies to those suites that have it
        known = list(dict.fromkeys(mode for names in MODES.values() for mode in names))
    if not set(modes) <= set(known):
        raise Mistake(f'modes = {config["modes"]!r}: expected some of {", ".join(known)}')
    return [mode for mode in modes if mode in MODES[suite]] or default


def make_row(config: dict, suite: str, sizes: tuple, mode: str) -> dict:
    """Return the row of a cell in one mode. Raises ValueError if its sizes do not fit together."""
    row = {
        'suite': suite,
        'cell': str(tuple(sizes)).replace(' ', ''),
        'mode': mode,
        'dtype': config['dtype'],
        'gpus': config['world'] if suite == 'train' else 1,
    }
    if suite == 'sokoban':
        L, E, D = sizes
        AgentConfig(
            arch=config['arch'], recurrent=config['recurrent'], n_layer=L, n_expert=E, n_embd=D
        )
        return {
            **row,
            'model': f'{variant_of(config["recurrent"])} {config["arch"]}',
            'L': L,
            'E': E,
            'D': D,
            'B': config['n_envs'],
            'T': config['unroll'],
        }
    if suite == 'decode':
        L, E, C, B = sizes
        T = C
    else:
        L, E, C, tokens = sizes
        T = config['block_size'] or C
        if tokens % (PAPER_GPUS * T):
            raise Mistake(
                f'cells: {tokens} tokens: must be a multiple of {PAPER_GPUS} GPUs x {T} tokens'
            )
        B = tokens // (PAPER_GPUS * T)
        row['tokens_per_update'] = tokens
    model = 'lstm' if mode == 'lstm' else 'recurrent'
    if mode.startswith(('nonrecurrent', 'transformer')):
        model = 'non-recurrent'
        L, E = L * E, 1
    D, V = (256, 256) if config['device'] == 'cpu' else (768, 50304)
    row = {
        **row,
        'model': model,
        'L': L,
        'E': E,
        'C': C,
        'B': B,
        'T': T,
        'D': config['n_embd'] or D,
        'V': V,
    }
    model_config(row)  # raises ValueError for sizes that do not fit together
    return row


def model_config(row: dict) -> ModelConfig:
    """Return the sizes of a row's language model. Raises ValueError if they do not fit together."""
    return ModelConfig(
        vocab_size=row['V'],
        n_layer=row['L'],
        n_expert=row['E'],
        n_embd=row['D'],
        window=row['C'],
        block_size=row['T'],
    )


def plan_steps(config: dict) -> dict[str, dict[str, dict]]:
    """Return {step: {label: row}} in the order of measurement. The rows of a step are measured
    together: a cell in all its modes, yardsticks, or tests."""
    cells = {}
    for suite, *sizes in find_cells(config):
        name = f'{suite} {",".join(map(str, sizes))}'
        modes = find_modes(config, suite, E=sizes[1])
        cells[name] = {f'{name} {mode}': make_row(config, suite, sizes, mode) for mode in modes}
    first = config['suite'] == 'first'
    on_cpu = config['device'] == 'cpu'
    yardsticks = {'suite': 'yardsticks', 'conv': config['suite'] in ('sokoban', 'first')}
    if on_cpu and not first:
        return {name: {'yardsticks': yardsticks, **rows} for name, rows in cells.items()}
    steps = {'yardsticks': {'yardsticks': yardsticks}}
    if first and not on_cpu:
        steps['smoke'] = {'smoke': {'suite': 'tests', 'marks': 'gpu and smoke'}}
    steps.update(cells)
    if first and not on_cpu:
        steps['tests'] = {'tests': {'suite': 'tests', 'marks': 'gpu and not smoke'}}
    return steps


# ---- variants ----
# A function make_...(row, config) sets a variant up. It returns ({part: function to time}, entries
# of its record). Two of these are special: 'work', the units of work per call, and 'check', a
# function that returns {name: (tensor, reference)} to compare.


def load_script(path: str) -> ModuleType:
    """Import a trainer by its path."""
    folder, name = os.path.split(os.path.abspath(path))
    sys.path.insert(0, folder)
    return importlib.import_module(name.removesuffix('.py'))


def start_run(trainer: ModuleType, row: dict, config: dict, **settings: object) -> object:
    """Return the run of a trainer with these settings, before its first update."""
    settings = {
        **settings,
        'n_layer': row['L'],
        'n_expert': row['E'],
        'n_embd': row['D'],
        'dtype': row['dtype'],
        'device': config['device'],
        'threads': config['threads'] or torch.get_num_threads(),
        'mode': 'plain' if row['mode'].startswith('plain') else 'fast',
    }
    argv = [f'--{name}={value}' for name, value in settings.items()]
    return trainer.make_run(configure(vars(trainer), argv, quiet=True))


def use_reference_mode(model: torch.nn.Module, compiled: bool) -> None:
    """Switch to a slower mode to compare with: without compilation and Triton forms if the variant
    is compiled, else plain."""
    kernels.fused.enabled = False
    model.forms = frozenset()
    model.graphs = False
    model.config.mode = 'fast' if compiled else 'plain'


def make_lm_update(row: dict, config: dict) -> tuple[dict[str, Callable], dict]:
    """Return the part 'update', a whole update of train_lm.py on random tokens."""
    train_lm = load_script(config['script'] or os.path.join(HERE, 'train_lm.py'))
    mode, tokens = row['mode'], row['gpus'] * row['B'] * row['T']
    compiled = mode.endswith(('compiled', 'transformer'))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        run = start_run(
            train_lm,
            row,
            config,
            arch=mode if mode in baselines.LEARNING_RATE else 'experts',
            recurrent=row['model'] != 'non-recurrent',
            window=row['C'],
            block_size=row['T'],
            tokens_per_step=tokens,
            tokenizer=TOKENIZERS[row['V']],
            data_dir=config['data_dir'],
            val_tokens=64 * row['gpus'],
            val_streams=row['gpus'],
            max_iters=10**6,
            compile=compiled,
        )
        train_lm.prepare(run)
    if compiled and not kernels.fused.enabled:
        raise RuntimeError('torch.compile does not work here')

    def update() -> None:
        loss, _, _ = train_lm.train_update(run, train_lm.lr_at(run.step), False)
        run.step += 1
        if not math.isfinite(loss):  # then the update was cheaper, without the optimizer
            raise RuntimeError('the loss is not finite')

    def gradients(state: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return loss and gradients of the current micro-batch, as train_update computes them."""
        x, y, carried = run.batch
        run.gradients.zero()
        for tensor, source in zip(carried, state, strict=True):
            tensor.copy_(source)
        graphs = run.graphs if run.capture_chunk else None
        kernels.graphed(graphs, 'chunk', train_lm.forward_backward, run, x, y, carried)
        found = {name: p.grad.clone() for name, p in run.model.named_parameters()}
        return {**found, 'loss': run.gradients.extra[0].clone()}

    def check() -> dict[str, tuple]:
        state = [x.clone() for x in run.batch[2]]
        found = gradients(state)
        use_reference_mode(run.model, compiled)
        run.graphs = None
        release_blocks()
        gc.collect()
        if config['device'] != 'cpu':
            torch.cuda.empty_cache()  # the reference needs the memory of the graphs
        reference = gradients(state)
        return {name: (found[name], reference[name]) for name in found}

    entries = {
        'work': tokens,
        'params': run.model.num_params()['total'],
        'notes': printed.getvalue().splitlines(),  # Triton forms, rows per micro-batch
        'check': check,
    }
    return {'update': update}, entries


def make_token(row: dict, config: dict) -> tuple[dict[str, Callable], dict]:
    """Return the part 'token': one greedy token for each of B streams (decode.Decoder), with full
    caches."""
    device = config['device']
    B = row['B']
    amp = getattr(torch, row['dtype'])
    compiled = row['mode'].endswith('compiled')
    autocast = torch.autocast(torch.device(device).type, amp, enabled=amp == torch.bfloat16)
    torch.manual_seed(0)
    # Random weights, because a processor may be faster at zeros.
    model = randomize(build_model(model_config(row), row['model'] == 'recurrent')).to(device)
    with autocast:
        empty = model.init_state(B)
    full = torch.full_like(empty.count, row['C'])
    state = State(*(torch.randn_like(x) for x in empty[:3]), full)
    kernels.fused.enabled = compiled
    decoder = Decoder(model, B, amp=amp)
    decoder.load(state)
    decoder.step(torch.randint(row['V'], (B,), device=device))

    @torch.no_grad()
    def check() -> dict[str, tuple]:
        """Compare the logits of four tokens with those of the model's step, uncompiled."""
        decoder.load(state)
        after = state
        pairs = {}
        for i, tokens in enumerate(torch.randint(row['V'], (4, B), device=device)):
            kernels.fused.enabled = compiled
            decoder.step(tokens)
            kernels.fused.enabled = False
            with autocast:
                logits, after = model.step(tokens, after)
            pairs[f'logits of token {i}'] = decoder.logits.clone(), logits
        return pairs

    return {'token': decoder.step}, {'notes': decoder.lines, 'check': check}


def make_agent_update(row: dict, config: dict) -> tuple[dict[str, Callable], dict]:
    """Return the part 'update', a whole update of train_sokoban.py on generated levels, with the
    counting of episodes."""
    train_sokoban = load_script(config['script'] or os.path.join(HERE, 'train_sokoban.py'))
    mode, _, recompute = row['mode'].partition('_')
    with contextlib.redirect_stdout(io.StringIO()):
        run = start_run(
            train_sokoban,
            row,
            config,
            arch=config['arch'],
            recurrent=config['recurrent'],
            n_envs=config['n_envs'],
            unroll=config['unroll'],
            reuse=not recompute,
            compile=mode == 'compiled',
            split='generated',
            eval_split='generated',
            eval_games=1,
            n_levels=5000,
        )
        train_sokoban.warm_up(run)
    if mode == 'compiled' and not kernels.fused.enabled:
        raise RuntimeError('torch.compile does not work here')

    def update() -> None:
        stats, episodes, _ = train_sokoban.update(run, False)
        train_sokoban.keep_for_log(run, episodes, stats)

    def gradients(actions: torch.Tensor | None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the actions (T, B) of a rollout, and its gradients, loss and returns. actions:
        those to take, (T, B); None: sampled ones."""
        update_gradients = train_sokoban.rollout_and_backward
        if actions is None:
            batch = kernels.graphed(run.graphs, 'rollout and backward', update_gradients, run)
        else:
            batch = update_gradients(run, actions)
        named = run.model.named_parameters()
        found = {name: p.grad.clone() for name, p in named if p.numel()}
        found['loss'] = run.gradients.extra[0].clone()
        found['return'] = batch['return'].clone()
        return batch['action'].clone(), found

    def check() -> dict[str, tuple]:
        """Compare with the plain mode on the same actions. Rounding could change sampled ones."""
        start = copy.deepcopy((run.env, run.state, run.count))
        actions, found = gradients(None)
        run.env, run.state, run.count = start
        use_reference_mode(run.model, compiled=False)
        _, reference = gradients(actions)
        return {name: (found[name], reference[name]) for name in found}

    steps = config['n_envs'] * config['unroll']
    macs = run.model.macs_per_step()
    entries = {
        'work': steps,
        'params': run.model.num_params()['total'],
        'macs_per_step': macs,
        # of the core: one forward and a backward of twice that, and a second forward to recompute
        'macs': (4 if recompute else 3) * macs['executed'] * steps,
        'check': check,
    }
    return {'update': update}, entries


def make_yardsticks(row: dict, config: dict) -> tuple[dict[str, Callable], dict]:
    """Return the parts 'matmul' (work in FLOPs), 'copy' (bytes read and written, more than a cache
    holds) and 'conv' (multiply-adds, with enough boards to fill the device)."""
    device = config['device']
    dtype = getattr(torch, config['dtype'])
    n, size = (2048, 2**28) if device == 'cpu' else (8192, 2**30)
    a, b = torch.randn(2, n, n, device=device, dtype=dtype)
    source, target = torch.ones(2, size, dtype=torch.uint8, device=device)
    parts = {'matmul': lambda: a @ b, 'copy': lambda: target.copy_(source)}
    work = {'matmul': 2 * n**3, 'copy': 2 * size}
    if row['conv']:
        keep_memory()
        torch.backends.cudnn.benchmark = True  # as train_sokoban.py sets it

        def random(*shape: int) -> torch.Tensor:
            noise = torch.randn(shape, device=device, dtype=dtype)
            return noise.to(memory_format=torch.channels_last)

        x = random(640, 128, 10, 10).requires_grad_()
        weight = random(512, 128, 3, 3).requires_grad_()
        dy = random(640, 512, 10, 10)
        parts['conv'] = lambda: torch.autograd.grad(F.conv2d(x, weight, padding=1), (x, weight), dy)
        work['conv'] = 3 * 640 * 100 * 9 * 128 * 512  # one forward and two products backward
    return parts, {'work': work}


def make_tests(row: dict, config: dict) -> tuple[dict[str, Callable], dict]:
    """Run the tests of GPU_TESTS with the row's marks. Raises RuntimeError, naming those that
    fail."""
    import pytest

    class Failures:
        names = []

        def pytest_runtest_logreport(self, report: object) -> None:
            if report.failed:
                self.names.append(report.nodeid.rpartition('::')[2])

    options = '-v --tb=short --show-capture=no --noconftest -o addopts= -p no:cacheprovider'
    code = pytest.main([*options.split(), '-m', row['marks'], GPU_TESTS], [Failures()])
    if code == pytest.ExitCode.NO_TESTS_COLLECTED:
        raise RuntimeError(f'no test has the marks {row["marks"]!r}')
    if code:
        names = ', '.join(Failures.names)
        raise RuntimeError(f'{len(Failures.names)} tests: {names} (pytest {int(code)})')
    return {}, {}


MAKERS = {
    'train': make_lm_update,
    'decode': make_token,
    'sokoban': make_agent_update,
    'yardsticks': make_yardsticks,
    'tests': make_tests,
}


# ---- the process of a variant ----


def timed(run: Callable, repeats: int, device: str) -> float:
    """Return the mean seconds of `repeats` calls of run(), waiting for the device before and after.

    torch.utils.benchmark.Timer would run slow updates twice more per measurement, to warm up, and
    could not repeat them equally often on all ranks."""
    synchronize = torch.cuda.synchronize if device != 'cpu' else lambda: None
    synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    synchronize()
    return (time.perf_counter() - start) / repeats


def measure_round(run: Callable, config: dict) -> float:
    """Return the mean seconds of run(), repeated for config['seconds'], equally often on all
    ranks."""
    # This call also warms up caches and clocks after the turns of other variants.
    once = torch.tensor(timed(run, 1, config['device']))
    if dist.is_initialized():
        dist.all_reduce(once, dist.ReduceOp.MAX)
    return timed(run, max(1, math.ceil(config['seconds'] / once.item())), config['device'])


def compare(pairs: dict[str, tuple]) -> tuple[float, str]:
    """Return the largest relative difference in {name: (tensor, reference)}, and its name. All
    vectors and scalars except the loss count as one tensor, because a single number may be nothing
    but rounding."""
    groups = {}
    for name, (tensor, reference) in pairs.items():
        small = reference.dim() <= 1 and name != 'loss'
        groups.setdefault('vectors' if small else name, []).append((tensor, reference))
    differences = {}
    for name, group in groups.items():
        found = torch.cat([tensor.double().flatten() for tensor, _ in group])
        reference = torch.cat([reference.double().flatten() for _, reference in group])
        difference = (found - reference).norm() / reference.norm().clamp(min=1e-30)
        differences[name] = math.inf if difference.isnan() else difference.item()
    worst = max(differences, key=differences.get)
    return differences[worst], worst


def describe_error(error: Exception) -> str:
    """Return the status of a variant that has raised an error."""
    return 'OOM' if out_of_memory(error) else f'failed: {first_line(error)}'


def take_turns(row: dict, config: dict) -> Iterator[dict]:
    """Set a variant up and yield the answer to each of its turns: the first runs, with compilation;
    `rounds` measurements; the check. An answer holds entries of the variant's record."""
    device = config['device']
    start = time.perf_counter()
    parts, entries = MAKERS[row['suite']](row, config)
    check = entries.pop('check', None)
    if device != 'cpu':
        torch.cuda.reset_peak_memory_stats()  # the set-up has tried sizes of micro-batches
    # On a GPU: three eager calls, the capture of CUDA graphs, and a replay.
    for _ in range(1 if device == 'cpu' else 5):
        for run in parts.values():
            timed(run, 1, device)
    yield {**entries, 'first_run_s': time.perf_counter() - start}
    seconds = {part: [] for part in parts}
    for _ in range(config['rounds'] if parts else 0):
        for part, run in parts.items():
            seconds[part].append(measure_round(run, config))
        memory = 0 if device == 'cpu' else torch.cuda.max_memory_allocated()
        yield {'seconds': seconds, 'memory_bytes': memory}
    if check and config['check']:
        try:
            difference, name = compare(check())
        except (RuntimeError, MemoryError) as error:  # the reference may need more memory
            yield {'check': describe_error(error)}
        else:
            answer = {'check': f'{difference:.2%}'}
            if difference >= TOLERANCE:
                answer['status'] = f'differs by {difference:.1%} in {name}'
            yield answer


def set_ranks(rank: int, world: int, port: int) -> None:
    """Set the environment as torchrun would for this rank of a variant; with world = 1, remove what
    torchrun has set for this script."""
    for name in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE'):
        os.environ.pop(name, None)
    os.environ.pop('TORCHELASTIC_USE_AGENT_STORE', None)  # every variant has its own store
    if world > 1:
        os.environ['RANK'] = os.environ['LOCAL_RANK'] = str(rank)
        os.environ['WORLD_SIZE'] = os.environ['LOCAL_WORLD_SIZE'] = str(world)
        os.environ['MASTER_ADDR'] = 'localhost'
        os.environ['MASTER_PORT'] = str(port)


def serve(
    pipe: multiprocessing.connection.Connection, row: dict, config: dict, rank: int, port: int
) -> None:
    """Run a variant in its own process: answer each message with the result of the next turn, and
    with None after the last."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # after a ctrl-C the parent ends this process
    os.setsid()  # so that `kill` ends the children of this process too
    set_ranks(rank, row.get('gpus', 1), port)
    if config['device'] != 'cpu':
        torch.cuda.set_device(pick_device(config['device']))
        torch.set_float32_matmul_precision('high')  # as common.join_ranks sets it
    if config['threads']:
        torch.set_num_threads(config['threads'])
    turns = take_turns(row, config)
    while True:
        pipe.recv()
        try:
            pipe.send(next(turns, None))
        except (RuntimeError, MemoryError, ValueError, ImportError) as error:
            pipe.send({'status': describe_error(error)})


# ---- measuring: variants take turns ----


class Worker(NamedTuple):
    """One rank of a variant."""

    process: multiprocessing.Process
    pipe: multiprocessing.connection.Connection


def start_workers(row: dict, config: dict) -> list[Worker]:
    """Start the processes of a variant, one per rank."""
    context = multiprocessing.get_context('spawn')
    with socket.socket() as free:  # a port that no other program uses
        free.bind(('localhost', 0))
        port = free.getsockname()[1]
    workers = []
    for rank in range(row.get('gpus', 1)):
        pipe, far_end = context.Pipe()
        process = context.Process(
            target=serve, args=(far_end, row, config, rank, port), daemon=True
        )
        process.start()
        far_end.close()
        workers.append(Worker(process, pipe))
    return workers


def kill(workers: list[Worker]) -> None:
    """End a variant's processes and their children, and wait until their memory is free."""
    for process, _ in workers:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
    for process, _ in workers:
        process.join()


def ask(workers: list[Worker], deadline: float) -> dict | None:
    """Return a variant's answer to its next turn, or None after its last. An answer with 'status'
    ends the variant: a rank has failed, or has not answered before the deadline."""
    pending = [pipe for _, pipe in workers]
    answers = {}
    try:
        for pipe in pending:
            pipe.send(True)
        while pending:
            timeout = max(0.0, min(10.0, deadline - time.perf_counter()))
            ready = multiprocessing.connection.wait(pending, timeout)
            for pipe in ready:
                answers[pipe] = answer = pipe.recv()
                if answer and 'status' in answer:
                    return answer  # at once, because other ranks may wait for this one
                pending.remove(pipe)
            if not ready:
                print('    ...', flush=True)  # a first run compiles
                if time.perf_counter() > deadline:
                    return {'status': LATE}
        return answers[workers[0].pipe]
    except (EOFError, OSError):  # a process has ended
        ended = multiprocessing.connection.wait([process.sentinel for process, _ in workers])
        process = next(process for process, _ in workers if process.sentinel in ended)
        process.join()
        # Linux kills a process when memory runs out.
        killed = process.exitcode == -signal.SIGKILL
        return {'status': 'OOM' if killed else f'failed: its process ended: {process.exitcode}'}


def measure(rows: dict[str, dict], config: dict, deadline: float = math.inf) -> dict[str, dict]:
    """Measure the rows of a step and return {label: record}. A record has 'status', 'first_run_s',
    'memory_bytes', 'seconds' {part: one per round}, 'check', and the entries from make_...().

    On a CPU the variants take turns; on a GPU they run one after the other."""
    records = {label: {'status': 'ok', 'seconds': {}} for label in rows}
    queue = list(rows)
    variants = {}  # label: its processes
    try:
        while queue:
            label = queue.pop(0)
            if label not in variants:
                variants[label] = start_workers(rows[label], config)
            answer = ask(variants[label], deadline)
            if answer is None or 'status' in answer:
                kill(variants.pop(label))
            else:
                next_turn = len(queue) if config['device'] == 'cpu' else 0
                queue.insert(next_turn, label)
            if answer is None:
                continue
            records[label].update(answer)
            times = [f'{part} {s[-1]:.4g} s' for part, s in answer.get('seconds', {}).items()]
            done = answer.get('status') or answer.get('check') or 'first run done'
            print(f'{label}: {", ".join(times) or done}', flush=True)
    finally:
        for workers in variants.values():
            kill(workers)
    return records


# ---- the roofline, the paper ----


def roofline_seconds(row: dict, rate: float, bandwidth: float) -> float:
    """Return the least possible seconds for one token of all B streams together. In training they
    are the mean over a chunk of T tokens. Matrix products run at `rate` FLOP/s, memory at
    `bandwidth` bytes/s. Nothing overlaps, except that a product overlaps with reading its weights:

        product  = max(2 n B / rate, n size / bandwidth)   for the n weights of a layer
        forward  = L (product + keys and values of W slots, read once)
        backward = L (the same + dk, dv in fp32, read and written for the slots in the window)
        weights  = L 2 n B / rate                          their gradients, many tokens at once
        head     = 3 x 2 D V B / rate                      with its gradients

    Decoding costs the forward, and the head as one more product. The non-recurrent model trains on
    whole sequences: everything is a dense product, with six attention products over (T + 1) / 2
    slots. Activations, norms and the optimizer do not count."""
    c = model_config(row)
    B = row['B']
    size = 2 if row['dtype'] == 'bfloat16' else 4  # bytes per number
    L = c.n_layer
    E = c.n_expert
    D = c.n_embd
    K = c.head_dim
    W = c.window
    T = c.block_size
    is_recurrent = row['model'] == 'recurrent'
    heads = c.n_kv_head * (1 if is_recurrent and c.share_kv else E)  # of the cache
    n = E * (2 * D * D + 8 * D * D) + 2 * D * heads * K
    weights = L * 2 * n * B / rate
    head = 2 * D * c.vocab_size * B / rate
    forward = max(2 * n * B / rate, n * size / bandwidth)
    forward += W * 2 * heads * K * size * B / bandwidth
    if row['suite'] == 'decode':
        return L * forward + max(head, D * c.vocab_size * size / bandwidth)
    if not is_recurrent:
        return 2 * L * (2 * n + 3 * (T + 1) * E * D) * B / rate + weights + 3 * head
    slots = sum(min(t + 1, W) for t in range(T)) / T
    backward = forward + slots * 2 * heads * K * 4 * 2 * B / bandwidth
    return L * (forward + backward) + weights + 3 * head


@functools.cache
def read_speeds() -> dict[tuple, str]:
    """Return the numbers in SPEED by (source, suite, model, L, E, C, n)."""
    columns = ('source', 'suite', 'model', 'L', 'E', 'C', 'n')
    return {tuple(line[name] for name in columns): line['figure'] for line in read_csv(SPEED)}


def published(row: dict) -> dict[str, float | str]:
    """Return the 'paper' number of a row and its modeled 'target', those that SPEED has."""
    if row['suite'] != 'sokoban' and (row['D'], row['V'], row['T']) != (768, 50304, row['C']):
        return {}
    model = row['model'].removeprefix('recurrent ')  # of agents, such as 'recurrent convlstm'
    if model == 'non-recurrent':
        model = 'transformer'  # as the paper calls it
    n = row.get('tokens_per_update', row['B'])
    sizes = (row['L'], row['E'], row.get('C', row['D']), n)
    key = [str(x) for x in (row['suite'], model, *sizes)]
    found = {source: read_speeds().get((source, *key)) for source in ('paper', 'target')}
    return {source: x if x == 'OOM' else float(x) for source, x in found.items() if x}


def add_figures(row: dict, record: dict, rates: dict[str, float]) -> dict:
    """Return a row with its record, its results, and their ratios to the published numbers and to
    the rates of the yardsticks."""
    row = {**row, **record, **published(row)}
    if not row['seconds']:
        return {**row, 'figure': row['status']}
    (times,) = row['seconds'].values()  # a row has one part
    metric = METRICS[row['suite']]
    if metric.sign > 0:
        row[metric.name] = [row['work'] / row['gpus'] / t for t in times]
    else:
        row[metric.name] = [1000 * t for t in times]
    value = statistics.median(row[metric.name])
    for source in ('paper', 'target'):
        if isinstance(row.get(source), float):
            row[f'over_{source}'] = (value / row[source]) ** metric.sign
    if row['gpus'] > 1:
        row['node_tokens_per_s'] = value * row['gpus']
        if row['gpus'] == PAPER_GPUS and isinstance(row.get('paper'), float):
            row['paper_node'] = row['paper'] * PAPER_GPUS
    if row['suite'] == 'sokoban':
        if 'conv' in rates:
            row['share_of_conv'] = row['macs'] / row['work'] * value / rates['conv']
    elif rates and row['model'] != 'lstm':
        least = roofline_seconds(row, rates['matmul'], rates['copy'])
        row['share_of_roofline'] = least * (value / row['B'] if metric.sign > 0 else 1000 / value)
    figure = show(row[metric.name], metric.unit, metric.digits)
    return {**row, 'figure': figure if row['status'] == 'ok' else row['status']}


# ---- reports: JSON with all that is needed to repeat a measurement, and a table ----

# Two rows that are equal in these keys are the same; the newer one replaces the older one.
ROW_KEYS = ('suite', 'cell', 'mode', 'model', 'D', 'V', 'B', 'T', 'gpus')
# A report can only be continued if it is equal in these keys.
REPORT_KEYS = ('suite', 'device', 'dtype', 'torch', 'commit', 'threads', 'script', 'world')
# A speed-up compares rows that are equal in these keys.
CELL_KEYS = ('suite', 'cell', 'D')

COLUMNS = {  # key of a row: heading, format
    'tokens_per_update': ('tokens per update of 4 GPUs', '{:,}'),
    **{name: (name, '{}') for name in 'LEDCBT'},
    'mode': ('mode', '{}'),
    'figure': ('median (min..max)', '{}'),
    'ratio': ('speed-up', '{:.2f}x'),
    'share_of_roofline': ('of roofline (modeled)', '{:.1%}'),
    'share_of_conv': ('of conv rate', '{:.1%}'),
    'paper': ('paper: tokens/s per GPU, or ms', '{:,.6g}'),
    'over_paper': ('over paper', '{:.2f}x'),
    'node_tokens_per_s': ('all GPUs, tokens/s', '{:,.0f}'),
    'paper_node': ('paper: 4 GPUs, tokens/s', '{:,.0f}'),
    'target': ('target for an H100 (modeled)', '{:,.6g}'),
    'over_target': ('over target', '{:.2f}x'),
    'check': ('difference from reference', '{}'),
    'first_run_s': ('first run, s', '{:.1f}'),
    'memory_bytes': ('memory, bytes', '{:,}'),
}


def command_line(world: int) -> list[str]:
    """Return the command of this process, started by torchrun if there are several ranks."""
    torchrun = ['torchrun', '--standalone', f'--nproc_per_node={world}']
    return [*(torchrun if world > 1 else ['python']), *sys.argv]


def describe_machine(config: dict) -> dict:
    """Return the first entries of a report: the command, the machine and the versions."""
    entries = {
        'suite': config['suite'],
        'command': shlex.join(command_line(config['world'])),
        'config': config,
        'device': device_name(config['device']),
        'world': config['world'],
        'dtype': config['dtype'],
        'commit': commit(),
        'script': config['script'],
        'threads': torch.get_num_threads(),
        'torch': torch.__version__,
        'python': platform.python_version(),
        'date': datetime.datetime.now().astimezone().isoformat(timespec='seconds'),
    }
    if config['device'] != 'cpu':
        has_triton = kernels.triton_module() is not None
        entries['triton'] = sys.modules['triton'].__version__ if has_triton else None
        entries['cuda'] = torch.version.cuda
        entries['cudnn'] = torch.backends.cudnn.version()
        entries['card'] = str(torch.cuda.get_device_properties(config['device']))
    return entries


def select(row: dict, names: tuple[str, ...]) -> tuple:
    """Return the values of a row by name, None where it has none."""
    return tuple(row.get(name) for name in names)


def show(values: list[float], unit: str, digits: int = 0) -> str:
    """Return 'median (min..max) unit'."""
    numbers = (statistics.median(values), min(values), max(values))
    median, low, high = (f'{number:,.{digits}f}' for number in numbers)
    return f'{median} ({low}..{high}) {unit}'


def results_table(rows: list[dict]) -> str:
    """Return the table of rows, each with its speed-up over the first row of its cell. Columns
    without any value are left out."""
    first = {}  # values of the first rows, by cell
    columns = []
    for row in rows:
        if row['status'] == 'ok':
            metric = METRICS[row['suite']]
            value = statistics.median(row[metric.name])
            base = first.setdefault(select(row, CELL_KEYS), value)
            row['ratio'] = (value / base) ** metric.sign
    for name, (heading, form) in COLUMNS.items():
        values = [row.get(name, '') for row in rows]
        texts = [x.replace('|', '/') if isinstance(x, str) else form.format(x) for x in values]
        if any(values):
            columns.append([heading, *texts])
    return markdown(list(zip(*columns, strict=True))) if columns else ''


def write_report(report: dict, path: str) -> str:
    """Write the report as JSON to `path` and its table beside it as .md; return the table."""
    rates = []
    for name, values in report['yardsticks'].items():
        unit = 'GB/s' if name == 'copy' else 'GFLOP/s'
        scale = 2e-9 if name == 'conv' else 1e-9  # a multiply-add is two FLOPs
        rates.append(f'{name} {show([scale * value for value in values], unit)}')
    machine = '{device} x {world}, {threads} threads, torch {torch}, commit {commit}, {dtype}'
    text = f'{machine.format(**report)}; {", ".join(rates)}\n`{report["command"]}`\n\n'
    text += results_table(report['results'])
    bad = {name: step['status'] for name, step in report['steps'].items() if step['status'] != 'ok'}
    if bad:
        text += '\nFailed:\n' + ''.join(f'- {name}: {status}\n' for name, status in bad.items())
    write_json(report, path)
    write_text(text, os.path.splitext(path)[0] + '.md')
    return text


def open_report(config: dict, path: str, continues: bool) -> dict:
    """Return a new report or, if `continues` is true, the one at `path`. Ends the script if that is
    no report, or differs in one of REPORT_KEYS, or if there is one and `continues` is false."""
    report = describe_machine(config)
    if not os.path.exists(path):
        return {**report, 'steps': {}, 'yardsticks': {}, 'results': []}
    if not continues:
        advice = '--append=True measures what is missing; to measure again, choose another --out'
        raise Mistake(f'{path}: holds results: {advice}')
    old = read_json(path)
    kept = ('steps', 'yardsticks', 'results', 'command')
    if not set(kept) <= set(old):
        raise Mistake(f'{path}: not a report of bench.py: choose another --out')
    for name in REPORT_KEYS:
        if old.get(name) != report[name]:
            found = f'{name} = {old.get(name)!r}, now {report[name]!r}'
            raise Mistake(f'{path}: {found}: choose another --out')
    if report['command'] not in old['command'].split('; '):
        old['command'] += f'; {report["command"]}'
    return {**report, **{name: old[name] for name in kept}}


def add_records(report: dict, rows: dict[str, dict], records: dict[str, dict]) -> str:
    """Add the records of a step to the report. Return 'ok', or the reasons why not all are."""
    measured = records.get('yardsticks', {'seconds': {}})
    for part, times in measured['seconds'].items():
        rates = [measured['work'][part] / t for t in times]
        report['yardsticks'].setdefault(part, []).extend(rates)
    rates = {part: statistics.median(values) for part, values in report['yardsticks'].items()}
    new = [add_figures(row, records[label], rates) for label, row in rows.items() if 'L' in row]
    results = {select(row, ROW_KEYS): row for row in [*report['results'], *new]}
    report['results'] = list(results.values())
    bad = [record['status'] for record in records.values() if record['status'] != 'ok']
    bad += [f'not checked: {r["check"]}' for r in new if not r.get('check', '%').endswith('%')]
    return '; '.join(bad) or 'ok'


# ---- the run ----


def run_steps(config: dict, steps: dict[str, dict[str, dict]]) -> int:
    """Measure the steps that the report does not have yet, and write it after each. Return the exit
    status."""
    start = time.perf_counter()
    first = config['suite'] == 'first'
    budget = config['budget'] or math.inf
    continues = config['append'] or first
    folder = re.sub('[^a-z0-9]+', '-', device_name(config['device']).lower()).strip('-')
    path = config['out'] or os.path.join('out', 'bench', folder, f'{config["suite"]}.json')
    os.makedirs(os.path.dirname(path) or '.', exist_ok=True)
    report = open_report(config, path, continues)
    # A row that failed is done too: a second try would use up the budget of the rows after it.
    rows = [
        row
        for row in report['results']
        if 'check' in row or row['status'] != 'ok' or not config['check']
    ]
    have = {select(row, ROW_KEYS) for row in rows}

    def is_done(name: str) -> bool:
        """Return whether the report has this step. Yardsticks and tests have no sizes."""
        needed = {select(row, ROW_KEYS) for row in steps[name].values() if 'L' in row}
        return name in report['steps'] and needed <= have

    remaining = [name for name in steps if not is_done(name)]
    total = len(remaining)
    started = 0  # steps, without yardsticks; at least one runs, whatever the budget
    while remaining:
        name = remaining[0]
        now = time.perf_counter() - start
        if started and now > (budget - LEAST if first else budget):
            break
        limit = LIMITS.get(name.split()[0], 150) if first else math.inf
        is_cut = first and started > 0 and now + limit > budget
        deadline = budget if is_cut else now + limit
        records = measure(steps[name], config, start + deadline)
        if is_cut and any(record['status'] == LATE for record in records.values()):
            break  # the next run of this script gives the step its whole time
        if name != 'yardsticks':
            started += 1
        remaining.pop(0)
        status = add_records(report, steps[name], records)
        elapsed = time.perf_counter() - start
        report['steps'][name] = {'status': status, 'seconds': elapsed - now}
        write_report(report, path)
        done = total - len(remaining)
        eta = datetime.timedelta(seconds=int(elapsed / done * len(remaining)))
        print(f'{name}: {status}; {done} of {total} done, {elapsed:.0f} s, eta {eta}', flush=True)
    print(f'\n{write_report(report, path)}\n{path}')
    if remaining:
        command = command_line(config['world'])
        if not continues:
            command.append('--append=True')
        print(f'\nbudget = {budget} s is used up; steps left: {len(remaining)}. To continue:')
        print(shlex.join(command))
    return int(first and any(step['status'] != 'ok' for step in report['steps'].values()))


def write_random_shards(folder: str, rows: list[dict]) -> None:
    """Write shards of random tokens, to train and to validate the language models of these rows."""
    tokenizer = TOKENIZERS[rows[0]['V']]
    rng = np.random.default_rng(0)
    # A shard is long enough for some windows of every stream.
    size = 33 * max(row['gpus'] * row['B'] * (row['T'] + 1) for row in rows)
    for index, n in enumerate((1000 * rows[0]['gpus'], size)):
        write_shard(shard_path(folder, index), rng.integers(0, REAL_VOCAB[tokenizer], n))
    meta = open_meta(folder, tokenizer=tokenizer, source='bench.py')
    write_meta(folder, {**meta, 'finished': True})


def main() -> int:
    """Measure the suite and return the exit status."""
    config = configure(globals())
    if int(os.environ.get('RANK', '0')) > 0:
        return 0  # rank 0 starts the processes of all ranks
    world = int(os.environ.get('WORLD_SIZE', '1'))
    if world > 1 and suite != 'train':
        raise Mistake(f'suite = {suite!r}: runs on one GPU, without torchrun')
    if world != int(os.environ.get('LOCAL_WORLD_SIZE', world)):
        raise Mistake('torchrun --nnodes: bench.py measures one node')
    if script and not os.path.exists(script):
        raise Mistake(f'script = {script!r}: there is no such file')
    device_ = pick_device(device, threads)
    fp32 = device_ == 'cpu' and suite != 'sokoban'
    amp = pick_dtype(dtype or ('float32' if fp32 else 'auto'), device_)
    config.update(device=device_, dtype=str(amp).removeprefix('torch.'), world=world)
    config.update(check=check or suite == 'first')
    try:
        steps = plan_steps(config)
    except ValueError as error:  # sizes that do not fit together
        raise Mistake(error)
    rows = [row for step in steps.values() for row in step.values() if row['suite'] == 'train']
    with tempfile.TemporaryDirectory() as folder:
        if rows:
            write_random_shards(folder, rows)
        return run_steps({**config, 'data_dir': folder}, steps)


if __name__ == '__main__':
    run_script(main, 'interrupted: finished steps are written')

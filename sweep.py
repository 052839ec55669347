"""Run the experiments of the paper: every figure and every table is one command.

    python sweep.py                                   # the table: figure, runs, GPU hours, command
    python sweep.py --plan=sokoban-small              # a plan's runs: sizes, cost, state, command
    python sweep.py --plan=sokoban-small --run        # run what is not finished; again: resume
    python sweep.py --plan=sokoban-small --run --workers=4    # four runs at a time, also on one GPU
    python sweep.py --plan=lm-small --emit=slurm | sbatch      # an array job, one run per job
    python sweep.py --plan=sokoban-small --figure --table      # draw and list what has finished
    python sweep.py --plan=sokoban-small --table=solve         # solve rates of the best allocations
    python sweep.py --plan=lm-small --residual=shared --run    # the other residual rule
    python sweep.py --plan=lm-small --script=my_train.py --run # your copy of the trainer
    python sweep.py config/study_lm.py --run --figure --table  # a study for two CPU cores

A plan compares allocations (L layers, E experts per layer, width d) of one budget W per step. An
allocation has E = round(W / (L C(d))) experts, where C(d) is the cost of one expert, and is left
out where that is 0. ConvLSTM: C(d) = 9 (32 + 2d) 4d multiply-adds per cell and W = C(128), C(256)
or C(1024). ConvGLU: C(d) = 9 d 2d. Language models: C(d) = forward FLOPs per token of a block, and
W = 16 or 32 blocks of width 768.

Before the first run starts, a sweep checks what would stop it hours later: data and levels (which
it downloads once, not once per worker), disk space for all checkpoints, the settings of every run.
It measures a few updates and prints the expected hours. Three runs in a row that fail alike stop
it with the reason.

One run at a time uses a GPU, or `--gpus_per_run` of them under torchrun. Small agents do not fill a
GPU: with `--workers=8` on two GPUs, each GPU has four runs, which share its memory. On a CPU the
workers share the cores. For language models that share a GPU set `--also=batch_size=...`.

With `--tune` every allocation runs with seed 1 at all given values. Where the best value is the
largest or smallest one, a value beyond it (by a factor of two) is added, three times at most. When
all of these have finished, seeds 2 to n + 1 of each allocation's best value are added; figures and
tables show those alone.

Writes into out_dir/PLAN: one folder per run, which is finished when its log is at its last step,
and the figures and tables. Plans `sokoban` and `lm` show the runs of several budgets.
"""

import functools
import itertools
import json
import os
import re
import shlex
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import fields
from datetime import timedelta
from math import inf, nan
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen
from typing import NamedTuple

from configurator import Mistake, configure, every, fail, first_line, read_argument, read_config
from configurator import read_json, read_script, run_script, setup_process, write_json, write_text

if __name__ == '__main__':
    setup_process()  # before torch is imported

import numpy as np
import torch
from filelock import FileLock, Timeout

import figures
from common import CheckpointError, Stopper, commit, lock_folder, need_packages, saved_in
from convlstm import AGGREGATIONS, AgentConfig, build_agent
from data_fineweb import VOCAB, find_shards
from figures import Row, read_log, run_value
from model import RESIDUALS, ModelConfig, build_model
from sokoban import load_levels, split_files

# -----------------------------------------------------------------------------
# fmt: off
# which runs
plan = ''                      # a name of PLANS; '' prints the table of all figures and tables
only = ''                      # a part of it, as in 'L=1,2 variant=recurrent model=convglu'
residual = ''                  # 'shared' or 'expert': rule of the allocation plans; '': the default
seeds = 0                      # seeds per allocation; 0: agents 3, language models 1
tune = ''                      # 'learning_rate=0.02,0.04': the best value, chosen with seed 1
base = ''                      # config file under all runs, or the recurrent ones; '': the plan's
base_nonrecurrent = ''         # the same under the non-recurrent ones; '': base
also = ''                      # further settings of every run, as in 'compile=True threads=1'
script = ''                    # your copy of the trainer; '': train_lm.py or train_sokoban.py
width = 1.0                    # multiplies all widths; L and E stay those of the full-size plan
length = 1.0                   # multiplies updates or environment steps
out_dir = 'out/sweep'          # a run goes into out_dir/PLAN/NAME
# what to do with them; nothing: list them
run = False                    # run what is not finished
workers = 0                    # runs at a time; 0: one per GPU (or gpus_per_run), or one on a CPU
gpus_per_run = 1               # more than 1: each run under torchrun
index = -1                     # run this row of the list alone (array jobs)
measure = None                 # first time updates, print the hours; None: where over LONG
emit = ''                      # print an array job ('slurm'), one line per run ('commands'), or,
                               # without a plan, the table of figures as 'markdown'
figure = False                 # draw the plan's figures
table = None                   # True: mean, variance, N; 'solve': also the best ones' solve rates
                               # on unfiltered-test, or on generated evaluation levels
reference = ''                 # folder with the paper's tables, to be shown beside ours
results = ''                   # folder for figures and tables; '': out_dir/PLAN
# fmt: on
RANGES = {
    'residual': ['', *RESIDUALS],
    'seeds': (0, inf),
    'width': (1e-3, 1000),
    'length': (1e-6, 1000),
    'workers': (0, inf),
    'gpus_per_run': (1, inf),
    'index': (-1, inf),
    'emit': ['', 'slurm', 'commands', 'markdown'],
    'table': [None, True, False, 'solve'],
}
RENAMED = {'base_ff': 'base_nonrecurrent'}  # old name: new name
# -----------------------------------------------------------------------------

HERE = os.path.dirname(os.path.abspath(__file__))
PAPER_TABLES = 'results/paper'  # for --reference
LM = 'transformer'

# ---- the plans ----

# Budgets: the widths of an agent's experts (W is the cost of one expert of the widest), and the
# number of blocks of width 768 whose cost is a language model's W.
AGENT_WIDTHS = {
    'small': (32, 64, 128),
    'medium': (32, 64, 128, 256),
    'large': (64, 128, 256, 512, 1024),
}
LM_BLOCKS = {'small': 16, 'medium': 32, 'small-long': 16}
LM_WIDTHS = (384, 768, 1536)

# Plans of allocations: the models and budgets that one figure compares.
ALLOCATIONS = {
    'sokoban-small': [('convlstm', 'small'), ('convglu', 'small')],
    'sokoban-medium': [('convlstm', 'medium'), ('convglu', 'medium')],
    'sokoban-large': [('convlstm', 'large')],
    'lm-small': [(LM, 'small')],
    'lm-small-long': [(LM, 'small-long')],  # window 1,024
    'lm-medium': [(LM, 'medium')],
}
# The two panels of the saturation figure: the same runs as above, all budgets together.
SATURATION = {
    'sokoban': [(model, budget) for part in ('small', 'medium', 'large')
                for model, budget in ALLOCATIONS[f'sokoban-{part}']],
    'lm': [(LM, 'small'), (LM, 'medium')],
}  # fmt: skip
ALLOCATIONS |= SATURATION

# Plans of one setting: its name, its values, and the cells (model, recurrent, L, E, d).
SUMMED = [('convlstm', True, 1, 4, 128), (LM, True, 2, 8, 768)]
RESIDUAL_CELLS = [  # with one expert both rules are the same
    *((LM, False, L, 16 // L, 768) for L in (2, 4, 8)),
    (LM, False, 16, 4, 384),  # where the literal rule scales the stream most: by 4^(16/2)
    *(('convglu', recurrent, 2, 2, 128) for recurrent in (True, False)),
    *(('convglu', recurrent, 8, 2, 32) for recurrent in (True, False)),
]
ABLATIONS = {
    'aggregation': ('aggregation', list(AGGREGATIONS), SUMMED),
    'communication': ('radius', list(range(8)), [('convlstm', True, 2, 8, 32)]),
    'share-kv': ('share_kv', [True, False], [(LM, True, L, 16 // L, 768) for L in (1, 2, 4)]),
    'residual': ('residual', list(RESIDUALS), RESIDUAL_CELLS),
    'init-b': ('init_b', ['one', 'sqrt_experts'], [(LM, True, L, 16 // L, 768) for L in (1, 2)]),
}

# Plans of growing cost: the depths and the numbers of experts, of all three models.
SCALING = {
    'scaling': ((1, 2, 4, 8), (1, 2, 4, 8, 16, 32, 64)),
    'scaling-reduced': ((1, 2, 4), (1, 4, 16)),  # a part of the same runs, one seed
}
SCALING_WIDTHS = {'convlstm': 64, 'convglu': 64, LM: 384}

PLANS = [*ALLOCATIONS, *ABLATIONS, *SCALING]

# ---- the paper's figures and tables, each by one command ----

PROBED = 'model=convlstm variant=recurrent d=256 L=1,2,4,8'


class Entry(NamedTuple):
    """One figure or table: its name, the plan and the part of it that it needs (plan '': none), the
    arguments that draw it, and the command that follows or stands for the sweep."""

    title: str
    plan: str
    only: str = ''
    show: str = '--figure --table'
    then: str = ''


AGAINST = f'--figure --table --reference={PAPER_TABLES}'
PAPER = [
    *(
        Entry(f'Sokoban, {budget} budget', f'sokoban-{budget}', 'model=convlstm', AGAINST)
        for budget in AGENT_WIDTHS
    ),
    Entry('Saturation, Sokoban panel', 'sokoban', 'model=convlstm', AGAINST),
    Entry('Solve rates beside published agents', 'sokoban', 'model=convlstm',
          f'--table=solve --reference={PAPER_TABLES}'),
    Entry('ConvGLU, small budget', 'sokoban-small', 'model=convglu'),
    Entry('ConvGLU, medium budget', 'sokoban-medium', 'model=convglu'),
    Entry('Saturation, ConvGLU', 'sokoban', 'model=convglu'),
    Entry('FineWeb, small budget', 'lm-small'),
    Entry('FineWeb, small budget, long context', 'lm-small-long'),
    Entry('FineWeb, medium budget', 'lm-medium'),
    Entry('Saturation, FineWeb panel', 'lm'),
    Entry('Scaling the number of experts', 'scaling'),
    Entry('Scaling the number of experts, reduced', 'scaling-reduced'),
    Entry('Aggregation of experts', 'aggregation'),
    Entry('Communication radius', 'communication'),
    Entry('Sharing keys and values', 'share-kv'),
    Entry('Planning probes', 'sokoban-large', PROBED, '',
          'python probe_sokoban.py config/probe_large.py --download'),
    Entry('Latency per token', '', then='python bench.py --suite=decode'),
    Entry('Training throughput on four GPUs', '',
          then='torchrun --standalone --nproc_per_node=4 bench.py --suite=train'),
    Entry('Ours: residual rule', 'residual'),
    Entry('Ours: FineWeb, small budget, shared residual', 'lm-small', '',
          '--residual=shared --figure --table'),
    Entry('Ours: b at the start', 'init-b'),
]  # fmt: skip

# ---- what decides that a run is another run, and the limits of a sweep ----

SAME_RUN = (  # settings that may change without making another run
    'out_dir resume overwrite eval_only levels best plot tensorboard wandb wandb_project '
    'eval_interval batch_size device dtype compile graphs path mode threads reuse download'
).split()
MOST_COST = 1.5  # budgets: a language model beyond it (half an expert rounded up) is left out
MOST_TUNING = 3  # times at most that `tune` continues beyond an edge
ALIKE = 3  # failures in a row with the same message that stop a sweep
UNUSABLE = {'other': 'a run with other settings', 'damaged': 'a log that cannot be used'}
POLL, REPORT = 0.2, 10.0  # seconds between looks at the runs, and between lines about them
DRAWS = 10000  # of the bootstrap

# A model of one H100-class GPU, no measurement; results/modeled/speed.md has a finer one.
PRODUCTS = 500e12  # FLOP/s of a language model's products, bf16
CONVOLUTIONS = 150e12  # FLOP/s of an agent's convolutions
KERNEL = 2e-6  # seconds per kernel of a CUDA graph
LM_KERNELS = 44  # per token and layer, forward and backward, compiled: counted
AGENT_KERNELS = (120, 80)  # per environment step, and per layer of it: set to give the planned
# 55,600 and 27,800 environment steps/s of (1, 1, 128) and (4, 1, 64) in results/paper/speed.csv
MICRO_BATCH = 32768  # tokens per micro-batch of a GPU
CPU_RATE = 50e9  # FLOP/s of a CPU core: only to tell short sweeps from long ones
LONG = 0.5  # hours from which on updates are measured before a sweep

say = functools.partial(print, flush=True)


# ----------------------------------------------------------------------------- settings and cost


def script_of(row: Row) -> str:
    """Return the path of the script that trains a row."""
    if not script:
        return os.path.join(HERE, row.script)
    path = script if os.path.exists(script) else os.path.join(HERE, script)
    if not os.path.exists(path):
        fail(f'script = {script!r}: there is no such file')
    return path


@functools.cache
def base_config(model: str, recurrent: bool, budget: str) -> tuple[dict, list[str]]:
    """Return the settings under a run's own ones (defaults of its script, its config file, `also`),
    and the config files, which are looked for beside sweep.py too.

    Agents need no config file: the defaults of train_sokoban.py are the paper's."""
    path = base if recurrent else base_nonrecurrent or base
    if not path and model == LM:
        kind = '' if recurrent else '_nonrecurrent'
        path = f'config/{budget.replace("-", "_")}{kind}_L2.py'
    if path and not os.path.exists(path) and os.path.exists(os.path.join(HERE, path)):
        path = os.path.relpath(os.path.join(HERE, path))
    defaults = read_script(script_of(Row(model, recurrent, budget, 1, 1, 1)))[0]
    config = dict(defaults)
    if path:
        read_config(path, config, defaults)
    for setting in also.split():
        read_argument(f'--{setting}', config, defaults, f'also = {also!r}')
    return config, [path] if path else []


def settings_of(row: Row) -> dict:
    """Return a run's own settings, as its command line has them."""
    config, _ = base_config(row.model, row.recurrent, row.budget)
    own = {} if row.is_text else {'arch': row.model}
    own |= {
        'recurrent': row.recurrent,
        'n_layer': row.L,
        'n_expert': row.E,
        'n_embd': row.d,
        'seed': row.seed,
        **dict(row.more),
    }
    further = [setting.partition('=')[0] for setting in also.split()]
    if clash := [name for name in further if name in own]:
        fail(f'also = {also!r}: plan {plan!r} sets {", ".join(clash)} itself')
    lengths = ('max_iters', 'warmup_iters', 'eval_interval') if row.is_text else ('total_steps',)
    if length != 1:
        own |= {name: max(1, round(config[name] * length)) for name in lengths}
    if unknown := [name for name in own if name not in config]:
        fail(f'plan {plan!r} sets {", ".join(unknown)}, which {script_of(row)} does not have')
    return {name: config[name] for name in further} | own


def config_of(row: Row) -> dict:
    """Return all settings of a run."""
    return base_config(row.model, row.recurrent, row.budget)[0] | settings_of(row)


class Cost(NamedTuple):
    """What a run costs per token, or per environment step of one board."""

    core: float  # the layers, which budgets count: forward FLOPs, or multiply-adds
    forward: float  # forward FLOPs of the whole model
    params: int
    state: int  # numbers of the recurrent state that a checkpoint holds


def cost(row: Row) -> Cost:
    """Return a run's cost, from a model of its sizes that has no memory."""
    return cost_of_cell(row._replace(seed=1))


@functools.cache
def cost_of_cell(row: Row) -> Cost:
    """Return what `cost` does. Seeds cost the same."""
    config = config_of(row)
    names = {f.name for f in fields(ModelConfig if row.is_text else AgentConfig)}
    sizes = {name: config[name] for name in names & config.keys() - {'path', 'mode', 'dtype'}}
    try:
        with torch.device('meta'):
            if not row.is_text:
                agent = build_agent(AgentConfig(**sizes))
                state = sum(x.numel() for x in agent.init_state(config['n_envs']))
                macs = float(agent.nominal_macs())
                return Cost(macs, 2 * macs, agent.num_params()['total'], state)
            c = ModelConfig(**sizes, vocab_size=VOCAB[config['tokenizer']])
            model = build_model(c, row.recurrent)
            flops = model.flops_per_token()
            caches = c.n_kv_head * (1 if c.share_kv else c.n_expert)
            state = c.n_embd + 2 * c.n_layer * caches * c.window * c.head_dim  # s, keys, values
            streams = config['tokens_per_step'] // config['block_size'] if row.recurrent else 0
            params = model.num_params()['total']
            return Cost(flops['core'], sum(flops.values()), params, streams * state)
    except (ValueError, KeyError, RuntimeError, OverflowError) as error:
        fail(f'plan {plan!r}, {row.name}: {first_line(error)}; see base, width')


def scaled(d: int) -> int:
    """Return the width d of a full-size plan as `width` shrinks it."""
    return max(1, round(d * width))


def budget_of(model: str, recurrent: bool, budget: str, full_size: bool = False) -> float:
    """Return W, in the unit of Cost.core; of the full-size plan, or as `width` shrinks it."""
    n, d = (LM_BLOCKS[budget], 768) if model == LM else (1, max(AGENT_WIDTHS[budget]))
    return n * cost(Row(model, recurrent, budget, 1, 1, d if full_size else scaled(d))).core


def over_budget(row: Row) -> float:
    """Return the cost of a run as a multiple of its budget."""
    return cost(row).core / budget_of(row.model, row.recurrent, row.budget)


def updates_of(row: Row) -> int:
    """Return the number of updates of a run, the `step` of its last log line."""
    config = config_of(row)
    if row.is_text:
        return config['max_iters']
    return -(-config['total_steps'] // (config['n_envs'] * config['unroll']))


def training_flops(row: Row) -> float:
    """Return the FLOPs of a run's updates, the backward counted as two forwards."""
    config = config_of(row)
    each = config['tokens_per_step'] if row.is_text else config['n_envs'] * config['unroll']
    return 3 * cost(row).forward * each * updates_of(row)


def modeled_hours(row: Row) -> float:
    """Return the hours of one GPU that a run would take by a model, not by a measurement.

    Products run at a constant rate, and kernels that wait for each other (one token or environment
    step and layer after another) cost a constant time each. Validation of a language model is
    included, compilation and evaluation of agents are not."""
    config, updates = config_of(row), updates_of(row)
    if row.is_text:
        in_turn = max(1, config['tokens_per_step'] // MICRO_BATCH) * row.L
        in_turn *= config['block_size'] if row.recurrent else 1
        validations = updates // config['eval_interval'] + 1
        validation = validations * config['val_tokens'] * cost(row).forward
        products = (training_flops(row) + validation) / PRODUCTS
        kernels = updates * in_turn * LM_KERNELS
    else:
        products = training_flops(row) / CONVOLUTIONS
        kernels = updates * config['unroll'] * (AGENT_KERNELS[0] + AGENT_KERNELS[1] * row.L)
    return (products + kernels * KERNEL) / 3600


# ----------------------------------------------------------------------------- rows of a plan


def cells_of(name: str) -> list[Row]:
    """Return a plan's rows with seed 1."""
    if name in SCALING:
        depths, experts = SCALING[name]
        return [
            Row(model, recurrent, 'small', L, E, scaled(d))
            for model, d in SCALING_WIDTHS.items()
            for recurrent in (True, False)
            for L in depths
            for E in experts
        ]
    if name in ABLATIONS:
        setting, values, cells = ABLATIONS[name]
        return [
            Row(model, recurrent, 'small', L, E, scaled(d), more=((setting, x),))
            for model, recurrent, L, E, d in cells
            for x in values
        ]
    rows = []
    for (model, budget), recurrent in itertools.product(ALLOCATIONS[name], (True, False)):
        W = budget_of(model, recurrent, budget, full_size=True)  # a shrunk plan keeps its L and E
        most = MOST_COST * W if model == LM else inf
        depths = (1, 2, 4, 8, 16, 32) if (model, budget) == (LM, 'medium') else (1, 2, 4, 8, 16)
        widths = LM_WIDTHS if model == LM else AGENT_WIDTHS[budget]
        for L, d in itertools.product(depths, widths[::-1]):
            one = Row(model, recurrent, budget, 1, 1, d)
            each = cost(one).core
            E = round(W / (L * each))  # a half to even: exactly half an expert is none
            if 0 < L * E * each <= most:
                rows.append(one._replace(L=L, E=E, d=scaled(d)))
    rows = [by_residual(row) for row in rows]
    return list(dict.fromkeys(rows))  # two widths may shrink to one


def by_residual(row: Row) -> Row:
    """Return an allocation with the setting `residual` where that makes another model: a ConvGLU or
    a non-recurrent language model of several experts."""
    matters = row.E > 1 and (row.model == 'convglu' or row.is_text and not row.recurrent)
    more = (('residual', residual), *row.more)
    return row._replace(more=more) if residual and matters else row


def tuned(rows: list[Row]) -> list[Row]:
    """Return each row once for each value of `tune`."""
    name, _, values = tune.partition('=')
    if not name or not values:
        fail(f"tune = {tune!r}: expected a setting and its values, as in 'learning_rate=0.02,0.04'")
    out = []
    for row in rows:
        if name in settings_of(row) or name in SAME_RUN:
            fail(f'tune: {name} cannot be tuned: plan {plan!r} sets it, or it changes no result')
        for text in values.split(','):
            config, own = base_config(row.model, row.recurrent, row.budget)[0], {}
            read_argument(f'--{name}={text}', own, config, f'tune = {tune!r}')
            out.append(row._replace(more=(*row.more, (name, own[name]))))
    return list(dict.fromkeys(out))


def winners(rows: list[Row]) -> list[Row]:
    """Return the best of the rows that differ in `tune` alone, by seed 1; none until all have
    ended."""
    if not {state_of(row) for row in rows} <= {'done', 'failed'}:
        return []
    return [row for row, _ in figures.runs_at_best(finished(rows), tune.partition('=')[0])]


def further(rows: list[Row]) -> list[Row]:
    """Return what to try next: for each winner at an edge, the value beyond it by a factor of two,
    if the next value inside is at least as far away."""
    name, out = tune.partition('=')[0], []
    for row in winners(rows):
        cell, best = figures.without_setting(row, name), dict(row.more)[name]
        tried = sorted(dict(r.more)[name] for r in rows if figures.without_setting(r, name) == cell)
        if not isinstance(best, float) or len(tried) < 2 or tried[0] <= 0:
            continue
        if best == tried[-1] >= 2 * tried[-2]:
            out.append(cell._replace(more=(*cell.more, (name, 2 * best))))
        elif best == tried[0] <= tried[1] / 2:
            out.append(cell._replace(more=(*cell.more, (name, best / 2))))
    return out


VARIANTS = {'feedforward': False, 'nonrecurrent': False, 'non-recurrent': False, 'recurrent': True}


def matches(row: Row, key: str, values: str) -> bool:
    """Return whether a row has one of the values ('1,2') of a condition of `only`."""
    if key == 'variant':
        return row.recurrent in [VARIANTS.get(x) for x in values.split(',')]
    known = {name: str(getattr(row, name)) for name in ('model', 'budget', 'L', 'E', 'd')}
    known |= {name: str(x) for name, x in row.more}
    return known.get(key) in values.split(',')


def chosen(rows: list[Row], conditions: str, name: str) -> list[Row]:
    """Return the rows of plan `name` that fulfill all conditions, such as 'L=1,2 d=768'."""
    for condition in conditions.split():
        key, _, values = condition.partition('=')
        before, rows = rows, [row for row in rows if matches(row, key, values)]
        if not rows:
            keys = {
                'model',
                'variant',
                'budget',
                'L',
                'E',
                'd',
                *(k for r in before for k, _ in r.more),
            }
            if key not in keys:
                fail(f'only = {only!r}: {key!r} is none of {", ".join(sorted(keys))}')
            found = [getattr(row, key, dict(row.more).get(key)) for row in before]
            there = ', '.join(dict.fromkeys(map(str, found)))
            fail(f'only = {only!r}: leaves none of plan {name!r}: {key} can be {there}')
    return rows


def seeds_of(row: Row, name: str) -> int:
    """Return the number of seeds per allocation of plan `name`."""
    return seeds or (1 if row.is_text or name == 'scaling-reduced' else 3)


def plan_rows(name: str = '', conditions: str = '') -> list[Row]:
    """Return all runs of a plan that are known by now, the first seed of every allocation before
    the second of any. By default the settings' plan and part."""
    name, conditions = (name, conditions) if name else (plan, only)
    if name not in PLANS:
        fail(f'plan = {name!r}: expected one of {", ".join(PLANS)}')
    cells = again = chosen(cells_of(name), conditions, name)
    if tune:
        cells = tuned(cells)
        for _ in range(MOST_TUNING):
            cells = cells + further(cells)
        again = winners(cells)
    last = {row: seeds_of(row, name) + bool(tune) for row in cells}
    more = range(2, max(last.values()) + 1)
    return cells + [row._replace(seed=n) for n in more for row in again if n <= last[row]]


# ----------------------------------------------------------------------------- the state of a run


def folder_of(row: Row, name: str = '') -> str:
    """Return the folder of a run of plan `name`. Plans that share runs share their folders."""
    name = name or plan
    if name in SATURATION:
        name = f'{name}-{row.budget}'
    folder = os.path.join(out_dir, 'scaling' if name in SCALING else name, row.name)
    former = folder.replace('_nonrecurrent_', '_feedforward_')  # as it was called until 2026-11
    if not row.recurrent and os.path.exists(former) and not os.path.exists(folder):
        return former
    return folder


def look(row: Row, name: str = '') -> tuple[str, float, float]:
    """Return a run's state, the fraction of its updates that are done, and the seconds they took.

    States: 'done'; 'failed'; 'other', a run with other settings; 'damaged', no usable log and no
    checkpoint from which a resumed run repairs it; and '' for what can start or resume."""
    folder, log = Path(folder_of(row, name)), [{'step': 0}]
    saved = read_json(folder / 'config.json')
    state = 'failed' if (folder / 'failed.json').exists() else ''
    try:
        log += read_log(folder)
    except FileNotFoundError:
        pass
    except Mistake:
        state = state if saved_in(folder) else 'damaged'
    part = min(1.0, log[-1]['step'] / updates_of(row))
    wanted = json.loads(json.dumps(config_of(row)))  # tuples become lists
    if any(saved[k] != x for k, x in wanted.items() if k in saved and k not in SAME_RUN):
        state = 'other'
    elif part == 1:
        state = 'damaged' if run_value(log) is None else 'done'
    return state, part, log[-1].get('seconds') or 0.0


def state_of(row: Row) -> str:
    """Return a run's state, as `look` does."""
    return look(row)[0]


# ----------------------------------------------------------------------------- lists and tables


def arguments(row: Row) -> list[str]:
    """Return script, config files and settings of a run, as seen from the current folder."""
    flags = [f'--{name}={x}' for name, x in settings_of(row).items()]
    files = base_config(row.model, row.recurrent, row.budget)[1]
    return [os.path.relpath(script_of(row)), *files, *flags, f'--out_dir={folder_of(row)}']


def command(row: Row) -> list[str]:
    """Return the command that starts a run."""
    if gpus_per_run == 1:
        return ['python', *arguments(row)]
    return ['torchrun', '--standalone', f'--nproc_per_node={gpus_per_run}', *arguments(row)]


def print_plan(rows: list[Row]) -> None:
    """Print one line per run: number, name, cost, size, hours, state, command."""
    units = dict.fromkeys('MFLOP per token' if row.is_text else 'MMAC per step' for row in rows)
    wide = max(len(row.name) for row in rows)
    print(f'cost in {" or ".join(units)}, layers only; hours of one GPU: modeled, not measured')
    titles = f'{"cost":>10} {"of W":>4} {"parameters":>13} {"hours":>7} {"state":>7}'
    print(f'  # {"run":{wide}} {titles} command')
    for i, row in enumerate(rows):
        state, part, _ = look(row)
        numbers = f'{cost(row).core / 1e6:10,.1f} {over_budget(row):4.2f} {cost(row).params:13,}'
        status = f'{modeled_hours(row):7.2f} {state or format(part, ".0%"):>7}'
        print(f'{i:3} {row.name:{wide}} {numbers} {status} {shlex.join(command(row))}')
    print(f'{len(rows)} runs, {sum(map(modeled_hours, rows)):,.1f} GPU hours (modeled)')


def entry_command(entry: Entry) -> str:
    """Return the one line that makes a figure or table from nothing."""
    line = ''
    if entry.plan:
        part = f' --only={shlex.quote(entry.only)}' if entry.only else ''
        line = f'python sweep.py --plan={entry.plan}{part} --run {entry.show}'.strip()
    return ' && '.join(filter(None, (line, entry.then)))


def paper_table() -> list[dict]:
    """Return one line per figure and table of the paper: its command, the number of runs, their
    modeled GPU hours and their state."""
    global residual
    lines = []
    for entry in PAPER:
        runs, hours, state = '', '', 'see its command'
        if entry.plan:
            residual = 'shared' if '--residual=shared' in entry.show else ''
            rows = plan_rows(entry.plan, entry.only)
            runs = str(len(rows))
            names = {(name, script_of(row)) for row in rows for name, _ in row.more}
            if missing := [name for name, path in names if name not in read_script(path)[0]]:
                state = f'needs a setting {missing[0]}'  # a fork may have none
            else:
                done = sum(look(row, entry.plan)[0] == 'done' for row in rows)
                hours = f'{sum(map(modeled_hours, rows)):,.0f}'
                state = f'{done} of {len(rows)} done' if done else 'not run'
        lines.append({
            'figure or table': entry.title,
            'command': entry_command(entry),
            'runs': runs,
            'GPU hours': hours,
            'state': state,
        })  # fmt: skip
    residual = ''
    return lines


def print_paper_table() -> None:
    """Print the paper's figures and tables, each with the command that makes it."""
    lines = paper_table()
    if emit == 'markdown':
        print('| ' + ' | '.join(lines[0]) + ' |\n' + '| --- ' * len(lines[0]) + '|')
        for line in lines:
            line['command'] = f'`{line["command"]}`'
            print('| ' + ' | '.join(line.values()) + ' |')
        return
    order = ['figure or table', 'runs', 'GPU hours', 'state', 'command']  # the widest one last
    wide = {name: max(len(name), *(len(line[name]) for line in lines)) for name in order}
    for line in [dict(zip(order, order, strict=True)), *lines]:
        texts = [
            f'{line[name]:{">" if name in ("runs", "GPU hours") else "<"}{wide[name]}}'
            for name in order
        ]
        print('  '.join(texts).rstrip())
    print(
        '\nGPU hours of one H100-class GPU: modeled, not measured; shared runs count in every row.'
    )
    print(f'Plans: {", ".join(PLANS)}; --plan=NAME lists the runs of one.')


def print_jobs(rows: list[Row], config: dict) -> None:
    """Print the plan for a cluster: each job is this script on one row, run by this Python."""
    defaults = read_script(__file__)[0]
    not_passed = ('emit', 'run', 'index', 'figure', 'table', 'workers', 'measure')
    passed = [
        f'--{name}={x}'
        for name, x in config.items()
        if x != defaults[name] and name not in not_passed
    ]
    path = os.path.relpath(os.path.abspath(__file__))
    line = shlex.join([sys.executable, path, *passed, '--run', '--workers=1'])
    if emit == 'commands':
        print(*[f'{line} --index={i}' for i in range(len(rows))], sep='\n')
        return
    print(f'''#!/bin/bash
#SBATCH --job-name=sweep-{plan}
#SBATCH --array=0-{len(rows) - 1}
#SBATCH --nodes=1 --ntasks=1 --cpus-per-task=8 --gpus-per-task={gpus_per_run}
#SBATCH --time=24:00:00 --requeue --signal=B:TERM@120
# a job that meets its time limit saves two minutes before it: submit this again, and all resume
cd {shlex.quote(os.getcwd())} && exec {line} --index="$SLURM_ARRAY_TASK_ID"''')


# ----------------------------------------------------------------------------- before a sweep


def check_data(rows: list[Row]) -> None:
    """Find the shards and levels of all runs; download the levels that runs would download. Ends
    the script if any are missing."""
    configs = [config_of(row) for row in rows]
    shards = {(c['data_dir'], c['tokenizer']) for c in configs if 'data_dir' in c}
    for data_dir, tokenizer in sorted(shards):
        for split in ('train', 'val'):
            find_shards(data_dir, split, tokenizer)
    splits = {
        (c['levels_dir'], split, c['download'])
        for c in configs
        if 'levels_dir' in c
        for split in (c['split'], c['eval_split'])
        if split != 'generated' and not os.path.isfile(split)
    }
    for folder, split, download in sorted(splits):
        if not split_files(folder or 'data/boxoban', split):
            load_levels(folder, split, download)  # downloads, or says how


def checkpoint_bytes(row: Row) -> tuple[int, int]:
    """Return the size of a run's full checkpoint and of its best one, which has weights alone."""
    _, _, params, state = cost(row)
    wide = 2 if torch.cuda.is_available() else 4  # bytes of a cached key: bfloat16 on a GPU
    return 12 * params + wide * state, 4 * params  # weights and two moments


def check_disk(rows: list[Row], at_a_time: int) -> None:
    """End the script if the disk has no room for the checkpoints of all runs: each keeps two full
    ones and its best one, and writes a third one beside them."""
    need = 0
    for row in rows:
        folder, (full, best) = Path(folder_of(row)), checkpoint_bytes(row)
        there = sum(file.stat().st_size for file in folder.glob('ckpt_*.pt'))
        need += max(0, 2 * full + best - there)
    need += at_a_time * max((checkpoint_bytes(row)[0] for row in rows), default=0)
    place = Path(out_dir).absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if need > free:
        line = f'{len(rows)} runs write {need / 1e9:,.1f} GB of checkpoints'
        fail(f'{out_dir}: {line}, and {free / 1e9:,.1f} GB are free: choose another out_dir, or a'
             ' part of the plan by --only')  # fmt: skip


def measured_update(row: Row) -> float:
    """Run a few updates of a run in a temporary folder and return the seconds of one. Ends the
    script, with the run's own message, if it fails."""
    config = config_of(row)
    small = {'resume': False, 'overwrite': True, 'plot': False, 'tensorboard': False}
    small |= {'wandb': False, 'log_interval': 1, 'eval_interval': 10**6, 'eval_games': 1}
    if row.is_text:
        small |= {'max_iters': 8, 'val_tokens': 2 * config['val_streams']}
    else:
        small |= {'total_steps': 8 * config['n_envs'] * config['unroll'], 'n_levels': 100}
    with tempfile.TemporaryDirectory() as folder, open(f'{folder}/stdout.txt', 'w') as out:
        line = [sys.executable, *arguments(row)]
        line += [f'--{name}={x}' for name, x in small.items() if name in config]
        line += [f'--out_dir={folder}/run']
        status = Popen(line, stdin=DEVNULL, stdout=out, stderr=STDOUT).wait()
        if status != 0:
            fail(f'{row.name}: its first updates failed: {last_error(out.name)}')
        seconds = [record.get('seconds') for record in read_log(f'{folder}/run')]
    seconds = [x for x in seconds if x is not None]
    steps = [later - earlier for earlier, later in itertools.pairwise(seconds)]
    return statistics.median(steps[-3:]) if steps else nan  # graphs are captured before


def print_expected(rows: list[Row], at_a_time: int) -> None:
    """Measure updates of one run of each model and kind, and print the hours that the runs would
    take here, by the modeled ratio between runs."""
    hours, found = 0.0, []
    for _, part in itertools.groupby(rows, key=lambda row: (row.model, row.recurrent)):
        part = sorted(part, key=modeled_hours)
        middle = part[len(part) // 2]
        seconds = measured_update(middle)
        ratio = seconds * updates_of(middle) / 3600 / modeled_hours(middle)
        hours += sum(ratio * modeled_hours(row) * (1 - look(row)[1]) for row in part)
        found.append(f'{middle.name} {seconds:.3g} s per update')
        say(f'    measured: {found[-1]}')
    each = f', {hours / min(at_a_time, len(rows)):,.1f} hours with {at_a_time} at a time'
    say(f'expected: {hours:,.1f} hours one after another{each if at_a_time > 1 else ""}')


def check_before(rows: list[Row], at_a_time: int) -> None:
    """Check in seconds what would stop a sweep after hours. rows: those that are not finished."""
    try:
        check_data(rows)
    except (Mistake, OSError) as error:
        fail(error)
    check_disk(rows, at_a_time)
    hours = sum(map(modeled_hours, rows))
    if not torch.cuda.is_available():
        hours = sum(map(training_flops, rows)) / CPU_RATE / 3600
    wanted = hours > LONG and index < 0 if measure is None else measure
    if wanted:
        order = sorted(rows, key=lambda row: (row.model, row.recurrent))
        print_expected(order, at_a_time)


# ----------------------------------------------------------------------------- running


def devices() -> list[str]:
    """Return CUDA_VISIBLE_DEVICES of each worker, '' on the CPU."""
    n, k = torch.cuda.device_count(), gpus_per_run
    if n < k and (n > 0 or k > 1):
        fail(f'gpus_per_run = {k}: there are {n} GPUs here')
    if n == 0:
        return [''] * (workers or 1)
    names = os.environ.get('CUDA_VISIBLE_DEVICES', ','.join(map(str, range(n)))).split(',')[:n]
    groups = [','.join(names[i : i + k]) for i in range(0, n - k + 1, k)]
    first = max(index, 0)  # jobs of one row each, side by side, spread out
    return [groups[(first + i) % len(groups)] for i in range(workers or len(groups))]


class Running(NamedTuple):
    """A run at work."""

    process: Popen
    lock: FileLock  # of its folder, against another sweep
    gpu: str
    started: float


def start(row: Row, gpu: str, at_a_time: int) -> Running | None:
    """Start or resume a run on `gpu`, as one of several at a time. Returns None if another process
    is at work on it, or has finished it."""
    folder = Path(folder_of(row))
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / '.lock', blocking=False)
    try:
        lock.acquire()
        lock_folder(folder).release()  # a run whose sweep was killed is still at work
    except (Timeout, CheckpointError):
        lock.release()
        return None
    if state_of(row) in ('done', *UNUSABLE):  # under the lock: it may have changed
        lock.release()
        return None
    launcher, *line = command(row)
    line = ['-m', 'torch.distributed.run', *line] if launcher == 'torchrun' else line
    line.append('--resume=True' if saved_in(folder) else '--overwrite=True')
    cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()
    env = {'OMP_NUM_THREADS': str(max(1, cores // (at_a_time * gpus_per_run))), **os.environ}
    if gpu:
        env['CUDA_VISIBLE_DEVICES'] = gpu
    with open(folder / 'stdout.txt', 'ab') as out:
        out.write(b'---- started\n')
        out.flush()
        process = Popen(
            [sys.executable, *line],
            stdin=DEVNULL,
            stdout=out,
            stderr=STDOUT,
            env=env,
            start_new_session=True,  # ctrl-C is ours to pass on
        )
    return Running(process=process, lock=lock, gpu=gpu, started=time.time())


def last_error(path: str | os.PathLike) -> str:
    """Return the last error that a run printed in its last try, or its last line."""
    text = Path(path).read_text(errors='replace').rpartition('---- started\n')[2]
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ['it printed nothing']
    errors = [line for line in lines if re.match(r'(error: |[\w.]*(Error|Exception)\b)', line)]
    return (errors or lines)[-1][:300]


def outcome(row: Row, status: int) -> str:
    """Return '' for a run that is done, or why it failed, which failed.json keeps."""
    folder = Path(folder_of(row))
    if status == 0 and state_of(row) == 'done':
        (folder / 'failed.json').unlink(missing_ok=True)  # of an earlier try
        return ''
    message = last_error(folder / 'stdout.txt')
    record = {'exit': status, 'message': message, 'command': shlex.join(command(row))}
    try:
        write_json(record, folder / 'failed.json')
    except OSError as error:  # the disk may be full
        say(f'{folder}: {first_line(error)}')
    return f'FAILED (exit status {status}): {message}'


def kind_of_failure(row: Row, message: str) -> str:
    """Return a failure's message without what differs from run to run: folder and numbers."""
    return re.sub(r'\d[\d.,e+-]*', 'N', message.replace(folder_of(row), 'RUN'))


def remaining(todo: list[Row], all_rows: list[Row], at_a_time: int) -> str:
    """Return the time left, by the seconds that the runs so far took and the modeled ratio between
    runs."""
    looks = {row: look(row) for row in all_rows}
    done = sum(modeled_hours(row) * looks[row][1] for row in all_rows)
    seconds = sum(took for _, _, took in looks.values())
    if not done:
        return 'n/a'
    left = sum(modeled_hours(row) * (1 - looks[row][1]) for row in todo)
    return str(timedelta(seconds=int(seconds / done * left / min(at_a_time, len(todo) or 1))))


def execute(rows: list[Row]) -> int:
    """Run what is not finished. Returns the exit status: 0 all are done, 1 some are not, 128 +
    signal when told to stop."""
    free, queue, running, failed = devices(), [], {}, {}
    for row in rows:
        state = state_of(row)
        if state in UNUSABLE:
            fail(f'{folder_of(row)} holds {UNUSABLE[state]}: move it away, or change out_dir')
        if state != 'done':
            queue.append(row)
    at_a_time, due = len(free), every(REPORT)
    say(
        f'{plan}: {len(rows)} runs, {len(rows) - len(queue)} finished before; {at_a_time} at a time'
    )
    if queue:
        check_before(queue, at_a_time)
    alike, reason, stopper = 0, '', Stopper()  # failures in a row, and what they have in common
    try:
        while running or queue and stopper.signal is None:
            while queue and free and stopper.signal is None:
                row = queue.pop(0)
                if started := start(row, free[0], at_a_time):
                    running[row] = started
                    free.pop(0)
                else:
                    say(f'{row.name}: another process is at work on it, or has finished it')
            for row in [
                row for row, at_work in running.items() if at_work.process.poll() is not None
            ]:
                ended = running.pop(row)
                free.append(ended.gpu)
                ended.lock.release()
                if stopper.signal is not None and state_of(row) != 'done':
                    continue  # told to stop: it has saved
                failure = outcome(row, ended.process.returncode)
                if failure:
                    failed[row] = failure
                kind = kind_of_failure(row, failure)
                alike = alike + 1 if failure and kind == reason else bool(failure)
                reason = kind
                counted = f'[{len(rows) - len(queue) - len(running)}/{len(rows)}] {row.name}'
                eta = remaining([*queue, *running], rows, at_a_time)
                seconds = time.time() - ended.started
                say(f'{counted}: {failure or "done"}, {seconds:.0f} s | eta {eta}')
                if alike == ALIKE and queue:
                    say(f'{ALIKE} runs in a row failed alike: {len(queue)} others are not started')
                    queue = []
            if stopper.signal is not None:
                for at_work in running.values():
                    at_work.process.terminate()  # they save
                for at_work in running.values():
                    at_work.process.wait()
            elif running and due():
                parts = ', '.join(f'{row.name} {look(row)[1]:.0%}' for row in running)
                say(f'    running: {parts} | eta {remaining([*queue, *running], rows, at_a_time)}')
            time.sleep(POLL)
    except BaseException:  # a second ctrl-C: their last checkpoints stay
        for at_work in running.values():
            # torchrun ends its ranks only if it lives
            at_work.process.terminate() if gpus_per_run > 1 else at_work.process.kill()
        raise
    stopper.restore()
    for row, message in failed.items():
        say(f'failed: {row.name}: {message}; see {folder_of(row)}/stdout.txt')
    if stopper.signal is not None:
        say('stopped; the runs that had started have saved: the same command resumes them')
        return 128 + stopper.signal
    return int(any(state_of(row) != 'done' for row in rows))


def run_all(rows: list[Row]) -> tuple[int, list[Row]]:
    """Run a plan and, with `tune`, the values and seeds that its results add. Returns the exit
    status and all rows."""
    status = execute([rows[index]] if index >= 0 else rows)
    while tune and index < 0 and status < 2 and (grown := plan_rows()) != rows:
        added = [row for row in grown if row not in rows]
        rows, status = grown, max(status, execute(added))
    return status, rows


# ----------------------------------------------------------------------------- figures and tables


def finished(rows: list[Row]) -> list[tuple[Row, list[dict]]]:
    """Return the finished runs and their logs; skip what cannot be used with a warning."""
    runs = []
    for row in rows:
        folder, state = folder_of(row), state_of(row)
        if state in UNUSABLE:
            print(f'warning: {folder} holds {UNUSABLE[state]}: skipped', file=sys.stderr)
        elif state == 'done':
            runs.append((row, read_log(folder)))
    return runs


def best_depths(runs: list) -> str:
    """Return a sentence on the best L of recurrent and non-recurrent models, with how sure it is;
    '' where a kind or a second seed is missing.

    Two answers: the best mean of seeds drawn with replacement, DRAWS times; and of means with
    errors drawn from a t distribution, which allows for few seeds."""
    values = {True: {}, False: {}}  # recurrent or not: {cell: values, less is better}
    for row, log in runs:
        sign = 1 if row.is_text else -1
        values[row.recurrent].setdefault(row.cell, []).append(sign * run_value(log))
    if any(not cells or min(map(len, cells.values())) < 2 for cells in values.values()):
        return ''
    generator, t_generator = np.random.default_rng(1), np.random.default_rng(2)
    best, best_by_t, words = {}, {}, []
    for recurrent, cells in values.items():
        depths = np.array([row.L for row in cells])
        means = [generator.choice(v, (DRAWS, len(v))).mean(1) for v in cells.values()]
        by_t = [
            np.mean(v)
            + np.std(v, ddof=1) / len(v) ** 0.5 * t_generator.standard_t(len(v) - 1, DRAWS)
            for v in cells.values()
        ]
        best[recurrent] = depths[np.argmin(means, 0)]
        best_by_t[recurrent] = depths[np.argmin(by_t, 0)]
        low, high = np.quantile(best[recurrent], (0.025, 0.975), method='nearest')
        exact = min(cells, key=lambda row: np.mean(cells[row])).L
        kind = 'recurrent' if recurrent else 'non-recurrent'
        words.append(f'{kind} {exact} (95%: {low} to {high})')
    smaller, equal = np.mean(best[True] < best[False]), np.mean(best[True] == best[False])
    words.append(f'recurrent smaller in {smaller:.1%}, equal in {equal:.1%}')
    by_t = np.mean(best_by_t[True] < best_by_t[False])
    words.append(f'with errors of a t distribution smaller in {by_t:.1%}')
    return f'Best L, {DRAWS:,} bootstrap draws of seeds: {", ".join(words)}.'


def solve_rate(row: Row, levels: str) -> float:
    """Return a finished agent's greedy solve rate on `levels` ('': its evaluation levels), from its
    folder, or evaluated now."""
    config = config_of(row)
    path = Path(folder_of(row), f'eval_{levels or Path(config["eval_split"]).stem}.json')
    saved, wanted = read_json(path), updates_of(row) * config['n_envs'] * config['unroll']
    if saved.get('env_steps') != wanted or not levels and saved.get('n') != config['eval_games']:
        say(f'{row.name}: evaluating on {levels or config["eval_split"]}')
        line = [sys.executable, *arguments(row), '--eval_only=True', f'--levels={levels}']
        if Popen(line, stdout=DEVNULL).wait() != 0:
            fail(f'{row.name}: its evaluation failed: see above')
    return read_json(path)['solve_rate']


def title_of(name: str) -> str:
    """Return what figures say of the plan: its name, and after a comma how it was changed."""
    parts = [name]
    parts += [f'{residual} residual'] if residual else []
    parts += [f'widths x {width:g}'] if width != 1 else []
    parts += [f'steps x {length:.3g}'] if length != 1 else []
    parts += [f'best {tune.partition("=")[0].replace("_", " ")}s'] if tune else []
    return ', '.join(parts)


def show(rows: list[Row]) -> None:
    """Draw and list what has finished; with `tune`, the seeds that chose nothing."""
    folder = os.path.join(out_dir, plan, f'residual-{residual}' if residual else '')
    into = results or os.path.normpath(folder)
    runs = finished(rows)
    if not runs:
        fail(f'{into}: no run of plan {plan!r} has finished: nothing to show; --run runs them')
    os.makedirs(into, exist_ok=True)
    print(f'{len(runs)} of {len(rows)} runs have finished')
    tuned_name, paths = tune.partition('=')[0], []
    shown = [(row, log) for row, log in runs if row.seed > 1 or not tune]
    if not shown:
        print('one seed per value so far, which chooses it: those to be reported have not run')
        shown = figures.runs_at_best(runs, tuned_name)
    for row in further([row for row in rows if row.seed == 1]) if tune else ():
        print(f'{row.name}: not tried, though the best value is the one beside it')
    reported = {row for row, _ in shown}
    if plan in ALLOCATIONS:  # one residual rule per figure: no setting that tells rows apart
        shown = [(figures.without_setting(row, 'residual'), log) for row, log in shown]
    if figure:
        drawn = [(figures.without_setting(row, tuned_name), log) for row, log in shown]
        cells = [figures.without_setting(row, tuned_name) for row in rows]
        is_bytes = any(row.is_text and config_of(row)['tokenizer'] == 'bytes' for row in rows)
        token = 'byte' if is_bytes else 'token'
        paths += figures.draw_plan(title_of(plan), cells, drawn, token, reference, into)
    if table:
        paths += figures.write_value_tables(shown, reference, into, tuned_name)
        found = {}
        # each budget of a saturation plan has best depths of its own
        models = {row.model for row, _ in shown} if plan in ALLOCATIONS else set()
        for model in sorted(models) if plan not in SATURATION else ():
            if words := best_depths([run for run in shown if run[0].model == model]):
                print(words)
                found[f'best_{model}'] = words
                path = Path(into, f'table_{model}.md')
                write_text(f'{path.read_text()}\n{words}\n', path)
        paths.append(write_runs(runs, reported, found, into))
    if table == 'solve':
        paths += solve_rates(shown, into)
    print('\n'.join(paths))


def solve_rates(shown: list, into: str) -> list[str]:
    """Evaluate the best allocation of each depth, tabulate solve rates, and return the paths."""
    agents = [(row, log) for row, log in shown if not row.is_text]
    points = figures.summarize_cells(agents)
    depths = figures.group_by(points, lambda row: (row.model, row.budget, row.recurrent, row.L))
    best = [figures.best_cell(part) for part in depths.values()]
    if not best:
        fail("table = 'solve': no agent of this plan has finished")
    generated = config_of(by_residual(best[0]))['split'] == 'generated'
    levels = '' if generated else 'unfiltered-test'
    rates = {
        cell: [solve_rate(by_residual(row), levels) for row, _ in agents if row.cell == cell]
        for cell in best
    }
    return figures.write_solve_table(rates, levels, reference, into, tune.partition('=')[0])


def write_runs(runs: list, reported: set[Row], found: dict, into: str) -> str:
    """Write runs.json, which also has the runs that only chose a value, and return its path."""
    records = []
    for row, log in runs:
        saved, last = read_json(Path(folder_of(row), 'config.json')), log[-1]
        record = {
            'name': row.name,
            'model': row.model,
            'reported': row in reported,
            **figures.cell_fields([row])[row],
            **dict(row.more),
            'seed': row.seed,
            'value': run_value(log),
            'updates': last['step'],
            **{name: saved.get(name) for name in ('commit', 'device_name', 'torch')},
            **{name: last[name] for name in ('tokens', 'env_steps', 'seconds') if name in last},
            'over_budget': over_budget(row),
        }
        records.append(record)
    about = {'plan': plan, **found, 'command': shlex.join(['python', *sys.argv])}
    about |= {'drawn_at_commit': commit(), 'runs': records}
    path = os.path.join(into, 'runs.json')
    write_json(about, path)
    return path


# ----------------------------------------------------------------------------- main


def main() -> int:
    """List, emit, run or draw the plan, and return the exit status."""
    config = configure(globals(), quiet=True)
    if emit and (run or figure or table):
        fail(f'emit = {emit!r} prints jobs alone: leave out run, figure and table')
    if emit == 'markdown' and plan:
        fail("emit = 'markdown' prints the table of all figures: leave out the plan")
    if not plan:
        if run or figure or table or emit not in ('', 'markdown'):
            fail(f'plan is empty: choose one of {", ".join(PLANS)}')
        print_paper_table()
        return 0
    need_packages(matplotlib=figure)
    rows = plan_rows()
    if script and len({row.is_text for row in rows}) > 1:
        fail(f'script = {script!r}: plan {plan!r} has agents and language models: --only=model=...')
    if table == 'solve' and all(row.is_text for row in rows):
        fail(f'plan {plan!r} has no Sokoban agents: table = solve is for those')
    if index >= len(rows):
        fail(f'index = {index}: plan {plan!r} has runs 0 to {len(rows) - 1} so far')
    status, lists = 0, not (run or figure or table)
    if emit:
        print_jobs(rows, config)
    elif lists:
        print_plan(rows)
    if lists and tune and rows[-1].seed == 1:
        where = sys.stderr if emit else sys.stdout
        print('other values or seeds follow when all of these have finished', file=where)
    if run:
        status, rows = run_all(rows)
    if status < 2 and (figure or table):
        show(rows)
    return status


if __name__ == '__main__':
    run_script(main)

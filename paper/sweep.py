"""Run the experiments of the paper: every figure and every table is one command.

    python sweep.py                               # list all figures: runs, GPU hours, command
    python sweep.py --plan=sokoban-small          # list a plan's runs: sizes, cost, state, command
    python sweep.py --plan=sokoban-small --run    # start or resume all that are not finished
    python sweep.py --plan=sokoban-small --run --workers=4    # four runs at a time, also on one GPU
    python sweep.py --plan=lm-small --emit=slurm | sbatch      # an array job, one run per job
    python sweep.py --plan=sokoban-small --figure --table      # draw and tabulate finished runs
    python sweep.py --plan=sokoban-small --table=solve         # solve rates of the best allocations
    python sweep.py --plan=lm-small --residual=shared --run    # the other residual rule
    python sweep.py --plan=lm-small --script=my_train.py --run # your copy of the trainer
    python sweep.py config/study_lm.py --run --figure --table  # a study for two CPU cores

A plan compares allocations (L layers, E experts per layer, width d) of one budget W per step. Each
has E = round(W / (L C(d))), where C(d) is the cost of one expert; those with E = 0 are left out.
ConvLSTM: C(d) = 9 (32 + 2d) 4d multiply-adds per cell of the board, and W = C(128), C(256) or
C(1024); in plan sokoban-eight W = 8 C(64). ConvGLU: C(d) = 9 d 2d. Language models: C(d) = forward
FLOPs per token of a block, and W = 16 or 32 blocks of width 768.

Before the first run starts, a sweep checks what would stop it hours later: data and levels (with
`--also=download=True` it downloads these once, not once per worker), disk space for all
checkpoints, and the names, types and model sizes in the settings of every run. It measures a few
updates and prints the expected hours. When three runs in a row fail with the same message, it
starts no more.

One run at a time uses a GPU, or `--gpus_per_run` of them under torchrun. Small agents do not fill a
GPU: with `--workers=8` on two GPUs, each GPU has four runs, which share its memory. On a CPU the
workers share the cores. For language models that share a GPU set `--also=batch_size=...`.

With `--tune` every allocation first runs with seed 1 at each of the values. Where the best value is
the largest or the smallest, a value beyond it (by a factor of two) is added, three times at most.
When all these runs have finished, seeds 2 to n + 1 run at each allocation's best value; figures and
tables show them alone.

Writes into out_dir/PLAN one folder per run, and the figures and tables. A run is finished when its
log has reached the last step. Plans `sokoban` and `lm` show the runs of several budgets.
"""

import functools
import itertools
import json
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import fields
from datetime import timedelta
from math import ceil, inf, nan
from pathlib import Path
from typing import NamedTuple

from configurator import (
    Mistake,
    check_ranges,
    configure,
    first_line,
    read_argument,
    read_config,
    run_script,
)
from files import read_json, write_json, write_text
from common import every
from configurator import read_script

import numpy as np
import torch
from filelock import FileLock

import figures
from common import CheckpointError, Stopper, commit, lock_folder, need_packages, print0, saved_in
from convlstm import AGGREGATIONS, AgentConfig, build_agent
from data_fineweb import VOCAB, find_shards
from figures import TEST_SPLIT, Row, read_log, run_value
from model import RESIDUALS, ModelConfig, build_model
from sokoban import TIME_LIMIT, load_levels, split_files

# -----------------------------------------------------------------------------
# fmt: off
# which runs
plan = ''                      # name of a plan; '': list all figures and tables with their plans
only = ''                      # a part of the plan, as in 'L=1,2 variant=recurrent model=convglu'
residual = ''                  # residual rule of the allocation plans, 'shared' or 'expert'; '':
                               # that of the scripts
seeds = 0                      # seeds per allocation; 0: three for agents, one for language models
tune = ''                      # a setting and values to choose from with seed 1, as in
                               # 'learning_rate=0.02,0.04'
base = ''                      # config file of all runs, or of the recurrent ones; '': the plan's
base_nonrecurrent = ''         # config file of the non-recurrent runs; '': base
also = ''                      # further settings of every run, as in 'compile=True threads=1'; one
                               # that only one trainer has is left out of the other's runs
script = ''                    # your copy of the trainer; '': train_lm.py or train_sokoban.py
width = 1.0                    # multiplies all widths; L and E stay those of the full-size plan
length = 1.0                   # multiplies updates or environment steps
out_dir = 'out/sweep'          # a run's folder is out_dir/PLAN/NAME
# what to do with the runs (by default they are listed)
run = False                    # start or resume all that are not finished
workers = 0                    # runs at a time; 0: one per GPU, or per group of gpus_per_run GPUs;
                               # one on a CPU
gpus_per_run = 1               # with more than 1 each run is started by torchrun
index = -1                     # run only this row of the list (array jobs); -1: all
measure = None                 # measure a few updates first and print the expected hours; None: if
                               # the sweep takes more than half an hour by a rough model
emit = ''                      # print an array job ('slurm'), a command per run ('commands'), or,
                               # without a plan, the table of figures as 'markdown'
figure = False                 # draw the plan's figures
table = None                   # True: mean, variance and N of each allocation; 'solve': also solve
                               # rates of the best ones, on unfiltered-test or on generated levels
reference = ''                 # folder with the paper's tables, to show beside ours
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
    'measure': [None, True, False],
    'emit': ['', 'slurm', 'commands', 'markdown'],
    'table': [None, True, False, 'solve'],
}
RENAMED = {'base_ff': 'base_nonrecurrent'}  # old name: new name
# -----------------------------------------------------------------------------

HERE = os.path.dirname(os.path.abspath(__file__))
LM = 'transformer'

# ---- the plans ----

# Budgets of agents: the widths of experts, and W as a number of experts of the largest width.
AGENT_WIDTHS = {
    'small': (32, 64, 128),
    'medium': (32, 64, 128, 256),
    'large': (64, 128, 256, 512, 1024),
    'eight': (64,),  # ours: the same cost at L = 1, 2, 4 and 8, with no rounding of E
}
PAPER_BUDGETS = ('small', 'medium', 'large')
AGENT_EXPERTS = {'small': 1, 'medium': 1, 'large': 1, 'eight': 8}
# Budgets of language models: W as a number of blocks of width 768.
LM_BLOCKS = {'small': 16, 'medium': 32, 'small-long': 16}
LM_WIDTHS = (384, 768, 1536)

# Plans of allocations: the models and budgets that one figure compares.
ALLOCATIONS = {
    'sokoban-small': [('convlstm', 'small'), ('convglu', 'small')],
    'sokoban-medium': [('convlstm', 'medium'), ('convglu', 'medium')],
    'sokoban-large': [('convlstm', 'large')],
    'sokoban-eight': [('convlstm', 'eight'), ('convglu', 'eight')],
    'lm-small': [(LM, 'small')],
    'lm-small-long': [(LM, 'small-long')],  # window 1,024
    'lm-medium': [(LM, 'medium')],
}
# The two panels of the saturation figure: the same runs as above, all budgets together.
SATURATION = {
    'sokoban': [(model, budget) for part in PAPER_BUDGETS
                for model, budget in ALLOCATIONS[f'sokoban-{part}']],
    'lm': [(LM, 'small'), (LM, 'medium')],
}  # fmt: skip
ALLOCATIONS |= SATURATION

# Plans that compare the values of one setting, in some cells (model, recurrent, L, E, d).
AGGREGATION_CELLS = [('convlstm', True, 1, 4, 128), (LM, True, 2, 8, 768)]
RESIDUAL_CELLS = [  # several experts, because with one expert both rules are the same
    *((LM, False, L, 16 // L, 768) for L in (2, 4, 8)),
    (LM, False, 16, 4, 384),  # here 'expert' scales the residual stream most, by sqrt(4)^16
    *(('convglu', recurrent, 2, 2, 128) for recurrent in (True, False)),
    *(('convglu', recurrent, 8, 2, 32) for recurrent in (True, False)),
]
ABLATIONS = {  # {plan: (setting, values, cells)}
    'aggregation': ('aggregation', list(AGGREGATIONS), AGGREGATION_CELLS),
    'communication': ('radius', list(range(8)), [('convlstm', True, 2, 8, 32)]),
    'share-kv': ('share_kv', [True, False], [(LM, True, L, 16 // L, 768) for L in (1, 2, 4)]),
    'residual': ('residual', list(RESIDUALS), RESIDUAL_CELLS),
    'init-b': ('init_b', ['one', 'sqrt_experts'], [(LM, True, L, 16 // L, 768) for L in (1, 2)]),
}

# Plans in which the cost grows with L and E, for all three models: {plan: (depths, experts)}.
SCALING = {
    'scaling': ((1, 2, 4, 8), (1, 2, 4, 8, 16, 32, 64)),
    'scaling-reduced': ((1, 2, 4), (1, 4, 16)),  # some of the same runs, with one seed
}
SCALING_WIDTHS = {'convlstm': 64, 'convglu': 64, LM: 384}

PLANS = [*ALLOCATIONS, *ABLATIONS, *SCALING]

# ---- the paper's figures and tables, each by one command ----

PROBED = 'model=convlstm variant=recurrent d=256 L=1,2,4,8'


class Entry(NamedTuple):
    """One figure or table, and what makes it."""

    title: str
    plan: str  # '' if it needs no sweep
    only: str = ''  # the part of the plan that it needs
    show: str = '--figure --table'  # arguments that draw or tabulate the runs
    then: str = ''  # the command that follows the sweep, or makes the entry without a sweep
    residual: str = ''  # residual rule of the plan's allocations; '': that of the scripts


REFERENCE = '--reference=results/paper'
WITH_REFERENCE = f'--figure --table {REFERENCE}'
PAPER = [
    *(
        Entry(f'Sokoban, {budget} budget', f'sokoban-{budget}', 'model=convlstm', WITH_REFERENCE)
        for budget in PAPER_BUDGETS
    ),
    Entry('Saturation, Sokoban panel', 'sokoban', 'model=convlstm', WITH_REFERENCE),
    Entry('Solve rates beside published agents', 'sokoban', 'model=convlstm',
          f'--table=solve {REFERENCE}'),
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
    Entry('Planning probes', 'sokoban-large', PROBED, show='',
          then='python probe_sokoban.py config/probe_large.py --download'),
    Entry('Latency per token', '', then='python bench.py --suite=decode'),
    Entry('Training throughput on four GPUs', '',
          then='torchrun --standalone --nproc_per_node=4 bench.py --suite=train'),
    Entry('Ours: residual rule', 'residual'),
    Entry('Ours: FineWeb, small budget, shared residual', 'lm-small', residual='shared'),
    Entry('Ours: b at the start', 'init-b'),
    Entry('Ours: agents, eight experts at every depth', 'sokoban-eight'),
]  # fmt: skip

# ---- constants of a sweep ----

SAME_RUN = (  # a run with other values of these settings is still the same run
    'out_dir resume overwrite eval_only levels best plot tensorboard wandb wandb_project '
    'eval_interval batch_size device dtype compile graphs path mode threads reuse download'
).split()
AT_LEAST_1 = ('max_iters', 'eval_interval', 'total_steps', 'n_envs', 'unroll')  # for modeled hours
MOST_COST = 1.5  # language models above 1.5 W are left out (E is rounded, so some exceed W)
MOST_TUNING = 3  # number of values that `tune` may add beyond an edge
EQUAL_FAILURES = 3  # failures in a row with the same message after which no further run starts
UNUSABLE = {
    'other': 'a run with other settings or of another script',
    'short': 'a run that logged no return: it has fewer steps per board than time_limit',
    'damaged': 'a log that cannot be used',
}
POLL = 0.2  # seconds between checks of the runs
REPORT = 10.0  # seconds between lines about them
DRAWS = 10000  # of the bootstrap

# A model of one H100-class GPU, no measurement; results/modeled/speed.md has a finer one.
PRODUCT_RATE = 500e12  # FLOP/s of a language model's products, bf16
CONVOLUTION_RATE = 150e12  # FLOP/s of an agent's convolutions
KERNEL_SECONDS = 2e-6  # of one kernel in a CUDA graph
LM_KERNELS = 42  # kernels per token and layer, forward and backward, compiled: counted
# Kernels per environment step, and per environment step and layer: chosen so that
# (L, E, d) = (1, 1, 128) and (4, 1, 64) reach the planned 55,600 and 27,800 environment steps/s
# (results/paper/speed.csv).
AGENT_KERNELS = (120, 80)
MICRO_BATCH = 32768  # tokens per micro-batch of a GPU
CPU_RATE = 50e9  # FLOP/s of a CPU core: only to tell short sweeps from long ones
LONG_SWEEP_HOURS = 0.5  # longer sweeps measure a few updates first


# ----------------------------------------------------------------------------- settings and cost


def script_of(row: Row) -> str:
    """Return the path of the script that trains a row."""
    if not script:
        return os.path.join(HERE, row.script)
    path = script if os.path.exists(script) else os.path.join(HERE, script)
    if not os.path.exists(path):
        raise Mistake(f'script = {script!r}: there is no such file')
    return path


@functools.cache
def defaults_of(path: str) -> dict:
    """Return the settings of a script with their defaults."""
    return read_script(path)[0]


@functools.cache
def base_config(model: str, recurrent: bool, budget: str) -> tuple[dict, list[str]]:
    """Return the settings that the runs of a model have in common (the script's defaults, a config
    file, those of `also` that the script has), and a list that holds the config file, if there is
    one.

    The config file is looked for in the current folder and beside sweep.py. Agents need none,
    because the defaults of train_sokoban.py are the paper's."""
    path = base if recurrent else (base_nonrecurrent or base)
    if not path and model == LM:
        kind = '' if recurrent else '_nonrecurrent'
        path = f'config/{budget.replace("-", "_")}{kind}_L2.py'
    if path and not os.path.exists(path) and os.path.exists(os.path.join(HERE, path)):
        path = os.path.relpath(os.path.join(HERE, path))
    defaults = defaults_of(script_of(Row(model, recurrent, budget, 1, 1, 1)))
    config = dict(defaults)
    if path:
        read_config(path, config, defaults)
    for name, setting in settings_in_also().items():
        if name in defaults:  # a plan of agents and language models has two scripts
            read_argument(f'--{setting}', config, defaults, f'also = {also!r}')
    check_ranges(config, {name: (1, inf) for name in AT_LEAST_1 if name in config})
    return config, [path] if path else []


def settings_in_also() -> dict[str, str]:
    """Return the settings of `also`, as {'threads': 'threads=1'}."""
    return {setting.partition('=')[0]: setting for setting in also.split()}


def check_also(rows: list[Row]) -> None:
    """End the script if `also` has a setting that none of the rows' scripts has."""
    for name in settings_in_also():
        if not any(name in config_of(row) for row in rows):
            raise Mistake(f'also = {also!r}: no trainer of plan {plan!r} has a setting {name!r}')


def settings_of(row: Row) -> dict:
    """Return the settings on the command line of a run."""
    config, _ = base_config(row.model, row.recurrent, row.budget)
    settings = {} if row.is_text else {'arch': row.model}
    settings |= {
        'recurrent': row.recurrent,
        'n_layer': row.L,
        'n_expert': row.E,
        'n_embd': row.d,
        'seed': row.seed,
        **dict(row.overrides),
    }
    names_in_also = [name for name in settings_in_also() if name in config]
    if clash := [name for name in names_in_also if name in settings]:
        raise Mistake(f'also = {also!r}: plan {plan!r} sets {", ".join(clash)} itself')
    if length != 1:
        names = ('max_iters', 'warmup_iters', 'eval_interval') if row.is_text else ('total_steps',)
        settings |= {name: max(1, round(config[name] * length)) for name in names}
    if unknown := [name for name in settings if name not in config]:
        raise Mistake(
            f'plan {plan!r} sets {", ".join(unknown)}, which {script_of(row)} does not have'
        )
    return {name: config[name] for name in names_in_also} | settings


def config_of(row: Row) -> dict:
    """Return all settings of a run."""
    return base_config(row.model, row.recurrent, row.budget)[0] | settings_of(row)


def model_settings(row: Row) -> dict:
    """Return the settings of a run that define its model: those that are fields of ModelConfig or
    AgentConfig, without the ones that change no weight."""
    config = config_of(row)
    names = {f.name for f in fields(ModelConfig if row.is_text else AgentConfig)}
    names -= {'mode', 'dtype'}
    return {name: x for name, x in config.items() if name in names}


class Cost(NamedTuple):
    """What a run costs per token, or per environment step of one board."""

    core: float  # of the layers, in the unit of budgets: forward FLOPs, or multiply-adds
    forward: float  # forward FLOPs of the whole model
    params: int
    state: int  # numbers in the recurrent state of all streams or boards, which a checkpoint holds


def cost(row: Row) -> Cost:
    """Return the cost of a run. It does not depend on the seed."""
    return cost_of_cell(row._replace(seed=1))


@functools.cache
def cost_of_cell(row: Row) -> Cost:
    """Return the cost of a row with seed 1, from a model on the device 'meta'. Ends the script if
    the sizes do not fit together."""
    config = config_of(row)
    sizes = model_settings(row)
    try:
        with torch.device('meta'):
            if not row.is_text:
                agent = build_agent(AgentConfig(**sizes))
                state = sum(x.numel() for x in agent.init_state(config['n_envs']))
                macs = float(agent.nominal_macs())
                params = agent.num_params()['total']
                return Cost(core=macs, forward=2 * macs, params=params, state=state)
            c = ModelConfig(**sizes, vocab_size=VOCAB[config['tokenizer']])
            model = build_model(c, row.recurrent)
            flops = model.flops_per_token()
            cache_heads = c.n_kv_head * (1 if c.share_kv else c.n_expert)
            cache = c.n_layer * cache_heads * c.window * c.head_dim
            streams = config['tokens_per_step'] // config['block_size'] if row.recurrent else 0
            return Cost(
                core=flops['core'],
                forward=sum(flops.values()),
                params=model.num_params()['total'],
                state=streams * (c.n_embd + 2 * cache),  # s, keys, values
            )
    except (ValueError, KeyError, RuntimeError, OverflowError) as error:
        raise Mistake(f'plan {plan!r}, {row.name}: {first_line(error)}; check base, also and width')


def scale_width(d: int) -> int:
    """Return the width d of a full-size plan multiplied by `width`."""
    return max(1, round(d * width))


def budget_of(model: str, recurrent: bool, budget: str, full_size: bool = False) -> float:
    """Return W in the unit of Cost.core, of the plan at its full size or multiplied by `width`."""
    if model == LM:
        n, d = LM_BLOCKS[budget], 768
    else:
        n, d = AGENT_EXPERTS[budget], max(AGENT_WIDTHS[budget])
    if not full_size:
        d = scale_width(d)
    return n * cost(Row(model, recurrent, budget, 1, 1, d)).core


def budget_ratio(row: Row) -> float:
    """Return the cost of a run as a multiple of its budget."""
    return cost(row).core / budget_of(row.model, row.recurrent, row.budget)


def updates_of(row: Row) -> int:
    """Return the number of updates of a run, the `step` of its last log line."""
    config = config_of(row)
    if row.is_text:
        return config['max_iters']
    return ceil(config['total_steps'] / (config['n_envs'] * config['unroll']))


def training_flops(row: Row) -> float:
    """Return the FLOPs of a run's updates, the backward counted as two forwards."""
    config = config_of(row)
    per_update = config['tokens_per_step'] if row.is_text else config['n_envs'] * config['unroll']
    return 3 * cost(row).forward * per_update * updates_of(row)


def modeled_hours(row: Row) -> float:
    """Return the hours that a run would take on one GPU, by a model and not by a measurement.

    Products run at a constant rate, and kernels that wait for each other (those of successive
    layers, tokens and environment steps) take a constant time each. Validation of a language model
    is included, compilation and the evaluation of agents are not."""
    config, updates = config_of(row), updates_of(row)
    if row.is_text:
        # layers that run one after another in an update: layers x micro-batches x tokens
        in_turn = max(1, config['tokens_per_step'] // MICRO_BATCH) * row.L
        in_turn *= config['block_size'] if row.recurrent else 1
        validations = updates // config['eval_interval'] + 1
        validation = validations * config['val_tokens'] * cost(row).forward
        product_seconds = (training_flops(row) + validation) / PRODUCT_RATE
        kernels = updates * in_turn * LM_KERNELS
    else:
        product_seconds = training_flops(row) / CONVOLUTION_RATE
        kernels = updates * config['unroll'] * (AGENT_KERNELS[0] + AGENT_KERNELS[1] * row.L)
    return (product_seconds + kernels * KERNEL_SECONDS) / 3600


# ----------------------------------------------------------------------------- rows of a plan


def cells_of(name: str, rule: str) -> list[Row]:
    """Return the rows with seed 1 of plan `name`, with a residual rule as in the setting
    `residual`."""
    if name in SCALING:
        depths, experts = SCALING[name]
        return [
            Row(model, recurrent, 'small', L, E, scale_width(d))
            for model, d in SCALING_WIDTHS.items()
            for recurrent in (True, False)
            for L in depths
            for E in experts
        ]
    if name in ABLATIONS:
        setting, values, cells = ABLATIONS[name]
        return [
            Row(model, recurrent, 'small', L, E, scale_width(d), overrides=((setting, x),))
            for model, recurrent, L, E, d in cells
            for x in values
        ]
    rows = []
    for (model, budget), recurrent in itertools.product(ALLOCATIONS[name], (True, False)):
        # at the full size, so that `width` does not change L and E
        W = budget_of(model, recurrent, budget, full_size=True)
        most = MOST_COST * W if model == LM else inf
        depths = (1, 2, 4, 8, 16, 32) if (model, budget) == (LM, 'medium') else (1, 2, 4, 8, 16)
        widths = LM_WIDTHS if model == LM else AGENT_WIDTHS[budget]
        for L, d in itertools.product(depths, widths[::-1]):
            one_expert = Row(model, recurrent, budget, 1, 1, d)
            expert_cost = cost(one_expert).core
            E = round(W / (L * expert_cost))  # 0 for exactly half an expert: Python rounds to even
            if 0 < L * E * expert_cost <= most:
                rows.append(one_expert._replace(L=L, E=E, d=scale_width(d)))
    rows = [with_residual(row, rule) for row in rows]
    return list(dict.fromkeys(rows))  # `width` may make two widths equal


def with_residual(row: Row, rule: str) -> Row:
    """Return an allocation with the residual rule as a further setting; unchanged if the rule is ''
    or does not matter: it matters to a ConvGLU or a non-recurrent language model with several
    experts."""
    matters = row.E > 1 and (row.model == 'convglu' or row.is_text and not row.recurrent)
    if not rule or not matters:
        return row
    return row._replace(overrides=(('residual', rule), *row.overrides))


def tuned_setting() -> str:
    """Return the name of the setting that `tune` varies, '' without `tune`."""
    return tune.partition('=')[0]


def add_tuned_values(rows: list[Row]) -> list[Row]:
    """Return each row with each value of `tune`."""
    name, _, values = tune.partition('=')
    if not name or not values:
        raise Mistake(
            f"tune = {tune!r}: expected a setting and its values, as in 'learning_rate=0.02,0.04'"
        )
    result = []
    for row in rows:
        if name in settings_of(row) or name in SAME_RUN:
            raise Mistake(
                f'tune: {name} cannot be tuned: plan {plan!r} sets it, or it changes no result'
            )
        config, _ = base_config(row.model, row.recurrent, row.budget)
        for text in values.split(','):
            found = {}
            read_argument(f'--{name}={text}', found, config, f'tune = {tune!r}')
            result.append(row._replace(overrides=(*row.overrides, (name, found[name]))))
    return list(dict.fromkeys(result))


def winners(rows: list[Row]) -> list[Row]:
    """Return for each allocation the row of seed 1 with the best value of `tune`; none until all
    rows have ended."""
    if not {state_of(row) for row in rows} <= {'done', 'failed'}:
        return []
    return [row for row, _ in figures.runs_at_best(finished(rows), tuned_setting())]


def rows_beyond_edges(rows: list[Row]) -> list[Row]:
    """Return the rows to try next: for each allocation whose best value is the largest that was
    tried, twice this value; if it is the smallest, half of it. Nothing is added where the next
    value that was tried is less than a factor of two away, or where values are not positive
    floats."""
    name = tuned_setting()
    result = []
    for row in winners(rows):
        cell = figures.without_setting(row, name)
        best = dict(row.overrides)[name]
        same_cell = [other for other in rows if figures.without_setting(other, name) == cell]
        tried = sorted(dict(other.overrides)[name] for other in same_cell)
        if not isinstance(best, float) or len(tried) < 2 or tried[0] <= 0:
            continue
        if best == tried[-1] and best >= 2 * tried[-2]:
            result.append(cell._replace(overrides=(*cell.overrides, (name, 2 * best))))
        elif best == tried[0] and best <= tried[1] / 2:
            result.append(cell._replace(overrides=(*cell.overrides, (name, best / 2))))
    return result


# whether a variant of `only` is recurrent
VARIANTS = {'feedforward': False, 'nonrecurrent': False, 'non-recurrent': False, 'recurrent': True}


def fulfills(row: Row, key: str, values: str) -> bool:
    """Return whether a row fulfills a condition of `only`, such as key 'L' and values '1,2'."""
    if key == 'variant':
        return row.recurrent in [VARIANTS.get(x) for x in values.split(',')]
    known = {name: str(getattr(row, name)) for name in ('model', 'budget', 'L', 'E', 'd')}
    known |= {name: str(x) for name, x in row.overrides}
    return known.get(key) in values.split(',')


def select_rows(rows: list[Row], conditions: str, name: str) -> list[Row]:
    """Return the rows of plan `name` that fulfill all conditions, such as 'L=1,2 d=768'."""
    for condition in conditions.split():
        key, _, values = condition.partition('=')
        matching = [row for row in rows if fulfills(row, key, values)]
        if not matching:
            keys = {'model', 'variant', 'budget', 'L', 'E', 'd'}
            keys |= {setting for row in rows for setting, _ in row.overrides}
            if key not in keys:
                raise Mistake(f'only = {only!r}: {key!r} is none of {", ".join(sorted(keys))}')
            found = [getattr(row, key, dict(row.overrides).get(key)) for row in rows]
            possible = ', '.join(dict.fromkeys(map(str, found)))
            raise Mistake(f'only = {only!r}: leaves none of plan {name!r}: {key} can be {possible}')
        rows = matching
    return rows


def seeds_of(row: Row, name: str) -> int:
    """Return the number of seeds per allocation of plan `name`."""
    return seeds or (1 if row.is_text or name == 'scaling-reduced' else 3)


def plan_rows(name: str = '', conditions: str = '', rule: str = '') -> list[Row]:
    """Return all runs of a plan that are known by now: first every allocation with seed 1, then
    with seed 2, and so on. Without a name this is the plan of the settings, with `only` and
    `residual`."""
    if not name:
        name = plan
        conditions = only
        rule = residual
    if name not in PLANS:
        raise Mistake(f'plan = {name!r}: expected one of {", ".join(PLANS)}')
    cells = select_rows(cells_of(name, rule), conditions, name)
    repeated = cells  # those that run with further seeds
    if tune:
        cells = add_tuned_values(cells)
        for _ in range(MOST_TUNING):
            cells = cells + rows_beyond_edges(cells)
        repeated = winners(cells)
    # seed 1, which chooses a tuned value, does not count
    last_seed = {row: seeds_of(row, name) + (1 if tune else 0) for row in cells}
    rows = list(cells)
    for seed in range(2, max(last_seed.values()) + 1):
        rows += [row._replace(seed=seed) for row in repeated if seed <= last_seed[row]]
    return rows


# ----------------------------------------------------------------------------- the state of a run


def folder_of(row: Row, name: str = '') -> str:
    """Return the folder of a run of plan `name`, by default that of the settings. Plans that share
    runs share their folders."""
    name = name or plan
    if name in SATURATION:
        name = f'{name}-{row.budget}'
    folder = os.path.join(out_dir, 'scaling' if name in SCALING else name, row.name)
    former = folder.replace('_nonrecurrent_', '_feedforward_')  # the name until version 0.2.0
    if not row.recurrent and os.path.exists(former) and not os.path.exists(folder):
        return former
    return folder


class Progress(NamedTuple):
    """The progress of a run by the files in its folder."""

    # 'done'; 'failed'; 'other': the folder holds a run with other settings or of another script;
    # 'short': finished without a return; 'damaged': a complete log without a value, or an unusable
    # log and no checkpoint from which a resumed run would repair it; '': can start or resume
    state: str
    fraction: float  # of the updates that are done
    seconds: float  # training time of these updates


def is_another_run(row: Row, saved: dict) -> bool:
    """Return whether a config.json, `saved`, is that of another run. For a setting that the file
    lacks, because the script got it later, the default counts; for a missing `script`, the standard
    one."""
    path = script_of(row)
    wanted = {**config_of(row), 'script': os.path.basename(path)}
    saved = {**defaults_of(path), 'script': row.script, **saved}
    wanted, saved = json.loads(json.dumps([wanted, saved]))  # tuples become lists
    return any(saved[name] != x for name, x in wanted.items() if name not in SAME_RUN)


def time_limit_of(row: Row) -> int:
    """Return the time limit of an agent's episodes: TIME_LIMIT if the script, a copy of an older
    trainer, has no such setting."""
    return config_of(row).get('time_limit', TIME_LIMIT)


def is_short(row: Row) -> bool:
    """Return whether an agent's run logs no return, because it ends before every board has ended
    an episode."""
    return not row.is_text and updates_of(row) * config_of(row)['unroll'] < time_limit_of(row)


def progress_of(row: Row, name: str = '') -> Progress:
    """Return the progress of a run of plan `name`, by default that of the settings."""
    folder = Path(folder_of(row, name))
    log = [{'step': 0}]
    saved = read_json(folder / 'config.json')
    state = 'failed' if (folder / 'failed.json').exists() else ''
    try:
        log += read_log(folder)
    except FileNotFoundError:
        pass
    except Mistake:
        state = state if saved_in(folder) else 'damaged'
    fraction = min(1.0, log[-1]['step'] / updates_of(row))
    if saved and is_another_run(row, saved):
        state = 'other'
    elif fraction == 1 and run_value(log) is not None:
        state = 'done'
    elif fraction == 1:
        state = 'short' if is_short(row) else 'damaged'
    return Progress(state=state, fraction=fraction, seconds=log[-1].get('seconds') or 0.0)


def state_of(row: Row) -> str:
    """Return the state of a run, see Progress."""
    return progress_of(row).state


# ----------------------------------------------------------------------------- lists and tables


def arguments(row: Row) -> list[str]:
    """Return script, config files and settings of a run, with paths from the current folder."""
    settings = settings_of(row)
    config = config_of(row)
    if config.get('init_from'):  # otherwise the trainer would take unset sizes from that model
        about = {name: config[name] for name in ('arch', 'tokenizer') if name in config}
        settings = about | model_settings(row) | settings
    flags = [f'--{name}={x}' for name, x in settings.items()]
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
    width_of_names = max(len(row.name) for row in rows)
    print(f'cost in {" or ".join(units)}, layers only; hours of one GPU: modeled, not measured')
    titles = f'{"cost":>10} {"cost/W":>6} {"parameters":>13} {"hours":>7} {"state":>7}'
    print(f'  # {"run":{width_of_names}} {titles} command')
    for i, row in enumerate(rows):
        progress = progress_of(row)
        numbers = f'{cost(row).core / 1e6:10,.1f} {budget_ratio(row):6.2f} {cost(row).params:13,}'
        state = progress.state or f'{progress.fraction:.0%}'
        status = f'{modeled_hours(row):7.2f} {state:>7}'
        print(f'{i:3} {row.name:{width_of_names}} {numbers} {status} {shlex.join(command(row))}')
    print(f'{len(rows)} runs, {sum(map(modeled_hours, rows)):,.1f} GPU hours (modeled)')


def entry_command(entry: Entry) -> str:
    """Return the command line that makes a figure or table, runs included."""
    line = ''
    if entry.plan:
        part = f' --only={shlex.quote(entry.only)}' if entry.only else ''
        rule = f' --residual={entry.residual}' if entry.residual else ''
        line = f'python sweep.py --plan={entry.plan}{part}{rule} --run {entry.show}'.strip()
    return ' && '.join(filter(None, (line, entry.then)))


def paper_table() -> list[dict]:
    """Return one line per figure and table of the paper: its command, the number of runs, their
    modeled GPU hours and their state."""
    lines = []
    for entry in PAPER:
        runs = hours = ''
        state = 'see the command'
        if entry.plan:
            rows = plan_rows(entry.plan, entry.only, entry.residual)
            runs = str(len(rows))
            hours = f'{sum(map(modeled_hours, rows)):,.0f}'
            done = sum(progress_of(row, entry.plan).state == 'done' for row in rows)
            state = f'{done} of {len(rows)} done' if done else 'not run'
        lines.append({
            'figure or table': entry.title,
            'command': entry_command(entry),
            'runs': runs,
            'GPU hours': hours,
            'state': state,
        })  # fmt: skip
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
    columns = ['figure or table', 'runs', 'GPU hours', 'state', 'command']  # the widest one last
    widths = {name: max(len(name), *(len(line[name]) for line in lines)) for name in columns}
    headings = {name: name for name in columns}
    for line in [headings, *lines]:
        texts = [
            f'{line[name]:{">" if name in ("runs", "GPU hours") else "<"}{widths[name]}}'
            for name in columns
        ]
        print('  '.join(texts).rstrip())
    print(
        '\nGPU hours of one H100-class GPU: modeled, not measured; shared runs count in every row.'
    )
    print(f'Plans: {", ".join(PLANS)}; --plan=NAME lists the runs of one.')
    print(
        'Data: python data_fineweb.py --pretokenized=14, python sokoban.py --download --split=NAME'
    )
    print(f'for unfiltered-train, unfiltered-valid and (solve rates, probes) {TEST_SPLIT}.')


def print_jobs(rows: list[Row], config: dict) -> None:
    """Print the plan for a cluster: each job runs this script on one row, with this Python."""
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
# a job saves two minutes before its time limit: submit this again, and unfinished runs resume
cd {shlex.quote(os.getcwd())} && exec {line} --index="$SLURM_ARRAY_TASK_ID"''')


# ----------------------------------------------------------------------------- before a sweep


def check_data(rows: list[Row]) -> None:
    """Check that the shards and levels of all runs and of the table of solve rates exist, and
    download the levels that the runs would download. Raises Mistake or OSError, or ends the script,
    if any are missing."""
    configs = [config_of(row) for row in rows]
    shards = {(c['data_dir'], c['tokenizer']) for c in configs if 'data_dir' in c}
    for data_dir, tokenizer in sorted(shards):
        for split in ('train', 'val'):
            find_shards(data_dir, split, tokenizer)
    splits = set()
    for c in configs:
        if 'levels_dir' not in c:
            continue
        names = [c['split'], c['eval_split']]
        if table == 'solve' and c['split'] != 'generated':
            names.append(TEST_SPLIT)
        for split in names:
            if split != 'generated' and not os.path.isfile(split):
                splits.add((c['levels_dir'], split, c['download']))
    for folder, split, download in sorted(splits):
        if not split_files(folder or 'data/boxoban', split):
            load_levels(folder, split, download)  # downloads them, or raises Mistake


def checkpoint_bytes(row: Row) -> tuple[int, int]:
    """Return the size of a run's full checkpoint, with weights, moments and the state, and of its
    best one, with weights alone. For a language model this is a little too small: all its weights
    count as Muon's matrices, with one moment, though AdamW has two for embedding and head."""
    params, state = cost(row).params, cost(row).state
    is_bf16 = row.is_text and torch.cuda.is_available()  # an agent's is float32
    bytes_of_state = 2 if is_bf16 else 4  # per number
    moments = 1 if row.is_text else 2  # of Muon, of Adam
    return 4 * (1 + moments) * params + bytes_of_state * state, 4 * params


def check_disk(rows: list[Row], at_a_time: int) -> None:
    """End the script if the disk has no room for the checkpoints of all runs: each keeps two full
    ones and its best one, and while it saves there is a third full one."""
    need = 0
    for row in rows:
        full, best = checkpoint_bytes(row)
        files = Path(folder_of(row)).glob('ckpt_*.pt')
        present = sum(file.stat().st_size for file in files)
        need += max(0, 2 * full + best - present)
    need += at_a_time * max((checkpoint_bytes(row)[0] for row in rows), default=0)
    place = Path(out_dir).absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if need > free:
        needs = f'{len(rows)} runs write at least {need / 1e9:,.1f} GB of checkpoints'
        has = f'{free / 1e9:,.1f} GB are free'
        raise Mistake(
            f'{out_dir}: {needs}, and {has}: choose another out_dir, or a part of the plan (only)'
        )


def measured_update(row: Row, gpu: str, at_a_time: int) -> float:
    """Run a few updates of a run in a temporary folder, started as the sweep starts it but with no
    other run beside it, and return the seconds of one. Ends the script, with the message of the
    run, if it fails."""
    config = config_of(row)
    changes = {
        'resume': False,
        'overwrite': True,
        'plot': False,
        'tensorboard': False,
        'wandb': False,
        'log_interval': 1,
        'eval_interval': 10**6,
        'eval_games': 1,
    }
    if row.is_text:
        changes |= {'max_iters': 8, 'val_tokens': 2 * config['val_streams']}
    else:
        changes |= {'total_steps': 8 * config['n_envs'] * config['unroll'], 'n_levels': 100}
    with tempfile.TemporaryDirectory() as folder, open(f'{folder}/stdout.txt', 'w') as out:
        line = process_command(row)
        line += [f'--{name}={x}' for name, x in changes.items() if name in config]
        line += [f'--out_dir={folder}/run']
        output = {'stdin': subprocess.DEVNULL, 'stdout': out, 'stderr': subprocess.STDOUT}
        if subprocess.run(line, env=environment(gpu, at_a_time), **output).returncode != 0:
            raise Mistake(f'{row.name}: its first updates failed: {last_error(out.name)}')
        seconds = [record.get('seconds') for record in read_log(f'{folder}/run')]
    seconds = [x for x in seconds if x is not None]
    steps = [later - earlier for earlier, later in itertools.pairwise(seconds)]
    return statistics.median(steps[-3:]) if steps else nan  # the first ones compile


def print_expected(rows: list[Row], gpus: list[str]) -> None:
    """Measure updates of one run of each model and variant, and print the hours that all runs would
    take here with one worker for each of `gpus`. The times of the other runs follow from it by the
    ratios of modeled hours."""
    hours = 0.0
    at_a_time = min(len(gpus), len(rows))
    rows = sorted(rows, key=lambda row: (row.model, row.recurrent))
    for _, group in itertools.groupby(rows, key=lambda row: (row.model, row.recurrent)):
        group = sorted(group, key=modeled_hours)
        middle = group[len(group) // 2]
        seconds = measured_update(middle, gpus[0], len(gpus))
        print0(f'    measured, one run alone: {middle.name} {seconds:.3g} s per update')
        ratio = seconds * updates_of(middle) / 3600 / modeled_hours(middle)
        hours += sum(ratio * modeled_hours(row) * (1 - progress_of(row).fraction) for row in group)
    line = f'expected: {hours:,.1f} hours one after another'
    if at_a_time > 1:
        line += f', {hours / at_a_time:,.1f} hours with {at_a_time} at a time'
        if len(set(gpus[:at_a_time])) < at_a_time:  # several share a GPU, or the cores
            line += ' if the runs do not slow each other down'
    print0(line)


def check_before(rows: list[Row], gpus: list[str]) -> None:
    """Check what would stop a sweep after hours, and print the expected hours of a long one. rows:
    those that are not finished. gpus: those of the workers."""
    try:
        check_data(rows)
    except (Mistake, OSError) as error:
        raise Mistake(error)
    check_disk(rows, len(gpus))
    hours = sum(map(modeled_hours, rows))
    if not torch.cuda.is_available():
        hours = sum(map(training_flops, rows)) / CPU_RATE / 3600
    is_long = hours > LONG_SWEEP_HOURS and index < 0
    measures = is_long if measure is None else measure
    if measures:
        print_expected(rows, gpus)


# ----------------------------------------------------------------------------- running


def devices() -> list[str]:
    """Return the value of CUDA_VISIBLE_DEVICES for each worker, '' on the CPU."""
    n, k = torch.cuda.device_count(), gpus_per_run
    if n < k and (n > 0 or k > 1):
        raise Mistake(f'gpus_per_run = {k}: there are {n} GPUs here')
    if n == 0:
        return [''] * (workers or 1)
    names = os.environ.get('CUDA_VISIBLE_DEVICES', ','.join(map(str, range(n)))).split(',')[:n]
    groups = [','.join(names[i : i + k]) for i in range(0, n - k + 1, k)]
    first = max(index, 0)  # jobs of one row each on the same machine spread over its GPUs
    return [groups[(first + i) % len(groups)] for i in range(workers or len(groups))]


def process_command(row: Row) -> list[str]:
    """Return the command that starts a run with this Python."""
    launcher, *line = command(row)
    module = ['-m', 'torch.distributed.run'] if launcher == 'torchrun' else []
    return [sys.executable, *module, *line]


def environment(gpu: str, at_a_time: int) -> dict[str, str]:
    """Return the environment of a run on `gpu`, one of `at_a_time` that share the CPU cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()
    env = {'OMP_NUM_THREADS': str(max(1, cores // (at_a_time * gpus_per_run))), **os.environ}
    if gpu:
        env['CUDA_VISIBLE_DEVICES'] = gpu
    return env


class Running(NamedTuple):
    """A run whose process has started."""

    process: subprocess.Popen
    lock: FileLock  # of its folder, against another sweep
    gpu: str
    started: float


def start(row: Row, gpu: str, at_a_time: int) -> Running | None:
    """Start or resume a run on `gpu`, one of `at_a_time` that share the CPU cores. Returns None if
    another process is at work on it, or has finished it."""
    folder = Path(folder_of(row))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        lock = lock_folder(folder, '.lock')
    except CheckpointError:
        return None
    try:
        lock_folder(folder).release()  # fails if a run whose sweep was killed is still at work
    except CheckpointError:
        lock.release()
        return None
    if state_of(row) in ('done', *UNUSABLE):  # under the lock: it may have changed
        lock.release()
        return None
    start_mode = '--resume=True' if saved_in(folder) else '--overwrite=True'
    with open(folder / 'stdout.txt', 'ab') as out:
        out.write(b'---- started\n')
        out.flush()
        process = subprocess.Popen(
            [*process_command(row), start_mode],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment(gpu, at_a_time),
            start_new_session=True,  # ctrl-C reaches this process alone, which passes it on
        )
    return Running(process=process, lock=lock, gpu=gpu, started=time.time())


def last_error(path: str | os.PathLike) -> str:
    """Return the last error that a run printed since it was last started, or else its last line."""
    text = Path(path).read_text(errors='replace').rpartition('---- started\n')[2]
    lines = [re.sub(r'^\[rank\d+\]: ', '', line.strip()) for line in text.splitlines()]
    lines = [line for line in lines if line] or ['it printed nothing']
    errors = [line for line in lines if re.match(r'(error: |[\w.]*(Error|Exception)\b)', line)]
    # Under torchrun other ranks and the launcher report a failure as well, without its cause.
    reports = ('another rank died', 'ChildFailedError')
    causes = [line for line in errors if not any(text in line for text in reports)]
    return (causes or errors or lines)[-1][:300]


def outcome(row: Row, status: int) -> str:
    """Return '' if an ended run is done, or else why it failed, and write that to failed.json."""
    folder = Path(folder_of(row))
    state = state_of(row)
    if status == 0 and state == 'done':
        (folder / 'failed.json').unlink(missing_ok=True)  # of an earlier attempt
        return ''
    if status == 0 and state in UNUSABLE:
        message = UNUSABLE[state]
    else:
        message = last_error(folder / 'stdout.txt')
    record = {'exit': status, 'message': message, 'command': shlex.join(command(row))}
    try:
        write_json(record, folder / 'failed.json')
    except OSError as error:  # the disk may be full
        print0(f'{folder}: {first_line(error)}')
    return f'FAILED (exit status {status}): {message}'


def kind_of_failure(row: Row, message: str) -> str:
    """Return the message of a failure without folder and numbers, which differ between runs; ''
    for none."""
    return re.sub(r'\d[\d.,e+-]*', 'N', message.replace(folder_of(row), 'RUN'))


def remaining(todo: list[Row], progress: dict[Row, Progress], at_a_time: int) -> str:
    """Return the time left as text: the time of all updates so far, times the modeled hours that
    are left over those that are done. todo: the runs that have not finished. progress: that of all
    runs."""
    done = sum(modeled_hours(row) * x.fraction for row, x in progress.items())
    seconds = sum(x.seconds for x in progress.values())
    if not done:
        return 'n/a'
    left = sum(modeled_hours(row) * (1 - progress[row].fraction) for row in todo)
    return str(timedelta(seconds=int(seconds / done * left / min(at_a_time, len(todo) or 1))))


def unfinished(rows: list[Row]) -> list[Row]:
    """Return the runs that are not finished. Ends the script if one of the runs would log no
    return, or its folder cannot be used."""
    queue = []
    for row in rows:
        state = state_of(row)
        if is_short(row) and not script:  # another script may log returns earlier
            steps = f'{updates_of(row) * config_of(row)["unroll"]} steps per board'
            advice = f'at least {time_limit_of(row)} are needed: increase total_steps or length'
            raise Mistake(f'{row.name}: {steps} give no return: {advice}')
        if state in UNUSABLE:
            raise Mistake(
                f'{folder_of(row)} holds {UNUSABLE[state]}: move it away, or change out_dir'
            )
        if state != 'done':
            queue.append(row)
    return queue


def run_queue(
    queue: list[Row], rows: list[Row], gpus: list[str]
) -> tuple[dict[Row, str], int | None]:
    """Run a queue with one worker for each of `gpus`. Returns the messages of the runs that failed,
    and the number of the signal that stopped the sweep, if any. rows: all runs of the sweep."""
    at_a_time = len(gpus)
    free = list(gpus)  # those of the workers without a run
    running: dict[Row, Running] = {}
    progress = {row: progress_of(row) for row in rows}  # renewed for the runs at work
    n_ended = len(rows) - len(queue)  # runs that were finished before or have ended
    failures: dict[Row, str] = {}
    kinds = []  # kind_of_failure of the runs that have ended, '' for those that are done
    is_due = every(REPORT)
    stopper = Stopper()
    try:
        while running or (queue and stopper.signal is None):
            ended = []  # (row, why it failed or '', seconds)
            while queue and free and stopper.signal is None:
                row = queue.pop(0)
                try:
                    job = start(row, free[0], at_a_time)
                except OSError as error:  # such as a full disk; the other runs continue
                    ended.append((row, f'FAILED to start: {first_line(error)}', 0.0))
                    break
                if job:
                    running[row] = job
                    free.pop(0)
                else:
                    print0(f'{row.name}: another process is at work on it, or has finished it')
                    n_ended += 1  # this sweep need not wait for it
            for row in [row for row, job in running.items() if job.process.poll() is not None]:
                job = running.pop(row)
                free.append(job.gpu)
                job.lock.release()
                if stopper.signal is not None and state_of(row) != 'done':
                    continue  # it was stopped by the signal below
                failure = outcome(row, job.process.returncode)
                ended.append((row, failure, time.time() - job.started))
            for row, failure, seconds in ended:
                progress[row] = progress_of(row)
                if failure:
                    failures[row] = failure
                kinds.append(kind_of_failure(row, failure))
                n_ended += 1
                counted = f'[{n_ended}/{len(rows)}] {row.name}'
                eta = remaining([*queue, *running], progress, at_a_time)
                print0(f'{counted}: {failure or "done"}, {seconds:.0f} s | eta {eta}')
                last_kinds = kinds[-EQUAL_FAILURES:]
                if failure and queue and last_kinds == EQUAL_FAILURES * [last_kinds[-1]]:
                    others = f'{len(queue)} others are not started'
                    print0(f'{EQUAL_FAILURES} runs in a row failed alike: {others}')
                    queue = []
            if stopper.signal is not None:
                for job in running.values():
                    job.process.terminate()  # the run saves and ends
                for job in running.values():
                    job.process.wait()
            elif running and is_due():
                progress |= {row: progress_of(row) for row in running}
                parts = [f'{row.name} {progress[row].fraction:.0%}' for row in running]
                eta = remaining([*queue, *running], progress, at_a_time)
                print0(f'    running: {", ".join(parts)} | eta {eta}')
            time.sleep(POLL)
    except BaseException:  # such as a second ctrl-C: the runs keep their last checkpoints
        for job in running.values():
            if gpus_per_run > 1:
                job.process.terminate()  # torchrun must live to end its ranks
            else:
                job.process.kill()
        raise
    stopper.restore()
    return failures, stopper.signal


def execute(rows: list[Row]) -> int:
    """Run what is not finished. Returns the exit status: 0 if all are done, 1 if some are not, and
    128 + the signal that stopped the sweep."""
    gpus = devices()
    queue = unfinished(rows)
    finished_before = len(rows) - len(queue)
    print0(f'{plan}: {len(rows)} runs, {finished_before} finished before; {len(gpus)} at a time')
    if queue:
        check_before(queue, gpus)
    failures, signal_number = run_queue(queue, rows, gpus)
    for row, message in failures.items():
        print0(f'{row.name}: {message}; see {folder_of(row)}')
    if signal_number is not None:
        saved = 'the runs that had started training have saved'
        print0(f'stopped; {saved}: the same command resumes them')
        return 128 + signal_number
    return int(any(state_of(row) != 'done' for row in rows))


def run_all(rows: list[Row]) -> tuple[int, list[Row]]:
    """Run a plan and, with `tune`, the further values and seeds that follow from its results.
    Returns the exit status and all rows."""
    status = execute([rows[index]] if index >= 0 else rows)
    while tune and index < 0 and status < 2 and (grown := plan_rows()) != rows:
        added = [row for row in grown if row not in rows]
        rows = grown
        status = max(status, execute(added))
    return status, rows


# ----------------------------------------------------------------------------- figures and tables


def finished(rows: list[Row]) -> list[tuple[Row, list[dict]]]:
    """Return the finished runs and their logs. Folders that cannot be used are skipped with a
    warning."""
    runs = []
    for row in rows:
        folder, state = folder_of(row), state_of(row)
        if state in UNUSABLE:
            print(f'warning: {folder} holds {UNUSABLE[state]}: skipped', file=sys.stderr)
        elif state == 'done':
            runs.append((row, read_log(folder)))
    return runs


def best_depths(runs: list) -> str:
    """Return a sentence on the best L of recurrent and of non-recurrent models and its certainty;
    '' if one of the variants is missing, or an allocation has one seed.

    The certainty is computed twice: by bootstrap draws of the seeds (with replacement), and by
    means with errors from a t distribution, which allows for the small number of seeds."""
    values = {True: {}, False: {}}  # recurrent or not: {cell: values of its seeds, lower is better}
    for row, log in runs:
        sign = 1 if row.is_text else -1
        values[row.recurrent].setdefault(row.cell, []).append(sign * run_value(log))
    if any(not cells or min(map(len, cells.values())) < 2 for cells in values.values()):
        return ''
    generator, t_generator = np.random.default_rng(1), np.random.default_rng(2)
    best, best_by_t = {}, {}  # recurrent or not: the best L in each draw, (DRAWS,)
    parts = []
    for recurrent, cells in values.items():
        depths = np.array([row.L for row in cells])
        means, means_by_t = [], []  # (DRAWS,) per cell
        for v in cells.values():
            n = len(v)
            means.append(generator.choice(v, (DRAWS, n)).mean(1))
            errors = np.std(v, ddof=1) / n**0.5 * t_generator.standard_t(n - 1, DRAWS)
            means_by_t.append(np.mean(v) + errors)
        best[recurrent] = depths[np.argmin(means, 0)]
        best_by_t[recurrent] = depths[np.argmin(means_by_t, 0)]
        low, high = np.quantile(best[recurrent], (0.025, 0.975), method='nearest')
        observed = min(cells, key=lambda row: np.mean(cells[row])).L
        variant = figures.variant_of(recurrent)
        parts.append(f'{variant} {observed} (95%: {low} to {high})')
    smaller, equal = np.mean(best[True] < best[False]), np.mean(best[True] == best[False])
    parts.append(f'recurrent smaller in {smaller:.1%}, equal in {equal:.1%}')
    smaller_by_t = np.mean(best_by_t[True] < best_by_t[False])
    parts.append(f'with errors of a t distribution smaller in {smaller_by_t:.1%}')
    return f'Best L, {DRAWS:,} bootstrap draws of seeds: {", ".join(parts)}.'


def solve_rate(row: Row, levels: str) -> float:
    """Return a finished agent's greedy solve rate on `levels` ('': its evaluation levels), and
    evaluate the agent first if its folder does not have the solve rate."""
    config = config_of(row)
    path = Path(folder_of(row), f'eval_{levels or Path(config["eval_split"]).stem}.json')
    saved = read_json(path)
    is_complete = levels != '' or saved.get('n') == config['eval_games']
    env_steps = updates_of(row) * config['n_envs'] * config['unroll']
    same_steps = saved.get('env_steps') == env_steps
    same_limit = saved.get('time_limit', TIME_LIMIT) == time_limit_of(row)
    if not (is_complete and same_steps and same_limit):
        print0(f'{row.name}: evaluating on {levels or config["eval_split"]}')
        line = [sys.executable, *arguments(row), '--eval_only=True', f'--levels={levels}']
        if subprocess.run(line, stdout=subprocess.DEVNULL).returncode != 0:
            raise Mistake(f'{row.name}: the evaluation failed: see above')
    return read_json(path)['solve_rate']


def changes_of_plan() -> str:
    """Return for titles of figures the settings that change the plan, such as ', widths x 0.5'."""
    parts = []
    if residual:
        parts.append(f'{residual} residual')
    if width != 1:
        parts.append(f'widths x {width:g}')
    if length != 1:
        parts.append(f'steps x {length:.3g}')
    if tune:
        parts.append(f'best {tuned_setting().replace("_", " ")}s')
    return ''.join(f', {part}' for part in parts)


def show(rows: list[Row]) -> None:
    """Draw figures and write tables of what has finished; with `tune`, without seed 1, which chose
    the values."""
    folder = results
    if not folder:
        part = f'residual-{residual}' if residual else ''
        folder = os.path.normpath(os.path.join(out_dir, plan, part))
    runs = finished(rows)
    if not runs:
        raise Mistake(
            f'{folder}: no run of plan {plan!r} has finished: nothing to show; --run runs them'
        )
    os.makedirs(folder, exist_ok=True)
    print(f'{len(runs)} of {len(rows)} runs have finished')
    tuned_name = tuned_setting()
    paths = []
    shown = [(row, log) for row, log in runs if row.seed > 1 or not tune]
    if not shown:
        print('one seed per value so far, which chooses the value: the others have not finished')
        shown = figures.runs_at_best(runs, tuned_name)
    if tune:
        for row in rows_beyond_edges([row for row in rows if row.seed == 1]):
            print(f'{row.name}: not tried, though the value next to it is the best')
    reported = {row for row, _ in shown}
    if plan in ALLOCATIONS:  # all rows of a figure have one residual rule: it needs no column
        shown = [(figures.without_setting(row, 'residual'), log) for row, log in shown]
    if figure:
        drawn = [(figures.without_setting(row, tuned_name), log) for row, log in shown]
        cells = [figures.without_setting(row, tuned_name) for row in rows]
        token = figures.unit_of([config_of(row) for row in rows])
        changes = changes_of_plan()
        paths += figures.draw_plan(plan, changes, cells, drawn, token, reference, folder)
    if table:
        paths += figures.write_value_tables(shown, reference, folder, tuned_name)
        sentences = {}  # on the best depths
        models = set()
        if plan in ALLOCATIONS and plan not in SATURATION:  # plans of one budget
            models = {row.model for row, _ in shown}
        for model in sorted(models):
            if sentence := best_depths([run for run in shown if run[0].model == model]):
                print(sentence)
                sentences[f'best_{model}'] = sentence
                path = Path(folder, f'table_{model}.md')
                write_text(f'{path.read_text()}\n{sentence}\n', path)
        paths.append(write_runs(runs, reported, sentences, folder))
    if table == 'solve':
        paths += solve_rates(shown, folder)
    print('\n'.join(paths))


def solve_rates(shown: list, folder: str) -> list[str]:
    """Evaluate the best allocation of each depth, write tables of solve rates, and return their
    paths."""
    agents = [(row, log) for row, log in shown if not row.is_text]
    points = figures.summarize_cells(agents)
    depths = figures.group_by(points, lambda row: (row.model, row.budget, row.recurrent, row.L))
    best = [figures.best_cell(part) for part in depths.values()]
    if not best:
        raise Mistake("table = 'solve': no agent of this plan has finished")
    generated = config_of(with_residual(best[0], residual))['split'] == 'generated'
    levels = '' if generated else TEST_SPLIT
    rates = {}
    for cell in best:
        rows = [with_residual(row, residual) for row, _ in agents if row.cell == cell]
        rates[cell] = [solve_rate(row, levels) for row in rows]
    return figures.write_solve_table(rates, levels, reference, folder, tuned_setting())


def write_runs(runs: list, reported: set[Row], sentences: dict, folder: str) -> str:
    """Write runs.json and return its path. The file also has the runs that are not reported,
    because they chose a value. sentences: {'best_MODEL': sentence on the best depths}."""
    records = []
    for row, log in runs:
        saved = read_json(Path(folder_of(row), 'config.json'))
        last = log[-1]
        record = {
            'name': row.name,
            'model': row.model,
            'reported': row in reported,
            **figures.cell_fields([row])[row],
            **dict(row.overrides),
            'seed': row.seed,
            'value': run_value(log),
            'updates': last['step'],
            **{name: saved.get(name) for name in ('commit', 'device_name', 'torch')},
            **{name: last[name] for name in ('tokens', 'env_steps', 'seconds') if name in last},
            'over_budget': budget_ratio(row),
        }
        records.append(record)
    about = {
        'plan': plan,
        **sentences,
        'command': shlex.join(['python', *sys.argv]),
        'drawn_at_commit': commit(),
        'runs': records,
    }
    path = os.path.join(folder, 'runs.json')
    write_json(about, path)
    return path


# ----------------------------------------------------------------------------- main


def main() -> int:
    """List, emit, run or draw the plan, and return the exit status."""
    config = configure(globals(), quiet=True)
    if emit and (run or figure or table):
        raise Mistake(f'emit = {emit!r} prints jobs alone: leave out run, figure and table')
    if emit == 'markdown' and plan:
        raise Mistake("emit = 'markdown' prints the table of all figures: leave out the plan")
    if not plan:
        if run or figure or table or emit not in ('', 'markdown'):
            raise Mistake(f'plan is empty: choose one of {", ".join(PLANS)}')
        for name in ('script', 'tune', 'only', 'residual'):
            if config[name]:
                raise Mistake(
                    f'{name} = {config[name]!r}: needs a plan: choose one of {", ".join(PLANS)}'
                )
        print_paper_table()
        return 0
    need_packages(matplotlib=figure, pandas=figure or bool(table))
    if reference and not os.path.isdir(reference):
        raise Mistake(f'reference = {reference!r}: there is no such folder')
    rows = plan_rows()
    if residual and plan not in ALLOCATIONS:
        raise Mistake(f'residual = {residual!r}: is for the plans {", ".join(ALLOCATIONS)}')
    check_also(rows)
    if script and len({row.is_text for row in rows}) > 1:
        raise Mistake(
            f'script = {script!r}: plan {plan!r} has agents and language models: --only=model=...'
        )
    if table == 'solve' and all(row.is_text for row in rows):
        raise Mistake(f'plan {plan!r} has no Sokoban agents: table = solve is for those')
    if index >= len(rows):
        raise Mistake(f'index = {index}: plan {plan!r} has runs 0 to {len(rows) - 1} so far')
    only_lists = not (run or figure or table)
    if emit:
        print_jobs(rows, config)
    elif only_lists:
        print_plan(rows)
    if only_lists and tune and rows[-1].seed == 1:
        stream = sys.stderr if emit else sys.stdout
        print('other values or seeds follow when all of these have finished', file=stream)
    status = 0
    if run:
        status, rows = run_all(rows)
    if status < 2 and (figure or table):
        show(rows)
    return status


if __name__ == '__main__':
    run_script(main)

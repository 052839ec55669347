"""
Ask the allocation question: list the runs of one figure, the paper's or ours, run them, and draw the figure from what has finished.

$ python sweep.py --plan sokoban-small                    # every run: L, E, d, seed, cost, cost over budget, parameters, state, command
$ python sweep.py --plan sokoban-small --run              # run them here, one a GPU; the same line again goes on after a stop
$ python sweep.py --plan sokoban-small --emit=slurm       # an array job for a cluster, to be piped into sbatch; --emit=commands: a line a run
$ python sweep.py --plan sokoban-small --figure --table   # figures (PNG, SVG) and tables (Markdown, CSV) of what has finished
$ python sweep.py --plan sokoban-small --table=solve      # the best allocations' solve rates on unfiltered-test
$ python sweep.py --plan sokoban --figure --table         # the three budgets together, from the runs of sokoban-small, -medium and -large
Sokoban plans need Boxoban's levels (no others take their place): python sokoban.py --download=True; python sokoban.py --split=unfiltered-valid --download=True
A study for two CPU cores (data first: python data_fineweb.py --demo=True --tokenizer=bytes):
$ python sweep.py config/study_lm.py --run --figure --table

A plan compares allocations (L, E, d) at one budget W: L levels, widths d, E = round(W / (L C(d))) experts, where C(d) is an expert's cost;
a row is dropped where that is 0; one of a language model that costs over 1.5 budgets (half an expert was rounded up to one) where it is not
asked for by `dear`. ConvLSTM: C = 9 (32 + 2d) 4d multiply-adds a cell, W = C(128), C(256), C(1024). ConvGLU: C = 9 d 2d. Language
models: C = forward FLOPs of a block a token, W = 16 or 32 blocks of width 768. Kinds: recurrent, feedforward. `width` and `length` shrink a plan
for a small machine by the same rule: widths and budget, updates or environment steps. `tune` gives each allocation its own value of a setting:
all values run with seed 1; when these have finished, the list grows by the other seeds of each allocation's best, which the figures show.

Writes into out_dir/PLAN: a folder a run, and there the figures and tables too (the runs of plan sokoban are those of its three parts). A run is finished when its log is at its last step.
"""

import contextlib
import fcntl
import functools
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable

from configurator import (
    configure,
    fail,
    first_line,
    read_argument,
    read_config,
    read_script,
    run_script,
    write_json,
)  # before torch: how threads wait, what ctrl-C does

import torch

from checkpoint import Stopper, commit, device_name, need_packages, saved_in
from convlstm import AgentConfig, build_agent
from data_fineweb import VOCAB
from figures import (
    LogError,
    Row,
    at_best,
    chosen_by_return,
    draw,
    read_log,
    run_record,
    solve_table,
    tables,
    value,
    without,
)
from model import ModelConfig, build_model

# -----------------------------------------------------------------------------
# fmt: off
# which runs
plan = ''                      # a name of PLANS; an unknown one lists them
only = ''                      # a part of the plan, as in 'L=1,2 kind=recurrent model=convglu'
dear = False                   # language models: also the allocations that cost over 1.5 budgets
seeds = 0                      # runs of a cell, with seeds 1..n; 0: three for Sokoban, one for language models
tune = ''                      # 'learning_rate=0.02,0.04': each cell at each value, and its best with the other seeds
base = ''                      # config file under all of a plan's runs, or under the recurrent ones; '': the plan's own
base_ff = ''                   # the same under those that are not recurrent
width = 1.0                    # widths, and the budget's, times this
length = 1.0                   # updates or environment steps times this
out_dir = 'out/sweep'          # runs go into out_dir/PLAN/NAME
# what to do with them; nothing: list them
run = False                    # run what is not finished
workers = 0                    # runs at a time; 0: one a GPU (see gpus_per_run), or one on a CPU
gpus_per_run = 1               # more: each run under torchrun
index = -1                     # of run: this row of the list alone (array jobs)
emit = ''                      # print an array job ('slurm') or a line a run ('commands')
figure = False                 # draw the plan's figures
table = None                   # True: mean, variance, N; 'solve': solve rates of the best allocations
reference = ''                 # folder with the paper's tables (sokoban_returns.csv, ...): drawn and listed beside ours
levels = 'unfiltered-test'     # of table = 'solve': what the agents are evaluated on; '': their own held-out levels
results = ''                   # folder for figures and tables; '': out_dir/PLAN
# fmt: on
# -----------------------------------------------------------------------------

HERE = os.path.dirname(os.path.abspath(__file__))
LEVELS = (1, 2, 4, 8, 16)
SOKOBAN = {
    'small': (128, (32, 64, 128)),
    'medium': (256, (32, 64, 128, 256)),
    'large': (1024, (64, 128, 256, 512, 1024)),
}  # budget's width, widths
TEXT = {
    'small': (16, LEVELS, 'small'),
    'medium': (32, (*LEVELS, 32), 'medium'),
    'small-long': (16, LEVELS, 'small_long'),
}  # blocks, L, configs
SAME_RUN = (
    'out_dir',
    'resume',
    'overwrite',
    'eval_only',
    'levels',
    'best',
    'plot',
    'tensorboard',
    'wandb',
    'eval_interval',
    'batch_size',
    'device',
    'dtype',
    'compile',
    'graphs',
    'path',
    'threads',
    'reuse',
    'download',
)  # settings that may change without making another run
DEAR = 1.5  # budgets: a run that costs more is no fair point of a figure, and a language model's is not run unasked
LATER = 'other seeds, if any, follow when all of these have finished'
ALIKE = 3  # so many first runs that fail with the same words end a sweep
POLL, REPORT = 0.2, 10.0  # seconds between looks at the runs, and between lines about them


# ----------------------------------------------------------------------------- settings and costs


@functools.cache
def files_of(model: str, recurrent: bool, budget: str) -> tuple[str, ...]:
    """The config files under a run's own settings."""
    chosen = base if recurrent else base_ff or base
    if chosen:
        beside = os.path.join(HERE, chosen)
        return (
            os.path.relpath(beside)
            if os.path.exists(beside) and not os.path.exists(chosen)
            else chosen,
        )
    if model != 'transformer':
        return ()  # train_sokoban.py's defaults: the paper's, where it gives them
    return (
        os.path.relpath(
            os.path.join(HERE, 'config', f'{TEXT[budget][2]}_{"" if recurrent else "gpt_"}L2.py')
        ),
    )


@functools.cache
def under(model: str, recurrent: bool, budget: str) -> dict:
    """The script's defaults and the config files' settings: what a run's own are laid over."""
    defaults = read_script(os.path.join(HERE, Row(model, recurrent, budget, 1, 1, 1).script))[0]
    config = dict(defaults)
    for path in files_of(model, recurrent, budget):
        read_config(path, config, defaults)
    return config


def settings_of(row: Row) -> dict:
    """A run's own settings, as its command line has them."""
    own = {
        'recurrent': row.recurrent,
        'n_layer': row.L,
        'n_expert': row.E,
        'n_embd': row.d,
        'seed': row.seed,
        **dict(row.more),
    }
    config = under(*row[:3])
    if not row.is_text:
        own = {'arch': row.model, **own}
    if length != 1:
        names = ('max_iters', 'warmup_iters', 'eval_interval') if row.is_text else ('total_steps',)
        own |= {name: max(1, round(config[name] * length)) for name in names}
    return own


def config_of(row: Row) -> dict:
    return under(*row[:3]) | settings_of(row)


@functools.cache
def cost(*cell: str | bool | int | tuple) -> tuple[float, int]:
    """Of a Row's fields but the seed -> the cost of a token (forward FLOPs of the levels) or of an environment step (the paper's
    multiply-adds), and the parameters."""
    row = Row(*cell)
    config = config_of(row)
    own = (
        ('n_head', 'n_kv_head', 'window', 'block_size', 'share_kv')
        if row.is_text
        else ('arch', 'recurrent', 'radius', 'head_dim')
    )
    sizes = {
        name: config[name]
        for name in ('n_layer', 'n_expert', 'n_embd', 'aggregation', 'residual', 'router_dim', *own)
    }
    try:
        with torch.device('meta'):  # sizes without memory
            if row.is_text:
                built = build_model(ModelConfig(VOCAB[config['tokenizer']], **sizes), row.recurrent)
                return built.flops_per_token()['core'], built.num_params()['total']
            built = build_agent(AgentConfig(**sizes))
            return float(built.macs_per_step()['nominal']), built.num_params()['total']
    except (ValueError, KeyError, RuntimeError, OverflowError) as error:
        fail(f'plan {plan!r}, {row.name}: {first_line(error)}; see base, width')


def scaled(d: int) -> int:
    return max(1, round(d * width))


def budget_of(model: str, recurrent: bool, budget: str) -> float:
    """W, in cost()'s units."""
    if model == 'transformer':
        return TEXT[budget][0] * cost(model, recurrent, budget, 1, 1, scaled(768))[0]
    return cost(model, recurrent, budget, 1, 1, scaled(SOKOBAN[budget][0]))[0]


def over_budget(row: Row) -> float:
    return cost(*row[:7])[0] / budget_of(*row[:3])


def allocations(
    model: str, recurrent: bool, budget: str, depths: tuple[int, ...], widths: tuple[int, ...]
) -> list[Row]:
    """The rule: E = round(W / (L C(d))), dropped where that is 0. Python rounds a half to even: exactly half an expert is none."""
    W, rows = budget_of(model, recurrent, budget), []
    for L in depths:
        for d in sorted({scaled(d) for d in widths}, reverse=True):
            E = round(W / (L * cost(model, recurrent, budget, 1, 1, d)[0]))
            rows += [Row(model, recurrent, budget, L, E, d)] if E else []
    return rows


# ----------------------------------------------------------------------------- the plans


def sokoban(budget: str, models: tuple[str, ...] = ('convlstm', 'convglu')) -> list[Row]:
    return [
        row
        for model in models
        for recurrent in (True, False)
        for row in allocations(model, recurrent, budget, LEVELS, SOKOBAN[budget][1])
    ]


def text(budget: str) -> list[Row]:
    return [
        row
        for recurrent in (True, False)
        for row in allocations('transformer', recurrent, budget, TEXT[budget][1], (384, 768, 1536))
    ]


def variants(row: Row, name: str, values: Iterable[object]) -> list[Row]:
    return [row._replace(d=scaled(row.d), more=((name, value),)) for value in values]


def aggregation() -> list[Row]:
    """A recurrent ConvLSTM and a recurrent language model."""
    ways = ('sqrt_sum', 'mean', 'softmax_mean', 'softmax_l2')
    return [
        row
        for r in (
            Row('convlstm', True, 'small', 1, 4, 128),
            Row('transformer', True, 'small', 2, 8, 768),
        )
        for row in variants(r, 'aggregation', ways)
    ]


def scaling() -> list[Row]:
    """L and E apart, at one width: cost grows with both."""
    return [
        Row(model, recurrent, 'small', L, E, scaled(384 if model == 'transformer' else 64))
        for model in ('convlstm', 'convglu', 'transformer')
        for recurrent in (True, False)
        for L in (1, 2, 4, 8)
        for E in (1, 2, 4, 8, 16, 32, 64)
    ]


def residual() -> list[Row]:
    """Ours: each expert its own residual (the paper's rule), or one for the level; with one expert they are the same."""
    rows = [Row('transformer', False, 'small', L, 16 // L, 768) for L in (2, 4, 8)]
    rows += [Row('convglu', recurrent, 'small', 2, 2, 128) for recurrent in (True, False)]
    return [row for r in rows for row in variants(r, 'residual', ('expert', 'shared'))]


PLANS = {
    'sokoban': lambda: [row for budget in SOKOBAN for row in PLANS[f'sokoban-{budget}']()],
    'sokoban-small': lambda: sokoban('small'),
    'sokoban-medium': lambda: sokoban('medium'),
    'sokoban-large': lambda: sokoban('large', ('convlstm',)),
    'lm-small': lambda: text('small'),
    'lm-medium': lambda: text('medium'),
    'lm-small-long': lambda: text('small-long'),
    'aggregation': aggregation,
    'communication': lambda: variants(Row('convlstm', True, 'small', 2, 8, 32), 'radius', range(8)),
    'scaling': scaling,
    'share-kv': lambda: [
        row
        for L in (1, 2, 4)
        for row in variants(
            Row('transformer', True, 'small', L, 16 // L, 768), 'share_kv', (True, False)
        )
    ],
    'residual': residual,
}


def tuned(rows: list[Row]) -> list[Row]:
    """Each row once a value of `tune`."""
    name, _, values = tune.partition('=')
    if not name or not values:
        fail(f"tune = {tune!r}: expected a setting and its values, as in 'learning_rate=0.02,0.04'")
    out = []
    for row in rows:
        if name in settings_of(row) or name in SAME_RUN:
            fail(
                f'tune = {tune!r}: {name} cannot be tuned: plan {plan!r} sets it, or it changes no result'
            )
        for text in values.split(','):
            read_argument(f'--{name}={text}', own := {}, under(*row[:3]), f'tune = {tune!r}')
            out.append(row._replace(more=(*row.more, (name, own[name]))))
    return list(dict.fromkeys(out))


def winners(rows: list[Row]) -> list[Row]:
    """Of rows that differ in `tune` alone the best one, judged by seed 1; none until all of these have finished or failed."""
    states = {row: state_of(row) for row in rows}
    if not set(states.values()) <= {'done', 'failed'}:
        return []
    logs = [(row, read_log(folder_of(row))) for row in rows if states[row] == 'done']
    best = {
        row
        for row, _ in at_best(
            [(row, log) for row, log in logs if value(row, log) is not None], tune.partition('=')[0]
        )
    }
    return [row for row in rows if row in best]


def chosen(rows: list[Row]) -> list[Row]:
    """The rows that `only` names."""
    for condition in only.split():
        key, _, values = condition.partition('=')
        fields = [
            {
                'model': row.model,
                'kind': row.variant,
                'L': row.L,
                'E': row.E,
                'd': row.d,
                **dict(row.more),
            }
            for row in rows
        ]
        if not any(key in f for f in fields):
            fail(
                f'only = {only!r}: cannot choose by {key!r}: expected conditions as L=1,2 with any of {", ".join(fields[0])}'
            )
        there = dict.fromkeys(str(f[key]) for f in fields if key in f)
        rows = [
            row for row, f in zip(rows, fields, strict=True) if str(f.get(key)) in values.split(',')
        ]
        if not rows:
            fail(
                f'only = {only!r}: leaves none of the runs of plan {plan!r}, which have {key}={",".join(there)}'
            )
    return rows


def too_dear(cells: list[Row]) -> list[Row]:
    """Language models' allocations over DEAR budgets, where nobody asks for them."""
    if dear or not plan.startswith('lm-'):
        return []
    return [row for row in cells if over_budget(row) > DEAR]


def plan_rows() -> list[Row]:
    """All runs; the first seed of every cell comes before the second of any. With `tune`, the runs known by now: later ones come last."""
    if plan not in PLANS:
        fail(f'plan = {plan!r}: expected one of {", ".join(PLANS)}')
    cells = chosen(PLANS[plan]())
    left_out = too_dear(cells)
    cells = [row for row in cells if row not in left_out]
    if not cells:
        fail(
            f'only = {only!r}: leaves nothing but {left_out[0].name}, of {over_budget(left_out[0]):.2f} budgets: --dear asks for it'
        )
    cells = tuned(cells) if tune else cells
    counts = {row: seeds or (1 if row.is_text else 3) for row in cells}
    again = winners(cells) if tune else cells
    return cells + [
        row._replace(seed=seed)
        for seed in range(2, max(counts.values()) + 1)
        for row in again
        if seed <= counts[row]
    ]


# ----------------------------------------------------------------------------- where a run is


def folder_of(row: Row) -> str:
    part = f'sokoban-{row.budget}' if plan == 'sokoban' else plan
    return os.path.join(out_dir, part, row.name)


def total_of(row: Row) -> int:
    """The `step` of a finished run's last log line: its updates."""
    c = config_of(row)
    return c['max_iters'] if row.is_text else -(-c['total_steps'] // (c['n_envs'] * c['unroll']))


def saved_config(row: Row) -> dict:
    """The folder's config.json; empty where there is none to read."""
    try:
        with open(os.path.join(folder_of(row), 'config.json')) as file:
            saved = json.load(file)
    except (OSError, ValueError, RecursionError):
        return {}
    return saved if isinstance(saved, dict) else {}


def has_other_settings(row: Row) -> bool:
    """Whether the folder's config.json, if there is one to read, is of another run."""
    wanted, saved = json.loads(json.dumps(config_of(row))), saved_config(row)  # tuples become lists
    return any(saved[k] != v for k, v in wanted.items() if k in saved and k not in SAME_RUN)


def progress(row: Row) -> tuple[float, float]:
    """How much of a run is done, 0 to 1, and the seconds that took; nothing where the log cannot be read."""
    try:
        last = read_log(folder_of(row))[-1]
    except (FileNotFoundError, IndexError, LogError):
        return 0.0, 0.0
    return min(1.0, last['step'] / total_of(row)), last.get('seconds') or 0.0


def state_of(row: Row) -> str:
    """'new', 'begun' (killed before its first checkpoint), 'cut' (can be resumed), 'failed', 'done', 'other' (the folder holds a run with
    other settings) or 'damaged' (its log cannot be read, and there is no checkpoint to go on from)."""
    if has_other_settings(row):
        return 'other'
    if progress(row)[0] == 1:
        return 'done'
    if not resumable(row):  # resuming repairs a log
        try:
            read_log(folder_of(row))
        except FileNotFoundError:
            pass
        except LogError:
            return 'damaged'
    if os.path.exists(os.path.join(folder_of(row), 'failed.json')):
        return 'failed'
    return (
        'cut'
        if resumable(row)
        else 'begun'
        if os.path.exists(os.path.join(folder_of(row), 'log.jsonl'))
        else 'new'
    )


def resumable(row: Row) -> bool:
    return saved_in(folder_of(row))


def arguments(row: Row) -> list[str]:
    """Script, config files and settings of a run, from the current folder."""
    flags = [f'--{k}={v}' for k, v in {**settings_of(row), 'out_dir': folder_of(row)}.items()]
    return [
        os.path.relpath(os.path.join(HERE, row.script)),
        *files_of(row.model, row.recurrent, row.budget),
        *flags,
    ]


def command(row: Row, state: str) -> list[str]:
    """What starts or resumes a run that is in this state."""
    launcher = (
        ['python']
        if gpus_per_run == 1
        else ['torchrun', '--standalone', f'--nproc_per_node={gpus_per_run}']
    )
    again = (
        []
        if state in ('new', 'done', 'other', 'damaged')
        else ['--resume=True']
        if resumable(row)
        else ['--overwrite=True']
    )
    return [*launcher, *arguments(row), *again]


def waits(rows: list[Row]) -> bool:
    """Whether more rows, of the tuned values, may follow these."""
    return bool(tune) and all(row.seed == 1 for row in rows)


def print_plan(rows: list[Row]) -> None:
    units = dict.fromkeys('MFLOP a token' if row.is_text else 'MMAC a step' for row in rows)
    print(f'costs: {", ".join(units)}, levels only')

    def wide(text: str) -> str:
        return f'{text:<25}' if any(row.more for row in rows) else ''

    print(
        f'{"#":>4} {"model":<11} {"kind":<11} {"L":>2} {"E":>3} {"d":>4} {wide("setting")}{"seed":>4} {"cost":>9} {"/budget":>7} {"parameters":>11}  {"state":<7} command'
    )
    for i, row in enumerate(rows):
        (amount, params), state = cost(*row[:7]), state_of(row)
        shown = f'{progress(row)[0]:.0%}' if state == 'cut' else state
        print(
            f'{i:>4} {row.model:<11} {row.variant:<11} {row.L:>2} {row.E:>3} {row.d:>4} {wide(row.setting)}{row.seed:>4} {amount / 1e6:>9,.1f} {over_budget(row):>7.2f} '
            f'{params:>11,}  {shown:<7} {shlex.join(command(row, state))}'
        )
    if waits(rows):
        print(LATER)
    for row in too_dear(chosen(PLANS[plan]())):
        print(f'not among them: {row.name}, {over_budget(row):.2f} budgets; --dear asks for it')


# ----------------------------------------------------------------------------- running


def devices() -> list[str]:
    """What each worker's CUDA_VISIBLE_DEVICES is; '' for one on the CPU."""
    n = torch.cuda.device_count()
    if n < gpus_per_run and (n > 0 or gpus_per_run > 1):
        fail(f'gpus_per_run = {gpus_per_run}: there are {n} GPUs here')
    if n == 0:
        return [''] * (workers or 1)
    names = os.environ.get('CUDA_VISIBLE_DEVICES', ','.join(map(str, range(n)))).split(',')[:n]
    groups = [
        ','.join(names[i : i + gpus_per_run]) for i in range(0, n - gpus_per_run + 1, gpus_per_run)
    ]
    first = max(index, 0)  # jobs of one row each, side by side, spread out
    return [groups[(first + i) % len(groups)] for i in range(workers or len(groups))]


def start(row: Row, gpu: str, n: int) -> subprocess.Popen | None:
    """Starts or resumes a run as one of n workers, its output into the run's stdout.txt; None if another process has it or has finished it.
    It inherits the folder's lock, and so keeps it when this process dies. OSError."""
    folder = folder_of(row)
    os.makedirs(folder, exist_ok=True)
    with (
        open(os.path.join(folder, '.lock'), 'w') as lock,
        open(os.path.join(folder, 'stdout.txt'), 'ab') as out,
    ):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        state = state_of(row)  # under the lock: it may have changed
        if state in ('done', 'other', 'damaged'):
            return None
        launcher, *line = command(row, state)
        line = [
            sys.executable,
            *(['-m', 'torch.distributed.run'] if launcher == 'torchrun' else []),
            *line,
        ]
        with contextlib.suppress(FileNotFoundError):
            os.remove(os.path.join(folder, 'failed.json'))  # of an earlier try
        env = {
            'OMP_NUM_THREADS': str(max(1, len(os.sched_getaffinity(0)) // (n * gpus_per_run))),
            **os.environ,
            **({'CUDA_VISIBLE_DEVICES': gpu} if gpu else {}),
        }
        return subprocess.Popen(
            line,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            pass_fds=(lock.fileno(),),
            start_new_session=True,
        )  # ctrl-C is ours to pass on


def last_words(row: Row) -> str:
    """The last error that a run printed, or else its last line."""
    try:
        with open(os.path.join(folder_of(row), 'stdout.txt'), 'rb') as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 20000))
            lines = [
                line.strip()
                for line in file.read().decode(errors='replace').splitlines()
                if line.strip()
            ]
    except OSError as error:
        return str(error)
    errors = [line for line in lines if re.match(r'(error: |[\w.]*(Error|Exception)\b)', line)]
    return (errors or lines or ['it printed nothing'])[-1][:300]


def record_failure(row: Row, status: int, message: str) -> None:
    """failed.json stays until the run is started again."""
    record = {'exit': status, 'message': message, 'command': shlex.join(command(row, 'new'))}
    try:
        write_json(record, os.path.join(folder_of(row), 'failed.json'))
    except OSError as error:
        print(f'{row.name}: cannot write failed.json: {error}', flush=True)


def remaining(rows: list[Row], todo: list[Row], n: int) -> str:
    """ETA of the rows `todo` by n workers: a run takes what runs of its model, kind and L took, or else what runs took on average."""
    known = {}
    for row in rows:
        part, seconds = progress(row)
        if part > 0.01 and seconds > 0:
            known[row] = (part, seconds / part)
    if not known:
        return 'n/a'

    def left(row: Row) -> float:
        like = [
            t
            for r, (_, t) in known.items()
            if (r.model, r.recurrent, r.L) == (row.model, row.recurrent, row.L)
        ] or [t for _, t in known.values()]
        return sum(like) / len(like) * (1 - known.get(row, (0.0,))[0])

    times = [left(row) for row in todo]
    eta = int(max(sum(times) / n, *times, 0.0))
    return f'{eta // 3600}:{eta // 60 % 60:02d}:{eta % 60:02d}'


def execute(rows: list[Row]) -> int:
    """Runs what is not finished -> the exit status: 0 all done, 1 some failed or are another process's, 128 + signal when told to stop."""
    states = {row: state_of(row) for row in rows}
    for state, what in (
        ('other', 'a run with other settings'),
        ('damaged', 'a log that cannot be read, and no checkpoint'),
    ):
        folders = [folder_of(row) for row in rows if states[row] == state]
        if folders:
            fail(
                f'{folders[0]} holds {what} (folders like this: {len(folders)}): move it away, or choose another out_dir'
            )
    queue, free = [row for row in rows if states[row] != 'done'], devices()
    n, done, failed, left, running, said = len(free), 0, {}, [], {}, time.time()
    print(
        f'{plan}: {len(rows)} runs, {len(rows) - len(queue)} finished before; {n} at a time; {os.path.join(out_dir, plan)}',
        flush=True,
    )
    stopper = Stopper()
    try:
        while running or queue and stopper.signal is None:
            while queue and free and stopper.signal is None:
                row = queue.pop(0)
                try:
                    process = start(row, free[0], n)
                except OSError as error:
                    failed[row] = str(error)
                    print(f'{row.name}: FAILED to start: {error}', flush=True)
                    continue
                if process is None and state_of(row) == 'done':
                    print(f'{row.name}: another process has finished it', flush=True)
                elif process is None:
                    left.append(row)
                    print(f'{row.name}: another process has it, left to it', flush=True)
                else:
                    running[row] = (process, free.pop(0), time.time())
            for row in [
                row for row, (process, _, _) in running.items() if process.poll() is not None
            ]:
                process, gpu, begin = running.pop(row)
                free.append(gpu)
                word = 'done'
                if process.returncode != 0 or state_of(row) != 'done':
                    if stopper.signal is not None:
                        continue  # told to stop: it has saved
                    failed[row] = last_words(row)
                    record_failure(row, process.returncode, failed[row])
                    word = f'FAILED (exit status {process.returncode}): {failed[row]}'
                else:
                    done += 1
                print(
                    f'[{len(rows) - len(queue) - len(running)}/{len(rows)}] {row.name}: {word}, {time.time() - begin:.0f} s | '
                    f'eta {remaining(rows, [*queue, *running], n)}',
                    flush=True,
                )
            if queue and not done and len(failed) >= ALIKE and len(set(failed.values())) == 1:
                print(
                    f'the first {len(failed)} runs failed alike: the other {len(queue)} are not started',
                    flush=True,
                )
                queue.clear()  # none would do better: the levels are not there, say
            if stopper.signal is not None:
                stop(running)
            elif time.time() - said > REPORT and running:
                said, parts = time.time(), [f'{row.name} {progress(row)[0]:.0%}' for row in running]
                print(
                    f'    running: {", ".join(parts)} | eta {remaining(rows, [*queue, *running], n)}',
                    flush=True,
                )
            time.sleep(POLL)
    except BaseException:  # a second ctrl-C: their last checkpoints stay
        for process, _, _ in running.values():
            process.terminate() if gpus_per_run > 1 else process.kill()  # torchrun ends its ranks only if it lives
        raise
    stopper.restore()
    for row, message in failed.items():
        print(f'failed: {row.name}: {message}; see {folder_of(row)}/stdout.txt')
    if stopper.signal is not None:
        print('stopped; runs that had begun have saved: the same command goes on')
        return 128 + stopper.signal
    return 1 if failed or left else 0


def stop(running: dict) -> None:
    """Has all runs save, and waits for them."""
    for process, _, _ in running.values():
        process.terminate()
    for process, _, _ in running.values():
        process.wait()


def print_jobs(rows: list[Row], config: dict) -> None:
    """The plan for a cluster: each job is this script on one row, so that it resumes what was cut and skips what is finished."""
    if waits(rows):
        print(f'{LATER}: then give this command again', file=sys.stderr)
    defaults = read_script(__file__)[0]
    which = [
        f'--{k}={v}'
        for k, v in config.items()
        if v != defaults[k] and k not in ('emit', 'run', 'index', 'figure', 'table', 'workers')
    ]
    line = shlex.join(
        ['python', os.path.relpath(os.path.abspath(__file__)), *which, '--run', '--workers=1']
    )
    if emit == 'commands':
        for i in range(len(rows)):
            print(f'{line} --index={i}')
    else:
        print(f'''#!/bin/bash
#SBATCH --job-name=sweep-{plan}
#SBATCH --array=0-{len(rows) - 1}
#SBATCH --nodes=1 --ntasks=1 --cpus-per-task=8 --gpus-per-task={gpus_per_run}
#SBATCH --time=24:00:00 --requeue --signal=B:TERM@120
# a job that meets its time limit saves two minutes before it: submit this again, and all go on where they were
cd {shlex.quote(os.getcwd())} && exec {line} --index="$SLURM_ARRAY_TASK_ID"''')


# ----------------------------------------------------------------------------- the command


def main() -> int:
    config = configure(globals(), quiet=True)
    check_settings()
    rows = plan_rows()
    if table == 'solve' and all(row.is_text for row in rows):
        fail(f'plan {plan!r} has no Sokoban agents: table = solve is for those')
    if emit:
        print_jobs(rows, config)
        return 0
    if index >= len(rows):
        fail(
            f'index = {index}: plan {plan!r} has runs 0 to {len(rows) - 1} here'
            + (', until all values have been tried' if waits(rows) else '')
        )
    if not (run or figure or table):
        print_plan(rows)
        return 0
    status = execute(rows if index < 0 else [rows[index]]) if run else 0
    while run and tune and index < 0 and status < 2 and (again := plan_rows()) != rows:
        rows, status = again, execute(again)  # the best values' other seeds
    if status < 2 and (figure or table):
        show(rows)
    return status


def finished(rows: list[Row]) -> list[tuple[Row, list[dict]]]:
    """The finished runs and their logs. A log that cannot be read, one without a value and a run with other settings are skipped with a
    warning."""
    runs = []
    for row in rows:
        try:
            log = read_log(folder_of(row))
        except FileNotFoundError:
            continue
        except LogError as error:
            print(f'warning: {error}: this run is skipped', file=sys.stderr)
            continue
        done = bool(log) and log[-1]['step'] >= total_of(row)
        if has_other_settings(row):
            print(f'warning: {folder_of(row)}: a run with other settings, skipped', file=sys.stderr)
        elif done and value(row, log) is None:
            print(
                f'warning: {folder_of(row)}/log.jsonl: has no {"validation loss" if row.is_text else "return"} at its end: this run is skipped',
                file=sys.stderr,
            )
        elif done:
            runs.append((row, log))
    return runs


def show(rows: list[Row]) -> None:
    """Figures and tables of what has finished."""
    runs, into = finished(rows), results or os.path.join(out_dir, plan)
    if not runs:
        fail(
            f'{os.path.join(out_dir, plan)}: no run of plan {plan!r} has finished: nothing to show; --run runs them'
        )
    os.makedirs(into, exist_ok=True)
    print(f'{len(runs)} of {len(rows)} runs have finished')
    fair = [
        (row, log)
        for row, log in runs
        if not plan.startswith(('sokoban', 'lm-')) or over_budget(row) <= DEAR
    ]
    for row in {row for row, _ in runs} - {row for row, _ in fair}:
        print(f'in the table alone: {row.name} costs {over_budget(row):.2f} budgets')
    paths = []
    if figure:
        token = (
            'byte'
            if any(row.is_text and config_of(row)['tokenizer'] == 'bytes' for row in rows)
            else 'token'
        )
        name = tune.partition('=')[0]
        scale = (
            (f', widths x {width:g}' if width != 1 else '')
            + (f', steps x {length:g}' if length != 1 else '')
            + (f', best {name.replace("_", " ")}s' if name else '')
        )
        paths += draw(
            plan + scale,
            [without(row, name) for row in rows],
            [(without(row, name), log) for row, log in at_best(fair, name)],
            token,
            reference,
            into,
        )
    if table:
        paths += tables(runs, reference, into)
        about = {
            'plan': plan,
            'drawn_at_commit': commit(),
            'device': device_name('cuda' if torch.cuda.is_available() else 'cpu'),
            'torch': torch.__version__,
            'command': shlex.join(['python', *sys.argv]),
        }
        records = [
            run_record(row, log)
            | {'over_budget': over_budget(row), 'commit': saved_config(row).get('commit')}
            for row, log in runs
        ]
        write_json(about | {'runs': records}, os.path.join(into, 'runs.json'))
        paths.append(os.path.join(into, 'runs.json'))
    if table == 'solve':
        cells = chosen_by_return(fair)
        rates = {
            cell: [solve_rate(row) for row, _ in runs if row._replace(seed=0) == cell]
            for cell in cells
        }
        paths += solve_table(rates, levels, reference, into)
    print('\n'.join(paths))


def solve_rate(row: Row) -> float:
    """A finished agent's solve rate on `levels`, greedy: from its folder's eval_*.json, or evaluated now."""
    config = config_of(row)
    name = os.path.splitext(os.path.basename(levels or config['eval_split']))[0]
    path = os.path.join(folder_of(row), f'eval_{name}.json')

    def saved() -> float | None:
        try:
            with open(path) as file:
                record = json.load(file)
            same = record['env_steps'] == total_of(row) * config['n_envs'] * config['unroll'] and (
                levels or record['n'] == config['eval_games']
            )
            return record['solve_rate'] if same else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    status = 0
    if (
        saved() is None or os.path.dirname(levels) or os.path.isfile(levels)
    ):  # a file's name does not say which file
        print(f'{row.name}: playing {name}', flush=True)
        status = subprocess.run(
            [sys.executable, *arguments(row), '--eval_only=True', f'--levels={levels}'],
            stdout=subprocess.DEVNULL,
        ).returncode
    if status or (rate := saved()) is None:
        fail(f'{row.name}: its evaluation on {name} failed: see above')
    return rate


def check_settings() -> None:
    for name in ('seeds', 'workers'):
        if globals()[name] < 0:
            fail(f'{name} = {globals()[name]}: must not be negative')
    if not (0 < width <= 1000 and 0 < length <= 1000):
        fail(f'width = {width}, length = {length}: must be positive, and at most 1000')
    if gpus_per_run < 1 or index < -1:
        fail(
            f'gpus_per_run = {gpus_per_run}, index = {index}: expected at least 1, and a row or -1'
        )
    if emit not in ('', 'slurm', 'commands'):
        fail(f"emit = {emit!r}: expected 'slurm' or 'commands'")
    if table not in (None, True, False, 'solve'):
        fail(f"table = {table!r}: expected True or 'solve'")
    if emit and (run or figure or table or index >= 0):
        fail(
            f'emit = {emit!r} prints jobs and does nothing else: leave out run, index, figure and table'
        )
    if index >= 0 and not run:
        fail(f'index = {index} chooses a run for --run')
    for name in ('out_dir', 'results'):
        if os.path.exists(globals()[name]) and not os.path.isdir(globals()[name]):
            fail(f'{name} = {globals()[name]!r}: is not a folder')
    if reference and not os.path.isdir(reference):
        fail(f'reference = {reference!r}: no such folder')
    need_packages(matplotlib=figure)


if __name__ == '__main__':
    run_script(main)

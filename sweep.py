"""
Ask the allocation question: list the runs of one figure, run them, and draw what has finished.

$ python sweep.py --plan sokoban-small                    # every run: sizes, cost, state, command
$ python sweep.py --plan sokoban-small --run              # run them, one a GPU; again: go on
$ python sweep.py --plan sokoban-small --emit=slurm       # an array job, to be piped into sbatch
$ python sweep.py --plan sokoban-small --figure --table   # what has finished: PNG, SVG, MD, CSV
$ python sweep.py --plan sokoban-small --table=solve      # the best ones' solve rates
$ python sweep.py --plan sokoban --figure --table         # its three budgets together
$ python sweep.py config/study_lm.py --run --figure --table   # a study for two CPU cores

A plan compares allocations (L, E, d) at one budget W: E = round(W / (L C(d))) experts, where C(d)
is an expert's cost; a row is dropped where that is 0. ConvLSTM: C = 9 (32 + 2d) 4d multiply-adds a
cell, W = C(128), C(256), C(1024). ConvGLU: C = 9 d 2d. Language models: C = forward FLOPs of a
block a token, W = 16 or 32 blocks of width 768. With `tune` all values run with seed 1; a best
number at an edge, twice or half the next one, adds half the least or twice the greatest, three
times at most. When all have ended, the list grows by seeds 2..n+1 of each allocation's best value,
and figures and tables show these alone. Writes into out_dir/PLAN: a folder a run, finished when its
log is at its last step; figures and tables (plan sokoban: from its parts' runs).
"""

import contextlib
import fcntl
import functools
import itertools
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from math import inf
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen

from configurator import Mistake, configure, every, fail, first_line, read_argument, read_config
from configurator import read_json, read_script, run_script, write_json, write_text  # before torch

import numpy as np
import torch

import figures
from common import Stopper, commit, need_packages, saved_in
from convlstm import AGGREGATIONS, AgentConfig, build_agent
from data_fineweb import VOCAB
from figures import Row, read_log, value
from model import RESIDUALS, ModelConfig, build_model

# fmt: off
# which runs
plan = ''                      # a name of PLANS; an unknown one lists them
only = ''                      # a part of it, as in 'L=1,2 variant=recurrent model=convglu'
seeds = 0                      # a cell's, 1..n (tuned: 2..n+1); 0: Sokoban 3, language models 1
tune = ''                      # 'learning_rate=0.02,0.04': a cell's best value, found with seed 1
base = ''                      # config file under all runs, or the recurrent ones; '': the plan's
base_ff = ''                   # the same under those that are not recurrent
also = ''                      # settings of every run besides, as in 'compile=True threads=1'
width = 1.0                    # shrinks a plan: of all widths; L and E as without
length = 1.0                   # the same for updates or environment steps
out_dir = 'out/sweep'          # runs go into out_dir/PLAN/NAME
# what to do with them; nothing: list them
run = False                    # run what is not finished
workers = 0                    # runs at a time; 0: one a GPU (see gpus_per_run), or one on a CPU
gpus_per_run = 1               # more: each run under torchrun
index = -1                     # of run: this row of the list alone (array jobs)
emit = ''                      # print an array job ('slurm') or a line a run ('commands')
figure = False                 # draw the plan's figures
table = None                   # True: mean, variance, N; 'solve': the best ones' solve rates too
                               # on unfiltered-test, or of generated levels on held-out ones
reference = ''                 # folder with the paper's tables: drawn and listed beside ours
results = ''                   # folder for figures and tables; '': out_dir/PLAN
# fmt: on
RANGES = {'width': (1e-3, 1000), 'length': (1e-6, 1000), 'emit': ['', 'slurm', 'commands']}
RANGES |= {'seeds': (0, inf), 'workers': (0, inf), 'gpus_per_run': (1, inf), 'index': (-1, inf)}
RANGES['table'] = [None, True, False, 'solve']

HERE = os.path.dirname(os.path.abspath(__file__))
# budget: widths; W is the cost of one expert of the widest
AGENTS = {'small': (32, 64, 128), 'medium': (32, 64, 128, 256), 'large': (64, 128, 256, 512, 1024)}
BLOCKS = {'small': 16, 'medium': 32, 'small-long': 16}  # of width 768: a language model's W
LM = 'transformer'
# plan: models and budgets; allocations of equal cost
FIGURES = {f'sokoban-{budget}': [f'convlstm {budget}', f'convglu {budget}'] for budget in AGENTS}
FIGURES['sokoban-large'].remove('convglu large')
FIGURES['sokoban'] = sum(FIGURES.values(), [])  # all budgets
FIGURES |= {f'lm-{budget}': [f'{LM} {budget}'] for budget in BLOCKS}
RULES = [(LM, False, L, 16 // L, 768) for L in (2, 4, 8)]  # with one expert they are the same
RULES += [('convglu', recurrent, 2, 2, 128) for recurrent in (True, False)]
SUMMED = [('convlstm', True, 1, 4, 128), (LM, True, 2, 8, 768)]
ABLATIONS = {  # plan: setting, values, cells: model, recurrent, L, E, d
    'aggregation': ('aggregation', AGGREGATIONS, SUMMED),
    'communication': ('radius', range(8), [('convlstm', True, 2, 8, 32)]),
    'share-kv': ('share_kv', [True, False], [(LM, True, L, 16 // L, 768) for L in (1, 2, 4)]),
    'residual': ('residual', RESIDUALS, RULES),
}
SIZES = [(L, E) for L in (1, 2, 4, 8) for E in (1, 2, 4, 8, 16, 32, 64)]  # cost grows with both
SCALED = [('convlstm', 64), ('convglu', 64), (LM, 384)]
PLANS = [*FIGURES, *ABLATIONS, 'scaling']
SAME_RUN = (  # settings that may change without making another run
    'out_dir resume overwrite eval_only levels best plot tensorboard wandb wandb_project '
    'eval_interval batch_size device dtype compile graphs path mode threads reuse download'
).split()
DEAR = 1.5  # budgets: where half an expert is rounded up, a language model is left out
FURTHER = 3  # times at most that `tune` goes on beyond an edge
WRONG = {'other': 'a run with other settings', 'damaged': 'a log that cannot be used'}
say = functools.partial(print, flush=True)
POLL, REPORT = 0.2, 10.0  # seconds between looks at the runs, and between lines about them
DRAWS = 10000  # of the bootstrap


@functools.cache
def under(model: str, recurrent: bool, budget: str) -> tuple[dict, list[str]]:
    """What a run's own settings are laid over: defaults, config files and `also`; and the files.
    Agents need none: train_sokoban.py's defaults are the paper's, where it gives them."""
    family = budget.replace('-', '_') + ('' if recurrent else '_nonrecurrent')
    path = (base if recurrent else base_ff or base) or f'config/{family}_L2.py' * (model == LM)
    if path and not os.path.exists(path) and os.path.exists(os.path.join(HERE, path)):
        path = os.path.relpath(os.path.join(HERE, path))
    defaults = read_script(os.path.join(HERE, Row(model, recurrent, budget, 1, 1, 1).script))[0]
    config = dict(defaults)
    if path:
        read_config(path, config, defaults)
    for setting in also.split():
        read_argument(f'--{setting}', config, defaults, f'also = {also!r}')
    return config, [path] * bool(path)


def settings_of(row: Row) -> dict:
    """A run's own settings, as its command line has them."""
    config, _ = under(*row[:3])
    own = {} if row.is_text else {'arch': row.model}
    own |= {'recurrent': row.recurrent, 'n_layer': row.L, 'n_expert': row.E, 'n_embd': row.d}
    own |= {'seed': row.seed, **dict(row.more)}
    more = [setting.partition('=')[0] for setting in also.split()]
    if clash := [name for name in more if name in own]:
        fail(f'also = {also!r}: plan {plan!r} sets {", ".join(clash)} itself')
    names = ('max_iters', 'warmup_iters', 'eval_interval') if row.is_text else ('total_steps',)
    for name in names if length != 1 else ():
        own[name] = max(1, round(config[name] * length))
    return {name: config[name] for name in more} | own


def config_of(row: Row) -> dict:
    return under(*row[:3])[0] | settings_of(row)


@functools.cache
def cost(row: Row) -> tuple[float, int]:
    """Of a token (levels' forward FLOPs) or environment step (multiply-adds); the parameters."""
    config = config_of(row)
    names = vars(ModelConfig() if row.is_text else AgentConfig()).keys() & config.keys()
    sizes = {name: config[name] for name in names - {'path', 'mode', 'dtype'}}
    try:
        with torch.device('meta'):  # sizes without memory
            if row.is_text:
                its = ModelConfig(**sizes, vocab_size=VOCAB[config['tokenizer']])
                built = build_model(its, row.recurrent)
                return built.flops_per_token()['core'], built.num_params()['total']
            built = build_agent(AgentConfig(**sizes))
            return float(built.macs_per_step()['nominal']), built.num_params()['total']
    except (ValueError, KeyError, RuntimeError, OverflowError) as error:
        fail(f'plan {plan!r}, {row.name}: {first_line(error)}; see base, width')


def scaled(d: int) -> int:
    return max(1, round(d * width))


def budget_of(model: str, recurrent: bool, budget: str, scale: Callable = scaled) -> float:
    """W, in cost()'s units. scale: of its widths."""
    n, d = (BLOCKS[budget], 768) if model == LM else (1, max(AGENTS[budget]))
    return n * cost(Row(model, recurrent, budget, 1, 1, scale(d)))[0]


def over_budget(row: Row) -> float:
    return cost(row)[0] / budget_of(*row[:3])


# ----------------------------------------------------------------------------- the plans


def cells_of(name: str) -> list[Row]:
    """A plan's rows with seed 1."""
    if name == 'scaling':
        sizes = [(model, r, d) for model, d in SCALED for r in (True, False)]
        return [Row(m, r, 'small', L, E, scaled(d)) for m, r, d in sizes for L, E in SIZES]
    if name in ABLATIONS:
        setting, values, cells = ABLATIONS[name]
        rows = [Row(m, r, 'small', L, E, scaled(d)) for m, r, L, E, d in cells]
        return [row._replace(more=((setting, value),)) for row in rows for value in values]
    rows, depths = [], (1, 2, 4, 8, 16, 32) if name == 'lm-medium' else (1, 2, 4, 8, 16)
    for model, budget, recurrent in ((*f.split(), r) for f in FIGURES[name] for r in (True, False)):
        W = budget_of(model, recurrent, budget, int)  # a shrunk plan keeps its allocations
        most = DEAR * W if model == LM else inf
        widths = (1536, 768, 384) if model == LM else AGENTS[budget][::-1]
        for L, d in itertools.product(depths, widths):
            one = Row(model, recurrent, budget, 1, 1, d)
            each = cost(one)[0]
            E = round(W / (L * each))  # a half to even: exactly half an expert is none
            if 0 < L * E * each <= most:
                rows.append(one._replace(L=L, E=E, d=scaled(d)))
    return list(dict.fromkeys(rows))  # two widths may shrink to one


def tuned(rows: list[Row]) -> list[Row]:
    """Each row once a value of `tune`."""
    name, _, values = tune.partition('=')
    if not name or not values:
        fail(f"tune = {tune!r}: expected a setting and its values, as in 'learning_rate=0.02,0.04'")
    out = []
    for row in rows:
        if name in settings_of(row) or name in SAME_RUN:
            fail(f'tune: {name} cannot be tuned: plan {plan!r} sets it, or it changes no result')
        for text in values.split(','):
            read_argument(f'--{name}={text}', own := {}, under(*row[:3])[0], f'tune = {tune!r}')
            out.append(row._replace(more=(*row.more, (name, own[name]))))
    return list(dict.fromkeys(out))


def winners(rows: list[Row]) -> list[Row]:
    """Of rows that differ in `tune` alone the best, by seed 1; none until all have ended."""
    if not {state_of(row) for row in rows} <= {'done', 'failed'}:
        return []
    return [row for row, _ in figures.at_best(finished(rows), tune.partition('=')[0])]


def further(rows: list[Row]) -> list[Row]:
    """Half or twice the winners that are the least or the greatest value tried, where the next one
    is as far away (of rates, say): more to try."""
    name, out = tune.partition('=')[0], []
    for row in winners(rows):
        cell, best = figures.without(row, name), dict(row.more)[name]
        tried = sorted(dict(r.more)[name] for r in rows if figures.without(r, name) == cell)
        factor = 1.0
        if isinstance(best, float) and len(tried) > 1 and tried[0] > 0:
            if best == tried[-1] >= 2 * tried[-2]:
                factor = 2.0
            elif best == tried[0] <= tried[1] / 2:
                factor = 0.5
        if factor != 1:
            out.append(cell._replace(more=(*cell.more, (name, factor * best))))
    return out


def chosen(rows: list[Row]) -> list[Row]:
    """The rows that `only` names."""
    for condition in only.split():
        key, _, values = condition.partition('=')
        known = ('model', 'variant', 'L', 'E', 'd')
        fields = [{k: str(getattr(row, k)) for k in known} | dict(row.more) for row in rows]
        pairs = zip(rows, fields, strict=True)
        rows = [row for row, its in pairs if str(its.get(key)) in values.split(',')]
        if not rows:
            there = ','.join(dict.fromkeys(str(f.get(key, ', '.join(f))) for f in fields))
            fail(f'only = {only!r}: leaves none of plan {plan!r}: {key} can be any of {there}')
    return rows


def plan_rows() -> list[Row]:
    """All runs that are known by now, the first seed of every cell before the second of any."""
    if plan not in PLANS:
        fail(f'plan = {plan!r}: expected one of {", ".join(PLANS)}')
    again = cells = chosen(cells_of(plan))
    if tune:
        cells = tuned(cells)
        for _ in range(FURTHER):
            cells = cells + further(cells)
        again = winners(cells)
    last = {row: (seeds or (1 if row.is_text else 3)) + bool(tune) for row in cells}
    more = range(2, max(last.values()) + 1)
    return cells + [row._replace(seed=n) for n in more for row in again if n <= last[row]]


def folder_of(row: Row) -> str:
    part = f'sokoban-{row.budget}' if plan == 'sokoban' else plan
    return os.path.join(out_dir, part, row.name)


def total_of(row: Row) -> int:
    """The `step` of a finished run's last log line: its updates."""
    c = config_of(row)
    return c['max_iters'] if row.is_text else -(-c['total_steps'] // (c['n_envs'] * c['unroll']))


def look(row: Row) -> tuple[str, float, float]:
    """A run's state, how much of it is done, 0 to 1, and the seconds that took. The state is
    'done', 'failed', 'other' (a run with other settings), 'damaged' (no log that can be used, nor a
    checkpoint, from which a resumed run repairs it) or, of what can begin or go on, ''."""
    folder, log = Path(folder_of(row)), [{'step': 0}]
    saved = read_json(folder / 'config.json')
    state = 'failed' if (folder / 'failed.json').exists() else ''
    try:
        log += read_log(folder)
    except FileNotFoundError:
        pass
    except Mistake:
        state = state if saved_in(folder) else 'damaged'
    part = min(1.0, log[-1]['step'] / total_of(row))
    wanted = json.loads(json.dumps(config_of(row)))  # tuples become lists
    if any(saved[k] != v for k, v in wanted.items() if k in saved and k not in SAME_RUN):
        state = 'other'
    elif part == 1:
        state = 'damaged' if value(log) is None else 'done'
    return state, part, log[-1].get('seconds') or 0.0


def state_of(row: Row) -> str:
    return look(row)[0]


def arguments(row: Row) -> list[str]:
    """Script, config files and settings of a run, from the current folder."""
    flags = [f'--{k}={v}' for k, v in {**settings_of(row), 'out_dir': folder_of(row)}.items()]
    return [os.path.relpath(os.path.join(HERE, row.script)), *under(*row[:3])[1], *flags]


def command(row: Row) -> list[str]:
    """What starts a run."""
    if gpus_per_run == 1:
        return ['python', *arguments(row)]
    return ['torchrun', '--standalone', f'--nproc_per_node={gpus_per_run}', *arguments(row)]


def print_plan(rows: list[Row]) -> None:
    units = dict.fromkeys('MFLOP a token' if row.is_text else 'MMAC a step' for row in rows)
    print(f'number, name, {", ".join(units)} (levels only), budgets, parameters, state, command')
    wide = max(len(row.name) for row in rows)
    for i, row in enumerate(rows):
        (amount, params), (state, part, _) = cost(row), look(row)
        costs = f'{amount / 1e6:10,.1f} {over_budget(row):4.2f} {params:13,}'
        line = shlex.join(command(row))
        print(f'{i:3} {row.name:{wide}} {costs} {state or format(part, ".0%"):>7} {line}')


# ----------------------------------------------------------------------------- running


def devices() -> list[str]:
    """What each worker's CUDA_VISIBLE_DEVICES is; '' for one on the CPU."""
    n, k = torch.cuda.device_count(), gpus_per_run
    if n < k and (n > 0 or k > 1):
        fail(f'gpus_per_run = {k}: there are {n} GPUs here')
    if n == 0:
        return [''] * (workers or 1)
    names = os.environ.get('CUDA_VISIBLE_DEVICES', ','.join(map(str, range(n)))).split(',')[:n]
    groups = [','.join(names[i : i + k]) for i in range(0, n - k + 1, k)]
    first = max(index, 0)  # jobs of one row each, side by side, spread out
    return [groups[(first + i) % len(groups)] for i in range(workers or len(groups))]


def start(row: Row, gpu: str, n: int) -> Popen | None:
    """Starts or resumes a run as one of n workers; None if another process has it or has finished
    it. It inherits the folder's lock, and so keeps it when this process dies."""
    folder = Path(folder_of(row))
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / '.lock', 'w') as lock, open(folder / 'stdout.txt', 'ab') as out:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        if state_of(row) in ('done', *WRONG):  # under the lock: it may have changed
            return None
        launcher, *line = command(row)
        line = ['-m', 'torch.distributed.run', *line] if launcher == 'torchrun' else line
        line.append('--resume=True' if saved_in(folder) else '--overwrite=True')
        threads = max(1, len(os.sched_getaffinity(0)) // (n * gpus_per_run))
        env = {'OMP_NUM_THREADS': str(threads), **os.environ}
        env |= {'CUDA_VISIBLE_DEVICES': gpu} if gpu else {}
        out.write(b'---- started\n')
        out.flush()
        options = {'stdin': DEVNULL, 'stderr': STDOUT, 'pass_fds': [lock.fileno()], 'env': env}
        # in a session of its own: ctrl-C is ours to pass on
        return Popen([sys.executable, *line], stdout=out, start_new_session=True, **options)


def outcome(row: Row, status: int) -> str:
    """'' for a run that is done, or the last error it printed, which failed.json keeps."""
    failed = Path(folder_of(row), 'failed.json')
    if status == 0 and state_of(row) == 'done':
        failed.unlink(missing_ok=True)  # of an earlier try
        return ''
    text = Path(folder_of(row), 'stdout.txt').read_text(errors='replace')
    text = text.rpartition('---- started\n')[2]  # of this try
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ['it printed nothing']
    errors = [line for line in lines if re.match(r'(error: |[\w.]*(Error|Exception)\b)', line)]
    message = (errors or lines)[-1][:300]
    record = {'exit': status, 'message': message, 'command': shlex.join(command(row))}
    with contextlib.suppress(OSError):  # the disk may be full
        write_json(record, failed)
    return f'FAILED (exit status {status}): {message}'


def remaining(todo: list[Row], all_rows: list[Row], n: int) -> str:
    """ETA of n workers, by the time that the runs so far took."""
    parts = {row: look(row)[1:] for row in all_rows}
    done, seconds = map(sum, zip(*parts.values(), strict=True))
    if not done:
        return 'n/a'
    each = seconds / done / min(n, len(todo) or 1)
    return str(timedelta(seconds=int(each * sum(1 - parts[row][0] for row in todo))))


def execute(rows: list[Row]) -> int:
    """Runs what is not finished -> 0 all done, 1 some are not, 128 + signal when told to stop."""
    free, queue, running, failed = devices(), [], {}, {}
    for row in rows:
        if (state := state_of(row)) in WRONG:
            fail(f'{folder_of(row)} holds {WRONG[state]}: move it away, or change out_dir')
        if state != 'done':
            queue.append(row)
    n, due = len(free), every(REPORT)
    say(f'{plan}: {len(rows)} runs, {len(rows) - len(queue)} finished before; {n} at a time')
    stopper = Stopper()
    try:
        while running or queue and stopper.signal is None:
            while queue and free and stopper.signal is None:
                row = queue.pop(0)
                if process := start(row, free[0], n):
                    running[row] = (process, free.pop(0), time.time())
                else:
                    say(f'{row.name}: another process has it, or has finished it')
            for row in [row for row in running if running[row][0].poll() is not None]:
                process, gpu, began = running.pop(row)
                free.append(gpu)
                if stopper.signal is not None and state_of(row) != 'done':
                    continue  # told to stop: it has saved
                ended = outcome(row, process.returncode)
                if ended:
                    failed[row] = ended
                words = f'{row.name}: {ended or "done"}, {time.time() - began:.0f} s'
                eta = remaining([*queue, *running], rows, n)
                say(f'[{len(rows) - len(queue) - len(running)}/{len(rows)}] {words} | eta {eta}')
            if stopper.signal is not None:
                for process, _, _ in running.values():
                    process.terminate()  # they save
                for process, _, _ in running.values():
                    process.wait()
            elif running and due():
                parts = ', '.join(f'{r.name} {look(r)[1]:.0%}' for r in running)
                say(f'    running: {parts} | eta {remaining([*queue, *running], rows, n)}')
            time.sleep(POLL)
    except BaseException:  # a second ctrl-C: their last checkpoints stay
        for process, _, _ in running.values():
            # torchrun ends its ranks only if it lives
            process.terminate() if gpus_per_run > 1 else process.kill()
        raise
    stopper.restore()
    for row, message in failed.items():
        say(f'failed: {row.name}: {message}; see {folder_of(row)}/stdout.txt')
    if stopper.signal is not None:
        say('stopped; runs that had begun have saved: the same command goes on')
        return 128 + stopper.signal
    return int(any(state_of(row) != 'done' for row in rows))


def print_jobs(rows: list[Row], config: dict) -> None:
    """The plan for a cluster: each job is this script on one row, run by this Python."""
    defaults = read_script(__file__)[0]
    mine = ('emit', 'run', 'index', 'figure', 'table', 'workers')
    which = [f'--{k}={v}' for k, v in config.items() if v != defaults[k] and k not in mine]
    script = os.path.relpath(os.path.abspath(__file__))
    line = shlex.join([sys.executable, script, *which, '--run', '--workers=1'])
    if emit == 'commands':
        print(*[f'{line} --index={i}' for i in range(len(rows))], sep='\n')
        return
    print(f'''#!/bin/bash
#SBATCH --job-name=sweep-{plan}
#SBATCH --array=0-{len(rows) - 1}
#SBATCH --nodes=1 --ntasks=1 --cpus-per-task=8 --gpus-per-task={gpus_per_run}
#SBATCH --time=24:00:00 --requeue --signal=B:TERM@120
# a job that meets its time limit saves two minutes before it: submit this again, and all go on
cd {shlex.quote(os.getcwd())} && exec {line} --index="$SLURM_ARRAY_TASK_ID"''')


# ----------------------------------------------------------------------------- figures and tables


def finished(rows: list[Row]) -> list[tuple[Row, list[dict]]]:
    """The finished runs and their logs. What cannot be used is skipped with a warning."""
    runs = []
    for row in rows:
        folder, state = folder_of(row), state_of(row)
        if state in WRONG:
            print(f'warning: {folder} holds {WRONG[state]}: this run is skipped', file=sys.stderr)
        elif state == 'done':
            runs.append((row, read_log(folder)))
    return runs


def best_depths(runs: list) -> str:
    """How sure each variant's best L is: that of the best mean of seeds drawn with replacement,
    DRAWS times; and of means drawn with errors of a t distribution, which allow for few seeds.
    '' where a variant is missing, or a second seed."""
    values = {'recurrent': {}, 'feedforward': {}}
    for row, log in runs:
        cell = values[row.variant].setdefault(row.cell, [])
        cell.append(value(log) * (1 if row.is_text else -1))
    if any(not mine or min(map(len, mine.values())) < 2 for mine in values.values()):
        return ''
    generator, other = (np.random.default_rng(seed) for seed in (1, 2))
    best, by_t, words = [], [], []

    def errors(v: list) -> np.ndarray:
        return np.std(v, ddof=1) / len(v) ** 0.5 * other.standard_t(len(v) - 1, DRAWS)

    for variant, mine in values.items():
        levels = np.array([row.L for row in mine])
        means = [generator.choice(v, (DRAWS, len(v))).mean(1) for v in mine.values()]
        best.append(levels[np.argmin(means, 0)])
        by_t.append(levels[np.argmin([np.mean(v) + errors(v) for v in mine.values()], 0)])
        low, high = np.quantile(best[-1], (0.025, 0.975), method='nearest')
        exact = min(mine, key=lambda row: np.mean(mine[row])).L
        words.append(f'{variant} {exact} (95%: {low} to {high})')
    smaller, equal = np.mean(best[0] < best[1]), np.mean(best[0] == best[1])
    words.append(f'recurrent smaller in {smaller:.1%}, equal in {equal:.1%}')
    words.append(f'with errors of a t distribution smaller in {np.mean(by_t[0] < by_t[1]):.1%}')
    return f'Best L, {DRAWS:,} bootstrap draws of seeds: {", ".join(words)}.'


def solve_rate(row: Row, levels: str) -> float:
    """A finished agent's on levels ('': held-out ones), greedy: its folder's, or played now."""
    c = config_of(row)
    path = Path(folder_of(row), f'eval_{levels or Path(c["eval_split"]).stem}.json')
    its, wanted = read_json(path), total_of(row) * c['n_envs'] * c['unroll']
    if its.get('env_steps') != wanted or not levels and its.get('n') != c['eval_games']:
        say(f'{row.name}: playing {levels or c["eval_split"]}')
        line = [sys.executable, *arguments(row), '--eval_only=True', f'--levels={levels}']
        if Popen(line, stdout=DEVNULL).wait() != 0:
            fail(f'{row.name}: its evaluation failed: see above')
    return read_json(path)['solve_rate']


def show(rows: list[Row]) -> None:
    """Figures and tables of what has finished, with `tune` of the seeds that chose nothing."""
    runs, into = finished(rows), results or os.path.join(out_dir, plan)
    if not runs:
        fail(f'{into}: no run of plan {plan!r} has finished: nothing to show; --run runs them')
    os.makedirs(into, exist_ok=True)
    print(f'{len(runs)} of {len(rows)} runs have finished')
    name, paths = tune.partition('=')[0], []
    shown = [(row, log) for row, log in runs if row.seed > 1 or not tune]
    if not shown:
        print('one seed a value so far, which chooses it: those to be reported have not run')
        shown = figures.at_best(runs, name)
    for row in further([row for row in rows if row.seed == 1]) if tune else ():
        print(f'{row.name}: not tried, though the best value is the one beside it')
    if figure:
        what = plan + f', widths x {width:g}' * (width != 1)
        what += f', steps x {length:.3g}' * (length != 1)
        what += f', best {name.replace("_", " ")}s' * bool(name)
        drawn = [(figures.without(row, name), log) for row, log in shown]
        is_bytes = any(row.is_text and config_of(row)['tokenizer'] == 'bytes' for row in rows)
        token, cells = 'byte' if is_bytes else 'token', [figures.without(row, name) for row in rows]
        paths += figures.draw(what, cells, drawn, token, reference, into)
    if table:
        paths, found = paths + figures.tables(shown, reference, into, name), {}
        # the three budgets of plan sokoban have bests of their own
        for model in {row.model for row, _ in shown if plan in FIGURES and plan != 'sokoban'}:
            if words := best_depths([run for run in shown if run[0].model == model]):
                print(words)
                found[f'best_{model}'] = words
                path = Path(into, f'table_{model}.md')
                write_text(f'{path.read_text()}\n{words}\n', path)
        paths.append(write_runs(runs, {row for row, _ in shown}, found, into))
    if table == 'solve':
        points = figures.cells([run for run in shown if not run[0].is_text])
        depths = figures.groups(points, lambda row: (row.model, row.budget, row.recurrent, row.L))
        best = [figures.best(part) for part in depths.values()]
        if not best:
            fail("table = 'solve': no agent of this plan has finished")
        levels = '' if config_of(best[0])['split'] == 'generated' else 'unfiltered-test'
        seeds_of = {cell: [row for row, _ in shown if row.cell == cell] for cell in best}
        rates = {cell: [solve_rate(row, levels) for row in seeds_of[cell]] for cell in best}
        paths += figures.solve_table(rates, levels, reference, into, name)
    print('\n'.join(paths))


def write_runs(runs: list, reported: set, found: dict, into: str) -> str:
    """runs.json, also of runs that only chose a value -> its path."""
    about = {'plan': plan, **found, 'command': shlex.join(['python', *sys.argv])}
    about |= {'drawn_at_commit': commit(), 'runs': []}
    for row, log in runs:
        saved, last = read_json(Path(folder_of(row), 'config.json')), log[-1]
        mine = {'name': row.name, 'model': row.model, 'reported': row in reported}
        mine |= figures.cell_fields([row])[row] | dict(row.more) | {'seed': row.seed}
        mine |= {'value': value(log), 'updates': last['step']}
        mine |= {k: saved.get(k) for k in ('commit', 'device_name', 'torch')}
        mine |= {k: last[k] for k in ('tokens', 'env_steps', 'seconds') if k in last}
        about['runs'].append(mine | {'over_budget': over_budget(row)})
    write_json(about, os.path.join(into, 'runs.json'))
    return os.path.join(into, 'runs.json')


def main() -> int:
    config = configure(globals(), quiet=True)
    if emit and (run or figure or table):
        fail(f'emit = {emit!r} prints jobs alone: leave out run, figure and table')
    need_packages(matplotlib=figure)
    rows = plan_rows()
    if table == 'solve' and all(row.is_text for row in rows):
        fail(f'plan {plan!r} has no Sokoban agents: table = solve is for those')
    if index >= len(rows):
        fail(f'index = {index}: plan {plan!r} has runs 0 to {len(rows) - 1} so far')
    if emit:
        print_jobs(rows, config)
    elif not (run or figure or table):
        print_plan(rows)
    if tune and rows[-1].seed == 1 and not (run or figure or table):
        where = sys.stderr if emit else sys.stdout
        print('other values or seeds follow when all of these have finished', file=where)
    status = execute(rows if index < 0 else [rows[index]]) if run else 0
    while run and tune and index < 0 and status < 2 and (again := plan_rows()) != rows:
        new = [row for row in again if row not in rows]  # values, or seeds of the best ones
        rows, status = again, max(status, execute(new))
    if status < 2 and (figure or table):
        show(rows)
    return status


if __name__ == '__main__':
    run_script(main)

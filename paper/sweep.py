"""Run a plan: every figure and table of the paper is a plan, and so is every study (plans.py).

    python -m paper.sweep                                 # list the plans
    python -m paper.sweep lm-small                        # list the runs of one, with their state
    python -m paper.sweep lm-small --run                  # start or resume what is not finished
    python -m paper.sweep lm-small --run --workers=4 --only="n_layer in (1, 2) and recurrent"
    python -m paper.sweep lm-small --run -- --data_dir=/data/fineweb --compile=False
    python -m paper.sweep lm-small --run --vary=learning_rate=0.01,0.02,0.04 --vary=seed=1,2
    python -m paper.sweep lm-small --run --script=my_train.py --vary=z_loss=0,0.01,1
    python -m paper.sweep lm-small --slurm | sbatch       # an array job; the same line resumes it

A run is the folder out/PLAN/NAME, named after the axes of the plan. Its trainer knows whether to
start, to resume or to do nothing (--resume=auto), so that a sweep keeps nothing else. What a run
prints is in its stdout.txt. After a ctrl-C, SIGTERM or SIGUSR1 the runs save, and the same line
resumes.

--only chooses runs by the settings of the plan, before --vary changes them, in a condition as for
DataFrame.query. --vary gives an axis of the plan other values. Any other setting, behind --vary or
behind `--`, is a new axis, and the runs are complete in a folder of their own,
out/PLAN-SETTING/NAME; so are those of other sizes, whose cost differs, and of another trainer.
Behind `--`, settings that change no result (NEUTRAL) or name the data change no folder, but a run
on other data, or of a trainer that has changed since, is refused. (Levels of agents are not
compared: figures print how many sets have trained a plan.) In a plan of agents and language models,
a setting that one trainer lacks is left out there, and a --script takes the runs of its kind.
"""

import argparse
import functools
import os
import re
import shlex
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for python PATH/paper/sweep.py

from support.script import UserError, first_line, print0, run_script, warn

import torch
from pandas import DataFrame, Series

from convlstm import MODEL_SETTINGS as AGENT_SETTINGS
from model import ModelConfig
from paper.plans import (
    ROOT,
    Run,
    cost,
    find_plan,
    full_settings,
    names_of_plans,
    read_runs,
    runs_of,
    script_of,
    updates,
    vary,
)
from support.code import code_record, script_checksum
from support.loader import data_checksum
from support.ranks import Throttle
from support.run_folder import PER_CALL, settings_of
from support.signals import STOP_SIGNALS, Stopper
from support.values import tuples

# Settings that a trainer may take from the weights in init_from.
MODEL_SETTINGS = (*AGENT_SETTINGS, 'tokenizer', *(field.name for field in fields(ModelConfig)))
# Settings that say how fast a run is (its results change by rounding only) and what it reports.
NEUTRAL = (
    *('download', 'device', 'threads', 'compile', 'cuda_graphs', 'overrides', 'batch_size'),
    *('plot', 'tensorboard', 'wandb', 'wandb_project'),
)
DATA = ('data_dir', 'levels_dir')
SAVE_SECONDS = 110  # after a SIGTERM, until torchrun kills its ranks; its default is 30


class Parser(argparse.ArgumentParser):
    """A parser that reports a mistake in one line."""

    def error(self, message: str) -> None:
        raise UserError(f'{message}: --help lists the arguments')


def path(text: str) -> Path:
    """Return the path that an argument names: a shell expands no ~ behind an equals sign. Raises
    ArgumentTypeError for an empty text, as of a variable that is not set."""
    if not text:
        raise argparse.ArgumentTypeError('is empty, name a folder or file')
    return Path(text).expanduser()


def parse() -> argparse.Namespace:
    """Return the arguments, and in `settings` those behind `--`."""
    form = argparse.RawDescriptionHelpFormatter
    parser = Parser(
        'python -m paper.sweep', None, __doc__, formatter_class=form, allow_abbrev=False
    )
    add = parser.add_argument
    add('plan', nargs='?', help='name of a plan; without one, list all')
    add('--run', action='store_true', help='start or resume what is not finished')
    add('--workers', type=int, default=0, help='runs at a time; default: one per GPU, one on a CPU')
    add('--gpus_per_run', type=int, default=1, help='more than 1: by torchrun')
    add('--only', help="a part of the plan: a condition on the plan's settings, before --vary")
    add('--script', type=path, help='your copy of the trainer')
    add('--vary', action='append', default=[], metavar='NAME=VALUE,VALUE', help='an axis')
    add('--slurm', action='store_true', help='print an array job of the runs that are not finished')
    add('--out', type=path, default=Path('out'), help='folder of all runs')
    at = sys.argv.index('--') if '--' in sys.argv else len(sys.argv)
    args = parser.parse_args(sys.argv[1:at])
    args.settings = sys.argv[at + 1 :]
    if args.workers < 0 or args.gpus_per_run < 1:
        raise UserError(
            f'--workers={args.workers} --gpus_per_run={args.gpus_per_run}: must be at least 1'
        )
    return args


# ---- the runs ----


def matching(frame: DataFrame, condition: str) -> DataFrame:
    """Return the rows that fulfill a condition. Raises UserError if it cannot be evaluated, or if
    there are none."""
    try:
        kept = Series(frame.eval(condition), frame.index)
    except Exception as error:  # noqa: BLE001  of any type: the text is the user's
        raise UserError(f'--only={condition!r}: {first_line(error)}') from None
    if kept.dtype != bool or not kept.any():
        raise UserError(f'--only={condition!r}: is no condition, or no run fulfills it')
    return frame[kept]


def select(args: argparse.Namespace) -> list[Run]:
    """Return the runs that the arguments ask for."""
    runs = runs_of(args.plan)
    if not runs:
        raise UserError(f'{args.plan} has no runs: {drawing(args.plan, [], args.out)}')
    if args.only is not None:
        runs = [runs[i] for i in matching(DataFrame(map(full_settings, runs)), args.only).index]
    if args.script:
        script, name = str(args.script.absolute()), args.script.stem
        is_agent = 'n_envs' in script_of(script).defaults
        runs = [run for run in runs if is_agent == ('n_envs' in script_of(run.script).defaults)]
        if not runs:
            kind = 'agents' if is_agent else 'language models'
            raise UserError(f'{args.script}: trains {kind}, of which {args.plan} has none')
        runs = [run._replace(script=script, plan=f'{run.plan}-{name}') for run in runs]
    names = set()
    for argument in [f'--{argument}' for argument in args.vary] + args.settings:
        match = re.fullmatch(r'--(\w+)=(.*)', argument, re.DOTALL)
        if match is None or match[1] in PER_CALL:
            expected = '--vary=NAME=VALUE,VALUE, and --NAME=VALUE after --'
            raise UserError(
                f'{argument!r}: expected {expected}; --out names the folder of all runs'
            )
        name, text = match.groups()
        if name in names:  # the last one would replace the others
            raise UserError(f'{name} is given twice: give all values in one --vary={name}=...')
        names.add(name)
        is_axis = argument not in args.settings
        # a comma in parentheses, as in (0.8, 0.95), does not separate values
        values = re.split(r',(?![^(]*\))', text) if is_axis else [text]
        runs = vary(runs, name, values, is_axis or name not in NEUTRAL + DATA)
    return runs


def command_of(run: Run, args: argparse.Namespace) -> list[str]:
    """Return the command that starts or resumes a run."""
    ranks = f'--nproc_per_node={args.gpus_per_run}'
    launcher = ['-m', 'torch.distributed.run', '--standalone', ranks]
    files = [os.path.relpath(ROOT / path) for path in (run.script, *run.config)]
    flags = [f'--{name}={value}' for name, value in (run.fixed | run.axes).items()]
    folder = [f'--out_dir={args.out / run.folder}', '--resume=auto']
    return [sys.executable, *launcher * (args.gpus_per_run > 1), *files, *flags, *folder]


def drawing(plan: str, runs: list[Run], out: Path) -> str:
    """Return the command that makes the figure or table of a plan from these runs."""
    folders = list(dict.fromkeys(str(out / run.folder.parts[0]) for run in runs))
    if len(folders) > 1:
        folders.append(f'--out={out / plan}')
    root = os.path.relpath(ROOT)
    prefix = '' if root == '.' else shlex.quote(f'{root}/')
    command = find_plan(plan).draw.format(folders=shlex.join(folders), root=prefix)
    is_module = command.startswith('python -m paper.')
    return f'PYTHONPATH={shlex.quote(root)} {command}' if prefix and is_module else command


checksum_today = functools.cache(data_checksum)  # of a folder's shards


def other_setting(run: Run, saved: dict) -> str:
    """Return 'has NAME = VALUE, not VALUE' for the first setting in which a run that was found
    differs from that of the plan, '' if there is none. saved: its settings, by read_runs."""
    settings, defaults = full_settings(run), script_of(run.script).defaults
    # Sizes that the plan leaves open come from the weights in init_from.
    adopted = MODEL_SETTINGS if settings.get('init_from') else ()
    trained_on = saved.get('data_checksum')
    for name, value in settings.items() if saved else ():
        old = tuples(saved.get(name))  # from JSON
        is_adopted = name in adopted and value == defaults.get(name)
        if name in DATA and old and value and os.path.realpath(old) == os.path.realpath(value):
            continue  # one folder, written in two ways
        if name == 'data_dir' and trained_on and checksum_today(value) == trained_on:
            continue  # a copy of the data
        is_compared = name not in NEUTRAL + PER_CALL and value != 'auto' and not is_adopted
        if is_compared and old != value:
            return f'has {name} = {old!r}, not {value!r}'
    return ''


def progress(run: Run, out: Path) -> tuple[str, float, float]:
    """Return the state of a run by its folder, the part of its updates that is done, and their
    seconds. The state is 'done', 'not started' or 'STEP of LAST'; if the folder holds another run,
    'has NAME = VALUE, not VALUE' (the first setting that differs), 'has been trained by another
    SCRIPT' or 'has been trained on other shards ...'."""
    settings = full_settings(run)
    [(saved, log)] = read_runs([out / run.folder], [run.script])
    if found := other_setting(run, saved):
        return found, 0.0, 0.0
    trained_on = saved.get('data_checksum')
    starts = [start['code'] for start in saved.get('starts', []) if 'code' in start]
    if any(code['script_checksum'] != script_checksum(ROOT / run.script) for code in starts):
        return f'has been trained by another {Path(run.script).name}', 0.0, 0.0
    if trained_on and 'data_dir' in settings:  # an agent's levels would take seconds to read
        folder = settings['data_dir']
        if checksum_today(folder) not in (None, trained_on):
            return f'has been trained on other shards than those in {folder}', 0.0, 0.0
    seconds = max((record.get('seconds') or 0.0 for record in log), default=0.0)
    step, last = log[-1]['step'] if log else 0, max(1, updates(settings))
    if saved.get('finished'):
        return 'done', 1.0, seconds
    return f'{step} of {last}' if saved else 'not started', step / last, seconds


def unfinished(runs: list[Run], out: Path) -> list[Run]:
    """Return the runs that are not finished. Raises UserError if a folder holds another
    run."""
    states = [progress(run, out)[0] for run in runs]
    for run, state in zip(runs, states, strict=True):
        if state.startswith('has '):
            raise UserError(f'{out / run.folder} {state}: move it away, or choose another --out')
    name_changed(runs, out)
    return [run for run, state in zip(runs, states, strict=True) if state != 'done']


def changed_settings(saved: dict) -> list[str]:
    """Return the settings that a run changed when it resumed, except those that change no results.
    saved: its config.json."""
    changes = [name for start in saved.get('starts', []) for name in start.get('changes', {})]
    kept = (*NEUTRAL, *PER_CALL, *DATA, 'eval_interval', 'log_interval')
    return [name for name in dict.fromkeys(changes) if name not in kept]


def name_changed(runs: list[Run], out: Path) -> None:
    """Print a warning for each run that changed settings when it resumed, and one if modules that a
    trainer imports have changed since runs were started. Finished ones count all the same, others
    resume."""
    today = functools.cache(lambda script: code_record(ROOT / script)['checksum'])
    n = 0
    for run in runs:
        saved = settings_of(out / run.folder)
        if changed := changed_settings(saved):
            warn(f'{out / run.folder} changed {", ".join(changed)} when it resumed')
        starts = saved.get('starts', [])
        found = {start.get('code', {}).get('checksum') for start in starts} - {None}
        n += bool(found - {today(run.script)})
    if n:
        reason = 'started with other code than that of today'
        warn(f'{n} of {len(runs)} runs were {reason}: finished ones count, others resume')


# ---- lists ----


def list_plans(out: Path) -> None:
    """Print the plans, each with its figure or table and the command that makes it."""
    form = '{:17} {:>4} {:>7}  {:44} {}'
    print(form.format('plan', 'runs', 'FLOPs', 'figure or table', 'made by'))
    for name in names_of_plans():
        runs = runs_of(name)
        flops = f'{sum(cost(run).training for run in runs):.1e}'
        print(form.format(name, len(runs), flops, find_plan(name).title, drawing(name, runs, out)))


def list_runs(runs: list[Run], args: argparse.Namespace) -> None:
    """Print a line for each run."""
    form = '{:>3}  {:15} {:>8} {:>8} {:>8}  {}'
    print(form.format('run', 'state', 'layers', 'layers/W', 'training', 'command'))
    for i, run in enumerate(runs):
        numbers = ['', '', '']  # with init_from, the sizes are those of the weights
        if not full_settings(run).get('init_from'):
            layers, training = cost(run)
            ratio = f'{layers / run.W:.2f}' if run.W else ''
            numbers = [f'{layers:.2e}', ratio, f'{training:.2e}']
        line = shlex.join(['python', *command_of(run, args)[1:]])
        if (ROOT / run.script).parent != ROOT:  # Python would not find this project's modules
            line = f'PYTHONPATH={shlex.quote(os.path.relpath(ROOT))} {line}'
        state = progress(run, args.out)[0]
        print(form.format(i, state, *numbers, line))
    print('layers: forward FLOPs per token, of agents multiply-adds per step; training: FLOPs')
    print(f'figures and tables: {drawing(args.plan, runs, args.out)}')
    name_changed(runs, args.out)


def print_slurm(runs: list[Run], args: argparse.Namespace) -> None:
    """Print an array job, with a job for each run that is not finished."""
    commands = [shlex.join(command_of(run, args)) for run in unfinished(runs, args.out)]
    if not commands:
        raise UserError(f'plan {args.plan}: all {len(runs)} runs are done')
    print(f"""#!/bin/bash
#SBATCH --job-name={args.plan} --array=0-{len(commands) - 1}
#SBATCH --nodes=1 --ntasks=1 --cpus-per-task=8 --gpus-per-task={args.gpus_per_run}
#SBATCH --time=24:00:00 --requeue --signal=B:TERM@120
# A job saves two minutes before its time limit: submit this again, and unfinished runs resume.
cd {shlex.quote(os.getcwd())}
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={SAVE_SECONDS}
commands=({shlex.join(commands)})
export PYTHONPATH={shlex.quote(python_path())}
unset PYTHONSAFEPATH
eval exec "${{commands[SLURM_ARRAY_TASK_ID]}}"
""")


# ---- running ----


def python_path() -> str:
    """Return PYTHONPATH for runs: this project first, so that they use its modules, wherever their
    trainer lies and whatever else is installed."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get('PYTHONPATH')]))


def gpus_of_workers(workers: int, gpus_per_run: int) -> list[str]:
    """Return the value of CUDA_VISIBLE_DEVICES for each worker, '' on a CPU. workers = 0: one for
    each GPU, or each group of gpus_per_run GPUs."""
    n, k = torch.cuda.device_count(), gpus_per_run
    names = os.environ.get('CUDA_VISIBLE_DEVICES', ','.join(map(str, range(n)))).split(',')[:n]
    if 0 < n < k:
        raise UserError(f'--gpus_per_run={k}: there are {n} GPUs')
    groups = [','.join(names[i : i + k]) for i in range(0, n - k + 1, k)] or ['']
    return [groups[i % len(groups)] for i in range(workers or len(groups))]


def start(run: Run, gpu: str, threads: int, args: argparse.Namespace) -> subprocess.Popen:
    """Start or resume a run. Its stdout.txt gets the command, and what the run prints."""
    command, folder = command_of(run, args), args.out / run.folder
    folder.mkdir(parents=True, exist_ok=True)
    env = {
        'OMP_NUM_THREADS': str(threads),
        'TORCH_ELASTIC_SHUTDOWN_TIMEOUT': str(SAVE_SECONDS),
        **os.environ,
        'PYTHONPATH': python_path(),
    }
    env.pop('PYTHONSAFEPATH', None)  # the trainer's folder is in the path, too
    with open(folder / 'stdout.txt', 'a', encoding='utf-8') as file:
        print(shlex.join(command), file=file, flush=True)
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**env, 'CUDA_VISIBLE_DEVICES': gpu} if gpu else env,
            start_new_session=True,  # a ctrl-C reaches the sweep alone, which passes it on
        )


def outcome(process: subprocess.Popen, folder: Path) -> str:
    """Return what became of a run: 'done', 'stopped' by a signal, 'in use by another process', or
    'FAILED' with the last line that it printed before the report of torchrun, if there is one."""
    if process.returncode == 0:
        return 'done'
    text = (folder / 'stdout.txt').read_text(encoding='utf-8', errors='replace')
    text = text.rpartition(shlex.join(process.args))[2]
    printed = re.split('(?m)^.*torch/distributed/elastic', text)[0].strip()
    number = -process.returncode if process.returncode < 0 else process.returncode - 128
    is_stopped = number in STOP_SIGNALS or 'SignalException' in text
    line = printed.rpartition('\n')[2] or 'it printed nothing'
    refusal = 'another run is using it'  # perhaps that of a second sweep, in the same file
    if refusal in line:
        return 'in use by another process (see stdout.txt)'
    if is_stopped and not re.search(f'(?m)^(error: (?!.*{refusal})|Traceback )', printed):
        return 'stopped'
    return f'FAILED (exit status {process.returncode}): {line}; see stdout.txt'


def forecast(runs: list[Run], out: Path, workers: int) -> str:
    """Return how many runs are done, and when all will be, by their seconds per FLOP so far.
    workers: runs at a time, if that many are left."""
    n = flops = seconds = left = 0.0
    for run in runs:
        state, part, spent = progress(run, out)
        n += state == 'done'
        flops += part * cost(run).training
        left += (1 - part) * cost(run).training
        seconds += spent
    workers = max(1, min(workers, len(runs) - int(n)))
    eta = timedelta(seconds=int(left * seconds / flops / workers)) if flops else 'unknown'
    return f'{n:.0f} of {len(runs)} runs are done, eta {eta}'


def run_all(runs: list[Run], args: argparse.Namespace) -> int:
    """Run what is not finished. Return the exit status: 0, 1 if a run failed, 128 + signal if the
    sweep was stopped, or 2 if the trainer refused two runs in the same words before their start:
    then no further one is started, because it would be refused, too."""
    waiting = unfinished(runs, args.out)
    gpus = gpus_of_workers(args.workers, args.gpus_per_run)[: max(1, len(waiting))]
    threads = max(1, torch.get_num_threads() // (len(gpus) * args.gpus_per_run))
    print0(f'{forecast(runs, args.out, len(gpus))}; {len(gpus)} at a time')
    stopper, is_due, workers = Stopper(), Throttle(60), len(gpus)
    refused = Counter()  # by reason

    def refuses_settings() -> bool:
        """Return whether the trainer has refused two runs in the same words."""
        return max(refused.values(), default=0) > 1

    def work(run: Run) -> str:
        """Start or resume a run, wait for its end, and return what became of it."""
        if stopper.signal is not None or refuses_settings():
            return 'waiting'
        folder, gpu = args.out / run.folder, gpus.pop()
        process = start(run, gpu, threads, args)
        while process.poll() is None:
            if stopper.signal is not None:
                process.terminate()  # the run saves
                process.wait()
            elif is_due():
                print0(forecast(runs, args.out, workers))
            time.sleep(0.1)
        gpus.append(gpu)
        state = outcome(process, folder)
        print0(f'{folder}: {state}')
        _, _, reason = state.partition('): error: ')
        # A trainer that accepts the settings writes config.json. One model may be too large.
        if reason and 'memory' not in reason and ' GB' not in reason and not settings_of(folder):
            refused[reason.replace(str(folder), '')] += 1
        return state

    with ThreadPoolExecutor(workers) as pool:
        states = Counter(state.partition(' (')[0] for state in pool.map(work, waiting))
    if stopper.signal is not None:
        print0('stopped: the same line resumes what was saved, and starts the rest')
        return 128 + stopper.signal
    print0(', '.join(f'{n} {state}' for state, n in states.items()))
    if refuses_settings():
        print0('stopped: the trainer refuses settings: correct them, then repeat this line')
        return 2
    if states['done'] < len(waiting):
        return 1
    print0(f'figures and tables: {drawing(args.plan, runs, args.out)}')
    return 0


def main() -> int:
    """List or run a plan, and return the exit status."""
    args = parse()
    checksum_today.cache_clear()  # in a notebook, since the last call
    if not args.plan:
        list_plans(args.out)
        return 0
    runs = select(args)
    if args.run:
        return run_all(runs, args)
    print_slurm(runs, args) if args.slurm else list_runs(runs, args)
    return 0


if __name__ == '__main__':
    run_script(main)

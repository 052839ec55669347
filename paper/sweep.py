"""Run a plan: every figure and table of the paper is a plan, and so is every study (plans.py).

    python -m paper.sweep                                 # list the plans
    python -m paper.sweep lm-small                        # list the runs of one, with their state
    python -m paper.sweep lm-small --run                  # start or resume what is not finished
    python -m paper.sweep lm-small --run --workers=4 --only="n_layer in (1, 2) and recurrent"
    python -m paper.sweep lm-small --run -- --dtype=float32 --data_dir=/data/fineweb
    python -m paper.sweep lm-small --run --vary=weight_decay=0,0.01,0.1 --vary=seed=1,2
    python -m paper.sweep lm-small --run --script=my_train.py --vary=z_loss=0,0.01,1
    python -m paper.sweep lm-small --slurm | sbatch       # an array job; the same line resumes it

A run is the folder out/PLAN/NAME, named after the axes of the plan. Its trainer knows whether to
start, to resume or to do nothing (--resume=auto), so that a sweep keeps nothing else. What a run
prints is in its stdout.txt. After a ctrl-C or SIGTERM the runs save, and the same line resumes.

What follows `--` is a setting of every run, and part of the name unless it changes no result (see
NEUTRAL); --vary adds an axis, or gives an axis of the plan other values. In a plan of agents and
language models, a setting that one trainer lacks is left out there.
"""

import argparse
import os
import re
import shlex
import subprocess
import sys
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path

from configurator import Mistake, first_line, run_script

import pandas
import torch
from filelock import FileLock, Timeout

from common import every, print0
from paper.plans import (
    ROOT,
    Run,
    cost,
    find_plan,
    full_settings,
    names_of_plans,
    runs_of,
    updates,
    vary,
)
from run import LOCK, Stopper, log_of, settings_of

# Settings that are not part of a folder's name: they say where things lie, how fast a run is (its
# results change by rounding only) and what it reports.
NEUTRAL = (
    *('data_dir', 'levels_dir', 'download', 'device', 'threads', 'compile', 'graphs', 'batch_size'),
    *('plot', 'tensorboard', 'wandb', 'wandb_project'),
)
OF_A_SWEEP = ('out_dir', 'resume', 'overwrite', 'eval_only')
# What pandas raises for a condition that it cannot evaluate.
BAD_CONDITION = (NameError, SyntaxError, ValueError, TypeError, LookupError, AttributeError)


class Parser(argparse.ArgumentParser):
    """A parser that reports a mistake in one line."""

    def error(self, message: str) -> None:
        raise Mistake(f'{message}: --help lists the arguments')


def parse() -> argparse.Namespace:
    """Return the arguments, and in `settings` those behind `--`."""
    parser = Parser(
        prog='python -m paper.sweep',
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add('plan', nargs='?', help='name of a plan; without one, list all')
    add('--run', action='store_true', help='start or resume what is not finished')
    add('--workers', type=int, default=0, help='runs at a time; default: one per GPU, one on a CPU')
    add('--gpus_per_run', type=int, default=1, help='more than 1: by torchrun')
    add('--only', help='a part of the plan: a condition on settings, as for DataFrame.query')
    add('--script', help='your copy of the trainer')
    add('--vary', action='append', default=[], metavar='NAME=VALUE,VALUE', help='an axis')
    add('--index', type=int, help='only the run with this number, in array jobs')
    add('--slurm', action='store_true', help='print an array job of the runs that are not finished')
    add('--out', type=Path, default=Path('out'), help='folder of all runs')
    at = sys.argv.index('--') if '--' in sys.argv else len(sys.argv)
    args = parser.parse_args(sys.argv[1:at])
    args.settings = sys.argv[at + 1 :]
    if args.workers < 0 or args.gpus_per_run < 1:
        raise Mistake('--workers and --gpus_per_run must be at least 1')
    return args


# ---- the runs ----


def select(args: argparse.Namespace) -> list[Run]:
    """Return the runs that the arguments ask for."""
    runs = runs_of(args.plan)
    if not runs:
        raise Mistake(f'{args.plan} needs no runs: {find_plan(args.plan).draw}')
    if args.only:
        frame = pandas.DataFrame([{**full_settings(run), 'script': run.script} for run in runs])
        try:
            kept = frame.eval(args.only)
        except BAD_CONDITION as error:
            raise Mistake(f'--only={args.only!r}: {first_line(error)}') from None
        if not pandas.api.types.is_bool_dtype(kept) or not kept.any():
            raise Mistake(f'--only={args.only!r}: is no condition, or no run fulfills it')
        runs = [run for run, is_kept in zip(runs, kept, strict=True) if is_kept]
    if args.script:
        if len({run.script for run in runs}) > 1:
            raise Mistake(f'--script: plan {args.plan} has two trainers: add --only="arch == ..."')
        if not os.path.isfile(args.script):
            raise Mistake(f'--script={args.script}: there is no such file')
        runs = [run._replace(script=os.path.abspath(args.script)) for run in runs]
    varied = [(f'--{argument}', True) for argument in args.vary]
    for argument, is_axis in varied + [(argument, False) for argument in args.settings]:
        given = re.fullmatch(r'--(\w+)=(.*)', argument, re.DOTALL)
        if given is None or given[1] in OF_A_SWEEP:
            expected = '--vary=NAME=VALUE,VALUE, and --NAME=VALUE after --'
            raise Mistake(f'{argument!r}: expected {expected}; --out names the folder of all runs')
        name, text = given.groups()
        # a comma in parentheses, as in (0.8, 0.95), does not separate values
        values = re.split(r',(?![^(]*\))', text) if is_axis else [text]
        runs = vary(runs, name, values, in_name=is_axis or name not in NEUTRAL)
    if args.index is not None and not 0 <= args.index < len(runs):
        raise Mistake(f'--index={args.index}: there are runs 0 to {len(runs) - 1}')
    return runs


def command_of(run: Run, args: argparse.Namespace) -> list[str]:
    """Return the command that starts or resumes a run."""
    ranks = f'--nproc_per_node={args.gpus_per_run}'
    launcher = ['-m', 'torch.distributed.run', '--standalone', ranks]
    files = [os.path.relpath(ROOT / path) for path in (run.script, *run.config)]
    flags = [f'--{name}={value}' for name, value in {**run.fixed, **run.axes}.items()]
    folder = [f'--out_dir={args.out / run.folder}', '--resume=auto']
    return [sys.executable, *launcher * (args.gpus_per_run > 1), *files, *flags, *folder]


def progress(run: Run, out: Path) -> tuple[str, float, float]:
    """Return the state of a run by its folder, the part of its updates that is done, and their
    seconds. The state is 'done', 'not started', 'STEP of LAST', or that of a folder with another
    run: 'has NAME = VALUE, not VALUE', the first setting that differs."""
    saved, log = settings_of(out / run.folder), log_of(out / run.folder)
    for name, value in full_settings(run).items():
        value = list(value) if isinstance(value, tuple) else value  # as in JSON
        if name in OF_A_SWEEP:
            continue
        if name not in NEUTRAL and value != 'auto' and saved.get(name, value) != value:
            return f'has {name} = {saved[name]!r}, not {value!r}', 0.0, 0.0
    seconds = next((r['seconds'] for r in reversed(log) if r.get('seconds')), 0.0)
    step, last = log[-1]['step'] if log else 0, updates(full_settings(run))
    if saved.get('finished'):
        return 'done', 1.0, seconds
    return f'{step} of {last}' if saved else 'not started', step / last, seconds


# ---- lists ----


def drawing(name: str, out: Path) -> str:
    """Return the command that makes the figure or table of a plan."""
    folders = dict.fromkeys(str(out / run.plan) for run in runs_of(name))
    return find_plan(name).draw or shlex.join(['python', '-m', 'paper.figures', *folders])


def list_plans(out: Path) -> None:
    """Print the plans as a table in Markdown."""
    rows = [['plan', 'figure or table', 'runs', 'training FLOPs', 'made by']]
    for name in names_of_plans():
        costs = [cost(run).training for run in runs_of(name)]
        numbers = [str(len(costs)), f'{sum(costs):.1e}'] if costs else ['', '']
        rows.append([name, find_plan(name).title, *numbers, f'`{drawing(name, out)}`'])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ['-' * width for width in widths])
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        print(f'| {" | ".join(cells)} |')


def list_runs(runs: list[Run], args: argparse.Namespace) -> None:
    """Print a line for each run."""
    print('number, state, cost of the layers (forward FLOPs per token, or multiply-adds per step),')
    print('cost / W, training FLOPs, command')
    for i, run in enumerate(runs):
        layers, training = cost(run)
        ratio = f'{layers / run.W:.2f}' if run.W else ''
        line = shlex.join(['python', *command_of(run, args)[1:]])
        state = progress(run, args.out)[0]
        print(f'{i:3} {state:>14} {layers:9.3g} {ratio:4} {training:8.2e} {line}')
    print(f'{len(runs)} runs, {sum(cost(run).training for run in runs):.1e} training FLOPs')


def print_slurm(runs: list[Run], args: argparse.Namespace) -> None:
    """Print an array job, with a job for each run that is not finished."""
    numbers = [str(i) for i, run in enumerate(runs) if progress(run, args.out)[0] != 'done']
    if not numbers:
        raise Mistake(f'plan {args.plan}: all {len(runs)} runs are done')
    arguments = [sys.executable, '-m', 'paper.sweep', *sys.argv[1:]]
    arguments[arguments.index('--slurm')] = '--run'
    at = arguments.index('--') if '--' in arguments else len(arguments)
    print(f"""#!/bin/bash
#SBATCH --job-name={args.plan} --array={','.join(numbers)}
#SBATCH --nodes=1 --ntasks=1 --cpus-per-task=8 --gpus-per-task={args.gpus_per_run}
#SBATCH --time=24:00:00 --requeue --signal=B:TERM@120
# A job saves two minutes before its time limit: submit this again, and unfinished runs resume.
cd {shlex.quote(os.getcwd())}
exec {shlex.join(arguments[:at])} --index="$SLURM_ARRAY_TASK_ID" {shlex.join(arguments[at:])}""")


# ---- running ----


def gpus_of_workers(workers: int, gpus_per_run: int) -> list[str]:
    """Return the value of CUDA_VISIBLE_DEVICES for each worker, '' on a CPU. workers = 0: one for
    each GPU, or each group of gpus_per_run GPUs."""
    n, k = torch.cuda.device_count(), gpus_per_run
    names = os.environ.get('CUDA_VISIBLE_DEVICES', ','.join(map(str, range(n)))).split(',')[:n]
    if 0 < n < k:
        raise Mistake(f'--gpus_per_run={k}: there are {n} GPUs')
    groups = [','.join(names[i : i + k]) for i in range(0, n - k + 1, k)] or ['']
    return [groups[i % len(groups)] for i in range(workers or len(groups))]


def is_locked(folder: Path) -> bool:
    """Return whether another process is training in a folder."""
    if not (folder / LOCK).exists():
        return False
    try:
        with FileLock(folder / LOCK, blocking=False):
            return False
    except Timeout:
        return True


def start(run: Run, gpu: str, threads: int, args: argparse.Namespace) -> subprocess.Popen:
    """Start or resume a run. Its stdout.txt gets the command, and what the run prints."""
    command, folder = command_of(run, args), args.out / run.folder
    folder.mkdir(parents=True, exist_ok=True)
    env = {'OMP_NUM_THREADS': str(threads), **os.environ}
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
    """Return what became of a run: 'done', 'in use' by a process that started at the same time, or
    'FAILED' with the last line that it printed before the report of torchrun, if there is one."""
    if process.returncode == 0:
        return 'done'
    text = (folder / 'stdout.txt').read_text(encoding='utf-8', errors='replace')
    printed = text.rpartition(shlex.join(process.args))[2]
    printed = re.split('(?m)^.*torch/distributed/elastic', printed)[0].strip()
    line = printed.rpartition('\n')[2] or 'it printed nothing'
    if 'another run is using it' in printed:
        return 'in use'
    return f'FAILED (exit status {process.returncode}): {line}; see stdout.txt'


def expected(runs: list[Run], args: argparse.Namespace, workers: int) -> str:
    """Return the expected time until all runs have finished, by their seconds per FLOP so far."""
    flops = seconds = left = 0.0
    for run in runs:
        _, part, spent = progress(run, args.out)
        flops += part * cost(run).training
        left += (1 - part) * cost(run).training
        seconds += spent
    return str(timedelta(seconds=int(left * seconds / flops / workers))) if flops else 'unknown'


def run_all(runs: list[Run], args: argparse.Namespace) -> int:
    """Run what is not finished. Return the exit status: 0, 1 if a run failed, 128 + signal if the
    sweep was stopped."""
    queue = [run for run in runs if progress(run, args.out)[0] != 'done']
    gpus = gpus_of_workers(min(args.workers, len(queue)), args.gpus_per_run)
    workers, counts = len(gpus), Counter(done=len(runs) - len(queue))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()
    threads = max(1, cores // (workers * args.gpus_per_run))
    print0(f'{args.plan}: {len(runs)} runs, {counts["done"]} are done; {workers} at a time')

    def report(run: Run, text: str) -> None:
        counts[re.match('done|in use|stopped|FAILED', text)[0]] += 1
        print0(f'[{counts.total()}/{len(runs)}] {args.out / run.folder}: {text}')

    running = {}  # process: run and GPU
    stopper, is_due = Stopper(), every(60)
    try:
        while queue or running:
            if stopper.signal is not None:
                queue.clear()
                for process in running:
                    process.terminate()  # the run saves
                for process in running:
                    process.wait()
            elif queue and gpus:
                run = queue.pop(0)
                state = progress(run, args.out)[0]
                try:
                    if is_locked(args.out / run.folder):
                        report(run, 'in use')
                    elif state.startswith('has '):
                        report(run, f'FAILED: the folder {state}: move it away')
                    else:
                        process = start(run, gpus[0], threads, args)
                        running[process] = run, gpus.pop(0)
                except OSError as error:
                    report(run, f'FAILED: {error}')
            for process in [process for process in running if process.poll() is not None]:
                run, gpu = running.pop(process)
                gpus.append(gpu)
                text = outcome(process, args.out / run.folder)
                report(run, text if text == 'done' or stopper.signal is None else 'stopped')
            if running and is_due():
                states = ', '.join(progress(run, args.out)[0] for run, _ in running.values())
                print0(f'    running: {states} | eta {expected(runs, args, workers)}')
            time.sleep(0.1)
    finally:
        for process in running:  # after a second ctrl-C; torchrun must live to end its ranks
            process.kill() if args.gpus_per_run == 1 else process.terminate()
    if stopper.signal is not None:
        print0('stopped: the same line resumes what was saved, and starts the rest')
        return 128 + stopper.signal
    print0(', '.join(f'{n} {state}' for state, n in counts.items() if n))
    if counts['done'] == len(runs):
        print0(f'figures and tables: {drawing(args.plan, args.out)}')
    return int(counts['done'] < len(runs))


def main() -> int:
    """List or run a plan, and return the exit status."""
    args = parse()
    if not args.plan:
        list_plans(args.out)
        return 0
    runs = select(args)
    if args.run:
        return run_all(runs if args.index is None else [runs[args.index]], args)
    print_slurm(runs, args) if args.slurm else list_runs(runs, args)
    return 0


if __name__ == '__main__':
    run_script(main)

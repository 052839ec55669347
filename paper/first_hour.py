"""Try everything on a GPU, in ten minutes: tests, training with its loader, candidates for kernels
and both speed tables, beside the paper's figures. The tests need `pip install '.[dev]'`.

    make gpu        # or: python -m paper.first_hour

Each step is a command that anybody can run alone in the project's root; its output is in the folder
that is printed first. If a step fails, or the tests do not finish, a line says what to do about it,
the others run, and the exit status is 1. A step has its share of the time and what those before it
left of theirs; after that it is killed, and what it has measured is kept.

The report is out/gpu_DATE_TIME.json, with its table beside it as .md; both name no paths and can be
committed (git add -f). Training reads random tokens: its speed does not depend on the text.
"""

import csv
import os
import pathlib
import re
import shlex
import signal
import statistics
import subprocess
import sys
import time
from importlib import metadata
from typing import NamedTuple

from configurator import configure
from support.script import UserError, run_script

import numpy as np
import torch

from paper.plans import ROOT
from support import ranks, run_folder
from support.code import code_record
from support.files import read_json, write_json, write_text
from support.loader import write_meta, write_shard
from support.signals import exit_at_signals

# -----------------------------------------------------------------------------
minutes = 9.5  # of all steps together; a start may take half a minute
out = ''  # JSON file; the tables go beside it as .md; '' = out/gpu_DATE_TIME.json
# -----------------------------------------------------------------------------
RANGES = {'minutes': (0.1, 600)}
LEAST = 15  # seconds; a step that has fewer is not started
TRAINING = (
    '--max_iters=100 --warmup_iters=10 --eval_interval=100 --val_tokens=1048576 --overwrite=True'
)


class Step(NamedTuple):
    """A command of python, {data} and {out} being folders, and what to do if it fails."""

    name: str
    command: str
    seconds: int  # its share, if all have ten minutes
    advice: str


# What matters most comes first. Most of the time goes into imports and compilation. The last two
# steps have what the others leave.
STEPS = [
    Step(
        'tests',
        '-m pytest -v --no-header -m "gpu and smoke" --tb=short --show-capture=no '
        '--basetemp={out}/tests tests/test_gpu.py',
        140,
        'a test names what differs: CUDA graphs (train with --cuda_graphs=False), compilation '
        '(--compile=False) or Triton kernels (--overrides=False). PYTORCH_ALLOC_CONF='
        'expandable_segments:False in the environment turns off the allocator that runs choose',
    ),
    Step(
        'recurrent',
        'train_lm.py config/small_L2.py --window=64 --data_dir={data} --out_dir={out}/recurrent '
        + TRAINING,
        90,
        'try --overrides=False, --cuda_graphs=False and --compile=False, in this order',
    ),
    Step(
        'nonrecurrent',
        'train_lm.py config/small_nonrecurrent_L2.py --n_layer=16 --n_expert=1 --data_dir={data} '
        '--out_dir={out}/nonrecurrent ' + TRAINING,
        50,
        'try --cuda_graphs=False and --compile=False, in this order',
    ),
    Step(
        'training',
        'bench.py --suite=train --contexts=64 --rounds=3 --seconds=0.3 --out={out}/training.json',
        90,
        'a cell that failed has its reason in the table; --modes=no_overrides avoids the kernels',
    ),
    Step(
        'kernels',
        'bench.py --suite=train --shapes=2,8 --contexts=64 --rounds=3 --seconds=0.3 '
        '--modes=compiled,try_tile,try_stores,no_attention,no_experts,no_loss '
        '--out={out}/kernels.json',
        70,
        'a mode that fails is one not to use',
    ),
    Step(
        'decoding',
        'bench.py --suite=decode --streams=16 --rounds=3 --seconds=0.2 --out={out}/decoding.json',
        65,
        'a cell that failed has its reason in the table; --modes=no_overrides avoids the kernels',
    ),
    Step(
        'agent',
        'train_sokoban.py config/sokoban_small_L4.py --split=generated --eval_split=generated '
        '--n_levels=2000 --eval_games=64 --total_steps=128000 --dtype=auto --overwrite=True '
        '--out_dir={out}/agent',
        35,
        'try --cuda_graphs=False, --compile=False and --dtype=float32, in this order',
    ),
    Step(
        'agents',
        'bench.py --suite=sokoban --rounds=3 --seconds=0.3 --out={out}/agents.json',
        30,
        'see the step "agent"',
    ),
    Step(
        'windows',
        'bench.py --suite=decode --shapes=2,8 --contexts=2048 --streams=1 --rounds=3 '
        '--seconds=0.2 --modes=compiled,try_split,no_attention --out={out}/windows.json',
        30,
        'a mode that fails is one not to use',
    ),
    Step(
        'streams',
        'bench.py --suite=decode --streams=4 --rounds=3 --seconds=0.2 --out={out}/streams.json',
        0,
        'see the step "decoding"',
    ),
    Step(
        'contexts',
        'bench.py --suite=train --contexts=256,128,1024,32,2048 --rounds=3 --seconds=0.3 '
        '--out={out}/contexts.json',
        0,
        'a cell that failed has its reason in the table',
    ),
]
# What the steps of training train, as bench.py's tables name it: model, L, E and C.
TRAINED = {'recurrent': ('recurrent', 2, 8, 64), 'nonrecurrent': ('transformer', 16, 1, 256)}
# Lines of a step's output that say what a run does.
TELLING = re.compile(
    r'no CUDA graph|does not work|Triton over|rows per micro-batch|passed|failed|^error|solved'
)


def write_data(folder: pathlib.Path) -> None:
    """Write shards of random GPT-2 tokens, enough for 100 updates."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True)
    for name, n in (('val_000000', 2**21), ('train_000001', 2**24)):
        tokens = rng.integers(50257, size=n, dtype=np.uint16)
        write_shard(folder / f'fineweb_{name}.bin', tokens)
    write_meta(folder, {'tokenizer': 'gpt2', 'source': 'random tokens', 'shards': []})


def run_step(step: Step, folder: pathlib.Path, seconds: float) -> dict:
    """Run a step for at most `seconds`; return its record for the report."""
    record = {'step': step.name, 'command': f'python {step.command.format(data="DATA", out="OUT")}'}
    if seconds < LEAST:
        return record | {'status': 'no time was left', 'seconds': 0.0, 'lines': []}
    command = shlex.split(step.command.format(data=folder / 'data', out=folder))
    log = folder / f'{step.name}.log'
    start = time.perf_counter()
    with open(log, 'wb') as file:
        process = subprocess.Popen(
            [sys.executable, *command],
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=ROOT,
        )
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    text = log.read_text(errors='replace')
    for path, short in (
        (folder, 'OUT'),
        (ROOT, '.'),
        (sys.prefix, 'python'),
        (os.path.expanduser('~'), '~'),
    ):
        if str(path) != '/':  # the home of a user without one
            text = text.replace(str(path), short)  # the report names no folders of this machine
    text = re.sub(r'torchinductor_[^/\s]+', 'torchinductor_USER', text)
    lines = [line.rstrip()[:300] for line in text.splitlines() if line.strip()]
    record |= {
        'status': {0: 'ok', None: f'ended after {seconds:.0f} s'}.get(status, f'failed ({status})'),
        'seconds': round(time.perf_counter() - start, 1),
        'lines': [line.strip() for line in lines if TELLING.search(line)],
    }
    if status != 0:
        record['last_lines'] = lines[-20:]
    if status or status is None and step.name == 'tests':
        record['advice'] = step.advice
    return record


def trained(name: str, folder: pathlib.Path, lines: list[str]) -> dict:
    """Return the figures of a training run, medians of its second half, which follows all captures,
    and whether all succeeded, by the lines that it printed; {} if it did not get there."""
    rows = [row for row in run_folder.log_of(folder / name) if row.get('step', 0) > 50]
    if not rows:
        return {}
    return {
        **dict(zip(('model', 'L', 'E', 'C'), TRAINED[name], strict=True)),
        'captured': not any('no CUDA graph' in line for line in lines),
        'updates': rows[-1]['step'],
        'ms': statistics.median(row['ms'] for row in rows),
        'tokens_per_s': statistics.median(row['tokens_per_s'] for row in rows),
        'memory_gb': max(row['memory_gb'] for row in rows),
    }


def describe(run: dict) -> str:
    """Return a line about a training run, beside what the paper reports for its sizes and what was
    modeled before."""
    line = 'With its loader, updates 51 to {updates}: {tokens_per_s:,.0f} tokens/s, {ms:.0f} ms per'
    line = (line + ' update, {memory_gb:.1f} GB.').format(**run)
    line += ' CUDA graphs: ' + ('yes.' if run['captured'] else 'not all, as the lines say.')
    sizes = {name: run[name] for name in ('model', 'L', 'E')}
    paper = find_row('paper/training_ktokens_per_s_4xH100', tokens_per_update=131072, **sizes)
    target = find_row('modeled/targets', suite='train', C=run['C'], **sizes)
    figures = 1000 / 4 * float(paper[f'C{run["C"]}']), float(target['target'])
    return line + ' Per GPU, the paper: {:,.0f} tokens/s, modeled: {:,.0f}.'.format(*figures)


def find_row(name: str, **values: object) -> dict[str, str]:
    """Return the row of a table of paper/results that has these values."""
    with open(ROOT / 'paper' / 'results' / f'{name}.csv', encoding='utf-8', newline='') as file:
        wanted = {column: str(x) for column, x in values.items()}
        return next(row for row in csv.DictReader(file) if wanted.items() <= row.items())


def write_report(report: dict, path: pathlib.Path) -> None:
    """Write the report as JSON, and as Markdown beside it."""
    text = '# A first hour on {device_name}\n\n{date}, torch {torch}, triton {triton}, commit '
    text = text.format(**report) + report['code']['commit'] + '\n\n'
    text += "Tables: the paper's tokens/s are those of one of four GPUs, its ms/token those of 16 "
    text += "streams on four. Commands run alone in the project's root, OUT being any folder and "
    text += 'DATA one of GPT-2 tokens, here random.\n'
    for step in report['steps']:
        name = step['step']
        text += f'\n## {name}: {step["status"]}, {step["seconds"]:.0f} s\n\n`{step["command"]}`\n'
        text += f'\n{step["advice"]}\n' if 'advice' in step else ''
        lines = step.get('last_lines', step['lines'])
        text += '\n```\n' + '\n'.join(lines) + '\n```\n' if lines else ''
        if run := report['training'].get(name):
            text += f'\n{describe(run)}\n'
        if table := report['tables'].get(name):
            text += f'\n{table}'
    write_json({name: x for name, x in report.items() if name != 'tables'}, path)
    write_text(text, path.with_suffix('.md'))


def main() -> int:
    """Run all steps. Return the exit status: 1 if one failed, or if the tests did not finish."""
    configure(globals(), quiet=True)
    if not torch.cuda.is_available():
        raise UserError('this torch finds no CUDA device: bench.py measures a CPU')
    path = pathlib.Path(out or f'out/gpu_{time.strftime("%Y%m%d_%H%M%S")}.json').absolute()
    folder = path.with_suffix('')
    if path.suffix != '.json':
        raise UserError(f'out = {out!r}: names no file of JSON (.json)')
    for taken in (path, path.with_suffix('.md'), folder):
        if taken.exists():
            raise UserError(f'out = {out!r}: {taken} exists: choose another name')
    exit_at_signals()
    write_data(folder / 'data')
    (folder / 'alone').mkdir()  # for steps that are run again
    code = code_record(ROOT / 'bench.py')  # which imports the trainers
    report = {
        'date': time.strftime('%Y-%m-%d'),
        'device_name': ranks.device_name('cuda'),
        'torch': str(torch.__version__),
        'triton': triton_version(),
        'code': {name: x for name, x in code.items() if name != 'folder'},
        'steps': [],
        # by step
        'training': {},
        'cells': {},  # of bench.py
        'tables': {},  # of bench.py, as Markdown
    }
    print(f'{report["device_name"]}: at most {minutes:g} minutes; logs in {folder}', flush=True)
    due = time.perf_counter()
    for step in STEPS:
        due += step.seconds * minutes / 10
        record = run_step(step, folder, due - time.perf_counter())
        report['steps'].append(record)
        print(f'{step.name}: {record["status"]}, {record["seconds"]:.0f} s', flush=True)
        for line in record.get('last_lines', record['lines'])[-5:]:
            print(f'    {line}', flush=True)
        if 'advice' in record:
            print(f'    what to do: {step.advice}', flush=True)
        if record['status'] != 'ok':
            alone = step.command.format(data=folder / 'data', out=folder / 'alone')
            print(f'    alone: python {alone}', flush=True)
        if step.name in TRAINED:
            report['training'][step.name] = trained(step.name, folder, record['lines'])
        cells = folder / f'{step.name}.json'
        if cells.exists():  # bench.py writes it after each mode, and its table beside it
            report['cells'][step.name] = read_json(cells)['results']
            lines = cells.with_suffix('.md').read_text().splitlines(keepends=True)
            report['tables'][step.name] = ''.join(x for x in lines if x.startswith('|'))
        write_report(report, path)
    print(f'{path} and {path.with_suffix(".md")} name nothing of this machine: git add -f both')
    status = {step['step']: step['status'] for step in report['steps']}
    unfinished = status.get('tests', 'ok') != 'ok'
    return int(unfinished or any(x.startswith('failed') for x in status.values()))


def triton_version() -> str:
    """Return the version of Triton, which may be missing or broken."""
    try:
        return metadata.version('triton')
    except metadata.PackageNotFoundError:
        return 'none'


if __name__ == '__main__':
    run_script(main)

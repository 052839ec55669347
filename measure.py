"""
What bench.py, bench_sokoban.py and baselines.py share: variants of some work, measured in processes apart from the script's own, and
reports of it that can be repeated, added to and compared.

A variant is (make, arguments): make(**arguments), called in the process that measures it, gives ({part: function to time}, {what is
known of it}). On a CPU every variant has a process of its own, and all take turns, round by round, so that a drift of the machine falls on
all of them. On a GPU one process measures them one after another, so that torch is imported once, and the memory is emptied in between.
A process that dies or runs out of memory costs its variant alone: the next one gets a new process.
"""

import contextlib
import datetime
import functools
import gc
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
import time
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess

import torch

import unroll
from checkpoint import commit, device_name
from configurator import fail, first_line, write_json, write_text

METRICS = {
    'tokens_per_s': 1,
    'env_steps_per_s': 1,
    'ms_per_token': -1,
    'us': -1,
}  # of a row of results; 1: more is better
KEYS = (
    'cell',
    'kernel',
    'path',
    'L',
    'E',
    'C',
    'B',
    'T',
    'D',
    'V',
    'tokens_per_update',
)  # what tells two rows of a suite apart
SAME = (
    'suite',
    'device',
    'dtype',
    'torch',
    'commit',
    'threads',
)  # of two reports whose rows may be joined


# ----------------------------------------------------------------------------- the process that measures


def timed(run: Callable, repeats: int, kind: str) -> float:
    """Seconds of one run(), the mean of `repeats`, with the device idle at both ends. A run that returns a float has timed itself, once."""
    wait = torch.cuda.synchronize if kind.startswith('cuda') else lambda: None
    wait()
    start = time.perf_counter()
    for _ in range(repeats):
        result = run()
        if type(result) is float:
            return result
    wait()
    return (time.perf_counter() - start) / repeats


def memory(kind: str, peak: bool) -> int:
    """Bytes in use now, or at the peak since `empty` or `forget_peak`. Not getrusage's: a child's figure starts at its parent's."""
    if kind.startswith('cuda'):
        return torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()
    try:
        with open('/proc/self/status') as file:
            return 1024 * int(
                re.search(r'VmHWM:\s*(\d+)' if peak else r'VmRSS:\s*(\d+)', file.read()).group(1)
            )
    except OSError:
        return 0  # only Linux tells


def forget_peak(kind: str) -> None:
    """So that what compiling took does not count. On a GPU it takes little, but a graph's memory is taken at its capture: all counts."""
    if kind == 'cpu':
        with contextlib.suppress(OSError), open('/proc/self/clear_refs', 'w') as file:
            file.write('5')  # where this is not allowed, what compiling took counts too


def empty(kind: str) -> None:
    """Gives back what is left of the variant before. What was compiled for it stays: the next one may meet the same sizes."""
    unroll.release()
    gc.collect()
    if kind.startswith('cuda'):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def work(pipe: Connection, kind: str, threads: int) -> None:
    """The process. A message is a variant, to be made and run once (compiling included), or the seconds of a round of it; None: the end."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # ctrl-C is the parent's business, which then ends us
    if kind.startswith('cuda'):
        torch.cuda.set_device(kind)
        torch.set_float32_matmul_precision('high')  # as train_lm.py
    if threads:
        torch.set_num_threads(threads)
    parts = None
    pipe.send('torch is imported')
    while (message := pipe.recv()) is not None:
        start, new = time.perf_counter(), isinstance(message, tuple)
        try:
            if new:
                parts = None
                empty(kind)
                base = memory(kind, peak=False)
                parts, info = message[0](**message[1])
            if new or kind == 'cpu':  # after the others' turns caches and clocks are cold
                once = {part: timed(run, 1, kind) for part, run in parts.items()}
            if new:
                answer = {**info, 'first_run_s': time.perf_counter() - start}
                forget_peak(kind)
            else:
                figures = {
                    part: timed(run, max(1, math.ceil(message / once[part])), kind)
                    for part, run in parts.items()
                }
                answer = {'seconds': figures, 'memory_bytes': memory(kind, peak=True) - base}
        except (
            RuntimeError,
            MemoryError,
        ) as error:  # a variant that cannot run must not end the others
            out_of_memory = isinstance(
                error, (torch.OutOfMemoryError, MemoryError)
            ) or "can't allocate memory" in str(error)
            answer = {'status': 'OOM' if out_of_memory else f'failed: {first_line(error)}'}
        pipe.send(answer)


# ----------------------------------------------------------------------------- measuring


def begin(kind: str, threads: int) -> tuple[SpawnProcess, Connection]:
    """-> (process, pipe), torch imported."""
    context = multiprocessing.get_context('spawn')
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(theirs, kind, threads), daemon=True)
    process.start()
    theirs.close()
    with contextlib.suppress(EOFError):
        ours.recv()
    return process, ours


def end(process: SpawnProcess, pipe: Connection) -> None:
    with contextlib.suppress(OSError):
        pipe.send(None)
    process.join(5)
    process.kill()


def ask(process: SpawnProcess, pipe: Connection, message: tuple | float, record: dict) -> str:
    """One message to `work`; its answer goes into the record. Returns a line about it."""
    try:
        pipe.send(message)
        while not pipe.poll(10):  # a first run compiles
            print('    ...', flush=True)
        answer = pipe.recv()
    except (
        EOFError,
        OSError,
    ):  # the process is gone; Linux kills one that takes the last of the memory
        process.join()
        answer = {
            'status': 'OOM'
            if process.exitcode == -signal.SIGKILL
            else f'failed: its process ended with {process.exitcode}'
        }
    figures = answer.pop('seconds', {})
    for part, value in figures.items():
        record['seconds'].setdefault(part, []).append(value)
    record.update(answer)
    if record['status'] != 'ok':
        return record['status']
    figures = figures or {'first run': answer['first_run_s']}
    return ', '.join(f'{part} {value:.4g} s' for part, value in figures.items())


def measure(
    variants: dict[str, tuple],
    rounds: int,
    seconds: float,
    kind: str,
    threads: int,
    pool: dict | None = None,
) -> dict[str, dict]:
    """variants: {label: (make, arguments)} -> {label: record}. A record holds status, first_run_s, memory_bytes, seconds {part: [one figure
    a round]} and what `make` told of it. pool: a GPU's process, kept in it from call to call; whoever gives it ends what it holds."""
    cuda, labels = kind.startswith('cuda'), list(variants)
    records, workers = (
        {label: {'status': 'ok', 'seconds': {}} for label in labels},
        {} if pool is None else pool,
    )
    turns = [(number, label) for number in range(rounds + 1) for label in labels]
    try:
        for number, label in (
            sorted(turns, key=lambda turn: labels.index(turn[1])) if cuda else turns
        ):
            record, name = records[label], 'gpu' if cuda else label
            if record['status'] != 'ok':
                continue
            if name not in workers:
                workers[name] = begin(kind, threads)
            line = ask(*workers[name], variants[label] if number == 0 else seconds, record)
            print(f'round {number}/{rounds}  {label}: {line}', flush=True)
            if record['status'] != 'ok':
                end(*workers.pop(name))  # gives its memory back at once
    finally:
        if pool is None:
            end_all(workers)
    return records


def end_all(pool: dict) -> None:
    while pool:
        end(*pool.popitem()[1])


def make_yardsticks(kind: str, dtypes: list[str]) -> tuple[dict[str, Callable], dict]:
    """A product of two large square matrices in each dtype, FLOPs; a copy too large for a cache, bytes read and written."""
    n, size = (8192, 2**30) if kind.startswith('cuda') else (2048, 2**28)
    parts, info = {}, {'work': {}}
    for name in dtypes:
        a, b = torch.randn(2, n, n, device=kind, dtype=getattr(torch, name))
        parts[f'matmul {name}'], info['work'][f'matmul {name}'] = (
            functools.partial(torch.matmul, a, b),
            2 * n**3,
        )
    source, target = torch.ones(2, size, dtype=torch.uint8, device=kind)
    parts['copy'], info['work']['copy'] = lambda: target.copy_(source), 2 * size
    return parts, info


def spread(values: Iterable[float]) -> dict[str, float]:
    values = list(values)
    return {'median': statistics.median(values), 'min': min(values), 'max': max(values)}


# ----------------------------------------------------------------------------- reports: what a figure needs to be repeated


def header(config: dict, kind: str, amp: torch.dtype) -> dict:
    return {
        'device': device_name(kind),
        'dtype': str(amp)[6:],
        'threads': config['threads'] or torch.get_num_threads(),
        'torch': torch.__version__,
        'python': platform.python_version(),
        'commit': commit(),
        'command': shlex.join(['python', *sys.argv]),
        'date': datetime.datetime.now().astimezone().isoformat(timespec='seconds'),
        'memory': 'peak resident memory of its process, less after import'
        if kind == 'cpu'
        else 'torch.cuda.max_memory_allocated',
        'config': config,
    }


def results_path(report: dict, out: str) -> str:
    """`out`, or results/<device>/<suite>.json; its folder is made."""
    folder = re.sub('[^a-z0-9]+', '-', report['device'].lower()).strip('-')
    if out.endswith('.md'):
        fail(f'out = {out!r}: name the JSON file; its table goes beside it as .md')
    out = out or os.path.join('results', folder, f'{report["suite"]}.json')
    os.makedirs(os.path.dirname(out) or '.', exist_ok=True)
    return out


def write_results(report: dict, out: str, text: str) -> str:
    """The report as JSON (see results_path) and `text`, its table, beside it as .md. Returns the JSON's path."""
    out = results_path(report, out)
    write_json(report, out)
    write_text(text + '\n', os.path.splitext(out)[0] + '.md')
    return out


def read_report(path: str) -> dict:
    """A JSON file of an earlier run; ends the script where it is none."""
    try:
        with open(path, encoding='utf-8') as file:
            report = json.load(file)
    except (OSError, ValueError) as error:
        fail(f'{path}: cannot be read: {first_line(error)}')
    if (
        not isinstance(report, dict)
        or 'suite' not in report
        or not isinstance(report.get('results'), list)
        or not all(isinstance(row, dict) and 'status' in row for row in report['results'])
    ):
        fail(f'{path}: is no report of bench.py')
    return report


def key(row: dict) -> tuple:
    return tuple(row.get(k) for k in KEYS)


def earlier_rows(report: dict, out: str) -> dict[tuple, dict]:
    """{key: row} of the run that this one is added to (see results_path); its command goes before this report's."""
    path = results_path(report, out)
    if not os.path.exists(path):
        return {}
    old = read_report(path)
    for name in SAME:
        if old.get(name) != report[name]:
            fail(
                f'append = True: {path} is of {name} {old.get(name)!r}, this run of {report[name]!r}: choose another --out'
            )
    report['command'] = f'{old["command"]}; {report["command"]}'
    return {key(row): row for row in old['results']}


# ----------------------------------------------------------------------------- tables


def metric(row: dict) -> str | None:
    return next((name for name in METRICS if name in row), None)


def show(figures: dict[str, float], digits: int = 0) -> str:
    """median (min..max)"""
    return '{:,.{n}f} ({:,.{n}f}..{:,.{n}f})'.format(
        figures['median'], figures['min'], figures['max'], n=digits
    )


def figure(row: dict) -> str:
    """A row's result, or why it has none."""
    name = metric(row)
    return (
        show(row[name], {'ms_per_token': 3, 'us': 1}.get(name, 0))
        if row['status'] == 'ok'
        else row['status'].replace('|', '/')
    )


def speedup(results: list[dict], same: tuple[str, ...] | str) -> tuple[str, Callable]:
    """A column: each row's speed over that of the first with the same values of the keys `same`."""
    first = {}
    for r in results:
        if r['status'] == 'ok':
            first.setdefault(tuple(r.get(k) for k in same), r)
    return (
        'speed-up',
        lambda r: ratio(first[tuple(r.get(k) for k in same)], r) if r['status'] == 'ok' else '',
    )


def ratio(a: dict, b: dict) -> str:
    """Speed of row b over that of row a; '' where one has none."""
    name = metric(b)
    return (
        f'{(b[name]["median"] / a[name]["median"]) ** METRICS[name]:.2f}x'
        if a['status'] == b['status'] == 'ok' and name in a
        else ''
    )


def column(title: str, name: str, form: Callable = str) -> tuple[str, Callable]:
    """(title, function of a row): row[name] by `form`, texts as they are, '' where there is none."""
    return (
        title,
        lambda r: (
            '' if r.get(name) is None else r[name] if isinstance(r[name], str) else form(r[name])
        ),
    )


def markdown(columns: list[tuple[str, Callable]], results: list[dict]) -> str:
    """columns: (title, function of a row) each; those in which no row has anything are left out."""
    rows = [[cell(r) for _, cell in columns] for r in results]
    keep = [i for i in range(len(columns)) if any(row[i] for row in rows)]
    lines = [
        [columns[i][0] for i in keep],
        ['---'] * len(keep),
        *([row[i] for i in keep] for row in rows),
    ]
    return '\n'.join('| ' + ' | '.join(line) + ' |' for line in lines)


def compare_reports(text: str) -> None:
    """Prints the rows that two reports share, 'A.json,B.json', with the speed of the second over the first."""
    names = [name.strip() for name in text.split(',')]
    if len(names) != 2 or not all(names):
        fail(f'compare = {text!r}: expected two files, A.json,B.json')
    a, b = reports = [read_report(name) for name in names]
    if a['suite'] != b['suite']:
        fail(f'compare: {names[0]} is of suite {a["suite"]!r}, {names[1]} of {b["suite"]!r}')
    old = {key(row): row for row in a['results']}
    pairs = [{**y, 'a': old[key(y)], 'b': y} for y in b['results'] if key(y) in old]
    if not pairs:
        fail(f'compare: {names[0]} and {names[1]} have no row in common')
    shown = [k for k in KEYS if k == 'path' or len({pair.get(k) for pair in pairs}) > 1]
    for letter, name, r in zip('AB', names, reports, strict=True):
        print(
            f'{letter}: {name}: {r.get("device")}, {r.get("dtype")}, commit {r.get("commit")}, {r.get("date")}'
        )
    print(
        '\n'
        + markdown(
            [
                *(column(k, k) for k in shown),
                ('A', lambda r: figure(r['a'])),
                ('B', lambda r: figure(r['b'])),
                ('speed of B over A', lambda r: ratio(r['a'], r['b'])),
            ],
            pairs,
        )
    )

"""measure.py, bench.py and baselines.py: reports hold what they promise, a failing variant does not end the others, the baselines are what they
say they are (parameters, carried state, window), learn, and refuse bad settings with one line."""

import contextlib
import csv
import json
import math
import os
import pathlib
import shlex
import signal
import subprocess
import sys
from multiprocessing.connection import Listener

import forks
import numpy as np
import pytest
import torch
import torch.nn.functional as F

import baselines
import bench
import bench_sokoban
import measure
from configurator import configure, read_script
from data_fineweb import open_meta, write_meta, write_shard
from model import ModelConfig, build_model

ROOT = pathlib.Path(__file__).parents[1]
TINY = {'tokenizer': 'bytes', 'n_layer': 2, 'n_expert': 2, 'n_embd': 32, 'n_head': 2, 'window': 8, 'block_size': 8, 'tokens_per_step': 128,
        'max_iters': 60, 'warmup_iters': 5, 'eval_interval': 30, 'log_interval': 30, 'val_tokens': 512, 'val_streams': 4, 'device': 'cpu',
        'dtype': 'float32', 'compile': False, 'threads': 1}  # fmt: skip


@pytest.fixture(scope='module', autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


IDLE = []


@pytest.fixture(scope='module', autouse=True)
def ended():
    yield
    workers = [*IDLE]
    measure.end_all(dict(enumerate(workers)))
    assert not any(process.is_alive() for process, _ in workers)


class Forked:
    """A forked child as multiprocessing shows one."""

    def __init__(self, child):
        self.child, self.pid, self.kill = child, child.pid, child.kill

    def is_alive(self):
        return self.child.poll() is None

    def join(self, timeout=None):
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.child.wait(timeout)

    @property
    def exitcode(self):
        return self.child.poll()


WORK = """import sys
from multiprocessing.connection import Client
import measure
measure.work(Client(sys.argv[1]), 'cpu', int(sys.argv[2]))
"""
STARTED = []


@pytest.fixture
def reused(monkeypatch):
    """measure's processes go on from test to test, and all but the first are forked: importing torch takes seconds."""
    really = measure.begin

    def begin(kind, threads):
        if IDLE:
            return IDLE.pop()
        STARTED.append(1)
        if len(STARTED) == 1:
            return really('cpu', threads)
        with Listener(family='AF_UNIX') as listener:
            child = forks.Popen(
                [sys.executable, '-c', WORK, listener.address, threads],
                cwd=ROOT,
                env={**os.environ, 'PYTHONPATH': str(ROOT / 'tests')},
            )
            pipe = listener.accept()
        pipe.recv()
        return Forked(child), pipe

    monkeypatch.setattr(measure, 'begin', begin)
    monkeypatch.setattr(
        measure, 'end', lambda *worker: IDLE.append(worker) if worker[0].is_alive() else None
    )


@pytest.fixture(scope='module')
def data_dir(tmp_path_factory):
    """Bytes that a look at the token before predicts well, but their frequencies do not: a walk with steps of 1 or 2 on 64 values."""
    folder, rng = tmp_path_factory.mktemp('data'), np.random.default_rng(0)
    for name, size in (('val_000000', 1000), ('train_000001', 12000)):
        write_shard(folder / f'fineweb_{name}.bin', np.cumsum(rng.integers(1, 3, size)) % 64)
    write_meta(folder, open_meta(folder, tokenizer='bytes', source='test'))
    return str(folder)


def settings(**changes):
    return {**read_script(baselines.__file__)[0], **TINY, **changes}


def run(script, *arguments):
    return forks.run([sys.executable, script, *arguments], cwd=ROOT, capture_output=True, text=True)


def bench_config(**changes):
    return {**read_script(bench.__file__)[0], 'cells': ((1, 2, 4, 2),), 'n_embd': 128, 'block_size': 4, 'rounds': 2,
            'seconds': 0.01, 'threads': 1, **changes}  # fmt: skip


def bench_report(tmp_path, **changes):
    config = bench_config(out=str(tmp_path / 'a' / 'b.json'), **changes)
    variants, sizes = bench.plan(config, 'cpu', torch.float32, str(tmp_path))
    bench.run_suite(
        config['suite'],
        config['suite'],
        variants,
        sizes,
        config,
        'cpu',
        torch.float32,
        config['seconds'],
    )
    return json.loads((tmp_path / 'a' / 'b.json').read_text())


def check_report(report, out, lines, paths):
    """What every suite promises: a header that lets it be repeated, yardsticks, turns, the table also as a file."""
    assert {
        'device',
        'torch',
        'python',
        'threads',
        'commit',
        'command',
        'date',
        'config',
        'dtype',
        'memory',
    } <= set(report)
    assert (
        report['yardsticks']['matmul float32']['median'] > 1e8
        and report['yardsticks']['copy']['median'] > 1e7
    )
    assert [r['path'] for r in report['results']] == paths
    for r in report['results']:
        assert r['status'] == 'ok' and all(
            len(v) == 2 and min(v) > 0 for v in r['seconds'].values()
        )
        assert r['memory_bytes'] < 2**30 and r['first_run_s'] > 0
    turns = [line.split(': ')[0].split('  ') for line in lines if line.startswith('round')]
    assert [number for number, _ in turns] == [
        f'round {n}/2' for n in range(3) for _ in range(len(paths) + 1)
    ]
    assert [label.split()[-1] for _, label in turns] == ['yardsticks', *paths] * 3
    assert any(line.startswith('1 of 1 cells, ') for line in lines)
    rows = [line for line in lines if line.startswith('|')]
    assert (
        len(rows) == 2 + len(paths)
        and len({row.count('|') for row in rows}) == 1
        and '1.00x' in rows[2]
    )
    assert [line for line in out.read_text().splitlines() if line.startswith('|')] == rows
    return rows


def test_suite_cpu(reused, tmp_path, capsys):
    report = bench_report(tmp_path, paths='fast,gpt_bf16')
    rows = check_report(
        report, tmp_path / 'a' / 'b.md', capsys.readouterr().out.splitlines(), ['fast', 'gpt_bf16']
    )
    fast, gpt = report['results']
    assert [fast[k] for k in ('L', 'E', 'C', 'B', 'T', 'D', 'V', 'dtype')] == [
        1,
        2,
        4,
        2,
        4,
        128,
        256,
        'float32',
    ]
    assert [gpt[k] for k in ('L', 'E', 'C', 'B', 'T', 'D', 'V', 'dtype')] == [
        2,
        1,
        4,
        1,
        8,
        128,
        256,
        'bfloat16',
    ]  # 8 tokens a chunk, both
    for r in (fast, gpt):
        assert r['memory_bytes'] > 0
        assert r['tokens_per_s']['median'] == pytest.approx(
            np.median(8 / np.array(r['seconds']['chunk']))
        )
        model = build_model(
            ModelConfig(256, r['L'], r['E'], 128, window=4, block_size=r['T']), r is fast
        )
        flops, rate = (
            model.flops_per_token(),
            report['yardsticks'][f'matmul {r["dtype"]}']['median'],
        )
        assert r['share_of_matmul'] == pytest.approx(
            3 * sum(flops.values()) * r['tokens_per_s']['median'] / rate
        )
    assert fast['flops_per_token'] == pytest.approx(
        gpt['flops_per_token'], rel=0.01
    )  # the same work
    chunk, head = (np.array(fast['seconds'][part]) for part in ('chunk', 'head'))
    assert fast['step_ms']['median'] == pytest.approx(1000 * np.median((chunk - head) / 4))
    flops = build_model(ModelConfig(256, 1, 2, 128, window=4), True).flops_per_token()['core']
    assert fast['step_ms_at_matmul_rate'] == pytest.approx(
        3000 * flops * 2 / report['yardsticks']['matmul float32']['median']
    )
    assert 'head alone, ms' in rows[0] and 'step_ms' not in gpt


@pytest.mark.parametrize(
    'suite, paths, figure',
    [('train', ['fast', 'gpt'], 'tokens_per_s'), ('decode', ['fast', 'ring'], 'ms_per_token')],
)
def test_suites_of_the_paper(suite, paths, figure, reused, tmp_path, capsys):
    n = {'train': 64, 'decode': 2}[suite]  # tokens an update over 4 GPUs, or streams
    report = bench_report(tmp_path, suite=suite, paths=','.join(paths), cells=((1, 2, 4, n),))
    check_report(report, tmp_path / 'a' / 'b.md', capsys.readouterr().out.splitlines(), paths)
    rates = [report['yardsticks'][name]['median'] for name in ('matmul float32', 'copy')]
    for r in report['results']:
        assert (r['B'], r['T'], r['C'], r['tokens']) == (
            (4, 4, 4, 16) if suite == 'train' else (2, 4, 4, 2)
        )
        times = np.array(r['seconds']['update' if suite == 'train' else 'token'])
        model = ModelConfig(256, r['L'], r['E'], 128, window=4, block_size=4)
        least = sum(
            bench.floor(model, r['path'] != 'gpt', r['B'], *rates, 4, suite == 'decode').values()
        )
        assert r[figure]['median'] == pytest.approx(
            np.median(16 / times if suite == 'train' else 1000 * times)
        )
        rate = (
            r['tokens_per_s']['median'] / 4 if suite == 'train' else 1 / np.median(times)
        )  # token steps a second
        assert r['share_of_roofline'] == pytest.approx(least * rate)
        assert r['paper'] is None and 'over_paper' not in r


def test_suite_kernels(reused, tmp_path, capsys):
    """Every twin runs eagerly, Triton's say that they need a GPU; Muon's iteration batched against one by one."""
    report = bench_report(tmp_path, suite='kernels', paths='eager,triton', rounds=1)
    rows = {(r['kernel'], r['path']): r for r in report['results']}
    pieces = ['attention', 'experts', 'loss']
    assert set(rows) == {(name, path) for name in pieces for path in ('eager', 'triton')} | {
        ('orthogonalize', how) for how in ('one by one', 'batched')
    }
    assert all(
        r['status'] == ('n/a (needs CUDA)' if path == 'triton' else 'ok')
        for (_, path), r in rows.items()
    )
    assert all(
        r['share_of_roofline'] > 0 and r['us']['median'] > 0
        for (_, path), r in rows.items()
        if path != 'triton'
    )
    lines = [
        line for line in (tmp_path / 'a' / 'b.md').read_text().splitlines() if line.startswith('|')
    ]
    assert len(lines) == 2 + 8 and len({line.count('|') for line in lines}) == 1
    assert [line.split('|')[1].strip() for line in lines[2:]] == [
        name for name in [*pieces, 'orthogonalize'] for _ in range(2)
    ]


def test_why_a_triton_kernel_is_not_timed(monkeypatch):
    for found, message in (
        ({'error': 'TritonError: x'}, 'TritonError: x'),
        ({'difference': 0.01}, ''),
        ({'difference': 0.5}, 'wrong by 50.0%'),
        ({'difference': math.nan}, 'wrong by nan%'),
    ):
        monkeypatch.setattr(bench.kernels, 'compare', lambda run, found=found: found)
        assert bench.why_not(None, True) == message
    assert bench.why_not(None, False) == 'n/a (needs CUDA)'


@pytest.mark.parametrize('words', [['--suite=sokoban'], ['--suite', 'sokoban']])
def test_suite_sokoban(words, tmp_path, monkeypatch, capsys):
    """bench.py hands over to bench_sokoban.py, whose report has the table beside it. What it measures: test_commands.py runs README's commands."""

    def fine(variants, *_):
        return {
            label: {
                'status': 'ok',
                'seconds': {part: [2.0]},
                'macs': 8,
                'env_steps': 4,
                'first_run_s': 0,
                'memory_bytes': 0,
            }
            for label in variants
            for part in ['conv' if label == 'conv' else 'update']
        }

    monkeypatch.setattr(bench_sokoban, 'measure', fine)
    monkeypatch.setattr(sys, 'argv', ['bench.py', *words, '--cells=(1,1,4),', '--paths=fast', '--n_envs=2', '--device=cpu',
                                      f'--out={tmp_path}/s.json'])  # fmt: skip
    for name, value in read_script(bench_sokoban.__file__)[0].items():
        monkeypatch.setattr(bench_sokoban, name, value)
    bench.main()
    report = json.loads((tmp_path / 's.json').read_text())
    assert report['suite'] == 'sokoban' and report['results'][0]['env_steps_per_s']['median'] == 2
    assert '| 1, 1, 4 | fast | 2 (2..2) | 1.00x | 100.0% |' in (tmp_path / 's.md').read_text()


def test_floor_is_that_of_the_plan():
    """Against the hard floors calculated for an H100 of 800 TFLOP/s and 3 TB/s (1000 tokens/s; ms a token), d = 768, E = 16/L, V = 50304."""
    train = {1: (913, 913, 772, 477, 145, 75), 2: (913, 864, 642, 381, 111, 57), 4: (778, 644, 480, 272, 76, 39),
             8: (514, 427, 319, 173, 46, 23)}  # fmt: skip
    decode = {
        1: (0.096, 0.112),
        2: (0.097, 0.129),
        4: (0.099, 0.162),
        8: (0.103, 0.229),
        16: (0.112, 0.363),
    }
    for L, row in train.items():
        for C, want in zip((32, 64, 128, 256, 1024, 2048), row, strict=True):
            B, config = 32768 // C, ModelConfig(50304, L, 16 // L, 768, window=C, block_size=C)
            got = B / sum(bench.floor(config, True, B, 800e12, 3e12).values()) / 1000
            assert got == pytest.approx(want, rel=0.25 if (L, C) == (8, 32) else 0.13), (L, C)
    for L, row in decode.items():
        for C, want in zip((128, 2048), row, strict=True):
            config = ModelConfig(50304, L, 16 // L, 768, window=C)
            assert 1000 * sum(
                bench.floor(config, True, 16, 800e12, 3e12, decoding=True).values()
            ) == pytest.approx(want, rel=0.07), (L, C)
    gpt = ModelConfig(50304, 16, 1, 768, window=256, block_size=256)
    flops = build_model(
        ModelConfig(256, 16, 1, 384, window=256, block_size=256), False
    ).flops_per_token()['core']  # at half the width
    assert (
        0.8
        < 128
        / sum(bench.floor(gpt, False, 128, 800e12, 3e12).values())
        / (800e12 / 3 / (4 * flops + 2 * 768 * 50304))
        < 1.05
    )


def test_paper_tables():
    """The constants are the paper's files, where they are at hand."""
    folder = ROOT.parent / 'shared' / 'paper'
    if not folder.exists():
        pytest.skip(
            f"{folder} does not exist: the tables in bench.py are not compared with the paper's files"
        )
    for name, ours in (
        ('training_ktokens_per_s_4xH100', bench.PAPER_TRAIN),
        ('latency_ms_per_token_4xH100', bench.PAPER_DECODE),
    ):
        with open(folder / f'{name}.csv') as file:
            header, *lines = csv.reader(file)
        head = header.index('E') + 1  # model, L, E and what stands before
        theirs = {tuple(int(x) if x.isdigit() else x for x in line[:head]): tuple(None if x == 'OOM' else float(x) for x in line[head:])
                  for line in lines}  # fmt: skip
        assert ours == theirs
    assert header[3:] == ['C128_B16', 'C2048_B16']


def test_paper_cells(tmp_path):
    """On a GPU: every cell of both tables, the streams of one of 4 GPUs, the paper's figures; none at other sizes."""
    monolith = bench_config(suite='train', cells=(), n_embd=0)
    variants, sizes = bench.plan(monolith, 'cuda:0', torch.bfloat16, str(tmp_path))
    assert len(variants) == 60 and all(
        r['path'] == ('compiled' if r['E'] > 1 else 'gpt_compiled') for r in sizes.values()
    )
    assert all(
        r['B'] * r['C'] * 4 == r['tokens_per_update'] and r['T'] == r['C'] for r in sizes.values()
    )
    papers = {
        (r['tokens_per_update'], r['L'], r['C']): bench.paper_figure(r, 'train')
        for r in sizes.values()
    }
    assert (
        papers[131072, 1, 128] == 87375
        and papers[262144, 16, 2048] == 267875
        and papers[131072, 8, 128] == 'OOM'
        and None not in papers.values()
    )
    some = bench.plan(
        {**monolith, 'cells': ((2, 8), (4, 4, 64), (1, 16, 32, 262144))},
        'cuda:0',
        torch.bfloat16,
        str(tmp_path),
    )[1]
    assert len(some) == 12 + 2 + 1
    row = next(iter(sizes.values()))
    assert (
        bench.paper_figure({**row, 'D': 384}, 'train') is None
        and bench.paper_figure({**row, 'tokens_per_update': 65536}, 'train') is None
    )
    sizes = bench.plan({**monolith, 'suite': 'decode'}, 'cuda:0', torch.bfloat16, '')[1]
    assert {(r['L'], r['C']): bench.paper_figure(r, 'decode') for r in sizes.values() if r['path'] == 'ring'} | {
        ('gpt', r['C']): bench.paper_figure(r, 'decode') for r in sizes.values() if r['path'] == 'gpt_ring'} == {
        (1, 128): 0.108, (1, 2048): 0.131, (2, 128): 0.431, (2, 2048): 0.554, (4, 128): 0.552, (4, 2048): 0.637, (8, 128): 0.815, (8, 2048): 0.935,
        (16, 128): 1.402, (16, 2048): 1.577, ('gpt', 128): 0.565, ('gpt', 2048): 0.670}  # fmt: skip
    record = {'status': 'ok', 'seconds': {'token': [0.0005]}}
    done = bench.derive(
        record,
        next(r for r in sizes.values() if (r['path'], r['L'], r['C']) == ('ring', 8, 128)),
        'decode',
        {},
    )[0]
    assert done['over_paper'] == pytest.approx(0.815 / 0.5)
    oom = bench.table(
        [{**row, 'status': 'OOM', 'paper': 'OOM'}, {**row, 'status': 'OOM', 'paper': 1000.0}],
        'train',
    ).splitlines()
    assert (
        oom[0].count('|') == oom[2].count('|')
        and oom[2].count(' OOM ') == 2
        and ' 1,000 ' in oom[3]
    )


def report_file(path, suite, rows, **changes):
    report = {
        'suite': suite,
        'device': 'X',
        'dtype': 'float32',
        'commit': 'abc',
        'date': 'today',
        'torch': '2',
        'threads': 2,
        'command': 'old',
        'results': rows,
    }
    path.write_text(json.dumps({**report, **changes}))
    return str(path)


def test_compare(tmp_path, monkeypatch, capsys):
    def row(L, name, value, **changes):
        return {
            'path': 'fast',
            'L': L,
            'E': 1,
            'C': 8,
            'B': 2,
            'status': 'ok',
            name: {'median': value, 'min': value, 'max': value},
            **changes,
        }

    for name, value in read_script(bench.__file__)[0].items():
        monkeypatch.setattr(bench, name, value)
    a = report_file(
        tmp_path / 'a.json',
        'train',
        [row(1, 'tokens_per_s', 100), row(2, 'tokens_per_s', 50), row(4, 'tokens_per_s', 7)],
    )
    b = report_file(
        tmp_path / 'b.json',
        'train',
        [
            row(2, 'tokens_per_s', 75),
            row(1, 'tokens_per_s', 250),
            {**row(4, 'x', 1), 'status': 'OOM'},
        ],
    )
    c, d = (
        report_file(tmp_path / f'{x}.json', 'decode', [row(1, 'ms_per_token', value)])
        for x, value in (('c', 3.0), ('d', 2.0))
    )
    e = report_file(tmp_path / 'e.json', 'decode', [row(8, 'ms_per_token', 1)])

    def run_with(*arguments):
        monkeypatch.setattr(sys, 'argv', ['bench.py', *arguments])
        bench.main()
        return [line for line in capsys.readouterr().out.splitlines() if line.startswith('|')]

    lines = run_with('--compare', a, b)
    assert (
        len(lines) == 5
        and lines[2].endswith('| 1.50x |')
        and lines[3].endswith('| 2.50x |')
        and lines[4].endswith('| OOM |  |')
    )
    assert run_with(f'--compare={c},{d}')[2].endswith('| 1.50x |')
    broken = tmp_path / 'f.json'
    broken.write_text('[]')
    for pair, message in (
        (f'{a},{c}', 'of suite'),
        (f'{a},nowhere.json', 'cannot be read'),
        (f'{c},{e}', 'no row in common'),
        (a, 'two files'),
        (f'{a},{broken}', 'no report'),
    ):
        with pytest.raises(SystemExit) as stop:
            run_with(f'--compare={pair}')
        error = capsys.readouterr().err
        assert stop.value.code == 2 and error.count('\n') == 1 and message in error


def fine(group, *_):
    """In place of measure: two tokens a second."""
    done = {
        'status': 'ok',
        'seconds': {'chunk': [2.0]},
        'tokens': 4,
        'flops_per_token': 1,
        'first_run_s': 0,
        'memory_bytes': 0,
    }
    return {label: done for label in group if label != 'yardsticks'}


def test_append(tmp_path, monkeypatch, capsys):
    """Rows of an earlier call stay, those measured again are replaced; a report of another commit is refused."""
    monkeypatch.setattr(bench, 'measure', fine)
    config = bench_config(append=True, out=str(tmp_path / 'r.json'))
    sizes = {
        f'{L}': {
            'path': 'fast',
            'cell': f'{L}',
            'L': L,
            'E': 1,
            'C': 8,
            'B': 2,
            'T': 4,
            'D': 128,
            'V': 256,
        }
        for L in (1, 2)
    }
    mine = measure.header(config, 'cpu', torch.float32)
    old = [
        {**sizes['1'], 'status': 'ok', 'tokens_per_s': {'median': 9, 'min': 9, 'max': 9}},
        {**sizes['1'], 'cell': '8', 'L': 8, 'status': 'OOM'},
    ]
    same = {name: mine[name] for name in ('device', 'dtype', 'commit', 'torch', 'threads')}
    report_file(tmp_path / 'r.json', 'cpu', old, **same)
    bench.run_suite('cpu', 'cpu', dict.fromkeys(sizes), sizes, config, 'cpu', torch.float32, 0)
    report = json.loads((tmp_path / 'r.json').read_text())
    assert [
        (r['L'], r['status'], r.get('tokens_per_s', {}).get('median')) for r in report['results']
    ] == [(1, 'ok', 2), (8, 'OOM', None), (2, 'ok', 2)]
    assert report['command'].startswith('old; ')
    report_file(tmp_path / 'r.json', 'cpu', old, **{**same, 'commit': 'other'})
    with pytest.raises(SystemExit):
        bench.run_suite('cpu', 'cpu', dict.fromkeys(sizes), sizes, config, 'cpu', torch.float32, 0)
    error = capsys.readouterr().err
    assert error.count('\n') == 1 and "commit 'other'" in error
    bench.run_suite(
        'cpu',
        'cpu',
        dict.fromkeys(sizes),
        sizes,
        {**config, 'append': False},
        'cpu',
        torch.float32,
        0,
    )
    assert len(json.loads((tmp_path / 'r.json').read_text())['results']) == 2


@pytest.mark.parametrize('kind', ['cpu', 'cuda:0'])
def test_budget(kind, tmp_path, monkeypatch, capsys):
    """What began is finished and written; the command that is told measures the rest, and only that. On a GPU the yardsticks are apart."""
    groups = []
    monkeypatch.setattr(
        bench, 'measure', lambda group, *rest: groups.append(list(group)) or fine(group)
    )
    monkeypatch.setattr(measure, 'device_name', lambda kind: 'X')
    monkeypatch.setattr(
        sys, 'argv', ['bench.py', '--cells=(1,2),(2,1),(3,1,8)', '--n_embd=128', '--append=False']
    )

    def run_suite(**changes):
        config = bench_config(paths='plain,fast', out=str(tmp_path / 'r.json'), **changes)
        variants, sizes = bench.plan(config, kind, torch.float32, '')
        bench.run_suite('cpu', 'cpu', variants, sizes, config, kind, torch.float32, 0)
        return json.loads((tmp_path / 'r.json').read_text())['results'], capsys.readouterr().out

    cells = ((1, 2), (2, 1), (3, 1, 8))
    rows, out = run_suite(cells=cells, budget=1e-9)
    assert len(rows) == 2 and 'cells left: 2' in out
    command = shlex.split(out.splitlines()[-1])
    assert command[:4] == ['python', 'bench.py', '--n_embd=128', '--append=True']
    rest = configure(dict(vars(bench)), command[2:], quiet=True)
    assert rest['cells'] == ((2, 1, 128, 16), (3, 1, 8, 16))
    rows, out = run_suite(cells=rest['cells'], append=True)
    assert [(r['L'], r['path']) for r in rows] == [
        (L, path) for L in (1, 2, 3) for path in ('plain', 'fast')
    ] and 'left' not in out
    names = [[label.split()[-1] for label in group] for group in groups]
    assert names == (
        [['yardsticks', 'plain', 'fast']] * 3
        if kind == 'cpu'
        else [['yardsticks'], ['plain', 'fast'], ['yardsticks'], *[['plain', 'fast']] * 2]
    )


def make_too_large(kind):
    return {'chunk': lambda: torch.empty(2**60)}, {}


def make_killed(kind):
    os.kill(os.getpid(), signal.SIGKILL)  # as Linux does when the memory is gone


def make_broken(kind):
    raise RuntimeError('no compiler\nmany more lines')


def make_fine(kind):
    return {'chunk': lambda: None}, {'tokens': 1, 'flops_per_token': 1, 'pid': os.getpid()}


def test_a_variant_that_fails(reused, capsys):
    makers = {
        'large': make_too_large,
        'killed': make_killed,
        'broken': make_broken,
        'fine': make_fine,
    }
    records = measure.measure(
        {label: (make, {'kind': 'cpu'}) for label, make in makers.items()}, 1, 0, 'cpu', 1
    )
    assert [records[label]['status'] for label in makers] == [
        'OOM',
        'OOM',
        'failed: RuntimeError: no compiler',
        'ok',
    ]
    sizes = {
        'L': 1,
        'E': 1,
        'C': 1,
        'B': 1,
        'T': 1,
        'D': 1,
        'path': 'fast',
        'dtype': 'float32',
        'model': 'transformer',
    }
    rows = bench.table(
        [bench.derive(record, sizes, 'cpu', {})[0] for record in records.values()], 'cpu'
    ).splitlines()
    assert '| OOM |' in rows[2] and '1.00x' in rows[5] and 'matmul' not in rows[0]
    assert len({row.count('|') for row in rows}) == 1


def test_one_process_on_a_gpu(reused, capsys):
    """Variants one after another in one process, also from call to call; after one that fails, in another. (Here they use the CPU.)"""
    pool, made = {}, {}
    for makers in ({'a': make_fine, 'b': make_fine}, {'killed': make_killed, 'c': make_fine}):
        made |= measure.measure(
            {label: (make, {'kind': 'cpu'}) for label, make in makers.items()},
            1,
            0,
            'cuda:0',
            1,
            pool,
        )
    assert made['a']['pid'] == made['b']['pid'] != made['c']['pid'] == pool['gpu'][0].pid
    assert [made[label]['status'] for label in made] == ['ok', 'ok', 'OOM', 'ok']
    assert [line.split(':')[0] for line in capsys.readouterr().out.splitlines()][:4] == [
        'round 0/1  a',
        'round 1/1  a',
        'round 0/1  b',
        'round 1/1  b',
    ]
    measure.end_all(pool)
    assert not pool


def test_timed():
    calls = []
    assert (
        measure.timed(lambda: calls.append(1) or 0.25, 10, 'cpu') == 0.25 and len(calls) == 1
    )  # timed itself
    assert 0 < measure.timed(lambda: calls.append(1), 10, 'cpu') < 1 and len(calls) == 11


def test_twins_of_several_cells(tmp_path, monkeypatch, capsys):
    """The same twin beside each cell, in turns with its paths: a row each."""
    monkeypatch.setattr(bench, 'measure', fine)
    config = bench_config(cells=((2, 2), (4, 1)), paths='fast,gpt', out=str(tmp_path / 'r.json'))
    bench.run_suite(
        'cpu', 'cpu', *bench.plan(config, 'cpu', torch.float32, ''), config, 'cpu', torch.float32, 0
    )
    rows = json.loads((tmp_path / 'r.json').read_text())['results']
    assert [(r['cell'][:4], r['path'], r['L'], r['E']) for r in rows] == [
        ('(2,2', 'fast', 2, 2), ('(2,2', 'gpt', 4, 1), ('(4,1', 'fast', 4, 1), ('(4,1', 'gpt', 4, 1)]  # fmt: skip


def test_commit_and_device():
    assert measure.device_name('cpu').startswith('CPU ')
    assert measure.commit() == 'unknown' or len(measure.commit().removesuffix('-dirty')) == 12


@pytest.mark.parametrize('argument, message', [
    ('--suite=speed', 'expected one of cpu, train, decode, kernels'), ('--cells=(1,),', 'is not (L, E, C, B)'), ('--cells=((1,2,3,0),)', 'is not (L, E, C, B)'),
    ('--paths=fast,slow', 'expected some of'), ('--paths=ring', 'expected some of'), ('--suite=kernels --paths=fast', 'expected some of'),
    ('--rounds=0', 'at least 1'), ('--budget=-1', 'at least 0'), ('--n_embd=100', 'set n_head'), ('--dtype=float16', 'dtype'),
    ('--device=tpu', 'device'), ('--suite=train --cells=(1,1,4,100)', 'not a whole number'), ('--compare=a.json', 'two files'), ('--compare', 'two files'),
    ('--suite=kernels --paths=eager_bf16', 'expected some of'), ('--out=table.md --append=True', 'name the JSON'),
])  # fmt: skip
def test_bench_refuses(argument, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, 'argv', ['bench.py', *argument.split()])
    for name, value in read_script(bench.__file__)[0].items():
        monkeypatch.setattr(
            bench, name, value
        )  # configure changes them: monkeypatch puts them back
    with pytest.raises(SystemExit) as stop:
        bench.main()
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count('\n') == 1 and message in error


def test_reads_train_lm_configs():
    """Every setting of train_lm.py is one here, with the same default."""
    theirs, ours = (read_script(ROOT / name)[0] for name in ('train_lm.py', 'baselines.py'))
    assert {name: ours.get(name) for name in theirs} == theirs


@pytest.mark.parametrize('changes', [{}, {'n_embd': 128, 'n_layer': 3}, {'recurrent': False, 'n_embd': 64}, {'lstm_layers': 2, 'n_embd': 128},
                                     {'aggregation': 'softmax_l2', 'n_embd': 256, 'n_expert': 4}])  # fmt: skip
def test_lstm_parameters(changes):
    config = settings(n_kv_head=1, **changes)
    net, what = baselines.build(config)
    ours = build_model(baselines.our_config(config), config['recurrent']).num_params()['total']
    assert what['params_of_ours'] == ours and what['params'] == sum(
        p.numel() for p in net.parameters()
    )
    assert 0.98 <= what['params'] / ours <= 1.02


def test_lstm_state_carried():
    """Chunks with the state handed on = one long pass; the forget gates' bias starts at 1."""
    net, _ = baselines.build(settings())
    assert (net.lstm.bias_ih_l0.view(4, -1)[1] == 1).all() and (
        net.lstm.bias_ih_l0.view(4, -1)[0].abs() < 1
    ).all()
    x, y = torch.randint(256, (2, 3, 24))
    whole, _ = net(x, y)
    state, total = None, 0
    for x_t, y_t in zip(x.split(7, 1), y.split(7, 1), strict=True):
        loss, state = net(x_t, y_t, state)
        assert not any(s.requires_grad for s in state)
        total += loss * x_t.numel() / x.numel()
    torch.testing.assert_close(total, whole)


def test_transformer_window():
    """Validation with a cache of W = attention with a band mask over the whole stream, however it is cut; the parameters are GPT's."""
    config = settings(model='transformer', n_expert=1, n_head=4, n_kv_head=2)
    net, what = baselines.build(config)
    net = net.double()
    assert what['params'] == what['params_of_ours']
    x, y = torch.randint(256, (2, 3, 30))
    t = torch.arange(30)
    band = (t[:, None] >= t) & (t[:, None] < t + config['window'])
    with torch.no_grad():
        h, rope = (
            net.embedding(x),
            baselines.rope_table(30, net.config.head_dim, net.embedding.weight),
        )
        for block in net.blocks:
            h, _ = block(h, rope, band, None)
        want = F.cross_entropy(net.head(baselines.norm(h)).flatten(0, 1).float(), y.flatten())
        for cut in (30, 11, 1):
            state, total = net.init_state(3), 0
            for x_t, y_t in zip(x.split(cut, 1), y.split(cut, 1), strict=True):
                loss, state = net(x_t, y_t, state)
                total += loss.double() * x_t.numel() / x.numel()
            torch.testing.assert_close(total.float(), want, rtol=1e-5, atol=0)
        short, _ = net(x[:, :8], y[:, :8])  # training: within W the same
        cached, _ = net(x[:, :8], y[:, :8], net.init_state(3))
        torch.testing.assert_close(short, cached, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    'changes',
    [
        {'lr_scan': (0.0001, 0.01)},
        {'batch_size': 6, 'baseline_lr': 0.01},
        {'model': 'transformer', 'n_expert': 1, 'baseline_lr': 0.01},
    ],
)
def test_baseline_learns(changes, data_dir, tmp_path, capsys):
    config = settings(data_dir=data_dir, out_dir=str(tmp_path / 'run'), **changes)
    baselines.train_all(config, 'cpu', torch.float32)
    folder = tmp_path / f'run_{config["model"]}'
    log = [json.loads(line) for line in (folder / 'log.jsonl').read_text().splitlines()]
    assert [r['step'] for r in log] == list(range(61)) and [r['tokens'] for r in log[1:]] == [
        128 * n for n in range(1, 61)
    ]
    assert {'train_loss', 'grad_norm', 'lr', 'tokens_per_s', 'seconds'} <= set(log[1])
    assert [r['step'] for r in log if 'val_loss' in r] == [0, 30, 60]
    assert log[0]['val_loss'] > math.log(200) and log[-1]['val_loss'] < 0.8 * math.log(
        64
    )  # ln 64: what frequencies alone give
    assert log[-1]['val_bits_per_byte'] == pytest.approx(log[-1]['val_loss'] / math.log(2))
    result = json.loads((folder / 'result.json').read_text())
    assert len(result['runs']) == len(changes.get('lr_scan', (0,)))
    assert (
        result['best']['val_loss']
        == pytest.approx(min(r['val_loss'] for r in result['runs']))
        == log[-1]['val_loss']
    )
    if 'lr_scan' in changes:
        assert result['best']['learning_rate'] == 0.01 and (folder / 'log_0.0001.jsonl').exists()
    with pytest.raises(ValueError, match='overwrite'):
        baselines.train_all(config, 'cpu', torch.float32)


def test_micro_batches():
    """Rows in micro-batches give the gradients of one batch, and each row's state its own."""
    config, losses = settings(), []
    for micro in (16, 5):
        net, _ = baselines.build(config)
        optimizer, torch_rng = (
            baselines.make_adamw(net, 1e-2, config),
            torch.Generator().manual_seed(1),
        )

        class Loader:
            def next(self, generator=torch_rng):
                return *torch.randint(256, (2, 16, 8), generator=generator), False

        states = [None] * math.ceil(16 / micro)
        losses.append([baselines.update(net, list(net.parameters()), optimizer, Loader(), states, micro, 1e-2, config, 'cpu', torch.float32)
                       for _ in range(3)])  # fmt: skip
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)


def test_speed_mode(reused, data_dir, tmp_path, monkeypatch, capsys):
    """All but the compiled variant, which takes a minute."""
    monkeypatch.setattr(baselines, 'OUR_PATHS', ('fast',))
    config = settings(rounds=1, bench_seconds=0.01, out=str(tmp_path / 'speed.json'))
    baselines.measure_speed(config, 'cpu', torch.float32)
    report = json.loads((tmp_path / 'speed.json').read_text())
    assert [r['path'] for r in report['results']] == ['nn.LSTM, AdamW', 'RecurrentGPT, fast, Muon']
    for r in report['results']:
        assert (
            r['status'] == 'ok'
            and r['tokens_per_s']['median'] > r['tokens_per_s_with_optimizer']['median'] > 0
        )
        assert r['params'] == pytest.approx(report['results'][0]['params_of_ours'], rel=0.02)


@pytest.mark.parametrize('arguments, message', [
    (['--model=gru'], "expected 'lstm' or 'transformer'"), (['--learning_rate=0.1'], '--baseline_lr'), (['--max_iters=0'], 'at least 1'),
    (['--model=transformer'], 'n_expert'), (['--tokens_per_step=100'], 'multiple'), (['--lr_scan=(0,)'], 'above 0'), (['--n_embd=16'], 'set n_head'),
    (['--data_dir=nowhere', '--n_embd=128'], 'no train shards'), (['--tokenizer=words'], 'expected one of'),
])  # fmt: skip
def test_baselines_refuse(arguments, message, tmp_path, monkeypatch, capsys):
    argv = ['--device=cpu', f'--out_dir={tmp_path / "run"}', *arguments]
    monkeypatch.setattr(sys, 'argv', ['baselines.py', *argv])
    for name, value in read_script(baselines.__file__)[0].items():
        monkeypatch.setattr(baselines, name, value)
    with pytest.raises(SystemExit) as stop:
        baselines.main()
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count('\n') == 1 and message in error


@pytest.mark.parametrize('script', ['bench.py', 'baselines.py'])
def test_command_line(script):
    result = run(script, '--rouns=1')
    assert (
        result.returncode == 2
        and result.stderr.count('\n') == 1
        and "did you mean 'rounds'" in result.stderr
    )

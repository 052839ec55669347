"""bench.py: reports hold what they promise, a failing variant does not end the others, suite first
goes on where it stopped."""

import json
import os
import pathlib
import shlex
import signal
import subprocess
import sys

import forks
import numpy as np
import pytest

import bench
from configurator import read_script

ROOT = pathlib.Path(__file__).parents[1]
SMALL = shlex.split('--rounds=1 --seconds=0.01 --threads=1 --device=cpu --n_envs=2 --unroll=3')
SETTINGS = read_script(bench.__file__)[0]
GPU = {**SETTINGS, 'device': 'cuda:0', 'dtype': 'bfloat16'}
ROW = dict.fromkeys('LECBTDV', 1) | {'suite': 'train', 'path': 'fast', 'model': 'recurrent'}
ROW |= {'dtype': 'bfloat16'}


def run(tmp_path, words, *more, status=0):
    """python bench.py -> the report, its table, the output."""
    words = [*SMALL, *words.split(), *more, f'--out={tmp_path}/a/b.json']
    command = [sys.executable, 'bench.py', *words]
    done = forks.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == status, done.stdout + done.stderr
    table = (tmp_path / 'a' / 'b.md').read_text()
    assert table.strip() in done.stdout
    return json.loads((tmp_path / 'a' / 'b.json').read_text()), table, done.stdout


def call(monkeypatch, *words):
    for name, value in SETTINGS.items():  # configure changes them
        monkeypatch.setattr(bench, name, value)
    monkeypatch.setattr(sys, 'argv', ['bench.py', *words])
    bench.main()


def cells_of(table):
    lines = [line.split('|')[1:-1] for line in table.splitlines() if line.startswith('|')]
    assert len({len(line) for line in lines}) == 1
    return [[cell.strip() for cell in line] for line in lines]


# ---- suites ----

SUITES = """\
train fast,gpt,lstm,plain (1,2,4,64)
decode ring,gpt_ring (1,2,4,2)
sokoban fast,plain_recompute (1,1,4)"""


@pytest.mark.parametrize('case', SUITES.splitlines())
def test_a_suite(case, tmp_path):
    """What every suite promises: a header that lets it be repeated, yardsticks, turns, figures, the
    table also as a file; a loss and gradients, logits, games that are the plain pieces'."""
    suite, paths, cell = case.split()
    words = '--n_embd=128 --block_size=8 --rounds=2 --check '
    report, table, out = run(tmp_path, f'{words} --suite={suite} --paths={paths} --cells={cell}')
    kept = 'device torch python threads commit command date config dtype'
    rates = {name: np.median(seen) for name, seen in report['yardsticks'].items()}
    assert set(kept.split()) <= set(report) and rates['copy'] > 1e7
    labels = ['yardsticks', *(f'{suite} {cell[1:-1]} {path}' for path in paths.split(','))]
    turns = [line.split(': ')[0] for line in out.splitlines() if line.startswith(tuple(labels))]
    assert turns[: 3 * len(labels)] == 3 * labels and '1 of 1 done' in out
    lines = cells_of(table)
    assert len(lines) == 2 + len(report['results']) and '1.00x' in lines[2]
    assert [r['path'] for r in report['results']] == paths.split(',')
    for r in report['results']:
        assert r['status'] == 'ok' and r['first_run_s'] > 0
        assert float(r['check'].rstrip('%')) < 2
        (name, *_), (times,) = bench.METRICS[suite], r['seconds'].values()
        times = np.array(times)
        values = 1000 * times if suite == 'decode' else {'train': 16, 'sokoban': 6}[suite] / times
        assert len(times) == 2 and r[name] == pytest.approx(list(values))
        value = np.median(values)
        if suite == 'sokoban':
            macs = (3 if r['path'] == 'fast' else 4) * r['macs_per_step']['executed']
            assert r['share_of_conv'] == pytest.approx(macs * value / rates['conv'])
        elif suite == 'train' and r['path'] != 'lstm':
            wide = [2, 1] if r['path'] == 'gpt' else [1, 2]
            assert [r[k] for k in 'LECBTDV'] == [*wide, 4, 2, 8, 128, 256]
            least = bench.floor(r, rates['matmul'], rates['copy'])
            assert r['share_of_roofline'] == pytest.approx(least * value / 2)


# ---- suite first ----


def test_first_goes_on_where_it_stopped(tmp_path):
    """Ctrl-C keeps what was told to be done, and leaves no process, which would keep the pipe open;
    the same line goes on, what is done is not done again; a step that fails is told and passed by
    (exit status 1); a report of other code is refused."""
    large, file = 'train 400,100,4,64', tmp_path / 'a' / 'b.json'
    cells = "('train',1,2,4,64),('decode',1,2,4,2),('train',400,100,4,64),('sokoban',1,1,4)"
    words = f'--suite=first --n_embd=128 --paths=fast,gpt_ring,ring --cells={cells}'
    command = [sys.executable, 'bench.py', *SMALL, *words.split(), f'--out={file}']
    pipes = {'stdout': subprocess.PIPE, 'stderr': subprocess.PIPE, 'text': True}
    with forks.Popen(command, cwd=ROOT, **pipes) as process:
        next(line for line in process.stdout if line.startswith('train 1,2,4,64: ok; '))
        process.send_signal(signal.SIGINT)
        _, error = process.communicate()
    assert process.returncode == 130 and 'interrupted' in error, error
    before = json.loads(file.read_text())['results']
    assert [r['suite'] for r in before][:1] == ['train'] and before[0]['check'] == '0.00%'
    report, table, out = run(tmp_path, words, status=1)
    assert report['results'][: len(before)] == before and len(report['steps']) == 5
    bad = {name: step['status'] for name, step in report['steps'].items() if step['status'] != 'ok'}
    assert list(bad) == [large] and 'GB free' in bad[large] and f'- {large}: {bad[large]}' in table
    suites = [r['suite'] for r in report['results']]
    assert suites == ['train', 'decode', 'decode', 'train', 'sokoban']
    file.write_text(json.dumps({**report, 'commit': 'other'}))
    done = forks.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count('\n') == 1
    assert "commit 'other'" in done.stderr and 'another --out' in done.stderr


def test_steps_of_a_gpu():
    """The order that was asked for, each cell once, the rest of the tests last."""
    steps = list(bench.plan({**GPU, 'suite': 'first'}))
    assert steps[:3] == ['yardsticks', 'smoke', 'train 2,8,64,131072'] and steps[-1] == 'tests'
    assert steps[8] == 'decode 2,8,128,16' and steps[11] == 'decode 1,16,2048,16'
    assert steps[12:14] == ['sokoban 1,1,128', 'sokoban 4,1,64']
    assert len([name for name in steps if name.startswith('train')]) == 60


# ---- variants that fail ----

MAKE = """
import json, os, signal, sys, time, torch, bench
bench.GPU_TESTS = os.environ['TESTS']
part = {'update': lambda: None}
def fine(): return part, {'work': 1}
def large(): return {'update': lambda: torch.empty(2**60)}, {}
def killed(): os.kill(os.getpid(), signal.SIGKILL)
def broken(): raise RuntimeError('no compiler\\nmany more lines')
def slow(): time.sleep(600)
def wrong():
    ones = torch.ones(2, 2)
    check = {'w': (1.5 * ones, ones), 'b': (ones[0], ones[0])}
    return part, {'work': 1, 'check': lambda: check}
def lost(): return part, {'work': 1, 'check': lambda: torch.empty(2**60)}
bench.MAKERS['train'] = lambda row, config: globals()[row['what']]()
config = {'device': sys.argv[1], 'threads': 1, 'rounds': 1, 'seconds': 0, 'check': True}
late, records = time.perf_counter() + 5, {}
torch.cuda.set_device = torch.cuda.synchronize = torch.cuda.max_memory_allocated = lambda *_: 0
for names in sys.argv[2:]:
    rows = {name: {'suite': 'train', 'what': name} for name in names.split(',')}
    if names.startswith('test_'):
        rows = {names: {'suite': 'tests', 'tests': names}}
    until = late if names.endswith('slow') else float('inf')
    records |= bench.measure(rows, config, until)
print(json.dumps(records))
"""
GPU_TESTS = """
import time, pytest
pytestmark = pytest.mark.gpu
def test_right(): pass
def test_wrong(): assert 0
def test_slow(): time.sleep(600)
"""


def measured(device, names, tests=''):
    command = [sys.executable, '-c', MAKE, device, *names.split()]
    env = {**os.environ, 'TESTS': str(tests)}
    done = forks.run(command, cwd=ROOT, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stdout


def test_variants_that_fail(tmp_path):
    """Each costs itself alone; the reason is told; a gradient that differs does not count."""
    (tmp_path / 'test_it.py').write_text(GPU_TESTS)
    names = 'large,killed,broken slow wrong,lost,fine test_right test_wrong test_slow'
    found, _ = measured('cpu', names, tmp_path / 'test_it.py')
    status = [record['status'] for record in found.values()]
    assert status[:4] == ['OOM', 'OOM', 'failed: RuntimeError: no compiler', 'failed: late']
    assert status[4:8] == ['differs by 50.0% in w', 'ok', 'ok', 'ok']
    assert '1 tests: test_wrong' in status[8] and status[9] == 'failed: late'
    assert found['lost']['check'] == 'OOM' and found['wrong']['check'] == '50.00%'
    some = list(found.items())[:7]
    rows = [bench.derive(record, {**ROW, 'cell': name}, {}) for name, record in some]
    lines = cells_of(bench.beside(rows))
    assert 'OOM' in lines[2] and 'differs by 50.0% in w' in lines[6] and '1.00x' in lines[8]


def test_one_after_another_on_a_gpu():
    """(They use the CPU.)"""
    found, out = measured('cuda:0', 'fine,killed,lost')
    assert [found[name]['status'] for name in found] == ['ok', 'OOM', 'ok']
    assert [line.partition(':')[0] for line in out.splitlines()[:3]] == ['fine', 'fine', 'killed']


# ---- figures that are known ----

FLOORS = """\
train 1: 913 913 772 477 145 75
train 8: 514 427 319 173 46 23
decode 1: 0.096 0.112
decode 16: 0.112 0.363"""


def test_floor_is_that_of_the_plan():
    """Against the hard floors calculated for an H100 of 800 TFLOP/s and 3 TB/s (1000 tokens/s; ms a
    token), d = 768, E = 16/L."""
    for line in FLOORS.splitlines():
        name, _, figures = line.partition(': ')
        suite, L = name.split()[0], int(name.split()[1])
        for C, want in zip(bench.CONTEXTS[suite], map(float, figures.split()), strict=True):
            B = 16 if suite == 'decode' else 32768 // C
            row = ROW | {'suite': suite, 'L': L, 'E': 16 // L, 'C': C, 'B': B, 'T': C}
            least = 1000 * bench.floor(row | {'D': 768, 'V': 50304}, 800e12, 3e12)
            near = 0.07 if suite == 'decode' else 0.25 if (L, C) == (8, 32) else 0.13
            got = least if suite == 'decode' else B / least
            assert got == pytest.approx(want, rel=near), (suite, L, C)


def test_paper_cells():
    """On a GPU: every cell of both tables, the streams of one of 4 GPUs, the paper's figures; none
    at other sizes."""

    def rows(suite, **changes):
        groups = bench.plan({**GPU, 'suite': suite, **changes})
        return [row for group in groups.values() for row in group.values() if 'L' in row]

    trained = rows('train')
    for r in trained:
        assert r['path'] == ('compiled' if r['E'] > 1 else 'gpt_compiled')
        assert r['B'] * r['C'] * 4 == r['tokens_per_update'] and r['T'] == r['C']
    papers = {(r['tokens_per_update'], r['L'], r['C']): bench.published(r) for r in trained}
    assert len(papers) == len(trained) == 60 and all('paper' in p for p in papers.values())
    assert papers[131072, 1, 128] == {'paper': 87375, 'target': 430000}
    assert papers[262144, 16, 2048] == {'paper': 267875}
    assert papers[131072, 8, 128]['paper'] == 'OOM'
    assert len(rows('train', cells=((2, 8), (4, 4, 64), (1, 16, 32, 262144)))) == 12 + 2 + 1
    assert bench.published({**trained[0], 'D': 384}) == {}
    decoded = {(r['path'], r['L'], r['C']): r for r in rows('decode')}
    row = decoded['ring', 8, 128]
    assert len(decoded) == 2 * 2 * 6 and bench.published(row) == {'paper': 0.815, 'target': 0.199}
    done = bench.derive({'status': 'ok', 'seconds': {'token': [0.0005]}}, row, {})
    assert done['over_paper'] == pytest.approx(0.815 / 0.5)


# ---- reports of several runs ----


def test_append(tmp_path, monkeypatch, capsys):
    """The command that is told measures the rest, and only that; rows stay; the same twin beside
    each cell has a row each."""
    file, done = tmp_path / 'r.json', {'status': 'ok', 'seconds': {'update': [2.0]}, 'work': 4}
    yardsticks = {**done, 'seconds': {'matmul': [1], 'copy': [1]}, 'work': {'matmul': 1, 'copy': 1}}

    def fine(group, *_):
        return {label: yardsticks if label == 'yardsticks' else done for label in group}

    def rows(**changes):
        assert bench.run_suite({**config, **changes}) == 0
        return json.loads(file.read_text())['results'], capsys.readouterr().out

    monkeypatch.setattr(bench, 'measure', fine)
    monkeypatch.setattr(sys, 'argv', ['bench.py', '--n_embd=128'])
    config = {**SETTINGS, 'device': 'cpu', 'dtype': 'float32', 'out': str(file)}
    config |= {'n_embd': 128, 'paths': 'fast,gpt', 'cells': ((2, 2, 8, 64), (4, 1, 8, 64))}
    found, out = rows(budget=1e-9)
    assert len(found) == 2 and 'cells left: 1' in out
    assert out.splitlines()[-1] == 'python bench.py --n_embd=128 --append=True'
    found, out = rows(append=True)
    names = [f'{r["cell"][:4]} {r["path"]} {r["L"]} {r["E"]}' for r in found]
    assert names == ['(2,2 fast 2 2', '(2,2 gpt 4 1', '(4,1 fast 4 1', '(4,1 gpt 4 1']
    assert 'left' not in out
    found, _ = rows(append=True, n_embd=256)
    assert len(found) == 8 and {r['D'] for r in found} == {128, 256}
    assert len(rows()[0]) == 4


REFUSED = """\
--suite=speed: expected one of train
--cells=(1,),: expected (L, E, C, B)
--cells=((1,2,3,0),): expected (L, E, C, B)
--paths=ring: expected some of
--n_embd=100: set n_head
--dtype=float16: dtype
--device=tpu: device
--cells=(1,1,4,100): not a whole number
--suite=sokoban --cells=(1,1): sokoban: (L, E, d)
--suite=first --cells=(2,8): a suite's name
--suite=first --paths=slow: expected some of"""


@pytest.mark.parametrize('case', REFUSED.splitlines())
def test_refuses(case, monkeypatch, capsys):
    words, _, message = case.partition(': ')
    with pytest.raises(SystemExit) as stop:
        call(monkeypatch, *words.split())
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count('\n') == 1 and message in error

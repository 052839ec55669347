"""bench.py: reports hold what they promise, a failing variant does not end the others, suite first
goes on where it stopped."""

import csv
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


def refuse(capsys, run, *words, **changes):
    """The one line of a user's mistake."""
    with pytest.raises(SystemExit) as stop:
        run(*words, **changes)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count('\n') == 1
    return error


def median(report, name):
    return report['yardsticks'][name]['median']


def cells_of(table):
    lines = [line.split('|')[1:-1] for line in table.splitlines() if line.startswith('|')]
    assert len({len(line) for line in lines}) == 1
    return [[cell.strip() for cell in line] for line in lines]


# ---- suites ----


def test_a_suite(tmp_path):
    """What every suite promises: a header that lets it be repeated, yardsticks, turns, figures, the
    table also as a file; a loss and gradients that are the plain pieces'."""
    words = (
        '--n_embd=128 --cells=(1,2,4,64) --block_size=8 --rounds=2 --paths=fast,gpt_bf16 --check'
    )
    report, table, out = run(tmp_path, words)
    kept = 'device torch python threads commit command date config dtype'
    assert set(kept.split()) <= set(report) and median(report, 'copy') > 1e7
    turns = [line.split(': ')[0] for line in out.splitlines() if line.startswith('round ')]
    labels = 'yardsticks', '(1,2,4,64) fast', '(1,2,4,64) gpt_bf16'
    assert turns == [f'round {n}/2  {label}' for n in range(3) for label in labels]
    assert '1 of 1 done' in out
    lines = cells_of(table)
    assert len(lines) == 4 and '1.00x' in lines[2] and 'of roofline' in lines[0]
    fast, gpt = report['results']
    assert [fast[k] for k in 'LECBTDV'] == [1, 2, 4, 2, 8, 128, 256]
    assert [gpt[k] for k in 'LECBTDV'] == [2, 1, 4, 2, 8, 128, 256]
    assert (fast['dtype'], gpt['dtype']) == ('float32', 'bfloat16')
    for r in (fast, gpt):
        assert r['status'] == 'ok' and 0 < r['memory_bytes'] < 2**30 and r['first_run_s'] > 0
        assert r['params'] > 1e5 and float(r['check'].rstrip('%')) < 2 and r['check'] in table
        rates = 16 / np.array(r['seconds']['update'])
        assert len(rates) == 2 and r['tokens_per_s']['median'] == pytest.approx(np.median(rates))
        least = bench.floor(r, median(report, f'matmul {r["dtype"]}'), median(report, 'copy'))
        assert r['share_of_roofline'] == pytest.approx(least * np.median(rates) / 2)


SUITES = """\
train lstm,plain (1,2,4,64) update tokens_per_s
decode fast,ring (1,2,4,2) token ms_per_token
sokoban fast,plain_recompute (1,1,4) update env_steps_per_s"""


@pytest.mark.parametrize('case', SUITES.splitlines())
def test_figures(case, tmp_path):
    """Of other paths and suites, and what the plain pieces say to them."""
    suite, paths, cell, part, name = case.split()
    words = f'--n_embd=128 --suite={suite} --paths={paths} --cells={cell} --check'
    report, _, _ = run(tmp_path, words)
    assert [r['path'] for r in report['results']] == paths.split(',')
    for r in report['results']:
        times = np.array(r['seconds'][part])
        value = np.median({'train': 16, 'decode': 1000, 'sokoban': 6}[suite] / times)
        value = 1e6 / value if suite == 'decode' else value
        assert bench.metric(r) == name and r[name]['median'] == pytest.approx(value)
        assert ('share_of_roofline' in r) == (suite != 'sokoban' and r['path'] != 'lstm')
        if suite == 'sokoban':
            macs = (3 if r['path'] == 'fast' else 4) * r['macs_per_step']['executed']
            assert r['share_of_conv'] == pytest.approx(macs * value / median(report, 'conv'))
        assert r['path'] == 'fast' != suite or float(r.get('check', '0%').rstrip('%')) < 2


# ---- suite first ----


def test_first_goes_on_where_it_stopped(tmp_path):
    """Steps in processes of their own; the budget stops it, the same line goes on, what is done is
    not done again; one that fails is told and passed by (exit status 1); a report of other code is
    refused."""
    large = 'train 400 100 4 64'
    cells = "('train',1,2,4,64),('decode',1,2,4,2),('train',400,100,4,64),('sokoban',1,1,4)"
    words = f'--suite=first --n_embd=128 --paths=fast,ring --cells={cells}'
    report, _, out = run(tmp_path, words, '--budget=1')
    assert list(report['steps']) == ['yardsticks', 'train 1 2 4 64'] and 'cells left: 3' in out
    command = shlex.split(out.splitlines()[-1])
    assert command[2:] == [*SMALL, *words.split(), '--budget=1', f'--out={tmp_path}/a/b.json']
    (before,) = report['results']
    assert before['check'] == '0.00%' and before['suite'] == 'train'
    report, table, out = run(tmp_path, words, status=1)
    assert 'left' not in out and report['results'][0] == before and len(report['steps']) == 5
    bad = {name: step['status'] for name, step in report['steps'].items() if step['status'] != 'ok'}
    assert list(bad) == [large] and 'GB free' in bad[large] and f'- {large}: {bad[large]}' in table
    suites = [r['suite'] for r in report['results']]
    assert suites == ['train', 'decode', 'decode', 'train', 'sokoban']
    file = tmp_path / 'a' / 'b.json'
    file.write_text(json.dumps({**report, 'commit': 'other'}))
    done = forks.run([sys.executable, *command[1:]], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count('\n') == 1
    assert "commit 'other'" in done.stderr and 'another --out' in done.stderr


def test_first_interrupted(tmp_path):
    """Ctrl-C keeps what was told to be done, and leaves no process: one would keep the pipe open.
    Nothing is late here, however slow the machine, and the last steps would take minutes."""
    script = 'import math, bench; bench.LIMIT, bench.LIMITS = math.inf, {}; '
    script += 'bench.run_script(bench.main, "interrupted")'
    cells = "('decode',1,2,4,2),('train',16,8,64,4096),('train',16,8,64,8192)"
    words = [*SMALL, '--suite=first', '--n_embd=128', f'--cells={cells}', '--paths=ring,plain']
    pipes = {'stdout': subprocess.PIPE, 'stderr': subprocess.PIPE, 'text': True}
    command, told = [sys.executable, '-c', script, *words, f'--out={tmp_path}/a.json'], []
    with forks.Popen(command, cwd=ROOT, **pipes) as process:
        for line in process.stdout:
            told += [line.partition(':')[0]] if ': ok; ' in line else []
            if 'decode 1 2 4 2' in told:
                break
        process.send_signal(signal.SIGINT)
        out, error = process.communicate()
    assert process.returncode == 130 and 'interrupted' in error, error
    told += [line.partition(':')[0] for line in out.splitlines() if ': ok; ' in line]
    report = json.loads((tmp_path / 'a.json').read_text())
    assert list(report['steps']) == told and len(told) < 4
    assert [r['path'] for r in report['results']][:2] == ['ring', 'plain']


def test_steps_of_a_gpu():
    """The order that was asked for, each cell once, the rest of the tests last."""
    steps = list(bench.plan_first({**GPU, 'suite': 'first'}))
    assert steps[:2] == ['smoke', 'train 2 8 64'] and steps[-1] == 'tests'
    assert steps[7:13] == [*(f'decode {cell}' for cell in ('2 8 128', '2 8 2048', '1 16 128')),
        'decode 1 16 2048', 'sokoban 1 1 128', 'sokoban 4 1 64']  # fmt: skip
    assert len([name for name in steps if name.startswith('train')]) == 60


# ---- variants that fail ----

MAKE = """
import json, os, signal, sys, time, torch, bench
bench.GPU_TESTS = os.environ['TESTS']
part = {'update': lambda: None}
def fine(): return part, {'tokens': 1, 'pid': os.getpid()}
def large(): return {'update': lambda: torch.empty(2**60)}, {}
def killed(): os.kill(os.getpid(), signal.SIGKILL)
def broken(): raise RuntimeError('no compiler\\nmany more lines')
def slow(): time.sleep(600)
def wrong():
    ones = torch.ones(2, 2)
    check = {'w': (1.5 * ones, ones), 'b': (ones[0], ones[0])}
    return part, {'tokens': 1, 'pid': os.getpid(), 'check': lambda: check}
def lost(): return part, {'tokens': 1, 'check': lambda: torch.empty(2**60)}
bench.MAKERS['train'] = lambda row, config: globals()[row['what']]()
config = {'device': sys.argv[1], 'threads': 1, 'rounds': 1, 'seconds': 0, 'check': True}
begin, pool, late, records = bench.begin, {}, time.perf_counter() + 5, {}
bench.begin = lambda config: begin({**config, 'device': 'cpu'})
for name in sys.argv[2:]:
    row = {'suite': 'train', 'what': name}
    if name.startswith('test_'):
        row = {'suite': 'tests', 'tests': name}
    until = late if name.endswith('slow') else float('inf')
    records |= bench.measure({name: row}, config, pool, until)
    if config['device'] == 'cpu': bench.end(pool)
bench.end(pool)
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
    return json.loads(done.stdout.splitlines()[-1])


def test_variants_that_fail(tmp_path):
    """Each costs itself alone; the reason is told; a gradient that differs does not count."""
    (tmp_path / 'test_it.py').write_text(GPU_TESTS)
    names = 'large killed broken slow wrong lost fine test_right test_wrong test_slow'
    found = measured('cpu', names, tmp_path / 'test_it.py')
    status = [record['status'] for record in found.values()]
    assert status[:4] == ['OOM', 'OOM', 'failed: RuntimeError: no compiler', 'failed: late']
    assert status[4:8] == ['differs by 50.0% in w', 'ok', 'ok', 'ok']
    assert '1 tests: test_wrong' in status[8] and status[9] == 'failed: late'
    assert found['lost']['check'] == 'OOM' and found['wrong']['check'] == '50.00%'
    rows = [bench.derive(record, {**ROW, 'cell': name}, {}) for name, record in found.items()]
    lines = cells_of(bench.table(rows[:7]))
    assert 'OOM' in lines[2] and 'differs by 50.0% in w' in lines[6] and '1.00x' in lines[8]


def test_one_process_on_a_gpu():
    """Variants one after another in one process, also from call to call; after one that fails, in
    another. (They use the CPU.)"""
    found = measured('cuda:0', 'fine wrong killed lost')
    assert [found[name]['status'][:7] for name in found] == ['ok', 'differs', 'OOM', 'ok']
    assert found['fine']['pid'] == found['wrong']['pid']


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
        groups = bench.plan({**GPU, 'suite': suite, **changes}, suite)
        return [row for group in groups.values() for row in group.values()]

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


def test_figures_of_the_paper():
    folder = ROOT.parent / 'shared' / 'paper'
    if not folder.exists():
        pytest.skip(f"{folder} does not exist: the figures are not compared with the paper's files")
    for suite, name in (('train', 'training_ktokens_per_s'), ('decode', 'latency_ms_per_token')):
        with open(folder / f'{name}_4xH100.csv') as file:
            head, *lines = csv.reader(file)
        k = head.index('E') + 1  # what stands before is the row's name
        for line in lines:
            who = ' '.join(['paper', suite, *(['16'] if suite == 'decode' else []), *line[:k]])
            both = bench.FIGURES[who].split(), line[k:]
            ours, theirs = ([w if w == 'OOM' else float(w) for w in words] for words in both)
            assert ours == theirs
        assert len(lines) == len([who for who in bench.FIGURES if who.startswith(f'paper {suite}')])


# ---- reports of several runs ----

HEADER = {'device': 'X', 'dtype': 'float32', 'commit': 'abc', 'torch': '2', 'threads': 2}


def report_file(path, suite, rows, **changes):
    report = {'suite': suite, **HEADER, 'command': 'old', 'results': rows, **changes}
    path.write_text(json.dumps(report))
    return str(path)


def test_compare(tmp_path, monkeypatch, capsys):
    """Also reports that are older than a row's suite."""

    def report(name, suite, **rows):
        figures = {L: dict.fromkeys(('median', 'min', 'max'), value) for L, value in rows.items()}
        metric = 'ms_per_token' if suite == 'decode' else 'tokens_per_s'
        found = [{'L': L, 'path': 'fast', 'status': 'ok', metric: x} for L, x in figures.items()]
        return report_file(tmp_path / name, suite, found)

    a, b = report('a', 'train', A=100, B=50), report('b', 'train', B=75, A=250, C=1)
    c, d, e = (report(f'c{x}', 'decode', **{x: 4 - i}) for i, x in enumerate('AAB'))
    call(monkeypatch, '--compare', a, b)
    assert [line[-1] for line in cells_of(capsys.readouterr().out)[2:]] == ['1.50x', '2.50x']
    (tmp_path / 'f').write_text('[]')
    wrong = {f'{a},{c}': 'of suite', f'{a},nowhere.json': 'cannot be read', a: 'two files'}
    wrong |= {f'{d},{e}': 'no row in common', f'{a},{tmp_path}/f': 'no report'}
    for pair, message in wrong.items():
        assert message in refuse(capsys, call, monkeypatch, f'--compare={pair}')


@pytest.mark.parametrize('device', ['cpu', 'cuda:0'])
def test_budget_and_append(device, tmp_path, monkeypatch, capsys):
    """What began is finished and written; the command that is told measures the rest, and only
    that; rows stay; a report of another commit is refused. On a GPU the yardsticks are apart. The
    same twin beside each cell has a row each."""
    groups, file = [], tmp_path / 'r.json'

    def fine(group, *_):
        groups.append(' '.join(label.split()[-1] for label in group))
        done = {'status': 'ok', 'seconds': {'update': [2.0]}, 'tokens': 4}
        return {label: done for label in group if label != 'yardsticks'}

    def rows(**changes):
        assert bench.run_suite({**config, **changes}) == 0
        return json.loads(file.read_text())['results'], capsys.readouterr().out

    monkeypatch.setattr(bench, 'measure', fine)
    monkeypatch.setattr(bench, 'header', lambda config: {**HEADER, 'command': 'new'})
    monkeypatch.setattr(sys, 'argv', ['bench.py', '--n_embd=128'])
    config = {**SETTINGS, 'device': device, 'dtype': 'float32', 'out': str(file)}
    config |= {'n_embd': 128, 'paths': 'fast,gpt', 'cells': ((2, 2, 8, 64), (4, 1, 8, 64))}
    found, out = rows(budget=1e-9)
    assert len(found) == 2 and 'cells left: 1' in out
    assert out.splitlines()[-1] == 'python bench.py --n_embd=128 --append=True'
    found, out = rows(append=True)
    names = [f'{r["cell"][:4]} {r["path"]} {r["L"]} {r["E"]}' for r in found]
    assert names == ['(2,2 fast 2 2', '(2,2 gpt 4 1', '(4,1 fast 4 1', '(4,1 gpt 4 1']
    assert 'left' not in out
    apart = ['yardsticks', 'fast gpt', 'fast gpt']
    assert groups == (['yardsticks fast gpt'] * 2 if device == 'cpu' else apart)
    found, _ = rows(append=True, n_embd=256)
    assert len(found) == 8 and {r['D'] for r in found} == {128, 256}
    report_file(file, 'train', found, commit='other')
    assert "commit 'other'" in refuse(capsys, rows, append=True)
    assert len(rows()[0]) == 4


REFUSED = """\
--suite=speed: expected one of train
--cells=(1,),: is not (L, E, C, B)
--cells=((1,2,3,0),): is not (L, E, C, B)
--paths=fast,slow: expected some of
--paths=ring: expected some of
--n_embd=100: set n_head
--dtype=float16: dtype
--device=tpu: device
--cells=(1,1,4,100): not a whole number
--compare: two files
--out=table.md --append=True: name the JSON
--suite=sokoban --cells=(1,1): is not (L, E, d)
--suite=first --cells=(2,8): is no suite
--suite=first --paths=slow: expected some of"""


@pytest.mark.parametrize('case', REFUSED.splitlines())
def test_refuses(case, monkeypatch, capsys):
    words, _, message = case.partition(': ')
    assert message in refuse(capsys, call, monkeypatch, *words.split())

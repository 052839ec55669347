"""bench.py: reports hold what they promise, a failing variant does not end the others, suite first
goes on where it stopped."""

import csv
import json
import math
import pathlib
import shlex
import signal
import subprocess
import sys
import time

import forks
import numpy as np
import pytest

import bench
from configurator import configure, read_script
from model import build_model

ROOT = pathlib.Path(__file__).parents[1]
SMALL = shlex.split('--rounds=1 --seconds=0.01 --threads=1 --device=cpu --n_envs=2 --unroll=3')
SIZES = '--n_embd=128 --block_size=4'
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


def refused(monkeypatch, capsys, *words):
    """The one line of a user's mistake."""
    with pytest.raises(SystemExit) as stop:
        call(monkeypatch, *words)
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
    table also as a file."""
    words = f'{SIZES} --cells=(1,2,4,2) --rounds=2 --paths=fast,gpt_bf16'
    report, table, out = run(tmp_path, words)
    kept = 'device torch python threads commit command date config dtype memory'
    assert set(kept.split()) <= set(report) and median(report, 'copy') > 1e7
    turns = [line.split(': ')[0] for line in out.splitlines() if line.startswith('round ')]
    labels = 'yardsticks', '(1,2,4,2) fast', '(1,2,4,2) gpt_bf16'
    assert turns[-9:] == [f'round {n}/2  {label}' for n in range(3) for label in labels]
    assert '1 of 1 done' in out
    lines = cells_of(table)
    assert len(lines) == 4 and '1.00x' in lines[2] and 'head alone, ms' in lines[0]
    fast, gpt = report['results']
    assert [fast[k] for k in 'LECBTDV'] == [1, 2, 4, 2, 4, 128, 256]
    assert [gpt[k] for k in 'LECBTDV'] == [2, 1, 4, 1, 8, 128, 256]  # 8 tokens a chunk, both
    assert (fast['dtype'], gpt['dtype']) == ('float32', 'bfloat16')
    for r in (fast, gpt):
        assert r['status'] == 'ok' and 0 < r['memory_bytes'] < 2**30 and r['first_run_s'] > 0
        rates = 8 / np.array(r['seconds']['chunk'])
        assert len(rates) == 2 and r['tokens_per_s']['median'] == pytest.approx(np.median(rates))
        flops = build_model(bench.model_config(r), r is fast).flops_per_token()
        share = 3 * sum(flops.values()) * np.median(rates) / median(report, f'matmul {r["dtype"]}')
        assert r['share_of_matmul'] == pytest.approx(share)
    chunk, head = (np.array(fast['seconds'][part]) for part in ('chunk', 'head'))
    assert fast['step_ms']['median'] == pytest.approx(1000 * np.median((chunk - head) / 4))
    flops = build_model(bench.model_config(fast), True).flops_per_token()['core']
    want = 3000 * flops * 2 / median(report, 'matmul float32')
    assert fast['step_ms_at_matmul_rate'] == pytest.approx(want) and 'step_ms' not in gpt


SUITES = """\
train fast,gpt (1,2,4,64) update 16 tokens_per_s
decode fast,ring (1,2,4,2) token 2 ms_per_token
sokoban fast,plain_recompute (1,1,4) update 6 env_steps_per_s
baselines lstm,fast (1,2,4,2) chunk 8 tokens_per_s"""


@pytest.mark.parametrize('case', SUITES.splitlines())
def test_figures(case, tmp_path):
    """Of the other suites, and what the plain pieces say to them."""
    suite, paths, cell, part, amount, name = case.split()
    words = f'{SIZES} --suite={suite} --paths={paths} --cells={cell} --check'
    report, table, _ = run(tmp_path, words)
    assert [r['path'] for r in report['results']] == paths.split(',')
    for r in report['results']:
        times = np.array(r['seconds'][part])
        values = 1000 * times if suite == 'decode' else int(amount) / times
        value = np.median(values)
        assert bench.metric(r) == name and r[name]['median'] == pytest.approx(value)
        if suite in ('train', 'decode'):
            assert 'paper' not in r and (r['B'], r['T']) == (int(amount) // 4 or 2, 4)
            steps = value / 4 if suite == 'train' else 1000 / value  # a second
            least = bench.floor(r, median(report, 'matmul float32'), median(report, 'copy'))
            assert r['share_of_roofline'] == pytest.approx(least * steps)
        if suite == 'sokoban':
            macs = (3 if r['path'] == 'fast' else 4) * r['macs_per_step']['executed']
            assert r['share_of_conv'] == pytest.approx(macs * value / median(report, 'conv'))
        if suite == 'baselines':
            both = 8 / (times + np.array(r['seconds']['optimizer']))
            assert r['tokens_per_s_with_optimizer']['median'] == pytest.approx(np.median(both))
        if suite in ('train', 'sokoban') or r['path'] == 'ring':
            assert float(r['check'].rstrip('%')) < 2 and r['check'] in table


def test_suite_kernels(tmp_path):
    """Every twin runs eagerly, Triton's say that they need a GPU; Muon's iteration batched against
    one by one."""
    words = f'{SIZES} --cells=(1,2,4,2) --suite=kernels --paths=eager,triton'
    report, _, _ = run(tmp_path, words)
    rows = {(r['kernel'], r['path']): r for r in report['results']}
    pieces = ['attention', 'experts', 'loss']
    ways = {('orthogonalize', how) for how in ('one by one', 'batched')}
    assert set(rows) == {(name, path) for name in pieces for path in ('eager', 'triton')} | ways
    for (_, path), r in rows.items():
        assert r['status'] == ('n/a (needs CUDA)' if path == 'triton' else 'ok')
        assert path == 'triton' or r['share_of_roofline'] > 0 and r['us']['median'] > 0


def test_why_a_triton_kernel_is_not_timed(monkeypatch):
    cases = [({'error': 'TritonError: x'}, 'TritonError: x'), ({'difference': 0.01}, '')]
    cases += [({'difference': 0.5}, 'wrong by 50.0%'), ({'difference': math.nan}, 'wrong by nan%')]
    for found, message in cases:
        monkeypatch.setattr(bench.kernels, 'compare', lambda run, found=found: found)
        assert bench.why_not(None, True) == message
    assert bench.why_not(None, False) == 'n/a (needs CUDA)'


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
    groups = bench.plan_first({**GPU, 'suite': 'first'})
    steps = list(groups)
    assert steps[:2] == ['smoke', 'train 2 8 64'] and steps[-1].startswith('tests test_')
    assert steps[7:13] == [*(f'decode {cell}' for cell in ('2 8 128', '2 8 2048', '1 16 128')),
        'decode 1 16 2048', 'sokoban 1 1 128', 'sokoban 4 1 64']  # fmt: skip
    assert len([name for name in steps if name.startswith('train')]) == 60 and all(groups.values())


GPU_TESTS = """
import time, pytest
pytestmark = pytest.mark.gpu
def test_right(): pass
def test_wrong(): assert 0
def test_slow(): time.sleep(600)
"""


def test_the_tests_of_a_gpu(tmp_path, monkeypatch, capsys):
    """What each run of pytest comes to, whatever is wrong; without pytest they are skipped."""
    monkeypatch.setattr(bench, 'GPU_TESTS', str(tmp_path / 'test_it.py'))
    (tmp_path / 'test_it.py').write_text(GPU_TESTS)
    never = time.perf_counter() + 6000
    assert bench.run_tests('right', never) == 'ok'
    assert 'test_right PASSED' in capsys.readouterr().out
    assert bench.run_tests('wrong', never) == 'failed: 0 passed, 1 failed, 0 skipped'
    assert bench.run_tests('slow', 0).startswith('failed: late: 0 passed')
    monkeypatch.setattr(bench.importlib.util, 'find_spec', lambda name: None)
    assert bench.run_tests('right', 0) == 'skipped: pytest is not installed'


# ---- variants that fail ----

MAKE = """
import json, os, signal, sys, time, torch, bench
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
    until = late if name == 'slow' else float('inf')
    records |= bench.measure({name: {'suite': 'train', 'what': name}}, config, pool, until)
    if config['device'] == 'cpu': bench.end(pool)
bench.end(pool)
print(json.dumps(records))
"""


def measured(device, names):
    command = [sys.executable, '-c', MAKE, device, *names.split()]
    done = forks.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_variants_that_fail():
    """Each costs itself alone; the reason is told; a gradient that differs does not count."""
    found = measured('cpu', 'large killed broken slow wrong lost fine')
    status = [record['status'] for record in found.values()]
    assert status[:4] == ['OOM', 'OOM', 'failed: RuntimeError: no compiler', 'failed: late']
    assert status[4:] == ['differs by 50.0% in w', 'ok', 'ok']
    assert found['lost']['check'] == 'OOM' and found['wrong']['check'] == '50.00%'
    rows = [bench.derive(record, {**ROW, 'cell': name}, {})[0] for name, record in found.items()]
    lines = cells_of(bench.table(rows))
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
train 2: 913 864 642 381 111 57
train 4: 778 644 480 272 76 39
train 8: 514 427 319 173 46 23
decode 1: 0.096 0.112
decode 2: 0.097 0.129
decode 4: 0.099 0.162
decode 8: 0.103 0.229
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
    assert papers[131072, 1, 128] == {'paper': 87375, 'target': 430000, 'modelled': 363000}
    assert papers[262144, 16, 2048] == {'paper': 267875}
    assert papers[131072, 8, 128]['paper'] == 'OOM'
    assert len(rows('train', cells=((2, 8), (4, 4, 64), (1, 16, 32, 262144)))) == 12 + 2 + 1
    assert bench.published({**trained[0], 'D': 384}) == {}
    assert bench.published({**trained[0], 'tokens_per_update': 65536}) == {}
    decoded = [r for r in rows('decode') if r['path'].endswith('ring')]
    rings = {(r['model'], r['L'], r['C']): r for r in decoded}
    row = rings['recurrent', 8, 128]
    assert len(rings) == 12 and bench.published(row) == {'paper': 0.815, 'target': 0.199}
    done = bench.derive({'status': 'ok', 'seconds': {'token': [0.0005]}}, row, {})[0]
    assert done['over_paper'] == pytest.approx(0.815 / 0.5)
    assert done['over_target'] == pytest.approx(0.199 / 0.5)
    folder = ROOT.parent / 'shared' / 'paper'
    if not folder.exists():
        pytest.skip(f"{folder} does not exist: the figures are not compared with the paper's files")
    for suite, name in (('train', 'training_ktokens_per_s'), ('decode', 'latency_ms_per_token')):
        with open(folder / f'{name}_4xH100.csv') as file:
            head, *lines = csv.reader(file)
        k = head.index('E') + 1  # what stands before is the row's name
        for line in lines:
            who = ' '.join(['paper', suite, *(['16'] if suite == 'decode' else []), *line[:k]])
            ours, theirs = bench.FIGURES[who].split(), line[k:]
            assert [w if w == 'OOM' else float(w) for w in ours] == [
                w if w == 'OOM' else float(w) for w in theirs
            ]
        assert len(lines) == len([who for who in bench.FIGURES if who.startswith(f'paper {suite}')])


# ---- reports of several runs ----

HEADER = {'device': 'X', 'dtype': 'float32', 'commit': 'abc', 'torch': '2', 'threads': 2}


def report_file(path, suite, rows, **changes):
    report = {'suite': suite, **HEADER, 'command': 'old', 'results': rows, **changes}
    path.write_text(json.dumps(report))
    return str(path)


def result(L, name, value, **changes):
    figures = {name: dict.fromkeys(('median', 'min', 'max'), value)}
    return {'path': 'fast', 'L': L, 'E': 1, 'C': 8, 'B': 2, 'status': 'ok', **figures, **changes}


def test_compare(tmp_path, monkeypatch, capsys):
    """Also reports that are older than a row's suite."""
    old = [result(L, 'tokens_per_s', value) for L, value in ((1, 100), (2, 50), (4, 7))]
    new = [result(2, 'tokens_per_s', 75), result(1, 'tokens_per_s', 250, suite='train')]
    new.append(result(4, 'x', 1, status='OOM'))
    a, b = (report_file(tmp_path / n, 'train', rows) for n, rows in (('a', old), ('b', new)))
    rows = {'c': result(1, 'ms_per_token', 3), 'd': result(1, 'ms_per_token', 2)}
    rows['e'] = result(8, 'ms_per_token', 1)
    c, d, e = (report_file(tmp_path / n, 'decode', [row]) for n, row in rows.items())
    call(monkeypatch, '--compare', a, b)
    lines = cells_of(capsys.readouterr().out)
    assert [line[-1] for line in lines[2:]] == ['1.50x', '2.50x', ''] and 'OOM' in lines[4]
    call(monkeypatch, f'--compare={c},{d}')
    assert cells_of(capsys.readouterr().out)[2][-1] == '1.50x'
    (tmp_path / 'f').write_text('[]')
    wrong = {f'{a},{c}': 'of suite', f'{a},nowhere.json': 'cannot be read', a: 'two files'}
    wrong |= {f'{c},{e}': 'no row in common', f'{a},{tmp_path}/f': 'no report'}
    for pair, message in wrong.items():
        assert message in refused(monkeypatch, capsys, f'--compare={pair}')


@pytest.mark.parametrize('device', ['cpu', 'cuda:0'])
def test_budget_and_append(device, tmp_path, monkeypatch, capsys):
    """What began is finished and written; the command that is told measures the rest, and only
    that; rows stay, and are replaced; a report of another commit is refused. On a GPU the
    yardsticks are apart. The same twin beside each cell has a row each."""
    groups, file = [], tmp_path / 'r.json'

    def fine(group, *_):
        groups.append(' '.join(label.split()[-1] for label in group))
        done = {'status': 'ok', 'seconds': {'chunk': [2.0]}, 'tokens': 4, 'flops_per_token': 1}
        return {label: done for label in group if label != 'yardsticks'}

    def rows(**changes):
        assert bench.run_suite({**config, **changes}) == 0
        return json.loads(file.read_text())['results'], capsys.readouterr().out

    monkeypatch.setattr(bench, 'measure', fine)
    monkeypatch.setattr(bench, 'header', lambda config: {**HEADER, 'command': 'new'})
    argv = ['bench.py', '--cells=(2,2),(4,1),(3,1,8)', '--n_embd=128', '--append=False']
    monkeypatch.setattr(sys, 'argv', argv)
    config = {**SETTINGS, 'device': device, 'dtype': 'float32', 'out': str(file)}
    config |= {'n_embd': 128, 'paths': 'fast,gpt'}
    found, out = rows(cells=((2, 2), (4, 1), (3, 1, 8)), budget=1e-9)
    assert len(found) == 2 and 'cells left: 2' in out
    command = shlex.split(out.splitlines()[-1])
    assert command[:4] == ['python', 'bench.py', '--n_embd=128', '--append=True']
    cells = configure(dict(vars(bench)), command[2:], quiet=True)['cells']
    assert cells == ((4, 1, 128, 16), (3, 1, 8, 16))
    found, out = rows(cells=cells, append=True)
    names = [f'{r["cell"][:4]} {r["path"]} {r["L"]} {r["E"]}' for r in found]
    assert names[:4] == ['(2,2 fast 2 2', '(2,2 gpt 4 1', '(4,1 fast 4 1', '(4,1 gpt 4 1']
    assert len(names) == 6 and 'left' not in out
    apart = ['yardsticks', 'fast gpt', 'yardsticks', 'fast gpt', 'fast gpt']
    assert groups == (['yardsticks fast gpt'] * 3 if device == 'cpu' else apart)
    found[0]['tokens_per_s']['median'] = 9
    report_file(file, 'cpu', found)
    found, _ = rows(cells=((2, 2),), append=True)
    assert len(found) == 6 and found[0]['tokens_per_s']['median'] == 2  # measured again
    report_file(file, 'cpu', found, commit='other')
    with pytest.raises(SystemExit):
        rows(append=True)
    error = capsys.readouterr().err
    assert error.count('\n') == 1 and "commit 'other'" in error
    assert len(rows(cells=((2, 2),))[0]) == 2


REFUSED = """\
--suite=speed: expected one of cpu, baselines, train
--cells=(1,),: is not (L, E, C, B)
--cells=((1,2,3,0),): is not (L, E, C, B)
--paths=fast,slow: expected some of
--paths=ring: expected some of
--suite=kernels --paths=fast: expected some of
--suite=kernels --paths=eager_bf16: expected some of
--n_embd=100: set n_head
--dtype=float16: dtype
--device=tpu: device
--suite=train --cells=(1,1,4,100): not a whole number
--compare: two files
--out=table.md --append=True: name the JSON
--suite=sokoban --cells=(1,1): is not (L, E, d)
--suite=first --cells=(2,8): is no suite
--suite=first --paths=slow: expected some of"""


@pytest.mark.parametrize('case', REFUSED.splitlines())
def test_refuses(case, monkeypatch, capsys):
    words, _, message = case.partition(': ')
    assert message in refused(monkeypatch, capsys, *words.split())

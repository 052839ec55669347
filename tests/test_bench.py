"""bench.py: what reports promise, going on where it stopped, variants that fail, known figures."""

import json
import os
import signal

import conftest
import numpy as np
import pytest
from test_train import launch, mistake

import bench
from configurator import read_script

SMALL = '--rounds=1 --seconds=0.01 --threads=1 --device=cpu --n_envs=2 --unroll=3'.split()
SETTINGS = read_script(bench.__file__)[0]
ROW = {'path': 'fast', 'model': 'recurrent', 'dtype': 'bfloat16', 'D': 768, 'V': 50304}


def run(tmp_path, words, status=0):
    """python bench.py -> the report, its table, the output."""
    process = launch('bench.py', [*SMALL, *words.split(), f'--out={tmp_path}/a/b.json'])
    out, error = process.communicate()
    assert process.returncode == status, out + error
    table = (tmp_path / 'a' / 'b.md').read_text()
    assert table.strip() in out
    return json.loads((tmp_path / 'a' / 'b.json').read_text()), table, out


def cells_of(table):
    lines = [line.split('|')[1:-1] for line in table.splitlines() if line.startswith('|')]
    assert len({len(line) for line in lines}) == 1
    return [[cell.strip() for cell in line] for line in lines]


# ---- suites ----

SUITES = [  # suite, paths, a cell
    ('train', 'fast,gpt,lstm,plain', '(1,2,4,64)'),
    ('decode', 'ring,gpt_ring', '(1,2,4,2)'),
    ('sokoban', 'fast,plain_recompute', '(1,1,4)'),
]


@pytest.mark.parametrize('suite, paths, cell', SUITES)
def test_a_suite(suite, paths, cell, tmp_path):
    """A header, yardsticks, turns, figures; gradients, logits, games of the plain pieces'."""
    words = '--n_embd=128 --block_size=8 --rounds=2 --check '
    report, table, out = run(tmp_path, f'{words} --suite={suite} --paths={paths} --cells={cell}')
    rates = {name: np.median(seen) for name, seen in report['yardsticks'].items()}
    assert {'device', 'torch', 'commit', 'command', 'config'} <= set(report) and rates['copy'] > 1e7
    labels = ['yardsticks', *(f'{suite} {cell[1:-1]} {path}' for path in paths.split(','))]
    turns = [line.split(': ')[0] for line in out.splitlines() if line.startswith(tuple(labels))]
    assert turns[: 3 * len(labels)] == 3 * labels and '1 of 1 done' in out
    lines = cells_of(table)
    assert len(lines) == 2 + len(report['results']) and '1.00x' in lines[2]
    assert [r['path'] for r in report['results']] == paths.split(',')
    for r in report['results']:
        assert r['status'] == 'ok' and float(r['check'].rstrip('%')) < 2
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


def test_first_goes_on_where_it_stopped(tmp_path, capfd):
    """Ctrl-C leaves no process, which would keep the pipe open; a budget ends it after a step; one
    that fails is told and passed by (exit status 1); a report of other code is refused."""
    large, file = 'train 400,100,4,64', tmp_path / 'a' / 'b.json'
    cells = "('train',1,2,4,64),('decode',1,2,4,2),('train',400,100,4,64),('sokoban',1,1,4)"
    words = f'--suite=first --n_embd=128 --paths=fast,gpt_ring,ring --cells={cells}'
    argv = [*SMALL, *words.split(), f'--out={file}']
    with launch('bench.py', argv) as process:
        next(line for line in process.stdout if line.startswith('yardsticks: ok; '))
        process.send_signal(signal.SIGINT)
        _, error = process.communicate()
    assert process.returncode == 130 and 'interrupted' in error, error
    assert 'budget = 1 s is used up, cells left: ' in run(tmp_path, f'{words} --budget=1')[2]
    before = json.loads(file.read_text())['results']
    assert before[0]['suite'] == 'train' and before[0]['check'] == '0.00%'
    report, table, out = run(tmp_path, words, status=1)
    assert report['results'][: len(before)] == before and len(report['steps']) == 5
    bad = {name: step['status'] for name, step in report['steps'].items() if step['status'] != 'ok'}
    assert list(bad) == [large] and 'GB free' in bad[large] and f'- {large}: {bad[large]}' in table
    file.write_text(json.dumps({**report, 'commit': 'other'}))
    assert "commit 'other'" in mistake(capfd, bench, argv)


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
config = {'device': 'cpu', 'threads': 1, 'rounds': 1, 'seconds': 0, 'check': True}
if __name__ == '__main__':  # not in the processes that bench.py starts
    late, records = time.perf_counter() + 5, {}
    for names in sys.argv[1:]:
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


def test_variants_that_fail(tmp_path):
    """Each costs itself alone; the reason is told; a gradient that differs does not count."""
    (tmp_path / 'test_it.py').write_text(GPU_TESTS)
    names = 'large,killed,broken slow wrong,lost,fine test_right test_wrong test_slow'
    (tmp_path / 'make.py').write_text(MAKE)
    paths = {'TESTS': f'{tmp_path}/test_it.py', 'PYTHONPATH': str(conftest.ROOT)}
    done = conftest.run([tmp_path / 'make.py', *names.split()], env=os.environ | paths)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    status = [record['status'] for record in found.values()]
    assert status[:4] == ['OOM', 'OOM', 'failed: RuntimeError: no compiler', 'failed: late']
    assert status[4:8] == ['differs by 50.0% in w', 'ok', 'ok', 'ok']
    assert '1 tests: test_wrong' in status[8] and status[9] == 'failed: late'
    assert found['lost']['check'] == 'OOM' and found['wrong']['check'] == '50.00%'


FLOORS = {  # suite and L: by C
    ('train', 1): (913, 913, 772, 477, 145, 75),
    ('train', 8): (514, 427, 319, 173, 46, 23),
    ('decode', 1): (0.096, 0.112),
    ('decode', 16): (0.112, 0.363),
}


def test_floor_is_that_of_the_plan():
    """Against the hard floors calculated for an H100 of 800 TFLOP/s and 3 TB/s (1000 tokens/s; ms a
    token), d = 768, E = 16/L."""
    for (suite, L), figures in FLOORS.items():
        for C, want in zip(bench.CONTEXTS[suite], figures, strict=True):
            B = 16 if suite == 'decode' else 32768 // C
            row = ROW | {'suite': suite, 'L': L, 'E': 16 // L, 'C': C, 'B': B, 'T': C}
            least = 1000 * bench.floor(row, 800e12, 3e12)
            near = 0.07 if suite == 'decode' else 0.25 if (L, C) == (8, 32) else 0.13
            got = least if suite == 'decode' else B / least
            assert got == pytest.approx(want, rel=near), (suite, L, C)


def test_paper_cells():
    """Every cell of both tables, the streams of one of 4 GPUs, the paper's figures."""

    def rows(suite, **changes):
        on_a_gpu = {'suite': suite, 'device': 'cuda:0', 'dtype': 'bfloat16'}
        groups = bench.plan({**SETTINGS, **on_a_gpu, **changes})
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
    decoded = {(r['path'], r['L'], r['C']): r for r in rows('decode')}
    row = decoded['ring', 8, 128]
    assert len(decoded) == 2 * 2 * 6 and bench.published(row) == {'paper': 0.815, 'target': 0.199}
    done = bench.derive({'status': 'ok', 'seconds': {'token': [0.0005]}}, row, {})
    assert done['over_paper'] == pytest.approx(0.815 / 0.5)


REFUSED = """\
--cells=((1,2,3,0),): expected (L, E, C, B)
--paths=ring: expected some of
--dtype=float16: dtype
--cells=(1,1,4,100): not a whole number
--suite=sokoban --cells=(1,1): sokoban: (L, E, d)
--suite=first --cells=(2,8): a suite's name
--suite=first --paths=slow: expected some of"""


@pytest.mark.parametrize('case', REFUSED.splitlines())
def test_refuses(case, capfd):
    words, _, message = case.partition(': ')
    assert message in mistake(capfd, bench, words.split())

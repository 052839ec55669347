"""bench.py: figures of every suite, reports that continue, variants that fail, known figures."""

import json
import multiprocessing
import os
import signal
import time

import numpy as np
import processes
import pytest
import torch

import bench
from configurator import read_script, run_script

SETTINGS = read_script(bench.__file__)[0]
SMALL = {
    **SETTINGS,
    'device': 'cpu',
    'dtype': 'float32',
    'world': 1,
    'threads': 1,
    'n_embd': 128,
    'rounds': 2,
    'seconds': 0.01,
    'n_envs': 2,
    'unroll': 3,
    'check': True,
}
GPU = {**SETTINGS, 'device': 'cuda:0', 'dtype': 'bfloat16', 'world': 1}


@pytest.fixture
def forks(monkeypatch):
    """Variants run in forked processes, which start faster and keep what a test has patched."""
    fork = multiprocessing.get_context('fork')
    monkeypatch.setattr(bench.multiprocessing, 'get_context', lambda kind: fork)


@pytest.fixture
def yardsticks(monkeypatch):
    """Yardsticks that take no time."""
    parts = {'matmul': lambda: time.sleep(1e-3), 'copy': lambda: time.sleep(1e-3)}
    work = {'work': {'matmul': 1e9, 'copy': 1e6}}
    monkeypatch.setitem(bench.MAKERS, 'yardsticks', lambda row, config: (parts, work))


def rows_of(config):
    return [
        row for step in bench.plan_steps(config).values() for row in step.values() if 'L' in row
    ]


def refused(capfd, argv):
    """Return the line that bench.py prints for these arguments, without starting a variant."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as end:
        patch.setattr('sys.argv', ['bench.py', *argv])
        run_script(bench.main)
    error = capfd.readouterr().err
    assert end.value.code == 2 and error.startswith('error: ') and error.count('\n') == 1, error
    return error


# ---- suites ----

VARIANTS = [  # suite, cell, mode, sizes of its row, work of one call
    ('train', (1, 2, 4, 64), 'fast', {'L': 1, 'E': 2, 'C': 4, 'B': 2, 'T': 8}, 16),
    ('train', (1, 2, 4, 64), 'nonrecurrent', {'L': 2, 'E': 1, 'C': 4, 'B': 2, 'T': 8}, 16),
    ('train', (1, 2, 4, 64), 'lstm', {'L': 1, 'E': 2, 'C': 4, 'B': 2, 'T': 8}, 16),
    ('decode', (1, 2, 4, 3), 'fast', {'L': 1, 'E': 2, 'C': 4, 'B': 3}, None),
    ('decode', (1, 2, 4, 3), 'nonrecurrent', {'L': 2, 'E': 1, 'C': 4, 'B': 3}, None),
    ('sokoban', (1, 1, 4), 'fast', {'L': 1, 'E': 1, 'B': 2, 'T': 3}, 6),
    ('sokoban', (1, 1, 4), 'plain_recompute', {'L': 1, 'E': 1, 'B': 2, 'T': 3}, 6),
]


@pytest.mark.parametrize('suite, cell, mode, sizes, work', VARIANTS)
def test_a_variant_is_measured_and_checked(forks, tmp_path, suite, cell, mode, sizes, work):
    """The check compares gradients, logits or returns with a slower mode's."""
    config = {**SMALL, 'suite': suite, 'cells': (cell,), 'modes': mode, 'data_dir': str(tmp_path)}
    config['block_size'] = 8 if suite == 'train' else 0
    (row,) = rows_of(config)
    assert {name: row[name] for name in sizes} == sizes
    if suite == 'train':
        bench.write_random_shards(str(tmp_path), [row])
    record = bench.measure({'variant': row}, config)['variant']
    assert record['status'] == 'ok' and float(record['check'].rstrip('%')) < 1
    (times,) = record['seconds'].values()
    assert len(times) == 2 and min(times) > 0 and record['first_run_s'] > 0
    assert record.get('work') == work


def test_figures_follow_from_seconds():
    """Tokens/s per GPU and per node, ms per token, environment steps/s; their ratios to published
    figures and to the yardsticks' rates."""
    rates = {'matmul': 800e12, 'copy': 3e12, 'conv': 1e9}
    row = bench.make_row({**GPU, 'world': 4}, 'train', (2, 8, 64, 131072), 'compiled')
    record = {'status': 'ok', 'work': 131072, 'seconds': {'update': [0.5, 0.25, 1.0]}}
    found = bench.add_figures(row, record, rates)
    assert found['tokens_per_s'] == [65536, 131072, 32768]
    assert found['node_tokens_per_s'] == 262144 and found['paper_node'] == 209500
    assert found['over_paper'] == pytest.approx(65536 / 52375)
    least = bench.roofline_seconds(row, 800e12, 3e12)
    assert found['share_of_roofline'] == pytest.approx(least * 65536 / 512)
    assert found['figure'] == '65,536 (32,768..131,072) tokens/s'

    row = bench.make_row(GPU, 'decode', (8, 2, 128, 16), 'compiled')
    found = bench.add_figures(row, {'status': 'ok', 'seconds': {'token': [0.0005]}}, {})
    assert found['ms_per_token'] == [0.5] and (found['paper'], found['target']) == (0.815, 0.199)
    assert found['over_paper'] == pytest.approx(0.815 / 0.5)

    row = bench.make_row(GPU, 'sokoban', (1, 1, 128), 'fast')
    record = {'status': 'ok', 'work': 640, 'macs': 64e6, 'seconds': {'update': [0.5]}}
    found = bench.add_figures(row, record, rates)
    assert found['env_steps_per_s'] == [1280] and found['share_of_conv'] == pytest.approx(0.128)

    failed = bench.add_figures(row, {'status': 'OOM', 'seconds': {}}, rates)
    assert failed['figure'] == 'OOM' and 'env_steps_per_s' not in failed


def test_torchrun_measures_the_node(tmp_path):
    """Two ranks train together; per-GPU and node figures are reported beside each other."""
    path, copy = tmp_path / 'a' / 'b.json', tmp_path / 'my_train.py'
    copy.write_text((processes.ROOT / 'train_lm.py').read_text())
    argv = ['--modes=fast', '--cells=(1,2,4,64)', '--n_embd=128', '--block_size=8', '--threads=1']
    argv += ['--rounds=1', '--seconds=0.01', '--device=cpu', f'--script={copy}', f'--out={path}']
    done = processes.run(['bench.py', *argv], ranks=2)
    assert done.returncode == 0, done.stdout + done.stderr
    report, table = json.loads(path.read_text()), (tmp_path / 'a' / 'b.md').read_text()
    assert table.strip() in done.stdout and '1 of 1 done' in done.stdout
    (row,) = report['results']
    assert report['world'] == row['gpus'] == 2 and row['work'] == 32
    (per_gpu,) = row['tokens_per_s']
    assert row['node_tokens_per_s'] == pytest.approx(2 * per_gpu)
    assert np.median(report['yardsticks']['copy']) > 1e7
    assert {'device', 'torch', 'commit', 'command', 'config'} <= report.keys()
    lines = [line.split('|') for line in table.splitlines() if line.startswith('|')]
    assert len({len(line) for line in lines}) == 1
    heading, _, figures = ([cell.strip() for cell in line[1:-1]] for line in lines)
    assert figures[heading.index('all GPUs, tokens/s')] == f'{2 * per_gpu:,.0f}'


# ---- reports that continue ----

CELLS = (
    ('train', 1, 2, 4, 64),
    ('decode', 1, 2, 4, 2),
    ('train', 2, 2, 4, 64),
    ('sokoban', 1, 1, 4),
)


def fake_variant(row, config):
    """Stand in for all suites: the cell with two layers fails."""
    if row['L'] == 2:
        raise ValueError('no room')
    known = {'work': 16, 'macs': 5, 'check': lambda: {'w': (torch.ones(2, 2), torch.ones(2, 2))}}
    return {'update': lambda: time.sleep(1e-3)}, known


def test_first_continues_where_it_stopped(forks, yardsticks, tmp_path, monkeypatch, capfd):
    """A budget ends it after a step; a failing step is reported, and passed by; a report of another
    commit is refused; ctrl-C leaves no process."""
    for suite in ('train', 'decode', 'sokoban'):
        monkeypatch.setitem(bench.MAKERS, suite, fake_variant)
    path = tmp_path / 'a' / 'b.json'
    config = {**SMALL, 'suite': 'first', 'cells': CELLS, 'modes': 'fast', 'out': str(path)}
    steps = bench.plan_steps({**config, 'block_size': 4})

    children = []
    start = bench.start_workers
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(bench, 'start_workers', lambda *a: children.append(start(*a)) or children[-1])
        patch.setattr(bench, 'ask', lambda *_: signal.raise_signal(signal.SIGINT))
        bench.run_steps(config, steps)
    assert [worker.process.is_alive() for worker in children[0]] == [False]

    assert bench.run_steps({**config, 'budget': 0.01}, steps) == 0
    assert 'budget = 0.01 s is used up; steps left: 3' in capfd.readouterr().out
    (before,) = json.loads(path.read_text())['results']
    assert before['suite'] == 'train' and before['check'] == '0.00%'

    assert bench.run_steps(config, steps) == 1
    report, table = json.loads(path.read_text()), path.with_suffix('.md').read_text()
    assert report['results'][0] == before and len(report['results']) == 4
    status = {name: step['status'] for name, step in report['steps'].items()}
    bad = 'failed: ValueError: no room'
    assert status == {
        'yardsticks': 'ok',
        'train 1,2,4,64': 'ok',
        'decode 1,2,4,2': 'ok',
        'train 2,2,4,64': bad,
        'sokoban 1,1,4': 'ok',
    }
    assert f'- train 2,2,4,64: {bad}' in table

    path.write_text(json.dumps({**report, 'commit': 'other'}))
    with pytest.raises(SystemExit):
        bench.run_steps(config, steps)
    assert "commit = 'other', now" in capfd.readouterr().err


# ---- variants that fail ----


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


def without_compiler():
    raise RuntimeError('no compiler\nmany more lines')


FAILURES = [  # what a variant does when it is called, or in its check; its status and check
    (lambda: torch.empty(2**60), None, 'OOM', None),
    (killed, None, 'OOM', None),
    (lambda: os._exit(3), None, 'failed: its process ended: 3', None),
    (without_compiler, None, 'failed: RuntimeError: no compiler', None),
    (lambda: time.sleep(600), None, 'failed: late', None),
    (lambda: None, lambda: {'w': (1.5, 1.0), 'b': (1.0, 1.0)}, 'differs by 50.0% in w', '50.00%'),
    (lambda: None, lambda: torch.empty(2**60), 'ok', 'OOM'),
    (lambda: None, lambda: {'w': (1.0, 1.0)}, 'ok', '0.00%'),
]


@pytest.mark.parametrize('call, check, status, checked', FAILURES)
def test_a_failure_costs_its_own_variant(forks, monkeypatch, call, check, status, checked):
    """The other variant is measured to its end; the reason is reported."""

    def filled():
        """Return the check's numbers as matrices."""
        found = check()
        return {k: [torch.full((2, 2), x) for x in pair] for k, pair in found.items()}

    def make(row, config):
        fails = row['mode'] == 'fails'
        known = {'work': 1, **({'check': filled} if fails and check else {})}
        return {'update': call if fails else lambda: None}, known

    monkeypatch.setitem(bench.MAKERS, 'train', make)
    rows = {mode: {'suite': 'train', 'mode': mode} for mode in ('works', 'fails')}
    wait = 3 if status == 'failed: late' else 60
    found = bench.measure(rows, SMALL, time.perf_counter() + wait)
    assert found['fails']['status'] == status and found['fails'].get('check') == checked
    if wait == 60:
        assert found['works']['status'] == 'ok' and len(found['works']['seconds']['update']) == 2


def test_a_rank_that_fails_ends_its_variant(forks, monkeypatch):
    """The other rank waits for it, and is ended."""

    def make(row, config):
        return {'update': killed if os.environ['RANK'] == '1' else lambda: time.sleep(600)}, {}

    monkeypatch.setitem(bench.MAKERS, 'train', make)
    rows = {'ranks': {'suite': 'train', 'mode': 'fast', 'gpus': 2}}
    assert bench.measure(rows, SMALL)['ranks']['status'] == 'OOM'


def test_gpu_tests_that_fail_are_named(tmp_path, monkeypatch):
    code = 'import pytest\npytestmark = pytest.mark.gpu\ndef test_{0}(): assert {1}\n'
    file = tmp_path / 'test_it.py'
    monkeypatch.setattr(bench, 'GPU_TESTS', str(file))
    file.write_text(code.format('right', True))
    assert bench.make_tests({'marks': 'gpu'}, {}) == ({}, {})
    file = tmp_path / 'test_more.py'
    monkeypatch.setattr(bench, 'GPU_TESTS', str(file))
    file.write_text(code.format('wrong', False))
    with pytest.raises(RuntimeError, match='1 tests: test_wrong'):
        bench.make_tests({'marks': 'gpu'}, {})


# ---- known figures ----

# Hard floors calculated by hand for an H100 of 800 TFLOP/s and 3 TB/s, d = 768, E = 16 / L: 1000
# tokens/s of 131,072 / 4 tokens, ms per token of 16 streams; by suite and L, for each C.
FLOORS = {
    ('train', 1): (913, 913, 772, 477, 145, 75),
    ('train', 8): (514, 427, 319, 173, 46, 23),
    ('decode', 1): (0.096, 0.112),
    ('decode', 16): (0.112, 0.363),
}


def test_roofline_is_near_the_hand_calculation():
    for (suite, L), figures in FLOORS.items():
        for C, expected in zip(bench.CONTEXTS[suite], figures, strict=True):
            n = 16 if suite == 'decode' else 131072
            row = bench.make_row(GPU, suite, (L, 16 // L, C, n), 'compiled')
            milliseconds = 1000 * bench.roofline_seconds(row, 800e12, 3e12)
            found = milliseconds if suite == 'decode' else row['B'] / milliseconds
            # the hand calculation rounds, most where little is read
            limit = 0.07 if suite == 'decode' else 0.25 if (L, C) == (8, 32) else 0.13
            assert found == pytest.approx(expected, rel=limit), (suite, L, C)


def test_the_papers_cells():
    """All cells of both tables, with the streams of one of four GPUs, and the paper's figures."""
    trained = rows_of({**GPU, 'suite': 'train'})
    for row in trained:
        assert row['mode'] == ('compiled' if row['E'] > 1 else 'nonrecurrent_compiled')
        assert row['B'] * row['C'] * 4 == row['tokens_per_update'] and row['T'] == row['C']
    papers = {(r['tokens_per_update'], r['L'], r['C']): bench.published(r) for r in trained}
    assert len(papers) == len(trained) == 60 and all('paper' in x for x in papers.values())
    assert papers[131072, 1, 128] == {'paper': 87375, 'target': 430000}
    assert papers[262144, 16, 2048] == {'paper': 267875}
    assert papers[131072, 8, 128]['paper'] == 'OOM'
    cells = ((2, 8), (4, 4, 64), (1, 16, 32, 262144))
    assert len(rows_of({**GPU, 'suite': 'train', 'cells': cells})) == 12 + 2 + 1
    decoded = {(r['mode'], r['L'], r['C']): r for r in rows_of({**GPU, 'suite': 'decode'})}
    assert len(decoded) == 2 * 2 * 6
    assert bench.published(decoded['compiled', 8, 128]) == {'paper': 0.815, 'target': 0.199}
    (agent, _) = rows_of({**GPU, 'suite': 'sokoban', 'cells': ((1, 1, 128),)})
    assert bench.published(agent) == {'target': 55600}


def test_old_names_of_modes_work():
    config = {**GPU, 'suite': 'decode', 'modes': 'ring, gpt_ring_compiled', 'cells': ((2, 8, 128),)}
    assert [row['mode'] for row in rows_of(config)] == ['fast', 'nonrecurrent_compiled']


REFUSED = [
    (['--cells=((1,2,3,0),)'], 'expected (L, E, C, B)'),
    (['--modes=slow'], 'expected some of plain, fast'),
    (['--dtype=float16'], 'dtype'),
    (['--cells=(1,1,4,100)'], 'must be a multiple of 4 GPUs x 4 tokens'),
    (['--cells=(1,1,4,64)', '--n_embd=100'], 'set n_head'),
    (['--suite=sokoban', '--cells=(1,1)'], 'for sokoban (L, E, d)'),
    (['--suite=first', '--cells=(2,8)'], "for first a suite's name"),
    (['--script=missing.py'], "script = 'missing.py': there is no such file"),
]


@pytest.mark.parametrize('argv, message', REFUSED)
def test_mistakes_are_refused_in_one_line(argv, message, capfd):
    assert message in refused(capfd, argv)


def test_torchrun_is_for_training(monkeypatch, capfd):
    monkeypatch.setenv('WORLD_SIZE', '2')
    monkeypatch.setenv('RANK', '0')
    monkeypatch.setattr(os, '_exit', lambda status: (_ for _ in ()).throw(SystemExit(status)))
    assert 'runs on one GPU, without torchrun' in refused(capfd, ['--suite=decode'])

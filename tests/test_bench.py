"""Test bench.py: figures of every suite, reports that a later call continues, variants that fail,
known figures."""

import json
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import processes
import pytest
import torch
from small_runs import error_of

import bench
from configurator import read_script

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
    """Run variants in forked processes, which start faster and keep what a test has patched."""
    fork = multiprocessing.get_context('fork')
    monkeypatch.setattr(bench.multiprocessing, 'get_context', lambda kind: fork)


@pytest.fixture
def yardsticks(monkeypatch):
    """Replace the yardsticks by some that take a millisecond."""
    parts = {'matmul': lambda: time.sleep(1e-3), 'copy': lambda: time.sleep(1e-3)}
    work = {'work': {'matmul': 1e9, 'copy': 1e6}}
    monkeypatch.setitem(bench.MAKERS, 'yardsticks', lambda row, config: (parts, work))


def rows_of(config):
    """Return the rows of all steps of a suite."""
    steps = bench.plan_steps(config).values()
    return [row for step in steps for row in step.values() if 'L' in row]


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


def test_the_memory_of_a_variant_does_not_include_its_set_up(monkeypatch):
    """The set-up takes 100 bytes, a call 7."""
    peak = [0]

    def take(n):
        peak[0] = max(peak[0], n)

    def make(row, config):
        take(100)
        return {'update': lambda: take(7)}, {}

    monkeypatch.setitem(bench.MAKERS, 'train', make)
    monkeypatch.setattr(torch.cuda, 'synchronize', lambda: None)
    monkeypatch.setattr(torch.cuda, 'max_memory_allocated', lambda: peak[0])
    monkeypatch.setattr(torch.cuda, 'reset_peak_memory_stats', lambda: peak.__setitem__(0, 0))
    config = {'device': 'cuda:0', 'rounds': 1, 'seconds': 1e-6}
    _, measured = bench.take_turns({'suite': 'train'}, config | {'check': False})
    assert measured['memory_bytes'] == 7


RATES = {'matmul': 800e12, 'copy': 3e12, 'conv': 1e9}  # of the yardsticks


def test_figures_of_training_follow_from_seconds():
    """They are tokens/s per GPU and per node, relative to the paper's and to the roofline."""
    row = bench.make_row({**GPU, 'world': 4}, 'train', (2, 8, 64, 131072), 'compiled')
    record = {'status': 'ok', 'work': 131072, 'seconds': {'update': [0.5, 0.25, 1.0]}}
    found = bench.add_figures(row, record, RATES)
    assert found['tokens_per_s'] == [65536, 131072, 32768]
    assert found['node_tokens_per_s'] == 262144 and found['paper_node'] == 209500
    assert found['over_paper'] == pytest.approx(65536 / 52375)
    least = bench.roofline_seconds(row, 800e12, 3e12)
    assert found['share_of_roofline'] == pytest.approx(least * 65536 / 512)
    assert found['figure'] == '65,536 (32,768..131,072) tokens/s'


def test_figures_of_decoding_follow_from_seconds():
    row = bench.make_row(GPU, 'decode', (8, 2, 128, 16), 'compiled')
    found = bench.add_figures(row, {'status': 'ok', 'seconds': {'token': [0.0005]}}, {})
    assert found['ms_per_token'] == [0.5] and (found['paper'], found['target']) == (0.815, 0.199)
    assert found['over_paper'] == pytest.approx(0.815 / 0.5)


def test_figures_of_agents_follow_from_seconds():
    row = bench.make_row(GPU, 'sokoban', (1, 1, 128), 'fast')
    record = {'status': 'ok', 'work': 640, 'macs': 64e6, 'seconds': {'update': [0.5]}}
    found = bench.add_figures(row, record, RATES)
    assert found['env_steps_per_s'] == [1280] and found['share_of_conv'] == pytest.approx(0.128)


def test_a_failed_variant_has_its_status_as_figure():
    row = bench.make_row(GPU, 'sokoban', (1, 1, 128), 'fast')
    failed = bench.add_figures(row, {'status': 'OOM', 'seconds': {}}, RATES)
    assert failed['figure'] == 'OOM' and 'env_steps_per_s' not in failed


def test_under_torchrun_ranks_train_together_and_the_node_is_reported(tmp_path):
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


@pytest.fixture
def first(forks, yardsticks, tmp_path, monkeypatch):
    """Return the settings and steps of the suite `first` with fake variants."""
    for suite in ('train', 'decode', 'sokoban'):
        monkeypatch.setitem(bench.MAKERS, suite, fake_variant)
    out = str(tmp_path / 'a' / 'b.json')
    config = {**SMALL, 'suite': 'first', 'cells': CELLS, 'modes': 'fast', 'out': out}
    return config, bench.plan_steps({**config, 'block_size': 4})


def test_a_budget_ends_a_suite_after_a_step_and_the_next_call_continues(first, capfd):
    """A step that fails is reported, and the steps after it are run."""
    config, steps = first
    path = Path(config['out'])
    assert bench.run_steps({**config, 'budget': 0.01}, steps) == 0
    assert 'budget = 0.01 s is used up; steps left: 3' in capfd.readouterr().out
    (before,) = json.loads(path.read_text())['results']
    assert before['suite'] == 'train' and before['check'] == '0.00%'

    assert bench.run_steps(config, steps) == 1
    report = json.loads(path.read_text())
    assert report['results'][0] == before and len(report['results']) == 4
    failure = 'failed: ValueError: no room'
    assert {name: step['status'] for name, step in report['steps'].items()} == {
        'yardsticks': 'ok',
        'train 1,2,4,64': 'ok',
        'decode 1,2,4,2': 'ok',
        'train 2,2,4,64': failure,
        'sokoban 1,1,4': 'ok',
    }
    assert f'- train 2,2,4,64: {failure}' in path.with_suffix('.md').read_text()


def test_a_report_of_another_commit_is_not_continued(first, capfd):
    config, steps = first
    path = Path(config['out'])
    bench.run_steps({**config, 'budget': 0.01}, steps)
    report = json.loads(path.read_text())
    path.write_text(json.dumps({**report, 'commit': 'other'}))
    with pytest.raises(SystemExit):
        bench.run_steps(config, steps)
    assert "commit = 'other', now" in capfd.readouterr().err


def test_a_failed_cell_is_not_measured_again(first, monkeypatch):
    config, steps = first
    assert bench.run_steps(config, steps) == 1
    monkeypatch.setattr(bench, 'measure', lambda rows, *_: pytest.fail(f'{rows} measured again'))
    assert bench.run_steps(config, steps) == 1


def test_an_error_about_a_template_is_not_taken_for_a_step_that_ran_late(first, monkeypatch):
    """The budget of 100 s ends before the time limit of the step, which is 150 s."""

    def fail(row, config):
        raise ValueError('no template')

    monkeypatch.setitem(bench.MAKERS, 'decode', fail)
    config, steps = first
    bench.run_steps({**config, 'budget': 100}, steps)
    found = json.loads(Path(config['out']).read_text())['steps']
    assert found['decode 1,2,4,2']['status'] == 'failed: ValueError: no template'


def test_a_report_is_not_overwritten(tmp_path, capfd):
    path = tmp_path / 'train.json'
    path.write_text('{"results": [1]}')
    with pytest.raises(SystemExit):
        bench.open_report({**SMALL, 'suite': 'train'}, str(path), continues=False)
    assert (
        'train.json: holds results: --append=True measures what is missing'
        in capfd.readouterr().err
    )
    assert path.read_text() == '{"results": [1]}'


def test_a_command_under_torchrun_starts_all_ranks(monkeypatch):
    monkeypatch.setattr(sys, 'argv', ['bench.py', '--suite=train'])
    assert bench.command_line(1) == ['python', 'bench.py', '--suite=train']
    torchrun = ['torchrun', '--standalone', '--nproc_per_node=4']
    assert bench.command_line(4) == [*torchrun, 'bench.py', '--suite=train']


def test_every_command_of_a_report_is_kept(tmp_path, monkeypatch):
    """Also one that is the beginning of another."""
    path, config = str(tmp_path / 'report.json'), {**SMALL, 'suite': 'first'}
    for budget in ('5400', '540'):
        monkeypatch.setattr(sys, 'argv', ['bench.py', f'--budget={budget}'])
        report = bench.open_report(config, path, continues=True)
        bench.write_report(report, path)
    assert report['command'] == 'python bench.py --budget=5400; python bench.py --budget=540'


def test_ctrl_c_leaves_no_process(first, monkeypatch):
    workers = []

    def start_workers(*args, start=bench.start_workers):
        workers.extend(start(*args))
        return workers

    monkeypatch.setattr(bench, 'start_workers', start_workers)
    monkeypatch.setattr(bench, 'ask', lambda *_: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        bench.run_steps(*first)
    assert [worker.process.is_alive() for worker in workers] == [False]


# ---- variants that fail ----


def test_vectors_and_scalars_are_compared_as_one_tensor():
    """The scalar alone would differ by 10%. The loss is compared alone."""
    vectors = torch.full((100,), 1.0)
    pairs = {'layers.0.a': (torch.tensor(1.1), torch.tensor(1.0)), 'bias': (vectors, vectors)}
    difference, name = bench.compare(pairs)
    assert name == 'vectors' and difference == pytest.approx(0.1 / 101**0.5, rel=1e-6)
    pairs['loss'] = (torch.tensor(1.1), torch.tensor(1.0))
    difference, name = bench.compare(pairs)
    assert name == 'loss' and difference == pytest.approx(0.1, rel=1e-6)


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


def without_compiler():
    raise RuntimeError('no compiler\nmany more lines')


FAILURES = [  # what the call and the check of a variant do; its status and result of the check
    (lambda: torch.empty(2**60), None, 'OOM', None),
    (killed, None, 'OOM', None),
    (lambda: os._exit(3), None, 'failed: its process ended: 3', None),
    (without_compiler, None, 'failed: RuntimeError: no compiler', None),
    (lambda: time.sleep(600), None, 'failed: over its time limit', None),
    (lambda: None, lambda: {'w': (1.5, 1.0), 'b': (1.0, 1.0)}, 'differs by 50.0% in w', '50.00%'),
    (lambda: None, lambda: torch.empty(2**60), 'ok', 'OOM'),
    (lambda: None, lambda: {'w': (1.0, 1.0)}, 'ok', '0.00%'),
]


@pytest.mark.parametrize('call, check, status, checked', FAILURES)
def test_a_failure_is_reported_and_other_variants_are_measured(
    forks, monkeypatch, call, check, status, checked
):
    def check_of_matrices():
        """Return the numbers of the check as matrices."""
        pairs = check().items()
        return {name: [torch.full((2, 2), x) for x in pair] for name, pair in pairs}

    def make(row, config):
        known = {'work': 1}
        if row['mode'] == 'works':
            return {'update': lambda: None}, known
        if check:
            known['check'] = check_of_matrices
        return {'update': call}, known

    monkeypatch.setitem(bench.MAKERS, 'train', make)
    rows = {mode: {'suite': 'train', 'mode': mode} for mode in ('works', 'fails')}
    wait = 3 if status == bench.LATE else 60
    found = bench.measure(rows, SMALL, time.perf_counter() + wait)
    assert found['fails']['status'] == status and found['fails'].get('check') == checked
    if wait == 60:
        assert found['works']['status'] == 'ok' and len(found['works']['seconds']['update']) == 2


def test_a_rank_that_fails_ends_its_variant(forks, monkeypatch):
    """The other rank, which would wait for it, is ended."""

    def make(row, config):
        return {'update': killed if os.environ['RANK'] == '1' else lambda: time.sleep(600)}, {}

    monkeypatch.setitem(bench.MAKERS, 'train', make)
    rows = {'ranks': {'suite': 'train', 'mode': 'fast', 'gpus': 2}}
    assert bench.measure(rows, SMALL)['ranks']['status'] == 'OOM'


def write_gpu_test(folder, name, monkeypatch, passes):
    """Let a file with one test, which passes or fails, take the place of test_gpu.py."""
    path = folder / f'{name}.py'
    mark = 'import pytest\npytestmark = pytest.mark.gpu\n'
    path.write_text(f'{mark}def {name}(): assert {passes}\n')
    monkeypatch.setattr(bench, 'GPU_TESTS', str(path))


def test_gpu_tests_that_pass_are_a_step_without_figures(tmp_path, monkeypatch):
    write_gpu_test(tmp_path, 'test_that_passes', monkeypatch, passes=True)
    assert bench.make_tests({'marks': 'gpu'}, {}) == ({}, {})


def test_gpu_tests_that_fail_are_named(tmp_path, monkeypatch):
    write_gpu_test(tmp_path, 'test_that_fails', monkeypatch, passes=False)
    with pytest.raises(RuntimeError, match='1 tests: test_that_fails'):
        bench.make_tests({'marks': 'gpu'}, {})


def test_marks_that_no_test_has_are_named(tmp_path, monkeypatch):
    write_gpu_test(tmp_path, 'test_without_mark', monkeypatch, passes=True)
    with pytest.raises(RuntimeError, match="no test has the marks 'gpu and smoke'"):
        bench.make_tests({'marks': 'gpu and smoke'}, {})


@pytest.mark.parametrize('step', ['smoke', 'tests'])
def test_both_steps_with_gpu_tests_have_some(step):
    row = bench.plan_steps({**GPU, 'suite': 'first'})[step][step]
    options = '--collect-only -q --noconftest -o addopts= -p no:cacheprovider'
    assert pytest.main([*options.split(), '-m', row['marks'], bench.GPU_TESTS]) == 0


# ---- known figures ----

# Calculated by hand for an H100 of 800 TFLOP/s and 3 TB/s, d = 768, E = 16 / L; by suite and L, for
# each C. Training: the most thousands of tokens/s at 131,072 / 4 tokens per update. Decoding: the
# least milliseconds per token of 16 streams.
ROOFLINES = {
    ('train', 1): (913, 913, 772, 477, 145, 75),
    ('train', 8): (514, 427, 319, 173, 46, 23),
    ('decode', 1): (0.096, 0.112),
    ('decode', 16): (0.112, 0.363),
}


def test_roofline_is_near_the_hand_calculation():
    for (suite, L), figures in ROOFLINES.items():
        for C, expected in zip(bench.CONTEXTS[suite], figures, strict=True):
            n = 16 if suite == 'decode' else 131072
            row = bench.make_row(GPU, suite, (L, 16 // L, C, n), 'compiled')
            milliseconds = 1000 * bench.roofline_seconds(row, 800e12, 3e12)
            found = milliseconds if suite == 'decode' else row['B'] / milliseconds
            # the hand calculation rounds, most where little is read
            if suite == 'decode':
                limit = 0.07
            elif (L, C) == (8, 32):
                limit = 0.25
            else:
                limit = 0.13
            assert found == pytest.approx(expected, rel=limit), (suite, L, C)


def test_the_suite_train_has_all_cells_of_the_papers_table():
    """One GPU measures the streams of one of the paper's four GPUs."""
    rows = rows_of({**GPU, 'suite': 'train'})
    for row in rows:
        assert row['mode'] == ('compiled' if row['E'] > 1 else 'nonrecurrent_compiled')
        assert row['B'] * row['C'] * 4 == row['tokens_per_update'] and row['T'] == row['C']
    figures = {(row['tokens_per_update'], row['L'], row['C']): bench.published(row) for row in rows}
    assert len(figures) == len(rows) == 60 and all('paper' in x for x in figures.values())
    assert figures[131072, 1, 128] == {'paper': 87375, 'target': 430000}
    assert figures[262144, 16, 2048] == {'paper': 267875}
    assert figures[131072, 8, 128]['paper'] == 'OOM'


def test_a_cell_may_leave_out_its_context_and_tokens():
    cells = ((2, 8), (4, 4, 64), (1, 16, 32, 262144))
    assert len(rows_of({**GPU, 'suite': 'train', 'cells': cells})) == 12 + 2 + 1


def test_the_suite_decode_has_all_cells_of_the_papers_table():
    rows = {(row['mode'], row['L'], row['C']): row for row in rows_of({**GPU, 'suite': 'decode'})}
    assert len(rows) == 2 * 2 * 6
    assert bench.published(rows['compiled', 8, 128]) == {'paper': 0.815, 'target': 0.199}


def test_the_suite_sokoban_has_a_target():
    row, _ = rows_of({**GPU, 'suite': 'sokoban', 'cells': ((1, 1, 128),)})
    assert bench.published(row) == {'target': 55600}


def test_old_names_of_modes_work():
    config = {**GPU, 'suite': 'decode', 'modes': 'ring, gpt_ring_compiled', 'cells': ((2, 8, 128),)}
    assert [row['mode'] for row in rows_of(config)] == ['fast', 'nonrecurrent_compiled']


REFUSED = [
    (['--cells=((1,2,3,0),)'], 'expected (L, E, C, tokens per update), for decode (L, E, C, B)'),
    (['--modes=slow'], 'expected some of plain, fast'),
    (['--suite=first', '--modes=slow'], 'lstm, transformer, plain_recompute, fast_recompute'),
    (['--dtype=float16'], 'dtype'),
    (['--cells=(1,1,4,100)'], 'must be a multiple of 4 GPUs x 4 tokens'),
    (['--cells=(1,1,4,64)', '--n_embd=100'], 'set n_head'),
    (['--suite=sokoban', '--cells=(1,1)'], 'for sokoban (L, E, d)'),
    (['--suite=first', '--cells=(2,8)'], "for first a suite's name"),
    (['--script=missing.py'], "script = 'missing.py': there is no such file"),
]


@pytest.mark.parametrize('argv, message', REFUSED)
def test_mistakes_are_refused_in_one_line(argv, message, capfd):
    assert message in error_of(capfd, bench, argv)


def test_torchrun_is_for_training(monkeypatch, capfd):
    monkeypatch.setenv('WORLD_SIZE', '2')
    monkeypatch.setenv('RANK', '0')
    monkeypatch.setattr(os, '_exit', sys.exit)  # by which a rank ends
    assert 'runs on one GPU, without torchrun' in error_of(capfd, bench, ['--suite=decode'])

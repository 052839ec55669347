"""Test bench.py: figures of every suite, comparison with the reference, cells that fail, known
figures, reports."""

import json
import sys

import processes
import pytest
import torch
from small_runs import assert_refused

import bench
import common
from bench import Cell, Machine
from configurator import Mistake, configure

CPU = Machine(rank=0, world=1, device='cpu', amp=torch.float32)
TINY = ['--vocab_size=64', '--rounds=2', '--seconds=0.001']


def apply_settings(*argv):
    """Apply the settings of bench.py in this process."""
    configure(vars(bench), argv, quiet=True)


@pytest.fixture(autouse=True)
def settings():
    """Apply tiny settings."""
    apply_settings(*TINY)


# ---- cells ----

CELLS = [
    Cell('train', 'recurrent', L=2, E=2, D=128, C=4, B=2),
    Cell('train', 'transformer', L=2, E=1, D=128, C=4, B=2),
    Cell('decode', 'recurrent', L=2, E=2, D=128, C=4, B=3),
    Cell('decode', 'transformer', L=2, E=1, D=128, C=4, B=3),
    Cell('sokoban', 'convlstm', L=1, E=2, D=4, C=3, B=2),
    Cell('sokoban', 'convglu', L=2, E=1, D=4, C=3, B=2),
]


@pytest.mark.parametrize('cell', CELLS, ids=lambda cell: f'{cell.suite} {cell.model}')
def test_every_mode_is_measured(cell):
    for row in bench.measure(cell, ['plain', 'eager'], CPU):
        assert row['status'] == 'ok' and len(row['seconds']) == 2, row
        assert 0 < row['min'] <= row['median'] <= row['max'] and row['speed_up'] > 0


def test_figures_follow_from_seconds():
    """They are per GPU, and for all GPUs together; those of decoding are milliseconds."""
    apply_settings('--vocab_size=50304')
    cell = Cell('train', 'recurrent', 2, 8, 768, C=64, B=512)
    row = {'status': 'ok', 'seconds': [0.5, 0.25, 1.0], **bench.published(cell)}
    bench.add_figures(row, cell, world=4)
    assert (row['median'], row['min'], row['max']) == (65536, 32768, 131072)
    assert row['all_gpus'] == 262144 and row['over_paper'] == pytest.approx(65536 / 52375)

    cell = Cell('decode', 'recurrent', 8, 2, 768, C=128, B=16)
    row = {'status': 'ok', 'seconds': [0.0005], **bench.published(cell)}
    bench.add_figures(row, cell, world=1)
    assert row['median'] == 0.5 and row['over_paper'] == pytest.approx(0.815 / 0.5)


# ---- cells that fail ----


def no_memory():
    raise torch.OutOfMemoryError('of 2 GiB\nmore lines')


def no_compiler():
    raise RuntimeError('no compiler\nmore lines')


def too_large():
    raise Mistake('one row of 2048 tokens does not fit in memory: choose a smaller model')


FAILURES = [  # where it fails, how, the status
    ('set-up', no_memory, 'OOM'),
    ('set-up', too_large, 'OOM'),
    ('set-up', no_compiler, 'failed: RuntimeError: no compiler'),
    ('run', no_memory, 'OOM'),
]


@pytest.mark.parametrize('where, fail, status', FAILURES)
def test_a_mode_that_fails_is_reported_and_the_others_are_measured(
    monkeypatch, where, fail, status
):
    def make(cell, mode, machine, graphs):
        if mode == 'plain':
            return lambda: None
        if where == 'set-up':
            fail()
        calls = iter([lambda: None])  # the first call, of the set-up, works
        return lambda: next(calls, fail)()

    monkeypatch.setitem(bench.MAKERS, 'train', make)
    plain, eager = bench.measure(CELLS[0], ['plain', 'eager'], CPU)
    assert plain['status'] == 'ok' and len(plain['seconds']) == 2
    assert eager['status'] == eager['median'] == status


# ---- known figures ----

CONTEXTS = {'train': '32,64,128,256,1024,2048', 'decode': '128,2048'}
PAPER = [  # suite, tokens per update, cells with a figure of the paper
    ('train', 131072, 6 * 5),
    ('train', 262144, 6 * 5),
    ('decode', 131072, 2 * 6),
]


@pytest.mark.parametrize('suite, tokens, n', PAPER)
def test_all_cells_of_the_papers_tables_have_its_figure(suite, tokens, n):
    """One GPU measures the streams of one of the paper's four GPUs."""
    paper = ['--vocab_size=50304', '--n_embd=768', f'--tokens_per_update={tokens}']
    apply_settings(*paper, f'--contexts={CONTEXTS[suite]}')
    cells = bench.find_cells(suite)
    figures = {(cell.model, cell.L, cell.C): bench.published(cell).get('paper') for cell in cells}
    assert len(figures) == n and None not in figures.values()
    known = {
        ('train', 131072): {('recurrent', 1, 128): '87375', ('recurrent', 8, 128): 'OOM'},
        ('train', 262144): {('transformer', 16, 2048): '267875'},
        ('decode', 131072): {('recurrent', 8, 128): '0.815'},
    }
    assert known[suite, tokens].items() <= figures.items()


def test_the_agents_have_targets():
    apply_settings()
    first, second = bench.find_cells('sokoban')
    unroll = first._replace(C=20)
    assert bench.published(unroll) == {'target': '55600'}
    assert bench.published(second) == {'target': '27800'}


def test_other_sizes_than_the_papers_have_no_figure():
    assert bench.published(Cell('decode', 'recurrent', 8, 2, 256, C=128, B=16)) == {}


# ---- the report ----


def run_main(monkeypatch, *argv):
    """Run bench.py in this process."""
    monkeypatch.setattr(sys, 'argv', ['bench.py', '--device=cpu', '--threads=1', *argv])
    return bench.main()


SMALL = ['--shapes=(1,2),', '--contexts=4,', '--tokens_per_update=32', '--n_embd=128', *TINY]


def test_both_tables_are_written_as_json_and_markdown(tmp_path, monkeypatch, capsys):
    path = tmp_path / 'new' / 'report.json'
    assert run_main(monkeypatch, f'--out={path}', '--streams=2', *SMALL) == 0
    report = json.loads(path.read_text())
    names = {'command', 'device_name', 'torch', 'commit', 'dtype', 'threads', 'world', 'settings'}
    assert names <= report.keys()
    rows = {(row['suite'], row['model'], row['mode']): row for row in report['results']}
    models, modes = ('recurrent', 'transformer'), ('plain', 'eager')
    assert set(rows) == {(s, x, m) for s in ('train', 'decode') for x in models for m in modes}
    table = path.with_suffix('.md').read_text()
    assert table in capsys.readouterr().out
    lines = [line.split('|') for line in table.splitlines() if line.startswith('|')]
    assert len(lines) == 10 and len({len(line) for line in lines}) == 1


@pytest.mark.parametrize('fail, status', [(no_memory, 0), (no_compiler, 1)])
def test_the_exit_status_tells_that_a_cell_failed(tmp_path, monkeypatch, fail, status):
    """The cells after it are measured. Running out of memory is a result, and no failure."""

    def make(cell, mode, machine, graphs):
        if cell.model == 'recurrent':
            fail()
        return lambda: None

    monkeypatch.setitem(bench.MAKERS, 'train', make)
    path = tmp_path / 'report.json'
    assert run_main(monkeypatch, '--suite=train', f'--out={path}', *SMALL) == status
    rows = json.loads(path.read_text())['results']
    assert [row['status'] == 'ok' for row in rows] == 2 * [False] + 2 * [True]


@pytest.mark.parametrize('name', ['report.json', 'report.md'])
def test_another_report_is_not_overwritten(tmp_path, monkeypatch, name):
    (tmp_path / name).write_text('kept')
    call = (run_main, monkeypatch, f'--out={tmp_path}/report.json', *SMALL)
    assert_refused(f'{name} exists: choose another name', *call)
    assert (tmp_path / name).read_text() == 'kept'


REFUSED = [
    ('--modes=slow', 'expected some of plain, eager, compiled'),
    ('--suite=first', 'expected one of'),
    ('--tokens_per_update=30', 'must be a multiple of 4 x C = 16'),
    ('--n_embd=7', 'n_embd'),
    ('--shapes=(2,8),(1,2,3)', 'expected groups of 2 positive integers'),
    ('--shapes=2,0', 'expected groups of 2 positive integers'),
    ('--shapes=2', 'shapes'),
    ('--agents=(1,2),', 'expected groups of 3 positive integers'),
]


@pytest.mark.parametrize('argument, message', REFUSED)
def test_wrong_settings_are_refused_before_anything_is_measured(
    tmp_path, monkeypatch, argument, message
):
    monkeypatch.chdir(tmp_path)
    suite = ['--suite=sokoban'] if 'agents' in argument else []
    assert_refused(message, run_main, monkeypatch, *SMALL, *suite, *argument.split())
    assert not list(tmp_path.iterdir())


def test_under_torchrun_ranks_train_together_and_each_decodes(tmp_path):
    path = tmp_path / 'report.json'
    argv = ['--modes=eager', '--device=cpu', '--threads=1', f'--out={path}']
    done = processes.run(['bench.py', *SMALL, *argv], ranks=2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count('| train |') == 2  # rank 0 prints the table
    report = json.loads(path.read_text())
    rows = [row for row in report['results'] if row['model'] == 'recurrent']
    decode, train = sorted(rows, key=lambda row: row['suite'])
    assert report['world'] == 2 and train['status'] == decode['status'] == 'ok'
    assert train['all_gpus'] == pytest.approx(2 * train['median']) and train['B'] == 2
    assert 'all_gpus' not in decode


def measure_where_rank_1_fails():
    """Return the status of a cell on this rank."""
    apply_settings(*TINY)
    rank, world, device = common.join_ranks('cpu', 1)

    def make(cell, mode, machine, graphs):
        if rank == 1 and mode == 'eager':
            no_memory()
        return lambda: None

    bench.MAKERS['train'] = make
    machine = Machine(rank, world, device, torch.float32)
    plain, eager = bench.measure(CELLS[0], ['plain', 'eager'], machine)
    common.leave_ranks()
    return plain['status'], eager['status']


def test_a_mode_that_fails_on_one_rank_is_reported_by_all():
    found = processes.run_ranks(2, measure_where_rank_1_fails)
    assert found == [('ok', 'failed on another rank'), ('ok', 'OOM')]

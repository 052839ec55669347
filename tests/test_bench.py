"""Test bench.py: figures of every suite, cells that fail, known figures, reports, ranks."""

import json
import sys

from configurator import configure
from support.script import UserError

import pytest
import torch
from processes import run_ranks
from small_runs import assert_refused

import bench
from bench import Cell
from paper.plans import PLANS

SMALL = '--shapes=(1,2), --contexts=4 --tokens_per_update=32 --n_embd=128 --streams=2'.split()
SMALL += '--vocab_size=64 --rounds=2 --seconds=0.001 --device=cpu --threads=1'.split()
SMALL += '--agents=1,2,4 --unroll=3 --n_envs=2'.split()


def apply_settings(*argv):
    """Apply the settings of bench.py in this process."""
    configure(vars(bench), argv, quiet=True)


def run_main(*argv):
    """Run bench.py with small settings in this process; return the exit status."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, 'argv', ['bench.py', *SMALL, *argv])
        return bench.main()


def read_report(path):
    """Return a report, and its rows by suite, model and mode."""
    report = json.loads(path.read_text())
    return report, {(row['suite'], row['model'], row['mode']): row for row in report['results']}


# ---- figures ----

MODELS = [(suite, x) for suite in ('train', 'decode') for x in ('recurrent', 'transformer')]
TABLES = [
    ('', [(*model, mode) for model in MODELS for mode in ('plain', 'eager')]),
    ('sokoban', [('sokoban', 'convlstm', 'eager')]),
]


@pytest.mark.parametrize('suite, keys', TABLES)
def test_every_mode_is_measured_and_written_as_json_and_markdown(tmp_path, capsys, suite, keys):
    path = tmp_path / 'new' / 'report.json'
    assert run_main(f'--suite={suite}', f'--out={path}') == 0
    report, rows = read_report(path)
    assert {'command', 'device_name', 'code', 'dtype', 'settings'} <= report.keys()
    assert [*rows] == keys
    for (name, model, _), row in rows.items():
        assert row['status'] == 'ok' and len(row['seconds']) == 2, row
        assert 0 < row['min'] <= row['median'] <= row['max']
        first = rows.get((name, model, 'plain'), row)
        assert row['speed_up'] == min(first['seconds']) / min(row['seconds'])
    table = path.with_suffix('.md').read_text()
    assert table in capsys.readouterr().out and table.count('\n|') == 2 + len(rows)


def test_kernels_are_left_out_only_where_there_are_any():
    """Elsewhere a mode would be measured twice. The transformer decodes with kernels."""
    for suite, model, expected in (
        ('train', 'recurrent', True),
        ('train', 'transformer', False),
        ('decode', 'transformer', True),
        ('sokoban', 'convglu', False),
    ):
        cell = Cell(suite, model, 2, 8, 768, C=64, B=16)
        assert bench.uses_kernels(cell, 'cuda:0') == expected
        assert not bench.uses_kernels(cell, 'cpu')


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

    cell = Cell('sokoban', 'convlstm', L=1, E=1, D=128, C=20, B=32)
    assert bench.published(cell) == {'target': 55600}


CONTEXTS = '--contexts=32,64,128,256,1024,2048'
BOTH = '--tokens_per_update=131072,262144'
PAPER = [  # suite, settings, cells with a figure of the paper, some of them by model, L, C, B
    (
        'train',
        [CONTEXTS, BOTH],
        2 * 6 * 5,
        {
            ('recurrent', 1, 128, 256): 349.5,
            ('transformer', 16, 2048, 32): 1071.5,
            ('recurrent', 8, 64, 1024): 'OOM',
        },
    ),
    (
        'decode',
        ['--contexts=128,2048', '--streams=4,16'],
        2 * 2 * 6,
        {('recurrent', 8, 128, 4): 0.815, ('recurrent', 8, 128, 16): 0.815},
    ),
]


@pytest.mark.parametrize('suite, settings, n, some', PAPER)
def test_all_cells_of_the_papers_tables_have_its_figure(suite, settings, n, some):
    """One GPU measures the streams of one of the paper's four GPUs, so that a quarter of the tokens
    per second that are printed there is shown. Other sizes have none."""
    apply_settings('--vocab_size=50304', '--n_embd=768', *settings)
    cells = bench.find_cells(suite)
    paper = {cell[1:3] + cell[5:]: bench.published(cell).get('paper') for cell in cells}
    assert len(paper) == n and None not in paper.values()
    for key, printed in some.items():
        scale = 1000 / 4 if suite == 'train' and printed != 'OOM' else 1
        assert paper[key] == scale * printed
    assert bench.published(cells[0]._replace(D=256)) == {}
    apply_settings('--vocab_size=50304', '--window=128')
    cells = [cell._replace(C=C, B=B) for cell in cells[:1] for C, B in ((64, 512), (128, 256))]
    assert [bench.published(cell) != {} for cell in cells] == [False, suite == 'train']


def test_the_plan_of_throughput_has_all_cells_of_the_papers_table():
    launcher, settings = PLANS['throughput'].draw.split('{root}bench.py ')
    assert launcher == 'torchrun --standalone --nproc_per_node=4 '
    apply_settings('--vocab_size=50304', '--n_embd=768', *settings.split())
    cells = bench.find_cells(bench.suite)
    assert len({cell for cell in cells if 'paper' in bench.published(cell)}) == 60


def test_a_window_of_another_size_is_shown(tmp_path):
    """That of training and that of decoding after C tokens."""
    path = tmp_path / 'report.json'
    assert run_main('--window=2', '--modes=eager', f'--out={path}') == 0
    report, rows = read_report(path)
    assert report['settings']['window'] == 2 and {row['W'] for row in rows.values()} == {2}
    assert '| C | B | W |' in path.with_suffix('.md').read_text()
    apply_settings(*SMALL)
    (cell, _) = bench.find_cells('decode')
    assert cell.build('eager').config.window == cell.C


def test_training_reads_its_tokens_through_the_loader(monkeypatch):
    """As many rows as the B streams of a GPU, the next T tokens for each update."""
    batches, next_batch = [], bench.Loader.next
    monkeypatch.setattr(
        bench.Loader, 'next', lambda loader: batches.append(next_batch(loader)) or batches[-1]
    )
    apply_settings(*SMALL)
    machine = bench.Machine(0, 1, 'cpu', torch.float32)
    run, _ = bench.make_update(bench.find_cells('train')[0], 'eager', machine, None)
    for _ in range(2):
        run()
    (x, y, is_first), (later, _, is_reset) = batches
    assert x.shape == later.shape == (2, 4) and torch.equal(y[:, -1], later[:, 0])
    assert is_first and not is_reset


# ---- cells that fail ----


def no_memory():
    raise torch.OutOfMemoryError('of 2 GiB\nmore lines')


def too_large():
    raise UserError('one row of 2048 tokens does not fit in memory: choose a smaller model')


def no_compiler():
    raise RuntimeError('no compiler\nmore lines')


FAILURES = [  # how a cell fails, in its set-up or in a measurement, and the statuses
    (no_memory, False, 'OOM', 0),
    (too_large, True, 'OOM', 0),
    (no_compiler, True, 'failed: RuntimeError: no compiler', 1),
]


@pytest.mark.parametrize('fail, in_setup, status, exit_status', FAILURES)
def test_a_cell_that_fails_is_reported_and_the_others_are_measured(
    tmp_path, monkeypatch, fail, in_setup, status, exit_status
):
    """Running out of memory is a result, and no failure."""

    def make(cell, mode, machine, graphs):
        if cell.model == 'transformer' or mode == 'plain':
            return lambda: None, frozenset()
        if in_setup:
            fail()
        calls = iter([lambda: None])  # the first call, of the set-up, works
        return (lambda: next(calls, fail)()), frozenset()

    monkeypatch.setitem(bench.MAKERS, 'train', make)
    path = tmp_path / 'report.json'
    assert run_main('--suite=train', f'--out={path}') == exit_status
    _, rows = read_report(path)
    failed = rows.pop(('train', 'recurrent', 'eager'))
    assert failed['status'] == failed['median'] == status
    assert [row['status'] for row in rows.values()] == 3 * ['ok']


@pytest.mark.parametrize('name', ['report.json', 'report.md'])
def test_another_report_is_not_overwritten(tmp_path, name):
    (tmp_path / name).write_text('kept')
    message = f'{name} exists: choose another name'
    assert_refused(message, run_main, f'--out={tmp_path}/report.json')
    assert (tmp_path / name).read_text() == 'kept'


REFUSED = [
    ('--out=speed.md', "out = 'speed.md': names a file of JSON"),
    ('--modes=slow', 'expected some of plain, eager, compiled'),
    ('--modes=eager,no_loss', 'nothing measured here uses kernels: expected some of plain, eager'),
    ('--tokens_per_update=30', 'must be a multiple of 4 x C = 16'),
    ('--n_embd=7', 'n_embd'),
    ('--shapes=2,0', 'expected groups of 2 positive integers'),
    ("--shapes=('a',8)", 'expected groups of 2 positive integers'),
    ('--contexts=64,(128,256)', 'expected numbers'),
]


@pytest.mark.parametrize('argument, message', REFUSED)
def test_wrong_settings_are_refused_before_anything_is_measured(
    tmp_path, monkeypatch, argument, message
):
    monkeypatch.chdir(tmp_path)
    assert_refused(message, run_main, argument)
    assert not list(tmp_path.iterdir())


# ---- CUDA graphs ----


def test_a_row_says_what_ran_as_a_cuda_graph_in_its_cell_alone():
    """A refusal of one cell is neither hidden by an earlier one nor kept for the next."""
    try:
        bench.captures.update({'train': '', 'change weights': '', 'score': 'OutOfMemoryError'})
        assert bench.graphs_used() == 'train, change weights; score eager: OutOfMemoryError'
        apply_settings(*SMALL)
        machine = bench.Machine(0, 1, 'cpu', torch.float32)
        bench.set_up(Cell('decode', 'recurrent', 1, 2, 128, 4, 2), 'eager', machine, {})
        assert bench.graphs_used() == 'none'
    finally:
        bench.captures.clear()


# ---- ranks ----


def bench_as_rank(path):
    """Run bench.py as one of two ranks, on the second of which a cell fails; return the status."""
    make = bench.MAKERS['decode']

    def make_or_fail(cell, mode, machine, graphs):
        if machine.rank == 1 and cell.model == 'transformer':
            no_memory()
        return make(cell, mode, machine, graphs)

    bench.MAKERS['decode'] = make_or_fail
    return run_main('--modes=eager', f'--out={path}')


def test_ranks_train_together_and_each_decodes(tmp_path):
    path = tmp_path / 'report.json'
    assert run_ranks(2, bench_as_rank, path) == [1, 0]
    report, rows = read_report(path)
    train, decode = rows['train', 'recurrent', 'eager'], rows['decode', 'recurrent', 'eager']
    assert report['world'] == 2 and train['status'] == decode['status'] == 'ok'
    assert train['all_gpus'] == pytest.approx(2 * train['median']) and train['B'] == 2
    assert 'all_gpus' not in decode
    assert rows['decode', 'transformer', 'eager']['status'] == 'failed on another rank'

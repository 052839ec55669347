"""Test paper/figures.py on folders of runs, that results/ can be recomputed from its tables, and
the rule of the registered study."""

import itertools
import json
import math
import sys

import numpy as np
import pandas
import pytest
from PIL import Image
from small_runs import assert_refused

from paper import figures
from paper.figures import runs
from paper.studies import depth, depth_agents, initial_scale, tables

SIZES = {'n_layer': 1, 'n_expert': 1, 'n_embd': 64, 'seed': 1}


def write_lm(folder, *losses, **settings):
    """Write the folder of a run with these validation losses."""
    settings = {'arch': 'experts', 'recurrent': True, 'finished': True, **SIZES, **settings}
    log = [{'step': k, 'tokens': 10 * k, 'seconds': k, 'val_loss': x} for k, x in enumerate(losses)]
    folder.mkdir(parents=True)
    (folder / 'config.json').write_text(json.dumps(settings))
    (folder / 'log.jsonl').write_text(''.join(json.dumps(record) + '\n' for record in log))


def frame_of(plan='plan', model='ConvLSTM', **columns):
    """Return a frame of recurrent runs."""
    cell = {'plan': plan, 'model': model, 'kind': 'recurrent', **SIZES}
    return pandas.DataFrame(cell | columns)


def bars_of(figure):
    """Return {label of a line: [(y, half of its error bar), ...]} of a figure's first panel."""
    found = {}
    for container in figure.axes[0].containers:
        line, _, (bars,) = container
        errors = [np.ptp(x[:, 1]) / 2 if len(x) else math.nan for x in bars.get_segments()]
        found[container.get_label()] = [*zip(line.get_ydata(), errors, strict=True)]
    return found


# ---- the frame of runs ----


def test_each_run_is_a_row_with_its_settings_last_and_best_values(tmp_path):
    folder = tmp_path / 'lm/a'
    write_lm(folder, 3.0, 1.5, 1.75, recurrent=False, betas=[0.8, 0.95])
    with open(folder / 'log.jsonl', 'a') as file:
        file.write('{"step": 7, "train_loss": 1.25, "seconds": 4.0}')
    write_lm(tmp_path / 'lm/started', finished=False)
    expected = {
        **{'model': 'Transformer', 'plan': 'lm', 'kind': 'non-recurrent', 'n_embd': 64},
        **{'betas': '[0.8, 0.95]', 'finished': True, 'step': 7, 'seconds': 4.0, 'loss': 1.75},
        **{'last_val_loss': 1.75, 'best_val_loss': 1.5, 'last_train_loss': 1.25},
    }
    ended, started = runs([tmp_path, folder]).to_dict('records')  # given twice, it counts once
    assert expected.items() <= ended.items()
    assert not started['finished'] and math.isnan(started['loss'])


# ---- what a run is judged by ----


def test_an_agent_is_judged_by_the_episodes_of_its_last_five_log_intervals():
    """The last 50 of 64 updates begin in the third line, whose episodes all count: nobody knows
    which of them ended in these updates. The second line is an evaluation."""
    log = pandas.DataFrame(
        {
            'step': [10, 17, 20, 30, 40, 50, 60, 64],
            'episodes': [5, None, 8, 1, 2, 0, 4, 3],
            'episodic_return': [-9, None, 20, 30, 40, None, 60, 64],
        }
    )
    expected = np.average([20, 30, 40, 60, 64], weights=[8, 1, 2, 4, 3])
    assert figures.judged_return(log, 10) == pytest.approx(expected)
    assert math.isnan(figures.judged_return(log[log['episodes'] == 0], 10))


def test_the_first_seed_chooses_a_value_and_the_others_are_reported(capsys):
    """Each allocation has a best rate of its own."""
    frame = frame_of(
        n_layer=[1, 1, 1, 1, 2, 2, 2, 2],
        seed=[1, 1, 2, 2, 1, 1, 2, 3],
        learning_rate=[0.1, 0.2, 0.1, 0.2, 0.1, 0.2, 0.1, 0.1],
        loss=[2, 1, 0, 3, 1, 2, 5, 4],
    )
    assert list(figures.best_values(frame)['loss']) == [3, 5, 4]
    assert not capsys.readouterr().out
    rare = frame.assign(learning_rate=[0.1, 0.3, 0.1, 0.2, 0.1, 0.2, 0.1, 0.1], folder='a')
    assert list(figures.best_values(rare)['loss']) == [5, 4]
    line = 'left out: the models of a: no other seed has run with learning_rate = 0.3, '
    assert capsys.readouterr().out.startswith(line)
    assert list(figures.best_values(frame[frame['seed'] == 1])['loss']) == [1, 1]


def test_settings_that_vary_are_found_and_kept_apart():
    """A setting that goes with the size does not vary, nor do folders and speeds."""
    frame = frame_of(
        n_layer=[1] * 4 + [2] * 4,
        window=[64] * 4 + [128] * 4,
        dtype=['a', 'a', 'b', 'b'] * 2,
        threads=[1, 1, 2, 2] * 2,
        seed=[1, 2] * 4,
        folder=list('abcdefgh'),
        loss=1.0,
    )
    assert figures.varied(frame) == ['dtype']
    assert list(figures.value_table(frame)['n']) == [2, 2, 2, 2]
    assert_refused('these runs differ in dtype', figures.FIGURES['allocations'], frame)
    twice = pandas.concat([frame, frame[:1]])
    assert_refused('a: another folder holds a run of the same', figures.varied, twice)


def test_an_allocation_with_fewer_seeds_is_not_the_best():
    frame = frame_of(n_layer=[1, 2, 2, 4, 4], seed=[1, 1, 2, 1, 2], loss=[6, 8, 8, 7, 7])
    assert list(figures.value_table(frame)['best']) == [False, False, True]


# ---- figures ----


@pytest.mark.parametrize(
    'name, x, error',
    [
        ('allocations', 'n_layer', 1),
        ('scaling', 'n_expert', 3**-0.5),
        ('ablation', 'radius', 3**-0.5),
    ],
)
def test_figures_have_means_and_errors_by_increasing_x(name, x, error):
    """Standard deviations of allocations, and standard errors otherwise, of three seeds."""
    rates = [0.1] * 3 + [0.2] * 3  # tuned
    frame = frame_of(
        seed=[1, 2, 3] * 2,
        loss=[5, 7, 9, 1, 2, 3],
        learning_rate=rates,
        **{x: [10] * 3 + [9] * 3},
    )
    assert name in figures.fitting(frame)
    (line,) = bars_of(figures.FIGURES[name](frame)).values()
    assert line == [(2, pytest.approx(error)), (7, pytest.approx(2 * error))]


def test_returns_stand_beside_the_papers():
    """Those of allocations, and the best ones with at most L layers."""
    frame = frame_of('sokoban-small', n_layer=[1, 2, 4], **{'return': [1, 3, 2]})
    published = bars_of(figures.FIGURES['allocations'](frame))['d = 64, published']
    assert published[1] == (8.947, pytest.approx(0.26173))
    bars = bars_of(figures.saturation(frame))
    found = {label: [y for y, _ in points] for label, points in bars.items()}
    assert found == {
        'sokoban-small, recurrent': [1, 3, 3],
        'sokoban-small, recurrent, published': [7.75, 8.947, 9.212, 9.212, 9.212],
    }


# ---- tables and the command ----


def main(monkeypatch, *argv):
    monkeypatch.setattr(sys, 'argv', ['figures', *map(str, argv)])
    figures.main()


def test_the_command_draws_and_tabulates_what_has_finished(tmp_path, monkeypatch, capsys):
    """In a folder whose name has characters that are special to shells, Markdown, matplotlib. A
    learning curve starts at a quarter of the training."""
    plan = tmp_path / 'a[1],$x_{|'
    for E, recurrent, seed in itertools.product((1, 2), (True, False), (1, 2)):
        settings = {'n_layer': 4 // E, 'n_expert': E, 'recurrent': recurrent, 'seed': seed}
        write_lm(plan / f'{E}{recurrent}{seed}', 9.0, 8.0, 7.0, 6.0, E + seed, **settings)
    write_lm(plan / 'unfinished', 0.0, finished=False)
    main(monkeypatch, *plan.iterdir())
    assert '8 of 9 runs have finished' in capsys.readouterr().out
    for name in ('allocations', 'saturation', 'learning'):
        assert Image.open(plan / f'{name}_Transformer.png').width > 500
    assert len(pandas.read_csv(plan / 'runs.csv')) == 8
    table = (plan / 'table_Transformer.md').read_text()
    assert r'Transformer|a[1],$x_{\||recurrent|4|1|64|2.5|0.70711|0.5|2|True' in table
    assert 'Best L, 10,000 bootstrap draws' in table
    curves = bars_of(figures.learning(runs(plan).query('finished')))
    assert [y for y, _ in curves['L = 4, E = 1, d = 64']] == [8.0, 7.0, 6.0, 2.5]


def test_solve_rates_are_those_of_the_best_agents_beside_the_papers(monkeypatch):
    rates = {('a', 'best'): 0.1, ('b', 'best'): 0.2}

    def evaluate(agent, levels, device, time_limit):
        assert levels == ('there', 'unfiltered-test') and time_limit == 20
        return {'solve_rate': rates[agent]}

    monkeypatch.setattr(figures, 'load_agent', lambda folder, which, device: (folder, which))
    monkeypatch.setattr(figures, 'load_levels', lambda *names: (names, ''))
    monkeypatch.setattr(figures, 'evaluate', evaluate)
    frame = frame_of(
        'sokoban-small', seed=[1, 2], folder=['a', 'b'], levels_dir='there', time_limit=20
    ).assign(**{'return': 1.0})
    table = figures.solve_table(frame, 'unfiltered-test')
    percent = list(table['unfiltered-test, percent'])
    assert percent[:5] == [pytest.approx(15), 86.03, 91.93, 92.7, 86.13]
    assert 'DRC(3,3), 2B' in list(table['model'])


def test_what_cannot_be_drawn_is_refused(tmp_path, monkeypatch):
    assert_refused('holds no run,', main, monkeypatch, tmp_path)
    write_lm(tmp_path / 'a', 1.0, finished=False)
    assert_refused('no run has finished', main, monkeypatch, tmp_path)
    write_lm(tmp_path / 'b', 1.0, seed=2)
    for option, message in (
        ('--figure=ablation', 'these runs differ in no setting'),
        ('--levels=unfiltered-test', '--levels: Transformer is no agent'),
        ('--only=depth == 2', "--only='depth == 2': .*name 'depth' is not defined"),
    ):
        assert_refused(message, main, monkeypatch, tmp_path, option)


# ---- results and studies ----


def test_the_numbers_of_the_results_are_computed_from_their_tables(monkeypatch, capsys):
    """What stands in README.md and in results/README.md, some of every study."""
    drawn = []
    monkeypatch.setattr(tables, 'save_figure', lambda figure, path: drawn.append(path.stem))
    tables.main()
    printed = ' '.join(capsys.readouterr().out.split())
    for line in (
        'mean 1.1147 1.1039 1.1050 1.1077 1.1521 1.1387 1.1341 1.1376',
        'confirmed: smaller with recurrence in 99.5% of draws, larger in 0.0%',
        'r1 0.16 r16 0.02 r2 0.08',
        'r4 1.0533 0.0013 3.0',
        'smaller with recurrence in 45.6% of draws, larger in 5.1%',
        '-1.7948 ± 0.5509, -3.26 standard errors',
        '-0.6940 ± 0.1043, -6.66 standard errors',
        'mean -0.6778 0.5131 -1.9174',
        'recurrent smaller in 79.6%, equal in 20.4%',
        'r2 1.1046 0.0010 5.0',
        'n8 1.1352 0.0009 5.0',
        'equal in 0.0%, with errors of a t distribution smaller in 98.5%',
        'equal in 0.0%, with errors of a t distribution smaller in 97.0%',
        'n8 - r4 0.0692 0.0065 3.0',
        'n8 - r4 0.0224 0.0008 2.0',
        'n8 - r4 0.0479 0.0013 3.0',
        'ahead by 0.0069 (linear), 0.0109 (log)',
        'r4, resets - r4 -0.5192 0.0409 3.0',
        'r2mean expert - r2 -0.0088 0.0014 3.0',
        'r2 one - r2 sqrt_experts -0.0013 0.0011 3.0',
        'recurrent smaller in 56.6%, equal in 33.9%',
        '0.0320 0.0014 5 7.05 MB 128',
    ):
        assert line in printed, line
    assert drawn == ['depth', 'lengths', 'by_position', 'convlstm', 'boxoban']


@pytest.mark.parametrize(
    'leading, t, word',
    [(False, 2.2, 'undecided'), (False, 2.5, 'confirmed'), (True, 2.5, 'refuted')],
)
def test_the_registered_study_decides_at_95_percent_of_paired_draws(leading, t, word):
    """The best L is 4, but for one kind L = 8 leads by t standard errors. With four blocks, 95% of
    Student's distribution lie below t = 2.353. Blocks differ much more, which cancels."""
    losses = dict.fromkeys(depth.ALLOCATIONS, 90)
    noise = np.array([-3, -1, 1, 3])
    losses |= {(True, 4): 1, (False, 4): 1, (leading, 8): 1}
    losses[leading, 4] = 1 + noise + t * (5 / 3) ** 0.5
    blocks = pandas.DataFrame(losses, depth.SEEDS).add([0, 50, 10, 30], axis=0)
    assert depth.verdict(blocks).startswith(word)


def test_only_whole_blocks_of_the_registered_study_count(tmp_path, monkeypatch, capsys):
    """Finished runs of the plan are kept, each once, until the others of their block are there."""
    table = tmp_path / 'depth.csv'
    monkeypatch.setattr(sys, 'argv', ['depth', str(tmp_path / 'out'), 'some CPU'])
    write_lm(tmp_path / 'out/former-depth/1', 1.5, recurrent=True, n_layer=1, seed=11)
    common = {'seed': 11, 'learning_rate': 0.1, 'code': {'commit': 'abc'}}
    for recurrent, L in depth.ALLOCATIONS:
        write_lm(
            tmp_path / f'out/depth/{recurrent}-{L}', 1.5, recurrent=recurrent, n_layer=L, **common
        )
        depth.main(table, lambda: depth.report(table))
    counts = [line for line in capsys.readouterr().out.splitlines() if 'blocks' in line]
    assert counts == 7 * ['0 of 4 blocks'] + ['1 of 4 blocks']
    depth.main(table, lambda: depth.report(table))
    assert '1 of 4 blocks' in capsys.readouterr().out
    assert len(pandas.read_csv(table)) == 8
    # Another block of a seed does not replace the first.
    depth.add(table, str(tmp_path / 'out'), 'another CPU')
    assert len(pandas.read_csv(table)) == 16
    assert [*depth.whole_blocks(table, depth.ALLOCATIONS).index] == [(11, 'some CPU')]


def test_the_registered_studies_of_agents_judge_returns(tmp_path, monkeypatch, capsys):
    """The best L is 1 with recurrence and 4 without; the former initial scale costs a return of 1.
    A seed that was not registered does not count."""
    rows = [
        {'seed': seed, 'recurrent': recurrent, 'n_layer': L, 'processor': 'some CPU'}
        | {'return': seed + (-L if recurrent else L)}
        for seed in (10, *depth.SEEDS)
        for recurrent, L in depth_agents.ALLOCATIONS
    ]
    table = pandas.DataFrame(rows).sample(frac=1, random_state=1)
    for module, change in ((depth_agents, 0), (initial_scale, -1)):
        monkeypatch.setattr(module, 'TABLE', tmp_path / f'{module.__name__}.csv')
        part = table[table['recurrent'] | (change == 0)].copy()
        part['return'] += change + change * part['seed'] / 1000
        part.to_csv(module.TABLE, index=False)
    depth_agents.report()
    initial_scale.report()
    printed = capsys.readouterr().out
    assert 'confirmed: smaller with recurrence in 100.0%' in printed
    assert '-4.6667 ± 0.0000' in printed  # recurrence minus none
    assert '-1.0125 ± 0.0006' in printed and printed.endswith('significant\n')

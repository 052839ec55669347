"""Test paper/figures.py on folders of runs, and that results/ can be recomputed from its tables."""

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
from paper.studies import recompute


def write_run(folder, log, **settings):
    """Write a run's folder. Settings: those of a small recurrent ConvLSTM, and these."""
    sizes = {'arch': 'convlstm', 'recurrent': True, 'n_layer': 1, 'n_expert': 1, 'n_embd': 64}
    settings = {**sizes, 'seed': 1, 'log_interval': 10, 'finished': True, **settings}
    folder.mkdir(parents=True)
    (folder / 'config.json').write_text(json.dumps(settings))
    (folder / 'log.jsonl').write_text(''.join(json.dumps(record) + '\n' for record in log))
    return folder


def agent_line(step, returns, **more):
    return {'step': step, 'env_steps': 100 * step, 'episodes': 4, 'episodic_return': returns} | more


def write_agent(folder, value, **settings):
    """Write the run of an agent whose judged return is `value`."""
    lines = [agent_line(step, value, return_1000=value) for step in range(10, 60, 10)]
    return write_run(folder, lines, **settings)


def write_lm(folder, loss, **settings):
    """Write the run of a language model whose last validation loss is `loss`."""
    log = [{'step': k, 'tokens': 1000 * k, 'val_loss': loss + 4 - k} for k in range(5)]
    return write_run(folder, log, arch='experts', **settings)


def write_all(write, root, values, *names):
    """Write a run for each {settings: value}; names: of the settings."""
    for key, value in values.items():
        write(root / '_'.join(map(str, key)), value, **dict(zip(names, key, strict=True)))
    return runs(root)


def bars_of(figure, panel=0):
    """Return {label of a line: [(y, half of its error bar), ...]} of a panel of a figure."""
    found = {}
    for container in figure.axes[panel].containers:
        line, _, (bars,) = container
        errors = [np.ptp(x[:, 1]) / 2 if len(x) else math.nan for x in bars.get_segments()]
        found[container.get_label()] = [*zip(line.get_ydata(), errors, strict=True)]
    return found


# ---- the frame of runs ----


def test_runs_has_a_row_for_each_run_below_the_folders_given(tmp_path):
    """Brackets, commas, blanks and dollar signs are parts of names; a folder given twice counts
    once; best/ has a config.json and is no run."""
    names = ['a[1]', 'b,c', 'd e', '$x_{']
    for seed, name in enumerate(names):
        folder = write_agent(tmp_path / 'plan' / name, seed, seed=seed)
        (folder / 'best').mkdir()
        (folder / 'best' / 'config.json').write_text('{}')
    frame = runs([tmp_path / 'plan', tmp_path / 'plan' / 'a[1]'])
    assert list(frame['folder']) == [str(tmp_path / 'plan' / name) for name in names]
    assert list(frame['return']) == [0, 1, 2, 3] and set(frame['plan']) == {'plan'}


def test_a_row_has_settings_last_and_best_values(tmp_path):
    log = [
        {'step': 0, 'tokens': 0, 'val_loss': 3.0},
        {'step': 5, 'tokens': 50, 'val_loss': 1.5, 'train_loss': 2.0, 'seconds': 1.0},
        {'step': 6, 'tokens': 60, 'val_loss': 1.75},
        {'step': 7, 'tokens': 70, 'train_loss': 1.25, 'seconds': 4.0},
    ]
    folder = write_run(tmp_path / 'lm/a', log, arch='experts', recurrent=False, betas=[0.8, 0.95])
    write_run(tmp_path / 'lm/started', [], finished=False)
    expected = {
        **{'model': 'Transformer', 'plan': 'lm', 'kind': 'non-recurrent', 'n_embd': 64},
        **{'betas': '[0.8, 0.95]', 'finished': True, 'step': 7, 'seconds': 4.0, 'loss': 1.75},
        **{'last_val_loss': 1.75, 'best_val_loss': 1.5, 'last_train_loss': 1.25},
    }
    frame = runs(tmp_path).set_index('folder')
    assert expected.items() <= frame.loc[str(folder)].to_dict().items()
    assert math.isnan(frame.loc[str(tmp_path / 'lm/started'), 'loss'])
    assert list(figures.curves(folder)['val_loss'].dropna()) == [3.0, 1.5, 1.75]


# ---- what a run is judged by ----


def judge(lines, log_interval=10):
    return figures.judged_return(pandas.DataFrame(lines), log_interval)


def test_an_agent_is_judged_by_the_episodes_of_its_last_five_log_intervals():
    lines = [agent_line(step, -9.0) for step in (10, 20)]
    lines += [agent_line(30, 1.0, episodes=1), agent_line(40, 4.0, episodes=2)]
    lines += [agent_line(step, None, episodes=0) for step in (50, 60, 70)]
    assert judge(lines) == (1 * 1.0 + 2 * 4.0) / 3
    assert math.isnan(judge(lines[-3:]))


def test_a_shortened_last_line_counts_by_its_updates():
    """Of 54 updates the last 50 are 6 of the first line's 10, and all of the others."""
    lines = [agent_line(step, float(step), episodes=8) for step in (10, 20, 30, 40, 50)]
    lines.append(agent_line(54, 54.0, episodes=3))
    weights = np.array([0.6 * 8, 8, 8, 8, 8, 3])
    assert judge(lines) == pytest.approx(weights @ [10, 20, 30, 40, 50, 54] / weights.sum())


def test_evaluations_do_not_change_how_an_agent_is_judged():
    lines = {step: agent_line(step, float(step), episodes=step) for step in range(10, 101, 10)}
    expected = judge(list(lines.values()))
    for step in range(7, 101, 7):  # step 70 has both
        lines[step] = lines.get(step, {}) | {'step': step, 'eval_return': 1.0}
    assert judge([lines[step] for step in sorted(lines)]) == expected


def test_the_first_seed_chooses_a_value_and_the_others_are_reported(tmp_path):
    """Each allocation has a best rate of its own."""
    losses = {(1, 1, 0.1): 2.0, (1, 1, 0.2): 1.0, (1, 2, 0.1): 0.0, (1, 2, 0.2): 3.0}
    losses |= {(2, 1, 0.1): 1.0, (2, 1, 0.2): 2.0, (2, 2, 0.1): 5.0, (2, 3, 0.1): 4.0}
    frame = write_all(write_lm, tmp_path, losses, 'n_layer', 'seed', 'learning_rate')
    assert figures.varied(frame) == ['learning_rate']
    best = figures.best_values(frame)
    assert list(zip(best['n_layer'], best['learning_rate'], best['loss'], strict=True)) == [
        *((1, 0.2, 3.0), (2, 0.1, 5.0), (2, 0.1, 4.0))
    ]
    assert list(figures.best_values(frame[frame['seed'] == 1])['loss']) == [1.0, 1.0]


def test_settings_that_vary_are_found(tmp_path):
    """A setting that goes with the size or the kind does not vary, nor do folders and speeds."""
    for L, (dtype, threads), seed in itertools.product((1, 2), (('a', 1), ('b', 2)), (1, 2)):
        folder = tmp_path / f'{L}_{dtype}_{seed}'
        more = {'out_dir': str(folder), 'command': str(folder), 'threads': threads}
        write_lm(folder, 1.0, n_layer=L, dtype=dtype, seed=seed, window=64 * L, **more)
    frame = runs(tmp_path)
    assert figures.varied(frame) == ['dtype']
    assert list(figures.value_table(frame)['n']) == [2, 2, 2, 2]
    assert_refused('these runs differ in dtype', figures.FIGURES['allocations'], frame)
    write_lm(tmp_path / 'again', 1.0, dtype='a', window=64)
    assert_refused('another folder holds a run of the same', figures.varied, runs(tmp_path))


def test_an_allocation_with_fewer_seeds_is_not_the_best(tmp_path):
    values = {(1, 1): 9, (2, 1): 7, (2, 2): 7, (4, 1): 8, (4, 2): 8}
    frame = write_all(write_agent, tmp_path, values, 'n_layer', 'seed')
    assert list(figures.best_cells(figures.cells(frame), ['kind'])['n_layer']) == [4]


def test_the_best_depths_and_their_certainty(tmp_path):
    values = {(True, 1): 3.0, (True, 2): 5.0, (False, 1): 1.0, (False, 2): 5.0, (False, 4): 9.0}
    values = {(*k, s): x + 0.01 * s for k, x in values.items() for s in (1, 2, 3)}
    frame = write_all(write_agent, tmp_path, values, 'recurrent', 'n_layer', 'seed')
    assert figures.best_depths(frame) == (
        'Best L, 10,000 bootstrap draws of seeds: recurrent 2 (95%: 2 to 2), non-recurrent 4 '
        '(95%: 4 to 4), recurrent smaller in 100.0%, equal in 0.0%, with errors of a t '
        'distribution smaller in 100.0%.'
    )
    assert figures.best_depths(frame[frame['seed'] == 1]) == ''
    assert figures.best_depths(frame[frame['recurrent']]) == ''


# ---- figures ----


def test_allocations_have_standard_deviations_and_the_papers_returns(tmp_path):
    frame = write_all(write_agent, tmp_path / 'sokoban-small', {(1,): 4.0, (2,): 6.0}, 'seed')
    frame['n_embd'] = 128
    bars = bars_of(figures.FIGURES['allocations'](frame))
    assert bars['d = 128'] == [(5.0, pytest.approx(2**0.5))]
    assert bars['d = 128, published'] == [(7.75, pytest.approx(0.0076**0.5, rel=1e-3))]
    assert [y for y, _ in bars['d = 64, published']] == [7.664, 8.947, 9.212]


def test_scaling_has_standard_errors(tmp_path):
    losses = {(E, seed): seed / E for E in (1, 2, 4) for seed in (1, 2, 3)}
    frame = write_all(write_lm, tmp_path, losses, 'n_expert', 'seed')
    assert figures.fitting(frame) == ['scaling']
    expected = [(2 / E, pytest.approx(3**-0.5 / E)) for E in (1, 2, 4)]
    assert bars_of(figures.FIGURES['scaling'](frame)) == {'L = 1': expected}


def test_saturation_is_the_best_value_of_at_most_L_layers(tmp_path):
    for plan in ('sokoban-small', 'sokoban-medium'):
        values = {(1,): 1.0, (2,): 3.0, (4,): 2.0}
        write_all(write_agent, tmp_path / plan, values, 'n_layer')
    bars = bars_of(figures.saturation(runs(tmp_path)))
    assert [y for y, _ in bars['sokoban-small, recurrent']] == [1, 3, 3]
    best = [7.75, 8.947, 9.212, 9.212, 9.212]
    assert [y for y, _ in bars['sokoban-small, recurrent, published']] == best
    assert bars['sokoban-medium, recurrent, published'][-1][0] == 9.778


def test_an_ablation_has_the_values_of_a_setting_in_order(tmp_path):
    values = {(x, seed): x + seed for x in (10, 9, 1) for seed in (1, 2)}
    frame = write_all(write_agent, tmp_path, values, 'radius', 'seed')
    assert figures.fitting(frame) == ['ablation']
    figure = figures.ablation(frame)
    assert list(bars_of(figure).values()) == [[(2.5, 0.5), (10.5, 0.5), (11.5, 0.5)]]
    assert [text.get_text() for text in figure.axes[0].get_xticklabels()] == ['1', '9', '10']


def test_learning_curves_are_of_the_best_allocations_in_their_unit(tmp_path):
    values = {(1, 1): 1.0, (1, 2): 3.0, (2, 1): 5.0, (2, 2): 5.0}
    frame = write_all(write_lm, tmp_path, values, 'n_expert', 'seed')
    figure = figures.learning(frame.assign(tokenizer='bytes'))
    (line,) = bars_of(figure).values()
    assert [y for y, _ in line] == [5.0, 4.0, 3.0, 2.0]  # from a quarter on
    axes = figure.axes[0]
    labels = axes.get_xlabel(), axes.get_ylabel()
    assert labels == ('bytes', 'validation loss (nats per byte)')


# ---- tables and the command ----


def main(monkeypatch, *argv):
    monkeypatch.setattr(sys, 'argv', ['figures', *map(str, argv)])
    figures.main()


def test_the_command_draws_and_tabulates_what_has_finished(tmp_path, monkeypatch, capsys):
    """In a folder whose name has characters that are special to shells, Markdown, matplotlib."""
    plan = tmp_path / 'a[1],$x_{|'
    values = {(L, r, s): L + s for L in (1, 2) for r in (True, False) for s in (1, 2)}
    write_all(write_lm, plan, values, 'n_layer', 'recurrent', 'seed')
    write_lm(plan / 'unfinished', 0.0, finished=False)
    main(monkeypatch, *plan.iterdir())
    assert '8 of 9 runs have finished' in capsys.readouterr().out
    for name in ('allocations', 'saturation', 'learning'):
        assert Image.open(plan / f'{name}_Transformer.png').width > 500
    assert len(pandas.read_csv(plan / 'runs.csv')) == 8
    table = (plan / 'table_Transformer.md').read_text()
    assert r'Transformer|a[1],$x_{\||recurrent|1|1|64|2.5|0.70711|0.5|2|True' in table
    assert 'Best L, 10,000 bootstrap draws' in table


def test_solve_rates_are_those_of_the_best_agents_beside_the_papers(tmp_path, monkeypatch):
    settings = {'levels_dir': 'there', 'time_limit': 20}
    values = {(1,): 1.0, (2,): 1.0}
    frame = write_all(write_agent, tmp_path / 'sokoban-small', values, 'seed').assign(**settings)
    calls = []

    def evaluate(agent, levels, device, time_limit):
        calls.append((*agent, *levels, time_limit))
        return {'solve_rate': len(calls) / 10}

    monkeypatch.setattr(figures, 'load_agent', lambda folder, which, device: (folder[-1], which))
    monkeypatch.setattr(figures, 'load_levels', lambda *names: (names, ''))
    monkeypatch.setattr(figures, 'evaluate', evaluate)
    (ours, *paper) = figures.solve_table(frame, 'unfiltered-test').to_dict('records')
    assert calls == [(seed, 'best', 'there', 'unfiltered-test', 20) for seed in '12']
    name = 'unfiltered-test, percent'
    assert (ours[name], ours['n']) == (pytest.approx(15), 2)
    assert len([row for row in paper if row['plan'] == 'sokoban-small']) == 5
    rates = {(row['model'], row['kind'], row['n_layer']): row[name] for row in paper}
    assert rates['ConvLSTM', 'recurrent', 4] == 92.7
    assert {row['model']: row[name] for row in paper}['DRC(3,3), 2B'] == 99.3


@pytest.mark.parametrize(
    'finished, options, message',
    [
        (False, [], 'no run has finished'),
        (None, [], 'holds no run,'),
        ('damaged', [], 'a/config.json: damaged'),
        (True, ['--figure=ablation'], 'these runs differ in no setting'),
        (True, ['--figure=nothing'], "argument --figure: invalid choice: 'nothing'"),
        (True, ['--levels=unfiltered-test'], '--levels: Transformer is no agent'),
        (True, ['--only=depth == 2'], "--only='depth == 2': .*name 'depth' is not defined"),
        (True, ['--only=n_layer == 2'], "--only='n_layer == 2': .*no run fulfills it"),
    ],
)
def test_what_cannot_be_drawn_is_refused(tmp_path, monkeypatch, finished, options, message):
    if finished is not None:
        folder = write_lm(tmp_path / 'a', 1.0, finished=finished)
        if finished == 'damaged':
            (folder / 'config.json').write_text('{"seed": ')
    assert_refused(message, main, monkeypatch, tmp_path, *options)


# ---- results ----


def test_the_numbers_of_the_results_are_computed_from_their_tables(monkeypatch, capsys):
    """What stands in README.md and in results/README.md, some of every study."""
    drawn = []
    monkeypatch.setattr(recompute, 'save_figure', lambda figure, path: drawn.append(path.stem))
    recompute.main()
    printed = ' '.join(capsys.readouterr().out.split())
    for line in (
        'r1 0.16 r16 0.02 r2 0.08',
        'r4 1.0533 0.0013 3.0',
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

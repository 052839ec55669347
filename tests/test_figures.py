"""Test paper/figures.py on folders of runs, and that results/ can be recomputed from its tables."""

import itertools
import json
import math
import subprocess
import sys

import numpy as np
import pandas
import pytest
from PIL import Image

import convlstm
from configurator import Mistake
from paper import figures
from paper.figures import runs
from paper.studies import recompute

ROOT = figures.PUBLISHED.parents[2]


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
    return write_run(folder, lines, eval_split='unfiltered-valid', **settings)


def write_text_run(folder, loss, **settings):
    """Write the run of a language model whose last validation loss is `loss`."""
    log = [{'step': k, 'tokens': 1000 * k, 'val_loss': loss + 4 - k} for k in range(5)]
    return write_run(folder, log, arch='experts', **settings)


def bars_of(figure, panel=0):
    """Return {label of a line: [(y, half of its error bar, NaN without one), ...]}."""
    found = {}
    for container in figure.axes[panel].containers:
        line, _, bars = container
        segments = bars[0].get_segments() if bars else [()] * len(line.get_ydata())
        errors = [(x[1][1] - x[0][1]) / 2 if len(x) else math.nan for x in segments]
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
    assert len(runs(tmp_path / 'plan' / 'a[1]')) == 1


def test_a_row_has_settings_last_and_best_values(tmp_path):
    log = [
        {'step': 0, 'tokens': 0, 'val_loss': 3.0},
        {'step': 5, 'tokens': 50, 'val_loss': 1.5, 'train_loss': 2.0, 'seconds': 1.0},
        {'step': 6, 'tokens': 60, 'val_loss': 1.75},
        {'step': 7, 'tokens': 70, 'train_loss': 1.25, 'seconds': 4.0},
    ]
    write_run(tmp_path / 'lm' / 'a', log, arch='experts', recurrent=False, betas=[0.8, 0.95])
    (row,) = runs(tmp_path).to_dict('records')
    assert (row['model'], row['plan'], row['kind']) == ('Transformer', 'lm', 'non-recurrent')
    assert (row['n_embd'], row['betas'], row['finished']) == (64, '[0.8, 0.95]', True)
    assert (row['loss'], row['last_val_loss'], row['best_val_loss']) == (1.75, 1.75, 1.5)
    assert (row['step'], row['seconds'], row['last_train_loss']) == (7, 4.0, 1.25)


def test_a_run_that_has_logged_nothing_is_a_row_without_values(tmp_path):
    write_agent(tmp_path / 'a', 2.0)
    write_run(tmp_path / 'b', [], finished=False)
    frame = runs(tmp_path)
    assert list(frame['finished']) == [True, False] and math.isnan(frame['return'][1])


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(Mistake, match='nothing: holds no run'):
        runs(tmp_path / 'nothing')


def test_a_damaged_config_is_refused(tmp_path):
    (write_agent(tmp_path / 'a', 1.0) / 'config.json').write_text('{"seed": ')
    with pytest.raises(Mistake, match='a/config.json: has no n_embd'):
        runs(tmp_path)


def test_curves_has_the_lines_of_all_logs(tmp_path):
    for name in 'ab':
        write_text_run(tmp_path / name, 1.0)
    frame = figures.curves(tmp_path)
    assert list(frame['folder'].unique()) == [str(tmp_path / name) for name in 'ab']
    assert list(frame['val_loss']) == 2 * [5, 4, 3, 2, 1]


# ---- what a run is judged by ----


def judge(lines, log_interval=10):
    return figures.judged_return(pandas.DataFrame(lines), log_interval)


def test_an_agent_is_judged_by_the_episodes_of_its_last_five_log_intervals():
    lines = [agent_line(step, -9.0) for step in (10, 20)]
    lines += [agent_line(30, 1.0, episodes=1), agent_line(40, 4.0, episodes=2)]
    lines += [agent_line(step, None, episodes=0) for step in (50, 60, 70)]
    assert judge(lines) == (1 * 1.0 + 2 * 4.0) / 3


def test_a_shortened_last_line_counts_by_its_updates():
    """Of 54 updates the last 50 are 6 of the first line's 10, and all of the others."""
    lines = [agent_line(step, float(step), episodes=8) for step in (10, 20, 30, 40, 50)]
    lines.append(agent_line(54, 54.0, episodes=3))
    weights = np.array([0.6 * 8, 8, 8, 8, 8, 3])
    assert judge(lines) == pytest.approx(weights @ [10, 20, 30, 40, 50, 54] / weights.sum())


@pytest.mark.parametrize('eval_interval', [7, 20, 1000])
def test_evaluations_do_not_change_how_an_agent_is_judged(eval_interval):
    lines = {step: agent_line(step, float(step), episodes=step) for step in range(10, 101, 10)}
    expected = judge(list(lines.values()))
    for step in range(eval_interval, 101, eval_interval):
        record = {'step': step, 'env_steps': 100 * step, 'eval_return': 1.0}
        lines[step] = lines.get(step, {}) | record
    assert judge([lines[step] for step in sorted(lines)]) == expected


def test_an_agent_without_an_episode_has_no_return():
    assert math.isnan(judge([agent_line(10, None, episodes=0)]))


def test_the_first_seed_chooses_a_value_and_the_others_are_reported(tmp_path):
    losses = {(1, 0.1): 2.0, (1, 0.2): 1.0, (2, 0.1): 0.0, (2, 0.2): 3.0, (3, 0.2): 4.0}
    for (seed, rate), loss in losses.items():
        folder = tmp_path / f'{seed}_{rate}'
        write_text_run(folder, loss, seed=seed, learning_rate=rate)
    frame = runs(tmp_path)
    best = figures.best_values(frame)
    assert list(zip(best['seed'], best['learning_rate'], best['loss'], strict=True)) == [
        (2, 0.2, 3.0),
        (3, 0.2, 4.0),
    ]
    assert list(figures.best_values(frame, seed=2)['loss']) == [2.0]
    alone = figures.best_values(frame[frame['seed'] == 1])
    assert list(alone['loss']) == [1.0]


def test_each_allocation_has_a_best_value_of_its_own(tmp_path):
    rates = {1: 0.1, 2: 0.4}  # L: the best
    for L, rate, seed in itertools.product(rates, (0.1, 0.2, 0.4), (1, 2)):
        loss = abs(rate - rates[L])
        folder = tmp_path / f'{L}_{rate}_{seed}'
        write_text_run(folder, loss, n_layer=L, seed=seed, learning_rate=rate)
    best = figures.best_values(runs(tmp_path))
    assert dict(zip(best['n_layer'], best['learning_rate'], strict=True)) == rates


def test_settings_that_vary_are_found(tmp_path):
    """A setting that goes with the size or the kind does not vary, nor do folders and speeds."""
    for L, z_loss, seed in itertools.product((1, 2), (0, 0.5), (1, 2)):
        folder = tmp_path / f'{L}_{z_loss}_{seed}'
        more = {'out_dir': str(folder), 'command': str(folder), 'window': 64 * L}
        write_text_run(folder, 1.0, n_layer=L, z_loss=z_loss, seed=seed, **more)
    assert figures.varied(runs(tmp_path)) == ['z_loss']


def test_runs_in_another_dtype_are_not_taken_for_seeds(tmp_path):
    for dtype in ('bfloat16', 'float32'):
        write_text_run(tmp_path / dtype, 1.0, dtype=dtype)
    frame = runs(tmp_path)
    assert figures.varied(frame) == ['dtype']
    assert list(figures.value_table(frame)['n']) == [1, 1]
    with pytest.raises(Mistake, match='these runs differ in dtype'):
        figures.allocations(frame)


def test_an_allocation_with_fewer_seeds_is_not_the_best(tmp_path):
    for L, seed, value in ((1, 1, 9), (2, 1, 7), (2, 2, 7), (4, 1, 8), (4, 2, 8)):
        write_agent(tmp_path / f'{L}_{seed}', value, n_layer=L, seed=seed)
    points = figures.summarize(runs(tmp_path), figures.CELL)
    assert list(figures.best_cells(points, ['kind'])['n_layer']) == [4]


def test_the_best_depths_and_their_certainty(tmp_path):
    values = {(True, 1): 3.0, (True, 2): 5.0, (False, 1): 1.0, (False, 2): 5.0, (False, 4): 9.0}
    for ((recurrent, L), value), seed in itertools.product(values.items(), (1, 2, 3)):
        folder = tmp_path / f'{recurrent}_{L}_{seed}'
        settings = {'recurrent': recurrent, 'n_layer': L, 'seed': seed}
        write_agent(folder, value + 0.01 * seed, **settings)
    frame = runs(tmp_path)
    assert figures.best_depths(frame) == (
        'Best L, 10,000 bootstrap draws of seeds: recurrent 2 (95%: 2 to 2), non-recurrent 4 '
        '(95%: 4 to 4), recurrent smaller in 100.0%, equal in 0.0%, with errors of a t '
        'distribution smaller in 100.0%.'
    )
    assert figures.best_depths(frame[frame['seed'] == 1]) == ''
    assert figures.best_depths(frame[frame['recurrent']]) == ''


# ---- figures ----


def test_the_allocations_have_standard_deviations_and_the_papers_returns(tmp_path):
    for seed, value in ((1, 4.0), (2, 6.0)):
        write_agent(tmp_path / 'sokoban-small' / f'{seed}', value, n_embd=128, seed=seed)
    bars = bars_of(figures.allocations(runs(tmp_path)))
    assert bars['d = 128'] == [(5.0, pytest.approx(2**0.5))]
    assert bars['d = 128, published'] == [(7.75, pytest.approx(0.0076**0.5))]
    assert [y for y, _ in bars['d = 64, published']] == [7.664, 8.947, 9.212]


def test_scaling_has_standard_errors(tmp_path):
    for E, (seed, loss) in itertools.product((1, 2, 4), ((1, 1.0), (2, 2.0), (3, 3.0))):
        write_text_run(tmp_path / f'{E}_{seed}', loss / E, n_expert=E, seed=seed)
    frame = runs(tmp_path)
    assert figures.fitting(frame) == ['scaling']
    expected = [(2 / E, pytest.approx(3**-0.5 / E)) for E in (1, 2, 4)]
    assert bars_of(figures.scaling(frame)) == {'L = 1': expected}


def test_saturation_is_the_best_value_of_at_most_L_layers(tmp_path):
    for L, value in ((1, 1.0), (2, 3.0), (4, 2.0)):
        for plan in ('sokoban-small', 'sokoban-medium'):
            write_agent(tmp_path / plan / f'{L}', value, n_layer=L)
    bars = bars_of(figures.saturation(runs(tmp_path / 'sokoban-small')))
    assert [y for y, _ in bars['recurrent']] == [1, 3, 3]
    assert [y for y, _ in bars['recurrent, published']] == [7.75, 8.947, 9.212, 9.212, 9.212]
    bars = bars_of(figures.saturation(runs(tmp_path)))
    assert [y for y, _ in bars['sokoban-medium']] == [1, 3, 3]
    assert bars['sokoban-medium, published'][-1][0] == 9.778


def test_an_ablation_has_differences_from_the_reference(tmp_path):
    values = {'mean': 1.0, 'softmax_mean': 2.0, 'sqrt_sum': 4.0}
    for (name, value), seed in itertools.product(values.items(), (1, 2)):
        folder = tmp_path / f'{name}_{seed}'
        write_agent(folder, value + seed, aggregation=name, seed=seed)
    frame = runs(tmp_path)
    assert figures.fitting(frame) == ['ablation']
    figure = figures.ablation(frame)
    ((points, change),) = zip(bars_of(figure).values(), bars_of(figure, 1).values(), strict=True)
    assert points == [(2.5, 0.5), (3.5, 0.5), (5.5, 0.5)]
    assert [y for y, _ in change] == [-3, -2, 0]
    assert figure.axes[1].get_title() == 'minus that of sqrt_sum'


def test_a_learning_curve_has_the_steps_that_all_seeds_have_logged(tmp_path):
    for seed, losses in ((1, {1: 3.0, 2: 2.0, 3: 1.5}), (2, {1: 5.0, 2: 3.0, 4: 1.0})):
        log = [{'step': k, 'tokens': 1e6 * k, 'val_loss': x} for k, x in losses.items()]
        write_run(tmp_path / f'{seed}', log, arch='experts', seed=seed)
    bars = bars_of(figures.learning(runs(tmp_path)))
    assert [y for y, _ in bars['L = 1, E = 1, d = 64']] == [4.0, 2.5]


def test_solve_rates_stand_beside_published_ones_of_as_many_steps(tmp_path):
    lines = [agent_line(step, 1.0, eval_solve_rate=step / 1e6) for step in (50_000, 100_000)]
    write_run(tmp_path / 'a', lines, eval_split='hard')
    figure = figures.solved(runs(tmp_path))
    bars = bars_of(figure)
    assert [y for y, _ in bars['L = 1, E = 1, d = 64']] == [0.05, 0.1]
    assert [y for y, _ in bars['DRC(1,1), published']][-1] == 0.0042  # at 10M of 50M steps
    assert 'on hard; published: on unfiltered-test' in ' '.join(figure.get_suptitle().split())


# ---- solve rates and tables ----


def write_levels(path, *rows):
    """Write one level for each row: empty rooms with this row at the top."""
    room = ['#' * 10, *['#        #'] * 7, '#' * 10]
    levels = ['\n'.join([f'; {i}', room[0], row, *room[1:]]) for i, row in enumerate(rows)]
    path.write_text('\n\n'.join(levels) + '\n')


@pytest.fixture
def trained(tmp_path):
    """Return the folder of a run with a best agent, and a file of two levels."""
    path = tmp_path / 'two.txt'
    write_levels(path, '# @$ .   #', '# @$  .  #')
    settings = {'levels_dir': '', 'time_limit': 20, 'split': 'generated'}
    folder = write_agent(tmp_path / 'plan' / 'a', 1.0, **settings)
    agent = convlstm.build_agent(convlstm.AgentConfig(n_layer=1, n_expert=1, n_embd=4))
    agent.save_pretrained(folder / 'best', config={'step': 7, 'settings': settings})
    return folder, path


def test_a_solve_rate_is_computed_once_for_the_same_levels_limit_and_step(trained, monkeypatch):
    folder, path = trained
    calls = []

    def fake_evaluate(agent, levels, device, time_limit):
        calls.append((len(levels), time_limit))
        return {'solve_rate': len(calls) / 10}

    monkeypatch.setattr(figures, 'evaluate', fake_evaluate)

    def change(file, **values):
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    assert figures.solve_rate(folder, str(path)) == figures.solve_rate(folder, str(path)) == 0.1
    change(folder / 'config.json', time_limit=30)
    assert figures.solve_rate(folder, str(path)) == 0.2
    change(folder / 'best' / 'config.json', step=8)
    assert figures.solve_rate(folder, str(path)) == 0.3
    write_levels(path, '# @$  .  #', '# @$ .   #')
    assert figures.solve_rate(folder, str(path)) == 0.4
    write_levels(path, '# @$ .   #')
    assert figures.solve_rate(folder, str(path)) == 0.5
    assert calls == [(2, 20), (2, 30), (2, 30), (2, 30), (1, 30)]


def test_a_solve_rate_is_that_of_the_best_agent(trained):
    folder, path = trained
    agent = convlstm.load_agent(folder)
    levels, _ = figures.load_levels('', str(path))
    rate = figures.evaluate(agent, levels, 'cpu', time_limit=20)['solve_rate']
    assert figures.solve_rate(folder, str(path)) == rate
    assert list(figures.solve_table(runs(folder), str(path))['percent']) == [100 * rate]


def test_a_table_of_solve_rates_has_the_papers_and_published_ones(tmp_path, monkeypatch):
    for seed in (1, 2):
        write_agent(tmp_path / 'sokoban-small' / f'{seed}', 1.0, seed=seed)
    monkeypatch.setattr(figures, 'solve_rate', lambda folder, split: int(folder[-1]) / 10)
    table = figures.solve_table(runs(tmp_path), 'unfiltered-test')
    ours, *others = table.to_dict('records')
    assert (ours['percent'], ours['seeds']) == (pytest.approx(15), 2)
    assert sum(row['plan'] == 'sokoban-small' for row in others) == 5
    rows = {(row['kind'], row['n_layer']): row['percent'] for row in others}
    assert rows['recurrent', 4] == 92.7
    fifty = [row for row in others if row['env_steps'] == 50_073_600]
    assert {row['kind']: row['percent'] for row in fifty}['DRC(1,1)'] == pytest.approx(45.04)


def test_the_table_of_values_marks_the_best_and_has_the_papers(tmp_path):
    for L, seed in itertools.product((1, 2), (1, 2)):
        write_agent(tmp_path / 'sokoban-small' / f'{L}_{seed}', L + seed, n_layer=L, seed=seed)
    table = figures.value_table(runs(tmp_path))
    ours = table[~table['published']]
    assert list(ours['return']) == [2.5, 3.5] and list(ours['variance']) == [0.5, 0.5]
    assert list(ours['best']) == [False, True]
    paper = table[table['published']].set_index(['n_layer', 'n_embd'])
    assert paper.loc[(4, 64), 'return'] == 9.212


# ---- the command ----


def test_the_command_draws_and_tabulates_what_has_finished(tmp_path):
    """In a folder whose name has characters that are special to shells and to matplotlib."""
    plan = tmp_path / 'a[1],$x_{'
    for L, recurrent, seed in itertools.product((1, 2), (True, False), (1, 2)):
        folder = plan / f'{L}_{recurrent}_{seed}'
        write_text_run(folder, L + seed, n_layer=L, recurrent=recurrent, seed=seed)
    write_text_run(plan / 'unfinished', 0.0, finished=False)
    command = [sys.executable, '-m', 'paper.figures', *plan.iterdir()]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert '8 of 9 runs have finished' in result.stdout
    for name in ('allocations', 'saturation', 'learning'):
        assert Image.open(plan / f'{name}_Transformer.png').width > 500
    assert len(pandas.read_csv(plan / 'runs.csv')) == 8
    table = (plan / 'table_Transformer.md').read_text()
    assert '| Transformer | a[1],$x_{ | recurrent | 1 | 1 | 64 | 2.5 |' in table
    assert 'Best L, 10,000 bootstrap draws' in table


@pytest.mark.parametrize(
    'finished, options, message',
    [
        (False, [], 'no run has finished'),
        (None, [], 'holds no run,'),
        (True, ['--figure=ablation'], 'these runs differ in no setting'),
        (True, ['--figure=solved'], 'have no eval_solve_rate'),
    ],
)
def test_runs_that_cannot_be_drawn_are_refused(tmp_path, monkeypatch, finished, options, message):
    if finished is not None:
        write_text_run(tmp_path / 'a', 1.0, finished=finished)
    monkeypatch.setattr(sys, 'argv', ['figures', str(tmp_path), *options])
    with pytest.raises(Mistake, match=message):
        figures.main()


# ---- results ----


def test_the_numbers_of_the_results_are_computed_from_their_tables(monkeypatch, capsys):
    """What stands in README.md and in results/README.md, some of every study."""
    monkeypatch.setattr(recompute, 'save_figure', lambda figure, path: None)
    recompute.main()
    printed = ' '.join(capsys.readouterr().out.split())
    for line in (
        "('recurrent', 1): 0.16, ('recurrent', 2): 0.08",
        'recurrent, 4: 1.0533 ± 0.0013 (3)',
        'recurrent smaller in 79.6%, equal in 20.4%',
        'recurrent, 2: 1.1046 ± 0.0010 (5)',
        'non-recurrent, 8: 1.1352 ± 0.0009 (5)',
        'equal in 0.0%, with errors of a t distribution smaller in 98.5%',
        'equal in 0.0%, with errors of a t distribution smaller in 97.0%',
        '1.72 MB, streams of 4,096, n8 - r4: 0.0692 ± 0.0065 (3)',
        '14.1 MB, streams of 4,096, n8 - r4: 0.0224 ± 0.0008 (2)',
        'other text, streams of 4,096, n8 - r4: 0.0479 ± 0.0013 (3)',
        'r4 - r4 with resets: 0.5192 ± 0.0409 (3)',
        "('recurrent', 'mean', 'expert', nan) - default: -0.0088 ± 0.0014 (3)",
        'L = 2, sqrt(E) - 1: 0.0013 ± 0.0011 (3)',
        'non-recurrent, solved in training, L = 4, E = 1 - L = 1, E = 4: 0.0844 ± 0.0044',
        'recurrent smaller in 56.6%, equal in 33.9%',
    ):
        assert line in printed

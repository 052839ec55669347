"""Test paper/figures.py on folders of runs, that results/ can be recomputed from its tables, and
the rule of the registered study."""

import itertools
import json
import math
import os
import shutil
import sys

import numpy as np
import pandas
import pytest
from PIL import Image
from processes import output_of, start
from small_runs import assert_refused

from paper import figures
from paper.figures import runs
from paper.plans import full_settings, runs_of
from paper.studies import depth, depth_agents, depth_rates, initial_scale, tables
from support.plots import chart

SIZES = {'n_layer': 1, 'n_expert': 1, 'n_embd': 64, 'seed': 1}


def write_lm(folder, *losses, **settings):
    """Write the folder of a run with these validation losses."""
    settings = {'arch': 'experts', 'recurrent': True, 'finished': True, **SIZES, **settings}
    log = [{'step': k, 'tokens': 10 * k, 'seconds': k, 'val_loss': x} for k, x in enumerate(losses)]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / 'config.json').write_text(json.dumps(settings))
    (folder / 'log.jsonl').write_text(''.join(json.dumps(record) + '\n' for record in log))


def start_of(commit='abc', name='CPU AMD EPYC, family 25 model 17'):
    """Return what config.json tells about a start of a run."""
    return {'device_name': name, 'code': {'commit': commit}}


def frame_of(plan='plan', model='ConvLSTM', **columns):
    """Return a frame of recurrent runs."""
    cell = {'plan': plan, 'model': model, 'kind': 'recurrent', **SIZES}
    return pandas.DataFrame(cell | columns)


def bars_of(figure):
    """Return {label of a line: [(y, half of its error bar), ...]} of a figure's first panel."""
    found = {}
    for container in figure.axes[0].containers:
        line, _, bars = container  # none of a single seed
        segments = bars[0].get_segments() if bars else [[]] * len(line.get_ydata())
        errors = [np.ptp(x[:, 1]) / 2 if len(x) else math.nan for x in segments]
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
    started, ended = runs([tmp_path, folder]).to_dict('records')  # given twice, it counts once
    assert expected.items() <= ended.items()
    assert not started['finished'] and math.isnan(started['loss'])


def test_a_folder_whose_name_is_not_utf8_is_refused_or_linked(tmp_path):
    """A setting may name it."""
    folder = tmp_path / os.fsdecode(b'\xff')
    write_lm(folder / 'a', 1.0, data_dir=str(folder))
    assert_refused('the name is not UTF-8: rename it, or make a link to it', runs, tmp_path)
    (tmp_path / 'link').symlink_to(folder)
    frame = runs(tmp_path / 'link')
    assert frame['data_dir'].item().endswith(r'\udcff') and frame['loss'].item() == 1


def test_no_name_is_not_the_current_folder_and_a_tilde_is_that_of_the_user(tmp_path, monkeypatch):
    write_lm(tmp_path / 'plan/1', 1.0)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv('HOME', str(tmp_path))
    assert len(runs('~/plan')) == 1
    assert_refused('the name of a folder is empty', runs, '')


def test_runs_behind_links_are_found(tmp_path, capsys):
    """The folder of a run or of a plan may be a link, and a link may lead back or nowhere. A run
    that is found twice has the plan in whose folder it was linked."""
    out, disk = tmp_path / 'out', tmp_path / 'out/disk'
    write_lm(out / 'plan/1', 1.0)
    for seed in (2, 3):
        write_lm(disk / f'runs/{seed}', float(seed), seed=seed)
        (out / f'plan/{seed}').symlink_to(disk / f'runs/{seed}')
    (out / 'linked').symlink_to('plan')
    (out / 'plan/up').symlink_to('..')
    (out / 'plan/4').symlink_to('gone')
    for folder in (out / 'plan', out / 'linked', [out / 'plan/1', out / 'plan/2', out / 'plan/3']):
        assert list(runs(folder)['loss']) == list(figures.curves(folder)['val_loss']) == [1, 2, 3]
    assert f'left out: {out}/plan/4: a link to nothing' in capsys.readouterr().out
    shutil.rmtree(out / 'linked', ignore_errors=True) or (out / 'linked').unlink()
    assert list(runs(out)['plan']) == 3 * ['plan']


@pytest.mark.parametrize('place', ['there', 'gone'])
def test_a_setting_that_a_run_lacks_has_its_default(tmp_path, place):
    """The trainer, or the copy that has a new setting, knows it. If that is gone, the value is
    unknown, which differs from any other."""
    copy = tmp_path / place / 'mine.py'
    (tmp_path / 'there').mkdir()
    (tmp_path / 'there/mine.py').write_text('n_layer = 2\nz_loss = 0.0\nlosses = (1, 2)\n')
    write_lm(tmp_path / 'a', 3.0, script='train_lm.py')
    new = {'script': 'mine.py', 'script_path': str(copy), 'losses': [1, 2]}
    write_lm(tmp_path / 'b', 2.0, seed=2, z_loss=0.0, **new)
    write_lm(tmp_path / 'c', 1.0, seed=3, z_loss=0.1, **new)
    frame = runs(tmp_path)
    assert list(frame['weight_decay']) == 3 * [0.01]
    figure = figures.ablation(frame)
    if place == 'there':
        (points,) = bars_of(figure).values()
        assert [y for y, _ in points] == [2.5, 1.0] and figures.varied(frame[:2]) == []
    else:
        ticks = [label.get_text() for label in figure.axes[0].get_xticklabels()]
        assert ticks == ['0.0', '0.1', 'unknown']


def test_the_last_value_is_that_of_the_last_evaluation(tmp_path, monkeypatch, capsys):
    """If that is no number, the run is named and not drawn, however good it was before."""
    nan = tmp_path / 'a'
    write_lm(nan, 3.0, 1.0, None, seed=1)
    with open(nan / 'log.jsonl', 'a') as file:
        file.write('{"step": 3, "train_loss": 1.0}\n')
    write_lm(tmp_path / 'b', 3.0, 2.5, 2.0, seed=2)
    frame = runs(tmp_path)
    assert math.isnan(frame['loss'][0]) and math.isnan(frame['last_val_loss'][0])
    assert frame['step'][0] == 3 and frame['best_val_loss'][0] == 1.0
    main(monkeypatch, tmp_path)
    assert f'left out: {nan}: its last loss is not a number' in capsys.readouterr().out
    assert list(pandas.read_csv(tmp_path / 'table_Transformer.csv')['loss']) == [2.0]


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
    log.loc[4, 'episodic_return'] = math.nan  # of episodes
    assert math.isnan(figures.judged_return(log, 10))


def test_the_first_seed_chooses_a_value_and_the_others_are_reported(capsys):
    """Each allocation has a best rate of its own."""
    frame = frame_of(
        n_layer=[1, 1, 1, 1, 2, 2, 2, 2],
        seed=[1, 1, 2, 2, 1, 1, 2, 3],
        learning_rate=[0.1, 0.2, 0.1, 0.2, 0.1, 0.2, 0.1, 0.1],
        loss=[2, 1, 0, 3, 1, 2, 5, 4],
    )
    assert list(figures.best_values(frame)['loss']) == [3, 5, 4]
    cell = 'ConvLSTM, plan, recurrent, L = {}, E = 1, d = 64'.format
    assert capsys.readouterr().out.splitlines() == [
        f'{cell(1)}: learning_rate = 0.2, the best of 2 for seed 1',
        f'{cell(2)}: learning_rate = 0.1, the best of 2 for seed 1',
    ]
    assert list(figures.best_values(frame[frame['seed'] == 1])['loss']) == [1, 1]


def test_groups_in_which_a_seed_is_missing_are_named(capsys):
    """No other seed has run at the best rate of L = 1, and seed 1 not at all with L = 2."""
    frame = frame_of(
        n_layer=[1, 1, 2, 2, 4, 4],
        seed=[1, 2, 2, 3, 1, 2],
        learning_rate=[0.3, 0.1, 0.1, 0.1, 0.1, 0.1],
        loss=[1, 2, 3, 4, 5, 6],
    )
    assert list(figures.best_values(frame)['loss']) == [6]
    cell = 'left out: ConvLSTM, plan, recurrent, L = {}, E = 1, d = 64: {}'.format
    printed = capsys.readouterr().out.splitlines()
    assert cell(1, 'no other seed has run with this learning_rate') in printed
    assert cell(2, 'seed 1, which chooses learning_rate, has no result') in printed


def test_settings_that_vary_are_found_and_kept_apart():
    """A setting that goes with the size does not vary, nor do folders and speeds, nor one folder
    of data that is written in two ways."""
    frame = frame_of(
        n_layer=[1] * 4 + [2] * 4,
        window=[64] * 4 + [128] * 4,
        dtype=['a', 'a', 'b', 'b'] * 2,
        threads=[1, 1, 2, 2] * 2,
        seed=[1, 2] * 4,
        folder=list('abcdefgh'),
        data_dir=['data', os.path.abspath('data')] * 4,  # the same folder
        loss=1.0,
    )
    assert figures.varied(frame) == ['dtype']
    assert list(figures.value_table(frame)['n']) == [2, 2, 2, 2]
    assert_refused('these runs differ in dtype', figures.FIGURES['allocations'], frame)
    twice = pandas.concat([frame, frame[:1]])
    assert_refused('a: another folder holds a run of the same', figures.varied, twice)


def test_an_allocation_with_fewer_seeds_counts_and_its_number_is_shown():
    frame = frame_of(n_layer=[1, 2, 2, 4, 4], seed=[1, 1, 2, 1, 2], loss=[6, 8, 8, 7, 7])
    table = figures.value_table(frame)
    assert list(table['best']) == [True, False, False] and list(table['n']) == [1, 2, 2]
    figure = figures.FIGURES['allocations'](frame)
    assert figure.get_suptitle().endswith('; 2 seeds each unless noted')
    assert [text.get_text() for text in figure.axes[0].texts] == ['1 seed']


def test_a_best_depth_needs_several_seeds_of_each_allocation():
    scores = pandas.DataFrame(
        {('recurrent', 1): [1, 2], ('recurrent', 2): [3, 4], ('recurrent', 4): [0, math.nan]}
    )
    assert figures.best_depths(scores)[-1] == ''
    scores['non-recurrent', 2] = [5, 6]
    assert figures.best_depths(scores)[-1] == ''  # there is nothing to compare it with
    scores['non-recurrent', 4] = [3, 4]
    smaller, larger, sentence = figures.best_depths(scores)
    assert (smaller, larger) == (1, 0)  # all of a seed shift alike
    assert 'best L 1 with recurrence (95%: 1 to 1) and 4 without (95%: 4 to 4)' in sentence
    assert 'compared: L = 1, 2 with and 2, 4 without' in sentence
    assert sentence.endswith('allocations with one seed, left out: 1')


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


def test_an_ablation_of_names_has_bars_in_the_papers_order():
    names = ['mean', 'softmax_l2', 'sqrt_sum', 'softmax_mean']
    figure = figures.ablation(
        frame_of(aggregation=2 * names, seed=4 * [1] + 4 * [2], loss=[*range(8)])
    )
    axes = figure.axes[0]
    ticks = [label.get_text() for label in axes.get_xticklabels()]
    assert ticks == ['sqrt_sum', 'mean', 'softmax_mean', 'softmax_l2']
    assert [bar.get_y() + bar.get_height() for bar in axes.patches] == [4, 2, 5, 3]
    assert axes.get_xlabel() == 'aggregation'
    figure = figures.ablation(frame_of(share_kv=[False, True], loss=[2.0, 1.0]))
    assert [bar.get_height() + bar.get_y() for bar in figure.axes[0].patches] == [1, 2]
    figure = figures.ablation(frame_of(n_expert=8, radius=[0, 2, -1], loss=[2.0, 1.0, 3.0]))
    assert figure.axes[0].get_xlabel() == 'number of neighbors' and not figure.axes[0].patches
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ['0', '2', '7']


def test_returns_stand_beside_the_papers():
    """Those of allocations, and the best ones with at most L layers."""
    frame = frame_of('sokoban-small', n_layer=[1, 2, 4], **{'return': [1, 3, 2]})
    published = bars_of(figures.FIGURES['allocations'](frame))['d = 64, published']
    assert published[1] == (8.947, pytest.approx(0.0685**0.5))
    bars = bars_of(figures.saturation(frame))
    found = {label: [y for y, _ in points] for label, points in bars.items()}
    assert found == {
        'sokoban-small, recurrent': [1, 3, 3],
        'sokoban-small, recurrent, published': [7.75, 8.947, 9.212, 9.212, 9.212],
    }


def test_plans_stand_in_the_order_given_and_recurrent_ones_first(tmp_path):
    """Panels of a kind stand in a row; lines and bars are ordered by their sizes."""
    folders = [tmp_path / plan for plan in ('small', 'medium', 'large')]
    for folder, recurrent, d in itertools.product(folders, (False, True), (64, 256, 1024)):
        for L in (16, 2):
            name = folder / f'{recurrent}-{d}-{L}'
            write_lm(name, 3.0, 2.0, recurrent=recurrent, n_embd=d, n_layer=L, n_expert=16 // L)
    frame = runs(folders)
    kinds = ('recurrent', 'non-recurrent')
    plans = [folder.name for folder in folders]
    assert [*frame.groupby(['plan', 'kind'], sort=False).groups] == [
        *itertools.product(plans, kinds)
    ]
    figure = figures.FIGURES['allocations'](frame)
    panels = [axes.get_title() for axes in figure.axes]
    assert panels == [f'{plan}, {kind}' for kind in kinds for plan in plans]
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ['d = 64', 'd = 256', 'd = 1024']
    figure = figures.learning(frame)
    assert figure.axes[0].get_title() == 'small, recurrent; E x d: 8x64, 1x64'
    assert figure.axes[0].get_xlabel() == 'tokens (millions)'


def test_plans_of_different_length_have_learning_curves_of_their_own(tmp_path):
    """In nats per byte or token, if they have different tokenizers."""
    write_lm(tmp_path / 'short' / 'a', 9.0, 8.0, 7.0, tokenizer='bytes')
    write_lm(tmp_path / 'long' / 'a', *range(20, 0, -1), tokenizer='gpt2')
    figure = figures.learning(runs([tmp_path / 'short', tmp_path / 'long']))
    assert [axes.get_title().partition(',')[0] for axes in figure.axes] == ['short', 'long']
    assert [len(axes.lines[0].get_xdata()) for axes in figure.axes] == [2, 15]
    assert figure.axes[0].get_ylabel() == 'validation loss (nats per byte or token)'


def test_widths_have_lines_of_their_own():
    sizes = itertools.product((1, 2), (1, 2, 4), (64, 128))
    n_layer, n_expert, n_embd = zip(*sizes, strict=True)
    frame = frame_of(n_layer=n_layer, n_expert=n_expert, n_embd=n_embd, seed=1, loss=range(12))
    lines = bars_of(figures.FIGURES['scaling'](frame))
    assert [*lines] == [f'L = {L}, d = {d}' for L in (1, 2) for d in (64, 128)]
    assert [y for y, _ in lines['L = 2, d = 128']] == [7, 9, 11]


def test_settings_that_go_with_the_size_or_changed_midway_are_named(tmp_path, monkeypatch, capsys):
    start = {'changes': {'max_iters': 3, 'eval_interval': 1, 'threads': 2}}
    write_lm(tmp_path / 'a', 3.0, n_layer=1, seed=1, dtype='bfloat16', starts=[{}, start])
    write_lm(tmp_path / 'b', 3.0, n_layer=2, seed=1, dtype='float32')
    main(monkeypatch, tmp_path)
    printed = capsys.readouterr().out
    assert f'{tmp_path / "a"} changed max_iters when it resumed\n' in printed
    assert ', recurrent: runs of different sizes also differ in dtype\n' in printed
    for L, seed, rate in itertools.product((1, 2), (1, 2), (0.1, 0.2)):
        settings = {'n_layer': L, 'seed': seed, 'learning_rate': rate}
        write_lm(tmp_path / 'tuned' / f'{L}{seed}{rate}', L * rate + (L == 1) / rate, **settings)
    main(monkeypatch, tmp_path / 'tuned')
    printed = capsys.readouterr().out
    assert 'learning_rate = 0.1, the best' in printed and 'learning_rate = 0.2, the best' in printed
    assert 'also differ' not in printed


def test_a_long_line_has_a_band_of_errors():
    points = [
        {'panel': '', 'line': f'L = {L}, init_from = ../a', 'x': x, 'y': L * x, 'std': 1.0}
        for L in (16, 2)
        for x in range(60)
    ]
    figure = chart(points, 'x', 'y', ('x', 'y'), 'title', 'std', to_scale=True)
    band, *others = figure.axes[0].collections
    assert band.get_datalim(figure.axes[0].transData).bounds[1] == -1
    assert figure.get_suptitle() == 'title; ± one standard deviation'
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ['L = 2, init_from = ../a', 'L = 16, init_from = ../a']


@pytest.mark.parametrize('name', ['short', 20 * 'long '])
def test_a_legend_leaves_room_for_the_lines(name):
    points = [
        {'panel': '', 'line': f'{name}{i}', 'x': x, 'y': x} for i in range(12) for x in (0, 1)
    ]
    figure = chart(points, 'x', 'y', ('x', 'y'), 'title')
    figure.draw_without_rendering()
    assert figure.axes[0].get_position().height * figure.get_figheight() > 3  # inches


# ---- tables and the command ----


def main(monkeypatch, *argv):
    monkeypatch.setattr(sys, 'argv', ['figures', *map(str, argv)])
    figures.main()


def test_the_command_draws_and_tabulates_what_has_finished(tmp_path, monkeypatch, capsys):
    """In a folder whose name has characters that are special to shells, Markdown, matplotlib. A
    learning curve starts at a quarter of the training."""
    plan = tmp_path / 'a[1],$x_{|$'
    for E, recurrent, seed in itertools.product((1, 2), (True, False), (1, 2)):
        settings = {'n_layer': 4 // E, 'n_expert': E, 'recurrent': recurrent, 'seed': seed}
        settings |= {'code': {'checksum': str(E)}, 'data_checksum': seed, 'device_name': 'Zen 3'}
        settings |= {'starts': [start_of(name='Zen 4')] if E == 2 else []}
        write_lm(plan / f'{E}{recurrent}{seed}', 9.0, 8.0, 7.0, 6.0, E + seed, **settings)
    write_lm(plan / 'unfinished', 0.0, finished=False)
    main(monkeypatch, *plan.iterdir())
    printed = capsys.readouterr().out
    assert '8 of 9 runs have finished' in printed
    nouns = 'versions of the code', 'data sets', 'kinds of device'
    assert all(f'{plan.name}: these runs had 2 {noun}, see' in printed for noun in nouns)
    for name in ('allocations', 'saturation', 'learning'):
        assert Image.open(plan / f'{name}_Transformer.png').width > 500
    assert len(pandas.read_csv(plan / 'runs.csv')) == 8
    table = (plan / 'table_Transformer.md').read_text()
    assert r'Transformer|a[1],$x_{\|$|recurrent|4|1|64|2.5|0.70711|0.5|2|True' in table
    assert 'smaller with recurrence in ' in table
    curves = bars_of(figures.learning(runs(plan).query('finished')))
    assert [y for y, _ in curves['L = 4']] == [8.0, 7.0, 6.0, 2.5]


def test_runs_of_several_plans_are_drawn_as_one(tmp_path, monkeypatch):
    """As for lm-small-shared, which has some of its runs in the folder of lm-small."""
    write_lm(tmp_path / 'a/one', 2.0, residual='expert')
    write_lm(tmp_path / 'a/left_out', 1.0, residual='expert', n_expert=2)
    write_lm(tmp_path / 'b/two', 3.0, residual='shared', n_expert=2)
    options = ['--plan=both', '--only=n_expert == 1 or residual == "shared"', f'--out={tmp_path}']
    main(monkeypatch, tmp_path / 'a', tmp_path / 'b', *options)
    table = pandas.read_csv(tmp_path / 'table_Transformer.csv')
    found = zip(table.plan, table.n_expert, table.loss, table.best, strict=True)
    assert [*found] == [('both', 1, 2.0, True), ('both', 2, 3.0, False)]
    note = (tmp_path / 'table_Transformer.md').read_text().splitlines()[-1]
    assert note == 'only runs with n_expert == 1 or residual == "shared"'


def test_a_learning_rate_that_is_the_only_axis_is_drawn(tmp_path, monkeypatch, capsys):
    """One that is tuned is drawn, too, where an ablation is asked for."""
    for i, rate in enumerate((0.1, 0.2, 0.4)):
        write_lm(tmp_path / f'rates/{i}', 3.0, 1.0 + i, learning_rate=rate)
        write_lm(tmp_path / f'both/{i}', 3.0, 1.0 + i, learning_rate=rate)
        write_lm(tmp_path / f'both/{i}2', 3.0, 2.0 + i, learning_rate=rate, n_layer=2)
    main(monkeypatch, tmp_path / 'rates')
    assert list(pandas.read_csv(tmp_path / 'rates/table_Transformer.csv')['loss']) == [1, 2, 3]
    assert (tmp_path / 'rates/ablation_Transformer.png').exists()
    main(monkeypatch, tmp_path / 'both')
    assert capsys.readouterr().out.count('learning_rate = 0.1, the best of 3 for seed 1') == 2
    assert (tmp_path / 'both/allocations_Transformer.png').exists()
    main(monkeypatch, tmp_path / 'both', '--figure=ablation')
    assert len(pandas.read_csv(tmp_path / 'both/table_Transformer.csv')) == 6


@pytest.mark.parametrize('backend', ['module://matplotlib_inline.backend_inline', 'Qt4Agg'])
def test_the_backend_of_a_notebook_stops_nothing(tmp_path, backend):
    """MPLBACKEND may come from a notebook of another environment, or from an old matplotlib."""
    write_lm(tmp_path, 2.0, 1.0)
    code = f'from support import plots; plots.plot_losses({str(tmp_path)!r})'
    output_of(start(['-c', code], env=os.environ | {'MPLBACKEND': backend}))
    assert Image.open(tmp_path / 'loss.png').width > 500


def test_solve_rates_are_those_of_the_last_and_of_the_best_agents_beside_the_papers(monkeypatch):
    rates = {('a', 'last'): 0.1, ('b', 'last'): 0.2, ('a', 'best'): 0.3, ('b', 'best'): 0.3}

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
    assert percent[:6] == [pytest.approx(15), pytest.approx(30), 86.03, 91.93, 92.7, 86.13]
    assert list(table['agent'][:2]) == ['last', 'best'] and table['agent'][2:].isna().all()
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
        ('--out=', 'argument --out: is empty'),
        ('--levels=', 'argument --levels: is empty'),
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
        'confirmed: smaller with recurrence in 99.5% of draws, larger in 0.0%; best L 2 with',
        'r1 0.16 r16 0.02 r2 0.08',
        'r4 1.0533 0.0013 3.0',
        'smaller with recurrence in 45.6% of draws, larger in 5.1%',
        '-1.7948 ± 0.5509, -3.26 standard errors',
        '-0.6940 ± 0.1043, -6.66 standard errors',
        'mean -0.6778 0.5131 -1.9174',
        'smaller with recurrence in 94.7% of draws, larger in 1.1%; best L 4 with recurrence '
        '(95%: 2 to 8) and 8 without (95%: 8 to 8)',
        'r2 1.1046 0.0010 5.0',
        'n8 1.1352 0.0009 5.0',
        'smaller with recurrence in 99.2% of draws, larger in 0.3%; best L 2 with recurrence '
        '(95%: 2 to 4) and 8 without (95%: 8 to 16)',
        'seeds 2 to 4, loss_4096: smaller with recurrence in 99.4% of draws',
        'smaller with recurrence in 96.1% of draws, larger in 0.1%',
        'n8 - r4 0.0692 0.0065 3.0',
        'n8 - r4 0.0224 0.0008 2.0',
        'n8 - r4 0.0479 0.0013 3.0',
        'r2 takes 1.66 times the time of n8; after it, n8 is ahead by 0.0069 (linear), 0.0109',
        'r2 takes 1.48 times the time of n8; after it, n8 is ahead by -0.0030 (linear), 0.0018',
        'best L with recurrence: 2 in 75%, 4 in 24%',
        'registered, L = 2, 4, 8 of both: smaller with recurrence in 99.4% of draws',
        'significant, p = 0.047',
        'if the errors at each L were independent: -1.80 standard errors',
        'at most 0.0049 apart',
        'parameters of the registered models: 430080 to 430096',
        'r4, resets - r4 -0.5192 0.0409 3.0',
        'r2mean expert - r2 -0.0088 0.0014 3.0',
        'r2 one - r2 sqrt_experts -0.0013 0.0011 3.0',
        'smaller with recurrence in 35.0% of draws, larger in 37.1%; best L 2 with recurrence '
        '(95%: 1 to 8) and 2 without (95%: 2 to 8)',
        '0.0320 0.0014 5 7.05 MB 128',
        '(a) r1 above n1, n2, n4, n8: confirmed, holds in 99.2% of draws',
        '(c) n8 more than 0.05 above n1: confirmed, holds in 98.2% of draws',
        '(a) r1 above n1, n2, n4, n8: confirmed, holds in 99.9% of draws',
        '(b) r8 at most 0.05 above r1: refuted, holds in 0.9% of draws',
    ):
        assert line in printed, line
    assert drawn == ['depth', 'lengths', 'by_position', 'convlstm', 'boxoban', 'states']


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
    monkeypatch.setattr(sys, 'argv', ['depth', str(tmp_path / 'out')])
    write_lm(tmp_path / 'out/former-depth/1', 1.5, recurrent=True, n_layer=1, seed=11)
    common = {'seed': 11, 'learning_rate': 0.1, **start_of()}
    for recurrent, L in depth.ALLOCATIONS:
        write_lm(
            *(tmp_path / f'out/depth/{recurrent}-{L}', 5.5, 1.5),
            **{'recurrent': recurrent, 'n_layer': L, 'n_expert': 16 // L, **common},
        )
        depth.main(table, lambda: depth.report(table))
    counts = [line for line in capsys.readouterr().out.splitlines() if 'blocks' in line]
    assert counts == 7 * ['0 of 4 blocks'] + ['1 of 4 blocks']
    depth.main(table, lambda: depth.report(table))
    assert '1 of 4 blocks' in capsys.readouterr().out
    assert len(pandas.read_csv(table)) == 8
    evaluations = pandas.read_csv(tmp_path / 'depth_evaluations.csv')
    assert evaluations['val_loss'].to_list() == 8 * [5.5, 1.5]
    assert evaluations[['seed', 'step']].value_counts().to_dict() == {(11, 0): 8, (11, 1): 8}
    # Another block of a seed does not replace the first.
    for path in tmp_path.glob('out/depth/*/config.json'):
        path.write_text(path.read_text().replace('family 25 model 17', 'family 26 model 2'))
    depth.add(table, str(tmp_path / 'out'))
    assert len(pandas.read_csv(table)) == 16
    blocks = depth.whole_blocks(table, depth.ALLOCATIONS)
    assert [*blocks.index] == [(11, 'AMD EPYC, family 25 model 17')]


@pytest.mark.parametrize(
    'starts, arguments, expected',
    [
        ([start_of()], [], ('AMD EPYC, family 25 model 17', 'abc')),
        ([start_of(), start_of('def')], [], ('AMD EPYC, family 25 model 17', 'abc+def')),
        ([start_of()], ['Zen 4'], ('AMD EPYC, family 25 model 17', 'abc')),
        ([start_of(name='CPU AMD EPYC')], ['Zen 4'], ('Zen 4', 'abc')),
        ([start_of(name='CPU AMD EPYC')], [], '/1/config.json: tells no generation'),
        ([start_of(), start_of(name='CPU X, family 1')], [], '/1: ran on AMD .* 17 and on X'),
        ([start_of('abc-dirty')], [], r'/1: its code is in no commit \(abc-dirty\): commit the'),
        ([start_of(), start_of('abc-dirty')], [], r'in no commit \(abc\+abc-dirty\)'),
        ([start_of('unknown')], [], r'in no commit \(unknown\)'),
        ([{}], ['Zen 4'], r'in no commit \(unknown\)'),
    ],
)
def test_a_study_records_what_config_json_tells(tmp_path, starts, arguments, expected):
    """A run may have several starts. A processor is typed only where none is recorded."""
    settings = {'seed': 11, 'n_expert': 16, 'learning_rate': 0.1, 'starts': starts, **starts[0]}
    write_lm(tmp_path / 'out/depth/1', 1.5, **settings)
    path, folder = tmp_path / 'depth.csv', str(tmp_path / 'out')
    if isinstance(expected, str):
        assert_refused(expected, depth.add, path, folder, *arguments)
        assert not path.exists()
        return
    depth.add(path, folder, *arguments)
    (row,) = pandas.read_csv(path).to_dict('records')
    assert (row['processor'], row['commit']) == expected


def test_runs_of_other_sizes_are_no_part_of_a_study(tmp_path):
    write_lm(tmp_path / 'out/depth/1', 1.5, seed=11, n_expert=8, learning_rate=0.1, **start_of())
    path, folder = tmp_path / 'depth.csv', str(tmp_path / 'out')
    assert_refused('depth/1: L = 1, E = 8: is not in the plan depth', depth.add, path, folder)


@pytest.mark.parametrize('changes, message', [
    ({'weight_decay': 0.5}, ' has weight_decay = 0.5, not 0.01: is not in the plan depth'),
    ({'starts': [{**start_of(), 'changes': {'betas': 1}}]}, ': changed betas when it resumed'),
])  # fmt: skip
def test_runs_of_other_settings_are_no_part_of_a_study(tmp_path, changes, message):
    run = runs_of('depth')[0]
    settings = {**full_settings(run), **start_of(), **changes}
    write_lm(tmp_path / 'out' / run.folder, 1.5, **settings)
    path, folder = tmp_path / 'depth.csv', str(tmp_path / 'out')
    assert_refused(f'{run.folder}{message}', depth.add, path, folder)


def test_a_block_of_several_commits_is_marked(capsys):
    depth.report()
    found = [line for line in capsys.readouterr().out.splitlines() if 'commits' in line]
    assert found == [
        'seed 12 has runs of 2 commits: 75c3ea33b9b3, 82c22e328fb1',
        'seed 14 has runs of 2 commits: 82c22e328fb1, 3f521ba8f7a2',
    ]


def make_rates(best):
    """Return a table of the runs of depth_rates. best: {(rate, recurrent): the best L}."""
    noise = np.random.default_rng(1)
    rows = [
        {'seed': seed, 'recurrent': recurrent, 'n_layer': L, 'learning_rate': rate}
        | {'processor': 'A', 'commit': 'b'}
        | {'loss': 1 + 0.1 * (L != best[rate, recurrent]) + noise.normal() / 100}
        for seed in depth.SEEDS
        for rate in depth_rates.RATES
        for recurrent, L in depth_rates.ALLOCATIONS
    ]
    return pandas.DataFrame(rows)


def verdicts_in(printed):
    """Return the lines with the verdicts of the rules (a) and (b)."""
    outcomes = ('confirmed', 'refuted', 'undecided', '(b)')
    return [line for line in printed.splitlines() if line.startswith(outcomes)]


@pytest.mark.parametrize(
    'best, a, b',
    [
        ((8, 16, 2, 4), ['confirmed', 'confirmed'], ['confirmed', 'confirmed']),
        ((2, 8, 2, 8), ['confirmed', 'confirmed'], ['refuted', 'refuted']),
        ((8, 4, 4, 8), ['refuted', 'confirmed'], ['confirmed', 'refuted']),
    ],
)
def test_the_study_of_learning_rates_judges_each_and_both(
    tmp_path, monkeypatch, capsys, best, a, b
):
    """best: the best L at 0.02 with and without recurrence, then at 0.08."""
    monkeypatch.setattr(depth_rates, 'TABLE', tmp_path / 'depth_rates.csv')
    cells = itertools.product(depth_rates.RATES, (True, False))
    table = make_rates(dict(zip(cells, best, strict=True)))
    table[table['learning_rate'] == 0.02].to_csv(depth_rates.TABLE, index=False)
    depth_rates.report()
    found = verdicts_in(capsys.readouterr().out)
    assert found[0].startswith(a[0]) and found[1:] == ['(b) waits for all blocks']
    table.to_csv(depth_rates.TABLE, index=False)
    depth_rates.report()
    found = verdicts_in(capsys.readouterr().out)
    assert [s.removeprefix('(b) ').split(':')[0] for s in found] == a + b


def test_runs_at_both_rates_are_kept_apart(tmp_path):
    for rate in depth_rates.RATES:
        folder = tmp_path / f'out/depth-rates/{rate}'
        write_lm(folder, 1.5, seed=11, n_expert=16, learning_rate=rate, **start_of())
    for _ in range(2):
        depth.add(tmp_path / 'depth_rates.csv', str(tmp_path / 'out'))
    assert pandas.read_csv(tmp_path / 'depth_rates.csv')['learning_rate'].to_list() == [0.02, 0.08]


def test_the_registered_studies_of_agents_judge_returns(tmp_path, monkeypatch, capsys):
    """The best L is 1 with recurrence and 4 without; the former initial scale costs a return of 1.
    A seed that was not registered does not count."""
    rows = [
        {'seed': seed, 'recurrent': recurrent, 'n_layer': L, 'processor': 'A', 'commit': 'b'}
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
    assert '-1.0125 ± 0.0006' in printed and 'significant, p = 0.000' in printed

"""Test figures.py and report.py: curves, solve rates beside published ones, the page of a run and
of a sweep, against their logs and in a browser."""

import html
import json
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image
from small_runs import error_of, run_lm

import figures
import report

AGENT_LOG = [
    {'step': 0, 'env_steps': 0, 'eval_solve_rate': 0.0, 'eval_return': -12.0, 'seconds': 0.0}
    | {'random_solve_rate': 0.125, 'random_return': -11.0},
    {'step': 500, 'env_steps': 5_000_000, 'return_1000': -9.0, 'solve_rate_1000': 0.05},
    {'step': 1000, 'env_steps': 10_000_000, 'return_1000': -2.0, 'solve_rate_1000': 0.4}
    | {'eval_solve_rate': 0.3456, 'eval_return': -2.5, 'seconds': 3723.0},
]
AGENT = {
    'arch': 'convglu',
    'recurrent': False,
    'n_layer': 2,
    'n_expert': 4,
    'n_embd': 32,
    'n_envs': 32,
    'eval_games': 512,
    'eval_split': 'unfiltered-valid',
    'gamma': 0.9,
    'clip': 0.2,  # a setting of a copied trainer
    'torch': '2.13.0',
}


def write_run(folder, log, config):
    folder.mkdir(parents=True)
    (folder / 'log.jsonl').write_text(''.join(json.dumps(record) + '\n' for record in log))
    (folder / 'config.json').write_text(json.dumps(config))
    return folder


def read_page(path):
    """Return {heading: text without tags} in the page's order, and {heading: rows of its table as
    dicts by column heading}."""
    texts, tables = {}, {}
    for part in path.read_text().split('<h2>')[1:]:
        heading, body = part.split('</h2>')
        texts[heading] = ' '.join(html.unescape(re.sub('<[^>]*>', ' ', body)).split())
        for row in re.findall(r'<tr>(.*?)</tr>', body, re.S)[1:]:
            cells = re.findall(r'<td data-heading="([^"]*)"[^>]*>([^<]*)</td>', row)
            tables.setdefault(heading, []).append({k: html.unescape(x) for k, x in cells})
    return texts, tables


# ----------------------------------------------------------------------------- figures


@pytest.mark.parametrize(
    'title', ['W' * 200, 'out/' + 'a_long_folder_name/' * 9, 'five words ' * 20]
)
def test_a_title_lies_within_its_figure(title):
    figure, _ = figures.new_figure(1)
    figures.set_title(figure, title, figures.STANDARD_ERROR)
    (text,) = [x for x in figure.texts if x.get_text()]
    figure.canvas.draw()
    box = text.get_window_extent()
    assert 0 <= box.x0 and box.x1 <= figure.bbox.width
    assert ''.join(text.get_text().split()).startswith(''.join(title.split()))


def test_a_mean_curve_has_the_steps_that_all_seeds_have_logged():
    logs = [
        [{'tokens': 0}, {'tokens': 1e6, 'val_loss': 3.0}, {'tokens': 2e6, 'val_loss': 2.0}],
        [{'tokens': 0}, {'tokens': 1e6, 'val_loss': 5.0}, {'tokens': 2e6, 'val_loss': None}],
    ]
    assert figures.mean_curve(logs, 'tokens', 'val_loss') == {1.0: (4.0, pytest.approx(2**0.5), 2)}


def test_fractions_are_drawn_as_percentages():
    for top, expected in ((0.8, '40%'), (0.04, '2.0%')):
        _, (axes,) = figures.new_figure(1)
        axes.set_ylim(0, top)
        figures.percent_axis(axes.yaxis)
        assert axes.yaxis.get_major_formatter()(top / 2) == expected


def test_solve_rates_are_compared_with_published_ones_after_as_many_steps(tmp_path, monkeypatch):
    """Of the published rows, those at the number of steps nearest to that of the run are taken."""
    folder = write_run(tmp_path / 'agent', AGENT_LOG, AGENT)
    monkeypatch.setattr(figures, 'out_dir', str(tmp_path / 'out'))
    monkeypatch.setattr(figures, 'reference', str(tmp_path))
    (tmp_path / 'published_drc_by_steps.csv').write_text(
        'agent,env_steps,seeds,solve_rate_mean,solve_rate_min,solve_rate_max,return_mean\n'
        'drc_11,5007360,5,0.0000,0,0,-11.9\n'
        'drc_11,10014720,5,0.0042,0.002,0.008,-11.02\n'
        'drc_11,50073600,5,0.4504,0.375,0.573,-0.94\n'
    )
    paths = figures.compare_solve_rates([folder])
    rows = figures.read_csv(tmp_path / 'out' / 'solve_rates.csv')
    assert [(row['agent'], row['solved, %'], row['return']) for row in rows] == [
        ('ConvGLU, non-recurrent, L = 2, E = 4, d = 32', '34.56', '-2.5'),
        ('DRC(1,1), published', '0.42', '-11.02'),
    ]
    drawing = (tmp_path / 'out' / 'solve_rates.svg').read_text()
    assert 'DRC(1,1), published' in drawing and 'levels solved' in drawing and len(paths) == 4


def test_published_agents_are_in_the_legend_if_they_have_a_point():
    published = [
        {'agent': 'early', 'env_steps': 10_000_000, 'solve_rate': 0.1},
        {'agent': 'late', 'env_steps': 20_000_000, 'solve_rate': 0.2},
    ]
    figure = figures.solve_rate_figure({'ours': AGENT_LOG}, published, '')
    _, labels = figure.axes[0].get_legend_handles_labels()
    assert labels == ['ours', 'early, published']


def test_runs_whose_folders_have_one_name_are_all_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, 'out_dir', str(tmp_path / 'out'))
    monkeypatch.setattr(figures, 'reference', '')
    folders = [write_run(tmp_path / name / 'agent', AGENT_LOG, AGENT) for name in 'abc']
    figures.compare_solve_rates(folders)
    agents = [row['agent'] for row in figures.read_csv(tmp_path / 'out' / 'solve_rates.csv')]
    label = 'ConvGLU, non-recurrent, L = 2, E = 4, d = 32'
    assert agents == [label, f'{label} ({tmp_path}/b/agent)', f'{label} ({tmp_path}/c/agent)']


def test_a_pattern_without_a_run_is_refused(tmp_path, capfd):
    """Blanks around a pattern do not count."""
    write_run(tmp_path / 'agent', AGENT_LOG, AGENT)
    error = error_of(capfd, figures, [f'--solve_rates={tmp_path}/ag*, {tmp_path}/none*'])
    assert f"'{tmp_path}/none*' is no folder with a run" in error


@pytest.mark.parametrize('name', ['feedforward', 'nonrecurrent', 'non-recurrent'])
def test_old_names_of_the_non_recurrent_variant_are_understood(name):
    assert figures.variant_name(name) == 'non-recurrent'


# ----------------------------------------------------------------------------- the page


@pytest.fixture(scope='module')
def page(data, tmp_path_factory):
    """Return the path of the page of a language model's run, in the folder of the run."""
    out = tmp_path_factory.mktemp('a <b> & c') / 'run'
    assert run_lm(data, out, max_iters=6, eval_interval=3) == 0
    return report.write_report(out)


def test_the_page_of_a_language_model_has_the_numbers_of_its_log(page):
    (texts, tables), log = read_page(page), figures.read_log(page.parent)
    evaluated, rows = [r for r in log if 'val_loss' in r], tables['Evaluations']
    assert len(rows) == len(evaluated) == 3
    for row, record in zip(rows, evaluated, strict=True):
        assert row['Updates'] == str(record['step'])
        assert row['Validation loss (nats per byte)'] == f'{record["val_loss"]:.4f}'
    assert list(texts)[:2] == ['Summary', 'Curves'] and list(texts)[-1] == 'All settings'
    assert f'{evaluated[-1]["val_loss"]:.4f} nats per byte' in texts['Summary']
    assert 'Trained 6 of 6 updates' in texts['Summary'] and texts['A sample']
    changed = {
        row['Setting']: row['Value'] for row in tables['Settings that differ from the defaults']
    }
    assert changed['max_iters'] == '6' and not {'seed', 'script'} & changed.keys()
    assert html.escape(str(page.parent)) in page.read_text()
    (source,) = re.findall(r'(?:src|href)="([^"]*)"', page.read_text())
    assert source.startswith('data:image/svg+xml;base64,')  # nothing is loaded from elsewhere


@pytest.mark.parametrize('arch, n_samples', [('experts', 1), ('lstm', 0)])
def test_a_model_that_can_be_sampled_is_sampled_from_its_last_checkpoint(
    tmp_path, monkeypatch, arch, n_samples
):
    log = [{'step': 0, 'tokens': 0, 'val_loss': 2.0}]
    folder = write_run(tmp_path / 'run', log, {'arch': arch, 'tokenizer': 'bytes'})
    (folder / 'ckpt_last.pt').touch()
    commands = []

    def fake_run(command, **options):
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, 'a text', '')

    monkeypatch.setattr(report.subprocess, 'run', fake_run)
    texts, _ = read_page(report.write_report(folder))
    assert len(commands) == n_samples and ('A sample' in texts) == bool(n_samples)
    assert all('--which=last' in command for command in commands)


def test_a_sample_that_fails_is_left_out_with_the_reason(tmp_path, monkeypatch, capfd):
    folder = write_run(tmp_path / 'run', [{'step': 0, 'tokens': 0}], {'tokenizer': 'bytes'})
    (folder / 'ckpt_last.pt').touch()
    failed = subprocess.CompletedProcess([], 2, 'half a text', 'error: no memory\n')
    monkeypatch.setattr(report.subprocess, 'run', lambda command, **options: failed)
    texts, _ = read_page(report.write_report(folder))
    assert 'A sample' not in texts
    assert 'the page has no sample: error: no memory' in capfd.readouterr().err


def test_the_page_of_an_agent_starts_with_its_solve_rates(tmp_path):
    folder = write_run(tmp_path / 'agent', AGENT_LOG, AGENT)
    (folder / 'eval_hard.json').write_text('{"n": 1000, "solve_rate": 0.0421, "failed_level": 7}')
    (folder / 'eval_hard_failed.gif').write_bytes(b'GIF89a')
    texts, tables = read_page(report.write_report(folder))
    assert list(texts)[:3] == ['Summary', 'Curves', 'Games']
    assert texts['Summary'].startswith('Evaluation levels solved 34.6%')
    assert 'Solved, hard 4.2% of 1,000 levels' in texts['Summary']
    assert 'A random policy solves 12.5%' in texts['Summary']
    assert 'Training time 1:02:03' in texts['Summary']
    assert texts['Games'] == 'Level 7 of hard: not solved'
    assert [row['Solved, evaluation levels'] for row in tables['Evaluations']] == ['0.0%', '34.6%']
    assert tables['Evaluations'][1]['Environment steps'] == '10,000,000'
    changed = {
        row['Setting']: row['Value'] for row in tables['Settings that differ from the defaults']
    }
    assert changed['gamma'] == '0.9' and changed['recurrent'] == 'False'
    assert changed['clip'] == '0.2' and 'torch' not in changed


def test_the_page_of_a_sweep_lists_its_runs_and_tables(tmp_path):
    """Old tables call the non-recurrent variant feedforward. Text from files is escaped."""
    for name, recurrent in (('a', True), ('b', False)):
        write_run(tmp_path / name, AGENT_LOG, AGENT | {'recurrent': recurrent, 'seed': 3})
    (tmp_path / 'table_convglu.csv').write_text(
        'variant,budget,L,E,d,mean_return,variance,n_seeds\n'
        'recurrent,small,1,8,32,3.5,0.1,3\nrecurrent,small,2,4,32,4.25,0.1,3\n'
        'feedforward,<i>,4,2,32,-1.5,0.1,3\n'
    )
    (tmp_path / 'runs.json').write_text('{"plan": "sokoban-small", "runs": []}')
    texts, tables = read_page(report.write_report(tmp_path))
    assert texts['Summary'].startswith('Best recurrent, small budget 4.25 return: L = 2')
    assert 'Best non-recurrent, <i> budget -1.5 return' in texts['Summary']
    assert tables['Table, ConvGLU'][2]['Variant'] == 'non-recurrent'
    assert tables['Table, ConvGLU'][2]['Budget'] == '<i>'
    runs = [(row['Variant'], row['Layers L'], row['Folder']) for row in tables['Runs']]
    assert runs == [('recurrent', '2', 'a'), ('non-recurrent', '2', 'b')]
    assert tables['Runs'][0]['Solved, evaluation levels'] == '34.6%'
    shared = {row['Setting'] for row in tables['All settings of all runs']}
    assert 'gamma' in shared and 'recurrent' not in shared


def test_a_folder_of_agents_and_language_models_has_the_best_of_each(tmp_path):
    text = [{'step': 0, 'tokens': 0, 'val_loss': 2.0}]
    agent = [{'step': k, 'env_steps': k, 'episodic_return': -3.0} for k in range(5)]
    for name, log in (('text', text), ('agent', agent)):
        write_run(tmp_path / name, log, {'recurrent': True})
    logs = {tmp_path / name: figures.read_log(tmp_path / name) for name in ('text', 'agent')}
    configs = {path: {'recurrent': True} for path in logs}
    assert report.best_runs('non-recurrent', logs, configs) == {}
    assert report.best_runs('recurrent', logs, configs) == {
        'Best recurrent language model': 'loss 2: text',
        'Best recurrent agent': 'return -3: agent',
    }


def test_an_allocation_with_fewer_seeds_is_not_the_best():
    cell = {'variant': 'recurrent', 'budget': 'small', 'E': 1, 'd': 48}
    rows = [
        cell | {'L': 1, 'mean_return': '9', 'n_seeds': '2'},
        cell | {'L': 2, 'mean_return': '7', 'n_seeds': '10'},
        cell | {'L': 4, 'mean_return': '8', 'n_seeds': '10'},
    ]
    best = {'Best recurrent, small budget': '8 return: L = 4, E = 1, d = 48'}
    assert report.best_allocations(rows, '') == best


def test_the_gain_from_recurrence_is_the_difference_of_the_best_losses():
    rows = [
        {'variant': 'recurrent', 'budget': 'small', 'L': 2, 'E': 8, 'd': 48, 'mean_loss': '1.25'},
        {'variant': 'recurrent', 'budget': 'small', 'L': 1, 'E': 16, 'd': 48, 'mean_loss': '1.5'},
        {'variant': 'feedforward', 'budget': 'small', 'L': 8, 'E': 2, 'd': 48, 'mean_loss': '1.5'},
    ]
    assert report.best_allocations(rows, 'byte') == {
        'Best recurrent, small budget': '1.25 nats per byte: L = 2, E = 8, d = 48',
        'Gain from recurrence, small budget': '0.2500 nats per byte',
        'Best non-recurrent, small budget': '1.5 nats per byte: L = 8, E = 2, d = 48',
    }


def test_the_summary_names_the_model_and_the_settings_of_the_best_allocations(tmp_path):
    """A plan of two models has two tables."""
    heading = 'variant,budget,L,E,d,residual,mean_return,variance,n_seeds\n'
    for model, value in (('convlstm', 7.5), ('convglu', 4.5)):
        row = f'recurrent,small,2,2,64,shared,{value},0.1,3\n'
        (tmp_path / f'table_{model}.csv').write_text(heading + row)
    about = {'plan': 'sokoban-small', 'best_convlstm': 'first', 'best_convglu': 'second'}
    (tmp_path / 'runs.json').write_text(json.dumps(about))
    texts, _ = read_page(report.write_report(tmp_path))
    allocation = 'L = 2, E = 2, d = 64, residual = shared'
    assert f'Best recurrent ConvLSTM, small budget 7.5 return: {allocation}' in texts['Summary']
    assert f'Best recurrent ConvGLU, small budget 4.5 return: {allocation}' in texts['Summary']
    assert 'Certainty of the best depth, ConvLSTM first' in texts['Summary']
    assert 'Certainty of the best depth, ConvGLU second' in texts['Summary']


def test_a_folder_without_runs_is_refused_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, 'argv', ['report.py', f'--out_dir={tmp_path}/nothing'])
    with pytest.raises(SystemExit):
        report.main()
    assert f"out_dir = '{tmp_path}/nothing': no log.jsonl" in capsys.readouterr().err


@pytest.mark.skipif(not shutil.which('chromium'), reason='chromium is not installed')
@pytest.mark.parametrize('width', [390, 1280])
def test_a_page_fits_a_phone_and_a_screen(tmp_path, width):
    """Both curves are drawn, and the margins at both sides stay empty, by a long path too."""
    folder = write_run(tmp_path / 'agent', AGENT_LOG, AGENT | {'init_from': f'out/{"x" * 90}'})
    path = report.write_report(folder)
    options = '--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --hide-scrollbars'
    view = [f'--window-size={width},4000', f'--user-data-dir={tmp_path}/browser']
    view += [f'--screenshot={tmp_path}/page.png', path.as_uri()]
    subprocess.run(['chromium', *options.split(), *view], check=True, capture_output=True)
    pixels = np.asarray(Image.open(tmp_path / 'page.png').convert('RGB'))
    red, green, blue = np.int64(pixels).transpose(2, 0, 1)
    assert ((red > green + 60) & (red > blue + 60)).sum() > 100  # evaluation
    assert ((blue > red + 60) & (blue > green + 20)).sum() > 100  # training
    assert (
        pixels.shape[1] == width and (pixels[:, :12] > 250).all() and (pixels[:, -12:] > 250).all()
    )

"""figures.py: the page of a run and of a sweep, against their logs and in a browser; trackers."""

import html
import json
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import test_train_sokoban
from PIL import Image
from test_train import data, run  # noqa: F401  a fixture

import figures


def read_page(path):
    """-> {heading: text}, {heading: its table's rows, the first the titles}."""
    texts, tables = {}, {}
    for part in path.read_text().split('<h2>')[1:]:
        heading, body = part.split('</h2>')
        texts[heading] = html.unescape(body)
        for row in re.findall(r'<tr>(.*?)</tr>', body):
            cells = re.findall(r'<t[dh]>(.*?)</t[dh]>', row)
            tables.setdefault(heading, []).append([html.unescape(cell) for cell in cells])
    return texts, tables


def rows_of(table):
    first, *rows = table
    return [dict(zip(first, row, strict=True)) for row in rows]


def agree(row, record):
    """Every cell of a table's row is what the log's record has."""
    assert len(row) > 3
    for name, text in row.items():
        if text and name not in ('run', 'value', 'commit'):
            assert float(text) == pytest.approx(record[name.replace(' ', '_')], 6e-5), name


@pytest.fixture(scope='module')
def page(data, tmp_path_factory):  # noqa: F811
    """A run's, in the run's folder."""
    out = tmp_path_factory.mktemp('a <b> & c') / 'run'
    assert run(data, out, max_iters=6, eval_interval=3) == 0
    (out / 'eval_easy_solved.gif').write_bytes(b'GIF89a')
    return figures.write_report(out)


def test_a_runs_page_has_the_logs_numbers(page):
    (texts, tables), log = read_page(page), figures.read_log(page.parent)
    evaluated, rows = [r for r in log if 'val_loss' in r], rows_of(tables['Evaluations'])
    assert len(rows) == len(evaluated) == 3
    for row, record in zip(rows, evaluated, strict=True):
        agree(row, record)
    config = json.loads((page.parent / 'config.json').read_text())
    assert '\nmax_iters = 6\n' in texts['Settings'] and texts['A sample'].strip()
    assert f'\ncommit = {config["commit"]}\n' in texts['Settings']
    assert f'<h1>{html.escape(str(page.parent))}</h1>' in page.read_text()
    sources = re.findall(r'(?:src|href)="([^"]*?),', page.read_text())  # nothing from elsewhere
    assert sources == ['data:image/svg+xml;base64', 'data:image/gif;base64']


def test_a_sweeps_page(page, tmp_path, monkeypatch, capsys):
    """Of two runs, and of what sweep.py has listed."""
    for name, L in (('one', 1), ('two', 2)):
        shutil.copytree(page.parent, tmp_path / name)
        config = json.loads((page.parent / 'config.json').read_text()) | {'n_layer': L}
        (tmp_path / name / 'config.json').write_text(json.dumps(config))
    (tmp_path / 'table_transformer.csv').write_text('variant,L\n<i>,3\n')
    (tmp_path / 'runs.json').write_text('{"plan": "lm-small", "runs": []}')
    texts, tables = read_page(figures.write_report(tmp_path))
    last, rows = figures.read_log(page.parent)[-1], rows_of(tables['Runs'])
    assert tables['table_transformer'] == [['variant', 'L'], ['<i>', '3']]
    assert '<td>&lt;i&gt;</td>' in (tmp_path / 'report.html').read_text()
    assert 'plan = lm-small' in texts['Drawn by'] and [row['run'] for row in rows] == ['one', 'two']
    for row in rows:
        agree(row, last)
        assert float(row['value']) == pytest.approx(last['val_loss'], 6e-5)
    assert 'n_layer' not in texts['Settings of all runs']
    monkeypatch.setattr(sys, 'argv', ['figures.py', f'--report={tmp_path}/nothing'])
    with pytest.raises(SystemExit):
        figures.main()
    assert f"report = '{tmp_path}/nothing': no log.jsonl" in capsys.readouterr().err


@pytest.mark.skipif(not shutil.which('chromium'), reason='chromium is not installed')
def test_a_page_is_drawn(page, tmp_path):
    words = f"""chromium --headless --no-sandbox --disable-gpu --disable-dev-shm-usage
        --hide-scrollbars --window-size=1000,1500 --user-data-dir={tmp_path}/browser
        --screenshot={tmp_path}/page.png"""
    subprocess.run([*words.split(), page.as_uri()], check=True)
    pixels = np.asarray(Image.open(tmp_path / 'page.png').convert('RGB'))
    red, green, blue = np.int64(pixels).transpose(2, 0, 1)
    assert ((red > green + 60) & (red > blue + 60)).sum() > 100  # the validation's curve
    assert ((blue > red + 60) & (blue > green + 20)).sum() > 100  # training's
    assert (pixels[:, -8:] > 250).all()  # nothing hangs over the right margin


def test_trackers_get_curves_settings_and_games(tmp_path, monkeypatch):
    pytest.importorskip('wandb')
    events = pytest.importorskip('tensorboard.backend.event_processing.event_accumulator')
    monkeypatch.setenv('WANDB_MODE', 'offline')
    monkeypatch.setenv('WANDB_SILENT', 'true')
    both = {'tensorboard': True, 'wandb': True}
    assert test_train_sokoban.run(tmp_path, total_steps=24, **both) == 0
    assert test_train_sokoban.run(tmp_path, eval_only=True, **both) == 0
    board = events.EventAccumulator(str(tmp_path), size_guidance={'images': 0, 'scalars': 0})
    board.Reload()
    log = figures.read_log(tmp_path)
    curve = {x.step: pytest.approx(x.value) for x in board.Scalars('eval_return')}
    assert {r['step']: r['eval_return'] for r in log if 'eval_return' in r} == curve
    gifs = {path.read_bytes() for path in tmp_path.glob('eval_*.gif')}
    games = [tag for tag in board.Tags()['images'] if tag.endswith('_game')]
    assert gifs and {board.Images(tag)[0].encoded_image_string for tag in games} == gifs
    assert 'settings/text_summary' in board.Tags()['tensors']
    kept = tmp_path.glob('wandb/offline-run-*/files/media/videos/*.gif')
    assert {path.read_bytes() for path in kept} == gifs
    names = [path.name for path in tmp_path.glob('wandb/offline-run-*')]
    assert len(names) == 2 and len({name.rpartition('-')[2] for name in names}) == 1
    stored = b''.join(path.read_bytes() for path in tmp_path.glob('wandb/offline-run-*/*.wandb'))
    assert b'eval_return' in stored and b'learning_rate' in stored

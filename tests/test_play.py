"""Test play_sokoban.py: solve rates, exports, games as text, GIFs and in a terminal, plans,
pictures, mistakes."""

import contextlib
import io
import json
import os
import pty
import re
import shutil
import signal
import sys
import termios
from pathlib import Path

from configurator import configure

import numpy as np
import pytest
import safetensors.torch as safetensors
import torch
from PIL import Image
from processes import ROOT
from small_runs import assert_refused, error_of, read_log, run_agent
from test_levels import numbered, text

import play_sokoban
from convlstm import load_agent
from levels import COLORS, board_image, generate, observations, parse_text, plan_image
from support.export import weights_checksum
from support.run_folder import load_checkpoint

UP, RIGHT, LEFT = 0, 1, 3


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Work in a folder with the shipped agent and levels.txt. The first two of the three levels are
    solved by one and by four steps to the right, the last one is not."""
    monkeypatch.chdir(tmp_path)
    Path('agent').symlink_to(ROOT / 'pretrained' / 'sokoban')
    levels = [text('#@$.     #'), text('#@ $  .  #'), text('#.$@     #')]
    Path('levels.txt').write_text(numbered(levels))


@pytest.fixture
def play(monkeypatch, capsys):
    """Return a function that runs play_sokoban.py in this process and returns what it prints."""

    def run(*arguments):
        monkeypatch.setattr(sys, 'argv', ['play_sokoban.py', '--device=cpu', *arguments])
        play_sokoban.main()
        return capsys.readouterr().out

    return run


# ---- solve rates, exports ----


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    """Return the folder of a run. It is evaluated on the split 'hard', which lies in the folder
    above. Its updates change no action, so that the first agent evaluated stays the best."""
    levels_dir = tmp_path_factory.mktemp('levels')
    np.save(levels_dir / 'hard.pack17.npy', generate(9, 1, 3, max_moves=6)[0])
    settings = {'levels_dir': levels_dir, 'eval_split': 'hard', 'learning_rate': 1e-6}
    assert run_agent(levels_dir / 'run', total_steps=60, **settings) == 0
    return levels_dir / 'run'


def test_an_export_has_the_weights_and_the_score_of_one_agent(trained, tmp_path, play):
    """The last agent of a run has no score. A second export replaces the first."""
    best = json.loads((trained / 'best' / 'config.json').read_text())['best']
    best_weights = safetensors.load_file(trained / 'best' / 'model.safetensors')
    last_weights = dict(load_checkpoint(trained / 'last.pt')['model'])
    assert not torch.equal(best_weights['logits.weight'], last_weights['logits.weight'])
    for which, weights, score, card in (
        ('best', best_weights, best, f'evaluation {best:.2f}'),
        ('last', last_weights, None, 'Score: not recorded'),
    ):
        play(f'--out_dir={trained}', f'--which={which}', f'--export={tmp_path}')
        assert sorted(os.listdir(tmp_path)) == ['README.md', 'config.json', 'model.safetensors']
        saved = safetensors.load_file(tmp_path / 'model.safetensors')
        torch.testing.assert_close(saved, weights, rtol=0, atol=0)
        metadata = json.loads((tmp_path / 'config.json').read_text())
        assert metadata.get('best') == score and metadata['settings']['eval_split'] == 'hard'
        assert card in (tmp_path / 'README.md').read_text()
    best = trained / 'best'
    message = 'is the best model of a run: choose another folder'
    assert_refused(message, play, f'--out_dir={trained}', f'--export={best}')


def test_an_agent_is_measured_as_its_run_evaluated_it(trained, play):
    record = read_log(trained)[-1]
    solved = f'solved {record["eval_solve_rate"]:.1%}, return {record["eval_return"]:.2f}'
    levels = f'the first 6 of 9 levels of hard from 1 file in {trained.parent}'
    name = f'{trained}, update {record["step"]}, greedy actions'
    assert play(f'--out_dir={trained}', '--which=last', '--n_levels=6', '--measure') == (
        f'{name}: {solved}, {record["eval_steps"]:.0f} steps; {levels}\n'
    )


def test_a_run_without_a_best_agent_is_named(trained, tmp_path, capsys):
    shutil.copytree(trained, tmp_path / 'run', ignore=shutil.ignore_patterns('best'))
    load_agent(tmp_path / 'run')
    assert 'run: has no best model: using last.pt, of update ' in capsys.readouterr().err


def test_the_shipped_agent_solves_easy_levels_with_greedy_and_with_sampled_actions(folder, play):
    """On a large sample it solves 98%."""
    measure = ['--out_dir=agent', '--n_levels=60', '--measure']
    lines = [play(*measure), play(*measure, '--greedy=False')]
    for line in lines:
        assert float(re.search(r'solved (.*)%', line)[1]) > 80
        assert '60 generated levels, boxes: 1, moves: at most 12, seed: 1337' in line
    assert lines[0] != lines[1]


def test_a_policy_of_the_user_is_measured_on_all_levels(folder, play):
    Path('user_policy.py').write_text('def right(boards):\n    return len(boards) * [1]')
    line = 'user_policy:right: solved 66.7%, return 3.17, 42 steps; 3 levels of levels.txt\n'
    assert play('--policy=user_policy:right', '--levels=levels.txt') == line


# ---- games ----


def test_a_game_is_printed_or_written_as_a_gif(folder, play):
    game = ['--out_dir=agent', '--levels=levels.txt', '--level=1']
    legend, *lines = play(*game).split('\n')
    assert legend.startswith('# wall, . target, $ box, ')
    rows = ['#@ $  .  #', '# @$  .  #', '#  @$ .  #', '#   @$.  #', '#    @*  #']
    assert lines[1::11] == rows
    outcome = 'level 1, solved in 4 steps, return 10.6'
    assert lines[10::11] == [*(f'level 1, step {t}' for t in range(4)), outcome]
    assert play(*game, '--gif=game.gif') == f'game.gif: {outcome}\n'
    with Image.open('game.gif') as gif:
        assert gif.n_frames == 5 and gif.info['duration'] == 250


def test_keys_step_pause_change_levels_and_quit(folder, play, monkeypatch):
    """Each wait for a key returns the next of `keys`. Without a key ('') the game makes a step."""
    keys, waits = ['', '', 's', ' ', '', 'n'], []

    def read_key(seconds):
        waits.append(seconds)
        return keys.pop(0)

    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, 'isatty', lambda: True)
    monkeypatch.setattr(play_sokoban, 'keyboard', lambda: contextlib.nullcontext(read_key))
    printed = play('--out_dir=agent', '--levels=levels.txt', '--games=2')
    legend, screens = printed.split('\r\x1b[J', 1)
    assert 'box on a target' in legend and '→' in screens  # the plan
    assert re.findall(r'level \d, step \d|level \d, solved', screens) == [
        'level 0, step 0',
        'level 0, solved',
        'level 1, step 0',
        'level 1, step 1',
        'level 1, step 1',
        'level 1, step 2',
    ]
    assert waits == [0.25, 2, 0.25, None, 0.25, 0.25] and not keys
    keys.append('q')
    play('--out_dir=agent', '--levels=levels.txt')


def test_a_signal_ends_the_reading_of_keys_and_leaves_the_terminal_as_it_was(monkeypatch):
    """An arrow key is one key, although it sends three characters."""
    controller, terminal = pty.openpty()
    before = termios.tcgetattr(terminal)
    monkeypatch.setattr(sys, 'stdin', open(terminal))
    with pytest.raises(SystemExit, match='143'), play_sokoban.keyboard() as read_key:
        os.write(controller, b'\x1b[A')
        assert [read_key(1), read_key(0)] == ['\x1b', '']
        signal.raise_signal(signal.SIGTERM)
    assert termios.tcgetattr(terminal) == before
    os.close(controller)
    signal.signal(signal.SIGTSTP, signal.SIG_DFL)  # keyboard() ignores ctrl-Z


# ---- plans, pictures ----


def test_plans_are_the_predictions_of_the_probe_above_its_threshold(tmp_path):
    """The logit of class k is channel k of the feature at the cell."""
    weight = torch.zeros(5, 4, 3, 3)
    weight[:4, :, 1, 1] = torch.eye(4)
    probe = {'weight': weight, 'bias': torch.zeros(5), 'threshold': torch.tensor(0.9)}
    safetensors.save_file(probe, tmp_path / 'probe.safetensors')
    configure(vars(play_sokoban), [f'--probe={tmp_path}/probe.safetensors'], quiet=True)
    features = torch.zeros(2, 10, 10, 4)
    features[0, 2, 3, LEFT] = features[1, 5, 6, UP] = 9.0
    features[1, 7, 7, RIGHT] = 1.0  # a probability of 0.4
    expected = np.full((3, 10, 10), -1)
    expected[0, 2, 3], expected[1, 5, 6] = LEFT, UP
    agent = torch.nn.Linear(2, 2)
    assert np.array_equal(play_sokoban.read_plans(features, agent), expected)
    probe['agent'] = torch.tensor(weights_checksum(agent))
    safetensors.save_file(probe, tmp_path / 'probe.safetensors')
    assert np.array_equal(play_sokoban.read_plans(features, agent), expected)
    message = 'probe.safetensors: was trained on another agent'
    assert_refused(message, play_sokoban.read_plans, features, torch.nn.Linear(2, 2))


def board_of(*rows):
    """Return an observation (10, 10, 2) of these rows and walls around them."""
    return observations(parse_text(numbered([text(*rows)]), 'x'))[0]


@pytest.mark.parametrize('encoding, row', [
    ('utf-8', '██◉ ▣ → → → → → → ██'),
    ('latin-1', '# + $ > > > > > > # '),
])  # fmt: skip
def test_free_cells_show_the_plan_in_symbols_that_the_terminal_has(encoding, row, monkeypatch):
    monkeypatch.setattr(sys, 'stdout', io.TextIOWrapper(io.BytesIO(), encoding=encoding))
    lines = play_sokoban.draw_board(board_of('#+$      #'), np.full((10, 10), RIGHT))
    assert re.sub(r'\x1b\[[0-9;]*m', '', lines[1]) == row


def test_pictures_have_the_colors_of_what_stands_on_each_cell():
    colors = {
        '#': {'mortar', 'brick'},
        ' ': {'floor'},
        '.': {'floor', 'target'},
        '$': {'floor', 'box', 'box edge'},
        '*': {'floor', 'box on target', 'box on target, edge'},
        '@': {'floor', 'agent', 'eye'},
        '+': {'floor', 'agent', 'eye', 'target'},
    }
    for row in ('#@$.*    #', '#+$      #'):
        picture = board_image(board_of(row))[24:48]  # of this row
        for x, char in enumerate(row):
            tile = picture[:, 24 * x : 24 * x + 24]
            found = {name for name, color in COLORS.items() if (tile == color).all(-1).any()}
            assert found == colors[char]


def changed_cells(picture, other):
    """Return [row, column] of each cell in which two pictures of a board differ."""
    return np.argwhere((picture != other).any(-1).reshape(10, 24, 10, 24).any((1, 3))).tolist()


def test_arrows_point_where_the_plan_does_and_wrong_ones_look_different():
    """The dark part of an arrow that points up lies mostly in the lower half of its cell."""
    board = board_of('#@       #', '#  $.    #')
    plan = np.full((10, 10), -1)
    plan[1, 1], plan[1, 5], plan[1, 7] = RIGHT, RIGHT, UP  # the first is under the agent
    picture = plan_image(board, plan)
    assert changed_cells(picture, board_image(board)) == [[1, 5], [1, 7]]
    right, up = picture[24:48, 120:144], picture[24:48, 168:192]
    assert np.nonzero((up == (20, 40, 70)).all(-1))[0].mean() > 12
    assert np.array_equal(np.rot90(right), up)
    assert changed_cells(picture, plan_image(board, plan, truth=np.zeros_like(plan))) == [[1, 5]]


# ---- mistakes ----

MISTAKES = {
    '--out_dir=agent --policy=a:b': 'name one: ',
    '--out_dir=nowhere': 'nowhere: ',
    '--out_dir=agent --level=3': 'there are 3 levels, counted from 0: --n_levels',
    '--out_dir=agent --greedy=False': 'needs --measure',
    '--out_dir=agent --measure --gif=a.gif': 'exclude each other',
    '--out_dir=agent --export=other': 'other: holds config.json, which no such export wrote',
    '--out_dir=agent --probe=wide.safetensors': 'wide.safetensors: damaged, or from another model',
    '--policy=no:right': 'module:function',
    '--policy=builtins:len': 'expected integers from 0 to 3',
}


@pytest.mark.parametrize('arguments, message', MISTAKES.items())
def test_mistakes_are_refused_in_one_line(folder, capfd, arguments, message):
    """The folder `other` looks like the export of a language model."""
    probe = {'weight': torch.zeros(5, 1, 3, 3), 'bias': torch.zeros(5)}
    safetensors.save_file(probe, 'wide.safetensors')
    Path('other').mkdir()
    other = Path('other/config.json')
    other.write_text('{"recurrent": true, "tokenizer": "bytes"}')
    argv = ['--levels=levels.txt', '--device=cpu', *arguments.split()]
    assert message in error_of(capfd, play_sokoban, argv)
    assert other.read_text() == '{"recurrent": true, "tokenizer": "bytes"}'

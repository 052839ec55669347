"""Test play_sokoban.py: games in a terminal and as text, GIFs, exports, policies, mistakes."""

import contextlib
import io
import json
import os
import pty
import re
import select
import shutil
import signal
import sys
import termios

import numpy as np
import pytest
import safetensors.torch as safetensors
import torch
from PIL import Image
from processes import ROOT, start
from small_runs import error_of, run_agent
from test_boxoban import numbered, text

import boxoban
import convlstm
import play_sokoban
import sokoban
from boxoban import generate
from configurator import configure
from play_sokoban import board_image, plan_image

RIGHT = 1
NO_PLAN = np.full((10, 10), -1)


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    """Return the folder of a run of train_sokoban.py, with a best model."""
    run = tmp_path_factory.mktemp('trained') / 'run'
    sizes = {'arch': 'convglu', 'n_layer': 1, 'n_expert': 2}
    assert run_agent(run, total_steps=48, log_interval=4, **sizes) == 0
    return run


@pytest.fixture
def folder(tmp_path, trained):
    """Return a folder with the run and five easy levels."""
    shutil.copytree(trained, tmp_path / 'run')
    np.save(tmp_path / 'levels.npy', generate(5, 1, 3, max_moves=6)[0])
    return tmp_path


def play(*arguments):
    """Run play_sokoban.py in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, 'argv', ['play_sokoban.py', *map(str, arguments)])
        play_sokoban.main()


def call(folder, *arguments):
    """Run play_sokoban.py in this process on the levels of the folder."""
    play(f'--levels={folder}/levels.npy', '--device=cpu', *arguments)


def save_probe(path, channels):
    """Write a probe that predicts a move to the right everywhere."""
    tensors = {
        'weight': torch.zeros(5, channels, 3, 3),
        'bias': torch.tensor([0.0, 9, 0, 0, 0]),
        'threshold': torch.tensor(0.5),
    }
    safetensors.save_file(tensors, path)


def game_of(folder, name, capsys):
    """Return level 2 as the agent in folder/name plays it, as text because there is no terminal."""
    capsys.readouterr()
    call(folder, f'--out_dir={folder}/{name}', '--level=2')
    return capsys.readouterr().out


def export(folder):
    """Export the run as folder/agent."""
    call(folder, f'--out_dir={folder}/run', f'--export={folder}/agent')


def test_a_second_export_replaces_the_first_and_its_evaluation(folder):
    """train_sokoban.py --eval_only writes into the folder of an export, too."""
    export(folder)
    (folder / 'agent' / 'eval_generated.json').write_text('{}')
    export(folder)
    assert sorted(os.listdir(folder / 'agent')) == ['README.md', 'config.json', 'model.safetensors']


def test_an_export_plays_the_game_that_its_run_plays(folder, capsys):
    export(folder)
    game = game_of(folder, 'run', capsys)
    assert game_of(folder, 'agent', capsys) == game
    assert game.startswith('# wall, . target, $ box, ') and '\x1b' not in game
    steps = game.count('\nlevel 2, ') - 1
    assert f'solved in {steps} steps, return ' in game.splitlines()[-1]


def test_an_export_solves_the_share_of_levels_that_its_run_solves(folder, capsys):
    export(folder)
    rates = []
    for name in ('run', 'agent'):
        capsys.readouterr()
        call(folder, f'--out_dir={folder}/{name}', '--measure')
        rates.append(capsys.readouterr().out.partition(': ')[2])
    assert rates[0] == rates[1]
    assert rates[0].startswith('solved ') and '5 levels of ' in rates[0]


@pytest.mark.parametrize('which', ['best', 'last'])
def test_an_export_has_the_score_of_its_own_weights(folder, which):
    """The last agent of a run has none."""
    call(folder, f'--out_dir={folder}/run', f'--which={which}', f'--export={folder}/agent')
    about = json.loads((folder / 'agent' / 'config.json').read_text())
    best = json.loads((folder / 'run' / 'best' / 'config.json').read_text())['best']
    assert about.get('best') == (best if which == 'best' else None)
    score = f'evaluation {best:.2f}' if which == 'best' else 'Score: not recorded'
    assert score in (folder / 'agent' / 'README.md').read_text()


def test_a_gif_has_the_boards_of_the_game(folder, capsys):
    """Pillow shows equal boards, after a blocked step, as one."""
    shipped = f'--out_dir={ROOT}/pretrained/sokoban'
    call(folder, shipped, '--level=2')
    game = re.split(r'level 2, .*\n', capsys.readouterr().out.partition('\n')[2])
    boards = [board for board, last in zip(game[:-1], ['', *game], strict=False) if board != last]
    call(folder, shipped, '--level=2', f'--gif={folder}/game.gif')
    assert 'game.gif: level 2, solved in ' in capsys.readouterr().out
    with Image.open(folder / 'game.gif') as gif:
        assert gif.n_frames == len(boards) > 2 and gif.info['duration'] % 250 == 0


def test_levels_are_read_from_the_levels_dir_of_the_run(tmp_path, capsys):
    np.save(tmp_path / 'hard.pack17.npy', generate(5, 1, 3, max_moves=6)[0])
    levels = {'levels_dir': tmp_path, 'eval_split': 'hard', 'eval_games': 3}
    assert run_agent(tmp_path / 'run', total_steps=12, **levels) == 0
    capsys.readouterr()
    play(f'--out_dir={tmp_path}/run', '--measure')
    assert capsys.readouterr().out.endswith(f'5 levels of hard from 1 file in {tmp_path}\n')


@pytest.mark.parametrize('name', ['run', 'agent'])
def test_an_agent_is_measured_as_its_run_was_evaluated(folder, capsys, name):
    """The levels are those of the run, and none of them was trained on."""
    export(folder)
    *_, record = [json.loads(line) for line in open(folder / 'run' / 'log.jsonl')]
    capsys.readouterr()
    play(f'--out_dir={folder}/{name}', '--which=last', '--n_levels=6', '--measure')
    line = capsys.readouterr().out
    if name == 'run':  # the export holds the best agent, not the last one
        assert f'solved {record["eval_solve_rate"]:.1%}, return {record["eval_return"]:.2f}' in line
    assert '6 generated levels, boxes: 1, moves: at most 6, seed: 1337' in line


def test_an_agent_without_settings_of_a_run_plays_easy_levels(tmp_path, capsys):
    config = convlstm.AgentConfig(n_embd=4, head_dim=8)
    convlstm.build_agent(config).save_pretrained(tmp_path / 'agent')
    play(f'--out_dir={tmp_path}/agent', '--n_levels=4', '--measure')
    assert '4 generated levels, boxes: 1, moves: at most 12' in capsys.readouterr().out


# ----------------------------------------------------------------------------- the terminal


def plain(line):
    """Return a line without colors."""
    return re.sub(r'\x1b\[[0-9;]*m', '', line)


@pytest.fixture
def board():
    return boxoban.observations(boxoban.parse_text(numbered([text('#@$.     #')]), 'x'))[0]


@pytest.mark.parametrize('rows, columns', [(6, 30), (24, 80)])
def test_boards_and_status_fit_the_terminal(rows, columns, board, monkeypatch, capsys):
    monkeypatch.setattr(shutil, 'get_terminal_size', lambda: os.terminal_size((columns, rows)))
    status = 'level 511, not solved in 120 steps, return -11.9'
    height = play_sokoban.show(play_sokoban.draw_board(board, NO_PLAN), status, 0)
    lines = plain(capsys.readouterr().out).strip('\r\n').removeprefix('\x1b[J').split('\n')
    assert len(lines) == height == min(11, rows - 1)
    assert max(map(len, lines)) < columns and lines[-1].startswith('level 511, not solved')


def test_free_cells_show_the_plan_and_others_what_stands_there(board):
    lines = play_sokoban.draw_board(board, np.full((10, 10), RIGHT))
    assert plain(lines[1]) == '██● ▣ ' + '→ ' * 6 + '██'


@pytest.mark.parametrize('encoding', ['latin-1', 'ascii', 'cp437'])
def test_a_terminal_that_cannot_show_the_symbols_gets_ascii(board, encoding, monkeypatch):
    monkeypatch.setattr(sys, 'stdout', io.TextIOWrapper(io.BytesIO(), encoding=encoding))
    lines = play_sokoban.draw_board(board, np.full((10, 10), RIGHT))
    assert plain(lines[1]) == '# @ $ ' + '> ' * 6 + '# '


def play_with_keys(folder, keys, monkeypatch, capsys, *arguments):
    """Play in a simulated terminal, in which each wait for a key returns the next of `keys`. Return
    what is printed before the screens that are drawn, and these."""
    waits = iter(keys)

    @contextlib.contextmanager
    def keyboard():
        yield lambda seconds: next(waits)

    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, 'isatty', lambda: True)
    monkeypatch.setattr(play_sokoban, 'keyboard', keyboard)
    monkeypatch.setattr(shutil, 'get_terminal_size', lambda: os.terminal_size((80, 24)))
    capsys.readouterr()
    call(folder, f'--out_dir={folder}/run', *arguments)
    assert not list(waits)
    return capsys.readouterr().out.split('\r\x1b[J')


def test_keys_step_pause_and_change_levels(folder, monkeypatch, capsys):
    """Without a key ('') the game makes a step. The symbols are explained before the first."""
    save_probe(folder / 'run' / 'probe.safetensors', 4)
    keys = ['', 's', ' ', 'n', 'x', 'q']
    explained, *screens = play_with_keys(folder, keys, monkeypatch, capsys)
    assert 'box on a target' in explained and 'where the agent plans to step' in explained
    shown = [re.search(r'level \d, step \d', screen)[0] for screen in screens]
    assert shown == [
        'level 0, step 0',
        'level 0, step 1',
        'level 0, step 2',
        'level 0, step 2',
        'level 1, step 0',
        'level 1, step 1',
    ]
    assert '→' in screens[0] and screens[0].endswith('\x1b[11A')  # the next is drawn over it


def test_an_arrow_key_is_one_key(monkeypatch):
    """It sends three characters."""
    controller, terminal = pty.openpty()
    monkeypatch.setattr(signal, 'signal', lambda *args: None)  # pytest keeps its handlers
    monkeypatch.setattr(sys, 'stdin', open(terminal))
    with play_sokoban.keyboard() as read_key:
        os.write(controller, b'\x1b[A')
        assert [read_key(1), read_key(0)] == ['\x1b', '']
        os.write(controller, b'q')
        assert read_key(1) == 'q'
    os.close(controller)


def test_after_the_given_number_of_games_the_script_ends(folder, monkeypatch, capsys):
    steps = []
    for i in range(2):
        call(folder, f'--out_dir={folder}/run', f'--level={i}')
        steps.append(capsys.readouterr().out.count(f'level {i}, '))
    keys = [''] * sum(steps)
    _, *screens = play_with_keys(folder, keys, monkeypatch, capsys, '--games=2')
    assert len(screens) == sum(steps) and 'level 1, ' in screens[-1]


def test_a_signal_ends_a_game_and_leaves_the_terminal_as_it_was(folder):
    """The game runs in a pseudo-terminal. The signal comes after a key that plays one step."""
    controller, terminal = pty.openpty()
    before = termios.tcgetattr(terminal)
    arguments = [f'--out_dir={folder}/run', f'--levels={folder}/levels.npy', '--ms=60000']
    command = ['play_sokoban.py', *arguments, '--device=cpu']
    process = start(command, stdin=terminal, stdout=terminal, stderr=terminal)
    printed = b''

    def wait_for(text):
        nonlocal printed
        while text not in printed:
            assert select.select([controller], [], [], 120)[0], printed
            printed += os.read(controller, 4096)

    wait_for(b'level 0, step 0')
    os.write(controller, b's')
    wait_for(b'level 0, step 1')
    process.send_signal(signal.SIGTERM)
    wait_for(b'\x1b[?25h')  # the cursor is shown again
    assert process.wait() == 128 + signal.SIGTERM
    assert termios.tcgetattr(terminal) == before
    os.close(controller)
    os.close(terminal)


# ----------------------------------------------------------------------------- plans, policies


def test_plans_are_the_predictions_of_the_probe_above_its_threshold(folder):
    """The logit of class k is channel k of the feature at the cell."""
    weight = torch.zeros(5, 4, 3, 3)
    weight[:4, :, 1, 1] = torch.eye(4)
    probe = {'weight': weight, 'bias': torch.zeros(5), 'threshold': torch.tensor(0.9)}
    safetensors.save_file(probe, folder / 'probe.safetensors')
    arguments = [f'--out_dir={folder}/run', f'--probe={folder}/probe.safetensors']
    configure(vars(play_sokoban), arguments, quiet=True)
    features = torch.zeros(2, 10, 10, 4)
    features[0, 2, 3, 3] = 9.0  # left
    features[1, 5, 6, 0] = 9.0  # up
    features[1, 7, 7, 1] = 1.0  # right, but with a probability of 0.4
    plans = play_sokoban.read_plans(features)
    assert plans.shape == (3, 10, 10) and plans[0, 2, 3] == 3 and plans[1, 5, 6] == 0
    assert (plans >= 0).sum() == 2


POLICIES = """
import numpy as np

def right(observations):
    assert observations.shape[1:] == (10, 10, 2)
    return np.ones(len(observations), int)

def no_action(observations):
    return [4] * len(observations)
"""


@pytest.fixture
def policies(folder, monkeypatch):
    """Work in a folder with a module of policies and two levels."""
    monkeypatch.chdir(folder)
    (folder / 'user_policy.py').write_text(POLICIES)
    (folder / 'two.txt').write_text(numbered([text('#@$.     #'), text('#.$@     #')]))


@pytest.mark.parametrize('more', [[], ['--measure']])
def test_a_policy_of_the_user_is_evaluated(policies, capsys, more):
    """`right` solves the first of the two levels with its first step."""
    play('--policy=user_policy:right', '--levels=two.txt', *more)
    line = 'user_policy:right: solved 50.0%, return -0.55, 60 steps; 2 levels of two.txt\n'
    assert capsys.readouterr().out == line


@pytest.mark.parametrize(
    'name, message',
    [('user_policy:no_action', '[4 4], int64 of shape'), ('no:right', 'module:function')],
)
def test_a_policy_that_is_missing_or_returns_no_actions_is_refused(policies, capfd, name, message):
    assert message in error_of(capfd, play_sokoban, [f'--policy={name}', '--levels=two.txt'])


MISTAKES = {
    '--out_dir=run --policy=a:b': 'name one: ',
    '--out_dir=nowhere': 'nowhere: ',
    '--out_dir=run --level=5': 'there are 5 levels, counted from 0: --n_levels',
    '--out_dir=run --greedy=False': 'needs --measure',
    '--policy=a:b --measure --greedy=False': 'and an agent, not a policy',
    '--policy=a:b --gif=a.gif': 'exclude each other',
    '--out_dir=run --export=other': 'no such export',
    f'--out_dir=run --export={ROOT}/pretrained/lm': 'no such export',
    '--out_dir=run --gif=none/a.gif': 'none/',
    '--out_dir=run --probe=wide.safetensors': 'wide.safetensors: damaged, or from another model',
    '--out_dir=run --probe=none': 'none: cannot be read',
}


@pytest.mark.parametrize('arguments, message', MISTAKES.items())
def test_mistakes_are_refused_in_one_line(folder, capfd, monkeypatch, arguments, message):
    monkeypatch.chdir(folder)
    save_probe(folder / 'wide.safetensors', 5)
    (folder / 'other').mkdir()
    (folder / 'other' / 'config.json').write_text('{}')
    argv = [f'--levels={folder}/levels.npy', '--device=cpu', *arguments.split()]
    assert message in error_of(capfd, play_sokoban, argv)
    assert (folder / 'other' / 'config.json').read_text() == '{}'


@pytest.mark.parametrize(
    'name, content', [('config.json', b'{"arch": "convolution"}'), ('model.safetensors', b'hello')]
)
def test_a_damaged_export_is_named(folder, capfd, monkeypatch, name, content):
    monkeypatch.chdir(folder)
    call(folder, '--out_dir=run', '--export=agent')
    (folder / 'agent' / name).write_bytes(content)
    assert f'error: agent/{name}: ' in error_of(capfd, play_sokoban, ['--out_dir=agent'])


def test_the_shipped_agent_solves_easy_levels_and_has_plans():
    """On a large sample it solves 98%, with greedy and with sampled actions, and a random policy
    20%. This test uses 60 levels."""
    configure(vars(play_sokoban), [f'--out_dir={ROOT}/pretrained/sokoban'], quiet=True)
    agent = convlstm.load_agent(play_sokoban.out_dir)
    levels = generate(60, 1, 5, 12, evaluation=True)[0]
    assert sokoban.evaluate(agent, levels, 'cpu')['solve_rate'] > 0.8
    assert sokoban.evaluate(agent, levels, 'cpu', seed=1)['solve_rate'] > 0.8
    assert sokoban.evaluate(sokoban.RANDOM, levels, 'cpu', seed=1)['solve_rate'] < 0.5
    game = play_sokoban.play_level(agent, levels, 0, 'cpu', sokoban.TIME_LIMIT)
    assert game.plans.shape == (len(game.boards), 10, 10) and (game.plans >= 0).any()
    assert game.outcome.startswith('level 0, ')


# ----------------------------------------------------------------------------- pictures


def test_each_character_has_a_picture_of_its_own():
    rows, pictures = [text('#@$.     #', '# *      #', '#$. $.   #'), text('#+$      #')], {}
    for row, board in zip(
        rows, boxoban.observations(boxoban.parse_text(numbered(rows), 'x')), strict=True
    ):
        tiles = board_image(board, 20).reshape(10, 20, 10, 20, 3).swapaxes(1, 2).reshape(100, -1)
        for char, tile in zip(row.replace('\n', ''), tiles, strict=True):
            assert pictures.setdefault(char, tile.tobytes()) == tile.tobytes()
    assert len(set(pictures.values())) == len(pictures) == 7


def test_arrows_point_where_the_plan_does_and_wrong_ones_look_different():
    """The dark part of an arrow to the right lies mostly on the left of its cell."""
    levels = boxoban.parse_text(numbered([text('#@       #', '#  $.    #')]), 'x')
    board = boxoban.observations(levels)[0]
    plan = NO_PLAN.copy()
    plan[1, 1], plan[1, 5], plan[1, 7] = RIGHT, RIGHT, 0  # the first is under the agent
    plain, picture = board_image(board), plan_image(board, plan)
    drawn = (picture != plain).any(-1)
    cells = drawn.reshape(10, 24, 10, 24).any((1, 3))
    assert np.argwhere(cells).tolist() == [[1, 5], [1, 7]]
    dark = (picture == (20, 40, 70)).all(-1)
    right, up = dark[24:48, 120:144], dark[24:48, 168:192]
    assert right[:, :12].sum() > right[:, 12:].sum() > 0
    assert up[12:].sum() > up[:12].sum() > 0
    truth = np.where(plan == 0, 0, 3)
    judged = plan_image(board, plan, truth)
    assert np.array_equal(judged[24:48, 168:192], picture[24:48, 168:192])
    assert (judged[24:48, 120:144] != picture[24:48, 120:144]).any()


def test_a_gif_of_a_long_game_in_which_nothing_moves_is_written(tmp_path):
    """Pillow adds up the durations of equal frames, up to 655 s."""
    frames = 10_001 * [np.zeros((10, 10, 3), np.uint8)]
    play_sokoban.save_gif(frames, str(tmp_path / 'game.gif'), ms=250)
    with Image.open(tmp_path / 'game.gif') as gif:
        assert 600_000 < gif.info['duration'] < 655_360

"""Test play_sokoban.py: games in a terminal and as text, GIFs, exports, policies, mistakes."""

import contextlib
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
from small_runs import error_of
from test_sokoban import numbered, text

import convlstm
import play_sokoban
import sokoban
from common import load_checkpoint, save_checkpoint
from configurator import configure
from convlstm import AgentConfig, build_agent
from sokoban import generate

SIZES = {'arch': 'convglu', 'n_embd': 4, 'n_expert': 2, 'head_dim': 8, 'recurrent': True}
RIGHT = 1


@pytest.fixture
def folder(tmp_path):
    """Return a folder with an untrained run of train_sokoban.py and five easy levels."""
    torch.manual_seed(0)
    model, run = build_agent(AgentConfig(**SIZES)), tmp_path / 'run'
    run.mkdir()
    sizes = {name: getattr(model.config, name) for name in convlstm.SIZES}
    config = {**sizes, **play_sokoban.EASY, 'n_envs': 4, 'unroll': 2, 'dtype': 'auto'}
    saved = {'model': model.state_dict(), 'config': config, 'step': 3, 'best': 1.5}
    save_checkpoint(saved, run / 'ckpt_last.pt')
    np.save(tmp_path / 'levels.npy', generate(5, 1, 3, max_moves=6)[0])
    return tmp_path


def call(folder, *arguments):
    """Run play_sokoban.py in this process on the levels of the folder."""
    arguments = [f'--levels={folder}/levels.npy', '--device=cpu', *arguments]
    configure(vars(play_sokoban), arguments, quiet=True)
    play_sokoban.use_agent()


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


def test_a_second_export_replaces_the_first(folder):
    for _ in range(2):
        export(folder)
    assert sorted(os.listdir(folder / 'agent')) == ['README.md', 'config.json', 'model.safetensors']


def test_an_export_plays_the_game_that_its_run_plays(folder, capsys):
    export(folder)
    game = game_of(folder, 'run', capsys)
    assert game_of(folder, 'agent', capsys) == game
    assert game.startswith('# wall, @ agent, ') and '\x1b' not in game
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


@pytest.mark.parametrize('which, best', [('best', 1.5), ('last', None)])
def test_an_export_has_the_score_of_its_own_weights(folder, which, best):
    """`best` in the last checkpoint is the score of the best one."""
    run = folder / 'run'
    shutil.copy(run / 'ckpt_last.pt', run / 'ckpt_best.pt')
    call(folder, f'--out_dir={run}', f'--which={which}', f'--export={folder}/agent')
    assert json.loads((folder / 'agent' / 'config.json').read_text())['best'] == best
    score = 'Score: best mean return of an evaluation 1.50' if best else 'Score: not recorded'
    assert score in (folder / 'agent' / 'README.md').read_text()


def test_a_gif_has_the_boards_of_the_game(folder, capsys):
    boards = game_of(folder, 'run', capsys).count('\nlevel 2, ')
    call(folder, f'--out_dir={folder}/run', '--level=2', f'--gif={folder}/game.gif')
    with Image.open(folder / 'game.gif') as gif:
        assert gif.n_frames == boards and gif.info['duration'] == 250


def test_levels_are_read_from_the_levels_dir_of_the_run(folder, capsys):
    np.save(folder / 'hard.pack17.npy', generate(5, 1, 3, max_moves=6)[0])
    saved = load_checkpoint(folder / 'run' / 'ckpt_last.pt')
    saved['config']['levels_dir'] = str(folder)
    save_checkpoint(saved, folder / 'run' / 'ckpt_last.pt')
    call(folder, f'--out_dir={folder}/run', '--levels=hard', '--measure')
    assert f'5 levels of hard from 1 file in {folder}\n' in capsys.readouterr().out


def test_generated_levels_on_which_the_run_was_trained_are_left_out(folder, monkeypatch):
    """The generator makes the same levels for every seed here. An export excludes as its run."""
    settings = {'split': 'generated', 'n_levels': 30, 'n_boxes': 1, 'max_moves': 12, 'seed': 3}
    saved = load_checkpoint(folder / 'run' / 'ckpt_last.pt')
    saved['config'] |= settings
    save_checkpoint(saved, folder / 'run' / 'ckpt_last.pt')
    export(folder)
    generated, _ = generate(40, 1, 7, 12)
    evaluated = []
    monkeypatch.setattr(sokoban, 'generate', lambda **settings: generate(**{**settings, 'seed': 7}))
    monkeypatch.setattr(
        play_sokoban, 'print_game', lambda agent, levels, *rest: evaluated.append(levels)
    )
    for name in ('run', 'agent'):
        call(folder, f'--out_dir={folder}/{name}', '--levels=generated', '--n_levels=10')
    assert all(np.array_equal(levels, generated[30:]) for levels in evaluated)
    assert len(evaluated) == 2


# ----------------------------------------------------------------------------- the terminal


def plain(line):
    """Return a line without colors."""
    return re.sub(r'\x1b\[[0-9;]*m', '', line)


@pytest.mark.parametrize('rows, columns', [(8, 40), (24, 80)])
def test_boards_help_and_status_fit_the_terminal(rows, columns, monkeypatch):
    monkeypatch.setattr(shutil, 'get_terminal_size', lambda: os.terminal_size((columns, rows)))
    board = sokoban.observations(sokoban.parse_text(numbered([text('#@$.     #')]), 'x'))[0]
    drawn = play_sokoban.draw_board(board, np.full((10, 10), -1), rows - 2)
    status = play_sokoban.status_line('level 511, not solved in 120 steps, return -11.9')
    explained = play_sokoban.draw_help(rows - 2)
    assert len(drawn) + 1 < rows and len(explained) < rows
    assert max(len(plain(line)) for line in [*drawn, status, *explained]) <= columns
    for word in ('wall', 'agent', 'box', 'target', 'space', 'step', 'next', 'quit'):
        assert word in '\n'.join(explained)


def test_free_cells_show_the_plan_and_others_what_stands_there():
    board = sokoban.observations(sokoban.parse_text(numbered([text('#@$.     #')]), 'x'))[0]
    lines = play_sokoban.draw_board(board, np.full((10, 10), RIGHT), 10)
    assert plain(lines[1]) == '██● ▣ ' + '→ ' * 6 + '██'


def test_a_small_board_holds_two_cells_in_a_character():
    """The first line holds a row of walls above a wall, the agent, a box, a target, five cells of
    floor and a wall."""
    board = sokoban.observations(sokoban.parse_text(numbered([text('#@$.     #')]), 'x'))[0]
    lines = play_sokoban.draw_board(board, np.full((10, 10), -1), 5)
    colors = {name: play_sokoban.TILES[char][1] for char, name in zip('#@$.', 'wabt', strict=True)}
    expected = [f'\x1b[38;5;{colors["w"]};48;5;{colors[name]}m▀\x1b[0m' for name in 'wabt']
    expected += [f'\x1b[38;5;{colors["w"]}m▀\x1b[0m'] * 5 + expected[:1]
    assert len(lines) == 5 and lines[0] == ''.join(expected)


def play_with_keys(folder, keys, monkeypatch, capsys, *arguments):
    """Play in a simulated terminal, in which each wait for a key returns the next of `keys`. Return
    the screens that are drawn."""
    waits = iter(keys)

    @contextlib.contextmanager
    def keyboard():
        yield lambda seconds: next(waits)

    monkeypatch.setattr(play_sokoban, 'is_terminal', lambda: True)
    monkeypatch.setattr(play_sokoban, 'keyboard', keyboard)
    monkeypatch.setattr(shutil, 'get_terminal_size', lambda: os.terminal_size((80, 24)))
    capsys.readouterr()
    call(folder, f'--out_dir={folder}/run', *arguments)
    assert not list(waits)
    return capsys.readouterr().out.split('\r\x1b[J')[1:]


def test_keys_step_pause_explain_and_change_levels(folder, monkeypatch, capsys):
    """Without a key ('') the game makes a step. The help stays until a key is pressed."""
    save_probe(folder / 'run' / 'probe.safetensors', 4)
    keys = ['', 's', '?', 'x', ' ', 'n', 'h', 'x', 'q']
    screens = play_with_keys(folder, keys, monkeypatch, capsys)
    shown = [re.search(r'level \d, step \d|space pause   s step', screen)[0] for screen in screens]
    assert shown == [
        'level 0, step 0',
        'level 0, step 1',
        'level 0, step 2',
        'space pause   s step',
        'level 0, step 2',
        'level 0, step 2',
        'level 1, step 0',
        'space pause   s step',
        'level 1, step 0',
    ]
    assert '→' in screens[0] and screens[0].endswith('\x1b[11A')  # the next is drawn over it


def test_q_ends_a_game_from_the_help_too(folder, monkeypatch, capsys):
    screens = play_with_keys(folder, ['?', 'q'], monkeypatch, capsys)
    assert len(screens) == 2 and 'q quit' in screens[1]


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
    screens = play_with_keys(folder, keys, monkeypatch, capsys, '--games=2')
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


def test_a_policy_of_the_user_is_evaluated(policies, capfd):
    """`right` solves the first of the two levels with its first step."""
    configure(vars(play_sokoban), ['--policy=user_policy:right', '--levels=two.txt'], quiet=True)
    play_sokoban.use_agent()
    line = 'user_policy:right: solved 50.0%, return -0.55, 60 steps; 2 levels of two.txt\n'
    assert capfd.readouterr().out == line


def test_a_policy_may_be_measured_explicitly(policies, capfd, monkeypatch):
    argv = ['play_sokoban.py', '--policy=user_policy:right', '--levels=two.txt', '--measure']
    monkeypatch.setattr(sys, 'argv', argv)
    play_sokoban.main()
    assert 'solved 50.0%' in capfd.readouterr().out


@pytest.mark.parametrize(
    'name, message', [('user_policy:no_action', '4 4], shape'), ('no:right', 'module:function')]
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
    '--out_dir=run --probe=wide.safetensors': 'wide.safetensors: model does not fit',
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
    assert f'agent/{name}: ' in error_of(capfd, play_sokoban, ['--out_dir=agent'])


def test_the_shipped_agent_solves_easy_levels_and_has_plans():
    """On a large sample it solves 98%, with greedy and with sampled actions, and a random policy
    20%. This test uses 60 levels."""
    configure(vars(play_sokoban), [f'--out_dir={ROOT}/pretrained/sokoban'], quiet=True)
    agent, about, _ = convlstm.load_agent(play_sokoban.out_dir, 'best', 'cpu')
    levels = generate(60, about['n_boxes'], 5, about['max_moves'])[0]
    assert sokoban.evaluate(agent, levels, 'cpu')['solve_rate'] > 0.8
    assert sokoban.evaluate(agent, levels, 'cpu', seed=1)['solve_rate'] > 0.8
    assert sokoban.evaluate(sokoban.RANDOM, levels, 'cpu', seed=1)['solve_rate'] < 0.5
    game = play_sokoban.play_level(agent, levels, 0, 'cpu', sokoban.TIME_LIMIT)
    assert game.plans.shape == (len(game.boards), 10, 10) and (game.plans >= 0).any()
    assert game.outcome.startswith('level 0, ')

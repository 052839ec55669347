"""
Watch a Sokoban agent play, in a terminal or as a GIF; measure its solve rate; export it.

$ python play_sokoban.py --out_dir=pretrained/sokoban          # `?` explains symbols and keys
$ python play_sokoban.py --out_dir=pretrained/sokoban --level=3 --gif=game.gif
$ python play_sokoban.py --out_dir=out/sokoban_small_L4 --measure
$ python play_sokoban.py --policy=my_module:my_function --levels=unfiltered-test
$ python play_sokoban.py --out_dir=out/sokoban_small_L4 --export=out/agent

Arrows show the agent's plan, as a probe (probe_sokoban.py) reads it from the agent's state: the
arrow on a cell is the direction in which the agent will step onto it. Without a terminal, one game
is printed as text.
"""

import contextlib
import itertools
import math
import os
import select
import shutil
import signal
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from typing import NamedTuple

from configurator import Mistake, configure, run_script

import numpy as np
import torch
import torch.nn.functional as F
from numpy import ndarray
from torch import Tensor

import common
from convlstm import PROBE, Agent, load_agent
from files import read_tensors
from hub import load_weights
from sokoban import WALL, FeatureRecorder, board_text, evaluate, load_level_sets, load_policy
from sokoban import TIME_LIMIT, plan_image, replay, run_episodes, save_gif

# fmt: off
out_dir = ''                   # the agent's folder: a run of train_sokoban.py, or an export
which = 'best'                 # checkpoint of a run: 'best', with the highest evaluation return
                               # ('last' if the run has none), or 'last'
policy = ''                    # instead of an agent, module:function: a function from observations
                               # (N, 10, 10, 2) uint8 to actions (N,), 0..3; implies measure
measure = False                # print solve rate and return on the levels instead of showing games
greedy = True                  # with measure: the most likely actions; False: sampled actions
levels = ''                    # a split or a file; '': the agent's evaluation levels, or for a
                               # policy easy generated levels
levels_dir = ''                # folder with Boxoban's levels; '': that of the run, or data/boxoban
download = False               # download the split into levels_dir if it is not there
n_levels = 512                 # use the first n_levels levels
level = 0                      # number of the first level to show
games = 0                      # games to show in a terminal; 0: until q is pressed
ms = 250                       # milliseconds per step, in a terminal or a GIF
probe = ''                     # a probe of this agent from probe_sokoban.py, which gives the
                               # arrows; '': probe.safetensors in out_dir, if it is there
gif = ''                       # write a game into this file instead of showing it
export = ''                    # write the agent into this folder, as safetensors and JSON
device = 'auto'                # 'auto': cuda if there is one; or 'cpu', 'cuda', 'cuda:1'
# fmt: on
RANGES = {
    'which': ['best', 'last'],
    'n_levels': (1, math.inf),
    'level': (0, math.inf),
    'ms': (10, math.inf),
    'games': (0, math.inf),
}

# settings of the levels that a policy is measured on by default
EASY = {'eval_split': 'generated', 'n_boxes': 1, 'max_moves': 12, 'seed': 1337}


# ----------------------------------------------------------------------------- one game


class Game(NamedTuple):
    """A game that was played greedily to its end."""

    boards: ndarray  # observations (T + 1, 10, 10, 2): before, between and after the T steps
    plans: ndarray  # (T + 1, 10, 10): directions 0..3 (up, right, down, left), -1 for no arrow
    outcome: str  # 'level 3, solved in 20 steps, return 9.0'


def play_level(agent: Agent, levels: ndarray, i: int, device: str, time_limit: int) -> Game:
    """Play level i of the packed levels greedily."""
    recorder = FeatureRecorder(agent)
    results = run_episodes(recorder, levels[i : i + 1], device, time_limit=time_limit)
    steps = int(results['steps'])
    boards = replay(levels[i : i + 1], results['actions'][:, :steps].numpy())[0]
    features = torch.cat(recorder.features).float()  # (T, 10, 10, C)
    end = 'solved' if results['solved'].item() else 'not solved'
    outcome = f'level {i}, {end} in {steps} steps, return {results["return"].item():.1f}'
    return Game(boards=boards, plans=read_plans(features), outcome=outcome)


@torch.no_grad()
def read_plans(features: Tensor) -> ndarray:
    """Return the plans (T + 1, 10, 10) that the probe reads from a game's s[L] (T, 10, 10, C).

    The plan after the last step has no arrows. Without a probe no plan has any. Raises
    Mistake if the probe's file is damaged or does not fit the agent.
    """
    plans = np.full((len(features) + 1, 10, 10), -1)
    path = probe or os.path.join(out_dir, PROBE)
    if probe or os.path.exists(path):
        conv = torch.nn.Conv2d(features.size(-1), 5, 3, padding=1)  # four directions, or none
        saved = read_tensors(path)
        threshold = saved.pop('threshold', torch.tensor(math.inf))
        load_weights(conv, saved, path)
        probabilities = F.softmax(conv(features.permute(0, 3, 1, 2)), 1)  # (T, 5, 10, 10)
        best, direction = probabilities[:, :4].max(1)
        plans[:-1] = torch.where(best >= threshold, direction, -1).numpy()
    return plans


# ----------------------------------------------------------------------------- the terminal

# {Boxoban's character: (symbol of two columns, number of its color, name)}. Color-blind readers can
# tell the colors apart, and the symbols differ in shape too.
TILES = {
    '#': ('██', 240, 'wall'),
    ' ': ('  ', None, 'floor'),
    '.': ('◦ ', 175, 'target'),
    '$': ('▣ ', 214, 'box'),
    '*': ('■ ', 36, 'box on a target'),
    '@': ('● ', 33, 'agent'),
    '+': ('◉ ', 81, 'agent on a target'),
}
ARROWS = '↑→↓←'
LEGEND = '# wall, @ agent, $ box, . target, * box on a target, + agent on a target'


def paint(text: str, color: int | None, background: int | None = None) -> str:
    """Return the text in two of a terminal's 256 colors; None leaves a color unchanged."""
    codes = []
    if color is not None:
        codes.append(f'38;5;{color}')
    if background is not None:
        codes.append(f'48;5;{background}')
    return f'\x1b[{";".join(codes)}m{text}\x1b[0m' if codes else text


def draw_two_cells(upper: str, lower: str) -> str:
    """Return one character whose halves have the colors of two of Boxoban's characters."""
    above, below = TILES[upper][1], TILES[lower][1]
    if above is None and below is None:
        return ' '
    return paint('▄', below) if above is None else paint('▀', above, below)


def draw_board(board: ndarray, plan: ndarray, lines: int) -> list[str]:
    """Return a board as lines of colored text, for a terminal that has room for `lines` lines.

    Where there is room, ten lines of 20 columns, with the plan's arrows on free cells. Otherwise
    five lines of ten columns: a character holds two cells, one above the other, which differ only
    in color.
    """
    rows = board_text(board).split('\n')
    if lines < 10:
        return [
            ''.join(map(draw_two_cells, upper, lower))
            for upper, lower in zip(rows[::2], rows[1::2], strict=True)
        ]
    cells = [[paint(*TILES[char][:2]) for char in row] for row in rows]
    is_free = (board[..., 0] == 0) & (board[..., 1] != WALL)  # no agent, box or wall
    for y, x in np.argwhere((plan >= 0) & is_free):
        cells[y][x] = ARROWS[plan[y, x]] + ' '
    return [''.join(row) for row in cells]


def draw_help(lines: int) -> list[str]:
    """Return what symbols, arrows and keys mean, in at most five lines of 40 columns."""

    def explain(char: str) -> str:
        symbol, color, name = TILES[char]
        return paint('█' if lines < 10 else symbol.strip(), color) + f' {name}'

    text = ['   '.join(map(explain, '#@$.')), '   '.join(map(explain, '*+'))]
    if lines >= 10:  # smaller boards have no arrows
        text.append(f'{" ".join(ARROWS)} where the agent plans to step')
    return [*text, 'space pause   s step   n next level', 'q quit   ? or h help   other keys: back']


class Screen:
    """A block of lines at the end of a terminal's text, which each call of `show` draws again."""

    def __init__(self):
        self.height = 0  # number of lines on the screen now
        self.size = None  # of the terminal

    def show(self, lines: list[str]) -> None:
        """Draw the lines over those of the last call. If the terminal's size has changed, clear it
        first."""
        size = shutil.get_terminal_size()
        if self.size not in (None, size):
            print('\x1b[2J\x1b[H', end='')
            self.height = 0
        lines = lines[-max(1, size.lines - 1) :]  # the cursor stands on a line of its own
        up = f'\x1b[{self.height}A' if self.height else ''
        self.size, self.height = size, len(lines)
        print(up + '\r\x1b[J' + '\n'.join(lines), flush=True)


def status_line(text: str) -> str:
    """Return the text and the keys, cut to the terminal's width: a line that wraps would shift the
    board."""
    columns = shutil.get_terminal_size().columns
    keys = '  (space pause, s step, n next, q quit, ? help)'
    if columns <= len(text + keys):
        keys = '  ? help'
    return (text + keys)[: max(1, columns - 1)]


@contextlib.contextmanager
def keyboard() -> Iterator[Callable[[float | None], str]]:
    """Yield read_key(seconds), a function that returns the next key, or '' if none is pressed in
    that time; with None it waits for a key.

    The terminal is restored whatever ends the program.
    """
    source = sys.stdin.fileno()

    def read_key(seconds: float | None) -> str:
        if not select.select([source], [], [], seconds)[0]:
            return ''
        # an arrow key sends three characters at once: they count as one key
        return os.read(source, 16).decode(errors='replace')[:1] or 'q'  # '' is the end of the input

    def leave(number: int, frame: object) -> None:
        sys.exit(128 + number)  # runs the finally below

    # ctrl-Z would leave the terminal without cursor and echo
    handlers = {signal.SIGTERM: leave, signal.SIGHUP: leave, signal.SIGTSTP: signal.SIG_IGN}
    before = termios.tcgetattr(source)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    try:
        tty.setcbreak(source)
        print('\x1b[?25l', end='')  # hide the cursor
        yield read_key
    finally:
        termios.tcsetattr(source, termios.TCSADRAIN, before)
        print('\x1b[?25h', flush=True)


def is_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def show_games(agent: Agent, levels: ndarray, device: str, time_limit: int) -> None:
    """Show games in a terminal, one after the other."""
    screen = Screen()
    paused = False
    with keyboard() as read_key:
        for number in itertools.count():
            i = (level + number) % len(levels)
            game = play_level(agent, levels, i, device, time_limit)
            for t, board in enumerate(game.boards):
                is_last = t + 1 == len(game.boards)
                status = game.outcome if is_last else f'level {i}, step {t}'
                seconds = ms / 1000 * (8 if is_last else 1)
                while True:
                    lines = shutil.get_terminal_size().lines - 2  # without status and cursor
                    drawn = draw_board(board, game.plans[t], lines)
                    screen.show([*drawn, status_line(status)])
                    key = read_key(None if paused else seconds)
                    if key in ('?', 'h'):
                        screen.show(draw_help(lines))
                        if read_key(None) == 'q':
                            return
                    elif key == ' ':
                        paused = not paused
                    else:
                        break
                if key == 'q':
                    return
                if key == 'n':
                    break
                paused = paused or key == 's'
            if number + 1 == games:
                return


def print_game(agent: Agent, levels: ndarray, device: str, time_limit: int) -> None:
    """Print one game as plain text."""
    game = play_level(agent, levels, level, device, time_limit)
    print(LEGEND)
    for t, board in enumerate(game.boards):
        is_last = t + 1 == len(game.boards)
        print(board_text(board))
        print(game.outcome if is_last else f'level {level}, step {t}', flush=True)


# ----------------------------------------------------------------------------- the script


def use_agent() -> None:
    """Export the agent, measure it, write a GIF or show games, depending on the settings."""
    torch_device = common.pick_device(device)
    if policy:
        agent = load_policy(policy)
        about = EASY
    else:
        agent = load_agent(out_dir, which, torch_device)
        about = {**agent.config.__dict__, **agent.about.get('settings', {})}
    if export:
        agent.save_pretrained(export)
        print(f'{export}: the agent of {out_dir}')
        return
    level_settings = {
        **about,
        'eval_split': levels or about['eval_split'],
        'eval_games': n_levels,
        'levels_dir': levels_dir or about.get('levels_dir', ''),
        'download': download,
    }
    _, (packed, source) = load_level_sets(level_settings, run=about)
    if level_settings['eval_split'] == 'generated' and not policy and 'split' not in about:
        source += "; the agent's training levels are unknown, and may be among them"
    time_limit = about.get('time_limit', TIME_LIMIT)
    if policy or measure:
        actions_seed = None if greedy else about['seed']
        rates = evaluate(agent, packed, torch_device, actions_seed, time_limit)
        solved = f'solved {rates["solve_rate"]:.1%}, return {rates["return"]:.2f}'
        print(f'{policy or out_dir}: {solved}, {rates["steps"]:.0f} steps; {source}')
        return
    if level >= len(packed):
        there_are = f'there are {len(packed)} levels, counted from 0'
        raise Mistake(f'level = {level}: {there_are}: --n_levels uses more of a split')
    if gif:
        common.need_packages(PIL=True)
        game = play_level(agent, packed, level, torch_device, time_limit)
        pictures = [
            plan_image(board, plan) for board, plan in zip(game.boards, game.plans, strict=True)
        ]
        save_gif(pictures, gif, ms)
        print(f'{gif}: {game.outcome}')
    elif is_terminal():
        show_games(agent, packed, torch_device, time_limit)
    else:
        print_game(agent, packed, torch_device, time_limit)


def main() -> None:
    configure(globals(), quiet=True)
    if bool(out_dir) == bool(policy):
        raise Mistake('name one: --out_dir=FOLDER for an agent, or --policy=module:function')
    if sum(map(bool, (policy or measure, export, gif))) > 1:
        raise Mistake(
            'measure (which policy implies), export and gif exclude each other: choose one'
        )
    if not greedy and (policy or not measure):
        raise Mistake(
            'greedy = False samples actions, and needs --measure and an agent, not a policy'
        )
    use_agent()


if __name__ == '__main__':
    run_script(main)

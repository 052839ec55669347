"""Watch a Sokoban agent play, in a terminal or as a GIF; measure its solve rate; export it.

$ python play_sokoban.py --out_dir=pretrained/sokoban
$ python play_sokoban.py --out_dir=pretrained/sokoban --level=3 --gif=game.gif
$ python play_sokoban.py --out_dir=out/sokoban_small_L4 --measure
$ python play_sokoban.py --policy=my_module:my_function --levels=unfiltered-test
$ python play_sokoban.py --out_dir=out/sokoban_small_L4 --export=out/agent

Arrows show the agent's plan, as a probe (paper/probe.py) reads it from the agent's state: the arrow
on a cell is the direction in which the agent will step onto it. Without a terminal, one game is
printed as text; a terminal that cannot show the symbols gets ASCII.
"""

import contextlib
import itertools
import math
import os
import select
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

from configurator import configure
from support.script import UserError, run_script

import numpy as np
import torch
import torch.nn.functional as F
from numpy import ndarray
from torch import Tensor

from convlstm import AGENT_RANGES, Agent, load_agent
from levels import WALL, board_text, plan_image, save_gif, select_levels
from sokoban import TIME_LIMIT, FeatureRecorder, evaluate, load_policy, replay, run_episodes
from support import ranks
from support.export import load_weights, weights_checksum
from support.files import read_tensors
from support.run_folder import refuse_best
from support.signals import exit_at_signals

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
probe = ''                     # a probe of this agent from paper/probe.py, which gives the
                               # arrows; '': probe.safetensors in out_dir, if it is there
gif = ''                       # write a game into this file instead of showing it
export = ''                    # write the agent into this folder, as safetensors and JSON
device = 'auto'                # 'auto': cuda if there is one; or 'cpu', 'cuda', 'cuda:1'
dtype = ''                     # of the agent's convolutions: 'float32', 'bfloat16'; '': as trained
# fmt: on
PROBE = 'probe.safetensors'  # a plan probe (paper/probe.py) in the folder of an exported agent
RANGES = {
    'which': ['best', 'last'],
    'dtype': ['', *AGENT_RANGES['dtype']],
    'n_levels': (1, math.inf),
    'ms': (10, 60_000),
}

# Settings of the levels for a policy, and for an agent that was saved without those of its run.
EASY = {
    'eval_split': 'generated',
    'n_boxes': 1,
    'max_moves': 12,
    'seed': 1337,
    'levels_dir': '',
    'time_limit': TIME_LIMIT,
}


# ---- one game ----


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
    return Game(boards=boards, plans=read_plans(features, agent), outcome=outcome)


@torch.no_grad()
def read_plans(features: Tensor, agent: Agent) -> ndarray:
    """Return the plans (T + 1, 10, 10) that the probe reads from the s[L] (T, 10, 10, C) of a game
    of the agent.

    The plan after the last step has no arrows. Without a probe no plan has any. Raises
    UserError if the probe's file is damaged, or was trained on another agent.
    """
    plans = np.full((len(features) + 1, 10, 10), -1)
    path = probe or os.path.join(out_dir, PROBE)
    if probe or os.path.exists(path):
        conv = torch.nn.Conv2d(features.size(-1), 5, 3, padding=1)  # four directions, or none
        saved = read_tensors(path)
        threshold = saved.pop('threshold', torch.tensor(math.inf))
        checksum = weights_checksum(agent)  # earlier probes have none
        if saved.pop('agent', checksum) != checksum:
            advice = f'give that one, or another which than {which!r}'
            raise UserError(f'{path}: was trained on another agent: {advice}')
        load_weights(conv, saved, path)
        probabilities = F.softmax(conv(features.permute(0, 3, 1, 2)), 1)  # (T, 5, 10, 10)
        best, direction = probabilities[:, :4].max(1)
        plans[:-1] = torch.where(best >= threshold, direction, -1).numpy()
    return plans


# ---- the terminal ----

# {Boxoban's character: (symbol of two columns, number of its color, name)}. Color-blind readers can
# tell the colors apart, and the symbols differ in shape too.
TILES = {
    '#': ('██', 240, 'wall'),
    ' ': ('  ', 0, 'floor'),
    '.': ('◦ ', 175, 'target'),
    '$': ('▣ ', 214, 'box'),
    '*': ('■ ', 36, 'box on a target'),
    '@': ('● ', 33, 'agent'),
    '+': ('◉ ', 81, 'agent on a target'),
}
ARROWS = '↑→↓←'
KEYS = '  (space pause, s step, n next, q quit)'


def symbols() -> tuple[dict[str, str], str]:
    """Return the colored symbols of Boxoban's characters, two columns each, and the four arrows.
    They are ASCII if the terminal cannot show others."""
    plain, arrows = {char: tile[0] for char, tile in TILES.items()}, ARROWS
    try:
        ''.join([*plain.values(), arrows]).encode(sys.stdout.encoding or 'ascii')
    except UnicodeEncodeError:
        plain, arrows = {char: f'{char} ' for char in TILES}, '^>v<'
    return {char: f'\x1b[38;5;{TILES[char][1]}m{plain[char]}\x1b[0m' for char in TILES}, arrows


def draw_board(board: ndarray, plan: ndarray) -> list[str]:
    """Return a board as ten lines of 20 columns, with the plan's arrows on free cells."""
    tiles, arrows = symbols()
    cells = [[tiles[char] for char in row] for row in board_text(board).split('\n')]
    is_free = (board[..., 0] == 0) & (board[..., 1] != WALL)  # no agent, box or wall
    for y, x in np.argwhere((plan >= 0) & is_free):
        cells[y][x] = arrows[plan[y, x]] + ' '
    return [''.join(row) for row in cells]


def show(board: list[str], status: str, height: int) -> int:
    """Draw a board and a status over the last `height` lines of the terminal, and return how many
    lines they take. What a small terminal has no room for is left out, because it would scroll."""
    size = shutil.get_terminal_size()
    lines = [*board, (status + KEYS)[: size.columns - 1]][-max(1, size.lines - 1) :]
    up = f'\x1b[{height}A' if height else ''
    print(up + '\r\x1b[J' + '\n'.join(lines), flush=True)
    return len(lines)


@contextlib.contextmanager
def keyboard() -> Iterator[Callable[[float | None], str]]:
    """Yield read_key(seconds), a function that returns the next key, or '' if none is pressed in
    that time; with None it waits for a key.

    The terminal is restored whatever ends the program.
    """
    import termios
    import tty  # both only here: Windows lacks them

    source = sys.stdin.fileno()

    def read_key(seconds: float | None) -> str:
        if not select.select([source], [], [], seconds)[0]:
            return ''
        # an arrow key sends three characters at once: they count as one key
        return os.read(source, 16).decode(errors='replace')[:1] or 'q'  # '' is the end of the input

    before = termios.tcgetattr(source)
    exit_at_signals()
    signal.signal(signal.SIGTSTP, signal.SIG_IGN)  # ctrl-Z would leave it without cursor and echo
    try:
        tty.setcbreak(source)
        print('\x1b[?25l', end='')  # hide the cursor
        yield read_key
    finally:
        termios.tcsetattr(source, termios.TCSADRAIN, before)
        print('\x1b[?25h', flush=True)


def show_games(agent: Agent, levels: ndarray, device: str, time_limit: int) -> None:
    """Explain the symbols, then show games in a terminal, one after the other."""
    tiles, arrows = symbols()
    names = {char: name for char, (_, _, name) in TILES.items() if char != ' '}
    print('   '.join(f'{tiles[char]}{name}' for char, name in names.items()))
    print(f'{" ".join(arrows)}  where the agent plans to step\n')
    height = 0  # of what is on the screen
    paused = False
    with keyboard() as read_key:
        for number in itertools.count():
            i = (level + number) % len(levels)
            game = play_level(agent, levels, i, device, time_limit)
            for t, board in enumerate(game.boards):
                is_last = t + 1 == len(game.boards)
                status = game.outcome if is_last else f'level {i}, step {t}'
                seconds = ms / 1000 * (8 if is_last else 1)
                key = ' '
                while key == ' ':
                    height = show(draw_board(board, game.plans[t]), status, height)
                    key = read_key(None if paused else seconds)
                    paused ^= key == ' '
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
    print(', '.join(f'{char} {name}' for char, (_, _, name) in TILES.items() if char != ' '))
    for t, board in enumerate(game.boards):
        is_last = t + 1 == len(game.boards)
        print(board_text(board))
        print(game.outcome if is_last else f'level {level}, step {t}', flush=True)


# ---- the script ----


def main() -> None:
    """Export the agent, measure it, write a GIF or show games, depending on the settings."""
    configure(globals(), quiet=True)
    if bool(out_dir) == bool(policy):
        raise UserError('name one: --out_dir=FOLDER for an agent, or --policy=module:function')
    if sum(map(bool, (policy or measure, export, gif))) > 1:
        raise UserError(
            'measure (which policy implies), export and gif exclude each other: choose one'
        )
    if not greedy and (policy or not measure):
        raise UserError(
            'greedy = False samples actions, and needs --measure and an agent, not a policy'
        )
    torch_device = ranks.pick_device(device)
    about = EASY
    if policy:
        agent = load_policy(policy)
    else:
        agent = load_agent(out_dir, which, torch_device, dtype)
        about = {**EASY, **agent.metadata.get('settings', {})}
    if export:
        refuse_best(export)
        agent.save_pretrained(export, config=agent.metadata)
        print(f'{export}: the agent of {out_dir}')
        return
    level_settings = {
        **about,
        'eval_split': levels or about['eval_split'],
        'eval_games': n_levels,
        'levels_dir': levels_dir or about['levels_dir'],
        'download': download,
    }
    packed, source = select_levels(level_settings, evaluation=True)
    time_limit = about['time_limit']
    if policy or measure:
        actions_seed = None if greedy else about['seed']
        rates = evaluate(agent, packed, torch_device, actions_seed, time_limit)
        solved = f'solved {rates["solve_rate"]:.1%}, return {rates["return"]:.2f}'
        name = policy
        if not policy:
            actions = 'greedy actions' if greedy else 'sampled actions'
            name = f'{out_dir}, update {agent.metadata.get("step", "unknown")}, {actions}'
        print(f'{name}: {solved}, {rates["steps"]:.0f} steps; {source}')
        return
    if level >= len(packed):
        there_are = f'there are {len(packed)} levels, counted from 0'
        raise UserError(f'level = {level}: {there_are}: --n_levels uses more of a split')
    if gif:
        game = play_level(agent, packed, level, torch_device, time_limit)
        save_gif(list(map(plan_image, game.boards, game.plans)), gif, ms)
        print(f'{gif}: {game.outcome}')
    elif sys.stdin and sys.stdin.isatty() and sys.stdout.isatty():  # None if closed
        show_games(agent, packed, torch_device, time_limit)
    else:
        print_game(agent, packed, torch_device, time_limit)


if __name__ == '__main__':
    run_script(main)

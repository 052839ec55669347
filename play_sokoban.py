"""
What Sokoban agents can do: play a game in the terminal, or into a GIF; solve rates, also of other
people's policies (`--policy=module:function`); an agent as plain files, model.safetensors and
config.json.

$ python play_sokoban.py --out_dir=pretrained/sokoban          # keys: pause, step, next level, quit
$ python play_sokoban.py --out_dir=pretrained/sokoban --level=3 --gif=game.gif
$ python play_sokoban.py --out_dir=out/sokoban_small_L4 --measure
$ python play_sokoban.py --out_dir=out/sokoban_small_L4 --export=out/agent

Shape letters as in sokoban.py and convlstm.py: N boards at a time, n levels.
"""

import contextlib
import itertools
import math
import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Callable, Iterator

# before torch: how threads wait, what ctrl-C does
from configurator import configure, fail, run_script

import numpy as np
import torch
import torch.nn.functional as F
from numpy import ndarray
from torch import Tensor

import common
from convlstm import PROBE, Agent, export_agent, load_agent
from sokoban import FeatureRecorder, board_text, evaluate, load_levels, load_policy, plan_image
from sokoban import replay, run_episodes, save_gif

# fmt: off
out_dir = ''                   # an agent: a folder that train_sokoban.py wrote, or an export
which = 'best'                 # 'best' (highest held-out return), if there is one, or 'last'
policy = ''                    # or module:function, from observations (N, 10, 10, 2) uint8 to
                               # actions (N,), 0..3: evaluated on n_levels
measure = False                # solve rate and return of the agent on n_levels, instead of a game
greedy = True                  # for that: the likeliest move; False: drawn, as in training
levels = ''                    # a split or a file; '': the agent's held-out ones; of a policy: easy
levels_dir = ''                # folder of Boxoban's levels; '': data/boxoban
download = False               # fetch the split into levels_dir where it is not there
n_levels = 512                 # the first so many of them
level = 0                      # the first to be played
games = 0                      # to be played in a terminal; 0: until q is pressed
ms = 250                       # of a step, shown in a terminal or a GIF
probe = ''                     # probe_sokoban.py's of this agent, whose plan is drawn as arrows;
                               # '': probe.safetensors of out_dir, if it is there
gif = ''                       # a file to write the game into, instead of the terminal
export = ''                    # a folder to write the agent into, instead
device = 'auto'                # 'auto': cuda if there is one; or 'cpu', 'cuda', 'cuda:1'
# fmt: on
RANGES = {'which': ['best', 'last'], 'n_levels': (1, math.inf), 'level': (0, math.inf)}
RANGES |= {'ms': (10, math.inf), 'games': (0, math.inf)}

EASY = {'eval_split': 'generated', 'n_boxes': 1, 'max_moves': 12, 'seed': 1337}
# of # .$*@+ in a terminal: two columns a cell
TILES = {'#': '90m██', ' ': '0m  ', '.': '31m◦ ', '$': '33m▣ '}
TILES |= {'*': '32m▣ ', '@': '94m● ', '+': '95m● '}
ARROWS = [f'\x1b[36m{way} \x1b[0m' for way in '↑→↓←']


# ----------------------------------------------------------------------------- a game on show


@contextlib.contextmanager
def keyboard() -> Iterator[Callable[[float | None], str]]:
    """-> key(seconds): the next key, '' if none comes in time (None: waits). The terminal is as it
    was afterwards, whatever ends this. Where none is: no keys, and no waiting."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        yield lambda seconds: ''
        return
    source = sys.stdin.fileno()

    def key(seconds: float | None) -> str:
        ready = select.select([source], [], [], seconds)[0]
        return (os.read(source, 1).decode(errors='replace') or 'q') if ready else ''

    def leave(number: int, frame: object) -> None:
        sys.exit(128 + number)  # by the finally below

    handlers = {signal.SIGTERM: leave, signal.SIGHUP: leave, signal.SIGTSTP: signal.SIG_IGN}
    before = termios.tcgetattr(source)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    try:
        tty.setcbreak(source)
        print('\x1b[?25l', end='')  # no cursor
        yield key
    finally:
        termios.tcsetattr(source, termios.TCSADRAIN, before)
        print('\x1b[?25h', flush=True)


def film(model: Agent, packed: ndarray, i: int, device: str) -> tuple[ndarray, ...]:
    """Level i played greedily -> observations (T + 1, 10, 10, 2), its plans, how it ended."""
    watched = FeatureRecorder(model)
    result = run_episodes(watched, packed[i : i + 1], device)
    steps, end = int(result['steps']), 'solved' if result['solved'].item() else 'not solved'
    frames = replay(packed[i : i + 1], result['actions'][:, :steps].numpy())[0]
    said = f'level {i}, {end} in {steps} steps, return {result["return"].item():.1f}'
    return frames, plans(torch.cat(watched.features).float()), said


@torch.no_grad()
def plans(features: Tensor) -> ndarray:
    """s[L] of a game's steps, (T, 10, 10, C) -> where the probe says that the agent will step onto
    a cell, (T + 1, 10, 10): up, right, down, left as 0..3, else -1; all -1 without a probe."""
    ways = np.full((len(features) + 1, 10, 10), -1)
    path = probe or os.path.join(out_dir, PROBE)
    if probe or os.path.exists(path):
        conv = torch.nn.Conv2d(features.size(-1), 5, 3, padding=1)
        saved = common.read_tensors(path)
        threshold = saved.pop('threshold', torch.tensor(math.inf))
        common.load_weights(conv, saved, path)
        sure, way = F.softmax(conv(features.permute(0, 3, 1, 2)), 1)[:, :4].max(1)
        ways[:-1] = torch.where(sure >= threshold, way, -1).numpy()
    return ways


def show(board: ndarray, ways: ndarray, line: str, again: bool) -> None:
    """An observation and a line below it; in a terminal in colours, with the plan on free cells,
    over the last one if again."""
    text = board_text(board)
    if sys.stdout.isatty():
        cells = [f'\x1b[{TILES[char]}\x1b[0m' for char in text.replace('\n', '')]
        for k in np.flatnonzero((ways >= 0) & (board[..., 0] == 0)):  # no box, no agent
            cells[k] = ARROWS[ways.flat[k]]
        text = '\n'.join(''.join(cells[k : k + 10]) for k in range(0, 100, 10))
        print('\x1b[11A' * again, end='')  # eleven lines up
        line = f'\r\x1b[K{line}  (space pause, s step, n next, q quit)'
    print(f'{text}\n{line}', flush=True)


def watch(model: Agent, packed: ndarray, device: str) -> None:
    """Games one after the other in a terminal; elsewhere one, as plain text."""
    paused, many = False, games if sys.stdin.isatty() and sys.stdout.isatty() else 1
    with keyboard() as key:
        for number in itertools.count():
            i, pressed = (level + number) % len(packed), ''
            frames, ways, said = film(model, packed, i, device)
            for t, board in enumerate(frames):
                last = t + 1 == len(frames)
                show(board, ways[t], said if last else f'level {i}, step {t}', number + t > 0)
                pressed = key(None if paused else ms / 1000 * (8 if last else 1))
                while pressed == ' ':
                    paused = not paused
                    pressed = key(None if paused else ms / 1000)
                paused = paused or pressed == 's'
                if pressed in ('n', 'q'):
                    break
            if pressed == 'q' or number + 1 == many:
                return


def use_agent() -> None:
    """A game, a GIF, a solve rate or an export, as asked for."""
    where = common.pick_device(device)
    model, about = (load_policy(policy), EASY) if policy else load_agent(out_dir, which, where)[:2]
    if export:
        return export_agent(model, about, export)
    split, made = levels or about['eval_split'], None
    if split == 'generated':  # the training's own held-out ones but for the few it leaves out
        made = n_levels, about['n_boxes'], 2 * about['seed'] + 1, about['max_moves']
    packed, line = load_levels(levels_dir, split, download, made, n_levels)
    if policy or measure:
        found = evaluate(model, packed, where, None if greedy else about['seed'])
        said = f'solved {found["solve_rate"]:.1%}, return {found["return"]:.2f}'
        print(f'{policy or out_dir}: {said}, {found["steps"]:.0f} steps; {line}')
        return
    if level >= len(packed):
        fail(f'level = {level}: there are {len(packed)} levels, counted from 0')
    if not gif:
        return watch(model, packed, where)
    common.need_packages(PIL=True)
    frames, ways, said = film(model, packed, level, where)
    save_gif([plan_image(*pair) for pair in zip(frames, ways, strict=True)], gif, ms)
    print(f'{gif}: {said}')


def main() -> None:
    configure(globals(), quiet=True)
    if bool(out_dir) == bool(policy):
        fail('name one: --out_dir=FOLDER, or --policy=module:function')
    if sum(map(bool, (policy, measure, export, gif))) > 1:
        fail('policy, measure, export and gif exclude each other: choose one')
    if not (greedy or measure):
        fail('greedy = False: wants --measure')
    use_agent()


if __name__ == '__main__':
    run_script(main)

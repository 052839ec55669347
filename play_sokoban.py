"""
What Sokoban agents can do: play a game in the terminal, or into a GIF; solve rates, also of other
people's policies (`--policy=module:function`); an agent as plain files, model.safetensors and
config.json. train_sokoban.py evaluates and draws by functions of this file.

$ python play_sokoban.py --out_dir=pretrained/sokoban          # keys: pause, step, next level, quit
$ python play_sokoban.py --out_dir=pretrained/sokoban --level=3 --gif=game.gif
$ python play_sokoban.py --out_dir=out/sokoban_small_L4 --measure
$ python play_sokoban.py --out_dir=out/sokoban_small_L4 --export=out/agent

Shape letters as in sokoban.py and convlstm.py: N boards at a time, n levels.
"""

import contextlib
import importlib
import itertools
import json
import math
import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from dataclasses import fields
from types import SimpleNamespace

# before torch: how threads wait, what ctrl-C does
from configurator import configure, every, fail, first_line, run_script, write_json

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy import ndarray
from torch import Tensor

import common
from common import BEST, CONFIG, WEIGHTS, print0
from convlstm import Agent, AgentConfig, build_agent
from sokoban import AGENT, TIME_LIMIT, SokobanEnv, board_image, board_keys, board_text, draw_by
from sokoban import load_levels, save_gif

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

PROBE = 'probe.safetensors'  # beside an export, drawn where it lies there
BOARDS = 256  # played at a time
SIZES = [field.name for field in fields(AgentConfig) if field.name not in ('dtype', 'path')]
EASY = {'eval_split': 'generated', 'n_boxes': 1, 'max_moves': 12, 'seed': 1337}
# of # .$*@+ in a terminal: two columns a cell
TILES = {'#': '90m██', ' ': '0m  ', '.': '31m◦ ', '$': '33m▣ '}
TILES |= {'*': '32m▣ ', '@': '94m● ', '+': '95m● '}
ARROWS = [f'\x1b[36m{way} \x1b[0m' for way in '↑→↓←']


def sample(logits: Tensor, u: Tensor) -> Tensor:
    """Actions (B,) from logits (B, 4) by inversion, with u (B,) of draw_by()."""
    u = (u >> 29).to(torch.float32) / 2**24  # [0, 1)
    return (u[:, None] >= F.softmax(logits.float(), -1).cumsum(-1)[:, :-1]).sum(-1)


@torch.no_grad()
def play(model: Agent, levels: ndarray, device: str, seed=None, number=0) -> dict[str, Tensor]:
    """Each of the packed levels (n, 17) once, for at most 120 steps: the likeliest move or, with a
    seed, one drawn. -> solved, return, steps (n,), actions (n, 120), 0 after a game's end, on the
    CPU. number: of the first level, where ranks share them (chance depends on it)."""
    n, parts, due = len(levels), [], every()
    for first in range(0, n, BOARDS):
        N = min(BOARDS, n)  # the last batch is filled up, so that no shape is new
        env = SokobanEnv(levels[(first + np.arange(N)) % n], N, device=device, order='sequence')
        keys = None if seed is None else board_keys(seed, 2, env.board + number + first)
        w, state = model.prepare(), model.init_state(N)
        start = alive = torch.ones(N, dtype=torch.bool, device=device)
        won = ~start
        total, steps = torch.zeros(2, N, device=device)
        actions = torch.zeros(N, TIME_LIMIT, dtype=torch.int8, device=device)
        for t in range(TIME_LIMIT):
            logits, _, state = model.act(w, env.observe(), start, state)
            if keys is None:
                action = logits.argmax(-1)
            else:
                action = sample(logits, draw_by(keys, env.steps))
            actions[:, t] = action * alive
            reward, start, solved = env.step(action)  # ended boards play on, and do not count
            total += reward * alive
            steps += alive
            won = won | solved & alive
            alive = alive & ~start
            if due():
                print0(f'    {first:,} of {n:,} levels played, and {t + 1} steps of the next {N}')
            if not alive.any():
                break
        result = {'solved': won, 'return': total, 'steps': steps, 'actions': actions}
        parts.append({k: v[: n - first].cpu() for k, v in result.items()})
    return {k: torch.cat([part[k] for part in parts]) for k in parts[0]}


def evaluate(model: Agent, levels: ndarray, device: str, seed=None) -> dict[str, float]:
    """Means over the levels, shared by the ranks."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    mine = np.array_split(np.arange(len(levels)), world)[rank]
    names, total = ('solve_rate', 'return', 'steps'), torch.zeros(3, dtype=torch.float64)
    if len(mine):  # there may be fewer levels than ranks
        result = play(model, levels[mine], device, seed, int(mine[0]))
        total = torch.stack([result[k].double().sum() for k in ('solved', *names[1:])])
    total = total.to(device)
    if world > 1:
        dist.all_reduce(total)
    return dict(zip(names, (total / len(levels)).tolist(), strict=True))


def replay(levels: ndarray, actions: ndarray) -> ndarray:
    """Levels (n, 17) and actions (n, T) -> observations (n, T + 1, 10, 10, 2) before, between and
    after them, without resets: a game's last one is its end."""
    env = SokobanEnv(levels, len(levels), order='sequence')
    boards = [env.observe().numpy()]
    for action in actions.T:
        env.move(torch.from_numpy(action.astype(np.int64)))
        boards.append(env.observe().numpy())
    return np.stack(boards, 1)


def report(model: Agent, levels: ndarray, name: str, device: str, folder: str, about: dict) -> dict:
    """Plays all levels, greedily; writes folder/eval_NAME.json, and as GIFs the longest game that
    was won and the first that was not."""
    if int(os.environ.get('WORLD_SIZE', 1)) > 1:
        fail('eval_only plays in one process: python instead of torchrun')
    name = f'eval_{os.path.splitext(os.path.basename(name))[0]}'
    result = play(model, levels, device)
    record = {**about, 'n': len(levels), 'solve_rate': result['solved'].float().mean().item()}
    record |= {f'mean_{k}': result[k].mean().item() for k in ('return', 'steps')}
    for label, chosen in (('solved', result['solved']), ('failed', ~result['solved'])):
        path = os.path.join(folder, f'{name}_{label}.gif')
        with contextlib.suppress(FileNotFoundError):
            os.remove(path)  # of an earlier evaluation
        if chosen.any():
            i = int((chosen * result['steps']).argmax())  # all that fail last 120 steps
            actions = result['actions'][i : i + 1, : int(result['steps'][i])].numpy()
            save_gif(list(map(board_image, replay(levels[i : i + 1], actions)[0])), path)
            record |= {f'{label}_level': i, f'{label}_game': path}
    write_json(record, os.path.join(folder, f'{name}.json'))
    return record


# ----------------------------------------------------------------------------- whose games


def as_agent(logits: Callable[[Tensor], Tensor]) -> SimpleNamespace:
    """What `play` wants of an agent, of a function of the observations that carries nothing."""

    def act(w: tuple, obs: Tensor, start: Tensor, state: tuple) -> tuple:
        return logits(obs), None, state

    return SimpleNamespace(prepare=tuple, init_state=lambda N: (), act=act)


# a random policy, where moves are drawn
RANDOM = as_agent(lambda obs: torch.zeros(len(obs), 4, device=obs.device))


def load_policy(name: str) -> SimpleNamespace:
    """A function from observations to actions, as `play` wants an agent."""
    module, _, function = name.partition(':')
    sys.path.append(os.getcwd())
    try:
        choose = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        fail(f'policy = {name!r}: expected module:function ({first_line(error)})')

    def logits(obs: Tensor) -> Tensor:
        actions = np.asarray(choose(obs.cpu().numpy()))
        if actions.shape != (len(obs),) or not np.isin(actions, range(4)).all():
            given = f'{actions.ravel()[:3]}, shape {actions.shape}'
            fail(f'policy = {name!r}: expected {len(obs)} actions, each 0 to 3, found {given}')
        return F.one_hot(torch.from_numpy(actions.astype(np.int64)), 4).to(obs.device)

    return as_agent(logits)


class Watched:
    """Agents for `play`: all see the same, the first one acts, after seeing the first board `held`
    times more. Where that is 0, keeps their s[L] of each step, (N, 10, 10, C of all) fp16."""

    def __init__(self, *models: Agent, held: int = 0):
        self.models, self.held, self.features = models, held, []

    def prepare(self) -> list:
        return [model.prepare() for model in self.models]

    def init_state(self, N: int) -> list:
        return [model.init_state(N) for model in self.models]

    def act(self, w: list, obs: Tensor, start: Tensor, state: list) -> tuple:
        for _ in range(1 + self.held * bool(start.all())):  # later some start, and never all
            features, before, state = [], state, []
            for model, its, carried in zip(self.models, w, before, strict=True):
                s, after = model.see(its, obs, start, carried)
                features.append(s)
                state.append(after)
            start = torch.zeros_like(start)
        if not self.held:
            self.features.append(torch.cat(features, -1).to(torch.float16).cpu())
        return self.models[0].head(features[0])[0], None, state


def load_agent(folder: str, which: str, device: str, dtype: str = '') -> tuple[Agent, dict, str]:
    """An export, or train_sokoban.py's best or last checkpoint -> the agent, its settings with
    `step` and `best`, and the file. Mistake."""
    where = os.path.join(folder, CONFIG)
    if os.path.exists(os.path.join(folder, WEIGHTS)):
        weights = common.read_tensors(os.path.join(folder, WEIGHTS), device)
        with common.restoring(where, 'it'), open(where, encoding='utf-8') as file:
            about = json.load(file)
    else:
        needed, best = ('model', 'step', 'best'), BEST if which == 'best' else None
        saved, where = common.load_run(folder, 'train_sokoban.py', needed, (), {}, best)
        weights, about = saved['model'], saved['config']
        about |= {name: saved[name] for name in ('step', 'best')}
    with common.restoring(where, 'the agent'):
        dtype = dtype or about.get('dtype', 'auto')  # the run's own
        dtype = str(common.pick_dtype(dtype, device)).removeprefix('torch.')
        config = AgentConfig(**{name: about[name] for name in SIZES}, dtype=dtype)
        common.check_model(build_agent, config)
        model = build_agent(config)
    common.load_weights(model, weights, where)
    return model.to(device).eval(), about, str(where)


def export_agent(model: Agent, about: dict, folder: str) -> None:
    """An earlier export is replaced; a folder with anything else is refused."""
    where = common.begin_export(folder, 'arch', PROBE)
    weights = {name: x.float() for name, x in model.state_dict().items()}
    said = common.write_tensors(weights, os.path.join(folder, WEIGHTS))
    names = (*SIZES, *EASY, 'n_envs', 'unroll', 'step', 'best')
    write_json({name: about[name] for name in names}, where)
    print(f'{said}, {CONFIG}')


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
    watched = Watched(model)
    result = play(watched, packed[i : i + 1], device)
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


def drawn(board: ndarray, ways: ndarray, truth: ndarray | None = None) -> ndarray:
    """An observation's picture, with the plan on cells without the agent; where it is known what
    will be (10, 10), green for right and red for wrong."""
    picture, (v, u) = board_image(board), np.mgrid[-1:1:24j, -1:1:24j]
    up = (abs(u) < 0.5 * v + 0.3) & (abs(v) < 0.5)  # a triangle
    for y, x in np.argwhere((ways >= 0) & (board[..., 0] != AGENT)):
        colour = 30, 130, 140
        if truth is not None:
            colour = (20, 140, 60) if truth[y, x] == ways[y, x] else (200, 30, 40)
        cell = picture[24 * y : 24 * y + 24, 24 * x : 24 * x + 24]
        cell[np.rot90(up, -ways[y, x])] = colour
    return picture


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
    save_gif([drawn(*pair) for pair in zip(frames, ways, strict=True)], gif, ms)
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

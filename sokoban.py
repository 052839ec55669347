"""
Sokoban: levels, the environment, pictures.

$ python sokoban.py --split=generated --show=3                 # as text
$ python sokoban.py --levels_dir=levels --split=unfiltered-test --show=12 --picture=levels.png
$ python sokoban.py --levels_dir=levels --split=unfiltered-valid --download=True # needs a network

Levels are kept packed, 17 bytes each (uint8): 8 for the walls of the 8x8 interior, row-major, most
significant bit first (the border is always wall); then 4 target, 4 box and 1 agent cell, indices
0..63 into the interior. A level with fewer than 4 boxes, 1 at least, and as many targets repeats
its first target and box.

The rules are those of Jumanji's Sokoban-v0 (10x10, actions up, right, down, left; a blocked move
costs a step like any other; reward -0.1 a step, +1 for a box pushed onto a target, -1 for one
pushed off, +10 when all are on; an episode ends when solved or after 120 steps, both times for
good: no bootstrap). `SokobanEnv` plays N boards with tensor operations alone, in place and without
waiting for the device, as a CUDA graph needs; `JumanjiEnv` moves them by Jumanji's own step.

Shape letters: N boards, Y = X = 10 rows and columns; cells are numbered row-major, 0..99.
"""

import contextlib
import glob
import importlib
import math
import os
import shlex
import sys
import tokenize
from collections.abc import Callable, Iterable

# before torch: how threads wait, what ctrl-C does
from configurator import BROKEN, Mistake, configure, every, fail, first_line, read_json, run_script
from configurator import write_atomic, write_json

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy import ndarray
from numpy.random import Generator
from torch import Tensor

from common import check_fits, fill, need_packages, print0
from hub import call_hub, pin_revision

# fmt: off
levels_dir = ''             # folder of Boxoban text files or .pack17.npy arrays; '': data/boxoban
split = 'unfiltered-train'  # unfiltered-train, -valid or -test, medium-train or -valid, hard;
                            # 'generated'; or a file
download = False            # fetch it where it is not there (Hugging Face, 200 bytes a level)
n_boxes = 4                 # of generated levels, 1 to 4
max_moves = 120             # of their known solutions, 6 a box or more
n_levels = 1000             # to generate
seed = 1337                 # of the generator
show = 1                    # levels to print, from the first on
picture = ''                # a PNG file for them

RANGES = {'show': (1, math.inf)}
# fmt: on

SIZE, INSIDE, CELLS = 10, 8, 100
DELTA = (-10, 1, 10, -1)  # of the agent's cell, for up, right, down, left
TIME_LIMIT = 120
EVALUATION_BATCH = 256  # boards that are evaluated at once
# of board_keys: independent random numbers for each purpose
LEVEL_STREAM, ACTION_STREAM, EVALUATION_STREAM = 0, 1, 2
# Jumanji's codes: walls and targets in the fixed grid, agent and boxes in the variable one
WALL, TARGET, AGENT, BOX = 1, 2, 3, 4
LEVEL_BYTES = 300  # a generated level, at the least: packed, unpacked, its solution, both's objects
REVERSE_STEPS, AT_ONCE = 300, 4096  # of the generator: moves of a reverse play, boards
HUB = 'InstaDeepAI/boxoban-levels'
BROKEN_ARRAY = *BROKEN, OSError, EOFError, tokenize.TokenError
CHARS = np.frombuffer(b' ??@$?#?????.??+*???????', np.uint8).reshape(4, 6)  # [fixed, variable]
AHEAD = np.array(DELTA)[:, None] * np.arange(3)
PATHS = np.clip(np.arange(CELLS)[:, None, None] + AHEAD, 0, 99)  # [cell, action]: it, the next two
# what a step does, by the codes of the two cells before the agent, (8, 8, 4) int64: whether it
# moves, both codes afterwards, and how many more boxes are on targets
NEAR, FAR = np.mgrid[:8, :8]
MOVES = (NEAR & WALL == 0) & ((NEAR & BOX == 0) | (FAR & (WALL | BOX) == 0))
PUSHED = MOVES * (NEAR & BOX)
MORE = (PUSHED > 0) * ((FAR & TARGET) - (NEAR & TARGET)) // TARGET
OUTCOMES = np.stack([MOVES, NEAR - PUSHED, FAR + PUSHED, MORE], -1)
INTERIOR = np.arange(CELLS).reshape(SIZE, SIZE)[1:-1, 1:-1].ravel()  # cell 0..99 of 0..63


# ----------------------------------------------------------------------------- levels


def pack(wall: ndarray, target: ndarray, box: ndarray, agent: ndarray) -> ndarray:
    """Boards as masks (N, 64) of the interior, agent (N,) an interior cell -> (N, 17) uint8."""
    out = np.empty((len(wall), 17), np.uint8)
    out[:, :8] = np.packbits(wall, axis=1)
    for first, mask in ((8, target), (12, box)):
        order = np.argsort(~mask, axis=1, kind='stable')[:, :4]  # cells of the mask come first
        filled = np.take_along_axis(mask, order, 1)
        out[:, first : first + 4] = np.where(filled, order, order[:, :1])
    out[:, 16] = agent
    return out


def unpack(levels: ndarray) -> tuple[ndarray, ndarray]:
    """(N, 17) uint8 -> grids (N, 100) uint8, sums of WALL, TARGET, BOX; agents' cells (N,)."""
    cells, rows = INTERIOR[levels[:, 8:]], np.arange(len(levels))[:, None]
    grid = np.full((len(levels), CELLS), WALL, np.uint8)
    grid[:, INTERIOR] = np.unpackbits(levels[:, :8], axis=1)
    grid[rows, cells[:, :4]] |= TARGET
    grid[rows, cells[:, 4:8]] |= BOX
    return grid, cells[:, 8].copy()


def check_boards(boards: ndarray, where: str, first: int = 0) -> ndarray:
    """ASCII codes (N, 10, 10) uint8 -> packed (N, 17). Mistake names `where` and the level, the
    first being `first`."""
    kinds = np.full(256, 16, np.uint8)  # of a code: sums of these bits
    kinds[list(b'# .$@*+')] = WALL, 0, TARGET, BOX, 8, TARGET | BOX, TARGET | 8
    bits = kinds[boards]
    wall, target, box, agent, odd = ((bits & bit) > 0 for bit in (WALL, TARGET, BOX, 8, 16))
    targets, boxes, agents = (mask.sum((1, 2)) for mask in (target, box, agent))
    border = ~wall
    border[:, 1:-1, 1:-1] = False
    bad = {
        'has a character that is none of # .$@*+': odd.any((1, 2)),
        'is not walled in': border.any((1, 2)),
        'has not exactly one agent': agents != 1,
        'has not 1 to 4 boxes': (boxes < 1) | (boxes > 4),
        'has not as many targets as boxes': targets != boxes,
    }
    for what, mask in bad.items():
        if mask.any():
            raise Mistake(f'{where}: level {first + int(mask.argmax())} {what}')
    inner = [mask[:, 1:-1, 1:-1].reshape(-1, 64) for mask in (wall, target, box, agent)]
    return pack(*inner[:3], inner[3].argmax(1))


def parse_text(text: str, where: str) -> ndarray:
    """Boxoban's text form: `; index`, ten rows of ten characters, a blank line. -> (N, 17)."""
    head, *blocks = ('\n' + text).split('\n;')
    if head.strip() or not blocks:
        raise Mistake(f'{where}: level 0 does not start with a line "; index"')
    boards = ''
    for index, block in enumerate(blocks):
        rows = [row for row in block.split('\n')[1:] if row]
        if [len(row) for row in rows] != [SIZE] * SIZE:
            raise Mistake(f'{where}: level {index} is not ten rows of ten characters')
        boards += ''.join(rows)
    codes = np.frombuffer(boards.encode('ascii', 'replace'), np.uint8)
    return check_boards(codes.reshape(-1, SIZE, SIZE), where)


def pack_observations(boards: ndarray, where: str) -> ndarray:
    """Observations (N, 10, 10, 2), of any integers, checked -> packed (N, 17)."""
    packed = []
    for i in range(0, len(boards), 50_000):  # pieces: a whole file unpacked would be large
        variable, fixed = np.moveaxis(boards[i : i + 50_000], -1, 0)
        packed.append(check_boards(CHARS[fixed.clip(-1, 3), variable.clip(-1, 5)], where, i))
    return np.concatenate(packed)


def fetch(split: str, folder: str) -> None:
    """Downloads a split of Jumanji's copy of Boxoban, all of one commit, which meta.json names, and
    keeps it packed in `folder`. Jumanji 1.1.2 replaces the last level of each of Boxoban's text
    files by the one before, and its copy may have been made so: the text itself is better."""
    where = f'{HUB} {split}.npy'
    os.makedirs(folder, exist_ok=True)
    known = read_json(os.path.join(folder, 'meta.json')) or {'source': HUB}
    revision = pin_revision(known, folder, HUB, 'model')
    print(f'downloading {where} ({revision[:12]})', flush=True)
    grids = read_array(call_hub('hf_hub_download', HUB, f'{split}.npy', revision=revision))
    if grids.shape[1:] != (SIZE, SIZE, 2) or grids.dtype.kind not in 'iu' or len(grids) == 0:
        found = f'{grids.dtype} of shape {grids.shape}'
        raise Mistake(f'{where}: expected integers of shape (N, 10, 10, 2), found {found}')
    if grids[0, 0, 0, 0] == WALL:  # its corner: on the Hub `fixed` comes first
        grids = grids[..., ::-1]
    packed = pack_observations(grids, where)
    write_atomic(f'{folder}/{split}.pack17.npy', lambda file: np.save(file, packed))


def read_array(path: str) -> ndarray:
    """A .npy file, mapped, so that a damaged header allocates nothing."""
    try:
        return np.asarray(np.load(path, mmap_mode='r', allow_pickle=False))
    except BROKEN_ARRAY as error:
        raise Mistake(f'{path}: cannot be read as a .npy file ({first_line(error)})') from None


def read_file(path: str) -> ndarray:
    """One file's levels, packed."""
    if not path.endswith('.npy'):
        with open(path, encoding='ascii', errors='replace') as file:
            return parse_text(file.read(), path)
    levels = read_array(path)
    if levels.dtype != np.uint8 or levels.shape[1:] != (17,) or len(levels) == 0:
        found = f'{levels.dtype} of shape {levels.shape}'
        raise Mistake(f'{path}: expected uint8 of shape (N, 17), found {found}')
    if levels[:, 8:].max() >= INSIDE**2:
        raise Mistake(f'{path}: has a cell that is none of 0..63')
    return pack_observations(observations(levels), path)


def split_files(folder: str, split: str) -> list[str]:
    """A split's files: SPLIT.pack17.npy; or text files SPLIT*.txt (also with _ for -); or Boxoban's
    own tree."""
    name, within = glob.escape(split), glob.escape(folder)
    tree = os.path.join(*name.split('-'), '*.txt')
    for pattern in f'{name}.pack17.npy', f'{name.replace("-", "[-_]")}*.txt', tree:
        if found := glob.glob(os.path.join(within, pattern)):
            return sorted(found)
    return []


def load_levels(levels_dir: str, split: str, download=False, made=(), most=math.inf) -> tuple:
    """-> packed levels (N, 17), the first `most`, and a line that says where they are from. split:
    a file; 'generated', made = generate's arguments; or a split's name, looked for in levels_dir
    ('': data/boxoban), else downloaded into it if `download`. Mistake."""
    if split == 'generated':
        n, boxes, seed, max_moves, *_ = made
        levels = generate(*made)[0]
        line = f'{n:,} generated levels, boxes: {boxes}, moves: at most {max_moves}, seed: {seed}'
    elif os.path.isfile(split):
        levels = read_file(split)
        line = f'{len(levels):,} levels of {split}'
    elif not split.strip('-') or os.sep in split:
        raise Mistake(f'split = {split!r}: no such file, split (unfiltered-train), or generated')
    else:
        folder, source = levels_dir or os.path.join('data', 'boxoban'), ''
        if download and not split_files(folder, split):
            fetch(split, folder)
            source = f' downloaded from {HUB}'
        paths = split_files(folder, split)
        if not paths:
            command = ['python', 'sokoban.py', f'--split={split}', '--download=True']
            command += [f'--levels_dir={levels_dir}'] * bool(levels_dir)
            there = os.path.isdir(folder)
            missing = f'no {split}.pack17.npy, no {split}*.txt' if there else 'no such folder'
            how = f"`{shlex.join(command)}` fetches {split}; 'generated' instead of it makes levels"
            raise Mistake(f'{folder}: {missing}: {how}')
        levels = np.concatenate([read_file(path) for path in paths])
        files = f'{len(paths)} file{"s" * (len(paths) > 1)}'
        line = f'{len(levels):,} levels of {split} from {files} in {folder}{source}'
    if most < len(levels):
        return levels[:most], f'the first {most:,} of {line}'
    return levels, line


def load_level_sets(c: dict, trains: bool = True, whole: bool = False) -> tuple[tuple, tuple]:
    """By train_sokoban.py's settings the levels to train on (none, unless `trains` or others depend
    on them) and the held-out ones, the first eval_games unless `whole`, each as load_levels gives
    them. Of generated ones, none is among both. Mistake."""
    trained, alike = (np.empty((0, 17), np.uint8), ''), c['split'] == c['eval_split'] == 'generated'
    where, download = c['levels_dir'], c['download']
    if trains or alike:
        made = c['n_levels'], c['n_boxes'], 2 * c['seed'], c['max_moves']
        trained = load_levels(where, c['split'], download, made)
    made = c['eval_games'], c['n_boxes'], 2 * c['seed'] + 1, c['max_moves']
    made, most = (*made, trained[0] if alike else ()), math.inf if whole else c['eval_games']
    return trained, load_levels(where, c['eval_split'], download, made, most)


# ----------------------------------------------------------------------------- the generator


def carve(N: int, rng: Generator) -> ndarray:
    """Connected rooms, floor (N, 100) bool: a walker clears a random pattern at each place."""
    patterns = np.array([[-1, 0, 1], [-10, 0, 10], [0, 1, 10], [0, 10, 11], [0, -1, -10]])
    floor, rows = np.zeros((N, CELLS), bool), np.arange(N)
    inner = np.isin(np.arange(CELLS), INTERIOR)
    cell, way = INTERIOR[rng.integers(0, 64, N)], rng.integers(0, 4, N)
    for _ in range(34):
        turn = rng.random(N) < 0.35
        way = np.where(turn, rng.integers(0, 4, N), way)
        to = cell + np.array(DELTA)[way]
        cell = np.where(inner[to], to, cell)
        floor[rows[:, None], cell[:, None] + patterns[rng.integers(0, 5, N)]] = True
    return floor & inner


def reverse_play(floor: ndarray, target: ndarray, agent: ndarray, rng: Generator) -> tuple:
    """Plays backwards from solved boards: the agent walks at random and mostly pulls the box behind
    it along. floor, target (N, 100) bool, agent (N,) -> box, agent, the forward move that undoes
    each step exactly (steps, N), and a number for each state met (steps + 1, N): equal for equal
    states, 0 where all boxes are home."""
    N, delta, steps = len(floor), np.array(DELTA), REVERSE_STEPS
    base = np.arange(N) * CELLS  # all boards in one row of N * 100 cells
    home, box, at = target.ravel(), target.ravel().copy(), base + agent
    blocked = ~floor.ravel() | box
    code = rng.integers(1, 1 << 60, (2, CELLS))  # a state's number: their sum over boxes and agent
    boxes = target @ code[0]
    solved, states = boxes.copy(), np.zeros((steps + 1, N), np.int64)
    undo = np.zeros((steps, N), np.int8)
    ways = rng.integers(0, 4, (2, steps, N), dtype=np.uint8)
    luck = rng.random((steps, N), np.float32)
    for t in range(steps):
        step = delta[ways[1, t]]
        # of two ways one that pulls a box off a target
        frees = ~blocked[at + step] & box[at - step] & home[at - step]
        way = np.where(frees, ways[1, t], ways[0, t])
        step = delta[way]
        moves = ~blocked[at + step]
        wants = luck[t] < np.where(home[at], 0.1, 0.95)  # seldom onto a target
        pulls = np.flatnonzero(moves & box[at - step] & wants)
        new, old = at[pulls], (at - step)[pulls]
        box[old], box[new], blocked[old], blocked[new] = False, True, False, True
        boxes[pulls] += code[0, new % CELLS] - code[0, old % CELLS]
        at = np.where(moves, at + step, at)
        states[t + 1] = np.where(boxes == solved, 0, boxes + code[1, at - base])
        undo[t] = (way + 2) % 4
    return box.reshape(N, CELLS), at - base, undo, states


def solution(undo: ndarray, states: ndarray) -> ndarray:
    """A reverse play (steps,), (steps + 1,) -> what solves it; a state is left as it was last."""
    states = states.tolist()
    last, path = dict(zip(states, range(len(states)), strict=True)), []
    t = last[0]
    while t < len(undo):
        path.append(t)
        t = last[states[t + 1]]
    return undo[path[::-1]]


def generate(n: int, boxes=4, seed=0, max_moves=TIME_LIMIT, without: Iterable = ()) -> tuple:
    """n levels by reverse play, solvable within max_moves; no box and no agent starts on a target,
    none is among `without` (N, 17). -> packed (n, 17) and each one's solution (int8). Deterministic
    in its arguments; more levels continue fewer."""
    least = 6 * boxes  # of max_moves: with fewer hardly any level is found
    if not (1 <= boxes <= 4 and n >= 1 and seed >= 0 and least <= max_moves <= TIME_LIMIT):
        given = f'n_boxes = {boxes} (1 to 4), n_levels = {n}, seed = {seed}'
        raise Mistake(f'{given}, max_moves = {max_moves} ({least} to {TIME_LIMIT}): out of range')
    check_fits(n * LEVEL_BYTES, f'n_levels = {n:,}')
    rng, levels, solutions, due = np.random.default_rng(seed), [], [], every()
    known = set(map(bytes, without))
    while len(levels) < n:
        floor = carve(AT_ONCE, rng)
        # where a box can be pulled off
        free = [np.roll(floor, -d, 1) & np.roll(floor, -2 * d, 1) for d in DELTA]
        free = floor & np.any(free, 0)
        large = (floor.sum(1) >= 4 * boxes + 4) & (free.sum(1) >= boxes)
        floor, free, target = floor[large], free[large], np.zeros_like(floor[large])
        order = np.argsort(np.where(free, rng.random(floor.shape), 2), 1)
        np.put_along_axis(target, order[:, :boxes], True, 1)
        agent = np.where(floor & ~target, rng.random(floor.shape), -1).argmax(1)
        box, agent, undo, states = reverse_play(floor, target, agent, rng)
        good = np.flatnonzero(~(box & target).any(1) & ~target[np.arange(len(floor)), agent])
        masks = [mask[good][:, INTERIOR] for mask in (~floor, target, box)]
        packed = pack(*masks, np.searchsorted(INTERIOR, agent[good]))
        for level, i in zip(packed, good, strict=True):
            actions = solution(undo[:, i], states[:, i])
            if 3 * boxes <= len(actions) <= max_moves and bytes(level) not in known:  # not dull
                levels.append(level)
                solutions.append(actions)
        if due():
            print(f'    {len(levels):,} of {n:,} levels generated', flush=True)
    return np.stack(levels[:n]), solutions[:n]


# ----------------------------------------------------------------------------- the environment


def scramble(x: Tensor) -> Tensor:
    """splitmix64's finalizer, int64 -> int64. Shifts are arithmetic, so signs are masked."""
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * -0x40A7B892E31B1A47  # 0xbf58476d1ce4e5b9
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * -0x6B2FB644ECCEEE15  # 0x94d049bb133111eb
    return x ^ (x >> 31 & (1 << 33) - 1)


def board_keys(seed: int, stream: int, board: Tensor) -> Tensor:
    """Return random_bits' keys for the boards with these numbers (N,) int64, for one *_STREAM."""
    return scramble(scramble(torch.full_like(board, (seed * 4 + stream) % (1 << 63))) + board)


def random_bits(keys: Tensor, count: Tensor) -> Tensor:
    """A random number 0..2^53-1 for each board's key (N,) and count (N,) or (), by these alone:
    nothing depends on how boards are split over ranks, a resumed run needs no generator's state,
    and a CUDA graph draws anew at every replay."""
    return scramble(keys + count) >> 11 & (1 << 53) - 1


class SokobanEnv:
    """N boards at once. order 'random': an ended board draws its next level from all, with
    replacement; 'sequence': board i plays levels i, i + N, i + 2N, ... All state is in tensors (N,
    ...), changed in place. first_board: number of board 0, if other ranks have boards of the run.
    Rules are tables: on a GPU a step costs its number of kernels, and torch.compile fuses them."""

    STATE = ('level', 'grid', 'agent', 'steps', 'total', 'episode')

    def __init__(
        self, levels: ndarray, N: int, seed=0, device='cpu', order='random', first_board=0
    ):
        if order not in ('random', 'sequence'):
            raise ValueError(f"order = {order!r}: expected 'random' or 'sequence'")
        self.N, self.order = N, order
        tables = *unpack(levels), OUTCOMES, PATHS  # (n, 100), (n,), (8, 8, 4), (100, 4, 3)
        moved = (torch.from_numpy(table).to(device) for table in tables)
        self.grids, self.agents, self.outcomes, self.paths = moved
        self.cell = torch.arange(CELLS, device=device)
        self.board = torch.arange(first_board, first_board + N, device=device)
        # sums of WALL, TARGET and BOX
        self.grid = torch.zeros(N, CELLS, dtype=torch.uint8, device=device)
        self.level, self.agent, self.steps, self.episode = self.board.new_zeros(4, N)
        self.total = torch.zeros(N, device=device)  # the episode's return so far
        self.begin(seed)

    def begin(self, seed: int) -> None:
        """Anew, with the levels of another seed."""
        self.keys = board_keys(seed, LEVEL_STREAM, self.board)
        self.episode.zero_()
        self.reset(torch.ones_like(self.board, dtype=torch.bool))

    def reset(self, which: Tensor) -> None:
        """The next level for the boards of the mask (N,)."""
        number = self.board + self.episode * self.N
        if self.order == 'random':
            number = random_bits(self.keys, self.episode)
        level = number % len(self.grids)
        self.grid.copy_(torch.where(which[:, None], self.grids[level], self.grid))
        self.level.copy_(torch.where(which, level, self.level))
        self.agent.copy_(torch.where(which, self.agents[level], self.agent))
        self.steps.masked_fill_(which, 0)
        self.total.masked_fill_(which, 0)
        self.episode.add_(which)

    def step(self, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """action (N,) int64, 0..3 -> reward (N,) fp32, done (N,), solved (N,) bool. A board that is
        done is reset at once: the next observation is the new episode's."""
        reward, done, solved = self.move(action)
        self.reset(done)
        return reward, done, solved

    def move(self, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The step without the reset."""
        path = self.paths[self.agent, action]  # (N, 3)
        near, far = self.grid.gather(1, path[:, 1:]).long().unbind(1)
        outcome = self.outcomes[near, far]  # (N, 4)
        new = outcome[:, 1:3].to(torch.uint8)  # (N, 2)
        here = self.cell == path[:, 1:, None]  # (N, 2, 100); a scatter fuses with nothing
        grid = torch.where(here[:, 1], new[:, 1:], self.grid)
        self.grid.copy_(torch.where(here[:, 0], new[:, :1], grid))
        self.agent.copy_(path.gather(1, outcome[:, :1]).squeeze(1))
        self.steps.add_(1)
        solved = ~(self.grid == BOX).any(1)  # no box off the targets, which are as many
        done = solved | (self.steps >= TIME_LIMIT)
        reward = outcome[:, 3] + 10.0 * solved - 0.1
        self.total.add_(reward)
        return reward, done, solved

    def observe(self) -> Tensor:
        """Jumanji's (N, 10, 10, 2) uint8: agent 3 and box 4 in channel 0, wall 1, target 2 in 1."""
        variable = (self.grid & BOX).masked_fill_(self.cell == self.agent[:, None], AGENT)
        return torch.stack([variable, self.grid & (WALL | TARGET)], -1).view(self.N, SIZE, SIZE, 2)

    def state_dict(self) -> dict[str, Tensor]:
        return {name: getattr(self, name).clone() for name in self.STATE}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name in self.STATE:
            fill(getattr(self, name), state[name])


class JumanjiEnv(SokobanEnv):
    """The same boards, of 4 boxes, moved by Jumanji's own Sokoban-v0. jumanji and jax are imported
    here alone; the pinned jax runs on the CPU."""

    def __init__(self, levels: ndarray, N: int, seed=0, device='cpu', first_board: int = 0):
        super().__init__(levels, N, seed, device, first_board=first_board)
        if ((self.grids & BOX) > 0).sum(1).min() < 4:
            raise Mistake("Jumanji's Sokoban has 4 boxes, and some of these levels have fewer")
        need_packages(jumanji=True, jax=True)
        import jax
        from jumanji.environments import Sokoban
        from jumanji.environments.routing.sokoban import generator, types

        # its levels are never asked for: other generators download theirs
        game, self.State = Sokoban(generator.ToyGenerator()), types.State
        self.play = jax.jit(jax.vmap(game.step))

    def move(self, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Our boards as a state of Jumanji's, its step, and what that leaves as our boards."""
        seen, at = self.observe().cpu().numpy(), self.agent.cpu().numpy().astype(np.int32)
        grids = {'variable_grid': seen[..., 0], 'fixed_grid': seen[..., 1]}
        rest = {'agent_location': np.stack(np.divmod(at, SIZE), 1)}
        rest |= {'step_count': self.steps.cpu().numpy().astype(np.int32)}
        before = self.State(key=np.zeros((self.N, 2), np.uint32), **grids, **rest)
        after, timestep = self.play(before, action.cpu().numpy().astype(np.int32))
        gave = timestep.observation.grid, timestep.observation.step_count, timestep.reward
        gave = *gave, timestep.last(), timestep.extras['solved']
        seen, steps, *gave = (torch.from_numpy(np.array(x)).to(action.device) for x in gave)
        variable, fixed = seen.flatten(1, 2).unbind(-1)
        self.grid.copy_(fixed | variable & BOX)
        self.agent.copy_((variable == AGENT).int().argmax(1))
        self.steps.copy_(steps)
        self.total.add_(gave[0])
        return tuple(gave)


# ----------------------------------------------------------------------------- evaluation
#
# A policy is anything with the three methods of convlstm.Agent that are called here:
#
#     weights = policy.prepare()                 # once for a batch of levels
#     state = policy.init_state(N)               # for N boards, zero
#     logits, value, state = policy.act(weights, obs, start, state)
#
# with obs (N, 10, 10, 2) uint8, start (N,) bool, true where an episode starts, and logits (N, 4).


def sample_actions(logits: Tensor, random: Tensor) -> Tensor:
    """Sample actions (B,) from logits (B, 4) by inversion, with `random` (B,) of random_bits()."""
    u = (random >> 29).to(torch.float32) / 2**24  # 24 of 53 bits: exact in fp32, below 1
    return (u[:, None] >= F.softmax(logits.float(), -1).cumsum(-1)[:, :-1]).sum(-1)


@torch.no_grad()
def run_episodes(
    policy: object, levels: ndarray, device: str, seed: int | None = None, first_level: int = 0
) -> dict[str, Tensor]:
    """Play each of the packed levels (n, 17) once, for at most 120 steps.

    Actions are greedy, or sampled if a seed is given. `first_level` is the number of levels[0] in
    the whole evaluation: ranks that share the levels sample the actions that one process would.

    Return on the CPU: solved (n,) bool, return and steps (n,) fp32, and actions (n, 120) int8, 0
    after the end of an episode.
    """
    n, batches, is_due = len(levels), [], every()
    for first in range(0, n, EVALUATION_BATCH):
        # the last batch wraps around to a full one, so that every batch has the same shape
        N = min(EVALUATION_BATCH, n)
        env = SokobanEnv(levels[(first + np.arange(N)) % n], N, device=device, order='sequence')
        keys = None
        if seed is not None:
            keys = board_keys(seed, EVALUATION_STREAM, env.board + first_level + first)
        weights, state = policy.prepare(), policy.init_state(N)
        start = torch.ones(N, dtype=torch.bool, device=device)
        alive = torch.ones(N, dtype=torch.bool, device=device)
        won = torch.zeros(N, dtype=torch.bool, device=device)
        returns = torch.zeros(N, device=device)
        steps = torch.zeros(N, device=device)
        actions = torch.zeros(N, TIME_LIMIT, dtype=torch.int8, device=device)
        for t in range(TIME_LIMIT):
            logits, _, state = policy.act(weights, env.observe(), start, state)
            if keys is None:
                action = logits.argmax(-1)
            else:
                action = sample_actions(logits, random_bits(keys, env.steps))
            actions[:, t] = action * alive
            # a board whose episode has ended plays on, and no longer counts
            reward, start, solved = env.step(action)
            returns += reward * alive
            steps += alive
            won |= solved & alive
            alive &= ~start
            if is_due():
                print0(f'    {first:,} of {n:,} levels evaluated; step {t + 1} of the next {N}')
            if not alive.any():
                break
        results = {'solved': won, 'return': returns, 'steps': steps, 'actions': actions}
        batches.append({name: x[: n - first].cpu() for name, x in results.items()})
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


def evaluate(
    policy: object, levels: ndarray, device: str, seed: int | None = None
) -> dict[str, float]:
    """Return the mean solve_rate, return and steps over the levels, which the ranks share."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    shard = np.array_split(np.arange(len(levels)), world)[rank]
    totals = torch.zeros(3, dtype=torch.float64)
    if len(shard):  # there may be fewer levels than ranks
        results = run_episodes(policy, levels[shard], device, seed, int(shard[0]))
        totals = torch.stack([results[k].double().sum() for k in ('solved', 'return', 'steps')])
    totals = totals.to(device)
    if world > 1:
        dist.all_reduce(totals)
    solve_rate, mean_return, mean_steps = (totals / len(levels)).tolist()
    return {'solve_rate': solve_rate, 'return': mean_return, 'steps': mean_steps}


def replay(levels: ndarray, actions: ndarray) -> ndarray:
    """Return the observations (n, T + 1, 10, 10, 2) before, between and after actions (n, T).

    Nothing is reset: the last observation of an episode is its end.
    """
    env = SokobanEnv(levels, len(levels), order='sequence')
    boards = [env.observe().numpy()]
    for action in actions.T:
        env.move(torch.from_numpy(action.astype(np.int64)))
        boards.append(env.observe().numpy())
    return np.stack(boards, 1)


def write_evaluation(
    policy: object, levels: ndarray, name: str, device: str, folder: str, about: dict
) -> dict:
    """Evaluate a policy greedily in this process and return the record it writes.

    Writes folder/eval_NAME.json, which starts with the entries of `about`, and as GIFs the longest
    episode that was solved and the first that was not.
    """
    if int(os.environ.get('WORLD_SIZE', 1)) > 1:
        fail('eval_only runs in one process: start it with python, not torchrun')
    name = f'eval_{os.path.splitext(os.path.basename(name))[0]}'
    results = run_episodes(policy, levels, device)
    record = {
        **about,
        'n': len(levels),
        'solve_rate': results['solved'].float().mean().item(),
        'mean_return': results['return'].mean().item(),
        'mean_steps': results['steps'].mean().item(),
    }
    for label, chosen in (('solved', results['solved']), ('failed', ~results['solved'])):
        path = os.path.join(folder, f'{name}_{label}.gif')
        with contextlib.suppress(FileNotFoundError):
            os.remove(path)  # of an earlier evaluation
        if chosen.any():
            i = int((chosen * results['steps']).argmax())  # those that fail all last 120 steps
            actions = results['actions'][i : i + 1, : int(results['steps'][i])].numpy()
            save_gif([board_image(board) for board in replay(levels[i : i + 1], actions)[0]], path)
            record |= {f'{label}_level': i, f'{label}_game': path}
    write_json(record, os.path.join(folder, f'{name}.json'))
    return record


class StatelessPolicy:
    """A policy that is a function from observations (N, 10, 10, 2) to logits (N, 4)."""

    def __init__(self, logits: Callable[[Tensor], Tensor]):
        self.logits = logits

    def prepare(self) -> tuple:
        return ()

    def init_state(self, N: int) -> tuple:
        return ()

    def act(self, weights: tuple, obs: Tensor, start: Tensor, state: tuple) -> tuple:
        return self.logits(obs), None, state


# a random policy where actions are sampled
RANDOM = StatelessPolicy(lambda obs: torch.zeros(len(obs), 4, device=obs.device))


def load_policy(name: str) -> StatelessPolicy:
    """Return the policy of `module:function`, which maps observations (N, 10, 10, 2) uint8 to
    actions (N,), both numpy arrays. Ends the script if there is no such function, or if it returns
    anything but N actions from 0 to 3.
    """
    module, _, function = name.partition(':')
    sys.path.append(os.getcwd())
    try:
        choose_actions = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        fail(f'policy = {name!r}: expected module:function ({first_line(error)})')

    def logits(obs: Tensor) -> Tensor:
        actions = np.asarray(choose_actions(obs.cpu().numpy()))
        if actions.shape != (len(obs),) or not np.isin(actions, range(4)).all():
            found = f'{actions.ravel()[:3]}, shape {actions.shape}'
            fail(f'policy = {name!r}: expected {len(obs)} actions from 0 to 3, found {found}')
        return F.one_hot(torch.from_numpy(actions.astype(np.int64)), 4).to(obs.device)

    return StatelessPolicy(logits)


class FeatureRecorder:
    """Several agents as one policy: all see the same boards, the first one acts.

    `features` collects s[L] of every step, the agents' channels side by side: (N, 10, 10, C) fp16.
    With hold > 0 the agents see the first board `hold` times more before they act, and nothing is
    collected.
    """

    def __init__(self, *agents: object, hold: int = 0):
        self.agents, self.hold, self.features = agents, hold, []

    def prepare(self) -> list:
        return [agent.prepare() for agent in self.agents]

    def init_state(self, N: int) -> list:
        return [agent.init_state(N) for agent in self.agents]

    def act(self, weights: list, obs: Tensor, start: Tensor, states: list) -> tuple:
        # all boards start together at the first step, and never again
        repeats = 1 + self.hold if start.all() else 1
        for _ in range(repeats):
            seen = [
                agent.see(w, obs, start, state)
                for agent, w, state in zip(self.agents, weights, states, strict=True)
            ]
            features, states = [s for s, _ in seen], [state for _, state in seen]
            start = torch.zeros_like(start)
        if not self.hold:
            self.features.append(torch.cat(features, -1).to(torch.float16).cpu())
        return self.agents[0].head(features[0])[0], None, states


# ----------------------------------------------------------------------------- for Gymnasium
#
#     env = gymnasium.make('sokoban:ParallelExperts/Sokoban-v0', n_boxes=1)
#     envs = gymnasium.make_vec('sokoban:ParallelExperts/Sokoban-v0', num_envs=64)
#
# levels: packed (n, 17), else n_levels generated ones of n_boxes and max_moves. Both ends of an
# episode are terminations, as in Jumanji; infos have `solved`. Without gymnasium: SokobanEnv.


try:
    import gymnasium
    from gymnasium.vector import AutoresetMode, VectorEnv
    from gymnasium.vector.utils import batch_space
except ImportError:
    gymnasium = None


class GymVectorEnv(VectorEnv if gymnasium else object):
    """num_envs boards in one SokobanEnv: observations (10, 10, 2) uint8 as it gives them, actions
    0..3. A board that is done is reset in the same step; its last observation is in final_obs."""

    metadata = {'autoreset_mode': AutoresetMode.SAME_STEP} if gymnasium else {}

    def __init__(self, num_envs=1, levels=None, n_levels=1000, n_boxes=4, max_moves=TIME_LIMIT):
        need_packages(gymnasium=True)
        made = generate(n_levels, n_boxes, 0, max_moves)[0] if levels is None else levels
        self.num_envs, self.boards = num_envs, SokobanEnv(made, num_envs)
        boxes, moves = gymnasium.spaces.Box, gymnasium.spaces.Discrete
        spaces = boxes(0, BOX, (SIZE, SIZE, 2), np.uint8), moves(4)
        self.single_observation_space, self.single_action_space = spaces
        self.observation_space, self.action_space = (batch_space(x, num_envs) for x in spaces)

    def reset(self, *, seed=None, options=None) -> tuple[ndarray, dict]:
        super().reset(seed=seed)
        self.boards.begin(int(self.np_random.integers(1 << 62)))
        return self.boards.observe().numpy(), {}

    def step(self, actions: ndarray) -> tuple[ndarray, ...]:
        reward, done, solved = self.boards.move(torch.as_tensor(actions).long())
        final = self.boards.observe().numpy()
        self.boards.reset(done)
        infos = {'solved': solved.numpy(), 'final_obs': final, '_final_obs': done.numpy()}
        ends = done.numpy(), np.zeros(self.num_envs, bool)
        return self.boards.observe().numpy(), reward.numpy(), *ends, infos


class GymEnv(gymnasium.Env if gymnasium else object):
    """One board."""

    metadata = {'render_modes': ['ansi', 'rgb_array'], 'render_fps': 4}

    def __init__(self, levels=None, render_mode=None, **made):
        self.one, self.render_mode = GymVectorEnv(1, levels, **made), render_mode
        self.observation_space = self.one.single_observation_space
        self.action_space = self.one.single_action_space

    def reset(self, *, seed=None, options=None) -> tuple[ndarray, dict]:
        super().reset(seed=seed)
        (self.seen,), infos = self.one.reset(seed=int(self.np_random.integers(1 << 62)))
        return self.seen, infos

    def step(self, action: int) -> tuple[ndarray, float, bool, bool, dict]:
        _, (reward,), (done,), _, infos = self.one.step([int(action)])
        (self.seen,), solved = infos['final_obs'], infos['solved'].item()
        return self.seen, reward.item(), done.item(), False, {'solved': solved}

    def render(self) -> str | ndarray:
        return (board_text if self.render_mode == 'ansi' else board_image)(self.seen)


if gymnasium:
    ENTRIES = {'entry_point': 'sokoban:GymEnv', 'vector_entry_point': 'sokoban:GymVectorEnv'}
    gymnasium.register('ParallelExperts/Sokoban-v0', **ENTRIES)


# ----------------------------------------------------------------------------- pictures


def observations(levels: ndarray) -> ndarray:
    """Packed levels (N, 17) -> observations (N, 10, 10, 2) uint8."""
    return SokobanEnv(levels, len(levels), order='sequence').observe().numpy()


def board_text(board: ndarray) -> str:
    """An observation (10, 10, 2) -> ten lines of Boxoban's characters."""
    return '\n'.join(bytes(row).decode() for row in CHARS[board[..., 1], board[..., 0]])


WORDS = """floor f0eadc mortar 3e4654 brick 586375 goal d64541 box deaa62 edge 96642d
    done 7eba68 done_edge 3a7634 player 2d69b9 eye ffffff""".split()
COLOURS = dict(zip(WORDS[::2], map(tuple, map(bytes.fromhex, WORDS[1::2])), strict=True))


def sprites(cell: int) -> ndarray:
    """A picture (cell, cell, 3) for each of # .$*@+, drawn at 4 times the size and averaged."""
    v, u = np.mgrid[-1 : 1 : 4j * cell, -1 : 1 : 4j * cell]  # rows, columns
    square, radius = np.maximum(abs(u), abs(v)), np.hypot(u, v)
    cross = (abs(abs(u) - abs(v)) < 0.16) & (square < 0.64)
    wall = [(square < 2, 'mortar'), ((v % 1 > 0.08) & ((u + (v > 0)) % 2 > 0.08), 'brick')]
    goal = [((radius < 0.54) & (radius > 0.34), 'goal'), (radius < 0.17, 'goal')]
    box = [(square < 0.82, 'edge'), (square < 0.64, 'box'), (cross, 'edge')]
    done = [(mask, {'edge': 'done_edge', 'box': 'done'}[name]) for mask, name in box]
    agent = [(radius < 0.74, 'player'), ((abs(u) - 0.27) ** 2 + (v + 0.14) ** 2 < 0.022, 'eye')]
    on_goal = [*agent, (abs(radius - 0.86) < 0.07, 'goal')]
    pictures = np.full((7, 4 * cell, 4 * cell, 3), COLOURS['floor'], float)
    for picture, layers in zip(pictures, (wall, [], goal, box, done, agent, on_goal), strict=True):
        for mask, name in layers:
            picture[mask] = COLOURS[name]
    return pictures.reshape(7, cell, 4, cell, 4, 3).mean((2, 4)).round().astype(np.uint8)


def board_image(board: ndarray, cell: int = 24) -> ndarray:
    """Observation (10, 10, 2) -> RGB picture (10 cell, 10 cell, 3) uint8."""
    number = ['# .$*@+'.index(char) for char in board_text(board).replace('\n', '')]
    tiles = sprites(cell)[number].reshape(SIZE, SIZE, cell, cell, 3)
    return tiles.swapaxes(1, 2).reshape(SIZE * cell, SIZE * cell, 3)


def plan_image(board: ndarray, directions: ndarray, truth: ndarray | None = None) -> ndarray:
    """Return the picture of an observation with an arrow on every cell that the plan names.

    directions (10, 10): 0..3 for up, right, down, left, -1 for no arrow. The agent's own cell gets
    none. If the directions that the agent will take are known (`truth`, of the same form), arrows
    that are right are blue and those that are wrong orange; else all are teal.
    """
    picture, (v, u) = board_image(board), np.mgrid[-1:1:24j, -1:1:24j]
    triangle = (abs(u) < 0.5 * v + 0.3) & (abs(v) < 0.5)  # points up
    for y, x in np.argwhere((directions >= 0) & (board[..., 0] != AGENT)):
        color = 30, 130, 140
        if truth is not None:
            color = (0, 114, 178) if truth[y, x] == directions[y, x] else (213, 94, 0)
        cell = picture[24 * y : 24 * y + 24, 24 * x : 24 * x + 24]
        cell[np.rot90(triangle, -directions[y, x])] = color
    return picture


def save_gif(frames: list[ndarray], path: str, ms: int = 150) -> None:
    """Pictures (H, W, 3) -> an endless animation, `ms` a frame, the last longer."""
    from PIL import Image

    first, *rest = map(Image.fromarray, frames)
    times = [ms] * len(rest) + [8 * ms]
    more = {'save_all': True, 'append_images': rest, 'duration': times, 'loop': 0}
    write_atomic(path, lambda file: first.save(file, format='GIF', **more))


def main() -> None:
    configure(globals(), quiet=True)
    need_packages(PIL=picture != '')
    made = n_levels, n_boxes, seed, max_moves
    levels, source = load_levels(levels_dir, split, download, made)
    print(source)
    boards = observations(levels[:show])
    for i, board in enumerate(boards):
        print(f'\n; {i}\n{board_text(board)}')
    if picture:
        from PIL import Image

        boards = np.stack([board_image(board) for board in boards])
        columns = math.ceil(len(boards) ** 0.5)
        margins = (0, -len(boards) % columns), (4, 4), (4, 4), (0, 0)
        rows = np.pad(boards, margins, constant_values=255).reshape(-1, columns, 248, 248, 3)
        image = Image.fromarray(rows.swapaxes(1, 2).reshape(-1, columns * 248, 3))
        write_atomic(picture, lambda file: image.save(file, format='PNG'))


if __name__ == '__main__':
    run_script(main)

"""
Sokoban: levels, their generator, the environment, evaluation of policies, pictures.

$ python sokoban.py --split=generated --show=3                 # print levels as text
$ python sokoban.py --levels_dir=levels --split=unfiltered-test --show=12 --picture=levels.png
$ python sokoban.py --levels_dir=levels --split=unfiltered-valid --download=True # needs a network

A packed level is 17 bytes (uint8): 8 for the walls of the 8x8 interior, row-major, most significant
bit first (the border is always wall); then 4 target cells, 4 box cells and the agent's cell, as
indices 0..63 into the interior. A level with 1 to 3 boxes has as many targets, and repeats its
first target and its first box.

The rules are those of Jumanji's Sokoban-v0 on 10x10 boards. Actions are up, right, down, left. A
blocked move costs a step like any other. The reward is -0.1 per step, +1 for a box pushed onto a
target, -1 for one pushed off, +10 when all boxes are on targets. An episode ends when its level is
solved or at the time limit, 120 steps by default; both are terminations, so no value is
bootstrapped. `SokobanEnv` plays N boards with tensor operations alone, in place and without
synchronizing with the device, so that a CUDA graph can capture its steps. `JumanjiEnv` moves the
same boards by Jumanji's own code.

Shape letters: N boards or levels that are processed together, n levels in all. The 100 cells of a
board are numbered row by row, 0..99.
"""

import contextlib
import glob
import importlib
import math
import os
import re
import shlex
import sys
import tokenize
from collections.abc import Callable, Iterable

from configurator import BROKEN, Mistake, configure, first_line, run_script
from files import read_json, write_atomic, write_json
from common import every

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy import ndarray
from numpy.random import Generator
from torch import Tensor

from common import fill, need_packages, print0
from hub import call_hub, pin_revision

# fmt: off
levels_dir = ''             # folder of Boxoban text files or .pack17.npy arrays; '': data/boxoban
split = 'unfiltered-train'  # unfiltered-train, -valid or -test, medium-train or -valid, hard;
                            # 'generated'; or a file
download = False            # download a missing split (Hugging Face, 200 bytes per level)
n_boxes = 4                 # boxes of a generated level, 1 to 4
max_moves = 120             # most moves of a generated level's solution, at least 6 per box
n_levels = 1000             # number of generated levels
seed = 1337                 # seed of the generator
show = 1                    # levels to print, starting with the first
picture = ''                # a PNG file to draw them into

RANGES = {'show': (1, math.inf)}
# fmt: on

SIZE = 10  # rows and columns of a board
INSIDE = 8  # rows and columns of its interior
CELLS = SIZE * SIZE
DELTA = (-10, 1, 10, -1)  # change of a cell's number by up, right, down, left
TIME_LIMIT = 120  # default: most steps of an episode; also the largest max_moves
EVALUATION_BATCH = 256  # boards that are evaluated at once
# board_keys makes independent random numbers for each of these purposes
LEVEL_STREAM, ACTION_STREAM, EVALUATION_STREAM = 0, 1, 2
# Jumanji's codes: walls and targets are in its fixed grid, agent and boxes in its variable grid
WALL, TARGET, AGENT, BOX = 1, 2, 3, 4
# memory of a generated level: packed, unpacked, its solution, and the objects that hold them
LEVEL_BYTES = 300
REVERSE_STEPS = 300  # moves that the generator plays in reverse
GENERATOR_BATCH = 4096  # boards that it plays at once
PART = 50_000  # levels that are unpacked at once: those of a whole file would be large
HUB = 'InstaDeepAI/boxoban-levels'
BROKEN_ARRAY = (*BROKEN, OSError, EOFError, tokenize.TokenError)  # what np.load raises
# CHARS[fixed code, variable code]: Boxoban's character, '?' for what no level has
CHARS = np.frombuffer(b' ??@$?#?????.??+*???????', np.uint8).reshape(4, 6)
INTERIOR = np.arange(CELLS).reshape(SIZE, SIZE)[1:-1, 1:-1].ravel()  # cell 0..99 of index 0..63

# The environment's tables. NEXT_CELLS[cell, action]: the cell and the next two in that direction.
AHEAD = np.array(DELTA)[:, None] * np.arange(3)  # (4, 3)
NEXT_CELLS = np.clip(np.arange(CELLS)[:, None, None] + AHEAD, 0, CELLS - 1)  # (100, 4, 3)
# OUTCOMES[near, far], (8, 8, 4) int64, by the codes of the two cells in front of the agent: whether
# it moves (0 or 1), the code of each cell afterwards, and the change in the number of boxes on
# targets.
NEAR, FAR = np.mgrid[:8, :8]
MOVES = (NEAR & WALL == 0) & ((NEAR & BOX == 0) | (FAR & (WALL | BOX) == 0))
PUSHED = MOVES * (NEAR & BOX)
ON_TARGET = (PUSHED > 0) * ((FAR & TARGET) - (NEAR & TARGET)) // TARGET
OUTCOMES = np.stack([MOVES, NEAR - PUSHED, FAR + PUSHED, ON_TARGET], -1)


# ----------------------------------------------------------------------------- levels


def pack(wall: ndarray, target: ndarray, box: ndarray, agent: ndarray) -> ndarray:
    """Return packed levels (N, 17) uint8 from boolean masks (N, 64) of the interior and the agents'
    interior cells (N,)."""
    packed = np.empty((len(wall), 17), np.uint8)
    packed[:, :8] = np.packbits(wall, axis=1)
    for column, mask in ((8, target), (12, box)):
        cells = np.argsort(~mask, axis=1, kind='stable')[:, :4]  # cells of the mask come first
        is_set = np.take_along_axis(mask, cells, 1)
        packed[:, column : column + 4] = np.where(is_set, cells, cells[:, :1])
    packed[:, 16] = agent
    return packed


def unpack(levels: ndarray) -> tuple[ndarray, ndarray]:
    """Return the grids (N, 100) uint8 of packed levels (N, 17), with sums of WALL, TARGET and BOX,
    and the agents' cells (N,)."""
    cells = INTERIOR[levels[:, 8:]]  # (N, 9)
    rows = np.arange(len(levels))[:, None]
    grid = np.full((len(levels), CELLS), WALL, np.uint8)
    grid[:, INTERIOR] = np.unpackbits(levels[:, :8], axis=1)
    grid[rows, cells[:, :4]] |= TARGET
    grid[rows, cells[:, 4:8]] |= BOX
    return grid, cells[:, 8].copy()


def pack_text(boards: ndarray, path: str, first: int = 0) -> ndarray:
    """Return packed levels (N, 17) from boards of ASCII codes (N, 10, 10) uint8.

    Raises Mistake for a board that is no level. The message names the path and the number of the
    level; `first` is the number of boards[0].
    """
    agent_bit, unknown_bit = 8, 16
    bits_of = {
        ' ': 0,
        '#': WALL,
        '.': TARGET,
        '$': BOX,
        '@': agent_bit,
        '*': TARGET | BOX,
        '+': TARGET | agent_bit,
    }
    table = np.full(256, unknown_bit, np.uint8)  # by ASCII code
    for char, sum_of_bits in bits_of.items():
        table[ord(char)] = sum_of_bits
    bits = table[boards]
    wall, target, box, agent, unknown = (
        (bits & bit) > 0 for bit in (WALL, TARGET, BOX, agent_bit, unknown_bit)
    )
    n_targets, n_boxes, n_agents = (mask.sum((1, 2)) for mask in (target, box, agent))
    open_border = ~wall
    open_border[:, 1:-1, 1:-1] = False
    problems = {  # text: which boards have the problem, (N,) bool
        'has a character that is none of # .$@*+': unknown.any((1, 2)),
        'is not walled in': open_border.any((1, 2)),
        'does not have exactly one agent': n_agents != 1,
        'does not have 1 to 4 boxes': (n_boxes < 1) | (n_boxes > 4),
        'does not have as many targets as boxes': n_targets != n_boxes,
    }
    for problem, found in problems.items():
        if found.any():
            raise Mistake(f'{path}: level {first + int(found.argmax())} {problem}')
    wall, target, box, agent = (
        mask[:, 1:-1, 1:-1].reshape(-1, INSIDE**2) for mask in (wall, target, box, agent)
    )
    return pack(wall, target, box, agent.argmax(1))


def parse_text(text: str, path: str) -> ndarray:
    """Return packed levels (N, 17) from Boxoban's text.

    Each level is a line `; index`, ten rows of ten characters and a blank line. Raises Mistake,
    naming the path and the level, for anything else.
    """
    head, *blocks = ('\n' + text).split('\n;')
    if head.strip() or not blocks:
        raise Mistake(f'{path}: level 0 does not start with a line "; index"')
    boards = ''
    for index, block in enumerate(blocks):
        rows = [row for row in block.split('\n')[1:] if row]
        if [len(row) for row in rows] != [SIZE] * SIZE:
            raise Mistake(f'{path}: level {index} is not ten rows of ten characters')
        boards += ''.join(rows)
    codes = np.frombuffer(boards.encode('ascii', 'replace'), np.uint8)
    return pack_text(codes.reshape(-1, SIZE, SIZE), path)


def pack_observations(boards: ndarray, path: str, first: int = 0) -> ndarray:
    """Return packed levels (N, 17) from observations (N, 10, 10, 2) of any integer type.

    Raises Mistake, naming the path and the level, for a board that is no level. `first` is the
    number of boards[0].
    """
    packed = []
    for i in range(0, len(boards), PART):
        variable, fixed = np.moveaxis(boards[i : i + PART], -1, 0)
        # a code outside the table is clipped to its last row or column, which hold '?'
        chars = CHARS[fixed.clip(-1, 3), variable.clip(-1, 5)]
        packed.append(pack_text(chars, path, first + i))
    return np.concatenate(packed)


def download_split(split: str, folder: str) -> None:
    """Download a split of Jumanji's copy of Boxoban and write it packed into `folder`.

    All splits in a folder come from one commit, which its meta.json names. Jumanji 1.1.2 replaces
    the last level of each of Boxoban's text files by the one before, and its copy may have been
    made that way: prefer the text files where you have them. Raises Mistake if the download fails
    or yields no levels.
    """
    path = f'{HUB} {split}.npy'
    os.makedirs(folder, exist_ok=True)
    meta = read_json(os.path.join(folder, 'meta.json')) or {'source': HUB}
    revision = pin_revision(meta, folder, HUB, 'model')
    print(f'downloading {path} ({revision[:12]})', flush=True)
    grids = read_array(call_hub('hf_hub_download', HUB, f'{split}.npy', revision=revision))
    if grids.shape[1:] != (SIZE, SIZE, 2) or grids.dtype.kind not in 'iu' or len(grids) == 0:
        found = f'{grids.dtype} of shape {grids.shape}'
        raise Mistake(f'{path}: expected integers of shape (N, 10, 10, 2), found {found}')
    if grids[0, 0, 0, 0] == WALL:  # the corner: some files hold the fixed grid first
        grids = grids[..., ::-1]
    packed = pack_observations(grids, path)
    write_atomic(f'{folder}/{split}.pack17.npy', lambda file: np.save(file, packed))


def read_array(path: str) -> ndarray:
    """Return the array of a .npy file. Raises Mistake if it cannot be read.

    The file is mapped into memory, so that a damaged header allocates nothing.
    """
    try:
        return np.asarray(np.load(path, mmap_mode='r', allow_pickle=False))
    except BROKEN_ARRAY as error:
        raise Mistake(f'{path}: cannot be read as a .npy file ({first_line(error)})') from None


def read_file(path: str) -> ndarray:
    """Return the packed levels (N, 17) of a text file or an array of packed levels.

    Raises Mistake if the file is damaged or holds a board that is no level.
    """
    if not path.endswith('.npy'):
        with open(path, encoding='ascii', errors='replace') as file:
            return parse_text(file.read(), path)
    levels = read_array(path)
    if levels.dtype != np.uint8 or levels.shape[1:] != (17,) or len(levels) == 0:
        found = f'{levels.dtype} of shape {levels.shape}'
        raise Mistake(f'{path}: expected uint8 of shape (N, 17), found {found}')
    if levels[:, 8:].max() >= INSIDE**2:
        raise Mistake(f'{path}: a cell of a packed level is not in 0..63')
    parts = [
        pack_observations(observations(levels[i : i + PART]), path, first=i)
        for i in range(0, len(levels), PART)
    ]
    return np.concatenate(parts)


def split_files(folder: str, split: str) -> list[str]:
    """Return the files of a split, [] if there are none.

    These are SPLIT.pack17.npy; or else SPLIT.txt and numbered files such as SPLIT_000.txt, also
    with _ for -; or else those in Boxoban's own tree, such as unfiltered/test/*.txt.
    """

    def find(pattern: str) -> list[str]:
        return sorted(glob.glob(os.path.join(glob.escape(folder), pattern)))

    name = glob.escape(split)
    texts = [  # not those of unfiltered-test for a split `unfiltered`
        path
        for path in find(f'{name.replace("-", "[-_]")}*.txt')
        if re.fullmatch(r'([-_.]?\d+)?\.txt', os.path.basename(path)[len(split) :])
    ]
    packed = find(f'{name}.pack17.npy')
    return packed or texts or find(os.path.join(*name.split('-'), '*.txt'))


def load_levels(
    levels_dir: str,
    split: str,
    download: bool = False,
    generator: dict | None = None,
    limit: float = math.inf,
) -> tuple[ndarray, str]:
    """Return the first `limit` packed levels (N, 17), and a line that describes their source.

    split: a file; or 'generated', for the levels of generate(**generator); or the name of a split,
    whose files are in levels_dir ('': data/boxoban), and are downloaded into it if there are none
    and `download` is set. Raises Mistake if there are no levels, or if a file is damaged.
    """
    if split == 'generated':
        levels, _ = generate(**generator)
        text = '{n:,} generated levels, boxes: {boxes}, moves: at most {max_moves}, seed: {seed}'
        line = text.format(**generator)
    elif os.path.isfile(split):
        levels = read_file(split)
        line = f'{len(levels):,} levels of {split}'
    elif not split.strip('-') or os.sep in split or split.endswith(('.txt', '.npy')):
        raise Mistake(f'{split!r}: no such file; a split has a name such as unfiltered-train')
    else:
        folder = levels_dir or os.path.join('data', 'boxoban')
        source = ''
        if download and not split_files(folder, split):
            download_split(split, folder)
            source = f' downloaded from {HUB}'
        paths = split_files(folder, split)
        if not paths:
            missing = 'no such folder'
            if os.path.isdir(folder):
                missing = f'no {split}.pack17.npy, {split}.txt or {split}_000.txt'
            command = ['python', 'sokoban.py', f'--split={split}', '--download=True']
            if levels_dir:
                command.append(f'--levels_dir={levels_dir}')
            advice = (
                f"`{shlex.join(command)}` downloads {split}; the split 'generated' needs no files"
            )
            raise Mistake(f'{folder}: {missing}: {advice}')
        levels = np.concatenate([read_file(path) for path in paths])
        files = f'{len(paths)} file{"s" * (len(paths) > 1)}'
        line = f'{len(levels):,} levels of {split} from {files} in {folder}{source}'
    if limit < len(levels):
        return levels[:limit], f'the first {limit:,} of {line}'
    return levels, line


def load_level_sets(
    config: dict, run: dict | None = None, whole_split: bool = False
) -> tuple[tuple[ndarray, str], tuple[ndarray, str]]:
    """Return the training and the evaluation levels for train_sokoban.py's settings, each as
    load_levels returns them. No generated level is in both sets.

    run: for an evaluation, the settings of the run that is evaluated. The training levels are those
    of the run, and are loaded only if the evaluation levels depend on them. The evaluation levels
    are the first eval_games of eval_split, or with whole_split all of them.
    """

    def generator(settings: dict, n: int, seed: int) -> dict:
        sizes = {'boxes': settings['n_boxes'], 'max_moves': settings['max_moves']}
        return {'n': n, 'seed': seed, **sizes}

    training = config if run is None else run
    # an old export does not know its training levels
    both_generated = training.get('split') == config['eval_split'] == 'generated'
    train_levels = np.empty((0, 17), np.uint8)
    train_line = ''
    if run is None or both_generated:
        train_levels, train_line = load_levels(
            config['levels_dir'],
            training['split'],
            config['download'],
            generator=generator(training, training['n_levels'], 2 * training['seed']),
        )
    evaluation = load_levels(
        config['levels_dir'],
        config['eval_split'],
        config['download'],
        generator={
            **generator(config, config['eval_games'], 2 * config['seed'] + 1),
            'exclude': train_levels if both_generated else (),
        },
        limit=math.inf if whole_split else config['eval_games'],
    )
    return (train_levels, train_line), evaluation


# ----------------------------------------------------------------------------- the generator


def carve(N: int, rng: Generator) -> ndarray:
    """Return the floor of N connected rooms, (N, 100) bool. A random walker makes each of them: at
    every step it clears one of five patterns of cells around it. The walk has the length and the
    probability of a turn of gym-sokoban's generator."""
    patterns = np.array([[-1, 0, 1], [-10, 0, 10], [0, 1, 10], [0, 10, 11], [0, -1, -10]])
    floor, rows = np.zeros((N, CELLS), bool), np.arange(N)
    interior = np.isin(np.arange(CELLS), INTERIOR)
    cell = INTERIOR[rng.integers(0, 64, N)]
    direction = rng.integers(0, 4, N)
    for _ in range(34):
        turns = rng.random(N) < 0.35
        direction = np.where(turns, rng.integers(0, 4, N), direction)
        next_cell = cell + np.array(DELTA)[direction]
        cell = np.where(interior[next_cell], next_cell, cell)
        floor[rows[:, None], cell[:, None] + patterns[rng.integers(0, 5, N)]] = True
    return floor & interior


def play_in_reverse(
    floor: ndarray, target: ndarray, agent: ndarray, rng: Generator
) -> tuple[ndarray, ndarray, ndarray, ndarray]:
    """Play backwards from solved boards: the agents walk at random, and mostly pull along the box
    behind them if there is one.

    floor, target: (N, 100) bool. agent: (N,) cells. Returns the boxes (N, 100) and the agents (N,)
    at the end; the forward action that undoes each step (steps, N); and a number for each state on
    the way (steps + 1, N), equal for equal states, and 0 where all boxes are on targets.
    """
    N, steps = len(floor), REVERSE_STEPS
    delta = np.array(DELTA)
    base = np.arange(N) * CELLS  # all boards lie in one row of N * 100 cells
    at = base + agent
    target = target.ravel()
    box = target.copy()
    blocked = ~floor.ravel() | box
    # the number of a state is the sum of a code for each box's cell and one for the agent's
    box_codes, agent_codes = rng.integers(1, 1 << 60, (2, CELLS))
    box_sum = target.reshape(N, CELLS) @ box_codes
    solved_sum = box_sum.copy()
    states = np.zeros((steps + 1, N), np.int64)
    undo = np.zeros((steps, N), np.int8)
    directions = rng.integers(0, 4, (2, steps, N), dtype=np.uint8)
    u = rng.random((steps, N), np.float32)
    for t in range(steps):
        # take the second of two random directions if it pulls a box off a target, else the first
        step = delta[directions[1, t]]
        pulls_off = ~blocked[at + step] & box[at - step] & target[at - step]
        direction = np.where(pulls_off, directions[1, t], directions[0, t])
        step = delta[direction]
        moves = ~blocked[at + step]
        may_pull = u[t] < np.where(target[at], 0.1, 0.95)  # rarely onto a target
        pulls = np.flatnonzero(moves & box[at - step] & may_pull)
        new, old = at[pulls], (at - step)[pulls]
        box[old] = blocked[old] = False
        box[new] = blocked[new] = True
        box_sum[pulls] += box_codes[new % CELLS] - box_codes[old % CELLS]
        at = np.where(moves, at + step, at)
        states[t + 1] = np.where(box_sum == solved_sum, 0, box_sum + agent_codes[at - base])
        undo[t] = (direction + 2) % 4
    return box.reshape(N, CELLS), at - base, undo, states


def remove_loops(undo: ndarray, states: ndarray) -> ndarray:
    """Return the actions that solve a level made by reverse play, without the loops of the play.

    undo (steps,) and states (steps + 1,) are from play_in_reverse. What was played between the
    first and the last visit to a state is left out.
    """
    states = states.tolist()
    last_visit = {state: t for t, state in enumerate(states)}
    kept = []
    t = last_visit[0]  # the last time that all boxes were on targets
    while t < len(undo):
        kept.append(t)
        t = last_visit[states[t + 1]]
    return undo[kept[::-1]]


def generate(
    n: int,
    boxes: int = 4,
    seed: int = 0,
    max_moves: int = TIME_LIMIT,
    exclude: Iterable = (),
) -> tuple[ndarray, list[ndarray]]:
    """Generate n levels by reverse play and return them packed (n, 17), with a solution (int8) of
    at most max_moves actions each.

    No box and no agent starts on a target, and no level is among `exclude` (packed). The result
    depends on the arguments alone; with a larger n it starts with the same levels. Raises Mistake
    if an argument is out of range.
    """
    ranges = {
        'n_levels': (n, 1, math.inf),
        'n_boxes': (boxes, 1, 4),
        'seed': (seed, 0, math.inf),
        # with fewer than 6 moves per box hardly any level is found
        'max_moves': (max_moves, 6 * boxes, TIME_LIMIT),
    }
    for name, (value, low, high) in ranges.items():
        if not low <= value <= high:
            limits = f'at least {low}' if high == math.inf else f'between {low} and {high}'
            of_boxes = f' for n_boxes = {boxes}' if name == 'max_moves' else ''
            raise Mistake(f'{name} = {value}: must be {limits}{of_boxes}')
    rng = np.random.default_rng(seed)
    is_due = every()
    levels, solutions = [], []
    excluded = set(map(bytes, exclude))
    while len(levels) < n:
        floor = carve(GENERATOR_BATCH, rng)
        # cells from which a box can be pulled away
        pullable = [np.roll(floor, -d, 1) & np.roll(floor, -2 * d, 1) for d in DELTA]
        pullable = floor & np.any(pullable, 0)
        is_large = (floor.sum(1) >= 4 * boxes + 4) & (pullable.sum(1) >= boxes)
        floor, pullable = floor[is_large], pullable[is_large]
        # the targets are random pullable cells, the agent stands on any other floor
        order = np.argsort(np.where(pullable, rng.random(floor.shape), 2), 1)
        target = np.zeros_like(floor)
        np.put_along_axis(target, order[:, :boxes], True, 1)
        agent = np.where(floor & ~target, rng.random(floor.shape), -1).argmax(1)
        box, agent, undo, states = play_in_reverse(floor, target, agent, rng)
        starts_on_target = (box & target).any(1) | target[np.arange(len(floor)), agent]
        kept = np.flatnonzero(~starts_on_target)
        wall, target, box = (mask[kept][:, INTERIOR] for mask in (~floor, target, box))
        packed = pack(wall, target, box, np.searchsorted(INTERIOR, agent[kept]))
        for level, i in zip(packed, kept, strict=True):
            actions = remove_loops(undo[:, i], states[:, i])
            # levels that need fewer than 3 actions per box are too easy
            if 3 * boxes <= len(actions) <= max_moves and bytes(level) not in excluded:
                levels.append(level)
                solutions.append(actions)
        if is_due():
            print0(f'    {len(levels):,} of {n:,} levels generated')
    return np.stack(levels[:n]), solutions[:n]


# ----------------------------------------------------------------------------- the environment


def shift_right(x: Tensor, n: int) -> Tensor:
    """Return int64 x shifted right by n bits, as if it were unsigned: zeros enter from the left."""
    return (x >> n) & ((1 << (64 - n)) - 1)


def scramble(x: Tensor) -> Tensor:
    """Return the finalizer of the splitmix64 generator for x int64. Its factors are written as
    signed numbers."""
    x = (x ^ shift_right(x, 30)) * -0x40A7B892E31B1A47  # 0xbf58476d1ce4e5b9
    x = (x ^ shift_right(x, 27)) * -0x6B2FB644ECCEEE15  # 0x94d049bb133111eb
    return x ^ shift_right(x, 31)


def board_keys(seed: int, stream: int, board: Tensor) -> Tensor:
    """Return the keys (N,) int64 from which random_bits makes the random numbers of boards.

    stream: LEVEL_STREAM, ACTION_STREAM or EVALUATION_STREAM. board: the boards' numbers (N,) int64.
    """
    start = torch.full_like(board, (4 * seed + stream) % (1 << 63))
    return scramble(scramble(start) + board)


def random_bits(keys: Tensor, count: Tensor) -> Tensor:
    """Return random integers 0..2^53 - 1, a function of each board's key (N,) and count (N,) or ().

    Because there is no other state, results do not depend on how boards are split over ranks, a
    resumed run restores no generator, and each replay of a CUDA graph samples new numbers.
    """
    return shift_right(scramble(keys + count), 11)


class SokobanEnv:
    """N boards that are played at once.

    order: with 'random' a board whose episode has ended samples its next level from all levels,
    with replacement; with 'sequence' board i plays the levels i, i + N, i + 2N, ... first_board is
    the number of the first board, where other ranks have boards of the same run. time_limit: steps
    after which an episode ends unsolved.

    All state is in tensors (N, ...) that are changed in place. The rules are tables, because on a
    GPU the number of kernels decides how long a step takes, and torch.compile fuses lookups.
    """

    STATE = ('level', 'grid', 'agent', 'steps', 'total', 'episode')  # what state_dict() holds

    def __init__(
        self,
        levels: ndarray,
        N: int,
        seed: int = 0,
        device: str = 'cpu',
        order: str = 'random',
        first_board: int = 0,
        time_limit: int = TIME_LIMIT,
    ):
        if order not in ('random', 'sequence'):
            raise ValueError(f"order = {order!r}: expected 'random' or 'sequence'")
        self.N = N
        self.order = order
        self.time_limit = time_limit
        grids, agents = unpack(levels)
        self.grids = torch.from_numpy(grids).to(device)  # (n, 100)
        self.agents = torch.from_numpy(agents).to(device)  # (n,)
        self.outcomes = torch.from_numpy(OUTCOMES).to(device)  # (8, 8, 4)
        self.next_cells = torch.from_numpy(NEXT_CELLS).to(device)  # (100, 4, 3)
        self.cell = torch.arange(CELLS, device=device)
        self.board = torch.arange(first_board, first_board + N, device=device)
        self.grid = torch.zeros(N, CELLS, dtype=torch.uint8, device=device)  # as unpack() has it
        self.level = torch.zeros_like(self.board)
        self.agent = torch.zeros_like(self.board)  # its cell
        self.steps = torch.zeros_like(self.board)  # of the episode so far
        self.total = torch.zeros(N, device=device)  # the episode's return so far
        self.episode = torch.zeros_like(self.board)  # number of episodes that have started
        self.restart(seed)

    def restart(self, seed: int) -> None:
        """Start all boards again, with the random levels of another seed."""
        self.keys = board_keys(seed, LEVEL_STREAM, self.board)
        self.episode.zero_()
        self.reset(torch.ones_like(self.board, dtype=torch.bool))

    def reset(self, mask: Tensor) -> None:
        """Start the next level on the boards where `mask` (N,) bool is true."""
        number = self.board + self.episode * self.N
        if self.order == 'random':
            number = random_bits(self.keys, self.episode)
        level = number % len(self.grids)
        self.grid.copy_(torch.where(mask[:, None], self.grids[level], self.grid))
        self.level.copy_(torch.where(mask, level, self.level))
        self.agent.copy_(torch.where(mask, self.agents[level], self.agent))
        self.steps.masked_fill_(mask, 0)
        self.total.masked_fill_(mask, 0)
        self.episode.add_(mask)

    def step(self, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Play actions (N,) int64, 0..3; return reward fp32, done bool and solved bool, (N,) each.

        A board that is done is reset at once: its next observation is that of a new episode.
        """
        reward, done, solved = self.move(action)
        self.reset(done)
        return reward, done, solved

    def move(self, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Play actions like `step`, but reset no board."""
        cells = self.next_cells[self.agent, action]  # (N, 3): the agent's and two in front of it
        near, far = self.grid.gather(1, cells[:, 1:]).long().unbind(1)
        outcome = self.outcomes[near, far]  # (N, 4)
        codes = outcome[:, 1:3].to(torch.uint8)  # (N, 2)
        is_cell = self.cell == cells[:, 1:, None]  # (N, 2, 100); a scatter would not be fused
        grid = torch.where(is_cell[:, 1], codes[:, 1:], self.grid)
        self.grid.copy_(torch.where(is_cell[:, 0], codes[:, :1], grid))
        # its own cell, or the next one if it moves
        self.agent.copy_(cells.gather(1, outcome[:, :1]).squeeze(1))
        self.steps.add_(1)
        solved = ~(self.grid == BOX).any(1)  # no box is off a target
        done = solved | (self.steps >= self.time_limit)
        reward = outcome[:, 3] + 10.0 * solved - 0.1
        self.total.add_(reward)
        return reward, done, solved

    def observe(self) -> Tensor:
        """Return Jumanji's observations (N, 10, 10, 2) uint8: channel 0 holds agent (3) and boxes
        (4), channel 1 walls (1) and targets (2)."""
        variable = (self.grid & BOX).masked_fill_(self.cell == self.agent[:, None], AGENT)
        return torch.stack([variable, self.grid & (WALL | TARGET)], -1).view(self.N, SIZE, SIZE, 2)

    def state_dict(self) -> dict[str, Tensor]:
        return {name: getattr(self, name).clone() for name in self.STATE}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name in self.STATE:
            fill(getattr(self, name), state[name])


class JumanjiEnv(SokobanEnv):
    """The same boards, moved by Jumanji's own Sokoban-v0.

    Raises Mistake if a level has fewer than four boxes. jumanji and jax are imported nowhere else,
    and the jax that requirements.txt pins runs on the CPU.
    """

    def __init__(
        self,
        levels: ndarray,
        N: int,
        seed: int = 0,
        device: str = 'cpu',
        first_board: int = 0,
        time_limit: int = TIME_LIMIT,
    ):
        super().__init__(levels, N, seed, device, first_board=first_board, time_limit=time_limit)
        if ((self.grids & BOX) > 0).sum(1).min() < 4:
            raise Mistake("env = 'jumanji' needs levels with 4 boxes, and some have fewer")
        need_packages(jumanji=True, jax=True)
        import jax
        from jumanji.environments import Sokoban
        from jumanji.environments.routing.sokoban import generator, types

        # this generator is never called; others download their levels when they are created
        game = Sokoban(generator.ToyGenerator(), time_limit=time_limit)
        self.State = types.State
        self.play = jax.jit(jax.vmap(game.step))

    def move(self, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Convert the boards to Jumanji's state, play its step and convert the result back."""
        observation = self.observe().cpu().numpy()
        agent = self.agent.cpu().numpy().astype(np.int32)
        before = self.State(
            key=np.zeros((self.N, 2), np.uint32),
            variable_grid=observation[..., 0],
            fixed_grid=observation[..., 1],
            agent_location=np.stack(np.divmod(agent, SIZE), 1),
            step_count=self.steps.cpu().numpy().astype(np.int32),
        )
        _, timestep = self.play(before, action.cpu().numpy().astype(np.int32))

        def tensor(x: object) -> Tensor:
            return torch.from_numpy(np.array(x)).to(action.device)

        variable, fixed = tensor(timestep.observation.grid).flatten(1, 2).unbind(-1)
        self.grid.copy_(fixed | (variable & BOX))
        self.agent.copy_((variable == AGENT).int().argmax(1))
        self.steps.copy_(tensor(timestep.observation.step_count))
        reward = tensor(timestep.reward)
        self.total.add_(reward)
        return reward, tensor(timestep.last()), tensor(timestep.extras['solved'])


# ----------------------------------------------------------------------------- evaluation
#
# A policy has three methods, like convlstm.Agent:
#
#     weights = policy.prepare()                 # once per batch of levels
#     state = policy.init_state(N)               # the state of N boards before their first step
#     logits, value, state = policy.act(weights, obs, start, state)
#
# with obs (N, 10, 10, 2) uint8, start (N,) bool, true where an episode starts, and logits (N, 4).


def sample_actions(logits: Tensor, random: Tensor) -> Tensor:
    """Sample actions (B,) from logits (B, 4) by inversion. random: (B,), from random_bits()."""
    u = (random >> 29).to(torch.float32) / 2**24  # 24 of the 53 bits: exact in fp32, below 1
    return (u[:, None] >= F.softmax(logits.float(), -1).cumsum(-1)[:, :-1]).sum(-1)


@torch.no_grad()
def run_episodes(
    policy: object,
    levels: ndarray,
    device: str,
    seed: int | None = None,
    first_level: int = 0,
    time_limit: int = TIME_LIMIT,
) -> dict[str, Tensor]:
    """Play each of the packed levels (n, 17) once, for at most `time_limit` steps.

    Actions are greedy, or sampled if a seed is given. `first_level` is the number of levels[0] in
    the whole evaluation, so that ranks that share the levels sample the same actions as one
    process does.

    Returns on the CPU: solved (n,) bool, return and steps (n,) fp32, and actions (n, time_limit)
    int8, 0 after the end of an episode.
    """
    n = len(levels)
    batches = []
    is_due = every()
    for first in range(0, n, EVALUATION_BATCH):
        # the last batch wraps around to a full one, so that every batch has the same shape
        N = min(EVALUATION_BATCH, n)
        played = levels[(first + np.arange(N)) % n]
        env = SokobanEnv(played, N, device=device, order='sequence', time_limit=time_limit)
        keys = None
        if seed is not None:
            keys = board_keys(seed, EVALUATION_STREAM, env.board + first_level + first)
        weights, state = policy.prepare(), policy.init_state(N)
        start = torch.ones(N, dtype=torch.bool, device=device)
        alive = torch.ones(N, dtype=torch.bool, device=device)
        won = torch.zeros(N, dtype=torch.bool, device=device)
        returns = torch.zeros(N, device=device)
        steps = torch.zeros(N, device=device)
        actions = torch.zeros(N, time_limit, dtype=torch.int8, device=device)
        for t in range(time_limit):
            logits, _, state = policy.act(weights, env.observe(), start, state)
            if keys is None:
                action = logits.argmax(-1)
            else:
                action = sample_actions(logits, random_bits(keys, env.steps))
            actions[:, t] = action * alive
            # a board whose episode has ended plays its next one, which does not count
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
    policy: object,
    levels: ndarray,
    device: str,
    seed: int | None = None,
    time_limit: int = TIME_LIMIT,
) -> dict[str, float]:
    """Return the means 'solve_rate', 'return' and 'steps' over all levels. Each rank plays a share
    of them; seed None: greedy actions. time_limit: most steps per level."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    shard = np.array_split(np.arange(len(levels)), world)[rank]
    totals = torch.zeros(3, dtype=torch.float64)  # on the CPU: MPS has no float64
    if len(shard):  # there may be fewer levels than ranks
        results = run_episodes(
            policy, levels[shard], device, seed, int(shard[0]), time_limit=time_limit
        )
        totals = torch.stack([results[k].double().sum() for k in ('solved', 'return', 'steps')])
    if world > 1:
        dist.all_reduce(totals)
    solve_rate, mean_return, mean_steps = (totals / len(levels)).tolist()
    return {'solve_rate': solve_rate, 'return': mean_return, 'steps': mean_steps}


def replay(levels: ndarray, actions: ndarray) -> ndarray:
    """Return the observations (n, T + 1, 10, 10, 2) before, between and after actions (n, T).

    No board is reset: the last observation of an episode shows its end.
    """
    env = SokobanEnv(levels, len(levels), order='sequence')
    boards = [env.observe().numpy()]
    for action in actions.T:
        env.move(torch.from_numpy(action.astype(np.int64)))
        boards.append(env.observe().numpy())
    return np.stack(boards, 1)


def write_evaluation(
    policy: object,
    levels: ndarray,
    name: str,
    device: str,
    folder: str,
    about: dict,
    time_limit: int = TIME_LIMIT,
) -> dict:
    """Evaluate a policy greedily in this process, and write and return the record of it.

    Writes folder/eval_NAME.json, which starts with the entries of `about`, and two GIFs: the
    longest episode that was solved and the first that was not. NAME is `name`, a split or the path
    of a file, without folder and extension. time_limit: most steps per level.
    """
    name = f'eval_{os.path.splitext(os.path.basename(name))[0]}'
    results = run_episodes(policy, levels, device, time_limit=time_limit)
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
            i = int((chosen * results['steps']).argmax())  # all failed episodes are equally long
            actions = results['actions'][i : i + 1, : int(results['steps'][i])].numpy()
            save_gif([board_image(board) for board in replay(levels[i : i + 1], actions)[0]], path)
            record |= {f'{label}_level': i, f'{label}_game': path}
    write_json(record, os.path.join(folder, f'{name}.json'))
    return record


class StatelessPolicy:
    """A policy without state: a function from observations (N, 10, 10, 2) to logits (N, 4)."""

    def __init__(self, logits: Callable[[Tensor], Tensor]):
        self.logits = logits

    def prepare(self) -> tuple:
        return ()

    def init_state(self, N: int) -> tuple:
        return ()

    def act(self, weights: tuple, obs: Tensor, start: Tensor, state: tuple) -> tuple:
        return self.logits(obs), None, state


# equal logits: a random policy if its actions are sampled
RANDOM = StatelessPolicy(lambda obs: torch.zeros(len(obs), 4, device=obs.device))


def load_policy(name: str) -> StatelessPolicy:
    """Return the policy of `module:function`, a function from observations (N, 10, 10, 2) uint8 to
    actions (N,), both numpy arrays.

    Ends the script if there is no such function, or later if it returns anything but N actions from
    0 to 3.
    """
    module, _, function = name.partition(':')
    sys.path.append(os.getcwd())
    try:
        choose_actions = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise Mistake(f'policy = {name!r}: expected module:function ({first_line(error)})')

    def logits(obs: Tensor) -> Tensor:
        actions = np.asarray(choose_actions(obs.cpu().numpy()))
        if actions.shape != (len(obs),) or not np.isin(actions, range(4)).all():
            found = f'{actions.ravel()[:3]}, shape {actions.shape}'
            raise Mistake(
                f'policy = {name!r}: expected {len(obs)} actions from 0 to 3, found {found}'
            )
        return F.one_hot(torch.from_numpy(actions.astype(np.int64)), 4).to(obs.device)

    return StatelessPolicy(logits)


class FeatureRecorder:
    """Several agents (convlstm.Agent) as one policy: all see the same boards, the first one acts.

    `features` collects s[L] at every step, the agents' channels side by side: (N, 10, 10, C) fp16.
    """

    def __init__(self, *agents: object):
        self.agents = agents
        self.features = []

    def prepare(self) -> list:
        return [agent.prepare() for agent in self.agents]

    def init_state(self, N: int) -> list:
        return [agent.init_state(N) for agent in self.agents]

    def act(self, weights: list, obs: Tensor, start: Tensor, states: list) -> tuple:
        outputs = [
            agent.encode_and_step(w, obs, start, state)
            for agent, w, state in zip(self.agents, weights, states, strict=True)
        ]
        features = [s for s, _ in outputs]
        self.features.append(torch.cat(features, -1).to(torch.float16).cpu())
        return self.agents[0].head(features[0])[0], None, [state for _, state in outputs]


# ----------------------------------------------------------------------------- for Gymnasium
#
#     env = gymnasium.make('sokoban:ParallelExperts/Sokoban-v0', n_boxes=1)
#     envs = gymnasium.make_vec('sokoban:ParallelExperts/Sokoban-v0', num_envs=64)
#
# levels: packed levels (n, 17); without them n_levels are generated, with n_boxes and max_moves.
# The end of an episode is a termination, at the time limit too, as in Jumanji; infos have `solved`.
# If gymnasium is not installed, SokobanEnv still works.


try:
    import gymnasium
    from gymnasium.vector import AutoresetMode, VectorEnv
    from gymnasium.vector.utils import batch_space
except ImportError:
    gymnasium = None


class GymVectorEnv(VectorEnv if gymnasium else object):
    """num_envs boards of one SokobanEnv as a Gymnasium vector environment.

    Observations are (10, 10, 2) uint8, as SokobanEnv's, actions 0..3. A board that is done is reset
    in the same step; the last observation of its episode is in infos['final_obs'].
    """

    metadata = {'autoreset_mode': AutoresetMode.SAME_STEP} if gymnasium else {}

    def __init__(
        self,
        num_envs: int = 1,
        levels: ndarray | None = None,
        n_levels: int = 1000,
        n_boxes: int = 4,
        max_moves: int = TIME_LIMIT,
    ):
        need_packages(gymnasium=True)
        if levels is None:
            levels, _ = generate(n_levels, n_boxes, 0, max_moves)
        self.num_envs = num_envs
        self.boards = SokobanEnv(levels, num_envs)
        spaces = gymnasium.spaces
        self.single_observation_space = spaces.Box(0, BOX, (SIZE, SIZE, 2), np.uint8)
        self.single_action_space = spaces.Discrete(4)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(
        self, *, seed: int | None = None, options: dict | None = None
    ) -> tuple[ndarray, dict]:
        super().reset(seed=seed)
        self.boards.restart(int(self.np_random.integers(1 << 62)))
        return self.boards.observe().numpy(), {}

    def step(self, actions: ndarray) -> tuple[ndarray, ndarray, ndarray, ndarray, dict]:
        reward, done, solved = self.boards.move(torch.as_tensor(actions).long())
        final_obs = self.boards.observe().numpy()
        self.boards.reset(done)
        terminated, truncated = done.numpy(), np.zeros(self.num_envs, bool)
        infos = {'solved': solved.numpy(), 'final_obs': final_obs, '_final_obs': terminated}
        return self.boards.observe().numpy(), reward.numpy(), terminated, truncated, infos


class GymEnv(gymnasium.Env if gymnasium else object):
    """One board as a Gymnasium environment; the keywords are those of GymVectorEnv."""

    metadata = {'render_modes': ['ansi', 'rgb_array'], 'render_fps': 4}

    def __init__(
        self, levels: ndarray | None = None, render_mode: str | None = None, **options: int
    ):
        self.vector = GymVectorEnv(1, levels, **options)
        self.render_mode = render_mode
        self.observation_space = self.vector.single_observation_space
        self.action_space = self.vector.single_action_space

    def reset(
        self, *, seed: int | None = None, options: dict | None = None
    ) -> tuple[ndarray, dict]:
        super().reset(seed=seed)
        (self.board,), infos = self.vector.reset(seed=int(self.np_random.integers(1 << 62)))
        return self.board, infos

    def step(self, action: int) -> tuple[ndarray, float, bool, bool, dict]:
        _, (reward,), (terminated,), _, infos = self.vector.step([int(action)])
        (self.board,) = infos['final_obs']
        info = {'solved': infos['solved'].item()}
        return self.board, reward.item(), terminated.item(), False, info

    def render(self) -> str | ndarray:
        return board_text(self.board) if self.render_mode == 'ansi' else board_image(self.board)


if gymnasium:
    gymnasium.register(
        'ParallelExperts/Sokoban-v0',
        entry_point='sokoban:GymEnv',
        vector_entry_point='sokoban:GymVectorEnv',
    )


# ----------------------------------------------------------------------------- pictures


def observations(levels: ndarray) -> ndarray:
    """Return the observations (N, 10, 10, 2) uint8 of packed levels (N, 17) before any step."""
    return SokobanEnv(levels, len(levels), order='sequence').observe().numpy()


def board_text(board: ndarray) -> str:
    """Return an observation (10, 10, 2) as ten lines of Boxoban's characters."""
    return '\n'.join(bytes(row).decode() for row in CHARS[board[..., 1], board[..., 0]])


COLORS = {
    'floor': (240, 234, 220),
    'mortar': (62, 70, 84),
    'brick': (88, 99, 117),
    'target': (204, 121, 167),
    'box': (222, 170, 98),
    'box edge': (150, 100, 45),
    'box on target': (86, 180, 233),
    'box on target, edge': (0, 85, 140),
    'agent': (45, 105, 185),
    'eye': (255, 255, 255),
}


def draw_tiles(cell: int) -> ndarray:
    """Return pictures (7, cell, cell, 3) uint8 of Boxoban's characters '# .$*@+', drawn at four
    times the size and averaged."""
    v, u = np.mgrid[-1 : 1 : 4j * cell, -1 : 1 : 4j * cell]  # rows, columns
    square, radius = np.maximum(abs(u), abs(v)), np.hypot(u, v)
    cross = (abs(abs(u) - abs(v)) < 0.16) & (square < 0.64)
    bricks = (v % 1 > 0.08) & ((u + (v > 0)) % 2 > 0.08)
    ring = (radius < 0.54) & (radius > 0.34)
    eyes = (abs(u) - 0.27) ** 2 + (v + 0.14) ** 2 < 0.022
    # the shapes of each character, from the bottom to the top
    wall = [(square < 2, 'mortar'), (bricks, 'brick')]
    floor = []
    target = [(ring, 'target'), (radius < 0.17, 'target')]
    box = [(square < 0.82, 'box edge'), (square < 0.64, 'box'), (cross, 'box edge')]
    box_on_target = [
        (square < 0.82, 'box on target, edge'),
        (square < 0.64, 'box on target'),
        (ring | (radius < 0.17), 'box on target, edge'),
    ]
    agent = [(radius < 0.74, 'agent'), (eyes, 'eye')]
    agent_on_target = [*agent, (abs(radius - 0.86) < 0.07, 'target')]
    characters = (wall, floor, target, box, box_on_target, agent, agent_on_target)
    pictures = np.full((7, 4 * cell, 4 * cell, 3), COLORS['floor'], float)
    for picture, shapes in zip(pictures, characters, strict=True):
        for mask, name in shapes:
            picture[mask] = COLORS[name]
    return pictures.reshape(7, cell, 4, cell, 4, 3).mean((2, 4)).round().astype(np.uint8)


def board_image(board: ndarray, cell: int = 24) -> ndarray:
    """Return an RGB picture (10 cell, 10 cell, 3) uint8 of an observation (10, 10, 2)."""
    characters = board_text(board).replace('\n', '')
    tiles = draw_tiles(cell)[['# .$*@+'.index(char) for char in characters]]
    tiles = tiles.reshape(SIZE, SIZE, cell, cell, 3)  # (row, column, y, x, channel)
    return tiles.swapaxes(1, 2).reshape(SIZE * cell, SIZE * cell, 3)


def plan_image(board: ndarray, plan: ndarray, truth: ndarray | None = None) -> ndarray:
    """Return the picture of an observation with the arrows of a plan.

    plan (10, 10): 0..3 for up, right, down, left, -1 for no arrow. The agent's cell gets none.
    truth: the directions that the agent will take, in the same form. Arrows are dark, except that
    those that differ from `truth` are white with an orange rim.
    """
    cell = 24
    picture = board_image(board, cell)
    v, u = np.mgrid[-1 : 1 : 1j * cell, -1 : 1 : 1j * cell]  # rows, columns
    triangle = (abs(u) < 0.5 * v + 0.3) & (abs(v) < 0.5)  # points up
    rim = (abs(u) < 0.5 * v + 0.5) & (abs(v) < 0.62) & ~triangle
    for y, x in np.argwhere((plan >= 0) & (board[..., 0] != AGENT)):
        is_wrong = truth is not None and truth[y, x] != plan[y, x]
        tile = picture[cell * y : cell * (y + 1), cell * x : cell * (x + 1)]
        tile[np.rot90(rim, -plan[y, x])] = (213, 94, 0) if is_wrong else (255, 255, 255)
        tile[np.rot90(triangle, -plan[y, x])] = (255, 255, 255) if is_wrong else (20, 40, 70)
    return picture


def save_gif(frames: list[ndarray], path: str, ms: int = 150) -> None:
    """Write pictures (H, W, 3) as an endless animation, `ms` per frame and 8 * ms for the last. In
    a long game `ms` is smaller, so that the animation lasts at most 655 s."""
    from PIL import Image

    # Pillow shows equal frames as one, whose duration has 16 bits, in units of 10 ms
    ms = min(ms, 10 * 0xFFFF // (len(frames) + 7))

    first, *rest = map(Image.fromarray, frames)
    options = {
        'save_all': True,
        'append_images': rest,
        'duration': [ms] * len(rest) + [8 * ms],
        'loop': 0,
    }
    write_atomic(path, lambda file: first.save(file, format='GIF', **options))


def main() -> None:
    configure(globals(), quiet=True)
    need_packages(PIL=picture != '')
    generator = {'n': n_levels, 'boxes': n_boxes, 'seed': seed, 'max_moves': max_moves}
    levels, source = load_levels(levels_dir, split, download, generator)
    print(source)
    boards = observations(levels[:show])
    for i, board in enumerate(boards):
        print(f'\n; {i}\n{board_text(board)}')
    if picture:
        from PIL import Image

        images = np.stack([board_image(board) for board in boards])  # (n, 240, 240, 3)
        columns = math.ceil(len(images) ** 0.5)
        # pad with white: pictures that complete the last row, and a margin around each
        padding = ((0, -len(images) % columns), (4, 4), (4, 4), (0, 0))
        rows = np.pad(images, padding, constant_values=255).reshape(-1, columns, 248, 248, 3)
        image = Image.fromarray(rows.swapaxes(1, 2).reshape(-1, columns * 248, 3))
        write_atomic(picture, lambda file: image.save(file, format='PNG'))


if __name__ == '__main__':
    run_script(main)

"""Sokoban levels in Boxoban's form: read, pack, download, generate and print them.

$ python levels.py --split=generated --show=3
$ python levels.py --levels_dir=levels --split=unfiltered-valid --download=True # needs a network

A board is an observation of Jumanji's Sokoban-v0, (10, 10, 2) uint8: channel 0 holds the agent (3)
and boxes (4), channel 1 walls (1) and targets (2). Its 100 cells are numbered row by row.

A packed level is 17 bytes (uint8): 8 for the walls of the 8x8 interior, row-major, most significant
bit first (the border is always wall); then 4 target cells, 4 box cells and the agent's cell, as
indices 0..63 into the interior. A level with 1 to 3 boxes has as many targets, and repeats its
first target and its first box. An array of them is saved by `np.save('hard.pack17.npy', levels)`.

Generated levels are split by a hash: one in eight is for evaluation, the others are for training,
whatever the settings of the generator are.

Shape letters: N levels that are processed together, n levels in all.
"""

import glob
import math
import os
import re
import tokenize
import zlib

from configurator import configure
from support.script import UserError, first_line, print0, run_script

import filelock
import numpy as np
from numpy import ndarray
from numpy.random import Generator

from support.export import call_hub
from support.files import read_text, write_atomic
from support.ranks import Throttle
from support.values import BROKEN

# fmt: off
levels_dir = 'data/boxoban' # folder of Boxoban's levels, as text or packed
split = 'unfiltered-train'  # unfiltered-train, -valid or -test, medium-train or -valid, hard;
                            # 'generated'; or a file
download = False            # download a missing split (Hugging Face, 200 bytes per level), and
                            # pack it
n_boxes = 4                 # boxes of a generated level, 1 to 4
max_moves = 120             # most moves of a generated level's solution, at least 6 per box
n_levels = 1000             # number of generated levels
seed = 1337                 # seed of the generator
show = 1                    # levels to print, starting with the first

RANGES = {'show': (1, math.inf)}
# fmt: on

SIZE = 10  # rows and columns of a board
INSIDE = 8  # rows and columns of its interior
CELLS = SIZE * SIZE
DELTA = (-10, 1, 10, -1)  # change of a cell's number by up, right, down, left
INTERIOR = np.arange(CELLS).reshape(SIZE, SIZE)[1:-1, 1:-1].ravel()  # cell 0..99 of index 0..63
WALL, TARGET, AGENT, BOX = 1, 2, 3, 4  # as boards have them
PLAYER = 8  # the agent in a code
# Boxoban's characters and their codes, the sums of WALL, TARGET, BOX and PLAYER in a cell
SYMBOLS = {
    ' ': 0,
    '#': WALL,
    '.': TARGET,
    '$': BOX,
    '*': BOX + TARGET,
    '@': PLAYER,
    '+': PLAYER + TARGET,
}
MOST_MOVES = 120  # most moves of a generated level's solution
REVERSE_STEPS = 300  # moves that the generator plays in reverse
GENERATOR_BATCH = 4096  # boards that it plays at once
PART = 50_000  # levels that are checked at once: those of a whole file would be large
HUB = 'InstaDeepAI/boxoban-levels'
BROKEN_ARRAY = (*BROKEN, OSError, EOFError, tokenize.TokenError)  # what np.load raises


# ---- forms of a level ----


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


def unpack(levels: ndarray) -> ndarray:
    """Return the codes (N, 100) uint8 of packed levels (N, 17), as SYMBOLS has them."""
    # an index beyond 63 stands for cell 0, a wall, so that pack_codes refuses the level
    cells = np.pad(INTERIOR, (0, 192))[levels[:, 8:]]  # (N, 9)
    rows = np.arange(len(levels))[:, None]
    codes = np.full((len(levels), CELLS), WALL, np.uint8)
    codes[:, INTERIOR] = np.unpackbits(levels[:, :8], axis=1)
    codes[rows, cells[:, :4]] |= TARGET
    codes[rows, cells[:, 4:8]] |= BOX
    codes[rows, cells[:, 8:]] |= PLAYER
    return codes


def observations(levels: ndarray) -> ndarray:
    """Return the boards (N, 10, 10, 2) uint8 of packed levels (N, 17)."""
    codes = unpack(levels)
    variable = np.where(codes & PLAYER, AGENT, codes & BOX)
    boards = np.stack([variable, codes & (WALL | TARGET)], -1)
    return boards.astype(np.uint8).reshape(-1, SIZE, SIZE, 2)


def codes_of(boards: ndarray) -> ndarray:
    """Return the codes (N, 100) of boards (N, 10, 10, 2); those of a board that is no level are not
    all in SYMBOLS. Further channels, of an edit, are ignored."""
    variable, fixed = np.moveaxis(boards[..., :2].reshape(-1, CELLS, 2), -1, 0)
    return np.where(variable == AGENT, PLAYER, variable) | fixed


def board_text(board: ndarray) -> str:
    """Return a board (10, 10, 2) as ten lines of Boxoban's characters."""
    characters = {code: character for character, code in SYMBOLS.items()}
    rows = codes_of(board).reshape(SIZE, SIZE)
    return '\n'.join(''.join(characters[code] for code in row) for row in rows.tolist())


def pack_codes(codes: ndarray, path: str, first: int = 0) -> ndarray:
    """Return packed levels (N, 17) from codes (N, 100).

    Raises UserError for a board that is no level. The message names the path and the number of the
    level; `first` is the number of codes[0].
    """
    masks = [codes & bit > 0 for bit in (WALL, TARGET, BOX, PLAYER)]
    n_walls, n_targets, n_boxes, n_agents = (mask.sum(1) for mask in masks)
    wall, target, box, agent = (mask[:, INTERIOR] for mask in masks)
    problems = {  # text: which boards have the problem, (N,) bool
        'has a character that is none of # .$@*+': ~np.isin(codes, [*SYMBOLS.values()]).all(1),
        'is not walled in': n_walls - wall.sum(1) != CELLS - INSIDE**2,
        'does not have exactly one agent': n_agents != 1,
        'does not have 1 to 4 boxes': (n_boxes < 1) | (n_boxes > 4),
        'does not have as many targets as boxes': n_targets != n_boxes,
        'is solved already: all its boxes are on targets': ~(codes == BOX).any(1),
    }
    for problem, found in problems.items():
        if found.any():
            raise UserError(f'{path}: level {first + int(found.argmax())} {problem}')
    return pack(wall, target, box, agent.argmax(1))


def check_levels(levels: ndarray, source: str) -> ndarray:
    """Return packed levels (n, 17) with their boxes and targets in order. Raises UserError, naming
    the source and the level, for anything else."""
    if not levels.size or (levels.dtype, levels.shape[1:]) != (np.uint8, (17,)):
        expected = 'expected uint8 of shape (N, 17)'
        raise UserError(f'{source}: {expected}, found {levels.dtype} of shape {levels.shape}')
    firsts = range(0, len(levels), PART)
    return np.concatenate([pack_codes(unpack(levels[i : i + PART]), source, i) for i in firsts])


def pack_boards(boards: ndarray, source: str) -> ndarray:
    """Return packed levels (n, 17) of boards (n, 10, 10, 2) with either channel first. Raises
    UserError, naming the source and the level, for anything else."""
    if not boards.size or boards.dtype.kind not in 'iu' or boards.shape[1:] != (SIZE, SIZE, 2):
        expected = 'expected integers of shape (N, 10, 10, 2)'
        raise UserError(f'{source}: {expected}, found {boards.dtype} of shape {boards.shape}')
    if boards[0, 0, 0, 0] == WALL:  # the corner: channel 1 comes first
        boards = boards[..., ::-1]
    firsts = range(0, len(boards), PART)
    return np.concatenate([pack_codes(codes_of(boards[i : i + PART]), source, i) for i in firsts])


# ---- files ----


def parse_text(text: str, path: str) -> ndarray:
    """Return packed levels (N, 17) from Boxoban's text.

    Each level is a line `; index`, ten rows of ten characters and a blank line. Blanks at the ends
    of lines mean nothing. Raises UserError, naming the path and the level, for anything else.
    """
    head, *blocks = ('\n' + text).split('\n;')
    if head.strip() or not blocks:
        raise UserError(f'{path}: level 0 does not start with a line "; index"')
    characters = ''
    for index, block in enumerate(blocks):
        rows = [row for row in map(str.rstrip, block.split('\n')[1:]) if row]
        if [len(row) for row in rows] != [SIZE] * SIZE:
            raise UserError(f'{path}: level {index} is not ten rows of ten characters')
        characters += ''.join(rows)
    codes = np.full(256, 255, np.uint8)  # by ASCII code
    codes[[ord(character) for character in SYMBOLS]] = list(SYMBOLS.values())
    cells = codes[np.frombuffer(characters.encode('ascii', 'replace'), np.uint8)]
    return pack_codes(cells.reshape(-1, CELLS), path)


def read_array(path: str) -> ndarray:
    """Return the array in a .npy file. Raises UserError if the file is damaged."""
    try:
        # mapped, so that a damaged header allocates nothing
        return np.asarray(np.load(path, mmap_mode='r'))
    except BROKEN_ARRAY as error:
        raise UserError(f'{path}: cannot be read as a .npy file ({first_line(error)})') from None


def read_file(path: str) -> ndarray:
    """Return the packed levels (N, 17) of a file: Boxoban's text or, in a .npy file, packed levels.
    Raises UserError if the file is damaged or holds a board that is no level."""
    if path.endswith('.npy'):
        return check_levels(read_array(path), path)
    return parse_text(read_text(path), path)


def split_files(folder: str, split: str) -> list[str]:
    """Return the files of a split, [] if there are none.

    These are SPLIT.pack17.npy; or else text: SPLIT.txt and numbered files such as SPLIT_000.txt,
    also with _ for -; or else the files in Boxoban's own tree, such as unfiltered/test/*.txt.
    """
    text = split.replace('-', '[-_]')
    tree = split.replace('-', os.sep)
    for patterns in (
        [f'{split}.pack17.npy'],
        [f'{text}.txt', f'{text}[-_][0-9]*.txt'],
        [f'{tree}{os.sep}*.txt'],
    ):
        found = [path for x in patterns for path in glob.glob(x, root_dir=folder)]
        if found:
            return [os.path.join(folder, path) for path in sorted(found)]
    return []


def download_split(folder: str, split: str) -> None:
    """Download Jumanji's copy of a split, an array of boards, and write it as SPLIT.pack17.npy."""
    name = f'{split}.npy'
    print(f'downloading {name} of {HUB}', flush=True)
    call_hub('hf_hub_download', HUB, name, local_dir=folder)
    path = os.path.join(folder, name)
    levels = pack_boards(read_array(path), path)
    write_atomic(os.path.join(folder, f'{split}.pack17.npy'), lambda file: np.save(file, levels))
    os.unlink(path)


def load_levels(levels_dir: str, split: str, download: bool = False) -> tuple[ndarray, str]:
    """Return all packed levels (N, 17) of a split or a file, and a line that describes them. Print
    a warning if some are there twice.

    The files of a split are in levels_dir ('': data/boxoban); `download`: if there are none,
    Jumanji's copy of Boxoban is downloaded into it. (Jumanji 1.1.2 replaces the last level of each
    of Boxoban's text files by the one before, and its copy may have been made that way: prefer the
    text files where you have them, and delete SPLIT.pack17.npy, which is read first.) Raises
    UserError if there are no levels, or if a file is damaged."""
    folder = levels_dir or os.path.join('data', 'boxoban')
    if os.path.isfile(split):
        paths, source = [split], split
    elif not re.fullmatch(r'\w+(-\w+)*', split):
        raise UserError(f'{split!r}: no such file; a split has a name such as unfiltered-train')
    else:
        if download and not split_files(folder, split):
            os.makedirs(folder, exist_ok=True)
            with filelock.FileLock(os.path.join(folder, f'.{split}.lock')):
                if not split_files(folder, split):  # another process may have downloaded it
                    download_split(folder, split)
        paths = split_files(folder, split)
        files = '1 file' if len(paths) == 1 else f'{len(paths)} files'
        source = f'{split} from {files} in {folder}'
    if not paths:
        missing = f'no {split}.pack17.npy, {split}.txt or {split}_000.txt'
        command = f'python levels.py --split={split} --download=True --levels_dir="{folder}"'
        advice = f"`{command}` downloads {split}; the split 'generated' needs no files"
        raise UserError(f'{folder}: {missing}: {advice}')
    levels = np.concatenate([read_file(path) for path in paths])
    warn_of_repeats(levels, f'levels of {source} repeat an earlier one')
    return levels, f'{len(levels):,} levels of {source}'


def warn_of_repeats(levels: ndarray, text: str, known: ndarray | None = None) -> None:
    """Print a warning with the numbers of the levels that are among the `known` levels or, without
    them, among the levels before. text: what is wrong with them."""
    seen = set() if known is None else set(map(bytes, known))
    found = []
    for i, level in enumerate(map(bytes, levels)):
        if level in seen:
            found.append(i)
        elif known is None:
            seen.add(level)
    if found:
        numbers = ', '.join(map(str, found[:10])) + ', ...' * (len(found) > 10)
        print0(f'warning: {len(found):,} of {len(levels):,} {text}: numbers {numbers}')


# ---- levels by settings ----


def select_levels(settings: dict, evaluation: bool = False) -> tuple[ndarray, str]:
    """Return the packed levels (N, 17) that train_sokoban.py's settings ask for, and a line that
    describes them: all levels of `split`; or, for an evaluation, the first `eval_games` of
    `eval_split`. Raises UserError if there are none."""
    split = settings['eval_split' if evaluation else 'split']
    n = settings['eval_games' if evaluation else 'n_levels']
    if split == 'generated':
        boxes, moves, seed = (settings[name] for name in ('n_boxes', 'max_moves', 'seed'))
        levels, _ = generate(n, boxes, seed, moves, evaluation)
        sizes = f'boxes: {boxes}, moves: at most {moves}, seed: {seed}'
        return levels, f'{n:,} generated levels, {sizes}'
    levels, line = load_levels(settings['levels_dir'], split, settings['download'])
    if evaluation and n < len(levels):
        return levels[:n], f'the first {n:,} of {line}'
    return levels, line


def load_level_sets(settings: dict) -> tuple[tuple[ndarray, str], tuple[ndarray, str]]:
    """Return the training and the evaluation levels for train_sokoban.py's settings, each as
    select_levels returns them. If levels are in both sets, which those of the generator never are,
    print a warning with their numbers."""
    training, evaluation = select_levels(settings), select_levels(settings, evaluation=True)
    names = f'(eval_split = {settings["eval_split"]!r}) are among the training levels'
    text = f'evaluation levels {names} (split = {settings["split"]!r})'
    warn_of_repeats(evaluation[0], text, known=training[0])
    return training, evaluation


# ---- the generator ----


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
    floor, target = floor.ravel(), target.ravel()
    box = target.copy()
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
        first, second = directions[:, t]
        step = delta[second]
        pulls_off = floor[at + step] & ~box[at + step] & box[at - step] & target[at - step]
        direction = np.where(pulls_off, second, first)
        step = delta[direction]
        moves = floor[at + step] & ~box[at + step]
        may_pull = u[t] < np.where(target[at], 0.1, 0.95)  # rarely onto a target
        pulls = np.flatnonzero(moves & box[at - step] & may_pull)
        new, old = at[pulls], (at - step)[pulls]
        box[old], box[new] = False, True
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
    max_moves: int = MOST_MOVES,
    evaluation: bool = False,
) -> tuple[ndarray, list[ndarray]]:
    """Generate n levels by reverse play and return them packed (n, 17), with a solution (int8) of
    at most max_moves actions each.

    A level is for evaluation if its hash is a multiple of 8, otherwise for training, so that no
    level is ever in both sets. No box and no agent starts on a target. The result depends on the
    arguments alone; with a larger n it starts with the same levels. Raises UserError if an argument
    is out of range.
    """
    for name, value, least, most in (
        ('eval_games' if evaluation else 'n_levels', n, 1, math.inf),
        ('n_boxes', boxes, 1, 4),
        ('max_moves', max_moves, 6 * boxes, MOST_MOVES),  # with fewer hardly any level is found
        ('seed', seed, 0, math.inf),
    ):
        if not least <= value <= most:
            limits = f'at least {least}' if most == math.inf else f'between {least} and {most}'
            raise UserError(f'{name} = {value}: must be {limits}')
    rng = np.random.default_rng(seed)
    is_due = Throttle()
    levels, solutions = [], []
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
            if (zlib.crc32(level) % 8 == 0) == evaluation:
                actions = remove_loops(undo[:, i], states[:, i])
                # levels that need fewer than 3 actions per box are too easy
                if 3 * boxes <= len(actions) <= max_moves:
                    levels.append(level)
                    solutions.append(actions)
        if is_due():
            print0(f'    {min(len(levels), n):,} of {n:,} levels generated')
    return np.stack(levels[:n]), solutions[:n]


# ---- pictures ----

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


# ---- script ----


def main() -> None:
    """Print the source of the levels, and the first of them."""
    levels, line = select_levels(configure(globals(), quiet=True))
    print(line)
    for i, board in enumerate(observations(levels[:show])):
        print(f'\n; {i}\n{board_text(board)}')


if __name__ == '__main__':
    run_script(main)

"""Sokoban levels in Boxoban's form: read, pack, download, generate and print them.

$ python boxoban.py --split=generated --show=3
$ python boxoban.py --levels_dir=levels --split=unfiltered-valid --download=True # needs a network

A board is an observation of Jumanji's Sokoban-v0, (10, 10, 2) uint8: channel 0 holds the agent (3)
and boxes (4), channel 1 walls (1) and targets (2). Its 100 cells are numbered row by row.

A packed level is 17 bytes (uint8): 8 for the walls of the 8x8 interior, row-major, most significant
bit first (the border is always wall); then 4 target cells, 4 box cells and the agent's cell, as
indices 0..63 into the interior. A level with 1 to 3 boxes has as many targets, and repeats its
first target and its first box.

Generated levels are split by a hash: one in eight is for evaluation, the others are for training,
whatever the settings of the generator are.

Shape letters: N levels that are processed together, n levels in all.
"""

import glob
import math
import os
import re
import shlex
import tokenize
import zlib

from configurator import BROKEN, Mistake, configure, first_line, run_script

import numpy as np
from numpy import ndarray
from numpy.random import Generator

from common import every, print0
from files import read_json, write_atomic
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

RANGES = {'show': (1, math.inf)}
# fmt: on

SIZE = 10  # rows and columns of a board
INSIDE = 8  # rows and columns of its interior
CELLS = SIZE * SIZE
DELTA = (-10, 1, 10, -1)  # change of a cell's number by up, right, down, left
INTERIOR = np.arange(CELLS).reshape(SIZE, SIZE)[1:-1, 1:-1].ravel()  # cell 0..99 of index 0..63
WALL, TARGET, AGENT, BOX = 1, 2, 3, 4
# Boxoban's characters, and what channels 0 and 1 hold in their cells
SYMBOLS = {
    ' ': (0, 0),
    '#': (0, WALL),
    '.': (0, TARGET),
    '$': (BOX, 0),
    '*': (BOX, TARGET),
    '@': (AGENT, 0),
    '+': (AGENT, TARGET),
}
MOST_MOVES = 120  # most moves of a generated level's solution
REVERSE_STEPS = 300  # moves that the generator plays in reverse
GENERATOR_BATCH = 4096  # boards that it plays at once
PART = 50_000  # levels that are checked at once: those of a whole file would be large
HUB = 'InstaDeepAI/boxoban-levels'
BROKEN_ARRAY = (*BROKEN, OSError, EOFError, tokenize.TokenError)  # what np.load raises


# ----------------------------------------------------------------------------- forms of a level


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


def observations(levels: ndarray) -> ndarray:
    """Return the boards (N, 10, 10, 2) uint8 of packed levels (N, 17)."""
    grid, agent = unpack(levels)
    variable = grid & BOX
    variable[np.arange(len(levels)), agent] = AGENT
    return np.stack([variable, grid & (WALL | TARGET)], -1).reshape(-1, SIZE, SIZE, 2)


def board_text(board: ndarray) -> str:
    """Return a board (10, 10, 2) as ten lines of Boxoban's characters."""
    characters = {codes: character for character, codes in SYMBOLS.items()}
    return '\n'.join(''.join(characters[tuple(cell)] for cell in row) for row in board.tolist())


def pack_boards(boards: ndarray, path: str, first: int = 0) -> ndarray:
    """Return packed levels (N, 17) from boards (N, 10, 10, 2) of any integer type.

    Raises Mistake for a board that is no level. The message names the path and the number of the
    level; `first` is the number of boards[0].
    """
    variable, fixed = np.moveaxis(boards, -1, 0)
    wall, target, box, agent = fixed == WALL, fixed == TARGET, variable == BOX, variable == AGENT
    known = np.any([(variable == v) & (fixed == f) for v, f in SYMBOLS.values()], 0)
    n_targets, n_boxes, n_agents = (mask.sum((1, 2)) for mask in (target, box, agent))
    open_border = ~wall
    open_border[:, 1:-1, 1:-1] = False
    problems = {  # text: which boards have the problem, (N,) bool
        'has a character that is none of # .$@*+': ~known.all((1, 2)),
        'is not walled in': open_border.any((1, 2)),
        'does not have exactly one agent': n_agents != 1,
        'does not have 1 to 4 boxes': (n_boxes < 1) | (n_boxes > 4),
        'does not have as many targets as boxes': n_targets != n_boxes,
        'is solved already: all its boxes are on targets': ~(box & ~target).any((1, 2)),
    }
    for problem, found in problems.items():
        if found.any():
            raise Mistake(f'{path}: level {first + int(found.argmax())} {problem}')
    inside = [mask[:, 1:-1, 1:-1].reshape(-1, INSIDE**2) for mask in (wall, target, box, agent)]
    return pack(*inside[:3], inside[3].argmax(1))


def check_levels(levels: ndarray, source: str) -> ndarray:
    """Return packed levels (n, 17) with their boxes and targets in order. Raises Mistake, naming
    the source, if the array has another form or holds a board that is no level."""
    if levels.dtype != np.uint8 or levels.shape[1:] != (17,) or len(levels) == 0:
        found = f'{levels.dtype} of shape {levels.shape}'
        raise Mistake(f'{source}: expected uint8 of shape (N, 17), found {found}')
    if levels[:, 8:].max() >= INSIDE**2:
        raise Mistake(f'{source}: a cell of a packed level is not in 0..63')
    starts = range(0, len(levels), PART)
    return np.concatenate(
        [pack_boards(observations(levels[i : i + PART]), source, first=i) for i in starts]
    )


# ----------------------------------------------------------------------------- files


def parse_text(text: str, path: str) -> ndarray:
    """Return packed levels (N, 17) from Boxoban's text.

    Each level is a line `; index`, ten rows of ten characters and a blank line. Raises Mistake,
    naming the path and the level, for anything else.
    """
    head, *blocks = ('\n' + text).split('\n;')
    if head.strip() or not blocks:
        raise Mistake(f'{path}: level 0 does not start with a line "; index"')
    characters = ''
    for index, block in enumerate(blocks):
        rows = [row for row in block.split('\n')[1:] if row]
        if [len(row) for row in rows] != [SIZE] * SIZE:
            raise Mistake(f'{path}: level {index} is not ten rows of ten characters')
        characters += ''.join(rows)
    codes = np.full((256, 2), 255, np.uint8)  # by ASCII code
    for character, pair in SYMBOLS.items():
        codes[ord(character)] = pair
    boards = codes[np.frombuffer(characters.encode('ascii', 'replace'), np.uint8)]
    return pack_boards(boards.reshape(-1, SIZE, SIZE, 2), path)


def read_array(path: str) -> ndarray:
    """Return the array of a .npy file. Raises Mistake if it cannot be read.

    The file is mapped into memory, so that a damaged header allocates nothing.
    """
    try:
        return np.asarray(np.load(path, mmap_mode='r', allow_pickle=False))
    except BROKEN_ARRAY as error:
        raise Mistake(f'{path}: cannot be read as a .npy file ({first_line(error)})') from None


def read_file(path: str) -> ndarray:
    """Return the packed levels (N, 17) of a text file, with or without a byte order mark, or of an
    array of packed levels.

    Raises Mistake if the file is damaged or holds a board that is no level.
    """
    if not path.endswith('.npy'):
        with open(path, encoding='utf-8-sig', errors='replace') as file:
            text = file.read()
        if '\0' in text:
            raise Mistake(f'{path}: is UTF-16, or no text: save it as UTF-8')
        return parse_text(text, path)
    return check_levels(read_array(path), path)


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
    boards = read_array(call_hub('hf_hub_download', HUB, f'{split}.npy', revision=revision))
    if boards.shape[1:] != (SIZE, SIZE, 2) or boards.dtype.kind not in 'iu' or len(boards) == 0:
        found = f'{boards.dtype} of shape {boards.shape}'
        raise Mistake(f'{path}: expected integers of shape (N, 10, 10, 2), found {found}')
    if boards[0, 0, 0, 0] == WALL:  # the corner: some files hold channel 1 first
        boards = boards[..., ::-1]
    starts = range(0, len(boards), PART)
    packed = np.concatenate([pack_boards(boards[i : i + PART], path, first=i) for i in starts])
    write_atomic(f'{folder}/{split}.pack17.npy', lambda file: np.save(file, packed))


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
    return find(f'{name}.pack17.npy') or texts or find(os.path.join(*name.split('-'), '*.txt'))


def load_levels(levels_dir: str, split: str, download: bool = False) -> tuple[ndarray, str]:
    """Return all packed levels (N, 17) of a split or a file, and a line that describes them.

    The files of a split are in levels_dir ('': data/boxoban); `download`: if there are none, they
    are downloaded into it. Raises Mistake if there are no levels, or if a file is damaged.
    """
    if os.path.isfile(split):
        levels = read_file(split)
        return levels, f'{len(levels):,} levels of {split}'
    if not split.strip('-') or os.sep in split or split.endswith(('.txt', '.npy')):
        raise Mistake(f'{split!r}: no such file; a split has a name such as unfiltered-train')
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
        options = [f'--split={split}', '--download=True', f'--levels_dir={folder}']
        command = shlex.join(['python', 'boxoban.py', *options])
        advice = f"`{command}` downloads {split}; the split 'generated' needs no files"
        raise Mistake(f'{folder}: {missing}: {advice}')
    levels = np.concatenate([read_file(path) for path in paths])
    files = f'{len(paths)} file{"s" * (len(paths) > 1)}'
    return levels, f'{len(levels):,} levels of {split} from {files} in {folder}{source}'


# ----------------------------------------------------------------------------- levels by settings


def select_levels(settings: dict, evaluation: bool = False) -> tuple[ndarray, str]:
    """Return the packed levels (N, 17) that train_sokoban.py's settings ask for, and a line that
    describes them: all levels of `split`; or, for an evaluation, the first `eval_games` of
    `eval_split`. Raises Mistake if there are none."""
    split = settings['eval_split' if evaluation else 'split']
    if split == 'generated':
        n = settings['eval_games' if evaluation else 'n_levels']
        boxes, moves, seed = (settings[name] for name in ('n_boxes', 'max_moves', 'seed'))
        levels, _ = generate(n, boxes, seed, moves, evaluation)
        sizes = f'boxes: {boxes}, moves: at most {moves}, seed: {seed}'
        return levels, f'{n:,} generated levels, {sizes}'
    levels, line = load_levels(settings['levels_dir'], split, settings['download'])
    if evaluation and (n := settings['eval_games']) < len(levels):
        return levels[:n], f'the first {n:,} of {line}'
    return levels, line


def load_level_sets(settings: dict) -> tuple[tuple[ndarray, str], tuple[ndarray, str]]:
    """Return the training and the evaluation levels for train_sokoban.py's settings, each as
    select_levels returns them. If levels are in both sets, which those of the generator never are,
    print a warning with their numbers."""
    training, evaluation = select_levels(settings), select_levels(settings, evaluation=True)
    trained = set(map(bytes, training[0]))
    shared = [str(i) for i, level in enumerate(evaluation[0]) if bytes(level) in trained]
    if shared:
        numbers = ', '.join(shared[:10]) + ', ...' * (len(shared) > 10)
        print0(
            f'warning: {len(shared):,} of {len(evaluation[0]):,} evaluation levels (eval_split = '
            f'{settings["eval_split"]!r}) are among the training levels (split = '
            f'{settings["split"]!r}): numbers {numbers}'
        )
    return training, evaluation


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
    max_moves: int = MOST_MOVES,
    evaluation: bool = False,
) -> tuple[ndarray, list[ndarray]]:
    """Generate n levels by reverse play and return them packed (n, 17), with a solution (int8) of
    at most max_moves actions each.

    A level is for evaluation if its hash is a multiple of 8, otherwise for training, so that no
    level is ever in both sets. No box and no agent starts on a target. The result depends on the
    arguments alone; with a larger n it starts with the same levels. Raises Mistake if an argument
    is out of range.
    """
    n_name, low = 'eval_games' if evaluation else 'n_levels', 6 * boxes
    conditions = {
        f'{n_name} = {n}: must be at least 1': n >= 1,
        f'n_boxes = {boxes}: must be between 1 and 4': 1 <= boxes <= 4,
        f'seed = {seed}: must be at least 0': seed >= 0,
        # with fewer than 6 moves per box hardly any level is found
        f'max_moves = {max_moves}: must be between {low} and {MOST_MOVES} for n_boxes = {boxes}': (
            low <= max_moves <= MOST_MOVES
        ),
    }
    for condition, is_met in conditions.items():
        if not is_met:
            raise Mistake(condition)
    rng = np.random.default_rng(seed)
    is_due = every()
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
            print0(f'    {len(levels):,} of {n:,} levels generated')
    return np.stack(levels[:n]), solutions[:n]


def main() -> None:
    """Print the source of the levels, and the first of them."""
    levels, line = select_levels(configure(globals(), quiet=True))
    print(line)
    for i, board in enumerate(observations(levels[:show])):
        print(f'\n; {i}\n{board_text(board)}')


if __name__ == '__main__':
    run_script(main)

"""
Sokoban: levels, the environment, pictures.

$ python sokoban.py --split=generated --show=3                 # as text
$ python sokoban.py --levels_dir=levels --split=unfiltered-test --show=12 --picture=levels.png
$ python sokoban.py --levels_dir=levels --split=unfiltered-valid --download=True           # needs a network

Levels are kept packed, 17 bytes each (uint8): 8 bytes for the walls of the 8x8 interior, row-major, most significant bit first (the
border is always wall); then 4 target, 4 box and 1 agent cell, each an index 0..63 into the interior. There are 1 to 4 boxes, and as
many targets; a level with fewer than 4 repeats its first target and box.

The environment has the rules of Jumanji's Sokoban-v0 (10x10, actions up, right, down, left; a blocked move costs a step like any
other; reward -0.1 a step, +1 for a box pushed onto a target, -1 for one pushed off, +10 when all are on; an episode ends when solved
or after 120 steps, both times for good: no bootstrap). `SokobanEnv` plays N boards at once with tensor operations alone, in place and
without waiting for the device, so that a rollout can be captured in a CUDA graph. `JumanjiEnv` drives Jumanji itself, same interface.

Shape letters: N boards, Y = X = 10 rows and columns; cells are numbered row-major, 0..99.
"""

import glob
import math
import os
import shlex
import tokenize

from configurator import (
    configure,
    every,
    fail,
    first_line,
    run_script,
    write_atomic,
)  # before torch: how threads wait, what ctrl-C does

import numpy as np
import torch
from numpy.typing import ArrayLike

from checkpoint import check_fits, fill

# -----------------------------------------------------------------------------
# fmt: off
levels_dir = ''                # folder of Boxoban text files or .pack17.npy arrays; '': data/boxoban
split = 'unfiltered-train'     # which levels: unfiltered-train, -valid or -test, medium-train or -valid, hard; 'generated'; or a file
download = False               # fetch the split into the folder where it is not there (Hugging Face, about 200 bytes a level)
n_boxes = 4                    # of generated levels, 1 to 4
max_moves = 120                # of their known solutions, 6 a box or more
n_levels = 1000                # to generate
seed = 1337                    # of the generator
show = 1                       # levels to print, from the first on
picture = ''                   # a PNG file for them
# fmt: on
# -----------------------------------------------------------------------------

SIZE, INSIDE, CELLS = 10, 8, 100
DELTA = (-10, 1, 10, -1)  # of the agent's cell, for up, right, down, left
TIME_LIMIT = 120
WALL, TARGET, AGENT, BOX = (
    1,
    2,
    3,
    4,
)  # Jumanji's codes: walls and targets in the fixed grid, agent and boxes in the variable one
LEVEL_BYTES = 300  # a generated level, at the least: packed, unpacked, its solution, Python's objects for both
HUB = 'InstaDeepAI/boxoban-levels'
CHARS = (
    np.array([list(row) for row in (' ??@$?', '#?????', '.??+*?', '??????')])
    .astype('S1')
    .view(np.uint8)
)  # [fixed, variable] -> ASCII
PATHS = np.clip(
    np.arange(CELLS)[:, None, None] + np.array(DELTA)[:, None] * np.arange(3), 0, CELLS - 1
)  # [cell, action]: it, the next two
INTERIOR = (
    np.arange(INSIDE)[:, None] * SIZE + np.arange(INSIDE) + SIZE + 1
).ravel()  # cell 0..99 of interior cell 0..63


class LevelError(ValueError):
    """Levels that cannot be used: one line that names the file and the level."""


# ----------------------------------------------------------------------------- levels


def pack(wall: np.ndarray, target: np.ndarray, box: np.ndarray, agent: np.ndarray) -> np.ndarray:
    """Boards as masks (N, 64) of the interior, agent (N,) an interior cell -> (N, 17) uint8."""
    out = np.empty((len(wall), 17), np.uint8)
    out[:, :8] = np.packbits(wall, axis=1)
    for first, mask in ((8, target), (12, box)):
        order = np.argsort(~mask, axis=1, kind='stable')[:, :4]  # cells of the mask come first
        filled = np.take_along_axis(mask, order, 1)
        out[:, first : first + 4] = np.where(filled, order, order[:, :1])
    out[:, 16] = agent
    return out


def unpack(levels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(N, 17) uint8 -> grids (N, 100) uint8, sums of WALL, TARGET and BOX, and the agents' cells (N,) int64."""
    grid, rows, cells = (
        np.full((len(levels), CELLS), WALL, np.uint8),
        np.arange(len(levels))[:, None],
        INTERIOR[levels[:, 8:]],
    )
    grid[:, INTERIOR] = np.unpackbits(levels[:, :8], axis=1)
    for code, first in ((TARGET, 0), (BOX, 4)):
        grid[rows, cells[:, first : first + 4]] |= code
    return grid, cells[:, 8].copy()


def check_boards(boards: np.ndarray, where: str, first: int = 0) -> np.ndarray:
    """Boards as ASCII codes (N, 10, 10) uint8 -> packed (N, 17). LevelError names `where` and the level's index, counted from `first`."""
    wall, target, box, agent, known = (
        np.isin(boards, list(codes)) for codes in (b'#', b'.*+', b'$*', b'@+', b'# .$@*+')
    )
    targets, boxes, agents = (mask.sum((1, 2)) for mask in (target, box, agent))
    border = ~wall
    border[:, 1:-1, 1:-1] = False
    for bad, what in (
        (~known.all((1, 2)), 'has a character that is none of # .$@*+'),
        (border.any((1, 2)), 'is not walled in'),
        (agents != 1, 'has not exactly one agent'),
        ((boxes < 1) | (boxes > 4), 'has not 1 to 4 boxes'),
        (targets != boxes, 'has not as many targets as boxes'),
    ):
        if bad.any():
            raise LevelError(f'{where}: level {first + int(bad.argmax())} {what}')
    inner = [mask[:, 1:-1, 1:-1].reshape(-1, 64) for mask in (wall, target, box, agent)]
    return pack(*inner[:3], inner[3].argmax(1))


def parse_text(text: str, where: str) -> np.ndarray:
    """Boxoban's text form: `; index`, ten rows of ten characters, a blank line. -> packed (N, 17)."""
    head, *blocks = ('\n' + text).split('\n;')
    if head.strip() or not blocks:
        raise LevelError(
            f'{where}: level 0 does not start with a line "; index"'
            if head.strip()
            else f'{where}: no level in it'
        )
    boards = []
    for index, block in enumerate(blocks):
        rows = [row for row in block.split('\n')[1:] if row]
        if [len(row) for row in rows] != [SIZE] * SIZE:
            raise LevelError(f'{where}: level {index} is not ten rows of ten characters')
        boards += rows
    return check_boards(
        np.frombuffer(''.join(boards).encode('ascii', 'replace'), np.uint8).reshape(-1, SIZE, SIZE),
        where,
    )


def check_packed(levels: np.ndarray, where: str) -> np.ndarray:
    """The same checks for packed levels."""
    if levels.dtype != np.uint8 or levels.ndim != 2 or levels.shape[1] != 17 or len(levels) == 0:
        raise LevelError(
            f'{where}: expected uint8 of shape (N, 17), found {levels.dtype} of shape {levels.shape}'
        )
    cells = levels[:, 8:].astype(np.int64)
    wall = np.unpackbits(levels[:, :8], axis=1).astype(bool)  # (N, 64)
    for bad, what in (
        ((cells > 63).any(1), 'has a cell beyond 63'),
        (
            np.take_along_axis(wall, cells.clip(max=63), 1).any(1),
            'has a target, a box or the agent in a wall',
        ),
        ((cells[:, 8:] == cells[:, 4:8]).any(1), 'has its agent on a box'),
        (distinct(cells[:, :4]) != distinct(cells[:, 4:8]), 'has not as many targets as boxes'),
    ):
        if bad.any():
            raise LevelError(f'{where}: level {int(bad.argmax())} {what}')
    return levels


def distinct(cells: np.ndarray) -> np.ndarray:
    """(N, 4) -> how many different ones (N,)."""
    return (np.diff(np.sort(cells, 1), axis=1) > 0).sum(1) + 1


def fetch(split: str, folder: str) -> None:
    """Download a split from the Hub (Jumanji's copy of Boxoban) and keep it packed in `folder`, atomically. Jumanji 1.1.2 reads Boxoban's
    text files with the last level of each replaced by the one before, and its copy may have been made so: the text itself is better."""
    try:
        from huggingface_hub import hf_hub_download
    except ImportError:
        raise LevelError(
            'downloading levels needs huggingface_hub: pip install huggingface_hub'
        ) from None
    print(f'downloading {split}.npy of {HUB}', flush=True)
    try:
        path = hf_hub_download(HUB, f'{split}.npy')
    except Exception as error:  # noqa: BLE001  many kinds: the hub client's, the HTTP client's
        raise LevelError(f'cannot download {split}.npy of {HUB}: {first_line(error)}') from None
    grids, where = read_array(path), f'{HUB} {split}.npy'
    if (
        grids.ndim != 4
        or grids.shape[1:] != (SIZE, SIZE, 2)
        or grids.dtype.kind not in 'iu'
        or len(grids) == 0
    ):
        raise LevelError(
            f'{where}: expected integers of shape (N, 10, 10, 2), found {grids.dtype} of shape {grids.shape}'
        )
    channel = (
        0 if grids[0, 0, 0, 0] == WALL else 1
    )  # of the fixed grid, whose corner is wall: on the Hub the first one
    packed = []
    for i in range(0, len(grids), 50_000):  # pieces: the whole file unpacked would be large
        fixed, variable = (
            np.clip(grids[i : i + 50_000, ..., k], -1, limit)
            for k, limit in ((channel, 3), (1 - channel, 5))
        )
        packed.append(check_boards(CHARS[fixed, variable], where, i))
    try:
        os.makedirs(folder, exist_ok=True)
        write_atomic(
            os.path.join(folder, f'{split}.pack17.npy'),
            lambda file: np.save(file, np.concatenate(packed)),
        )
    except OSError as error:
        raise LevelError(f'{folder}: cannot be written ({error.strerror})') from None


def read_array(path: str) -> np.ndarray:
    """A .npy file, mapped, so that a damaged header allocates nothing."""
    try:
        return np.asarray(np.load(path, mmap_mode='r', allow_pickle=False))
    except (
        OSError,
        ValueError,
        EOFError,
        TypeError,
        OverflowError,
        SyntaxError,
        tokenize.TokenError,
        MemoryError,
    ) as error:
        raise LevelError(f'{path}: cannot be read as a .npy file ({first_line(error)})') from None


def read_text(path: str) -> np.ndarray:
    try:
        with open(path, encoding='ascii', errors='replace') as file:
            return parse_text(file.read(), path)
    except OSError as error:
        raise LevelError(f'{path}: cannot be read ({error.strerror})') from None


def read_levels(folder: str, split: str) -> tuple[np.ndarray, list[str]]:
    """All levels of a split in a folder, and the files: SPLIT.pack17.npy; or text files SPLIT*.txt (also with _ for -); or Boxoban's own
    tree of text files. The first of these that is there."""
    packed = os.path.join(folder, f'{split}.pack17.npy')
    if os.path.exists(packed):
        return np.array(check_packed(read_array(packed), packed)), [packed]
    name = glob.escape(split)
    for patterns in (
        (f'{name}*.txt', f'{name.replace("-", "_")}*.txt'),
        (os.path.join(*name.split('-'), '*.txt'),),
    ):
        paths = sorted(
            {
                path
                for pattern in patterns
                for path in glob.glob(os.path.join(glob.escape(folder), pattern))
            }
        )
        if paths:
            return np.concatenate([read_text(path) for path in paths]), paths
    return np.empty((0, 17), np.uint8), []


def load_levels(
    levels_dir: str,
    split: str,
    download: bool = False,
    n_levels: int = 100_000,
    n_boxes: int = 4,
    seed: int = 0,
    max_moves: int = TIME_LIMIT,
    without: np.ndarray | None = None,
) -> tuple[np.ndarray, str]:
    """-> packed levels (N, 17) and a line that says where they are from. split: a file; or 'generated', which leaves out those of `without`
    (N, 17); or the name of a split, which is looked for in levels_dir ('': data/boxoban) and else downloaded into it if `download`.
    LevelError, with the command that fetches them, where there are none, or for malformed ones."""
    if split == 'generated':
        line = f'{n_levels:,} generated levels, boxes: {n_boxes}, moves: at most {max_moves}, seed: {seed}'
        return generate(n_levels, n_boxes, seed, max_moves, without)[0], line
    if os.path.isfile(split):
        levels = (
            np.array(check_packed(read_array(split), split))
            if split.endswith('.npy')
            else read_text(split)
        )
        return levels, f'{len(levels):,} levels of {split}'
    if not split.strip('-') or os.sep in split:
        raise LevelError(
            f'split = {split!r}: expected a file that exists, generated, or a name such as unfiltered-train'
        )
    folder = levels_dir or os.path.join('data', 'boxoban')
    levels, paths = read_levels(folder, split)
    if len(levels):
        return (
            levels,
            f'{len(levels):,} levels of {split} from {len(paths)} file{"s" * (len(paths) > 1)} in {folder}',
        )
    if download:
        fetch(split, folder)
        levels, _ = read_levels(folder, split)
        return levels, f'{len(levels):,} levels of {split} downloaded from {HUB} into {folder}'
    missing = (
        f'neither {split}.pack17.npy nor {split}*.txt in it'
        if os.path.isdir(folder)
        else 'no such folder'
    )
    fetches = shlex.join(
        [
            'python',
            'sokoban.py',
            f'--split={split}',
            '--download=True',
            *([f'--levels_dir={levels_dir}'] if levels_dir else []),
        ]
    )
    raise LevelError(
        f"{folder}: {missing}: `{fetches}` fetches {split}; the name 'generated' instead of it makes levels"
    )


def at_most(n: int, levels: np.ndarray, line: str) -> tuple[np.ndarray, str]:
    """The first n of packed levels, and load_levels' line about them, which then says how many they are."""
    return levels[:n], line if n >= len(levels) else f'the first {n:,} of {line}'


# ----------------------------------------------------------------------------- the generator


def carve(N: int, rng: np.random.Generator) -> np.ndarray:
    """Rooms, connected: a walker of 34 steps clears a random little pattern at each place. -> floor (N, 100) bool."""
    patterns = np.array(
        [[-1, 0, 1], [-10, 0, 10], [0, 1, 10], [0, 10, 11], [0, -1, -10]]
    )  # cells around the walker
    inner, floor, rows = np.zeros(CELLS, bool), np.zeros((N, CELLS), bool), np.arange(N)
    inner[INTERIOR] = True
    cell, way = INTERIOR[rng.integers(0, 64, N)], rng.integers(0, 4, N)
    for _ in range(34):
        turn = rng.random(N) < 0.35
        way = np.where(turn, rng.integers(0, 4, N), way)
        to = cell + np.array(DELTA)[way]
        cell = np.where(inner[to], to, cell)
        for part in patterns[rng.integers(0, 5, N)].T:
            floor[rows, cell + part] = True
    return floor & inner


def reverse_play(
    floor: np.ndarray, target: np.ndarray, agent: np.ndarray, steps: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Play backwards from solved boards: the agent walks at random and mostly pulls the box behind it along. floor, target (N, 100) bool,
    agent (N,) -> box, agent, the forward move that undoes each step (steps, N), and a number for each state met (steps + 1, N): equal for
    equal states, 0 where all boxes are home.

    The opposite move undoes a step exactly: it pushes nothing, or the box that was just pulled, onto the cell that it came from."""
    N, base, delta = len(floor), np.arange(len(floor)) * CELLS, np.array(DELTA)
    home, box, at = (
        target.ravel(),
        target.ravel().copy(),
        base + agent,
    )  # all boards in one row of N * 100 cells
    blocked = ~floor.ravel() | box
    code = rng.integers(
        1, 1 << 60, (2, CELLS)
    )  # a state's number: the sum over its boxes and its agent
    boxes = target @ code[0]
    solved, states, undo = (
        boxes.copy(),
        np.zeros((steps + 1, N), np.int64),
        np.zeros((steps, N), np.int8),
    )
    ways, luck = (
        rng.integers(0, 4, (2, steps, N), dtype=np.uint8),
        rng.random((steps, N), np.float32),
    )
    for t in range(steps):
        step = delta[ways[1, t]]
        frees = (
            ~blocked[at + step] & box[at - step] & home[at - step]
        )  # of two ways one that pulls a box off a target
        way = np.where(frees, ways[1, t], ways[0, t])
        step = delta[way]
        moves = ~blocked[at + step]
        pulls = np.flatnonzero(
            moves & box[at - step] & (luck[t] < np.where(home[at], 0.1, 0.95))
        )  # seldom onto a target
        new, old = at[pulls], (at - step)[pulls]
        box[old], box[new], blocked[old], blocked[new] = False, True, False, True
        boxes[pulls] += code[0, new % CELLS] - code[0, old % CELLS]
        at = np.where(moves, at + step, at)
        states[t + 1] = np.where(boxes == solved, 0, boxes + code[1, at - base])
        undo[t] = (way + 2) % 4
    return box.reshape(N, CELLS), at - base, undo, states


def solution(undo: np.ndarray, states: np.ndarray) -> np.ndarray:
    """One board's reverse play (steps,), (steps + 1,) -> the actions that solve it, without detours: a state is left as it was last."""
    states = states.tolist()
    last, path = dict(zip(states, range(len(states)), strict=True)), []
    t = last[0]
    while t < len(undo):
        path.append(t)
        t = last[states[t + 1]]
    return undo[path[::-1]]


def generate(
    n: int,
    boxes: int = 4,
    seed: int = 0,
    max_moves: int = TIME_LIMIT,
    without: np.ndarray | None = None,
    steps: int = 300,
    batch: int = 4096,
) -> tuple[np.ndarray, list[np.ndarray]]:
    """n levels by reverse play from solved boards, so that each is known to be solvable within max_moves; no box and no agent starts on a
    target, and none is among `without` (N, 17). -> packed (n, 17) and, for each, the actions that solve it (int8). Deterministic in its
    arguments; more levels continue fewer."""
    if not 1 <= boxes <= 4 or n < 1 or seed < 0:
        raise LevelError(
            f'n_boxes = {boxes}, n_levels = {n}, seed = {seed}: expected 1 to 4, at least 1 and at least 0'
        )
    if not 6 * boxes <= max_moves <= TIME_LIMIT:  # fewer moves: hardly any level is found
        raise LevelError(
            f'max_moves = {max_moves}: expected {6 * boxes} to {TIME_LIMIT} with {boxes} boxes'
        )
    check_fits(n * LEVEL_BYTES, f'n_levels = {n:,}')
    rng, levels, solutions, due = np.random.default_rng(seed), [], [], every()
    known = set() if without is None else set(map(bytes, without))
    while len(levels) < n:
        floor = carve(batch, rng)
        free = floor & np.any(
            [np.roll(floor, -d, 1) & np.roll(floor, -2 * d, 1) for d in DELTA], 0
        )  # a box can be pulled off there
        floor, free = (
            mask[(floor.sum(1) >= 4 * boxes + 4) & (free.sum(1) >= boxes)] for mask in (floor, free)
        )
        target, order = (
            np.zeros_like(floor),
            np.argsort(np.where(free, rng.random(floor.shape), 2), 1),
        )
        np.put_along_axis(target, order[:, :boxes], True, 1)
        agent = np.where(floor & ~target, rng.random(floor.shape), -1).argmax(1)
        box, agent, undo, states = reverse_play(floor, target, agent, steps, rng)
        good = np.flatnonzero(~(box & target).any(1) & ~target[np.arange(len(floor)), agent])
        packed = pack(
            *(mask[good][:, INTERIOR] for mask in (~floor, target, box)),
            np.searchsorted(INTERIOR, agent[good]),
        )
        for level, i in zip(packed, good, strict=True):
            actions = solution(undo[:, i], states[:, i])
            if (
                3 * boxes <= len(actions) <= max_moves and bytes(level) not in known
            ):  # shorter ones are dull
                levels.append(level)
                solutions.append(actions)
        if due():
            print(f'    {len(levels):,} of {n:,} levels generated', flush=True)
    return np.stack(levels[:n]), solutions[:n]


# ----------------------------------------------------------------------------- the environment


def scramble(x: torch.Tensor) -> torch.Tensor:
    """splitmix64's finalizer: int64 -> int64, any shape, each bit of the input changes half of the output's."""
    x = (
        x ^ (x >> 30 & (1 << 34) - 1)
    ) * -0x40A7B892E31B1A47  # 0xbf58476d1ce4e5b9; shifts are arithmetic: mask the sign's copies
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * -0x6B2FB644ECCEEE15  # 0x94d049bb133111eb
    return x ^ (x >> 31 & (1 << 33) - 1)


def board_keys(seed: int, stream: int, board: torch.Tensor) -> torch.Tensor:
    """draw's half that depends on no count: (N,) int64."""
    return scramble(scramble(torch.full_like(board, (seed * 4 + stream) % (1 << 63))) + board)


def draw_by(keys: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    return scramble(keys + count) >> 11 & (1 << 53) - 1


def draw(seed: int, stream: int, board: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """A random number 0..2^53-1 for each board (N,) and count (N,) or (): a function of its arguments alone. So nothing depends on how
    boards are split over ranks, a resumed run needs no generator's state, and a CUDA graph draws anew at every replay."""
    return draw_by(board_keys(seed, stream, board), count)


def make_outcomes() -> np.ndarray:
    """What a step does, by the codes of the two cells before the agent: (8, 8, 4) int64. Whether it moves, both cells' codes afterwards,
    and how many more boxes are on targets."""
    near, far = np.mgrid[:8, :8]
    moves = (near & WALL == 0) & ((near & BOX == 0) | (far & (WALL | BOX) == 0))
    pushed = moves * (near & BOX)
    return np.stack(
        [
            moves,
            near - pushed,
            far + pushed,
            (pushed > 0) * ((far & TARGET) - (near & TARGET)) // TARGET,
        ],
        -1,
    )


class SokobanEnv:
    """N boards at once. order 'random': an ended board draws its next level from all, with replacement; 'sequence': board i plays levels
    i, i + N, i + 2N, ... All state is in tensors (N, ...) that are changed in place. first: number of board 0, where other ranks have
    boards of the same run ('random' only: in sequence each rank takes a part of the levels instead). Levels are kept unpacked, 108 bytes
    each, and rules as tables: on a GPU a step is its number of kernels, and torch.compile fuses them (train_sokoban.py)."""

    STATE = ('level', 'grid', 'agent', 'steps', 'episode')

    def __init__(
        self,
        levels: np.ndarray,
        N: int,
        seed: int = 0,
        device: str = 'cpu',
        order: str = 'random',
        first: int = 0,
    ):
        if order not in ('random', 'sequence'):
            raise ValueError(f"order = {order!r}: expected 'random' or 'sequence'")
        self.N, self.order = N, order
        self.grids, self.agents = (
            torch.from_numpy(x).to(device) for x in unpack(levels)
        )  # (n, 100), (n,)
        self.outcomes, self.paths = (
            torch.from_numpy(make_outcomes()).to(device),
            torch.from_numpy(PATHS).to(device),
        )
        self.cell, self.board = (
            torch.arange(CELLS, device=device),
            torch.arange(first, first + N, device=device),
        )
        self.keys = board_keys(seed, 0, self.board)
        self.grid = torch.zeros(
            N, CELLS, dtype=torch.uint8, device=device
        )  # sums of WALL, TARGET and BOX
        self.level, self.agent, self.steps, self.episode = (
            torch.zeros(N, dtype=torch.int64, device=device) for _ in range(4)
        )
        self.reset(torch.ones(N, dtype=torch.bool, device=device))

    def reset(self, which: torch.Tensor, level: torch.Tensor | None = None) -> None:
        """The next level for the boards of the mask (N,); level (N,): these instead."""
        if level is None:
            number = (
                draw_by(self.keys, self.episode)
                if self.order == 'random'
                else self.board + self.episode * self.N
            )
            level = number % len(self.grids)
        self.grid.copy_(torch.where(which[:, None], self.grids[level], self.grid))
        for mine, new in ((self.level, level), (self.agent, self.agents[level])):
            mine.copy_(torch.where(which, new, mine))
        self.steps.masked_fill_(which, 0)
        self.episode.add_(which)

    def step(
        self, action: torch.Tensor, level: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """action (N,) int64, 0..3 -> reward (N,) fp32, done (N,), solved (N,) bool. A board that is done is reset at once (to `level`, if
        given): reward and done are the old episode's, the next observation is the new one's."""
        reward, done, solved = self.move(action)
        self.reset(done, level)
        return reward, done, solved

    def move(self, action: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The step without the reset."""
        path = self.paths[self.agent, action]  # (N, 3)
        near, far = self.grid.gather(1, path[:, 1:]).long().unbind(1)
        outcome = self.outcomes[near, far]  # (N, 4)
        new, here = (
            outcome[:, 1:3].to(torch.uint8),
            self.cell == path[:, 1:, None],
        )  # (N, 2), (N, 2, 100); a scatter fuses with nothing
        self.grid.copy_(
            torch.where(here[:, 0], new[:, :1], torch.where(here[:, 1], new[:, 1:], self.grid))
        )
        self.agent.copy_(path.gather(1, outcome[:, :1]).squeeze(1))
        self.steps.add_(1)
        solved = ~(self.grid == BOX).any(1)  # no box off the targets, which are as many
        done = solved | (self.steps >= TIME_LIMIT)
        return outcome[:, 3] + 10.0 * solved - 0.1, done, solved

    def observe(self) -> torch.Tensor:
        """Jumanji's observation: (N, 10, 10, 2) uint8, channel 0 agent 3 and box 4, channel 1 wall 1 and target 2."""
        variable = (self.grid & BOX).masked_fill_(self.cell == self.agent[:, None], AGENT)
        return torch.stack([variable, self.grid & (WALL | TARGET)], -1).view(self.N, SIZE, SIZE, 2)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {name: getattr(self, name).clone() for name in self.STATE}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        if 'wall' in state:  # an older checkpoint's masks
            state = {
                **state,
                'grid': state['wall'] * WALL + state['target'] * TARGET + state['box'] * BOX,
            }
        for name in self.STATE:
            fill(getattr(self, name), state[name])


class JumanjiEnv:
    """Jumanji's own Sokoban-v0 with our levels, all of 4 boxes, and SokobanEnv's interface (random order only). jumanji and jax are
    imported here alone; the pinned jax runs on the CPU, so every step waits for the device."""

    def __init__(
        self, levels: np.ndarray, N: int, seed: int = 0, device: str = 'cpu', first: int = 0
    ):
        if (distinct(levels[:, 8:12]) != 4).any():
            raise LevelError("Jumanji's Sokoban has 4 boxes, and some of these levels have fewer")
        try:
            import jax
            import jumanji.wrappers as wrappers
            from jumanji.environments import Sokoban
        except ImportError as error:
            raise LevelError(
                f"env = 'jumanji' needs jumanji and jax, see requirements.txt ({first_line(error)})"
            ) from None
        self.N, self.device = N, device
        env = wrappers.VmapWrapper(wrappers.AutoResetWrapper(Sokoban(jumanji_generator(levels))))
        key = jax.random.PRNGKey(seed % (1 << 32))
        keys = jax.vmap(lambda board: jax.random.fold_in(key, board))(np.arange(first, first + N))
        self.play = jax.jit(env.step)
        self.state, timestep = jax.jit(env.reset)(keys)
        self.grid = timestep.observation.grid

    def tensor(self, array: ArrayLike) -> torch.Tensor:
        return torch.from_numpy(np.array(array)).to(self.device)

    def step(self, action: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """action (N,) int64 -> reward (N,) fp32, done (N,), solved (N,) bool of the old episode, where one ended."""
        self.state, timestep = self.play(self.state, action.cpu().numpy().astype(np.int32))
        self.grid = timestep.observation.grid
        return (
            self.tensor(timestep.reward),
            self.tensor(timestep.last()),
            self.tensor(timestep.extras['solved']),
        )

    def observe(self) -> torch.Tensor:
        return self.tensor(self.grid)

    def state_dict(self) -> dict[str, torch.Tensor]:
        state = {name: self.tensor(array) for name, array in self.state.items()}
        return state | {'key': state['key'].long()}  # torch does little with unsigned integers

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        arrays = {
            name: state[name].cpu().numpy().astype(array.dtype)
            for name, array in self.state.items()
        }
        self.state, self.grid = (
            self.state.replace(**arrays),
            np.stack([arrays['variable_grid'], arrays['fixed_grid']], -1),
        )


def jumanji_generator(levels: np.ndarray) -> object:
    """Jumanji asks this for a random level at each reset. (Its own generators download, and one of them loses levels.)"""
    import jax
    import jax.numpy as jnp
    from jumanji.environments.routing.sokoban.generator import Generator
    from jumanji.environments.routing.sokoban.types import State

    class Packed(Generator):
        def __call__(self, rng_key) -> State:
            key, draw_key = jax.random.split(rng_key)
            level = jnp.asarray(levels)[jax.random.randint(draw_key, (), 0, len(levels))]  # (17,)
            y, x = (
                level[8:].astype(jnp.int32) // INSIDE + 1,
                level[8:].astype(jnp.int32) % INSIDE + 1,
            )
            wall = jnp.pad(
                jnp.unpackbits(level[:8]).reshape(INSIDE, INSIDE), 1, constant_values=WALL
            )
            boxes = jnp.zeros_like(wall).at[y[4:8], x[4:8]].set(BOX)
            return State(
                key=key,
                fixed_grid=wall.at[y[:4], x[:4]].set(TARGET),
                variable_grid=boxes.at[y[8], x[8]].set(AGENT),
                agent_location=jnp.stack([y[8], x[8]]),
                step_count=jnp.array(0, jnp.int32),
            )

    return Packed()


# ----------------------------------------------------------------------------- pictures


def observations(levels: np.ndarray) -> np.ndarray:
    """Packed levels (N, 17) -> observations (N, 10, 10, 2) uint8."""
    return SokobanEnv(levels, len(levels), order='sequence').observe().numpy()


def board_text(board: np.ndarray | torch.Tensor) -> str:
    """An observation (10, 10, 2), or a packed level (17,) -> ten lines of Boxoban's characters."""
    board = np.asarray(board)
    board = observations(board[None])[0] if board.shape == (17,) else board
    return '\n'.join(bytes(row).decode() for row in CHARS[board[..., 1], board[..., 0]])


COLOURS = {
    'floor': (240, 234, 220),
    'mortar': (62, 70, 84),
    'brick': (88, 99, 117),
    'goal': (214, 69, 65),
    'box': (222, 170, 98),
    'edge': (150, 100, 45),
    'done': (126, 186, 104),
    'done_edge': (58, 118, 52),
    'player': (45, 105, 185),
    'eye': (255, 255, 255),
}


def sprites(cell: int) -> np.ndarray:
    """A picture (cell, cell, 3) for each of # .$*@+ in this order, drawn at 4 times the size and averaged: smooth edges."""
    v, u = np.mgrid[-1 : 1 : 4j * cell, -1 : 1 : 4j * cell]  # rows, columns
    square, radius = np.maximum(abs(u), abs(v)), np.hypot(u, v)
    cross = (abs(abs(u) - abs(v)) < 0.16) & (square < 0.64)
    wall = [(square < 2, 'mortar'), ((v % 1 > 0.08) & ((u + (v > 0)) % 2 > 0.08), 'brick')]
    goal = [((radius < 0.54) & (radius > 0.34), 'goal'), (radius < 0.17, 'goal')]
    box, done = (
        [(square < 0.82, edge), (square < 0.64, fill), (cross, edge)]
        for edge, fill in (('edge', 'box'), ('done_edge', 'done'))
    )
    agent = [(radius < 0.74, 'player'), ((abs(u) - 0.27) ** 2 + (v + 0.14) ** 2 < 0.022, 'eye')]
    pictures = np.full((7, 4 * cell, 4 * cell, 3), COLOURS['floor'], float)
    for picture, layers in zip(
        pictures,
        (wall, [], goal, box, done, agent, agent + [(abs(radius - 0.86) < 0.07, 'goal')]),
        strict=True,
    ):
        for mask, name in layers:
            picture[mask] = COLOURS[name]
    return pictures.reshape(7, cell, 4, cell, 4, 3).mean((2, 4)).round().astype(np.uint8)


def board_image(observation: np.ndarray | torch.Tensor, cell: int = 24) -> np.ndarray:
    """Observation (10, 10, 2) -> RGB picture (10 cell, 10 cell, 3) uint8."""
    observation = np.asarray(observation)
    kind = np.zeros(128, int)
    kind[list(b'# .$*@+')] = range(7)
    tiles = sprites(cell)[
        kind[CHARS[observation[..., 1], observation[..., 0]]]
    ]  # (10, 10, cell, cell, 3)
    return tiles.transpose(0, 2, 1, 3, 4).reshape(SIZE * cell, SIZE * cell, 3)


def save_png(image: np.ndarray, path: str) -> None:
    from PIL import Image

    write_atomic(path, lambda file: Image.fromarray(image).save(file, format='PNG'))


def save_gif(frames: list[np.ndarray], path: str, ms: int = 150) -> None:
    """Observations (10, 10, 2), or pictures (H, W, 3) -> an animation that repeats, `ms` a frame and the last one for longer."""
    from PIL import Image

    first, *rest = (
        Image.fromarray(board_image(frame) if frame.shape[-1] == 2 else frame) for frame in frames
    )
    times = [ms] * len(rest) + [8 * ms]
    write_atomic(
        path,
        lambda file: first.save(
            file, format='GIF', save_all=True, append_images=rest, duration=times, loop=0
        ),
    )


def main() -> None:
    configure(globals(), quiet=True)
    if show < 1:
        fail(f'show = {show}: expected at least 1')
    try:
        levels, source = load_levels(
            levels_dir, split, download, n_levels, n_boxes, seed, max_moves
        )
    except ValueError as error:  # LevelError, SizeError
        fail(error)
    print(source)
    levels = levels[:show]
    for i, level in enumerate(levels):
        print(f'\n; {i}\n{board_text(level)}')
    if picture:
        tiles = [
            np.pad(board_image(o), ((4, 4), (4, 4), (0, 0)), constant_values=255)
            for o in observations(levels)
        ]
        columns = math.ceil(len(tiles) ** 0.5)
        tiles += [np.full_like(tiles[0], 255)] * (-len(tiles) % columns)
        try:
            save_png(
                np.vstack(
                    [np.hstack(tiles[i : i + columns]) for i in range(0, len(tiles), columns)]
                ),
                picture,
            )
        except OSError as error:
            fail(f'{picture}: cannot be written: {error.strerror}')


if __name__ == '__main__':
    run_script(main)

"""Prepare text for state tracking: moves that permute letters, and the arrangement to which they
lead. train_lm.py learns it like any other text, and paper/states.py scores it.

    python data_states.py                      # S5: all 120 arrangements of five letters
    python data_states.py --moves=Z5           # for comparison: moves that commute
    python data_states.py --moves=dcba,bcda    # moves of your own: D4, the symmetries of a square

The text consists of chains: some moves, '=', the arrangement to which they lead from the one before
them, and a blank. With S5, whose x swaps the first two letters and whose r moves the first to the
end, 'xrrx=dceba rx=ecbad ' may follow upon 'abcde '. A model can only guess the moves, and how many
there are. So no loss is below the entropy of the text, which is printed, except by chance. What a
model can learn is the arrangement.

Short chains recur in a long text, but of the possible chains of 16 moves and more an eighth, chosen
by a hash of the moves, is held out: the validation shard and the test text of paper/states.py take
their long chains from this eighth, and the training text takes none from it.
"""

import functools
import hashlib
import math
import os
import random
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator

from configurator import configure
from support.script import UserError, run_script

import numpy as np

from support.loader import open_meta, shard_path, write_meta, write_shard

# fmt: off
data_dir = ''         # folder for the shards; '' = data/states_<moves>
moves = 'S5'          # S5, A5, Z5, D5, parity, or what x and r make of 'abcd...': 'dcba,bcda'
most_moves = 32       # moves of the longest chains
lengths = 'log-uniform'     # of chains: 'log-uniform' (most are short) or 'uniform'
train_tokens = 16_000_000   # training bytes, enough that no update reads a text twice:
                            # 3,906 updates of 4,096 bytes
val_tokens = 131_072  # validation bytes
seed = 1              # of the random moves and lengths
# fmt: on

RANGES = {
    'most_moves': (1, 1000),
    'lengths': ['log-uniform', 'uniform'],
    'train_tokens': (100_000, 2**31 - 1),
    'val_tokens': (65_537, 2**31 - 1),  # config/states.py validates on 65,536
}
ROOT = os.path.dirname(os.path.abspath(__file__))
LETTERS = 'abcdefgh'
# What the moves x and r make of the letters in their order. To add a task, add a line: its name and
# two permutations of the first two to eight letters. For other tasks see paper/states.py.
MOVES = {
    'S5': ('bacde', 'bcdea'),  # swap the first two; move the first to the end
    'A5': ('bcade', 'bcdea'),  # rotate the first three; rotate all: even permutations, 60 of them
    'Z5': ('cdeab', 'bcdea'),  # rotate by two; rotate by one: x is r twice
    'D5': ('edcba', 'bcdea'),  # reverse; rotate by one
    'parity': ('ab', 'ba'),  # do nothing; swap
}
HELD_OUT_FROM = 16  # moves of the chains of which some are held out
TRAIN, HELD_OUT = False, True  # the two parts of these chains


def find_moves(name: str) -> tuple[str, str]:
    """Return the pair of moves with a name in MOVES, or written out. Raises UserError if a move is
    no permutation of the first letters, or if neither moves any."""
    pair = MOVES.get(name) or tuple(name.split(','))
    letters = sorted(LETTERS[: max(2, len(pair[0]))])
    if len(pair) != 2 or any(sorted(move) != letters for move in pair):
        names = ', '.join(MOVES)
        expected = f"{names}, or two permutations of the first 2 to 8 letters, as in 'dcba,bcda'"
        described = f'{name!r} = {",".join(pair)}' if name in MOVES else repr(name)
        raise UserError(f'moves = {described}: expected {expected}')
    if {*pair} == {''.join(letters)}:
        raise UserError(
            f'moves = {name!r}: there is nothing to track, because no move moves a letter'
        )
    return pair


@functools.cache
def apply(move: str, arrangement: str) -> str:
    """Return the arrangement after a move, which makes `move` of the letters in their order."""
    return ''.join(arrangement[LETTERS.index(letter)] for letter in move)


def is_held_out(names: str) -> bool:
    """Return whether a chain of these moves may occur in held-out text only."""
    digest = hashlib.blake2b(names.encode(), digest_size=1).digest()
    return len(names) >= HELD_OUT_FROM and digest[0] < 32


def chains(
    pair: tuple[str, str], counts: Iterable[int], rng: random.Random, part: bool
) -> Iterator[str]:
    """Yield a chain, such as 'xrrx=dceba ', for each number of moves; each starts from the
    arrangement of the one before. pair: the permutations x and r; part: TRAIN or HELD_OUT."""
    arrangement = ''.join(sorted(pair[0]))
    for n in counts:
        while True:
            bits = f'{rng.getrandbits(n):0{n}b}'
            names = bits.replace('0', 'x').replace('1', 'r')
            if n < HELD_OUT_FROM or is_held_out(names) == part:
                break
        for bit in bits:
            arrangement = apply(pair[bit == '1'], arrangement)
        yield f'{names}={arrangement} '


def draw_counts(most: int, lengths: str, rng: random.Random) -> Iterator[int]:
    """Yield random numbers of moves, 1 to `most`, without end."""
    while True:
        if lengths == 'uniform':
            yield rng.randint(1, most)
        else:
            yield min(most, int((most + 1) ** rng.random()))


def shares_of_counts(most: int, lengths: str) -> dict[int, float]:
    """Return the probability of each number of moves."""
    if lengths == 'uniform':
        return dict.fromkeys(range(1, most + 1), 1 / most)
    return {n: math.log1p(1 / n) / math.log(most + 1) for n in range(1, most + 1)}


def entropy(pair: tuple[str, str], shares: dict[int, float]) -> float:
    """Return the entropy of the text in nats per byte: that of the number of moves of a chain, and
    ln 2 for each move, over the bytes of a chain."""
    nats = sum(p * (n * math.log(2) - math.log(p)) for n, p in shares.items())
    return nats / sum(p * (n + len(pair[0]) + 2) for n, p in shares.items())


def likeliest(pair: tuple[str, str], most: int) -> dict[int, float]:
    """Return the probability of the likeliest arrangement after n = 1 to `most` random moves: the
    best accuracy of a model that does not read the moves."""
    shares, found = Counter({''.join(sorted(pair[0])): 1.0}), {}
    for n in range(1, most + 1):
        after = Counter()
        for arrangement, p in shares.items():
            for move in pair:
                after[apply(move, arrangement)] += p / 2
        shares, found[n] = after, max(after.values())
    return found


def make_text(config: dict, size: int, part: bool) -> np.ndarray:
    """Return the first `size` bytes of a random text."""
    rng = random.Random(f'{config["seed"]} {part}')
    counts = draw_counts(config['most_moves'], config['lengths'], rng)
    found, length = [], 0
    for chain in chains(find_moves(config['moves']), counts, rng, part):
        found.append(chain)
        length += len(chain)
        if length >= size:
            break
    return np.frombuffer(''.join(found).encode()[:size], np.uint8)


def make_shards(config: dict) -> None:
    """Prepare the text that the settings describe, unless the folder has it, and print the commands
    that train on it."""
    pair, sizes = find_moves(config['moves']), (config['val_tokens'], config['train_tokens'])
    name = f'states_{config["moves"].replace(",", "_")}'
    folder = os.path.normpath(config['data_dir'] or os.path.join('data', name))
    os.makedirs(folder, exist_ok=True)
    others = {name: x for name, x in config.items() if name not in ('data_dir', 'moves')}
    meta = open_meta(folder, tokenizer='bytes', source='data_states.py', moves=[*pair], **others)
    if not meta['finished']:
        write_meta(folder, meta)
        for index, (size, part) in enumerate(zip(sizes, (HELD_OUT, TRAIN), strict=True)):
            write_shard(shard_path(folder, index), make_text(config, size, part))
        write_meta(folder, {**meta, 'shards': sizes, 'finished': True})
    print(f'{folder}: {sizes[1]:,} training bytes, {sizes[0]:,} validation bytes')
    print(f'the training text starts with {make_text(config, 80, TRAIN).tobytes().decode()} ...')
    floor = entropy(pair, shares_of_counts(config['most_moves'], config['lengths']))
    print(f'entropy of the text: {floor:.4f} nats per byte; no loss is below it, except by chance')
    print('train with and without recurrence, and compare:')
    out = os.path.join('out', os.path.basename(folder))
    files = [f'{ROOT}/{x}' for x in ('train_lm.py', 'config/states', 'paper/states.py')]
    trainer, config_file, scorer = map(os.path.relpath, files)  # seen from the current folder
    for kind in ('', '_nonrecurrent'):
        run = os.path.join(out, kind.strip('_') or 'recurrent')
        flags = [f'--data_dir={folder}', f'--out_dir={run}']
        print('  ' + shlex.join(['python', trainer, f'{config_file}{kind}.py', *flags]))
    print('  ' + shlex.join(['python', scorer, out]))


def main() -> None:
    make_shards(configure(globals()))


if __name__ == '__main__':
    run_script(main)

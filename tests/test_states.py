"""Test state tracking: the text of data_states.py."""

import itertools
import math
import random
import re

from configurator import Script

import numpy as np
import pytest
from small_runs import assert_refused

import data_states
from data_states import MOVES, TRAIN, chains, entropy, likeliest, make_shards
from support.loader import find_shards, read_shard

DEFAULTS = Script(data_states.__file__).defaults | {'train_tokens': 100_000, 'val_tokens': 70_000}
CHAIN = re.compile('([xr]+)=([a-h]+) ')


def prepare(folder, **settings):
    """Prepare small shards; return the text for training and for validation."""
    make_shards(DEFAULTS | {'data_dir': str(folder)} | settings)
    paths = [find_shards(folder, split, 'bytes')[0] for split in ('train', 'val')]
    return [bytes(read_shard(path, 256).astype(np.uint8)).decode() for path in paths]


# ---- the text ----


@pytest.mark.parametrize('pair', [*MOVES.values(), ('dcba', 'bcda')], ids=','.join)
def test_arrangements_are_products_of_permutation_matrices(pair):
    """10,000 chains. A move is a matrix whose row i takes letter i of the new arrangement from the
    old one."""
    letters = sorted(pair[0])
    matrices = {
        name: np.array([[int(a == b) for b in letters] for a in move])
        for name, move in zip('xr', pair, strict=True)
    }
    rng = random.Random(1)
    counts = [rng.randint(1, 40) for _ in range(10_000)]
    before, n_right = np.array([ord(x) for x in letters]), 0
    for chain, n in zip(chains(pair, counts, rng, TRAIN), counts, strict=True):
        names, arrangement = CHAIN.fullmatch(chain).groups()
        for name in names:
            before = matrices[name] @ before
        n_right += len(names) == n and arrangement == ''.join(map(chr, before))
    assert n_right == 10_000


SIZES = [('S5', 120), ('Z5', 5), ('D5', 10), ('parity', 2), ('dcba,bcda', 8)]


@pytest.mark.parametrize('moves, size', SIZES)
def test_moves_generate_the_group_of_their_name(moves, size):
    text = ''.join(chains(data_states.find_moves(moves), [5] * 5000, random.Random(1), TRAIN))
    assert len({arrangement for _, arrangement in CHAIN.findall(text)}) == size


def test_no_long_chain_of_held_out_text_is_in_the_training_text(tmp_path):
    """Even with any other arrangement before it. Long chains are an eighth of all."""
    train, val = prepare(tmp_path, train_tokens=2_000_000, val_tokens=300_000)
    long = [{x for x, _ in CHAIN.findall(text) if len(x) >= 16} for text in (train, val)]
    assert len(long[0]) > 20_000 and len(long[1]) > 3000 and not long[0] & long[1]
    every = [''.join(names) for names in itertools.product('xr', repeat=16)]
    assert sum(map(data_states.is_held_out, every)) / len(every) == pytest.approx(1 / 8, rel=0.05)
    short = [{x for x, _ in CHAIN.findall(text) if len(x) < 5} for text in (train, val)]
    assert len(short[0]) == 2 + 4 + 8 + 16 and short[0] == short[1]


@pytest.mark.parametrize('lengths', ['log-uniform', 'uniform'])
def test_lengths_and_entropy_are_those_of_the_text(tmp_path, lengths):
    """The entropy by counts of the text: that of the lengths, and a bit for each move."""
    text, _ = prepare(tmp_path, lengths=lengths, most_moves=8, train_tokens=1_000_000)
    found = np.array([len(names) for names, _ in CHAIN.findall(text)])
    shares = np.bincount(found)[1:] / len(found)
    expected = data_states.shares_of_counts(8, lengths)
    assert shares == pytest.approx(list(expected.values()), abs=0.005)
    assert sum(expected.values()) == pytest.approx(1)
    nats = -(shares * np.log(shares)).sum() + found.mean() * math.log(2)
    assert entropy(MOVES['S5'], expected) == pytest.approx(nats / (found.mean() + 7), abs=0.001)


def test_the_floor_is_the_likeliest_arrangement_of_all_sequences():
    for pair in MOVES.values():
        found = likeliest(pair, 6)
        for n in range(1, 7):
            ends = {}
            for moves in itertools.product(pair, repeat=n):
                arrangement = sorted(pair[0])
                for move in moves:
                    arrangement = [arrangement['abcde'.index(x)] for x in move]
                ends[tuple(arrangement)] = ends.get(tuple(arrangement), 0) + 1
            assert found[n] == pytest.approx(max(ends.values()) / 2**n)
    assert likeliest(MOVES['S5'], 32)[32] == pytest.approx(1 / 120, rel=0.15)


def test_preparing_again_changes_nothing_and_other_settings_are_refused(tmp_path, capsys):
    before = prepare(tmp_path)
    meta = (tmp_path / 'meta.json').read_text()
    assert prepare(tmp_path) == before and (tmp_path / 'meta.json').read_text() == meta
    assert (
        f'train_lm.py config/states_nonrecurrent.py --data_dir={tmp_path}'
        in capsys.readouterr().out
    )
    for name, value in {'seed': 2, 'most_moves': 16, 'moves': 'Z5', 'lengths': 'uniform'}.items():
        assert_refused(f'{name} = .*choose another', prepare, tmp_path, **{name: value})
    assert prepare(tmp_path / 'other', seed=2) != before


def test_a_killed_preparation_is_repeated(tmp_path, monkeypatch):
    def kill(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(data_states, 'write_shard', kill)
        prepare(tmp_path / 'killed')
    assert prepare(tmp_path / 'killed') == prepare(tmp_path / 'whole')


@pytest.mark.parametrize('moves', ['S6', 'bacde', 'bacde,bcd', 'abcd,bcdd', 'bca,cab,abc', ',', ''])
def test_moves_that_are_no_permutations_are_refused(tmp_path, moves):
    assert_refused(f"moves = '{moves}': expected S5, Z5", prepare, tmp_path, moves=moves)

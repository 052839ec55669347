"""Test loader.py: shards, how they are found, and loaders by brute force."""

import numpy as np
import pytest
import torch
from small_runs import assert_refused

from support.loader import Loader, find_shards, load_val, read_shard, write_meta, write_shard

# ---- shards ----


@pytest.mark.parametrize('ids, header, tokens', [
    ([50256, 1, 258], '88d83401 01000000 03000000', '50c4 0100 0201'),
    ([50256, 1, 65_536], '88d83401 02000000 03000000', '50c40000 01000000 00000100'),
])  # fmt: skip
def test_shard_layout_by_hand(tmp_path, ids, header, tokens):
    """The magic number is 20240520, and the version 1 for uint16 and 2 for uint32."""
    write_shard(tmp_path / 's.bin', ids)
    expected = bytes.fromhex(header) + bytes(1012) + bytes.fromhex(tokens)
    assert (tmp_path / 's.bin').read_bytes() == expected
    assert read_shard(tmp_path / 's.bin', 70_000).tolist() == ids


LARGE = (1 << 22) + 10  # more than is checked at a time


@pytest.mark.parametrize('position, change, message', [
    (0, b'\x81', 'not a token shard'),
    (8, b'\0', r'4,194,304 tokens by its header, 4,194,314\.0 in the file: delete'),
    (1024 + 2 * 4_194_311, b'\x2c\1', 'token 300 at position 4194311 is outside the vocabulary'),
])  # fmt: skip
def test_a_shard_of_another_format_length_or_vocabulary_is_refused(
    tmp_path, position, change, message
):
    path = tmp_path / 's.bin'
    write_shard(path, np.zeros(LARGE, np.uint16))
    with open(path, 'r+b') as file:
        file.seek(position)
        file.write(change)
    assert_refused(rf's\.bin: {message}', read_shard, path, 300)


# ---- folders ----


def write_named(folder, *names):
    for name in names:
        write_shard(folder / name, [50256, 5])


@pytest.mark.parametrize('train, val', [
    ('edu_fineweb_train_000001.bin', 'edu_fineweb_val_000000.bin'),  # llm.c and modded-nanogpt
    ('fineweb_000001.bin', 'fineweb_000000.bin'),  # llm.c's first version
])  # fmt: skip
def test_shards_of_others_are_found_by_their_names(tmp_path, train, val):
    """Without a meta.json they count as GPT-2's."""
    write_named(tmp_path, train, val)
    assert find_shards(str(tmp_path), 'train', 'gpt2') == [str(tmp_path / train)]
    assert find_shards(str(tmp_path), 'val') == [str(tmp_path / val)]
    assert_refused("with 'gpt2', not 'bytes'", find_shards, str(tmp_path), 'train', 'bytes')


def test_folders_that_cannot_be_trained_on_are_refused(tmp_path):
    message = r'no train shards in .* \(NAME_train_NUMBER\.bin'
    assert_refused(message, find_shards, str(tmp_path / 'none'), 'train')
    write_named(tmp_path, 'fineweb_val_000000.bin')
    assert_refused(message + r'.*, only fineweb_val_000000\.bin', find_shards, tmp_path, 'train')
    write_named(tmp_path, 'fineweb_train_000001.bin')
    write_meta(tmp_path, {'tokenizer': 'gpt2', 'source': 'a', 'shards': [2, 2, 2]})
    message = r'fineweb_train_000002\.bin is missing: delete the folder and prepare it again'
    assert_refused(message, find_shards, tmp_path, 'train')
    assert len(find_shards(tmp_path, 'val')) == 1
    write_named(tmp_path, 'finewebedu_train_000001.bin')
    assert_refused('of several names, fineweb, finewebedu', find_shards, tmp_path, 'train')


# ---- loaders ----


def make_shards(folder, sizes):
    """Write shards of random tokens below 251; return their paths and tokens."""
    rng = np.random.default_rng(0)
    shards = [rng.integers(0, 251, size).tolist() for size in sizes]
    paths = [folder / f'fineweb_train_{k:06d}.bin' for k in range(len(sizes))]
    for path, tokens in zip(paths, shards, strict=True):
        write_shard(path, tokens)
    return paths, shards


def brute_force(shards, B, T, carries, seed, epochs):
    """Yield (rows of T + 1 tokens, reset, epoch) from plain lists. With a seed, every epoch has
    another order of the shards, which are rings, and another first token of each."""
    for epoch in range(epochs):
        order, starts = range(len(shards)), [0] * len(shards)
        if seed is not None:
            rng = np.random.default_rng((seed, epoch))
            order, starts = rng.permutation(len(shards)), rng.random(len(shards))
        for k in order:
            first = int(starts[k] * len(shards[k]))
            data = shards[k][first:] + shards[k][:first]
            n = len(data) // B
            for w in range(0, n - T, T):
                yield [data[b * n + w :][: T + 1] for b in range(B)], w == 0 or not carries, epoch


@pytest.mark.parametrize('sizes, B, T, world, carries, seed', [
    ([97, 64, 211], 4, 5, 2, True, 3),
    ([97, 64, 211], 6, 5, 3, False, None),
    ([36], 4, 8, 1, False, 3),
])  # fmt: skip
def test_loader_against_brute_force(tmp_path, sizes, B, T, world, carries, seed):
    """The ranks together read the batch. A loader that gets the state of another before any batch
    reads that batch."""
    paths, shards = make_shards(tmp_path, sizes)
    ranks = [Loader(paths, B, T, 256, carries, seed, (k, world)) for k in range(world)]
    resumed = Loader(paths, B, T, 256, carries, seed)
    for rows, reset, epoch in brute_force(shards, B, T, carries, seed, epochs=3):
        state = ranks[-1].state_dict()
        parts = [rank.next() for rank in ranks]
        x, y = (torch.cat([part[i] for part in parts]) for i in (0, 1))
        assert x.tolist() == [row[:-1] for row in rows] and y.tolist() == [row[1:] for row in rows]
        assert {len(part[0]) for part in parts} == {B // world}
        assert [part[2] for part in parts] == [reset] * world
        assert ranks[0].epoch == epoch
        resumed.load_state_dict(state)
        assert torch.equal(resumed.next()[0], x)


def test_positions_and_batches_that_do_not_fit_the_data_are_refused(tmp_path):
    paths, _ = make_shards(tmp_path, [97, 64])  # 4 and 3 windows of 5 tokens in 4 streams
    reader = Loader(paths, 4, 5, 256, True)
    state = {'epoch': 0, 'shard': 0, 'window': 5}
    assert_refused('does not exist in this data at B = 4, T = 5', reader.load_state_dict, state)
    message = 'too few for B = 40 rows .*: lower tokens_per_step or block_size'
    assert_refused(message, Loader, paths, 40, 5, 256, True)
    assert_refused('cannot be shared by 3', Loader, paths, 4, 5, 256, True, share=(0, 3))


@pytest.mark.parametrize('val_tokens', [160, 161, 10**9])
def test_validation_takes_as_many_tokens_as_there_are(tmp_path, capsys, val_tokens):
    """The shards hold 161 tokens, inputs and last targets of 16 streams of 10."""
    paths, shards = make_shards(tmp_path, [97, 64])
    x, y = load_val(paths, val_tokens, 16, 256)
    data = sum(shards, [])
    assert (x.flatten().tolist(), y.flatten().tolist()) == (data[:-1], data[1:])
    line = f'{paths[1]}: 161 tokens, fewer than val_tokens = {val_tokens:,}: '
    line += 'validation is on 16 streams of 10\n'
    assert capsys.readouterr().out == ('' if val_tokens < 176 else line)


def test_validation_streams_without_tokens_are_refused(tmp_path):
    paths, _ = make_shards(tmp_path, [97, 64])
    for tokens, found, streams in ((200, 160, 161), (10, 10, 20)):
        message = (
            f'val_tokens = {tokens}: {found} tokens cannot be cut into val_streams = {streams} '
        )
        assert_refused(message, load_val, paths, tokens, streams, 256)


@pytest.mark.parametrize('val_tokens, streams, world', [
    (63, 5, 3),  # uneven shares
    (7, 7, 8),  # one rank has none
    (160, 3, 1),  # needs both shards, to the last token
])  # fmt: skip
def test_ranks_share_the_validation_streams(tmp_path, val_tokens, streams, world):
    paths, shards = make_shards(tmp_path, [97, 64])
    data, n = sum(shards, []), val_tokens // streams
    parts = [load_val(paths, val_tokens, streams, 256, (k, world)) for k in range(world)]
    x, y = (torch.cat([part[i] for part in parts]) for i in (0, 1))
    assert x.tolist() == [data[b * n : b * n + n] for b in range(streams)]
    assert y.tolist() == [data[b * n + 1 : b * n + n + 1] for b in range(streams)]

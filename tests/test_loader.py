"""Test loader.py: shards, how they are found, and loaders by brute force."""

import json

import numpy as np
import pytest
import torch
from small_runs import assert_refused

import loader
from loader import find_shards, write_meta, write_shard


# ---- shards ----


def test_shard_layout_by_hand(tmp_path):
    path = tmp_path / 's.bin'
    write_shard(path, [50256, 1, 258])
    data = path.read_bytes()
    assert data[:12] == b''.join(n.to_bytes(4, 'little') for n in (20240520, 1, 3))
    assert data[12:1024] == bytes(1012) and data[1024:] == bytes([0x50, 0xC4, 1, 0, 2, 1])


@pytest.mark.parametrize('tokens', [[65_536], [5, 100_000], np.array([1, 2], np.uint32)])
def test_ids_beyond_uint16_make_a_shard_of_uint32(tmp_path, tokens):
    """The version in the header tells the type. A loader reads both types."""
    write_shard(tmp_path / 'a.bin', tokens)
    data = (tmp_path / 'a.bin').read_bytes()
    assert data[4:8] == b'\x02\0\0\0' and len(data) == 1024 + 4 * len(tokens)
    read = loader.read_shard(tmp_path / 'a.bin', 200_000)
    assert read.dtype == np.uint32 and read.tolist() == list(tokens)
    write_shard(tmp_path / 'b.bin', [7] * 5)
    x, y = loader.load_val([tmp_path / 'b.bin', tmp_path / 'a.bin'], 5, 1, 200_000)
    assert y.tolist() == [[7, 7, 7, 7, tokens[0]]]


@pytest.mark.parametrize('tokens', [[-1], [2**32], [1.5], [], [[1]]])
def test_tokens_that_do_not_fit_a_shard_are_not_written(tmp_path, tokens):
    assert_refused(r's\.bin: a shard holds', write_shard, tmp_path / 's.bin', tokens)
    assert not (tmp_path / 's.bin').exists()


@pytest.mark.parametrize('header', [(20240801, 7, 2), (20240520, 3, 2), (0, 0, 0), (20240520, 1)])
def test_a_file_of_another_format_is_refused(tmp_path, header):
    """The first is llm.c's format for Llama 3."""
    content = np.zeros(256 if len(header) > 2 else 2, np.int32)
    content[: len(header)] = header
    (tmp_path / 's.bin').write_bytes(content.tobytes() + bytes(4))
    assert_refused(r's\.bin: not a token shard', loader.read_shard, tmp_path / 's.bin', 256)


def test_a_shard_that_was_cut_short_is_named_with_both_lengths(tmp_path):
    path = tmp_path / 's.bin'
    write_shard(path, [1] * 1234567)
    path.write_bytes(path.read_bytes()[:-1])
    message = r's\.bin: 1,234,567 tokens by its header, 1,234,566\.5 in the file: delete it'
    assert_refused(message, loader.read_shard, path, 256)


def test_a_token_outside_the_vocabulary_is_found_when_a_shard_is_read(tmp_path):
    path, tokens = tmp_path / 's.bin', np.zeros((1 << 22) + 10, np.uint16)
    tokens[-3:] = 300
    write_shard(path, tokens)
    message = f's.bin: token 300 at position {len(tokens) - 3} is outside'
    assert_refused(message, loader.Loader, [path], 1, 1, 300, True)
    assert_refused(message, loader.load_val, [path], len(tokens) - 1, 1, 300)


# ---- folders ----


def write_named(folder, *names):
    for name in names:
        write_shard(folder / name, [50256, 5])


@pytest.mark.parametrize(
    'train, val',
    [
        ('fineweb_train_000001.bin', 'fineweb_val_000000.bin'),
        ('finewebedu_train_000001.bin', 'finewebedu_val_000000.bin'),  # modded-nanogpt
        ('edu_fineweb_train_000001.bin', 'edu_fineweb_val_000000.bin'),  # llm.c
        ('fineweb_000001.bin', 'fineweb_000000.bin'),  # its first version
    ],
)
def test_shards_of_others_are_found_by_their_names(tmp_path, train, val):
    """Without a meta.json they count as GPT-2's."""
    folder = tmp_path / 'a [b]'
    folder.mkdir()
    write_named(folder, train, val)
    assert find_shards(str(folder), 'train', 'gpt2') == [str(folder / train)]
    assert find_shards(str(folder), 'val') == [str(folder / val)]
    assert_refused("with 'gpt2', not 'bytes'", find_shards, str(folder), 'train', 'bytes')


def test_a_folder_without_shards_is_refused_by_the_pattern_and_what_is_there(tmp_path):
    message = (
        r'no train shards in .* \(NAME_train_NUMBER\.bin, or NAME_NUMBER\.bin, of which 000000 '
        r'validates\)'
    )
    assert_refused(message + ': prepare them with', find_shards, str(tmp_path), 'train')
    assert_refused(message, find_shards, '/nowhere', 'train')
    write_named(tmp_path, 'fineweb_val_000000.bin', 'train.bin')
    (tmp_path / '.lock').touch()
    message += r', only fineweb_val_000000\.bin, train\.bin: prepare'
    assert_refused(message, find_shards, str(tmp_path), 'train')


def test_shards_of_two_names_are_refused(tmp_path):
    write_named(tmp_path, 'fineweb_train_000001.bin', 'finewebedu_train_000001.bin')
    message = 'holds shards of several names, fineweb, finewebedu: move all but one'
    assert_refused(message, find_shards, str(tmp_path), 'train')


def test_a_folder_that_is_not_finished_is_refused(tmp_path):
    write_named(tmp_path, 'fineweb_train_000001.bin')
    write_meta(tmp_path, {'tokenizer': 'gpt2', 'source': 'a', 'shards': [], 'finished': False})
    assert_refused('its preparation was interrupted', find_shards, str(tmp_path), 'train')


def test_a_missing_shard_is_refused_in_its_split(tmp_path):
    write_named(tmp_path, 'fineweb_val_000000.bin', 'fineweb_train_000001.bin')
    write_meta(tmp_path, {'tokenizer': 'gpt2', 'source': 'a', 'shards': [2, 2, 2]})
    message = r'fineweb_train_000002\.bin is missing: delete the folder and prepare it again'
    assert_refused(message, find_shards, str(tmp_path), 'train')
    assert len(find_shards(str(tmp_path), 'val')) == 1


# ---- loaders ----


def make_shards(folder, sizes):
    """Write training shards of random tokens below 251; return their paths and tokens."""
    rng, paths, shards = np.random.default_rng(0), [], []
    for size in sizes:
        paths.append(str(folder / f'fineweb_train_{len(paths) + 1:06d}.bin'))
        shards.append(rng.integers(0, 251, size).tolist())
        write_shard(paths[-1], shards[-1])
    return paths, shards


def brute_force(reader, shards, B, T, epochs):
    """Yield (rows of T + 1 tokens, reset, epoch) from plain lists, each shard once per epoch."""
    for epoch in range(epochs):
        places = [reader.place(epoch, count) for count in range(len(shards))]
        assert sorted(shard for shard, _ in places) == list(range(len(shards)))
        for shard, first in places:
            data = shards[shard][first:] + shards[shard][:first]
            n = len(data) // B
            streams = [data[b * n : (b + 1) * n] for b in range(B)]
            for w in range((n - 1) // T):
                reset = w == 0 or not reader.carries
                yield [stream[w * T : (w + 1) * T + 1] for stream in streams], reset, epoch


@pytest.mark.parametrize('carries', [True, False])
@pytest.mark.parametrize('sizes, B, T, world', [
    ([101], 1, 1, 1), ([97, 64, 211], 4, 5, 2), ([97, 64, 211], 6, 5, 3), ([36], 4, 8, 1),
])  # fmt: skip
@pytest.mark.parametrize('seed', [None, 3])
def test_loader_against_brute_force(tmp_path, carries, sizes, B, T, world, seed):
    """The ranks together read the batch. A loader that gets the state of another before any batch
    reads that batch."""
    paths, shards = make_shards(tmp_path, sizes)
    ranks = [loader.Loader(paths, B, T, 256, carries, seed, (k, world)) for k in range(world)]
    resumed = loader.Loader(paths, B, T, 256, carries, seed)
    batches = 0
    for rows, reset, epoch in brute_force(resumed, shards, B, T, 3):
        state = json.loads(json.dumps(ranks[-1].state_dict()))
        parts = [rank.next() for rank in ranks]
        x, y = (torch.cat([part[i] for part in parts]) for i in (0, 1))
        assert x.dtype == y.dtype == torch.int64 and parts[0][0].shape == (B // world, T)
        assert x.tolist() == [row[:-1] for row in rows] and y.tolist() == [row[1:] for row in rows]
        assert all(part[2] is reset for part in parts)
        assert {rank.epoch for rank in ranks} == {epoch}
        assert all(rank.state_dict() == ranks[0].state_dict() for rank in ranks)
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state and torch.equal(resumed.next()[0], x)
        batches += 1
    assert batches >= 3


def test_positions_and_batches_that_do_not_fit_the_data_are_refused(tmp_path):
    paths, _ = make_shards(tmp_path, [97, 64])  # 4 and 3 windows of 5 tokens in 4 streams
    reader = loader.Loader(paths, 4, 5, 256, True)
    for epoch, shard, window in ((-1, 0, 0), (0, 2, 0), (0, 0, 5), (0, 0, -1)):
        state = {'epoch': epoch, 'shard': shard, 'window': window}
        assert_refused('does not exist in this data at B = 4, T = 5', reader.load_state_dict, state)
    reader.load_state_dict({'epoch': 7, 'shard': 1, 'window': 2})
    assert_refused('too few for B = 40 rows', loader.Loader, paths, 40, 5, 256, True)
    assert_refused(
        'cannot be shared by 3 ranks', loader.Loader, paths, 4, 5, 256, True, None, (0, 3)
    )


@pytest.mark.parametrize('val_tokens, streams', [(63, 5), (7, 7), (160, 3)])
@pytest.mark.parametrize('world', [1, 3, 8])  # uneven shares, also empty ones
def test_ranks_share_the_validation_streams(tmp_path, val_tokens, streams, world):
    paths, shards = make_shards(tmp_path, [97, 64])  # 160 needs both, to the last token
    data, n = sum(shards, []), val_tokens // streams
    shares = [(rank, world) for rank in range(world)]
    parts = [loader.load_val(paths, val_tokens, streams, 256, share) for share in shares]
    x, y = (torch.cat([part[i] for part in parts]) for i in (0, 1))
    assert x.tolist() == [data[b * n : b * n + n] for b in range(streams)]
    assert y.tolist() == [data[b * n + 1 : b * n + n + 1] for b in range(streams)]
    assert_refused('tokens, 2 fewer than', loader.load_val, paths, 162, 1, 256)

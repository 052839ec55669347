"""data_fineweb.py: tokenizers, shards, preparing data (kills, a fake hub), loaders against brute
force, the command line."""

import gzip
import itertools
import json
import lzma
import os
import random
import re
import shlex
import signal
import sys
import types
from pathlib import Path
from subprocess import PIPE

import forks
import numpy as np
import pytest
import torch

import data_fineweb as df
from configurator import configure, read_script

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / 'shared' / 'text'
DEFAULTS = read_script(df.__file__)[0] | {'tokenizer': 'bytes', 'workers': 3}


def texts(n, seed=0):
    """n short documents, a few of them empty, some longer than a shard of 97 tokens."""
    rng = random.Random(seed)
    sizes = [rng.choice([0, 1, 5, 30, 60, 250]) for _ in range(n)]
    return [''.join(rng.choice('abc de') for _ in range(size)) for size in sizes]


def one_document(length):
    rng = random.Random(1)
    return ''.join(rng.choice('abcdef   \n') for _ in range(length))


def jsonl(path, documents):
    lines = [json.dumps({'text': text}) + '\n' for text in documents]
    path.write_text(''.join(lines), encoding='utf-8')
    return str(path)


def parquet(path, column, values):
    import pyarrow.parquet

    table = pyarrow.table({'n': range(len(values)), column: values})
    pyarrow.parquet.write_table(table, path, row_group_size=40)


def folder_bytes(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.is_file()}


def all_tokens(folder, name='bytes', splits=('val', 'train')):
    paths = sum((df.find_shards(str(folder), split, name) for split in splits), [])
    return np.concatenate([df.read_shard(path, df.VOCAB[name]) for path in paths])


def parts_of(folder, *splits):
    return bytes(all_tokens(folder, splits=splits).astype(np.uint8)).split(b'\xff')[1:]


def stream_of(documents):
    return np.concatenate([[255, *document.encode()] for document in documents])


def prepare(folder, documents=(), **changes):
    """The documents' tokens in `folder`, in shards of 97 after one of 50 to validate."""
    config = {**DEFAULTS, 'data_dir': str(folder), 'shard_tokens': 97, 'val_tokens': 50}
    if documents:
        config['text'] = jsonl(folder.parent / 'a.jsonl', documents)
    df.main(config | changes)
    return all_tokens(folder, changes.get('tokenizer', 'bytes'))


def refuses(message, function, *args, error=df.DataError, **more):
    with pytest.raises(error, match=message) as caught:
        function(*args, **more)
    assert '\n' not in str(caught.value)


# ---- tokenizers ----


@pytest.mark.parametrize('name', ['gpt2', 'bytes'])
def test_round_trip_and_token_bytes(name):
    tok, sizes = df.get_tokenizer(name), df.token_bytes(name)
    assert sizes.shape == (df.VOCAB[name],) and sizes.dtype == np.int64
    assert (sizes[: tok.eot] > 0).all() and sizes[tok.eot :].sum() == 0
    hard = ('', 'naïve ☕ 日本語 🙂\r\n\t  x', '<|endoftext|> is text', 'a' * 3000, '\x00\x7f')
    for text in hard:
        ids, data = tok.encode(text), text.encode()
        assert tok.eot not in ids and all(type(i) is int for i in ids)
        pieces = [tok.decode_bytes([i]) for i in ids]  # a character may be split
        assert b''.join(pieces) == data and sizes[ids].sum() == len(data)
        whole = tok.encode_document(text)
        assert whole.tolist() == [tok.eot, *ids] and whole.dtype == np.uint16
    assert tok.decode_bytes([tok.eot, *tok.encode('x'), len(sizes) - 1]) == b'x'
    assert tok.decode_bytes(tok.encode('a\ud800b')) == b'a?b'  # a lone surrogate stops no run
    if name == 'gpt2':
        assert tok.encode('Hello world') == [15496, 995]
        assert (tok.vocab_size, tok.eot, len(sizes)) == (50257, 50256, 50304)


# ---- shards ----


def test_shard_layout_by_hand(tmp_path):
    path = tmp_path / 's.bin'
    df.write_shard(path, [50256, 1, 258])
    data = path.read_bytes()
    assert data[:12] == b''.join(n.to_bytes(4, 'little') for n in (20240520, 1, 3))
    assert data[12:1024] == bytes(1012) and data[1024:] == bytes([0x50, 0xC4, 1, 0, 2, 1])
    for bad in ([], [65536], [-1], [[1, 2]]):
        refuses(r's\.bin: a shard holds', df.write_shard, path, bad)
    real = SHARED / 'openweb_gpt2_val_000000.bin'
    assert not real.exists() or len(df.read_shard(real, 50257)) == 1001361
    deep = np.arange((1 << 22) + 10) // ((1 << 22) + 7) * 300
    df.write_shard(path, deep)
    for content, message in (
        (path.read_bytes(), f'token 300 at position {len(deep) - 3} is outside'),
        (data[:500], 'not a token shard'),
        (b'x' + data[1:], 'not a token shard'),
        (data[:4] + b'2' + data[5:], 'not a token shard'),
        (data[:-1], '3 tokens by its header, 2.5 in the file'),
        (data[:8] + bytes(1016), '0 tokens by its header'),
    ):
        path.write_bytes(content)
        match = f'{re.escape(str(path))}: .*{message}'
        refuses(match, df.StreamLoader, [path], 1, 1, 300, error=df.ShardError)
        refuses(match, df.load_val, [path], len(deep) - 1, 1, 300, error=df.ShardError)


# ---- preparing data ----


def test_shards_hold_the_stream_and_count_documents(tmp_path):
    documents = texts(60)
    want, folder = stream_of(documents), tmp_path / 'd'
    assert (prepare(folder, documents) == want).all()
    meta = df.read_meta(folder)
    sizes, counts = ([s[key] for s in meta['shards']] for key in ('tokens', 'documents'))
    full, rest = divmod(len(want) - 50, 97)
    assert sizes == [50] + [97] * full + [rest] and full > 10 and meta['finished']
    ends, starts = np.cumsum(sizes), np.flatnonzero(want == 255)
    assert counts == np.histogram(starts, bins=[0, *ends])[0].tolist()
    # documents straddle shards (also several shards), or this test shows nothing
    assert sum(end not in starts for end in ends[:-1]) > 5 and max(map(len, documents)) > 2 * 97


def test_killed_run_continues_to_identical_shards(tmp_path, monkeypatch):
    """A kill before any write (a shard or meta.json); then the same command."""
    documents, real = texts(12), os.replace
    prepare(tmp_path / 'whole', documents)
    for n in range(8):
        folder, moves = tmp_path / str(n), iter([real] * n)
        with monkeypatch.context() as patch, pytest.raises(StopIteration):
            patch.setattr(os, 'replace', lambda *paths, moves=moves: next(moves)(*paths))
            prepare(folder, documents)
        (folder / '.fineweb_train_000001.bin.tmp').write_bytes(b'half a file')
        prepare(folder, documents)
        assert folder_bytes(folder) == folder_bytes(tmp_path / 'whole'), n


def test_limits_can_be_raised_and_whole_shards_stay(tmp_path, capsys):
    documents, folder = texts(40), tmp_path / 'd'
    prepare(tmp_path / 'whole', documents)

    def written(**limits):
        capsys.readouterr()
        tokens = prepare(folder, documents, **limits)
        said = re.findall(r'_(\d{6})\.bin: [\d,]+ tokens', capsys.readouterr().out)
        return len(tokens) - 50, list(map(int, said))

    for limit, new in ((17, [0, 1]), (97, [1]), (98, [2]), (250, [2, 3])):
        assert written(max_tokens=limit) == (limit, new)
        assert not df.read_meta(folder)['finished']
    assert written(max_shards=5) == (5 * 97, [3, 4, 5])
    assert written()[1][0] == 6 and written()[1] == []
    (folder / 'fineweb_train_000002.bin').write_bytes(b'damaged')
    assert written()[1][0] == 2 and folder_bytes(folder) == folder_bytes(tmp_path / 'whole')


def test_tiny_rest_is_left_out_and_short_text_is_refused(tmp_path):
    for last, left_out in ((51, 8), (52, 0)):
        documents, folder = ['x' * 52] * 18 + ['x' * last] * 2, tmp_path / str(last)
        tokens = prepare(folder, documents, shard_tokens=1000)
        assert df.read_meta(folder)['left_out'] == left_out
        assert len(tokens) + left_out == len(stream_of(documents))
    documents = ['x ' * 5] * 20 + ['y' * 80]  # 301 tokens
    prepare(tmp_path / 'enough', documents, val_tokens=200)
    for val in (300, 286):
        refuses('too little to train', prepare, tmp_path / f'{val}', documents, val_tokens=val)


@pytest.mark.parametrize(
    'length, size, blocks', [(200, 5, 1), (5000, 125, 1), (50000, 200, 11), (1000000, 3125, 16)]
)
def test_one_document_validates_all_over(tmp_path, length, size, blocks):
    """Every character is in one part, once and in order; parts end at spaces; the validation blocks
    lie at equal distances."""
    text = one_document(length)
    (tmp_path / 'a.txt').write_text(text)
    df.main({**DEFAULTS, 'text': str(tmp_path / 'a.txt'), 'data_dir': str(tmp_path / 'd')})
    val, train = (parts_of(tmp_path / 'd', split) for split in ('val', 'train'))
    order = [part for pair in itertools.zip_longest(train, val, fillvalue=b'') for part in pair]
    assert b''.join(order) == text.encode() and all(p[:1].isspace() for p in order[1:] if p)
    assert len(train) == len(val) + 1 and 0.02 < sum(map(len, val)) / length < 0.09
    assert {len(block) // size for block in val} == {1} and len(val) >= blocks
    assert {len(part) // (18 * size) for part in train[1:-1]} <= {1}


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
    for n, cut in ((19, True), (20, False)):  # of 20 documents none is cut
        tokens = prepare(tmp_path / str(n), ['some words of text'] * n, val_tokens=0)
        assert (len(tokens) > 19 * n) is cut


def test_all_suffixes_give_the_same_documents(tmp_path):
    documents = ['first\nline', 'zwei ☕', 'trois'] * 9  # enough to stay whole
    lines = ''.join(json.dumps({'id': 1, 'text': text}) + '\n\n' for text in documents).encode()
    (tmp_path / 'a.jsonl').write_bytes(lines)
    (tmp_path / 'b.jsonl.gz').write_bytes(gzip.compress(lines))
    (tmp_path / 'c.jsonl.xz').write_bytes(lzma.compress(lines))
    parquet(tmp_path / 'd.parquet', 'text', documents)
    for i, text in enumerate(documents):
        (tmp_path / f'e{i:02}.txt').write_text(text)
    some = ', '.join(f'{tmp_path}/e{k}*.txt' for k in range(3)).removeprefix(f'{tmp_path}/')
    for names in ('a.jsonl', 'b.jsonl.gz', 'c.jsonl.xz', 'd.parquet', 'e*.txt', some):
        tokens = prepare(tmp_path / names[:3].replace('.', '_'), text=f'{tmp_path}/{names}')
        assert (tokens == stream_of(documents)).all(), names


def test_shuffle_and_default_validation_share(tmp_path):
    documents, orders = [f'document {i:04d}' for i in range(400)], []
    for k, seed in enumerate((-1, 3, 3, 4)):
        prepare(tmp_path / f'{k}', documents, shuffle_seed=seed, shard_tokens=10**8, val_tokens=0)
        orders.append(parts_of(tmp_path / f'{k}', 'val', 'train'))
        assert len(all_tokens(tmp_path / f'{k}', splits=['val'])) == 400 * 13 // 20
    plain = [text.encode() for text in documents]
    assert orders[0] == plain == sorted(orders[1]) != orders[1] == orders[2] != orders[3]


@pytest.mark.parametrize('name, count', [('bytes', 10_761_435), ('gpt2', 2_074_301)])
def test_demo_shards(tmp_path, name, count):
    with lzma.open(df.DEMO_CORPUS, 'rt', encoding='utf-8') as file:
        rows = [json.loads(line) for line in file]
    whole = {'shard_tokens': 10**8, 'val_tokens': 0}
    tokens, tok = prepare(tmp_path, demo=True, tokenizer=name, **whole), df.get_tokenizer(name)
    parts = np.split(tokens, np.flatnonzero(tokens == tok.eot))[1:]
    found = [tok.decode_bytes(part).decode() for part in parts]
    assert sorted(found) == sorted(row['text'] for row in rows) and found[0] != rows[0]['text']
    assert len(rows) == 233 and len(tokens) == count
    assert 0.04 < len(all_tokens(tmp_path, name, ['val'])) / count < 0.06


def test_other_tokenizer_or_source_is_refused(tmp_path):
    folder, plain, documents = tmp_path / 'd', tmp_path / 'plain', texts(40)
    prepare(folder, documents)
    refuses("with 'bytes', not 'gpt2'", df.find_shards, str(folder), 'train', 'gpt2')
    message = "with tokenizer = 'bytes', not 'gpt2': choose another"
    refuses(message, prepare, folder, documents, tokenizer='gpt2')
    refuses('prepared with source = .*40 documents.* not .*', prepare, folder, documents[1:])
    message = "no train shards in 'nowhere': .*python data_fineweb.py --data_dir=nowhere"
    refuses(message, df.find_shards, 'nowhere', 'train')
    # ready-made shards without meta.json count as GPT-2's
    plain.mkdir()
    df.write_shard(plain / 'fineweb_train_000001.bin', [50256, 5])
    assert len(df.find_shards(str(plain), 'train', 'gpt2')) == 1
    refuses("with 'gpt2', not 'bytes'", df.find_shards, str(plain), 'train', 'bytes')
    refuses(r'shards without meta\.json', prepare, plain, documents)


# ---- fake networks ----


def fake_hub(monkeypatch, repo, commits):
    """The hub's answer to what the branch main is: each commit once."""
    hub = pytest.importorskip('huggingface_hub')

    def repo_info(repo_id, *, revision, repo_type):
        assert (repo_id, revision, repo_type) == (repo, 'main', 'dataset')
        return types.SimpleNamespace(sha=commits.pop(0))

    monkeypatch.setattr(hub, 'repo_info', repo_info)
    return hub


def test_fineweb_stream_and_resume(tmp_path, monkeypatch):
    """The real datasets library streams local parquet files in place of the hub's; a killed
    download continues at a bookmark, of the commit that it was begun with."""
    datasets = pytest.importorskip('datasets')
    documents, real, rows, fail_at = texts(300, seed=5), datasets.load_dataset, [], None
    files = [str(tmp_path / f'{i}.parquet') for i in range(3)]
    for i, file in enumerate(files):
        parquet(file, 'text', documents[i * 100 : i * 100 + 100])

    def spy(row):
        if len(rows) == fail_at:
            raise ConnectionError('reset by peer\nmore')
        rows.append(row)
        return row

    def fake(path, name, split, streaming, revision):
        wanted = 'HuggingFaceFW/fineweb', 'sample-10BT', 'train', 'c0ffee'
        assert (path, name, split, revision) == wanted
        cache = str(tmp_path / 'cache')
        found = real('parquet', data_files=files, split=split, streaming=True, cache_dir=cache)
        return found.map(spy)

    monkeypatch.setattr(datasets, 'load_dataset', fake)
    monkeypatch.setattr(df, 'BOOKMARK_EVERY', 7)
    fake_hub(monkeypatch, 'HuggingFaceFW/fineweb', ['c0ffee'] * 2)
    sizes = {'shard_tokens': 1000, 'val_tokens': 0}  # validation: one whole shard first
    assert (prepare(tmp_path / 'whole', **sizes) == stream_of(documents)).all()
    fail_at, cut = 300 + 217, tmp_path / 'cut'
    message = 'stream HuggingFaceFW/fineweb.*Error: reset by peer: run the same command'
    refuses(message, prepare, cut, **sizes)
    fail_at = None
    prepare(cut, **sizes)
    assert folder_bytes(cut) == folder_bytes(tmp_path / 'whole')
    assert len(rows) < 300 + 217 + 150  # it did not start again from the first document


def test_ready_made_download(tmp_path, monkeypatch):
    hub = fake_hub(monkeypatch, 'kjj0/fineweb10B-gpt2', ['c0ffee'])
    folder, asked, content = tmp_path / 'd', [], None

    def fake(repo_id, filename, *, repo_type, local_dir, revision, force_download):
        wanted = 'kjj0/fineweb10B-gpt2', 'dataset', 'c0ffee'
        assert (repo_id, repo_type, revision) == wanted
        if content is None:
            raise RuntimeError('no network\nat all')
        asked.append((int(filename[-10:-4]), force_download))
        Path(local_dir, filename).write_bytes(content)

    monkeypatch.setattr(hub, 'hf_hub_download', fake)
    gpt2 = {'tokenizer': 'gpt2', 'pretokenized': 2}
    message = 'cannot download fineweb_val_000000.bin of kjj0.*no network'
    refuses(message, prepare, folder, **gpt2)  # the commit is kept from here on
    df.write_shard(tmp_path / 'x.bin', [50256, 7] * 20)
    content = (tmp_path / 'x.bin').read_bytes()
    prepare(folder, **gpt2)
    assert asked == [(0, False), (1, False), (2, False)]
    assert [shard['documents'] for shard in df.read_meta(folder)['shards']] == [20, 20, 20]
    (folder / 'fineweb_train_000001.bin').write_bytes(content[:-1])
    prepare(folder, **gpt2 | {'pretokenized': 3})
    assert asked[3:] == [(1, True), (3, False)] and len(df.read_meta(folder)['shards']) == 4
    content = b'<html>'
    refuses('train_000004.bin: not a token', prepare, folder, **gpt2 | {'pretokenized': 4})


# ---- loaders ----


def make_shards(folder, sizes):
    rng, paths, shards = np.random.default_rng(0), [], []
    for size in sizes:
        paths.append(str(folder / f'fineweb_train_{len(paths) + 1:06d}.bin'))
        shards.append(rng.integers(0, 251, size).tolist())
        df.write_shard(paths[-1], shards[-1])
    return paths, shards


def brute_force(loader, shards, B, T, epochs):
    """[(rows of T + 1 tokens, reset, epoch)] by plain Python lists, in the loader's places, which
    must be of every shard once an epoch."""
    for epoch in range(epochs):
        places = [loader.place(epoch, count) for count in range(len(shards))]
        assert sorted(shard for shard, _ in places) == list(range(len(shards)))
        for shard, first in places:
            data = shards[shard][first:] + shards[shard][:first]
            n = len(data) // B
            if type(loader) is df.StreamLoader:
                streams = [data[b * n : (b + 1) * n] for b in range(B)]
                for w in range((n - 1) // T):
                    yield [stream[w * T : (w + 1) * T + 1] for stream in streams], w == 0, epoch
                continue
            rows = [data[i : i + T + 1] for i in range(0, len(data) - T, T)]
            for i in range(0, len(rows) - B + 1, B):
                yield rows[i : i + B], True, epoch


@pytest.mark.parametrize('loader', [df.StreamLoader, df.SequenceLoader])
@pytest.mark.parametrize('sizes, B, T, world', [
    ([101], 1, 1, 1), ([101], 3, 7, 1), ([97, 64, 211], 4, 5, 2), ([97, 64, 211], 6, 5, 3),
    ([66, 67, 68, 65], 4, 15, 4), ([36], 4, 8, 1),
])  # fmt: skip
@pytest.mark.parametrize('seed', [None, 3])
def test_loader_against_brute_force(tmp_path, loader, sizes, B, T, world, seed):
    """Ranks together have the batch, and from each position another loader goes on alike."""
    (paths, shards), count = make_shards(tmp_path, sizes), 0
    ranks = [loader(paths, B, T, 256, seed, (rank, world)) for rank in range(world)]
    other = loader(paths, B, T, 256, seed)
    for rows, reset, epoch in brute_force(other, shards, B, T, 3):
        state = json.loads(json.dumps(ranks[-1].state_dict()))
        parts, count = [one.next() for one in ranks], count + 1
        x, y = (torch.cat([part[i] for part in parts]) for i in (0, 1))
        assert x.dtype == y.dtype == torch.int64 and parts[0][0].shape == (B // world, T)
        assert x.tolist() == [row[:-1] for row in rows] and y.tolist() == [row[1:] for row in rows]
        assert all(part[2] is reset for part in parts)
        assert all((one.epoch, one.state_dict()) == (epoch, ranks[0].state_dict()) for one in ranks)
        for one in (other, loader(paths, B, T, 256, seed)):
            one.load_state_dict(state)
            assert one.state_dict() == state and torch.equal(one.next()[0], x)
            assert one.state_dict() == ranks[0].state_dict()
    assert count >= 3


def test_loader_refusals(tmp_path):
    paths, _ = make_shards(tmp_path, [97, 35])
    loader, good = df.StreamLoader(paths, 5, 6, 256), {'epoch': 3, 'shard': 1, 'window': 1}
    loader.load_state_dict(good)
    for bad in ({'shard': 2}, {'window': 4}, {'window': -1}, {'epoch': -1}):
        refuses('is none of this data', loader.load_state_dict, {**good, **bad})
    for one in (df.StreamLoader, df.SequenceLoader):
        refuses('000002.bin: 35 tokens are too few for B = 5 rows of T = 7', one, paths, 5, 7, 256)
    df.SequenceLoader(paths, 2, 17, 256)  # 35 = 2 * 17 + 1 is just enough
    message = 'B = 5 rows of T = 6 tokens cannot be shared by world = 2'
    refuses(message, df.SequenceLoader, paths, 5, 6, 256, None, (0, 2))
    short = '000001.bin: 97 validation tokens, 1 fewer than val_tokens = 97 needs'
    refuses(short, df.load_val, paths[:1], 97, 1, 256, error=df.ShardError)
    message = 'val_tokens = 3 cannot be cut into val_streams = 4'
    refuses(message, df.load_val, paths, 3, 4, 256)


@pytest.mark.parametrize('val_tokens, streams', [(60, 5), (63, 5), (7, 7), (150, 4), (160, 3)])
@pytest.mark.parametrize('world', [1, 2, 3, 8])  # uneven shares, also none
def test_validation_streams(tmp_path, val_tokens, streams, world):
    paths, shards = make_shards(tmp_path, [97, 64])  # 160 needs both to the last token
    data, n = sum(shards, []), val_tokens // streams
    shares = [(rank, world) for rank in range(world)]
    parts = [df.load_val(paths, val_tokens, streams, 256, share) for share in shares]
    x, y = (torch.cat([part[i] for part in parts]) for i in (0, 1))
    assert x.dtype == y.dtype == torch.int64
    assert x.tolist() == [data[b * n : b * n + n] for b in range(streams)]
    assert y.tolist() == [data[b * n + 1 : b * n + n + 1] for b in range(streams)]
    rows = np.diff([rank * streams // world for rank in range(world + 1)])
    assert [part[0].shape for part in parts] == [(b, n) for b in rows]


# ---- command line ----


@pytest.mark.parametrize('name', df.VOCAB)
@pytest.mark.parametrize('length', [200, 700, 5000, 50000, 1100000])
def test_the_printed_line_fits_its_text(tmp_path, capsys, monkeypatch, name, length):
    """Its settings load, in a small model and minutes: the loader finds rows, validation its
    tokens."""
    monkeypatch.chdir(tmp_path)
    Path('a.txt').write_text(one_document(length))
    df.main({**DEFAULTS, 'text': 'a.txt', 'tokenizer': name})
    (line,) = [line for line in capsys.readouterr().out.splitlines() if 'python' in line]
    python, script, *arguments = shlex.split(line.split(': ')[1])
    assert os.path.samefile(script, ROOT / 'train_lm.py')
    c = configure({'__file__': script}, arguments, quiet=True)
    folder = f'data/text_{name}'
    assert (c['data_dir'], c['tokenizer'], c['out_dir']) == (folder, name, f'out/text_{name}')
    tokens, V, train = c['tokens_per_step'], df.VOCAB[name], df.find_shards(folder, 'train', name)
    loader = df.StreamLoader(train, tokens // c['block_size'], c['block_size'], V)
    df.load_val(df.find_shards(folder, 'val', name), c['val_tokens'], c['val_streams'], V)
    epochs = c['max_iters'] * tokens / len(loader.shards[0])
    assert c['n_embd'] <= 256 and tokens <= 4096 and epochs < 25
    # as long as the text is worth it
    assert c['max_iters'] in (20, 200) or 20 < c['max_iters'] < 200 and epochs > 15


OK = b'fine ' * 50
MISTAKES = [
    ('--text=nothere.txt', None, "no file 'nothere.txt'"),
    ('--text=.', None, "'.': expected files, of .txt"),
    ('--text=a.jsonl', b'{"text": "a"}\n{"b": "b"}\n', "text 2: no string under the key 'text'"),
    ('--text=a.jsonl', b'{"text": ', 'a.jsonl, text 1: cannot be read: JSONDecodeError'),
    ('--text=a.txt', b'few words', 'a.txt: 9 bytes of text are too few: at least 200'),
    ('--text=a.txt', b'caf\xe9 au lait', 'text 1: cannot be read: UnicodeDecodeError'),
    ('--text=a.jsonl.xz', lzma.compress(b'{"text": "a"}\n' * 99)[:-9], 'text 100: cannot be read'),
    ('--text=a.jsonl.gz', b'x', 'text 1: cannot be read: BadGzipFile'),
    ('--text=a.parquet', b'x' * 99, 'a.parquet, text 1: cannot be read: ArrowInvalid'),
    ('--text=other.parquet', None, "other.parquet, text 1: no string under the key 'text'"),
    ('--text=a.txt --demo=True', OK, 'exclude each other'),
    ('--text=a.txt --tokenizer=gpt5', OK, "tokenizer = 'gpt5': expected one of gpt2, bytes"),
    ('--pretokenized=104', None, 'pretokenized = 104: must be between 0 and 103'),
    ('--pretokenized=3', None, "tokenizer = 'bytes'"),
]


@pytest.mark.parametrize('line, content, message', MISTAKES)
def test_mistakes_are_named(tmp_path, monkeypatch, capsys, line, content, message):
    monkeypatch.chdir(tmp_path)
    parquet('other.parquet', 'other', [1])
    if content is not None:
        Path(line.split()[0].partition('=')[2]).write_bytes(content)
    with pytest.raises((SystemExit, df.DataError)) as error:
        df.main(configure({**vars(df)}, ['--tokenizer=bytes', *line.split()]))
    said = capsys.readouterr().err or str(error.value)
    assert message in said and said.count('\n') < 2
    assert not os.path.exists('data')  # nothing is written on a mistake


def test_a_run_a_mistake_and_ctrl_c(tmp_path):
    (tmp_path / 'ok.txt').write_text('fine ' * 50)
    os.mkfifo(tmp_path / 'slow.jsonl')

    def start(*argv):
        command = [sys.executable, str(ROOT / 'data_fineweb.py'), '--tokenizer=bytes', *argv]
        return forks.Popen(command, cwd=tmp_path, stdout=PIPE, stderr=PIPE, text=True)

    process = start('--text=ok.txt')
    out, err = process.communicate()
    assert process.returncode == 0 and 'config/demo.py --data_dir=data/text_bytes' in out, err
    names = ['fineweb_train_000001.bin', 'fineweb_val_000000.bin', 'meta.json']
    assert sorted(os.listdir(tmp_path / 'data' / 'text_bytes')) == names
    for mistake in (['--text=no.txt'], ['--text=ok.txt', '--data_dir=ok.txt/sub']):
        process = start(*mistake)
        err = process.communicate()[1]
        assert process.returncode == 2 and err.startswith('error: ') and err.count('\n') == 1
    process = start('--text=slow.jsonl')
    with open(tmp_path / 'slow.jsonl', 'w'):  # returns when the script reads: it is at work now
        process.send_signal(signal.SIGINT)
        err = process.communicate()[1]
    assert process.returncode == 130 and 'the same command continues' in err
    assert 'Traceback' not in err

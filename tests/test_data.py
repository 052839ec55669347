"""data_fineweb.py: tokenizers, shards, preparing data, loaders against brute force, mistakes."""

import gzip
import json
import lzma
import os
import random
import shlex
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from test_train import ROOT, mistake

import data_fineweb as df
from configurator import configure, read_script

DEFAULTS = read_script(df.__file__)[0] | {'tokenizer': 'bytes'}


def texts(n, length=250, seed=0):
    """n documents, a few of them empty, some longer than a shard of 97 tokens."""
    rng = random.Random(seed)
    sizes = [rng.choice([0, 1, 5, length // 4, length]) for _ in range(n)]
    return [''.join(rng.choice('abcdef   \n') for _ in range(size)) for size in sizes]


def stream_of(documents):
    return np.concatenate([[255, *document.encode()] for document in documents])


def prepare(folder, documents=(), **changes):
    """The documents' tokens in `folder`, in shards of 97 after one of 50 to validate."""
    config = {**DEFAULTS, 'data_dir': str(folder), 'shard_tokens': 97, 'val_tokens': 50, **changes}
    if documents:
        config['text'] = f'{folder.parent}/a.jsonl'
        lines = [json.dumps({'text': text}) + '\n' for text in documents]
        Path(config['text']).write_text(''.join(lines))
    df.make_shards(config)
    name, splits = config['tokenizer'], ('val', 'train')
    paths = sum((df.find_shards(str(folder), split, name) for split in splits), [])
    return np.concatenate([df.read_shard(path, df.VOCAB[name]) for path in paths])


def refuses(message, function, *args, **more):
    with pytest.raises(df.DataError, match=message) as caught:
        function(*args, **more)
    assert '\n' not in str(caught.value)


# ---- tokenizers, shards ----


@pytest.mark.parametrize('name', ['gpt2', 'bytes'])
def test_round_trip_and_token_bytes(name):
    tok, sizes = df.get_tokenizer(name), df.token_bytes(name)
    assert sizes.shape == (df.VOCAB[name],) and sizes.dtype == np.int64
    assert (sizes[: tok.eot] > 0).all() and sizes[tok.eot :].sum() == 0
    for text in ('', 'naïve ☕ 日本語 🙂\r\n\t  x', '<|endoftext|> is text', 'a' * 3000):
        ids, data = tok.encode(text), text.encode()
        pieces = [tok.decode_bytes([i]) for i in ids]  # a character may be split
        assert tok.eot not in ids and b''.join(pieces) == data and sizes[ids].sum() == len(data)
    assert tok.decode_bytes([tok.eot, *tok.encode('x'), len(sizes) - 1]) == b'x'
    assert tok.decode_bytes(tok.encode('a\ud800b')) == b'a?b'  # a lone surrogate stops no run
    if name == 'gpt2':
        assert tok.encode('Hello world') == [15496, 995]
        assert (df.REAL_VOCAB[name], tok.eot, len(sizes)) == (50257, 50256, 50304)


def test_shard_layout_by_hand(tmp_path):
    path = tmp_path / 's.bin'
    df.write_shard(path, [50256, 1, 258])
    data = path.read_bytes()
    assert data[:12] == b''.join(n.to_bytes(4, 'little') for n in (20240520, 1, 3))
    assert data[12:1024] == bytes(1012) and data[1024:] == bytes([0x50, 0xC4, 1, 0, 2, 1])
    refuses(r's\.bin: a shard holds', df.write_shard, path, [65536])
    deep = np.arange((1 << 22) + 10) // ((1 << 22) + 7) * 300  # test_fuzz.py: damaged ones
    df.write_shard(path, deep)
    message = f's.bin: token 300 at position {len(deep) - 3} is outside'
    refuses(message, df.Loader, [path], 1, 1, 300, True)
    refuses(message, df.load_val, [path], len(deep) - 1, 1, 300)


# ---- preparing data ----


def test_shards_hold_the_stream_whatever_was_killed_before(tmp_path, monkeypatch):
    """Before any write (a shard or meta.json); then the same command."""
    documents, real = texts(125), os.replace
    want = stream_of(documents)  # documents straddle shards, also several
    assert max(map(len, documents)) > 2 * 97
    for n in range(6):
        folder, moves = tmp_path / str(n), iter([real] * n)
        with monkeypatch.context() as patch, pytest.raises(StopIteration):
            patch.setattr(os, 'replace', lambda *paths, moves=moves: next(moves)(*paths))
            prepare(folder, documents)
        (folder / '.fineweb_train_000001.bin.tmp').write_bytes(b'half a file')
        assert (prepare(folder, documents) == want).all()
        assert df.read_meta(folder)['shards'] == [50] + [97] * 95 + [69]
        assert len(os.listdir(folder)) == 98


def test_a_few_documents_validate_all_over(tmp_path):
    """Cut at spaces and shuffled, every part once. Of 20 documents none is cut."""
    for n, cut in ((1, True), (19, True), (20, False)):
        documents, folder = [text for text in texts(60, 60000) if text][:n], tmp_path / str(n)
        tokens = prepare(folder, documents, val_tokens=0, shard_tokens=10**8)
        parts = bytes(tokens.astype(np.uint8)).decode('latin').split('\xff')[1:]
        first = [max(text.find(x) for text in documents) for x in parts[:5] if len(x) > 99]
        for text in documents:
            while text:
                part = max((part for part in parts if text.startswith(part)), key=len)
                parts.remove(part)
                text = text[len(part) :]
                assert not text or text[0].isspace()
        assert not parts and (max(first) > 10000) is cut


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


def test_other_tokenizer_or_source_is_refused(tmp_path):
    folder, plain, documents = tmp_path / 'd', tmp_path / 'plain', texts(120)
    prepare(folder, documents)
    refuses("with 'bytes', not 'gpt2'", df.find_shards, str(folder), 'train', 'gpt2')
    refuses("tokenizer = 'bytes', not 'gpt2': choose", prepare, folder, documents, tokenizer='gpt2')
    refuses('prepared with source = .*120 documents.* not .*', prepare, folder, documents[1:])
    df.write_meta(folder, df.read_meta(folder) | {'finished': False})
    refuses('not prepared to its end', df.find_shards, str(folder), 'train')
    # ready-made shards without meta.json count as GPT-2's
    plain.mkdir()
    df.write_shard(plain / 'fineweb_train_000001.bin', [50256, 5])
    assert len(df.find_shards(str(plain), 'train', 'gpt2')) == 1
    refuses("with 'gpt2', not 'bytes'", df.find_shards, str(plain), 'train', 'bytes')
    refuses(r'shards without meta\.json', prepare, plain, documents)


def test_ready_made_download(tmp_path, monkeypatch):
    """What has come stays; all of the commit that the hub's main was when the folder was begun."""
    hub, folder, asked, content = pytest.importorskip('huggingface_hub'), tmp_path / 'd', [], None
    commits, repo = [types.SimpleNamespace(sha='c0ffee')], ('kjj0/fineweb10B-gpt2', 'dataset')

    def repo_info(repo_id, *, revision, repo_type):
        assert (repo_id, repo_type, revision) == (*repo, 'main')
        return commits.pop()

    def fake(repo_id, filename, *, repo_type, local_dir, revision):
        assert (repo_id, repo_type, revision) == (*repo, 'c0ffee')
        if content is None:
            raise RuntimeError('no network\nat all')
        asked.append(int(filename[-10:-4]))
        Path(local_dir, filename).write_bytes(content)

    monkeypatch.setattr(hub, 'repo_info', repo_info)
    monkeypatch.setattr(hub, 'hf_hub_download', fake)
    gpt2 = {'tokenizer': 'gpt2', 'pretokenized': 2}
    # the commit is kept from here on
    refuses('cannot download fineweb_val_000000.bin of kjj0.*no network', prepare, folder, **gpt2)
    df.write_shard(tmp_path / 'x.bin', [50256, 7] * 40)
    content = (tmp_path / 'x.bin').read_bytes()
    prepare(folder, **gpt2)
    (folder / 'fineweb_train_000001.bin').unlink()
    prepare(folder, **gpt2 | {'pretokenized': 3})
    assert asked == [0, 1, 2, 1, 3] and df.read_meta(folder)['shards'] == [80] * 4
    content = b'<html>'
    refuses('train_000004.bin: not a token', prepare, folder, **gpt2 | {'pretokenized': 4})


def make_shards(folder, sizes):
    rng, paths, shards = np.random.default_rng(0), [], []
    for size in sizes:
        paths.append(str(folder / f'fineweb_train_{len(paths) + 1:06d}.bin'))
        shards.append(rng.integers(0, 251, size).tolist())
        df.write_shard(paths[-1], shards[-1])
    return paths, shards


def brute_force(loader, shards, B, T, epochs):
    """[(rows of T + 1 tokens, reset, epoch)] by plain lists, each shard once an epoch."""
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
    """Ranks together have the batch, and from each position another loader goes on alike."""
    (paths, shards), count = make_shards(tmp_path, sizes), 0
    ranks = [df.Loader(paths, B, T, 256, carries, seed, (rank, world)) for rank in range(world)]
    other = df.Loader(paths, B, T, 256, carries, seed)
    for rows, reset, epoch in brute_force(other, shards, B, T, 3):
        state = json.loads(json.dumps(ranks[-1].state_dict()))
        parts, count = [one.next() for one in ranks], count + 1
        x, y = (torch.cat([part[i] for part in parts]) for i in (0, 1))
        assert x.dtype == y.dtype == torch.int64 and parts[0][0].shape == (B // world, T)
        assert x.tolist() == [row[:-1] for row in rows] and y.tolist() == [row[1:] for row in rows]
        assert all(part[2] is reset for part in parts)
        assert all((one.epoch, one.state_dict()) == (epoch, ranks[0].state_dict()) for one in ranks)
        other.load_state_dict(state)
        assert other.state_dict() == state and torch.equal(other.next()[0], x)
    assert count >= 3


@pytest.mark.parametrize('val_tokens, streams', [(63, 5), (7, 7), (160, 3)])
@pytest.mark.parametrize('world', [1, 3, 8])  # uneven shares, also none
def test_validation_streams(tmp_path, val_tokens, streams, world):
    paths, shards = make_shards(tmp_path, [97, 64])  # 160 needs both to the last token
    data, n = sum(shards, []), val_tokens // streams
    shares = [(rank, world) for rank in range(world)]
    parts = [df.load_val(paths, val_tokens, streams, 256, share) for share in shares]
    x, y = (torch.cat([part[i] for part in parts]) for i in (0, 1))
    assert x.tolist() == [data[b * n : b * n + n] for b in range(streams)]
    assert y.tolist() == [data[b * n + 1 : b * n + n + 1] for b in range(streams)]


# ---- command line ----


@pytest.mark.parametrize('name', df.VOCAB)
@pytest.mark.parametrize('length', [5000, 50000, 1100000])
def test_the_printed_line_fits_its_text(tmp_path, capsys, monkeypatch, name, length):
    """In a small model and minutes: the loader finds rows, validation its tokens."""
    monkeypatch.chdir(tmp_path)
    Path('a.txt').write_text(((ROOT / 'README.md').read_text()[:9000] * 130)[:length])
    df.make_shards({**DEFAULTS, 'text': 'a.txt', 'tokenizer': name})
    (line,) = [line for line in capsys.readouterr().out.splitlines() if 'python' in line]
    python, script, *arguments = shlex.split(line.split(': ')[1])
    c = configure({'__file__': script}, arguments, quiet=True)
    assert (c['tokenizer'], c['out_dir']) == (name, f'out/text_{name}')
    tokens, V = c['tokens_per_step'], df.VOCAB[name]
    train, val = (df.find_shards(c['data_dir'], split, name) for split in ('train', 'val'))
    loader = df.Loader(train, tokens // c['block_size'], c['block_size'], V, True)
    df.load_val(val, c['val_tokens'], c['val_streams'], V)
    epochs = c['max_iters'] * tokens / len(loader.shards[0])
    assert c['n_embd'] <= 256 and tokens <= 4096 and epochs < 25
    # as long as the text is worth it
    assert c['max_iters'] in (20, 200) or 20 < c['max_iters'] < 200 and epochs > 15


OK = b'fine ' * 1000
MISTAKES = [
    ('--text=nothere.txt', None, "no file 'nothere.txt'"),
    ('--text=.', None, "'.': expected files, of .txt"),
    ('--text=a.jsonl', b'{"text": "a"}\n{"b": "b"}\n', "text 2: no string under the key 'text'"),
    ('--text=a.jsonl', b'{"text": ', 'a.jsonl, text 1: cannot be read: JSONDecodeError'),
    ('--text=a.txt', b'few words', 'a.txt: 9 bytes of text are too few: at least 5000'),
    ('--text=a.txt', b'caf\xe9 au lait', 'text 1: cannot be read: UnicodeDecodeError'),
    ('--text=a.jsonl.xz', lzma.compress(b'{"text": "a"}\n' * 99)[:-9], 'text 100: cannot be read'),
    ('--text=a.parquet', b'x' * 99, 'a.parquet, text 1: cannot be read: ArrowInvalid'),
    ('--text=a.txt --demo=True', OK, 'give one of'),
    ('--pretokenized=3', None, "tokenizer = 'bytes'"),
    ('--text=a.txt --data_dir=a.txt/sub', OK, 'a.txt/sub'),
]


@pytest.mark.parametrize('line, content, message', MISTAKES)
def test_mistakes_are_named(tmp_path, monkeypatch, capfd, line, content, message):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path(line.split()[0].partition('=')[2]).write_bytes(content)
    assert message in mistake(capfd, df, ['--tokenizer=bytes', *line.split()])
    assert not os.path.exists('data')  # nothing is written on a mistake

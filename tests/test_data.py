"""Test data_fineweb.py: from documents to shards, resumed after every kind of end, and mistakes."""

import functools
import gzip
import json
import lzma
import os
import random
import shlex
import shutil
import sys
import types
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
from processes import ROOT, output_of, start
from small_runs import assert_refused

import data_fineweb as df
import text
from configurator import Script, configure, run_script
from loader import Loader, find_shards, load_val, read_meta, read_shard

DEFAULTS = Script(df.__file__).defaults | {'tokenizer': 'bytes'}


def make_texts(n, length=250, seed=0):
    """Return n documents; some are empty, others longer than two shards of 97 tokens."""
    rng = random.Random(seed)
    sizes = [rng.choice([0, 1, 5, length // 4, length]) for _ in range(n)]
    return [''.join(rng.choice('abcdef   \n') for _ in range(size)) for size in sizes]


def assert_starts_with(tokens, documents):
    """Assert that these are the tokens of the documents, up to a last shard that is dropped."""
    expected = stream_of(documents)
    assert len(expected) - df.MIN_TOKENS < len(tokens) <= len(expected)
    assert (tokens == expected[: len(tokens)]).all()


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
    paths = [path for split in ('val', 'train') for path in find_shards(folder, split, name)]
    return np.concatenate([read_shard(path, text.VOCAB[name]) for path in paths])


def read_files(folder):
    return {path.name: path.read_bytes() for path in folder.glob('*.bin')}


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch):
    """Do not wait for the disk: the tests write hundreds of files and cut no power."""
    monkeypatch.setattr(os, 'fsync', lambda file: None)


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
    finished = len((read_meta(folder) or {'shards': []})['shards'])
    next_shard = Path(df.shard_path(folder, finished))
    next_shard.with_name(f'.{next_shard.name}.0123.tmp').write_bytes(b'half a file')

    assert (prepare(folder, documents) == stream_of(documents)).all()
    assert read_meta(folder)['shards'] == [50] + [97] * 95 + [69]
    assert not list(folder.glob('.*.tmp')) and len(read_files(folder)) == 97


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


def shard_texts(tokens):
    """Return the documents in byte tokens."""
    return bytes(tokens.astype(np.uint8)).decode('latin').split('\xff')[1:]


@pytest.mark.parametrize('seed', [-1, 1])
@pytest.mark.parametrize('suffix', ['.txt', '.jsonl'])
def test_the_validation_shard_of_few_documents_is_from_all_of_the_text(tmp_path, suffix, seed):
    """Blocks that end at blanks are used once each. In order, or shuffled with a seed."""
    whole = ''.join(f' word{k}' for k in range(20_000))
    content = whole if suffix == '.txt' else json.dumps({'text': whole})
    (tmp_path / f'a{suffix}').write_text(content)
    settings = {'text': str(tmp_path / f'a{suffix}'), 'shuffle_seed': seed}
    tokens = prepare(tmp_path / 'd', **settings, val_tokens=0, shard_tokens=10**8)
    val = read_shard(find_shards(str(tmp_path / 'd'), 'val')[0], 256)
    blocks, places = shard_texts(tokens), [whole.index(x) for x in shard_texts(val)]
    assert len(val) == int(0.05 * len(whole)) and len(places) >= 2
    assert max(places) - min(places) > len(whole) / 4
    assert ''.join(sorted(blocks, key=whole.index)) == whole
    train = [whole.index(x) for x in blocks[len(places) + 1 :]]
    assert (train == sorted(train)) == (seed < 0)


def test_twenty_documents_stay_whole_and_in_order(tmp_path):
    documents = [f'{k} ' * 20_000 for k in range(20)]
    assert (prepare(tmp_path / 'd', documents, shard_tokens=10**6) == stream_of(documents)).all()


def test_a_file_is_read_in_pieces_without_a_change_of_its_tokens(tmp_path, monkeypatch):
    """Also if the documents, whose pieces stay together, are shuffled; and by --dataset."""
    documents = [f'{k} word' * 4000 for k in range(25)]
    for k, document in enumerate(documents):
        (tmp_path / f'{k:02}.txt').write_text(document)
    settings = {'shard_tokens': 10**6, 'text': f'{tmp_path}/*.txt'}
    monkeypatch.setattr(text, 'PART', 12_000)
    assert len(list(text.read_texts([str(tmp_path / '00.txt')]))) > 2
    assert (prepare(tmp_path / 'a', **settings) == stream_of(documents)).all()
    random.Random(3).shuffle(shuffled := list(documents))
    tokens = prepare(tmp_path / 'b', **settings, shuffle_seed=3)
    assert (tokens == stream_of(shuffled)).all()


def test_all_suffixes_give_the_same_documents(tmp_path):
    import pyarrow.parquet

    documents = ['first\nline' * 20, 'zwei ☕' * 20, 'trois' * 30] * 15  # enough to stay whole
    lines = ''.join(json.dumps({'id': 1, 'text': text}) + '\n\n' for text in documents).encode()
    (tmp_path / 'a.jsonl').write_bytes(lines)
    (tmp_path / 'b.jsonl.gz').write_bytes(gzip.compress(lines))
    (tmp_path / 'c.jsonl.xz').write_bytes(lzma.compress(lines))
    table = pyarrow.table({'n': range(len(documents)), 'text': documents})
    pyarrow.parquet.write_table(table, tmp_path / 'd.parquet', row_group_size=40)
    for i, document in enumerate(documents):
        (tmp_path / f'e{i:02}.txt').write_text(document)
    several = f'e0*.txt, {tmp_path}/e[1-4]*.txt'
    for names in ('a.jsonl', 'b.jsonl.gz', 'c.jsonl.xz', 'd.parquet', 'e*.txt', several):
        tokens = prepare(tmp_path / f'from {names[:2]}', text=f'{tmp_path}/{names}')
        assert (tokens == stream_of(documents)).all(), names


def test_a_large_vocabulary_is_written_as_uint32(tmp_path, monkeypatch):
    """With one more entry in the table of tokenizers. The loader reads the shards."""
    entry = text.Vocabulary(
        100_096, 100_000, 4.0, lambda: (lambda text: [90_000 + ord(letter) for letter in text], [])
    )
    monkeypatch.setitem(text.TOKENIZERS, 'wide', entry)
    monkeypatch.setitem(text.VOCAB, 'wide', entry.size)
    documents = make_texts(125)
    tokens = prepare(tmp_path / 'd', documents, tokenizer='wide')
    expected = stream_of(documents).astype(np.int64) + 90_000
    expected[expected == 90_255] = 100_000
    assert tokens.dtype == np.uint32 and (tokens == expected).all()
    x, _, _ = Loader(find_shards(str(tmp_path / 'd'), 'train'), 2, 8, entry.size, True).next()
    assert x[0].tolist() == expected[50:58].tolist()


def test_a_folder_refuses_another_tokenizer_and_another_source(tmp_path):
    folder, documents = tmp_path / 'd', make_texts(120)
    prepare(folder, documents)
    assert_refused("with 'bytes', not 'gpt2'", find_shards, str(folder), 'train', 'gpt2')
    message = "tokenizer = 'bytes', not 'gpt2': choose"
    assert_refused(message, prepare, folder, documents, tokenizer='gpt2')
    message = 'prepared with source = .*120 documents.* not .*'
    assert_refused(message, prepare, folder, documents[1:])


def test_a_missing_shard_is_refused(tmp_path):
    folder, documents = tmp_path / 'd', make_texts(120)
    prepare(folder, documents)
    (folder / 'fineweb_train_000002.bin').unlink()
    message = 'fineweb_train_000002.bin is missing: delete the folder and prepare it again'
    assert_refused(message, prepare, folder, documents)


def test_shards_of_unknown_origin_are_not_replaced(tmp_path):
    (tmp_path / 'd').mkdir()
    (tmp_path / 'd' / 'finewebedu_train_000001.bin').touch()
    assert_refused(r'shards without meta\.json', prepare, tmp_path / 'd', make_texts(120))


# ---- documents to shards: data sets ----


CARD = """---
configs:
- config_name: default
  data_files: "*.jsonl"
---
"""


@pytest.fixture(scope='module')
def local_dataset(tmp_path_factory):
    """Return a folder of two .jsonl files and the documents in them."""
    folder, documents = tmp_path_factory.mktemp('dataset'), make_texts(125)
    write_jsonl(folder / '0.jsonl', documents[:70])
    write_jsonl(folder / '1.jsonl', documents[70:])
    return folder, documents


@pytest.fixture(scope='module')
def described(local_dataset, tmp_path_factory):
    """Return a folder like the last one with a data set card, which is read by `datasets`."""
    folder = tmp_path_factory.mktemp('described') / 'd'
    shutil.copytree(local_dataset[0], folder)
    (folder / 'README.md').write_text(CARD)
    return folder, local_dataset[1]


def test_every_format_of_a_dataset_gives_the_same_documents(local_dataset, described, tmp_path):
    import datasets

    documents = local_dataset[1]
    table = datasets.Dataset.from_dict({'number': range(125), 'body': documents})
    (tmp_path / 'parquet').mkdir()
    table.to_parquet(tmp_path / 'parquet' / 'a.parquet')
    (tmp_path / 'json').mkdir()
    table.to_json(tmp_path / 'json' / 'stress-test.json')  # a format that only `datasets` reads
    table.save_to_disk(tmp_path / 'arrow')
    expected = stream_of(documents)
    for folder in (local_dataset[0], described[0]):
        assert (prepare(tmp_path / f'from {folder.name}', dataset=str(folder)) == expected).all()
    for name in ('parquet', 'json', 'arrow'):
        tokens = prepare(tmp_path / f'from {name}', dataset=str(tmp_path / name), column='body')
        assert (tokens == expected).all(), name


def test_all_files_of_a_folder_are_read_whatever_their_names(tmp_path, capsys):
    """Names with train, test or valid decide nothing, and brackets are part of a name. What is left
    out is named."""
    folder = tmp_path / 'my [data], new'
    names = ('a-test', 'night-train', 'part [1]', 'test/b', 'valid-c')
    documents = [f'{name} {k} ' * 20 for name in names for k in range(10)]
    (folder / 'test').mkdir(parents=True)
    for n, name in enumerate(names):
        write_jsonl(folder / f'{name}.jsonl', documents[10 * n : 10 * n + 10])
    (folder / 'notes.md').write_text('not a document')
    assert_starts_with(prepare(tmp_path / 'd', dataset=str(folder)), documents)
    printed = capsys.readouterr().out
    assert '1 of 6 files are left out: notes.md' in printed
    assert (
        f': 5 files, {sum(path.stat().st_size for path in folder.rglob("*.jsonl"))} bytes'
        in printed
    )
    pattern = f'{folder}/*.jsonl'
    assert_starts_with(prepare(tmp_path / 'e', text=pattern), documents[:30] + documents[40:])
    message = r"has no data set card, .* choose its files with --text='.*/PATTERN'"
    assert_refused(message, prepare, tmp_path / 'f', dataset=str(folder), split='test')


def test_the_txt_files_of_a_folder_are_one_document_each(tmp_path):
    """With the same tokens as by --text, which drops a byte order mark, too."""
    folder = tmp_path / 'books'
    folder.mkdir()
    documents = [f'Chapter {k}\n\nIt rained.\n' * 9 for k in range(30)]
    for k, document in enumerate(documents):
        content = document.replace('\n', '\r\n').encode('utf-8-sig')
        (folder / f'{k:02}.txt').write_bytes(content)
    expected = stream_of(documents)
    assert (prepare(tmp_path / 'a', dataset=str(folder)) == expected).all()
    assert (prepare(tmp_path / 'b', text=f'{folder}/*.txt') == expected).all()


@pytest.mark.parametrize('kind', ['text', 'dataset', 'described'])
def test_a_null_text_is_named_and_can_be_left_out_with_a_count(tmp_path, capsys, monkeypatch, kind):
    """The same folder goes on after its first failure."""
    monkeypatch.setattr(df, 'BATCH', 8)
    folder, documents = tmp_path / 'in', [f'document {k} ' * 9 for k in range(125)]
    write_jsonl(folder / 'a.jsonl', [*documents[:90], None, *documents[90:]])
    if kind == 'described':
        (folder / 'README.md').write_text(CARD)
    source = {'text': f'{folder}/a.jsonl'} if kind == 'text' else {'dataset': str(folder)}
    name = r'in/a\.jsonl' if kind != 'described' else 'in'
    message = rf'{name}, document 91: None is not text .*--skip_bad=True leaves such documents out'
    assert_refused(message, prepare, tmp_path / 'd', **source)
    before = read_files(tmp_path / 'd')
    assert len(before) > 50 or kind == 'text'  # whose files are checked before the work
    assert_starts_with(prepare(tmp_path / 'd', **source, skip_bad=True), documents)
    assert '1 documents that cannot be used were left out' in capsys.readouterr().out
    assert before.items() <= read_files(tmp_path / 'd').items()


def test_a_document_that_cannot_be_tokenized_is_named(tmp_path, monkeypatch):
    def encode(text):
        if 'bad' in text:
            raise ValueError('stack overflow')
        return np.frombuffer(text.encode(), np.uint8)

    monkeypatch.setattr(text.get_tokenizer('bytes'), 'encode_array', encode)
    documents = [f'document {k} ' * 9 for k in range(125)]
    message = r'a\.jsonl, document 101: 3 characters cannot be tokenized: stack overflow: .*--skip'
    given = [*documents[:100], 'bad', *documents[100:]]
    assert_refused(message, prepare, tmp_path / 'd', given)
    assert_starts_with(prepare(tmp_path / 'd', given, skip_bad=True), documents)


@pytest.mark.parametrize('source', ['local_dataset', 'described'])
def test_a_dataset_continues_after_a_kill(source, tmp_path, monkeypatch, request):
    """The kill comes before a shard or a meta.json is written. At most that shard is repeated, no
    document before it is tokenized again, and the files are those of an uninterrupted run."""
    folder, documents = request.getfixturevalue(source)
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
        finished = (read_meta(tmp_path / str(kill)) or {'shards': []})['shards']
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
    df.write_meta(tmp_path / 'd', read_meta(tmp_path / 'd') | {'finished': False})
    prepare(tmp_path / 'd', **settings, shards=2)
    assert len(find_shards(str(tmp_path / 'd'), 'train')) == 4


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


def test_a_lost_network_ends_the_run_and_the_same_command_continues(
    described, tmp_path, monkeypatch
):
    folder, documents = described
    monkeypatch.setattr(df, 'BATCH', 8)
    with monkeypatch.context() as patch:
        break_streams(patch, range(50, 10**6), TimeoutError('timed out'))
        message = 'after document 48: TimeoutError: timed out: run the same command again'
        assert_refused(message, prepare, tmp_path / 'd', dataset=str(folder))
    assert len(read_meta(tmp_path / 'd')['shards']) > 1
    assert (prepare(tmp_path / 'd', dataset=str(folder)) == stream_of(documents)).all()


def test_bad_datasets_are_refused(described, tmp_path, monkeypatch):
    folder, documents = described
    cases = [
        ({'dataset': str(folder), 'column': 'body'}, r"column = 'body'.*Column name \['body'\]"),
        ({'dataset': str(folder), 'split': 'test'}, 'Bad split: test'),
        ({'dataset': str(folder), 'column': 'id'}, 'document 1: 1 is not text'),
        ({'dataset': './nothere'}, 'no such folder, and no name of the Hub'),
    ]
    for n, (changes, message) in enumerate(cases):
        assert_refused(message, prepare, tmp_path / str(n), **changes)
    with monkeypatch.context() as patch:
        break_streams(patch, {9}, ValueError('a damaged file'))
        assert_refused('ValueError: a damaged file', prepare, tmp_path / 'd', dataset=str(folder))


def test_the_revision_of_a_dataset_is_pinned(local_dataset, tmp_path, monkeypatch):
    """The newest commit at the first run is the one that all further runs read."""
    import datasets

    folder, asked, load = local_dataset[0], [], datasets.load_dataset
    commits = ['c0ffee', 'decaf']

    def repo_info(name, revision, repo_type):
        assert (name, revision, repo_type) == ('owner/name', 'main', 'dataset')
        return types.SimpleNamespace(sha=commits.pop(0))

    def load_dataset(name, subset, *, split, revision, streaming):
        asked.append((name, subset, split, revision, streaming))
        return load(str(folder), split=split, streaming=True)

    monkeypatch.setattr(huggingface_hub, 'repo_info', repo_info)
    monkeypatch.setattr(datasets, 'load_dataset', load_dataset)
    settings = {'dataset': 'owner/name', 'subset': 'sample', 'shard_tokens': 1000}
    for shards in (1, 2):
        prepare(tmp_path / 'd', **settings, shards=shards)
    assert asked == [('owner/name', 'sample', 'train', 'c0ffee', True)] * 2
    assert_refused('prepared with source', prepare, tmp_path / 'd', **settings, revision='v2')


# ---- ready-made shards ----


@pytest.fixture
def ready_made(monkeypatch):
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
    assert_refused(message, find_shards, folder, 'train')
    download(folder, shards=3)
    assert ready_made.asked == [0, 1, 2, 1, 3] and read_meta(folder)['shards'] == [80] * 4


def test_a_download_that_failed_is_continued(tmp_path, ready_made):
    folder = tmp_path / 'd'
    ready_made.errors += [ConnectionError('no network\nat all')]
    message = 'cannot download fineweb_val_000000.bin of kjj0.*no network'
    assert_refused(message, download, folder, shards=2)
    df.write_shard(tmp_path / 'x.bin', [50256, 7] * 40)
    ready_made.content = (tmp_path / 'x.bin').read_bytes()
    download(folder, shards=2)
    assert ready_made.asked == [0, 1, 2]


def test_a_ready_made_shard_of_other_content_is_refused(tmp_path, ready_made):
    ready_made.content = b'<html>'
    message = r'fineweb_val_000000\.bin: not a token shard'
    assert_refused(message, download, tmp_path / 'd', shards=1)


# ---- command line ----


@pytest.mark.parametrize('name', text.VOCAB)
@pytest.mark.parametrize('length', [5000, 50000, 1100000])
def test_the_printed_command_trains_on_what_was_prepared(
    tmp_path, capsys, monkeypatch, name, length
):
    """The loader finds its rows and validation its tokens, whatever the length of the text."""
    monkeypatch.chdir(tmp_path)
    Path('a.txt').write_text(((ROOT / 'README.md').read_text()[:9000] * 130)[:length])
    df.make_shards({**DEFAULTS, 'text': 'a.txt', 'tokenizer': name})
    command = capsys.readouterr().out.splitlines()[-1].removeprefix('train on it: ')
    python, script, *argv = shlex.split(command)
    assert (python, script) == ('python', 'train_lm.py')
    monkeypatch.chdir(ROOT)
    c = configure({'__file__': script}, argv, quiet=True)
    monkeypatch.chdir(tmp_path)
    assert c['data_dir'] == f'data/text_{name}' and c['tokenizer'] == name
    train, val = (find_shards(c['data_dir'], split, name) for split in ('train', 'val'))
    Loader(train, c['tokens_per_step'] // c['block_size'], c['block_size'], text.VOCAB[name], True)
    load_val(val, c['val_tokens'], c['val_streams'], text.VOCAB[name])


def test_the_paper_is_proposed_for_as_much_text_as_it_needs():
    assert 'config/small_L2.py' in df.training_command('data/fineweb', 'gpt2', 10**8, [10**8] * 14)
    assert 'config/demo.py' in df.training_command('data/fineweb', 'gpt2', 10**6, [10**8] * 14)


def test_two_processes_that_prepare_one_folder_do_not_break_each_other(tmp_path):
    command = ['data_fineweb.py', '--demo=True', '--tokenizer=bytes', f'--data_dir={tmp_path}/d']
    processes = [start(command) for _ in range(2)]
    for process in processes:
        assert 'train on it: ' in output_of(process)
    assert len(find_shards(str(tmp_path / 'd'), 'train')) == 1


@pytest.mark.skipif(not hasattr(os, 'sched_setaffinity'), reason='only Linux binds to cores')
def test_as_many_threads_encode_as_the_job_may_use(tmp_path, monkeypatch):
    found, pool = [], df.ThreadPoolExecutor
    monkeypatch.setattr(df, 'ThreadPoolExecutor', lambda n: found.append(n) or pool(n))
    monkeypatch.setattr(os, 'sched_getaffinity', lambda process: {3})
    prepare(tmp_path / 'd', make_texts(120))
    assert found == [1]


def test_a_name_that_a_terminal_cannot_show_is_no_error(tmp_path):
    (tmp_path / 'naïve ☕.txt').write_text('fine ' * 1000)
    argv = [f'--text={tmp_path}/naïve ☕.txt', '--tokenizer=bytes', f'--data_dir={tmp_path}/d']
    env = os.environ | {'PYTHONIOENCODING': 'ascii'}
    process = start(['data_fineweb.py', *argv], env=env)
    assert '?.txt: 1 documents' in output_of(process)


TEXT = b'fine ' * 1000
MISTAKES = [  # arguments, content of the file that the first one names, message
    ('--text=nothere.txt', None, "no file 'nothere.txt'"),
    ('--text=.', None, "'.': expected files of .txt"),
    ('--text=a.jsonl', b'{"text": "a"}\n{"b": "b"}\n', 'document 2: None is not text'),
    ('--text=a.jsonl', b'{"text": ', 'a.jsonl, document 1: JSONDecodeError'),
    ('--text=a.txt', b'few words', 'a.txt: 9 bytes of text are too few: at least 5000'),
    ('--text=a.txt', b'caf\xe9 au lait', 'document 1: UnicodeDecodeError'),
    (
        '--text=a.jsonl.xz',
        lzma.compress(b'{"text": "a"}\n' * 99)[:-9],
        'cannot be read from document 100 on',
    ),
    ('--text=a.parquet', b'x' * 99, 'a.parquet: cannot be read from document 1 on: ArrowInvalid'),
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


def test_a_missing_package_is_named(described, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, 'datasets', None)  # as if not installed
    message = r"datasets is needed: pip install -U 'datasets>=5\.0\.1'"
    assert_refused(message, prepare, tmp_path / 'd', dataset=str(described[0]))

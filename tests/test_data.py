"""Test data_fineweb.py: from documents to shards, resumed after every kind of end, and mistakes."""

import functools
import gzip
import json
import os
import random
import re
import shlex
import shutil
import textwrap
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from configurator import Script, Settings, configure

import filelock
import huggingface_hub
import numpy as np
import pytest
from processes import ROOT, output_of, start
from small_runs import assert_refused, error_of

import data_fineweb as df
from support.loader import Loader, find_shards, load_val, read_meta, read_shard
from tokenizer import TOKENIZERS, VOCAB, Vocabulary

DEFAULTS = Script(df.__file__).defaults | {'tokenizer': 'bytes'}


RNG = random.Random(0)
LENGTHS = RNG.choices([0, 1, 5, 62, 250], k=125)
DOCUMENTS = [''.join(RNG.choices('abcdef   \n', k=length)) for length in LENGTHS]


def stream_of(documents):
    """Return the byte tokens of the documents, 255 before each."""
    return np.concatenate([[255, *document.encode()] for document in documents])


def write_jsonl(path, documents):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(''.join(json.dumps({'id': 1, 'text': text}) + '\n' for text in documents))


def prepare(folder, documents=None, **changes):
    """Prepare shards of 3,000 byte tokens after one of 50 for validation; return all tokens."""
    sizes = {'shard_tokens': 3000, 'val_tokens': 50}
    config = Settings({**DEFAULTS, **sizes, 'data_dir': str(folder)}, {}, changes)
    df.make_shards(config, documents)
    name = config['tokenizer']
    paths = [path for split in ('val', 'train') for path in find_shards(folder, split, name)]
    return np.concatenate([read_shard(path, VOCAB[name]) for path in paths])


def prepare_until_killed(monkeypatch, writes, folder, **settings):
    """Prepare, and raise KeyboardInterrupt instead of writing a file after `writes` others."""
    written, os_replace = [], os.replace

    def replace(old, new):
        if len(written) == writes:
            raise KeyboardInterrupt
        written.append(new)
        os_replace(old, new)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, 'replace', replace)
        prepare(folder, **settings)


def read_files(folder):
    return {path.name: path.read_bytes() for path in folder.glob('*.bin')}


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch):
    """Do not wait for the disk: the tests write hundreds of files and cut no power."""
    monkeypatch.setattr(os, 'fsync', lambda file: None)


CARD = """---
configs:
- config_name: default
  data_files: "[01].jsonl"
---
"""


def generated():
    yield from DOCUMENTS


@pytest.fixture(scope='module')
def sources(tmp_path_factory):
    """Return the settings that read DOCUMENTS as files, as a folder, and by `datasets` from a
    folder with a data set card, to which a third file does not belong. A bracket is part of a
    folder's name."""
    files = tmp_path_factory.mktemp('files [a]')
    write_jsonl(files / '0.jsonl', DOCUMENTS[:70])
    write_jsonl(files / '1.jsonl', DOCUMENTS[70:])
    described = shutil.copytree(files, tmp_path_factory.mktemp('described') / 'd')
    write_jsonl(described / 'test.jsonl', ['not for training'])
    (described / 'README.md').write_text(CARD)
    return {
        'text': {'text': f'{files}/0.*, {files}/1.jsonl'},
        'folder': {'dataset': str(files)},
        'card': {'dataset': str(described)},
        'function': {'documents': generated},
    }


# ---- documents to shards ----


@pytest.mark.parametrize('source', ['text', 'folder', 'card', 'function'])
def test_a_killed_preparation_continues_with_the_same_bytes(sources, tmp_path, monkeypatch, source):
    """The kill comes before each write of a shard or of meta.json in turn. At most one shard is
    lost, and the shards are not accepted before the end."""
    monkeypatch.setattr(df, 'BATCH', 4)  # batches end within shards, and shards within batches
    settings = sources[source]
    assert (prepare(tmp_path / 'whole', **settings) == stream_of(DOCUMENTS)).all()
    expected = read_files(tmp_path / 'whole')
    assert len(expected) == 5
    for writes in range(12):  # meta.json, five times a shard and meta.json, and meta.json again
        folder = tmp_path / str(writes)
        prepare_until_killed(monkeypatch, writes, folder, **settings)
        assert_refused('no train shards|was interrupted', find_shards, folder, 'train')
        finished = (read_meta(folder) or {'shards': []})['shards']
        assert len(finished) == max(0, (writes - 1) // 2)
        (folder / '.fineweb_train_000001.bin.01230123.tmp').write_bytes(b'half a file')
        prepare(folder, **settings)
        assert read_files(folder) == expected and not list(folder.glob('.*.tmp'))


def test_a_renamed_text_is_the_same_text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path('a.jsonl').write_text(''.join(json.dumps({'text': x}) + '\n' for x in DOCUMENTS))
    before = prepare(Path('d'), text='a.jsonl')
    Path('a.jsonl').rename('b.jsonl')
    assert list(prepare(Path('d'), text='b.jsonl')) == list(before)
    Path('b.jsonl').write_text(json.dumps({'text': 'Another text. ' * 500}) + '\n')
    assert_refused('was prepared with source', prepare, Path('d'), text='b.jsonl')


def test_documents_of_a_function_are_shuffled_counted_and_not_mixed_with_others(tmp_path, capsys):
    rest = prepare(tmp_path, generated, shuffle_seed=1)
    assert sorted(rest) == sorted(stream_of(DOCUMENTS)) and list(rest) != list(stream_of(DOCUMENTS))
    assert f'generated: {len(DOCUMENTS)} documents, ' in capsys.readouterr().out
    assert_refused('was prepared with source', prepare, tmp_path, lambda: DOCUMENTS[1:])
    assert_refused('choose one source', prepare, tmp_path / 'new', generated, demo=True)
    assert_refused(
        'document 2: 7 is not text: --skip_bad', prepare, tmp_path / 'new', lambda: ['a', 7]
    )
    same = generated()
    assert_refused('returned one iterator twice', prepare, tmp_path / 'new', lambda: same)
    assert_refused('returned None: it must yield texts', prepare, tmp_path / 'new', lambda: None)
    assert_refused('takes a function', df.main, functools.partial(generated))
    assert_refused('takes a function', df.main, DOCUMENTS)


def test_the_script_of_the_docstring_prepares_what_its_function_yields(tmp_path):
    code = df.__doc__.partition('bytes`):\n')[2].partition('An end-of-text token')[0]
    (tmp_path / 'squares.py').write_text(textwrap.dedent(code))
    env = os.environ | {'PYTHONPATH': str(ROOT)}
    output_of(start(['squares.py', '--tokenizer=bytes'], cwd=tmp_path, env=env))
    (shard,) = find_shards(tmp_path / 'data/squares_bytes', 'val', 'bytes')
    assert (
        bytes(read_shard(shard, 256)[1:38].tolist()) == b'The square of 0 is 0.\xffThe square of 1'
    )


def test_more_shards_leave_the_finished_ones_unchanged(sources, tmp_path, monkeypatch):
    """Until all that were asked for are there, the folder is not finished."""
    folder, settings = tmp_path / 'd', {**sources['folder'], 'shard_tokens': 1500}
    prepare(folder, **settings, shards=2)
    before = (folder / 'fineweb_train_000001.bin').stat().st_mtime_ns
    prepare_until_killed(monkeypatch, 3, folder, **settings, shards=5)
    assert_refused('was interrupted', find_shards, folder, 'train')
    assert len(prepare(folder, **settings, shards=5)) == 50 + 5 * 1500
    assert (folder / 'fineweb_train_000001.bin').stat().st_mtime_ns == before


def test_a_last_shard_that_is_shorter_than_a_row_is_dropped(tmp_path):
    write_jsonl(tmp_path / 'a.jsonl', ['x' * 99] * 60)
    tokens = prepare(tmp_path / 'd', text=f'{tmp_path}/a.jsonl', shard_tokens=5900)
    assert len(tokens) == 50 + 5900


def test_a_large_share_for_validation_by_default_is_named(tmp_path, capsys):
    write_jsonl(tmp_path / 'set/a.jsonl', ['x' * 99] * 150)  # with each end 100 tokens
    source = {'dataset': f'{tmp_path}/set', 'val_tokens': 0}
    prepare(tmp_path / 'large', shard_tokens=10_000, **source)
    assert '67% of the tokens are for validation' in capsys.readouterr().out
    prepare(tmp_path / 'small', shard_tokens=1000, **source)
    assert 'are for validation' not in capsys.readouterr().out


@pytest.mark.parametrize(
    'suffix, seed, chosen', [('.txt', -1, [0, 20, 40]), ('.jsonl', 1, [119, 81, 20])]
)
def test_the_validation_shard_of_few_documents_is_from_all_of_the_text(
    tmp_path, suffix, seed, chosen
):
    """It is cut at blanks into 120 blocks, of which every 20th validates, or shuffled ones."""
    whole = ''.join(f' word{k}' for k in range(20_000))
    path, folder = tmp_path / f'a{suffix}', tmp_path / 'd'
    path.write_text(whole if suffix == '.txt' else json.dumps({'text': whole}))
    settings = {'shuffle_seed': seed, 'val_tokens': 0, 'shard_tokens': 10**8}
    tokens = prepare(folder, text=str(path), **settings)
    blocks = bytes(tokens.astype(np.uint8)).decode('latin').split('\xff')[1:]
    in_order = sorted(blocks, key=whole.index)
    assert ''.join(in_order) == whole
    assert [in_order.index(block) for block in blocks[:3]] == chosen
    assert read_meta(folder)['shards'][0] == int(0.05 * len(whole))


@pytest.mark.parametrize('blank, val_tokens', [('', 0), (' ', 300)])
def test_the_validation_shard_is_not_the_start_alone(tmp_path, blank, val_tokens):
    """Not of a text without blanks, whose characters take three bytes, nor if it is small."""
    whole = blank.join(chr(0x4E00 + k // 2) for k in range(40_000))
    (tmp_path / 'a.txt').write_text(whole)
    settings = {'val_tokens': val_tokens, 'shard_tokens': 10**8}
    prepare(tmp_path / 'd', text=str(tmp_path / 'a.txt'), **settings)
    shard = read_shard(tmp_path / 'd/fineweb_val_000000.bin', 256)
    blocks = bytes(shard.astype(np.uint8)).split(b'\xff')[1:]
    assert len(blocks) > 1
    assert whole.index(blocks[1].decode(errors='ignore')[:20]) > len(whole) / 10


def test_twenty_documents_stay_whole_in_order_or_shuffled(tmp_path, monkeypatch):
    """Each file is read in pieces, which stay together."""
    monkeypatch.setattr('data_fineweb.PART', 12_000)
    documents = [f'{k} word' * 4000 for k in range(20)]
    for k, document in enumerate(documents):
        (tmp_path / f'{k:02}.txt').write_text(document)
    settings = {'shard_tokens': 10**6, 'text': f'{tmp_path}/*.txt'}
    assert (prepare(tmp_path / 'a', **settings) == stream_of(documents)).all()
    tokens = prepare(tmp_path / 'b', **settings, shuffle_seed=3)
    random.Random(3).shuffle(documents)
    assert (tokens == stream_of(documents)).all()


def test_a_tokenizer_of_more_than_65536_ids_gives_shards_of_uint32(sources, tmp_path, monkeypatch):
    """A tokenizer is an entry of TOKENIZERS."""

    def load():
        return lambda text: [90_000 + ord(letter) for letter in text], []

    monkeypatch.setitem(TOKENIZERS, 'wide', Vocabulary(100_096, 100_000, 4.0, load))
    monkeypatch.setitem(VOCAB, 'wide', 100_096)
    tokens = prepare(tmp_path / 'd', **sources['text'], tokenizer='wide')
    expected = stream_of(DOCUMENTS) + 90_000
    expected[expected == 90_255] = 100_000
    assert tokens.dtype == np.uint32 and (tokens == expected).all()


def test_a_folder_of_other_shards_is_refused_and_left_unchanged(tmp_path, monkeypatch):
    folder, path = tmp_path / 'd', tmp_path / 'a.jsonl'
    write_jsonl(path, DOCUMENTS)
    prepare(folder, text=str(path))
    before = read_files(folder)
    message = "tokenizer = 'bytes', not 'gpt2': choose another --data_dir"
    assert_refused(message, prepare, folder, text=str(path), tokenizer='gpt2')
    with monkeypatch.context() as patch:
        patch.setattr(df.get_tokenizer('bytes'), 'table', [b'edited'] * 256)
        assert_refused('prepared with vocabulary = ', prepare, folder, text=str(path))
    write_jsonl(path, [document[::-1] for document in DOCUMENTS])
    assert_refused('prepared with source = ', prepare, folder, text=str(path))
    (folder / 'meta.json').unlink()
    assert_refused(r'shards without meta\.json', prepare, folder, text=str(path))
    assert read_files(folder) == before


@pytest.mark.parametrize('kind', ['text', 'folder', 'card'])
def test_a_null_text_is_named_or_left_out_with_a_count(tmp_path, capsys, monkeypatch, kind):
    """The same folder continues after the failure."""
    monkeypatch.setattr(df, 'BATCH', 8)
    path, folder = tmp_path / 'in' / '0.jsonl', tmp_path / 'd'
    write_jsonl(path, [*DOCUMENTS[:90], None, *DOCUMENTS[90:]])
    if kind == 'card':
        (path.parent / 'README.md').write_text(CARD)
    source = {'text': str(path)} if kind == 'text' else {'dataset': str(path.parent)}
    message = 'in.*, document 91: None is not text .*--skip_bad=True leaves such documents out'
    assert_refused(message, prepare, folder, **source)
    assert len(read_files(folder)) == (0 if kind == 'text' else 3)
    assert (prepare(folder, **source, skip_bad=True) == stream_of(DOCUMENTS)).all()
    assert '1 documents that cannot be used were left out' in capsys.readouterr().out


def test_a_long_file_that_is_not_utf_8_is_left_out_whole(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr('data_fineweb.PART', 1000)
    for k, document in enumerate(DOCUMENTS):
        (tmp_path / f'{k:03}.txt').write_text(document)
    (tmp_path / '050x.txt').write_bytes(b'word ' * 10_000 + b'\xe9')
    source = {'text': f'{tmp_path}/*.txt', 'skip_bad': True}
    assert (prepare(tmp_path / 'd', **source) == stream_of(DOCUMENTS)).all()
    assert '1 documents that cannot be used were left out' in capsys.readouterr().out


def test_a_second_preparation_of_a_folder_waits_for_the_first(sources, tmp_path):
    folder = tmp_path / 'd'
    folder.mkdir()
    with ThreadPoolExecutor(1) as pool:
        with filelock.FileLock(folder / '.lock'):
            second = pool.submit(prepare, folder, **sources['text'])
            with pytest.raises(TimeoutError):
                second.result(timeout=1)
        assert (second.result() == stream_of(DOCUMENTS)).all()


# ---- texts that are there twice ----

SPEECHES = [f'{k} ' * (100 + k) for k in range(40)]


def repeats_in(capsys):
    """Return what the warning about such documents says: how many of how many, and which."""
    text = r'warning: (\d+) of (\d+) documents of the validation shard are also in .*: numbers (.*)'
    found = re.findall(text, capsys.readouterr().out)
    return (int(found[0][0]), int(found[0][1]), found[0][2]) if found else None


@pytest.mark.parametrize('kind', ['text', 'pair', 'folder', 'datasets'])
def test_validation_documents_that_are_also_in_training_are_counted(tmp_path, capsys, kind):
    """They are in the same file, or in a compressed copy beside it. Numbers 1 and 3 to 5 of the
    validation shard are its documents again; the last of them crosses into the training shard.
    Empty documents do not count."""
    inputs = tmp_path / 'in'
    documents = ['', *SPEECHES[:6], '', *SPEECHES[6:]]
    again = ['', SPEECHES[1], *SPEECHES[3:6]]
    write_jsonl(inputs / 'a.jsonl', documents + again * (kind != 'pair'))
    if kind == 'pair':
        with gzip.open(inputs / 'a.jsonl.gz', 'wt') as file:
            file.writelines(json.dumps({'text': text}) + '\n' for text in again)
    if kind == 'datasets':
        (inputs / 'a.jsonl').rename(inputs / 'a.ndjson')
    val = len(stream_of(documents[:6])) + 9
    source = {'text': f'{inputs}/*'} if kind == 'text' else {'dataset': str(inputs)}
    prepare(tmp_path / 'd', **source, val_tokens=val)
    assert repeats_in(capsys) == (4, 6, '1, 3, 4, 5')
    assert read_meta(tmp_path / 'd')['val_documents_in_training'] == 4
    prepare(tmp_path / 'd', **source, val_tokens=val)
    assert repeats_in(capsys) is None  # the folder was finished before


def test_repeated_documents_are_counted_after_an_interruption(tmp_path, capsys, monkeypatch):
    """The last write, after which the folder counts as finished, comes after the warning."""
    write_jsonl(tmp_path / 'a.jsonl', [*SPEECHES, *SPEECHES[:25]])
    source = {'text': f'{tmp_path}/a.jsonl', 'val_tokens': 2000}
    for writes in (0, 4, 8):
        folder = tmp_path / str(writes)
        prepare_until_killed(monkeypatch, writes, folder, **source)
        prepare(folder, **source)
        assert repeats_in(capsys) == (10, 10, '0, 1, 2, 3, 4, 5, 6, 7, 8, 9')


def test_blocks_of_few_documents_are_compared_and_other_text_is_no_repeat(tmp_path, capsys):
    whole = ''.join(f' word{k}' for k in range(20_000))
    for name in 'ab':
        (tmp_path / f'{name}.txt').write_text(whole)
    settings = {'val_tokens': 0, 'shard_tokens': 10**8}
    prepare(tmp_path / '2', text=f'{tmp_path}/?.txt', **settings)
    found, count, _ = repeats_in(capsys)
    assert found == count > 3
    prepare(tmp_path / '1', text=f'{tmp_path}/a.txt', **settings)
    assert repeats_in(capsys) is None


# ---- data sets ----


@pytest.mark.parametrize('kind', ['jsonl', 'ndjson', 'card'])
def test_a_folder_continues_after_it_was_touched_moved_or_named_otherwise(
    tmp_path, monkeypatch, kind
):
    """But not after a change of a name, a size, or the first or last bytes of a file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(df, 'BATCH', 4)
    suffix = 'ndjson' if kind == 'ndjson' else 'jsonl'
    for k, documents in enumerate((DOCUMENTS[:70], DOCUMENTS[70:])):
        write_jsonl(Path('in', 'sub', f'{k}.{suffix}'), documents)
    if kind == 'card':
        Path('in/README.md').write_text(CARD.replace('[01]', 'sub/*'))
    prepare_until_killed(monkeypatch, 5, Path('d'), dataset='in')
    for file in Path('in').rglob('*'):
        os.utime(file, (1, 1))
    names = ['./in/', f'{tmp_path}/in']
    for name in names:
        prepare_until_killed(monkeypatch, 0, Path('d'), dataset=name)
    Path('in').rename('moved')
    Path('linked').symlink_to('moved')
    prepare_until_killed(monkeypatch, 0, Path('d'), dataset='linked')
    assert (prepare(Path('d'), dataset='moved') == stream_of(DOCUMENTS)).all()

    file = Path('moved/sub', f'1.{suffix}')
    content = file.read_bytes()
    for changed in (content + b'\n', content.replace(b'a', b'b', 1), content[:-9] + b'  "a"}   '):
        file.write_bytes(changed)
        message = "d was prepared with source = 'a folder .*, not .*: choose another --data_dir"
        assert_refused(message, prepare, Path('d'), dataset='moved')
    file.write_bytes(content)
    file.rename(file.with_name(f'2.{suffix}'))
    assert_refused(message, prepare, Path('d'), dataset='moved')


@pytest.mark.parametrize('suffix, package', [('zst', 'zstandard'), ('lz4', 'lz4')])
def test_a_missing_package_for_a_compression_is_named(tmp_path, monkeypatch, suffix, package):
    import fsspec.compression

    monkeypatch.delitem(fsspec.compression.compr, {'zst': 'zstd'}.get(suffix, suffix), False)
    write_jsonl(tmp_path / 'in' / f'a.jsonl.{suffix}', DOCUMENTS)
    message = f'Compression type .* not supported: pip install {package}$'
    assert_refused(message, prepare, tmp_path / 'd', dataset=str(tmp_path / 'in'))


def test_every_format_of_a_dataset_gives_the_same_documents(tmp_path):
    import datasets

    table = datasets.Dataset.from_dict({'body': DOCUMENTS, 'number': range(125)})
    (tmp_path / 'json').mkdir()
    table.to_json(tmp_path / 'json' / 'stress-test.json')  # a format that only `datasets` reads
    table.save_to_disk(tmp_path / 'arrow')
    for name in ('json', 'arrow'):
        tokens = prepare(tmp_path / f'from {name}', dataset=str(tmp_path / name), column='body')
        assert (tokens == stream_of(DOCUMENTS)).all(), name


def test_all_files_of_a_folder_are_read_whatever_their_names(tmp_path, capsys):
    """Names with train, test or valid decide nothing, and brackets are part of a name. A .txt file
    is one document. What is left out is named."""
    folder = tmp_path / 'my [data]'
    documents = [f'{k}\n' * 200 for k in range(30)]
    write_jsonl(folder / 'a-test.jsonl', documents[:10])
    write_jsonl(folder / 'part [1].jsonl', documents[10:20])
    write_jsonl(folder / 'test' / 'b.jsonl', documents[20:29])
    (folder / 'valid.txt').write_text(documents[29])
    (folder / 'notes.md').write_text('not a document')
    assert (prepare(tmp_path / 'd', dataset=str(folder)) == stream_of(documents)).all()
    assert '1 of 5 files are left out: notes.md' in capsys.readouterr().out


def test_a_folder_of_one_data_file_and_its_description(tmp_path, capsys):
    """The kind with most bytes is read. Of less than a shard, a twentieth validates."""
    (tmp_path / 'in').mkdir()
    (tmp_path / 'in' / 'README.md').write_text('# Data')
    rows = [{'text': document} for document in DOCUMENTS]
    (tmp_path / 'in' / 'data.json').write_text(json.dumps(rows))
    sizes = {'shard_tokens': 10**6, 'val_tokens': 0, 'dataset': str(tmp_path / 'in')}
    assert (prepare(tmp_path / 'd', **sizes) == stream_of(DOCUMENTS)).all()
    assert '1 of 2 files are left out: README.md' in capsys.readouterr().out
    assert read_meta(tmp_path / 'd')['shards'][0] == len(stream_of(DOCUMENTS)) // 20
    before = read_files(tmp_path / 'd')
    prepare(tmp_path / 'd', **sizes)
    assert read_files(tmp_path / 'd') == before


def test_bad_datasets_are_refused(sources, tmp_path, monkeypatch):
    import datasets

    cases = [
        ('card', {'column': 'body'}, "column = 'body'"),
        ('folder', {'column': 'id'}, 'document 1: 1 is not text'),
        ('card', {'split': 'test'}, 'Bad split: test'),
        ('folder', {'split': 'test'}, 'has no data set card, .* --text='),
    ]
    for n, (source, changes, message) in enumerate(cases):
        assert_refused(message, prepare, tmp_path / str(n), **sources[source], **changes)

    def lose_network(stream):
        yield {'text': 'a'}
        raise TimeoutError('timed out')

    monkeypatch.setattr(datasets.IterableDataset, '__iter__', lose_network)
    message = 'TimeoutError: timed out: run the same command again'
    assert_refused(message, prepare, tmp_path / 'd', **sources['card'])


@pytest.fixture
def commits(monkeypatch):
    """Let the Hub have the first of these commits now, and the second later."""
    commits = ['c0ffee', 'decaf']

    def repo_info(name, *, revision, repo_type):
        assert (revision, repo_type) == ('main', 'dataset')
        return types.SimpleNamespace(sha=commits.pop(0))

    monkeypatch.setattr(huggingface_hub, 'repo_info', repo_info)


def test_the_revision_of_a_dataset_is_pinned(commits, sources, tmp_path, monkeypatch):
    """The newest commit at the first run is the one that all further runs read."""
    import datasets

    asked, load = [], datasets.load_dataset

    def load_dataset(name, subset, *, split, revision, streaming):
        asked.append((name, subset, split, revision))
        return load(sources['card']['dataset'], split=split, streaming=streaming)

    monkeypatch.setattr(datasets, 'load_dataset', load_dataset)
    settings = {'dataset': 'owner/name', 'subset': 'sample'}
    for shards in (1, 2):
        prepare(tmp_path / 'd', **settings, shards=shards)
    assert asked == [('owner/name', 'sample', 'train', 'c0ffee')] * 2
    assert_refused('prepared with source', prepare, tmp_path / 'd', **settings, revision='v2')


def test_missing_ready_made_shards_are_downloaded_from_one_commit(
    commits, tmp_path, monkeypatch, capsys
):
    """Their documents are compared like all others."""
    folder, asked = tmp_path / 'd', []

    def hf_hub_download(repo_id, filename, *, repo_type, local_dir, revision):
        assert (repo_id, repo_type, revision) == ('kjj0/fineweb10B-gpt2', 'dataset', 'c0ffee')
        asked.append(int(filename[-10:-4]))
        df.write_shard(Path(local_dir, filename), [50256, 7, 50256, asked[-1]] * 20)

    monkeypatch.setattr(huggingface_hub, 'hf_hub_download', hf_hub_download)
    prepare(folder, tokenizer='gpt2', pretokenized=2)
    assert repeats_in(capsys)[:2] == (20, 40)
    (folder / 'fineweb_train_000001.bin').unlink()
    message = 'train_000001.bin is missing: run the same data_fineweb.py command again'
    assert_refused(message, find_shards, folder, 'train')
    prepare(folder, tokenizer='gpt2', pretokenized=3)
    assert asked == [0, 1, 2, 1, 3] and read_meta(folder)['shards'] == [80] * 4

    def fail(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(huggingface_hub, 'hf_hub_download', fail)
    with pytest.raises(KeyboardInterrupt):
        prepare(folder, tokenizer='gpt2', pretokenized=4)
    assert_refused('its preparation was interrupted', find_shards, folder, 'train')
    # Fewer shards, after some of more have arrived: a training run would read all of them.
    df.write_shard(folder / 'fineweb_train_000004.bin', [50256, 7] * 40)
    prepare(folder, tokenizer='gpt2', pretokenized=1)
    assert len(find_shards(folder, 'train')) == 4 and len(read_meta(folder)['shards']) == 5


# ---- command line ----


@pytest.mark.parametrize('source, length, name', [
    ('text', 5000, 'gpt2'),  # fewer rows and validation tokens than the settings'
    ('text', 50_000, 'bytes'),  # fewer validation tokens
    ('sotu', 0, 'bytes'),  # the demo
])  # fmt: skip
def test_the_printed_command_trains_on_what_was_prepared(
    tmp_path, capsys, monkeypatch, source, length, name
):
    """The loader finds its rows and validation its tokens, whatever the length of the text."""
    monkeypatch.chdir(tmp_path)
    Path('a.txt').write_text(((ROOT / 'README.md').read_text()[:9000] * 6)[:length])
    settings = {'text': 'a.txt'} if source == 'text' else {'demo': True}
    df.make_shards(Settings(DEFAULTS, {}, {**settings, 'tokenizer': name}))
    command = capsys.readouterr().out.splitlines()[-1].removeprefix('train on it: ')
    _, script, config, *flags = shlex.split(command)
    c = configure({'__file__': Path(script)}, [config, *flags], quiet=True)
    assert c['data_dir'] == f'data/{source}_{name}' and c['tokenizer'] == name
    train, val = (find_shards(c['data_dir'], split, name) for split in ('train', 'val'))
    Loader(train, c['tokens_per_step'] // c['block_size'], c['block_size'], VOCAB[name], True)
    load_val(val, c['val_tokens'], c['val_streams'], VOCAB[name])


def test_the_paper_is_proposed_for_as_much_text_as_it_needs():
    command = df.training_command('data/fineweb', 'gpt2', 10**8, [10**8] * 14)
    assert 'config/small_L2.py' in command and '--tokenizer' not in command
    command = df.training_command('data/fineweb', 'other', 10**8, [10**8] * 14)
    assert 'config/small_L2.py' in command and '--tokenizer=other' in command
    # A batch of the paper's is longer than this shard.
    command = df.training_command('data/fineweb', 'gpt2', 10**8, [10**8, 110_000])
    assert 'config/demo.py' in command


FILES = {'fine.txt': b'fine ' * 1000, 'few.txt': b'few words', 'latin.txt': b'caf\xe9 au lait'}
MISTAKES = [  # arguments, message
    ('--demo=True --shuffle_seed=1', 'shuffle_seed = 1: this source does not read it'),
    ('--text=fine.txt --shards=2', 'shards = 2: this source does not read it'),
    ('--text=none.txt', "no file 'none.txt'"),
    ('--text=.', "'.': expected files of .txt, .jsonl, .csv, .parquet: --dataset=FOLDER reads"),
    ('--dataset=fine.txt', "dataset = 'fine.txt': a file: give its folder, or use --text=fine.txt"),
    ('--text=few.txt', 'few.txt: 9 bytes of text are too few: at least 5000'),
    ('--text=latin.txt', 'latin.txt, document 1: UnicodeDecodeError'),
    ('--text=fine.txt --demo=True', 'choose one source'),
    ('--pretokenized=3', "tokenizer = 'bytes'"),
    ('--dataset=none/at/all', "'none/at/all': no such folder"),
    ('--text=fine.txt --data_dir=fine.txt/sub', 'fine.txt/sub'),
]


@pytest.mark.parametrize('arguments, message', MISTAKES)
def test_mistakes_are_refused_in_one_line_and_write_nothing(
    tmp_path, monkeypatch, capfd, arguments, message
):
    monkeypatch.chdir(tmp_path)
    for name, content in FILES.items():
        Path(name).write_bytes(content)
    assert message in error_of(capfd, df, ['--tokenizer=bytes', *arguments.split()])
    assert sorted(os.listdir()) == sorted(FILES)

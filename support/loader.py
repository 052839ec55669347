"""Token shards: the files that data_fineweb.py writes, and the batches that train_lm.py reads.

A shard has the format of llm.c and modded-nanogpt: a header of 256 little-endian int32 (20240520,
version, number of tokens, zeros), then the tokens: uint16 in version 1, and uint32 in version 2,
which is ours, for vocabularies of more than 65,536 ids.

Shards of FineWeb, FineWeb-Edu and others that were made elsewhere are read by their names:
NAME_val_000000.bin and NAME_train_000001.bin, or NAME_000000.bin, of which number 0 validates. A
folder has shards of one NAME. Without a meta.json beside them, they count as GPT-2's.
"""

import glob
import os
import re
import zlib

from support.script import UserError, print0

import numpy as np
import torch

from support.files import read_json, write_atomic, write_json

MAGIC = 20240520
HEADER = 256  # length of the header in int32
DTYPES = {1: '<u2', 2: '<u4'}  # of the tokens, by version
READY_MADE = 'kjj0/fineweb10B-gpt2'  # on the Hub: FineWeb's sample-10BT in shards of this format
# What data_fineweb.py writes at the end of a text's `source`: the same for the same content.
CONTENT = re.compile(r'\d+ documents, .*, sha256 .*')
SHARD = re.compile(r'(.+?)(?:_(train|val))?_(\d+)\.bin')  # name, split and number


# ---- files ----


def shard_path(folder: str, index: int) -> str:
    """Return the path of shard `index`: 0 is for validation, the others are for training."""
    split = 'val' if index == 0 else 'train'
    return os.path.join(folder, f'fineweb_{split}_{index:06d}.bin')


def write_shard(path: str | os.PathLike, tokens: np.ndarray | list[int]) -> None:
    """Write tokens (S,) as one shard, completely or not at all: as uint32 if they are of that type
    or too large for uint16. Raises UserError if they do not fit."""
    tokens = np.asarray(tokens)
    is_row = tokens.ndim == 1 and tokens.dtype.kind in 'iu' and 0 < tokens.size < 2**31
    if not is_row or tokens.min() < 0 or tokens.max() >= 2**32:
        raise UserError(f'{path}: a shard holds 1 to 2^31 - 1 tokens in a row, each below 2^32')
    version = 2 if tokens.dtype == np.uint32 or tokens.max() >= 2**16 else 1
    header = np.zeros(HEADER, dtype='<i4')
    header[:3] = MAGIC, version, tokens.size
    data = memoryview(np.ascontiguousarray(tokens, dtype=DTYPES[version])).cast('B')
    write_atomic(path, lambda file: file.writelines([header.tobytes(), data]))


def read_shard(path: str | os.PathLike, vocab_size: int) -> np.memmap:
    """Return the tokens of a shard, a np.memmap of shape (S,).

    Raises UserError if the file is no shard, if its length is not that in the header, or if a token
    is not below `vocab_size`. Every token is compared once, here.
    """
    size = os.path.getsize(path)
    header = np.fromfile(path, dtype='<i4', count=HEADER)
    if len(header) < HEADER or header[0] != MAGIC or header[1] not in DTYPES:
        raise UserError(f'{path}: not a token shard ({MAGIC}, 1 or 2 in a header of 1 kB)')
    dtype = np.dtype(DTYPES[int(header[1])])
    count = int(header[2])
    found = (size - 4 * HEADER) / dtype.itemsize
    if count != found or count < 1:
        raise UserError(
            f'{path}: {count:,} tokens by its header, {found:,.1f} in the file: delete its folder '
            '(a --pretokenized shard alone), and prepare it again'
        )
    tokens = np.memmap(path, dtype=dtype, mode='r', offset=4 * HEADER, shape=(count,))
    step = 1 << 22  # slices that stay in cache
    for start in range(0, count, step):
        if tokens[start : start + step].max() >= vocab_size:
            position = start + int(np.argmax(tokens[start : start + step] >= vocab_size))
            raise UserError(
                f'{path}: token {tokens[position]} at position {position} '
                f'is outside the vocabulary of {vocab_size}'
            )
    return tokens


# ---- folders ----


def read_meta(folder: str | os.PathLike) -> dict | None:
    """Return the folder's meta.json, what its shards were prepared from; None if there is none.
    Raises UserError if it cannot be used."""
    path = os.path.join(folder, 'meta.json')
    if not os.path.exists(path):
        return None
    meta = read_json(path)
    has_tokenizer = isinstance(meta.get('tokenizer'), str)
    if has_tokenizer and isinstance(meta.get('shards'), list) and 'source' in meta:
        return meta
    advice = 'delete the folder and prepare it again'
    raise UserError(f'{path}: no description of token shards: {advice}')


def write_meta(folder: str | os.PathLike, meta: dict) -> None:
    """Write the folder's meta.json."""
    write_json(meta, os.path.join(folder, 'meta.json'))


def refuse_missing(folder: str | os.PathLike, meta: dict, split: str = '') -> None:
    """Raise UserError if a shard (of this split only, if one is given) that the folder's
    description lists is missing."""
    paths = [shard_path(folder, index) for index in range(len(meta['shards']))]
    for path in paths:
        of_split = os.path.basename(path).startswith(f'fineweb_{split}')
        if of_split and not os.path.exists(path):
            advice = 'delete the folder and prepare it again'
            if meta['source'] == READY_MADE:
                advice = 'run the same data_fineweb.py command again'
            raise UserError(f'{path} is missing: {advice}')


def open_meta(folder: str | os.PathLike, **identity: str | int) -> dict:
    """Return the folder's description (meta.json), or a new one with the entries of `identity`.
    Raises UserError if one of these entries differs in the folder's description, if there are
    shards without a description, or if a shard is missing, unless it is ready-made."""
    meta = read_meta(folder)
    if meta is None:
        if glob.glob('*.bin', root_dir=folder):
            raise UserError(f'{folder} holds shards without meta.json: choose another --data_dir')
        return {**identity, 'finished': False, 'shards': []}
    for key, value in identity.items():
        before = meta.get(key, value)  # older versions wrote fewer entries
        content = CONTENT.findall(str(value))  # a text under another name is the same text
        is_same_text = content and content == CONTENT.findall(str(before))
        if before != value and not is_same_text:
            advice = 'choose another --data_dir or delete it'
            raise UserError(
                f'{folder} was prepared with {key} = {before!r}, not {value!r}: {advice}'
            )
    if meta['source'] != READY_MADE:
        refuse_missing(folder, meta)
    return meta


def find_shards(data_dir: str, split: str, tokenizer: str | None = None) -> list[str]:
    """Return the sorted paths of the folder's 'train' or 'val' shards.

    Raises UserError if there are none, or shards of several names; if their preparation was
    interrupted; if one is missing; or if they were prepared with another tokenizer.
    """
    files = sorted(os.listdir(data_dir)) if os.path.isdir(data_dir) else []
    files = [file for file in files if not file.startswith('.')]
    found = {}  # file: name
    for file in files:
        if match := SHARD.fullmatch(file):
            name, marked, number = match.groups()
            if split == (marked or ('train' if int(number) else 'val')):
                found[file] = name
    if not found:
        seen = f', only {", ".join(files[:5])}{", ..." if len(files) > 5 else ""}' if files else ''
        raise UserError(
            f'no {split} shards in {data_dir!r} (NAME_{split}_NUMBER.bin, or NAME_NUMBER.bin, of '
            f'which 000000 validates){seen}: prepare them with data_fineweb.py or data_states.py '
            f'and --data_dir={data_dir}; --help lists the sources'
        )
    if len(names := sorted(set(found.values()))) > 1:
        advice = 'move all but one to other folders'
        raise UserError(f'{data_dir} holds shards of several names, {", ".join(names)}: {advice}')
    meta = read_meta(data_dir) or {'tokenizer': 'gpt2', 'shards': []}
    if not meta.get('finished', True):
        advice = 'run the same command again, of data_fineweb.py or data_states.py'
        raise UserError(f'{data_dir}: its preparation was interrupted: {advice}')
    refuse_missing(data_dir, meta, split)
    prepared = meta['tokenizer']
    if tokenizer not in (None, prepared):
        advice = f'set --tokenizer={prepared} or another data_dir'
        raise UserError(f'{data_dir} was prepared with {prepared!r}, not {tokenizer!r}: {advice}')
    return [os.path.join(data_dir, file) for file in found]


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


def checksum_of(shards: list[list[str | int]]) -> int:
    """Return a checksum of a fingerprint, of training shards and then validation shards. The
    config.json of a run keeps it, so that a finished run counts for its own data only."""
    return zlib.crc32(repr(shards).encode())


def data_checksum(data_dir: str) -> int | None:
    """Return the checksum of a folder's shards today, or None if it has none to train on."""
    try:
        shards = [*find_shards(data_dir, 'train'), *find_shards(data_dir, 'val')]
    except UserError:
        return None
    return checksum_of(fingerprint(shards))


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
    Raises UserError if a shard is too small, or B is not a multiple of `world`.
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
            raise UserError(f'{rows} cannot be shared by {world} ranks')
        self.B = B
        self.T = T
        self.carries = carries
        self.seed = seed
        self.rows = np.arange(rank * B // world, (rank + 1) * B // world)
        self.shards = []
        for path in paths:
            tokens = read_shard(path, V)
            if self.count_windows(tokens) < 1:
                advice = 'lower tokens_per_step or block_size, or prepare more text'
                raise UserError(f'{path}: {len(tokens)} tokens are too few for {rows}: {advice}')
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
        """Continue at a saved position. Raises UserError if this data has no such position at this
        B and T."""
        epoch, shard, window = state['epoch'], state['shard'], state['window']
        valid = epoch >= 0 and window >= 0 and 0 <= shard < len(self.shards)
        if valid:
            self.open_shard(epoch, shard)
            valid = window <= self.windows
        if not valid:
            raise UserError(
                f'loader position {state} does not exist in this data at B = {self.B}, T = {self.T}'
            )
        self.window = window


def load_val(
    paths: list[str], val_tokens: int, val_streams: int, V: int, share: tuple[int, int] = (0, 1)
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs x and targets y, one token later, for validation: int64 of shape (streams, n)
    each, with n = val_tokens // val_streams and about val_streams / world streams per rank.

    The streams are the first val_tokens tokens of the shards, cut into val_streams parts; if there
    are fewer tokens, a line says how many are used. With share = (rank, world), each rank gets its
    part of them. Raises UserError if there are too few for any stream.
    """
    rank, world = share
    tokens = np.zeros(0, np.uint16)
    for path in paths:
        tokens = np.concatenate([tokens, read_shard(path, V)[: val_tokens + 1 - len(tokens)]])
    n = (len(tokens) - 1) // val_streams
    if n < 1:
        raise UserError(
            f'{paths[-1]}, val_tokens = {val_tokens}: {len(tokens) - 1} tokens cannot be cut into '
            f'val_streams = {val_streams} streams: lower val_streams'
        )
    if n < val_tokens // val_streams:
        print0(
            f'{paths[-1]}: {len(tokens):,} tokens, fewer than val_tokens = {val_tokens:,}: '
            f'validation is on {val_streams} streams of {n:,}'
        )
    first, last = rank * val_streams // world, (rank + 1) * val_streams // world
    tokens = torch.from_numpy(tokens[first * n : last * n + 1].astype(np.int64))
    return tokens[:-1].view(last - first, n), tokens[1:].view(last - first, n)

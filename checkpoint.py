"""What every trainer needs: whole-or-nothing files, resumable logs, checkpoints, random states, the device, the output folder, signals.

Files are written to `.NAME.tmp` in the same folder, flushed to the disk and renamed, so that a name never stands for half a file.
Checkpoints hold tensors and plain types only and are read with weights_only=True: a checkpoint from a stranger runs no code.
With several ranks, one rank writes and prepares the folder.
"""

import collections
import contextlib
import ctypes
import datetime
import importlib.util
import json
import math
import os
import pathlib
import pickle
import platform
import random
import re
import signal
import struct
import subprocess
import tempfile
import time
import zipfile
from collections.abc import Callable
from types import FrameType
from typing import BinaryIO

import numpy as np
import torch
import torch.distributed

from configurator import fail, first_line

if tuple(map(int, torch.__version__.split('.')[:2])) < (2, 11):  # none older was ever tried
    fail(f'torch {torch.__version__} is too old: 2.11 or later is needed (pip install torch==2.13.0)')

LAST, PREV, BEST = 'ckpt_last.pt', 'ckpt_prev.pt', 'ckpt_best.pt'
BEGUN = '.begun'  # the folder's run was begun by the torchrun that wrote this last
RUN_FILES = ('ckpt_*.pt', 'log.jsonl', 'config.json', 'loss.png', '*.tfevents.*')  # what a run writes into its folder, and overwrite removes

# What torch.load raises on damaged or foreign files: the unpickler, the storages and the tensors' rebuilding each have their own.
UNREADABLE = (RuntimeError, ValueError, KeyError, TypeError, AttributeError, IndexError, EOFError, OverflowError, pickle.UnpicklingError,
              struct.error)


class CheckpointError(ValueError):
    """A checkpoint cannot be used; the message is one line, names the file and says what to do."""


class OutDirError(ValueError):
    """The output folder cannot be used; the message is one line."""


# -----------------------------------------------------------------------------
# whole-or-nothing files


def sync_folder(folder: str | os.PathLike) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)  # a rename is safe from a power cut only once its folder is on the disk
    finally:
        os.close(descriptor)


def write_atomic(path: str | os.PathLike, write: Callable[[BinaryIO], object], keep: str | None = None) -> None:
    """write(file) fills a binary temporary file, which then takes the name `path`; an existing file goes on as `keep`, if given (a name
    in the same folder). Whatever fails leaves `path` as it was and raises."""
    path = pathlib.Path(path)
    temporary = path.with_name(f'.{path.name}.tmp')
    try:
        with open(temporary, 'wb') as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        if keep is not None and path.exists():
            kept, link = path.with_name(keep), path.with_name(f'.{keep}.tmp')
            link.unlink(missing_ok=True)
            try:
                os.link(path, link)  # a second name, so that `path` exists at every moment
                os.replace(link, kept)
            except OSError:  # a file system without hard links: for a moment only `keep` exists
                os.replace(path, kept)
            link.unlink(missing_ok=True)  # renaming between two names of one file does nothing: happens after a kill right here
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_text(text: str, path: str | os.PathLike) -> None:
    write_atomic(path, lambda file: file.write(text.encode()))


def json_line(obj: object) -> str:
    """JSON as the standard has it: NaN and infinities become null."""

    def plain(x):
        if isinstance(x, float) and not math.isfinite(x):
            return None
        if isinstance(x, dict):
            return {key: plain(value) for key, value in x.items()}
        return [plain(item) for item in x] if isinstance(x, (list, tuple)) else x

    return json.dumps(plain(obj), allow_nan=False)


def write_json(obj: object, path: str | os.PathLike) -> None:
    write_text(json.dumps(json.loads(json_line(obj)), indent=1) + '\n', path)


class JsonlLog:
    """A log of one JSON object a line, on the disk's side of every crash but the machine's own.

    resume_step None starts an empty log. Otherwise the log goes on after that step: later lines (their 'step' is larger) and half-written
    ones are dropped, so that the steps done again appear once; lines without a 'step' stay. A missing log starts empty."""

    def __init__(self, path, resume_step=None):
        lines = []
        if resume_step is not None and os.path.exists(path):
            with open(path, encoding='utf-8', errors='replace') as file:
                lines = [line.rstrip('\n') for line in file]
        write_text(''.join(line + '\n' for line in lines if self.stays(line, resume_step)), path)
        self.file = open(path, 'a', encoding='utf-8')  # noqa: SIM115

    @staticmethod
    def stays(line: str, resume_step: int) -> bool:
        try:
            record = json.loads(line)
            return isinstance(record, dict) and record.get('step', resume_step) <= resume_step
        except (ValueError, TypeError):
            return False

    def write(self, record: dict) -> None:
        self.file.write(json_line(record) + '\n')
        self.file.flush()

    def close(self) -> None:
        self.file.close()


def open_trackers(names: list[str], out_dir: str | os.PathLike, config: dict) -> tuple[Callable[[dict], object], Callable[[], object]]:
    """-> write(record), close() for the trackers named, 'tensorboard' and 'wandb', beside log.jsonl. Imported only here."""
    writes, closes = [], []
    if 'tensorboard' in names:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(out_dir)
        writes.append(lambda r: [writer.add_scalar(k, v, r['step']) for k, v in r.items() if k != 'step' and v is not None])
        closes.append(writer.close)
    if 'wandb' in names:
        import wandb

        run = wandb.init(project='parallel-experts', name=str(out_dir), dir=out_dir, config=config)
        writes.append(lambda r: run.log(r, step=r['step']))
        closes.append(run.finish)
    return lambda record: [write(record) for write in writes], lambda: [close() for close in closes]


def plot_losses(out_dir: str | os.PathLike, unit: str, title: str) -> str:
    """Loss curves of out_dir/log.jsonl, in nats a `unit`, as out_dir/loss.png -> its path."""
    import matplotlib

    matplotlib.use('Agg')
    import matplotlib.pyplot as plt

    with open(os.path.join(out_dir, 'log.jsonl'), encoding='utf-8') as file:
        records = [json.loads(line) for line in file]
    figure, axes = plt.subplots(figsize=(5, 3.4), layout='constrained')
    for key, style in (('train_loss', {'lw': 1, 'color': '#0072B2', 'alpha': 0.6}), ('val_loss', {'marker': 'o', 'ms': 4, 'color': '#D55E00'})):
        points = [(r['tokens'] / 1e6, r[key]) for r in records if r.get(key) is not None]
        axes.plot(*zip(*points, strict=True), label=key.replace('_', ' '), **style)
    axes.set(xlabel=f'training {unit}s (millions)', ylabel=f'loss (nats a {unit})', title=title)
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    path = os.path.join(out_dir, 'loss.png')
    figure.savefig(path, dpi=160)
    return path


# -----------------------------------------------------------------------------
# checkpoints


def check_plain(obj: object, where: str = 'checkpoint') -> None:
    """TypeError, naming the place, for anything that a weights-only load would refuse, or that hides a foreign type (numpy's floats)."""
    if type(obj) in (dict, collections.OrderedDict):
        for key, value in obj.items():
            if type(key) not in (str, int):
                raise TypeError(f'{where}: the key {key!r} is a {type(key).__name__}, not a str or an int')
            check_plain(value, f'{where}[{key!r}]')
    elif type(obj) in (list, tuple):
        for i, item in enumerate(obj):
            check_plain(item, f'{where}[{i}]')
    elif type(obj) not in (torch.Tensor, torch.nn.Parameter, str, int, float, bool, type(None)):
        raise TypeError(f'{where} is a {type(obj).__name__}: only tensors and plain types are saved')


def save_checkpoint(obj: dict, path: str | os.PathLike, keep: str | None = None) -> None:
    """Saves obj (tensors, dict, list, tuple, str, int, float, bool, None) as a whole or not at all; with keep=PREV the checkpoint that
    was at `path` goes on under that name. Raises TypeError for other types, OSError when the disk is full."""
    check_plain(obj)
    def write(file):
        try:
            torch.save(obj, file)
        except RuntimeError as error:  # on a full disk torch complains of a position; what happened comes before
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise

    write_atomic(path, write, keep)


def load_checkpoint(path: str | os.PathLike, device: str = 'cpu') -> dict:
    """-> what save_checkpoint saved, with its tensors on `device`. CheckpointError if it cannot be read."""
    if torch.device(device).type == 'cuda' and not torch.cuda.is_available():
        raise CheckpointError(f'{path}: cannot be loaded on {device}: there is no CUDA device here')
    try:
        with zipfile.ZipFile(path) as file:  # torch's format is a zip file, but torch does not look at its checksums
            if file.testzip() is not None:
                raise zipfile.BadZipFile('wrong checksum')
        return torch.load(path, map_location=device, weights_only=True, mmap=False)
    except FileNotFoundError:
        raise CheckpointError(f'{path}: no such checkpoint: check out_dir') from None
    except torch.OutOfMemoryError:
        raise
    except zipfile.BadZipFile as error:
        raise CheckpointError(f'{path}: damaged, cut short or not a checkpoint ({error}): give another file, or delete it') from None
    except OSError as error:
        raise CheckpointError(f'{path}: cannot be opened: {error.strerror}') from None
    except UNREADABLE as error:
        reason = (str(error).splitlines() or [''])[0][:160]
        if 'Weights only load failed' in reason or 'weights_only' in reason:
            raise CheckpointError(f'{path}: holds Python objects, refused because loading them could run code') from None
        raise CheckpointError(f'{path}: cannot be loaded ({reason}): give another file, or delete it') from None


def load_latest(out_dir: str | os.PathLike, device: str = 'cpu') -> tuple[dict, pathlib.Path]:
    """-> (checkpoint, its path): the last one in the folder or, with a line that says so, the one before. CheckpointError if neither."""
    paths = [pathlib.Path(out_dir, name) for name in (LAST, PREV)]
    if not saved_in(out_dir):
        raise CheckpointError(f'{out_dir}: nothing to resume from, there is no {LAST}: start without --resume')
    try:
        return load_checkpoint(paths[0], device), paths[0]
    except CheckpointError as error:
        if not paths[1].exists():
            raise
        loaded = load_checkpoint(paths[1], device)
        if os.environ.get('RANK', '0') == '0':
            print(f'warning: {error}; going on from {paths[1]}', flush=True)
        return loaded, paths[1]


def load_run(out_dir: str | os.PathLike, script: str, needed: tuple[str, ...], fixed: tuple[str, ...], config: dict,
             file: str | None = None) -> tuple[dict, pathlib.Path]:
    """-> a run's last checkpoint, or that file of its folder, and the path. CheckpointError where it lacks a key of `needed`, or where a
    setting of `fixed`, that would make it another run, differs from config's."""
    where = pathlib.Path(out_dir, file or LAST)
    saved, where = (load_checkpoint(where), where) if file else load_latest(out_dir)
    saved = saved if isinstance(saved, dict) else {}
    missing = [key for key in ('config', *needed) if key not in saved]
    if missing or not isinstance(saved['config'], dict) or any(name not in saved['config'] for name in fixed):
        raise CheckpointError(f'{where}: not a checkpoint of this {script} (missing: {", ".join(missing) or "settings"})')
    for name in fixed:
        if saved['config'][name] != config[name]:
            raise CheckpointError(f'{where}: was trained with {name} = {saved["config"][name]!r}, not {config[name]!r}: '
                                  f'give the same value, or another out_dir')
    return saved, where


def load_optimizer(optimizer: torch.optim.Optimizer, saved: dict) -> None:
    """The saved moments with this run's settings: a resumed run may change learning rates, momentum, decay, and the device."""
    ours = [{key: value for key, value in group.items() if key != 'params'} for group in optimizer.param_groups]
    groups = [{**group, **settings} for group, settings in zip(saved['param_groups'], ours, strict=True)]
    optimizer.load_state_dict({**saved, 'param_groups': groups})


# -----------------------------------------------------------------------------
# random states


def rng_state() -> dict:
    """The states of torch (CPU and the current CUDA device), numpy and random, as save_checkpoint takes them."""
    name, keys, *rest = np.random.get_state()
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return {'torch': torch.get_rng_state(), 'cuda': cuda, 'python': random.getstate(),
            'numpy': [name, [int(key) for key in keys], int(rest[0]), int(rest[1]), float(rest[2])]}  # fmt: skip


def set_rng_state(state: dict) -> None:
    """Restores what rng_state gave; CUDA's part only where both sides have it."""
    torch.set_rng_state(state['torch'].cpu())  # .cpu(): a load may have moved it to the device
    if state['cuda'] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state['cuda'].cpu())
    name, keys, *rest = state['numpy']
    np.random.set_state((name, np.array(keys, np.uint32), *rest))
    version, words, gauss = state['python']
    random.setstate((version, tuple(words), gauss))


# -----------------------------------------------------------------------------
# the device, the ranks, the packages


def pick_device(name: str) -> str:
    """-> 'cpu' or 'cuda:N' for a `device` setting; 'auto' is cuda where there is one. Under torchrun each rank gets its own."""
    kind = ('cuda' if torch.cuda.is_available() else 'cpu') if name == 'auto' else name
    if not re.fullmatch(r'cpu|cuda(:\d+)?', kind):
        raise ValueError(f"device = {name!r}: expected 'auto', 'cpu', 'cuda' or 'cuda:N'")
    if kind.startswith('cuda'):
        if not torch.cuda.is_available():
            raise ValueError(f'device = {name!r}: there is no CUDA device here')
        kind = f'cuda:{os.environ.get("LOCAL_RANK") or kind.partition(":")[2] or 0}'         # set_device wants an index
        if int(kind[5:]) >= torch.cuda.device_count():
            raise ValueError(f'device = {kind!r}: there are {torch.cuda.device_count()} CUDA devices here')
    return kind


def print0(text: str) -> None:
    """Prints on the first rank alone."""
    if os.environ.get('RANK', '0') == '0':
        print(text, flush=True)


def attempt() -> int:
    """How often torchrun --max-restarts has started this process again."""
    return int(os.environ.get('TORCHELASTIC_RESTART_COUNT', 0))


PATIENCE = datetime.timedelta(minutes=10)  # with a rank that does not answer


def join_ranks(device: str, threads: int) -> tuple[int, int, str]:
    """-> rank, world size and device ('cpu' or 'cuda:N') of this process; under torchrun it joins the process group. threads: of a CPU,
    0 for torch's choice."""
    rank, world, kind = int(os.environ.get('RANK', 0)), int(os.environ.get('WORLD_SIZE', 1)), pick_device(device)
    if kind.startswith('cuda'):
        torch.cuda.set_device(kind)
        torch.set_float32_matmul_precision('high')
    elif threads > 0:
        torch.set_num_threads(threads)
    if world > 1:
        # torchrun's store outlives an attempt: without a prefix, ranks that are started again find the addresses of the dead ones
        store, _, _ = next(torch.distributed.rendezvous('env://', timeout=PATIENCE))
        store = torch.distributed.PrefixStore(f'attempt {attempt()}', store)
        torch.distributed.init_process_group('cpu:gloo,cuda:nccl' if kind.startswith('cuda') else 'gloo', store=store, rank=rank, world_size=world, timeout=PATIENCE)
    return rank, world, kind


def last_words(error: RuntimeError, out_dir: str | os.PathLike, less_memory: str) -> str:
    """The line for a RuntimeError that ends a run: no GPU memory, a rank that died or cannot be reached. Any other is raised again."""
    if isinstance(error, torch.OutOfMemoryError):
        return f'out of GPU memory: {less_memory} ({first_line(error)})'
    if isinstance(error, torch.distributed.DistError) or 'gloo/transport' in str(error):
        saved = f'{out_dir} keeps its last checkpoint: --resume=True goes on' if saved_in(out_dir) else 'nothing had been saved yet'
        return f'rank {os.environ.get("RANK")}: another rank died, or cannot be reached; {saved} ({first_line(error)})'
    raise error


def compiles(model: torch.nn.Module, once: Callable[[], object]) -> bool:
    """Runs once(), which compiles what the model's path 'compiled' needs, before any clock runs -> whether that works here."""
    start = time.time()
    try:
        once()
        print0(f'compiled in {time.time() - start:.0f} s')
        works = True
    except torch._dynamo.exc.TorchDynamoException as error:
        print0(f'compile = True does not work here, going on without it ({first_line(error)})')
        works = False
    model.zero_grad(set_to_none=True)
    return works


def need_packages(**asked: bool) -> None:
    """Ends the script where one is asked for and not installed."""
    for name, wanted in asked.items():
        if wanted and importlib.util.find_spec(name) is None:
            fail(f'{name} is asked for but not installed: pip install {name}, or leave it out')


def device_name(kind: str) -> str:
    if kind.startswith('cuda'):
        return torch.cuda.get_device_name(kind)
    try:
        with open('/proc/cpuinfo') as file:
            return 'CPU ' + re.search(r'model name\s*: (.*)', file.read()).group(1)
    except (OSError, AttributeError):
        return f'CPU {platform.processor() or platform.machine()}'


def device_memory(kind: str) -> tuple[float, float]:
    """Bytes of memory that a process may use on the device, and how many of them are free now. Of a CPU's, a tenth is left to everything
    else, a container's limit counts, and processes of one torchrun share. Infinity where the system does not say."""
    if kind.startswith('cuda'):
        free, total = torch.cuda.mem_get_info(kind)
        return float(total), float(free + torch.cuda.memory_reserved(kind))
    def number(path: str, pattern: str) -> float:
        try:
            with open(path) as file:
                return float(re.search(pattern, file.read(), re.M).group(1))
        except (OSError, AttributeError):                      # not Linux, or no limit
            return math.inf
    total, free = (1024 * number('/proc/meminfo', rf'^{name}: +(\d+) kB') for name in ('MemTotal', 'MemAvailable'))
    limit = number('/sys/fs/cgroup/memory.max', r'^(\d+)')
    if math.isfinite(limit):
        cached = number('/sys/fs/cgroup/memory.stat', r'^inactive_file (\d+)')
        total, free = min(total, limit), min(free, limit - number('/sys/fs/cgroup/memory.current', r'^(\d+)') + cached)
    share = int(os.environ.get('LOCAL_WORLD_SIZE', 1))
    return 0.9 * total / share, 0.9 * free / share


def commit() -> str:
    """Of the folder this file is in, '-dirty' where tracked files other than results have changed, 'unknown' outside git."""
    def git(*arguments):
        folder = os.path.dirname(os.path.abspath(__file__))
        return subprocess.run(['git', '-C', folder, *arguments], capture_output=True, text=True, check=True).stdout.strip()
    try:
        return git('rev-parse', '--short=12', 'HEAD') + ('-dirty' if git('status', '--porcelain', '--untracked-files=no', '--', ':(top)', ':(top,exclude)results') else '')
    except (OSError, subprocess.CalledProcessError):
        return 'unknown'


def write_config(config: dict, out_dir: str | os.PathLike, kind: str) -> None:
    """A run's config.json: its settings, and what it runs with."""
    write_json({**config, 'commit': commit(), 'torch': torch.__version__, 'device_name': device_name(kind)}, os.path.join(out_dir, 'config.json'))


def keep_memory() -> None:
    """Keeps freed memory in the process. By default glibc returns large blocks to the system, and a training loop that allocates the same
    ones at every step then pays for clearing their pages again: a fifth of the time on a CPU. Without glibc: nothing."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return
    mallopt(-4, 0)           # M_MMAP_MAX: no block of its own mapping
    mallopt(-1, 2**31 - 1)   # M_TRIM_THRESHOLD: the heap does not shrink


def pick_dtype(name: str, kind: str) -> torch.dtype:
    """-> the dtype of matrix products for a `dtype` setting; 'auto' is bfloat16 where the processor is fast at it."""
    if name not in ('auto', 'float32', 'bfloat16'):
        raise ValueError(f"dtype = {name!r}: expected 'auto', 'float32' or 'bfloat16'")
    cpu_is_fast = torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    fast = torch.cuda.is_bf16_supported() if kind.startswith('cuda') else cpu_is_fast
    return torch.bfloat16 if name == 'bfloat16' or name == 'auto' and fast else torch.float32


# -----------------------------------------------------------------------------
# the output folder


def saved_in(out_dir: str | os.PathLike) -> bool:
    """Whether a run can go on from what the folder holds."""
    return any(os.path.exists(os.path.join(out_dir, name)) for name in (LAST, PREV))


def restarted(out_dir: str | os.PathLike) -> dict[str, bool]:
    """The settings with which a run goes on that torchrun --max-restarts has started again: from its last checkpoint, or from the beginning
    where there is none yet; {} at any other start. For every rank, before prepare_out_dir."""
    if attempt() == 0 or not os.path.exists(os.path.join(out_dir, BEGUN)):
        return {}
    print0(f'started again by torchrun: {"resuming" if saved_in(out_dir) else "nothing was saved, from the beginning"}')
    return {'resume': saved_in(out_dir), 'overwrite': not saved_in(out_dir)}


def prepare_out_dir(out_dir: str | os.PathLike, resume: bool = False, overwrite: bool = False, run_files: tuple[str, ...] = RUN_FILES) -> pathlib.Path:
    """Creates the folder of a run, or checks it -> its pathlib.Path. OutDirError says why not.

    A folder with a run in it (a checkpoint or a log) is refused without resume or overwrite; resume needs a checkpoint. overwrite removes
    the files matching run_files (glob patterns, this folder only) and nothing else. Temporary files of a killed run are removed."""
    if not str(out_dir):
        raise OutDirError('out_dir is empty: name a folder')
    if resume and overwrite:
        raise OutDirError('--resume and --overwrite exclude each other: choose one')
    path = pathlib.Path(out_dir)
    try:
        if attempt() == 0:
            with contextlib.suppress(FileNotFoundError):
                (path / BEGUN).unlink()  # a folder that is refused below is not this launch's, however often it is started again
        if resume and not saved_in(path):
            raise OutDirError(f'{path}: nothing to resume from, there is no {LAST}: start without --resume')
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass  # a folder without write permission, a read-only disk: better now than after the first hour
    except OSError as error:
        reason = 'it is a file' if path.is_file() else error.strerror
        raise OutDirError(f'{path}: cannot be used as the output folder: {reason}') from None
    if not resume and not overwrite and (any(path.glob('ckpt_*.pt')) or (path / 'log.jsonl').exists()):
        raise OutDirError(f'{path}: holds a run already: --resume=True continues it, --overwrite=True replaces it')
    stale = [f'.{pattern}.tmp' for pattern in run_files]
    for pattern in [*stale, *(run_files if overwrite else [])]:
        for file in path.glob(pattern):
            if not file.is_dir():
                file.unlink()
    if 'TORCHELASTIC_RESTART_COUNT' in os.environ:
        (path / BEGUN).touch()
    return path


# -----------------------------------------------------------------------------
# signals


class Stopper:
    """SIGTERM and ctrl-C become a flag: the loop reads `stopper.signal` (None, or the signal's number) between two updates, saves, ends.

    A second ctrl-C raises KeyboardInterrupt at once. Under torchrun a ctrl-C arrives twice, from the terminal and from the launcher, so
    there one within a second of the first does not count. With several ranks the flag must be agreed on (all-reduce) before it is acted
    on. Main thread only."""

    def __init__(self):
        self.signal, self.time = None, 0.0
        self.former = {number: signal.signal(number, self.handle) for number in (signal.SIGTERM, signal.SIGINT)}

    def handle(self, number: int, frame: FrameType | None) -> None:
        again = self.signal == signal.SIGINT and number == signal.SIGINT
        if again and ('RANK' not in os.environ or time.monotonic() - self.time > 1):
            raise KeyboardInterrupt
        if self.signal is None:
            os.write(2, b'\nstopping after this update (ctrl-C again: at once)\n')  # print is not safe inside a handler
        if not again:
            self.signal, self.time = number, time.monotonic()

    def restore(self) -> None:
        """Puts the former handlers back."""
        for number, handler in self.former.items():
            signal.signal(number, handler)

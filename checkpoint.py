"""What every trainer needs: whole-or-nothing files, resumable logs, checkpoints, random states, the device, the output folder, signals.

Files are written to `.NAME.tmp` in the same folder, flushed to the disk and renamed, so that a name never stands for half a file.
Checkpoints hold tensors and plain types only and are read with weights_only=True: a checkpoint from a stranger runs no code.
With several ranks, one rank writes and prepares the folder.
"""

import collections
import contextlib
import ctypes
import datetime
import errno
import fcntl
import importlib.util
import json
import math
import os
import pathlib
import pickle
import platform
import random
import re
import resource
import signal
import stat
import struct
import subprocess
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from types import FrameType

import numpy as np
import torch
import torch.distributed

from configurator import fail, first_line, json_line, write_atomic, write_json, write_text

if tuple(map(int, torch.__version__.split('.')[:2])) < (2, 11):  # none older was ever tried
    fail(
        f'torch {torch.__version__} is too old: 2.11 or later is needed (pip install torch==2.13.0)'
    )

LAST, PREV, BEST = 'ckpt_last.pt', 'ckpt_prev.pt', 'ckpt_best.pt'
LOCK = '.run'  # held while a run is at work in its folder, and the mark that the folder is a run's
MARK = 'a run of Parallel Experts'  # what LOCK says once the folder is ours
OURS = {
    'out_dir',
    'commit',
    'torch',
    'device_name',
}  # of config.json (write_config): the mark of a run that is older than LOCK
BEGUN = '.begun'  # the folder's run was begun by the torchrun that wrote this last
RUN_FILES = (
    'ckpt_*.pt',
    'log.jsonl',
    'config.json',
    'loss.png',
    '*.tfevents.*',
)  # what a run writes into its folder, and overwrite removes

# What torch.load raises on damaged or foreign files: the unpickler, the storages and the tensors' rebuilding each have their own.
UNREADABLE = (
    RuntimeError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    IndexError,
    EOFError,
    OverflowError,
    pickle.UnpicklingError,
    struct.error,
)


class CheckpointError(ValueError):
    """A checkpoint cannot be used; the message is one line, names the file and says what to do."""


class OutDirError(ValueError):
    """The output folder cannot be used; the message is one line."""


class SizeError(ValueError):
    """Settings ask for more than the machine has; the message is one line."""


# -----------------------------------------------------------------------------
# whole-or-nothing files


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
        try:
            self.file.write(json_line(record) + '\n')
            self.file.flush()
        except OSError as error:
            error.filename = self.file.name  # a full disk does not say whose write it refused
            raise

    def close(self) -> None:
        self.file.close()


def open_trackers(
    names: list[str], out_dir: str | os.PathLike, config: dict
) -> tuple[Callable[[dict], object], Callable[[], object]]:
    """-> write(record), close() for the trackers named, 'tensorboard' and 'wandb', beside log.jsonl. Imported only here."""
    writes, closes = [], []
    if 'tensorboard' in names:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(out_dir)
        writes.append(
            lambda r: [
                writer.add_scalar(k, v, r['step'])
                for k, v in r.items()
                if k != 'step' and v is not None
            ]
        )
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
    for key, style in (
        ('train_loss', {'lw': 1, 'color': '#0072B2', 'alpha': 0.6}),
        ('val_loss', {'marker': 'o', 'ms': 4, 'color': '#D55E00'}),
    ):
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
                raise TypeError(
                    f'{where}: the key {key!r} is a {type(key).__name__}, not a str or an int'
                )
            check_plain(value, f'{where}[{key!r}]')
    elif type(obj) in (list, tuple):
        for i, item in enumerate(obj):
            check_plain(item, f'{where}[{i}]')
    elif type(obj) not in (torch.Tensor, torch.nn.Parameter, str, int, float, bool, type(None)):
        raise TypeError(
            f'{where} is a {type(obj).__name__}: only tensors and plain types are saved'
        )


def save_checkpoint(obj: dict, path: str | os.PathLike, keep: str | None = None) -> None:
    """Saves obj (tensors, dict, list, tuple, str, int, float, bool, None) as a whole or not at all; with keep=PREV the checkpoint that
    was at `path` goes on under that name. Raises TypeError for other types, OSError when the disk is full."""
    check_plain(obj)

    def write(file):
        try:
            torch.save(obj, file)
        except (
            RuntimeError
        ) as error:  # on a full disk torch complains of a position; what happened comes before
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise

    write_atomic(path, write, keep)


def load_checkpoint(path: str | os.PathLike, device: str = 'cpu') -> dict:
    """-> what save_checkpoint saved, with its tensors on `device`. CheckpointError if it cannot be read."""
    if torch.device(device).type == 'cuda' and not torch.cuda.is_available():
        raise CheckpointError(f'{path}: cannot be loaded on {device}: there is no CUDA device here')
    try:
        with zipfile.ZipFile(
            path
        ) as file:  # torch's format is a zip file, but torch does not look at its checksums
            if file.testzip() is not None:
                raise zipfile.BadZipFile('wrong checksum')
        return torch.load(path, map_location=device, weights_only=True, mmap=False)
    except FileNotFoundError:
        raise CheckpointError(f'{path}: no such checkpoint: check out_dir') from None
    except torch.OutOfMemoryError:
        raise
    except zipfile.BadZipFile as error:
        raise CheckpointError(
            f'{path}: damaged, cut short or not a checkpoint ({error}): give another file, or delete it'
        ) from None
    except OSError as error:
        raise CheckpointError(f'{path}: cannot be opened: {error.strerror}') from None
    except UNREADABLE as error:
        reason = (str(error).splitlines() or [''])[0][:160]
        if 'Weights only load failed' in reason or 'weights_only' in reason:
            raise CheckpointError(
                f'{path}: holds Python objects, refused because loading them could run code'
            ) from None
        raise CheckpointError(
            f'{path}: cannot be loaded ({reason}): give another file, or delete it'
        ) from None


def load_latest(out_dir: str | os.PathLike, device: str = 'cpu') -> tuple[dict, pathlib.Path]:
    """-> (checkpoint, its path): the last one in the folder or, with a line that says so, the one before. CheckpointError if neither."""
    paths = [pathlib.Path(out_dir, name) for name in (LAST, PREV)]
    if not saved_in(out_dir):
        raise CheckpointError(
            f'{out_dir}: holds no trained run, there is no {LAST}: train one first, or name its out_dir'
        )
    try:
        return load_checkpoint(paths[0], device), paths[0]
    except CheckpointError as error:
        if not paths[1].exists():
            raise
        loaded = load_checkpoint(paths[1], device)
        if os.environ.get('RANK', '0') == '0':
            print(f'warning: {error}; going on from {paths[1]}', flush=True)
        return loaded, paths[1]


def load_run(
    out_dir: str | os.PathLike,
    script: str,
    needed: tuple[str, ...],
    fixed: tuple[str, ...],
    config: dict,
    file: str | None = None,
) -> tuple[dict, pathlib.Path]:
    """-> a run's last checkpoint, or that file of its folder, and the path. CheckpointError where it lacks a key of `needed`, or where a
    setting of `fixed`, that would make it another run, differs from config's."""
    where = pathlib.Path(out_dir, file or LAST)
    saved, where = (load_checkpoint(where), where) if file else load_latest(out_dir)
    saved = saved if isinstance(saved, dict) else {}
    missing = [key for key in ('config', *needed) if key not in saved]
    if (
        missing
        or not isinstance(saved['config'], dict)
        or any(name not in saved['config'] for name in fixed)
    ):
        raise CheckpointError(
            f'{where}: not a checkpoint of this {script} (missing: {", ".join(missing) or "settings"})'
        )
    for name in fixed:
        if saved['config'][name] != config[name]:
            raise CheckpointError(
                f'{where}: was trained with {name} = {saved["config"][name]!r}, not {config[name]!r}: '
                f'give the same value, or another out_dir'
            )
    return saved, where


@contextlib.contextmanager
def restoring(where: str | os.PathLike, key: str) -> Iterator[None]:
    """Around what restores a part of a checkpoint: what does not fit becomes a CheckpointError that names the file and the part."""
    try:
        yield
    except UNREADABLE as error:
        if isinstance(error, CheckpointError) or out_of_memory(error):
            raise
        if isinstance(error, SizeError):
            raise CheckpointError(f'{where}: {error}') from None
        raise CheckpointError(
            f'{where}: {key} does not fit this run, or is damaged ({first_line(error)}): give another out_dir'
        ) from None


def load_weights(
    model: torch.nn.Module, weights: dict, where: str | os.PathLike, assign: bool = False
) -> None:
    """model.load_state_dict(weights), all of them there, of the model's shapes and finite; CheckpointError names the file and the weight.
    assign: the model is on the device 'meta' and takes the tensors themselves."""
    ours = model.state_dict()
    with restoring(where, 'model'):
        strange = [name for name in weights if name not in ours]
        for name, mine in ours.items():
            if not isinstance(weights.get(name), torch.Tensor):
                raise CheckpointError(
                    f'{where}: model: has no weight {name}: not of this model, or damaged'
                )
            if weights[name].shape != mine.shape:
                shapes = f'{list(weights[name].shape)}, not {list(mine.shape)}'
                raise CheckpointError(
                    f'{where}: model: {name} has the shape {shapes}: not of this model, or damaged'
                )
            if not weights[name].isfinite().all():
                raise CheckpointError(
                    f'{where}: model: {name} holds NaN or infinity: these weights are of no use'
                )
        if strange:
            raise CheckpointError(
                f'{where}: model: this model has no weight {strange[0]}: not of this model, or damaged'
            )
        model.load_state_dict(weights, assign=assign)


MOMENTS = {
    'Muon': {'momentum_buffer'},
    'Adam': {'step', 'exp_avg', 'exp_avg_sq'},
    'AdamW': {'step', 'exp_avg', 'exp_avg_sq'},
}  # of a parameter


def load_optimizer(
    optimizer: torch.optim.Optimizer, saved: dict, where: str | os.PathLike, key: str = 'optimizer'
) -> None:
    """The saved moments with this run's settings: a resumed run may change learning rates, momentum, decay, and the device.
    CheckpointError where a parameter's are missing or of another shape."""
    with restoring(where, key):
        ours = [
            {name: value for name, value in group.items() if name != 'params'}
            for group in optimizer.param_groups
        ]
        groups = [
            {**group, **settings}
            for group, settings in zip(saved['param_groups'], ours, strict=True)
        ]
        optimizer.load_state_dict({**saved, 'param_groups': groups})
        for i, p in enumerate(p for group in optimizer.param_groups for p in group['params']):
            moments, names = optimizer.state.get(p, {}), MOMENTS[type(optimizer).__name__]
            if p.numel() == 0:  # an agent's that has no input there: no gradient, no moments
                continue
            if moments.keys() != names:
                raise ValueError(f'parameter {i} has {sorted(moments)}, not {sorted(names)}')
            if any(x.shape != p.shape for name, x in moments.items() if name != 'step'):
                raise ValueError(
                    f'moments of parameter {i} have another shape than {list(p.shape)}'
                )


def load_optimizers(
    optimizers: list[torch.optim.Optimizer], saved: list, where: str | os.PathLike
) -> None:
    """load_optimizer for each of several."""
    if not isinstance(saved, list) or len(saved) != len(optimizers):
        raise CheckpointError(
            f'{where}: optimizers: expected a list of {len(optimizers)}: damaged, or not of this script'
        )
    for i, (optimizer, its) in enumerate(zip(optimizers, saved, strict=True)):
        load_optimizer(optimizer, its, where, f'optimizers[{i}]')


def load_position(
    run: object, saved: dict, names: tuple[str, ...], where: str | os.PathLike
) -> None:
    """run.NAME = saved[NAME], where it has the type that a run begins with; a dict has that one's keys too."""
    for name in names:
        value, ours = saved[name], getattr(run, name)
        good = type(value) is type(ours) and value == value  # NaN is no position
        if good and isinstance(value, dict):
            good = all(type(value.get(key)) is type(ours[key]) for key in ours)
        if not good or type(value) is int and value < 0:
            raise CheckpointError(
                f'{where}: {name} = {str(value)[:80]!r}: not what a run saves there: damaged'
            )
        setattr(run, name, value)


def fill(mine: torch.Tensor, saved: torch.Tensor) -> None:
    """mine.copy_(saved), of the same shape: copy_ alone would repeat a smaller one. ValueError."""
    if not isinstance(saved, torch.Tensor) or mine.shape != saved.shape:
        raise ValueError(
            f'expected a tensor of shape {list(mine.shape)}, found {list(getattr(saved, "shape", []))}'
        )
    mine.copy_(saved)


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
        kind = f'cuda:{os.environ.get("LOCAL_RANK") or kind.partition(":")[2] or 0}'  # set_device wants an index
        if int(kind[5:]) >= torch.cuda.device_count():
            raise ValueError(
                f'device = {kind!r}: there are {torch.cuda.device_count()} CUDA devices here'
            )
    return kind


def print0(text: str) -> None:
    """Prints on the first rank alone."""
    if os.environ.get('RANK', '0') == '0':
        print(text, flush=True)


def attempt() -> int:
    """How often torchrun --max-restarts has started this process again."""
    return int(os.environ.get('TORCHELASTIC_RESTART_COUNT', 0))


PATIENCE = datetime.timedelta(minutes=10)  # with a rank that does not answer


def set_threads(threads: int) -> None:
    """Of PyTorch's products on a CPU; 0: its own choice. SizeError where the machine has far fewer cores: OpenMP dies of too many."""
    most = max(256, os.cpu_count() or 1)
    if threads > most:
        raise SizeError(
            f'threads = {threads}: at most {most} here, where there are {os.cpu_count()} CPU cores; 0 leaves it to PyTorch'
        )
    if threads > 0:
        torch.set_num_threads(threads)


def join_ranks(device: str, threads: int) -> tuple[int, int, str]:
    """-> rank, world size and device ('cpu' or 'cuda:N') of this process; under torchrun it joins the process group. threads: of a CPU,
    0 for torch's choice."""
    rank, world, kind = (
        int(os.environ.get('RANK', 0)),
        int(os.environ.get('WORLD_SIZE', 1)),
        pick_device(device),
    )
    if kind.startswith('cuda'):
        torch.cuda.set_device(kind)
        torch.set_float32_matmul_precision('high')
    else:
        set_threads(threads)
    if world > 1:
        # torchrun's store outlives an attempt: without a prefix, ranks that are started again find the addresses of the dead ones
        store, _, _ = next(torch.distributed.rendezvous('env://', timeout=PATIENCE))
        store = torch.distributed.PrefixStore(f'attempt {attempt()}', store)
        torch.distributed.init_process_group(
            'cpu:gloo,cuda:nccl' if kind.startswith('cuda') else 'gloo',
            store=store,
            rank=rank,
            world_size=world,
            timeout=PATIENCE,
        )
    return rank, world, kind


def out_of_memory(error: BaseException) -> str:
    """'' or the memory that an error says is used up: 'GPU memory' or 'memory'."""
    if isinstance(error, torch.OutOfMemoryError):
        return 'GPU memory'
    words = (
        'DefaultCPUAllocator',
        "can't allocate memory",
        'std::bad_alloc',
        'Storage size calculation overflowed',
        'integer multiplication overflow',
    )
    full = isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    return 'memory' if full or isinstance(error, MemoryError) else ''


def last_words(
    error: RuntimeError | MemoryError, out_dir: str | os.PathLike, less_memory: str
) -> str:
    """The line for an error that ends a run: no memory, a rank that died or cannot be reached. Any other is raised again."""
    if which := out_of_memory(error):
        return f'out of {which}: {less_memory} ({first_line(error)})'
    if isinstance(error, torch.distributed.DistError) or 'gloo/transport' in str(error):
        saved = (
            f'{out_dir} keeps its last checkpoint: --resume=True goes on'
            if saved_in(out_dir)
            else 'nothing had been saved yet'
        )
        return f'rank {os.environ.get("RANK")}: another rank died, or cannot be reached; {saved} ({first_line(error)})'
    raise error


def check_fits(need: int, what: str, kind: str = 'cpu') -> None:
    """SizeError where `need` bytes, the least that `what` takes, are more than there are. For what no machine holds: found before anything
    is allocated. What fits here may still be too much."""
    if need > (have := device_memory(kind)[0]):
        where = 'this GPU' if kind.startswith('cuda') else 'this machine'
        raise SizeError(
            f'{what}: needs more than {need / 1e9:,.0f} GB of memory, and {where} has {have / 1e9:,.0f}'
        )


LEVEL_OBJECTS = (
    10_000  # bytes that Python takes for a level's modules and tensors, whatever their sizes
)


def check_model(
    build: Callable[[object], torch.nn.Module], config: object, copies: int = 1, kind: str = 'cpu'
) -> None:
    """check_fits for build(config)'s weights in fp32, `copies` times (training keeps gradients and moments), from models of one level and
    of two, without memory for any. config: a dataclass with n_layer."""
    sizes = {name: value for name, value in asdict(config).items() if type(value) is int}
    largest = max(sizes, key=sizes.get)
    what = f'a model of n_layer = {config.n_layer}, n_expert = {config.n_expert}, n_embd = {config.n_embd}'
    try:
        if sizes[largest] >= 2**40:
            raise RuntimeError(f'{largest} = {sizes[largest]}')
        with torch.device('meta'):
            one, two = (
                sum(p.numel() for p in build(replace(config, n_layer=n)).parameters())
                for n in (1, 2)
            )
    except RuntimeError as error:
        raise SizeError(f'{what}: larger than any machine ({first_line(error)})') from None
    total, objects = one + (config.n_layer - 1) * (two - one), config.n_layer * LEVEL_OBJECTS
    check_fits(4 * copies * total + objects, f'{what}, {total:,} parameters', kind)


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
        except (OSError, AttributeError):  # not Linux, or no limit
            return math.inf

    total, free = (
        1024 * number('/proc/meminfo', rf'^{name}: +(\d+) kB')
        for name in ('MemTotal', 'MemAvailable')
    )
    limit = number('/sys/fs/cgroup/memory.max', r'^(\d+)')
    if math.isfinite(limit):
        cached = number('/sys/fs/cgroup/memory.stat', r'^inactive_file (\d+)')
        total, free = (
            min(total, limit),
            min(free, limit - number('/sys/fs/cgroup/memory.current', r'^(\d+)') + cached),
        )
    most = resource.getrlimit(resource.RLIMIT_AS)[0]  # ulimit -v
    if most != resource.RLIM_INFINITY:
        total, free = min(total, most), min(free, most)
    share = int(os.environ.get('LOCAL_WORLD_SIZE', 1))
    return 0.9 * total / share, 0.9 * free / share


def commit() -> str:
    """Of the folder this file is in, '-dirty' where tracked files other than results have changed, 'unknown' outside git."""

    def git(*arguments):
        folder = os.path.dirname(os.path.abspath(__file__))
        return subprocess.run(
            ['git', '-C', folder, *arguments], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return git('rev-parse', '--short=12', 'HEAD') + (
            '-dirty'
            if git(
                'status',
                '--porcelain',
                '--untracked-files=no',
                '--',
                ':(top)',
                ':(top,exclude)results',
            )
            else ''
        )
    except (OSError, subprocess.CalledProcessError):
        return 'unknown'


def write_config(config: dict, out_dir: str | os.PathLike, kind: str) -> None:
    """A run's config.json: its settings, and what it runs with."""
    write_json(
        {
            **config,
            'commit': commit(),
            'torch': torch.__version__,
            'device_name': device_name(kind),
        },
        os.path.join(out_dir, 'config.json'),
    )


def keep_memory() -> None:
    """Keeps freed memory in the process. By default glibc returns large blocks to the system, and a training loop that allocates the same
    ones at every step then pays for clearing their pages again: a fifth of the time on a CPU. Without glibc: nothing."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return
    mallopt(-4, 0)  # M_MMAP_MAX: no block of its own mapping
    mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: the heap does not shrink


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
    print0(
        f'started again by torchrun: {"resuming" if saved_in(out_dir) else "nothing was saved, from the beginning"}'
    )
    return {'resume': saved_in(out_dir), 'overwrite': not saved_in(out_dir)}


HELD: dict[pathlib.Path, int] = {}  # folders that this process is at work in, and their LOCK, open


def hold(out_dir: str | os.PathLike) -> None:
    """One run a folder: this process holds its LOCK until `release`, or its own end, whatever ends it. OutDirError where another has it."""
    path = pathlib.Path(out_dir).resolve()
    if path in HELD:
        return
    descriptor = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        said = os.read(descriptor, 200).decode(errors='replace').strip()
        os.close(descriptor)
        raise OutDirError(
            f'{out_dir}: another run is at work in it ({said or "its process is not known"}): '
            'wait for its end, stop it, or choose another out_dir'
        ) from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL):
            raise
        print0(
            f'warning: {out_dir} is on a disk without locks ({error.strerror}): see to it that no other run uses it'
        )
    HELD[path] = descriptor


def release(out_dir: str | os.PathLike) -> None:
    """Ends `hold`, if it was. The file stays: it is the folder's mark."""
    descriptor = HELD.pop(pathlib.Path(out_dir).resolve(), None)
    if descriptor is not None:
        os.close(descriptor)


def is_ours(path: pathlib.Path) -> bool:
    """Whether a folder carries a run's mark: LOCK as prepare_out_dir leaves it or, of older runs, the config.json of write_config."""
    try:
        if (path / LOCK).read_text(errors='replace').startswith(MARK):
            return True
    except OSError:
        pass
    try:
        config = json.loads((path / 'config.json').read_text(encoding='utf-8'))
        return isinstance(config, dict) and config.keys() >= OURS
    except (OSError, ValueError, RecursionError):
        return False


def prepare_out_dir(
    out_dir: str | os.PathLike,
    resume: bool = False,
    overwrite: bool = False,
    run_files: tuple[str, ...] = RUN_FILES,
) -> pathlib.Path:
    """Creates the folder of a run, or checks it, and holds it (see `hold`) -> its pathlib.Path. OutDirError says why not.

    A folder with a run in it (a checkpoint or a log) is refused without resume or overwrite; resume needs a checkpoint. overwrite removes
    the files matching run_files (glob patterns, this folder only) and nothing else. Files of these names in a folder that carries no mark
    of ours are somebody else's: refused, with overwrite too. Temporary files of a killed run are removed."""
    if not str(out_dir):
        raise OutDirError('out_dir is empty: name a folder')
    if resume and overwrite:
        raise OutDirError('--resume and --overwrite exclude each other: choose one')
    path = pathlib.Path(out_dir)
    try:
        if attempt() == 0:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                (
                    path / BEGUN
                ).unlink()  # a folder that is refused below is not this launch's, however often it is started again
        if resume and not saved_in(path):
            raise OutDirError(
                f'{path}: nothing to resume from, there is no {LAST}: start without --resume'
            )
        if not resume:
            path.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            check_strangers(
                path, ['config.json'] if resume else run_files
            )  # before anything is written into it
            hold(path)
        with tempfile.TemporaryFile(dir=path):
            pass  # a folder without write permission, a read-only disk: better now than after the first hour
        if (
            not resume
            and not overwrite
            and (any(path.glob('ckpt_*.pt')) or (path / 'log.jsonl').exists())
        ):
            raise OutDirError(
                f'{path}: holds a run already: --resume=True continues it, --overwrite=True replaces it'
            )
    except OSError as error:
        release(path)
        reason = 'it is a file' if path.is_file() else error.strerror
        raise OutDirError(f'{path}: cannot be used as the output folder: {reason}') from None
    except OutDirError:
        release(path)
        raise
    if not resume or is_ours(
        path
    ):  # a lone checkpoint is resumed, but makes the folder ours only once it was read
        os.pwrite(
            HELD[path.resolve()],
            f'{MARK}: process {os.getpid()} on {platform.node()}'.ljust(120).encode() + b'\n',
            0,
        )
    stale = [f'.{pattern}.tmp' for pattern in run_files]
    for pattern in [*stale, *(run_files if overwrite else [])]:
        for file in path.glob(pattern):
            if not file.is_dir():
                file.unlink()
    if 'TORCHELASTIC_RESTART_COUNT' in os.environ:
        (path / BEGUN).touch()
    return path


def check_strangers(path: pathlib.Path, patterns: Iterable[str]) -> None:
    """OutDirError where a folder that is no run's holds files of these names: a run in it would replace or mix them."""
    found = sorted(
        file.name for pattern in patterns for file in path.glob(pattern) if not file.is_dir()
    )
    if found and not is_ours(path):
        raise OutDirError(
            f'{path}: holds {found[0]}, which no run of ours wrote: choose another out_dir, or move it away yourself'
        )


# -----------------------------------------------------------------------------
# signals


def leave_terminal() -> None:
    """What is still printed to a terminal that has been closed goes nowhere: a write to it would be an error, before the run has saved."""
    null = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        if stat.S_ISCHR(os.fstat(descriptor).st_mode):
            os.dup2(null, descriptor)
    os.close(null)


class Stopper:
    """SIGTERM, ctrl-C and SIGHUP (the terminal was closed; not under nohup) become a flag: the loop reads `stopper.signal` (None, or the
    signal's number) between two updates, saves, ends.

    A second ctrl-C raises KeyboardInterrupt at once. Under torchrun a ctrl-C arrives twice, from the terminal and from the launcher, so
    there one within a second of the first does not count. With several ranks the flag must be agreed on (all-reduce) before it is acted
    on. Main thread only."""

    def __init__(self):
        self.signal, self.time = None, 0.0
        numbers = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        self.former = {number: signal.signal(number, self.handle) for number in numbers}

    def handle(self, number: int, frame: FrameType | None) -> None:
        again = self.signal == signal.SIGINT and number == signal.SIGINT
        if again and ('RANK' not in os.environ or time.monotonic() - self.time > 1):
            raise KeyboardInterrupt
        if number == signal.SIGHUP:
            leave_terminal()
        if self.signal is None:
            os.write(
                2, b'\nstopping after this update (ctrl-C again: at once)\n'
            )  # print is not safe inside a handler
        if not again:
            self.signal, self.time = number, time.monotonic()

    def restore(self) -> None:
        """Puts the former handlers back."""
        for number, handler in self.former.items():
            signal.signal(number, handler)

"""What both trainers share: ranks and the reduction of gradients, the device, checkpoints and
exports, the output folder and signals, logs and trackers.

Checkpoints hold tensors and plain types and are read with weights_only=True: a stranger's
checkpoint cannot run code. With several ranks (torchrun), rank 0 writes.
"""

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
import re
import signal
import stat
import struct
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from configurator import Mistake, fail, first_line, plain, write_atomic, write_json, write_text

import filelock
import psutil
import torch
import torch.distributed as dist

from kernels import bf16_is_fast, may_run_uncompiled

if tuple(map(int, torch.__version__.split('.')[:2])) < (2, 11):  # no earlier version was tried
    fail(f'torch {torch.__version__} is too old: 2.11 or later is needed')

LAST, PREV, BEST = 'ckpt_last.pt', 'ckpt_prev.pt', 'ckpt_best.pt'
WEIGHTS, CONFIG = 'model.safetensors', 'config.json'  # of an export
LOCK = '.run'  # locked while a run uses its folder; its presence marks the folder as a run's
BEGUN = '.begun'  # the id of the torchrun launch that last started a run in the folder
# Files that a run writes into its folder and that `overwrite` removes.
RUN_FILES = 'ckpt_*.pt log.jsonl config.json loss.png curve.png eval_*.json eval_*.gif *.tfevents.*'
TIMEOUT = datetime.timedelta(minutes=10)  # for a rank that does not answer
# FLOP/s of dense bf16 by (a part of) the GPU's name; the first that matches counts.
PEAK_FLOPS = {
    'H100 PCIe': 756e12,
    'H100 NVL': 835e12,
    'H100': 989e12,
    'H200': 989e12,
    'B200': 2250e12,
    'NVIDIA A100': 312e12,
    'L40S': 362e12,
    '4090': 165e12,
}
# What torch.load and load_state_dict raise for damaged or foreign files.
UNREADABLE = (
    RuntimeError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    EOFError,
    ArithmeticError,
    pickle.UnpicklingError,
    struct.error,
)

Path = str | os.PathLike


class CheckpointError(Mistake):
    """A checkpoint or an output folder cannot be used. The message is one line that says why and
    what to do."""


# ---- ranks ----


def restart_count() -> int:
    """Return how often torchrun --max-restarts has restarted this process."""
    return int(os.environ.get('TORCHELASTIC_RESTART_COUNT', 0))


def launch_id() -> str:
    """Return the id of torchrun's launch, which a restart keeps; empty without torchrun."""
    return os.environ.get('TORCHELASTIC_RUN_ID', '')


def print0(text: str) -> None:
    """Print on the first rank alone."""
    if os.environ.get('RANK', '0') == '0':
        try:
            print(text, flush=True)
        except BrokenPipeError:
            if not Stopper.stopping:  # ctrl-C ends `| tee` too, and the run must still save
                raise


def join_ranks(device: str, threads: int) -> tuple[int, int, str]:
    """Return rank, world size and device ('cpu', 'mps' or 'cuda:N') of this process.

    Under torchrun the process joins the process group. device, threads: as for pick_device."""
    rank, world = int(os.environ.get('RANK', 0)), int(os.environ.get('WORLD_SIZE', 1))
    device, backend = pick_device(device, threads), 'gloo'
    if device.startswith('cuda'):
        backend = 'cpu:gloo,cuda:nccl'
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision('high')
    if world > 1:
        # torchrun's store outlives an attempt: without a prefix, restarted ranks would find the
        # addresses of the dead ones.
        store, _, _ = next(dist.rendezvous('env://', timeout=TIMEOUT))
        store = dist.PrefixStore(f'attempt {restart_count()}', store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=TIMEOUT)
    return rank, world, device


def leave(run: object) -> None:
    """Release the run's folder and leave the process group, when all ranks have come here."""
    if run.lock:
        run.lock.release()
    if run.world > 1:
        dist.barrier()
        dist.destroy_process_group()


def gather(local: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """Return the parts that all ranks hold of a tensor, joined along dim, on rank 0 and on the CPU
    (a GPU may lack the memory); on other ranks the local part."""
    local = local.cpu()
    if not dist.is_initialized():
        return local
    first = dist.get_rank() == 0
    parts = [torch.empty_like(local) for _ in range(dist.get_world_size())] if first else None
    dist.gather(local, parts)
    return torch.cat(parts, dim) if first else local


# ---- the reduction of gradients ----


class Gradients:
    """The gradients of a model in one contiguous buffer, with a few numbers behind them.

    The .grad of each parameter is a view of the buffer: a CUDA graph finds it at the same address
    in every replay, one fill clears all gradients, and one message sums them over the ranks.

    params: floating-point parameters of one dtype. n_extra: the length of the vector `extra`,
    whose numbers (such as the loss) are summed over the ranks in the same message."""

    def __init__(self, params: Iterable[torch.nn.Parameter], n_extra: int = 1):
        self.params = list(params)
        # Every view starts at a multiple of 128 bytes, as kernels with vector loads like it.
        sizes = [-(-p.numel() // 32) * 32 for p in self.params]
        self.buffer = self.params[0].detach().new_zeros(sum(sizes) + n_extra)
        *parts, self.extra = self.buffer.split([*sizes, n_extra])
        self.views = [
            part[: p.numel()].view(p.shape) for part, p in zip(parts, self.params, strict=True)
        ]
        self.zero()

    def zero(self) -> None:
        """Clear gradients and `extra`, and make every .grad its view again."""
        self.buffer.zero_()
        for p, view in zip(self.params, self.views, strict=True):
            p.grad = view

    def sum_over_ranks(self) -> None:
        """Sum gradients and `extra` over the ranks, in one all-reduce; nothing with one rank."""
        if dist.is_initialized():
            dist.all_reduce(self.buffer)

    def norm(self) -> torch.Tensor:
        """Return the global L2 norm of the gradients, a 0-dim tensor."""
        return torch.nn.utils.get_total_norm(self.views)


# ---- the device ----


def pick_device(name: str, threads: int = 0) -> str:
    """Return 'cpu', 'mps' or 'cuda:N' for a `device` setting; 'auto' takes CUDA where there is any,
    else the CPU. Under torchrun each rank gets a GPU of its own. threads: CPU threads, 0 is torch's
    choice. Raises Mistake for a device that is not there."""
    device = ('cuda' if torch.cuda.is_available() else 'cpu') if name == 'auto' else name
    if not re.fullmatch(r'cpu|mps|cuda(:\d+)?', device):
        raise Mistake(f"device = {name!r}: expected 'auto', 'cpu', 'mps', 'cuda' or 'cuda:N'")
    if threads:
        torch.set_num_threads(threads)
    if device == 'mps' and not torch.backends.mps.is_available():
        raise Mistake(f'device = {name!r}: this torch finds no Apple GPU')
    if not device.startswith('cuda'):
        return device
    if not torch.cuda.is_available():
        raise Mistake(f'device = {name!r}: this torch finds no CUDA device')
    index = int(os.environ.get('LOCAL_RANK') or device[5:] or 0)
    if index >= (count := torch.cuda.device_count()):
        raise Mistake(f'device = cuda:{index}: there are {count} CUDA devices')
    return f'cuda:{index}'


def pick_threads(threads: int, device: str, chunk: Callable[[int], object], length: int) -> int:
    """Set and return the number of CPU threads of a training run.

    threads: the setting, or what the checkpoint of a resumed run holds: a sum over other threads
    rounds differently, and a run resumed on a CPU is bit-equal to one that was not interrupted. If
    0, one thread and all threads run chunk(T), T steps of a training chunk, in turns for about a
    second, and the faster number is chosen; beside other work that is often one. T is the least
    power of 2 for which a chunk takes a tenth of a second, at most `length`. Nothing is measured on
    a GPU, or if OMP_NUM_THREADS is set, as torchrun and sweep.py do. Ranks choose together."""
    every_one = torch.get_num_threads()
    if threads or device != 'cpu' or every_one == 1 or 'OMP_NUM_THREADS' in os.environ:
        torch.set_num_threads(threads or every_one)
        return threads or every_one

    def seconds(n: int, T: int) -> float:
        torch.set_num_threads(n)
        start = time.perf_counter()
        chunk(T)
        return time.perf_counter() - start

    T, total = 1, torch.zeros(2, dtype=torch.float64)
    seconds(every_one, T)  # the first call allocates
    while T < length and seconds(every_one, T) < 0.1:
        T = min(2 * T, length)
    rounds = 0
    while total.sum() < 1:
        total += torch.tensor([seconds(1, T), seconds(every_one, T)])
        rounds += 1
    total /= rounds
    if dist.is_initialized():
        dist.all_reduce(total)
    one, all_ = total.tolist()
    chosen = 1 if one < all_ else every_one
    print0(f'threads = {chosen}: {T} steps take {one:.3f} s with 1, {all_:.3f} s with {every_one}')
    torch.set_num_threads(chosen)
    return chosen


def pick_dtype(name: str, device: str) -> torch.dtype:
    """Return the dtype of matrix products for a `dtype` setting; 'auto' takes bfloat16 where the
    device multiplies it fast."""
    if name not in ('auto', 'float32', 'bfloat16'):
        raise Mistake(f"dtype = {name!r}: expected 'auto', 'float32' or 'bfloat16'")
    fast = name == 'auto' and bf16_is_fast(device)
    return torch.bfloat16 if name == 'bfloat16' or fast else torch.float32


def device_name(device: str) -> str:
    """Return the name of the GPU or of the processor."""
    if device.startswith('cuda'):
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, TypeError, subprocess.SubprocessError):
        if sys.platform == 'darwin':
            command = ['sysctl', '-n', 'machdep.cpu.brand_string']
            name = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        else:  # Linux; elsewhere there is no such file
            cpus = pathlib.Path('/proc/cpuinfo').read_text()
            name = re.search(r'model name\s*: (.*)', cpus)[1]
    return f'CPU {name.strip()}'


def device_memory(device: str) -> tuple[float, float]:
    """Return the bytes of memory that this process may use on the device, and how many of them are
    free now.

    On a CPU that is nine tenths of what psutil reports, or of what is left under the limit of a
    container (cgroups), divided by the processes of one torchrun on this host."""
    if device.startswith('cuda'):
        free, total = torch.cuda.mem_get_info(device)
        return float(total), float(free + torch.cuda.memory_reserved(device))
    memory = psutil.virtual_memory()
    total, free = memory.total, memory.available
    for limit, used, cached in CGROUP_FILES:
        with contextlib.suppress(OSError, ValueError, TypeError):  # no such file, or no limit
            total = min(total, int(pathlib.Path(limit).read_text()))
            statistics = pathlib.Path(cached[0]).read_text()
            reclaimable = int(re.search(rf'^{cached[1]} (\d+)', statistics, re.M)[1])
            free = min(free, total - int(pathlib.Path(used).read_text()) + reclaimable)
    share = 0.9 / int(os.environ.get('LOCAL_WORLD_SIZE', 1))
    return share * total, share * free


# A container's memory: the file with its limit, with its use, and the part of that which the page
# cache would give back. Version 2 of cgroups, then version 1.
CGROUP_FILES = [
    (
        '/sys/fs/cgroup/memory.max',
        '/sys/fs/cgroup/memory.current',
        ('/sys/fs/cgroup/memory.stat', 'inactive_file'),
    ),
    (
        '/sys/fs/cgroup/memory/memory.limit_in_bytes',
        '/sys/fs/cgroup/memory/memory.usage_in_bytes',
        ('/sys/fs/cgroup/memory/memory.stat', 'total_inactive_file'),
    ),
]


def out_of_memory(error: BaseException) -> str:
    """Return which memory an error says is used up, 'GPU memory' or 'memory'; '' for others."""
    if isinstance(error, torch.OutOfMemoryError):
        return 'GPU memory'
    text = "DefaultCPUAllocator|can't allocate memory|std::bad_alloc|Storage size calculation over"
    text += '|integer multiplication overflow'
    full = isinstance(error, RuntimeError) and re.search(text, str(error))
    return 'memory' if full or isinstance(error, MemoryError) else ''


def check_fits(need: float, what: str, device: str = 'cpu', advice: str = 'ask for less') -> None:
    """Raise Mistake if `need` bytes, the least that `what` takes, are more than the device has
    free. Call it before allocating; what fits by this measure may still be too much."""
    if need > (free := device_memory(device)[1]):
        needs = f'needs more than {need / 1e9:,.1f} GB of memory'
        has = f'{device_name(device)} has {free / 1e9:,.1f} GB free'
        raise Mistake(f'{what}: {needs}, and {has}: {advice}')


def check_model(build: Callable, config: object, copies: int = 1, device: str = 'cpu') -> None:
    """Raise Mistake if the fp32 weights of build(config) do not fit `copies` times on the device
    (training also keeps gradients and moments). config: a dataclass with n_layer, n_expert, n_embd.

    Nothing is allocated: models of one layer and of two are built on 'meta', and the rest follows.
    """
    L = config.n_layer
    what = f'a model of n_layer = {L}, n_expert = {config.n_expert}, n_embd = {config.n_embd}'
    try:
        with torch.device('meta'):
            models = [build(replace(config, n_layer=n)) for n in (1, 2)]
    except (RuntimeError, OverflowError, TypeError) as error:  # for sizes like 2^63
        raise Mistake(f'{what}: larger than any machine ({first_line(error)})') from None
    one, two = (sum(p.numel() for p in model.parameters()) for model in models)
    total = one + (L - 1) * (two - one)
    check_fits(4 * copies * total, f'{what}, {total:,} parameters', device)


def keep_memory() -> None:
    """Keep freed memory in the process, where the C library is glibc.

    By default glibc returns large blocks to the system, and a training loop that allocates the
    same ones at every step pays for clearing their pages again: a fifth of the time on a CPU."""
    with contextlib.suppress(OSError, AttributeError, TypeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-4, 0)  # M_MMAP_MAX: no block gets a mapping of its own
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: the heap does not shrink


def compiles(model: torch.nn.Module, once: Callable[[], object]) -> bool:
    """Call once(), which compiles what training needs, before any clock runs; return whether
    compilation works on this machine, and print why if it does not."""
    start = time.time()
    try:
        once()
        print0(f'compiled in {time.time() - start:.0f} s')
        return True
    except Exception as error:
        if not may_run_uncompiled(error):
            raise
        print0(f'compile = True does not work here; training uncompiled ({first_line(error)})')
        return False
    finally:
        model.zero_grad(set_to_none=True)


def need_packages(**wanted: bool) -> None:
    """End the script if a package is wanted and not installed: need_packages(wandb=True)."""
    for name, is_wanted in wanted.items():
        if is_wanted and importlib.util.find_spec(name) is None:
            package = {'PIL': 'pillow'}.get(name, name)
            fail(f'{name} is asked for but not installed: pip install {package}, or leave it out')


def mfu(run: object, tokens_per_s: float) -> str:
    """Return the model FLOPs utilization: nominal FLOPs of forward and backward over the peak of
    the GPUs in bf16; 'n/a' where that is unknown."""
    on_gpu = run.device.startswith('cuda') and run.amp == torch.bfloat16
    name = device_name(run.device) if on_gpu else ''
    peaks = [peak for gpu, peak in PEAK_FLOPS.items() if gpu in name]
    flops = 3 * sum(run.model.flops_per_token().values()) * tokens_per_s
    return f'{flops / (run.world * peaks[0]):.1%}' if peaks else 'n/a'


def machine(run: object) -> str:
    """Return one line with the versions, the devices and the threads of a run."""
    versions = f'torch {torch.__version__}, python {platform.python_version()}'
    threads = f'{torch.get_num_threads()} threads'
    return f'{versions}, {run.world} x {device_name(run.device)} ({threads})'


def commit() -> str:
    """Return the git commit of this file's folder, with '-dirty' if tracked files other than
    results have changed; 'unknown' outside git."""
    git = ['git', '-C', os.path.dirname(os.path.abspath(__file__))]
    paths = ['--', ':(top)', ':(top,exclude)results']
    try:
        options = {'capture_output': True, 'text': True}
        name = subprocess.run([*git, 'rev-parse', '--short=12', 'HEAD'], check=True, **options)
        changed = subprocess.run([*git, 'status', '--porcelain', '-uno', *paths], **options)
    except (OSError, subprocess.CalledProcessError):
        return 'unknown'
    return name.stdout.strip() + ('-dirty' if changed.stdout else '')


# ---- checkpoints, and models as plain files ----


def save_checkpoint(obj: dict, path: Path, keep: str | None = None) -> None:
    """Save obj (tensors and plain types) completely or not at all. With keep=PREV the checkpoint
    that was at `path` is kept under that name. Raises OSError, such as for a full disk."""

    def write(file):
        try:
            torch.save(obj, file)
        except RuntimeError as error:  # torch complains about a position; the cause comes before
            full = isinstance(error.__context__, OSError)
            raise (error.__context__ if full else error) from None

    write_atomic(path, write, keep)


def load_checkpoint(path: Path) -> dict:
    """Return what save_checkpoint saved, with its tensors on the CPU. Raises CheckpointError."""
    try:
        with zipfile.ZipFile(path) as file:  # torch's format; torch ignores its checksums
            if file.testzip() is not None:
                raise zipfile.BadZipFile('wrong checksum')
        return torch.load(path, map_location='cpu', weights_only=True, mmap=False)
    except OSError as error:
        raise CheckpointError(f'{path}: cannot be opened: {error.strerror}') from None
    except (zipfile.BadZipFile, *UNREADABLE) as error:
        reason = f'damaged, cut short or not a checkpoint ({first_line(error)})'
        if 'eights only load failed' in reason or 'weights_only' in reason:
            reason = 'holds Python objects, refused because loading them could run code'
        raise CheckpointError(f'{path}: {reason}: give another file, or delete it') from None


def saved_in(out_dir: Path) -> list[pathlib.Path]:
    """Return the checkpoints in a folder from which a run can be resumed, the newest first."""
    return [path for name in (LAST, PREV) if (path := pathlib.Path(out_dir, name)).exists()]


def load_latest(out_dir: Path) -> tuple[dict, pathlib.Path]:
    """Return the last checkpoint in the folder and its path; if it is damaged, print a warning and
    take the one before. Raises CheckpointError if neither can be read."""
    if not (paths := saved_in(out_dir)):
        raise CheckpointError(f'{out_dir}: holds no trained run, there is no {LAST}')
    try:
        return load_checkpoint(paths[0]), paths[0]
    except CheckpointError as error:
        if len(paths) == 1:
            raise
        print0(f'warning: {error}; using {paths[1]}')
        return load_checkpoint(paths[1]), paths[1]


def load_run(
    folder: Path,
    script: str,
    needed: tuple[str, ...] = (),
    fixed: tuple[str, ...] = (),
    config: dict | None = None,
    file: str = '',
) -> tuple[dict, pathlib.Path]:
    """Return a run's last checkpoint, or `file` of its folder if that exists, and the path.

    script: the name of the trainer, for messages. needed: keys that the checkpoint must have.
    Raises CheckpointError if one is missing, or if a setting in `fixed` differs from config's."""
    path = pathlib.Path(folder, file or LAST)
    named = file and path.exists()
    saved, path = (load_checkpoint(path), path) if named else load_latest(folder)
    settings = saved.get('config') if isinstance(saved, dict) else None
    missing = ['config']
    if isinstance(settings, dict):
        missing = [key for key in needed if key not in saved]
        missing += [name for name in fixed if name not in settings]
    if missing:
        reason = f'not a checkpoint of this {script} (missing: {", ".join(missing)})'
        raise CheckpointError(f'{path}: {reason}')
    for name in fixed:
        if settings[name] != config[name]:
            reason = f'was trained with {name} = {settings[name]!r}, not {config[name]!r}'
            raise CheckpointError(f'{path}: {reason}: give the same value, or another out_dir')
    return saved, path


def refuse_changes(
    saved: dict, config: dict, defaults: dict, harmless: Iterable[str], path: Path, script: str
) -> None:
    """Raise CheckpointError if a resumed run changes a setting that is not in `harmless`.

    saved: the settings in the checkpoint at `path`. A setting that it lacks, because the script got
    it later, counts as its default there. One that the script no longer has does not count."""
    for name, value in config.items():
        before = saved.get(name, defaults[name])
        if name not in harmless and value != before:
            changed = f'was trained with {name} = {before!r}, not {value!r}'
            advice = f'give the same value or another out_dir, or add {name} to HARMLESS'
            raise CheckpointError(f'{path}: {changed}: {advice} in {script}')


@contextlib.contextmanager
def restoring(where: Path, key: str) -> Iterator[None]:
    """Turn errors of code that restores a part of a checkpoint into a CheckpointError that names
    the file and the part."""
    try:
        yield
    except UNREADABLE as error:
        if isinstance(error, CheckpointError) or out_of_memory(error):
            raise
        reason = ' '.join(f'{type(error).__name__}: {error}'.split())[:200]  # torch breaks lines
        raise CheckpointError(f'{where}: {key} does not fit, or is damaged ({reason})') from None


def fill(tensor: torch.Tensor, saved: torch.Tensor) -> None:
    """Copy `saved` into `tensor`. Raises ValueError unless the shapes are equal; copy_ alone would
    broadcast."""
    if not isinstance(saved, torch.Tensor) or tensor.shape != saved.shape:
        shape = list(getattr(saved, 'shape', []))
        raise ValueError(f'expected a tensor of shape {list(tensor.shape)}, found {shape}')
    tensor.copy_(saved)


def load_weights(model: torch.nn.Module, weights: dict, where: Path, assign: bool = False) -> None:
    """Load all weights of a model, checked to be complete, of the right shapes and finite. With
    assign the model is on 'meta' and takes the tensors themselves. Raises CheckpointError, which
    names file and weight."""
    with restoring(where, 'model'):
        if broken := [name for name, x in weights.items() if not x.isfinite().all()]:
            raise ValueError(f'{broken[0]} holds NaN or infinity')
        model.load_state_dict(weights, assign=assign)


def read_tensors(path: Path, device: str = 'cpu') -> dict[str, torch.Tensor]:
    """Return the tensors in a .safetensors file. Raises CheckpointError."""
    need_packages(safetensors=True)
    from safetensors import SafetensorError, torch as files

    try:
        return files.load_file(path, device)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f'{path}: cannot be read ({first_line(error)})') from None


def write_tensors(tensors: dict[str, torch.Tensor], path: Path) -> str:
    """Write a .safetensors file; return its name and size for a message."""
    need_packages(safetensors=True)
    from safetensors.torch import save

    contiguous = {name: x.detach().cpu().contiguous() for name, x in tensors.items()}
    data = save(contiguous, metadata={'format': 'pt'})
    write_atomic(path, lambda file: file.write(data))
    return f'{path} ({len(data) / 1e6:.1f} MB)'


def begin_export(folder: Path, kind: str, *made: str) -> pathlib.Path:
    """Start an export in a new folder, or over an earlier export of its kind; return the path of
    its CONFIG, which does not describe a model yet.

    kind: a key that only this kind's CONFIG has. made: files derived from the earlier export, which
    are removed with it."""
    path = pathlib.Path(folder)
    found = set(os.listdir(path)) if path.is_dir() else set()
    about = (path / CONFIG).read_text(errors='replace') if CONFIG in found else ''
    if found and not (f'"{kind}"' in about and found <= {CONFIG, WEIGHTS, *made}):
        fail(f'export = {str(folder)!r}: holds what no such export wrote: name another folder')
    path.mkdir(parents=True, exist_ok=True)
    write_json({kind: None}, path / CONFIG)
    for name in made:
        (path / name).unlink(missing_ok=True)
    return path / CONFIG


# In the functions below `run` is a trainer's state: it has rank, world, device, config, model, step
# and lock.


def init_from(
    model: torch.nn.Module,
    folder: Path,
    resume: bool = False,
    rename: Callable[[dict[str, torch.Tensor]], None] | None = None,
) -> None:
    """Initialize a new run from the best checkpoint in another run's folder, or its last; or from
    an export. Every weight with the name and shape of one of the model's is taken; lines say which
    were taken and which were not. rename(weights) replaces old names of weights, in place. Raises
    CheckpointError, also if no weight fits."""
    if resume:
        raise CheckpointError('--init_from starts a new run: not with --resume or --eval_only')
    where = pathlib.Path(folder, WEIGHTS)
    if where.exists():
        weights = read_tensors(where)
    else:
        saved, where = load_run(folder, 'project', ('model',), file=BEST)
        weights = saved['model']
    ours = model.state_dict()
    with restoring(where, 'model'):
        if rename:
            rename(weights)
        fits = {k for k, x in ours.items() if k in weights and weights[k].shape == x.shape}
    if not any(ours[name].dim() for name in fits):  # a scalar fits anywhere
        raise CheckpointError(f'{where}: no weight has a name and shape of this model')
    load_weights(model, ours | {name: weights[name] for name in fits}, where)
    count = sum(ours[name].numel() for name in fits)
    print0(f'{where}: took {len(fits)} of {len(ours)} weights, {count:,} parameters')
    for label, tensors in (('initialized from scratch', ours), ('not taken', weights)):
        if left := [f'{name} {list(x.shape)}' for name, x in tensors.items() if name not in fits]:
            print0(f'{label}: {", ".join(left)}')


def save_run(run: object, parts: dict, optimizers: list[torch.optim.Optimizer] | None) -> None:
    """Save settings, weights and `parts` on the first rank. With optimizers this is the last
    checkpoint, from which the run can be resumed (the one before is kept); without them it is the
    best, for evaluation."""
    if run.rank > 0:
        return
    saved = {'model': run.model.state_dict(), 'config': dict(run.config), **parts}
    if optimizers:
        cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
        saved['rng'] = {'torch': torch.get_rng_state(), 'cuda': cuda}
        saved['optimizers'] = [optimizer.state_dict() for optimizer in optimizers]
    path = os.path.join(run.config['out_dir'], LAST if optimizers else BEST)
    save_checkpoint(saved, path, PREV if optimizers else None)


def restore(run: object, names: tuple, optimizers: list, saved: dict, where: Path) -> None:
    """Load weights, and set run.NAME = saved[NAME] for each of `names`; with optimizers also their
    moments and the random states (an evaluation needs neither). The optimizers keep this run's
    settings, because a resumed run may change learning rates, momentum, decay and the device. The
    number of CPU threads is the saved one, unless it is set. Raises CheckpointError."""
    load_weights(run.model, saved['model'], where)
    saved_threads = min(saved['config'].get('threads', 0), torch.get_num_threads())
    run.config['threads'] = run.config['threads'] or saved_threads
    with restoring(where, 'position'):
        for name in names:
            if type(saved[name]) is not type(getattr(run, name)):
                raise TypeError(f'{name} = {str(saved[name])[:80]!r}')
            setattr(run, name, saved[name])
    if not optimizers:
        return
    with restoring(where, 'optimizers or rng'):
        for optimizer, state in zip(optimizers, saved['optimizers'], strict=True):
            groups = [dict(group) for group in optimizer.param_groups]
            for group, saved_group in zip(groups, state['param_groups'], strict=True):
                group['params'] = saved_group['params']
            optimizer.load_state_dict({**state, 'param_groups': groups})
        torch.set_rng_state(saved['rng']['torch'])
        if saved['rng']['cuda'] is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(saved['rng']['cuda'])


# ---- the output folder, and signals ----


def restarted(out_dir: Path, *settings: dict) -> None:
    """Change the settings of a run that torchrun --max-restarts has restarted: it resumes from its
    last checkpoint, or starts over if there is none. Call it on every rank, before
    prepare_out_dir."""
    mark = pathlib.Path(out_dir, BEGUN)
    if restart_count() == 0 or not mark.exists() or mark.read_text() != launch_id():
        return
    changes = {'resume': True, 'overwrite': False, 'init_from': ''}
    if not saved_in(out_dir):
        changes = {'resume': False, 'overwrite': True}
    print0(f'restarted by torchrun: {"resuming" if changes["resume"] else "from the beginning"}')
    for config in settings:
        config |= changes


def lock_folder(path: pathlib.Path) -> filelock.BaseFileLock:
    """Lock a folder for one run and return the lock; the system releases it
    when this process ends, however it ends. Raises CheckpointError, which names the process that
    holds the folder."""
    lock = filelock.FileLock(path / LOCK)
    try:
        lock.acquire(blocking=False)
    except filelock.Timeout:
        holder = (path / LOCK).read_text(errors='replace')[:200].strip()
        reason = f'another run is using it ({holder}): wait for its end, stop it'
        raise CheckpointError(f'{path}: {reason}, or choose another out_dir') from None
    except NotImplementedError as error:
        print0(f'warning: {path}: this file system has no locks ({error}): let no other run use it')
    (path / LOCK).write_text(f'process {os.getpid()} on {platform.node()}\n')
    return lock


def prepare_out_dir(
    out_dir: Path, resume: bool = False, overwrite: bool = False
) -> filelock.BaseFileLock:
    """Create or check the output folder of a run and lock it; return the lock. Raises
    CheckpointError.

    A folder that holds a run (a checkpoint or a log) is refused without resume, for a run that has
    read its checkpoint, or overwrite, which removes RUN_FILES from this folder alone. Files of
    these names in a folder without LOCK belong to somebody else and are refused, with overwrite
    too. Temporary files of a killed run are removed."""
    path, names = pathlib.Path(out_dir), RUN_FILES.split()
    if resume and overwrite:
        raise CheckpointError('--resume and --overwrite exclude each other: choose one')

    def find(*patterns: str) -> list[pathlib.Path]:
        return sorted(f for p in patterns for f in path.glob(p) if not f.is_dir())

    try:
        path.mkdir(parents=True, exist_ok=True)
        files = find(*names)
        if files and not (resume or (path / LOCK).exists()):
            reason = f'holds {files[0].name}, which no run of ours wrote: choose another out_dir'
            raise CheckpointError(f'{path}: {reason}, or move it away yourself')
        lock = lock_folder(path)
        if restart_count() == 0:
            # A folder that is refused below never becomes this launch's, however often torchrun
            # restarts it.
            (path / BEGUN).unlink(missing_ok=True)
    except OSError as error:
        reason = 'it is a file' if path.is_file() else error.strerror
        raise CheckpointError(f'{path}: cannot be used as the output folder: {reason}') from None
    if find('ckpt_*.pt', 'log.jsonl') and not (resume or overwrite):
        lock.release()
        advice = 'continue it with --resume=True, or replace it with --overwrite=True'
        raise CheckpointError(f'{path}: holds a run already: {advice}')
    for file in find(*(f'.{name}.tmp' for name in names), *(names if overwrite else ())):
        file.unlink()
    if 'TORCHELASTIC_RESTART_COUNT' in os.environ:
        (path / BEGUN).write_text(launch_id())
    return lock


class Stopper:
    """Turn SIGTERM, ctrl-C and SIGHUP (a closed terminal; not under nohup) into a flag. The loop
    reads `stopper.signal` (None, or the number) between two updates, saves and ends.

    A second ctrl-C raises KeyboardInterrupt at once. Under torchrun a ctrl-C arrives twice, from
    the terminal and from the launcher: one within a second of the first does not count. Several
    ranks must agree on the flag (all-reduce) before they act on it. Use it in the main thread."""

    stopping = False  # whether any process-wide stopper has received a signal

    def __init__(self):
        self.signal, self.time = None, 0.0
        numbers = [signal.SIGTERM, signal.SIGINT]
        if hasattr(signal, 'SIGHUP') and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        self.former = {number: signal.signal(number, self.handle) for number in numbers}

    def handle(self, number: int, frame: object) -> None:
        """Set the flag; a signal handler."""
        again = self.signal == number == signal.SIGINT
        if again and ('RANK' not in os.environ or time.monotonic() - self.time > 1):
            raise KeyboardInterrupt
        if number == getattr(signal, 'SIGHUP', None):
            # Writing to a terminal that is gone would raise before the run has saved.
            null = os.open(os.devnull, os.O_WRONLY)
            for descriptor in (1, 2):
                if stat.S_ISCHR(os.fstat(descriptor).st_mode):
                    os.dup2(null, descriptor)
        Stopper.stopping = True
        if self.signal is None:  # print is not safe inside a handler
            with contextlib.suppress(BrokenPipeError):
                os.write(2, b'\nstopping after this update (ctrl-C again: at once)\n')
        if not again:
            self.signal, self.time = number, time.monotonic()

    def restore(self) -> None:
        """Restore the former handlers."""
        for number, handler in self.former.items():
            signal.signal(number, handler)


# ---- logs and trackers ----


def open_log(run: object, resume: bool) -> Callable[[dict], None]:
    """Write config.json (the settings, the commit and the device) and return write(record), which
    appends a line to log.jsonl.

    A resumed run keeps the lines before its checkpoint's step. That step is evaluated and logged
    again, because the run may have died in between; later and half-written lines are dropped."""
    folder, kept = pathlib.Path(run.config['out_dir']), []
    about = {
        'commit': commit(),
        'torch': torch.__version__,
        'device_name': device_name(run.device),
    }
    write_json({**run.config, **about}, folder / 'config.json')
    path = folder / 'log.jsonl'
    if resume and path.exists():
        for line in path.read_text(encoding='utf-8', errors='replace').splitlines():
            with contextlib.suppress(ValueError, TypeError, LookupError):
                if json.loads(line)['step'] < run.step:
                    kept.append(line + '\n')
    write_text(''.join(kept), path)

    def write(record: dict) -> None:
        try:
            with open(path, 'a', encoding='utf-8') as file:
                file.write(json.dumps(plain(record)) + '\n')
        except OSError as error:
            error.filename = str(path)  # a full disk does not say whose write it refused
            raise

    return write


def finite(run: object, weights: bool, loss: float, norm: float) -> bool:
    """Return whether the loss, the gradient norm and (with weights=True) all weights are finite;
    print an error if not. A broken weight shows only in the next loss."""
    is_finite = math.isfinite(loss) and math.isfinite(norm)
    if is_finite and weights:
        is_finite = all(p.isfinite().all() for p in run.model.parameters())
    if not is_finite:
        what = f'update {run.step + 1}: loss {loss}, gradient norm {norm}, or a weight'
        kept = last_saved(run.config['out_dir'])
        print0(f'error: {what}, is not finite: stopped without saving it; {kept}')
    return is_finite


def ended(run: object, stopper: Stopper, updates: int, summary: str) -> int:
    """Print the last line of a run that has done all its updates or was stopped; return its exit
    status, 0 or 128 + signal."""
    stopper.restore()
    out_dir = run.config['out_dir']
    if run.step >= updates:
        print0(f'done: {summary}; {out_dir}/{LAST}')
        return 0
    print0(f'stopped after update {run.step}, saved in {out_dir}: --resume=True continues')
    return 128 + (stopper.signal or signal.SIGTERM)  # None if another rank was stopped


def last_saved(out_dir: str) -> str:
    """Return a phrase that says which checkpoint a run can be resumed from."""
    if paths := saved_in(out_dir):
        return f'the last checkpoint is {paths[0]}: --resume=True continues from it'
    return f'nothing is saved in {out_dir} yet'


def last_words(less_memory: str, settings: dict | None = None) -> Callable[[Exception], str]:
    """Return, for configurator.run_script, a function that explains an error which ends a run in
    one line: no memory (`less_memory` says what takes less), or a rank that died or cannot be
    reached. It raises any other error again. settings: a trainer's globals(), whose out_dir is
    named."""

    def explain(error: Exception) -> str:
        if memory := out_of_memory(error):
            return f'out of {memory}: {less_memory} ({first_line(error)})'
        if settings and (isinstance(error, dist.DistError) or 'gloo/transport' in str(error)):
            dead = f'rank {os.environ.get("RANK")}: another rank died, or cannot be reached'
            return f'{dead}; {last_saved(settings["out_dir"])} ({first_line(error)})'
        raise error

    return explain


def open_trackers(config: dict, tensorboard: bool, wandb_project: str) -> tuple[Callable, Callable]:
    """Return write(record) and close() for TensorBoard and, if a project is named, Weights &
    Biases. Both get the settings, the numbers of each record, and the GIFs that it names."""
    board, run, out_dir, stack = None, None, config['out_dir'], contextlib.ExitStack()
    if tensorboard:
        from tensorboard.compat.proto.summary_pb2 import Summary
        from torch.utils.tensorboard import SummaryWriter

        board = SummaryWriter(out_dir)
        stack.callback(board.close)
        board.add_text('settings', '\n'.join(f'    {k} = {v!r}' for k, v in config.items()))
    if wandb_project:
        import wandb

        earlier = sorted(pathlib.Path(out_dir).glob('wandb/*run-*'))
        continues = earlier and (config['resume'] or config['eval_only'])
        run_id = {'id': earlier[-1].name.rpartition('-')[2], 'resume': 'allow'} if continues else {}
        about = {'project': wandb_project, 'name': str(out_dir), 'config': dict(config)}
        try:
            run = wandb.init(dir=out_dir, **about, **run_id)
        except wandb.Error as error:
            fail(f'wandb = True: {first_line(error)}; or set WANDB_MODE=offline')
        stack.callback(run.finish)

    def write(record: dict) -> None:
        step = record['step']
        numbers = {k: x for k, x in record.items() if isinstance(x, (int, float))}
        gifs = {k: x for k, x in record.items() if str(x).endswith('.gif')}
        if board:
            values = [Summary.Value(tag=k, simple_value=x) for k, x in numbers.items()]
            for name, path in gifs.items():
                image = Summary.Image(
                    encoded_image_string=pathlib.Path(path).read_bytes(), colorspace=3
                )
                values.append(Summary.Value(tag=name, image=image))
            board.file_writer.add_summary(Summary(value=values), step)
        if run:
            videos = {name: wandb.Video(path, format='gif') for name, path in gifs.items()}
            run.log(numbers | videos, step=step)

    return write, stack.close

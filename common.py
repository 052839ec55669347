"""The code that both trainers share: ranks and the reduction of gradients, the device, checkpoints
and exports, the output folder and signals, logs and trackers.

A parameter `run` is the Run of a trainer: rank, world, device, config, model, step and lock.

Checkpoints hold tensors and plain types and are read with weights_only=True, so that a checkpoint
from a stranger cannot run code. Under torchrun only rank 0 writes files.
"""

import contextlib
import ctypes
import datetime
import errno
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

from configurator import (
    Mistake,
    Settings,
    fail,
    first_line,
    plain,
    read_json,
    write_atomic,
    write_json,
    write_text,
)

import filelock
import psutil
import torch
import torch.distributed as dist

from kernels import bf16_is_fast, may_run_uncompiled

if tuple(map(int, torch.__version__.split('.')[:2])) < (2, 11):  # no earlier version was tried
    fail(f'torch {torch.__version__} is too old: 2.11 or later is needed')

LAST, PREV, BEST = 'ckpt_last.pt', 'ckpt_prev.pt', 'ckpt_best.pt'
DAMAGED = 'ckpt_damaged.pt'  # a last checkpoint that could not be read
WEIGHTS, CONFIG = 'model.safetensors', 'config.json'  # of an export
LOCK = '.run'  # locked while a run uses the folder; a folder without this file holds no run
LAUNCH = '.launch'  # holds the id of the torchrun launch that last started a run in the folder
# Files that a run writes into its folder, and that `overwrite` removes.
RUN_FILES = 'ckpt_*.pt log.jsonl config.json loss.png curve.png eval_*.json eval_*.gif *.tfevents.*'
REPLACE = 'replace it with --overwrite=True'  # advice in messages
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
# Parts of the messages of torch's RuntimeErrors after a failed allocation in host memory.
ALLOCATION_FAILED = (
    'DefaultCPUAllocator',
    "can't allocate memory",
    'std::bad_alloc',
    'Storage size calculation over',
    'integer multiplication overflow',
)
# Memory of a container, by version 2 and version 1 of cgroups: the folder, the files with the limit
# and the usage, and the key in memory.stat of the page cache that is part of the usage.
CGROUPS = [
    ('/sys/fs/cgroup', 'memory.max', 'memory.current', 'inactive_file'),
    (
        '/sys/fs/cgroup/memory',
        'memory.limit_in_bytes',
        'memory.usage_in_bytes',
        'total_inactive_file',
    ),
]
# Exceptions that torch.load and load_state_dict raise for damaged or foreign files.
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
    """A checkpoint, export or output folder cannot be used. The message is one line that says why
    and what to do."""


# ---- ranks ----


def restart_count() -> int:
    """Return the number of times that torchrun --max-restarts has restarted this process."""
    return int(os.environ.get('TORCHELASTIC_RESTART_COUNT', 0))


def launch_id() -> str:
    """Return the id of the torchrun launch, the same after a restart: '' without torchrun, 'none'
    in a launch on several hosts, or with --master_port, that has no --rdzv_id."""
    return os.environ.get('TORCHELASTIC_RUN_ID', '')


def print0(text: str) -> None:
    """Print on rank 0 only. If nobody can read it, a training run stops as after SIGTERM."""
    if os.environ.get('RANK', '0') == '0':
        try:
            print(text, flush=True)
        except BrokenPipeError:  # a reader such as `| tee` has ended; a run must still be saved
            if not (Stopper.running or Stopper.stopping):
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            if not Stopper.stopping:  # ctrl-C ends the reader, too
                os.kill(os.getpid(), signal.SIGTERM)


def join_ranks(device: str, threads: int) -> tuple[int, int, str]:
    """Join the process group, under torchrun, and return the rank, the number of ranks and the
    device ('cpu', 'mps' or 'cuda:N') of this process. device, threads: see pick_device."""
    rank, world = int(os.environ.get('RANK', 0)), int(os.environ.get('WORLD_SIZE', 1))
    device = pick_device(device, threads)
    backend = 'gloo'
    if device.startswith('cuda'):
        backend = 'cpu:gloo,cuda:nccl'
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision('high')
    if world > 1:
        # The store of torchrun survives a restart. Without a prefix for each attempt, the restarted
        # ranks would find the addresses of the dead ones.
        store, _, _ = next(dist.rendezvous('env://', timeout=TIMEOUT))
        store = dist.PrefixStore(f'attempt {restart_count()}', store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=TIMEOUT)
    return rank, world, device


def leave(run: object) -> None:
    """Release the lock of the run's folder, wait for all ranks and leave the process group."""
    if run.lock:
        run.lock.release()
    if run.world > 1:
        dist.barrier()
        dist.destroy_process_group()


def gather(local: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """Concatenate the `local` tensors of all ranks along dim and return the result on rank 0, on
    the CPU, because a GPU may lack the memory. Other ranks return their local tensor."""
    local = local.cpu()
    if not dist.is_initialized():
        return local
    if dist.get_rank() > 0:
        dist.gather(local)
        return local
    parts = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.gather(local, parts)
    return torch.cat(parts, dim)


# ---- the reduction of gradients ----


class Gradients:
    """The gradients of a model in one contiguous buffer, followed by a few other numbers.

    The .grad of each parameter is a view of the buffer. So a CUDA graph finds it at the same
    address in every replay, one fill clears all gradients, and one all-reduce sums them over the
    ranks.

    params: floating-point parameters of one dtype. n_extra: length of the vector `extra` at the end
    of the buffer, for numbers such as the loss that the same all-reduce sums."""

    def __init__(self, params: Iterable[torch.nn.Parameter], n_extra: int = 1):
        self.params = list(params)
        # Every view starts at a multiple of 128 bytes (32 fp32 numbers), for aligned vector loads.
        sizes = [math.ceil(p.numel() / 32) * 32 for p in self.params]
        self.buffer = self.params[0].detach().new_zeros(sum(sizes) + n_extra)
        *parts, self.extra = self.buffer.split([*sizes, n_extra])
        self.views = [
            part[: p.numel()].view(p.shape) for part, p in zip(parts, self.params, strict=True)
        ]
        self.zero()

    def zero(self) -> None:
        """Set gradients and `extra` to zero, and make every .grad a view of the buffer again."""
        self.buffer.zero_()
        for p, view in zip(self.params, self.views, strict=True):
            p.grad = view

    def sum_over_ranks(self) -> None:
        """Sum gradients and `extra` over the ranks in one all-reduce; do nothing with one rank."""
        if dist.is_initialized():
            dist.all_reduce(self.buffer)

    def norm(self) -> torch.Tensor:
        """Return the global L2 norm of the gradients, a 0-dim tensor."""
        return torch.nn.utils.get_total_norm(self.views)


# ---- the device ----


def pick_device(name: str, threads: int = 0) -> str:
    """Return 'cpu', 'mps' or 'cuda:N' for a `device` setting, and set the number of CPU threads.

    'auto' is a CUDA device if there is one, else the CPU. Under torchrun each rank gets a GPU of
    its own. threads = 0 leaves torch's choice. Raises Mistake for a device that is not there."""
    device = ('cuda' if torch.cuda.is_available() else 'cpu') if name == 'auto' else name
    if not re.fullmatch(r'cpu|mps|cuda(:\d+)?', device):
        raise Mistake(f"device = {name!r}: expected 'auto', 'cpu', 'mps', 'cuda' or 'cuda:N'")
    if threads:
        torch.set_num_threads(threads)
    if device == 'mps' and not torch.backends.mps.is_available():
        raise Mistake(f'device = {name!r}: this torch finds no Apple GPU: choose --device=cpu')
    if not device.startswith('cuda'):
        return device
    if not torch.cuda.is_available():
        raise Mistake(f'device = {name!r}: this torch finds no CUDA device: choose --device=cpu')
    index = int(os.environ.get('LOCAL_RANK') or device[5:] or 0)
    count = torch.cuda.device_count()
    if index >= count:
        raise Mistake(f'device = cuda:{index}: there are {count} CUDA devices')
    return f'cuda:{index}'


def pick_threads(threads: int, device: str, chunk: Callable[[int], object], length: int) -> int:
    """Set and return the number of CPU threads of a training run: `threads`, or if that is 0 one
    thread or all of them, whichever is faster. If other processes are busy, one is often faster.

    chunk(T) runs the first T steps of a training chunk. It is timed with one thread and with all in
    turns, for about a second. T is doubled until a call takes a tenth of a second, up to `length`.
    The ranks decide by their mean. On a GPU, or if OMP_NUM_THREADS is set for some rank (torchrun
    and sweep.py set it) or one has a single thread, torch's numbers are kept.

    A resumed run passes the number in its checkpoint, because sums over another number of threads
    round differently, and a run resumed on a CPU is bit-equal to an uninterrupted one."""
    n_all = torch.get_num_threads()
    keep = torch.tensor(float(n_all == 1 or 'OMP_NUM_THREADS' in os.environ))
    if dist.is_initialized():
        dist.all_reduce(keep, dist.ReduceOp.MAX)
    if threads or device != 'cpu' or keep:
        torch.set_num_threads(threads or n_all)
        return threads or n_all

    def seconds(n: int, T: int) -> float:
        torch.set_num_threads(n)
        start = time.perf_counter()
        chunk(T)
        return time.perf_counter() - start

    T = 1
    seconds(n_all, T)  # the first call allocates
    while T < length and seconds(n_all, T) < 0.1:
        T = min(2 * T, length)
    rounds = 0
    totals = torch.zeros(2, dtype=torch.float64)  # seconds with one thread, and with all
    while totals.sum() < 1:
        totals += torch.tensor([seconds(1, T), seconds(n_all, T)])
        rounds += 1
    means = totals / rounds
    if dist.is_initialized():
        dist.all_reduce(means)
        means /= dist.get_world_size()
    with_one, with_all = means.tolist()
    n = 1 if with_one < with_all else n_all
    print0(f'threads = {n}: {T} steps take {with_one:.3f} s with 1, {with_all:.3f} s with {n_all}')
    torch.set_num_threads(n)
    return n


def pick_dtype(name: str, device: str) -> torch.dtype:
    """Return the dtype of matrix products for a `dtype` setting; 'auto' is bfloat16 if the device
    is fast at it, else float32. Raises Mistake for any other name."""
    if name not in ('auto', 'float32', 'bfloat16'):
        raise Mistake(f"dtype = {name!r}: expected 'auto', 'float32' or 'bfloat16'")
    if name == 'auto':
        name = 'bfloat16' if bf16_is_fast(device) else 'float32'
    return getattr(torch, name)


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
    """Return the bytes of memory that this process may use on the device, and the bytes of these
    that are free now.

    On a CPU they are nine tenths of the memory of the machine, or of the container if that has a
    limit (cgroups), divided by the number of processes that torchrun started on this host."""
    if device.startswith('cuda'):
        free, total = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return float(total), float(free + cached)
    memory = psutil.virtual_memory()
    total, free = memory.total, memory.available
    for folder, limit_file, usage_file, cache_key in CGROUPS:
        with contextlib.suppress(OSError, ValueError, TypeError):  # no such file, or no limit
            total = min(total, int(pathlib.Path(folder, limit_file).read_text()))
            used = int(pathlib.Path(folder, usage_file).read_text())
            statistics = pathlib.Path(folder, 'memory.stat').read_text()
            page_cache = int(re.search(rf'^{cache_key} (\d+)', statistics, re.M)[1])
            free = min(free, total - used + page_cache)  # the system gives up its page cache
    share = 0.9 / int(os.environ.get('LOCAL_WORLD_SIZE', 1))
    return share * total, share * free


def out_of_memory(error: BaseException) -> str:
    """Return 'GPU memory' or 'memory' if the error says that it ran out, and '' otherwise."""
    if isinstance(error, torch.OutOfMemoryError):
        return 'GPU memory'
    if isinstance(error, MemoryError):
        return 'memory'
    if isinstance(error, RuntimeError) and any(text in str(error) for text in ALLOCATION_FAILED):
        return 'memory'
    return ''


def check_fits(
    size: float, purpose: str, device: str = 'cpu', advice: str = 'ask for less'
) -> None:
    """Raise Mistake if `size` bytes, the least that `purpose` needs, are more than the device has
    free. For use before an allocation, which may need more and still not fit."""
    free = device_memory(device)[1]
    if size > free:
        needs = f'needs more than {size / 1e9:,.1f} GB of memory'
        has = f'{device_name(device)} has {free / 1e9:,.1f} GB free'
        raise Mistake(f'{purpose}: {needs}, and {has}: {advice}')


def check_model(build: Callable, config: object, copies: int = 1, device: str = 'cpu') -> None:
    """Raise Mistake if `copies` of the fp32 weights of build(config) do not fit on the device:
    training keeps weights, gradients and the moments of the optimizer, one (Muon) or two (Adam).
    config: a dataclass with n_layer, n_expert and n_embd.

    Nothing is allocated. Models of one and of two layers are built on the device 'meta', and every
    further layer counts as much as the second."""
    L = config.n_layer
    sizes = f'a model of n_layer = {L}, n_expert = {config.n_expert}, n_embd = {config.n_embd}'
    try:
        with torch.device('meta'):
            models = [build(replace(config, n_layer=n)) for n in (1, 2)]
    except (RuntimeError, OverflowError, TypeError) as error:  # for sizes like 2^63
        raise Mistake(f'{sizes}: larger than any machine ({first_line(error)})') from None
    one, two = (sum(p.numel() for p in model.parameters()) for model in models)
    total = one + (L - 1) * (two - one)
    check_fits(4 * copies * total, f'{sizes}, {total:,} parameters', device)


def keep_memory() -> None:
    """Keep freed memory in the process, where the C library is glibc.

    By default glibc returns large blocks to the system, which clears their pages again when a
    training loop allocates the same blocks in its next step: a fifth of the time on a CPU."""
    with contextlib.suppress(OSError, AttributeError, TypeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-4, 0)  # M_MMAP_MAX: no block gets a mapping of its own
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: the heap does not shrink


def report_uncompiled(error: Exception) -> None:
    """Print that training continues without compilation, which failed with this error."""
    print0(f'compile = True does not work here; training uncompiled ({first_line(error)})')


def compiles(model: torch.nn.Module, trial: Callable[[], object]) -> bool:
    """Return whether trial(), which runs what training compiles, can be compiled on this machine;
    print the time that it took, or why it failed. The gradients of the model are cleared."""
    start = time.time()
    try:
        trial()
        print0(f'compiled in {time.time() - start:.0f} s')
        return True
    except Exception as error:
        if out_of_memory(error) or not may_run_uncompiled(error):
            raise
        report_uncompiled(error)
        return False
    finally:
        model.zero_grad(set_to_none=True)


def need_packages(**wanted: bool) -> None:
    """Raise Mistake if a package with a true value is not installed: need_packages(wandb=True)."""
    for name, is_wanted in wanted.items():
        if is_wanted and importlib.util.find_spec(name) is None:
            package = {'PIL': 'pillow'}.get(name, name)
            advice = f'pip install {package}, or leave it out'
            raise Mistake(f'{name} is asked for but not installed: {advice}')


def mfu(run: object, tokens_per_s: float) -> str:
    """Return the model FLOPs utilization as a percentage: the FLOPs of forward and backward over
    the peak of the GPUs in bf16; 'n/a' if the peak is unknown or the run is not in bf16."""
    on_gpu = run.device.startswith('cuda') and run.amp == torch.bfloat16
    name = device_name(run.device) if on_gpu else ''
    peaks = [peak for gpu, peak in PEAK_FLOPS.items() if gpu in name]
    flops = 3 * sum(run.model.flops_per_token().values()) * tokens_per_s
    return f'{flops / (run.world * peaks[0]):.1%}' if peaks else 'n/a'


def machine(run: object) -> str:
    """Return a line with the versions, the devices and the CPU threads of a run."""
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
        except RuntimeError as error:
            # When the disk is full, torch hides the OSError behind an error of its own.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise

    write_atomic(path, write, keep)


def load_checkpoint(path: Path) -> dict:
    """Return what save_checkpoint saved, with its tensors on the CPU. Raises CheckpointError."""
    try:
        with zipfile.ZipFile(path) as file:  # torch.load does not check the checksums of the zip
            if file.testzip() is not None:
                raise zipfile.BadZipFile('wrong checksum')
        return torch.load(path, map_location='cpu', weights_only=True, mmap=False)
    except OSError as error:
        raise CheckpointError(f'{path}: cannot be opened: {error.strerror}') from None
    except (zipfile.BadZipFile, *UNREADABLE) as error:
        reason = f'damaged, cut short or not a checkpoint ({first_line(error)})'
        if 'weights only load failed' in reason.lower() or 'weights_only' in reason:
            reason = 'holds Python objects, refused because loading them could run code'
        raise CheckpointError(f'{path}: {reason}: give another file, or delete it') from None


def saved_in(out_dir: Path) -> list[pathlib.Path]:
    """Return the checkpoints in a folder from which a run can be resumed, the newest first."""
    return [path for name in (LAST, PREV) if (path := pathlib.Path(out_dir, name)).exists()]


def load_latest(out_dir: Path) -> tuple[dict, pathlib.Path]:
    """Return the last checkpoint in the folder and its path; if it is damaged, print a warning and
    return the previous one. Raises CheckpointError if neither can be read."""
    paths = saved_in(out_dir)
    if not paths:
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
    file: str = '',
) -> tuple[dict, pathlib.Path]:
    """Return a checkpoint of a run and its path: `file` if the folder has it, else the last one.

    script: for messages, the name of the trainer, or 'project' if any trainer will do. needed: keys
    that the checkpoint must have. Raises CheckpointError."""
    path = pathlib.Path(folder, file)
    if file and path.exists():
        saved = load_checkpoint(path)
    else:
        saved, path = load_latest(folder)
    if isinstance(saved, dict) and isinstance(saved.get('config'), dict):
        missing = [key for key in needed if key not in saved]
    else:
        missing = ['config']
    if missing:
        reason = f'not a checkpoint of this {script} (missing: {", ".join(missing)})'
        raise CheckpointError(f'{path}: {reason}')
    return saved, path


def refuse_changes(
    saved: dict, config: dict, defaults: dict, harmless: Iterable[str], path: Path, script: str
) -> None:
    """Raise CheckpointError if a resumed run changes a setting that is not in `harmless`.

    saved: the settings in the checkpoint at `path`. One that is missing there, because the script
    is newer, counts as its default; one that the script no longer has is ignored."""
    for name, value in config.items():
        before = saved.get(name, defaults[name])
        if name not in harmless and value != before:
            changed = f'was trained with {name} = {before!r}, not {value!r}'
            advice = f'give the same value or another out_dir, or add {name} to HARMLESS'
            raise CheckpointError(f'{path}: {changed}: {advice} in {script}')


@contextlib.contextmanager
def restoring(path: Path, key: str) -> Iterator[None]:
    """Turn errors of code that restores a part of a checkpoint into a CheckpointError that names
    the file and the part."""
    try:
        yield
    except UNREADABLE as error:
        if isinstance(error, CheckpointError) or out_of_memory(error):
            raise
        reason = ' '.join(f'{type(error).__name__}: {error}'.split())[:200]  # on one line
        raise CheckpointError(f'{path}: {key} does not fit, or is damaged ({reason})') from None


def fill(tensor: torch.Tensor, saved: torch.Tensor) -> None:
    """Copy `saved` into `tensor`. Raises ValueError unless it is a tensor of the same shape; copy_
    alone would broadcast."""
    if not isinstance(saved, torch.Tensor) or tensor.shape != saved.shape:
        shape = list(getattr(saved, 'shape', []))
        raise ValueError(f'expected a tensor of shape {list(tensor.shape)}, found {shape}')
    tensor.copy_(saved)


def load_weights(model: torch.nn.Module, weights: dict, path: Path, assign: bool = False) -> None:
    """Load all weights of a model. Raises CheckpointError, naming the file `path` and the weight,
    if one is missing, has another shape or is not finite. assign: use the tensors themselves, for a
    model on the device 'meta'."""
    with restoring(path, 'model'):
        for name, x in weights.items():
            if not x.isfinite().all():
                raise ValueError(f'{name} holds NaN or infinity')
        model.load_state_dict(weights, assign=assign)


def read_tensors(path: Path, device: str = 'cpu') -> dict[str, torch.Tensor]:
    """Return the tensors in a .safetensors file. Raises CheckpointError."""
    need_packages(safetensors=True)
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path, device)
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


def start_export(folder: Path, kind: str, *derived: str) -> pathlib.Path:
    """Prepare a folder, new or with an earlier export of this kind, for an export, and return its
    path. A new folder gets a CONFIG that marks it but describes no model yet. Temporary files of a
    killed export are removed. Raises CheckpointError if the folder holds anything else.

    kind: a key that only the CONFIG of this kind has. derived: further files of an export."""
    path = pathlib.Path(folder)
    names = {CONFIG, WEIGHTS, *derived}
    temporary = {f'.{name}.tmp' for name in names}
    found = set(os.listdir(path)) - temporary if path.is_dir() else set()
    config = (path / CONFIG).read_text(errors='replace') if CONFIG in found else ''
    if found and not (f'"{kind}"' in config and found <= names):
        raise CheckpointError(
            f'{path}: holds files that no such export wrote: choose another folder'
        )
    path.mkdir(parents=True, exist_ok=True)
    for name in temporary:
        (path / name).unlink(missing_ok=True)
    if not found:
        write_json({kind: None}, path / CONFIG)
    return path


def adopt_sizes(
    folder: Path, names: Iterable[str], needed: tuple, config: Settings, script_globals: dict
) -> None:
    """Take the settings `names` from a folder, which holds an export, another run, or the run to
    resume or evaluate. Those that a config file or the command line sets stay.

    The settings are changed both in `config` and among the globals of the trainer. needed: keys
    that a checkpoint must have. Raises CheckpointError if the folder cannot be read, or if a value
    is not in its list in RANGES: the folder then holds a run of another trainer."""
    is_export = pathlib.Path(folder, WEIGHTS).exists()
    if config['resume'] or config['eval_only'] or is_export:
        saved = read_json(pathlib.Path(folder, CONFIG))
        sizes = saved.get('model')  # of an exported model
        script = saved.get('script')
    else:
        checkpoint, _ = load_run(folder, 'project', needed, file=BEST)
        saved, sizes = checkpoint['config'], checkpoint.get('model_config')
        script = checkpoint.get('script')
    found = {**saved, **(sizes or {})}
    for name in names:
        value = found.get(name)
        if name in config.set_by_user or type(value) is not type(config[name]):
            continue  # set by the user, or missing in the folder
        allowed = script_globals['RANGES'].get(name)
        if isinstance(allowed, list) and value not in allowed:
            raise CheckpointError(f'{folder}: holds a run of {script or "another trainer"}')
        if value != config[name]:
            print0(f'{name} = {value!r}  (from {folder})')
            config[name] = script_globals[name] = value


def init_from(
    model: torch.nn.Module,
    folder: Path,
    rename: Callable[[dict[str, torch.Tensor]], None] | None = None,
) -> None:
    """Initialize a model from an export, or from the best checkpoint of a run (the last, if there
    is no best). Every weight whose name and shape the model has is taken. Print which weights were
    taken, and which of the model and of the folder were not.

    rename(weights) replaces old names of weights in place. Raises CheckpointError if the folder
    cannot be read or no weight fits."""
    path = pathlib.Path(folder, WEIGHTS)
    if path.exists():
        weights = read_tensors(path)
    else:
        saved, path = load_run(folder, 'project', ('model',), file=BEST)
        weights = saved['model']
    initial = model.state_dict()
    with restoring(path, 'model'):
        if rename:
            rename(weights)
        fits = [k for k, x in initial.items() if k in weights and weights[k].shape == x.shape]
    if not any(initial[name].dim() for name in fits):  # a scalar fits anywhere
        raise CheckpointError(f'{path}: no weight has a name and shape of this model')
    taken = {name: weights[name] for name in fits}
    load_weights(model, {**initial, **taken}, path)
    count = sum(x.numel() for x in taken.values())
    print0(f'{path}: took {len(taken)} of {len(initial)} weights, {count:,} parameters')
    for label, tensors in (('initialized from scratch', initial), ('not taken', weights)):
        rest = [f'{name} {list(x.shape)}' for name, x in tensors.items() if name not in taken]
        if rest:
            print0(f'{label}: {", ".join(rest)}')


def save_run(run: object, parts: dict, optimizers: list[torch.optim.Optimizer] | None) -> None:
    """Save settings, weights and `parts`, on rank 0. With optimizers this is the last checkpoint,
    from which the run can be resumed, and the previous one is kept. Without them it is the best
    checkpoint, for evaluation."""
    if run.rank > 0:
        return
    saved = {'model': run.model.state_dict(), 'config': dict(run.config), **parts}
    if optimizers:
        cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
        saved['rng'] = {'torch': torch.get_rng_state(), 'cuda': cuda}
        saved['optimizers'] = [optimizer.state_dict() for optimizer in optimizers]
    path = os.path.join(run.config['out_dir'], LAST if optimizers else BEST)
    save_checkpoint(saved, path, PREV if optimizers else None)


def restore(run: object, names: tuple, optimizers: list, saved: dict, path: Path) -> None:
    """Restore a run from the checkpoint `saved`, which was read from `path`: the weights, and
    run.NAME = saved[NAME] for each of `names`. With optimizers, also restore their moments and the
    random states; an evaluation needs neither. If `path` is the previous checkpoint, because the
    last one is damaged, rename that to DAMAGED. Raises CheckpointError.

    The optimizers keep the learning rates, momentum and decay of this run, because a resumed run
    may change them. The number of CPU threads is the saved one unless a setting gives it."""
    load_weights(run.model, saved['model'], path)
    saved_threads = min(saved['config'].get('threads', 0), torch.get_num_threads())
    run.config['threads'] = run.config['threads'] or saved_threads
    with restoring(path, 'position'):
        for name in names:
            if type(saved[name]) is not type(getattr(run, name)):
                raise TypeError(f'{name} = {str(saved[name])[:80]!r}')
            setattr(run, name, saved[name])
    if not optimizers:
        return
    with restoring(path, 'optimizers or rng'):
        for optimizer, state in zip(optimizers, saved['optimizers'], strict=True):
            groups = [dict(group) for group in optimizer.param_groups]
            for group, saved_group in zip(groups, state['param_groups'], strict=True):
                group['params'] = saved_group['params']
            optimizer.load_state_dict({**state, 'param_groups': groups})
        torch.set_rng_state(saved['rng']['torch'])
        if saved['rng']['cuda'] is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(saved['rng']['cuda'])
    if run.rank == 0 and path.name == PREV and path.with_name(LAST).exists():
        # The next save must not replace the previous checkpoint by the damaged one.
        os.replace(path.with_name(LAST), path.with_name(DAMAGED))


# ---- the output folder, and signals ----


def resume_if_restarted(out_dir: Path, *settings: dict) -> None:
    """Make a run that torchrun --max-restarts has restarted resume from its last checkpoint, or
    start over if it has none, by changing every dict in `settings`. Every rank must call this
    function before rank 0 calls prepare_out_dir.

    A launch without an id of its own cannot tell whether it started the run in `out_dir`. Nothing
    is changed then, and CheckpointError is raised if `overwrite` would remove that run."""
    launch = pathlib.Path(out_dir, LAUNCH)
    if restart_count() == 0:
        return
    if launch_id() in ('', 'none'):
        if any(config.get('overwrite') for config in settings):
            advice = 'to resume after restarts, start it with --standalone or --rdzv_id=NAME'
            raise CheckpointError(f'{out_dir}: restarted by torchrun without an id: {advice}')
        return
    if not launch.exists() or launch.read_text() != launch_id():
        return
    if saved_in(out_dir):
        print0('restarted by torchrun: resuming')
        changes = {'resume': True, 'overwrite': False}
    else:
        print0('restarted by torchrun: from the start')
        changes = {'resume': False, 'overwrite': True}
    for config in settings:
        config.update(changes)


def lock_folder(path: pathlib.Path, name: str = LOCK) -> filelock.BaseFileLock:
    """Lock the file `name` of a folder for one run and return the lock, which the system releases
    at the latest when this process ends. Raises CheckpointError, naming the other process, if the
    file is locked."""
    lock = filelock.FileLock(path / name, fallback_to_soft=False)
    try:
        lock.acquire(blocking=False)
    except filelock.Timeout:
        holder = (path / name).read_text(errors='replace')[:200].strip()
        advice = 'wait for its end, stop it, or choose another out_dir'
        raise CheckpointError(f'{path}: another run is using it ({holder}): {advice}') from None
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
            raise
        print0(f'warning: {path}: this file system has no locks: let no other run use the folder')
    (path / name).write_text(f'process {os.getpid()} on {platform.node()}\n')
    return lock


def find_files(path: pathlib.Path, *patterns: str) -> list[pathlib.Path]:
    """Return the sorted paths of the files in a folder that match one of the patterns."""
    return sorted(f for p in patterns for f in path.glob(p) if not f.is_dir())


def holds_run(out_dir: Path) -> bool:
    """Return whether a folder holds a checkpoint or a log. Without `resume` and `overwrite`,
    prepare_out_dir refuses such a folder."""
    return bool(find_files(pathlib.Path(out_dir), 'ckpt_*.pt', 'log.jsonl'))


def prepare_out_dir(
    out_dir: Path, resume: bool = False, overwrite: bool = False
) -> filelock.BaseFileLock:
    """Create or check the output folder of a run, lock it and return the lock.

    resume: the run continues in this folder. overwrite: RUN_FILES are removed from it. Temporary
    files of a killed run are always removed. Raises CheckpointError if the folder holds a run (a
    checkpoint or a log) and neither setting is true; and, even with overwrite, if it has RUN_FILES
    but no LOCK, because then no run has written them."""
    path = pathlib.Path(out_dir)
    names = RUN_FILES.split()
    if resume and overwrite:
        raise CheckpointError('--resume and --overwrite exclude each other: choose one')
    if resume and not saved_in(path):
        advice = f'; {REPLACE}' if holds_run(path) else ''
        raise CheckpointError(f'{path}: holds no trained run, there is no {LAST}{advice}')
    try:
        path.mkdir(parents=True, exist_ok=True)
        files = find_files(path, *names)
        if files and not (resume or (path / LOCK).exists()):
            reason = f'holds {files[0].name}, which no run of ours wrote'
            advice = 'choose another out_dir, or move the file away'
            raise CheckpointError(f'{path}: {reason}: {advice}')
        lock = lock_folder(path)
        if restart_count() == 0:
            # If the folder is refused below, a restart by torchrun must be refused too.
            (path / LAUNCH).unlink(missing_ok=True)
    except OSError as error:
        reason = 'it is a file' if path.is_file() else error.strerror
        raise CheckpointError(f'{path}: cannot be used as the output folder: {reason}') from None
    if holds_run(path) and not (resume or overwrite):
        lock.release()
        advice = f'it has no checkpoint to resume from: {REPLACE}'
        if saved_in(path):
            advice = f'continue it with --resume=True, or {REPLACE}'
        raise CheckpointError(f'{path}: holds a run already: {advice}')
    to_remove = [f'.{name}.tmp' for name in names]
    if overwrite:
        to_remove += names
    for file in find_files(path, *to_remove):
        file.unlink()
    if 'TORCHELASTIC_RESTART_COUNT' in os.environ:
        (path / LAUNCH).write_text(launch_id())
    return lock


class Stopper:
    """Turn SIGTERM, ctrl-C and SIGHUP (a closed terminal; not under nohup) into a flag. The loop
    reads `stopper.signal` (None, or the signal's number) between updates, saves and ends.

    A second ctrl-C raises KeyboardInterrupt at once. Under torchrun each ctrl-C arrives twice, from
    the terminal and from the launcher, so that a second one within a second is ignored. The ranks
    must agree on the flag (all-reduce) before they act on it. A Stopper must be created in the main
    thread, because Python handles signals there."""

    running = False  # whether signals are handled, between __init__ and restore
    stopping = False  # whether this process has received a signal

    def __init__(self):
        Stopper.running = True
        self.signal = None
        self.time = 0.0  # of the last signal that was not a second ctrl-C
        numbers = [signal.SIGTERM, signal.SIGINT]
        if hasattr(signal, 'SIGHUP') and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        self.former = {number: signal.signal(number, self.handle) for number in numbers}

    def handle(self, number: int, frame: object) -> None:
        """Handle a signal: set the flag."""
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
        first = self.signal is None
        if not again:
            self.signal, self.time = number, time.monotonic()
        if first:  # print is not safe inside a handler
            with contextlib.suppress(OSError):  # the terminal is gone, or the disk is full
                os.write(2, b'\nstopping after this update (ctrl-C again: at once)\n')

    def restore(self) -> None:
        """Restore the former handlers."""
        Stopper.running = False
        for number, handler in self.former.items():
            signal.signal(number, handler)


# ---- logs and trackers ----


def open_log(run: object, resume: bool, script: str) -> Callable[[dict], None]:
    """Write config.json (the settings, the trainer's file name `script`, the commit and the device)
    and return write(record), which appends a line to log.jsonl.

    A resumed run keeps the lines before the step of its checkpoint. That step is evaluated and
    logged again, because the run may have died before it was logged. Later lines and half-written
    ones are removed."""
    folder = pathlib.Path(run.config['out_dir'])
    about = {
        'script': script,
        'commit': commit(),
        'torch': torch.__version__,
        'device_name': device_name(run.device),
    }
    write_json({**run.config, **about}, folder / 'config.json')
    path = folder / 'log.jsonl'
    kept = []
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
            error.filename = str(path)  # the error of a full disk names no file
            raise

    return write


def all_finite(run: object, loss: float, norm: float, weights: bool) -> bool:
    """Return whether the loss, the gradient norm and, if `weights` is true, all weights are finite;
    print an error naming the first that is not. Call it with weights=True before a checkpoint is
    saved, because a weight that is not finite shows only in the loss of the next update."""
    if not math.isfinite(loss):
        problem = f'the loss is {loss}'
    elif not math.isfinite(norm):
        problem = f'the gradient norm is {norm}'
    elif weights and not all(p.isfinite().all() for p in run.model.parameters()):
        problem = 'a weight is not finite'
    else:
        return True
    saved = last_saved(run.config['out_dir'])
    print0(f'error: update {run.step + 1}: {problem}: stopped without saving; {saved}')
    return False


def report_end(run: object, stopper: Stopper, updates: int, summary: str) -> int:
    """Print the last line of a run that has done all its updates or was stopped, and restore the
    signal handlers. Return the exit status: 0 = done, 128 + signal = stopped."""
    stopper.restore()
    out_dir = run.config['out_dir']
    if run.step >= updates:
        print0(f'done: {summary}; {out_dir}/{LAST}')
        return 0
    print0(f'stopped after update {run.step}, saved in {out_dir}: --resume=True continues')
    return 128 + (stopper.signal or signal.SIGTERM)  # None if another rank was stopped


def last_saved(out_dir: str) -> str:
    """Return the part of a message that names the checkpoint from which a run can be resumed."""
    paths = saved_in(out_dir)
    if paths:
        return f'the last checkpoint is {paths[0]}: --resume=True continues from it'
    return f'nothing is saved in {out_dir} yet'


def error_explainer(less_memory: str, settings: dict | None = None) -> Callable[[Exception], str]:
    """Return the function explain(error) for configurator.run_script. It returns one line about an
    error that ends a script: that memory ran out, or that another rank died or cannot be reached.
    It raises any other error again.

    less_memory: what needs less memory, for the message. settings: the globals() of a trainer, for
    its out_dir."""

    def explain(error: Exception) -> str:
        if memory := out_of_memory(error):
            return f'out of {memory}: {less_memory} ({first_line(error)})'
        if settings and (isinstance(error, dist.DistError) or 'gloo/transport' in str(error)):
            reason = f'rank {os.environ.get("RANK")}: another rank died, or cannot be reached'
            return f'{reason}; {last_saved(settings["out_dir"])} ({first_line(error)})'
        raise error

    return explain


def open_trackers(
    config: dict, tensorboard: bool, wandb_project: str, first_step: int | None = None
) -> tuple[Callable, Callable]:
    """Return write(record) and close() for TensorBoard, if it is wanted, and for Weights & Biases,
    if a project is named. Both get the settings, and the numbers and GIFs of each record.
    first_step: of a run that is resumed; TensorBoard hides what it wrote before from there on."""
    board, run = None, None
    out_dir = config['out_dir']
    stack = contextlib.ExitStack()  # closes what was opened
    if tensorboard:
        from tensorboard.compat.proto.summary_pb2 import Summary
        from torch.utils.tensorboard import SummaryWriter

        board = SummaryWriter(out_dir, purge_step=first_step)
        stack.callback(board.close)
        board.add_text('settings', '\n'.join(f'    {k} = {v!r}' for k, v in config.items()))
    if wandb_project:
        import wandb

        options = {'project': wandb_project, 'name': str(out_dir), 'config': dict(config)}
        earlier = sorted(pathlib.Path(out_dir).glob('wandb/*run-*'))
        if earlier and (config['resume'] or config['eval_only']):  # continue the last of them
            options.update(id=earlier[-1].name.rpartition('-')[2], resume='allow')
        try:
            run = wandb.init(dir=out_dir, **options)
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

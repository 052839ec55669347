"""Ranks and devices: the process group, the sum of gradients over ranks, the choice of device and
dtype, and what happens when one of these fails."""

import contextlib
import ctypes
import datetime
import gc
import math
import os
import pathlib
import platform
import re
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator

from support.script import UserError, find_rank, first_line, print0, under_torchrun, warn

import torch
import torch.distributed as dist

from support.compiling import fused

if tuple(map(int, torch.__version__.split('.')[:2])) < (2, 11):  # no earlier version was tried
    raise ImportError(f'torch {torch.__version__} is too old: 2.11 or later is needed')

TIMEOUT = datetime.timedelta(minutes=10)  # until all ranks have met
# For a rank that does not answer: rank 0 may write a checkpoint of 50 GB while the others validate.
TIMEOUT_OF_RUN = datetime.timedelta(minutes=60)
# Parts of the messages of torch's RuntimeErrors after a failed allocation in host memory.
ALLOCATION_FAILED = (
    'DefaultCPUAllocator',
    "can't allocate memory",
    'std::bad_alloc',
    'Storage size calculation over',
    'integer multiplication overflow',
)
# Parts of those after one in GPU memory outside of torch's allocator, by the driver or a compiler.
GPU_FULL = ('out of memory', 'OutOfMemoryError', 'ALLOC_FAILED')
# What tells generations of processors apart, by its name in /proc/cpuinfo (x86, then ARM).
GENERATION = {
    'family': 'cpu family',
    'model': 'model',
    'implementer': 'CPU implementer',
    'part': 'CPU part',
}


# ---- ranks ----


def attempt(name: str, call: Callable[[], object]) -> None:
    """Call something that only reports, such as a plot; if it fails, print a warning."""
    try:
        call()
    except Exception as error:  # noqa: BLE001  a report must never end a run
        warn(f'{name}: {first_line(error)}')


@contextlib.contextmanager
def keeping_buffers(model: torch.nn.Module) -> Iterator[None]:
    """Restore the buffers of a model after a trial: an edit may count in them, or keep averages."""
    former = {name: x.clone() for name, x in model.named_buffers()}
    try:
        yield
    finally:
        for name, x in model.named_buffers():
            x.copy_(former[name])


@contextlib.contextmanager
def evaluating(module: torch.nn.Module) -> Iterator[None]:
    """Put a module into evaluation mode within a with statement: an edit, such as dropout, may read
    its `training`. A part that is frozen in evaluation mode stays so."""
    training = [part for part in module.modules() if part.training]
    for part in training:
        part.training = False
    try:
        yield
    finally:
        for part in training:
            part.training = True


def run_compiled(call: Callable[[], object]) -> object:
    """Return call(), which runs compiled functions. If that fails, say why, switch compilation off
    and call it again; an error that has another cause is raised then."""
    try:
        return call()
    except Exception as error:
        if not fused.enabled or isinstance(error, UserError) or out_of_memory(error):
            raise
        print0(f'compile = True does not work here; running uncompiled ({first_line(error)})')
        fused.enabled = False
    return call()


def Throttle(seconds: float = 10.0) -> Callable[..., bool]:
    """Return a function due() that is true at most once every `seconds`; for progress lines.
    due(restart=True) starts a new wait in any case."""
    last = time.monotonic()

    def due(restart: bool = False) -> bool:
        nonlocal last
        is_due = time.monotonic() - last >= seconds
        if restart or is_due:
            last = time.monotonic()
        return is_due

    return due


def join_ranks(device: str, threads: int) -> tuple[int, int, str]:
    """Join the process group, under torchrun, and return the rank, the number of ranks and the
    device ('cpu', 'mps' or 'cuda:N') of this process. device, threads: see pick_device."""
    rank, world = find_rank()
    if left := [name for name in ('RANK', 'WORLD_SIZE') if name in os.environ]:
        if not under_torchrun():
            print0(f'{" and ".join(left)} in the environment: ignored, torchrun has not set it')
    device = pick_device(device, threads)
    backend = 'gloo'
    if device.startswith('cuda'):
        backend = 'cpu:gloo,cuda:nccl'
        # Less fragmentation. Torch reads this when CUDA starts.
        if not {'PYTORCH_ALLOC_CONF', 'PYTORCH_CUDA_ALLOC_CONF'} & os.environ.keys():
            os.environ['PYTORCH_ALLOC_CONF'] = 'expandable_segments:True'
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision('high')
    else:
        keep_memory()
    if world > 1:
        address = f'{os.environ["MASTER_ADDR"]}:{os.environ["MASTER_PORT"]}'
        with contextlib.suppress(OSError):  # of standard error
            text = f'rank {rank} of {world}: waiting for the others at {address}'
            print(text, file=sys.stderr, flush=True)
        # The store of torchrun survives a restart. Without a prefix for each attempt, the restarted
        # ranks would find the addresses of the dead ones.
        restarts = os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)
        store, _, _ = next(dist.rendezvous('env://', timeout=TIMEOUT))
        store = dist.PrefixStore(f'attempt {restarts}', store)
        # With a device, NCCL starts here, and barriers do not have to guess it.
        bound = torch.device(device) if device.startswith('cuda') else None
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=world,
            timeout=TIMEOUT_OF_RUN,
            device_id=bound,
        )
    return rank, world, device


def agree(*values: object) -> bool:
    """Return whether all ranks have the same values, which are compared as text."""
    if not dist.is_initialized():
        return True
    number = zlib.crc32(repr(values).encode())
    both = torch.tensor([number, -number])
    dist.all_reduce(both, dist.ReduceOp.MIN)
    return bool(both.sum() == 0)


def share_settings(config: dict) -> None:
    """Give all ranks the settings of rank 0, except folders and devices, which hosts may name
    differently. Raises UserError if the ranks have runs of their own: a program that a rank starts
    inherits RANK, and would join as a rank."""
    if dist.is_initialized():
        names = [None] * dist.get_world_size()
        dist.all_gather_object(names, os.path.basename(os.path.normpath(config['out_dir'])))
        if len(set(names)) > 1:
            advice = 'give all ranks the same, or start runs of their own without RANK'
            raise UserError(f'out_dir: the ranks have {", ".join(sorted(set(names)))}: {advice}')
        settings = [dict(config)]
        dist.broadcast_object_list(settings)
        local = {'init_from', 'device', 'threads'} | {k for k in config if k.endswith('_dir')}
        config.update({k: x for k, x in settings[0].items() if k not in local})


def compare_ranks(*values: object) -> None:
    """Raise UserError if the ranks have different values, which tell of their files."""
    if not agree(*values):
        advice = 'give all hosts the same files'
        raise UserError(f'the ranks differ in data, checkpoints or log.jsonl: {advice}')


def share_weights(model: torch.nn.Module) -> None:
    """Give all ranks the weights of rank 0."""
    if dist.is_initialized():
        for x in model.state_dict().values():
            if x.numel():
                dist.broadcast(x, 0)


def is_first() -> bool:
    """Return whether this is rank 0, or the only process."""
    return not dist.is_initialized() or dist.get_rank() == 0


def from_first(value: object) -> object:
    """Return rank 0's value, any picklable object, on all ranks."""
    if not dist.is_initialized():
        return value
    values = [value]
    dist.broadcast_object_list(values, 0)
    return values[0]


def leave_ranks() -> None:
    """Wait for all ranks and leave the process group."""
    if dist.is_initialized():
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


def fill(tensor: torch.Tensor, saved: torch.Tensor) -> None:
    """Copy `saved` into `tensor`. Raises ValueError unless it is a tensor of the same shape; copy_
    alone would broadcast."""
    if not isinstance(saved, torch.Tensor) or tensor.shape != saved.shape:
        shape = list(getattr(saved, 'shape', []))
        raise ValueError(f'expected a tensor of shape {list(tensor.shape)}, found {shape}')
    tensor.copy_(saved)


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


def all_finite(model: torch.nn.Module) -> bool:
    """Return whether all weights are finite. Call this before a checkpoint is saved, because a
    weight that is not finite shows only in the loss of the next update."""
    return all(bool(p.isfinite().all()) for p in model.parameters())


def compare_weights(model: torch.nn.Module) -> None:
    """Print a warning if sums of the weights' bits differ between ranks. Every rank calls this
    before a checkpoint, which has the weights of rank 0 alone."""
    if not dist.is_initialized():
        return
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    weights = [p.detach() for p in model.parameters() if p.numel()]
    sums = [x.view(integers[x.element_size()]).sum(dtype=torch.int64) for x in weights]
    if not agree(torch.stack(sums).tolist()):
        advice = 'if an update draws random numbers, give all ranks one seed for them'
        also = 'unlike processors may differ, too'
        print0(f"warning: the weights of the ranks differ, rank 0's are saved: {advice} ({also})")


# ---- the device ----


def pick_device(name: str, threads: int = 0) -> str:
    """Return 'cpu', 'mps' or 'cuda:N' for a `device` setting, and set the number of CPU threads.

    'auto' is a CUDA device if there is one, else the CPU. Under torchrun each rank gets a GPU of
    its own. threads = 0 leaves torch's choice. Raises UserError for a device that is not there."""
    device = ('cuda' if torch.cuda.is_available() else 'cpu') if name == 'auto' else name
    if not re.fullmatch(r'cpu|mps|cuda(:\d+)?', device):
        raise UserError(f"device = {name!r}: expected 'auto', 'cpu', 'mps', 'cuda' or 'cuda:N'")
    if threads:
        torch.set_num_threads(threads)
    if device == 'mps' and not torch.backends.mps.is_available():
        raise UserError(f'device = {name!r}: this torch finds no Apple GPU: choose --device=cpu')
    if not device.startswith('cuda'):
        return device
    if not torch.cuda.is_available():
        raise UserError(f'device = {name!r}: this torch finds no CUDA device: choose --device=cpu')
    index = int(os.environ['LOCAL_RANK'] if under_torchrun() else device[5:] or 0)
    count = torch.cuda.device_count()
    if index >= count:
        raise UserError(f'device = cuda:{index}: there are {count} CUDA devices')
    return f'cuda:{index}'


def bf16_is_fast(device: str | torch.device) -> bool:
    """Return whether the device multiplies matrices in bfloat16 faster than in float32.

    CPUs with AMX or AVX512-BF16 instructions do; others emulate bfloat16, up to 40 times slower
    than float32. With ATEN_CPU_CAPABILITY=avx2 in the environment, torch's switch that turns
    AVX-512 off, a CPU counts as one without them."""
    if torch.device(device).type == 'cuda':
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if torch.backends.cpu.get_cpu_capability() in ('DEFAULT', 'NO AVX', 'AVX2'):
        return False
    return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()


def pick_dtype(name: str, device: str) -> torch.dtype:
    """Return the dtype of matrix products for a `dtype` setting; 'auto' is bfloat16 if the device
    is fast at it, else float32. Raises UserError for any other name."""
    if name not in ('auto', 'float32', 'bfloat16'):
        raise UserError(f"dtype = {name!r}: expected 'auto', 'float32' or 'bfloat16'")
    if name == 'auto':
        name = 'bfloat16' if bf16_is_fast(device) else 'float32'
    if name == 'bfloat16' and device == 'cpu' and not bf16_is_fast(device):
        warn("dtype = 'bfloat16': this CPU emulates it, slowly: --dtype=float32 is faster")
    return getattr(torch, name)


def device_name(device: str) -> str:
    """Return the name of the GPU, or that of the processor with the numbers that tell generations
    apart, as in 'CPU AMD EPYC, family 25 model 17': virtual machines hide the rest of the name."""
    if device.startswith('cuda'):
        return torch.cuda.get_device_name(device)
    first = ''
    with contextlib.suppress(OSError):
        first = pathlib.Path('/proc/cpuinfo').read_text().partition('\n\n')[0]
    fields = {k.strip(): x.strip() for k, _, x in (s.partition(':') for s in first.splitlines())}
    name = fields.get('model name') or platform.processor() or platform.machine()
    numbers = ' '.join(f'{k} {fields[x]}' for k, x in GENERATION.items() if x in fields)
    return f'CPU {name}' + (f', {numbers}' if numbers else '')


def release_memory() -> None:
    """Free the GPU memory of what is no longer used. Autograd's graphs may hold cycles of objects,
    which only the garbage collector frees."""
    gc.collect()
    torch.cuda.empty_cache()


def out_of_memory(error: BaseException) -> str:
    """Return 'GPU memory' or 'memory' if the error says that it ran out, and '' otherwise."""
    if isinstance(error, torch.OutOfMemoryError):
        return 'GPU memory'
    if isinstance(error, MemoryError):
        return 'memory'
    if isinstance(error, RuntimeError) and any(text in str(error) for text in GPU_FULL):
        return 'GPU memory'
    if isinstance(error, RuntimeError) and any(text in str(error) for text in ALLOCATION_FAILED):
        return 'memory'
    return ''


@contextlib.contextmanager
def explain_errors(less_memory: str) -> Iterator[None]:
    """Decorate a function, such as main(): raise UserError, of one line, if memory runs out, or if
    another rank died or cannot be reached. less_memory: what needs less memory, for the message."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if memory := out_of_memory(error):
            raise UserError(f'out of {memory}: {less_memory} ({first_line(error)})') from None
        if isinstance(error, dist.DistError) or 'gloo/transport' in str(error):
            reason = f'rank {find_rank()[0]}: another rank died, or cannot be reached'
            advice = '--resume=True continues from the last checkpoint'
            raise UserError(f'{reason}; {advice}') from None
        raise


def keep_memory() -> None:
    """Keep freed memory in the process, where the C library is glibc.

    By default glibc returns large blocks to the system, which clears their pages again when a
    training loop allocates the same blocks in its next step: a fifth of the time on a CPU."""
    with contextlib.suppress(OSError, AttributeError, TypeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-4, 0)  # M_MMAP_MAX: no block gets a mapping of its own
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: the heap does not shrink

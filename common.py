"""What every trainer needs: checkpoints, resumable logs, random states, the device, ranks, the
output folder, signals.

Checkpoints hold tensors and plain types and are read with weights_only=True: one from a stranger
runs no code. With several ranks, one rank writes and prepares the folder.
"""

import contextlib
import ctypes
import datetime
import fcntl
import functools
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
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TextIO

from configurator import Mistake, fail, first_line, plain, write_atomic, write_json, write_text

import torch
import torch.distributed as dist

from kernels import bf16_is_fast

if tuple(map(int, torch.__version__.split('.')[:2])) < (2, 11):  # none older was ever tried
    fail(f'torch {torch.__version__} is too old: 2.11 or later is needed')

LAST, PREV, BEST = 'ckpt_last.pt', 'ckpt_prev.pt', 'ckpt_best.pt'
WEIGHTS, CONFIG = 'model.safetensors', 'config.json'  # of an export
LOCK = '.run'  # held while a run is at work in its folder, which it marks as a run's
BEGUN = '.begun'  # the folder's run was begun by the torchrun that wrote this last
# what a run writes into its folder, and overwrite removes
RUN_FILES = 'ckpt_*.pt log.jsonl config.json loss.png curve.png eval_*.json eval_*.gif *.tfevents.*'
PATIENCE = datetime.timedelta(minutes=10)  # with a rank that does not answer
PEAK = {'H100 PCIe': 756e12, 'H100 NVL': 835e12, 'H100': 989e12}  # FLOP/s, dense bf16; first counts
PEAK |= {'H200': 989e12, 'B200': 2250e12}
PEAK |= {'NVIDIA A100': 312e12, 'L40S': 362e12, '4090': 165e12}
# what torch.load and load_state_dict raise on damaged or foreign files
UNREADABLE = (RuntimeError, ValueError, LookupError, TypeError, AttributeError, EOFError)
UNREADABLE += (ArithmeticError, pickle.UnpicklingError, struct.error)


Path = str | os.PathLike


class CheckpointError(Mistake):
    """A checkpoint, or an output folder, cannot be used: one line that says what to do."""


# ---- checkpoints, and models as plain files ----


def save_checkpoint(obj: dict, path: Path, keep: str | None = None) -> None:
    """Saves obj (tensors and plain types) as a whole or not at all; with keep=PREV the checkpoint
    that was at `path` goes on under that name. OSError (such as a full disk)."""

    def write(file):
        try:
            torch.save(obj, file)
        except RuntimeError as error:  # torch complains of a position; what happened comes before
            full = isinstance(error.__context__, OSError)
            raise (error.__context__ if full else error) from None

    write_atomic(path, write, keep)


def load_checkpoint(path: Path) -> dict:
    """-> what save_checkpoint saved, with its tensors on the CPU. CheckpointError."""
    try:
        with zipfile.ZipFile(path) as file:  # torch's format, whose checksums torch ignores
            if file.testzip() is not None:
                raise zipfile.BadZipFile('wrong checksum')
        return torch.load(path, map_location='cpu', weights_only=True, mmap=False)
    except OSError as error:
        raise CheckpointError(f'{path}: cannot be opened: {error.strerror}') from None
    except (zipfile.BadZipFile, *UNREADABLE) as error:
        why = f'damaged, cut short or not a checkpoint ({first_line(error)})'
        if 'eights only load failed' in why or 'weights_only' in why:
            why = 'holds Python objects, refused because loading them could run code'
        raise CheckpointError(f'{path}: {why}: give another file, or delete it') from None


def saved_in(out_dir: Path) -> list[pathlib.Path]:
    """The checkpoints from which a run can go on, the newest first."""
    return [path for name in (LAST, PREV) if (path := pathlib.Path(out_dir, name)).exists()]


def load_latest(out_dir: Path) -> tuple[dict, pathlib.Path]:
    """-> the last checkpoint in the folder or, with a line that says so, the one before, and its
    path. CheckpointError if neither can be read."""
    if not (paths := saved_in(out_dir)):
        raise CheckpointError(f'{out_dir}: holds no trained run, there is no {LAST}')
    try:
        return load_checkpoint(paths[0]), paths[0]
    except CheckpointError as error:
        if len(paths) == 1:
            raise
        print0(f'warning: {error}; going on from {paths[1]}')
        return load_checkpoint(paths[1]), paths[1]


def load_run(folder: Path, script: str, needed: tuple, fixed: tuple, config: dict, file=''):
    """-> a run's last checkpoint, or `file` of its folder if it is there, and the path.
    CheckpointError where it lacks a key of `needed`, or where a setting of `fixed`, that would make
    it another run, differs from config's."""
    path = pathlib.Path(folder, file or LAST)
    named = file and path.exists()
    saved, where = (load_checkpoint(path), path) if named else load_latest(folder)
    theirs = saved.get('config') if isinstance(saved, dict) else None
    missing = ['config']
    if isinstance(theirs, dict):
        missing = [key for key in needed if key not in saved]
        missing += [name for name in fixed if name not in theirs]
    if missing:
        words = f'not a checkpoint of this {script} (missing: {", ".join(missing)})'
        raise CheckpointError(f'{where}: {words}')
    for name in fixed:
        if theirs[name] != config[name]:
            words = f'was trained with {name} = {theirs[name]!r}, not {config[name]!r}'
            raise CheckpointError(f'{where}: {words}: give the same value, or another out_dir')
    return saved, where


@contextlib.contextmanager
def restoring(where: Path, key: str) -> Iterator[None]:
    """Around what restores a part of a checkpoint: what does not fit becomes a CheckpointError that
    names the file and the part."""
    try:
        yield
    except UNREADABLE as error:
        if isinstance(error, CheckpointError) or out_of_memory(error):
            raise
        why = ' '.join(f'{type(error).__name__}: {error}'.split())[:200]  # of torch's lines
        raise CheckpointError(f'{where}: {key} does not fit, or is damaged ({why})') from None


def load_weights(model: torch.nn.Module, weights: dict, where: Path, assign: bool = False) -> None:
    """model.load_state_dict(weights), all there, of the model's shapes and finite; CheckpointError
    names file and weight. assign: the model is on 'meta' and takes the tensors themselves."""
    with restoring(where, 'model'):
        if broken := [name for name, x in weights.items() if not x.isfinite().all()]:
            raise ValueError(f'{broken[0]} holds NaN or infinity')
        model.load_state_dict(weights, assign=assign)


def read_tensors(path: Path, device: str = 'cpu') -> dict[str, torch.Tensor]:
    """A .safetensors file. CheckpointError."""
    need_packages(safetensors=True)
    from safetensors import SafetensorError, torch as files

    try:
        return files.load_file(path, device)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f'{path}: cannot be read ({first_line(error)})') from None


def write_tensors(tensors: dict[str, torch.Tensor], path: Path) -> str:
    """-> what was written, in words."""
    need_packages(safetensors=True)
    from safetensors.torch import save

    whole = {name: x.detach().cpu().contiguous() for name, x in tensors.items()}
    data = save(whole, metadata={'format': 'pt'})
    write_atomic(path, lambda file: file.write(data))
    return f'{path} ({len(data) / 1e6:.1f} MB)'


def begin_export(folder: Path, kind: str, *made: str) -> pathlib.Path:
    """Begins an export, in a new folder or in place of an earlier one of its kind -> its CONFIG,
    which describes no model yet. kind: a key that only this kind's CONFIG has; made: files made of
    the earlier one, which go with it."""
    path = pathlib.Path(folder)
    there = set(os.listdir(path)) if path.is_dir() else set()
    about = (path / CONFIG).read_text(errors='replace') if CONFIG in there else ''
    if there and not (f'"{kind}"' in about and there <= {CONFIG, WEIGHTS, *made}):
        fail(f'export = {str(folder)!r}: holds what no such export wrote: name another folder')
    path.mkdir(parents=True, exist_ok=True)
    write_json({kind: None}, path / CONFIG)
    for name in made:
        (path / name).unlink(missing_ok=True)
    return path / CONFIG


# ---- a trainer's run: it has rank, world, config, model, step, and what POSITION names ----


def init_from(model: torch.nn.Module, folder: Path, resume: bool) -> None:
    """A new run's weights from the best checkpoint in another's folder, if there is one, or the
    last; or from an export. Taken is what has name and shape of one of `model`'s, whatever the
    settings; lines say what was and what was not. CheckpointError."""
    if resume:
        raise CheckpointError('--init_from begins a new run: not with --resume or --eval_only')
    where = pathlib.Path(folder, WEIGHTS)
    if where.exists():
        weights = read_tensors(where)
    else:
        saved, where = load_run(folder, 'project', ('model',), (), {}, BEST)
        weights = saved['model']
    ours = model.state_dict()
    with restoring(where, 'model'):
        fits = {k for k, x in ours.items() if k in weights and weights[k].shape == x.shape}
    if not any(ours[name].dim() for name in fits):  # a scalar fits anywhere
        raise CheckpointError(f'{where}: no weight has a name and shape of this model')
    load_weights(model, ours | {name: weights[name] for name in fits}, where)
    count = sum(ours[name].numel() for name in fits)
    print0(f'{where}: took {len(fits)} of {len(ours)} weights, {count:,} parameters')
    for words, whose in (('begun anew', ours), ('not taken', weights)):
        if left := [f'{name} {list(x.shape)}' for name, x in whose.items() if name not in fits]:
            print0(f'{words}: {", ".join(left)}')


def save_run(run: object, parts: dict, optimizers: list[torch.optim.Optimizer] | None) -> None:
    """Settings, weights, and parts: with the optimizers the last checkpoint, from which a run goes
    on (the one before is kept), without them the best, for evaluation. The first rank's."""
    if run.rank > 0:
        return
    saved = {'model': run.model.state_dict(), 'config': run.config, **parts}
    if optimizers:
        cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
        saved |= {'rng': {'torch': torch.get_rng_state(), 'cuda': cuda}}
        saved |= {'optimizers': [o.state_dict() for o in optimizers]}
    path = os.path.join(run.config['out_dir'], LAST if optimizers else BEST)
    save_checkpoint(saved, path, PREV if optimizers else None)


def restore(run: object, names: tuple, optimizers: list, saved: dict, where: Path) -> None:
    """The weights; run.NAME = saved[NAME]; of the optimizers the moments, with this run's settings
    (a resumed run may change learning rates, momentum, decay, and the device), and the random
    states; without optimizers, for an evaluation, neither. CheckpointError."""
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
        for optimizer, its in zip(optimizers, saved['optimizers'], strict=True):
            groups = [dict(group) for group in optimizer.param_groups]
            for group, theirs in zip(groups, its['param_groups'], strict=True):
                group['params'] = theirs['params']
            optimizer.load_state_dict({**its, 'param_groups': groups})
        torch.set_rng_state(saved['rng']['torch'])
        if saved['rng']['cuda'] is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(saved['rng']['cuda'])


def open_log(run: object, resume: bool) -> Callable[[dict], None]:
    """Writes config.json, the settings and what they run with -> write(record), a line of
    log.jsonl. That goes on from the checkpoint's own step: it is evaluated and logged again, for
    the run may have died in between; later lines and half-written ones are dropped."""
    folder, stay = pathlib.Path(run.config['out_dir']), []
    about = {'commit': commit(), 'torch': torch.__version__}
    about['device_name'] = device_name(run.device)
    write_json(run.config | about, folder / 'config.json')
    path = folder / 'log.jsonl'
    if resume and path.exists():
        for line in path.read_text(encoding='utf-8', errors='replace').splitlines():
            with contextlib.suppress(ValueError, TypeError, LookupError):
                if json.loads(line)['step'] < run.step:
                    stay.append(line + '\n')
    write_text(''.join(stay), path)

    def write(record: dict) -> None:
        try:
            with open(path, 'a', encoding='utf-8') as file:
                file.write(json.dumps(plain(record)) + '\n')
        except OSError as error:
            error.filename = str(path)  # a full disk does not say whose write it refused
            raise

    return write


def finite(run: object, weights: bool, loss: float, norm: float) -> bool:
    """Whether an update's loss and gradient norm are, and the weights if asked for: a broken weight
    shows only in the next loss. A line says what is not."""
    good = math.isfinite(loss) and math.isfinite(norm)
    if good and weights:
        good = all(p.isfinite().all() for p in run.model.parameters())
    if not good:
        what = f'update {run.step + 1}: loss {loss}, gradient norm {norm}, or a weight'
        kept = last_saved(run.config['out_dir'])
        print0(f'error: {what}, is not finite: stopped, nothing saved of it; {kept}')
    return good


def ended(run: object, stopper: 'Stopper', updates: int, done: str) -> int:
    """The last line of a run that has all its updates, or was stopped -> its exit status."""
    stopper.restore()
    out_dir = run.config['out_dir']
    if run.step >= updates:
        print0(f'done: {done}; {out_dir}/{LAST}')
        return 0
    print0(f'stopped after update {run.step}, saved in {out_dir}: --resume=True goes on')
    return 128 + (stopper.signal or signal.SIGTERM)  # of another rank's


def leave(run: object) -> None:
    """Ranks leave together; one that fails leaves at once."""
    if run.lock:
        run.lock.close()
    if run.world > 1:
        dist.barrier()
        dist.destroy_process_group()


def fill(mine: torch.Tensor, saved: torch.Tensor) -> None:
    """mine.copy_(saved), of the same shape: copy_ alone would repeat a smaller one. ValueError."""
    if not isinstance(saved, torch.Tensor) or mine.shape != saved.shape:
        shape = list(getattr(saved, 'shape', []))
        raise ValueError(f'expected a tensor of shape {list(mine.shape)}, found {shape}')
    mine.copy_(saved)


# ---- the device, the ranks, the packages ----


def pick_device(name: str, threads: int = 0) -> str:
    """-> 'cpu' or 'cuda:N' for a `device` setting; 'auto' is cuda where there is one. Under
    torchrun each rank gets its own. threads: for a CPU, 0 is torch's choice. Mistake."""
    device = ('cuda' if torch.cuda.is_available() else 'cpu') if name == 'auto' else name
    if not re.fullmatch(r'cpu|cuda(:\d+)?', device):
        raise Mistake(f"device = {name!r}: expected 'auto', 'cpu', 'cuda' or 'cuda:N'")
    if threads:
        torch.set_num_threads(threads)
    if device == 'cpu':
        return device
    if not torch.cuda.is_available():
        raise Mistake(f'device = {name!r}: there is no CUDA device here')
    index = int(os.environ.get('LOCAL_RANK') or device[5:] or 0)
    if index >= (count := torch.cuda.device_count()):
        raise Mistake(f'device = cuda:{index}: there are {count} CUDA devices here')
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
    """-> the dtype of products for a `dtype` setting; 'auto': bfloat16 where that is fast."""
    if name not in ('auto', 'float32', 'bfloat16'):
        raise Mistake(f"dtype = {name!r}: expected 'auto', 'float32' or 'bfloat16'")
    fast = name == 'auto' and bf16_is_fast(device)
    return torch.bfloat16 if name == 'bfloat16' or fast else torch.float32


def print0(text: str) -> None:
    """Prints on the first rank alone."""
    if os.environ.get('RANK', '0') == '0':
        try:
            print(text, flush=True)
        except BrokenPipeError:
            if not Stopper.stopping:  # ctrl-C ends `| tee` too: we save all the same
                raise


def attempt() -> int:
    """How often torchrun --max-restarts has started this process again."""
    return int(os.environ.get('TORCHELASTIC_RESTART_COUNT', 0))


def launch() -> str:
    """The name of torchrun's launch, the same after a restart."""
    return os.environ.get('TORCHELASTIC_RUN_ID', '')


def join_ranks(device: str, threads: int) -> tuple[int, int, str]:
    """-> rank, world size and device ('cpu' or 'cuda:N') of this process; under torchrun it joins
    the process group."""
    rank, world = int(os.environ.get('RANK', 0)), int(os.environ.get('WORLD_SIZE', 1))
    device, backend = pick_device(device, threads), 'gloo'
    if device != 'cpu':
        backend = 'cpu:gloo,cuda:nccl'
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision('high')
    if world > 1:
        # torchrun's store outlives an attempt: without a prefix, ranks that are started again find
        # the addresses of the dead ones
        store, _, _ = next(dist.rendezvous('env://', timeout=PATIENCE))
        store = dist.PrefixStore(f'attempt {attempt()}', store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=PATIENCE)
    return rank, world, device


def out_of_memory(error: BaseException) -> str:
    """'' or the memory that an error says is used up: 'GPU memory' or 'memory'."""
    if isinstance(error, torch.OutOfMemoryError):
        return 'GPU memory'
    words = "DefaultCPUAllocator|can't allocate memory|std::bad_alloc|Storage size calculation over"
    words += '|integer multiplication overflow'
    full = isinstance(error, RuntimeError) and re.search(words, str(error))
    return 'memory' if full or isinstance(error, MemoryError) else ''


def last_saved(out_dir: str) -> str:
    if paths := saved_in(out_dir):
        return f'the last checkpoint is {paths[0]}: --resume=True goes on'
    return f'nothing is saved in {out_dir} yet'


def last_words(less_memory: str, settings: dict | None = None) -> Callable[[Exception], str]:
    """For configurator.run_script: -> the line for an error that ends a run: no memory (and what
    takes less), a rank that died or cannot be reached. Any other error is raised again. settings: a
    trainer's globals(), whose out_dir is named."""

    def words(error: Exception) -> str:
        if which := out_of_memory(error):
            return f'out of {which}: {less_memory} ({first_line(error)})'
        if settings and (isinstance(error, dist.DistError) or 'gloo/transport' in str(error)):
            dead = f'rank {os.environ.get("RANK")}: another rank died, or cannot be reached'
            return f'{dead}; {last_saved(settings["out_dir"])} ({first_line(error)})'
        raise error

    return words


def check_fits(need: float, what: str, device: str = 'cpu', advice: str = 'ask for less') -> None:
    """Mistake where `need` bytes, the least that `what` takes, are more than the device has free:
    before anything is allocated. What fits may still be too much."""
    if need > (free := device_memory(device)[1]):
        words = f'needs more than {need / 1e9:,.1f} GB of memory, and {device_name(device)} has'
        raise Mistake(f'{what}: {words} {free / 1e9:,.1f} GB free: {advice}')


def check_model(build: Callable, config: object, copies: int = 1, device: str = 'cpu') -> None:
    """check_fits for build(config)'s weights in fp32, `copies` times (training keeps gradients and
    moments), from models of one level and of two on 'meta'. config: a dataclass with n_layer."""
    L = config.n_layer
    what = f'a model of n_layer = {L}, n_expert = {config.n_expert}, n_embd = {config.n_embd}'
    try:
        with torch.device('meta'):
            models = [build(replace(config, n_layer=n)) for n in (1, 2)]
    except (RuntimeError, OverflowError, TypeError) as error:  # of sizes of 2^63 and so on
        raise Mistake(f'{what}: larger than any machine ({first_line(error)})') from None
    one, two = (sum(p.numel() for p in model.parameters()) for model in models)
    total = one + (L - 1) * (two - one)
    check_fits(4 * copies * total, f'{what}, {total:,} parameters', device)


def device_memory(device: str) -> tuple[float, float]:
    """Bytes of memory that a process may use on the device, and how many of them are free now. Of a
    CPU's, a tenth is left to everything else, a container's limit counts, and processes of one
    torchrun share. Infinity where the system does not say."""
    if device.startswith('cuda'):
        free, total = torch.cuda.mem_get_info(device)
        return float(total), float(free + torch.cuda.memory_reserved(device))

    def number(path: str, pattern: str = r'^(\d+)') -> float:
        try:
            return float(re.search(pattern, pathlib.Path(path).read_text(), re.M)[1])
        except (OSError, TypeError):  # not Linux, or no limit
            return math.inf

    total = 1024 * number('/proc/meminfo', r'^MemTotal: +(\d+) kB')
    free = 1024 * number('/proc/meminfo', r'^MemAvailable: +(\d+) kB')
    limit = number('/sys/fs/cgroup/memory.max')
    if math.isfinite(limit):
        cached = number('/sys/fs/cgroup/memory.stat', r'^inactive_file (\d+)')
        free = min(free, limit - number('/sys/fs/cgroup/memory.current') + cached)
    share = 0.9 / int(os.environ.get('LOCAL_WORLD_SIZE', 1))
    return share * min(total, limit), share * free


def keep_memory() -> None:
    """Keeps freed memory in the process. By default glibc returns large blocks to the system, and a
    training loop that allocates the same ones at every step then pays for clearing their pages
    again: a fifth of the time on a CPU. Without glibc: nothing."""
    with contextlib.suppress(OSError, AttributeError, TypeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-4, 0)  # M_MMAP_MAX: no block of its own mapping
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: the heap does not shrink


def compiles(model: torch.nn.Module, once: Callable[[], object]) -> bool:
    """Runs once(), which compiles what the model's path 'compiled' needs, before any clock runs ->
    whether that works here."""
    start = time.time()
    try:
        once()
        print0(f'compiled in {time.time() - start:.0f} s')
        return True
    except torch._dynamo.exc.TorchDynamoException as error:
        print0(f'compile = True does not work here, going on without it ({first_line(error)})')
        return False
    finally:
        model.zero_grad(set_to_none=True)


def need_packages(**asked: bool) -> None:
    """Ends the script where one is asked for and not installed."""
    for name, wanted in asked.items():
        if wanted and importlib.util.find_spec(name) is None:
            package = {'PIL': 'pillow'}.get(name, name)
            fail(f'{name} is asked for but not installed: pip install {package}, or leave it out')


def device_name(device: str) -> str:
    if device.startswith('cuda'):
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, TypeError):  # not Linux
        name = re.search(r'model name\s*: (.*)', pathlib.Path('/proc/cpuinfo').read_text())[1]
    return f'CPU {name}'


def mfu(run: object, tokens_per_s: float) -> str:
    """Nominal FLOPs of forward and backward over the GPUs' peak in bf16; 'n/a' where not known."""
    on_gpu = run.device != 'cpu' and run.amp == torch.bfloat16
    name = device_name(run.device) if on_gpu else ''
    peaks = [peak for gpu, peak in PEAK.items() if gpu in name]
    flops = 3 * sum(run.model.flops_per_token().values()) * tokens_per_s
    return f'{flops / (run.world * peaks[0]):.1%}' if peaks else 'n/a'


def machine(run: object) -> str:
    versions = f'torch {torch.__version__}, python {platform.python_version()}'
    threads = f'{torch.get_num_threads()} threads'
    return f'{versions}, {run.world} x {device_name(run.device)} ({threads})'


def commit() -> str:
    """Of the folder this file is in, '-dirty' where tracked files other than results have changed,
    'unknown' outside git."""
    git = ['git', '-C', os.path.dirname(os.path.abspath(__file__))]
    paths = ['--', ':(top)', ':(top,exclude)results']
    try:
        options = {'capture_output': True, 'text': True}
        name = subprocess.run([*git, 'rev-parse', '--short=12', 'HEAD'], check=True, **options)
        changed = subprocess.run([*git, 'status', '--porcelain', '-uno', *paths], **options)
    except (OSError, subprocess.CalledProcessError):
        return 'unknown'
    return name.stdout.strip() + ('-dirty' if changed.stdout else '')


# ---- the output folder, and signals ----


def restarted(out_dir: Path, *settings: dict) -> None:
    """Changes the settings of a run that torchrun --max-restarts has started again: it goes on from
    its last checkpoint, or from the beginning. For every rank, before prepare_out_dir."""
    mark = pathlib.Path(out_dir, BEGUN)
    if attempt() == 0 or not mark.exists() or mark.read_text() != launch():
        return
    how = {'resume': True, 'overwrite': False, 'init_from': ''}
    if not saved_in(out_dir):
        how = {'resume': False, 'overwrite': True}
    print0(f'started again by torchrun: {"resuming" if how["resume"] else "from the beginning"}')
    for one in settings:
        one |= how


def hold(path: pathlib.Path) -> TextIO:
    """One run a folder: its LOCK, held until it is closed, or this process ends, whatever ends it.
    CheckpointError where another has it."""
    lock = open(path / LOCK, 'a+', errors='replace')
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        lock.seek(0)
        said = f'another run is at work in it ({lock.read(200).strip()}): wait for its end, stop it'
        raise CheckpointError(f'{path}: {said}, or choose another out_dir') from None
    except OSError as error:
        print0(f'warning: {path}: no locks there ({error.strerror}): let no other run use it')
    lock.truncate(0)
    print(f'process {os.getpid()} on {platform.node()}', file=lock, flush=True)
    return lock


def prepare_out_dir(out_dir: Path, resume: bool = False, overwrite: bool = False) -> TextIO:
    """Creates the folder of a run, or checks it, and holds it -> its LOCK. CheckpointError.

    A folder with a run in it (a checkpoint or a log) is refused without resume, for a run that has
    read its checkpoint, or overwrite, which removes RUN_FILES (of this folder only). Files of these
    names in a folder without LOCK are somebody else's: refused, with overwrite too. Temporary files
    of a killed run are removed."""
    path, names = pathlib.Path(out_dir), RUN_FILES.split()
    if resume and overwrite:
        raise CheckpointError('--resume and --overwrite exclude each other: choose one')

    def found(*patterns: str) -> list[pathlib.Path]:
        return sorted(f for p in patterns for f in path.glob(p) if not f.is_dir())

    try:
        path.mkdir(parents=True, exist_ok=True)
        there = found(*names)
        if there and not (resume or (path / LOCK).exists()):
            words = f'holds {there[0].name}, which no run of ours wrote: choose another out_dir'
            raise CheckpointError(f'{path}: {words}, or move it away yourself')
        lock = hold(path)
        if attempt() == 0:
            # a folder that is refused below is not this launch's, however often it is started again
            (path / BEGUN).unlink(missing_ok=True)
    except OSError as error:
        reason = 'it is a file' if path.is_file() else error.strerror
        raise CheckpointError(f'{path}: cannot be used as the output folder: {reason}') from None
    if found('ckpt_*.pt', 'log.jsonl') and not (resume or overwrite):
        raise CheckpointError(f'{path}: holds a run already: go on by --resume, or --overwrite it')
    for file in found(*(f'.{name}.tmp' for name in names), *(names if overwrite else ())):
        file.unlink()
    if 'TORCHELASTIC_RESTART_COUNT' in os.environ:
        (path / BEGUN).write_text(launch())
    return lock


class Stopper:
    """SIGTERM, ctrl-C and SIGHUP (the terminal was closed; not under nohup) become a flag: the loop
    reads `stopper.signal` (None, or the number) between two updates, saves, ends.

    A second ctrl-C raises KeyboardInterrupt at once. Under torchrun a ctrl-C arrives twice, from
    the terminal and from the launcher: there one within a second of the first does not count.
    Several ranks must agree on the flag (all-reduce) before they act on it. Main thread only."""

    stopping = False  # whether any has been told to stop

    def __init__(self):
        self.signal, self.time = None, 0.0
        numbers = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        self.former = {number: signal.signal(number, self.handle) for number in numbers}

    def handle(self, number: int, frame: object) -> None:
        again = self.signal == number == signal.SIGINT
        if again and ('RANK' not in os.environ or time.monotonic() - self.time > 1):
            raise KeyboardInterrupt
        if number == signal.SIGHUP:
            # a write to a terminal that is gone would be an error, before the run has saved
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
        """Puts the former handlers back."""
        for number, handler in self.former.items():
            signal.signal(number, handler)


# ---- several ranks as one run ----


def gather(local: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """All ranks' parts of a tensor joined along dim, on rank 0 and the CPU (the GPUs may have no
    room); elsewhere the local part."""
    local = local.cpu()
    if not dist.is_initialized():
        return local
    first = dist.get_rank() == 0
    parts = [torch.empty_like(local) for _ in range(dist.get_world_size())] if first else None
    dist.gather(local, parts)
    return torch.cat(parts, dim) if first else local


def sum_over_ranks(model: torch.nn.Module, extra: torch.Tensor) -> torch.Tensor:
    """Sums gradients and the vector `extra` over ranks, in one message -> extra's sum."""
    if not dist.is_initialized():
        return extra
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([*(grad.flatten() for grad in grads), extra])
    dist.all_reduce(flat)
    *parts, extra = flat.split([*(grad.numel() for grad in grads), len(extra)])
    torch._foreach_copy_(grads, [part.view_as(g) for part, g in zip(parts, grads, strict=True)])
    return extra


class Gradients:
    """Gradients that stay in one place, as a CUDA graph needs them, and are summed over ranks, each
    parameter's a message, while the backward is busy with others: stacked experts make few.

    params: in the order in which a backward ends them. extra: n_extra numbers that are summed last.

    An update: zero(); backwards, which add; before the last of them sending = True, so that a
    gradient leaves when it and all before it are there; finish(). They leave in one order on every
    rank: ranks that disagreed would wait for each other for ever."""

    def __init__(self, params, n_extra=1):
        self.params, self.sending = list(params), False
        self.grads = [torch.zeros_like(p) for p in self.params]
        self.extra = self.grads[0].new_zeros(n_extra)
        for i, p in enumerate(self.params if dist.is_initialized() else ()):
            p.register_post_accumulate_grad_hook(functools.partial(self.arrived, i))
        self.zero()

    def zero(self) -> None:
        """Begins an update: gradients and extra are zero, and in their place, whoever has replaced
        them."""
        torch._foreach_zero_([*self.grads, self.extra])
        for p, grad in zip(self.params, self.grads, strict=True):
            p.grad = grad
        self.complete, self.works = set(), []

    def arrived(self, i: int, _: torch.Tensor) -> None:
        """A gradient is complete."""
        if self.sending:
            self.complete.add(i)
            while len(self.works) in self.complete:
                self.send(self.grads[len(self.works)])

    def send(self, x: torch.Tensor) -> None:
        self.works.append(dist.all_reduce(x, async_op=True))

    def finish(self) -> None:
        """Ends an update's backwards: gradients and extra are sums over all ranks."""
        self.sending = False
        if dist.is_initialized():
            for x in [*self.grads[len(self.works) :], self.extra]:
                self.send(x)
        for work in self.works:
            work.wait()


# ---- downloads ----


def is_network_error(error: Exception) -> bool:
    """Return whether a download that failed with `error` may succeed when it is tried again."""
    import huggingface_hub
    from huggingface_hub.errors import HTTPError, LocalEntryNotFoundError

    if huggingface_hub.constants.HF_HUB_OFFLINE:
        return False
    if (response := getattr(error, 'response', None)) is not None:
        return response.status_code in (408, 429) or response.status_code >= 500
    # LocalEntryNotFoundError: no connection, and no copy in the cache either
    return isinstance(error, (ConnectionError, TimeoutError, HTTPError, LocalEntryNotFoundError))


def wait_to_retry(error: Exception, failures: int) -> None:
    """Report a network error and sleep: 1 s after the first failure in a row, twice as long after
    each further one, at most 60 s."""
    seconds = min(60, 2 ** (failures - 1))
    print(f'network error: {first_line(error)}: next try in {seconds} s', flush=True)
    time.sleep(seconds)


def call_hub(function: str, repo: str, *names: str, tries: int = 5, **options: object) -> object:
    """Return huggingface_hub.FUNCTION(repo, *names, **options), after at most `tries` tries if the
    network fails. Raises Mistake if the package is missing or the download fails for good."""
    try:
        import huggingface_hub
        from huggingface_hub.errors import EntryNotFoundError, HTTPError
    except ImportError:
        raise Mistake('downloads need a package: pip install huggingface_hub') from None
    for failures in range(1, tries + 1):
        try:
            return getattr(huggingface_hub, function)(repo, *names, **options)
        except (OSError, ValueError, HTTPError, EntryNotFoundError) as error:
            if failures == tries or not is_network_error(error):
                what = ' of '.join([*names, repo])
                raise Mistake(
                    f'cannot download {what}: {first_line(error)}: '
                    'run the same command again to continue'
                ) from None
            wait_to_retry(error, failures)


def pin_revision(
    meta: dict, folder: Path, repo: str, repo_type: str = 'dataset', revision: str = 'main'
) -> str:
    """Return the commit of a repository on the Hub that this folder's files come from: the one that
    meta['revision'] names or, the first time, what `revision` is now; meta.json then keeps it."""
    if not meta.get('revision'):
        found = call_hub('repo_info', repo, revision=revision, repo_type=repo_type)
        meta['revision'] = found.sha
        write_json(meta, os.path.join(folder, 'meta.json'))
    return meta['revision']


# ---- trackers ----


def open_trackers(config: dict, tensorboard: bool, wandb_project: str) -> tuple[Callable, Callable]:
    """-> write(record), close() for a run's TensorBoard, and Weights & Biases if a project is
    named. Both get the settings, a record's numbers, and the GIFs that it names."""
    board, run, out_dir, stack = None, None, config['out_dir'], contextlib.ExitStack()
    if tensorboard:
        from tensorboard.compat.proto.summary_pb2 import Summary
        from torch.utils.tensorboard import SummaryWriter

        board = SummaryWriter(out_dir)
        stack.callback(board.close)
        board.add_text('settings', '\n'.join(f'    {k} = {v!r}' for k, v in config.items()))
    if wandb_project:
        import wandb

        kept = sorted(pathlib.Path(out_dir).glob('wandb/*run-*'))
        goes_on = kept and (config['resume'] or config['eval_only'])
        same = {'id': kept[-1].name.rpartition('-')[2], 'resume': 'allow'} if goes_on else {}
        about = {'project': wandb_project, 'name': str(out_dir), 'config': config}
        try:
            run = wandb.init(dir=out_dir, **about, **same)
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
            gifs = {name: wandb.Video(path, format='gif') for name, path in gifs.items()}
            run.log(numbers | gifs, step=step)

    return write, stack.close

"""The folder of a run: settings, log, checkpoints, best model. Both trainers write it; every other
script reads it, and nothing else, to know what a run was.

    config.json        the settings, with the device, dtype and threads that the run got; how it was
                       started (command, code, versions); whether it is finished
    log.jsonl          a line per update, or per log interval
    last.pt, prev.pt   checkpoints to resume from
    best/              the best model so far, as an export (export.py)

A resumed run has the settings that it was started with. `--key=value` on the command line changes
those that are not in `fixed`; config files that are given again change nothing.

The log and the checkpoints are the run. Trackers may fail at any time: they are then switched off.

Checkpoints hold tensors and plain types and are read with weights_only=True, so that a checkpoint
from a stranger cannot run code. Under torchrun only rank 0 writes files.
"""

import contextlib
import errno
import json
import math
import os
import pathlib
import pickle
import platform
import shlex
import shutil
import struct
import sys
import zipfile
from collections.abc import Iterable, Iterator

from support.script import UserError, find_rank, first_line, print0, warn

import filelock
import torch
import torch.distributed as dist

from support.code import PROJECT, code_record
from support.files import (
    Path,
    plain,
    read_json,
    read_tensors,
    remove_temporary,
    write_atomic,
    write_json,
    write_text,
)
from support.ranks import device_name, out_of_memory
from support.trackers import open_trackers
from support.values import convert, tuples

LAST, PREV, BEST = 'last.pt', 'prev.pt', 'best'
UNSAFE = 'unsafe.pt'  # a checkpoint that `load_checkpoint` would refuse
WEIGHTS, CONFIG = 'model.safetensors', 'config.json'  # of an export
LOCK = '.lock'  # locked by filelock while a run uses the folder, and names its process
# What torchrun and Slurm set in the environment of a job that they start again.
RESTARTS = ('TORCHELASTIC_RESTART_COUNT', 'SLURM_RESTART_COUNT')
# FLOP/s of dense bf16 by (a part of) the GPU's name; the first that matches counts.
PEAK_FLOPS = {
    'H100 PCIe': 756e12,
    'H100 NVL': 835e12,
    'H100': 989e12,
    'H200 NVL': 835e12,
    'H200': 989e12,
    'B200': 2250e12,
    'NVIDIA A100': 312e12,
    'L40S': 362e12,
    '4090': 165e12,
}
# What a run writes into its folder, and `overwrite` removes.
RUN_FILES = (
    *(LAST, PREV, UNSAFE, 'log.jsonl', CONFIG, BEST, 'loss.png', 'curve.png'),
    *('eval_*.json', 'events.out.tfevents.*'),
)
# Settings of a single call, which a resumed run does not take from its checkpoint.
PER_CALL = ('out_dir', 'resume', 'overwrite', 'eval_only')
# A run has found values for these; 'auto' and 0 stand for them when it is resumed.
RESOLVED = {'device': 'auto', 'dtype': 'auto', 'threads': 0}
CAUSES = 'damaged, or from another model, or the code has been edited since'
# Exceptions that torch.load and load_state_dict raise for damaged or foreign files.
CHECKPOINT_ERRORS = (
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


# ---- what others read ----


def settings_of(folder: Path) -> dict:
    """Return the settings of a run, and how it was started; {} if the folder holds no run."""
    return read_json(pathlib.Path(folder, CONFIG))


def log_of(folder: Path) -> list[dict]:
    """Return the records of a run's log. A line that was cut short is left out."""
    records = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        text = pathlib.Path(folder, 'log.jsonl').read_text(encoding='utf-8', errors='replace')
        for line in text.splitlines():
            with contextlib.suppress(ValueError, RecursionError):
                record = json.loads(line)
                if isinstance(record, dict) and type(record.get('step')) is int:
                    records.append(record)
    return records


def is_finished(folder: Path) -> bool:
    """Return whether a run has reached its last update."""
    return settings_of(folder).get('finished', False)


def export_in(folder: Path) -> pathlib.Path:
    """Return the folder of an export: `folder` itself, or the best model of a run."""
    path = pathlib.Path(folder)
    return path if (path / WEIGHTS).exists() else path / BEST


def read_metadata(folder: pathlib.Path) -> dict:
    """Return the entries of an export's config.json. Raises UserError if it cannot be read."""
    metadata = read_json(folder / CONFIG)
    if not metadata:
        reason = 'cannot be read: missing or damaged? Name the folder of a run or of an export'
        raise UserError(f'{folder / CONFIG}: {reason}')
    return metadata


def sizes_in(folder: Path, names: Iterable[str] = ()) -> dict:
    """Return the settings that the model of an export, or the best model of a run, is built with,
    and those of its run. Raises UserError if the folder holds neither, or a model of the other
    kind, if `names` has the settings of one kind: agents have no tokenizer."""
    export = export_in(folder)
    metadata = read_metadata(export)
    with restoring(export / CONFIG):
        found = {**metadata.get('settings', {}), **metadata, **metadata.get('model', {})}
    if names and ('tokenizer' in names) != ('tokenizer' in found):
        kind = 'a language model' if 'tokenizer' in found else 'an agent'
        raise UserError(f'{export}: holds {kind}, of another trainer: give another folder')
    return found


# ---- the machine ----


def machine(device: str, dtype: str) -> dict[str, object]:
    """Return what a run's config.json tells about the machine: the settings device, dtype and
    threads with the values that the run got, and names and versions."""
    return {
        'device': device,
        'dtype': dtype.removeprefix('torch.'),
        'threads': torch.get_num_threads(),
        'device_name': device_name(device),
        'world': dist.get_world_size() if dist.is_initialized() else 1,
        'torch': str(torch.__version__),
    }


def mfu(
    model: torch.nn.Module, tokens_per_s: float, device: str, compute_dtype: torch.dtype
) -> str:
    """Return the model FLOPs utilization as a percentage: the FLOPs of forward and backward over
    the peak of the GPUs in bf16; 'n/a' if the peak is unknown or products are not in bf16. FLOPs
    are by the paper's count, which computes every expert's keys and values; the code may sum
    weights first."""
    name = (
        device_name(device) if device.startswith('cuda') and compute_dtype == torch.bfloat16 else ''
    )
    peaks = [peak for gpu, peak in PEAK_FLOPS.items() if gpu in name]
    flops = 3 * sum(model.flops_per_token().values()) * tokens_per_s
    world = dist.get_world_size() if dist.is_initialized() else 1
    return f'{flops / (world * peaks[0]):.1%}' if peaks else 'n/a'


# ---- checkpoints ----


def load_checkpoint(path: Path) -> dict:
    """Return a checkpoint, with its tensors on the CPU. Raises UserError if it is damaged, OSError
    if it cannot be read."""
    try:
        with zipfile.ZipFile(path) as file:  # torch.load does not check the checksums of the zip
            if file.testzip() is not None:
                raise zipfile.BadZipFile('wrong checksum')
        saved = torch.load(path, map_location='cpu', weights_only=True, mmap=False)
        if not isinstance(saved['config'], dict) or type(saved['step']) is not int:
            raise TypeError('it has no settings, or no step')
        return saved
    except (OSError, zipfile.BadZipFile, *CHECKPOINT_ERRORS) as error:
        # A file that the system cannot read may be whole. But a damaged one can make zipfile seek
        # to a negative position, which is EINVAL.
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            error.filename = str(path)
            raise
        if out_of_memory(error):
            raise
        reason = f'damaged, cut short or not a checkpoint ({first_line(error)})'
        advice = 'give another file, or delete it'
        if 'weights only load failed' in reason.lower() or 'weights_only' in reason:
            reason = 'holds Python objects, refused because loading them could run code'
            advice = 'if you trust it, torch.load(..., weights_only=False) can'
        raise UserError(f'{path}: {reason}: {advice}') from None


def load_last(folder: Path) -> tuple[dict, pathlib.Path]:
    """Return the last checkpoint of a run and its path; if it is damaged, print a warning and
    return the one before it. Raises UserError if both are damaged, OSError if one cannot be
    read."""
    paths = [path for name in (LAST, PREV) if (path := pathlib.Path(folder, name)).exists()]
    if not paths:
        reason = f'holds no trained run, there is no {LAST}, and no export, no {WEIGHTS}'
        raise UserError(f'{folder}: {reason}')
    try:
        return load_checkpoint(paths[0]), paths[0]
    except UserError as error:
        if len(paths) == 1:
            raise
        print0(f'warning: {error}; using {paths[1]}')
        return load_checkpoint(paths[1]), paths[1]


def load_export(folder: Path, names: Iterable[str] = ()) -> tuple[dict, pathlib.Path]:
    """Return an export in the form of a checkpoint, with 'config', 'model', 'entries' and 'step',
    and the path of its weights. names: as in sizes_in. Raises UserError."""
    path = pathlib.Path(folder, WEIGHTS)
    config = sizes_in(folder, names)
    saved = {'config': config, 'model': read_tensors(path), 'entries': read_metadata(path.parent)}
    return {**saved, 'step': config.get('step') or 0}, path


def refuse_best(export: Path) -> None:
    """Raise UserError if `export` is the best model of a run, which an export would replace."""
    folder = pathlib.Path(export).resolve()
    if folder.name == BEST and 'script' in settings_of(folder.parent):
        raise UserError(f'export = {export!r}: is the best model of a run: choose another folder')


@contextlib.contextmanager
def restoring(path: Path) -> Iterator[None]:
    """Turn the errors of code that restores a checkpoint into a UserError that names the file."""
    try:
        yield
    except CHECKPOINT_ERRORS as error:
        if out_of_memory(error):
            raise
        reason = ' '.join(f'{type(error).__name__}: {error}'.split())[:200]  # on one line
        raise UserError(f'{path}: {CAUSES} ({reason})') from None


# Options of optimizers that a version of torch may lack, and no sign of which optimizer it is.
TORCH_OPTIONS = {'params', 'param_names', 'foreach', 'fused', 'capturable', 'differentiable'}
TORCH_OPTIONS |= {'maximize', 'decoupled_weight_decay'}


def load_moments(optimizers: list[torch.optim.Optimizer], saved: list[dict], path: Path) -> None:
    """Restore the moments of optimizers from a checkpoint. Learning rates, momentum and decay stay,
    because a resumed run may change them. Raises UserError, naming the file `path`, if they are of
    other optimizers or of other groups of parameters."""

    def shapes(groups: list[dict]) -> list[tuple]:
        """Return the number of parameters and the names of the options of each group."""
        return [(len(group['params']), group.keys() - TORCH_OPTIONS) for group in groups]

    with restoring(path):
        former = [shapes(state['param_groups']) for state in saved]
    if former != [shapes(optimizer.param_groups) for optimizer in optimizers]:
        reason = 'was not written by the optimizers of this code, which may have been edited since'
        advice = 'resume with the code of the run, or start another from its weights (init_from)'
        raise UserError(f'{path}: {reason}: {advice}')
    with restoring(path):
        for optimizer, state in zip(optimizers, saved, strict=True):
            groups = [
                {**group, 'params': before['params']}
                for group, before in zip(optimizer.param_groups, state['param_groups'], strict=True)
            ]
            optimizer.load_state_dict({**state, 'param_groups': groups})


# ---- the folder ----


class RunFolder:
    """The folder of a run that a trainer starts, resumes or only evaluates. It is locked until
    `unlock` or `finish`.

    saved: the checkpoint to resume from or to evaluate, or None; path_of_saved: its file; step: its
    number of updates, 0 for a new run; records: the log up to it; finished: whether the run had
    done all its updates."""

    def __init__(self, config: dict, fixed: tuple, script: str):
        """Check and lock the folder config['out_dir'], and if the run is resumed or evaluated, load
        its checkpoint and set `config`, the Settings of `configure`, to its settings. Nothing in
        the folder is changed before `start`. fixed: the settings that a resumed run must keep;
        script: the trainer's file.

        Raises UserError if the folder is in use, holds a run that is neither resumed nor replaced,
        holds files that no run wrote, or if the command line changes a fixed setting."""
        self.config = config
        self.path = pathlib.Path(config['out_dir'])
        self.rank, _ = find_rank()
        self.saved, self.step, self.records, self.finished = None, 0, [], False
        self.changes = {}  # of settings, by a resumed run
        self.is_copy = False  # of the folder in which the run was started
        self.trackers = {}
        self.file_lock = None
        self.unwritten = []  # records that could not be written to log.jsonl yet
        self.keep = PREV  # the name under which `save` keeps the last checkpoint
        name = os.path.basename(script)
        self.command = shlex.join(['python', name, *sys.argv[1:]])
        self.code = code_record(script) if self.rank == 0 else {}
        self.metadata = {'script': name, 'command': self.command, 'code': self.code}
        self.metadata['script_path'] = os.path.abspath(script)
        if PROJECT not in pathlib.Path(script).resolve().parents:
            print0(f'{script}: runs with the modules of {PROJECT}')
        has_run = any((self.path / name).exists() for name in (LAST, PREV))
        resume = config['resume'] is True or (config['resume'] == 'auto' and has_run)
        if config['resume'] and config['overwrite']:
            raise UserError('--resume and --overwrite exclude each other: choose one')
        if not config['eval_only']:
            self.check(resume, has_run)
            if self.rank == 0:
                self.lock()  # before the checkpoint is read, so that nobody saves after that
        if resume or config['eval_only']:
            try:
                self.load(fixed)
            except BaseException:
                self.unlock()
                raise
        config.show(print0)

    def files(self) -> list[pathlib.Path]:
        """Return what a run has written into the folder, even links to what is gone."""
        found = self.path.iterdir() if self.path.is_dir() else ()
        return [path for path in found if any(path.match(name) for name in RUN_FILES)]

    def check(self, resume: bool, has_run: bool) -> None:
        """Raise UserError if a run must not be started or resumed here."""
        written = [path for path in self.files() if path.exists()]
        replace = 'replace it with --overwrite=True'
        if resume and not has_run:
            advice = f'; {replace}' if written else ''
            raise UserError(f'{self.path}: holds no trained run, there is no {LAST}{advice}')
        if written and not resume and 'script' not in settings_of(self.path):
            advice = 'choose another out_dir, or move it away'
            raise UserError(f'{self.path}: holds {written[0].name}, which no run wrote: {advice}')
        if self.config['overwrite']:
            if has_run and any(os.environ.get(name, '0') != '0' for name in RESTARTS):
                reason = 'a restarted job would remove what it has trained'
                raise UserError(f'{self.path}: --overwrite=True: {reason}: give --resume=auto')
            return
        for path in (self.path / LAST, self.path / BEST):
            if not path.resolve().parent.exists() and path.is_symlink():
                advice = 'remove the link, or mount its disk'
                raise UserError(
                    f'{path}: a link to {path.readlink()}, which is not there: {advice}'
                )
        if resume:
            return
        if has_run:
            advice = f'continue it with --resume=True, or {replace}'
            raise UserError(f'{self.path}: holds a run already: {advice}')
        # 'auto' replaces a run killed before its first checkpoint, but not one whose checkpoints
        # were removed.
        log = log_of(self.path)
        was_saved = log and log[-1]['step'] >= settings_of(self.path).get('eval_interval', math.inf)
        if is_finished(self.path) or was_saved or (log and self.config['resume'] is False):
            raise UserError(f'{self.path}: holds a run without a checkpoint: {replace}')

    def fingerprint(self) -> tuple:
        """Return numbers that tell this checkpoint and its log from those of another run."""
        n_records = 0 if self.config['eval_only'] else len(self.records)
        return self.step, self.saved.get('seconds') if self.saved else None, n_records

    def lock(self) -> None:
        """Lock the folder. Raises UserError if another run has it."""
        path = self.path / LOCK
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.file_lock = filelock.FileLock(path)
            self.file_lock.acquire(blocking=False)
            if isinstance(self.file_lock, filelock.UnixFileLock):  # others name the process
                path.write_text(f'{os.getpid()}\n{platform.node()}\n')
        except filelock.Timeout:
            holder = ' on '.join(path.read_text(errors='replace').split()[:2])
            advice = 'wait for its end, stop it, or choose another out_dir'
            if not isinstance(self.file_lock, filelock.UnixFileLock):  # the disk has no flock
                advice += f'; if it was killed, delete {path}'
            raise UserError(
                f'{self.path}: another run is using it (process {holder}): {advice}'
            ) from None
        except OSError as error:
            reason = 'it is a file' if self.path.is_file() else error.strerror
            for link in (self.path, *self.path.parents):
                if link.is_symlink() and not link.exists():
                    reason = f'{link} is a link to {link.readlink()}, which is not there'
            raise UserError(f'{self.path}: cannot be the folder of a run: {reason}') from None

    def unlock(self) -> None:
        """Unlock the folder, also after an error, because a notebook goes on after that."""
        if self.file_lock is not None:
            self.file_lock.release()

    def load(self, fixed: tuple) -> None:
        """Load the checkpoint and take its settings, except those that the command line changes.
        Print what is changed. Raises UserError if a fixed setting is changed, or if resume = 'auto'
        would repeat a part of a finished run."""
        config = self.config
        is_export = (self.path / WEIGHTS).exists()
        self.saved, path = load_export(self.path, fixed) if is_export else load_last(self.path)
        self.path_of_saved = path
        if path.name == PREV:
            self.keep = None  # the last checkpoint is damaged
        before = self.saved['config']
        metadata = self.saved.get('metadata', {})
        if not is_export and metadata.get('script') != self.metadata['script']:
            if not set(fixed) <= before.keys():
                raise UserError(f'{path}: was written by {metadata.get("script")}, another trainer')
        if self.rank == 0 and not is_export:
            self.compare_code(metadata)
            home = os.path.realpath(self.path)
            self.is_copy = metadata.get('run_folder', home) != home
        if config.from_files:
            print0(f'{path}: has the settings of the run; the config files are ignored')
        starts = [] if config['eval_only'] else settings_of(self.path).get('starts', [])
        later = starts[len(metadata.get('starts', [])) :]
        lost = {k: x for start in later for k, x in start.get('changes', {}).items()}
        self.finished = is_finished(self.path)
        if self.finished:  # with the settings in config.json, perhaps without a further update
            now = settings_of(self.path)
            before, lost = {**before, **{name: now[name] for name in lost}}, {}
            if path.name == PREV and config['resume'] == 'auto' and not config['eval_only']:
                reason = f'has finished, but {LAST} is gone or damaged'
                advice = f'--resume=True repeats it from update {self.saved["step"]}'
                raise UserError(f'{self.path}: {reason}: {advice}')
        changes = {}
        for name in [name for name in config if name not in PER_CALL]:
            # the script may be newer than the run; an export has lists for tuples
            old = tuples(before.get(name, config.defaults[name]))
            value = config.from_command_line.get(name, old)
            value = old if value == RESOLVED.get(name) else value
            if name in fixed and value != old:
                advice = 'a resumed run keeps it: leave it out, or give another out_dir'
                raise UserError(f'{path}: was trained with {name} = {old!r}: {advice}')
            if value != old:
                print0(f'{name} = {value!r}  (the run had {old!r})')
                changes[name] = value
            elif name in lost and name not in config.from_command_line:
                reason = 'as in a later start that this checkpoint does not have'
                print0(f'{name} = {old!r}  (not {lost[name]!r}, {reason})')
            with restoring(path):
                config[name] = convert(value, config.defaults[name])
        self.warn_of_threads()
        self.step = self.saved['step']
        self.records = [r for r in log_of(self.path) if r['step'] <= self.step]
        self.changes = changes
        self.metadata = {**self.metadata, **metadata}  # how the run was started

    def warn_of_threads(self) -> None:
        """Print a line if a resumed run keeps a number of threads that does not fit here."""
        threads, cores = self.config['threads'], os.cpu_count() or 1
        if hasattr(os, 'sched_getaffinity'):  # on Linux
            cores = len(os.sched_getaffinity(0))
        wanted = os.environ.get('OMP_NUM_THREADS', str(threads))
        if self.config.from_command_line.get('threads') or not threads:
            return
        if threads > cores or wanted != str(threads):
            reason = f'fewer cores ({cores})' if threads > cores else f'OMP_NUM_THREADS = {wanted}'
            advice = '--threads=N changes it, and rounding'
            print0(f'threads = {threads}, as at the start of the run, despite {reason}: {advice}')

    def compare_code(self, metadata: dict) -> None:
        """Print a line if the run was started by another trainer, and one if the code has changed
        since. metadata: of the run."""
        script, code, before = self.metadata['script'], self.code, metadata.get('code')
        if script != metadata.get('script', script):
            print0(f'the run was started by {metadata["script"]}, and resumes with {script}')
        if before and code['checksum'] != before['checksum']:
            is_same = code['script_checksum'] == before['script_checksum']
            changed = f'modules that {script} imports have' if is_same else f'{script} has'
            commits = f'commit {code["commit"]}, before {before["commit"]}'
            print0(f'{changed} changed since the run was started ({commits})')

    def start(self, **metadata: object) -> None:
        """Write config.json, with `metadata` the machine; remove the run that is replaced, or the
        log lines after the step at which a run resumes; open the trackers. config.json has the
        code and the machine of the first start, and a list of all starts."""
        if self.rank > 0:
            return
        remove_temporary(self.path)
        best = self.path / BEST
        if not self.is_copy:
            for path in [(self.path / LAST).resolve(), best.resolve()]:  # of links
                remove_temporary(path.parent, path.name)
        elif best.is_symlink() and best.is_dir():  # it leads to the best model of the original
            original = best.resolve()
            best.unlink()
            shutil.copytree(original, best)
        start = {'step': self.step, 'command': self.command, 'code': self.code, **metadata}
        start['changes'] = self.changes
        starts = [*self.metadata.get('starts', []), start]
        last = starts[-2] if len(starts) > 1 else start
        for name in ('device_name', 'torch'):  # another one rounds differently
            if name in last and start.get(name) != last[name]:
                print0(f'{name} = {start.get(name)!r}  (the run had {last[name]!r})')
        self.metadata = {**metadata, **self.metadata, 'starts': starts}
        self.metadata['run_folder'] = os.path.realpath(self.path)
        for name in (LAST, PREV) if self.config['overwrite'] else ():
            (self.path / name).unlink(missing_ok=True)  # so that no later start resumes them
        self.write_config()  # without it, other files are not taken for those of a run
        for path in self.files() if self.config['overwrite'] else ():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name != CONFIG:
                path.unlink()
        lines = [f'{json.dumps(record)}\n' for record in self.records]
        write_text(''.join(lines), self.path / 'log.jsonl')
        first_step = self.step + 1 if self.records else None
        self.trackers = open_trackers(self.config, self.metadata, first_step)
        if self.trackers:
            self.write_config()  # with the id of a tracker's run

    def write_config(self, **more: object) -> None:
        """Write config.json."""
        write_json({**self.config, **self.metadata, **more}, self.path / CONFIG)

    def log(self, record: dict) -> None:
        """Append a line to log.jsonl, and pass the record to the trackers. Lines that a full disk
        refuses are tried again with later ones, because last.pt may be a link to another disk."""
        if self.rank > 0:
            return
        self.unwritten.append(record)
        try:
            self.write_log()
        except OSError as error:
            if len(self.unwritten) == 1:
                warn(f'{error.filename}: {error.strerror}: lines are tried again with later ones')
        for name, (write, _) in list(self.trackers.items()):
            try:
                write(record)
            except Exception as error:  # noqa: BLE001  a tracker must never end a run
                warn(f'{name} is switched off: {first_line(error)}')
                del self.trackers[name]

    def write_log(self) -> None:
        """Append the unwritten records to log.jsonl, all or none."""
        path, size = self.path / 'log.jsonl', None
        try:
            with open(path, 'a', encoding='utf-8') as file:
                size = file.tell()
                file.writelines(f'{json.dumps(plain(x))}\n' for x in self.unwritten)
        except OSError as error:
            with contextlib.suppress(OSError):
                if size is not None:
                    os.truncate(path, size)  # so that no line is there twice
            error.filename = str(path)  # the error of a full disk names no file
            raise
        self.unwritten = []

    def save(self, **parts: object) -> None:
        """Save a checkpoint, completely or not at all; the one before it stays as prev.pt. Raises
        UserError if a part is no tensor or plain value: a resumed run refuses other objects."""
        if self.rank > 0:
            return
        saved = {'config': dict(self.config), 'metadata': self.metadata}

        def write(file):
            try:
                torch.save({**saved, **parts}, file)
                file.flush()
            except RuntimeError as error:
                # When the disk is full, torch hides the OSError behind an error of its own.
                if isinstance(error.__context__, OSError):
                    raise error.__context__ from None
                raise
            if objects := torch.serialization.get_unsafe_globals_in_checkpoint(file.name):
                shutil.copyfile(file.name, path.with_name(UNSAFE))
                reason = f'an edit saves {objects[0]}, which a resumed run would refuse'
                advice = f'save tensors and plain values; {UNSAFE} has this update'
                raise UserError(f'{path}: not saved: {reason}: {advice}')

        path, keep = self.path / LAST, self.keep
        # A link leads to a larger disk, where both checkpoints stay. The links of a copied folder
        # lead to the checkpoints of the original, which stay as they are.
        if is_link := path.is_symlink() and not self.is_copy:
            path = path.resolve()
            keep = keep and f'{path.name}.{PREV}'
        write_atomic(path, write, keep)
        if is_link and keep:
            (self.path / PREV).unlink(missing_ok=True)
            (self.path / PREV).symlink_to(path.with_name(keep))
        self.keep = PREV

    def save_best(self, model: torch.nn.Module, **metadata: object) -> None:
        """Save the model in best/. metadata: what its config.json tells besides the model's sizes,
        such as the step and the score."""
        if self.rank == 0:
            settings = {'settings': dict(self.config), 'command': self.metadata['command']}
            try:
                model.save_pretrained(self.path / BEST, config={**metadata, **settings})
            except UserError as error:  # a file that somebody else put there must not end a run
                warn(f'best/ keeps the earlier model, if any: {error}')

    def finish(self, is_finished: bool) -> None:
        """Close the trackers and unlock the folder; is_finished: the run has done all its updates,
        so that `--resume=auto` and sweeps leave it alone."""
        if self.rank > 0:
            return
        if self.unwritten:
            self.write_log()
        if is_finished:
            self.write_config(finished=True)
        for name, (_, close) in self.trackers.items():
            try:
                close()
            except Exception as error:  # noqa: BLE001  a tracker must never end a run
                warn(f'{name}: {first_line(error)}')
        self.unlock()

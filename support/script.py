"""How a script prints and ends: a user's mistakes, ranks, and one line for each error.

This module must be imported before torch: see GOMP_SPINCOUNT below.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import NoReturn

# How long the threads of OpenMP spin between two parallel sections: by default so long that two
# programs on the same cores slow each other down tenfold. A program that runs alone does not get
# measurably slower (LOG.md). OpenMP reads this when torch is imported.
if 'OMP_WAIT_POLICY' not in os.environ:
    os.environ.setdefault('GOMP_SPINCOUNT', '10000')

# What torchrun sets for each of its processes.
TORCHRUN = ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT', 'TORCHELASTIC_RUN_ID')


class UserError(ValueError):
    """A user's mistake. The message is one line that names the file, folder or setting and says
    what to do. run_script prints it without a traceback."""


# ---- ranks ----


def under_torchrun() -> bool:
    """Return whether torchrun has started this process. RANK or WORLD_SIZE alone say nothing: pods,
    cluster images and parent processes leave them behind."""
    return all(os.environ.get(name) for name in TORCHRUN)


def find_rank() -> tuple[int, int]:
    """Return the rank of this process and the number of ranks, (0, 1) without torchrun. Raises
    UserError if the environment holds no such numbers."""
    if not under_torchrun():
        return 0, 1
    rank, world = os.environ['RANK'], os.environ['WORLD_SIZE']
    if not (rank.isdecimal() and world.isdecimal() and int(rank) < int(world)):
        advice = 'start it with torchrun, or unset them'
        raise UserError(f'RANK = {rank}, WORLD_SIZE = {world} in the environment: {advice}')
    return int(rank), int(world)


# ---- how a script prints and ends ----


def run_script(main: Callable[[], int | None]) -> NoReturn:
    """Run main() and end the process with the exit status that it returns (None means 0).

    After a UserError or an OSError, such as a full disk, print one line and exit with 2. After a
    ctrl-C exit with 130. If the reader of standard output has ended (`| head`), exit with 0."""
    for stream in (sys.stdin, sys.stdout):
        if hasattr(stream, 'reconfigure'):  # a closed stream is None
            stream.reconfigure(errors='replace')  # of what their encoding does not have
    status, line, rank = 0, '', 0
    try:
        try:
            rank, _ = find_rank()
            status = main() or 0
        except SystemExit as end:  # --help
            status = end.code or 0
        print(end='', flush=True)
    except KeyboardInterrupt:
        status, line = 130, '\ninterrupted'
    except UserError as error:
        status, line = 2, 'error: ' + ' '.join(str(error).splitlines())
    except OSError as error:
        named = error.filename is not None and error.strerror is not None
        reason = error.strerror
        if isinstance(error, FileExistsError) and named and os.path.islink(error.filename):
            if not os.path.exists(error.filename):
                reason = f'a link to {os.readlink(error.filename)}, which is not there'
        status, line = 2, f'error: {f"{error.filename}: {reason}" if named else error}'
        # Writing to standard output fails once more if that was the reason.
        broken = None if named else write_stdout(' ')
        if isinstance(broken, BrokenPipeError):
            status, line = 0, ''
        elif broken:
            line = f'error: standard output: {broken.strerror}'
        elif isinstance(error, ConnectionError):
            raise
    if line:
        if rank > 0:
            # If rank 0 has met the same mistake, torchrun ends this process meanwhile, and the
            # line is printed once.
            time.sleep(3)
        print(line, file=sys.stderr, flush=True)
    if under_torchrun():
        # A thread of gloo may outlive its process group and abort Python's shutdown (in 1 run of
        # 20; pytorch PR 179291).
        os._exit(status)
    sys.exit(status)


def write_stdout(text: str) -> OSError | None:
    """Write a text to standard output at once. If that fails, discard what is written from now on,
    and return the error."""
    try:
        print(text, end='', flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return error
    return None


def print0(text: str) -> None:
    """Print on rank 0 only. If standard output cannot be written (a full disk, a terminal that is
    gone), nothing is printed from then on, because what is printed is not the run. If its reader
    has ended (`| head`), the process gets SIGTERM, at which a trainer saves and stops."""
    if find_rank()[0] == 0 and (error := write_stdout(f'{text}\n')):
        if isinstance(error, BrokenPipeError):
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            warn(f'standard output is switched off: {error.strerror}')


def warn(text: str) -> None:
    """Print a warning on standard error, if that can be written."""
    with contextlib.suppress(OSError):
        print(f'warning: {text}', file=sys.stderr, flush=True)


def first_line(error: Exception) -> str:
    """Return the type of an error and the first line of its message, at most 200 characters."""
    lines = str(error).splitlines() or ['']
    return f'{type(error).__name__}: {lines[0][:200]}'

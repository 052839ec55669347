"""Start scripts and ranks in processes of their own."""

import contextlib
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent


def start(command, ranks=1, **options):
    """Start a script with this Python, and with torchrun if ranks > 1; return subprocess.Popen.

    command: the script and its arguments, as in ['train_lm.py', '--seed=1'], or other arguments of
    Python, as in ['-c', code]. options: as subprocess.Popen's; by default the script runs in the
    project's folder and its output is piped as text."""
    launcher = ['-m', 'torch.distributed.run', '--standalone', f'--nproc_per_node={ranks}']
    arguments = [sys.executable, *(launcher if ranks > 1 else []), *map(str, command)]
    pipes = {'stdout': subprocess.PIPE, 'stderr': subprocess.PIPE, 'text': True}
    return subprocess.Popen(arguments, **{'cwd': ROOT, **pipes, **options})


def run(command, ranks=1, **options):
    """Start a script as `start` does, wait for its end, and return subprocess.CompletedProcess."""
    with start(command, ranks, **options) as process:
        try:
            out, error = process.communicate()
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, error)


def apply_hacks(folder, *hacks):
    """Copy the modules of the project to `folder`, and apply patches of tests/hacks there."""
    for file in ROOT.glob('*.py'):
        shutil.copy(file, folder)
    ignore = shutil.ignore_patterns('__pycache__')
    shutil.copytree(ROOT / 'support', folder / 'support', ignore=ignore, dirs_exist_ok=True)
    if not (folder / 'corpus').exists():
        (folder / 'corpus').symlink_to(ROOT / 'corpus')
    for hack in hacks:
        assert apply_patch(folder, hack), f'{hack}.patch does not apply'


def apply_patch(folder, hack, *options):
    """Apply a patch of tests/hacks in a folder, and return whether that works."""
    need_git()
    patch = ROOT / 'tests' / 'hacks' / f'{hack}.patch'
    command = ['git', 'apply', *options, str(patch)]
    return subprocess.run(command, cwd=folder).returncode == 0


def need_git():
    """Skip the test if git is not installed."""
    if not shutil.which('git'):
        pytest.skip('git is not installed')


def skip_without_interpreter():
    """Skip the test if Triton is not installed, or if its interpreter cannot run here."""
    triton = pytest.importorskip('triton', reason='triton is not installed')
    if triton.__version__.startswith('3.6.') and np.lib.NumpyVersion(np.__version__) >= '2.4.0':
        pytest.skip('the interpreter of Triton 3.6 needs a NumPy before 2.4')


def commit(folder):
    """Commit a copy of the project to a new git repository, with a copy of corpus/."""
    need_git()
    (folder / 'corpus').unlink()
    shutil.copytree(ROOT / 'corpus', folder / 'corpus')
    git = ('git', '-c', 'user.name=test', '-c', 'user.email=test@example.com')
    for command in (
        ['init', '-q'],
        ['add', '*.py', 'support', 'corpus'],
        ['commit', '-qm', 'The project'],
    ):
        subprocess.run([*git, *command], cwd=folder, check=True)


def run_check_edit(folder, *arguments):
    """Run check_edit.py of a copy of the project. Return its exit status and what it prints."""
    command = [folder / 'check_edit.py', '--backend=eager', *arguments]
    done = run(command, cwd=folder, stderr=subprocess.STDOUT)
    return done.returncode, done.stdout


def run_in(folder, *command):
    """Run a command of Python that must succeed with the modules in `folder` and in tests/; return
    what it prints."""
    path = os.pathsep.join([str(folder), str(ROOT / 'tests')])
    return output_of(start(command, cwd=folder, env=os.environ | {'PYTHONPATH': path}))


def output_of(process):
    """Wait for a process that must succeed; return its standard output."""
    out, error = process.communicate()
    assert process.returncode == 0, error
    return out


def run_ranks(world, function, *args):
    """Call function(*args) in `world` processes, in the environment that torchrun gives to ranks,
    and return their results. function: must be importable, because every process imports it.

    The processes are forked from a server process that imports torch once per session."""
    context = multiprocessing.get_context('forkserver')
    context.set_forkserver_preload(['train_lm'])
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        port = free.getsockname()[1]
    pipes = [context.Pipe(duplex=False) for _ in range(world)]
    ranks = [
        context.Process(target=call_as_rank, args=(rank, world, port, pipe[1], function, args))
        for rank, pipe in enumerate(pipes)
    ]
    for process, (_, sender) in zip(ranks, pipes, strict=True):
        process.start()
        sender.close()  # so that recv() does not wait for a rank that has failed
    results = []
    for receiver, _ in pipes:
        with contextlib.suppress(EOFError):
            results.append(receiver.recv())
    for process in ranks:
        process.join()
    assert [process.exitcode for process in ranks] == world * [0], 'a rank failed: see its output'
    return results


def call_as_rank(rank, world, port, sender, function, args):
    """Call function(*args) as one of run_ranks' processes and send the result."""
    os.environ |= {'RANK': str(rank), 'LOCAL_RANK': str(rank)}
    os.environ |= {'WORLD_SIZE': str(world), 'LOCAL_WORLD_SIZE': str(world)}
    os.environ |= {'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': str(port)}
    os.environ['TORCHELASTIC_RUN_ID'] = 'test'
    sender.send(function(*args))

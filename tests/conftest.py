"""What all tests share: pytest's one option, one thread per process, starting scripts and ranks."""

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent
# Several processes run side by side: threads would compete, and each of Inductor's workers would
# import torch for itself.
THREADS = 'OMP_NUM_THREADS MKL_NUM_THREADS OPENBLAS_NUM_THREADS TORCHINDUCTOR_COMPILE_THREADS'
for name in THREADS.split():
    os.environ.setdefault(name, '1')
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as in a shell's background jobs
    signal.signal(signal.SIGINT, signal.default_int_handler)

SLOW = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
COMMON = {'deadline': None, 'suppress_health_check': SLOW}
settings.register_profile('short', max_examples=60, derandomize=True, **COMMON)
settings.register_profile('long', max_examples=3000, **COMMON)


def start(command, ranks=1, **options):
    """Start a script, or python's own arguments, by this Python; by torchrun if ranks > 1.

    command: ['train_lm.py', '--seed=1', ...]. options: as subprocess.Popen's; by default the
    script runs in the project's folder and its output is piped as text."""
    launcher = ['-m', 'torch.distributed.run', '--standalone', f'--nproc_per_node={ranks}']
    words = [sys.executable, *(launcher if ranks > 1 else []), *map(str, command)]
    pipes = {'stdout': subprocess.PIPE, 'stderr': subprocess.PIPE, 'text': True}
    return subprocess.Popen(words, **{'cwd': ROOT, **pipes, **options})


def run(command, ranks=1, **options):
    """Run a script as `start` does, to its end; return subprocess.CompletedProcess."""
    with start(command, ranks, **options) as process:
        try:
            out, error = process.communicate()
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, error)


def run_ranks(world, function, *args):
    """Call function(*args) in `world` processes, in the environment that torchrun gives to ranks,
    and return their results. function: a function of a module, which every process imports.

    The processes are forked from one that has imported torch, once per session."""
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
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    assert [process.exitcode for process in ranks] == world * [0], 'a rank failed: see its output'
    return [receiver.recv() for receiver, _ in pipes]


def call_as_rank(rank, world, port, sender, function, args):
    """Do the work of one of run_ranks' processes."""
    os.environ |= {'RANK': str(rank), 'LOCAL_RANK': str(rank), 'MASTER_PORT': str(port)}
    os.environ |= {'WORLD_SIZE': str(world), 'LOCAL_WORLD_SIZE': str(world)}
    os.environ['MASTER_ADDR'] = '127.0.0.1'
    sender.send(function(*args))


def pytest_addoption(parser):
    text = 'twenty kills, 50 times as many random inputs, half-hour soaks, rare cases: two hours'
    parser.addoption('--long', action='store_true', help=text)


def pytest_configure(config):
    config.addinivalue_line('markers', 'long: runs with --long only')
    settings.load_profile('long' if config.getoption('--long') else 'short')


def pytest_collection_modifyitems(config, items):
    # The longest tests first, or one process ends with them alone.
    items.sort(key=lambda item: 'triton' not in item.nodeid)
    for item in items:
        if item.get_closest_marker('long') and not config.getoption('--long'):
            item.add_marker(pytest.mark.skip(reason='runs with pytest --long'))

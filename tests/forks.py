"""Processes that need not import torch again: a server imports it once a test session and forks a
child for each command, with its own exit status, signals, pipes, working directory and environment.

    forks.Popen([sys.executable, 'train_lm.py', ...], cwd=ROOT)        # script, -c or -m
    forks.run([sys.executable, 'sample.py', ...], capture_output=True)
    forks.Popen([sys.executable, '--ranks=2', 'train_lm.py', ...])     # two ranks, as of torchrun

What is special about a start (an import's own behaviour, a limit, triton's interpreter, torchrun
itself) needs subprocess. The tests do not fork themselves: a process that has run a backward on a
machine with a GPU has threads."""

import atexit
import contextlib
import ctypes
import functools
import inspect
import json
import multiprocessing.context
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import unittest.mock

PR_SET_CHILD_SUBREAPER = 36
# in a forked pytest (mutate.py) another forks.py has put its own in the place of subprocess's
REAL = next(c for c in subprocess.Popen.__mro__ if c.__module__ == 'subprocess')
PARAMETERS = list(inspect.signature(REAL._execute_child).parameters)[1:]


@functools.cache
def server(pid):
    """This process's server: a connection to it. Its grandchildren become children of ours."""
    assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    mine, its = socket.socketpair(type=socket.SOCK_SEQPACKET)
    names = ('OMP_NUM_THREADS', 'MKL_NUM_THREADS', 'OPENBLAS_NUM_THREADS')
    env = os.environ | dict.fromkeys(names, '1')  # a process with threads must not fork
    REAL([sys.executable, __file__, str(its.fileno())], pass_fds=[its.fileno()], env=env)
    its.close()
    return mine


class Popen(REAL):
    """Whose child the server forks; in such a child (sweep.py) itself, if it is to run python."""

    by_server = True

    def _execute_child(self, *given):
        p = dict(zip(PARAMETERS, given, strict=True))
        program, *argv = map(str, p['args'])
        order = {'argv': argv, 'cwd': os.path.abspath(p['cwd'] or '.'), 'kept': [*p['pass_fds']]}
        order['env'] = dict(os.environ if p['env'] is None else p['env'])
        order['session'] = p['start_new_session']
        given_files = [p[name] for name in ('p2cread', 'c2pwrite', 'errwrite')]
        files = [k if fd == -1 else fd for k, fd in enumerate(given_files)]
        if self.by_server:
            assert program == sys.executable and not p['pass_fds'], 'forks: only python'
            connection = server(os.getpid())
            socket.send_fds(connection, [json.dumps(order).encode()], files)
            self.pid = int(connection.recv(20))
        elif p['shell'] or program != sys.executable or argv[0].startswith('-'):
            return super()._execute_child(*given)
        else:
            sys.stdout.flush()
            sys.stderr.flush()
            self.pid = os.fork()
            if self.pid == 0:
                become(order, files)
        self._child_created = True
        self._close_pipe_fds(*given[PARAMETERS.index('p2cread') :][:6])


def run(*args, **options):
    """As subprocess.run."""
    with unittest.mock.patch.object(subprocess, 'Popen', Popen):
        return subprocess.run(*args, **options)


def serve(connection):
    """Forks a child for each order."""
    while True:
        message, files, _, _ = socket.recv_fds(connection, 1 << 20, 3)
        if not message:  # the tests have ended
            os._exit(0)
        read, write = os.pipe()
        between = os.fork()
        if between == 0:
            child = os.fork()
            if child == 0:
                become(json.loads(message), files)
            os.write(write, str(child).encode())
            os._exit(0)  # an orphan goes to the nearest subreaper: the tests
        os.waitpid(between, 0)
        connection.send(os.read(read, 20))
        for fd in (read, write, *files):
            os.close(fd)


def spread(world):
    """Returns in one process a rank; this one waits for them, and ends with a status of theirs."""
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        port = free.getsockname()[1]
    ranks = []
    for rank in map(str, range(world)):
        ranks.append(os.fork())
        if ranks[-1] == 0:
            os.environ |= {'RANK': rank, 'LOCAL_RANK': rank, 'MASTER_ADDR': '127.0.0.1'}
            os.environ |= dict.fromkeys(('WORLD_SIZE', 'LOCAL_WORLD_SIZE'), str(world))
            os.environ['MASTER_PORT'] = str(port)
            return
    statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]
    os._exit(max(status % 256 for status in statuses))


class Guarded(multiprocessing.context.ForkProcess):
    """For bench.py: processes that fork in place of new ones."""

    def start(self):
        """Ctrl-C waits for its end: Python drops what is raised in a fork's hooks."""
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        super().start()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


def become(order, files):
    """Run what `python argv...` runs, and end as that does, but for freeing torch: a second."""
    for k, fd in enumerate(files):
        os.dup2(fd, k)
    for fd in {int(name) for name in os.listdir('/proc/self/fd')} - {0, 1, 2, *order['kept']}:
        with contextlib.suppress(OSError):
            os.close(fd)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    status = 1
    try:
        run_python(order)
        status = 0
    except SystemExit as end:
        status = end.code or 0
    except BaseException:  # noqa: BLE001  as the interpreter ends
        sys.excepthook(*sys.exc_info())
    threading._shutdown()  # waits for the threads that are no daemons
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # nobody reads it, or the disk is full
            stream.flush()
    os._exit(status % 256)


def run_python(order):
    subprocess.Popen, Popen.by_server = Popen, False
    multiprocessing.context.SpawnContext.Process = Guarded
    os.environ.clear()
    os.environ.update(order['env'])
    os.chdir(order['cwd'])
    if order['session']:
        os.setsid()
    first, *rest = order['argv']
    if first.startswith('--ranks='):
        spread(int(first[8:]))
        first, *rest = rest
    sys.argv, sys.path[0] = [first, *rest], os.path.dirname(os.path.abspath(first))
    if first in ('-c', '-m'):
        sys.argv, sys.path[0] = [first, *rest[1:]], ''
    sys.path[1:1] = [p for p in os.environ.get('PYTHONPATH', '').split(os.pathsep) if p]
    if first == '-c':
        exec(compile(rest[0], '<string>', 'exec'), {'__name__': '__main__'})
    elif first == '-m':
        runpy.run_module(rest[0], run_name='__main__', alter_sys=True)
    else:
        runpy.run_path(os.path.abspath(first), run_name='__main__')


if __name__ == '__main__':
    import torch
    import torch._dynamo  # noqa: F401  the optimizers want it

    torch.ones(1, device='meta').div(2)  # imports what counting a model's sizes needs
    with contextlib.suppress(ImportError):  # for the figures
        import matplotlib.pyplot  # noqa: F401
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C is for the children
    serve(socket.socket(fileno=int(sys.argv[1])))

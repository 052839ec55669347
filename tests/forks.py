"""
Processes that need not import torch again: a server imports it once a test session and forks a
child for each command. A child is a real one, with its own exit status, signals, pipes, working
directory and environment; only the interpreter's start and torch's import are shared.

    forks.Popen([sys.executable, 'train_lm.py', ...], cwd=ROOT)        # script, -c or -m
    forks.run([sys.executable, 'sample.py', ...], capture_output=True)
    forks.Popen([sys.executable, '--ranks=2', 'train_lm.py', ...])     # two ranks, as of torchrun

What is special about a start (an import's own behaviour, a limit, triton's interpreter, torchrun
itself) needs subprocess.
"""

import atexit
import contextlib
import ctypes
import functools
import inspect
import json
import multiprocessing
import multiprocessing.context
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading

PR_SET_CHILD_SUBREAPER = 36


# ---- in the tests ----


@functools.cache
def server(pid):
    """This process's server: a connection to it. Its grandchildren become children of this process,
    which can wait for them."""
    assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    mine, its = socket.socketpair()
    names = ('OMP_NUM_THREADS', 'MKL_NUM_THREADS', 'OPENBLAS_NUM_THREADS')
    env = os.environ | dict.fromkeys(names, '1')  # a process with threads must not fork
    subprocess.Popen(
        [sys.executable, __file__, str(its.fileno())], pass_fds=[its.fileno()], env=env
    )
    its.close()
    return mine


PARAMETERS = list(inspect.signature(subprocess.Popen._execute_child).parameters)[1:]


def read_order(given):
    """-> what Popen was given, by name, the order for a child, and its three files."""
    p = dict(zip(PARAMETERS, given, strict=True))
    order = {
        'argv': [str(a) for a in p['args'][1:]],
        'cwd': os.path.abspath(p['cwd'] or '.'),
        'env': dict(os.environ if p['env'] is None else p['env']),
        'session': p['start_new_session'],
    }
    files = [p[name] for name in ('p2cread', 'c2pwrite', 'errwrite')]
    return p, order, [k if fd == -1 else fd for k, fd in enumerate(files)]


class Forked(subprocess.Popen):
    """Popen whose child is forked by the server."""

    def _execute_child(self, *given):
        p, order, files = read_order(given)
        plain = not (p['shell'] or p['preexec_fn'] or p['pass_fds'])
        assert p['args'][0] == sys.executable and plain, 'forks: only python, and no such option'
        message, connection = json.dumps(order).encode(), server(os.getpid())
        connection.sendall(len(message).to_bytes(8, 'big'))
        socket.send_fds(connection, [message[:1]], files)
        connection.sendall(message[1:])
        self.pid = int.from_bytes(receive(connection, 8), 'big')
        self._child_created = True
        self._close_pipe_fds(*given[PARAMETERS.index('p2cread') :][:6])


Popen = Forked if sys.platform == 'linux' else subprocess.Popen


def run(args, *, capture_output=False, **options):
    """As subprocess.run."""
    if capture_output:
        options |= {'stdout': subprocess.PIPE, 'stderr': subprocess.PIPE}
    with Popen(args, **options) as process:
        out, err = process.communicate()
    return subprocess.CompletedProcess(args, process.returncode, out, err)


def receive(connection, n):
    data = b''
    while len(data) < n:
        more = connection.recv(n - len(data))
        if not more:
            raise EOFError
        data += more
    return data


# ---- the server ----


def serve(connection):
    """Forks a child for each order; returns in the child, with the order."""
    while True:
        try:
            size = int.from_bytes(receive(connection, 8), 'big')
        except EOFError:  # the tests have ended
            os._exit(0)
        first, files, _, _ = socket.recv_fds(connection, 1, 3)
        order = json.loads(first + receive(connection, size - 1))
        read, write = os.pipe()
        between = os.fork()
        if between == 0:
            child = os.fork()
            if child:  # an orphan goes to the nearest subreaper: the tests
                os.write(write, child.to_bytes(8, 'big'))
                os._exit(0)
            for fd in (read, write):
                os.close(fd)
            connection.close()
            for k, fd in enumerate(files):
                os.dup2(fd, k)
            for fd in files:
                os.close(fd)
            return order
        os.waitpid(between, 0)
        connection.sendall(os.read(read, 8))
        for fd in (read, write, *files):
            os.close(fd)


def spread(world):
    """Returns in one process a rank; this one waits for them, stops all when one fails, and ends
    with its status."""
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        port = free.getsockname()[1]
    ranks = []
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            os.environ.update(dict.fromkeys(('RANK', 'LOCAL_RANK'), str(rank)))
            os.environ.update(dict.fromkeys(('WORLD_SIZE', 'LOCAL_WORLD_SIZE'), str(world)))
            os.environ.update({'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': str(port)})
            return
        ranks.append(pid)
    status = 0
    for _ in ranks:
        _, code = os.wait()
        if code and not status:
            status = os.waitstatus_to_exitcode(code)
            for pid in ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
    os._exit(status % 256)


class Within(subprocess.Popen):
    """What a forked script (sweep.py) starts in its turn: forked from itself, if it is python."""

    def _execute_child(self, args, *given):
        args = [args[0], *args[2:]] if args[1:2] == ['-u'] else args  # torchrun's ranks
        p, order, files = read_order((args, *given))
        if p['shell'] or args[0] != sys.executable or args[1].startswith('-'):
            return super()._execute_child(args, *given)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self.pid = os.fork()
        if self.pid == 0:
            for k, fd in enumerate(files):
                os.dup2(fd, k)
            kept = {0, 1, 2, *p['pass_fds']}
            for fd in {int(name) for name in os.listdir('/proc/self/fd')} - kept:
                with contextlib.suppress(OSError):
                    os.close(fd)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            leave(order)
        self._child_created = True
        self._close_pipe_fds(*given[PARAMETERS.index('p2cread') - 1 :][:6])


def leave(order):
    """become, and end as the interpreter does, but for freeing all that torch's import has made:
    that takes a second of every child."""
    status, interrupted = 1, False
    try:
        become(order)
        status = 0
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            status = stop.code or 0
        else:
            print(stop.code, file=sys.stderr)
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())
        interrupted = True
    except BaseException:  # noqa: BLE001  as the interpreter ends
        sys.excepthook(*sys.exc_info())
    threading._shutdown()  # waits for the threads that are no daemons
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.closed or stream.flush()
        except OSError:  # nobody reads it, or the disk is full
            status = status or 120
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status % 256)


class Guarded(multiprocessing.context.ForkProcess):
    def start(self):
        """Ctrl-C waits for its end: Python drops what is raised in a fork's hooks."""
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        super().start()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


class Forking(multiprocessing.context.ForkContext):
    """For bench.py: processes that fork in place of new ones."""

    Process = Guarded


CONTEXTS = multiprocessing.get_context


def become(order):
    """Run what `python argv...` runs."""
    subprocess.Popen = Within
    multiprocessing.get_context = lambda method=None: (
        Forking() if method == 'spawn' else CONTEXTS(method)
    )
    os.environ.clear()
    os.environ.update(order['env'])
    os.chdir(order['cwd'])
    if order['session']:
        os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    first, *rest = order['argv']
    if first.startswith('--ranks='):
        spread(int(first[8:]))
        first, *rest = rest
    if first in ('-c', '-m'):
        sys.argv, sys.path[0] = [first, *rest[1:]], ''
    else:
        sys.argv, sys.path[0] = [first, *rest], os.path.dirname(os.path.abspath(first))
    sys.path[1:1] = [p for p in os.environ.get('PYTHONPATH', '').split(os.pathsep) if p]
    if first == '-c':
        exec(compile(rest[0], '<string>', 'exec'), {'__name__': '__main__'})
    elif first == '-m':
        runpy.run_module(rest[0], run_name='__main__', alter_sys=True)
    else:
        runpy.run_path(os.path.abspath(first), run_name='__main__')


if __name__ == '__main__':
    import torch  # noqa: F401
    import torch._dynamo  # noqa: F401  the optimizers want it

    torch.ones(1, device='meta').div(2)  # imports what counting a model's sizes needs
    with contextlib.suppress(ImportError):  # for the figures
        import matplotlib.backends.backend_agg  # noqa: F401
        import matplotlib.backends.backend_svg  # noqa: F401
        import matplotlib.pyplot  # noqa: F401
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C is for the children
    leave(serve(socket.socket(fileno=int(sys.argv[1]))))

"""Faults: scripts that are killed at random moments, ranks that die, files that vanish or are cut,
folders that cannot be written. Each script is killed twice; with pytest --long twenty times."""

import contextlib
import hashlib
import http.server
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import forks
import numpy as np
import pytest
import test_sweep as sweeps
import test_train as lm
import test_train_sokoban as agents
from test_data import folder_bytes, jsonl, texts
from test_sweep import base  # noqa: F401  a fixture
from test_train import data, same  # noqa: F401

import data_fineweb as df
from checkpoint import load_checkpoint, saved_in

ROOT = Path(__file__).resolve().parent.parent
# in short test_train_sokoban.py's own kill must do
SCRIPTS = ['train_lm.py', pytest.param('train_sokoban.py', marks=pytest.mark.long)]
PIPES = {'cwd': ROOT, 'text': True, 'stdout': subprocess.PIPE, 'stderr': subprocess.PIPE}


@pytest.fixture
def kills(request):
    return 20 if request.config.getoption('--long') else 2


@pytest.fixture
def trainer(data, script):  # noqa: F811
    """-> start(folder, n, **settings), run(...), arguments(...) of that script's tests for n
    updates with a save every fourth, and the tests."""
    is_text = script == 'train_lm.py'
    tests, where = (lm, (data,)) if is_text else (agents, ())

    def with_updates(function):
        def call(folder, n, **settings):
            settings = {'eval_interval': 4, **settings}
            length = {'max_iters': n} if is_text else {'total_steps': 12 * n}
            return function(*where, folder, **settings, **length)

        return call

    return *map(with_updates, (tests.start, tests.run, tests.arguments)), tests


def finished(process):
    """Read to its end: a full pipe would stop it."""
    return process.communicate() and process.returncode == 0


def cut_short(process, longest):
    """kill -9 at a random moment."""
    time.sleep(random.uniform(0, longest))
    process.kill()
    return process.communicate()


def wait_for(path, *processes):
    """A file that one of them writes."""
    while not path.exists():
        assert all(process.poll() is None for process in processes), f'no {path}'
        time.sleep(0.005)


def kill_again_and_again(start, watched, kills, longest):
    """start(again) -> a process; each is killed at a random moment, at most `longest` seconds after
    it has added to the file `watched`. -> how many of them were still at work then."""

    def size():
        return watched.stat().st_size if watched.exists() else 0

    hit = 0
    for k in range(kills):
        before, process = size(), start(k > 0)
        while size() == before and process.poll() is None:
            time.sleep(0.002)
        said = cut_short(process, longest)
        assert process.returncode in (0, -signal.SIGKILL), said
        hit += process.returncode < 0
    return hit


# ---- killed scripts ----


@pytest.mark.parametrize('script', SCRIPTS)
def test_training_is_killed(trainer, tmp_path, script, kills):
    """It saves every few updates, so that many kills fall into a save; the last checkpoint then
    loses its end."""
    (start, run, _, tests), n = trainer, 40 * kills
    a, b = tmp_path / 'a', tmp_path / 'b'
    assert run(a, n) == 0

    def go_on(again):
        how = {'resume': True} if saved_in(b) else {'overwrite': again}
        return start(b, n, **how)

    assert kill_again_and_again(go_on, b / 'log.jsonl', kills, 0.3) >= kills / 2
    paths = saved_in(b)
    if len(paths) == 2:  # there is one before it to fall back on
        paths[0].write_bytes(paths[0].read_bytes()[:-100])
    out, err = go_on(True).communicate()
    assert out.count('warning: ') == (len(paths) == 2) and not err, out + err
    load = load_checkpoint if tests is lm else agents.checkpoint
    same(*(load(folder / 'ckpt_last.pt') if tests is lm else load(folder) for folder in (a, b)))
    same(tests.read_log(a), tests.read_log(b))


def prepare(folder, *argv, **options):
    """data_fineweb.py at work, on bytes unless it is told otherwise."""
    command = [sys.executable, 'data_fineweb.py', '--tokenizer=bytes', f'--data_dir={folder}']
    return subprocess.Popen([*command, *argv], **PIPES, **options)


def test_data_fineweb_is_killed(tmp_path, kills):
    """Hundreds of small shards, by two worker processes; afterwards they are those of a run that
    was let alone, and no worker is left."""
    path = jsonl(tmp_path / 'a.jsonl', texts(4000 * kills))
    argv = [f'--text={path}', '--workers=2', '--shard_tokens=997', '--val_tokens=500']
    assert finished(prepare(tmp_path / 'whole', *argv))
    folder, meta = tmp_path / 'b', tmp_path / 'b' / 'meta.json'
    hit = kill_again_and_again(lambda again: prepare(folder, *argv), meta, kills, 0.2)
    assert hit >= kills / 2 and finished(prepare(folder, *argv))
    assert folder_bytes(folder) == folder_bytes(tmp_path / 'whole')


def test_sweep_is_killed(base, tmp_path, kills):  # noqa: F811
    """The runs go on without it; the next call leaves them alone while they live, and finishes what
    is left. Each ends as it would have."""
    argv = ['--plan=lm-small', f'--base={base}', '--width=0.03125', '--only=L=2 d=48']
    argv += ['--length=10', '--workers=2', '--run']
    folders = [tmp_path / 'a', tmp_path / 'b']
    rows = sweeps.sized(*argv, f'--out_dir={folders[0]}')
    assert sweeps.call(*argv, f'--out_dir={folders[0]}')[0] == 0
    argv += [f'--out_dir={folders[1]}']
    log = folders[1] / 'lm-small' / rows[0].name / 'log.jsonl'
    kill_again_and_again(lambda again: sweeps.start(*argv), log, 1, 0.5)
    for _ in range(kills):
        cut_short(sweeps.start(*argv), 5)
    while (status := sweeps.call(*argv)[0]) != 0:  # 1: an orphan is still at it
        assert status == 1
    for row in rows:
        both = [folder / 'lm-small' / row.name for folder in folders]
        same(*map(lm.read_log, both))
        same(*(load_checkpoint(folder / 'ckpt_last.pt') for folder in both))


# ---- disks and files ----


@pytest.fixture
def disk(tmp_path):
    """A small disk of its own."""
    folder = tmp_path / 'disk'
    folder.mkdir()
    mount = ['mount', '-t', 'tmpfs', '-o', 'size=4m', 'tmpfs', folder]
    if not shutil.which('mount') or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip('mounting a small disk needs root')
    yield folder
    subprocess.run(['umount', '-l', folder], check=True)


def one_line(process, *words):
    out, err = process.communicate()
    assert process.returncode == 2 and err.startswith('error: ') and err.count('\n') == 1, out + err
    assert all(word in err for word in words), err


@pytest.mark.parametrize('script', SCRIPTS)
def test_a_full_disk(trainer, disk, tmp_path, script):
    """What had been saved stays whole, and when there is room again the run goes on."""
    start, run, _, tests = trainer
    there, whole, ballast = disk / 'run', tmp_path / 'whole', disk / 'ballast'
    assert run(there, 4) == run(whole, 4) == 0
    files = {path.name: path.read_bytes() for path in there.glob('ckpt*')}
    with contextlib.suppress(OSError), open(ballast, 'wb') as file:
        while True:
            file.write(bytes(4096))
    os.truncate(ballast, ballast.stat().st_size - 20000)  # room for the log, not a checkpoint
    one_line(start(there, 12, resume=True), 'No space left on device', str(there / 'ckpt_'))
    assert {path.name: path.read_bytes() for path in there.glob('ckpt*')} == files
    assert not list(there.glob('.*.tmp'))
    ballast.unlink()
    assert run(there, 12, resume=True) == run(whole, 12, resume=True) == 0
    same(tests.read_log(there), tests.read_log(whole))


def test_a_read_only_folder(data, disk):  # noqa: F811
    subprocess.run(['mount', '-o', 'remount,ro', disk], check=True)
    one_line(lm.start(data, disk / 'run'), 'Read-only', str(disk))
    one_line(agents.start(disk / 'run'), 'Read-only', str(disk))
    one_line(prepare(disk / 'd', '--demo=True'), 'Read-only', str(disk))


# ---- ranks ----

TORCHRUN = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2']


def kill_a_rank(launcher, out):
    """kill -9 to one rank once the run has saved."""
    wait_for(out / 'ckpt_prev.pt', launcher)
    command = ['pgrep', '-P', str(launcher.pid)]
    ranks = subprocess.run(command, capture_output=True, text=True).stdout.split()
    os.kill(int(random.choice(ranks)), signal.SIGKILL)


@pytest.mark.parametrize('script', SCRIPTS)
def test_a_rank_is_killed(trainer, tmp_path, script, request):
    """The other one stops and says why; resumed, the run goes on to its end. With --max-restarts
    (long) the launcher starts both again, they resume by themselves, and end alike."""
    _, _, arguments, tests = trainer
    a, b, n = tmp_path / 'a', tmp_path / 'b', 40

    def ranks(folder, **more):
        argv = arguments(folder, n, eval_interval=10, **more)
        return forks.Popen([sys.executable, '--ranks=2', script, *argv], **PIPES)

    launcher = ranks(a)
    kill_a_rank(launcher, a)
    out, err = launcher.communicate()
    assert launcher.returncode != 0 and 'another rank died' in err, out + err
    kept = f'the last checkpoint is {a}/ckpt_last.pt: --resume=True goes on'
    assert kept in err and finished(ranks(a, resume=True))
    steps = [r['step'] for r in tests.read_log(a)]
    assert steps == sorted(set(steps)) and steps[-1] == n
    if request.config.getoption('--long'):
        argv = arguments(b, n, eval_interval=10)
        launcher = forks.Popen([*TORCHRUN, '--max-restarts=1', script, *argv], **PIPES)
        kill_a_rank(launcher, b)
        out, err = launcher.communicate()
        assert launcher.returncode == 0, out + err
        assert out.count('started again by torchrun: resuming') == 1
        same(tests.read_log(a), tests.read_log(b))


@pytest.fixture
def hosts():
    """Two hosts, as network namespaces with a cable between them: their names."""
    names = [f'host{os.getpid()}a', f'host{os.getpid()}b']

    def ip(words):
        return subprocess.run(['ip', *words.split()], capture_output=True).returncode == 0

    if not shutil.which('ip') or not all(ip(f'netns add {name}') for name in names):
        pytest.skip('network namespaces need root and iproute2')
    try:
        peer = f'peer name cable netns {names[1]}'
        assert ip(f'-n {names[0]} link add cable type veth {peer}')
        for k, name in enumerate(names):
            assert ip(f'-n {name} addr add 10.77.0.{k + 1}/24 dev cable')
            assert all(ip(f'-n {name} link set {link} up') for link in ('cable', 'lo'))
        yield names
    finally:
        for name in names:
            ip(f'netns del {name}')


IMPATIENT = """import datetime, runpy, sys
import checkpoint
checkpoint.PATIENCE = datetime.timedelta(seconds=15)
runpy.run_path('train_lm.py', run_name='__main__')
"""


@pytest.mark.long
def test_two_hosts_and_one_is_cut_off(data, hosts, tmp_path):  # noqa: F811
    """With two ranks each they train as four on one machine do, and two on one machine go on with
    that; when the cable is cut, both hosts stop, say so, and keep the last checkpoint."""
    (tmp_path / 'impatient.py').write_text(IMPATIENT)

    def start(k, script, out, n):
        command = ['ip', 'netns', 'exec', hosts[k], *TORCHRUN[:3], '--nnodes=2']
        command += [f'--node_rank={k}', '--nproc_per_node=2', '--master_addr=10.77.0.1']
        command += ['--master_port=29511', script]
        command += lm.arguments(data, out, max_iters=n, val_streams=4)
        env = os.environ | {'GLOO_SOCKET_IFNAME': 'cable', 'PYTHONPATH': str(ROOT)}
        return subprocess.Popen(command, env=env, **PIPES)

    two, one, cut = tmp_path / 'two', tmp_path / 'one', tmp_path / 'cut'
    for process in [start(k, 'train_lm.py', two, 20) for k in (0, 1)]:
        out, err = process.communicate()
        assert process.returncode == 0, out + err
    settings = {'val_streams': 4, 'max_iters': 20}
    assert finished(lm.start(data, one, ranks=4, **settings))
    same(lm.read_log(two), lm.read_log(one))
    settings |= {'max_iters': 24, 'resume': True}
    for folder, ranks in ((two, 2), (one, 4)):
        assert finished(lm.start(data, folder, ranks=ranks, **settings))
    for mine, other in zip(lm.read_log(two), lm.read_log(one), strict=True):
        assert mine == pytest.approx(other, rel=2e-3)
    assert mine['step'] == 24
    pair = [start(k, str(tmp_path / 'impatient.py'), cut, 100000) for k in (0, 1)]
    wait_for(cut / 'ckpt_prev.pt', *pair)
    subprocess.run(['ip', '-n', hosts[1], 'link', 'set', 'cable', 'down'], check=True)
    for process in pair:
        _, err = process.communicate()
        assert process.returncode != 0 and '--resume=True goes on' in err, err
        assert 'another rank died, or cannot be reached' in err
    assert load_checkpoint(cut / 'ckpt_last.pt')['step'] >= 4


# ---- the network ----


class Hub(http.server.BaseHTTPRequestHandler):
    """The Hub's answers for files of a data set, slowly; `files`: {name: bytes}."""

    protocol_version, files = 'HTTP/1.1', {}

    def do_HEAD(self):
        self.do_GET(body=False)

    def do_GET(self, body=True):
        whole = self.files.get(self.path.rpartition('/')[2])
        if '/revision/' in self.path:  # which commit that is
            whole = b'{"id": "kjj0/fineweb10B-gpt2", "sha": "%s"}' % (b'a' * 40)
        if whole is None:  # the client asks for more than files
            return self.send_error(404)
        begin = int((self.headers.get('Range') or 'bytes=0-')[6:].partition('-')[0])
        self.send_response(206 if 'Range' in self.headers else 200)
        self.send_header('ETag', f'"{hashlib.sha256(whole).hexdigest()}"')
        self.send_header('X-Repo-Commit', 'a' * 40)
        self.send_header('Accept-Ranges', 'bytes')
        self.send_header('Content-Length', str(len(whole) - begin))
        self.send_header('Content-Range', f'bytes {begin}-{len(whole) - 1}/{len(whole)}')
        self.end_headers()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for i in range(begin, len(whole) if body else 0, 1 << 15):
                self.wfile.write(whole[i : i + (1 << 15)])
                time.sleep(0.005)

    def log_message(self, *_):
        pass


def test_a_download_is_killed(tmp_path, kills):
    """Ready-made shards: what has come stays, what was cut is fetched again, and no half file
    counts as a shard."""
    for k in range(3):
        name = f'fineweb_{"train" if k else "val"}_{k:06d}.bin'
        tokens = (np.arange(1_000_000) % 50000 + k).astype(np.uint16)
        df.write_shard(str(tmp_path / name), tokens)
        Hub.files[name] = (tmp_path / name).read_bytes()
    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    env = os.environ | {'HF_HOME': str(tmp_path / 'home'), 'HF_HUB_DISABLE_XET': '1'}
    env |= {'HF_ENDPOINT': f'http://127.0.0.1:{server.server_port}', 'no_proxy': '127.0.0.1'}

    def start():
        return prepare(tmp_path / 'd', '--pretokenized=2', '--tokenizer=gpt2', env=env)

    def there():
        return {path.name: path.read_bytes() for path in (tmp_path / 'd').glob('*.bin')}

    for _ in range(kills):
        process = start()
        process.stdout.readline()  # how large it will be
        cut_short(process, 1.5)
        assert there().items() <= Hub.files.items()
    out, err = start().communicate()
    server.shutdown()
    assert there() == Hub.files, out + err
    assert df.read_meta(str(tmp_path / 'd'))['finished']

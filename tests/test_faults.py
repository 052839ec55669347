"""Faults: scripts that are killed at random moments, ranks that die, files that vanish or are cut, folders that cannot be written.
Each script is killed twice; `pytest --long tests/test_faults.py`: twenty times."""

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
SCRIPTS = [
    'train_lm.py',
    pytest.param('train_sokoban.py', marks=pytest.mark.long),
]  # in short test_train_sokoban.py's own kill must do


@pytest.fixture
def kills(request):
    return 20 if request.config.getoption('--long') else 2


def size(path):
    return path.stat().st_size if path.exists() else 0


def finished(process):
    """Read to its end: a full pipe would stop it."""
    return process.communicate() and process.returncode == 0


def kill_again_and_again(start, watched, kills, longest):
    """start(again) -> a process; each is killed at a random moment, at most `longest` seconds after it has added to the file
    `watched`. -> how many of them were still at work then."""
    hit, rng = 0, random.Random(time.time_ns())
    for k in range(kills):
        before = size(watched)
        process = start(k > 0)
        deadline = time.time() + 600
        while size(watched) == before and process.poll() is None:
            assert time.time() < deadline, 'no progress'
            time.sleep(0.002)
        time.sleep(rng.uniform(0, longest))
        process.kill()
        out, err = process.communicate()
        assert process.returncode in (0, -signal.SIGKILL), out + err
        hit += process.returncode < 0
    return hit


@pytest.mark.parametrize('script', SCRIPTS)
def test_training_is_killed(data, tmp_path, script, kills):  # noqa: F811
    """It saves every few updates, so that many kills fall into a save."""
    if script == 'train_lm.py':
        tests, where, longest, settings = (
            lm,
            (data,),
            0.2,
            {'max_iters': 60 * kills, 'eval_interval': 2},
        )
    else:
        tests, where, longest, settings = (
            agents,
            (),
            0.8,
            {'total_steps': 12 * 100 * kills, 'eval_interval': 4},
        )
    a, b = tmp_path / 'a', tmp_path / 'b'
    assert tests.run(*where, a, **settings) == 0

    def start(again):
        return tests.start(
            *where, b, **settings, **({'resume': True} if saved_in(b) else {'overwrite': again})
        )

    assert kill_again_and_again(start, b / 'log.jsonl', kills, longest) >= kills / 2
    warnings = cut(b)
    out, err = start(True).communicate()
    assert out.count('warning: ') == warnings and not err, out + err
    same(
        *(
            load_checkpoint(x / 'ckpt_last.pt') if tests is lm else agents.checkpoint(x)
            for x in (a, b)
        )
    )
    same(tests.read_log(a), tests.read_log(b))


def cut(folder):
    """The last checkpoint loses its end, if there is one before it to fall back on -> whether."""
    last = folder / 'ckpt_last.pt'
    if not (last.exists() and (folder / 'ckpt_prev.pt').exists()):
        return False
    whole = last.read_bytes()
    last.unlink()  # both may be names of one file
    last.write_bytes(whole[:-100])
    return True


def prepare(folder, *argv, **options):
    """data_fineweb.py at work, on bytes unless it is told otherwise."""
    return subprocess.Popen(
        [sys.executable, 'data_fineweb.py', '--tokenizer=bytes', f'--data_dir={folder}', *argv],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **options,
    )


def test_data_fineweb_is_killed(tmp_path, kills):
    """Hundreds of small shards, by two worker processes; afterwards they are those of a run that was let alone, and no worker is left."""
    path = jsonl(tmp_path / 'a.jsonl', texts(4000 * kills))

    def start(folder):
        return prepare(
            folder, f'--text={path}', '--workers=2', '--shard_tokens=997', '--val_tokens=500'
        )

    whole = start(tmp_path / 'whole')
    assert finished(whole)
    meta = tmp_path / 'b' / 'meta.json'
    assert kill_again_and_again(lambda again: start(tmp_path / 'b'), meta, kills, 0.2) >= kills / 2
    assert finished(start(tmp_path / 'b'))
    assert folder_bytes(tmp_path / 'b') == folder_bytes(tmp_path / 'whole')


def test_sweep_is_killed(base, tmp_path, kills):  # noqa: F811
    """The runs go on without it; the next call leaves them alone while they live, and finishes what is left. Each ends as it would have."""
    argv = [
        '--plan=lm-small',
        f'--base={base}',
        '--width=0.03125',
        '--only=L=2 d=48',
        '--length=10',
        '--workers=2',
        '--run',
    ]
    rows = sweeps.sized(*argv, f'--out_dir={tmp_path}/a')
    assert sweeps.call(*argv, f'--out_dir={tmp_path}/a')[0] == 0

    def start(again):
        return sweeps.start(*argv, f'--out_dir={tmp_path}/b')

    first = tmp_path / 'b' / 'lm-small' / rows[0].name / 'log.jsonl'
    kill_again_and_again(start, first, 1, 0.5)
    for _ in range(kills):
        process = start(True)
        time.sleep(random.uniform(0, 5))
        process.kill()
        process.communicate()
    deadline = time.time() + 600
    while (
        status := sweeps.call(*argv, f'--out_dir={tmp_path}/b')[0]
    ) != 0:  # 1: an orphan is still at it
        assert status == 1 and time.time() < deadline
    for row in rows:
        a, b = (tmp_path / name / 'lm-small' / row.name for name in 'ab')
        same(lm.read_log(a), lm.read_log(b))
        same(load_checkpoint(a / 'ckpt_last.pt'), load_checkpoint(b / 'ckpt_last.pt'))


# ----------------------------------------------------------------------------- disks and files


@pytest.fixture
def disk(tmp_path):
    """A small disk of its own."""
    folder = tmp_path / 'disk'
    folder.mkdir()
    if (
        not shutil.which('mount')
        or subprocess.run(
            ['mount', '-t', 'tmpfs', '-o', 'size=4m', 'tmpfs', folder], capture_output=True
        ).returncode
    ):
        pytest.skip('mounting a small disk needs root')
    yield folder
    subprocess.run(['umount', '-l', folder], check=True)


def one_line(process, *words):
    out, err = process.communicate()
    assert (
        process.returncode == 2
        and err.startswith('error: ')
        and err.count('\n') == 1
        and all(word in err for word in words)
    ), out + err


@pytest.mark.parametrize('script', SCRIPTS)
def test_a_full_disk(data, disk, tmp_path, script):  # noqa: F811
    """What had been saved stays whole, and when there is room again the run goes on."""
    tests = lm if script == 'train_lm.py' else agents
    where = (data,) if tests is lm else ()
    first, more = (
        {'max_iters': n, 'eval_interval': 4} if tests is lm else {'total_steps': 12 * n}
        for n in (4, 12)
    )
    for folder in (disk / 'run', tmp_path / 'whole'):
        assert tests.run(*where, folder, **first) == 0
    files = {path.name: path.read_bytes() for path in (disk / 'run').glob('ckpt*')}
    ballast = disk / 'ballast'
    with contextlib.suppress(OSError), open(ballast, 'wb') as file:
        while True:
            file.write(bytes(4096))
    os.truncate(ballast, ballast.stat().st_size - 20000)  # room for the log, none for a checkpoint
    one_line(
        tests.start(*where, disk / 'run', resume=True, **more),
        'No space left on device',
        str(disk / 'run' / 'ckpt_'),
    )
    assert {
        path.name: path.read_bytes() for path in (disk / 'run').glob('ckpt*')
    } == files and not list((disk / 'run').glob('.*.tmp'))
    ballast.unlink()
    for folder in (disk / 'run', tmp_path / 'whole'):
        assert tests.run(*where, folder, resume=True, **more) == 0
    same(tests.read_log(disk / 'run'), tests.read_log(tmp_path / 'whole'))


def test_a_full_disk_for_shards(disk, tmp_path):
    path = jsonl(tmp_path / 'a.jsonl', texts(20000))

    def start(folder):
        return prepare(
            folder, f'--text={path}', '--workers=1', '--shard_tokens=99991', '--val_tokens=500'
        )

    (disk / 'ballast').write_bytes(bytes(3_000_000))
    out, err = start(disk / 'd').communicate()
    assert 'No space left on device' in err and 'Traceback' not in err, err
    (disk / 'ballast').unlink()
    for folder in (disk / 'd', tmp_path / 'whole'):
        assert finished(start(folder))
    assert folder_bytes(disk / 'd') == folder_bytes(tmp_path / 'whole')


def test_a_read_only_folder(data, disk, tmp_path):  # noqa: F811
    subprocess.run(['mount', '-o', 'remount,ro', disk], check=True)
    one_line(lm.start(data, disk / 'run'), 'Read-only', str(disk))
    one_line(agents.start(disk / 'run'), 'Read-only', str(disk))
    one_line(prepare(disk / 'd', '--demo=True'), 'Read-only', str(disk))


def test_a_shard_vanishes(data, tmp_path):  # noqa: F811
    """A run keeps its shards open, and goes on; a resumed one does not take the rest for the whole."""
    shutil.copytree(data, tmp_path / 'd')
    lost, out = tmp_path / 'd' / 'fineweb_train_000002.bin', tmp_path / 'run'
    process = lm.start(tmp_path / 'd', out, max_iters=120)
    while not (out / 'ckpt_prev.pt').exists() and process.poll() is None:
        time.sleep(0.01)
    whole = lost.read_bytes()
    lost.unlink()
    begin = lm.read_log(out)[-1]['step']
    while lm.read_log(out)[-1]['step'] < begin + 10 and process.poll() is None:  # two epochs
        time.sleep(0.01)
    process.terminate()
    assert process.communicate() and process.returncode == 143
    one_line(lm.start(tmp_path / 'd', out, max_iters=120, resume=True), 'shards')
    lost.write_bytes(whole)
    assert (
        lm.run(tmp_path / 'd', out, max_iters=120, resume=True) == 0
        and lm.run(data, tmp_path / 'whole', max_iters=120) == 0
    )
    same(
        load_checkpoint(out / 'ckpt_last.pt'), load_checkpoint(tmp_path / 'whole' / 'ckpt_last.pt')
    )


# ----------------------------------------------------------------------------- ranks


def torchrun(script, arguments, *more):
    return forks.Popen(
        [
            sys.executable,
            '-m',
            'torch.distributed.run',
            '--standalone',
            '--nproc_per_node=2',
            *more,
            script,
            *arguments,
        ],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, 'OMP_NUM_THREADS': '1'},
    )


def kill_a_rank(launcher, out):
    """kill -9 to one rank once the run has saved."""
    deadline = time.time() + 600
    while not (out / 'ckpt_prev.pt').exists() and launcher.poll() is None:
        assert time.time() < deadline, 'no checkpoint'
        time.sleep(0.01)
    ranks = subprocess.run(
        ['pgrep', '-P', str(launcher.pid)], capture_output=True, text=True
    ).stdout.split()
    os.kill(int(random.choice(ranks)), signal.SIGKILL)


@pytest.mark.parametrize('script', SCRIPTS)
def test_a_rank_is_killed(data, tmp_path, script):  # noqa: F811
    """The other one stops and says why; with --max-restarts the launcher starts both again, they resume, and end like a run that was let
    alone."""
    tests = lm if script == 'train_lm.py' else agents

    def arguments(folder, **more):
        if tests is lm:
            return lm.arguments(data, folder, max_iters=80, eval_interval=10, **more)
        return agents.arguments(folder, total_steps=12 * 80, eval_interval=10, **more)

    def ranks(**more):
        return forks.Popen(
            [sys.executable, '--ranks=2', script, *arguments(tmp_path / 'a', **more)],
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    launcher = ranks()
    kill_a_rank(launcher, tmp_path / 'a')
    out, err = launcher.communicate()
    assert (
        launcher.returncode != 0 and 'another rank died' in err and '--resume=True goes on' in err
    ), out + err
    assert finished(ranks(resume=True))
    launcher = torchrun(script, arguments(tmp_path / 'b'), '--max-restarts=1')
    kill_a_rank(launcher, tmp_path / 'b')
    out, err = launcher.communicate()
    assert launcher.returncode == 0 and out.count('started again by torchrun: resuming') == 1, (
        out + err
    )
    same(tests.read_log(tmp_path / 'a'), tests.read_log(tmp_path / 'b'))


@pytest.mark.long
def test_a_restart_does_not_take_another_run(data, tmp_path):  # noqa: F811
    """A folder that holds a run is refused, however often the launcher tries."""
    assert lm.run(data, tmp_path) == 0
    launcher = torchrun(
        'train_lm.py', lm.arguments(data, tmp_path), '--max-restarts=1', '--nproc_per_node=1'
    )
    out, err = launcher.communicate()
    assert (
        launcher.returncode != 0
        and err.count('holds a run already') == 2
        and 'started again' not in out
    ), out + err


@pytest.fixture
def hosts(tmp_path):
    """Two hosts, as network namespaces with a cable between them: their names."""
    names = [f'host{os.getpid()}a', f'host{os.getpid()}b']

    def ip(*words):
        return subprocess.run(['ip', *words], capture_output=True).returncode == 0

    if not shutil.which('ip') or not all(ip('netns', 'add', name) for name in names):
        pytest.skip('network namespaces need root and iproute2')
    try:
        assert ip(
            '-n',
            names[0],
            'link',
            'add',
            'cable',
            'type',
            'veth',
            'peer',
            'name',
            'cable',
            'netns',
            names[1],
        )
        for k, name in enumerate(names):
            assert ip('-n', name, 'addr', 'add', f'10.77.0.{k + 1}/24', 'dev', 'cable')
            assert all(ip('-n', name, 'link', 'set', link, 'up') for link in ('cable', 'lo'))
        yield names
    finally:
        for name in names:
            ip('netns', 'del', name)


IMPATIENT = """import datetime, runpy, sys
import checkpoint
checkpoint.PATIENCE = datetime.timedelta(seconds=15)
runpy.run_path('train_lm.py', run_name='__main__')
"""


@pytest.mark.long
def test_two_hosts_and_one_is_cut_off(data, hosts, tmp_path):  # noqa: F811
    """They train as two ranks on one machine do; when the cable is cut, both stop, say so, and keep the last checkpoint."""
    (tmp_path / 'impatient.py').write_text(IMPATIENT)

    def start(k, script, out, n):
        command = [
            'ip',
            'netns',
            'exec',
            hosts[k],
            sys.executable,
            '-m',
            'torch.distributed.run',
            '--nnodes=2',
            f'--node_rank={k}',
            '--nproc_per_node=1',
            '--master_addr=10.77.0.1',
            '--master_port=29511',
            script,
            *lm.arguments(data, out, max_iters=n),
        ]
        return subprocess.Popen(
            command,
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={
                **os.environ,
                'OMP_NUM_THREADS': '1',
                'GLOO_SOCKET_IFNAME': 'cable',
                'PYTHONPATH': str(ROOT),
            },
        )

    for process in [start(k, 'train_lm.py', tmp_path / 'two', 20) for k in (0, 1)]:
        out, err = process.communicate()
        assert process.returncode == 0, out + err
    launcher = torchrun('train_lm.py', lm.arguments(data, tmp_path / 'one', max_iters=20))
    assert finished(launcher)
    same(lm.read_log(tmp_path / 'two'), lm.read_log(tmp_path / 'one'))
    pair = [start(k, str(tmp_path / 'impatient.py'), tmp_path / 'cut', 100000) for k in (0, 1)]
    while not (tmp_path / 'cut' / 'ckpt_prev.pt').exists():
        assert all(process.poll() is None for process in pair)
        time.sleep(0.01)
    subprocess.run(['ip', '-n', hosts[1], 'link', 'set', 'cable', 'down'], check=True)
    said = [process.communicate() for process in pair]
    assert all(process.returncode != 0 for process in pair)
    assert all(
        'another rank died, or cannot be reached' in err and '--resume=True goes on' in err
        for _, err in said
    ), said
    assert load_checkpoint(tmp_path / 'cut' / 'ckpt_last.pt')['step'] >= 4


# ----------------------------------------------------------------------------- the network


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
        for name, value in (
            ('ETag', f'"{hashlib.sha256(whole).hexdigest()}"'),
            ('X-Repo-Commit', 'a' * 40),
            ('Accept-Ranges', 'bytes'),
            ('Content-Length', len(whole) - begin),
            ('Content-Range', f'bytes {begin}-{len(whole) - 1}/{len(whole)}'),
        ):
            self.send_header(name, str(value))
        self.end_headers()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for i in range(begin, len(whole) if body else 0, 1 << 15):
                self.wfile.write(whole[i : i + (1 << 15)])
                time.sleep(0.005)

    def log_message(self, *_):
        pass


def test_a_download_is_killed(tmp_path, kills):
    """Ready-made shards: what has come stays, what was cut is fetched again, and no half file counts as a shard."""
    for k in range(3):
        df.write_shard(
            str(tmp_path / f'{k}.bin'), (np.arange(1_000_000) % 50000 + k).astype(np.uint16)
        )
    Hub.files = {
        f'fineweb_{"train" if k else "val"}_{k:06d}.bin': (tmp_path / f'{k}.bin').read_bytes()
        for k in range(3)
    }
    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    env = {
        **os.environ,
        'HF_ENDPOINT': f'http://127.0.0.1:{server.server_port}',
        'HF_HOME': str(tmp_path / 'home'),
        'HF_HUB_DISABLE_XET': '1',
        'no_proxy': '127.0.0.1',
    }

    def start():
        return prepare(tmp_path / 'd', '--pretokenized=2', '--tokenizer=gpt2', env=env)

    for _ in range(kills):
        process = start()
        process.stdout.readline()  # how large it will be
        time.sleep(random.uniform(0, 1.5))
        process.kill()
        process.communicate()
        for path in (tmp_path / 'd').glob('*.bin'):
            assert path.read_bytes() == Hub.files[path.name]
    out, err = start().communicate()
    server.shutdown()
    assert {p.name: p.read_bytes() for p in (tmp_path / 'd').glob('*.bin')} == Hub.files, out + err
    assert df.read_meta(str(tmp_path / 'd'))['finished']

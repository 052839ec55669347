"""Faults and long runs: train_lm.py killed at random moments, twice, with pytest --long twenty
times; ranks that die, hosts that are cut off; memory that stays flat until ctrl-C."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import test_train as lm
import test_train_sokoban as agents
from test_train import ROOT, data, finished, same  # noqa: F401

from common import load_checkpoint, saved_in

PIPES = {'cwd': ROOT, 'text': True, 'stdout': subprocess.PIPE, 'stderr': subprocess.PIPE}


def wait_for(path, process):
    """A file that it writes."""
    while not path.exists():
        assert process.poll() is None, f'no {path}'
        time.sleep(0.005)


def test_training_is_killed(data, tmp_path, request):  # noqa: F811
    """At random moments; many fall into a save. The last checkpoint then loses its end."""
    kills = 20 if request.config.getoption('--long') else 2
    a, b, n, hit = tmp_path / 'a', tmp_path / 'b', 40 * kills, 0
    assert lm.run(data, a, max_iters=n) == 0

    def go_on():
        how = {'resume': True} if saved_in(b) else {'overwrite': True}
        return lm.start(data, b, max_iters=n, **how)

    def size():
        return (b / 'log.jsonl').stat().st_size if (b / 'log.jsonl').exists() else 0

    for _ in range(kills):
        before, process = size(), go_on()
        while size() == before and process.poll() is None:
            time.sleep(0.002)
        time.sleep(random.uniform(0, 0.3))
        process.kill()
        said = process.communicate()
        assert process.returncode in (0, -signal.SIGKILL), said
        hit += process.returncode < 0
    assert hit >= kills / 2
    paths = saved_in(b)
    if len(paths) == 2:  # there is one before it to fall back on
        paths[0].write_bytes(paths[0].read_bytes()[:-100])
    out, err = go_on().communicate()
    assert out.count('warning: ') == (len(paths) == 2) and not err, out + err
    same(*(load_checkpoint(folder / 'ckpt_last.pt') for folder in (a, b)))
    same(lm.read_log(a), lm.read_log(b))


TORCHRUN = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2']


def kill_a_rank(launcher, out):
    """kill -9 to one rank once the run has saved."""
    wait_for(out / 'ckpt_prev.pt', launcher)
    command = ['pgrep', '-P', str(launcher.pid)]
    ranks = subprocess.run(command, capture_output=True, text=True).stdout.split()
    os.kill(int(random.choice(ranks)), signal.SIGKILL)


def test_a_rank_is_killed(data, tmp_path, request):  # noqa: F811
    """The other one stops and says why. With --max-restarts (long) both resume by themselves."""
    a, b, n = tmp_path / 'a', tmp_path / 'b', 40
    settings = {'max_iters': n, 'eval_interval': 10}
    launcher = lm.start(data, a, ranks=2, **settings)
    kill_a_rank(launcher, a)
    out, err = launcher.communicate()
    assert launcher.returncode != 0 and 'another rank died' in err, out + err
    assert f'the last checkpoint is {a}/ckpt_last.pt: --resume=True continues' in err
    finished(lm.start(data, a, ranks=2, resume=True, **settings))
    steps = [r['step'] for r in lm.read_log(a)]
    assert steps == sorted(set(steps)) and steps[-1] == n
    if request.config.getoption('--long'):
        argv = lm.arguments(data, b, **settings)
        launcher = subprocess.Popen([*TORCHRUN, '--max-restarts=1', 'train_lm.py', *argv], **PIPES)
        kill_a_rank(launcher, b)
        assert finished(launcher).count('restarted by torchrun: resuming') == 1
        same(lm.read_log(a), lm.read_log(b))


@pytest.fixture
def hosts():
    """Two hosts, as network namespaces with a cable between them: their names."""
    a, b = names = [f'host{os.getpid()}{k}' for k in 'ab']
    lines = [f'netns add {a}', f'netns add {b}']
    lines.append(f'-n {a} link add cable type veth peer name cable netns {b}')
    for k, name in enumerate(names, 1):
        lines += [f'-n {name} addr add 10.77.0.{k}/24 dev cable']
        lines += [f'-n {name} link set {link} up' for link in ('cable', 'lo')]
    ip = shutil.which('ip') or 'false'
    if any(subprocess.run([ip, *line.split()]).returncode for line in lines):
        pytest.skip('network namespaces need root and iproute2')
    yield names
    for name in names:
        subprocess.run([ip, 'netns', 'del', name])


IMPATIENT = """import datetime, runpy, sys
import common
common.TIMEOUT = datetime.timedelta(seconds=15)
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
        finished(process)
    finished(lm.start(data, one, ranks=4, val_streams=4, max_iters=20))
    same(lm.read_log(two), lm.read_log(one))
    finished(lm.start(data, two, ranks=2, val_streams=4, max_iters=24, resume=True))
    pair = [start(k, str(tmp_path / 'impatient.py'), cut, 100000) for k in (0, 1)]
    wait_for(cut / 'ckpt_prev.pt', pair[0])
    subprocess.run(['ip', '-n', hosts[1], 'link', 'set', 'cable', 'down'], check=True)
    for process in pair:
        _, err = process.communicate()
        assert process.returncode != 0 and '--resume=True continues' in err, err
        assert 'another rank died, or cannot be reached' in err
    assert load_checkpoint(cut / 'ckpt_last.pt')['step'] >= 4


@pytest.mark.parametrize('script', ['train_lm.py', 'train_sokoban.py'])
def test_nothing_grows(data, tmp_path, request, script):  # noqa: F811
    """In four seconds, with --long thirty minutes, of many small updates and evaluations."""
    long, text, out = request.config.getoption('--long'), script == 'train_lm.py', tmp_path / 'run'
    argv = lm.arguments(data, out) if text else agents.arguments(out)
    argv += ['--eval_interval=50', '--max_iters=10000000' if text else '--total_steps=1000000000']
    seconds, memory, command = 1800 if long else 4, [], [sys.executable, script, *argv]
    process = subprocess.Popen(command, **PIPES | {'stdout': subprocess.DEVNULL})
    wait_for(out / 'ckpt_last.pt', process)
    start_time = time.monotonic()
    while (now := time.monotonic() - start_time) < seconds:
        assert process.poll() is None, process.stderr.read()
        pages = Path(f'/proc/{process.pid}/statm').read_text().split()[1]
        memory.append((now, int(pages) * os.sysconf('SC_PAGE_SIZE') / 2**20))  # MiB
        time.sleep(seconds / 400)
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130 and 'Traceback' not in process.stderr.read()
    steps = [json.loads(line)['step'] for line in (out / 'log.jsonl').read_text().splitlines()]
    assert steps == sorted(set(steps)) and (not text or steps == list(range(len(steps))))
    # after a quarter each kind of work has been done
    when, size = np.array([m for m in memory if m[0] > seconds / 4]).T
    grown = np.polyfit(when, size, 1)[0] * 3600 if long else size[-1] - size[0]  # an hour, or here
    assert grown < 20, f'{steps[-1]:,} updates: {grown:.1f} MiB'

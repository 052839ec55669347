"""Test faults and long runs: training that is killed at random moments, ranks that die, hosts that
are cut off, memory that must not grow."""

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
from processes import ROOT, output_of, start
from small_runs import (
    agent_arguments,
    assert_equal,
    lm_arguments,
    read_log,
    run_agent,
    run_lm,
    start_lm,
)

from support.run_folder import LAST, PREV, load_checkpoint


def wait_for(path, process):
    """Wait until a running process has written this file."""
    while not path.exists():
        assert process.poll() is None, f'no {path}'
        time.sleep(0.005)


@pytest.mark.parametrize('trainer', ['lm', pytest.param('sokoban', marks=pytest.mark.long)])
def test_training_that_is_killed_at_random_moments_resumes_bit_equal(
    data, tmp_path, request, trainer
):
    """Each start has the same command, with --resume=auto. Many kills fall into a save. At the end
    the last checkpoint is cut short as well, so that the one before it is used; a kill between the
    two renames of a save has left only that one. There is one kill, and twenty with --long."""
    kills = 20 if request.config.getoption('--long') else 1
    undisturbed, out = tmp_path / 'a', tmp_path / 'b'
    if trainer == 'lm':
        settings = {'max_iters': 40 * kills + 60}
        assert run_lm(data, undisturbed, **settings) == 0
        command = ['train_lm.py', *lm_arguments(data, out, resume='auto', **settings)]
    else:
        settings = {'total_steps': 12 * (40 * kills + 60)}
        assert run_agent(undisturbed, **settings) == 0
        command = ['train_sokoban.py', *agent_arguments(out, resume='auto', **settings)]

    def log_size():
        """Return the size of the log, 0 as long as there are not two checkpoints."""
        return (out / 'log.jsonl').stat().st_size if (out / PREV).exists() else 0

    killed = 0
    for _ in range(kills):
        before, process = log_size(), start(command)
        while log_size() in (0, before) and process.poll() is None:
            time.sleep(0.002)
        time.sleep(random.uniform(0, 0.1))
        process.kill()
        printed = process.communicate()
        assert process.returncode in (0, -signal.SIGKILL), printed
        killed += process.returncode < 0
    assert killed >= kills / 2
    damaged = (out / LAST).exists()
    if damaged:
        (out / LAST).write_bytes((out / LAST).read_bytes()[:-100])
    process = start(command)
    printed, error = process.communicate()
    assert process.returncode == 0 and 'Traceback' not in error, error
    assert printed.count('warning: ') == damaged, printed
    assert_equal(load_checkpoint(undisturbed / LAST), load_checkpoint(out / LAST))
    assert_equal(read_log(undisturbed), read_log(out))


TORCHRUN = ['-m', 'torch.distributed.run', '--nproc_per_node=2']


@pytest.mark.long
def test_torchrun_restarts_a_run_of_which_a_rank_was_killed(data, tmp_path):
    """The other rank says how to resume, stops and is restarted too."""
    settings = {'max_iters': 40, 'eval_interval': 10}
    output_of(start_lm(data, tmp_path / 'a', ranks=2, **settings))
    argv = lm_arguments(data, tmp_path / 'b', resume='auto', **settings)
    options = ['--standalone', '--max-restarts=1']
    launcher = start([*TORCHRUN, *options, 'train_lm.py', *argv])
    wait_for(tmp_path / 'b' / PREV, launcher)
    command = ['pgrep', '-P', str(launcher.pid)]
    ranks = subprocess.run(command, capture_output=True, text=True).stdout.split()
    os.kill(int(random.choice(ranks)), signal.SIGKILL)
    _, error = launcher.communicate()
    assert launcher.returncode == 0, error
    assert 'another rank died' in error
    assert '--resume=True continues from the last checkpoint' in error
    assert_equal(read_log(tmp_path / 'a'), read_log(tmp_path / 'b'))


@pytest.mark.long
@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGUSR1])
def test_torchrun_passes_a_signal_on_and_waits_for_the_checkpoint(data, tmp_path, number):
    """With the options that README gives for a scheduler."""
    options = ['--standalone', '--signals-to-handle=SIGTERM,SIGINT,SIGUSR1']
    options += ['--shutdown-timeout=110']
    argv = lm_arguments(data, tmp_path, max_iters=10**6)
    launcher = start([*TORCHRUN, *options, 'train_lm.py', *argv])
    wait_for(tmp_path / LAST, launcher)
    launcher.send_signal(number)
    printed, error = launcher.communicate()
    step = load_checkpoint(tmp_path / LAST)['step']
    assert f'stopped after update {step}, saved' in printed, printed + error


@pytest.fixture
def hosts():
    """Return the names of two network namespaces that stand for hosts, with a cable between."""
    names = [f'host{os.getpid()}{letter}' for letter in 'ab']
    first, second = names
    commands = [f'netns add {first}', f'netns add {second}']
    commands.append(f'-n {first} link add cable type veth peer name cable netns {second}')
    for k, name in enumerate(names, 1):
        commands.append(f'-n {name} addr add 10.77.0.{k}/24 dev cable')
        commands += [f'-n {name} link set {link} up' for link in ('cable', 'lo')]
    ip = shutil.which('ip') or 'false'
    try:
        if any(subprocess.run([ip, *command.split()]).returncode for command in commands):
            pytest.skip('network namespaces need root and iproute2')
        yield names
    finally:
        for name in names:
            subprocess.run([ip, 'netns', 'del', name])


# train_lm.py with a short time limit for messages between ranks
IMPATIENT = """import datetime, runpy, sys
from support import ranks
ranks.TIMEOUT = ranks.TIMEOUT_OF_RUN = datetime.timedelta(seconds=15)
runpy.run_path('train_lm.py', run_name='__main__')
"""


@pytest.mark.long
def test_two_hosts_train_as_one_and_stop_when_the_cable_is_cut(data, hosts, tmp_path):
    """Two hosts with two ranks each train as four ranks on one. When the cable is cut, both hosts
    stop, say so, and keep the last checkpoint."""
    (tmp_path / 'impatient.py').write_text(IMPATIENT)

    def start_host(k, script, out, max_iters):
        options = ['--nnodes=2', f'--node_rank={k}', '--master_addr=10.77.0.1']
        options += ['--master_port=29511', f'--rdzv_id={out.name}']
        argv = lm_arguments(data, out, max_iters=max_iters, val_streams=4)
        torchrun = [sys.executable, *TORCHRUN, *options]
        command = ['ip', 'netns', 'exec', hosts[k], *torchrun, script, *argv]
        env = os.environ | {'GLOO_SOCKET_IFNAME': 'cable', 'PYTHONPATH': str(ROOT)}
        pipes = {'stdout': subprocess.PIPE, 'stderr': subprocess.PIPE, 'text': True}
        return subprocess.Popen(command, cwd=ROOT, env=env, **pipes)

    two, one, cut = tmp_path / 'two', tmp_path / 'one', tmp_path / 'cut'
    for process in [start_host(k, 'train_lm.py', two, 20) for k in (0, 1)]:
        output_of(process)
    output_of(start_lm(data, one, ranks=4, val_streams=4, max_iters=20))
    assert_equal(read_log(two), read_log(one))

    pair = [start_host(k, str(tmp_path / 'impatient.py'), cut, 100000) for k in (0, 1)]
    wait_for(cut / PREV, pair[0])
    subprocess.run(['ip', '-n', hosts[1], 'link', 'set', 'cable', 'down'], check=True)
    for process in pair:
        _, error = process.communicate()
        assert process.returncode != 0 and '--resume=True continues' in error, error
        assert 'another rank died, or cannot be reached' in error
    assert load_checkpoint(cut / LAST)['step'] >= 4


def memory_of(process):
    """Return the resident memory of a process in MiB."""
    pages = Path(f'/proc/{process.pid}/statm').read_text().split()[1]
    return int(pages) * os.sysconf('SC_PAGE_SIZE') / 2**20


@pytest.mark.long
@pytest.mark.parametrize('script', ['train_lm.py', 'train_sokoban.py'])
def test_memory_does_not_grow(data, tmp_path, script):
    """Small updates and evaluations run for thirty minutes and may grow by 20 MiB per hour. Ctrl-C
    then ends the run."""
    out = tmp_path / 'run'
    if script == 'train_lm.py':
        argv = lm_arguments(data, out, eval_interval=50, max_iters=10**7)
    else:
        argv = agent_arguments(out, eval_interval=50, total_steps=10**9)
    process = start([script, *argv], stdout=subprocess.DEVNULL)
    wait_for(out / LAST, process)
    seconds = 1800
    begin = time.monotonic()
    times, sizes = [], []
    while time.monotonic() - begin < seconds:
        assert process.poll() is None, process.stderr.read()
        times.append(time.monotonic() - begin)
        sizes.append(memory_of(process))
        time.sleep(seconds / 400)
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130 and 'Traceback' not in process.stderr.read()

    first = len(times) // 4  # by then each kind of work has been done
    grown = np.polyfit(times[first:], sizes[first:], 1)[0] * 3600  # MiB per hour
    assert grown < 20

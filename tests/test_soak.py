"""Long runs: memory and speed stay flat, the log well formed, until ctrl-C. Four seconds each, in
which speed is not looked at: other tests run beside; `pytest --long -s tests/test_soak.py`: thirty
minutes each of the README's two demos, on a machine that does nothing else."""

import json
import os
import signal
import subprocess
import sys
import time

import forks
import numpy as np
import pytest
import test_train as lm
import test_train_sokoban as agents
from test_train import data  # noqa: F401  a fixture


def resident(pid):
    """MiB."""
    with open(f'/proc/{pid}/statm') as f:
        return int(f.read().split()[1]) * os.sysconf('SC_PAGE_SIZE') / 2**20


@pytest.mark.skipif(not os.path.exists('/proc/self/statm'), reason='reads /proc')
@pytest.mark.parametrize('script', ['train_lm.py', 'train_sokoban.py'])
def test_nothing_grows(data, tmp_path, request, script):  # noqa: F811
    long, text, out = request.config.getoption('--long'), script == 'train_lm.py', tmp_path / 'run'
    seconds = 1800 if long else 4
    if not long and text:
        argv = lm.arguments(data, out, max_iters=1000000, eval_interval=50)
    elif not long:
        argv = agents.arguments(out, total_steps=10**9, eval_interval=50)
    elif text:
        prepare = f'data_fineweb.py --demo --tokenizer=bytes --data_dir={tmp_path}/d'
        assert forks.run([sys.executable, *prepare.split()], cwd=lm.ROOT).returncode == 0
        argv = ['config/demo.py', f'--data_dir={tmp_path}/d', '--max_iters=1000000']
    else:
        argv = ['config/sokoban_demo.py', '--total_steps=1000000000']
    command = [sys.executable, script, *argv, f'--out_dir={out}', '--plot=False']
    pipes = {'stdout': subprocess.DEVNULL, 'stderr': subprocess.PIPE, 'text': True}
    process = forks.Popen(command, cwd=lm.ROOT, **pipes)
    log, memory = out / 'log.jsonl', []
    while not (log.exists() and log.stat().st_size):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.1)
    begun = time.monotonic()
    while (now := time.monotonic() - begun) < seconds:
        assert process.poll() is None, process.stderr.read()
        memory.append((now, resident(process.pid)))
        time.sleep(seconds / 400)
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130 and 'Traceback' not in process.stderr.read()

    records = [json.loads(line) for line in log.read_text().splitlines()]
    steps, key = [r['step'] for r in records], 'tokens_per_s' if text else 'env_steps_per_s'
    assert steps == sorted(set(steps)) and (not text or steps == list(range(len(steps))))
    speed = np.array([r[key] for r in records[1:] if key in r])
    third = len(speed) // 3
    first, last = np.median(speed[third // 3 : third]), np.median(speed[-third:])
    # after a quarter each kind of work has been done
    when, size = np.array([m for m in memory if m[0] > seconds / 4]).T
    slope = np.polyfit(when, size, 1)[0] * 3600
    print(f'{script}: {steps[-1]:,} updates, {first:,.0f} and then {last:,.0f} a second')
    print(f'{size[0]:,.0f} MiB after a quarter, {size[-1]:,.0f} at the end, {slope:+.1f} an hour')
    assert last > 0.75 * first or not long  # of a machine whose own speed varies by 20%
    assert slope < 20 if long else size[-1] - size[0] < 20

"""Long runs: memory stays flat, the log well formed, until ctrl-C. Four seconds each; `pytest
--long -s tests/test_soak.py`: thirty minutes each of README's two demos."""

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
    seconds, many = (
        1800 if long else 4,
        '--max_iters=1000000' if text else '--total_steps=1000000000',
    )
    if long and text:
        prepare = f'data_fineweb.py --demo --tokenizer=bytes --data_dir={tmp_path}/d'
        assert forks.run([sys.executable, *prepare.split()], cwd=lm.ROOT).returncode == 0
        argv = ['config/demo.py', f'--data_dir={tmp_path}/d', f'--out_dir={out}']
    elif long:
        argv = ['config/sokoban_demo.py', f'--out_dir={out}']
    else:
        argv = lm.arguments(data, out) if text else agents.arguments(out)
        argv.append('--eval_interval=50')
    command = [sys.executable, script, *argv, many, '--plot=False']
    pipes = {'stdout': subprocess.DEVNULL, 'stderr': subprocess.PIPE, 'text': True}
    process = forks.Popen(command, cwd=lm.ROOT, **pipes)
    log, memory, begun = out / 'log.jsonl', [], None
    while begun is None or time.monotonic() - begun < seconds:
        assert process.poll() is None, process.stderr.read()
        if begun is None and log.exists() and log.stat().st_size:
            begun = time.monotonic()
        elif begun:
            memory.append((time.monotonic() - begun, resident(process.pid)))
        time.sleep(seconds / 400)
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130 and 'Traceback' not in process.stderr.read()

    steps = [json.loads(line)['step'] for line in log.read_text().splitlines()]
    assert steps == sorted(set(steps)) and (not text or steps == list(range(len(steps))))
    # after a quarter each kind of work has been done
    when, size = np.array([m for m in memory if m[0] > seconds / 4]).T
    slope = np.polyfit(when, size, 1)[0] * 3600
    print(f'{script}: {steps[-1]:,} updates, {slope:+.1f} MiB an hour')
    assert slope < 20 if long else size[-1] - size[0] < 20

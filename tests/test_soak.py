"""Long runs: memory and speed stay flat, the log well formed, until ctrl-C. Four seconds each, in which speed is not looked at: other
tests run beside; `pytest --long -s tests/test_soak.py`: thirty minutes each of the README's two demos, on a machine that does nothing else."""

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
    long = request.config.getoption('--long')
    text, seconds = script == 'train_lm.py', 1800 if long else 4
    if long and text:
        assert (
            forks.run(
                [
                    sys.executable,
                    'data_fineweb.py',
                    '--demo=True',
                    '--tokenizer=bytes',
                    f'--data_dir={tmp_path}/speeches',
                ],
                cwd=lm.ROOT,
            ).returncode
            == 0
        )
    if long:
        argv = (
            ['config/demo.py', f'--data_dir={tmp_path}/speeches', '--max_iters=1000000']
            if text
            else ['config/sokoban_demo.py', '--total_steps=1000000000']
        )
        argv += [f'--out_dir={tmp_path}/run', '--plot=False']
    else:
        argv = (
            lm.arguments(data, tmp_path / 'run', max_iters=1000000, eval_interval=50)
            if text
            else agents.arguments(tmp_path / 'run', total_steps=10**9, eval_interval=50)
        )
    process = forks.Popen(
        [sys.executable, script, *argv],
        cwd=lm.ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    log, memory = tmp_path / 'run' / 'log.jsonl', []
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
    steps = [r['step'] for r in records]
    assert steps == sorted(set(steps)) and (not text or steps == list(range(len(steps))))
    speed = np.array(
        [r[key] for r in records[1:] if (key := 'tokens_per_s' if text else 'env_steps_per_s') in r]
    )
    first, last = (
        np.median(speed[len(speed) // 10 : len(speed) // 3]),
        np.median(speed[-len(speed) // 3 :]),
    )
    when, size = np.array(
        [m for m in memory if m[0] > seconds / 4]
    ).T  # by then each kind of work has been done
    slope = np.polyfit(when, size, 1)[0] * 3600
    print(
        f'{script}: {steps[-1]:,} updates in {seconds:,} s, {first:,.0f} a second in the first third, {last:,.0f} in the last; '
        f'{size[0]:,.0f} MiB after a quarter, {size[-1]:,.0f} at the end, {slope:+.1f} MiB an hour'
    )
    assert last > 0.75 * first or not long  # of a machine whose own speed varies by 20%
    assert slope < 20 if long else size[-1] - size[0] < 20

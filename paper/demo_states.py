"""Train two models on state tracking side by side, on a core each, for equal time: one recurrent
layer of eight experts, and eight layers without recurrence. `make demo-states` runs

    python data_states.py
    python -m paper.demo_states --overwrite=True
    python -m paper.states out/demo_states --chains=200

A trial of a few updates measures the speed of both, so that both learning rates have decayed when
the time is over. What the trainers print is in out/demo_states/NAME.txt.
"""

import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

from configurator import configure
from support.script import UserError, run_script

from paper.plans import ROOT
from support.ranks import Throttle
from support.run_folder import log_of
from support.signals import exit_at_signals

# fmt: off
seconds = 190         # training time of each
out_dir = 'out/demo_states'
data_dir = 'data/states_S5'  # text of data_states.py
overwrite = False     # replace the runs in out_dir
# fmt: on

RANGES = {'seconds': (1, 100_000)}
CONFIGS = {'recurrent': 'config/states.py', 'nonrecurrent': 'config/states_nonrecurrent.py'}
TRIAL = 30  # updates


def printed(name: str) -> str:
    """Return the path of what a trainer prints."""
    return os.path.join(out_dir, f'{name}.txt')


def progress(name: str) -> str:
    """Return the last update and loss that a trainer has printed."""
    lines = re.findall(r'step \d+/\d+ \| loss [\d.]+', Path(printed(name)).read_text())
    return lines[-1] if lines else 'starts'


def train(updates: dict[str, int]) -> None:
    """Train both models side by side, for these numbers of updates, into out_dir/NAME, in place of
    earlier runs, and print their progress. Raises UserError with the last line of a trainer that
    fails."""
    os.makedirs(out_dir, exist_ok=True)
    processes, is_due = {}, Throttle()
    try:
        for name, n in updates.items():
            settings = {'data_dir': data_dir, 'out_dir': os.path.join(out_dir, name)}
            settings |= {'max_iters': n, 'eval_interval': n, 'threads': 1, 'overwrite': True}
            flags = [f'--{key}={value}' for key, value in settings.items()]
            command = [sys.executable, ROOT / 'train_lm.py', ROOT / CONFIGS[name], *flags]
            with open(printed(name), 'w', encoding='utf-8') as file:
                processes[name] = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        while None in [process.poll() for process in processes.values()]:
            time.sleep(0.2)
            if is_due():
                print('; '.join(f'{name}: {progress(name)}' for name in updates), flush=True)
    finally:
        for process in processes.values():  # after a ctrl-C or a signal
            process.terminate()
    for name, process in processes.items():
        if process.returncode:
            last = Path(printed(name)).read_text().strip().rpartition('\n')[2]
            raise UserError(f'{printed(name)}: {last}')


def main() -> None:
    configure(globals())
    exit_at_signals()
    if not overwrite and any(os.path.exists(os.path.join(out_dir, name)) for name in CONFIGS):
        advice = 'choose another out_dir, or replace them with --overwrite=True'
        raise UserError(f'{out_dir}: holds runs already: {advice}')
    train(dict.fromkeys(CONFIGS, TRIAL))
    updates = {}
    for name in CONFIGS:
        log = log_of(os.path.join(out_dir, name))
        ms = statistics.median(line['ms'] for line in log if 'ms' in line)
        updates[name] = max(1, int(1000 * seconds / ms))
        print(f'{name}: {ms:.0f} ms per update, {updates[name]} in {seconds} s')
    train(updates)


if __name__ == '__main__':
    run_script(main)

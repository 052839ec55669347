"""Small runs of both trainers, and ways to look at what a run prints and writes."""

import json
import os
import sys
from pathlib import Path

from configurator import configure
from support.script import UserError, run_script

import numpy as np
import pytest
import torch
from processes import start
from torch.utils._pytree import tree_flatten_with_path

import data_fineweb
import train_lm
import train_sokoban

LM = {
    'tokenizer': 'bytes',
    'n_layer': 2,
    'n_expert': 2,
    'n_embd': 32,
    'n_head': 2,
    'window': 12,
    'block_size': 8,
    'tokens_per_step': 64,
    'max_iters': 8,
    'warmup_iters': 3,
    'eval_interval': 4,
    'val_tokens': 96,
    'val_streams': 3,
    'compile': False,
    'dtype': 'float32',
    'device': 'cpu',
    'threads': 1,
}
AGENT = {
    'split': 'generated',
    'eval_split': 'generated',
    'n_levels': 20,
    'time_limit': 12,
    'n_boxes': 1,
    'max_moves': 6,
    'n_envs': 4,
    'unroll': 3,
    'n_layer': 2,
    'n_embd': 4,
    'head_dim': 8,
    'total_steps': 96,  # 8 updates
    'eval_interval': 4,
    'eval_games': 6,
    'log_interval': 2,
    'compile': False,
    'dtype': 'float32',
    'device': 'cpu',
    'threads': 1,
    'learning_rate': 1e-2,
}
# Log entries that two equal runs need not share.
TIMINGS = {'val_seconds', 'ms', 'tokens_per_s', 'env_steps_per_s', 'logged_seconds', 'seconds'}
TIMINGS |= {'config', 'metadata'}


# ---- language models ----


def write_shards(folder, **sizes):
    """Write shards of squares modulo 11. sizes: {name: number of tokens}."""
    for name, n in sizes.items():
        tokens = (np.arange(n) ** 2 % 11 + 65).astype(np.uint16)
        data_fineweb.write_shard(str(folder / f'fineweb_{name}.bin'), tokens)
    data_fineweb.write_meta(folder, {'tokenizer': 'bytes', 'source': 'test', 'shards': []})


def lm_arguments(data, out, **settings):
    """Return the command-line arguments of a run of train_lm.py."""
    settings = {**LM, 'data_dir': data, 'out_dir': out, **settings}
    return [f'--{name}={value}' for name, value in settings.items()]


def run_lm(data, out, **settings):
    """Train a language model in this process, from start to end; return the exit status."""
    return train_lm_as_rank(lm_arguments(data, out, **settings))


def train_lm_as_rank(arguments):
    """Train with these arguments, alone or as one of processes.run_ranks' processes."""
    return train_lm.main(configure(vars(train_lm), arguments, quiet=True))


def start_lm(data, out, ranks=1, **settings):
    """Start train_lm.py in its own process, or processes; return the subprocess.Popen."""
    return start(['train_lm.py', *lm_arguments(data, out, **settings)], ranks)


# ---- agents ----


def agent_arguments(out, **settings):
    """Return the command-line arguments of a run of train_sokoban.py."""
    return [f'--{name}={x}' for name, x in {**AGENT, 'out_dir': out, **settings}.items()]


def run_agent(out, script=train_sokoban, **settings):
    """Train an agent in this process, from start to end; return the exit status."""
    return script.main(configure(vars(script), agent_arguments(out, **settings), quiet=True))


class StopAt:
    """A Stopper whose signal stops the run after the n-th update. One process reads `signal` twice
    in each update, a rank once."""

    def __init__(self, n):
        self.n, self.reads = n if 'WORLD_SIZE' in os.environ else 2 * n, 0
        self.restore = lambda: None

    @property
    def signal(self):
        self.reads += 1
        return None if self.reads < self.n else 15


# ---- what a run prints and writes ----


def error_of(capfd, script, arguments):
    """Assert that a script refuses these arguments in one line, with exit status 2; return the
    line."""
    capfd.readouterr()

    def main():
        if script in (train_lm, train_sokoban):
            return script.main(configure(vars(script)))
        return script.main()

    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as stop:
        patch.setattr(sys, 'argv', [script.__name__, *map(str, arguments)])
        run_script(main)
    error = capfd.readouterr().err
    assert stop.value.code == 2 and error.count('\n') == 1 and error.startswith('error: '), error
    return error


def assert_refused(message, function, *args, **options):
    """Assert that the call raises a UserError of one line that matches the message."""
    with pytest.raises(UserError, match=message) as refusal:
        function(*args, **options)
    assert '\n' not in str(refusal.value)


def read_log(out):
    """Return the records of a run's log without timings."""
    lines = (Path(out) / 'log.jsonl').read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in TIMINGS} for line in lines]


def assert_equal(a, b):
    """Assert that two trees of tensors and plain types are bit-equal, timings aside."""
    leaves = []
    for tree in (a, b):
        paths, _ = tree_flatten_with_path(tree)
        leaves.append(
            [x for x in paths if not {getattr(key, 'key', None) for key in x[0]} & TIMINGS]
        )
    for (path, x), (path_b, y) in zip(*leaves, strict=True):
        assert path == path_b
        equal = torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y
        assert equal, (path, x, y)

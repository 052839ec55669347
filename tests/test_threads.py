"""The number of CPU threads: measured at the start, unless given, and kept by a resumed run."""

import json
import time

import pytest
import torch
from small_runs import run_agent, run_lm

import common


@pytest.fixture(autouse=True)
def four_threads(monkeypatch):
    """As in a process that may use four cores, and is not told how many threads to start."""
    before = torch.get_num_threads()
    monkeypatch.delenv('OMP_NUM_THREADS', raising=False)
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize('faster, slower', [(1, 4), (4, 1)])
def test_the_faster_number_is_chosen(capsys, faster, slower):
    lengths = []

    def chunk(T):
        lengths.append(T)
        time.sleep(T * {faster: 0.01, slower: 0.03}[torch.get_num_threads()])

    assert common.pick_threads(0, 'cpu', chunk, 64) == faster == torch.get_num_threads()
    assert f'threads = {faster}: ' in capsys.readouterr().out
    assert max(lengths) <= 16  # a tenth of a second, not the whole chunk
    assert lengths[-1] == lengths[-2]


def test_a_chunk_of_seconds_runs_once_with_each_number():
    calls = []
    assert common.pick_threads(0, 'cpu', lambda T: (calls.append(T), time.sleep(0.6)), 64) in (1, 4)
    assert calls == [1, 1, 1, 1]


@pytest.mark.parametrize(
    'threads, device, environment, expected',
    [(3, 'cpu', {}, 3), (0, 'cuda:0', {}, 4), (0, 'cpu', {'OMP_NUM_THREADS': '4'}, 4)],
)
def test_nothing_is_measured(monkeypatch, threads, device, environment, expected):
    """For a number that was asked for, a GPU, and where the environment has a number."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert common.pick_threads(threads, device, None, 64) == expected == torch.get_num_threads()


@pytest.mark.parametrize('trainer', ['train_lm', 'train_sokoban'])
def test_a_resumed_run_keeps_its_number(data, tmp_path, monkeypatch, trainer):
    """Its sums then round as before. A number on the command line comes first."""

    def run(**settings):
        if trainer == 'train_lm':
            assert run_lm(data, tmp_path, **settings) == 0
        else:
            assert run_agent(tmp_path, **settings) == 0
        config = json.loads((tmp_path / 'config.json').read_text())
        assert config['threads'] == torch.get_num_threads()
        return config['threads']

    monkeypatch.setattr(time, 'perf_counter', iter(range(10**6)).__next__)  # a tie: all threads
    steps = [
        {'max_iters': n} if trainer == 'train_lm' else {'total_steps': 12 * n} for n in (1, 2, 3)
    ]
    assert run(threads=0, **steps[0]) == 4
    monkeypatch.undo()
    torch.set_num_threads(8)
    assert run(threads=0, resume=True, **steps[1]) == 4
    assert run(threads=2, resume=True, **steps[2]) == 2

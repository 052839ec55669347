"""Test the number of CPU threads: it is measured at the start unless the user sets it, and a
resumed run keeps it."""

import datetime
import json
import os
import time

import processes
import pytest
import torch
import torch.distributed as dist
from small_runs import run_agent, run_lm

import common


@pytest.fixture(autouse=True)
def four_threads(monkeypatch):
    """Let this process use four threads, without a number in the environment."""
    before = torch.get_num_threads()
    monkeypatch.delenv('OMP_NUM_THREADS', raising=False)
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def sleep(monkeypatch):
    """Return a function that advances the clock without waiting. Nothing else advances it."""
    now = 0.0

    def advance(seconds):
        nonlocal now
        now += seconds

    monkeypatch.setattr(time, 'perf_counter', lambda: now)
    return advance


@pytest.mark.parametrize('faster, slower', [(1, 4), (4, 1)])
def test_the_faster_number_is_chosen(capsys, sleep, faster, slower):
    """A tenth of a second is measured, not the whole chunk of 64 tokens."""
    seconds_per_token = {faster: 0.01, slower: 0.03}
    lengths = []

    def run_chunk(T):
        lengths.append(T)
        sleep(T * seconds_per_token[torch.get_num_threads()])

    assert common.pick_threads(0, 'cpu', run_chunk, 64) == faster == torch.get_num_threads()
    assert f'threads = {faster}: ' in capsys.readouterr().out
    assert max(lengths) <= 16
    assert lengths[-1] == lengths[-2]  # both numbers run the same work


def test_a_slow_chunk_is_measured_with_one_token(sleep):
    lengths = []

    def run_chunk(T):
        lengths.append(T)
        sleep(0.6)

    assert common.pick_threads(0, 'cpu', run_chunk, 64) == 4  # a tie
    assert lengths == [1, 1, 1, 1]


def test_the_mean_over_the_ranks_is_printed(monkeypatch, capsys, sleep):
    """Two ranks are equally fast."""
    monkeypatch.setattr(dist, 'is_initialized', lambda: True)
    monkeypatch.setattr(dist, 'get_world_size', lambda: 2)
    monkeypatch.setattr(dist, 'all_reduce', lambda tensor, op=None: tensor.mul_(2))
    assert common.pick_threads(0, 'cpu', lambda T: sleep(0.3), 64) == 4
    assert 'threads = 4: 1 steps take 0.300 s with 1, 0.300 s with 4' in capsys.readouterr().out


def pick_threads_as_rank():
    """Return the number that is chosen by rank 0 with 2 threads and rank 1 with 1."""
    os.environ.pop('OMP_NUM_THREADS', None)
    common.TIMEOUT = datetime.timedelta(seconds=5)
    rank, _, device = common.join_ranks('cpu', threads=0)
    torch.set_num_threads(2 - rank)
    n = common.pick_threads(0, device, lambda T: time.sleep(0.2), 64)
    dist.destroy_process_group()
    return n


def test_nothing_is_measured_if_a_rank_has_one_thread():
    assert processes.run_ranks(2, pick_threads_as_rank) == [2, 1]


def test_a_number_set_by_the_user_is_not_measured():
    assert common.pick_threads(3, 'cpu', None, 64) == 3 == torch.get_num_threads()


def test_nothing_is_measured_for_a_gpu():
    assert common.pick_threads(0, 'cuda:0', None, 64) == 4 == torch.get_num_threads()


def test_nothing_is_measured_if_the_environment_sets_a_number(monkeypatch):
    monkeypatch.setenv('OMP_NUM_THREADS', '4')
    assert common.pick_threads(0, 'cpu', None, 64) == 4 == torch.get_num_threads()


@pytest.mark.parametrize('trainer', ['train_lm', 'train_sokoban'])
def test_a_resumed_run_keeps_its_number_of_threads(data, tmp_path, monkeypatch, trainer):
    """Its sums then round as before. A number on the command line takes precedence."""

    def threads_of_run(updates, **settings):
        """Train up to this update; return the number of threads."""
        if trainer == 'train_lm':
            assert run_lm(data, tmp_path, max_iters=updates, **settings) == 0
        else:
            assert run_agent(tmp_path, total_steps=12 * updates, **settings) == 0
        config = json.loads((tmp_path / 'config.json').read_text())
        assert config['threads'] == torch.get_num_threads()
        return config['threads']

    with monkeypatch.context() as patch:  # a clock that shows a tie, which means all threads
        patch.setattr(time, 'perf_counter', iter(range(10**6)).__next__)
        assert threads_of_run(1, threads=0) == 4
    torch.set_num_threads(8)
    assert threads_of_run(2, threads=0, resume=True) == 4
    assert threads_of_run(3, threads=2, resume=True) == 2

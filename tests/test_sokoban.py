"""Test sokoban.py: the environment by hand, its random numbers, evaluation, policies."""

import time

import numpy as np
import pytest
import torch
from processes import run_ranks
from small_runs import assert_refused, run_agent
from test_levels import numbered, text

import levels as boxoban
import sokoban
from levels import board_text, generate, observations, parse_text
from sokoban import TIME_LIMIT, SokobanEnv, board_keys, check_actions, random_bits

UP, RIGHT, DOWN, LEFT = range(4)
RIGHTWARD = sokoban.StatelessPolicy(lambda obs: torch.eye(4)[[RIGHT] * len(obs)])


def env_on(*boards, **options):
    """Return one environment board that plays these boards in turn."""
    return SokobanEnv(parse_text(numbered(boards), 'test'), 1, order='sequence', **options)


# ---- the environment ----


@pytest.mark.parametrize('limit', [TIME_LIMIT, 7])
def test_episodes_end_when_solved_or_at_the_time_limit(limit):
    """A step costs 0.1, a box on a target gives 1 and a solved level 10. The next level starts at
    once, and the first one follows the last."""
    boards = text('#@$.     #'), text('#.$@     #')
    env = env_on(*boards, time_limit=limit)
    following = [boards[i] for i in (1, 0, 1, 0)]
    for action, steps in ((RIGHT, 1), (LEFT, 1), (UP, limit), (LEFT, 1)):
        for t in range(steps):
            reward, done, solved = env.move(torch.tensor([action]))
            env.reset(done)
            assert done.item() == (t == steps - 1) and env.steps.item() == (t + 1) % steps
        assert solved.item() == (steps == 1)
        assert reward.item() == pytest.approx(10.9 if steps == 1 else -0.1)
        assert board_text(env.observe()[0].numpy()) == following.pop(0)


def test_random_bits_are_uniform_and_depend_on_seed_stream_board_and_count():
    board, count = torch.arange(400).repeat_interleave(500), torch.arange(500).repeat(400)
    keys = [board_keys(*key, board) for key in ((7, 0), (8, 0), (7, 1), (2**64 - 1, 3))]
    u, *others = (random_bits(key, count).view(400, 500).double() / 2**53 for key in keys)
    assert u.min() >= 0 and u.max() < 1 and u.unique().numel() == 200_000
    for a, b in [(u[:-1], u[1:]), (u[:, :-1], u[:, 1:]), *((u, other) for other in others)]:
        assert abs(a.mean() - 0.5) < 0.004  # six standard errors
        assert abs(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]) < 0.012


def test_replay_shows_every_board_and_resets_none():
    levels = parse_text(numbered([text('#@$.     #')]), 'x')
    boards = sokoban.replay(levels, np.array([[RIGHT, LEFT]]))
    rows = [board_text(board).split('\n')[1] for board in boards[0]]
    assert rows == ['#@$.     #', '# @*     #', '#@ *     #']


# ---- evaluation ----


def test_an_evaluation_counts_each_level_once():
    """The policy solves the first and the last of five levels with its first step."""
    solvable, other = text('#@$.     #'), text('#.$@     #')
    levels = parse_text(numbered([solvable, other, other, other, solvable]), 'x')
    expected = {'solve_rate': 0.4, 'return': (2 * 10.9 - 3 * 2.0) / 5, 'steps': (2 + 3 * 20) / 5}
    found = sokoban.evaluate(RIGHTWARD, levels, 'cpu', time_limit=20)
    assert found == pytest.approx(expected, abs=1e-5)


def test_an_evaluation_depends_on_its_seed_and_not_on_its_batches(monkeypatch):
    """The last batch is filled up with levels that do not count."""
    levels = generate(9, 1, max_moves=6)[0]
    played = [sokoban.run_episodes(sokoban.RANDOM, levels, 'cpu', seed) for seed in (1, 2)]
    monkeypatch.setattr(sokoban, 'EVALUATION_BATCH', 4)
    again = sokoban.run_episodes(sokoban.RANDOM, levels, 'cpu', 1)
    assert all(torch.equal(x, again[name]) for name, x in played[0].items())
    assert not torch.equal(played[1]['actions'], again['actions'])


@pytest.mark.parametrize('actions, found', [
    ([1, 2], r'int64 of shape \(2,\)'),
    ([0.0, 1.0, 2.0, 3.0], 'float64'),
    ([3, 2, 0, 7], '7 at index 3'),
    ([3, -1, 0, 7], '-1 at index 1'),
    ([[0], [1, 2], [3], []], 'inhomogeneous shape'),
], ids=str)  # fmt: skip
def test_what_is_no_action_is_refused_and_shown(actions, found):
    message = rf'^name: expected integers from 0 to 3 of shape \(4,\).*{found}'
    assert_refused(message, check_actions, actions, 4, 'name')


def train_with_downloads(folder):
    """Train as one of two ranks on splits that are not there; return what it downloads."""
    downloads = []
    levels = observations(generate(40, 1, max_moves=6)[0])

    def call_hub(function, repo, name, local_dir):
        downloads.append(name)
        time.sleep(1)  # long enough for a rank that does not wait
        np.save(folder / name, levels)

    boxoban.call_hub = call_hub  # in this process, which ends with the training
    splits = {'split': 'hard', 'eval_split': 'medium-valid', 'levels_dir': folder}
    assert run_agent(folder / 'run', total_steps=12, download=True, **splits) == 0
    return downloads


def test_ranks_download_each_split_once(tmp_path):
    downloads = run_ranks(2, train_with_downloads, tmp_path)
    assert sorted(sum(downloads, [])) == ['hard.npy', 'medium-valid.npy']

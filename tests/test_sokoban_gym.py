"""Test sokoban_gym.py: parity with Gymnasium's own vector environments and with Jumanji's
Sokoban."""

import importlib.util

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode
from small_runs import assert_refused
from test_levels import numbered, text

import sokoban_gym
from levels import board_image, board_text, generate, observations, parse_text
from sokoban import TIME_LIMIT, JumanjiEnv, SokobanEnv, random_bits

NAME = 'sokoban_gym:ParallelExperts/Sokoban-v0'
UP, RIGHT, DOWN = 0, 1, 2
ONE = parse_text(numbered([text('#@$.     #')]), 'one')
jumanji = pytest.mark.skipif(
    not importlib.util.find_spec('jumanji'), reason='pip install -r requirements.txt'
)


@pytest.mark.parametrize('limits, steps, end', [
    ({}, TIME_LIMIT, (False, True)),
    ({'time_limit': 30}, 30, (True, False)),
    ({'time_limit': 30, 'max_episode_steps': 30}, 30, (True, True)),
    ({'time_limit': 130, 'max_episode_steps': -1}, 130, (True, False)),
], ids=str)  # fmt: skip
def test_make_vec_plays_as_gymnasium_does_with_make(limits, steps, end):
    """Board 0 is solved by the first step, and board 1 by its last one in a second episode. Board 2
    is never solved: its episodes have this number of steps and are (terminated, truncated)."""
    mode = {'vector_kwargs': {'autoreset_mode': AutoresetMode.SAME_STEP}}
    options = {'levels': ONE, **limits}
    singles = gymnasium.make_vec(NAME, 3, vectorization_mode='sync', **mode, **options)
    ours = gymnasium.make_vec(NAME, 3, **options)
    assert np.array_equal(singles.reset(seed=1)[0], ours.reset(seed=1)[0])
    ends = []
    for t in range(1, 2 * steps + 1):
        actions = np.array([RIGHT if t == 1 else UP, RIGHT if t == 2 * steps else UP, UP])
        *expected, expected_infos = singles.step(actions)
        *found, infos = ours.step(actions)
        assert all(map(np.allclose, found, expected))
        for key in ('final_obs', '_final_obs', 'final_info', '_final_info'):
            assert repr(infos.get(key)) == repr(expected_infos.get(key))
        _, _, terminated, truncated = found
        if terminated[2] or truncated[2]:
            ends.append((t, terminated[2], truncated[2]))
    assert ends == [(steps, *end), (2 * steps, *end)]


def test_environments_play_generated_levels_and_draw_them():
    """Gymnasium's checker accepts them."""
    options = {'n_levels': 40, 'n_boxes': 1, 'render_mode': 'rgb_array'}
    env = gymnasium.make(NAME, **options)
    check_env(env.unwrapped)
    seen, _ = env.reset(seed=5)
    assert (observations(generate(40, 1)[0]) == seen).all((1, 2, 3)).any()
    assert np.array_equal(env.render(), board_image(seen))
    assert (env.reset()[0] != seen).any()
    vector = gymnasium.make_vec(NAME, num_envs=2, **{**options, 'render_mode': 'ansi'})
    boards, _ = vector.reset(seed=1)
    assert vector.render() == tuple(map(board_text, boards))


def test_reset_mask_starts_some_boards_again():
    env = gymnasium.make_vec(NAME, num_envs=3, max_episode_steps=3, levels=ONE)
    first, _ = env.reset(seed=1)
    before = env.step(np.full(3, DOWN))[0]
    seen, _ = env.reset(options={'reset_mask': np.array([False, True, False])})
    assert np.array_equal(seen, [before[0], first[1], before[2]])
    ended = [env.step(np.full(3, UP))[3].tolist() for _ in range(3)]
    assert ended == [[False] * 3, [True, False, True], [False, True, False]]


@pytest.mark.parametrize('options, message', [
    ({'render_mode': 'human'}, "render_mode = 'human': expected None, 'ansi' or 'rgb_array'"),
    ({'time_limit': 0}, 'time_limit = 0: must be at least 1'),
    ({'levels': ONE.astype(int)}, 'levels: expected uint8'),
], ids=str)  # fmt: skip
def test_options_that_mean_nothing_are_refused(options, message):
    assert_refused(message, sokoban_gym.GymEnv, **options)


def test_what_is_no_action_is_refused():
    env = gymnasium.make(NAME, disable_env_checker=True, levels=ONE)
    env.reset(seed=1)
    assert_refused('^action: expected integers from 0 to 3', env.step, 4)
    assert env.step(np.int64(RIGHT))[2] is True  # solved


# ---- Jumanji ----


@jumanji
def test_parity_with_jumanji():
    """Both play the same levels with the same actions. Every reward, grid, end, step count and next
    level is equal, over 20,000 steps."""
    N, n = 160, 300
    levels, solutions = generate(n, 4, 5, max_moves=40)
    table = np.array([np.pad(actions, (0, TIME_LIMIT - len(actions))) for actions in solutions])
    limit = {'time_limit': 100}  # not the default of either
    original = JumanjiEnv(levels, N, seed=1, **limit)
    ours = SokobanEnv(levels, N, seed=1, **limit)
    rng = np.random.default_rng(0)
    met, seen_levels = torch.zeros(3), set()
    skill = np.array([0, 1, 0.5, 0.9])[np.arange(N) % 4]  # how often a board follows its solution
    for _ in range(130):
        level = random_bits(ours.keys, ours.episode - 1) % n
        seen_levels.update(level.tolist())
        solving = table[level.numpy(), ours.steps.numpy()]
        action = np.where(rng.random(N) < skill, solving, rng.integers(0, 4, N))
        action = torch.from_numpy(action)
        reward, done, solved = ours.move(action)
        for a, b in zip((reward, done, solved), original.move(action), strict=True):
            assert a.dtype == b.dtype and torch.equal(a, b)
        ours.reset(done)
        original.reset(done)
        state = original.state_dict()
        assert all(torch.equal(x, state[name]) for name, x in ours.state_dict().items())
        kinds = solved, done & ~solved, reward < -0.5  # solved, out of time, pushed off a target
        met += torch.stack(kinds).sum(1)
    assert met.min() >= 10, met
    assert len(seen_levels) > N  # resets sample from all levels


@jumanji
def test_levels_with_fewer_boxes_are_refused_for_jumanji():
    assert_refused("env = 'jumanji' needs levels with 4", JumanjiEnv, ONE, 2)

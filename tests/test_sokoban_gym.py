"""Test sokoban_gym.py: parity with Gymnasium's own vector environments and with Jumanji's
Sokoban."""

import importlib.util

import numpy as np
import pytest
import torch
from small_runs import assert_refused
from test_levels import numbered, text

from levels import board_image, board_text, generate, observations, parse_text
from sokoban import TIME_LIMIT, JumanjiEnv, SokobanEnv, random_bits

gymnasium = pytest.importorskip('gymnasium', reason='gymnasium is not installed')
from gymnasium.error import ResetNeeded  # noqa: E402
from gymnasium.utils.env_checker import check_env  # noqa: E402
from gymnasium.vector import AutoresetMode  # noqa: E402
from gymnasium.wrappers import vector as wrappers  # noqa: E402

import sokoban_gym  # noqa: E402

NAME = 'sokoban_gym:ParallelExperts/Sokoban-v0'
UP, RIGHT, DOWN, LEFT = range(4)
ONE = parse_text(numbered([text('#@$.     #')]), 'one')
jumanji = pytest.mark.skipif(
    not importlib.util.find_spec('jumanji'), reason='pip install -r requirements.txt'
)


@pytest.mark.parametrize('mode', [None, 'NextStep', 'SameStep', AutoresetMode.DISABLED])
@pytest.mark.parametrize('limits, steps, end', [
    ({}, TIME_LIMIT, (False, True)),
    ({'time_limit': 30}, 30, (True, False)),
    ({'time_limit': 30, 'max_episode_steps': 30}, 30, (True, True)),
    ({'time_limit': 130, 'max_episode_steps': -1}, 130, (True, False)),
], ids=str)  # fmt: skip
def test_make_vec_plays_as_gymnasium_does_with_make(limits, steps, end, mode):
    """Board 0 is solved by its first move, and board 1 by the last one of a second episode. Board 2
    is never solved: its episodes have this number of steps and are (terminated, truncated)."""
    mode = {'autoreset_mode': mode} if mode else {}
    options = {'levels': ONE, **limits}
    kwargs = {'vectorization_mode': 'sync', 'vector_kwargs': mode}
    singles = gymnasium.make_vec(NAME, 3, **kwargs, **options)
    ours = gymnasium.make_vec(NAME, 3, **mode, **options)
    assert singles.metadata == ours.metadata
    assert np.array_equal(singles.reset(seed=1)[0], ours.reset(seed=1)[0])
    ends = []
    for t in range(1, 2 * steps + 2):
        actions = np.array([RIGHT if t == 1 else UP, RIGHT if t == 2 * steps else UP, UP])
        if t > 1:  # the actions of boards that start again do not count
            actions = np.where(ours.unwrapped.ended, -1, actions)
        *expected, expected_infos = singles.step(actions)
        *found, infos = ours.step(actions)
        for x, y in zip(found, expected, strict=True):
            assert x.dtype == y.dtype and np.array_equal(x, y)
        for key in ('final_obs', '_final_obs', 'final_info', '_final_info'):
            assert repr(infos.get(key)) == repr(expected_infos.get(key))
        _, _, terminated, truncated = found
        if terminated[2] or truncated[2]:
            ends.append((t, terminated[2], truncated[2]))
        if ours.metadata['autoreset_mode'] == AutoresetMode.DISABLED:
            ended = terminated | truncated
            for env in (singles, ours) if ended.any() else ():
                env.reset(options={'reset_mask': ended})
    pause = ours.metadata['autoreset_mode'] == AutoresetMode.NEXT_STEP
    assert ends == [(steps, *end), (2 * steps + pause, *end)]


@pytest.mark.parametrize('wrap', [
    wrappers.FlattenObservation,
    wrappers.NormalizeObservation,
    wrappers.NormalizeReward,
    wrappers.RecordEpisodeStatistics,
    lambda env: wrappers.TransformObservation(env, lambda obs: obs / 4),
    lambda env: wrappers.RescaleObservation(env, 0, 1),
    lambda env: wrappers.DtypeObservation(env, np.float32),
    lambda env: wrappers.ClipReward(env, -1, 1),
    wrappers.DictInfoToList,
])  # fmt: skip
def test_gymnasiums_vector_wrappers_take_make_vec(wrap):
    env = wrap(gymnasium.make_vec(NAME, 2, levels=ONE, max_episode_steps=3))
    env.reset(seed=1)
    for _ in range(5):
        env.step(np.array([RIGHT, UP]))


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
    options = {'autoreset_mode': 'SameStep', 'max_episode_steps': 3}
    env = gymnasium.make_vec(NAME, num_envs=3, levels=ONE, **options)
    first, _ = env.reset(seed=1)
    before = env.step(np.full(3, DOWN))[0]
    seen, _ = env.reset(options={'reset_mask': np.array([False, True, False])})
    assert np.array_equal(seen, [before[0], first[1], before[2]])
    ended = [env.step(np.full(3, UP))[3].tolist() for _ in range(3)]
    assert ended == [[False] * 3, [True, False, True], [False, True, False]]


@pytest.mark.parametrize('mask', [np.zeros(3, bool), np.ones(2, bool), np.ones(3)], ids=str)
def test_a_reset_mask_that_means_nothing_is_refused(mask):
    """An episode that is being played goes on."""
    env = gymnasium.make_vec(NAME, num_envs=3, levels=ONE)
    env.reset(seed=1)
    before = env.step(np.full(3, DOWN))[0]
    message = r'^reset_mask: expected bool of shape \(3,\), not all False, found '
    assert_refused(message, env.reset, options={'reset_mask': mask})
    assert np.array_equal(env.step(np.full(3, LEFT))[0], before)


def test_no_step_is_played_outside_of_an_episode():
    """Neither before the first reset nor after the end of an episode."""
    single = sokoban_gym.GymEnv(levels=ONE)
    vector = gymnasium.make_vec(NAME, 2, levels=ONE, autoreset_mode='Disabled')
    for env, actions, board in ((single, RIGHT, ''), (vector, [UP, RIGHT], r'boards \[1\]')):
        with pytest.raises(ResetNeeded, match='^step: call reset first'):
            env.step(actions)
        env.reset()
        env.step(actions)
        with pytest.raises(ResetNeeded, match=f'^step: .*{board}'):
            env.step(actions)
    unseeded = gymnasium.make_vec(NAME, 2, levels=ONE)
    with pytest.raises(ResetNeeded, match='^reset_mask: call reset for all boards first'):
        unseeded.reset(options={'reset_mask': np.array([True, False])})


@pytest.mark.parametrize('options, message', [
    ({'num_envs': 0}, 'num_envs = 0: must be at least 1'),
    ({'max_episode_steps': 0}, 'max_episode_steps = 0: must be at least 1'),
    ({'autoreset_mode': 'same'}, "autoreset_mode = 'same': expected 'NextStep', 'SameStep', 'Dis"),
], ids=str)  # fmt: skip
def test_vector_options_that_mean_nothing_are_refused(options, message):
    assert_refused(message, sokoban_gym.GymVectorEnv, levels=ONE, **options)


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
    assert env.step(np.int64(RIGHT))[1:3] == (10.9, True)  # solved


def test_a_reward_is_that_of_an_edit_without_the_error_of_float32(monkeypatch):
    def move(self, action, real=SokobanEnv.move):
        reward, done, solved = real(self, action)
        return reward + 0.09, done, solved

    monkeypatch.setattr(SokobanEnv, 'move', move)
    env = gymnasium.make(NAME, disable_env_checker=True, levels=ONE)
    env.reset(seed=1)
    assert [env.step(action)[1] for action in (LEFT, RIGHT)] == [-0.01, 10.99]


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

"""Test gym_sokoban.py: what Gymnasium's checkers, wrappers and training loops expect, and parity
with Jumanji's Sokoban."""

import importlib.util

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from small_runs import assert_refused
from test_boxoban import numbered, text

import boxoban
import gym_sokoban
from boxoban import generate, observations, parse_text
from play_sokoban import board_image
from sokoban import TIME_LIMIT, SokobanEnv, random_bits

NAME = 'gym_sokoban:ParallelExperts/Sokoban-v0'
OPTIONS = {'n_levels': 40, 'n_boxes': 1}
UP, RIGHT = 0, 1
# One is solved by a step to the right; in the other the agent cannot move up.
TWO = parse_text(numbered([text('#@$.     #'), text('#.$@     #')]), 'two')
ONE = {'levels': TWO[:1]}
jumanji = pytest.mark.skipif(
    not importlib.util.find_spec('jumanji'), reason='pip install -r requirements.txt'
)


def test_the_checker_of_gymnasium_accepts_the_environment():
    check_env(gymnasium.make(NAME, render_mode='rgb_array', **OPTIONS).unwrapped)


@pytest.mark.parametrize('limits, end', [
    ({'time_limit': None}, (TIME_LIMIT, False, True)),
    ({'max_episode_steps': 30}, (30, False, True)),
    ({'max_episode_steps': 200}, (200, False, True)),
    ({'time_limit': 30}, (30, True, False)),
    ({'time_limit': TIME_LIMIT}, (TIME_LIMIT, True, True)),
    ({'time_limit': 200, 'max_episode_steps': -1}, (200, True, False)),
    ({'time_limit': 200, 'max_episode_steps': None}, (TIME_LIMIT, False, True)),
], ids=str)  # fmt: skip
def test_make_vec_plays_as_gymnasium_does_with_make(limits, end):
    """Board 0 is solved by the first step, and board 1 by its last one in a second episode. All
    boards play the only level. Lengths of episodes are counted exactly, also after the first.
    `end`: length of an unsolved episode, terminated, truncated."""
    mode = {'vector_kwargs': {'autoreset_mode': AutoresetMode.SAME_STEP}}
    singles = gymnasium.make_vec(NAME, 3, vectorization_mode='sync', **mode, **ONE, **limits)
    ours = RecordEpisodeStatistics(gymnasium.make_vec(NAME, 3, **ONE, **limits))
    assert np.array_equal(singles.reset(seed=1)[0], ours.reset(seed=1)[0])
    for t in range(1, 2 * end[0] + 1):
        actions = np.array([RIGHT if t == 1 else UP, RIGHT if t == 2 * end[0] else UP, UP])
        *expected, expected_infos = singles.step(actions)
        *found, infos = ours.step(actions)
        assert all(map(np.allclose, found, expected))
        keys = ['final_obs', '_final_obs', 'final_info', '_final_info']
        assert [key in infos for key in keys] == [key in expected_infos for key in keys]
        for key in keys if 'final_obs' in infos else []:
            assert repr(infos[key]) == repr(expected_infos[key])
        if t % end[0] == 0:
            assert (infos['episode']['l'][2], found[2][2], found[3][2]) == end
            assert infos['episode']['r'][2] == pytest.approx(-0.1 * end[0], rel=1e-4)


def test_environments_play_generated_levels_and_draw_them():
    options = {'render_mode': 'rgb_array', **OPTIONS}
    env = gymnasium.make(NAME, **options)
    seen, _ = env.reset(seed=5)
    assert any(np.array_equal(seen, board) for board in observations(generate(40, 1)[0]))
    assert np.array_equal(env.render(), board_image(seen))
    assert np.array_equal(env.reset(seed=5)[0], seen)
    assert (env.reset()[0] != seen).any()
    vector = gymnasium.make_vec(NAME, num_envs=3, **options)
    boards, _ = vector.reset(seed=1)
    assert np.array_equal(vector.render(), [board_image(board) for board in boards])


def test_reset_mask_starts_some_boards_again():
    env = gymnasium.make_vec(NAME, num_envs=3, max_episode_steps=4, **ONE)
    first, _ = env.reset(seed=1)
    before = env.step(np.full(3, RIGHT + 1))[0]  # down
    seen, _ = env.reset(options={'reset_mask': np.array([False, True, False])})
    assert np.array_equal(seen, [before[0], first[1], before[2]])
    ended = [env.step(np.full(3, UP))[3].tolist() for _ in range(4)]
    assert ended == [[False] * 3, [False] * 3, [True, False, True], [False, True, False]]
    for mask in ([True], np.ones(3)):
        assert_refused('reset_mask: expected bool', env.reset, options={'reset_mask': mask})


SOLVED = TWO[[0, 0]]
SOLVED[1, 12:16] = SOLVED[1, 8:12]  # the box is on the target


@pytest.mark.parametrize('options, message', [
    ({'render_mode': 'human'}, "render_mode = 'human': expected None, 'ansi' or 'rgb_array'"),
    ({'time_limit': 0}, 'time_limit = 0: must be at least 1'),
    ({'levels': SOLVED}, 'levels: level 1 is solved already'),
    ({'levels': TWO.astype(int)}, 'levels: expected uint8'),
    ({'levels': 'hard'}, 'levels: expected uint8'),
], ids=str)  # fmt: skip
def test_options_that_mean_nothing_are_refused(options, message):
    assert_refused(message, gym_sokoban.GymEnv, **options)


def test_what_is_no_action_is_refused_and_moves_nothing():
    env = gymnasium.make(NAME, disable_env_checker=True, **ONE)
    board, _ = env.reset(seed=1)
    for action in (4, 1.9, True, None, [1], 2**70):
        assert_refused('^action: expected integers from 0 to 3', env.step, action)
    assert np.array_equal(env.unwrapped.observe(), board)
    for action in (np.int64(1), np.array(1), torch.tensor(1)):
        assert env.step(action)[2] is True  # solved
        env.reset()


def test_sixteen_environments_generate_their_levels_once(monkeypatch):
    calls = []
    monkeypatch.setattr(gym_sokoban, 'generate', lambda *a: calls.append(a) or boxoban.generate(*a))
    gym_sokoban.generate_once.cache_clear()
    for _ in range(16):
        gym_sokoban.GymEnv(**OPTIONS)
    assert len(calls) == 1


def test_ppo_of_stable_baselines3_trains_on_the_environment():
    sb3 = pytest.importorskip('stable_baselines3')
    from stable_baselines3.common.env_util import make_vec_env

    env = make_vec_env(NAME, n_envs=2, env_kwargs=OPTIONS)
    ppo = sb3.PPO('MlpPolicy', env, n_steps=64, batch_size=32, device='cpu', seed=0)
    before = torch.nn.utils.parameters_to_vector(ppo.policy.parameters()).detach()
    after = torch.nn.utils.parameters_to_vector(ppo.learn(384).policy.parameters())
    assert after.isfinite().all() and (after != before).any()
    assert ppo.ep_info_buffer  # the lengths and returns of episodes


def test_the_vector_loop_of_cleanrl_runs_and_logs_episodes():
    """A rollout of PPO and one of DQN, which reads the last observation of an episode."""
    envs = RecordEpisodeStatistics(gymnasium.make_vec(NAME, num_envs=4, time_limit=8, **OPTIONS))
    assert isinstance(envs.single_action_space, gymnasium.spaces.Discrete)
    agent = torch.nn.Linear(200, envs.single_action_space.n)
    next_obs, _ = envs.reset(seed=1)
    lengths = []
    for _ in range(40):
        logits = agent(torch.Tensor(next_obs).flatten(1))
        action = torch.distributions.Categorical(logits=logits).sample()
        next_obs, reward, terminations, truncations, infos = envs.step(action.cpu().numpy())
        ended = np.logical_or(terminations, truncations)
        assert torch.tensor(reward).view(-1).shape == torch.Tensor(ended).shape
        real_next_obs = next_obs.copy()
        for idx in np.flatnonzero(ended):
            real_next_obs[idx] = infos['final_obs'][idx]
        assert ((real_next_obs == 3).sum((1, 2, 3)) == 1).all()  # one agent each
        if 'final_info' in infos:
            assert infos['final_info']['solved'].shape == (4,)
            lengths.extend(infos['episode']['l'][infos['_final_info']])
    assert len(lengths) >= 16 and max(lengths) == 8


# ----------------------------------------------------------------------------- Jumanji


@jumanji
def test_parity_with_jumanji(request):
    """Both play the same levels with the same actions. Every reward, grid, end, step count and next
    level is equal, over 20,000 steps, and 128,000 with --long."""
    N, steps, n = (512, 250, 2000) if request.config.getoption('--long') else (160, 130, 300)
    levels, solutions = generate(n, 4, 5, max_moves=40)
    table = np.zeros((len(levels), TIME_LIMIT), np.int64)
    for row, actions in zip(table, solutions, strict=True):
        row[: len(actions)] = actions
    limit = {'time_limit': 100}  # not the default of either
    original = gym_sokoban.JumanjiEnv(levels, N, seed=1, **limit)
    ours = SokobanEnv(levels, N, seed=1, **limit)
    rng = np.random.default_rng(0)
    met, seen_levels = torch.zeros(5), set()
    skill = np.array([0, 1, 0.5, 0.9])[np.arange(N) % 4]  # how often a board follows its solution
    for _ in range(steps):
        level = random_bits(ours.keys, ours.episode - 1) % n
        seen_levels.update(level.tolist())
        solving = table[level.numpy(), ours.steps.numpy()]
        action = np.where(rng.random(N) < skill, solving, rng.integers(0, 4, N))
        action = torch.from_numpy(action)
        before = ours.observe()
        reward, done, solved = ours.step(action)
        for a, b in zip((reward, done, solved), original.step(action), strict=True):
            assert a.dtype == b.dtype and torch.equal(a, b)
        assert torch.equal(ours.observe(), original.observe())
        state = original.state_dict()
        assert all(torch.equal(x, state[name]) for name, x in ours.state_dict().items())
        changed = (before[..., 0] != ours.observe()[..., 0]).flatten(1).sum(1)
        # blocked, pushed, solved, out of time, pushed off a target
        kinds = changed == 0, changed == 3, solved, done & ~solved, reward < -0.5
        met += torch.stack(kinds).sum(1)
    assert met.min() >= 10, met
    assert len(seen_levels) > N  # resets sample from all levels


@jumanji
def test_levels_with_fewer_boxes_are_refused_for_jumanji():
    assert_refused("env = 'jumanji' needs levels with 4", gym_sokoban.JumanjiEnv, TWO, 2)

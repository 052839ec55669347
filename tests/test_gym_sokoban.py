"""Test gym_sokoban.py: what Gymnasium's checkers, wrappers and training loops expect, and parity
with Jumanji's Sokoban."""

import importlib.util

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from test_boxoban import numbered, text

import boxoban
import gym_sokoban
from boxoban import generate, observations, parse_text
from configurator import Mistake
from play_sokoban import board_image
from sokoban import TIME_LIMIT, SokobanEnv

NAME = 'gym_sokoban:ParallelExperts/Sokoban-v0'
OPTIONS = {'n_levels': 40, 'n_boxes': 1}
UP, RIGHT = 0, 1
# One is solved by a step to the right; in the other the agent cannot move up.
TWO = parse_text(numbered([text('#@$.     #'), text('#.$@     #')]), 'two')
jumanji = pytest.mark.skipif(
    not importlib.util.find_spec('jumanji'), reason='pip install -r requirements.txt'
)


def end_of_episode(env):
    """Step without moving to the end of the episode on all boards; return its length, and whether
    it was terminated and truncated."""
    env.reset(seed=0)
    action = np.zeros(env.num_envs, int) if hasattr(env, 'num_envs') else 0
    for t in range(1, 1000):
        _, _, terminated, truncated, _ = env.step(action)
        if np.any(terminated) or np.any(truncated):
            return t, bool(np.all(terminated)), bool(np.all(truncated))


def test_the_checker_of_gymnasium_accepts_the_environment():
    check_env(gymnasium.make(NAME, render_mode='rgb_array', **OPTIONS).unwrapped)


def test_an_environment_plays_generated_levels_and_draws_them():
    env = gymnasium.make(NAME, render_mode='rgb_array', **OPTIONS)
    seen, _ = env.reset(seed=5)
    assert any(np.array_equal(seen, board) for board in observations(generate(40, 1)[0]))
    assert np.array_equal(env.render(), board_image(seen))
    assert np.array_equal(env.reset(seed=5)[0], seen)
    assert (env.reset()[0] != seen).any()


def test_a_vector_environment_draws_all_boards():
    env = gymnasium.make_vec(NAME, num_envs=3, render_mode='rgb_array', **OPTIONS)
    boards, _ = env.reset(seed=1)
    assert np.array_equal(env.render(), [board_image(board) for board in boards])


def test_an_unknown_render_mode_is_refused():
    with pytest.raises(
        Mistake, match="render_mode = 'human': expected None, 'ansi' or 'rgb_array'"
    ):
        gymnasium.make_vec(NAME, num_envs=2, render_mode='human', **OPTIONS)


LIMITS = [  # options; length of an episode; whether it is terminated, truncated
    ({}, (TIME_LIMIT, False, True)),
    ({'max_episode_steps': 30}, (30, False, True)),
    ({'max_episode_steps': 300}, (300, False, True)),
    ({'time_limit': 30}, (30, True, False)),
    ({'time_limit': 300, 'max_episode_steps': 400}, (300, True, False)),
    ({'time_limit': 40, 'max_episode_steps': 30}, (30, False, True)),
]


@pytest.mark.filterwarnings('ignore:.*unless max_episode_steps is given')
@pytest.mark.parametrize('options, expected', LIMITS, ids=str)
def test_the_length_of_an_episode_can_be_set(options, expected):
    options = {'levels': TWO, **options}
    assert end_of_episode(gymnasium.make(NAME, **options)) == expected
    assert end_of_episode(gymnasium.make_vec(NAME, num_envs=2, **options)) == expected


def test_a_long_time_limit_needs_max_episode_steps_with_make_alone():
    vector = gymnasium.make_vec(NAME, num_envs=2, levels=TWO, time_limit=200)
    assert end_of_episode(vector) == (200, True, False)
    with pytest.warns(UserWarning, match='time_limit = 200 steps: gymnasium.make truncates after'):
        gymnasium.make(NAME, levels=TWO, time_limit=200)


def test_a_time_limit_of_zero_is_refused():
    with pytest.raises(Mistake, match='time_limit = 0: must be at least 1'):
        gymnasium.make(NAME, levels=TWO, time_limit=0)


SOLVED = TWO[[0, 0]]
SOLVED[1, 12:16] = SOLVED[1, 8:12]  # the box is on the target


@pytest.mark.parametrize(
    'levels, message',
    [
        (SOLVED, 'levels: level 1 is solved already'),
        (TWO.astype(int), 'levels: expected uint8'),
        ('hard', 'levels: expected uint8'),
    ],
    ids=str,
)
def test_what_is_no_level_is_refused(levels, message):
    with pytest.raises(Mistake, match=message):
        gymnasium.make_vec(NAME, num_envs=2, levels=levels)


@pytest.mark.parametrize('action', [-1, 4, 1.9, '1', True, None, [1], 2**70], ids=str)
def test_what_is_no_action_is_refused_and_moves_nothing(action):
    env = gymnasium.make(NAME, disable_env_checker=True, **OPTIONS)
    board, _ = env.reset(seed=1)
    with pytest.raises(Mistake, match='action: expected integers from 0 to 3'):
        env.step(action)
    assert np.array_equal(env.unwrapped.observe(), board)


@pytest.mark.parametrize('actions', [1, [1], [1, 2, 3], [0, 4], [0, -1], [0.0, 1.0], [[0], [1]]])
def test_a_vector_of_other_length_type_or_range_is_refused(actions):
    env = gymnasium.make_vec(NAME, num_envs=2, **OPTIONS)
    env.reset(seed=1)
    with pytest.raises(Mistake, match='actions: expected integers from 0 to 3'):
        env.step(actions)


@pytest.mark.parametrize('action', [np.int64(1), np.array(1), np.uint8(1), torch.tensor(1)])
def test_integers_of_other_types_are_actions(action):
    env = gymnasium.make(NAME, levels=TWO[:1], disable_env_checker=True)
    env.reset(seed=1)
    assert env.step(action)[2] is True  # solved


def test_a_vector_environment_steps_as_ours_does():
    ours = SokobanEnv(generate(40, 1)[0], 6)
    vector = gymnasium.make_vec(NAME, num_envs=6, time_limit=TIME_LIMIT, **OPTIONS)
    assert vector.reset(seed=1)[0].shape == vector.observation_space.shape
    ours.load_state_dict(vector.unwrapped.boards.state_dict())
    ours.keys.copy_(vector.unwrapped.boards.keys)
    for _ in range(TIME_LIMIT + 1):
        action = vector.action_space.sample()
        seen, reward, terminated, truncated, infos = vector.step(action)
        expected = [x.numpy() for x in ours.step(torch.from_numpy(action))]
        assert seen in vector.observation_space and np.array_equal(seen, ours.observe())
        assert all(map(np.array_equal, expected, (reward, terminated, infos['solved'])))
        assert not truncated.any()


def test_the_end_of_an_episode_is_reported_as_sync_vector_env_does():
    """Board 0 is solved by the first step. All boards play the only level."""
    solving = {'levels': TWO[:1], 'time_limit': 2}
    options = {'autoreset_mode': AutoresetMode.SAME_STEP}
    reference = SyncVectorEnv([lambda: gym_sokoban.GymEnv(**solving)] * 3, **options)
    ours = gymnasium.make_vec(NAME, num_envs=3, **solving)
    assert np.array_equal(reference.reset(seed=1)[0], ours.reset(seed=1)[0])
    for actions in ([RIGHT, UP, UP], [UP, UP, RIGHT], [UP, UP, UP]):
        *expected, reference_infos = reference.step(np.array(actions))
        *found, infos = ours.step(np.array(actions))
        assert all(map(np.allclose, found, expected))
        keys = ['final_obs', '_final_obs', 'final_info', '_final_info']
        assert [key in infos for key in keys] == [key in reference_infos for key in keys]
        for key in keys if 'final_obs' in reference_infos else []:
            assert repr(infos[key]) == repr(reference_infos[key])


def test_statistics_of_episodes_are_exact():
    """The first episodes end at the limit, later ones are solved after three steps."""
    env = RecordEpisodeStatistics(gymnasium.make_vec(NAME, num_envs=2, levels=TWO[:1]))
    env.reset(seed=1)
    found = []
    for t in range(2 * TIME_LIMIT + 6):
        late = t >= 2 * TIME_LIMIT and t % 3 == 2
        *_, infos = env.step(np.full(2, RIGHT if late else UP))
        if 'episode' in infos:
            found.append((infos['episode']['l'].tolist(), infos['episode']['r'].round(3).tolist()))
    limit = [TIME_LIMIT] * 2, [-12.0] * 2
    assert found == [limit, limit, ([3, 3], [10.7, 10.7]), ([3, 3], [10.7, 10.7])]
    assert list(env.length_queue) == [TIME_LIMIT] * 4 + [3] * 4


def test_sixteen_environments_generate_their_levels_once(monkeypatch):
    calls = []
    monkeypatch.setattr(gym_sokoban, 'generate', lambda *a: calls.append(a) or boxoban.generate(*a))
    gym_sokoban.generate_once.cache_clear()
    env = gymnasium.make_vec(NAME, num_envs=16, vectorization_mode='sync', **OPTIONS)
    gymnasium.make_vec(NAME, num_envs=16, **OPTIONS)
    assert len(calls) == 1 and env.reset(seed=1)[0].shape == (16, 10, 10, 2)


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
    next_done = torch.zeros(4)
    returns, lengths = [], []
    for _ in range(40):
        logits = agent(torch.Tensor(next_obs).flatten(1))
        action = torch.distributions.Categorical(logits=logits).sample()
        next_obs, reward, terminations, truncations, infos = envs.step(action.cpu().numpy())
        next_done = torch.Tensor(np.logical_or(terminations, truncations))
        assert torch.tensor(reward).view(-1).shape == next_done.shape
        real_next_obs = next_obs.copy()
        for idx, ended in enumerate(np.logical_or(terminations, truncations)):
            if ended:
                real_next_obs[idx] = infos['final_obs'][idx]
        assert (real_next_obs.reshape(4, -1) == 3).sum(1).tolist() == [1] * 4
        if 'final_info' in infos:
            ended = infos['_final_info']
            assert infos['final_info']['solved'].shape == (4,)
            returns.extend(infos['episode']['r'][ended])
            lengths.extend(infos['episode']['l'][ended])
    assert len(returns) >= 16 and max(lengths) == 8


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
    met = torch.zeros(5)
    skill = np.array([0, 1, 0.5, 0.9])[np.arange(N) % 4]  # how often a board follows its solution
    for _ in range(steps):
        solving = table[ours.level.numpy(), ours.steps.numpy()]
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
    assert ours.level.unique().numel() > N // 4  # resets sample from all levels


@jumanji
def test_levels_with_fewer_boxes_are_refused_for_jumanji():
    with pytest.raises(Mistake, match="env = 'jumanji' needs levels with 4 boxes"):
        gym_sokoban.JumanjiEnv(TWO, 2)

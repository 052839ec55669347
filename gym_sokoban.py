"""Sokoban for Gymnasium, single and vectorized, and Jumanji's own Sokoban behind our interface.

    env = gymnasium.make('gym_sokoban:ParallelExperts/Sokoban-v0', n_boxes=1)
    envs = gymnasium.make_vec('gym_sokoban:ParallelExperts/Sokoban-v0', num_envs=64)

Observations are boards (10, 10, 2) uint8 as boxoban.py describes them; actions 0..3 are up, right,
down, left. Both take the keywords of `make_boards` below, and render_mode: 'ansi' or 'rgb_array'.

A solved episode is terminated. As usual in Gymnasium, others are truncated after
max_episode_steps, 120 by default. With time_limit they are terminated after that many steps
instead, so that no value is bootstrapped there: the rule of Jumanji and the paper. (`make` itself
truncates after 120 steps: a longer time_limit needs max_episode_steps as well.)

In an environment of make_vec a board that is done is reset in the same step. As in SyncVectorEnv,
infos then has `final_obs` and `final_info`; infos['solved'] is of this step, on all boards.
"""

import functools
import math
import numbers

from configurator import Mistake

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy import ndarray
from torch import Tensor

from boxoban import AGENT, BOX, MOST_MOVES, SIZE, board_text, check_levels, generate
from play_sokoban import board_image
from sokoban import TIME_LIMIT, SokobanEnv, check_actions

OBSERVATIONS = gymnasium.spaces.Box(0, BOX, (SIZE, SIZE, 2), np.uint8)
ACTIONS = gymnasium.spaces.Discrete(4)
METADATA = {'render_modes': ['ansi', 'rgb_array'], 'render_fps': 4}


@functools.lru_cache(maxsize=8)
def generate_once(n_levels: int, n_boxes: int, max_moves: int) -> ndarray:
    """Return generated levels for training, the same array for every environment."""
    levels, _ = generate(n_levels, n_boxes, 0, max_moves)
    return levels


def make_boards(
    N: int,
    render_mode: str | None,
    levels: ndarray | None = None,
    n_levels: int = 1000,
    n_boxes: int = 4,
    max_moves: int = MOST_MOVES,
    time_limit: int | None = None,
) -> SokobanEnv:
    """Return N boards.

    levels: packed levels (n, 17); without them, n_levels are generated, with n_boxes boxes that
    are known to be solvable in max_moves. time_limit: see above.
    """
    if render_mode not in (None, *METADATA['render_modes']):
        raise Mistake(f"render_mode = {render_mode!r}: expected None, 'ansi' or 'rgb_array'")
    if time_limit is None:
        time_limit = math.inf
    if time_limit < 1:
        raise Mistake(f'time_limit = {time_limit}: must be at least 1')
    if levels is None:
        levels = generate_once(n_levels, n_boxes, max_moves)
    else:
        levels = check_levels(np.asarray(levels), 'levels')
    return SokobanEnv(levels, N, time_limit=time_limit)


def draw(board: ndarray, render_mode: str | None) -> str | ndarray | None:
    """Return a board as text or as a picture (240, 240, 3) uint8."""
    if render_mode == 'rgb_array':
        return board_image(board)
    return board_text(board) if render_mode == 'ansi' else None


class GymEnv(gymnasium.Env):
    """One board as a Gymnasium environment. options: see make_boards."""

    metadata = METADATA

    def __init__(self, render_mode: str | None = None, **options: object):
        self.boards = make_boards(1, render_mode, **options)
        if TIME_LIMIT < self.boards.time_limit < math.inf:
            unless = (
                f'gymnasium.make truncates after {TIME_LIMIT} unless max_episode_steps is given'
            )
            gymnasium.logger.warn(f'time_limit = {self.boards.time_limit} steps: {unless}')
        self.render_mode = render_mode
        self.observation_space, self.action_space = OBSERVATIONS, ACTIONS

    def observe(self) -> ndarray:
        """Return the board (10, 10, 2)."""
        return self.boards.observe()[0].numpy()

    def reset(
        self, *, seed: int | None = None, options: dict | None = None
    ) -> tuple[ndarray, dict]:
        super().reset(seed=seed)
        self.boards.restart(int(self.np_random.integers(1 << 62)))
        return self.observe(), {}

    def step(self, action: int) -> tuple[ndarray, float, bool, bool, dict]:
        actions = torch.from_numpy(check_actions([action], 1, 'action'))
        reward, done, solved = (x.item() for x in self.boards.move(actions))
        return self.observe(), reward, done, False, {'solved': solved}

    def render(self) -> str | ndarray | None:
        return draw(self.observe(), self.render_mode)


class GymVectorEnv(VectorEnv):
    """num_envs boards of one SokobanEnv as a Gymnasium vector environment. options: see
    make_boards. max_episode_steps = -1: episodes are never truncated."""

    metadata = {**METADATA, 'autoreset_mode': AutoresetMode.SAME_STEP}

    def __init__(
        self,
        num_envs: int = 1,
        render_mode: str | None = None,
        max_episode_steps: int | None = None,
        **options: object,
    ):
        limits = {'max_episode_steps': max_episode_steps, 'time_limit': options.get('time_limit')}
        for name, limit in {'num_envs': num_envs, **limits}.items():
            is_count = isinstance(limit, numbers.Integral) and (limit > 0 or limit == -1)
            if not (is_count or limit in (None, math.inf)):
                raise Mistake(f'{name} = {limit!r}: expected a positive integer')
        self.boards = make_boards(num_envs, render_mode, **options)
        self.num_envs, self.render_mode = num_envs, render_mode
        self.max_steps = max_episode_steps or TIME_LIMIT
        # make_vec passes 120 if the user gives nothing: a time_limit then counts alone
        is_replaced = self.max_steps == TIME_LIMIT and self.boards.time_limit < math.inf
        if is_replaced or self.max_steps == -1:
            self.max_steps = math.inf
        self.single_observation_space, self.single_action_space = OBSERVATIONS, ACTIONS
        self.observation_space = batch_space(OBSERVATIONS, num_envs)
        self.action_space = batch_space(ACTIONS, num_envs)

    def reset(
        self, *, seed: int | None = None, options: dict | None = None
    ) -> tuple[ndarray, dict]:
        super().reset(seed=seed)
        self.boards.restart(int(self.np_random.integers(1 << 62)))
        return self.boards.observe().numpy(), {}

    def step(self, actions: ndarray) -> tuple[ndarray, ndarray, ndarray, ndarray, dict]:
        actions = torch.from_numpy(check_actions(actions, self.num_envs, 'actions'))
        reward, done, solved = (x.numpy() for x in self.boards.move(actions))
        truncated = (self.boards.steps >= self.max_steps).numpy()
        infos = {'solved': solved, '_solved': np.ones(self.num_envs, bool)}
        ended = done | truncated
        final_obs = self.boards.observe().numpy()
        for i in np.flatnonzero(ended):
            final = {'final_obs': final_obs[i], 'final_info': {'solved': bool(solved[i])}}
            infos = self._add_info(infos, final, i)
        self.boards.reset(torch.from_numpy(ended))
        return self.boards.observe().numpy(), reward, done, truncated, infos

    def render(self) -> tuple:
        return tuple(draw(board, self.render_mode) for board in self.boards.observe().numpy())


gymnasium.register(
    'ParallelExperts/Sokoban-v0',
    entry_point='gym_sokoban:GymEnv',
    vector_entry_point='gym_sokoban:GymVectorEnv',
    max_episode_steps=TIME_LIMIT,
)


class JumanjiEnv(SokobanEnv):
    """The same boards, moved by Jumanji's own Sokoban-v0.

    Raises Mistake if a level has fewer than four boxes. jumanji and jax are imported nowhere else,
    and the jax that requirements.txt pins runs on the CPU.
    """

    def __init__(self, *args: object, **options: object):
        super().__init__(*args, **options)
        if ((self.grids & BOX) > 0).sum(1).min() < 4:
            raise Mistake("env = 'jumanji' needs levels with 4 boxes, and some have fewer")
        import jax
        from jumanji.environments import Sokoban
        from jumanji.environments.routing.sokoban import generator, types

        # this generator is never called; others download their levels when they are created
        game = Sokoban(generator.ToyGenerator(), time_limit=self.time_limit)
        self.State = types.State
        self.play = jax.jit(jax.vmap(game.step))

    def move(self, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Convert the boards to Jumanji's state, play its step and convert the result back."""
        observation = self.observe().cpu().numpy()
        agent = self.agent.cpu().numpy().astype(np.int32)
        before = self.State(
            key=np.zeros((self.N, 2), np.uint32),
            variable_grid=observation[..., 0],
            fixed_grid=observation[..., 1],
            agent_location=np.stack(np.divmod(agent, SIZE), 1),
            step_count=self.steps.cpu().numpy().astype(np.int32),
        )
        _, timestep = self.play(before, action.cpu().numpy().astype(np.int32))

        def tensor(x: object) -> Tensor:
            return torch.from_numpy(np.array(x)).to(action.device)

        variable, fixed = tensor(timestep.observation.grid).flatten(1, 2).unbind(-1)
        self.grid.copy_(fixed | (variable & BOX))
        self.agent.copy_((variable == AGENT).int().argmax(1))
        self.steps.copy_(tensor(timestep.observation.step_count))
        reward = tensor(timestep.reward)
        self.total.add_(reward)
        return reward, tensor(timestep.last()), tensor(timestep.extras['solved'])

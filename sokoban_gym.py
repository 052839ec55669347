"""Sokoban for Gymnasium, single and vectorized, and Jumanji's own Sokoban behind our interface.

    env = gymnasium.make('sokoban_gym:ParallelExperts/Sokoban-v0', n_boxes=1)
    envs = gymnasium.make_vec('sokoban_gym:ParallelExperts/Sokoban-v0', num_envs=64)

Observations are boards (10, 10, 2) uint8 as levels.py describes them; actions 0..3 are up, right,
down, left. Both take the keywords of `make_boards` below, and render_mode: 'ansi' or 'rgb_array'.

An episode is terminated when it is solved and, with time_limit, after that many steps, so that no
value is bootstrapped there: the rule of Jumanji and the paper. It is truncated, as usual in
Gymnasium, after max_episode_steps, 120 by default; -1: never.

make_vec plays all its boards in one SokobanEnv, more than ten times as fast as SyncVectorEnv does.
A board that is done is reset in the same step. As in SyncVectorEnv, infos then has `final_obs` and
`final_info`, and reset takes the option `reset_mask`; infos['solved'] is of this step, on all
boards.
"""

import functools
import math

from configurator import UserError

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy import ndarray

from levels import BOX, MOST_MOVES, SIZE, board_image, board_text, check_levels, generate
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
    are known to be solvable in max_moves. time_limit: see above; more than 120 steps need
    max_episode_steps as well.
    """
    if render_mode not in (None, *METADATA['render_modes']):
        raise UserError(f"render_mode = {render_mode!r}: expected None, 'ansi' or 'rgb_array'")
    if time_limit is None:
        time_limit = math.inf
    if time_limit < 1:
        raise UserError(f'time_limit = {time_limit}: must be at least 1')
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
    observation_space = OBSERVATIONS

    def __init__(self, render_mode: str | None = None, **options: object):
        self.boards = make_boards(1, render_mode, **options)
        self.render_mode = render_mode
        self.action_space = gymnasium.spaces.Discrete(4)  # seeding it affects no other environment

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
    make_boards."""

    metadata = {**METADATA, 'autoreset_mode': AutoresetMode.SAME_STEP}
    single_observation_space, single_action_space = OBSERVATIONS, ACTIONS

    def __init__(
        self,
        num_envs: int = 1,
        render_mode: str | None = None,
        max_episode_steps: int | None = None,
        **options: object,
    ):
        self.boards = make_boards(num_envs, render_mode, **options)
        self.num_envs, self.render_mode = num_envs, render_mode
        self.max_steps = math.inf if max_episode_steps == -1 else max_episode_steps or TIME_LIMIT
        self.observation_space = batch_space(OBSERVATIONS, num_envs)
        self.action_space = batch_space(ACTIONS, num_envs)

    def observe(self) -> ndarray:
        """Return the boards (num_envs, 10, 10, 2)."""
        return self.boards.observe().numpy()

    def reset(
        self, *, seed: int | None = None, options: dict | None = None
    ) -> tuple[ndarray, dict]:
        """Start all boards again, or those where options['reset_mask'] (num_envs,) bool is true."""
        super().reset(seed=seed)
        mask = np.asarray((options or {}).get('reset_mask', np.ones(self.num_envs, bool)))
        if mask.dtype != bool or mask.shape != (self.num_envs,):
            raise UserError(f'reset_mask: expected bool of shape ({self.num_envs},)')
        self.boards.restart(int(self.np_random.integers(1 << 62)), torch.from_numpy(mask))
        return self.observe(), {}

    def step(self, actions: ndarray) -> tuple[ndarray, ndarray, ndarray, ndarray, dict]:
        actions = torch.from_numpy(check_actions(actions, self.num_envs, 'actions'))
        reward, done, solved = (x.numpy() for x in self.boards.move(actions))
        truncated = (self.boards.steps >= self.max_steps).numpy()
        ended = done | truncated
        infos = {'solved': solved, '_solved': np.ones(self.num_envs, bool)}
        final_obs = self.observe()
        for i in np.flatnonzero(ended):
            final = {'final_obs': final_obs[i], 'final_info': {'solved': bool(solved[i])}}
            infos = self._add_info(infos, final, i)
        self.boards.reset(torch.from_numpy(ended))
        return self.observe(), reward, done, truncated, infos

    def render(self) -> tuple:
        return tuple(draw(board, self.render_mode) for board in self.observe())


gymnasium.register(
    'ParallelExperts/Sokoban-v0',
    entry_point='sokoban_gym:GymEnv',
    vector_entry_point='sokoban_gym:GymVectorEnv',
    max_episode_steps=TIME_LIMIT,
)

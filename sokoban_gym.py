"""Sokoban for Gymnasium, single and vectorized.

    env = gymnasium.make('sokoban_gym:ParallelExperts/Sokoban-v0', n_boxes=1)
    envs = gymnasium.make_vec('sokoban_gym:ParallelExperts/Sokoban-v0', num_envs=64)

Observations are boards (10, 10, 2) uint8 as levels.py describes them; actions 0..3 are up, right,
down, left. Both take the keywords of `make_boards` below, and render_mode: 'ansi' or 'rgb_array'.

An episode is terminated when it is solved and, with time_limit, after that many steps, so that no
value is bootstrapped there: the rule of Jumanji and the paper. It is truncated, as usual in
Gymnasium, after max_episode_steps, 120 by default; -1: never.

make_vec plays all its boards in one SokobanEnv, more than ten times as fast as SyncVectorEnv. Its
reset takes one seed for all boards, and the option `reset_mask`. Its `autoreset_mode` says when a
board whose episode has ended starts again: 'NextStep', the default: in the next step, whose action
it ignores; 'SameStep': in the same step, whose infos have `final_obs` and `final_info` (Gymnasium's
wrappers of observations refuse this mode); 'Disabled': by `reset_mask` alone.
"""

import functools
import math

from support.script import UserError

import gymnasium
import numpy as np
import torch
from gymnasium.error import ResetNeeded
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


def play(boards: SokobanEnv, actions: ndarray) -> tuple[ndarray, ndarray, ndarray]:
    """Play actions (N,) int64; return rewards (N,) float64, rounded to 1e-5, because they are
    computed in float32, and whether the episodes are done and solved, (N,) bool each."""
    reward, done, solved = (x.numpy() for x in boards.move(torch.from_numpy(actions)))
    return reward.astype(np.float64).round(5), done, solved


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
        self.ended = True  # no episode is being played

    def observe(self) -> ndarray:
        """Return the board (10, 10, 2)."""
        return self.boards.observe()[0].numpy()

    def reset(
        self, *, seed: int | None = None, options: dict | None = None
    ) -> tuple[ndarray, dict]:
        super().reset(seed=seed)
        self.boards.restart(int(self.np_random.integers(1 << 62)))
        self.ended = False
        return self.observe(), {}

    def step(self, action: int) -> tuple[ndarray, float, bool, bool, dict]:
        actions = check_actions([action], 1, 'action')
        if self.ended:
            raise ResetNeeded('step: call reset first, and after the end of an episode')
        reward, done, solved = (x.item() for x in play(self.boards, actions))
        self.ended = done
        return self.observe(), reward, done, False, {'solved': solved}

    def render(self) -> str | ndarray | None:
        return draw(self.observe(), self.render_mode)


class GymVectorEnv(VectorEnv):
    """num_envs boards of one SokobanEnv as a Gymnasium vector environment. options: see
    make_boards."""

    single_observation_space, single_action_space = OBSERVATIONS, ACTIONS

    def __init__(
        self,
        num_envs: int = 1,
        render_mode: str | None = None,
        max_episode_steps: int | None = None,
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
        **options: object,
    ):
        try:
            self.mode = AutoresetMode(autoreset_mode)
        except ValueError:
            modes = ', '.join(repr(mode.value) for mode in AutoresetMode)
            raise UserError(f'autoreset_mode = {autoreset_mode!r}: expected {modes}') from None
        self.max_steps = TIME_LIMIT if max_episode_steps is None else max_episode_steps
        if self.max_steps == -1:
            self.max_steps = math.inf
        for name, value in (('num_envs', num_envs), ('max_episode_steps', self.max_steps)):
            if value < 1:
                raise UserError(f'{name} = {value}: must be at least 1')
        self.metadata = {**METADATA, 'autoreset_mode': self.mode}
        self.boards = make_boards(num_envs, render_mode, **options)
        self.num_envs, self.render_mode = num_envs, render_mode
        self.observation_space = batch_space(OBSERVATIONS, num_envs)
        self.action_space = batch_space(ACTIONS, num_envs)
        self.ended = None  # (num_envs,) bool: which episodes have ended; None before `reset`

    def observe(self) -> ndarray:
        """Return the boards (num_envs, 10, 10, 2)."""
        return self.boards.observe().numpy()

    def reset(
        self, *, seed: int | None = None, options: dict | None = None
    ) -> tuple[ndarray, dict]:
        """Start all boards again, or those where options['reset_mask'] (num_envs,) bool is true."""
        everywhere = np.ones(self.num_envs, bool)
        mask = np.asarray((options or {}).get('reset_mask', everywhere))
        if mask.dtype != bool or mask.shape != (self.num_envs,) or not mask.any():
            expected = f'expected bool of shape ({self.num_envs},), not all False'
            raise UserError(f'reset_mask: {expected}, found {mask.dtype} of shape {mask.shape}')
        if self.ended is None and not mask.all():
            raise ResetNeeded('reset_mask: call reset for all boards first')
        super().reset(seed=seed)
        self.ended = (everywhere if self.ended is None else self.ended) & ~mask
        self.boards.restart(int(self.np_random.integers(1 << 62)), torch.from_numpy(mask))
        return self.observe(), {}

    def step(self, actions: ndarray) -> tuple[ndarray, ndarray, ndarray, ndarray, dict]:
        if self.ended is None:
            raise ResetNeeded('step: call reset first')
        starts = self.ended  # boards that start again instead of moving
        actions = check_actions(actions, self.num_envs, 'actions', ignored=starts)
        if self.mode == AutoresetMode.DISABLED and starts.any():
            boards = np.flatnonzero(starts).tolist()
            raise ResetNeeded(f'step: the episodes of boards {boards} have ended: see reset_mask')
        reward, done, solved = play(self.boards, actions)
        self.boards.reset(torch.from_numpy(starts))
        reward[starts], done[starts], solved[starts] = 0, False, False
        truncated = (self.boards.steps >= self.max_steps).numpy()
        self.ended = done | truncated
        infos = {'solved': solved, '_solved': ~starts}
        if self.mode == AutoresetMode.SAME_STEP:
            final_obs = self.observe()
            for i in np.flatnonzero(self.ended):
                final = {'final_obs': final_obs[i], 'final_info': {'solved': bool(solved[i])}}
                infos = self._add_info(infos, final, i)
            self.boards.reset(torch.from_numpy(self.ended))
            self.ended = np.zeros(self.num_envs, bool)
        return self.observe(), reward, done, truncated, infos

    def render(self) -> tuple:
        return tuple(draw(board, self.render_mode) for board in self.observe())


gymnasium.register(
    'ParallelExperts/Sokoban-v0',
    entry_point='sokoban_gym:GymEnv',
    vector_entry_point='sokoban_gym:GymVectorEnv',
    max_episode_steps=TIME_LIMIT,
)

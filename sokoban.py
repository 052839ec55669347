"""Sokoban in torch: the environment, Jumanji's own behind the same interface, and the evaluation of
policies.

The rules are those of Jumanji's Sokoban-v0 on 10x10 boards. Actions are up, right, down, left. A
blocked move costs a step like any other. The reward is -0.1 per step, +1 for a box pushed onto a
target, -1 for one pushed off, +10 when all boxes are on targets. An episode ends when its level is
solved or at the time limit, 120 steps by default; both are terminations, so no value is
bootstrapped.

levels.py has the levels, sokoban_gym.py the environment for Gymnasium.

Shape letters: N boards or levels that are processed together, n levels in all.
"""

import os
import pkgutil
import sys
from collections.abc import Callable

from support.script import UserError, first_line, print0

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy import ndarray
from torch import Tensor

from levels import AGENT, BOX, CELLS, DELTA, PLAYER, SIZE, TARGET, WALL, unpack
from support.ranks import Throttle, fill

TIME_LIMIT = 120  # default: most steps of an episode
EVALUATION_BATCH = 256  # boards that are evaluated at once
# board_keys makes independent random numbers for each of these purposes
LEVEL_STREAM, ACTION_STREAM, EVALUATION_STREAM = 0, 1, 2
AHEAD = np.array(DELTA)[:, None] * np.arange(3)  # (4, 3), see SokobanEnv


# ---- random numbers ----


def shift_right(x: Tensor, n: int) -> Tensor:
    """Return int64 x shifted right by n bits, as if it were unsigned: zeros enter from the left."""
    return (x >> n) & ((1 << (64 - n)) - 1)


def scramble(x: Tensor) -> Tensor:
    """Return the finalizer of the splitmix64 generator for x int64. Its factors are written as
    signed numbers."""
    x = (x ^ shift_right(x, 30)) * -0x40A7B892E31B1A47  # 0xbf58476d1ce4e5b9
    x = (x ^ shift_right(x, 27)) * -0x6B2FB644ECCEEE15  # 0x94d049bb133111eb
    return x ^ shift_right(x, 31)


def board_keys(seed: int, stream: int, board: Tensor) -> Tensor:
    """Return the keys (N,) int64 from which random_bits makes the random numbers of boards.

    stream: LEVEL_STREAM, ACTION_STREAM or EVALUATION_STREAM. board: the boards' numbers (N,) int64.
    """
    start = torch.full_like(board, (4 * seed + stream) % (1 << 63))
    return scramble(scramble(start) + board)


def random_bits(keys: Tensor, count: Tensor) -> Tensor:
    """Return random integers 0..2^53 - 1, a function of each board's key (N,) and count (N,) or ().

    Because there is no other state, results do not depend on how boards are split over ranks, a
    resumed run restores no generator, and each replay of a CUDA graph samples new numbers.
    """
    return shift_right(scramble(keys + count), 11)


def sample_actions(logits: Tensor, random: Tensor) -> Tensor:
    """Sample actions (B,) from logits (B, 4) by inversion. random: (B,), from random_bits()."""
    u = (random >> 29).to(torch.float32) / 2**24  # 24 of the 53 bits: exact in fp32, below 1
    return (u[:, None] >= F.softmax(logits.float(), -1).cumsum(-1)[:, :-1]).sum(-1)


# ---- the environment ----


class SokobanEnv:
    """N boards that are played at once, by tensor operations alone.

    The contract: an environment for another game, which takes the place of this class here and in
    train_sokoban.py, offers

        SokobanEnv(levels, N, seed, device, order, first_board, time_limit)
        board    (N,) int64: the numbers of the boards, which start at first_board
        steps    (N,) int64: steps of the episode so far, 0 before its first
        total    (N,) fp32: sum of the episode's rewards so far
        observe()       observations (N, rows, columns, channels) uint8, for an agent whose
                        AgentConfig (convlstm.py) has their board_size and planes
        move(action)    plays actions (N,) int64, 0..3, resets nothing, and returns the rewards
                        fp32, whether the episode is done and whether it is solved, bool, (N,) each;
                        an evaluation moves on after the end of an episode, and ignores the results
        reset(mask)     starts the next episode on the boards where mask (N,) bool is true
        restart(seed)   starts all boards again, with the random levels of a seed; with a mask (N,)
                        bool, only those where it is true
        state_dict(), load_state_dict(state)    all that a resumed run needs, tensors (N, ...)

    play_sokoban.py draws the first two channels, which must be those of levels.py, and
    sokoban_gym.py declares these alone.

    levels: packed levels (n, 17). order: with 'random' a board whose episode has ended samples its
    next level from all levels, with replacement; with 'sequence' board i plays the levels i, i + N,
    i + 2N, ... first_board: the number of the first board, where other ranks have boards of the
    same run. time_limit: steps after which an episode ends unsolved.

    All state is in tensors that are changed in place and never read by the CPU, so that a CUDA
    graph can capture a step.
    """

    STATE = ('grid', 'agent', 'steps', 'total', 'episode')  # what state_dict() holds

    def __init__(
        self,
        levels: ndarray,
        N: int,
        seed: int = 0,
        device: str = 'cpu',
        order: str = 'random',
        first_board: int = 0,
        time_limit: int = TIME_LIMIT,
    ):
        if order not in ('random', 'sequence'):
            raise ValueError(f"order = {order!r}: expected 'random' or 'sequence'")
        self.N, self.order, self.time_limit = N, order, time_limit
        codes = torch.from_numpy(unpack(levels)).to(device)  # (n, 100)
        self.grids = codes & (WALL | TARGET | BOX)
        self.agents = (codes >= PLAYER).int().argmax(1)  # cells (n,)
        # for each action the change of the agent's cell and of the next two in its direction
        self.ahead = torch.from_numpy(AHEAD).to(device)  # (4, 3)
        self.cell = torch.arange(CELLS, device=device)
        self.board = torch.arange(first_board, first_board + N, device=device)
        self.grid = torch.zeros(N, CELLS, dtype=torch.uint8, device=device)  # without the agent
        self.agent = torch.zeros_like(self.board)  # its cell
        self.steps = torch.zeros_like(self.board)
        self.total = torch.zeros(N, device=device)
        self.episode = torch.zeros_like(self.board)  # number of episodes that have started
        self.restart(seed)

    def restart(self, seed: int, mask: Tensor | None = None) -> None:
        """Start all boards again, or those where `mask` (N,) bool is true, with the random levels
        of another seed."""
        keys = board_keys(seed, LEVEL_STREAM, self.board)
        if mask is None:
            self.keys, mask = keys, torch.ones_like(keys, dtype=torch.bool)
        self.keys = torch.where(mask, keys, self.keys)
        self.episode.masked_fill_(mask, 0)
        self.reset(mask)

    def reset(self, mask: Tensor) -> None:
        """Start the next level on the boards where `mask` (N,) bool is true."""
        number = self.board + self.episode * self.N
        if self.order == 'random':
            number = random_bits(self.keys, self.episode)
        level = number % len(self.grids)
        self.grid.copy_(torch.where(mask[:, None], self.grids[level], self.grid))
        self.agent.copy_(torch.where(mask, self.agents[level], self.agent))
        self.steps.masked_fill_(mask, 0)
        self.total.masked_fill_(mask, 0)
        self.episode.add_(mask)

    def move(self, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Play actions (N,) int64, 0..3; return reward fp32, done bool and solved bool, (N,) each.
        No board is reset."""
        # the agent's cell and two in front of it; beyond a wall, any cell
        cells = (self.agent[:, None] + self.ahead[action]).clamp(0, CELLS - 1)  # (N, 3)
        near, far = self.grid.gather(1, cells[:, 1:]).unbind(1)  # (N,) each
        can_push = far & (WALL | BOX) == 0
        moves = (near & WALL == 0) & ((near & BOX == 0) | can_push)
        box = torch.where(moves, near & BOX, 0)  # BOX where one is pushed
        self.grid.scatter_(1, cells[:, 1:], torch.stack([near - box, far + box], 1))
        self.agent.copy_(torch.where(moves, cells[:, 1], self.agent))
        self.steps.add_(1)
        solved = ~(self.grid == BOX).any(1)  # no box is off a target
        done = solved | (self.steps >= self.time_limit)
        on_target, was_on_target = (box > 0) & (far & TARGET > 0), (box > 0) & (near & TARGET > 0)
        reward = on_target.float() - was_on_target.float() + 10.0 * solved - 0.1
        self.total.add_(reward)
        return reward, done, solved

    def observe(self) -> Tensor:
        """Return the boards (N, 10, 10, 2) uint8 in the form of levels.py."""
        variable = (self.grid & BOX).masked_fill_(self.cell == self.agent[:, None], AGENT)
        return torch.stack([variable, self.grid & (WALL | TARGET)], -1).view(self.N, SIZE, SIZE, 2)

    def state_dict(self) -> dict[str, Tensor]:
        return {name: getattr(self, name).clone() for name in self.STATE}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name in self.STATE:
            fill(getattr(self, name), state[name])


class JumanjiEnv(SokobanEnv):
    """The same boards, moved and rewarded by Jumanji's own Sokoban-v0.

    Raises UserError if a level has fewer than four boxes. jumanji and jax are imported nowhere
    else, and the jax that requirements.txt pins runs on the CPU."""

    def __init__(self, *args: object, **options: object):
        super().__init__(*args, **options)
        if ((self.grids & BOX) > 0).sum(1).min() < 4:
            raise UserError("env = 'jumanji' needs levels with 4 boxes, and some have fewer")
        import jax
        from jumanji.environments import Sokoban
        from jumanji.environments.routing.sokoban import generator, types

        # this generator is never called; others download their levels when they are created
        game = Sokoban(generator.ToyGenerator(), time_limit=self.time_limit)
        self.JumanjiState = types.State
        self.play = jax.jit(jax.vmap(game.step))

    def move(self, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Convert the boards to Jumanji's state, play its step and convert the result back."""
        board = self.observe().cpu().numpy()
        agent = self.agent.cpu().numpy().astype(np.int32)
        before = self.JumanjiState(
            key=np.zeros((self.N, 2), np.uint32),
            variable_grid=board[..., 0],
            fixed_grid=board[..., 1],
            agent_location=np.stack(np.divmod(agent, SIZE), 1),
            step_count=self.steps.cpu().numpy().astype(np.int32),
        )
        _, after = self.play(before, action.cpu().numpy().astype(np.int32))
        grid, steps = after.observation.grid, after.observation.step_count
        results = (grid, steps, after.reward, after.last(), after.extras['solved'])
        grid, steps, reward, done, solved = (
            torch.from_numpy(np.array(x)).to(action.device) for x in results
        )
        variable, fixed = grid.flatten(1, 2).unbind(-1)
        self.grid.copy_(fixed | (variable & BOX))
        self.agent.copy_((variable == AGENT).int().argmax(1))
        self.steps.copy_(steps)
        self.total.add_(reward)
        return reward, done, solved


def replay(levels: ndarray, actions: ndarray) -> ndarray:
    """Return the observations (n, T + 1, 10, 10, 2) before, between and after actions (n, T).

    No board is reset: the last observation of an episode shows its end.
    """
    env = SokobanEnv(levels, len(levels), order='sequence')
    boards = [env.observe().numpy()]
    for action in actions.T:
        env.move(torch.from_numpy(action.astype(np.int64)))
        boards.append(env.observe().numpy())
    return np.stack(boards, 1)


# ---- evaluation ----
#
# A policy has three methods, like convlstm.Agent:
#
#     weights = policy.prepare()                 # once per batch of levels
#     state = policy.init_state(N)               # the state of N boards before their first step
#     logits, value, state = policy.act(weights, obs, start, state)
#
# with obs (N, 10, 10, 2) uint8, start (N,) bool, true where an episode starts, and logits (N, 4).


@torch.no_grad()
def run_episodes(
    policy: object,
    levels: ndarray,
    device: str,
    seed: int | None = None,
    first_level: int = 0,
    time_limit: int = TIME_LIMIT,
) -> dict[str, Tensor]:
    """Play each of the packed levels (n, 17) once, for at most `time_limit` steps.

    Actions are greedy, or sampled if a seed is given. `first_level` is the number of levels[0] in
    the whole evaluation, so that ranks that share the levels sample the same actions as one
    process does.

    Returns on the CPU: solved (n,) bool, return and steps (n,) fp32, and actions (n, time_limit)
    int8, 0 after the end of an episode.
    """
    n = len(levels)
    N = min(EVALUATION_BATCH, n)
    batches = []
    is_due = Throttle()
    for first in range(0, n, N):
        # the last batch wraps around to a full one, so that every batch has the same shape
        played = levels.take(range(first, first + N), axis=0, mode='wrap')
        env = SokobanEnv(played, N, device=device, order='sequence', time_limit=time_limit)
        keys = board_keys(seed or 0, EVALUATION_STREAM, env.board + first_level + first)
        weights, state = policy.prepare(), policy.init_state(N)
        alive = torch.ones(N, dtype=torch.bool, device=device)  # episodes that have not ended
        won = ~alive
        returns, steps = torch.zeros(2, N, device=device)
        actions = torch.zeros(N, time_limit, dtype=torch.int8, device=device)
        for t in range(time_limit):
            start = env.steps == 0
            logits, _, state = policy.act(weights, env.observe(), start, state)
            action = logits.argmax(-1)
            if seed is not None:
                action = sample_actions(logits, random_bits(keys, env.steps))
            actions[:, t] = action * alive
            reward, done, solved = env.move(action)
            returns += torch.where(alive, reward, 0)
            steps += alive
            won |= solved & alive
            alive &= ~done
            if is_due():
                now = f'step {t + 1} of the next {min(N, n - first)}'
                print0(f'    {first:,} of {n:,} levels evaluated; {now}')
            if not alive.any():
                break
        results = {'solved': won, 'return': returns, 'steps': steps, 'actions': actions}
        batches.append({name: x[: n - first].cpu() for name, x in results.items()})
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


def evaluate(
    policy: object,
    levels: ndarray,
    device: str,
    seed: int | None = None,
    time_limit: int = TIME_LIMIT,
) -> dict[str, float]:
    """Return the means 'solve_rate', 'return' and 'steps' over all packed levels (n, 17), at most
    time_limit steps each. seed None: greedy actions. Each rank plays a share of the levels.

    The solve rates of all evaluations come from run_episodes, most of them through here."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    shard = np.array_split(np.arange(len(levels)), world)[rank]
    totals = torch.zeros(3, dtype=torch.float64)  # on the CPU: MPS has no float64
    if len(shard):  # there may be fewer levels than ranks
        results = run_episodes(policy, levels[shard], device, seed, int(shard[0]), time_limit)
        totals = torch.stack([results[k].double().sum() for k in ('solved', 'return', 'steps')])
    if world > 1:
        dist.all_reduce(totals)
    means = (totals / len(levels)).tolist()
    return dict(zip(('solve_rate', 'return', 'steps'), means, strict=True))


class StatelessPolicy:
    """A policy without state: a function from observations (N, 10, 10, 2) to logits (N, 4)."""

    def __init__(self, logits: Callable[[Tensor], Tensor]):
        self.logits = logits

    def prepare(self) -> tuple:
        return ()

    def init_state(self, N: int) -> tuple:
        return ()

    def act(self, weights: tuple, obs: Tensor, start: Tensor, state: tuple) -> tuple:
        return self.logits(obs), None, state


# equal logits: a random policy if its actions are sampled
RANDOM = StatelessPolicy(lambda obs: torch.zeros(len(obs), 4, device=obs.device))


def load_policy(name: str) -> StatelessPolicy:
    """Return the policy of `module:function`, a function from observations (N, 10, 10, 2) uint8 to
    actions (N,), both numpy arrays.

    Raises UserError if there is no such function, or later if it returns anything but N actions
    from 0 to 3."""
    sys.path.append(os.getcwd())
    try:
        choose_actions = pkgutil.resolve_name(name)
        if not callable(choose_actions):
            raise TypeError('it is no function')
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        reason = first_line(error)
        raise UserError(f'policy = {name!r}: expected module:function ({reason})') from None

    def logits(obs: Tensor) -> Tensor:
        actions = check_actions(choose_actions(obs.cpu().numpy()), len(obs), f'policy = {name!r}')
        return F.one_hot(torch.from_numpy(actions), 4).to(obs.device)

    return StatelessPolicy(logits)


def check_actions(actions: object, N: int, source: str, ignored: ndarray | bool = False) -> ndarray:
    """Return actions as an array (N,) int64, 0 where `ignored` (N,) bool. Raises UserError, naming
    the source and the first wrong action, unless there are N integers, and those not ignored are
    0 to 3."""
    expected = f'{source}: expected integers from 0 to 3 of shape ({N},)'
    try:
        found = np.asarray(actions)
    except (TypeError, ValueError) as error:  # rows of several lengths, a tensor on a GPU
        raise UserError(f'{expected}: {first_line(error)}') from None
    if found.dtype.kind not in 'iu' or found.shape != (N,):
        raise UserError(f'{expected}, found {found.dtype} of shape {found.shape}')
    found = np.where(ignored, 0, found)
    wrong = np.flatnonzero((found < 0) | (found > 3))
    if wrong.size:
        raise UserError(f'{expected}, found {found[wrong[0]]} at index {wrong[0]}')
    return found.astype(np.int64)


class FeatureRecorder:
    """Several agents (convlstm.Agent) as one policy: all see the same boards, the first one acts.

    `features` collects s[L] at every step, the agents' channels side by side: (N, 10, 10, C) fp16.
    """

    def __init__(self, *agents: object):
        self.agents = agents
        self.features = []

    def prepare(self) -> list:
        return [agent.prepare() for agent in self.agents]

    def init_state(self, N: int) -> list:
        return [agent.init_state(N) for agent in self.agents]

    def act(self, weights: list, obs: Tensor, start: Tensor, states: list) -> tuple:
        outputs = [
            agent.encode_and_step(w, obs, start, state)
            for agent, w, state in zip(self.agents, weights, states, strict=True)
        ]
        features = [s for s, _ in outputs]
        self.features.append(torch.cat(features, -1).to(torch.float16).cpu())
        return self.agents[0].head(features[0])[0], None, [state for _, state in outputs]

"""Train a Sokoban agent, a ConvLSTM or ConvGLU actor-critic, by advantage actor-critic (A2C) with
generalized advantage estimation.

# a small agent on easy levels: minutes on a CPU, then a learning curve and two GIFs
$ make demo-sokoban
# the paper's small budget, L = 4: train, resume after a crash or ctrl-C, evaluate on test levels
$ python train_sokoban.py config/sokoban_small_L4.py --download=True
$ python train_sokoban.py config/sokoban_small_L4.py --resume=True
$ python train_sokoban.py config/sokoban_small_L4.py --eval_only=True --levels=unfiltered-test
# four GPUs, which share the boards; true float32, without TF32
$ torchrun --standalone --nproc_per_node=4 train_sokoban.py config/sokoban_small_L4.py
$ python train_sokoban.py config/sokoban_small_L4.py --dtype=float32

A run writes config.json, log.jsonl and ckpt_*.pt into out_dir; eval_only writes eval_*.json and
eval_*.gif. On a CPU a resumed run is bit-equal to one that was never stopped. The levels and random
numbers of a board do not depend on the number of ranks.

Shapes: B boards of this rank, T steps of an unroll.
"""

import copy
import math
import os
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from datetime import timedelta

from configurator import (
    Mistake,
    Settings,
    configure,
    every,
    read_script,
    run_script,
    setup_process,
)

if __name__ == '__main__':
    setup_process()  # before torch is imported

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

import common
import figures
from common import CheckpointError, Gradients, fill, gather, open_trackers, print0, restoring
from convlstm import CELLS, Agent, AgentConfig, State, build_agent, load_agent, set_precision
from kernels import fused, graphed
from sokoban import (
    ACTION_STREAM,
    RANDOM,
    JumanjiEnv,
    SokobanEnv,
    board_keys,
    evaluate,
    load_level_sets,
    random_bits,
    sample_actions,
    write_evaluation,
)

# -----------------------------------------------------------------------------
# fmt: off
# I/O
out_dir = 'out/sokoban'        # everything that a run writes goes here
init_from = ''                 # start from the weights in this folder, of a run or an export; a
                               # resumed run keeps its own
resume = False                 # continue from the last checkpoint in out_dir
overwrite = False              # replace the run in out_dir
eval_interval = 1000           # updates between evaluations and checkpoints (640,000 steps)
log_interval = 50              # updates between printed lines and lines in log.jsonl (32,000 steps)
eval_only = False              # evaluate the last checkpoint in out_dir and stop
levels = ''                    # with eval_only: a split or a file; '' = the eval_split of the run
best = False                   # with eval_only: the best checkpoint (if any) instead of the last
plot = False                   # draw out_dir/curve.png at the end (matplotlib)
tensorboard = False            # also write TensorBoard files into out_dir
wandb = False                  # also log to Weights & Biases
wandb_project = 'parallel-experts'  # name of the Weights & Biases project
# levels and environment
levels_dir = ''                # folder of Boxoban's levels, as text or packed; '' = data/boxoban
split = 'unfiltered-train'     # training levels; 'generated' = from our generator
eval_split = 'unfiltered-valid'   # evaluation levels; if generated, none is a training level
eval_games = 512               # number of evaluation levels, the first of eval_split
download = False               # download the splits into levels_dir if they are missing
n_levels = 100000              # generator: number of training levels
n_boxes = 4                    # generator: boxes, 1 to 4; fewer are easier
max_moves = 120                # generator: most moves of the known solution; fewer are easier
env = 'torch'                  # 'torch', or 'jumanji' (the original; slower, for checking)
n_envs = 32                    # boards, over all ranks
time_limit = 120               # most steps of an episode, in training and evaluation
# model (convlstm.py has the equations)
arch = 'convlstm'              # 'convlstm' or 'convglu'
recurrent = True               # False = no state is carried to the next step
n_layer = 4                    # L, layers
n_expert = 1                   # E, experts per layer
n_embd = 64                    # D, channels of an expert
aggregation = 'sqrt_sum'       # 'sqrt_sum', 'mean', 'softmax_mean' or 'softmax_l2'
router_dim = 64                # width of the router's queries and keys (softmax aggregations)
radius = -1                    # convlstm: preceding experts, on a ring, that each reads; -1 = all
residual = 'expert'            # convglu: 'expert' (one per expert, the paper's rule) or 'shared'
head_dim = 256                 # width of the head's dense layer; not given in the paper
# A2C (the paper's values)
total_steps = 50000000         # environment steps, over all boards
unroll = 20                    # T, steps per update and board
gamma = 0.97                   # discount factor
gae_lambda = 0.97              # lambda of generalized advantage estimation
entropy_coef = 0.01            # weight of the policy's entropy in the loss
value_coef = 1.0               # weight of the value's mean squared error
learning_rate = 4e-4           # Adam; annealed linearly to 0
adam_eps = 1e-6                # Adam; small, because gradients are small
grad_clip = 1.0                # largest global norm of the gradients; 0 = no clipping
# system
reuse = True                   # backpropagate through the rollout; False = run a second forward
seed = 1337                    # of weights, levels and actions
device = 'auto'                # 'auto' (cuda if there is one), 'cpu', 'cuda' or 'cuda:1'
dtype = 'auto'                 # of convolutions: 'float32' (true fp32, no TF32), 'bfloat16', or
                               # 'auto' (bfloat16 where it is fast); encoder and head are fp32, or
                               # TF32 on a GPU unless dtype = 'float32'
compile = True                 # compile what lies between convolutions, if torch.compile works
graphs = True                  # on a GPU: replay each update as CUDA graphs, from the fourth on
mode = 'fast'                  # 'fast', or 'plain' (weight gradients by autograd, for checking)
threads = 0                    # CPU threads; 0 = one or all, whichever is faster at the start; a
                               # resumed run keeps the number
# fmt: on
# -----------------------------------------------------------------------------
AT_LEAST_1 = 'eval_interval log_interval eval_games n_levels n_envs total_steps unroll'
AT_LEAST_0 = 'entropy_coef value_coef learning_rate adam_eps grad_clip seed'
RANGES = {
    **dict.fromkeys(AT_LEAST_1.split(), (1, math.inf)),
    **dict.fromkeys(AT_LEAST_0.split(), (0, math.inf)),
    'gamma': (0, 1),
    'gae_lambda': (0, 1),
    'env': ['torch', 'jumanji'],
    'mode': ['fast', 'plain'],
    'time_limit': (1, 10000),  # an evaluation keeps all actions of its episodes
    'threads': (0, 1024),  # OpenMP fails beyond
}
RENAMED = {'path': 'mode'}  # old name: new name
# A resumed run may change these settings, and no other.
HARMLESS = """out_dir init_from resume overwrite eval_interval log_interval eval_only levels best
    plot tensorboard wandb wandb_project levels_dir eval_split eval_games download total_steps gamma
    gae_lambda entropy_coef value_coef learning_rate adam_eps grad_clip reuse device dtype compile
    graphs mode threads""".split()
SCRIPT = os.path.basename(__file__)  # named in messages; a copy of this file has another name
# Fields of a Run that checkpoints keep.
POSITION = ('step', 'seconds', 'logged', 'clock', 'recent', 'since', 'sums')
STATS = ('loss', 'policy_loss', 'value_loss', 'entropy')
MOMENTS = ('target_mean', 'target_square', 'advantage_mean', 'advantage_square')
EXTRA = (*STATS, *MOMENTS, 'stop')  # numbers that are summed over the ranks with the gradients


@dataclass
class Run:
    """Training state. Tensors keep their addresses, because CUDA graphs read and write them in
    place."""

    config: Settings  # all settings, as checkpoints keep them
    rank: int
    world: int
    device: str  # 'cpu', 'mps' or 'cuda:N'
    env: SokobanEnv | JumanjiEnv  # the B boards of this rank
    levels_crc: int  # checksum of the training levels
    eval_levels: np.ndarray  # (n, 17)
    model: Agent
    optimizer: torch.optim.Optimizer
    gradients: Gradients  # `extra` holds the numbers EXTRA
    state: State  # of the agent, (B, ...) each
    keys: torch.Tensor  # (B,) keys of the random numbers for actions
    count: torch.Tensor  # () steps that every board has taken
    graphs: dict | None  # CUDA graphs by name; None = run eagerly
    updates: int  # of the whole run
    step: int = 0  # updates done
    record: dict = field(default_factory=lambda: {'step': 0, 'env_steps': 0})  # current log line
    must_evaluate: bool = True  # before the next update
    best_return: float = -math.inf  # highest mean return on the evaluation levels
    seconds: float = 0.0  # time spent in updates
    logged: int = 0  # `step` at the last log line
    clock: float = 0.0  # `seconds` at the last log line
    recent: list = field(default_factory=list)  # (return, solved) of the last 1,000 episodes
    since: list = field(default_factory=list)  # (return, solved) of those after the last log line
    sums: dict = field(default_factory=dict)  # statistics, summed over the updates after that line
    unread: list = field(default_factory=list)  # episodes (T, 3, B) per update, on the device
    lock: object = None  # of out_dir

    @property
    def env_steps(self) -> int:
        """Return the number of environment steps taken, over all boards."""
        return self.step * n_envs * unroll


# ---- settings ----


def check_settings(world: int) -> None:
    """Raise Mistake for settings that do not fit together."""
    if levels or best:
        raise Mistake('levels and best are settings of --eval_only=True; a run trains on split')
    if n_envs % world:
        raise Mistake(f'n_envs = {n_envs}: must be a multiple of the {world} ranks')
    if download and world > 1:
        raise Mistake('download = True: with several ranks, run sokoban.py --download=True first')
    common.need_packages(matplotlib=plot, tensorboard=tensorboard, wandb=wandb)


def fused_on_gpu(run: Run, f: Callable) -> Callable:
    """Return f, fused on a GPU, where the number of kernels decides the time of a step. A CPU gains
    nothing from compiling the game and the loss, and Jumanji's game cannot be compiled."""
    return fused(f) if run.device != 'cpu' and env == 'torch' else f


# ---- rollout ----


def play_step(
    boards: SokobanEnv | JumanjiEnv, action: torch.Tensor
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Take actions (B,) and reset the boards that are done. Return the results of the step, (B,)
    each, and the next observations (B, 10, 10, 2). 'return' is the sum of the rewards of the
    episode so far."""
    reward, done, solved = boards.move(action)
    step = {'action': action, 'reward': reward, 'done': done, 'solved': solved}
    step['return'] = boards.total.clone()
    boards.reset(done)
    return step, boards.observe()


def rollout(run: Run, actions: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """Take T = `unroll` steps on all boards. actions: (T, B), to take instead of sampled ones.

    Return a batch, (T, B, ...) each: 'obs' and 'start' (an episode starts) are the inputs of the
    agent, 'logits' and 'value' its outputs, and 'action', 'reward', 'done', 'solved' and 'return'
    the results of `play_step`. Besides, 'last' (B,) is the value of the observation after step T,
    and 'state' the agent's state there. With `reuse`, logits and values keep their autograd graph,
    and the loss is computed from them."""
    play = fused_on_gpu(run, play_step)
    sample = fused_on_gpu(run, sample_actions)
    counts = run.count + torch.arange(unroll, device=run.device)[:, None]  # (T, 1)
    rng = random_bits(run.keys, counts)  # (T, B)
    run.count += unroll
    steps = []
    with torch.set_grad_enabled(reuse):
        w = run.model.prepare()
        state = run.state
        obs, start = run.env.observe(), run.env.steps == 0
        for t in range(unroll):
            logits, value, state = run.model.act(w, obs, start, state)
            action = sample(logits.detach(), rng[t]) if actions is None else actions[t]
            step, next_obs = play(run.env, action)
            steps.append({'obs': obs, 'start': start, 'logits': logits, 'value': value, **step})
            obs, start = next_obs, step['done']
        with torch.no_grad():
            _, last, _ = run.model.act(w, obs, start, state)
    batch = {name: torch.stack([step[name] for step in steps]) for name in steps[0]}
    return {**batch, 'last': last, 'state': tuple(x.detach() for x in state)}


# ---- loss ----


def gae(
    reward: torch.Tensor, done: torch.Tensor, value: torch.Tensor, last: torch.Tensor
) -> torch.Tensor:
    """Return generalized advantage estimates (T, B): the sum over k of (gamma lambda)^k delta_{t+k}
    up to the end of the episode, with delta_t = r_t + gamma V_{t+1} - V_t (Schulman et al. 2016,
    Eq. 16).

    reward, done, value: (T, B). last: (B,), the value after step T. No value is carried over the
    end of an episode, not even at the time limit, where Jumanji's discount is 0 as well."""
    not_done = 1 - done.to(value.dtype)
    next_value = torch.cat([value[1:], last[None]])
    delta = reward + gamma * not_done * next_value - value
    decay = gamma * gae_lambda * not_done
    advantage = torch.zeros_like(last)
    advantages = []
    for t in reversed(range(len(reward))):
        advantage = delta[t] + decay[t] * advantage
        advantages.append(advantage)
    return torch.stack(advantages[::-1])


def backward(run: Run, batch: dict[str, torch.Tensor]) -> None:
    """Add this rank's share of the gradients of the A2C loss to run.gradients. Write its share of
    the statistics to run.gradients.extra: STATS, and MOMENTS for the explained variance."""
    if reuse:
        logits, value = batch['logits'], batch['value']  # (T, B, 4), (T, B)
    else:
        logits, value, _ = run.model(batch['obs'], batch['start'], run.state)
    estimate = fused_on_gpu(run, gae)
    advantage = estimate(batch['reward'], batch['done'], value.detach(), batch['last'])  # (T, B)
    target = advantage + value.detach()
    log_pi = F.log_softmax(logits.float(), -1)  # (T, B, 4)
    chosen = log_pi.gather(-1, batch['action'][..., None]).squeeze(-1)  # (T, B)
    policy_loss = -(chosen * advantage).mean()
    entropy = -(log_pi.exp() * log_pi).sum(-1).mean()
    value_loss = (value - target).square().mean()
    loss = policy_loss + value_coef * value_loss - entropy_coef * entropy
    (loss / run.world).backward()
    moments = [target.mean(), target.square().mean(), advantage.mean(), advantage.square().mean()]
    stats = torch.stack([loss, policy_loss, value_loss, entropy, *moments]).detach()
    run.gradients.extra[:-1] = stats / run.world  # all but 'stop'


# ---- an update ----


def rollout_and_backward(run: Run, actions: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """Run one rollout and its backward, the first CUDA graph of an update; return the batch."""
    run.gradients.zero()
    batch = rollout(run, actions)
    backward(run, batch)
    # Only now, because without `reuse` the backward starts from the state before the rollout.
    for carried, new in zip(run.state, batch['state'], strict=True):
        carried.copy_(new)
    return batch


def optimizer_step(run: Run) -> torch.Tensor:
    """Clip the gradients and run Adam, the second CUDA graph; return the gradients' norm."""
    norm = torch.nn.utils.clip_grad_norm_(run.model.parameters(), grad_clip or math.inf)
    run.optimizer.step()
    return norm


def lr_at(run: Run, step: int) -> float:
    """Return the learning rate of the update after `step` updates. It falls linearly to 0."""
    return learning_rate * (1 - step / run.updates)


def update(run: Run, stop: bool) -> tuple[dict[str, float], torch.Tensor, bool]:
    """Run one rollout and one optimizer step. Return the statistics of the update, its episodes,
    and whether to stop.

    stop: whether this rank was asked to stop; all ranks stop if one was. Episodes are (T, 3, B), on
    the device: the return so far, whether the episode ended, and whether it was solved."""
    for group in run.optimizer.param_groups:
        group['lr'].fill_(lr_at(run, run.step))
    batch = graphed(run.graphs, 'rollout and backward', rollout_and_backward, run)
    run.gradients.extra[-1] = stop
    run.gradients.sum_over_ranks()
    norm = graphed(run.graphs, 'optimizer', optimizer_step, run)
    episodes = torch.stack([batch['return'], batch['done'].float(), batch['solved'].float()], 1)
    values = torch.cat([run.gradients.extra, norm[None]]).tolist()  # the only wait for the device
    numbers = dict(zip((*EXTRA, 'grad_norm'), values, strict=True))
    variance = numbers['target_square'] - numbers['target_mean'] ** 2  # of the targets
    # an advantage is target - value
    unexplained = numbers['advantage_square'] - numbers['advantage_mean'] ** 2
    stats = {name: numbers[name] for name in (*STATS, 'grad_norm')}
    stats['explained_variance'] = 1 - unexplained / variance if variance > 0 else 0.0
    return stats, episodes, numbers['stop'] > 0


# ---- log ----


def keep_for_log(run: Run, episodes: torch.Tensor, stats: dict[str, float]) -> None:
    """Keep the statistics and the episodes (T, 3, B) of an update for the log. The episodes stay on
    the device."""
    for name, x in stats.items():
        run.sums[name] = run.sums.get(name, 0.0) + x
    run.unread.append(episodes)


def read_episodes(run: Run) -> None:
    """Read the episodes of `keep_for_log` from the devices of all ranks. On rank 0, add those
    that have ended to run.since and run.recent."""
    if not run.unread:
        return
    episodes = gather(torch.cat(run.unread), 2)  # (steps, 3, n_envs)
    run.unread = []
    if run.rank == 0:
        returns, done, solved = episodes.unbind(1)
        ended = done > 0
        new = list(zip(returns[ended].tolist(), solved[ended].tolist(), strict=True))
        run.since += new
        run.recent = (run.recent + new)[-1000:]


def make_record(run: Run) -> dict:
    """Return a log line: means since the last line, and over the last 100 and 1,000 episodes.

    Returns and solve rates are None until every board has ended an episode, at the time limit at
    the latest. Before that they would be too high, because solved episodes are the first to end."""
    read_episodes(run)
    updates = run.step - run.logged
    elapsed = run.seconds - run.clock
    every_board_ended = run.step * unroll >= time_limit

    def mean(episodes: list[tuple[float, float]], k: int) -> float | None:
        """Return the mean return (k = 0) or the solve rate (k = 1)."""
        if not (episodes and every_board_ended):
            return None
        return sum(episode[k] for episode in episodes) / len(episodes)

    record = {
        'step': run.step,
        'env_steps': run.env_steps,
        'episodes': len(run.since),
        'episodic_return': mean(run.since, 0),
        'return_100': mean(run.recent[-100:], 0),
        'return_1000': mean(run.recent, 0),
        'solve_rate_100': mean(run.recent[-100:], 1),
        'solve_rate_1000': mean(run.recent, 1),
        **{name: x / updates for name, x in run.sums.items()},
        'lr': lr_at(run, run.step - 1),  # of the last update
        'env_steps_per_s': updates * n_envs * unroll / elapsed,
        'seconds': run.seconds,
    }
    run.since = []
    run.sums = {}
    run.logged = run.step
    run.clock = run.seconds
    return record


def progress_line(record: dict) -> str:
    """Return the line that is printed for a log record. Returns and solve rates are those of the
    last 100 and, in parentheses, 1,000 episodes."""
    seconds_left = max(0, total_steps - record['env_steps']) / record['env_steps_per_s']

    def show(name: str, form: str) -> str:
        return 'n/a' if record[name] is None else format(record[name], form)

    return (
        f'{record["env_steps"]:,}/{total_steps:,} | '
        f'return {show("return_100", ".2f")} ({show("return_1000", ".2f")}) | '
        f'solved {show("solve_rate_100", ".1%")} ({show("solve_rate_1000", ".1%")}) | '
        f'entropy {record["entropy"]:.3f} | value loss {record["value_loss"]:.3f} | '
        f'expl. var. {record["explained_variance"]:.2f} | norm {record["grad_norm"]:.2f} | '
        f'{record["env_steps_per_s"]:,.0f} steps/s | eta {timedelta(seconds=int(seconds_left))}'
    )


# ---- evaluation ----


def evaluate_and_save_best(run: Run) -> None:
    """Evaluate the agent, add the result to the log record, and save the best checkpoint if the
    mean return is the highest so far. Before the first update, also evaluate a random policy."""
    policies = [('eval', 'greedy', run.model, None)]
    if run.step == 0:
        policies.append(('random', 'a random policy', RANDOM, seed))
    for name, label, policy, policy_seed in policies:
        result = evaluate(policy, run.eval_levels, run.device, policy_seed, time_limit=time_limit)
        run.record |= {f'{name}_{key}': x for key, x in result.items()}
        print0(
            f'evaluation levels, {label}: solved {result["solve_rate"]:.1%}, '
            f'return {result["return"]:.2f}, {result["steps"]:.0f} steps'
        )
    if run.step > 0 and run.record['eval_return'] > run.best_return:
        run.best_return = run.record['eval_return']
        save(run, is_best=True)


def evaluate_only(config: Settings) -> None:
    """Evaluate the last or the best checkpoint in out_dir; write the result and two GIFs."""
    if int(os.environ.get('WORLD_SIZE', 1)) > 1:
        raise Mistake('eval_only runs in one process: start it with python, not torchrun')
    device_ = common.pick_device(device, threads)
    common.need_packages(PIL=True, tensorboard=tensorboard, wandb=wandb)
    # the dtype, and below the settings of the levels, are those of the run if the user sets none
    dtype_ = dtype if 'dtype' in config.set_by_user else ''
    model, saved, path = load_agent(out_dir, 'best' if best else 'last', device_, dtype_)
    names = 'eval_split eval_games n_boxes max_moves seed levels_dir time_limit'.split()
    from_run = {n: saved[n] for n in names if n in saved and n not in config.set_by_user}
    level_settings = {**config, **from_run}
    if levels:
        level_settings['eval_split'] = levels
    _, (eval_levels, line) = load_level_sets(level_settings, run=saved, whole_split=levels != '')
    name = level_settings['eval_split']
    limit = level_settings['time_limit']
    about = {
        'step': saved['step'],
        'env_steps': saved['step'] * saved['n_envs'] * saved['unroll'],
        'checkpoint': path,
        'levels': line,
        'time_limit': limit,
    }
    record = write_evaluation(model, eval_levels, name, device_, out_dir, about, time_limit=limit)
    print(
        f'{path}, {record["env_steps"]:,} steps: solved {record["solve_rate"]:.1%} of '
        f'{record["n"]:,} levels ({line}), mean return {record["mean_return"]:.2f}, '
        f'{record["mean_steps"]:.0f} steps; more in {out_dir}/eval_*.json and eval_*.gif'
    )
    track, close = open_trackers(config, tensorboard, wandb_project if wandb else '')
    track(record)
    close()


# ---- CPU threads and compilation, by trial ----


def choose_threads(run: Run) -> None:
    """Set the number of CPU threads by common.pick_threads, which measures without compilation,
    because the shapes differ from those of training."""

    def chunk(T: int) -> None:
        w = run.model.prepare()
        state = run.state
        obs, start = run.env.observe(), run.env.steps == 0
        total = 0
        for _ in range(T):
            logits, value, state = run.model.act(w, obs, start, state)
            total = total + logits.sum() + value.sum()
        total.backward()

    fused.enabled = False
    run.config['threads'] = common.pick_threads(run.config['threads'], run.device, chunk, unroll)
    run.gradients.zero()


def warm_up(run: Run) -> None:
    """Compile before time is measured, if compilation works: run a rollout and its backward on
    copies of everything that they change."""
    fused.enabled = compile and mode == 'fast'
    if fused.enabled:
        trial = copy.copy(run)
        trial.env = copy.deepcopy(run.env)
        trial.state = tuple(x.clone() for x in run.state)
        trial.count = run.count.clone()
        fused.enabled = common.compiles(run.model, lambda: rollout_and_backward(trial))


# ---- checkpoints ----


def save(run: Run, is_best: bool = False) -> None:
    """Save the last checkpoint, from which a run resumes, or the best one, for evaluation."""
    read_episodes(run)  # into run.since and run.recent, which are saved
    parts = {name: getattr(run, name) for name in POSITION}
    parts['script'] = SCRIPT
    parts['best'] = run.best_return
    parts['eval_levels_crc'] = zlib.crc32(run.eval_levels)
    if not is_best:
        parts['env'] = {name: gather(x) for name, x in run.env.state_dict().items()}
        parts['state'] = [gather(x) for x in run.state]
        parts['levels_crc'] = run.levels_crc
    common.save_run(run, parts, None if is_best else [run.optimizer])


def load(run: Run) -> None:
    """Restore the last checkpoint in out_dir. Raises CheckpointError if it is damaged, or if the
    levels or a setting outside HARMLESS differ."""
    needed = ('model', *POSITION, 'best', 'optimizers', 'rng', 'env', 'state', 'levels_crc')
    saved, path = common.load_run(out_dir, SCRIPT, needed)
    defaults = read_script(__file__)[0]
    common.refuse_changes(saved['config'], run.config, defaults, HARMLESS, path, SCRIPT)
    common.restore(run, POSITION, [run.optimizer], saved, path)
    with restoring(path, 'best'):
        run.best_return = float(saved['best'])
    print0(f'{path}: update {run.step}, {run.env_steps:,} environment steps')
    if saved['levels_crc'] != run.levels_crc:
        advice = 'give the same levels_dir, or another out_dir'
        raise CheckpointError(f'{path}: was trained on other levels: {advice}')
    saved_config = {**defaults, **saved['config']}
    # The checkpoint was saved before the evaluation that followed its update, if one did.
    intervals = (saved_config['eval_interval'], eval_interval)
    saved_updates = math.ceil(saved_config['total_steps'] / (n_envs * unroll))
    at_the_end = run.step in (saved_updates, run.updates)
    run.must_evaluate = at_the_end or any(run.step % n == 0 for n in intervals)
    eval_levels_crc = zlib.crc32(run.eval_levels)
    if saved.get('eval_levels_crc', eval_levels_crc) != eval_levels_crc:
        print0(f'{path}: was evaluated on other levels: the next evaluation counts as the best')
        run.best_return = -math.inf
        run.must_evaluate = True
    with restoring(path, 'env or state'):
        boards = {name: x.chunk(run.world)[run.rank] for name, x in saved['env'].items()}
        run.env.load_state_dict(boards)
        for x, all_ranks in zip(run.state, saved['state'], strict=True):
            fill(x, all_ranks.chunk(run.world)[run.rank])
    run.count.fill_(run.step * unroll)


# ---- levels, environment, model, optimizer ----


def make_run(config: Settings) -> Run:
    """Return a run before its first update: with its levels, model and optimizer. Writes nothing
    but downloaded levels. Raises Mistake if settings, levels or weights cannot be used."""
    rank, world, device_ = common.join_ranks(device, threads)
    if device_ == 'cpu':
        common.keep_memory()
    if init_from or resume:  # a run that is resumed may have adopted its sizes
        names = [f.name for f in fields(AgentConfig) if f.name in config]
        names = [name for name in names if name not in ('dtype', 'mode')]
        source = out_dir if resume else init_from
        common.adopt_sizes(source, names, ('model',), config, globals())
    check_settings(world)
    # Shapes never change, so that the search for the fastest convolutions runs once.
    torch.backends.cudnn.benchmark = not torch.backends.cudnn.deterministic
    torch.manual_seed(seed)
    B = n_envs // world

    # model: a setting with the name of a field of AgentConfig sets that field
    sizes = {f.name: config[f.name] for f in fields(AgentConfig) if f.name in config}
    sizes['dtype'] = str(common.pick_dtype(dtype, device_)).removeprefix('torch.')
    agent_config = AgentConfig(**sizes)
    # four copies: weights, gradients and two moments
    common.check_model(build_agent, agent_config, copies=4, device=device_)
    kept = unroll * n_layer * n_expert  # outputs of experts that backward reads, at least
    activations = 4 * kept * B * CELLS * n_embd  # bytes
    common.check_fits(activations, f'n_envs = {n_envs} (unroll = {unroll})', device_)
    model = build_agent(agent_config)
    if init_from and not resume:
        common.init_from(model, init_from)
    model = model.to(device_)
    set_precision(model)

    # levels, and the boards of this rank
    (train_levels, train_line), (eval_levels, eval_line) = load_level_sets(config)
    print0(f'training: {train_line}\nevaluation: {eval_line}')
    env_type = JumanjiEnv if env == 'jumanji' else SokobanEnv
    boards = env_type(
        train_levels,
        B,
        seed=seed,
        device=device_,
        first_board=rank * B,
        time_limit=time_limit,
    )

    # optimizer: the learning rate is a tensor, because CUDA graphs read it at each replay
    optimizer = torch.optim.Adam(
        model.parameters(),
        lr=torch.tensor(learning_rate, device=device_),
        eps=adam_eps,
        fused=True,
        capturable=device_.startswith('cuda'),
    )
    # No warning: the first steps run uncaptured on purpose.
    optimizer._warned_capturable_if_run_uncaptured = True

    captures = graphs and device_.startswith('cuda') and env == 'torch'
    return Run(
        config=config,
        rank=rank,
        world=world,
        device=device_,
        env=boards,
        levels_crc=zlib.crc32(train_levels),
        eval_levels=eval_levels,
        model=model,
        optimizer=optimizer,
        # The first layer of a non-recurrent agent has empty weights.
        gradients=Gradients((p for p in model.parameters() if p.numel()), n_extra=len(EXTRA)),
        state=model.init_state(B),
        keys=board_keys(seed, ACTION_STREAM, boards.board),
        count=torch.zeros((), dtype=torch.int64, device=device_),
        graphs={} if captures else None,
        updates=math.ceil(total_steps / (n_envs * unroll)),
    )


# ---- the loop ----


def describe(run: Run) -> None:
    """Print the machine and the model."""
    counts = {**run.model.num_params(), **run.model.macs_per_step()}
    millions = {name: f'{x / 1e6:.3f}M' for name, x in counts.items()}
    print0(f'{common.machine(run)}, {run.model.config.dtype} convolutions of the core')
    print0(
        f'{figures.describe_model(run.config)}: '
        f'{millions["total"]} parameters ({millions["core"]} core); '
        f"multiply-adds per step: {millions['nominal']} by the paper's count, executed "
        f'{millions["executed"]} core + {millions["head"]} head + {millions["encoder"]} encoder'
    )


def main(config: Settings) -> int:
    """Train, or only evaluate with eval_only. Return the exit status: 0 = done, 1 = the loss was
    not finite, 128 + signal = stopped."""
    common.resume_if_restarted(out_dir, config, globals())
    if eval_only:
        evaluate_only(config)
        return 0
    run = make_run(config)  # levels, environment, model, optimizer
    if run.rank == 0:  # before the load, so that no other run saves after it
        run.lock = common.prepare_out_dir(out_dir, resume, overwrite)
    if resume:
        if run.world > 1:
            dist.barrier()
        load(run)
    choose_threads(run)
    describe(run)
    warm_up(run)
    if run.rank == 0:
        project = wandb_project if wandb else ''
        track, close_trackers = open_trackers(
            config, tensorboard, project, run.step if resume else None
        )
        log = common.open_log(run, resume, SCRIPT)

    stopper = common.Stopper()  # turns ctrl-C and SIGTERM into a flag
    due_to_print = every()  # a line every 10 s, however large log_interval is
    stop = False
    status = None
    while True:
        # evaluate and log
        if run.must_evaluate or run.step % log_interval == 0:
            if run.step > run.logged:
                run.record = make_record(run)
                print0(progress_line(run.record))
                due_to_print(restart=True)
            if run.must_evaluate:
                evaluate_and_save_best(run)
            if run.rank == 0:
                log(run.record)
                track(run.record)
        if run.step >= run.updates or stop:
            break

        # train
        start = time.perf_counter()
        stats, episodes, stop = update(run, stopper.signal is not None)
        elapsed = time.perf_counter() - start
        step = run.step + 1
        run.must_evaluate = step % eval_interval == 0 or step == run.updates
        must_save = run.must_evaluate or stop
        if not common.all_finite(run, stats['loss'], stats['grad_norm'], weights=must_save):
            stopper.restore()
            status = 1
            break
        run.step = step
        run.seconds += elapsed
        keep_for_log(run, episodes, stats)
        if due_to_print():
            rate = (run.step - run.logged) * n_envs * unroll / (run.seconds - run.clock)
            print0(f'    {run.env_steps:,}/{total_steps:,} | {rate:,.0f} steps/s')
        if must_save:
            save(run)  # before the evaluation, so that a run that dies there loses nothing

    if status is None:
        best_return = f'best return {run.best_return:.2f}'
        summary = f'{run.env_steps:,} steps in {run.seconds:.0f} s, {best_return}'
        status = common.report_end(run, stopper, run.updates, summary)
    if run.rank == 0:
        close_trackers()
    if run.rank == 0 and plot and status == 0:
        figure = figures.run_figure(figures.read_log(out_dir), title=out_dir)
        (path,) = figures.save_figure(figure, out_dir, 'curve', ('png',))
        print(f'learning curve: {path}')
    common.leave(run)
    return status


if __name__ == '__main__':
    run_script(
        lambda: main(configure(globals())),
        'interrupted: the last checkpoint is unchanged',
        common.error_explainer('fewer n_envs, or a smaller unroll', globals()),
    )

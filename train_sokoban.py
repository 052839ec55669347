"""Train a Sokoban agent, a ConvLSTM or ConvGLU actor-critic, by advantage actor-critic (A2C) with
generalized advantage estimation.

# a small agent on easy levels: minutes on a CPU, then a learning curve
$ make demo-sokoban
# the paper's small budget, L = 4: train, resume after a crash or ctrl-C, evaluate on test levels
$ python train_sokoban.py config/sokoban_small_L4.py --download=True
$ python train_sokoban.py --out_dir=out/sokoban_small_L4 --resume=True
$ python train_sokoban.py --out_dir=out/sokoban_small_L4 --eval_only=True --levels=unfiltered-test
# four GPUs, which share the boards
$ torchrun --standalone --nproc_per_node=4 train_sokoban.py config/sokoban_small_L4.py
# convolutions in bfloat16 where that is fast, not in the paper's float32
$ python train_sokoban.py config/sokoban_small_L4.py --dtype=auto

A run writes config.json, log.jsonl, checkpoints and its best model into out_dir
(support/run_folder.py). On a CPU a resumed run is bit-equal to one that was never stopped. The
levels and random numbers of a board do not depend on the number of ranks.

Shapes: B boards of this rank, T steps of an unroll.
"""

import math
import os
import re
import signal
import time
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import fields
from datetime import timedelta

from configurator import Settings, configure
from support.script import UserError, print0, run_script

import torch
import torch.nn.functional as F
from torch import Tensor

from convlstm import AGENT_RANGES, Agent, AgentConfig, build_agent, set_precision
from levels import load_level_sets, select_levels
from sokoban import (
    ACTION_STREAM,
    RANDOM,
    JumanjiEnv,
    SokobanEnv,
    board_keys,
    evaluate,
    random_bits,
    sample_actions,
)
from support import ranks
from support.compiling import fused, graphed
from support.export import initialize_from, load_weights, refuse_unknown_sizes
from support.files import read_json, write_json
from support.packages import need_packages
from support.random_states import gather_random_states, restore_random_states
from support.ranks import Gradients, fill, gather
from support.run_folder import (
    BEST,
    WEIGHTS,
    RunFolder,
    load_moments,
    machine,
    restoring,
    settings_of,
    sizes_in,
)
from support.signals import Stopper

# -----------------------------------------------------------------------------
# fmt: off
# I/O
out_dir = 'out/sokoban'        # everything that a run writes goes here
init_from = ''                 # start from the weights in this folder, of a run or an export
resume = False                 # continue the run in out_dir; 'auto' = if there is one
overwrite = False              # replace the run in out_dir
eval_interval = 1000           # updates between evaluations and checkpoints (640,000 steps)
log_interval = 50              # updates between lines in log.jsonl, and on screen (32,000 steps)
eval_only = False              # evaluate the last checkpoint, or the export, in out_dir and stop
levels = ''                    # with eval_only: a split or a file; '' = the eval_split of the run
plot = False                   # draw out_dir/curve.png at the end (matplotlib)
tensorboard = False            # also write TensorBoard files into out_dir
wandb = False                  # also log to Weights & Biases
wandb_project = 'parallel-experts'  # name of the Weights & Biases project
# levels and environment
levels_dir = 'data/boxoban'    # folder of Boxoban's levels, as text or packed
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
seed = 1337                    # of weights, levels and actions
device = 'auto'                # 'auto' (cuda if there is one), 'cpu', 'cuda' or 'cuda:1'
dtype = 'auto'                 # of convolutions: 'float32' (true fp32, no TF32), 'bfloat16', or
                               # 'auto' (bfloat16 where it is fast); encoder and head are fp32, or
                               # TF32 on a GPU unless dtype = 'float32'
compile = True                 # compile what lies between convolutions, if torch.compile works
cuda_graphs = True             # on a GPU: run all but communication as CUDA graphs
threads = 0                    # CPU threads; 0 = torch's choice
# fmt: on
# -----------------------------------------------------------------------------
RANGES = {
    **AGENT_RANGES,
    'dtype': ['auto', *AGENT_RANGES['dtype']],
    **dict.fromkeys(('eval_interval', 'log_interval', 'eval_games', 'n_levels'), (1, math.inf)),
    **dict.fromkeys(('n_envs', 'unroll'), (1, math.inf)),
    'total_steps': (1, 10**13),  # the time that is left must fit a timedelta
    'resume': [False, True, 'auto'],
    'env': ['torch', 'jumanji'],
    'gamma': (0, 1),
    'gae_lambda': (0, 1),
    'time_limit': (1, 10000),  # an evaluation keeps all actions of its episodes
    'threads': (0, 1024),  # OpenMP fails beyond
}
# What builds the agent: a setting with the name of a field of AgentConfig sets that field.
MODEL_SETTINGS = tuple(
    f.name for f in fields(AgentConfig) if f.name in globals() and f.name != 'dtype'
)
# With init_from, a setting on the left is not adopted if one on the right has another value here
# than in the source.
DEPENDS_ON = {'radius': ('arch', 'n_expert', 'aggregation'), 'residual': ('arch',)}
# What a resumed run keeps, besides its training levels, whose file may have moved; the command line
# may change every other setting.
FIXED = (
    *MODEL_SETTINGS,
    *('n_levels', 'n_boxes', 'max_moves', 'env', 'n_envs', 'time_limit', 'unroll'),
    *('seed', 'init_from'),
)
STATS = ('loss', 'policy_loss', 'value_loss', 'entropy', 'explained_variance')


def play_step(boards: SokobanEnv, action: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Take actions (B,) and reset the boards that are done. Return the results of the step, (B,)
    each, and the next observations (B, 10, 10, 2). 'return' is the sum of the rewards of the
    episode so far."""
    reward, done, solved = boards.move(action)
    step = {'action': action, 'reward': reward, 'done': done, 'solved': solved}
    step['return'] = boards.total.clone()
    boards.reset(done)
    return step, boards.observe()


def rollout(
    model: torch.nn.Module,
    boards: SokobanEnv,
    state: tuple,
    choose: Callable[[Tensor, int], Tensor],
    T: int,
    play: Callable = play_step,
) -> tuple[dict[str, Tensor], tuple]:
    """Take T steps on all boards, keeping the autograd graph of the agent's outputs.
    choose(logits, t): the actions (B,) for the logits (B, 4) of step t.

    Return a batch, (T, B, ...) each: 'logits' and 'value' of the agent, and the results of `play`;
    'last' (B,) is the value of the observation after step T. And the agent's state there."""
    w = model.prepare()
    obs, start = boards.observe(), boards.steps == 0
    steps = []
    for t in range(T):
        logits, value, state = model.act(w, obs, start, state)
        step, obs = play(boards, choose(logits.detach(), t))
        steps.append({'logits': logits, 'value': value, **step})
        start = step['done']
    with torch.no_grad():
        _, last, _ = model.act(w, obs, start, state)
    batch = {name: torch.stack([step[name] for step in steps]) for name in steps[0]}
    return {**batch, 'last': last}, tuple(x.detach() for x in state)


def gae(reward: Tensor, done: Tensor, value: Tensor, last: Tensor) -> Tensor:
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


def a2c_loss(batch: dict[str, Tensor], estimate: Callable = gae) -> tuple[Tensor, Tensor]:
    """Return the loss of a rollout's batch, and the statistics STATS as one vector."""
    logits, value = batch['logits'], batch['value']  # (T, B, 4), (T, B)
    advantage = estimate(batch['reward'], batch['done'], value.detach(), batch['last'])  # (T, B)
    target = advantage + value.detach()
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    log_pi = F.log_softmax(logits, -1)  # (T, B, 4)
    chosen = log_pi.gather(-1, batch['action'][..., None]).squeeze(-1)  # (T, B)
    policy_loss = -(chosen * advantage).mean()
    entropy = -(log_pi.exp() * log_pi).sum(-1).mean()
    value_loss = (value - target).square().mean()
    loss = policy_loss + value_coef * value_loss - entropy_coef * entropy
    explained = 1 - advantage.var() / target.var()  # an advantage is target - value
    return loss, torch.stack([loss, policy_loss, value_loss, entropy, explained]).detach()


def make_agent(settings: dict) -> Agent:
    """Return the agent of a run's settings, initialized. Raises UserError if they do not fit
    together."""
    sizes = {f.name: settings[f.name] for f in fields(AgentConfig) if f.name in settings}
    agent = build_agent(AgentConfig(**sizes))
    set_precision(agent)
    return agent


def make_rollout(
    model: torch.nn.Module,
    boards: SokobanEnv,
    state: tuple,
    count: Tensor,
    grads: Gradients,
    T: int,
    world: int,
) -> Callable[[], Tensor]:
    """Return rollout_and_backward(), the first CUDA graph of an update: a rollout of T steps and
    the backward of its loss. Gradients, and the statistics in grads.extra, are this rank's share of
    a mean over `world` ranks. The boards, the agent's `state` and `count`, the number of steps that
    every board has taken, advance in place. It returns the episodes (T, 3, B): the return so far,
    whether the episode ended, and whether solved."""
    keys = board_keys(seed, ACTION_STREAM, boards.board)  # of the random numbers for actions
    # On a GPU the number of kernels decides the time of a step. A CPU gains nothing from compiling
    # the game and the loss, and Jumanji's game cannot be compiled.
    compiles = count.device.type != 'cpu' and not isinstance(boards, JumanjiEnv)
    play, sample, estimate = (fused(f) if compiles else f for f in (play_step, sample_actions, gae))
    stats = grads.extra[: len(STATS)]

    def rollout_and_backward() -> Tensor:
        grads.zero()
        steps = count + torch.arange(T, device=count.device)[:, None]  # (T, 1)
        rng = random_bits(keys, steps)  # (T, B)
        batch, new_state = rollout(model, boards, state, lambda x, t: sample(x, rng[t]), T, play)
        loss, numbers = a2c_loss(batch, estimate)
        (loss / world).backward()
        stats.copy_(numbers / world)
        for x, new in zip(state, new_state, strict=True):
            x.copy_(new)
        count.add_(T)
        return torch.stack([batch['return'], batch['done'].float(), batch['solved'].float()], 1)

    return rollout_and_backward


def make_update(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    grads: Gradients,
    rollout_and_backward: Callable[[], Tensor],
    graphs: dict | None,
) -> Callable[[bool], tuple[Tensor, Tensor]]:
    """Return update(stops): a rollout, its backward, the reduction over ranks and a step of Adam
    with clipped gradients. It returns the episodes of rollout_and_backward() and the gradients'
    norm; grads.extra then holds the statistics, followed by the number of ranks with stops = True.
    It is two CUDA graphs, because the all-reduce between them is not captured."""
    stop_sum = grads.extra[-1]  # one all-reduce for gradients, statistics and this

    def optimizer_step() -> Tensor:
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip or math.inf)
        optimizer.step()
        return norm

    def update(stops: bool) -> tuple[Tensor, Tensor]:
        episodes = graphed(graphs, 'rollout and backward', rollout_and_backward)
        stop_sum.fill_(stops)
        grads.sum_over_ranks()
        return episodes, graphed(graphs, 'optimizer', optimizer_step)

    return update


def returns_record(since: list, last_1000: list, step: int) -> dict:
    """Return means over episodes, (return, solved) each: those since the last log line, and the
    last 100 and 1,000. They are None until every board has ended an episode, at the time limit at
    the latest: before that they would be too high, because solved episodes are the first to end."""

    def mean(episodes: list, k: int) -> float | None:
        """Return the mean return (k = 0) or the solve rate (k = 1)."""
        if not episodes or step * unroll < time_limit:
            return None
        return sum(episode[k] for episode in episodes) / len(episodes)

    return {
        'episodes': len(since),
        'episodic_return': mean(since, 0),
        'return_100': mean(last_1000[-100:], 0),
        'return_1000': mean(last_1000, 0),
        'solve_rate_100': mean(last_1000[-100:], 1),
        'solve_rate_1000': mean(last_1000, 1),
    }


def progress_line(record: dict) -> str:
    """Return the line that is printed for a log record."""
    left = max(0, total_steps - record['env_steps']) / record['env_steps_per_s']
    returns = 'no returns yet'
    if record['return_1000'] is not None:
        solved = f'solved {record["solve_rate_100"]:.1%} ({record["solve_rate_1000"]:.1%})'
        returns = f'return {record["return_100"]:.2f} ({record["return_1000"]:.2f}) | {solved}'
    return (
        f'{record["env_steps"]:,}/{total_steps:,} | {returns} | '
        f'entropy {record["entropy"]:.3f} | value loss {record["value_loss"]:.3f} | '
        f'norm {record["grad_norm"]:.2f} | {record["env_steps_per_s"]:,.0f} steps/s | '
        f'eta {timedelta(seconds=int(left))}'
    )


def count_updates() -> int:
    """Return the number of updates of a run: total_steps over the steps of one, rounded up."""
    return math.ceil(total_steps / (n_envs * unroll))


def draw_returns() -> None:
    """Draw curve.png."""
    from support.plots import plot_returns  # only here, because matplotlib imports slowly

    plot_returns(out_dir)


@ranks.explain_errors(
    'fewer n_envs or a smaller unroll take less, and so does --cuda_graphs=False; --resume=True '
    'continues from the last checkpoint'
)
def main(config: Settings) -> int:
    """Train, or only evaluate with eval_only. Return the exit status: 0 = done, 1 = the loss was
    not finite, 128 + signal = stopped."""
    with ExitStack() as at_end:
        return run(config, at_end)


def run(config: Settings, at_end: ExitStack) -> int:
    """Do the work of main. at_end: callbacks that follow the work, also after an error."""
    folder = RunFolder(config, MODEL_SETTINGS if eval_only else FIXED, __file__)
    at_end.callback(folder.unlock)
    if init_from and not folder.saved:
        saved = sizes_in(init_from, MODEL_SETTINGS)
        config.adopt(saved, MODEL_SETTINGS, init_from, DEPENDS_ON, print0)
    globals().update(config)  # those of the run that is resumed or evaluated
    if folder.step > count_updates() and not eval_only:
        steps = f'{folder.step * n_envs * unroll:,} steps'
        raise UserError(f'total_steps = {total_steps:,}: the run in {out_dir} has {steps}')
    if folder.finished and folder.step == count_updates() and not eval_only:
        print0(f'{out_dir}: done, {folder.step} updates')
        if plot and folder.rank == 0:
            ranks.attempt('curve.png', draw_returns)
        return 0
    if levels and not eval_only:
        raise UserError('levels is a setting of --eval_only=True; a run trains on split')

    rank, world, device_ = ranks.join_ranks(device, threads)
    config['dtype'] = str(ranks.pick_dtype(dtype, device_)).removeprefix('torch.')
    ranks.share_settings(config)
    globals().update(config)
    updates = count_updates()
    board_class = SokobanEnv
    if not eval_only:
        need_packages(tensorboard=tensorboard, wandb=wandb)
        if env == 'jumanji':
            need_packages(jumanji=True, jax=True, gymnasium=True)
            board_class = JumanjiEnv
    if n_envs % world and not eval_only:
        raise UserError(f'n_envs = {n_envs}: must be a multiple of the {world} ranks')
    torch.manual_seed(seed)
    # Shapes never change, so that the search for the fastest convolutions runs once.
    torch.backends.cudnn.benchmark = not torch.backends.cudnn.deterministic
    B = n_envs // world

    # model
    init_checksum = None
    model = make_agent(config)
    if folder.saved:
        refuse_unknown_sizes(model, folder.saved.get('entries', {}), folder.path_of_saved)
        load_weights(model, folder.saved['model'], folder.path_of_saved)
    elif init_from:
        init_checksum = initialize_from(model, init_from)
    model = model.to(device_)
    ranks.share_weights(model)
    fused.enabled = compile

    # levels
    if eval_only:
        is_whole = levels not in ('', 'generated')  # of a split or file, all levels
        n = math.inf if is_whole else eval_games
        eval_settings = {**config, 'eval_split': levels or eval_split, 'eval_games': n}
        eval_levels, eval_line = select_levels(eval_settings, evaluation=True)
    else:
        (train_levels, train_line), (eval_levels, eval_line) = load_level_sets(config)
    eval_crc = zlib.crc32(eval_levels)
    levels_crc = None if eval_only else zlib.crc32(train_levels)
    ranks.compare_ranks(*folder.fingerprint(), eval_crc, levels_crc)

    def evaluate_agent() -> dict[str, float]:
        with ranks.evaluating(model):
            return ranks.run_compiled(
                lambda: evaluate(model, eval_levels, device_, time_limit=time_limit)
            )

    if eval_only:
        result = evaluate_agent()
        metadata = {'step': folder.step, 'levels': eval_line, 'n': len(eval_levels)}
        print0(
            f'{out_dir}, update {metadata["step"]:,}: solved {result["solve_rate"]:.1%} of '
            f'{metadata["n"]:,} levels ({eval_line}), mean return {result["return"]:.2f}, '
            f'{result["steps"]:.0f} steps'
        )
        is_export = folder.path_of_saved.name == WEIGHTS  # nothing is written into its folder
        if rank == 0 and not is_export:
            source = levels or eval_split
            name = re.sub(r'\W+', '-', os.path.splitext(source)[0]).strip('-')
            if name != source:  # two paths may have one name
                name = f'{zlib.crc32(os.fsencode(source)):08x}-{name[-60:]}'
            path = os.path.join(out_dir, f'eval_{name}.json')
            conditions = {'time_limit': time_limit, 'levels_crc': eval_crc}
            former = read_json(path)
            if any(former.get(key, x) != x for key, x in conditions.items()):  # keep that result
                checksum = zlib.crc32(repr(conditions).encode())
                path = os.path.join(out_dir, f'eval_{name}-{checksum:08x}.json')
            record = {**metadata, **conditions, **result}
            ranks.attempt(path, lambda: write_json(record, path))
        ranks.leave_ranks()
        return 0
    print0(f'training: {train_line}\nevaluation: {eval_line}')

    # the boards of this rank, and the agent's state on them
    boards = board_class(
        train_levels, B, seed=seed, device=device_, first_board=rank * B, time_limit=time_limit
    )
    state = model.init_state(B)
    count = torch.zeros((), dtype=torch.int64, device=device_)  # steps that every board has taken

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
    # The first layer of a non-recurrent agent has empty weights.
    params = [p for p in model.parameters() if p.numel()]
    grads = Gradients(params, n_extra=len(STATS) + 1)

    rollout_and_backward = make_rollout(model, boards, state, count, grads, unroll, world)
    graphs = {} if cuda_graphs and device_.startswith('cuda') and env == 'torch' else None
    update = make_update(model, optimizer, grads, rollout_and_backward, graphs)

    def is_due(step: int) -> bool:
        """Return whether the agent is saved and evaluated after `step` updates."""
        return step % eval_interval == 0 or step == updates

    def lr_at(step: int) -> float:
        """Return the learning rate after `step` updates. It falls linearly to 0."""
        return learning_rate * (1 - step / updates)

    if fused.enabled:  # compile before time is measured, if that works here
        start = time.perf_counter()
        with ranks.keeping_buffers(model):
            ranks.run_compiled(rollout_and_backward)
        print0(f'compiled in {time.perf_counter() - start:.0f} s')
        boards.restart(seed)
        count.zero_()
        for x in state:
            x.zero_()

    # What an edit draws at random in training, for dropout for example, depends on no trial, and
    # differs from rank to rank.
    torch.manual_seed(seed + 1000 * rank)

    # resume
    step, best, seconds = 0, -math.inf, 0.0
    ended_since = []  # (return, solved) of the episodes since the last line of the log
    last_1000 = []  # the same of the last 1,000
    sums = {}  # of STATS and the gradients' norm since that line
    logged_step, logged_seconds = 0, 0.0  # of that line
    if saved := folder.saved:
        if saved.get('levels_crc') != levels_crc:
            advice = 'give the same split and levels_dir, or another out_dir'
            raise UserError(f'{folder.path_of_saved}: was trained on other levels: {advice}')
        with restoring(folder.path_of_saved):
            step, seconds = saved['step'], saved['seconds']
            ended_since, last_1000, sums = saved['ended_since'], saved['last_1000'], saved['sums']
            logged_step, logged_seconds = saved['logged_step'], saved['logged_seconds']
            boards.load_state_dict({k: x.chunk(world)[rank] for k, x in saved['boards'].items()})
            for x, whole in zip(state, saved['state'], strict=True):
                fill(x, whole.chunk(world)[rank])
            count.fill_(step * unroll)
            restore_random_states(saved['rng'], device_)
        moments = [saved['optimizer']] if 'optimizer' in saved else []
        load_moments([optimizer], moments, folder.path_of_saved)
        metadata = settings_of(folder.path / BEST)
        is_later = metadata.get('step', math.inf) > step  # if this is an earlier checkpoint
        if not is_later and metadata.get('eval_crc') == eval_crc:
            best = metadata['best']
        elif metadata:
            reason = 'is that of a later update' if is_later else 'was chosen on other levels'
            text = f'{reason}, and the next evaluation replaces it'
            print0(f'{folder.path / BEST}: {text}: copy it, to keep it')
    saved = folder.saved = None  # free its memory

    metadata = machine(device_, dtype)
    config |= {name: metadata.pop(name) for name in ('device', 'dtype', 'threads')}
    n_params = sum(p.numel() for p in model.parameters()) / 1e6
    macs = model.nominal_macs() / 1e6
    print0(f'{world} x {metadata["device_name"]}, {config["threads"]} threads, {config["dtype"]}')
    print0(f"{n_params:.3f}M parameters; {macs:.3f}M multiply-adds per step by the paper's count")
    last = folder.records[-1] if folder.records else {}
    if last.get('step') == step and is_due(step) and 'eval_return' not in last:
        folder.records.pop()  # it is evaluated and logged again
    elif last.get('step') == step and 'episodes' in last:  # logged after it was saved
        ended_since, sums, logged_step, logged_seconds = [], {}, step, seconds
    # Generated levels follow from the settings: only files need a checksum.
    files_crc = None if split == 'generated' else levels_crc
    folder.start(**metadata, data_checksum=files_crc, init_checksum=init_checksum)

    stopper = Stopper()  # turns ctrl-C, SIGTERM and the like into a flag
    at_end.callback(stopper.restore)
    due_to_print = ranks.Throttle()  # a line every 10 s, however large log_interval is
    saved_at, logged_at = step, folder.records[-1]['step'] if folder.records else -1
    unread = []  # episodes (T, 3, B) of each update after the last read, on the device
    stop, problem = False, ''
    while True:
        due = is_due(step)
        must_save = (due or stop) and step > saved_at
        must_log = (step % log_interval == 0 or step == updates) and step > logged_step
        if unread and (must_save or must_log):
            episodes = gather(torch.cat(unread), 2)  # (steps, 3, n_envs)
            unread = []
            total, ended, solved = episodes.unbind(1)
            ended = ended > 0
            new = list(zip(total[ended].tolist(), solved[ended].tolist(), strict=True))
            ended_since, last_1000 = ended_since + new, (last_1000 + new)[-1000:]

        # save; before the evaluation, so that a run that dies there loses nothing
        if must_save:
            ranks.compare_weights(model)
            if not ranks.all_finite(model):
                problem = f'update {step}: a weight is not finite'
                break
            folder.save(
                model=model.state_dict(),
                entries=model.entries(),
                optimizer=optimizer.state_dict(),
                boards={name: gather(x) for name, x in boards.state_dict().items()},
                state=[gather(x) for x in state],
                levels_crc=levels_crc,
                step=step,
                seconds=seconds,
                ended_since=ended_since,
                last_1000=last_1000,
                sums=sums,
                logged_step=logged_step,
                logged_seconds=logged_seconds,
                rng=gather_random_states(device_),
            )
            saved_at = step

        # log and evaluate
        record = {'step': step, 'env_steps': step * n_envs * unroll}
        if must_log:
            record |= returns_record(ended_since, last_1000, step)
            n_new = step - logged_step
            record |= {name: x / n_new for name, x in sums.items()}
            record |= {
                'lr': lr_at(step - 1),  # of the last update
                'env_steps_per_s': n_new * n_envs * unroll / (seconds - logged_seconds),
                'seconds': seconds,
            }
            print0(progress_line(record))
            due_to_print(restart=True)
            ended_since, sums, logged_step, logged_seconds = [], {}, step, seconds
        if due and step > logged_at:
            result = evaluate_agent()
            record |= {f'eval_{name}': x for name, x in result.items()}
            print0(f'evaluation: solved {result["solve_rate"]:.1%}, return {result["return"]:.2f}')
            if step == 0:
                random_result = evaluate(RANDOM, eval_levels, device_, seed, time_limit=time_limit)
                record |= {f'random_{name}': x for name, x in random_result.items()}
                print0(f'a random policy solves {random_result["solve_rate"]:.1%}')
            elif result['return'] > best:
                best = result['return']
                score = f'best mean return of an evaluation {best:.2f}'
                folder.save_best(model, step=step, best=best, eval_crc=eval_crc, score=score)
        if step > logged_at and (must_log or due):
            folder.log(record)
        if step >= updates or stop:
            break

        # rollout, backward and update
        start = time.perf_counter()
        for group in optimizer.param_groups:
            group['lr'].fill_(lr_at(step))
        episodes, norm = update(stopper.signal is not None)
        values = torch.cat([grads.extra, norm[None]]).tolist()  # the only wait for the device
        numbers = dict(zip((*STATS, 'stop', 'grad_norm'), values, strict=True))
        stop = numbers['stop'] > 0 or (world == 1 and stopper.signal is not None)
        if not (math.isfinite(numbers['loss']) and math.isfinite(numbers['grad_norm'])):
            values = f'the loss is {numbers["loss"]}, the gradient norm {numbers["grad_norm"]}'
            problem = f'update {step + 1}: {values}'
            break
        seconds += time.perf_counter() - start
        step += 1
        for name in (*STATS, 'grad_norm'):
            sums[name] = sums.get(name, 0.0) + numbers[name]
        unread.append(episodes.clone())  # the next replay overwrites it
        if due_to_print():
            rate = (step - logged_step) * n_envs * unroll / (seconds - logged_seconds)
            print0(f'    {step * n_envs * unroll:,}/{total_steps:,} | {rate:,.0f} steps/s')

    status = 0
    if problem:
        status = 1
        print0(f'error: {problem}; the last checkpoint is of update {saved_at}')
    elif step < updates:
        status = 128 + (stopper.signal or signal.SIGTERM)  # None if another rank was stopped
        print0(f'stopped after update {step}, saved in {out_dir}: --resume=True continues')
    else:
        env_steps = f'{step * n_envs * unroll:,} steps in {seconds:.0f} s'
        print0(f'done: {env_steps}, best return {best:.2f}; {out_dir}')
    folder.finish(is_finished=status == 0)
    if status == 0 and plot and rank == 0:
        ranks.attempt('curve.png', draw_returns)
    ranks.leave_ranks()
    return status


if __name__ == '__main__':
    run_script(lambda: main(configure(globals(), quiet=True)))

"""
Train a Sokoban agent: a ConvLSTM or ConvGLU actor-critic, recurrent or not, by advantage actor-critic (A2C) with GAE.

On a CPU, ten minutes, easy generated levels, a learning curve and two games as GIFs:
$ make demo-sokoban
The paper's small budget at L = 4, on Boxoban's unfiltered-train (fetched into data/boxoban the first time):
$ python train_sokoban.py config/sokoban_small_L4.py --download=True
Four GPUs, the environments split over them:
$ torchrun --standalone --nproc_per_node=4 train_sokoban.py config/sokoban_small_L4.py
Its non-recurrent twin, at the same levels, experts and width:
$ python train_sokoban.py config/sokoban_small_L4.py --recurrent=False --out_dir=out/sokoban_small_L4_ff
Go on after a crash, ctrl-C, SIGTERM or a closed terminal; and the solve rate on the test split, greedy, with two games as GIFs:
$ python train_sokoban.py config/sokoban_small_L4.py --resume=True
$ python train_sokoban.py config/sokoban_small_L4.py --eval_only=True --levels=unfiltered-test --download=True

Writes into out_dir: config.json, log.jsonl (one object a line), ckpt_last.pt, ckpt_prev.pt, ckpt_best.pt; with eval_only eval_*.json and
eval_*.gif. On the CPU a resumed run is bit-equal to one that was never stopped. Any number of ranks plays the same levels.
"""

import json
import math
import os
import sys
import time
import zlib
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace

from configurator import (
    configure,
    every,
    fail,
    run_script,
)  # before torch: how threads wait, what ctrl-C does

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from checkpoint import (
    BEST,
    LAST,
    PREV,
    CheckpointError,
    JsonlLog,
    Stopper,
    check_fits,
    check_model,
    compiles,
    device_name,
    fill,
    join_ranks,
)
from checkpoint import (
    keep_memory,
    last_words,
    load_optimizer,
    load_position,
    load_run,
    load_weights,
    need_packages,
    open_trackers,
)
from checkpoint import (
    pick_dtype,
    prepare_out_dir,
    print0,
    release,
    restarted,
    restoring,
    rng_state,
    save_checkpoint,
    set_rng_state,
    write_config,
)
from convlstm import AgentConfig, build_agent
from kernels import compiled, graphed
from play_sokoban import evaluate, plot_log, report
from muon import gather, sum_over_ranks
from sokoban import (
    CELLS,
    TIME_LIMIT,
    JumanjiEnv,
    LevelError,
    SokobanEnv,
    at_most,
    board_keys,
    draw_by,
    load_levels,
)

# -----------------------------------------------------------------------------
# fmt: off
# I/O
out_dir = 'out/sokoban'        # everything a run writes goes here
resume = False                 # go on from out_dir's last checkpoint
overwrite = False              # replace a run that is in out_dir
eval_interval = 1000           # updates between greedy evaluations and checkpoints; 640,000 environment steps
log_interval = 50              # updates between log lines, printed and in log.jsonl; 32,000 environment steps
eval_only = False              # evaluate out_dir's last checkpoint on `levels` and stop
levels = ''                    # of eval_only: a split or a file, all of it; '': eval_games of eval_split
best = False                   # of eval_only: the best checkpoint instead of the last
plot = False                   # draw out_dir/curve.png at the end (matplotlib)
tensorboard = False            # also write TensorBoard files into out_dir
wandb = False                  # also log to Weights & Biases, project 'parallel-experts'
# levels and environment
levels_dir = ''                # folder of Boxoban's levels, as text or packed; '': data/boxoban
split = 'unfiltered-train'     # trained on; 'generated': our own generator's, of which none is held out too
eval_split = 'unfiltered-valid'   # evaluated on every eval_interval
eval_games = 512               # the first so many levels of it
download = False               # fetch the splits into levels_dir where they are not there
n_levels = 100000              # of the generator, for training
n_boxes = 4                    # of the generator, 1 to 4: fewer are easier
max_moves = 120                # of the generator: a level's known solution has no more; fewer are easier
env = 'torch'                  # 'torch', or 'jumanji' (the original, for checking: slower)
n_envs = 32                    # boards, over all ranks
# model (convlstm.py has the equations)
kind = 'convlstm'              # or 'convglu'
recurrent = True               # False: nothing is carried to the next step
n_layer = 4                    # L, depth levels
n_expert = 1                   # E, experts a level
n_embd = 64                    # D, channels of an expert
aggregation = 'sqrt_sum'       # 'sqrt_sum', 'mean', 'softmax_mean' or 'softmax_l2'
router_dim = 64                # width of the router's queries and keys (softmax aggregations)
radius = -1                    # experts that an expert hears on a ring, besides itself; -1: all
residual = 'expert'            # convglu: each expert adds s (the paper's rule), or 'shared': s is added to their aggregate
head_dim = 256                 # width of the head's dense layer
# A2C (the paper's)
total_steps = 50000000         # environment steps, over all boards
unroll = 20                    # T, steps between updates
gamma = 0.97                   # discount
gae_lambda = 0.97              # of the advantages (GAE)
entropy_coef = 0.01            # of the policy's entropy in the loss
value_coef = 1.0               # of the mean squared error
learning_rate = 4e-4           # Adam's, annealed linearly to 0
adam_eps = 1e-6                # small: gradients are
grad_clip = 1.0                # global norm; 0 disables
# system
reuse = True                   # the rollout's forward is the update's; False: recompute it, for all steps at once (saves memory)
seed = 1337                    # of weights, levels and actions
device = 'auto'                # 'auto': cuda if there is one; or 'cpu', 'cuda', 'cuda:1'
dtype = 'auto'                 # of convolutions: 'float32' or 'bfloat16'; 'auto': bfloat16 where the processor is fast at it
compile = True                 # torch.compile the cells, on a GPU the environment too; falls back, saying so
graphs = True                  # on a GPU: rollout, backward and optimizer as CUDA graphs, from the fourth update on
path = 'fast'                  # 'fast' or 'plain' (the equations, for checking)
threads = 0                    # CPU threads; 0: torch's choice
# fmt: on
# -----------------------------------------------------------------------------

MODEL = (
    'kind',
    'recurrent',
    'n_layer',
    'n_expert',
    'n_embd',
    'aggregation',
    'router_dim',
    'radius',
    'residual',
    'head_dim',
)
FIXED = (
    'split',
    'n_levels',
    'n_boxes',
    'max_moves',
    'env',
    'n_envs',
    'unroll',
    'seed',
    *MODEL,
)  # a resumed run cannot change these
POSITION = (
    'step',
    'record',
    'best',
    'seconds',
    'logged',
    'clock',
)  # a run's, saved and restored; the last two: of the last log line
RUN_FILES = (
    'ckpt_*.pt',
    'log.jsonl',
    'config.json',
    'curve.png',
    'eval_*.json',
    'eval_*.gif',
    '*.tfevents.*',
)


def check_settings(world: int) -> None:
    for name in (
        'eval_interval',
        'log_interval',
        'eval_games',
        'n_levels',
        'n_envs',
        'total_steps',
        'unroll',
    ):
        if globals()[name] < 1:
            fail(f'{name} = {globals()[name]}: must be at least 1')
    for name in (
        'entropy_coef',
        'value_coef',
        'learning_rate',
        'adam_eps',
        'grad_clip',
        'threads',
        'seed',
    ):
        if globals()[name] < 0:
            fail(f'{name} = {globals()[name]}: must not be negative')
    for name in ('gamma', 'gae_lambda'):
        if not 0 <= globals()[name] <= 1:
            fail(f'{name} = {globals()[name]}: must be between 0 and 1')
    if eval_games < world:
        fail(f'eval_games = {eval_games}: must be at least the number of ranks, {world}')
    if eval_only and world > 1:
        fail('eval_only runs as one process: start it without torchrun')
    if (levels or best) and not eval_only:
        fail('levels and best are settings of --eval_only=True; a run trains on split')
    if n_envs % world:
        fail(f'n_envs = {n_envs}: must be a multiple of the number of ranks, {world}')
    need_packages(matplotlib=plot, PIL=eval_only, tensorboard=tensorboard, wandb=wandb)
    for name, allowed in (('path', ('fast', 'plain')), ('env', ('torch', 'jumanji'))):
        if globals()[name] not in allowed:
            fail(f'{name} = {globals()[name]!r}: expected one of {", ".join(allowed)}')


# ----------------------------------------------------------------------------- the update


def sample(logits: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Actions (B,) from logits (B, 4) by inversion, with u (B,) of draw()."""
    u = (u >> 29).to(torch.float32) / 2**24  # [0, 1)
    return (u[:, None] >= F.softmax(logits.float(), -1).cumsum(-1)[:, :-1]).sum(-1)


def play_step(boards: SokobanEnv, logits: torch.Tensor, u: torch.Tensor) -> dict[str, torch.Tensor]:
    """One step of all boards, with actions drawn by u (B,) from logits (B, 4): what it gave, and the observation that follows."""
    action = sample(logits, u)
    reward, done, solved = boards.step(action)
    return {
        'action': action,
        'reward': reward,
        'done': done,
        'solved': solved,
        'next': boards.observe(),
    }


def fused(run: SimpleNamespace, function: Callable) -> Callable:
    """function compiled, where path 'compiled' runs on a GPU: there a step costs by its kernels. On a CPU it would win nothing."""
    return (
        compiled(function)
        if run.model.config.path == 'compiled' and run.device != 'cpu' and env == 'torch'
        else function
    )


def rollout(run: SimpleNamespace) -> dict[str, torch.Tensor]:
    """`unroll` steps of all boards, (T, B) each. With reuse, logits and values keep their graph: it is the update's. Else what a second
    forward needs: observations and starts."""
    with torch.set_grad_enabled(reuse):
        w, state, steps, play = (
            run.model.prepare(),
            tuple(x.detach() for x in run.state),
            [],
            fused(run, play_step),
        )
        chance = draw_by(
            run.keys, run.count + torch.arange(unroll, device=run.device)[:, None]
        )  # (T, B)
        run.count += unroll
        obs, start = run.env.observe(), run.start.clone()
        for u in chance.unbind():
            logits, value, state = run.model.act(w, obs, start, state)
            step = play(run.env, logits.detach(), u)
            steps.append(
                {
                    **step,
                    **(
                        {'logits': logits, 'value': value}
                        if reuse
                        else {'obs': obs, 'start': start}
                    ),
                }
            )
            obs, start = steps[-1].pop('next'), step['done']
        run.start.copy_(start)
        with torch.no_grad():  # the value of what comes next
            _, last, _ = run.model.act(w, obs, start, state)
    return {
        **{k: torch.stack([s[k] for s in steps]) for k in steps[0]},
        'last': last,
        'state': [x.detach() for x in state],
    }


def gae(
    reward: torch.Tensor, done: torch.Tensor, value: torch.Tensor, last: torch.Tensor
) -> torch.Tensor:
    """Generalised advantage estimates (T, B): sum over k of (gamma lambda)^k delta_{t+k} up to the episode's end, delta_t = r_t + gamma
    V_{t+1} - V_t (Schulman et al. 2016, equation 16). reward, done, value (T, B); last (B,), the value after step T. Every end is a
    termination, the time limit too (Jumanji's discount is 0 there): no value is carried over it."""
    goes_on = 1 - done.to(value.dtype)
    carried = gamma * gae_lambda * goes_on
    following = torch.cat([value[1:], last[None]])
    delta = reward + gamma * goes_on * following - value
    advantage, out = torch.zeros_like(last), []
    for t in reversed(range(len(reward))):
        advantage = delta[t] + carried[t] * advantage
        out.append(advantage)
    return torch.stack(out[::-1])


def backward(run: SimpleNamespace, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Gradients of the A2C loss over the unroll, this rank's share of the mean. -> loss, policy loss, value loss, entropy, and the sums
    for the explained variance: (n_stats,)."""
    if reuse:
        logits, value = batch['logits'], batch['value']
    else:
        logits, value, _ = run.model(batch['obs'], batch['start'], tuple(run.state))
    advantage = fused(run, gae)(batch['reward'], batch['done'], value.detach(), batch['last'])
    target = advantage + value.detach()
    log_pi = F.log_softmax(logits.float(), -1)
    chosen = log_pi.gather(-1, batch['action'][..., None]).squeeze(-1)
    policy_loss = -(chosen * advantage).mean()
    entropy = -(log_pi.exp() * log_pi).sum(-1).mean()
    value_loss = (value - target).square().mean()
    loss = policy_loss + value_coef * value_loss - entropy_coef * entropy
    (loss / run.world).backward()
    for kept, new in zip(run.state, batch['state'], strict=True):
        kept.copy_(new)  # not before: the graph begins with the old one
    moments = [target.mean(), target.square().mean(), advantage.mean(), advantage.square().mean()]
    return torch.stack([loss, policy_loss, value_loss, entropy, *moments]).detach() / run.world


def apply(run: SimpleNamespace) -> torch.Tensor:
    """Clip, Adam; -> the gradient norm."""
    norm = torch.nn.utils.clip_grad_norm_(run.model.parameters(), grad_clip or math.inf)
    run.optimizer.step()
    return norm


def update(run: SimpleNamespace, stop: bool) -> tuple[dict[str, float], torch.Tensor, bool]:
    """One rollout and one update. -> its statistics, (T, 3, B) rewards, ends and solved ends of all ranks' boards on the CPU, and
    whether any rank was told to stop."""

    def call(name: str, function, *args):
        return function(*args) if run.graphs is None else graphed(run.graphs, name, function, *args)

    if not run.graphs or run.graphs['backward'][1] is None:
        run.optimizer.zero_grad(
            set_to_none=True
        )  # a captured backward writes its own gradients anew
    for group in run.optimizer.param_groups:
        group['lr'].fill_(learning_rate * (1 - run.step / run.updates))
    batch = call('rollout', rollout, run)
    stats = call('backward', backward, run, batch)
    games = torch.stack(
        [batch['reward'], batch['done'].float(), batch['solved'].float()], 1
    )  # (T, 3, B)
    if run.world > 1:
        stats = sum_over_ranks(
            run.model, torch.cat([stats, torch.tensor([float(stop)], device=run.device)])
        )
        stats, stop = stats[:-1], stats[-1].item() > 0
        parts = [torch.empty_like(games) for _ in range(run.world)]
        dist.all_gather(parts, games)
        games = torch.cat(parts, 2)
    norm = call('apply', apply, run)
    loss, policy_loss, value_loss, entropy, mean, square, error, error2, norm = torch.cat(
        [stats, norm[None]]
    ).tolist()
    variance = square - mean**2
    return (
        {
            'loss': loss,
            'policy_loss': policy_loss,
            'value_loss': value_loss,
            'entropy': entropy,
            'grad_norm': norm,
            'explained_variance': 1 - (error2 - error**2) / variance if variance > 0 else 0.0,
        },
        games.cpu(),
        stop,
    )


# ----------------------------------------------------------------------------- the run


def read_levels(rank: int, world: int) -> tuple[tuple[np.ndarray, str], tuple[np.ndarray, str]]:
    """Levels to train on and held-out ones, each with a line that says where they are from. Of generated ones, none is among both."""

    def named(name: str, n: int, number: int, without: np.ndarray | None = None):
        return load_levels(
            levels_dir, name, download, n, n_boxes, seed * 2 + number, max_moves, without
        )

    both = split == 'generated' == (eval_only and levels or eval_split)
    if eval_only:
        held_out, line = named(
            levels or eval_split, eval_games, 1, named(split, n_levels, 0)[0] if both else None
        )
        return (held_out, ''), ((held_out, line) if levels else at_most(eval_games, held_out, line))
    if download and rank > 0:
        dist.barrier()  # the first rank downloads
    trained = named(split, n_levels, 0)
    held_out, line = named(eval_split, eval_games, 1, trained[0] if both else None)
    if download and world > 1 and rank == 0:
        dist.barrier()
    if len(held_out) < world:
        raise LevelError(f'{line}: an evaluation by {world} ranks needs at least {world}')
    return trained, at_most(eval_games, held_out, line)


def make_run(config: dict) -> SimpleNamespace:
    """Everything a run is: levels, environment, agent, recurrent state, optimizer, episodes so far and its position."""
    rank, world, device_ = join_ranks(device, threads)
    if device_ == 'cpu':
        keep_memory()
    check_settings(world)
    torch.backends.cudnn.benchmark = (
        not torch.backends.cudnn.deterministic
    )  # shapes do not change; the CPU does not care
    torch.manual_seed(seed)
    dt = str(pick_dtype(dtype, device_))[6:]
    agent = AgentConfig(
        kind,
        recurrent,
        n_layer,
        n_expert,
        n_embd,
        aggregation,
        router_dim,
        radius,
        residual,
        head_dim,
        dt,
        path,
    )
    check_model(
        build_agent, agent, 4, device_
    )  # weights, gradients and Adam's two moments: more than fits?
    floats = (
        unroll * n_layer * n_expert if reuse else 1
    )  # a board's: each cell's outputs wait for the backward
    check_fits(
        4 * n_envs // world * floats * n_embd * CELLS,
        f'n_envs = {n_envs} (unroll = {unroll}, n_embd = {n_embd})',
        device_,
    )
    model = build_agent(agent).to(device_)
    (trained, line), (held_out, held_out_line) = read_levels(rank, world)
    B, make_env = n_envs // world, JumanjiEnv if env == 'jumanji' else SokobanEnv
    optimizer = torch.optim.Adam(
        model.parameters(),
        torch.tensor(learning_rate, device=device_),
        eps=adam_eps,
        fused=True,
        capturable=device_.startswith('cuda'),
    )
    optimizer._warned_capturable_if_run_uncaptured = True  # its first three steps are, on purpose
    return SimpleNamespace(
        rank=rank,
        world=world,
        device=device_,
        config=config,
        model=model,
        optimizer=optimizer,
        sources=(line, held_out_line),
        env=make_env(trained, B, seed=seed, device=device_, first=rank * B),
        held_out=held_out,
        levels_crc=zlib.crc32(trained),
        keys=board_keys(seed, 1, torch.arange(rank * B, rank * B + B, device=device_)),
        count=torch.zeros((), dtype=torch.int64, device=device_),
        state=model.init_state(B),
        start=torch.ones(B, dtype=torch.bool, device=device_),
        graphs={} if graphs and device_ != 'cpu' and env == 'torch' else None,
        running=torch.zeros(n_envs),
        recent=deque(maxlen=1000),
        since=[],
        sums={},
        updates=math.ceil(total_steps / (n_envs * unroll)),
        step=0,
        record={'step': 0, 'env_steps': 0},
        best=-math.inf,
        seconds=0.0,
        logged=0,
        clock=0.0,
    )


def snapshot(run: SimpleNamespace) -> dict:
    """What an evaluation needs: all that the best checkpoint holds. A run goes on from the last one."""
    return {
        'model': run.model.state_dict(),
        'config': run.config,
        **{k: getattr(run, k) for k in POSITION},
    }


def save(run: SimpleNamespace) -> None:
    """Everything, as the last checkpoint; the one before is kept too."""
    boards = run.env.state_dict()
    whole = [gather(x) for x in (*boards.values(), run.start, *run.state)]
    if run.rank == 0:
        rest = {
            'optimizer': run.optimizer.state_dict(),
            'env': dict(zip(boards, whole, strict=False)),
            'start': whole[len(boards)],
            'state': whole[len(boards) + 1 :],
            'count': run.count,
            'levels_crc': run.levels_crc,
            'running': run.running,
            'recent': [list(x) for x in run.recent],
            'since': run.since,
            'sums': run.sums,
            'rng': rng_state(),
        }
        save_checkpoint(snapshot(run) | rest, os.path.join(out_dir, LAST), PREV)


def load(run: SimpleNamespace) -> None:
    """Go on where out_dir's last checkpoint stood; refuse settings that would make it another run. eval_only: the weights alone."""
    rest = (
        ()
        if eval_only
        else (
            'optimizer',
            'env',
            'start',
            'state',
            'count',
            'levels_crc',
            'running',
            'recent',
            'since',
            'sums',
            'rng',
        )
    )
    saved, where = load_run(
        out_dir,
        'train_sokoban.py',
        ('model', *POSITION, *rest),
        MODEL if eval_only else FIXED,
        run.config,
        BEST if best else None,
    )
    load_weights(run.model, saved['model'], where)
    load_position(run, saved, POSITION, where)
    run.loaded, run.env_steps = (
        str(where),
        run.step * saved['config']['n_envs'] * saved['config']['unroll'],
    )
    print0(f'{where}: update {run.step}, {run.env_steps:,} environment steps')
    if eval_only:
        return
    if saved['levels_crc'] != run.levels_crc:
        raise CheckpointError(
            f'{where}: was trained on other levels than {run.sources[0]}: give the same levels_dir, or another out_dir'
        )
    load_optimizer(run.optimizer, saved['optimizer'], where)
    with restoring(where, 'env'):
        run.env.load_state_dict({k: v.chunk(run.world)[run.rank] for k, v in saved['env'].items()})
    with restoring(where, 'start or state'):
        for mine, whole in zip(
            [run.start, *run.state], [saved['start'], *saved['state']], strict=True
        ):
            fill(mine, whole.chunk(run.world)[run.rank])
    with restoring(where, 'count or running'):
        fill(run.count, saved['count'])
        fill(run.running, saved['running'])
    with restoring(where, 'since, recent or sums'):
        run.since = [(float(total), float(solved)) for total, solved in saved['since']]
        run.recent.extend((float(total), float(solved)) for total, solved in saved['recent'])
        run.sums = {str(name): float(value) for name, value in saved['sums'].items()}
    with restoring(where, 'rng'):
        set_rng_state(saved['rng'])


def count_games(run: SimpleNamespace, games: torch.Tensor, stats: dict[str, float]) -> None:
    """Episodes that ended in this rollout, and its statistics, towards the next log line. games (T, 3, B)."""
    for reward, done, solved in games:
        run.running += reward
        for board in done.nonzero().flatten().tolist():
            game = (run.running[board].item(), solved[board].item())
            run.recent.append(game)
            run.since.append(game)
        run.running *= 1 - done
    for k, v in stats.items():
        run.sums[k] = run.sums.get(k, 0.0) + v


def make_record(run: SimpleNamespace) -> dict:
    """A log line: means since the last one, and over the last episodes. Returns and solve rates are None until every board has ended an
    episode (at the time limit at the latest): those that end first are the short ones, which are solved."""
    updates, elapsed = run.step - run.logged, run.seconds - run.clock
    recent, fair = list(run.recent), run.step * unroll >= TIME_LIMIT

    def mean(games: list, k: int) -> float | None:
        return sum(game[k] for game in games) / len(games) if games and fair else None

    record = {
        'step': run.step,
        'env_steps': run.step * n_envs * unroll,
        'episodes': len(run.since),
        'episodic_return': mean(run.since, 0),
        'return_100': mean(recent[-100:], 0),
        'return_1000': mean(recent, 0),
        'solve_rate_100': mean(recent[-100:], 1),
        'solve_rate_1000': mean(recent, 1),
        **{k: v / updates for k, v in run.sums.items()},
        'lr': learning_rate * (1 - (run.step - 1) / run.updates),
        'env_steps_per_s': updates * n_envs * unroll / elapsed,
        'seconds': run.seconds,
    }
    run.since, run.sums, run.logged, run.clock = [], {}, run.step, run.seconds
    return record


def dense_line(record: dict) -> str:
    eta = int(max(0, total_steps - record['env_steps']) / record['env_steps_per_s'])

    def show(key: str, form: str) -> str:
        return 'n/a' if record[key] is None else format(record[key], form)

    return (
        f'{record["env_steps"]:,}/{total_steps:,} | return {show("return_100", ".2f")} ({show("return_1000", ".2f")}) | solved '
        f'{show("solve_rate_100", ".1%")} ({show("solve_rate_1000", ".1%")}) | entropy {record["entropy"]:.3f} | value loss {record["value_loss"]:.3f} | '
        f'expl. var. {record["explained_variance"]:.2f} | norm {record["grad_norm"]:.2f} | {record["env_steps_per_s"]:,.0f} steps/s | '
        f'eta {eta // 3600}:{eta // 60 % 60:02d}:{eta % 60:02d}'
    )


def progress_line(run: SimpleNamespace) -> str:
    """Where the run is between two log lines."""
    rate = (run.step - run.logged) * n_envs * unroll / (run.seconds - run.clock)
    return f'    {run.step * n_envs * unroll:,}/{total_steps:,} | {rate:,.0f} steps/s'


def compile_on_zeros(run: SimpleNamespace) -> None:
    B = n_envs // run.world
    logits, value, _ = run.model(
        torch.zeros(2, B, 10, 10, 2, dtype=torch.uint8, device=run.device),
        run.start.expand(2, B),
        run.state,
    )
    (logits.sum() + value.sum()).backward()
    if fused(run, play_step) is not play_step:
        boards = run.env.state_dict()
        with torch.set_grad_enabled(reuse):
            step = fused(run, play_step)(run.env, logits[0].detach(), run.keys)
        run.env.load_state_dict(boards)
        reward, done, value = (
            x.expand(unroll, B).contiguous()
            for x in (step['reward'], step['done'], value[0].detach())
        )
        fused(run, gae)(reward, done, value, value[0])


def describe(run: SimpleNamespace) -> str:
    params, macs = run.model.num_params(), run.model.macs_per_step()
    return (
        f'torch {torch.__version__}, python {sys.version.split()[0]}, {run.world} x {device_name(run.device)} ({torch.get_num_threads()} threads), '
        f'{run.model.config.dtype} convolutions, fp32 cells\n'
        f'{type(run.model).__name__}: {params["total"] / 1e6:.3f}M parameters ({params["core"] / 1e6:.3f}M core), '
        f"{macs['nominal'] / 1e6:.1f}M multiply-adds a step by the paper's count, {macs['executed'] / 1e6:.1f}M executed\n"
        + (f'training: {run.sources[0]}\n' if run.sources[0] else '')
        + f'evaluation: {run.sources[1]}'
    )


def validate(run: SimpleNamespace) -> None:
    """Greedy evaluation, into the record; before the first update also a random policy's, to compare with."""
    result = evaluate(run.model, run.held_out, run.device)
    run.record |= {f'eval_{k}': v for k, v in result.items()}
    print0(
        f'{run.record["env_steps"]:,}/{total_steps:,} | held-out levels, greedy: solved {result["solve_rate"]:.1%}, return {result["return"]:.2f}, '
        f'{result["steps"]:.0f} steps'
    )
    if run.step == 0:
        result = evaluate(run.model, run.held_out, run.device, seed)
        run.record |= {f'random_{k}': v for k, v in result.items()}
        print0(
            f'a random policy there: solved {result["solve_rate"]:.1%}, return {result["return"]:.2f}'
        )
    elif run.record['eval_return'] > run.best:
        run.best = run.record['eval_return']
        if run.rank == 0:
            save_checkpoint(snapshot(run), os.path.join(out_dir, BEST))


def begin(config: dict) -> tuple[SimpleNamespace, tuple]:
    """The run, new or resumed, and its trackers. Whatever can be wrong with the settings and the levels is found before out_dir is
    touched. ValueError says what."""
    run = make_run(config)
    writes = run.rank == 0 and not eval_only
    if writes:
        prepare_out_dir(out_dir, resume, overwrite, RUN_FILES)
    if resume or eval_only:
        load(run)
    trackers = open_trackers(
        [name for name in ('tensorboard', 'wandb') if writes and config[name]], out_dir, config
    )
    return run, trackers


def train(config: dict) -> int:
    """Returns the exit status: 0 done, 1 the loss was not finite, 128 + signal when told to stop."""
    try:
        run, (track, close) = begin(config)
    except (
        ValueError
    ) as error:  # LevelError, CheckpointError, OutDirError, AgentConfig's, pick_device's
        fail(error)
    print0(describe(run))
    if eval_only:
        name = os.path.splitext(os.path.basename(levels or eval_split))[0]
        about = {'levels': run.sources[1], 'checkpoint': run.loaded, 'env_steps': run.env_steps}
        print0(json.dumps(report(run.model, run.held_out, name, run.device, out_dir, about)))
        return 0
    if compile and path != 'plain':
        run.model.config.path = 'compiled'
        if not compiles(run.model, lambda: compile_on_zeros(run)):
            run.model.config.path = 'fast'
    log = None
    if run.rank == 0:
        write_config(config, out_dir, run.device)
        log = JsonlLog(
            os.path.join(out_dir, 'log.jsonl'), resume_step=run.step - 1 if resume else None
        )
    stopper, stop, status = Stopper(), False, 0
    due_to_print = every()
    while True:
        evaluates = run.step % eval_interval == 0 or run.step == run.updates
        if evaluates or run.step % log_interval == 0:
            if run.step > run.logged:
                run.record = make_record(run)
                print0(dense_line(run.record))
                due_to_print(said=True)
            if evaluates:
                validate(run)
            if run.rank == 0:
                log.write(run.record)
                track(run.record)
        if run.step >= run.updates or stop:
            break
        start = time.perf_counter()
        stats, games, stop = update(run, stopper.signal is not None)
        due = (run.step + 1) % eval_interval == 0 or run.step + 1 == run.updates or stop
        if (
            not all(math.isfinite(x) for x in stats.values())
            or due
            and not all(p.isfinite().all() for p in run.model.parameters())
        ):
            kept = LAST if os.path.exists(os.path.join(out_dir, LAST)) else 'none yet'
            print0(
                f'error: update {run.step + 1}: loss {stats["loss"]}, gradient norm {stats["grad_norm"]}, or a weight, is not finite: stopped, '
                f'nothing saved of it; last good checkpoint in {out_dir}: {kept}. Lower the learning rate'
            )
            status = 1
            break
        count_games(run, games, stats)
        run.step, run.seconds = run.step + 1, run.seconds + time.perf_counter() - start
        if due_to_print():
            print0(progress_line(run))
        if due:
            save(run)  # before the log line and the evaluation: one that dies loses nothing
    stopper.restore()
    if stop and run.step < run.updates:
        print0(f'stopped after update {run.step}, saved in {out_dir}: --resume=True goes on')
        status = 128 + (stopper.signal or 15)
    elif status == 0:
        print0(
            f'done: {run.step * n_envs * unroll:,} environment steps in {run.seconds:.0f} s, best held-out return {run.best:.2f}; {out_dir}/{LAST}'
        )
    if run.rank == 0:
        log.close()
        close()
        if plot and status == 0:
            title = f'{kind}, {"recurrent" if recurrent else "not recurrent"}, L = {n_layer}, E = {n_expert}, d = {n_embd}'
            print0(f'learning curve: {plot_log(out_dir, title)}')
        release(out_dir)
    if run.world > 1:
        dist.barrier()  # ranks leave together; one that fails leaves at once
        dist.destroy_process_group()
    return status


def main() -> int:
    config = configure(globals())
    globals().update(restarted(out_dir))
    try:
        return train(config)
    except (RuntimeError, MemoryError) as error:  # no memory, a dead rank; checkpoints stay whole
        fail(last_words(error, out_dir, 'fewer n_envs, or --reuse=False'))


if __name__ == '__main__':
    run_script(
        main, 'interrupted: the last checkpoint stays as it was'
    )  # before the first update, or the second ctrl-C

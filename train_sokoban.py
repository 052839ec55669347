"""
Train a Sokoban agent, a ConvLSTM or ConvGLU actor-critic, by advantage actor-critic with GAE.

$ make demo-sokoban                             # a CPU, ten minutes: a learning curve, two GIFs
The paper's small budget at L = 4, on Boxoban's unfiltered-train (fetched into data/boxoban):
$ python train_sokoban.py config/sokoban_small_L4.py --download=True
Four GPUs, the environments split over them; and its non-recurrent twin:
$ torchrun --standalone --nproc_per_node=4 train_sokoban.py config/sokoban_small_L4.py
$ python train_sokoban.py config/sokoban_small_L4.py --recurrent=False --out_dir=out/small_L4_ff
Go on after a crash, ctrl-C or SIGTERM; the test split's solve rate, two GIFs:
$ python train_sokoban.py config/sokoban_small_L4.py --resume=True
$ python train_sokoban.py config/sokoban_small_L4.py --eval_only=True --levels=unfiltered-test

Writes into out_dir: config.json, log.jsonl (one object a line), ckpt_last.pt, ckpt_prev.pt,
ckpt_best.pt; with eval_only eval_*.json and eval_*.gif. On the CPU a resumed run is bit-equal to
one that was never stopped. Any number of ranks plays the same levels.
Shape letters: B boards of this rank, T steps of an unroll.
"""

import json
import math
import os
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

# before torch: how threads wait, what ctrl-C does
from configurator import configure, every, fail, run_script

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

import checkpoint
from checkpoint import BEST, fill, print0, restoring
from convlstm import Agent, AgentConfig, build_agent
from figures import open_trackers
from kernels import compiled, graphed
from play_sokoban import evaluate, plot_log, report
from muon import gather, sum_over_ranks
from sokoban import CELLS, TIME_LIMIT, JumanjiEnv, LevelError, SokobanEnv
from sokoban import at_most, board_keys, draw_by, load_levels

# -----------------------------------------------------------------------------
# fmt: off
# I/O
out_dir = 'out/sokoban'        # everything a run writes goes here
init_from = ''                 # begin with the weights of this folder: another run's
resume = False                 # go on from out_dir's last checkpoint
overwrite = False              # replace a run that is in out_dir
eval_interval = 1000           # updates between greedy evaluations and checkpoints; 640,000 steps
log_interval = 50              # updates between lines, printed and in log.jsonl; 32,000 steps
eval_only = False              # evaluate out_dir's last checkpoint on `levels` and stop
levels = ''                    # of eval_only: a split or a file; '': eval_games of eval_split
best = False                   # of eval_only: the best checkpoint instead of the last
plot = False                   # draw out_dir/curve.png at the end (matplotlib)
tensorboard = False            # also write TensorBoard files into out_dir
wandb = False                  # also log to Weights & Biases
wandb_project = 'parallel-experts'   # its project there
# levels and environment
levels_dir = ''                # folder of Boxoban's levels, as text or packed; '': data/boxoban
split = 'unfiltered-train'     # trained on; 'generated': our generator's, none of them held out too
eval_split = 'unfiltered-valid'   # evaluated on every eval_interval
eval_games = 512               # the first so many levels of it
download = False               # fetch the splits into levels_dir where they are not there
n_levels = 100000              # of the generator, for training
n_boxes = 4                    # of the generator, 1 to 4: fewer are easier
max_moves = 120                # of the generator: of a level's known solution; fewer are easier
env = 'torch'                  # 'torch', or 'jumanji' (the original, for checking: slower)
n_envs = 32                    # boards, over all ranks
# model (convlstm.py has the equations)
arch = 'convlstm'              # or 'convglu'
recurrent = True               # False: nothing is carried to the next step
n_layer = 4                    # L, depth levels
n_expert = 1                   # E, experts a level
n_embd = 64                    # D, channels of an expert
aggregation = 'sqrt_sum'       # 'sqrt_sum', 'mean', 'softmax_mean' or 'softmax_l2'
router_dim = 64                # width of the router's queries and keys (softmax aggregations)
radius = -1                    # experts that an expert hears on a ring, besides itself; -1: all
residual = 'expert'            # convglu: each expert adds s (the paper's); 'shared': A(h) does
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
reuse = True                   # the rollout's forward is the update's; False: a second one
seed = 1337                    # of weights, levels and actions
device = 'auto'                # 'auto': cuda if there is one; or 'cpu', 'cuda', 'cuda:1'
dtype = 'auto'                 # of convolutions: 'float32', 'bfloat16'; 'auto': bfloat16 where fast
compile = True                 # torch.compile cells, on a GPU the environment too; or says why not
graphs = True                  # on a GPU: an update as CUDA graphs, from the fourth on
path = 'fast'                  # 'fast' or 'plain' (the equations, for checking)
threads = 0                    # CPU threads; 0: torch's choice
# fmt: on
RANGES = {'gamma': (0, 1), 'gae_lambda': (0, 1), 'env': ['torch', 'jumanji']}
RANGES |= {'path': ['fast', 'plain']}  # compile is a setting of its own
ONE = 'eval_interval log_interval eval_games n_levels n_envs total_steps unroll'
RANGES |= dict.fromkeys(ONE.split(), (1, math.inf))
ZERO = 'entropy_coef value_coef learning_rate adam_eps grad_clip threads seed'
RANGES |= dict.fromkeys(ZERO.split(), (0, math.inf))
RANGES['threads'] = (0, 1024)  # OpenMP dies of too many
# -----------------------------------------------------------------------------

# settings that make an agent, those that a resumed run keeps; what a run is resumed from
MODEL = ('arch', 'recurrent', 'n_layer', 'n_expert', 'n_embd', 'aggregation', 'router_dim')
MODEL += ('radius', 'residual', 'head_dim')
FIXED = ('split', 'n_levels', 'n_boxes', 'max_moves', 'env', 'n_envs', 'unroll', 'seed', *MODEL)
POSITION = ('step', 'record', 'best', 'seconds', 'logged', 'clock', 'recent', 'since', 'sums')
COUNTED = ('count', 'levels_crc', 'running')


@dataclass
class Run:
    """What the functions below read and change."""

    rank: int
    world: int
    device: str
    config: dict
    model: Agent
    optimizer: torch.optim.Optimizer
    env: SokobanEnv | JumanjiEnv
    held_out: np.ndarray  # packed levels (n, 17)
    sources: tuple[str, str]  # where training and held-out levels are from
    levels_crc: int  # of the training levels
    keys: torch.Tensor  # (B,) of the boards' chance
    state: tuple[torch.Tensor, ...]  # the agent's, (B, ...) each
    start: torch.Tensor  # (B,) whether an episode begins
    count: torch.Tensor  # steps that each board has played, on the device
    graphs: dict | None  # CUDA graphs, or None
    updates: int  # of the whole run
    running: torch.Tensor  # (n_envs,) returns so far of the episodes that go on
    recent: list = field(default_factory=list)  # (return, solved) of the last 1,000 that ended
    since: list = field(default_factory=list)  # and of those since the last log line
    sums: dict = field(default_factory=dict)  # of the updates' statistics since then
    # position; logged and clock are the last log line's
    step: int = 0
    record: dict = field(default_factory=lambda: {'step': 0, 'env_steps': 0})
    best: float = -math.inf
    seconds: float = 0.0
    logged: int = 0
    clock: float = 0.0
    lock: object = None  # of out_dir, while the run is at work in it


# ---- levels, environment, model, optimizer ----


def read_levels(rank: int, world: int) -> tuple[tuple[np.ndarray, str], tuple[np.ndarray, str]]:
    """Levels to train on and held-out ones, each with a line that says where they are from. Of
    generated ones, none is among both. LevelError."""
    held = eval_only and levels or eval_split
    both = split == 'generated' == held
    trained, line = np.empty((0, 17), np.uint8), ''
    if download and rank > 0:
        dist.barrier()  # the first rank downloads
    if both or not eval_only:
        made = n_levels, n_boxes, 2 * seed, max_moves
        trained, line = load_levels(levels_dir, split, download, made)
    made = eval_games, n_boxes, 2 * seed + 1, max_moves, trained if both else ()
    held_out, held_line = load_levels(levels_dir, held, download, made)
    if download and world > 1 and rank == 0:
        dist.barrier()
    if not levels:
        held_out, held_line = at_most(eval_games, held_out, held_line)
    if len(held_out) < world:
        raise LevelError(f'{held_line}: {world} ranks need at least {world}')
    return (trained, line), (held_out, held_line)


def make_run(config: dict) -> Run:
    """A run that has not begun. ValueError for what is wrong with settings or levels, before
    anything large is made."""
    rank, world, where = checkpoint.join_ranks(device, threads)
    if where == 'cpu':
        checkpoint.keep_memory()
    if eval_only and world > 1:
        raise ValueError('eval_only runs as one process: start it without torchrun')
    if (levels or best) and not eval_only:
        raise ValueError('levels and best are settings of --eval_only=True; a run trains on split')
    if n_envs % world:
        raise ValueError(f'n_envs = {n_envs}: must be a multiple of the ranks, {world}')
    checkpoint.need_packages(matplotlib=plot, PIL=eval_only, tensorboard=tensorboard, wandb=wandb)
    # shapes do not change; the CPU does not care
    torch.backends.cudnn.benchmark = not torch.backends.cudnn.deterministic
    torch.manual_seed(seed)
    B = n_envs // world
    dt = str(checkpoint.pick_dtype(dtype, where)).removeprefix('torch.')
    agent = AgentConfig(**{name: config[name] for name in MODEL}, dtype=dt, path=path)
    # weights, gradients and Adam's two moments; each cell's outputs wait for the backward
    checkpoint.check_model(build_agent, agent, 4, where)
    floats = B * n_embd * CELLS * (unroll * n_layer * n_expert if reuse else 1)
    what = f'n_envs = {n_envs} (unroll = {unroll}, n_embd = {n_embd})'
    checkpoint.check_fits(4 * floats, what, where)
    model = build_agent(agent)
    if init_from:
        checkpoint.init_from(model, init_from, resume or eval_only)
    model = model.to(where)
    (trained, line), (held_out, held_out_line) = read_levels(rank, world)
    make_env = JumanjiEnv if env == 'jumanji' else SokobanEnv
    lr = torch.tensor(learning_rate, device=where)  # on the device: a CUDA graph reads it there
    on_gpu = where != 'cpu'
    adam = torch.optim.Adam(model.parameters(), lr, eps=adam_eps, fused=True, capturable=on_gpu)
    adam._warned_capturable_if_run_uncaptured = True  # its first three steps are, on purpose
    return Run(
        rank,
        world,
        where,
        config,
        model,
        adam,
        env=make_env(trained, B, seed=seed, device=where, first=rank * B) if len(trained) else None,
        held_out=held_out,
        sources=(line, held_out_line),
        levels_crc=zlib.crc32(trained),
        keys=board_keys(seed, 1, torch.arange(rank * B, rank * B + B, device=where)),
        state=model.init_state(B),
        start=torch.ones(B, dtype=torch.bool, device=where),
        count=torch.zeros((), dtype=torch.int64, device=where),
        graphs={} if graphs and on_gpu and env == 'torch' else None,
        updates=math.ceil(total_steps / (n_envs * unroll)),
        running=torch.zeros(n_envs),
    )


def fused(run: Run, function: Callable) -> Callable:
    """function compiled, where path 'compiled' runs on a GPU: there a step costs by its kernels. On
    a CPU it would win nothing."""
    wins = run.model.config.path == 'compiled' and run.device != 'cpu' and env == 'torch'
    return compiled(function) if wins else function


def warm_up(run: Run) -> None:
    """Before any clock runs a rollout and its backward, undone, for what they compile."""
    if not compile or path == 'plain':
        return
    run.model.config.path = 'compiled'
    live = (run.start, run.count, *run.state)
    boards, kept = run.env.state_dict(), [x.clone() for x in live]
    if not checkpoint.compiles(run.model, lambda: backward(run, rollout(run))):
        run.model.config.path = 'fast'
    run.env.load_state_dict(boards)
    for x, old in zip(live, kept, strict=True):
        x.copy_(old)


# ---- the rollout ----


def sample(logits: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Actions (B,) from logits (B, 4) by inversion, with u (B,) of draw()."""
    u = (u >> 29).to(torch.float32) / 2**24  # [0, 1)
    return (u[:, None] >= F.softmax(logits.float(), -1).cumsum(-1)[:, :-1]).sum(-1)


def play_step(boards: SokobanEnv, logits: torch.Tensor, u: torch.Tensor) -> dict[str, torch.Tensor]:
    """One step of all boards, with actions drawn by u (B,) from logits (B, 4): what it gave, and
    the observation that follows."""
    action = sample(logits, u)
    reward, done, solved = boards.step(action)
    gave = {'action': action, 'reward': reward, 'done': done, 'solved': solved}
    return gave | {'next': boards.observe()}


def rollout(run: Run) -> dict[str, torch.Tensor]:
    """`unroll` steps of all boards, (T, B) each: what was seen, done and gained. With reuse, logits
    and values keep their graph: it is the update's. Else that makes a second forward."""
    play, steps = fused(run, play_step), []
    times = run.count + torch.arange(unroll, device=run.device)[:, None]  # (T, 1)
    chance = draw_by(run.keys, times)  # (T, B)
    run.count += unroll
    with torch.set_grad_enabled(reuse):
        w, state = run.model.prepare(), tuple(x.detach() for x in run.state)
        obs, start = run.env.observe(), run.start.clone()
        for u in chance.unbind():
            logits, value, state = run.model.act(w, obs, start, state)
            step = play(run.env, logits.detach(), u)
            following = step.pop('next')
            steps.append(step | {'logits': logits, 'value': value, 'obs': obs, 'start': start})
            obs, start = following, step['done']
        run.start.copy_(start)
        with torch.no_grad():  # the value of what comes next
            _, last, _ = run.model.act(w, obs, start, state)
    batch = {name: torch.stack([step[name] for step in steps]) for name in steps[0]}
    return batch | {'last': last, 'state': [x.detach() for x in state]}


# ---- the loss ----


def gae(
    reward: torch.Tensor, done: torch.Tensor, value: torch.Tensor, last: torch.Tensor
) -> torch.Tensor:
    """Generalised advantage estimates (T, B): sum over k of (gamma lambda)^k delta_{t+k} up to the
    episode's end, delta_t = r_t + gamma V_{t+1} - V_t (Schulman et al. 2016, equation 16).

    reward, done, value (T, B); last (B,), the value after step T. Every end is a termination, the
    time limit too (Jumanji's discount is 0 there): no value is carried over it."""
    goes_on = 1 - done.to(value.dtype)
    carried = gamma * gae_lambda * goes_on
    following = torch.cat([value[1:], last[None]])
    delta = reward + gamma * goes_on * following - value
    advantage, out = torch.zeros_like(last), []
    for t in reversed(range(len(reward))):
        advantage = delta[t] + carried[t] * advantage
        out.append(advantage)
    return torch.stack(out[::-1])


def backward(run: Run, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Gradients of the A2C loss over the unroll, this rank's share of the mean. -> loss, policy
    loss, value loss, entropy, and the sums for the explained variance: (8,)."""
    if reuse:
        logits, value = batch['logits'], batch['value']
    else:
        logits, value, _ = run.model(batch['obs'], batch['start'], tuple(run.state))
    advantage = fused(run, gae)(batch['reward'], batch['done'], value.detach(), batch['last'])
    target = advantage + value.detach()
    log_pi = F.log_softmax(logits.float(), -1)  # (T, B, 4)
    chosen = log_pi.gather(-1, batch['action'][..., None]).squeeze(-1)  # (T, B)
    policy_loss = -(chosen * advantage).mean()
    entropy = -(log_pi.exp() * log_pi).sum(-1).mean()
    value_loss = (value - target).square().mean()
    loss = policy_loss + value_coef * value_loss - entropy_coef * entropy
    (loss / run.world).backward()
    for kept, new in zip(run.state, batch['state'], strict=True):
        kept.copy_(new)  # not before: the graph begins with the old one
    moments = [target.mean(), target.square().mean(), advantage.mean(), advantage.square().mean()]
    return torch.stack([loss, policy_loss, value_loss, entropy, *moments]).detach() / run.world


def apply(run: Run) -> torch.Tensor:
    """Clip, Adam; -> the gradient norm."""
    norm = torch.nn.utils.clip_grad_norm_(run.model.parameters(), grad_clip or math.inf)
    run.optimizer.step()
    return norm


def update(run: Run, stop: bool) -> tuple[dict[str, float], torch.Tensor, bool]:
    """One rollout and one update. -> its statistics, (T, 3, n_envs) rewards, ends and solved ends
    (on rank 0 and the CPU: of all ranks' boards), and whether any rank was told to stop."""
    if not run.graphs or run.graphs['backward'][1] is None:
        run.optimizer.zero_grad(set_to_none=True)  # a captured backward writes its own anew
    for group in run.optimizer.param_groups:
        group['lr'].fill_(learning_rate * (1 - run.step / run.updates))
    batch = graphed(run.graphs, 'rollout', rollout, run)
    sums = graphed(run.graphs, 'backward', backward, run, batch)
    sums = sum_over_ranks(run.model, torch.cat([sums, sums.new_full((1,), stop)]))
    norm = graphed(run.graphs, 'apply', apply, run)
    games = torch.stack([batch['reward'], batch['done'].float(), batch['solved'].float()], 1)
    # the only wait for the device
    *losses, mean, square, error, error2, stop, norm = torch.cat([sums, norm[None]]).tolist()
    stats = dict(zip(('loss', 'policy_loss', 'value_loss', 'entropy'), losses, strict=True))
    variance = square - mean**2
    explained = 1 - (error2 - error**2) / variance if variance > 0 else 0.0
    stats |= {'grad_norm': norm, 'explained_variance': explained}
    return stats, gather(games, 2), stop > 0


# ---- the log ----


def count_games(run: Run, games: torch.Tensor, stats: dict[str, float]) -> None:
    """Episodes that ended in this rollout, (T, 3, n_envs) on rank 0, and its statistics, towards
    the next log line."""
    for name, x in stats.items():
        run.sums[name] = run.sums.get(name, 0.0) + x
    if run.rank > 0:
        return
    ended, running = [], run.running.numpy()  # in numpy: torch's calls cost four times as much
    for reward, done, solved in games.numpy():
        running += reward
        ends = done > 0
        ended += zip(running[ends].tolist(), solved[ends].tolist(), strict=True)
        running[ends] = 0
    run.since += ended
    run.recent = (run.recent + ended)[-1000:]


def make_record(run: Run) -> dict:
    """A log line: means since the last one, and over the last episodes. Returns and solve rates are
    None until every board has ended an episode (at the time limit at the latest): those that end
    first are the short ones, which are solved."""
    updates, elapsed = run.step - run.logged, run.seconds - run.clock
    recent, fair = run.recent, run.step * unroll >= TIME_LIMIT

    def mean(games, k):
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
        **{name: x / updates for name, x in run.sums.items()},
        'lr': learning_rate * (1 - (run.step - 1) / run.updates),
        'env_steps_per_s': updates * n_envs * unroll / elapsed,
        'seconds': run.seconds,
    }
    run.since, run.sums, run.logged, run.clock = [], {}, run.step, run.seconds
    return record


def dense_line(r: dict) -> str:
    eta = int(max(0, total_steps - r['env_steps']) / r['env_steps_per_s'])
    shown = {name: 'n/a' if x is None else f'{x:.2f}' for name, x in r.items()}
    solved = ['n/a' if r[k] is None else f'{r[k]:.1%}' for k in r if k.startswith('solve')]
    return (
        f'{r["env_steps"]:,}/{total_steps:,} | return {shown["return_100"]} '
        f'({shown["return_1000"]}) | solved {solved[0]} ({solved[1]}) | '
        f'entropy {r["entropy"]:.3f} | value loss {r["value_loss"]:.3f} | '
        f'expl. var. {shown["explained_variance"]} | norm {shown["grad_norm"]} | '
        f'{r["env_steps_per_s"]:,.0f} steps/s | eta {timedelta(seconds=eta)}'
    )


def describe(run: Run) -> str:
    params, macs = run.model.num_params(), run.model.macs_per_step()
    return (
        f'{checkpoint.machine(run)}, {run.model.config.dtype} convolutions, fp32 cells\n'
        f'{type(run.model).__name__}: {params["total"] / 1e6:.3f}M parameters '
        f'({params["core"] / 1e6:.3f}M core), {macs["nominal"] / 1e6:.1f}M multiply-adds a step '
        f"by the paper's count, {macs['executed'] / 1e6:.1f}M executed\n"
        f'training: {run.sources[0] or "none"}\nevaluation: {run.sources[1]}'
    )


# ---- checkpoints ----


def save(run: Run, best: bool = False) -> None:
    """The last checkpoint holds all; the best what evaluation needs."""
    parts = {name: getattr(run, name) for name in POSITION}
    if not best:
        parts |= {'env': {name: gather(x) for name, x in run.env.state_dict().items()}}
        parts |= {'start': gather(run.start), 'state': [gather(x) for x in run.state]}
        parts |= {name: getattr(run, name) for name in COUNTED}
    checkpoint.save_run(run, parts, None if best else [run.optimizer])


def load(run: Run) -> dict[str, object]:
    """Go on where out_dir's last checkpoint stood; refuse settings that would make it another run.
    eval_only: the weights alone. -> its path and environment steps. CheckpointError."""
    rest = () if eval_only else ('optimizers', 'rng', 'env', 'start', 'state', *COUNTED)
    needed = ('model', *POSITION, *rest)
    fixed, file = (MODEL if eval_only else FIXED), (BEST if best else None)
    saved, where = checkpoint.load_run(out_dir, 'train_sokoban.py', needed, fixed, run.config, file)
    checkpoint.restore(run, POSITION, [] if eval_only else [run.optimizer], saved, where)
    env_steps = run.step * saved['config']['n_envs'] * saved['config']['unroll']
    print0(f'{where}: update {run.step}, {env_steps:,} environment steps')
    about = {'checkpoint': str(where), 'env_steps': env_steps}
    if eval_only:
        return about
    if saved['levels_crc'] != run.levels_crc:
        words = f'was trained on other levels than {run.sources[0]}: give the same levels_dir'
        raise checkpoint.CheckpointError(f'{where}: {words}, or another out_dir')

    def mine(whole):
        return whole.chunk(run.world)[run.rank]

    with restoring(where, 'env, start, state, count or running'):
        run.env.load_state_dict({name: mine(x) for name, x in saved['env'].items()})
        whole = [saved['start'], *saved['state']]
        for x, part in zip([run.start, *run.state], map(mine, whole), strict=True):
            fill(x, part)
        fill(run.count, saved['count'])
        fill(run.running, saved['running'])
    return about


# ---- the loop ----


def validate(run: Run) -> None:
    """Greedy evaluation, into the record; before the first update also a random policy's, to
    compare with. The best one's checkpoint."""
    each = [('eval', None), ('random', seed)] if run.step == 0 else [('eval', None)]
    for name, chance in each:
        result = evaluate(run.model, run.held_out, run.device, chance)
        run.record |= {f'{name}_{key}': x for key, x in result.items()}
        how = 'greedy' if chance is None else 'a random policy'
        print0(
            f'{run.record["env_steps"]:,}/{total_steps:,} | held-out levels, {how}: '
            f'solved {result["solve_rate"]:.1%}, return {result["return"]:.2f}, '
            f'{result["steps"]:.0f} steps'
        )
    if run.step > 0 and run.record['eval_return'] > run.best:
        run.best = run.record['eval_return']
        save(run, best=True)


def loop(run: Run, writes: list[Callable[[dict], object]]) -> int:
    """Updates, evaluations, log lines, checkpoints -> the exit status: 0 done, 1 the loss was not
    finite, 128 + signal when told to stop."""
    stopper, stop, due_to_print = checkpoint.Stopper(), False, every()
    while True:
        evaluates = run.step % eval_interval == 0 or run.step == run.updates
        if evaluates or run.step % log_interval == 0:
            if run.step > run.logged:
                run.record = make_record(run)
                print0(dense_line(run.record))
                due_to_print(said=True)
            if evaluates:
                validate(run)
            for write in writes:
                write(run.record)
        if run.step >= run.updates or stop:
            break
        start = time.perf_counter()
        stats, games, stop = update(run, stopper.signal is not None)
        due = (run.step + 1) % eval_interval == 0 or run.step + 1 == run.updates or stop
        if not checkpoint.finite(run, due, stats['loss'], stats['grad_norm']):
            stopper.restore()
            return 1
        count_games(run, games, stats)
        run.step, run.seconds = run.step + 1, run.seconds + time.perf_counter() - start
        if due_to_print():
            rate = (run.step - run.logged) * n_envs * unroll / (run.seconds - run.clock)
            print0(f'    {run.step * n_envs * unroll:,}/{total_steps:,} | {rate:,.0f} steps/s')
        if due:
            save(run)  # before the log line and the evaluation: one that dies loses nothing
    done = f'{run.step * n_envs * unroll:,} environment steps in {run.seconds:.0f} s'
    done += f', best held-out return {run.best:.2f}'
    return checkpoint.ended(run, stopper, run.updates, done)


def train(config: dict) -> int:
    """A run from beginning to end, or its evaluation -> the exit status."""
    try:
        run = make_run(config)  # finds all mistakes in settings and levels
        about = load(run) if resume or eval_only else {}
        if run.rank == 0 and not eval_only:
            run.lock = checkpoint.prepare_out_dir(out_dir, resume, overwrite)
    except ValueError as error:  # LevelError, CheckpointError, AgentConfig's
        fail(error)
    print0(describe(run))
    if eval_only:
        name = os.path.splitext(os.path.basename(levels or eval_split))[0]
        about |= {'levels': run.sources[1]}
        record = report(run.model, run.held_out, name, run.device, out_dir, about)
        print0(json.dumps(record))
        track, close = open_trackers(config, tensorboard, wandb_project if wandb else '')
        track({'step': run.step, **record})
        close()
        return 0
    warm_up(run)
    if run.rank > 0:
        status = loop(run, [])
    else:
        track, close = open_trackers(config, tensorboard, wandb_project if wandb else '')
        status = loop(run, [checkpoint.open_log(run, resume), track])
        close()
        if plot and status == 0:
            title = f'{type(run.model).__name__}, L = {n_layer}, E = {n_expert}, d = {n_embd}'
            how = 'recurrent' if recurrent else 'not recurrent'
            print(f'learning curve: {plot_log(out_dir, f"{how} {title}")}')
    checkpoint.leave(run)
    return status


def main() -> int:
    config = configure(globals())
    globals().update(checkpoint.restarted(out_dir))
    return train(config)


if __name__ == '__main__':
    # interrupted before the first update, or by the second ctrl-C
    stays = 'interrupted: the last checkpoint stays as it was'
    run_script(main, stays, checkpoint.last_words('fewer n_envs, or --reuse=False', globals()))

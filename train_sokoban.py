"""
Train a Sokoban agent, a ConvLSTM or ConvGLU actor-critic, by advantage actor-critic with GAE.

$ make demo-sokoban                             # a CPU, six minutes: a learning curve, two GIFs
The paper's small budget at L = 4; on after ctrl-C or a crash; the test split's solve rate, GIFs:
$ python train_sokoban.py config/sokoban_small_L4.py --download=True
$ python train_sokoban.py config/sokoban_small_L4.py --resume=True
$ python train_sokoban.py config/sokoban_small_L4.py --eval_only=True --levels=unfiltered-test

Writes into out_dir: config.json, log.jsonl, ckpt_last.pt, ckpt_prev.pt, ckpt_best.pt; with
eval_only eval_*.json and eval_*.gif. On the CPU a resumed run is bit-equal to one that was never
stopped. Any number of ranks plays the same levels.
Shape letters: B boards of this rank, T steps of an unroll.
"""

import copy
import json
import math
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta

# before torch: how threads wait, what ctrl-C does
from configurator import configure, every, fail, run_script

import numpy as np
import torch
import torch.nn.functional as F

import common
import figures
from common import fill, gather, open_trackers, print0, restoring, sum_over_ranks
from convlstm import Agent, AgentConfig, build_agent, load_agent
from kernels import compiled, graphed
from sokoban import ACTION_STREAM, CELLS, RANDOM, TIME_LIMIT, JumanjiEnv, SokobanEnv, board_keys
from sokoban import evaluate, load_level_sets, random_bits, sample_actions, write_evaluation

# -----------------------------------------------------------------------------
# fmt: off
# I/O
out_dir = 'out/sokoban'        # everything a run writes goes here
init_from = ''                 # begin with the weights of this folder: a run's, or an export's
resume = False                 # go on from out_dir's last checkpoint
overwrite = False              # replace a run that is in out_dir
eval_interval = 1000           # updates between greedy evaluations and checkpoints; 640,000 steps
log_interval = 50              # updates between lines, printed and in log.jsonl; 32,000 steps
eval_only = False              # evaluate out_dir's last checkpoint on `levels` and stop
levels = ''                    # of eval_only: a split or a file; '': eval_games of eval_split
best = False                   # of eval_only: the best checkpoint, if there is one, not the last
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
threads = 0                    # CPU threads; 0: one or all, measured at the start, kept on resume
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


@dataclass
class Run:
    """What the functions below read and change."""

    rank: int
    world: int
    device: str
    config: dict
    model: Agent
    optimizer: torch.optim.Optimizer
    held_out: np.ndarray  # packed levels (n, 17)
    env: SokobanEnv | JumanjiEnv
    keys: torch.Tensor  # (B,) of the boards' chance
    state: tuple[torch.Tensor, ...]  # the agent's, (B, ...) each
    count: torch.Tensor  # steps that each board has played, on the device
    graphs: dict | None  # CUDA graphs, or None
    updates: int  # of the whole run
    levels_crc: int  # of the training levels
    played: list = field(default_factory=list)  # (T, 3, B) of updates whose games are not read yet
    recent: list = field(default_factory=list)  # (return, solved) of the last 1,000 that ended
    since: list = field(default_factory=list)  # and of those since the last log line
    sums: dict = field(default_factory=dict)  # of the updates' statistics since then
    step: int = 0
    record: dict = field(default_factory=lambda: {'step': 0, 'env_steps': 0})
    best: float = -math.inf
    seconds: float = 0.0
    logged: int = 0  # step and seconds of the last log line
    clock: float = 0.0
    lock: object = None  # of out_dir, while the run is at work in it


# ---- levels, environment, model, optimizer ----


def make_run(config: dict) -> Run:
    """A run that has not begun. ValueError for what is wrong with settings or levels."""
    rank, world, where = common.join_ranks(device, threads)
    if where == 'cpu':
        common.keep_memory()
    if levels or best:
        raise ValueError('levels and best are settings of --eval_only=True; a run trains on split')
    if n_envs % world:
        raise ValueError(f'n_envs = {n_envs}: expected a multiple of the {world} ranks')
    if download and world > 1:
        raise ValueError('download = True: fetch the levels before, by sokoban.py')
    common.need_packages(matplotlib=plot, tensorboard=tensorboard, wandb=wandb)
    torch.backends.cudnn.benchmark = not torch.backends.cudnn.deterministic  # shapes stay
    torch.manual_seed(seed)
    B = n_envs // world
    dt = str(common.pick_dtype(dtype, where)).removeprefix('torch.')
    agent = AgentConfig(**{name: config[name] for name in MODEL}, dtype=dt, path=path)
    # weights, gradients and Adam's two moments; each cell's outputs wait for the backward
    common.check_model(build_agent, agent, 4, where)
    size = 4 * B * n_embd * CELLS * (unroll * n_layer * n_expert if reuse else 1)
    common.check_fits(size, f'n_envs = {n_envs} (unroll = {unroll})', where)
    model = build_agent(agent)
    if init_from:
        common.init_from(model, init_from, resume)
    model = model.to(where)
    (trained, line), (held_out, held_out_line) = load_level_sets(config)
    print0(f'training: {line}\nevaluation: {held_out_line}')
    make_env, on_gpu = JumanjiEnv if env == 'jumanji' else SokobanEnv, where != 'cpu'
    boards = make_env(trained, B, seed=seed, device=where, first_board=rank * B)
    lr = torch.tensor(learning_rate, device=where)  # on the device: a CUDA graph reads it there
    adam = torch.optim.Adam(model.parameters(), lr, eps=adam_eps, fused=True, capturable=on_gpu)
    adam._warned_capturable_if_run_uncaptured = True  # its first three steps are, on purpose
    updates = math.ceil(total_steps / (n_envs * unroll))
    count = torch.zeros((), dtype=torch.int64, device=where)
    playing = boards, board_keys(seed, ACTION_STREAM, boards.board), model.init_state(B), count
    rest = {} if graphs and on_gpu and env == 'torch' else None, updates, zlib.crc32(trained)
    return Run(rank, world, where, config, model, adam, held_out, *playing, *rest)


def fused(run: Run, function: Callable) -> Callable:
    """function, compiled on a GPU if cells are: a step costs by its kernels there."""
    wins = run.model.config.path == 'compiled' and run.device != 'cpu' and env == 'torch'
    return compiled(function) if wins else function


def trial_steps(run: Run, T: int) -> None:
    """Run T steps of the agent on the current boards, and their backward, to time them."""
    w, state, total = run.model.prepare(), tuple(x.clone() for x in run.state), 0
    obs, start = run.env.observe(), run.env.steps == 0
    for _ in range(T):
        logits, value, state = run.model.act(w, obs, start, state)
        total = total + logits.sum() + value.sum()
    total.backward()
    run.model.zero_grad(set_to_none=True)


def warm_up(run: Run) -> None:
    """Before any clock runs, a rollout of copies and its backward, for what they compile."""
    if compile and path == 'fast':
        run.model.config.path = 'compiled'
        trial = replace(run, env=copy.deepcopy(run.env), count=run.count.clone())
        trial.state = [x.clone() for x in run.state]
        if not common.compiles(run.model, lambda: backward(trial, rollout(trial))):
            run.model.config.path = 'fast'


# ---- the rollout ----


def play_step(boards: SokobanEnv, logits: torch.Tensor, u: torch.Tensor) -> dict[str, torch.Tensor]:
    """One step of all boards, with actions drawn by u (B,) from logits (B, 4): what it gave, the
    episode's return so far, and the observation that follows."""
    action = sample_actions(logits, u)
    reward, done, solved = boards.move(action)
    gave = {'action': action, 'reward': reward, 'done': done, 'solved': solved}
    gave['return'] = boards.total.clone()
    boards.reset(done)
    return gave | {'next': boards.observe()}


def rollout(run: Run) -> dict[str, torch.Tensor]:
    """`unroll` steps of all boards, (T, B) each: what was seen, done and gained. With reuse, logits
    and values keep their graph: it is the update's. Else that makes a second forward."""
    play, steps = fused(run, play_step), []
    times = run.count + torch.arange(unroll, device=run.device)[:, None]  # (T, 1)
    chance = random_bits(run.keys, times)  # (T, B)
    run.count += unroll
    with torch.set_grad_enabled(reuse):
        w, state = run.model.prepare(), tuple(x.detach() for x in run.state)
        obs, start = run.env.observe(), run.env.steps == 0
        for u in chance.unbind():
            logits, value, state = run.model.act(w, obs, start, state)
            step = play(run.env, logits.detach(), u)
            following = step.pop('next')
            steps.append(step | {'logits': logits, 'value': value, 'obs': obs, 'start': start})
            obs, start = following, step['done']
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
    """One rollout and one update. -> its statistics; (T, 3, B) returns so far, ends, solved ends,
    on the device; and whether any rank was told to stop."""
    if not run.graphs or run.graphs['backward'][1] is None:
        run.optimizer.zero_grad(set_to_none=True)  # a captured backward writes its own anew
    for group in run.optimizer.param_groups:
        group['lr'].fill_(learning_rate * (1 - run.step / run.updates))
    batch = graphed(run.graphs, 'rollout', rollout, run)
    sums = graphed(run.graphs, 'backward', backward, run, batch)
    sums = sum_over_ranks(run.model, torch.cat([sums, sums.new_full((1,), stop)]))
    norm = graphed(run.graphs, 'apply', apply, run)
    games = torch.stack([batch['return'], batch['done'].float(), batch['solved'].float()], 1)
    # the only wait for the device
    *losses, mean, square, error, error2, stop, norm = torch.cat([sums, norm[None]]).tolist()
    stats = dict(zip(('loss', 'policy_loss', 'value_loss', 'entropy'), losses, strict=True))
    variance = square - mean**2
    explained = 1 - (error2 - error**2) / variance if variance > 0 else 0.0
    stats |= {'grad_norm': norm, 'explained_variance': explained}
    return stats, games, stop > 0


# ---- the log ----


def count_games(run: Run, games: torch.Tensor, stats: dict[str, float]) -> None:
    """An update's games (T, 3, B), which stay on the device, and statistics, for the log."""
    for name, x in stats.items():
        run.sums[name] = run.sums.get(name, 0.0) + x
    run.played.append(games)


def read_games(run: Run) -> None:
    """The episodes that have ended since this was last called, of all boards, on rank 0."""
    if run.played:
        games = gather(torch.cat(run.played), 2).movedim(1, 0)  # (3, T of all, n_envs)
        run.played = []
        if run.rank == 0:
            ended = games[1] > 0
            new = list(zip(games[0][ended].tolist(), games[2][ended].tolist(), strict=True))
            run.since += new
            run.recent = (run.recent + new)[-1000:]


def make_record(run: Run) -> dict:
    """A log line: means since the last one, and over the last episodes. Returns and solve rates are
    None until every board has ended an episode (at the time limit at the latest): those that end
    first are the short ones, which are solved."""
    read_games(run)
    updates, elapsed = run.step - run.logged, run.seconds - run.clock
    recent, fair = run.recent, run.step * unroll >= TIME_LIMIT

    def mean(games, k):
        return sum(game[k] for game in games) / len(games) if games and fair else None

    record = {'step': run.step, 'env_steps': run.step * n_envs * unroll}
    record |= {'episodes': len(run.since), 'episodic_return': mean(run.since, 0)}
    for k, name in enumerate(('return', 'solve_rate')):
        record |= {f'{name}_100': mean(recent[-100:], k), f'{name}_1000': mean(recent, k)}
    record |= {name: x / updates for name, x in run.sums.items()}
    record['lr'] = learning_rate * (1 - (run.step - 1) / run.updates)
    record |= {'env_steps_per_s': updates * n_envs * unroll / elapsed, 'seconds': run.seconds}
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
    sizes = [f'{x / 1e6:.3f}M' for x in (params['total'], params['core'], *macs.values())]
    return (
        f'{common.machine(run)}, {run.model.config.dtype} convolutions, fp32 cells\n'
        f'{type(run.model).__name__}: {sizes[0]} parameters ({sizes[1]} core), {sizes[2]} '
        f"multiply-adds a step by the paper's count, {sizes[3]} executed"
    )


# ---- checkpoints ----


def save(run: Run, best: bool = False) -> None:
    """The last checkpoint holds all; the best what evaluation needs."""
    read_games(run)
    parts = {name: getattr(run, name) for name in POSITION}
    if not best:
        parts |= {'env': {name: gather(x) for name, x in run.env.state_dict().items()}}
        parts |= {'state': [gather(x) for x in run.state], 'levels_crc': run.levels_crc}
    common.save_run(run, parts, None if best else [run.optimizer])


def load(run: Run) -> None:
    """Goes on where out_dir's last checkpoint stood; refuses settings that would make it another
    run. CheckpointError."""
    needed = ('model', *POSITION, 'optimizers', 'rng', 'env', 'state', 'levels_crc')
    saved, where = common.load_run(out_dir, 'train_sokoban.py', needed, FIXED, run.config)
    common.restore(run, POSITION, [run.optimizer], saved, where)
    print0(f'{where}: update {run.step}, {run.step * n_envs * unroll:,} environment steps')
    if saved['levels_crc'] != run.levels_crc:
        words = 'was trained on other levels: give the same levels_dir or another out_dir'
        raise common.CheckpointError(f'{where}: {words}')

    with restoring(where, 'env or state'):
        boards = {name: x.chunk(run.world)[run.rank] for name, x in saved['env'].items()}
        run.env.load_state_dict(boards)
        for x, whole in zip(run.state, saved['state'], strict=True):
            fill(x, whole.chunk(run.world)[run.rank])
    run.count.fill_(run.step * unroll)


# ---- the loop ----


def validate(run: Run) -> None:
    """Greedy evaluation, into the record; before the first update also a random policy's, to
    compare with. The best one's checkpoint."""
    each = [('eval', 'greedy', run.model, None)]
    if run.step == 0:
        each.append(('random', 'a random policy', RANDOM, seed))
    for name, how, model, chance in each:
        result = evaluate(model, run.held_out, run.device, chance)
        run.record |= {f'{name}_{key}': x for key, x in result.items()}
        found = f'{result["return"]:.2f}, {result["steps"]:.0f} steps'
        print0(f'held-out levels, {how}: solved {result["solve_rate"]:.1%}, return {found}')
    if run.step > 0 and run.record['eval_return'] > run.best:
        run.best = run.record['eval_return']
        save(run, best=True)


def loop(run: Run, writes: list[Callable[[dict], object]]) -> int:
    """Updates, evaluations, log lines, checkpoints -> the exit status: 0 done, 1 the loss was not
    finite, 128 + signal when told to stop."""
    stopper, stop, due_to_print = common.Stopper(), False, every()
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
        if not common.finite(run, due, stats['loss'], stats['grad_norm']):
            stopper.restore()
            return 1
        count_games(run, games, stats)
        run.step, run.seconds = run.step + 1, run.seconds + time.perf_counter() - start
        if due_to_print():
            rate = (run.step - run.logged) * n_envs * unroll / (run.seconds - run.clock)
            print0(f'    {run.step * n_envs * unroll:,}/{total_steps:,} | {rate:,.0f} steps/s')
        if due:
            save(run)  # before the log line and the evaluation: one that dies loses nothing
    done = f'{run.step * n_envs * unroll:,} steps in {run.seconds:.0f} s'
    return common.ended(run, stopper, run.updates, f'{done}, best return {run.best:.2f}')


def evaluate_only(config: dict) -> None:
    """The solve rate of out_dir's last checkpoint, or its best, and two GIFs. ValueError."""
    where = common.pick_device(device, threads)
    common.need_packages(PIL=True, tensorboard=tensorboard, wandb=wandb)
    model, its, file = load_agent(out_dir, 'best' if best else 'last', where, dtype)
    name, made = levels or eval_split, 'split n_levels n_boxes max_moves seed'.split()
    own = {k: its[k] for k in made if k in its and not levels}  # or generated ones as asked for
    held_out, line = load_level_sets(config | {'eval_split': name} | own, False, levels != '')[1]
    env_steps = its['step'] * its['n_envs'] * its['unroll']
    about = {'step': its['step'], 'env_steps': env_steps, 'checkpoint': file, 'levels': line}
    record = write_evaluation(model, held_out, name, where, out_dir, about)
    print(json.dumps(record))
    track, close = open_trackers(config, tensorboard, wandb_project if wandb else '')
    track(record)
    close()


def train(config: dict) -> int:
    """A run from beginning to end, or its evaluation -> the exit status."""
    common.restarted(out_dir, config, globals())
    try:
        if eval_only:
            evaluate_only(config)
            return 0
        run = make_run(config)  # finds all mistakes in settings and levels
        if resume:
            load(run)
        if run.rank == 0:
            run.lock = common.prepare_out_dir(out_dir, resume, overwrite)
    except ValueError as error:  # Mistake, AgentConfig's
        fail(error)
    run.config['threads'] = common.pick_threads(
        run.config['threads'], run.device, lambda T: trial_steps(run, T), unroll
    )
    print0(describe(run))
    warm_up(run)
    if run.rank > 0:
        status = loop(run, [])
    else:
        track, close = open_trackers(config, tensorboard, wandb_project if wandb else '')
        status = loop(run, [common.open_log(run, resume), track])
        close()
        if plot and status == 0:
            figure = figures.run_figure(figures.read_log(out_dir), out_dir)
            print(f'learning curve: {figures.save_figure(figure, out_dir, "curve", ("png",))[0]}')
    common.leave(run)
    return status


if __name__ == '__main__':
    # interrupted before the first update, or by the second ctrl-C
    stays = 'interrupted: the last checkpoint stays as it was'
    words = common.last_words('fewer n_envs, or --reuse=False', globals())
    run_script(lambda: train(configure(globals())), stays, words)

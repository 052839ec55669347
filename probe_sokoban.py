"""
Watch a plan form: linear probes of a trained Sokoban agent's representation (the planning analysis of "Temporal Recurrence Favors Fewer
Layers", after Bush et al.'s approach direction), for one agent or several side by side.

Plays 3,000 training levels and the test levels greedily, trains probes, scores them on the test levels that all agents solve, and writes
recall by step, a table, arrows on boards and a GIF:
$ python probe_sokoban.py --models=out/sokoban_large_L1,out/sokoban_large_L4 --test_levels=unfiltered-test
The paper's agents, the best of three seeds of each depth, from the sweep's folders (config/probe_large.py has the command that trains them):
$ python probe_sokoban.py config/probe_large.py
Two more questions: do the probes' directions steer the agent, and does time to think help it?
$ python probe_sokoban.py --models=out/sokoban_large_L4 --causal --thinking

At every step t and for every cell of the board a probe says in which direction the agent will next step onto the cell after this step, or
that it will not in this episode (five classes). It reads the agent's last representation s[L] at the cell and its eight neighbours, by one
3x3 convolution; a 1x1 convolution and one over the observation alone are trained beside it. And, as a control, the same two over the untrained
agent: the same shape with the weights that its run began with, which sees the same games beside the trained one. A random network's state
holds more than the board (more cells around, the steps before): only what the trained state holds beyond that was learnt.

A probe's direction at a cell is emitted where its probability is above a threshold, one a model, at which `precision` of the emitted
directions of the first steps are right. Recall: the share of the cells that have a direction whose direction was emitted.

Writes into out_dir: recall.png and .svg, probes.csv, probes.json, plans.png, plan_*.gif; and a folder an agent with what it was seen to
do: features.f16 (a row a step, memory-mapped), episodes.npz. A second call goes on where the first was stopped.

Shape letters: N episodes at a time, n episodes, S steps of all episodes, T steps of an episode, P probes, C channels, K classes; boards
are (10, 10) or (100,). Features of the trained agent and of the untrained one lie side by side: 2C channels.
"""

import copy
import csv
import glob
import io
import math
import os
import shlex
import shutil
import sys
import time
import zipfile
import zlib
from types import SimpleNamespace

from configurator import (
    configure,
    fail,
    gathered,
    run_script,
    write_atomic,
    write_json,
    write_text,
)  # before torch: how threads wait, what ctrl-C does

import numpy as np
import torch
import torch.nn.functional as F

from checkpoint import (
    BEST,
    check_model,
    commit,
    device_name,
    keep_memory,
    last_words,
    load_run,
    load_weights,
    need_packages,
    pick_device,
)
from checkpoint import pick_dtype, restoring, set_threads

from convlstm import CELLS, PLANES, Agent, AgentConfig, build_agent
from figures import COLORS, MARKERS, new, save
from play_sokoban import play as play_levels
from sokoban import (
    DELTA,
    TIME_LIMIT,
    SokobanEnv,
    at_most,
    board_image,
    load_levels,
    save_gif,
    save_png,
)
from train_sokoban import MODEL, POSITION

# -----------------------------------------------------------------------------
# fmt: off
models = ''                    # folders of trained agents, with a comma or a space between them; 'out/L4_s*' is the one that solves most test levels
best = False                   # their best checkpoints instead of their last
out_dir = 'out/probe'          # figures, tables, and what the agents were seen to do
levels = ''                    # the probes' training levels: a split or a file; '': those that the first agent was trained on
test_levels = ''               # the probes' test levels; '': those that the first agent was evaluated on
levels_dir = ''                # folder of Boxoban's levels; '': the first agent's
download = False               # fetch the splits into levels_dir where they are not there
n_train = 3000                 # episodes the probes are trained on (the paper's)
n_test = 1000                  # test levels; those that all agents solve are scored (the paper's: 906 of 1,000)
# the question
source = 'residual'            # what the probes read: 'residual' (s of the last level), 'cells' (a ConvLSTM's c, all levels), 'z' (the encoder)
target = 'enter'               # of a cell: direction of the next move onto it, or 'leave': off it, or 'push': the next push of a box off it
first = 20                     # steps that set the threshold, and that the figure shows, where it has min_levels games
precision = 0.93               # of what is emitted (the paper's); less where an agent's probes cannot reach it
min_levels = 50                # fewer levels solved by all agents are refused
# the probes
seeds = 3                      # of each, trained side by side
epochs = 10                    # the paper's
batch_size = 16                # boards
learning_rate = 1e-3           # AdamW's
weight_decay = 1e-3            # AdamW's
# the pictures
level = -1                     # which of the levels solved by all; -1: the first that all agents still play at the last of the steps below
shown = (0, 2, 4, 8)           # steps beside each other
# further questions
causal = False                 # add a probe's direction to the carried state at a cell: does the agent follow?
thinking = False               # hold the agent for some steps at the start: does it solve more?
# system
device = 'auto'                # 'auto': cuda if there is one; or 'cpu', 'cuda', 'cuda:1'
threads = 0                    # CPU threads; 0: torch's choice
# fmt: on
# -----------------------------------------------------------------------------

NEVER = 4  # classes 0..3: up, right, down, left, as the actions
WAYS = ((-1, 0), (0, 1), (1, 0), (0, -1))  # (rows, columns) of the actions
BATCH = 64  # episodes played at a time
PROBES = {  # name: (size of the convolution, what it reads)
    '3x3': (3, 'trained'),
    '1x1': (1, 'trained'),
    'untrained 3x3': (3, 'untrained'),
    'untrained 1x1': (1, 'untrained'),
    'observation': (3, 'observation'),
}
PRECISIONS = (0.7, 0.8, 0.9)  # recall is told at these too: not every probe reaches `precision`
STRENGTHS = (1.0, 2.0, 4.0, 8.0, 16.0)  # of the causal check, in units of the RMS of s


# ----------------------------------------------------------------------------- agents and what they do


def load_agent(folder: str, device: str) -> SimpleNamespace:
    """-> model, the untrained model (the weights that its run's seed gave it), the run's config, a label and a fingerprint of the weights.
    CheckpointError, ValueError."""
    saved, where = load_run(
        folder, 'train_sokoban.py', ('model', *POSITION), (), {}, BEST if best else None
    )
    c = saved['config']
    with restoring(where, 'config'):
        about = AgentConfig(
            **{name: c[name] for name in MODEL}, dtype=str(pick_dtype(c['dtype'], device))[6:]
        )
        check_model(build_agent, about)
    torch.manual_seed(c['seed'])  # as train_sokoban.make_run does
    model = build_agent(about).to(device)
    untrained = copy.deepcopy(model).eval()
    load_weights(model, saved['model'], where)
    label = f'{"" if c["recurrent"] else "not recurrent, "}L = {c["n_layer"]}, E = {c["n_expert"]}, d = {c["n_embd"]}'
    weights = sum(float(p.detach().double().abs().sum()) for p in model.parameters())
    return SimpleNamespace(
        model=model.eval(),
        untrained=untrained,
        config=c,
        label=label,
        name=os.path.basename(os.path.normpath(folder)),
        where=str(where),
        fingerprint=f'{c["arch"]} {label}, step {saved["step"]}, weights {weights:.9g}',
    )


def folders_of(name: str) -> list[str]:
    """The folders that a part of `models` names."""
    folders = sorted(filter(os.path.isdir, glob.glob(name))) if '*' in name else [name]
    if not folders:
        fail(f'models: no folder is named {name}')
    return folders


def best_agent(agents: list, packed: np.ndarray, device: str) -> SimpleNamespace:
    """The one of several that solves most of the levels, greedily; the first of equals."""
    if len(agents) == 1:
        return agents[0]
    rates = [
        play_levels(agent.model, packed, device)['solved'].double().mean().item()
        for agent in agents
    ]
    for agent, rate in zip(agents, rates, strict=True):
        print(f'{agent.where}: solves {rate:.1%} of the test levels', flush=True)
    return agents[rates.index(max(rates))]


def act(
    model: Agent, w: SimpleNamespace, obs: torch.Tensor, start: torch.Tensor, state: tuple | list
) -> tuple[torch.Tensor, torch.Tensor, tuple]:
    """One step -> the greedy action (N,), features (N, 10, 10, C) of `source`, the new state."""
    z = model.encode(obs)
    s, state = model.step(w, z, model.z_parts(w, z), model.alive(start), state)
    if source == 'cells':
        features = torch.cat([c.flatten(3) for c in state[2:]], -1)
    else:
        features = s if source == 'residual' else z
    return model.head(s)[0].argmax(-1), features, state


@torch.no_grad()
def play(
    model: Agent, packed: np.ndarray, device: str, think: int = 0, beside: Agent | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[torch.Tensor]]:
    """Greedy games on levels (N, 17), until all have ended; before the first move the agent sees its
    board `think` times more. beside: another agent that sees the same observations and does not act.
    -> actions (N, 120) int8, lengths (N,), solved (N,), and features of every step, each
    (N, 10, 10, C) fp16 on the CPU; with one beside (N, 10, 10, 2C), the other's last."""
    N = len(packed)
    env = SokobanEnv(packed, N, device=device, order='sequence')
    models = [model] if beside is None else [model, beside]
    weights = [m.prepare() for m in models]
    states = [m.init_state(N) for m in models]
    start = torch.ones(N, dtype=torch.bool, device=device)
    alive, won = start.clone(), torch.zeros_like(start)
    steps = torch.zeros(N, dtype=torch.int64, device=device)
    actions, features = torch.zeros(N, TIME_LIMIT, dtype=torch.int8), []
    for t in range(-think, TIME_LIMIT):
        obs = env.observe()
        each = [act(m, w, obs, start, x) for m, w, x in zip(models, weights, states, strict=True)]
        states = [state for _, _, state in each]
        if t < 0:
            start = torch.zeros_like(start)
            continue
        features.append(torch.cat([f for _, f, _ in each], -1).to(torch.float16).cpu())
        action = each[0][0]
        actions[:, t] = action.cpu()
        _, start, solved = env.step(action)
        steps += alive
        won |= solved & alive
        alive &= ~start
        if not alive.any():
            break
    return actions.numpy(), steps.cpu().numpy(), won.cpu().numpy(), features


def collect(agent: SimpleNamespace, packed: np.ndarray, part: str, device: str) -> SimpleNamespace:
    """Plays all levels (n, 17), the untrained agent beside; features into out_dir/NAME/PART.f16 as (S, 10, 10, 2C) fp16, or goes on with what
    is there. -> features (memory-mapped), actions (n, 120), lengths (n,), solved (n,)."""
    folder = os.path.join(out_dir, agent.name)
    os.makedirs(folder, exist_ok=True)
    path, index = (os.path.join(folder, f'{part}.{kind}') for kind in ('f16', 'npz'))
    C = play(agent.model, packed[:1], device, beside=agent.untrained)[3][0].size(-1)  # of both
    stamp = f'{agent.fingerprint}, {source} and untrained, levels {zlib.crc32(np.ascontiguousarray(packed))}'
    done = read_index(index, path, stamp, C)
    if len(done.lengths) < len(packed):
        most = (len(packed) - len(done.lengths)) * TIME_LIMIT * CELLS * C * 2
        print(
            f'{agent.label}: {len(packed) - len(done.lengths):,} games of {part}, at most {most / 1e9:.2f} GB in {path}',
            flush=True,
        )
        if most > shutil.disk_usage(folder).free:
            fail(
                f'{path}: {most / 1e9:.2f} GB may not fit on the disk: fewer n_train, n_test, or another out_dir'
            )
    begin, before = time.time(), len(done.lengths)
    with open(path, 'ab') as file:
        file.truncate(int(done.lengths.sum()) * CELLS * C * 2)
        for i in range(before, len(packed), BATCH):
            actions, lengths, solved, features = play(
                agent.model, packed[i : i + BATCH], device, beside=agent.untrained
            )
            steps = torch.stack(features, 1).numpy()  # (N, T, 10, 10, 2C)
            for episode, length in zip(steps, lengths, strict=True):
                file.write(episode[:length].tobytes())
            file.flush()
            done = SimpleNamespace(
                actions=np.concatenate([done.actions, actions]),
                lengths=np.concatenate([done.lengths, lengths]),
                solved=np.concatenate([done.solved, solved]),
            )
            write_atomic(
                index,
                lambda f, d=done: np.savez(
                    f, stamp=np.array(stamp), actions=d.actions, lengths=d.lengths, solved=d.solved
                ),
            )
            seconds, n = time.time() - begin, len(done.lengths)
            print(
                f'  {n:,}/{len(packed):,} games, solved {done.solved.mean():.1%}, {(n - before) / seconds:.0f} games/s, '
                f'eta {seconds / (n - before) * (len(packed) - n):.0f} s',
                flush=True,
            )
    done.features = np.memmap(path, np.float16, 'r', shape=(int(done.lengths.sum()), 10, 10, C))
    return done


def read_index(index: str, path: str, stamp: str, C: int) -> SimpleNamespace:
    """Games that an earlier call has stored; none where they are of another agent, of other levels, or damaged."""
    none = SimpleNamespace(
        actions=np.zeros((0, TIME_LIMIT), np.int8),
        lengths=np.zeros(0, np.int64),
        solved=np.zeros(0, bool),
    )
    try:
        with np.load(index, allow_pickle=False) as saved:
            if (
                str(saved['stamp']) != stamp
                or os.path.getsize(path) < int(saved['lengths'].sum()) * CELLS * C * 2
            ):
                return none
            return SimpleNamespace(**{k: saved[k] for k in ('actions', 'lengths', 'solved')})
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
        return none


# ----------------------------------------------------------------------------- what there is to be known


def replay(packed: np.ndarray, actions: np.ndarray) -> np.ndarray:
    """Levels (n, 17) and actions (n, T) -> observations (n, T + 1, 10, 10, 2) before, between and after them, without resets."""
    env = SokobanEnv(packed, len(packed), order='sequence')
    out = [env.observe().numpy()]
    for action in actions.T:
        env.move(torch.from_numpy(action.astype(np.int64)))
        out.append(env.observe().numpy())
    return np.stack(out, 1)


def targets(
    boards: np.ndarray, actions: np.ndarray, lengths: np.ndarray, target: str
) -> np.ndarray:
    """The class of every cell at every step, (n, T, 100) int8. boards (n, T + 1, 10, 10, 2) as of replay, actions (n, T), lengths (n,): steps
    played. At step t, for a cell: the direction of the first of the moves t, t + 1, ... with which the agent steps onto the cell
    ('enter'), off it ('leave') or pushes a box off it ('push'), NEVER if none does. A blocked move is none."""
    n, T = actions.shape
    seen = boards[..., 0].reshape(n, T + 1, CELLS)
    at, box = (seen == 3).argmax(2), seen == 4  # (n, T + 1), (n, T + 1, 100)
    out, known, games = (
        np.empty((n, T, CELLS), np.int8),
        np.full((n, CELLS), NEVER, np.int8),
        np.arange(n),
    )
    for t in reversed(range(T)):
        counts = (at[:, t] != at[:, t + 1]) & (t < lengths)
        cell = at[:, t] if target == 'leave' else at[:, t + 1]
        if target == 'push':
            counts &= box[games, t, cell]
        known[games[counts], cell[counts]] = actions[counts, t]
        out[:, t] = known
    return out


def flat(x: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """(n, T or more, ...) -> (S, ...): the steps that were played, game after game."""
    return x[:, : lengths.max()][np.arange(lengths.max()) < lengths[:, None]]


def planes(boards: np.ndarray) -> torch.Tensor:
    """Observations (S, 10, 10, 2) -> one-hot planes (S, 6, 10, 10)."""
    return torch.from_numpy(
        np.stack([boards[..., channel] == value for channel, value in PLANES], 1)
    ).float()


# ----------------------------------------------------------------------------- the probes


def make_probes(C: int, device: str) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """{kind: weight (P * 5, C, k, k), bias (P * 5,)}, P seeds side by side; what one learns does not depend on the others: the loss is their
    sum, and AdamW goes parameter by parameter."""
    probes = {}
    for kind, (k, reads) in PROBES.items():
        channels = len(PLANES) if reads == 'observation' else C
        bound, parts = 1 / math.sqrt(channels * k * k), []
        for seed in range(seeds):
            parts.append(
                torch.empty(5, channels, k, k).uniform_(
                    -bound, bound, generator=torch.Generator().manual_seed(seed)
                )
            )
        probes[kind] = tuple(
            x.to(device).requires_grad_() for x in (torch.cat(parts), torch.zeros(5 * seeds))
        )
    return probes


def logits_of(probes: dict, kind: str, features: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """features (B, 2C, 10, 10), seen (B, 6, 10, 10) -> (B, P, 5, 100)."""
    w, b = probes[kind]
    trained, untrained = features.chunk(2, 1)
    x = {'trained': trained, 'untrained': untrained, 'observation': seen}[PROBES[kind][1]]
    return F.conv2d(x, w, b, padding=w.size(-1) // 2).unflatten(1, (-1, 5)).flatten(3)


def scale_of(features: np.ndarray) -> torch.Tensor:
    """What features (S, 10, 10, 2C) are divided by, (2C, 1, 1): each agent's RMS, so that one learning rate suits all."""
    sample = np.asarray(features[:: max(1, len(features) // 1000)], np.float32).reshape(
        -1, 2, features.shape[-1] // 2
    )
    rms = np.sqrt((sample**2).mean((0, 2)))
    rms[rms == 0] = 1.0
    return torch.from_numpy(rms).repeat_interleave(sample.shape[-1])[:, None, None]


def train_probes(data: SimpleNamespace, device: str) -> tuple[dict, torch.Tensor]:
    """data: features (S, 10, 10, 2C), seen (S, 10, 10, 2), target (S, 100). -> probes, and the scale of the features, (2C, 1, 1)."""
    S, C = len(data.features), data.features.shape[-1] // 2
    scale = scale_of(data.features).to(device)
    probes, order = make_probes(C, device), torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(
        [p for pair in probes.values() for p in pair], learning_rate, weight_decay=weight_decay
    )
    begin, said = time.time(), time.time()
    for epoch in range(epochs):
        total = torch.zeros(len(PROBES), device=device)
        for i, batch in enumerate(torch.randperm(S, generator=order).split(batch_size)):
            features, seen, y = fetch(data, np.sort(batch.numpy()), scale, device)
            losses = torch.stack(
                [loss_of(logits_of(probes, kind, features, seen), y) for kind in PROBES]
            )
            optimizer.zero_grad()
            losses.sum().backward()
            optimizer.step()
            total += losses.detach()
            if time.time() - said > 30:
                said, part = time.time(), (epoch + (i + 1) * batch_size / S) / epochs
                print(
                    f'    epoch {epoch + 1}/{epochs}, {part:.0%}, eta {(time.time() - begin) * (1 / part - 1):.0f} s',
                    flush=True,
                )
        means = (total / (i + 1) / seeds).tolist()
        print(
            f'  epoch {epoch + 1}/{epochs}: loss '
            + ', '.join(f'{kind} {x:.4f}' for kind, x in zip(PROBES, means, strict=True)),
            flush=True,
        )
    return {kind: (w.detach(), b.detach()) for kind, (w, b) in probes.items()}, scale


def loss_of(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Cross-entropy over all cells, a mean a probe, summed over the probes. logits (B, P, 5, 100), y (B, 100)."""
    P = logits.size(1)
    return F.cross_entropy(logits.transpose(1, 2), y[:, None].expand(-1, P, -1)) * P


def fetch(
    data: SimpleNamespace, index: np.ndarray, scale: torch.Tensor, device: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Steps (B,) -> features (B, 2C, 10, 10), planes (B, 6, 10, 10), targets (B, 100)."""
    features = torch.from_numpy(data.features[index]).to(device).float().permute(0, 3, 1, 2) / scale
    return (
        features,
        planes(data.seen[index]).to(device),
        torch.from_numpy(data.target[index]).to(device).long(),
    )


@torch.no_grad()
def predict(
    probes: dict, data: SimpleNamespace, scale: torch.Tensor, device: str
) -> dict[str, SimpleNamespace]:
    """{kind: way (P, S, 100) int8, the likeliest direction; sure (P, S, 100) fp32, its probability; likeliest (P, S, 100) int8, of the five
    classes}"""
    out = {kind: [] for kind in PROBES}
    for index in np.array_split(np.arange(len(data.features)), max(1, len(data.features) // 512)):
        features, seen, _ = fetch(data, index, scale, device)
        for kind in PROBES:
            p = F.softmax(logits_of(probes, kind, features, seen), 2)  # (B, P, 5, 100)
            sure, way = p[:, :, :NEVER].max(2)
            out[kind].append(
                [
                    x.transpose(0, 1).cpu()
                    for x in (way.to(torch.int8), sure, p.argmax(2).to(torch.int8))
                ]
            )
    return {
        kind: SimpleNamespace(
            **{
                name: torch.cat(parts, 1).numpy()
                for name, parts in zip(
                    ('way', 'sure', 'likeliest'), zip(*x, strict=True), strict=True
                )
            }
        )
        for kind, x in out.items()
    }


# ----------------------------------------------------------------------------- the measure


def precisions(sure: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Thresholds, from the highest, and the precision of what is emitted at or above each. sure, right: any shape."""
    order = np.argsort(-sure, axis=None, kind='stable')
    sure, right = sure.ravel()[order], right.ravel()[order]
    share = np.cumsum(right) / np.arange(1, len(right) + 1)
    last = np.append(sure[1:] != sure[:-1], True)  # of equals
    return sure[last], share[last]


def threshold_for(sure: np.ndarray, right: np.ndarray, wanted: float) -> float:
    """The lowest threshold at which the emitted directions are right with at least that precision: the highest recall. Infinite: none."""
    thresholds, share = precisions(sure, right)
    good = np.flatnonzero(share >= wanted)
    return float(thresholds[good[-1]]) if len(good) else math.inf


def best_precision(sure: np.ndarray, right: np.ndarray, least: int = 100) -> float:
    """The highest precision of at least so many emitted directions."""
    thresholds, share = precisions(sure, right)
    emitted = np.searchsorted(np.sort(-sure, axis=None), -thresholds, side='right')
    return float(share[emitted >= min(least, sure.size)].max())


def f1(target: np.ndarray, guess: np.ndarray) -> float:
    """Macro F1 over the classes that occur."""
    scores = []
    for k in range(5):
        hits, either = (
            ((target == k) & (guess == k)).sum(),
            (target == k).sum() + (guess == k).sum(),
        )
        scores += [2 * hits / either] if either else []
    return float(np.mean(scores))


def score(data: SimpleNamespace, guesses: dict, wanted: float) -> tuple[list[dict], dict]:
    """-> a record of each probe, seed and step (recall, precision; None where there is nothing to count), and {kind: threshold, macro F1}.
    The threshold is one for all seeds of a kind, set over the first steps."""
    early, rows, about = data.step < first, [], {}
    for kind, g in guesses.items():
        right = g.way == data.target
        threshold = threshold_for(g.sure[:, early], right[:, early], wanted)
        emitted = g.sure >= threshold
        about[kind] = {
            'threshold': threshold,
            'macro_f1': [f1(data.target[early], x[early]) for x in g.likeliest],
            'precision': ratio((right & emitted)[:, early].sum(), emitted[:, early].sum()),
            'recall': ratio(
                (right & emitted)[:, early].sum(), (data.target[early] != NEVER).sum() * len(g.way)
            ),
            'recall_at': {
                f'{p:g}': recall_at(p, g.sure[:, early], right[:, early], data.target[early])
                for p in PRECISIONS
            },
        }
        for seed in range(len(g.way)):
            for step in range(min(int(data.step.max()) + 1, first)):
                now = data.step == step
                good, out, asked = (
                    (right & emitted)[seed, now].sum(),
                    emitted[seed, now].sum(),
                    (data.target[now] != NEVER).sum(),
                )
                rows.append(
                    {
                        'probe': kind,
                        'seed': seed,
                        'step': step,
                        'recall': ratio(good, asked),
                        'precision': ratio(good, out),
                        'directions': int(asked),
                        'emitted': int(out),
                        'games': int(now.sum()),
                    }
                )
    return rows, about


def recall_at(
    wanted: float, sure: np.ndarray, right: np.ndarray, target: np.ndarray
) -> float | None:
    """Recall at the lowest threshold with that precision; 0 where none has it. sure, right (P, S, 100), target (S, 100)."""
    emitted = sure >= threshold_for(sure, right, wanted)
    return ratio((right & emitted).sum(), (target != NEVER).sum() * len(sure))


def common_precision(results: list[dict]) -> float:
    """`precision`, or as much of it as every agent's 3x3 probes reach over the first steps."""
    reach = []
    for r in results:
        g, early = r['guesses']['3x3'], r['data'].step < first
        reach.append(best_precision(g.sure[:, early], (g.way == r['data'].target)[:, early]))
    return min(precision, *reach)


def ratio(a: np.integer, b: np.integer) -> float | None:
    return float(a) / float(b) if b else None


# ----------------------------------------------------------------------------- pictures


def recall_figure(results: list[dict], title: str) -> None:
    """Recall by step, a line an agent, one standard deviation over the probes' seeds; dotted: of the untrained agent; dashed: of the
    observation alone. Steps that fewer than min_levels games reach are left to the table."""
    figure, (axes,) = new(1, 2.9)
    for i, result in enumerate(results):
        for kind, style in (
            ('3x3', {'marker': MARKERS[i % 7], 'ms': 3, 'lw': 1.2}),
            ('untrained 3x3', {'ls': ':', 'lw': 1.2}),
            ('observation', {'ls': '--', 'lw': 0.9, 'alpha': 0.8}),
        ):
            steps = sorted(
                {
                    r['step']
                    for r in result['rows']
                    if r['probe'] == kind and r['recall'] is not None and r['games'] >= min_levels
                }
            )
            values = [
                [r['recall'] for r in result['rows'] if r['probe'] == kind and r['step'] == t]
                for t in steps
            ]
            mean, spread = (
                np.array([np.mean(v) for v in values]),
                np.array([np.std(v, ddof=1) if len(v) > 1 else 0.0 for v in values]),
            )
            axes.plot(
                steps,
                mean,
                color=COLORS[i % 7],
                label=result['label'] if kind == '3x3' else None,
                **style,
            )
            axes.fill_between(
                steps, mean - spread, mean + spread, color=COLORS[i % 7], alpha=0.2, lw=0
            )
    axes.plot([], [], color='gray', ls=':', lw=1.2, label='before training')
    axes.plot([], [], color='gray', ls='--', lw=0.9, label='observation alone')
    axes.set(xlabel='environment step', ylabel='recall', title=title, ylim=(0, None))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False)
    save(figure, out_dir, 'recall')


def plan_image(
    board: np.ndarray, way: np.ndarray, emitted: np.ndarray, truth: np.ndarray, cell: int = 32
) -> np.ndarray:
    """Observation (10, 10, 2) with an arrow in every cell whose direction is emitted, as the agent would step onto it: from the side it comes
    from. Green where the agent does so later, red where not. way, emitted, truth (100,) -> (10 cell, 10 cell, 3) uint8."""
    from PIL import Image, ImageDraw

    image = Image.fromarray(
        board_image(board, 4 * cell)
    )  # drawn larger, then averaged: smooth edges
    pen, big = ImageDraw.Draw(image), 4 * cell
    for k in np.flatnonzero(emitted):
        dy, dx = WAYS[way[k]]
        y, x = (k // 10 + 0.5) * big, (k % 10 + 0.5) * big
        colour = (20, 140, 60) if truth[k] == way[k] else (200, 30, 40)
        tail, head = (
            (x - 0.34 * big * dx, y - 0.34 * big * dy),
            (x + 0.12 * big * dx, y + 0.12 * big * dy),
        )
        pen.line([tail, head], fill=colour, width=big // 7)
        tip = (x + 0.38 * big * dx, y + 0.38 * big * dy)
        pen.polygon(
            [
                tip,
                (head[0] - 0.24 * big * dy, head[1] + 0.24 * big * dx),
                (head[0] + 0.24 * big * dy, head[1] - 0.24 * big * dx),
            ],
            fill=colour,
        )
    return np.asarray(image.resize((10 * cell, 10 * cell), Image.Resampling.BOX))


def plan_pictures(agents: list, results: list[dict]) -> None:
    """plans.png: the same level, a row an agent, a column a step of `shown`; plan_NAME.gif: each agent's game."""
    from PIL import Image, ImageDraw

    rows, shortest = [], np.min([result['data'].lengths for result in results], 0)
    game = (
        level if level >= 0 else int(np.argmax(np.minimum(shortest, max(shown) + 1)))
    )  # the first that is long enough, or the longest
    for agent, result in zip(agents, results, strict=True):
        data, g = result['data'], result['guesses']['3x3']
        begin = int(data.lengths[:game].sum())
        frames = [
            plan_image(
                data.seen[i],
                g.way[0, i],
                g.sure[0, i] >= result['about']['3x3']['threshold'],
                data.target[i],
            )
            for i in range(begin, begin + int(data.lengths[game]))
        ]
        save_gif(frames, os.path.join(out_dir, f'plan_{agent.name}.gif'), 400)
        white = np.full_like(frames[0], 255)
        tiles = [
            np.pad(
                frames[t] if t < len(frames) else white,
                ((22, 6), (4, 4), (0, 0)),
                constant_values=255,
            )
            for t in shown
        ]
        strip = Image.fromarray(np.hstack(tiles))
        pen = ImageDraw.Draw(strip)
        for i, t in enumerate(shown):
            text = (
                f'{agent.label}, step {t}'
                if t < len(frames)
                else f'{agent.label}: solved before step {t}'
            )
            pen.text((i * tiles[0].shape[1] + 8, 4), text, fill=(0, 0, 0), font_size=13)
        rows.append(np.asarray(strip))
    save_png(np.vstack(rows), os.path.join(out_dir, 'plans.png'))


# ----------------------------------------------------------------------------- further questions


def aggregated(model: Agent, state: tuple | list) -> torch.Tensor:
    """s of a carried state, (n, 100, C): state[0]; for a ConvGLU with a radius, which carries its h, their aggregate."""
    s = state[0]
    if model.config.arch == 'convglu':
        s = model.aggregate(0, s, None, None) if model.config.radius >= 0 else s.squeeze(3)
    return s.float().flatten(1, 2)


def steer(model: Agent, state: tuple | list, cell: torch.Tensor, vector: torch.Tensor) -> tuple:
    """The carried state in which s has grown by `vector` (n, C) at `cell` (n,) of each board, and with it what else the next step reads:

    ConvLSTM              s, and every h_i by the share that makes A(h) grow by the vector: vector / sqrt(E), all of it where the weights of
                          A add up to 1 (mean, softmax_mean). softmax_l2 gets vector / sqrt(E), exact for equal gates. The cells c stay.
    ConvLSTM with radius  the same. It hears no s, only the h of the ring: those grow by the share.
    ConvGLU               s, the only thing it carries. The next step reads RMSNorm(s): see heard.
    ConvGLU with radius   every h_i by the share: it carries h in place of s.
    """
    c = model.config
    share = 1.0 if c.aggregation in ('mean', 'softmax_mean') else 1 / math.sqrt(c.n_expert)
    if c.arch == 'convlstm':
        shares = (1.0, share)  # of s and h
    else:
        shares = (share if c.radius >= 0 else 1.0,)
    steered = []
    for x, part in zip(state, shares, strict=False):
        new = x.float().reshape(len(x), CELLS, -1, c.n_embd).clone()  # (n, 100, 1 or E, C)
        new[torch.arange(len(x), device=x.device), cell] += part * vector[:, None]
        steered.append(new.view(x.shape).to(x.dtype))
    return (*steered, *state[len(steered) :])


def heard(model: Agent, state: tuple | list) -> torch.Tensor:
    """What the first level reads of a carried state in place of s: (n, 100, 1 or E, C). ConvLSTM: s, or with a radius each expert's sum over
    the ring. ConvGLU: that after the norm."""
    c = model.config
    if c.arch == 'convglu':
        x = model.heard(state[0])
    else:
        x = model.ring(state[1]) if c.radius >= 0 else state[0]
    return x.float().reshape(len(x), CELLS, -1, c.n_embd)


def rms_of(x: torch.Tensor) -> float:
    return x.square().mean().sqrt().item()


def moment_before(
    agent: SimpleNamespace, packed: np.ndarray, actions: np.ndarray, when: torch.Tensor, device: str
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Games (n, 17) replayed by their actions (n, 120) up to step `when` (n,) of each: the boards
    (n, 10, 10, 2) and the carried states there."""
    n, model = len(packed), agent.model
    env, w = SokobanEnv(packed, n, device=device, order='sequence'), model.prepare()
    state, start = model.init_state(n), torch.ones(n, dtype=torch.bool, device=device)
    kept = [x.clone() for x in state]
    boards = torch.zeros(n, 10, 10, 2, dtype=torch.uint8, device=device)
    go = torch.from_numpy(actions).to(device).long()
    for t in range(int(when.max()) + 1):
        now, obs = (when == t).to(device), env.observe()
        boards[now] = obs[now]
        for mine, x in zip(kept, state, strict=True):
            mine[now] = x[now]
        _, _, state = act(model, w, obs, start, state)
        env.move(go[:, t])
        start = torch.zeros_like(start)
    return boards, kept


def ways_and_cells(
    boards: torch.Tensor, plain: torch.Tensor, rng: np.random.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where to steer, on boards (n, 10, 10, 2) on which the agent would do `plain` (n,). -> the boards
    (m,) that have such places, a way to each one's random neighbour cell without wall and box, not
    the plain action's, that cell, and for the control a random other cell that is free: no wall,
    box, target or agent. (m,) each."""
    n, device = len(boards), boards.device
    games = torch.arange(n, device=device)
    there, ground = (boards[..., k].flatten(1) for k in (0, 1))  # (n, 100)
    at, delta = (there == 3).int().argmax(1), torch.tensor(DELTA, device=device)
    order = torch.from_numpy(np.argsort(rng.random((n, 4)), 1)).to(device)
    k = torch.full((n,), NEVER, device=device)
    for way in order.unbind(1):  # a board's rim is wall: every neighbour is a cell
        cell = at + delta[way]
        may = (there[games, cell] == 0) & (ground[games, cell] != 1) & (way != plain)
        k = torch.where((k == NEVER) & may, way, k)
    cell = at + delta[k.clamp(max=NEVER - 1)]
    free = (there == 0) & (ground == 0)
    free[games, cell] = False
    luck = torch.from_numpy(rng.random((n, CELLS))).to(device)
    other = torch.where(free, luck, -1.0).argmax(1)
    chosen = ((k != NEVER) & free.any(1)).nonzero().flatten()
    return chosen, k[chosen], cell[chosen], other[chosen]


@torch.no_grad()
def causal_check(
    agent: SimpleNamespace,
    packed: np.ndarray,
    actions: np.ndarray,
    lengths: np.ndarray,
    direction: torch.Tensor,
    device: str,
) -> list[dict]:
    """Does what a probe reads steer the agent? In each game, before a random one of its first steps, direction k of the 1x1 probe (C,) is added
    to the carried s (see steer) at the free cell that k leads to from the agent, k not being what it would do: how often does it go there?
    Strengths are in units of the RMS of s; 'heard': how much of it arrives, the RMS of the change in what the first level reads at that cell
    over that reading's RMS: a ConvGLU reads RMSNorm(s), which bounds it. Controls: a random direction of the same length, and the probe's own at
    another free cell. direction (4, C), of length 1; games of two steps or more. -> a record a strength and way of adding; none without games."""
    model, rng = agent.model, np.random.default_rng(0)
    when = torch.from_numpy(
        rng.integers(1, np.minimum(lengths, first))
    )  # not 0: nothing is carried then
    boards, kept = moment_before(agent, packed, actions, when, device)
    w, start = model.prepare(), torch.zeros(len(packed), dtype=torch.bool, device=device)
    plain, _, _ = act(model, w, boards, start, kept)
    chosen, way, cell, other = ways_and_cells(boards, plain, rng)
    if not len(chosen):
        return []
    boards, plain, start, kept = (
        boards[chosen],
        plain[chosen],
        start[chosen],
        [x[chosen] for x in kept],
    )
    size, read = rms_of(aggregated(model, kept)), heard(model, kept)
    noise = F.normalize(
        torch.randn(len(chosen), direction.size(1), generator=torch.Generator().manual_seed(0)),
        dim=1,
    ).to(device)
    games, rows = torch.arange(len(chosen), device=device), []
    for strength in STRENGTHS:
        length = strength * size * math.sqrt(direction.size(1))
        for name, vector, where in (
            ('probe', direction[way], cell),
            ('random direction', noise, cell),
            ('other cell', direction[way], other),
        ):
            steered = steer(model, kept, where, length * vector)
            action, _, _ = act(model, w, boards, start, steered)
            change = (heard(model, steered) - read)[games, where]
            rows.append(
                {
                    'added': name,
                    'strength': strength,
                    'heard': rms_of(change) / rms_of(read),
                    'follows': (action == way).float().mean().item(),
                    'changes': (action != plain).float().mean().item(),
                    'games': len(chosen),
                }
            )
    return rows


def thinking_check(agent: SimpleNamespace, packed: np.ndarray, device: str) -> list[dict]:
    """Solve rate where the agent is held for some steps at the start, its observation repeated. One that carries no state cannot change."""
    return [
        {
            'held': n,
            'solve_rate': float(
                np.concatenate(
                    [
                        play(agent.model, packed[i : i + BATCH], device, n)[2]
                        for i in range(0, len(packed), BATCH)
                    ]
                ).mean()
            ),
        }
        for n in (0, 1, 2, 4, 8)
    ]


# ----------------------------------------------------------------------------- the command


def check_settings() -> None:
    for name, allowed in (
        ('source', ('residual', 'cells', 'z')),
        ('target', ('enter', 'leave', 'push')),
    ):
        if globals()[name] not in allowed:
            fail(f'{name} = {globals()[name]!r}: expected one of {", ".join(allowed)}')
    for name in ('n_train', 'n_test', 'first', 'min_levels', 'seeds', 'epochs', 'batch_size'):
        if globals()[name] < 1:
            fail(f'{name} = {globals()[name]}: must be at least 1')
    if (
        not 0 < precision <= 1
        or learning_rate <= 0
        or weight_decay < 0
        or threads < 0
        or level < -1
    ):
        fail(
            f'precision = {precision}, learning_rate = {learning_rate}, weight_decay = {weight_decay}, threads = {threads}, level = {level}: '
            'expected a share, and no negative number'
        )
    if not models:
        fail('models is empty: name folders of trained agents, --models=out/a,out/b')
    if not shown or any(type(t) is not int or t < 0 for t in shown):
        fail(f'shown = {shown!r}: expected steps')
    if causal and source != 'residual':
        fail(
            f"causal adds the probes' directions to s: it needs source = 'residual', not {source!r}"
        )
    need_packages(matplotlib=True, PIL=True)


def read_levels(config: dict) -> tuple[np.ndarray, np.ndarray]:
    """The probes' training and test levels, from the first agent's settings where none are named."""

    def read(
        name: str, n: int, own: int, number: int, without: np.ndarray | None = None
    ) -> np.ndarray:
        packed, line = load_levels(
            levels_dir or config['levels_dir'],
            name,
            download,
            max(n, own),
            config['n_boxes'],
            config['seed'] * 2 + number,
            config['max_moves'],
            without,
        )
        packed, line = at_most(n, packed, line)
        print(line)
        return packed

    trained, held_out = levels or config['split'], test_levels or config['eval_split']
    packed = read(trained, n_train, config['n_levels'], 0)
    return packed, read(
        held_out,
        n_test,
        config['eval_games'],
        1,
        packed if trained == 'generated' == held_out else None,
    )


def solved_by_all(agents: list, packed: np.ndarray, device: str) -> np.ndarray:
    """(n,) bool: the test levels (n, 17) that every agent solves."""
    return np.all([collect(agent, packed, 'test', device).solved for agent in agents], 0)


def prepare(
    agent: SimpleNamespace,
    packed: np.ndarray,
    part: str,
    device: str,
    keep: np.ndarray | None = None,
) -> SimpleNamespace:
    """What an agent did on levels, as the probes need it; keep (n,): of these games alone. -> features (S, 10, 10, 2C), seen (S, 10, 10, 2),
    target (S, 100), step (S,), lengths, actions and solved of the games."""
    done = collect(agent, packed, part, device)
    boards = replay(packed, done.actions[:, : done.lengths.max()])
    target_ = targets(boards, done.actions[:, : done.lengths.max()], done.lengths, target)
    keep = np.ones(len(packed), bool) if keep is None else keep
    steps = flat(np.broadcast_to(keep[:, None], target_.shape[:2]), done.lengths)
    return SimpleNamespace(
        features=done.features if keep.all() else done.features[steps],
        seen=flat(boards[:, :-1], done.lengths)[steps],
        target=flat(target_, done.lengths)[steps],
        lengths=done.lengths[keep],
        actions=done.actions[keep],
        solved=done.solved[keep],
        step=flat(np.broadcast_to(np.arange(target_.shape[1]), target_.shape[:2]), done.lengths)[
            steps
        ],
    )


def probe(device: str) -> None:
    groups = [
        [load_agent(folder, device) for folder in folders_of(name)] for name in models.split(',')
    ]
    names = [agent.name for group in groups for agent in group]
    if len(set(names)) < len(names):
        fail(
            f'models = {models!r}: two folders have the same name, which their outputs would share'
        )
    if source == 'cells' and any(
        a.config['arch'] != 'convlstm' or not a.config['recurrent']
        for group in groups
        for a in group
    ):
        fail("source = 'cells' is for recurrent ConvLSTMs: the others have none")
    packed, test = read_levels(groups[0][0].config)
    agents = [best_agent(group, test, device) for group in groups]
    del groups  # the others' memory
    solved = solved_by_all(agents, test, device)
    print(
        f'{solved.sum()} of {len(test)} test levels are solved by {"all agents" if agents[1:] else "the agent"}'
    )
    if solved.sum() < min_levels:
        fail(
            f'that is fewer than min_levels = {min_levels}: take easier test_levels, or more (n_test)'
        )
    if level >= solved.sum():
        fail(f'level = {level}: {solved.sum()} levels are solved by all, numbered from 0')
    results = []
    for agent in agents:
        print(f'{agent.label}: probes')
        data = prepare(agent, packed, 'train', device)
        probes, scale = train_probes(data, device)
        data = prepare(agent, test, 'test', device, solved)
        results.append(
            {
                'name': agent.name,
                'label': agent.label,
                'data': data,
                'probes': probes,
                'scale': scale,
                'guesses': predict(probes, data, scale, device),
            }
        )
    report(agents, test, solved, results, device)


def report(
    agents: list, test: np.ndarray, solved: np.ndarray, results: list[dict], device: str
) -> None:
    """Scores at one precision for all agents, figures, pictures, further questions."""
    wanted = common_precision(results)
    for r in results:
        r['rows'], r['about'] = score(r['data'], r['guesses'], wanted)
    c = agents[0].config
    split = test_levels or c['eval_split']
    kind = (
        split
        if split != 'generated'
        else f'generated levels, {c["n_boxes"]} box{"es" * (c["n_boxes"] > 1)}, at most {c["max_moves"]} moves'
    )
    title = (
        f'{kind}\nprecision {wanted:.0%} over {first} steps\n{solved.sum()} levels solved by all'
        + ('' if wanted == precision else f'\n({precision:.0%} is out of reach)')
    )
    recall_figure(results, title)
    plan_pictures(agents, results)
    text = io.StringIO()
    table = csv.DictWriter(text, ['model', *results[0]['rows'][0]], lineterminator='\n')
    table.writeheader()
    table.writerows({'model': r['name'], **row} for r in results for row in r['rows'])
    write_text(text.getvalue(), os.path.join(out_dir, 'probes.csv'))
    records = []
    for agent, r in zip(agents, results, strict=True):
        record = {
            'name': agent.name,
            'label': agent.label,
            'checkpoint': agent.where,
            'probes': r['about'],
        }
        if causal and agent.config['recurrent']:
            w = r['probes']['1x1'][0][:5, :, 0, 0]  # of the first seed
            long = r['data'].lengths > 1
            record['causal'] = causal_check(
                agent,
                test[solved][long],
                r['data'].actions[long],
                r['data'].lengths[long],
                F.normalize(w[:NEVER] - w[NEVER], dim=1),
                device,
            )
        if thinking:
            record['thinking'] = thinking_check(agent, test, device)
        records.append(record)
        print(
            f'{agent.label}: '
            + ', '.join(
                f'{kind} recall {about["recall"]:.1%} at precision {about["precision"]:.1%}'
                for kind, about in r['about'].items()
                if about['recall'] is not None and about['precision'] is not None
            )
        )
    write_json(
        {
            'precision': wanted,
            'first': first,
            'levels': int(solved.sum()),
            'target': target,
            'source': source,
            'device': device_name(device),
            'torch': torch.__version__,
            'commit': commit(),
            'command': shlex.join(['python', *sys.argv]),
            'models': records,
        },
        os.path.join(out_dir, 'probes.json'),
    )
    print(
        '\n'.join(
            sorted(os.path.join(out_dir, name) for name in os.listdir(out_dir) if '.' in name[1:])
        )
    )


def main() -> None:
    configure(globals(), gathered(sys.argv[1:], 'models'), quiet=True)
    check_settings()
    try:
        where = pick_device(device)
        if where == 'cpu':
            keep_memory()
            set_threads(threads)
        probe(where)
    except ValueError as error:  # CheckpointError, LevelError, SizeError
        fail(error)


if __name__ == '__main__':
    stopped = 'stopped: the same command goes on with the games that are stored'
    run_script(main, stopped, last_words('fewer n_train or n_test'))

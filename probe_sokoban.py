"""Watch a plan form: linear probes of a trained Sokoban agent's state.

The planning analysis of "Temporal Recurrence Favors Fewer Layers", after the approach direction of
Bush et al.:

    python probe_sokoban.py --models=out/L1,out/L4 --test_levels=unfiltered-test
    python probe_sokoban.py config/probe_large.py    # the paper's agents; its header trains them
    python probe_sokoban.py --models=out/L4 --causal --thinking      # with two further questions

At every step of an episode played greedily, and for every cell of the board, a probe predicts in
which direction the agent will next step onto the cell, or that it will not (five classes). It reads
the agent's s[L] at the cell and its eight neighbors by one 3x3 convolution. Beside it stand a 1x1
convolution, a 3x3 convolution of the observation alone, and both convolutions over an untrained
agent on the same episodes: only what the trained state holds beyond a random network's was learned.

A direction is emitted where its probability is above the probe's threshold, at which a share
`precision` of those emitted in the first steps is right. Recall is the share of the cells with a
direction whose direction was emitted, on the test levels that all agents solve. Recall of the
first three steps is printed, and drawn on a board, as in the paper.

The agents' states lie in a temporary file in out_dir, in fp16, and are read from there; only those
of one agent at a time. The size is printed, and compared with the free disk, before it is written.

Writes into out_dir: recall.png and .svg, probes.csv, .md and .json; and for each agent plans_*.png,
plan_*.gif and probe_*.safetensors.

Shape letters: N episodes at a time, n episodes, S steps of all episodes, T steps of one, P probes,
C channels (trained and untrained agent side by side: 2C); boards are (10, 10) or (100,).
"""

import glob
import math
import os
import shlex
import shutil
import sys
import tempfile
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from configurator import configure, every, fail, run_script, setup_process, write_json

if __name__ == '__main__':
    setup_process()  # before torch is imported

import numpy as np
import torch
import torch.nn.functional as F
from numpy import ndarray
from torch import Tensor, nn

import common
from convlstm import CELLS, PLANES, Agent, build_agent, load_agent
from figures import draw_line, finish_figure, new_figure, save_figure, summarize, write_table
from sokoban import DELTA, FeatureRecorder, load_level_sets, plan_image, replay
from sokoban import run_episodes, save_gif

# -----------------------------------------------------------------------------
# fmt: off
# agents and levels
models = ''                    # folders of trained agents, separated by commas; of a pattern such
                               # as 'out/L4_s*' the agent that solves most test levels
best = False                   # their best checkpoints instead of their last ones
out_dir = 'out/probe'          # figures and tables
levels = ''                    # to train probes on: a split or a file; '': the first agent's
test_levels = ''               # to score them on; '': the first agent's evaluation levels
levels_dir = ''                # folder of Boxoban's levels; '': the first agent's
download = False               # fetch splits that are not in levels_dir
n_train = 3000                 # training episodes, as in the paper
n_test = 1000                  # test levels; all agents solve 906 of them in the paper
# the question
first = 20                     # steps that set the threshold, and that the figure shows
precision = 0.93               # of the emitted directions, as in the paper
min_levels = 50                # fewer levels solved by all are refused, and not drawn at a step
# the probes
seeds = 3                      # of each probe, trained side by side
epochs = 10                    # passes over the training steps (ours)
batch_size = 16                # boards
learning_rate = 1e-3           # AdamW's
weight_decay = 1e-3            # AdamW's
# further questions
causal = False                 # add a probe's direction to the carried state: is it followed?
thinking = False               # hold the agent for some steps at the start: does it solve more?
# system
device = 'auto'                # 'auto': cuda if there is one; or 'cpu', 'cuda', 'cuda:1'
threads = 0                    # CPU threads; 0: torch's choice
# fmt: on
RANGES = {
    'precision': (0.01, 1),
    'learning_rate': (1e-9, inf),
    'weight_decay': (0, inf),
    'threads': (0, 1024),
    'n_train': (1, inf),
    'n_test': (1, inf),
    'first': (1, inf),
    'min_levels': (1, inf),
    'seeds': (1, inf),
    'epochs': (1, inf),
    'batch_size': (1, inf),
}
# -----------------------------------------------------------------------------

NEVER = 4  # classes 0..3: up, right, down, left, as the actions
BATCH = 64  # episodes whose features are held in memory
PROBES = {  # name: (size of the convolution, what it reads)
    '3x3': (3, 'trained'),
    '1x1': (1, 'trained'),
    'untrained 3x3': (3, 'untrained'),
    'untrained 1x1': (1, 'untrained'),
    'observation': (3, 'observation'),
}
PRECISIONS = (0.7, 0.8, 0.9)  # recall is reported at these too: not every probe reaches `precision`
SHOWN = (0, 1, 2)  # steps whose recall is printed and whose boards are drawn, the paper's
STRENGTHS = (1.0, 2.0, 4.0, 8.0, 16.0)  # of the causal check, in units of the RMS of s
HELD = (0, 1, 2, 4, 8)  # steps that an agent is held at the start of an episode


# ----------------------------------------------------------------------------- agents


class Episodes(NamedTuple):
    """What an agent did on n levels."""

    actions: ndarray  # (n, 120) int8
    lengths: ndarray  # (n,) steps played
    solved: ndarray  # (n,) bool


@dataclass
class Player:
    """A trained agent, and its episodes on the test levels."""

    agent: Agent
    untrained: Agent  # the same with its run's first weights, unless that had init_from
    config: dict
    checkpoint: str
    name: str  # of its folder
    label: str
    test: Episodes | None = None


@dataclass
class Result:
    """What the probes of one player found."""

    player: Player
    data: 'Steps'  # its steps on the test levels that all agents solve
    probes: dict  # as train_probes returns them
    scale: Tensor  # (2C, 1, 1), the RMS that features are divided by
    guesses: 'dict[str, Guess]'  # by probe
    rows: list[dict]  # one per probe, seed and step
    scores: dict  # by probe, over the first steps


def load_player(folder: str, device: str) -> Player:
    """Return the agent in a folder (a run or an export), and its untrained twin."""
    agent, config, checkpoint = load_agent(folder, 'best' if best else 'last', device)
    exported = {'split': config['eval_split'], 'n_levels': 1, 'eval_games': 1, 'levels_dir': ''}
    config = exported | config  # an export does not say on what it was trained
    torch.manual_seed(config['seed'])  # as train_sokoban.py does before it builds the agent
    untrained = build_agent(agent.config).to(device).eval()
    kind = '' if config['recurrent'] else 'non-recurrent, '
    return Player(
        agent=agent,
        untrained=untrained,
        config=config,
        checkpoint=checkpoint,
        name=os.path.basename(os.path.normpath(folder)),
        label=f'{kind}L = {config["n_layer"]}, E = {config["n_expert"]}, d = {config["n_embd"]}',
    )


def as_episodes(result: dict[str, Tensor]) -> Episodes:
    """Return what sokoban.run_episodes returns as arrays."""
    return Episodes(
        actions=result['actions'].numpy(),
        lengths=result['steps'].long().numpy(),
        solved=result['solved'].numpy(),
    )


def best_player(players: list[Player], packed: ndarray, device: str) -> Player:
    """Let agents play levels (n, 17) greedily, and return the one that solves most of them, with
    its episodes; the first of equals."""
    for player in players:
        player.test = as_episodes(run_episodes(player.agent, packed, device))
        rate = player.test.solved.mean()
        print(f'{player.checkpoint}: solves {rate:.1%} of the test levels', flush=True)
    return max(players, key=lambda player: player.test.solved.mean())


def solved_by_all(players: list[Player]) -> ndarray:
    """Return which test levels every agent solves, (n,) bool."""
    return np.all([player.test.solved for player in players], 0)


# ----------------------------------------------------------------------------- steps and targets


def feature_bytes(player: Player, steps: float) -> float:
    """Return the bytes of a player's features (fp16, trained and untrained) on some steps."""
    return steps * CELLS * 2 * player.agent.config.n_embd * 2


def check_disk(players: list[Player], solved: ndarray) -> None:
    """Print how much disk the features take, and end the script if there is not so much. Training
    episodes are taken to be as long as the test episodes; one agent's are there at a time."""
    need = 0.0
    for player in players:
        lengths = player.test.lengths
        need = max(
            need, feature_bytes(player, max(n_train * lengths.mean(), lengths[solved].sum()))
        )
    os.makedirs(out_dir, exist_ok=True)
    free = shutil.disk_usage(out_dir).free
    print(f"the agents' states take about {need / 1e9:.2f} GB in {out_dir} (temporary, fp16)")
    if need > free:
        fail(f'out_dir = {out_dir!r}: {free / 1e9:.2f} GB are free there: choose another, or fewer'
             f' n_train')  # fmt: skip


def record(player: Player, packed: ndarray, device: str) -> tuple[Episodes, ndarray]:
    """Let an agent play levels (n, 17), its untrained twin watching. Returns the episodes and s[L]
    of both at every step, (S, 10, 10, 2C) fp16, mapped from a file that goes with it."""
    n, parts, due = len(packed), [], every()
    file = tempfile.TemporaryFile(dir=out_dir)
    print(f'{player.label}: {n:,} episodes', flush=True)
    for i in range(0, n, BATCH):
        recorder = FeatureRecorder(player.agent, player.untrained)
        episodes = as_episodes(run_episodes(recorder, packed[i : i + BATCH], device))
        features = torch.stack(recorder.features, 1).numpy()  # (N, T, 10, 10, 2C)
        played = np.arange(features.shape[1]) < episodes.lengths[:, None]  # (N, T)
        file.write(features[played].data)
        parts.append(episodes)
        if due():
            print(f'    {i:,} of {n:,} episodes', flush=True)
    file.flush()
    episodes = Episodes(*map(np.concatenate, zip(*parts, strict=True)))
    shape = int(episodes.lengths.sum()), 10, 10, 2 * player.agent.config.n_embd
    return episodes, np.memmap(file, np.float16, 'r', shape=shape)


def targets(boards: ndarray, actions: ndarray, lengths: ndarray) -> ndarray:
    """Return the class of every cell at every step t, (n, T, 100) int8: the direction of the first
    of the moves t, t + 1, ... onto the cell, or NEVER.

    boards (n, T + 1, 10, 10, 2), actions (n, T), lengths (n,): steps played."""
    n, T = actions.shape
    at = (boards[..., 0].reshape(n, T + 1, CELLS) == 3).argmax(2)  # (n, T + 1), the agent's cell
    out, following = np.empty((n, T, CELLS), np.int8), np.full((n, CELLS), NEVER, np.int8)
    for t in reversed(range(T)):
        moved = np.flatnonzero((at[:, t] != at[:, t + 1]) & (t < lengths))
        following[moved, at[moved, t + 1]] = actions[moved, t]
        out[:, t] = following
    return out


class Steps(NamedTuple):
    """The steps of an agent's episodes, one episode after another, as the probes need them."""

    boards: ndarray  # observations (S, 10, 10, 2)
    target: ndarray  # (S, 100) int8
    step: ndarray  # (S,), within its episode
    features: ndarray  # (S, 10, 10, 2C) fp16, in a file
    episodes: Episodes


def prepare(episodes: Episodes, features: ndarray, packed: ndarray) -> Steps:
    """Return the steps of the episodes on levels (n, 17)."""
    T = episodes.lengths.max()
    actions = episodes.actions[:, :T]
    boards = replay(packed, actions)  # (n, T + 1, 10, 10, 2)
    classes = targets(boards, actions, episodes.lengths)
    played = np.arange(T) < episodes.lengths[:, None]  # (n, T)
    return Steps(
        boards=boards[:, :-1][played],
        target=classes[played],
        step=np.nonzero(played)[1],
        features=features,
        episodes=episodes,
    )


# ----------------------------------------------------------------------------- probes and scores


def logits_of(probe: tuple[slice, nn.Conv2d], x: Tensor) -> Tensor:
    """Return a probe's logits (B, P, 5, 100) for x (B, 2C + 6, 10, 10), as `inputs` returns it."""
    channels, conv = probe
    return conv(x[:, channels]).unflatten(1, (-1, 5)).flatten(3)


def inputs(data: Steps, index: ndarray, scale: Tensor) -> Tensor:
    """Return what probes read at steps (B,): scaled features and the board's planes,
    (B, 2C + 6, 10, 10)."""
    features, boards = (
        torch.from_numpy(x[index]).to(scale.device) for x in (data.features, data.boards)
    )
    planes = torch.stack([boards[..., channel] == value for channel, value in PLANES], 1)
    return torch.cat([features.float().permute(0, 3, 1, 2) / scale, planes], 1)


def feature_scale(features: ndarray, device: str) -> Tensor:
    """Return the RMS of each agent's features over about 1,000 steps, (2C, 1, 1); 1 where it is
    0."""
    S, C = len(features), features.shape[-1] // 2
    sample = torch.from_numpy(np.float32(features[:: max(1, S // 1000)]))
    rms = sample.unflatten(-1, (2, C)).square().mean((0, 1, 2, 4)).sqrt()
    return torch.where(rms == 0, 1.0, rms).repeat_interleave(C)[:, None, None].to(device)


def train_probes(data: Steps, device: str) -> tuple[dict, Tensor]:
    """Train all probes and seeds at once. Returns {name: (channels of `inputs` it reads, the
    convolutions of all seeds side by side)} and the features' scale.

    They learn as they would alone: the loss is the sum of theirs, and AdamW treats every parameter
    by itself."""
    S, C = len(data.step), data.features.shape[-1] // 2
    scale = feature_scale(data.features, device)
    parts = {'trained': slice(C), 'untrained': slice(C, 2 * C), 'observation': slice(2 * C, None)}
    probes = {}
    for name, (size, reads) in PROBES.items():
        torch.manual_seed(0)
        channels = len(PLANES) if reads == 'observation' else C
        conv = nn.Conv2d(channels, 5 * seeds, size, padding=size // 2).to(device)
        nn.init.zeros_(conv.bias)
        probes[name] = parts[reads], conv
    weights = [p for _, conv in probes.values() for p in conv.parameters()]
    optimizer = torch.optim.AdamW(weights, lr=learning_rate, weight_decay=weight_decay)
    order, due = torch.Generator().manual_seed(0), every()
    for epoch in range(epochs):
        total, batches = torch.zeros(len(PROBES), device=device), 0
        for batch in torch.randperm(S, generator=order).split(batch_size):
            index = np.sort(batch.numpy())  # in the file's order
            x = inputs(data, index, scale)
            y = torch.from_numpy(data.target[index]).to(device).long()  # (B, 100)
            y = y[:, None].expand(-1, seeds, -1)  # (B, P, 100)
            losses = torch.stack([
                F.cross_entropy(logits_of(probe, x).transpose(1, 2), y)
                for probe in probes.values()
            ])  # fmt: skip
            optimizer.zero_grad()
            (losses.sum() * seeds).backward()  # the sum of all probes' means over cells
            optimizer.step()
            total += losses.detach()
            batches += 1
            if due():
                share = batches * batch_size / S
                print(f'    epoch {epoch + 1} of {epochs}, {share:.0%} of it', flush=True)
        means = zip(PROBES, (total / batches).tolist(), strict=True)
        text = ', '.join(f'{name} {loss:.4f}' for name, loss in means)
        print(f'  epoch {epoch + 1} of {epochs}: loss {text}', flush=True)
    return probes, scale


class Guess(NamedTuple):
    """What P probes predict for the cells of S steps, (P, S, 100) each."""

    direction: ndarray  # int8, the likeliest direction
    probability: ndarray  # fp32, of that direction
    likeliest: ndarray  # int8, of the five classes


@torch.no_grad()
def predict(probes: dict, scale: Tensor, data: Steps) -> dict[str, Guess]:
    """Return each probe's guesses on all steps."""
    S, parts = len(data.step), {name: [] for name in probes}
    for index in np.array_split(np.arange(S), max(1, S // 512)):
        x = inputs(data, index, scale)
        for name, probe in probes.items():
            p = F.softmax(logits_of(probe, x), 2).transpose(0, 1)  # (P, B, 5, 100)
            probability, direction = p[:, :, :NEVER].max(2)
            guess = direction.to(torch.int8), probability, p.argmax(2).to(torch.int8)
            parts[name].append([x.cpu().numpy() for x in guess])
    return {
        name: Guess(*(np.concatenate(x, 1) for x in zip(*guesses, strict=True)))
        for name, guesses in parts.items()
    }


def threshold_for(probability: ndarray, right: ndarray, wanted: float) -> float:
    """Return the lowest threshold at which emitted directions have the precision that is wanted,
    infinity where there is none. probability, right: of any shape."""
    order = np.argsort(-probability, axis=None, kind='stable')
    probability, right = probability.ravel()[order], right.ravel()[order]
    share = np.cumsum(right) / np.arange(1, len(right) + 1)
    last = np.append(probability[1:] != probability[:-1], True)  # of equal ones
    return min(probability[last & (share >= wanted)].tolist(), default=inf)


def f1(target: ndarray, guess: ndarray) -> float:
    """Return the macro F1 over the classes that occur."""
    hits, in_target, in_guess = (
        np.bincount(x.ravel(), minlength=5) for x in (target[target == guess], target, guess)
    )
    occur = in_target + in_guess > 0
    return float((2 * hits[occur] / (in_target + in_guess)[occur]).mean())


def counts(emitted: ndarray, right: ndarray, target: ndarray) -> dict:
    """Return recall and precision (None: nothing to count) of guesses (..., S, 100) on targets
    (S, 100), and what they were counted over."""
    good, out = int((right & emitted).sum()), int(emitted.sum())
    asked = int(np.broadcast_to(target != NEVER, right.shape).sum())
    return {
        'recall': good / asked if asked else None,
        'precision': good / out if out else None,
        'directions': asked,
        'emitted': out,
    }


def score(data: Steps, guesses: dict[str, Guess]) -> tuple[list[dict], dict]:
    """Return one record per probe, seed and step, and for each probe its scores over the first
    steps, with one threshold for all seeds."""
    early, rows, scores = data.step < first, [], {}
    target = data.target[early]
    for name, guess in guesses.items():
        right = guess.direction == data.target
        probability, hits = guess.probability[:, early], right[:, early]
        at = {p: threshold_for(probability, hits, p) for p in (*PRECISIONS, precision)}
        found = {p: counts(probability >= at[p], hits, target) for p in at}
        by_step = []  # over all seeds
        for step in SHOWN:
            now = data.step == step
            emitted = guess.probability[:, now] >= at[precision]
            by_step.append(counts(emitted, right[:, now], data.target[now])['recall'])
        scores[name] = {
            'threshold': at[precision],
            'recall': found[precision]['recall'],
            'precision': found[precision]['precision'],
            'recall_at': {f'{p:g}': found[p]['recall'] for p in PRECISIONS},
            'recall_at_steps': dict(zip(map(str, SHOWN), by_step, strict=True)),
            'macro_f1': [f1(target, x[early]) for x in guess.likeliest],
        }
        for seed in range(len(guess.direction)):
            for step in range(min(int(data.step.max()) + 1, first)):
                now = data.step == step
                emitted = guess.probability[seed, now] >= at[precision]
                found_now = counts(emitted, right[seed, now], data.target[now])
                which = {'probe': name, 'seed': seed, 'step': step}
                rows.append({**which, **found_now, 'episodes': int(now.sum())})
    return rows, scores


# ----------------------------------------------------------------------------- pictures


def recall_figure(results: list[Result], title: str) -> None:
    """Draw recall by step, one line per agent, with one deviation over the probes' seeds; dotted:
    untrained; dashed: of the observation."""
    figure, (axes,) = new_figure(1, 3.2)
    plain = {'marker': '', 'lw': 0.9}
    styles = {'3x3': {}, 'untrained 3x3': {'ls': ':'} | plain, 'observation': {'ls': '--'} | plain}
    for i, result in enumerate(results):
        for name, style in styles.items():
            values = {}
            for row in result.rows:
                enough = row['recall'] is not None and row['episodes'] >= min_levels
                if row['probe'] == name and enough:
                    values.setdefault(row['step'], []).append(row['recall'])
            points = {step: summarize(x) for step, x in values.items()}
            draw_line(axes, points, i, '' if style else result.player.label, **style)
    axes.plot([], [], color='gray', ls=':', lw=1.2, label='untrained')
    axes.plot([], [], color='gray', ls='--', lw=0.9, label='observation alone')
    axes.set(xlabel='environment step', ylabel='recall', ylim=(0, None))
    axes.xaxis.get_major_locator().set_params(integer=True)
    save_figure(finish_figure(figure, title), out_dir, 'recall')


def plan_pictures(results: list[Result], packed: ndarray) -> None:
    """Draw one of the levels (n, 17) by each agent: plan_NAME.gif, the whole episode, and
    plans_NAME.png, its first steps and its end."""
    shortest = np.min([result.data.episodes.lengths for result in results], 0)
    # the first level that is long enough, or the longest
    level = int(np.argmax(np.minimum(shortest, max(SHOWN) + 2)))
    for result in results:
        data, guess, frames = result.data, result.guesses['3x3'], []
        threshold = result.scores['3x3']['threshold']
        lengths, nowhere = data.episodes.lengths, np.full((10, 10), -1)
        for i in lengths[:level].sum() + np.arange(lengths[level]):
            sure = guess.probability[0, i] >= threshold
            ways = np.where(sure, guess.direction[0, i], -1).reshape(10, 10)
            frames.append(plan_image(data.boards[i], ways, data.target[i].reshape(10, 10)))
        actions = data.episodes.actions[level : level + 1, : lengths[level]]
        frames.append(plan_image(replay(packed[level : level + 1], actions)[0, -1], nowhere))
        save_gif(frames, os.path.join(out_dir, f'plan_{result.player.name}.gif'), 400)
        steps = [step for step in SHOWN if step < len(frames) - 1]
        figure, panels = new_figure(len(steps) + 1, 3.4)
        for step, axes in zip([*steps, len(frames) - 1], panels, strict=True):
            text = f'step {step}' + (', solved' if step == len(frames) - 1 else '')
            axes.imshow(frames[step])
            axes.set(title=text, xticks=[], yticks=[])
        figure.suptitle(result.player.label)
        save_figure(figure, out_dir, f'plans_{result.player.name}', ('png',))


# ----------------------------------------------------------------------------- causal check


def steer(agent: Agent, state: tuple | list, cell: Tensor, vector: Tensor) -> list[Tensor]:
    """Return the carried state in which s has grown by `vector` (n, C) at `cell` (n,) of each
    board.

    The h of a ConvLSTM's experts grow by the share that makes their aggregation grow by it:
    vector / sqrt(E) (exact for softmax_l2 with equal gates), or all of it where the weights of the
    aggregation add up to 1. The cells c stay."""
    config, state = agent.config, list(state)
    boards = torch.arange(len(cell), device=cell.device)
    sums_to_1 = config.aggregation in ('mean', 'softmax_mean')
    shares = [1.0]
    if config.arch == 'convlstm':
        shares.append(1.0 if sums_to_1 else 1 / math.sqrt(config.n_expert))
    for k, share in enumerate(shares):
        x = state[k].float().reshape(len(cell), CELLS, -1, config.n_embd).clone()  # (n, 100, E, C)
        x[boards, cell] += share * vector[:, None]
        state[k] = x.view(state[k].shape).to(state[k].dtype)
    return state


def places(boards: Tensor, greedy: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Choose where to steer, on boards (n, 10, 10, 2) on which the agent would do `greedy` (n,).

    Returns for the m boards that have such places, (m,) each: the board; a random other direction,
    to a cell without wall and box; that cell; and another one, free of everything."""
    device, generator = boards.device, torch.Generator().manual_seed(0)
    variable, fixed = (boards[..., k].flatten(1) for k in (0, 1))  # (n, 100)
    at = (variable == 3).int().argmax(1, keepdim=True)
    cells = at + torch.tensor(DELTA, device=device)  # (n, 4); a board's rim is wall: all are cells
    allowed = (variable.gather(1, cells) == 0) & (fixed.gather(1, cells) != 1)
    allowed.scatter_(1, greedy[:, None], False)

    def one_of(mask: Tensor) -> Tensor:
        random = torch.rand(mask.shape, generator=generator).to(device)
        return torch.where(mask, random, -1.0).argmax(1, keepdim=True)

    direction = one_of(allowed)
    cell = cells.gather(1, direction)
    free = (variable == 0) & (fixed == 0)
    free.scatter_(1, cell, False)
    chosen = (allowed.any(1) & free.any(1)).nonzero().flatten()
    return chosen, *(x[chosen, 0] for x in (direction, cell, one_of(free)))


@torch.no_grad()
def causal_check(
    agent: Agent, packed: ndarray, episodes: Episodes, directions: Tensor
) -> list[dict]:
    """Measure whether what a probe reads steers the agent. Returns one record per strength and way
    of adding.

    In each episode, before a random one of its first steps, direction k (4, C; of length 1) of the
    1x1 probe is added to the carried s (see `steer`) at the free cell that k leads to, k not being
    what the agent would do: how often does it go there? Controls: a random vector, and the probe's
    own at another free cell. Strengths are in units of the RMS of what is carried."""
    device, long = directions.device, episodes.lengths > 1
    latest = np.minimum(episodes.lengths[long], max(first, 2))
    when = np.random.default_rng(0).integers(1, latest)  # not 0: nothing is carried then
    when = torch.from_numpy(when).to(device)
    n, T = len(when), int(when.max()) + 1
    boards = replay(packed[long], episodes.actions[long, :T])
    boards = torch.from_numpy(boards).to(device)  # (n, T + 1, 10, 10, 2)
    weights, state = agent.prepare(), agent.init_state(n)
    start = torch.ones_like(when, dtype=torch.bool)
    kept = [x.clone() for x in state]  # the carried states at step `when` of each episode
    for t in range(T):
        for saved, x in zip(kept, state, strict=True):
            saved[when == t] = x[when == t]
        state = agent.act(weights, boards[:, t], start, state)[2]
        start = torch.zeros_like(start)
    boards = boards[torch.arange(n), when]
    greedy = agent.act(weights, boards, start, kept)[0].argmax(-1)

    chosen, direction, cell, other = places(boards, greedy)
    boards, greedy, start, *kept = (x[chosen] for x in (boards, greedy, start, *kept))
    size = len(direction), directions.size(1)
    noise = torch.randn(size, generator=torch.Generator().manual_seed(0))
    noise = F.normalize(noise, dim=1).to(device)
    ways = {
        'probe': (directions[direction], cell),
        'random direction': (noise, cell),
        'other cell': (directions[direction], other),
    }
    rows = []
    for strength in STRENGTHS:
        rms = kept[0].float().square().mean().sqrt()
        length = strength * rms * math.sqrt(directions.size(1))
        for name, (vector, where) in ways.items():
            steered = steer(agent, kept, where, length * vector)
            action = agent.act(weights, boards, start, steered)[0].argmax(-1)
            rows.append({
                'added': name,
                'strength': strength,
                'follows': (action == direction).float().mean().item(),
                'changes': (action != greedy).float().mean().item(),
                'episodes': len(direction),
            })  # fmt: skip
    return rows


def thinking_check(player: Player, packed: ndarray, device: str) -> list[dict]:
    """Return the solve rate on levels (n, 17) by the steps that the agent is held at the start."""
    rows = []
    for held in HELD:
        agent = FeatureRecorder(player.agent, hold=held) if held else player.agent
        solved = run_episodes(agent, packed, device)['solved'].double().mean()
        rows.append({'held': held, 'solve_rate': solved.item()})
    return rows


# ----------------------------------------------------------------------------- report


def save_probe(result: Result) -> None:
    """Write the first seed's 3x3 probe of s[L], which play_sokoban.py draws."""
    C, (_, conv) = result.player.agent.config.n_embd, result.probes['3x3']
    parts = {
        'weight': conv.weight.detach()[:5] / result.scale[:C],
        'bias': conv.bias.detach()[:5],
        'threshold': torch.tensor(result.scores['3x3']['threshold']),
    }
    path = os.path.join(out_dir, f'probe_{result.player.name}.safetensors')
    common.write_tensors(parts, path)


def percent(x: float | None) -> str:
    """Return a share as text."""
    return 'n/a' if x is None else f'{x:.1%}'


def print_scores(result: Result) -> None:
    """Print each probe's recall, also at the first three steps."""
    for name, scores in result.scores.items():
        steps = ', '.join(percent(x) for x in scores['recall_at_steps'].values())
        print(
            f'{result.player.label}: {name} recall {percent(scores["recall"])} at precision '
            f'{percent(scores["precision"])}; at steps {", ".join(map(str, SHOWN))}: {steps}'
        )


def write_results(results: list[Result], test: ndarray, solved: ndarray, device: str) -> None:
    """Write all files; answer the further questions, on all test levels (n, 17) and on those that
    all agents solve."""
    config = results[0].player.config
    title = test_levels or config['eval_split']
    if title == 'generated':
        boxes, moves = config['n_boxes'], config['max_moves']
        title = f'generated levels, boxes: {boxes}, moves: at most {moves}'
    title += f', {len(solved)} solved by all; precision {precision:.0%} over {first} steps'
    recall_figure(results, title)
    plan_pictures(results, solved)
    rows = [{'model': r.player.name, **row} for r in results for row in r.rows]
    write_table(rows, out_dir, 'probes')
    records = []
    for result in results:
        player = result.player
        record = {'name': player.name, 'label': player.label, 'checkpoint': player.checkpoint}
        record['probes'] = result.scores
        if causal and player.config['recurrent']:
            w = result.probes['1x1'][1].weight.detach()[:5, :, 0, 0]  # of the first seed
            directions = F.normalize(w[:NEVER] - w[NEVER], dim=1)
            episodes = result.data.episodes
            record['causal'] = causal_check(player.agent, solved, episodes, directions)
        if thinking:
            record['thinking'] = thinking_check(player, test, device)
        records.append(record)
        print_scores(result)
    about = {
        'precision': precision,
        'first': first,
        'levels': len(solved),
        'commit': common.commit(),
        'device': common.device_name(device),
        'command': shlex.join(['python', *sys.argv]),
        'models': records,
    }
    write_json(about, os.path.join(out_dir, 'probes.json'))
    print(f'{out_dir}: ' + ', '.join(sorted(os.listdir(out_dir))))


# ----------------------------------------------------------------------------- main


def load_groups(device: str) -> list[list[Player]]:
    """Return the agents that `models` names, those of one pattern together."""
    groups = []
    for name in models.split(','):
        folders = sorted(filter(os.path.isdir, glob.glob(name)))
        if not folders:
            fail(f'models: no folder is named {name}')
        groups.append([load_player(folder, device) for folder in folders])
    names = [player.name for group in groups for player in group]
    if len(set(names)) < len(names):
        fail(f'models = {models!r}: two folders of one name, which their outputs would share')
    return groups


def load_levels(player: Player) -> tuple[ndarray, ndarray]:
    """Return packed training and test levels, by default those of this agent, and print their
    source."""
    config = player.config
    config = config | {
        'split': levels or config['split'],
        'eval_split': test_levels or config['eval_split'],
        'n_levels': max(n_train, config['n_levels']),
        'eval_games': max(n_test, config['eval_games']),
        'levels_dir': levels_dir or config['levels_dir'],
        'download': download,
    }
    (train, train_source), (test, test_source) = load_level_sets(config)
    print(f'{train_source}\n{test_source}\nof these the first {n_train:,} and {n_test:,}')
    return train[:n_train], test[:n_test]


def main() -> None:
    """Play, record, train probes, score them, and write figures and tables."""
    configure(globals(), quiet=True)
    if not models:
        fail('models is empty: name folders of trained agents, --models=out/a,out/b')
    common.need_packages(matplotlib=True, PIL=True)
    common.keep_memory()
    where = common.pick_device(device, threads)

    groups = load_groups(where)
    train, test = load_levels(groups[0][0])
    players = [best_player(group, test, where) for group in groups]
    del groups  # the other agents' memory
    solved = solved_by_all(players)
    print(f'{solved.sum()} of {len(test)} test levels are solved by all agents')
    if solved.sum() < min_levels:
        fail(f'fewer than min_levels = {min_levels}: take easier test_levels, or more (n_test)')
    check_disk(players, solved)

    results = []
    for player in players:
        probes, scale = train_probes(prepare(*record(player, train, where), train), where)
        data = prepare(*record(player, test[solved], where), test[solved])
        guesses = predict(probes, scale, data)
        rows, scores = score(data, guesses)
        result = Result(
            player=player,
            data=data._replace(features=None),  # closes their file
            probes=probes,
            scale=scale,
            guesses=guesses,
            rows=rows,
            scores=scores,
        )
        save_probe(result)
        results.append(result)
    write_results(results, test, test[solved], where)


if __name__ == '__main__':
    run_script(main, 'interrupted', common.last_words('fewer n_train or n_test'))

"""Train linear probes that read a Sokoban agent's plan from its state, and draw the plan.

This is the planning analysis of "Temporal Recurrence Favors Fewer Layers". The probes predict the
"agent approach direction" of Bush et al.

    python probe_sokoban.py --models=out/L1,out/L4 --test_levels=unfiltered-test
    python probe_sokoban.py config/probe_large.py    # the paper's agents; its header trains them
    python probe_sokoban.py --models=out/L4 --causal --thinking      # two further questions too

At every step of an episode that the agent plays greedily, a probe predicts for every cell of the
board in which direction the agent will next step onto it, or that it will not (five classes). The
probe is a 3x3 convolution, so that it reads the agent's s[L] at the cell and its eight neighbors.
It is compared with a 1x1 convolution, with a 3x3 convolution of the observation alone, and with
both convolutions of an untrained agent's s[L] in the same episodes: the state of a random network
predicts directions too, and training explains only the difference.

A probe emits a direction where its probability reaches a threshold: the lowest threshold at which
a share `precision` of the directions emitted in the first 20 steps (setting `first`) is right.
Recall is the share of cells that the agent will step onto for which the probe emits the right
direction, on the test levels that all agents solve. Recall at the first three steps is printed, and
drawn on a board, as in the paper.

The states of one agent at a time are kept in a temporary file in out_dir, in fp16. Their size is
printed and compared with the free disk space before they are written.

Writes into out_dir: recall.png and .svg, probes.csv, .md and .json; and for each agent plans_*.png,
plan_*.gif and probe_*.safetensors.

Shape letters: N episodes at a time, n episodes, T steps of an episode, S steps of all episodes, B
steps of a batch, P seeds of a probe, C channels (2C: trained and untrained agent side by side).
Boards are (10, 10) or (100,).
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

from configurator import Mistake, configure, run_script
from files import write_json
from common import every

import numpy as np
import torch
import torch.nn.functional as F
from numpy import ndarray
from torch import Tensor, nn

import common
from boxoban import AGENT, CELLS, DELTA, WALL, load_level_sets
from convlstm import PLANES, Agent, build_agent, load_agent
from figures import draw_line, finish_figure, new_figure, percent_axis, save_figure, summarize
from figures import write_table
from play_sokoban import board_image, plan_image, save_gif
from sokoban import TIME_LIMIT, FeatureRecorder, replay, run_episodes

# -----------------------------------------------------------------------------
# fmt: off
# agents and levels
models = ''                    # folders of trained agents, separated by commas; of the folders that
                               # match a pattern such as 'out/L4_s*', the agent that solves most
                               # test levels is used
best = False                   # use the agents' best checkpoints instead of their last ones
out_dir = 'out/probe'          # folder for figures and tables
levels = ''                    # a split or a file to train probes on; '': the first agent's levels
test_levels = ''               # the same to score them on; '': the first agent's evaluation levels
levels_dir = ''                # folder of Boxoban's levels; '': that of the first agent
download = False               # download splits that are not in levels_dir
n_train = 3000                 # training episodes, as in the paper
n_test = 1000                  # test levels; in the paper all agents solve 906 of them
# scores
first = 20                     # number of first steps, which set the threshold and are drawn
precision = 0.93               # share of emitted directions that are right, as in the paper
min_levels = 50                # stop if fewer test levels than this are solved by all agents; also
                               # the fewest episodes for which a step is drawn
# probes
seeds = 3                      # probes of each kind, trained side by side
epochs = 10                    # passes over the training steps (our choice)
batch_size = 16                # steps per batch
learning_rate = 1e-3           # of AdamW
weight_decay = 1e-3            # of AdamW
# further questions
causal = False                 # does the agent follow a direction that is added to its state?
                               # (recurrent agents only)
thinking = False               # does an agent solve more if it is held for some steps at the start?
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
PROBES = {  # {name: (size of the convolution, what it reads)}
    '3x3': (3, 'trained'),
    '1x1': (1, 'trained'),
    'untrained 3x3': (3, 'untrained'),
    'untrained 1x1': (1, 'untrained'),
    'observation': (3, 'observation'),
}
# recall is reported at these precisions too, because not every probe reaches `precision`
PRECISIONS = (0.7, 0.8, 0.9)
SHOWN = (0, 1, 2)  # steps whose recall is printed and whose boards are drawn, as in the paper
STRENGTHS = (1.0, 2.0, 4.0, 8.0, 16.0)  # of the causal check, in units of the RMS of s
HELD = (0, 1, 2, 4, 8)  # steps for which an agent is held at the start of an episode


# ----------------------------------------------------------------------------- agents


class Episodes(NamedTuple):
    """What an agent did on n levels."""

    actions: ndarray  # (n, time limit) int8
    lengths: ndarray  # (n,) steps played
    solved: ndarray  # (n,) bool


@dataclass
class Player:
    """A trained agent, and its episodes on the test levels."""

    agent: Agent
    untrained: Agent  # with the initial weights of the run (without its init_from)
    config: dict  # settings of the run
    checkpoint: str  # file of the weights
    name: str  # of the folder
    label: str  # in figures
    test: Episodes | None = None

    @property
    def time_limit(self) -> int:
        return self.config.get('time_limit', TIME_LIMIT)


@dataclass
class Result:
    """What the probes of one player found. Dictionaries are by the name of the probe."""

    player: Player
    data: 'Steps'  # on the test levels that all agents solve, without features
    probes: dict[str, 'Probe']
    scale: Tensor  # (2C, 1, 1), the RMS that features are divided by
    guess: 'Guess'  # of the 3x3 probe
    rows: list[dict]  # one per probe, seed and step
    scores: dict[str, dict]  # over the first steps


def load_player(folder: str, device: str) -> Player:
    """Return the agent in a folder, a run or an export, with the same agent before training."""
    agent, config, checkpoint = load_agent(folder, 'best' if best else 'last', device)
    # an export does not have all settings of its run, an old one not even its training levels
    exported = {'split': config['eval_split'], 'n_levels': 1, 'eval_games': 1, 'levels_dir': ''}
    config = exported | config
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
    """Return the result of sokoban.run_episodes as arrays."""
    return Episodes(
        actions=result['actions'].numpy(),
        lengths=result['steps'].long().numpy(),
        solved=result['solved'].numpy(),
    )


def best_player(players: list[Player], packed: ndarray, device: str) -> Player:
    """Let agents play levels (n, 17) greedily, set their `test` episodes and return the agent that
    solves most levels, the first one in a tie."""
    for player in players:
        result = run_episodes(player.agent, packed, device, time_limit=player.time_limit)
        player.test = as_episodes(result)
        rate = player.test.solved.mean()
        print(f'{player.checkpoint}: solves {rate:.1%} of the test levels', flush=True)
    return max(players, key=lambda player: player.test.solved.mean())


def name_equal_labels(players: list[Player]) -> None:
    """Append the name of the folder to labels that several agents share."""
    labels = [player.label for player in players]
    for player in players:
        if labels.count(player.label) > 1:
            player.label += f', {player.name}'


def solved_by_all(players: list[Player]) -> ndarray:
    """Return a mask (n,) of the test levels that every agent solves."""
    return np.all([player.test.solved for player in players], 0)


# ----------------------------------------------------------------------------- steps and targets


def feature_bytes(player: Player, steps: float) -> float:
    """Return the bytes of the features of a number of steps: fp16, trained and untrained."""
    return 2 * steps * CELLS * 2 * player.agent.config.n_embd


def check_disk(players: list[Player], n_episodes: int, solved: ndarray) -> None:
    """Print how much disk space the features of n_episodes training episodes and of the test levels
    `solved` need, and end the script if there is less.

    Training episodes are assumed to be as long as the test episodes. The features of one agent on
    either the training or the test levels exist at a time."""
    need = 0.0
    for player in players:
        lengths = player.test.lengths
        steps = max(n_episodes * lengths.mean(), lengths[solved].sum())
        need = max(need, feature_bytes(player, steps))
    os.makedirs(out_dir, exist_ok=True)
    free = shutil.disk_usage(out_dir).free
    print(f"the agents' states take about {need / 1e9:.2f} GB in {out_dir} (temporary, fp16)")
    if need > free:
        free_there = f'{free / 1e9:.2f} GB are free there'
        raise Mistake(f'out_dir = {out_dir!r}: {free_there}: choose another, or a smaller n_train')


def record(player: Player, packed: ndarray, device: str) -> tuple[Episodes, ndarray]:
    """Let an agent play levels (n, 17) while the untrained one sees the same boards. Returns the
    episodes, and s[L] of both at every step, (S, 10, 10, 2C) fp16, mapped from a temporary file,
    which lives as long as the array."""
    n = len(packed)
    parts = []
    is_due = every()
    file = tempfile.TemporaryFile(dir=out_dir)
    print(f'{player.label}: {n:,} episodes', flush=True)
    for i in range(0, n, BATCH):
        recorder = FeatureRecorder(player.agent, player.untrained)
        batch = packed[i : i + BATCH]
        result = run_episodes(recorder, batch, device, time_limit=player.time_limit)
        episodes = as_episodes(result)
        features = torch.stack(recorder.features, 1).numpy()  # (N, T, 10, 10, 2C)
        played = np.arange(features.shape[1]) < episodes.lengths[:, None]  # (N, T)
        file.write(features[played].data)
        parts.append(episodes)
        if is_due():
            print(f'    {i + len(batch):,} of {n:,} episodes', flush=True)
    file.flush()
    episodes = Episodes(*map(np.concatenate, zip(*parts, strict=True)))
    shape = (int(episodes.lengths.sum()), 10, 10, 2 * player.agent.config.n_embd)
    return episodes, np.memmap(file, np.float16, 'r', shape=shape)


def targets(boards: ndarray, actions: ndarray, lengths: ndarray) -> ndarray:
    """Return the class of every cell at every step t, (n, T, 100) int8: the direction of the first
    move onto the cell at step t or later, or NEVER.

    boards: (n, T + 1, 10, 10, 2). actions: (n, T). lengths: (n,), the steps that were played."""
    n, T = actions.shape
    at = (boards[..., 0].reshape(n, T + 1, CELLS) == AGENT).argmax(2)  # (n, T + 1) agents' cells
    classes = np.empty((n, T, CELLS), np.int8)
    next_class = np.full((n, CELLS), NEVER, np.int8)
    for t in reversed(range(T)):
        moved = np.flatnonzero((at[:, t] != at[:, t + 1]) & (t < lengths))
        next_class[moved, at[moved, t + 1]] = actions[moved, t]
        classes[:, t] = next_class
    return classes


class Steps(NamedTuple):
    """The steps of an agent's episodes, one episode after another."""

    boards: ndarray  # observations (S, 10, 10, 2)
    target: ndarray  # (S, 100) int8, see `targets`
    step: ndarray  # (S,), number of the step within its episode
    features: ndarray | None  # (S, 10, 10, 2C) fp16, in a file
    episodes: Episodes


def make_steps(episodes: Episodes, features: ndarray, packed: ndarray) -> Steps:
    """Return the steps of episodes on the levels (n, 17)."""
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


class Probe(NamedTuple):
    """A linear probe with P seeds."""

    channels: slice  # what it reads of `inputs`
    conv: nn.Conv2d  # the convolutions of all seeds side by side: 5 P output channels

    def logits(self, x: Tensor) -> Tensor:
        """Return logits (B, P, 5, 100) for x (B, 2C + 6, 10, 10) from `inputs`."""
        return self.conv(x[:, self.channels]).unflatten(1, (-1, 5)).flatten(3)


def inputs(data: Steps, index: ndarray, scale: Tensor) -> Tensor:
    """Return what probes read at the steps `index` (B,): scaled features and the board's planes,
    (B, 2C + 6, 10, 10)."""
    features = torch.from_numpy(data.features[index]).to(scale.device)
    boards = torch.from_numpy(data.boards[index]).to(scale.device)
    planes = torch.stack([boards[..., channel] == value for channel, value in PLANES], 1)
    return torch.cat([features.float().permute(0, 3, 1, 2) / scale, planes], 1)


def feature_scale(features: ndarray, device: str) -> Tensor:
    """Return the RMS of each agent's features in about 1,000 steps, for every channel (2C, 1, 1).
    An RMS of 0 is replaced by 1."""
    S, C = len(features), features.shape[-1] // 2
    sample = torch.from_numpy(np.float32(features[:: max(1, S // 1000)]))
    rms = sample.unflatten(-1, (2, C)).square().mean((0, 1, 2, 4)).sqrt()
    return torch.where(rms == 0, 1.0, rms).repeat_interleave(C)[:, None, None].to(device)


def train_probes(data: Steps, device: str) -> tuple[dict[str, Probe], Tensor]:
    """Train the probes of PROBES, all seeds at once; return them by name, and the features' scale.

    Each learns as it would alone, because the loss is the sum of the probes' losses, and AdamW
    treats every parameter by itself."""
    S, C = len(data.step), data.features.shape[-1] // 2
    scale = feature_scale(data.features, device)
    parts = {'trained': slice(C), 'untrained': slice(C, 2 * C), 'observation': slice(2 * C, None)}
    probes = {}
    for name, (size, reads) in PROBES.items():
        torch.manual_seed(0)
        channels = len(PLANES) if reads == 'observation' else C
        conv = nn.Conv2d(channels, 5 * seeds, size, padding=size // 2).to(device)
        nn.init.zeros_(conv.bias)
        probes[name] = Probe(channels=parts[reads], conv=conv)
    weights = [p for probe in probes.values() for p in probe.conv.parameters()]
    optimizer = torch.optim.AdamW(weights, lr=learning_rate, weight_decay=weight_decay)
    order = torch.Generator().manual_seed(0)
    is_due = every()
    for epoch in range(epochs):
        total = torch.zeros(len(PROBES), device=device)
        batches = 0
        for batch in torch.randperm(S, generator=order).split(batch_size):
            index = np.sort(batch.numpy())  # in the order of the file
            x = inputs(data, index, scale)
            y = torch.from_numpy(data.target[index]).to(device).long()  # (B, 100)
            y = y[:, None].expand(-1, seeds, -1)  # (B, P, 100)
            losses = torch.stack([
                F.cross_entropy(probe.logits(x).transpose(1, 2), y)
                for probe in probes.values()
            ])  # fmt: skip
            optimizer.zero_grad()
            (losses.sum() * seeds).backward()  # the sum of all probes' means over cells
            optimizer.step()
            total += losses.detach()
            batches += 1
            if is_due():
                share = batches * batch_size / S
                print(f'    epoch {epoch + 1} of {epochs}: {share:.0%}', flush=True)
        means = zip(PROBES, (total / batches).tolist(), strict=True)
        text = ', '.join(f'{name} {loss:.4f}' for name, loss in means)
        print(f'  epoch {epoch + 1} of {epochs}: loss {text}', flush=True)
    return probes, scale


class Guess(NamedTuple):
    """What P seeds of a probe predict for the cells of S steps, (P, S, 100) each."""

    direction: ndarray  # int8, the most likely direction
    probability: ndarray  # fp32, of that direction
    likeliest: ndarray  # int8, the most likely of the five classes


@torch.no_grad()
def predict(probes: dict[str, Probe], scale: Tensor, data: Steps) -> dict[str, Guess]:
    """Return each probe's guesses at all steps."""
    S = len(data.step)
    parts = {name: [] for name in probes}
    for index in np.array_split(np.arange(S), max(1, S // 512)):
        x = inputs(data, index, scale)
        for name, probe in probes.items():
            p = F.softmax(probe.logits(x), 2).transpose(0, 1)  # (P, B, 5, 100)
            probability, direction = p[:, :, :NEVER].max(2)
            guess = Guess(
                direction=direction.to(torch.int8).cpu().numpy(),
                probability=probability.cpu().numpy(),
                likeliest=p.argmax(2).to(torch.int8).cpu().numpy(),
            )
            parts[name].append(guess)
    return {
        name: Guess(*(np.concatenate(arrays, 1) for arrays in zip(*guesses, strict=True)))
        for name, guesses in parts.items()
    }


def threshold_for(probability: ndarray, right: ndarray, wanted: float) -> float:
    """Return the lowest threshold at which the emitted directions have the wanted precision, or
    infinity if there is none. probability and right (bool) have the same shape."""
    order = np.argsort(-probability, axis=None, kind='stable')
    probability, right = probability.ravel()[order], right.ravel()[order]
    precisions = np.cumsum(right) / np.arange(1, len(right) + 1)
    # equal probabilities are emitted together: only the last of them can be the threshold
    is_last = np.append(probability[1:] != probability[:-1], True)
    return min(probability[is_last & (precisions >= wanted)].tolist(), default=inf)


def macro_f1(target: ndarray, guess: ndarray) -> float:
    """Return the mean F1 of the classes that occur in the targets or the guesses."""
    hits = np.bincount(target[target == guess].ravel(), minlength=5)
    total = np.bincount(target.ravel(), minlength=5) + np.bincount(guess.ravel(), minlength=5)
    occurs = total > 0
    return float((2 * hits[occurs] / total[occurs]).mean())


def recall_and_precision(emitted: ndarray, right: ndarray, target: ndarray) -> dict:
    """Return recall and precision of directions, None for a share of nothing, with the numbers of
    directions in the targets and of emitted ones.

    emitted, right: (..., S, 100) bool. target: (S, 100)."""
    n_right = int((right & emitted).sum())
    n_emitted = int(emitted.sum())
    n_directions = int(np.broadcast_to(target != NEVER, right.shape).sum())
    return {
        'recall': n_right / n_directions if n_directions else None,
        'precision': n_right / n_emitted if n_emitted else None,
        'directions': n_directions,
        'emitted': n_emitted,
    }


def score(data: Steps, guesses: dict[str, Guess]) -> tuple[list[dict], dict]:
    """Return one row per probe, seed and step, and the scores of each probe over the first steps.
    All seeds of a probe share one threshold."""
    rows, scores = [], {}
    early = data.step < first
    target = data.target[early]
    for name, guess in guesses.items():
        right = guess.direction == data.target  # (P, S, 100)
        probability, early_right = guess.probability[:, early], right[:, early]
        thresholds, found = {}, {}  # by precision
        for p in (*PRECISIONS, precision):
            thresholds[p] = threshold_for(probability, early_right, p)
            found[p] = recall_and_precision(probability >= thresholds[p], early_right, target)
        emitted = guess.probability >= thresholds[precision]
        recall_at_steps = {}  # over all seeds
        for step in SHOWN:
            mask = data.step == step
            counts = recall_and_precision(emitted[:, mask], right[:, mask], data.target[mask])
            recall_at_steps[str(step)] = counts['recall']
        scores[name] = {
            'threshold': thresholds[precision],
            'recall': found[precision]['recall'],
            'precision': found[precision]['precision'],
            'recall_at': {f'{p:g}': found[p]['recall'] for p in PRECISIONS},
            'recall_at_steps': recall_at_steps,
            'macro_f1': [macro_f1(target, x[early]) for x in guess.likeliest],
        }
        for seed in range(len(guess.direction)):
            for step in range(min(int(data.step.max()) + 1, first)):
                mask = data.step == step
                counts = recall_and_precision(
                    emitted[seed, mask], right[seed, mask], data.target[mask]
                )
                row = {'probe': name, 'seed': seed, 'step': step, **counts}
                rows.append({**row, 'episodes': int(mask.sum())})
    return rows, scores


# ----------------------------------------------------------------------------- pictures


def recall_figure(results: list[Result], title: str) -> None:
    """Draw recall by step, with one standard deviation over seeds: for each agent a line for its
    3x3 probe, a dotted one for the untrained agent and a dashed one for the observation alone."""
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
    axes.plot([], [], color='gray', ls=':', lw=1.2, label='untrained agent')
    axes.plot([], [], color='gray', ls='--', lw=0.9, label='observation alone')
    axes.set(xlabel='environment step', ylabel='recall', ylim=(0, None))
    percent_axis(axes.yaxis)
    axes.xaxis.get_major_locator().set_params(integer=True)
    save_figure(finish_figure(figure, title), out_dir, 'recall')


def plan_pictures(results: list[Result], packed: ndarray) -> None:
    """Draw the plans of every agent on one of the levels (n, 17): plan_NAME.gif is the whole
    episode, plans_NAME.png its first steps and its end."""
    shortest = np.min([result.data.episodes.lengths for result in results], 0)
    # the first level that is long enough, or the longest
    level = int(np.argmax(np.minimum(shortest, max(SHOWN) + 2)))
    for result in results:
        data, guess = result.data, result.guess
        threshold = result.scores['3x3']['threshold']
        lengths = data.episodes.lengths
        frames = []
        for i in lengths[:level].sum() + np.arange(lengths[level]):
            is_emitted = guess.probability[0, i] >= threshold
            plan = np.where(is_emitted, guess.direction[0, i], -1).reshape(10, 10)
            frames.append(plan_image(data.boards[i], plan, data.target[i].reshape(10, 10)))
        actions = data.episodes.actions[level : level + 1, : lengths[level]]
        end = replay(packed[level : level + 1], actions)[0, -1]
        frames.append(board_image(end))
        save_gif(frames, os.path.join(out_dir, f'plan_{result.player.name}.gif'), 400)
        steps = [step for step in SHOWN if step < len(frames) - 1]
        figure, panels = new_figure(len(steps) + 1, 3.4)
        outcome = 'solved' if data.episodes.solved[level] else 'not solved'
        for step, axes in zip([*steps, len(frames) - 1], panels, strict=True):
            text = f'step {step}' + (f', {outcome}' if step == len(frames) - 1 else '')
            axes.imshow(frames[step])
            axes.set(title=text, xticks=[], yticks=[])
        figure.suptitle(result.player.label)
        save_figure(figure, out_dir, f'plans_{result.player.name}', ('png',))


# ----------------------------------------------------------------------------- causal check


def steer(agent: Agent, state: tuple | list, cell: Tensor, vector: Tensor) -> list[Tensor]:
    """Return the carried state after `vector` (n, C) is added to s at the cell (n,) of each board.

    In a ConvLSTM `vector` is also added to each expert's h, so that A(h) grows by it. Where the
    aggregation's weights do not add up to 1, vector / sqrt(E) is added instead; for softmax_l2 that
    is exact only if all gates are equal. The cells c do not change."""
    config = agent.config
    state = list(state)
    boards = torch.arange(len(cell), device=cell.device)
    adds_up_to_1 = config.aggregation in ('mean', 'softmax_mean')
    factors = [1.0]  # of s, and of each h
    if config.arch == 'convlstm':
        factors.append(1.0 if adds_up_to_1 else 1 / math.sqrt(config.n_expert))
    for k, factor in enumerate(factors):
        x = state[k].float().reshape(len(cell), CELLS, -1, config.n_embd).clone()  # (n, 100, E, C)
        x[boards, cell] += factor * vector[:, None]
        state[k] = x.view(state[k].shape).to(state[k].dtype)
    return state


def choose_places(boards: Tensor, greedy: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Choose where to steer on boards (n, 10, 10, 2) on which the agent would take the actions
    `greedy` (n,).

    Returns (m,) each, for the m boards that have such cells: the number of the board; a random
    direction that is not the greedy one, to a cell without wall and box; that cell; and a random
    other cell that is empty floor."""
    device = boards.device
    generator = torch.Generator().manual_seed(0)
    variable, fixed = (boards[..., k].flatten(1) for k in (0, 1))  # (n, 100)
    at = (variable == AGENT).int().argmax(1, keepdim=True)
    cells = at + torch.tensor(DELTA, device=device)  # (n, 4), on the board, since its rim is wall
    allowed = (variable.gather(1, cells) == 0) & (fixed.gather(1, cells) != WALL)
    allowed.scatter_(1, greedy[:, None], False)

    def choose(mask: Tensor) -> Tensor:
        random = torch.rand(mask.shape, generator=generator).to(device)
        return torch.where(mask, random, -1.0).argmax(1, keepdim=True)

    direction = choose(allowed)
    cell = cells.gather(1, direction)
    free = (variable == 0) & (fixed == 0)
    free.scatter_(1, cell, False)
    other = choose(free)
    chosen = (allowed.any(1) & free.any(1)).nonzero().flatten()
    return chosen, direction[chosen, 0], cell[chosen, 0], other[chosen, 0]


@torch.no_grad()
def causal_check(
    agent: Agent, packed: ndarray, episodes: Episodes, directions: Tensor
) -> list[dict]:
    """Measure how often the agent follows a direction that is added to its carried state. Returns
    one row per strength and kind of addition.

    directions: (4, C), the vectors of the 1x1 probe for the four directions, of length 1. In each
    episode, before a random one of its first steps, a direction is chosen that the agent would not
    take, and its vector is added to s (see `steer`) at the free cell that it leads to. Controls are
    a random vector at the same cell, and the same vector at another free cell. The strength is the
    RMS of the vector in units of the RMS of s."""
    device = directions.device
    is_long = episodes.lengths > 1
    end = np.minimum(episodes.lengths[is_long], max(first, 2))
    steer_step = np.random.default_rng(0).integers(1, end)  # not 0, when nothing is carried yet
    steer_step = torch.from_numpy(steer_step).to(device)
    n, T = len(steer_step), int(steer_step.max()) + 1
    boards = replay(packed[is_long], episodes.actions[is_long, :T])
    boards = torch.from_numpy(boards).to(device)  # (n, T + 1, 10, 10, 2)
    weights, state = agent.prepare(), agent.init_state(n)
    start = torch.ones_like(steer_step, dtype=torch.bool)
    carried = [x.clone() for x in state]  # before step steer_step of each episode
    for t in range(T):
        for saved, x in zip(carried, state, strict=True):
            saved[steer_step == t] = x[steer_step == t]
        _, _, state = agent.act(weights, boards[:, t], start, state)
        start = torch.zeros_like(start)
    boards = boards[torch.arange(n), steer_step]
    greedy = agent.act(weights, boards, start, carried)[0].argmax(-1)

    chosen, direction, cell, other_cell = choose_places(boards, greedy)
    boards, greedy, start = boards[chosen], greedy[chosen], start[chosen]
    carried = [x[chosen] for x in carried]
    shape = (len(direction), directions.size(1))
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    noise = F.normalize(noise, dim=1).to(device)
    additions = {  # {name: (vectors (m, C), cells (m,))}
        'probe': (directions[direction], cell),
        'random direction': (noise, cell),
        'other cell': (directions[direction], other_cell),
    }
    rms = carried[0].float().square().mean().sqrt()
    rows = []
    for strength in STRENGTHS:
        length = strength * rms * math.sqrt(directions.size(1))
        for name, (vectors, cells) in additions.items():
            steered = steer(agent, carried, cells, length * vectors)
            action = agent.act(weights, boards, start, steered)[0].argmax(-1)
            rows.append({
                'added': name,
                'strength': strength,
                'follows': (action == direction).float().mean().item(),
                'changes': (action != greedy).float().mean().item(),
                'episodes': len(direction),
            })  # fmt: skip
    return rows


class HeldAgent:
    """An agent that sees the first board `hold` more times before its first action."""

    def __init__(self, agent: Agent, hold: int):
        self.agent = agent
        self.hold = hold

    def prepare(self) -> NamedTuple:
        return self.agent.prepare()

    def init_state(self, N: int) -> tuple:
        return self.agent.init_state(N)

    def act(self, weights: NamedTuple, obs: Tensor, start: Tensor, state: tuple) -> tuple:
        if start.all():  # all boards start an episode together at the first step alone
            for _ in range(self.hold):
                _, _, state = self.agent.act(weights, obs, start, state)
                start = torch.zeros_like(start)
        return self.agent.act(weights, obs, start, state)


def thinking_check(player: Player, packed: ndarray, device: str) -> list[dict]:
    """Return the solve rates on levels (n, 17) of an agent that sees the first board for some more
    steps before it acts."""
    rows = []
    for held in HELD:
        agent = HeldAgent(player.agent, hold=held)
        result = run_episodes(agent, packed, device, time_limit=player.time_limit)
        rows.append({'held': held, 'solve_rate': result['solved'].double().mean().item()})
    return rows


# ----------------------------------------------------------------------------- report


def save_probe(result: Result) -> None:
    """Write the first seed's 3x3 probe of s[L], whose plans play_sokoban.py draws."""
    C = result.player.agent.config.n_embd
    conv = result.probes['3x3'].conv
    parts = {
        'weight': conv.weight.detach()[:5] / result.scale[:C],
        'bias': conv.bias.detach()[:5],
        'threshold': torch.tensor(result.scores['3x3']['threshold']),
    }
    path = os.path.join(out_dir, f'probe_{result.player.name}.safetensors')
    common.write_tensors(parts, path)


def percent(x: float | None) -> str:
    """Return a share as text, such as '12.3%'."""
    return 'n/a' if x is None else f'{x:.1%}'


def print_scores(result: Result) -> None:
    """Print each probe's recall over the first steps and at the first three of them."""
    for name, scores in result.scores.items():
        steps = ', '.join(percent(x) for x in scores['recall_at_steps'].values())
        print(
            f'{result.player.label}: {name} recall {percent(scores["recall"])} at precision '
            f'{percent(scores["precision"])}; at steps {", ".join(map(str, SHOWN))}: {steps}'
        )


def write_results(results: list[Result], test: ndarray, solved: ndarray, device: str) -> None:
    """Answer the further questions, and write all files but the probes.

    test: all test levels (n, 17), for `thinking`. solved: those that all agents solve."""
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
    entries = []
    for result in results:
        player = result.player
        entry = {
            'name': player.name,
            'label': player.label,
            'checkpoint': player.checkpoint,
            'probes': result.scores,
        }
        if causal and player.config['recurrent']:
            w = result.probes['1x1'].conv.weight.detach()[:5, :, 0, 0]  # of the first seed
            directions = F.normalize(w[:NEVER] - w[NEVER], dim=1)
            episodes = result.data.episodes
            entry['causal'] = causal_check(player.agent, solved, episodes, directions)
        if thinking:
            entry['thinking'] = thinking_check(player, test, device)
        entries.append(entry)
        print_scores(result)
    about = {
        'precision': precision,
        'first': first,
        'levels': len(solved),
        'commit': common.commit(),
        'device': common.device_name(device),
        'command': shlex.join(['python', *sys.argv]),
        'models': entries,
    }
    write_json(about, os.path.join(out_dir, 'probes.json'))
    print(f'{out_dir}: ' + ', '.join(sorted(os.listdir(out_dir))))


# ----------------------------------------------------------------------------- main


def load_groups(device: str) -> list[list[Player]]:
    """Return the agents that `models` names, in one list for each pattern."""
    groups = []
    for name in models.split(','):
        folders = sorted(filter(os.path.isdir, glob.glob(name)))
        if not folders:
            raise Mistake(f'models: no folder is named {name}')
        groups.append([load_player(folder, device) for folder in folders])
    # of a pattern only one agent is kept, so its folders may have one name
    names = [name for group in groups for name in {player.name for player in group}]
    if len(set(names)) < len(names):
        raise Mistake(
            f'models = {models!r}: two folders of one name, whose outputs would have one name too'
        )
    return groups


def load_probe_levels(player: Player) -> tuple[ndarray, ndarray]:
    """Return packed training and test levels, by default those of this agent, and print their
    source. Ends the script if both are the first levels of one split."""
    config = player.config
    config = config | {
        'split': levels or config['split'],
        'eval_split': test_levels or config['eval_split'],
        'n_levels': max(n_train, config['n_levels']),
        'eval_games': max(n_test, config['eval_games']),
        'levels_dir': levels_dir or config['levels_dir'],
        'download': download,
    }
    if config['split'] == config['eval_split'] != 'generated':
        same = f'probes would be trained on the test levels, {config["split"]}'
        raise Mistake(f'levels = {levels!r}: {same}: set --levels to others')
    (train, train_source), (test, test_source) = load_level_sets(config)
    train, test = train[:n_train], test[:n_test]
    print(f'training levels: {train_source}; {len(train):,} of them are used')
    print(f'test levels: {test_source}; {len(test):,} of them are used')
    return train, test


def main() -> None:
    """Record episodes, train probes on them, score the probes, and write figures and tables."""
    configure(globals(), quiet=True)
    if not models:
        raise Mistake('models is empty: name folders of trained agents, --models=out/a,out/b')
    common.need_packages(matplotlib=True, pandas=True, PIL=True)
    common.keep_memory()
    torch_device = common.pick_device(device, threads)

    groups = load_groups(torch_device)
    train, test = load_probe_levels(groups[0][0])
    players = [best_player(group, test, torch_device) for group in groups]
    name_equal_labels(players)
    del groups  # frees the memory of the other agents
    solved = solved_by_all(players)
    print(f'{solved.sum()} of {len(test)} test levels are solved by all agents')
    if solved.sum() < min_levels:
        raise Mistake(
            f'fewer than min_levels = {min_levels}: use easier test_levels or a larger n_test'
        )
    check_disk(players, len(train), solved)

    results = []
    for player in players:
        episodes, features = record(player, train, torch_device)
        probes, scale = train_probes(make_steps(episodes, features, train), torch_device)
        del features  # deletes their file
        episodes, features = record(player, test[solved], torch_device)
        if n_failed := (~episodes.solved).sum():  # other batch sizes round differently
            print(f'  {n_failed} of these {len(episodes.solved)} episodes are not solved this time')
        data = make_steps(episodes, features, test[solved])
        guesses = predict(probes, scale, data)
        rows, scores = score(data, guesses)
        data = data._replace(features=None)
        del features  # deletes their file
        result = Result(
            player=player,
            data=data,
            probes=probes,
            scale=scale,
            guess=guesses['3x3'],
            rows=rows,
            scores=scores,
        )
        save_probe(result)
        results.append(result)
    write_results(results, test, test[solved], torch_device)


if __name__ == '__main__':
    run_script(main, 'interrupted', common.error_explainer('fewer n_train or n_test'))

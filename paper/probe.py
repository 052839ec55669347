"""Train linear probes that read a Sokoban agent's plan from its state, and draw the plan.

This is the planning analysis of "Temporal Recurrence Favors Fewer Layers". The probes predict the
"agent approach direction" of Bush et al.

$ python -m paper.probe out/L1 out/L4 --test_levels=unfiltered-test
$ python -m paper.probe config/probe_large.py FOLDER ...    # the paper's agents: see its header

The arguments before the first option name the folders of agents, of runs or of exports, and config
files. Of runs that differ only in their seed, the agent that solves most test levels is used.

At every step of an episode that the agent plays greedily, a probe predicts for every cell of the
board in which direction the agent will next step onto it, or that it will not (five classes). The
probe is a 3x3 convolution, so that it reads the agent's s[L] at the cell and its eight neighbors.
It is compared with a 1x1 convolution, with a 3x3 convolution of the observation alone, and with
both convolutions of an untrained agent's s[L] in the same episodes: the state of a random network
predicts directions too, and training explains only the difference.

A probe emits a direction where its probability reaches a threshold: the lowest threshold at which
a share `precision` of the directions emitted in the first 20 steps (setting `first`) is right.
Recall is the share of cells that the agent will step onto for which the probe emits the right
direction, on the test levels that all agents solve.

The states of one agent at a time are held in memory: 400 D bytes per step for an agent of width D,
and twice that while they are recorded. 3,000 episodes of 60 steps at D = 256, the paper's size, are
18 GB, so that 40 GB are needed.

Writes into out_dir: recall.png and .svg; probes.csv, the counts by probe, seed and step;
probes.json, the scores over the first steps; plans.png, one level as all agents play it, with the
arrows of their probes; and probe_NAME.safetensors, the probe of each agent, for
`play_sokoban.py --probe=FILE`.

Shapes: N episodes at a time, n episodes, T steps of an episode, S steps of all episodes, P seeds of
a probe, C channels (2C: trained and untrained agent side by side). Boards are (10, 10) or (100,).
"""

import itertools
import os
import shlex
import sys
from glob import escape, glob
from math import inf
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for python PATH/paper/probe.py

from configurator import configure
from support.script import UserError, run_script

import numpy as np
import pandas
import torch
import torch.nn.functional as F
from numpy import ndarray
from torch import Tensor, nn

from convlstm import AGENT_RANGES, PLANES, Agent, build_agent, load_agent
from levels import AGENT, CELLS, load_level_sets, plan_image
from paper.plans import script_of
from paper.sweep import DATA, NEUTRAL
from sokoban import TIME_LIMIT, FeatureRecorder, replay, run_episodes
from support import ranks
from support.code import code_record
from support.export import weights_checksum
from support.files import write_json, write_tensors, write_text
from support.plots import Figure, chart, plain, save_figure
from support.run_folder import PER_CALL

# -----------------------------------------------------------------------------
# fmt: off
# agents and levels
which = 'last'                 # of a run: its 'last' agent or its 'best'
out_dir = 'out/probe'          # folder for figures and tables
overwrite = False              # replace the results of an earlier analysis in out_dir
levels = ''                    # split or file to train probes on; '' = the first agent's levels
test_levels = ''               # the same to score them on; '' = the first agent's evaluation levels
levels_dir = ''                # folder of Boxoban's levels; '' = that of the first agent
download = False               # download splits that are not in levels_dir
n_train = 3000                 # training episodes, as in the paper
n_test = 1000                  # test levels; in the paper all agents solve 906 of them
# scores
first = 20                     # number of first steps, which set the threshold and are drawn
precision = 0.93               # share of emitted directions that are right, as in the paper
min_levels = 50                # stop if all agents together solve fewer test levels than this; also
                               # the fewest episodes for which a step is drawn
# probes
seeds = 3                      # probes of each kind, trained side by side
epochs = 10                    # passes over the training steps (our choice)
batch_size = 16                # steps per batch
learning_rate = 1e-3           # of AdamW
weight_decay = 1e-3            # of AdamW
# system
device = 'auto'                # 'auto' (cuda if there is one), 'cpu', 'cuda' or 'cuda:1'
dtype = ''                     # of agents' convolutions: 'float32', 'bfloat16'; '' = as trained
threads = 0                    # CPU threads; 0 = torch's choice
# fmt: on
# -----------------------------------------------------------------------------
RANGES = {
    'which': ['last', 'best'],
    'dtype': ['', *AGENT_RANGES['dtype']],
    'precision': (0.01, 1),
    'threads': (0, 1024),
    **dict.fromkeys(('n_train', 'n_test', 'first', 'min_levels'), (1, inf)),
    **dict.fromkeys(('seeds', 'epochs', 'batch_size'), (1, inf)),
}
NEVER = 4  # classes 0..3: up, right, down, left, as the actions
BATCH = 64  # episodes that are played at once
PROBES = {  # name: (size of the convolution, what it reads)
    '3x3': (3, 'trained'),
    '1x1': (1, 'trained'),
    'untrained 3x3': (3, 'untrained'),
    'untrained 1x1': (1, 'untrained'),
    'observation': (3, 'observation'),
}
DRAWN = {  # probes in recall.png: (line style, end of their label)
    '3x3': ('-', ''),
    'untrained 3x3': (':', ', untrained'),
    'observation': ('--', ', observation alone'),
}
COUNTS = ['directions', 'emitted', 'right']  # columns of probes.csv
SHOWN = (0, 1, 2)  # steps whose boards are drawn, as in the paper
# Settings in which seeds of one agent may differ; the folders of DATA may be written differently.
NOT_THE_AGENT = ('seed', 'eval_interval', 'log_interval', *NEUTRAL, *PER_CALL)


# ---- agents and levels ----


class Player(NamedTuple):
    """A trained agent."""

    name: str  # of its folder
    label: str  # its sizes, for figures
    agent: Agent
    untrained: Agent  # the same agent before training (without its init_from)
    settings: dict  # of the run


def load_player(folder: str, device: str) -> Player:
    """Return the agent in a folder, of a run or of an export."""
    agent = load_agent(folder, which, device, dtype)
    settings = {
        'n_levels': 1,
        'eval_games': 1,
        'levels_dir': '',
        **agent.metadata.get('settings', {}),
    }
    if not {'seed', 'eval_split'} <= settings.keys():
        raise UserError(f'{folder}: its config.json lacks the settings of the run')
    torch.manual_seed(settings['seed'])  # as train_sokoban.py does before it builds the agent
    untrained = build_agent(agent.config).to(device).eval()
    name = os.path.basename(os.path.abspath(folder))
    c = agent.config
    kind = '' if c.recurrent else ', non-recurrent'
    label = f'L = {c.n_layer}, E = {c.n_expert}, d = {c.n_embd}{kind}'
    return Player(name, label, agent, untrained, settings)


def load_levels(players: list[Player]) -> tuple[ndarray, ndarray]:
    """Return packed training and test levels for the probes, by default those of the first agent,
    and print their source. No test level is one that the probes are trained on, and the test split
    is none that an agent was trained on. (Of generated levels a hash decides who sees them.)"""
    settings = players[0].settings
    test_split = test_levels or settings['eval_split']
    config = {
        **settings,
        # An old export has no split.
        'split': levels or settings.get('split', settings['eval_split']),
        'eval_split': test_split,
        'levels_dir': levels_dir or settings['levels_dir'],
        'download': download,
        'n_levels': max(n_train, settings['n_levels']),
        'eval_games': max(n_test, settings['eval_games']),
    }
    trained = {config['split'], *(player.settings.get('split') for player in players)}
    if test_split in trained - {'generated'}:
        reason = 'agents or probes would be tested on their training levels'
        raise UserError(f'{test_split}: {reason}: choose other --levels or --test_levels')
    (train, train_line), (test, test_line) = load_level_sets(config)
    known = set(map(bytes, train))
    is_new = np.array([bytes(level) not in known for level in test], bool)
    train, test = train[:n_train], test[is_new][:n_test]
    print(f'training levels: {train_line}; {len(train):,} of them are used')
    print(f'test levels: {test_line}; {len(test):,} of them are used')
    if not is_new.all():
        print(f'{(~is_new).sum():,} test levels are left out, because they are training levels')
    if len(test) < min_levels:
        raise UserError(
            f'test levels: these are fewer than min_levels = {min_levels}: choose others'
        )
    return train, test


def play(player: Player, policy: object, packed: ndarray, device: str) -> dict[str, ndarray]:
    """Return what a policy does on levels (n, 17), as sokoban.run_episodes: with greedy actions and
    the time limit of the player's run."""
    limit = player.settings.get('time_limit', TIME_LIMIT)
    found = run_episodes(policy, packed, device, time_limit=limit)
    return {name: x.numpy() for name, x in found.items()}


def best_of_seeds(players: list[Player], rates: list[float]) -> list[int]:
    """Return the numbers of the players to compare: of those that differ only in their seed, the
    one with the highest solve rate, the first in a tie."""
    groups, defaults = {}, script_of('train_sokoban.py').defaults  # of settings that are newer
    for i, player in enumerate(players):
        settings = defaults | player.settings
        settings |= {k: os.path.realpath(settings[k]) for k in DATA if k in settings}
        same = {k: settings[k] for k in sorted(settings) if k not in NOT_THE_AGENT}
        groups.setdefault(repr((vars(player.agent.config), same)), []).append(i)
    return [max(group, key=lambda i: rates[i]) for group in groups.values()]


# ---- steps and targets ----


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
    features: ndarray  # (S, 10, 10, 2C) fp16: s[L] of the trained and of the untrained agent


def record(player: Player, packed: ndarray, device: str) -> tuple[Steps, int]:
    """Let an agent play levels (n, 17) while the untrained one sees the same boards. Return the
    steps and the number of levels that are solved."""
    parts, solved = [], 0
    is_due = ranks.Throttle()
    for i in range(0, len(packed), BATCH):
        recorder = FeatureRecorder(player.agent, player.untrained)
        batch = packed[i : i + BATCH]
        found = play(player, recorder, batch, device)
        features = torch.stack(recorder.features, 1).numpy()  # (N, T, 10, 10, 2C)
        T, lengths = features.shape[1], found['steps']
        boards = replay(batch, found['actions'][:, :T])  # (N, T + 1, 10, 10, 2)
        classes = targets(boards, found['actions'][:, :T], lengths)
        played = np.arange(T) < lengths[:, None]  # (N, T)
        features = features[played]
        if not np.isfinite(features).all():
            reason = 'in which states are stored (at most 65,504)'
            raise UserError(
                f'{player.name}: its state is not finite in float16, {reason}: leave it out'
            )
        parts.append((boards[:, :-1][played], classes[played], np.nonzero(played)[1], features))
        solved += found['solved'].sum()
        if is_due():
            print(f'    {i + len(batch):,} of {len(packed):,} episodes', flush=True)
    return Steps(*map(np.concatenate, zip(*parts, strict=True))), solved


# ---- probes ----


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
        probes[name] = Probe(parts[reads], conv)
    weights = [p for probe in probes.values() for p in probe.conv.parameters()]
    optimizer = torch.optim.AdamW(weights, lr=learning_rate, weight_decay=weight_decay)
    order = torch.Generator().manual_seed(0)
    is_due = ranks.Throttle()
    for epoch in range(epochs):
        total = torch.zeros(len(PROBES), device=device)
        batches = torch.randperm(S, generator=order).split(batch_size)
        for i, batch in enumerate(batches):
            index = batch.numpy()
            x = inputs(data, index, scale)
            y = torch.from_numpy(data.target[index]).to(device).long()  # (B, 100)
            y = y[:, None].expand(-1, seeds, -1)  # (B, P, 100)
            logits = (probe.logits(x).transpose(1, 2) for probe in probes.values())
            losses = torch.stack([F.cross_entropy(logits_, y) for logits_ in logits])
            optimizer.zero_grad()
            (losses.sum() * seeds).backward()  # the sum of all probes' means over cells
            optimizer.step()
            total += losses.detach() * len(batch) / S  # the last batch may be smaller
            if is_due():
                print(f'    epoch {epoch + 1} of {epochs}: {i / len(batches):.0%}', flush=True)
        means = zip(PROBES, total.tolist(), strict=True)
        text = ', '.join(f'{name} {loss:.4f}' for name, loss in means)
        print(f'  epoch {epoch + 1} of {epochs}: loss {text}', flush=True)
    return probes, scale


class Guess(NamedTuple):
    """What P seeds of a probe predict for the cells of S steps, (P, S, 100) each."""

    direction: ndarray  # int8, the most likely direction
    probability: ndarray  # fp32, of that direction


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
            parts[name].append((direction.to(torch.int8).cpu().numpy(), probability.cpu().numpy()))
    return {
        name: Guess(*(np.concatenate(arrays, 1) for arrays in zip(*guesses, strict=True)))
        for name, guesses in parts.items()
    }


# ---- scores ----


def threshold_for(probability: ndarray, right: ndarray, wanted: float) -> float:
    """Return the lowest threshold at which the emitted directions have the wanted precision, or
    infinity if there is none. probability and right (bool) have the same shape."""
    order = np.argsort(-probability, axis=None, kind='stable')
    probability, right = probability.ravel()[order], right.ravel()[order]
    precisions = np.cumsum(right) / np.arange(1, len(right) + 1)
    # Equal probabilities are emitted together: only the last of them can be the threshold.
    is_last = np.append(probability[1:] != probability[:-1], True)
    return min(probability[is_last & (precisions >= wanted)].tolist(), default=inf)


def score(data: Steps, guesses: dict[str, Guess]) -> tuple[pandas.DataFrame, dict[str, float]]:
    """Return the counts of directions by probe, seed and step, over the first steps, and the
    threshold of each probe, which all of its seeds share."""
    rows, thresholds = [], {}
    early = data.step < first
    step, target = data.step[early], data.target[early]
    for name, guess in guesses.items():
        direction, probability = guess.direction[:, early], guess.probability[:, early]
        right = direction == target  # (P, S, 100)
        thresholds[name] = threshold_for(probability, right, precision)
        emitted = probability >= thresholds[name]
        for seed, n in itertools.product(range(len(right)), np.unique(step)):
            at = step == n
            masks = target[at] != NEVER, emitted[seed, at], (emitted & right)[seed, at]
            rows.append((name, seed, n, *(mask.sum() for mask in masks), at.sum()))
    columns = ['probe', 'seed', 'step', *COUNTS, 'episodes']
    return pandas.DataFrame(rows, columns=columns), thresholds


def add_shares(counts: pandas.DataFrame) -> pandas.DataFrame:
    """Return counts with the columns recall and precision, NaN for a share of nothing."""
    recall, exact = counts.right / counts.directions, counts.right / counts.emitted
    return counts.assign(recall=recall, precision=exact)


# ---- figures and tables ----


def results_in(folder: str) -> list[str]:
    """Return the files that an earlier analysis has written into a folder."""
    names = 'probe_*.safetensors probes.csv probes.json recall.png recall.svg plans.png'.split()
    return [path for name in names for path in glob(os.path.join(escape(folder), name))]


def draw_recall(counts: pandas.DataFrame, title: str) -> Figure:
    """Return the figure of recall by step, with one standard deviation over seeds: for each agent a
    line for its 3x3 probe, one before training and one for the observation alone."""
    shares = add_shares(counts[(counts.episodes >= min_levels) & counts.probe.isin(DRAWN)])
    groups = shares.groupby(['agent', 'probe', 'step'], sort=False).recall
    points = groups.agg(recall='mean', std='std', n='count').reset_index().dropna(subset='recall')
    points['line'] = points.agent + points.probe.map(lambda probe: DRAWN[probe][1])
    points['style'] = points.probe.map(lambda probe: DRAWN[probe][0])
    points = points.assign(color=points.agent, panel='')
    labels = 'environment step', 'recall'
    figure = chart(points, 'step', 'recall', labels, title, 'std', to_scale=True)
    figure.axes[0].set_ylim(0, None)
    return figure


def draw_plan(panels: list, data: Steps, guess: Guess, threshold: float, episode: int) -> None:
    """Draw the first steps of an episode, with the arrows that the probe's first seed emits."""
    start = np.flatnonzero(data.step == 0)[episode]
    for step, axes in zip(SHOWN, panels, strict=True):
        axes.set(title=f'step {step}', xticks=[], yticks=[])
        i = start + step
        if list(data.step[i : i + 1]) == [step]:  # the episode may have ended
            is_emitted = guess.probability[0, i] >= threshold
            plan = np.where(is_emitted, guess.direction[0, i], -1).reshape(10, 10)
            axes.imshow(plan_image(data.boards[i], plan, data.target[i].reshape(10, 10)))


def save_probe(player: Player, probe: Probe, scale: Tensor, threshold: float) -> None:
    """Write the first seed of the 3x3 probe of s[L], whose plans play_sokoban.py draws for this
    agent."""
    conv, C = probe.conv, probe.channels.stop
    parts = {'weight': conv.weight[:5] / scale[:C], 'bias': conv.bias[:5]}
    parts['threshold'] = torch.tensor(threshold)
    parts['agent'] = torch.tensor(weights_checksum(player.agent))
    write_tensors(parts, os.path.join(out_dir, f'probe_{player.name}.safetensors'))


@ranks.explain_errors('fewer n_train or n_test')
def main() -> None:
    """Record episodes, train probes on them, score the probes, and write figures and tables."""
    argv = sys.argv[1:]
    names = list(itertools.takewhile(lambda argument: not argument.startswith('-'), argv))
    folders = [name for name in names if os.path.isdir(name) or not name.endswith('.py')]
    configure(globals(), [*(name for name in names if name not in folders), *argv[len(names) :]])
    if not folders or '' in folders:
        raise UserError('no agents: name their folders, python -m paper.probe out/a out/b')
    if not overwrite and results_in(out_dir):
        advice = 'choose another out_dir, or replace them with --overwrite=True'
        raise UserError(f'{out_dir}: holds probes already: {advice}')
    ranks.keep_memory()
    torch_device = ranks.pick_device(device, threads)

    players = [load_player(folder, torch_device) for folder in folders]
    train, test = load_levels(players)
    tests = [play(player, player.agent, test, torch_device) for player in players]
    rates = [found['solved'].mean() for found in tests]
    for folder, rate in zip(folders, rates, strict=True):
        print(f'{folder}: solves {rate:.1%} of the test levels')
    best = best_of_seeds(players, rates)
    players, tests = [players[i] for i in best], [tests[i] for i in best]
    names = [player.name for player in players]
    labels = {player.name: player.label for player in players}
    if len(set(labels.values())) < len(names):
        labels = dict(zip(names, names, strict=True))  # sizes do not tell them apart
    if len(set(names)) < len(names):
        raise UserError(f'{", ".join(names)}: two folders of one name, whose files would collide')
    solved = np.all([found['solved'] for found in tests], 0)
    print(f'{solved.sum()} of {len(test)} test levels are solved by all agents')
    if solved.sum() < min_levels:
        advice = 'choose easier test_levels or a larger n_test'
        raise UserError(f'these are fewer than min_levels = {min_levels}: {advice}')
    for player in players:  # fail before any probe is trained if a state is not finite
        record(player, test[solved][:BATCH], torch_device)
    os.makedirs(out_dir, exist_ok=True)
    for path in results_in(out_dir):
        os.remove(path)
    # The level of plans.png: the first on which no episode ends too early, or the longest.
    shortest = np.min([found['steps'][solved] for found in tests], 0)
    level = int(np.argmax(np.minimum(shortest, len(SHOWN) + 1)))
    boards = Figure((2.2 * len(SHOWN), 2.4 * len(players)), layout='constrained')
    panels = boards.subplots(len(players), len(SHOWN), squeeze=False)

    tables, thresholds = [], []
    for player, row in zip(players, panels, strict=True):
        print(f'{player.name}: {len(train):,} episodes', flush=True)
        probes, scale = train_probes(record(player, train, torch_device)[0], torch_device)
        data, n_solved = record(player, test[solved], torch_device)
        if n_solved < solved.sum():  # other batch sizes round differently
            print(f'  {solved.sum() - n_solved} of these levels are not solved this time')
        guesses = predict(probes, scale, data)
        counts, found = score(data, guesses)
        tables.append(counts.assign(agent=player.name))
        thresholds += found.values()
        draw_plan(row, data, guesses['3x3'], found['3x3'], level)
        row[0].set_ylabel(plain(labels[player.name], 2.4))
        save_probe(player, probes['3x3'], scale, found['3x3'])
        del data, guesses

    counts = pandas.concat(tables)
    write_text(add_shares(counts).to_csv(index=False), os.path.join(out_dir, 'probes.csv'))
    title = f'{solved.sum()} levels; precision {precision:.0%} over {first} steps'
    recall = draw_recall(counts.replace({'agent': labels}), title)
    for name, figure in {'recall.png': recall, 'recall.svg': recall, 'plans.png': boards}.items():
        save_figure(figure, os.path.join(out_dir, name))
    total = add_shares(counts.groupby(['agent', 'probe'], sort=False)[COUNTS].sum())
    total['threshold'] = thresholds
    print(total.round(3).to_string())
    report = {
        'command': shlex.join(sys.argv),
        'code': code_record(__file__),
        'device': ranks.device_name(torch_device),
        'levels': int(solved.sum()),
        'scores': total.reset_index().to_dict('records'),
    }
    write_json(report, os.path.join(out_dir, 'probes.json'))
    print(f'{out_dir}: ' + ', '.join(sorted(os.listdir(out_dir))))


if __name__ == '__main__':
    run_script(main)

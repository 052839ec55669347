"""
Watch a plan form: linear probes of a trained Sokoban agent's state (the planning analysis of
"Temporal Recurrence Favors Fewer Layers", after Bush et al.'s approach direction).

$ python probe_sokoban.py --models=out/L1,out/L4 --test_levels=unfiltered-test
$ python probe_sokoban.py config/probe_large.py    # the paper's agents; it says how to train them
$ python probe_sokoban.py --models=out/L4 --causal --thinking     # and two further questions

At every step of a game played greedily, and for every cell of the board, a probe says in which
direction the agent will next step onto the cell, or that it will not (five classes). It reads the
agent's s[L] at the cell and its eight neighbours, by one 3x3 convolution. Beside it: a 1x1
convolution; one over the observation alone; both over an untrained agent, drawn by the run's seed,
on the same games: only what the trained state holds beyond a random network's was learnt. A
direction is emitted where its probability is above the probe's threshold, at which `precision` of
those emitted in the first steps are right; recall is the share of the cells with a direction whose
direction was emitted, on the test levels that all agents solve.

Writes into out_dir: recall.png and .svg, probes.csv, .md and .json, and of each agent plans_*.png,
plan_*.gif, probe_*.safetensors. What agents were seen to do lies in a temporary file there.

Shape letters: N episodes at a time, n episodes, S steps of all, T steps of one, P probes, C
channels (trained and untrained agent side by side: 2C); boards are (10, 10) or (100,).
"""

import glob
import math
import os
import shlex
import sys
import tempfile
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

# before torch: how threads wait, what ctrl-C does
from configurator import configure, every, fail, run_script, write_json

import numpy as np
import torch
import torch.nn.functional as F
from numpy import ndarray
from torch import Tensor, nn

import common
from convlstm import CELLS, PLANES, Agent, build_agent, load_agent
from figures import finish, line, new, save, summary, write_table
from sokoban import DELTA, FeatureRecorder, load_level_sets, plan_image, replay, run_episodes
from sokoban import save_gif

# fmt: off
models = ''                    # folders of trained agents, with commas between them; 'out/L4_s*':
                               # the one of these that solves most test levels
best = False                   # their best checkpoints instead of their last
out_dir = 'out/probe'          # figures, tables
levels = ''                    # to train probes on: a split or a file; '': the first agent's
test_levels = ''               # to score them on; '': those that the first agent was evaluated on
levels_dir = ''                # folder of Boxoban's levels; '': the first agent's
download = False               # fetch the splits into levels_dir where they are not there
n_train = 3000                 # episodes the probes are trained on (the paper's)
n_test = 1000                  # test levels; all agents solve 906 in the paper
# the question
first = 20                     # steps that set the threshold, and that the figure shows
precision = 0.93               # of what is emitted (the paper's)
min_levels = 50                # fewer levels solved by all are refused, and not drawn at a step
# the probes
seeds = 3                      # of each, trained side by side
epochs = 10                    # the paper's
batch_size = 16                # boards
learning_rate = 1e-3           # AdamW's
weight_decay = 1e-3            # AdamW's
# further questions
causal = False                 # add a probe's direction to the carried state: is it followed?
thinking = False               # hold the agent for some steps at the start: does it solve more?
# system
device = 'auto'                # 'auto': cuda if there is one; or 'cpu', 'cuda', 'cuda:1'
threads = 0                    # CPU threads; 0: torch's choice
RANGES = {'precision': (0.01, 1), 'learning_rate': (1e-9, inf), 'weight_decay': (0, inf),
          'threads': (0, 1024)}
RANGES |= dict.fromkeys('n_train n_test first min_levels seeds epochs batch_size'.split(), (1, inf))
# fmt: on

NEVER = 4  # classes 0..3: up, right, down, left, as the actions
BATCH = 64  # episodes whose features are held in memory
# name: (size of the convolution, what it reads)
PROBES = {'3x3': (3, 'trained'), '1x1': (1, 'trained'), 'untrained 3x3': (3, 'untrained')}
PROBES |= {'untrained 1x1': (1, 'untrained'), 'observation': (3, 'observation')}
PRECISIONS = (0.7, 0.8, 0.9)  # recall is told at these too: not every probe reaches `precision`
SHOWN = (0, 2, 4, 8)  # steps of a game beside each other
STRENGTHS = (1.0, 2.0, 4.0, 8.0, 16.0)  # of the causal check, in units of the RMS of s


@dataclass
class Player:
    """A trained agent, and what is found of it."""

    model: Agent
    untrained: Agent  # the same with random weights: its run's first, but for init_from
    config: dict
    where: str  # its checkpoint
    name: str  # its folder's
    label: str
    data: 'Steps | None' = None  # its games on the levels that all solve
    scale: Tensor | None = None  # of what probes read
    probes: dict | None = None
    guesses: 'dict[str, Guess] | None' = None  # of each probe
    rows: list | None = None  # of `score`
    about: dict | None = None


def load_player(folder: str, device: str) -> Player:
    model, c, where = load_agent(folder, 'best' if best else 'last', device)
    c = {'split': c['eval_split'], 'n_levels': 1, 'eval_games': 1, 'levels_dir': '', **c}  # export
    torch.manual_seed(c['seed'])  # as train_sokoban.make_run does
    untrained = build_agent(model.config).to(device).eval()
    label = 'feedforward, ' * (not c['recurrent'])
    label += f'L = {c["n_layer"]}, E = {c["n_expert"]}, d = {c["n_embd"]}'
    name = os.path.basename(os.path.normpath(folder))
    return Player(model, untrained, c, where, name, label)


def best_player(players: list[Player], packed: ndarray, device: str) -> Player:
    """The one of several that solves most of the levels, greedily; the first of equals."""
    rates = []
    for player in players if players[1:] else ():
        rates.append(run_episodes(player.model, packed, device)['solved'].double().mean().item())
        print(f'{player.where}: solves {rates[-1]:.1%} of the test levels', flush=True)
    return players[rates.index(max(rates))] if rates else players[0]


# ----------------------------------------------------------------------------- games and targets


class Games(NamedTuple):
    """What an agent did on n levels."""

    actions: ndarray  # (n, 120) int8
    lengths: ndarray  # (n,)
    solved: ndarray  # (n,) bool
    features: ndarray  # (S, 10, 10, 2C) fp16, in a file


def record(player: Player, packed: ndarray, device: str) -> Games:
    """Plays levels (n, 17), the untrained agent beside."""
    n, parts, due = len(packed), [], every()
    os.makedirs(out_dir, exist_ok=True)
    file = tempfile.TemporaryFile(dir=out_dir)  # gone when the last to read it is
    print(f'{player.label}: {n:,} games', flush=True)
    for i in range(0, n, BATCH):
        watched = FeatureRecorder(player.model, player.untrained)
        result = run_episodes(watched, packed[i : i + BATCH], device)
        lengths = result['steps'].long().numpy()
        parts.append((result['actions'].numpy(), lengths, result['solved'].numpy()))
        steps = torch.stack(watched.features, 1).numpy()  # (N, T, 10, 10, 2C)
        file.write(steps[np.arange(steps.shape[1]) < lengths[:, None]].data)
        if due():
            print(f'    {i:,}/{n:,} games', flush=True)
    file.flush()
    actions, lengths, solved = map(np.concatenate, zip(*parts, strict=True))
    shape = int(lengths.sum()), 10, 10, 2 * player.model.config.n_embd
    return Games(actions, lengths, solved, np.memmap(file, np.float16, 'r', shape=shape))


def solved_by_all(games: list[Games]) -> ndarray:
    """(n,) bool: the test levels (n, 17) that every agent solves."""
    return np.all([its.solved for its in games], 0)


def targets(boards: ndarray, actions: ndarray, lengths: ndarray) -> ndarray:
    """The class of every cell at every step t, (n, T, 100) int8: the direction of the first of the
    moves t, t + 1, ... onto the cell, or NEVER. boards (n, T + 1, 10, 10, 2), actions (n, T),
    lengths (n,): steps played."""
    n, T = actions.shape
    at = (boards[..., 0].reshape(n, T + 1, CELLS) == 3).argmax(2)  # (n, T + 1)
    out, known = np.empty((n, T, CELLS), np.int8), np.full((n, CELLS), NEVER, np.int8)
    for t in reversed(range(T)):
        games = np.flatnonzero((at[:, t] != at[:, t + 1]) & (t < lengths))
        known[games, at[games, t + 1]] = actions[games, t]
        out[:, t] = known
    return out


class Steps(NamedTuple):
    """The steps of an agent's games, game after game, as the probes need them."""

    seen: ndarray  # observations (S, 10, 10, 2)
    target: ndarray  # (S, 100) int8
    step: ndarray  # (S,), of its game
    games: Games


def prepare(games: Games, packed: ndarray, keep: ndarray | None = None) -> Steps:
    """What an agent did on levels (n, 17); keep (n,): on these of them alone."""
    T = games.lengths.max()
    actions = games.actions[:, :T]
    boards = replay(packed, actions)
    classes = targets(boards, actions, games.lengths)
    played = kept = np.arange(T) < games.lengths[:, None]  # (n, T)
    if keep is not None:
        kept = played & keep[:, None]
        parts = games.actions[keep], games.lengths[keep], games.solved[keep]
        games = Games(*parts, games.features[kept[played]])
    return Steps(boards[:, :-1][kept], classes[kept], np.nonzero(kept)[1], games)


# ----------------------------------------------------------------------------- probes and scores


def logits_of(probe: tuple[slice, nn.Conv2d], x: Tensor) -> Tensor:
    """x (B, 2C + 6, 10, 10), of `inputs` -> (B, P, 5, 100)."""
    reads, conv = probe
    return conv(x[:, reads]).unflatten(1, (-1, 5)).flatten(3)


def inputs(data: Steps, index: ndarray, scale: Tensor) -> Tensor:
    """Steps (B,) -> what probes read, (B, 2C + 6, 10, 10): features and the board's planes."""
    both = data.games.features[index], data.seen[index]
    features, seen = (torch.from_numpy(x).to(scale.device) for x in both)
    planes = torch.stack([seen[..., channel] == value for channel, value in PLANES], 1)
    return torch.cat([features.float().permute(0, 3, 1, 2) / scale, planes], 1)


def train_probes(data: Steps, device: str) -> tuple[dict, Tensor]:
    """-> {name: the channels of `inputs` read, all seeds' convolutions side by side}, which learn
    as they would alone (the loss is their sum, AdamW goes parameter by parameter), and each
    agent's RMS, which divides its features, (2C, 1, 1)."""
    S, C = len(data.step), data.games.features.shape[-1] // 2
    sample = torch.from_numpy(np.float32(data.games.features[:: max(1, S // 1000)]))
    rms = sample.unflatten(-1, (2, C)).square().mean((0, 1, 2, 4)).sqrt()
    scale = torch.where(rms == 0, 1.0, rms).repeat_interleave(C)[:, None, None].to(device)
    parts = {'trained': slice(C), 'untrained': slice(C, 2 * C), 'observation': slice(2 * C, None)}
    probes, order = {}, torch.Generator().manual_seed(0)
    for name, (k, reads) in PROBES.items():
        torch.manual_seed(0)
        channels = len(PLANES) if reads == 'observation' else C
        conv = nn.Conv2d(channels, 5 * seeds, k, padding=k // 2).to(device)
        nn.init.zeros_(conv.bias)
        probes[name] = parts[reads], conv
    weights = [p for _, conv in probes.values() for p in conv.parameters()]
    optimizer = torch.optim.AdamW(weights, learning_rate, weight_decay=weight_decay)
    due = every()
    for epoch in range(epochs):
        total = torch.zeros(len(PROBES), device=device)
        for i, batch in enumerate(torch.randperm(S, generator=order).split(batch_size)):
            index = np.sort(batch.numpy())
            x = inputs(data, index, scale)
            y = torch.from_numpy(data.target[index]).to(device).long()  # (B, 100)
            y = y[:, None].expand(-1, seeds, -1)
            logits = [logits_of(probe, x).transpose(1, 2) for probe in probes.values()]
            losses = torch.stack([F.cross_entropy(its, y) for its in logits])
            optimizer.zero_grad()
            (losses.sum() * seeds).backward()  # the sum of all probes' means over cells
            optimizer.step()
            total += losses.detach()
            if due():
                print(f'    epoch {epoch + 1}/{epochs}, {i * batch_size / S:.0%} of it', flush=True)
        means = zip(PROBES, (total / (i + 1)).tolist(), strict=True)
        said = ', '.join(f'{name} {loss:.4f}' for name, loss in means)
        print(f'  epoch {epoch + 1}/{epochs}: loss {said}', flush=True)
    return probes, scale


class Guess(NamedTuple):
    """What P probes say of S steps' cells: (P, S, 100) each."""

    way: ndarray  # int8, the likeliest direction
    sure: ndarray  # fp32, its probability
    likeliest: ndarray  # int8, of the five classes


@torch.no_grad()
def predict(probes: dict, scale: Tensor, data: Steps) -> dict[str, Guess]:
    S, parts = len(data.step), {name: [] for name in probes}
    for index in np.array_split(np.arange(S), max(1, S // 512)):
        x = inputs(data, index, scale)
        for name, probe in probes.items():
            p = F.softmax(logits_of(probe, x), 2).transpose(0, 1)  # (P, B, 5, 100)
            sure, way = p[:, :, :NEVER].max(2)
            guess = way.to(torch.int8), sure, p.argmax(2).to(torch.int8)
            parts[name].append([x.cpu().numpy() for x in guess])
    for name, its in parts.items():
        parts[name] = Guess(*(np.concatenate(x, 1) for x in zip(*its, strict=True)))
    return parts


def threshold_for(sure: ndarray, right: ndarray, wanted: float) -> float:
    """The lowest threshold at which emitted directions are as precise as wanted; infinite: none.
    sure, right: any shape."""
    order = np.argsort(-sure, axis=None, kind='stable')
    sure, right = sure.ravel()[order], right.ravel()[order]
    share = np.cumsum(right) / np.arange(1, len(right) + 1)
    last = np.append(sure[1:] != sure[:-1], True)  # of equals
    return min(sure[last & (share >= wanted)].tolist(), default=inf)


def f1(target: ndarray, guess: ndarray) -> float:
    """Macro F1 over the classes that occur."""
    parts = target[target == guess], target, guess
    hits, theirs, ours = (np.bincount(x.ravel(), minlength=5) for x in parts)
    there = theirs + ours > 0
    return float((2 * hits[there] / (theirs + ours)[there]).mean())


def counts(emitted: ndarray, right: ndarray, target: ndarray) -> dict:
    """Recall and precision (None: nothing to count) of guesses (..., S, 100) on targets (S,
    100)."""
    good, out = int((right & emitted).sum()), int(emitted.sum())
    asked = int(np.broadcast_to(target != NEVER, right.shape).sum())
    rates = {'recall': good / asked if asked else None, 'precision': good / out if out else None}
    return {**rates, 'directions': asked, 'emitted': out}


def score(data: Steps, guesses: dict[str, Guess]) -> tuple[list[dict], dict]:
    """-> a record a probe, seed and step; and one a probe over the first steps, one threshold for
    all seeds."""
    early, rows, about = data.step < first, [], {}
    target = data.target[early]
    for name, g in guesses.items():
        right = g.way == data.target
        sure, hits = g.sure[:, early], right[:, early]
        at = {p: threshold_for(sure, hits, p) for p in (*PRECISIONS, precision)}
        found = {p: counts(sure >= threshold, hits, target) for p, threshold in at.items()}
        about[name] = {'threshold': at[precision]}
        about[name] |= {key: found[precision][key] for key in ('recall', 'precision')}
        about[name]['recall_at'] = {f'{p:g}': found[p]['recall'] for p in PRECISIONS}
        about[name]['macro_f1'] = [f1(target, x[early]) for x in g.likeliest]
        for seed in range(len(g.way)):
            for step in range(min(int(data.step.max()) + 1, first)):
                now = data.step == step
                its = counts(g.sure[seed, now] >= at[precision], right[seed, now], data.target[now])
                which = {'probe': name, 'seed': seed, 'step': step}
                rows.append({**which, **its, 'games': int(now.sum())})
    return rows, about


# ----------------------------------------------------------------------------- pictures


def recall_figure(players: list[Player], title: str) -> None:
    """Recall by step, a line an agent, one deviation over the probes' seeds; dotted: untrained;
    dashed: of the observation."""
    figure, (axes,) = new(1, 3.2)
    plain = {'marker': '', 'lw': 0.9}
    styles = {'3x3': {}, 'untrained 3x3': {'ls': ':'} | plain, 'observation': {'ls': '--'} | plain}
    for i, result in enumerate(players):
        for name, style in styles.items():
            values = {}
            for r in result.rows:
                if r['probe'] == name and r['recall'] is not None and r['games'] >= min_levels:
                    values.setdefault(r['step'], []).append(r['recall'])
            points = {step: summary(x) for step, x in values.items()}
            line(axes, points, i, '' if style else result.label, **style)
    axes.plot([], [], color='gray', ls=':', lw=1.2, label='untrained')
    axes.plot([], [], color='gray', ls='--', lw=0.9, label='observation alone')
    axes.set(xlabel='environment step', ylabel='recall', ylim=(0, None))
    axes.xaxis.get_major_locator().set_params(integer=True)
    save(finish(figure, title), out_dir, 'recall')


def plan_pictures(players: list[Player]) -> None:
    """One level by each agent: plan_NAME.gif, the whole game, and plans_NAME.png, some steps."""
    shortest = np.min([r.data.games.lengths for r in players], 0)
    # the first that is long enough, or the longest
    game = int(np.argmax(np.minimum(shortest, max(SHOWN) + 1)))
    for r in players:
        frames, g, lengths = [], r.guesses['3x3'], r.data.games.lengths
        for i in lengths[:game].sum() + np.arange(lengths[game]):
            ways = np.where(g.sure[0, i] >= r.about['3x3']['threshold'], g.way[0, i], -1)
            truth = r.data.target[i].reshape(10, 10)
            frames.append(plan_image(r.data.seen[i], ways.reshape(10, 10), truth))
        save_gif(frames, os.path.join(out_dir, f'plan_{r.name}.gif'), 400)
        figure, panels = new(len(SHOWN), 3.4)
        for step, axes in zip(SHOWN, panels, strict=True):
            axes.imshow(frames[min(step, len(frames) - 1)])
            axes.set(title=f'step {step}' if step < len(frames) else 'solved', xticks=[], yticks=[])
        figure.suptitle(r.label)
        save(figure, out_dir, f'plans_{r.name}', ('png',))


# ----------------------------------------------------------------------------- causal check


def steer(model: Agent, state: tuple | list, cell: Tensor, vector: Tensor) -> list[Tensor]:
    """The carried state in which s has grown by `vector` (n, C) at `cell` (n,) of each board. A
    ConvLSTM's h grow by the share that makes A(h) grow by it: vector / sqrt(E) (exact for
    softmax_l2 with equal gates), or all of it where A's weights add up to 1. Its cells c stay."""
    c, state, each = model.config, list(state), torch.arange(len(cell), device=cell.device)
    share = 1.0 if c.aggregation in ('mean', 'softmax_mean') else 1 / math.sqrt(c.n_expert)
    for k, part in enumerate((1.0, share) if c.arch == 'convlstm' else (1.0,)):
        x = state[k].float().reshape(len(cell), CELLS, -1, c.n_embd).clone()  # (n, 100, 1 or E, C)
        x[each, cell] += part * vector[:, None]
        state[k] = x.view(state[k].shape).to(state[k].dtype)
    return state


def places(boards: Tensor, plain: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Where to steer, on boards (n, 10, 10, 2) on which the agent would do `plain` (n,). -> (m,)
    each: the boards that have such places; a random other way, to a cell without wall and box; that
    cell; and another one, free of all."""
    device, draws = boards.device, torch.Generator().manual_seed(0)
    there, ground = (boards[..., k].flatten(1) for k in (0, 1))  # (n, 100)
    at = (there == 3).int().argmax(1, keepdim=True)
    cells = at + torch.tensor(DELTA, device=device)  # (n, 4); a board's rim is wall: all are cells
    may = (there.gather(1, cells) == 0) & (ground.gather(1, cells) != 1)
    may.scatter_(1, plain[:, None], False)

    def one_of(allowed):
        luck = torch.rand(allowed.shape, generator=draws).to(device)
        return torch.where(allowed, luck, -1.0).argmax(1, keepdim=True)

    way = one_of(may)
    cell = cells.gather(1, way)
    free = (there == 0) & (ground == 0)
    free.scatter_(1, cell, False)
    chosen = (may.any(1) & free.any(1)).nonzero().flatten()
    return chosen, *(x[chosen, 0] for x in (way, cell, one_of(free)))


@torch.no_grad()
def causal_check(model: Agent, packed: ndarray, games: Games, direction: Tensor) -> list[dict]:
    """Does what a probe reads steer the agent? In each game, before a random one of its first
    steps, direction k (4, C; of length 1) of the 1x1 probe is added to the carried s (see steer) at
    the free cell that k leads to, k not being what the agent would do: how often does it go there?
    Controls: a random direction, and the probe's own at another free cell. Strengths are in units
    of the RMS of what is carried. -> a record a strength and way of adding."""
    device, long = direction.device, games.lengths > 1
    latest = np.minimum(games.lengths[long], max(first, 2))
    when = np.random.default_rng(0).integers(1, latest)  # not 0: nothing is carried then
    when = torch.from_numpy(when).to(device)
    n, T = len(when), int(when.max()) + 1
    boards = torch.from_numpy(replay(packed[long], games.actions[long, :T])).to(device)
    w, state, start = model.prepare(), model.init_state(n), torch.ones_like(when, dtype=torch.bool)
    kept = [x.clone() for x in state]  # the carried states at step `when` of each game
    for t in range(T):
        for mine, x in zip(kept, state, strict=True):
            mine[when == t] = x[when == t]
        state = model.act(w, boards[:, t], start, state)[2]
        start = torch.zeros_like(start)
    boards = boards[torch.arange(n), when]
    plain = model.act(w, boards, start, kept)[0].argmax(-1)
    chosen, way, cell, other = places(boards, plain)
    boards, plain, start, *kept = (x[chosen] for x in (boards, plain, start, *kept))
    noise = torch.randn(len(way), direction.size(1), generator=torch.Generator().manual_seed(0))
    noise = F.normalize(noise, dim=1).to(device)
    added = {'probe': (direction[way], cell), 'random direction': (noise, cell)}
    added['other cell'] = (direction[way], other)
    rows = []
    for strength in STRENGTHS:
        length = strength * kept[0].float().square().mean().sqrt() * math.sqrt(direction.size(1))
        for name, (vector, where) in added.items():
            steered = steer(model, kept, where, length * vector)
            action = model.act(w, boards, start, steered)[0].argmax(-1)
            about = {'added': name, 'strength': strength}
            for what, hits in (('follows', action == way), ('changes', action != plain)):
                about[what] = hits.float().mean().item()
            rows.append({**about, 'games': len(way)})
    return rows


# ----------------------------------------------------------------------------- report


def probe(device: str) -> None:
    """All of it, but for the settings."""
    groups = []
    for name in models.split(','):
        folders = sorted(filter(os.path.isdir, glob.glob(name)))
        if not folders:
            fail(f'models: no folder is named {name}')
        groups.append([load_player(folder, device) for folder in folders])
    everyone = [player for group in groups for player in group]
    if len({player.name for player in everyone}) < len(everyone):
        fail(f'models = {models!r}: two folders of one name, which their outputs would share')
    c = everyone[0].config  # by default the first agent's levels
    c = c | {'split': levels or c['split'], 'eval_split': test_levels or c['eval_split']}
    c |= {'n_levels': max(n_train, c['n_levels']), 'eval_games': max(n_test, c['eval_games'])}
    c |= {'levels_dir': levels_dir or c['levels_dir'], 'download': download}
    (packed, line), (test, test_line) = load_level_sets(c)
    print(f'{line}\n{test_line}\nof these the first {n_train:,} and {n_test:,}')
    packed, test = packed[:n_train], test[:n_test]
    players = [best_player(group, test, device) for group in groups]
    del groups, everyone  # the others' memory
    games = [record(player, test, device) for player in players]
    solved = solved_by_all(games)
    print(f'{solved.sum()} of {len(test)} test levels are solved by all agents')
    if solved.sum() < min_levels:
        fail(f'fewer than min_levels = {min_levels}: take easier test_levels, or more (n_test)')
    for player, its in zip(players, games, strict=True):
        data = prepare(record(player, packed, device), packed)
        player.probes, player.scale = train_probes(data, device)
        player.data = prepare(its, test, solved)
        player.guesses = predict(player.probes, player.scale, player.data)
        player.rows, player.about = score(player.data, player.guesses)
        save_probe(player)
    write_results(players, test, test[solved], device)


def save_probe(player: Player) -> None:
    """The first seed's 3x3 probe of s[L], which play_sokoban.py draws."""
    C, (_, conv) = player.model.config.n_embd, player.probes['3x3']
    parts = {'weight': conv.weight.detach()[:5] / player.scale[:C], 'bias': conv.bias.detach()[:5]}
    parts['threshold'] = torch.tensor(player.about['3x3']['threshold'])
    path = os.path.join(out_dir, f'probe_{player.name}.safetensors')
    common.write_tensors(parts, path)


def write_results(players: list[Player], test: ndarray, solved: ndarray, device: str) -> None:
    """All files; the further questions, on all test levels (n, 17) and on those that all solve."""
    c = players[0].config
    title = test_levels or c['eval_split']
    if title == 'generated':
        title = f'generated levels, boxes: {c["n_boxes"]}, moves: at most {c["max_moves"]}'
    title += f', {len(solved)} solved by all; precision {precision:.0%} over {first} steps'
    recall_figure(players, title)
    plan_pictures(players)
    rows, records = [{'model': r.name, **row} for r in players for row in r.rows], []
    write_table(rows, out_dir, 'probes')
    for player in players:
        about = {'name': player.name, 'label': player.label, 'checkpoint': player.where}
        about['probes'] = player.about
        if causal and player.config['recurrent']:
            w = player.probes['1x1'][1].weight.detach()[:5, :, 0, 0]  # of the first seed
            direction = F.normalize(w[:NEVER] - w[NEVER], dim=1)
            about['causal'] = causal_check(player.model, solved, player.data.games, direction)
        about |= {'thinking': []} if thinking else {}
        for n in (0, 1, 2, 4, 8) if thinking else ():  # steps held at the start
            # a recorder with hold = 0 would collect features
            agent = FeatureRecorder(player.model, hold=n) if n else player.model
            solves = run_episodes(agent, test, device)['solved'].double().mean()
            about['thinking'].append({'held': n, 'solve_rate': solves.item()})
        records.append(about)
        for name, its in player.about.items():
            if None not in (rates := (its['recall'], its['precision'])):
                print('{}: {} recall {:.1%} at precision {:.1%}'.format(player.label, name, *rates))
    whole = {'precision': precision, 'first': first, 'levels': len(solved)}
    whole |= {'commit': common.commit(), 'device': common.device_name(device)}
    whole |= {'command': shlex.join(['python', *sys.argv]), 'models': records}
    write_json(whole, os.path.join(out_dir, 'probes.json'))
    print(f'{out_dir}: ' + ', '.join(sorted(os.listdir(out_dir))))


def main() -> None:
    configure(globals(), quiet=True)
    if not models:
        fail('models is empty: name folders of trained agents, --models=out/a,out/b')
    common.need_packages(matplotlib=True, PIL=True)
    common.keep_memory()
    probe(common.pick_device(device, threads))


if __name__ == '__main__':
    run_script(main, 'interrupted', common.last_words('fewer n_train or n_test'))

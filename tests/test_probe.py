"""Test paper/probe.py: targets, probes that must and must not learn, thresholds, levels, folders,
the whole analysis."""

import json
import math
import os
import sys

from configurator import configure

import numpy as np
import pandas
import pytest
import torch
from small_runs import assert_equal, assert_refused, run_agent

from convlstm import AgentConfig, build_agent
from levels import generate, pack
from paper import probe
from sokoban import replay, run_episodes
from support.files import read_tensors

UP, RIGHT, NEVER = 0, 1, 4
ODD = 'a[1],b $x$'  # name of an agent


@pytest.fixture(autouse=True)
def default_settings(tmp_path):
    apply_settings(f'--out_dir={tmp_path}')


def apply_settings(*argv):
    """Apply the settings of paper/probe.py in this process."""
    configure(vars(probe), argv, quiet=True)


def corridors():
    """Return eight levels (8, 17), each solved by two moves to the right: an empty room, the agent
    at column 4 of a row, a box to its right, the target two cells further."""
    cell = 8 * np.arange(8)
    wall, target, box = np.zeros((3, 8, 64), bool)
    box[range(8), cell + 4] = target[range(8), cell + 6] = True
    return pack(wall, target, box, cell + 3)


# ---- targets, probes and scores ----


def test_targets_follow_their_definition():
    """The target of a cell is the move by which the agent enters it next in this episode. Random
    episodes have blocked moves, cells that are entered again, and ends before the last step."""
    packed = np.concatenate([generate(6, 1, seed=5, max_moves=12)[0], corridors()])
    rng, n = np.random.default_rng(0), len(packed)
    actions = rng.integers(0, 4, (n, 30)).astype(np.int8)
    lengths = rng.integers(1, 31, n)
    boards = replay(packed, actions)
    found = probe.targets(boards, actions, lengths)
    at = (boards[..., 0] == 3).reshape(n, 31, 100).argmax(2)
    for i in range(n):
        for t in range(lengths[i]):
            expected = np.full(100, NEVER)
            for later in reversed(range(t, lengths[i])):
                if at[i, later] != at[i, later + 1]:
                    expected[at[i, later + 1]] = actions[i, later]
            assert (found[i, t] == expected).all()


def random_steps(seed, S=120, C=8):
    """Return steps with random targets, of which each class is a fifth. The features of the trained
    agent hold the class of their cell. Those of the untrained agent are noise and much larger."""
    rng = np.random.default_rng(seed)
    target = rng.integers(0, 5, (S, 100)).astype(np.int8)
    features = 100 * rng.normal(size=(S, 10, 10, 2 * C)).astype(np.float16)
    features[..., :C] = np.eye(5, C)[target].reshape(S, 10, 10, C)
    boards = np.zeros((S, 10, 10, 2), np.uint8)
    return probe.Steps(boards, target, np.arange(S) % 30, features)


def test_probes_find_a_signal_and_none_in_noise():
    apply_settings('--seeds=2', '--epochs=8', '--learning_rate=0.02')
    test = random_steps(seed=1)
    guesses = probe.predict(*probe.train_probes(random_steps(seed=0), 'cpu'), test)
    total = probe.score(test, guesses)[0].groupby('probe').sum()
    expected = {'3x3': 1, '1x1': 1, 'untrained 3x3': 0, 'untrained 1x1': 0, 'observation': 0}
    recall = probe.add_shares(total)['recall'].to_dict()
    assert recall == pytest.approx(expected, abs=1e-3)


def test_the_printed_loss_is_the_mean_over_steps_of_unequal_batches(capsys):
    """Probes that learn nothing have the same loss in one batch and in batches of 100 and 20."""
    lines = []
    for batch_size in (120, 100):
        apply_settings('--epochs=1', '--learning_rate=0', f'--batch_size={batch_size}')
        probe.train_probes(random_steps(seed=0), 'cpu')
        lines.append(capsys.readouterr().out)
    assert lines[0] == lines[1]


@pytest.mark.parametrize('wrong_at, threshold, recall', [(0, 0.9, 0.8), (1, 0.6, 1.0)])
def test_the_first_20_steps_set_the_threshold(wrong_at, threshold, recall):
    """In steps 0 and 20 the agent enters five of six cells. Four guesses are certain and right; the
    fifth is wrong in one of the steps."""
    apply_settings('--first=20', '--precision=0.93')
    target, direction = np.full((2, 6), RIGHT), np.full((1, 2, 6), RIGHT)
    target[:, 5] = NEVER
    direction[0, wrong_at, 4] = UP
    probability = np.array([[[0.9, 0.9, 0.9, 0.9, 0.6, 0.1]] * 2])
    data = probe.Steps(None, target, np.array([0, 20]), None)
    counts, thresholds = probe.score(data, {'3x3': probe.Guess(direction, probability)})
    assert thresholds == {'3x3': threshold}
    (shares,) = probe.add_shares(counts).to_dict('records')
    assert (shares['step'], shares['recall'], shares['precision']) == (0, recall, 1.0)


def test_the_threshold_is_the_lowest_that_has_the_precision():
    """The two guesses with probability 0.8 are emitted together."""
    probability = np.array([0.9, 0.8, 0.8, 0.7, 0.6, 0.5])
    right = np.array([True, True, False, True, True, False])
    for precision, threshold in ((1.0, 0.9), (0.8, 0.6), (0.1, 0.5)):
        assert probe.threshold_for(probability, right, precision) == threshold
    assert probe.threshold_for(probability, ~right, 0.8) == math.inf


# ---- agents ----


@pytest.fixture(scope='module')
def agents(tmp_path_factory):
    """Return a folder with exported tiny agents that always go right, and a file of levels, of
    which they solve the first eight and not all of the other eight."""
    folder = tmp_path_factory.mktemp('agents')
    settings = {'eval_split': 'generated', 'n_boxes': 1, 'max_moves': 12, 'seed': 7}
    for name, arch in (('lstm', 'convlstm'), (ODD, 'convglu'), ('copy/lstm', 'convglu')):
        torch.manual_seed(0)
        config = AgentConfig(arch, name == 'lstm', 2, 1, 8, head_dim=8, dtype='float32')
        agent = build_agent(config)
        agent.logits.bias.data[RIGHT] = 100.0
        agent.save_pretrained(folder / name, config={'step': 1, 'settings': settings})
    np.save(folder / 'rooms.npy', np.concatenate([corridors(), generate(8, 1, 9, 12)[0]]))
    return folder


def load(agents, **changes):
    """Return the player lstm, as if its run had had these settings."""
    player = probe.load_player(str(agents / 'lstm'), 'cpu')
    return player._replace(settings={**player.settings, **changes})


def test_the_untrained_agent_has_the_first_weights_of_the_run(tmp_path):
    """A run whose learning rate is 0 ends with them."""
    sizes = {'n_layer': 1, 'n_embd': 8}
    assert run_agent(tmp_path, seed=5, learning_rate=0, total_steps=12, **sizes) == 0
    player = probe.load_player(str(tmp_path), 'cpu')
    assert_equal(player.agent.state_dict(), player.untrained.state_dict())


def test_recorded_steps_are_those_of_an_evaluation_with_s_of_both_agents(agents, monkeypatch):
    """The episodes are played in two batches, of which the second is shorter. Features are compared
    in the first two steps of episode 5, of which the first starts from the zero state."""
    monkeypatch.setattr(probe, 'BATCH', 4)
    player = load(agents)
    packed = np.concatenate([corridors()[:4], generate(3, 1, seed=9, max_moves=12)[0]])
    data, solved = probe.record(player, packed, 'cpu')

    expected = run_episodes(player.agent, packed, 'cpu')
    assert solved == expected['solved'].sum()
    lengths = expected['steps'].int().tolist()
    assert data.step.tolist() == [step for length in lengths for step in range(length)]
    boards = replay(packed, expected['actions'].numpy())
    parts = [episode[:length] for episode, length in zip(boards, lengths, strict=True)]
    assert (data.boards == np.concatenate(parts)).all()

    first = sum(lengths[:5])
    for k, agent in enumerate((player.agent, player.untrained)):
        weights, state = agent.prepare(), agent.init_state(1)
        for i in (first, first + 1):
            start, obs = torch.tensor([i == first]), torch.from_numpy(data.boards[i : i + 1])
            s, state = agent.encode_and_step(weights, obs, start, state)
            found = data.features[i, ..., 8 * k : 8 * k + 8]
            np.testing.assert_allclose(found, s[0].detach().numpy(), atol=2e-3)  # float16

    def encode_and_step(*args, real=player.agent.encode_and_step):
        s, state = real(*args)
        return s * 1e6, state

    monkeypatch.setattr(player.agent, 'encode_and_step', encode_and_step)
    assert_refused('its state is not finite in float16', probe.record, player, packed, 'cpu')


def test_of_runs_that_differ_in_their_seed_the_best_is_used(agents):
    runs = [load(agents, seed=seed) for seed in (1, 2, 3)] + [load(agents, gamma=0.9)]
    assert probe.best_of_seeds(runs, [0.5, 0.7, 0.7, 0.2]) == [1, 3]
    runs[1].settings.update(gae_lambda=0.97, plot=True)  # the others are older, and not drawn
    assert probe.best_of_seeds(runs, [0.5, 0.7, 0.7, 0.2]) == [1, 3]


# ---- levels ----


def test_neither_probes_nor_agents_are_tested_on_their_training_levels(agents):
    path = f'{agents}/rooms.npy'
    players = [load(agents, split=path, eval_split=path)]
    assert_refused('tested on their training levels', probe.load_levels, players)
    players = [load(agents, eval_split=path), load(agents, split=path)]
    apply_settings('--levels=generated')
    assert_refused('tested on their training levels', probe.load_levels, players)


def test_training_levels_of_the_probes_are_left_out_of_the_test_levels(agents, tmp_path):
    path = tmp_path / 'mixed.npy'
    np.save(path, np.concatenate([corridors(), generate(20, 1, seed=7, max_moves=12)[0]]))
    apply_settings('--levels=generated', f'--test_levels={path}', '--n_train=5', '--min_levels=1')
    train, test = probe.load_levels([load(agents, n_levels=12)])
    assert len(train) == 5 and len(test) == 16 and (test[:8] == corridors()).all()


# ---- the whole analysis ----


def analyze(monkeypatch, folders, *options):
    """Run paper/probe.py with few levels and one epoch; it writes into the folder `out`."""
    few = '--out_dir=out --n_train=6 --n_test=16 --min_levels=1 --epochs=1 --seeds=2 --device=cpu'
    monkeypatch.setattr(sys, 'argv', ['probe.py', *map(str, folders), *few.split(), *options])
    probe.main()


def test_the_whole_analysis_writes_its_figures_and_tables(agents, tmp_path, monkeypatch):
    """The probe's file is one that play_sokoban.py reads."""
    monkeypatch.chdir(tmp_path)
    levels = ['--levels=generated', f'--test_levels={agents}/rooms.npy']
    analyze(monkeypatch, [agents / 'lstm', agents / ODD], *levels)
    names = {'recall.png', 'recall.svg', 'plans.png', 'probes.csv', 'probes.json'}
    names |= {'probe_lstm.safetensors', f'probe_{ODD}.safetensors'}
    assert probe.load_player(str(agents / 'lstm'), 'cpu').label.startswith('L = ')
    assert set(os.listdir('out')) == names
    with open('out/probes.json') as file:
        report = json.load(file)
    assert 8 <= report['levels'] < 16
    scores = {(row['agent'], row['probe']) for row in report['scores']}
    assert scores == {(name, x) for name in ('lstm', ODD) for x in probe.PROBES}
    assert pandas.read_csv('out/probes.csv').seed.max() == 1
    shapes = {'weight': [5, 8, 3, 3], 'bias': [5], 'threshold': [], 'agent': []}
    saved = read_tensors('out/probe_lstm.safetensors')
    assert {name: list(x.shape) for name, x in saved.items()} == shapes
    assert_refused('out: holds probes already', analyze, monkeypatch, [agents / 'lstm'], *levels)
    analyze(monkeypatch, [agents / 'lstm'], *levels, '--overwrite=True')
    assert set(pandas.read_csv('out/probes.csv').agent) == {'lstm'}
    assert set(os.listdir('out')) == names - {f'probe_{ODD}.safetensors'}


def test_a_state_that_overflows_is_found_before_any_agent_is_probed(agents, tmp_path, monkeypatch):
    """Here that of the second agent."""
    monkeypatch.chdir(tmp_path)
    load_agent, levels = probe.load_agent, f'--test_levels={agents}/rooms.npy'

    def load_large(folder, *options):
        agent = load_agent(folder, *options)
        encode_and_step = agent.encode_and_step

        def scaled(*args):
            s, state = encode_and_step(*args)
            return s * (1e6 if ODD in folder else 1.0), state

        monkeypatch.setattr(agent, 'encode_and_step', scaled)
        return agent

    monkeypatch.setattr(probe, 'load_agent', load_large)
    monkeypatch.setattr(probe, 'train_probes', None)  # is not called
    folders = [agents / 'lstm', agents / ODD]
    assert_refused('its state is not finite', analyze, monkeypatch, folders, levels)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    'names, option, message',
    [
        ([], '--seeds=2', 'no agents'),
        (['lstm', 'copy/lstm'], '--seeds=2', 'two folders of one name'),
        (['lstm'], '--min_levels=17', 'min_levels = 17'),
        (['lstm'], '--test_levels=nonsense', 'data/boxoban'),
    ],
)
def test_mistakes_are_found_before_anything_is_written(
    names, option, message, agents, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert_refused(message, analyze, monkeypatch, [agents / name for name in names], option)
    assert not any(tmp_path.iterdir())

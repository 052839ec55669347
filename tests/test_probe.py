"""Test paper/probe.py: targets by hand, probes that must and must not learn, thresholds, levels,
folders, the whole analysis."""

import json
import math
import os
import sys

import numpy as np
import pandas
import pytest
import torch
from small_runs import assert_equal, assert_refused, run_agent

from boxoban import generate, pack
from configurator import configure
from convlstm import AgentConfig, build_agent
from files import read_tensors
from paper import probe
from sokoban import replay, run_episodes

UP, RIGHT, DOWN, LEFT, NEVER = range(5)


@pytest.fixture(autouse=True)
def default_settings(tmp_path):
    apply_settings(f'--out_dir={tmp_path}')


def apply_settings(*argv):
    """Apply the settings of paper/probe.py in this process."""
    configure(vars(probe), argv, quiet=True)


def corridor(row=3):
    """Return a level (1, 17): an empty 8 x 8 room, the agent at column 4 of `row` + 1, a box to its
    right, the target two cells further."""
    box, target = np.zeros((1, 64), bool), np.zeros((1, 64), bool)
    box[0, row * 8 + 4] = target[0, row * 8 + 6] = True
    return pack(np.zeros((1, 64), bool), target, box, np.array([row * 8 + 3]))


def corridors():
    """Return eight levels (8, 17), each solved by two moves to the right."""
    return np.concatenate([corridor(row) for row in range(8)])


# ---- targets ----


def test_targets_of_a_push_to_the_right():
    """The agent starts at cell 44 and pushes the box once; then it goes up."""
    actions = np.array([[RIGHT, UP]], np.int8)
    found = probe.targets(replay(corridor(), actions), actions, np.array([2]))
    expected = np.full((1, 2, 100), NEVER)
    expected[0, 0, 45] = RIGHT
    expected[0, :, 35] = UP
    assert (found == expected).all()


def test_targets_follow_their_definition():
    """The target of a cell is the move by which the agent enters it next in this episode. Random
    episodes have blocked moves, cells that are entered again, and ends before the last step."""
    packed = np.concatenate([generate(6, 1, seed=5, max_moves=12)[0], *[corridor()] * 4])
    rng, n = np.random.default_rng(0), len(packed)
    actions = rng.integers(0, 4, (n, 30)).astype(np.int8)
    lengths = rng.integers(1, 31, n)
    actions[6:, :4] = LEFT, RIGHT, RIGHT, UP
    lengths[6:] = 4, 3, 30, 30
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


# ---- probes and scores ----


def random_steps(planted, S=120, C=8, seed=0):
    """Return steps with random targets, of which each class is a fifth. If planted, the features of
    the trained agent hold the class of their cell; otherwise they are noise. The features of the
    untrained agent beside them are noise and much larger."""
    rng = np.random.default_rng(seed)
    target = rng.integers(0, 5, (S, 100)).astype(np.int8)
    features = rng.normal(size=(S, 10, 10, 2 * C)).astype(np.float16)
    features[..., C:] *= 100
    if planted:
        features[..., :5] = 3 * np.eye(5, dtype=np.float16)[target].reshape(S, 10, 10, 5)
    boards = np.zeros((S, 10, 10, 2), np.uint8)
    return probe.Steps(boards, target, np.arange(S) % 30, features)


def recall_of(counts):
    """Return the recall of each probe, over all seeds and steps."""
    total = counts.groupby('probe')[['right', 'directions']].sum()
    return total.right / total.directions


@pytest.mark.parametrize('planted', [True, False])
def test_a_planted_signal_is_found_and_noise_is_not(planted):
    apply_settings('--seeds=2', '--epochs=8', '--learning_rate=0.02')
    test = random_steps(planted, seed=1)
    guesses = probe.predict(*probe.train_probes(random_steps(planted), 'cpu'), test)
    recall = recall_of(probe.score(test, guesses)[0])
    for name in probe.PROBES:
        found = planted and name in ('3x3', '1x1')  # the probes of the trained agent's features
        assert recall[name] == pytest.approx(float(found), abs=1e-3)


def guesses_of_which_some_are_uncertain(early_correct, late_correct):
    """Return steps 0, 1, 19 and 20, 21, 119, and guesses. At each step the agent enters 40 cells;
    32 guesses have probability 0.9 and are correct, and 8 have 0.6. The arguments say whether the
    latter are correct in the first three steps and in the last three."""
    target = np.full((6, 100), NEVER, np.int8)
    target[:, :40] = RIGHT
    probability = np.zeros((1, 6, 100), np.float32)
    probability[..., :32] = 0.9
    probability[..., 32:40] = 0.6
    direction = np.full((1, 6, 100), RIGHT, np.int8)
    direction[0, :3, 32:40] = RIGHT if early_correct else UP
    direction[0, 3:, 32:40] = RIGHT if late_correct else UP
    data = probe.Steps(None, target, np.array([0, 1, 19, 20, 21, 119]), None)
    return data, {'3x3': probe.Guess(direction, probability)}


@pytest.mark.parametrize('early, late, threshold, recall', [
    (True, False, 0.6, 1.0),  # errors after the first 20 steps do not raise the threshold
    (False, True, 0.9, 0.8),  # errors in them do: only the 32 certain guesses are emitted
])  # fmt: skip
def test_the_first_20_steps_set_the_threshold(early, late, threshold, recall):
    apply_settings('--first=20', '--precision=0.93')
    counts, thresholds = probe.score(*guesses_of_which_some_are_uncertain(early, late))
    assert thresholds['3x3'] == pytest.approx(threshold)
    assert counts.step.tolist() == [0, 1, 19]
    shares = probe.add_shares(counts)
    assert shares.recall.tolist() == 3 * [recall] and shares.precision.tolist() == 3 * [1.0]


@pytest.mark.parametrize('precision, threshold', [(1.0, 0.9), (0.8, 0.6), (0.1, 0.5)])
def test_the_threshold_is_the_lowest_that_has_the_precision(precision, threshold):
    """The two guesses with probability 0.8 are emitted together."""
    probability = np.array([0.9, 0.8, 0.8, 0.7, 0.6, 0.5])
    correct = np.array([True, True, False, True, True, False])
    assert probe.threshold_for(probability, correct, precision) == threshold


def test_the_threshold_is_infinite_if_none_has_the_precision():
    probability, correct = np.array([0.9, 0.8]), np.array([False, True])
    assert probe.threshold_for(probability, correct, 1.0) == math.inf


# ---- agents ----


@pytest.fixture(scope='module')
def agents(tmp_path_factory):
    """Return a folder with three exported tiny agents that always go right (lstm and glu are
    recurrent, nonrecurrent is not) and with a file of levels."""
    folder = tmp_path_factory.mktemp('agents')
    sizes = {'n_layer': 1, 'n_expert': 1, 'n_embd': 8, 'head_dim': 8, 'dtype': 'float32'}
    settings = {'eval_split': 'generated', 'n_boxes': 1, 'max_moves': 12, 'seed': 7}
    for name, changes in {
        'lstm': {'arch': 'convlstm', 'recurrent': True, 'n_layer': 2},
        'glu': {'arch': 'convglu', 'recurrent': True},
        'nonrecurrent': {'arch': 'convglu', 'recurrent': False},
    }.items():
        torch.manual_seed(0)
        agent = build_agent(AgentConfig(**{**sizes, **changes}))
        agent.logits.bias.data[RIGHT] = 100.0
        about = {'step': 1, 'settings': settings, 'command': ''}
        agent.save_pretrained(folder / name, config=about)
    np.save(folder / 'rooms.npy', np.concatenate([corridors(), generate(8, 1, 9, 12)[0]]))
    return folder


def load(agents, name):
    return probe.load_player(str(agents / name), 'cpu')


def test_the_untrained_agent_has_the_first_weights_of_the_run(tmp_path):
    """A run whose learning rate is 0 ends with them."""
    assert run_agent(tmp_path, n_layer=1, n_embd=8, learning_rate=0, total_steps=12) == 0
    player = probe.load_player(str(tmp_path), 'cpu')
    assert_equal(player.agent.state_dict(), player.untrained.state_dict())


@pytest.fixture
def recorded(agents, monkeypatch):
    """Return an agent, seven levels, and what probe.record() keeps of its episodes on them. They
    are played in two batches, of which the second is shorter."""
    monkeypatch.setattr(probe, 'BATCH', 4)
    player = load(agents, 'lstm')
    packed = np.concatenate([corridors()[:4], generate(3, 1, seed=9, max_moves=12)[0]])
    return player, packed, *probe.record(player, packed, 'cpu')


def test_recorded_episodes_are_those_of_an_evaluation(recorded):
    """Every step has the board and the number that it has in its episode."""
    player, packed, data, solved = recorded
    expected = run_episodes(player.agent, packed, 'cpu')
    lengths = expected['steps'].int().tolist()
    assert solved == expected['solved'].sum()
    assert data.step.tolist() == [step for length in lengths for step in range(length)]
    boards = replay(packed, expected['actions'].numpy())
    parts = [episode[:length] for episode, length in zip(boards, lengths, strict=True)]
    assert (data.boards == np.concatenate(parts)).all()


def test_features_are_s_of_the_trained_and_of_the_untrained_agent(recorded):
    """The first two steps of episode 5 are compared. The first starts from the zero state."""
    player, _, data, _ = recorded
    first = np.flatnonzero(data.step == 0)[5]
    assert data.step[first + 1] == 1
    boards = torch.from_numpy(data.boards)
    for k, agent in enumerate((player.agent, player.untrained)):
        weights, state = agent.prepare(), agent.init_state(1)
        for t in range(2):
            start, obs = torch.tensor([t == 0]), boards[first + t : first + t + 1]
            s, state = agent.encode_and_step(weights, obs, start, state)
            found = data.features[first + t, ..., 8 * k : 8 * k + 8]
            np.testing.assert_allclose(found, s[0].detach().numpy(), atol=2e-3)  # float16


def test_of_runs_that_differ_in_their_seed_the_best_is_used(agents):
    lstm, glu = load(agents, 'lstm'), load(agents, 'glu')
    runs = [lstm._replace(settings={**lstm.settings, 'seed': seed}) for seed in (1, 2, 3)]
    others = [glu, lstm._replace(settings={**lstm.settings, 'gamma': 0.9})]
    assert probe.best_of_seeds([*runs, *others], [0.5, 0.7, 0.7, 0.1, 0.2]) == [1, 3, 4]


# ---- levels ----


def with_settings(agents, **changes):
    """Return a player whose run had these settings."""
    player = load(agents, 'lstm')
    return player._replace(settings={**player.settings, **changes})


def test_probes_are_not_tested_on_their_training_levels(agents):
    path = f'{agents}/rooms.npy'
    players = [with_settings(agents, split=path, eval_split=path)]
    assert_refused('tested on their training levels', probe.load_levels, players)


def test_an_agent_is_not_tested_on_its_training_levels(agents):
    """The second agent was trained on the levels that the first is evaluated on."""
    path = f'{agents}/rooms.npy'
    players = [with_settings(agents, eval_split=path), with_settings(agents, split=path)]
    apply_settings('--levels=generated')
    assert_refused('tested on their training levels', probe.load_levels, players)


def test_training_levels_of_the_probes_are_left_out_of_the_test_levels(agents):
    path = agents / 'mixed.npy'
    np.save(path, np.concatenate([corridors(), generate(20, 1, seed=7, max_moves=12)[0]]))
    apply_settings('--levels=generated', f'--test_levels={path}', '--n_train=5', '--min_levels=1')
    train, test = probe.load_levels([with_settings(agents, n_levels=12)])
    assert len(train) == 5 and len(test) == 16 and (test[:8] == corridors()).all()


# ---- the whole analysis ----


def analyze(monkeypatch, out, *arguments):
    """Run paper/probe.py with few levels and one epoch."""
    argv = f'--out_dir={out} --n_train=6 --min_levels=1 --epochs=1 --seeds=2 --device=cpu'
    monkeypatch.setattr(sys, 'argv', ['probe.py', *map(str, arguments), *argv.split()])
    probe.main()


def test_the_whole_analysis_writes_its_figures_and_tables(agents, tmp_path, monkeypatch, capsys):
    """Both agents solve the eight corridors and not all of the other eight levels. The probe's file
    is one that play_sokoban.py reads. Brackets, commas and dollar signs are parts of names."""
    odd = tmp_path / 'a[1],b $x$'
    odd.symlink_to(agents / 'nonrecurrent')
    levels = ['--levels=generated', f'--test_levels={agents}/rooms.npy', '--n_test=16']
    analyze(monkeypatch, tmp_path / 'out', agents / 'lstm', odd, *levels)
    assert 'untrained 3x3' in capsys.readouterr().out
    names = {'recall.png', 'recall.svg', 'plans.png', 'probes.csv', 'probes.json'}
    names |= {'probe_lstm.safetensors', f'probe_{odd.name}.safetensors'}
    assert set(os.listdir(tmp_path / 'out')) == names
    report = json.loads((tmp_path / 'out' / 'probes.json').read_text())
    assert 8 <= report['levels'] < 16 and len(report['scores']) == 2 * len(probe.PROBES)
    counts = pandas.read_csv(tmp_path / 'out' / 'probes.csv')
    assert set(counts.agent) == {'lstm', odd.name} and counts.seed.max() == 1
    shapes = {'weight': [5, 8, 3, 3], 'bias': [5], 'threshold': []}
    saved = read_tensors(tmp_path / 'out' / 'probe_lstm.safetensors')
    assert {name: list(x.shape) for name, x in saved.items()} == shapes


MISTAKES = [  # arguments, message
    ([], 'no agents'),
    (['{agents}/lstm', '{agents}/glu', 'glu', '--min_levels=1'], 'two folders of one name'),
    (['{agents}/lstm', '--min_levels=17'], 'min_levels = 17'),
    (['{agents}/lstm', '--test_levels=nonsense'], 'data/boxoban'),
    (['no_such_folder'], 'no_such_folder'),
    (['{agents}/lstm', '--models=x'], 'unknown setting'),
]


@pytest.mark.parametrize('arguments, message', MISTAKES)
def test_mistakes_are_found_before_anything_is_written(
    arguments, message, agents, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)  # where no levels are
    (tmp_path / 'glu').symlink_to(agents / 'nonrecurrent')
    arguments = [argument.format(agents=agents) for argument in arguments]
    argv = ['probe.py', *arguments, '--out_dir=out', '--n_train=6', '--n_test=16']
    monkeypatch.setattr(sys, 'argv', argv)
    assert_refused(message, probe.main)
    assert not (tmp_path / 'out').exists()

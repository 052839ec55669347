"""Test probe_sokoban.py: targets by hand, probes that must and must not learn, thresholds,
steering, the whole analysis."""

import json
import math
import os
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from small_runs import assert_equal, run_agent

import convlstm
import probe_sokoban as probe
from configurator import configure
from convlstm import AgentConfig, build_agent
from boxoban import generate, pack
from sokoban import replay, run_episodes

UP, RIGHT, DOWN, LEFT, NEVER = range(5)


@pytest.fixture(autouse=True)
def default_settings(tmp_path):
    apply_settings(f'--out_dir={tmp_path}')


def apply_settings(*argv):
    """Apply the settings of probe_sokoban.py in this process."""
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
    return probe.Steps(boards, target, np.arange(S) % 30, features, None)


@pytest.mark.parametrize('planted', [True, False])
def test_a_planted_signal_is_found_and_noise_is_not(planted):
    apply_settings('--seeds=2', '--epochs=8', '--learning_rate=0.02')
    test = random_steps(planted, seed=1)
    guesses = probe.predict(*probe.train_probes(random_steps(planted), 'cpu'), test)
    scores = probe.score(test, guesses)[1]
    for name, guess in guesses.items():
        accuracy, recall = np.mean(guess.likeliest == test.target), scores[name]['recall']
        if planted and name in ('3x3', '1x1'):  # the probes of the trained agent's features
            assert accuracy == 1 and recall == pytest.approx(1, abs=1e-3)
            assert scores[name]['macro_f1'] == [1.0, 1.0]
        else:  # the base rate
            assert abs(accuracy - 0.2) < 0.05 and recall == pytest.approx(0, abs=1e-3)
    assert scores['3x3']['recall_at']['0.7'] == pytest.approx(float(planted), abs=1e-3)


def guesses_of_which_some_are_uncertain(early_correct, late_correct):
    """Return guesses of steps 0, 1, 19 and of steps 20, 21, 119. At each step the agent enters 40
    cells; 32 guesses have probability 0.9 and are correct, and 8 have 0.6. The arguments say
    whether the latter are correct in the first three steps and in the last three."""
    target = np.full((6, 100), NEVER, np.int8)
    target[:, :40] = RIGHT
    probability = np.zeros((1, 6, 100), np.float32)
    probability[..., :32] = 0.9
    probability[..., 32:40] = 0.6
    direction = np.full((1, 6, 100), RIGHT, np.int8)
    direction[0, :3, 32:40] = RIGHT if early_correct else UP
    direction[0, 3:, 32:40] = RIGHT if late_correct else UP
    likeliest = np.where(probability > 0, direction, NEVER).astype(np.int8)
    data = probe.Steps(None, target, np.array([0, 1, 19, 20, 21, 119]), None, None)
    return data, probe.Guess(direction, probability, likeliest)


def test_errors_after_the_first_20_steps_do_not_raise_the_threshold():
    """All uncertain guesses of the first steps are correct, so they are made."""
    apply_settings('--first=20', '--precision=0.93')
    data, guess = guesses_of_which_some_are_uncertain(early_correct=True, late_correct=False)
    scores = probe.score(data, {'3x3': guess})[1]['3x3']
    assert scores['threshold'] == pytest.approx(0.6)
    assert scores['precision'] == scores['recall'] == scores['recall_at']['0.9'] == 1.0


def test_errors_in_the_first_20_steps_raise_the_threshold():
    """Only the 32 certain guesses of each step are made: 80% of its 40 directions."""
    apply_settings('--first=20', '--precision=0.93')
    data, guess = guesses_of_which_some_are_uncertain(early_correct=False, late_correct=True)
    rows, scores = probe.score(data, {'3x3': guess})
    scores = scores['3x3']
    assert scores['threshold'] == pytest.approx(0.9)
    assert scores['recall'] == 0.8 and set(scores['recall_at'].values()) == {0.8}
    assert scores['recall_at_steps'] == {'0': 0.8, '1': 0.8, '2': None}  # no episode has a step 2
    assert scores['macro_f1'] == [pytest.approx((8 / 9 + 1 + 0) / 3)]
    assert [row['step'] for row in rows] == list(range(20))


@pytest.mark.parametrize('precision, threshold', [(1.0, 0.9), (0.8, 0.6), (0.1, 0.5)])
def test_the_threshold_is_the_lowest_that_has_the_precision(precision, threshold):
    """The two guesses with probability 0.8 are made together."""
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
    about = {
        'eval_split': 'generated',
        'n_boxes': 1,
        'max_moves': 12,
        'seed': 7,
        'n_envs': 4,
        'unroll': 5,
        'step': 1,
        'best': 0.0,
    }
    for name, changes in {
        'lstm': {'arch': 'convlstm', 'recurrent': True, 'n_layer': 2},
        'glu': {'arch': 'convglu', 'recurrent': True},
        'nonrecurrent': {'arch': 'convglu', 'recurrent': False},
    }.items():
        torch.manual_seed(0)
        config = AgentConfig(**{**sizes, **changes})
        agent = build_agent(config)
        agent.logits.bias.data[RIGHT] = 100.0
        convlstm.export_agent(agent, about | vars(config), str(folder / name))
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
    episodes, features = probe.record(player, packed, 'cpu')
    return player, packed, episodes, features


def test_recorded_episodes_are_those_of_an_evaluation(recorded):
    player, packed, episodes, _ = recorded
    expected = run_episodes(player.agent, packed, 'cpu')
    assert (episodes.actions == expected['actions'].numpy()).all()
    assert (episodes.lengths == expected['steps'].numpy()).all()
    assert (episodes.solved == expected['solved'].numpy()).all()


def test_features_are_s_of_the_trained_and_of_the_untrained_agent(recorded):
    """The first two steps of episode 5 are compared. The first starts from the zero state."""
    player, packed, episodes, features = recorded
    first = int(episodes.lengths[:5].sum())
    assert episodes.lengths[5] > 2
    boards = torch.from_numpy(replay(packed[5:6], episodes.actions[5:6]))[0]
    for k, agent in enumerate((player.agent, player.untrained)):
        weights, state = agent.prepare(), agent.init_state(1)
        for t in range(2):
            start = torch.tensor([t == 0])
            s, state = agent.encode_and_step(weights, boards[t : t + 1], start, state)
            found = features[first + t, ..., 8 * k : 8 * k + 8]
            np.testing.assert_allclose(found, s[0].detach().numpy(), atol=2e-3)  # float16


def test_progress_counts_the_episodes_that_are_done(agents, monkeypatch, capsys):
    monkeypatch.setattr(probe, 'BATCH', 4)
    monkeypatch.setattr(probe, 'every', lambda: lambda: True)
    probe.record(load(agents, 'lstm'), corridors()[:7], 'cpu')
    assert re.findall(r'(\d) of 7 episodes', capsys.readouterr().out) == ['4', '7']


def test_the_steps_have_the_boards_and_numbers_of_their_episode(recorded):
    _, packed, episodes, features = recorded
    data = probe.make_steps(episodes, features, packed)
    first, length = int(episodes.lengths[:5].sum()), episodes.lengths[5]
    boards = replay(packed[5:6], episodes.actions[5:6])[0]
    assert data.step[first : first + length].tolist() == list(range(length))
    assert (data.boards[first : first + length] == boards[:length]).all()


def test_thinking_steps_change_the_first_move_of_recurrent_agents_only(agents):
    """With hold = 3 the agent sees the first board three more times before it acts."""
    packed = generate(20, 1, seed=9, max_moves=12)[0]
    start = torch.ones(20, dtype=torch.bool)
    obs = torch.from_numpy(replay(packed, np.zeros((20, 1), np.int8))[:, 0])
    for name in ('nonrecurrent', 'lstm'):
        logits = []
        for hold in (0, 3):
            held = probe.HeldAgent(load(agents, name).agent, hold=hold)
            logits.append(held.act(held.prepare(), obs, start, held.init_state(20))[0])
        assert torch.equal(*logits) == (name == 'nonrecurrent')


def test_a_held_agent_is_held_at_the_first_step_alone(agents):
    """With hold = 1 it is an agent that sees the first board twice."""
    agent = load(agents, 'lstm').agent
    held = probe.HeldAgent(agent, hold=1)
    boards = torch.from_numpy(replay(corridor(), np.array([[RIGHT, UP]])))[0, :, None]
    weights, state, held_state = agent.prepare(), agent.init_state(1), held.init_state(1)
    first, other = torch.tensor([True]), torch.tensor([False])
    _, _, state = agent.act(weights, boards[0], first, state)
    for board, start in ((boards[0], first), (boards[1], other), (boards[2], other)):
        logits, _, state = agent.act(weights, board, other, state)
        held_logits, _, held_state = held.act(weights, board, start, held_state)
        assert torch.equal(logits, held_logits)


class SteerableAgent:
    """An agent whose carried s is 1 everywhere and which moves in the direction k whose channel k
    of s, at the cell that k leads to, is largest. Unless s is changed it goes up. If s is changed
    at a cell that is not empty floor, it prefers left to up."""

    def __init__(self, agent):
        self.config, self.prepare, self.init_state = agent.config, agent.prepare, agent.init_state

    def act(self, weights, obs, start, state):
        s = state[0].reshape(len(obs), 100, -1)
        variable, fixed = obs[..., 0].flatten(1), obs[..., 1].flatten(1)
        boards, agent_cell = torch.arange(len(obs)), (variable == 3).int().argmax(1)
        neighbors = [s[boards, agent_cell + d, k] for k, d in enumerate(probe.DELTA)]
        logits = torch.stack(neighbors, 1) - 1
        logits[:, UP] += 1e-3
        changed = ((s - 1).abs().sum(-1) > 1e-6) & ((variable != 0) | (fixed != 0))
        logits[:, LEFT] += 0.01 * changed.any(1)
        return logits, None, (torch.ones_like(state[0]),)


def test_the_causal_check_steers_at_the_next_cell_and_controls_at_another_free_one(agents):
    player = load(agents, 'glu')
    packed = generate(60, 1, seed=9, max_moves=12)[0]
    episodes = probe.as_episodes(run_episodes(player.agent, packed, 'cpu'))
    episodes.actions[:] = UP
    rows = probe.causal_check(SteerableAgent(player.agent), packed, episodes, torch.eye(4, 8))
    assert rows[0]['episodes'] > 40 and len(rows) == 15
    for row in rows:
        if row['added'] == 'probe':
            assert row['follows'] == 1.0
        elif row['added'] == 'random direction':
            assert 0 < row['follows'] < 0.8
        else:
            assert row['follows'] == row['changes'] == 0.0


STEERED = [
    {}, {'n_expert': 3}, {'n_expert': 3, 'aggregation': 'mean'}, {'n_expert': 3, 'radius': 1},
    {'arch': 'convglu'}, {'arch': 'convglu', 'n_expert': 3},
]  # fmt: skip


@pytest.mark.parametrize('sizes', STEERED, ids=str)
def test_steering_adds_the_vector_to_s_at_one_cell(sizes):
    """The carried h of the experts change so that they aggregate to the changed s. The cells c of a
    ConvLSTM stay."""
    torch.manual_seed(0)
    agent = build_agent(AgentConfig(n_layer=2, n_embd=6, head_dim=8, **sizes)).eval()
    state, vector = agent.init_state(1), torch.randn(1, 6)
    steered = probe.steer(agent, state, torch.tensor([43]), vector)
    s, *others = (after - before for after, before in zip(steered, state, strict=True))
    torch.testing.assert_close(s.reshape(1, 100, 6)[:, 43], vector)
    assert s.count_nonzero() == 6
    if agent.config.arch == 'convlstm':
        h, *others = others  # (1, 10, 10, E, 6): sums to vector * sqrt(E), or averages to it
        E = agent.config.n_expert
        scale = E if agent.config.aggregation == 'mean' else math.sqrt(E)
        torch.testing.assert_close(h.reshape(1, 100, E, 6).sum(2)[:, 43], scale * vector)
        assert h.count_nonzero() == 6 * E
    assert not any(x.any() for x in others)


def test_levels_are_compared_if_all_agents_solve_them(agents):
    players = [load(agents, name) for name in ('lstm', 'glu')]
    players[0].test = probe.Episodes(None, None, np.array([True, True, False, False]))
    players[1].test = probe.Episodes(None, None, np.array([True, False, True, False]))
    assert probe.solved_by_all(players).tolist() == [True, False, False, False]


def test_the_best_player_is_the_one_that_solves_most_levels(agents):
    players = [load(agents, name) for name in ('nonrecurrent', 'glu', 'lstm')]
    for player in (players[0], players[2]):
        player.agent.logits.bias.data[LEFT] = 200.0  # away from the box
    assert probe.best_player(players, corridors(), 'cpu') is players[1]
    assert players[1].test.solved.all() and not players[0].test.solved.any()


def test_agents_of_one_size_have_labels_with_their_names(agents):
    players = [load(agents, name) for name in ('lstm', 'glu', 'glu')]
    players[2].name = 'glu_2'
    probe.name_equal_labels(players)
    assert [player.label for player in players] == [
        'L = 2, E = 1, d = 8',
        'L = 1, E = 1, d = 8, glu',
        'L = 1, E = 1, d = 8, glu_2',
    ]


# ---- levels and folders ----


def player_of(**config):
    """Return what load_probe_levels reads of a player."""
    settings = {'n_levels': 1, 'eval_games': 1, 'levels_dir': '', **config}
    return SimpleNamespace(config=settings)


def test_probes_are_not_trained_on_the_test_levels(agents, capsys):
    """An export of an earlier version names no training levels."""
    path = f'{agents}/rooms.npy'
    with pytest.raises(SystemExit):
        probe.load_probe_levels(player_of(split=path, eval_split=path))
    assert 'set --levels' in capsys.readouterr().err


def test_an_export_has_the_training_levels_of_its_run(tmp_path):
    assert run_agent(tmp_path / 'run', total_steps=12) == 0
    run = load(tmp_path, 'run')
    convlstm.export_agent(run.agent, run.config, str(tmp_path / 'export'))
    config = load(tmp_path, 'export').config
    assert config['split'] == 'generated' and config['n_levels'] == 50


def test_folders_of_one_pattern_may_have_one_name(agents, tmp_path):
    for seed in ('a', 'b'):
        (tmp_path / seed).mkdir()
        (tmp_path / seed / 'lstm').symlink_to(agents / 'lstm')
    apply_settings(f'--models={tmp_path}/*/lstm,{agents}/glu')
    names = [[player.name for player in group] for group in probe.load_groups('cpu')]
    assert names == [['lstm', 'lstm'], ['glu']]


# ---- the whole analysis ----


def analyze(agents, out, monkeypatch, *arguments):
    """Run probe_sokoban.py on the recurrent lstm and on the non-recurrent agent."""
    argv = f"""--models={agents}/lstm,{agents}/nonrecurrent --out_dir={out} --n_train=6
        --n_test=16 --levels=generated --test_levels={agents}/rooms.npy --min_levels=1 --epochs=1
        --seeds=2 --device=cpu --threads=1"""
    monkeypatch.setattr(sys, 'argv', ['probe_sokoban.py', *argv.split(), *arguments])
    probe.main()


def test_the_whole_analysis_writes_its_report_and_pictures(agents, tmp_path, monkeypatch, capsys):
    """Both agents solve the eight corridors and not all of the other eight levels. The causal check
    is for recurrent agents, and thinking steps change nothing for others."""
    out = tmp_path / 'out'
    monkeypatch.setattr(probe, 'HELD', (0, 2))
    analyze(agents, out, monkeypatch, '--causal', '--thinking')
    printed = capsys.readouterr().out
    assert 'GB in' in printed and 'at steps 0, 1, 2:' in printed
    names = """recall.png recall.svg plans_lstm.png plan_lstm.gif plan_nonrecurrent.gif
        probe_nonrecurrent.safetensors probes.csv"""
    assert set(names.split()) <= set(os.listdir(out))
    assert re.search(r'>[\d.]+%<', (out / 'recall.svg').read_text())  # recall is in percent
    report = json.loads((out / 'probes.json').read_text())
    assert 8 <= report['levels'] < 16
    lstm, nonrecurrent = report['models']
    assert (lstm['name'], nonrecurrent['name']) == ('lstm', 'nonrecurrent')
    assert set(lstm['probes']) == set(probe.PROBES)
    assert {row['added'] for row in lstm['causal']} == {'probe', 'random direction', 'other cell'}
    assert 'causal' not in nonrecurrent
    (solve_rate,) = {row['solve_rate'] for row in nonrecurrent['thinking']}
    assert solve_rate >= 8 / 16


def test_episodes_that_are_solved_no_more_when_recorded_are_reported(
    agents, tmp_path, monkeypatch, capsys
):
    """The batches in which episodes are recorded may round differently. The plan of the first level
    is drawn."""
    record, titles = probe.record, []

    def record_failures(*args):
        episodes, features = record(*args)
        return episodes._replace(solved=np.arange(len(episodes.solved)) > 0), features

    def keep_titles(figure, *args):
        titles.append([axes.get_title() for axes in figure.axes])

    monkeypatch.setattr(probe, 'record', record_failures)
    monkeypatch.setattr(probe, 'save_figure', keep_titles)
    analyze(agents, tmp_path / 'out', monkeypatch, '--n_test=8')
    assert capsys.readouterr().out.count('1 of these 8 episodes are not solved this time') == 2
    assert titles[1:] == 2 * [['step 0', 'step 1', 'step 2, not solved']]


def test_the_disk_must_hold_the_features_of_all_training_episodes_that_there_are(tmp_path, capsys):
    """4 episodes of 15 steps on average, 100 cells, 2 x 1000 channels, 2 bytes: 24 MB."""
    apply_settings(f'--out_dir={tmp_path}', '--n_train=1000')
    player = SimpleNamespace(
        test=probe.Episodes(None, np.array([10, 20]), None),
        agent=SimpleNamespace(config=SimpleNamespace(n_embd=1000)),
    )
    probe.check_disk([player], 4, np.array([True, True]))
    assert 'about 0.02 GB' in capsys.readouterr().out


MISTAKES = {
    'models=no_*': 'no folder is named no_*',
    'models={agents}/lstm,{agents}/lstm': 'two folders of one name',
    'min_levels=17': 'min_levels = 17',
    'test_levels=nonsense': 'data/boxoban',
}


@pytest.mark.parametrize('setting', MISTAKES)
def test_mistakes_are_found_before_anything_is_written(
    setting, agents, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)  # where no levels are
    with pytest.raises((SystemExit, ValueError)) as end:
        analyze(agents, 'out', monkeypatch, f'--{setting.format(agents=agents)}')
    assert MISTAKES[setting] in capsys.readouterr().err + str(end.value)
    assert not (tmp_path / 'out').exists()


def test_a_full_disk_is_found_before_the_states_are_written(agents, tmp_path, monkeypatch, capsys):
    usage = SimpleNamespace(free=10)
    monkeypatch.setattr(probe.shutil, 'disk_usage', lambda path: usage)
    with pytest.raises(SystemExit):
        analyze(agents, tmp_path / 'out', monkeypatch)
    assert '0.00 GB are free' in capsys.readouterr().err

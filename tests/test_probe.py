"""probe_sokoban.py: targets by hand, probes that must and must not learn, thresholds, steering,
the whole analysis."""

import json
import math
import os
import sys

import numpy as np
import pytest
import torch
from processes import run

import convlstm
import probe_sokoban as probe
from configurator import configure
from convlstm import AgentConfig, build_agent
from sokoban import FeatureRecorder, generate, pack, replay, run_episodes

UP, RIGHT, DOWN, LEFT, NEVER = range(5)


@pytest.fixture(autouse=True)
def settings(tmp_path):
    settle(f'--out_dir={tmp_path}')


def settle(*argv):
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


def test_targets_are_the_definition():
    """Random episodes against a loop that reads the definition forwards: moves that are blocked,
    cells that are entered again, ends before the last step."""
    packed = np.concatenate([generate(6, 1, seed=5, max_moves=12)[0], *[corridor()] * 4])
    rng, n = np.random.default_rng(0), len(packed)
    actions, lengths = rng.integers(0, 4, (n, 30)).astype(np.int8), rng.integers(1, 31, n)
    actions[6:, :4], lengths[6:] = (LEFT, RIGHT, RIGHT, UP), (4, 3, 30, 30)
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
    """Return steps whose features hold the class of their cell, or nothing; a fifth of the cells
    has each class. Beside them the untrained agent's features are noise and much larger."""
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
    settle('--seeds=2', '--epochs=8', '--learning_rate=0.02')
    test = random_steps(planted, seed=1)
    guesses = probe.predict(*probe.train_probes(random_steps(planted), 'cpu'), test)
    scores = probe.score(test, guesses)[1]
    for name, guess in guesses.items():
        found = planted and name in ('3x3', '1x1')
        right = np.mean(guess.likeliest == test.target)
        assert right == 1 if found else abs(right - 0.2) < 0.05  # the base rate
        assert scores[name]['recall'] == pytest.approx(float(found), abs=1e-3)
        assert not found or scores[name]['macro_f1'] == [1.0, 1.0]
    assert scores['3x3']['recall_at']['0.7'] == pytest.approx(float(planted), abs=1e-3)


def guesses_at(early, late):
    """Return guesses of three of the first 20 steps and of three later ones. Each step has 40
    directions, 32 guessed at 0.9 and right, 8 at 0.6, which are right as `early` and `late` say."""
    target, direction = np.full((6, 100), NEVER, np.int8), np.full((1, 6, 100), RIGHT, np.int8)
    probability = np.zeros((1, 6, 100), np.float32)
    target[:, :40] = RIGHT
    probability[..., :32], probability[..., 32:40] = 0.9, 0.6
    direction[0, :3, 32:40] = RIGHT if early else UP
    direction[0, 3:, 32:40] = RIGHT if late else UP
    likeliest = np.where(probability > 0, direction, NEVER).astype(np.int8)
    data = probe.Steps(None, target, np.array([0, 1, 19, 20, 21, 119]), None, None)
    return data, probe.Guess(direction, probability, likeliest)


def test_the_first_20_steps_alone_set_the_threshold():
    settle('--first=20', '--precision=0.93')
    data, guess = guesses_at(early=True, late=False)  # over all steps 90% are right
    scores = probe.score(data, {'3x3': guess})[1]['3x3']
    assert scores['threshold'] == pytest.approx(0.6)
    assert scores['precision'] == scores['recall'] == scores['recall_at']['0.9'] == 1.0

    data, guess = guesses_at(early=False, late=True)  # early 80%, over all steps 90%
    rows, scores = probe.score(data, {'3x3': guess})
    scores = scores['3x3']
    assert scores['threshold'] == pytest.approx(0.9)
    assert scores['recall'] == 0.8 and set(scores['recall_at'].values()) == {0.8}
    assert scores['recall_at_steps'] == {'0': 0.8, '1': 0.8, '2': None}  # no episode has a step 2
    assert scores['macro_f1'] == [pytest.approx((8 / 9 + 1 + 0) / 3)]
    assert [row['step'] for row in rows] == list(range(20))


def test_thresholds():
    """Equal probabilities are emitted together."""
    probability = np.array([0.9, 0.8, 0.8, 0.7, 0.6, 0.5])
    right = np.array([True, True, False, True, True, False])
    assert probe.threshold_for(probability, right, 1.0) == 0.9
    assert probe.threshold_for(probability, right, 0.8) == 0.6
    assert probe.threshold_for(probability, right, 0.1) == 0.5
    assert probe.threshold_for(probability, ~right, 1.0) == math.inf


# ---- agents ----


@pytest.fixture(scope='module')
def agents(tmp_path_factory):
    """Two tiny recurrent agents and a non-recurrent one, exported; they always go right."""
    folder = tmp_path_factory.mktemp('agents')
    sizes = {'n_layer': 1, 'n_expert': 1, 'n_embd': 8, 'head_dim': 8, 'dtype': 'float32'}
    about = {'eval_split': 'generated', 'n_boxes': 1, 'max_moves': 12, 'seed': 7, 'n_envs': 4}
    about |= {'unroll': 5, 'step': 1, 'best': 0.0}
    for name, own in {
        'lstm': {'arch': 'convlstm', 'recurrent': True, 'n_layer': 2},
        'glu': {'arch': 'convglu', 'recurrent': True},
        'nonrecurrent': {'arch': 'convglu', 'recurrent': False},
    }.items():
        torch.manual_seed(0)
        config = AgentConfig(**{**sizes, **own})
        agent = build_agent(config)
        agent.logits.bias.data[RIGHT] = 100.0
        convlstm.export_agent(agent, about | vars(config), str(folder / name))
    np.save(folder / 'rooms.npy', np.concatenate([corridors(), generate(8, 1, 9, 12)[0]]))
    return folder


def load(agents, name):
    return probe.load_player(str(agents / name), 'cpu')


@pytest.mark.long
def test_the_untrained_agent_has_the_runs_first_weights(tmp_path):
    """A run whose learning rate is 0 ends with them."""
    words = """--split=generated --eval_split=generated --n_levels=30 --n_boxes=1 --max_moves=12
        --n_envs=4 --unroll=5 --head_dim=8 --n_layer=1 --n_embd=8 --total_steps=20 --eval_games=2
        --compile=False --device=cpu --dtype=float32 --threads=1 --seed=3 --learning_rate=0"""
    done = run(['train_sokoban.py', *words.split(), f'--out_dir={tmp_path}/run'])
    assert done.returncode == 0, done.stderr
    player = probe.load_player(str(tmp_path / 'run'), 'cpu')
    untrained = player.untrained.state_dict()
    for name, p in player.agent.state_dict().items():
        assert torch.equal(p, untrained[name]), name


def test_features_are_the_agents_own(agents, monkeypatch):
    """What is kept is s of the episodes' steps, of the trained agent and of the untrained one."""
    monkeypatch.setattr(probe, 'BATCH', 4)
    player = load(agents, 'lstm')
    packed = np.concatenate([corridors()[:4], generate(3, 1, seed=9, max_moves=12)[0]])
    episodes, features = probe.record(player, packed, 'cpu')  # the second batch is short
    expected = run_episodes(player.agent, packed, 'cpu')
    assert (episodes.actions == expected['actions'].numpy()).all()
    assert (episodes.lengths == expected['steps'].numpy()).all()
    assert (episodes.solved == expected['solved'].numpy()).all()

    i = int(episodes.lengths[:5].sum())  # the first step of episode 5: from the zero state
    assert episodes.lengths[5] > 2
    boards = torch.from_numpy(replay(packed[5:6], episodes.actions[5:6]))[0]
    for k, agent in enumerate((player.agent, player.untrained)):
        weights, state = agent.prepare(), agent.init_state(1)
        for t in range(2):
            start = torch.tensor([t == 0])
            s, state = agent.encode_and_step(weights, boards[t : t + 1], start, state)
            kept = features[i + t, ..., 8 * k : 8 * k + 8]
            np.testing.assert_allclose(kept, s[0].detach().numpy(), atol=2e-3)

    data = probe.prepare(episodes, features, packed)
    mine = slice(i, i + episodes.lengths[5])
    assert data.step[mine].tolist() == list(range(episodes.lengths[5]))
    assert (data.boards[mine] == boards[: episodes.lengths[5]].numpy()).all()


def test_a_held_agent_has_seen_the_board_before_its_move(agents):
    """Nothing changes without a state."""
    packed, start = generate(20, 1, seed=9, max_moves=12)[0], torch.ones(20) > 0
    obs = torch.from_numpy(replay(packed, np.zeros((20, 1), np.int8))[:, 0])
    for name in ('nonrecurrent', 'lstm'):
        logits = []
        for hold in (0, 3):
            recorder = FeatureRecorder(load(agents, name).agent, hold=hold)
            state = recorder.init_state(20)
            logits.append(recorder.act(recorder.prepare(), obs, start, state)[0])
        assert torch.equal(*logits) == (name == 'nonrecurrent')


class Obedient:
    """An agent that goes where channel k of its carried s, at the cell that k leads to, is largest.
    A change at a cell that is no empty floor pulls it left a little. By default it goes up."""

    def __init__(self, agent):
        self.config, self.prepare, self.init_state = agent.config, agent.prepare, agent.init_state

    def act(self, weights, obs, start, state):
        s = state[0].reshape(len(obs), 100, -1)
        variable, fixed = obs[..., 0].flatten(1), obs[..., 1].flatten(1)
        boards, at = torch.arange(len(obs)), (variable == 3).int().argmax(1)
        logits = torch.stack([s[boards, at + d, k] for k, d in enumerate(probe.DELTA)], 1) - 1
        logits[:, UP] += 1e-3
        touched = ((s - 1).abs().sum(-1) > 1e-6) & ((variable != 0) | (fixed != 0))
        logits[:, LEFT] += 0.01 * touched.any(1)
        return logits, None, (torch.ones_like(state[0]),)


def test_the_causal_check_steers_at_the_cell_and_its_control_is_another_free_one(agents):
    player = load(agents, 'glu')
    packed = generate(60, 1, seed=9, max_moves=12)[0]
    episodes = probe.as_episodes(run_episodes(player.agent, packed, 'cpu'))
    episodes.actions[:] = UP
    rows = probe.causal_check(Obedient(player.agent), packed, episodes, torch.eye(4, 8))
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
def test_steering_grows_s(sizes):
    """At the cell alone, by the vector; experts' carried h aggregate to it, a ConvLSTM's c stay."""
    torch.manual_seed(0)
    agent = build_agent(AgentConfig(n_layer=2, n_embd=6, head_dim=8, **sizes)).eval()
    state, cell, vector = agent.init_state(1), torch.tensor([43]), torch.randn(1, 6)
    steered = probe.steer(agent, state, cell, vector)
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


def test_levels_that_all_solve(agents):
    players = [load(agents, name) for name in ('lstm', 'glu')]
    solved = ([True, True, False, False], [True, False, True, False])
    for player, its in zip(players, solved, strict=True):
        player.test = probe.Episodes(None, None, np.array(its))
    assert probe.solved_by_all(players).tolist() == [True, False, False, False]


def test_of_a_pattern_the_agent_that_solves_most(agents):
    players = [load(agents, name) for name in ('nonrecurrent', 'glu', 'lstm')]
    for k in (0, 2):
        players[k].agent.logits.bias.data[LEFT] = 200.0  # away from the box
    assert probe.best_player(players, corridors(), 'cpu') is players[1]
    assert players[1].test.solved.all() and not players[0].test.solved.any()


# ---- the whole analysis ----


def analyze(agents, out, monkeypatch, *argv):
    words = f"""--models={agents}/lstm,{agents}/nonrecurrent --out_dir={out} --n_train=6
        --n_test=16 --levels=generated --test_levels={agents}/rooms.npy --min_levels=1 --epochs=1
        --seeds=2 --device=cpu --threads=1"""
    monkeypatch.setattr(sys, 'argv', ['probe_sokoban.py', *words.split(), *argv])
    probe.main()


def test_the_whole_analysis(agents, tmp_path, monkeypatch, capsys):
    out = tmp_path / 'out'
    monkeypatch.setattr(probe, 'HELD', (0, 2))
    analyze(agents, out, monkeypatch, '--causal', '--thinking')
    printed = capsys.readouterr().out
    assert 'GB in' in printed and 'at steps 0, 1, 2:' in printed
    names = """recall.png recall.svg plans_lstm.png plan_lstm.gif plan_nonrecurrent.gif
        probe_nonrecurrent.safetensors probes.csv"""
    assert set(names.split()) <= set(os.listdir(out))
    report = json.loads((out / 'probes.json').read_text())
    lstm, other = report['models']
    assert (lstm['name'], other['name']) == ('lstm', 'nonrecurrent') and 'causal' not in other
    rates = {row['solve_rate'] for row in other['thinking']}
    assert len(rates) == 1 and min(rates) >= 8 / 16 and 8 <= report['levels'] < 16
    assert set(lstm['probes']) == set(probe.PROBES)
    assert {row['added'] for row in lstm['causal']} == {'probe', 'random direction', 'other cell'}


MISTAKES = {
    'models=no_*': 'no folder is named no_*',
    'models={agents}/lstm,{agents}/lstm': 'two folders of one name',
    'min_levels=17': 'min_levels = 17',
    'test_levels=nonsense': 'data/boxoban',
}


@pytest.mark.parametrize('setting', MISTAKES)
def test_mistakes(setting, agents, tmp_path, monkeypatch, capsys):
    """Found before anything is written."""
    monkeypatch.chdir(tmp_path)  # where no levels are
    with pytest.raises((SystemExit, ValueError)) as end:
        analyze(agents, 'out', monkeypatch, f'--{setting.format(agents=agents)}')
    assert MISTAKES[setting] in capsys.readouterr().err + str(end.value)
    assert not (tmp_path / 'out').exists()


def test_a_full_disk_is_found_before_the_states_are_written(agents, tmp_path, monkeypatch, capsys):
    usage = type('Usage', (), {'free': 10})
    monkeypatch.setattr(probe.shutil, 'disk_usage', lambda path: usage)
    with pytest.raises(SystemExit):
        analyze(agents, tmp_path / 'out', monkeypatch)
    assert '0.00 GB are free' in capsys.readouterr().err

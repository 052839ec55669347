"""probe_sokoban.py: targets by hand, probes that must and must not learn, thresholds, steering, the
whole command."""

import json
import math
import os

from conftest import run
import numpy as np
import pytest
import torch
from test_train import ROOT, mistake

import probe_sokoban as probe
import train_sokoban
from common import load_checkpoint, save_checkpoint
from configurator import configure
from convlstm import AgentConfig, build_agent
from figures import read_csv
from sokoban import FeatureRecorder, generate, pack, replay, run_episodes

UP, RIGHT, DOWN, LEFT, NEVER = range(5)
AGENT = """--split=generated --eval_split=generated --n_levels=30 --n_boxes=1 --max_moves=12
    --n_envs=4 --unroll=5 --head_dim=8 --n_layer=1 --n_expert=1 --n_embd=8 --total_steps=40
    --eval_games=30 --compile=False --device=cpu --dtype=float32 --threads=1"""


@pytest.fixture(autouse=True)
def settings(tmp_path):
    settle(f'--out_dir={tmp_path}')


def settle(*argv):
    configure(vars(probe), argv, quiet=True)


def corridor(row=3):
    """A level (1, 17): an empty 8 x 8 room, agent at row 4, column 4, a box to its right at (4, 5),
    the target at (4, 7). Cells count rows of 10."""
    box, target = np.zeros((1, 64), bool), np.zeros((1, 64), bool)
    box[0, row * 8 + 4] = target[0, row * 8 + 6] = True
    return pack(np.zeros((1, 64), bool), target, box, np.array([row * 8 + 3]))


# ----------------------------------------------------------------------------- targets


def test_targets_are_the_definition():
    """Random games that begin with a push down a corridor or two, against a loop that reads the
    definition forwards: moves that are blocked, cells entered again, an end before the last
    step."""
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
            for u in reversed(range(t, lengths[i])):
                if at[i, u] != at[i, u + 1]:
                    expected[at[i, u + 1]] = actions[i, u]
            assert (found[i, t] == expected).all()


# ----------------------------------------------------------------------------- probes and scores


def made_up(planted, S=400, C=8, seed=0):
    """Features that hold the class of a cell, or nothing; a fifth of the cells has each class. The
    untrained agent's, beside them, are noise and much larger."""
    rng = np.random.default_rng(seed)
    target = rng.integers(0, 5, (S, 100)).astype(np.int8)
    features = rng.normal(size=(S, 10, 10, 2 * C)).astype(np.float16)
    features[..., C:] *= 100
    if planted:
        features[..., :5] = 3 * np.eye(5, dtype=np.float16)[target].reshape(S, 10, 10, 5)
    seen = np.zeros((S, 10, 10, 2), np.uint8)
    return probe.Steps(seen, target, np.arange(S) % 30, probe.Games(None, None, None, features))


def test_a_planted_signal_is_found_and_noise_is_not():
    settle('--seeds=2', '--epochs=10', '--learning_rate=0.01')
    for planted in (True, False):
        other = made_up(planted, seed=1)
        guesses = probe.predict(*probe.train_probes(made_up(planted), 'cpu'), other)
        about = probe.score(other, guesses)[1]
        for name, g in guesses.items():
            found = planted and name in ('3x3', '1x1')
            right = np.mean(g.likeliest == other.target)
            assert right == 1 if found else abs(right - 0.2) < 0.05  # the base rate
            assert about[name]['recall'] == pytest.approx(float(found), abs=1e-3)
            assert not found or about[name]['macro_f1'] == [1.0, 1.0]
        assert about['3x3']['recall_at']['0.7'] == pytest.approx(float(planted), abs=1e-3)


def guesses_at(early, late):
    """Guesses of three of the first 20 steps and of three later ones. Each step has 40 directions,
    32 guessed at 0.9 and right, 8 at 0.6, which are right as `early` and `late` say."""
    target, way = np.full((6, 100), NEVER, np.int8), np.full((1, 6, 100), RIGHT, np.int8)
    sure = np.zeros((1, 6, 100), np.float32)
    target[:, :40] = RIGHT
    sure[..., :32], sure[..., 32:40] = 0.9, 0.6
    way[0, :3, 32:40] = RIGHT if early else UP
    way[0, 3:, 32:40] = RIGHT if late else UP
    likeliest = np.where(sure > 0, way, NEVER).astype(np.int8)
    data = probe.Steps(None, target, np.array([0, 1, 19, 20, 21, 119]), None)
    return data, probe.Guess(way, sure, likeliest)


def test_the_first_20_steps_alone_set_the_threshold():
    assert probe.first == 20 and probe.precision == 0.93
    data, g = guesses_at(early=True, late=False)  # over all steps 90%
    about = probe.score(data, {'3x3': g})[1]['3x3']
    assert about['threshold'] == pytest.approx(0.6)
    assert about['precision'] == about['recall'] == about['recall_at']['0.9'] == 1.0
    data, g = guesses_at(early=False, late=True)  # early 80%, over all steps 90%
    rows, about = probe.score(data, {'3x3': g})
    about = about['3x3']
    assert about['threshold'] == pytest.approx(0.9)
    assert about['recall'] == 0.8 and set(about['recall_at'].values()) == {0.8}
    assert about['macro_f1'] == [pytest.approx((8 / 9 + 1 + 0) / 3)]
    assert [r['step'] for r in rows] == list(range(20))
    sure, right = np.array([0.9, 0.8, 0.8, 0.7, 0.6, 0.5]), np.array([1, 1, 0, 1, 1, 0]) > 0
    for wanted, threshold in ((1.0, 0.9), (0.8, 0.6), (0.1, 0.5)):  # equal ones go together
        assert probe.threshold_for(sure, right, wanted) == threshold
    assert probe.threshold_for(sure, ~right, 1.0) == math.inf


# ----------------------------------------------------------------------------- agents


@pytest.fixture(scope='module')
def agents(tmp_path_factory):
    """Two tiny recurrent agents and one that is not, made to go right always."""
    folder = tmp_path_factory.mktemp('agents')
    glu, ff = '--arch=convglu', '--recurrent=False'
    for name, *more in (('lstm', '--n_layer=2'), ('glu', glu), ('ff', glu, ff)):
        argv = [*AGENT.split(), *more, f'--out_dir={folder / name}']
        assert train_sokoban.train(configure(vars(train_sokoban), argv, quiet=True)) == 0
        saved = load_checkpoint(folder / name / 'ckpt_last.pt')
        saved['model']['logits.bias'][RIGHT] = 100.0
        save_checkpoint(saved, folder / name / 'ckpt_last.pt')
        if name == 'lstm':  # and what it was before its first update
            configure(vars(train_sokoban), argv, quiet=True)
            begun = train_sokoban.make_run(saved['config']).model.state_dict()
            save_checkpoint({'model': begun}, folder / name / 'begun.pt')
    rooms = [corridor(row) for row in range(8)]
    rooms.append(generate(22, 1, seed=9, max_moves=12)[0])
    np.save(folder / 'rooms.npy', np.concatenate(rooms))
    return folder


def arguments(agents, out, *argv):
    settings = f"""--models={agents}/lstm,{agents}/ff --out_dir={out} --n_train=12 --n_test=30
        --test_levels={agents}/rooms.npy --min_levels=1 --epochs=1 --seeds=2 --device=cpu
        --threads=1"""
    return [*settings.split(), *argv]


def test_features_are_the_agents_own(agents):
    """What is kept is s of the game's steps, of the trained agent and of the untrained one."""
    player = probe.load_player(str(agents / 'lstm'), 'cpu')
    packed = np.concatenate([generate(64, 1, seed=9, max_moves=12)[0], *[corridor()] * 6])
    games = probe.record(player, packed, 'cpu')  # the second batch is short
    expected = run_episodes(player.model, packed, 'cpu')
    for ours, name in zip(games[:3], ('actions', 'steps', 'solved'), strict=True):
        assert (ours == expected[name].numpy()).all()
    begun = load_checkpoint(agents / 'lstm' / 'begun.pt')['model']  # the run's first weights
    for name, p in player.untrained.state_dict().items():
        assert torch.equal(p, begun[name])
    i = int(games.lengths[:5].sum())  # game 5's first step: from the zero state
    boards = torch.from_numpy(replay(packed[5:6], games.actions[5:6]))[0]
    for k, model in enumerate((player.model, player.untrained)):
        w, state = model.prepare(), model.init_state(1)
        for t in range(2):
            z, alive = model.encode(boards[t : t + 1]), model.alive(torch.tensor([t == 0]))
            s, state = model.step(w, z, model.z_parts(w, z), alive, state)
            kept = games.features[i + t, ..., 8 * k : 8 * k + 8]
            np.testing.assert_allclose(kept, s[0].detach().numpy(), atol=2e-3)
    data, n = probe.prepare(games, packed, np.arange(70) == 5), games.lengths[5]  # this one alone
    np.testing.assert_array_equal(data.games.features, games.features[i : i + n])
    assert data.step.tolist() == list(range(n)) and (data.seen == boards[:n].numpy()).all()


def test_time_to_think(agents):
    """Nothing changes without a state; with one a held agent has seen the board before its move."""
    packed, start = generate(20, 1, seed=9, max_moves=12)[0], torch.ones(20) > 0
    obs = torch.from_numpy(replay(packed, np.zeros((20, 1), np.int8))[:, 0])
    for name in ('ff', 'lstm'):
        model, logits = probe.load_player(str(agents / name), 'cpu').model, []
        for held in (0, 3):
            watched = FeatureRecorder(model, hold=held)
            w, state = watched.prepare(), watched.init_state(20)
            logits.append(watched.act(w, obs, start, state)[0])
        assert torch.equal(*logits) == (name == 'ff')


def obedient(model):
    """Makes an agent go where a wish is: channel k of its carried s, at the cell that k leads to
    from it, is the logit of k. A change at a cell that is no empty floor pulls it left a little."""

    def step(w, z, parts, alive, state):
        s = state[0].reshape(len(z), 100, -1)
        there, ground = z[..., 0].flatten(1), z[..., 1].flatten(1)
        games, at = torch.arange(len(z)), (there == 3).int().argmax(1)
        wish = torch.stack([s[games, at + d, k] for k, d in enumerate(probe.DELTA)], 1) - 1
        wish[:, UP] += 1e-3  # what it does where nothing is changed
        touched = ((s - 1).abs().sum(-1) > 1e-6) & ((there != 0) | (ground != 0))
        wish[:, LEFT] += 0.01 * touched.any(1)
        return wish, (torch.ones_like(state[0]),)

    model.encode, model.z_parts = lambda obs: obs, lambda w, z: []
    model.step, model.head = step, lambda wish: (wish, None)


def test_the_causal_check_steers_at_the_cell_and_its_control_is_another_free_one(agents):
    player = probe.load_player(str(agents / 'glu'), 'cpu')
    packed = generate(60, 1, seed=9, max_moves=12)[0]
    games = probe.record(player, packed, 'cpu')
    games.actions[:] = UP
    obedient(player.model)
    rows = probe.causal_check(player.model, packed, games, torch.eye(4, 8))
    assert rows[0]['games'] > 40 and len(rows) == 15
    for r in rows:
        if r['added'] == 'probe':
            assert r['follows'] == 1.0
        elif r['added'] == 'random direction':
            assert 0 < r['follows'] < 0.8
        else:
            assert r['follows'] == r['changes'] == 0.0


STEERED = [
    {}, {'n_expert': 3}, {'n_expert': 3, 'aggregation': 'mean'}, {'n_expert': 3, 'radius': 1},
    {'arch': 'convglu'}, {'arch': 'convglu', 'n_expert': 3},
]  # fmt: skip


@pytest.mark.parametrize('sizes', STEERED, ids=str)
def test_steering_grows_s(sizes):
    """At the cell alone, by the vector; experts' carried h aggregate to it, a ConvLSTM's c stay."""
    torch.manual_seed(0)
    model = build_agent(AgentConfig(n_layer=2, n_embd=6, head_dim=8, **sizes)).eval()
    state, cell, vector = model.init_state(1), torch.tensor([43]), torch.randn(1, 6)
    steered = probe.steer(model, state, cell, vector)
    changes = [after - before for after, before in zip(steered, state, strict=True)]
    for change in changes[:2]:
        change = model.aggregate(1, change, None, None) if change.dim() == 5 else change
        torch.testing.assert_close(change[:, 4, 3], vector)
        assert change.count_nonzero() == 6
    assert not any(change.any() for change in changes[2:])


def test_levels_that_all_solve():
    solved = [[True, True, False, False], [True, False, True, False]]
    games = [probe.Games(None, None, np.array(its), None) for its in solved]
    assert probe.solved_by_all(games).tolist() == [True, False, False, False]


def test_of_a_pattern_the_agent_that_solves_most(agents):
    players = [probe.load_player(str(agents / name), 'cpu') for name in ('ff', 'glu', 'lstm')]
    for k in (0, 2):
        players[k].model.logits.bias.data[LEFT] = 200.0  # away from the box
    rooms = np.concatenate([corridor(row) for row in range(8)])
    assert probe.best_player(players, rooms, 'cpu') is players[1]


# ----------------------------------------------------------------------------- the command


def test_the_whole_command(agents, tmp_path):
    out = tmp_path / 'out'
    argv = arguments(agents, out, '--causal', '--thinking')
    done = run([ROOT / 'probe_sokoban.py', *argv], cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    names = 'recall.png recall.svg plans_lstm.png plan_lstm.gif plan_ff.gif probe_ff.safetensors'
    assert set(names.split()) <= set(os.listdir(out))
    report = json.loads((out / 'probes.json').read_text())
    lstm, ff = report['models']
    assert (lstm['name'], ff['name']) == ('lstm', 'ff') and 'causal' not in ff
    rates = {row['solve_rate'] for row in ff['thinking']}
    assert len(rates) == 1 and min(rates) >= 8 / 30 and 8 <= report['levels'] < 30
    assert set(lstm['probes']) == set(probe.PROBES)
    assert {r['added'] for r in lstm['causal']} == {'probe', 'random direction', 'other cell'}
    rows = read_csv(out / 'probes.csv')
    kinds = [{r[key] for r in rows} for key in ('model', 'probe', 'seed')]
    assert kinds == [{'lstm', 'ff'}, set(probe.PROBES), {'0', '1'}]
    games = {r['games'] for r in rows if r['step'] == '0'}
    assert games == {str(report['levels'])}  # the others' are not scored


def test_mistakes(agents, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)  # where no levels are
    for word, message in {
        'models=no_*': 'no folder is named no_*',
        f'models={agents}/lstm,{agents}/lstm': 'two folders of one name',
        'min_levels=31': 'min_levels = 31',
        'test_levels=nonsense': 'data/boxoban',
    }.items():
        assert message in mistake(capfd, probe, arguments(agents, tmp_path / 'out', f'--{word}'))

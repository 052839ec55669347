"""probe_sokoban.py: the targets by hand, probes that must and must not learn, thresholds, storing and going on, the whole command."""

import csv
import json
import math
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import forks
import numpy as np
import pytest
import torch

import probe_sokoban as probe
import train_sokoban
from checkpoint import load_checkpoint, save_checkpoint
from configurator import configure, gathered
from convlstm import AgentConfig, build_agent
from sokoban import generate, pack

ROOT = Path(__file__).resolve().parent.parent
UP, RIGHT, DOWN, LEFT, NEVER = range(5)
AGENT = {
    'split': 'generated',
    'eval_split': 'generated',
    'n_levels': 30,
    'n_boxes': 1,
    'max_moves': 12,
    'n_envs': 4,
    'unroll': 5,
    'head_dim': 8,
    'n_layer': 1,
    'n_expert': 1,
    'n_embd': 8,
    'total_steps': 40,
    'eval_games': 30,
    'compile': False,
    'device': 'cpu',
    'dtype': 'float32',
    'threads': 1,
}


@pytest.fixture(autouse=True)
def settings():
    configure(vars(probe), [], quiet=True)


def corridor(row=3):
    """A level (1, 17): an empty 8 x 8 room, agent at row 4, column 4, a box to its right at (4, 5), the target at (4, 7). Cells count rows of 10."""
    box, target = np.zeros((1, 64), bool), np.zeros((1, 64), bool)
    box[0, row * 8 + 4] = target[0, row * 8 + 6] = True
    return pack(np.zeros((1, 64), bool), target, box, np.array([row * 8 + 3]))


def played(actions, kind, length=None):
    """Targets (T, 100) of one game in the corridor."""
    actions = np.array([actions], np.int8)
    boards = probe.replay(corridor(), actions)
    return probe.targets(boards, actions, np.array([length or actions.shape[1]]), kind)[0]


def test_enter_by_hand():
    """Left, up, right, right: (4,3) left, (3,3) up, (3,4) right, (3,5) right; then down pushes nothing: (4,5) holds the box, below is free."""
    y = played([LEFT, UP, RIGHT, RIGHT], 'enter')
    assert (y[0][43], y[0][33], y[0][34], y[0][35]) == (LEFT, UP, RIGHT, RIGHT)
    assert (y[0] != NEVER).sum() == 4 and y[0][
        44
    ] == NEVER  # the cell it stands on is not entered again
    assert (
        y[1][43] == NEVER and y[1][33] == UP and (y[3] != NEVER).sum() == 1 and y[3][35] == RIGHT
    )  # the last step has its own move


def test_revisits_and_the_current_cell():
    """Left, right, left: the start is entered again, by RIGHT; (4,3) first by LEFT now, and again by LEFT after it was left."""
    y = played([LEFT, RIGHT, LEFT], 'enter')
    assert (
        y[0][44] == RIGHT
        and y[0][43] == LEFT
        and y[1][43] == LEFT
        and y[1][44] == RIGHT
        and y[2][44] == NEVER
    )
    y = played(
        [UP, RIGHT, DOWN, UP, LEFT, DOWN], 'enter'
    )  # (4,5) is entered from above by pushing the box down; the start at the end
    assert (
        y[0][45] == DOWN
        and y[0][34] == UP
        and y[1][34] == LEFT
        and y[0][35] == RIGHT
        and y[3][35] == UP
        and y[0][44] == DOWN
    )


def test_blocked_moves_do_not_count():
    walk = [UP, UP, UP, UP, UP]  # rows 3, 2, 1; then the wall, twice
    y = played(walk, 'enter')
    assert (
        [y[0][c] for c in (34, 24, 14, 4)] == [UP, UP, UP, NEVER]
        and (y[3] == NEVER).all()
        and (y[4] == NEVER).all()
    )
    y = played(walk, 'leave')
    assert [y[0][c] for c in (44, 34, 24, 14)] == [UP, UP, UP, NEVER]
    pushed = played(
        [RIGHT, RIGHT, RIGHT], 'enter'
    )  # the box reaches (4,8), at the wall, by the third
    assert [pushed[0][c] for c in (45, 46, 47)] == [RIGHT] * 3
    assert (played([RIGHT] * 4, 'enter')[3] == NEVER).all()  # and the fourth push is blocked


def test_leave_and_push_by_hand():
    y = played([LEFT, RIGHT, RIGHT, RIGHT], 'leave')
    assert (
        y[0][44] == LEFT
        and y[1][44] == RIGHT
        and y[0][43] == RIGHT
        and y[3][45] == RIGHT
        and y[0][46] == NEVER
    )
    y = played([LEFT, RIGHT, RIGHT, RIGHT], 'push')  # pushes at steps 2 and 3, off (4,5) and (4,6)
    assert (
        (y[0] != NEVER).sum() == 2
        and y[0][45] == RIGHT
        and y[0][46] == RIGHT
        and y[3][46] == RIGHT
        and y[3][45] == NEVER
    )


def test_nothing_after_the_end_counts():
    y = played([LEFT, LEFT, UP, UP], 'enter', length=2)
    assert [y[0][c] for c in (43, 42, 32)] == [LEFT, LEFT, NEVER] and (y[2:] == NEVER).all()


@pytest.mark.parametrize('kind', ['enter', 'leave', 'push'])
def test_targets_are_the_definition(kind):
    """Random games, against a loop that reads the definition forwards."""
    packed, rng = generate(6, 1, seed=5, max_moves=12)[0], np.random.default_rng(0)
    actions, lengths = rng.integers(0, 4, (6, 30)).astype(np.int8), rng.integers(1, 31, 6)
    boards = probe.replay(packed, actions)
    got = probe.targets(boards, actions, lengths, kind)
    for i in range(6):
        at = [int(np.flatnonzero(b[..., 0].ravel() == 3)[0]) for b in boards[i]]
        for t in range(lengths[i]):
            for cell in range(100):
                expected = NEVER
                for u in range(t, lengths[i]):
                    on = {'enter': at[u + 1], 'leave': at[u], 'push': at[u + 1]}[kind]
                    if (
                        at[u] != at[u + 1]
                        and on == cell
                        and (kind != 'push' or boards[i][u][..., 0].ravel()[cell] == 4)
                    ):
                        expected = actions[i][u]
                        break
                assert got[i, t, cell] == expected


def test_flat_keeps_games_in_order():
    x = np.arange(12).reshape(2, 6)
    assert probe.flat(x, np.array([2, 4])).tolist() == [0, 1, 6, 7, 8, 9]


# ----------------------------------------------------------------------------- learning


def made_up(planted, S=400, C=8, seed=0):
    """Features that hold the class of a cell, or nothing; a fifth of the cells has each class. The untrained agent's, beside them, are noise
    and much larger."""
    rng = np.random.default_rng(seed)
    target = rng.integers(0, 5, (S, 100)).astype(np.int8)
    features = rng.normal(size=(S, 10, 10, C)).astype(np.float16)
    if planted:
        features[..., :5] = 3 * np.eye(5, dtype=np.float16)[target].reshape(S, 10, 10, 5)
    features = np.concatenate(
        [features, 100 * rng.normal(size=(S, 10, 10, C)).astype(np.float16)], -1
    )
    return SimpleNamespace(
        features=features,
        seen=np.zeros((S, 10, 10, 2), np.uint8),
        target=target,
        step=np.arange(S) % 30,
        lengths=np.full(1, S),
    )


def test_a_planted_signal_is_found_and_noise_is_not():
    configure(vars(probe), ['--seeds=2', '--epochs=10', '--learning_rate=0.01'], quiet=True)
    data, other = made_up(True), made_up(True, seed=1)
    probes, scale = probe.train_probes(data, 'cpu')
    guesses = probe.predict(probes, other, scale, 'cpu')
    rows, about = probe.score(other, guesses, 0.93)
    for kind in ('3x3', '1x1'):
        assert (
            (guesses[kind].likeliest == other.target).all()
            and about[kind]['recall'] == pytest.approx(1, abs=1e-3)
            and about[kind]['macro_f1'] == [1.0, 1.0]
        )
    for kind in ('untrained 3x3', 'untrained 1x1', 'observation'):
        assert np.mean(guesses[kind].likeliest == other.target) < 0.25
    assert (
        about['3x3']['recall_at'] == pytest.approx({'0.7': 1, '0.8': 1, '0.9': 1}, abs=1e-3)
        and about['untrained 3x3']['recall'] < 0.001
    )
    noise, other = made_up(False), made_up(False, seed=1)
    probes, scale = probe.train_probes(noise, 'cpu')
    guesses = probe.predict(probes, other, scale, 'cpu')
    for g in guesses.values():
        assert abs(np.mean(g.likeliest == other.target) - 0.2) < 0.02  # the base rate
        assert probe.best_precision(g.sure, g.way == other.target) < 0.5
    assert probe.score(other, guesses, 0.93)[1]['3x3']['recall'] < 0.001


def test_probes_side_by_side_learn_as_alone():
    data = made_up(True, S=64)
    configure(vars(probe), ['--seeds=3', '--epochs=2'], quiet=True)
    three, scale = probe.train_probes(data, 'cpu')
    configure(vars(probe), ['--seeds=1', '--epochs=2'], quiet=True)
    one, _ = probe.train_probes(data, 'cpu')
    for kind in probe.PROBES:
        torch.testing.assert_close(three[kind][0][:5], one[kind][0], rtol=1e-4, atol=1e-5)
        assert not torch.allclose(three[kind][0][:5], three[kind][0][5:10], atol=1e-3)
    g = probe.predict(three, data, scale, 'cpu')['3x3']
    assert g.way.shape == g.sure.shape == g.likeliest.shape == (3, 64, 100) and g.way.max() < NEVER


def test_thresholds():
    sure = np.array([0.9, 0.8, 0.8, 0.7, 0.6, 0.5])
    right = np.array([True, True, False, True, True, False])
    assert (
        probe.threshold_for(sure, right, 1.0) == 0.9
        and probe.threshold_for(sure, right, 0.8) == 0.6
        and probe.threshold_for(sure, right, 0.1) == 0.5
    )
    assert (
        probe.threshold_for(sure, ~right, 1.0) == math.inf
    )  # ties go together: 0.8 has one of each
    assert (
        probe.best_precision(sure, right, least=1) == 1.0
        and probe.best_precision(sure, right, least=4) == 0.8
    )
    assert probe.best_precision(sure, right, least=100) == pytest.approx(4 / 6)


def test_scores_by_hand():
    """Two steps of one probe: of three directions two are emitted, one of them right; a false one on a NEVER cell."""
    target = np.full((2, 100), NEVER, np.int8)
    target[0, :2], target[1, 5] = (UP, RIGHT), LEFT
    way, sure = np.zeros((1, 2, 100), np.int8), np.zeros((1, 2, 100), np.float32)
    sure[0, 0, :2], sure[0, 1, 7] = 0.9, 0.8
    guesses = {
        '3x3': SimpleNamespace(
            way=way, sure=sure, likeliest=np.where(sure > 0.5, way, NEVER).astype(np.int8)
        )
    }
    rows, about = probe.score(SimpleNamespace(target=target, step=np.array([0, 1])), guesses, 0.3)
    assert [(r['recall'], r['precision'], r['directions'], r['emitted']) for r in rows] == [
        (0.5, 0.5, 2, 2),
        (0.0, 0.0, 1, 1),
    ]
    assert about['3x3']['recall'] == pytest.approx(1 / 3) and about['3x3'][
        'precision'
    ] == pytest.approx(1 / 3)
    assert probe.f1(np.array([0, 0, 1, 4]), np.array([0, 1, 1, 4])) == pytest.approx(
        (2 / 3 + 2 / 3 + 1) / 3
    )


def guesses_at(early, late):
    """Guesses of three of the first 20 steps and of three later ones. Each step has 40 directions, 32 guessed at 0.9 and right, 8 at 0.6, which
    are right as `early` and `late` say."""
    target, way = np.full((6, 100), NEVER, np.int8), np.full((1, 6, 100), RIGHT, np.int8)
    sure = np.zeros((1, 6, 100), np.float32)
    target[:, :40] = RIGHT
    sure[..., :32], sure[..., 32:40] = 0.9, 0.6
    for k, right in enumerate([early] * 3 + [late] * 3):
        way[0, k, 32:40] = RIGHT if right else UP
    data = SimpleNamespace(target=target, step=np.array([0, 1, 19, 20, 21, 119]))
    return data, SimpleNamespace(
        way=way, sure=sure, likeliest=np.where(sure > 0, way, NEVER).astype(np.int8)
    )


def test_the_first_20_steps_alone_set_the_threshold():
    assert probe.first == 20
    data, g = guesses_at(early=True, late=False)  # over all steps 90%
    about = probe.score(data, {'3x3': g}, 0.93)[1]['3x3']
    assert (
        about['threshold'] == pytest.approx(0.6)
        and about['precision'] == about['recall'] == about['recall_at']['0.9'] == 1.0
    )
    data, g = guesses_at(early=False, late=True)  # early 80%, over all steps 90%
    rows, about = probe.score(data, {'3x3': g}, 0.85)
    about = about['3x3']
    assert (
        about['threshold'] == pytest.approx(0.9)
        and about['recall'] == 0.8
        and about['macro_f1'] == [pytest.approx((8 / 9 + 1 + 0) / 3)]
    )
    assert [r['step'] for r in rows] == list(range(20)) and about['recall_at'] == {
        '0.7': 0.8,
        '0.8': 0.8,
        '0.9': 0.8,
    }
    g.sure[:] = 0.9  # nothing tells the wrong from the right
    data.target[data.target == NEVER] = RIGHT  # 8 of 100 are wrong early, none late
    assert probe.common_precision([{'guesses': {'3x3': g}, 'data': data}]) == pytest.approx(0.92)


# ----------------------------------------------------------------------------- agents


@pytest.fixture(scope='module')
def agents(tmp_path_factory):
    """Two tiny recurrent agents and one that is not, made to go right always."""
    folder = tmp_path_factory.mktemp('agents')
    for name, more in (
        ('lstm', {'arch': 'convlstm', 'n_layer': 2}),
        ('glu', {'arch': 'convglu'}),
        ('ff', {'arch': 'convglu', 'recurrent': False}),
    ):
        argv = [f'--{k}={v}' for k, v in {**AGENT, **more, 'out_dir': folder / name}.items()]
        assert train_sokoban.train(configure(vars(train_sokoban), argv, quiet=True)) == 0
        saved = load_checkpoint(folder / name / 'ckpt_last.pt')
        saved['model']['logits.bias'][RIGHT] = 100.0
        save_checkpoint(saved, folder / name / 'ckpt_last.pt')
        if name == 'lstm':  # and what it was before its first update
            configure(vars(train_sokoban), argv, quiet=True)
            save_checkpoint(
                {'model': train_sokoban.make_run(saved['config']).model.state_dict()},
                folder / name / 'begun.pt',
            )
    rooms = [corridor(row) for row in range(8)]
    np.save(
        folder / 'rooms.npy', np.concatenate([*rooms, generate(22, 1, seed=9, max_moves=12)[0]])
    )
    return folder


def arguments(agents, out, *argv):
    names = ','.join(str(agents / name) for name in ('lstm', 'ff'))
    return [
        f'--models={names}',
        f'--out_dir={out}',
        '--n_train=12',
        '--n_test=30',
        f'--test_levels={agents}/rooms.npy',
        '--min_levels=1',
        '--epochs=1',
        '--seeds=2',
        '--device=cpu',
        '--threads=1',
        *argv,
    ]


def command(agents, out, *argv):
    return forks.run(
        [sys.executable, str(ROOT / 'probe_sokoban.py'), *arguments(agents, out, *argv)],
        cwd=out.parent,
        text=True,
        capture_output=True,
    )


def test_features_are_the_agents_own(agents, tmp_path):
    """What is stored is s of the game's steps; the actions are those of play_sokoban.play; a second call reads, a cut one goes on."""
    import play_sokoban

    configure(vars(probe), [f'--out_dir={tmp_path}'], quiet=True)
    agent = probe.load_agent(str(agents / 'lstm'), 'cpu')
    packed = np.concatenate(
        [generate(64, 1, seed=9, max_moves=12)[0], *[corridor()] * 6]
    )  # the second batch is a short one
    data = probe.collect(agent, packed, 'part', 'cpu')
    expected = play_sokoban.play(agent.model, packed, 'cpu')
    assert (data.lengths == expected['steps'].numpy()).all() and (
        data.solved == expected['solved'].numpy()
    ).all()
    for i in range(70):
        assert (
            data.actions[i, : data.lengths[i]] == expected['actions'][i, : data.lengths[i]].numpy()
        ).all()
    boards = probe.flat(probe.replay(packed, data.actions)[:, :-1], data.lengths)
    i = int(data.lengths[:5].sum())  # game 5's first step: from the zero state
    begun = load_checkpoint(agents / 'lstm' / 'begun.pt')[
        'model'
    ]  # as the run's first weights were
    assert all(torch.equal(p, begun[name]) for name, p in agent.untrained.state_dict().items())
    both = zip(
        (agent.model, agent.untrained),
        (data.features[i : i + 2, ..., :8], data.features[i : i + 2, ..., 8:]),
        strict=True,
    )
    for model, stored in both:
        state = model.init_state(1)
        for k in range(2):  # the untrained agent sees the trained one's game
            _, f, state = probe.act(
                model,
                model.prepare(),
                torch.from_numpy(boards[i + k : i + k + 1]),
                torch.tensor([k == 0]),
                state,
            )
            np.testing.assert_allclose(stored[k], f[0].detach().numpy(), atol=2e-3)
    assert (
        np.abs(data.features[i, ..., :8].astype(np.float32) - data.features[i, ..., 8:]).max()
        > 0.01
    )
    whole, path = np.array(data.features), tmp_path / 'lstm' / 'part.f16'
    stamp = path.stat().st_mtime_ns
    np.testing.assert_array_equal(probe.collect(agent, packed, 'part', 'cpu').features, whole)
    index = dict(np.load(tmp_path / 'lstm' / 'part.npz'))
    np.savez(
        tmp_path / 'lstm' / 'part.npz',
        **{k: v if k == 'stamp' else v[:64] for k, v in index.items()},
    )  # as a stop after the first batch leaves it
    np.testing.assert_array_equal(probe.collect(agent, packed, 'part', 'cpu').features, whole)
    assert path.stat().st_mtime_ns > stamp
    (tmp_path / 'lstm' / 'part.npz').write_bytes(b'PK\x03\x04 cut')
    np.testing.assert_array_equal(probe.collect(agent, packed, 'part', 'cpu').features, whole)


def test_thinking_changes_nothing_without_a_state(agents):
    packed = generate(20, 1, seed=9, max_moves=12)[0]
    ff, lstm = (probe.load_agent(str(agents / name), 'cpu') for name in ('ff', 'lstm'))
    assert (
        probe.play(ff.model, packed, 'cpu', 3)[0] == probe.play(ff.model, packed, 'cpu')[0]
    ).all()
    assert not torch.equal(
        probe.play(lstm.model, packed, 'cpu', 3)[3][0], probe.play(lstm.model, packed, 'cpu')[3][0]
    )


def obedient(model):
    """Makes an agent go where a wish is: channel k of its carried s, at the cell that k leads to from it, is the logit of k. A change at a
    cell that is not empty floor pulls it left a little."""

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
    agent = probe.load_agent(str(agents / 'glu'), 'cpu')
    packed = generate(60, 1, seed=9, max_moves=12)[0]
    actions, lengths, _, _ = probe.play(agent.model, packed, 'cpu')
    obedient(agent.model)
    actions[:] = UP
    long = lengths > 1
    rows = probe.causal_check(
        agent, packed[long], actions[long], lengths[long], torch.eye(4, 8), 'cpu'
    )
    assert rows[0]['games'] > 40 and len(rows) == 15
    for r in rows:
        if r['added'] == 'probe':
            assert r['follows'] == 1.0
        elif r['added'] == 'random direction':
            assert 0 < r['follows'] < 0.8
        else:
            assert r['follows'] == r['changes'] == 0.0


@pytest.mark.parametrize(
    'more',
    [
        {'arch': 'convlstm'},
        {'arch': 'convlstm', 'path': 'plain'},
        {'arch': 'convlstm', 'n_expert': 3},
        {'arch': 'convlstm', 'n_expert': 3, 'radius': 1},
        {'arch': 'convlstm', 'n_expert': 3, 'aggregation': 'mean'},
        {'arch': 'convglu'},
        {'arch': 'convglu', 'n_expert': 3, 'radius': 1},
    ],
    ids=str,
)
def test_steering_grows_s_and_all_that_the_next_step_reads(more):
    """s has grown by the vector at the cell and nowhere else, h aggregates to it, and the step that follows feels it."""
    torch.manual_seed(0)
    model = build_agent(AgentConfig(n_layer=2, n_embd=6, head_dim=8, **more)).eval()
    obs = torch.from_numpy(probe.replay(corridor(), np.zeros((1, 1), np.int8))[:, 0])
    start, w = torch.zeros(1, dtype=torch.bool), model.prepare()
    with torch.no_grad():
        _, _, state = probe.act(model, w, obs, start, model.init_state(1))
        state = tuple(x.detach() for x in state)
        vector = torch.randn(1, 6)
        steered = probe.steer(model, state, torch.tensor([43]), vector)
        grown = probe.aggregated(model, steered) - probe.aggregated(model, state)
        torch.testing.assert_close(grown[:, 43], vector)
        assert grown.count_nonzero() == 6 and len(steered) == len(state)
        if more['kind'] == 'convlstm':  # s is A(h) still; c is what it was
            torch.testing.assert_close(model.aggregate(1, steered[1], None, None), steered[0])
            assert all(torch.equal(a, b) for a, b in zip(steered[2:], state[2:], strict=True))
            assert (steered[1] - state[1])[0, 4, 3].abs().amin(1).gt(0).all()  # every expert's h
        _, plain, _ = probe.act(model, w, obs, start, state)
        _, after, _ = probe.act(model, w, obs, start, steered)
        assert (after - plain)[0, 4, 3].abs().max() > 1e-3
        far = probe.steer(model, state, torch.tensor([43]), 1e6 * vector)
        change = (probe.heard(model, far) - probe.heard(model, state))[0, 43]
        if more['kind'] == 'convglu':  # the norm bounds it
            assert change.square().mean().sqrt() < 2.01
        else:
            assert change.square().mean().sqrt() > 1e5


def test_levels_that_all_solve(agents, tmp_path):
    """One agent goes right and one down; some levels are solved as they are, by any move."""
    configure(vars(probe), [f'--out_dir={tmp_path}'], quiet=True)
    right, down = (probe.load_agent(str(agents / name), 'cpu') for name in ('glu', 'ff'))
    down.model.logits.bias.data[DOWN] = 200.0
    rooms = [corridor(row)[0] for row in range(4)]
    home, below = (np.zeros((1, 64), bool) for _ in range(2))
    home[0, 0], below[0, 35] = (
        True,
        True,
    )  # (1, 1); (5, 4), under an agent at (4, 4), which may push it on to (7, 4)
    solved, pushed = (
        pack(~(home | True), home, home, np.array([27])),
        pack(~(home | True), np.roll(below, 16), below, np.array([27])),
    )
    packed = np.concatenate([np.stack(rooms), np.repeat(solved, 3, 0), np.repeat(pushed, 2, 0)])
    assert probe.collect(right, packed, 'test', 'cpu').solved.tolist() == [True] * 7 + [False] * 2
    assert probe.collect(down, packed, 'test', 'cpu').solved.tolist() == [False] * 4 + [True] * 5
    assert (
        probe.solved_by_all([right, down], packed, 'cpu').tolist()
        == [False] * 4 + [True] * 3 + [False] * 2
    )


def test_the_whole_command(agents, tmp_path):
    out = tmp_path / 'out'
    done = command(agents, out, '--causal', '--thinking', '--shown=(0,1)')
    assert done.returncode == 0, done.stdout + done.stderr
    assert {
        'recall.png',
        'recall.svg',
        'probes.csv',
        'probes.json',
        'plans.png',
        'plan_lstm.gif',
        'plan_ff.gif',
    } <= set(os.listdir(out))
    report = json.loads((out / 'probes.json').read_text())
    assert (
        [m['name'] for m in report['models']] == ['lstm', 'ff']
        and 'causal' in report['models'][0]
        and 'causal' not in report['models'][1]
    )
    ff = [r['solve_rate'] for r in report['models'][1]['thinking']]
    assert len(set(ff)) == 1 and ff[0] >= 8 / 30 and 8 <= report['levels'] < 30
    assert set(report['models'][0]['probes']) == set(probe.PROBES) and {
        r['added'] for r in report['models'][0]['causal']
    } == {'probe', 'random direction', 'other cell'}
    with open(out / 'probes.csv') as file:
        rows = list(csv.DictReader(file))
    assert (
        {r['model'] for r in rows} == {'lstm', 'ff'}
        and {r['probe'] for r in rows} == set(probe.PROBES)
        and {r['seed'] for r in rows} == {'0', '1'}
    )
    assert {r['games'] for r in rows if r['step'] == '0'} == {
        str(report['levels'])
    }  # the others' games are not scored
    assert '>before training<' in (out / 'recall.svg').read_text()
    assert (
        '30 generated levels' in done.stdout
        and 'the first 12 of 30 generated levels' in done.stdout
    )


def test_a_pattern_is_the_agent_that_solves_most(agents, capsys):
    folders = probe.folders_of(str(agents / '*'))
    assert [os.path.basename(f) for f in folders] == [
        'ff',
        'glu',
        'lstm',
    ]  # not the file beside them
    loaded, rooms = (
        [probe.load_agent(folder, 'cpu') for folder in folders],
        np.concatenate([corridor(row) for row in range(8)]),
    )
    for k in (0, 2):
        loaded[k].model.logits.bias.data[LEFT] = 200.0  # away from the box
    assert (
        probe.best_agent(loaded, rooms, 'cpu') is loaded[1]
        and capsys.readouterr().out.count('solves 0.0%') == 2
    )
    assert probe.best_agent(loaded[:1], rooms, 'cpu') is loaded[0]


def test_models_as_words():
    assert gathered(['a.py', '--models', 'x y', 'z*', '--causal'], 'models') == [
        'a.py',
        '--models=x y,z*',
        '--causal',
    ] and gathered(['--models=x'], 'models') == ['--models=x']
    assert gathered(['--models', 'x', 'config/b.py', '--level=1'], 'models') == [
        '--models=x',
        'config/b.py',
        '--level=1',
    ] and gathered(['--models', 'x'], 'models') == ['--models=x']


@pytest.mark.parametrize(
    'argv, message',
    [
        (['--source=h'], "source = 'h'"),
        (['--source=cells'], "source = 'cells'"),
        (['--source=z', '--causal'], "not 'z'"),
        (['--target=exit'], "target = 'exit'"),
        (['--models='], 'models is empty'),
        (['--models=nowhere'], 'nowhere'),
        (['--models', 'nowhere', 'else', '--thinking'], 'nowhere'),
        (['--models', '--causal'], 'models is empty'),
        (['--models=no_*'], 'no folder is named no_*'),
        (['--n_train=0'], 'n_train = 0'),
        (['--precision=1.5'], 'precision = 1.5'),
        (['--min_levels=31'], 'min_levels = 31'),
        (['--test_levels=nonsense'], 'data/boxoban'),
        (['--level=30'], 'level'),
        (['--shown=()'], 'shown'),
    ],
)
def test_mistakes_are_one_line(agents, tmp_path, monkeypatch, capsys, argv, message):
    monkeypatch.chdir(tmp_path)  # where no levels are
    monkeypatch.setattr(
        sys, 'argv', ['probe_sokoban.py', *arguments(agents, tmp_path / 'out', *argv)]
    )
    with pytest.raises(SystemExit) as stop:
        probe.main()
    err = capsys.readouterr().err
    assert stop.value.code == 2 and message in err and err.count('\n') == 1, err

"""train_sokoban.py as a user starts it: the update against brute force, resume, ranks, evaluation,
mistakes, configs."""

import importlib.util
import itertools
import json
import math
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from test_train import finished, launch, mistake, play_recipe, read_log, same

import convlstm
import play_sokoban
import sokoban
import train_sokoban
from checkpoint import load_checkpoint, save_checkpoint
from configurator import configure

ROOT = Path(__file__).resolve().parent.parent
TINY = """split=generated eval_split=generated n_levels=50 n_boxes=1 max_moves=6 n_envs=4 unroll=3
    n_layer=2 n_embd=4 head_dim=8 total_steps=96 eval_interval=4 eval_games=6 log_interval=2
    compile=False dtype=float32 device=cpu threads=1 learning_rate=1e-2"""
TINY = dict(pair.split('=') for pair in TINY.split())
GLU, long = {'arch': 'convglu'}, pytest.mark.long
MADE, generate = {}, sokoban.generate


def arguments(out, *configs, **settings):
    return [*configs, *(f'--{k}={v}' for k, v in {**TINY, 'out_dir': out, **settings}.items())]


def configured(out, *configs, **settings):
    return configure(vars(train_sokoban), arguments(out, *configs, **settings), quiet=True)


def prepare(out, **settings):
    """The settings in place, and a run that has not begun."""
    return train_sokoban.make_run(configured(out, **settings))


def run(out, *configs, **settings):
    """A whole run in this process: the exit status."""
    return train_sokoban.train(configured(out, *configs, **settings))


def start(out, *, ranks=1, **settings):
    return launch('train_sokoban.py', arguments(out, **settings), ranks)


def refused(capfd, out, message, **settings):
    error = mistake(capfd, train_sokoban, arguments(out, **settings))
    assert message in error, error


def checkpoint(out):
    return load_checkpoint(Path(out) / 'ckpt_last.pt')


def stop_after_three(monkeypatch, out, **settings):
    """A run that is told to stop in its third update, and saves."""
    update, count = train_sokoban.update, itertools.count()
    with monkeypatch.context() as patch:
        patch.setattr(train_sokoban, 'update', lambda run, _: update(run, next(count) == 2))
        assert run(out, **settings) == 143 and checkpoint(out)['step'] == 3


@pytest.fixture(autouse=True)
def levels_are_generated_once(monkeypatch):
    """Most runs here play the same ones, and take a third of their time to make them."""

    def once(*args, **more):
        key = pickle.dumps((args, more))
        if key not in MADE:
            MADE[key] = generate(*args, **more)
        return MADE[key][0].copy(), MADE[key][1]

    monkeypatch.setattr(sokoban, 'generate', once)


# ---- the update ----


def test_gae_is_the_sum(tmp_path):
    """Equation 16 of Schulman et al. as a double sum, with ends inside the unroll and at both
    borders of it."""
    configured(tmp_path, gamma=0.9, gae_lambda=0.8)
    g, T, B = torch.Generator().manual_seed(0), 7, 5
    reward, value = torch.randn(2, T, B, generator=g, dtype=torch.float64)
    last = torch.randn(B, generator=g, dtype=torch.float64)
    done = torch.rand(T, B, generator=g) < 0.3
    done[0, 0] = done[-1, 1] = done[2, 2] = done[3, 2] = True
    done[:, 4] = False
    ours, after = train_sokoban.gae(reward, done, value, last), torch.cat([value[1:], last[None]])
    for t, b in itertools.product(range(T), range(B)):
        total, factor = 0.0, 1.0
        for k in range(t, T):
            goes_on = 0.0 if done[k, b] else 1.0
            total += factor * (reward[k, b] + 0.9 * goes_on * after[k, b] - value[k, b])
            factor *= 0.9 * 0.8 * goes_on
        assert abs(ours[t, b] - total) < 1e-12


def test_sampling_follows_the_policy():
    """Frequencies of many draws, by inversion, and independence of consecutive ones; the ends of
    [0, 1); a policy of NaN gives an action."""
    logits, board = torch.tensor([[0.0, 1.0, -1.0, 0.5]]).expand(200, 4), torch.arange(200)
    keys = sokoban.board_keys(7, 1, board)
    chance = [sokoban.draw_by(keys, torch.tensor(t)) for t in range(500)]
    actions = torch.stack([train_sokoban.sample(logits, u) for u in chance])
    p, n = F.softmax(logits[0], -1), actions.numel()
    counts = torch.bincount(actions.flatten(), minlength=4)
    assert ((counts / n - p).abs() < 4 * (p * (1 - p) / n).sqrt()).all()
    pairs = torch.bincount((actions[1:] * 4 + actions[:-1]).flatten(), minlength=16).view(4, 4)
    assert (pairs / actions[1:].numel() - p[:, None] * p).abs().max() < 0.005
    one_sided = torch.tensor([[50.0, 0, 0, 0], [0, 0, 0, 50.0]])
    for u in (2**52, 2**53 - 1):
        assert train_sokoban.sample(one_sided, torch.full((2,), u)).tolist() == [0, 3]
    nan = train_sokoban.sample(torch.full((2, 4), math.nan), torch.tensor([0, 2**52]))
    assert nan.tolist() in ([0, 0], [3, 3])


LOSSES = [{}, {'reuse': False}, {'recurrent': False}, GLU, {**GLU, 'reuse': False}]


@pytest.mark.parametrize('settings', LOSSES, ids=str)
def test_gradient_is_the_losses(tmp_path, settings):
    """backward() against the loss written out term by term, with the network run again from the
    rollout's own observations, the one after the last included. Two rollouts of 5 steps and 6
    boards; in both an episode ends inside (board 0), one by the last step (board 1: the next
    rollout starts anew, and there is no value to come) and one by the first (board 2)."""
    loss = {'gamma': 0.9, 'gae_lambda': 0.8, 'value_coef': 0.7, 'entropy_coef': 0.3}
    run = prepare(tmp_path, unroll=5, n_envs=6, **loss, **settings)
    with torch.no_grad():  # a policy and a memory with some opinion
        run.model.logits.weight.mul_(100)
        for p in run.model.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    params = [p for p in run.model.parameters() if p.numel()]
    first = torch.ones(6, dtype=torch.bool)
    for _ in range(2):
        run.env.steps[:3] = torch.tensor([120 - 3, 120 - 5, 120 - 1])
        run.optimizer.zero_grad()
        seen, real = [], run.env.observe
        run.env.observe = lambda real=real, seen=seen: seen.append(real()) or seen[-1]
        state = tuple(x.clone() for x in run.state)
        batch = train_sokoban.rollout(run)
        stats = train_sokoban.backward(run, batch)
        run.env.observe = real
        done = batch['done']
        assert done[2, 0] and done[4, 1] and done[0, 2] and not done[:, 3:].any()
        gradients = [p.grad.clone() for p in params]
        run.optimizer.zero_grad()
        starts = torch.cat([first[None], done])
        wanted = written_out_loss(run.model, torch.stack(seen), starts, state, batch)
        wanted[0].backward()
        assert stats[:4].tolist() == pytest.approx([x.item() for x in wanted], rel=1e-4)
        for mine, p in zip(gradients, params, strict=True):
            torch.testing.assert_close(mine, p.grad, rtol=1e-3, atol=1e-5)
        first = done[-1]


def written_out_loss(model, obs, start, state, batch):
    """obs (T+1, B, ...), start (T+1, B) -> loss, policy loss, value loss, entropy, for the settings
    of the test above."""
    logits, value, _ = model(obs, start, state)
    reward, done, action = batch['reward'], batch['done'], batch['action']
    T, B = done.shape
    policy, error, entropy = 0.0, 0.0, 0.0
    for b in range(B):
        advantage = 0.0
        for t in reversed(range(T)):
            now, goes_on = value[t, b].detach(), 0.0 if done[t, b] else 1.0
            delta = reward[t, b] + goes_on * 0.9 * value[t + 1, b].detach() - now
            advantage = delta + goes_on * 0.9 * 0.8 * advantage
            pi = F.softmax(logits[t, b], -1)
            policy = policy - torch.log(pi[action[t, b]]) * advantage / (T * B)
            error = error + (value[t, b] - (now + advantage)) ** 2 / (T * B)
            entropy = entropy - (pi * torch.log(pi)).sum() / (T * B)
    return policy + 0.7 * error - 0.3 * entropy, policy, error, entropy


def test_what_a_gpu_compiles(tmp_path, monkeypatch):
    """Environment and advantages are compiled there, as one graph without breaks, once ahead of the
    first update, which leaves the boards as they were; bit-equal, in the same memory. ('cpu:0'
    stands for a GPU, aot_eager for inductor, which test_gpu.py runs.)"""
    calls, results, kept = [], [], {}

    def compiled(function):
        options = {'fullgraph': True, 'dynamic': False, 'backend': 'aot_eager'}
        kept.setdefault(function, torch.compile(function, **options))
        return lambda *args: calls.append(function.__name__) or kept[function](*args)

    monkeypatch.setattr(convlstm, 'compiled', lambda function: function)
    monkeypatch.setattr(train_sokoban, 'compiled', compiled)
    for where in ('cpu', 'cpu:0'):
        run = prepare(tmp_path, reuse=False, unroll=20, n_envs=16, compile=True)
        run.device, run.model.config.path = where, 'compiled'
        memory = [getattr(run.env, name).data_ptr() for name in run.env.STATE]
        if where == 'cpu:0':
            train_sokoban.warm_up(run)
        results.append([train_sokoban.update(run, False)[1] for _ in range(6)])
        assert memory == [getattr(run.env, name).data_ptr() for name in run.env.STATE]
    same(*results)
    done, solved = torch.stack(results[0])[:, :, 1:].sum((0, 1, 3))
    assert solved > 3 and done - solved > 3, (done, solved)
    assert calls == 7 * [*20 * ['play_step'], 'gae']


# ---- runs ----


def test_log_and_checkpoint(tmp_path, capfd, monkeypatch):
    """Two runs are drawn beside each other; a folder without a run is named."""
    assert run(tmp_path, plot=True) == 0
    log = read_log(tmp_path)
    assert [r['step'] for r in log] == [0, 2, 4, 6, 8] and log[-1]['env_steps'] == 96
    assert [r['step'] for r in log if 'eval_solve_rate' in r] == [0, 4, 8]
    keys = 'episodic_return return_100 return_1000 solve_rate_100 entropy value_loss grad_norm lr'
    assert {*keys.split(), 'explained_variance', 'episodes'} <= log[-1].keys()
    assert 'random_solve_rate' in log[0]
    files = {'config.json', 'ckpt_last.pt', 'ckpt_prev.pt', 'ckpt_best.pt'}
    assert files <= set(os.listdir(tmp_path))
    assert Image.open(tmp_path / 'curve.png').size[0] > 500
    argv = [f'--runs={tmp_path},{tmp_path}', f'--picture={tmp_path}/both.png']
    monkeypatch.setattr(sys, 'argv', ['play_sokoban.py', *argv])
    play_sokoban.main()
    assert Image.open(tmp_path / 'both.png').size[0] > 500
    assert f'{tmp_path}/c' in mistake(capfd, play_sokoban, [f'{argv[0]}/c', argv[1]])


def play_updates(run, n):
    """-> (return, solved) of the games that ended, counted here, and how many each board has."""
    games, running, ended = [], torch.zeros(train_sokoban.n_envs), 0
    for _ in range(n):
        stats, played, _ = train_sokoban.update(run, False)
        train_sokoban.count_games(run, played, stats)
        for reward, done, solved in played:
            running += reward
            games += [(running[b].item(), solved[b].item()) for b in done.nonzero()[:, 0]]
            running *= 1 - done
        ended += played[:, 1].sum(0)
        run.step, run.seconds = run.step + 1, run.seconds + 1.0
    return games, ended


def test_episodes_are_counted(tmp_path):
    """The returns of the log against the environment's own rewards, over updates and log lines."""
    run = prepare(tmp_path, unroll=40)
    before, _ = play_updates(run, 4)
    assert train_sokoban.make_record(run)['episodes'] == len(before)
    run.running.zero_()  # as play_updates begins to count anew
    since, _ = play_updates(run, 4)
    record, games = train_sokoban.make_record(run), before + since
    assert since and record['episodes'] == len(since)
    assert record['episodic_return'] == pytest.approx(np.mean([g[0] for g in since]), abs=1e-4)
    found = [record[f'{key}_1000'] for key in ('return', 'solve_rate')]
    assert found == pytest.approx(np.mean(games, 0).tolist(), abs=1e-4)


def test_returns_are_blank_until_every_board_has_ended_an_episode(tmp_path):
    """The first games to end are the short ones, which are solved: no figure is made of them."""
    run, total = prepare(tmp_path, unroll=40, n_envs=8), torch.zeros(8)
    keys = 'episodic_return return_100 return_1000 solve_rate_100 solve_rate_1000'.split()
    for i in range(3):
        total += play_updates(run, 1)[1]
        record = train_sokoban.make_record(run)
        if i < 2:  # 40 and 80 steps
            assert run.recent and total.min() == 0 and {record[k] for k in keys} == {None}
    assert total.min() >= 1 and None not in {record[k] for k in keys}  # 120, the time limit
    assert 'return n/a' in train_sokoban.dense_line({**record, 'return_100': None})


UNUSUAL = {**GLU, 'n_expert': 2, 'aggregation': 'softmax_l2', 'reuse': False, 'dtype': 'bfloat16'}
JUMANJI = {'env': 'jumanji', 'n_boxes': 4, 'max_moves': 120}
no_jumanji = pytest.mark.skipif(not importlib.util.find_spec('jumanji'), reason='no jumanji here')
RARE = [{'recurrent': False}, {'radius': 1, 'n_expert': 2}]
RESUMED = [{}, UNUSUAL, *(pytest.param(settings, marks=long) for settings in RARE)]
RESUMED += [pytest.param(JUMANJI, marks=[no_jumanji, long])]


@pytest.mark.parametrize('settings', RESUMED, ids=str)
def test_resume_is_bit_equal(tmp_path, settings, monkeypatch):
    """2N updates = N, stop, N: weights, environment, recurrent state, episodes and log."""
    a, b = tmp_path / 'a', tmp_path / 'b'
    run(a, **settings)
    stop_after_three(monkeypatch, b, **settings)
    torch.manual_seed(999)  # whatever the new process starts with
    assert run(b, resume=True, **settings) == 0
    same(checkpoint(a), checkpoint(b))
    same(read_log(a), read_log(b))


@pytest.mark.parametrize('ranks', [2, pytest.param(4, marks=long)])
def test_ranks(tmp_path, ranks):
    """Several ranks play the boards of one: same levels, actions, updates. And a run may go on with
    another number of ranks."""
    settings = {'total_steps': 12 * 30, 'eval_interval': 30, 'learning_rate': 1e-3}
    run(tmp_path / 'one', **settings)
    finished(start(tmp_path / 'more', ranks=ranks, **settings))
    for a, b in zip(read_log(tmp_path / 'one'), read_log(tmp_path / 'more'), strict=True):
        a, b = ({k: x for k, x in r.items() if x is not None} for r in (a, b))
        assert a == pytest.approx(b, rel=1e-3, abs=1e-3)
    one, more = (checkpoint(tmp_path / name) for name in ('one', 'more'))
    same(one['env'], more['env'])
    for part in ('state', 'model'):
        torch.testing.assert_close(one[part], more[part], rtol=1e-2, atol=1e-3)
    assert run(tmp_path / 'more', resume=True, **{**settings, 'total_steps': 12 * 32}) == 0


def test_resume_with_other_intervals(tmp_path, monkeypatch):
    """The stop's own step gets its line where the new intervals want one; no step has two."""
    stop_after_three(monkeypatch, tmp_path)
    assert run(tmp_path, resume=True, log_interval=3, eval_interval=3, total_steps=90) == 0
    steps = [(r['step'], 'eval_return' in r) for r in read_log(tmp_path)]
    assert steps == [(0, True), (2, False), (3, True), (6, True), (8, True)]


def test_init_from(tmp_path):
    """A deeper agent begins with the weights that fit; the two levels that are there, the rest."""
    run(tmp_path / 'a', total_steps=24)
    saved = load_checkpoint(tmp_path / 'a' / 'ckpt_best.pt')['model']
    new = prepare(tmp_path / 'b', init_from=tmp_path / 'a', n_layer=3)
    same({name: x for name, x in new.model.state_dict().items() if name in saved}, saved)
    assert new.step == 0 and not new.optimizer.state


@pytest.mark.parametrize('name', ['tensorboard', 'wandb'])
def test_trackers(tmp_path, monkeypatch, name):
    """They get the log's numbers; wandb (offline) also the settings, in that project."""
    pytest.importorskip(name)
    monkeypatch.setenv('WANDB_MODE', 'offline')
    finished(start(tmp_path, wandb_project='mine', **{name: True}))
    wanted = [r['entropy'] for r in read_log(tmp_path) if 'entropy' in r]
    if name == 'tensorboard':
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(tmp_path)).Reload().Scalars('entropy')
        assert [event.value for event in events] == pytest.approx(wanted)
    else:
        (file,) = tmp_path.glob('wandb/offline-run-*/run-*.wandb')
        said = file.read_bytes()
        assert all(str(x).encode() in said for x in [*wanted, 'mine', 'adam_eps'])
    assert len(wanted) > 2


def test_not_finite(tmp_path, capsys):
    """A loss that is not finite ends the run with status 1; the last good checkpoint stays."""
    assert run(tmp_path, total_steps=48) == 0
    saved = (tmp_path / 'ckpt_last.pt').read_bytes()
    assert run(tmp_path, total_steps=9600, resume=True, learning_rate=1e38) == 1
    said = (
        f'not finite: stopped, nothing saved of it; the last checkpoint is {tmp_path}/ckpt_last.pt'
    )
    assert said in capsys.readouterr().out
    assert (tmp_path / 'ckpt_last.pt').read_bytes() == saved


# ---- another algorithm ----


@pytest.fixture
def ppo(tmp_path, monkeypatch):
    """train_sokoban.py with tests/hacks/ppo.patch, as a module; -> settings(out, ...) too."""
    patch = ROOT / 'tests' / 'hacks' / 'ppo.patch'
    heads = ('+++', '---')
    lines = [
        x for x in patch.read_text().splitlines() if x[:1] in ('+', '-') and x[:3] not in heads
    ]
    assert len(lines) <= 60
    shutil.copy(ROOT / 'train_sokoban.py', tmp_path)
    subprocess.run(['git', 'apply', str(patch)], cwd=tmp_path, check=True)
    spec = importlib.util.spec_from_file_location('ppo', tmp_path / 'train_sokoban.py')
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, 'ppo', module)
    spec.loader.exec_module(module)
    return module


def test_ppos_gradient_is_the_losses(tmp_path, ppo):
    """Of half of the boards, after the policy has moved away from the rollout's: the clipped
    surrogate of Schulman et al. 2017, equation 7, and advantages of the rollout's own values."""
    argv = arguments(tmp_path, unroll=5, n_envs=6, gamma=0.9, gae_lambda=0.8, clip=0.1)
    run = ppo.make_run(configure(vars(ppo), argv, quiet=True))
    noise = torch.Generator().manual_seed(0)

    def move(size):
        with torch.no_grad():
            for p in run.model.parameters():
                p.add_(size * torch.randn(p.shape, generator=noise))

    move(0.3)
    for _ in range(2):  # the second begins with a state
        ppo.update(run, False)
    run.env.steps[:2] = torch.tensor([120 - 3, 120 - 5])
    batch, boards, T = ppo.rollout(run), torch.tensor([0, 1, 4]), 5
    move(0.1)
    run.optimizer.zero_grad()
    stats = ppo.backward(run, batch, boards)
    params = [p for p in run.model.parameters() if p.numel()]
    gradients = [p.grad.clone() for p in params]
    logits, value, _ = run.model(batch['obs'], batch['start'], tuple(run.state))
    policy, error, entropy, clipped = 0.0, 0.0, 0.0, 0
    for b in boards.tolist():
        advantage, following = 0.0, batch['last'][b]
        for t in reversed(range(T)):
            goes_on, old = 0.0 if batch['done'][t, b] else 1.0, batch['value'][t, b]
            delta = batch['reward'][t, b] + goes_on * 0.9 * following - old
            advantage, following = delta + goes_on * 0.9 * 0.8 * advantage, old
            action, pi = batch['action'][t, b], F.softmax(logits[t, b], -1)
            ratio = pi[action] / F.softmax(batch['logits'][t, b], -1)[action]
            bound = 1.1 if advantage > 0 else 0.9
            beyond = ratio > bound if advantage > 0 else ratio < bound
            clipped += int(beyond)
            policy = policy - (bound if beyond else ratio) * advantage / (3 * T)
            error = error + (value[t, b] - old - advantage) ** 2 / (3 * T)
            entropy = entropy - (pi * pi.log()).sum() / (3 * T)
    run.optimizer.zero_grad()
    (policy + error - 0.01 * entropy).backward()
    wanted = [policy + error - 0.01 * entropy, policy, error, entropy]
    assert stats[:4].tolist() == pytest.approx([x.item() for x in wanted], rel=1e-4)
    assert 1 < clipped < 3 * T - 1
    for mine, p in zip(gradients, params, strict=True):
        torch.testing.assert_close(mine, p.grad, rtol=1e-3, atol=1e-5)


def test_ppo_resumes(tmp_path, ppo, monkeypatch):
    """Bit-equal to a run that was never stopped; many updates a rollout move the weights."""

    def train(out, **more):
        return ppo.train(configure(vars(ppo), arguments(out, **more), quiet=True))

    a, b, update, count = tmp_path / 'a', tmp_path / 'b', ppo.update, itertools.count()
    assert train(a) == 0
    with monkeypatch.context() as patch:
        patch.setattr(ppo, 'update', lambda run, _: update(run, next(count) == 2))
        assert train(b) == 143
    torch.manual_seed(999)
    assert train(b, resume=True) == 0
    same(checkpoint(a), checkpoint(b))
    assert checkpoint(a)['optimizers'][0]['state'][0]['step'] == 8 * 3 * 4


# ---- evaluation ----


class Scripted:
    """Plays given actions: level i's action at step t is actions[i][t]; then 0."""

    def __init__(self, actions):
        self.actions, self.prepare = actions, lambda: None

    def init_state(self, N):
        self.script = itertools.zip_longest(*self.actions, [0] * 120, fillvalue=0)
        return ()

    def act(self, w, obs, start, state):
        wanted = [int(action) for action in next(self.script)[:-1]]
        return F.one_hot(torch.tensor(wanted), 4).float(), None, ()


def test_evaluation_counts_what_is_played(tmp_path):
    """The generator's own solutions solve their levels, in their own number of steps; a policy that
    never moves solves nothing. A report shows the longest solution and the first failure."""
    levels, solutions = sokoban.generate(40, 2, seed=3)
    script = [s if i % 2 else [] for i, s in enumerate(solutions)]
    result, lengths = play_sokoban.play(Scripted(script), levels, 'cpu'), [len(s) for s in script]
    assert result['solved'].tolist() == [n > 0 for n in lengths]
    assert result['steps'].tolist() == [n or 120 for n in lengths]
    returns = [12 - 0.1 * n for n in lengths if n]
    assert result['return'][1::2].tolist() == pytest.approx(returns, abs=1e-3)
    record = play_sokoban.report(Scripted(script), levels, 'x', 'cpu', tmp_path, {})
    assert record['solved_level'] == np.argmax(lengths) and record['failed_level'] == 0
    assert record['solve_rate'] == 0.5
    image = Image.open(tmp_path / 'eval_x_solved.gif')
    assert image.n_frames == max(lengths) + 1 and image.size == (240, 240)


def test_play_does_not_depend_on_batches(tmp_path, monkeypatch):
    model, levels = prepare(tmp_path).model, sokoban.generate(11, 1, seed=3)[0]
    results = []
    for boards in (256, 4):
        monkeypatch.setattr(play_sokoban, 'BOARDS', boards)
        returns = play_sokoban.play(model, levels, 'cpu')['return']
        results.append([returns, play_sokoban.play(model, levels, 'cpu', seed=5)['actions']])
    torch.testing.assert_close(*results)
    assert len(results[0][1]) == 11


def test_eval_only(tmp_path, capfd, monkeypatch):
    """JSON and GIFs of a file of levels; the run's own files stay as they are. A split that is not
    there is not replaced by generated levels."""
    run(tmp_path, recurrent=False)
    files = {f: (tmp_path / f).read_bytes() for f in os.listdir(tmp_path)}
    np.save(tmp_path / 'mine.npy', sokoban.generate(5, 1, seed=11, max_moves=6)[0])
    settings = {'recurrent': False, 'eval_only': True}
    assert run(tmp_path, levels=tmp_path / 'mine.npy', **settings) == 0
    report = json.loads((tmp_path / 'eval_mine.json').read_text())
    assert report['n'] == 5 and report['env_steps'] == 96 and 1 <= report['mean_steps'] <= 120
    assert json.loads(capfd.readouterr().out.splitlines()[-1]) == report
    assert files == {f: (tmp_path / f).read_bytes() for f in files}
    more = {**settings, 'eval_split': tmp_path / 'mine.npy', 'eval_games': 3}
    assert run(tmp_path, best=True, **more) == 0
    report = json.loads((tmp_path / 'eval_mine.json').read_text())
    assert report['n'] == 3 and report['checkpoint'].endswith('ckpt_best.pt')
    assert f'evaluation: the first 3 of 5 levels of {tmp_path}/mine.npy' in capfd.readouterr().out
    monkeypatch.chdir(tmp_path)
    words = 'data/boxoban: no such folder: `python sokoban.py --split=hard --download=True` fetches'
    refused(capfd, tmp_path, words, levels='hard', **settings)
    assert not list(tmp_path.glob('eval_hard*'))


# ---- mistakes ----

FETCH = 'sokoban.py --split=unfiltered-valid --download=True --levels_dir=/nonexistent`'
WRONG = """n_envs=0 gamma=1.5 unroll=0 env=gym arch=lstm radius=3 n_boxes=9 max_moves=1 device=tpu
    threads=100000 n_layer=100000000 learning_rate=-1.0 eval_games=0 path=compiled seed=-1"""
MISTAKES = [(word, word.partition('=')[0] + ' = ') for word in WRONG.split()]
MISTAKES += [
    ('levels_dir=/nonexistent split=unfiltered-train', '/nonexistent'),
    ('split=no/such.npy', 'no/such.npy'),
    ('resume=True', 'out: holds no trained run'),
    ('eval_only=True', 'out: holds no trained run'),
    ('n_envs=1000000000', 'n_envs = 1000000000'),
    ('n_levels=1000000000000', 'n_levels = 1,000,000,000,000: needs more than'),
    ('eval_split=unfiltered-valid levels_dir=/nonexistent', FETCH),
    ('levels=generated', 'levels and best are settings of --eval_only'),
    ('n_env=3', 'n_envs'),
]


@pytest.mark.parametrize('words, message', MISTAKES)
def test_mistakes(tmp_path, words, message, capfd):
    """Nothing is left behind."""
    refused(capfd, tmp_path / 'out', message, **dict(word.split('=') for word in words.split()))
    assert not (tmp_path / 'out').exists()


def test_resume_refuses_another_run(tmp_path, capfd):
    np.save(tmp_path / 'x.npy', sokoban.generate(50, 1)[0])
    out, more = tmp_path / 'b', {'split': tmp_path / 'x.npy', 'total_steps': 24}
    run(out, **more)
    for settings, message in (
        ({'resume': True, 'n_levels': 60}, 'n_levels'),
        ({}, 'holds a run already'),
        ({'eval_only': True, 'arch': 'convglu'}, 'arch'),
        ({'resume': True, 'init_from': out}, '--init_from begins a new run'),
    ):
        refused(capfd, out, message, **more, **settings)
    np.save(tmp_path / 'x.npy', sokoban.generate(50, 1, seed=1)[0])
    refused(capfd, out, 'other levels', resume=True, **more)


BOARDS = 'env, start, state, count or running does not fit'
DAMAGES = [  # a part of a checkpoint, what becomes of it, what is said
    ('model', lambda m: {**m, 'query': m['query'][:1]}, 'size mismatch for query'),
    ('clock', lambda n: None, 'clock = '),
    ('env', lambda e: {**e, 'agent': e['agent'][:1]}, BOARDS),
    ('state', lambda s: s[:-1], BOARDS),
    ('running', lambda x: x[:1], BOARDS),
    ('recent', lambda x: 5, 'recent = '),
]


def test_a_damaged_checkpoint_is_one_line(tmp_path, capfd):
    """Whole files whose parts do not fit: refused by file and part; evaluated too, where it is the
    weights."""
    run(tmp_path, total_steps=24)
    good = checkpoint(tmp_path)
    for key, change, message in DAMAGES:
        save_checkpoint(good | {key: change(good[key])}, tmp_path / 'ckpt_last.pt')
        refused(capfd, tmp_path, message, resume=True)
        if key == 'model':
            refused(capfd, tmp_path, f'{tmp_path}/ckpt_last.pt: {key}', eval_only=True)


def test_no_held_out_level_is_trained_on(tmp_path, monkeypatch):
    """With a generator that makes the same levels for every seed: evaluated are others than those
    trained on, in --eval_only as in training."""

    def always_7(n, boxes, seed, *rest):
        return generate(n, boxes, 7, *rest)

    monkeypatch.setattr(sokoban, 'generate', always_7)
    held_out = []
    for settings in ({}, {'eval_only': True}):
        configured(tmp_path, **settings)
        held_out.append(train_sokoban.read_levels(0, 1)[1][0])
    trained = generate(50, 1, 7, 6)[0]
    assert np.array_equal(*held_out) and not set(map(bytes, trained)) & set(map(bytes, held_out[0]))


# ---- what users copy ----

CONFIGS = sorted(path.name for path in (ROOT / 'config').glob('sokoban_*'))


@pytest.mark.parametrize('config', CONFIGS)
def test_config_files(tmp_path, config, request):
    """Every config file makes an agent, narrower; with --long all run two updates."""
    argv = arguments(tmp_path, str(ROOT / 'config' / config), n_embd=1, total_steps=24, plot=False)
    argv.remove('--n_layer=2')
    settings = configure(vars(train_sokoban), argv, quiet=True)
    if request.config.getoption('--long'):
        assert train_sokoban.train(settings) == 0
    else:
        train_sokoban.make_run(settings)


def test_demo_recipe(tmp_path):
    """`make demo-sokoban`'s own commands, shrunk."""
    small = '--n_envs=4 --n_levels=100 --eval_games=8 --compile=False --threads=1'
    small += f' --out_dir={tmp_path}/out'
    play_recipe('demo-sokoban', f'{small} --total_steps=160', small)
    assert (tmp_path / 'out' / 'curve.png').stat().st_size > 5000
    assert list((tmp_path / 'out').glob('eval_*.gif'))

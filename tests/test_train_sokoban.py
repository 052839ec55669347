"""train_sokoban.py as a user starts it: an update written out, resume, ranks, evaluation."""

import functools
import importlib
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
from test_train import ROOT, finished, launch, mistake, read_log, same

import kernels
import sokoban
import train_sokoban
from common import load_checkpoint, save_checkpoint
from configurator import configure

TINY = """split=generated eval_split=generated n_levels=50 n_boxes=1 max_moves=6 n_envs=4 unroll=3
    n_layer=2 n_embd=4 head_dim=8 total_steps=96 eval_interval=4 eval_games=6 log_interval=2
    compile=False dtype=float32 device=cpu threads=1 learning_rate=1e-2"""
TINY = dict(pair.split('=') for pair in TINY.split())
GLU, long = {'arch': 'convglu'}, pytest.mark.long
REAL = sokoban.generate


def arguments(out, **settings):
    return [f'--{k}={v}' for k, v in {**TINY, 'out_dir': out, **settings}.items()]


def configured(out, script=train_sokoban, **settings):
    return configure(vars(script), arguments(out, **settings), quiet=True)


def prepare(out, script=train_sokoban, **settings):
    """The settings in place, and a run that has not begun."""
    return script.make_run(configured(out, script, **settings))


def run(out, script=train_sokoban, **settings):
    """A whole run in this process: the exit status."""
    return script.train(configured(out, script, **settings))


def refused(capfd, out, message, **settings):
    error = mistake(capfd, train_sokoban, arguments(out, **settings))
    assert message in error, error


def checkpoint(out):
    return load_checkpoint(Path(out) / 'ckpt_last.pt')


generated = functools.cache(lambda key: REAL(*pickle.loads(key)))


@pytest.fixture(autouse=True)
def levels_are_generated_once(monkeypatch):
    """Most runs here play the same ones, and take a third of their time to make them."""
    monkeypatch.setattr(sokoban, 'generate', lambda *args: generated(pickle.dumps(args)))


# ---- the update ----


def test_sampling_follows_the_policy():
    """Frequencies of pairs of consecutive draws, by inversion; the ends of [0, 1)."""
    logits = torch.tensor([[0.0, 1.0, -1.0, 0.5]])
    keys = sokoban.board_keys(7, 1, torch.arange(200))
    draws = sokoban.random_bits(keys, torch.arange(500)[:, None])
    actions = torch.stack([sokoban.sample_actions(logits.expand(200, 4), u) for u in draws])
    p = F.softmax(logits[0], -1)
    pairs = torch.bincount((actions[1:] * 4 + actions[:-1]).flatten(), minlength=16).view(4, 4)
    assert (pairs / actions[1:].numel() - p[:, None] * p).abs().max() < 0.005
    one_sided = torch.tensor([[50.0, 0, 0, 0], [0, 0, 0, 50.0]])
    for u in (2**52, 2**53 - 1):
        assert sokoban.sample_actions(one_sided, torch.full((2,), u)).tolist() == [0, 3]


LOSS = {'gamma': 0.9, 'gae_lambda': 0.8, 'value_coef': 0.7, 'entropy_coef': 0.3}
LOSS |= {'unroll': 5, 'n_envs': 6}


def written_out(new, old, batch, clip=math.inf):
    """The loss by LOSS: new and old logits and values, (T, B) or one more, old values (T + 1, B)
    -> loss, policy loss, value loss, entropy; how often a ratio is clipped. Without clip A2C's."""
    goes_on, T, before = 1.0 - batch['done'].float(), len(batch['done']), old[1].detach()
    advantage = torch.zeros(T + 1, *before[0].shape)
    for t in reversed(range(T)):
        delta = batch['reward'][t] + goes_on[t] * 0.9 * before[t + 1] - before[t]
        advantage[t] = delta + goes_on[t] * 0.9 * 0.8 * advantage[t + 1]
    advantage, pi, pi_old = advantage[:T], F.softmax(new[0][:T], -1), F.softmax(old[0][:T], -1)
    p, p_old = (x.gather(-1, batch['action'][..., None]).squeeze(-1) for x in (pi, pi_old.detach()))
    beyond = torch.where(advantage > 0, p / p_old > 1 + clip, p / p_old < 1 - clip)
    bound = torch.where(advantage > 0, 1 + clip, 1 - clip)
    gain = torch.where(beyond, bound, p / p_old) if clip < math.inf else p.log()
    policy, entropy = -(gain * advantage).mean(), -(pi * pi.log()).sum(-1).mean()
    error = (new[1][:T] - before[:T] - advantage).square().mean()
    return [policy + 0.7 * error - 0.3 * entropy, policy, error, entropy], int(beyond.sum())


def move(model, size, seed=0):
    noise = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.data.add_(size * torch.randn(p.shape, generator=noise))


def compare(run, stats, wanted):
    """backward()'s statistics and gradients with those of a loss written out."""
    params = [p for p in run.model.parameters() if p.numel()]
    gradients = [p.grad.clone() for p in params]
    run.optimizer.zero_grad()
    wanted[0].backward()
    assert stats[:4].tolist() == pytest.approx([x.item() for x in wanted], rel=1e-4)
    for mine, p in zip(gradients, params, strict=True):
        torch.testing.assert_close(mine, p.grad, rtol=1e-3, atol=1e-5)


LOSSES = [{}, {'reuse': False}, {'recurrent': False}, GLU, {**GLU, 'reuse': False}]


@pytest.mark.parametrize('settings', LOSSES, ids=str)
def test_gradient_is_the_losses(tmp_path, settings):
    """With the network run again from the rollout's own observations, the one after the last
    included. Two rollouts of 5 steps and 6 boards; in both an episode ends inside (board 0), one by
    the last step (board 1: the next rollout starts anew, and there is no value to come) and one by
    the first (board 2)."""
    run = prepare(tmp_path, **LOSS, **settings)
    run.model.logits.weight.data.mul_(100)  # a policy and a memory with some opinion
    move(run.model, 0.3)
    for again in (False, True):
        late, steps = torch.tensor([120 - 3, 120 - 5, 120 - 1]), run.env.steps[:3]
        steps.copy_(torch.where(steps == 0, 0, late) if again else late)
        first = run.env.steps == 0
        assert first.any()
        run.optimizer.zero_grad()
        seen, real = [], run.env.observe
        run.env.observe = lambda real=real, seen=seen: seen.append(real()) or seen[-1]
        state = tuple(x.clone() for x in run.state)
        batch = train_sokoban.rollout(run)
        stats = train_sokoban.backward(run, batch)
        run.env.observe = real
        starts = torch.cat([first[None], batch['done']])
        logits, value, _ = run.model(torch.stack(seen), starts, state)
        compare(run, stats, written_out((logits, value), (logits, value), batch)[0])
        assert batch['done'][2, 0] and batch['done'][0, 2] and batch['done'][4, 1] != again


@pytest.fixture
def ppo(tmp_path, monkeypatch):
    """train_sokoban.py with tests/hacks/ppo.patch."""
    patch = ROOT / 'tests' / 'hacks' / 'ppo.patch'
    assert sum(line[:1] in ('+', '-') for line in patch.read_text().splitlines()) <= 2 + 60
    shutil.copy(ROOT / 'train_sokoban.py', tmp_path)
    subprocess.run(['git', 'apply', str(patch)], cwd=tmp_path, check=True)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, 'train_sokoban')
    return importlib.import_module('train_sokoban')


def test_ppos_gradient_is_the_losses(tmp_path, ppo):
    """On half of the boards, once the policy has moved away from the rollout's: the clipped
    surrogate of Schulman et al. 2017, equation 7."""
    run = prepare(tmp_path, ppo, clip=0.1, **LOSS)
    move(run.model, 0.3)
    for _ in range(2):  # the second begins with a state
        ppo.update(run, False)
    assert run.optimizer.state_dict()['state'][0]['step'] == 2 * 3 * 3  # rollouts, epochs, parts
    run.env.steps[:2] = torch.tensor([120 - 3, 120 - 5])
    batch, boards = ppo.rollout(run), torch.tensor([0, 1, 4])
    move(run.model, 0.1, seed=1)
    run.optimizer.zero_grad()
    stats = ppo.backward(run, batch, boards)
    new = run.model(batch['obs'], batch['start'], tuple(run.state))[:2]
    old = batch['logits'], torch.cat([batch['value'], batch['last'][None]])
    new, old = ([x[:, boards] for x in pair] for pair in (new, old))
    mine = {name: batch[name][:, boards] for name in ('reward', 'done', 'action')}
    wanted, clipped = written_out(new, old, mine, clip=0.1)
    assert 1 < clipped < 14 and mine['done'].sum() >= 2
    compare(run, stats, wanted)


def test_what_a_gpu_compiles(tmp_path, monkeypatch):
    """Environment and advantages, each one graph, tried ahead of the first update, which leaves the
    boards as they were: the same games. ('cpu:0' stands for a GPU.)"""
    pieces = train_sokoban.play_step, train_sokoban.gae
    whole = {'fullgraph': True, 'dynamic': False, 'backend': 'aot_eager'}
    traced, games = functools.cache(lambda function: torch.compile(function, **whole)), []
    monkeypatch.setattr(kernels.fused, 'enabled', False)
    monkeypatch.setattr(kernels, 'compiled', lambda f: traced(f) if f in pieces else f)
    for where in ('cpu', 'cpu:0'):
        run = prepare(tmp_path, reuse=False, unroll=20, n_envs=16, compile=True)
        run.device = where
        if where == 'cpu:0':
            train_sokoban.warm_up(run)
        games.append(torch.stack([train_sokoban.update(run, False)[1] for _ in range(6)]))
    assert torch.equal(*games) and traced.cache_info().currsize == 2


# ---- runs ----


def test_returns_are_blank_until_every_board_has_ended_an_episode(tmp_path):
    """The first games to end are the short ones, which are solved: no figure is made of them. Then
    they are of the games since the last log line, or of the last ones."""
    run, before = prepare(tmp_path, unroll=40, n_envs=8), 0
    games, running, real = [], torch.zeros(8), run.env.move

    def move(action):
        reward, done, solved = real(action)
        running.add_(reward)
        games.extend(zip(running[done].tolist(), solved[done].tolist(), strict=True))
        running.masked_fill_(done, 0)
        return reward, done, solved

    run.env.move = move
    keys = 'episodic_return return_100 solve_rate_100 return_1000 solve_rate_1000'.split()
    for updates in (1, 1, 1, 3):
        for _ in range(updates):
            stats, played, _ = train_sokoban.update(run, False)
            train_sokoban.count_games(run, played, stats)
            run.step, run.seconds = run.step + 1, run.seconds + 1.0
            if run.step == 4:
                train_sokoban.read_games(run)
        record = train_sokoban.make_record(run)
        found, (mean, _) = [record[key] for key in keys], np.mean(games[before:], 0)
        wanted = [mean, *np.mean(games[-100:], 0), *np.mean(games, 0)]
        if run.step < 3:  # 40 and 80 steps; 120 is the time limit
            wanted = 5 * [None]
        assert found == pytest.approx(wanted, abs=1e-4), run.step
        assert record['episodes'] == len(games) - before > 0
        before = len(games)


UNUSUAL = {**GLU, 'n_expert': 2, 'aggregation': 'softmax_l2', 'reuse': False, 'dtype': 'bfloat16'}
RESUMED = [{}, UNUSUAL, 'ppo', pytest.param({'recurrent': False}, marks=long)]


@pytest.mark.parametrize('settings', RESUMED, ids=str)
def test_resume_is_bit_equal(tmp_path, settings, monkeypatch, request):
    """2N updates = N, stop, N: weights, environment, recurrent state, episodes and log."""
    if settings == 'ppo':
        settings = {'script': request.getfixturevalue('ppo')}
    script = settings.get('script', train_sokoban)
    a, b, update, count = tmp_path / 'a', tmp_path / 'b', script.update, itertools.count()
    run(a, **settings)
    with monkeypatch.context() as patch:  # told to stop in its third update
        patch.setattr(script, 'update', lambda run, _: update(run, next(count) == 2))
        assert run(b, **settings) == 143 and checkpoint(b)['step'] == 3
    torch.manual_seed(999)  # whatever the new process starts with
    assert run(b, resume=True, **settings) == 0
    same(checkpoint(a), checkpoint(b))
    same(read_log(a), read_log(b))


@pytest.mark.parametrize('ranks', [2, pytest.param(4, marks=long)])
def test_ranks(tmp_path, ranks):
    """Several play the boards of one, and one goes on with them."""
    settings = {'total_steps': 12 * 30, 'eval_interval': 30, 'learning_rate': 1e-3}
    run(tmp_path / 'one', **settings)
    argv = arguments(tmp_path / 'more', **settings)
    finished(launch('train_sokoban.py', argv, ranks))
    for a, b in zip(read_log(tmp_path / 'one'), read_log(tmp_path / 'more'), strict=True):
        a, b = ({k: x for k, x in r.items() if x is not None} for r in (a, b))
        assert a == pytest.approx(b, rel=1e-3, abs=1e-3)
    one, more = (checkpoint(tmp_path / name) for name in ('one', 'more'))
    for part in ('env', 'state', 'model'):
        torch.testing.assert_close(one[part], more[part], rtol=1e-2, atol=1e-3)
    assert run(tmp_path / 'more', resume=True, **{**settings, 'total_steps': 12 * 32}) == 0


def test_not_finite(tmp_path):
    """A loss that is not finite ends the run with status 1; the last good checkpoint stays."""
    assert run(tmp_path, total_steps=48) == 0
    saved = (tmp_path / 'ckpt_last.pt').read_bytes()
    assert run(tmp_path, total_steps=9600, resume=True, learning_rate=1e38) == 1
    assert (tmp_path / 'ckpt_last.pt').read_bytes() == saved


# ---- evaluation ----


def test_a_run_and_its_evaluation(tmp_path, capfd, monkeypatch):
    """Of a file of levels, whatever the agent's settings; the run's own files stay as they are."""
    assert run(tmp_path, recurrent=False, n_layer=1, plot=True) == 0
    log, keys = read_log(tmp_path), 'episodes episodic_return return_100 return_1000 solve_rate_100'
    assert [r['step'] for r in log] == [0, 2, 4, 6, 8] and log[-1]['env_steps'] == 96
    assert [r['step'] for r in log if 'eval_solve_rate' in r] == [0, 4, 8]
    assert {*keys.split(), 'entropy', 'grad_norm', 'explained_variance'} <= log[-1].keys()
    files = {f: (tmp_path / f).read_bytes() for f in os.listdir(tmp_path)}
    assert {'config.json', 'ckpt_prev.pt', 'ckpt_best.pt', 'curve.png'} <= files.keys()
    np.save(tmp_path / 'mine.npy', sokoban.generate(5, 1, 11, 6)[0])
    assert run(tmp_path, levels=tmp_path / 'mine.npy', eval_only=True) == 0
    report = json.loads((tmp_path / 'eval_mine.json').read_text())
    assert report['n'] == 5 and report['env_steps'] == 96 and 1 <= report['mean_steps'] <= 120
    assert json.loads(capfd.readouterr().out.splitlines()[-1]) == report
    assert files == {f: (tmp_path / f).read_bytes() for f in files}
    monkeypatch.setattr(
        sokoban, 'EVALUATION_BATCH', 2
    )  # at a time: another number is no other result
    assert run(tmp_path, levels=tmp_path / 'mine.npy', eval_only=True) == 0
    assert json.loads((tmp_path / 'eval_mine.json').read_text()) == report
    few = {'eval_split': tmp_path / 'mine.npy', 'eval_games': 3}
    assert run(tmp_path, eval_only=True, best=True, **few) == 0
    report = json.loads((tmp_path / 'eval_mine.json').read_text())
    assert report['n'] == 3 and report['checkpoint'].endswith('ckpt_best.pt')


WRONG = """n_envs=0 gamma=1.5 env=gym arch=lstm radius=3 n_boxes=9 max_moves=1 device=tpu seed=-1
    aggregation=max n_layer=100000000 n_expert=1000000000 n_embd=9223372036854775808
    learning_rate=-1.0 path=compiled n_envs=1000000000"""
MISTAKES = [(word, word.partition('=')[0] + ' = ') for word in WRONG.split()]
MISTAKES += [
    ('levels_dir=/nonexistent split=hard', 'sokoban.py --split=hard --download=True'),
    ('resume=True', 'out: holds no trained run'),
    ('levels=generated', 'levels and best are settings of --eval_only'),
    ('residual=shared', "residual = 'shared' is for arch = 'convglu'"),
    ('radius=0 aggregation=mean', "radius = 0 needs aggregation = 'sqrt_sum'"),
]


@pytest.mark.parametrize('words, message', MISTAKES)
def test_mistakes(tmp_path, words, message, capfd):
    """Nothing is left behind."""
    refused(capfd, tmp_path / 'out', message, **dict(word.split('=') for word in words.split()))
    assert not (tmp_path / 'out').exists()


def test_resume_refuses_another_run_and_damage(tmp_path, capfd):
    """Other settings, other levels; whole files whose parts do not fit."""
    np.save(tmp_path / 'x.npy', sokoban.generate(50, 1, 0)[0])
    out, more = tmp_path / 'b', {'split': tmp_path / 'x.npy', 'total_steps': 24, 'resume': True}
    run(out, **more | {'resume': False})
    refused(capfd, out, 'n_levels', **more, n_levels=60)
    good = checkpoint(out)
    for key, part in (('env', {**good['env'], 'agent': good['env']['agent'][:1]}), ('state', [])):
        save_checkpoint(good | {key: part}, out / 'ckpt_last.pt')
        refused(capfd, out, 'env or state does not fit', **more)
    save_checkpoint(good, out / 'ckpt_last.pt')
    np.save(tmp_path / 'x.npy', sokoban.generate(50, 1, 1)[0])
    refused(capfd, out, 'other levels', **more)


def test_no_held_out_level_is_trained_on(tmp_path, monkeypatch):
    """By a generator that makes the same levels for every seed; in --eval_only too."""
    monkeypatch.setattr(sokoban, 'generate', lambda n, b, seed, *rest: REAL(n, b, 7, *rest))
    config = configured(tmp_path)
    (trained, _), held_out = sokoban.load_level_sets(config)
    assert np.array_equal(sokoban.load_level_sets(config, trains=False)[1][0], held_out[0])
    assert len(trained) == 50 and not set(map(bytes, trained)) & set(map(bytes, held_out[0]))

"""train_sokoban.py: an update against a loss written apart, resume, ranks, evaluation, mistakes."""

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

TINY = {
    'split': 'generated',
    'eval_split': 'generated',
    'n_levels': 50,
    'n_boxes': 1,
    'max_moves': 6,
    'n_envs': 4,
    'unroll': 3,
    'n_layer': 2,
    'n_embd': 4,
    'head_dim': 8,
    'total_steps': 96,  # 8 updates
    'eval_interval': 4,
    'eval_games': 6,
    'log_interval': 2,
    'compile': False,
    'dtype': 'float32',
    'device': 'cpu',
    'threads': 1,
    'learning_rate': 1e-2,
}
CONVGLU = {'arch': 'convglu'}
long = pytest.mark.long


def arguments(out, **settings):
    return [f'--{k}={v}' for k, v in {**TINY, 'out_dir': out, **settings}.items()]


def configured(out, script=train_sokoban, **settings):
    return configure(vars(script), arguments(out, **settings), quiet=True)


def prepare(out, script=train_sokoban, **settings):
    """A run before its first update."""
    return script.make_run(configured(out, script, **settings))


def run(out, script=train_sokoban, **settings):
    """A whole run in this process; its exit status."""
    return script.main(configured(out, script, **settings))


def checkpoint(out):
    return load_checkpoint(Path(out) / 'ckpt_last.pt')


generate = sokoban.generate
generated_once = functools.cache(lambda key: generate(*pickle.loads(key)))


@pytest.fixture(autouse=True)
def levels_are_generated_once(monkeypatch):
    """Most runs here play the same levels, and would take a third of their time to make them."""
    monkeypatch.setattr(sokoban, 'generate', lambda *args: generated_once(pickle.dumps(args)))


# ---- the update ----


def test_sampled_actions_follow_the_policy():
    """Frequencies of pairs of consecutive actions; the ends of [0, 1)."""
    logits = torch.tensor([[0.0, 1.0, -1.0, 0.5]])
    keys = sokoban.board_keys(7, 1, torch.arange(200))
    rng = sokoban.random_bits(keys, torch.arange(500)[:, None])
    actions = torch.stack([sokoban.sample_actions(logits.expand(200, 4), bits) for bits in rng])
    p = F.softmax(logits[0], -1)
    pairs = torch.bincount((actions[1:] * 4 + actions[:-1]).flatten(), minlength=16).view(4, 4)
    assert (pairs / actions[1:].numel() - p[:, None] * p).abs().max() < 0.005
    one_sided = torch.tensor([[50.0, 0, 0, 0], [0, 0, 0, 50.0]])
    for bits in (2**52, 2**53 - 1):
        assert sokoban.sample_actions(one_sided, torch.full((2,), bits)).tolist() == [0, 3]


LOSS = {
    'gamma': 0.9,
    'gae_lambda': 0.8,
    'value_coef': 0.7,
    'entropy_coef': 0.3,
    'unroll': 5,
    'n_envs': 6,
}


def written_out(new, old, batch, clip=math.inf):
    """The loss with LOSS. new, old: logits (T or T + 1, B, 4) and values, old values (T + 1, B).
    Returns [loss, policy loss, value loss, entropy] and how many ratios are clipped. Without clip
    it is A2C's."""
    not_done, T, values = 1.0 - batch['done'].float(), len(batch['done']), old[1].detach()
    advantage = torch.zeros(T + 1, *values[0].shape)
    for t in reversed(range(T)):
        delta = batch['reward'][t] + not_done[t] * 0.9 * values[t + 1] - values[t]
        advantage[t] = delta + not_done[t] * 0.9 * 0.8 * advantage[t + 1]
    advantage, pi, pi_old = advantage[:T], F.softmax(new[0][:T], -1), F.softmax(old[0][:T], -1)
    p, p_old = (x.gather(-1, batch['action'][..., None]).squeeze(-1) for x in (pi, pi_old.detach()))
    beyond = torch.where(advantage > 0, p / p_old > 1 + clip, p / p_old < 1 - clip)
    bound = torch.where(advantage > 0, 1 + clip, 1 - clip)
    gain = torch.where(beyond, bound, p / p_old) if clip < math.inf else p.log()
    policy, entropy = -(gain * advantage).mean(), -(pi * pi.log()).sum(-1).mean()
    error = (new[1][:T] - values[:T] - advantage).square().mean()
    return [policy + 0.7 * error - 0.3 * entropy, policy, error, entropy], int(beyond.sum())


def perturb(model, size, seed=0):
    rng = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.data.add_(size * torch.randn(p.shape, generator=rng))


def assert_same_loss(run, expected):
    """Statistics and gradients in run.gradients against those of a loss written out."""
    params = [p for p in run.model.parameters() if p.numel()]
    stats, grads = run.gradients.extra.clone(), [p.grad.clone() for p in params]
    run.gradients.zero()
    expected[0].backward()
    assert stats[:4].tolist() == pytest.approx([x.item() for x in expected], rel=1e-4)
    for grad, p in zip(grads, params, strict=True):
        torch.testing.assert_close(grad, p.grad, rtol=1e-3, atol=1e-5)


LOSSES = [{}, {'reuse': False}, {'recurrent': False}, CONVGLU, {**CONVGLU, 'reuse': False}]


@pytest.mark.parametrize('settings', LOSSES, ids=str)
def test_gradient_is_that_of_the_loss(tmp_path, settings):
    """The network runs again on the rollout's own observations, the one after the last included.
    Two rollouts of 5 steps and 6 boards; in both an episode ends inside (board 0), at the last step
    (board 1: the next rollout starts with a zero state, and no value follows) and at the first
    (board 2)."""
    run = prepare(tmp_path, **LOSS, **settings)
    run.model.logits.weight.data.mul_(100)  # neither a uniform policy nor an empty memory
    perturb(run.model, 0.3)
    for again in (False, True):
        late, steps = torch.tensor([120 - 3, 120 - 5, 120 - 1]), run.env.steps[:3]
        steps.copy_(torch.where(steps == 0, 0, late) if again else late)
        first = run.env.steps == 0
        assert first.any()
        seen, observe = [], run.env.observe
        run.env.observe = lambda observe=observe, seen=seen: seen.append(observe()) or seen[-1]
        state = tuple(x.clone() for x in run.state)
        batch = train_sokoban.rollout_and_backward(run)
        run.env.observe = observe
        starts = torch.cat([first[None], batch['done']])
        logits, value, _ = run.model(torch.stack(seen), starts, state)
        assert_same_loss(run, written_out((logits, value), (logits, value), batch)[0])
        assert batch['done'][2, 0] and batch['done'][0, 2] and batch['done'][4, 1] != again


@pytest.fixture
def ppo(tmp_path, monkeypatch):
    """train_sokoban.py with tests/hacks/ppo.patch."""
    patch = ROOT / 'tests' / 'hacks' / 'ppo.patch'
    shutil.copy(ROOT / 'train_sokoban.py', tmp_path)
    subprocess.run(['git', 'apply', str(patch)], cwd=tmp_path, check=True)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, 'train_sokoban')
    return importlib.import_module('train_sokoban')


def test_gradient_of_the_ppo_patch(tmp_path, ppo):
    """On half of the boards, once the policy has moved away from the rollout's: the clipped
    surrogate of Schulman et al. 2017, Eq. 7."""
    run = prepare(tmp_path, ppo, clip=0.1, **LOSS)
    perturb(run.model, 0.3)
    for _ in range(2):  # the second begins with a state
        ppo.update(run, False)
    assert run.optimizer.state_dict()['state'][0]['step'] == 2 * 3 * 3  # rollouts, epochs, parts
    run.env.steps[:2] = torch.tensor([120 - 3, 120 - 5])
    batch, boards = ppo.rollout(run), torch.tensor([0, 1, 4])
    perturb(run.model, 0.1, seed=1)
    run.gradients.zero()
    ppo.backward(run, batch, boards)
    new = run.model(batch['obs'], batch['start'], run.state)[:2]
    old = batch['logits'], torch.cat([batch['value'], batch['last'][None]])
    new, old = ([x[:, boards] for x in pair] for pair in (new, old))
    part = {name: batch[name][:, boards] for name in ('reward', 'done', 'action')}
    expected, clipped = written_out(new, old, part, clip=0.1)
    assert 1 < clipped < 14 and part['done'].sum() >= 2
    assert_same_loss(run, expected)


def test_compiled_rules_play_the_same_episodes(tmp_path, monkeypatch):
    """On a GPU ('cpu:0' stands for one) rules, sampling and advantages are whole graphs for
    torch.compile. They are tried ahead of the first update, which leaves the boards unchanged."""
    rules = train_sokoban.play_step, train_sokoban.sample_actions, train_sokoban.gae
    options = {'fullgraph': True, 'dynamic': False, 'backend': 'aot_eager'}
    trace = functools.cache(lambda f: torch.compile(f, **options))
    monkeypatch.setattr(kernels, 'compiled', lambda f, pdl: trace(f) if f in rules else f)
    monkeypatch.setattr(kernels.fused, 'enabled', False)
    episodes = []
    for device in ('cpu', 'cpu:0'):
        run = prepare(tmp_path, reuse=False, unroll=10, n_envs=8, compile=True)
        run.device = device
        if device == 'cpu:0':
            train_sokoban.warm_up(run)
            assert kernels.fused.enabled
        episodes.append(torch.stack([train_sokoban.update(run, False)[1] for _ in range(6)]))
    assert torch.equal(*episodes) and trace.cache_info().currsize == 3


# ---- runs ----


def test_returns_are_blank_until_every_board_has_ended_an_episode(tmp_path):
    """The episodes that end first are short because they are solved: no figure is made of them.
    Afterwards figures are of the episodes since the last log line, or of the last ones."""
    run, before = prepare(tmp_path, unroll=40, n_envs=8), 0
    episodes, running, play = [], torch.zeros(8), run.env.move

    def move(action):
        reward, done, solved = play(action)
        running.add_(reward)
        episodes.extend(zip(running[done].tolist(), solved[done].tolist(), strict=True))
        running.masked_fill_(done, 0)
        return reward, done, solved

    run.env.move = move
    keys = 'episodic_return return_100 solve_rate_100 return_1000 solve_rate_1000'.split()
    for updates in (1, 1, 1, 3):
        for _ in range(updates):
            stats, played, _ = train_sokoban.update(run, False)
            train_sokoban.count_episodes(run, played, stats)
            run.step, run.seconds = run.step + 1, run.seconds + 1.0
            if run.step == 4:
                train_sokoban.read_episodes(run)
        record = train_sokoban.make_record(run)
        found, (mean, _) = [record[key] for key in keys], np.mean(episodes[before:], 0)
        expected = [mean, *np.mean(episodes[-100:], 0), *np.mean(episodes, 0)]
        if run.step < 3:  # 40 and 80 steps; 120 is the time limit
            expected = 5 * [None]
        assert found == pytest.approx(expected, abs=1e-4), run.step
        assert record['episodes'] == len(episodes) - before > 0
        before = len(episodes)


UNUSUAL = {**CONVGLU, 'n_expert': 2, 'aggregation': 'softmax_l2', 'reuse': False}
RESUMED = [{}, {**UNUSUAL, 'dtype': 'bfloat16'}, 'ppo']
RESUMED += [pytest.param({'recurrent': False}, marks=long)]


@pytest.mark.parametrize('settings', RESUMED, ids=str)
def test_resume_is_bit_equal(tmp_path, settings, monkeypatch, request):
    """A whole run, and one that is stopped and resumed: weights, environment, recurrent state,
    episodes and log."""
    if settings == 'ppo':
        settings = {'script': request.getfixturevalue('ppo')}
    script = settings.get('script', train_sokoban)
    a, b, update, count = tmp_path / 'a', tmp_path / 'b', script.update, itertools.count()
    run(a, **settings)
    with monkeypatch.context() as patch:  # stopped in its third update
        patch.setattr(script, 'update', lambda run, _: update(run, next(count) == 2))
        assert run(b, **settings) == 143 and checkpoint(b)['step'] == 3
    torch.manual_seed(999)  # whatever the new process starts with
    assert run(b, resume=True, **settings) == 0
    same(checkpoint(a), checkpoint(b))
    same(read_log(a), read_log(b))


@pytest.mark.parametrize('ranks', [2, pytest.param(4, marks=long)])
def test_ranks(tmp_path, ranks):
    """Several ranks play the boards of one, and one resumes what they have trained."""
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


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path):
    """With status 1; the last good checkpoint is unchanged."""
    assert run(tmp_path, total_steps=48) == 0
    saved = (tmp_path / 'ckpt_last.pt').read_bytes()
    assert run(tmp_path, total_steps=9600, resume=True, learning_rate=1e38) == 1
    assert (tmp_path / 'ckpt_last.pt').read_bytes() == saved


# ---- settings ----


def test_a_run_of_before_the_renaming_resumes(tmp_path, capfd):
    """Its checkpoint has the setting `path`, now `mode`, and, with bfloat16 convolutions, s and h
    of the state in bfloat16. The old name still works, with a line."""
    assert run(tmp_path, total_steps=48) == 0
    saved = checkpoint(tmp_path)
    saved['config']['path'] = saved['config'].pop('mode')
    saved['state'][:2] = [x.bfloat16() for x in saved['state'][:2]]
    save_checkpoint(saved, tmp_path / 'ckpt_last.pt')
    argv = [*arguments(tmp_path, resume=True), '--path=plain']
    capfd.readouterr()
    config = configure(vars(train_sokoban), argv)
    assert config['mode'] == 'plain' and 'path' not in config
    assert 'path is now called mode' in capfd.readouterr().out
    assert train_sokoban.main(config) == 0
    assert checkpoint(tmp_path)['step'] == 8


def test_init_from_adopts_sizes(tmp_path, capfd):
    """Those of the agent in the folder, except what the command line gives."""
    assert run(tmp_path / 'a', **CONVGLU, total_steps=12) == 0
    given = {'split': 'generated', 'eval_split': 'generated', 'n_boxes': 1, 'max_moves': 6}
    given |= {'n_levels': 50, 'eval_games': 6, 'n_envs': 4, 'device': 'cpu', 'n_layer': 1}
    given |= {'init_from': tmp_path / 'a', 'out_dir': tmp_path / 'b'}
    argv = [f'--{name}={value}' for name, value in given.items()]
    new = train_sokoban.make_run(configure(vars(train_sokoban), argv, quiet=True)).model
    assert (new.config.arch, new.config.n_layer, new.config.n_embd) == ('convglu', 1, 4)
    old = checkpoint(tmp_path / 'a')['model']
    assert all(torch.equal(p, old[name]) for name, p in new.named_parameters())


def test_resume_refuses_another_run_and_damage(tmp_path, capfd):
    """Changed settings, also one that a fork has added; other levels; files whose parts do not
    fit."""
    np.save(tmp_path / 'x.npy', generate(50, 1, 0)[0])
    out = tmp_path / 'run'
    settings = {'split': tmp_path / 'x.npy', 'total_steps': 24}
    run(out, **settings)

    def refused(message, **changes):
        argv = arguments(out, resume=True, **{**settings, **changes})
        assert message in (error := mistake(capfd, train_sokoban, argv)), error

    refused('was trained with n_levels = 50, not 60', n_levels=60)
    good = checkpoint(out)
    save_checkpoint(good | {'config': {**good['config'], 'seed': 7}}, out / 'ckpt_last.pt')
    refused('was trained with seed = 7, not 1337')
    boards = {**good['env'], 'agent': good['env']['agent'][:1]}
    for key, part in (('env', boards), ('state', [])):
        save_checkpoint(good | {key: part}, out / 'ckpt_last.pt')
        refused('env or state does not fit')
    save_checkpoint(good, out / 'ckpt_last.pt')
    np.save(tmp_path / 'x.npy', generate(50, 1, 1)[0])
    refused('was trained on other levels')


MISTAKES = [
    ({'n_envs': 0}, 'n_envs = 0'),
    ({'gamma': 1.5}, 'gamma = 1.5'),
    ({'env': 'gym'}, "env = 'gym'"),
    ({'arch': 'lstm'}, "arch = 'lstm'"),
    ({'radius': 3}, 'radius = 3'),
    ({'n_boxes': 9}, 'n_boxes = 9'),
    ({'max_moves': 1}, 'max_moves = 1'),
    ({'device': 'tpu'}, "device = 'tpu'"),
    ({'seed': -1}, 'seed = -1'),
    ({'aggregation': 'max'}, "aggregation = 'max'"),
    ({'n_layer': 100000000}, 'n_layer = 100000000'),
    ({'n_expert': 1000000000}, 'n_expert = 1000000000'),
    ({'n_embd': 2**63}, 'n_embd = '),
    ({'learning_rate': -1.0}, 'learning_rate = -1.0'),
    ({'mode': 'compiled'}, "mode = 'compiled'"),
    ({'n_envs': 1000000000}, 'n_envs = 1000000000'),
    ({'levels_dir': '/nonexistent', 'split': 'hard'}, 'sokoban.py --split=hard --download=True'),
    ({'resume': True}, 'out: holds no trained run'),
    ({'levels': 'generated'}, 'levels and best are settings of --eval_only'),
    ({'residual': 'shared'}, "residual = 'shared' is for arch = 'convglu'"),
    ({'radius': 0, 'aggregation': 'mean'}, "radius = 0 needs aggregation = 'sqrt_sum'"),
    ({'init_from': 'nowhere'}, 'nowhere'),
    ({'init_from': 'nowhere', 'resume': True}, '--init_from starts a new run'),
]


@pytest.mark.parametrize('settings, message', MISTAKES, ids=str)
def test_mistakes(tmp_path, settings, message, capfd):
    """One line that names the setting; nothing is left behind."""
    error = mistake(capfd, train_sokoban, arguments(tmp_path / 'out', **settings))
    assert message in error and not (tmp_path / 'out').exists(), error


# ---- evaluation ----


def test_a_run_and_its_evaluation(tmp_path, capfd, monkeypatch):
    """The files of a run; --eval_only on a file of levels, which leaves them unchanged."""
    assert run(tmp_path, recurrent=False, n_layer=1, plot=True) == 0
    log, keys = read_log(tmp_path), 'episodes episodic_return return_100 return_1000 solve_rate_100'
    assert [r['step'] for r in log] == [0, 2, 4, 6, 8] and log[-1]['env_steps'] == 96
    assert [r['step'] for r in log if 'eval_solve_rate' in r] == [0, 4, 8]
    assert {*keys.split(), 'entropy', 'grad_norm', 'explained_variance'} <= log[-1].keys()
    files = {f: (tmp_path / f).read_bytes() for f in os.listdir(tmp_path)}
    assert {'config.json', 'ckpt_prev.pt', 'ckpt_best.pt', 'curve.png'} <= files.keys()

    np.save(tmp_path / 'mine.npy', generate(5, 1, 11, 6)[0])
    assert run(tmp_path, levels=tmp_path / 'mine.npy', eval_only=True) == 0
    report = json.loads((tmp_path / 'eval_mine.json').read_text())
    assert report['n'] == 5 and report['env_steps'] == 96 and 1 <= report['mean_steps'] <= 120
    solved = f'96 steps: solved {report["solve_rate"]:.1%} of 5 levels'
    assert solved in capfd.readouterr().out.splitlines()[-1]
    assert files == {f: (tmp_path / f).read_bytes() for f in files}

    monkeypatch.setattr(sokoban, 'EVALUATION_BATCH', 2)  # the result does not depend on it
    assert run(tmp_path, levels=tmp_path / 'mine.npy', eval_only=True) == 0
    assert json.loads((tmp_path / 'eval_mine.json').read_text()) == report

    few = {'eval_split': tmp_path / 'mine.npy', 'eval_games': 3}
    assert run(tmp_path, eval_only=True, best=True, **few) == 0
    report = json.loads((tmp_path / 'eval_mine.json').read_text())
    assert report['n'] == 3 and report['checkpoint'].endswith('ckpt_best.pt')


def test_no_evaluation_level_is_trained_on(tmp_path, monkeypatch):
    """With a generator that makes the same levels for every seed; for --eval_only too."""
    monkeypatch.setattr(sokoban, 'generate', lambda n, b, seed, *rest: generate(n, b, 7, *rest))
    config = configured(tmp_path)
    (train_levels, _), (eval_levels, _) = sokoban.load_level_sets(config)
    assert np.array_equal(sokoban.load_level_sets(config, training=False)[1][0], eval_levels)
    assert len(train_levels) == 50 and not {*map(bytes, train_levels)} & {*map(bytes, eval_levels)}

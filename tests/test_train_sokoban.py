"""Test train_sokoban.py: an update against a loss written here, resume, ranks, evaluation,
mistakes."""

import functools
import importlib
import json
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
from processes import ROOT, output_of, start
from small_runs import AGENT, agent_arguments, assert_equal, error_of, read_log, run_agent

import common
import kernels
import sokoban
import train_sokoban
from common import load_checkpoint, save_checkpoint
from configurator import configure

CONVGLU = {'arch': 'convglu'}


def prepare_run(out, script=train_sokoban, **settings):
    """Return a run before its first update."""
    config = configure(vars(script), agent_arguments(out, **settings), quiet=True)
    return script.make_run(config)


def load_last(out):
    """Return the last checkpoint of a run."""
    return load_checkpoint(Path(out) / 'ckpt_last.pt')


generate = sokoban.generate
generated_once = functools.cache(lambda arguments: generate(**pickle.loads(arguments)))


@pytest.fixture(autouse=True)
def levels_are_generated_once(monkeypatch):
    """Generate equal levels once: most runs here play the same ones, and would spend a third of
    their time on them."""
    monkeypatch.setattr(sokoban, 'generate', lambda **kwargs: generated_once(pickle.dumps(kwargs)))


# ---- the update ----


def test_sampled_actions_follow_the_policy():
    """The frequencies of all pairs of consecutive actions are the products of probabilities."""
    logits = torch.tensor([[0.0, 1.0, -1.0, 0.5]])
    keys = sokoban.board_keys(7, 1, torch.arange(200))
    rng = sokoban.random_bits(keys, torch.arange(500)[:, None])
    actions = torch.stack([sokoban.sample_actions(logits.expand(200, 4), bits) for bits in rng])
    p = F.softmax(logits[0], -1)
    pairs = torch.bincount((actions[1:] * 4 + actions[:-1]).flatten(), minlength=16).view(4, 4)
    assert (pairs / actions[1:].numel() - p[:, None] * p).abs().max() < 0.005


@pytest.mark.parametrize('bits', [2**52, 2**53 - 1])
def test_a_certain_action_is_sampled_by_every_random_number(bits):
    logits = torch.tensor([[50.0, 0, 0, 0], [0, 0, 0, 50.0]])
    assert sokoban.sample_actions(logits, torch.full((2,), bits)).tolist() == [0, 3]


LOSS = {
    'gamma': 0.9,
    'gae_lambda': 0.8,
    'value_coef': 0.7,
    'entropy_coef': 0.3,
    'unroll': 5,
    'n_envs': 6,
}


def gae(reward, done, values):
    """Return the advantages (T, B) of generalized advantage estimation with the settings LOSS.
    reward, done: (T, B); values: (T + 1, B)."""
    advantages, next_advantage = [], torch.zeros_like(values[0])
    for t in reversed(range(len(reward))):
        continues = 1.0 - done[t].float()
        delta = reward[t] + 0.9 * continues * values[t + 1] - values[t]
        next_advantage = delta + 0.9 * 0.8 * continues * next_advantage
        advantages.insert(0, next_advantage)
    return torch.stack(advantages)


def a2c_gain(p, p_old, advantage):
    """Return the policy gradient's objective for probabilities p of the actions."""
    return p.log() * advantage


def ppo_gain(p, p_old, advantage, clip=0.1):
    """Return the clipped surrogate (Schulman et al. 2017, Eq. 7), by cases: the ratio counts until
    the policy has moved by `clip` into the direction of the advantage."""
    ratio = p / p_old
    bound = torch.where(advantage > 0, 1 + clip, 1 - clip)
    return torch.where(is_clipped(ratio, advantage, clip), bound, ratio) * advantage


def is_clipped(ratio, advantage, clip=0.1):
    return torch.where(advantage > 0, ratio > 1 + clip, ratio < 1 - clip)


def probabilities_of(logits, action):
    """Return the probability (T, B) of each action."""
    return F.softmax(logits, -1).gather(-1, action[..., None]).squeeze(-1)


def loss_of(logits, values, logits_old, values_old, batch, gain=a2c_gain):
    """Return [loss, policy loss, value loss, entropy] of a rollout with the settings LOSS.

    logits: (T, B, 4); values: (T, B); logits_old and values_old (T + 1, B): the rollout's, which
    are constants. gain: the objective of the policy."""
    values_old = values_old.detach()
    p = probabilities_of(logits, batch['action'])
    p_old = probabilities_of(logits_old.detach(), batch['action'])
    advantage = gae(batch['reward'], batch['done'], values_old)
    policy_loss = -gain(p, p_old, advantage).mean()
    value_loss = (values - (values_old[:-1] + advantage)).square().mean()
    pi = F.softmax(logits, -1)
    entropy = -(pi * pi.log()).sum(-1).mean()
    return [policy_loss + 0.7 * value_loss - 0.3 * entropy, policy_loss, value_loss, entropy]


def perturb(model, size, seed=0):
    """Add noise of this size to all parameters."""
    rng = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.data.add_(size * torch.randn(p.shape, generator=rng))


def assert_same_loss(run, expected):
    """Compare the statistics and gradients in run.gradients with those of loss_of()."""
    params = [p for p in run.model.parameters() if p.numel()]
    stats, grads = run.gradients.extra.clone(), [p.grad.clone() for p in params]
    run.gradients.zero()
    expected[0].backward()
    assert stats[:4].tolist() == pytest.approx([x.item() for x in expected], rel=1e-4)
    for grad, p in zip(grads, params, strict=True):
        torch.testing.assert_close(grad, p.grad, rtol=1e-3, atol=1e-5)


LOSSES = [{}, {'reuse': False}, {'recurrent': False}, CONVGLU, {**CONVGLU, 'reuse': False}]


@pytest.mark.parametrize('settings', LOSSES, ids=str)
def test_gradients_are_those_of_the_loss(tmp_path, settings):
    """The loss is computed from the observations of the rollout, the one after the last included.

    There are two rollouts of 5 steps and 6 boards. In both, an episode ends inside on board 0 and
    at the first step on board 2. In the first it also ends at the last step on board 1: no value
    follows, and the second rollout starts there from a zero state."""
    run = prepare_run(tmp_path, **LOSS, **settings)
    run.model.logits.weight.data.mul_(100)  # neither a uniform policy nor an empty memory
    perturb(run.model, 0.3)
    near_the_limit = torch.tensor([120 - 3, 120 - 5, 120 - 1])
    for rollout in (0, 1):
        steps = run.env.steps[:3]
        if rollout == 1:  # board 1 has just started
            near_the_limit = torch.where(steps == 0, 0, near_the_limit)
        steps.copy_(near_the_limit)
        starts = run.env.steps == 0
        assert starts.any()
        state = tuple(x.clone() for x in run.state)
        observations, observe = [], run.env.observe

        def record(observations=observations, observe=observe):
            observations.append(observe())
            return observations[-1]

        run.env.observe = record
        batch = train_sokoban.rollout_and_backward(run)
        run.env.observe = observe

        starts = torch.cat([starts[None], batch['done']])
        logits, values, _ = run.model(torch.stack(observations), starts, state)
        logits = logits[:5]
        assert_same_loss(run, loss_of(logits, values[:5], logits, values, batch))
        assert batch['done'][2, 0] and batch['done'][0, 2]
        assert batch['done'][4, 1] == (rollout == 0)


@pytest.fixture
def ppo(tmp_path, monkeypatch):
    """Return train_sokoban.py with tests/hacks/ppo.patch."""
    patch = ROOT / 'tests' / 'hacks' / 'ppo.patch'
    shutil.copy(ROOT / 'train_sokoban.py', tmp_path)
    subprocess.run(['git', 'apply', str(patch)], cwd=tmp_path, check=True)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, 'train_sokoban')
    return importlib.import_module('train_sokoban')


def test_gradients_of_the_ppo_patch(tmp_path, ppo):
    """A minibatch of half of the boards is compared, after the policy has moved away from that of
    the rollout."""
    run = prepare_run(tmp_path, ppo, clip=0.1, **LOSS)
    perturb(run.model, 0.3)
    for _ in range(2):  # so that the rollout starts with a state
        ppo.update(run, False)
    assert run.optimizer.state_dict()['state'][0]['step'] == 2 * 3 * 3  # rollouts, epochs, parts
    run.env.steps[:2] = torch.tensor([120 - 3, 120 - 5])
    batch, boards = ppo.rollout(run), torch.tensor([0, 1, 4])
    perturb(run.model, 0.1, seed=1)
    run.gradients.zero()
    ppo.backward(run, batch, boards)

    logits, values, _ = run.model(batch['obs'], batch['start'], run.state)
    logits, values, logits_old = (x[:, boards] for x in (logits, values, batch['logits']))
    values_old = torch.cat([batch['value'], batch['last'][None]])[:, boards]
    minibatch = {name: batch[name][:, boards] for name in ('reward', 'done', 'action')}
    expected = loss_of(logits, values, logits_old, values_old, minibatch, gain=ppo_gain)
    assert_same_loss(run, expected)

    # the minibatch has both kinds of ratios, and ends of episodes
    p, p_old = (probabilities_of(x, minibatch['action']) for x in (logits, logits_old))
    clipped = is_clipped(p / p_old, gae(minibatch['reward'], minibatch['done'], values_old))
    assert 1 < clipped.sum() < 14 and minibatch['done'].sum() >= 2


def test_compiled_rules_play_the_same_episodes(tmp_path, monkeypatch):
    """On a GPU, for which 'cpu:0' stands here, torch.compile traces the rules, sampling and
    advantages as whole graphs. It does so before the first update and leaves the boards
    unchanged."""
    rules = train_sokoban.play_step, train_sokoban.sample_actions, train_sokoban.gae
    options = {'fullgraph': True, 'dynamic': False, 'backend': 'aot_eager'}
    trace = functools.cache(lambda f: torch.compile(f, **options))
    monkeypatch.setattr(kernels, 'compiled', lambda f, pdl: trace(f) if f in rules else f)
    monkeypatch.setattr(kernels.fused, 'enabled', False)
    episodes = []
    for device in ('cpu', 'cpu:0'):
        run = prepare_run(tmp_path, reuse=False, unroll=10, n_envs=8, compile=True)
        run.device = device
        if device == 'cpu:0':
            train_sokoban.warm_up(run)
            assert kernels.fused.enabled
        episodes.append(torch.stack([train_sokoban.update(run, False)[1] for _ in range(6)]))
    assert torch.equal(*episodes) and trace.cache_info().currsize == 3


# ---- runs ----


def test_returns_are_blank_until_every_board_has_ended_an_episode(tmp_path):
    """The episodes that end first are short because they are solved, so no mean is made of them.
    Later means are over the episodes since the last record, the last 100 and the last 1000."""
    run = prepare_run(tmp_path, unroll=40, n_envs=8)
    episodes, returns, env_move = [], torch.zeros(8), run.env.move

    def move(action):
        """Play a step and keep the return of each episode that ends, and whether it is solved."""
        reward, done, solved = env_move(action)
        returns.add_(reward)
        episodes.extend(zip(returns[done].tolist(), solved[done].tolist(), strict=True))
        returns.masked_fill_(done, 0)
        return reward, done, solved

    run.env.move = move
    keys = 'episodic_return return_100 solve_rate_100 return_1000 solve_rate_1000'.split()
    before = 0
    for updates in (1, 1, 1, 3):
        for _ in range(updates):
            stats, ended, _ = train_sokoban.update(run, False)
            train_sokoban.keep_for_log(run, ended, stats)
            run.step, run.seconds = run.step + 1, run.seconds + 1.0
            if run.step == 4:
                train_sokoban.read_episodes(run)
        record = train_sokoban.make_record(run)
        if run.step < 3:  # 40 and 80 steps; 120 is the time limit
            expected = 5 * [None]
        else:
            mean_return, _ = np.mean(episodes[before:], 0)
            expected = [mean_return, *np.mean(episodes[-100:], 0), *np.mean(episodes, 0)]
        assert [record[key] for key in keys] == pytest.approx(expected, abs=1e-4), run.step
        assert record['episodes'] == len(episodes) - before > 0
        before = len(episodes)


UNUSUAL = {**CONVGLU, 'n_expert': 2, 'aggregation': 'softmax_l2', 'reuse': False}
RESUMED = [{}, {**UNUSUAL, 'dtype': 'bfloat16'}, 'ppo']
RESUMED += [pytest.param({'recurrent': False}, marks=pytest.mark.long)]


@pytest.mark.parametrize('settings', RESUMED, ids=str)
def test_resume_is_bit_equal(tmp_path, settings, monkeypatch, request):
    """A run that stops in its third update and is resumed has the weights, environment, recurrent
    state, episodes and log of an uninterrupted one."""
    if settings == 'ppo':
        settings = {'script': request.getfixturevalue('ppo')}
    script = settings.get('script', train_sokoban)
    a, b = tmp_path / 'a', tmp_path / 'b'
    run_agent(a, **settings)

    def stop_in_the_third_update(run, stop, update=script.update):
        return update(run, run.step == 2)

    with monkeypatch.context() as patch:
        patch.setattr(script, 'update', stop_in_the_third_update)
        assert run_agent(b, **settings) == 143
    assert load_last(b)['step'] == 3
    torch.manual_seed(999)  # a new process has other random states
    assert run_agent(b, resume=True, **settings) == 0
    assert_equal(load_last(a), load_last(b))
    assert_equal(read_log(a), read_log(b))


@pytest.mark.parametrize('ranks', [2, pytest.param(4, marks=pytest.mark.long)])
def test_ranks_train_as_one_does_but_for_rounding(tmp_path, ranks):
    """They play the same boards. One rank resumes what several have trained."""
    settings = {'total_steps': 12 * 30, 'eval_interval': 30, 'learning_rate': 1e-3}
    run_agent(tmp_path / 'one', **settings)
    argv = agent_arguments(tmp_path / 'several', **settings)
    output_of(start(['train_sokoban.py', *argv], ranks))
    logs = read_log(tmp_path / 'one'), read_log(tmp_path / 'several')
    for expected, found in zip(*logs, strict=True):
        assert found.keys() == expected.keys()
        numbers = {name: x for name, x in expected.items() if x is not None}
        found = {name: found[name] for name in numbers}
        assert found == pytest.approx(numbers, rel=1e-3, abs=1e-3)
    one, several = load_last(tmp_path / 'one'), load_last(tmp_path / 'several')
    for part in ('env', 'state', 'model'):
        torch.testing.assert_close(several[part], one[part], rtol=1e-2, atol=1e-3)
    longer = {**settings, 'total_steps': 12 * 32}
    assert run_agent(tmp_path / 'several', resume=True, **longer) == 0


def test_a_non_finite_loss_ends_the_run_and_keeps_the_last_good_checkpoint(tmp_path):
    assert run_agent(tmp_path, total_steps=48) == 0
    saved = (tmp_path / 'ckpt_last.pt').read_bytes()
    assert run_agent(tmp_path, total_steps=9600, resume=True, learning_rate=1e38) == 1
    assert (tmp_path / 'ckpt_last.pt').read_bytes() == saved


# ---- settings ----


def test_a_run_saved_before_settings_were_renamed_resumes(tmp_path):
    """Its checkpoint has the setting `path`, now `mode`, and, with bfloat16 convolutions, s and h
    of the state in bfloat16."""
    assert run_agent(tmp_path, total_steps=48) == 0
    saved = load_last(tmp_path)
    saved['config']['path'] = saved['config'].pop('mode')
    saved['state'][:2] = [x.bfloat16() for x in saved['state'][:2]]
    save_checkpoint(saved, tmp_path / 'ckpt_last.pt')
    assert run_agent(tmp_path, resume=True) == 0
    assert load_last(tmp_path)['step'] == 8


def test_the_old_name_of_a_setting_works_and_is_reported(tmp_path, capfd):
    config = configure(vars(train_sokoban), [*agent_arguments(tmp_path), '--path=plain'])
    assert config['mode'] == 'plain' and 'path' not in config
    assert 'path is now called mode' in capfd.readouterr().err


def test_init_from_adopts_the_sizes_that_are_not_on_the_command_line(tmp_path):
    assert run_agent(tmp_path / 'a', **CONVGLU, total_steps=12) == 0
    settings = {name: x for name, x in AGENT.items() if name not in ('n_embd', 'head_dim')}
    settings['n_layer'] = 1  # the saved agent has two layers
    settings |= {'init_from': tmp_path / 'a', 'out_dir': tmp_path / 'b'}
    argv = [f'--{name}={x}' for name, x in settings.items()]
    new = train_sokoban.make_run(configure(vars(train_sokoban), argv, quiet=True)).model
    assert (new.config.arch, new.config.n_layer, new.config.n_embd) == ('convglu', 1, 4)
    old = load_last(tmp_path / 'a')['model']
    assert all(torch.equal(p, old[name]) for name, p in new.named_parameters())


def test_a_resumed_run_keeps_its_own_weights_whatever_init_from_says(tmp_path):
    run_agent(tmp_path / 'a', total_steps=12)
    run_agent(tmp_path / 'b', total_steps=24, seed=2)
    run_agent(tmp_path / 'c', total_steps=24, seed=2)
    assert run_agent(tmp_path / 'b', total_steps=36, seed=2, resume=True) == 0
    settings = {'init_from': tmp_path / 'a', 'resume': True}
    assert run_agent(tmp_path / 'c', total_steps=36, seed=2, **settings) == 0
    expected = load_last(tmp_path / 'b')['model']
    found = load_last(tmp_path / 'c')['model']
    assert all(torch.equal(found[name], x) for name, x in expected.items())


def test_resume_refuses_other_settings_other_levels_and_parts_that_do_not_fit(tmp_path, capfd):
    np.save(tmp_path / 'x.npy', generate(50, 1, 0)[0])
    out = tmp_path / 'run'
    settings = {'split': tmp_path / 'x.npy', 'total_steps': 24}
    run_agent(out, **settings)
    saved = load_last(out)

    def assert_refused(message, **changes):
        argv = agent_arguments(out, resume=True, **{**settings, **changes})
        error = error_of(capfd, train_sokoban, argv)
        assert message in error, error

    assert_refused('was trained with n_levels = 50, not 60', n_levels=60)
    one_board = {**saved['env'], 'agent': saved['env']['agent'][:1]}
    for changes, message in (
        ({'config': {**saved['config'], 'seed': 7}}, 'was trained with seed = 7, not 1337'),
        ({'env': one_board}, 'env or state does not fit'),
        ({'state': []}, 'env or state does not fit'),
    ):
        save_checkpoint(saved | changes, out / 'ckpt_last.pt')
        assert_refused(message)
    save_checkpoint(saved, out / 'ckpt_last.pt')
    np.save(tmp_path / 'x.npy', generate(50, 1, 1)[0])
    assert_refused('was trained on other levels')


@pytest.mark.parametrize('eval_games, is_kept', [(6, True), (5, False)])
def test_a_best_return_on_other_evaluation_levels_is_forgotten(tmp_path, eval_games, is_kept):
    """The first run evaluates on 6 levels. No return is as high as 99."""
    assert run_agent(tmp_path, total_steps=48) == 0
    save_checkpoint(load_last(tmp_path) | {'best': 99.0}, tmp_path / 'ckpt_last.pt')
    assert run_agent(tmp_path, total_steps=96, resume=True, eval_games=eval_games) == 0
    assert (load_last(tmp_path)['best'] == 99.0) == is_kept


def test_a_best_return_without_a_checksum_of_its_levels_is_kept(tmp_path):
    """As an earlier version saved it."""
    assert run_agent(tmp_path, total_steps=48) == 0
    saved = load_last(tmp_path) | {'best': 99.0}
    del saved['eval_levels_crc']
    save_checkpoint(saved, tmp_path / 'ckpt_last.pt')
    assert run_agent(tmp_path, total_steps=96, resume=True, eval_games=5) == 0
    assert load_last(tmp_path)['best'] == 99.0


MISTAKES = [
    ({'n_envs': 0}, 'n_envs = 0'),
    ({'gamma': 1.5}, 'gamma = 1.5'),
    ({'time_limit': 0}, 'time_limit = 0'),
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
]


@pytest.mark.parametrize('reuse', [True, False])
def test_activations_that_do_not_fit_are_refused(tmp_path, monkeypatch, capfd, reuse):
    """The outputs of 2 layers in 3 steps of 400 boards take 3.84 MB, in whichever forward."""
    monkeypatch.setattr(common, 'device_memory', lambda device: (2e6, 2e6))
    argv = agent_arguments(tmp_path / 'out', n_envs=400, reuse=reuse)
    assert 'n_envs = 400 (unroll = 3): needs' in error_of(capfd, train_sokoban, argv)


def test_a_longer_run_keeps_the_last_evaluation_of_the_shorter(tmp_path):
    """The shorter run ended at update 3, which is no multiple of eval_interval."""
    settings = {'n_envs': 4, 'unroll': 3, 'eval_interval': 2, 'log_interval': 100}
    assert run_agent(tmp_path, total_steps=36, **settings) == 0
    assert run_agent(tmp_path, total_steps=72, resume=True, **settings) == 0
    assert [r['step'] for r in read_log(tmp_path) if 'eval_return' in r] == [0, 2, 3, 4, 6]


def test_a_value_error_that_is_no_mistake_has_a_traceback(tmp_path, monkeypatch):
    """So that who edits the code can find it."""

    def edited(*args):
        raise ValueError('in an edit')

    monkeypatch.setattr(train_sokoban, 'build_agent', edited)
    with pytest.raises(ValueError, match='in an edit'):
        run_agent(tmp_path / 'out')


@pytest.mark.parametrize('settings, message', MISTAKES, ids=str)
def test_mistakes_are_refused_in_one_line_and_leave_nothing(tmp_path, settings, message, capfd):
    error = error_of(capfd, train_sokoban, agent_arguments(tmp_path / 'out', **settings))
    assert message in error and not (tmp_path / 'out').exists(), error


# ---- the files of a run, evaluation ----


@pytest.fixture(scope='module')
def finished_run(tmp_path_factory):
    """Return the folder of a run. Beside it lies a file of five levels, five.npy."""
    folder = tmp_path_factory.mktemp('agent')
    np.save(folder / 'five.npy', generate(5, 1, 11, 6)[0])
    assert run_agent(folder / 'run', recurrent=False, n_layer=1, plot=True) == 0
    return folder / 'run'


def test_a_run_writes_its_log_config_curve_and_checkpoints(finished_run):
    log = read_log(finished_run)
    assert [r['step'] for r in log] == [0, 2, 4, 6, 8] and log[-1]['env_steps'] == 96
    assert [r['step'] for r in log if 'eval_solve_rate' in r] == [0, 4, 8]
    keys = 'episodes episodic_return return_100 return_1000 solve_rate_100'.split()
    assert {*keys, 'entropy', 'grad_norm', 'explained_variance'} <= log[-1].keys()
    checkpoints = {'ckpt_last.pt', 'ckpt_prev.pt', 'ckpt_best.pt'}
    assert {'config.json', 'curve.png', *checkpoints} <= {*os.listdir(finished_run)}


def test_eval_only_has_the_time_limit_of_the_run_unless_it_is_set(tmp_path):
    path = tmp_path / 'eval_generated.json'
    untrained = {'total_steps': 1, 'learning_rate': 0.0, 'time_limit': 5}
    assert run_agent(tmp_path, **untrained) == 0
    assert read_log(tmp_path)[0]['eval_steps'] <= 5
    for settings, steps in (({}, 5), ({'time_limit': 3}, 3)):
        assert run_agent(tmp_path, eval_only=True, **settings) == 0
        report = json.loads(path.read_text())
        assert report['time_limit'] == steps and steps - 1 < report['mean_steps'] <= steps


def test_eval_only_evaluates_a_file_of_levels_and_changes_no_file(finished_run, capfd, monkeypatch):
    files = {path: path.read_bytes() for path in finished_run.iterdir()}
    levels, report_path = finished_run.parent / 'five.npy', finished_run / 'eval_five.json'
    assert run_agent(finished_run, levels=levels, eval_only=True) == 0
    report = json.loads(report_path.read_text())
    assert report['n'] == 5 and report['env_steps'] == 96 and 1 <= report['mean_steps'] <= 120
    solved = f'96 steps: solved {report["solve_rate"]:.1%} of 5 levels'
    assert solved in capfd.readouterr().out.splitlines()[-1]
    assert files == {path: path.read_bytes() for path in files}

    monkeypatch.setattr(sokoban, 'EVALUATION_BATCH', 2)  # the result does not depend on it
    assert run_agent(finished_run, levels=levels, eval_only=True) == 0
    assert json.loads(report_path.read_text()) == report


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_eval_only_has_the_dtype_of_the_run_unless_it_is_set(tmp_path, monkeypatch, dtype):
    assert run_agent(tmp_path, total_steps=12, dtype=dtype, time_limit=5) == 0
    dtypes = []

    def write_evaluation(model, *args, **options):
        dtypes.append(model.config.dtype)
        return sokoban.write_evaluation(model, *args, **options)

    monkeypatch.setattr(train_sokoban, 'write_evaluation', write_evaluation)
    for argv in ([], ['--dtype=float32'], ['--dtype=bfloat16']):
        arguments = [f'--out_dir={tmp_path}', '--eval_only', '--device=cpu', *argv]
        train_sokoban.main(configure(vars(train_sokoban), arguments, quiet=True))
    assert dtypes == [dtype, 'float32', 'bfloat16']


def test_eval_only_takes_the_best_checkpoint_and_the_first_levels(finished_run):
    settings = {'eval_split': finished_run.parent / 'five.npy', 'eval_games': 3, 'best': True}
    assert run_agent(finished_run, eval_only=True, **settings) == 0
    report = json.loads((finished_run / 'eval_five.json').read_text())
    assert report['n'] == 3 and report['checkpoint'].endswith('ckpt_best.pt')


def test_eval_only_runs_in_one_process(tmp_path, monkeypatch, capfd):
    """That is refused first, before a checkpoint is looked for."""
    monkeypatch.setenv('WORLD_SIZE', '2')
    argv = agent_arguments(tmp_path, eval_only=True)
    assert 'eval_only runs in one process' in error_of(capfd, train_sokoban, argv)


def evaluated_levels(out, monkeypatch, *argv):
    """Return the levels that --eval_only evaluates, and the generated levels that it leaves out."""
    evaluated, excluded = [], []

    def write_evaluation(model, levels, *args, **options):
        evaluated.append(levels)
        return sokoban.write_evaluation(model, levels, *args, **options)

    def generate_and_keep(**settings):
        excluded.append(settings.get('exclude'))
        return generated_once(pickle.dumps(settings))

    monkeypatch.setattr(train_sokoban, 'write_evaluation', write_evaluation)
    monkeypatch.setattr(sokoban, 'generate', generate_and_keep)
    arguments = [f'--out_dir={out}', '--eval_only', '--device=cpu', *argv]
    train_sokoban.main(configure(vars(train_sokoban), arguments, quiet=True))
    return evaluated[0], excluded[-1] if excluded else None


@pytest.fixture(scope='module')
def run_on_generated_levels(tmp_path_factory):
    """Return the folder of a run on 50 generated levels that is evaluated on 6."""
    out = tmp_path_factory.mktemp('generated')
    assert run_agent(out, total_steps=12) == 0
    return out


TRAINED_ON = {'n': 50, 'boxes': 1, 'seed': 2 * 1337, 'max_moves': 6}
NEW = {'n': 6, 'boxes': 1, 'seed': 2 * 1337 + 1, 'max_moves': 6}
CHANGES = [
    ([], {}),
    (['--levels=generated'], {}),
    (['--eval_games=9', '--n_levels=7'], {'n': 9}),
    (['--seed=5'], {'seed': 2 * 5 + 1}),
    (['--max_moves=10'], {'max_moves': 10}),
]


@pytest.mark.parametrize('argv, changes', CHANGES, ids=str)
def test_eval_only_has_the_levels_of_the_run_but_for_settings_of_the_user(
    run_on_generated_levels, monkeypatch, argv, changes
):
    """Whatever the settings are, levels that the run was trained on are left out."""
    levels, excluded = evaluated_levels(run_on_generated_levels, monkeypatch, *argv)
    train_levels, _ = generate(**TRAINED_ON)
    expected, _ = generate(**{**NEW, **changes}, exclude=train_levels)
    assert np.array_equal(excluded, train_levels) and np.array_equal(levels, expected)


def test_eval_only_has_the_levels_dir_of_the_run(tmp_path, monkeypatch):
    np.save(tmp_path / 'hard.pack17.npy', generate(8, 1, 3, 6)[0])
    settings = {'eval_split': 'hard', 'levels_dir': tmp_path, 'eval_games': 4}
    assert run_agent(tmp_path / 'run', total_steps=12, **settings) == 0
    levels, _ = evaluated_levels(tmp_path / 'run', monkeypatch)
    assert np.array_equal(levels, generate(4, 1, 3, 6)[0])


def test_no_evaluation_level_is_trained_on(tmp_path, monkeypatch):
    """The generator makes the same levels for every seed here. --eval_only plays the same ones."""

    def same_seed(**settings):
        return generate(**{**settings, 'seed': 7})

    monkeypatch.setattr(sokoban, 'generate', same_seed)
    config = configure(vars(train_sokoban), agent_arguments(tmp_path), quiet=True)
    (train_levels, _), (eval_levels, _) = sokoban.load_level_sets(config)
    assert np.array_equal(sokoban.load_level_sets(config, run=config)[1][0], eval_levels)
    assert len(train_levels) == 50 and not {*map(bytes, train_levels)} & {*map(bytes, eval_levels)}

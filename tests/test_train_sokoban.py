"""Test train_sokoban.py: gradients of the loss, resume, ranks, records, evaluation, mistakes."""

import copy
import functools
import importlib
import json
import os
import shutil
import sys
import zlib

from configurator import configure
from support.script import UserError

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from processes import ROOT, apply_patch, run_ranks
from small_runs import StopAt, agent_arguments, assert_equal, error_of, read_log, run_agent

import sokoban
import train_sokoban
from convlstm import AgentConfig, build_agent
from levels import generate
from support import compiling
from support.run_folder import LAST, PREV, load_checkpoint, settings_of


def last_of(folder):
    return load_checkpoint(folder / LAST)


def call(script, *argv):
    """Run a trainer with nothing but these arguments; return the exit status."""
    return script.main(configure(vars(script), argv, quiet=True))


# ---- the loss


def test_sampled_actions_follow_the_policy():
    """Evenly spaced random numbers give each action as often as its probability says."""
    logits = torch.tensor([0.3, -1.0, 2.0, 0.0])
    bits = torch.arange(2**16) * 2**37
    actions = sokoban.sample_actions(logits.expand(2**16, 4), bits)
    found = torch.bincount(actions, minlength=4) / 2**16
    torch.testing.assert_close(found, F.softmax(logits, -1), rtol=0, atol=1e-4)


LOSS = '--gamma=0.9 --gae_lambda=0.8 --value_coef=0.7 --entropy_coef=0.3 --unroll=5'.split()


def loss_of(logits, values, values_old, batch, gain=lambda p, advantage: p.log() * advantage):
    """Return [loss, policy loss, value loss, entropy, explained variance of the returns] of a
    rollout with the settings LOSS, by generalized advantage estimation.

    logits: (T, B, 4); values: (T, B); values_old (T + 1, B): the rollout's, which are constants.
    gain: the objective of the policy for the probabilities (T, B) of the actions."""
    values_old = values_old.detach()
    advantage = torch.zeros_like(values_old)
    for t in reversed(range(5)):
        continues = 1 - batch['done'][t].float()
        delta = batch['reward'][t] + 0.9 * continues * values_old[t + 1] - values_old[t]
        advantage[t] = delta + 0.9 * 0.8 * continues * advantage[t + 1]
    advantage, values_old = advantage[:5], values_old[:5]
    pi = F.softmax(logits, -1)
    p = pi.gather(-1, batch['action'][..., None]).squeeze(-1)
    policy_loss = -gain(p, advantage).mean()
    value_loss = (values - (values_old + advantage)).square().mean()
    entropy = -(pi * pi.log()).sum(-1).mean()
    explained = 1 - advantage.var() / (values_old + advantage).var()
    loss = policy_loss + 0.7 * value_loss - 0.3 * entropy
    return [loss, policy_loss, value_loss, entropy, explained]


def make_agent(script, *argv):
    """Set the trainer's settings; return a random agent, its state and six boards.

    An episode starts on board 0. In five steps one ends on board 1 after the first step, on board 2
    after the third, and on board 3 after the last, so that no value follows there."""
    configure(vars(script), [*LOSS, *argv], quiet=True)
    torch.manual_seed(2)
    agent = build_agent(AgentConfig(n_layer=2, n_embd=4, head_dim=8))
    perturb(agent, 0.3)
    boards = sokoban.SokobanEnv(generate(50, 4, 1, 40)[0], 6, seed=1)  # no level is solved
    boards.steps.copy_(torch.tensor([0, 119, 117, 115, 1, 1]))
    return agent, tuple(map(torch.rand_like, agent.init_state(6))), boards


def perturb(agent, size):
    for p in agent.parameters():
        p.data.add_(size * torch.randn_like(p))


def assert_same_loss(agent, loss, stats, expected):
    """Compare the statistics and the gradients of a loss with those of loss_of()."""
    assert stats.tolist() == pytest.approx([x.item() for x in expected], rel=1e-4)
    params = list(agent.parameters())
    found, grads = (torch.autograd.grad(x, params) for x in (loss, expected[0]))
    torch.testing.assert_close(found, grads, rtol=1e-3, atol=1e-5)


def test_gradients_are_those_of_the_loss():
    """The actions are played again on a copy of the boards, and the loss is computed from what is
    seen there, after the last step included. The rules, sampling and advantages are traced as whole
    graphs, as torch.compile does on a GPU."""
    trace = functools.partial(torch.compile, fullgraph=True, dynamic=False, backend='aot_eager')
    agent, state, boards = make_agent(train_sokoban)
    replica = copy.deepcopy(boards)
    bits = sokoban.random_bits(boards.keys, torch.arange(5)[:, None])
    sample, play = trace(sokoban.sample_actions), trace(train_sokoban.play_step)
    batch, new_state = train_sokoban.rollout(
        agent, boards, state, lambda logits, t: sample(logits, bits[t]), 5, play
    )
    loss, stats = train_sokoban.a2c_loss(batch, trace(train_sokoban.gae))

    start, obs = [replica.steps == 0], [replica.observe()]
    for t in range(5):
        reward, done, _ = replica.move(batch['action'][t])
        replica.reset(done)
        assert torch.equal(batch['reward'][t], reward) and torch.equal(batch['done'][t], done)
        start.append(done)
        obs.append(replica.observe())
    start, obs = torch.stack(start), torch.stack(obs)
    logits, values, _ = agent(obs, start, state)
    assert_same_loss(agent, loss, stats, loss_of(logits[:5], values[:5], values, batch))
    torch.testing.assert_close(new_state, agent(obs[:5], start[:5], state)[2])
    torch.testing.assert_close(batch['return'][2, 2], batch['reward'][:3, 2].sum())


@pytest.fixture
def ppo(tmp_path, monkeypatch):
    """Return train_sokoban.py with tests/hacks/ppo.patch."""
    shutil.copy(ROOT / 'train_sokoban.py', tmp_path)
    assert apply_patch(tmp_path, 'ppo')
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, 'train_sokoban')
    return importlib.import_module('train_sokoban')


def test_gradients_of_the_ppo_patch(ppo):
    """The boards are shuffled, and the policy has moved away from that of the rollout. The
    objective is the clipped surrogate (Schulman et al. 2017, Eq. 7): a ratio counts until the
    policy has moved by 0.1 into the direction of the advantage."""
    agent, state, boards = make_agent(ppo, '--clip=0.1')
    batch, _ = ppo.rollout(agent, boards, state, lambda logits, t: logits.argmax(-1), 5)
    perturb(agent, 0.1)
    loss, stats = ppo.ppo_loss(agent, batch, state, torch.tensor([3, 0, 4, 1, 5, 2]))

    old = F.softmax(batch['logits'], -1).amax(-1)

    def gain(p, advantage):
        bound = torch.where(advantage > 0, 1.1, 0.9)
        clipped = (p / old - bound) * advantage > 0
        assert 3 < clipped.sum() < 27  # there are both kinds of ratios
        return torch.where(clipped, bound, p / old) * advantage

    logits, values, _ = agent(batch['obs'], batch['start'], state)
    values_old = torch.cat([batch['value'], batch['last'][None]])
    assert_same_loss(agent, loss, stats, loss_of(logits, values, values_old, batch, gain))


def test_the_ppo_patch_refuses_more_minibatches_than_boards(tmp_path, ppo):
    with pytest.raises(UserError, match='minibatches = 5: there are 4 boards'):
        run_agent(tmp_path, ppo, minibatches=5)


# ---- runs


RUN = {'time_limit': 5, 'plot': True}


@pytest.fixture(scope='module')
def finished_run(tmp_path_factory):
    """Return the folder of a run with the settings RUN."""
    folder = tmp_path_factory.mktemp('agent')
    assert run_agent(folder, **RUN) == 0
    return folder


def test_a_run_writes_its_log_config_curve_and_checkpoints(finished_run):
    log = read_log(finished_run)
    assert [r['step'] for r in log] == [0, 2, 4, 6, 8] and log[-1]['env_steps'] == 96
    assert [r['step'] for r in log if 'eval_solve_rate' in r] == [0, 4, 8]
    assert 'random_solve_rate' in log[0] and log[0]['eval_steps'] <= 5
    assert {'return_1000', 'entropy', 'grad_norm', 'explained_variance'} <= log[-1].keys()
    assert {'curve.png', LAST, PREV, 'best'} <= {path.name for path in finished_run.iterdir()}


def test_eval_only_evaluates_a_run_or_an_export(finished_run, tmp_path, capsys):
    """On the levels of the run it repeats the last evaluation, or that of the best agent. It has
    the time limit of the run unless that is set. A file of levels is evaluated as a whole, and its
    result has the whole path in its name, which is no other's. Nothing is written into the folder
    of an export."""
    np.save(tmp_path / 'x.npy', generate(12, 1, 3, 6)[0])
    other = tmp_path.with_name(f'{tmp_path.name}-x.npy')
    np.save(other, generate(9, 1, 3, 6)[0])
    evaluate = ['--eval_only=True', '--device=cpu', f'--out_dir={finished_run}']
    assert call(train_sokoban, *evaluate) == 0
    assert call(train_sokoban, *evaluate, f'--levels={tmp_path}/x.npy', '--time_limit=3') == 0
    (of_file,) = finished_run.glob(f'eval_*{tmp_path.name}-x.json')
    assert call(train_sokoban, *evaluate, f'--levels={other}') == 0
    assert len([*finished_run.glob(f'eval_*{tmp_path.name}-x.json')]) == 2
    a = json.loads((finished_run / 'eval_generated.json').read_text())
    b = json.loads(of_file.read_text())
    expected = read_log(finished_run)[-1]['eval_return']
    assert (a['return'], a['n'], a['time_limit']) == (expected, 6, 5)
    assert (b['n'], b['time_limit']) == (12, 3) and b['steps'] <= 3
    assert call(train_sokoban, *evaluate, f'--levels={tmp_path}/x.npy', '--time_limit=4') == 0
    assert json.loads(of_file.read_text()) == b and len([*finished_run.glob('eval_*-x*.json')]) == 3

    best = finished_run / 'best'
    before = set(best.iterdir())
    capsys.readouterr()
    assert call(train_sokoban, *evaluate[:2], f'--out_dir={best}') == 0
    assert f', mean return {settings_of(best)["best"]:.2f}, ' in capsys.readouterr().out
    assert set(best.iterdir()) == before


def test_captured_updates_use_the_same_memory(finished_run, tmp_path, monkeypatch):
    """A run of replayed updates equals an eager one, bit for bit."""
    calls = {}

    def replay(graphs, name, function):
        """Do what compiling.graphed does, as far as a CPU can: from the fourth call on, call the
        function of the fourth call, and return its result in the same memory."""
        earlier = calls.setdefault(name, [])
        if len(earlier) < 4:
            earlier.append((function, function()))
            return earlier[-1][1]
        function, result = earlier[3]
        return result.copy_(function())

    monkeypatch.setattr(train_sokoban, 'graphed', replay)
    assert run_agent(tmp_path, **RUN) == 0
    assert calls.keys() == {'rollout and backward', 'optimizer'}
    assert_equal(last_of(finished_run), last_of(tmp_path))
    assert_equal(read_log(finished_run), read_log(tmp_path))


def test_returns_are_blank_until_every_board_has_ended_an_episode():
    """The episodes that end first are short because they are solved, so no mean is made of them.
    Later means are over the episodes since the last record, the last 100 and the last 1000."""
    since, recent = [(1.0, 1.0), (-3.0, 0.0)], [(0.0, 0.0)] * 150 + [(2.0, 1.0)] * 50
    configure(vars(train_sokoban), ['--unroll=40', '--time_limit=120'], quiet=True)
    early = train_sokoban.returns_record(since, recent, 2)
    assert early.pop('episodes') == 2 and set(early.values()) == {None}
    assert train_sokoban.returns_record(since, recent, 3) == {
        'episodes': 2,
        'episodic_return': -1.0,
        'return_100': 1.0,
        'return_1000': 0.5,
        'solve_rate_100': 0.5,
        'solve_rate_1000': 0.25,
    }


def test_an_evaluation_off_the_grid_of_the_log_changes_nothing(finished_run, tmp_path):
    """Its own line in the log has no returns, and all other lines are those of a run without it."""
    assert run_agent(tmp_path, **RUN, eval_interval=3) == 0
    assert [r['step'] for r in read_log(tmp_path) if 'return_1000' not in r] == [0, 3]
    names = 'step', 'loss', 'episodes', 'return_1000'
    lines, expected = (
        [[r[name] for name in names] for r in read_log(folder) if 'loss' in r]
        for folder in (tmp_path, finished_run)
    )
    assert lines == expected
    assert_equal(last_of(tmp_path), last_of(finished_run))


@pytest.mark.parametrize('patched', [False, True])
def test_resume_is_bit_equal(tmp_path, monkeypatch, request, patched):
    """A run that stops in its third update and is resumed has the weights, environment, recurrent
    state, episodes and log of an uninterrupted one, with A2C and with PPO."""
    script = request.getfixturevalue('ppo') if patched else train_sokoban
    settings = {'n_expert': 2, 'aggregation': 'softmax_l2', 'dtype': 'bfloat16', 'total_steps': 60}
    a, b = tmp_path / 'a', tmp_path / 'b'
    run_agent(a, script, **settings)
    with monkeypatch.context() as patch:
        patch.setattr(script, 'Stopper', lambda: StopAt(3))
        assert run_agent(b, script, **settings) == 143
    torch.manual_seed(999)  # a new process has other random states
    assert call(script, f'--out_dir={b}', '--resume=True') == 0
    assert_equal(last_of(a), last_of(b))
    assert_equal(read_log(a), read_log(b))


def test_a_compiler_that_dies_in_an_evaluation_does_not_end_the_run(tmp_path, monkeypatch, capsys):
    """As by a SIGTERM for all processes of a job."""

    def compiled(function):
        def call(*args):
            if (tmp_path / 'config.json').exists():  # after the trial
                raise RuntimeError('g++ was killed')
            return function(*args)

        return call

    monkeypatch.setattr(compiling, 'compiled', compiled)
    assert run_agent(tmp_path, arch='convglu', compile=True, total_steps=12) == 0
    assert call(train_sokoban, f'--out_dir={tmp_path}', '--eval_only=True') == 0
    assert capsys.readouterr().out.count('running uncompiled (RuntimeError: g++ was killed)') == 2


def test_a_run_that_is_extended_logs_every_episode_once(tmp_path):
    """The run logs its last update, 5, although 5 is not a multiple of log_interval. Episodes have
    at most three steps, the length of an update."""
    settings = {'time_limit': 3, 'learning_rate': 0}
    a, b = tmp_path / 'a', tmp_path / 'b'
    run_agent(a, **settings)
    run_agent(b, **settings, total_steps=60)
    assert call(train_sokoban, f'--out_dir={b}', '--resume=True', '--total_steps=96') == 0
    expected, found = (
        {r['step']: r['episodes'] for r in read_log(folder) if 'episodes' in r} for folder in (a, b)
    )
    assert list(found) == [2, 4, 5, 6, 8] and found[5] >= 4
    assert found.pop(5) + found[6] == expected[6]
    assert found == expected | {6: found[6]}


def test_ranks_train_as_one_does_but_for_rounding(tmp_path):
    """They play the same boards. Two ranks resume what one has trained, and the other way round."""
    for updates, alone, shared in ((8, 'a', 'b'), (12, 'b', 'a')):
        settings = {'total_steps': 12 * updates, 'learning_rate': 1e-3, 'resume': 'auto'}
        train = functools.partial(run_agent, **settings)
        assert train(tmp_path / alone) == 0
        assert run_ranks(2, train, tmp_path / shared) == [0, 0]
    logs = read_log(tmp_path / 'a'), read_log(tmp_path / 'b')
    for record in logs[0] + logs[1]:
        record.pop('explained_variance', None)  # a mean over the ranks' own
    torch.testing.assert_close(*logs, rtol=5e-4, atol=5e-4)
    a, b = last_of(tmp_path / 'a'), last_of(tmp_path / 'b')
    for part in ('boards', 'state', 'model'):
        torch.testing.assert_close(a[part], b[part], rtol=1e-2, atol=1e-3)


def train_as_own_rank(out, changes):
    """Train for two updates as a rank with changes of its own; return a checksum of its weights."""
    agents, make_agent = [], train_sokoban.make_agent
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_sokoban, 'Stopper', lambda: StopAt(2))
        patch.setattr(
            train_sokoban, 'make_agent', lambda x: agents.append(make_agent(x)) or agents[0]
        )
        assert run_agent(out, **changes[int(os.environ['RANK'])]) == 143
    weights = torch.nn.utils.parameters_to_vector(agents[0].parameters())
    return zlib.crc32(weights.detach().numpy())


def test_the_settings_of_rank_0_hold_for_all_ranks(tmp_path):
    """The learning rate falls to 0 at the last update, which follows from them."""
    changes = [{}, {'total_steps': 9600, 'learning_rate': 1.0, 'env': 'jumanji'}]
    one, two = run_ranks(2, train_as_own_rank, tmp_path, changes)
    assert one == two


def stop_rank_1(out):
    """Train as a rank. Rank 1 alone is told to stop, in the second update."""
    with pytest.MonkeyPatch.context() as patch:
        if os.environ['RANK'] == '1':
            patch.setattr(train_sokoban, 'Stopper', lambda: StopAt(2))
        return run_agent(out)


def test_all_ranks_stop_and_save_if_one_is_told_to(tmp_path):
    assert run_ranks(2, stop_rank_1, tmp_path) == [143, 143]
    assert last_of(tmp_path)['step'] == 2


def test_a_non_finite_loss_ends_the_run_and_keeps_the_last_good_checkpoint(tmp_path):
    assert run_agent(tmp_path, total_steps=48) == 0
    saved = (tmp_path / LAST).read_bytes()
    assert run_agent(tmp_path, total_steps=9600, resume=True, learning_rate=1e38) == 1
    assert (tmp_path / LAST).read_bytes() == saved


def test_the_best_agent_is_that_of_the_highest_return_on_the_same_levels(tmp_path, monkeypatch):
    """Evaluations of a resumed run count together. So does that at the end of the first part, after
    update 7, which stays in the log. A return on other levels does not count."""
    returns = iter([9.0, 1.0, 3.0, 2.0, 2.5, 2.0])

    def evaluate(policy, *args, **options):
        value = 0.0 if policy is sokoban.RANDOM else next(returns)
        return {'return': value, 'solve_rate': 0.0}

    monkeypatch.setattr(train_sokoban, 'evaluate', evaluate)
    best = []
    for updates, eval_games in ((7, 6), (12, 6), (16, 5)):
        settings = {'total_steps': 12 * updates, 'eval_games': eval_games}
        assert run_agent(tmp_path, resume='auto', **settings) == 0
        best.append(settings_of(tmp_path / 'best')['step'])
    assert best == [7, 7, 16]
    evaluated = [r['step'] for r in read_log(tmp_path) if 'eval_return' in r]
    assert evaluated == [0, 4, 7, 8, 12, 16]


def test_init_from_takes_sizes_and_weights(tmp_path):
    """The shipped agent solves easy levels from the start."""
    argv = '--split=generated --eval_split=generated --n_boxes=1 --max_moves=12 --n_levels=60'
    argv += ' --eval_games=20 --total_steps=1 --unroll=1 --n_envs=2 --device=cpu --compile=False'
    paths = f'--init_from={ROOT}/pretrained/sokoban', f'--out_dir={tmp_path}'
    assert call(train_sokoban, *paths, *argv.split()) == 0
    assert read_log(tmp_path)[0]['eval_solve_rate'] > 0.8


# ---- mistakes


def test_resume_refuses_other_settings_and_other_levels(tmp_path, capfd):
    levels, out = tmp_path / 'x.npy', tmp_path / 'run'
    settings = {'split': levels, 'total_steps': 24}

    def refusal(**changes):
        argv = agent_arguments(out, resume=True, **{**settings, 'total_steps': 48, **changes})
        return error_of(capfd, train_sokoban, argv)

    np.save(levels, generate(12, 1, 3, 6)[0])
    assert run_agent(out, **settings) == 0
    assert 'was trained with n_levels = 20' in refusal(n_levels=60)
    np.save(levels, generate(12, 1, 4, 6)[0])
    assert 'was trained on other levels' in refusal()
    assert 'was trained on other levels' in refusal(split='generated')


def test_resume_refuses_the_moments_of_another_optimizer(tmp_path, capfd, monkeypatch):
    argv = agent_arguments(tmp_path, total_steps=48)
    assert run_agent(tmp_path, total_steps=24) == 0
    monkeypatch.setattr(torch.optim, 'Adam', lambda params, lr, **_: torch.optim.SGD(params, lr))
    error = error_of(capfd, train_sokoban, [*argv, '--resume=True'])
    assert 'last.pt: was not written by the optimizers of this code' in error


def test_a_run_resumes_when_its_file_of_levels_has_moved(tmp_path, capsys):
    levels, moved, out = tmp_path / 'x.npy', tmp_path / 'y.npy', tmp_path / 'run'
    np.save(levels, generate(12, 1, 3, 6)[0])
    assert run_agent(out, split=levels, total_steps=24) == 0
    levels.rename(moved)
    assert run_agent(out, split=moved, total_steps=48, resume=True) == 0
    assert f"split = '{moved}'  (the run had '{levels}')" in capsys.readouterr().out
    assert read_log(out)[-1]['step'] == 4


MISTAKES = [
    ('--n_envs=0', 'n_envs = 0'),
    ('--env=gym', "env = 'gym'"),
    ('--radius=3', 'radius = 3'),
    ('--split=hard --levels_dir=/nonexistent', '--split=hard --download=True'),
    ('--resume=True', 'out: holds no trained run'),
    ('--levels=generated', 'levels is a setting of --eval_only'),
    ('--init_from=nowhere', 'nowhere/best/config.json: cannot be read'),
]


@pytest.mark.parametrize('arguments, message', MISTAKES)
def test_mistakes_are_refused_in_one_line(tmp_path, arguments, message, capfd):
    argv = [*agent_arguments(tmp_path / 'out'), *arguments.split()]
    assert message in error_of(capfd, train_sokoban, argv)

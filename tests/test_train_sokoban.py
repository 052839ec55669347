"""Test train_sokoban.py: gradients of the loss, resume, ranks, records, evaluation, mistakes."""

import functools
import importlib
import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from processes import ROOT, run_ranks
from small_runs import AGENT, agent_arguments, assert_equal, error_of, read_log, run_agent
from small_runs import StopAt

import convlstm
import boxoban
import sokoban
import train_sokoban
from configurator import configure
from run import LAST, PREV, load_checkpoint, settings_of

CONVGLU = {'arch': 'convglu', 'n_expert': 2}


def last_of(folder):
    return load_checkpoint(folder / LAST)


def write_levels(path, column):
    """Write twelve levels of one box, with the target in this column."""
    with open(path, 'w') as file:
        for i in range(12):
            rows = [list('#' + 8 * ' ' + '#') for _ in range(8)]
            rows[1][column] = '.'
            rows[4][2 + i % 4] = '$'
            rows[6][1 + i % 7] = '@'
            rows = [10 * '#', *map(''.join, rows), 10 * '#']
            file.write(f'; {i}\n' + '\n'.join(rows) + '\n\n')
    return path


# ---- sampling


def test_sampled_actions_follow_the_policy():
    logits = torch.tensor([[0.3, -1.0, 2.0, 0.0]])
    keys = sokoban.board_keys(5, sokoban.ACTION_STREAM, torch.arange(200))
    rng = sokoban.random_bits(keys, torch.arange(500)[:, None])
    actions = torch.stack([sokoban.sample_actions(logits.expand(200, 4), bits) for bits in rng])
    p = F.softmax(logits[0], -1)
    pairs = torch.bincount((actions[1:] * 4 + actions[:-1]).flatten(), minlength=16).view(4, 4)
    assert (pairs / actions[1:].numel() - p[:, None] * p).abs().max() < 0.005


@pytest.mark.parametrize('bits', [2**52, 2**53 - 1])
def test_a_certain_action_is_sampled_by_every_random_number(bits):
    logits = torch.tensor([[50.0, 0, 0, 0], [0, 0, 0, 50.0]])
    assert sokoban.sample_actions(logits, torch.full((2,), bits)).tolist() == [0, 3]


# ---- the loss


LOSS = {
    'gamma': 0.9,
    'gae_lambda': 0.8,
    'value_coef': 0.7,
    'entropy_coef': 0.3,
    'unroll': 5,
    'n_envs': 6,
    'time_limit': 120,
    'n_levels': 50,
    'n_boxes': 4,  # at least 12 moves: no level is solved by chance within two rollouts
    'max_moves': 40,
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


def make_agent(path, script=train_sokoban, **settings):
    """Set the trainer's settings; return an agent, its boards and a function that samples."""
    argv = agent_arguments(path / 'out', **LOSS, **settings)
    config = configure(vars(script), argv, quiet=True)
    sizes = {name: config[name] for name in train_sokoban.SIZES}
    torch.manual_seed(2)
    agent = convlstm.build_agent(convlstm.AgentConfig(**sizes))
    agent.logits.weight.data.mul_(100)  # neither a uniform policy nor an empty memory
    perturb(agent, 0.3)
    (levels, _), _ = boxoban.load_level_sets(config)
    boards = sokoban.SokobanEnv(levels, config['n_envs'], seed=1)
    rng = torch.Generator().manual_seed(2)

    def choose(logits, t):
        return torch.multinomial(F.softmax(logits, -1), 1, generator=rng).squeeze(1)

    return agent, boards, choose


def assert_same_loss(agent, loss, stats, expected):
    """Compare the statistics and the gradients of a loss with those of loss_of()."""
    params = [p for p in agent.parameters() if p.numel()]
    assert stats[:4].tolist() == pytest.approx([x.item() for x in expected], rel=1e-4)
    found = torch.autograd.grad(loss, params)
    for grad, other in zip(found, torch.autograd.grad(expected[0], params), strict=True):
        torch.testing.assert_close(grad, other, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize('settings', [{}, {'recurrent': False}, CONVGLU], ids=str)
def test_gradients_are_those_of_the_loss(tmp_path, settings):
    """The loss is computed from the observations of the rollout, the one after the last included.

    There are two rollouts of 5 steps and 6 boards. In both, an episode ends inside on board 0 and
    at the first step on board 2. In the first it also ends at the last step on board 1: no value
    follows, and the second rollout starts there from a zero state."""
    agent, boards, choose = make_agent(tmp_path, **settings)
    state = agent.init_state(6)
    near_the_limit = torch.tensor([120 - 3, 120 - 5, 120 - 1])
    for i in (0, 1):
        steps = boards.steps[:3]
        if i == 1:  # board 1 has just started
            near_the_limit = torch.where(steps == 0, 0, near_the_limit)
        steps.copy_(near_the_limit)
        starts = boards.steps == 0
        assert starts.any()
        observations = [boards.observe()]

        def play(boards, action, observations=observations):
            step, obs = train_sokoban.play_step(boards, action)
            observations.append(obs)
            return step, obs

        batch, new_state = train_sokoban.rollout(agent, boards, state, choose, play)
        loss, stats = train_sokoban.a2c_loss(batch)

        starts = torch.cat([starts[None], batch['done']])
        logits, values, _ = agent(torch.stack(observations), starts, state)
        logits = logits[:5]
        expected = loss_of(logits, values[:5], logits, values, batch)
        assert_same_loss(agent, loss, stats, expected)
        assert batch['done'][2, 0] and batch['done'][0, 2]
        assert batch['done'][4, 1] == (i == 0)
        state = new_state


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
    agent, boards, choose = make_agent(tmp_path, ppo, clip=0.1)
    state = agent.init_state(6)
    _, state = ppo.rollout(agent, boards, state, choose)  # so that the next starts with a state
    boards.steps[:2] = torch.tensor([120 - 3, 120 - 5])
    batch, _ = ppo.rollout(agent, boards, state, choose)
    part = torch.tensor([0, 1, 4])
    perturb(agent, 0.1, seed=1)
    loss, stats = ppo.ppo_loss(agent, batch, state, part)

    logits, values, _ = agent(batch['obs'], batch['start'], state)
    logits, values, logits_old = (x[:, part] for x in (logits, values, batch['logits']))
    values_old = torch.cat([batch['value'], batch['last'][None]])[:, part]
    minibatch = {name: batch[name][:, part] for name in ('reward', 'done', 'action')}
    expected = loss_of(logits, values, logits_old, values_old, minibatch, gain=ppo_gain)
    assert_same_loss(agent, loss, stats, expected)

    # the minibatch has both kinds of ratios, and ends of episodes
    p, p_old = (probabilities_of(x, minibatch['action']) for x in (logits, logits_old))
    clipped = is_clipped(p / p_old, gae(minibatch['reward'], minibatch['done'], values_old))
    assert 1 < clipped.sum() < 14 and minibatch['done'].sum() >= 2


def test_compiled_rules_play_the_same_episodes(tmp_path):
    """On a GPU, torch.compile traces the rules, sampling and advantages as whole graphs."""
    options = {'fullgraph': True, 'dynamic': False, 'backend': 'aot_eager'}
    results = []
    for wrap in (lambda f: f, functools.partial(torch.compile, **options)):
        torch.manual_seed(2)
        agent, boards, _ = make_agent(tmp_path)
        sample = wrap(sokoban.sample_actions)
        rng = sokoban.random_bits(boards.keys, torch.arange(5)[:, None])
        play, estimate = wrap(train_sokoban.play_step), wrap(train_sokoban.gae)
        choose = functools.partial(
            lambda x, t, sample, rng: sample(x, rng[t]), sample=sample, rng=rng
        )
        batch, _ = train_sokoban.rollout(agent, boards, agent.init_state(6), choose, play)
        loss, _ = train_sokoban.a2c_loss(batch, estimate)
        results.append([batch['action'], batch['return'], batch['done'], boards.grid, loss])
    for eager, traced in zip(*results, strict=True):
        torch.testing.assert_close(traced, eager)


# ---- runs


def replay(graphs, name, function, *args):
    """Do what kernels.graphed does, as far as a CPU can: from the fourth call on, call the function
    of the fourth call, and return its result in the same memory."""
    calls = replay.calls.setdefault(name, [])
    if len(calls) < 4:
        calls.append((function, args, function(*args)))
        return calls[-1][2]
    function, args, result = calls[3]
    return result.copy_(function(*args))


def test_captured_updates_use_the_same_memory(tmp_path, monkeypatch):
    """A run of replayed updates equals an eager one, bit for bit."""
    assert run_agent(tmp_path / 'eager') == 0
    replay.calls = {}
    monkeypatch.setattr(train_sokoban, 'graphed', replay)
    assert run_agent(tmp_path / 'graphs') == 0
    assert set(replay.calls) == {'rollout and backward', 'optimizer'}
    assert_equal(last_of(tmp_path / 'eager'), last_of(tmp_path / 'graphs'))
    assert_equal(read_log(tmp_path / 'eager'), read_log(tmp_path / 'graphs'))


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
    assert train_sokoban.returns_record([], [], 9)['episodic_return'] is None


def test_an_evaluation_off_the_grid_of_the_log_writes_no_returns(tmp_path):
    """And the lines on the grid are those of a run that is never evaluated between them."""
    assert run_agent(tmp_path / 'a', log_interval=4, eval_interval=100, time_limit=3) == 0
    assert run_agent(tmp_path / 'b', log_interval=4, eval_interval=3, time_limit=3) == 0
    a, b = read_log(tmp_path / 'a'), read_log(tmp_path / 'b')
    assert [r['step'] for r in b] == [0, 3, 4, 6, 8]
    for record in b:
        assert ('episodic_return' in record) == ('loss' in record) == (record['step'] in (4, 8))
    assert_equal([r for r in a if 'loss' in r and r['step'] == 4], [b[2]])
    assert b[4]['episodes'] == a[-1]['episodes'] > 0


UNUSUAL = {**CONVGLU, 'aggregation': 'softmax_l2', 'dtype': 'bfloat16'}
RESUMED = [{}, UNUSUAL, 'ppo', pytest.param({'recurrent': False}, marks=pytest.mark.long)]


@pytest.mark.parametrize('settings', RESUMED, ids=str)
def test_resume_is_bit_equal(tmp_path, settings, monkeypatch, request):
    """A run that stops in its third update and is resumed has the weights, environment, recurrent
    state, episodes and log of an uninterrupted one."""
    if settings == 'ppo':
        settings = {'script': request.getfixturevalue('ppo')}
    script = settings.get('script', train_sokoban)
    a, b = tmp_path / 'a', tmp_path / 'b'
    run_agent(a, **settings)
    with monkeypatch.context() as patch:
        patch.setattr(script, 'Stopper', lambda: StopAt(3))
        assert run_agent(b, **settings) == 143
    assert last_of(b)['step'] == 3
    torch.manual_seed(999)  # a new process has other random states
    arguments = [f'--out_dir={b}', '--resume=True']
    assert script.main(configure(vars(script), arguments, quiet=True)) == 0
    assert_equal(last_of(a), last_of(b))
    assert_equal(read_log(a), read_log(b))


def run_agent_as_rank(out, settings):
    return run_agent(out, **settings)


@pytest.mark.parametrize('ranks', [2, pytest.param(4, marks=pytest.mark.long)])
def test_ranks_train_as_one_does_but_for_rounding(tmp_path, ranks):
    """They play the same boards. One rank resumes what several have trained, and the other way
    round."""
    settings = {'total_steps': 12 * 30, 'eval_interval': 30, 'learning_rate': 1e-3}
    run_agent(tmp_path / 'one', **settings)
    assert run_ranks(ranks, run_agent_as_rank, tmp_path / 'several', settings) == ranks * [0]
    logs = read_log(tmp_path / 'one'), read_log(tmp_path / 'several')
    for expected, found in zip(*logs, strict=True):
        assert found.keys() == expected.keys()
        # the explained variance is a mean over the ranks' own
        numbers = {k: x for k, x in expected.items() if x is not None and k[:9] != 'explained'}
        found = {name: found[name] for name in numbers}
        assert found == pytest.approx(numbers, rel=1e-3, abs=1e-3)
    one, several = last_of(tmp_path / 'one'), last_of(tmp_path / 'several')
    for part in ('boards', 'state', 'model'):
        torch.testing.assert_close(several[part], one[part], rtol=1e-2, atol=1e-3)
    longer = {**settings, 'total_steps': 12 * 32, 'resume': True}
    assert run_agent(tmp_path / 'several', **longer) == 0
    assert run_ranks(ranks, run_agent_as_rank, tmp_path / 'one', longer) == ranks * [0]
    by_one, by_several = (read_log(tmp_path / name)[-1] for name in ('several', 'one'))
    for name in ('loss', 'value_loss', 'entropy'):
        assert by_several[name] == pytest.approx(by_one[name], rel=1e-3), name


def test_a_non_finite_loss_ends_the_run_and_keeps_the_last_good_checkpoint(tmp_path):
    assert run_agent(tmp_path, total_steps=48) == 0
    saved = (tmp_path / LAST).read_bytes()
    assert run_agent(tmp_path, total_steps=9600, resume=True, learning_rate=1e38) == 1
    assert (tmp_path / LAST).read_bytes() == saved


def test_a_longer_run_keeps_the_last_evaluation_of_the_shorter(tmp_path):
    """The shorter run ended at update 3, which is no multiple of eval_interval."""
    settings = {'n_envs': 4, 'unroll': 3, 'eval_interval': 2, 'log_interval': 100}
    assert run_agent(tmp_path, total_steps=36, **settings) == 0
    assert run_agent(tmp_path, total_steps=72, resume=True, **settings) == 0
    assert [r['step'] for r in read_log(tmp_path) if 'eval_return' in r] == [0, 2, 3, 4, 6]


def test_the_best_agent_is_that_of_the_highest_return_on_the_same_levels(tmp_path, monkeypatch):
    """Evaluations of a resumed run count together. A return on other levels does not count."""
    returns = iter([9.0, 1.0, 3.0, 2.0, 2.5])

    def evaluate(policy, *args, **options):
        if policy is sokoban.RANDOM:
            return {'return': 0.0, 'solve_rate': 0.0}
        return {'return': next(returns), 'solve_rate': 0.0}

    monkeypatch.setattr(train_sokoban, 'evaluate', evaluate)
    assert run_agent(tmp_path, total_steps=96) == 0  # evaluated after updates 0, 4 and 8
    assert settings_of(tmp_path / 'best')['step'] == 8
    assert run_agent(tmp_path, total_steps=144, resume=True) == 0
    assert settings_of(tmp_path / 'best')['step'] == 8
    assert run_agent(tmp_path, total_steps=192, resume=True, eval_games=5) == 0
    assert settings_of(tmp_path / 'best')['step'] == 16


def test_init_from_adopts_the_sizes_that_the_user_does_not_set(tmp_path):
    assert run_agent(tmp_path / 'a', **CONVGLU, total_steps=12, eval_interval=1) == 0
    settings = {name: x for name, x in AGENT.items() if name not in ('n_embd', 'head_dim')}
    settings |= {'n_layer': 1, 'init_from': tmp_path / 'a', 'out_dir': tmp_path / 'b'}
    settings |= {'total_steps': 12, 'learning_rate': 0}
    argv = [f'--{name}={x}' for name, x in settings.items()]
    assert train_sokoban.main(configure(vars(train_sokoban), argv, quiet=True)) == 0
    config = settings_of(tmp_path / 'b')
    assert (config['arch'], config['n_layer'], config['n_embd']) == ('convglu', 1, 4)
    old, new = last_of(tmp_path / 'a')['model'], last_of(tmp_path / 'b')['model']
    assert all(torch.equal(p, old[name]) for name, p in new.items())


# ---- mistakes


def test_resume_refuses_other_settings_other_levels_and_parts_that_do_not_fit(tmp_path, capfd):
    levels = write_levels(tmp_path / 'x.txt', column=3)
    out = tmp_path / 'run'
    settings = {'split': levels, 'total_steps': 24}
    run_agent(out, **settings)
    saved = last_of(out)

    def assert_refused(message, **changes):
        argv = agent_arguments(out, resume=True, **{**settings, **changes})
        error = error_of(capfd, train_sokoban, argv)
        assert message in error, error

    assert_refused('was trained with n_levels = 20', n_levels=60)
    assert_refused('was trained with seed = 1337', seed=7)
    one_board = {**saved['boards'], 'agent': saved['boards']['agent'][:1]}
    for changes, message in (
        ({'boards': one_board}, 'damaged, or from another model'),
        ({'state': []}, 'damaged, or from another model'),
        ({'step': None}, 'damaged, cut short or not a checkpoint'),
    ):
        torch.save(saved | changes, out / LAST)
        assert_refused(message)
    torch.save(saved, out / LAST)
    write_levels(levels, column=4)
    assert_refused('was trained on other levels')


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
    ({'learning_rate': -1.0}, 'learning_rate = -1.0'),
    ({'levels_dir': '/nonexistent', 'split': 'hard'}, '--split=hard --download=True'),
    ({'resume': True}, 'out: holds no trained run'),
    ({'levels': 'generated'}, 'levels is a setting of --eval_only'),
    ({'residual': 'shared'}, "residual = 'shared' is for arch = 'convglu'"),
    ({'radius': 0, 'aggregation': 'mean'}, "radius = 0 needs aggregation = 'sqrt_sum'"),
    ({'init_from': 'nowhere'}, 'nowhere/best/config.json: cannot be read'),
]


@pytest.mark.parametrize('settings, message', MISTAKES, ids=str)
def test_mistakes_are_refused_in_one_line(tmp_path, settings, message, capfd):
    error = error_of(capfd, train_sokoban, agent_arguments(tmp_path / 'out', **settings))
    assert message in error, error


def test_an_error_in_an_edit_keeps_its_traceback(tmp_path, monkeypatch):
    def edited(*args):
        raise ValueError('in an edit')

    monkeypatch.setattr(train_sokoban, 'build_agent', edited)
    with pytest.raises(ValueError, match='in an edit'):
        run_agent(tmp_path / 'out')


# ---- the files of a run, evaluation


@pytest.fixture(scope='module')
def finished_run(tmp_path_factory):
    """Return the folder of a run. Beside it lies a file of twelve levels, x.txt."""
    folder = tmp_path_factory.mktemp('agent')
    write_levels(folder / 'x.txt', column=3)
    settings = {'recurrent': False, 'n_layer': 1, 'plot': True, 'time_limit': 5}
    assert run_agent(folder / 'run', **settings) == 0
    return folder / 'run'


def test_a_run_writes_its_log_config_curve_and_checkpoints(finished_run):
    log = read_log(finished_run)
    assert [r['step'] for r in log] == [0, 2, 4, 6, 8] and log[-1]['env_steps'] == 96
    assert [r['step'] for r in log if 'eval_solve_rate' in r] == [0, 4, 8]
    assert 'random_solve_rate' in log[0] and log[0]['eval_steps'] <= 5
    keys = 'episodes episodic_return return_100 return_1000 solve_rate_100'.split()
    assert {*keys, 'entropy', 'grad_norm', 'explained_variance'} <= log[-1].keys()
    files = {'config.json', 'log.jsonl', 'curve.png', LAST, PREV, 'best'}
    assert files <= {path.name for path in finished_run.iterdir()}


def evaluate_only(folder, *argv):
    arguments = [f'--out_dir={folder}', '--eval_only=True', '--device=cpu', *argv]
    return train_sokoban.main(configure(vars(train_sokoban), arguments, quiet=True))


@pytest.mark.parametrize('folder', ['.', 'best'])
def test_eval_only_evaluates_a_run_or_an_export_on_a_file_of_levels(finished_run, capfd, folder):
    """It has the time limit of the run unless that is set, and changes no other file."""
    folder = finished_run / folder
    files = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    levels = f'--levels={finished_run.parent / "x.txt"}'
    for argv, limit in (([], 5), (['--time_limit=3'], 3)):
        assert evaluate_only(folder, levels, *argv) == 0
        (file,) = folder.glob('eval_*-x.json')
        report = json.loads(file.read_text())
        assert report['n'] == 12 and report['time_limit'] == limit >= report['steps']
        line = f'solved {report["solve_rate"]:.1%} of 12 levels'
        assert line in capfd.readouterr().out.splitlines()[-1]
    assert files == {path: path.read_bytes() for path in files}
    (folder / 'other').mkdir()
    shutil.copy(finished_run.parent / 'x.txt', folder / 'other')
    assert evaluate_only(folder, f'--levels={folder}/other/x.txt') == 0
    (other,) = {*folder.glob('eval_*-x.json')} - {file}  # another file of the same name
    other.unlink()


def test_eval_only_repeats_the_last_evaluation(finished_run, capfd, monkeypatch):
    """By default it evaluates on the levels of the run. A result that cannot be written is printed
    all the same."""

    def fail(*args):
        raise OSError(30, 'Read-only file system')

    monkeypatch.setattr(train_sokoban, 'write_json', fail)
    assert evaluate_only(finished_run) == 0
    out, error = capfd.readouterr()
    assert f'mean return {read_log(finished_run)[-1]["eval_return"]:.2f}' in out
    assert error.count('\n') == 1 and 'Read-only' in error


def test_eval_only_takes_the_dtype_and_compile_from_the_run(tmp_path, monkeypatch):
    assert run_agent(tmp_path, total_steps=12, dtype='bfloat16', time_limit=5) == 0
    found = []

    def evaluate(model, *args, **options):
        found.append((model.config.dtype, train_sokoban.compile))
        return {'solve_rate': 0.0, 'return': 0.0, 'steps': 0.0}

    monkeypatch.setattr(train_sokoban, 'evaluate', evaluate)
    for argv in ([], ['--dtype=float32']):
        assert evaluate_only(tmp_path, *argv) == 0
    assert found == [('bfloat16', False), ('float32', False)]


def test_evaluation_does_not_depend_on_the_size_of_its_batches(finished_run, monkeypatch):
    levels = f'--levels={finished_run.parent / "x.txt"}'
    reports = []
    for batch in (5, 100):
        monkeypatch.setattr(sokoban, 'EVALUATION_BATCH', batch)
        assert evaluate_only(finished_run, levels) == 0
        (file,) = finished_run.glob('eval_*-x.json')
        reports.append(json.loads(file.read_text()))
    assert reports[0] == reports[1] and np.isfinite(reports[0]['return'])

"""train_sokoban.py as a user starts it: the update against brute force, resume, ranks, evaluation, mistakes, configs."""

import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import forks
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from test_train import same

import convlstm
import kernels
import play_sokoban
import sokoban
import train_sokoban
from checkpoint import load_checkpoint
from configurator import configure

ROOT = Path(__file__).resolve().parent.parent
LEVELS = ROOT.parent / 'shared' / 'levels'
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
    'total_steps': 96,
    'eval_interval': 4,
    'eval_games': 6,
    'log_interval': 2,
    'compile': False,
    'dtype': 'float32',
    'device': 'cpu',
    'threads': 1,
    'learning_rate': 1e-2,
}
IGNORED = (
    'env_steps_per_s',
    'seconds',
    'clock',
    'config',
    'python',
    'numpy',
)  # times; random states that no run draws from
needs_jumanji = pytest.mark.skipif(
    not __import__('importlib.util').util.find_spec('jumanji'), reason='jumanji is not installed'
)


def arguments(out, *configs, **settings):
    return [*configs, *(f'--{k}={v}' for k, v in {**TINY, 'out_dir': out, **settings}.items())]


def prepare(out, **settings):
    """The settings in place, and a run that has not begun."""
    config = configure(vars(train_sokoban), arguments(out, **settings), quiet=True)
    return train_sokoban.make_run(config)


def run(out, *configs, **settings):
    """A whole run in this process: the exit status."""
    return train_sokoban.train(
        configure(vars(train_sokoban), arguments(out, *configs, **settings), quiet=True)
    )


def stop_after_three(monkeypatch, out, **settings):
    """A run that is told to stop in its third update, and saves."""
    real, count = train_sokoban.update, 0

    def update(*args):
        nonlocal count
        count += 1
        return *real(*args)[:2], count == 3

    with monkeypatch.context() as patch:
        patch.setattr(train_sokoban, 'update', update)
        assert run(out, **settings) == 143


def start(out, *, ranks=1, **settings):
    command = [sys.executable] if ranks == 1 else [sys.executable, f'--ranks={ranks}']
    return forks.Popen(
        [*command, 'train_sokoban.py', *arguments(out, **settings)],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, 'OMP_NUM_THREADS': '1'},
    )


def read_log(out):
    with open(Path(out) / 'log.jsonl') as f:
        return [{k: v for k, v in json.loads(line).items() if k not in IGNORED} for line in f]


def checkpoint(out, name='ckpt_last.pt'):
    """A checkpoint without the times, which lie inside `record` as well."""
    saved = load_checkpoint(Path(out) / name)
    saved['record'] = {k: v for k, v in saved['record'].items() if k not in IGNORED}
    return {k: v for k, v in saved.items() if k not in IGNORED}


MADE, generate = {}, sokoban.generate


@pytest.fixture(autouse=True)
def levels_are_generated_once(monkeypatch):
    """Most runs here play the same ones, and take a third of their time to make them."""

    def once(*args, **more):
        key = tuple(x.tobytes() if isinstance(x, np.ndarray) else x for x in (*args, *more.items()))
        if key not in MADE:
            MADE[key] = generate(*args, **more)
        levels, solutions = MADE[key]
        return levels.copy(), solutions

    monkeypatch.setattr(sokoban, 'generate', once)


# ----------------------------------------------------------------------------- the update


def test_gae_is_the_sum(tmp_path):
    """Equation 16 of Schulman et al. as a double sum, with ends inside the unroll and at both borders of it."""
    prepare(tmp_path, gamma=0.9, gae_lambda=0.8)
    g = torch.Generator().manual_seed(0)
    T, B = 7, 5
    reward, value, last = (
        torch.randn(*shape, generator=g, dtype=torch.float64) for shape in ((T, B), (T, B), (B,))
    )
    done = torch.rand(T, B, generator=g) < 0.3
    done[0, 0] = done[-1, 1] = done[2, 2] = done[3, 2] = True
    done[:, 4] = False
    ours = train_sokoban.gae(reward, done, value, last)
    for b in range(B):
        for t in range(T):
            total, factor = 0.0, 1.0
            for k in range(t, T):
                after = 0.0 if done[k, b] else (last[b] if k == T - 1 else value[k + 1, b])
                total += factor * (reward[k, b] + 0.9 * after - value[k, b])
                if done[k, b]:
                    break
                factor *= 0.9 * 0.8
            assert abs(ours[t, b] - total) < 1e-12


def test_sampling_follows_the_policy():
    """Frequencies of many draws, by inversion, and independence of consecutive ones."""
    logits = torch.tensor([[0.0, 1.0, -1.0, 0.5]]).expand(200, 4)
    board = torch.arange(200)
    actions = torch.stack(
        [
            train_sokoban.sample(logits, sokoban.draw(7, 1, board, torch.tensor(t)))
            for t in range(500)
        ]
    )
    p, counts = F.softmax(logits[0], -1), torch.bincount(actions.flatten(), minlength=4)
    assert ((counts / actions.numel() - p).abs() < 4 * (p * (1 - p) / actions.numel()).sqrt()).all()
    pairs = (
        torch.bincount((actions[1:] * 4 + actions[:-1]).flatten(), minlength=16).view(4, 4)
        / actions[1:].numel()
    )
    assert (pairs - p[:, None] * p).abs().max() < 0.005
    one_sided = torch.tensor([[50.0, 0, 0, 0], [0, 0, 0, 50.0]])
    for u in (2**52, 2**53 - 1):
        assert train_sokoban.sample(one_sided, torch.full((2,), u)).tolist() == [0, 3]


def test_sampling_survives_nan():
    assert train_sokoban.sample(
        torch.full((2, 4), math.nan), torch.tensor([0, 2**52])
    ).tolist() in ([0, 0], [3, 3])


@pytest.mark.parametrize(
    'settings',
    [
        {},
        {'reuse': False},
        {'recurrent': False},
        {'arch': 'convglu'},
        {'arch': 'convglu', 'reuse': False},
    ],
    ids=str,
)
def test_gradient_is_the_losses(tmp_path, settings):
    """backward() against the loss written out term by term, with the network run again from the rollout's own observations, the one
    after the last included. Two rollouts of 5 steps and 6 boards; in both an episode ends inside (board 0), one by the last step
    (board 1: the next rollout starts anew, and there is no value to come) and one by the first (board 2)."""
    run = prepare(
        tmp_path,
        gamma=0.9,
        gae_lambda=0.8,
        value_coef=0.7,
        entropy_coef=0.3,
        unroll=5,
        n_envs=6,
        **settings,
    )
    with torch.no_grad():  # a policy and a memory with some opinion
        run.model.logits.weight.mul_(100)
        for p in run.model.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
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
        gradients = [p.grad.clone() for p in run.model.parameters() if p.numel()]
        run.optimizer.zero_grad()
        wanted = written_out_loss(
            run.model, torch.stack(seen), torch.cat([first[None], done]), state, batch
        )
        wanted[0].backward()
        assert stats[:4].tolist() == pytest.approx([x.item() for x in wanted], rel=1e-4)
        for mine, p in zip(
            gradients, (p for p in run.model.parameters() if p.numel()), strict=True
        ):
            torch.testing.assert_close(mine, p.grad, rtol=1e-3, atol=1e-5)
        first = done[-1]


def written_out_loss(model, obs, start, state, batch):
    """obs (T+1, B, ...), start (T+1, B) -> loss, policy loss, value loss, entropy, for the settings of the test above."""
    logits, value, _ = model(obs, start, state)
    reward, done, action = batch['reward'], batch['done'], batch['action']
    T, B = done.shape
    policy, error, entropy = 0.0, 0.0, 0.0
    for b in range(B):
        advantage = 0.0
        for t in reversed(range(T)):
            now, to_come = value[t, b].detach(), 0.0 if done[t, b] else value[t + 1, b].detach()
            advantage = (
                reward[t, b] + 0.9 * to_come - now + (0.0 if done[t, b] else 0.9 * 0.8 * advantage)
            )
            pi = F.softmax(logits[t, b], -1)
            policy = policy - torch.log(pi[action[t, b]]) * advantage / (T * B)
            error = error + (value[t, b] - (now + advantage)) ** 2 / (T * B)
            entropy = entropy - (pi * torch.log(pi)).sum() / (T * B)
    return policy + 0.7 * error - 0.3 * entropy, policy, error, entropy


def test_learning_rate_and_clipping(tmp_path):
    """Linear to 0; the norm reported is the one before clipping, and an update moves no weight by more than Adam can."""
    run = prepare(tmp_path, total_steps=4 * 3 * 10, learning_rate=0.01, grad_clip=1e-3)
    for step in range(3):
        run.step = step
        before = [p.clone() for p in run.model.parameters()]
        stats, _, _ = train_sokoban.update(run, False)
        assert run.optimizer.param_groups[0]['lr'].item() == pytest.approx(0.01 * (1 - step / 10))
        assert stats['grad_norm'] > 1e-3 and torch.cat(
            [p.grad.flatten() for p in run.model.parameters()]
        ).norm() == pytest.approx(1e-3, rel=1e-3)
        assert (
            max((p - q).abs().max() for p, q in zip(run.model.parameters(), before, strict=True))
            <= 0.0101
        )


@pytest.mark.parametrize('order', ['random', 'sequence'])
def test_compiled_step_is_the_eager_one(order):
    """One graph without breaks, as train_sokoban.py compiles it on a GPU; bit-equal, in the same memory. (aot_eager: 2 s; inductor takes 15 to
    30 s of one core to compile it, and test_gpu.py runs it.)"""
    levels = sokoban.generate(60, 1, 3, max_moves=6)[0]
    eager, compiled = (sokoban.SokobanEnv(levels, 32, seed=5, order=order) for _ in range(2))
    play = torch.compile(
        train_sokoban.play_step, fullgraph=True, dynamic=False, backend='aot_eager'
    )
    before, ended, solved = [getattr(compiled, name).data_ptr() for name in compiled.STATE], 0, 0
    for i in range(400):
        logits = torch.randn(32, 4, generator=torch.Generator().manual_seed(i))
        u = sokoban.draw(1, 1, eager.board, torch.tensor(i))
        mine, wanted = play(compiled, logits, u), train_sokoban.play_step(eager, logits, u)
        same(mine, wanted)
        same(compiled.state_dict(), eager.state_dict())
        ended, solved = ended + int(mine['done'].sum()), solved + int(mine['solved'].sum())
    assert (
        before == [getattr(compiled, name).data_ptr() for name in compiled.STATE]
        and solved > 20
        and ended - solved > 20
    ), (ended, solved)


def test_what_a_gpu_compiles(tmp_path, monkeypatch):
    """Environment and advantages go through `compiled` there, once ahead of the first update, which leaves the boards as they were. ('cpu:0'
    stands for a GPU, and nothing is really compiled.)"""
    calls, results = [], []
    monkeypatch.setattr(convlstm, 'compiled', lambda function: function)
    monkeypatch.setattr(
        train_sokoban,
        'compiled',
        lambda function: lambda *args: calls.append(function.__name__) or function(*args),
    )
    for where in ('cpu', 'cpu:0'):
        run = prepare(tmp_path)
        run.device, run.model.config.path = where, 'compiled'
        before = run.env.state_dict()
        train_sokoban.warm_up(run)
        run.model.zero_grad(set_to_none=True)
        same(run.env.state_dict(), before)
        results.append([train_sokoban.update(run, False)[:2] for _ in range(2)])
    same(*results)
    assert calls == 3 * ['play_step', 'play_step', 'play_step', 'gae']


def test_convolutions_are_tuned_unless_deterministic(tmp_path, monkeypatch):
    for deterministic in (True, False):
        monkeypatch.setattr(torch.backends.cudnn, 'deterministic', deterministic)
        prepare(tmp_path)
        assert torch.backends.cudnn.benchmark is not deterministic


# ----------------------------------------------------------------------------- runs


def test_log_and_checkpoint(tmp_path):
    assert run(tmp_path, plot=True) == 0
    log = read_log(tmp_path)
    assert [r['step'] for r in log] == [0, 2, 4, 6, 8] and log[-1]['env_steps'] == 96
    assert [r['step'] for r in log if 'eval_solve_rate' in r] == [
        0,
        4,
        8,
    ] and 'random_solve_rate' in log[0]
    line = json.loads((tmp_path / 'log.jsonl').read_text().splitlines()[-1])
    assert {
        'episodic_return',
        'return_100',
        'return_1000',
        'solve_rate_100',
        'entropy',
        'value_loss',
        'explained_variance',
        'grad_norm',
        'lr',
        'env_steps_per_s',
        'seconds',
        'episodes',
    } <= line.keys()
    assert {'config.json', 'ckpt_last.pt', 'ckpt_prev.pt', 'ckpt_best.pt', 'curve.png'} <= set(
        os.listdir(tmp_path)
    )
    assert Image.open(tmp_path / 'curve.png').size[0] > 500


def test_episodes_are_counted(tmp_path):
    """The returns of the log against the environment's own rewards, over updates and log lines."""
    run = prepare(tmp_path, unroll=40, n_envs=4)
    games = []
    running = [0.0] * 4
    for i in range(8):
        stats, played, _ = train_sokoban.update(run, False)
        train_sokoban.count_games(run, played, stats)
        for reward, done, solved in played:
            for b in range(4):
                running[b] += reward[b].item()
                if done[b]:
                    games.append((running[b], solved[b].item()))
                    running[b] = 0.0
        run.step += 1
        run.seconds += 1.0
        if i == 3:
            assert train_sokoban.make_record(run)['episodes'] == len(games)
            before = len(games)
    record = train_sokoban.make_record(run)
    assert len(games) > before and record['episodes'] == len(games) - before
    assert record['episodic_return'] == pytest.approx(
        np.mean([g[0] for g in games[before:]]), abs=1e-4
    )
    assert record['return_1000'] == pytest.approx(np.mean([g[0] for g in games]), abs=1e-4)
    assert record['solve_rate_1000'] == pytest.approx(np.mean([g[1] for g in games]))


def test_returns_are_blank_until_every_board_has_ended_an_episode(tmp_path):
    """The first games to end are the short ones, which are solved: no figure is made of them."""
    run = prepare(tmp_path, unroll=40, n_envs=8)
    keys, ended = (
        ('episodic_return', 'return_100', 'return_1000', 'solve_rate_100', 'solve_rate_1000'),
        torch.zeros(8),
    )
    for i in range(3):
        stats, played, _ = train_sokoban.update(run, False)
        train_sokoban.count_games(run, played, stats)
        ended += played[:, 1].sum(0)
        run.step, run.seconds = run.step + 1, run.seconds + 1.0
        record = train_sokoban.make_record(run)
        if i < 2:  # 40 and 80 steps
            assert len(run.recent) > 0 and ended.min() == 0 and {record[k] for k in keys} == {None}
    assert ended.min() >= 1 and None not in {record[k] for k in keys}  # 120, the time limit
    assert 'return n/a' in train_sokoban.dense_line({**record, 'return_100': None})


def test_the_number_of_levels_in_the_first_lines_is_the_number_played(tmp_path):
    np.save(tmp_path / 'eight.npy', sokoban.generate(8, 1, seed=3, max_moves=6)[0])
    run = prepare(tmp_path / 'a', eval_split=tmp_path / 'eight.npy', eval_games=3)
    assert (
        len(run.held_out) == 3
        and run.sources[1] == f'the first 3 of 8 levels of {tmp_path}/eight.npy'
    )
    run = prepare(tmp_path / 'a', eval_split=tmp_path / 'eight.npy', eval_games=9)
    assert len(run.held_out) == 8 and run.sources[1] == f'8 levels of {tmp_path}/eight.npy'


UNUSUAL = {
    'arch': 'convglu',
    'n_expert': 2,
    'aggregation': 'softmax_l2',
    'reuse': False,
    'dtype': 'bfloat16',
}


@pytest.mark.parametrize(
    'settings',
    [
        {},
        UNUSUAL,
        pytest.param({'recurrent': False}, marks=pytest.mark.long),
        pytest.param({'radius': 1, 'n_expert': 2}, marks=pytest.mark.long),
        pytest.param(
            {'env': 'jumanji', 'n_boxes': 4, 'max_moves': 120},
            marks=[needs_jumanji, pytest.mark.long],
        ),
    ],
    ids=str,
)
def test_resume_is_bit_equal(tmp_path, settings, monkeypatch):
    """2N updates = N, stop, N: weights, environment, recurrent state, episodes and log."""
    a, b = tmp_path / 'a', tmp_path / 'b'
    run(a, **settings)
    stop_after_three(monkeypatch, b, **settings)
    assert load_checkpoint(b / 'ckpt_last.pt')['step'] == 3
    torch.manual_seed(999)  # whatever the new process starts with
    assert run(b, resume=True, **settings) == 0
    same(checkpoint(a), checkpoint(b))
    same(read_log(a), read_log(b))


def test_stop_and_resume_as_processes(tmp_path):
    """SIGTERM saves and leaves; kill -9 in mid-run loses nothing that was saved; both go on like a run that was never stopped."""
    long = {'total_steps': 12 * 120, 'eval_interval': 20}
    run(tmp_path / 'a', **long)
    process = start(tmp_path / 'b', **long)
    for how, file in ((signal.SIGTERM, 'ckpt_last.pt'), (signal.SIGKILL, 'ckpt_prev.pt')):
        deadline = time.time() + 600
        while (
            not (tmp_path / 'b' / file).exists()
            and time.time() < deadline
            and process.poll() is None
        ):
            time.sleep(0.01)
        process.send_signal(how)
        out, err = process.communicate()
        assert process.returncode in ((143,) if how == signal.SIGTERM else (-9,)), (out, err)
        process = start(tmp_path / 'b', resume=True, **long)
    out, err = process.communicate()
    assert process.returncode == 0, err
    same(checkpoint(tmp_path / 'a'), checkpoint(tmp_path / 'b'))
    same(read_log(tmp_path / 'a'), read_log(tmp_path / 'b'))


@pytest.mark.parametrize('ranks', [2, 4])
def test_ranks(tmp_path, ranks):
    """Several ranks play the boards of one: same levels, same actions, same updates. And a run may go on with another number of ranks."""
    settings = {'total_steps': 12 * 30, 'eval_interval': 30, 'learning_rate': 1e-3}
    run(tmp_path / 'one', **settings)
    process = start(tmp_path / 'more', ranks=ranks, **settings)
    out, err = process.communicate()
    assert process.returncode == 0, err
    for a, b in zip(read_log(tmp_path / 'one'), read_log(tmp_path / 'more'), strict=True):
        assert a['env_steps'] == b['env_steps'] and a.get('episodes') == b.get('episodes')
        for key in a.keys() - {'steps'}:
            assert (a[key] is None) == (b[key] is None) and (
                a[key] is None or a[key] == pytest.approx(b[key], rel=1e-3, abs=1e-3)
            ), (a['step'], key)
    one, more = (load_checkpoint(tmp_path / name / 'ckpt_last.pt') for name in ('one', 'more'))
    same(one['env'], more['env'])
    for a, b in zip(
        [*one['state'], *one['model'].values()],
        [*more['state'], *more['model'].values()],
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3)
    assert run(tmp_path / 'more', resume=True, **{**settings, 'total_steps': 12 * 32}) == 0


def test_resume_with_other_intervals(tmp_path, monkeypatch):
    """The stop's own step gets its line where the new intervals want one; no step has two."""
    stop_after_three(monkeypatch, tmp_path)
    assert run(tmp_path, resume=True, log_interval=3, eval_interval=3, total_steps=90) == 0
    log = read_log(tmp_path)
    assert [(r['step'], r['env_steps']) for r in log] == [
        (0, 0),
        (2, 24),
        (3, 36),
        (6, 72),
        (8, 96),
    ]
    assert [r['step'] for r in log if 'eval_return' in r] == [0, 3, 6, 8]


def test_lost_log_and_trackers(tmp_path, monkeypatch):
    """A resumed run whose log is gone starts a new one and draws it; TensorBoard gets numbers only."""
    from types import ModuleType

    given = []

    class SummaryWriter:
        def __init__(self, folder):
            pass

        def add_scalar(self, name, value, step):
            given.append(float(value))

        def close(self):
            pass

    module = ModuleType('torch.utils.tensorboard')
    module.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, 'torch.utils.tensorboard', module)
    monkeypatch.setattr(train_sokoban.checkpoint, 'need_packages', lambda **asked: None)
    run(tmp_path, total_steps=24, tensorboard=True, log_interval=1)  # no episode ends so early
    assert len(given) > 10
    (tmp_path / 'log.jsonl').unlink()
    assert run(tmp_path, resume=True, plot=True) == 0
    assert (tmp_path / 'curve.png').exists() and read_log(tmp_path)[0]['step'] == 2


def test_graphed_calls(monkeypatch):
    """Three calls as they are, one capture, then replays alone; one pool for all. (The real thing: test_gpu.py.)"""
    events = []

    class Graph:
        def replay(self):
            events.append('replay')

        def pool(self):
            return 'pool of the first'

    class Capture:
        def __init__(self, graph, pool, capture_error_mode):
            events.append(f'capture, pool {pool}')

        def __enter__(self):
            pass

        def __exit__(self, *error):
            pass

    monkeypatch.setattr(torch.cuda, 'CUDAGraph', Graph)
    monkeypatch.setattr(torch.cuda, 'graph', Capture)
    graphs = {}
    for call in range(6):
        for name in 'ab':
            assert kernels.graphed(graphs, name, lambda x: events.append('run') or x, call) == (
                call if call < 3 else 3
            )
    assert (
        events
        == ['run'] * 6
        + [
            'capture, pool None',
            'run',
            'replay',
            'capture, pool pool of the first',
            'run',
            'replay',
        ]
        + ['replay'] * 4
    )


def test_not_finite(tmp_path, capsys):
    """A loss that is not finite ends the run with status 1; the last good checkpoint stays."""
    assert run(tmp_path, total_steps=48) == 0
    saved = (tmp_path / 'ckpt_last.pt').read_bytes()
    assert run(tmp_path, total_steps=9600, resume=True, learning_rate=1e38) == 1
    assert (
        'not finite' in capsys.readouterr().out
        and (tmp_path / 'ckpt_last.pt').read_bytes() == saved
    )


# ----------------------------------------------------------------------------- evaluation


class Scripted:
    """Plays given actions: level i's action at step t is actions[i][t]; then 0."""

    def __init__(self, actions):
        self.actions, self.first, self.t = actions, 0, 0

    def init_state(self, N):
        self.t = 0
        return ()

    def prepare(self):
        return None

    def act(self, w, obs, start, state):
        wanted = [int(a[self.t]) if self.t < len(a) else 0 for a in self.actions]
        self.t += 1
        return F.one_hot(torch.tensor(wanted), 4).float(), None, ()


def test_play_counts_what_is_played():
    """The generator's own solutions solve everything, in their own number of steps; a policy that never moves solves nothing."""
    levels, solutions = sokoban.generate(40, 2, seed=3)
    result = play_sokoban.play(Scripted(solutions), levels, 'cpu')
    assert result['solved'].all() and result['steps'].tolist() == [len(s) for s in solutions]
    assert result['return'].tolist() == pytest.approx(
        [12 - 0.1 * len(s) for s in solutions], abs=1e-3
    )
    half = [s if i % 2 else [] for i, s in enumerate(solutions)]
    result = play_sokoban.play(Scripted(half), levels, 'cpu')
    assert (
        result['solved'].tolist() == [bool(i % 2) for i in range(40)]
        and (result['steps'][::2] == 120).all()
    )


def test_play_does_not_depend_on_batches(tmp_path, monkeypatch):
    run = prepare(tmp_path)
    levels = sokoban.generate(11, 1, seed=3)[0]
    results = []
    for boards in (256, 4, 3):
        monkeypatch.setattr(play_sokoban, 'BOARDS', boards)
        results.append(
            [
                play_sokoban.play(run.model, levels, 'cpu')['return'],
                play_sokoban.play(run.model, levels, 'cpu', seed=5)['actions'],
            ]
        )
    for result in results[1:]:
        torch.testing.assert_close(result[0], results[0][0])
        assert torch.equal(result[1], results[0][1]) and len(result[1]) == 11


def test_eval_only(tmp_path, capsys):
    """JSON and GIFs of a file of levels; the run's own files stay as they are."""
    run(tmp_path, recurrent=False)
    files = {f: (tmp_path / f).read_bytes() for f in os.listdir(tmp_path)}
    levels, _ = sokoban.generate(5, 1, seed=11, max_moves=6)
    np.save(tmp_path / 'mine.npy', levels)
    assert run(tmp_path, recurrent=False, eval_only=True, levels=tmp_path / 'mine.npy') == 0
    report = json.loads((tmp_path / 'eval_mine.json').read_text())
    assert (
        report['n'] == 5
        and 0 <= report['solve_rate'] <= 1
        and 1 <= report['mean_steps'] <= 120
        and report['env_steps'] == 96
    )
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == report
    shown = {f for f in os.listdir(tmp_path) if f.endswith('.gif')}
    assert (
        shown
        == {
            f'eval_mine_{x}.gif'
            for x, there in (
                ('solved', report['solve_rate'] > 0),
                ('failed', report['solve_rate'] < 1),
            )
            if there
        }
        != set()
    )
    assert all(Image.open(tmp_path / name).size == (240, 240) for name in shown)
    assert files == {f: (tmp_path / f).read_bytes() for f in files}
    assert run(tmp_path, recurrent=False, eval_only=True, best=True) == 0
    report = json.loads((tmp_path / 'eval_generated.json').read_text())
    assert report['n'] == 6 and report['checkpoint'].endswith('ckpt_best.pt')


def test_eval_only_plays_what_is_named(tmp_path, capfd, monkeypatch):
    """A split that is not there is not replaced by generated levels."""
    run(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        run(tmp_path, eval_only=True, levels='unfiltered-test')
    stderr = capfd.readouterr().err
    assert (
        'data/boxoban: no such folder: `python sokoban.py --split=unfiltered-test --download=True` fetches'
        in stderr
        and not list(tmp_path.glob('eval_*'))
    )


def test_report_shows_a_solved_and_a_failed_level(tmp_path):
    levels, solutions = sokoban.generate(6, 1, seed=3)
    record = play_sokoban.report(
        Scripted([s if i in (2, 4) else [] for i, s in enumerate(solutions)]),
        levels,
        'x',
        'cpu',
        tmp_path,
        {},
    )
    longest = max((2, 4), key=lambda i: len(solutions[i]))
    assert (
        record['solved_level'] == longest
        and record['failed_level'] == 0
        and record['solve_rate'] == pytest.approx(2 / 6)
    )
    assert Image.open(tmp_path / 'eval_x_solved.gif').n_frames == len(solutions[longest]) + 1


def test_compare(tmp_path, monkeypatch, capfd):
    """Two runs beside each other; a folder without a run is named."""
    for name, recurrent in (('a', True), ('b', False)):
        run(tmp_path / name, recurrent=recurrent, unroll=40, total_steps=1600, log_interval=1)
    monkeypatch.setattr(
        sys,
        'argv',
        ['play_sokoban.py', f'--runs={tmp_path}/a,{tmp_path}/b', f'--picture={tmp_path}/both.png'],
    )
    play_sokoban.main()
    assert Image.open(tmp_path / 'both.png').size[0] > 500
    monkeypatch.setattr(sys, 'argv', ['play_sokoban.py', f'--runs={tmp_path}/a,{tmp_path}/c'])
    with pytest.raises(SystemExit):
        play_sokoban.main()
    stderr = capfd.readouterr().err
    assert f'{tmp_path}/c' in stderr and stderr.count('\n') == 1


@pytest.mark.long
@pytest.mark.skipif(not LEVELS.exists(), reason='the real levels are not beside the project')
def test_real_levels(tmp_path):
    """Trains on Boxoban's unfiltered-train, evaluates on the test file."""
    assert (
        run(
            tmp_path,
            levels_dir=LEVELS,
            split='unfiltered-train',
            eval_split='unfiltered-valid',
            total_steps=24,
        )
        == 0
    )
    assert (
        run(
            tmp_path,
            levels_dir=LEVELS,
            split='unfiltered-train',
            eval_only=True,
            levels='unfiltered-test',
        )
        == 0
    )
    assert json.loads((tmp_path / 'eval_unfiltered-test.json').read_text())['n'] == 1000


# ----------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    'settings, message',
    [
        ({'n_envs': 0}, 'n_envs = 0'),
        ({'gamma': 1.5}, 'gamma = 1.5'),
        ({'unroll': 0}, 'unroll = 0'),
        ({'env': 'gym'}, "env = 'gym'"),
        ({'arch': 'lstm'}, "arch = 'lstm'"),
        ({'radius': 3}, 'radius = 3'),
        ({'levels_dir': '/nonexistent', 'split': 'unfiltered-train'}, '/nonexistent'),
        ({'split': 'no/such.npy'}, 'no/such.npy'),
        ({'n_boxes': 9}, 'n_boxes = 9'),
        ({'max_moves': 1}, 'max_moves = 1'),
        ({'device': 'tpu'}, "device = 'tpu'"),
        ({'resume': True}, 'nothing to resume from'),
        ({'eval_only': True}, 'out: holds no trained run'),
        ({'threads': 100000}, 'threads = 100000: at most'),
        ({'n_layer': 10**8}, 'n_layer = 100000000'),
        ({'n_envs': 10**9}, 'n_envs = 1000000000'),
        ({'n_levels': 10**12}, 'n_levels = 1,000,000,000,000: needs more than'),
        (
            {'eval_split': 'unfiltered-valid', 'levels_dir': '/nonexistent'},
            'sokoban.py --split=unfiltered-valid --download=True --levels_dir=/nonexistent`',
        ),
        ({'levels': 'generated'}, 'levels and best are settings of --eval_only'),
        ({'learning_rate': -1.0}, 'learning_rate = -1'),
        ({'eval_games': 0}, 'eval_games = 0'),
        ({'path': 'compiled'}, "path = 'compiled'"),
        ({'seed': -1}, 'seed = -1'),
        ({'n_env': 3}, 'n_envs'),
    ],
    ids=str,
)
def test_mistakes(tmp_path, settings, message, monkeypatch, capfd):
    """One line, exit status 2, and nothing is left behind."""
    monkeypatch.setattr(sys, 'argv', ['train_sokoban.py', *arguments(tmp_path / 'out', **settings)])
    with pytest.raises(SystemExit) as error:
        train_sokoban.main()
    stderr = capfd.readouterr().err
    assert error.value.code == 2 and message in stderr and stderr.count('\n') == 1, stderr
    assert not (tmp_path / 'out').exists()


def test_broken_level_files(tmp_path, capfd):
    """Cut, empty and malformed files are refused by name."""
    good = sokoban.generate(3, 1)[0]
    np.save(tmp_path / 'cut.npy', good)
    (tmp_path / 'cut.npy').write_bytes((tmp_path / 'cut.npy').read_bytes()[:-20])
    (tmp_path / 'empty.txt').write_text('')
    np.save(tmp_path / 'zero.npy', good[:0])
    (tmp_path / 'two_agents.txt').write_text(
        '; 0\n' + '\n'.join(['#' * 10, '#@@$.    #', *['#        #'] * 7, '#' * 10]) + '\n'
    )
    for name in ('cut.npy', 'empty.txt', 'zero.npy', 'two_agents.txt'):
        with pytest.raises(SystemExit) as error:
            run(tmp_path / 'out', split=tmp_path / name)
        stderr = capfd.readouterr().err
        assert error.value.code == 2 and name in stderr and stderr.count('\n') == 1, stderr


def test_resume_refuses_another_run(tmp_path, capfd):
    run(tmp_path)
    for settings, message in (
        ({'resume': True, 'n_layer': 1}, 'n_layer'),
        ({'resume': True, 'seed': 5}, 'seed'),
        ({}, 'holds a run already'),
        ({'eval_only': True, 'arch': 'convglu'}, 'arch'),
        ({'resume': True, 'n_levels': 60}, 'n_levels'),
        ({'resume': True, 'overwrite': True}, 'exclude each other'),
    ):
        with pytest.raises(SystemExit) as error:
            run(tmp_path, **settings)
        stderr = capfd.readouterr().err
        assert error.value.code == 2 and message in stderr and stderr.count('\n') == 1, stderr
    np.save(tmp_path / 'x.npy', sokoban.generate(50, 1)[0])
    run(tmp_path / 'b', split=tmp_path / 'x.npy')
    np.save(tmp_path / 'x.npy', sokoban.generate(50, 1, seed=1)[0])
    with pytest.raises(SystemExit):
        run(tmp_path / 'b', split=tmp_path / 'x.npy', resume=True)
    assert 'other levels' in capfd.readouterr().err


def test_a_damaged_checkpoint_is_one_line(tmp_path, capfd):
    """Whole files whose parts do not fit: refused by file and part; evaluated too, where it is the weights."""
    run(tmp_path, total_steps=24)
    os.link(tmp_path / 'ckpt_last.pt', tmp_path / 'good.pt')
    capfd.readouterr()
    for key, change, message in (
        ('model', lambda m: {**m, 'query': m['query'][:1]}, 'model: query has the shape'),
        ('model', lambda m: {**m, 'query': m['query'] * math.inf}, 'model: query holds NaN'),
        ('step', lambda n: 1.5, 'step = '),
        ('clock', lambda n: None, 'clock = '),
        ('optimizers', lambda o: [{**o[0], 'state': {}}], 'optimizers[0] does not fit'),
        ('env', lambda e: {**e, 'agent': e['agent'][:1]}, 'env, start or state does not fit'),
        ('start', lambda x: x[:1], 'start or state does not fit'),
        ('state', lambda s: s[:-1], 'start or state does not fit'),
        ('running', lambda x: x[:1], 'sums or rng does not fit'),
        ('recent', lambda x: 5, 'sums or rng does not fit'),
        ('rng', lambda r: {}, 'rng does not fit'),
    ):
        saved = load_checkpoint(tmp_path / 'good.pt')
        saved[key] = change(saved[key])
        train_sokoban.checkpoint.save_checkpoint(saved, tmp_path / 'ckpt_last.pt')
        for settings in (
            {'resume': True},
            *([{'eval_only': True}] if key in ('model', 'step') else []),
        ):
            with pytest.raises(SystemExit) as error:
                run(tmp_path, **settings)
            stderr = capfd.readouterr().err
            assert (
                error.value.code == 2
                and f'{tmp_path}/ckpt_last.pt: ' in stderr
                and message in stderr
                and stderr.count('\n') == 1
            ), stderr


def test_no_held_out_level_is_trained_on(tmp_path, monkeypatch):
    """With a generator that makes the same levels for every seed: evaluated are others than those trained on, in --eval_only as in training."""
    real = sokoban.generate
    monkeypatch.setattr(sokoban, 'generate', lambda n, boxes, seed, *rest: real(n, boxes, 7, *rest))
    held_out = []
    for settings in ({}, {'eval_only': True}):
        configure(vars(train_sokoban), arguments(tmp_path, **settings), quiet=True)
        (trained, _), (levels, _) = train_sokoban.read_levels(0, 1)
        held_out.append(levels)
    trained = real(50, 1, 7, 6)[0]
    assert np.array_equal(*held_out) and not set(map(bytes, trained)) & set(map(bytes, held_out[0]))


# ----------------------------------------------------------------------------- what users copy


@pytest.mark.parametrize(
    'config', sorted(f for f in os.listdir(ROOT / 'config') if f.startswith('sokoban_'))
)
def test_config_files(tmp_path, config, request):
    """Every config file loads and makes an agent, narrower; levels and experts as they are. Some, and with --long all, run two updates. Budgets:
    the paper's rule."""
    settings = configure(vars(train_sokoban), [str(ROOT / 'config' / config)], quiet=True)
    L, E, d = settings['n_layer'], settings['n_expert'], settings['n_embd']
    if config not in ('sokoban_demo.py', 'sokoban_tiny.py'):
        budget, rows = re.fullmatch(
            r'sokoban_(small|medium|large)(?:_ff)?_L(\d+)\.py', config
        ).groups()
        cost = {width: 9 * (32 + 2 * width) * 4 * width for width in (d, 128, 256, 1024)}
        assert (
            int(rows) == L
            and round(cost[{'small': 128, 'medium': 256, 'large': 1024}[budget]] / (L * cost[d]))
            == E
        )
        assert (
            settings['recurrent'] == ('_ff' not in config) and settings['total_steps'] == 50_000_000
        )
        assert settings['out_dir'] == f'out/{config[:-3]}'
    tiny = {k: v for k, v in TINY.items() if k != 'n_layer'}
    argv = [
        str(ROOT / 'config' / config),
        *(
            f'--{k}={v}'
            for k, v in {
                **tiny,
                'n_embd': 1,
                'total_steps': 24,
                'out_dir': tmp_path,
                'plot': False,
            }.items()
        ),
    ]
    settings = configure(vars(train_sokoban), argv, quiet=True)
    if L <= 4 and E <= 4 or request.config.getoption('--long'):
        assert train_sokoban.train(settings) == 0
    else:
        model = train_sokoban.make_run(settings).model
        assert (model.config.n_layer, model.config.n_expert) == (L, E)


def test_demo_recipe(tmp_path):
    """`make demo-sokoban`'s own commands, shrunk."""
    printed = subprocess.run(
        ['make', '-n', '--no-print-directory', '-o', '.venv/installed', 'demo-sokoban', 'BIN=BIN'],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    recipe = printed.replace('BIN/python', sys.executable).splitlines()
    small = '--n_envs=4 --n_levels=100 --eval_games=8 --compile=False --threads=1'
    for line in recipe:
        more = f'{small} --out_dir={tmp_path}/out' + (
            ' --total_steps=160' if 'eval_only' not in line else ''
        )
        done = forks.run(shlex.split(f'{line} {more}'), cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert (tmp_path / 'out' / 'curve.png').stat().st_size > 5000 and list(
        (tmp_path / 'out').glob('eval_*.gif')
    )

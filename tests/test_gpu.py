"""What only a GPU can show: pytest -m gpu. The same checks run on the CPU in test_model.py, test_train.py and
test_train_sokoban.py."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import data_fineweb
import kernels
import model as m
import train_lm
import train_sokoban
import unroll
from configurator import configure

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason='no CUDA device'),
]


def gradients(model, x, y, state, amp=False):
    model.zero_grad()
    with torch.autocast('cuda', torch.bfloat16, enabled=amp):
        loss, state = model(x, y, state)
    loss.backward()
    return loss.detach(), torch.cat([p.grad.flatten().double() for p in model.parameters()]), state


@pytest.mark.parametrize(
    'aggregation, share_kv', [('sqrt_sum', True), ('mean', False), ('softmax_l2', True)]
)
def test_fast_path_in_bf16_against_float64(aggregation, share_kv):
    torch.manual_seed(0)
    config = m.ModelConfig(
        512, 2, 3, 192, window=40, block_size=24, aggregation=aggregation, share_kv=share_kv
    )
    model = m.RecurrentGPT(config)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.05)
    x, y = torch.randint(512, (2, 4, 24), device='cuda')
    config.path = 'plain'
    exact = m.RecurrentGPT(config).double().cuda()
    exact.load_state_dict(model.state_dict())
    want = gradients(exact, x, y, None)
    for path in ('fast', 'compiled'):
        config.path = path
        loss, grad, state = gradients(model.cuda(), x, y, None, amp=True)
        assert abs(loss - want[0]) < 0.02 * want[0]
        assert (
            F.cosine_similarity(grad, want[1], 0) > 0.99
            and 0.97 < grad.norm() / want[1].norm() < 1.03
        )
        assert all(t.isfinite().all() for t in state)


def test_train_lm_on_one_gpu(tmp_path):
    """train_lm.py starts, compiles, trains, saves and resumes on a GPU."""
    root = Path(__file__).resolve().parent.parent
    for name, n in (('val_000000', 5000), ('train_000001', 100_000)):
        data_fineweb.write_shard(
            str(tmp_path / f'fineweb_{name}.bin'), (np.arange(n) ** 2 % 11 + 65).astype(np.uint16)
        )
    data_fineweb.write_meta(str(tmp_path), {'tokenizer': 'bytes', 'source': 'test', 'shards': []})
    for more in (
        ['--max_iters=3'],
        ['--max_iters=5', '--resume=True'],
        ['--recurrent=False', '--overwrite=True', '--max_iters=3'],
    ):
        done = subprocess.run(
            [
                sys.executable,
                'train_lm.py',
                'config/demo.py',
                f'--data_dir={tmp_path}',
                f'--out_dir={tmp_path}/out',
                '--val_tokens=4096',
                '--compile=True',
                *more,
            ],
            cwd=root,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0 and 'done: ' in done.stdout, done.stderr


def test_train_sokoban_on_one_gpu(tmp_path):
    """train_sokoban.py starts, compiles, trains, saves, resumes and evaluates on a GPU."""
    root = Path(__file__).resolve().parent.parent
    for more in (
        ['--total_steps=6400'],
        ['--total_steps=9600', '--resume=True'],
        ['--eval_only=True'],
        ['--kind=convlstm', '--dtype=bfloat16', '--total_steps=6400', '--overwrite=True'],
        [
            '--kind=convglu',
            '--recurrent=False',
            '--reuse=False',
            '--total_steps=6400',
            '--overwrite=True',
        ],
    ):
        done = subprocess.run(
            [
                sys.executable,
                'train_sokoban.py',
                'config/sokoban_demo.py',
                '--n_levels=1000',
                '--eval_games=32',
                f'--out_dir={tmp_path}/out',
                '--plot=False',
                *more,
            ],
            cwd=root,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0 and 'does not work' not in done.stdout, done.stderr


@pytest.mark.parametrize(
    'settings',
    [[], ['--recurrent=False'], ['--reuse=False'], ['--n_expert=2', '--radius=0']],
    ids=str,
)
def test_graphs_replay_what_runs_eagerly(tmp_path, settings):
    """Six updates with CUDA graphs from the fourth on = six without: the same games, and weights that agree."""

    def six(graphs):
        argv = [
            '--split=generated',
            '--eval_split=generated',
            '--n_boxes=1',
            '--n_levels=200',
            '--n_embd=16',
            '--n_layer=2',
            '--dtype=float32',
            '--total_steps=6400',
            '--learning_rate=1e-3',
            '--compile=False',
            f'--graphs={graphs}',
            f'--out_dir={tmp_path}',
            *settings,
        ]
        run = train_sokoban.make_run(configure(vars(train_sokoban), argv, quiet=True))
        games, weights = [], []
        for _ in range(6):
            games.append(train_sokoban.update(run, False)[1].clone())
            weights.append(torch.cat([p.detach().flatten() for p in run.model.parameters()]))
            run.step += 1
        return torch.stack(games), weights, run.graphs

    torch.backends.cudnn.deterministic = True
    (games, weights, captured), (eager_games, eager_weights, none) = six(True), six(False)
    assert (
        none is None
        and all(graph is not None for _, graph, _ in captured.values())
        and len(captured) == 3
    )
    assert torch.equal(
        games[:5], eager_games[:5]
    )  # later ones could differ by a rounding that tips an action
    for mine, eager in zip(weights[:5], eager_weights[:5], strict=True):
        torch.testing.assert_close(mine, eager, rtol=1e-3, atol=2e-4)
    assert (weights[4] - weights[3]).abs().max() > 1e-5  # a replay learns too


@pytest.mark.parametrize(
    'settings, whole',
    [
        ([], 2048),
        (['--recurrent=False'], 2048),
        (['--batch_size=3'], 2048),
        (['--recurrent=False', '--batch_size=3'], 2048),
        (['--aggregation=softmax_l2', '--share_kv=False'], 2048),
        (['--compile=True'], 2048),
        (['--recurrent=False', '--compile=True'], 2048),
        ([], 0),
        (['--compile=True'], 0),
    ],
    ids=str,
)
def test_train_lm_graphs_replay_what_runs_eagerly(tmp_path, monkeypatch, settings, whole):
    """Eight updates of train_lm.py with CUDA graphs from the fourth on = eight without: losses, and weights but for rounding. Shards begin in
    between, and a validation runs there. whole = 0: the optimizer alone, and blocks of the unroll where it is compiled."""
    for name, n in (('val_000000', 500), ('train_000001', 8 * 25), ('train_000002', 8 * 17)):
        data_fineweb.write_shard(
            str(tmp_path / f'fineweb_{name}.bin'), (np.arange(n) ** 2 % 11 + 65).astype(np.uint16)
        )
    data_fineweb.write_meta(str(tmp_path), {'tokenizer': 'bytes', 'source': 'test', 'shards': []})
    monkeypatch.setattr(train_lm, 'WHOLE_GRAPH', whole)

    def eight(graphs):
        argv = [
            '--tokenizer=bytes',
            '--n_expert=2',
            '--n_embd=128',
            '--window=12',
            '--block_size=8',
            '--tokens_per_step=64',
            '--val_tokens=96',
            '--val_streams=3',
            '--dtype=float32',
            '--compile=False',
            '--max_iters=8',
            '--warmup_iters=3',
            f'--graphs={graphs}',
            f'--data_dir={tmp_path}',
            *settings,
        ]
        run = train_lm.make_run(configure(vars(train_lm), argv, quiet=True))
        begun = torch.cat([p.detach().flatten() for p in run.model.parameters()])
        train_lm.prepare(run)
        losses = []
        for _ in range(8):
            losses.append(train_lm.train_update(run, False)[0])
            run.step += 1
            if run.step == 5:
                losses.append(train_lm.evaluate_run(run)[0])
        weights = torch.cat([p.detach().flatten() for p in run.model.parameters()])
        return losses, weights, (weights - begun).norm(), run.graphs

    (losses, weights, moved, captured), (eager_losses, eager_weights, _, none) = (
        eight(True),
        eight(False),
    )
    chunks = (
        0
        if whole == 0 and '--recurrent=False' not in settings
        else 2
        if '--batch_size=3' in settings
        else 1
    )
    assert none is None and len(captured) == 1 + chunks
    assert all(graph is not None for _, graph, _ in captured.values())
    assert losses == pytest.approx(eager_losses, rel=2e-3)
    assert (
        weights - eager_weights
    ).norm() < 0.02 * moved  # Muon's bf16 iteration amplifies roundings


# ---- Triton kernels in the unroll ----


@pytest.mark.parametrize('aggregation, share_kv', [('sqrt_sum', True), ('softmax_l2', False)])
@pytest.mark.parametrize('name', [*unroll.TRITON, 'loss'])
def test_each_triton_kernel_in_bf16_against_float64(monkeypatch, name, aggregation, share_kv):
    """Two chunks of three blocks by this kernel, faster or not, and compiled PyTorch for the rest."""
    pytest.importorskip('triton')
    monkeypatch.setattr(unroll, 'choose', lambda *_: frozenset(unroll.TRITON) & {name})
    monkeypatch.setattr(kernels, 'loss_by_triton', lambda *sizes: name == 'loss')
    monkeypatch.setattr(unroll, 'BLOCK', 10)
    torch.manual_seed(0)
    config = m.ModelConfig(
        512,
        2,
        3,
        192,
        window=40,
        block_size=24,
        aggregation=aggregation,
        share_kv=share_kv,
        path='plain',
    )
    model = m.RecurrentGPT(config)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.05)
    exact = m.RecurrentGPT(config).double().cuda()
    exact.load_state_dict(model.state_dict())
    model.cuda()
    want_state = state = None
    for x, y in torch.randint(512, (2, 2, 4, 24), device='cuda'):
        config.path = 'plain'
        want_loss, want, want_state = gradients(exact, x, y, want_state)
        config.path = 'compiled'
        loss, grad, state = gradients(model, x, y, state, amp=True)
        assert abs(loss - want_loss) < 0.02 * want_loss
        assert F.cosine_similarity(grad, want, 0) > 0.99 and 0.97 < grad.norm() / want.norm() < 1.03
        assert all(t.isfinite().all() for t in state)


@pytest.mark.parametrize(
    'names', [frozenset(), frozenset(unroll.TRITON)], ids=['compiled', 'triton']
)
@pytest.mark.parametrize('T', [20, 8])
def test_graphed_blocks_equal_eager_ones(monkeypatch, names, T):
    """Six chunks of one block of 8 tokens, or of three, captured in the second to the fourth: losses, gradients, states and evaluation as
    eager code's, in fp32, though weights and tokens change."""
    if names:
        pytest.importorskip('triton')
    monkeypatch.setattr(unroll, 'choose', lambda *_: names)
    monkeypatch.setattr(unroll, 'BLOCK', 8)
    unroll.release()
    torch.manual_seed(0)
    config = m.ModelConfig(512, 2, 3, 192, window=12, block_size=T)
    model = m.RecurrentGPT(config).cuda()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.05)
    states = dict.fromkeys(('fast', 'graphed'))

    def close(a, b):
        assert (a - b).norm() < 1e-3 * b.norm()

    for x, y in torch.randint(512, (6, 2, 4, T), device='cuda'):
        found, logits = {}, {}
        for path in states:
            config.path = path
            loss, grad, states[path] = gradients(model, x, y, states[path])
            found[path] = loss, grad
            with torch.no_grad():
                logits[path] = model(x, state=states[path])[0].clone()
        close(found['graphed'][0], found['fast'][0])
        close(found['graphed'][1], found['fast'][1])
        close(logits['graphed'], logits['fast'])
        for mine, eager in zip(states['graphed'], states['fast'], strict=True):
            close(mine.double(), eager.double())
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.01)
    graphs = (graph for block in unroll._blocks.values() for _, graph, _ in block.graphs.values())
    assert any(graph is not None for graph in graphs)
    unroll.release()


def test_triton_kernels_are_measured(monkeypatch):
    """Each is timed beside its compiled twin and agrees with it; on a smaller card one may not fit."""
    pytest.importorskip('triton')
    monkeypatch.setattr(kernels, 'chosen', {})
    model = m.RecurrentGPT(
        m.ModelConfig(512, 1, 2, 384, window=128, block_size=16, path='compiled')
    ).cuda()
    x, y = torch.randint(512, (2, 64, 16), device='cuda')
    before = torch.cuda.get_rng_state()
    loss, _, _ = gradients(model, x, y, None, amp=True)
    assert loss.isfinite() and torch.equal(torch.cuda.get_rng_state(), before)
    found = {name: trial for trials in kernels.chosen.values() for name, trial in trials.items()}
    assert set(found) == {*unroll.TRITON, 'loss'}
    for name, trial in found.items():
        assert trial['compiled'] > 0
        if not trial.get('error', '').startswith('OutOfResources'):
            assert 'error' not in trial and trial['difference'] < 0.03 and trial['triton'] > 0, (
                name,
                trial,
            )

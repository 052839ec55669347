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
import model as m
import train_sokoban
from configurator import configure

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason='no CUDA device')]


def gradients(model, x, y, state, amp=False):
    model.zero_grad()
    with torch.autocast('cuda', torch.bfloat16, enabled=amp):
        loss, state = model(x, y, state)
    loss.backward()
    return loss.detach(), torch.cat([p.grad.flatten().double() for p in model.parameters()]), state


@pytest.mark.parametrize('aggregation, share_kv', [('sqrt_sum', True), ('mean', False), ('softmax_l2', True)])
def test_fast_path_in_bf16_against_float64(aggregation, share_kv):
    torch.manual_seed(0)
    config = m.ModelConfig(512, 2, 3, 192, window=40, block_size=24, aggregation=aggregation, share_kv=share_kv)
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
        assert F.cosine_similarity(grad, want[1], 0) > 0.99 and 0.97 < grad.norm() / want[1].norm() < 1.03
        assert all(t.isfinite().all() for t in state)


@pytest.mark.parametrize('recurrent', [True, False])
def test_generate_on_gpu(recurrent):
    torch.manual_seed(0)
    model = m.build_model(m.ModelConfig(256, 2, 2, 128, window=16, block_size=8), recurrent).cuda()
    tokens = [t.item() for t in model.generate(torch.zeros(1, 3, dtype=torch.int64, device='cuda'), 50)]
    assert len(tokens) == 50 and all(0 <= t < 256 for t in tokens)


def test_train_lm_on_one_gpu(tmp_path):
    """train_lm.py starts, compiles, trains, saves and resumes on a GPU."""
    root = Path(__file__).resolve().parent.parent
    for name, n in (('val_000000', 5000), ('train_000001', 100_000)):
        data_fineweb.write_shard(str(tmp_path / f'fineweb_{name}.bin'), (np.arange(n) ** 2 % 11 + 65).astype(np.uint16))
    data_fineweb.write_meta(str(tmp_path), {'tokenizer': 'bytes', 'source': 'test', 'shards': []})
    for more in (['--max_iters=3'], ['--max_iters=5', '--resume=True'], ['--recurrent=False', '--overwrite=True', '--max_iters=3']):
        done = subprocess.run([sys.executable, 'train_lm.py', 'config/demo.py', f'--data_dir={tmp_path}', f'--out_dir={tmp_path}/out',
                               '--val_tokens=4096', '--compile=True', *more], cwd=root, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0 and 'done: ' in done.stdout, done.stderr


def test_train_sokoban_on_one_gpu(tmp_path):
    """train_sokoban.py starts, compiles, trains, saves, resumes and evaluates on a GPU."""
    root = Path(__file__).resolve().parent.parent
    for more in (['--total_steps=6400'], ['--total_steps=9600', '--resume=True'], ['--eval_only=True'],
                 ['--kind=convlstm', '--dtype=bfloat16', '--total_steps=6400', '--overwrite=True'], ['--kind=convglu', '--recurrent=False', '--reuse=False', '--total_steps=6400', '--overwrite=True']):
        done = subprocess.run([sys.executable, 'train_sokoban.py', 'config/sokoban_demo.py', '--n_levels=1000', '--eval_games=32', f'--out_dir={tmp_path}/out',
                               '--plot=False', *more], cwd=root, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0 and 'does not work' not in done.stdout, done.stderr


@pytest.mark.parametrize('settings', [[], ['--recurrent=False'], ['--reuse=False'], ['--n_expert=2', '--radius=0']], ids=str)
def test_graphs_replay_what_runs_eagerly(tmp_path, settings):
    """Six updates with CUDA graphs from the fourth on = six without: the same games, and weights that agree."""
    def six(graphs):
        argv = ['--split=generated', '--eval_split=generated', '--n_boxes=1', '--n_levels=200', '--n_embd=16', '--n_layer=2', '--dtype=float32',
                '--total_steps=6400', '--learning_rate=1e-3', '--compile=False', f'--graphs={graphs}', f'--out_dir={tmp_path}', *settings]
        run = train_sokoban.make_run(configure(vars(train_sokoban), argv, quiet=True))
        games, weights = [], []
        for _ in range(6):
            games.append(train_sokoban.update(run, False)[1].clone())
            weights.append(torch.cat([p.detach().flatten() for p in run.model.parameters()]))
            run.step += 1
        return torch.stack(games), weights, run.graphs
    torch.backends.cudnn.deterministic = True
    (games, weights, captured), (eager_games, eager_weights, none) = six(True), six(False)
    assert none is None and all(graph is not None for _, graph, _ in captured.values()) and len(captured) == 3
    assert torch.equal(games[:5], eager_games[:5])             # later ones could differ by a rounding that tips an action
    for mine, eager in zip(weights[:5], eager_weights[:5], strict=True):
        torch.testing.assert_close(mine, eager, rtol=1e-3, atol=2e-4)
    assert (weights[4] - weights[3]).abs().max() > 1e-5        # a replay learns too

"""What only a GPU can show: pytest -m gpu. bench.py --suite=first runs it without conftest.py. The
same checks run on the CPU in test_model.py, test_train.py and test_train_sokoban.py."""

import subprocess
import sys

import pytest
import torch
from test_train import ROOT, shards

import kernels
import model as m
import train_lm
import train_sokoban
import unroll
from bench import difference
from configurator import configure

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason='no CUDA device'),
]
BF16 = 0.08  # relative error of a parameter's gradient by bf16 products; on a CPU 0.03


@pytest.fixture(autouse=True)
def ieee(monkeypatch):
    """The trainers turn TF32 on, for all tests that follow."""
    monkeypatch.setattr(torch.backends.cudnn, 'deterministic', True)
    torch.set_float32_matmul_precision('highest')


def make_model(T, W, D=192, **changes):
    """-> RecurrentGPT on the GPU, the same by the plain equations in float64."""
    torch.manual_seed(0)
    config = m.ModelConfig(512, 2, 3, D, window=W, block_size=T, **changes)
    model = m.RecurrentGPT(config)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.05)
    exact = m.RecurrentGPT(m.ModelConfig(**{**vars(config), 'path': 'plain'})).double()
    exact.load_state_dict(model.state_dict())
    return model.cuda(), exact.cuda()


def gradients(model, x, y, state, amp=False):
    """-> {name: gradient, 'loss': loss}, the next state."""
    model.zero_grad()
    with torch.autocast('cuda', torch.bfloat16, enabled=amp):
        loss, state = model(x, y, state)
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    return {**found, 'loss': loss.detach()}, state


def assert_close(mine, reference, limit):
    assert abs(mine['loss'] - reference['loss']) <= limit / 4 * reference['loss']
    off, worst = difference({name: (mine[name], reference[name]) for name in reference})
    assert off <= limit, (worst, off)


LM = """train_lm.py config/demo.py --val_tokens=4096 --compile=True
--max_iters=3
--max_iters=5 --resume=True
--recurrent=False --overwrite=True --max_iters=3"""
SOKOBAN = """train_sokoban.py config/sokoban_demo.py --n_levels=1000 --eval_games=32 --plot=False
--total_steps=6400
--total_steps=9600 --resume=True
--eval_only=True
--arch=convlstm --dtype=bfloat16 --total_steps=6400 --overwrite=True
--arch=convglu --recurrent=False --reuse=False --total_steps=6400 --overwrite=True"""


@pytest.mark.parametrize('commands', [LM, SOKOBAN], ids=['lm', 'sokoban'])
def test_trainers_on_one_gpu(tmp_path, commands):
    """They start, compile, train, save, resume and evaluate."""
    script, *calls = commands.splitlines()
    if commands is LM:
        shards(tmp_path, val_000000=5000, train_000001=100_000)
        script += f' --data_dir={tmp_path}'
    for more in calls:
        words = [*script.split(), f'--out_dir={tmp_path}/out', *more.split()]
        command = [sys.executable, *words]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0 and 'does not work' not in done.stdout, done.stderr


# ---- CUDA graphs ----


@pytest.mark.parametrize('settings', ['', '--recurrent=False', '--reuse=False --n_expert=2'])
def test_graphs_replay_what_runs_eagerly(tmp_path, settings):
    """Six updates with CUDA graphs from the fourth on = six without: the same games and weights."""
    argv = """--split=generated --eval_split=generated --n_boxes=1 --n_levels=200 --n_embd=16
        --n_layer=2 --dtype=float32 --total_steps=6400 --learning_rate=1e-3 --compile=False"""
    argv = [*argv.split(), f'--out_dir={tmp_path}', *settings.split()]

    def six(graphs):
        config = configure(vars(train_sokoban), [*argv, f'--graphs={graphs}'], quiet=True)
        run = train_sokoban.make_run(config)
        torch.backends.cudnn.deterministic = True
        torch.set_float32_matmul_precision('highest')
        games, weights = [], []
        for run.step in range(6):
            games.append(train_sokoban.update(run, False)[1].clone())
            weights.append(torch.nn.utils.parameters_to_vector(run.model.parameters()).detach())
        return torch.stack(games), weights, run.graphs

    (games, weights, captured), (eager_games, eager_weights, none) = six(True), six(False)
    assert none is None and len(captured) == 2
    assert all(graph is not None for _, graph, _ in captured.values())
    assert torch.equal(games[:5], eager_games[:5])  # a later rounding could tip an action
    for mine, eager in zip(weights[:5], eager_weights[:5], strict=True):
        torch.testing.assert_close(mine, eager, rtol=1e-3, atol=2e-4)
    assert (weights[4] - weights[3]).abs().max() > 1e-5  # a replay learns too


GRAPHS = """2048, 1:
2048, 1: --batch_size=4
2048, 1: --recurrent=False --batch_size=4
2048, 1: --aggregation=softmax_l2 --share_kv=False
2048, 1: --compile=True
2048, 1: --recurrent=False --compile=True
0, 0:
0, 0: --compile=True"""


@pytest.mark.parametrize('case', GRAPHS.splitlines())
def test_train_lm_graphs_replay_what_runs_eagerly(tmp_path, monkeypatch, case):
    """Eight updates of train_lm.py with CUDA graphs from the fourth on = eight without: losses, and
    weights but for rounding. Shards begin in between, and a validation runs there. case: the
    longest chunk that is one graph, how many are; 0: the optimizer alone, and blocks of the unroll,
    of 3 tokens and 2, where it is compiled."""
    sizes, settings = case.split(':')
    whole, chunks = map(int, sizes.split(', '))
    shards(tmp_path, val_000000=500, train_000001=8 * 25, train_000002=8 * 17)
    monkeypatch.setattr(train_lm, 'WHOLE_GRAPH', whole)
    monkeypatch.setattr(unroll, 'BLOCK', 3)
    argv = """--tokenizer=bytes --n_expert=2 --n_embd=128 --window=12 --block_size=8 --val_streams=3
        --tokens_per_step=64 --val_tokens=96 --dtype=float32 --compile=False --max_iters=8
        --warmup_iters=3"""
    argv = [*argv.split(), f'--data_dir={tmp_path}', *settings.split()]

    def eight(graphs):
        config = configure(vars(train_lm), [*argv, f'--graphs={graphs}'], quiet=True)
        run = train_lm.make_run(config)
        torch.set_float32_matmul_precision('highest')
        begun = torch.nn.utils.parameters_to_vector(run.model.parameters()).detach()
        train_lm.prepare(run)
        losses = []
        for _ in range(8):
            losses.append(train_lm.train_update(run, False)[0])
            run.step += 1
            if run.step == 5:
                losses.append(train_lm.evaluate(run)[0])
        weights = torch.nn.utils.parameters_to_vector(run.model.parameters()).detach()
        return losses, weights, (weights - begun).norm(), run.graphs

    (losses, weights, moved, captured), (eager_losses, eager, _, none) = eight(True), eight(False)
    assert none is None and len(captured) == 1 + chunks
    assert all(graph is not None for _, graph, _ in captured.values())
    assert losses == pytest.approx(eager_losses, rel=2e-3)
    assert (weights - eager).norm() < 0.02 * moved  # Muon's bf16 iteration amplifies roundings


# ---- Triton kernels in the unroll ----


@pytest.mark.parametrize('aggregation, share_kv', [('sqrt_sum', True), ('softmax_l2', False)])
@pytest.mark.parametrize(
    'name, D',
    [('', 192), ('attention', 192), ('experts', 192), ('loss', 192), ('experts split pdl', 384)]
    + [('attention experts pdl', 192), ('attention experts graphed', 192)],
)
def test_each_triton_kernel_in_bf16_against_float64(monkeypatch, name, D, aggregation, share_kv):
    """Three chunks of three blocks by this kernel, faster or not, the rest compiled PyTorch; by
    none without Triton; graphed: blocks are captured, and replayed."""
    if name:
        pytest.importorskip('triton')
    if 'pdl' in name and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip('programmatic dependent launch is from Hopper on')
    monkeypatch.setattr(unroll, 'choose', lambda *_: frozenset(name.split()) - {'loss', 'graphed'})
    monkeypatch.setattr(kernels, 'loss_by_triton', lambda *sizes: name == 'loss')
    monkeypatch.setattr(unroll, 'BLOCK', 10)
    path = 'graphed' if 'graphed' in name else 'compiled'
    changes = {'aggregation': aggregation, 'share_kv': share_kv, 'path': path}
    model, exact = make_model(24, 40, D, **changes)
    want_state = state = None
    for x, y in torch.randint(512, (3, 2, 4, 24), device='cuda'):
        want, want_state = gradients(exact, x, y, want_state)
        found, state = gradients(model, x, y, state, amp=True)
        assert_close(found, want, BF16)
        assert all(t.isfinite().all() for t in state)


def test_triton_kernels_are_measured(monkeypatch):
    """Each is timed beside its compiled twin and agrees with it; a smaller card may lack memory."""
    pytest.importorskip('triton')
    monkeypatch.setattr(kernels, 'chosen', {})
    config = m.ModelConfig(512, 1, 2, 384, window=128, block_size=16, path='compiled')
    x, y = torch.randint(512, (2, 64, 16), device='cuda')
    model, before = m.RecurrentGPT(config).cuda(), torch.cuda.get_rng_state()
    gradients(model, x, y, None, amp=True)
    assert torch.equal(torch.cuda.get_rng_state(), before)
    tried = {name: trial for trials in kernels.chosen.values() for name, trial in trials.items()}
    assert set(tried) >= {'attention', 'experts', 'loss'}
    for name, trial in tried.items():
        assert trial['compiled'] > 0
        if not trial.get('error', '').startswith('OutOfResources'):
            assert 'error' not in trial and trial['difference'] < 0.03, (name, trial)
            assert trial['triton'] > 0

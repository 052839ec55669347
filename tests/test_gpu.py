"""Test what only a GPU can show: pytest -m gpu.

The same checks run on a CPU in test_model.py, test_train.py and test_train_sokoban.py."""

import copy

from configurator import configure

import processes
import pytest
import torch
from reference import assert_close, gradients
from small_runs import read_log, run_agent, run_lm, write_shards

import bench
import unroll
from model import ModelConfig, RecurrentGPT
from overrides import choose_overrides
from support import compiling
from support.random_states import randomize
from support.run_folder import load_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason='no CUDA device'),
]
LOSSES = ('train_loss', 'val_loss')
BF16 = 0.08  # relative error of a matrix's gradient by bf16 products; on a CPU 0.01


@pytest.fixture(autouse=True)
def full_precision(monkeypatch):
    """Undo what the trainers switch on (TF32, compilation), and make cuDNN deterministic."""
    monkeypatch.setattr(torch.backends.cudnn, 'deterministic', True)
    monkeypatch.setattr(compiling.fused, 'enabled', False)
    torch.set_float32_matmul_precision('highest')


LM = """train_lm.py config/demo.py --val_tokens=4096 --compile=True
--max_iters=3
--max_iters=5 --resume=True"""
NONRECURRENT_LM = LM.splitlines()[0] + '\n--recurrent=False --max_iters=3'
SOKOBAN = """train_sokoban.py config/sokoban_demo.py --n_levels=1000 --eval_games=32 --plot=False
--total_steps=6400
--total_steps=9600 --resume=True
--eval_only=True"""
OTHER_AGENTS = f"""{SOKOBAN.splitlines()[0]} --total_steps=6400 --overwrite=True
--arch=convlstm --dtype=bfloat16
--arch=convglu --recurrent=False"""
RUNS = [
    pytest.param(LM, marks=pytest.mark.smoke, id='lm'),
    pytest.param(SOKOBAN, marks=pytest.mark.smoke, id='sokoban'),
    pytest.param(NONRECURRENT_LM, id='nonrecurrent_lm'),
    pytest.param(OTHER_AGENTS, id='other_agents'),
]


@pytest.mark.parametrize('commands', RUNS)
def test_trainers_on_one_gpu(tmp_path, commands):
    """Trainers start, compile, train, save, resume and evaluate."""
    script, *calls = commands.splitlines()
    if script.startswith('train_lm.py'):
        write_shards(tmp_path, val_000000=5000, train_000001=100_000)
        script += f' --data_dir={tmp_path}'
    for arguments in calls:
        argv = [*script.split(), f'--out_dir={tmp_path}/out', *arguments.split()]
        done = processes.run(argv)
        assert done.returncode == 0 and 'does not work' not in done.stdout, done.stderr


# ---- CUDA graphs ----


AGENT_GRAPHS = [
    pytest.param({}, marks=pytest.mark.smoke),
    {'recurrent': False},
    {'n_expert': 2},
]


@pytest.mark.parametrize('settings', AGENT_GRAPHS)
def test_graphs_of_an_agent_replay_what_runs_eagerly(tmp_path, capsys, settings):
    """Five updates with CUDA graphs from the fourth on equal five without: losses and episodes."""
    logs = []
    for graphs_ in (True, False):
        out = tmp_path / str(graphs_)
        options = {'device': 'cuda', 'cuda_graphs': graphs_, 'log_interval': 1, 'total_steps': 60}
        assert run_agent(out, **options, **settings) == 0
        logs.append([r for r in read_log(out) if 'loss' in r])
    assert 'no CUDA graph' not in capsys.readouterr().out
    assert len(logs[0]) == 5
    for graphed, eager in zip(*logs, strict=True):
        assert graphed == pytest.approx(eager, rel=2e-3, abs=1e-4, nan_ok=True)


GRAPHS = [  # layers x tokens of the longest chunk that is one graph, settings
    pytest.param(2048, {}, marks=pytest.mark.smoke),
    (2048, {'batch_size': 4}),
    (2048, {'recurrent': False, 'batch_size': 4}),
    (2048, {'aggregation': 'softmax_l2', 'share_kv': False}),
    (2048, {'compile': True}),
    (2048, {'recurrent': False, 'compile': True}),
    (0, {}),
    (0, {'compile': True}),
]


@pytest.mark.parametrize('whole, settings', GRAPHS)
def test_graphs_of_a_language_model_replay_what_runs_eagerly(
    tmp_path, monkeypatch, capsys, whole, settings
):
    """Eight updates with CUDA graphs from the fourth on equal eight without, in losses, and in
    weights but for rounding, across shards and validations. With whole = 0 the chunk is no graph:
    its blocks of 3 and 2 tokens are."""
    write_shards(tmp_path, val_000000=500, train_000001=8 * 25, train_000002=8 * 17)
    monkeypatch.setattr(unroll, 'MAX_GRAPH_SIZE', whole)
    monkeypatch.setattr(unroll, 'TILE', 3)
    losses, weights = [], []
    for graphs_ in (True, False):
        out = tmp_path / str(graphs_)
        options = {'device': 'cuda', 'cuda_graphs': graphs_, 'n_embd': 128, **settings}
        assert run_lm(tmp_path, out, **options) == 0
        losses.append([r[name] for r in read_log(out) for name in LOSSES if name in r])
        saved = load_checkpoint(out / 'last.pt')['model']
        weights.append(torch.cat([x.flatten() for x in saved.values()]))
    assert 'no CUDA graph' not in capsys.readouterr().out
    assert losses[0] == pytest.approx(losses[1], rel=2e-3)
    # Muon's bf16 iteration amplifies roundings
    assert (weights[0] - weights[1]).norm() < 0.02 * weights[1].norm()


# ---- Triton overrides in training ----


OVERRIDES = [  # names of overrides, D
    ('', 192),
    ('attention', 192),
    ('experts', 384),
    ('loss', 192),
    ('attention experts loss', 192),
    ('attention experts blocks', 192),
]


def run_chunk(model, x, y, state, compute_dtype=False):
    """Return {name: gradient, 'loss': loss}, and the next state."""
    with torch.autocast('cuda', torch.bfloat16, enabled=compute_dtype):
        loss, state = model(x, y, state)
    return {**gradients(model, loss.objective), 'loss': loss.cross_entropy}, state


@pytest.mark.parametrize('aggregation, share_kv', [('sqrt_sum', True), ('softmax_l2', False)])
@pytest.mark.parametrize('names, D', OVERRIDES)
def test_each_triton_form_in_bf16_against_float64(monkeypatch, names, D, aggregation, share_kv):
    """Three chunks of three blocks run with these overrides, faster or not, and the rest compiled.
    With 'blocks' the blocks are captured and replayed."""
    if names:
        pytest.importorskip('kernels')  # registers the overrides
    monkeypatch.setattr(unroll, 'TILE', 10)
    monkeypatch.setattr(unroll, 'MAX_GRAPH_SIZE', 0 if 'blocks' in names else 2048)
    torch.manual_seed(0)
    sizes = {'vocab_size': 512, 'n_expert': 3, 'n_embd': D, 'window': 40, 'block_size': 24}
    model = RecurrentGPT(ModelConfig(aggregation=aggregation, share_kv=share_kv, **sizes))
    randomize(model).cuda()
    exact = copy.deepcopy(model).double()
    exact.config.mode = 'plain'
    model.overrides, model.cuda_graphs = frozenset(names.split()) - {'blocks'}, 'blocks' in names
    expected_state = state = None
    for x, y in torch.randint(512, (3, 2, 4, 24), device='cuda'):
        compiling.fused.enabled = False
        expected, expected_state = run_chunk(exact, x, y, expected_state)
        compiling.fused.enabled = True
        found, state = run_chunk(model, x, y, state, compute_dtype=True)
        assert_close(found['loss'], expected['loss'], BF16 / 4)
        for name, grad in expected.items():
            if grad.dim() > 1:  # others are small sums of large terms: test_triton.py has them
                assert_close(found[name], grad, BF16, what=name)
        assert all(t.isfinite().all() for t in state)


@pytest.mark.parametrize('decoding', [False, True])
def test_triton_overrides_agree_and_are_used(decoding):
    """Unless a smaller GPU lacks shared memory."""
    pytest.importorskip('triton')
    config = ModelConfig(512, n_layer=1, n_expert=2, n_embd=384, window=128, block_size=16)
    model, before = RecurrentGPT(config).cuda().train(not decoding), torch.cuda.get_rng_state()
    compiling.fused.enabled = True
    first, *others = choose_overrides(model, [64, 32], torch.bfloat16)
    assert torch.equal(torch.cuda.get_rng_state(), before)
    assert first == f'Triton overrides in use: {", ".join(sorted(model.overrides))}'
    tried = 2 if decoding else 3  # decoding computes no loss
    assert len(model.overrides) + len(others) == tried
    assert all('OutOfResources' in line for line in others), others


# ---- captures that are refused ----


@pytest.mark.parametrize('refused', ['by CUDA', 'by PyTorch', 'by an exception'])
def test_training_continues_without_a_graph_that_cannot_be_captured(refused, capsys):
    """The function runs eagerly from then on, on the same stream, as does one that reads its
    results. Others are captured, before and after, and random numbers can be drawn."""
    stream, captured = torch.cuda.current_stream(), {}
    w = torch.ones(8, device='cuda', requires_grad=True)

    def step(x):
        y = (x * w).sum()
        y.backward()
        if torch.cuda.is_current_stream_capturing():
            if refused == 'by CUDA':
                torch.cuda.synchronize()
            elif refused == 'by PyTorch':
                x.cpu()
            raise RuntimeError('kernel error')
        return w.grad.clone()

    x = torch.arange(8.0, device='cuda')
    for calls in range(1, 7):
        assert torch.equal(compiling.graphed(captured, 'before', lambda x: 3 * x, x), 3 * x)
        torch.testing.assert_close(compiling.graphed(captured, 'step', step, x), calls * x)
        torch.rand(1, device='cuda')
        assert torch.equal(compiling.graphed(captured, 'after', lambda x: 4 * x, x), 4 * x)
        double = compiling.graphed(captured, 'double', lambda x: 2 * x, x, needs='step')
        assert torch.equal(double, 2 * x)
    assert capsys.readouterr().out.count("no CUDA graph of 'step': it runs eagerly, slower") == 1
    assert captured['step'][1] is captured['double'][1] is None
    assert captured['before'][1] and captured['after'][1]
    assert torch.cuda.current_stream() == stream


# ---- bench.py ----


BENCH = [  # a cell of each suite, and the modes of its models
    (('train', 'recurrent', 2, 3, 192, 32, 8), ['eager', 'compiled', 'try_tile', 'try_stores']),
    (('decode', 'recurrent', 2, 3, 192, 256, 2), ['compiled', 'try_split']),
    (('train', 'transformer', 2, 1, 192, 32, 8), ['eager', 'compiled']),
    (('decode', 'recurrent', 2, 3, 192, 32, 8), ['plain', 'eager', 'compiled']),
    (('sokoban', 'convlstm', 2, 1, 16, 20, 32), ['eager', 'compiled']),
]


@pytest.mark.parametrize('cell, modes', BENCH, ids=lambda x: ' '.join(map(str, x[:2])))
def test_bench_measures_every_mode(cell, modes, capsys):
    """Updates and tokens are replayed as CUDA graphs."""
    configure(vars(bench), ['--vocab_size=512', '--rounds=1', '--seconds=0.01'], quiet=True)
    machine = bench.Machine(rank=0, world=1, device='cuda:0', compute_dtype=torch.bfloat16)
    for row in bench.measure(bench.Cell(*cell), modes, machine):
        assert row['status'] == 'ok' and row['median'] > 0 and row['memory_gb'] > 0, row
        runs_eagerly = row['suite'] == 'decode' and row['mode'] == 'plain'
        assert (row['graphs'] == 'none') == runs_eagerly and 'eager' not in row['graphs']
    assert 'no CUDA graph' not in capsys.readouterr().out

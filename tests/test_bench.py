"""bench.py and baselines.py: reports hold what they promise, a failing variant does not end the others, the baselines are what they
say they are (parameters, carried state, window), learn, and refuse bad settings with one line."""

import json
import math
import os
import pathlib
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import baselines
import bench
from configurator import read_script
from data_fineweb import open_meta, write_meta, write_shard
from model import ModelConfig, build_model

ROOT = pathlib.Path(__file__).parents[1]
TINY = {'tokenizer': 'bytes', 'n_layer': 2, 'n_expert': 2, 'n_embd': 32, 'n_head': 2, 'window': 8, 'block_size': 8, 'tokens_per_step': 128,
        'max_iters': 60, 'warmup_iters': 5, 'eval_interval': 30, 'log_interval': 30, 'val_tokens': 512, 'val_streams': 4, 'device': 'cpu',
        'dtype': 'float32', 'compile': False, 'threads': 1}  # fmt: skip


@pytest.fixture(scope='module', autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope='module')
def data_dir(tmp_path_factory):
    """Bytes that a look at the token before predicts well, but their frequencies do not: a walk with steps of 1 or 2 on 64 values."""
    folder, rng = tmp_path_factory.mktemp('data'), np.random.default_rng(0)
    for name, size in (('val_000000', 1000), ('train_000001', 12000)):
        write_shard(folder / f'fineweb_{name}.bin', np.cumsum(rng.integers(1, 3, size)) % 64)
    write_meta(folder, open_meta(folder, tokenizer='bytes', source='test'))
    return str(folder)


def settings(**changes):
    return {**read_script(baselines.__file__)[0], **TINY, **changes}


def run(script, *arguments):
    return subprocess.run([sys.executable, script, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize('suite, paths', [('train', ['plain', 'fast']), ('decode', ['gpt'])])
def test_bench_report(suite, paths, tmp_path, capsys):
    config = {**read_script(bench.__file__)[0], 'suite': suite, 'cells': ((1, 2, 4, 2),), 'paths': ','.join(paths), 'n_embd': 128, 'vocab_size': 32,
              'block_size': 4, 'rounds': 2, 'seconds': 0.01, 'threads': 1, 'optimizer': True, 'out': str(tmp_path / 'a' / 'b.json')}  # fmt: skip
    variants, sizes = bench.plan(config, 'cpu', torch.float32)
    bench.run_suite(suite, suite, variants, sizes, config, 'cpu', torch.float32, config['seconds'])
    report = json.loads((tmp_path / 'a' / 'b.json').read_text())
    assert {'device', 'torch', 'python', 'threads', 'commit', 'command', 'date', 'config', 'dtype', 'memory', 'matmul'} <= set(report)
    assert report['matmul']['flops_per_s']['median'] > 1e8
    assert [r['path'] for r in report['results']] == paths
    for r in report['results']:
        assert r['status'] == 'ok' and (r['L'], r['E'], r['C'], r['B'], r['T'], r['D'], r['V']) == (1, 2, 4, 2, 4, 128, 32)
        parts = {'train': {'chunk', 'optimizer'}, 'decode': {'token'}}[suite]
        assert set(r['seconds']) == parts and all(len(v) == 2 and min(v) > 0 for v in r['seconds'].values())
        assert 0 < r['memory_bytes'] < 2**30 and r['first_run_s'] > 0
        if suite == 'train':
            chunk, optimizer = (np.array(r['seconds'][part]) for part in ('chunk', 'optimizer'))
            assert r['tokens_per_s']['median'] == pytest.approx(np.median(8 / chunk))
            assert r['tokens_per_s_with_optimizer']['median'] == pytest.approx(np.median(8 / (chunk + optimizer)))
            model = build_model(ModelConfig(32, 1, 2, 128, window=4, block_size=4), True)
            flops = 3 * sum(model.flops_per_token().values())
            assert r['share_of_matmul'] == pytest.approx(flops * r['tokens_per_s']['median'] / report['matmul']['flops_per_s']['median'])
        else:
            assert r['ms_per_token']['median'] == pytest.approx(1000 * np.median(r['seconds']['token']))
    lines = capsys.readouterr().out.splitlines()
    turns = [line.split(': ')[0] for line in lines if line.startswith('round')]
    assert turns == [f'round {n}/2  {label}' for n in range(3) for label in ('matmul', *(f'L=1 E=2 C=4 B=2 {path}' for path in paths))]
    rows = [line for line in lines if line.startswith('|')]
    assert len(rows) == 2 + len(paths) and len({row.count('|') for row in rows}) == 1 and '1.00x' in rows[2]


def make_too_large(kind):
    return {'chunk': lambda: torch.empty(2**60)}, {}


def make_killed(kind):
    os.kill(os.getpid(), signal.SIGKILL)  # as Linux does when the memory is gone


def make_broken(kind):
    raise RuntimeError('no compiler\nmany more lines')


def make_fine(kind):
    return {'chunk': lambda: None}, {'tokens': 1}


def test_a_variant_that_fails(capsys):
    makers = {'large': make_too_large, 'killed': make_killed, 'broken': make_broken, 'fine': make_fine}
    records = bench.measure({label: (make, {'kind': 'cpu'}) for label, make in makers.items()}, 1, 0, 'cpu', 1)
    assert [records[label]['status'] for label in makers] == ['OOM', 'OOM', 'failed: RuntimeError: no compiler', 'ok']
    sizes = {'L': 1, 'E': 1, 'C': 1, 'B': 1, 'path': 'fast'}
    rows = bench.table([{**sizes, **bench.derive(record, 'train', None)} for record in records.values()], 'train').splitlines()
    assert '| OOM |' in rows[2] and '1.00x' in rows[5] and 'n/a' in rows[5]
    assert len({row.count('|') for row in rows}) == 1


def test_commit_and_device():
    assert bench.device_name('cpu').startswith('CPU ')
    assert bench.commit() == 'unknown' or len(bench.commit().removesuffix('-dirty')) == 12


@pytest.mark.parametrize('argument, message', [
    ('--suite=speed', "expected 'train' or 'decode'"), ('--cells=(1,2,3),', 'is not (L, E, C, B)'), ('--cells=((1,2,3,0),)', 'is not (L, E, C, B)'),
    ('--cells=()', 'cells is empty'), ('--paths=fast,slow', 'expected some of'), ('--rounds=0', 'at least 1'), ('--n_embd=100', 'set n_head'),
    ('--dtype=float16', 'dtype'), ('--device=tpu', 'device'),
])  # fmt: skip
def test_bench_refuses(argument, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, 'argv', ['bench.py', argument])
    for name, value in read_script(bench.__file__)[0].items():
        monkeypatch.setattr(bench, name, value)  # configure changes them: monkeypatch puts them back
    with pytest.raises(SystemExit) as stop:
        bench.main()
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count('\n') == 1 and message in error


def test_reads_train_lm_configs():
    """Every setting of train_lm.py is one here, with the same default."""
    theirs, ours = (read_script(ROOT / name)[0] for name in ('train_lm.py', 'baselines.py'))
    assert {name: ours.get(name) for name in theirs} == theirs


@pytest.mark.parametrize('changes', [{}, {'n_embd': 128, 'n_layer': 3}, {'recurrent': False, 'n_embd': 64}, {'lstm_layers': 2, 'n_embd': 128},
                                     {'aggregation': 'softmax_l2', 'n_embd': 256, 'n_expert': 4}])  # fmt: skip
def test_lstm_parameters(changes):
    config = settings(n_kv_head=1, **changes)
    net, what = baselines.build(config)
    ours = build_model(baselines.our_config(config), config['recurrent']).num_params()['total']
    assert what['params_of_ours'] == ours and what['params'] == sum(p.numel() for p in net.parameters())
    assert 0.98 <= what['params'] / ours <= 1.02


def test_lstm_state_carried():
    """Chunks with the state handed on = one long pass; the forget gates' bias starts at 1."""
    net, _ = baselines.build(settings())
    assert (net.lstm.bias_ih_l0.view(4, -1)[1] == 1).all() and (net.lstm.bias_ih_l0.view(4, -1)[0].abs() < 1).all()
    x, y = torch.randint(256, (2, 3, 24))
    whole, _ = net(x, y)
    state, total = None, 0
    for x_t, y_t in zip(x.split(7, 1), y.split(7, 1), strict=True):
        loss, state = net(x_t, y_t, state)
        assert not any(s.requires_grad for s in state)
        total += loss * x_t.numel() / x.numel()
    torch.testing.assert_close(total, whole)


def test_transformer_window():
    """Validation with a cache of W = attention with a band mask over the whole stream, however it is cut; the parameters are GPT's."""
    config = settings(model='transformer', n_expert=1, n_head=4, n_kv_head=2)
    net, what = baselines.build(config)
    net = net.double()
    assert what['params'] == what['params_of_ours']
    x, y = torch.randint(256, (2, 3, 30))
    t = torch.arange(30)
    band = (t[:, None] >= t) & (t[:, None] < t + config['window'])
    with torch.no_grad():
        h, rope = net.embedding(x), baselines.rope_table(30, net.config.head_dim, net.embedding.weight)
        for block in net.blocks:
            h, _ = block(h, rope, band, None)
        want = F.cross_entropy(net.head(baselines.norm(h)).flatten(0, 1).float(), y.flatten())
        for cut in (30, 11, 1):
            state, total = net.init_state(3), 0
            for x_t, y_t in zip(x.split(cut, 1), y.split(cut, 1), strict=True):
                loss, state = net(x_t, y_t, state)
                total += loss.double() * x_t.numel() / x.numel()
            torch.testing.assert_close(total.float(), want, rtol=1e-5, atol=0)
        short, _ = net(x[:, :8], y[:, :8])  # training: within W the same
        cached, _ = net(x[:, :8], y[:, :8], net.init_state(3))
        torch.testing.assert_close(short, cached, rtol=1e-5, atol=0)


@pytest.mark.parametrize('changes', [{'lr_scan': (0.0001, 0.01)}, {'batch_size': 6, 'baseline_lr': 0.01}, {'model': 'transformer', 'n_expert': 1, 'baseline_lr': 0.01}])
def test_baseline_learns(changes, data_dir, tmp_path, capsys):
    config = settings(data_dir=data_dir, out_dir=str(tmp_path / 'run'), **changes)
    baselines.train_all(config, 'cpu', torch.float32)
    folder = tmp_path / f'run_{config["model"]}'
    log = [json.loads(line) for line in (folder / 'log.jsonl').read_text().splitlines()]
    assert [r['step'] for r in log] == list(range(61)) and [r['tokens'] for r in log[1:]] == [128 * n for n in range(1, 61)]
    assert {'train_loss', 'grad_norm', 'lr', 'tokens_per_s', 'seconds'} <= set(log[1])
    assert [r['step'] for r in log if 'val_loss' in r] == [0, 30, 60]
    assert log[0]['val_loss'] > math.log(200) and log[-1]['val_loss'] < 0.8 * math.log(64)  # ln 64: what frequencies alone give
    assert log[-1]['val_bits_per_byte'] == pytest.approx(log[-1]['val_loss'] / math.log(2))
    result = json.loads((folder / 'result.json').read_text())
    assert len(result['runs']) == len(changes.get('lr_scan', (0,)))
    assert result['best']['val_loss'] == pytest.approx(min(r['val_loss'] for r in result['runs'])) == log[-1]['val_loss']
    if 'lr_scan' in changes:
        assert result['best']['learning_rate'] == 0.01 and (folder / 'log_0.0001.jsonl').exists()
    with pytest.raises(ValueError, match='overwrite'):
        baselines.train_all(config, 'cpu', torch.float32)


def test_micro_batches():
    """Rows in micro-batches give the gradients of one batch, and each row's state its own."""
    config, losses = settings(), []
    for micro in (16, 5):
        net, _ = baselines.build(config)
        optimizer, torch_rng = baselines.make_adamw(net, 1e-2, config), torch.Generator().manual_seed(1)

        class Loader:
            def next(self, generator=torch_rng):
                return *torch.randint(256, (2, 16, 8), generator=generator), False

        states = [None] * math.ceil(16 / micro)
        losses.append([baselines.update(net, list(net.parameters()), optimizer, Loader(), states, micro, 1e-2, config, 'cpu', torch.float32)
                       for _ in range(3)])  # fmt: skip
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)


def test_speed_mode(data_dir, tmp_path, monkeypatch, capsys):
    """All but the compiled variant, which takes a minute."""
    monkeypatch.setattr(baselines, 'OUR_PATHS', ('fast',))
    config = settings(rounds=1, bench_seconds=0.01, out=str(tmp_path / 'speed.json'))
    baselines.measure_speed(config, 'cpu', torch.float32)
    report = json.loads((tmp_path / 'speed.json').read_text())
    assert [r['path'] for r in report['results']] == ['nn.LSTM, AdamW', 'RecurrentGPT, fast, Muon']
    for r in report['results']:
        assert r['status'] == 'ok' and r['tokens_per_s']['median'] > r['tokens_per_s_with_optimizer']['median'] > 0
        assert r['params'] == pytest.approx(report['results'][0]['params_of_ours'], rel=0.02)


@pytest.mark.parametrize('arguments, message', [
    (['--model=gru'], "expected 'lstm' or 'transformer'"), (['--learning_rate=0.1'], '--baseline_lr'), (['--max_iters=0'], 'at least 1'),
    (['--model=transformer'], 'n_expert'), (['--tokens_per_step=100'], 'multiple'), (['--lr_scan=(0,)'], 'above 0'), (['--n_embd=16'], 'set n_head'),
    (['--data_dir=nowhere', '--n_embd=128'], 'no train shards'), (['--tokenizer=words'], 'expected one of'),
])  # fmt: skip
def test_baselines_refuse(arguments, message, tmp_path, monkeypatch, capsys):
    argv = ['--device=cpu', f'--out_dir={tmp_path / "run"}', *arguments]
    monkeypatch.setattr(sys, 'argv', ['baselines.py', *argv])
    for name, value in read_script(baselines.__file__)[0].items():
        monkeypatch.setattr(baselines, name, value)
    with pytest.raises(SystemExit) as stop:
        baselines.main()
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count('\n') == 1 and message in error


@pytest.mark.parametrize('script', ['bench.py', 'baselines.py'])
def test_command_line(script):
    result = run(script, '--rouns=1')
    assert result.returncode == 2 and result.stderr.count('\n') == 1 and "did you mean 'rounds'" in result.stderr

"""train_lm.py: runs and their files, resume, micro-batches, ranks, memory, stops, mistakes."""

import ast
import contextlib
import json
import math
import os
import shlex
import shutil
import signal
import sys
import time
from pathlib import Path

import conftest
import numpy as np
import pytest
import torch
from conftest import ROOT, run_ranks
from torch.utils._pytree import tree_flatten_with_path

import baselines
import common
import data_fineweb
import kernels
import model
import sample
import train_lm
from common import load_checkpoint
from configurator import configure, run_script


def table(text):
    """Return {name: value} for 'name=literal name=literal ...'."""
    pairs = (word.partition('=') for word in text.split())
    return {name: ast.literal_eval(value) for name, _, value in pairs}


TINY = table("""
tokenizer='bytes' n_layer=2 n_expert=2 n_embd=32 n_head=2 window=12 block_size=8 tokens_per_step=64
max_iters=8 warmup_iters=3 eval_interval=4 val_tokens=96 val_streams=3 compile=False dtype='float32'
device='cpu' threads=1
""")
# Log entries that two equal runs need not share.
IGNORED = 'val_seconds ms tokens_per_s env_steps_per_s clock seconds config'.split()
LSTM = {'arch': 'lstm'}
TRANSFORMER = {'arch': 'transformer', 'recurrent': False, 'n_expert': 1}
ROUTED = {'aggregation': 'softmax_l2', 'share_kv': False}


def shards(folder, **sizes):
    """Write shards of squares modulo 11: {name: number of tokens}."""
    for name, n in sizes.items():
        tokens = (np.arange(n) ** 2 % 11 + 65).astype(np.uint16)
        data_fineweb.write_shard(str(folder / f'fineweb_{name}.bin'), tokens)
    data_fineweb.write_meta(folder, {'tokenizer': 'bytes', 'source': 'test', 'shards': []})


@pytest.fixture(scope='session')
def data(tmp_path_factory):
    """A folder with a validation shard and two that can be learned; 5 windows per epoch."""
    folder = tmp_path_factory.mktemp('data')
    shards(folder, val_000000=150, train_000001=8 * 25, train_000002=8 * 17)
    return folder


def arguments(data, out, *configs, **settings):
    settings = {**TINY, 'data_dir': data, 'out_dir': out, **settings}
    return [*map(str, configs), *(f'--{key}={value}' for key, value in settings.items())]


def configured(*args, **settings):
    return configure(vars(train_lm), arguments(*args, **settings), quiet=True)


def run(data, out, *configs, **settings):
    """Train in this process, from start to end; return the exit status."""
    return train_lm.main(configured(data, out, *configs, **settings))


def begin(data, out, **settings):
    """Return a run before its first update, or, resumed, before its next one."""
    new = train_lm.make_run(configured(data, out, **settings))
    if train_lm.resume:
        train_lm.load(new)
    return new


def updates(r, n):
    """Train for n updates; return (loss, norm, stop) of each."""
    results = []
    for _ in range(n):
        results.append(train_lm.train_update(r, False))
        r.step += 1
    return results


def launch(script, argv, ranks=1):
    return conftest.start([script, *argv], ranks)


def finished(process):
    """Wait for a process that must succeed; return its standard output."""
    out, error = process.communicate()
    assert process.returncode == 0, error
    return out


def start(data, out, *, ranks=1, **settings):
    return launch('train_lm.py', arguments(data, out, **settings), ranks)


def train_as_rank(argv):
    """A rank's part of a run, for run_ranks."""
    return train_lm.main(configure(vars(train_lm), argv, quiet=True))


def mistake(capfd, script, argv):
    """Return what a script prints for these arguments: one line on stderr, exit status 2."""
    capfd.readouterr()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as stop:
        patch.setattr(sys, 'argv', [script.__name__, *map(str, argv)])
        work = getattr(script, 'train', None) or getattr(script, 'make_shards', None)
        work = script.main if script.__name__.startswith('train_') else work
        run_script((lambda: work(configure(vars(script)))) if work else script.main)
    error = capfd.readouterr().err
    assert stop.value.code == 2 and error.count('\n') == 1 and error.startswith('error: '), error
    return error


def read_log(out):
    lines = (Path(out) / 'log.jsonl').read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in IGNORED} for line in lines]


def same(a, b):
    """Assert that two trees of tensors and plain types are bit-equal, timings aside."""
    leaves = [tree_flatten_with_path(x)[0] for x in (a, b)]
    for (path, x), (path_b, y) in zip(*leaves, strict=True):
        ignored = {getattr(key, 'key', 0) for key in path} & set(IGNORED)
        equal = torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y
        assert path == path_b and (ignored or equal), (path, path_b, x, y)


@pytest.fixture(scope='session')
def trained(data, tmp_path_factory):
    """A folder with three runs: rnn, gpt, lstm."""
    folder = tmp_path_factory.mktemp('trained')
    kinds = {'rnn': {}, 'gpt': {'recurrent': False, 'aggregation': 'softmax_l2'}, 'lstm': LSTM}
    for name, settings in kinds.items():
        assert run(data, folder / name, max_iters=4, **settings) == 0
    return folder


# ---- a run and its files ----


def test_log_and_checkpoint(data, tmp_path, capsys):
    assert run(data, tmp_path, plot=True) == 0
    log = read_log(tmp_path)
    assert [r['step'] for r in log] == list(range(9)) and log[8]['tokens'] == 512
    assert [r['step'] for r in log if 'val_loss' in r] == [0, 4, 8]
    assert log[0]['val_loss'] == pytest.approx(math.log(256), abs=1e-4)
    assert log[0]['val_bits_per_byte'] == pytest.approx(8, abs=1e-3)
    assert [r.get('epoch') for r in log[1:]] == [0, 0, 0, 0, 0, 1, 1, 1]
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    checkpoints = {'ckpt_last.pt', 'ckpt_prev.pt', 'ckpt_best.pt'}
    assert {'config.json', 'loss.png', *checkpoints} <= files.keys()
    config = json.loads(files['config.json'])
    assert config['n_embd'] == 32 and {'commit', 'device_name', 'torch'} <= config.keys()
    # eval_only prints the same value and writes nothing
    assert run(data, tmp_path, eval_only=True) == 0
    loss = f'step 8: validation loss {log[8]["val_loss"]:.4f} nats per token ('
    assert loss in capsys.readouterr().out
    assert files == {path.name: path.read_bytes() for path in tmp_path.iterdir()}


@pytest.mark.parametrize(
    'settings', [{}, {'recurrent': False}, {'batch_size': 4, **ROUTED}, LSTM, TRANSFORMER], ids=str
)
def test_resume_is_bit_equal(data, tmp_path, monkeypatch, settings):
    """Eight updates equal three, a stop, and five more. Update 5 starts an epoch, update 4 reads a
    shard's second window. A run that dies in a validation has its checkpoint: it is validated and
    logged again."""
    a, b = tmp_path / 'a', tmp_path / 'b'
    run(data, a, **settings)
    update, evaluate, count = train_lm.train_update, train_lm.evaluate, iter(range(99))
    monkeypatch.setattr(train_lm, 'train_update', lambda r, _: update(r, next(count) == 2))
    assert run(data, b, **settings) == 143
    assert load_checkpoint(b / 'ckpt_last.pt')['step'] == 3
    monkeypatch.setattr(train_lm, 'evaluate', lambda r: evaluate(r) if r.step < 4 else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(data, b, resume=True, **settings)
    monkeypatch.setattr(train_lm, 'evaluate', evaluate)
    torch.manual_seed(999)  # a new process has other random states
    assert run(data, b, resume=True, **settings) == 0
    same(load_checkpoint(a / 'ckpt_last.pt'), load_checkpoint(b / 'ckpt_last.pt'))
    same(read_log(a), read_log(b))


def test_a_resumed_run_may_change_the_optimizer_but_nothing_unknown(data, tmp_path):
    run(data, tmp_path, max_iters=4)
    settings = {'resume': True, 'learning_rate': 0.5, 'betas': (0.1, 0.2)}
    muon, adamw = begin(data, tmp_path, **settings).optimizers
    assert muon.param_groups[0]['peak_lr'] == 0.5
    assert adamw.param_groups[0]['betas'] == (0.1, 0.2)
    assert all(s['momentum_buffer'].abs().sum() > 0 for s in muon.state.values())

    saved = load_checkpoint(tmp_path / 'ckpt_last.pt')['config']

    def resume(**changes):
        config, defaults = {**saved, **changes}, {**saved, 'z_loss': 0.0}
        common.refuse_changes(saved, config, defaults, train_lm.HARMLESS, 'ckpt', 'my_train.py')

    resume(z_loss=0.0)  # a setting that the script got later, at its default
    with pytest.raises(common.CheckpointError) as error:
        resume(z_loss=0.1)
    assert 'ckpt: was trained with z_loss = 0.0, not 0.1' in str(error.value)
    assert 'add z_loss to HARMLESS in my_train.py' in str(error.value)


@pytest.mark.parametrize('settings', [{}, {'recurrent': False}, LSTM, TRANSFORMER], ids=str)
def test_loss_falls_below_the_unigram_entropy(data, tmp_path, settings):
    """Squares modulo 11 have an entropy of 1.77 nats; who knows the order predicts them exactly."""
    length = {'max_iters': 60, 'eval_interval': 60, 'baseline_lr': 0.01}
    assert run(data, tmp_path, **length, **settings) == 0
    assert max(read_log(tmp_path)[-1][name] for name in ('val_loss', 'train_loss')) < 1.2


# ---- an update: micro-batches, ranks, graphs ----


@pytest.mark.parametrize('rows, reset_every, more', [(0, 0, {}), (4, 3, {}), (2, 4, LSTM)], ids=str)
def test_states_are_carried_and_reset(data, tmp_path, rows, reset_every, more):
    """With learning rates of 0, an update's loss is that of each stream read alone from its carried
    state, which is empty at a shard's start and in the stream's turn of reset_every."""
    rates = dict.fromkeys(['learning_rate', 'embedding_lr', 'head_lr', 'scalar_lr'], 0)
    more = {'batch_size': rows, 'reset_every': reset_every, 'baseline_lr': 1e-20, **rates, **more}
    r, states, resets = begin(data, tmp_path, **more), [None] * 8, []
    for p in r.model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    files = data_fineweb.find_shards(str(data), 'train')
    loader = data_fineweb.Loader(files, 8, 8, 256, True, seed=1337)
    for step, (loss, _, _) in enumerate(updates(r, 9)):
        x, y, reset = loader.next()
        total = 0
        for b in range(8):
            is_reset = reset or reset_every and b % reset_every == step % reset_every
            with torch.no_grad():
                one, states[b] = r.model(x[[b]], y[[b]], None if is_reset else states[b])
            total += one.cross_entropy.item() / 8
        assert loss == pytest.approx(total, rel=1e-6)
        resets += [step] if reset else []
    assert resets == [0, 3, 5, 8]


def test_gradients_lie_in_one_buffer(data, tmp_path):
    """Each .grad is a view of it, also after somebody has replaced it; behind them are loss, stop
    and norm."""
    r = begin(data, tmp_path, grad_clip=0)
    ((loss, norm, stop),) = updates(r, 1)
    g = r.gradients
    grads = torch.cat([p.grad.flatten() for p in r.model.parameters()])
    assert norm == pytest.approx(grads.norm().item(), rel=1e-5)
    assert norm == pytest.approx(g.buffer[:-3].norm().item(), rel=1e-5)
    assert g.buffer[-3:].tolist() == [loss, float(stop), norm]
    r.model.zero_grad(set_to_none=True)
    g.zero()
    g.buffer.fill_(1)
    assert all((p.grad == 1).all() for p in r.model.parameters())


def addresses(r):
    """Return where the tensors lie that a captured update reads and writes."""
    kept = [[r.gradients.buffer], r.state, r.batch[:2], r.batch[2]]
    kept += [(p, p.grad) for p in r.model.parameters()]
    kept += [[group['lr'] for group in o.param_groups] for o in r.optimizers]
    kept += [moments.values() for o in r.optimizers for moments in o.state.values()]
    return [t.data_ptr() for tensors in kept for t in tensors]


def replay(graphs, name, function, run, *args):
    """Do what kernels.graphed does, as far as a CPU can: from the fourth call on, function reads
    the arguments of the fourth and its results lie where the fourth's lay. Nothing may move."""
    if graphs is None:
        return function(run, *args)
    calls, captured, result, known = graphs.get(name, (0, None, None, []))
    if calls <= 3:
        captured = args
    if calls == 3:
        known = addresses(run)
    # the optimizers have no moments before their first step
    assert calls < 3 or known == addresses(run)[: len(known)], name
    found = function(run, *captured)
    if calls > 3:
        for old, new in zip(result or [], found or [], strict=True):
            old.matrices.copy_(new.matrices)
            old.share.copy_(new.share)
    else:
        result = found
    graphs[name] = calls + 1, captured, result, known
    return result


@pytest.mark.parametrize(
    'settings',
    [{'reset_every': 3}, {'batch_size': 2, **ROUTED}, {'recurrent': False, 'batch_size': 4}],
    ids=str,
)
def test_captured_updates_use_the_same_memory(data, tmp_path, monkeypatch, settings):
    """Nine updates with replays equal nine without, bit for bit, across a resume after three."""
    monkeypatch.setattr(train_lm, 'graphed', replay)
    eager = begin(data, tmp_path / 'a', **settings)
    wanted, out = updates(eager, 9), tmp_path / 'b'
    out.mkdir()
    first = begin(data, out, **settings)
    first.graphs = {}
    found = updates(first, 3)
    train_lm.save(first)
    resumed = begin(data, out, resume=True, **settings)
    resumed.graphs = {}
    assert found + updates(resumed, 6) == wanted and len({loss for loss, *_ in wanted}) == 9
    same(eager.model.state_dict(), resumed.model.state_dict())
    same(eager.state, resumed.state)
    for a, b in zip(eager.optimizers, resumed.optimizers, strict=True):
        same(a.state_dict()['state'], b.state_dict()['state'])
    assert set(resumed.graphs) == {'chunk', 'orthogonalize', 'apply'}
    assert all(calls > 4 for calls, *_ in resumed.graphs.values())


@pytest.mark.parametrize('recurrent', [True, False])
def test_ranks_and_micro_batches(data, tmp_path, recurrent):
    """1 rank x 4 micro-batches = 2 ranks x 2 = the batch as a whole, for every logged number."""
    settings = {'recurrent': recurrent, 'val_streams': 5, 'reset_every': 3, 'max_iters': 5}
    run(data, tmp_path / 'whole', **settings)
    run(data, tmp_path / 'micro', batch_size=2, **settings)
    argv = arguments(data, tmp_path / 'ranks', batch_size=2, **settings)
    assert run_ranks(2, train_as_rank, argv) == [0, 0]
    whole, whole_saved = (
        read_log(tmp_path / 'whole'),
        load_checkpoint(tmp_path / 'whole/ckpt_last.pt'),
    )
    for name in ('micro', 'ranks'):
        for a, b in zip(whole, read_log(tmp_path / name), strict=True):
            for key in {'train_loss', 'val_loss', 'grad_norm'} & a.keys():
                # the first updates: before Muon's iteration has amplified any rounding
                rel = 1e-5 if a['step'] < 2 and key != 'val_loss' else 2e-3
                assert a[key] == pytest.approx(b[key], rel=rel), (name, a['step'], key)
        saved = load_checkpoint(tmp_path / name / 'ckpt_last.pt')
        for a, b in zip(whole_saved['state'], saved['state'], strict=True):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
    # a run continues with another number of ranks
    assert run(data, tmp_path / 'ranks', resume=True, **settings | {'max_iters': 6}) == 0


BASELINES = [('lstm', f'n_expert=2 {sizes}') for sizes in ('n_embd=128', 'n_embd=256 n_layer=3')]
BASELINES += [('transformer', 'n_layer=2 n_expert=1 n_embd=64 n_head=4 n_kv_head=2 block_size=8')]


@pytest.mark.parametrize('arch, sizes', BASELINES)
def test_baselines(arch, sizes):
    """They have our models' size and FLOPs, and chunks with carried states, however they are cut,
    equal one long pass."""
    config = model.ModelConfig(256, window=12, **table(sizes))
    ours, net = model.build_model(config, arch == 'lstm'), baselines.build(arch, config)
    assert 0.98 < net.num_params()['total'] / ours.num_params()['total'] < 1.02
    if arch == 'transformer':
        assert net.flops_per_token() == ours.flops_per_token()
    x, y = torch.randint(256, (2, 3, 30))
    found = []
    for length in (30, 11, 1):
        state, total = net.init_state(3), 0
        for x_t, y_t in zip(x.split(length, 1), y.split(length, 1), strict=True):
            loss, state = net(x_t, y_t, state)
            total += loss.objective * x_t.numel() / x.numel()
        found.append(total)
    torch.testing.assert_close(found, 3 * [found[0]], rtol=1e-5, atol=0)
    # without a state, as in training, and within the window the loss is the same
    short, _ = net(x[:, :8], y[:, :8])
    torch.testing.assert_close(short, net(x[:, :8], y[:, :8], net.init_state(3))[0])


# ---- validation ----


@pytest.mark.parametrize('recurrent', [True, False])
def test_validation_does_not_depend_on_rows_or_chunks(data, tmp_path, recurrent):
    """Three streams of 32 tokens, read side by side or one by one, in chunks of 8, 5 and 32."""
    losses = []
    for rows, T in ((3, 8), (1, 8), (3, 5), (1, 32)):
        settings = {'block_size': T, 'tokens_per_step': 4 * T, 'recurrent': recurrent}
        r = begin(data, tmp_path, **settings)
        torch.manual_seed(0)
        for p in r.model.parameters():
            torch.nn.init.normal_(p, std=0.3)
        train_lm.set_val_rows(r, rows)
        losses.append(train_lm.evaluate(r))
    for nats, bits in losses:
        assert nats == pytest.approx(losses[0][0], rel=1e-6)
        assert bits == pytest.approx(nats / math.log(2), rel=1e-9)  # a token is a byte


# ---- the size of a micro-batch ----


def gigabytes(monkeypatch, per_row, free):
    """Let a row take `per_row` GB and the device have `free` GB."""
    monkeypatch.setattr(common, 'device_memory', lambda device: (free * 1e9, free * 1e9))
    monkeypatch.setattr(train_lm, 'cpu_bytes_per_row', lambda run: per_row * 1e9)


@pytest.mark.parametrize('free, rows', [(9, 8), (7.9, 4), (3, 2), (1, 1)])
def test_rows_are_those_that_fit_a_cpu(data, tmp_path, monkeypatch, capsys, free, rows):
    r = begin(data, tmp_path)
    gigabytes(monkeypatch, per_row=1, free=free)
    train_lm.prepare(r)
    assert r.rows == len(r.batch[0]) == rows and len(r.batch[2][0]) == rows
    assert f'{rows} rows per micro-batch' in capsys.readouterr().out


MEASURE = """
import sys
import train_lm
from configurator import configure
run = train_lm.make_run(configure(vars(train_lm), sys.argv[1:], quiet=True))
print(run.rows, train_lm.cpu_bytes_per_row(run))
"""


def test_bytes_per_row_are_measured(tmp_path):
    """A row of this model keeps at least the FFN's inner activations, 4 D floats per token, layer
    and expert, and not a hundred times more. In a process of its own, whose memory only grows."""
    shards(tmp_path, val_000000=150, train_000001=64 * 65 * 2)
    sizes = {'n_embd': 128, 'block_size': 64, 'tokens_per_step': 64 * 64}
    done = conftest.run(['-c', MEASURE, *arguments(tmp_path, tmp_path / 'out', **sizes)])
    rows, bytes_per_row = map(float, done.stdout.split()[-2:])
    least = 4 * 4 * 128 * 64 * 2 * 2
    assert least < bytes_per_row < 100 * least and rows == 64


def test_rows_are_tried_where_memory_can_run_out(data, tmp_path, monkeypatch):
    """Out of memory takes the next choice; nothing of a trial is left."""
    r, tried = begin(data, tmp_path), []

    def micro_batch(run, x, y, state, real=train_lm.forward_backward):
        tried.append(len(x))
        real(run, x, y, state)
        if len(x) > 2:
            raise torch.OutOfMemoryError('of 80 GB')

    monkeypatch.setattr(train_lm, 'forward_backward', micro_batch)
    train_lm.prepare(r)
    assert tried == [8, 4, 2] and r.rows == 2
    assert not r.gradients.buffer.any() and not any(t.any() for t in (*r.state, *r.batch[2]))


def test_a_model_that_does_not_fit_is_refused_before_anything_is_written(
    data, tmp_path, monkeypatch, capfd
):
    out = tmp_path / 'out'
    gigabytes(monkeypatch, per_row=1, free=0.5)
    error = mistake(capfd, train_lm, arguments(data, out))
    assert 'block_size = 8: one row does not fit in the memory of' in error
    error = mistake(capfd, train_lm, arguments(data, out, batch_size=4))
    assert 'batch_size = 4 does not fit' in error and '--batch_size=0 finds' in error
    error = mistake(capfd, train_lm, arguments(data, out, n_embd=2**15, n_head=0))
    assert 'parameters: needs more than' in error
    assert not out.exists()


# ---- stops ----


def test_a_signal_saves_and_exits(data, tmp_path):
    """SIGTERM; test_common.py has the others."""
    process = start(data, tmp_path, max_iters=100000, eval_interval=100000)
    log = tmp_path / 'log.jsonl'
    while not log.exists() or log.read_text().count('\n') < 3:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    out, error = process.communicate()
    assert process.returncode == 128 + signal.SIGTERM and 'Traceback' not in error, error
    saved = load_checkpoint(tmp_path / 'ckpt_last.pt')
    assert f'stopped after update {saved["step"]}, saved' in out
    assert read_log(tmp_path)[-1]['step'] == saved['step'] > 0


@pytest.mark.parametrize('factor', [math.nan, 1e30])
def test_a_non_finite_update_changes_no_weight(data, tmp_path, factor):
    """Nor a moment: with NaN gradients, or finite ones of an infinite norm, and a finite loss."""
    r = begin(data, tmp_path)
    updates(r, 1)
    r.model.head.register_hook(lambda g: g * factor)
    moments = [t for o in r.optimizers for s in o.state.values() for t in s.values()]
    tensors = [*r.model.parameters(), *moments]
    before = [t.clone() for t in tensors]
    loss, norm, _ = train_lm.train_update(r, False)
    assert math.isfinite(loss) and not math.isfinite(norm)
    assert all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))


def test_a_broken_weight_stops_with_the_last_good_checkpoint(data, tmp_path, capsys):
    run(data, tmp_path, max_iters=4)
    saved = (tmp_path / 'ckpt_last.pt').read_bytes()
    assert run(data, tmp_path, max_iters=20, resume=True, learning_rate=1e38) == 1
    assert 'error: update 6: loss ' in capsys.readouterr().out
    assert (tmp_path / 'ckpt_last.pt').read_bytes() == saved


@pytest.mark.parametrize('failure', [torch._dynamo.exc.TorchDynamoException, RuntimeError])
def test_training_continues_uncompiled(data, tmp_path, monkeypatch, capsys, failure):
    """Where torch.compile fails, or a compiled kernel cannot be launched, one line says so."""

    def micro_batch(run, *args, real=train_lm.forward_backward):
        if kernels.fused.enabled:
            raise failure('no C++ compiler\nmore lines')
        real(run, *args)

    monkeypatch.setattr(train_lm, 'forward_backward', micro_batch)
    assert run(data, tmp_path, compile=True, max_iters=1) == 0
    line = f'compile = True does not work here; training uncompiled ({failure.__name__}: no C++'
    assert capsys.readouterr().out.count(line) == 1


def test_training_continues_without_graphs(monkeypatch, capsys):
    """Where a capture is refused, one line says so, and the function runs eagerly from then on.
    tests/test_gpu.py refuses real captures."""
    for name in ('CUDAGraph', 'current_stream'):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, 'stream', lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, 'graph', lambda *_, **__: contextlib.nullcontext())
    calls, graphs = [], {}

    def update(x):
        calls.append(x)
        if len(calls) == 4:  # the captured one
            raise torch.OutOfMemoryError('CUDA out of memory')
        return 2 * x

    assert [kernels.graphed(graphs, 'chunk', update, x) for x in range(7)] == [
        0,
        2,
        4,
        6,
        8,
        10,
        12,
    ]
    assert calls == [0, 1, 2, 3, 3, 4, 5, 6]
    line = "no CUDA graph of 'chunk': training is slower (OutOfMemoryError: CUDA out of memory)"
    assert capsys.readouterr().out.count(line) == 1


@pytest.mark.long
def test_there_is_no_compiler(data, tmp_path):
    """The same, with what Inductor raises."""
    argv = arguments(data, tmp_path / 'out', compile=True, max_iters=1)
    env = {**os.environ, 'CXX': '/nonexistent', 'TORCHINDUCTOR_CACHE_DIR': str(tmp_path)}
    done = conftest.run(['train_lm.py', *argv], env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count('compile = True does not work here; training uncompiled') == 1


# ---- mistakes ----


MISTAKES = """
tokens_per_step=100 | tokens_per_step = 100: must be a multiple
batch_size=3 | batch_size = 3: must divide the 8 rows
device=cuda:99 | device =
resume=True | out: holds no trained run
val_tokens=1000000 | lower val_tokens
tokens_per_step=512 | too few
betas=(0.9,) | betas = (0.9,)
arch=transformer recurrent=False | n_expert = 2: arch = 'transformer' corresponds to
arch=lstm recurrent=False | needs --recurrent=True
arch=lstm learning_rate=0.1 | --baseline_lr
path=slow | mode = 'slow': expected one of fast, plain
"""


@pytest.mark.parametrize('line', MISTAKES.strip().splitlines())
def test_mistakes_are_one_line(data, tmp_path, line, capfd):
    settings, message = line.split(' | ')
    argv = [*arguments(data, tmp_path / 'out'), *(f'--{word}' for word in settings.split())]
    assert message in mistake(capfd, train_lm, argv)


def test_refusals_that_keep_a_run(data, trained, tmp_path, capfd):
    """Shards of other content, with the same names and sizes, are other data; a copy is not."""
    out, others, bad = tmp_path / 'out', tmp_path / 'others', tmp_path / 'bad'
    run(data, out, max_iters=2)
    shutil.copytree(data, others)
    assert run(others, out, max_iters=3, resume=True) == 0
    shard = str(others / 'fineweb_train_000002.bin')
    data_fineweb.write_shard(shard, np.roll(data_fineweb.read_shard(shard, 256), 1))
    bad.mkdir()
    (bad / 'model.safetensors').write_text('x')
    before = (out / 'ckpt_last.pt').read_bytes()
    for settings, message in (
        ('', 'holds a run already'),
        ('--resume=True --n_embd=64', 'was trained with n_embd = 32, not 64'),
        (f'--resume=True --data_dir={others}', f'other shards than those in {others}'),
        ('--overwrite=True --data_dir=/nowhere', 'no train shards'),
        ('--overwrite --init_from=none', 'none: holds no trained run'),
        (f'--overwrite --init_from={bad}', 'bad/model.safetensors: cannot be read'),
        (f'--overwrite --init_from={trained}/lstm --arch=experts --n_embd=64', 'no weight has'),
        ('--overwrite --batch_size=3', 'must divide the 8 rows'),
        (f'--resume --init_from={trained}/rnn', '--init_from starts a new run'),
    ):
        argv = [*arguments(data, out), *settings.split()]
        assert message in mistake(capfd, train_lm, argv)
    assert (out / 'ckpt_last.pt').read_bytes() == before
    assert run(others, out, eval_only=True) == 0  # only asks for the loss on other data


DAMAGES = [  # part of a checkpoint, its damage, the message
    ('model.head', lambda w: w[:5], 'size mismatch for head'),
    ('step', lambda n: None, 'step = '),
    ('optimizers', lambda o: o[:1], 'optimizers or rng does not fit'),
    ('state', lambda s: [x[:1] for x in s], 'loader or state does not fit'),
    ('config', lambda c: None, 'not a checkpoint of this train_lm.py'),
]


def test_a_damaged_checkpoint_is_one_line(data, tmp_path, capfd):
    """Readable files whose parts do not fit are refused by file and part."""
    run(data, tmp_path, max_iters=2)
    path, argv = tmp_path / 'ckpt_last.pt', arguments(data, tmp_path, resume=True)
    os.link(path, tmp_path / 'good.pt')
    for key, damage, message in DAMAGES:
        saved = load_checkpoint(tmp_path / 'good.pt')
        *outer, name = key.split('.')
        part = saved[outer[0]] if outer else saved
        part[name] = damage(part[name])
        common.save_checkpoint(saved, path)
        error = mistake(capfd, train_lm, argv)
        assert f'{path}: ' in error and message in error, error


@pytest.mark.parametrize('name', ['wandb', 'tensorboard', 'matplotlib'])
def test_packages_are_optional(data, tmp_path, monkeypatch, capfd, name):
    """They are imported only when asked for; if one is missing, a line names it."""
    monkeypatch.setitem(sys.modules, name, None)  # as if not installed
    asked = {'plot' if name == 'matplotlib' else name: True}
    error = mistake(capfd, train_lm, arguments(data, tmp_path / 'out', **asked))
    assert f'{name} is asked for but not installed' in error
    assert run(data, tmp_path / 'out', max_iters=1) == 0


# ---- a copied trainer, and starting from other weights ----


def test_a_copied_trainer_with_a_new_setting(data, tmp_path):
    """Its messages and its --help carry its name, and a new field of ModelConfig gets the setting
    of its name."""
    source = (ROOT / 'train_lm.py').read_text()
    line = "init_b = 'one' "
    assert line in source
    copy = tmp_path / 'my_train.py'
    copy.write_text(source.replace(line, 'z_loss = 1e-4  # of squared log Z\n' + line))
    (tmp_path / 'model.py').write_text(
        (ROOT / 'model.py')
        .read_text()
        .replace('    init_b: str', '    z_loss: float = 0.0\n    init_b: str')
    )
    code = 'import my_train as t; from configurator import configure as c; import sys; '
    code += 'r = t.make_run(c(vars(t), quiet=True)); print(t.SCRIPT, r.model.config.z_loss)'
    env = os.environ | {'PYTHONPATH': os.pathsep.join([str(tmp_path), str(ROOT)])}
    done = conftest.run(['-c', code, *arguments(data, tmp_path / 'out')], env=env, cwd=tmp_path)
    assert done.stdout.splitlines()[-1:] == ['my_train.py 0.0001'], done.stderr


def test_init_from(trained, data, tmp_path, capfd):
    """A run's or an export's weights start another, of another depth as far as they fit."""
    source, export = trained / 'rnn', tmp_path / 'export'
    saved = load_checkpoint(source / 'ckpt_best.pt')
    configure(vars(sample), [f'--out_dir={source}', f'--export={export}'], quiet=True)
    sample.export_model()
    for folder in (source, export):
        r = begin(data, tmp_path / 'out', init_from=folder)
        same(r.model.state_dict(), saved['model'])
        assert r.step == 0 and not any(o.state for o in r.optimizers)
    capfd.readouterr()
    deeper = begin(data, tmp_path / 'x', init_from=source, n_layer=3).model.state_dict()
    assert all(torch.equal(deeper[name], x) for name, x in saved['model'].items())
    printed = capfd.readouterr().out
    assert 'initialized from scratch: layers.2.' in printed and 'not taken' not in printed
    begin(data, tmp_path / 'x', init_from=source, n_layer=1)
    assert 'not taken: layers.1.' in capfd.readouterr().out


@pytest.mark.parametrize('kind', ['a run', 'an export'])
def test_init_from_adopts_the_sizes_that_are_not_given(trained, data, tmp_path, kind):
    """Of a non-recurrent model that differs from the defaults; only the window is given."""
    source = trained / 'gpt'
    if kind == 'an export':
        configure(vars(sample), [f'--out_dir={source}', f'--export={tmp_path}/e'], quiet=True)
        sample.export_model()
        source = tmp_path / 'e'
    argv = [f'--data_dir={data}', f'--out_dir={tmp_path}/out', f'--init_from={source}']
    argv += '--tokens_per_step=64 --val_tokens=96 --val_streams=3 --device=cpu --window=7'.split()
    r = train_lm.make_run(configure(vars(train_lm), argv, quiet=True))
    c = r.model.config
    assert (r.model.recurrent, c.vocab_size, c.n_embd, c.n_head) == (False, 256, 32, 2)
    assert (c.aggregation, c.block_size, c.window) == ('softmax_l2', 8, 7)
    assert r.config['recurrent'] is False and r.config['tokenizer'] == 'bytes'


def test_fine_tuning_by_two_lines(tmp_path, monkeypatch, capsys):
    """As README says: prepare a text, then run the line that this prints, here for two updates.
    The shipped model knows such a text, where a new one loses ln 256 = 5.5 nats per byte."""
    monkeypatch.chdir(tmp_path)
    speech = 'Fellow-citizens of the Senate and of the House of Representatives: the Congress has '
    speech += 'passed the law for the relief of our troops.\n'
    (tmp_path / 'my.txt').write_text(80 * speech)
    argv = ['--text=my.txt', '--tokenizer=bytes']
    data_fineweb.make_shards(configure(vars(data_fineweb), argv, quiet=True))
    lines = capsys.readouterr().out.splitlines()
    (line,) = (line for line in lines if '--init_from=' in line)
    python, script, *words = shlex.split(line)
    assert python == 'python' and os.path.samefile(script, ROOT / 'train_lm.py')
    words += ['--max_iters=2', '--device=cpu', '--compile=False']
    assert train_lm.main(configure(vars(train_lm), words)) == 0
    out = capsys.readouterr().out
    assert 'initialized from scratch' not in out and 'not taken' not in out
    (folder,) = (word.partition('=')[2] for word in words if word.startswith('--out_dir='))
    log = read_log(folder)
    assert log[0]['val_loss'] < 2.5 and log[-1]['step'] == 2

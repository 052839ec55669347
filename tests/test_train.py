"""train_lm.py as a user starts it: resume, micro-batches, ranks, stops, memory, mistakes."""

import ast
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

ROOT = Path(__file__).resolve().parent.parent


def table(text):
    """{name: value} of 'name=literal name=literal ...'."""
    pairs = (word.partition('=') for word in text.split())
    return {name: ast.literal_eval(value) for name, _, value in pairs}


TINY = table("""
tokenizer='bytes' n_layer=2 n_expert=2 n_embd=32 n_head=2 window=12 block_size=8 tokens_per_step=64
max_iters=8 warmup_iters=3 eval_interval=4 val_tokens=96 val_streams=3 compile=False dtype='float32'
device='cpu' threads=1
""")
IGNORED = 'val_seconds ms tokens_per_s env_steps_per_s clock seconds config'.split()  # times
LSTM = {'arch': 'lstm'}
PLAIN = {'arch': 'transformer', 'recurrent': False, 'n_expert': 1}


def shards(folder, **sizes):
    for name, n in sizes.items():
        tokens = (np.arange(n) ** 2 % 11 + 65).astype(np.uint16)
        data_fineweb.write_shard(str(folder / f'fineweb_{name}.bin'), tokens)
    data_fineweb.write_meta(folder, {'tokenizer': 'bytes', 'source': 'test', 'shards': []})


@pytest.fixture(scope='session')
def data(tmp_path_factory):
    """A validation shard and two that can be learnt; 5 windows an epoch."""
    folder = tmp_path_factory.mktemp('data')
    shards(folder, val_000000=150, train_000001=8 * 25, train_000002=8 * 17)
    return folder


def arguments(data, out, *configs, **settings):
    settings = {**TINY, 'data_dir': data, 'out_dir': out, **settings}
    return [*map(str, configs), *(f'--{key}={value}' for key, value in settings.items())]


def configured(*args, **settings):
    return configure(vars(train_lm), arguments(*args, **settings), quiet=True)


def run(data, out, *configs, **settings):
    """A whole run in this process: the exit status."""
    return train_lm.main(configured(data, out, *configs, **settings))


def begin(data, out, **settings):
    """A run before its first update, or before the next one."""
    new = train_lm.make_run(configured(data, out, **settings))
    if train_lm.resume:
        train_lm.load(new)
    return new


def updates(r, n):
    found = []
    for _ in range(n):
        found.append(train_lm.train_update(r, False))
        r.step += 1
    return found


def launch(script, argv, ranks=1):
    return conftest.start([script, *argv], ranks)


def finished(process):
    """-> what it prints; it must end well."""
    out, error = process.communicate()
    assert process.returncode == 0, error
    return out


def start(data, out, *, ranks=1, **settings):
    return launch('train_lm.py', arguments(data, out, **settings), ranks)


def mistake(capfd, script, argv):
    """What a script says to these arguments: one line, exit status 2."""
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
    """Bit-equal trees of tensors and plain types; timings aside."""
    leaves = [tree_flatten_with_path(x)[0] for x in (a, b)]
    for (path, x), (its, y) in zip(*leaves, strict=True):
        timing = {getattr(k, 'key', 0) for k in path} & set(IGNORED)
        equal = torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y
        assert path == its and (timing or equal), (path, its, x, y)


@pytest.fixture(scope='session')
def trained(data, tmp_path_factory):
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
    saved = {'ckpt_last.pt', 'ckpt_prev.pt', 'ckpt_best.pt'}
    assert {'config.json', 'loss.png', *saved} <= files.keys()
    config = json.loads(files['config.json'])
    assert config['n_embd'] == 32 and {'commit', 'device_name', 'torch'} <= config.keys()
    # eval_only: the same value, and nothing is written
    assert run(data, tmp_path, eval_only=True) == 0
    assert (
        f'step 8: validation loss {log[8]["val_loss"]:.4f} nats per token'
        in capsys.readouterr().out
    )
    assert files == {path.name: path.read_bytes() for path in tmp_path.iterdir()}


ROUTED = {'aggregation': 'softmax_l2', 'share_kv': False}
KINDS = [{}, {'recurrent': False}, {'batch_size': 4, **ROUTED}, LSTM, PLAIN]


@pytest.mark.parametrize('settings', KINDS, ids=str)
def test_resume_is_bit_equal(data, tmp_path, monkeypatch, settings):
    """2N updates = N, stop, N. Update 5 starts an epoch, update 4 reads a shard's second window.
    And a run that dies in a validation has its checkpoint: it is validated and logged again."""
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
    torch.manual_seed(999)  # whatever the new process starts with
    assert run(data, b, resume=True, **settings) == 0
    same(load_checkpoint(a / 'ckpt_last.pt'), load_checkpoint(b / 'ckpt_last.pt'))
    same(read_log(a), read_log(b))


def test_resume_takes_new_optimizer_settings(data, tmp_path):
    run(data, tmp_path, max_iters=4)
    settings = {'resume': True, 'learning_rate': 0.5, 'betas': (0.1, 0.2)}
    muon, adamw = begin(data, tmp_path, **settings).optimizers
    assert muon.param_groups[0]['peak_lr'] == 0.5
    assert adamw.param_groups[0]['betas'] == (0.1, 0.2)
    assert all(s['momentum_buffer'].abs().sum() > 0 for s in muon.state.values())


@pytest.mark.parametrize('settings', [{}, {'recurrent': False}, LSTM, PLAIN], ids=str)
def test_loss_falls_below_the_unigram_entropy(data, tmp_path, settings):
    """Of squares modulo 11: 1.77 nats, where the order is known 0; models and baselines."""
    length = {'max_iters': 60, 'eval_interval': 60, 'baseline_lr': 0.01}
    assert run(data, tmp_path, **length, **settings) == 0
    assert max(read_log(tmp_path)[-1][name] for name in ('val_loss', 'train_loss')) < 1.2


# ---- an update: micro-batches, ranks, graphs ----


@pytest.mark.parametrize('rows, every, more', [(0, 0, {}), (4, 3, {}), (2, 4, LSTM)])
def test_states_are_carried_and_reset(data, tmp_path, rows, every, more):
    """At rates of 0 the losses are the model's own, from nothing where a state is emptied."""
    rates = dict.fromkeys(['learning_rate', 'embedding_lr', 'head_lr', 'scalar_lr'], 0)
    more = {'batch_size': rows, 'reset_every': every, 'baseline_lr': 1e-20, **rates, **more}
    r, states, resets = begin(data, tmp_path, **more), [None] * 8, []
    for p in r.model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    files = data_fineweb.find_shards(str(data), 'train')
    loader = data_fineweb.Loader(files, 8, 8, 256, True, seed=1337)
    for step, (loss, _, _) in enumerate(updates(r, 9)):
        x, y, reset = loader.next()
        total = 0
        for b in range(8):
            fresh = reset or every and b % every == step % every
            with torch.no_grad():
                one, states[b] = r.model(x[[b]], y[[b]], None if fresh else states[b])
            total += one.cross_entropy.item() / 8
        assert loss == pytest.approx(total, rel=1e-6)
        resets += [step] if reset else []
    assert resets == [0, 3, 5, 8]


def addresses(r):
    """Of all tensors that a captured update reads and writes."""
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


GRAPHED = [{'reset_every': 3}, {'batch_size': 2, **ROUTED}, {'recurrent': False, 'batch_size': 4}]


@pytest.mark.parametrize('settings', GRAPHED, ids=str)
def test_captured_updates_use_the_same_memory(data, tmp_path, monkeypatch, settings):
    """Nine updates with replays equal nine without, bit for bit, across a resume after three."""
    monkeypatch.setattr(train_lm, 'graphed', replay)
    runs = [begin(data, tmp_path / 'a', **settings)]
    wanted, out = updates(runs[0], 9), tmp_path / 'b'
    out.mkdir()
    first = begin(data, out, **settings)
    first.graphs = {}
    found = updates(first, 3)
    train_lm.save(first)
    runs.append(begin(data, out, resume=True, **settings))
    runs[1].graphs = {}
    assert found + updates(runs[1], 6) == wanted and len({loss for loss, *_ in wanted}) == 9
    same(*([*r.model.state_dict().values()] for r in runs))
    same(*(r.state for r in runs))
    same(*([o.state_dict()['state'] for o in r.optimizers] for r in runs))
    assert set(runs[1].graphs) == {'chunk', 'orthogonalize', 'apply'}
    assert all(calls > 4 for calls, *_ in runs[1].graphs.values())


@pytest.mark.parametrize('recurrent', [True, False])
def test_ranks_and_micro_batches(data, tmp_path, recurrent):
    """1 rank x 4 micro-batches = 2 ranks x 2 = the batch as a whole, for every logged number."""
    settings = {'recurrent': recurrent, 'val_streams': 5, 'reset_every': 3, 'max_iters': 5}
    run(data, tmp_path / 'whole', **settings)
    run(data, tmp_path / 'micro', batch_size=2, **settings)
    out = finished(start(data, tmp_path / 'two', ranks=2, batch_size=2, **settings))
    assert '2 ranks x 2 micro-batches x 2 rows' in out
    names = ('whole', 'micro', 'two')
    logs = {name: read_log(tmp_path / name) for name in names}
    states = {name: load_checkpoint(tmp_path / name / 'ckpt_last.pt')['state'] for name in names}
    for name in ('micro', 'two'):
        for a, b in zip(logs['whole'], logs[name], strict=True):
            for key in {'train_loss', 'val_loss', 'grad_norm'} & a.keys():
                # the first: before Muon's iteration has amplified any rounding
                rel = 1e-5 if a['step'] < 2 and key != 'val_loss' else 2e-3
                assert a[key] == pytest.approx(b[key], rel=rel), (name, a['step'], key)
        for a, b in zip(states['whole'], states[name], strict=True):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
    # it continues with another number of ranks
    assert run(data, tmp_path / 'two', resume=True, **settings | {'max_iters': 6}) == 0


BASELINES = [('lstm', f'n_expert=2 {sizes}') for sizes in ('n_embd=128', 'n_embd=256 n_layer=3')]
BASELINES += [('transformer', 'n_layer=2 n_expert=1 n_embd=64 n_head=4 n_kv_head=2 block_size=8')]


@pytest.mark.parametrize('arch, sizes', BASELINES)
def test_baselines(arch, sizes):
    """Of equal size; chunks with the state handed on = one long pass, however cut."""
    config = model.ModelConfig(256, window=12, **table(sizes))
    ours, net = model.build_model(config, arch == 'lstm'), baselines.build(arch, config)
    assert 0.98 < net.num_params()['total'] / ours.num_params()['total'] < 1.02
    x, y = torch.randint(256, (2, 3, 30))
    found = []
    for cut in (30, 11, 1):
        state, total = net.init_state(3), 0
        for x_t, y_t in zip(x.split(cut, 1), y.split(cut, 1), strict=True):
            loss, state = net(x_t, y_t, state)
            total += loss.objective * x_t.numel() / x.numel()
        found.append(total)
    torch.testing.assert_close(found, 3 * [found[0]], rtol=1e-5, atol=0)
    short = net(x[:, :8], y[:, :8])[0]  # training: within W the same
    torch.testing.assert_close([*short], [*net(x[:, :8], y[:, :8], net.init_state(3))[0]])


# ---- stops ----


def test_signals_save_and_exit(data, tmp_path):
    for number in (signal.SIGTERM, signal.SIGINT):
        out = tmp_path / str(number)
        process, log = start(data, out, max_iters=100000, eval_interval=100000), out / 'log.jsonl'
        while not log.exists() or log.read_text().count('\n') < 3:
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)
        process.send_signal(number)
        stdout, stderr = process.communicate()
        assert process.returncode == 128 + number and 'Traceback' not in stderr, stderr
        saved = load_checkpoint(out / 'ckpt_last.pt')
        assert f'stopped after update {saved["step"]}, saved' in stdout
        assert read_log(out)[-1]['step'] == saved['step'] > 0


@pytest.mark.parametrize('factor', [math.nan, 1e30])
def test_a_non_finite_update_changes_no_weight(data, tmp_path, factor):
    """Nor a moment: by NaN gradients, or finite ones with an infinite norm, of a fine loss."""
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
"""


@pytest.mark.parametrize('line', MISTAKES.strip().splitlines())
def test_mistakes_are_one_line(data, tmp_path, line, capfd):
    settings, message = line.split(' | ')
    argv = [*arguments(data, tmp_path / 'out'), *(f'--{word}' for word in settings.split())]
    assert message in mistake(capfd, train_lm, argv)


def test_refusals_that_keep_a_run(data, trained, tmp_path, capfd):
    """Shards of other content, of the same names and sizes, are others; a copy is not."""
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
        (
            f'--overwrite --init_from={trained}/lstm --arch=experts --n_embd=64',
            'no weight has a name and shape',
        ),
        (f'--resume --init_from={trained}/rnn', '--init_from starts a new run'),
    ):
        argv = [*arguments(data, out), *settings.split()]
        assert message in mistake(capfd, train_lm, argv)
    assert (out / 'ckpt_last.pt').read_bytes() == before
    assert run(others, out, eval_only=True) == 0  # only asks what the weights are worth there


DAMAGES = [  # part of a checkpoint, what becomes of it, what is said
    ('model.head', lambda w: w[:5], 'size mismatch for head'),
    ('step', lambda n: None, 'step = '),
    ('optimizers', lambda o: o[:1], 'optimizers or rng does not fit'),
    ('state', lambda s: [x[:1] for x in s], 'loader or state does not fit'),
    ('config', lambda c: None, 'not a checkpoint of this train_lm.py'),
]


def test_a_damaged_checkpoint_is_one_line(data, tmp_path, capfd):
    """Whole files whose parts do not fit: refused by file and part."""
    run(data, tmp_path, max_iters=2)
    path, argv = tmp_path / 'ckpt_last.pt', arguments(data, tmp_path, resume=True)
    os.link(path, tmp_path / 'good.pt')
    for key, change, message in DAMAGES:
        saved = load_checkpoint(tmp_path / 'good.pt')
        *outer, name = key.split('.')
        part = saved[outer[0]] if outer else saved
        part[name] = change(part[name])
        common.save_checkpoint(saved, path)
        error = mistake(capfd, train_lm, argv)
        assert f'{path}: ' in error and message in error, error


def test_training_goes_on_uncompiled(data, tmp_path, monkeypatch, capsys):
    """Where torch.compile fails, one line says so."""

    def micro_batch(run, *args, real=train_lm.forward_backward):
        if kernels.fused.enabled:
            raise torch._dynamo.exc.TorchDynamoException('no C++ compiler\nmore lines')
        real(run, *args)

    monkeypatch.setattr(train_lm, 'forward_backward', micro_batch)
    assert run(data, tmp_path, compile=True, max_iters=1) == 0
    line = 'compile = True does not work here; training uncompiled (TorchDynamoException: no C++'
    assert capsys.readouterr().out.count(line) == 1


@pytest.mark.long
def test_there_is_no_compiler(data, tmp_path):
    """The same with Inductor, which then raises what it does."""
    argv = arguments(data, tmp_path / 'out', compile=True, max_iters=1)
    env = {**os.environ, 'CXX': '/nonexistent', 'TORCHINDUCTOR_CACHE_DIR': str(tmp_path)}
    done = conftest.run(['train_lm.py', *argv], env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count('compile = True does not work here; training uncompiled') == 1


@pytest.mark.parametrize('name', ['wandb', 'tensorboard', 'matplotlib'])
def test_packages_are_optional(data, tmp_path, monkeypatch, capfd, name):
    """Imported only when asked for; where one is missing, a line names it."""
    monkeypatch.setitem(sys.modules, name, None)  # as if not installed
    asked = {'plot' if name == 'matplotlib' else name: True}
    error = mistake(capfd, train_lm, arguments(data, tmp_path / 'out', **asked))
    assert f'{name} is asked for but not installed' in error
    assert run(data, tmp_path / 'out', max_iters=1) == 0


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
    """Of a non-recurrent model with three settings that differ from the defaults."""
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
    (tmp_path / 'my.txt').write_text(
        80 * (speech + 'passed the law for the relief of our troops.\n')
    )
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

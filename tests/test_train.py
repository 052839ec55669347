"""train_lm.py as a user starts it: resume, micro-batches and ranks, validation,
stops, mistakes, memory, baselines, the demo."""

import ast
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import forks
import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_flatten_with_path

import baselines
import checkpoint
import data_fineweb
import model
import train_lm
from checkpoint import load_checkpoint
from configurator import configure, read_script, run_script

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
META = {'tokenizer': 'bytes', 'source': 'test', 'shards': []}
IGNORED = 'ms tokens_per_s env_steps_per_s clock seconds config'.split()  # times
LSTM = {'arch': 'lstm'}
PLAIN = {'arch': 'transformer', 'recurrent': False, 'n_expert': 1}


# ---- runs, in this process and in others ----


def shards(folder, **sizes):
    for name, n in sizes.items():
        tokens = (np.arange(n) ** 2 % 11 + 65).astype(np.uint16)
        data_fineweb.write_shard(str(folder / f'fineweb_{name}.bin'), tokens)
    data_fineweb.write_meta(str(folder), META)


@pytest.fixture(scope='session')
def data(tmp_path_factory):
    """A validation shard and two that can be learnt; 5 windows an epoch: 8 updates meet every
    reset."""
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
    return train_lm.train(configured(data, out, *configs, **settings))


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
    command = [sys.executable, *([f'--ranks={ranks}'] if ranks > 1 else []), script, *argv]
    pipes = {'stdout': subprocess.PIPE, 'stderr': subprocess.PIPE, 'text': True}
    return forks.Popen(command, cwd=ROOT, env={**os.environ, 'OMP_NUM_THREADS': '1'}, **pipes)


def finished(process):
    """-> what it prints; it must end well."""
    out, error = process.communicate()
    assert process.returncode == 0, error
    return out


def start(data, out, *, ranks=1, **settings):
    return launch('train_lm.py', arguments(data, out, **settings), ranks)


def play_recipe(target, *more):
    """The commands of a target of the Makefile, each with more arguments. -> what the last one
    prints."""
    make = ['make', '-n', '--no-print-directory', '-o', '.venv/installed', target, 'BIN=BIN']
    lines = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for line, extra in zip(lines.splitlines(), more, strict=True):
        _, *argv = shlex.split(f'{line} {extra}')
        out = finished(launch(*argv[:1], argv[1:]))
    return out


def mistake(capfd, script, argv):
    """What a script says to these arguments: one line, exit status 2."""
    capfd.readouterr()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as stop:
        patch.setattr(sys, 'argv', [script.__name__, *map(str, argv)])
        run_script(getattr(script, 'main', lambda: script.train(configure(vars(script)))))
    error = capfd.readouterr().err
    assert stop.value.code == 2 and error.count('\n') == 1 and error.startswith('error: '), error
    return error


def read_log(out):
    lines = (Path(out) / 'log.jsonl').read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in IGNORED} for line in lines]


def same(a, b):
    """Bit-equal trees of tensors and plain types; timings aside."""
    leaves = [
        [(path, x) for path, x in tree if not {getattr(k, 'key', 0) for k in path} & set(IGNORED)]
        for tree in (tree_flatten_with_path(x)[0] for x in (a, b))
    ]
    for (path, x), (its, y) in zip(*leaves, strict=True):
        equal = torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y
        assert path == its and equal, (path, its, x, y)


@pytest.fixture(scope='session')
def trained(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp('trained')
    kinds = {'rnn': {}, 'gpt': {'recurrent': False, 'aggregation': 'softmax_l2'}, 'lstm': LSTM}
    for name, settings in kinds.items():
        assert run(data, folder / name, max_iters=4, **settings) == 0
    return folder


# ---- a run and its files ----


def test_log_and_checkpoint(data, tmp_path, capsys):
    assert run(data, tmp_path) == 0
    log = read_log(tmp_path)
    assert [r['step'] for r in log] == list(range(9)) and log[8]['tokens'] == 512
    assert [r['step'] for r in log if 'val_loss' in r] == [0, 4, 8]
    assert log[0]['val_loss'] == pytest.approx(math.log(256), abs=1e-4)
    assert log[0]['val_bits_per_byte'] == pytest.approx(8, abs=1e-3)
    assert [r.get('epoch') for r in log[1:]] == [0, 0, 0, 0, 0, 1, 1, 1]
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert {'config.json', 'ckpt_last.pt', 'ckpt_prev.pt', 'ckpt_best.pt'} <= files.keys()
    config = json.loads(files['config.json'])
    assert config['n_embd'] == 32 and {'commit', 'device_name', 'torch'} <= config.keys()
    # eval_only: the same value, and nothing is written
    assert run(data, tmp_path, eval_only=True) == 0
    assert f'step 8, val loss {log[8]["val_loss"]:.4f}' in capsys.readouterr().out
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
    settings = {'learning_rate': 0.5, 'momentum': 0.5, 'weight_decay': 0.3}
    muon, adamw = begin(data, tmp_path, resume=True, betas=(0.1, 0.2), **settings).optimizers
    found = [muon.param_groups[0][key] for key in ('peak_lr', 'momentum', 'weight_decay')]
    assert found == [0.5, 0.5, 0.3]
    assert all(group['betas'] == (0.1, 0.2) for group in adamw.param_groups)
    assert all(s['momentum_buffer'].abs().sum() > 0 for s in muon.state.values())


@pytest.mark.parametrize('settings', [{}, {'recurrent': False}, LSTM, PLAIN], ids=str)
def test_loss_falls_below_the_unigram_entropy(data, tmp_path, settings):
    """Of squares modulo 11: 1.77 nats, where the order is known 0; models and baselines."""
    length = {'max_iters': 60, 'eval_interval': 60, 'baseline_lr': 0.01}
    assert run(data, tmp_path, **length, **settings) == 0
    assert max(read_log(tmp_path)[-1][name] for name in ('val_loss', 'train_loss')) < 1.2


# ---- an update: micro-batches, ranks, graphs ----


@pytest.mark.parametrize('rows, more', [(0, {}), (4, {}), (2, LSTM)])
def test_states_are_carried_and_reset(data, tmp_path, rows, more):
    """At rates of 0 the losses of nine updates are the model's own over the loader's batches, from
    nothing where a shard begins."""
    rates = dict.fromkeys(['learning_rate', 'embedding_lr', 'head_lr', 'scalar_lr'], 0)
    r = begin(data, tmp_path, batch_size=rows, baseline_lr=1e-20, **rates, **more)
    for p in r.model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    files = data_fineweb.find_shards(str(data), 'train')
    loader, state, resets = data_fineweb.Loader(files, 8, 8, 256, True, seed=1337), None, []
    for step, (loss, _, _) in enumerate(updates(r, 9)):
        x, y, reset = loader.next()
        with torch.no_grad():
            wanted, state = r.model(x, y, None if reset else state)
        assert loss == pytest.approx(wanted.item(), rel=1e-6)
        resets += [step] if reset else []
    assert resets == [0, 3, 5, 8]


def memory_of(r):
    """Addresses of all that a captured update reads and writes."""
    kept = [r.buckets.grads, [r.buckets.extra], r.state or (), r.inputs[:2], r.inputs[2] or ()]
    kept += [(p, p.grad) for p in r.model.parameters()]
    kept += [[group['lr'] for group in o.param_groups] for o in r.optimizers]
    kept += [moments.values() for o in r.optimizers for moments in o.state.values()]
    return [t.data_ptr() for tensors in kept for t in tensors]


def replay(graphs, name, function, *args):
    """kernels.graphed as far as a CPU can play it: from the fourth call on the arguments are those
    of the fourth, whatever is passed, nothing may have moved, and no result can go stale."""
    calls, captured, where = graphs.get(name, (0, None, None)) if graphs is not None else (0, 0, 0)
    if graphs is not None:
        if calls >= 3 and captured is None:
            captured, where = args, memory_of(args[0])
        graphs[name] = calls + 1, captured, where
        # an optimizer's state comes after the first chunks
        assert calls < 3 or where == memory_of(args[0])[: len(where)], name
    assert function(*(captured or args)) is None


GRAPHED = [{}, {'batch_size': 2, **ROUTED}, {'recurrent': False, 'batch_size': 4}]


@pytest.mark.parametrize('settings', GRAPHED, ids=str)
def test_captured_updates_use_the_same_memory(data, tmp_path, monkeypatch, settings):
    """Nine updates with replays = nine without, bit for bit; shards begin at updates 1, 4, 6 and 9,
    and a resume lies before 4."""
    monkeypatch.setattr(train_lm, 'graphed', replay)
    runs = [begin(data, tmp_path / 'a', **settings)]
    wanted, out = updates(runs[0], 9), tmp_path / 'b'
    out.mkdir()
    monkeypatch.setattr(train_lm, 'captures', lambda *_: (True, True))
    found = updates(first := begin(data, out, **settings), 3)
    train_lm.save(first)
    runs.append(begin(data, out, resume=True, **settings))
    assert found + updates(runs[1], 6) == wanted and len({loss for loss, *_ in wanted}) == 9
    same(*([*r.model.state_dict().values()] for r in runs))
    same(*(r.state for r in runs))
    same(*([o.state_dict()['state'] for o in r.optimizers] for r in runs))
    assert set(runs[1].graphs) == {'optimizer', 'chunk'}
    assert all(captured for _, captured, _ in runs[1].graphs.values())


LONG = {'block_size': 1025}
CAPTURED = [  # settings, device, ranks: is the optimizer captured, a chunk, and the model's path
    ({}, 'cpu', 1, (False, False), 'compiled'),
    ({}, 'cuda:0', 1, (True, True), 'captured'),
    (LONG, 'cuda:0', 1, (True, False), 'graphed'),
    ({**LONG, 'recurrent': False}, 'cuda:0', 1, (True, True), 'compiled'),
    ({}, 'cuda:1', 2, (False, False), 'graphed'),
    (PLAIN, 'cuda:0', 1, (False, False), 'compiled'),
    (LSTM, 'cuda:0', 1, (False, False), 'fast'),
]


@pytest.mark.parametrize('settings, device, ranks, captured, path', CAPTURED)
def test_what_is_captured(data, tmp_path, monkeypatch, settings, device, ranks, captured, path):
    """By device, ranks and length of the chunk; where a recurrent chunk is not captured whole, the
    model replays blocks."""
    monkeypatch.setattr(checkpoint, 'compiles', lambda model, once: True)
    r = begin(data, tmp_path)
    configured(data, tmp_path, **{'compile': True, **settings})
    assert train_lm.captures(device, ranks) == captured
    r.device, r.chunk_graphs = device, {} if captured[1] else None
    r.model.config.path = train_lm.path
    train_lm.prepare(r)
    assert r.model.config.path == path


@pytest.mark.parametrize('recurrent', [True, False])
def test_ranks_and_micro_batches(data, tmp_path, recurrent):
    """1 rank x 4 micro-batches = 2 ranks x 2 = 4 x 1 = all at once, validation and state
    included."""
    runs = {'whole': (1, 0), 'micro': (1, 2), 'two': (2, 2), 'four': (4, 2)}
    settings = {'recurrent': recurrent, 'val_streams': 5}
    for name, (ranks, rows) in runs.items():
        sizes = {'ranks': ranks, 'batch_size': rows, 'max_iters': 5}
        out = finished(start(data, tmp_path / name, **sizes, **settings))
        micro = f'{ranks} ranks x {4 // ranks} micro-batches x 2 rows'
        assert name == 'whole' or micro in out
    logs = {name: read_log(tmp_path / name) for name in runs}
    states = {name: load_checkpoint(tmp_path / name / 'ckpt_last.pt')['state'] for name in runs}
    for name in ('micro', 'two', 'four'):
        for a, b in zip(logs['whole'], logs[name], strict=True):
            for key in {'train_loss', 'val_loss', 'grad_norm'} & a.keys():
                # the first: before Muon's bf16 iteration has amplified any rounding
                rel = 1e-5 if a['step'] < 2 and key != 'val_loss' else 2e-3
                assert a[key] == pytest.approx(b[key], rel=rel), (name, a['step'], key)
        for a, b in zip(states['whole'] or [], states[name] or [], strict=True):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
    # a run may go on with another number of ranks
    assert run(data, tmp_path / 'four', max_iters=6, resume=True, **settings) == 0


# ---- baselines ----


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
            total += loss * x_t.numel() / x.numel()
        found.append(total)
    torch.testing.assert_close(found, 3 * [found[0]], rtol=1e-5, atol=0)
    short = net(x[:, :8], y[:, :8])[0]  # training: within W the same
    torch.testing.assert_close(short, net(x[:, :8], y[:, :8], net.init_state(3))[0])


# ---- stops ----


def test_signals_save_and_exit(data, tmp_path):
    for number in (signal.SIGTERM, signal.SIGINT):
        out = tmp_path / str(number)
        process = start(data, out, max_iters=100000, eval_interval=100000)
        while process.poll() is None:
            if (out / 'log.jsonl').exists() and (out / 'log.jsonl').read_text().count('\n') > 2:
                process.send_signal(number)
                break
            time.sleep(0.01)
        stdout, stderr = process.communicate()
        assert process.returncode == 128 + number and 'Traceback' not in stderr, stderr
        saved = load_checkpoint(out / 'ckpt_last.pt')
        assert f'stopped after update {saved["step"]}, saved' in stdout
        assert read_log(out)[-1]['step'] == saved['step'] > 0


@pytest.mark.parametrize('factor', [math.nan, 1e30])
def test_a_non_finite_update_changes_no_weight(data, tmp_path, factor):
    """Nor do NaN gradients, or finite ones with an infinite norm, reach a moment, though the loss
    is fine."""
    r = begin(data, tmp_path)
    updates(r, 1)
    r.model.head.register_hook(lambda g: g * factor)
    moments = [t for o in r.optimizers for s in o.state.values() for t in s.values()]
    tensors = [*r.model.parameters(), *moments]
    before = [t.clone() for t in tensors]
    loss, norm, _ = train_lm.train_update(r, False)
    assert math.isfinite(loss) and not math.isfinite(norm)
    assert all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))


def test_a_broken_weight_stops_with_the_last_good_checkpoint(data, tmp_path, monkeypatch, capsys):
    run(data, tmp_path, max_iters=4)
    real = train_lm.train_update

    def breaks(r, stop):
        if r.step == 6:
            r.model.embedding.data.fill_(math.nan)
        return real(r, stop)

    monkeypatch.setattr(train_lm, 'train_update', breaks)
    assert run(data, tmp_path, max_iters=20, resume=True) == 1
    assert 'error: update 7: loss nan' in capsys.readouterr().out
    saved = load_checkpoint(tmp_path / 'ckpt_last.pt')
    assert saved['step'] == 4 and all(p.isfinite().all() for p in saved['model'].values())


# ---- memory ----

GPU = 79 * 2**30  # what is free of a card sold as 80 GB
PAPER = sorted(f for f in os.listdir(ROOT / 'config') if f.startswith(('small_', 'medium_')))


def needs(config, ranks, memory=GPU):
    """-> rows at a time on a GPU of so much memory, and the GB that a rank then needs, of
    train_lm's present settings."""
    sizes, rows = train_lm.model_config(config), config['tokens_per_step'] // config['block_size']
    streams, whole = rows // ranks, train_lm.captures('cuda:0', ranks)[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, 'device_memory', lambda device: (memory, math.inf))
        rows = train_lm.fitting_rows(sizes, streams, torch.bfloat16, 'cuda:0', whole)
    batch = sizes, config['recurrent'], (rows, streams)
    need = model.memory(*batch, torch.bfloat16, 'cuda', whole)
    return rows, sum(need.values()) / 1e9


@pytest.mark.parametrize('file', PAPER)
def test_the_papers_configs_fit_80_GB_as_they_say(file):
    """On one GPU and on four; the docstrings' figures are model.memory's."""
    config = configure(vars(train_lm), [str(ROOT / 'config' / file)], quiet=True)
    (rows, one), (rows_of_four, four) = needs(config, 1), needs(config, 4)
    text = ' '.join(read_script(ROOT / 'config' / file)[2].split())
    figures = r'([\d.]+) GB on one(?: \((\d+) rows at a time\))?'
    said = re.search(rf'{figures}, ([\d.]+) GB on each of four \((\d+)', text)
    assert max(one, four) < GPU / 1e9 and config['batch_size'] == 0
    assert [int(said[2] or said[4]), int(said[4])] == [rows, rows_of_four]
    assert min(rows, rows_of_four) * config['block_size'] >= 2048
    assert [float(said[1]), float(said[3])] == pytest.approx([one, four], abs=1)


def test_the_estimate_meets_the_stand_ins_peaks():
    """Every line of the table: over the measured by at most 0.3, under it by at most 3%."""
    table = (ROOT / 'results' / 'modelled' / 'memory.md').read_text().splitlines()
    lines = [line.split('|') for line in table if line.startswith('| `')]
    assert len(lines) > 25
    for _, command, ranks, rows, peak, *_ in lines:
        file, *words = command.strip(' `').split()
        argv = [str(ROOT / file), *words, f'--batch_size={rows.strip()}']
        need = needs(configure(vars(train_lm), argv, quiet=True), int(ranks))[1]
        assert 0.97 < need / float(peak) < 1.3, (command, ranks, rows, peak, need)


MEMORY = [  # total and free; rows, or what is said
    ({}, (1e12, 1e12), 8),
    ({}, (0.57e9, 1e12), 4),  # by the total: a resumed run does the same
    ({}, (1, 1e12), 1),
    ({'batch_size': 8}, (1e12, 0.57e9), 'batch_size = 8: needs more than'),
    ({}, (1e12, 0.57e9), '--batch_size=4 fits'),
    ({'n_embd': 768}, (4e8, 4e8), 'free: a smaller model, fewer tokens_per_step, or more GPUs'),
]


@pytest.mark.parametrize('settings, memory, expected', MEMORY)
def test_rows_by_memory(data, tmp_path, monkeypatch, capfd, settings, memory, expected):
    """What cannot fit is refused before anything is allocated or written."""
    monkeypatch.setattr(checkpoint, 'device_memory', lambda device: memory)
    settings, out = {'window': 4096, **settings}, tmp_path / 'out'
    if isinstance(expected, int):
        r = begin(data, out, **settings)
        assert len(r.inputs[0]) == expected
    else:
        monkeypatch.setattr(train_lm, 'build_model', None)
        assert expected in mistake(capfd, train_lm, arguments(data, out, **settings))
        assert not out.exists()


# ---- mistakes ----


MISTAKES = """
tokens_per_step=100 | tokens_per_step = 100: must be a multiple
n_embd=100 n_head=0 | n_embd = 100 is a multiple of neither
tokenizer=gpt3 | tokenizer = 'gpt3'
data_dir=/nonexistent | no train shards in '/nonexistent'
device=cuda:99 | device =
resume=True | out: holds no trained run
val_tokens=1000000 | lower val_tokens
tokens_per_step=512 | too few
betas=(0.9,) | betas = (0.9,)
threads=100000 | threads = 100000: must be
window=1000000000000 | batch_size = 1: needs more than
eval_only=True | out: holds no trained run
arch=transformer recurrent=False | n_expert = 2: arch = 'transformer' is the twin of
arch=transformer | wants --recurrent=False
arch=lstm recurrent=False | wants --recurrent=True
arch=lstm learning_rate=0.1 | --baseline_lr
"""


@pytest.mark.parametrize('line', MISTAKES.strip().splitlines())
def test_mistakes_are_one_line(data, tmp_path, line, capfd):
    settings, message = line.split(' | ')
    argv = [*arguments(data, tmp_path / 'out'), *(f'--{word}' for word in settings.split())]
    assert message in mistake(capfd, train_lm, argv)


def test_refusals_that_keep_a_run(data, trained, tmp_path, capfd):
    """In one line, before anything of it is removed. Shards of other content, of the same names
    and sizes, are others; a copy is not."""
    out, others, bad = tmp_path / 'out', tmp_path / 'others', tmp_path / 'bad'
    run(data, out, max_iters=2)
    shutil.copytree(data, others)
    assert run(others, out, max_iters=3, resume=True) == 0
    shard = str(others / 'fineweb_train_000002.bin')
    data_fineweb.write_shard(shard, np.roll(data_fineweb.read_shard(shard, 256), 1))
    bad.mkdir()
    (bad / 'model.safetensors').write_text('x')
    (tmp_path / 'stranger.py').write_text('overwrite = True')
    before = (out / 'ckpt_last.pt').read_bytes()
    for settings, message in (
        ('', 'holds a run already'),
        ('--resume --overwrite', 'exclude each other'),
        ('--resume=True --n_embd=64', 'was trained with n_embd = 32, not 64'),
        (f'--resume=True --data_dir={others}', f'other shards than those in {others}'),
        ('--overwrite=True --data_dir=/nowhere', 'no train shards'),
        (f'{tmp_path}/stranger.py', 'stranger.py:1: overwrite is for the command line alone'),
        ('--overwrite --init_from=none', 'none: holds no trained run'),
        (f'--overwrite --init_from={bad}', 'bad/model.safetensors: cannot be read'),
        (f'--overwrite --init_from={trained}/lstm --n_embd=64', 'no weight has a name and shape'),
        (f'--resume --init_from={trained}/rnn', '--init_from begins a new run'),
    ):
        argv = [*arguments(data, out), *settings.split()]
        assert message in mistake(capfd, train_lm, argv)
    assert (out / 'ckpt_last.pt').read_bytes() == before
    assert run(others, out, eval_only=True) == 0  # only asks what the weights are worth there


DAMAGES = [  # part of a checkpoint, what becomes of it (None: it is taken out), what is said
    ('model.head', None, 'Missing key(s) in state_dict: "head"'),
    ('model.head', lambda w: w[:5], 'size mismatch for head'),
    ('model.head', lambda w: w * math.nan, 'head holds NaN'),
    ('step', lambda n: None, 'step = '),
    ('optimizers', lambda o: o[:1], 'optimizers or rng does not fit'),
    ('rng.torch', lambda x: x[:9], 'optimizers or rng does not fit'),
    ('loader.shard', lambda x: 99, 'loader or state does not fit'),
    ('state', lambda s: [x[:1] for x in s], 'loader or state does not fit'),
    ('optimizers', None, 'missing: optimizers'),
    ('config', None, 'not a checkpoint of this train_lm.py'),
]


def test_a_damaged_checkpoint_is_one_line(data, tmp_path, capfd):
    """Whole files whose parts do not fit: refused by file and part, and left as they are."""
    run(data, tmp_path, max_iters=2)
    path, argv = tmp_path / 'ckpt_last.pt', arguments(data, tmp_path, resume=True)
    os.link(path, tmp_path / 'good.pt')
    for key, change, message in DAMAGES:
        saved = part = load_checkpoint(tmp_path / 'good.pt')
        *names, last = key.split('.')
        for name in names:
            part = part[int(name) if name.isdigit() else name]
        was = part.pop(last)
        if change is not None:
            part[last] = change(was)
        checkpoint.save_checkpoint(saved, path)
        before = path.read_bytes()
        error = mistake(capfd, train_lm, argv)
        assert f'{path}: ' in error and message in error, error
        assert path.read_bytes() == before


def test_compile_falls_back(data, tmp_path):
    """Where there is no C++ compiler, one line says so and the run goes on."""
    argv = arguments(data, tmp_path / 'out', compile=True, max_iters=1)
    env = {**os.environ, 'CXX': '/nonexistent', 'TORCHINDUCTOR_CACHE_DIR': str(tmp_path)}
    command = [sys.executable, 'train_lm.py', *argv]  # no fork: torch reads CXX when it is loaded
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count('compile = True does not work here, going on without it') == 1


@pytest.mark.parametrize('name', ['wandb', 'tensorboard', 'matplotlib'])
def test_packages_are_optional(data, tmp_path, monkeypatch, capfd, name):
    """Imported only when asked for; where one is missing, a line names it."""
    monkeypatch.setitem(sys.modules, name, None)  # as if not installed
    asked = {'plot' if name == 'matplotlib' else name: True}
    error = mistake(capfd, train_lm, arguments(data, tmp_path / 'out', **asked))
    assert f'{name} is asked for but not installed' in error
    assert run(data, tmp_path / 'out', max_iters=1) == 0


# ---- weights to begin with ----


def test_init_from(trained, data, tmp_path, capfd):
    """A run's weights or an export's begin another run, as they are; of a model of another depth
    and window those that fit, and lines name the rest. A fresh optimizer, at step 0."""
    source, export = trained / 'rnn', tmp_path / 'export'
    saved = load_checkpoint(source / 'ckpt_best.pt')
    finished(launch('sample.py', [f'--out_dir={source}', f'--export={export}']))
    for folder in (source, export):
        r = begin(data, tmp_path / 'out', init_from=folder)
        same(r.model.state_dict(), saved['model'])
        assert r.step == 0 and not any(o.state for o in r.optimizers)
    assert run(data, tmp_path / 'out', max_iters=1, init_from=export) == 0
    assert read_log(tmp_path / 'out')[0]['val_loss'] == pytest.approx(saved['best'], rel=1e-6)
    capfd.readouterr()
    deeper = begin(data, tmp_path / 'x', init_from=source, n_layer=3).model.state_dict()
    assert all(torch.equal(deeper[name], x) for name, x in saved['model'].items())
    said = capfd.readouterr().out
    assert f'took {len(saved["model"])} of {len(deeper)} weights' in said
    assert 'begun anew: levels.2.' in said and 'not taken' not in said
    begin(data, tmp_path / 'x', init_from=source, n_layer=1, aggregation='softmax_mean')
    assert 'not taken: levels.1.' in capfd.readouterr().out


# ---- the demo ----


def test_demo_recipe(tmp_path):
    """`make demo`'s own commands, shrunk."""
    small = '--max_iters=2 --val_tokens=512 --val_streams=8 --tokens_per_step=256'
    data, out = f'--data_dir={tmp_path}/data', f'--out_dir={tmp_path}/out'
    few = '--max_new_tokens=5'
    said = play_recipe('demo', few, data, f'{data} {out} {small}', f'{out} {few}')
    assert 'Fellow citizens' in said and (tmp_path / 'out' / 'loss.png').stat().st_size > 5000

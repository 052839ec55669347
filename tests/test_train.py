"""train_lm.py and sample.py as a user starts them: resume, micro-batches and ranks, validation, stops, mistakes, the demo."""

import json
import lzma
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

import data_fineweb
import sample
import train_lm
from checkpoint import device_memory, load_checkpoint, pick_device
from configurator import configure, read_script, run_script

ROOT = Path(__file__).resolve().parent.parent
TINY = {
    'tokenizer': 'bytes',
    'n_layer': 2,
    'n_expert': 2,
    'n_embd': 32,
    'n_head': 2,
    'window': 12,
    'block_size': 8,
    'tokens_per_step': 64,
    'max_iters': 8,
    'warmup_iters': 3,
    'eval_interval': 4,
    'val_tokens': 96,
    'val_streams': 3,
    'compile': False,
    'dtype': 'float32',
    'device': 'cpu',
    'threads': 1,
}
META = {'tokenizer': 'bytes', 'source': 'test', 'shards': []}
IGNORED = (
    'ms',
    'tokens_per_s',
    'seconds',
    'config',
    'python',
    'numpy',
)  # times; random states that no run draws from


@pytest.fixture(scope='session')
def data(tmp_path_factory):
    """Two training shards and a validation shard that can be learnt; 5 windows an epoch, so a run of 8 updates meets every reset."""
    folder = tmp_path_factory.mktemp('data')
    for name, n in (('val_000000', 150), ('train_000001', 8 * 25), ('train_000002', 8 * 17)):
        data_fineweb.write_shard(
            str(folder / f'fineweb_{name}.bin'), (np.arange(n) ** 2 % 11 + 65).astype(np.uint16)
        )
    data_fineweb.write_meta(str(folder), META)
    return folder


def arguments(data, out, *configs, **settings):
    return [
        *configs,
        *(f'--{k}={v}' for k, v in {**TINY, 'data_dir': data, 'out_dir': out, **settings}.items()),
    ]


def run(data, out, *configs, **settings):
    """A whole run in this process: the exit status."""
    config = configure(vars(train_lm), arguments(data, out, *configs, **settings), quiet=True)
    return train_lm.train(config)


def start(data, out, *, ranks=1, **settings):
    command = [sys.executable] if ranks == 1 else [sys.executable, f'--ranks={ranks}']
    return forks.Popen(
        [*command, 'train_lm.py', *arguments(data, out, **settings)],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, 'OMP_NUM_THREADS': '1'},
    )


def read_log(out):
    with open(Path(out) / 'log.jsonl') as f:
        return [{k: v for k, v in json.loads(line).items() if k not in IGNORED} for line in f]


def same(a, b, where=''):
    """Bit-equal trees of tensors and plain types; timings aside."""
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for k in a:
            if k not in IGNORED:
                same(a[k], b[k], f'{where}.{k}')
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            same(x, y, f'{where}[{i}]')
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b), where
    else:
        assert a == b, where


def test_log_and_checkpoint(data, tmp_path):
    assert run(data, tmp_path / 'a') == 0
    log = read_log(tmp_path / 'a')
    assert [r['step'] for r in log] == list(range(9))
    assert [r['step'] for r in log if 'val_loss' in r] == [0, 4, 8]
    assert log[0]['val_loss'] == pytest.approx(math.log(256), abs=1e-4) and log[0][
        'val_bits_per_byte'
    ] == pytest.approx(8, abs=1e-3)
    with open(tmp_path / 'a' / 'log.jsonl') as f:
        line = json.loads(f.readlines()[-1])
    assert {
        'step',
        'tokens',
        'train_loss',
        'val_loss',
        'lr',
        'tokens_per_s',
        'seconds',
        'grad_norm',
    } <= line.keys() and line['tokens'] == 512
    assert [r.get('epoch') for r in log[1:]] == [0, 0, 0, 0, 0, 1, 1, 1]
    assert {'config.json', 'ckpt_last.pt', 'ckpt_prev.pt', 'ckpt_best.pt'} <= set(
        os.listdir(tmp_path / 'a')
    )
    config = json.loads((tmp_path / 'a' / 'config.json').read_text())
    assert (
        config['n_embd'] == 32
        and config['torch'] == torch.__version__
        and {'commit', 'device_name'} <= config.keys()
    )


@pytest.mark.parametrize(
    'settings',
    [
        {},
        {'recurrent': False},
        {'batch_size': 3},
        {'aggregation': 'softmax_l2', 'share_kv': False},
        {'path': 'plain'},
    ],
    ids=['recurrent', 'gpt', 'micro-batches', 'routed', 'plain'],
)
def test_resume_is_bit_equal(data, tmp_path, settings):
    """2N updates = N, stop, N. Update 5 starts an epoch and update 4 reads a shard's second window: every kind of position."""
    a, b = tmp_path / 'a', tmp_path / 'b'
    run(data, a, **settings)
    real = train_lm.train_update
    count = 0

    def stop_after_three(*args):
        nonlocal count
        count += 1
        return real(*args[:-1], count == 3)

    train_lm.train_update = stop_after_three
    try:
        assert run(data, b, **settings) == 143
    finally:
        train_lm.train_update = real
    assert load_checkpoint(b / 'ckpt_last.pt')['step'] == 3
    torch.manual_seed(999)  # whatever the new process starts with
    assert run(data, b, resume=True, **settings) == 0
    same(load_checkpoint(a / 'ckpt_last.pt'), load_checkpoint(b / 'ckpt_last.pt'))
    same(read_log(a), read_log(b))


def test_validation_cut_short_is_done_again(data, tmp_path, monkeypatch):
    """A run that dies in a validation has its checkpoint; the resumed run validates and logs that step as if nothing had happened."""
    run(data, tmp_path / 'a')
    real, calls = train_lm.evaluate, []

    def dies(*args):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError('out of memory')
        return real(*args)

    monkeypatch.setattr(train_lm, 'evaluate', dies)
    with pytest.raises(RuntimeError):
        run(data, tmp_path / 'b')
    monkeypatch.setattr(train_lm, 'evaluate', real)
    assert run(data, tmp_path / 'b', resume=True) == 0
    same(read_log(tmp_path / 'a'), read_log(tmp_path / 'b'))
    same(
        load_checkpoint(tmp_path / 'a' / 'ckpt_best.pt')['best'],
        load_checkpoint(tmp_path / 'b' / 'ckpt_best.pt')['best'],
    )


def memory_of(r):
    """Addresses of all that a captured update reads and writes."""
    tensors = [t for p in r.model.parameters() for t in (p, p.grad)]
    tensors += [
        t
        for x in [*r.inputs.values(), *[(state,) for state in r.states if state]]
        for t in (*x[:2], *(x[-1] or ()))
        if isinstance(t, torch.Tensor)
    ]
    tensors += [
        r.norm,
        r.buckets.extra,
        *r.buckets.flats,
        *(g['lr'] for o in r.optimizers for g in o.param_groups),
    ]
    tensors += [t for o in r.optimizers for s in o.state.values() for t in s.values()]
    return [t.data_ptr() for t in tensors]


def replay(graphs, name, function, *args):
    """kernels.graphed as far as a CPU can play it: from the fourth call on, the arguments are those of the fourth, whatever is passed, and
    nothing may have moved; there is no result to go stale."""
    calls, captured, where = graphs.get(name, (0, None, None))
    if calls >= 3 and captured is None:
        captured, where = args, memory_of(args[0])
    graphs[name] = calls + 1, captured, where
    assert calls < 3 or where == memory_of(args[0])[: len(where)], (
        name
    )  # an optimizer's state comes after the first chunks
    assert function(*(args if captured is None else captured)) is None


@pytest.mark.parametrize(
    'settings',
    [
        {},
        {'batch_size': 3},
        {'batch_size': 2, 'aggregation': 'softmax_l2'},
        {'recurrent': False, 'batch_size': 3},
    ],
    ids=str,
)
def test_captured_updates_use_the_same_memory(data, tmp_path, monkeypatch, settings):
    """Nine updates with replays = nine without, bit for bit; shards begin at updates 1, 4, 6 and 9, and a resume lies before 4."""
    monkeypatch.setattr(train_lm, 'graphed', replay)

    def make(captured, **more):
        r, _ = train_lm.begin(
            configure(
                vars(train_lm),
                arguments(data, tmp_path / str(captured), max_iters=9, **settings, **more),
                quiet=True,
            )
        )
        r.graphs, r.whole = ({} if captured else None), captured
        return r

    def updates(r, n):
        figures = []
        for _ in range(n):
            figures.append(train_lm.train_update(r, False))
            r.step += 1
        return figures

    eager, first = make(False), make(True)
    wanted = updates(eager, 9)
    figures = updates(first, 3)
    train_lm.save(first)
    second = make(True, resume=True)
    figures += updates(second, 6)
    assert figures == wanted and len({loss for loss, *_ in wanted}) == 9
    same(list(eager.model.state_dict().values()), list(second.model.state_dict().values()))
    same(eager.states, second.states)
    same(
        [o.state_dict()['state'] for o in eager.optimizers],
        [o.state_dict()['state'] for o in second.optimizers],
    )
    sizes = [8] if 'batch_size' not in settings else [3, 2] if settings['batch_size'] == 3 else [2]
    assert set(second.graphs) == {'optimizer', *(f'chunk of {rows}' for rows in sizes)} and all(
        captured for _, captured, _ in second.graphs.values()
    )


@pytest.mark.parametrize('rows', [0, 3, 2])
def test_states_are_carried_and_reset(data, tmp_path, rows):
    """With learning rates of 0, the losses of nine updates are the model's own over the loader's batches, from nothing where a shard begins."""
    rates = dict.fromkeys(('learning_rate', 'embedding_lr', 'head_lr', 'scalar_lr'), 0)
    r, _ = train_lm.begin(
        configure(vars(train_lm), arguments(data, tmp_path, batch_size=rows, **rates), quiet=True)
    )
    for p in r.model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    loader, state, resets = (
        data_fineweb.StreamLoader(
            data_fineweb.find_shards(str(data), 'train'), 8, 8, 256, seed=1337
        ),
        None,
        [],
    )
    for step in range(9):
        x, y, reset = loader.next()
        with torch.no_grad():
            wanted, state = r.model(x, y, None if reset else state)
        assert train_lm.train_update(r, False)[0] == pytest.approx(wanted.item(), rel=1e-6)
        resets += [step] if reset else []
    assert resets == [0, 3, 5, 8]


@pytest.mark.parametrize(
    'settings, device, ranks, optimizer, whole, path',
    [
        ({}, 'cpu', 1, False, False, 'compiled'),
        ({}, 'cuda:0', 1, True, True, 'captured'),
        ({'graphs': False}, 'cuda:0', 1, False, False, 'compiled'),
        ({'block_size': 1024}, 'cuda:0', 1, True, True, 'captured'),
        ({'block_size': 1025}, 'cuda:0', 1, True, False, 'graphed'),
        ({'block_size': 2048, 'recurrent': False}, 'cuda:0', 1, True, True, 'compiled'),
        ({}, 'cuda:1', 2, False, False, 'graphed'),
        ({'recurrent': False}, 'cuda:1', 2, False, False, 'compiled'),
        ({'path': 'plain'}, 'cuda:0', 1, False, False, 'plain'),
        ({'compile': False, 'block_size': 4096}, 'cuda:0', 1, True, False, 'fast'),
    ],
)
def test_what_is_captured(
    data, tmp_path, monkeypatch, settings, device, ranks, optimizer, whole, path
):
    """By device, ranks and length of the chunk; where a recurrent chunk is not captured whole, the model replays blocks."""
    compiled = []
    monkeypatch.setattr(train_lm, 'compile_on_zeros', lambda model, rows, *_: compiled.append(rows))
    configure(
        vars(train_lm), arguments(data, tmp_path, **{'compile': True, **settings}), quiet=True
    )
    assert train_lm.captures(device, ranks) == (optimizer, whole)
    model = torch.nn.Linear(1, 1)
    model.config = train_lm.SimpleNamespace(path=train_lm.path)
    train_lm.prepare(
        train_lm.SimpleNamespace(
            model=model, kind=device, amp=torch.float32, inputs={3: (), 2: ()}, whole=whole
        )
    )
    assert model.config.path == path and compiled == ([] if path in ('plain', 'fast') else [3, 2])


@pytest.mark.parametrize('factor', [math.nan, 1e30])
def test_a_non_finite_update_changes_no_weight(data, tmp_path, factor):
    """Neither NaN gradients nor finite ones with an infinite norm reach a weight or a moment, though the loss is fine."""
    r, _ = train_lm.begin(configure(vars(train_lm), arguments(data, tmp_path), quiet=True))
    train_lm.train_update(r, False)
    r.model.head.register_hook(lambda g: g * factor)
    tensors = [
        *r.model.parameters(),
        *(t for o in r.optimizers for s in o.state.values() for t in s.values()),
    ]
    before = [t.clone() for t in tensors]
    loss, norm, _ = train_lm.train_update(r, False)
    assert math.isfinite(loss) and not math.isfinite(norm)
    assert all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))


@pytest.mark.parametrize('recurrent', [True, False])
def test_ranks_and_micro_batches(data, tmp_path, recurrent):
    """1 rank x 4 micro-batches = 2 ranks x 2 = 4 ranks x 1 = the whole batch at once, validation and saved state included."""
    runs = {'whole': (1, 0), 'micro': (1, 2), 'two': (2, 2), 'four': (4, 2)}
    for name, (ranks, rows) in runs.items():
        settings = {'batch_size': rows, 'recurrent': recurrent, 'max_iters': 5, 'val_streams': 5}
        if ranks == 1:
            run(data, tmp_path / name, **settings)
        else:
            process = start(data, tmp_path / name, ranks=ranks, **settings)
            out, err = process.communicate()
            assert process.returncode == 0, err
            assert f'{ranks} ranks x {4 // ranks} micro-batches x 2 rows' in out
    whole, state = (
        read_log(tmp_path / 'whole'),
        load_checkpoint(tmp_path / 'whole' / 'ckpt_last.pt')['state'],
    )
    for name in ('micro', 'two', 'four'):
        for a, b in zip(whole, read_log(tmp_path / name), strict=True):
            for key in {'train_loss', 'val_loss', 'grad_norm'} & a.keys():
                assert a[key] == pytest.approx(b[key], rel=2e-3), (name, a['step'], key)
        first, again = (
            whole[1],
            read_log(tmp_path / name)[1],
        )  # before Muon's bf16 iteration has amplified any rounding
        assert first['train_loss'] == pytest.approx(again['train_loss'], rel=1e-6)
        assert first['grad_norm'] == pytest.approx(again['grad_norm'], rel=1e-5)
        other = load_checkpoint(tmp_path / name / 'ckpt_last.pt')['state']
        for a, b in zip(state or [], other or [], strict=True):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
    # a run may go on with another number of ranks
    assert (
        run(data, tmp_path / 'four', max_iters=6, resume=True, recurrent=recurrent, val_streams=5)
        == 0
    )


def test_validation_does_not_depend_on_chunks_or_batches(data, tmp_path):
    """T, micro-batches and the training batch have no effect on the value; the same weights are validated."""
    run(data, tmp_path / 'a', max_iters=4)
    saved = load_checkpoint(tmp_path / 'a' / 'ckpt_last.pt')
    losses = []
    for T, rows in ((8, 3), (5, 2), (32, 1)):
        model = train_lm.build_model(train_lm.ModelConfig(256, 2, 2, 32, 2, 0, 12, T), True)
        model.load_state_dict(saved['model'])
        x, y = data_fineweb.load_val([str(data / 'fineweb_val_000000.bin')], 96, 3, 256)
        losses.append(train_lm.evaluate(model, (x, y, x.numel()), rows, T, 'cpu', torch.float32))
    np.testing.assert_allclose(losses, [losses[0]] * 3, rtol=1e-6)
    assert losses[0][0] == pytest.approx(read_log(tmp_path / 'a')[-1]['val_loss'], rel=1e-6)


@pytest.mark.parametrize('recurrent', [True, False])
def test_loss_falls_below_the_unigram_entropy(tmp_path, recurrent):
    """30 updates on real text learn more than byte frequencies."""
    with lzma.open(ROOT / 'corpus' / 'sotu.jsonl.xz') as f:
        text = np.frombuffer(
            ''.join(json.loads(f.readline())['text'] for _ in range(20)).encode(), np.uint8
        )
    data_fineweb.write_shard(
        str(tmp_path / 'fineweb_train_000001.bin'), text[5000:].astype(np.uint16)
    )
    data_fineweb.write_shard(
        str(tmp_path / 'fineweb_val_000000.bin'), text[:5000].astype(np.uint16)
    )
    data_fineweb.write_meta(str(tmp_path), META)
    p = np.bincount(text, minlength=256) / len(text)
    entropy = -(p[p > 0] * np.log(p[p > 0])).sum()
    status = run(
        tmp_path,
        tmp_path / 'out',
        recurrent=recurrent,
        n_embd=64,
        window=16,
        block_size=16,
        tokens_per_step=512,
        max_iters=30,
        eval_interval=30,
        val_tokens=2048,
        val_streams=8,
        warmup_iters=5,
    )
    final = read_log(tmp_path / 'out')[-1]
    assert (
        status == 0 and final['val_loss'] < entropy - 0.2 and final['train_loss'] < entropy - 0.2
    ), (final, entropy)


def test_signals_save_and_exit(data, tmp_path):
    for number, status in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
        out = tmp_path / str(number)
        process = start(data, out, max_iters=100000, eval_interval=100000)
        deadline = time.time() + 600
        while (
            not (out / 'log.jsonl').exists() or (out / 'log.jsonl').read_text().count('\n') < 3
        ) and time.time() < deadline:
            time.sleep(0.01)
        process.send_signal(number)
        stdout, stderr = process.communicate()
        assert process.returncode == status and 'Traceback' not in stderr, stderr
        saved = load_checkpoint(out / 'ckpt_last.pt')
        assert f'stopped after update {saved["step"]}, saved' in stdout
        assert read_log(out)[-1]['step'] == saved['step'] > 0


def test_non_finite_loss_stops_and_keeps_the_last_good_checkpoint(
    data, tmp_path, monkeypatch, capsys
):
    real, calls = train_lm.StreamLoader.next, []
    run(data, tmp_path, max_iters=4)

    def poison(self):  # weights that a spike has broken: the next loss is NaN
        calls.append(1)
        if len(calls) == 3:
            model = [o for o in models if isinstance(o, torch.nn.Module)][-1]
            with torch.no_grad():
                model.embedding.fill_(math.nan)
        return real(self)

    models, build = [], train_lm.build_model
    monkeypatch.setattr(train_lm, 'build_model', lambda *a: models.append(build(*a)) or models[-1])
    monkeypatch.setattr(train_lm.StreamLoader, 'next', poison)
    assert run(data, tmp_path, max_iters=20, resume=True) == 1
    out = capsys.readouterr().out
    assert 'error: update 7: loss nan' in out and 'ckpt_last.pt' in out
    saved = load_checkpoint(tmp_path / 'ckpt_last.pt')
    assert saved['step'] == 4 and all(p.isfinite().all() for p in saved['model'].values())


GPU = 79 * 2**30  # what is free of a card sold as 80 GB
PAPER = sorted(f for f in os.listdir(ROOT / 'config') if f.startswith(('small_', 'medium_')))


def needs(config, ranks, memory=GPU):
    """-> rows at a time on a GPU of so much memory, and the GB that a rank then needs, of train_lm's present settings."""
    streams = config['tokens_per_step'] // config['block_size'] // ranks
    sizes = train_lm.model_config(config)
    rows = train_lm.pick_rows(sizes, streams, memory, torch.bfloat16, 'cuda:0', ranks)
    return rows, train_lm.bytes_needed(sizes, rows, streams, torch.bfloat16, 'cuda:0', ranks) / 1e9


@pytest.mark.parametrize('file', PAPER)
def test_the_papers_configs_fit_80_GB_as_they_say(file):
    """On one GPU and on four; the docstrings' figures are model.memory's."""
    config = configure(vars(train_lm), [str(ROOT / 'config' / file)], quiet=True)
    one, four = needs(config, 1), needs(config, 4)
    text = ' '.join(read_script(ROOT / 'config' / file)[2].split())
    said = re.search(
        r'([\d.]+) GB on one(?: \((\d+) rows at a time\))?, ([\d.]+) GB on each of four \((\d+)',
        text,
    )
    assert max(one[1], four[1]) < GPU / 1e9 and config['batch_size'] == 0
    assert [int(said[2] or said[4]), int(said[4])] == [one[0], four[0]] and min(
        one[0], four[0]
    ) * config['block_size'] >= 2048
    assert [float(said[1]), float(said[3])] == pytest.approx([one[1], four[1]], abs=1), (
        'refitted? then the docstrings too'
    )


def test_the_estimate_meets_the_stand_ins_peaks():
    """Every line of the table: over what was measured by no more than a quarter, and under it by no more than 3%."""
    lines = [
        line.split('|')
        for line in (ROOT / 'results' / 'modelled' / 'memory.md').read_text().splitlines()
        if line.startswith('| `')
    ]
    assert len(lines) > 25
    for _, command, ranks, rows, peak, *_ in lines:
        words = command.strip().strip('`').split()
        config = configure(
            vars(train_lm),
            [str(ROOT / words[0]), *words[1:], f'--batch_size={rows.strip()}'],
            quiet=True,
        )
        streams = config['tokens_per_step'] // config['block_size'] // int(ranks)
        need = (
            train_lm.bytes_needed(
                train_lm.model_config(config),
                int(rows),
                streams,
                torch.bfloat16,
                'cuda:0',
                int(ranks),
            )
            / 1e9
        )
        assert 0.97 < need / float(peak) < 1.25, (command, ranks, rows, peak, need)


@pytest.mark.parametrize(
    'settings, memory, words',
    [
        ({'batch_size': 8}, (1e12, 0.57e9), r'--batch_size=(\d) fits'),
        ({}, (1e12, 0.57e9), r'with batch_size = 8, but .* --batch_size=(\d) fits'),
        (
            {'n_embd': 768},
            (4e8, 4e8),
            r' GB with 1: a smaller model, fewer tokens_per_step, or more GPUs',
        ),
        (
            {'n_layer': 10**8},
            (1e12, 1e12),
            r'n_layer = 100000000, .* needs about \d+\.\d GB .* has 1000.0 GB free',
        ),
    ],
)
def test_what_cannot_fit_is_refused(data, tmp_path, monkeypatch, capfd, settings, memory, words):
    """Before anything is allocated or written, in one line with the number of rows that does fit."""
    settings = {'window': 4096, **settings}
    monkeypatch.setattr(train_lm, 'device_memory', lambda kind: memory)
    monkeypatch.setattr(train_lm, 'build_model', None)
    monkeypatch.setattr(
        sys, 'argv', ['train_lm.py', *arguments(data, tmp_path / 'out', **settings)]
    )
    with pytest.raises(SystemExit) as error:
        train_lm.main()
    stderr = capfd.readouterr().err
    found = re.search(words, stderr)
    assert (
        error.value.code == 2
        and found
        and stderr.count('\n') == 1
        and not (tmp_path / 'out').exists()
    ), stderr
    if found.groups():
        monkeypatch.undo()
        monkeypatch.setattr(train_lm, 'device_memory', lambda kind: memory)
        assert (
            1 <= int(found[1]) < 8
            and run(data, tmp_path / 'out', max_iters=1, **{**settings, 'batch_size': found[1]})
            == 0
        )


@pytest.mark.parametrize('total, rows', [(1e12, 8), (0.57e9, 4), (1, 1)])
def test_rows_by_memory(data, tmp_path, monkeypatch, total, rows):
    """batch_size = 0 goes by the device's memory, not by what is free of it now: a resumed run does the same."""
    monkeypatch.setattr(train_lm, 'device_memory', lambda kind: (total, 1e12))
    r, _ = train_lm.begin(
        configure(vars(train_lm), arguments(data, tmp_path, window=4096), quiet=True)
    )
    assert r.micro == rows and [len(x) for x, *_ in r.inputs.values()] == [rows]


def test_memory_of_this_machine():
    total, free = device_memory('cpu')
    assert 1e8 < free <= total or total == math.inf


@pytest.mark.parametrize(
    'settings, message',
    [
        ({'tokens_per_step': 100}, 'tokens_per_step = 100: must be a multiple'),
        ({'max_iters': 0}, 'max_iters = 0: must be at least 1'),
        ({'n_embd': 100, 'n_head': 0}, 'n_embd = 100 is a multiple of neither'),
        ({'tokenizer': 'gpt3'}, "tokenizer = 'gpt3'"),
        ({'data_dir': '/nonexistent'}, "no train shards in '/nonexistent'"),
        ({'device': 'cuda:99'}, 'device = '),
        ({'dtype': 'int8'}, "dtype = 'int8'"),
        ({'resume': True}, 'nothing to resume from'),
        ({'aggregation': 'max'}, "aggregation = 'max'"),
        ({'resume': True, 'overwrite': True}, 'exclude each other'),
        ({'val_tokens': 10**6}, 'lower val_tokens'),
        ({'tokens_per_step': 8 * 64}, 'too few'),
        ({'betas': '(0.9,)'}, 'betas = (0.9,)'),
        ({'threads': -1}, 'threads = -1'),
        ({'threads': 100000}, 'threads = 100000: at most'),
        ({'n_layer': 10**8}, 'n_layer = 100000000, n_expert = 2, n_embd = 32'),
        ({'window': 10**12}, 'GB with batch_size = 1, but'),
        ({'eval_only': True}, 'out: holds no trained run'),
        ({'path': 'compiled'}, "path = 'compiled'"),
        ({'momentum': 1.5}, 'momentum = 1.5'),
        ({'learning_rate': -1}, 'learning_rate = -1.0'),
        ({'n_layers': 3}, "did you mean 'n_layer'"),
    ],
)
def test_mistakes_are_one_line(data, tmp_path, settings, message, monkeypatch, capfd):
    monkeypatch.setattr(
        sys, 'argv', ['train_lm.py', *arguments(data, tmp_path / 'out', **settings)]
    )
    with pytest.raises(SystemExit) as error:
        train_lm.main()
    stderr = capfd.readouterr().err
    assert error.value.code == 2 and message in stderr and stderr.count('\n') == 1, stderr


def test_existing_run_is_kept(data, tmp_path, monkeypatch, capfd):
    run(data, tmp_path, max_iters=1)
    before = (tmp_path / 'ckpt_last.pt').read_bytes()
    for settings, message in (
        ({}, 'holds a run already'),
        ({'resume': True, 'n_embd': 64}, 'was trained with n_embd = 32, not 64'),
        (
            {'overwrite': True, 'tokens_per_step': 100},
            'must be a multiple',
        ),  # found before anything is removed
        ({'overwrite': True, 'data_dir': tmp_path}, 'no train shards'),
    ):
        monkeypatch.setattr(sys, 'argv', ['train_lm.py', *arguments(data, tmp_path, **settings)])
        with pytest.raises(SystemExit) as error:
            train_lm.main()
        assert error.value.code == 2 and message in capfd.readouterr().err
    assert (tmp_path / 'ckpt_last.pt').read_bytes() == before


def test_resume_takes_new_optimizer_settings(data, tmp_path):
    """Learning rates, momentum, decay and betas may change between runs, and then do."""
    run(data, tmp_path, max_iters=4)
    config = configure(
        vars(train_lm),
        arguments(
            data,
            tmp_path,
            resume=True,
            learning_rate=0.5,
            momentum=0.5,
            weight_decay=0.3,
            betas='(0.1, 0.2)',
        ),
        quiet=True,
    )
    muon, adamw = train_lm.begin(config)[0].optimizers
    assert {k: muon.param_groups[0][k] for k in ('peak_lr', 'momentum', 'weight_decay')} == {
        'peak_lr': 0.5,
        'momentum': 0.5,
        'weight_decay': 0.3,
    }
    assert all(g['betas'] == (0.1, 0.2) for g in adamw.param_groups)
    assert all(s['momentum_buffer'].abs().sum() > 0 for s in muon.state.values())


def test_foreign_checkpoint_is_refused(data, tmp_path, monkeypatch, capfd):
    train_lm.save_checkpoint({'weights': torch.zeros(3)}, tmp_path / 'ckpt_last.pt')
    monkeypatch.setattr(sys, 'argv', ['train_lm.py', *arguments(data, tmp_path, resume=True)])
    with pytest.raises(SystemExit) as error:
        train_lm.main()
    assert (
        error.value.code == 2 and 'not a checkpoint of this train_lm.py' in capfd.readouterr().err
    )


def damaged(key, change):
    """A checkpoint's part, changed; change None: taken out."""

    def damage(saved):
        *path, last = key.split('.')
        for name in path:
            saved = saved[int(name) if isinstance(saved, list) else name]
        if change is None:
            saved.pop(last)
        else:
            saved[last] = change(saved[last])

    return damage


DAMAGES = [
    (damaged('model.head', None), 'model: has no weight head'),
    (damaged('model.head', lambda w: w[:5]), 'model: head has the shape [5, 32], not [256, 32]'),
    (damaged('model.head', lambda w: w * math.nan), 'model: head holds NaN'),
    (
        damaged('model', lambda m: {**m, 'tail': torch.ones(1)}),
        'model: this model has no weight tail',
    ),
    (damaged('model', lambda w: 7), 'model does not fit'),
    (damaged('step', lambda n: 'seven'), 'step = '),
    (damaged('step', lambda n: -7), 'step = '),
    (damaged('best', lambda x: math.nan), 'best = '),
    (damaged('record', lambda r: {}), 'record = '),
    (damaged('optimizers', lambda o: o[:1]), 'optimizers: expected a list of 2'),
    (damaged('optimizers.1.state', lambda s: {}), 'optimizers[1] does not fit'),
    (damaged('optimizers.0.param_groups', lambda g: g + g), 'optimizers[0] does not fit'),
    (
        damaged(
            'optimizers.1.state',
            lambda s: {k: {**v, 'exp_avg': v['exp_avg'][None]} for k, v in s.items()},
        ),
        'optimizers[1] does not fit',
    ),
    (damaged('rng.torch', lambda x: x[:9]), 'rng does not fit'),
    (damaged('rng', lambda x: 'dice'), 'rng does not fit'),
    (damaged('rng.python', None), 'rng does not fit'),
    (damaged('loader.shard', lambda x: 99), 'loader does not fit'),
    (damaged('state', lambda s: s[:2]), 'state does not fit'),
    (damaged('state', lambda s: [x[:1] for x in s]), 'state does not fit'),
    (damaged('shards', lambda s: 5), 'shards does not fit'),
    (damaged('optimizers', None), 'missing: optimizers'),
]


def test_a_damaged_checkpoint_is_one_line(data, tmp_path, capfd):
    """Whole files whose parts do not fit: refused by file and part, and left as they are."""
    run(data, tmp_path, max_iters=2)
    os.link(tmp_path / 'ckpt_last.pt', tmp_path / 'good.pt')
    capfd.readouterr()
    for damage, message in DAMAGES:
        saved = load_checkpoint(tmp_path / 'good.pt')
        damage(saved)
        train_lm.save_checkpoint(saved, tmp_path / 'ckpt_last.pt')
        before = (tmp_path / 'ckpt_last.pt').read_bytes()
        with pytest.raises(SystemExit) as error:
            run(data, tmp_path, resume=True)
        stderr = capfd.readouterr().err
        assert (
            error.value.code == 2
            and f'{tmp_path}/ckpt_last.pt: ' in stderr
            and message in stderr
            and stderr.count('\n') == 1
        ), stderr
        assert (tmp_path / 'ckpt_last.pt').read_bytes() == before


def test_other_shards_are_refused(data, tmp_path, monkeypatch, capfd):
    """Of the same names and sizes too, and one more shard."""
    out, others = tmp_path / 'out', tmp_path / 'others'
    run(data, out, max_iters=2)
    shutil.copytree(data, others)
    assert run(others, out, max_iters=3, resume=True) == 0  # a copy of the same
    shard = others / 'fineweb_train_000002.bin'
    tokens = data_fineweb.read_shard(str(shard), 256)
    for change in ('content', 'more'):
        if change == 'content':
            data_fineweb.write_shard(str(shard), np.roll(tokens, 1))
        else:
            shutil.copy(data / shard.name, shard)
            shutil.copy(shard, others / 'fineweb_train_000003.bin')
        with pytest.raises(SystemExit) as error:
            run(others, out, max_iters=4, resume=True)
        stderr = capfd.readouterr().err
        name = 'fineweb_train_000002.bin' if change == 'content' else 'fineweb_train_000003.bin'
        assert (
            error.value.code == 2
            and 'other shards' in stderr
            and name in stderr
            and str(others) in stderr
            and stderr.count('\n') == 1
        ), stderr
    assert run(others, out, eval_only=True) == 0  # only asks what the weights are worth there


def test_a_strangers_config_removes_nothing(data, tmp_path, monkeypatch, capfd):
    """A config file may name a folder, and no more: not one of somebody else, and overwrite is for the command line."""
    (tmp_path / 'config.json').write_text('{"model_type": "gpt2"}')
    (tmp_path / 'stranger.py').write_text(f'out_dir = {str(tmp_path)!r}\noverwrite = True\n')
    for argv, message in (
        ([], 'stranger.py:2: overwrite is for the command line alone'),
        (None, 'holds config.json, which no run of ours wrote'),
    ):
        if argv is None:
            (tmp_path / 'stranger.py').write_text(f'out_dir = {str(tmp_path)!r}\n')
        settings = [a for a in arguments(data, 'x') if not a.startswith('--out_dir')]
        monkeypatch.setattr(
            sys,
            'argv',
            [
                'train_lm.py',
                str(tmp_path / 'stranger.py'),
                *settings,
                *([] if argv is not None else ['--overwrite']),
            ],
        )
        with pytest.raises(SystemExit) as error:
            train_lm.main()
        stderr = capfd.readouterr().err
        assert error.value.code == 2 and message in stderr and stderr.count('\n') == 1, stderr
    assert (tmp_path / 'config.json').read_text() == '{"model_type": "gpt2"}'


def test_no_tokenizer_no_bits_per_byte(data, tmp_path, monkeypatch, capsys):
    """GPT-2 shards can be trained on without the tokenizer: only bits per byte need it."""

    def missing(name):
        raise data_fineweb.DataError('the GPT-2 tokenizer files are not installed')

    monkeypatch.setattr(train_lm, 'token_bytes', missing)
    assert run(data, tmp_path, max_iters=1) == 0
    assert 'no bits per byte: the GPT-2 tokenizer' in capsys.readouterr().out
    assert read_log(tmp_path)[-1]['val_bits_per_byte'] is None


def test_a_full_disk_is_one_line(data, tmp_path, monkeypatch, capfd):
    def full(*args):
        raise OSError(28, 'No space left on device')

    monkeypatch.setattr(train_lm, 'save_checkpoint', full)
    monkeypatch.setattr(sys, 'argv', ['train_lm.py', *arguments(data, tmp_path, max_iters=1)])
    with pytest.raises(SystemExit) as error:
        run_script(train_lm.main)
    assert error.value.code == 2 and 'No space left on device' in capfd.readouterr().err


def test_one_gpu_gets_an_index(monkeypatch):
    """torch.cuda.set_device refuses a bare 'cuda'."""
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 2)
    monkeypatch.delenv('LOCAL_RANK', raising=False)
    assert [pick_device(name) for name in ('auto', 'cuda', 'cuda:1', 'cpu')] == [
        'cuda:0',
        'cuda:0',
        'cuda:1',
        'cpu',
    ]
    monkeypatch.setenv('LOCAL_RANK', '1')
    assert pick_device('auto') == 'cuda:1'


def test_eval_only(data, tmp_path, capsys):
    run(data, tmp_path, max_iters=4)
    val_loss = read_log(tmp_path)[-1]['val_loss']
    files = {f: (tmp_path / f).read_bytes() for f in os.listdir(tmp_path)}
    config = configure(vars(train_lm), arguments(data, tmp_path, eval_only=True), quiet=True)
    assert train_lm.train(config) == 0
    assert f'step 4, val loss {val_loss:.4f}' in capsys.readouterr().out
    assert files == {f: (tmp_path / f).read_bytes() for f in os.listdir(tmp_path)}


@pytest.mark.parametrize('recurrent', [True, False])
def test_sample(data, tmp_path, recurrent):
    run(data, tmp_path, max_iters=2, recurrent=recurrent)
    command = [
        sys.executable,
        'sample.py',
        f'--out_dir={tmp_path}',
        '--prompt=né',
        '--max_new_tokens=20',
        '--num_samples=2',
        '--device=cpu',
    ]
    out = [forks.run(command, cwd=ROOT, capture_output=True, text=True) for _ in range(2)]
    assert out[0].returncode == 0, out[0].stderr
    assert (
        out[0].stdout == out[1].stdout
        and out[0].stdout.startswith('né')
        and out[0].stdout.count('---------------\nné') == 1
    )


def test_compile_falls_back(data, tmp_path):
    """Where there is no C++ compiler, one line says so and the run goes on."""
    process = subprocess.run(
        [
            sys.executable,
            'train_lm.py',
            *arguments(data, tmp_path / 'out', compile=True, max_iters=1),
        ],
        cwd=ROOT,
        text=True,
        capture_output=True,
        env={**os.environ, 'CXX': '/nonexistent', 'TORCHINDUCTOR_CACHE_DIR': str(tmp_path)},
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.count('compile = True does not work here, going on without it') == 1


def test_trackers_are_optional(data, tmp_path, monkeypatch, capfd):
    """wandb and TensorBoard are imported only when asked for; where they are missing, one line names the package."""
    for name in ('wandb', 'tensorboard'):
        monkeypatch.setitem(sys.modules, name, None)  # as if not installed
        monkeypatch.setitem(sys.modules, 'torch.utils.tensorboard', None)
        monkeypatch.setattr(
            sys, 'argv', ['train_lm.py', *arguments(data, tmp_path, overwrite=True, **{name: True})]
        )
        with pytest.raises(SystemExit) as error:
            train_lm.main()
        stderr = capfd.readouterr().err
        assert (
            error.value.code == 2
            and name in stderr
            and 'not installed' in stderr
            and stderr.count('\n') == 1
        ), stderr


@pytest.mark.parametrize(
    'arguments_, message',
    [
        (['--out_dir=/nonexistent'], '/nonexistent: holds no trained run'),
        (['--max_new_tokens=-5'], 'max_new_tokens = -5'),
        (['--temperature=-1'], 'temperature = -1.0'),
        (['--which=worst'], "which = 'worst'"),
        (['--prompt=FILE:/nonexistent'], '/nonexistent: cannot be read'),
        (['--device=tpu'], "device = 'tpu'"),
    ],
)
def test_sample_mistakes(data, tmp_path, arguments_, message, monkeypatch, capfd):
    run(data, tmp_path, max_iters=1)
    monkeypatch.setattr(
        sys, 'argv', ['sample.py', f'--out_dir={tmp_path}', '--device=cpu', *arguments_]
    )
    capfd.readouterr()
    with pytest.raises(SystemExit) as error:
        sample.main()
    stderr = capfd.readouterr().err
    assert error.value.code == 2 and message in stderr and stderr.count('\n') == 1, stderr


@pytest.mark.parametrize(
    'config',
    sorted(
        f for f in os.listdir(ROOT / 'config') if not f.startswith(('sokoban_', 'study_', 'probe_'))
    ),
)
def test_config_files(data, tmp_path, config, request):
    """Every config file loads and makes a model, shrunk; levels and experts as they are. Those of few levels, and with --long all, run two updates."""
    tiny = {k: v for k, v in TINY.items() if k not in ('n_layer', 'n_expert')}
    argv = [
        str(ROOT / 'config' / config),
        *(
            f'--{k}={v}'
            for k, v in {
                **tiny,
                'data_dir': data,
                'out_dir': tmp_path,
                'n_embd': 8,
                'n_head': 2,
                'n_kv_head': 1,
                'batch_size': 0,
                'max_iters': 2,
                'plot': False,
            }.items()
        ),
    ]
    settings = configure(vars(train_lm), argv, quiet=True)
    if config not in ('demo.py', 'tiny_lm.py', 'tiny_gpt.py'):
        budget, kind = config.split('_L')[0], 'gpt' not in config
        assert (
            settings['n_layer'] * settings['n_expert']
            == (32 if budget.startswith('medium') else 16)
            and settings['recurrent'] == kind
        )
        assert config == f'{budget}_L{settings["n_layer"]}.py'
    if settings['n_layer'] <= 2 or request.config.getoption('--long'):
        assert train_lm.train(settings) == 0
    else:
        model = train_lm.begin(settings)[0].model
        assert (model.config.n_layer, model.config.n_expert) == (
            settings['n_layer'],
            settings['n_expert'],
        )


def test_demo_recipe(tmp_path):
    """`make demo`'s own three commands, shrunk."""
    printed = subprocess.run(
        ['make', '-n', '--no-print-directory', '-o', '.venv/installed', 'demo', 'BIN=BIN'],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    recipe = printed.replace('BIN/python', sys.executable).splitlines()
    extra = [
        f'--data_dir={tmp_path}/data',
        f'--data_dir={tmp_path}/data --out_dir={tmp_path}/out --max_iters=2 --val_tokens=512 --val_streams=8 '
        '--tokens_per_step=256',
        f'--out_dir={tmp_path}/out --max_new_tokens=5',
    ]
    for line, more in zip(recipe, extra, strict=True):
        done = forks.run(shlex.split(f'{line} {more}'), cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert (
        'Fellow citizens' in done.stdout and (tmp_path / 'out' / 'loss.png').stat().st_size > 5000
    )

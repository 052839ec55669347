"""Test train_lm.py: losses, resume, ranks, graphs, evaluation, stops, mistakes."""

import contextlib
import io
import itertools
import json
import math
import os
import re
import shutil
import signal
import sys
import zlib

from configurator import configure
from support.script import UserError

import numpy as np
import processes
import pytest
import torch
import torch.distributed as dist
from processes import ROOT, run_ranks
from small_runs import (
    StopAt,
    assert_equal,
    error_of,
    lm_arguments,
    read_log,
    run_lm,
    train_lm_as_rank,
)

import data_fineweb
import model
import train_lm
from lstm import build_lstm
from support import compiling, ranks, stream
from support.loader import Loader, find_shards, read_shard, write_shard
from support.muon import Muon
from support.run_folder import LAST, load_checkpoint, settings_of

LSTM = {'arch': 'lstm'}
EVAL = {'eval_interval': 100}  # before the first update and after the last
ROUTED = {'aggregation': 'softmax_l2', 'share_kv': False}
NO_LEARNING = {'learning_rate': 0, 'embedding_lr': 0, 'head_lr': 0, 'scalar_lr': 0}


def last_of(folder):
    return load_checkpoint(folder / LAST)


def resume(folder, *argv):
    """Resume a run by its folder; return the exit status."""
    return train_lm_as_rank([f'--out_dir={folder}', '--resume=True', *argv])


def bytes_in(folder):
    return {path: path.read_bytes() for path in folder.rglob('*') if path.is_file()}


# ---- losses and the log


def test_a_run_logs_every_update(data, tmp_path):
    """Warm-up takes three updates."""
    assert run_lm(data, tmp_path) == 0
    log = read_log(tmp_path)
    assert [r['step'] for r in log] == list(range(9)) and log[8]['tokens'] == 512
    assert [r['epoch'] for r in log[1:]] == 5 * [0] + 3 * [1]
    rates = [1 / 3, 2 / 3, 1, 0.9055, 0.6580, 0.3520, 0.1045, 0.01]  # of the peak, 0.02
    assert [r['lr'] / 0.02 for r in log[1:]] == pytest.approx(rates, abs=1e-4)
    assert log[0]['val_loss'] == pytest.approx(math.log(256), abs=1e-4)
    assert log[0]['val_bits_per_byte'] == pytest.approx(8, abs=1e-3)


@pytest.mark.parametrize('max_iters, n_warnings', [(2, 1), (3, 1), (4, 0)])
def test_a_rate_that_never_falls_is_named(data, tmp_path, capsys, max_iters, n_warnings):
    assert run_lm(data, tmp_path, max_iters=max_iters, warmup_iters=3) == 0
    error = capsys.readouterr().err
    assert error.count(f'warning: max_iters = {max_iters}, warmup_iters = 3: ') == n_warnings


@pytest.mark.parametrize('settings', [{}, {'recurrent': False}, LSTM], ids=str)
def test_the_loss_falls_below_the_unigram_entropy(data, tmp_path, settings):
    """Squares modulo 11 have a unigram entropy of 1.77 nats, and each is determined by the ones
    before it."""
    run_lm(data, tmp_path, max_iters=60, eval_interval=60, baseline_lr=0.01, **settings)
    assert read_log(tmp_path)[-1]['val_loss'] < 1.2


def test_states_are_carried_and_reset(data, trained, tmp_path):
    """With learning rates of 0, the loss of an update is the mean over its streams, each read alone
    from its carried state. That is reset at a shard's start and when reset_every says so."""
    settings = {'init_from': trained / 'recurrent', 'batch_size': 4, 'reset_every': 3}
    run_lm(data, tmp_path, **settings, **NO_LEARNING)
    same_model = model.LanguageModel.load_trained(tmp_path, 'last')
    loader = Loader(find_shards(str(data), 'train'), 8, 8, 256, True, seed=1337)
    states = [None] * 8
    for step, record in enumerate(read_log(tmp_path)[1:]):
        x, y, is_shard_start = loader.next()
        losses = []
        for b in range(8):
            if is_shard_start or b % 3 == step % 3:
                states[b] = None
            with torch.no_grad():
                loss, states[b] = same_model(x[[b]], y[[b]], states[b])
            losses.append(loss.cross_entropy.item())
        assert record['train_loss'] == pytest.approx(sum(losses) / 8, rel=1e-5)


# ---- resume


RESUMED = [  # settings, signal
    ({'batch_size': 4, 'reset_every': 3, **ROUTED}, signal.SIGTERM),
    ({'recurrent': False}, signal.SIGHUP),
    (LSTM, signal.SIGUSR1),
]


@pytest.mark.parametrize('settings, number', RESUMED, ids=str)
def test_resume_is_bit_equal(data, tmp_path, monkeypatch, settings, number):
    """An uninterrupted run equals one that gets a signal in its first validation, saves and stops
    after update 1, dies in the validation after update 4 and is resumed each time, by its folder
    alone. Updates 2 and 5 read a shard's second window, update 6 starts an epoch. The interrupted
    validation is made and logged again."""
    a, b = tmp_path / 'a', tmp_path / 'b'
    run_lm(data, a, **settings)

    def score(*args, real=stream.Stream.score):
        os.kill(os.getpid(), number)
        return real(*args)

    signal.signal(number, signal.SIG_DFL)  # not ignored, as under nohup
    with monkeypatch.context() as patch:
        patch.setattr(stream.Stream, 'score', score)
        assert run_lm(data, b, **settings) == 128 + number
    assert last_of(b)['step'] == 1
    with monkeypatch.context() as patch, pytest.raises(TypeError):
        patch.setattr(stream.Stream, 'score', None)
        resume(b)
    assert last_of(b)['step'] == 4
    torch.manual_seed(999)  # a new process has other random states
    assert resume(b) == 0
    assert_equal(last_of(a), last_of(b))
    assert_equal(read_log(a), read_log(b))
    lines = [json.loads(line) for line in (b / 'log.jsonl').read_text().splitlines()][1:]
    seconds = itertools.accumulate(line['ms'] / 1000 for line in lines)
    assert [line['seconds'] for line in lines] == pytest.approx(list(seconds))


def test_after_an_error_a_notebook_can_resume_the_run(data, tmp_path, monkeypatch):
    """The error is kept, as a notebook keeps its last one. Folder and signals are free."""
    handler = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError) as error:
        patch.setattr(train_lm.Loader, 'next', lambda self: 1 / 0)
        run_lm(data, tmp_path)
    assert signal.getsignal(signal.SIGINT) == handler
    assert run_lm(data, tmp_path, overwrite=True, max_iters=1) == 0
    assert resume(tmp_path, '--max_iters=2') == 0
    assert error.traceback


def test_a_compiler_that_dies_in_a_validation_does_not_end_the_run(
    data, tmp_path, monkeypatch, capsys
):
    """As by a SIGTERM for all processes of a job."""

    def compiled(function):
        def call(*args):
            if (tmp_path / 'config.json').exists():  # after the trials
                raise RuntimeError('g++ was killed')
            return function(*args)

        return call

    monkeypatch.setattr(compiling, 'compiled', compiled)
    assert run_lm(data, tmp_path, compile=True, max_iters=1) == 0
    assert capsys.readouterr().out.count('running uncompiled (RuntimeError: g++ was killed)') == 1


BEST = [  # losses of the validations after updates 0, 4, 6, 8 and 12, changed setting, best update
    ([5, 4, 2, 3, 2.5], [], 6),
    ([5, 4, 1, 2, 1.5], ['--val_tokens=48'], 12),
    ([5, 4, math.nan, 3, 6], [], 8),
]


@pytest.mark.parametrize('losses, change, best', BEST)
def test_the_best_model_has_the_lowest_loss_on_the_same_tokens(
    data, tmp_path, monkeypatch, capsys, losses, change, best
):
    """Losses of a run that is resumed after updates 6 and 8 count together. A line tells that a
    model which was chosen on other tokens is replaced."""
    values = iter(losses)
    monkeypatch.setattr(stream.Stream, 'score', lambda *_: torch.tensor([next(values), 1.0]))
    run_lm(data, tmp_path, max_iters=6)
    assert resume(tmp_path, '--max_iters=8', *change) == 0
    assert ('best: was chosen on other tokens' in capsys.readouterr().out) == bool(change)
    assert resume(tmp_path, '--max_iters=12') == 0
    assert [r['step'] for r in read_log(tmp_path) if 'val_loss' in r] == [0, 4, 6, 8, 12]
    assert settings_of(tmp_path / 'best')['step'] == best


def test_the_best_model_is_of_updates_that_the_run_still_has(data, tmp_path, monkeypatch, capsys):
    """That of update 8 is replaced when the run goes back to update 4."""
    values = iter([5, 4, 3, 4.5, 6])
    monkeypatch.setattr(stream.Stream, 'score', lambda *_: torch.tensor([next(values), 1.0]))
    run_lm(data, tmp_path, max_iters=8)
    (tmp_path / LAST).unlink()
    assert resume(tmp_path, '--max_iters=12') == 0
    assert 'best: is that of a later update, and the next' in capsys.readouterr().out
    best = settings_of(tmp_path / 'best')
    assert (best['step'], best['best_val_loss']) == (8, 4.5)


def test_a_resumed_run_takes_new_optimizer_settings(data, tmp_path):
    """With learning rates of 0 the weights stay."""
    run_lm(data, tmp_path, max_iters=4)
    before = last_of(tmp_path)['model']
    rates = [f'--{name}=0' for name in NO_LEARNING]
    assert resume(tmp_path, '--max_iters=5', '--betas=(0.5, 0.5)', *rates) == 0
    assert_equal(last_of(tmp_path)['model'], before)
    assert last_of(tmp_path)['optimizers'][1]['param_groups'][0]['betas'] == (0.5, 0.5)


def test_a_run_ends_at_max_iters_and_is_then_left_alone_by_auto(data, tmp_path, monkeypatch, capfd):
    """It may end where it was stopped, not before, and is validated there. A finished run does not
    need its data, takes no settings without an update, and can be extended."""
    with monkeypatch.context() as patch:
        patch.setattr(train_lm, 'Stopper', lambda: StopAt(3))
        run_lm(data, tmp_path)
    shorter = lm_arguments(data, tmp_path, resume='auto', max_iters=2)
    assert 'max_iters = 2: ' in error_of(capfd, train_lm, shorter)
    assert run_lm(data, tmp_path, resume='auto', max_iters=3) == 0
    assert [r['step'] for r in read_log(tmp_path) if 'val_loss' in r] == [0, 3]
    before = bytes_in(tmp_path)
    assert run_lm('/nowhere', tmp_path, resume='auto', max_iters=3) == 0
    assert f'{tmp_path}: done, 3 updates' in capfd.readouterr().out
    assert resume(tmp_path) == 0  # the checkpoint has another max_iters
    assert 'as in a later start' not in capfd.readouterr().out
    assert resume(tmp_path, '--max_iters=3', '--learning_rate=0.5') == 0
    assert bytes_in(tmp_path) == before
    assert run_lm(data, tmp_path, resume='auto', max_iters=4) == 0
    assert last_of(tmp_path)['step'] == 4


def test_a_run_resumes_on_a_copy_of_its_data_and_not_on_other_data(data, tmp_path, capfd):
    """It does not read shards that have been added. Shards of other content are other data, even
    with the same names and sizes; a model may be validated on them, but a line says so."""
    out, copy = tmp_path / 'out', tmp_path / 'copy'
    run_lm(data, out, max_iters=2)
    shards = last_of(out)['shards']
    shutil.copytree(data, copy)
    shard = str(copy / 'fineweb_train_000002.bin')
    shutil.copy(shard, copy / 'fineweb_train_000003.bin')
    assert resume(out, '--max_iters=3', f'--data_dir={copy}') == 0
    assert last_of(out)['shards'] == shards
    write_shard(shard, np.roll(read_shard(shard, 256), 1))
    error = error_of(capfd, train_lm, [f'--out_dir={out}', '--resume=True', '--max_iters=4'])
    assert f'other shards than those in {copy}' in error
    shard = str(copy / 'fineweb_val_000000.bin')
    message = f'{copy}: the validation shards are not those of the run'
    for is_other in (False, True):
        train_lm_as_rank([f'--out_dir={out}', '--eval_only=True', f'--data_dir={copy}'])
        assert (message in capfd.readouterr().out) == is_other
        write_shard(shard, np.roll(read_shard(shard, 256), 1))


def test_a_resumed_run_may_use_the_overrides_that_it_had(data, tmp_path, monkeypatch):
    """It may use any if it is new, and none of others when it resumes."""
    asked = []

    def choose(model, rows, compute_dtype, allowed):
        asked.append(allowed)
        model.overrides = frozenset({'other'})  # no function looks for it
        return []

    monkeypatch.setattr(train_lm, 'choose_overrides', choose)
    monkeypatch.setattr(compiling, 'compiled', lambda f: f)
    monkeypatch.setattr(compiling.fused, 'enabled', False)  # compile=True sets it
    run_lm(data, tmp_path, max_iters=2, compile=True)
    assert resume(tmp_path, '--max_iters=3') == 0
    assert asked == [None, ['other']]
    assert settings_of(tmp_path)['triton_overrides'] == ['other']


def test_a_checkpoint_is_refused_if_its_parts_do_not_fit_or_ranks_read_others(
    data, tmp_path, monkeypatch, capfd
):
    run_lm(data, tmp_path, max_iters=2)
    path, saved = tmp_path / LAST, last_of(tmp_path)
    argv = [f'--out_dir={tmp_path}', '--resume=True', '--max_iters=3']
    for damage in (
        {'step': None},
        {'optimizers': saved['optimizers'][:1]},
        {'state': [x[:1] for x in saved['state']]},
    ):
        torch.save(saved | damage, path)
        assert f'{path}: ' in error_of(capfd, train_lm, argv)
    torch.save(saved, path)
    monkeypatch.setattr(ranks, 'agree', lambda *values: 2 not in values)
    assert 'the ranks differ in data, checkpoints or log.jsonl' in error_of(capfd, train_lm, argv)


def sgd(group):
    """Return SGD for the parameters of a group."""
    return torch.optim.SGD([{**group, 'lr': 0.1}])


@pytest.mark.parametrize(
    'edit',
    [
        lambda muon, adamw: (muon, sgd(adamw.param_groups[0])),
        lambda muon, adamw: (sgd(muon.param_groups[0]), adamw),
        lambda muon, adamw: adamw.param_groups.pop() and (muon, adamw),
    ],
    ids=['another in place of AdamW', 'another in place of Muon', 'a group less'],
)
def test_a_checkpoint_of_other_optimizers_is_refused(data, tmp_path, monkeypatch, capfd, edit):
    run_lm(data, tmp_path, max_iters=2)
    make = train_lm.make_optimizers
    monkeypatch.setattr(train_lm, 'make_optimizers', lambda model: edit(*make(model)))
    argv = [f'--out_dir={tmp_path}', '--resume=True', '--max_iters=3']
    error = error_of(capfd, train_lm, argv)
    assert 'last.pt: was not written by the optimizers of this code' in error
    assert 'damaged' not in error


def test_a_version_of_torch_may_lack_an_option_of_an_optimizer(data, tmp_path):
    run_lm(data, tmp_path, max_iters=2)
    saved = last_of(tmp_path)
    del saved['optimizers'][1]['param_groups'][0]['foreach']
    torch.save(saved, tmp_path / LAST)
    run_lm(data, tmp_path, resume=True, max_iters=3)


def test_the_logged_rate_is_that_of_the_optimizer(data, tmp_path, monkeypatch):
    """Here of an AdamW that an edit puts in Muon's place, with a rate of its own."""

    def adamw_alone(model):
        adamw = torch.optim.AdamW(model.parameters(), lr=0.5)
        adamw.param_groups[0] |= {'peak_lr': 0.5, 'lr': torch.tensor(0.5)}
        return Muon([{'params': []}]), adamw

    def make_update(model, muon, adamw, norm, graphs):
        return lambda lr: adamw.param_groups[0]['lr'].fill_(0.5 * lr)

    monkeypatch.setattr(train_lm, 'make_optimizers', adamw_alone)
    monkeypatch.setattr(train_lm, 'make_update', make_update)
    run_lm(data, tmp_path, max_iters=4)
    assert [r['lr'] for r in read_log(tmp_path)[1:]] == [0.5 * train_lm.lr_at(n) for n in range(4)]


# ---- graphs and ranks


def test_captured_updates_use_the_same_memory(data, tmp_path, monkeypatch):
    """Eight updates with replays equal eight without, bit for bit."""
    calls = {}

    def replay(graphs, name, function, *args, **options):
        """Do what compiling.graphed does, as far as a CPU can: from the fourth call on, call the
        function of the fourth call on its arguments, and write the results to the memory of that
        call's results."""
        earlier = calls.setdefault(name, [])
        if len(earlier) < 4:
            earlier.append((function, args, function(*args)))
            return earlier[-1][2]
        function, args, batches = earlier[3]
        for batch, new in zip(batches or [], function(*args) or [], strict=True):
            batch.matrices.copy_(new.matrices)
        return batches

    settings = {'batch_size': 4, 'reset_every': 3, 'eval_interval': 2}
    run_lm(data, tmp_path / 'eager', **settings)
    monkeypatch.setattr(train_lm, 'graphed', replay)
    monkeypatch.setattr(stream, 'graphed', replay)
    run_lm(data, tmp_path / 'replayed', **settings)
    assert calls.keys() == {'train', 'score', 'orthogonalize', 'change weights'}
    assert all(len(earlier) == 4 for earlier in calls.values())
    assert_equal(read_log(tmp_path / 'eager'), read_log(tmp_path / 'replayed'))


def test_training_continues_without_graphs(monkeypatch, capsys):
    """If a capture is refused, one line says so, and the function runs eagerly from then on, as
    does one that reads its results. Others are captured. test_gpu.py refuses real captures."""
    calls = []

    def score():
        calls.append(1)
        if len(calls) == 4:  # the capture
            raise torch.OutOfMemoryError('CUDA out of memory')

    class Graph:
        pool = replay = lambda self: None

    captures, captured = {}, {}
    monkeypatch.setattr(compiling, 'captures', captures)
    monkeypatch.setattr(compiling, 'capturing', lambda *args: contextlib.nullcontext(Graph()))
    monkeypatch.setattr(compiling, 'end_refused', lambda *args: None)
    monkeypatch.setattr(torch.cuda, 'graph_pool_handle', lambda: None)
    for i in range(6):
        compiling.graphed(captured, 'score', score)
        assert compiling.graphed(captured, 'later', float, i, needs='score') == i
        assert compiling.graphed(captured, 'train', float, i) == min(i, 3)  # then the captured call
    reasons = ['OutOfMemoryError: CUDA out of memory', "it needs the graph of 'score'"]
    assert captures == {'score': reasons[0], 'later': reasons[1], 'train': ''}
    assert capsys.readouterr().out.splitlines() == [
        f'no CUDA graph of {name!r}: it runs eagerly, slower ({reason})'
        for name, reason in zip(('score', 'later'), reasons, strict=True)
    ]


def test_ranks_and_micro_batches_change_only_rounding(data, tmp_path):
    """Two ranks with two micro-batches each log the numbers of one process with a whole batch, and
    carry the same state. One process resumes what two have trained, and the other way round."""
    settings = {'val_streams': 5, 'reset_every': 7, 'max_iters': 4}
    one, two = tmp_path / 'one', tmp_path / 'two'
    run_lm(data, one, **settings)
    argv = lm_arguments(data, two, batch_size=2, **settings)
    assert run_ranks(2, train_lm_as_rank, argv) == [0, 0]
    for key in ('train_loss', 'grad_norm', 'val_loss'):
        of_one, of_two = ([r[key] for r in read_log(x) if key in r] for x in (one, two))
        assert of_two[0] == pytest.approx(of_one[0], rel=1e-5)
        assert of_two == pytest.approx(of_one, rel=2e-3)  # Muon's iteration amplifies rounding
    state = last_of(one)['state']
    torch.testing.assert_close(last_of(two)['state'], state, rtol=2e-2, atol=2e-2)
    assert resume(two, '--max_iters=5') == 0
    assert run_ranks(2, resume, one, '--max_iters=5') == [0, 0]
    by_one, by_two = (read_log(folder)[-1]['train_loss'] for folder in (two, one))
    assert by_two == pytest.approx(by_one, rel=1e-4)


def train_as_own_rank(argv, changes):
    """Train as a rank with changes of its own; return the settings that it trained with, or what
    was refused."""
    try:
        train_lm_as_rank([*argv, *changes[int(os.environ['RANK'])]])
    except UserError as error:
        return str(error)
    return train_lm.learning_rate, train_lm.tokens_per_step


def test_ranks_start_with_the_same_settings_and_weights(data, trained, tmp_path):
    """Those of rank 0. Other data are refused."""
    argv = lm_arguments(data, tmp_path, max_iters=1, val_streams=4)
    copy = tmp_path / 'copy'
    shutil.copytree(data, copy)
    changes = [[], [f'--data_dir={copy}']]
    settings = (0.02, 64)
    assert run_ranks(2, train_as_own_rank, [*argv, '--overwrite=True'], changes) == 2 * [settings]
    shard = str(copy / 'fineweb_train_000002.bin')
    write_shard(shard, np.roll(read_shard(shard, 256), 1))
    refused = run_ranks(2, train_as_own_rank, [*argv, '--overwrite=True'], changes)
    assert all('the ranks differ in data, checkpoints or log.jsonl' in x for x in refused)
    argv.append('--overwrite=True')
    argv.append(f'--init_from={trained / "recurrent"}')
    run_lm(data, tmp_path / 'one', max_iters=1, val_streams=4, init_from=trained / 'recurrent')
    run_lm(data, tmp_path / 'other', max_iters=1, seed=3)
    changes = [
        [],
        [f'--init_from={tmp_path / "other"}', '--learning_rate=0.3', '--tokens_per_step=128'],
    ]
    assert run_ranks(2, train_as_own_rank, argv, changes) == 2 * [settings]
    one, two = (read_log(folder) for folder in (tmp_path / 'one', tmp_path))
    assert two[0]['val_loss'] == pytest.approx(one[0]['val_loss'], rel=1e-5)
    assert two[1]['train_loss'] == pytest.approx(one[1]['train_loss'], rel=1e-5)


def count_all_reduces(argv):
    """Train as a rank; return the number of all-reduces."""
    calls, real = [], dist.all_reduce

    def all_reduce(*args, **options):
        calls.append(args)
        return real(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, 'all_reduce', all_reduce)
        assert train_lm_as_rank(argv) == 0
    return len(calls)


def test_every_update_has_one_all_reduce(data, tmp_path):
    few, many = (
        run_ranks(2, count_all_reduces, lm_arguments(data, tmp_path / str(n), max_iters=n, **EVAL))
        for n in (2, 5)
    )
    assert [b - a for a, b in zip(few, many, strict=True)] == [3, 3]


# ---- the LSTM


def test_the_lstm_has_the_size_of_our_model():
    config = model.ModelConfig(256, n_embd=128, window=12, n_expert=2)
    baseline, experts = build_lstm(config, True), model.build_model(config, True)
    assert 0.98 < baseline.num_params()['total'] / experts.num_params()['total'] < 1.02


def test_the_lstm_has_the_optimizer_of_nanogpt_and_open_forget_gates(trained):
    _, adamw = last_of(trained / 'lstm')['optimizers']
    matrices, biases = adamw['param_groups']
    for group, n, decay in ((matrices, 4, 0.1), (biases, 3, 0.0)):
        found = [len(group['params']), *(group[x] for x in ('betas', 'eps', 'weight_decay'))]
        assert found == [n, (0.9, 0.95), 1e-8, decay] and group['peak_lr'] == 2e-3
    lstm = build_lstm(model.ModelConfig(256, n_embd=128), True).lstm
    assert (lstm.bias_ih_l0.chunk(4)[1] == 1).all()


def test_the_lstm_runs_in_float64_and_refuses_other_targets():
    lstm = build_lstm(model.ModelConfig(256, n_embd=128), True).double()
    x, y = torch.randint(256, (2, 2, 5))
    logits, _ = lstm(x, None, lstm.init_state(2))
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
    assert logits.dtype == torch.float64 and lstm(x, y)[0].objective == expected
    with pytest.raises(ValueError, match='targets of shape'):
        lstm(x, y.T)


# ---- evaluation


@pytest.mark.parametrize('name', ['recurrent', 'nonrecurrent/best', 'lstm/best'])
def test_eval_only_prints_the_logged_loss_and_writes_nothing(trained, monkeypatch, capsys, name):
    """It takes everything from the run, or from the export: data, sizes, dtype, compile. It reads
    as many streams as fit, here one."""

    def score_chunk(self, x, y, state, real=stream.Stream.score_chunk):
        if len(x) > 1:
            raise torch.OutOfMemoryError('of 80 GB')
        real(self, x, y, state)

    monkeypatch.setattr(stream.Stream, 'score_chunk', score_chunk)
    before = bytes_in(trained)
    argv = ['--eval_only=True', '--resume=auto', '--device=cpu', '--tokens_per_step=100']
    assert train_lm_as_rank([f'--out_dir={trained / name}', *argv]) == 0
    loss = read_log(trained / name.split('/')[0])[4]['val_loss']
    assert f'step 4: validation loss {loss:.4f} nats per token (' in capsys.readouterr().out
    assert bytes_in(trained) == before


def validate_with_uneven_tokens(folder, *argv):
    """Validate as a rank, with tokens that stand for up to seven bytes; return what is printed."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.setattr(train_lm, 'token_bytes', lambda name: np.arange(256) % 7 + 1)
        assert train_lm_as_rank([f'--out_dir={folder}', '--eval_only=True', *argv]) == 0
    return out.getvalue()


def test_validation_is_the_same_for_any_number_of_ranks(trained, tmp_path):
    """Ranks have two and three streams. The model has learned the first two and not the others."""
    tokens = np.arange(100, dtype=np.uint16) ** 2 % 11 + 65
    tokens[38:] = np.arange(100, 162)
    write_shard(tmp_path / 'fineweb_val_000000.bin', tokens)
    data_fineweb.write_meta(tmp_path, {'tokenizer': 'bytes', 'source': 'test', 'shards': []})
    argv = trained / 'recurrent', f'--data_dir={tmp_path}', '--val_streams=5'
    printed = (
        validate_with_uneven_tokens(*argv),
        run_ranks(2, validate_with_uneven_tokens, *argv)[0],
    )
    pattern = r'loss (.*) nats per token \((.*) bits per byte\), 95 tokens'
    one, two = (tuple(map(float, re.search(pattern, text).groups())) for text in printed)
    assert two == pytest.approx(one, abs=2e-4)
    nats, bits = one
    size = (tokens[1:96] % 7 + 1).sum()
    assert bits == pytest.approx(95 * nats / math.log(2) / size, abs=2e-4)


# ---- losses and weights that are not finite


NOT_FINITE = [  # changed settings, message
    ('--learning_rate=1e38', 'update 6: the loss is '),
    ('--embedding_lr=1e25', 'update 6: the loss is 5.5'),  # its gradient is NaN
    ('--learning_rate=3e38 --eval_interval=5', 'update 5: a weight is not finite'),
]


@pytest.mark.parametrize('changes, message', NOT_FINITE)
def test_what_is_not_finite_ends_the_run_and_is_not_saved(data, tmp_path, capsys, changes, message):
    run_lm(data, tmp_path, max_iters=4)
    saved = (tmp_path / LAST).read_bytes()
    assert resume(tmp_path, '--max_iters=20', *changes.split()) == 1
    printed = capsys.readouterr().out
    assert message in printed and 'the last checkpoint is of step 4' in printed
    assert (tmp_path / LAST).read_bytes() == saved


# ---- mistakes


def test_one_line_under_torchrun(data, tmp_path):
    """All ranks have the same mistake."""
    done = processes.run(['train_lm.py', *lm_arguments(data, tmp_path, n_head=3)], ranks=2)
    assert done.returncode != 0 and done.stderr.count('error: n_head = 3') == 1, done.stderr


MISTAKES = [  # arguments on a folder that holds a run, message; {0}: trained
    ('--tokens_per_step=100', 'tokens_per_step = 100: must be a multiple'),
    ('--batch_size=3', 'batch_size = 3: must divide the 8 rows'),
    ('--betas=(0.9,)', 'betas = (0.9,)'),
    ('--block_size=0', 'block_size = 0: must be at least 1'),
    ('--arch=lstm --recurrent=False', 'needs --recurrent=True'),
    ('--data_dir=/nowhere', "no val shards in '/nowhere'"),
    ('--wandb=True', 'wandb is asked for but not installed'),
    ('--init_from=none', 'none/best/config.json: cannot be read'),
    ('--init_from={0}/lstm --arch=experts --n_embd=64', 'no weight has'),
]


def test_a_refused_command_leaves_the_run_that_it_was_to_overwrite(
    data, trained, tmp_path, monkeypatch, capfd
):
    monkeypatch.setitem(sys.modules, 'wandb', None)  # as if not installed
    run_lm(data, tmp_path, max_iters=1)
    before = bytes_in(tmp_path)
    for arguments, message in MISTAKES:
        argv = lm_arguments(data, tmp_path, overwrite=True)
        error = error_of(capfd, train_lm, [*argv, *arguments.format(trained).split()])
        assert message in error, error
    assert bytes_in(tmp_path) == before


# ---- starting from other weights


def test_init_from_takes_the_layers_that_both_models_have(trained, data, tmp_path, capfd):
    """And sizes that the command line does not set."""
    source = trained / 'nonrecurrent'
    settings = {'init_from': source, 'max_iters': 1, **NO_LEARNING}
    run_lm(data, tmp_path / 'deeper', n_layer=3, **settings)
    printed = capfd.readouterr().out
    assert 'initialized from scratch: layers.2.' in printed and 'not taken' not in printed
    weights = last_of(tmp_path / 'deeper')['model']
    assert all(torch.equal(weights[name], x) for name, x in last_of(source)['model'].items())
    config = settings_of(tmp_path / 'deeper')
    assert not config['recurrent']
    assert config['init_checksum'] == zlib.crc32((source / 'best/model.safetensors').read_bytes())


@pytest.mark.parametrize(
    'old, new',
    [
        ({'share_kv': False, 'init_b': 'sqrt_experts'}, {'recurrent': False}),
        ({'recurrent': False, 'residual': 'shared'}, {'recurrent': True}),
        ({'recurrent': False, 'residual': 'shared'}, {'arch': 'lstm'}),
    ],
)
def test_init_from_leaves_out_the_settings_of_the_other_kind(data, tmp_path, capfd, old, new):
    run_lm(data, tmp_path / 'a', max_iters=1, **old)
    assert run_lm(data, tmp_path / 'b', max_iters=1, init_from=tmp_path / 'a', **new) == 0
    printed = capfd.readouterr().out
    for name in old.keys() - new.keys():
        assert f'{name} = {old[name]!r} of {tmp_path / "a"} is not taken: ' in printed


def test_the_shipped_model_can_be_fine_tuned_on_a_text(tmp_path, monkeypatch):
    """By README.md's lines, although the text is too short for the val_tokens of the config. It
    starts far below the ln 256 = 5.5 nats per byte of a new model, and a resumed run keeps the
    sizes that it adopted."""
    monkeypatch.chdir(tmp_path)
    speech = 'Fellow-citizens of the Senate and of the House of Representatives: the Congress has '
    speech += 'passed the law for the relief of our troops.\n'
    (tmp_path / 'my.txt').write_text(200 * speech)
    argv = ['--text=my.txt', '--tokenizer=bytes']
    data_fineweb.make_shards(configure(vars(data_fineweb), argv, quiet=True))
    argv = [f'{ROOT}/config/tiny_lm.py', f'--init_from={ROOT}/pretrained/lm']
    argv += '--data_dir=data/text_bytes --out_dir=out --eval_interval=2 --max_iters=2'.split()
    argv += '--device=cpu --compile=False --learning_rate=0.001'.split()
    assert train_lm_as_rank(argv) == 0
    assert read_log('out')[0]['val_loss'] < 3.5
    assert train_lm_as_rank([*argv, '--resume=True', '--max_iters=3']) == 0
    assert read_log('out')[-1]['step'] == 3 and settings_of('out')['n_embd'] == 48

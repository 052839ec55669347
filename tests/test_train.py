"""Test train_lm.py: runs and their files, resume, micro-batches, ranks, memory, stops, mistakes."""

import contextlib
import json
import math
import os
import shlex
import shutil
import signal
import sys
import time
from types import SimpleNamespace

import numpy as np
import processes
import pytest
import torch
from processes import ROOT, run_ranks
from small_runs import assert_equal, error_of, lm_arguments, read_log, run_agent, run_lm, start_lm
from small_runs import train_lm_as_rank, write_shards

import baselines
import common
import data_fineweb
import kernels
import model
import sample
import train_lm
import train_sokoban
from common import load_checkpoint
from configurator import configure

LSTM = {'arch': 'lstm'}
TRANSFORMER = {'arch': 'transformer', 'recurrent': False, 'n_expert': 1}
ROUTED = {'aggregation': 'softmax_l2', 'share_kv': False}


def prepare_run(data, out, **settings):
    """Return a run before its first update, or, resumed, before its next one."""
    argv = lm_arguments(data, out, **settings)
    run = train_lm.make_run(configure(vars(train_lm), argv, quiet=True))
    if train_lm.resume:
        train_lm.load(run)
    return run


def train_updates(run, n):
    """Train for n updates; return (loss, norm, stop) of each."""
    results = []
    for _ in range(n):
        results.append(train_lm.train_update(run, train_lm.lr_at(run.step), False))
        run.step += 1
    return results


# ---- a run and its files ----


def test_a_run_writes_its_log_config_curve_and_checkpoints(data, tmp_path):
    assert run_lm(data, tmp_path, plot=True) == 0
    log = read_log(tmp_path)
    assert [r['step'] for r in log] == list(range(9)) and log[8]['tokens'] == 512
    assert [r['step'] for r in log if 'val_loss' in r] == [0, 4, 8]
    assert log[0]['val_loss'] == pytest.approx(math.log(256), abs=1e-4)
    assert log[0]['val_bits_per_byte'] == pytest.approx(8, abs=1e-3)
    assert [r.get('epoch') for r in log[1:]] == [0, 0, 0, 0, 0, 1, 1, 1]
    files = {path.name for path in tmp_path.iterdir()}
    checkpoints = {'ckpt_last.pt', 'ckpt_prev.pt', 'ckpt_best.pt'}
    assert {'config.json', 'loss.png', *checkpoints} <= files
    config = json.loads((tmp_path / 'config.json').read_text())
    assert config['n_embd'] == 32 and {'commit', 'device_name', 'torch'} <= config.keys()


def test_eval_only_prints_the_logged_loss_and_writes_nothing(data, trained, capsys):
    folder = trained / 'recurrent'
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert run_lm(data, folder, eval_only=True) == 0
    loss = read_log(folder)[4]['val_loss']
    assert f'step 4: validation loss {loss:.4f} nats per byte (' in capsys.readouterr().out
    assert files == {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize('name', ['recurrent', 'nonrecurrent'])
def test_eval_only_needs_the_model_and_validation_tokens_alone(
    data, trained, tmp_path, capsys, name
):
    """It takes the sizes of its run, and does without training shards and their settings."""
    folder = trained / name
    shutil.copy(data / 'fineweb_val_000000.bin', tmp_path)
    shutil.copy(data / 'meta.json', tmp_path)
    argv = [f'--data_dir={tmp_path}', f'--out_dir={folder}', '--eval_only=True', '--seed=5']
    argv += '--tokens_per_step=100 --val_tokens=96 --val_streams=3 --device=cpu'.split()
    argv += ['--dtype=float32', '--batch_size=7']
    assert train_lm.main(configure(vars(train_lm), argv, quiet=True)) == 0
    loss = read_log(folder)[4]['val_loss']
    assert f'step 4: validation loss {loss:.4f} nats' in capsys.readouterr().out


@pytest.mark.parametrize('trainer', [train_lm, train_sokoban], ids=lambda script: script.SCRIPT)
def test_a_folder_is_locked_before_its_checkpoint_is_loaded(data, tmp_path, monkeypatch, trainer):
    """So no other run can save in between."""

    def load(run, real=trainer.load):
        with pytest.raises(common.CheckpointError, match='another run is using it'):
            common.lock_folder(tmp_path)
        real(run)

    monkeypatch.setattr(trainer, 'load', load)
    for settings in ({}, {'resume': True}):
        if trainer is train_lm:
            assert run_lm(data, tmp_path, max_iters=1, **settings) == 0
        else:
            assert run_agent(tmp_path, total_steps=12, **settings) == 0


@pytest.mark.parametrize(
    'settings', [{}, {'recurrent': False}, {'batch_size': 4, **ROUTED}, LSTM, TRANSFORMER], ids=str
)
def test_resume_is_bit_equal(data, tmp_path, monkeypatch, settings):
    """An uninterrupted run equals one that stops after update 3, dies in the validation after
    update 4 and is resumed each time. Update 4 reads a shard's second window, update 5 starts an
    epoch. The interrupted validation is made and logged again."""
    a, b = tmp_path / 'a', tmp_path / 'b'
    run_lm(data, a, **settings)

    def stop_in_the_third_update(run, lr_fraction, stop, train_update=train_lm.train_update):
        return train_update(run, lr_fraction, run.step == 2)

    def die_after_the_fourth_update(run, evaluate=train_lm.evaluate):
        if run.step == 4:
            raise ZeroDivisionError
        return evaluate(run)

    with monkeypatch.context() as patch:
        patch.setattr(train_lm, 'train_update', stop_in_the_third_update)
        assert run_lm(data, b, **settings) == 143
    assert load_checkpoint(b / 'ckpt_last.pt')['step'] == 3
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(train_lm, 'evaluate', die_after_the_fourth_update)
        run_lm(data, b, resume=True, **settings)
    torch.manual_seed(999)  # a new process has other random states
    assert run_lm(data, b, resume=True, **settings) == 0
    assert_equal(load_checkpoint(a / 'ckpt_last.pt'), load_checkpoint(b / 'ckpt_last.pt'))
    assert_equal(read_log(a), read_log(b))


def test_a_longer_run_keeps_the_last_validation_of_the_shorter(data, tmp_path, monkeypatch):
    """The shorter run ended at update 6, with its lowest loss."""
    losses = {0: 5.0, 4: 4.0, 6: 2.0, 8: 3.0}
    monkeypatch.setattr(train_lm, 'evaluate', lambda run: (losses[run.step], 0.0))
    run_lm(data, tmp_path, max_iters=6)
    assert run_lm(data, tmp_path, max_iters=8, resume=True) == 0
    log = read_log(tmp_path)
    assert {r['step']: r['val_loss'] for r in log if 'val_loss' in r} == losses
    assert load_checkpoint(tmp_path / 'ckpt_best.pt')['step'] == 6


@pytest.mark.parametrize('changes', [{'val_tokens': 48}, {'val_streams': 2}], ids=str)
def test_the_lowest_loss_on_other_validation_tokens_does_not_count(data, tmp_path, capsys, changes):
    run_lm(data, tmp_path, max_iters=1)
    assert prepare_run(data, tmp_path, resume=True).best < math.inf
    assert prepare_run(data, tmp_path, resume=True, **changes).best == math.inf
    assert capsys.readouterr().out.count('val_tokens or val_streams has changed') == 1


def test_a_run_that_resumes_from_the_previous_checkpoint_keeps_it(data, tmp_path):
    """The damaged last one is renamed, so that the next save does not replace the previous one by
    it. A validation alone renames nothing."""
    run_lm(data, tmp_path, max_iters=8)
    previous = (tmp_path / 'ckpt_prev.pt').read_bytes()
    (tmp_path / 'ckpt_last.pt').write_bytes(b'damaged')
    run_lm(data, tmp_path, eval_only=True)
    assert (tmp_path / 'ckpt_last.pt').read_bytes() == b'damaged'
    run = prepare_run(data, tmp_path, resume=True)
    assert run.step == 4 and not (tmp_path / 'ckpt_last.pt').exists()
    assert (tmp_path / 'ckpt_damaged.pt').read_bytes() == b'damaged'
    train_lm.save(run)
    assert (tmp_path / 'ckpt_prev.pt').read_bytes() == previous


def test_a_resumed_run_takes_new_optimizer_settings_and_keeps_its_moments(data, tmp_path):
    run_lm(data, tmp_path, max_iters=4)
    settings = {'resume': True, 'learning_rate': 0.5, 'betas': (0.1, 0.2)}
    muon, adamw = prepare_run(data, tmp_path, **settings).optimizers
    assert muon.param_groups[0]['peak_lr'] == 0.5
    assert adamw.param_groups[0]['betas'] == (0.1, 0.2)
    assert all(s['momentum_buffer'].abs().sum() > 0 for s in muon.state.values())


def test_a_resumed_run_may_not_change_a_setting_that_a_fork_has_added():
    """The setting was added after the run was saved: its default counts as the saved value."""
    saved, defaults = {'n_layer': 2}, {'n_layer': 2, 'z_loss': 0.0}

    def resume(z_loss):
        config = {**saved, 'z_loss': z_loss}
        common.refuse_changes(saved, config, defaults, train_lm.HARMLESS, 'ckpt', 'my_train.py')

    resume(z_loss=0.0)
    with pytest.raises(common.CheckpointError) as error:
        resume(z_loss=0.1)
    assert 'ckpt: was trained with z_loss = 0.0, not 0.1' in str(error.value)
    assert 'add z_loss to HARMLESS in my_train.py' in str(error.value)


@pytest.mark.parametrize('settings', [{}, {'recurrent': False}, LSTM, TRANSFORMER], ids=str)
def test_the_loss_falls_below_the_unigram_entropy(data, tmp_path, settings):
    """Squares modulo 11 have a unigram entropy of 1.77 nats, and each is determined by the ones
    before it."""
    length = {'max_iters': 60, 'eval_interval': 60, 'baseline_lr': 0.01}
    assert run_lm(data, tmp_path, **length, **settings) == 0
    last = read_log(tmp_path)[-1]
    assert max(last['val_loss'], last['train_loss']) < 1.2


# ---- an update: micro-batches, ranks, graphs ----


@pytest.mark.parametrize(
    'rows, reset_every, arch', [(0, 0, {}), (4, 3, {}), (2, 4, LSTM), (0, 20, {})], ids=str
)
def test_states_are_carried_and_reset(data, tmp_path, rows, reset_every, arch):
    """With learning rates of 0, the loss of an update is the mean over its streams, each read alone
    from its carried state. That is reset at a shard's start and when reset_every says so."""
    rates = dict.fromkeys(['learning_rate', 'embedding_lr', 'head_lr', 'scalar_lr'], 0)
    settings = {'batch_size': rows, 'reset_every': reset_every, 'baseline_lr': 1e-20, **arch}
    run = prepare_run(data, tmp_path, **rates, **settings)
    for p in run.model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    files = data_fineweb.find_shards(str(data), 'train')
    loader = data_fineweb.Loader(files, 8, 8, 256, True, seed=1337)
    states, shard_starts = [None] * 8, []
    for step, (loss, _, _) in enumerate(train_updates(run, 10)):
        x, y, starts = loader.next()
        losses = []
        for b in range(8):
            if starts or (reset_every and b % reset_every == step % reset_every):
                states[b] = None
            with torch.no_grad():
                found, states[b] = run.model(x[[b]], y[[b]], states[b])
            losses.append(found.cross_entropy.item())
        assert loss == pytest.approx(sum(losses) / 8, rel=1e-5)
        if starts:
            shard_starts.append(step)
    assert shard_starts == [0, 3, 5, 8]


def test_gradients_lie_in_one_buffer(data, tmp_path):
    """Every .grad is a view of the buffer, even if zero_grad() has dropped it; behind the gradients
    lie the loss, the stop flag and the norm."""
    run = prepare_run(data, tmp_path, grad_clip=0)
    ((loss, norm, stop),) = train_updates(run, 1)
    buffer = run.gradients.buffer
    grads = torch.cat([p.grad.flatten() for p in run.model.parameters()])
    assert norm == pytest.approx(grads.norm().item(), rel=1e-5)
    assert norm == pytest.approx(buffer[:-3].norm().item(), rel=1e-5)
    assert buffer[-3:].tolist() == [loss, float(stop), norm]
    run.model.zero_grad(set_to_none=True)
    run.gradients.zero()
    buffer.fill_(1)
    assert all((p.grad == 1).all() for p in run.model.parameters())


def addresses(run):
    """Return the addresses of the tensors that a captured update reads and writes."""
    tensors = [run.gradients.buffer, *run.state, *run.batch[:2], *run.batch[2]]
    for p in run.model.parameters():
        tensors += [p, p.grad]
    for optimizer in run.optimizers:
        tensors += [group['lr'] for group in optimizer.param_groups]
    for optimizer in run.optimizers:  # last: there are no moments before the first step
        for moments in optimizer.state.values():
            tensors += moments.values()
    return [t.data_ptr() for t in tensors]


def replay(graphs, name, function, run, *args):
    """Do what kernels.graphed does, as far as a CPU can: from the fourth call on, read the
    arguments of the fourth call and write the results to the memory of its results.

    Assert that no tensor has moved since the fourth call."""
    if graphs is None:
        return function(run, *args)
    graph = graphs.setdefault(name, SimpleNamespace(calls=0))
    graph.calls += 1
    if graph.calls <= 4:
        graph.args, graph.addresses = args, addresses(run)
        graph.results = function(run, *args)
        return graph.results
    assert addresses(run)[: len(graph.addresses)] == graph.addresses, name
    results = function(run, *graph.args)
    for old, new in zip(graph.results or [], results or [], strict=True):
        old.matrices.copy_(new.matrices)
        old.share.copy_(new.share)
    return graph.results


@pytest.mark.parametrize(
    'settings',
    [{'reset_every': 3}, {'batch_size': 2, **ROUTED}, {'recurrent': False, 'batch_size': 4}],
    ids=str,
)
def test_captured_updates_use_the_same_memory(data, tmp_path, monkeypatch, settings):
    """Nine updates with replays equal nine without, bit for bit, across a resume after three."""
    monkeypatch.setattr(train_lm, 'graphed', replay)
    eager = prepare_run(data, tmp_path / 'eager', **settings)
    expected = train_updates(eager, 9)
    assert len({loss for loss, *_ in expected}) == 9

    (tmp_path / 'graphs').mkdir()
    first = prepare_run(data, tmp_path / 'graphs', **settings)
    first.graphs = {}
    found = train_updates(first, 3)
    train_lm.save(first)
    resumed = prepare_run(data, tmp_path / 'graphs', resume=True, **settings)
    resumed.graphs = {}
    found += train_updates(resumed, 6)

    assert found == expected
    assert_equal(eager.model.state_dict(), resumed.model.state_dict())
    assert_equal(eager.state, resumed.state)
    for a, b in zip(eager.optimizers, resumed.optimizers, strict=True):
        assert_equal(a.state_dict()['state'], b.state_dict()['state'])
    assert set(resumed.graphs) == {'chunk', 'orthogonalize', 'apply'}
    assert all(graph.calls > 4 for graph in resumed.graphs.values())


@pytest.mark.parametrize('recurrent', [True, False])
def test_micro_batches_and_ranks_change_only_rounding(data, tmp_path, recurrent):
    """A whole batch, four micro-batches, and two ranks with two micro-batches each log the same
    numbers and carry the same state. A run resumes with another number of ranks."""
    settings = {'recurrent': recurrent, 'val_streams': 5, 'reset_every': 3, 'max_iters': 5}
    run_lm(data, tmp_path / 'whole', **settings)
    run_lm(data, tmp_path / 'micro', batch_size=2, **settings)
    argv = lm_arguments(data, tmp_path / 'ranks', batch_size=2, **settings)
    assert run_ranks(2, train_lm_as_rank, argv) == [0, 0]
    expected_log = read_log(tmp_path / 'whole')
    expected_state = load_checkpoint(tmp_path / 'whole' / 'ckpt_last.pt')['state']
    for name in ('micro', 'ranks'):
        for expected, found in zip(expected_log, read_log(tmp_path / name), strict=True):
            for key in {'train_loss', 'val_loss', 'grad_norm'} & expected.keys():
                # the first updates: before Muon's iteration has amplified any rounding
                rel = 1e-5 if expected['step'] < 2 and key != 'val_loss' else 2e-3
                assert found[key] == pytest.approx(expected[key], rel=rel), (name, expected, key)
        state = load_checkpoint(tmp_path / name / 'ckpt_last.pt')['state']
        torch.testing.assert_close(state, expected_state, rtol=2e-2, atol=2e-2)
    assert run_lm(data, tmp_path / 'ranks', resume=True, **settings | {'max_iters': 6}) == 0


# ---- baselines ----


BASELINES = [
    ('lstm', {'n_expert': 2, 'n_embd': 128}),
    ('lstm', {'n_expert': 2, 'n_embd': 256, 'n_layer': 3}),
    (
        'transformer',
        {'n_layer': 2, 'n_expert': 1, 'n_embd': 64, 'n_head': 4, 'n_kv_head': 2, 'block_size': 8},
    ),
]


@pytest.mark.parametrize('arch, sizes', BASELINES)
def test_baselines_have_the_size_and_cost_of_our_models(arch, sizes):
    config = model.ModelConfig(256, window=12, **sizes)
    baseline, experts = baselines.build(arch, config), model.build_model(config, arch == 'lstm')
    ratio = baseline.num_params()['total'] / experts.num_params()['total']
    assert 0.98 < ratio < 1.02
    if arch == 'transformer':
        assert baseline.flops_per_token() == experts.flops_per_token()


@pytest.mark.parametrize('arch, sizes', BASELINES)
def test_the_loss_of_a_baseline_does_not_depend_on_chunks(arch, sizes):
    """It is the same with chunks of 30, 11 and 1 tokens and a carried state. For a chunk no longer
    than the window it is the same without a state."""
    baseline = baselines.build(arch, model.ModelConfig(256, window=12, **sizes))
    x, y = torch.randint(256, (2, 3, 30))
    losses = []
    for length in (30, 11, 1):
        state, total = baseline.init_state(3), 0
        for inputs, targets in zip(x.split(length, 1), y.split(length, 1), strict=True):
            loss, state = baseline(inputs, targets, state)
            total += loss.objective * inputs.numel() / x.numel()
        losses.append(total)
    torch.testing.assert_close(losses, 3 * [losses[0]], rtol=1e-5, atol=0)
    x, y = x[:, :8], y[:, :8]
    torch.testing.assert_close(baseline(x, y)[0], baseline(x, y, baseline.init_state(3))[0])


# ---- validation ----


@pytest.mark.parametrize('recurrent', [True, False])
def test_validation_does_not_depend_on_rows_or_chunks(data, tmp_path, recurrent):
    """Three streams of 32 tokens are read side by side or one by one, in chunks of 8, 5 and 32."""
    losses = []
    for rows, T in ((3, 8), (1, 8), (3, 5), (1, 32)):
        settings = {'block_size': T, 'tokens_per_step': 4 * T, 'recurrent': recurrent}
        run = prepare_run(data, tmp_path, **settings)
        torch.manual_seed(0)
        for p in run.model.parameters():
            torch.nn.init.normal_(p, std=0.3)
        train_lm.set_val_rows(run, rows)
        losses.append(train_lm.evaluate(run))
    for nats, bits in losses:
        assert nats == pytest.approx(losses[0][0], rel=1e-5)
        assert bits == pytest.approx(nats / math.log(2), rel=1e-9)  # a token is a byte


# ---- the size of a micro-batch ----


def set_memory(monkeypatch, free):
    """Let the device have `free` GB, and each row of a micro-batch take 1 GB."""
    monkeypatch.setattr(common, 'device_memory', lambda device: (free * 1e9, free * 1e9))
    monkeypatch.setattr(train_lm, 'cpu_bytes_per_row', lambda run: 1e9)


@pytest.mark.parametrize('free, rows', [(9, 8), (7.9, 4), (3, 2), (1, 1)])
def test_a_micro_batch_has_the_rows_that_fit_the_memory(
    data, tmp_path, monkeypatch, capsys, free, rows
):
    run = prepare_run(data, tmp_path)
    set_memory(monkeypatch, free=free)
    train_lm.prepare(run)
    assert run.rows == len(run.batch[0]) == rows and len(run.batch[2][0]) == rows
    assert f'{rows} rows per micro-batch' in capsys.readouterr().out


def rows_of_rank(arguments, free):
    """Return the rows of a micro-batch, if this rank has free[rank] GB and a row takes 1 GB."""
    run = train_lm.make_run(configure(vars(train_lm), arguments, quiet=True))
    with pytest.MonkeyPatch.context() as patch:
        set_memory(patch, free=free[run.rank])
        train_lm.prepare(run)
    common.leave(run)
    return run.rows


def test_all_ranks_have_the_rows_that_fit_the_smallest_memory(data, tmp_path):
    assert run_ranks(2, rows_of_rank, lm_arguments(data, tmp_path), (9, 2.5)) == [2, 2]


def test_a_resumed_run_with_less_memory_says_that_it_takes_fewer_rows(
    data, tmp_path, monkeypatch, capsys
):
    run_lm(data, tmp_path, max_iters=1)
    run = prepare_run(data, tmp_path, resume=True)
    set_memory(monkeypatch, free=4)
    train_lm.prepare(run)
    assert (
        '4 rows per micro-batch, 8 before: sums of gradients round differently'
        in capsys.readouterr().out
    )


MEASURE = """
import sys
import train_lm
from configurator import configure
run = train_lm.make_run(configure(vars(train_lm), sys.argv[1:], quiet=True))
print(run.rows, train_lm.cpu_bytes_per_row(run))
"""


def test_bytes_per_row_are_measured(tmp_path):
    """A row keeps at least the FFN's inner activations, 4 D floats per token, layer and expert, and
    not a hundred times more. A new process measures it, because memory that this one has freed
    would be used first."""
    write_shards(tmp_path, val_000000=150, train_000001=64 * 65 * 2)
    sizes = {'n_embd': 128, 'block_size': 64, 'tokens_per_step': 64 * 64}
    done = processes.run(['-c', MEASURE, *lm_arguments(tmp_path, tmp_path / 'out', **sizes)])
    rows, bytes_per_row = map(float, done.stdout.split()[-2:])
    least = 4 * (4 * 128) * 64 * 2 * 2  # bytes x floats x tokens x layers x experts
    assert least < bytes_per_row < 100 * least and rows == 64


def test_rows_are_halved_until_memory_suffices(data, tmp_path, monkeypatch):
    """The trials leave no gradient and no state behind."""
    run, tried = prepare_run(data, tmp_path), []

    def run_out_of_memory_beyond_two_rows(run, x, y, state, real=train_lm.forward_backward):
        tried.append(len(x))
        real(run, x, y, state)
        if len(x) > 2:
            raise torch.OutOfMemoryError('of 80 GB')

    monkeypatch.setattr(train_lm, 'forward_backward', run_out_of_memory_beyond_two_rows)
    train_lm.prepare(run)
    assert tried == [8, 4, 2] and run.rows == 2
    assert not run.gradients.buffer.any()
    assert not any(t.any() for t in (*run.state, *run.batch[2]))


def run_out_of_memory_beyond(monkeypatch, streams):
    """Let validation run out of memory if more streams than this are read side by side."""

    def validate_chunk(run, x, y, state, sums, real=train_lm.validate_chunk):
        if len(x) > streams:
            raise torch.OutOfMemoryError('of 80 GB')
        real(run, x, y, state, sums)

    monkeypatch.setattr(train_lm, 'validate_chunk', validate_chunk)


def test_eval_only_reads_as_many_streams_as_fit(data, trained, monkeypatch, capsys):
    run_out_of_memory_beyond(monkeypatch, streams=1)
    folder = trained / 'recurrent'
    assert run_lm(data, folder, eval_only=True) == 0
    assert f'validation loss {read_log(folder)[4]["val_loss"]:.4f}' in capsys.readouterr().out


def test_a_validation_that_does_not_fit_is_not_blamed_on_batch_size(
    data, tmp_path, monkeypatch, capfd
):
    run_out_of_memory_beyond(monkeypatch, streams=0)
    error = error_of(capfd, train_lm, lm_arguments(data, tmp_path, batch_size=4))
    assert 'one validation stream does not fit' in error and 'batch_size' not in error


def test_a_trial_on_a_gpu_leaves_a_twentieth_of_the_card(data, tmp_path, monkeypatch):
    """A resumed run has its moments already, and still needs room for graphs and NCCL."""
    run_lm(data, tmp_path, max_iters=1)
    run = prepare_run(data, tmp_path, resume=True)
    run.device = 'cuda:0'
    reserved = []
    monkeypatch.setattr(common, 'device_memory', lambda device: (2000.0, 2000.0))
    monkeypatch.setattr(torch, 'empty', lambda size, dtype, device: reserved.append(size))
    assert train_lm.runs_in_memory(run, lambda run, rows: None, 1)
    assert reserved == [100]


def test_training_needs_memory_for_three_copies_of_the_weights(data, tmp_path, monkeypatch):
    """Weights, gradients and Muon's moment."""
    n = sum(p.numel() for p in prepare_run(data, tmp_path).model.parameters())
    monkeypatch.setattr(common, 'device_memory', lambda device: (0.0, 3.1 * 4 * n))
    prepare_run(data, tmp_path)
    monkeypatch.setattr(common, 'device_memory', lambda device: (0.0, 2.9 * 4 * n))
    with pytest.raises(common.Mistake, match='parameters: needs more than'):
        prepare_run(data, tmp_path)


def test_a_model_that_does_not_fit_is_refused_before_anything_is_written(
    data, tmp_path, monkeypatch, capfd
):
    out = tmp_path / 'out'
    set_memory(monkeypatch, free=0.5)
    error = error_of(capfd, train_lm, lm_arguments(data, out))
    assert 'block_size = 8: one row does not fit in the memory of' in error
    error = error_of(capfd, train_lm, lm_arguments(data, out, batch_size=4))
    assert 'batch_size = 4 does not fit' in error and '--batch_size=0 finds' in error
    error = error_of(capfd, train_lm, lm_arguments(data, out, n_embd=2**15, n_head=0))
    assert 'parameters: needs more than' in error
    assert not out.exists()


# ---- stops ----


def test_sigterm_saves_and_exits(data, tmp_path):
    """test_common.py tests the other signals."""
    process = start_lm(data, tmp_path, max_iters=100000, eval_interval=100000)
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
    """Nor does it change a moment of the optimizers. The loss is finite; the gradients are NaN, or
    finite with an infinite norm."""
    run = prepare_run(data, tmp_path)
    train_updates(run, 1)
    run.model.head.register_hook(lambda grad: grad * factor)
    tensors = list(run.model.parameters())
    for optimizer in run.optimizers:
        for moments in optimizer.state.values():
            tensors += moments.values()
    before = [t.clone() for t in tensors]
    loss, norm, _ = train_lm.train_update(run, train_lm.lr_at(run.step), False)
    assert math.isfinite(loss) and not math.isfinite(norm)
    assert all(map(torch.equal, before, tensors))


def test_a_non_finite_loss_ends_the_run_and_keeps_the_last_good_checkpoint(data, tmp_path, capsys):
    run_lm(data, tmp_path, max_iters=4)
    saved = (tmp_path / 'ckpt_last.pt').read_bytes()
    assert run_lm(data, tmp_path, max_iters=20, resume=True, learning_rate=1e38) == 1
    assert 'error: update 6: the loss is ' in capsys.readouterr().out
    assert (tmp_path / 'ckpt_last.pt').read_bytes() == saved


@pytest.mark.parametrize('failure', [torch._dynamo.exc.TorchDynamoException, RuntimeError])
def test_training_continues_uncompiled(data, tmp_path, monkeypatch, capsys, failure):
    """torch.compile fails, or a compiled kernel cannot be launched; one line says so."""

    def fail_if_compiled(run, *args, real=train_lm.forward_backward):
        if kernels.fused.enabled:
            raise failure('no C++ compiler\nmore lines')
        real(run, *args)

    monkeypatch.setattr(train_lm, 'forward_backward', fail_if_compiled)
    assert run_lm(data, tmp_path, compile=True, max_iters=1) == 0
    line = f'compile = True does not work here; training uncompiled ({failure.__name__}: no C++'
    assert capsys.readouterr().out.count(line) == 1


def test_training_continues_without_graphs(monkeypatch, capsys):
    """If a capture is refused, one line says so, and the function runs eagerly from then on.
    tests/test_gpu.py refuses real captures."""
    monkeypatch.setattr(torch.cuda, 'CUDAGraph', lambda: None)
    monkeypatch.setattr(torch.cuda, 'current_stream', lambda: None)
    monkeypatch.setattr(torch.cuda, 'stream', lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, 'graph', lambda *_, **__: contextlib.nullcontext())
    inputs, graphs = [], {}

    def double(x):
        inputs.append(x)
        if len(inputs) == 4:  # the captured call
            raise torch.OutOfMemoryError('CUDA out of memory')
        return 2 * x

    outputs = [kernels.graphed(graphs, 'chunk', double, x) for x in range(7)]
    assert outputs == [0, 2, 4, 6, 8, 10, 12]
    assert inputs == [0, 1, 2, 3, 3, 4, 5, 6]
    line = (
        "no CUDA graph of 'chunk': it runs eagerly, slower (OutOfMemoryError: CUDA out of memory)"
    )
    assert capsys.readouterr().out.count(line) == 1


@pytest.mark.long
def test_training_continues_uncompiled_without_a_compiler(data, tmp_path):
    argv = lm_arguments(data, tmp_path / 'out', compile=True, max_iters=1)
    env = {**os.environ, 'CXX': '/nonexistent', 'TORCHINDUCTOR_CACHE_DIR': str(tmp_path)}
    done = processes.run(['train_lm.py', *argv], env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count('compile = True does not work here; training uncompiled') == 1


# ---- mistakes ----


MISTAKES = [  # arguments, message
    ('--tokens_per_step=100', 'tokens_per_step = 100: must be a multiple'),
    ('--batch_size=3', 'batch_size = 3: must divide the 8 rows'),
    ('--device=cuda:99', 'device ='),
    ('--resume=True', 'out: holds no trained run'),
    ('--val_tokens=1000000', 'lower val_tokens'),
    ('--tokens_per_step=512', 'too few'),
    ('--betas=(0.9,)', 'betas = (0.9,)'),
    ('--arch=transformer --recurrent=False', "n_expert = 2: must be 1 with arch = 'transformer'"),
    ('--arch=lstm --recurrent=False', 'needs --recurrent=True'),
    ('--arch=lstm --learning_rate=0.1', '--baseline_lr'),
    ('--n_head=3', 'n_head = 3: n_embd = 32 must split'),
    ('--aggregation=sum', "aggregation = 'sum': expected one of"),
    ('--recurrent=False --share_kv=False', 'share_kv = False is for recurrent = True'),
    ('--path=slow', "mode = 'slow': expected one of fast, plain"),
]


@pytest.mark.parametrize('arguments, message', MISTAKES)
def test_mistakes_are_refused_in_one_line(data, tmp_path, arguments, message, capfd):
    argv = [*lm_arguments(data, tmp_path / 'out'), *arguments.split()]
    assert message in error_of(capfd, train_lm, argv)


def test_an_error_of_an_edited_model_is_no_mistake_of_the_user(data, tmp_path, monkeypatch):
    """It keeps its traceback."""

    def edited(*args):
        raise ValueError('not enough values to unpack')

    monkeypatch.setattr(train_lm, 'forward_backward', edited)
    with pytest.raises(ValueError, match='not enough values'):
        run_lm(data, tmp_path)


def test_the_optimizer_settings_of_a_resumed_baseline_are_checked(
    data, trained, tmp_path, monkeypatch, capfd
):
    """Its arch comes from the run."""
    shutil.copytree(trained / 'lstm', tmp_path / 'run')
    argv = lm_arguments(data, tmp_path / 'run', resume=True, max_iters=5)
    assert '--learning_rate does nothing' in error_of(capfd, train_lm, [*argv, '--learning_rate=1'])
    argv.append('--baseline_lr=0.01')
    monkeypatch.setattr(sys, 'argv', ['train_lm.py', *argv])
    assert train_lm.main(configure(vars(train_lm), quiet=True)) == 0


REFUSED = [  # arguments on a folder that holds a run, message; {0}: trained, {1}: tmp_path
    ('', 'holds a run already'),
    ('--resume=True --n_embd=64', 'was trained with n_embd = 32, not 64'),
    ('--overwrite=True --data_dir=/nowhere', 'no train shards'),
    ('--overwrite --init_from=none', 'none: holds no trained run'),
    ('--overwrite --init_from={1}/bad', 'bad/model.safetensors: cannot be read'),
    ('--overwrite --init_from={0}/lstm --arch=experts --n_embd=64', 'no weight has'),
    ('--overwrite --init_from={1}/agent', 'agent: holds a run of train_sokoban.py'),
    ('--overwrite --batch_size=3', 'must divide the 8 rows'),
]


def test_an_occupied_folder_is_refused_before_the_run_is_built(data, trained, monkeypatch, capfd):
    monkeypatch.setattr(train_lm, 'make_run', None)
    argv = lm_arguments(data, trained / 'recurrent')
    assert 'holds a run already' in error_of(capfd, train_lm, argv)


def test_a_refused_command_leaves_the_run_in_the_folder_unchanged(data, trained, tmp_path, capfd):
    (tmp_path / 'bad').mkdir()
    (tmp_path / 'bad' / 'model.safetensors').write_text('x')
    agent = {'script': 'train_sokoban.py', 'config': {'arch': 'convlstm'}}
    (tmp_path / 'agent').mkdir()
    saved = {**agent, 'model': {}, 'model_config': {}}
    common.save_checkpoint(saved, tmp_path / 'agent' / 'ckpt_last.pt')
    run_lm(data, tmp_path / 'run', max_iters=2)
    before = (tmp_path / 'run' / 'ckpt_last.pt').read_bytes()
    for arguments, message in REFUSED:
        argv = [*lm_arguments(data, tmp_path / 'run'), *arguments.format(trained, tmp_path).split()]
        assert message in error_of(capfd, train_lm, argv)
    assert (tmp_path / 'run' / 'ckpt_last.pt').read_bytes() == before


def test_a_run_resumes_on_a_copy_of_its_data_and_not_on_other_data(data, tmp_path, capfd):
    """Shards of other content are other data, even with the same names and sizes. They may be
    evaluated on."""
    out, others = tmp_path / 'out', tmp_path / 'others'
    run_lm(data, out, max_iters=2)
    shutil.copytree(data, others)
    assert run_lm(others, out, max_iters=3, resume=True) == 0
    shard = str(others / 'fineweb_train_000002.bin')
    data_fineweb.write_shard(shard, np.roll(data_fineweb.read_shard(shard, 256), 1))
    error = error_of(capfd, train_lm, lm_arguments(others, out, max_iters=4, resume=True))
    assert f'other shards than those in {others}' in error
    assert run_lm(others, out, eval_only=True) == 0


def test_a_checkpoint_whose_parts_do_not_fit_is_refused(data, tmp_path, capfd):
    """The message names the file and the part."""
    run_lm(data, tmp_path, max_iters=2)
    path, argv = tmp_path / 'ckpt_last.pt', lm_arguments(data, tmp_path, resume=True)
    saved = load_checkpoint(path)
    head = saved['model']['head']
    for changes, message in (
        ({'model': saved['model'] | {'head': head[:5]}}, 'size mismatch for head'),
        ({'step': None}, 'step = '),
        ({'optimizers': saved['optimizers'][:1]}, 'optimizers or rng does not fit'),
        ({'state': [x[:1] for x in saved['state']]}, 'loader or state does not fit'),
        ({'config': None}, 'not a checkpoint of this train_lm.py'),
    ):
        common.save_checkpoint(saved | changes, path)
        error = error_of(capfd, train_lm, argv)
        assert f'{path}: ' in error and message in error, error


@pytest.mark.parametrize(
    'setting, package',
    [('wandb', 'wandb'), ('tensorboard', 'tensorboard'), ('plot', 'matplotlib')],
)
def test_a_missing_package_matters_only_if_a_setting_needs_it(
    data, tmp_path, monkeypatch, capfd, setting, package
):
    monkeypatch.setitem(sys.modules, package, None)  # as if not installed
    error = error_of(capfd, train_lm, lm_arguments(data, tmp_path / 'out', **{setting: True}))
    assert f'{package} is asked for but not installed' in error
    assert run_lm(data, tmp_path / 'out', max_iters=1) == 0


# ---- a copied trainer, and starting from other weights ----


MAKE_RUN = """
import my_train
from configurator import configure
run = my_train.make_run(configure(vars(my_train), quiet=True))
print(my_train.SCRIPT, run.model.config.z_loss)
"""


def test_a_setting_added_to_a_copied_trainer_reaches_the_model(data, tmp_path):
    """A new field of ModelConfig takes the value of the setting of the same name; messages of the
    copy use its file name."""
    for source, copy, line, added in (
        ('train_lm.py', 'my_train.py', "init_b = 'one' ", 'z_loss = 1e-4  # of squared log Z\n'),
        ('model.py', 'model.py', '    init_b: str', '    z_loss: float = 0.0\n'),
    ):
        text = (ROOT / source).read_text()
        assert line in text
        (tmp_path / copy).write_text(text.replace(line, added + line))
    env = os.environ | {'PYTHONPATH': os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = ['-c', MAKE_RUN, *lm_arguments(data, tmp_path / 'out')]
    done = processes.run(command, env=env, cwd=tmp_path)
    assert done.stdout.splitlines()[-1:] == ['my_train.py 0.0001'], done.stderr


def export(folder, to):
    """Export the model of a run."""
    configure(vars(sample), [f'--out_dir={folder}', f'--export={to}'], quiet=True)
    sample.export_model()
    return to


def test_init_from_starts_with_the_weights_of_a_run_or_an_export(trained, data, tmp_path):
    source = trained / 'recurrent'
    weights = load_checkpoint(source / 'ckpt_best.pt')['model']
    for folder in (source, export(source, tmp_path / 'export')):
        run = prepare_run(data, tmp_path / 'out', init_from=folder)
        assert_equal(run.model.state_dict(), weights)
        assert run.step == 0 and not any(optimizer.state for optimizer in run.optimizers)


def test_init_from_takes_the_layers_that_both_models_have(trained, data, tmp_path, capfd):
    source, out = trained / 'recurrent', tmp_path / 'out'
    weights = load_checkpoint(source / 'ckpt_best.pt')['model']
    deeper = prepare_run(data, out, init_from=source, n_layer=3).model.state_dict()
    assert all(torch.equal(deeper[name], x) for name, x in weights.items())
    printed = capfd.readouterr().out
    assert 'initialized from scratch: layers.2.' in printed and 'not taken' not in printed
    prepare_run(data, out, init_from=source, n_layer=1)
    assert 'not taken: layers.1.' in capfd.readouterr().out


@pytest.mark.parametrize('source', ['run', 'export'])
def test_init_from_adopts_the_sizes_that_are_not_on_the_command_line(
    trained, data, tmp_path, source
):
    folder = trained / 'nonrecurrent'
    if source == 'export':
        folder = export(folder, tmp_path / 'export')
    argv = [f'--data_dir={data}', f'--out_dir={tmp_path}/out', f'--init_from={folder}']
    argv += '--tokens_per_step=64 --val_tokens=96 --val_streams=3 --device=cpu --window=7'.split()
    run = train_lm.make_run(configure(vars(train_lm), argv, quiet=True))
    c = run.model.config
    assert (run.model.recurrent, c.vocab_size, c.n_embd, c.n_head) == (False, 256, 32, 2)
    assert (c.aggregation, c.block_size, c.window) == ('softmax_l2', 8, 7)
    assert run.config['recurrent'] is False and run.config['tokenizer'] == 'bytes'


def test_the_printed_command_fine_tunes_the_shipped_model(tmp_path, monkeypatch, capsys):
    """data_fineweb.py prints it for a text of the user, as README.md says. The shipped model starts
    far below the ln 256 = 5.5 nats per byte of a new model."""
    monkeypatch.chdir(tmp_path)
    speech = 'Fellow-citizens of the Senate and of the House of Representatives: the Congress has '
    speech += 'passed the law for the relief of our troops.\n'
    (tmp_path / 'my.txt').write_text(80 * speech)
    argv = ['--text=my.txt', '--tokenizer=bytes']
    data_fineweb.make_shards(configure(vars(data_fineweb), argv, quiet=True))
    lines = capsys.readouterr().out.splitlines()
    (line,) = (line for line in lines if '--init_from=' in line)
    python, script, *argv = shlex.split(line)
    assert python == 'python' and os.path.samefile(script, ROOT / 'train_lm.py')
    config = configure(vars(train_lm), [*argv, '--max_iters=2', '--device=cpu', '--compile=False'])
    assert train_lm.main(config) == 0
    printed = capsys.readouterr().out
    assert 'initialized from scratch' not in printed and 'not taken' not in printed
    log = read_log(config['out_dir'])
    assert log[0]['val_loss'] < 2.5 and log[-1]['step'] == 2
    # the same command resumes it, with its own weights and the sizes that it adopted
    argv += ['--max_iters=3', '--device=cpu', '--compile=False', '--resume=True']
    assert train_lm.main(configure(vars(train_lm), argv)) == 0
    assert read_log(config['out_dir'])[-1]['step'] == 3

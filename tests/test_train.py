"""Test train_lm.py: losses, resume, micro-batches, ranks, evaluation, stops, mistakes."""

import contextlib
import json
import math
import os
import shutil
import signal
import sys
import time

import numpy as np
import processes
import pytest
import torch
from processes import ROOT, run_ranks
from small_runs import StopAt, assert_equal, error_of, lm_arguments, read_log, run_lm, start_lm
from small_runs import train_lm_as_rank

import baselines
import common
import configurator
import data_fineweb
import graphs
import model
import run
import sample
import stream
import train_lm
from configurator import configure
from loader import Loader, find_shards, read_shard, write_shard
from run import LAST, PREV, load_checkpoint, settings_of

LSTM = {'arch': 'lstm'}
ROUTED = {'aggregation': 'softmax_l2', 'share_kv': False}


def last_of(folder):
    return load_checkpoint(folder / LAST)


def resume(folder, *argv):
    """Resume a run with nothing but its folder; return the exit status."""
    arguments = [f'--out_dir={folder}', '--resume=True', *argv]
    return train_lm.main(configure(vars(train_lm), arguments, quiet=True))


# ---- losses and the log


def test_a_run_logs_every_update(data, tmp_path):
    assert run_lm(data, tmp_path) == 0
    log = read_log(tmp_path)
    assert [r['step'] for r in log] == list(range(9)) and log[8]['tokens'] == 512
    assert [r['step'] for r in log if 'val_loss' in r] == [0, 4, 8]
    assert log[0]['val_loss'] == pytest.approx(math.log(256), abs=1e-4)
    assert log[0]['val_bits_per_byte'] == pytest.approx(8, abs=1e-3)
    assert [r.get('epoch') for r in log[1:]] == [0, 0, 0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize('settings', [{}, {'recurrent': False}, LSTM], ids=str)
def test_the_loss_falls_below_the_unigram_entropy(data, tmp_path, settings):
    """Squares modulo 11 have a unigram entropy of 1.77 nats, and each is determined by the ones
    before it."""
    length = {'max_iters': 60, 'eval_interval': 60, 'baseline_lr': 0.01}
    assert run_lm(data, tmp_path, **length, **settings) == 0
    last = read_log(tmp_path)[-1]
    assert max(last['val_loss'], last['train_loss']) < 1.2


@pytest.fixture(scope='module')
def random_head(data, tmp_path_factory):
    """Return the folder of a model whose head is not zero."""
    folder = tmp_path_factory.mktemp('random')
    assert run_lm(data, folder, max_iters=8) == 0
    return folder


@pytest.mark.parametrize('rows, reset_every', [(0, 0), (4, 3), (2, 4), (0, 20)], ids=str)
def test_states_are_carried_and_reset(data, random_head, tmp_path, rows, reset_every):
    """With learning rates of 0, the loss of an update is the mean over its streams, each read alone
    from its carried state. That is reset at a shard's start and when reset_every says so."""
    rates = dict.fromkeys(['learning_rate', 'embedding_lr', 'head_lr', 'scalar_lr'], 0)
    settings = {'batch_size': rows, 'reset_every': reset_every, 'max_iters': 10}
    run_lm(data, tmp_path / 'run', init_from=random_head, **rates, **settings)
    trained = model.LanguageModel.load_trained(tmp_path / 'run', 'last')
    files = find_shards(str(data), 'train')
    loader = Loader(files, 8, 8, 256, True, seed=1337)
    states, shard_starts = [None] * 8, []
    for step, record in enumerate(read_log(tmp_path / 'run')[1:]):
        x, y, starts = loader.next()
        losses = []
        for b in range(8):
            if starts or (reset_every and b % reset_every == step % reset_every):
                states[b] = None
            with torch.no_grad():
                found, states[b] = trained(x[[b]], y[[b]], states[b])
            losses.append(found.cross_entropy.item())
        assert record['train_loss'] == pytest.approx(sum(losses) / 8, rel=1e-5)
        if starts:
            shard_starts.append(step)
    assert shard_starts == [0, 3, 5, 8]


# ---- resume


@pytest.mark.parametrize(
    'settings',
    [{}, {'recurrent': False}, {'batch_size': 4, 'reset_every': 3, **ROUTED}, LSTM],
    ids=str,
)
def test_resume_is_bit_equal(data, tmp_path, monkeypatch, settings):
    """An uninterrupted run equals one that stops after update 3, dies in the validation after
    update 4 and is resumed each time, by its folder alone. Update 4 reads a shard's second window,
    update 5 starts an epoch. The interrupted validation is made and logged again."""
    a, b = tmp_path / 'a', tmp_path / 'b'
    run_lm(data, a, **settings)

    def die(*args):
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(train_lm, 'Stopper', lambda: StopAt(3))
        assert run_lm(data, b, **settings) == 143
    assert last_of(b)['step'] == 3
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(stream.Stream, 'score', die)
        resume(b)
    assert last_of(b)['step'] == 4
    torch.manual_seed(999)  # a new process has other random states
    assert resume(b) == 0
    assert_equal(last_of(a), last_of(b))
    assert_equal(read_log(a), read_log(b))


def test_a_longer_run_keeps_the_last_validation_of_the_shorter(data, tmp_path, monkeypatch):
    """The shorter run ended at update 6, with its lowest loss."""
    losses = {0: 5.0, 4: 4.0, 6: 2.0, 8: 3.0}
    values = iter(losses.values())
    monkeypatch.setattr(stream.Stream, 'score', lambda *_: torch.tensor([next(values), 1.0]))
    run_lm(data, tmp_path, max_iters=6)
    assert resume(tmp_path, '--max_iters=8') == 0
    log = read_log(tmp_path)
    assert {r['step']: r['val_loss'] for r in log if 'val_loss' in r} == losses
    assert settings_of(tmp_path / 'best')['step'] == 6


@pytest.mark.parametrize('change, step', [('', 4), ('--val_tokens=48', 12)])
def test_the_lowest_loss_on_other_validation_tokens_does_not_count(
    data, tmp_path, monkeypatch, change, step
):
    """Nor does it in a run that is resumed once more."""
    values = iter([5.0, 1.0, 2.0, 1.5])
    monkeypatch.setattr(stream.Stream, 'score', lambda *_: torch.tensor([next(values), 1.0]))
    run_lm(data, tmp_path, max_iters=4)
    assert resume(tmp_path, '--max_iters=8', *change.split()) == 0
    assert resume(tmp_path, '--max_iters=12') == 0
    assert settings_of(tmp_path / 'best')['step'] == step


def test_a_run_whose_validation_was_not_finite_can_be_resumed(data, tmp_path, monkeypatch):
    values = iter([5.0, math.nan, 2.0])
    monkeypatch.setattr(stream.Stream, 'score', lambda *_: torch.tensor([next(values), 1.0]))
    run_lm(data, tmp_path, max_iters=4)
    assert resume(tmp_path, '--max_iters=8') == 0
    assert settings_of(tmp_path / 'best')['step'] == 8


def test_the_end_is_validated_also_where_the_run_had_been_stopped(data, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(train_lm, 'Stopper', lambda: StopAt(3))
        run_lm(data, tmp_path)
    assert resume(tmp_path, '--max_iters=3') == 0
    last = read_log(tmp_path)[-1]
    assert last['step'] == 3 and 'val_loss' in last and 'train_loss' in last


def test_a_run_cannot_end_before_its_last_update(data, tmp_path, capfd):
    run_lm(data, tmp_path, max_iters=4)
    error = error_of(capfd, train_lm, [f'--out_dir={tmp_path}', '--resume=True', '--max_iters=3'])
    assert f'max_iters = 3: the run in {tmp_path} has 4 updates' in error


def test_a_finished_run_can_be_evaluated_whatever_resume_is(trained, capfd):
    assert evaluate_only(trained / 'recurrent', '--resume=auto') == 0
    assert 'validation loss' in capfd.readouterr().out


def test_a_resumed_run_takes_new_optimizer_settings_and_keeps_its_moments(data, tmp_path):
    """With learning rates of 0 the weights stay, and only the moments change."""
    run_lm(data, tmp_path, max_iters=4)
    before = last_of(tmp_path)
    rates = [f'--{name}=0' for name in ('learning_rate', 'embedding_lr', 'head_lr', 'scalar_lr')]
    assert resume(tmp_path, '--max_iters=5', '--betas=(0.5, 0.5)', *rates) == 0
    after = last_of(tmp_path)
    assert_equal(before['model'], after['model'])
    muon, adamw = after['optimizers']
    assert adamw['param_groups'][0]['betas'] == (0.5, 0.5) and adamw['state'][0]['step'] == 5
    old, new = (saved['optimizers'][0]['state'][0]['momentum_buffer'] for saved in (before, after))
    assert 0.9 < torch.cosine_similarity(old.flatten(), new.flatten(), 0) < 1


def test_a_finished_run_is_left_alone_by_auto_and_extended_by_the_command_line(
    data, tmp_path, capfd
):
    """A finished run needs neither its data nor its device."""
    settings = {'resume': 'auto', 'max_iters': 3}
    assert run_lm(data, tmp_path, **settings) == 0
    files = {path: path.read_bytes() for path in tmp_path.rglob('*') if path.is_file()}
    capfd.readouterr()
    assert run_lm(tmp_path / 'nowhere', tmp_path, **settings) == 0
    assert f'{tmp_path}: done, 3 updates' in capfd.readouterr().out
    assert files == {path: path.read_bytes() for path in files}
    assert run_lm(data, tmp_path, resume='auto', max_iters=4) == 0
    assert last_of(tmp_path)['step'] == 4


def test_a_run_resumes_on_a_copy_of_its_data_and_not_on_other_data(data, tmp_path, capfd):
    """Shards of other content are other data, even with the same names and sizes. They may be
    evaluated on."""
    out, others = tmp_path / 'out', tmp_path / 'others'
    run_lm(data, out, max_iters=2)
    shutil.copytree(data, others)
    assert resume(out, '--max_iters=3', f'--data_dir={others}') == 0
    shard = str(others / 'fineweb_train_000002.bin')
    write_shard(shard, np.roll(read_shard(shard, 256), 1))
    error = error_of(capfd, train_lm, [f'--out_dir={out}', '--resume=True', '--max_iters=4'])
    assert f'other shards than those in {others}' in error
    assert run_lm(others, out, eval_only=True) == 0


def test_a_checkpoint_whose_parts_do_not_fit_is_refused(data, tmp_path, capfd):
    """The message names the file."""
    run_lm(data, tmp_path, max_iters=2)
    path, argv = tmp_path / LAST, [f'--out_dir={tmp_path}', '--resume=True']
    saved = load_checkpoint(path)
    head = saved['model']['head']
    for changes, message in (
        ({'model': saved['model'] | {'head': head[:5]}}, 'size mismatch for head'),
        ({'model': saved['model'] | {'head': head * math.nan}}, 'head holds NaN'),
        ({'step': None}, 'no settings, or no step'),
        ({'optimizers': saved['optimizers'][:1]}, 'damaged, or from another model'),
        ({'state': [x[:1] for x in saved['state']]}, 'damaged, or from another model'),
        ({'config': None}, 'no settings, or no step'),
    ):
        torch.save(saved | changes, path)
        error = error_of(capfd, train_lm, argv)
        assert f'{path}: ' in error and message in error, error


# ---- micro-batches, ranks, graphs


def replay(graphs, name, function, *args):
    """Do what kernels.graphed does, as far as a CPU can: from the fourth call on, call the function
    of the fourth call on its arguments, which must not have moved, and write its results to the
    memory of that call's results."""
    calls = replay.calls.setdefault(name, [])
    if len(calls) < 4:
        calls.append((function, args, function(*args)))
        return calls[-1][2]
    captured, inputs, results = calls[3]
    for old, new in zip(addresses(inputs), addresses(args), strict=True):
        assert old == new, name
    for old, new in zip(results or [], captured(*inputs) or [], strict=True):
        old.matrices.copy_(new.matrices)
        old.share.copy_(new.share)
    return results


def addresses(tree):
    """Return the addresses of the tensors in tuples and lists."""
    if isinstance(tree, torch.Tensor):
        return [tree.data_ptr()]
    parts = tree if isinstance(tree, (tuple, list)) else []
    return [address for part in parts for address in addresses(part)]


@pytest.mark.parametrize(
    'settings',
    [{'reset_every': 3}, {'batch_size': 4, **ROUTED}, {'recurrent': False, 'batch_size': 4}],
    ids=str,
)
def test_captured_updates_use_the_same_memory(data, tmp_path, monkeypatch, settings):
    """Nine updates with replays equal nine without, bit for bit, across a resume after three."""
    settings = {**settings, 'max_iters': 9, 'eval_interval': 2}
    assert run_lm(data, tmp_path / 'eager', **settings) == 0
    monkeypatch.setattr(train_lm, 'graphed', replay)
    monkeypatch.setattr(stream, 'graphed', replay)
    with monkeypatch.context() as patch:
        replay.calls = {}
        patch.setattr(train_lm, 'Stopper', lambda: StopAt(3))
        assert run_lm(data, tmp_path / 'graphs', **settings) == 143
    replay.calls = {}
    assert resume(tmp_path / 'graphs') == 0
    assert set(replay.calls) == {'train', 'score', 'orthogonalize', 'change weights'}
    assert all(len(calls) == 4 for calls in replay.calls.values())
    assert_equal(last_of(tmp_path / 'eager'), last_of(tmp_path / 'graphs'))
    assert_equal(read_log(tmp_path / 'eager'), read_log(tmp_path / 'graphs'))


def test_training_continues_without_graphs(monkeypatch, capsys):
    """If a capture is refused, one line says so, and the function runs eagerly from then on, as
    does every function that is not captured yet. tests/test_gpu.py refuses real captures."""
    monkeypatch.setattr(torch.cuda, 'CUDAGraph', lambda: None)
    monkeypatch.setattr(torch.cuda, 'current_stream', lambda: None)
    monkeypatch.setattr(torch.cuda, 'stream', lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, 'graph', lambda *_, **__: contextlib.nullcontext())
    inputs, later_inputs, graphs = [], [], {}

    def double(x):
        inputs.append(x)
        if len(inputs) == 4:  # the captured call
            raise torch.OutOfMemoryError('CUDA out of memory')
        return 2 * x

    for x in range(7):
        assert stream.graphed(graphs, 'chunk', double, x) == 2 * x
        stream.graphed(graphs, 'later', later_inputs.append, x)
    assert inputs == [0, 1, 2, 3, 3, 4, 5, 6]  # the fourth was to be captured
    assert later_inputs == list(range(7))
    line = (
        "no CUDA graph of 'chunk': it runs eagerly, slower (OutOfMemoryError: CUDA out of memory)"
    )
    assert capsys.readouterr().out.count(line) == 1


@pytest.mark.parametrize('recurrent', [True, False])
def test_micro_batches_and_ranks_change_only_rounding(data, tmp_path, recurrent):
    """A whole batch, four micro-batches, and two ranks with two micro-batches each log the same
    numbers and carry the same state. A run resumes with two ranks instead of one, or with one
    instead of two."""
    settings = {'recurrent': recurrent, 'val_streams': 5, 'reset_every': 3, 'max_iters': 4}
    run_lm(data, tmp_path / 'whole', **settings)
    run_lm(data, tmp_path / 'micro', batch_size=2, **settings)
    argv = lm_arguments(data, tmp_path / 'ranks', batch_size=2, **settings)
    assert run_ranks(2, train_lm_as_rank, argv) == [0, 0]
    expected_log = read_log(tmp_path / 'whole')
    expected_state = last_of(tmp_path / 'whole')['state']
    for name in ('micro', 'ranks'):
        for expected, found in zip(expected_log, read_log(tmp_path / name), strict=True):
            for key in {'train_loss', 'val_loss', 'grad_norm'} & expected.keys():
                # the first updates: before Muon's iteration has amplified any rounding
                rel = 1e-5 if expected['step'] < 2 and key != 'val_loss' else 2e-3
                assert found[key] == pytest.approx(expected[key], rel=rel), (name, expected, key)
        state = last_of(tmp_path / name)['state']
        torch.testing.assert_close(state, expected_state, rtol=2e-2, atol=2e-2)
    assert resume(tmp_path / 'ranks', '--max_iters=5') == 0
    assert run_ranks(2, resume, tmp_path / 'whole', '--max_iters=5') == [0, 0]
    by_one, by_two = (read_log(tmp_path / name)[-1] for name in ('ranks', 'whole'))
    assert by_two['train_loss'] == pytest.approx(by_one['train_loss'], rel=1e-4)


def resume_with_a_damaged_file_on_rank_1(folder):
    """Resume a run of which rank 1 can read the previous checkpoint alone; return the refusal."""
    if os.environ['RANK'] == '1':
        run.load_last = lambda path: (load_checkpoint(path / PREV), path / PREV)
    try:
        resume(folder, '--max_iters=12')
    except configurator.Mistake as refusal:
        return str(refusal)


def test_ranks_that_read_different_checkpoints_stop(data, tmp_path):
    run_lm(data, tmp_path)
    refusals = run_ranks(2, resume_with_a_damaged_file_on_rank_1, tmp_path)
    assert all('the ranks have read different checkpoints' in x for x in refusals)


# ---- the LSTM


@pytest.mark.parametrize('sizes', [{'n_embd': 128}, {'n_embd': 256, 'n_layer': 3}], ids=str)
def test_the_lstm_has_the_size_of_our_model(sizes):
    config = model.ModelConfig(256, window=12, n_expert=2, **sizes)
    lstm, experts = baselines.build_lstm(config, True), model.build_model(config, True)
    assert 0.98 < lstm.num_params()['total'] / experts.num_params()['total'] < 1.02


def test_an_lstm_can_be_scored_and_exported_but_not_sampled(data, trained, tmp_path, capsys):
    text = tmp_path / 'a.txt'
    text.write_text('AAB' * 20)
    printed = []
    for folder in (trained / 'lstm', tmp_path / 'export'):
        arguments = [f'--out_dir={folder}', f'--score={text}', '--device=cpu', '--dtype=float32']
        if folder.name == 'lstm':
            configure(vars(sample), [*arguments, f'--export={tmp_path / "export"}'], quiet=True)
            sample.export_model()
        capsys.readouterr()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, 'argv', ['sample.py', *arguments])
            sample.main()
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] and 'nats per byte' in printed[0]


# ---- evaluation


def evaluate_only(folder, *argv):
    arguments = [f'--out_dir={folder}', '--eval_only=True', '--device=cpu', *argv]
    return train_lm.main(configure(vars(train_lm), arguments, quiet=True))


@pytest.mark.parametrize('name', ['recurrent', 'nonrecurrent', 'lstm', 'recurrent/best'])
def test_eval_only_prints_the_logged_loss_and_writes_nothing(trained, capsys, name):
    """It takes everything from the run, or from the export: data, sizes, dtype, compile."""
    folder = trained / name
    files = {path: path.read_bytes() for path in folder.rglob('*') if path.is_file()}
    assert evaluate_only(folder) == 0
    loss = read_log(trained / name.split('/')[0])[4]['val_loss']
    assert f'step 4: validation loss {loss:.4f} nats per byte (' in capsys.readouterr().out
    assert files == {path: path.read_bytes() for path in files}


def test_eval_only_needs_validation_tokens_alone(data, trained, tmp_path, capsys):
    """It does without training shards and their settings."""
    shutil.copy(data / 'fineweb_val_000000.bin', tmp_path)
    shutil.copy(data / 'meta.json', tmp_path)
    argv = [f'--data_dir={tmp_path}', '--tokens_per_step=100', '--seed=5', '--batch_size=7']
    assert evaluate_only(trained / 'recurrent', *argv) == 0
    assert 'step 4: validation loss' in capsys.readouterr().out


def test_eval_only_reads_as_many_streams_as_fit(trained, monkeypatch, capsys):
    def score_chunk(self, x, y, state, real=stream.Stream.score_chunk):
        if len(x) > 1:
            raise torch.OutOfMemoryError('of 80 GB')
        real(self, x, y, state)

    monkeypatch.setattr(stream.Stream, 'score_chunk', score_chunk)
    assert evaluate_only(trained / 'recurrent') == 0
    loss = read_log(trained / 'recurrent')[4]['val_loss']
    assert f'validation loss {loss:.4f}' in capsys.readouterr().out


# ---- stops


def test_sigterm_saves_and_exits(data, tmp_path):
    """test_run.py tests the other signals."""
    process = start_lm(data, tmp_path, max_iters=100000, eval_interval=100000)
    log = tmp_path / 'log.jsonl'
    while not log.exists() or log.read_text().count('\n') < 3:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    out, error = process.communicate()
    assert process.returncode == 128 + signal.SIGTERM and 'Traceback' not in error, error
    step = last_of(tmp_path)['step']
    assert f'stopped after update {step}, saved' in out
    assert read_log(tmp_path)[-1]['step'] == step > 0


@pytest.mark.parametrize('factor', [math.nan, 1e30])
def test_a_non_finite_gradient_ends_the_run_without_a_save(data, tmp_path, monkeypatch, factor):
    """The loss is finite; the gradients are NaN, or finite with an infinite norm."""
    run_lm(data, tmp_path, max_iters=4)
    saved = (tmp_path / LAST).read_bytes()

    def build_model(config, recurrent, real=model.build_model):
        built = real(config, recurrent)
        built.head.register_hook(lambda grad: grad * factor)
        return built

    monkeypatch.setattr(train_lm, 'build_model', build_model)
    assert resume(tmp_path, '--max_iters=20') == 1
    assert (tmp_path / LAST).read_bytes() == saved


def test_a_non_finite_loss_ends_the_run_and_keeps_the_last_good_checkpoint(data, tmp_path, capsys):
    run_lm(data, tmp_path, max_iters=4)
    saved = (tmp_path / LAST).read_bytes()
    assert resume(tmp_path, '--max_iters=20', '--learning_rate=1e38') == 1
    out = capsys.readouterr().out
    assert 'error: update 6: the loss is ' in out and 'the last checkpoint is of step 4' in out
    assert (tmp_path / LAST).read_bytes() == saved


def test_a_weight_that_is_not_finite_is_not_saved(data, tmp_path, monkeypatch, capsys):
    """It would show only in the loss of the next update."""
    run_lm(data, tmp_path, max_iters=4)
    saved = (tmp_path / LAST).read_bytes()
    monkeypatch.setattr(common, 'all_finite', lambda model: False)
    assert resume(tmp_path, '--max_iters=20') == 1
    assert 'a weight is not finite; the last checkpoint is of step 4' in capsys.readouterr().out
    assert (tmp_path / LAST).read_bytes() == saved


@pytest.mark.long
def test_training_continues_uncompiled_without_a_compiler(data, tmp_path):
    argv = lm_arguments(data, tmp_path / 'out', compile=True, max_iters=1)
    env = {**os.environ, 'CXX': '/nonexistent', 'TORCHINDUCTOR_CACHE_DIR': str(tmp_path)}
    done = processes.run(['train_lm.py', *argv], env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count('compile = True does not work here; running uncompiled') == 1


def test_one_line_under_torchrun(data, tmp_path):
    """All ranks have the same mistake."""
    argv = lm_arguments(data, tmp_path / 'out', n_head=3)
    process = processes.start(['train_lm.py', *argv], ranks=2)
    _, error = process.communicate()
    assert process.returncode != 0 and error.count('error: n_head = 3') == 1, error


# ---- mistakes


MISTAKES = [  # arguments, message
    ('--tokens_per_step=100', 'tokens_per_step = 100: must be a multiple'),
    ('--batch_size=3', 'batch_size = 3: must divide the 8 rows'),
    ('--device=cuda:99', 'device ='),
    ('--resume=True', 'out: holds no trained run'),
    ('--val_tokens=1000000', 'lower val_tokens'),
    ('--tokens_per_step=512', 'too few'),
    ('--betas=(0.9,)', 'betas = (0.9,)'),
    ('--arch=lstm --recurrent=False', 'needs --recurrent=True'),
    ('--n_head=3', 'n_head = 3: n_embd = 32 must split'),
    ('--aggregation=sum', "aggregation = 'sum': expected one of"),
    ('--recurrent=False --share_kv=False', 'share_kv = False is for recurrent = True'),
    ('--mode=slow', "mode = 'slow': expected one of fast, plain"),
    ('--max_iters=0', 'max_iters = 0: must be between 1'),
    ('--block_size=0', 'block_size = 0: must be at least 1'),
    ('--out_dir=', 'out_dir is empty'),
    ('--init_from=none', 'none/best/config.json: cannot be read'),
]


@pytest.mark.parametrize('arguments, message', MISTAKES)
def test_mistakes_are_refused_in_one_line(data, tmp_path, arguments, message, capfd):
    argv = [*lm_arguments(data, tmp_path / 'out'), *arguments.split()]
    assert message in error_of(capfd, train_lm, argv)


REFUSED = [  # arguments on a folder that holds a run, message; {0}: trained, {1}: tmp_path
    ('', 'holds a run already'),
    ('--resume=True --n_embd=64', 'was trained with n_embd = 32'),
    ('--overwrite=True --data_dir=/nowhere', 'no val shards'),
    ('--overwrite --init_from=none', 'none/best/config.json: cannot be read'),
    ('--overwrite --init_from={1}/bad', 'bad/model.safetensors: cannot be read'),
    ('--overwrite --init_from={0}/lstm --arch=experts --n_embd=64', 'no weight has'),
    ('--overwrite --batch_size=3', 'must divide the 8 rows'),
]


def test_a_refused_command_leaves_the_run_in_the_folder_unchanged(data, trained, tmp_path, capfd):
    (tmp_path / 'bad').mkdir()
    (tmp_path / 'bad' / 'model.safetensors').write_text('x')
    (tmp_path / 'bad' / 'config.json').write_text('{"recurrent": true}')
    run_lm(data, tmp_path / 'run', max_iters=2)
    before = (tmp_path / 'run' / LAST).read_bytes()
    for arguments, message in REFUSED:
        argv = [*lm_arguments(data, tmp_path / 'run'), *arguments.format(trained, tmp_path).split()]
        assert message in error_of(capfd, train_lm, argv)
    assert (tmp_path / 'run' / LAST).read_bytes() == before


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


# ---- a copied trainer, and starting from other weights


def test_a_setting_added_to_a_copied_trainer_reaches_the_model(data, tmp_path):
    """A new field of ModelConfig takes the value of the setting of the same name, and a resumed run
    keeps it."""
    for source, copy, line, added in (
        ('train_lm.py', 'my_train.py', "init_b = 'one' ", 'z_loss = 0.0  # of squared log Z\n'),
        ('model.py', 'model.py', '    init_b: str', '    z_loss: float = 0.0\n'),
    ):
        text = (ROOT / source).read_text()
        assert line in text
        (tmp_path / copy).write_text(text.replace(line, added + line))
    env = os.environ | {'PYTHONPATH': os.pathsep.join([str(tmp_path), str(ROOT)])}
    arguments = lm_arguments(data, tmp_path / 'out', max_iters=1, z_loss=1e-4)
    done = processes.run(['my_train.py', *arguments], env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    config = settings_of(tmp_path / 'out' / 'best')
    assert config['model']['z_loss'] == 1e-4 and 'my_train.py' in config['command']
    command = ['my_train.py', f'--out_dir={tmp_path / "out"}', '--resume=True', '--z_loss=0.1']
    done = processes.run(command, env=env, cwd=tmp_path)
    assert done.returncode == 2 and 'was trained with z_loss = 0.0001' in done.stderr


def test_init_from_takes_weights_and_sizes_of_a_run_or_an_export(trained, data, tmp_path):
    """Sizes that the command line sets are its own."""
    source = trained / 'nonrecurrent'
    for i, folder in enumerate((source, source / 'best')):
        argv = [f'--data_dir={data}', f'--out_dir={tmp_path}/{i}', f'--init_from={folder}']
        argv += '--tokens_per_step=64 --val_tokens=96 --val_streams=3 --device=cpu'.split()
        argv += '--window=7 --max_iters=1 --learning_rate=0 --embedding_lr=0'.split()
        argv += '--head_lr=0 --scalar_lr=0 --compile=False --dtype=float32'.split()
        assert train_lm.main(configure(vars(train_lm), argv, quiet=True)) == 0
        assert_equal(last_of(tmp_path / str(i))['model'], last_of(source)['model'])
        config = settings_of(tmp_path / str(i))
        assert (config['recurrent'], config['n_embd'], config['n_head']) == (False, 32, 2)
        assert (config['aggregation'], config['block_size'], config['window']) == (
            'softmax_l2',
            8,
            7,
        )
        assert config['tokenizer'] == 'bytes'


def test_init_from_takes_the_layers_that_both_models_have(trained, data, tmp_path, capfd):
    source = trained / 'recurrent'
    settings = {'init_from': source, 'max_iters': 1, 'warmup_iters': 10**9}
    run_lm(data, tmp_path / 'deeper', n_layer=3, **settings)
    printed = capfd.readouterr().out
    assert 'initialized from scratch: layers.2.' in printed and 'not taken' not in printed
    run_lm(data, tmp_path / 'shallower', n_layer=1, **settings)
    assert 'not taken: layers.1.' in capfd.readouterr().out


def test_the_shipped_model_can_be_fine_tuned_on_a_text(tmp_path, monkeypatch):
    """As README.md says. It starts far below the ln 256 = 5.5 nats per byte of a new model, and a
    resumed run keeps its weights and the sizes that it adopted."""
    monkeypatch.chdir(tmp_path)
    speech = 'Fellow-citizens of the Senate and of the House of Representatives: the Congress has '
    speech += 'passed the law for the relief of our troops.\n'
    (tmp_path / 'my.txt').write_text(80 * speech)
    argv = ['--text=my.txt', '--tokenizer=bytes', '--data_dir=data/my', '--val_tokens=2000']
    data_fineweb.make_shards(configure(vars(data_fineweb), argv, quiet=True))
    argv = [f'--init_from={ROOT}/pretrained/lm', '--data_dir=data/my', '--out_dir=out']
    argv += '--tokens_per_step=512 --val_tokens=512 --val_streams=4 --eval_interval=2'.split()
    argv += '--max_iters=2 --device=cpu --compile=False --learning_rate=0.001'.split()
    assert train_lm.main(configure(vars(train_lm), argv, quiet=True)) == 0
    log = read_log('out')
    assert log[0]['val_loss'] < 2.5 and log[-1]['step'] == 2
    argv += ['--resume=True', '--max_iters=3']
    assert train_lm.main(configure(vars(train_lm), argv, quiet=True)) == 0
    assert read_log('out')[-1]['step'] == 3
    assert json.loads((tmp_path / 'out' / 'config.json').read_text())['n_embd'] == 48


def test_the_compile_switch_is_that_of_the_settings(data, tmp_path):
    run_lm(data, tmp_path, max_iters=1)
    assert (
        not graphs.fused.enabled and (tmp_path / LAST).exists() and not (tmp_path / PREV).exists()
    )

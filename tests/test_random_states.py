"""Test that an edit may draw random numbers in training: recomputed segments, resumed runs."""

import os

import pytest
import torch
import torch.nn.functional as F
from processes import run_ranks
from reference import gradients, make, tokens
from small_runs import (
    StopAt,
    assert_equal,
    lm_arguments,
    read_log,
    run_agent,
    run_lm,
    train_lm_as_rank,
)

import model as model_file
import train_lm
import train_sokoban
import unroll
from model import RecurrentGPT
from support.run_folder import LAST, load_checkpoint


def add_dropout(patch):
    """Let all models drop a part of what their heads read, in training."""
    core = model_file.LanguageModel.core

    def with_dropout(self, *args):
        x, state = core(self, *args)
        return F.dropout(x, 0.3, self.training), state

    patch.setattr(model_file.LanguageModel, 'core', with_dropout)


@pytest.mark.parametrize('mode', ['plain', 'fast'])
def test_a_recomputed_segment_draws_the_same_numbers_again(monkeypatch, mode):
    """Loss, gradients and what is drawn afterwards are those of a chunk that is not recomputed, of
    three segments and two layers with dropout."""
    monkeypatch.setattr(unroll, 'TILE', 3)
    monkeypatch.setattr(unroll, 'MAX_KEPT_BYTES', unroll.MAX_KEPT_BYTES)
    experts = model_file.experts
    monkeypatch.setattr(model_file, 'experts', lambda *args: F.dropout(experts(*args), 0.3))
    model, x, y = make(RecurrentGPT, mode=mode), tokens(2, 8), tokens(2, 8, seed=1)
    found = []
    for unroll.MAX_KEPT_BYTES in (2**30, 0):
        torch.manual_seed(0)
        loss = model(x, y)[0].objective
        found.append([loss, torch.rand(3), gradients(model, loss), torch.rand(3)])
    assert found[0][0] != model(x, y)[0].objective
    torch.testing.assert_close(found[1], found[0], rtol=1e-10, atol=1e-12)


def test_a_trial_of_overrides_draws_the_same_numbers_in_every_call(monkeypatch):
    experts = model_file.experts
    monkeypatch.setattr(model_file, 'experts', lambda *args: F.dropout(experts(*args), 0.3))
    kernels = pytest.importorskip('kernels', exc_type=ImportError)
    trial = kernels.make_trial(make(RecurrentGPT, dtype=torch.float32), 2, torch.float32)
    assert_equal(trial(False), trial(False))


@pytest.mark.parametrize('recurrent', [True, False])
def test_dropout_is_off_in_validation_and_a_resumed_run_is_bit_equal(
    data, tmp_path, monkeypatch, recurrent, capsys
):
    settings = {'recurrent': recurrent, 'batch_size': 4}
    a, b = tmp_path / 'a', tmp_path / 'b'
    add_dropout(monkeypatch)
    run_lm(data, a, **settings)
    with monkeypatch.context() as patch:
        patch.setattr(train_lm, 'Stopper', lambda: StopAt(3))
        assert run_lm(data, b, **settings) == 143
    torch.manual_seed(999)  # a new process has other random states
    train_lm_as_rank([f'--out_dir={b}', '--resume=True'])
    assert_equal(*(load_checkpoint(x / LAST) for x in (a, b)))
    assert_equal(read_log(a), read_log(b))
    monkeypatch.undo()
    capsys.readouterr()
    train_lm_as_rank([f'--out_dir={a}', '--eval_only=True'])
    assert f'validation loss {read_log(a)[-1]["val_loss"]:.4f} nats' in capsys.readouterr().out


def train_with_dropout(arguments, stop_at):
    """Train as a rank with dropout. Rank 1 alone is told to stop, in the update `stop_at`."""
    with pytest.MonkeyPatch.context() as patch:
        add_dropout(patch)
        if stop_at and os.environ['RANK'] == '1':
            patch.setattr(train_lm, 'Stopper', lambda: StopAt(stop_at))
        return train_lm_as_rank(arguments)


def test_every_rank_has_random_states_of_its_own_and_resumes_them(data, tmp_path, capfd):
    """With other ranks a line says that numbers differ."""
    a, b = tmp_path / 'a', tmp_path / 'b'
    of_a, of_b = (lm_arguments(data, folder, max_iters=4) for folder in (a, b))
    assert run_ranks(2, train_with_dropout, of_a, 0) == [0, 0]
    assert run_ranks(2, train_with_dropout, of_b, 2) == [143, 143]
    first, second = load_checkpoint(b / LAST)['rng']['cpu']
    assert not torch.equal(first, second)
    again = [f'--out_dir={b}', '--resume=True']
    assert run_ranks(2, train_with_dropout, again, 0) == [0, 0]
    assert_equal(*(load_checkpoint(x / LAST) for x in (a, b)))
    assert 'random numbers' not in capfd.readouterr().out
    assert train_with_dropout([*again, '--max_iters=5'], 0) == 0
    assert '1 x cpu instead of 2 x cpu: random numbers' in capfd.readouterr().out


def test_an_agent_is_in_training_mode_in_rollouts_and_in_no_evaluation(tmp_path, monkeypatch):
    modes = {}

    def watch(function):
        def call(policy, *args, **options):
            modes.setdefault(function, []).append(getattr(policy, 'training', None))
            return function(policy, *args, **options)

        monkeypatch.setattr(train_sokoban, function.__name__, call)

    evaluate, rollout = train_sokoban.evaluate, train_sokoban.rollout
    watch(evaluate)
    watch(rollout)
    assert run_agent(tmp_path) == 0
    assert modes == {evaluate: [False, None, False, False], rollout: 8 * [True]}

"""Numerics: endless streams stay exact, bfloat16 follows float32, a seed determines the log."""

import pytest
import test_train as lm
import test_train_sokoban as agents
import torch
from reference import assert_close, make, tokens
from test_train import data  # noqa: F401  a fixture

from model import GPT, RecurrentGPT
from decode import Decoder


@pytest.mark.parametrize('model_type', [RecurrentGPT, GPT])
def test_an_endless_stream_has_no_position(model_type, request):
    """After 100,000 steps (300 in the short form) the next logits equal those of a new decoder that
    has loaded the state, and those of a chunk from that state: float64, 1e-9."""
    model = make(model_type, window=7, block_size=4)
    decoder, fresh = Decoder(model, 2), Decoder(model, 2)
    for token in tokens(100_000 if request.config.getoption('--long') else 300, 2):
        decoder.step(token)
    fresh.load(decoder.state())
    more = tokens(2, 12, seed=1)
    whole, _ = model(more, state=decoder.state())
    for token, logits in zip(more.T, whole.unbind(1), strict=True):
        for d in (decoder, fresh):
            d.step(token)
            assert_close(d.logits, logits)


def test_bfloat16_follows_float32(data, tmp_path):  # noqa: F811
    """Training losses of the same run, never 0.02 nats apart."""
    losses = []
    for dtype in ('float32', 'bfloat16'):
        assert lm.run(data, tmp_path / dtype, max_iters=40, n_embd=64, dtype=dtype) == 0
        losses.append(torch.tensor([r['train_loss'] for r in lm.read_log(tmp_path / dtype)[1:]]))
    assert 0 < (losses[0] - losses[1]).abs().max() < 0.02


def test_one_seed_one_log(data, tmp_path):  # noqa: F811
    logs = []
    for k, seed in enumerate((1, 1, 2)):
        torch.manual_seed(k)  # the seed of the process must not matter
        text, agent = tmp_path / f'lm {k}', tmp_path / f'agent {k}'
        assert lm.run(data, text, seed=seed) == agents.run(agent, seed=seed) == 0
        logs.append((lm.read_log(text), lm.read_log(agent)))
    assert logs[0] == logs[1] and all(a != b for a, b in zip(logs[0], logs[2], strict=True))

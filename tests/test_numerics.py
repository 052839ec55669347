"""What numbers may and may not do: an endless stream stays exact, a spike passes, bfloat16 follows
float32, one seed gives one log. With --long 100,000 steps, and the README's demo whole."""

import math
import subprocess
import sys

import pytest
import test_train as lm
import test_train_sokoban as agents
import torch
from test_train import data  # noqa: F401  a fixture

import train_lm
from configurator import configure
from model import ModelConfig, build_model
from sample import Decoder


@pytest.fixture
def long(request):
    return request.config.getoption('--long')


@pytest.mark.parametrize('recurrent', [True, False])
def test_an_endless_stream_has_no_position(recurrent, long):
    """After 100,000 steps (300 in short) the next logits are those of the same s, K, V and counts
    in a state that has just begun, and of the chunked forward from there: float64, 1e-9."""
    torch.manual_seed(0)
    sizes = {'n_layer': 2, 'n_expert': 2, 'n_embd': 16, 'n_head': 2, 'window': 7, 'block_size': 4}
    model = build_model(ModelConfig(32, **sizes), recurrent).double()
    with torch.no_grad():
        for p in model.parameters():  # away from the zeros that some begin as
            p.add_(0.05 * torch.randn_like(p))
    decoder, fresh = Decoder(model, 2), Decoder(model, 2)
    for token in torch.randint(32, (100_000 if long else 300, 2)):
        decoder.step(token)
    fresh.load(decoder.state())
    more = torch.randint(32, (2, 12))
    whole = model(more, state=decoder.state())[0]
    for t in range(12):
        a, b = (d.step(more[:, t]) is None or d.logits.clone() for d in (decoder, fresh))
        assert (a - b).abs().max() < 1e-9 and (a - whole[:, t]).abs().max() < 1e-9


@pytest.mark.parametrize('recurrent', [True, False])
def test_a_loss_spike_passes(data, tmp_path, recurrent):  # noqa: F811
    """An update with gradients 10^4 times too large is clipped: it moves no weight further than its
    rates allow, and is made up for."""
    last, moved = {}, {}
    for factor in (1.0, -1e4):
        r = lm.begin(data, tmp_path, max_iters=50, recurrent=recurrent)
        lm.updates(r, 10)
        before = [p.detach().clone() for p in r.model.parameters()]
        hook = r.model.head.register_hook(lambda g, factor=factor: g * factor)
        [(_, norm, _)] = lm.updates(r, 1)
        hook.remove()
        assert math.isfinite(norm) and (factor == 1 or norm > 100)
        ways = [(p - b).abs().max() for p, b in zip(r.model.parameters(), before, strict=True)]
        moved[factor], last[factor] = max(ways), lm.updates(r, 39)[-1][0]
    assert last[-1e4] < last[1] + 0.1 and moved[-1e4] < 4 * moved[1], (last, moved)


def test_bfloat16_follows_float32(data, tmp_path, long):  # noqa: F811
    """Training losses of the same run: never 0.02 nats apart in a tiny run, 0.05 in the demo."""
    losses, demo = [], f'--data_dir={tmp_path}/speeches'
    if long:
        command = ['data_fineweb.py', '--demo=True', '--tokenizer=bytes', demo]
        subprocess.run([sys.executable, *command], cwd=lm.ROOT, check=True)
    for dtype in ('float32', 'bfloat16'):
        out = tmp_path / dtype
        argv = lm.arguments(data, out, max_iters=40, n_embd=64, **{'dtype': dtype})
        if long:
            config = str(lm.ROOT / 'config' / 'demo.py')
            argv = [config, demo, '--plot=False', f'--dtype={dtype}', f'--out_dir={out}']
        assert train_lm.train(configure(vars(train_lm), argv, quiet=True)) == 0
        losses.append(torch.tensor([r['train_loss'] for r in lm.read_log(out)[1:]]))
    assert 0 < (losses[0] - losses[1]).abs().max() < (0.05 if long else 0.02)


def test_one_seed_one_log(data, tmp_path):  # noqa: F811
    logs = {}
    for name, seed in (('a', 1), ('b', 1), ('c', 2)):
        torch.manual_seed(ord(name))  # whatever a process begins with
        assert lm.run(data, tmp_path / f'lm {name}', seed=seed) == 0
        assert agents.run(tmp_path / f'agent {name}', seed=seed) == 0
        logs[name] = (
            lm.read_log(tmp_path / f'lm {name}'),
            agents.read_log(tmp_path / f'agent {name}'),
        )
    assert logs['a'] == logs['b']
    assert all(a != c for a, c in zip(logs['a'], logs['c'], strict=True))

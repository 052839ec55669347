"""What numbers may and may not do: an endless stream stays exact, a spike passes, bfloat16 follows float32, one seed gives one log.
`pytest --long tests/test_numerics.py`: 100,000 steps, and the README's demo whole."""

import math
import subprocess
import sys

import pytest
import test_train as lm
import test_train_sokoban as agents
import torch
from test_train import data, same  # noqa: F401  a fixture

import train_lm
from configurator import configure
from decode import Decoder
from model import ModelConfig, build_model


@pytest.fixture
def long(request):
    return request.config.getoption('--long')


@pytest.mark.parametrize('recurrent', [True, False])
def test_an_endless_stream_has_no_position(recurrent, long):
    """After 100,000 steps (300 in short) the next logits are those of the same s, K, V and counts in a state that has just begun, and of
    the chunked forward from there: float64, 1e-9."""
    torch.manual_seed(0)
    model = build_model(
        ModelConfig(32, n_layer=2, n_expert=2, n_embd=16, n_head=2, window=7, block_size=4),
        recurrent,
    ).double()
    with torch.no_grad():
        for p in model.parameters():  # away from the zeros that some begin as
            p.add_(0.05 * torch.randn_like(p))
    decoder, fresh = Decoder(model, 2), Decoder(model, 2)
    tokens = torch.randint(32, (2, 100_000 if long else 300))
    for token in tokens.T:
        decoder.step(token)
    state = decoder.state()
    assert decoder.steps == tokens.size(1)
    fresh.load(state)
    assert fresh.steps == 0
    more = torch.randint(32, (2, 12))
    whole = model(more, state=state)[0]
    for t in range(12):
        a, b = (d.step(more[:, t]) is None or d.logits.clone() for d in (decoder, fresh))
        assert (a - b).abs().max() < 1e-9 and (a - whole[:, t]).abs().max() < 1e-9


@pytest.mark.parametrize('recurrent', [True, False])
def test_a_loss_spike_passes(data, tmp_path, recurrent):  # noqa: F811
    """An update with gradients 10^4 times too large is clipped: it moves no weight further than its rates allow, and is made up for."""
    last, most = {}, {}
    for name, factor in (('calm', 1.0), ('spike', -1e4)):
        r, _ = train_lm.begin(
            configure(
                vars(train_lm),
                lm.arguments(data, tmp_path / name, max_iters=50, recurrent=recurrent),
                quiet=True,
            )
        )
        for step in range(50):
            before = [p.detach().clone() for p in r.model.parameters()]
            if step == 10:
                hook = r.model.head.register_hook(lambda g, f=factor: g * f)
            loss, norm, _ = train_lm.train_update(r, False)
            if step == 10:
                hook.remove()
                most[name] = max(
                    (p - b).abs().max().item()
                    for p, b in zip(r.model.parameters(), before, strict=True)
                )
                assert math.isfinite(norm) and (name == 'calm' or norm > 100)
            r.step += 1
        last[name] = loss
    assert last['spike'] < last['calm'] + 0.1 and most['spike'] < 4 * most['calm'], (last, most)


def test_bfloat16_follows_float32(data, tmp_path, long):  # noqa: F811
    """Training losses of the same run: never 0.02 nats apart in a tiny run; in the demo (--long) never 0.05."""
    if long:
        assert (
            subprocess.run(
                [
                    sys.executable,
                    'data_fineweb.py',
                    '--demo=True',
                    '--tokenizer=bytes',
                    f'--data_dir={tmp_path}/speeches',
                ],
                cwd=lm.ROOT,
            ).returncode
            == 0
        )
        runs = [
            [
                str(lm.ROOT / 'config' / 'demo.py'),
                f'--data_dir={tmp_path}/speeches',
                '--plot=False',
                f'--dtype={dtype}',
                f'--out_dir={tmp_path / dtype}',
            ]
            for dtype in ('float32', 'bfloat16')
        ]
    else:
        runs = [
            lm.arguments(data, tmp_path / dtype, max_iters=40, n_embd=64, **{'dtype': dtype})
            for dtype in ('float32', 'bfloat16')
        ]
    for argv in runs:
        assert train_lm.train(configure(vars(train_lm), argv, quiet=True)) == 0
    a, b = (
        [r['train_loss'] for r in lm.read_log(tmp_path / dtype)[1:]]
        for dtype in ('float32', 'bfloat16')
    )
    apart = max(abs(x - y) for x, y in zip(a, b, strict=True))
    print(f'at most {apart:.4f} nats apart')
    assert 0 < apart < (0.05 if long else 0.02)


def test_one_seed_one_log(data, tmp_path):  # noqa: F811
    for name in ('a', 'b'):
        torch.manual_seed(len(name) + ord(name))  # whatever a process begins with
        assert (
            lm.run(data, tmp_path / f'lm {name}') == 0
            and agents.run(tmp_path / f'agent {name}') == 0
        )
    same(lm.read_log(tmp_path / 'lm a'), lm.read_log(tmp_path / 'lm b'))
    same(agents.read_log(tmp_path / 'agent a'), agents.read_log(tmp_path / 'agent b'))
    assert lm.run(data, tmp_path / 'other', seed=2) == 0
    assert (
        lm.read_log(tmp_path / 'other')[-1]['train_loss']
        != lm.read_log(tmp_path / 'lm a')[-1]['train_loss']
    )

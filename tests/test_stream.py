"""Test stream.py: rows of text read in chunks, micro-batches, and the rows that fit the memory."""

import math

import pytest
import torch
from processes import run_ranks
from small_runs import assert_refused

import baselines
import graphs
import stream
from common import Gradients, join_ranks, leave_ranks
from model import ModelConfig, build_model
from stream import Stream

SIZES = {'n_layer': 2, 'n_expert': 2, 'n_embd': 32, 'n_head': 2, 'window': 12, 'block_size': 8}
RECURRENT, OWN_CACHES = (True, {}), (True, {'aggregation': 'softmax_l2', 'share_kv': False})
NONRECURRENT, LSTM = (False, {}), (True, {'arch': 'lstm'})
KINDS = pytest.mark.parametrize('kind', [RECURRENT, OWN_CACHES, NONRECURRENT, LSTM], ids=str)


def make_model(kind):
    """Return a model with random weights."""
    recurrent, sizes = kind
    sizes = dict(sizes)
    arch = sizes.pop('arch', '')
    config = ModelConfig(256, **SIZES | sizes)
    torch.manual_seed(0)
    model = baselines.build_lstm(config, True) if arch else build_model(config, recurrent)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return model


def tokens(B, n):
    """Return inputs x and targets y, (B, n) each."""
    x = torch.randint(256, (B, n + 1), generator=torch.Generator().manual_seed(1))
    return x[:, :-1].contiguous(), x[:, 1:].contiguous()


# ---- training


@pytest.mark.parametrize('kind', [RECURRENT, OWN_CACHES, LSTM], ids=str)
@pytest.mark.parametrize('rows', [6, 2])
def test_each_row_carries_its_state_until_it_is_reset(kind, rows):
    """The loss of three chunks is the mean over rows that are read one by one."""
    model = make_model(kind)
    x, y = tokens(6, 24)
    train = Stream(model, 6, 8, rows)
    states = [None] * 6
    for t in range(0, 24, 8):
        if t == 16:
            train.reset(torch.tensor([0, 3]))
            states[0] = states[3] = None
        loss = torch.zeros(())
        train.backward(x[:, t : t + 8], y[:, t : t + 8], rows / 6, loss)
        losses = []
        for b in range(6):
            with torch.no_grad():
                found, states[b] = model(x[[b], t : t + 8], y[[b], t : t + 8], states[b])
            losses.append(found.cross_entropy.item())
        assert loss.item() == pytest.approx(sum(losses) / 6, rel=1e-5)
    train.reset()
    assert not any(t.any() for t in train.state)


@KINDS
def test_micro_batches_change_only_rounding(kind):
    """Gradients, loss and state of a whole batch equal those of three micro-batches."""
    x, y = tokens(6, 16)
    found = []
    for rows in (6, 2):
        model = make_model(kind)
        train = Stream(model, 6, 8, rows, carries=kind[0])
        grads, loss = Gradients(model.parameters()), torch.zeros(())
        for t in (0, 8):
            train.backward(x[:, t : t + 8], y[:, t : t + 8], rows / 6, loss)
        found.append([loss, grads.buffer, *train.state])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


def test_a_nonrecurrent_model_in_training_carries_no_state():
    assert Stream(make_model(NONRECURRENT), 6, 8, carries=False).state == ()


# ---- scores


@KINDS
def test_a_score_depends_neither_on_rows_nor_on_chunks(kind):
    """Four texts of 30 tokens, one to four side by side, in chunks of 30, 8 and 1."""
    model = make_model(kind)
    x, y = tokens(4, 30)
    sums = [
        Stream(model, B, T, B).score(x, y) for B, T in ((4, 30), (1, 30), (2, 8), (4, 1), (3, 8))
    ]
    for nats, n in sums:
        assert n == 120 and nats.item() == pytest.approx(sums[0][0].item(), rel=1e-5)
    with torch.no_grad():
        loss, _ = model(x, y, model.init_state(4))
    assert sums[0][0].item() == pytest.approx(120 * loss.cross_entropy.item(), rel=1e-5)


def test_a_second_score_starts_from_zero():
    valid = Stream(make_model(RECURRENT), 2, 8)
    x, y = tokens(2, 16)
    first, second = valid.score(x, y), valid.score(x, y)
    assert torch.equal(first, second)


def test_reading_without_a_loss_leaves_the_same_state():
    model = make_model(RECURRENT)
    x, y = tokens(2, 20)
    scored, read = Stream(model, 2, 8), Stream(model, 2, 8)
    scored.score(x, y)
    read.read(x)
    torch.testing.assert_close(read.state, scored.state)


# ---- the rows that fit


def test_the_most_rows_are_a_divisor_of_at_most_4096_tokens_on_a_cpu():
    cpu = torch.device('cpu')
    assert [stream.most_rows(B, 64, cpu) for B in (64, 96, 2048, 7)] == [64, 64, 64, 7]
    assert stream.most_rows(6, 8192, cpu) == 1
    assert stream.most_rows(2048, 64, torch.device('cuda')) == 512
    assert [stream.divisor(B, 64) for B in (64, 96, 2048, 67)] == [64, 48, 64, 1]


def fail_beyond(rows, tried):
    """Return a chunk that runs out of memory with more than `rows` rows."""

    def chunk(x, y, state):
        tried.append(len(x))
        for t in state:
            t.fill_(1)
        if len(x) > rows:
            raise torch.OutOfMemoryError('of 80 GB')

    return chunk


def test_rows_are_halved_until_memory_suffices():
    tried = []
    train = Stream(make_model(RECURRENT), 24, 8)
    train.choose_rows(fail_beyond(3, tried))
    assert tried == [24, 12, 6, 3] and train.rows == 3 and train.x.shape == (3, 8)
    assert train.part[0].shape[0] == 3 and train.state[0].shape[0] == 24
    assert not any(t.any() for t in train.state)


def test_a_stream_that_may_shrink_holds_the_state_of_a_micro_batch_alone():
    valid = Stream(make_model(RECURRENT), 24, 8, may_shrink=True)
    valid.choose_rows(fail_beyond(6, []))
    assert valid.B == valid.rows == 6 and valid.state[0].shape[0] == 6


def test_what_does_not_fit_is_released_before_fewer_rows_are_tried():
    """The allocations of an attempt, its inputs included, are gone when the next one starts."""
    held, train = [], Stream(make_model(RECURRENT), 8, 8)

    def chunk(x, y, state):
        import weakref

        assert all(ref() is None for ref in held)
        big = torch.zeros(10)
        held.extend([weakref.ref(x), weakref.ref(big)])
        if len(x) > 2:
            raise torch.OutOfMemoryError('of 80 GB')

    train.choose_rows(chunk)
    assert len(held) == 6


@pytest.mark.parametrize('rows, message', [(0, 'one row of 8 tokens'), (4, 'batch_size = 4 of 8')])
def test_rows_that_do_not_fit_are_one_clear_line(rows, message):
    train = Stream(make_model(RECURRENT), 8, 8, rows)
    chunk = fail_beyond(0, [])
    assert_refused(f'{message}.* does not fit', train.choose_rows, chunk, 0, fixed=rows > 0)


def rows_of_rank(streams, limits):
    """Return the rows of this rank, if rank r has streams[r] rows and limits[r] of them fit."""
    rank, _, _ = join_ranks('cpu', 1)
    valid = Stream(make_model(NONRECURRENT), streams[rank], 8, may_shrink=True)
    valid.choose_rows(fail_beyond(limits[rank], []))
    leave_ranks()
    return valid.rows


def test_ranks_with_unequal_choices_agree():
    """Rank 0 has 8 streams, of which 2 fit, and rank 1 one stream, which fits."""
    assert run_ranks(2, rows_of_rank, (8, 1), (2, 1)) == [2, 1]


@pytest.mark.parametrize(
    'failure', [torch._dynamo.exc.TorchDynamoException, RuntimeError, KeyError]
)
def test_training_continues_uncompiled(monkeypatch, capsys, failure):
    """torch.compile fails, cannot start (KeyError: no user), or a compiled kernel cannot be
    launched; one line says so."""
    monkeypatch.setattr(graphs.fused, 'enabled', True)

    def chunk(x, y, state):
        if graphs.fused.enabled:
            raise failure('no C++ compiler\nmore lines')

    Stream(make_model(RECURRENT), 8, 8).choose_rows(chunk)
    assert not graphs.fused.enabled
    line = 'compile = True does not work here; running uncompiled'
    assert capsys.readouterr().out.count(line) == 1


def test_an_error_of_an_edited_model_is_no_mistake_of_the_user():
    """It keeps its traceback, though compilation is switched off and tried without first."""

    def chunk(x, y, state):
        raise ValueError('not enough values to unpack')

    with pytest.raises(ValueError, match='not enough values'):
        Stream(make_model(RECURRENT), 8, 8).choose_rows(chunk)


def test_bits_per_byte_of_uniform_bytes_are_eight():
    model = make_model(RECURRENT)
    torch.nn.init.zeros_(model.head)
    nats, n = Stream(model, 2, 8).score(*tokens(2, 16))
    assert nats.item() / n.item() / math.log(2) == pytest.approx(8, abs=1e-4)


def test_after_a_refused_capture_nothing_is_captured_on_its_results(monkeypatch, capsys):
    """The results of eager calls lie elsewhere each time."""
    captured = []

    def capture(name, function, args, pool, generator):
        captured.append(name)
        return None, None

    monkeypatch.setattr(graphs, 'capture', capture)
    found, results = {}, []
    for i in range(6):
        share = graphs.graphed(found, 'first', lambda i=i: [i])
        results.append(graphs.graphed(found, 'second', lambda x: x[0], share))
    assert captured == ['first'] and results == [0, 1, 2, 3, 4, 5]

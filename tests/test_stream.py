"""Test stream.py: rows of text read in chunks, micro-batches, and the rows that fit the memory."""

import weakref

import pytest
import torch
from small_runs import assert_refused

import lstm
from model import ModelConfig, build_model
from support import compiling, stream
from support.ranks import Gradients
from support.stream import Stream
from train_lm import make_chunk

SIZES = {'n_layer': 2, 'n_expert': 2, 'n_embd': 32, 'n_head': 2, 'window': 12, 'block_size': 8}
OWN_CACHES = {'aggregation': 'softmax_l2', 'share_kv': False}
KINDS = pytest.mark.parametrize(
    'kind', [{}, OWN_CACHES, {'recurrent': False}, {'arch': 'lstm'}], ids=str
)


def make_model(arch='experts', recurrent=True, **sizes):
    """Return a model with random weights."""
    config = ModelConfig(256, **{**SIZES, **sizes})
    torch.manual_seed(0)
    build = lstm.build_lstm if arch == 'lstm' else build_model
    model = build(config, recurrent)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return model


def tokens(B, n):
    """Return random inputs and targets, (B, n) each."""
    return torch.randint(256, (2, B, n), generator=torch.Generator().manual_seed(1))


# ---- training


@KINDS
def test_micro_batches_train_as_rows_that_are_read_alone(kind):
    """Each row carries its state, which is reset in two rows before the third chunk. A
    non-recurrent model carries none. Loss and gradients are means over the rows."""
    model = make_model(**kind)
    carries = kind.get('recurrent', True)
    x, y = tokens(6, 24)
    chunks = list(zip(x.split(8, 1), y.split(8, 1), strict=True))
    grads, loss, expected_loss = Gradients(model.parameters()), torch.zeros(()), 0
    for b in range(6):
        state = None
        for i, (x, y) in enumerate(chunks):
            if not carries or (i == 2 and b in (0, 3)):
                state = None
            result, state = model(x[[b]], y[[b]], state)
            (result.objective / 6).backward()
            expected_loss += result.cross_entropy.item() / 6
    expected = grads.buffer.clone()

    grads.zero()
    train = Stream(model, 6, 8, 2, carries=carries)
    chunk = make_chunk(model, 6, loss, train.autocast)
    for i, (x, y) in enumerate(chunks):
        if i == 2:
            train.reset(torch.tensor([0, 3]))
        train.run('train', chunk, x, y)
    assert loss.item() == pytest.approx(expected_loss, rel=1e-5)
    torch.testing.assert_close(grads.buffer, expected, rtol=1e-4, atol=1e-5)


def test_a_reset_is_to_the_initial_state_of_the_model(monkeypatch):
    """Which an edit may have made another one."""
    model = make_model()

    def init_state(B, real=model.init_state):
        state = real(B)
        return state._replace(s=state.s + torch.arange(32.0))

    monkeypatch.setattr(model, 'init_state', init_state)
    x, y = tokens(3, 8)
    with torch.no_grad():
        expected = 24 * model(x, y, init_state(3))[0].cross_entropy.item()
    valid = Stream(model, 3, 8, 3)
    for _ in range(2):
        assert valid.score(x, y)[0].item() == pytest.approx(expected, rel=1e-5)
    valid.state.s.zero_()
    valid.reset(torch.tensor([0, 2]))
    assert valid.state.s[:, 3].tolist() == [3, 0, 3]


# ---- scores


@KINDS
def test_a_score_depends_neither_on_rows_nor_on_chunks(kind):
    """Four texts of 30 tokens, one to four side by side, of which all or two are a micro-batch, in
    chunks of 30, 8 and 1, each twice."""
    model = make_model(**kind)
    x, y = tokens(4, 30)
    with torch.no_grad():
        loss, _ = model(x, y, model.init_state(4))
    expected = [120 * loss.cross_entropy.item(), 120]  # nats and tokens
    for B, T, rows in ((4, 30, 4), (1, 30, 1), (2, 8, 2), (4, 1, 4), (3, 8, 3), (4, 8, 2)):
        valid = Stream(model, B, T, rows)
        for _ in range(2):
            assert valid.score(x, y).tolist() == pytest.approx(expected, rel=1e-5)


def test_progress_counts_the_tokens_that_were_read(monkeypatch):
    monkeypatch.setattr(stream, 'Throttle', lambda: lambda: True)
    x, y = tokens(2, 30)
    lines = []
    Stream(make_model(), 2, 22, 2).read(x, lines.append)
    Stream(make_model(), 2, 22, 2).score(x, y, lines.append)
    read = [line.split(' of')[0].strip() for line in lines]
    assert read == ['22', '30', '44', '60']


# ---- the rows that fit


def test_a_micro_batch_has_at_most_4096_tokens_on_a_cpu_and_32768_on_a_gpu():
    cpu, gpu = torch.device('cpu'), torch.device('cuda')
    assert (stream.most_rows(2048, 64, cpu), stream.most_rows(2048, 64, gpu)) == (64, 512)
    assert stream.most_rows(6, 8192, cpu) == 1
    assert [stream.divisor(B, 64) for B in (96, 67)] == [48, 1]


def test_a_trial_leaves_no_trace_in_buffers():
    """Which an edit may count in."""
    model = make_model()
    model.register_buffer('count', torch.zeros(()))
    Stream(model, 8, 8).choose_rows(lambda *_: model.count.add_(1))
    assert model.count == 0


def fail_beyond(rows, tried):
    """Return a chunk that runs out of memory with more than `rows` rows. What an attempt has
    allocated, its inputs included, must be gone when the next one starts."""
    held = []

    def chunk(x, y, state):
        assert all(ref() is None for ref in held)
        big = torch.zeros(10)
        held.extend([weakref.ref(x), weakref.ref(big)])
        tried.append(len(x))
        for t in state:
            t.fill_(1)
        if len(x) > rows:
            raise torch.OutOfMemoryError('of 80 GB')

    return chunk


@pytest.mark.parametrize('may_shrink, B', [(False, 24), (True, 3)])
def test_rows_are_halved_until_memory_suffices(may_shrink, B):
    """A stream that may shrink holds the state of a micro-batch alone."""
    tried, train = [], Stream(make_model(), 24, 8, may_shrink=may_shrink)
    train.choose_rows(fail_beyond(3, tried))
    assert tried == [24, 12, 6, 3] and train.x.shape == (3, 8)
    assert train.B == B and train.state[0].shape[0] == B and train.part[0].shape[0] == 3
    assert not any(t.any() for t in train.state)


@pytest.mark.parametrize('B, tried', [(8, [8, 4, 2]), (1, [1, 1, 1])])
def test_a_rank_tries_fewer_rows_until_those_of_every_rank_fit(monkeypatch, B, tried):
    """On this rank all rows fit; the other one has to try twice more."""
    verdicts, found = iter([1, 1, 2]), []
    monkeypatch.setattr(torch.distributed, 'is_initialized', lambda: True)
    monkeypatch.setattr(
        torch.distributed, 'all_reduce', lambda verdict, op: verdict.clamp_(max=next(verdicts))
    )
    Stream(make_model(), B, 8, may_shrink=True).choose_rows(fail_beyond(8, found))
    assert found == tried


def test_all_ranks_run_uncompiled_if_one_cannot_compile(monkeypatch):
    """Compiled optimizers round differently, and the ranks must keep equal weights."""
    compiled = []
    monkeypatch.setattr(compiling.fused, 'enabled', True)
    monkeypatch.setattr(torch.distributed, 'is_initialized', lambda: True)
    monkeypatch.setattr(torch.distributed, 'all_reduce', lambda agreed, op: agreed[1].zero_())
    Stream(make_model(), 8, 8).choose_rows(lambda *_: compiled.append(compiling.fused.enabled))
    assert compiled == [True, False]


def test_rows_that_do_not_fit_are_one_clear_line():
    for rows, message in ((0, 'one row of 8 tokens'), (4, 'batch_size = 4 of 8')):
        choose = Stream(make_model(), 8, 8, rows).choose_rows
        assert_refused(f'{message}.* does not fit', choose, fail_beyond(0, []), fixed=rows > 0)


def test_training_continues_uncompiled(monkeypatch, capsys):
    """torch.compile cannot start; one line says so. An error that remains has its traceback."""

    def chunk(x, y, state):
        if compiling.fused.enabled:
            raise KeyError('no user')

    monkeypatch.setattr(compiling.fused, 'enabled', True)
    train = Stream(make_model(), 8, 8)
    train.choose_rows(chunk)
    assert not compiling.fused.enabled
    line = 'compile = True does not work here; running uncompiled'
    assert capsys.readouterr().out.count(line) == 1
    with pytest.raises(ZeroDivisionError):
        train.choose_rows(lambda *_: 1 / 0)


def test_a_state_that_would_fill_a_gpu_is_refused(monkeypatch):
    """It takes more than three quarters of the memory, and that of 8 of the 24 streams does not."""
    train = Stream(make_model(), 24, 8)
    size = sum(t.nbytes for t in train.model.init_state(24))
    train.device = torch.device('cuda')
    monkeypatch.setattr(torch.cuda, 'mem_get_info', lambda _: (0, size // 2))
    assert_refused('state of 24 streams .* needs 3 GPUs', train.check_state_size)
    monkeypatch.setattr(torch.cuda, 'mem_get_info', lambda _: (0, 2 * size))
    train.check_state_size()

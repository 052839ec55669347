"""model.py, unroll.py and kernels.py: every path of both models held to reference.py in values, gradients and states, chunk by chunk; caches,
aggregations, truncated back-propagation, head and loss, buffers, sizes."""

import gc
import math
import shutil

import pytest
import reference
import torch
import torch.nn.functional as F
from reference import (
    V,
    always_zero,
    assert_close,
    assert_same_gradients,
    assert_same_state,
    gradients,
    make,
    tokens,
)

import kernels
import model as model_file
import unroll
from model import (
    AGGREGATIONS,
    GPT,
    Level,
    ModelConfig,
    RecurrentGPT,
    State,
    build_model,
    config_dict,
)

MODELS = [RecurrentGPT, GPT]


@pytest.fixture(autouse=True)
def one_thread():
    """Products this small are slow with more threads when the processor is busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    unroll.release()
    yield
    torch.set_num_threads(threads)


def reset(state, row):
    """The state with one stream as it is at the start of a shard."""
    state = State(*(x.clone() for x in state))
    state.s[row], state.k[:, row], state.v[:, row], state.count[row] = 0, 0, 0, 0
    return state


# ---- every path is the reference ----


def compare(
    model,
    T,
    chunks=3,
    reset_before=2,
    paths=('plain', 'fast'),
    B=2,
    rtol=1e-9,
    exact=None,
    evaluate=True,
):
    """Chunks of T tokens in a row; each path and the reference carry their own states; one stream starts anew before a chunk. Loss,
    gradients, logits without gradients and the new state are compared after every chunk. Returns the fill counts met."""
    exact = model if exact is None else exact
    history, states, fills = (
        reference.History(exact, B),
        {path: model.init_state(B) for path in paths},
        set(),
    )
    for chunk in range(chunks):
        if chunk == reset_before:
            history.reset(1)
            states = {path: reset(state, 1) for path, state in states.items()}
        fills.add(tuple((history.now - history.first).clamp(max=model.config.window).tolist()))
        zero = ('wq', 'wk') if model.config.window == 1 else ()  # one entry: nothing to choose
        if T == 1 and not history.s.any():
            zero = ('wq', 'wk', 'levels.0.a')  # and no s yet
        x, y = tokens(B, T + 1, seed=chunk).unfold(1, T, 1).unbind(1)
        logits, history = reference.run(exact, x, history)
        loss = reference.loss_of(logits, y)
        grads = gradients(exact, loss)
        for path in paths:
            model.config.path = path
            if evaluate:
                with torch.no_grad():
                    assert_close(model(x, state=states[path])[0], logits, rtol, what=path)
            found, states[path] = model(x, y, states[path])
            assert_close(found, loss, rtol, what=path)
            assert_same_gradients(model, gradients(model, found), grads, rtol, zero)
            assert_same_state(states[path], history.state(), rtol)
    return fills


def sizes(L=2, E=2, G=2, W=3, aggregation='sqrt_sum', share_kv=True):
    return {
        'n_layer': L,
        'n_expert': E,
        'n_kv_head': G,
        'window': W,
        'aggregation': aggregation,
        'share_kv': share_kv,
    }


@pytest.mark.parametrize(
    'changes',
    [
        *(
            sizes(E=3, aggregation=a, share_kv=share)
            for a in AGGREGATIONS
            for share in (True, False)
        ),
        *(
            sizes(L, E, aggregation=a, share_kv=share)
            for L, E in ((1, 1), (3, 1), (1, 3), (3, 2))
            for a in ('sqrt_sum', 'mean', 'softmax_l2')
            for share in (True, False)
        ),
        *(sizes(E=3, G=G, share_kv=share) for G in (1, 4) for share in (True, False)),
    ],
    ids=lambda x: '-'.join(map(str, x.values())),
)
def test_recurrent_is_the_reference(changes):
    """All aggregations, caches of one's own, sizes and groups of queries."""
    compare(make(RecurrentGPT, **changes), 4)


@pytest.mark.parametrize(
    'T, W, chunks, reset_before', [(2, 5, 5, 3), (5, 3, 3, 1), (4, 1, 2, 1), (1, 2, 5, 3)]
)
@pytest.mark.parametrize(
    'aggregation, share_kv',
    [('sqrt_sum', True), ('mean', False), ('softmax_l2', True), ('softmax_mean', False)],
)
def test_recurrent_windows(T, W, chunks, reset_before, aggregation, share_kv):
    """From an empty, a partly filled and a full state, and from streams of different age."""
    fills = compare(
        make(RecurrentGPT, window=W, aggregation=aggregation, share_kv=share_kv),
        T,
        chunks,
        reset_before,
    )
    assert (0, 0) in fills and any(a != b for a, b in fills)
    if (T, W) == (2, 5):
        assert {(2, 2), (4, 4), (5, 0), (5, 2)} <= fills


@pytest.mark.parametrize(
    'aggregation, residual', [(a, r) for a in AGGREGATIONS for r in ('expert', 'shared')]
)
@pytest.mark.parametrize('E, n_kv_head', [(1, 2), (3, 1), (3, 4)])
def test_gpt_is_the_reference(E, n_kv_head, aggregation, residual):
    """Training: causal over the chunk. One expert is a standard Transformer."""
    model = make(GPT, n_expert=E, n_kv_head=n_kv_head, aggregation=aggregation, residual=residual)
    x, y = tokens(2, 7), tokens(2, 7, seed=1)  # the window of 4 does not count here
    expected, _ = reference.run(model, x)
    logits, state = model(x)
    assert state is None
    assert_close(logits, expected)
    loss, expected = model(x, y)[0], reference.loss_of(expected, y)
    assert_close(loss, expected)
    assert_same_gradients(model, gradients(model, loss), gradients(model, expected))


@pytest.mark.parametrize(
    'aggregation, residual', [('sqrt_sum', 'expert'), ('softmax_l2', 'shared')]
)
@pytest.mark.parametrize('E, n_kv_head', [(1, 2), (3, 1)])
def test_gpt_with_a_state_is_the_reference(E, n_kv_head, aggregation, residual):
    """Evaluation: the window, over chunks."""
    compare(
        make(GPT, n_expert=E, n_kv_head=n_kv_head, residual=residual, aggregation=aggregation),
        5,
        paths=('fast',),
    )


def assert_near(model, grads, exact, rel=0.1):
    """Gradients in bf16: each parameter's own, so that a scalar's cannot hide behind the matrices'. A factor or a sign is far beyond rel;
    measured are at most 0.035."""
    for name in exact:
        if not always_zero(name, model):
            error = (grads[name].double() - exact[name].double()).norm()
            assert error <= rel * exact[name].double().norm(), (name, error, exact[name].norm())


@pytest.mark.parametrize('aggregation', ['sqrt_sum', 'softmax_mean'])
@pytest.mark.parametrize('share_kv', [True, False])
def test_recurrent_in_fp32_and_bf16(aggregation, share_kv):
    # by this seed no scalar's gradient is a small difference of large terms: their sizes are within a factor of 2.2
    model = make(
        RecurrentGPT,
        seed=10,
        dtype=torch.float32,
        n_embd=64,
        n_expert=3,
        aggregation=aggregation,
        share_kv=share_kv,
    )
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.mul_(0.5)
    x, y = tokens(4, 8), tokens(4, 8, seed=1)
    exact = reference.exact(model)
    _, history = reference.run(exact, x, reference.History(exact, 4))
    logits, history = reference.run(exact, x, history)
    loss = reference.loss_of(logits, y)
    grads = gradients(exact, loss)
    for bf16 in (False, True):
        for path in ('plain', 'fast'):
            model.config.path = path
            with torch.autocast('cpu', torch.bfloat16, enabled=bf16):
                _, state = model(x, y, model.init_state(4))
                found, state = model(x, y, state)
            assert found.dtype == state.s.dtype == torch.float32
            assert state.k.dtype == state.v.dtype == (torch.bfloat16 if bf16 else torch.float32)
            g = gradients(model, found)
            assert all(x.dtype == torch.float32 for x in g.values())
            if bf16:
                assert_close(found, loss, rtol=3e-2)
                assert_near(model, g, grads)
            else:
                assert_close(found, loss, rtol=1e-5)
                assert_same_gradients(model, g, grads, rtol=1e-5)
                assert_same_state(state, history.state(), rtol=1e-4)


@pytest.mark.skipif(
    not (shutil.which('g++') or shutil.which('clang++')),
    reason='torch.compile needs a C++ compiler on the CPU',
)
def test_compiled_recurrent_is_the_reference():
    model = make(RecurrentGPT, dtype=torch.float32, window=3, n_layer=1)
    compare(
        model, 2, 2, 1, paths=('compiled',), rtol=1e-4, exact=reference.exact(model), evaluate=False
    )  # nine pieces to compile


@pytest.mark.skipif(
    not (shutil.which('g++') or shutil.which('clang++')),
    reason='torch.compile needs a C++ compiler on the CPU',
)
def test_compiled_gpt_is_the_reference():
    model = make(GPT, dtype=torch.float32, n_layer=1, path='compiled')
    exact, x, y = reference.exact(model), tokens(2, 8), tokens(2, 8, seed=1)
    expected = reference.loss_of(reference.run(exact, x)[0], y)
    loss, _ = model(x, y)
    assert model.compiled_core is not None  # with plain products for attention, too
    assert_close(loss, expected, rtol=1e-5)
    assert_same_gradients(model, gradients(model, loss), gradients(exact, expected), rtol=1e-4)


@pytest.mark.parametrize('residual', ['expert', 'shared'])
def test_gpt_of_eight_levels_and_experts_in_bf16(residual):
    """The literal rule multiplies the residual by sqrt(8) a level: its stream stays in fp32 and close to float64's."""
    model = make(
        GPT,
        dtype=torch.float32,
        n_layer=8,
        n_expert=8,
        n_embd=64,
        n_head=2,
        n_kv_head=1,
        residual=residual,
    )
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)
    x, y = tokens(2, 8), tokens(2, 8, seed=1)
    with torch.autocast('cpu', torch.bfloat16):
        s, _ = model.hidden(model_file.norm(model.embedding[x]), None)
        loss, _ = model(x, y)
    loss.backward()
    assert s.dtype == torch.float32 and s.isfinite().all()
    assert all(p.grad.isfinite().all() and p.grad.norm() > 0 for p in model.parameters())
    grads = {name: p.grad for name, p in model.named_parameters()}
    model.double()
    exact, _ = model.hidden(model_file.norm(model.embedding[x]), None)
    exact_loss, _ = model(x, y)
    assert_close(s.double(), exact, rtol=3e-2)
    assert abs(loss.item() - exact_loss.item()) < 3e-2 * exact_loss.item()
    assert_near(model, grads, gradients(model, exact_loss))
    if residual == 'expert':
        assert exact.pow(2).mean().sqrt() > 8**4  # sqrt(8)^8 times the embedding's


# ---- chunks, caches, the state ----


@pytest.mark.parametrize(
    'kind, path', [(RecurrentGPT, 'plain'), (RecurrentGPT, 'fast'), (GPT, 'fast')]
)
@pytest.mark.parametrize(
    'changes', [{'aggregation': 'softmax_mean', 'share_kv': False}, {'n_expert': 3}]
)
def test_any_split_of_a_stream_gives_the_same(kind, path, changes):
    model = make(kind, path=path, **changes)  # window 4
    x = tokens(2, 14)
    with torch.no_grad():
        whole, history = reference.run(model, x, reference.History(model, 2))
        for split in ([14], [1] * 14, [3, 1, 4, 6], [2] * 7, [13, 1], [5, 9]):
            state, logits = model.init_state(2), []
            for chunk in x.split(split, 1):
                out, state = model(chunk, state=state)
                logits.append(out)
            assert_close(torch.cat(logits, 1), whole, what=split)
            assert_same_state(state, history.state())
        logits, state = model.step(x[:, 0], model.init_state(2))
        assert_close(logits, whole[:, 0])
        assert_close(model.step(x[:, 1], state)[0], whole[:, 1])


@pytest.mark.parametrize(
    'kind, path', [(RecurrentGPT, 'plain'), (RecurrentGPT, 'fast'), (GPT, 'fast')]
)
def test_streams_of_different_age(kind, path):
    """Streams that have seen 0, 2 and 9 tokens in one batch are what each is alone."""
    model = make(kind, path=path)
    x = tokens(3, 5)
    with torch.no_grad():
        rows, expected = [], []
        for row, age in enumerate((0, 2, 9)):
            history, state = reference.History(model, 1), model.init_state(1)
            if age:
                _, history = reference.run(model, tokens(1, age, seed=row), history)
                _, state = model(tokens(1, age, seed=row), state=state)
            rows.append(state)
            expected.append(reference.run(model, x[row : row + 1], history)[0])
        state = State(*(torch.cat([r[i] for r in rows], 1 if i in (1, 2) else 0) for i in range(4)))
        assert state.count.tolist() == [0, 2, 4]
        assert_close(model(x, state=state)[0], torch.cat(expected))


@pytest.mark.parametrize(
    'kind, path', [(RecurrentGPT, 'plain'), (RecurrentGPT, 'fast'), (GPT, 'fast')]
)
@pytest.mark.parametrize('age', [0, 1, 3, 4])
def test_empty_entries_are_masked(kind, path, age):
    """Garbage in a cache's empty slots changes nothing; in its filled ones it does. Zeros are not attended either."""
    model = make(kind, path=path)  # window 4
    state = model.init_state(2)
    with torch.no_grad():
        if age:
            _, state = model(tokens(2, age), state=state)
        x = tokens(2, 6, seed=1)
        expected, end = model(x, state=state)
        assert state.count.tolist() == [age, age]
        for slot in range(4):
            dirty = State(*(part.clone() for part in state))
            dirty.k[..., slot, :], dirty.v[..., slot, :] = 7.5, -30.0
            logits, dirty_end = model(x, state=dirty)
            if slot < 4 - age:
                assert_close(logits, expected)
                assert_same_state(dirty_end, end)
            elif slot > 0:  # a full cache's oldest entry has left the window
                assert (logits - expected).norm() > 1e-3
            else:
                assert_close(logits, expected)


@pytest.mark.parametrize('kind', MODELS)
@pytest.mark.parametrize('share_kv', [True, False])
def test_init_state(kind, share_kv):
    model = make(kind, n_layer=3, n_expert=3, share_kv=share_kv, dtype=torch.float32)
    state = model.init_state(5)
    C = 2 if share_kv and kind is RecurrentGPT else 6
    assert state.s.shape == (5, 16 if kind is RecurrentGPT else 0)
    assert state.k.shape == state.v.shape == (3, 5, C, 4, 4) and state.count.tolist() == [0] * 5
    assert not any(part.any() for part in state) and state.k.data_ptr() != state.v.data_ptr()
    with torch.autocast('cpu', torch.bfloat16):
        state = model.init_state(5)
    assert state.k.dtype == state.v.dtype == torch.bfloat16 and state.s.dtype == torch.float32
    with torch.no_grad():
        _, new = model(tokens(5, 3), state=state)
    assert [x.shape for x in new] == [x.shape for x in state] and new.count.tolist() == [3] * 5


@pytest.mark.parametrize(
    'kind, path', [(RecurrentGPT, 'plain'), (RecurrentGPT, 'fast'), (GPT, 'fast')]
)
def test_incoming_state_is_left_alone(kind, path):
    """A forward and a backward write nothing into the state they were given, and a state changed in place after the forward
    does not change the backward."""
    model = make(kind, path=path)
    x = tokens(2, 3)
    with torch.no_grad():
        _, state = model(x, state=model.init_state(2))
    before = State(*(part.clone() for part in state))
    loss, new = model(x, x, state)
    expected = gradients(model, loss)
    for a, b in zip(state, before, strict=True):
        assert torch.equal(a, b)
    loss, new = model(x, x, state)
    if path == 'fast' and kind is RecurrentGPT:
        with torch.no_grad():
            new.k.fill_(3.0)
            new.v.fill_(3.0)
            state.k.fill_(3.0)
            state.v.fill_(3.0)
    assert_same_gradients(model, gradients(model, loss), expected)


# ---- truncated back-propagation ----


@pytest.mark.parametrize(
    'kind, path', [(RecurrentGPT, 'plain'), (RecurrentGPT, 'fast'), (GPT, 'fast')]
)
def test_no_gradient_through_the_incoming_state(kind, path):
    """That those of the parameters end there too, the reference holds."""
    model = make(kind, path=path)
    x = tokens(2, 3)
    _, state = model(x, state=model.init_state(2))
    constant = state.detach()
    for name in ('s', 'k', 'v'):
        leaf = getattr(constant, name).clone().requires_grad_()
        loss, _ = model(x, x, constant._replace(**{name: leaf}))
        assert torch.autograd.grad(loss, leaf, allow_unused=True)[0] is None, name


# ---- aggregation ----


def level_of(aggregation, E, D=2, recurrent=True):
    level = Level(
        ModelConfig(n_expert=E, n_embd=D, n_head=1, aggregation=aggregation, router_dim=4),
        recurrent,
    ).double()
    with torch.no_grad():
        for p in level.parameters():
            p.zero_()
    return level


@pytest.mark.parametrize(
    'aggregation, expected',
    [
        ('sqrt_sum', [(1 + 4 - 9) / math.sqrt(3), (2 + 5 + 6) / math.sqrt(3)]),
        ('mean', [-4 / 3, 13 / 3]),
        (
            'softmax_mean',
            [(1 + 2 * 4 - 5 * 9) / 8 / (1 + 1e-6), (2 + 2 * 5 + 5 * 6) / 8 / (1 + 1e-6)],
        ),
        (
            'softmax_l2',
            [
                (1 + 2 * 4 - 5 * 9) / 8 / math.sqrt(30 / 64 + 1e-6),
                (2 + 2 * 5 + 5 * 6) / 8 / math.sqrt(30 / 64 + 1e-6),
            ],
        ),
    ],
)
def test_aggregation_by_hand(aggregation, expected):
    """Experts' outputs (1, 2), (4, 5), (-9, 6); the router's scores are ln 1, ln 2, ln 5, so its gates are 1/8, 2/8, 5/8."""
    level = level_of(aggregation, 3)
    if level.config.routed:
        with torch.no_grad():
            level.router_k.copy_(torch.eye(4))
            level.router_q_bias[1] = (
                2.0  # = sqrt(router width), so that scores are the embeddings' entry 1
            )
            level.expert_embedding[:, 1] = torch.tensor([1.0, 2.0, 5.0]).double().log()
    h = torch.tensor([[1.0, 2.0], [4.0, 5.0], [-9.0, 6.0]]).double()
    zero = torch.zeros(1, 2, dtype=torch.float64)
    assert_close(
        aggregated(level, h[:, None], zero, zero),
        torch.tensor([expected], dtype=torch.float64),
        rtol=1e-12,
    )


def aggregated(level, h, z, s):
    """A of h (E, N, D) where z and s (N, D) come in."""
    w = model_file.plain_weights(level.weights(), torch.float64)
    gates = model_file.route(w, s, z) if level.config.routed else None
    return model_file.aggregate(h, gates, level.config.aggregation)


@pytest.mark.parametrize('aggregation', AGGREGATIONS)
def test_aggregation_formula(aggregation):
    """Row by row; the router reads z, then s."""
    level = level_of(aggregation, 3, D=4)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in level.parameters():
            p.normal_(generator=generator)
    h, z, s = (
        torch.randn(*shape, 2, 5, 4, dtype=torch.float64, generator=generator)
        for shape in ((3,), (), ())
    )
    h, z, s = h.flatten(1, 2), z.flatten(0, 1), s.flatten(0, 1)
    found = aggregated(level, h, z, s)
    assert_close(found, reference.combine(level.config, level, list(h), z, s), rtol=1e-12)
    swapped = aggregated(level, h, s, z)
    assert torch.allclose(swapped, found) != level.config.routed


@pytest.mark.parametrize('name', ['sum', 'softmax', ''])
def test_a_name_that_is_not_known_is_refused_by_the_equations(name):
    h, gates = torch.ones(2, 3, 4), torch.ones(3, 2)
    kind = Level(ModelConfig(n_expert=2, n_embd=128), False).rules()
    for change in ({'aggregation': name}, {'residual': name}):
        with pytest.raises(ValueError, match=repr(name)):
            model_file.combine(h, h, h[0], gates, kind._replace(**change))
    with pytest.raises(ValueError, match=repr(name)):
        model_file.combine(h, h, None, gates, kind._replace(recurrent=True, aggregation=name))


# ---- head and loss ----


def plain_head_loss(x, weight, targets):
    return F.cross_entropy(15 * torch.tanh(x @ weight.t() / 15), targets)


def head_loss(x, weight, targets):
    return kernels.head_loss(x, weight, targets, model_file.losses)


def head_inputs(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    x, weight = (
        torch.randn(n, 6, dtype=dtype, generator=generator).mul_(5).requires_grad_()
        for n in (10, V)
    )  # some logits beyond the cap
    return x, weight, tokens(10)


@pytest.mark.parametrize('rows', [1, 3, 5, 10, 1000])
def test_head_loss(monkeypatch, rows):
    """In value and gradients, in slices that do and do not divide the rows, and in a sum of two losses."""
    monkeypatch.setattr(kernels, 'LOGITS_PER_SLICE', rows * V)
    x, weight, targets = head_inputs()
    assert (x @ weight.t()).abs().max() > 15
    for loss in (
        lambda f: f(x, weight, targets),
        lambda f: 3 * f(x, weight, targets) - f(x.flip(0) / 2, weight, targets),
    ):
        found, expected = loss(head_loss), loss(plain_head_loss)
        assert_close(found, expected, rtol=1e-12)
        for a, b in zip(
            torch.autograd.grad(found, (x, weight)),
            torch.autograd.grad(expected, (x, weight)),
            strict=True,
        ):
            assert_close(a, b, rtol=1e-12)


def test_head_loss_in_bf16_and_fp32_and_without_gradients(monkeypatch):
    x, weight, targets = head_inputs(torch.float32)
    expected = plain_head_loss(x, weight, targets)
    grads = torch.autograd.grad(expected, (x, weight))
    for bf16, rtol in ((False, 1e-5), (True, 3e-2)):
        with torch.autocast('cpu', torch.bfloat16, enabled=bf16):
            found = head_loss(x, weight, targets)
        assert found.dtype == torch.float32
        assert_close(found, expected, rtol)
        for a, b in zip(torch.autograd.grad(found, (x, weight)), grads, strict=True):
            assert a.dtype == torch.float32
            assert_close(a, b, rtol)
    (only_x,) = torch.autograd.grad(head_loss(x, weight.detach(), targets), x)
    assert_close(only_x, grads[0], 1e-5)
    monkeypatch.setattr(
        torch, 'zeros_like', lambda *_: pytest.fail('made a gradient under no_grad')
    )
    with torch.no_grad():
        assert_close(head_loss(x, weight, targets), expected.detach(), 1e-5)


@pytest.mark.parametrize('kind', MODELS)
def test_loss_is_the_mean_cross_entropy_of_the_logits(kind):
    model = make(kind)
    x, y = tokens(3, 5), tokens(3, 5, seed=1)
    logits, _ = model(x)
    assert logits.dtype == torch.float64 and logits.abs().max() <= 15
    loss, _ = model(x, y)
    expected = -torch.log_softmax(logits, -1)[torch.arange(3)[:, None], torch.arange(5), y].mean()
    assert_close(loss, expected)
    assert_same_gradients(model, gradients(model, loss), gradients(model, expected))


# ---- blocks of a chunk ----


def fake_graphed(graphs, name, function):
    """kernels.graphed without CUDA: from the fourth call on what ran then runs again."""
    calls, first = graphs.get(name, (0, None))
    graphs[name] = calls + 1, function if calls == 3 else first
    (graphs[name][1] or function)()


@pytest.mark.parametrize(
    'aggregation, share_kv, W, T, B',
    [
        ('sqrt_sum', True, 4, 8, 2),
        ('mean', False, 4, 8, 1),
        ('softmax_l2', True, 7, 11, 2),
        ('sqrt_sum', True, 2, 7, 2),
        ('sqrt_sum', False, 20, 9, 2),
        ('sqrt_sum', True, 5, 3, 2),
    ],
)
def test_a_chunk_of_several_blocks_is_the_reference(monkeypatch, aggregation, share_kv, W, T, B):
    """Blocks of 3 tokens, dK and dV in groups of 2, with and without the attention's weights kept for the backward; then with graphs, where
    what is captured once is replayed with other weights and numbers."""
    monkeypatch.setattr(unroll, 'BLOCK', 3)
    monkeypatch.setattr(unroll, 'GROUP', 2)
    changes = {'aggregation': aggregation, 'share_kv': share_kv, 'window': W}
    model, expected, history, state = make(RecurrentGPT, **changes), [], None, None
    chunks = [(tokens(B, T, seed=i), tokens(B, T, seed=i + 10)) for i in range(6)]
    for i, (x, y) in enumerate(chunks):
        logits, history = reference.run(
            model, x, reference.History(model, B) if i % 3 == 0 else history
        )
        loss = reference.loss_of(logits, y)
        expected.append((logits, loss, gradients(model, loss), history.state()))
        scale_weights(model)
    for kept, path in ((2**30, 'fast'), (0, 'fast'), (2**30, 'compiled'), (0, 'graphed')):
        with monkeypatch.context() as patch:
            patch.setattr(unroll, 'KEPT_WEIGHTS', kept)
            if path in ('compiled', 'graphed'):
                patch.setattr(unroll, 'compiled', lambda op: op)
                patch.setattr(kernels, 'compiled', lambda op: op)
            if path == 'graphed':
                patch.setattr(unroll, 'graphed', fake_graphed)
                patch.setattr(unroll, 'can_capture', lambda x: True)
            model, other = (make(RecurrentGPT, seed=seed, path=path, **changes) for seed in (0, 1))
            for i, ((x, y), (logits, loss, grads, end)) in enumerate(
                zip(chunks, expected, strict=True)
            ):
                state = model.init_state(B) if i % 3 == 0 else state.detach()
                with torch.no_grad():
                    assert_close(model(x, state=state)[0], logits)
                found, state = model(x, y, state)
                if path == 'graphed':
                    other(x, y)  # another model of the same sizes in between
                assert_close(found, loss)
                assert_same_gradients(model, gradients(model, found), grads)
                assert_same_state(state, end)
                scale_weights(model)
    captured = [first for blocks in unroll._blocks.values() for _, first in blocks.graphs.values()]
    assert None not in captured and len(captured) >= 2


@torch.no_grad()
def scale_weights(model):
    for p in model.parameters():
        p.mul_(1.01)


def test_memory_made_in_inference_mode_serves_later():
    model, x = make(RecurrentGPT), tokens(2, 5)
    with torch.inference_mode():
        first = model(x)[0].clone()
    with torch.no_grad():
        assert torch.equal(model(x)[0], first)


# ---- the chunk's buffers ----


@pytest.mark.parametrize('first', [0, 1])
def test_two_forwards_before_the_backwards(first):
    """Each live chunk has memory of its own, whichever backward comes first."""
    model = make(RecurrentGPT)
    xs = [tokens(2, 5, seed=i) for i in range(2)]
    expected = [gradients(model, model(x, x)[0]) for x in xs]
    losses = [model(x, x)[0] for x in xs]
    for i in (first, 1 - first):
        assert_same_gradients(model, gradients(model, losses[i]), expected[i])
    loss = model(xs[0], xs[0])[0] + model(xs[1], xs[1])[0]  # both in one backward
    together = {name: expected[0][name] + expected[1][name] for name in expected[0]}
    assert_same_gradients(model, gradients(model, loss), together)


def test_forward_without_backward_and_without_gradients(monkeypatch):
    model = make(RecurrentGPT)
    x = tokens(2, 5)
    loss, state = model(x, x)
    expected = gradients(model, loss)
    dropped = model(tokens(2, 5, seed=1), x)  # lives on, with its buffers, and is never used
    assert_same_gradients(model, gradients(model, model(x, x)[0]), expected)
    del dropped
    monkeypatch.setattr(
        torch.Tensor,
        'register_hook',
        lambda *_: pytest.fail('kept something where no gradient is wanted'),
    )
    with torch.no_grad():
        value, same = model(x, x)
    assert_close(value, loss.detach(), rtol=1e-12)
    assert_same_state(same, state.detach(), rtol=1e-12)
    with torch.inference_mode():
        assert_close(model(x, x)[0], loss.detach(), rtol=1e-12)
    assert not value.requires_grad
    model.requires_grad_(False)
    assert_close(model(x, x)[0], loss.detach(), rtol=1e-12)


@pytest.mark.parametrize('backward', [True, False])
def test_a_chunk_is_freed_without_the_collector(monkeypatch, backward):
    """Nothing of it holds itself: a capture would meet its nodes again, and memory would wait for the collector: chunks do not pile up."""
    monkeypatch.setattr(unroll, 'BLOCK', 3)
    model, x, alive = make(RecurrentGPT), tokens(2, 7), []
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            loss, _ = model(x, x)
            if backward:
                loss.backward()
            del loss
            alive.append(
                sum(isinstance(found, unroll.Product | unroll.Window) for found in gc.get_objects())
            )
    finally:
        gc.enable()
    assert alive[0] == alive[2] < 20  # of one chunk at most


def test_a_second_backward_is_refused():
    model = make(RecurrentGPT)
    loss, _ = model(tokens(2, 3), tokens(2, 3))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match='second'):
        loss.backward()


def test_gradients_accumulate_over_chunks_of_other_sizes():
    """Buffers kept for one size are not used for another."""
    model = make(RecurrentGPT)
    expected = []
    for x in (tokens(2, 5), tokens(2, 3), tokens(1, 5), tokens(2, 5, seed=1)):
        expected.append(gradients(model, reference.loss_of(reference.run(model, x)[0], x)))
        model(x, x)[0].backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    assert_same_gradients(model, found, {name: sum(g[name] for g in expected) for name in found})


def test_frozen_parameters():
    model = make(RecurrentGPT)
    x = tokens(2, 4)
    expected = torch.autograd.grad(
        reference.loss_of(reference.run(model, x)[0], x), model.embedding
    )[0]
    for level in model.levels:
        level.requires_grad_(False)
    model(x, x)[0].backward()
    assert_close(model.embedding.grad, expected)
    assert model.levels[0].wq.grad is None


# ---- sizes, groups, refusals ----


def build(kind, **changes):
    """A model of any size without memory."""
    with torch.device('meta'):
        return kind(ModelConfig(**changes))


@pytest.mark.parametrize('L, E', [(16, 1), (2, 8), (1, 16)])
def test_sizes_by_hand(L, E):
    """The figures of the performance notes: 11 d^2 a block, two FLOPs a weight, 4 W d attention a block."""
    block = 11 * 768**2
    for kind in MODELS:
        model = build(kind, n_layer=L, n_expert=E, n_embd=768, window=128, block_size=256)
        scalars = 2 * L if kind is RecurrentGPT else 0
        n = model.num_params()
        assert n == {
            'total': 16 * block + scalars + 2 * 50304 * 768,
            'embedding': 50304 * 768,
            'head': 50304 * 768,
            'core': 16 * block + scalars,
        }
        assert round(n['core'] / 1e6, 1) == 103.8 and round(n['head'] / 1e6, 1) == 38.6
        attention = 16 * 4 * 768 * (128 if kind is RecurrentGPT else 128.5)
        flops = model.flops_per_token()
        assert flops == {'core': 2 * 16 * block + attention, 'head': 2 * 50304 * 768}
        assert (
            round((flops['core'] - attention) / 1e6, 1) == 207.6
            and round(attention / 1e6, 1) == 6.3
        )
        assert round(flops['head'] / 1e6, 1) == 77.3


@pytest.mark.parametrize('kind', MODELS)
def test_sizes_of_the_router(kind):
    plain, routed = (
        build(kind, n_layer=3, n_expert=5, n_embd=128, router_dim=7, aggregation=a)
        for a in ('sqrt_sum', 'softmax_l2')
    )
    extra = 3 * (7 * 256 + 7 * 7 + 7 + 7 + 5 * 7)
    assert routed.num_params()['core'] - plain.num_params()['core'] == extra
    assert routed.flops_per_token()['core'] - plain.flops_per_token()['core'] == 3 * 2 * (
        7 * 256 + 5 * 7
    )


@pytest.mark.parametrize(
    'D, head_dim, H, G',
    [
        (192, 96, 2, 1),
        (384, 96, 4, 2),
        (768, 96, 8, 4),
        (1536, 96, 16, 8),
        (128, 64, 2, 1),
        (256, 64, 4, 2),
    ],
)
def test_head_sizes(D, head_dim, H, G):
    c = ModelConfig(n_embd=D)
    assert (c.head_dim, c.n_head, c.n_kv_head) == (head_dim, H, G)
    assert ModelConfig(**config_dict(c)) == c


def test_given_heads():
    assert ModelConfig(n_embd=100, n_head=5).n_kv_head == 5  # odd: as many key-value heads
    c = ModelConfig(n_embd=768, n_head=12, n_kv_head=3)
    assert (c.n_head, c.n_kv_head, c.head_dim) == (12, 3, 64)


@pytest.mark.parametrize(
    'name, changes',
    [
        ('n_embd', {'n_embd': 100}),
        ('n_embd', {'n_embd': 0}),
        ('n_embd', {'n_embd': 320}),
        ('n_head', {'n_embd': 96, 'n_head': 5}),
        ('n_head', {'n_embd': 12, 'n_head': 4}),
        ('n_head', {'n_head': -1}),
        ('n_kv_head', {'n_head': 8, 'n_kv_head': 3}),
        ('n_kv_head', {'n_head': 4, 'n_kv_head': 8}),
        ('n_kv_head', {'n_kv_head': -2}),
        ('aggregation', {'aggregation': 'sum'}),
        ('residual', {'residual': 'none'}),
        ('path', {'path': 'slow'}),
        ('window', {'window': 0}),
        ('block_size', {'block_size': 0}),
        ('n_layer', {'n_layer': 0}),
        ('n_expert', {'n_expert': -1}),
        ('vocab_size', {'vocab_size': 0}),
        ('router_dim', {'router_dim': 0}),
    ],
)
def test_sizes_that_do_not_fit_are_refused_by_name(name, changes):
    with pytest.raises(
        ValueError,
        match=f'^{name} = {changes.get(name, "")}'
        if isinstance(changes[name], int)
        else f'^{name} = {changes[name]!r}',
    ):
        ModelConfig(**changes)


@pytest.mark.parametrize('kind', MODELS)
@pytest.mark.parametrize('aggregation', ['mean', 'softmax_mean'])
def test_param_groups(kind, aggregation):
    """Every parameter in one group; Muon gets the stacked matrices and the router's, and nothing else."""
    model = build(kind, vocab_size=V, n_embd=128, aggregation=aggregation)
    names = {id(p): name for name, p in model.named_parameters()}
    groups = {
        group: [names[id(p)] for p in params] for group, params in model.param_groups().items()
    }
    assert sorted(sum(groups.values(), [])) == sorted(names.values())
    routed = aggregation == 'softmax_mean'
    matrices = ['wq', 'wk', 'wv', 'wo', 'up', 'down', *(['router_q', 'router_k'] if routed else [])]
    scalars = [
        *(['a', 'b'] if kind is RecurrentGPT else []),
        *(['router_q_bias', 'router_k_bias', 'expert_embedding'] if routed else []),
    ]
    assert groups['embedding'] == ['embedding'] and groups['head'] == ['head']
    assert sorted(groups['matrices']) == sorted(
        f'levels.{l}.{name}' for l in range(2) for name in matrices
    )
    assert sorted(groups['scalars']) == sorted(
        f'levels.{l}.{name}' for l in range(2) for name in scalars
    )
    assert all(p.dim() >= 2 for p in model.param_groups()['matrices'])


@pytest.mark.parametrize('recurrent', [True, False])
@pytest.mark.parametrize('aggregation', ['sqrt_sum', 'softmax_l2'])
def test_initialisation(recurrent, aggregation):
    """The first loss is ln V; a, b are 1; o, down and head 0; the others uniform with standard deviation 0.5 / sqrt(fan_in)."""
    torch.manual_seed(0)
    model = build_model(
        ModelConfig(vocab_size=300, n_embd=128, n_expert=3, aggregation=aggregation), recurrent
    )
    assert isinstance(model, RecurrentGPT if recurrent else GPT)
    loss, _ = model(tokens(2, 4, vocab=300), tokens(2, 4, vocab=300))
    assert abs(loss.item() - math.log(300)) < 1e-5
    assert abs(model.embedding.std() - 1) < 0.02
    for name, p in model.levels[1].named_parameters():
        if name in ('wo', 'down', 'router_q_bias', 'router_k_bias'):
            assert not p.any(), name
        elif name in ('a', 'b'):
            assert p == 1, name
        elif name == 'expert_embedding':
            assert 0.8 < p.std() < 1.2
        else:
            assert abs(p.std() * math.sqrt(p.size(-1)) - 0.5) < 0.03, name
            assert p.abs().max() <= 0.5 * math.sqrt(3 / p.size(-1)), name


@pytest.mark.parametrize('kind', MODELS)
def test_a_few_steps_of_descent_lower_the_loss(kind):
    model = make(kind, dtype=torch.float32)
    x = tokens(4, 9)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(40):
        loss, _ = model(x[:, :-1], x[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 < 2 < losses[0]

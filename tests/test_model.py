"""Test model.py, unroll.py and kernels.py: every mode of both models is compared with reference.py
in values, gradients and states, chunk by chunk. Then follow tests of states, head and loss, and
sizes."""

import gc
import itertools
import math
import shutil
import weakref

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
from small_runs import assert_refused

import model as model_file
import unroll
from model import (
    AGGREGATIONS,
    GPT,
    RESIDUALS,
    ModelConfig,
    RecurrentGPT,
    State,
    activation,
    build_model,
    mix_state_and_token,
    run_layer,
)
from support import compiling

both = pytest.mark.parametrize('model_type', [RecurrentGPT, GPT])
needs_compiler = pytest.mark.skipif(
    not (shutil.which('g++') or shutil.which('clang++')),
    reason='torch.compile needs a C++ compiler on the CPU',
)


@pytest.fixture(autouse=True)
def default_mode(monkeypatch):
    monkeypatch.setattr(unroll, 'MAX_KEPT_BYTES', unroll.MAX_KEPT_BYTES)  # compare() sets it
    monkeypatch.setattr(compiling.fused, 'enabled', False)
    unroll.release()


# ---- every mode equals the reference ----

# name: config.mode, fused.enabled, model.cuda_graphs, bytes of attention weights kept for the
# backward
MODES = {
    'plain': ('plain', False, False, 2**30),
    'fast': ('fast', False, False, 2**30),
    'compiled': ('fast', True, False, 2**30),
    'recomputed': ('fast', False, False, 0),
    'plain, recomputed': ('plain', False, False, 0),
    'cuda_graphs': ('fast', True, True, 0),
}


def set_mode(model, mode):
    model.config.mode, compiling.fused.enabled, *others = MODES[mode]
    model.cuda_graphs, unroll.MAX_KEPT_BYTES = others


def reset(state, row):
    """Return the state with one stream reset, as at the start of a shard."""
    state = State(*(x.clone() for x in state))
    state.s[row], state.k[:, row], state.v[:, row], state.count[row] = 0, 0, 0, 0
    return state


def compare(model, T, chunks, reset_before, modes, rtol=1e-9, evaluate=True, carried=True, B=2):
    """Run chunks of T tokens in a row, changing the weights in between, and compare logits without
    gradients, loss, gradients and the new state with the reference after each. Every mode and the
    reference carry their own states (carried = False: every chunk stands alone, as in GPT's
    training); one stream is reset before chunk `reset_before`."""
    c = model.config
    other = make(type(model), 1, model.head.dtype, **vars(c))
    history = reference.History(model, B) if carried else None
    states = dict.fromkeys(modes, model.init_state(B) if carried else None)
    for chunk in range(chunks):
        exact = reference.exact(model)
        if chunk == reset_before:
            history.reset(1)
            states = {mode: reset(state, 1) for mode, state in states.items()}
        zero = ('wq', 'wk') if c.window == 1 else ()  # one entry: nothing to choose
        if T == 1 and not history.s.any():
            zero = ('wq', 'wk', 'layers.0.a')  # and no s yet
        x, y = tokens(B, T + 1, seed=chunk).unfold(1, T, 1).unbind(1)
        logits, after = reference.run(exact, x, history)
        loss = reference.loss_of(logits, y)
        grads = gradients(exact, loss)
        for mode in modes:
            set_mode(model, mode)
            if evaluate:
                with torch.no_grad():
                    assert_close(model(x, state=states[mode])[0], logits, rtol, what=mode)
            found, states[mode] = model(x, y, states[mode])
            if mode == 'cuda_graphs':  # another model of the same sizes in between
                other.cuda_graphs = True
                other(x, y)
            assert_close(found.cross_entropy, loss, rtol, what=mode)
            assert_same_gradients(model, gradients(model, found.objective), grads, rtol, zero)
            if carried:
                assert_same_state(states[mode].detach(), after.state(), rtol)
        history = after if carried else None
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.01)


def fake_graphed(graphs, name, function):
    """Stand in for compiling.graphed without CUDA: from the second call on, repeat that call."""
    if graphs is None:
        return function()
    calls, captured = graphs.get(name, (0, None))
    if calls == 1:
        captured = function
    graphs[name] = calls + 1, captured
    return (captured or function)()


OWN_CACHES = {'share_kv': False}
# Tokens per chunk, chunks, the chunk before which one stream is reset, and sizes of the model.
CASES = [
    (4, 3, 2, {'n_expert': 3, 'window': 3}),
    (4, 3, 2, {'aggregation': 'mean', 'n_expert': 3, 'window': 3}),
    (4, 3, 2, {'aggregation': 'softmax_mean', 'n_layer': 3, 'window': 3}),
    (4, 3, 2, {'aggregation': 'softmax_l2', 'n_kv_head': 1, 'window': 3}),
    (4, 3, 2, {'aggregation': 'sqrt_sum', 'n_kv_head': 4, 'window': 3, **OWN_CACHES}),
    (4, 3, 2, {'aggregation': 'mean', 'n_expert': 3, 'n_layer': 1, **OWN_CACHES}),
    (4, 3, 2, {'aggregation': 'softmax_l2', 'n_expert': 1, 'window': 3, **OWN_CACHES}),
    (4, 3, 2, {'n_layer': 1, 'n_expert': 1, 'window': 3}),
    # chunks from an empty, a partly filled and a full state, and of streams of different age
    (2, 5, 3, {'window': 5}),
    (5, 3, 1, {'window': 3}),
    (4, 2, 1, {'window': 1}),
    (1, 5, 3, {'window': 2, 'aggregation': 'softmax_mean', **OWN_CACHES}),
    # chunks of several blocks of 3 tokens, and of a shorter last one
    (8, 3, 2, {'window': 4, 'aggregation': 'softmax_l2', **OWN_CACHES}),
    (11, 3, 1, {'window': 7}),
    (9, 3, 2, {'window': 20, 'aggregation': 'mean'}),
]


@pytest.mark.parametrize('T, chunks, reset_before, sizes', CASES, ids=str)
def test_recurrent_is_the_reference(monkeypatch, T, chunks, reset_before, sizes):
    """The cases cover all modes, aggregations and sizes, with a shared cache and with one per
    expert. Segments have 3 tokens, and dK and dV are computed in groups of 2. In the mode
    `cuda_graphs` what was captured once is replayed with other weights and inputs."""
    monkeypatch.setattr(unroll, 'TILE', 3)
    monkeypatch.setattr(unroll, 'GROUP', 2)
    monkeypatch.setattr(compiling, 'compiled', lambda f: f)
    monkeypatch.setattr(unroll, 'graphed', fake_graphed)
    monkeypatch.setattr(unroll, 'can_capture', lambda x: True)
    compare(make(RecurrentGPT, **sizes), T, chunks, reset_before, MODES)
    captured = [x for block in unroll._segments.values() for x in (block.graphs or {}).values()]
    assert len(captured) >= 2 and all(function for _, function in captured)


GPTS = [
    {'aggregation': aggregation, 'residual': residual, 'n_expert': 3, 'n_kv_head': 1}
    for aggregation in AGGREGATIONS
    for residual in RESIDUALS
]


@pytest.mark.parametrize('sizes', [*GPTS, {'n_expert': 1}, {'n_kv_head': 4}], ids=str)
def test_gpt_is_the_reference(sizes):
    """Training attends to the whole chunk; the window of 4 limits only evaluation, where it spans
    chunks. With one expert the model is a standard Transformer."""
    model = make(GPT, **sizes)
    compare(model, 7, 2, None, ['fast'], carried=False)
    compare(model, 3, 3, 2, ['fast'])


def assert_near(model, grads, exact, rel, rel_matrices):
    """Compare gradients. Each is relative to its size, so that the gradient of a scalar cannot hide
    behind those of matrices."""
    for name in exact:
        if not always_zero(name, model):
            limit = rel_matrices if exact[name].dim() > 1 else rel
            error = (grads[name].double() - exact[name].double()).norm()
            assert error <= limit * exact[name].double().norm(), (name, error, exact[name].norm())


PRECISIONS = [
    (RecurrentGPT, {'n_expert': 3}),
    (RecurrentGPT, {'n_expert': 3, 'aggregation': 'softmax_mean', **OWN_CACHES}),
    (GPT, {'n_layer': 8, 'n_expert': 8}),  # the stream grows by sqrt(8) per layer
    (GPT, {'residual': 'shared'}),
]


@pytest.mark.parametrize('model_type, sizes', PRECISIONS, ids=str)
def test_fp32_and_bf16_are_near_the_reference(model_type, sizes):
    """For gradients at most 0.035 was measured in bf16 (matrices: 0.017), and 2e-6 in fp32."""
    # with this seed no scalar's gradient is a small difference of large terms (sizes within 2.2)
    model = make(model_type, 10, torch.float32, n_embd=64, **sizes)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.mul_(0.5)
    x, y, exact = tokens(4, 8), tokens(4, 8, seed=1), reference.exact(model)
    history = reference.run(exact, x)[1] if model.recurrent else None
    logits, history = reference.run(exact, x, history)
    loss = reference.loss_of(logits, y)
    grads = gradients(exact, loss)
    for bf16, mode in itertools.product((False, True), ('plain', 'fast')):
        model.config.mode = mode
        with torch.autocast('cpu', torch.bfloat16, enabled=bf16):
            _, state = model(x, y)
            found, state = model(x, y, state)
            s, _ = model.hidden(model.embedding[x], None)
        assert found.cross_entropy.dtype == s.dtype == torch.float32
        assert_close(found.cross_entropy, loss, rtol=3e-2 if bf16 else 1e-5)
        found = gradients(model, found.objective)
        assert all(x.dtype == torch.float32 for x in found.values())
        assert_near(model, found, grads, *((0.7, 0.35) if bf16 else (4e-5, 4e-5)))
        if state:
            kv_dtype = torch.bfloat16 if bf16 else torch.float32
            assert (state.s.dtype, state.k.dtype, state.v.dtype) == (s.dtype, kv_dtype, kv_dtype)
            if not bf16:
                assert_same_state(state, history.state(), rtol=1e-4)


@needs_compiler
@pytest.mark.parametrize('model_type', [RecurrentGPT, pytest.param(GPT, marks=pytest.mark.long)])
def test_compiled_by_inductor_is_the_reference(model_type):
    model = make(model_type, 0, torch.float32, window=3, n_layer=1)
    carried = model_type.recurrent
    span = (2, 2, 1) if carried else (8, 1, None)  # eleven functions to compile, or four
    compare(model, *span, ['compiled'], rtol=1e-4, evaluate=False, carried=carried)


def test_causal_attention_by_products(monkeypatch):
    """CPUs on which bfloat16 is fast run plain products, others torch's fused kernel."""
    rng = torch.Generator().manual_seed(0)
    q = torch.randn(2, 6, 5, 4, generator=rng).bfloat16()  # (B, A, T, K)
    k, v = torch.randn(2, 2, 3, 5, 4, generator=rng).bfloat16()  # (B, C, S, K) each
    monkeypatch.setattr(model_file, 'CPU_BF16_IS_FAST', True)
    found = model_file.attention(q, k, v, None)
    expected = model_file.attention(q.double(), k.double(), v.double(), None)  # the fused kernel
    assert_close(found.double(), expected, rtol=0.1)


# ---- chunks, caches, the state ----


def test_gradients_that_would_be_wrong_are_refused():
    """None flows into the chunk before, and the backwards written by hand treat what they save as
    constants."""
    model, x = make(RecurrentGPT), tokens(2, 3)
    loss, state = model(x, x)
    wanting = state._replace(v=state.v.clone().requires_grad_())
    with pytest.raises(ValueError, match='pass state.detach'):
        model(x, x, wanting)
    (grad,) = torch.autograd.grad(loss.objective, model.embedding, create_graph=True)
    with pytest.raises(RuntimeError, match='once_differentiable'):
        grad.square().sum().backward()


def test_a_linear_whose_input_has_no_gradient_is_trained(monkeypatch):
    """As after an edit that stops gradients into the router."""

    def route(w, s, z, config, real=model_file.route):
        return real(w, s.detach(), z.detach(), config)

    monkeypatch.setattr(model_file, 'route', route)
    model, x = make(RecurrentGPT, aggregation='softmax_l2'), tokens(2, 5)
    expected = None
    for mode in ('plain', 'fast', 'recomputed'):
        set_mode(model, mode)
        found = gradients(model, model(x, x)[0].objective)
        assert_same_gradients(model, found, expected or found)
        expected = found
    assert all(grad.any() for name, grad in found.items() if 'router_q' in name)


def test_weights_in_a_list_are_refused(monkeypatch):
    """Their gradients would be lost."""
    bind = model_file.LayerParams.bind
    monkeypatch.setattr(
        model_file.LayerParams,
        'bind',
        lambda *arguments: (w := bind(*arguments))._replace(up=[w.up]),
    )
    model, x = make(RecurrentGPT), tokens(2, 3)
    set_mode(model, 'fast')
    with pytest.raises(TypeError, match='weights in a list'):
        model(x, x)


@pytest.mark.parametrize('mode', ['fast', 'recomputed'])
def test_a_window_may_be_narrower_than_its_cache(monkeypatch, mode):
    """It equals a narrow window in a narrow cache, in blocks and groups of all lengths."""
    monkeypatch.setattr(unroll, 'TILE', 5)
    monkeypatch.setattr(unroll, 'GROUP', 2)
    narrow, wide = make(RecurrentGPT, window=3), make(RecurrentGPT, window=7)
    set_mode(wide, mode)
    wide(tokens(2, 8), tokens(2, 8))  # blocks that are kept must not keep the window
    for module in wide.layers:
        module.window = 3
    narrow_state = wide_state = None
    for seed in range(3):
        x = tokens(2, 8, seed=seed)
        expected, narrow_state = narrow(x, x, narrow_state)
        found, wide_state = wide(x, x, wide_state)
        grads = (gradients(narrow, expected.objective), gradients(wide, found.objective))
        assert_same_gradients(wide, *reversed(grads))


class LearnedState(RecurrentGPT):
    """An edit: the first state is a parameter."""

    def hidden(self, z, state):
        state = self.init_state(len(z))
        return super().hidden(z, state._replace(s=self.first.expand_as(state.s)))


def ffn_alone(weights, s, z, caches, config):
    """An edit: a step whose second layer does not attend."""
    first, second = weights
    s = run_layer(first, s, z, caches[0], config)
    u, x = mix_state_and_token(s, z, second.a, second.b, second.dtype)
    return u + second.down(activation(second.up(x[None])))[0]


@pytest.mark.parametrize('edit', ['a learned state', 'a layer without attention'])
def test_recomputed_chunks_follow_an_edit(monkeypatch, edit):
    """Gradients are those of chunks that are kept."""
    monkeypatch.setattr(unroll, 'TILE', 4)
    monkeypatch.setattr(unroll, 'GROUP', 2)
    model = make(RecurrentGPT, n_layer=2, n_expert=1)
    if edit == 'a learned state':
        model.__class__ = LearnedState
        model.first = torch.nn.Parameter(torch.full((model.config.n_embd,), 0.3).double())
    else:
        monkeypatch.setattr('model.step', ffn_alone)
    x, grads = tokens(2, 10), {}
    for mode in ('fast', 'recomputed'):
        set_mode(model, mode)
        loss, _ = model(x, x)
        loss.objective.backward()
        grads[mode] = {name: p.grad for name, p in model.named_parameters()}
        model.zero_grad()
    kept = {name: x for name, x in grads['fast'].items() if x is not None}
    assert ('first' in kept) == (edit == 'a learned state')
    for name, expected in kept.items():
        found = grads['recomputed'][name]
        assert found is not None, name
        assert_close(found, expected)


def test_a_chunk_is_freed_without_the_garbage_collector(monkeypatch):
    """With a reference cycle, chunks would pile up, and the capture of a CUDA graph would meet the
    nodes of an earlier one."""
    windows = weakref.WeakSet()

    class ChunkCache(unroll.ChunkCache):
        def __init__(self, *args):
            super().__init__(*args)
            windows.add(self)

    monkeypatch.setattr(unroll, 'ChunkCache', ChunkCache)
    model, x = make(RecurrentGPT), tokens(2, 7)
    gc.disable()
    try:
        loss, _ = model(x, x)
        assert len(windows) == len(model.layers)
        loss.objective.backward()
        del loss
        assert not windows
    finally:
        gc.enable()


# ---- head and loss ----


@pytest.mark.parametrize('rows', [1, 3, 10, 1000])
def test_head_loss(monkeypatch, rows):
    """Value and gradients equal those of cross_entropy, in slices that do and do not divide the
    rows, with logits beyond the cap, and for a sum of losses."""
    monkeypatch.setattr(model_file, 'LOGITS_PER_SLICE', {'cpu': rows * V})
    rng, targets = torch.Generator().manual_seed(0), tokens(10)
    x, w = (torch.randn(n, 6, dtype=torch.float64, generator=rng).mul_(5) for n in (10, V))
    x, w = x.requires_grad_(), w.requires_grad_()
    assert (x @ w.t()).abs().max() > 15

    def sliced(x, w):
        return model_file.head_loss(x, w, targets, None).objective

    def exact(x, w):
        return F.cross_entropy(15 * torch.tanh(x @ w.t() / 15), targets)

    losses = [3 * f(x, w) - f(x.flip(0) / 2, w) for f in (sliced, exact)]
    found, expected = ((loss, *torch.autograd.grad(loss, (x, w))) for loss in losses)
    for a, b in zip(found, expected, strict=True):
        assert_close(a, b, 1e-12)
    with torch.no_grad():
        assert_close(sliced(x, w), exact(x, w), 1e-12)


def test_targets_that_are_not_one_for_each_token_are_refused():
    model, x = make(RecurrentGPT), tokens(2, 5)
    for targets in (tokens(2, 6), x.T):
        with pytest.raises(ValueError, match='expected a target for each token'):
            model(x, targets)
    with pytest.raises(IndexError, match='-100 is out of bounds'):
        model(x, torch.where(x == x[0, 0], -100, x))


def test_the_loss_of_a_model_in_bf16_is_summed_in_fp32(monkeypatch):
    monkeypatch.setattr(model_file, 'LOGITS_PER_SLICE', {'cpu': V})  # one row per slice
    x = torch.zeros(1000, 6, dtype=torch.bfloat16)
    loss = model_file.head_loss(x, torch.zeros(V, 6).to(x), tokens(1000), None)
    assert loss.cross_entropy.item() == pytest.approx(math.log(V), rel=1e-3)


def test_terms_of_the_objective_are_for_training_only(monkeypatch):
    """A z-loss changes the objective and its gradients, and no reported loss."""
    model, x = make(RecurrentGPT), tokens(2, 5)
    plain = model(x, x)[0]

    def losses(logits, targets, config, real=model_file.losses):
        objective, cross_entropy = real(logits, targets, config)
        return objective + 0.1 * logits.logsumexp(-1).square().sum(), cross_entropy

    monkeypatch.setattr(model_file, 'losses', losses)
    loss = model(x, x)[0]
    with torch.no_grad():
        validation = model(x, x)[0]
    for reported in (loss.cross_entropy, *validation):
        assert_close(reported, plain.cross_entropy)
    assert loss.objective > plain.objective + 0.1
    heads = [gradients(model, x.objective)['head'] for x in (loss, plain)]
    assert (heads[0] - heads[1]).norm() > 1e-3


# ---- sizes, groups, refusals ----


def build(model_type, **changes):
    """Return a model without memory, of any size."""
    with torch.device('meta'):
        return model_type(ModelConfig(**changes))


@both
def test_sizes_by_hand(model_type):
    """A block has 11 d^2 weights and takes two FLOPs for each, and 4 W d for attention. Routers
    are added to that."""
    L, E = 2, 8
    sizes = {'n_layer': L, 'n_expert': E, 'n_embd': 768, 'block_size': 256, 'router_dim': 7}
    model, block, ends = build(model_type, **sizes), 11 * 768**2, 50304 * 768
    n, flops = model.num_params(), model.flops_per_token()
    core = 16 * block + (2 * L if model.recurrent else 0)
    assert n == {'total': core + 2 * ends, 'embedding': ends, 'head': ends, 'core': core}
    attention = 16 * 4 * 768 * (128 if model.recurrent else 128.5)
    assert flops == {'core': 2 * 16 * block + attention, 'head': 2 * ends}
    routed = build(model_type, aggregation='softmax_l2', **sizes)
    router = L * (7 * 2 * 768 + 7 * 7 + 7 + E * 7)
    assert routed.num_params()['core'] - core == router
    assert routed.flops_per_token()['core'] - flops['core'] == L * 2 * (7 * 2 * 768 + E * 7)


def test_sizes_follow_edits(monkeypatch):
    """A gated FFN, layers that run twice and a tied head, as in tests/hacks, count in the
    parameters and in the FLOPs, by which costs are compared."""

    class Looped(RecurrentGPT):
        n_caches = property(lambda self: 2 * len(self.layers))

    class Gated(model_file.LayerParams):
        def __init__(self, config, *options):
            super().__init__(config, *options)
            self.up = torch.nn.Parameter(torch.empty(config.n_expert, 8 * 768, 768))

    routed = {'aggregation': 'softmax_l2'}
    model, looped, tied = (build(x, **routed) for x in (RecurrentGPT, Looped, RecurrentGPT))
    n, flops = model.num_params(), model.flops_per_token()
    assert looped.flops_per_token() == {'core': 2 * flops['core'], 'head': flops['head']}
    tied.head = tied.embedding
    assert tied.num_params() == {**n, 'head': 0, 'total': n['total'] - n['head']}
    assert tied.flops_per_token() == flops
    one_layer = build(RecurrentGPT, **routed)
    one_layer.layers = torch.nn.ModuleList([one_layer.layers[0]] * len(one_layer.layers))
    assert one_layer.flops_per_token() == flops  # the work is the same
    monkeypatch.setattr(model_file, 'LayerParams', Gated)
    gated, more = build(RecurrentGPT, **routed), 2 * 8 * 4 * 768 * 768  # L E 4 D^2 weights
    assert gated.num_params()['core'] - n['core'] == more
    assert gated.flops_per_token()['core'] - flops['core'] == 2 * more


def test_a_head_that_is_tied_to_the_embedding_is_trained_once():
    tied = make(RecurrentGPT)
    tied.head = tied.embedding
    grouped = [p for group in tied.param_groups().values() for p in group]
    assert len(grouped) == len(set(grouped)) == len(list(tied.parameters()))


REFUSED = [
    {'n_embd': 100},  # neither heads of 96 nor of 64
    {'window': 0},
    {'n_head': 5, 'n_embd': 96},
    {'n_head': 4, 'n_embd': 12},  # RoPE needs heads of an even size
    {'n_head': -1},
    {'n_kv_head': 3, 'n_head': 8},
    {'aggregation': 'sum'},
    {'n_layer': [2, 4]},
]


@pytest.mark.parametrize('sizes', REFUSED, ids=str)
def test_sizes_that_do_not_fit_are_refused_by_name(sizes):
    name = next(iter(sizes))
    assert_refused(f'^{name} = ', ModelConfig, **sizes)


@pytest.mark.parametrize('recurrent, init_b, b', [(True, 'sqrt_experts', 3), (False, 'one', None)])
def test_initialization(recurrent, init_b, b):
    """The first loss is ln V. a is 1; wo, down and head are 0; all other matrices are uniform with
    standard deviation 0.5 / sqrt(fan_in)."""
    torch.manual_seed(0)
    sizes = {'vocab_size': 300, 'n_embd': 128, 'n_expert': 9, 'aggregation': 'softmax_l2'}
    model, x = build_model(ModelConfig(**sizes, init_b=init_b), recurrent), tokens(2, 4, vocab=300)
    assert abs(model(x, x)[0].objective.item() - math.log(300)) < 1e-5
    assert abs(model.embedding.std() - 1) < 0.02
    for name, p in model.layers[1].named_parameters():
        if name in ('wo', 'down', 'router_q_bias'):
            assert not p.any(), name
        elif name in ('a', 'b'):
            assert p == (1 if name == 'a' else b), name
        elif name == 'expert_embedding':
            assert 0.8 < p.std() < 1.2
        else:
            assert abs(p.std() * math.sqrt(p.size(-1)) - 0.5) < 0.03, name
            assert p.abs().max() <= 0.5 * math.sqrt(3 / p.size(-1)), name

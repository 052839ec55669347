"""Test layer.py, model.py, unroll.py, recompute.py and kernels.py: every mode of both models is
compared with reference.py in values, gradients and states, chunk by chunk. Then follow tests of
states, head and loss, buffers and sizes."""

import functools
import gc
import math
import shutil
from typing import NamedTuple

import pytest
import reference
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounter
from reference import V, always_zero, assert_close, assert_same_gradients, assert_same_state
from reference import gradients, make, tokens

import forms
import graphs
import kernels
import layer
import loss as loss_file
import model as model_file
import recompute
import unroll
from common import Gradients
from small_runs import assert_refused

from model import AGGREGATIONS, GPT, ModelConfig, RecurrentGPT, State, build_model

MODELS = [RecurrentGPT, GPT]
both = pytest.mark.parametrize('model_type', MODELS)
modes = pytest.mark.parametrize(
    'model_type, mode', [(RecurrentGPT, 'plain'), (RecurrentGPT, 'fast'), (GPT, 'fast')]
)
needs_compiler = pytest.mark.skipif(
    not (shutil.which('g++') or shutil.which('clang++')),
    reason='torch.compile needs a C++ compiler on the CPU',
)


@pytest.fixture(autouse=True)
def default_mode(monkeypatch):
    monkeypatch.setattr(recompute, 'KEPT_BYTES', recompute.KEPT_BYTES)  # compare() sets it
    monkeypatch.setattr(graphs.fused, 'enabled', False)
    recompute.release()


# ---- every mode equals the reference ----

# name: config.mode, fused.enabled, model.graphs, bytes of attention weights kept for the backward
MODES = {
    'plain': ('plain', False, False, 2**30),
    'fast': ('fast', False, False, 2**30),
    'compiled': ('fast', True, False, 2**30),
    'recomputed': ('fast', False, False, 0),
    'plain, recomputed': ('plain', False, False, 0),
    'graphs': ('fast', True, True, 0),
}


def set_mode(model, mode):
    model.config.mode, graphs.fused.enabled, model.graphs, recompute.KEPT_BYTES = MODES[mode]


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
            if mode == 'graphs':  # another model of the same sizes in between
                other.graphs = True
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
    """Stand in for graphs.graphed without CUDA: from the second call on, repeat that call."""
    if graphs is None:
        return function()
    calls, captured = graphs.get(name, (0, None))
    if calls == 1:
        captured = function
    graphs[name] = calls + 1, captured
    return (captured or function)()


class Case(NamedTuple):
    """Sizes of a recurrent model, and chunks of a stream."""

    L: int = 2
    E: int = 3
    G: int = 2
    W: int = 3
    T: int = 4
    chunks: int = 3
    reset: int = 2  # the chunk before which one stream is reset
    aggregation: str = 'sqrt_sum'
    share_kv: bool = True


CASES = [Case(aggregation=name, share_kv=share) for name in AGGREGATIONS for share in (True, False)]
for sizes in ({'L': 1, 'E': 1}, {'L': 3, 'E': 1}, {'L': 1, 'E': 3}, {'L': 3, 'E': 2}):
    CASES += [Case(**sizes, share_kv=False), Case(**sizes, aggregation='softmax_l2')]
CASES += [Case(G=G, share_kv=share) for G in (1, 4) for share in (True, False)]
# chunks from an empty, a partly filled and a full state, and of streams of different age
for sizes in (
    {'E': 2, 'W': 5, 'T': 2, 'chunks': 5, 'reset': 3},
    {'E': 2, 'W': 3, 'T': 5, 'chunks': 3, 'reset': 1},
    {'E': 2, 'W': 1, 'T': 4, 'chunks': 2, 'reset': 1},
    {'E': 2, 'W': 2, 'T': 1, 'chunks': 5, 'reset': 3},
):
    CASES += [Case(**sizes), Case(**sizes, aggregation='softmax_mean', share_kv=False)]
# chunks of several blocks of 3 tokens, and of a shorter last one
CASES += [
    Case(E=2, W=4, T=8, aggregation='softmax_l2', share_kv=False),
    Case(E=2, W=7, T=11, reset=1),
    Case(E=2, W=2, T=7, aggregation='softmax_mean', share_kv=False),
    Case(E=2, W=20, T=9, aggregation='mean'),
]


@pytest.mark.parametrize('case', CASES, ids=str)
def test_recurrent_is_the_reference(monkeypatch, case):
    """The cases cover all modes, aggregations and sizes, with a shared cache and with one per
    expert. Blocks have 3 tokens, and dK and dV are computed in groups of 2. In the mode `graphs`
    what was captured once is replayed with other weights and inputs."""
    monkeypatch.setattr(unroll, 'BLOCK', 3)
    monkeypatch.setattr(unroll, 'GROUP', 2)
    monkeypatch.setattr(graphs, 'compiled', lambda f: f)
    monkeypatch.setattr(recompute, 'graphed', fake_graphed)
    monkeypatch.setattr(recompute, 'can_capture', lambda x: True)
    model = make(
        RecurrentGPT,
        n_layer=case.L,
        n_expert=case.E,
        n_kv_head=case.G,
        window=case.W,
        aggregation=case.aggregation,
        share_kv=case.share_kv,
    )
    compare(model, case.T, case.chunks, case.reset, MODES)
    captures = [block.graphs for block in recompute._blocks.values() if block.graphs is not None]
    functions = [captured for one in captures for _, captured in one.values()]
    assert None not in functions and len(functions) >= 2
    for (
        block
    ) in recompute._blocks.values():  # a kept gradient node would bind captures to its stream
        assert not any(x.requires_grad for x in recompute.tensors_of(block.layers))


@pytest.mark.parametrize(
    'aggregation, residual', [(a, r) for a in AGGREGATIONS for r in ('expert', 'shared')]
)
@pytest.mark.parametrize('E, G', [(1, 2), (3, 1), (3, 4)])
def test_gpt_is_the_reference(E, G, aggregation, residual):
    """Training attends to the whole chunk; the window of 4 limits only evaluation, where it spans
    chunks. With one expert the model is a standard Transformer."""
    changes = {'n_expert': E, 'n_kv_head': G, 'aggregation': aggregation, 'residual': residual}
    model = make(GPT, **changes)
    assert model(tokens(2, 3))[1] is None
    compare(model, 7, 2, None, ['fast'], carried=False)
    compare(model, 5, 3, 2, ['fast'])


def assert_near(model, grads, exact, rel=0.7):
    """Compare gradients. Each is relative to its size, so that the gradient of a scalar cannot hide
    behind those of matrices. At most 0.035 was measured in bf16, and 2e-6 in fp32."""
    for name in exact:
        if not always_zero(name, model):
            error = (grads[name].double() - exact[name].double()).norm()
            assert error <= rel * exact[name].double().norm(), (name, error, exact[name].norm())


@pytest.mark.parametrize('aggregation', ['sqrt_sum', 'softmax_mean'])
@pytest.mark.parametrize('share_kv', [True, False])
def test_recurrent_in_fp32_and_bf16(aggregation, share_kv):
    # with this seed no scalar's gradient is a small difference of large terms (sizes within 2.2)
    changes = {'n_embd': 64, 'n_expert': 3, 'aggregation': aggregation, 'share_kv': share_kv}
    model = make(RecurrentGPT, 10, torch.float32, **changes)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.mul_(0.5)
    x, y, exact = tokens(4, 8), tokens(4, 8, seed=1), reference.exact(model)
    _, history = reference.run(exact, x, reference.History(exact, 4))
    logits, history = reference.run(exact, x, history)
    loss = reference.loss_of(logits, y)
    grads = gradients(exact, loss)
    for bf16 in (False, True):
        for mode in ('plain', 'fast'):
            model.config.mode = mode
            with torch.autocast('cpu', torch.bfloat16, enabled=bf16):
                _, state = model(x, y, model.init_state(4))
                found, state = model(x, y, state)
            found_loss = found.cross_entropy
            assert found_loss.dtype == state.s.dtype == torch.float32
            assert state.k.dtype == state.v.dtype == (torch.bfloat16 if bf16 else torch.float32)
            g = gradients(model, found.objective)
            assert all(x.dtype == torch.float32 for x in g.values())
            if bf16:
                assert_close(found_loss, loss, rtol=3e-2)
                assert_near(model, g, grads)
            else:
                assert_close(found_loss, loss, rtol=1e-5)
                assert_same_gradients(model, g, grads, rtol=1e-5)
                assert_same_state(state, history.state(), rtol=1e-4)


@needs_compiler
@pytest.mark.parametrize('model_type', [RecurrentGPT, pytest.param(GPT, marks=pytest.mark.long)])
def test_compiled_by_inductor_is_the_reference(model_type):
    model = make(model_type, 0, torch.float32, window=3, n_layer=1)
    carried = model_type.recurrent
    span = (2, 2, 1) if carried else (8, 1, None)  # nine functions to compile, or one
    compare(model, *span, ['compiled'], rtol=1e-4, evaluate=False, carried=carried)


def test_gpt_compiles_one_layer_for_all(monkeypatch):
    counter = CompileCounter()
    compile_once = functools.cache(lambda f: torch.compile(f, backend=counter, dynamic=False))
    monkeypatch.setattr(graphs, 'compiled', compile_once)
    model = make(GPT, 0, torch.float32, n_layer=3)
    graphs.fused.enabled = True
    s, _ = model.hidden(model.embedding[tokens(2, 5)], None)
    s.sum().backward()
    assert counter.frame_count == 1


@pytest.mark.parametrize('residual', ['expert', 'shared'])
def test_gpt_of_eight_layers_and_experts_in_bf16(residual):
    """The paper's rule multiplies the stream by sqrt(8) per layer: it stays in fp32."""
    sizes = {'n_layer': 8, 'n_expert': 8, 'n_embd': 64, 'n_head': 2, 'n_kv_head': 1}
    model = make(GPT, dtype=torch.float32, residual=residual, **sizes)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)
    x, y = tokens(2, 8), tokens(2, 8, seed=1)

    def run():
        s, _ = model.hidden(kernels.norm(model.embedding[x]), None)
        loss, _ = model(x, y)
        return s, loss.objective, gradients(model, loss.objective)

    with torch.autocast('cpu', torch.bfloat16):
        s, loss, grads = run()
    s_fp32, loss_fp32, grads_fp32 = run()
    assert s.dtype == torch.float32
    model.double()
    exact, exact_loss, exact_grads = run()
    assert_close(s, exact, rtol=0.2)
    assert_close(loss, exact_loss, rtol=3e-2)
    assert_near(model, grads, exact_grads)
    assert_close(s_fp32, exact, rtol=1e-5)
    assert_close(loss_fp32, exact_loss, rtol=1e-5)
    assert_near(model, grads_fp32, exact_grads, rel=1e-3)
    if residual == 'expert':
        assert exact.pow(2).mean().sqrt() > 8**4  # sqrt(8)^8 times the embedding's


@pytest.mark.parametrize('by_products', [True, False])
def test_causal_attention_in_bf16(monkeypatch, by_products):
    """CPUs on which bfloat16 is fast run plain products, others the fused kernel."""
    monkeypatch.setattr(model_file, 'CPU_BF16_IS_FAST', by_products)
    rng = torch.Generator().manual_seed(0)
    q = torch.randn(2, 6, 5, 4, generator=rng).bfloat16()  # (B, A, T, K)
    k, v = torch.randn(2, 2, 3, 5, 4, generator=rng).bfloat16()  # (B, C, S, K) each
    scores = q.double() @ k.double().repeat_interleave(2, 1).mT
    scores += torch.full((5, 5), -math.inf).triu(1)
    expected = scores.softmax(-1) @ v.double().repeat_interleave(2, 1)
    assert_close(model_file.attention(q, k, v, None).double(), expected, rtol=0.1)


# ---- chunks, caches, the state ----


@modes
def test_incoming_state_is_left_alone(model_type, mode):
    """The forward writes nothing into it, and changing it in place after the forward does not
    change the backward."""
    model, x = make(model_type, mode=mode), tokens(2, 3)
    _, state = model(x, state=model.init_state(2))
    state = state.detach()
    before = [part.clone() for part in state]
    expected = gradients(model, model(x, x, state)[0].objective)
    loss, new = model(x, x, state)
    assert all(map(torch.equal, state, before))
    if model.recurrent:
        for part in (new.k, new.v, state.k, state.v):
            part.detach().fill_(3.0)
    assert_same_gradients(model, gradients(model, loss.objective), expected)


@modes
def test_a_state_that_requires_a_gradient_is_refused(model_type, mode):
    """None would flow into the chunk before. The state that a chunk returns requires none."""
    model, x = make(model_type, mode=mode), tokens(2, 3)
    loss, state = model(x, x, model.init_state(2))
    assert loss.objective.requires_grad and not any(part.requires_grad for part in state)
    wanting = state._replace(v=state.v.clone().requires_grad_())
    with pytest.raises(ValueError, match='pass state.detach'):
        model(x, x, wanting)
    with torch.no_grad():
        model(x, x, wanting)


def test_a_window_may_be_narrower_than_its_cache(monkeypatch):
    """It equals a narrow window in a narrow cache, in blocks and groups of all lengths."""
    monkeypatch.setattr(unroll, 'BLOCK', 5)
    monkeypatch.setattr(unroll, 'GROUP', 2)
    narrow, wide = make(RecurrentGPT, window=3), make(RecurrentGPT, window=7)
    Window = unroll.Window

    def run(model, mode):
        set_mode(model, mode)
        found, state = [], None
        for seed in range(3):
            x = tokens(2, 8, seed=seed)
            loss, state = model(x, x, state)
            found.append(gradients(model, loss.objective))
        return found

    expected = run(narrow, 'plain')
    monkeypatch.setattr(unroll, 'Window', lambda slots, k, v, width: Window(slots, k, v, 3))
    for mode in ('fast', 'recomputed'):
        for grads, exact in zip(run(wide, mode), expected, strict=True):
            assert_same_gradients(wide, grads, exact)


# ---- head and loss ----


HEAD = [(rows, torch.float64, False, 1e-12) for rows in (1, 3, 10, 1000)]
HEAD += [(5, torch.float32, False, 1e-5), (5, torch.float32, True, 3e-2)]


@pytest.mark.parametrize('rows, dtype, bf16, rtol', HEAD)
def test_head_loss(monkeypatch, rows, dtype, bf16, rtol):
    """Value and gradients equal those of cross_entropy: in slices that do and do not divide the
    rows, with logits beyond the cap, for a sum of losses, and if w needs no gradient. Without
    gradients none is computed."""
    monkeypatch.setattr(loss_file, 'LOGITS_PER_SLICE', {'cpu': rows * V})
    rng, targets = torch.Generator().manual_seed(0), tokens(10)
    x, w = (torch.randn(n, 6, dtype=dtype, generator=rng).mul_(5) for n in (10, V))
    x, w = x.requires_grad_(), w.requires_grad_()
    assert (x @ w.t()).abs().max() > 15

    def sliced(x, w):
        with torch.autocast('cpu', torch.bfloat16, enabled=bf16):
            return loss_file.head_loss(x, w, targets, None).objective

    def exact(x, w):
        return F.cross_entropy(15 * torch.tanh(x @ w.t() / 15), targets)

    losses = [3 * f(x, w) - f(x.flip(0) / 2, w) for f in (sliced, exact)]
    found, expected = ((loss, *torch.autograd.grad(loss, (x, w))) for loss in losses)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == dtype
        assert_close(a, b, rtol)
    found, expected = (torch.autograd.grad(f(x, w.detach()), x)[0] for f in (sliced, exact))
    assert_close(found, expected, rtol)
    monkeypatch.setattr(torch, 'zeros_like', lambda *_: pytest.fail('a gradient under no_grad'))
    with torch.no_grad():
        assert_close(sliced(x, w), exact(x, w), rtol)


@both
def test_a_state_made_outside_of_autocast_is_taken_within(model_type):
    """Its keys and values are cast to the dtype of the products."""
    model, x = make(model_type, dtype=torch.float32), tokens(2, 4)
    state = model.init_state(2)
    with torch.autocast('cpu', torch.bfloat16):
        expected, _ = model(x, state=model.init_state(2))
        found, new = model(x, state=state)
    assert state.k.dtype == torch.float32 and new.k.dtype == torch.bfloat16
    assert torch.equal(found, expected)


def test_slices_on_apples_gpus_are_those_of_a_cpu():
    assert loss_file.rows_per_slice(10**6, V, 'mps') == loss_file.rows_per_slice(10**6, V, 'cpu')


def test_a_trial_of_forms_takes_a_parameter_that_nothing_uses():
    """As tests/hacks/f_gated_state.patch has one in every layer but the first."""

    class Hacked(RecurrentGPT):
        def __init__(self, config):
            super().__init__(config)
            self.unused = torch.nn.Parameter(torch.ones(3))

    model = make(Hacked, n_layer=1)
    results = forms.make_trial(model, 2)(True)  # the loss, s, keys, values, and all gradients
    assert len(results) == 4 + len(list(model.parameters()))


def test_terms_of_the_objective_are_for_training_only(monkeypatch):
    """A z-loss changes the objective and its gradients, and no reported loss."""
    model, x = make(RecurrentGPT), tokens(2, 5)
    plain = model(x, x)[0]
    plain_grad = gradients(model, plain.objective)['head']

    def losses(logits, targets, config, real=loss_file.losses):
        objective, cross_entropy = real(logits, targets, config)
        z = torch.logsumexp(loss_file.softcap(logits), -1).square().sum()
        return objective + 0.1 * z, cross_entropy

    monkeypatch.setattr(loss_file, 'losses', losses)
    loss = model(x, x)[0]
    with torch.no_grad():
        validation = model(x, x)[0]
    for reported in (loss.cross_entropy, *validation):
        assert_close(reported, plain.cross_entropy)
    assert loss.objective > plain.objective + 0.1
    assert (gradients(model, loss.objective)['head'] - plain_grad).norm() > 1e-3


# ---- the chunk's buffers ----


@pytest.mark.parametrize('first', [0, 1])
def test_two_forwards_before_the_backwards(first):
    """Chunks that are alive do not share memory, and a dropped one does not disturb them."""
    model = make(RecurrentGPT)
    xs = [tokens(2, 5, seed=i) for i in range(2)]
    expected = [gradients(model, model(x, x)[0].objective) for x in xs]
    losses = [model(x, x)[0].objective for x in xs]
    dropped = model(tokens(2, 5, seed=2), xs[0])
    for i in (first, 1 - first):
        assert_same_gradients(model, gradients(model, losses[i]), expected[i])
    del dropped
    loss = sum(model(x, x)[0].objective for x in xs)  # both in one backward
    together = {name: expected[0][name] + expected[1][name] for name in expected[0]}
    assert_same_gradients(model, gradients(model, loss), together)


def test_a_second_backward_of_a_chunk_is_refused():
    model, x = make(RecurrentGPT), tokens(2, 5)
    loss = model(x, x)[0].objective
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match='second'):
        loss.backward()


@modes
def test_a_gradient_of_a_gradient_is_refused(model_type, mode):
    """The backwards written by hand treat what they save as constants, so it would be wrong."""
    model, x = make(model_type, mode=mode), tokens(2, 3)
    loss = model(x, x)[0].objective
    (grad,) = torch.autograd.grad(loss, model.embedding, create_graph=True)
    with pytest.raises(RuntimeError, match='once_differentiable'):
        grad.square().sum().backward()


def test_forward_without_gradients(monkeypatch):
    model, x = make(RecurrentGPT), tokens(2, 5)
    with torch.inference_mode():  # memory made here serves later
        first = model(x, x)[0].objective.clone()
    loss, state = model(x, x)
    loss.objective.backward()
    message = 'kept something for a backward that never comes'
    monkeypatch.setattr(torch.Tensor, 'register_hook', lambda *_: pytest.fail(message))
    with torch.no_grad():
        value, same = model(x, x)
    assert_same_state(same, state.detach(), rtol=1e-12)
    model.requires_grad_(False)
    for found in (first, value.objective, model(x, x)[0].objective):
        assert_close(found, loss.objective.detach(), rtol=1e-12)


@pytest.mark.parametrize('backward', [True, False])
def test_a_chunk_is_freed_without_the_garbage_collector(monkeypatch, backward):
    """A chunk with reference cycles would stay alive: chunks would pile up, and the capture of a
    CUDA graph would meet the nodes of an earlier one."""
    monkeypatch.setattr(unroll, 'BLOCK', 3)
    model, x, alive = make(RecurrentGPT), tokens(2, 7), []
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            loss = model(x, x)[0].objective
            if backward:
                loss.backward()
            del loss
            live = unroll.DeferredLinear | unroll.Window
            alive.append(sum(isinstance(found, live) for found in gc.get_objects()))
    finally:
        gc.enable()
    assert alive[0] == alive[2] < 20  # of one chunk at most


def test_gradients_accumulate_over_chunks_of_other_sizes():
    """Buffers kept for one size are not used for another."""
    model = make(RecurrentGPT)
    expected = []
    for x in (tokens(2, 5), tokens(2, 3), tokens(1, 5), tokens(2, 5, seed=1)):
        expected.append(gradients(model, reference.loss_of(reference.run(model, x)[0], x)))
        model(x, x)[0].objective.backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    assert_same_gradients(model, found, {name: sum(g[name] for g in expected) for name in found})


def test_frozen_layers_get_no_gradient():
    model, x = make(RecurrentGPT), tokens(2, 5)
    expected = gradients(model, model(x, x)[0].objective)
    model.layers.requires_grad_(False)
    model(x, x)[0].objective.backward()
    assert_close(model.embedding.grad, expected['embedding'])
    assert model.layers[0].wq.grad is None


# ---- sizes, groups, refusals ----


def build(model_type, **changes):
    """Return a model without memory, of any size."""
    with torch.device('meta'):
        return model_type(ModelConfig(**changes))


@both
@pytest.mark.parametrize('L, E', [(16, 1), (2, 8), (1, 16)])
def test_sizes_by_hand(model_type, L, E):
    """A block has 11 d^2 weights and takes two FLOPs for each, and 4 W d for attention. Routers
    are added to that."""
    sizes = {'n_layer': L, 'n_expert': E, 'n_embd': 768, 'block_size': 256, 'router_dim': 7}
    model, block, ends = build(model_type, **sizes), 11 * 768**2, 50304 * 768
    n, flops = model.num_params(), model.flops_per_token()
    core = 16 * block + (2 * L if model.recurrent else 0)
    assert n == {'total': core + 2 * ends, 'embedding': ends, 'head': ends, 'core': core}
    attention = 16 * 4 * 768 * (128 if model.recurrent else 128.5)
    assert flops == {'core': 2 * 16 * block + attention, 'head': 2 * ends}
    routed = build(model_type, aggregation='softmax_l2', **sizes)
    router = L * (7 * 2 * 768 + 7 * 7 + 7 + 7 + E * 7)
    assert routed.num_params()['core'] - core == router
    assert routed.flops_per_token()['core'] - flops['core'] == L * 2 * (7 * 2 * 768 + E * 7)


def test_sizes_follow_an_edited_layer(monkeypatch):
    """README's gated FFN counts in the parameters and in the FLOPs, by which costs are compared."""

    class Gated(model_file.Layer):
        def __init__(self, config, recurrent):
            super().__init__(config, recurrent)
            self.up = torch.nn.Parameter(torch.empty(config.n_expert, 8 * 768, 768))

    before = build(RecurrentGPT)
    monkeypatch.setattr(model_file, 'Layer', Gated)
    after, more = build(RecurrentGPT), 2 * 8 * 4 * 768 * 768  # L E 4 D^2 weights
    assert after.num_params()['core'] - before.num_params()['core'] == more
    assert after.flops_per_token()['core'] - before.flops_per_token()['core'] == 2 * more


def test_layers_that_run_twice_cost_twice():
    class Looped(RecurrentGPT):
        n_caches = property(lambda self: 2 * len(self.layers))

    for changes in ({}, {'aggregation': 'softmax_l2'}):
        once, twice = (build(x, **changes).flops_per_token() for x in (RecurrentGPT, Looped))
        assert twice == {'core': 2 * once['core'], 'head': once['head']}


def test_a_head_that_is_tied_to_the_embedding_counts_once():
    """Its product costs as much as that of a separate head."""
    model, tied = make(RecurrentGPT), make(RecurrentGPT)
    tied.head = tied.embedding
    n, other = model.num_params(), tied.num_params()
    assert other == {**n, 'head': 0, 'total': n['total'] - n['head']}
    assert tied.flops_per_token() == model.flops_per_token()
    grouped = [p for group in tied.param_groups().values() for p in group]
    assert len(grouped) == len(set(grouped)) == len(list(tied.parameters()))
    assert len(Gradients(tied.parameters(), n_extra=0).params) == len(grouped)
    tied.init_weights()
    assert 0.01 < tied.head.std() < 0.03  # neither zero nor as large as an embedding


REFUSED = """n_embd=100 n_embd=0 n_embd=320 n_head=5,n_embd=96 n_head=4,n_embd=12 n_head=-1
    n_kv_head=3,n_head=8 n_kv_head=-2 aggregation=sum residual=none mode=slow window=0"""


@pytest.mark.parametrize('line', REFUSED.split())
def test_sizes_that_do_not_fit_are_refused_by_name(line):
    pairs = (pair.split('=') for pair in line.split(','))
    changes = {name: x if x.isalpha() else int(x) for name, x in pairs}
    name, value = next(iter(changes.items()))
    with pytest.raises(ValueError, match=f'^{name} = {value!r}'):
        ModelConfig(**changes)


def test_equations_refuse_unknown_names():
    h = torch.zeros(2, 3, 4)
    with pytest.raises(ValueError, match="'sum'"):
        layer.aggregate(h, torch.ones(3, 2), 'sum')
    with pytest.raises(ValueError, match="'none'"):
        layer.merge(h, h, h[0], None, 'sqrt_sum', 'none')


@pytest.mark.parametrize('recurrent', [True, False])
@pytest.mark.parametrize('aggregation', ['sqrt_sum', 'softmax_l2'])
def test_initialization(recurrent, aggregation):
    """The first loss is ln V. a and b are 1; wo, down and head are 0; all other matrices are
    uniform with standard deviation 0.5 / sqrt(fan_in)."""
    torch.manual_seed(0)
    config = ModelConfig(vocab_size=300, n_embd=128, n_expert=3, aggregation=aggregation)
    model, x = build_model(config, recurrent), tokens(2, 4, vocab=300)
    assert isinstance(model, RecurrentGPT if recurrent else GPT)
    assert abs(model(x, x)[0].objective.item() - math.log(300)) < 1e-5
    assert abs(model.embedding.std() - 1) < 0.02
    for name, p in model.layers[1].named_parameters():
        if name in ('wo', 'down', 'router_q_bias', 'router_k_bias'):
            assert not p.any(), name
        elif name in ('a', 'b'):
            assert p == 1, name
        elif name == 'expert_embedding':
            assert 0.8 < p.std() < 1.2
        else:
            assert abs(p.std() * math.sqrt(p.size(-1)) - 0.5) < 0.03, name
            assert p.abs().max() <= 0.5 * math.sqrt(3 / p.size(-1)), name


def test_b_may_start_at_the_square_root_of_the_number_of_experts():
    config = ModelConfig(n_embd=128, n_layer=2, n_expert=9, init_b='sqrt_experts')
    model = build_model(config, recurrent=True)
    first, second = model.layers
    assert first.a == second.a == 1 and first.b == second.b == 3


@pytest.mark.parametrize('name, value', [('n_layer', [2, 4]), ('window', 3.5), ('aggregation', 1)])
def test_a_size_of_another_type_is_refused(name, value):
    assert_refused(f'{name} = .*: expected one (int|str)', ModelConfig, **{name: value})

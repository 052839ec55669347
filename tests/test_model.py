"""model.py, unroll.py and kernels.py: the plain and the fast unroll against each other and against the design's equations written out here,
chunks, caches, aggregations, truncated back-propagation, the standard Transformer, head and loss, sizes."""

import math
import shutil

import pytest
import torch
import torch.nn.functional as F

import kernels
import model as model_file
import unroll
from model import AGGREGATIONS, GPT, Level, ModelConfig, RecurrentGPT, State, build_model, config_dict

V = 11
MODELS = [RecurrentGPT, GPT]


@pytest.fixture(autouse=True)
def one_thread():
    """Products this small are slow with more threads when the processor is busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    unroll.release()
    yield
    torch.set_num_threads(threads)


def make(kind, seed=0, dtype=torch.float64, **changes):
    """A small model with every parameter random and none of them small: a and b about 1, matrices about 2 / sqrt(fan_in)."""
    sizes = {'vocab_size': V, 'n_layer': 2, 'n_expert': 2, 'n_embd': 16, 'n_head': 4, 'n_kv_head': 2, 'window': 4, 'block_size': 8, 'router_dim': 6}
    model = kind(ModelConfig(**sizes | changes)).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            p.copy_(1 + 0.2 * noise if p.dim() == 0 else noise * 2 / math.sqrt(p.size(-1)))
    return model


def tokens(*shape, seed=0, vocab=V):
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(seed))


def assert_close(a, b, rtol=1e-9, atol=1e-13, what=''):
    """Relative in the norm of the whole tensor; atol for what is zero but for rounding."""
    assert a.shape == b.shape, what
    error, size = (a - b).norm().item(), b.norm().item()
    assert error <= rtol * size + atol, f'{what}: differs by {error:.3g}, size {size:.3g}'


def assert_same_state(a, b, rtol=1e-9):
    for name, x, y in zip(State._fields, a, b, strict=True):
        assert x.dtype == y.dtype, name
        assert_close(x.double(), y.double(), rtol, what=name)


def gradients(model, value):
    grads = torch.autograd.grad(value, list(model.parameters()), materialize_grads=True)
    return {name: g for (name, _), g in zip(model.named_parameters(), grads, strict=True)}


def always_zero(name, model):
    """Softmax is shift invariant, and constant for one expert: these gradients are zero but for rounding."""
    return name.endswith('router_k_bias') or (model.config.n_expert == 1 and ('router' in name or 'expert_embedding' in name))


def assert_same_gradients(model, a, b, rtol=1e-9, zero=()):
    """zero: ends of names of parameters with no gradient here. What is zero is compared absolutely."""
    for name in b:
        if always_zero(name, model) or name.endswith(zero):
            assert a[name].abs().max() < (1e-12 if a[name].dtype == torch.float64 else 1e-6), name
        else:
            assert b[name].norm() > 1e-5, f'{name}: no gradient to compare'
            assert_close(a[name], b[name], rtol, what=name)


def reset(state, row):
    """The state with one stream as it is at the start of a shard."""
    state = State(*(x.clone() for x in state))
    state.s[row], state.k[:, row], state.v[:, row], state.count[row] = 0, 0, 0, 0
    return state


# ---- the equations of design sections 3 and 6, one stream, one token, one expert, one head at a time ----
# Keys and values of the whole history are kept, positions are absolute, the window is a mask.

def unit(x):
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def turn(x, position):
    """RoPE by complex numbers: pair (j, j + K/2) turned by position * 10000^(-2j/K)."""
    K = x.size(-1)
    frequency = 10000.0 ** (-2 * torch.arange(K // 2, dtype=torch.float64) / K)
    return torch.complex(x[..., :K // 2], x[..., K // 2:]) * torch.exp(1j * frequency * position)


def combine(config, level, h, z, s):
    """A(h_1..h_E), vectors (D,)."""
    E = len(h)
    if config.aggregation == 'sqrt_sum':
        return sum(h) / math.sqrt(E)
    if config.aggregation == 'mean':
        return sum(h) / E
    query = level.router_q @ torch.cat([z, s]) + level.router_q_bias
    scores = [query @ (level.router_k @ e + level.router_k_bias) / math.sqrt(config.router_dim) for e in level.expert_embedding]
    a = torch.exp(torch.stack(scores))
    a = a / a.sum()
    below = a.sum() + 1e-6 if config.aggregation == 'softmax_mean' else (a.pow(2).sum() + 1e-6).sqrt()
    return sum(a[i] * h[i] for i in range(E)) / below


def attend(query, keys, values, now, first):
    """query (K,) at position `now` over keys and values at positions first..now; the history before `first` is masked."""
    scores = torch.stack([(turn(query, now) * turn(k, j).conj()).sum().real if j >= first else query.new_tensor(-math.inf)
                          for j, k in enumerate(keys)]) / math.sqrt(query.numel())
    p = torch.exp(scores - scores.max())
    return (p / p.sum()) @ torch.stack(values)


def reference(model, stream):
    """RecurrentGPT's logits (T, V) for one stream (T,) from its start."""
    c = model.config
    E, H, G, K = c.n_expert, c.n_head, c.n_kv_head, c.head_dim
    keys, values, logits = {}, {}, []                          # (level, expert or 'all', head) -> history
    s = torch.zeros(c.n_embd, dtype=torch.float64)
    kv_scale = 1 / E if c.aggregation == 'mean' else 1 / math.sqrt(E)
    for t, token in enumerate(stream.tolist()):
        z = unit(model.embedding[token])
        for l, level in enumerate(model.levels):
            u = level.a * s + level.b * z
            n = unit(u)
            k, v = ([(w[i] @ n).view(G, K) for i in range(E)] for w in (level.wk, level.wv))
            if c.share_kv:
                k, v = {'all': sum(k) * kv_scale}, {'all': sum(v) * kv_scale}
            else:
                k, v = dict(enumerate(k)), dict(enumerate(v))
            for owner in k:
                for g in range(G):
                    keys.setdefault((l, owner, g), []).append(unit(k[owner][g]))
                    values.setdefault((l, owner, g), []).append(v[owner][g])
            h = []
            for i in range(E):
                q = (level.wq[i] @ n).view(H, K)
                heads = []
                for head in range(H):
                    place = l, 'all' if c.share_kv else i, head // (H // G)
                    heads.append(attend(unit(q[head]), keys[place], values[place], t, t - c.window + 1))
                y = u + level.wo[i] @ torch.cat(heads)
                h.append(unit(y + level.down[i] @ torch.relu(level.up[i] @ unit(y)).pow(2)))
            s = combine(c, level, h, z, s)
        logits.append(15 * torch.tanh(model.head @ unit(s) / 15))
    return torch.stack(logits)


def standard_transformer(model, idx, window=None):
    """GPT's logits (B, T, V) by whole-sequence pre-norm Transformer blocks, expert by expert; with a window, a band mask."""
    c, T = model.config, idx.size(1)
    H, G, K = c.n_head, c.n_kv_head, c.head_dim
    i, j = torch.arange(T)[:, None], torch.arange(T)[None]
    allowed = (j <= i) if window is None else (j <= i) & (i - j < window)
    position = torch.arange(T, dtype=torch.float64)[:, None, None]

    def block(x, level, e):
        n = unit(x)
        q, k, v = ((n @ w[e].t()).unflatten(-1, (heads, K)) for w, heads in ((level.wq, H), (level.wk, G), (level.wv, G)))
        q, k = turn(unit(q), position), turn(unit(k), position)
        k, v = k.repeat_interleave(H // G, 2), v.repeat_interleave(H // G, 2)                # GQA: (B, T, H, K)
        scores = torch.einsum('bihk,bjhk->bhij', q, k.conj()).real / math.sqrt(K)
        p = torch.softmax(scores.masked_fill(~allowed, -math.inf), -1)
        x = x + torch.einsum('bhij,bjhk->bihk', p, v).flatten(2) @ level.wo[e].t()
        return x + torch.relu(unit(x) @ level.up[e].t()).pow(2) @ level.down[e].t()

    z = s = unit(model.embedding[idx])
    for level in model.levels:
        h = [block(s, level, e) for e in range(c.n_expert)]
        if c.residual == 'shared':
            h = [x - s for x in h]
        rows = zip(z.flatten(0, 1), s.flatten(0, 1), *(x.flatten(0, 1) for x in h), strict=True)
        a = torch.stack([combine(c, level, h_row, z_row, s_row) for z_row, s_row, *h_row in rows]).view_as(s)
        s = s + a if c.residual == 'shared' else a
    return 15 * torch.tanh(unit(s) @ model.head.t() / 15)


# ---- plain = fast ----

def compare_paths(model, T, chunks, reset_before, paths=('plain', 'fast'), rtol=1e-9, B=2):
    """Chunks of T tokens in a row, each path carrying its own state; one stream restarts before chunk `reset_before`.
    Loss, every gradient and the new state are compared after every chunk. Returns the fill counts met."""
    states, fills = [model.init_state(B)] * 2, set()
    for i in range(chunks):
        if i == reset_before:
            states = [reset(state, 1) for state in states]
        fills.add(tuple(states[0].count.tolist()))
        zero = ('wq', 'wk') if model.config.window == 1 else ()                              # one entry: nothing to choose
        if T == 1 and not states[0].count.any():
            zero = ('wq', 'wk', 'levels.0.a')                  # and no s yet
        x, y = tokens(B, T + 1, seed=i).unfold(1, T, 1).unbind(1)
        found = []
        for j, path in enumerate(paths):
            model.config.path = path
            loss, states[j] = model(x, y, states[j])
            found.append((loss.detach(), gradients(model, loss)))
        assert_close(found[1][0], found[0][0], rtol, what='loss')
        assert_same_gradients(model, found[1][1], found[0][1], rtol, zero)
        assert_same_state(states[1].detach(), states[0].detach(), rtol)
    return fills


@pytest.mark.parametrize('share_kv', [True, False])
@pytest.mark.parametrize('aggregation', AGGREGATIONS)
@pytest.mark.parametrize('T, W, chunks, reset_before', [(2, 5, 5, 3), (3, 3, 4, 2), (5, 3, 3, 1), (4, 1, 2, 1), (1, 2, 5, 3)])
def test_fast_equals_plain(T, W, chunks, reset_before, aggregation, share_kv):
    """From an empty, a partly filled and a full state, and from streams of different age."""
    model = make(RecurrentGPT, window=W, aggregation=aggregation, share_kv=share_kv)
    fills = compare_paths(model, T, chunks, reset_before)
    assert (0, 0) in fills and any(a != b for a, b in fills)
    if (T, W) == (2, 5):
        assert {(2, 2), (4, 4), (5, 0), (5, 2)} <= fills


@pytest.mark.parametrize('share_kv', [True, False])
@pytest.mark.parametrize('aggregation', ['sqrt_sum', 'mean', 'softmax_l2'])
@pytest.mark.parametrize('L, E', [(L, E) for L in (1, 2, 3) for E in (1, 2, 3)])
def test_fast_equals_plain_at_every_size(L, E, aggregation, share_kv):
    model = make(RecurrentGPT, n_layer=L, n_expert=E, window=3, aggregation=aggregation, share_kv=share_kv)
    compare_paths(model, 2, 3, 2)


@pytest.mark.parametrize('share_kv', [True, False])
@pytest.mark.parametrize('n_kv_head', [4, 2, 1])
def test_fast_equals_plain_for_grouped_queries(n_kv_head, share_kv):
    model = make(RecurrentGPT, n_kv_head=n_kv_head, n_expert=3, window=3, share_kv=share_kv)
    compare_paths(model, 4, 2, 1)


def assert_near(model, grads, exact, rel=0.1):
    """Gradients in bf16: each parameter's own, so that a scalar's cannot hide behind the matrices'. A factor or a sign is far beyond rel;
    measured are at most 0.035."""
    for name in exact:
        if not always_zero(name, model):
            error = (grads[name].double() - exact[name].double()).norm()
            assert error <= rel * exact[name].double().norm(), (name, error, exact[name].norm())


@pytest.mark.parametrize('share_kv', [True, False])
@pytest.mark.parametrize('aggregation', ['sqrt_sum', 'softmax_mean'])
def test_fast_is_close_to_plain_in_fp32_and_bf16(aggregation, share_kv):
    # by this seed no scalar's gradient is a small difference of large terms: their sizes are within a factor of 2.2
    model = make(RecurrentGPT, seed=10, dtype=torch.float32, n_embd=64, n_expert=3, aggregation=aggregation, share_kv=share_kv)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.mul_(0.5)
    x, y = tokens(4, 8), tokens(4, 8, seed=1)
    found = {}
    for bf16 in (False, True):
        for path in ('plain', 'fast'):
            model.config.path = path
            with torch.autocast('cpu', torch.bfloat16, enabled=bf16):
                loss, state = model(x, y, model.init_state(4))
                loss, state = model(x, y, state)
            assert loss.dtype == state.s.dtype == torch.float32
            assert state.k.dtype == state.v.dtype == (torch.bfloat16 if bf16 else torch.float32)
            g = gradients(model, loss)
            assert all(x.dtype == torch.float32 for x in g.values())
            found[path, bf16] = loss.item(), g, state
    (plain, g_plain, s_plain), (fast, g_fast, s_fast) = found['plain', False], found['fast', False]
    assert abs(fast - plain) < 1e-5 * plain
    assert_same_gradients(model, g_fast, g_plain, rtol=1e-3)
    assert_same_state(s_fast.detach(), s_plain.detach(), rtol=1e-4)
    for other in ('plain', 'fast'):                            # of bf16, against fp32's plain path
        value, g, _ = found[other, True]
        assert abs(value - plain) < 3e-2 * plain
        assert_near(model, g, g_plain)


@pytest.mark.skipif(not (shutil.which('g++') or shutil.which('clang++')), reason='torch.compile needs a C++ compiler on the CPU')
def test_compiled_equals_fast():
    model = make(RecurrentGPT, dtype=torch.float32, window=3, n_layer=1)
    compare_paths(model, 2, 2, 1, paths=('fast', 'compiled'), rtol=1e-4)


# ---- against the equations ----

@pytest.mark.parametrize('aggregation, share_kv, L, E, n_kv_head', [
    *((a, share, 2, 2, 2) for a in AGGREGATIONS for share in (True, False)),
    ('sqrt_sum', True, 3, 3, 1), ('sqrt_sum', False, 1, 3, 4), ('mean', True, 1, 1, 2), ('softmax_l2', True, 1, 3, 4)])
def test_recurrent_equals_the_equations(aggregation, share_kv, L, E, n_kv_head):
    model = make(RecurrentGPT, n_layer=L, n_expert=E, n_kv_head=n_kv_head, window=3, aggregation=aggregation, share_kv=share_kv)
    x = tokens(2, 10)                                          # more than 3 W
    expected = torch.stack([reference(model, row) for row in x])
    weight = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    grads = gradients(model, (expected * weight).sum())
    for path in ('plain', 'fast'):
        model.config.path = path
        logits, _ = model(x)
        assert_close(logits, expected, what=path)
        assert_same_gradients(model, gradients(model, (logits * weight).sum()), grads)


@pytest.mark.parametrize('aggregation, residual', [(a, r) for a in AGGREGATIONS for r in ('expert', 'shared')])
@pytest.mark.parametrize('E, n_kv_head', [(1, 2), (3, 1), (3, 4)])
def test_gpt_equals_standard_blocks(E, n_kv_head, aggregation, residual):
    """One expert: a standard Transformer. More: a loop over experts of that block, and A of them."""
    model = make(GPT, n_expert=E, n_kv_head=n_kv_head, aggregation=aggregation, residual=residual)
    x, y = tokens(2, 7), tokens(2, 7, seed=1)
    expected = standard_transformer(model, x)
    logits, state = model(x)
    assert state is None
    assert_close(logits, expected)
    loss, _ = model(x, y)
    expected_loss = F.cross_entropy(expected.flatten(0, 1), y.flatten())
    assert_close(loss, expected_loss)
    assert_same_gradients(model, gradients(model, loss), gradients(model, expected_loss))


def test_one_expert_is_the_same_transformer_with_every_rule():
    """E = 1: both residuals and both unrouted aggregations are one model."""
    x = tokens(2, 7)
    first, *others = (make(GPT, n_expert=1, residual=r, aggregation=a)(x)[0] for r in ('expert', 'shared') for a in ('sqrt_sum', 'mean'))
    for other in others:
        assert_close(other, first)


@pytest.mark.parametrize('aggregation', ['sqrt_sum', 'softmax_l2'])
@pytest.mark.parametrize('E, residual', [(1, 'expert'), (3, 'expert'), (2, 'shared')])
def test_gpt_windowed_evaluation_is_a_band_mask(E, residual, aggregation):
    model = make(GPT, n_expert=E, residual=residual, aggregation=aggregation)                # window 4
    x = tokens(2, 14)
    expected = standard_transformer(model, x, window=4)
    with torch.no_grad():
        logits, state = model(x, state=model.init_state(2))
        assert_close(logits, expected.detach())
        assert not torch.allclose(logits, model(x)[0])         # the window matters
        loss, same = model(x, x, model.init_state(2))
        assert_close(loss, F.cross_entropy(expected.flatten(0, 1), x.flatten()))
        assert_same_state(state, same)


@pytest.mark.skipif(not (shutil.which('g++') or shutil.which('clang++')), reason='torch.compile needs a C++ compiler on the CPU')
def test_compiled_gpt_equals_eager():
    model = make(GPT, dtype=torch.float32, n_layer=1)
    x, y = tokens(2, 8), tokens(2, 8, seed=1)
    loss, _ = model(x, y)
    grads = gradients(model, loss)
    model.config.path = 'compiled'
    compiled, _ = model(x, y)
    assert model.compiled_core is not None                     # with plain products for attention, too
    assert_close(compiled, loss, rtol=1e-5)
    assert_same_gradients(model, gradients(model, compiled), grads, rtol=1e-4)


@pytest.mark.parametrize('residual', ['expert', 'shared'])
def test_gpt_of_eight_levels_and_experts_in_bf16(residual):
    """The literal rule multiplies the residual by sqrt(8) a level: its stream stays in fp32 and close to float64's."""
    model = make(GPT, dtype=torch.float32, n_layer=8, n_expert=8, n_embd=64, n_head=2, n_kv_head=1, residual=residual)
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
        assert exact.pow(2).mean().sqrt() > 8**4               # sqrt(8)^8 times the embedding's


# ---- chunks, caches, the state ----

@pytest.mark.parametrize('kind, path', [(RecurrentGPT, 'plain'), (RecurrentGPT, 'fast'), (GPT, 'fast')])
@pytest.mark.parametrize('changes', [{}, {'aggregation': 'softmax_mean', 'share_kv': False}, {'aggregation': 'softmax_l2', 'n_expert': 3}])
def test_any_split_of_a_stream_gives_the_same(kind, path, changes):
    model = make(kind, path=path, **changes)                   # window 4
    x = tokens(2, 14)
    with torch.no_grad():
        whole, end = model(x, state=model.init_state(2))
        for split in ([1] * 14, [3, 1, 4, 6], [2] * 7, [13, 1], [5, 9]):
            state, logits = model.init_state(2), []
            for chunk in x.split(split, 1):
                out, state = model(chunk, state=state)
                logits.append(out)
            assert_close(torch.cat(logits, 1), whole, what=split)
            assert_same_state(state, end)
        state = model.init_state(2)
        for t in range(14):
            out, state = model.step(x[:, t], state)
            assert out.shape == (2, V)
            assert_close(out, whole[:, t])
    assert end.count.tolist() == [4, 4]


@pytest.mark.parametrize('kind, path', [(RecurrentGPT, 'plain'), (RecurrentGPT, 'fast'), (GPT, 'fast')])
def test_streams_do_not_mix_and_a_reset_is_a_start(kind, path):
    """Streams of different age in one batch are what each is alone; a reset stream is a new one."""
    model = make(kind, path=path)
    x = tokens(3, 5)
    with torch.no_grad():
        rows, expected = [], []
        for row, age in enumerate((0, 2, 9)):
            state = model.init_state(1)
            if age:
                _, state = model(tokens(1, age, seed=row), state=state)
            rows.append(state)
            expected.append(model(x[row:row + 1], state=state)[0])
        state = State(*(torch.cat([r[i] for r in rows], 1 if i in (1, 2) else 0) for i in range(4)))
        assert state.count.tolist() == [0, 2, 4]
        logits, state = model(x, state=state)
        assert_close(logits, torch.cat(expected))
        logits, _ = model(x, state=reset(state, 2))
        assert_close(logits[2:], model(x[2:], state=model.init_state(1))[0])


@pytest.mark.parametrize('kind, path', [(RecurrentGPT, 'plain'), (RecurrentGPT, 'fast'), (GPT, 'fast')])
@pytest.mark.parametrize('age', [0, 1, 3, 4])
def test_empty_entries_are_masked(kind, path, age):
    """Garbage in a cache's empty slots changes nothing; in its filled ones it does. Zeros are not attended either."""
    model = make(kind, path=path)                              # window 4
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
            elif slot > 0:                                     # a full cache's oldest entry has left the window
                assert (logits - expected).norm() > 1e-3
            else:
                assert_close(logits, expected)


def test_attention_of_the_first_token_is_on_itself():
    """With an empty cache its softmax has one entry: the attended value is v itself, not v diluted by zeros."""
    model = make(RecurrentGPT, n_layer=1, n_expert=1, n_head=2, n_kv_head=2)
    level, x = model.levels[0], tokens(1, 1)
    u = level.b * unit(model.embedding[x[0, 0]])
    y = u + level.wo[0] @ (level.wv[0] @ unit(u))
    s = unit(y + level.down[0] @ torch.relu(level.up[0] @ unit(y)).pow(2))
    for path in ('plain', 'fast'):
        model.config.path = path
        assert_close(model(x)[1].s[0], s)


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


@pytest.mark.parametrize('kind, path', [(RecurrentGPT, 'plain'), (RecurrentGPT, 'fast'), (GPT, 'fast')])
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

@pytest.mark.parametrize('kind, path', [(RecurrentGPT, 'plain'), (RecurrentGPT, 'fast'), (GPT, 'fast')])
def test_no_gradient_through_the_incoming_state(kind, path):
    model = make(kind, path=path)
    x = tokens(2, 3)
    _, state = model(x, state=model.init_state(2))
    carried = gradients(model, model(x, x, state)[0])
    constant = State(*(part.detach().clone() for part in state))
    assert_same_gradients(model, carried, gradients(model, model(x, x, constant)[0]), rtol=1e-14)
    for name in ('s', 'k', 'v'):
        leaf = getattr(constant, name).clone().requires_grad_()
        loss, _ = model(x, x, constant._replace(**{name: leaf}))
        assert torch.autograd.grad(loss, leaf, allow_unused=True)[0] is None, name


def directional(model, value, eps=1e-6):
    """For each parameter: autograd's and a central difference's derivative along a random direction."""
    grads = gradients(model, value())
    generator = torch.Generator().manual_seed(5)
    found = {}
    for name, p in model.named_parameters():
        direction = torch.randn(p.shape, dtype=p.dtype, generator=generator)
        with torch.no_grad():
            start, ends = p.clone(), []
            for sign in (1, -1):
                p.copy_(start + sign * eps * direction)
                ends.append(value())
            p.copy_(start)
        found[name] = (grads[name] * direction).sum().item(), ((ends[0] - ends[1]) / (2 * eps)).item()
    return found


@pytest.mark.parametrize('aggregation, share_kv', [('sqrt_sum', True), ('sqrt_sum', False), ('softmax_l2', True), ('softmax_mean', False)])
def test_gradient_of_one_token_by_finite_differences(aggregation, share_kv):
    """One token's output depends on the chunk's earlier ones through s, k and v: all of it is in the gradient."""
    model = make(RecurrentGPT, aggregation=aggregation, share_kv=share_kv)
    with torch.no_grad():
        _, state = model(tokens(2, 2, seed=3), state=model.init_state(2))
    x = tokens(2, 5)
    weight = torch.randn(2, V, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for t in (2, 4):
        for name, (exact, measured) in directional(model, lambda t=t: (model(x, state=state)[0][:, t] * weight).sum()).items():
            assert abs(exact - measured) < 1e-5 * abs(measured) + 1e-8, (name, t)


@pytest.mark.parametrize('cut', ['s', 'k', 'v'])
def test_gradient_flows_through_s_k_and_v_inside_a_chunk(monkeypatch, cut):
    """Each way is a real part of the gradient: cutting it in the plain path changes what the fast path gives."""
    model = make(RecurrentGPT)
    x = tokens(2, 4)
    full = gradients(model, model(x, x)[0])
    step = RecurrentGPT.plain_step
    monkeypatch.setattr(RecurrentGPT, 'plain_step', lambda self, z, state: step(self, z, state._replace(**{cut: getattr(state, cut).detach()})))
    model.config.path = 'plain'
    part = gradients(model, model(x, x)[0])
    for name in ('embedding', 'levels.0.wk' if cut != 'v' else 'levels.0.wv'):
        assert (part[name] - full[name]).norm() > 1e-3 * full[name].norm(), name


# ---- aggregation ----

def level_of(aggregation, E, D=2, recurrent=True):
    level = Level(ModelConfig(n_expert=E, n_embd=D, n_head=1, aggregation=aggregation, router_dim=4), recurrent).double()
    with torch.no_grad():
        for p in level.parameters():
            p.zero_()
    return level


@pytest.mark.parametrize('aggregation, expected', [
    ('sqrt_sum', [(1 + 4 - 9) / math.sqrt(3), (2 + 5 + 6) / math.sqrt(3)]), ('mean', [-4 / 3, 13 / 3]),
    ('softmax_mean', [(1 + 2 * 4 - 5 * 9) / 8 / (1 + 1e-6), (2 + 2 * 5 + 5 * 6) / 8 / (1 + 1e-6)]),
    ('softmax_l2', [(1 + 2 * 4 - 5 * 9) / 8 / math.sqrt(30 / 64 + 1e-6), (2 + 2 * 5 + 5 * 6) / 8 / math.sqrt(30 / 64 + 1e-6)])])
def test_aggregation_by_hand(aggregation, expected):
    """Experts' outputs (1, 2), (4, 5), (-9, 6); the router's scores are ln 1, ln 2, ln 5, so its gates are 1/8, 2/8, 5/8."""
    level = level_of(aggregation, 3)
    if level.config.routed:
        with torch.no_grad():
            level.router_k.copy_(torch.eye(4))
            level.router_q_bias[1] = 2.0                       # = sqrt(router width), so that scores are the embeddings' entry 1
            level.expert_embedding[:, 1] = torch.tensor([1.0, 2.0, 5.0]).double().log()
    h = torch.tensor([[1.0, 2.0], [4.0, 5.0], [-9.0, 6.0]]).double()
    zero = torch.zeros(2, dtype=torch.float64)
    assert_close(level.aggregate(h, zero, zero), torch.tensor(expected, dtype=torch.float64), rtol=1e-14)
    assert_close(level.aggregate(list(h), zero, zero), torch.tensor(expected, dtype=torch.float64), rtol=1e-14)


@pytest.mark.parametrize('aggregation', AGGREGATIONS)
def test_aggregation_formula(aggregation):
    """Against the formula token by token, with leading dimensions; the router reads z, then s."""
    level = level_of(aggregation, 3, D=4)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in level.parameters():
            p.normal_(generator=generator)
    h, z, s = (torch.randn(*shape, 2, 5, 4, dtype=torch.float64, generator=generator) for shape in ((3,), (), ()))
    found = level.aggregate(h, z, s)
    for b in range(2):
        for t in range(5):
            assert_close(found[b, t], combine(level.config, level, list(h[:, b, t]), z[b, t], s[b, t]), rtol=1e-12)
    swapped = level.aggregate(h, s, z)
    assert torch.allclose(swapped, found) != level.config.routed


@pytest.mark.parametrize('aggregation, scale', [('sqrt_sum', 4**-0.5), ('mean', 0.25), ('softmax_mean', 4**-0.5), ('softmax_l2', 4**-0.5)])
def test_shared_keys_and_values_keep_sqrt_sum_where_routed(aggregation, scale):
    x = torch.arange(8, dtype=torch.float64).view(4, 2)
    assert_close(level_of(aggregation, 4).aggregate_kv(list(x)), x.sum(0) * scale)


# ---- head and loss ----

def plain_head_loss(x, weight, targets):
    return F.cross_entropy(15 * torch.tanh(x @ weight.t() / 15), targets)


def head_inputs(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 6, dtype=dtype, generator=generator).mul_(5).requires_grad_() for n in (10, V))   # some logits beyond the cap
    return x, weight, tokens(10)


@pytest.mark.parametrize('rows', [1, 3, 5, 10, 1000])
def test_head_loss(monkeypatch, rows):
    """In value and gradients, in slices that do and do not divide the rows, and in a sum of two losses."""
    monkeypatch.setattr(kernels, 'LOGITS_PER_SLICE', rows * V)
    x, weight, targets = head_inputs()
    assert (x @ weight.t()).abs().max() > 15
    for loss in (lambda f: f(x, weight, targets), lambda f: 3 * f(x, weight, targets) - f(x.flip(0) / 2, weight, targets)):
        found, expected = loss(kernels.head_loss), loss(plain_head_loss)
        assert_close(found, expected, rtol=1e-12)
        for a, b in zip(torch.autograd.grad(found, (x, weight)), torch.autograd.grad(expected, (x, weight)), strict=True):
            assert_close(a, b, rtol=1e-12)


def test_head_loss_in_bf16_and_fp32_and_without_gradients(monkeypatch):
    x, weight, targets = head_inputs(torch.float32)
    expected = plain_head_loss(x, weight, targets)
    grads = torch.autograd.grad(expected, (x, weight))
    for bf16, rtol in ((False, 1e-5), (True, 3e-2)):
        with torch.autocast('cpu', torch.bfloat16, enabled=bf16):
            found = kernels.head_loss(x, weight, targets)
        assert found.dtype == torch.float32
        assert_close(found, expected, rtol)
        for a, b in zip(torch.autograd.grad(found, (x, weight)), grads, strict=True):
            assert a.dtype == torch.float32
            assert_close(a, b, rtol)
    only_x, = torch.autograd.grad(kernels.head_loss(x, weight.detach(), targets), x)
    assert_close(only_x, grads[0], 1e-5)
    monkeypatch.setattr(torch, 'zeros_like', lambda *_: pytest.fail('made a gradient under no_grad'))
    with torch.no_grad():
        assert_close(kernels.head_loss(x, weight, targets), expected.detach(), 1e-5)


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

def fake_graphed(graphs, name, function, *args):
    """kernels.graphed without CUDA: from the fourth call on what ran then runs again, on the arguments and into the results of then."""
    calls, first, result = graphs.get(name, (0, None, None))
    if calls < 3:
        graphs[name] = calls + 1, None, None
        return function(*args)
    if first is None:
        result = function(*args).clone()
        graphs[name] = calls, args, result
        return result
    return result.copy_(function(*first))


@pytest.mark.parametrize('kept, graphs', [(2**30, False), (0, False), (0, True)])
@pytest.mark.parametrize('aggregation, share_kv, W, T, B', [('sqrt_sum', True, 4, 8, 2), ('mean', False, 4, 8, 1), ('softmax_l2', True, 7, 11, 2),
                                                            ('sqrt_sum', True, 2, 7, 2), ('sqrt_sum', False, 20, 9, 2), ('sqrt_sum', True, 5, 3, 2)])
def test_a_chunk_of_several_blocks_equals_plain(monkeypatch, kept, graphs, aggregation, share_kv, W, T, B):
    """Blocks of 3 tokens, dK and dV in groups of 2; with graphs also what is captured once and replayed with other numbers."""
    monkeypatch.setattr(unroll, 'BLOCK', 3)
    monkeypatch.setattr(unroll, 'GROUP', 2)
    monkeypatch.setattr(unroll, 'KEPT_WEIGHTS', kept)
    if graphs:
        monkeypatch.setattr(unroll, 'graphed', fake_graphed)
        monkeypatch.setattr(unroll, 'can_capture', lambda x: True)
        monkeypatch.setattr(unroll, 'compiled', lambda op: op)
    model, other = (make(RecurrentGPT, seed=seed, aggregation=aggregation, share_kv=share_kv, window=W) for seed in (0, 1))
    states = {path: None for path in ('plain', 'fast')}
    for chunk in range(6):
        x, y = tokens(B, T, seed=chunk), tokens(B, T, seed=chunk + 10)
        found = {}
        for path in states:
            model.config.path = 'graphed' if path == 'fast' and graphs else path
            loss, states[path] = model(x, y, states[path])
            if path == 'fast' and graphs:
                other.config.path = 'graphed'
                other(x, y)                                    # another model of the same sizes in between
            found[path] = loss.detach(), gradients(model, loss)
        assert_close(found['fast'][0], found['plain'][0])
        assert_same_gradients(model, found['fast'][1], found['plain'][1])
        assert_same_state(states['fast'], states['plain'])
        if chunk == 3:
            states = {path: model.init_state(B) for path in states}
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.01)
            assert_close(model(x, y, states['fast'])[0], model(x, y, states['plain'])[0])
    if graphs:
        pools = [buffers for pool in unroll._free.values() for buffers in pool]
        captured = [call for buffers in [*pools, *unroll._work.values()] if isinstance(buffers, unroll.Buffers) for call in buffers.graphs.values()]
        assert captured and any(first is not None for _, first, _ in captured)


def test_memory_made_in_inference_mode_serves_later():
    model, x = make(RecurrentGPT), tokens(2, 5)
    with torch.inference_mode():
        first = model(x)[0].clone()
    with torch.no_grad():
        assert torch.equal(model(x)[0], first)


# ---- the chunk's buffers ----

@pytest.mark.parametrize('first', [0, 1])
def test_two_forwards_before_the_backwards(first):
    """Each live chunk has buffers of its own, whichever backward comes first; and none of the results is part of a buffer."""
    model = make(RecurrentGPT)
    xs = [tokens(2, 5, seed=i) for i in range(3)]
    expected = []
    for x in xs:
        unroll._free.clear()
        expected.append(gradients(model, model(x, x)[0]))
    unroll._free.clear()
    losses = [model(x, x)[0] for x in xs[:2]]
    found = {i: gradients(model, losses[i]) for i in (first, 1 - first)}
    assert [len(pool) for pool in unroll._free.values()] == [2]
    found[2] = gradients(model, model(xs[2], xs[2])[0])        # writes over a used buffer
    assert [len(pool) for pool in unroll._free.values()] == [2]
    for i in range(3):
        assert_same_gradients(model, found[i], expected[i])
    loss = model(xs[0], xs[0])[0] + model(xs[1], xs[1])[0]     # both in one backward
    together = gradients(model, loss)
    assert_same_gradients(model, together, {name: expected[0][name] + expected[1][name] for name in together})


def test_forward_without_backward_and_without_gradients(monkeypatch):
    model = make(RecurrentGPT)
    x = tokens(2, 5)
    loss, state = model(x, x)
    expected = gradients(model, loss)
    dropped = model(tokens(2, 5, seed=1), x)                   # lives on, with its buffers, and is never used
    assert_same_gradients(model, gradients(model, model(x, x)[0]), expected)
    del dropped
    monkeypatch.setattr(unroll, 'take_buffers', lambda *_: pytest.fail('took the backward\'s buffers where no gradient is wanted'))
    with torch.no_grad():
        value, same = model(x, x)
    assert_close(value, loss.detach(), rtol=1e-14)
    assert_same_state(same, state.detach(), rtol=1e-14)
    with torch.inference_mode():
        assert_close(model(x, x)[0], loss.detach(), rtol=1e-14)
    assert not value.requires_grad
    model.requires_grad_(False)
    assert_close(model(x, x)[0], loss.detach(), rtol=1e-14)


def test_a_second_backward_is_refused():
    model = make(RecurrentGPT)
    loss, _ = model(tokens(2, 3), tokens(2, 3))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match='second'):
        loss.backward()


def test_gradients_accumulate_over_chunks_of_other_sizes():
    """Buffers kept for one size are not used for another."""
    model = make(RecurrentGPT)
    expected = None
    for x in (tokens(2, 5), tokens(2, 3), tokens(1, 5), tokens(2, 5, seed=1)):
        model.config.path = 'plain'
        g = gradients(model, model(x, x)[0])
        expected = g if expected is None else {name: expected[name] + g[name] for name in g}
        model.config.path = 'fast'
        model(x, x)[0].backward()
    assert_same_gradients(model, {name: p.grad for name, p in model.named_parameters()}, expected)


def test_frozen_parameters():
    model = make(RecurrentGPT)
    x = tokens(2, 4)
    full = gradients(model, model(x, x)[0])
    for level in model.levels:
        level.requires_grad_(False)
    model(x, x)[0].backward()
    assert_close(model.embedding.grad, full['embedding'])
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
        assert n == {'total': 16 * block + scalars + 2 * 50304 * 768, 'embedding': 50304 * 768, 'head': 50304 * 768, 'core': 16 * block + scalars}
        assert round(n['core'] / 1e6, 1) == 103.8 and round(n['head'] / 1e6, 1) == 38.6
        attention = 16 * 4 * 768 * (128 if kind is RecurrentGPT else 128.5)
        flops = model.flops_per_token()
        assert flops == {'core': 2 * 16 * block + attention, 'head': 2 * 50304 * 768}
        assert round((flops['core'] - attention) / 1e6, 1) == 207.6 and round(attention / 1e6, 1) == 6.3
        assert round(flops['head'] / 1e6, 1) == 77.3


@pytest.mark.parametrize('kind', MODELS)
def test_sizes_of_the_router(kind):
    plain, routed = (build(kind, n_layer=3, n_expert=5, n_embd=128, router_dim=7, aggregation=a) for a in ('sqrt_sum', 'softmax_l2'))
    extra = 3 * (7 * 256 + 7 * 7 + 7 + 7 + 5 * 7)
    assert routed.num_params()['core'] - plain.num_params()['core'] == extra
    assert routed.flops_per_token()['core'] - plain.flops_per_token()['core'] == 3 * 2 * (7 * 256 + 5 * 7)


@pytest.mark.parametrize('D, head_dim, H, G', [(192, 96, 2, 1), (384, 96, 4, 2), (768, 96, 8, 4), (1536, 96, 16, 8), (128, 64, 2, 1), (256, 64, 4, 2)])
def test_head_sizes(D, head_dim, H, G):
    c = ModelConfig(n_embd=D)
    assert (c.head_dim, c.n_head, c.n_kv_head) == (head_dim, H, G)
    assert ModelConfig(**config_dict(c)) == c


def test_given_heads():
    assert ModelConfig(n_embd=100, n_head=5).n_kv_head == 5    # odd: as many key-value heads
    c = ModelConfig(n_embd=768, n_head=12, n_kv_head=3)
    assert (c.n_head, c.n_kv_head, c.head_dim) == (12, 3, 64)


@pytest.mark.parametrize('name, changes', [
    ('n_embd', {'n_embd': 100}), ('n_embd', {'n_embd': 0}), ('n_embd', {'n_embd': 320}), ('n_head', {'n_embd': 96, 'n_head': 5}),
    ('n_head', {'n_embd': 12, 'n_head': 4}), ('n_head', {'n_head': -1}), ('n_kv_head', {'n_head': 8, 'n_kv_head': 3}),
    ('n_kv_head', {'n_head': 4, 'n_kv_head': 8}), ('n_kv_head', {'n_kv_head': -2}), ('aggregation', {'aggregation': 'sum'}),
    ('residual', {'residual': 'none'}), ('path', {'path': 'slow'}), ('window', {'window': 0}), ('block_size', {'block_size': 0}),
    ('n_layer', {'n_layer': 0}), ('n_expert', {'n_expert': -1}), ('vocab_size', {'vocab_size': 0}), ('router_dim', {'router_dim': 0})])
def test_sizes_that_do_not_fit_are_refused_by_name(name, changes):
    with pytest.raises(ValueError, match=f'^{name} = {changes.get(name, "")}' if isinstance(changes[name], int) else f'^{name} = {changes[name]!r}'):
        ModelConfig(**changes)


@pytest.mark.parametrize('kind', MODELS)
@pytest.mark.parametrize('aggregation', ['mean', 'softmax_mean'])
def test_param_groups(kind, aggregation):
    """Every parameter in one group; Muon gets the stacked matrices and the router's, and nothing else."""
    model = build(kind, vocab_size=V, n_embd=128, aggregation=aggregation)
    names = {id(p): name for name, p in model.named_parameters()}
    groups = {group: [names[id(p)] for p in params] for group, params in model.param_groups().items()}
    assert sorted(sum(groups.values(), [])) == sorted(names.values())
    routed = aggregation == 'softmax_mean'
    matrices = ['wq', 'wk', 'wv', 'wo', 'up', 'down', *(['router_q', 'router_k'] if routed else [])]
    scalars = [*(['a', 'b'] if kind is RecurrentGPT else []), *(['router_q_bias', 'router_k_bias', 'expert_embedding'] if routed else [])]
    assert groups['embedding'] == ['embedding'] and groups['head'] == ['head']
    assert sorted(groups['matrices']) == sorted(f'levels.{l}.{name}' for l in range(2) for name in matrices)
    assert sorted(groups['scalars']) == sorted(f'levels.{l}.{name}' for l in range(2) for name in scalars)
    assert all(p.dim() >= 2 for p in model.param_groups()['matrices'])


@pytest.mark.parametrize('recurrent', [True, False])
@pytest.mark.parametrize('aggregation', ['sqrt_sum', 'softmax_l2'])
def test_initialisation(recurrent, aggregation):
    """The first loss is ln V; a, b are 1; o, down and head 0; the others uniform with standard deviation 0.5 / sqrt(fan_in)."""
    torch.manual_seed(0)
    model = build_model(ModelConfig(vocab_size=300, n_embd=128, n_expert=3, aggregation=aggregation), recurrent)
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

"""Test convlstm.py against a reference written here: one expert and one step at a time, channels
first, in float64."""

import functools
import math

import pytest
import torch
import torch.nn.functional as F
from small_runs import assert_refused

import graphs
from convlstm import AgentConfig, ConvGLU, build_agent, load_agent, normal

EPS = 1e-6
KINDS = [(arch, recurrent) for arch in ('convlstm', 'convglu') for recurrent in (True, False)]
kinds = pytest.mark.parametrize('arch, recurrent', KINDS)


# ---- the equations once more --------------------------------------------------------------------


def over_rms(x, dims):
    return x / (x.square().mean(dims, keepdim=True) + EPS).sqrt()


def combine(agent, l, hs, z, s):
    """Return A(h_1..h_E), each (B, D, Y, X)."""
    config = agent.config
    E = len(hs)
    if config.aggregation == 'sqrt_sum':
        return sum(hs) / math.sqrt(E)
    if config.aggregation == 'mean':
        return sum(hs) / E
    router = agent.routers[l]
    context = torch.cat([z, s], 1).mean((2, 3))
    q = context @ router['q'].T + router['q_bias']
    scores = [q @ (router['k'] @ e + router['k_bias']) for e in router['embedding']]
    a = torch.softmax(torch.stack(scores, 1) / math.sqrt(config.router_dim), 1)
    total = a.sum(1) + EPS
    if config.aggregation == 'softmax_l2':
        total = (a.square().sum(1) + EPS).sqrt()
    return sum((a[:, i] / total)[:, None, None, None] * h for i, h in enumerate(hs))


def neighbors(hs, i, r):
    return sum(hs[(i - k) % len(hs)] for k in range(r + 1)) / math.sqrt(r + 1)


def encode(agent, obs):
    agent_and_box = F.one_hot(obs[..., 0].long(), 5)[..., [0, 3, 4]]
    planes = torch.cat([agent_and_box, F.one_hot(obs[..., 1].long(), 3)], -1).movedim(-1, 1)
    z = F.conv2d(planes.double(), agent.encoder, agent.encoder_bias, padding=1)
    return over_rms(z, (2, 3))


def head(agent, s):
    cells = s.flatten(2)  # (B, D, 100)
    pooled = []
    for query in agent.query:
        weight = torch.softmax(torch.einsum('bdc,d->bc', cells, query), 1)
        pooled.append(torch.einsum('bdc,bc->bd', cells, weight))
    a, b = agent.dense(torch.cat([*pooled, cells.mean(2)], 1)).chunk(2, 1)
    x = a * torch.sigmoid(b)
    return agent.logits(x), agent.value(x)[:, 0]


def lstm_step(agent, z, state):
    config = agent.config
    D = config.n_embd
    new_cells = []
    s, hs, cells = state if config.recurrent else (None, None, None)
    for l in range(config.n_layer):
        new_hs = []
        row = []
        for i in range(config.n_expert):
            rows = slice(i * 4 * D, (i + 1) * 4 * D)
            inputs, weights = [z], [agent.wz[l][rows]]
            if s is not None:
                inputs += [neighbors(hs, i, config.radius) if config.radius >= 0 else s, hs[i]]
                weights += [agent.ws[l][rows], agent.wh[l][rows]]
            gates = F.conv2d(torch.cat(inputs, 1), torch.cat(weights, 1), padding=1)
            gain, bias = (p[l][i].flatten()[:, None, None] for p in (agent.gain, agent.bias))
            gi, gf, gg, go = (over_rms(gates, 1) * gain + bias).chunk(4, 1)
            cell = torch.sigmoid(gi) * torch.tanh(gg)
            if config.recurrent:
                cell = cell + torch.sigmoid(gf) * cells[l][i]
            row.append(cell)
            new_hs.append(torch.sigmoid(go) * torch.tanh(cell))
        s = combine(agent, l, new_hs, z, z.new_zeros(len(z), D, 10, 10) if s is None else s)
        hs = new_hs
        new_cells.append(row)
    return s, (s, hs, new_cells)


def glu_step(agent, z, state):
    config = agent.config
    D = config.n_embd
    s = state[0]
    base = torch.einsum('dc,bcyx->bdyx', agent.wp, z) + agent.bias_p[:, None, None]
    if config.recurrent:
        base = base + torch.einsum('ec,bcyx->beyx', agent.wr, over_rms(s, 1))
    shared = config.residual == 'shared'
    for l in range(config.n_layer):
        s = base if l == 0 else s
        hs = []
        for i in range(config.n_expert):
            w, b = agent.w[l][i * 2 * D : (i + 1) * 2 * D], agent.bias[l][i].flatten()
            x, gate = F.conv2d(over_rms(s, 1), w, b, padding=1).chunk(2, 1)
            hs.append(x * torch.sigmoid(gate) + (0 if shared else s))
        s = combine(agent, l, hs, z, s) + (s if shared else 0)
    return s, (s, state[1], [])


def reference(agent, obs, start):
    """Return logits and values of an unroll from a zero state. State: (s, [h_i], [[c_i] per
    layer])."""
    config = agent.config
    T, B = start.shape
    out = []
    zero = torch.zeros(B, config.n_embd, 10, 10, dtype=torch.float64)
    state = (zero, [zero] * config.n_expert, [[zero] * config.n_expert] * config.n_layer)
    for t in range(T):
        keep = (~start[t]).double()[:, None, None, None]
        cells = [[x * keep for x in row] for row in state[2]]
        state = (state[0] * keep, [h * keep for h in state[1]], cells)
        step = lstm_step if config.arch == 'convlstm' else glu_step
        s, state = step(agent, encode(agent, obs[t]), state)
        out.append(head(agent, over_rms(s, 1)))
    return [torch.stack(x) for x in zip(*out, strict=True)]


# ---- small agents, and what an unroll of them gives ---------------------------------------------


def make(arch='convlstm', recurrent=True, L=1, E=1, D=6, params=torch.float64, **settings):
    """Return an agent all of whose parameters matter (no zeros, no ones). params: their dtype."""
    torch.manual_seed(0)
    config = AgentConfig(
        arch=arch,
        recurrent=recurrent,
        n_layer=L,
        n_expert=E,
        n_embd=D,
        head_dim=7,
        router_dim=5,
        **settings,
    )
    agent = build_agent(config).to(params)
    with torch.no_grad():
        for name, p in agent.named_parameters():
            if 'bias' in name or 'gain' in name or 'logits' in name:
                p.add_(torch.randn_like(p) * 0.3)
    return agent


def boards(T=4, B=3):
    """Return observations (T, B, 10, 10, 2) and starts (T, B). Episodes start at the first step and
    within the unroll."""
    rng = torch.Generator().manual_seed(1)
    variable = torch.tensor([0, 0, 3, 4])[torch.randint(4, (T, B, 10, 10), generator=rng)]
    fixed = torch.randint(3, (T, B, 10, 10), generator=rng)
    start = torch.rand(T, B, generator=rng) < 0.25
    start[0] = True
    start[T // 2, B // 2] = True
    return torch.stack([variable, fixed], -1).to(torch.uint8), start


def results(agent, logits, value, *state):
    """Return [logits, value, state ...] and {name: gradient} of a random sum of the former two."""
    rng = torch.Generator().manual_seed(2)
    loss = sum((x * torch.randn(x.shape, generator=rng)).sum() for x in (logits, value))
    named = {name: p for name, p in agent.named_parameters() if p.numel()}
    grads = torch.autograd.grad(loss, list(named.values()))
    return [logits, value, *state], dict(zip(named, grads, strict=True))


def unroll(agent, obs, start):
    logits, value, state = agent(obs, start, agent.init_state(start.size(1)))
    return results(agent, logits, value, *state)


def single_steps(agent, obs, start):
    state = agent.init_state(start.size(1))
    w = agent.prepare()
    steps = []
    for obs_t, start_t in zip(obs, start, strict=True):
        *out, state = agent.act(w, obs_t, start_t, state)
        steps.append(out)
    return results(agent, *(torch.stack(x) for x in zip(*steps, strict=True)), *state)


def distance(values, expected):
    """Return the largest relative difference of two lists of tensors."""
    pairs = zip(values, expected, strict=True)
    return torch.stack([(a - b).norm() / b.norm() for a, b in pairs]).max()  # NaN stays NaN


def assert_close(found, expected, rtol=1e-9):
    """Compare values and states, and gradients relative to the largest, because they are sums of
    such terms. Both arguments are what results() returns."""
    values, grads = found
    expected_values, expected_grads = expected
    assert distance(values, expected_values) <= rtol
    largest = max(x.norm() for x in expected_grads.values())
    for name, grad in expected_grads.items():
        assert (grads[name] - grad).norm() <= rtol * largest, name


# ---- tests --------------------------------------------------------------------------------------

SHARED = {'residual': 'shared'}
CASES = [
    (1, 1, {}),
    (3, 1, {}),
    (2, 3, {}),
    (2, 3, {'aggregation': 'mean'}),
    (2, 3, {'aggregation': 'softmax_mean'}),
    (2, 3, {'aggregation': 'softmax_l2'}),
    (2, 1, {'aggregation': 'softmax_l2'}),
    (2, 4, {'radius': 0}),
    (3, 4, {'radius': 2}),
    (1, 3, {'radius': 1}),
    (2, 3, SHARED),
    (2, 3, {**SHARED, 'aggregation': 'softmax_l2'}),
]
FOREIGN = {'convlstm': 'residual', 'convglu': 'radius'}  # the setting of the other architecture
AGENTS = [
    (arch, recurrent, L, E, settings)
    for L, E, settings in CASES
    for arch, recurrent in KINDS
    if FOREIGN[arch] not in settings
]


@pytest.mark.parametrize('arch, recurrent, L, E, settings', AGENTS, ids=str)
def test_equals_reference(arch, recurrent, L, E, settings):
    """Values and all gradients of an unroll, and of as many single steps."""
    agent = make(arch, recurrent, L, E, **settings)
    obs, start = boards()
    expected = results(agent, *reference(agent, obs, start))
    assert expected[0][0].std() > 1e-2  # the comparison sees something
    values, grads = unroll(agent, obs, start)
    assert_close((values[:2], grads), expected)
    assert_close(single_steps(agent, obs, start), (values, grads))


@kinds
def test_fused_functions_change_nothing(arch, recurrent, request, monkeypatch):
    """torch.compile traces each one as a whole graph, and the results are the same. With --long
    Inductor also generates the code, which takes most of the time."""
    if not request.config.getoption('--long'):
        options = {'backend': 'aot_eager', 'fullgraph': True, 'dynamic': False}
        trace = functools.cache(lambda f: torch.compile(f, **options))
        monkeypatch.setattr(graphs, 'compiled', trace)
    agent = make(arch, recurrent, L=1, E=2)
    eager = unroll(agent, *boards(T=3))
    monkeypatch.setattr(graphs.fused, 'enabled', True)
    assert_close(unroll(agent, *boards(T=3)), eager)


@pytest.mark.parametrize('arch, L, E, settings', [
    ('convlstm', 2, 2, {}),
    ('convglu', 2, 2, {}),
    ('convglu', 8, 8, {}),  # the paper's rule multiplies s by sqrt(8) per layer
    ('convglu', 8, 8, SHARED),
], ids=str)  # fmt: skip
def test_bfloat16_convolutions_stay_near_float32(arch, L, E, settings):
    """Values and the gradient of each parameter are compared. The carried state is fp32 in both
    cases."""
    found = []
    for dtype in ('float32', 'bfloat16'):
        agent = make(arch, L=L, E=E, params=torch.float32, dtype=dtype, **settings)
        (logits, value, *state), grads = unroll(agent, *boards(T=3))
        assert all(x.dtype == torch.float32 for x in (*state, *agent.init_state(1)))
        found.append([logits, value, *grads.values()])
    exact, low = found
    assert 1e-3 < distance(low, exact) < 0.4


def test_weight_gradients_are_not_summed_in_bfloat16():
    """512 calls each add 1 to a weight's gradient. A sum in bfloat16 would stop growing at 256."""
    agent = make('convglu', dtype='bfloat16')
    w = torch.ones(1, 1, 3, 3, requires_grad=True)
    x = torch.ones(1, 10, 10, 1)
    sum(agent.conv(x, w)[0, 5, 5, 0].float() for _ in range(512)).backward()
    torch.testing.assert_close(w.grad, torch.full_like(w, 512))


@kinds
@pytest.mark.parametrize('L, E, settings', CASES[1:6] + [(3, 4, {})], ids=str)
def test_multiply_adds_and_parameters_by_hand(arch, recurrent, L, E, settings):
    """`nominal` is the cost by which models are compared, `executed` what the core computes."""
    agent, D, H, r, Z, cells = make(arch, recurrent, L, E, **settings), 6, 7, 5, 32, 100
    macs = agent.macs_per_step()
    assert macs['encoder'] == cells * 9 * 6 * Z
    assert macs['head'] == 2 * 8 * cells * D + 9 * D * 2 * H + H * (4 + 1)
    if arch == 'convlstm':
        nominal = cells * L * E * 9 * (Z + 2 * D) * 4 * D
        # s and h_i, or one of them where they are equal; nothing below the first layer
        reading = L if recurrent else L - 1
        read = (2 if E > 1 or agent.config.routed else 1) * D
        core = cells * E * 9 * (L * Z + reading * read) * 4 * D
    else:
        nominal = cells * L * E * 9 * D * 2 * D
        core = nominal + cells * (Z * D + recurrent * D * D)
    if agent.config.routed:
        # queries, keys, scores, and the weighted sum over experts
        core += L * ((Z + D) * r + E * r * r + E * r + E * D * cells)
    assert (macs['nominal'], macs['executed']) == (nominal, core)
    outside = Z * 6 * 9 + Z + 8 * D + 9 * D * 2 * H + 2 * H + (H + 1) * 5  # encoder and head
    total = sum(p.numel() for p in agent.parameters())
    assert agent.num_params() == {'total': total, 'core': total - outside}


def test_sizes_follow_an_edited_layer():
    """A convolution that a fork adds counts in the cost by which models are compared."""

    class Gated(ConvGLU):
        def __init__(self, config):
            super().__init__(config)
            self.w2 = torch.nn.ParameterList(normal(6, 6, 3, 3, fan_in=54) for _ in self.w)

    config = AgentConfig(arch='convglu', n_layer=2, n_embd=6)
    added = Gated(config).nominal_macs() - ConvGLU(config).nominal_macs()
    assert added == 2 * 100 * 9 * 6 * 6


def test_an_aggregation_that_changes_a_single_h_is_refused(monkeypatch):
    """With E = 1 the weights of s and h are added, which is right only while s is h."""
    agent = make(L=2)
    real = agent.aggregate
    monkeypatch.setattr(agent, 'aggregate', lambda *args: 2 * real(*args))
    with pytest.raises(RuntimeError, match='s is not h'):
        agent(*boards(), agent.init_state(3))


# ---- initialization, other boards, saved agents -------------------------------------------------


@pytest.mark.parametrize('settings', [{}, {**SHARED, 'aggregation': 'softmax_l2'}], ids=str)
def test_both_kinds_of_convglu_start_with_the_same_weights_but_for_one_projection(settings):
    agents = []
    for recurrent in (True, False):
        torch.manual_seed(3)
        config = AgentConfig(arch='convglu', recurrent=recurrent, n_layer=2, n_expert=2, **settings)
        agents.append(build_agent(config).state_dict())
    recurrent, other = agents
    assert recurrent.keys() - other.keys() == {'wr'}
    assert all(torch.equal(recurrent[name], x) for name, x in other.items())
    # both projections start with the scale of their inputs
    assert recurrent['wp'].std().item() == pytest.approx(32**-0.5, rel=0.1)
    assert recurrent['wr'].std().item() == pytest.approx(128**-0.5, rel=0.1)


MAZE = {'board_size': (5, 7), 'planes': ((0, 1), (1, 0), (2, 3), (2, 9))}  # three channels


@kinds
def test_boards_of_other_sizes_and_planes(arch, recurrent, tmp_path):
    """Channels that no plane reads change nothing, and a saved agent keeps its board and planes."""
    make(arch, recurrent, L=2, E=2, params=torch.float32, **MAZE).save_pretrained(tmp_path)
    agent = load_agent(tmp_path)
    obs = torch.randint(0, 10, (3, 2, 5, 7, 3), dtype=torch.uint8)
    start = torch.tensor([[True, True], [False, True], [False, False]])
    logits, _, state = agent(obs, start, agent.init_state(2))
    assert logits.shape == (3, 2, 4) and all(x.shape[:3] == (2, 5, 7) for x in state)
    wider = torch.cat([obs, torch.full_like(obs, 9)], -1)
    assert torch.equal(agent(wider, start, agent.init_state(2))[0], logits)
    macs, usual = agent.macs_per_step(), make(arch, recurrent, L=2, E=2).macs_per_step()
    assert macs['nominal'] * 100 == usual['nominal'] * 35
    assert macs['encoder'] == 35 * 9 * 4 * 32


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_a_loaded_agent_has_the_dtype_of_its_run_and_no_tf32_if_that_is_float32(
    tmp_path, monkeypatch, dtype
):
    monkeypatch.setattr(torch.backends.cudnn, 'allow_tf32', True)
    make().save_pretrained(tmp_path, config={'settings': {'dtype': dtype}})
    assert load_agent(tmp_path).config.dtype == dtype
    assert torch.backends.cudnn.allow_tf32 == (dtype == 'bfloat16')
    assert_refused("^dtype = 'float16': expected", load_agent, tmp_path, dtype='float16')


@pytest.mark.parametrize('entries', [{'arch': 'mlp'}, {'n_embd': '6'}, {'planes': 3}], ids=str)
def test_a_damaged_description_of_an_agent_names_its_file(tmp_path, entries):
    make().save_pretrained(tmp_path, config=entries)
    assert_refused(f'^{tmp_path}/config.json: damaged', load_agent, tmp_path)


@pytest.mark.parametrize('settings, message', [
    ({'n_expert': 0}, 'n_expert = 0: must be at least 1'),
    ({'aggregation': 'sum'}, "aggregation = 'sum': expected one of sqrt_sum"),
    ({'radius': 2, 'n_expert': 2}, 'radius = 2: expected -1'),
    ({'radius': 0, 'arch': 'convglu'}, "radius = 0 needs aggregation = 'sqrt_sum'"),
    (SHARED, "residual = 'shared' is for"),
], ids=str)  # fmt: skip
def test_settings_that_do_not_fit_together_are_refused(settings, message):
    assert_refused(message, AgentConfig, **settings)

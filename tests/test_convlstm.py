"""Test convlstm.py against a reference written here: one expert and one step at a time, channels
first, in float64."""

import functools
import math

import pytest
import torch
import torch.nn.functional as F
from small_runs import assert_refused
from torch.utils._pytree import tree_map

from convlstm import AgentConfig, ConvGLU, build_agent, load_agent, normal
from support import compiling

EPS = 1e-6
both_kinds = pytest.mark.parametrize('recurrent', [True, False])


# ---- the equations once more --------------------------------------------------------------------


def over_rms(x, dims):
    return x / (x.square().mean(dims, keepdim=True) + EPS).sqrt()


def combine(agent, l, hs, z, s):
    """Return A(h_1..h_E), each (B, D, Y, X). s has no channels where a layer reads z alone."""
    config = agent.config
    E = len(hs)
    if config.aggregation == 'sqrt_sum':
        return sum(hs) / math.sqrt(E)
    if config.aggregation == 'mean':
        return sum(hs) / E
    router = agent.routers[l]
    context = torch.cat([z, s], 1).mean((2, 3))
    q = context @ router['q'][:, : context.size(1)].T + router['q_bias']
    scores = [q @ (router['k'] @ e) for e in router['embedding']]
    a = torch.softmax(torch.stack(scores) / math.sqrt(config.router_dim), 0)  # (E, B)
    total = a.sum(0) + EPS
    if config.aggregation == 'softmax_l2':
        total = (a.square().sum(0) + EPS).sqrt()
    return sum(a_i[:, None, None, None] * h for a_i, h in zip(a / total, hs, strict=True))


def neighbors(hs, i, r):
    return sum(hs[(i - k) % len(hs)] for k in range(r + 1)) / math.sqrt(r + 1)


def encode(agent, obs):
    planes = [obs[..., 0] == 0, obs[..., 0] == 3, obs[..., 0] == 4]  # nothing, agent, box
    planes += [obs[..., 1] == 0, obs[..., 1] == 1, obs[..., 1] == 2]  # floor, wall, target
    planes = torch.stack(planes, 1).double()
    z = F.conv2d(planes, agent.encoder, agent.encoder_bias, padding=1)
    return over_rms(z, (2, 3))


def head(agent, s):
    cells = s.flatten(2)  # (B, D, 100)
    weight = torch.softmax(torch.einsum('bdc,qd->bqc', cells, agent.query), 2)
    pooled = torch.einsum('bdc,bqc->bqd', cells, weight).flatten(1)
    a, b = agent.dense(torch.cat([pooled, cells.mean(2)], 1)).chunk(2, 1)
    x = a * torch.sigmoid(b)
    return agent.logits(x), agent.value(x)[:, 0]


def lstm_step(agent, z, state):
    config = agent.config
    s, hs, cells = state
    for l in range(config.n_layer):
        weights = torch.cat([agent.wz[l], agent.ws[l], agent.wh[l]], 1).chunk(config.n_expert)
        below, hs = hs, []
        for i in range(config.n_expert):
            read = s if config.radius < 0 else neighbors(below, i, config.radius)
            gates = F.conv2d(torch.cat([z, read, below[i]], 1), weights[i], padding=1)
            gain, bias = (p[l][i].flatten()[:, None, None] for p in (agent.gain, agent.bias))
            gi, gf, gg, go = (over_rms(gates, 1) * gain + bias).chunk(4, 1)
            cells[l][i] = torch.sigmoid(gf) * cells[l][i] + torch.sigmoid(gi) * torch.tanh(gg)
            hs.append(torch.sigmoid(go) * torch.tanh(cells[l][i]))
        s = combine(agent, l, hs, z, s)
    return s, hs, cells


def glu_step(agent, z, state):
    config = agent.config
    s = torch.einsum('dc,bcyx->bdyx', agent.wp, z) + agent.bias_p[:, None, None]
    if config.recurrent:
        s = s + torch.einsum('ec,bcyx->beyx', agent.wr, over_rms(state[0], 1))
    for l in range(config.n_layer):
        hs = []
        for w, b in zip(agent.w[l].chunk(config.n_expert), agent.bias[l], strict=True):
            x, gate = F.conv2d(over_rms(s, 1), w, b.flatten(), padding=1).chunk(2, 1)
            hs.append(x * torch.sigmoid(gate))
        if config.residual == 'shared':
            s = s + combine(agent, l, hs, z, s)
        else:
            s = combine(agent, l, [s + h for h in hs], z, s)
    return s, *state[1:]


def reference(agent):
    """Return logits and values of an unroll over OBS from a zero state, which is s, [h_i] and
    [[c_i] per layer]. s and h_i have no channels in a non-recurrent agent, whose first layer reads
    z alone."""
    config = agent.config
    zero = torch.zeros(3, config.n_embd, 10, 10, dtype=torch.float64)
    s = zero if config.recurrent else zero[:, :0]
    empty = s, [s] * config.n_expert, [[zero] * config.n_expert] * config.n_layer
    step = lstm_step if config.arch == 'convlstm' else glu_step
    state, out = empty, []
    for obs, start in zip(OBS, START, strict=True):
        keep = (~start)[:, None, None, None]
        state = tree_map(keep.mul, state if config.recurrent else empty)
        state = step(agent, encode(agent, obs), state)
        out.append(head(agent, over_rms(state[0], 1)))
    return [torch.stack(x) for x in zip(*out, strict=True)]


# ---- small agents, and what an unroll of them gives ---------------------------------------------


def make(arch='convlstm', recurrent=True, L=1, E=1, **settings):
    """Return an agent all of whose parameters matter (no zeros, no ones)."""
    torch.manual_seed(0)
    sizes = {'n_layer': L, 'n_expert': E, 'n_embd': 6, 'head_dim': 7, 'router_dim': 5}
    agent = build_agent(AgentConfig(arch, recurrent, **sizes, **settings)).double()
    for name, p in agent.named_parameters():
        if 'bias' in name or 'gain' in name or 'logits' in name:
            p.data.add_(torch.randn_like(p) * 0.3)
    return agent


# Observations (4, 3, 10, 10, 2) and starts (4, 3) of four steps on three random boards. Episodes
# start at the first step and within the unroll.
torch.manual_seed(1)
VARIABLE = torch.tensor([0, 3, 4])[torch.randint(3, (4, 3, 10, 10))]
OBS = torch.stack([VARIABLE, torch.randint(3, (4, 3, 10, 10))], -1).to(torch.uint8)
START = torch.tensor([[1, 1, 1], [0, 0, 0], [0, 1, 0], [1, 0, 0]]).bool()


def results(agent, logits, value, *state):
    """Return [logits, value, state ...] and the gradients of a random sum of the former two."""
    torch.manual_seed(2)
    loss = sum((x * torch.randn_like(x)).sum() for x in (logits, value))
    grads = torch.autograd.grad(loss, [p for p in agent.parameters() if p.numel()])
    return [logits, value, *state], grads


def unroll(agent):
    logits, value, state = agent(OBS, START, agent.init_state(3))
    return results(agent, logits, value, *state)


def single_steps(agent):
    w, state, steps = agent.prepare(), agent.init_state(3), []
    for obs, start in zip(OBS, START, strict=True):
        *out, state = agent.act(w, obs, start, state)
        steps.append(out)
    return results(agent, *(torch.stack(x) for x in zip(*steps, strict=True)), *state)


def assert_close(found, expected):
    """Compare what results() returns. Values are of order 1, gradients of order 1 to 100."""
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


# ---- tests --------------------------------------------------------------------------------------

ROUTED = {'aggregation': 'softmax_l2'}
LSTMS = [  # arch, L, E, other settings
    ('convlstm', 3, 1, {}),
    ('convlstm', 2, 3, {}),
    ('convlstm', 2, 3, ROUTED),
    ('convlstm', 2, 1, ROUTED),
    ('convlstm', 2, 3, {'aggregation': 'mean'}),
    ('convlstm', 2, 3, {'aggregation': 'softmax_mean'}),
]
RINGS = [('convlstm', 2, 4, {'radius': 0}), ('convlstm', 1, 4, {'radius': 2})]
GLUS = [
    ('convglu', 2, 3, {}),
    ('convglu', 2, 3, ROUTED),
    ('convglu', 2, 3, {**ROUTED, 'residual': 'shared'}),
]


@both_kinds
@pytest.mark.parametrize('arch, L, E, settings', LSTMS + RINGS + GLUS, ids=str)
def test_equals_reference(arch, recurrent, L, E, settings):
    """Values and all gradients of an unroll, and of as many single steps."""
    agent = make(arch, recurrent, L, E, **settings)
    expected = results(agent, *reference(agent))
    assert expected[0][0].std() > 1e-2  # the comparison sees something
    values, grads = unroll(agent)
    assert_close((values[:2], grads), expected)
    assert_close(single_steps(agent), (values, grads))


@both_kinds
@pytest.mark.parametrize('arch, L, E, settings', [RINGS[1], GLUS[2]], ids=str)
def test_fused_functions_change_nothing(arch, recurrent, L, E, settings, request, monkeypatch):
    """torch.compile traces each one as a whole graph, and the results are the same. With --long
    Inductor also generates the code, which takes most of the time."""
    if not request.config.getoption('--long'):
        options = {'backend': 'aot_eager', 'fullgraph': True, 'dynamic': False}
        trace = functools.cache(lambda f: torch.compile(f, **options))
        monkeypatch.setattr(compiling, 'compiled', trace)
    agent = make(arch, recurrent, L, E, **settings)
    eager = unroll(agent)
    monkeypatch.setattr(compiling.fused, 'enabled', True)
    assert_close(unroll(agent), eager)


@pytest.mark.parametrize('arch, n', [('convlstm', 2), ('convglu', 8)])
def test_bfloat16_convolutions_stay_near_float32(arch, n):
    """Values and the gradient of each parameter are compared, for n layers of n experts. With 8,
    ConvGLU multiplies s by sqrt(8) per layer. The carried state is fp32 in both dtypes."""
    found = []
    for dtype in ('float32', 'bfloat16'):
        agent = make(arch, L=n, E=n, dtype=dtype).float()
        (logits, value, *state), grads = unroll(agent)
        assert all(x.dtype == torch.float32 for x in (*state, *agent.init_state(1)))
        found.append([logits, value, *grads])
    differences = [(low - exact).norm() / exact.norm() for exact, low in zip(*found, strict=True)]
    assert 1e-3 < torch.stack(differences).max() < 0.4  # NaN is refused, too


def test_weight_gradients_are_not_summed_in_bfloat16():
    """512 calls each add 1 to a weight's gradient. A sum in bfloat16 would stop growing at 256."""
    agent = make('convglu', dtype='bfloat16')
    w = torch.ones(1, 1, 3, 3, requires_grad=True)
    x = torch.ones(1, 10, 10, 1)
    sum(agent.conv(x, w)[0, 5, 5, 0].float() for _ in range(512)).backward()
    assert (w.grad == 512).all()


@both_kinds
@pytest.mark.parametrize('arch, L, E', [('convlstm', 2, 3), ('convglu', 3, 2)])
def test_multiply_adds_by_hand(arch, recurrent, L, E):
    """This is the cost by which agents are compared, with D = 6 and 32 channels of z."""
    weights = 9 * (32 + 2 * 6) * 4 * 6 if arch == 'convlstm' else 9 * 6 * 2 * 6
    assert make(arch, recurrent, L, E).nominal_macs() == 100 * L * E * weights


def test_sizes_follow_an_edited_layer():
    """A convolution that a fork adds counts in the cost by which models are compared."""

    class Gated(ConvGLU):
        def __init__(self, config):
            super().__init__(config)
            self.gate = normal(6, 6, 3, 3, fan_in=54)

    config = AgentConfig('convglu', n_embd=6)
    assert Gated(config).nominal_macs() - ConvGLU(config).nominal_macs() == 100 * 9 * 6 * 6


def test_an_aggregation_that_changes_a_single_h_is_refused(monkeypatch):
    """With E = 1 the weights of s and h are added, which is right only while s is h."""
    agent = make()
    monkeypatch.setattr(agent, 'aggregate', lambda l, h, z, s: 2 * h.squeeze(3))
    with pytest.raises(RuntimeError, match='s is not h'):
        unroll(agent)


# ---- initialization, other boards, saved agents -------------------------------------------------


def test_both_kinds_of_convglu_start_with_the_same_weights_but_for_one_projection():
    agents = []
    for recurrent in (True, False):
        torch.manual_seed(3)
        config = AgentConfig('convglu', recurrent, 2, 2, aggregation='softmax_l2')
        agents.append(build_agent(config).state_dict())
    both, other = agents
    # both projections start with the scale of their inputs
    assert both['wp'].std().item() == pytest.approx(32**-0.5, rel=0.1)
    assert both.pop('wr').std().item() == pytest.approx(128**-0.5, rel=0.1)
    torch.testing.assert_close(other, both, rtol=0, atol=0)


def test_boards_of_other_sizes_and_planes(tmp_path):
    """A saved agent keeps them."""
    maze = {'board_size': (5, 7), 'planes': ((0, 1), (1, 0), (2, 3), (2, 9))}  # three channels
    make(**maze).float().save_pretrained(tmp_path)
    agent = load_agent(tmp_path)
    obs = torch.zeros(4, 3, 5, 7, 3, dtype=torch.uint8)
    logits, _, state = agent(obs, START, agent.init_state(3))
    assert logits.shape == (4, 3, 4) and all(x.shape[:3] == (3, 5, 7) for x in state)
    assert agent.nominal_macs() * 100 == make().nominal_macs() * 35


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_a_loaded_agent_has_the_dtype_of_its_run_and_no_tf32_if_that_is_float32(
    tmp_path, monkeypatch, dtype
):
    monkeypatch.setattr(torch.backends.cudnn, 'allow_tf32', True)
    make().save_pretrained(tmp_path, config={'settings': {'dtype': dtype}})
    assert load_agent(tmp_path, dtype='float32').config.dtype == 'float32'
    torch.backends.cudnn.allow_tf32 = True
    assert load_agent(tmp_path).config.dtype == dtype
    assert torch.backends.cudnn.allow_tf32 == (dtype == 'bfloat16')


@pytest.mark.parametrize('settings, message', [
    ({'n_expert': 0}, 'n_expert = 0: must be at least 1'),
    ({'aggregation': 'sum'}, "aggregation = 'sum': expected one of sqrt_sum"),
    ({'radius': 2, 'n_expert': 2}, 'radius = 2: expected -1'),
    ({'radius': 0, 'arch': 'convglu'}, "radius = 0 needs aggregation = 'sqrt_sum'"),
    ({'residual': 'shared'}, "residual = 'shared' is for"),
], ids=str)  # fmt: skip
def test_settings_that_do_not_fit_together_are_refused(settings, message):
    assert_refused(message, AgentConfig, **settings)

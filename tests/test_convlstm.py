"""convlstm.py, plain and fast, against a reference written apart: one expert and one step at a
time, channels first."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from convlstm import AgentConfig, Conv, Weight, build_agent

EPS = 1e-6
AGENTS = [(arch, recurrent) for arch in ('convlstm', 'convglu') for recurrent in (True, False)]
agents = pytest.mark.parametrize('arch, recurrent', AGENTS)


def over_rms(x, dims):
    return x / (x.square().mean(dims, keepdim=True) + EPS).sqrt()


def combine(agent, l, hs, z, s):
    """A(h_1..h_E), each (B, D, Y, X)."""
    c, E = agent.config, len(hs)
    if not c.aggregation.startswith('softmax'):
        return sum(hs) / {'mean': E, 'sqrt_sum': math.sqrt(E)}[c.aggregation]
    p, context = agent.routers[l], torch.cat([z, s], 1).mean((2, 3))
    q = context @ p['q'].T + p['q_bias']
    scores = torch.stack([q @ (p['k'] @ e + p['k_bias']) for e in p['embedding']], 1)
    a = torch.softmax(scores / math.sqrt(c.router_dim), 1)
    below = a.sum(1) + EPS if c.aggregation == 'softmax_mean' else (a.square().sum(1) + EPS).sqrt()
    return sum((a[:, i] / below)[:, None, None, None] * h for i, h in enumerate(hs))


def heard(hs, i, r):
    return sum(hs[(i - k) % len(hs)] for k in range(r + 1)) / math.sqrt(r + 1)


def encode(agent, obs):
    agent_and_box = F.one_hot(obs[..., 0].long(), 5)[..., [0, 3, 4]]
    planes = torch.cat([agent_and_box, F.one_hot(obs[..., 1].long(), 3)], -1).movedim(-1, 1)
    z = F.conv2d(planes.double(), agent.encoder, agent.encoder_bias, padding=1)
    return over_rms(z, (2, 3))


def head(agent, s):
    cells, pooled = s.flatten(2), []  # (B, D, 100)
    for query in agent.query:
        weight = torch.softmax(torch.einsum('bdc,d->bc', cells, query), 1)
        pooled.append(torch.einsum('bdc,bc->bd', cells, weight))
    a, b = agent.dense(torch.cat([*pooled, cells.mean(2)], 1)).chunk(2, 1)
    x = a * torch.sigmoid(b)
    return agent.logits(x), agent.value(x)[:, 0]


def lstm_step(agent, z, state):
    c, D, new_cells = agent.config, agent.config.n_embd, []
    s, hs, cells = state if c.recurrent else (None, None, None)
    for l in range(c.n_layer):
        out, row = [], []
        for i in range(c.n_expert):
            mine = slice(i * 4 * D, (i + 1) * 4 * D)
            x, w = [z], [agent.wz[l][mine]]
            if s is not None:
                x += [heard(hs, i, c.radius) if c.radius >= 0 else s, hs[i]]
                w += [agent.ws[l][mine], agent.wh[l][mine]]
            pre = F.conv2d(torch.cat(x, 1), torch.cat(w, 1), padding=1)
            gain, bias = (p[l][i].flatten()[:, None, None] for p in (agent.gain, agent.bias))
            gi, gf, gg, go = (over_rms(pre, 1) * gain + bias).chunk(4, 1)
            cell = torch.sigmoid(gi) * torch.tanh(gg)
            if c.recurrent:
                cell = cell + torch.sigmoid(gf) * cells[l][i]
            row.append(cell)
            out.append(torch.sigmoid(go) * torch.tanh(cell))
        s = combine(agent, l, out, z, z.new_zeros(len(z), D, 10, 10) if s is None else s)
        hs = out
        new_cells.append(row)
    return s, (s, hs, new_cells)


def glu_step(agent, z, state):
    c, D, s = agent.config, agent.config.n_embd, state[0]
    base = torch.einsum('dc,bcyx->bdyx', agent.wp, z) + agent.bias_p[:, None, None]
    if c.recurrent:
        base = base + torch.einsum('ec,bcyx->beyx', agent.wr, over_rms(s, 1))
    for l in range(c.n_layer):
        s, out = base if l == 0 else s, []
        for i in range(c.n_expert):
            w, b = agent.w[l][i * 2 * D : (i + 1) * 2 * D], agent.bias[l][i].flatten()
            x, gate = F.conv2d(over_rms(s, 1), w, b, padding=1).chunk(2, 1)
            out.append(x * torch.sigmoid(gate) + (0 if c.residual == 'shared' else s))
        s = combine(agent, l, out, z, s) + (s if c.residual == 'shared' else 0)
    return s, (s, state[1], [])


def reference(agent, obs, start):
    """Logits, values of an unroll from a zero state; state is (s, [h_i], [[c_i] per level])."""
    c, (T, B), out = agent.config, start.shape, []
    zero = torch.zeros(B, c.n_embd, 10, 10, dtype=torch.float64)
    state = (zero, [zero] * c.n_expert, [[zero] * c.n_expert] * c.n_layer)
    for t in range(T):
        keep = (~start[t]).double()[:, None, None, None]
        cells = [[x * keep for x in row] for row in state[2]]
        state = (state[0] * keep, [h * keep for h in state[1]], cells)
        step = lstm_step if c.arch == 'convlstm' else glu_step
        s, state = step(agent, encode(agent, obs[t]), state)
        out.append(head(agent, over_rms(s, 1)))
    return [torch.stack(x) for x in zip(*out, strict=True)]


def make(arch, recurrent, L, E, d=6, wide=torch.float64, **settings):
    """A small agent, all of whose parameters matter (no zeros, no ones)."""
    torch.manual_seed(0)
    config = AgentConfig(arch, recurrent, L, E, d, head_dim=7, router_dim=5, **settings)
    agent = build_agent(config).to(wide)
    with torch.no_grad():
        for name, p in agent.named_parameters():
            if 'bias' in name or 'gain' in name or 'logits' in name:
                p.add_(torch.randn_like(p) * 0.3)
    return agent


def boards(T=4, B=3):
    g = torch.Generator().manual_seed(1)
    variable = torch.tensor([0, 0, 3, 4])[torch.randint(4, (T, B, 10, 10), generator=g)]
    obs = torch.stack([variable, torch.randint(3, (T, B, 10, 10), generator=g)], -1).to(torch.uint8)
    start = torch.rand(T, B, generator=g) < 0.25
    start[0] = True
    start[T // 2, B // 2] = True
    return obs, start


def results(agent, logits, value, *state):
    """Logits, value and the state after them; all gradients of a sum over the former two."""
    g = torch.Generator().manual_seed(2)
    loss = sum((x * torch.randn(x.shape, generator=g)).sum() for x in (logits, value))
    named = {name: p for name, p in agent.named_parameters() if p.numel()}
    grads = torch.autograd.grad(loss, list(named.values()))
    return [logits, value, *state], dict(zip(named, grads, strict=True))


def unroll(agent, obs, start):
    logits, value, state = agent(obs, start, agent.init_state(start.size(1)))
    return results(agent, logits, value, *state)


def furthest(ours, theirs):
    pairs = zip(ours, theirs, strict=True)
    return torch.stack([(a - b).norm() / b.norm() for a, b in pairs]).max()  # a NaN stays one


def assert_close(ours, theirs):
    """Values, states, and gradients relative to the largest: they are sums of such terms."""
    assert furthest(ours[0], theirs[0]) <= 1e-9
    largest = max(x.norm() for x in theirs[1].values())
    assert all((ours[1][name] - x).norm() <= 1e-9 * largest for name, x in theirs[1].items())


ROUTED, SHARED = ('mean', 'softmax_mean', 'softmax_l2'), {'residual': 'shared'}
CASES = [
    (1, 1, {}), (3, 1, {}), (2, 3, {}), *[(2, 3, {'aggregation': name}) for name in ROUTED],
    (2, 1, {'aggregation': 'softmax_l2'}), (2, 4, {'radius': 0}), (3, 4, {'radius': 2}),
    (1, 3, {'radius': 1}), (2, 3, SHARED), (2, 3, SHARED | {'aggregation': 'softmax_l2'}),
]  # fmt: skip


def single_steps(agent, obs, start):
    state, w, steps = agent.init_state(start.size(1)), agent.prepare(), []
    for now, begins in zip(obs, start, strict=True):
        *out, state = agent.act(w, now, begins, state)
        steps.append(out)
    return results(agent, *(torch.stack(x) for x in zip(*steps, strict=True)), *state)


@pytest.mark.parametrize('L, E, settings', CASES, ids=str)
@agents
def test_equals_reference(arch, recurrent, L, E, settings):
    """Values and all gradients of an unroll with resets inside, float64, by both paths; T steps at
    once are T single steps, the states after them too."""
    if {'convlstm': 'residual', 'convglu': 'radius'}[arch] in settings:
        pytest.skip('the other one alone has it')
    agent, (obs, start) = make(arch, recurrent, L, E, **settings), boards()
    theirs = results(agent, *reference(agent, obs, start))
    assert theirs[0][0].std() > 1e-2  # the comparison sees something
    if E > 1:
        assert all(g.abs().max() > 0 for g in theirs[1].values())  # every parameter learns
    for agent.config.path in ('plain', 'fast'):
        ours, grads = unroll(agent, obs, start)
        assert_close((ours[:2], grads), theirs)
    assert_close(single_steps(agent, obs, start), (ours, grads))


@pytest.mark.parametrize('residual', ['expert', 'shared'])
def test_deep_convglu_in_bfloat16(residual):
    """E = 8, L = 8: the paper's rule multiplies the stream by sqrt(8) a level; it stays in fp32."""
    outs = []
    for dtype in ('float32', 'bfloat16'):
        agent = make('convglu', True, 8, 8, wide=torch.float32, dtype=dtype, residual=residual)
        outs.append(torch.cat([x.flatten() for x in agent(*boards(), agent.init_state(3))[:2]]))
    assert outs[1].isfinite().all() and (outs[1] - outs[0]).norm() / outs[0].norm() < 0.05


@agents
def test_compiled_and_bfloat16(arch, recurrent, request):
    """Compiled = fast in fp32 (without --long for recurrent agents alone); bf16 convolutions stay
    near fp32, each parameter's gradient too. One level: each of several compiles again."""
    found, compiles = [], recurrent or request.config.getoption('--long')
    for settings in ({}, {'dtype': 'bfloat16'}, {'path': 'compiled'})[: 2 + compiles]:
        agent = make(arch, recurrent, 1, 2, d=8, wide=torch.float32, **settings)
        (logits, value, *_), grads = unroll(agent, *boards(T=3))
        found.append([logits, value, *grads.values()])
    exact, low, *compiled = found
    assert 1e-3 < furthest(low, exact) < 0.1
    assert all(furthest(one, exact) < 1e-4 for one in compiled)


def test_weight_gradients_are_not_summed_in_bfloat16():
    """512 calls that each add 1 to a weight's gradient: a sum in bfloat16 stops growing at 256."""
    x, calls = torch.ones(1, 10, 10, 1, dtype=torch.bfloat16), []
    w = torch.ones(1, 1, 3, 3, requires_grad=True)
    in_bf16 = Weight.apply(w, torch.bfloat16, 1, calls)
    sum(Conv.apply(x, in_bf16, 1, calls)[0, 5, 5, 0].float() for _ in range(512)).backward()
    torch.testing.assert_close(w.grad, torch.full_like(w, 512))


@agents
@pytest.mark.parametrize('L, E, settings', CASES[1:6] + [(3, 4, {})], ids=str)
def test_macs_are_what_runs(arch, recurrent, L, E, settings):
    """macs_per_step against torch's own counter; num_params by hand."""
    agent, (obs, start) = make(arch, recurrent, L, E, **settings), boards(T=1, B=1)
    macs, w, state = agent.macs_per_step(), agent.prepare(), agent.init_state(1)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        agent.act(w, obs[0], start[0], state)
    # the router's keys, once an unroll in principle, and the weighted sum over experts
    more = agent.config.routed * L * E * (5 * 5 + 6 * 100)
    parts = macs['executed'] + macs['encoder'] + macs['head']
    assert counter.get_total_flops() // 2 - more == parts
    cost = 9 * (32 + 2 * 6) * 4 * 6 if arch == 'convlstm' else 9 * 6 * 2 * 6
    assert macs['nominal'] == 100 * L * E * cost
    outside = 32 * 6 * 9 + 32 + 8 * 6 + 9 * 6 * 14 + 14 + 7 * 5 + 5  # encoder, head
    total = sum(p.numel() for p in agent.parameters())
    assert agent.num_params() == {'total': total, 'core': total - outside}

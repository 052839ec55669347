"""convlstm.py against a reference written apart (one expert and one step at a time, channels first), and its fast path against the plain."""

import csv
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from reference import assert_close as close
from torch.utils.flop_counter import FlopCounterMode

from convlstm import AGGREGATIONS, AgentConfig, build_agent

PAPER = Path(__file__).resolve().parents[2] / 'shared' / 'paper' / 'sokoban_returns.csv'
EPS = 1e-6
KINDS = [(kind, recurrent) for kind in ('convlstm', 'convglu') for recurrent in (True, False)]


def over_rms(x, dims):
    return x / (x.square().mean(dims, keepdim=True) + EPS).sqrt()


def combine(agent, l, hs, z, s):
    """A(h_1..h_E), each (B, D, Y, X)."""
    c, E = agent.config, len(hs)
    if c.aggregation == 'mean':
        return sum(hs) / E
    if c.aggregation == 'sqrt_sum':
        return sum(hs) / math.sqrt(E)
    p, context = agent.routers[l], torch.cat([z, s], 1).mean((2, 3))
    q = context @ p['q'].T + p['q_bias']
    scores = torch.stack([q @ (p['k'] @ e + p['k_bias']) for e in p['embedding']], 1) / math.sqrt(
        c.router_dim
    )
    a = torch.exp(scores) / torch.exp(scores).sum(1, keepdim=True)
    below = a.sum(1) + EPS if c.aggregation == 'softmax_mean' else (a.square().sum(1) + EPS).sqrt()
    return sum((a[:, i] / below)[:, None, None, None] * h for i, h in enumerate(hs))


def heard(hs, i, r):
    return sum(hs[(i - k) % len(hs)] for k in range(r + 1)) / math.sqrt(r + 1)


def encode(agent, obs):
    planes = (
        torch.cat(
            [F.one_hot(obs[..., 0].long(), 5)[..., [0, 3, 4]], F.one_hot(obs[..., 1].long(), 3)], -1
        )
        .movedim(-1, 1)
        .double()
    )
    return over_rms(F.conv2d(planes, agent.encoder, agent.encoder_bias, padding=1), (2, 3))


def head(agent, s):
    cells = s.flatten(2)  # (B, D, 100)
    pooled = []
    for query in agent.query:
        weight = torch.softmax(torch.einsum('bdc,d->bc', cells, query), 1)
        pooled.append(torch.einsum('bdc,bc->bd', cells, weight))
    x = torch.cat([*pooled, cells.mean(2)], 1) @ agent.dense.weight.T + agent.dense.bias
    a, b = x.chunk(2, 1)
    x = a * torch.sigmoid(b)
    return x @ agent.logits.weight.T + agent.logits.bias, (
        x @ agent.value.weight.T + agent.value.bias
    )[:, 0]


def lstm_step(agent, z, state):
    c, D = agent.config, agent.config.n_embd
    s, hs, cells = state if c.recurrent else (None, None, None)
    zero, new_cells = z.new_zeros(len(z), D, 10, 10), []
    for l in range(c.n_layer):
        out, rows = [], []
        for i in range(c.n_expert):
            mine = slice(i * 4 * D, (i + 1) * 4 * D)
            x, w = [z], [agent.wz[l][mine]]
            if s is not None:
                x += [heard(hs, i, c.radius) if c.radius >= 0 else s, hs[i]]
                w += [agent.ws[l][mine], agent.wh[l][mine]]
            pre = F.conv2d(torch.cat(x, 1), torch.cat(w, 1), padding=1)
            gain, bias = (p[l][i].flatten()[:, None, None] for p in (agent.gain, agent.bias))
            gi, gf, gg, go = (over_rms(pre, 1) * gain + bias).chunk(4, 1)
            cell = torch.sigmoid(gi) * torch.tanh(gg) + (
                torch.sigmoid(gf) * cells[l][i] if c.recurrent else 0
            )
            rows.append(cell)
            out.append(torch.sigmoid(go) * torch.tanh(cell))
        s, hs = combine(agent, l, out, z, zero if s is None else s), out
        new_cells.append(rows)
    return s, (s, hs, new_cells)


def glu_step(agent, z, state):
    c, D = agent.config, agent.config.n_embd
    base = torch.einsum('dc,bcyx->bdyx', agent.wp, z) + agent.bias_p[:, None, None]

    def read(last):
        return (
            base + torch.einsum('ec,bcyx->beyx', agent.wr, over_rms(last, 1))
            if c.recurrent
            else base
        )

    s, hs = state[:2]
    for l in range(c.n_layer):
        out = []
        full = read(s) if l == 0 else s
        for i in range(c.n_expert):
            mine = (
                (read(heard(hs, i, c.radius)) if l == 0 else heard(hs, i, c.radius))
                if c.radius >= 0
                else full
            )
            w, b = agent.w[l][i * 2 * D : (i + 1) * 2 * D], agent.bias[l][i].flatten()
            x, gate = F.conv2d(over_rms(mine, 1), w, b, padding=1).chunk(2, 1)
            out.append(x * torch.sigmoid(gate) + (0 if c.residual == 'shared' else mine))
        s, hs = combine(agent, l, out, z, full) + (full if c.residual == 'shared' else 0), out
    return s, (s, hs, [])


def reference(agent, obs, start):
    """Logits, values of an unroll from a zero state; state is (s, [h_i], [[c_i] per level])."""
    c, (T, B) = agent.config, start.shape
    zero = torch.zeros(B, c.n_embd, 10, 10, dtype=torch.float64)
    state = (zero, [zero] * c.n_expert, [[zero] * c.n_expert] * c.n_layer)
    out = []
    for t in range(T):
        keep = (~start[t]).double()[:, None, None, None]
        state = (
            state[0] * keep,
            [h * keep for h in state[1]],
            [[x * keep for x in row] for row in state[2]],
        )
        step = lstm_step if c.arch == 'convlstm' else glu_step
        s, state = step(agent, encode(agent, obs[t]), state)
        out.append(head(agent, over_rms(s, 1)))
    return [torch.stack(x) for x in zip(*out, strict=True)]


def make(kind, recurrent, L, E, d=6, seed=0, wide=torch.float64, **settings):
    """A small agent, all of whose parameters matter (no zeros, no ones)."""
    torch.manual_seed(seed)
    agent = build_agent(
        AgentConfig(kind, recurrent, L, E, d, head_dim=7, router_dim=5, **settings)
    ).to(wide)
    with torch.no_grad():
        for name, p in agent.named_parameters():
            if 'bias' in name or 'gain' in name or 'logits' in name:
                p.add_(torch.randn_like(p) * 0.3)
    return agent


def boards(T=4, B=3, seed=1):
    g = torch.Generator().manual_seed(seed)
    variable = torch.tensor([0, 0, 3, 4])[torch.randint(4, (T, B, 10, 10), generator=g)]
    obs = torch.stack([variable, torch.randint(3, (T, B, 10, 10), generator=g)], -1).to(torch.uint8)
    start = torch.rand(T, B, generator=g) < 0.25
    start[0] = True
    start[T // 2, B // 2] = True
    return obs, start


def gradients(agent, logits, value):
    g = torch.Generator().manual_seed(2)
    loss = (logits * torch.randn(logits.shape, generator=g, dtype=logits.dtype)).sum() + (
        value * torch.randn(value.shape, generator=g, dtype=value.dtype)
    ).sum()
    names, params = zip(*[(n, p) for n, p in agent.named_parameters() if p.numel()], strict=True)
    return dict(zip(names, torch.autograd.grad(loss, params, allow_unused=True), strict=True))


def assert_close(ours, theirs):
    """Relative to the largest of them: gradients are sums of terms of about its size. A parameter without a gradient has none in both."""
    assert {name for name in ours if ours[name] is None} == {
        name for name in theirs if theirs[name] is None
    }
    size = max(x.norm().item() for x in theirs.values() if x is not None)
    for name, x in theirs.items():
        if x is not None:
            close(ours[name], x, size=size, what=name)


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
]


@pytest.mark.parametrize(
    'L, E, settings', CASES, ids=[f'L{L}E{E}{"".join(map(str, s.values()))}' for L, E, s in CASES]
)
@pytest.mark.parametrize('kind, recurrent', KINDS)
def test_equals_reference(kind, recurrent, L, E, settings):
    """Values and all gradients of an unroll with resets inside, float64, by both paths."""
    agent = make(kind, recurrent, L, E, **settings)
    obs, start = boards()
    theirs = reference(agent, obs, start)
    wanted = gradients(agent, *theirs)
    for path in ('plain', 'fast'):
        agent.config.path = path
        ours = agent(obs, start, agent.init_state(3))[:2]
        assert_close(
            dict(zip(('logits', 'value'), ours, strict=True)),
            dict(zip(('logits', 'value'), theirs, strict=True)),
        )
        assert ours[0].std() > 1e-2  # the comparison sees something
        assert_close(gradients(agent, *ours), wanted)


@pytest.mark.parametrize('recurrent', [True, False])
@pytest.mark.parametrize('aggregation', ['sqrt_sum', 'softmax_l2'])
def test_shared_residual(recurrent, aggregation):
    agent = make('convglu', recurrent, 2, 3, residual='shared', aggregation=aggregation)
    obs, start = boards()
    ours, theirs = agent(obs, start, agent.init_state(3))[:2], reference(agent, obs, start)
    assert_close(dict(enumerate(ours)), dict(enumerate(theirs)))
    assert_close(gradients(agent, *ours), gradients(agent, *theirs))


@pytest.mark.parametrize('residual', ['expert', 'shared'])
def test_deep_convglu_in_bfloat16(residual):
    """E = 8, L = 8: the paper's rule multiplies the stream by sqrt(8) a level; it is fp32, and stays near the fp32 result."""
    obs, start = boards()
    outs = []
    for dtype in ('float32', 'bfloat16'):
        agent = make('convglu', True, 8, 8, wide=torch.float32, dtype=dtype, residual=residual)
        outs.append(torch.cat([x.flatten() for x in agent(obs, start, agent.init_state(3))[:2]]))
    assert outs[1].isfinite().all() and (outs[1] - outs[0]).norm() / outs[0].norm() < 0.05


@pytest.mark.parametrize('kind, recurrent', KINDS)
@pytest.mark.parametrize(
    'settings',
    [{}, {'radius': 1}, {'aggregation': 'softmax_mean'}],
    ids=['sqrt_sum', 'radius', 'routed'],
)
def test_unroll_is_single_steps(kind, recurrent, settings):
    """T steps at once = T single steps, resets inside, gradients through time included; the states after them too."""
    agent = make(kind, recurrent, 2, 2, **settings)
    obs, start = boards(T=6)
    logits, value, end = agent(obs, start, agent.init_state(3))
    state, w, steps = agent.init_state(3), agent.prepare(), []
    for t in range(6):
        *out, state = agent.act(w, obs[t], start[t], state)
        steps.append(out)
    single = [torch.stack(x) for x in zip(*steps, strict=True)]
    assert_close(
        {'l': logits, 'v': value, **dict(enumerate(end))},
        {'l': single[0], 'v': single[1], **dict(enumerate(state))},
    )
    assert_close(gradients(agent, *single), gradients(agent, logits, value))


@pytest.mark.parametrize('kind, recurrent', KINDS)
def test_a_start_forgets(kind, recurrent):
    """After a start nothing of the past is left; without one a recurrent agent remembers, and the other never does."""
    agent = make(kind, recurrent, 2, 2)
    obs, start = boards(T=3)
    other = obs.clone()
    other[0] = obs[0].flip(1)  # another past
    for again in (True, False):
        start[1:] = False
        start[1] = again
        a, b = (agent(x, start, agent.init_state(3))[0][2] for x in (obs, other))
        assert torch.equal(a, b) == (again or not recurrent)


@pytest.mark.parametrize('kind, recurrent', KINDS)
def test_full_radius_is_the_default(kind, recurrent):
    obs, start = boards()
    agents = [make(kind, recurrent, 2, 4, radius=radius) for radius in (3, -1)]
    outs = [agent(obs, start, agent.init_state(3))[:2] for agent in agents]
    assert_close(dict(enumerate(outs[0])), dict(enumerate(outs[1])))
    assert_close(gradients(agents[0], *outs[0]), gradients(agents[1], *outs[1]))


def test_radius_is_local():
    """With radius 1, expert 0's past reaches expert 1 in one level and not expert 2."""
    agent = make('convlstm', True, 1, 4, radius=1)
    obs, _ = boards(T=1)
    start, state = torch.zeros(1, 3, dtype=torch.bool), agent.init_state(3)
    changed = [x.clone() for x in state]
    changed[1][:, :, :, 0] += 1
    after = [agent(obs, start, tuple(x))[2][1] for x in (state, changed)]
    differs = [not torch.equal(after[0][:, :, :, i], after[1][:, :, :, i]) for i in range(4)]
    assert differs == [True, True, False, False]


@pytest.mark.parametrize('kind, recurrent', KINDS)
def test_compiled_and_bfloat16(kind, recurrent, request):
    """Compiled = fast in fp32 (without --long for recurrent agents alone); bf16 convolutions stay near fp32, gradients too. One level: each of
    several compiles again."""
    obs, start = boards(T=3)
    results = {}
    paths = {'fp32': {}, 'bf16': {'dtype': 'bfloat16'}, 'compiled': {'path': 'compiled'}}
    if not (recurrent or request.config.getoption('--long')):
        del paths['compiled']
    for name, settings in paths.items():
        agent = make(kind, recurrent, 1, 2, d=8, wide=torch.float32, **settings)
        out = agent(obs, start, agent.init_state(3))[:2]
        found = {'logits': out[0], 'value': out[1], **gradients(agent, *out)}
        results[name] = {key: x for key, x in found.items() if x is not None}
    error = {
        name: {
            key: ((x - results['fp32'][key]).norm() / results['fp32'][key].norm()).item()
            for key, x in result.items()
        }
        for name, result in results.items()
    }  # of each parameter: a small one's cannot hide
    assert 'compiled' not in error or max(error['compiled'].values()) < 1e-4, error['compiled']
    assert 1e-3 < max(error['bf16'].values()) < 0.1, error['bf16']


def test_weight_gradients_are_not_summed_in_bfloat16():
    """Over many steps the bf16 path's weight gradient is nearer the fp32 one than a sum of bf16 gradients is."""
    obs, start = boards(T=24, B=2)
    grads = {}
    for dtype, path in (('float32', 'plain'), ('bfloat16', 'plain'), ('bfloat16', 'fast')):
        agent = make('convlstm', True, 1, 2, d=8, wide=torch.float32, path=path, dtype=dtype)
        out = agent(obs, start, agent.init_state(2))[:2]
        grads[dtype, path] = gradients(agent, *out)['wh.0']
    exact = grads['float32', 'plain']
    error = {
        path: (grads['bfloat16', path] - exact).norm() / exact.norm() for path in ('plain', 'fast')
    }
    assert error['fast'] < error['plain']


@pytest.mark.parametrize('kind, recurrent', KINDS)
@pytest.mark.parametrize('L, E, settings', CASES[1:6] + CASES[8:9], ids=lambda x: str(x))
def test_macs_are_what_runs(kind, recurrent, L, E, settings):
    """macs_per_step against torch's own counter, in both paths; num_params against the parameters."""
    for path, which in (('fast', 'executed'), ('plain', 'core')):
        agent = make(kind, recurrent, L, E, path=path, **settings)
        macs, obs = agent.macs_per_step(), boards(T=1, B=1)[0]
        with torch.no_grad():
            w, state = agent.prepare(), agent.init_state(1)
            with FlopCounterMode(display=False) as counter:
                agent.act(w, obs[0], torch.ones(1, dtype=torch.bool), state)
        counted = counter.get_total_flops() // 2
        router = (
            L * E * 5 * 5 if agent.config.routed else 0
        )  # the keys, once an unroll in principle
        mixed = L * E * 6 * 100 if agent.config.routed else 0  # the weighted sum over experts
        assert counted - router - mixed == macs[which] + macs['encoder'] + macs['head'], (
            path,
            counted,
            macs,
        )
    sizes = agent.num_params()
    assert (
        sizes['total']
        == sum(p.numel() for p in agent.parameters())
        == sizes['core'] + sizes['head'] + sizes['encoder']
    )
    assert (
        sizes['encoder'] == 32 * 6 * 9 + 32 and sizes['head'] == 8 * 6 + 9 * 6 * 14 + 14 + 7 * 5 + 5
    )


def test_equal_nominal_cost_of_the_papers_rows():
    if not PAPER.exists():
        pytest.skip("the paper's tables are not beside the project")
    small = 9 * (32 + 2 * 128) * 4 * 128 * 100
    budgets = {
        'small': small,
        'medium': 9 * (32 + 2 * 256) * 4 * 256 * 100,
        'large': 9 * (32 + 2 * 1024) * 4 * 1024 * 100,
    }
    with PAPER.open() as f:
        rows = list(csv.DictReader(f))
    assert len(rows) == 84
    for row in rows:
        L, E, d = (int(row[k]) for k in 'LEd')
        with torch.device('meta'):
            macs = build_agent(
                AgentConfig('convlstm', row['variant'] == 'recurrent', L, E, d)
            ).macs_per_step()
        nominal = 9 * (32 + 2 * d) * 4 * d * 100 * L
        assert (
            macs['nominal'] == nominal * E
            and abs(budgets[row['budget']] - nominal * E) <= nominal / 2
        )


@pytest.mark.parametrize(
    'settings, message',
    [
        ({'arch': 'lstm'}, "arch = 'lstm'"),
        ({'n_layer': 0}, 'n_layer = 0'),
        ({'radius': 2, 'n_expert': 2}, 'radius = 2'),
        ({'radius': 0, 'n_expert': 2, 'aggregation': 'mean'}, 'radius = 0 needs'),
        ({'aggregation': 'max'}, "aggregation = 'max'"),
        ({'residual': 'shared'}, "residual = 'shared' is for"),
        ({'dtype': 'float16'}, "dtype = 'float16'"),
        ({'path': 'slow'}, "path = 'slow'"),
        ({'radius': -2}, 'radius = -2'),
    ],
)
def test_config_mistakes(settings, message):
    with pytest.raises(ValueError, match=message):
        AgentConfig(**settings)


@pytest.mark.parametrize('kind, recurrent', KINDS)
@pytest.mark.parametrize('aggregation', AGGREGATIONS)
def test_no_gradient_is_missing(kind, recurrent, aggregation):
    """Every parameter of the agent learns."""
    agent = make(kind, recurrent, 2, 2, aggregation=aggregation)
    obs, start = boards()
    grads = gradients(agent, *agent(obs, start, agent.init_state(3))[:2])
    assert [name for name, g in grads.items() if g is None or not g.abs().max() > 0] == []

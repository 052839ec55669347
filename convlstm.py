"""
The Sokoban agents: `ConvLSTM` and `ConvGLU`, actor-critics with L levels of E parallel experts of
width d over a board (the framework of "Temporal Recurrence Favors Fewer Layers"), recurrent or not.

Shape letters: B boards, T steps of an unroll, Y rows, X columns, C channels, E experts, L levels,
D width. Boards are (B, Y, X, C): channels last, as convolutions want them. One step:

    z       = conv3x3(one-hot planes) to 32 channels, each divided by its RMS over the cells
    ConvLSTM: gates = RMSNorm(conv3x3([z, s, h_i])) * gain + bias -> i, f, g, o; the norm is over
              expert i's own 4d channels at each cell
              c_i = sigmoid(f) c_i + sigmoid(i) tanh(g);  h_i = sigmoid(o) tanh(c_i);  s = A(h)
              c_i is the level's own of the step before; s and h_i are the level's below, at level 1
              the last level's of the step before. Not recurrent: c_i comes in as 0, and level 1
              reads z alone: it has no weights for s and h.
    ConvGLU:  s = P z (+ R RMSNorm(s of the step before), all that recurrence adds), then a level
              h_i = s + GLU(conv3x3(RMSNorm(s)));  s = A(h).  No cell.
              (residual = 'shared': h_i = GLU(...), s = s + A(h).)
    head    = attention and average pooling of RMSNorm(s) over cells -> GLU -> 4 logits, a value

A is sum / sqrt(E) or another of AGGREGATIONS, whose router reads [z; s] averaged over the board.
`radius` r (ConvLSTM): experts stand on a ring, and expert i reads its own h and those of the r
experts before it, summed / sqrt(r + 1), in place of s. Ours, where the paper is silent: ConvGLU's
norm before the convolution, and z at its level 1 only; the norm before the head (an LSTM's h is
small, ConvGLU's s grows with depth); HEADS attention queries, sharp from the start (pooling over
nearly all cells alike, the policy learns nothing for hundreds of updates: LOG.md); head_dim.

Fast: what all experts read is convolved densely, the rest in groups; the z part of all levels (and,
where the observations are known, of all steps) is one convolution; a weight's gradient is one
convolution over all steps of an unroll; with E = 1, s is h, and the weights of both are summed
first, exactly. `path = 'plain'` leaves the last two out; tests compare the two, and a reference
that does none of this.
"""

import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from types import SimpleNamespace

from configurator import write_json

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import common
from common import BEST, CONFIG, WEIGHTS
from kernels import EPS, compiled, gate_weights

AGGREGATIONS = ('sqrt_sum', 'mean', 'softmax_mean', 'softmax_l2')
Z = 32  # channels of the encoder
# (channel, value) of the observation: nothing, agent, box; floor, wall, target
PLANES = ((0, 0), (0, 3), (0, 4), (1, 0), (1, 1), (1, 2))
ACTIONS, CELLS = 4, 100
HEADS = 8  # of the head's attention pooling
ALLOWED = {'arch': ('convlstm', 'convglu'), 'residual': ('expert', 'shared')}
ALLOWED |= {'aggregation': AGGREGATIONS, 'path': ('plain', 'fast', 'compiled')}
ALLOWED['dtype'] = ('float32', 'bfloat16')

State = tuple[Tensor, ...]


@dataclass
class AgentConfig:
    """Sizes of an agent. ValueError, naming the field, for what does not fit together."""

    arch: str = 'convlstm'  # 'convlstm' or 'convglu'
    recurrent: bool = True
    n_layer: int = 1  # L
    n_expert: int = 1  # E
    n_embd: int = 128  # D, channels of an expert
    aggregation: str = 'sqrt_sum'  # one of AGGREGATIONS
    router_dim: int = 64  # width of the router's queries and keys (routed aggregations)
    radius: int = -1  # ConvLSTM: preceding neighbours that an expert hears; -1: all, by s
    residual: str = 'expert'  # ConvGLU: 'expert', each adds s (the paper's rule), or 'shared', A(h)
    head_dim: int = 256  # width of the head's dense layer
    dtype: str = 'float32'  # of convolutions: 'float32' (the parameters', as cells) or 'bfloat16'
    path: str = 'fast'  # 'plain', 'fast' or 'compiled' (fast, the cells fused by torch.compile)

    def __post_init__(self) -> None:
        for name in ('n_layer', 'n_expert', 'n_embd', 'router_dim', 'head_dim'):
            if getattr(self, name) < 1:
                raise ValueError(f'{name} = {getattr(self, name)}: must be at least 1')
        for name, allowed in ALLOWED.items():
            if (value := getattr(self, name)) not in allowed:
                raise ValueError(f'{name} = {value!r}: expected one of {", ".join(allowed)}')
        r = f'radius = {self.radius}'
        if not -1 <= self.radius < self.n_expert:
            raise ValueError(f'{r}: expected -1 (all experts) to n_expert - 1')
        if self.radius >= 0 and (self.aggregation, self.arch) != ('sqrt_sum', 'convlstm'):
            raise ValueError(f"{r} needs aggregation = 'sqrt_sum' and arch = 'convlstm'")
        if self.residual == 'shared' and self.arch != 'convglu':
            raise ValueError("residual = 'shared' is for arch = 'convglu'")

    @property
    def routed(self) -> bool:
        return self.aggregation.startswith('softmax')


# ----------------------------------------------------------------------------- pieces


def rms(x: Tensor, dims: int | tuple[int, ...] = -1) -> Tensor:
    """x over its root mean square, parameter-free."""
    return x * torch.rsqrt(x.square().mean(dims, keepdim=True) + EPS)


def lstm_cell(
    c: Tensor | None, alive: Tensor, gain: Tensor, bias: Tensor, *parts: Tensor
) -> tuple[Tensor, Tensor]:
    """Gates' preactivations as a sum of parts (B, Y, X, E, 4, D); c (B, Y, X, E, D), None: zero;
    alive (B, 1, 1, 1, 1): 0 where an episode starts. -> new c in gain's dtype, h in the parts'."""
    p = parts[0].to(gain.dtype)
    for part in parts[1:]:
        p = p + part.to(gain.dtype)
    i, f, g, o = (rms(p, (-2, -1)) * gain + bias).unbind(-2)
    new = torch.sigmoid(i) * torch.tanh(g)
    if c is not None:
        new = new + torch.sigmoid(f) * (c * alive)
    return new, (torch.sigmoid(o) * torch.tanh(new)).to(parts[0].dtype)


def glu_cell(s: Tensor | None, bias: Tensor, part: Tensor) -> Tensor:
    """h = s + GLU(part + bias); s (B, Y, X, 1, D), None: zero; part (B, Y, X, E, 2, D)."""
    a, b = (part.to(bias.dtype) + bias).unbind(-2)
    h = a * torch.sigmoid(b)
    return h if s is None else s + h


def conv(x: Tensor, w: Tensor, groups: int) -> Tensor:
    """3x3, zero padding. x (B, Y, X, C), w (O, C / groups, 3, 3) -> (B, Y, X, O)."""
    return F.conv2d(x.permute(0, 3, 1, 2), w, padding=1, groups=groups).permute(0, 2, 3, 1)


def conv_backward(g: Tensor, x: Tensor, w: Tensor, groups: int, which: int) -> Tensor:
    """Gradient of x (which = 0) or w (1) of conv, g (B, Y, X, O) being the output's."""
    g, x, one = g.permute(0, 3, 1, 2), x.permute(0, 3, 1, 2), [1, 1]
    wanted, backward = [which == 0, which == 1, False], torch.ops.aten.convolution_backward
    grad = backward(g, x, w, None, one, one, one, False, [0, 0], groups, wanted)[which]
    return grad.permute(0, 2, 3, 1) if which == 0 else grad


class Weight(torch.autograd.Function):
    """A convolution's weight in the products' dtype, for one unroll. Its gradient is one product
    over all that `Conv` has noted in `uses` on the way back: larger, and no sum in bf16."""

    @staticmethod
    def forward(ctx, w, dt, groups, uses):
        ctx.groups, ctx.uses, ctx.dtype = groups, uses, w.dtype
        ctx.set_materialize_grads(False)  # Conv gives none
        w = w.to(dt, memory_format=torch.channels_last, copy=True)
        ctx.save_for_backward(w)
        return w

    @staticmethod
    def backward(ctx, _):
        xs, gs = zip(*ctx.uses, strict=True)
        ctx.uses.clear()
        x, g = (xs[0], gs[0]) if len(xs) == 1 else (torch.cat(xs), torch.cat(gs))
        grad = conv_backward(g, x, ctx.saved_tensors[0], ctx.groups, 1)
        return grad.to(ctx.dtype), None, None, None


class Conv(torch.autograd.Function):
    """conv(x, w) for a w that came through Weight: gives x its gradient, and notes for w's."""

    @staticmethod
    def forward(ctx, x, w, groups, uses):
        ctx.groups, ctx.uses = groups, uses
        ctx.save_for_backward(x, w)
        return conv(x, w, groups)

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        ctx.uses.append((x, g))
        grad = conv_backward(g, x, w, ctx.groups, 0) if ctx.needs_input_grad[0] else None
        return grad, None, None, None


def weight(*shape: int, fan_in: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) / math.sqrt(fan_in))


# ----------------------------------------------------------------------------- the agents


class Agent(nn.Module):
    """Encoder, aggregation, head, and the unroll around a subclass's `prepare` (an unroll's
    weights), `z_parts` (what z adds, at all levels) and `step` (one step of the core). A state is a
    tuple of tensors (B, ...), empty where nothing is carried."""

    def __init__(self, config: AgentConfig):
        super().__init__()
        self.config = config
        D, r, H = config.n_embd, config.router_dim, config.head_dim
        self.encoder = weight(Z, len(PLANES), 3, 3, fan_in=9 * len(PLANES))
        self.encoder_bias = nn.Parameter(torch.zeros(Z))
        # sharp: each query starts with a few cells
        self.query = nn.Parameter(torch.randn(HEADS, D) * 4 / math.sqrt(D))
        self.dense = nn.Linear((HEADS + 1) * D, 2 * H)
        self.logits, self.value = nn.Linear(H, ACTIONS), nn.Linear(H, 1)
        nn.init.normal_(self.dense.weight, 0, ((HEADS + 1) * D) ** -0.5)
        nn.init.orthogonal_(self.logits.weight, 0.01)  # a nearly uniform policy to start from
        for layer in (self.dense, self.logits, self.value):
            nn.init.zeros_(layer.bias)
        self.routers = nn.ModuleList()
        for _ in range(config.n_layer if config.routed else 0):
            router = {'q': weight(r, Z + D, fan_in=Z + D), 'k': weight(r, r, fan_in=r)}
            router |= {'q_bias': torch.zeros(r), 'k_bias': torch.zeros(r)}
            router['embedding'] = torch.randn(config.n_expert, r)
            self.routers.append(nn.ParameterDict(router))

    @property
    def dt(self) -> torch.dtype:
        """Of convolutions."""
        return torch.bfloat16 if self.config.dtype == 'bfloat16' else self.encoder.dtype

    def encode(self, obs: Tensor) -> Tensor:
        """Observations (N, Y, X, 2) uint8 -> z (N, Y, X, 32)."""
        planes = torch.stack([obs[..., channel] == value for channel, value in PLANES], -1)
        z = conv(planes.to(self.encoder.dtype), self.encoder, 1) + self.encoder_bias
        return rms(z, (1, 2)).to(self.dt)

    def head(self, s: Tensor) -> tuple[Tensor, Tensor]:
        """s (N, Y, X, D) -> logits (N, 4), value (N,)."""
        s = rms(s.to(self.query.dtype)).flatten(1, 2)  # (N, Y*X, D)
        attention = F.softmax(F.linear(s, self.query), 1)  # (N, Y*X, HEADS)
        pooled = torch.cat([(attention.transpose(1, 2) @ s).flatten(1), s.mean(1)], -1)
        x = F.glu(self.dense(pooled), -1)
        return self.logits(x), self.value(x).squeeze(-1)

    def aggregate(self, l: int, h: Tensor, z: Tensor, s: Tensor | None) -> Tensor:
        """A(h_1..h_E) of level l: h (B, Y, X, E, D) -> (B, Y, X, D). z and s (None: zero), what the
        level reads, are for the router: a = softmax(q.k_i / sqrt(r)), k_i = Wk e_i + bk, and
        q = Wq [z; s] + bq averaged over the board."""
        c, E, wide = self.config, self.config.n_expert, self.query.dtype
        if not c.routed:
            scale = {'sqrt_sum': math.sqrt(E), 'mean': E}[c.aggregation]
            return h.squeeze(3) if E == 1 else (h.sum(3, dtype=wide) / scale).to(h.dtype)
        router = self.routers[l]
        z = z.mean((1, 2), dtype=wide)
        s = z.new_zeros(len(z), c.n_embd) if s is None else s.mean((1, 2), dtype=wide)
        q = F.linear(torch.cat([z, s], -1), router['q'], router['q_bias'])
        k = F.linear(router['embedding'], router['k'], router['k_bias'])
        a = F.softmax(q @ k.t() / math.sqrt(c.router_dim), -1)  # (B, E)
        a = gate_weights(a, c.aggregation)
        return torch.einsum('be,byxed->byxd', a, h.to(wide)).to(h.dtype)

    def ring(self, h: Tensor) -> Tensor:
        """What each expert hears within its radius: (B, Y, X, E, D) -> the same shape."""
        r, wide = self.config.radius, h.to(self.query.dtype)
        heard = sum(torch.roll(wide, k, 3) for k in range(r + 1))
        return (heard / math.sqrt(r + 1)).to(h.dtype)

    def cell(self, function: Callable) -> Callable:
        return compiled(function) if self.config.path == 'compiled' else function

    def make_conv(self, w: Tensor, groups: int = 1) -> Callable[[Tensor], Tensor]:
        """-> x -> conv(x, w), with w cast once for an unroll and, unless the path is plain, its
        gradient put off to the unroll's end."""
        dt, uses = self.dt, []
        if self.config.path == 'plain':
            w = w.to(dt)
            return lambda x: conv(x.to(dt), w, groups)
        w = Weight.apply(w, dt, groups, uses)
        return lambda x: Conv.apply(x.to(dt), w, groups, uses)

    def see(self, w: SimpleNamespace, obs: Tensor, start: Tensor, state: State) -> tuple:
        """One step without the head. obs (B, Y, X, 2); start (B,) bool: an episode starts, from a
        zero state; w: prepare()'s. -> s[L], state."""
        z = self.encode(obs)
        return self.step(w, z, self.z_parts(w, z), self.alive(start), state)

    def act(self, w: SimpleNamespace, obs: Tensor, start: Tensor, state: State) -> tuple:
        """One step, as `see` -> logits (B, 4), value (B,), state."""
        s, state = self.see(w, obs, start, state)
        return *self.head(s), state

    def forward(self, obs: Tensor, start: Tensor, state: State) -> tuple:
        """An unroll. obs (T, B, Y, X, 2), start (T, B) -> logits (T, B, 4), value (T, B), state
        after it. Equal to T calls of act."""
        T, B = start.shape
        w, z = self.prepare(), self.encode(obs.flatten(0, 1))
        # one convolution for all steps
        parts = [part.unflatten(0, (T, B)).unbind(0) for part in self.z_parts(w, z)]
        alive, features = self.alive(start.flatten()).unflatten(0, (T, B)), []
        for t, z_t in enumerate(z.unflatten(0, (T, B)).unbind(0)):
            s, state = self.step(w, z_t, [part[t] for part in parts], alive[t], state)
            features.append(s)
        logits, value = self.head(torch.cat(features))
        return logits.unflatten(0, (T, B)), value.unflatten(0, (T, B)), state

    def alive(self, start: Tensor) -> Tensor:
        return 1 - start.to(self.query.dtype)[:, None, None, None, None]  # (N, 1, 1, 1, 1)

    def num_params(self) -> dict[str, int]:
        """Parameters in all, and of the core: without encoder and head."""
        sizes = {name: p.numel() for name, p in self.named_parameters()}
        outside = ('encoder', 'query', 'dense', 'logits', 'value')
        core = sum(n for name, n in sizes.items() if not name.startswith(outside))
        return {'total': sum(sizes.values()), 'core': core}

    def macs_per_step(self) -> dict[str, int]:
        """Multiply-adds of the products of one step of one board: 'nominal', the paper's cost
        L E C(d) with C(d) = 9 (32 + 2d) 4d a cell (ConvGLU 9 d 2d), recurrent or not; 'executed',
        what the fast path does for it; 'encoder'; 'head'."""
        c = self.config
        L, E, D, H = c.n_layer, c.n_expert, c.n_embd, c.head_dim
        cost = 9 * (Z + 2 * D) * 4 * D if c.arch == 'convlstm' else 9 * D * 2 * D
        router = L * (Z + D + E) * c.router_dim if c.routed else 0
        macs = {'nominal': CELLS * L * E * cost, 'executed': CELLS * self.cell_macs() + router}
        macs['head'] = 2 * HEADS * CELLS * D + (HEADS + 1) * D * 2 * H + H * (ACTIONS + 1)
        return macs | {'encoder': CELLS * 9 * len(PLANES) * Z}


class ConvLSTM(Agent):
    """State: s (B, Y, X, D) and h (B, Y, X, E, D) of the last level in the convolutions' dtype,
    then c (B, Y, X, E, D) of each level."""

    def __init__(self, config: AgentConfig):
        super().__init__(config)
        E, D = config.n_expert, config.n_embd
        self.wz, self.ws, self.wh, self.gain, self.bias = (nn.ParameterList() for _ in range(5))
        for l in range(config.n_layer):
            below = D if config.recurrent or l > 0 else 0  # there is something below but z
            fan_in = 9 * (Z + 2 * below)
            for weights, C in ((self.wz, Z), (self.ws, below), (self.wh, below)):
                weights.append(weight(E * 4 * D, C, 3, 3, fan_in=fan_in))
            self.gain.append(torch.ones(E, 4, D))
            self.bias.append(torch.zeros(E, 4, D))
            self.bias[l].data[:, 1] = 1  # forget

    @property
    def merged(self) -> bool:
        """s is h: their weights may be summed first."""
        c = self.config
        return c.n_expert == 1 and not c.routed and c.path != 'plain'

    def init_state(self, B: int) -> State:
        c, zeros = self.config, self.query.new_zeros
        h = B, 10, 10, c.n_expert, c.n_embd
        last = zeros(B, 10, 10, c.n_embd, dtype=self.dt), zeros(h, dtype=self.dt)
        return (*last, *(zeros(h) for _ in range(c.n_layer))) if c.recurrent else ()

    def prepare(self) -> SimpleNamespace:
        """An unroll's convolutions: of z (all levels at once) and, a level, of s and h."""
        E, near = self.config.n_expert, self.config.radius >= 0
        w = SimpleNamespace(z=self.make_conv(torch.cat(list(self.wz))), levels=[])
        for ws, wh in zip(self.ws, self.wh, strict=True):
            if not ws.numel():  # nothing is below
                s = h = None
            elif self.merged:
                s, h = self.make_conv(ws + wh), None
            elif near:  # s_i and h_i side by side: one grouped convolution
                s, h = None, self.make_conv(torch.cat([ws, wh], 1), E)
            else:
                s, h = self.make_conv(ws), self.make_conv(wh, E)
            w.levels.append((s, h))
        return w

    def z_parts(self, w: SimpleNamespace, z: Tensor) -> tuple[Tensor, ...]:
        """z's share of the gates' preactivations, one (N, Y, X, E * 4 * D) a level."""
        return w.z(z).chunk(self.config.n_layer, 3)

    def step(
        self, w: SimpleNamespace, z: Tensor, z_parts: list[Tensor], alive: Tensor, state: State
    ) -> tuple[Tensor, State]:
        """-> s of the last level (B, Y, X, D), the new state."""
        c, new = self.config, []
        s, h, cells = None, None, [None] * c.n_layer
        if c.recurrent:
            s, h, *cells = state
            s, h = s * alive[..., 0].to(self.dt), h * alive.to(self.dt)
        for l, (of_s, of_h) in enumerate(w.levels):
            parts = [z_parts[l]]
            if of_s is not None:
                parts.append(of_s(s))
            if of_h is not None:
                read = torch.cat([self.ring(h), h], 4) if c.radius >= 0 else h
                parts.append(of_h(read.flatten(3)))
            gates = [part.unflatten(3, (c.n_expert, 4, c.n_embd)) for part in parts]
            cell = self.cell(lstm_cell)
            one, h = cell(cells[l], alive, self.gain[l], self.bias[l], *gates)
            new.append(one)
            s = self.aggregate(l, h, z, s)
        return s, (s, h, *new) if c.recurrent else ()

    def cell_macs(self) -> int:
        below = [w.size(1) * (1 if self.merged else 2) for w in self.ws]
        return 9 * 4 * self.config.n_expert * self.config.n_embd * sum(Z + C for C in below)


class ConvGLU(Agent):
    """State, where recurrent: s (B, Y, X, D) of the last level."""

    def __init__(self, config: AgentConfig):
        super().__init__(config)
        L, E, D = config.n_layer, config.n_expert, config.n_embd
        fan_in = Z + (D if config.recurrent else 0)
        self.wp, self.bias_p = weight(D, Z, fan_in=fan_in), nn.Parameter(torch.zeros(D))
        if config.recurrent:
            self.wr = weight(D, D, fan_in=fan_in)
        self.w = nn.ParameterList(weight(E * 2 * D, D, 3, 3, fan_in=9 * D) for _ in range(L))
        self.bias = nn.ParameterList(torch.zeros(E, 2, D) for _ in range(L))

    def init_state(self, B: int) -> State:
        c = self.config
        return (self.query.new_zeros(B, 10, 10, c.n_embd),) if c.recurrent else ()

    def prepare(self) -> SimpleNamespace:
        return SimpleNamespace(conv=[self.make_conv(w) for w in self.w])

    def z_parts(self, w: SimpleNamespace, z: Tensor) -> list[Tensor]:
        """P z + bias, [(N, Y, X, D)]. 1x1, so fp32 is cheap."""
        return [F.linear(z.to(self.query.dtype), self.wp, self.bias_p)]

    def step(
        self, w: SimpleNamespace, z: Tensor, z_parts: list[Tensor], alive: Tensor, state: State
    ) -> tuple[Tensor, State]:
        """-> s of the last level (B, Y, X, D), state."""
        c, (s,) = self.config, z_parts
        if c.recurrent:
            s = s + F.linear(rms(state[0] * alive[..., 0]), self.wr)
        for l in range(c.n_layer):
            part = w.conv[l](rms(s)).unflatten(3, (c.n_expert, 2, c.n_embd))
            base = s[..., None, :] if c.residual == 'expert' else None
            h = self.cell(glu_cell)(base, self.bias[l], part)  # (B, Y, X, E, D)
            mixed = self.aggregate(l, h, z, s)
            s = mixed if c.residual == 'expert' else s + mixed
        return s, (s,) if c.recurrent else ()

    def cell_macs(self) -> int:
        c, D = self.config, self.config.n_embd
        return c.n_layer * c.n_expert * 9 * D * 2 * D + Z * D + c.recurrent * D * D


def build_agent(config: AgentConfig) -> Agent:
    return {'convlstm': ConvLSTM, 'convglu': ConvGLU}[config.arch](config)


# ----------------------------------------------------------------------------- agents as files

PROBE = 'probe.safetensors'  # beside an export: a plan probe of probe_sokoban.py
# of config.json: what rebuilds the agent, its evaluation levels, and how long it has trained
SIZES = [field.name for field in fields(AgentConfig) if field.name not in ('dtype', 'path')]
EXPORTED = [
    *SIZES,
    'eval_split',
    'n_boxes',
    'max_moves',
    'seed',
    'n_envs',
    'unroll',
    'step',
    'best',
]


def load_agent(folder: str, which: str, device: str, dtype: str = '') -> tuple[Agent, dict, str]:
    """Return the agent in a folder, its settings with `step` and `best`, and the file it was in.

    The folder holds an export, or a run of train_sokoban.py; `which` is 'best' for the run's best
    checkpoint, if there is one, or 'last'. An empty dtype is the run's own. Raises CheckpointError
    if the folder holds neither, or if a file is damaged.
    """
    path = os.path.join(folder, CONFIG)
    if os.path.exists(os.path.join(folder, WEIGHTS)):
        weights = common.read_tensors(os.path.join(folder, WEIGHTS), device)
        with common.restoring(path, 'it'), open(path, encoding='utf-8') as file:
            about = json.load(file)
    else:
        file = BEST if which == 'best' else ''
        needed = ('model', 'step', 'best')
        saved, path = common.load_run(folder, 'train_sokoban.py', needed, (), {}, file)
        weights = saved['model']
        about = saved['config'] | {'step': saved['step'], 'best': saved['best']}
    with common.restoring(path, 'the agent'):
        dtype = common.pick_dtype(dtype or about.get('dtype', 'auto'), device)
        sizes = {name: about[name] for name in SIZES}
        config = AgentConfig(**sizes, dtype=str(dtype).removeprefix('torch.'))
        common.check_model(build_agent, config)
        model = build_agent(config)
    common.load_weights(model, weights, path)
    return model.to(device).eval(), about, str(path)


def export_agent(model: Agent, about: dict, folder: str) -> None:
    """Write model.safetensors and config.json into a folder and print their names.

    `about` holds the settings and position that load_agent returns. Replaces an earlier export, and
    its plan probe with it; ends the script if the folder holds anything else.
    """
    path = common.begin_export(folder, 'arch', PROBE)
    weights = {name: x.float() for name, x in model.state_dict().items()}
    written = common.write_tensors(weights, os.path.join(folder, WEIGHTS))
    write_json({name: about[name] for name in EXPORTED}, path)
    print(f'{written}, {CONFIG}')

"""Sokoban agents: actor-critics with a core of L layers, each of E parallel experts of width D,
recurrent or non-recurrent (the framework of "Temporal Recurrence Favors Fewer Layers").

Shape letters: B boards, T steps of an unroll, Y rows, X columns, C channels, E experts, L layers,
D width. Boards are stored channels last, (B, Y, X, C). One step of an agent:

    encoder    : z = conv3x3(one-hot planes), 32 channels, each divided by its RMS over the board
    core       : ConvLSTM or ConvGLU (below), from z and the state of the previous step to s[L]
    head       : attention pooling and mean of RMSNorm(s[L]) over the board, a GLU, 4 logits, value

ConvLSTM, layer l = 1..L, expert i = 1..E:

    i, f, g, o = RMSNorm(conv3x3([z, s[l-1], h_i[l-1]])) * gain + bias
                 normalized over the 4 D gate channels of each expert, at each cell of the board
    c_i[l]     = sigmoid(f) * c_i[l] of the previous step + sigmoid(i) * tanh(g)
    h_i[l]     = sigmoid(o) * tanh(c_i[l])
    s[l]       = A(h_1[l], ..., h_E[l])

    Layer 1 reads s[L] and h_i[L] of the previous step: the feedback from the top. A non-recurrent
    agent has c = 0 before every step, and its layer 1 reads z alone.

ConvGLU (no cell, z enters below layer 1):

    s[0]       = P z + bias, plus R RMSNorm(s[L] of the previous step) if recurrent: the only
                 difference, since all other weights start equally in both kinds
    h_i[l]     = s[l-1] + GLU(conv3x3(RMSNorm(s[l-1])) + bias)
    s[l]       = A(h_1[l], ..., h_E[l])
    With residual = 'shared': s[l] = s[l-1] + A(GLU_1, ..., GLU_E).

A is sum / sqrt(E) by default; `AGGREGATIONS` lists the others. A routed aggregation weights the
experts by a router that reads [z; s] averaged over the board. With `radius` = r the experts of a
ConvLSTM form a ring, and expert i reads the sum of its own h and those of the r experts before it,
divided by sqrt(r + 1), in place of s.

The paper leaves some choices open. Ours are: the norm before ConvGLU's convolutions; z at layer 1
of ConvGLU only; the norm before the head (h of an LSTM is small, s of a ConvGLU grows with depth);
`head_dim`; and HEADS attention queries that start sharp, because an agent whose pooling starts
nearly uniform learns nothing for hundreds of updates (LOG.md).

The core's convolutions may run in bfloat16. Everything else, the encoder, the head and the carried
s, h and c included, has the dtype of the parameters; a GPU may multiply fp32 in TF32 unless dtype =
'float32' (`set_precision`). All gradients are autograd's: one convolution per unroll for the
gradient of a weight, in place of one per step, was slower (LOG.md). Two things save convolutions:

- s, which all experts read, is convolved by one dense convolution; only the h_i need a grouped one.
- One convolution computes what z adds to all layers.
"""

import math
from dataclasses import dataclass, fields, replace

from support.script import UserError

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ops import EPS, gate_weights
from support import ranks
from support.compiling import fused
from support.export import PublishedModel
from support.run_folder import restoring
from support.values import check_fields

AGGREGATIONS = ('sqrt_sum', 'mean', 'softmax_mean', 'softmax_l2')
# The planes of Sokoban's observations (levels.py) as (channel, value). Channel 0 holds nothing,
# the agent or a box; channel 1 holds floor, a wall or a target.
PLANES = ((0, 0), (0, 3), (0, 4), (1, 0), (1, 1), (1, 2))
ACTIONS = 4
Z = 32  # channels of the encoder's output z
GATES = 4  # of a ConvLSTM's cell: i, f, g and o
HEADS = 8  # attention queries of the head's pooling

AGENT_RANGES = {  # of the fields of AgentConfig, and so of settings of train_sokoban.py
    **dict.fromkeys(('n_layer', 'n_expert', 'n_embd', 'router_dim', 'head_dim'), (1, math.inf)),
    'arch': ['convlstm', 'convglu'],
    'aggregation': list(AGGREGATIONS),
    'residual': ['expert', 'shared'],
    'dtype': ['float32', 'bfloat16'],
}

State = tuple[Tensor, ...]


@dataclass
class AgentConfig:
    """Settings of an agent. Raises UserError, naming the field, if they do not fit together."""

    arch: str = 'convlstm'  # 'convlstm' or 'convglu'
    recurrent: bool = True
    n_layer: int = 1  # L
    n_expert: int = 1  # E, per layer
    n_embd: int = 128  # D, channels of an expert
    aggregation: str = 'sqrt_sum'  # one of AGGREGATIONS
    router_dim: int = 64  # width of the router's queries and keys (routed aggregations)
    radius: int = -1  # ConvLSTM: number of preceding experts that each reads; -1 = all, through s
    residual: str = 'expert'  # ConvGLU: 'expert' (the paper's rule) or 'shared'
    head_dim: int = 256  # width of the head's GLU
    dtype: str = 'float32'  # convolutions in 'float32' (the parameters' dtype) or 'bfloat16'
    board_size: tuple[int, int] = (10, 10)  # rows and columns of an observation
    planes: tuple[tuple[int, int], ...] = PLANES  # the encoder's inputs

    def __post_init__(self) -> None:
        self.board_size = tuple(self.board_size)  # both are lists in JSON
        self.planes = tuple(map(tuple, self.planes))
        check_fields(self, AGENT_RANGES)
        if not -1 <= self.radius < self.n_expert:
            expected = 'expected -1 (all experts) to n_expert - 1'
            raise UserError(f'radius = {self.radius}: {expected}')
        if self.radius >= 0 and (self.aggregation != 'sqrt_sum' or self.arch != 'convlstm'):
            needed = "needs aggregation = 'sqrt_sum' and arch = 'convlstm'"
            raise UserError(f'radius = {self.radius} {needed}')
        if self.residual == 'shared' and self.arch != 'convglu':
            raise UserError("residual = 'shared' is for arch = 'convglu'")

    @property
    def routed(self) -> bool:
        """Return whether a router weights the experts."""
        return self.aggregation.startswith('softmax')


# ---- fused functions: the operations between convolutions ---------------------------------------


@fused
def rms_norm(x: Tensor, dims: int | tuple[int, ...] = -1) -> Tensor:
    """Divide x by its root mean square over `dims`. There is no gain."""
    return x * torch.rsqrt(x.square().mean(dims, keepdim=True) + EPS)


@fused
def one_hot_planes(obs: Tensor, planes: tuple, dtype: torch.dtype) -> Tensor:
    """Return the one-hot planes (N, Y, X, P) of observations (N, Y, X, C) uint8; planes: P pairs
    (channel, value)."""
    return torch.stack([obs[..., channel] == value for channel, value in planes], -1).to(dtype)


@fused
def reset(start: Tensor, *state: Tensor) -> State:
    """Set the state to zero where an episode starts. start: (B,) bool. state: (B, ...) each."""
    return tuple(x.masked_fill(start.view(-1, *[1] * (x.dim() - 1)), 0) for x in state)


@fused
def lstm_cell(
    c: Tensor | None, gain: Tensor, bias: Tensor, *parts: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the new c and h (B, Y, X, E, D) of a layer's experts.

    c: (B, Y, X, E, D), or None for zero. gain, bias: (E, GATES, D). parts: convolution outputs
    (B, Y, X, E * GATES * D), whose sum is normalized over the gate channels of each expert."""
    x = parts[0].to(gain.dtype)
    for part in parts[1:]:
        x = x + part.to(gain.dtype)
    x = x.unflatten(-1, gain.shape)  # (B, Y, X, E, GATES, D)
    i, f, g, o = (rms_norm(x, (-2, -1)) * gain + bias).unbind(-2)
    new_c = torch.sigmoid(i) * torch.tanh(g)
    if c is not None:
        new_c = new_c + torch.sigmoid(f) * c
    return new_c, torch.sigmoid(o) * torch.tanh(new_c)


@fused
def glu(x: Tensor, bias: Tensor, residual: Tensor | None) -> Tensor:
    """Return residual + GLU(x + bias), (B, Y, X, E, D).

    x: convolution output (B, Y, X, E * 2 * D). bias: (E, 2, D). residual: (B, Y, X, D), added to
    every expert's output, or None."""
    a, b = (x.to(bias.dtype).unflatten(-1, bias.shape) + bias).unbind(-2)
    y = a * torch.sigmoid(b)
    return y if residual is None else residual.unsqueeze(3) + y


@fused
def ring_sum(h: Tensor, radius: int) -> Tensor:
    """Return for each expert the sum of its h and those of the `radius` experts before it, divided
    by sqrt(radius + 1). h and the result: (B, Y, X, E, D)."""
    total = h
    for k in range(1, radius + 1):
        total = total + h.roll(k, 3)
    return total / math.sqrt(radius + 1)


def conv3x3(x: Tensor, weight: Tensor, groups: int = 1) -> Tensor:
    """Return x (B, Y, X, C) convolved with weight (O, C / groups, 3, 3), zero-padded: (B, Y, X, O).

    The permutations make no copies: channels last is a memory format of conv2d."""
    return F.conv2d(x.permute(0, 3, 1, 2), weight, padding=1, groups=groups).permute(0, 2, 3, 1)


# ---- agents -------------------------------------------------------------------------------------


def normal(*shape: int, fan_in: int) -> nn.Parameter:
    """Return a weight drawn from a normal distribution with standard deviation 1 / sqrt(fan_in)."""
    return nn.Parameter(torch.randn(*shape) / math.sqrt(fan_in))


class Agent(nn.Module, PublishedModel, pipeline_tag='reinforcement-learning'):
    """Encoder, aggregation, head and unroll. A subclass adds the core:

    init_state(B)             returns the zero state of B boards, tensors (B, ...); () if nothing is
                              carried
    prepare()                 returns what is computed from the weights once per unroll
    step(w, z, start, state)  runs one step of the core, with w from prepare() and z (B, Y, X, 32);
                              returns s[L] (B, Y, X, D) and the new state"""

    def __init__(self, config: AgentConfig):
        super().__init__()
        self.config = config
        D, H, r, P = config.n_embd, config.head_dim, config.router_dim, len(config.planes)
        self.encoder = normal(Z, P, 3, 3, fan_in=9 * P)
        self.encoder_bias = nn.Parameter(torch.zeros(Z))
        # four times the usual scale, so that each query attends to a few cells from the start
        self.query = nn.Parameter(torch.randn(HEADS, D) * 4 / math.sqrt(D))
        self.dense = nn.Linear((HEADS + 1) * D, 2 * H)
        self.logits = nn.Linear(H, ACTIONS)
        self.value = nn.Linear(H, 1)
        nn.init.normal_(self.dense.weight, 0, ((HEADS + 1) * D) ** -0.5)
        nn.init.orthogonal_(self.logits.weight, 0.01)  # start with a nearly uniform policy
        for module in (self.dense, self.logits, self.value):
            nn.init.zeros_(module.bias)
        self.routers = nn.ModuleList()
        for _ in range(config.n_layer if config.routed else 0):
            router = {
                'q': normal(r, Z + D, fan_in=Z + D),
                'k': normal(r, r, fan_in=r),
                'q_bias': torch.zeros(r),
                'embedding': torch.randn(config.n_expert, r),
            }
            self.routers.append(nn.ParameterDict(router))

    def conv(self, x: Tensor, weight: Tensor, groups: int = 1) -> Tensor:
        """Return conv3x3 in the dtype of the settings. Casting the weight for each call makes
        autograd sum its gradients in the parameters' dtype."""
        dtype = torch.bfloat16 if self.config.dtype == 'bfloat16' else weight.dtype
        return conv3x3(x.to(dtype), weight.to(dtype), groups)

    def zeros(self, B: int, *shape: int) -> Tensor:
        """Return zeros (B, Y, X, *shape), of the dtype and on the device of the parameters."""
        return self.query.new_zeros(B, *self.config.board_size, *shape)

    def encode(self, obs: Tensor) -> Tensor:
        """Return z (N, Y, X, 32) of observations (N, Y, X, C) uint8."""
        planes = one_hot_planes(obs, self.config.planes, self.encoder.dtype)
        return rms_norm(conv3x3(planes, self.encoder) + self.encoder_bias, (1, 2))

    @property
    def s_is_h(self) -> bool:
        """Return whether s = A(h) is h itself: with one expert and no router."""
        return self.config.n_expert == 1 and not self.config.routed

    def aggregate(self, l: int, h: Tensor, z: Tensor, s: Tensor | None) -> Tensor:
        """Return A(h_1, ..., h_E) of a layer, (B, Y, X, D).

        l: index of the layer, 0..L-1. h: (B, Y, X, E, D). z, s: what the layer reads, for the
        router; s is None for zero. The router's gates are a_i = softmax_i(q . k_i / sqrt(r)) with
        q = Wq [z; s] + bq, z and s averaged over the board, and k_i = Wk e_i: a bias of the keys
        would change no gate."""
        config = self.config
        if self.s_is_h:
            return h.squeeze(3)
        if config.aggregation == 'sqrt_sum':
            return h.sum(3) / math.sqrt(config.n_expert)
        if config.aggregation == 'mean':
            return h.mean(3)
        router = self.routers[l]
        z = z.mean((1, 2))  # (B, 32)
        s = z.new_zeros(len(z), config.n_embd) if s is None else s.mean((1, 2))  # (B, D)
        q = F.linear(torch.cat([z, s], -1), router['q'], router['q_bias'])  # (B, r)
        k = F.linear(router['embedding'], router['k'])  # (E, r)
        a = F.softmax(q @ k.t() / math.sqrt(config.router_dim), -1)  # (B, E)
        return torch.einsum('be,byxed->byxd', gate_weights(a, config.aggregation), h)

    def head(self, s: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits (N, 4) and values (N,) of s (N, Y, X, D)."""
        s = rms_norm(s).flatten(1, 2)  # (N, Y * X, D)
        attention = F.softmax(F.linear(s, self.query), 1)  # (N, Y * X, HEADS)
        pooled = torch.cat([(attention.mT @ s).flatten(1), s.mean(1)], -1)  # (N, (HEADS + 1) * D)
        x = F.glu(self.dense(pooled), -1)
        return self.logits(x), self.value(x).squeeze(-1)

    def encode_and_step(
        self, w: tuple, obs: Tensor, start: Tensor, state: State
    ) -> tuple[Tensor, State]:
        """Run encoder and core for one step; return s[L] (B, Y, X, D) and the new state.

        w: from prepare(). obs: (B, Y, X, C) uint8. start: (B,) bool, True where an episode starts;
        there the state is reset first."""
        return self.step(w, self.encode(obs), start, state)

    def act(
        self, w: tuple, obs: Tensor, start: Tensor, state: State
    ) -> tuple[Tensor, Tensor, State]:
        """Run one step; return logits (B, 4), values (B,) and the new state.

        The arguments are those of `encode_and_step`."""
        s, state = self.encode_and_step(w, obs, start, state)
        return *self.head(s), state

    def forward(self, obs: Tensor, start: Tensor, state: State) -> tuple[Tensor, Tensor, State]:
        """Run an unroll; return logits (T, B, 4), values (T, B) and the state after it.

        obs: (T, B, Y, X, C), start: (T, B). Equals T calls of `act`."""
        w = self.prepare()
        features = []
        for obs_t, start_t in zip(obs, start, strict=True):
            s, state = self.encode_and_step(w, obs_t, start_t, state)
            features.append(s)  # (B, Y, X, D)
        logits, value = self.head(torch.cat(features))
        return logits.unflatten(0, start.shape), value.unflatten(0, start.shape), state

    def nominal_macs(self) -> int:
        """Return the paper's cost of one step of one board in multiply-adds, L E C(d) per cell:
        every weight of the core's 3x3 convolutions counts once. C(d) = 9 (32 + 2d) 4d for a
        ConvLSTM and 9 d 2d for a ConvGLU. A non-recurrent agent counts like the recurrent one."""
        with torch.device('meta'):
            recurrent = type(self)(replace(self.config, recurrent=True))
        named = recurrent.named_parameters()
        size = sum(p.numel() for name, p in named if p.dim() == 4 and name != 'encoder')
        return math.prod(self.config.board_size) * size

    # ---- saved models (export.PublishedModel)

    @classmethod
    def build(cls, metadata: dict) -> 'Agent':
        """Return an agent for the entries of a config.json. A size that AgentConfig got later has
        its default. Raises KeyError, TypeError or ValueError if they describe none."""
        sizes = metadata.get('model')
        if sizes is None:  # of a version before 0.4, which had all sizes as entries
            sizes = {name: metadata[name] for name in MODEL_SETTINGS if name in metadata}
        return build_agent(AgentConfig(**{'arch': sizes['arch'], **sizes}))  # KeyError without one

    def entries(self) -> dict:
        """Return the entries of config.json that rebuild this agent."""
        sizes = {name: getattr(self.config, name) for name in MODEL_SETTINGS}
        return {'recurrent': self.config.recurrent, 'model': sizes}


class ConvLSTM(Agent):
    """State: s (B, Y, X, D) and h (B, Y, X, E, D) of layer L, then c (B, Y, X, E, D) of each layer;
    () if non-recurrent."""

    def __init__(self, config: AgentConfig):
        super().__init__(config)
        E, D = config.n_expert, config.n_embd
        self.wz = nn.ParameterList()
        self.ws = nn.ParameterList()
        self.wh = nn.ParameterList()
        self.gain = nn.ParameterList()
        self.bias = nn.ParameterList()
        for l in range(config.n_layer):
            # layer 1 of a non-recurrent agent reads z alone: its ws and wh are empty
            C = D if config.recurrent or l > 0 else 0
            fan_in = 9 * (Z + 2 * C)
            self.wz.append(normal(E * GATES * D, Z, 3, 3, fan_in=fan_in))
            self.ws.append(normal(E * GATES * D, C, 3, 3, fan_in=fan_in))
            self.wh.append(normal(E * GATES * D, C, 3, 3, fan_in=fan_in))
            self.gain.append(torch.ones(E, GATES, D))
            self.bias.append(torch.zeros(E, GATES, D))
            self.bias[l].data[:, 1] = 1  # of the forget gate

    def init_state(self, B: int) -> State:
        if not self.config.recurrent:
            return ()
        config = self.config
        h = [self.zeros(B, config.n_expert, config.n_embd) for _ in range(config.n_layer + 1)]
        return self.zeros(B, config.n_embd), *h

    def prepare(self) -> tuple[Tensor, list[tuple]]:
        """Return the weight of z for all layers, and for each layer what `below` takes."""
        layers = []
        for ws, wh in zip(self.ws, self.wh, strict=True):
            if self.config.radius >= 0:  # of each expert's ring_sum and h, side by side
                layers.append((None, torch.cat([ws, wh], 1)))
            elif self.s_is_h:  # ws * s + wh * h = (ws + wh) * s
                layers.append((ws + wh, None))
            else:
                layers.append((ws, wh))
        return torch.cat(list(self.wz)), layers

    def below(self, ws: Tensor | None, wh: Tensor | None, s: Tensor, h: Tensor) -> list[Tensor]:
        """Return what s (B, Y, X, D) and h (B, Y, X, E, D) of the layer below add to the gates, as
        terms (B, Y, X, E * GATES * D) of a sum. ws, wh: weights, None for one that is not
        needed."""
        if self.config.radius >= 0:
            h = torch.cat([ring_sum(h, self.config.radius), h], -1)
        terms = [] if ws is None else [self.conv(s, ws)]
        return terms if wh is None else [*terms, self.conv(h.flatten(3), wh, self.config.n_expert)]

    def step(self, w: tuple, z: Tensor, start: Tensor, state: State) -> tuple[Tensor, State]:
        wz, layers = w
        s = h = None
        cells = [None] * len(layers)
        if self.config.recurrent:
            s, h, *cells = reset(start, *state)
        parts = self.conv(z, wz).chunk(len(layers), 3)  # what z adds to the gates of each layer
        for l, weights in enumerate(layers):
            # layer 1 of a non-recurrent agent reads z alone
            terms = [] if h is None else self.below(*weights, s, h)
            cells[l], h = lstm_cell(cells[l], self.gain[l], self.bias[l], parts[l], *terms)
            s = self.aggregate(l, h, z, s)
            if self.s_is_h and s.data_ptr() != h.data_ptr():
                raise RuntimeError('prepare() adds the weights of s and h, but s is not h')
        return s, (s, h, *cells) if self.config.recurrent else ()


class ConvGLU(Agent):
    """State: s (B, Y, X, D) of layer L if recurrent, else ()."""

    def __init__(self, config: AgentConfig):
        super().__init__(config)
        L, E, D = config.n_layer, config.n_expert, config.n_embd
        self.wp = normal(D, Z, fan_in=Z)  # P
        self.bias_p = nn.Parameter(torch.zeros(D))
        self.w = nn.ParameterList(normal(E * 2 * D, D, 3, 3, fan_in=9 * D) for _ in range(L))
        self.bias = nn.ParameterList(torch.zeros(E, 2, D) for _ in range(L))
        if config.recurrent:  # last, so that one seed gives both kinds the same other weights
            self.wr = normal(D, D, fan_in=D)  # R

    def init_state(self, B: int) -> State:
        return (self.zeros(B, self.config.n_embd),) if self.config.recurrent else ()

    def prepare(self) -> tuple:
        return ()

    def step(self, w: tuple, z: Tensor, start: Tensor, state: State) -> tuple[Tensor, State]:
        s = F.linear(z, self.wp, self.bias_p)  # never in bfloat16
        if self.config.recurrent:
            (previous,) = reset(start, *state)
            s = s + F.linear(rms_norm(previous), self.wr)
        for l, (weight, bias) in enumerate(zip(self.w, self.bias, strict=True)):
            is_shared = self.config.residual == 'shared'
            x = self.conv(rms_norm(s), weight)  # (B, Y, X, E * 2 * D)
            a = self.aggregate(l, glu(x, bias, None if is_shared else s), z, s)
            s = s + a if is_shared else a
        return s, (s,) if self.config.recurrent else ()


def build_agent(config: AgentConfig) -> Agent:
    """Return a newly initialized agent."""
    return {'convlstm': ConvLSTM, 'convglu': ConvGLU}[config.arch](config)


# The settings that rebuild an agent; dtype does not change the model.
MODEL_SETTINGS = [field.name for field in fields(AgentConfig) if field.name != 'dtype']


def set_precision(model: Agent) -> None:
    """Switch TF32 off, which a GPU would use otherwise, if convolutions are to run in float32."""
    if model.config.dtype == 'float32':
        torch.set_float32_matmul_precision('highest')
        torch.backends.cudnn.allow_tf32 = False


def load_agent(folder: str, which: str = 'best', device: str = 'cpu', dtype: str = '') -> Agent:
    """Return the agent of a run of train_sokoban.py, or of an export. Its `metadata` has the
    entries of an export's config.json, such as 'settings', those of the run.

    which: of a run the 'best' agent, if it has one, or the 'last'. dtype: 'float32' or 'bfloat16';
    '': that of the run. Raises UserError if the folder holds no agent, or a file is damaged."""
    agent = Agent.load_trained(folder, which, device)
    with restoring(folder):
        dtype = dtype or agent.metadata.get('settings', {}).get('dtype', 'auto')
        agent.config.dtype = str(ranks.pick_dtype(dtype, device)).removeprefix('torch.')
    set_precision(agent)
    return agent

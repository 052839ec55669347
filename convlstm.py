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
'float32' (`set_precision`). Three things make an unroll fast:

- s, which all experts read, is convolved by one dense convolution; only the h_i need a grouped one.
- One convolution computes what z adds to all layers (`forward`: for all steps of the unroll).
- `DeferredConv` computes the gradient of a weight by one convolution per unroll, not one per step.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

from configurator import Mistake

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import FlopCounterMode

import common
from graphs import fused
from hub import PublishedModel
from kernels import EPS, bf16_is_fast, gate_weights

AGGREGATIONS = ('sqrt_sum', 'mean', 'softmax_mean', 'softmax_l2')
# The planes of Sokoban's observations (boxoban.py) as (channel, value). Channel 0 holds nothing,
# the agent or a box; channel 1 holds floor, a wall or a target.
PLANES = ((0, 0), (0, 3), (0, 4), (1, 0), (1, 1), (1, 2))
ACTIONS = 4
Z = 32  # channels of the encoder's output z
HEADS = 8  # attention queries of the head's pooling

CHOICES = {  # the values that fields of AgentConfig can have
    'arch': ('convlstm', 'convglu'),
    'aggregation': AGGREGATIONS,
    'residual': ('expert', 'shared'),
    'dtype': ('float32', 'bfloat16'),
    'mode': ('fast', 'plain'),
}

State = tuple[Tensor, ...]

PROBE = 'probe.safetensors'  # a plan probe (paper/probe.py) in the folder of an exported agent


@dataclass
class AgentConfig:
    """Settings of an agent. Raises Mistake, naming the field, if they do not fit together."""

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
    mode: str = 'fast'  # 'fast', or 'plain': weight gradients by autograd, for checking
    board_size: tuple[int, int] = (10, 10)  # rows and columns of an observation
    planes: tuple[tuple[int, int], ...] = PLANES  # the encoder's inputs

    def __post_init__(self) -> None:
        self.board_size = tuple(self.board_size)  # both are lists in JSON
        self.planes = tuple(map(tuple, self.planes))
        for name in ('n_layer', 'n_expert', 'n_embd', 'router_dim', 'head_dim'):
            if getattr(self, name) < 1:
                raise Mistake(f'{name} = {getattr(self, name)}: must be at least 1')
        for name, choices in CHOICES.items():
            if (value := getattr(self, name)) not in choices:
                raise Mistake(f'{name} = {value!r}: expected one of {", ".join(choices)}')
        if not -1 <= self.radius < self.n_expert:
            expected = 'expected -1 (all experts) to n_expert - 1'
            raise Mistake(f'radius = {self.radius}: {expected}')
        if self.radius >= 0 and (self.aggregation != 'sqrt_sum' or self.arch != 'convlstm'):
            needed = "needs aggregation = 'sqrt_sum' and arch = 'convlstm'"
            raise Mistake(f'radius = {self.radius} {needed}')
        if self.residual == 'shared' and self.arch != 'convglu':
            raise Mistake("residual = 'shared' is for arch = 'convglu'")

    @property
    def routed(self) -> bool:
        """Return whether a router weights the experts."""
        return self.aggregation.startswith('softmax')

    @property
    def channels(self) -> int:
        """Return the number of channels of an observation."""
        return 1 + max(channel for channel, _ in self.planes)


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

    c: (B, Y, X, E, D), or None for zero. gain, bias: (E, 4, D). parts: convolution outputs
    (B, Y, X, E * 4 * D), whose sum is normalized over the 4 D gate channels of each expert."""
    x = parts[0].to(gain.dtype)
    for part in parts[1:]:
        x = x + part.to(gain.dtype)
    x = x.unflatten(-1, gain.shape)  # (B, Y, X, E, 4, D)
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


# ---- convolutions, and their deferred weight gradients ------------------------------------------


def conv3x3(x: Tensor, weight: Tensor, groups: int = 1) -> Tensor:
    """Return x (B, Y, X, C) convolved with weight (O, C / groups, 3, 3), zero-padded: (B, Y, X, O).

    The permutations make no copies: channels last is a memory format of conv2d."""
    return F.conv2d(x.permute(0, 3, 1, 2), weight, padding=1, groups=groups).permute(0, 2, 3, 1)


def conv3x3_backward(
    dy: Tensor, x: Tensor, weight: Tensor, groups: int, wanted: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of conv3x3 with respect to x and weight, each None if not `wanted`."""
    dx, dw, _ = torch.ops.aten.convolution_backward(
        dy.permute(0, 3, 1, 2),
        x.permute(0, 3, 1, 2),
        weight,
        bias_sizes=None,
        stride=[1, 1],
        padding=[1, 1],
        dilation=[1, 1],
        transposed=False,
        output_padding=[0, 0],
        groups=groups,
        output_mask=[*wanted, False],  # there is no bias
    )
    return None if dx is None else dx.permute(0, 2, 3, 1), dw


class Conv:
    """conv3x3 with a weight that is cast to the convolutions' dtype once per unroll."""

    def __init__(self, weight: Tensor, dtype: torch.dtype, groups: int = 1):
        """weight: (O, C / groups, 3, 3)."""
        self.weight, self.groups = weight.to(dtype), groups

    def __call__(self, x: Tensor) -> Tensor:
        return conv3x3(x.to(self.weight.dtype), self.weight, self.groups)


class DeferredConv:
    """A Conv whose weight gradient is computed once per unroll, by one convolution over all calls.

    That is faster than one convolution per call, and no gradients are summed in bfloat16."""

    def __init__(self, weight: Tensor, dtype: torch.dtype, groups: int = 1):
        self.groups = groups
        self.calls = []  # (input, gradient of the output) of every call, filled by the backward
        self.weight = CastWeight.apply(weight, dtype, groups, self.calls)

    def __call__(self, x: Tensor) -> Tensor:
        return RecordedConv.apply(x.to(self.weight.dtype), self.weight, self.groups, self.calls)


class CastWeight(torch.autograd.Function):
    """Cast a weight, and compute its gradient from all calls of the convolution.

    Every call depends on the result, so autograd runs this backward after those of all calls."""

    @staticmethod
    def forward(ctx, weight, dtype, groups, calls):
        ctx.groups, ctx.calls, ctx.dtype = groups, calls, weight.dtype
        ctx.set_materialize_grads(False)  # RecordedConv returns no gradient for the weight
        weight = weight.to(dtype, memory_format=torch.channels_last, copy=True)
        ctx.save_for_backward(weight)
        return weight

    @staticmethod
    @once_differentiable
    def backward(ctx, _):
        x, dy = ctx.calls[0]
        if len(ctx.calls) > 1:
            inputs, grads = zip(*ctx.calls, strict=True)
            x, dy = torch.cat(inputs), torch.cat(grads)
        ctx.calls.clear()
        (weight,) = ctx.saved_tensors
        if not bf16_is_fast(x.device):  # an emulated convolution would sum in bfloat16
            x, dy, weight = (t.to(ctx.dtype) for t in (x, dy, weight))
        _, dw = conv3x3_backward(dy, x, weight, ctx.groups, wanted=(False, True))
        return dw.to(ctx.dtype), None, None, None


class RecordedConv(torch.autograd.Function):
    """Convolve. The backward returns the gradient of x, and records x and dy for CastWeight."""

    @staticmethod
    def forward(ctx, x, weight, groups, calls):
        ctx.groups, ctx.calls = groups, calls
        ctx.save_for_backward(x, weight)
        return conv3x3(x, weight, groups)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        ctx.calls.append((x, dy))
        dx = None
        if ctx.needs_input_grad[0]:
            dx, _ = conv3x3_backward(dy, x, weight, ctx.groups, wanted=(True, False))
        return dx, None, None, None


# ---- agents -------------------------------------------------------------------------------------


def normal(*shape: int, fan_in: int) -> nn.Parameter:
    """Return a weight drawn from a normal distribution with standard deviation 1 / sqrt(fan_in)."""
    return nn.Parameter(torch.randn(*shape) / math.sqrt(fan_in))


class Agent(nn.Module, PublishedModel, pipeline_tag='reinforcement-learning'):
    """Encoder, aggregation, head and unroll. A subclass adds the core:

    init_state(B)  returns the zero state of B boards, tensors (B, ...); () if nothing is carried
    prepare()      returns the convolutions of one unroll, which hold the weights as they are now
    z_parts(w, z)  returns what z adds to the core, for any number of steps at once: per layer
                   (ConvLSTM), or below layer 1 (ConvGLU)
    step(...)      runs one step of the core"""

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
                'k_bias': torch.zeros(r),
                'embedding': torch.randn(config.n_expert, r),
            }
            self.routers.append(nn.ParameterDict(router))

    def conv(self, weight: Tensor, groups: int = 1) -> Conv | DeferredConv:
        """Return the convolution with this weight for one unroll, in the dtype of the settings."""
        dtype = torch.bfloat16 if self.config.dtype == 'bfloat16' else weight.dtype
        conv_type = Conv if self.config.mode == 'plain' else DeferredConv
        return conv_type(weight, dtype, groups)

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
        q = Wq [z; s] + bq, z and s averaged over the board, and k_i = Wk e_i + bk."""
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
        k = F.linear(router['embedding'], router['k'], router['k_bias'])  # (E, r)
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
        self, w: NamedTuple, obs: Tensor, start: Tensor, state: State
    ) -> tuple[Tensor, State]:
        """Run encoder and core for one step; return s[L] (B, Y, X, D) and the new state.

        w: from prepare(). obs: (B, Y, X, C) uint8. start: (B,) bool, True where an episode starts;
        there the state is reset first."""
        z = self.encode(obs)
        return self.step(w, z, self.z_parts(w, z), start, state)

    def act(
        self, w: NamedTuple, obs: Tensor, start: Tensor, state: State
    ) -> tuple[Tensor, Tensor, State]:
        """Run one step; return logits (B, 4), values (B,) and the new state.

        The arguments are those of `encode_and_step`."""
        s, state = self.encode_and_step(w, obs, start, state)
        return *self.head(s), state

    def forward(self, obs: Tensor, start: Tensor, state: State) -> tuple[Tensor, Tensor, State]:
        """Run an unroll; return logits (T, B, 4), values (T, B) and the state after it.

        obs: (T, B, Y, X, C), start: (T, B). Equals T calls of `act`."""
        T, B = start.shape
        w = self.prepare()
        z = self.encode(obs.flatten(0, 1))  # (T * B, Y, X, 32)
        # per part of z_parts: T tensors (B, Y, X, C)
        parts = [part.unflatten(0, (T, B)).unbind(0) for part in self.z_parts(w, z)]
        features = []
        for t, z_t in enumerate(z.unflatten(0, (T, B)).unbind(0)):
            s, state = self.step(w, z_t, [part[t] for part in parts], start[t], state)
            features.append(s)  # (B, Y, X, D)
        logits, value = self.head(torch.cat(features))
        return logits.unflatten(0, (T, B)), value.unflatten(0, (T, B)), state

    def num_params(self) -> dict[str, int]:
        """Return the number of parameters: 'total', and 'core', without encoder and head."""
        sizes = {name: p.numel() for name, p in self.named_parameters()}
        outside = ('encoder', 'query', 'dense', 'logits', 'value')
        core = sum(n for name, n in sizes.items() if not name.startswith(outside))
        return {'total': sum(sizes.values()), 'core': core}

    def nominal_macs(self) -> int:
        """Return the paper's cost of one step of one board in multiply-adds, L E C(d) per cell:
        every weight of the core's 3x3 convolutions counts once. C(d) = 9 (32 + 2d) 4d for a
        ConvLSTM and 9 d 2d for a ConvGLU. A non-recurrent agent counts like the recurrent one."""
        with torch.device('meta'):
            recurrent = type(self)(replace(self.config, recurrent=True))
        weights = [
            p for name, p in recurrent.named_parameters() if p.dim() == 4 and name != 'encoder'
        ]
        return math.prod(self.config.board_size) * sum(p.numel() for p in weights)

    def macs_per_step(self) -> dict[str, int]:
        """Return the multiply-adds of one step of one board, all derived from the model itself.

        'nominal' is the paper's cost of the core, see nominal_macs. 'executed' (the core as it
        runs), 'head' and 'encoder' are counted by torch's FlopCounterMode in one step."""
        with torch.device('meta'):  # shapes only: nothing is computed
            model = type(self)(self.config)
            shape = (1, *self.config.board_size, self.config.channels)
            obs = torch.zeros(shape, dtype=torch.uint8)
            start = torch.zeros(1, dtype=torch.bool)
        was_enabled = fused.enabled
        fused.enabled = False  # the counter sees eager operations alone
        try:
            with torch.no_grad():
                w, state = model.prepare(), model.init_state(1)
                s, _ = model.encode_and_step(w, obs, start, state)
                encoder = count_macs(lambda: model.encode(obs))
                both = count_macs(lambda: model.encode_and_step(w, obs, start, state))
                head = count_macs(lambda: model.head(s))
        finally:
            fused.enabled = was_enabled
        return {
            'nominal': self.nominal_macs(),
            'executed': both - encoder,
            'head': head,
            'encoder': encoder,
        }

    # ---- saved models (hub.PublishedModel)

    KIND = 'arch'
    DERIVED = (*PublishedModel.DERIVED, PROBE)

    @classmethod
    def build(cls, about: dict) -> 'Agent':
        """Return an agent for the entries of a config.json. A size that AgentConfig got later has
        its default. Raises KeyError, TypeError or ValueError if they describe none."""
        sizes = {name: about[name] for name in SIZES if name in about}
        try:
            return build_agent(AgentConfig(**{'arch': about['arch'], **sizes}))
        except Mistake as error:  # of a file, which the caller names, and not of the user
            raise ValueError(str(error)) from None

    def entries(self) -> dict:
        """Return the entries of config.json that rebuild this agent."""
        return {name: getattr(self.config, name) for name in SIZES}

    def describe(self, about: dict) -> dict:
        """Return the fields of the model card (hub.MODEL_CARD)."""
        c = self.config
        name = type(self).__name__
        kind = 'recurrent' if c.recurrent else 'non-recurrent'
        parameters = sum(p.numel() for p in self.parameters())
        score = about.get('score')
        if score is None and about.get('best') is not None:
            score = f'best mean return of an evaluation {about["best"]:.2f}'
        return {
            'title': f'Parallel Experts: {kind} {name} agent, L = {c.n_layer}, E = {c.n_expert}',
            'summary': f'A {kind} {name} that plays Sokoban. Layers: L = {c.n_layer}; '
            f'experts per layer: E = {c.n_expert}; width: D = {c.n_embd}; '
            f'{parameters:,} parameters.',
            'score': score,
            'step': about.get('step'),
            'command': about.get('command'),
            'usage': "from convlstm import Agent\n\nagent = Agent.from_pretrained('FOLDER')",
            'sizes': self.entries(),
        }


def count_macs(run: Callable[[], object]) -> int:
    """Return the multiply-adds of the matrix products and convolutions that run() executes."""
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops() // 2


class ConvLSTMWeights(NamedTuple):
    """The convolutions of one unroll of a ConvLSTM."""

    z: Conv | DeferredConv  # z -> gates of all layers: (B, Y, X, L * E * 4 * D)
    layers: list[tuple]  # per layer the convolution of s and that of h, see ConvLSTM.prepare


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
            self.wz.append(normal(E * 4 * D, Z, 3, 3, fan_in=fan_in))
            self.ws.append(normal(E * 4 * D, C, 3, 3, fan_in=fan_in))
            self.wh.append(normal(E * 4 * D, C, 3, 3, fan_in=fan_in))
            self.gain.append(torch.ones(E, 4, D))
            self.bias.append(torch.zeros(E, 4, D))
            self.bias[l].data[:, 1] = 1  # of the forget gate

    def init_state(self, B: int) -> State:
        if not self.config.recurrent:
            return ()
        E, D = self.config.n_expert, self.config.n_embd
        s = self.query.new_zeros(B, *self.config.board_size, D)
        h = self.query.new_zeros(B, *self.config.board_size, E, D)
        return s, h, *(torch.zeros_like(h) for _ in range(self.config.n_layer))

    def prepare(self) -> ConvLSTMWeights:
        """Return the convolutions of one unroll: that of z, and for each layer those of s and of h,
        as a pair. None stands for one that is not needed."""
        config = self.config
        layers = []
        for ws, wh in zip(self.ws, self.wh, strict=True):
            if not ws.numel():  # layer 1 of a non-recurrent agent
                layers.append((None, None))
            elif config.radius >= 0:  # of each expert's ring_sum and h, side by side
                layers.append((None, self.conv(torch.cat([ws, wh], 1), groups=config.n_expert)))
            elif self.s_is_h:  # ws * s + wh * h = (ws + wh) * s
                layers.append((self.conv(ws + wh), None))
            else:
                layers.append((self.conv(ws), self.conv(wh, groups=config.n_expert)))
        return ConvLSTMWeights(z=self.conv(torch.cat(list(self.wz))), layers=layers)

    def z_parts(self, w: ConvLSTMWeights, z: Tensor) -> tuple[Tensor, ...]:
        """Return what z adds to the gates of each layer, (N, Y, X, E * 4 * D) each."""
        return w.z(z).chunk(self.config.n_layer, 3)

    def below(
        self, conv_s: Conv | None, conv_h: Conv | None, s: Tensor | None, h: Tensor | None
    ) -> list[Tensor]:
        """Return what s (B, Y, X, D) and h (B, Y, X, E, D) of the layer below add to the gates, as
        terms (B, Y, X, E * 4 * D) of a sum."""
        if conv_s is None and conv_h is None:
            return []
        if conv_s is None:
            neighbors = ring_sum(h, self.config.radius)  # (B, Y, X, E, D)
            return [conv_h(torch.cat([neighbors, h], -1).flatten(3))]
        if conv_h is None:
            return [conv_s(s)]
        return [conv_s(s), conv_h(h.flatten(3))]

    def step(
        self,
        w: ConvLSTMWeights,
        z: Tensor,
        z_parts: tuple[Tensor, ...],
        start: Tensor,
        state: State,
    ) -> tuple[Tensor, State]:
        """Run one step of the core; return s[L] (B, Y, X, D) and the new state."""
        if self.config.recurrent:
            s, h, *cells = reset(start, *state)
        else:
            s = h = None
            cells = [None] * self.config.n_layer
        for l, (conv_s, conv_h) in enumerate(w.layers):
            parts = [z_parts[l], *self.below(conv_s, conv_h, s, h)]
            cells[l], h = lstm_cell(cells[l], self.gain[l], self.bias[l], *parts)
            s = self.aggregate(l, h, z, s)
            if self.s_is_h and s.data_ptr() != h.data_ptr():
                raise RuntimeError('prepare() adds the weights of s and h, but s is not h')
        state = (s, h, *cells) if self.config.recurrent else ()
        return s, state


class ConvGLUWeights(NamedTuple):
    """The convolutions of one unroll of a ConvGLU, one per layer."""

    layers: list[Conv | DeferredConv]


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
        if not self.config.recurrent:
            return ()
        return (self.query.new_zeros(B, *self.config.board_size, self.config.n_embd),)

    def prepare(self) -> ConvGLUWeights:
        return ConvGLUWeights(layers=[self.conv(w) for w in self.w])

    def z_parts(self, w: ConvGLUWeights, z: Tensor) -> tuple[Tensor]:
        """Return P z + bias, (N, Y, X, D), which enters below layer 1; never in bfloat16."""
        return (F.linear(z, self.wp, self.bias_p),)

    def step(
        self, w: ConvGLUWeights, z: Tensor, z_parts: tuple[Tensor], start: Tensor, state: State
    ) -> tuple[Tensor, State]:
        """Run one step of the core; return s[L] (B, Y, X, D) and the new state."""
        (s,) = z_parts
        if self.config.recurrent:
            (previous,) = reset(start, *state)
            s = s + F.linear(rms_norm(previous), self.wr)
        for l, conv in enumerate(w.layers):
            x = conv(rms_norm(s))  # (B, Y, X, E * 2 * D)
            if self.config.residual == 'expert':
                s = self.aggregate(l, glu(x, self.bias[l], s), z, s)
            else:
                s = s + self.aggregate(l, glu(x, self.bias[l], None), z, s)
        state = (s,) if self.config.recurrent else ()
        return s, state


def build_agent(config: AgentConfig) -> Agent:
    """Return a newly initialized agent."""
    return {'convlstm': ConvLSTM, 'convglu': ConvGLU}[config.arch](config)


# The settings that rebuild an agent; dtype and mode do not change the model.
SIZES = [field.name for field in fields(AgentConfig) if field.name not in ('dtype', 'mode')]


def set_precision(model: Agent) -> None:
    """Switch TF32 off, which a GPU would use otherwise, if convolutions are to run in float32."""
    if model.config.dtype == 'float32':
        torch.set_float32_matmul_precision('highest')
        torch.backends.cudnn.allow_tf32 = False


def load_agent(folder: str, which: str = 'best', device: str = 'cpu', dtype: str = '') -> Agent:
    """Return the agent of a run of train_sokoban.py, or of an export. Its `about` has the entries
    of an export's config.json, such as 'settings', those of the run.

    which: of a run the 'best' agent, if it has one, or the 'last'. dtype: of the convolutions; ''
    for that of the run. Raises Mistake if the folder holds no agent, or a file is damaged."""
    agent = Agent.load_trained(folder, which, device)
    dtype = dtype or agent.about.get('settings', {}).get('dtype', 'auto')
    agent.config.dtype = str(common.pick_dtype(dtype, device)).removeprefix('torch.')
    set_precision(agent)
    return agent

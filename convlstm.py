"""
The Sokoban agents: `ConvLSTM` and `ConvGLU`, actor-critics with L levels of E parallel experts of width d over a board (the Parallel
Experts framework of "Temporal Recurrence Favors Fewer Layers"), recurrent or not. Everything about them is in this file.

Shape letters: B boards, T steps of an unroll, Y rows, X columns, C channels, E experts, L levels, D width. Boards are (B, Y, X, C),
which is what convolutions want on every device (channels last). One step:

    z         = conv3x3(one-hot planes) to 32 channels, each divided by its RMS over the board's cells
    ConvLSTM:   gates = RMSNorm(conv3x3([z, s, h_i])) * gain + bias, jointly over expert i's 4d channels at each cell -> i, f, g, o
                c_i = sigmoid(f) c_i + sigmoid(i) tanh(g);  h_i = sigmoid(o) tanh(c_i);  s = A(h)
                c_i is the level's own of the step before, s and h_i are the level's below; at level 1 the last level's of the step before.
                Not recurrent: c_i comes in as 0 everywhere, and level 1 reads z alone: it has no weights for s and h.
    ConvGLU:    s = P z (+ R RMSNorm(s of the step before), the only thing that recurrence adds), then at each level
                h_i = s + GLU(conv3x3(RMSNorm(s)));  s = A(h).  No cell. (residual = 'shared': h_i = GLU(...), s = s + A(h).)
    head      = attention pooling and average pooling of RMSNorm(s) over the cells -> dense GLU -> 4 logits and a value

A is sum / sqrt(E) or another of AGGREGATIONS, whose router reads [z; s] averaged over the board. Ours, where the paper is silent: ConvGLU's
norm before the convolution, and z at its level 1 only; the norm before the head (an LSTM's h is small, and ConvGLU's s grows with depth);
HEADS attention queries, sharp from the start (pooling over nearly all cells alike, the policy learns nothing for hundreds of updates:
LOG.md); head_dim.
`radius` r: experts stand on a ring, and expert i reads its own h and those of the r experts before it, summed / sqrt(r + 1), in place of s.

Fast: convolutions over what all experts read are one dense convolution, the rest is grouped; the z part of all levels (and, where the
observations are known, of all steps) is one convolution; a weight's gradient is one convolution over all steps of an unroll; with E = 1,
s is h, and the weights of both are summed first, exactly. `path = 'plain'` does none of this; tests compare the two and a reference.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from kernels import EPS, compiled, gate_weights

AGGREGATIONS = ('sqrt_sum', 'mean', 'softmax_mean', 'softmax_l2')
Z = 32  # channels of the encoder
PLANES = (
    (0, 0),
    (0, 3),
    (0, 4),
    (1, 0),
    (1, 1),
    (1, 2),
)  # (channel, value) of the observation: nothing, agent, box; floor, wall, target
ACTIONS, CELLS = 4, 100
HEADS = 8  # of the head's attention pooling


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
    radius: int = -1  # preceding neighbours that an expert hears, 0..E-1; -1: all experts, by s
    residual: str = 'expert'  # ConvGLU: each expert adds s ('expert', the paper's rule) or s is added to the aggregate ('shared')
    head_dim: int = 256  # width of the head's dense layer
    dtype: str = 'float32'  # of convolutions: 'float32' (the parameters' own) or 'bfloat16'; cells stay in the parameters'
    path: str = (
        'fast'  # 'plain', 'fast' or 'compiled' (fast, with the cells fused by torch.compile)
    )

    def __post_init__(self) -> None:
        for name in ('n_layer', 'n_expert', 'n_embd', 'router_dim', 'head_dim'):
            if getattr(self, name) < 1:
                raise ValueError(f'{name} = {getattr(self, name)}: must be at least 1')
        for name, allowed in (
            ('arch', ('convlstm', 'convglu')),
            ('aggregation', AGGREGATIONS),
            ('dtype', ('float32', 'bfloat16')),
            ('residual', ('expert', 'shared')),
            ('path', ('plain', 'fast', 'compiled')),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f'{name} = {getattr(self, name)!r}: expected one of {", ".join(allowed)}'
                )
        if not -1 <= self.radius < self.n_expert:
            raise ValueError(
                f'radius = {self.radius}: expected -1 (all experts) or 0..{self.n_expert - 1} with n_expert = {self.n_expert}'
            )
        if self.residual == 'shared' and (self.arch != 'convglu' or self.radius >= 0):
            raise ValueError("residual = 'shared' is for arch = 'convglu' without a radius")
        if self.radius >= 0 and self.aggregation != 'sqrt_sum':
            raise ValueError(
                f'radius = {self.radius} needs aggregation = sqrt_sum, not {self.aggregation}'
            )

    @property
    def routed(self) -> bool:
        return self.aggregation.startswith('softmax')


# ----------------------------------------------------------------------------- pieces


def rms(x: torch.Tensor, dims: int | tuple[int, ...] = -1) -> torch.Tensor:
    """x over its root mean square, parameter-free."""
    return x * torch.rsqrt(x.square().mean(dims, keepdim=True) + EPS)


def lstm_cell(
    c: torch.Tensor | None,
    alive: torch.Tensor,
    gain: torch.Tensor,
    bias: torch.Tensor,
    *parts: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gates' preactivations as a sum of parts (B, Y, X, E, 4, D); c (B, Y, X, E, D), or None for zero; alive (B, 1, 1, 1, 1): 0 where an
    episode starts. -> the new c, in gain's dtype, and h in the parts'."""
    p = functools.reduce(torch.add, (part.to(gain.dtype) for part in parts))
    i, f, g, o = (rms(p, (-2, -1)) * gain + bias).unbind(-2)
    new = torch.sigmoid(i) * torch.tanh(g)
    if c is not None:
        new = new + torch.sigmoid(f) * (c * alive)
    return new, (torch.sigmoid(o) * torch.tanh(new)).to(parts[0].dtype)


def glu_cell(s: torch.Tensor | None, bias: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """h = s + GLU(part + bias); s (B, Y, X, 1 or E, D), or None for zero; part (B, Y, X, E, 2, D)."""
    a, b = (part.to(bias.dtype) + bias).unbind(-2)
    h = a * torch.sigmoid(b)
    return h if s is None else s + h


def conv(x: torch.Tensor, w: torch.Tensor, groups: int) -> torch.Tensor:
    """3x3, zero padding. x (B, Y, X, C), w (O, C / groups, 3, 3) -> (B, Y, X, O)."""
    return F.conv2d(x.permute(0, 3, 1, 2), w, padding=w.size(-1) // 2, groups=groups).permute(
        0, 2, 3, 1
    )


class Weight(torch.autograd.Function):
    """A convolution's weight in the products' dtype, for one unroll. Its gradient is one convolution over all that `Conv` has noted in
    `uses` on the way back: fewer and larger products, and no sum over steps in bf16."""

    @staticmethod
    def forward(ctx, w, dt, groups, uses):
        ctx.groups, ctx.uses, ctx.dtype = groups, uses, w.dtype
        ctx.set_materialize_grads(False)  # Conv gives none
        w = w.to(dt, memory_format=torch.channels_last, copy=True)
        ctx.save_for_backward(w)
        return w

    @staticmethod
    def backward(ctx, _):
        x, g = (
            torch.cat(parts) if len(parts) > 1 else parts[0]
            for parts in zip(*ctx.uses, strict=True)
        )
        ctx.uses.clear()
        return (
            conv_backward(g, x, ctx.saved_tensors[0], ctx.groups, 1).to(ctx.dtype),
            None,
            None,
            None,
        )


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
        return (
            conv_backward(g, x, w, ctx.groups, 0) if ctx.needs_input_grad[0] else None,
            None,
            None,
            None,
        )


def conv_backward(
    g: torch.Tensor, x: torch.Tensor, w: torch.Tensor, groups: int, which: int
) -> torch.Tensor:
    """Gradient of x (which = 0) or w (1) of conv for the output's gradient g (B, Y, X, O)."""
    pad = [w.size(-1) // 2] * 2
    grad = torch.ops.aten.convolution_backward(
        g.permute(0, 3, 1, 2),
        x.permute(0, 3, 1, 2),
        w,
        None,
        [1, 1],
        pad,
        [1, 1],
        False,
        [0, 0],
        groups,
        [which == 0, which == 1, False],
    )[which]
    return grad.permute(0, 2, 3, 1) if which == 0 else grad


def make_conv(
    w: torch.Tensor, dt: torch.dtype, groups: int, path: str
) -> Callable[[torch.Tensor], torch.Tensor]:
    """-> x -> conv(x, w), with w cast once for an unroll and, unless the path is plain, its gradient put off to the unroll's end."""
    if path == 'plain':
        w = w.to(dt)
        return lambda x: conv(x.to(dt), w, groups)
    uses: list[tuple[torch.Tensor, torch.Tensor]] = []
    cast = Weight.apply(w, dt, groups, uses)
    return lambda x: Conv.apply(x.to(dt), cast, groups, uses)


def weight(*shape: int, fan_in: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) / math.sqrt(fan_in))


# ----------------------------------------------------------------------------- what both agents share


class Agent(nn.Module):
    """Encoder, aggregation, head, and the unroll around a subclass's `prepare` (an unroll's weights) and `step` (one step of the core).
    A state is a tuple of tensors (B, ...), empty where nothing is carried."""

    def __init__(self, config: AgentConfig):
        super().__init__()
        self.config = config
        D, r, H = config.n_embd, config.router_dim, config.head_dim
        self.encoder, self.encoder_bias = (
            weight(Z, len(PLANES), 3, 3, fan_in=9 * len(PLANES)),
            nn.Parameter(torch.zeros(Z)),
        )
        self.query = nn.Parameter(
            torch.randn(HEADS, D) * 4 / math.sqrt(D)
        )  # sharp: each starts with a few cells
        self.dense, self.logits, self.value = (
            nn.Linear((HEADS + 1) * D, 2 * H),
            nn.Linear(H, ACTIONS),
            nn.Linear(H, 1),
        )
        nn.init.normal_(self.dense.weight, 0, ((HEADS + 1) * D) ** -0.5)
        nn.init.orthogonal_(self.logits.weight, 0.01)  # a nearly uniform policy to start from
        for layer in (self.dense, self.logits, self.value):
            nn.init.zeros_(layer.bias)
        if config.routed:
            self.routers = nn.ModuleList(
                nn.ParameterDict(
                    {
                        'q': weight(r, Z + D, fan_in=Z + D),
                        'q_bias': torch.zeros(r),
                        'k': weight(r, r, fan_in=r),
                        'k_bias': torch.zeros(r),
                        'embedding': torch.randn(config.n_expert, r),
                    }
                )
                for _ in range(config.n_layer)
            )

    @property
    def dt(self) -> torch.dtype:
        """Of convolutions."""
        return torch.bfloat16 if self.config.dtype == 'bfloat16' else self.encoder.dtype

    def encode(self, obs: torch.Tensor) -> torch.Tensor:
        """Observations (N, Y, X, 2) uint8 -> z (N, Y, X, 32)."""
        planes = torch.stack([obs[..., channel] == value for channel, value in PLANES], -1).to(
            self.encoder.dtype
        )
        return rms(conv(planes, self.encoder, 1) + self.encoder_bias, (1, 2)).to(self.dt)

    def head(self, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """s (N, Y, X, D) -> logits (N, 4), value (N,)."""
        s = rms(s.to(self.query.dtype)).flatten(1, 2)  # (N, Y*X, D)
        attention = F.softmax(F.linear(s, self.query), 1)  # (N, Y*X, HEADS)
        pooled = torch.cat([(attention.transpose(1, 2) @ s).flatten(1), s.mean(1)], -1)
        x = F.glu(self.dense(pooled), -1)
        return self.logits(x), self.value(x).squeeze(-1)

    def aggregate(
        self, l: int, h: torch.Tensor, z: torch.Tensor, s: torch.Tensor | None
    ) -> torch.Tensor:
        """A(h_1..h_E) of level l: h (B, Y, X, E, D) -> (B, Y, X, D). z and s are the level's inputs, for the router: a = softmax(q.k_i /
        sqrt(r)), q = Wq [z; s] + bq averaged over the board, k_i = Wk e_i + bk; s None: zero."""
        c, E = self.config, self.config.n_expert
        if not c.routed:
            if c.aggregation not in ('sqrt_sum', 'mean'):
                raise ValueError(f'aggregation = {c.aggregation!r}: not known')
            if E == 1:
                return h.squeeze(3)
            return (
                h.sum(3, dtype=self.query.dtype) / (E if c.aggregation == 'mean' else math.sqrt(E))
            ).to(h.dtype)
        router, wide = self.routers[l], self.query.dtype
        z = z.mean((1, 2), dtype=wide)
        s = z.new_zeros(len(z), c.n_embd) if s is None else s.mean((1, 2), dtype=wide)
        keys = F.linear(router['embedding'], router['k'], router['k_bias'])
        scores = (
            F.linear(torch.cat([z, s], -1), router['q'], router['q_bias'])
            @ keys.t()
            / math.sqrt(c.router_dim)
        )
        a = gate_weights(F.softmax(scores, -1), c.aggregation)  # (B, E)
        return torch.einsum('be,byxed->byxd', a, h.to(wide)).to(h.dtype)

    def ring(self, h: torch.Tensor) -> torch.Tensor:
        """What each expert hears within its radius: (B, Y, X, E, D) -> the same shape."""
        r = self.config.radius
        heard = functools.reduce(
            torch.add, (torch.roll(h.to(self.query.dtype), k, 3) for k in range(r + 1))
        )
        return (heard / math.sqrt(r + 1)).to(h.dtype)

    def cell(self, function: Callable) -> Callable:
        return compiled(function) if self.config.path == 'compiled' else function

    def init_state(self, B: int) -> tuple[torch.Tensor, ...]:
        device = self.query.device
        return tuple(
            torch.zeros(B, *shape, dtype=dtype, device=device)
            for shape, dtype in self.state_shapes()
        )

    def act(
        self, w: SimpleNamespace, obs: torch.Tensor, start: torch.Tensor, state: tuple
    ) -> tuple:
        """One step. obs (B, Y, X, 2); start (B,) bool: an episode starts, its state is zero; w of prepare().
        -> logits (B, 4), value (B,), state."""
        z = self.encode(obs)
        s, state = self.step(w, z, self.z_parts(w, z), self.alive(start), state)
        return *self.head(s), state

    def forward(self, obs: torch.Tensor, start: torch.Tensor, state: tuple) -> tuple:
        """An unroll. obs (T, B, Y, X, 2), start (T, B) -> logits (T, B, 4), value (T, B), state after it. Equal to T calls of act."""
        T, B = start.shape
        w, z = self.prepare(), self.encode(obs.flatten(0, 1))
        parts = [
            part.unflatten(0, (T, B)).unbind(0) for part in self.z_parts(w, z)
        ]  # one convolution for all steps
        alive, features = self.alive(start.flatten()).unflatten(0, (T, B)), []
        for t, z_t in enumerate(z.unflatten(0, (T, B)).unbind(0)):
            s, state = self.step(w, z_t, [part[t] for part in parts], alive[t], state)
            features.append(s)
        logits, value = self.head(torch.cat(features))
        return logits.unflatten(0, (T, B)), value.unflatten(0, (T, B)), state

    def alive(self, start: torch.Tensor) -> torch.Tensor:
        return 1 - start.to(self.query.dtype)[:, None, None, None, None]  # (N, 1, 1, 1, 1)

    def num_params(self) -> dict[str, int]:
        """Parameters in all, of the head, of the encoder and of the core."""
        total = sum(p.numel() for p in self.parameters())
        head = self.query.numel() + sum(
            p.numel() for layer in (self.dense, self.logits, self.value) for p in layer.parameters()
        )
        encoder = self.encoder.numel() + self.encoder_bias.numel()
        return {'total': total, 'head': head, 'encoder': encoder, 'core': total - head - encoder}

    def macs_per_step(self) -> dict[str, int]:
        """Multiply-adds of the products of one step of one board: 'nominal', the paper's cost L E C(d) with C(d) = 9 (32 + 2d) 4d a cell
        (ConvGLU 9 d 2d), the same for both kinds of recurrence; 'core', what the equations need; 'executed', what the fast path does;
        'encoder'; 'head'."""
        c = self.config
        L, E, D = c.n_layer, c.n_expert, c.n_embd
        router = L * (Z + D + E) * c.router_dim if c.routed else 0
        core, executed = (CELLS * macs + router for macs in self.core_macs())
        nominal = (
            CELLS * L * E * (9 * (Z + 2 * D) * 4 * D if c.arch == 'convlstm' else 9 * D * 2 * D)
        )
        head = 2 * HEADS * CELLS * D + (HEADS + 1) * D * 2 * c.head_dim + c.head_dim * (ACTIONS + 1)
        return {
            'nominal': nominal,
            'core': core,
            'executed': executed,
            'encoder': CELLS * 9 * len(PLANES) * Z,
            'head': head,
        }


# ----------------------------------------------------------------------------- the two agents


class ConvLSTM(Agent):
    """State: s (B, Y, X, D) and h (B, Y, X, E, D) of the last level in the convolutions' dtype, then c (B, Y, X, E, D) of each level."""

    def __init__(self, config: AgentConfig):
        super().__init__(config)
        L, E, D = config.n_layer, config.n_expert, config.n_embd
        self.wz, self.ws, self.wh, self.gain, self.bias = (nn.ParameterList() for _ in range(5))
        for l in range(L):
            above = config.recurrent or l > 0  # there is something below but z
            fan_in = 9 * (Z + (2 * D if above else 0))
            self.wz.append(weight(E * 4 * D, Z, 3, 3, fan_in=fan_in))
            self.ws.append(weight(E * 4 * D, D if above else 0, 3, 3, fan_in=fan_in))
            self.wh.append(weight(E * 4 * D, D if above else 0, 3, 3, fan_in=fan_in))
            self.gain.append(torch.ones(E, 4, D))
            self.bias.append(torch.zeros(E, 4, D))
            with torch.no_grad():
                self.bias[l][:, 1] = 1  # forget

    @property
    def merged(self) -> bool:
        """s is h: their weights may be summed first."""
        c = self.config
        return c.n_expert == 1 and not c.routed and c.path != 'plain'

    def state_shapes(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        c = self.config
        if not c.recurrent:
            return []
        board, wide = (10, 10), self.query.dtype
        return [((*board, c.n_embd), self.dt), ((*board, c.n_expert, c.n_embd), self.dt)] + [
            ((*board, c.n_expert, c.n_embd), wide)
        ] * c.n_layer

    def prepare(self) -> SimpleNamespace:
        """The weights of an unroll: the convolutions of z (all levels at once) and, a level, of s and h."""
        c, E, dt = self.config, self.config.n_expert, self.dt
        w = SimpleNamespace(z=make_conv(torch.cat(list(self.wz)), dt, 1, c.path), s=[], h=[])
        for ws, wh in zip(self.ws, self.wh, strict=True):
            if not ws.numel():
                s = h = None
            elif self.merged:
                s, h = make_conv(ws + wh, dt, 1, c.path), None
            elif c.radius >= 0:  # s_i and h_i side by side: one grouped convolution
                s, h = None, make_conv(torch.cat([ws, wh], 1), dt, E, c.path)
            else:
                s, h = make_conv(ws, dt, 1, c.path), make_conv(wh, dt, E, c.path)
            w.s.append(s)
            w.h.append(h)
        return w

    def z_parts(self, w: SimpleNamespace, z: torch.Tensor) -> list[torch.Tensor]:
        """z's share of the gates' preactivations, one (N, Y, X, E, 4, D) a level."""
        c = self.config
        return list(w.z(z).unflatten(3, (c.n_layer, c.n_expert, 4, c.n_embd)).unbind(3))

    def step(
        self,
        w: SimpleNamespace,
        z: torch.Tensor,
        z_parts: list[torch.Tensor],
        alive: torch.Tensor,
        state: tuple[torch.Tensor, ...],
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """-> s of the last level (B, Y, X, D), the new state."""
        c = self.config
        s, h, cells = (
            (state[0] * alive[..., 0].to(self.dt), state[1] * alive.to(self.dt), state[2:])
            if c.recurrent
            else (None, None, ())
        )
        gates, new = (c.n_expert, 4, c.n_embd), []
        for l in range(c.n_layer):
            parts = [z_parts[l]]
            if w.s[l] is not None:
                parts.append(w.s[l](s).unflatten(3, gates))
            if w.h[l] is not None:
                parts.append(
                    w.h[l](
                        torch.cat([self.ring(h), h], 4).flatten(3)
                        if c.radius >= 0
                        else h.flatten(3)
                    ).unflatten(3, gates)
                )
            cell, h = self.cell(lstm_cell)(
                cells[l] if c.recurrent else None, alive, self.gain[l], self.bias[l], *parts
            )
            new.append(cell)
            s = self.aggregate(l, h, z, s)
        return s, (s, h, *new) if c.recurrent else ()

    def core_macs(self) -> tuple[int, int]:
        c, D, core, executed = self.config, self.config.n_embd, 0, 0
        for ws in self.ws:
            core += 9 * (Z + 2 * ws.size(1)) * 4 * D * c.n_expert
            executed += 9 * (Z + (1 if self.merged else 2) * ws.size(1)) * 4 * D * c.n_expert
        return core, executed


class ConvGLU(Agent):
    """State, where recurrent: s (B, Y, X, 1, D) of the last level; with a radius its h (B, Y, X, E, D)."""

    def __init__(self, config: AgentConfig):
        super().__init__(config)
        L, E, D = config.n_layer, config.n_expert, config.n_embd
        fan_in = Z + (D if config.recurrent else 0)
        self.wp, self.bias_p = weight(D, Z, fan_in=fan_in), nn.Parameter(torch.zeros(D))
        if config.recurrent:
            self.wr = weight(D, D, fan_in=fan_in)
        self.w = nn.ParameterList(weight(E * 2 * D, D, 3, 3, fan_in=9 * D) for _ in range(L))
        self.bias = nn.ParameterList(torch.zeros(E, 2, D) for _ in range(L))

    def state_shapes(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        c = self.config
        return (
            [((10, 10, c.n_expert if c.radius >= 0 else 1, c.n_embd), self.query.dtype)]
            if c.recurrent
            else []
        )

    def prepare(self) -> SimpleNamespace:
        c = self.config
        return SimpleNamespace(
            conv=[make_conv(w, self.dt, c.n_expert if c.radius >= 0 else 1, c.path) for w in self.w]
        )

    def z_parts(self, w: SimpleNamespace, z: torch.Tensor) -> list[torch.Tensor]:
        return [
            F.linear(z.to(self.query.dtype), self.wp, self.bias_p)[..., None, :]
        ]  # (N, Y, X, 1, D); 1x1, so fp32 is cheap

    def heard(self, last: torch.Tensor) -> torch.Tensor:
        """What a step reads of the last one's s, or with a radius of its h: (B, Y, X, 1 or E, D), the same shape."""
        return rms(self.ring(last) if self.config.radius >= 0 else last)

    def step(
        self,
        w: SimpleNamespace,
        z: torch.Tensor,
        z_parts: list[torch.Tensor],
        alive: torch.Tensor,
        state: tuple[torch.Tensor, ...],
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """s is (B, Y, X, 1, D), or (B, Y, X, E, D) with a radius: what each expert reads. -> s of the last level (B, Y, X, D), state."""
        c, (s,), h = self.config, z_parts, None
        if c.recurrent:
            s = s + F.linear(self.heard(state[0] * alive), self.wr)
        for l in range(c.n_layer):
            if c.radius >= 0:
                s = s.expand(-1, -1, -1, c.n_expert, -1) if h is None else self.ring(h)
            part = w.conv[l](rms(s).flatten(3)).unflatten(3, (c.n_expert, 2, c.n_embd))
            h = self.cell(glu_cell)(
                None if c.residual == 'shared' else s, self.bias[l], part
            )  # (B, Y, X, E, D)
            if c.radius < 0:
                mixed = self.aggregate(l, h, z, s.squeeze(3))[..., None, :]
                s = s + mixed if c.residual == 'shared' else mixed
        s = self.aggregate(l, h, z, None) if c.radius >= 0 else s.squeeze(3)
        return s, ((h if c.radius >= 0 else s[..., None, :],) if c.recurrent else ())

    def core_macs(self) -> tuple[int, int]:
        c, D = self.config, self.config.n_embd
        reads = c.recurrent * (c.n_expert if c.radius >= 0 else 1)  # R, for each that reads its own
        core = c.n_layer * c.n_expert * 9 * D * 2 * D + Z * D + reads * D * D
        return core, core


def build_agent(config: AgentConfig) -> Agent:
    return {'convlstm': ConvLSTM, 'convglu': ConvGLU}[config.arch](config)

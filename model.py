"""
The language models: `GPT` (no state from token to token beyond its attention window) and
`RecurrentGPT`, whose last level's state is the next token's input. Both have L levels of E parallel
experts of width D (the Parallel Experts framework of "Temporal Recurrence Favors Fewer Layers").

The equations of a level stand here and nowhere else: `route`, `enter`, `heads`, `residual`,
`activation`, `combine`, `aggregate`, put together in `level`, `leave` and `RecurrentGPT.token`.
Every path calls them: plain and fast training (unroll.py: what is kept and when weights' gradients
are made), compiled pieces, CUDA graphs, decoding (sample.py), validation. Autograd differentiates
them. To change the model, edit them.

Shape letters: B streams, T tokens of a chunk, N rows (B, or B*T for GPT), V vocabulary, D width, E
experts, L levels, H query heads, G key-value heads, R = H / G query heads a key-value head, K head
size, W attention window; C cache heads (G where experts share a cache, else E*G), M = E*H / C query
heads a cache head.

Readings of the paper that are ours (results/README.md has all): all experts of a level read the
same u, and keys are normalised after their sum over experts, so that their scale does not depend on
E and the E key-value matrices can be summed before the product, exactly; shared keys and values
keep sqrt_sum where the aggregation is routed."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels import (
    Heads,
    apply_rope,
    by_expert,
    compiled,
    compute_dtype,
    gate_weights,
    head_loss,
    linear,
    outputs,
    rms_norm,
    rope_table,
    rows_per_slice,
    softcap,
    window_mask,
)
from unroll import BLOCK, Recipe, unroll

# name: a shared key or value is the sum over experts times E ** -this (routed ones keep sqrt_sum's)
AGGREGATIONS = {'sqrt_sum': 0.5, 'mean': 1.0, 'softmax_mean': 0.5, 'softmax_l2': 0.5}
RESIDUALS = ('expert', 'shared')
PATHS = ('fast', 'compiled', 'captured', 'graphed', 'plain')
EVAL_CHUNK = 128  # tokens at a time in validation: longer chunks only cost memory


@dataclass
class ModelConfig:
    """Sizes of a model. Raises ValueError, naming the field, for sizes that do not fit together."""

    vocab_size: int = 50304  # V: GPT-2's 50,257 padded to a multiple of 128; 256 for bytes
    n_layer: int = 2  # L
    n_expert: int = 8  # E
    n_embd: int = 768  # D
    n_head: int = 0  # H; 0: D/96 if D % 192 == 0, else D/64 if D % 128 == 0
    n_kv_head: int = 0  # G; 0: H/2 (H when H is odd)
    window: int = 128  # W, the current token included
    block_size: int = 64  # T, tokens of a training chunk
    aggregation: str = 'sqrt_sum'  # one of AGGREGATIONS
    share_kv: bool = True  # recurrent: one cache entry a level, or one for each expert
    residual: str = 'expert'  # GPT: each expert keeps its own (the paper's rule), or 'shared'
    router_dim: int = 64  # width of the router's queries and keys (routed aggregations)
    # recurrent: 'fast' (unroll.py) or 'plain' (the equations, token by token); 'compiled': fast,
    # its pieces by torch.compile, also for GPT's training; 'graphed': compiled, in replayed CUDA
    # graphs of blocks; 'captured': so without gradients only (a trainer that captures whole chunks)
    path: str = 'fast'

    def __post_init__(self) -> None:
        for name in 'vocab_size n_layer n_expert n_embd window block_size router_dim'.split():
            if getattr(self, name) < 1:
                raise ValueError(f'{name} = {getattr(self, name)}: must be at least 1')
        names = {'aggregation': AGGREGATIONS, 'residual': RESIDUALS, 'path': PATHS}
        for name, allowed in names.items():
            if (value := getattr(self, name)) not in allowed:
                raise ValueError(f'{name} = {value!r}: expected one of {", ".join(allowed)}')
        D = self.n_embd
        if self.n_head == 0:
            if D % 192 and D % 128:
                words = 'is a multiple of neither 192 (heads of 96) nor 128 (of 64): set n_head'
                raise ValueError(f'n_embd = {D} {words}')
            self.n_head = D // 96 if D % 192 == 0 else D // 64
        H = self.n_head
        if H < 0 or D % H or (D // H) % 2:
            raise ValueError(f'n_head = {H}: n_embd = {D} must split into heads of an even size')
        if self.n_kv_head == 0:
            self.n_kv_head = H // 2 if H % 2 == 0 else H
        if self.n_kv_head < 0 or H % self.n_kv_head:
            raise ValueError(f'n_kv_head = {self.n_kv_head}: n_head = {H} must be a multiple of it')

    @property
    def compile(self) -> bool:
        return self.path in ('compiled', 'captured', 'graphed')

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    @property
    def expert_weights(self) -> int:
        return 2 * self.n_embd * (self.n_head + self.n_kv_head) * self.head_dim + 8 * self.n_embd**2

    @property
    def routed(self) -> bool:
        return self.aggregation.startswith('softmax')


class State(NamedTuple):
    """What a model carries from chunk to chunk. Nothing in it grows, and no absolute position
    exists: cached keys are normalised but not rotated, and are rotated by their slot in the window
    when they are read."""

    s: Tensor  # (B, D) fp32, the last level's output; empty (B, 0) for GPT
    k: Tensor  # (L, B, C, W, K), newest entry last
    v: Tensor  # (L, B, C, W, K)
    count: Tensor  # (B,) int64, how many of the W entries are filled

    def detach(self) -> 'State':
        return State(*(x.detach() for x in self))


# ---- the equations of a level ----
# N rows at a time, experts batched. `w` holds a level's weights by name. A matrix is a product:
# w['up'](f, x) is W f(x); where f gives several results the last one is multiplied and the others
# are returned before it. w['piece'](f, x) is f(x). That is all a path may choose: how a product is
# made, and where pieces are fused.


class Rules(NamedTuple):
    """Which of the equations hold."""

    recurrent: bool
    aggregation: str
    residual: str
    heads: Heads


def norm(x: Tensor) -> Tensor:
    """Parameter-free RMSNorm over the last dimension."""
    return rms_norm(x)


def enter(
    s: Tensor, z: Tensor | None = None, a: Tensor | None = None, b: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """What all experts read, u = a s + b z (GPT: s), and its norm. s, z (N, D)."""
    u = s if a is None else a * s + b * z
    return u, norm(u)


def heads(qkv: Tensor, h: Heads, wide: torch.dtype) -> tuple[Tensor, ...]:
    """Rows of C*M queries, C keys and C values -> each (N, C*M or C, K); queries and keys
    normalised per head, not yet rotated."""
    queries = h.C * h.M
    qk, v = qkv.unflatten(-1, (-1, h.K)).split([queries + h.C, h.C], -2)
    q, k = norm(qk.to(wide)).split([queries, h.C], -2)
    return q, k, v


def residual(u: Tensor, o: Tensor) -> tuple[Tensor, Tensor]:
    """y = u + Wo att, (E, N, D), and its norm, the FFN's input."""
    y = u + o
    return y, norm(y)


def activation(x: Tensor) -> Tensor:
    """Between the FFN's matrices: squared ReLU."""
    return F.relu(x).square()


def aggregate(h: Tensor, gates: Tensor | None, name: str) -> Tensor:
    """A(h_1..h_E): h (E, ..., D) -> (..., D). sqrt_sum: sum(h_i) / sqrt(E); mean; softmax_mean:
    sum(a_i h_i) / sum(a_i); softmax_l2: sum(a_i h_i) / sqrt(sum(a_i^2)), the router's gates a (...,
    E)."""
    if name == 'sqrt_sum':
        return h.sum(0) / math.sqrt(h.size(0))
    if name == 'mean':
        return h.mean(0)
    weights = gate_weights(gates, name)  # refuses other names
    return (weights.movedim(-1, 0).unsqueeze(-1) * h).sum(0)


def combine(y: Tensor, x: Tensor, u: Tensor, gates: Tensor | None, rules: Rules) -> Tensor:
    """The level's output (N, D) from y and the FFN's x (E, N, D). u: GPT's shared residual."""
    h = y + x
    if rules.recurrent:
        return aggregate(norm(h), gates, rules.aggregation)
    if rules.residual == 'expert':
        return aggregate(h, gates, rules.aggregation)
    if rules.residual == 'shared':
        return u + aggregate(h - u, gates, rules.aggregation)
    raise ValueError(f'residual = {rules.residual!r}: expected one of {", ".join(RESIDUALS)}')


def join(z: Tensor, s: Tensor) -> Tensor:
    return torch.cat([z, s], -1)


def gate(scores: Tensor, r: int, wide: torch.dtype) -> Tensor:
    return F.softmax(scores.to(wide) / math.sqrt(r), -1)


def route(w: dict, s: Tensor, z: Tensor) -> Tensor:
    """Router: a = softmax(q.k_i / sqrt(r)) (N, E), q = Wq [z; s] + bq, k_i = Wk e_i + bk, e_i
    learned."""
    q = w['router_q'](join, z, s)
    scores = w['router_keys'](torch.add, q, w['router_q_bias'])
    return w['piece'](gate, scores, r=q.size(-1), wide=s.dtype)


def leave(w: dict, u: Tensor, att: Tensor, gates: Tensor | None, rules: Rules) -> Tensor:
    """Output projection, FFN, norm and aggregation: u (N, D), att (E, N, H*K) -> the next s (N,
    D)."""
    y, hidden = w['up'](residual, u, w['wo'](att))
    x = w['down'](activation, hidden)
    return w['piece'](combine, y, x, u, gates, rules=rules)


def level(w: dict, s: Tensor, z: Tensor, attend: Callable, rules: Rules) -> Tensor:
    """One level: s, z (N, D) -> the next s. attend(heads, qkv, ...) -> attended values (E, N,
    H*K)."""
    gates = route(w, s, z) if 'router_q' in w else None
    inputs = (s, z, w['a'], w['b']) if rules.recurrent else (s,)
    u, qkv = w['wqkv'](enter, *inputs)
    att = attend(heads, qkv, h=rules.heads, wide=s.dtype)
    return w.get('leave', leave)(w, u, att, gates, rules)


def levels(
    ws: list, s: Tensor, z: Tensor, attends: list, rules: Rules, level: Callable = level
) -> Tensor:
    """All levels in turn: s, z (N, D) -> s[L]. level: the one above, or that compiled."""
    for w, attend in zip(ws, attends, strict=True):
        s = level(w, s, z, attend, rules)
    return s


def token(
    ws: list, s: Tensor, z: Tensor, attends: list, rules: Rules, level: Callable = level
) -> Tensor:
    """A token of the recurrent model: its s[0] is s[L] of the token before. s, z (B, D) -> s[L]."""
    return levels(ws, s, z, attends, rules, level)


def losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Summed cross-entropy (nats) of the capped logits (N, V), fp32, against targets (N,)."""
    return F.cross_entropy(softcap(logits), targets, reduction='sum')


# ---- weights ----


def uniform_(w: Tensor, fan_in: int) -> Tensor:
    """Uniform with standard deviation 0.5 / sqrt(fan_in): Muon's first updates then change a matrix
    by a like amount."""
    bound = 0.5 * math.sqrt(3 / fan_in)
    return w.uniform_(-bound, bound)


class Level(nn.Module):
    """The weights of one level's E experts, stacked, each matrix (out, in). No biases."""

    def __init__(self, config: ModelConfig, recurrent: bool):
        super().__init__()
        E, D, H, G = config.n_expert, config.n_embd, config.n_head, config.n_kv_head
        K = config.head_dim
        self.config, self.recurrent = config, recurrent
        self.wq = nn.Parameter(torch.empty(E, H * K, D))
        self.wk = nn.Parameter(torch.empty(E, G * K, D))
        self.wv = nn.Parameter(torch.empty(E, G * K, D))
        self.wo = nn.Parameter(torch.empty(E, D, H * K))
        self.up = nn.Parameter(torch.empty(E, 4 * D, D))
        self.down = nn.Parameter(torch.empty(E, D, 4 * D))
        if recurrent:  # u = a*s + b*z
            self.a = nn.Parameter(torch.ones(()))
            self.b = nn.Parameter(torch.ones(()))
        if config.routed:
            r = config.router_dim
            self.router_q = nn.Parameter(torch.empty(r, 2 * D))
            self.router_k = nn.Parameter(torch.empty(r, r))
            self.router_q_bias = nn.Parameter(torch.zeros(r))
            self.router_k_bias = nn.Parameter(torch.zeros(r))
            self.expert_embedding = nn.Parameter(torch.empty(E, r))

    @torch.no_grad()
    def init_weights(self) -> None:
        """q, k, v, up and the router uniform (see uniform_); o and down zero, so that every level
        starts as the identity on its normalised input; expert embeddings N(0, 1)."""
        for w in (self.wq, self.wk, self.wv, self.up):
            uniform_(w, self.config.n_embd)
        self.wo.zero_()
        self.down.zero_()
        if self.config.routed:
            uniform_(self.router_q, self.router_q.size(1))
            uniform_(self.router_k, self.router_k.size(1))
            self.expert_embedding.normal_()

    def rules(self) -> Rules:
        c = self.config
        shared = self.recurrent and c.share_kv
        sizes = Heads(c.n_expert, c.n_kv_head, c.n_head // c.n_kv_head, c.head_dim, shared)
        return Rules(self.recurrent, c.aggregation, c.residual, sizes)

    def weights(self) -> dict[str, Tensor]:
        """What the equations read, differentiably: every parameter by its name, but q, k and v in a
        single matrix 'wqkv' ((C*M + 2*C) * K, D) and the router's keys ready made. Where the cache
        is shared the q rows are ordered (G, E, R), so that the queries of one key-value head are
        neighbours, and the E key-value matrices are summed first."""
        c, (E, G, R, K, shared) = self.config, self.rules().heads
        merged = ('wq', 'wk', 'wv', 'router_k', 'router_k_bias', 'expert_embedding')
        w = {name: p for name, p in self.named_parameters() if name not in merged}
        if shared:
            wq = self.wq.view(E, G, R * K, -1).transpose(0, 1).flatten(0, 2)
            scale = E ** -AGGREGATIONS[c.aggregation]
            wk, wv = self.wk.sum(0) * scale, self.wv.sum(0) * scale  # (G*K, D)
        else:
            wq, wk, wv = (x.flatten(0, 1) for x in (self.wq, self.wk, self.wv))
        w['wqkv'] = torch.cat([wq, wk, wv])
        if c.routed:
            keys = F.linear(self.expert_embedding, self.router_k, self.router_k_bias)
            w['router_keys'] = keys  # k_i = Wk e_i + bk: (E, r)
        return w


def plain_weights(w: dict[str, Tensor], dt: torch.dtype) -> dict:
    """`w` for the equations with nothing put off: matrices as products in dt, by autograd as it
    is."""

    def product(matrix):
        def call(f, *args, **static):
            *rest, x = outputs(f(*args, **static)) if callable(f) else (f,)
            y = linear(x.to(dt), matrix)
            return (*rest, y) if rest else y

        return call

    bound = {name: product(x.to(dt)) if x.dim() > 1 else x for name, x in w.items()}
    return bound | {'piece': lambda f, *args, **static: f(*args, **static)}


# ---- the models ----


class LanguageModel(nn.Module):
    """What both models share: embedding, head, loss, one-token step, sizes. Subclasses give
    `hidden`."""

    recurrent: bool

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.embedding = nn.Parameter(torch.empty(config.vocab_size, config.n_embd))
        self.levels = nn.ModuleList(Level(config, self.recurrent) for _ in range(config.n_layer))
        self.head = nn.Parameter(torch.empty(config.vocab_size, config.n_embd))
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Embedding N(0, 1) (it is normalised at once); head zero, so that the first loss is ln V;
        levels: Level.init_weights."""
        self.embedding.normal_()
        self.head.zero_()
        for level in self.levels:
            level.init_weights()

    def init_state(self, B: int) -> State:
        """A fresh state for B streams: s zero, caches empty (masked, not attended as zeros)."""
        c, device, h = self.config, self.embedding.device, self.levels[0].rules().heads
        shape = c.n_layer, B, h.C, c.window, h.K
        k, v = torch.zeros(2, *shape, dtype=compute_dtype(self.embedding), device=device)
        D = c.n_embd if self.recurrent else 0
        s = torch.zeros(B, D, dtype=self.embedding.dtype, device=device)
        return State(s, k, v, torch.zeros(B, dtype=torch.int64, device=device))

    def core(self, idx: Tensor, state: State | None) -> tuple[Tensor, State | None]:
        """Tokens (B, T) -> the head's input (B, T, D) and the new state."""
        x, state = self.hidden(norm(F.embedding(idx, self.embedding)), state)
        return norm(x), state

    def forward(
        self, idx: Tensor, targets: Tensor | None = None, state: State | None = None
    ) -> tuple[Tensor, State | None]:
        """Run a chunk. idx, targets: (B, T) int64. Returns (logits (B, T, V) fp32, state), or with
        targets (mean cross-entropy in nats, state). The incoming state is detached (truncated
        back-propagation). state = None: RecurrentGPT starts from init_state; GPT attends over the
        whole chunk, as in training, and returns None."""
        x, state = self.core(idx, state)  # (B, T, D)
        if targets is not None:
            compile = self.config.compile
            return head_loss(x.flatten(0, 1), self.head, targets.flatten(), losses, compile), state
        dtype = compute_dtype(x)
        return softcap(F.linear(x.to(dtype), self.head.to(dtype)).to(x.dtype)), state

    def step(self, idx: Tensor, state: State) -> tuple[Tensor, State]:
        """One token for each stream: idx (B,) -> logits (B, V), new state."""
        logits, state = self(idx.unsqueeze(1), state=state)
        return logits.squeeze(1), state

    def num_params(self) -> dict[str, int]:
        """Parameters in all, of the embedding, of the head and of the core (the levels)."""
        total = sum(p.numel() for p in self.parameters())
        ends = {'embedding': self.embedding.numel(), 'head': self.head.numel()}
        return {'total': total, **ends, 'core': total - sum(ends.values())}

    def flops_per_token(self) -> dict[str, float]:
        """Forward FLOPs a token, core and head apart (training costs three times that): two a
        weight, plus attention at the mean context: W when recurrent (a stream's steady state), (T +
        1) / 2 for GPT's sequences. The E key-value projections are all counted, also where the code
        sums them first, as the paper's budgets do."""
        c, D = self.config, self.config.n_embd
        context = c.window if self.recurrent else (c.block_size + 1) / 2
        expert = 2 * c.expert_weights + 4 * context * D
        router = 2 * (2 * D + c.n_expert) * c.router_dim if c.routed else 0
        core = c.n_layer * (c.n_expert * expert + router)
        return {'core': float(core), 'head': float(2 * D * c.vocab_size)}

    def param_groups(self) -> dict[str, list[nn.Parameter]]:
        """Parameters by optimizer: 'matrices' for Muon; 'embedding', 'head' and 'scalars' for
        AdamW."""
        levels = self.levels.named_parameters()
        matrices = [p for n, p in levels if p.dim() >= 2 and not n.endswith('expert_embedding')]
        known = {id(p) for p in [*matrices, self.embedding, self.head]}
        scalars = [p for p in self.parameters() if id(p) not in known]
        groups = {'matrices': matrices, 'embedding': [self.embedding], 'head': [self.head]}
        return groups | {'scalars': scalars}


class RecurrentGPT(LanguageModel):
    """The recurrent Transformer: for a token x, z = RMSNorm(embedding(x)), s[0] = s[L] of the token
    before, then `level` L times. The caches are FIFOs of W entries, this token's included; keys get
    RoPE as they are read. One entry a level, or, share_kv = False, one for each expert."""

    recurrent = True

    def hidden(self, z: Tensor, state: State | None) -> tuple[Tensor, State]:
        """z (B, T, D) -> s[L] at every token (B, T, D) and the new state."""
        state = (self.init_state(z.size(0)) if state is None else state).detach()
        path, dt = self.config.path, compute_dtype(z)
        with torch.autocast(z.device.type, enabled=False):  # dtypes are ours from here on
            weights, rules = [level.weights() for level in self.levels], self.levels[0].rules()
            if path == 'plain':
                out, new = plain_unroll(z.transpose(0, 1), state, weights, rules, dt)
            else:
                graphs = path == 'graphed' or (path == 'captured' and not torch.is_grad_enabled())
                compile = self.config.compile
                recipe = Recipe(token, rules, dt, z.dtype, compile, graphs)
                out, new = unroll(z.transpose(0, 1), state, weights, recipe)
        return out.transpose(0, 1), State(*new)


def plain_unroll(
    z: Tensor, state: State, weights: list[dict], rules: Rules, dt: torch.dtype
) -> tuple[Tensor, State]:
    """The equations token by token, caches as new tensors, differentiated by autograd alone. z (T,
    B, D)."""
    s, k, v, count = state
    W, k, v, out = k.size(3), list(k), list(v), []
    ws = [plain_weights(w, dt) for w in weights]
    cos, sin = rope_table(W, rules.heads.K, s)
    for z_t in z:
        count = (count + 1).clamp(max=W)
        empty = torch.arange(W, device=z.device) < W - count[:, None]  # (B, W)

        def attend(l, heads, qkv, h, wide, empty=empty):
            q, k_t, v_t = heads(qkv, h, wide)
            for cache, x in ((k, k_t), (v, v_t)):  # push_FIFO: (B, C, W, K)
                cache[l] = torch.cat([cache[l][:, :, 1:], x.to(dt).unsqueeze(2)], 2)
            q = apply_rope(q, cos[-1], sin[-1]).to(dt).unflatten(1, (h.C, h.M))
            scores = q @ apply_rope(k[l], cos, sin).to(dt).mT  # rotated as read, by slot
            scores = (scores.to(wide) / math.sqrt(h.K)).masked_fill(empty[:, None, None], -math.inf)
            return by_expert(F.softmax(scores, -1).to(dt) @ v[l], h)

        attends = [lambda *args, l=l, **sizes: attend(l, *args, **sizes) for l in range(len(ws))]
        s = token(ws, s, z_t, attends, rules)
        out.append(s)
    return torch.stack(out), State(s, torch.stack(k), torch.stack(v), count)


class GPT(LanguageModel):
    """The non-recurrent twin: E pre-norm Transformer blocks a level, batched. E = 1 is a standard
    Transformer. The stream between levels stays in fp32: the literal rule multiplies it by sqrt(E)
    a level."""

    recurrent = False

    def hidden(self, z: Tensor, state: State | None) -> tuple[Tensor, State | None]:
        """z (B, T, D) -> s[L] (B, T, D). Without a state: causal attention over the chunk. With
        one: the window W over the cached and the new tokens, so that any split of a stream into
        chunks gives the same result."""
        c, T, dt = self.config, z.size(1), compute_dtype(z)
        rope = rope_table(T if state is None else c.window + T, c.head_dim, z)
        rules, s, entries, past, mask = self.levels[0].rules(), z, [], None, None
        run = compiled(sequence_level) if c.compile and state is None else sequence_level
        if state is not None:
            mask = window_mask(state.count, T, c.window)
        with torch.autocast(z.device.type, enabled=False):
            for l, one in enumerate(self.levels):
                if state is not None:
                    past = state.k[l].detach(), state.v[l].detach()
                inputs = s, z if c.routed else s, past
                s, *kv = run(one.weights(), inputs, rope, mask, rules, dt)
                entries.append(kv)
        if state is None:
            return s, None
        k, v = (torch.stack(x) for x in zip(*entries, strict=True))
        return s, State(state.s, k, v, (state.count + T).clamp(max=c.window))


def sequence_level(
    w: dict, inputs: tuple, rope: tuple, mask: Tensor | None, rules: Rules, dt: torch.dtype
) -> tuple[Tensor, ...]:
    """One level of GPT on whole sequences: s and z (B, T, D) and cached keys and values, or None ->
    the next s; with a cache also the new one's keys and values. Compiled, it serves all levels."""
    s, z, past = inputs
    (B, T, _), entries = s.shape, []

    def attend(heads, qkv, h, wide):
        q, k, v = (x.view(B, T, -1, h.K).transpose(1, 2) for x in heads(qkv, h, wide))
        if past is not None:
            pairs = zip(past, (k, v), strict=True)
            k, v = (torch.cat([old.to(dt), x.to(dt)], 2) for old, x in pairs)
            entries.extend(x[:, :, T:] for x in (k, v))  # the last W
        q, k = (apply_rope(x, *(a[-x.size(2) :] for a in rope)).to(dt) for x in (q, k))
        y = attention(q, k, v.to(dt), mask)  # (B, E*H, T, K)
        return y.unflatten(1, (h.E, -1)).permute(1, 0, 3, 2, 4).reshape(h.E, B * T, -1)

    s = level(plain_weights(w, dt), s.flatten(0, 1), z.flatten(0, 1), attend, rules)
    return s.unflatten(0, (B, T)), *entries


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Causal (mask None) or masked attention: q (B, A, T, K), k and v (B, C, S, K), A / C query
    heads a key-value head."""
    (B, A, T, K), C = q.shape, k.size(1)
    how = {'attn_mask': mask, 'is_causal': mask is None, 'enable_gqa': A != C}
    if q.is_cuda:  # not cuDNN's, which refuses some sizes, such as T = 32 with grouped heads
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
            return F.scaled_dot_product_attention(q, k, v, **how)
    if mask is not None or T > 512 or q.dtype != torch.bfloat16:
        return F.scaled_dot_product_attention(q, k, v, **how)
    # short chunks in bf16 on a CPU: three plain products beat the fused kernel (LOG.md)
    future = q.new_full((T, T), -math.inf).triu(1).repeat(A // C, 1)
    q, k, v = (x.reshape(B * C, -1, K) for x in (q, k, v))
    p = F.softmax(torch.baddbmm(future, q, k.mT, alpha=1 / math.sqrt(K)), -1)  # (B*C, A/C*T, T)
    return (p @ v).view(B, A, T, K)


def memory(
    config: ModelConfig,
    recurrent: bool,
    batch: tuple[int, int],
    dtype: torch.dtype,
    device: str,
    whole: bool,
) -> dict[str, float]:
    """Bytes that a training run needs on one device, by what they are for; their sum is the most it
    holds at a time.

    batch: rows of a micro-batch and of all of a rank's; dtype: of products; device: 'cpu' or
    'cuda'; whole: a micro-batch is one CUDA graph, whose memory validation cannot use. Tensors are
    counted; what is fresh for a moment is rounded up, so that results/modelled/memory.md's peaks
    are met or passed by a few percent. Path 'plain' holds more."""
    c, (rows, streams), size = config, batch, dtype.itemsize
    L, E, D, W, T = c.n_layer, c.n_expert, c.n_embd, c.window, c.block_size
    matrices, table = L * E * c.expert_weights, 2 * c.vocab_size * D
    logits = rows_per_slice(rows * T, c.vocab_size, device) * c.vocab_size
    need = {
        'weights': 4 * (matrices + table),
        'gradients': 4 * (matrices + table),
        'optimizer': 4 * matrices + 8 * table,
        # copies in dtype, gradients of one micro-batch
        'fresh': 8 * matrices + 6 * table + 8 * logits,
        # CUDA's own and NCCL's: assumed; Python's and torch's
        'libraries': 1e9 if device == 'cuda' else 5e8,
    }
    own = c.n_kv_head if recurrent and c.share_kv else E * c.n_kv_head
    cache = 2 * L * own * W * c.head_dim * size  # a row's keys and values
    # tokens of a block; of a validation's chunk (train_lm.evaluate)
    n, t = min(T, BLOCK), min(T, EVAL_CHUNK)
    if recurrent:
        need['state'] = cache * (streams + rows * (rows < streams))
        # tokens and blocks that are kept for the backward: where blocks are graphs, they run again
        every = whole or device == 'cpu'
        tokens, kept = (T, -(-T // n)) if every else (n, 1)
        # of a chunk (between blocks also its gradients'); of its blocks that are kept, of one's
        # gradients, the new ones, what is fresh, and what a block's graphs read and write
        slots = (W + T) * (3 if T > n or not every else 1)
        slots += (W + n) * (1.5 * kept + (6 if every else 7))
        # of a token: what the backward reads and leaves for weights, of a level's weights once more
        token = L * D * (16 * E * size + 12) + 9 * E * D * size
        # attention's weights: fresh ones, and those that a graph of several blocks keeps
        weights = (16 + (tokens - n) * whole) * L * E * c.n_head * (W + n) * size
        need['chunk'] = rows * (cache * slots / W + tokens * token + weights + 40 * T * D)
        validation = rows * cache * ((W + t) / W + 3 * (W + n) / W)
    else:
        need['chunk'] = rows * T * D * (L * (17 * E * size + 8) + 40)
        validation = rows * (2 * cache + E * t * (76 * D + 13 * c.n_head * (W + t)))
    validation += 16 * logits
    if not whole:  # it runs in the training's memory, but for its buffers
        validation = max(validation / 2 * (device == 'cuda'), validation - need['chunk'])
    return {**need, 'validation': validation}


def build_model(config: ModelConfig, recurrent: bool) -> LanguageModel:
    """ValueError for a setting of the other kind."""
    if recurrent and config.residual != 'expert':
        raise ValueError(f'residual = {config.residual!r} is for recurrent = False')
    if not recurrent and not config.share_kv:
        raise ValueError('share_kv = False is for recurrent = True')
    return RecurrentGPT(config) if recurrent else GPT(config)

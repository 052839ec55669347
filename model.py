"""
The language models: `GPT` (no state from token to token beyond its attention window) and `RecurrentGPT`, whose last
level's state is the next token's input. Both have L levels of E parallel experts of width D (the Parallel Experts
framework of "Temporal Recurrence Favors Fewer Layers"). Everything about the models is in this file; the fast unroll is in unroll.py,
generation in decode.py.

Shape letters: B streams, T tokens of a chunk, V vocabulary, D width, E experts, L levels, H query heads, G key-value
heads, R = H / G query heads a key-value head, K head size, W attention window.

Readings of the paper that are ours (README.md has all): all experts of a level read the same u, and keys are normalised after
their sum over experts, so that their scale does not depend on E and the E key-value matrices can be summed before the product,
exactly; shared keys and values keep sqrt_sum where the aggregation is routed.
"""
import math
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from kernels import EPS, apply_rope, compute_dtype, gate_weights, head_loss, rope_table, rows_per_slice, softcap
from unroll import BLOCK, unroll

AGGREGATIONS = ('sqrt_sum', 'mean', 'softmax_mean', 'softmax_l2')


@dataclass
class ModelConfig:
    """Sizes of a model. Raises ValueError, naming the field, for sizes that do not fit together."""
    vocab_size: int = 50304            # V: GPT-2's 50,257 padded to a multiple of 128; 256 for bytes
    n_layer: int = 2                   # L
    n_expert: int = 8                  # E
    n_embd: int = 768                  # D
    n_head: int = 0                    # H; 0: D/96 if D % 192 == 0, else D/64 if D % 128 == 0
    n_kv_head: int = 0                 # G; 0: H/2 (H when H is odd)
    window: int = 128                  # W, the current token included
    block_size: int = 64               # T, tokens of a training chunk
    aggregation: str = 'sqrt_sum'      # one of AGGREGATIONS
    share_kv: bool = True              # recurrent: one cache entry a level, or one for each expert
    residual: str = 'expert'           # GPT: each expert keeps its own residual ('expert', the paper's rule) or 'shared'
    router_dim: int = 64               # width of the router's queries and keys (routed aggregations)
    path: str = 'fast'                 # recurrent: unroll.Unroll, or the equations token by token ('plain'); 'compiled':
                                       # the same with torch.compile, also for GPT's training; 'graphed': compiled, and
                                       # on CUDA the unroll replays captured blocks of tokens

    def __post_init__(self) -> None:
        for name in ('vocab_size', 'n_layer', 'n_expert', 'n_embd', 'window', 'block_size', 'router_dim'):
            if getattr(self, name) < 1:
                raise ValueError(f'{name} = {getattr(self, name)}: must be at least 1')
        for name, allowed in (('aggregation', AGGREGATIONS), ('residual', ('expert', 'shared')), ('path', ('fast', 'compiled', 'graphed', 'plain'))):
            if getattr(self, name) not in allowed:
                raise ValueError(f'{name} = {getattr(self, name)!r}: expected one of {", ".join(allowed)}')
        D = self.n_embd
        if self.n_head == 0:
            if D % 192 and D % 128:
                raise ValueError(f'n_embd = {D} is a multiple of neither 192 (heads of 96) nor 128 (heads of 64): set n_head')
            self.n_head = D // 96 if D % 192 == 0 else D // 64
        if self.n_head < 0 or D % self.n_head or (D // self.n_head) % 2:
            raise ValueError(f'n_head = {self.n_head}: n_embd = {D} must split into heads of an even size')
        if self.n_kv_head == 0:
            self.n_kv_head = self.n_head // 2 if self.n_head % 2 == 0 else self.n_head
        if self.n_kv_head < 0 or self.n_head % self.n_kv_head:
            raise ValueError(f'n_kv_head = {self.n_kv_head}: n_head = {self.n_head} must be a multiple of it')

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    @property
    def routed(self) -> bool:
        return self.aggregation.startswith('softmax')


class State(NamedTuple):
    """What a model carries from chunk to chunk. Nothing in it grows, and no absolute position exists: cached keys are
    normalised but not rotated, and are rotated by their slot in the window when they are read."""
    s: torch.Tensor                    # (B, D) fp32, the last level's output; empty (B, 0) for GPT
    k: torch.Tensor                    # (L, B, C, W, K), newest entry last; C = G, or E*G where experts own their cache
    v: torch.Tensor                    # (L, B, C, W, K)
    count: torch.Tensor                # (B,) int64, how many of the W entries are filled

    def detach(self) -> 'State':
        return State(*(x.detach() for x in self))


def norm(x: torch.Tensor) -> torch.Tensor:
    """Parameter-free RMSNorm over the last dimension."""
    return F.rms_norm(x, (x.size(-1),), eps=EPS)


def uniform_(w: torch.Tensor, fan_in: int) -> torch.Tensor:
    """Uniform with standard deviation 0.5 / sqrt(fan_in): Muon's first updates then change a matrix by a like amount."""
    bound = 0.5 * math.sqrt(3 / fan_in)
    return w.uniform_(-bound, bound)


class Level(nn.Module):
    """The weights of one level's E experts, stacked, each matrix (out, in). No biases."""

    def __init__(self, config: ModelConfig, recurrent: bool):
        super().__init__()
        E, D, H, G, K = config.n_expert, config.n_embd, config.n_head, config.n_kv_head, config.head_dim
        self.config, self.recurrent = config, recurrent
        self.wq = nn.Parameter(torch.empty(E, H * K, D))
        self.wk = nn.Parameter(torch.empty(E, G * K, D))
        self.wv = nn.Parameter(torch.empty(E, G * K, D))
        self.wo = nn.Parameter(torch.empty(E, D, H * K))
        self.up = nn.Parameter(torch.empty(E, 4 * D, D))
        self.down = nn.Parameter(torch.empty(E, D, 4 * D))
        if recurrent:                                          # u = a*s + b*z
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
        """q, k, v, up and the router uniform (see uniform_); o and down zero, so that every level starts as the identity
        on its normalised input; expert embeddings N(0, 1)."""
        for w in (self.wq, self.wk, self.wv, self.up):
            uniform_(w, self.config.n_embd)
        self.wo.zero_()
        self.down.zero_()
        if self.config.routed:
            uniform_(self.router_q, self.router_q.size(1))
            uniform_(self.router_k, self.router_k.size(1))
            self.expert_embedding.normal_()

    def router_keys(self) -> torch.Tensor:
        """k_i = Wk e_i + bk: (E, router_dim)"""
        return F.linear(self.expert_embedding, self.router_k, self.router_k_bias)

    def scale(self) -> float | None:
        """The factor of an unrouted aggregation's sum; None for a routed one."""
        E = self.config.n_expert
        return {'sqrt_sum': 1 / math.sqrt(E), 'mean': 1 / E}.get(self.config.aggregation)

    def scale_kv(self) -> float:
        """The same for the shared keys and values; a routed aggregation keeps sqrt_sum there."""
        return self.scale() or 1 / math.sqrt(self.config.n_expert)

    def aggregate(self, h: list[torch.Tensor] | torch.Tensor, z: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        """A(h_1..h_E) -> (..., D). h: E tensors (..., D); z and s (..., D), the level's inputs, feed the router.
        sqrt_sum: sum(h_i) / sqrt(E); mean; softmax_mean: sum(a_i h_i) / sum(a_i); softmax_l2: sum(a_i h_i) / sqrt(sum(a_i^2));
        router: a = softmax(q.k_i / sqrt(r)), q = Wq [z; s] + bq, k_i = Wk e_i + bk with a learned embedding e_i."""
        h = torch.stack(tuple(h))                              # (E, ..., D)
        if not self.config.routed:
            return h.sum(0) * self.scale()
        q = F.linear(torch.cat([z, s.to(z.dtype)], -1), self.router_q, self.router_q_bias)
        scores = q @ self.router_keys().t() / math.sqrt(self.config.router_dim)              # (..., E)
        weights = gate_weights(F.softmax(scores.to(s.dtype), -1), self.config.aggregation)
        return (weights.movedim(-1, 0).unsqueeze(-1) * h).sum(0)

    def aggregate_kv(self, x: list[torch.Tensor]) -> torch.Tensor:
        """Keys or values of the shared cache entry."""
        return torch.stack(x).sum(0) * self.scale_kv()


class LanguageModel(nn.Module):
    """What both models share: embedding, head, loss, one-token step, sizes. Subclasses give `hidden`."""
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
        """Embedding N(0, 1) (it is normalised at once); head zero, so that the first loss is ln V; levels: Level.init_weights."""
        self.embedding.normal_()
        self.head.zero_()
        for level in self.levels:
            level.init_weights()

    def init_state(self, B: int) -> State:
        """A fresh state for B streams: s zero, caches empty (masked, not attended as zeros)."""
        c, device = self.config, self.embedding.device
        dtype = compute_dtype(self.embedding)
        C = c.n_kv_head if self.recurrent and c.share_kv else c.n_expert * c.n_kv_head
        cache = torch.zeros(2, c.n_layer, B, C, c.window, c.head_dim, dtype=dtype, device=device)
        s = torch.zeros(B, c.n_embd if self.recurrent else 0, dtype=self.embedding.dtype, device=device)
        return State(s, cache[0], cache[1], torch.zeros(B, dtype=torch.int64, device=device))

    def hidden(self, z: torch.Tensor, state: State | None) -> tuple[torch.Tensor, State | None]:
        raise NotImplementedError

    def core(self, idx: torch.Tensor, state: State | None) -> tuple[torch.Tensor, State | None]:
        """Tokens (B, T) -> the head's input (B, T, D) and the new state."""
        x, state = self.hidden(norm(F.embedding(idx, self.embedding)), state)
        return norm(x), state

    def forward(self, idx: torch.Tensor, targets: torch.Tensor | None = None, state: State | None = None) -> tuple[torch.Tensor, State | None]:
        """Run a chunk. idx, targets: (B, T) int64. Returns (logits (B, T, V) fp32, state), or with targets
        (mean cross-entropy in nats, state). The incoming state is detached (truncated back-propagation).
        state = None: RecurrentGPT starts from init_state; GPT attends over the whole chunk, as in training, and returns None."""
        x, state = self.core(idx, state)                       # (B, T, D)
        if targets is not None:
            compile = self.config.path in ('compiled', 'graphed')
            return head_loss(x.reshape(-1, x.size(-1)), self.head, targets.reshape(-1), compile), state
        dtype = compute_dtype(x)
        return softcap(F.linear(x.to(dtype), self.head.to(dtype)).to(x.dtype)), state

    def step(self, idx: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        """One token for each stream: idx (B,) -> logits (B, V), new state."""
        logits, state = self(idx.unsqueeze(1), state=state)
        return logits.squeeze(1), state

    def num_params(self) -> dict[str, int]:
        """Parameters in all, of the embedding, of the head and of the core (the levels)."""
        total = sum(p.numel() for p in self.parameters())
        return {'total': total, 'embedding': self.embedding.numel(), 'head': self.head.numel(),
                'core': total - self.embedding.numel() - self.head.numel()}

    def flops_per_token(self) -> dict[str, float]:
        """Forward FLOPs a token, core and head apart (training costs three times that): two a weight, plus attention at the
        mean context: W when recurrent (a stream's steady state), (T + 1) / 2 for GPT's sequences. The E key-value
        projections are all counted, also where the code sums them first, as the paper's budgets do."""
        c = self.config
        D, HK, GK = c.n_embd, c.n_head * c.head_dim, c.n_kv_head * c.head_dim
        context = c.window if self.recurrent else (c.block_size + 1) / 2
        expert = 2 * (2 * D * HK + 2 * D * GK + 8 * D * D) + 4 * context * HK
        router = 2 * (2 * D + c.n_expert) * c.router_dim if c.routed else 0
        return {'core': float(c.n_layer * (c.n_expert * expert + router)), 'head': float(2 * D * c.vocab_size)}

    def param_groups(self) -> dict[str, list[nn.Parameter]]:
        """Parameters by optimizer: 'matrices' for Muon; 'embedding', 'head' and 'scalars' for AdamW."""
        level = [p for name, p in self.levels.named_parameters() if p.dim() >= 2 and not name.endswith('expert_embedding')]
        known = {id(p) for p in [*level, self.embedding, self.head]}
        return {'matrices': level, 'embedding': [self.embedding], 'head': [self.head],
                'scalars': [p for p in self.parameters() if id(p) not in known]}


class RecurrentGPT(LanguageModel):
    """The recurrent Transformer. For a token x, z = RMSNorm(embedding(x)), s[0] = s[L] of the token before, and at each level

        u           = a s + b z                            a, b learned scalars of the level; the same u for all experts
        q_i,k_i,v_i = projections of RMSNorm(u)            no bias, nothing nonlinear per expert on k_i and v_i
        q_i         = RoPE(RMSNorm(q_i)) per head
        k, v        = RMSNorm(A(k_1..k_E)) per head, A(v_1..v_E)       one shared cache entry a level
        cache       = push_FIFO(cache, (k, v))             W entries, this one included; RoPE on keys as they are read
        y_i         = u + Wo_i attend(q_i, cache)
        h_i         = RMSNorm(y_i + FFN_i(RMSNorm(y_i)))   FFN: 4D, squared ReLU
        s           = A(h_1..h_E)

    share_kv = False gives each expert its own cache."""
    recurrent = True

    def hidden(self, z: torch.Tensor, state: State | None) -> tuple[torch.Tensor, State]:
        """z (B, T, D) -> s[L] at every token (B, T, D) and the new state."""
        state = (self.init_state(z.size(0)) if state is None else state).detach()
        if self.config.path != 'plain':
            weights = [level_weights(level) for level in self.levels]
            out, new = unroll(z.transpose(0, 1), *state, weights, self.config.aggregation, self.config.share_kv,
                              compile=self.config.path in ('compiled', 'graphed'), graphs=self.config.path == 'graphed')
            return out.transpose(0, 1), State(*new)
        out = []
        for z_t in z.unbind(1):                                # (B, D)
            state = self.plain_step(z_t, state)
            out.append(state.s)
        return torch.stack(out, 1), state

    def plain_step(self, z: torch.Tensor, state: State) -> State:
        """One token by the equations above, expert by expert. z (B, D)."""
        s, count, W = state.s, state.count, self.config.window
        new_k, new_v = [], []
        count = (count + 1).clamp(max=W)
        for level, cache_k, cache_v in zip(self.levels, state.k, state.v, strict=True):      # caches (B, C, W, K)
            s, k, v = self.plain_level(level, z, s, cache_k, cache_v, count)
            new_k.append(k)
            new_v.append(v)
        return State(s, torch.stack(new_k), torch.stack(new_v), count)

    def plain_level(self, level: Level, z: torch.Tensor, s: torch.Tensor, cache_k: torch.Tensor, cache_v: torch.Tensor,
                    count: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """One level for one token: returns the new s (B, D) and the caches with this token's entry pushed."""
        c, B = self.config, z.size(0)
        E, H, G, K, W = c.n_expert, c.n_head, c.n_kv_head, c.head_dim, c.window
        u = level.a * s + level.b * z                          # (B, D), the same for all experts
        n = norm(u)
        q = [norm(F.linear(n, w).view(B, H, K)) for w in level.wq.unbind()]
        k = [F.linear(n, w).view(B, G, K) for w in level.wk.unbind()]
        v = [F.linear(n, w).view(B, G, K) for w in level.wv.unbind()]
        if c.share_kv:
            k, v = norm(level.aggregate_kv(k)), level.aggregate_kv(v)                        # (B, G, K)
        else:
            k, v = norm(torch.cat(k, 1)), torch.cat(v, 1)      # (B, E*G, K)
        cache_k = torch.cat([cache_k[:, :, 1:], k.to(cache_k.dtype).unsqueeze(2)], 2)        # push_FIFO: (B, C, W, K)
        cache_v = torch.cat([cache_v[:, :, 1:], v.to(cache_v.dtype).unsqueeze(2)], 2)
        cos, sin = rope_table(W, K, s)
        keys = apply_rope(cache_k, cos, sin)                   # rotated as read, by slot
        empty = torch.arange(W, device=z.device) < W - count.unsqueeze(1)                    # (B, W)
        h = []
        for i in range(E):
            mine = slice(0, G) if c.share_kv else slice(i * G, (i + 1) * G)
            q_i = apply_rope(q[i], cos[-1], sin[-1]).to(keys.dtype).view(B, G, H // G, K)
            scores = torch.einsum('bgrk,bgwk->bgrw', q_i, keys[:, mine]).to(s.dtype) / math.sqrt(K)
            p = F.softmax(scores.masked_fill(empty[:, None, None], -math.inf), -1).to(keys.dtype)
            attended = torch.einsum('bgrw,bgwk->bgrk', p, cache_v[:, mine]).reshape(B, H * K)
            y = u + F.linear(attended, level.wo[i])
            y = y + F.linear(F.relu(F.linear(norm(y), level.up[i])).square(), level.down[i])
            h.append(norm(y))
        return level.aggregate(h, z, s), cache_k, cache_v


def level_weights(level: Level) -> dict[str, torch.Tensor]:
    """A level's weights as unroll.unroll wants them, differentiably: q of all experts above one k and one v in a single
    matrix of shape (E*H*K + 2*C*K, D). Its q rows are ordered (G, E, R) when the cache is shared, so that the queries of one
    key-value head are neighbours; the E key-value matrices are summed first, which is exact."""
    c = level.config
    E, D, G, R, K = c.n_expert, c.n_embd, c.n_kv_head, c.n_head // c.n_kv_head, c.head_dim
    if c.share_kv:
        wq = level.wq.view(E, G, R * K, D).transpose(0, 1).reshape(E * G * R * K, D)
        wk, wv = level.wk.sum(0) * level.scale_kv(), level.wv.sum(0) * level.scale_kv()      # (G*K, D)
    else:
        wq, wk, wv = (w.reshape(-1, D) for w in (level.wq, level.wk, level.wv))
    w = {'a': level.a, 'b': level.b, 'wqkv': torch.cat([wq, wk, wv]), 'wo': level.wo, 'up': level.up, 'down': level.down}
    if c.routed:
        w |= {'router_q': level.router_q, 'router_q_bias': level.router_q_bias, 'router_keys': level.router_keys()}
    return w


class GPT(LanguageModel):
    """The non-recurrent twin: E pre-norm Transformer blocks a level, batched. E = 1 is a standard Transformer.
    The stream between levels stays in fp32: the literal rule multiplies it by sqrt(E) a level."""
    recurrent = False
    compiled_core = None

    def core(self, idx: torch.Tensor, state: State | None) -> tuple[torch.Tensor, State | None]:
        """Training compiles all of it as one graph; with a state shapes vary, and it runs eagerly."""
        if self.config.path not in ('compiled', 'graphed') or state is not None:
            return super().core(idx, state)
        if self.compiled_core is None:
            self.compiled_core = torch.compile(super().core, dynamic=False)
        return self.compiled_core(idx, None)

    def hidden(self, z: torch.Tensor, state: State | None) -> tuple[torch.Tensor, State | None]:
        """z (B, T, D) -> s[L] (B, T, D). Without a state: causal attention over the chunk. With one: the window W over the
        cached and the new tokens, so that any split of a stream into chunks gives the same result."""
        c, T = self.config, z.size(1)
        cos, sin = rope_table(T if state is None else c.window + T, c.head_dim, z)
        mask = None if state is None else window_mask(state.count, T, c.window)
        s, new_k, new_v = z, [], []
        for l, level in enumerate(self.levels):
            cache = None if state is None else (state.k[l].detach(), state.v[l].detach())
            weights = (level.wq, level.wk, level.wv, level.wo, level.up, level.down)
            h, k, v = experts(s, weights, cos, sin, mask, cache, c.n_head, c.residual == 'expert', level.scale())
            if c.routed:
                h = level.aggregate(h, z, s)
            s = h if c.residual == 'expert' else s + h
            new_k.append(k)
            new_v.append(v)
        if state is None:
            return s, None
        return s, State(state.s, torch.stack(new_k), torch.stack(new_v), (state.count + T).clamp(max=c.window))


def window_mask(count: torch.Tensor, T: int, W: int) -> torch.Tensor:
    """(B, 1, T, W + T) bool: token t of a chunk may look at slots t+1 .. t+W of the cached W and the new T, if filled."""
    slot, t = torch.arange(W + T, device=count.device), torch.arange(T, device=count.device)[:, None]
    band = (slot > t) & (slot <= t + W)                                                      # (T, W + T)
    return (band & (slot >= (W - count)[:, None, None])).unsqueeze(1)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Causal (mask None) or masked attention: q (B, A, T, K), k and v (B, C, S, K), A / C query heads a key-value head."""
    (B, A, T, K), C = q.shape, k.size(1)
    if mask is not None or q.is_cuda or T > 512 or not torch.compiler.is_compiling():
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=A != C)
    # short chunks on a CPU, compiled: plain products beat the fused kernel's backward (LOG.md)
    scores = (q.reshape(B, C, A // C * T, K) @ k.transpose(2, 3)).view(B, C, A // C, T, T)
    future = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1)
    wide = torch.promote_types(q.dtype, torch.float32)
    p = F.softmax((scores.to(wide) / math.sqrt(K)).masked_fill(future, -math.inf), -1).to(q.dtype)
    return (p.view(B, C, A // C * T, T) @ v).view(B, A, T, K)


def experts(s: torch.Tensor, weights: tuple[torch.Tensor, ...], cos: torch.Tensor, sin: torch.Tensor, mask: torch.Tensor | None,
            cache: tuple[torch.Tensor, torch.Tensor] | None, H: int, own_residual: bool,
            scale: float | None) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """E pre-norm Transformer blocks on one stream s (B, T, D): attention and FFN of every expert, batched. cache: the level's
    keys and values (B, E*G, W, K), or None. Returns the experts' outputs, with s added (own_residual) or not, either summed
    and scaled (B, T, D) or, with scale None, each (E, B, T, D); then the next cache."""
    wq, wk, wv, wo, up, down = weights
    (B, T, D), (E, HK, _), dtype = s.shape, wq.shape, compute_dtype(s)
    K, G = HK // H, wk.size(1) * H // HK
    w = torch.cat([m.reshape(-1, D) for m in (wq, wk, wv)])    # one product for all experts
    qkv = F.linear(norm(s).to(dtype), w.to(dtype)).view(B, T, E * (H + 2 * G), K)
    q, k, v = (x.transpose(1, 2) for x in qkv.split([E * H, E * G, E * G], 2))               # (B, E*H or E*G, T, K)
    q, k = norm(q), norm(k)
    new_k = new_v = None
    if cache is not None:
        k, v = torch.cat([cache[0].to(k.dtype), k], 2), torch.cat([cache[1].to(v.dtype), v], 2)
        new_k, new_v = k[:, :, T:], v[:, :, T:]                # the last W
    q, k = apply_rope(q, cos[-T:], sin[-T:]).to(dtype), apply_rope(k, cos, sin).to(dtype)
    y = attention(q, k, v.to(dtype), mask)                     # (B, E*H, T, K)
    if E == 1:                                                 # plain products: a batch of one costs copies
        y = F.linear(y.transpose(1, 2).reshape(B, T, HK), wo[0].to(dtype)) + s
        act = F.relu(F.linear(norm(y).to(dtype), up[0].to(dtype))).square()
        y = (y + F.linear(act, down[0].to(dtype))).unsqueeze(0)
    else:
        y = y.view(B, E, H, T, K).permute(1, 0, 3, 2, 4).reshape(E, B * T, HK)
        y = torch.bmm(y, wo.to(dtype).transpose(1, 2)).view(E, B, T, D) + s
        act = F.relu(torch.bmm(norm(y).to(dtype).view(E, B * T, D), up.to(dtype).transpose(1, 2))).square()
        y = y + torch.bmm(act, down.to(dtype).transpose(1, 2)).view(E, B, T, D)              # (E, B, T, D)
    if not own_residual:
        y = y - s
    return y if scale is None else y.sum(0) * scale, new_k, new_v


def num_weights(config: ModelConfig) -> tuple[int, int]:
    """-> weights of the levels' matrices (Muon's), and of embedding and head (AdamW's), without building the model."""
    D, HK, GK = config.n_embd, config.n_head * config.head_dim, config.n_kv_head * config.head_dim
    return config.n_layer * config.n_expert * (2 * D * HK + 2 * D * GK + 8 * D * D), 2 * config.vocab_size * D


def memory(config: ModelConfig, recurrent: bool, batch: tuple[int, int], dtype: torch.dtype, kind: str, whole: bool) -> dict[str, float]:
    """Bytes that a training run needs on one device, by what they are for; their sum is the most it holds at a time.

    batch: rows of a micro-batch and of all of a rank's micro-batches; dtype: of products; kind: 'cpu' or 'cuda'; whole: a micro-batch's
    forward and backward are one CUDA graph, whose memory validation cannot use. Tensors are counted; what is fresh for a moment is
    rounded up so that the peaks in results/modelled/memory.md are met or passed by a few percent. Not for path 'plain', which holds more."""
    c, (rows, streams), size = config, batch, dtype.itemsize
    L, E, D, W, T = c.n_layer, c.n_expert, c.n_embd, c.window, c.block_size
    matrices, table = num_weights(c)
    logits = rows_per_slice(rows * T, c.vocab_size, kind) * c.vocab_size
    need = {'weights': 4 * (matrices + table), 'gradients': 4 * (matrices + table), 'optimizer': 4 * matrices + 8 * table,
            'fresh': 8 * matrices + 6 * table + 8 * logits,    # copies in dtype, gradients of one micro-batch
            'libraries': 1e9 if kind == 'cuda' else 5e8}       # CUDA's own and NCCL's: assumed; Python's and torch's
    own = c.n_kv_head if recurrent and c.share_kv else E * c.n_kv_head
    cache = 2 * L * own * W * c.head_dim * size                # a row's keys and values
    n, t = min(T, BLOCK), min(T, 128)                          # tokens of a block; of a validation's chunk (train_lm.evaluate_run)
    if recurrent:
        need['state'] = cache * (streams + (rows if rows < streams else 0))
        # of a chunk, of a block with its gradients, the new ones and a rotation; between blocks also the chunk's gradients
        need['chunk'] = rows * cache * ((W + T) / W + 3.5 * (W + n) / W + 4.6 + (2 * (W + T) / W if T > n else 0))
        token = L * (size * (8 * E + 1) * D + 8 * D)           # what the backward reads, and once more what it leaves for weights
        need['chunk'] += rows * ((T + n) * token + 16 * L * E * c.n_head * (W + n) * size + 40 * T * D)
        validation = rows * cache * ((W + t) / W + 1.5 * (W + n) / W + 6)
    else:
        need['chunk'] = rows * T * D * (L * (15 * E * size + 8) + 40)
        validation = rows * (2 * cache + E * t * (76 * D + 13 * c.n_head * (W + t)))
    validation += 16 * logits
    if not whole:                                              # it runs in the training's memory, but for its buffers
        validation = max(validation / 2, validation - need['chunk']) if kind == 'cuda' else max(0, validation - need['chunk'])
    return {**need, 'validation': validation}


def build_model(config: ModelConfig, recurrent: bool) -> LanguageModel:
    return RecurrentGPT(config) if recurrent else GPT(config)


def config_dict(config: ModelConfig) -> dict:
    """The config as plain types, for a checkpoint; ModelConfig(**d) restores it."""
    return asdict(config)

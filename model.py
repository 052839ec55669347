"""The language models: equations of a layer, weights, state, head and loss.

`RecurrentGPT` carries the last layer's output into the first layer at the next token; `GPT` carries
only its attention window. Both have L layers of E parallel experts of width D ("Temporal Recurrence
Favors Fewer Layers", Section 3). unroll.py runs the layers over a chunk token by token in
RecurrentGPT; GPT runs them over whole sequences.

A layer turns the state s into the next s. It also reads z, the token's normalized embedding.
Experts i = 1..E:

    u             = a s + b z                                   non-recurrent: u = s
    q_i, k_i, v_i = projections of RMSNorm(u)
    k, v          = sum(k_i) / sqrt(E), sum(v_i) / sqrt(E)      share_kv = False: own k and v
    y_i           = u + Wo_i attend(RMSNorm(q_i), RMSNorm(k), v)    with RoPE, over the cache
    h_i           = y_i + Down_i relu(Up_i RMSNorm(y_i))^2
    s             = A(RMSNorm(h_1), ..., RMSNorm(h_E))          non-recurrent: A(h_1, ..., h_E)

A is sum / sqrt(E) by default; `aggregate` has the other aggregations, `combine_experts` the
residuals. With the aggregation 'mean', shared k and v are divided by E too. The first layer of the
recurrent model starts from the last layer's s at the token before (`step`), that of the
non-recurrent model from s = z. Experts share keys and values in the recurrent model, unless
share_kv = False, but not in the other.

Two choices that the paper leaves open (paper/readings.md lists all of them): every expert of a
layer reads the same u, and keys are normalized (`split_heads`) after they are summed over experts
(`LayerParams.merged_qkv`). The scale of the keys then does not depend on E, and the E key-value
matrices can be summed before the product without changing the result.

Training in every mode, validation and decoding call `run_layer`. They differ in the class of the
linears (ops.Linear or unroll.DeferredLinear), in the cache, in whether `compiling.fused` compiles,
and in the Triton overrides of `attend`, `experts` and `slice_loss` (kernels.py). Autograd
differentiates these equations, except where a backward is written by hand: attention over an
unroll.ChunkCache, RMSNorm on a CPU, DeferredLinear, HeadLoss and the Triton overrides.

A cache of keys and values is an unroll.ChunkCache (training and validation of the recurrent model),
a `SequenceCache` (GPT) or a decode.RingCache (decoding). Each has `heads`
(ops.Heads), `angles()`, the cos and sin of the rows' positions, and `attend(q, k, unrotated, v)`,
which stores keys and values and returns the attended values.

To add a setting, add a field to ModelConfig and a line of the same name to train_lm.py. A list with
one value per layer may be a setting, too.

Shapes: B streams, T tokens per chunk, N rows (B streams, or B * T tokens in GPT), V vocabulary, D
width, E experts, L layers, H query heads and G key-value heads per expert, C key-value heads in the
cache (G where experts share it, else E * G), M query heads per cache head, K head size, W attention
window, r width of the router. Matrix products have the dtype `dtype`; s, z and sums over experts
stay in the wider dtype of the state.
"""

import math
from dataclasses import asdict, dataclass
from typing import NamedTuple

from support.script import UserError

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel

from ops import (
    Heads,
    Linear,
    gate_weights,
    matmul_dtype,
    matmul_into,
    norm,
    rope_table,
    rotate,
    window_mask,
)
from support import ranks
from support.compiling import fused, has_override, use_overrides
from support.export import PublishedModel
from support.muon import is_matrix
from support.values import check_fields
from unroll import DeferredLinear, recomputes, release, run_chunk


class LayerWeights(NamedTuple):
    """Weights of one layer. A matrix W is an ops.Linear: calling it on x returns x W^T, for each
    expert separately if W is a stack of E matrices. Every other weight is a tensor. To add a
    weight, or a setting that layers do not share, add a field here and fill it in
    LayerParams.bind. Muon trains parameters of layers whose last two sides both exceed 1, as
    matrices or stacks of them: store a vector of each expert as (E, 1, D). AdamW trains those
    outside the layers, as scalars, except embedding and head (LanguageModel.param_groups). What
    layers change in a buffer in training is lost in long chunks, which run on copies."""

    wqkv: Linear  # ((C M + 2 C) K, D): queries, keys and values of all heads
    wo: Linear  # (E, D, H K)
    up: Linear  # (E, 4 D, D)
    down: Linear  # (E, D, 4 D)
    window: int  # W, the entries that a token sees, its own included
    a: Tensor | None = None  # (N, 1), recurrent only, in u = a s + b z
    b: Tensor | None = None  # (N, 1), recurrent only
    router_q: Linear | None = None  # (r, 2 D), routed aggregations only
    router_q_bias: Tensor | None = None  # (r,)
    router_keys: Linear | None = None  # (E, r)
    recurrent: bool = False  # whether the layer mixes s and z

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of matrix products."""
        return self.wqkv.w.dtype


# Each aggregation and the exponent of E in the scale of shared keys and values, which are
# E ** -exponent times their sum over experts.
AGGREGATIONS = {'sqrt_sum': 0.5, 'mean': 1.0, 'softmax_mean': 0.5, 'softmax_l2': 0.5}
RESIDUALS = ('expert', 'shared')  # of the non-recurrent model (see `combine_experts`)


# ---- fused functions: one kernel each way when compiled ----------------------------------------


@fused
def mix_state_and_token(
    s: Tensor, z: Tensor, a: Tensor, b: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the experts' common input u = a s + b z (N, D), and RMSNorm(u) in `dtype`."""
    u = a * s + b * z
    return u, norm(u).to(dtype)


@fused
def norm_to(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return RMSNorm(x) in `dtype`."""
    return norm(x).to(dtype)


@fused
def split_heads(
    qkv: Tensor, cos: Tensor, sin: Tensor, C: int, M: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Split rows (N, (C M + 2 C) K) into heads, normalize queries and keys, and rotate them.

    cos, sin: the angles, (K,), or (N, 1, K) if rows differ. Returns queries (N, C M, K), rotated
    and divided by sqrt(K), the scale of the softmax; keys (N, C, K), rotated; the same keys before
    rotation, detached, which a cache carries to another position; values (N, C, K)."""
    K = cos.size(-1)
    qk, v = qkv.unflatten(-1, (-1, K)).split([C * M + C, C], -2)
    q, k = norm(qk.to(cos.dtype)).split([C * M, C], -2)
    k = k.to(qkv.dtype)
    q = rotate(q, cos, sin) / math.sqrt(K)
    return q.to(qkv.dtype), rotate(k, cos, sin).to(qkv.dtype), k.detach(), v


@fused
def add_norm(u: Tensor, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return y = u + x (E, N, D), attention's residual sum, and RMSNorm(y) in `dtype`."""
    y = u + x
    return y, norm(y).to(dtype)


@fused
def activation(x: Tensor) -> Tensor:
    """Apply squared ReLU, the FFN's nonlinearity."""
    return F.relu(x).square()


@fused
def combine_experts(
    y: Tensor, x: Tensor, u: Tensor, gates: Tensor | None, aggregation: str, residual: str
) -> Tensor:
    """Aggregate the outputs h_i = y_i + x_i of E experts, (E, N, D), and return (N, D).

    residual: 'norm', the recurrent model's rule, returns A(norm(h_1), ..., norm(h_E)). 'expert'
    returns A(h_1, ..., h_E), in which every expert has added u; 'shared' adds u once and returns
    u + A(h_1 - u, ..., h_E - u). Raises ValueError for another name."""
    h = y + x
    if residual == 'norm':
        return aggregate(norm(h), gates, aggregation)
    if residual == 'expert':
        return aggregate(h, gates, aggregation)
    if residual == 'shared':
        return u + aggregate(h - u, gates, aggregation)
    raise ValueError(f'residual = {residual!r}: unknown')


def aggregate(h: Tensor, gates: Tensor | None, aggregation: str) -> Tensor:
    """Return A(h_1, ..., h_E), (..., D), for h (E, ..., D) and the router's gates a (..., E).

    sqrt_sum is sum(h_i) / sqrt(E); mean is sum(h_i) / E; softmax_mean is sum(a_i h_i) / sum(a_i);
    softmax_l2 is sum(a_i h_i) / sqrt(sum(a_i^2)). If all gates are equal, softmax_mean is mean and
    softmax_l2 is sqrt_sum. Raises ValueError for another name."""
    if aggregation == 'sqrt_sum':
        return h.sum(0) / math.sqrt(h.size(0))
    if aggregation == 'mean':
        return h.mean(0)
    weights = gate_weights(gates, aggregation)
    return (weights.movedim(-1, 0).unsqueeze(-1) * h).sum(0)


@fused
def router_input(z: Tensor, s: Tensor, dtype: torch.dtype) -> Tensor:
    """Return [z; s] (N, 2 D) in `dtype`."""
    return torch.cat([z, s], -1).to(dtype)


@fused
def add_bias(x: Tensor, bias: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x + bias in `dtype`."""
    return (x + bias).to(dtype)


@fused
def softmax_gates(scores: Tensor, config: object, dtype: torch.dtype) -> Tensor:
    """Return the softmax over experts of scores (N, E) / sqrt(r), in `dtype`."""
    return F.softmax(scores.to(dtype) / math.sqrt(config.router_dim), -1)


# ---- one layer ---------------------------------------------------------------------------------


def route(w: LayerWeights, s: Tensor, z: Tensor, config: object) -> Tensor:
    """Return the router's gates (N, E): the softmax over experts i of q . k_i / sqrt(r), where
    q = Wq [z; s] + bq, k_i = Wk e_i, and e_i is a learned embedding of expert i. A bias of the keys
    would change all scores by the same number, and so nothing.

    The keys k_i do not depend on the tokens, so LayerParams.bind computes them."""
    q = w.router_q(router_input(z, s, w.dtype))  # (N, r)
    q = add_bias(q, w.router_q_bias, w.dtype)
    return softmax_gates(w.router_keys(q), config, s.dtype)


@has_override('attention')
def attend(qkv: Tensor, cache: object) -> Tensor:
    """Store the keys and values of the rows qkv (N, (C M + 2 C) K) in the cache, attend from their
    queries, and return the attended values (E, N, H K)."""
    q, k, unrotated, v = split_heads(qkv, *cache.angles(), cache.heads.C, cache.heads.M)
    return cache.attend(q, k, unrotated, v)


@has_override('experts')
def experts(
    w: LayerWeights, u: Tensor, attended: Tensor, gates: Tensor | None, config: object
) -> Tensor:
    """Run output projection, FFN and aggregation: from u (N, D) and attended (E, N, H K), return
    the layer's output (N, D)."""
    y, x = add_norm(u, w.wo(attended), w.dtype)  # (E, N, D)
    x = w.down(activation(w.up(x)))
    residual = 'norm' if w.recurrent else config.residual
    return combine_experts(y, x, u, gates, config.aggregation, residual)


def run_layer(w: LayerWeights, s: Tensor, z: Tensor, cache: object, config: object) -> Tensor:
    """Run one layer on the state s and the embedding z, (N, D) each, and return the next s (N, D).
    cache: this layer's keys and values; config: a ModelConfig."""
    gates = None if w.router_q is None else route(w, s, z, config)
    if w.recurrent:
        u, x = mix_state_and_token(s, z, w.a, w.b, w.dtype)
    else:
        u, x = s, norm_to(s, w.dtype)
    attended = attend(w.wqkv(x), cache)  # (E, N, H K)
    return experts(w, u, attended, gates, config)


def step(weights: list[LayerWeights], s: Tensor, z: Tensor, caches: list, config: object) -> Tensor:
    """Run all layers of the recurrent model on one token per stream, from the last layer's output s
    at the token before, and return the last layer's output at this token; s and z are (B, D)."""
    for w, cache in zip(weights, caches, strict=True):
        s = run_layer(w, s, z, cache, config)
    return s


@fused
def head_input(s: Tensor, config: object) -> Tensor:
    """Return the head's input (..., D) from the last layer's output s. config: unused; for settings
    of an edit."""
    return norm(s)


# ---- head and loss -------------------------------------------------------------------------------

# No target is ignored, not even torch's default of -100: means are over all tokens.
IGNORED = torch.iinfo(torch.int64).min
SOFTCAP = 15.0  # bound of the logits, see `softcap`
# Logits in memory at a time: 64 MiB in fp32 on a CPU (and on Apple's GPUs), 512 MiB in bf16 on a
# GPU.
LOGITS_PER_SLICE = {'cpu': 2**24, 'cuda': 2**28}


class Loss(NamedTuple):
    """Mean losses per token, in nats."""

    objective: Tensor  # minimized by training
    cross_entropy: Tensor  # reported


def softcap(x: Tensor) -> Tensor:
    """Return SOFTCAP * tanh(x / SOFTCAP), which lies between -SOFTCAP and SOFTCAP."""
    return SOFTCAP * torch.tanh(x / SOFTCAP)


def logits_of(x: Tensor, head: Tensor) -> Tensor:
    """Return the logits (..., V) of the head's input x (..., D), in the dtype of x. head (V, D): in
    the dtype of products."""
    return softcap(F.linear(x.to(head.dtype), head).to(x.dtype))


@fused
def losses(logits: Tensor, targets: Tensor, config: object) -> tuple[Tensor, Tensor]:
    """Return the training objective and the cross-entropy, summed over rows, in nats. logits (N, V)
    are those before the soft-cap (`scores`, after it, are what LanguageModel returns as logits);
    targets (N,); config: the model's, for settings of the objective."""
    scores = softcap(logits.to(torch.promote_types(logits.dtype, torch.float32)))
    cross_entropy = F.cross_entropy(scores, targets, ignore_index=IGNORED, reduction='sum')
    # Add terms that only training sees, such as a z-loss of the scores, here, summed over rows: the
    # caller divides by their number.
    objective = cross_entropy
    return objective, cross_entropy


@has_override('loss')
def slice_loss(
    logits: Tensor, targets: Tensor, scale: float, config: object
) -> tuple[Tensor, Tensor, Tensor]:
    """Return objective and cross-entropy as `losses`, and `scale` times the gradient of the
    objective with respect to the logits, in their dtype. It may overwrite the logits."""
    with torch.enable_grad():
        logits = logits.detach().requires_grad_()
        objective, cross_entropy = losses(logits, targets, config)
        (grad,) = torch.autograd.grad(objective, logits, torch.full_like(objective, scale))
    return objective.detach(), cross_entropy.detach(), grad


def rows_per_slice(N: int, V: int, device: str) -> int:
    """Return the number of rows per slice of N rows; device: 'cpu', 'cuda' or 'mps'."""
    min_slices = math.ceil(N * V / LOGITS_PER_SLICE.get(device, LOGITS_PER_SLICE['cpu']))
    # prefer slices of equal size: a shorter last one would be compiled separately
    for slices in range(min_slices, 2 * min_slices):
        if N % slices == 0:
            return N // slices
    return math.ceil(N / min_slices)


class HeadLoss(torch.autograd.Function):
    """Compute head and mean losses. If gradients are wanted, the forward computes them too, while
    it has the logits; if not, both losses are the cross-entropy."""

    @staticmethod
    def forward(ctx, x, weight, targets, dtype, config, wants_grads):
        N = len(x)
        rows = rows_per_slice(N, len(weight), x.device.type)
        w = weight.to(dtype)
        total = torch.zeros(2, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
        if wants_grads:
            dx, dw = torch.empty_like(x), torch.zeros_like(weight)
            ctx.save_for_backward(dx, dw)
        for i in range(0, N, rows):
            x_i, targets_i = x[i : i + rows].to(dtype), targets[i : i + rows]
            logits = x_i @ w.t()
            if not wants_grads:
                total += losses(logits, targets_i, config)[1]
                continue
            objective, cross_entropy, dlogits = slice_loss(logits, targets_i, 1 / N, config)
            total += torch.stack([objective, cross_entropy])
            dx[i : i + rows] = dlogits @ w
            matmul_into(dlogits.t(), x_i, dw.dtype, total=dw)
        objective, cross_entropy = (total / N).unbind()
        ctx.mark_non_differentiable(cross_entropy)
        return objective, cross_entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, g, _):
        dx, dw = ctx.saved_tensors
        return g * dx, g * dw, None, None, None, None


def head_loss(x: Tensor, weight: Tensor, targets: Tensor, config: object) -> Loss:
    """Return the mean losses of the logits x @ weight^T. x (N, D), weight (V, D), targets (N,)
    int64. Where no gradient is wanted, both losses are the cross-entropy."""
    wants_grads = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    dtype = matmul_dtype(x)
    with torch.autocast(x.device.type, enabled=False):
        return Loss(*HeadLoss.apply(x, weight, targets, dtype, config, wants_grads))


def check_targets(idx: Tensor, targets: Tensor | None) -> None:
    """Raise ValueError for targets of another shape than the tokens idx (B, T)."""
    if targets is not None and targets.shape != idx.shape:
        shapes = f'{tuple(targets.shape)}, tokens of shape {tuple(idx.shape)}'
        raise ValueError(f'targets of shape {shapes}: expected a target for each token')


# ---- sizes and state -----------------------------------------------------------------------------

# Matrices that FLOPs leave out; every other one counts as a product of each token. Add the name of
# one that is only looked up, like an embedding, or only used in training.
NOT_IN_CORE = ('embedding', 'head', 'router_k', 'expert_embedding')
CPU_BF16_IS_FAST = ranks.bf16_is_fast('cpu')  # a constant, because compiled functions read it
MODEL_RANGES = {  # of the fields of ModelConfig, and so of settings of train_lm.py
    **dict.fromkeys(('vocab_size', 'n_layer', 'n_expert', 'n_embd'), (1, math.inf)),
    **dict.fromkeys(('window', 'block_size', 'router_dim'), (1, math.inf)),
    'aggregation': list(AGGREGATIONS),
    'residual': list(RESIDUALS),
    'init_b': ['one', 'sqrt_experts'],
    'mode': ['fast', 'plain'],
}


@dataclass
class ModelConfig:
    """Sizes and choices of a model. Raises UserError, naming the field, if they do not fit
    together. train_lm.py takes vocab_size from the tokenizer, and each other field from its
    setting of the same name."""

    vocab_size: int = 50304  # V: GPT-2's 50,257 padded to a multiple of 128; 256 for bytes
    n_layer: int = 2  # L
    n_expert: int = 8  # E, experts per layer
    n_embd: int = 768  # D
    n_head: int = 0  # H; 0 = D/96 if D % 192 == 0, else D/64 if D % 128 == 0
    n_kv_head: int = 0  # G; 0 = H/2 (H when H is odd)
    window: int = 128  # W, the current token included
    block_size: int = 64  # T, tokens per training chunk
    aggregation: str = 'sqrt_sum'  # one of AGGREGATIONS
    share_kv: bool = True  # recurrent: one cache per layer; False = one per expert
    residual: str = 'expert'  # GPT: one per expert (the paper's rule) or 'shared'; combine_experts
    router_dim: int = 64  # r, width of the router's queries and keys (routed aggregations)
    init_b: str = 'one'  # recurrent, initial b in u = a s + b z: 'one' or 'sqrt_experts'
    mode: str = 'fast'  # 'plain': without DeferredLinear, one weight gradient per token

    def __post_init__(self) -> None:
        check_fields(self, MODEL_RANGES)
        D = self.n_embd
        if self.n_head == 0:
            if D % 192 and D % 128:
                raise UserError(
                    f'n_embd = {D} is a multiple of neither 192 (heads of 96) nor 128 (of 64): '
                    'choose such an n_embd, or set n_head'
                )
            self.n_head = D // 96 if D % 192 == 0 else D // 64
        H = self.n_head
        if D % H or (D // H) % 2:
            raise UserError(f'n_head = {H}: n_embd = {D} must split into heads of an even size')
        if self.n_kv_head == 0:
            self.n_kv_head = H // 2 if H % 2 == 0 else H
        if H % self.n_kv_head:
            raise UserError(f'n_kv_head = {self.n_kv_head}: n_head = {H} must be a multiple of it')

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    @property
    def routed(self) -> bool:
        return self.aggregation.startswith('softmax')


class State(NamedTuple):
    """The state that a model carries from chunk to chunk. Its size is constant, and it holds no
    absolute position: cached keys are normalized but not rotated, and are rotated by their slot in
    the window when they are read."""

    s: Tensor  # (B, D), the last layer's output, in the dtype of the weights; empty (B, 0) for GPT
    k: Tensor  # (L, B, C, W, K), newest entry last
    v: Tensor  # (L, B, C, W, K)
    count: Tensor  # (B,) int64, the number of filled entries

    def detach(self) -> 'State':
        """Return the state, detached from the graph of autograd."""
        return State(*(x.detach() for x in self))


# ---- weights -----------------------------------------------------------------------------------


def uniform(*shape: int) -> nn.Parameter:
    """Return a weight (..., out, in) from a uniform distribution of standard deviation 0.5 /
    sqrt(in). Muon's first updates then change every matrix by a similar fraction."""
    bound = 0.5 * math.sqrt(3 / shape[-1])
    return nn.Parameter(torch.empty(shape).uniform_(-bound, bound))


class LayerParams(nn.Module):
    """Weights of one layer's E experts, stacked, each matrix (out, in), without biases. wo and down
    start at zero, so that every expert starts as the identity."""

    def __init__(self, config: ModelConfig, heads: Heads, recurrent: bool):
        super().__init__()
        E, D, H, G = config.n_expert, config.n_embd, config.n_head, config.n_kv_head
        K, r = config.head_dim, config.router_dim
        self.config = config
        self.heads = heads
        self.window = config.window
        self.recurrent = recurrent
        self.wq = uniform(E, H * K, D)
        self.wk = uniform(E, G * K, D)
        self.wv = uniform(E, G * K, D)
        self.wo = nn.Parameter(torch.zeros(E, D, H * K))
        self.up = uniform(E, 4 * D, D)
        self.down = nn.Parameter(torch.zeros(E, D, 4 * D))
        if recurrent:  # u = a s + b z
            self.a = nn.Parameter(torch.ones(()))
            self.b = nn.Parameter(torch.tensor(1.0 if config.init_b == 'one' else math.sqrt(E)))
        if config.routed:
            self.router_q = uniform(r, 2 * D)
            self.router_k = uniform(r, r)
            self.router_q_bias = nn.Parameter(torch.zeros(r))
            self.expert_embedding = nn.Parameter(torch.randn(E, r))

    def bind(self, N: int, dtype: torch.dtype, linear: type = Linear) -> LayerWeights:
        """Return the weights as run_layer takes them for N rows; gradients flow back to the
        parameters. dtype: of matrix products; linear: ops.Linear or unroll.DeferredLinear."""
        w = LayerWeights(
            wqkv=linear(self.merged_qkv(), dtype),
            wo=linear(self.wo, dtype),
            up=linear(self.up, dtype),
            down=linear(self.down, dtype),
            window=self.window,
            recurrent=self.recurrent,
        )
        if not 1 <= w.window <= self.config.window:
            limit = f'at least 1, and at most window = {self.config.window}, the size of the cache'
            raise UserError(f'window = {w.window} of a layer: must be {limit}')
        if self.recurrent:
            # one copy per row: each token's gradient is then a sum within rows, and the sum over
            # rows is taken once per chunk
            w = w._replace(a=self.a.expand(N, 1), b=self.b.expand(N, 1))
        if self.config.routed:
            keys = F.linear(self.expert_embedding, self.router_k)  # (E, r)
            w = w._replace(
                router_q=linear(self.router_q, dtype),
                router_q_bias=self.router_q_bias,
                router_keys=linear(keys, dtype),
            )
        return w

    def merged_qkv(self) -> Tensor:
        """Return the query, key and value matrices of all experts as one, ((C M + 2 C) K, D).

        Where experts share the cache, the E key-value matrices are summed, which is exact because
        all experts read the same input, and the query rows are ordered (G, E, R), so that the
        queries of one key-value head are neighbors. The sums are scaled as in the paper; the norm
        of the keys then undoes their scale, values keep it."""
        E, G, R, K, shared = self.heads
        if not shared:
            return torch.cat([x.flatten(0, 1) for x in (self.wq, self.wk, self.wv)])
        wq = self.wq.view(E, G, R * K, -1)  # (E, G, R K, D)
        wq = wq.transpose(0, 1).flatten(0, 2)  # (G E R K, D)
        scale = E ** -AGGREGATIONS[self.config.aggregation]
        return torch.cat([wq, self.wk.sum(0) * scale, self.wv.sum(0) * scale])


# ---- the models --------------------------------------------------------------------------------


class LanguageModel(nn.Module, PublishedModel, pipeline_tag='text-generation'):
    """The common part of both models: embedding, head, loss, parameter and FLOP counts, saving and
    loading. The head starts at zero, so that the first loss is ln V. Subclasses define `hidden`,
    which runs the layers."""

    recurrent: bool
    stream_dims = (0, 1, 1, 0)  # the dimension of each part of State that counts streams
    cuda_graphs = False  # on a GPU: run the segments of a long chunk as CUDA graphs
    overrides = frozenset()  # Triton overrides in use (overrides.py)

    def __init__(self, config: ModelConfig):
        """Raises UserError for a setting of the other kind."""
        super().__init__()
        for name in ['residual'] if self.recurrent else ['share_kv', 'init_b']:
            value = getattr(config, name)
            if value != getattr(ModelConfig, name):  # the default
                raise UserError(f'{name} = {value!r} is for recurrent = {not self.recurrent}')
        self.config = config
        self.heads = Heads(  # in every layer
            E=config.n_expert,
            G=config.n_kv_head,
            R=config.n_head // config.n_kv_head,
            K=config.head_dim,
            shared=self.recurrent and config.share_kv,
        )
        # `embed` normalizes its scale away
        self.embedding = nn.Parameter(torch.randn(config.vocab_size, config.n_embd))
        self.layers = nn.ModuleList(
            LayerParams(config, self.heads, self.recurrent) for _ in range(config.n_layer)
        )
        self.head = nn.Parameter(torch.zeros(config.vocab_size, config.n_embd))
        if self.tied:  # the head cannot be zero: it starts at GPT-2's 0.02
            self.head.data.mul_(0.02)

    @property
    def tied(self) -> bool:
        """Return whether head and embedding are one parameter, as after your edit `self.head =
        self.embedding`."""
        return self.head is self.embedding

    @property
    def n_caches(self) -> int:
        """Return the number of caches: one for each entry of bind_weights."""
        return len(self.layers)

    def bind_weights(self, N: int, dtype: torch.dtype, linear: type = Linear) -> list[LayerWeights]:
        """Return the weights of the layers for N rows, in the order in which they run (see
        LayerParams.bind). A layer that runs several times stands here several times."""
        return [module.bind(N, dtype, linear) for module in self.layers]

    def init_state(self, B: int) -> State:
        """Return the state at the start of B streams: s is zero, and caches are empty. Attention
        masks their zeros."""
        c = self.config
        heads = self.heads
        device = self.embedding.device
        shape = (2, self.n_caches, B, heads.C, c.window, heads.K)
        k, v = torch.zeros(shape, dtype=matmul_dtype(self.embedding), device=device)
        width = c.n_embd if self.recurrent else 0  # all modes take the width from here
        s = torch.zeros(B, width, dtype=self.embedding.dtype, device=device)
        return State(s, k, v, torch.zeros(B, dtype=torch.int64, device=device))

    def fits_one_graph(self, state: State, T: int) -> bool:
        """Return whether a chunk of T tokens from this state, () if none is carried, is one CUDA
        graph. If not, `cuda_graphs` captures its parts."""
        return True

    def embed(self, idx: Tensor) -> Tensor:
        """Return z (..., D), the normalized embedding of tokens idx (...)."""
        return norm_to(F.embedding(idx, self.embedding), self.embedding.dtype)

    def core(self, idx: Tensor, state: State | None) -> tuple[Tensor, State | None]:
        """Run embedding and layers on tokens (B, T); return the head's input (B, T, D), and the
        state. Raises ValueError if a gradient is to flow into the state."""
        if state is not None and torch.is_grad_enabled() and any(x.requires_grad for x in state):
            reason = 'the state requires a gradient, but none flows into the chunk before'
            raise ValueError(f'{reason}: pass state.detach(), or both chunks as one')
        with use_overrides(self.overrides):
            s, state = self.hidden(self.embed(idx), state)
        return head_input(s, self.config), state

    def forward(
        self, idx: Tensor, targets: Tensor | None = None, state: State | None = None
    ) -> tuple[Tensor | Loss, State | None]:
        """Run a chunk. idx, targets: (B, T) int64.

        Returns logits (B, T, V) in the dtype of the weights, or with targets the Loss in nats per
        token; and the state after the chunk. No gradient flows from it into the chunk (truncated
        back-propagation). Without a state, RecurrentGPT starts from init_state; GPT attends
        causally over the whole chunk, as in training, and returns None as the state. Raises
        ValueError for targets of another shape than idx."""
        check_targets(idx, targets)
        x, state = self.core(idx, state)  # (B, T, D)
        if targets is not None:
            with use_overrides(self.overrides):
                loss = head_loss(x.flatten(0, 1), self.head, targets.flatten(), self.config)
            return loss, state
        return logits_of(x, self.head.to(matmul_dtype(x))), state

    def num_params(self) -> dict[str, int]:
        """Return the number of parameters: 'total', 'embedding', 'head' (0 if it is tied to the
        embedding) and 'core' (the layers)."""
        total = sum(p.numel() for p in self.parameters())
        embedding, head = self.embedding.numel(), self.head.numel()
        if self.tied:
            head = 0
        core = total - embedding - head
        return {'total': total, 'embedding': embedding, 'head': head, 'core': core}

    def flops_per_token(self) -> dict[str, float]:
        """Return the forward FLOPs per token of 'core' and 'head'; training costs three times that.

        They are two per weight of every matrix, plus attention at the mean context: W when
        recurrent (a stream's steady state), (T + 1) / 2 for GPT's sequences. As in the paper's
        budgets, all E key-value projections count, although shared ones are summed first. The
        matrix router_k does not count, because the router's keys are computed once per chunk. A
        layer that runs several times counts as often."""
        c = self.config
        runs = self.n_caches / len(self.layers)  # of each layer
        context = (c.block_size + 1) / 2
        if self.recurrent:
            context = sum(module.window for module in self.layers) / len(self.layers)
        attention = 4 * context * c.n_head * c.head_dim * self.n_caches * c.n_expert
        router = 0  # scores of its keys, one key per expert and layer
        if c.routed:
            router = 2 * c.router_dim * c.n_expert * self.n_caches
        matrices = sum(
            p.numel() * (runs if name.startswith('layers.') else 1)
            for name, p in self.named_parameters(remove_duplicate=False)  # tied layers work, too
            if is_matrix(p) and name.split('.')[-1] not in NOT_IN_CORE
        )
        core = 2 * matrices + attention + router
        return {'core': float(core), 'head': float(2 * self.head.numel())}

    def release(self) -> None:
        """Free the memory of the segments of long chunks (unroll.py)."""
        release()

    def param_groups(self) -> dict[str, list[nn.Parameter]]:
        """Return parameters by optimizer: 'matrices' for Muon; 'embedding', 'head' and 'scalars'
        for AdamW. A head that is tied to the embedding is in 'head', which learns more slowly."""
        matrices = [
            p
            for name, p in self.layers.named_parameters()
            if is_matrix(p) and not name.endswith('expert_embedding')
        ]
        known = {id(p) for p in [*matrices, self.embedding, self.head]}
        return {
            'matrices': matrices,
            'embedding': [] if self.tied else [self.embedding],
            'head': [self.head],
            'scalars': [p for p in self.parameters() if id(p) not in known],
        }

    # ---- saved models (export.PublishedModel)

    @classmethod
    def build(cls, metadata: dict) -> 'LanguageModel':
        """Return a model for the entries of a config.json. Raises KeyError, TypeError or ValueError
        if they describe no model."""
        config, recurrent = ModelConfig(**metadata['model']), metadata['recurrent']
        if not isinstance(recurrent, bool):
            raise TypeError(f'recurrent = {recurrent!r}')
        return build_model(config, recurrent)

    def entries(self) -> dict:
        """Return the entries of config.json that rebuild this model."""
        sizes = asdict(self.config)
        del sizes['mode']  # the same model runs in every mode
        tokenizer = self.metadata.get('tokenizer')
        return {'recurrent': self.recurrent, 'tokenizer': tokenizer, 'model': sizes}


class RecurrentGPT(LanguageModel):
    """The recurrent Transformer: the layers turn s[0] into s[L], and s[0] of a token is s[L] of the
    token before. Every layer also reads z = RMSNorm(embedding). A cache holds the last W entries,
    the current token's included: one entry per layer and token or, with share_kv = False, one per
    expert."""

    recurrent = True

    def hidden(self, z: Tensor, state: State | None) -> tuple[Tensor, State]:
        """Run the layers on z (B, T, D); return s[L] at every token (B, T, D), and the state."""
        state = self.init_state(z.size(0)) if state is None else state
        linear = DeferredLinear if self.config.mode == 'fast' else Linear
        dtype = matmul_dtype(z)
        with torch.autocast(z.device.type, enabled=False):  # the layers cast explicitly
            weights = self.bind_weights(len(z), dtype, linear)
            out, new = run_chunk(
                step, z.transpose(0, 1), state, weights, self.heads, self.config, self.cuda_graphs
            )
        return out.transpose(0, 1), State(*new)

    def fits_one_graph(self, state: State, T: int) -> bool:
        """Return whether a chunk is one CUDA graph: whether it is short enough not to be recomputed
        in segments (unroll.py)."""
        return not recomputes(state.k, self.heads.M, T)


# ---- the non-recurrent model -------------------------------------------------------------------


@dataclass
class SequenceCache:
    """Keys and values of one layer for whole sequences: the cache of `run_layer` in GPT. A
    token sees the last `width` entries, or without a mask all before it."""

    B: int
    T: int
    heads: Heads
    cos: Tensor  # (T, K), angles of the tokens
    sin: Tensor
    past: tuple[Tensor, Tensor] | None  # cached keys, rotated, and values (B, C, width, K)
    mask: Tensor | None  # (B, 1, T, width + T) bool; None: causal
    new: tuple = (None, None)  # after `attend`: its keys, not rotated, and values (B, C, T, K)

    def angles(self) -> tuple[Tensor, Tensor]:
        """Return cos and sin of the rows' positions, (B T, 1, K) each."""
        cos, sin = (x.repeat(self.B, 1).unsqueeze(1) for x in (self.cos, self.sin))
        return cos, sin

    def attend(self, q: Tensor, k: Tensor, unrotated: Tensor, v: Tensor) -> Tensor:
        """Attend from queries (B T, C M, K) to the cached and the new keys and values (B T, C, K),
        and return the attended values (E, B T, H K)."""
        q, k, unrotated, v = (  # (B, heads, T, K)
            x.unflatten(0, (self.B, self.T)).transpose(1, 2) for x in (q, k, unrotated, v)
        )
        self.new = (unrotated, v)
        if self.past is not None:
            k, v = (torch.cat(pair, 2) for pair in zip(self.past, (k, v), strict=True))
        y = attention(q, k, v, self.mask)  # (B, E H, T, K)
        y = y.unflatten(1, (self.heads.E, -1))  # (B, E, H, T, K)
        return y.permute(1, 0, 3, 2, 4).reshape(self.heads.E, self.B * self.T, -1)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Return the attended values (B, A, T, K) of queries q (B, A, T, K) over k and v (B, C, S, K),
    with A / C query heads per key-value head. Scores are not scaled. mask = None is causal."""
    B, A, T, K = q.shape
    C = k.size(1)
    if mask is None and T <= 512 and q.dtype == torch.bfloat16 and CPU_BF16_IS_FAST and q.is_cpu:
        # Two plain products and a softmax are then faster than the fused kernel (LOG.md).
        future = q.new_full((T, T), -math.inf).triu(1).repeat(A // C, 1)
        q, k, v = (x.reshape(B * C, -1, K) for x in (q, k, v))
        p = F.softmax(torch.baddbmm(future, q, k.mT), -1)  # (B*C, A/C*T, T)
        return (p @ v).view(B, A, T, K)
    # without cuDNN's kernel, which refuses some sizes, such as T = 32 with grouped heads
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=1.0, enable_gqa=A != C
        )


class GPT(LanguageModel):
    """The non-recurrent model: E parallel pre-norm Transformer blocks per layer. With E = 1 it is a
    standard Transformer. The residual stream stays in fp32, because the paper's rule multiplies it
    by sqrt(E) in every layer."""

    recurrent = False

    def hidden(self, z: Tensor, state: State | None) -> tuple[Tensor, State | None]:
        """Run the layers on z (B, T, D); return s[L] (B, T, D), and the state. Without a state,
        attention is causal over the chunk. With one, it sees a window of W over cached and new
        tokens, so that every split of a stream into chunks gives the same result."""
        c, dtype = self.config, matmul_dtype(z)
        B, T, _ = z.shape
        past = 0 if state is None else c.window
        cos, sin = rope_table(past + T, c.head_dim, z)
        s = z.clone()  # not z itself, or torch.compile would trace the first layer separately
        new = []
        with torch.autocast(z.device.type, enabled=False):  # the layers cast explicitly
            weights = self.bind_weights(B * T, dtype)
            masks = {  # by width of the window; None: causal
                width: None if state is None else window_mask(state.count, T, width)
                for width in {w.window for w in weights}
            }
            for l, w in enumerate(weights):
                cached = None if state is None else (state.k[l], state.v[l])
                s, *kv = run_layer_on_sequence(
                    w, s, z, cos, sin, cached, masks[w.window], self.heads, c
                )
                new.append(kv)
        if state is None:
            return s, None
        k, v = (torch.stack(x) for x in zip(*new, strict=True))  # (L, B, C, W, K)
        return s, State(state.s, k, v, (state.count + T).clamp(max=c.window)).detach()


@fused
def run_layer_on_sequence(
    w: LayerWeights,
    s: Tensor,
    z: Tensor,
    cos: Tensor,
    sin: Tensor,
    cached: tuple[Tensor, Tensor] | None,
    mask: Tensor | None,
    heads: Heads,
    config: ModelConfig,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Run one layer of GPT on whole sequences s and z, (B, T, D) each. Return the next s and the
    last W keys and values to cache, or None for both if `cached` is None.

    cos, sin: angles of the cached and the new slots; cached: keys, not rotated, and values, (B, C,
    W, K) each, of which a token sees at most the last `window`. All layers share one compiled
    function."""
    B, T, _ = s.shape
    past = None
    if cached is not None:
        width = w.window
        k, v = (x[:, :, -width:] for x in cached)
        cos, sin = cos[-width - T :], sin[-width - T :]
        past = (rotate(k, cos[:width], sin[:width]).to(w.dtype), v.to(w.dtype))
    cache = SequenceCache(B, T, heads, cos[-T:], sin[-T:], past, mask)
    s = run_layer(w, s.flatten(0, 1), z.flatten(0, 1), cache, config)  # (B T, D)
    s = s.unflatten(0, (B, T))
    if cached is None:
        return s, None, None
    k, v = (
        torch.cat([old.to(w.dtype), new], 2)[:, :, T:]
        for old, new in zip(cached, cache.new, strict=True)
    )
    return s, k, v


def refuse_other_forward(model: LanguageModel) -> None:
    """Raise ValueError for a model whose class overrides the forward elsewhere: decode.py and
    tracing.py call the functions of this file instead."""
    for name in ('forward', 'core', 'hidden'):
        file = getattr(type(model), name).__module__
        if file != __name__:
            reason = f'is overridden in {file}, which decoding and traces would not follow'
            raise ValueError(f'{type(model).__name__}.{name} {reason}: edit model.py')


def build_model(config: ModelConfig, recurrent: bool) -> LanguageModel:
    """Return RecurrentGPT or GPT. Raises UserError for a setting of the other kind."""
    return RecurrentGPT(config) if recurrent else GPT(config)

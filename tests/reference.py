"""An independent reference of the language models, in float64, token by token and expert by expert.

It reads a model's parameters and uses nothing else of model.py or layer.py. All keys and values of
a stream are kept, positions are absolute, and the window is a mask. Every mode (plain, fast,
compiled, recomputed blocks, CUDA graphs, Triton forms, the decoder) is compared with it. Below it:
small random models, and what counts as equal.
"""

import copy
import math

import torch

from model import ModelConfig, State

V = 11
EPS = 1e-6


# ---- the equations ----


class History:
    """The past of B streams: s (B, D); keys and values by (layer, owner of the cache), one (B, G,
    K) per position, keys normalized and not rotated; first (B,): the position where each starts."""

    def __init__(self, model, B):
        self.config, self.recurrent = model.config, model.recurrent
        self.s = torch.zeros(B, model.config.n_embd, dtype=torch.float64)
        self.keys, self.values, self.now = {}, {}, 0
        self.first = torch.zeros(B, dtype=torch.int64)

    def reset(self, row):
        """Start the stream of this row here."""
        self.first[row] = self.now
        self.s = self.s.index_fill(0, torch.tensor(row), 0)

    def detach(self):
        """End gradients here."""
        self.s = self.s.detach()
        for entries in (*self.keys.values(), *self.values.values()):
            entries[:] = [entry.detach() for entry in entries]

    def state(self):
        """Return the model's state: the last W entries, oldest first, zeros where there is none."""
        c, count = self.config, (self.now - self.first).clamp(max=self.config.window)
        owners = ['all'] if self.recurrent and c.share_kv else range(c.n_expert)
        empty = torch.arange(c.window) < c.window - count[:, None]  # (B, W)
        none = [torch.zeros(len(count), c.n_kv_head, c.head_dim, dtype=torch.float64)] * c.window

        def cache(kept, l):
            heads = [torch.stack((none + kept.get((l, one), []))[-c.window :], 2) for one in owners]
            return torch.cat(heads, 1).masked_fill(empty[:, None, :, None], 0)  # (B, C, W, K)

        layers = range(c.n_layer)
        k, v = (torch.stack([cache(x, l) for l in layers]) for x in (self.keys, self.values))
        return State(self.s if self.recurrent else self.s[:, :0], k, v, count)


def unit(x):
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()


def turn(x, position):
    """Apply RoPE by complex numbers: rotate pair (j, j + K/2) by position * 10000^(-2j/K)."""
    K = x.size(-1)
    frequency = 10000.0 ** (-2 * torch.arange(K // 2, dtype=torch.float64) / K)
    return torch.complex(x[..., : K // 2], x[..., K // 2 :]) * torch.exp(1j * frequency * position)


def aggregate(config, layer, h, z, s):
    """Return A(h_1..h_E), each (..., D)."""
    E = len(h)
    if config.aggregation == 'sqrt_sum':
        return sum(h) / math.sqrt(E)
    if config.aggregation == 'mean':
        return sum(h) / E
    query = torch.cat([z, s], -1) @ layer.router_q.t() + layer.router_q_bias
    keys = [layer.router_k @ e + layer.router_k_bias for e in layer.expert_embedding]
    gates = torch.exp(torch.stack([query @ k / math.sqrt(config.router_dim) for k in keys]))
    gates = gates / gates.sum(0)  # (E, ...)
    below = gates.sum(0) + EPS
    if config.aggregation == 'softmax_l2':
        below = (gates.pow(2).sum(0) + EPS).sqrt()
    return sum((gates[i] / below).unsqueeze(-1) * h[i] for i in range(E))


def attend(q, keys, values, now, oldest):
    """Attend q (B, H, K) at position `now` to keys and values, one (B, G, K) per position from 0 to
    now; oldest (B,): the first position that each stream sees."""
    B, H, K = q.shape
    begin = int(oldest.min())
    position = torch.arange(begin, now + 1)
    keys, values = torch.stack(keys[begin:]), torch.stack(values[begin:])  # (S, B, G, K)
    G = keys.size(2)
    q, keys = turn(q, now).view(B, G, H // G, K // 2), turn(keys, position[:, None, None, None])
    scores = torch.einsum('bgrk,sbgk->bgrs', q, keys.conj()).real / math.sqrt(K)
    hidden = (position < oldest[:, None])[:, None, None]
    p = torch.softmax(scores.masked_fill(hidden, -math.inf), -1)
    return torch.einsum('bgrs,sbgk->bgrk', p, values).reshape(B, H * K)


def layer_step(model, l, s, z, history, window):
    """Run layer l on one token per stream: s, z (B, D) -> the new s."""
    c, layer, now, B = model.config, model.layers[l], history.now, len(s)
    u = layer.a * s + layer.b * z if model.recurrent else s
    n = unit(u)
    keys, values = (
        [(n @ w[i].t()).view(B, c.n_kv_head, c.head_dim) for i in range(c.n_expert)]
        for w in (layer.wk, layer.wv)
    )
    owners = list(range(c.n_expert))
    if model.recurrent and c.share_kv:
        owners = ['all'] * c.n_expert
        scale = 1 / c.n_expert if c.aggregation == 'mean' else 1 / math.sqrt(c.n_expert)
        keys, values = [sum(keys) * scale], [sum(values) * scale]
    for owner, k, v in zip(owners, keys, values, strict=False):
        history.keys.setdefault((l, owner), []).append(unit(k))
        history.values.setdefault((l, owner), []).append(v)
    oldest = history.first if window is None else history.first.clamp(min=now - window + 1)
    out = []
    for i, owner in enumerate(owners):
        q = unit((n @ layer.wq[i].t()).view(B, c.n_head, c.head_dim))
        att = attend(q, history.keys[l, owner], history.values[l, owner], now, oldest)
        y = u + att @ layer.wo[i].t()
        out.append(y + torch.relu(unit(y) @ layer.up[i].t()).pow(2) @ layer.down[i].t())
    if model.recurrent:
        return aggregate(c, layer, [unit(y) for y in out], z, s)
    if c.residual == 'shared':
        return s + aggregate(c, layer, [y - s for y in out], z, s)
    return aggregate(c, layer, out, z, s)


def run(model, idx, history=None):
    """Return logits (B, T, V) of tokens (B, T), and the history after them. history = None: streams
    start; GPT then attends to the whole chunk, as in training, otherwise to the window. Gradients
    end at the chunk's start."""
    window = None if history is None and not model.recurrent else model.config.window
    history = History(model, len(idx)) if history is None else history
    history.detach()
    logits = []
    for token in idx.unbind(1):
        z = unit(model.embedding[token])
        s = history.s if model.recurrent else z
        for l in range(model.config.n_layer):
            s = layer_step(model, l, s, z, history, window)
        history.s, history.now = s, history.now + 1
        logits.append(15 * torch.tanh(unit(s) @ model.head.t() / 15))
    return torch.stack(logits, 1), history


def loss_of(logits, targets):
    """Return the mean cross-entropy in nats."""
    return -torch.log_softmax(logits, -1).gather(-1, targets[..., None]).mean()


# ---- models ----


SIZES = {'vocab_size': V, 'n_embd': 16, 'n_head': 4, 'n_kv_head': 2, 'window': 4, 'block_size': 8}
SIZES |= {'n_layer': 2, 'n_expert': 2, 'router_dim': 6}


def make(model_type, seed=0, dtype=torch.float64, **changes):
    """Return a small model whose parameters are random and not small: a and b about 1, matrices of
    standard deviation 2 / sqrt(fan_in)."""
    model = model_type(ModelConfig(**SIZES | changes)).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            p.copy_(1 + 0.2 * noise if p.dim() == 0 else noise * 2 / math.sqrt(p.size(-1)))
    return model


def exact(model):
    """Return a copy of the model in float64."""
    return copy.deepcopy(model).double()


def tokens(*shape, seed=0, vocab=V):
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(seed))


def gradients(model, value):
    grads = torch.autograd.grad(value, list(model.parameters()), materialize_grads=True)
    return {name: g for (name, _), g in zip(model.named_parameters(), grads, strict=True)}


# ---- equal ----


def assert_close(a, b, rtol=1e-9, size=None, what=''):
    """Assert that the norm of a - b is at most rtol times that of b, or times `size`, that of the
    terms of which b is a small sum. In float64 the default leaves a margin of at least 20 over the
    rounding measured for these models on two makes of processors."""
    assert a.shape == b.shape, what
    difference = (a - b).double().norm().item()
    size = b.double().norm().item() if size is None else size
    assert difference <= rtol * size, f'{what}: differs by {difference:.3g}, size {size:.3g}'


def assert_same_state(a, b, rtol=1e-9):
    for name, x, y in zip(State._fields, a, b, strict=True):
        assert_close(x.double(), y.double(), rtol, what=name)


def always_zero(name, model):
    """Return whether a gradient is zero but for rounding: softmax is shift invariant, and constant
    for one expert."""
    routing = 'router' in name or 'expert_embedding' in name
    return name.endswith('router_k_bias') or (model.config.n_expert == 1 and routing)


def assert_same_gradients(model, a, b, rtol=1e-9, zero=()):
    """Compare every parameter's gradient, relative to the largest of the model: all are sums of
    terms of about that size. zero: suffixes of names of parameters without a gradient here."""
    assert a.keys() == b.keys()
    size = max(g.double().norm().item() for g in b.values())
    for name in b:
        if not always_zero(name, model) and not name.endswith(zero):
            assert b[name].norm() > 10 * rtol * size, f'{name}: no gradient to compare'
        assert_close(a[name], b[name], rtol, size, name)

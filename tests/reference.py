"""
The language models once more, in float64, token by token and expert by expert, by plain torch
operations on a model's parameters and nothing else of model.py. All keys and values of a stream's
life are kept, positions are absolute, the window is a mask. Every path (plain, fast, compiled,
graphed, Triton, the decoder) is held to this. Below it: small random models, and what "equal" is.
"""

import copy
import math

import torch

import model as equations
from model import ModelConfig, State

V = 11
EPS = 1e-6


# ---- the equations ----


class History:
    """What B streams have seen. s (B, D); keys and values by (level, owner of the cache): one
    (B, G, K) a position, keys normalised and not rotated; first (B,): where each stream starts."""

    def __init__(self, model, B):
        self.config, self.recurrent = model.config, model.recurrent
        self.s = torch.zeros(B, model.config.n_embd, dtype=torch.float64)
        self.keys, self.values, self.now = {}, {}, 0
        self.first = torch.zeros(B, dtype=torch.int64)

    def reset(self, row):
        """This stream starts here."""
        self.first[row] = self.now
        self.s = self.s.index_fill(0, torch.tensor(row), 0)

    def detach(self):
        """Gradients end here."""
        self.s = self.s.detach()
        for entries in (*self.keys.values(), *self.values.values()):
            entries[:] = [entry.detach() for entry in entries]

    def state(self):
        """The model's state: the last W entries, oldest first, zeros where there is none."""
        c, count = self.config, (self.now - self.first).clamp(max=self.config.window)
        owners = ['all'] if self.recurrent and c.share_kv else range(c.n_expert)
        empty = torch.arange(c.window) < c.window - count[:, None]  # (B, W)
        none = [torch.zeros(len(count), c.n_kv_head, c.head_dim, dtype=torch.float64)] * c.window

        def cache(kept, l):
            heads = [torch.stack((none + kept.get((l, one), []))[-c.window :], 2) for one in owners]
            return torch.cat(heads, 1).masked_fill(empty[:, None, :, None], 0)  # (B, C, W, K)

        levels = range(c.n_layer)
        k, v = (torch.stack([cache(x, l) for l in levels]) for x in (self.keys, self.values))
        return State(self.s if self.recurrent else self.s[:, :0], k, v, count)


def unit(x):
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()


def turn(x, position):
    """RoPE by complex numbers: pair (j, j + K/2) turned by position * 10000^(-2j/K)."""
    K = x.size(-1)
    frequency = 10000.0 ** (-2 * torch.arange(K // 2, dtype=torch.float64) / K)
    return torch.complex(x[..., : K // 2], x[..., K // 2 :]) * torch.exp(1j * frequency * position)


def combine(config, level, h, z, s):
    """A(h_1..h_E), each (..., D)."""
    E = len(h)
    if config.aggregation == 'sqrt_sum':
        return sum(h) / math.sqrt(E)
    if config.aggregation == 'mean':
        return sum(h) / E
    query = torch.cat([z, s], -1) @ level.router_q.t() + level.router_q_bias
    keys = [level.router_k @ e + level.router_k_bias for e in level.expert_embedding]
    gates = torch.exp(torch.stack([query @ k / math.sqrt(config.router_dim) for k in keys]))
    gates = gates / gates.sum(0)  # (E, ...)
    below = gates.sum(0) + EPS
    if config.aggregation == 'softmax_l2':
        below = (gates.pow(2).sum(0) + EPS).sqrt()
    return sum((gates[i] / below).unsqueeze(-1) * h[i] for i in range(E))


def attend(q, keys, values, now, oldest):
    """q (B, H, K) at position now; keys and values: one (B, G, K) a position from 0 to now; oldest
    (B,): the first position each may see."""
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


def level_step(model, l, s, z, history, window):
    """Level l for one token of each stream: s, z (B, D) -> the new s."""
    c, level, now, B = model.config, model.levels[l], history.now, len(s)
    u = level.a * s + level.b * z if model.recurrent else s
    n = unit(u)
    keys, values = (
        [(n @ w[i].t()).view(B, c.n_kv_head, c.head_dim) for i in range(c.n_expert)]
        for w in (level.wk, level.wv)
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
        q = unit((n @ level.wq[i].t()).view(B, c.n_head, c.head_dim))
        att = attend(q, history.keys[l, owner], history.values[l, owner], now, oldest)
        y = u + att @ level.wo[i].t()
        out.append(y + torch.relu(unit(y) @ level.up[i].t()).pow(2) @ level.down[i].t())
    if model.recurrent:
        return combine(c, level, [unit(y) for y in out], z, s)
    if c.residual == 'shared':
        return s + combine(c, level, [y - s for y in out], z, s)
    return combine(c, level, out, z, s)


def run(model, idx, history=None):
    """Logits (B, T, V) of tokens (B, T), and the history after them. history None: a start; GPT
    then attends to the whole chunk, as in training, and to the window otherwise. Gradients end at
    the chunk's start."""
    window = None if history is None and not model.recurrent else model.config.window
    history = History(model, len(idx)) if history is None else history
    history.detach()
    logits = []
    for token in idx.unbind(1):
        z = unit(model.embedding[token])
        s = history.s if model.recurrent else z
        for l in range(model.config.n_layer):
            s = level_step(model, l, s, z, history, window)
        history.s, history.now = s, history.now + 1
        logits.append(15 * torch.tanh(unit(s) @ model.head.t() / 15))
    return torch.stack(logits, 1), history


def loss_of(logits, targets):
    """Mean cross-entropy in nats."""
    return -torch.log_softmax(logits, -1).gather(-1, targets[..., None]).mean()


# ---- models ----


SIZES = {'vocab_size': V, 'n_embd': 16, 'n_head': 4, 'n_kv_head': 2, 'window': 4, 'block_size': 8}
SIZES |= {'n_layer': 2, 'n_expert': 2, 'router_dim': 6}


def make(model_type, seed=0, dtype=torch.float64, **changes):
    """A small model with every parameter random and none of them small: a and b about 1, matrices
    about 2 / sqrt(fan_in)."""
    model = model_type(ModelConfig(**SIZES | changes)).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            p.copy_(1 + 0.2 * noise if p.dim() == 0 else noise * 2 / math.sqrt(p.size(-1)))
    return model


def exact(model):
    """The same model in float64."""
    return copy.deepcopy(model).double()


def tokens(*shape, seed=0, vocab=V):
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(seed))


def gradients(model, value):
    grads = torch.autograd.grad(value, list(model.parameters()), materialize_grads=True)
    return {name: g for (name, _), g in zip(model.named_parameters(), grads, strict=True)}


def edit_equations(monkeypatch):
    """model.py's, which are then no longer the kernels'."""
    heads, leave = equations.heads, equations.leave
    monkeypatch.setattr(equations, 'heads', lambda *x, **sizes: [2 * y for y in heads(*x, **sizes)])
    monkeypatch.setattr(equations, 'leave', lambda *args: 2 * leave(*args))


# ---- equal ----


def assert_close(a, b, rtol=1e-9, size=None, what=''):
    """The difference's norm against rtol times b's, or times size: that of the terms of which b is
    a small sum or difference. In float64 the default leaves a margin of 20 and more over what
    rounding makes of these models, on processors of two makes."""
    assert a.shape == b.shape, what
    difference = (a - b).double().norm().item()
    size = b.double().norm().item() if size is None else size
    assert difference <= rtol * size, f'{what}: differs by {difference:.3g}, size {size:.3g}'


def assert_same_state(a, b, rtol=1e-9):
    for name, x, y in zip(State._fields, a, b, strict=True):
        assert_close(x.double(), y.double(), rtol, what=name)


def always_zero(name, model):
    """Softmax is shift invariant, and constant for one expert: these are zero but for rounding."""
    routing = 'router' in name or 'expert_embedding' in name
    return name.endswith('router_k_bias') or (model.config.n_expert == 1 and routing)


def assert_same_gradients(model, a, b, rtol=1e-9, zero=()):
    """Each parameter's, relative to the largest gradient of the model: all are sums of terms of
    about its size. zero: ends of names of parameters with no gradient here."""
    assert a.keys() == b.keys()
    size = max(g.double().norm().item() for g in b.values())
    for name in b:
        if not always_zero(name, model) and not name.endswith(zero):
            assert b[name].norm() > 10 * rtol * size, f'{name}: no gradient to compare'
        assert_close(a[name], b[name], rtol, size, name)

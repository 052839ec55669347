"""An independent reference of the language models, in float64, token by token and expert by expert.

It reads a model's parameters and uses none of the functions of model.py or unroll.py. All keys and
values of a stream are kept, positions are absolute, and the window is a mask. Every mode (plain,
fast, compiled, recomputed blocks, CUDA graphs, Triton overrides, the decoder) is compared with it.

After the equations come small random models, and comparisons with tolerances.
"""

import copy
import math

import torch

from model import ModelConfig, State

V = 11
EPS = 1e-6


# ---- the equations ----


class History:
    """The past of B streams.

    keys, values: lists of one tensor (B, G, K) per position, by (layer, owner): the owner of a
    cache is an expert, or 'all'. Keys are normalized and not rotated."""

    def __init__(self, model, B):
        self.config = model.config
        self.recurrent = model.recurrent
        self.s = torch.zeros(B, model.config.n_embd, dtype=torch.float64)
        self.keys = {}
        self.values = {}
        self.now = 0  # the position of the next token
        self.first = torch.zeros(B, dtype=torch.int64)  # the position where each stream starts

    def reset(self, row):
        """Start the stream of this row at the next token."""
        self.first[row] = self.now
        self.s = self.s.index_fill(0, torch.tensor(row), 0)

    def detach(self):
        """Stop gradients from flowing into the past."""
        self.s = self.s.detach()
        for entries in (*self.keys.values(), *self.values.values()):
            entries[:] = [entry.detach() for entry in entries]

    def state(self):
        """Return the model's State: the last W entries, oldest first, with zeros before them."""
        c = self.config
        count = (self.now - self.first).clamp(max=c.window)
        owners = ['all'] if self.recurrent and c.share_kv else range(c.n_expert)
        empty = torch.arange(c.window) < c.window - count[:, None]  # (B, W)
        zeros = [torch.zeros(len(count), c.n_kv_head, c.head_dim, dtype=torch.float64)] * c.window

        def last_entries(entries, l):
            """Return the last W of keys or values of layer l, (B, C, W, K)."""
            heads = []
            for owner in owners:
                last = (zeros + entries.get((l, owner), []))[-c.window :]
                heads.append(torch.stack(last, 2))  # (B, G, W, K)
            return torch.cat(heads, 1).masked_fill(empty[:, None, :, None], 0)

        k = torch.stack([last_entries(self.keys, l) for l in range(c.n_layer)])
        v = torch.stack([last_entries(self.values, l) for l in range(c.n_layer)])
        return State(self.s if self.recurrent else self.s[:, :0], k, v, count)


def rms_norm(x):
    """Return x divided by its root mean square over the last dimension."""
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()


def rotate(x, position):
    """Return RoPE of x (..., K) as complex numbers (..., K/2): number j is the pair (j, j + K/2),
    rotated by the angle position * 10000^(-2j/K)."""
    K = x.size(-1)
    frequency = 10000.0 ** (-2 * torch.arange(K // 2, dtype=torch.float64) / K)
    return torch.complex(x[..., : K // 2], x[..., K // 2 :]) * torch.exp(1j * frequency * position)


def aggregate(config, layer, h, z, s):
    """Return the aggregation A(h_1..h_E) of a list h of tensors (..., D)."""
    E = len(h)
    if config.aggregation == 'sqrt_sum':
        return sum(h) / math.sqrt(E)
    if config.aggregation == 'mean':
        return sum(h) / E
    query = torch.cat([z, s], -1) @ layer.router_q.t() + layer.router_q_bias
    keys = [layer.router_k @ e for e in layer.expert_embedding]
    gates = torch.exp(torch.stack([query @ k / math.sqrt(config.router_dim) for k in keys]))
    gates = gates / gates.sum(0)  # (E, ...)
    denominator = gates.sum(0) + EPS
    if config.aggregation == 'softmax_l2':
        denominator = (gates.pow(2).sum(0) + EPS).sqrt()
    return sum((gates[i] / denominator).unsqueeze(-1) * h[i] for i in range(E))


def attend(q, keys, values, now, oldest):
    """Return the attended values (B, H K) for queries q (B, H, K) at position `now`. keys, values:
    one (B, G, K) per position from 0 to now; oldest (B,): the first position that a stream sees."""
    B, H, K = q.shape
    begin = int(oldest.min())
    position = torch.arange(begin, now + 1)
    keys, values = torch.stack(keys[begin:]), torch.stack(values[begin:])  # (S, B, G, K)
    G = keys.size(2)
    q = rotate(q, now).view(B, G, H // G, K // 2)
    keys = rotate(keys, position[:, None, None, None])
    scores = torch.einsum('bgrk,sbgk->bgrs', q, keys.conj()).real / math.sqrt(K)
    hidden = (position < oldest[:, None])[:, None, None]
    p = torch.softmax(scores.masked_fill(hidden, -math.inf), -1)
    return torch.einsum('bgrs,sbgk->bgrk', p, values).reshape(B, H * K)


def layer_step(model, l, s, z, history, window):
    """Run layer l on one token per stream, from s and z (B, D), add its keys and values to the
    history, and return the new s (B, D). window: None attends to all positions."""
    c, layer = model.config, model.layers[l]
    now, B = history.now, len(s)
    u = layer.a * s + layer.b * z if model.recurrent else s
    n = rms_norm(u)
    sizes = (B, c.n_kv_head, c.head_dim)
    keys = [(n @ layer.wk[i].t()).view(sizes) for i in range(c.n_expert)]
    values = [(n @ layer.wv[i].t()).view(sizes) for i in range(c.n_expert)]
    owners = list(range(c.n_expert))
    shared = model.recurrent and c.share_kv
    if shared:
        owners = ['all']
        scale = 1 / c.n_expert if c.aggregation == 'mean' else 1 / math.sqrt(c.n_expert)
        keys = [sum(keys) * scale]
        values = [sum(values) * scale]
    for owner, k, v in zip(owners, keys, values, strict=True):
        history.keys.setdefault((l, owner), []).append(rms_norm(k))
        history.values.setdefault((l, owner), []).append(v)
    oldest = history.first if window is None else history.first.clamp(min=now - window + 1)
    out = []
    for i in range(c.n_expert):
        owner = 'all' if shared else i
        q = rms_norm((n @ layer.wq[i].t()).view(B, c.n_head, c.head_dim))
        att = attend(q, history.keys[l, owner], history.values[l, owner], now, oldest)
        y = u + att @ layer.wo[i].t()
        out.append(y + torch.relu(rms_norm(y) @ layer.up[i].t()).pow(2) @ layer.down[i].t())
    if model.recurrent:
        return aggregate(c, layer, [rms_norm(y) for y in out], z, s)
    if c.residual == 'shared':
        return s + aggregate(c, layer, [y - s for y in out], z, s)
    return aggregate(c, layer, out, z, s)


def run(model, idx, history=None):
    """Return logits (B, T, V) of tokens (B, T), and the history after them. Gradients end at the
    chunk's start. Without a history, streams start here, and GPT attends to the whole chunk, as in
    training; with one, it attends to the window."""
    window = None if history is None and not model.recurrent else model.config.window
    history = History(model, len(idx)) if history is None else history
    history.detach()
    logits = []
    for token in idx.unbind(1):
        z = rms_norm(model.embedding[token])
        s = history.s if model.recurrent else z
        for l in range(model.config.n_layer):
            s = layer_step(model, l, s, z, history, window)
        history.s, history.now = s, history.now + 1
        logits.append(15 * torch.tanh(rms_norm(s) @ model.head.t() / 15))
    return torch.stack(logits, 1), history


def loss_of(logits, targets):
    """Return the mean cross-entropy in nats."""
    return -torch.log_softmax(logits, -1).gather(-1, targets[..., None]).mean()


# ---- models ----


SIZES = {
    'vocab_size': V,
    'n_layer': 2,
    'n_expert': 2,
    'n_embd': 16,
    'n_head': 4,
    'n_kv_head': 2,
    'window': 4,
    'block_size': 8,
    'router_dim': 6,
}


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
    """Return random tokens."""
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(seed))


def gradients(model, value):
    """Return the gradient of a value with respect to each parameter, by name."""
    grads = torch.autograd.grad(value, list(model.parameters()), materialize_grads=True)
    return {name: g for (name, _), g in zip(model.named_parameters(), grads, strict=True)}


# ---- comparisons ----


def assert_close(a, b, rtol=1e-9, size=None, what=''):
    """Assert that the norm of a - b is at most rtol times the norm of b, or times `size` where b is
    a small sum of terms of that size. In float64 the default leaves a margin of at least 20 over
    the rounding measured for these models on two makes of processors."""
    assert a.shape == b.shape, what
    difference = (a - b).double().norm().item()
    size = b.double().norm().item() if size is None else size
    assert difference <= rtol * size, f'{what}: differs by {difference:.3g}, size {size:.3g}'


def assert_same_state(a, b, rtol=1e-9):
    """Compare two States part by part."""
    for name, x, y in zip(State._fields, a, b, strict=True):
        assert_close(x.double(), y.double(), rtol, what=name)


def always_zero(name, model):
    """Return whether a parameter's gradient is zero but for rounding: the softmax of the router is
    constant for one expert."""
    routing = 'router' in name or 'expert_embedding' in name
    return model.config.n_expert == 1 and routing


def assert_same_gradients(model, a, b, rtol=1e-9, zero=()):
    """Compare every parameter's gradient relative to the largest of the model, because all are sums
    of terms of about that size. Each must be large enough to compare, unless it is always_zero or
    its name ends in one of the suffixes `zero`."""
    assert a.keys() == b.keys()
    size = max(g.double().norm().item() for g in b.values())
    for name in b:
        if not always_zero(name, model) and not name.endswith(zero):
            assert b[name].norm() > 10 * rtol * size, f'{name}: no gradient to compare'
        assert_close(a[name], b[name], rtol, size, name)

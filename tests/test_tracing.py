"""Test tracing.py: what it returns follows the equations."""

import itertools
import math

import pytest
import torch
from reference import assert_close, make, rms_norm, rotate, tokens

from model import GPT, RecurrentGPT
from tracing import trace


@pytest.mark.parametrize('model_type', [RecurrentGPT, GPT])
@pytest.mark.parametrize('changes', [{}, {'share_kv': False, 'aggregation': 'softmax_l2'}], ids=str)
def test_the_trace_leads_to_the_logits(model_type, changes):
    model, x = make(model_type, window=3, n_expert=3, **changes), tokens(2, 7)
    found = trace(model, x)
    with torch.no_grad():
        logits, _ = model(x, state=model.init_state(2))
    s = torch.nn.functional.rms_norm(found.s, found.s.shape[-1:], eps=1e-6)
    assert_close(15 * torch.tanh(s @ model.head.T / 15), logits)


@pytest.mark.parametrize('model_type', [RecurrentGPT, GPT])
@torch.no_grad()
def test_attention_weights_are_those_of_each_head(model_type):
    """Layer 0 of the non-recurrent model, or of a recurrent one with a = 0, reads the embedding
    alone. Its experts and heads have other weights than each other."""
    model, x = make(model_type, window=3, n_head=4, n_kv_head=2, n_expert=3), tokens(1, 5)
    layer, c = model.layers[0], model.config
    if model.recurrent:
        layer.a.zero_()
    found = trace(model, x).attention[0]  # (1, 3, 4, 5, 5)
    n = rms_norm(rms_norm(model.embedding[x[0]]))  # (T, D)
    keys = [(n @ w.T).view(5, 2, c.head_dim) for w in layer.wk]
    if model.recurrent:
        keys = [sum(keys)] * 3
    t, i = torch.arange(5)[:, None], torch.arange(5)
    seen = (i <= t) & (i > t - 3)
    for e, head in itertools.product(range(3), range(4)):
        q = rms_norm((n @ layer.wq[e].T).view(5, 4, c.head_dim)[:, head])
        k = rms_norm(keys[e][:, head // 2])
        q, k = (torch.stack([rotate(y, p) for p, y in enumerate(part)]) for part in (q, k))
        scores = (q @ k.conj().T).real / math.sqrt(c.head_dim)
        expected = scores.masked_fill(~seen, -math.inf).softmax(-1)
        assert_close(found[0, e, head], expected, rtol=1e-5)  # RMSNorm of a norm has an epsilon
    assert not torch.allclose(found[0, 0, 0], found[0, 1, 0])
    assert not torch.allclose(found[0, 0, 0], found[0, 0, 1])


def test_activations_are_the_hidden_units_of_the_ffn():
    model, x = make(RecurrentGPT, n_layer=1, n_expert=2), tokens(2, 3)
    found = trace(model, x)
    (hidden,) = found.activations
    assert hidden.shape == (2, 2, 3, 4 * model.config.n_embd)
    assert (hidden >= 0).all() and hidden.any()
    with torch.no_grad():
        model.layers[0].down[:, :, 5] = 0  # a hidden unit that no one reads
        assert_close(trace(model, x).activations[0][:, :, 0], hidden[:, :, 0])

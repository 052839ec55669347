"""Test tracing.py: what it returns follows the equations."""

import itertools
import math

import pytest
import torch
from reference import assert_close, make, rms_norm, rotate, tokens

from model import GPT, RecurrentGPT
from tracing import trace

both_models = pytest.mark.parametrize('model_type', [RecurrentGPT, GPT])


@both_models
@torch.no_grad()
def test_the_trace_leads_to_the_logits(model_type):
    model, x = make(model_type, window=3, aggregation='softmax_l2', share_kv=False), tokens(2, 7)
    logits, _ = model(x, state=model.init_state(2))
    s = rms_norm(trace(model, x).s)
    assert_close(15 * torch.tanh(s @ model.head.T / 15), logits)


@both_models
@torch.no_grad()
def test_attention_weights_and_hidden_units_are_those_of_each_expert_and_head(model_type):
    """LayerParams 0 of the non-recurrent model, or of a recurrent one with a = 0, reads the
    embedding alone, and with Wo = 0 its FFN does, too."""
    model, x = make(model_type, window=3, n_expert=3), tokens(1, 5)
    layer = model.layers[0]
    layer.wo.zero_()
    if model.recurrent:
        layer.a.zero_()
    found = trace(model, x)
    n = rms_norm(rms_norm(model.embedding[x[0]]))  # (T, D); a norm of a norm has an epsilon
    keys = [n @ w.T for w in layer.wk]
    if model.recurrent:
        keys = [sum(keys)] * 3
    seen = torch.ones(5, 5).tril().triu(-2) == 1  # the window
    for e, head in itertools.product(range(3), range(4)):
        q = rms_norm((n @ layer.wq[e].T).view(5, 4, 4)[:, head])
        k = rms_norm(keys[e].view(5, 2, 4)[:, head // 2])  # two heads share a key
        q, k = (torch.stack([rotate(y, t) for t, y in enumerate(part)]) for part in (q, k))
        scores = (q @ k.conj().T).real / math.sqrt(4)
        weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
        assert_close(found.attention[0][0, e, head], weights, rtol=1e-5)
        assert_close(found.activations[0][e, 0], (n @ layer.up[e].T).relu().square(), rtol=1e-5)

"""Test tracing.py: what it returns follows the equations."""

import itertools
import math

import pytest
import reference
import torch
from reference import assert_close, assert_same_state, make, rms_norm, rotate, tokens

from decode import generate
from model import GPT, LanguageModel, LayerParams, RecurrentGPT
from tracing import trace

both_models = pytest.mark.parametrize('model_type', [RecurrentGPT, GPT])


@both_models
@torch.no_grad()
def test_the_trace_leads_to_the_logits(model_type):
    sizes = {'window': 3, 'share_kv': not model_type.recurrent}
    model, x = make(model_type, aggregation='softmax_l2', **sizes), tokens(2, 7)
    logits, _ = model(x, state=model.init_state(2))
    s = rms_norm(trace(model, x).s[-1])
    assert_close(15 * torch.tanh(s @ model.head.T / 15), logits)


@both_models
@torch.no_grad()
def test_a_model_in_bf16_is_traced(model_type):
    model, x = make(model_type, window=3).bfloat16(), tokens(2, 7)
    logits, _ = model(x, state=model.init_state(2))
    s = rms_norm(trace(model, x).s[-1].double())
    assert_close(15 * torch.tanh(s @ model.head.T.double() / 15), logits.double(), 0.05)


@both_models
@torch.no_grad()
def test_attention_weights_and_hidden_units_are_those_of_each_expert_and_head(model_type):
    """Layer 0 of the non-recurrent model, or of a recurrent one with a = 0, reads the
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


@both_models
@torch.no_grad()
def test_s_is_the_output_of_every_layer_and_continues_from_a_state(model_type, monkeypatch):
    """Two of three texts are read in parts of 5 and 6 tokens by a window of 4; the third starts at
    the second part. Attention to carried entries comes first."""
    model, x, outputs = make(model_type), tokens(3, 11), []
    layer_step = reference.layer_step
    monkeypatch.setattr(
        reference, 'layer_step', lambda *args: outputs.append(layer_step(*args)) or outputs[-1]
    )
    history = reference.History(model, 3)
    _, history = reference.run(model, x[:, :5], history)
    history.reset(2)
    before = trace(model, x[:, :5])
    start = before.state._replace(
        s=before.state.s * torch.tensor([[1], [1], [0]]), count=torch.tensor([4, 4, 0])
    )
    _, history = reference.run(model, x[:, 5:], history)
    found = trace(model, x[:, 5:], start)
    for l in range(2):
        expected = torch.stack(outputs[l::2], 1)  # (3, 11, D)
        assert_close(before.s[l], expected[:, :5])
        assert_close(found.s[l], expected[:, 5:])
    whole = trace(model, x[:2])
    for l in range(2):
        assert before.attention[l].shape[3:] == (5, 5) and found.attention[l].shape[3:] == (6, 10)
        assert_close(found.attention[l][:2], whole.attention[l][:, :, :, 5:, 1:])
        assert found.attention[l][2, ..., :4].sum() == 0
    assert_same_state(found.state._replace(**kept_entries(found.state)), history.state())


def kept_entries(state):
    """Return the keys and values of a state with zeros in place of entries that do not count."""
    W = state.k.size(3)
    empty = torch.arange(W) < W - state.count[:, None]  # (B, W)
    return {name: getattr(state, name).masked_fill(empty[:, None, :, None], 0) for name in 'kv'}


@both_models
def test_the_model_is_in_evaluation_mode_and_then_trains_again(model_type, monkeypatch):
    """An edit, such as dropout, reads the flag of the model or of a layer. A layer that was in
    evaluation mode before stays so."""
    model, modes = make(model_type), []

    def record(function):
        return lambda self, *args: modes.append(self.training) or function(self, *args)

    monkeypatch.setattr(LayerParams, 'bind', record(LayerParams.bind))
    monkeypatch.setattr(LanguageModel, 'embed', record(LanguageModel.embed))
    model.layers[0].eval()
    trace(model, tokens(1, 3))
    generate(model, tokens(1, 3), 2)
    assert modes and not any(modes) and model.training
    assert [layer.training for layer in model.layers[:2]] == [False, True]
    generate(model.eval(), tokens(1, 3), 2)
    assert not model.training


@both_models
def test_a_training_loop_is_the_same_with_traces_and_they_follow_its_states(model_type):
    """The model is trained in bfloat16, and traced in fp32 before every update from the state that
    its streams carry."""
    losses = []
    for traces in (False, True):
        model = make(model_type, dtype=torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        state = model.init_state(2)
        for i in range(3):
            x, y = tokens(2, 6, seed=i), tokens(2, 6, seed=i + 9)
            if traces:
                found = trace(model, x, state)
                with torch.no_grad():
                    logits, after = model(x, state=state)
                s = rms_norm(found.s[-1])
                assert_close(15 * torch.tanh(s @ model.head.T / 15), logits, 1e-4)
                assert_same_state(found.state, after, 1e-4)
            with torch.autocast('cpu', torch.bfloat16):
                loss, new = model(x, y, state)
            loss.objective.backward()
            optimizer.step()
            optimizer.zero_grad()
            state = new.detach()
            losses.append(loss.objective.item())
    assert losses[:3] == losses[3:]

"""What a language model does inside, token by token, for notebooks and logs.

    import torch
    from model import LanguageModel
    from tracing import trace

    ids = torch.tensor([[255, *b'We the']])  # of bytes; 255 starts a document
    found = trace(LanguageModel.from_pretrained('PATH/pretrained/lm'), ids)
    found.s[0]                      # the output of layer 0, (1, 7, D)
    found.attention[0][0, 0, 0, 5]  # layer 0, text 0, expert 0, head 0: from token 5 to all

It runs the equations of model.py with a cache and a linear that keep what passes through them. In a
training loop it runs beside the training, which it does not change.
"""

from typing import NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

import model as model_file
from model import LanguageModel, State, refuse_other_forward, step
from ops import Heads, Linear, in_window, rope_table, rotate, to_experts
from support.ranks import evaluating


class Trace(NamedTuple):
    """What `trace` returns for B texts of T tokens; lists have one tensor per layer that runs."""

    s: list[Tensor]  # (B, T, D): the layer's output
    attention: list[Tensor]  # (B, E, H, T, T): attention weights, from each token to each token
    activations: list[Tensor]  # (E, B, T, 4 D): the FFN's hidden units
    state: State  # after the texts


class KeptInputs:
    """A Linear that keeps the inputs of its calls."""

    def __init__(self, linear: Linear):
        self.linear = linear
        self.inputs = []

    def __call__(self, x: Tensor) -> Tensor:
        self.inputs.append(x)
        return self.linear(x)


class KeptWeights:
    """A cache (see model.py) of the carried and of all new keys and values, which keeps its
    attention weights. A token sees the last `width` entries."""

    def __init__(self, heads: Heads, T: int, width: int, k: Tensor, v: Tensor, count: Tensor):
        """T: the number of new tokens; k, v: carried entries (B, C, W, K), keys not rotated, the
        last `count` (B,) of which are filled."""
        self.heads, self.T, self.width, self.count = heads, T, width, count
        self.cos, self.sin = rope_table(k.size(2) + T, heads.K, k)
        self.unrotated, self.values = list(k.unbind(2)), list(v.unbind(2))  # (B, C, K) each
        self.keys = list(rotate(k, self.cos[:-T], self.sin[:-T]).to(k.dtype).unbind(2))
        self.weights = []

    def angles(self) -> tuple[Tensor, Tensor]:
        """Return cos and sin (K,) of the next token's position."""
        t = len(self.keys)
        return self.cos[t], self.sin[t]

    def attend(self, q: Tensor, k: Tensor, unrotated: Tensor, v: Tensor) -> Tensor:
        """Store keys and values (B, C, K), attend from queries (B, C M, K), and return the attended
        values (E, B, H K)."""
        heads, S = self.heads, len(self.cos)
        self.keys.append(k)
        self.unrotated.append(unrotated)
        self.values.append(v)
        keys, values = (torch.stack(x, 2) for x in (self.keys, self.values))  # (B, C, n, K)
        B, C, n, K = keys.shape
        age = torch.arange(n - 1, -1, -1, device=q.device)
        count = self.count + n - (S - self.T)
        seen = in_window(age, count[:, None, None, None], self.width)  # (B, 1, 1, n)
        scores = q.reshape(B, C, -1, K) @ keys.mT  # (B, C, M, n)
        p = F.softmax(scores.masked_fill(~seen, -torch.inf), -1).flatten(0, 1)  # (B C, M, n)
        by_expert = to_experts(F.pad(p, (0, S - n)), heads._replace(K=S))  # (E, B, H S)
        self.weights.append(by_expert.unflatten(-1, (-1, S)).transpose(0, 1))  # (B, E, H, S)
        return to_experts(p @ values.flatten(0, 1), heads)


@torch.no_grad()
def trace(model: LanguageModel, ids: Tensor, state: State | None = None) -> Trace:
    """Return a Trace of the texts ids (B, T), read in the dtype of the model and in evaluation
    mode from a state, by default the initial one. With a state, attention weights are (B, E, H, T,
    W + T): those of the W entries that it carries come first. They take memory for all tokens.
    Raises ValueError for a class that overrides the forward."""
    refuse_other_forward(model)
    B, T = ids.shape
    outputs = []  # of every layer at every token

    def run_layer(*arguments: object) -> Tensor:
        outputs.append(original(*arguments))
        return outputs[-1]

    original = model_file.run_layer
    with evaluating(model), torch.autocast(ids.device.type, enabled=False):
        z = model.embed(ids)  # (B, T, D)
        start = model.init_state(B) if state is None else state
        s, k, v = (x.to(z.dtype) for x in start[:3])
        W = k.size(3)
        weights = [w._replace(down=KeptInputs(w.down)) for w in model.bind_weights(B, z.dtype)]
        caches = [
            KeptWeights(model.heads, T, w.window, *entries, start.count)
            for w, *entries in zip(weights, k, v, strict=True)
        ]
        # `step` calls run_layer and returns the last output alone
        with mock.patch.object(model_file, 'run_layer', run_layer):
            for z_t in z.unbind(1):
                if model.recurrent:
                    s = step(weights, s, z_t, caches, model.config)
                else:
                    x = z_t
                    for w, cache in zip(weights, caches, strict=True):
                        x = run_layer(w, x, z_t, cache, model.config)
    first = W if state is None else 0
    entries = [(cache.unrotated[-W:], cache.values[-W:]) for cache in caches]
    k, v = (torch.stack([torch.stack(x, 2) for x in part]) for part in zip(*entries, strict=True))
    return Trace(
        s=[torch.stack(outputs[l :: len(weights)], 1) for l in range(len(weights))],
        attention=[torch.stack(cache.weights, 3)[..., first:] for cache in caches],
        activations=[torch.stack(w.down.inputs, 2) for w in weights],
        state=State(s, k, v, (start.count + T).clamp(max=W)),
    )

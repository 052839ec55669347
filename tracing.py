"""What a language model does inside, token by token, for notebooks and logs.

    found = trace(LanguageModel.from_pretrained('pretrained/lm'), torch.tensor([list(b'We the')]))
    found.attention[0][0, 0, 0, 5]  # layer 0, text 0, expert 0, head 0: from token 5 to all

It runs the equations of model.py with a cache and a linear that keep what passes through them.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from model import LanguageModel, norm_to, run_layer, step
from ops import Linear, in_window, rope_table, to_experts


class Trace(NamedTuple):
    """What `trace` returns for B texts of T tokens; lists have one tensor per layer that runs."""

    s: Tensor  # (B, T, D): the last layer's output
    attention: list[Tensor]  # (B, E, H, T, T): attention weights, from each token to each token
    activations: list[Tensor]  # (E, B, T, 4 D): the FFN's hidden units


class KeptInputs:
    """A Linear that keeps the inputs of its calls."""

    def __init__(self, linear: Linear):
        self.linear = linear
        self.inputs = []

    def __call__(self, x: Tensor) -> Tensor:
        self.inputs.append(x)
        return self.linear(x)


class KeptWeights:
    """A cache (see model.py) of all keys and values, which keeps its attention weights. A token
    sees the last `width` of them."""

    def __init__(self, model: LanguageModel, T: int, width: int):
        self.heads = model.heads
        self.width = width
        self.cos, self.sin = rope_table(T, self.heads.K, model.embedding)
        self.keys, self.values, self.weights = [], [], []

    def angles(self) -> tuple[Tensor, Tensor]:
        """Return cos and sin (K,) of the next token's position."""
        t = len(self.keys)
        return self.cos[t], self.sin[t]

    def attend(self, q: Tensor, k: Tensor, unrotated: Tensor, v: Tensor) -> Tensor:
        """Store keys and values (B, C, K), attend from queries (B, C M, K), and return the attended
        values (E, B, H K)."""
        T, heads = len(self.cos), self.heads
        self.keys.append(k)
        self.values.append(v)
        keys, values = (torch.stack(x, 2).flatten(0, 1) for x in (self.keys, self.values))
        n = keys.size(1)  # (N, n, K)
        age = torch.arange(n - 1, -1, -1, device=q.device)
        scores = q.reshape(len(keys), -1, heads.K) @ keys.mT  # (N, M, n)
        p = F.softmax(scores.masked_fill(~in_window(age, n, self.width), -torch.inf), -1)
        by_expert = to_experts(F.pad(p, (0, T - n)), heads._replace(K=T))  # (E, B, H T)
        self.weights.append(by_expert.unflatten(-1, (-1, T)).transpose(0, 1))  # (B, E, H, T)
        return to_experts(p @ values, heads)


@torch.no_grad()
def trace(model: LanguageModel, ids: Tensor) -> Trace:
    """Return a Trace of the texts ids (B, T), read from an empty state in the dtype of the model.
    It takes memory for T x T attention weights."""
    B, T = ids.shape
    z = norm_to(F.embedding(ids, model.embedding), model.embedding.dtype)  # (B, T, D)
    states = []
    with torch.autocast(ids.device.type, enabled=False):
        weights = [w._replace(down=KeptInputs(w.down)) for w in model.bind_weights(B, z.dtype)]
        caches = [KeptWeights(model, T, w.window) for w in weights]
        s = model.init_state(B).s
        for z_t in z.unbind(1):
            if model.recurrent:
                s = step(weights, s, z_t, caches, model.config)
            else:
                s = z_t
                for w, cache in zip(weights, caches, strict=True):
                    s = run_layer(w, s, z_t, cache, model.config)
            states.append(s)
    return Trace(
        s=torch.stack(states, 1),
        attention=[torch.stack(cache.weights, 3) for cache in caches],
        activations=[torch.stack(w.down.inputs, 2) for w in weights],
    )

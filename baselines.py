"""Baselines that a user might choose instead: a plain Transformer and torch.nn.LSTM.

    python train_lm.py config/demo.py --arch=lstm --out_dir=out/demo_lstm
    python train_lm.py config/demo.py --arch=transformer --recurrent=False --n_expert=1 \
        --n_layer=8 --block_size=256 --out_dir=out/demo_transformer

Tokens, schedule, validation and log are train_lm.py's; the optimizer is torch.optim.AdamW. The LSTM
reads streams and carries its state from chunk to chunk, as the recurrent model does, and has as
many parameters; it runs as torch provides it (cuDNN on a GPU). The Transformer reads sequences as
the non-recurrent model does, and has as many parameters for E = 1. It is nanoGPT's model with
pre-norm RMSNorm, RoPE, grouped queries, squared ReLU, an untied head, scaled_dot_product_attention
and no biases, compiled as a whole.
"""

import math

from configurator import Mistake

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels import Loss, compiled, fused, norm, rope_table, rotate, window_mask
from model import LanguageModel, ModelConfig, build_model

LEARNING_RATE = {'lstm': 2e-3, 'transformer': 1e-3}  # usual for a few million parameters
# Settings of the optimizers of RecurrentGPT and GPT. A baseline refuses them on the command line,
# and ignores them in a config file, which may serve all models.
EXPERTS_ONLY = 'learning_rate embedding_lr head_lr scalar_lr momentum weight_decay betas adam_eps'


def refuse_settings(arch: str, argv: list[str]) -> None:
    """Raise Mistake if the command line has an optimizer setting that this arch does not use."""
    unused = ['baseline_lr'] if arch == 'experts' else EXPERTS_ONLY.split()
    for name in unused:
        if any(argument.split('=')[0] == f'--{name}' for argument in argv):
            advice = 'the baselines have --baseline_lr'
            raise Mistake(f'--{name} does nothing with arch = {arch!r}: {advice}')


class Block(nn.Module):
    """Pre-norm attention and FFN. RMSNorm has no gain, as in GPT, so that the sizes are equal."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        D, H, G = config.n_embd, config.n_head, config.n_kv_head
        self.heads = (H, G, G)  # of queries, keys and values
        self.K = D // H
        self.qkv = nn.Linear(D, (H + 2 * G) * self.K, bias=False)
        self.out = nn.Linear(D, D, bias=False)
        self.up = nn.Linear(D, 4 * D, bias=False)
        self.down = nn.Linear(4 * D, D, bias=False)
        # as in GPT-2, with smaller weights where a product is added to the residual stream
        for linear in (self.qkv, self.out, self.up, self.down):
            into_residual = linear is self.out or linear is self.down
            std = 0.02 / math.sqrt(2 * config.n_layer) if into_residual else 0.02
            linear.weight.data.normal_(0, std)

    def forward(
        self, x: Tensor, rope: tuple, mask: Tensor | None, cache: tuple | None
    ) -> tuple[Tensor, tuple | None]:
        """Return the block's output (B, T, D) and the next cache. x: (B, T, D); rope: cos and sin;
        cache: None, or the keys, not rotated, and values of the last W tokens, (B, G, W, K) each.
        """
        B, T, D = x.shape
        qkv = self.qkv(norm(x)).view(B, T, -1, self.K)  # (B, T, H + 2G, K)
        q, k, v = (y.transpose(1, 2) for y in qkv.split(self.heads, 2))  # (B, H or G, T, K)
        if cache is not None:
            k = torch.cat([cache[0].to(k.dtype), k], 2)  # (B, G, W + T, K)
            v = torch.cat([cache[1].to(v.dtype), v], 2)
            cache = k[:, :, T:], v[:, :, T:]
        cos, sin = rope
        q = rotate(q, cos[-T:], sin[-T:]).to(v.dtype)
        k = rotate(k, cos, sin).to(v.dtype)
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=q.size(1) != k.size(1)
        )
        x = x + self.out(y.transpose(1, 2).reshape(B, T, D))
        return x + self.down(F.relu(self.up(norm(x))).square()), cache


class Transformer(nn.Module):
    """The counterpart of GPT with n_expert = 1. Raises Mistake for more experts.

    Without a state it attends causally over the chunk, as in training. With one, as in validation,
    it attends in windows; a state is (k, v, count): the caches (L, B, G, W, K) and the number of
    filled entries (B,)."""

    recurrent = False
    num_params = LanguageModel.num_params

    def __init__(self, config: ModelConfig):
        super().__init__()
        if config.n_expert != 1:
            needed = "must be 1 with arch = 'transformer', whose size n_layer sets"
            raise Mistake(f'n_expert = {config.n_expert}: {needed}')
        V, D = config.vocab_size, config.n_embd
        self.config = config
        self.embedding = nn.Parameter(torch.empty(V, D).normal_(0, 0.02))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.head = nn.Parameter(torch.empty(V, D).normal_(0, 0.02))

    def init_state(self, B: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the empty state of B streams."""
        c = self.config
        device = self.head.device
        shape = c.n_layer, B, c.n_kv_head, c.window, c.head_dim
        k, v = torch.zeros(2, *shape, device=device)
        return k, v, torch.zeros(B, dtype=torch.int64, device=device)

    def flops_per_token(self) -> dict[str, float]:
        """Return the forward FLOPs per token of core and head, as LanguageModel counts GPT's: two
        per weight, and attention at the mean context."""
        c = self.config
        attention = 4 * (c.block_size + 1) / 2 * c.n_embd * c.n_layer
        core = 2 * sum(p.numel() for p in self.blocks.parameters()) + attention
        return {'core': float(core), 'head': float(2 * self.head.numel())}

    def forward(self, idx: Tensor, targets: Tensor, state: tuple | None = None) -> tuple:
        """Return kernels.Loss (nats per token) and the next state. idx, targets: (B, T)."""
        chunk = Transformer.chunk
        if state is None and fused.enabled:
            chunk = compiled(chunk)
        return chunk(self, idx, targets, state)

    def chunk(self, idx: Tensor, targets: Tensor, state: tuple | None) -> tuple:
        """Run the model on one chunk, as `forward` does, which compiles this function."""
        T, W = idx.size(1), self.config.window
        x = F.embedding(idx, self.embedding)  # (B, T, D)
        caches = [None] * len(self.blocks)
        mask = None
        if state is not None:
            k, v, count = state
            caches = list(zip(k, v, strict=True))
            mask = window_mask(count, T, W)
        rope = rope_table(T if state is None else W + T, self.config.head_dim, x)
        new = []
        for block, cache in zip(self.blocks, caches, strict=True):
            x, cache = block(x, rope, mask, cache)
            new.append(cache)
        logits = F.linear(norm(x), self.head).flatten(0, 1).float()  # (B * T, V)
        loss = F.cross_entropy(logits, targets.flatten())
        if state is None:
            return Loss(loss, loss.detach()), None
        k, v = (torch.stack(x) for x in zip(*new, strict=True))
        return Loss(loss, loss.detach()), (k, v, (count + T).clamp(max=W))


class LSTM(nn.Module):
    """An embedding, torch.nn.LSTM with one layer, and a linear head. The state is nn.LSTM's h and
    c, (1, B, hidden) each. At small sizes one wide layer is as good as two narrow ones, and faster.
    """

    recurrent = True
    num_params = LanguageModel.num_params

    def __init__(self, config: ModelConfig, hidden: int):
        super().__init__()
        V, D = config.vocab_size, config.n_embd
        self.config = config
        self.embedding = nn.Parameter(torch.empty(V, D).normal_())
        self.lstm = nn.LSTM(D, hidden, batch_first=True)
        bound = 1 / math.sqrt(hidden)  # as nn.Linear
        self.head = nn.Parameter(torch.empty(V, hidden).uniform_(-bound, bound))
        self.head_bias = nn.Parameter(torch.empty(V).uniform_(-bound, bound))
        with torch.no_grad():
            # Forget gates start open (Jozefowicz et al., 2015); gates are ordered i, f, g, o.
            self.lstm.bias_ih_l0[hidden : 2 * hidden] = 1

    def init_state(self, B: int) -> tuple[Tensor, Tensor]:
        """Return the zero state of B streams."""
        h, c = torch.zeros(2, 1, B, self.lstm.hidden_size, device=self.head.device)
        return h, c

    def forward(self, idx: Tensor, targets: Tensor, state: tuple | None = None) -> tuple:
        """Return kernels.Loss and the next state, detached. idx, targets: (B, T)."""
        x, state = self.lstm(F.embedding(idx, self.embedding), state)  # (B, T, hidden)
        logits = F.linear(x, self.head, self.head_bias).flatten(0, 1).float()  # (B * T, V)
        loss = F.cross_entropy(logits, targets.flatten())
        return Loss(loss, loss.detach()), tuple(s.detach() for s in state)

    def flops_per_token(self) -> dict[str, float]:
        """Return the forward FLOPs per token of core and head: two per weight."""
        core = sum(w.numel() for name, w in self.lstm.named_parameters() if 'weight' in name)
        return {'core': 2.0 * core, 'head': 2.0 * self.head.numel()}


def match_hidden(V: int, D: int, target: int) -> int:
    """Return the hidden size with which an LSTM has about `target` parameters: the closest multiple
    of 8, which GPUs prefer, if that is within 1%, else the closest size. Raises Mistake if even
    a hidden size of 1 has over 2% more."""

    def excess(h: int) -> float:
        """Return the relative difference from `target` at hidden size h."""
        return (V * D + 4 * h * (D + h + 2) + V * (h + 1)) / target - 1

    if excess(1) > 0.02:
        sizes = f'an LSTM with embedding and head for V = {V}, D = {D}'
        raise Mistake(f'{sizes} has more than {target} parameters: lower n_embd')
    closest = min(range(1, 2**15), key=lambda h: abs(excess(h)))
    multiple = 8 * max(1, round(closest / 8))
    return multiple if abs(excess(multiple)) <= 0.01 else closest


def build(arch: str, config: ModelConfig) -> Transformer | LSTM:
    """Return a baseline for the sizes in `config`: 'transformer', or 'lstm' with as many parameters
    as RecurrentGPT. Raises Mistake for sizes that do not fit."""
    if arch == 'transformer':
        return Transformer(config)
    with torch.device('meta'):  # only to count
        target = build_model(config, recurrent=True).num_params()['total']
    return LSTM(config, match_hidden(config.vocab_size, config.n_embd, target))


def make_adamw(model: Transformer | LSTM, lr: float = 0.0) -> torch.optim.AdamW:
    """Return AdamW with nanoGPT's betas, and weight decay of matrices only. lr = 0 stands for the
    default in LEARNING_RATE."""
    params = list(model.parameters())
    groups = [
        {'params': [p for p in params if p.dim() > 1], 'weight_decay': 0.1},
        {'params': [p for p in params if p.dim() < 2], 'weight_decay': 0.0},
    ]
    lr = lr or LEARNING_RATE['lstm' if model.recurrent else 'transformer']
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)

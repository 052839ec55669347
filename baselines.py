"""
What everybody has, on the same data: torch.nn.LSTM and a plain compiled Transformer, both with torch.optim.AdamW.

    python baselines.py config/demo.py --model=lstm                              # as many parameters as the model of the config
    python baselines.py config/demo.py --model=transformer --n_expert=1 --n_layer=8 --block_size=256
    python baselines.py config/demo.py --model=lstm --speed=True                 # tokens/s against our model, in turns

The settings and config files are train_lm.py's: tokens, batch, T, schedule and validation are the same, and log.jsonl has the same keys.
The LSTM reads the streams of the recurrent model and carries its state; the Transformer reads the sequences of the non-recurrent one
(E = 1). Validation is train_lm.py's for all: val_streams streams, each from an empty state; the Transformer with window W.
The Transformer is nanoGPT's with what is usual today: pre-norm RMSNorm, RoPE, grouped queries, squared ReLU, no biases, untied head,
scaled_dot_product_attention, compiled as a whole. The LSTM runs as torch gives it (cuDNN on a GPU).
"""

import math
import os
import shutil
import sys
import time

from configurator import (
    configure,
    every,
    fail,
    run_script,
    write_json,
)  # before torch: how threads wait, what ctrl-C does

import torch
import torch.nn.functional as F
from torch import nn

from checkpoint import (
    RUN_FILES,
    JsonlLog,
    check_model,
    compiles,
    last_words,
    pick_device,
    pick_dtype,
    prepare_out_dir,
    release,
    set_threads,
)
from data_fineweb import VOCAB, SequenceLoader, StreamLoader, find_shards, load_val, token_bytes
from kernels import apply_rope, rope_table
from model import ModelConfig, build_model, norm, window_mask
from muon import lr_at
from train_lm import autocast, compile_on_zeros, evaluate

# -----------------------------------------------------------------------------
# fmt: off
# the baseline
model = 'lstm'                 # 'lstm' or 'transformer'
lstm_layers = 1                # one wide layer: at small sizes as good as two narrow ones, and faster
baseline_lr = 0.0              # AdamW's peak; 0: 2e-3 for the LSTM, 1e-3 for the Transformer, usual at a few million parameters
lr_scan = ()                   # peaks to try, such as (1e-3,2e-3,4e-3): a whole run each, the best one's log is kept as log.jsonl
baseline_decay = 0.1           # AdamW's, of matrices; nanoGPT's
baseline_betas = (0.9, 0.95)   # AdamW's; nanoGPT's
speed = False                  # measure tokens/s against our model of the same settings instead of training
rounds = 5                     # speed: measurements of each variant, in turns
bench_seconds = 0.5            # speed: least length of one measurement
out = ''                       # speed: JSON file; '': results/<device>/baseline_<model>.json
# I/O, as in train_lm.py
out_dir = 'out/lm'             # '_lstm' or '_transformer' is appended, so that a config's own run stays
data_dir = 'data/fineweb'      # shards made by data_fineweb.py
overwrite = False              # replace a run that is in that folder
eval_interval = 250            # updates between validations
log_interval = 1               # updates between printed lines
# data
tokenizer = 'gpt2'             # 'gpt2' or 'bytes'
tokens_per_step = 131072       # tokens of an update
batch_size = 0                 # rows at a time; 0: all of an update's
val_tokens = 10485760          # validation tokens
val_streams = 512              # read as so many streams
# the model of ours that the baseline stands beside
recurrent = True               # the LSTM has the parameters of: True: RecurrentGPT, False: GPT; the Transformer is always GPT's twin
n_layer = 2                    # L
n_expert = 8                   # E; 1 for the Transformer
n_embd = 768                   # D; of the LSTM its embedding's width
n_head = 0                     # as in model.py
n_kv_head = 0                  # as in model.py
window = 128                   # W; of the Transformer at validation
block_size = 64                # T
aggregation = 'sqrt_sum'       # as in model.py, counts in the LSTM's parameters
share_kv = True                # as in model.py
residual = 'expert'            # as in model.py
router_dim = 64                # as in model.py
# training
max_iters = 10000              # updates
grad_clip = 1.0                # global norm; 0 disables
warmup_iters = 100             # then a cosine
final_lr_ratio = 0.01          # of the peak, at the last update
seed = 1337                    # of the initial weights
device = 'auto'                # 'auto': cuda if there is one; or 'cpu', 'cuda', 'cuda:1'
dtype = 'auto'                 # 'float32', 'bfloat16' or 'auto'; on a CPU torch's LSTM is no faster in bfloat16
compile = True                 # the Transformer; falls back, saying so. --speed measures it compiled in any case
threads = 0                    # CPU threads; 0: torch's choice
# train_lm.py's settings that mean nothing here, so that its config files can be read
learning_rate = 2e-2           # Muon's; the baseline's is baseline_lr
embedding_lr = 0.2             # our AdamW's
head_lr = 0.004                # our AdamW's
scalar_lr = 2e-2               # our AdamW's
momentum = 0.95                # Muon's
weight_decay = 0.01            # Muon's; the baseline's is baseline_decay
adam_eps = 1e-10               # our AdamW's
betas = (0.8, 0.95)            # our AdamW's; the baseline's are baseline_betas
resume = False                 # baselines are short runs: they start over
eval_only = False              # they keep no checkpoint
plot = False                   # log.jsonl has the curve
tensorboard = False            # log.jsonl again
wandb = False                  # the same
graphs = True                  # CUDA graphs are our model's
path = 'fast'                  # --speed measures 'fast' and 'compiled'
# fmt: on
# -----------------------------------------------------------------------------

ELSEWHERE = {
    'learning_rate': 'baseline_lr',
    'weight_decay': 'baseline_decay',
    'betas': 'baseline_betas',
}
PEAK_LR = {'lstm': 2e-3, 'transformer': 1e-3}
OUR_PATHS = ('fast', 'compiled')  # that --speed measures


class LSTM(nn.Module):
    """Embedding, torch.nn.LSTM, linear head. The state is nn.LSTM's (h, c), None for zeros."""

    def __init__(self, V, D, hidden, layers):
        super().__init__()
        self.embedding = nn.Embedding(V, D)
        self.lstm = nn.LSTM(D, hidden, layers, batch_first=True)
        self.head = nn.Linear(hidden, V)
        with torch.no_grad():
            for l in range(
                layers
            ):  # forget gates start open (Jozefowicz et al., 2015); gates are stored in the order i, f, g, o
                getattr(self.lstm, f'bias_ih_l{l}')[hidden : 2 * hidden] = 1

    def init_state(self, B: int) -> None:
        return None

    def forward(
        self,
        idx: torch.Tensor,
        targets: torch.Tensor,
        state: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """idx, targets (B, T) -> mean cross-entropy in nats, the state to carry, detached."""
        x, state = self.lstm(self.embedding(idx), state)  # (B, T, hidden)
        loss = F.cross_entropy(self.head(x).flatten(0, 1).float(), targets.flatten())
        return loss, tuple(s.detach() for s in state)


class Block(nn.Module):
    """Pre-norm attention and FFN. RMSNorm has no gain, as in ours, so that the sizes are the same."""

    def __init__(self, D, H, G, L):
        super().__init__()
        self.heads, self.K = (H, G, G), D // H
        self.qkv = nn.Linear(D, (H + 2 * G) * self.K, bias=False)
        self.out = nn.Linear(D, D, bias=False)
        self.up = nn.Linear(D, 4 * D, bias=False)
        self.down = nn.Linear(4 * D, D, bias=False)
        for linear in (self.qkv, self.up, self.out, self.down):
            linear.weight.data.normal_(
                0, 0.02 / math.sqrt(2 * L) if linear in (self.out, self.down) else 0.02
            )  # GPT-2's

    def forward(
        self,
        x: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        mask: torch.Tensor | None,
        cache: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]:
        """x (B, T, D). cache: None, or keys (not rotated) and values of the last W tokens (B, G, W, K). -> x, the next cache"""
        B, T, D = x.shape
        q, k, v = (
            y.transpose(1, 2) for y in self.qkv(norm(x)).view(B, T, -1, self.K).split(self.heads, 2)
        )
        if cache is not None:
            k, v = torch.cat([cache[0].to(k.dtype), k], 2), torch.cat([cache[1].to(v.dtype), v], 2)
            cache = k[:, :, T:], v[:, :, T:]
        cos, sin = rope
        q, k = apply_rope(q, cos[-T:], sin[-T:]).to(v.dtype), apply_rope(k, cos, sin).to(v.dtype)
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=q.size(1) != k.size(1)
        )
        x = x + self.out(y.transpose(1, 2).reshape(B, T, D))
        return x + self.down(F.relu(self.up(norm(x))).square()), cache


class Transformer(nn.Module):
    """Without a state: causal attention over the chunk. The state, for validation: each block's cache and how full it is."""

    def __init__(self, V, c):
        super().__init__()
        self.config = c
        self.embedding = nn.Embedding(V, c.n_embd)
        self.blocks = nn.ModuleList(
            Block(c.n_embd, c.n_head, c.n_kv_head, c.n_layer) for _ in range(c.n_layer)
        )
        self.head = nn.Linear(c.n_embd, V, bias=False)
        for weight in (self.embedding.weight, self.head.weight):
            weight.data.normal_(0, 0.02)

    def init_state(self, B: int) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], torch.Tensor]:
        c, device = self.config, self.head.weight.device
        cache = torch.zeros(B, c.n_kv_head, c.window, c.head_dim, device=device)
        return [(cache, cache)] * c.n_layer, torch.zeros(B, dtype=torch.int64, device=device)

    def forward(
        self, idx: torch.Tensor, targets: torch.Tensor, state: tuple | None = None
    ) -> tuple[torch.Tensor, tuple | None]:
        T, W = idx.size(1), self.config.window
        x, new, mask = self.embedding(idx), [], None
        caches, count = state if state is not None else ([None] * len(self.blocks), None)
        if state is not None:
            mask = window_mask(count, T, W)
        rope = rope_table(T if state is None else W + T, self.config.head_dim, x)
        for block, cache in zip(self.blocks, caches, strict=True):
            x, cache = block(x, rope, mask, cache)
            new.append(cache)
        loss = F.cross_entropy(self.head(norm(x)).flatten(0, 1).float(), targets.flatten())
        return loss, None if state is None else (new, (count + T).clamp(max=W))


def count_params(net: nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


def match_hidden(V: int, D: int, layers: int, target: int) -> int:
    """The hidden size whose LSTM has as near to `target` parameters as can be, at least 98% of them; a multiple of 8, which a GPU
    likes, where that is within 1%. ValueError where even a hidden size of 1 has more."""

    def params(h):
        return V * D + 4 * h * (D + h + 2) + (layers - 1) * 4 * h * (2 * h + 2) + V * (h + 1)

    if params(1) > 1.02 * target:
        raise ValueError(
            f'an LSTM with embedding and head for V = {V}, D = {D} has more than {target} parameters: lower n_embd'
        )
    below = 1
    while params(below + 1) <= target:
        below += 1
    best = min(
        (h for h in (below, below + 1) if params(h) >= 0.98 * target),
        key=lambda h: abs(params(h) - target),
    )
    eights = [
        h
        for h in (best // 8 * 8, best // 8 * 8 + 8)
        if h > 0 and abs(params(h) / target - 1) <= 0.01
    ]
    return min(eights, key=lambda h: abs(params(h) - target)) if eights else best


def our_config(config: dict) -> ModelConfig:
    """ModelConfig of our model for the same settings. ValueError where sizes do not fit."""
    if config['model'] == 'transformer' and config['n_expert'] != 1:
        raise ValueError(
            f"n_expert = {config['n_expert']}: model = 'transformer' is the twin of GPT with n_expert = 1, give its n_layer too"
        )
    names = (
        'n_layer',
        'n_expert',
        'n_embd',
        'n_head',
        'n_kv_head',
        'window',
        'block_size',
        'aggregation',
        'share_kv',
        'residual',
        'router_dim',
    )
    return ModelConfig(VOCAB[config['tokenizer']], **{name: config[name] for name in names})


def build(config: dict) -> tuple[LSTM | Transformer, dict]:
    """-> the baseline and its description."""
    c = our_config(config)
    is_recurrent = config['model'] == 'lstm' and config['recurrent']
    check_model(lambda config: build_model(config, is_recurrent), c, 3)  # the baseline is as large
    with torch.device('meta'):  # only to count
        ours = build_model(c, is_recurrent)
    target, flops = ours.num_params()['total'], sum(ours.flops_per_token().values())
    torch.manual_seed(config['seed'])
    if config['model'] == 'lstm':
        hidden = match_hidden(c.vocab_size, c.n_embd, config['lstm_layers'], target)
        net = LSTM(c.vocab_size, c.n_embd, hidden, config['lstm_layers'])
        flops = 2.0 * sum(
            p.numel()
            for name, p in net.named_parameters()
            if 'weight' in name and 'embedding' not in name
        )
        what = {'name': f'nn.LSTM, {config["lstm_layers"]} x {hidden}', 'hidden': hidden}
    else:
        net, what = Transformer(c.vocab_size, c), {'name': 'plain Transformer'}
    return net, {
        **what,
        'params': count_params(net),
        'params_of_ours': target,
        'flops_per_token': flops,
    }


def make_adamw(net: nn.Module, lr: float, config: dict) -> torch.optim.AdamW:
    matrices, rest = (
        [p for p in net.parameters() if p.dim() > 1],
        [p for p in net.parameters() if p.dim() < 2],
    )
    groups = [
        {'params': matrices, 'weight_decay': config['baseline_decay']},
        {'params': rest, 'weight_decay': 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group['params']],
        lr=lr,
        betas=config['baseline_betas'],
        fused=True,
    )


# ----------------------------------------------------------------------------- training


def update(
    run: nn.Module,
    params: list[nn.Parameter],
    optimizer: torch.optim.Optimizer,
    loader: StreamLoader | SequenceLoader,
    states: list[tuple | None],
    micro: int,
    lr: float,
    config: dict,
    kind: str,
    amp: torch.dtype,
) -> tuple[float, float]:
    """One update: forward and backward of all micro-batches, clip, step. states: one a micro-batch, replaced in place."""
    x, y, reset = loader.next()
    total = torch.zeros((), device=kind)
    for i, (x_i, y_i) in enumerate(
        zip(x.to(kind).split(micro), y.to(kind).split(micro), strict=True)
    ):
        with autocast(kind, amp):
            loss, states[i] = run(x_i, y_i, None if reset else states[i])
        loss = loss * (x_i.numel() / x.numel())
        loss.backward()
        total += loss.detach()
    grad_norm = torch.nn.utils.clip_grad_norm_(params, config['grad_clip'] or math.inf)
    for group in optimizer.param_groups:
        group['lr'] = lr
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return total.item(), grad_norm.item()


def train(config: dict, lr: float, log_path: str, kind: str, amp: torch.dtype) -> dict:
    """One run at peak rate `lr`, logged to log_path. -> a dict of its results."""
    T, V, steps = config['block_size'], VOCAB[config['tokenizer']], config['max_iters']
    B = config['tokens_per_step'] // T
    micro = min(config['batch_size'] or B, B)
    loader_class = StreamLoader if config['model'] == 'lstm' else SequenceLoader
    loader = loader_class(find_shards(config['data_dir'], 'train', config['tokenizer']), B, T, V)
    val = load_val(
        find_shards(config['data_dir'], 'val', config['tokenizer']),
        config['val_tokens'],
        config['val_streams'],
        V,
    )
    val = (*val, int(token_bytes(config['tokenizer'])[val[1].numpy()].sum()))
    net, what = build(config)
    run = net = net.to(kind)
    print(
        f'{what["name"]}: {what["params"]:,} parameters (ours {what["params_of_ours"]:,}), peak learning rate {lr}',
        flush=True,
    )
    if config['compile'] and config['model'] == 'transformer':
        run = torch.compile(net, dynamic=False)
        if not compiles(run, lambda: compile_on_zeros(run, micro, T, kind, amp)):
            run = net
    params, optimizer = list(net.parameters()), make_adamw(net, lr, config)
    due = every()
    states, log, seconds, best, record = (
        [None] * math.ceil(B / micro),
        JsonlLog(log_path),
        0.0,
        math.inf,
        {'step': 0, 'tokens': 0},
    )
    for step in range(steps + 1):
        if step % config['eval_interval'] == 0 or step == steps:
            val_loss, bpb = evaluate(net, val, micro, T, kind, amp)
            record |= {'val_loss': val_loss, 'val_bits_per_byte': bpb}
            best = min(best, val_loss)
            print(
                f'step {step}/{steps} | val loss {val_loss:.4f} | {bpb:.4f} bits per byte',
                flush=True,
            )
        log.write(record)
        if step == steps:
            break
        rate, start = (
            lr * lr_at(step, steps, config['warmup_iters'], config['final_lr_ratio']),
            time.perf_counter(),
        )
        loss, grad_norm = update(
            run, params, optimizer, loader, states, micro, rate, config, kind, amp
        )
        elapsed = time.perf_counter() - start
        seconds += elapsed
        record = {
            'step': step + 1,
            'tokens': (step + 1) * B * T,
            'train_loss': loss,
            'grad_norm': grad_norm,
            'lr': rate,
            'ms': 1000 * elapsed,
            'tokens_per_s': B * T / elapsed,
            'seconds': seconds,
            'epoch': loader.epoch,
        }
        if not math.isfinite(loss):
            print(f'update {step + 1}: loss {loss}, stopped: lower the learning rate', flush=True)
            val_loss = bpb = best = math.nan
            break
        if (step + 1) % config['log_interval'] == 0 or due():
            print(
                f'step {step + 1}/{steps} | loss {loss:.4f} | lr {rate:.2e} | norm {grad_norm:.2f} | {1000 * elapsed:.0f} ms | '
                f'{B * T / elapsed:,.0f} tok/s',
                flush=True,
            )
    log.close()
    return {
        **what,
        'learning_rate': lr,
        'val_loss': val_loss,
        'val_bits_per_byte': bpb,
        'best_val_loss': best,
        'tokens': steps * B * T,
        'seconds': seconds,
        'log': log_path,
    }


def train_all(config: dict, kind: str, amp: torch.dtype) -> None:
    """A run, or one for each rate of lr_scan; result.json tells of all, log.jsonl is the best one's."""
    folder = f'{config["out_dir"]}_{config["model"]}'
    prepare_out_dir(folder, False, config['overwrite'], (*RUN_FILES, 'log_*.jsonl', 'result.json'))
    results = []
    for lr in config['lr_scan'] or (config['baseline_lr'] or PEAK_LR[config['model']],):
        log_path = os.path.join(folder, f'log_{lr:g}.jsonl' if config['lr_scan'] else 'log.jsonl')
        results.append(train(config, lr, log_path, kind, amp))
    best = min(results, key=lambda r: r['val_loss'] if math.isfinite(r['val_loss']) else math.inf)
    if config['lr_scan']:
        shutil.copyfile(best['log'], os.path.join(folder, 'log.jsonl'))
    write_json(
        {'config': config, 'best': best, 'runs': results},
        os.path.join(folder, 'result.json'),
    )
    release(folder)
    print(
        f'done: {best["name"]}, {best["params"]:,} parameters, learning rate {best["learning_rate"]:g}: val loss {best["val_loss"]:.4f} nats, '
        f'{best["val_bits_per_byte"]:.4f} bits per byte after {best["tokens"]:,} tokens, {best["seconds"]:.0f} s; {folder}'
    )


def check(config: dict) -> None:
    if config['model'] not in PEAK_LR:
        raise ValueError(f"model = {config['model']!r}: expected 'lstm' or 'transformer'")
    if config['tokenizer'] not in VOCAB:
        raise ValueError(f'tokenizer = {config["tokenizer"]!r}: expected one of {", ".join(VOCAB)}')
    our_config(config)  # refuses sizes before anything is read
    for name in (
        'lstm_layers',
        'rounds',
        'eval_interval',
        'log_interval',
        'max_iters',
        'block_size',
        'tokens_per_step',
        'val_tokens',
        'val_streams',
    ):
        if config[name] < 1:
            raise ValueError(f'{name} = {config[name]}: must be at least 1')
    for name in (
        'batch_size',
        'baseline_lr',
        'baseline_decay',
        'bench_seconds',
        'grad_clip',
        'warmup_iters',
        'threads',
    ):
        if config[name] < 0:
            raise ValueError(f'{name} = {config[name]}: must not be negative')
    if not all(type(lr) in (int, float) and lr > 0 for lr in config['lr_scan']):
        raise ValueError(f'lr_scan = {config["lr_scan"]}: expected learning rates above 0')
    if config['tokens_per_step'] % config['block_size']:
        raise ValueError(
            f'tokens_per_step = {config["tokens_per_step"]}: must be a multiple of block_size = {config["block_size"]}'
        )
    for argument in sys.argv[1:]:
        key = argument.partition('=')[0][2:]
        if key in ELSEWHERE:  # given by hand it is a mistake, in a config file it is our model's
            raise ValueError(
                f"--{key} is our model's optimizer: the baseline's setting is --{ELSEWHERE[key]}"
            )


def main() -> None:
    config = configure(globals())
    try:
        check(config)
        kind = pick_device(device)
        amp = pick_dtype(dtype, kind)
        if kind.startswith('cuda'):
            torch.cuda.set_device(kind)
            torch.set_float32_matmul_precision('high')  # as train_lm.py
        set_threads(threads)
        train_all(config, kind, amp)
    except ValueError as error:  # DataError, OutDirError, SizeError, ModelConfig's
        fail(error)
    except (RuntimeError, MemoryError) as error:  # no memory
        fail(last_words(error, f'{out_dir}_{config["model"]}', 'a smaller batch_size takes less'))


if __name__ == '__main__':
    run_script(main)

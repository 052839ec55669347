"""
Train a language model: the recurrent Parallel-Experts Transformer or its non-recurrent twin.

On a CPU, five minutes, everything included (prepares data, trains, samples):
$ make demo
One GPU:
$ python train_lm.py config/small_L2.py
Four GPUs on one machine; the same batch, split over ranks:
$ torchrun --standalone --nproc_per_node=4 train_lm.py config/small_L2.py
The non-recurrent twin of any config, at the same levels, experts and width:
$ python train_lm.py config/small_L2.py --recurrent=False --block_size=256 --out_dir=out/small_L2_gpt
Go on after a crash, ctrl-C, SIGTERM or a closed terminal:
$ python train_lm.py config/small_L2.py --resume=True

Writes into out_dir: config.json, log.jsonl (one object a line), ckpt_last.pt, ckpt_prev.pt, ckpt_best.pt. A log line of step n
describes update n; val_loss there is measured after it. On the CPU a resumed run is bit-equal to one that was never stopped.
"""

import math
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

from configurator import (
    configure,
    every,
    fail,
    run_script,
)  # before torch: how threads wait, what ctrl-C does

import torch
import torch.distributed as dist

from checkpoint import (
    BEST,
    LAST,
    PREV,
    CheckpointError,
    JsonlLog,
    Stopper,
    compiles,
    device_memory,
    device_name,
    join_ranks,
    last_words,
)
from checkpoint import (
    load_optimizers,
    load_position,
    load_run,
    load_weights,
    need_packages,
    pick_dtype,
    prepare_out_dir,
)
from checkpoint import (
    print0,
    release,
    restarted,
    restoring,
    rng_state,
    save_checkpoint,
    set_rng_state,
    write_config,
)
from data_fineweb import (
    VOCAB,
    DataError,
    SequenceLoader,
    StreamLoader,
    find_shards,
    fingerprint,
    load_val,
    token_bytes,
)
from figures import open_trackers, plot_losses
from kernels import chosen_lines, graphed
from model import LanguageModel, ModelConfig, State, build_model, config_dict, memory
from muon import Muon, lr_at
from ranks import Buckets, gather_state, scatter_state

# -----------------------------------------------------------------------------
# fmt: off
# I/O
out_dir = 'out/lm'             # everything a run writes goes here
data_dir = 'data/fineweb'      # shards made by data_fineweb.py
resume = False                 # go on from out_dir's last checkpoint
overwrite = False              # replace a run that is in out_dir
eval_interval = 250            # updates between validations and checkpoints
eval_only = False              # validate out_dir's last checkpoint and stop
log_interval = 1               # updates between printed lines; log.jsonl has them all
plot = False                   # draw out_dir/loss.png at the end (matplotlib)
tensorboard = False            # also write TensorBoard files into out_dir
wandb = False                  # also log to Weights & Biases
wandb_project = 'parallel-experts'   # its project there
# data
tokenizer = 'gpt2'             # 'gpt2' or 'bytes'; must be the one the shards were made with
tokens_per_step = 131072       # tokens of an update, over all ranks and micro-batches (the paper's)
batch_size = 0                 # rows a rank runs at a time; micro-batches follow from it. 0: what the device's memory holds (AT_ONCE)
val_tokens = 10485760          # validation tokens: modded-nanogpt's and llm.c's 10,485,760
val_streams = 512              # they are read as so many streams, whatever the batch, the ranks or the kind of model
# model (model.py has the equations)
recurrent = True               # True: RecurrentGPT, False: GPT
n_layer = 2                    # L, depth levels; L * E = 16 blocks of width 768 is the small budget
n_expert = 8                   # E, experts a level
n_embd = 768                   # D, width
n_head = 0                     # query heads; 0: D/96 if D % 192 == 0, else D/64 if D % 128 == 0
n_kv_head = 0                  # key-value heads; 0: half of n_head
window = 128                   # W, attention window (GPT: at evaluation only; it trains on whole sequences)
block_size = 64                # T, tokens of a training chunk; the paper: 64 recurrent, 256 or 2048 not
aggregation = 'sqrt_sum'       # 'sqrt_sum', 'mean', 'softmax_mean' or 'softmax_l2'
share_kv = True                # recurrent: one cache entry a level for all experts; False: each its own
residual = 'expert'            # GPT: 'expert' (each keeps its own, the paper's rule) or 'shared'
router_dim = 64                # width of the router's queries and keys (softmax aggregations)
# optimizer
max_iters = 10000              # updates: 1.3B tokens
learning_rate = 2e-2           # Muon's peak, for the core's and the router's matrices
embedding_lr = 0.2             # AdamW's, at D = 768; scaled by (D/768)^-0.5
head_lr = 0.004                # the same
scalar_lr = 2e-2               # AdamW's for a, b, router biases and expert embeddings; ours
momentum = 0.95                # Muon's, Nesterov
weight_decay = 0.01            # cautious, Muon's matrices only
betas = (0.8, 0.95)            # AdamW's
grad_clip = 1.0                # global norm; 0 disables
warmup_iters = 100             # then a cosine
adam_eps = 1e-10               # AdamW's; head gradients are tiny, a mean over 131,072 tokens
final_lr_ratio = 0.01          # of every peak, at the last update
# system
seed = 1337                    # of the initial weights, of the order of the shards and of where each is begun
device = 'auto'                # 'auto': cuda if there is one; or 'cpu', 'cuda', 'cuda:1'
dtype = 'auto'                 # of matrix products: 'float32' or 'bfloat16'; 'auto': bfloat16 where the processor is fast at it
compile = True                 # torch.compile the unroll's pieces or GPT's blocks; falls back, saying so
graphs = True                  # CUDA: an update's parts as graphs, from the fourth time each runs (see WHOLE_GRAPH; long chunks: with compile)
path = 'fast'                  # recurrent: 'fast' (unroll.Unroll) or 'plain' (the equations, for checking)
threads = 0                    # CPU threads; 0: torch's choice
# fmt: on
# -----------------------------------------------------------------------------

FIXED = (
    'tokenizer',
    'tokens_per_step',
    'recurrent',
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
    'seed',
)  # a resumed run cannot change these
POSITION = ('step', 'record', 'best', 'seconds')  # a run's, saved and restored
WHOLE_GRAPH = 2048  # levels x tokens of the longest recurrent chunk that is one graph: it has some 35 nodes a level and token
AT_ONCE = (
    32768  # tokens of a micro-batch where batch_size = 0, or fewer: a quarter of the paper's update
)
PEAK_FLOPS = {
    'H100': 989e12,
    'H200': 989e12,
    'A100': 312e12,
    'B200': 2250e12,
    'L40S': 362e12,
    '4090': 165e12,
}  # dense bf16


def check_settings(world: int) -> None:
    for name in (
        'eval_interval',
        'log_interval',
        'max_iters',
        'block_size',
        'tokens_per_step',
        'val_tokens',
        'val_streams',
    ):
        if globals()[name] < 1:
            fail(f'{name} = {globals()[name]}: must be at least 1')
    for name in (
        'batch_size',
        'learning_rate',
        'embedding_lr',
        'head_lr',
        'scalar_lr',
        'weight_decay',
        'grad_clip',
        'warmup_iters',
        'adam_eps',
        'threads',
    ):
        if globals()[name] < 0:
            fail(f'{name} = {globals()[name]}: must not be negative')
    if tokens_per_step % (block_size * world):
        fail(
            f'tokens_per_step = {tokens_per_step}: must be a multiple of block_size x ranks = {block_size} x {world}'
        )
    if not (
        0 <= momentum < 1
        and len(betas) == 2
        and all(0 <= b < 1 for b in betas)
        and 0 <= final_lr_ratio <= 1
    ):
        fail(
            f'momentum = {momentum}, betas = {betas}, final_lr_ratio = {final_lr_ratio}: expected numbers in [0, 1), two of them for betas'
        )
    if seed < 0:
        fail(f'seed = {seed}: must not be negative')
    if val_streams < world:
        fail(f'val_streams = {val_streams}: must be at least the number of ranks, {world}')
    if path not in ('fast', 'plain'):
        fail(f"path = {path!r}: expected 'fast' or 'plain' (compile is a setting of its own)")
    need_packages(matplotlib=plot, tensorboard=tensorboard, wandb=wandb)
    if tokenizer not in VOCAB:
        fail(f'tokenizer = {tokenizer!r}: expected one of {", ".join(VOCAB)}')


def autocast(kind: str, amp: torch.dtype) -> torch.autocast | nullcontext:
    return torch.autocast(torch.device(kind).type, amp) if amp != torch.float32 else nullcontext()


def make_optimizers(model: LanguageModel) -> list[torch.optim.Optimizer]:
    """Muon for matrices, AdamW for the rest; each group keeps its peak in 'peak_lr'. The rates are tensors on the device: a CUDA graph
    reads them there."""
    groups, width = model.param_groups(), (n_embd / 768) ** -0.5
    adamw = [
        {'params': groups[name], 'lr': lr}
        for name, lr in (
            ('embedding', embedding_lr * width),
            ('head', head_lr * width),
            ('scalars', scalar_lr),
        )
        if groups[name]
    ]
    optimizers = [
        Muon(groups['matrices'], lr=learning_rate, momentum=momentum, weight_decay=weight_decay),
        torch.optim.AdamW(
            adamw,
            betas=betas,
            eps=adam_eps,
            weight_decay=0.0,
            fused=True,
            capturable=model.embedding.is_cuda,
        ),
    ]
    optimizers[1]._warned_capturable_if_run_uncaptured = True  # its first steps are, on purpose
    for group in (g for o in optimizers for g in o.param_groups):
        group['peak_lr'], group['lr'] = (
            group['lr'],
            torch.tensor(group['lr'], device=model.embedding.device),
        )
    return optimizers


def captures(kind: str, world: int) -> tuple[bool, bool]:
    """Whether the optimizer is a CUDA graph, and whether forward and backward of a chunk are: on one GPU, and a long recurrent chunk is not.
    Several ranks have messages in both."""
    optimizer = graphs and kind != 'cpu' and world == 1 and path != 'plain'
    return optimizer, optimizer and not (recurrent and n_layer * block_size > WHOLE_GRAPH)


def model_config(config: dict) -> ModelConfig:
    """The model's sizes, of a run's settings. ValueError for those that do not fit together."""
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
        'path',
    )
    return ModelConfig(VOCAB[config['tokenizer']], **{name: config[name] for name in names})


def pick_rows(
    config: ModelConfig, streams: int, total: float, amp: torch.dtype, kind: str, world: int
) -> int:
    """Rows of a micro-batch for batch_size = 0: a rank's `streams`, halved until they are at most AT_ONCE tokens and need no more than
    `total` bytes, or 1."""
    rows = streams
    while rows > 1 and (
        rows * block_size > AT_ONCE or bytes_needed(config, rows, streams, amp, kind, world) > total
    ):
        rows = -(-rows // 2)
    return rows


def bytes_needed(
    config: ModelConfig, rows: int, streams: int, amp: torch.dtype, kind: str, world: int
) -> float:
    """Of one rank, where it runs `rows` of its `streams` at a time."""
    return sum(
        memory(
            config,
            recurrent,
            (rows, streams),
            amp,
            torch.device(kind).type,
            captures(kind, world)[1],
        ).values()
    )


def fitting_rows(config: ModelConfig, streams: int, amp: torch.dtype, kind: str, world: int) -> int:
    """Rows of a micro-batch, of a rank's `streams`. ValueError where they do not fit in the memory that is free, with the number that does.
    The choice itself goes by all of the device's memory: it is the same in every run, and so are a run's bits after a resume."""
    total, free = device_memory(kind)
    rows = min(batch_size or pick_rows(config, streams, total, amp, kind, world), streams)
    need = bytes_needed(config, rows, streams, amp, kind, world)
    if need <= free:
        return rows
    fewer = pick_rows(config, streams, free, amp, kind, world)
    size = f'n_layer = {config.n_layer}, n_expert = {config.n_expert}, n_embd = {config.n_embd}'
    words = f'{size} needs about {need / 1e9:.1f} GB with batch_size = {rows}, but {device_name(kind)} has {free / 1e9:.1f} GB free'
    if fewer < rows and bytes_needed(config, fewer, streams, amp, kind, world) <= free:
        raise ValueError(f'{words}: --batch_size={fewer} fits')
    least = bytes_needed(config, 1, streams, amp, kind, world)
    raise ValueError(
        f'{words}, and {least / 1e9:.1f} GB with 1: a smaller model, fewer tokens_per_step, or more GPUs (torchrun)'
    )


def make_inputs(
    model: LanguageModel, sizes: list[int], kind: str, amp: torch.dtype
) -> tuple[dict[int, tuple], list[State | None]]:
    """sizes: rows of each micro-batch. -> {rows: (x, y, state)}, memory that every update's chunks are put into, and the state of each
    micro-batch between updates, which is that one where no other has as many rows."""

    def fresh(rows):
        with autocast(kind, amp):
            return model.init_state(rows) if recurrent else None

    inputs = {
        rows: (*torch.zeros(2, rows, block_size, dtype=torch.int64, device=kind), fresh(rows))
        for rows in dict.fromkeys(sizes)
    }
    return inputs, [inputs[rows][2] if sizes.count(rows) == 1 else fresh(rows) for rows in sizes]


def copy_state(to: State | None, source: State | None) -> None:
    if to is not source:
        for a, b in zip(to, source, strict=True):
            a.copy_(b.detach())  # path 'plain' has a graph there


def compile_on_zeros(
    model: torch.nn.Module, rows: int, T: int, kind: str, amp: torch.dtype
) -> None:
    idx = torch.zeros(rows, T, dtype=torch.int64, device=kind)
    with autocast(kind, amp):
        loss, _ = model(idx, idx)
    loss.backward()


@torch.no_grad()
def evaluate(
    model: torch.nn.Module,
    val: tuple[torch.Tensor, torch.Tensor, float],
    rows: int,
    T: int,
    kind: str,
    amp: torch.dtype,
) -> tuple[float, float]:
    """Mean loss in nats and bits per byte over all positions of the validation streams, each from an empty state, window W.
    All ranks share the streams. Read in chunks of T tokens of `rows` streams, which has no effect on the value."""
    x, y, size = val  # (S, n) of this rank; bytes of text in y
    total = torch.tensor([0, 0, size], dtype=torch.float64, device=kind)  # nats, tokens, bytes
    due, seen = every(), 0
    for x_rows, y_rows in zip(x.split(rows), y.split(rows), strict=True):
        with autocast(kind, amp):
            state = model.init_state(len(x_rows))
            for x_t, y_t in zip(x_rows.split(T, 1), y_rows.split(T, 1), strict=True):
                loss, state = model(x_t.to(kind), y_t.to(kind), state)
                total[0] += loss.double() * x_t.numel()
                total[1] += x_t.numel()
                seen += x_t.numel()
                if due():
                    print0(f'    validation: {seen:,} of {x.numel():,} tokens')
    if dist.is_initialized():
        dist.all_reduce(total)
    nats, tokens, size = total.tolist()
    return nats / tokens, nats / math.log(2) / size


def forward_backward(
    run: SimpleNamespace, x: torch.Tensor, y: torch.Tensor, state: State | None
) -> None:
    """Adds a micro-batch's gradients and its share of the mean loss to run.buckets; the state goes on in place. Returns nothing, and what it
    reads and writes stays where it is: it may be captured."""
    with autocast(run.kind, run.amp):
        loss, new = run.model(x, y, state)
    loss = loss * (x.numel() / tokens_per_step)  # the mean over the whole batch
    loss.backward()
    run.buckets.extra[0].add_(loss.detach())
    copy_state(state, new)


def apply(run: SimpleNamespace) -> None:
    """Clips by run.norm, then both optimizers."""
    if grad_clip:
        torch.nn.utils.clip_grads_with_norm_(run.model.parameters(), grad_clip, run.norm)
    for optimizer in run.optimizers:
        optimizer.step()


def train_update(run: SimpleNamespace, stop: bool) -> tuple[float, float, bool]:
    """One update: this rank's rows in micro-batches (recurrent ones split slots, not time), gradients and loss summed over ranks.
    Returns the mean loss, the gradient norm and whether any rank was told to stop. Where loss or norm is not finite, no weight changes."""

    def call(captured: bool, name: str, function, *args):
        return graphed(run.graphs, name, function, *args) if captured else function(*args)

    x, y, reset = run.loader.next()
    if run.kind != 'cpu':
        x, y = x.pin_memory(), y.pin_memory()  # the copies below then need not wait
    run.buckets.zero()
    run.buckets.extra[1].fill_(float(stop))
    for i, (x_i, y_i, mine) in enumerate(
        zip(x.split(run.micro), y.split(run.micro), run.states, strict=True)
    ):
        x_in, y_in, state = run.inputs[len(x_i)]
        x_in.copy_(x_i, non_blocking=True)
        y_in.copy_(y_i, non_blocking=True)
        copy_state(state, mine)
        if reset and state is not None:
            for t in state:
                t.zero_()  # as init_state's
        run.buckets.sending = i + 1 == len(run.states)
        call(run.whole, f'chunk of {len(x_i)}', forward_backward, run, x_in, y_in, state)
        copy_state(mine, state)
    run.buckets.finish()
    run.norm.copy_(torch.nn.utils.get_total_norm([p.grad for p in run.model.parameters()]))
    loss, stop, norm = torch.cat(
        [run.buckets.extra, run.norm[None]]
    ).tolist()  # the update's only wait for the device
    if math.isfinite(loss) and math.isfinite(norm):
        for group in (g for optimizer in run.optimizers for g in optimizer.param_groups):
            group['lr'].fill_(group['peak_lr'] * rate(run.step))
        call(run.graphs is not None, 'optimizer', apply, run)
    return loss, norm, stop > 0


def rate(step: int) -> float:
    """Of the update after `step` others, as a fraction of every peak."""
    return lr_at(step, max_iters, warmup_iters, final_lr_ratio)


def mfu_per_rate(run: SimpleNamespace) -> float | None:
    """MFU at one token a second: nominal FLOPs (model.flops_per_token) of forward and backward over the devices' dense bf16 peak.
    None where that is unknown, or products are in fp32."""
    name = device_name(run.kind)
    peak = next(
        (f for gpu, f in PEAK_FLOPS.items() if run.amp == torch.bfloat16 and gpu in name), None
    )
    return 3 * sum(run.model.flops_per_token().values()) / (peak * run.world) if peak else None


def dense_line(record: dict, mfu: float | None) -> str:
    """One update in one line; mfu: of mfu_per_rate."""
    mfu = f'{100 * mfu * record["tokens_per_s"]:.1f}%' if mfu else 'n/a'
    eta = int((max_iters - record['step']) * record['ms'] / 1000)
    return (
        f'step {record["step"]}/{max_iters} | loss {record["train_loss"]:.4f} | lr {record["lr"]:.2e} | norm {record["grad_norm"]:.2f} | '
        f'{record["ms"]:.0f} ms | {record["tokens_per_s"]:,.0f} tok/s | mfu {mfu} | eta {eta // 3600}:{eta // 60 % 60:02d}:{eta % 60:02d}'
    )


def make_run(config: dict) -> SimpleNamespace:
    """Everything a run is: model, optimizers, data, recurrent states (one a micro-batch), its position, and what stays in one place for
    CUDA graphs: inputs, gradients with loss and stop flag (buckets), norm."""
    rank, world, kind = join_ranks(device, threads)
    amp = pick_dtype(dtype, kind)
    check_settings(world)
    torch.manual_seed(seed)
    V, rows = VOCAB[tokenizer], tokens_per_step // block_size  # rows of an update, over all ranks
    sizes = model_config(config)
    micro = fitting_rows(
        sizes, rows // world, amp, kind, world
    )  # at a time; the last micro-batch may have fewer
    shards = {split: find_shards(data_dir, split, tokenizer) for split in ('train', 'val')}
    loader = (StreamLoader if recurrent else SequenceLoader)(
        shards['train'], rows, block_size, V, seed, (rank, world)
    )
    x, y = load_val(shards['val'], val_tokens, val_streams, V, (rank, world))
    model = build_model(sizes, recurrent).to(kind)
    inputs, states = make_inputs(
        model, [min(micro, rows // world - i) for i in range(0, rows // world, micro)], kind, amp
    )
    arriving = sorted(
        reversed(list(model.parameters())), key=lambda p: p is not model.head
    )  # a backward's order: head, levels, embedding
    optimizer_is_captured, whole = captures(kind, world)
    return SimpleNamespace(
        rank=rank,
        world=world,
        kind=kind,
        amp=amp,
        config=config,
        model=model,
        optimizers=make_optimizers(model),
        loader=loader,
        shards=fingerprint([*shards['train'], *shards['val']]),
        val=(x.to(kind), y.to(kind), text_bytes(y)),
        micro=micro,
        inputs=inputs,
        states=states,
        buckets=Buckets(arriving, 2),
        norm=torch.zeros((), device=kind),
        graphs={} if optimizer_is_captured else None,
        whole=whole,
        step=0,
        record={'step': 0, 'tokens': 0},
        best=math.inf,
        seconds=0.0,
    )


def text_bytes(y: torch.Tensor) -> float:
    """Bytes of text that the tokens stand for; NaN where GPT-2's tokenizer is not installed: training needs it for nothing else."""
    try:
        return float(token_bytes(tokenizer)[y.numpy()].sum())
    except (DataError, ImportError) as error:
        print0(f'no bits per byte: {error}')
        return math.nan


def snapshot(run: SimpleNamespace) -> dict:
    """What sample.py needs: all that the best checkpoint holds. A run goes on from the last one."""
    return {
        'model': run.model.state_dict(),
        'model_config': config_dict(run.model.config),
        'recurrent': recurrent,
        'config': run.config,
        **{k: getattr(run, k) for k in POSITION},
    }


def save(run: SimpleNamespace) -> None:
    """Everything, as the last checkpoint; the one before is kept too."""
    state = gather_state(run.states)
    if run.rank == 0:
        rest = {
            'optimizers': [o.state_dict() for o in run.optimizers],
            'loader': run.loader.state_dict(),
            'state': state,
            'rng': rng_state(),
            'shards': run.shards,
        }
        save_checkpoint(snapshot(run) | rest, os.path.join(out_dir, LAST), PREV)


def load(run: SimpleNamespace) -> None:
    """Go on where out_dir's last checkpoint stood; refuse settings and data that would make it another run. eval_only: the weights alone."""
    rest = () if eval_only else ('optimizers', 'loader', 'state', 'rng', 'shards')
    saved, where = load_run(out_dir, 'train_lm.py', ('model', *POSITION, *rest), FIXED, run.config)
    load_weights(run.model, saved['model'], where)
    load_position(run, saved, POSITION, where)
    print0(f'{where}: step {run.step}')
    if eval_only:
        return
    check_shards(run, saved, where)
    load_optimizers(run.optimizers, saved['optimizers'], where)
    with restoring(where, 'loader'):
        run.loader.load_state_dict(saved['loader'])
    with restoring(where, 'state'):
        if recurrent:
            scatter_state(saved['state'], run.states, run.world, run.rank)
    with restoring(where, 'rng'):
        set_rng_state(saved['rng'])


def check_shards(run: SimpleNamespace, saved: dict, where: Path) -> None:
    """CheckpointError where the run had other shards."""
    if saved['shards'] == run.shards:
        return
    with restoring(where, 'shards'):
        differ = {tuple(shard) for shard in saved['shards']} ^ {
            tuple(shard) for shard in run.shards
        }
        name = min(shard[0] for shard in differ)
    raise CheckpointError(
        f'{where}: was trained on other shards than those in {data_dir} ({name} differs, or is there '
        'only once): give the same data_dir, or another out_dir'
    )


def describe(run: SimpleNamespace) -> str:
    params, flops = run.model.num_params(), run.model.flops_per_token()
    return (
        f'torch {torch.__version__}, python {sys.version.split()[0]}, {run.world} x {device_name(run.kind)} ({torch.get_num_threads()} threads), {str(run.amp)[6:]} products\n'
        f'{type(run.model).__name__}: {params["total"] / 1e6:.2f}M parameters ({params["core"] / 1e6:.2f}M core), '
        f'{flops["core"] / 1e6:.1f} + {flops["head"] / 1e6:.1f} MFLOP a token forward (core + head)\n'
        f'an update: {tokens_per_step:,} tokens = {run.world} ranks x {len(run.states)} micro-batches x {run.micro} rows x {block_size}; '
        f'{max_iters:,} updates = {max_iters * tokens_per_step / 1e6:,.1f}M tokens; '
        f'validation on {val_tokens // val_streams * val_streams:,} tokens'
    )


def evaluate_run(run: SimpleNamespace) -> tuple[float, float]:
    return evaluate(
        run.model, run.val, run.micro, min(block_size, 128), run.kind, run.amp
    )  # longer chunks only cost memory


def validate(run: SimpleNamespace) -> None:
    val_loss, bpb = evaluate_run(run)
    run.record |= {'val_loss': val_loss, 'val_bits_per_byte': bpb}
    print0(f'step {run.step}/{max_iters} | val loss {val_loss:.4f} | {bpb:.4f} bits per byte')
    if val_loss < run.best:
        run.best = val_loss
        if run.step > 0 and run.rank == 0:
            save_checkpoint(snapshot(run), os.path.join(out_dir, BEST))


def begin(config: dict) -> tuple[SimpleNamespace, tuple]:
    """The run, new or resumed, and its trackers. Whatever can be wrong with the settings and the data is found before out_dir is touched.
    ValueError says what."""
    run = make_run(config)
    writes = run.rank == 0 and not eval_only
    if writes:
        prepare_out_dir(out_dir, resume, overwrite)
    if resume or eval_only:
        load(run)
    project = wandb_project if writes and wandb else ''
    return run, open_trackers(config, writes and tensorboard, project)


def prepare(run: SimpleNamespace) -> None:
    """What speed needs before the first update: compiles for every size of micro-batch, where that works. Chunks that are not captured whole
    are replayed from captured blocks, by the model itself."""
    if compile and path != 'plain':
        run.model.config.path = 'compiled'
        if graphs and recurrent and run.kind != 'cpu':  # nothing captures a validation whole
            run.model.config.path = 'captured' if run.whole else 'graphed'

        def once():
            for rows in run.inputs:
                compile_on_zeros(run.model, rows, block_size, run.kind, run.amp)

        if not compiles(run.model, once):
            run.model.config.path = 'fast'
        for line in chosen_lines():
            print0(f'Triton or compiled, measured: {line}')


def train(config: dict) -> int:
    """Returns the exit status: 0 done, 1 the loss was not finite, 128 + signal when told to stop."""
    try:
        run, (track, close) = begin(config)
    except (
        ValueError
    ) as error:  # DataError, CheckpointError, OutDirError, ModelConfig's, pick_device's
        fail(error)
    print0(describe(run))
    if eval_only:
        val_loss, bpb = evaluate_run(run)
        print0(f'step {run.step}, val loss {val_loss:.4f}, {bpb:.4f} bits per byte')
        return 0
    prepare(run)
    mfu, log = mfu_per_rate(run), None
    if run.rank == 0:
        write_config(config, out_dir, run.kind)
        # the checkpoint's own step is validated and logged again: the run may have died in between
        log = JsonlLog(
            os.path.join(out_dir, 'log.jsonl'), resume_step=run.step - 1 if resume else None
        )
    stopper, stop, status = Stopper(), False, 0
    due_to_print = every()
    while True:
        if run.step % eval_interval == 0 or run.step == max_iters:
            validate(run)
        if run.rank == 0:
            log.write(run.record)
            track(run.record)
        if run.step >= max_iters or stop:
            break
        start, epoch = time.perf_counter(), run.loader.epoch
        loss, norm, stop = train_update(run, stopper.signal is not None)
        elapsed = time.perf_counter() - start
        due = (run.step + 1) % eval_interval == 0 or run.step + 1 == max_iters or stop
        if (
            not (math.isfinite(loss) and math.isfinite(norm))
            or due
            and not all(p.isfinite().all() for p in run.model.parameters())
        ):
            kept = LAST if os.path.exists(os.path.join(out_dir, LAST)) else 'none yet'
            print0(
                f'error: update {run.step + 1}: loss {loss}, gradient norm {norm}, or a weight, is not finite: stopped, nothing saved of it; '
                f'last good checkpoint in {out_dir}: {kept}. Lower the learning rates, or look at the data'
            )
            status = 1
            break
        run.step, run.seconds = run.step + 1, run.seconds + elapsed
        run.record = {
            'step': run.step,
            'tokens': run.step * tokens_per_step,
            'train_loss': loss,
            'grad_norm': norm,
            'lr': learning_rate * rate(run.step - 1),
            'ms': 1000 * elapsed,
            'tokens_per_s': tokens_per_step / elapsed,
            'seconds': run.seconds,
            'epoch': run.loader.epoch,
        }
        if run.loader.epoch != epoch:
            print0(f'epoch {run.loader.epoch} begins: the shards start over')
        if run.step % log_interval == 0 or run.step == max_iters or due_to_print():
            print0(dense_line(run.record, mfu))
            due_to_print(said=True)
        if due:
            save(run)  # before the validation: one that dies loses nothing
    stopper.restore()
    if stop and run.step < max_iters:
        print0(f'stopped after update {run.step}, saved in {out_dir}: --resume=True goes on')
        status = 128 + (stopper.signal or 15)
    elif status == 0:
        print0(
            f'done: {run.step} updates in {run.seconds:.0f} s, best val loss {run.best:.4f}; {out_dir}/{LAST}'
        )
    if run.rank == 0:
        log.close()
        close()
        if plot and status == 0:
            title = f'{"recurrent" if recurrent else "non-recurrent"}, L = {n_layer}, E = {n_expert}, d = {n_embd}'
            print0(
                f'loss curve: {plot_losses(out_dir, "byte" if tokenizer == "bytes" else "token", title)}'
            )
        release(out_dir)
    if run.world > 1:
        dist.barrier()  # ranks leave together; one that fails leaves at once
        dist.destroy_process_group()
    return status


def main() -> int:
    config = configure(globals())
    globals().update(restarted(out_dir))
    return train(config)


if __name__ == '__main__':
    # interrupted before the first update, or by the second ctrl-C
    stays = 'interrupted: the last checkpoint stays as it was'
    run_script(main, stays, last_words('a smaller batch_size takes less'))

"""Train a language model: the recurrent Parallel-Experts Transformer, its non-recurrent
counterpart, or a baseline (an LSTM or a standard Transformer).

$ python train_lm.py config/small_L2.py                                    # one GPU, or the CPU
$ torchrun --standalone --nproc_per_node=4 train_lm.py config/small_L2.py  # four GPUs
$ python train_lm.py config/small_L2.py --resume=True                      # after a crash or ctrl-C

A run writes config.json, log.jsonl and ckpt_*.pt into out_dir. The log line of step n has the loss
of update n and, if the model is validated there, the validation loss after that update. On a CPU a
resumed run is bit-equal to one that was never stopped.
"""

import math
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field, fields
from datetime import timedelta

from configurator import (
    Mistake,
    Settings,
    configure,
    every,
    read_script,
    run_script,
    setup_process,
)

if __name__ == '__main__':
    setup_process()  # before torch is imported

import psutil
import torch
import torch.distributed as dist

import baselines
import common
import unroll
from common import CheckpointError, Gradients, fill, gather, open_trackers, print0, restoring
from data_fineweb import VOCAB, DataError, Loader, find_shards, fingerprint, load_val, token_bytes
from figures import describe_model, plot_losses
from kernels import fused, graphed, may_run_uncompiled
from model import EVAL_CHUNK, ModelConfig, build_model, rename_old_weights
from muon import Muon

# -----------------------------------------------------------------------------
# fmt: off
# I/O
out_dir = 'out/lm'             # everything that a run writes goes here
data_dir = 'data/fineweb'      # shards prepared by data_fineweb.py
init_from = ''                 # start from the weights in this folder, of a run or an export; a
                               # resumed run keeps its own
resume = False                 # continue from the last checkpoint in out_dir
overwrite = False              # replace the run in out_dir
eval_interval = 2000           # updates between checkpoints, each with a validation (by default
                               # < 5% of the time)
eval_only = False              # validate the last checkpoint in out_dir and stop
log_interval = 1               # updates between printed lines; log.jsonl has every update
plot = False                   # draw out_dir/loss.png at the end (matplotlib)
tensorboard = False            # also write TensorBoard files into out_dir
wandb = False                  # also log to Weights & Biases
wandb_project = 'parallel-experts'  # name of the Weights & Biases project
# data
tokenizer = 'gpt2'             # 'gpt2' or 'bytes': the one that the shards were prepared with
tokens_per_step = 131072       # tokens per update over all ranks and micro-batches, as in the paper
reset_every = 0                # reset the state of each stream every N updates; 0 = never
batch_size = 0                 # sequences per micro-batch and GPU; 0 = the most that fit, up to
                               # 32,768 tokens
val_tokens = 10485760          # validation tokens, as many as in modded-nanogpt and llm.c
val_streams = 512              # streams into which val_tokens are cut, for any number of ranks
# model (layer.py has the equations)
arch = 'experts'               # 'experts', or a baseline: 'transformer' or 'lstm' (baselines.py)
recurrent = True               # False = the non-recurrent model
n_layer = 2                    # L, layers; the small budget is L * E = 16 blocks of width 768
n_expert = 8                   # E, experts per layer
n_embd = 768                   # D, width
n_head = 0                     # query heads; 0 = D/96 if D % 192 == 0, else D/64 if D % 128 == 0
n_kv_head = 0                  # key-value heads; 0 = half of n_head, or n_head if that is odd
window = 128                   # W, tokens that attention sees (non-recurrent: only in validation)
block_size = 64                # T, tokens per chunk; the paper: 64, non-recurrent 256 or 2048
aggregation = 'sqrt_sum'       # 'sqrt_sum', 'mean', 'softmax_mean' or 'softmax_l2'
share_kv = True                # recurrent: the experts of a layer share a cache; False = one each
residual = 'expert'            # non-recurrent: 'expert' (one each, the paper's rule) or 'shared'
router_dim = 64                # width of the router's queries and keys (softmax aggregations)
init_b = 'one'                 # recurrent: initial b in u = a s + b z, 'one' or 'sqrt_experts'
# optimizer (each learning rate is a peak)
max_iters = 10000              # updates; 10,000 are 1.3B tokens
learning_rate = 2e-2           # Muon, for the matrices of the layers and the router
embedding_lr = 0.2             # AdamW, for the embedding; scaled by (D/768)^-0.5
head_lr = 0.004                # AdamW, for the head; scaled by (D/768)^-0.5
scalar_lr = 2e-2               # AdamW, for a, b, router biases and expert embeddings; our choice
momentum = 0.95                # Muon, Nesterov
weight_decay = 0.01            # Muon, cautious; for its matrices only
betas = (0.8, 0.95)            # AdamW
grad_clip = 1.0                # largest global norm of the gradients; 0 = no clipping
warmup_iters = 100             # updates of linear warm-up, before a cosine decay
adam_eps = 1e-10               # AdamW; small, because gradients of the head are small
final_lr_ratio = 0.01          # learning rate of the last update over the peak
baseline_lr = 0.0              # AdamW of the baselines; 0 = 2e-3 (lstm) or 1e-3 (transformer)
# system
seed = 1337                    # of the initial weights and the order in which shards are read
device = 'auto'                # 'auto' (cuda if there is one), 'cpu', 'cuda', 'cuda:1' or 'mps'
dtype = 'auto'                 # of matrix products: 'float32', 'bfloat16', or 'auto' (bfloat16 if
                               # the device is fast at it)
compile = True                 # compile fused functions with torch.compile, if that works
graphs = True                  # on a GPU: replay each update as CUDA graphs, from the fourth on
mode = 'fast'                  # 'fast' (unroll.py), or 'plain' (one weight gradient per token,
                               # for checking)
threads = 0                    # CPU threads; 0 = one or all, whichever is faster at the start; a
                               # resumed run keeps the number
# fmt: on
# -----------------------------------------------------------------------------
AT_LEAST_1 = """eval_interval log_interval max_iters block_size tokens_per_step val_tokens
    val_streams"""
AT_LEAST_0 = """batch_size learning_rate embedding_lr head_lr scalar_lr weight_decay grad_clip
    adam_eps warmup_iters baseline_lr reset_every seed"""
RANGES = {
    **dict.fromkeys(AT_LEAST_1.split(), (1, math.inf)),
    **dict.fromkeys(AT_LEAST_0.split(), (0, math.inf)),
    'momentum': (0, 0.9999),
    'betas': (0, 0.9999),
    'final_lr_ratio': (0, 1),
    'arch': ['experts', 'transformer', 'lstm'],
    'mode': ['fast', 'plain'],
    'tokenizer': list(VOCAB),
    'threads': (0, 1024),  # OpenMP fails beyond
}
RENAMED = {'path': 'mode'}  # old name: new name
# A resumed run may change these settings, and no other.
HARMLESS = """out_dir data_dir init_from resume overwrite eval_interval eval_only log_interval plot
    tensorboard wandb wandb_project reset_every batch_size val_tokens val_streams max_iters
    learning_rate embedding_lr head_lr scalar_lr momentum weight_decay betas grad_clip warmup_iters
    adam_eps final_lr_ratio baseline_lr device dtype compile graphs mode threads""".split()
SCRIPT = os.path.basename(__file__)  # named in messages; a copy of this file has another name
POSITION = ('step', 'record', 'best', 'seconds')  # fields of a Run that checkpoints keep
# The dimension that counts streams, for each tensor of a recurrent model's state.
STREAM_DIMS = {'experts': (0, 1, 1, 0), 'lstm': (1, 1)}
# Most tokens of a micro-batch: the share of each of the paper's four GPUs in an update.
MAX_MICRO_BATCH = 32768


@dataclass
class Run:
    """Training state. Tensors keep their addresses, because CUDA graphs read and write them in
    place."""

    config: Settings  # all settings, as checkpoints keep them
    rank: int
    world: int
    device: str  # 'cpu', 'mps' or 'cuda:N'
    amp: torch.dtype  # of matrix products
    loader: Loader | None  # None = eval_only
    shards: list  # fingerprint of the data
    val: tuple[torch.Tensor, torch.Tensor, float]  # x, y (S, n) of this rank; bytes of text in y
    model: torch.nn.Module
    optimizers: list[torch.optim.Optimizer]
    gradients: Gradients  # `extra` holds the loss, the number of ranks to stop, the gradient norm
    state: tuple[torch.Tensor, ...]  # of all streams of this rank; empty if not recurrent
    graphs: dict | None  # CUDA graphs by name; None = run eagerly
    capture_chunk: bool = True  # False = too long for one CUDA graph: the model captures blocks
    rows: int = 0  # sequences per micro-batch
    saved_rows: int | None = None  # those of the checkpoint of a resumed run
    # x, y (rows, T) of a micro-batch, and the state of its streams; empty with eval_only
    batch: tuple = ((), (), ())
    val_rows: int = 0  # validation streams read side by side
    val_batch: tuple = ()  # x, y (val_rows, T), the state, and the sums [loss, tokens]
    step: int = 0  # updates done
    record: dict = field(default_factory=lambda: {'step': 0, 'tokens': 0})  # current log line
    best: float = math.inf  # lowest validation loss
    must_validate: bool = True  # before the next update
    seconds: float = 0.0  # time spent in updates
    lock: object = None  # of out_dir


# ---- settings ----


def check_settings(world: int) -> None:
    """Raise Mistake for settings that do not fit together."""
    if not eval_only:
        if tokens_per_step % (block_size * world):
            multiple = f'a multiple of block_size x ranks = {block_size} x {world}'
            raise Mistake(f'tokens_per_step = {tokens_per_step}: must be {multiple}')
        rows = tokens_per_step // (block_size * world)
        if batch_size and rows % batch_size:
            raise Mistake(f'batch_size = {batch_size}: must divide the {rows} rows of each rank')
    if val_streams < world:
        raise Mistake(f'val_streams = {val_streams}: must be at least the number of ranks, {world}')
    if len(betas) != 2:
        raise Mistake(f'betas = {betas}: expected two numbers')
    if arch != 'experts' and recurrent != (arch == 'lstm'):
        raise Mistake(f'arch = {arch!r}: needs --recurrent={arch == "lstm"}')
    common.need_packages(matplotlib=plot, tensorboard=tensorboard, wandb=wandb)


# ---- learning rate and optimizers ----


def lr_at(step: int) -> float:
    """Return the learning rate of update `step` (0 .. max_iters - 1) as a fraction of its peak.

    It rises linearly to 1 at step warmup_iters - 1, then follows half a cosine down to
    final_lr_ratio at the last update, and stays there. A run that is not longer than its warm-up
    only warms up."""
    if step < warmup_iters:
        return (step + 1) / warmup_iters
    progress = min(1.0, (step + 1 - warmup_iters) / max(1, max_iters - warmup_iters))
    return final_lr_ratio + (1 - final_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress))


def make_optimizers(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    """Return [Muon for the matrices of the layers and the router, AdamW for the other parameters],
    or [AdamW] for a baseline. Each group has its `peak_lr`; `lr` is a tensor, because CUDA graphs
    read it at each replay."""
    if arch != 'experts':
        optimizers = [baselines.make_adamw(model, baseline_lr)]
    else:
        groups = model.param_groups()
        scale = (n_embd / 768) ** -0.5
        lrs = {'embedding': embedding_lr * scale, 'head': head_lr * scale, 'scalars': scalar_lr}
        muon = Muon(
            groups['matrices'], lr=learning_rate, momentum=momentum, weight_decay=weight_decay
        )
        adamw = torch.optim.AdamW(
            [{'params': groups[name], 'lr': lr} for name, lr in lrs.items() if groups[name]],
            betas=betas,
            eps=adam_eps,
            weight_decay=0.0,
            fused=True,
            capturable=model.embedding.is_cuda,
        )
        # No warning: the first steps run uncaptured on purpose.
        adamw._warned_capturable_if_run_uncaptured = True
        optimizers = [muon, adamw]
    for group in param_groups(optimizers):
        group['peak_lr'] = group['lr']
        group['lr'] = torch.tensor(group['lr'], device=model.embedding.device)
    return optimizers


def param_groups(optimizers: list[torch.optim.Optimizer]) -> list[dict]:
    """Return the parameter groups of all optimizers."""
    return [group for optimizer in optimizers for group in optimizer.param_groups]


# ---- the tensors of a micro-batch ----


def autocast(device: str, amp: torch.dtype) -> torch.autocast | nullcontext:
    """Return the context in which the model runs: matrix products in amp, the rest in float32."""
    return torch.autocast(torch.device(device).type, amp) if amp != torch.float32 else nullcontext()


def row_choices(streams: int, T: int) -> list[int]:
    """Return the divisors n of `streams` with n * T <= MAX_MICRO_BATCH, the largest first; [1] if
    T alone is larger."""
    divisors = [n for n in range(streams, 0, -1) if streams % n == 0]
    return [n for n in divisors if n * T <= MAX_MICRO_BATCH] or [1]


def val_row_choices(run: Run) -> list[int]:
    """Return the possible numbers of validation streams that are read side by side."""
    return row_choices(len(run.val[0]), min(block_size, EVAL_CHUNK))


def set_rows(run: Run, rows: int) -> None:
    """Set the number of sequences per micro-batch and allocate its inputs and state."""
    x, y = torch.zeros(2, rows, block_size, dtype=torch.int64, device=run.device)  # (rows, T) each
    state = run.state  # a single micro-batch per update needs no copy
    with autocast(run.device, run.amp):
        if recurrent and rows < len(run.loader.rows):
            state = run.model.init_state(rows)
        if recurrent and arch == 'experts':
            run.capture_chunk = not run.model.recomputes(rows, block_size)
    run.rows = rows
    run.batch = (x, y, state)


def set_val_rows(run: Run, rows: int) -> None:
    """Set the number of validation streams that are read side by side, and allocate their inputs,
    their state and the sums of the loss and of tokens."""
    T = min(block_size, EVAL_CHUNK)
    x, y = torch.zeros(2, rows, T, dtype=torch.int64, device=run.device)  # (rows, T) each
    with autocast(run.device, run.amp):
        state = run.model.init_state(rows)
    wide = torch.float32 if run.device == 'mps' else torch.float64  # mps has no float64
    sums = torch.zeros(2, dtype=wide, device=run.device)
    run.val_rows = rows
    run.val_batch = (x, y, state, sums)


# ---- an update ----


def forward_backward(run: Run, x: torch.Tensor, y: torch.Tensor, state: tuple) -> None:
    """Run a micro-batch forward and backward. Add its gradients and its share of the mean loss to
    run.gradients, and replace the state by the new one, in place."""
    with autocast(run.device, run.amp):
        loss, new_state = run.model(x, y, state or None)
    share = x.numel() / tokens_per_step  # of the mean over the whole batch
    (loss.objective * share).backward()
    run.gradients.extra[0].add_(loss.cross_entropy * share)
    if recurrent:
        torch._foreach_copy_(state, [t.detach() for t in new_state])


def clip_and_orthogonalize(run: Run) -> list:
    """Clip the gradients and run the first part of Muon's step: orthogonalize this rank's share of
    the matrices. Return the shares, which `Muon.gather` then completes ([] for a baseline)."""
    if grad_clip:
        norm = run.gradients.extra[2]
        torch.nn.utils.clip_grads_with_norm_(run.model.parameters(), grad_clip, norm)
    return run.optimizers[0].orthogonalize_shares() if arch == 'experts' else []


def apply_updates(run: Run, shares: list) -> None:
    """Change the weights: run the last part of Muon's step, and AdamW's step."""
    if arch == 'experts':
        run.optimizers[0].apply(shares)
    run.optimizers[-1].step()  # AdamW


def reset_streams(run: Run, every_row: bool) -> None:
    """Set the state of every row to zero or, with `reset_every`, that of the rows with
    (row - updates) % reset_every == 0, where rows are numbered over all ranks."""
    period = 1 if every_row else reset_every
    if recurrent and period:
        rows = len(run.loader.rows)
        first = (run.step - run.rank * rows) % period
        first = min(first, rows)  # rows: no row of this rank is due, and arange is empty
        index = torch.arange(first, rows, period, device=run.device)
        for t, dim in zip(run.state, STREAM_DIMS[arch], strict=True):
            t.index_fill_(dim, index, 0)  # zero, as in init_state


def train_update(run: Run, lr_fraction: float, stop: bool) -> tuple[float, float, bool]:
    """Train on one batch. Return the mean loss, the norm of the gradients, and whether to stop.

    lr_fraction: the learning rates over their peaks. stop: whether this rank was asked to stop; all
    ranks stop if one was. If the loss or the norm is not finite, no weight changes.

    The rows of this rank are split into micro-batches of whole rows. Three parts of an update are
    CUDA graphs, with any number of ranks: forward and backward of a micro-batch, and the optimizer
    before and after Muon's exchange between ranks. One all-reduce sums gradients, loss and stop."""
    x, y, reset = run.loader.next()
    if run.device.startswith('cuda'):
        x, y = x.pin_memory(), y.pin_memory()  # the copies below are then asynchronous
    reset_streams(run, every_row=reset)
    run.gradients.zero()
    run.gradients.extra[1].fill_(float(stop))

    x_in, y_in, state = run.batch
    for start in range(0, len(x), run.rows):
        x_in.copy_(x[start : start + run.rows], non_blocking=True)
        y_in.copy_(y[start : start + run.rows], non_blocking=True)
        copies_state = state is not run.state  # several micro-batches of a recurrent model
        if copies_state:
            dims = zip(run.state, STREAM_DIMS[arch], strict=True)
            streams = [t.narrow(dim, start, run.rows) for t, dim in dims]
            torch._foreach_copy_(state, streams)
        chunk_graphs = run.graphs if run.capture_chunk else None
        graphed(chunk_graphs, 'chunk', forward_backward, run, x_in, y_in, state)
        if copies_state:
            torch._foreach_copy_(streams, state)

    run.gradients.sum_over_ranks()
    run.gradients.extra[2].copy_(run.gradients.norm())
    loss, stops, norm = run.gradients.extra.tolist()  # the only wait for the device
    if math.isfinite(loss) and math.isfinite(norm):
        for group in param_groups(run.optimizers):
            group['lr'].fill_(group['peak_lr'] * lr_fraction)
        shares = graphed(run.graphs, 'orthogonalize', clip_and_orthogonalize, run)
        if arch == 'experts':
            run.optimizers[0].gather(shares)
        graphed(run.graphs, 'apply', apply_updates, run, shares)
    return loss, norm, stops > 0


# ---- validation ----


def validate_chunk(
    run: Run, x: torch.Tensor, y: torch.Tensor, state: tuple, sums: torch.Tensor
) -> None:
    """Add the summed loss and the number of tokens of a chunk to `sums`, and replace the state by
    the new one, in place."""
    with autocast(run.device, run.amp):
        loss, new_state = run.model(x, y, state or None)
    sums[0].add_(loss.cross_entropy.to(sums.dtype) * x.numel())
    sums[1].add_(x.numel())
    torch._foreach_copy_(state, list(new_state))


@torch.no_grad()
def evaluate(run: Run) -> tuple[float, float]:
    """Return the validation loss in nats per token and in bits per byte.

    It is the mean over all positions of all streams, each read from an empty state with window W.
    The ranks share the streams. Neither the number of rows nor T changes the result."""
    x, y, text_bytes = run.val
    x_in, y_in, state, sums = run.val_batch
    sums.zero_()
    due_to_print = every()
    for x_rows, y_rows in zip(x.split(run.val_rows), y.split(run.val_rows), strict=True):
        for t in state:
            t.zero_()
        T = x_in.size(1)
        for x_chunk, y_chunk in zip(x_rows.split(T, 1), y_rows.split(T, 1), strict=True):
            if x_chunk.shape == x_in.shape:
                x_in.copy_(x_chunk)
                y_in.copy_(y_chunk)
                graphed(run.graphs, 'validation', validate_chunk, run, x_in, y_in, state, sums)
            else:  # the last chunk of the streams is shorter
                validate_chunk(run, x_chunk, y_chunk, state, sums)
            if due_to_print():
                print0(f'    validation: {sums[1]:,.0f} of {x.numel():,} tokens')
    totals = torch.cat([sums, sums.new_tensor([text_bytes])])
    if run.world > 1:
        dist.all_reduce(totals)
    nats, tokens, text_bytes = totals.tolist()
    return nats / tokens, nats / math.log(2) / text_bytes


# ---- the size of a micro-batch, by trial ----


def prepare(run: Run) -> None:
    """Choose by trial the number of CPU threads, whether to compile, the rows of a micro-batch and
    of a validation batch, and the Triton forms. Raises Mistake if not even one row fits.

    The largest number of rows is tried first, and the next smaller one if memory runs out. On a CPU
    the system would kill the process instead, so numbers of rows that need more than the free
    memory, by the estimate of cpu_bytes_per_row, are not tried."""
    start = time.perf_counter()
    resumed_state = [t.to('cpu', copy=True) for t in run.state]  # the trials change run.state
    set_compiled(run, False)
    # run.rows is the largest choice or, in a resumed run, that of the checkpoint if it is possible
    choices = [n for n in row_choices(len(run.loader.rows), block_size) if n <= run.rows]
    if batch_size:
        choices = [batch_size]
    val_choices = val_row_choices(run)
    if run.device == 'cpu':
        row_bytes = cpu_bytes_per_row(run)
        val_bytes = row_bytes * run.val_batch[0].size(1) / block_size
        free = common.device_memory(run.device)[1]
        limits = free / torch.tensor([row_bytes, val_bytes], dtype=torch.float64)  # rows
        if run.world > 1:
            dist.all_reduce(limits, dist.ReduceOp.MIN)
        choices = [n for n in choices if n <= limits[0]]
        val_choices = [n for n in val_choices if n <= limits[1]]
        if choices:
            set_rows(run, choices[0])
            run.config['threads'] = common.pick_threads(
                run.config['threads'], run.device, lambda T: try_chunk(run, T), block_size
            )
    set_compiled(run, compile and mode == 'fast' and arch != 'lstm')
    try_rows(run, choices, try_update)
    try_rows(run, val_choices, try_validation)
    if fused.enabled and run.graphs is not None and recurrent:
        with autocast(run.device, run.amp):
            for line in run.model.choose_forms(run.rows):
                print0(line)
    for t, saved in zip(run.state, resumed_state, strict=True):
        t.copy_(saved)
    if run.saved_rows not in (None, run.rows):
        before = f'{run.rows} rows per micro-batch, {run.saved_rows} before'
        print0(f'{before}: sums of gradients round differently')
    rows = f'{run.rows} rows per micro-batch, {run.val_rows} validation streams at a time'
    print0(f'{rows} (found in {time.perf_counter() - start:.0f} s)')


def set_compiled(run: Run, compiled: bool) -> None:
    """Switch compilation on or off. No Triton form is used until `prepare` has chosen them."""
    fused.enabled = compiled
    if arch == 'experts':
        run.model.graphs = run.graphs is not None
        run.model.forms = frozenset()


def cpu_bytes_per_row(run: Run) -> float:
    """Return an estimate of the memory in bytes that a row of a micro-batch takes on a CPU; 0 if
    there are too few rows to measure it.

    Run the forward of two small micro-batches, the larger one with about an eighth of the rows so
    that the measurement itself fits. The estimate is the difference in the memory of the process
    per row, times two for what the backward adds."""
    choices = [n for n in row_choices(len(run.loader.rows), block_size) if n <= run.rows]
    small = [n for n in choices if n <= choices[0] // 8]
    if len(small) < 2:
        return 0.0
    rows_before = run.rows
    used = []  # bytes
    for rows in (small[1], small[0]):
        set_rows(run, rows)
        x, y, state = run.batch
        with autocast(run.device, run.amp):
            outputs = run.model(x, y, state or None)  # keeps the autograd graph alive
        used.append(psutil.Process().memory_info().rss)
        del outputs
    set_rows(run, rows_before)
    return max(0.0, 2 * (used[1] - used[0]) / (small[0] - small[1]))


def try_rows(run: Run, choices: list[int], attempt: Callable[[Run, int], None]) -> None:
    """Go through `choices` until attempt(run, rows) fits in the memory of every rank. Raises
    Mistake if no choice fits. attempt: try_update or try_validation."""
    for rows in choices:
        fits = runs_in_memory(run, attempt, rows)
        if run.world > 1:
            all_fit = torch.tensor(float(fits), device=run.device)
            dist.all_reduce(all_fit, dist.ReduceOp.MIN)
            fits = bool(all_fit)
        if fits:
            return
    sizes = f'n_layer = {n_layer}, n_expert = {n_expert}, n_embd = {n_embd}'
    advice = 'choose a smaller model or block_size, or a device with more memory'
    if attempt is try_validation:
        tried = 'one validation stream'
    elif batch_size:
        tried = f'batch_size = {batch_size}'
        advice = '--batch_size=0 finds the most that fit'
    else:
        tried = 'one row'
    too_large = f'{tried} does not fit in the memory of {common.device_name(run.device)}'
    raise Mistake(f'{sizes}, block_size = {block_size}: {too_large}: {advice}')


def runs_in_memory(run: Run, attempt: Callable[[Run, int], None], rows: int) -> bool:
    """Return whether attempt(run, rows) succeeds without the memory running out. If it fails to
    compile, print why, switch compilation off and try again. Gradients and all states are zero
    afterwards.

    On a GPU memory is set aside during the attempt: a twentieth of the card for CUDA graphs, NCCL
    and fragmentation, and that of the optimizers' moments, unless a resumed run has them already or
    nothing is trained."""
    on_gpu = run.device.startswith('cuda')
    error = None
    reserved = None
    try:
        if on_gpu:
            moments = 0
            if not (eval_only or run.optimizers[0].state):
                moments = 2 * run.gradients.buffer.numel()
                if arch == 'experts':  # AdamW keeps two moments of each number, Muon one
                    moments -= sum(p.numel() for p in run.optimizers[0].param_groups[0]['params'])
            size = 4 * moments + common.device_memory(run.device)[0] / 20  # bytes
            reserved = torch.empty(int(size), dtype=torch.uint8, device=run.device)
        attempt(run, rows)
    except Exception as caught:
        if not (common.out_of_memory(caught) or may_run_uncompiled(caught)):
            raise
        error = caught.with_traceback(None)  # a traceback would keep the tensors of its frames
    del reserved
    run.gradients.zero()
    for t in (*run.state, *run.batch[2], *run.val_batch[2]):
        t.zero_()
    if error is None:
        return True
    unroll.release()
    if on_gpu:
        torch.cuda.empty_cache()
    if common.out_of_memory(error):
        return False
    common.report_uncompiled(error)
    set_compiled(run, False)
    return runs_in_memory(run, attempt, rows)


def try_update(run: Run, rows: int) -> None:
    """Allocate a micro-batch of some rows, and run its forward and backward."""
    set_rows(run, rows)
    x, y, state = run.batch
    forward_backward(run, x, y, state)


def try_chunk(run: Run, T: int) -> None:
    """Run forward and backward of the first T tokens of a micro-batch."""
    x, y, _ = run.batch
    with autocast(run.device, run.amp):
        loss, _ = run.model(x[:, :T], y[:, :T])
    loss.objective.backward()
    run.gradients.zero()


@torch.no_grad()
def try_validation(run: Run, rows: int) -> None:
    """Allocate a validation batch of some streams, and run one chunk of it."""
    set_val_rows(run, rows)
    x, y, state, sums = run.val_batch
    validate_chunk(run, x, y, state, sums)


# ---- checkpoints ----


def save(run: Run, best: bool = False) -> None:
    """Save the last checkpoint, from which a run resumes, or the best one, for sample.py."""
    parts = {
        'script': SCRIPT,
        'recurrent': recurrent,
        'model_config': asdict(run.model.config),
        **{name: getattr(run, name) for name in POSITION},
    }
    if not best:
        parts['loader'] = run.loader.state_dict()
        parts['shards'] = run.shards
        parts['rows'] = run.rows
        dims = STREAM_DIMS[arch] if recurrent else ()
        parts['state'] = [gather(t, dim) for t, dim in zip(run.state, dims, strict=True)]
    common.save_run(run, parts, None if best else run.optimizers)


def load(run: Run) -> None:
    """Restore the last checkpoint in out_dir, or with eval_only just its weights and position.
    Raises CheckpointError if it is damaged, or if the data or a setting outside HARMLESS differs
    (with eval_only, only settings of the model count)."""
    needed = ('model', *POSITION)
    if not eval_only:
        needed += ('optimizers', 'rng', 'loader', 'state', 'shards')
    saved, path = common.load_run(out_dir, SCRIPT, needed)
    defaults = read_script(__file__)[0]
    harmless = set(HARMLESS)
    if eval_only:
        harmless |= set(run.config) - set(model_settings(run.config))
    common.refuse_changes(saved['config'], run.config, defaults, harmless, path, SCRIPT)
    common.restore(run, POSITION, [] if eval_only else run.optimizers, saved, path)
    print0(f'{path}: step {run.step}')
    if eval_only:
        return
    if saved['shards'] != run.shards:
        reason = f'was trained on other shards than those in {data_dir}'
        raise CheckpointError(f'{path}: {reason}: give the same data_dir, or another out_dir')
    with restoring(path, 'loader or state'):
        run.loader.load_state_dict(saved['loader'])
        dims = STREAM_DIMS[arch] if recurrent else ()
        for t, all_ranks, dim in zip(run.state, saved['state'], dims, strict=True):
            fill(t, all_ranks.chunk(run.world, dim)[run.rank])
    saved_config = {**defaults, **saved['config']}
    # The checkpoint was saved before the validation that followed its update, if one did.
    intervals = (saved_config['eval_interval'], eval_interval)
    at_the_end = run.step in (saved_config['max_iters'], max_iters)
    run.must_validate = at_the_end or any(run.step % n == 0 for n in intervals)
    if any(saved_config[name] != run.config[name] for name in ('val_tokens', 'val_streams')):
        run.best = math.inf
        run.must_validate = True
        print0('val_tokens or val_streams has changed: validating again')
    run.saved_rows = saved.get('rows')
    if not batch_size and run.saved_rows in row_choices(len(run.loader.rows), block_size):
        set_rows(run, run.saved_rows)  # so that gradients are summed in the same order, bit by bit


# ---- data, model, optimizer ----


def model_settings(config: Settings) -> list[str]:
    """Return the names of the settings that a model is built with."""
    sizes = [f.name for f in fields(ModelConfig) if f.name != 'mode' and f.name in config]
    return [*sizes, 'arch', 'recurrent', 'tokenizer']


def make_run(config: Settings) -> Run:
    """Return a run before its first update: with its data, model and optimizers. Writes nothing.
    Raises Mistake if the settings, the data or the weights cannot be used."""
    rank, world, device_ = common.join_ranks(device, threads)
    if device_ == 'cpu':
        common.keep_memory()
    amp = common.pick_dtype(dtype, device_)
    own_weights = resume or eval_only
    if init_from or own_weights:  # a run that is resumed may have adopted its sizes
        needed = ('model', 'model_config')
        source = out_dir if own_weights else init_from
        common.adopt_sizes(source, model_settings(config), needed, config, globals())
    check_settings(world)
    torch.manual_seed(seed)

    # data: this rank's share of the B rows of an update and of the validation streams
    V = VOCAB[tokenizer]
    T = block_size
    B = tokens_per_step // block_size
    train_shards, loader = [], None
    if not eval_only:
        train_shards = find_shards(data_dir, 'train', tokenizer)
        share = (rank, world)
        loader = Loader(train_shards, B=B, T=T, V=V, carries=recurrent, seed=seed, share=share)
    val_shards = find_shards(data_dir, 'val', tokenizer)
    val_x, val_y = load_val(val_shards, val_tokens, val_streams, V, share=(rank, world))
    text_bytes = math.nan  # remains nan without GPT-2's tokenizer, which nothing else needs
    with suppress(DataError):
        text_bytes = float(token_bytes(tokenizer)[val_y.numpy()].sum())

    # model: a setting with the name of a field of ModelConfig sets that field
    sizes = {f.name: config[f.name] for f in fields(ModelConfig) if f.name in config}
    model_config = ModelConfig(vocab_size=V, **sizes)
    if arch == 'experts':
        # weights and gradients, and in training at least Muon's moment
        common.check_model(
            lambda c: build_model(c, recurrent),
            model_config,
            copies=2 if eval_only else 3,
            device=device_,
        )
        model = build_model(model_config, recurrent)
    else:
        model = baselines.build(arch, model_config)
    if init_from and not own_weights:
        common.init_from(model, init_from, rename=lambda w: rename_old_weights(model, w, ''))
    model = model.to(device_)

    optimizers = make_optimizers(model)

    with autocast(device_, amp):  # keys and values of the state take its dtype
        state = model.init_state(B // world) if recurrent and not eval_only else ()
    captures = graphs and device_.startswith('cuda') and mode == 'fast' and arch == 'experts'
    run = Run(
        config=config,
        rank=rank,
        world=world,
        device=device_,
        amp=amp,
        loader=loader,
        shards=fingerprint([*train_shards, *val_shards]),
        val=(val_x.to(device_), val_y.to(device_), text_bytes),
        model=model,
        optimizers=optimizers,
        gradients=Gradients(model.parameters(), n_extra=3),
        state=state,
        graphs={} if captures else None,
    )
    if not eval_only:
        set_rows(run, batch_size or row_choices(B // world, T)[0])
    set_val_rows(run, val_row_choices(run)[0])
    return run


# ---- the loop ----


def describe(run: Run) -> None:
    """Print the machine, the model and the shape of an update."""
    params = ', '.join(f'{n / 1e6:.2f}M {part}' for part, n in run.model.num_params().items())
    flops = ', '.join(f'{n / 1e6:.1f} {part}' for part, n in run.model.flops_per_token().items())
    micro_batches = tokens_per_step // (block_size * run.world * run.rows)
    shape = f'{run.world} ranks x {micro_batches} micro-batches x {run.rows} rows x {block_size}'
    print0(f'{common.machine(run)}, {run.amp}')
    print0(f'{describe_model(run.config)}: parameters {params}; forward MFLOPs per token {flops}')
    print0(f'{max_iters:,} updates of {tokens_per_step:,} tokens = {shape}')


def main(config: Settings) -> int:
    """Train, or only validate with eval_only. Return the exit status: 0 = done, 1 = the loss was
    not finite, 128 + signal = stopped."""
    common.resume_if_restarted(out_dir, config, globals())
    is_new = not (resume or overwrite or eval_only)
    if is_new and os.environ.get('RANK', '0') == '0' and common.holds_run(out_dir):
        common.prepare_out_dir(out_dir)  # refuses the folder now, not after minutes of trials
    run = make_run(config)  # data, model, optimizers
    baselines.refuse_settings(arch, sys.argv)
    if eval_only:
        load(run)
        try_rows(run, val_row_choices(run), try_validation)
        start = time.perf_counter()
        val_loss, bits = evaluate(run)
        seconds = time.perf_counter() - start
        unit = 'byte' if tokenizer == 'bytes' else 'token'
        loss = f'validation loss {val_loss:.4f} nats per {unit} ({bits:.4f} bits per byte)'
        print0(f'{out_dir}, step {run.step}: {loss}, {val_tokens:,} tokens in {seconds:.1f} s')
        common.leave(run)
        return 0
    if resume:
        if run.rank == 0:  # lock the folder first, so that no other run saves after this one loads
            run.lock = common.prepare_out_dir(out_dir, resume, overwrite)
        if run.world > 1:
            dist.barrier()
        load(run)
    prepare(run)
    if run.rank == 0 and not resume:  # only now, so that a refused command changes no file
        run.lock = common.prepare_out_dir(out_dir, resume, overwrite)
    describe(run)
    if run.rank == 0:
        project = wandb_project if wandb else ''
        track, close_trackers = open_trackers(
            config, tensorboard, project, run.step if resume else None
        )
        log = common.open_log(run, resume, SCRIPT)

    stopper = common.Stopper()  # turns ctrl-C and SIGTERM into a flag
    due_to_print = every()  # a line every 10 s, however large log_interval is
    val_seconds = 0.0  # of the last validation
    stop = False
    status = None
    while True:
        # validate and log
        if run.must_validate:
            start = time.perf_counter()
            val_loss, bits = evaluate(run)
            val_seconds = time.perf_counter() - start
            run.record['val_loss'] = val_loss
            run.record['val_bits_per_byte'] = bits
            run.record['val_seconds'] = val_seconds
            print0(
                f'step {run.step}/{max_iters} | val loss {val_loss:.4f} | {bits:.4f} bits per byte '
                f'| {val_seconds:.1f} s, training {run.seconds:.1f} s so far'
            )
            if val_loss < run.best:
                run.best = val_loss
                save(run, best=True)
        if run.rank == 0:
            log(run.record)
            track(run.record)
        if run.step >= max_iters or stop:
            break

        # train
        start = time.perf_counter()
        lr_fraction = lr_at(run.step)
        loss, norm, stop = train_update(run, lr_fraction, stopper.signal is not None)
        elapsed = time.perf_counter() - start
        step = run.step + 1
        run.must_validate = step % eval_interval == 0 or step == max_iters
        must_save = run.must_validate or stop
        if not common.all_finite(run, loss, norm, weights=must_save):
            stopper.restore()
            status = 1
            break
        run.step = step
        run.seconds += elapsed
        lr = lr_fraction * run.optimizers[0].param_groups[0]['peak_lr']
        tokens_per_s = tokens_per_step / elapsed
        run.record = {
            'step': step,
            'tokens': step * tokens_per_step,
            'epoch': run.loader.epoch,
            'train_loss': loss,
            'grad_norm': norm,
            'lr': lr,
            'ms': 1000 * elapsed,
            'tokens_per_s': tokens_per_s,
            'seconds': run.seconds,
        }
        if step % log_interval == 0 or step == max_iters or due_to_print():
            seconds_left = (max_iters - step) * (elapsed + val_seconds / eval_interval)
            print0(
                f'step {step}/{max_iters} | loss {loss:.4f} | lr {lr:.2e} | norm {norm:.2f} | '
                f'{1000 * elapsed:.0f} ms | {tokens_per_s:,.0f} tokens/s | '
                f'mfu {common.mfu(run, tokens_per_s)} | eta {timedelta(seconds=int(seconds_left))}'
            )
            due_to_print(restart=True)
        if must_save:
            save(run)  # before the validation, so that a run that dies there loses nothing

    if status is None:
        summary = f'{run.step} updates in {run.seconds:.0f} s, best val loss {run.best:.4f}'
        status = common.report_end(run, stopper, max_iters, summary)
    if run.rank == 0:
        close_trackers()
    if run.rank == 0 and plot and status == 0:
        unit = 'byte' if tokenizer == 'bytes' else 'token'
        path = plot_losses(out_dir, unit, describe_model(run.config))
        print(f'loss curve: {path}')
    common.leave(run)
    return status


if __name__ == '__main__':
    run_script(
        lambda: main(configure(globals())),
        'interrupted: the last checkpoint is unchanged',
        common.error_explainer('a smaller model, batch_size or block_size takes less', globals()),
    )

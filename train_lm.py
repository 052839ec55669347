"""Train a language model: the recurrent Parallel-Experts Transformer or its non-recurrent
counterpart.

$ python train_lm.py config/small_L2.py                                                # one GPU
$ torchrun --standalone --nproc_per_node=4 train_lm.py config/small_L2.py             # four GPUs
$ python train_lm.py config/small_L2.py --resume=True              # after a crash, ctrl-C, SIGTERM

Writes config.json, log.jsonl and ckpt_*.pt into out_dir. A log line of step n describes update n;
val_loss in it is measured after that update. On the CPU a resumed run is bit-equal to one that was
never stopped.
"""

import math
import os
import pathlib
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field, fields
from datetime import timedelta

from configurator import Mistake, Settings, configure, every, fail, read_json, read_script
from configurator import first_line, run_script, setup_process

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
from figures import plot_losses
from kernels import fused, graphed, may_run_uncompiled
from model import ModelConfig, build_model, rename_old_weights
from muon import Muon

# -----------------------------------------------------------------------------
# fmt: off
# I/O
out_dir = 'out/lm'             # everything that a run writes goes here
data_dir = 'data/fineweb'      # shards made by data_fineweb.py
init_from = ''                 # start from the weights in this folder: a run's or an export's
resume = False                 # continue from out_dir's last checkpoint
overwrite = False              # replace a run that is in out_dir
eval_interval = 2000           # updates between validations, which then cost < 5%, and checkpoints
eval_only = False              # validate out_dir's last checkpoint and stop
log_interval = 1               # updates between printed lines; log.jsonl has them all
plot = False                   # draw out_dir/loss.png at the end (matplotlib)
tensorboard = False            # also write TensorBoard files into out_dir
wandb = False                  # also log to Weights & Biases
wandb_project = 'parallel-experts'  # its project there
# data
tokenizer = 'gpt2'             # 'gpt2' or 'bytes'; must be the one the shards were made with
tokens_per_step = 131072       # tokens of an update, over all ranks and micro-batches (the paper's)
reset_every = 0                # reset each stream's state once in so many updates; 0: never
batch_size = 0                 # sequences per micro-batch and GPU; 0: the most that fit
val_tokens = 10485760          # validation tokens: modded-nanogpt's and llm.c's 10,485,760
val_streams = 512              # read as this many streams, whatever the batch, ranks and model
# model (model.py has the equations)
arch = 'experts'               # or, to compare with, 'transformer', 'lstm' (baselines.py)
recurrent = True               # True: RecurrentGPT, False: GPT
n_layer = 2                    # L, layers; L * E = 16 blocks of width 768 is the small budget
n_expert = 8                   # E, experts per layer
n_embd = 768                   # D, width
n_head = 0                     # query heads; 0: D/96 if D % 192 == 0, D/64 if D % 128 == 0
n_kv_head = 0                  # key-value heads; 0: half of n_head
window = 128                   # W, attention window (GPT: in validation only)
block_size = 64                # T, tokens of a chunk; the paper: 64 recurrent, 256 or 2048 not
aggregation = 'sqrt_sum'       # 'sqrt_sum', 'mean', 'softmax_mean' or 'softmax_l2'
share_kv = True                # recurrent: a layer's experts share a cache; False: one each
residual = 'expert'            # GPT: 'expert' (each keeps its own, the paper's rule) or 'shared'
router_dim = 64                # width of the router's queries and keys (softmax aggregations)
init_b = 'one'                 # recurrent, initial b in u = a s + b z: 'one' or 'sqrt_experts'
# optimizer
max_iters = 10000              # updates: 1.3B tokens
learning_rate = 2e-2           # Muon's peak, for the matrices of the core and the router
embedding_lr = 0.2             # AdamW's at D = 768; scales with (D/768)^-0.5
head_lr = 0.004                # the same
scalar_lr = 2e-2               # AdamW's for a, b, router biases and expert embeddings; ours
momentum = 0.95                # Muon's, Nesterov
weight_decay = 0.01            # cautious, Muon's matrices only
betas = (0.8, 0.95)            # AdamW's
grad_clip = 1.0                # global norm; 0 disables
warmup_iters = 100             # then a cosine
adam_eps = 1e-10               # AdamW's; small, because gradients of the head are small
final_lr_ratio = 0.01          # of every peak, at the last update
baseline_lr = 0.0              # peak of the baselines' AdamW; 0: 2e-3 (lstm), 1e-3 (transformer)
# system
seed = 1337                    # of initial weights, the order of shards and where each starts
device = 'auto'                # 'auto': cuda if there is one; or 'cpu', 'cuda', 'cuda:1', 'mps'
dtype = 'auto'                 # of products: 'float32', 'bfloat16', 'auto': bfloat16 if it is fast
compile = True                 # compile fused functions with torch.compile, if that works
graphs = True                  # CUDA: run an update as CUDA graphs, from the fourth on
mode = 'fast'                  # 'fast' (unroll.py) or 'plain' (the equations, for checking)
threads = 0                    # CPU threads; 0: one or all, measured at the start, kept on resume
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
    'tokenizer': [*VOCAB],
    'threads': (0, 1024),  # OpenMP fails beyond
}
RENAMED = {'path': 'mode'}  # old name: new name
# A resumed run may change these settings, and no other.
HARMLESS = """out_dir data_dir init_from resume overwrite eval_interval eval_only log_interval plot
    tensorboard wandb wandb_project reset_every batch_size val_tokens val_streams max_iters
    learning_rate embedding_lr head_lr scalar_lr momentum weight_decay betas grad_clip warmup_iters
    adam_eps final_lr_ratio baseline_lr device dtype compile graphs mode threads""".split()
SCRIPT = os.path.basename(__file__)  # for messages; a copied trainer has its own
POSITION = ('step', 'record', 'best', 'seconds')  # fields of a Run that checkpoints keep
# What else a run is resumed from.
NEEDED = ('model', *POSITION, 'optimizers', 'loader', 'state', 'rng', 'shards')
# The dimension that counts streams, for each tensor of a model's state.
STREAM_DIMS = {'experts': (0, 1, 1, 0), 'transformer': (1, 1, 0), 'lstm': (1, 1)}
# Larger micro-batches gain no speed: a quarter of the paper's update.
MAX_MICRO_BATCH = 32768  # tokens
VAL_CHUNK = 128  # tokens at a time in validation: longer chunks take more memory and no less time


@dataclass
class Run:
    """Training state. Tensors keep their addresses, because CUDA graphs read and write them in
    place."""

    config: Settings  # all settings, as checkpoints keep them
    rank: int
    world: int
    device: str  # 'cpu', 'mps' or 'cuda:N'
    amp: torch.dtype  # of matrix products
    loader: Loader
    shards: list  # the fingerprint of the data
    val: tuple[torch.Tensor, torch.Tensor, float]  # x, y (S, n) of this rank; bytes of text in y
    model: torch.nn.Module
    optimizers: list[torch.optim.Optimizer]
    gradients: Gradients  # its `extra`: loss, number of ranks that are to stop, gradient norm
    state: tuple[torch.Tensor, ...]  # of all streams of this rank; empty if not recurrent
    graphs: dict | None  # CUDA graphs by name; None: run eagerly
    capture_chunk: bool = True  # as one graph; False: the model captures a long chunk's blocks
    rows: int = 0  # sequences per micro-batch
    batch: tuple = ()  # x, y (rows, T) and the state of a micro-batch
    val_rows: int = 0
    val_batch: tuple = ()  # x, y (val_rows, T), the state and the sums of validation
    step: int = 0
    record: dict = field(default_factory=lambda: {'step': 0, 'tokens': 0})  # of the log
    best: float = math.inf  # validation loss
    seconds: float = 0.0  # of training
    lock: object = None  # of out_dir


# ---- settings ----


def adopt_sizes(config: Settings) -> None:
    """Take the model's sizes, kind and tokenizer from the folder `init_from`, except for those that
    a config file or the command line gives. Raises CheckpointError."""
    about = read_json(pathlib.Path(init_from, common.CONFIG))
    if pathlib.Path(init_from, common.WEIGHTS).exists():  # an export
        sizes = about.get('model') or {}
        found = {**sizes, **{name: about.get(name) for name in ('recurrent', 'tokenizer')}}
    else:
        saved, _ = common.load_run(
            init_from, 'project', ('model', 'model_config'), file=common.BEST
        )
        found = {**saved['config'], **saved['model_config']}
    names = {f.name for f in fields(ModelConfig)} | {'recurrent', 'tokenizer', 'arch'}
    for name in (names & config.keys()) - config.given - {'mode'}:
        if type(found.get(name)) is type(config[name]) and found[name] != config[name]:
            print0(f'{name} = {found[name]!r}  (from {init_from})')
            config[name] = globals()[name] = found[name]


def check_settings(world: int) -> None:
    """Raise Mistake for settings that do not fit together."""
    if tokens_per_step % (block_size * world):
        need = f'a multiple of block_size x ranks = {block_size} x {world}'
        raise Mistake(f'tokens_per_step = {tokens_per_step}: must be {need}')
    rows = tokens_per_step // (block_size * world)
    if batch_size and rows % batch_size:
        raise Mistake(f'batch_size = {batch_size}: must divide the {rows} rows of a rank')
    if val_streams < world:
        raise Mistake(f'val_streams = {val_streams}: must be at least the ranks, {world}')
    if len(betas) != 2:
        raise Mistake(f'betas = {betas}: expected two numbers')
    if arch != 'experts' and recurrent != (arch == 'lstm'):
        raise Mistake(f'arch = {arch!r}: needs --recurrent={arch == "lstm"}')
    if init_from and (resume or eval_only):
        raise Mistake('--init_from starts a new run: not with --resume or --eval_only')
    common.need_packages(matplotlib=plot, tensorboard=tensorboard, wandb=wandb)


def lr_at(step: int, max_iters: int, warmup_iters: int, final_ratio: float = 0.01) -> float:
    """Return the learning rate of update `step` (0 .. max_iters - 1) as a fraction of its peak.

    It rises linearly to 1 at step warmup_iters - 1, then follows half a cosine down to final_ratio
    at the last update, and stays there. A run that is not longer than its warm-up only warms up."""
    if step < warmup_iters:
        return (step + 1) / warmup_iters
    progress = min(1.0, (step + 1 - warmup_iters) / max(1, max_iters - warmup_iters))
    return final_ratio + (1 - final_ratio) * 0.5 * (1 + math.cos(math.pi * progress))


def make_optimizers(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the core and the router and AdamW for the rest; for a
    baseline, its AdamW. Learning rates are tensors, because CUDA graphs read them."""
    if arch != 'experts':
        return [baselines.make_adamw(model, baseline_lr)]
    groups = model.param_groups()
    width = (n_embd / 768) ** -0.5
    rates = {'embedding': embedding_lr * width, 'head': head_lr * width, 'scalars': scalar_lr}
    muon = Muon(groups['matrices'], lr=learning_rate, momentum=momentum, weight_decay=weight_decay)
    adamw = torch.optim.AdamW(
        [{'params': groups[name], 'lr': lr} for name, lr in rates.items() if groups[name]],
        betas=betas,
        eps=adam_eps,
        weight_decay=0.0,
        fused=True,
        capturable=model.embedding.is_cuda,
    )
    adamw._warned_capturable_if_run_uncaptured = True  # its first steps are uncaptured on purpose
    return [muon, adamw]


# ---- data, model, optimizer ----


def make_run(config: Settings) -> Run:
    """Return a run before its first update. Raises Mistake for what is wrong with the settings, the
    data or the weights, before anything is written."""
    rank, world, device_ = common.join_ranks(device, threads)
    if device_ == 'cpu':
        common.keep_memory()
    amp = common.pick_dtype(dtype, device_)
    if init_from:
        adopt_sizes(config)
    check_settings(world)
    torch.manual_seed(seed)

    # data: B rows per update; a rank reads its share of them and of the validation streams
    V, T, B = VOCAB[tokenizer], block_size, tokens_per_step // block_size
    train_shards = find_shards(data_dir, 'train', tokenizer)
    val_shards = find_shards(data_dir, 'val', tokenizer)
    loader = Loader(train_shards, B, T, V, recurrent, seed, (rank, world))
    x, y = load_val(val_shards, val_tokens, val_streams, V, (rank, world))
    text_bytes = math.nan
    with suppress(DataError):  # the GPT-2 tokenizer is missing, and needed for nothing else
        text_bytes = float(token_bytes(tokenizer)[y.numpy()].sum())

    # model: every field of ModelConfig that has a setting of its name gets it
    sizes = {f.name: config[f.name] for f in fields(ModelConfig) if f.name in config}
    model_config = ModelConfig(vocab_size=V, **sizes)
    if arch == 'experts':
        # weights, gradients and moments
        common.check_model(lambda c: build_model(c, recurrent), model_config, 4, device_)
        model = build_model(model_config, recurrent)
    else:
        model = baselines.build(arch, model_config)
    if init_from:
        common.init_from(model, init_from, rename=lambda w: rename_old_weights(model, w, ''))
    model = model.to(device_)

    # optimizer
    optimizers = make_optimizers(model)
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group['peak_lr'] = group['lr']
        group['lr'] = torch.tensor(group['lr'], device=device_)

    captures = graphs and device_.startswith('cuda') and mode == 'fast' and arch == 'experts'
    with autocast(device_, amp):  # sets the dtype of a state's keys and values
        state = model.init_state(B // world) if recurrent else ()
    run = Run(
        config=config,
        rank=rank,
        world=world,
        device=device_,
        amp=amp,
        loader=loader,
        shards=fingerprint([*train_shards, *val_shards]),
        val=(x.to(device_), y.to(device_), text_bytes),
        model=model,
        optimizers=optimizers,
        gradients=Gradients(model.parameters(), n_extra=3),
        state=state,
        graphs={} if captures else None,
    )
    set_rows(run, batch_size or row_choices(B // world, T)[0])
    set_val_rows(run, row_choices(len(x), min(T, VAL_CHUNK))[0])
    return run


def autocast(device: str, amp: torch.dtype) -> torch.autocast | nullcontext:
    """Return the context in which the model runs: products in amp, everything else in float32."""
    return torch.autocast(torch.device(device).type, amp) if amp != torch.float32 else nullcontext()


def row_choices(streams: int, T: int) -> list[int]:
    """Return the divisors of `streams` that make micro-batches of at most MAX_MICRO_BATCH tokens,
    the largest first."""
    divisors = [n for n in range(streams, 0, -1) if streams % n == 0]
    return [n for n in divisors if n * T <= MAX_MICRO_BATCH] or [1]


def set_rows(run: Run, rows: int) -> None:
    """Set the number of sequences per micro-batch and allocate its inputs and state."""
    x, y = torch.zeros(2, rows, block_size, dtype=torch.int64, device=run.device)
    state = run.state  # with one micro-batch per update it is the state itself
    if recurrent and rows < len(run.loader.rows):
        with autocast(run.device, run.amp):
            state = run.model.init_state(rows)
    run.rows, run.batch = rows, (x, y, state)
    if arch == 'experts' and recurrent:
        with autocast(run.device, run.amp):
            run.capture_chunk = not run.model.recomputes(rows, block_size)


def set_val_rows(run: Run, rows: int) -> None:
    """Set the number of validation streams that are read side by side, and allocate for them."""
    T = min(block_size, VAL_CHUNK)
    x, y = torch.zeros(2, rows, T, dtype=torch.int64, device=run.device)
    with autocast(run.device, run.amp):
        state = run.model.init_state(rows)
    wide = torch.float32 if run.device == 'mps' else torch.float64
    run.val_rows, run.val_batch = rows, (x, y, state, torch.zeros(2, dtype=wide, device=run.device))


# ---- the size of a micro-batch, by trying ----


def prepare(run: Run) -> None:
    """Choose, by trying, the number of CPU threads, whether to compile, the rows of a micro-batch
    and of a validation batch, and the Triton forms. Raises Mistake if not even one row fits.

    On a GPU the largest number of rows is tried first, and the next one if memory runs out. A CPU
    kills a process that runs out: there rows that would (cpu_bytes_per_row) are not tried."""
    start = time.perf_counter()
    resumed_state = [t.to('cpu', copy=True) for t in run.state]
    set_compiled(run, False)
    choices = [n for n in row_choices(len(run.loader.rows), block_size) if n <= run.rows]
    choices = [run.rows] if batch_size else choices
    val_choices = row_choices(len(run.val[0]), run.val_batch[0].size(1))
    if run.device == 'cpu':
        row_bytes = cpu_bytes_per_row(run)
        free = common.device_memory(run.device)[1]
        choices = [n for n in choices if n * row_bytes <= free]
        val_bytes = row_bytes * run.val_batch[0].size(1) / block_size
        val_choices = [n for n in val_choices if n * val_bytes <= free]
        if choices:
            set_rows(run, choices[0])
            run.config['threads'] = common.pick_threads(
                run.config['threads'], run.device, lambda T: try_chunk(run, T), block_size
            )
    set_compiled(run, compile and mode == 'fast' and arch != 'lstm')
    try_rows(run, choices, set_rows, lambda: forward_backward(run, *run.batch))
    try_rows(run, val_choices, set_val_rows, lambda: try_validation(run))
    if fused.enabled and run.graphs is not None and recurrent:
        with autocast(run.device, run.amp):
            for line in run.model.choose_forms(run.rows):
                print0(line)
    for t, saved in zip(run.state, resumed_state, strict=True):
        t.copy_(saved)
    rows = f'{run.rows} rows per micro-batch, {run.val_rows} validation streams at a time'
    print0(f'{rows} (found in {time.perf_counter() - start:.0f} s)')


def set_compiled(run: Run, compiled: bool) -> None:
    """Switch compilation and Triton forms on or off, and choose what becomes a CUDA graph: a chunk
    as a whole, or its blocks, if the model recomputes them."""
    fused.enabled = compiled
    if arch == 'experts':
        run.model.graphs = run.graphs is not None
        run.model.forms = frozenset()


def cpu_bytes_per_row(run: Run) -> float:
    """Return the bytes of memory that each row of a micro-batch takes on a CPU; 0 for less than
    eight rows.

    This is how much more the process holds after the forward of n rows than after that of n / 2
    (or the next smaller choice), times two for what the backward adds. n is about an eighth of the
    rows, so that the measurement itself fits."""
    choices = [n for n in row_choices(len(run.loader.rows), block_size) if n <= run.rows]
    small = [n for n in choices if n <= choices[0] // 8][:2]
    if len(small) < 2:
        return 0.0
    before, used = run.rows, []
    for rows in reversed(small):
        set_rows(run, rows)
        x, y, state = run.batch
        with autocast(run.device, run.amp):
            loss = run.model(x, y, state or None)  # keeps the graph alive
        used.append(psutil.Process().memory_info().rss)
        del loss
    set_rows(run, before)
    return max(0.0, 2 * (used[1] - used[0]) / (small[0] - small[1]))


def try_rows(
    run: Run,
    choices: list[int],
    allocate: Callable[[Run, int], None],
    attempt: Callable[[], None],
) -> None:
    """Call allocate(run, rows) with the first of `choices` for which attempt() then runs in the
    memory of every rank. Raises Mistake if there is none."""
    for rows in choices:
        allocate(run, rows)
        fits = runs_in_memory(run, attempt)
        if run.world > 1:
            answer = torch.tensor(float(fits), device=run.device)
            dist.all_reduce(answer, dist.ReduceOp.MIN)
            fits = bool(answer)
        if fits:
            return
    model = f'n_layer = {n_layer}, n_expert = {n_expert}, n_embd = {n_embd}'
    rows, advice = 'one row', 'a smaller model or block_size, or more memory'
    if batch_size:
        rows, advice = f'batch_size = {batch_size}', '--batch_size=0 finds the most that fit'
    where = f'does not fit in the memory of {common.device_name(run.device)}'
    raise Mistake(f'{model}, block_size = {block_size}: {rows} {where}: {advice}')


def runs_in_memory(run: Run, attempt: Callable[[], None]) -> bool:
    """Return whether attempt() runs without using up the memory; if it does not compile, print why
    and try uncompiled. Gradients are zero afterwards, and all states reset.

    On a GPU it runs beside memory for the optimizers' moments, and for a twentieth of the card,
    which CUDA graphs, NCCL and fragmentation take."""
    error, on_gpu = None, run.device.startswith('cuda')
    try:
        reserve = None
        if on_gpu and not run.optimizers[0].state:
            muon = sum(p.numel() for p in run.optimizers[0].param_groups[0]['params'])
            moments = 2 * run.gradients.buffer.numel() - muon  # AdamW has two of each, Muon one
            size = 4 * moments + common.device_memory(run.device)[0] / 20
            reserve = torch.empty(int(size), dtype=torch.uint8, device=run.device)
        attempt()
        del reserve
    except Exception as caught:
        if not (common.out_of_memory(caught) or may_run_uncompiled(caught)):
            raise
        error = caught.with_traceback(None)  # its frames would keep the memory
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
    print0(f'compile = True does not work here; training uncompiled ({first_line(error)})')
    set_compiled(run, False)
    return runs_in_memory(run, attempt)


def try_chunk(run: Run, T: int) -> None:
    """Run forward and backward of the first T tokens of a micro-batch."""
    x, y = (t[:, :T] for t in run.batch[:2])
    with autocast(run.device, run.amp):
        loss, _ = run.model(x, y)
    loss.objective.backward()
    run.gradients.zero()


@torch.no_grad()
def try_validation(run: Run) -> None:
    """Run one chunk of a validation batch."""
    validate_chunk(run, *run.val_batch)


# ---- an update ----


def forward_backward(run: Run, x: torch.Tensor, y: torch.Tensor, state: tuple) -> None:
    """Run a micro-batch forward and backward: add its gradients and its share of the mean loss to
    run.gradients, and replace the state, all in place."""
    with autocast(run.device, run.amp):
        loss, new_state = run.model(x, y, state or None)
    share = x.numel() / tokens_per_step  # of the mean over the whole batch
    (loss.objective * share).backward()
    run.gradients.extra[0].add_(loss.cross_entropy * share)
    if recurrent:
        torch._foreach_copy_(state, [t.detach() for t in new_state])


def clip_and_orthogonalize(run: Run) -> list:
    """Clip the gradients by their norm, and run the first part of Muon's step; return what the
    ranks then gather."""
    if grad_clip:
        parameters, norm = run.model.parameters(), run.gradients.extra[2]
        torch.nn.utils.clip_grads_with_norm_(parameters, grad_clip, norm)
    return run.optimizers[0].orthogonalize_shares() if arch == 'experts' else []


def apply_updates(run: Run, shares: list) -> None:
    """Change the weights: the last part of Muon's step, and AdamW's step."""
    *muon, adamw = run.optimizers
    for optimizer in muon:
        optimizer.apply(shares)
    adamw.step()


def reset_streams(run: Run, every_row: bool) -> None:
    """Reset the state of the streams whose turn it is (`reset_every`), or of every row."""
    turns = 1 if every_row else reset_every
    if recurrent and turns:
        rows = len(run.loader.rows)
        first = (run.step - run.rank * rows) % turns
        index = torch.arange(first, rows, turns, device=run.device)
        for t, dim in zip(run.state, STREAM_DIMS[arch], strict=True):
            t.index_fill_(dim, index, 0)  # as init_state does


def train_update(run: Run, stop: bool) -> tuple[float, float, bool]:
    """Train on one batch. Return the mean loss, the norm of the gradient, and whether any rank is
    to stop (`stop` on this one). If loss or norm are not finite, no weight changes.

    This rank's rows are split into micro-batches: streams are, time is not. A chunk, and the
    optimizer before and after the ranks gather Muon's results, are CUDA graphs at any number of
    ranks; between them one message sums gradients, loss and `stop`."""
    x, y, reset = run.loader.next()
    if run.device.startswith('cuda'):
        x, y = x.pin_memory(), y.pin_memory()  # so that the copies below need not wait
    reset_streams(run, every_row=reset)
    run.gradients.zero()
    run.gradients.extra[1].fill_(float(stop))

    x_in, y_in, state = run.batch
    for start in range(0, len(x), run.rows):
        part = slice(start, start + run.rows)
        x_in.copy_(x[part], non_blocking=True)
        y_in.copy_(y[part], non_blocking=True)
        streams = []
        if state is not run.state:  # one of several micro-batches, with a state of its own
            dims = zip(run.state, STREAM_DIMS[arch], strict=True)
            streams = [t.narrow(dim, start, run.rows) for t, dim in dims]
            torch._foreach_copy_(state, streams)
        chunk_graphs = run.graphs if run.capture_chunk else None
        graphed(chunk_graphs, 'chunk', forward_backward, run, x_in, y_in, state)
        if streams:
            torch._foreach_copy_(streams, state)

    run.gradients.sum_over_ranks()
    run.gradients.extra[2].copy_(run.gradients.norm())
    loss, stop, norm = run.gradients.extra.tolist()  # the update's only wait for the device
    if math.isfinite(loss) and math.isfinite(norm):
        fraction = lr_at(run.step, max_iters, warmup_iters, final_lr_ratio)
        for group in (group for optimizer in run.optimizers for group in optimizer.param_groups):
            group['lr'].fill_(group['peak_lr'] * fraction)
        shares = graphed(run.graphs, 'orthogonalize', clip_and_orthogonalize, run)
        if arch == 'experts':
            run.optimizers[0].gather(shares)
        graphed(run.graphs, 'apply', apply_updates, run, shares)
    return loss, norm, stop > 0


# ---- validation ----


def validate_chunk(
    run: Run, x: torch.Tensor, y: torch.Tensor, state: tuple, sums: torch.Tensor
) -> None:
    """Add the summed loss and the number of tokens of a chunk to `sums`, and replace the state, in
    place."""
    with autocast(run.device, run.amp):
        loss, new_state = run.model(x, y, state or None)
    sums[0].add_(loss.cross_entropy.to(sums.dtype) * x.numel())
    sums[1].add_(x.numel())
    torch._foreach_copy_(state, [*new_state])


@torch.no_grad()
def evaluate(run: Run) -> tuple[float, float]:
    """Return the mean loss in nats per token and in bits per byte over all positions of the
    validation streams, each read from an empty state with window W. The ranks share the streams;
    the number of rows and T change neither value."""
    x, y, text_bytes = run.val
    x_in, y_in, state, sums = run.val_batch
    sums.zero_()
    due = every()
    for x_rows, y_rows in zip(x.split(run.val_rows), y.split(run.val_rows), strict=True):
        for t in state:
            t.zero_()
        chunks = zip(x_rows.split(x_in.size(1), 1), y_rows.split(x_in.size(1), 1), strict=True)
        for x_chunk, y_chunk in chunks:
            if x_chunk.shape == x_in.shape:
                x_in.copy_(x_chunk)
                y_in.copy_(y_chunk)
                graphed(run.graphs, 'validation', validate_chunk, run, x_in, y_in, state, sums)
            else:  # the end of the streams is shorter
                validate_chunk(run, x_chunk, y_chunk, state, sums)
            if due():
                print0(f'    validation: {sums[1]:,.0f} of {x.numel():,} tokens')
    total = torch.cat([sums, sums.new_tensor([text_bytes])])
    if run.world > 1:
        dist.all_reduce(total)
    nats, tokens, text_bytes = total.tolist()
    return nats / tokens, nats / math.log(2) / text_bytes


# ---- checkpoints ----


def save(run: Run, best: bool = False) -> None:
    """Save the run: the last checkpoint holds everything, the best what sample.py needs."""
    parts = {
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
    """Restore out_dir's last checkpoint; with eval_only its weights alone. Raises CheckpointError
    for settings or data that would make it another run."""
    needed = ('model', *POSITION) if eval_only else NEEDED
    saved, path = common.load_run(out_dir, SCRIPT, needed)
    defaults = read_script(__file__)[0]
    common.refuse_changes(saved['config'], run.config, defaults, HARMLESS, path, SCRIPT)
    common.restore(run, POSITION, [] if eval_only else run.optimizers, saved, path)
    print0(f'{path}: step {run.step}')
    if eval_only:
        return
    if saved['shards'] != run.shards:
        reason = f'was trained on other shards than those in {data_dir}: give the same data_dir'
        raise CheckpointError(f'{path}: {reason}, or another out_dir')
    with restoring(path, 'loader or state'):
        run.loader.load_state_dict(saved['loader'])
        dims = STREAM_DIMS[arch] if recurrent else ()
        for t, whole, dim in zip(run.state, saved['state'], dims, strict=True):
            fill(t, whole.chunk(run.world, dim)[run.rank])
    rows = saved.get('rows')
    if not batch_size and rows in row_choices(len(run.loader.rows), block_size):
        set_rows(run, rows)  # the same sums as before, to the last bit


# ---- the loop ----


def describe(run: Run) -> None:
    """Print the machine, the model and the shape of an update."""
    sizes = ', '.join(f'{n / 1e6:.2f}M {part}' for part, n in run.model.num_params().items())
    costs = ', '.join(f'{n / 1e6:.1f} {part}' for part, n in run.model.flops_per_token().items())
    micro = tokens_per_step // (block_size * run.world * run.rows)
    shape = f'{run.world} ranks x {micro} micro-batches x {run.rows} rows x {block_size}'
    print0(f'{common.machine(run)}, {run.amp}')
    print0(f'{type(run.model).__name__}: parameters {sizes}; forward MFLOP per token {costs}')
    print0(f'an update: {tokens_per_step:,} tokens = {shape}; {max_iters:,} updates')


def main(config: Settings) -> int:
    """Train, or validate with eval_only. Return the exit status: 0 done, 1 the loss was not finite,
    128 + signal when stopped."""
    baselines.refuse_settings(arch, sys.argv)
    common.restarted(out_dir, config, globals())
    try:
        run = make_run(config)  # data, model, optimizer
        if resume or eval_only:
            load(run)
        if eval_only:
            start = time.perf_counter()
            val_loss, bits = evaluate(run)
            loss = f'validation loss {val_loss:.4f} nats per token ({bits:.4f} bits per byte)'
            took = f'{val_tokens:,} tokens in {time.perf_counter() - start:.1f} s'
            print0(f'{out_dir}, step {run.step}: {loss}, {took}')
            return 0
        prepare(run)
        if run.rank == 0:
            run.lock = common.prepare_out_dir(out_dir, resume, overwrite)
    except ValueError as error:  # Mistake, and ModelConfig's
        fail(error)
    describe(run)
    writes, close = [], None
    if run.rank == 0:
        track, close = open_trackers(config, tensorboard, wandb_project if wandb else '')
        writes = [common.open_log(run, resume), track]

    stopper, stop, due_to_print = common.Stopper(), False, every()
    val_seconds = 0.0  # of the last validation
    status = None
    while True:
        if run.step % eval_interval == 0 or run.step == max_iters:
            start = time.perf_counter()
            val_loss, bits = evaluate(run)
            val_seconds = time.perf_counter() - start
            run.record['val_loss'] = val_loss
            run.record['val_bits_per_byte'] = bits
            run.record['val_seconds'] = val_seconds
            losses = f'val loss {val_loss:.4f} | {bits:.4f} bits per byte'
            times = f'{val_seconds:.1f} s, training {run.seconds:.1f} s so far'
            print0(f'step {run.step}/{max_iters} | {losses} | {times}')
            if val_loss < run.best:
                run.best = val_loss
                save(run, best=True)
        for write in writes:
            write(run.record)
        if run.step >= max_iters or stop:
            break

        start = time.perf_counter()
        loss, norm, stop = train_update(run, stopper.signal is not None)
        elapsed, step = time.perf_counter() - start, run.step + 1
        must_save = step % eval_interval == 0 or step == max_iters or stop
        if not common.finite(run, must_save, loss, norm):
            stopper.restore()
            status = 1
            break
        run.step, run.seconds = step, run.seconds + elapsed
        lr = run.optimizers[0].param_groups[0]['peak_lr']
        lr *= lr_at(step - 1, max_iters, warmup_iters, final_lr_ratio)
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
            eta = timedelta(
                seconds=int((max_iters - step) * (elapsed + val_seconds / eval_interval))
            )
            print0(
                f'step {step}/{max_iters} | loss {loss:.4f} | lr {lr:.2e} | norm {norm:.2f} | '
                f'{1000 * elapsed:.0f} ms | {tokens_per_s:,.0f} tokens/s | '
                f'mfu {common.mfu(run, tokens_per_s)} | eta {eta}'
            )
            due_to_print(True)
        if must_save:
            save(run)  # before the validation: a run that dies in it loses nothing

    if status is None:
        done = f'{run.step} updates in {run.seconds:.0f} s, best val loss {run.best:.4f}'
        status = common.ended(run, stopper, max_iters, done)
    if close:
        close()
    if run.rank == 0 and plot and status == 0:
        unit = 'byte' if tokenizer == 'bytes' else 'token'
        title = f'{type(run.model).__name__}, L = {n_layer}, E = {n_expert}, d = {n_embd}'
        print(f'loss curve: {plot_losses(out_dir, unit, title)}')
    common.leave(run)
    return status


if __name__ == '__main__':
    run_script(
        lambda: main(configure(globals())),
        'interrupted: the last checkpoint is unchanged',
        common.last_words('a smaller batch_size takes less', globals()),
    )

"""Train a language model: the recurrent Parallel-Experts Transformer or its non-recurrent twin.

$ python train_lm.py config/small_L2.py                                                # one GPU
$ python train_lm.py config/small_L2.py --resume=True              # after a crash, ctrl-C, SIGTERM

Writes config.json, log.jsonl and ckpt_*.pt into out_dir. A log line of step n describes update n;
val_loss there is measured after it. On the CPU a resumed run is bit-equal to one never stopped."""

import math
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta

from configurator import configure, every, fail, run_script  # before torch: how threads wait

import torch

import baselines
import common
from common import Gradients, fill, gather, open_trackers, print0, restoring
from data_fineweb import VOCAB, DataError, Loader, find_shards, fingerprint, load_val, token_bytes
from figures import plot_losses
from kernels import fused, graphed
from model import EVAL_CHUNK, ModelConfig, build_model, memory
from muon import lr_at, make_optimizers

# -----------------------------------------------------------------------------
# fmt: off
# I/O
out_dir = 'out/lm'             # everything a run writes goes here
data_dir = 'data/fineweb'      # shards made by data_fineweb.py
init_from = ''                 # begin with the weights of this folder: a run's, or an export's
resume = False                 # go on from out_dir's last checkpoint
overwrite = False              # replace a run that is in out_dir
eval_interval = 250            # updates between validations and checkpoints
eval_only = False              # validate out_dir's last checkpoint and stop
log_interval = 1               # updates between printed lines; log.jsonl has them all
plot = False                   # draw out_dir/loss.png at the end (matplotlib)
tensorboard = False            # also write TensorBoard files into out_dir
wandb = False                  # also log to Weights & Biases
wandb_project = 'parallel-experts'  # its project there
# data
tokenizer = 'gpt2'             # 'gpt2' or 'bytes'; must be the one the shards were made with
tokens_per_step = 131072       # tokens of an update, over all ranks and micro-batches (the paper's)
reset_every = 0                # empty every stream's state each so many updates, in turn; 0: never
batch_size = 0                 # rows a rank runs at a time; 0: what the memory holds (AT_ONCE)
val_tokens = 10485760          # validation tokens: modded-nanogpt's and llm.c's 10,485,760
val_streams = 512              # read as so many streams, whatever the batch, the ranks or the model
# model (model.py has the equations)
arch = 'experts'               # or what others use: 'transformer', 'lstm' (baselines.py)
recurrent = True               # True: RecurrentGPT, False: GPT
n_layer = 2                    # L, depth levels; L * E = 16 blocks of width 768 is the small budget
n_expert = 8                   # E, experts a level
n_embd = 768                   # D, width
n_head = 0                     # query heads; 0: D/96 if D % 192 == 0, D/64 if D % 128 == 0
n_kv_head = 0                  # key-value heads; 0: half of n_head
window = 128                   # W, attention window (GPT: at evaluation only)
block_size = 64                # T, tokens of a chunk; the paper: 64 recurrent, 256 or 2048 not
aggregation = 'sqrt_sum'       # 'sqrt_sum', 'mean', 'softmax_mean' or 'softmax_l2'
share_kv = True                # recurrent: a level's experts share a cache; False: each its own
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
baseline_lr = 0.0              # the baselines' AdamW's peak; 0: 2e-3 (lstm), 1e-3 (transformer)
# system
seed = 1337                    # of initial weights, of the shards' order and where each is begun
device = 'auto'                # 'auto': cuda if there is one; or 'cpu', 'cuda', 'cuda:1'
dtype = 'auto'                 # of products: 'float32', 'bfloat16', 'auto': bfloat16 if it is fast
compile = True                 # torch.compile the unroll's pieces or GPT's blocks, if that works
graphs = True                  # CUDA: an update's parts as graphs (WHOLE_GRAPH), from the fourth on
path = 'fast'                  # 'fast' (unroll.py) or 'plain' (the equations, for checking)
threads = 0                    # CPU threads; 0: one or all, measured at the start, kept on resume
# fmt: on
# -----------------------------------------------------------------------------
FROM_1 = 'eval_interval log_interval max_iters block_size tokens_per_step val_tokens val_streams'
FROM_0 = """batch_size learning_rate embedding_lr head_lr scalar_lr weight_decay grad_clip adam_eps
    warmup_iters baseline_lr reset_every seed threads"""
RANGES = dict.fromkeys(FROM_1.split(), (1, math.inf)) | dict.fromkeys(FROM_0.split(), (0, math.inf))
RANGES |= {'momentum': (0, 0.9999), 'betas': (0, 0.9999), 'final_lr_ratio': (0, 1)}
RANGES |= {'arch': ['experts', 'transformer', 'lstm'], 'path': ['fast', 'plain']}
RANGES |= {'tokenizer': [*VOCAB], 'threads': (0, 1024)}  # OpenMP dies of too many
SIZES = """n_layer n_expert n_embd n_head n_kv_head window block_size aggregation share_kv residual
    router_dim""".split()  # of ModelConfig
FIXED = ('tokenizer', 'tokens_per_step', 'recurrent', 'seed', *SIZES)  # a resumed run keeps them
POSITION = ('step', 'record', 'best', 'seconds')  # a run's, saved and restored
REST = ('optimizers', 'loader', 'state', 'rng', 'shards')  # and what else it goes on from
STREAMS = {'experts': (0, 1, 1, 0), 'lstm': (1, 1)}  # the dimension of a state's tensors for B
WHOLE_GRAPH = 2048  # levels x tokens of the longest recurrent chunk that is one graph
AT_ONCE = 32768  # tokens of a micro-batch where batch_size = 0, or fewer: a quarter of an update


@dataclass
class Run:
    """What a run is made of, each in its place: a CUDA graph reads and writes it there."""

    config: dict  # its settings, as checkpoints keep them
    rank: int
    world: int
    device: str  # 'cpu' or 'cuda:N'
    amp: torch.dtype  # of matrix products
    loader: Loader
    shards: list  # the data's fingerprint
    val: tuple[torch.Tensor, torch.Tensor, float]  # x, y (S, n), this rank's; bytes of text in y
    model: torch.nn.Module
    inputs: tuple  # x, y (rows, T) and state, that each micro-batch is put into
    state: tuple | None  # of all streams of this rank, between updates
    optimizers: list[torch.optim.Optimizer]
    gradients: Gradients  # gradients, and extra: loss, ranks told to stop, norm
    graphs: dict | None  # None: the optimizer is no CUDA graph
    chunk_graphs: dict | None  # None: a micro-batch's forward and backward are none
    step: int = 0
    record: dict = field(default_factory=lambda: {'step': 0, 'tokens': 0})  # of the log
    best: float = math.inf
    seconds: float = 0.0
    lock: object = None  # of out_dir, while the run is at work in it


# ---- data, model, optimizer ----


def model_config(config: dict) -> ModelConfig:
    """The model's sizes, of a run's settings. ValueError for those that do not fit together."""
    sizes = {name: config[name] for name in SIZES}
    return ModelConfig(VOCAB[config['tokenizer']], mode=config['path'], **sizes)


def captures(device: str, world: int) -> tuple[bool, bool]:
    """Whether the optimizer is a CUDA graph, and whether a chunk's forward and backward are: on one
    GPU (several ranks have messages in both), and a long recurrent chunk is not."""
    optimizer = graphs and device != 'cpu' and world == 1 and path != 'plain' and arch == 'experts'
    return optimizer, optimizer and not (recurrent and n_layer * block_size > WHOLE_GRAPH)


def fitting_rows(c: ModelConfig, streams: int, amp: torch.dtype, device: str, whole: bool) -> int:
    """Rows of a micro-batch, a divisor of a rank's `streams`: batch_size, or the most that are at
    most AT_ONCE tokens and fit in all of the device's memory: a resumed run does the same.
    Mistake where they need more than is free. A baseline's needs are taken for ours."""

    def need(rows: int) -> float:
        where = torch.device(device).type
        return sum(memory(c, recurrent, (rows, streams), amp, where, whole).values())

    total, free = common.device_memory(device)
    divisors = [n for n in range(1, streams + 1) if streams % n == 0]
    fits = [n for n in divisors if n * block_size <= AT_ONCE and need(n) <= total]
    rows = batch_size or max(fits, default=1)
    if rows not in divisors:
        raise ValueError(f'batch_size = {rows}: must divide the {streams} rows of a rank')
    what = f'n_layer = {c.n_layer}, n_expert = {c.n_expert}, n_embd = {c.n_embd}'
    fits = [f'--batch_size={n} fits' for n in divisors if need(n) <= free]
    advice = fits[-1] if fits else 'a smaller model, fewer tokens_per_step, or more GPUs'
    common.check_fits(need(rows), f'{what}, batch_size = {rows}', device, advice)
    return rows


def autocast(device: str, amp: torch.dtype) -> torch.autocast | nullcontext:
    return torch.autocast(torch.device(device).type, amp) if amp != torch.float32 else nullcontext()


def make_run(config: dict) -> Run:
    """A new run. ValueError says what is wrong with the settings or the data."""
    rank, world, device_ = common.join_ranks(device, threads)
    amp = common.pick_dtype(dtype, device_)
    if tokens_per_step % (block_size * world):
        need = f'a multiple of block_size x ranks = {block_size} x {world}'
        raise ValueError(f'tokens_per_step = {tokens_per_step}: must be {need}')
    if val_streams < world:
        raise ValueError(f'val_streams = {val_streams}: must be at least the ranks, {world}')
    if len(betas) != 2:
        raise ValueError(f'betas = {betas}: expected two numbers')
    if arch != 'experts' and recurrent != (arch == 'lstm'):
        raise ValueError(f'arch = {arch!r}: wants --recurrent={arch == "lstm"}')
    common.need_packages(matplotlib=plot, tensorboard=tensorboard, wandb=wandb)
    torch.manual_seed(seed)
    V, B = VOCAB[tokenizer], tokens_per_step // block_size  # rows of an update, over all ranks
    sizes, (captured, whole) = model_config(config), captures(device_, world)
    rows = fitting_rows(sizes, B // world, amp, device_, whole)

    train, held_out = (find_shards(data_dir, split, tokenizer) for split in ('train', 'val'))
    loader = Loader(train, B, block_size, V, recurrent, seed, (rank, world))
    x, y = load_val(held_out, val_tokens, val_streams, V, (rank, world))
    size = math.nan  # of the text, in bytes
    with suppress(DataError):  # no GPT-2 tokenizer: needed for nothing else
        size = float(token_bytes(tokenizer)[y.numpy()].sum())
    val = (x.to(device_), y.to(device_), size)

    model = build_model(sizes, recurrent) if arch == 'experts' else baselines.build(arch, sizes)
    if init_from:
        common.init_from(model, init_from, resume or eval_only)
    model = model.to(device_)
    x_y = torch.zeros(2, rows, block_size, dtype=torch.int64, device=device_)
    with autocast(device_, amp):  # sets the dtype of a state's keys and values
        inputs = *x_y, model.init_state(rows) if recurrent else None
        several = recurrent and rows < B // world  # micro-batches
        state = model.init_state(B // world) if several else inputs[2]

    if arch == 'experts':
        optimizers = make_optimizers(model, config)
    else:
        optimizers = [baselines.make_adamw(model, baseline_lr)]
    for group in (g for optimizer in optimizers for g in optimizer.param_groups):
        group['peak_lr'] = group['lr']  # and 'lr' is where a CUDA graph reads it
        group['lr'] = torch.tensor(group['lr'], device=device_)
    # a backward's order: head, levels, embedding
    params = sorted(reversed(list(model.parameters())), key=lambda p: p is not model.head)
    shards, graphs_ = fingerprint([*train, *held_out]), {} if captured else None
    place, data = (config, rank, world, device_, amp), (loader, shards, val)
    update = (inputs, state, optimizers, Gradients(params, 3), graphs_, graphs_ if whole else None)
    return Run(*place, *data, model, *update)


# ---- an update, a validation ----


def rate(step: int) -> float:
    """Of the update after `step` others, as a fraction of every peak."""
    return lr_at(step, max_iters, warmup_iters, final_lr_ratio)


def forward_backward(run: Run, x: torch.Tensor, y: torch.Tensor, state: tuple | None) -> None:
    """Adds a micro-batch's gradients and share of the mean loss to run.gradients, all in place."""
    with autocast(run.device, run.amp):
        loss, new = run.model(x, y, state)
    share = x.numel() / tokens_per_step  # of the mean over the whole batch
    (loss.objective * share).backward()
    run.gradients.extra[0].add_(loss.cross_entropy * share)
    if recurrent:
        torch._foreach_copy_(state, [t.detach() for t in new])  # path 'plain' has a graph there


def apply(run: Run) -> None:
    if grad_clip:
        norm = run.gradients.extra[2]
        torch.nn.utils.clip_grads_with_norm_(run.model.parameters(), grad_clip, norm)
    for optimizer in run.optimizers:
        optimizer.step()


def train_update(run: Run, stop: bool) -> tuple[float, float, bool]:
    """This rank's rows in micro-batches (streams are split, not time), summed over ranks -> mean
    loss, gradient norm, whether any rank was told to stop. Not finite: no weight changes."""
    x, y, reset = run.loader.next()
    if run.device != 'cpu':
        x, y = x.pin_memory(), y.pin_memory()  # the copies below then need not wait
    run.gradients.zero()
    run.gradients.extra[1].fill_(float(stop))
    x_in, y_in, state = run.inputs
    rows, mine = len(x_in), None
    turns = 1 if reset else reset_every
    if recurrent and turns:
        first = (run.step - run.rank * len(x)) % turns
        fresh = torch.arange(first, len(x), turns, device=run.device)
        for t, d in zip(run.state, STREAMS[arch], strict=True):
            t.index_fill_(d, fresh, 0)  # as init_state's
    for start in range(0, len(x), rows):
        x_in.copy_(x[start : start + rows], non_blocking=True)
        y_in.copy_(y[start : start + rows], non_blocking=True)
        if state is not run.state:  # one of several micro-batches: its part of it
            mine = [t.narrow(d, start, rows) for t, d in zip(run.state, STREAMS[arch], strict=True)]
            torch._foreach_copy_(state, mine)
        run.gradients.sending = start + rows == len(x)
        graphed(run.chunk_graphs, 'chunk', forward_backward, run, x_in, y_in, state)
        if mine:
            torch._foreach_copy_(mine, state)
    run.gradients.finish()
    norm = torch.nn.utils.get_total_norm([p.grad for p in run.model.parameters()])
    run.gradients.extra[2].copy_(norm)
    loss, stop, norm = run.gradients.extra.tolist()  # the update's only wait for the device
    if math.isfinite(loss) and math.isfinite(norm):
        for group in (g for optimizer in run.optimizers for g in optimizer.param_groups):
            group['lr'].fill_(group['peak_lr'] * rate(run.step))
        graphed(run.graphs, 'optimizer', apply, run)
    return loss, norm, stop > 0


@torch.no_grad()
def evaluate(run: Run) -> tuple[float, float]:
    """Mean loss in nats and bits per byte over all positions of the validation streams, each from
    an empty state, window W. All ranks share the streams; rows and T do not matter."""
    x, y, size = run.val
    T = min(block_size, EVAL_CHUNK)
    total = torch.tensor([0, 0, size], dtype=torch.float64, device=run.device)
    rows, due = len(run.inputs[0]), every()
    for x_rows, y_rows in zip(x.split(rows), y.split(rows), strict=True):
        with autocast(run.device, run.amp):
            state = run.model.init_state(len(x_rows))
            for x_t, y_t in zip(x_rows.split(T, 1), y_rows.split(T, 1), strict=True):
                loss, state = run.model(x_t, y_t, state)
                total[0] += loss.cross_entropy.double() * x_t.numel()
                total[1] += x_t.numel()
                if due():
                    print0(f'    validation: {total[1]:,.0f} of {x.numel():,} tokens')
    if run.world > 1:
        torch.distributed.all_reduce(total)
    nats, tokens, size = total.tolist()
    return nats / tokens, nats / math.log(2) / size


def trial_chunk(run: Run, T: int) -> None:
    """Run forward and backward of a micro-batch's first T tokens, to compile or time them."""
    x, y = (t[:, :T] for t in run.inputs[:2])
    with autocast(run.device, run.amp):
        loss, _ = run.model(x, y)
    loss.objective.backward()


def prepare(run: Run) -> None:
    """Compiles, where that works. Chunks that no graph holds are replayed from captured blocks."""
    if not compile or path == 'plain' or arch == 'lstm':
        return
    fused.enabled = True
    run.model.graphs = graphs and run.device != 'cpu'

    fused.enabled = common.compiles(run.model, lambda: trial_chunk(run, block_size))


def save(run: Run, best: bool = False) -> None:
    """The last checkpoint holds all; the best what sample.py needs."""
    parts = {'recurrent': recurrent, 'model_config': asdict(run.model.config)}
    parts |= {name: getattr(run, name) for name in POSITION}
    if not best:
        state = zip(run.state, STREAMS[arch], strict=True) if recurrent else ()
        parts |= {'state': [gather(t, dim) for t, dim in state]}
        parts |= {'loader': run.loader.state_dict(), 'shards': run.shards}
    common.save_run(run, parts, None if best else run.optimizers)


def load(run: Run) -> None:
    """Go on where out_dir's last checkpoint stood; refuse settings and data that would make it
    another run. eval_only: the weights alone."""
    needed = ('model', *POSITION, *(() if eval_only else REST))
    saved, where = common.load_run(out_dir, 'train_lm.py', needed, FIXED, run.config)
    common.restore(run, POSITION, [] if eval_only else run.optimizers, saved, where)
    print0(f'{where}: step {run.step}')
    if eval_only:
        return
    if saved['shards'] != run.shards:
        words = f'was trained on other shards than those in {data_dir}: give the same data_dir'
        raise common.CheckpointError(f'{where}: {words}, or another out_dir')
    with restoring(where, 'loader or state'):
        run.loader.load_state_dict(saved['loader'])
        if recurrent:
            for mine, whole, dim in zip(run.state, saved['state'], STREAMS[arch], strict=True):
                fill(mine, whole.chunk(run.world, dim)[run.rank])


# ---- the loop ----


def describe(run: Run) -> None:
    params, flops, rows = run.model.num_params(), run.model.flops_per_token(), len(run.inputs[0])
    micro = tokens_per_step // (block_size * run.world * rows)
    sizes = ', '.join(f'{n / 1e6:.2f}M {part}' for part, n in params.items())
    costs = ', '.join(f'{n / 1e6:.1f} {part}' for part, n in flops.items())
    shape = f'{run.world} ranks x {micro} micro-batches x {rows} rows x {block_size}'
    print0(f'{common.machine(run)}, {run.amp}')
    print0(f'{type(run.model).__name__}: parameters {sizes}; MFLOP a token forward {costs}')
    print0(f'an update: {tokens_per_step:,} tokens = {shape}; {max_iters:,} updates')


def loop(run: Run, writes: list[Callable[[dict], object]]) -> int:
    """-> the exit status: 0 done, 1 the loss was not finite, 128 + signal when told to stop."""
    stopper, stop, due_to_print = common.Stopper(), False, every()
    validation = 0.0  # seconds of the last one
    while True:
        if run.step % eval_interval == 0 or run.step == max_iters:
            start = time.perf_counter()
            val_loss, bpb = evaluate(run)
            validation = time.perf_counter() - start
            run.record |= {'val_loss': val_loss, 'val_bits_per_byte': bpb}
            print0(f'step {run.step}/{max_iters} | val loss {val_loss:.4f} | {bpb:.4f} bits a byte')
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
        per_s = tokens_per_step / elapsed
        due = step % eval_interval == 0 or step == max_iters or stop
        if not common.finite(run, due, loss, norm):
            stopper.restore()
            return 1
        run.step, run.seconds = step, run.seconds + elapsed
        run.record = {'step': step, 'tokens': step * tokens_per_step, 'epoch': run.loader.epoch}
        peak = run.optimizers[0].param_groups[0]['peak_lr']
        run.record |= {'train_loss': loss, 'grad_norm': norm, 'lr': peak * rate(step - 1)}
        run.record |= {'ms': 1000 * elapsed, 'tokens_per_s': per_s, 'seconds': run.seconds}
        if step % log_interval == 0 or step == max_iters or due_to_print():
            seconds = (max_iters - step) * (elapsed + validation / eval_interval)
            mfu, eta = common.mfu(run, per_s), timedelta(seconds=int(seconds))
            speed = f'{1000 * elapsed:.0f} ms | {per_s:,.0f} tok/s | mfu {mfu} | eta {eta}'
            rates = f'lr {run.record["lr"]:.2e} | norm {norm:.2f}'
            print0(f'step {step}/{max_iters} | loss {loss:.4f} | {rates} | {speed}')
            due_to_print(said=True)
        if due:
            save(run)  # before the validation: one that dies loses nothing
    done = f'{run.step} updates in {run.seconds:.0f} s, best val loss {run.best:.4f}'
    return common.ended(run, stopper, max_iters, done)


def train(config: dict) -> int:
    """A run from beginning to end, or its validation -> the exit status."""
    baselines.refuse_settings(arch, sys.argv)
    common.restarted(out_dir, config, globals())
    try:
        run = make_run(config)  # finds all mistakes in settings and data before out_dir is touched
        if resume or eval_only:
            load(run)
        if run.rank == 0 and not eval_only:
            run.lock = common.prepare_out_dir(out_dir, resume, overwrite)
    except ValueError as error:  # DataError, CheckpointError, ModelConfig's
        fail(error)
    if not eval_only:
        run.config['threads'] = common.pick_threads(
            run.config['threads'], run.device, lambda T: trial_chunk(run, T), block_size
        )
    describe(run)
    if eval_only:
        val_loss, bpb = evaluate(run)
        print0(f'step {run.step}, val loss {val_loss:.4f}, {bpb:.4f} bits a byte')
        return 0
    prepare(run)
    if run.rank > 0:
        status = loop(run, [])
    else:
        track, close = open_trackers(config, tensorboard, wandb_project if wandb else '')
        status = loop(run, [common.open_log(run, resume), track])
        close()
        if plot and status == 0:
            unit = 'byte' if tokenizer == 'bytes' else 'token'
            title = f'{type(run.model).__name__}, L = {n_layer}, E = {n_expert}, d = {n_embd}'
            print(f'loss curve: {plot_losses(out_dir, unit, title)}')
    common.leave(run)
    return status


if __name__ == '__main__':
    stays = 'interrupted: the last checkpoint stays as it was'
    words = common.last_words('a smaller batch_size takes less', globals())
    run_script(lambda: train(configure(globals())), stays, words)

"""Train a language model: the recurrent Parallel-Experts Transformer, its non-recurrent
counterpart, or a baseline, an LSTM.

$ python train_lm.py config/small_L2.py                                    # one GPU, or the CPU
$ torchrun --standalone --nproc_per_node=4 train_lm.py config/small_L2.py  # four GPUs
$ python train_lm.py --out_dir=out/small_L2 --resume=True                  # after a crash or ctrl-C

A run writes config.json, log.jsonl, checkpoints and its best model into out_dir
(support/run_folder.py). The line of the log with `step` n has the training loss of update n and,
where the model is validated, the validation loss after it; its `seconds` are those of the n updates
alone, without the start, the trials, validations and checkpoints. On a CPU a resumed run is
bit-equal to one that was never stopped."""

import math
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import fields
from datetime import timedelta
from pathlib import Path

from configurator import Settings, configure
from support.script import UserError, print0, run_script, warn

import torch
import torch.distributed as dist

from lstm import build_lstm
from model import MODEL_RANGES, ModelConfig, build_model
from overrides import choose_overrides
from support import ranks
from support.compiling import fused, graphed
from support.export import initialize_from, load_weights, refuse_unknown_sizes
from support.files import plain
from support.loader import Loader, checksum_of, find_shards, fingerprint, load_val
from support.muon import Muon
from support.packages import need_packages
from support.random_states import gather_random_states, restore_random_states
from support.ranks import Gradients, gather
from support.run_folder import (
    BEST,
    RunFolder,
    load_moments,
    machine,
    mfu,
    restoring,
    settings_of,
    sizes_in,
)
from support.signals import Stopper
from support.stream import SCORE_CHUNK, Stream, copy_state
from tokenizer import VOCAB, token_bytes

# -----------------------------------------------------------------------------
# fmt: off
# I/O
out_dir = 'out/lm'             # everything that a run writes goes here
data_dir = 'data/fineweb'      # shards prepared by data_fineweb.py
init_from = ''                 # start from the weights in this folder, of a run or an export
resume = False                 # continue the run in out_dir; 'auto' = if there is one
overwrite = False              # replace the run in out_dir
eval_interval = 2000           # updates between checkpoints, each with a validation (by default
                               # < 5% of the time)
eval_only = False              # validate the last checkpoint, or the export, in out_dir and stop
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
                               # 32,768 tokens (CPU: 4,096)
val_tokens = 10485760          # validation tokens, as many as in modded-nanogpt and llm.c
val_streams = 512              # streams into which val_tokens are cut, for any number of ranks
# model (model.py has the equations)
arch = 'experts'               # 'experts', or a baseline: 'lstm' (lstm.py)
recurrent = True               # False = the non-recurrent model
n_layer = 2                    # L, layers; the small budget is L * E = 16 experts of width 768
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
scalar_lr = 2e-2               # AdamW, for a, b, the router's bias and expert embeddings; ours
momentum = 0.95                # Muon, Nesterov
weight_decay = 0.01            # Muon, cautious; for its matrices only
betas = (0.8, 0.95)            # AdamW
grad_clip = 1.0                # largest global norm of the gradients; 0 = no clipping
warmup_iters = 100             # updates of linear warm-up, before a cosine decay
adam_eps = 1e-10               # AdamW; small, because gradients of the head are small
final_lr_ratio = 0.01          # learning rate of the last update over the peak
baseline_lr = 2e-3             # AdamW, for all weights of arch = 'lstm'
# system
seed = 1337                    # of the initial weights and the order in which shards are read
device = 'auto'                # 'auto' (cuda if there is one), 'cpu', 'cuda', 'cuda:1' or 'mps'
dtype = 'auto'                 # of the model's products: 'float32' (TF32 on a GPU), 'bfloat16', or
                               # 'auto' (bfloat16 where it is fast). Muon always chooses like 'auto'
compile = True                 # compile fused functions with torch.compile, if that works
cuda_graphs = True             # on a GPU: replay forward, backward and optimizer as CUDA graphs
overrides = True               # on a GPU, with compile: use Triton kernels that agree with the
                               # functions that they replace (overrides.py)
mode = 'fast'                  # 'plain', for checking: one weight gradient per token, neither
                               # compile nor cuda_graphs
threads = 0                    # CPU threads; 0 = torch's choice
# fmt: on
# -----------------------------------------------------------------------------
RANGES = {
    **MODEL_RANGES,
    **dict.fromkeys(('eval_interval', 'log_interval'), (1, math.inf)),
    **dict.fromkeys(('tokens_per_step', 'val_tokens', 'val_streams'), (1, math.inf)),
    'max_iters': (1, 10**10),
    'resume': [False, True, 'auto'],
    'arch': ['experts', 'lstm'],
    'tokenizer': list(VOCAB),
    'momentum': (0, 0.9999),
    'betas': (0, 0.9999),
    'final_lr_ratio': (0, 1),
    'threads': (0, 1024),  # OpenMP fails beyond
}
# Settings that define the model. One with the name of a field of ModelConfig sets that field.
MODEL_SETTINGS = (
    *('arch', 'recurrent', 'tokenizer'),
    *(f.name for f in fields(ModelConfig) if f.name not in ('vocab_size', 'mode')),
)
# With init_from, a setting on the left is not adopted if one on the right has another value here
# than in the source.
DEPENDS_ON = {
    'recurrent': ('arch',),
    **dict.fromkeys(('share_kv', 'init_b', 'residual'), ('recurrent',)),
    'n_head': ('n_embd',),
    'n_kv_head': ('n_head',),
}
# Settings that a resumed run must keep, besides its data; the command line may change the others.
# device = 'auto', dtype = 'auto' and threads = 0 keep what the run had.
FIXED = (*MODEL_SETTINGS, 'tokens_per_step', 'seed', 'init_from')


def is_due(step: int) -> bool:
    """Return whether the model is saved and validated after `step` updates."""
    return step % eval_interval == 0 or step == max_iters


def lr_at(step: int) -> float:
    """Return the learning rate of update `step` (0 .. max_iters - 1) as a fraction of its peak: a
    linear warm-up to 1 at step warmup_iters - 1, then half a cosine down to final_lr_ratio."""
    if step < warmup_iters:
        return (step + 1) / warmup_iters
    progress = min(1.0, (step + 1 - warmup_iters) / max(1, max_iters - warmup_iters))
    return final_lr_ratio + (1 - final_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress))


def make_model(settings: dict, vocab_size: int) -> torch.nn.Module:
    """Return the language model of a run's settings, initialized. Raises UserError if they do not
    fit together."""
    sizes = {f.name: settings[f.name] for f in fields(ModelConfig) if f.name in settings}
    build = build_lstm if settings['arch'] == 'lstm' else build_model
    return build(ModelConfig(vocab_size=vocab_size, **sizes), settings['recurrent'])


def make_optimizers(model: torch.nn.Module) -> tuple[Muon, torch.optim.AdamW]:
    """Return Muon for the matrices of the layers, and AdamW for the rest. Learning rates are
    tensors, because CUDA graphs read them at each replay; the trainer sets them from `peak_lr`."""
    params = model.param_groups()  # by name, a subset of the names below and 'matrices'
    scale = (n_embd / 768) ** -0.5
    lstm_options = {'lr': baseline_lr, 'betas': (0.9, 0.95), 'eps': 1e-8}
    groups = {
        'embedding': {'lr': embedding_lr * scale},
        'head': {'lr': head_lr * scale},
        'scalars': {'lr': scalar_lr},
        'lstm_matrices': {**lstm_options, 'weight_decay': 0.1},
        'lstm_biases': lstm_options,
    }
    adamw = torch.optim.AdamW(
        [{'params': params[name], **group} for name, group in groups.items() if params.get(name)],
        betas=betas,
        eps=adam_eps,
        weight_decay=0.0,
        fused=True,
        capturable=model.head.is_cuda,
    )
    # No warning: the first steps run uncaptured on purpose.
    adamw._warned_capturable_if_run_uncaptured = True
    matrices = [{'params': params.get('matrices', [])}]
    muon = Muon(matrices, lr=learning_rate, momentum=momentum, weight_decay=weight_decay)
    for group in [*muon.param_groups, *adamw.param_groups]:
        group['peak_lr'] = group['lr']
        group['lr'] = torch.tensor(group['lr'], device=model.head.device)
    return muon, adamw


def make_chunk(
    model: torch.nn.Module, total_rows: int, loss_sum: torch.Tensor, autocast: torch.autocast
) -> Callable:
    """Return chunk(x, y, state), the forward and backward of a micro-batch.

    x, y: inputs and targets (rows, T); state: that of these rows, updated in place, () if none is
    carried. A micro-batch adds its share of the mean over the `total_rows` rows of an update, of
    all ranks, to the gradients and to `loss_sum` (the cross-entropy)."""

    def chunk(x: torch.Tensor, y: torch.Tensor, state: tuple) -> None:
        share = len(x) / total_rows
        with autocast:
            loss, new_state = model(x, y, state or None)
        (loss.objective * share).backward()
        loss_sum.add_(loss.cross_entropy * share)
        copy_state(state, new_state)

    return chunk


def make_update(
    model: torch.nn.Module,
    muon: Muon,
    adamw: torch.optim.AdamW,
    norm: torch.Tensor,
    graphs: dict | None,
) -> Callable[[float], None]:
    """Return update(lr), which clips the gradients to grad_clip (`norm` is their global norm) and
    updates the weights; lr: a fraction of the peak learning rates. It is two CUDA graphs, because
    Muon's all-gather between them is not captured. Every rank makes the same update: what it draws
    at random, such as noise for gradients, must be the same on all."""

    def clip_and_orthogonalize() -> list:
        if grad_clip:
            torch.nn.utils.clip_grads_with_norm_(model.parameters(), grad_clip, norm)
        return muon.orthogonalize_shares()

    def change_weights(shares: list) -> None:
        muon.apply(shares)
        adamw.step()

    def update(lr: float) -> None:
        for group in [*muon.param_groups, *adamw.param_groups]:
            group['lr'].fill_(group['peak_lr'] * lr)
        shares = graphed(graphs, 'orthogonalize', clip_and_orthogonalize)
        muon.gather(shares)
        graphed(graphs, 'change weights', change_weights, shares, needs='orthogonalize')

    return update


def draw_losses() -> None:
    """Draw loss.png."""
    from support.plots import plot_losses  # only here, because matplotlib imports slowly

    plot_losses(out_dir)


@ranks.explain_errors(
    'a smaller batch_size, block_size or model takes less, and so does --cuda_graphs=False; '
    '--resume=True continues from the last checkpoint'
)
def main(config: Settings) -> int:
    """Train, or only validate with eval_only. Return the exit status: 0 = done, 1 = the loss was
    not finite, 128 + signal = stopped."""
    with ExitStack() as at_end:
        return run(config, at_end)


def run(config: Settings, at_end: ExitStack) -> int:
    """Do the work of main. at_end: callbacks that follow the work, also after an error."""
    folder = RunFolder(config, MODEL_SETTINGS if eval_only else FIXED, __file__)
    at_end.callback(folder.unlock)
    if init_from and not folder.saved:
        saved = sizes_in(init_from, MODEL_SETTINGS)
        config.adopt(saved, MODEL_SETTINGS, init_from, DEPENDS_ON, print0)
    globals().update(config)  # those of the run that is resumed or validated
    if folder.step > max_iters and not eval_only:
        raise UserError(f'max_iters = {max_iters}: the run in {out_dir} has {folder.step} updates')
    if folder.finished and folder.step == max_iters and not eval_only:
        print0(f'{out_dir}: done, {folder.step} updates')
        if plot and folder.rank == 0:
            ranks.attempt('loss.png', draw_losses)
        return 0
    if not eval_only:
        need_packages(tensorboard=tensorboard, wandb=wandb)
    if len(betas) != 2:
        raise UserError(f'betas = {betas}: expected two numbers')

    rank, world, device_ = ranks.join_ranks(device, threads)
    config['dtype'] = str(ranks.pick_dtype(dtype, device_)).removeprefix('torch.')
    ranks.share_settings(config)
    globals().update(config)
    compute_dtype = getattr(torch, dtype)
    torch.manual_seed(seed)
    fused.enabled = compile and mode == 'fast'
    graphs = {} if cuda_graphs and device_.startswith('cuda') and mode == 'fast' else None

    # data: the validation streams of this rank, and its rows of every batch
    V, T = VOCAB[tokenizer], block_size
    B = tokens_per_step // (T * world)
    if val_streams < world:
        raise UserError(
            f'val_streams = {val_streams}: must be at least the number of ranks, {world}'
        )
    val_shards = find_shards(data_dir, 'val', tokenizer)
    val_x, val_y = load_val(val_shards, val_tokens, val_streams, V, share=(rank, world))
    bytes_of = torch.full((V,), math.nan)  # stays nan without GPT-2's tokenizer, needed here alone
    with suppress(UserError):
        bytes_of = torch.from_numpy(token_bytes(tokenizer))
    val_x, val_y = val_x.to(device_), val_y.to(device_)
    train_shards = []
    if not eval_only:
        if tokens_per_step % (T * world):
            multiple = f'a multiple of block_size x ranks = {T} x {world}'
            raise UserError(f'tokens_per_step = {tokens_per_step}: must be {multiple}')
        if batch_size and B % batch_size:
            raise UserError(f'batch_size = {batch_size}: must divide the {B} rows of each rank')
        train_shards = find_shards(data_dir, 'train', tokenizer)
        if folder.saved:  # the run does not read shards that have been added since it started
            names = [name for name, _, _ in folder.saved.get('shards', [])]
            train_shards = [x for x in train_shards if Path(x).name in names]
    shards = fingerprint([*train_shards, *val_shards])
    ranks.compare_ranks(*folder.fingerprint(), shards)
    saved_shards = folder.saved.get('shards') if folder.saved else None  # an export has none
    if eval_only:
        if saved_shards and any(shard not in saved_shards for shard in shards):
            print0(f'{data_dir}: the validation shards are not those of the run')
    elif folder.saved and saved_shards != shards:
        reason = f'was trained on other shards than those in {data_dir}'
        raise UserError(f'{folder.path_of_saved}: {reason}: give the same data_dir')
    if not eval_only:
        loader = Loader(
            train_shards, B=B * world, T=T, V=V, carries=recurrent, seed=seed, share=(rank, world)
        )

    # model
    init_checksum = None
    model = make_model(config, V)
    model.metadata = {'tokenizer': tokenizer}
    if folder.saved:
        refuse_unknown_sizes(model, folder.saved.get('entries', {}), folder.path_of_saved)
        load_weights(model, folder.saved['model'], folder.path_of_saved)
    elif init_from:
        init_checksum = initialize_from(model, init_from)
    model = model.to(device_)
    ranks.share_weights(model)
    model.cuda_graphs = graphs is not None

    # optimizers, and the streams of this rank. A few trial steps, which leave no trace in weights,
    # buffers or state, choose the rows of a micro-batch and the Triton overrides, and show whether
    # compilation works. The CUDA graphs of validation and training hold memory at the same time. A
    # new run validates first, and so sizes validation first, in an eighth of the memory; a resumed
    # run sizes training first, to keep its rows.
    start = time.perf_counter()
    valid = Stream(
        model,
        len(val_x),
        min(T, SCORE_CHUNK),
        compute_dtype=compute_dtype,
        may_shrink=True,
        graphs=graphs,
    )

    def size_validation(**limits: float) -> None:
        with ranks.evaluating(model):
            valid.choose_rows(valid.score_chunk, **limits)

    if not folder.saved:
        size_validation(share=1 / 8)
    if not eval_only:
        muon, adamw = make_optimizers(model)
        grads = Gradients(model.parameters(), n_extra=2)
        loss_sum, stop_sum = grads.extra  # reduced together with the gradients
        norm = torch.zeros((), device=device_)
        rows = batch_size
        saved_rows = folder.saved.get('rows', 0) if folder.saved else 0
        if not rows and saved_rows and B % saved_rows == 0:
            rows = saved_rows  # so that gradients are summed in the same order
        train = Stream(model, B, T, compute_dtype=compute_dtype, carries=recurrent, graphs=graphs)
        chunk = make_chunk(model, B * world, loss_sum, train.autocast)
        most = rows or train.rows
        train.set_rows(most)
        fit = {'fixed': batch_size > 0, 'spare': valid.memory}
        train.choose_rows(chunk, **fit)
        if overrides and fused.enabled and arch == 'experts':
            # a resumed run takes at most those that it had
            allowed = folder.saved.get('overrides') if folder.saved else None
            for line in choose_overrides(model, [train.rows, valid.rows], compute_dtype, allowed):
                print0(line)
            if model.overrides:  # compile again with them; they may take less memory
                train.set_rows(most)
                train.choose_rows(chunk, **fit)
        grads.zero()
        print0(f'{train.rows} rows per micro-batch (trials: {time.perf_counter() - start:.0f} s)')
    if folder.saved:
        size_validation(spare=0 if eval_only else train.memory)

    def validate(x: torch.Tensor, y: torch.Tensor) -> tuple[float, float]:
        """Return the loss on texts x and their targets y, this rank's part of them, in nats per
        token and in bits per byte."""
        with ranks.evaluating(model):
            sums = ranks.run_compiled(lambda: valid.score(x, y))
        totals = torch.cat([sums, sums.new_tensor([bytes_of[y.cpu()].sum()])])
        if world > 1:
            dist.all_reduce(totals)
        nats, tokens, size = totals.tolist()
        return nats / tokens, nats / math.log(2) / size if size else math.nan  # tokens of no text

    if eval_only:
        loss, bits = validate(val_x, val_y)
        n = val_streams * val_x.size(1)
        text = f'{loss:.4f} nats per token ({bits:.4f} bits per byte), {n:,} tokens'
        print0(f'{out_dir}, step {folder.step}: validation loss {text}')
        ranks.leave_ranks()
        return 0

    # Seed what an edit draws in training, such as dropout: after the trials, and differently on
    # each rank.
    torch.manual_seed(seed + 1000 * rank)

    # resume
    step, best, seconds = 0, math.inf, 0.0
    record = {'step': 0, 'tokens': 0}  # the next line of the log
    if saved := folder.saved:
        with restoring(folder.path_of_saved):
            step, seconds, record = saved['step'], saved['seconds'], saved['record']
            loader.load_state_dict(saved['loader'])
            for t, of_all_ranks, dim in zip(train.state, saved['state'], train.dims, strict=True):
                ranks.fill(t, of_all_ranks.chunk(world, dim)[rank])
            restore_random_states(saved['rng'], device_)
        load_moments([muon, adamw], saved.get('optimizers', []), folder.path_of_saved)
        best_model = settings_of(folder.path / BEST)
        is_later = best_model.get('step', math.inf) > step  # if this is an earlier checkpoint
        if not is_later and best_model.get('validated_on') == [val_tokens, val_streams]:
            best = best_model['best_val_loss']
        elif best_model:
            reason = 'is that of a later update' if is_later else 'was chosen on other tokens'
            text = f'{reason}, and the next validation replaces it'
            print0(f'{folder.path / BEST}: {text}: copy it, to keep it')
    saved = folder.saved = None  # free its memory

    update = make_update(model, muon, adamw, norm, graphs)
    groups = [*muon.param_groups, *adamw.param_groups]
    # For the log: Muon's, or AdamW's where Muon has nothing to train, as in an LSTM.
    peak_lr = next(group['peak_lr'] for group in groups if group['params'])
    params = ', '.join(f'{n / 1e6:.2f}M {part}' for part, n in model.num_params().items())
    flops = ', '.join(f'{n / 1e6:.1f} {part}' for part, n in model.flops_per_token().items())
    metadata = machine(device_, str(compute_dtype))
    config |= {name: metadata.pop(name) for name in ('device', 'dtype', 'threads')}
    print0(f'{world} x {metadata["device_name"]}, {config["threads"]} threads, {compute_dtype}')
    print0(f'parameters {params}; forward MFLOPs per token {flops}')
    shape = f'{world} ranks x {B // train.rows} micro-batches x {train.rows} rows x {T}'
    print0(f'{max_iters:,} updates of {tokens_per_step:,} tokens = {shape}')
    if rank == 0 and max_iters <= warmup_iters:
        advice = 'the learning rate rises until the end: set a smaller --warmup_iters'
        warn(f'max_iters = {max_iters}, warmup_iters = {warmup_iters}: {advice}')
    last = folder.records[-1] if folder.records else {}
    if last.get('step') == step and is_due(step) and 'val_loss' not in last:
        folder.records.pop()  # logged without a validation, by an earlier eval_interval
    metadata['data_checksum'] = checksum_of(shards)
    in_use = sorted(model.overrides)
    folder.start(**metadata, init_checksum=init_checksum, rows=train.rows, triton_overrides=in_use)

    stopper = Stopper()  # turns ctrl-C, SIGTERM and the like into a flag
    at_end.callback(stopper.restore)
    due_to_print = ranks.Throttle()  # a line every 10 s, however large log_interval is
    saved_at, logged_at = step, folder.records[-1]['step'] if folder.records else -1
    val_seconds, stop, problem = 0.0, False, ''
    while True:
        # save, validate and log; the checkpoint comes first, so that a run that dies in the
        # validation loses nothing
        due = is_due(step)
        if (due or stop) and step > saved_at:
            ranks.compare_weights(model)
            if not ranks.all_finite(model):
                problem = f'update {step}: a weight is not finite'
                break
            folder.save(
                model=model.state_dict(),
                entries=model.entries(),
                optimizers=[muon.state_dict(), adamw.state_dict()],
                state=[gather(t, dim) for t, dim in zip(train.state, train.dims, strict=True)],
                loader=loader.state_dict(),
                shards=shards,
                rows=train.rows,
                overrides=in_use,
                step=step,
                seconds=seconds,
                record=plain(record),  # as in log.jsonl, with plain numbers for NumPy's
                rng=gather_random_states(device_),
            )
            saved_at = step
        if step > logged_at:  # a resumed run may have been logged here before
            if due:
                start = time.perf_counter()
                loss, bits = validate(val_x, val_y)
                val_seconds = time.perf_counter() - start
                record |= {'val_loss': loss, 'val_bits_per_byte': bits, 'val_seconds': val_seconds}
                text = f'val loss {loss:.4f} | {bits:.4f} bits per byte | {val_seconds:.1f} s'
                print0(f'step {step}/{max_iters} | {text}')
                if loss < best:
                    best = loss
                    folder.save_best(
                        model,
                        step=step,
                        best_val_loss=best,
                        validated_on=[val_tokens, val_streams],
                        score=f'validation loss {best:.4f} nats per token',
                    )
            folder.log(record)
        if step >= max_iters or stop:
            break

        # forward and backward
        start = time.perf_counter()
        x, y, must_reset = loader.next()  # (B, T) each
        if must_reset:
            train.reset()
        elif reset_every:  # the rows whose turn it is, numbered over all ranks
            first = (step - rank * B) % reset_every
            train.reset(torch.arange(min(first, B), B, reset_every, device=device_))
        grads.zero()
        stop_sum.fill_(stopper.signal is not None)
        train.run('train', chunk, x, y)
        grads.sum_over_ranks()
        norm.copy_(grads.norm())
        loss, stops, norm_ = torch.stack([loss_sum, stop_sum, norm]).tolist()  # the only wait
        stop = stops > 0 or (world == 1 and stopper.signal is not None)
        if not (math.isfinite(loss) and math.isfinite(norm_)):
            problem = f'update {step + 1}: the loss is {loss}, the gradient norm {norm_}'
            break

        # update
        update(lr_at(step))

        # log
        elapsed = time.perf_counter() - start
        step += 1
        seconds += elapsed
        tokens_per_s = tokens_per_step / elapsed
        record = {
            'step': step,
            'tokens': step * tokens_per_step,
            'epoch': loader.epoch,
            'train_loss': loss,
            'grad_norm': norm_,
            'lr': peak_lr * lr_at(step - 1),
            'ms': 1000 * elapsed,
            'tokens_per_s': tokens_per_s,
            'seconds': seconds,
        }
        if device_.startswith('cuda'):
            record['memory_gb'] = torch.cuda.max_memory_reserved(device_) / 1e9
        if step % log_interval == 0 or step == max_iters or due_to_print():
            left = (max_iters - step) * (elapsed + val_seconds / eval_interval)
            print0(
                f'step {step}/{max_iters} | loss {loss:.4f} | lr {record["lr"]:.2e} | '
                f'norm {norm_:.2f} | {1000 * elapsed:.0f} ms | {tokens_per_s:,.0f} tokens/s | '
                f'mfu {mfu(model, tokens_per_s, device_, compute_dtype)} | '
                f'eta {timedelta(seconds=int(left))}'
            )
            due_to_print(restart=True)

    status = 0
    if problem:
        status = 1
        print0(f'error: {problem}; the last checkpoint is of step {saved_at}')
    elif step < max_iters:
        status = 128 + (stopper.signal or signal.SIGTERM)  # None if another rank was stopped
        print0(f'stopped after update {step}, saved in {out_dir}: --resume=True continues')
    else:
        print0(f'done: {step} updates in {seconds:.0f} s, best val loss {best:.4f}; {out_dir}')
    folder.finish(is_finished=status == 0)
    if status == 0 and plot and rank == 0:
        ranks.attempt('loss.png', draw_losses)
    ranks.leave_ranks()
    return status


if __name__ == '__main__':
    run_script(lambda: main(configure(globals(), quiet=True)))

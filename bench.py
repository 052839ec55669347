"""
Speed and memory of the models on whatever device there is.

    python bench.py                                               # suite cpu: plain against fast, a size for 2 CPU cores
    python bench.py --suite=train --budget=540                    # the paper's throughput table; says how to go on with what is left
    python bench.py --suite=decode                                # and its latency table
    python bench.py --suite=kernels
    python bench.py --suite=sokoban --paths=fast                  # bench_sokoban.py, with its settings
    python bench.py --compare=A.json,B.json                       # or --compare A.json B.json: ratios of the rows they share

cpu      forward + backward of a chunk (embedding, core, head, loss); head and loss alone; a token step from the difference
train    complete updates of train_lm.py, loader and optimizer included, T = W = C. The paper's tokens an update are 4 GPUs': one GPU runs
         a quarter of them, B = tokens / 4 / C streams, and is held to a quarter of the paper's figure
decode   one token for each of B streams after a cache filled to C = W; the paper's figure is that of 4 GPUs
kernels  the unroll's pieces for one token and level, the loss of a slice of rows, Muon's iteration; one path against the other
A cell is (L, E, C, B), in suite train (L, E, C, tokens an update); a shorter one stands for all of the suite's own that begin so.
measure.py says how it is measured. The yardsticks are a large matrix product in each dtype and a large copy; "of roofline" is the time of
`floor` at their rates over the time measured. Memory: on a GPU torch's own peak (max_memory_allocated), warm-up and capture included; on a
CPU the process's peak resident memory less what it held after importing torch.
"""

import functools
import math
import os
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable

from configurator import (
    configure,
    fail,
    gathered,
    joined,
    run_script,
)  # before torch: how threads wait, what ctrl-C does

import numpy as np
import torch

import kernels
import muon
import train_lm
import unroll
from checkpoint import pick_device, pick_dtype
from data_fineweb import REAL_VOCAB, VOCAB, open_meta, write_meta, write_shard
from decode import Decoder
from measure import (
    column,
    compare_reports,
    earlier_rows,
    end_all,
    figure,
    header,
    key,
    make_yardsticks,
    markdown,
    measure,
    show,
)
from measure import speedup, spread, write_results
from model import LanguageModel, ModelConfig, State, build_model, heads, leave, losses, token

# fmt: off
# what
suite = 'cpu'                   # 'cpu', 'train', 'decode', 'kernels' or 'sokoban'
cells = ()                      # such as (2,8,128,16),(4,4): see above. (): all of the suite's own, on a GPU the paper's
paths = ''                      # plain, fast, compiled, gpt (the non-recurrent twin: L*E levels of one expert), ...: a wrong one lists all;
                                # with _bf16 for that dtype. '': the suite's own
n_embd = 0                      # D; 0: the suite's own
block_size = 64                 # suites cpu and kernels: T, tokens of a training chunk (gpt: 2 C, whose mean context is W; as many in all)
dtype = ''                      # 'float32', 'bfloat16' (autocast), 'auto': bfloat16 where that is fast; '': float32 on a CPU, else auto
# how
rounds = 3                      # measurements of each variant; the median and the range are reported
seconds = 0.5                   # least length of one measurement: short runs are repeated to fill it
budget = 0                      # seconds after which no new cell begins; what is left, and the command for it, is told. 0: none
device = 'auto'                 # 'auto': cuda if there is one; or 'cpu', 'cuda', 'cuda:1'
threads = 0                     # CPU threads; 0: torch's choice
out = ''                        # JSON file, with the table beside it as .md; '': results/<device>/<suite>.json
append = False                  # keep the other rows of that file, which must be of the same commit, device and dtype
compare = ''                    # A.json,B.json: print the ratios of the rows they share, measure nothing
# fmt: on

LEVELS = ((1, 16), (2, 8), (4, 4), (8, 2), (16, 1))
OWN = {  # suite: (L, E) of its cells, their C, their last number, D, V; on a GPU, on a CPU
    'cpu': ((((2, 8),), (128,), (16,), 256, 256), (((2, 8),), (128,), (16,), 256, 256)),
    'train': (
        (LEVELS, (32, 64, 128, 256, 1024, 2048), (131072, 262144), 768, 50304),
        (LEVELS, (32, 128), (16384,), 256, 256),
    ),
    'decode': ((LEVELS, (128, 2048), (16,), 768, 50304), (((2, 8),), (128,), (16,), 256, 256)),
    'kernels': ((((2, 8),), (128,), (256,), 768, 50304), (((2, 8),), (128,), (16,), 256, 256)),
}
MODELS = ('plain', 'fast', 'compiled', 'gpt', 'gpt_compiled')
PATHS = {
    'cpu': MODELS,
    'train': MODELS,
    'decode': ('plain', 'fast', 'ring', 'ring_compiled', 'gpt', 'gpt_ring', 'gpt_ring_compiled'),
    'kernels': ('eager', 'compiled', 'triton'),
}
DEFAULT_PATHS = {  # on a GPU, on a CPU; where E = 1 the paper has the Transformer too, and trains only that
    'cpu': ('fast,compiled', 'plain,fast'),
    'train': ('compiled', 'compiled'),
    'decode': ('ring,ring_compiled', 'plain,fast,ring'),
    'kernels': ('compiled,triton', 'eager,compiled,triton'),
}
TWINS = {'train': 'gpt_compiled', 'decode': 'gpt_ring'}
TOKENIZER = {V: name for name, V in VOCAB.items()}

# The paper's tables, 4 H100: 1000 tokens/s at C = 32, 64, 128, 256, 1024, 2048 (None: out of memory), by tokens an update, model, L, E
PAPER_TRAIN = {
    (131072, 'transformer', 16, 1): (967.7, 1027.4, 1025.3, 1054.3, 1016.9, 968.1),
    (131072, 'recurrent', 1, 16): (505.4, 445.7, 349.5, 229.4, 51.1, None),
    (131072, 'recurrent', 2, 8): (265.8, 209.5, 145.2, 85.8, None, None),
    (131072, 'recurrent', 4, 4): (189.7, 148.7, 99.1, None, None, None),
    (131072, 'recurrent', 8, 2): (118.3, 88.4, None, None, None, None),
    (262144, 'transformer', 16, 1): (886.9, 1031.5, 1095.8, 1132.0, 1095.8, 1071.5),
    (262144, 'recurrent', 1, 16): (556.2, 526.4, 447.7, 313.1, None, None),
    (262144, 'recurrent', 2, 8): (306.0, 264.6, 190.2, None, None, None),
    (262144, 'recurrent', 4, 4): (199.9, 170.8, None, None, None, None),
    (262144, 'recurrent', 8, 2): (None, None, None, None, None, None),
}
# and ms a token at C = 128 and 2048, 16 streams
PAPER_DECODE = {
    ('transformer', 16, 1): (0.565, 0.670),
    ('recurrent', 1, 16): (0.108, 0.131),
    ('recurrent', 2, 8): (0.431, 0.554),
    ('recurrent', 4, 4): (0.552, 0.637),
    ('recurrent', 8, 2): (0.815, 0.935),
    ('recurrent', 16, 1): (1.402, 1.577),
}


# ----------------------------------------------------------------------------- the measured work, as measure.py wants it


def fresh_model(model: dict, recurrent: bool, kind: str) -> tuple[LanguageModel, dict]:
    """model: ModelConfig's fields -> the model, what is known of it."""
    torch.manual_seed(0)
    model = build_model(ModelConfig(**model), recurrent).to(kind)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1 and not p.any():
                p.normal_(
                    0, 0.02
                )  # what starts at zero: a processor may be faster at zeros than at numbers
    flops = model.flops_per_token()
    return model, {
        'params': model.num_params()['total'],
        'flops_per_token': sum(flops.values()),
        'core_flops_per_token': flops['core'],
    }


def make_chunk(
    model: dict, recurrent: bool, kind: str, amp: torch.dtype, B: int, optimizer: bool = False
) -> tuple[dict[str, Callable], dict]:
    """Parts 'chunk', forward and backward of B x T tokens with the state carried; 'head', head and loss of as many rows alone; with
    `optimizer` that, an update."""
    model, info = fresh_model(model, recurrent, kind)
    T, V = model.config.block_size, model.config.vocab_size
    x, y = torch.randint(V, (2, B, T), device=kind)
    rows = torch.randn(B * T, model.config.n_embd, device=kind, requires_grad=True)
    with train_lm.autocast(kind, amp):
        carried = [model.init_state(B) if recurrent else None]

    def chunk():
        model.zero_grad(set_to_none=True)
        with train_lm.autocast(kind, amp):
            loss, carried[0] = model(x, y, carried[0])
        loss.backward()

    def head():
        rows.grad = model.head.grad = None
        with train_lm.autocast(kind, amp):
            kernels.head_loss(
                rows, model.head, y.flatten(), losses, model.config.path == 'compiled'
            ).backward()

    parts = {'chunk': chunk}
    if optimizer:
        optimizers = train_lm.make_optimizers(model)
        for group in (g for o in optimizers for g in o.param_groups):
            group['lr'] = (
                1e-6  # hundreds of updates by one gradient must not drive the weights to infinity
            )
        return parts | {'optimizer': lambda: [o.step() for o in optimizers]}, {
            **info,
            'tokens': B * T,
        }
    return parts | {'head': head}, {**info, 'tokens': B * T}


def make_token(
    model: dict, recurrent: bool, kind: str, amp: torch.dtype, B: int, ring: str
) -> tuple[dict[str, Callable], dict]:
    """Part 'token': one greedy token for each of B streams, from a cache of W entries; by decode.Decoder (ring: 'ring' or 'compiled') or
    by model.step ('')."""
    model, info = fresh_model(model, recurrent, kind)
    with train_lm.autocast(kind, amp):
        empty = model.init_state(B)
    state = State(
        *(torch.randn_like(x) for x in empty[:3]), torch.full_like(empty.count, model.config.window)
    )
    carried, info = (
        [torch.randint(model.config.vocab_size, (B,), device=kind), state],
        {**info, 'tokens': B},
    )
    if ring:
        decoder = Decoder(model, B, amp=amp, compile=ring == 'compiled')
        decoder.load(state)
        decoder.step(carried[0])
        for _ in range(4 if kind != 'cpu' else 0):  # three as they are, then the capture
            decoder.step()
        return {'token': decoder.step}, info

    def token():
        with torch.no_grad(), train_lm.autocast(kind, amp):
            logits, carried[1] = model.step(*carried)
            carried[0] = logits.argmax(-1)

    return {'token': token}, info


def make_update(settings: dict, path: str, kind: str) -> tuple[dict[str, Callable], dict]:
    """Part 'update': a whole one of train_lm.py, as the user runs it. settings: train_lm's."""
    arguments = {
        **settings,
        'path': 'plain' if path == 'plain' else 'fast',
        'compile': 'compiled' in path,
        'recurrent': 'gpt' not in path,
        'max_iters': 10**6,
        'val_tokens': 64,
        'val_streams': 1,
        'device': kind,
    }
    run = train_lm.make_run(
        configure(vars(train_lm), [f'--{k}={v}' for k, v in arguments.items()], quiet=True)
    )
    train_lm.prepare(run)
    if arguments['compile'] and run.model.config.path == 'fast':
        raise RuntimeError('torch.compile does not work here')

    def update():
        loss, _, _ = train_lm.train_update(run, False)
        run.step += 1
        if not math.isfinite(loss):
            raise RuntimeError('the loss is not finite')  # the optimizer would be left out

    for _ in range(
        4 if kind != 'cpu' else 0
    ):  # three as they are, then the capture: replays are measured
        update()
    return {'update': update}, {
        'params': run.model.num_params()['total'],
        'flops_per_token': sum(run.model.flops_per_token().values()),
        'tokens': settings['tokens_per_step'],
    }


@torch.no_grad()
def make_kernels(
    kind: str, amp: torch.dtype, model: dict, paths: list[str], B: int
) -> tuple[dict[str, Callable], dict]:
    """A part for each kernel and path, named 'kernel, path'; info: {part: (FLOPs, bytes)}, and {part: why not} of those that cannot run."""
    torch.manual_seed(0)
    c, cuda = ModelConfig(**model), kind != 'cpu'
    E, D, V, n = c.n_expert, c.n_embd, c.vocab_size, min(c.block_size, unroll.BLOCK)
    rows = kernels.rows_per_slice(B * c.block_size, V, torch.device(kind).type)
    logits, target = (
        torch.randn(rows, V, device=kind).to(amp),
        torch.randint(V, (rows,), device=kind),
    )
    matrices = torch.randn(E, D, 4 * D, device=kind).bfloat16()
    first = build_model(ModelConfig(**model), True).levels[0].to(kind)
    runs = []  # kernel, path, function of triton, FLOPs, bytes

    def loss(compile, triton):
        return kernels.slice_loss(
            losses,
            logits.clone(),
            target,
            1 / rows,
            'triton' if triton else 'compiled' if compile else 'eager',
        )

    for path in paths:
        recipe = unroll.Recipe(
            token,
            heads,
            leave,
            first.rules(),
            amp,
            torch.float32,
            compile=path != 'eager',
            graphs=False,
        )
        sizes = B, D, c.window, n
        runs += [
            (name, path, run, *unroll.trial_cost(recipe, sizes)[name])
            for name, run in unroll.trials(recipe, first.weights(), sizes, True).items()
        ]
        runs.append(
            (
                'loss',
                path,
                functools.partial(loss, path != 'eager'),
                0,
                4 * logits.numel() * amp.itemsize,
            )
        )  # the copy's too
    newton = (
        E * 5 * (2 * 2 * D * D * 4 * D + 2 * D**3),
        5 * 4 * matrices.numel() * 2,
    )  # five iterations of three products
    runs += [
        (
            'orthogonalize',
            'one by one',
            lambda triton: [muon.orthogonalize(x) for x in matrices.split(1)],
            *newton,
        ),
        ('orthogonalize', 'batched', lambda triton: (muon.orthogonalize(matrices),), *newton),
    ]
    parts, info = {}, {'work': {}, 'missing': {}}
    for name, path, run, *cost in runs:
        part, once = f'{name}, {path}', functools.partial(run, path == 'triton')
        error = why_not(run, cuda) if path == 'triton' else ''
        if error:
            info['missing'][part] = error
        else:  # on a GPU without the launches
            parts[part], info['work'][part] = (
                functools.partial(kernels.seconds_of, once) if cuda else once,
                cost,
            )
    return parts, info


def why_not(run: Callable, cuda: bool) -> str:
    """What keeps a Triton kernel from being timed, '' if nothing does."""
    if not cuda:
        return 'n/a (needs CUDA)'
    found = kernels.compare(run)
    return found.get('error') or (
        '' if kernels.agrees(found) else f'wrong by {found["difference"]:.1%}'
    )


def write_data(folder: str, V: int, size: int) -> None:
    """A synthetic shard of `size` tokens and a small validation shard."""
    tokenizer, rng = TOKENIZER[V], np.random.default_rng(0)
    for name, n in (('val_000000', 1000), ('train_000001', size)):
        write_shard(
            os.path.join(folder, f'fineweb_{name}.bin'), rng.integers(0, REAL_VOCAB[tokenizer], n)
        )
    write_meta(folder, open_meta(folder, tokenizer=tokenizer, source='bench.py'))


# ----------------------------------------------------------------------------- the floor


def floor(
    c: ModelConfig,
    recurrent: bool,
    B: int,
    rate: float,
    bandwidth: float,
    size: int = 2,
    decoding: bool = False,
) -> dict[str, float]:
    """{part: least seconds} of one token of each of B streams (trained in chunks of c.block_size), for matrix products at `rate` FLOP/s of
    elements of `size` bytes, and memory at `bandwidth` bytes/s. Nothing overlaps but a product with the streaming of its own weights:

        product = max(2 n B / rate, n size / bandwidth)    a level's n weights, the E key-value matrices of a shared cache as one
        cache   = keys and values of W slots, each read once
        forward = L (product + cache)
        backward= L (product + cache + dk, dv)             input gradients. dk, dv: fp32, read and written at the chunk's own slots
        weights = L 2 n B / rate                           their gradients, over many tokens at once
        head    = 3 x 2 D V B / rate                       with its gradients, over many tokens at once

    decoding: forward, and the head as one more product. GPT trains on whole sequences: everything is dense, attention (causal) too.
    Not counted: activations, norms, the optimizer. A code that adds dk and dv for several tokens at once may go below."""
    L, E, D, K, W, T = c.n_layer, c.n_expert, c.n_embd, c.head_dim, c.window, c.block_size
    C = c.n_kv_head * (1 if recurrent and c.share_kv else E)  # cache heads
    n = E * (2 * D * D + 8 * D * D) + 2 * D * C * K
    head = 2 * D * c.vocab_size * B / rate
    cache = W * 2 * C * K * size * B / bandwidth
    product = max(2 * n * B / rate, n * size / bandwidth)
    if decoding:
        return {
            'forward': L * (product + cache),
            'head': max(head, D * c.vocab_size * size / bandwidth),
        }
    if not recurrent:
        forward = L * (2 * n + 4 * (T + 1) / 2 * E * D) * B / rate
        return {
            'forward': forward,
            'backward': forward,
            'weights': L * 2 * n * B / rate,
            'head': 3 * head,
        }
    own = sum(min(t + 1, W) for t in range(T)) / T
    grads = own * 2 * C * K * 4 * 2 * B / bandwidth
    return {
        'forward': L * (product + cache),
        'backward': L * (product + cache + grads),
        'weights': L * 2 * n * B / rate,
        'head': 3 * head,
    }


# ----------------------------------------------------------------------------- figures


def paper_figure(row: dict, suite: str) -> float | str | None:
    """The paper's figure for a row of its tables: tokens/s of one of its four GPUs, or ms a token; 'OOM'; None where it has none."""
    if (row['D'], row['V'], row['T']) != (768, 50304, row['C']):
        return None
    who = row['model'], row['L'], row['E']
    if suite == 'train':
        known = dict(
            zip(
                (32, 64, 128, 256, 1024, 2048),
                PAPER_TRAIN.get((row['tokens_per_update'], *who), ()),
                strict=False,
            )
        )
        value = known.get(row['C'], ...)
        return 'OOM' if value is None else None if value is ... else value * 1000 / 4
    return (
        dict(zip((128, 2048), PAPER_DECODE.get(who, ()), strict=False)).get(row['C'])
        if row['B'] == 16
        else None
    )


def derive(record: dict, row: dict, suite: str, rates: dict[str, float]) -> list[dict]:
    """The rows of a finished record: `row`, its path and sizes, with rates and shares. rates: medians of the yardsticks, by name."""
    row = {**row, **record}
    if suite in ('train', 'decode'):
        row['paper'] = paper_figure(row, suite)
    if record['status'] != 'ok':
        return [row]
    return (
        kernel_rows(row, rates)
        if suite == 'kernels'
        else [chunk_row(row, rates) if suite == 'cpu' else paper_row(row, suite, rates)]
    )


def chunk_row(row: dict, rates: dict[str, float]) -> dict:
    """Backward costs twice the forward."""
    times, rate = row['seconds'], rates.get(f'matmul {row["dtype"]}')
    row['tokens_per_s'] = spread(row['tokens'] / t for t in times['chunk'])
    if 'optimizer' in times:
        both = zip(times['chunk'], times['optimizer'], strict=True)
        row['tokens_per_s_with_optimizer'] = spread(
            row['tokens'] / (chunk + update) for chunk, update in both
        )
    if rate:
        row['share_of_matmul'] = 3 * row['flops_per_token'] * row['tokens_per_s']['median'] / rate
    if 'head' in times:
        row['head_ms'] = spread(1e3 * t for t in times['head'])
        if row['model'] == 'recurrent':
            row['step_ms'] = spread(
                1e3 * (chunk - head) / row['T']
                for chunk, head in zip(times['chunk'], times['head'], strict=True)
            )
            row['step_ms_at_matmul_rate'] = (
                3e3 * row['core_flops_per_token'] * row['B'] / rate if rate else None
            )
    return row


def paper_row(row: dict, suite: str, rates: dict[str, float]) -> dict:
    """Of suite train or decode: held to the floor and to the paper."""
    rate, bandwidth, train = (
        rates.get(f'matmul {row["dtype"]}'),
        rates.get('copy'),
        suite == 'train',
    )
    if train:
        row['tokens_per_s'] = spread(row['tokens'] / t for t in row['seconds']['update'])
        ms = 1e3 * row['B'] / row['tokens_per_s']['median']
    else:
        row['ms_per_token'] = spread(1e3 * t for t in row['seconds']['token'])
        ms = row['ms_per_token']['median']
    if rate and bandwidth:
        c = ModelConfig(
            row['V'], row['L'], row['E'], row['D'], window=row['C'], block_size=row['T']
        )
        least = floor(
            c,
            row['model'] == 'recurrent',
            row['B'],
            rate,
            bandwidth,
            2 if row['dtype'] == 'bfloat16' else 4,
            not train,
        )
        row['share_of_roofline'] = 1e3 * sum(least.values()) / ms
    if type(row['paper']) is float:
        row['over_paper'] = (
            row['tokens_per_s']['median'] / row['paper'] if train else row['paper'] / ms
        )
    return row


def kernel_rows(row: dict, rates: dict[str, float]) -> list[dict]:
    """A row a kernel and path from one that holds them all."""
    work, missing, times, rows = row.pop('work'), row.pop('missing'), row.pop('seconds'), []
    del row['memory_bytes'], row['first_run_s']  # all kernels' together
    for part in [*work, *missing]:
        kernel, path = part.split(', ')
        new = {**row, 'kernel': kernel, 'path': path}
        if part in missing:
            new['status'] = missing[part]
        else:
            (flops, size), new['us'] = work[part], spread(1e6 * t for t in times[part])
            matmul, bandwidth = (
                rates.get(f'matmul {"bfloat16" if kernel == "orthogonalize" else row["dtype"]}'),
                rates.get('copy'),
            )
            if matmul and bandwidth:
                new['share_of_roofline'] = (
                    1e6 * max(flops / matmul, size / bandwidth) / new['us']['median']
                )
        rows.append(new)
    return rows


CELL = ('cell', 'D', 'kernel')  # rows that are the same in these are compared


def table(results: list[dict], suite: str) -> str:
    """Markdown. Columns in which no row has anything are left out."""
    percent, tokens = '{:.1%}'.format, '{:,.0f}'.format
    unit = {'decode': 'ms/token', 'kernels': 'us'}.get(suite, 'tokens/s')
    widths = {r['D'] for r in results}
    return markdown(
        [
            column('kernel', 'kernel'),
            column('tokens an update, 4 GPUs', 'tokens_per_update', tokens),
            ('L, E', lambda r: f'{r["L"]}, {r["E"]}'),
            *([column('d', 'D')] if len(widths) > 1 else []),
            column('C', 'C'),
            column('B', 'B'),
            *([column('T', 'T')] if suite == 'cpu' else []),
            column('path', 'path'),
            (f'{unit}: median (min..max)', figure),
            speedup(results, CELL),
            column('with optimizer', 'tokens_per_s_with_optimizer', show),
            column('of matmul rate', 'share_of_matmul', percent),
            column('head alone, ms', 'head_ms', lambda x: f'{x["median"]:.1f}'),
            column('token step without head, ms', 'step_ms', lambda x: show(x, 3)),
            column('its FLOPs at matmul rate, ms', 'step_ms_at_matmul_rate', '{:.3f}'.format),
            column('of roofline', 'share_of_roofline', percent),
            column('paper, per GPU', 'paper', tokens)
            if suite == 'train'
            else column('paper, 4 GPUs', 'paper', '{:.3f}'.format),
            column('over paper', 'over_paper', '{:.2f}x'.format),
            column('first run, s', 'first_run_s', '{:.1f}'.format),
            column('memory, MiB', 'memory_bytes', lambda x: f'{x / 2**20:,.0f}'),
        ],
        results,
    )


def describe(report: dict) -> str:
    """The lines above the table."""
    rates = ', '.join(
        f'{name} {show({k: v / 1e9 for k, v in figures.items()})} {"GB/s" if name == "copy" else "GFLOP/s"}'
        for name, figures in report['yardsticks'].items()
    )
    sizes = ', '.join(
        f'{k} = {" and ".join(map(str, sorted({r[k] for r in report["results"]})))}' for k in 'DV'
    )
    return '{device}, {threads} threads, torch {torch}, commit {commit}, {dtype}; {}; {}\n`{command}`'.format(
        sizes, rates, **report
    )


# ----------------------------------------------------------------------------- a suite


def in_order(rows: Iterable[dict]) -> list[dict]:
    """By tokens an update; then the rows to be compared together, in the order of their first."""
    order = {}
    return sorted(
        rows,
        key=lambda r: (
            r.get('tokens_per_update', 0),
            order.setdefault(tuple(r.get(k) for k in CELL), len(order)),
        ),
    )


def run_suite(
    name: str,
    suite: str,
    variants: dict[str, tuple],
    sizes: dict[str, dict],
    config: dict,
    kind: str,
    amp: torch.dtype,
    seconds: float,
) -> None:
    """Measures cell by cell, writes JSON and table after each, prints the table. sizes: {label: its path and sizes}, in the order of the
    table. On a GPU the yardsticks come first, on a CPU they take turns with the paths of each cell."""
    start, cuda, report = (
        time.perf_counter(),
        kind != 'cpu',
        {'suite': name, **header(config, kind, amp), 'yardsticks': {}, 'results': []},
    )
    rows = earlier_rows(report, config['out']) if config.get('append') else {}
    sizes = {
        label: {'dtype': report['dtype'], 'model': 'recurrent', **row}
        for label, row in sizes.items()
    }
    dtypes = {r['dtype'] for r in sizes.values()} | ({'bfloat16'} if suite == 'kernels' else set())
    yardsticks = {'yardsticks': (make_yardsticks, {'kind': kind, 'dtypes': sorted(dtypes)})}
    groups, rates, seen, pool = {}, {}, {}, {} if cuda else None
    for label, variant in variants.items():
        groups.setdefault(sizes[label].get('cell'), {} if cuda else dict(yardsticks))[label] = (
            variant
        )
    left = list(groups)
    try:
        for group in [yardsticks] * cuda + list(groups.values()):
            if (
                len(left) < len(groups)
                and 0 < config.get('budget', 0) < time.perf_counter() - start
            ):
                break
            records = measure(group, config['rounds'], seconds, kind, config['threads'], pool)
            for part, times in records.get('yardsticks', {}).get('seconds', {}).items():
                figures = [records['yardsticks']['work'][part] / t for t in times]
                rates[part] = statistics.median(figures)
                seen.setdefault(part, []).extend(figures)
            report['yardsticks'] = {part: spread(figures) for part, figures in seen.items()}
            if group is yardsticks:
                continue
            rows.update(
                (key(row), row)
                for label in group
                if label in sizes
                for row in derive(records[label], sizes[label], suite, rates)
            )
            report['results'] = in_order(rows.values())
            text = f'{describe(report)}\n\n{table(report["results"], suite)}'
            path = write_results(report, config['out'], text)
            left.pop(0)
            print(
                f'{len(groups) - len(left)} of {len(groups)} cells, {time.perf_counter() - start:.0f} s',
                flush=True,
            )
    finally:
        end_all(pool or {})
    print(f'\n{text}\n\n{path}')
    if left:
        print(
            f'\nbudget = {config["budget"]} s is used up, cells left: {len(left)}. To go on:\n{the_rest(left)}'
        )


def the_rest(left: list[str]) -> str:
    """The command that measures the cells left."""
    same = [a for a in sys.argv[1:] if not a.startswith(('--cells=', '--append='))]
    return shlex.join(['python', 'bench.py', *same, '--append=True', f'--cells={",".join(left)}'])


# ----------------------------------------------------------------------------- the script


def all_cells(
    config: dict,
    levels: tuple[tuple[int, int], ...],
    contexts: tuple[int, ...],
    last: tuple[int, ...],
) -> list[tuple[int, int, int, int]]:
    """(L, E, C, B or tokens) of each cell; shorter ones filled up from the suite's own."""
    given = config['cells'] or levels
    given = (given,) if all(type(n) is int for n in given) else given
    full = {}
    for cell in given:
        if (
            not isinstance(cell, (tuple, list))
            or not 2 <= len(cell) <= 4
            or not all(type(n) is int and n > 0 for n in cell)
        ):
            fail(f'cells: {cell} is not (L, E, C, B), integers above 0, or its first two or three')
        full.update(
            ((*cell[:2], C, n), None) for n in cell[3:] or last for C in cell[2:3] or contexts
        )
    return list(full)


def chosen_paths(config: dict, E: int, cuda: bool) -> list[str]:
    """The paths of a cell: those given, or the suite's own."""
    which, twin = config['suite'], TWINS.get(config['suite'])
    default = DEFAULT_PATHS[which][not cuda]
    if twin and E == 1:
        default = (
            twin
            if which == 'train'
            else f'{default},{twin}' + (f',{twin}_compiled' if cuda else '')
        )
    chosen = [path.strip() for path in (config['paths'] or default).split(',')]
    own = '' if which == 'kernels' else '_bf16'  # those are all measured in one process
    if not {path.removesuffix(own) for path in chosen} <= set(PATHS[which]):
        fail(
            f'paths = {config["paths"]!r}: expected some of {",".join(PATHS[which])}'
            + (f', with {own} for that dtype' if own else '')
        )
    return chosen


def sizes_of(config: dict, path: str, cell: tuple[int, int, int, int], D: int, V: int) -> dict:
    """A variant's row: what it is, and its sizes."""
    L, E, C, B = cell
    T, gpt = (
        C if config['suite'] in ('train', 'decode') else config['block_size'],
        path.startswith('gpt'),
    )
    row = {
        'cell': str(cell).replace(' ', ''),
        'path': path,
        'model': 'transformer' if gpt else 'recurrent',
    }
    if config['suite'] == 'train':
        if B % (4 * C):
            fail(
                f'cells: {B} tokens an update over 4 GPUs are not a whole number of sequences of {C} on each'
            )
        row, B = {**row, 'tokens_per_update': B}, B // 4 // C
    if gpt and config['suite'] == 'cpu':
        B, T = max(1, B * T // (2 * C)), 2 * C
    return {
        **row,
        'L': L * E if gpt else L,
        'E': 1 if gpt else E,
        'C': C,
        'B': B,
        'T': T,
        'D': D,
        'V': V,
    }


def variant(
    config: dict, row: dict, kind: str, amp: torch.dtype, folder: str
) -> tuple[Callable, dict]:
    """(make, arguments) of a row."""
    path, which = row['path'].removesuffix('_bf16'), config['suite']
    names = {
        'vocab_size': 'V',
        'n_layer': 'L',
        'n_expert': 'E',
        'n_embd': 'D',
        'window': 'C',
        'block_size': 'T',
    }
    model = {name: row[letter] for name, letter in names.items()}
    ModelConfig(**model)  # raises ValueError where sizes do not fit together
    rest = {'model': model, 'kind': kind, 'amp': amp, 'B': row['B']}
    if which == 'kernels':
        return make_kernels, {**rest, 'paths': chosen_paths(config, row['E'], kind != 'cpu')}
    if which == 'train':
        del model['vocab_size']
        settings = {
            **model,
            'tokens_per_step': row['B'] * row['T'],
            'tokenizer': TOKENIZER[row['V']],
            'data_dir': folder,
            'dtype': str(amp)[6:],
            'threads': config['threads'],
        }
        return make_update, {'settings': settings, 'path': path, 'kind': kind}
    rest['recurrent'] = row['model'] == 'recurrent'
    if which == 'decode':
        model['path'] = 'plain' if path == 'plain' else 'fast'
        return make_token, {
            **rest,
            'ring': '' if 'ring' not in path else 'compiled' if 'compiled' in path else 'ring',
        }
    model['path'] = {'gpt': 'fast'}.get(path, path.removeprefix('gpt_'))
    return make_chunk, rest


def plan(
    config: dict, kind: str, amp: torch.dtype, folder: str
) -> tuple[dict[str, tuple], dict[str, dict]]:
    """{label: (make, arguments)} and {label: its path and sizes}; refuses what makes no sense before anything runs. Suite train's data goes
    into `folder`."""
    which, cuda = config['suite'], kind != 'cpu'
    if which not in PATHS:
        fail(
            f'suite = {which!r}: expected one of {", ".join(PATHS)}, or --suite=sokoban on the command line'
        )
    for name, least in (
        ('rounds', 1),
        ('block_size', 1),
        ('n_embd', 0),
        ('threads', 0),
        ('seconds', 0),
        ('budget', 0),
    ):
        if config[name] < least:
            fail(f'{name} = {config[name]}: must be at least {least}')
    *own, D, V = OWN[which][not cuda]
    D, variants, sizes = config['n_embd'] or D, {}, {}
    for cell in all_cells(config, *own):
        chosen = chosen_paths(config, cell[1], cuda)
        for path in chosen if which != 'kernels' else ['all']:  # those are measured together
            row, dt = (
                sizes_of(config, path, cell, D, V),
                torch.bfloat16 if path.endswith('_bf16') else amp,
            )
            label = f'{row["cell"]} {path}'
            variants[label], sizes[label] = (
                variant(config, row, kind, dt, folder),
                {**row, 'dtype': str(dt)[6:]},
            )
    if which == 'train':
        write_data(folder, V, 33 * max(row['B'] * (row['T'] + 1) for row in sizes.values()))
    return variants, sizes


def main() -> None:
    argv = joined(sys.argv[1:], {'suite': suite})  # bench_sokoban.py has settings of its own
    if '--suite=sokoban' in argv:
        import bench_sokoban

        return bench_sokoban.main([a for a in argv if a != '--suite=sokoban'])
    if '--compare' in argv:  # --compare A.json B.json
        argv = gathered(argv, 'compare')
        if '--compare=' in argv:
            fail('compare: expected two files, --compare A.json B.json')
    config = configure(globals(), argv)
    if compare:
        return compare_reports(compare)
    with tempfile.TemporaryDirectory() as folder:
        try:
            kind = pick_device(device)
            amp = pick_dtype(dtype or ('auto' if kind != 'cpu' else 'float32'), kind)
            variants, sizes = plan(config, kind, amp, folder)
        except ValueError as error:
            fail(error)
        run_suite(suite, suite, variants, sizes, config, kind, amp, seconds)


if __name__ == '__main__':
    run_script(main, 'interrupted: what was finished is written (suite sokoban: nothing)')

r"""Measure the speed of language models and agents on this machine, beside the paper's figures.

    python bench.py                                    # both tables of the paper, a part of each
    python bench.py --suite=decode                                        # all of its latencies
    torchrun --standalone --nproc_per_node=4 bench.py --suite=train \
        --contexts=32,64,128,256,1024,2048 --tokens_per_update=131072,262144     # all throughputs
    python bench.py --modes=plain,eager,compiled                          # modes side by side
    python bench.py --modes=compiled,no_attention,no_experts,no_loss      # what each kernel gains
    python bench.py --suite=sokoban                                       # agents

decode     one token for each of B streams after C others, with full caches of W = C entries
train      an update of train_lm.py for T = W = C: the loader, which reads random tokens, forward,
           backward, the reduction over the ranks and both optimizers. Each GPU has as many streams
           as each of the paper's four, B = tokens_per_update / 4 / C, so that four GPUs do the
           paper's update
sokoban    an update of train_sokoban.py on generated levels, with its rollout

The models are recurrent (L, E), and `transformer`, the non-recurrent model of L * E layers with one
expert each. The modes are `plain` (a gradient of each weight for each token; decoding by the
model's forward), `eager` (these are deferred; decode.py) and `compiled` (with torch.compile and, on
a GPU, the Triton overrides that agree). On a GPU there are also `no_attention`, `no_experts` and
`no_loss`, which are `compiled` without the override of this name, and `no_overrides`; and variants
of kernels that no run uses yet: `try_tile` (smaller tiles of products that add a residual),
`try_stores` (no stores of attention weights that nothing reads) and `try_split` (windows split over
programs, below 8 streams). On a CPU the modes of a cell take turns, so that changes in the
machine's speed affect all.

The figures are per GPU; with several ranks, those of the slowest. Memory is the peak that torch has
reserved on a GPU. `median`, `min` and `max` are over rounds; `speed_up` compares the fastest rounds
with those of the first mode; `over_paper` is above 1 where ours is faster.
The column `graphs` names the CUDA graphs that were timed, and what ran eagerly instead and why.
The paper's tables are of four H100s (paper/results/paper). A quarter of its tokens/s is shown. Its
ms per token are of 16 streams on four GPUs: they stand beside B = 4 and B = 16 on one.
Targets are modeled for one H100, not measured (paper/results/modeled). That all modes compute the
same is tested in tests/.
"""

import csv
import gc
import itertools
import math
import os
import pathlib
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import NamedTuple

from configurator import configure
from support.script import UserError, first_line, print0, run_script

import numpy as np
import torch
import torch.distributed as dist

import train_lm
import train_sokoban
from decode import Decoder
from levels import generate
from overrides import choose_overrides
from support import ranks, run_folder
from support.code import code_record
from support.compiling import candidates, captures, fused
from support.files import write_json, write_text
from support.loader import Loader, write_shard
from support.random_states import randomize
from support.ranks import Gradients
from support.stream import Stream
from unroll import release

# -----------------------------------------------------------------------------
# fmt: off
# what
suite = ''         # 'decode', 'train' or 'sokoban'; '' = decode and train
modes = ''         # of the modes above; '' = compiled on a GPU, plain,eager on a CPU
                   # (agents: eager, which is the same as plain)
shapes = ()        # (L, E) of language models, as in 2,8 or (2,8),(4,4); () = the paper's; on a CPU
                   # (2,8)
contexts = ()      # C, as in 64,256; () = 128,2048 (decode) or 64,256 (train); on a CPU 128
agents = ()        # sokoban: (L, E, D), as in 1,1,128; () = (1,1,128),(4,1,64)
# sizes
tokens_per_update = ()  # train: of four GPUs, as in 131072,262144 (the paper's); () = 131072; on a
                   # CPU 4096
streams = ()       # decode: B per GPU; () = 4,16; on a CPU 16
window = 0         # language models: W; 0 = C, which the paper's memory suggests
n_embd = 0         # language models: D; 0 = 768, as the paper; on a CPU 256
vocab_size = 0     # language models: V; 0 = 50,304, as the paper; on a CPU 256
arch = 'convlstm'  # sokoban: 'convlstm' or 'convglu'
n_envs = 32        # sokoban: boards per GPU
unroll = 20        # sokoban: steps per update and board
# measurement
rounds = 3         # measurements of each mode; their median and range are reported
seconds = 0.5      # shortest measurement: calls are repeated to fill it
cuda_graphs = True      # on a GPU: replay updates as CUDA graphs (decoding always does)
dtype = 'auto'     # 'float32', 'bfloat16' (autocast; sokoban: convolutions), or 'auto' (bfloat16 if
                   # the device is fast at it)
device = 'auto'    # 'auto' (cuda if there is one), 'cpu', 'cuda' or 'cuda:1'
threads = 0        # CPU threads; 0 = torch's choice
out = ''           # JSON file; the table goes beside it as .md; '' = out/bench_....json
# fmt: on
# -----------------------------------------------------------------------------
RANGES = {
    'suite': ['', 'decode', 'train', 'sokoban'],
    'threads': (0, 1024),
    **dict.fromkeys(('contexts', 'tokens_per_update', 'streams'), (1, math.inf)),
    **dict.fromkeys(('n_envs', 'unroll', 'rounds'), (1, math.inf)),
}
MODES = (
    *('plain', 'eager', 'compiled', 'no_attention', 'no_experts', 'no_loss', 'no_overrides'),
    *('try_tile', 'try_stores', 'try_split'),
)
ALWAYS = MODES[:3]  # the others are about kernels
# The paper's shapes; it trains no recurrent model of 16 layers.
SHAPES = {'train': ((1, 16), (2, 8), (4, 4), (8, 2))}
SHAPES['decode'] = (*SHAPES['train'], (16, 1))
CONTEXTS = {'train': (64, 256), 'decode': (128, 2048)}
PAPER_GPUS = 4
PAPER_STREAMS = 16  # of decoding, on all of its GPUs
STREAMS = (PAPER_STREAMS // PAPER_GPUS, PAPER_STREAMS)  # of one GPU, to compare with these
RESULTS = pathlib.Path(__file__).parent / 'paper' / 'results'
PAPER = {  # its tables as it prints them
    'train': RESULTS / 'paper' / 'training_ktokens_per_s_4xH100.csv',
    'decode': RESULTS / 'paper' / 'latency_ms_per_token_4xH100.csv',
}
TARGETS = RESULTS / 'modeled' / 'targets.csv'
UNITS = {'train': 'tokens/s', 'decode': 'ms/token', 'sokoban': 'env steps/s'}


class Machine(NamedTuple):
    """What a rank measures on."""

    rank: int
    world: int
    device: str
    compute_dtype: torch.dtype  # of matrix products


class Cell(NamedTuple):
    """A model to measure. Of agents, `model` is the architecture and C the steps of an unroll."""

    suite: str
    model: str
    L: int
    E: int
    D: int
    C: int
    B: int  # streams per GPU, or boards

    def build(self, mode: str, dtype: str = 'float32') -> torch.nn.Module:
        """Return the model, as the trainer makes it. Raises UserError if sizes do not fit together.
        dtype: of an agent's convolutions."""
        sizes = {'n_layer': self.L, 'n_expert': self.E, 'n_embd': self.D}
        if self.suite == 'sokoban':
            sizes |= {'arch': self.model, 'dtype': dtype}
            return train_sokoban.make_agent(vars(train_sokoban) | sizes)
        sizes |= {'recurrent': self.model == 'recurrent', 'window': window or self.C}
        sizes |= {'block_size': self.C, 'mode': 'plain' if mode == 'plain' else 'fast'}
        return train_lm.make_model(vars(train_lm) | sizes, vocab_size)


def find_cells(suite: str) -> list[Cell]:
    """Return the cells of a suite. Raises UserError if settings do not fit together."""
    if suite == 'sokoban':
        cells = [Cell(suite, arch, *sizes, unroll, n_envs) for sizes in read_sizes('agents', 3)]
    else:
        cells = []
        sizes = read_sizes('shapes', 2) or SHAPES[suite]
        batches = streams if suite == 'decode' else tokens_per_update
        for n, C, (L, E) in itertools.product(batches, contexts or CONTEXTS[suite], sizes):
            B = n if suite == 'decode' else n // (PAPER_GPUS * C)
            if suite == 'train' and B * PAPER_GPUS * C != n:
                multiple = f'a multiple of {PAPER_GPUS} x C = {PAPER_GPUS * C}'
                raise UserError(f'tokens_per_update = {n}: must be {multiple}')
            cells += [
                Cell(suite, 'recurrent', L, E, n_embd, C, B),
                Cell(suite, 'transformer', L * E, 1, n_embd, C, B),
            ]
    with torch.device('meta'):  # only to check the sizes
        for cell in cells:
            cell.build('eager', 'bfloat16')  # an agent in float32 would switch TF32 off for all
    return list(dict.fromkeys(cells))  # several shapes have the same transformer


def read_sizes(name: str, n: int) -> tuple[tuple[int, ...], ...]:
    """Return a setting that holds groups of n sizes, or one such group. Raises UserError if it
    holds anything else."""
    value = globals()[name]
    groups = (value,) if value and not isinstance(value[0], tuple) else value
    for group in groups:
        are_sizes = isinstance(group, tuple) and [type(x) for x in group] == n * [int]
        if not are_sizes or min(group) < 1:
            raise UserError(f'{name} = {value!r}: expected groups of {n} positive integers')
    return groups


# ---- what is measured ----
# Each function sets a cell up in one mode, with random weights and inputs, and returns run(), the
# call to be timed, and the names of the Triton overrides in use. graphs: a dict for CUDA graphs,
# None = run eagerly.


def allowed_overrides(mode: str) -> set[str]:
    """Return the names of the Triton overrides that a mode may use."""
    left_out = mode.removeprefix('no_')
    return set() if left_out == 'overrides' else {'attention', 'experts', 'loss'} - {left_out}


def build_random(cell: Cell, mode: str, machine: Machine) -> torch.nn.Module:
    """Return a language model with random weights: processors may be faster at zeros."""
    with torch.device(machine.device):  # where making and drawing them takes less time
        return randomize(cell.build(mode))


def make_update(cell: Cell, mode: str, machine: Machine, graphs: dict | None) -> tuple:
    """Set up an update of train_lm.py. Its learning rates are 0, so that all are the same work."""
    model = build_random(cell, mode, machine)
    model.cuda_graphs = graphs is not None
    muon, adamw = train_lm.make_optimizers(model)
    grads = Gradients(model.parameters())
    (loss,) = grads.extra
    norm = torch.zeros((), device=machine.device)
    B, T = cell.B, cell.C
    stream = Stream(
        model, B, T, compute_dtype=machine.compute_dtype, carries=model.recurrent, graphs=graphs
    )
    chunk = train_lm.make_chunk(model, B * machine.world, loss, stream.autocast)
    most = stream.rows
    stream.choose_rows(chunk)
    if fused.enabled:
        choose_overrides(model, [stream.rows], machine.compute_dtype, allowed_overrides(mode))
        stream.set_rows(most)
        stream.choose_rows(chunk)
    update = train_lm.make_update(model, muon, adamw, norm, graphs)
    loader = random_text(B * machine.world, T, model.recurrent, (machine.rank, machine.world))

    def run() -> None:
        x, y, must_reset = loader.next()
        if must_reset:
            stream.reset()
        grads.zero()
        stream.run('train', chunk, x, y)
        grads.sum_over_ranks()
        norm.copy_(grads.norm())
        loss.tolist()  # the trainer waits here, too
        update(0.0)

    return run, model.overrides


def random_text(B: int, T: int, carries: bool, share: tuple[int, int]) -> Loader:
    """Return a loader of a shard of random tokens, 16 batches."""
    tokens = np.random.default_rng(0).integers(vocab_size, size=B * (16 * T + 1))
    with tempfile.TemporaryDirectory() as folder:
        path = f'{folder}/train.bin'
        write_shard(path, tokens)
        return Loader([path], B, T, vocab_size, carries, seed=0, share=share)  # maps the file


@torch.no_grad()
def make_token(cell: Cell, mode: str, machine: Machine, graphs: dict | None) -> tuple:
    """Set up one greedy token for each of B streams with full caches."""
    model = build_random(cell, mode, machine).eval()
    autocast = torch.autocast(
        torch.device(machine.device).type, torch.bfloat16, machine.compute_dtype == torch.bfloat16
    )
    with autocast:
        empty = model.init_state(cell.B)
    s, k, v = map(torch.randn_like, empty[:3])
    state = empty._replace(s=s, k=k, v=v, count=torch.full_like(empty.count, cell.C))
    token = torch.randint(vocab_size, (cell.B,), device=machine.device)
    if mode != 'plain':
        if fused.enabled:
            choose_overrides(model, [cell.B], machine.compute_dtype, allowed_overrides(mode))
        decoder = Decoder(model, cell.B, compute_dtype=machine.compute_dtype)
        decoder.load(state)
        decoder.step(token)
        return decoder.step, model.overrides

    @torch.no_grad()
    def run() -> None:
        nonlocal state, token
        with autocast:
            logits, state = model(token[:, None], state=state)
        token = logits[:, 0].argmax(-1)

    return run, model.overrides


def make_rollout(cell: Cell, mode: str, machine: Machine, graphs: dict | None) -> tuple:
    """Set up an update of train_sokoban.py, with its rollout."""
    B, T, device = cell.B, cell.C, machine.device
    model = cell.build(mode, str(machine.compute_dtype).removeprefix('torch.')).to(device)
    torch.backends.cudnn.benchmark = True
    boards = train_sokoban.SokobanEnv(
        generate(1000)[0], B, device=device, first_board=machine.rank * B
    )
    state = model.init_state(B)
    count = torch.zeros((), dtype=torch.int64, device=device)
    grads = Gradients((p for p in model.parameters() if p.numel()), len(train_sokoban.STATS) + 1)
    adam = torch.optim.Adam(
        model.parameters(),
        lr=torch.zeros((), device=device),
        fused=True,
        capturable=device != 'cpu',
    )
    rollout_and_backward = train_sokoban.make_rollout(
        model, boards, state, count, grads, T, machine.world
    )
    update = train_sokoban.make_update(model, adam, grads, rollout_and_backward, graphs)

    def run() -> None:
        update(False)
        grads.extra.tolist()  # the trainer waits here, too

    return run, frozenset()


MAKERS = {'train': make_update, 'decode': make_token, 'sokoban': make_rollout}


# ---- measuring ----


def set_up(cell: Cell, mode: str, machine: Machine, row: dict) -> Callable:
    """Return run() of a cell in one mode, after it has been compiled and captured, and note in its
    row which Triton overrides and CUDA graphs it uses. Raises RuntimeError if it cannot be
    compiled, UserError if not one row fits in memory."""
    is_gpu = machine.device != 'cpu'
    captures.clear()  # those of the cell before
    candidates.clear()
    if mode.startswith('try_'):
        candidates.add(mode.removeprefix('try_'))
    compiles = mode not in ('plain', 'eager')
    fused.enabled = compiles
    graphs = {} if cuda_graphs and is_gpu else None
    call, overrides = MAKERS[cell.suite](cell, mode, machine, graphs)
    if overrides:
        row['overrides'] = ' '.join(sorted(overrides))

    def run() -> None:
        fused.enabled = compiles  # the modes take turns
        call()

    if is_gpu:
        torch.cuda.reset_peak_memory_stats()  # the set-up has tried sizes of micro-batches
    for _ in range(5 if is_gpu else 1):  # on a GPU: until graphs are replayed
        run()
    if compiles and not fused.enabled:
        raise RuntimeError('torch.compile does not work here')
    if is_gpu:
        row['graphs'] = graphs_used()
    return run


def timed(run: Callable, machine: Machine) -> float:
    """Return the mean seconds of a call of run(), repeated for `seconds`; with several ranks, those
    of the slowest."""

    def total(repeats: int) -> float:
        if machine.device != 'cpu':
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        if machine.device != 'cpu':
            torch.cuda.synchronize()
        elapsed = torch.tensor(time.perf_counter() - start)
        if dist.is_initialized():
            dist.all_reduce(elapsed, dist.ReduceOp.MAX)
        return elapsed.item()

    # The first call also warms up caches after the turns of other modes.
    repeats = max(1, math.ceil(seconds / total(1)))
    return total(repeats) / repeats


def attempt(row: dict, call: Callable, *args: object) -> object:
    """Return call(*args). If it fails on any rank, set the status of a row instead, and return
    None."""
    result = None
    try:
        result = call(*args)
    except Exception as error:  # noqa: BLE001  it is reported, and the other cells are measured
        too_large = ranks.out_of_memory(error) or 'does not fit in memory' in str(error)
        row['status'] = 'OOM' if too_large else f'failed: {first_line(error)}'
    if not ranks.agree(int(row['status'] == 'ok')) and row['status'] == 'ok':
        row['status'] = 'failed on another rank'
    return result if row['status'] == 'ok' else None


def measure(cell: Cell, modes: list[str], machine: Machine) -> list[dict]:
    """Return the results of a cell, one row per mode. The modes take turns."""
    sizes = cell._asdict()
    if cell.suite != 'sokoban':
        sizes['W'] = window or cell.C
    rows = [
        {**sizes, 'mode': mode, 'status': 'ok', 'seconds': [], **published(cell)} for mode in modes
    ]
    runs = [attempt(row, set_up, cell, row['mode'], machine, row) for row in rows]
    for _, (row, run) in itertools.product(range(rounds), list(zip(rows, runs, strict=True))):
        if row['status'] == 'ok':
            row['seconds'].append(attempt(row, timed, run, machine))
    for row in rows:
        add_figures(row, cell, machine.world)
        if machine.device != 'cpu':
            row['memory_gb'] = torch.cuda.max_memory_reserved() / 1e9
            if row['status'] == 'ok' and not ranks.agree(row['graphs']):
                row['graphs'] += '; not the same on all ranks'
    del runs, run
    release()
    torch.compiler.reset()
    gc.collect()
    if machine.device != 'cpu':
        torch.cuda.empty_cache()
    return rows


def graphs_used() -> str:
    """Return the names of the CUDA graphs of this cell, and of what runs eagerly and why."""
    used = ', '.join(name for name, reason in captures.items() if not reason) or 'none'
    return used + ''.join(
        f'; {name} eager: {reason}' for name, reason in captures.items() if reason
    )


def add_figures(row: dict, cell: Cell, world: int) -> None:
    """Add the figures that follow from the seconds of a row, and their ratio to the paper's."""
    if row['status'] != 'ok':
        row['median'] = row['status']
        return
    is_decode = cell.suite == 'decode'
    values = [1000 * t if is_decode else cell.B * cell.C / t for t in row['seconds']]
    row |= {'median': statistics.median(values), 'min': min(values), 'max': max(values)}
    row['unit'] = UNITS[cell.suite]
    if not is_decode and world > 1:
        row['all_gpus'] = row['median'] * world
    if row.get('paper', 'OOM') != 'OOM':
        ratio = row['median'] / row['paper']
        row['over_paper'] = 1 / ratio if is_decode else ratio


def uses_kernels(cell: Cell, device: str) -> bool:
    """Return whether a cell runs Triton kernels: decoding and recurrent training do, on a GPU."""
    has_any = cell.suite == 'decode' or (cell.suite, cell.model) == ('train', 'recurrent')
    return has_any and device.startswith('cuda')


def published(cell: Cell) -> dict[str, float | str]:
    """Return the paper's figure for a cell, per GPU as the header says, and our modeled target for
    one H100, where there are any."""
    found = {}
    is_papers = (cell.D, vocab_size, window or cell.C) == (768, 50304, cell.C)
    if cell.suite in PAPER and is_papers:
        key = {'model': cell.model, 'L': str(cell.L), 'E': str(cell.E)}
        if cell.suite == 'train':
            key['tokens_per_update'] = str(PAPER_GPUS * cell.B * cell.C)
            column, scale = f'C{cell.C}', 1000 / PAPER_GPUS
        else:
            n = PAPER_STREAMS if cell.B in STREAMS else cell.B
            column, scale = f'C{cell.C}_B{n}', 1
        for row in read_csv(PAPER[cell.suite]):
            if key.items() <= row.items() and column in row:
                text = row[column]
                found['paper'] = text if text == 'OOM' else scale * float(text)
    if cell.suite == 'sokoban' or is_papers:
        key = {name: str(x) for name, x in cell._asdict().items()}
        for row in read_csv(TARGETS):
            if key.items() <= row.items():
                found['target'] = float(row['target'])
    return found


def read_csv(path: pathlib.Path) -> list[dict[str, str]]:
    """Return the rows of a table."""
    with open(path, encoding='utf-8', newline='') as file:
        return list(csv.DictReader(file))


# ---- the report ----

COLUMNS = (
    *(*Cell._fields, 'W', 'mode', 'median', 'min', 'max', 'unit', 'all_gpus', 'speed_up', 'paper'),
    *('over_paper', 'target', 'memory_gb', 'graphs', 'overrides'),
)


def show(x: object) -> str:
    """Return a value for the table."""
    if isinstance(x, float):
        return f'{x:,.0f}' if x >= 1000 else f'{x:.3g}'
    return '' if x is None else str(x).replace('|', '/')


def table(rows: list[dict]) -> str:
    """Return a table of Markdown of those COLUMNS that some row has."""
    names = [name for name in COLUMNS if any(name in row for row in rows)]
    titles = [name.replace('_', ' ').replace('target', 'modeled target') for name in names]
    lines = [titles, ['---'] * len(names)]
    lines += [[show(row.get(name)) for name in names] for row in rows]
    return ''.join(f'| {" | ".join(line)} |\n' for line in lines)


def write_report(report: dict, path: pathlib.Path) -> str:
    """Write the report as JSON and its table beside it as .md; return that text."""
    about = (
        '{device_name} x {world}, {threads} threads, {dtype}, torch {torch}, commit {code[commit]}'
    )
    text = f'{about.format(**report)}\n`{report["command"]}`\n\n{table(report["results"])}'
    if any('paper' in row for row in report['results']):
        text += f'\nPaper: {PAPER_GPUS} H100s; tokens/s of one of them, or ms/token of '
        text += f'{PAPER_STREAMS} streams on all.\n'
    write_json(report, path)
    write_text(text, path.with_suffix('.md'))
    return text


@ranks.explain_errors('choose smaller shapes or contexts')
def main() -> int:
    """Measure all cells. Return the exit status, 1 if one failed for another reason than memory."""
    config = configure(globals(), quiet=True)
    path = pathlib.Path(out or f'out/bench_{time.strftime("%Y%m%d_%H%M%S")}_{os.getpid()}.json')
    if path.suffix == '.md':
        raise UserError(
            f'out = {out!r}: names a file of JSON; the table is written beside it, as .md'
        )
    for file in (path, path.with_suffix('.md')):
        if file.exists():
            raise UserError(f'out = {out!r}: {file} exists: choose another name')
    rank, world, device_ = ranks.join_ranks(device, threads)
    if device_ == 'mps':
        raise UserError("device = 'mps': bench.py measures CPUs and CUDA devices")
    machine = Machine(rank, world, device_, ranks.pick_dtype(dtype, device_))
    on_cpu = device_ == 'cpu'
    defaults = {
        'tokens_per_update': (4096,) if on_cpu else (131072,),
        'streams': (16,) if on_cpu else STREAMS,
        'n_embd': 256 if on_cpu else 768,
        'vocab_size': 256 if on_cpu else 50304,
        'shapes': ((2, 8),) if on_cpu else (),
        'contexts': (128,) if on_cpu else (),
        'agents': ((1, 1, 128), (4, 1, 64)),
        'modes': ('eager' if suite == 'sokoban' else 'plain,eager') if on_cpu else 'compiled',
    }
    config |= {name: config[name] or x for name, x in defaults.items()}
    globals().update(config)
    chosen = [name.strip() for name in modes.split(',')]
    if not set(chosen) <= set(MODES):
        raise UserError(f'modes = {modes!r}: expected some of {", ".join(MODES)}')
    # On a GPU the memory must hold one mode at a time only.
    groups = [chosen] if on_cpu else [[mode] for mode in chosen]
    cells = [cell for name in ([suite] if suite else SHAPES) for cell in find_cells(name)]
    if not (set(chosen) <= set(ALWAYS) or any(uses_kernels(cell, device_) for cell in cells)):
        reason = f'nothing measured here uses kernels: expected some of {", ".join(ALWAYS)}'
        raise UserError(f'modes = {modes!r}: {reason}')

    path.parent.mkdir(parents=True, exist_ok=True)
    about = {'command': shlex.join(sys.argv), 'date': time.strftime('%Y-%m-%d %H:%M %z')}
    about |= run_folder.machine(device_, str(machine.compute_dtype))
    about['code'] = code_record(__file__)
    report = {**about, 'settings': config, 'results': []}
    text = ''
    for i, cell in enumerate(cells):
        rows, sizes = [], ' '.join(map(str, cell))
        for group in groups:
            if group[0] not in ALWAYS and not uses_kernels(cell, device_):
                continue
            measured = measure(cell, group, machine)
            rows += measured
            for row in measured:
                if rows[0]['status'] == row['status'] == 'ok':
                    row['speed_up'] = min(rows[0]['seconds']) / min(row['seconds'])
                print0(f'{i + 1}/{len(cells)} {sizes} {row["mode"]}: {show(row["median"])}')
            report['results'] += measured
            if rank == 0:
                text = write_report(report, path)
    print0(f'\n{text}\n{path}')
    ranks.leave_ranks()
    return int(any(row['status'].startswith('failed') for row in report['results']))


if __name__ == '__main__':
    run_script(main)

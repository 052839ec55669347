"""
Speed and memory of the language models on whatever device there is.

    python bench.py                                               # plain against fast, a size for 2 CPU cores
    python bench.py --paths=fast,compiled,gpt --cells="(1,16,128,16),(2,8,128,16)" --dtype=auto
    python bench.py --suite=decode --paths=plain,fast,gpt

suite = 'train' times forward + backward of a chunk (embedding, core, head, loss) and, with --optimizer=True, the update, apart;
suite = 'decode' times model.step, one token for each of B streams, after a cache filled to C.
Every variant (a path in a cell) lives in a process of its own, for a peak memory of its own and a clean end where memory runs out.
The processes take turns, one at a time, round by round, so that a drift of the machine falls on all of them; so does a large
matrix product, whose rate is the yardstick for the FLOPs of model.flops_per_token. Each measurement follows an untimed run.
Memory: on a GPU torch's own peak (max_memory_allocated); on a CPU the process's peak resident memory less what it held after
importing torch: weights, gradients, activations, and in a compiled variant what the compiler left behind.
"""
import contextlib
import datetime
import gc
import math
import multiprocessing
import os
import platform
import re
import shlex
import signal
import statistics
import subprocess
import sys
import time

import torch

import kernels
import train_lm
from checkpoint import device_name, pick_device, pick_dtype, write_json
from configurator import configure, fail, first_line
from model import ModelConfig, State, build_model

# what
suite = 'train'                 # 'train' or 'decode'
cells = ((2, 8, 128, 16),)      # (L, E, C, B) each; C is the window W, B the streams. The default suits 2 CPU cores
paths = 'plain,fast'            # of plain, fast, compiled (RecurrentGPT) and gpt, gpt_compiled (GPT); compiled ones cost a minute of compiling
optimizer = False               # suite train: also an update of Muon and AdamW a chunk, timed apart
# sizes
n_embd = 256                    # D
vocab_size = 256                # V: bytes, so that the head is no more than its share; 50304 for GPT-2's
block_size = 64                 # T, tokens of a training chunk; 0: T = C, as in the paper's throughput table
dtype = 'float32'               # 'float32', 'bfloat16' (autocast), or 'auto': bfloat16 where the device is fast at it
# how
rounds = 3                      # measurements of each variant; the median and the range are reported
seconds = 0.5                   # least length of one measurement: short runs are repeated to fill it
device = 'auto'                 # 'auto': cuda if there is one; or 'cpu', 'cuda', 'cuda:1'
threads = 0                     # CPU threads; 0: torch's choice
out = ''                        # JSON file; '': results/<device>/<suite>.json

PATHS = ('plain', 'fast', 'compiled', 'gpt', 'gpt_compiled')


# ----------------------------------------------------------------------------- what a figure needs to be repeated

def commit():
    """Of the folder this file is in, '-dirty' where tracked files have changed, 'unknown' outside git."""
    def git(*arguments):
        folder = os.path.dirname(os.path.abspath(__file__))
        return subprocess.run(['git', '-C', folder, *arguments], capture_output=True, text=True, check=True).stdout.strip()
    try:
        return git('rev-parse', '--short=12', 'HEAD') + ('-dirty' if git('status', '--porcelain', '--untracked-files=no') else '')
    except (OSError, subprocess.CalledProcessError):
        return 'unknown'


def header(config, kind, amp):
    return {'device': device_name(kind), 'dtype': str(amp)[6:], 'threads': config['threads'] or torch.get_num_threads(),
            'torch': torch.__version__, 'python': platform.python_version(), 'commit': commit(),
            'command': shlex.join(['python', *sys.argv]), 'date': datetime.datetime.now().astimezone().isoformat(timespec='seconds'),
            'memory': 'torch.cuda.max_memory_allocated' if kind.startswith('cuda') else 'peak resident memory of its process, less after import',
            'config': config}


def write_results(report, out, name):
    """The report as JSON: in `out`, or in results/<device>/<name>.json. Returns the path."""
    folder = re.sub('[^a-z0-9]+', '-', report['device'].lower()).strip('-')
    out = out or os.path.join('results', folder, f'{name}.json')
    os.makedirs(os.path.dirname(out) or '.', exist_ok=True)
    write_json(report, out)
    return out


# ----------------------------------------------------------------------------- the measured work
# make_...(**arguments) -> ({part: function to time}, {what is known of it}); called in the variant's own process.

def make_matmul(kind, amp):
    """The yardstick: a product of two large square matrices."""
    n = 8192 if kind.startswith('cuda') else 2048
    a, b = torch.randn(2, n, n, device=kind, dtype=amp)
    return {'matmul': lambda: a @ b}, {'flops': 2 * n**3}


def make_model(suite, model, recurrent, kind, amp, B, optimizer=False):
    """suite 'train': parts 'chunk', forward and backward of B x T tokens with the state carried, and 'optimizer', an update;
    'decode': part 'token', one greedy token for each of B streams from a cache of W entries. model: ModelConfig's fields."""
    torch.manual_seed(0)
    model = build_model(ModelConfig(**model), recurrent).to(kind)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1 and not p.any():
                p.normal_(0, 0.02)  # what starts at zero: a processor may be faster at zeros than at numbers
    T, W, V = model.config.block_size, model.config.window, model.config.vocab_size
    with train_lm.autocast(kind, amp):
        state = model.init_state(B)
    info = {'params': model.num_params()['total'], 'flops_per_token': sum(model.flops_per_token().values())}
    if suite == 'decode':
        carried = [torch.randint(V, (B,), device=kind), State(*(torch.randn_like(x) for x in state[:3]), torch.full_like(state.count, W))]

        def token():
            with torch.no_grad(), train_lm.autocast(kind, amp):
                logits, carried[1] = model.step(*carried)
                carried[0] = logits.argmax(-1)
        return {'token': token}, {**info, 'tokens': B}

    x, y = torch.randint(V, (2, B, T), device=kind)
    carried = [state if recurrent else None]

    def chunk():
        model.zero_grad(set_to_none=True)
        with train_lm.autocast(kind, amp):
            loss, carried[0] = model(x, y, carried[0])
        loss.backward()
    parts = {'chunk': chunk}
    if optimizer:
        optimizers = train_lm.make_optimizers(model)
        for group in (g for o in optimizers for g in o.param_groups):
            group['lr'] = 1e-6  # hundreds of updates by one gradient must not drive the weights to infinity
        parts['optimizer'] = lambda: [o.step() for o in optimizers]
    return parts, {**info, 'tokens': B * T}


# ----------------------------------------------------------------------------- timing

def timed(run, repeats, kind):
    """Seconds of one run(), the mean of `repeats`, with the device idle at both ends."""
    wait = torch.cuda.synchronize if kind.startswith('cuda') else lambda: None
    wait()
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    wait()
    return (time.perf_counter() - start) / repeats


def memory(kind, peak):
    """Bytes in use now, or at the peak since `reset_peak`. Not getrusage's: a child's figure starts at its parent's."""
    if kind.startswith('cuda'):
        return torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()
    try:
        with open('/proc/self/status') as file:
            return 1024 * int(re.search(r'VmHWM:\s*(\d+)' if peak else r'VmRSS:\s*(\d+)', file.read()).group(1))
    except OSError:
        return 0  # only Linux tells


def reset_peak(kind):
    if kind.startswith('cuda'):
        return torch.cuda.reset_peak_memory_stats()
    with contextlib.suppress(OSError), open('/proc/self/clear_refs', 'w') as file:
        file.write('5')  # where this is not allowed, what compiling took counts too


def work(pipe, make, arguments, kind, seconds, threads):
    """A variant's process. Each message asks for a round: the first makes it and runs it once (compiling included), others measure."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C is the parent's business, which then ends us
    if kind.startswith('cuda'):
        torch.cuda.set_device(kind)
        torch.set_float32_matmul_precision('high')  # as train_lm.py
    if threads:
        torch.set_num_threads(threads)
    base, parts, first = memory(kind, peak=False), None, True
    pipe.send('torch is imported')
    while pipe.recv():
        try:
            start = time.perf_counter()
            if parts is None:
                parts, info = make(**arguments)
            once = {part: timed(run, 1, kind) for part, run in parts.items()}  # after the others' turns caches and clocks are cold
            if first:
                answer, first = {'first_run_s': time.perf_counter() - start, **info}, False
                reset_peak(kind)
            else:
                figures = {part: timed(run, max(1, math.ceil(seconds / once[part])), kind) for part, run in parts.items()}
                answer = {'seconds': figures, 'memory_bytes': memory(kind, peak=True) - base}
            if kind.startswith('cuda'):  # the variants share the card: leave it empty
                parts = None
                kernels._free.clear()
                gc.collect()
                torch.cuda.empty_cache()
        except (RuntimeError, MemoryError) as error:  # a variant that cannot run must not end the others
            out_of_memory = isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)
            answer = {'status': 'OOM' if out_of_memory else f'failed: {first_line(error)}'}
        pipe.send(answer)


def end(process, pipe):
    with contextlib.suppress(OSError):
        pipe.send(False)
    process.join(5)
    process.kill()


def ask(process, pipe, record):
    """One round of a variant; its answer goes into the record. Returns a line about it."""
    try:
        pipe.send(True)
        answer = pipe.recv()
    except (EOFError, OSError):  # the process is gone; Linux kills one that takes the last of the memory
        process.join()
        answer = {'status': 'OOM' if process.exitcode == -signal.SIGKILL else f'failed: its process ended with {process.exitcode}'}
    figures = answer.pop('seconds', {})
    for part, value in figures.items():
        record['seconds'].setdefault(part, []).append(value)
    record.update(answer)
    if record['status'] != 'ok':
        end(process, pipe)  # gives its memory back at once
        return record['status']
    return ', '.join(f'{part} {value:.4g} s' for part, value in (figures or {'first run': answer['first_run_s']}).items())


def measure(variants, rounds, seconds, kind, threads):
    """variants: {label: (make, arguments)} -> {label: record}, measured in turns. A record holds status, first_run_s, memory_bytes,
    seconds {part: [one figure a round]} and what `make` told of it."""
    context = multiprocessing.get_context('spawn')
    workers, records = {}, {label: {'status': 'ok', 'seconds': {}} for label in variants}
    try:
        for number in range(rounds + 1):
            for label, record in records.items():
                if number == 0:
                    ours, theirs = context.Pipe()
                    process = context.Process(target=work, args=(theirs, *variants[label], kind, seconds, threads), daemon=True)
                    process.start()
                    theirs.close()
                    workers[label] = process, ours
                    with contextlib.suppress(EOFError):
                        ours.recv()  # importing torch is no part of the first run
                if record['status'] == 'ok':
                    print(f'round {number}/{rounds}  {label}: {ask(*workers[label], record)}', flush=True)
    finally:
        for worker in workers.values():
            end(*worker)
    return records


def spread(values):
    values = list(values)
    return {'median': statistics.median(values), 'min': min(values), 'max': max(values)}


def tokens_per_s(record, *parts):
    """Over the sum of the parts' times in each round."""
    return spread(record['tokens'] / sum(times) for times in zip(*(record['seconds'][part] for part in parts), strict=True))


def show(figures, digits=0):
    """median (min..max)"""
    return '{:,.{n}f} ({:,.{n}f}..{:,.{n}f})'.format(figures['median'], figures['min'], figures['max'], n=digits)


# ----------------------------------------------------------------------------- the script

def plan(config, kind, amp):
    """{label: (make, arguments)} and {label: its path and sizes}; refuses what makes no sense before anything runs."""
    if config['suite'] not in ('train', 'decode'):
        fail(f"suite = {config['suite']!r}: expected 'train' or 'decode'")
    for key, least in (('rounds', 1), ('block_size', 0), ('threads', 0), ('seconds', 0)):
        if config[key] < least:
            fail(f'{key} = {config[key]}: must be at least {least}')
    chosen = [path.strip() for path in config['paths'].split(',')]
    if not set(chosen) <= set(PATHS):
        fail(f'paths = {config["paths"]!r}: expected some of {",".join(PATHS)}')
    if not config['cells']:
        fail('cells is empty: expected (L, E, C, B), once or more')
    variants, sizes = {}, {}
    for cell in config['cells']:
        if len(cell) != 4 or not all(type(n) is int and n > 0 for n in cell):
            fail(f'cells: {cell} is not (L, E, C, B), four integers above 0')
        L, E, C, B = cell
        T, D, V = config['block_size'] or C, config['n_embd'], config['vocab_size']
        for path in chosen:
            model = {'vocab_size': V, 'n_layer': L, 'n_expert': E, 'n_embd': D, 'window': C, 'block_size': T,
                     'path': {'gpt': 'fast', 'gpt_compiled': 'compiled'}.get(path, path)}
            ModelConfig(**model)  # raises ValueError where sizes do not fit together
            label = f'L={L} E={E} C={C} B={B} {path}'
            variants[label] = make_model, {'suite': config['suite'], 'model': model, 'recurrent': not path.startswith('gpt'), 'kind': kind,
                                           'amp': amp, 'B': B, 'optimizer': config['optimizer']}
            sizes[label] = {'path': path, 'L': L, 'E': E, 'C': C, 'B': B, 'T': T, 'D': D, 'V': V}
    return variants, sizes


def derive(record, suite, matmul):
    """A finished record with its rates, and with its share of the yardstick's rate (backward costs twice the forward)."""
    if record['status'] != 'ok':
        return record
    if suite == 'decode':
        return {**record, 'ms_per_token': spread(1e3 * t for t in record['seconds']['token'])}
    record['tokens_per_s'] = tokens_per_s(record, 'chunk')
    if 'optimizer' in record['seconds']:
        record['tokens_per_s_with_optimizer'] = tokens_per_s(record, 'chunk', 'optimizer')
    if matmul:
        record['share_of_matmul'] = 3 * record['flops_per_token'] * record['tokens_per_s']['median'] / matmul['median']
    return record


def table(results, suite):
    """Markdown; 'speed-up' is over the first path of the same cell."""
    train = suite == 'train'
    titles = ['L, E', 'C', 'B', 'path', 'tokens/s: median (min..max)' if train else 'ms/token: median (min..max)', 'speed-up',
              *(['with optimizer', 'of matmul rate'] if train else []), 'first run, s', 'memory, MiB']
    rows, first = [titles, ['---'] * len(titles)], {}
    for r in results:
        row = [f'{r["L"]}, {r["E"]}', r['C'], r['B'], r['path']]
        if r['status'] != 'ok':
            row += [r['status'].replace('|', '/')] + [''] * (len(titles) - 5)
        else:
            figures = r['tokens_per_s' if train else 'ms_per_token']
            speed = figures['median'] if train else 1 / figures['median']
            row += [show(figures, 0 if train else 3), f'{speed / first.setdefault(tuple(row[:3]), speed):.2f}x']
            if train:
                row.append(show(r['tokens_per_s_with_optimizer']) if 'tokens_per_s_with_optimizer' in r else '-')
                row.append(f'{r["share_of_matmul"]:.1%}' if 'share_of_matmul' in r else 'n/a')
            row += [f'{r["first_run_s"]:.1f}', f'{r["memory_bytes"] / 2**20:,.0f}']
        rows.append(row)
    return '\n'.join('| ' + ' | '.join(map(str, row)) + ' |' for row in rows)


def run_suite(name, suite, variants, sizes, config, kind, amp, seconds):
    """Measures, writes the JSON, prints the table. sizes: {label: its path and sizes}, in the order of the table."""
    report = {'suite': name, **header(config, kind, amp)}
    variants = {'matmul': (make_matmul, {'kind': kind, 'amp': amp}), **variants}
    records = measure(variants, config['rounds'], seconds, kind, config['threads'])
    yardstick, matmul, rate = records['matmul'], None, 'unknown'
    if yardstick['status'] == 'ok':
        matmul = spread(yardstick['flops'] / t for t in yardstick['seconds']['matmul'])
        rate = show({key: value / 1e9 for key, value in matmul.items()})
    report['matmul'] = {**yardstick, 'flops_per_s': matmul}
    report['results'] = [{**sizes[label], **derive(records[label], suite, matmul)} for label in sizes]
    path = write_results(report, config['out'], name)
    first = report['results'][0]
    print('\n{device}, {threads} threads, torch {torch}, commit {commit}, {dtype}; '.format(**report)
          + 'D = {D}, T = {T}, V = {V}; '.format(**{**first, 'T': first['T'] if len({r['T'] for r in report['results']}) == 1 else 'C'})
          + f'matmul {rate} GFLOP/s\n\n{table(report["results"], suite)}\n\n{path}')


def main():
    config = configure(globals())
    try:
        kind = pick_device(device)
        amp = pick_dtype(dtype, kind)
        variants, sizes = plan(config, kind, amp)
    except ValueError as error:
        fail(error)
    run_suite(suite, suite, variants, sizes, config, kind, amp, seconds)


if __name__ == '__main__':
    try:
        main()
    except OSError as error:
        fail(error)
    except KeyboardInterrupt:
        print('\ninterrupted: nothing written', file=sys.stderr)
        sys.exit(130)

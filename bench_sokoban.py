"""
Training speed of the Sokoban agents: environment steps a second of whole updates (rollout, backward, Adam) on whatever device there is.

    python bench_sokoban.py                                       # the small budget's L = 1 and L = 4, plain, fast and compiled
    python bench_sokoban.py --cells="(2,2,64)," --paths=fast --dtype=float32
    python bench_sokoban.py --recurrent=False --paths=compiled,compiled_recompute
    python bench.py --suite=sokoban                               # the same

Paths: 'plain' (the equations by autograd), 'fast', 'compiled' (fast, cells fused by torch.compile), and with '_recompute' the update runs
its own forward instead of keeping the rollout's. measure.py says how they are measured; so is a yardstick, one large 3x3 convolution,
forward and backward, in the same dtype. "of conv rate" is the multiply-adds that are executed (convlstm.py, macs_per_step) over its rate.
"""

from collections.abc import Callable

from configurator import (
    configure,
    fail,
    run_script,
)  # before torch: how threads wait, what ctrl-C does

import torch
import torch.nn.functional as F

import train_sokoban
from checkpoint import keep_memory, pick_device, pick_dtype
from convlstm import AgentConfig
from measure import column, figure, header, markdown, measure, show, speedup, spread, write_results

cells = ((1, 1, 128), (4, 1, 64))  # (L, E, d) each: the paper's small budget
paths = 'plain,fast,compiled'  # of train_sokoban.py, with a comma between them
kind = 'convlstm'  # or 'convglu'
recurrent = True  # or the twin that carries nothing
n_envs = 32  # boards
unroll = 20  # steps an update
dtype = 'auto'  # of convolutions: 'float32', 'bfloat16', or 'auto': bfloat16 where the device is fast at it
rounds = 3  # measurements of each variant; the median and the range are reported
seconds = 3.0  # least length of one measurement
device = 'auto'  # 'auto': cuda if there is one; or 'cpu', 'cuda', 'cuda:1'
threads = 0  # CPU threads; 0: torch's choice
out = ''  # JSON file; '': results/<device>/sokoban.json

PATHS = [path + how for path in ('plain', 'fast', 'compiled') for how in ('', '_recompute')]


def make_conv(kind: str, dt: torch.dtype) -> tuple[dict[str, Callable], dict]:
    """The yardstick: boards enough to fill the device."""
    keep_memory()
    x = (
        torch.randn(640, 128, 10, 10, device=kind, dtype=dt)
        .to(memory_format=torch.channels_last)
        .requires_grad_()
    )
    w = (
        torch.randn(512, 128, 3, 3, device=kind, dtype=dt)
        .to(memory_format=torch.channels_last)
        .requires_grad_()
    )
    g = torch.randn(640, 512, 10, 10, device=kind, dtype=dt).to(memory_format=torch.channels_last)
    return {'conv': lambda: torch.autograd.grad(F.conv2d(x, w, padding=1), (x, w), g)}, {
        'macs': 3 * 640 * 100 * 9 * 128 * 512
    }


def make_update(settings: dict, path: str, kind: str) -> tuple[dict[str, Callable], dict]:
    """Whole updates of train_sokoban.py on generated levels."""
    path, _, how = path.partition('_')
    arguments = {
        **settings,
        'split': 'generated',
        'eval_split': 'generated',
        'n_levels': 5000,
        'eval_games': 1,
        'device': kind,
        'path': 'plain' if path == 'plain' else 'fast',
        'reuse': not how,
    }
    run = train_sokoban.make_run(
        configure(vars(train_sokoban), [f'--{k}={v}' for k, v in arguments.items()], quiet=True)
    )
    run.model.config.path = path
    if kind.startswith('cuda'):
        for _ in range(4):  # three as they are, then the capture: replays are measured
            train_sokoban.update(run, False)
    macs = run.model.macs_per_step()
    return {'update': lambda: train_sokoban.update(run, False)}, {
        'env_steps': settings['n_envs'] * settings['unroll'],
        'params': run.model.num_params()['total'],
        'macs_per_step': macs,
        # forward, twice as much backward, and a second forward without reuse; not the encoder, the head, the value of the step after
        'macs': (4 if how else 3) * macs['executed'] * settings['n_envs'] * settings['unroll'],
    }


def plan(config: dict, where: str, dt: torch.dtype) -> tuple[dict[str, tuple], dict[str, dict]]:
    """{label: (make, arguments)}, {label: its path and sizes}."""
    for key, least in (('rounds', 1), ('seconds', 0), ('n_envs', 1), ('unroll', 1), ('threads', 0)):
        if config[key] < least:
            fail(f'{key} = {config[key]}: must be at least {least}')
    chosen = [path.strip() for path in paths.split(',')]
    if not set(chosen) <= set(PATHS):
        fail(f'paths = {paths!r}: expected some of {",".join(PATHS)}')
    variants, sizes = {'conv': (make_conv, {'kind': where, 'dt': dt})}, {}
    for cell in cells:
        if len(cell) != 3 or not all(type(n) is int and n > 0 for n in cell):
            fail(f'cells: {cell} is not (L, E, d), three integers above 0')
        L, E, D = cell
        AgentConfig(kind, recurrent, L, E, D)  # ValueError where they do not fit
        for path in chosen:
            settings = {
                'n_layer': L,
                'n_expert': E,
                'n_embd': D,
                'arch': kind,
                'recurrent': recurrent,
                'n_envs': n_envs,
                'unroll': unroll,
                'dtype': str(dt)[6:],
                'threads': threads,
            }
            label = f'L={L} E={E} d={D} {path}'
            variants[label] = make_update, {'settings': settings, 'path': path, 'kind': where}
            sizes[label] = {'path': path, 'L': L, 'E': E, 'D': D}
    return variants, sizes


def table(results: list[dict]) -> str:
    """Markdown."""
    return markdown(
        [
            ('L, E, d', lambda r: f'{r["L"]}, {r["E"]}, {r["D"]}'),
            column('path', 'path'),
            ('env steps/s: median (min..max)', figure),
            speedup(results, 'LED'),
            column('of conv rate', 'share_of_conv', '{:.1%}'.format),
            column('first run, s', 'first_run_s', '{:.1f}'.format),
            column('memory, MiB', 'memory_bytes', lambda x: f'{x / 2**20:,.0f}'),
        ],
        results,
    )


def main(argv: list[str] | None = None) -> None:
    config = configure(globals(), argv)
    try:
        where = pick_device(device)
        dt = pick_dtype(dtype, where)
        variants, sizes = plan(config, where, dt)
    except ValueError as error:
        fail(error)
    report = {'suite': 'sokoban', **header(config, where, dt)}
    records = measure(variants, rounds, seconds, where, threads)
    yardstick = records.pop('conv')
    if yardstick['status'] == 'ok':
        yardstick['macs_per_s'] = spread(
            yardstick['macs'] / t for t in yardstick['seconds']['conv']
        )
    report['conv'] = yardstick
    for record in records.values():
        if record['status'] == 'ok':
            record['env_steps_per_s'] = spread(
                record['env_steps'] / t for t in record['seconds']['update']
            )
            if 'macs_per_s' in yardstick:
                rate = record['macs'] / record['env_steps'] * record['env_steps_per_s']['median']
                record['share_of_conv'] = rate / yardstick['macs_per_s']['median']
    report['results'] = [{**sizes[label], **records[label]} for label in sizes]
    rate = (
        show({k: 2 * v / 1e9 for k, v in yardstick['macs_per_s'].items()})
        if 'macs_per_s' in yardstick
        else 'unknown'
    )
    text = (
        '{device}, {threads} threads, torch {torch}, commit {commit}, {dtype} convolutions, '.format(
            **report
        )
        + f'{n_envs} boards x {unroll} steps; convolution alone {rate} GFLOP/s\n`{report["command"]}`\n\n{table(report["results"])}'
    )
    path = write_results(report, out, text)
    print(f'\n{text}\n\n{path}')


if __name__ == '__main__':
    run_script(main, 'interrupted: nothing written')

"""Draws depth.png and lengths.png: loss by levels, and what recurrence is worth, by length; prints
the study's losses in long streams, and how sure its best depths are.
PYTHONPATH=. python results/cpu-intel-xeon/study_lm/lengths.py"""

import json
import re
from collections import defaultdict
from pathlib import Path
from statistics import mean

import by_position
import figures
import sweep

XEON = Path(__file__).parent
EPYC = XEON.parents[1] / 'cpu-amd-epyc/study_lm'
# no variant, no seed 1
RUN = re.compile(r'transformer_(\w+)_L(\d+)_.*_s([234])( \((\d+) updates\))?')
LONG = re.compile(rf'(\d+)/([rn])(\d+)_s([{by_position.SEEDS}])')
BYTES = 10240  # an update's
LOOKS = {'recurrent': ('recurrent', '-'), 'feedforward': ('not recurrent', '--')}


def read(path: Path) -> dict:
    return json.loads(path.read_text())


def new() -> dict:
    """{(kind, bytes trained on): {L: {seed: loss}}}"""
    return defaultdict(lambda: defaultdict(dict))


def one_speech() -> dict:
    losses = new()
    for path in (XEON / 'losses.json', EPYC / '7M/losses.json', EPYC / '14M.json'):
        for name, by_bytes in read(path).items():
            if run := RUN.fullmatch(name):
                length = max(map(int, by_bytes))
                losses[run[1], length][int(run[2])][run[3]] = by_bytes[str(length)]
    return losses


def twelve_speeches() -> dict:
    losses = new()
    for name, loss in read(XEON / 'held_out.json').items():
        if run := RUN.fullmatch(name):
            losses[run[1], int(run[5]) * BYTES][int(run[2])][run[3]] = loss
    for name, by_seed in read(EPYC / '7M/held_out.json').items():
        kind, L = name.split(' L = ')
        losses[kind, 688 * BYTES][int(L)] = by_seed
    return losses


def long_streams() -> dict:
    losses = new()
    for name, by_end in read(by_position.FILE).items():
        if run := LONG.fullmatch(name):
            kind = 'recurrent' if run[2] == 'r' else 'feedforward'
            mean_loss = by_position.between(by_end, 0, by_position.ENDS[-1])
            losses[kind, int(run[1]) * BYTES][int(run[3])][run[4]] = mean_loss
    return losses


def paired(a: dict, b: dict) -> tuple:
    """(mean, standard error, seeds) of a - b, seed by seed"""
    values = [a[seed] - b[seed] for seed in sorted(a.keys() & b.keys())]
    return figures.with_errors({0: figures.summary(values)})[0]


def verdict(losses: dict, length: int) -> None:
    """As sweep.py's: the losses, and how sure the best L are; what depth and recurrence are
    worth."""
    runs = []
    for kind in LOOKS:
        for L, by_seed in sorted(losses[kind, length].items()):
            row = figures.Row('transformer', kind == 'recurrent', 'small', L, 16 // L, 48)
            runs += [(row._replace(seed=seed), [{'val_loss': x}]) for seed, x in by_seed.items()]
    for row, (value, error, n) in figures.with_errors(figures.cells(runs)).items():
        print(f'{row.variant}, L = {row.L}: {value:.4f} +- {error:.4f}, {n} seeds')
    print(sweep.best_depths(runs))
    ours, twin = (losses[kind, length] for kind in LOOKS)
    for kind, by_levels in zip(LOOKS, (ours, twin), strict=True):
        print('{}, L = 2 - 8: {:.4f} +- {:.4f}'.format(kind, *paired(by_levels[2], by_levels[8])))
    for L in sorted(ours.keys() & twin.keys()):
        print('L = {}, twin - recurrent: {:.4f} +- {:.4f}'.format(L, *paired(twin[L], ours[L])))


def best(by_levels: dict) -> dict:
    """{seed: loss} of the L with the best mean, of those with the most seeds."""
    most = max(map(len, by_levels.values()))
    return min((x for x in by_levels.values() if len(x) == most), key=lambda x: mean(x.values()))


def gaps(losses: dict) -> dict:
    """{MB: (mean, standard error, seeds) of best twin - best recurrent, paired by seed}"""
    points = {}
    for length in sorted({length for _, length in losses}):
        ours, twin = (best(losses[kind, length]) for kind in ('recurrent', 'feedforward'))
        points[length / 1e6] = paired(twin, ours)
    return points


def levels(axes, losses: dict, lengths: list) -> None:
    """Loss by L, a colour a length; not recurrent dashed."""
    for i, length in enumerate(lengths):
        for kind, (name, style) in LOOKS.items():
            points = {L: figures.summary([*x.values()]) for L, x in losses[kind, length].items()}
            label = f'{name}, {length / 1e6:.3g} MB'
            figures.line(axes, figures.with_errors(points), i, label, ls=style)
    axes.set(xscale='log', xlabel='levels L', ylabel='validation loss, nats a byte')
    axes.set_xticks([1, 2, 4, 8, 16], '1 2 4 8 16'.split())
    axes.minorticks_off()


def by_length(axes, lines: dict) -> None:
    """{label: {MB trained on: (mean, standard error, seeds) of twin - recurrent}}, drawn and
    printed."""
    for i, (label, points) in enumerate(lines.items(), 5):
        figures.line(axes, points, i, label)
        for size, (value, error, n) in points.items():
            print(f'{label}, {size:5.2f} MB: {value:.4f} +- {error:.4f}, {n} seeds')
    axes.set(xscale='log', xlabel='MB trained on', ylabel=by_position.WORTH, ylim=(0, 0.08))
    axes.set_xticks([*points], [f'{x:.3g}' for x in points])
    axes.minorticks_off()


def by_streams(known: dict) -> dict:
    """by_length's lines: of long streams, and of short ones."""
    lines = {}
    for length in (4096, 512):
        points = {n * 0.01024: by_position.gap(known, n, 0, length) for n in by_position.SPEECHES}
        lines[f'speeches, in streams of {length:,} bytes'] = points
    return lines


def main() -> None:
    one, twelve, long = one_speech(), twelve_speeches(), long_streams()
    verdict(long, 688 * BYTES)
    figure, (left, right) = figures.new(2, sharey=False)
    levels(left, long, [688 * BYTES])
    by_length(right, by_streams(read(by_position.FILE)))
    title = 'Loss by depth (streams of 4,096 bytes), and what recurrence is worth; equal FLOPs'
    figures.finish(figure, title, figures.STANDARD_ERROR)
    print(*figures.save(figure, str(XEON), 'depth', ('png',)))

    figure, (left, right) = figures.new(2, 3.4, sharey=False)
    levels(left, one, sorted({length for _, length in one}))
    lines = {'held out: one speech': gaps(one), 'held out: twelve speeches': gaps(twelve)}
    by_length(right, lines)
    title = 'Loss by levels on one speech, and what recurrence is worth'
    figures.finish(figure, title, figures.STANDARD_ERROR)
    print(*figures.save(figure, str(XEON), 'lengths', ('png',)))


if __name__ == '__main__':
    main()

"""Draws depth.png and lengths.png: loss by levels, and what recurrence is worth, by length.
PYTHONPATH=. python results/cpu-intel-xeon/study_lm/lengths.py"""

import json
import re
from collections import defaultdict
from pathlib import Path
from statistics import mean

import by_position
import figures

XEON = Path(__file__).parent
EPYC = XEON.parents[1] / 'cpu-amd-epyc/study_lm'
# no variant, no seed 1
RUN = re.compile(r'transformer_(\w+)_L(\d+)_.*_s([234])( \((\d+) updates\))?')
BYTES = 10240  # an update's
LOOKS = {'recurrent': ('recurrent', '-'), 'feedforward': ('not recurrent', '--')}
NOTE = '\nbars: one standard error'


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


def best(by_levels: dict) -> dict:
    """{seed: loss} of the L with the best mean, of those with the most seeds."""
    most = max(map(len, by_levels.values()))
    return min((x for x in by_levels.values() if len(x) == most), key=lambda x: mean(x.values()))


def gaps(losses: dict) -> dict:
    """{MB: (mean, standard error, seeds) of best twin - best recurrent, paired by seed}"""
    points = {}
    for length in sorted({length for _, length in losses}):
        ours, twin = (best(losses[kind, length]) for kind in ('recurrent', 'feedforward'))
        both = ours.keys() & twin.keys()
        points[length / 1e6] = figures.summary([twin[seed] - ours[seed] for seed in both])
    return figures.with_errors(points)


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


def main() -> None:
    one, twelve = one_speech(), twelve_speeches()
    figure, (left, right) = figures.new(2, sharey=False)
    levels(left, twelve, [688 * BYTES])
    by_position.by_length(right, by_position.by_streams(read(by_position.FILE)))
    title = 'Loss by depth (streams of 512 bytes), and what recurrence is worth; equal FLOPs'
    figures.finish(figure, title, NOTE)
    print(*figures.save(figure, str(XEON), 'depth', ('png',)))

    figure, (left, right) = figures.new(2, 3.4, sharey=False)
    levels(left, one, sorted({length for _, length in one}))
    lines = {'held out: one speech': gaps(one), 'held out: twelve speeches': gaps(twelve)}
    by_position.by_length(right, lines)
    figures.finish(figure, 'Loss by levels on one speech, and what recurrence is worth', NOTE)
    print(*figures.save(figure, str(XEON), 'lengths', ('png',)))


if __name__ == '__main__':
    main()

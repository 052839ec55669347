"""Draw depth.png and lengths.png: loss by the number of layers, and gain from recurrence by length
of training. Print the numbers of the study in streams of 4,096 bytes: losses, best depths, gains.

    PYTHONPATH=. python results/cpu-intel-xeon/study_lm/lengths.py
"""

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
BYTES_PER_UPDATE = 10240
STUDY = 688 * BYTES_PER_UPDATE  # 7.05 MB

# Names of runs in the files of losses. Runs of seed 1, which chose the learning rates, and variants
# of the study, whose names end in brackets, do not match.
RUN = re.compile(r'transformer_(\w+)_L(\d+)_.*_s([234])( \((\d+) updates\))?')
LONG_RUN = re.compile(rf'(\d+)/([rn])(\d+)_s([{by_position.SEEDS}])')
# {kind of model, as the files of losses call it: (label, line style)}
KINDS = {'recurrent': ('recurrent', '-'), 'nonrecurrent': ('non-recurrent', '--')}
LETTERS = {'r': 'recurrent', 'n': 'nonrecurrent'}  # as by_position.json calls them


def read(path: Path) -> dict:
    return json.loads(path.read_text())


def empty_losses() -> dict:
    """Return an empty {(kind, bytes of training): {L: {seed: loss in nats per byte}}}."""
    return defaultdict(lambda: defaultdict(dict))


def one_speech() -> dict:
    """Return the losses on one speech, 65,536 bytes in streams of 512."""
    losses = empty_losses()
    for path in (XEON / 'losses.json', EPYC / '7M/losses.json', EPYC / '14M.json'):
        for name, by_bytes in read(path).items():
            if run := RUN.fullmatch(name):
                length = max(map(int, by_bytes))
                losses[run[1], length][int(run[2])][run[3]] = by_bytes[str(length)]
    return losses


def twelve_speeches() -> dict:
    """Return the losses on twelve speeches, 524,288 bytes in streams of 512."""
    losses = empty_losses()
    for name, loss in read(XEON / 'twelve_speeches.json').items():
        if run := RUN.fullmatch(name):
            losses[run[1], int(run[5]) * BYTES_PER_UPDATE][int(run[2])][run[3]] = loss
    for name, by_seed in read(EPYC / '7M/twelve_speeches.json').items():
        kind, L = name.split(' L = ')
        losses[kind, STUDY][int(L)] = by_seed
    return losses


def long_streams() -> dict:
    """Return the losses on twelve speeches, 524,288 bytes in streams of 4,096."""
    losses = empty_losses()
    for name, by_end in read(by_position.FILE).items():
        if run := LONG_RUN.fullmatch(name):
            loss = by_position.mean_loss(by_end, 0, by_position.ENDS[-1])
            length = int(run[1]) * BYTES_PER_UPDATE
            losses[LETTERS[run[2]], length][int(run[3])][run[4]] = loss
    return losses


def with_shared_residual(losses: dict) -> dict:
    """Return the losses of 7.05 MB in which the non-recurrent models of several experts have one
    residual per layer instead of one per expert."""
    nonrecurrent = {16: losses['nonrecurrent', STUDY][16]}  # one expert: both rules are the same
    for name, by_end in read(by_position.FILE).items():
        if run := re.fullmatch(rf'{by_position.SHARED}/n(\d+)_s(\d)', name):
            loss = by_position.mean_loss(by_end, 0, by_position.ENDS[-1])
            nonrecurrent.setdefault(int(run[1]), {})[run[2]] = loss
    return {**losses, ('nonrecurrent', STUDY): nonrecurrent}


def difference(a: dict, b: dict) -> tuple[float, float, int]:
    """Return mean, standard error and number of seeds of a - b, paired by seed."""
    differences = [a[seed] - b[seed] for seed in sorted(a.keys() & b.keys())]
    return figures.with_standard_errors({0: figures.summarize(differences)})[0]


def print_numbers(losses: dict, length: int) -> None:
    """Print losses and best depths, as `sweep.py --table` does, then the difference between 2 and 8
    layers and the gain from recurrence."""
    runs = []
    for kind in KINDS:
        for L, by_seed in sorted(losses[kind, length].items()):
            row = figures.Row('transformer', kind == 'recurrent', 'small', L, 16 // L, 48)
            runs += [(row._replace(seed=seed), [{'val_loss': x}]) for seed, x in by_seed.items()]
    points = figures.with_standard_errors(figures.summarize_cells(runs))
    for row, (value, error, n) in points.items():
        print(f'{row.variant}, L = {row.L}: {value:.4f} +- {error:.4f}, {n} seeds')
    print(sweep.best_depths(runs))

    recurrent, non_recurrent = losses['recurrent', length], losses['nonrecurrent', length]
    for (label, _), by_layers in zip(KINDS.values(), (recurrent, non_recurrent), strict=True):
        value, error, _ = difference(by_layers[2], by_layers[8])
        print(f'{label}, L = 2 - L = 8: {value:.4f} +- {error:.4f}')
    for L in sorted(recurrent.keys() & non_recurrent.keys()):
        value, error, _ = difference(non_recurrent[L], recurrent[L])
        print(f'L = {L}, gain from recurrence: {value:.4f} +- {error:.4f}')


def best(by_layers: dict) -> dict:
    """Return {seed: loss} of the best L: the lowest mean among those with the most seeds."""
    most = max(map(len, by_layers.values()))
    complete = [by_seed for by_seed in by_layers.values() if len(by_seed) == most]
    return min(complete, key=lambda by_seed: mean(by_seed.values()))


def gains(losses: dict) -> dict:
    """Return {MB of training: gain from recurrence}, each variant at its best depth."""
    lengths = sorted({length for _, length in losses})
    return {
        length / 1e6: difference(
            best(losses['nonrecurrent', length]), best(losses['recurrent', length])
        )
        for length in lengths
    }


def long_stream_gains() -> dict:
    """Return {label: {MB of training: gain}} in streams of 4,096 bytes and in their first 512."""
    runs = read(by_position.FILE)
    return {
        f'speeches, in streams of {end:,} bytes': {
            updates * BYTES_PER_UPDATE / 1e6: by_position.gain(runs, updates, 0, end)
            for updates in by_position.SPEECHES
        }
        for end in (4096, 512)
    }


def draw_layers(axes, losses: dict, lengths: list[int]) -> None:
    """Draw loss by L, with a color for each length; lines of non-recurrent models are dashed."""
    for i, length in enumerate(lengths):
        for kind, (label, style) in KINDS.items():
            points = {L: figures.summarize([*x.values()]) for L, x in losses[kind, length].items()}
            label = f'{label}, {length / 1e6:.3g} MB'
            figures.draw_line(axes, figures.with_standard_errors(points), i, label, ls=style)
    axes.set(xscale='log', xlabel='layers L', ylabel='validation loss, nats/byte')
    axes.set_xticks([1, 2, 4, 8, 16], ['1', '2', '4', '8', '16'])
    axes.minorticks_off()


def draw_gains(axes, lines: dict) -> None:
    """Draw and print {label: {MB of training: (mean, standard error, number of seeds)}}."""
    for i, (label, points) in enumerate(lines.items(), 5):  # colors that draw_layers does not use
        figures.draw_line(axes, points, i, label)
        for size, (value, error, n) in points.items():
            print(f'{label}, {size:5.2f} MB: {value:.4f} +- {error:.4f}, {n} seeds')
    axes.set(xscale='log', xlabel='MB trained on', ylabel=by_position.GAIN, ylim=(0, 0.08))
    axes.set_xticks([*points], [f'{x:.3g}' for x in points])
    axes.minorticks_off()


def main() -> None:
    one, twelve, long = one_speech(), twelve_speeches(), long_streams()
    print_numbers(long, STUDY)
    print('\nWith one residual per layer in the non-recurrent models:')
    print_numbers(with_shared_residual(long), STUDY)

    figure, (left, right) = figures.new_figure(2, 3.2, sharey=False)
    draw_layers(left, long, [STUDY])
    draw_gains(right, long_stream_gains())
    title = 'Loss by layers (streams of 4,096 bytes) and gain from recurrence; equal FLOPs'
    figures.finish_figure(figure, title, figures.STANDARD_ERROR)
    print(*figures.save_figure(figure, str(XEON), 'depth', ('png',)))

    figure, (left, right) = figures.new_figure(2, 3.4, sharey=False)
    draw_layers(left, one, sorted({length for _, length in one}))
    lines = {'one speech': gains(one), 'twelve speeches': gains(twelve)}
    draw_gains(right, lines)
    title = 'Loss by layers on one speech, and gain from recurrence'
    figures.finish_figure(figure, title, figures.STANDARD_ERROR)
    print(*figures.save_figure(figure, str(XEON), 'lengths', ('png',)))


if __name__ == '__main__':
    main()

"""Measure evaluation loss by position in a stream, and draw the gain from recurrence by position.

Each run on the command line is evaluated on 524,288 bytes in 128 streams of 4,096, which start with
a reset state. It gets one line in by_position.json, {run: {end of a span of positions: mean loss in
nats per byte}}. The figure, by_position.png, is drawn from that file, also without any run.

    PYTHONPATH=. python results/cpu-intel-xeon/study_lm/by_position.py out/study/lm-small/*_s[234]

The name of a run in the file, such as 688/r4_s3, has the number of updates, r for recurrent or n
for non-recurrent, the number of layers and the seed. For runs on other text and runs with resets,
the name of the folder that holds the run replaces the number of updates.
"""

import json
import sys
from pathlib import Path

import torch

import figures
import sample
from configurator import read_json, write_text
from data_fineweb import VOCAB, find_shards, load_val
from kernels import bf16_is_fast

FILE = Path(__file__).with_name('by_position.json')
SEEDS = '23456'  # seed 1, which chose the learning rates, is not reported
ENDS = [16, 32, 64, 128, 256, 512, 1024, 2048, 4096]
SPANS = list(zip([0, *ENDS[:-1]], ENDS, strict=True))  # positions start..end - 1
STREAMS = 128
CHUNK = 16  # tokens per forward pass; divides every span
GAIN = 'gain from recurrence, nats/byte'  # label of an axis, see `gain`

# {group of runs in the file: label in the figure}. An update has 10,240 bytes.
SPEECHES = {168: '1.72 MB', 344: '3.52 MB', 688: '7.05 MB', 1376: '14.1 MB'}
OTHER_TEXT = {'web688': '7.05 MB of other text'}
# compared with the non-recurrent runs of 688 updates, which have no state to reset
RESET = {'reset': '7.05 MB, --reset_every=32'}
SHARED = 'shared'  # non-recurrent, 7.05 MB, one residual per layer instead of one per expert
FOLDERS = [*OTHER_TEXT, *RESET, 'reset8', SHARED]  # groups that are named after a folder


@torch.no_grad()
def evaluate(folder: str) -> tuple[str, dict[str, float]]:
    """Return the name of the run in a folder and its mean losses, {end of a span: loss}."""
    model, config = sample.load_trained(folder, 'last'), read_json(Path(folder, 'config.json'))
    group = Path(folder).absolute().parent.name
    if group not in FOLDERS:
        group = config['max_iters']
    kind = 'r' if model.recurrent else 'n'
    name = f'{group}/{kind}{config["n_layer"]}_s{config["seed"]}'

    shards = find_shards(config['data_dir'], 'val', config['tokenizer'])
    inputs, targets = load_val(shards, STREAMS * ENDS[-1], STREAMS, VOCAB[config['tokenizer']])
    chunks = zip(inputs.split(CHUNK, 1), targets.split(CHUNK, 1), strict=True)
    losses = torch.zeros(ENDS[-1] // CHUNK, dtype=torch.float64)
    with torch.autocast('cpu', torch.bfloat16, enabled=bf16_is_fast('cpu')):
        state = model.init_state(STREAMS)
        for i, (x, y) in enumerate(chunks):
            loss, state = model(x, y, state)
            losses[i] = loss.cross_entropy
    by_end = {
        str(end): round(losses[start // CHUNK : end // CHUNK].mean().item(), 4)
        for start, end in SPANS
    }
    return name, by_end


def save(runs: dict) -> None:
    """Write all runs into FILE, one per line, sorted by name."""
    lines = [f' {json.dumps(name)}: {json.dumps(runs[name])}' for name in sorted(runs)]
    write_text('{\n' + ',\n'.join(lines) + '\n}\n', FILE)


def mean_loss(by_end: dict[str, float], start: int, end: int) -> float:
    """Return the mean loss over the positions from start to end - 1, which must be whole spans."""
    spans = [(b - a, by_end[str(b)]) for a, b in SPANS if start <= a and b <= end]
    return sum(n * loss for n, loss in spans) / sum(n for n, _ in spans)


def gain(runs: dict, group: int | str, start: int, end: int) -> tuple[float, float, int]:
    """Return the gain from recurrence over the positions from start to end - 1, with standard error
    and number of seeds: the loss of the non-recurrent L = 8 minus that of the recurrent L = 4."""
    baseline = 688 if group in RESET else group
    differences = [
        mean_loss(runs[f'{baseline}/n8_s{seed}'], start, end)
        - mean_loss(runs[f'{group}/r4_s{seed}'], start, end)
        for seed in SEEDS
        if f'{baseline}/n8_s{seed}' in runs and f'{group}/r4_s{seed}' in runs
    ]
    return figures.with_standard_errors({0: figures.summarize(differences)})[0]


def draw(runs: dict) -> None:
    """Draw the gain by position, on the left for all spans, on the right without the first span."""
    figure, panels = figures.new_figure(2, 3.2, sharey=False)
    for axes, spans in zip(panels, (SPANS, SPANS[1:]), strict=True):
        for i, (group, label) in enumerate((SPEECHES | OTHER_TEXT | RESET).items()):
            points = {end: gain(runs, group, start, end) for start, end in spans}
            figures.draw_line(axes, points, i, label)
        axes.set(xscale='log', xlabel='bytes of a stream, up to', ylabel=GAIN)
        ends = [end for _, end in spans]
        axes.set_xticks(ends, [end if end < 1024 else f'{end // 1024}k' for end in ends])
        axes.minorticks_off()
    title = 'Gain from recurrence by position (non-recurrent L = 8, recurrent L = 4)'
    figures.finish_figure(figure, title, figures.STANDARD_ERROR)
    print(*figures.save_figure(figure, str(FILE.parent), 'by_position', ('png',)))


def main() -> None:
    runs = json.loads(FILE.read_text()) if FILE.exists() else {}
    for folder in sys.argv[1:]:
        name, by_end = evaluate(folder)
        runs[name] = by_end
        save(runs)
    draw(runs)


if __name__ == '__main__':
    main()

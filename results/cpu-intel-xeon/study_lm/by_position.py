"""Held-out loss by position: 524,288 bytes in 128 streams of 4,096, each begun with an empty state.
Adds a line a run to by_position.json, {run: {end: nats a byte since the end before}}, and draws
by_position.png. A run's name there is 688/r4_s3: updates, recurrent or not, levels, seed; runs on
other text, and others that are not the study's, are named by the folder that they are in.
PYTHONPATH=. python results/cpu-intel-xeon/study_lm/by_position.py out/study/lm-small/*_s[234]"""

import json
import sys
from pathlib import Path

import torch

import figures
import sample
from configurator import write_text
from data_fineweb import VOCAB, find_shards, load_val

FILE = Path(__file__).with_name('by_position.json')
SEEDS = '23456'  # reported; seed 1 chose the rates
ENDS = [16, 32, 64, 128, 256, 512, 1024, 2048, 4096]
SPANS = list(zip([0, *ENDS[:-1]], ENDS, strict=True))
CHUNK = 16
WORTH = 'twin - recurrent, nats'  # each kind's best: here L = 8 and L = 4
# folders: by the number of updates, of 10,240 bytes each
SPEECHES = {168: '1.72 MB', 344: '3.52 MB', 688: '7.05 MB', 1376: '14.1 MB'}
OTHER = {'web688': '7.05 MB of other text'}
RESET = {'reset': '7.05 MB, --reset_every=32'}  # the twin is 688's
NAMED = [*OTHER, *RESET, 'reset8']


@torch.no_grad()
def by_position(folder: str) -> tuple[str, dict[str, float]]:
    """-> the run's name, its losses"""
    model, saved = sample.load_trained(folder, 'last')
    settings, group = saved['config'], Path(folder).absolute().parent.name
    group = group if group in NAMED else settings['max_iters']
    kind = 'r' if saved['recurrent'] else 'n'
    name = f'{group}/{kind}{settings["n_layer"]}_s{settings["seed"]}'
    shards = find_shards(settings['data_dir'], 'val', settings['tokenizer'])
    x, y = load_val(shards, 128 * ENDS[-1], 128, VOCAB[settings['tokenizer']])
    total = torch.zeros(ENDS[-1] // CHUNK, dtype=torch.float64)
    with torch.autocast('cpu', torch.bfloat16):
        state = model.init_state(len(x))
        for i, (x_t, y_t) in enumerate(zip(x.split(CHUNK, 1), y.split(CHUNK, 1), strict=True)):
            total[i], state = model(x_t, y_t, state)
    means = {str(b): total[a // CHUNK : b // CHUNK].mean().item() for a, b in SPANS}
    return name, {end: round(mean, 4) for end, mean in means.items()}


def save(known: dict) -> None:
    lines = [f' {json.dumps(run)}: {json.dumps(known[run])}' for run in sorted(known)]
    write_text('{\n' + ',\n'.join(lines) + '\n}\n', FILE)


def between(by_end: dict[str, float], first: int, last: int) -> float:
    """Mean over the positions first..last - 1."""
    part = [(b - a, by_end[str(b)]) for a, b in SPANS if first <= a and b <= last]
    return sum(n * loss for n, loss in part) / sum(n for n, _ in part)


def gap(known: dict, group: int | str, first: int, last: int) -> tuple:
    """(mean, standard error, seeds) of twin - recurrent, paired by seed."""
    twins = 688 if group in RESET else group
    pairs = [(f'{twins}/n8_s{seed}', f'{group}/r4_s{seed}') for seed in SEEDS]
    both = [(known[twin], known[ours]) for twin, ours in pairs if twin in known and ours in known]
    values = [between(twin, first, last) - between(ours, first, last) for twin, ours in both]
    return figures.with_errors({0: figures.summary(values)})[0]


def draw(known: dict) -> None:
    """Left all of a stream, right all but its first bytes, by a finer scale."""
    figure, panels = figures.new(2, 3.2, sharey=False)
    for axes, spans in zip(panels, (SPANS, SPANS[1:]), strict=True):
        for i, (group, label) in enumerate((SPEECHES | OTHER | RESET).items()):
            points = {last: gap(known, group, first, last) for first, last in spans}
            figures.line(axes, points, i, label)
        axes.set(xscale='log', xlabel='bytes of a stream, up to', ylabel=WORTH)
        ends = [last for _, last in spans]
        axes.set_xticks(ends, [end if end < 1024 else f'{end // 1024}k' for end in ends])
        axes.minorticks_off()
    title = 'What recurrence is worth (L = 8 without, L = 4 with), by position'
    figures.finish(figure, title, figures.STANDARD_ERROR)
    print(*figures.save(figure, str(FILE.parent), 'by_position', ('png',)))


if __name__ == '__main__':
    known = json.loads(FILE.read_text()) if FILE.exists() else {}
    for folder in sys.argv[1:]:
        name, losses = by_position(folder)
        known[name] = losses
        save(known)
    draw(known)

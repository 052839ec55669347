"""Figures: panels of lines or of bars, with errors. Two of them are pictures of one run, which the
trainers draw at their end: loss.png and curve.png."""

import math
import os
import pathlib
import re
import sys
import textwrap

if not hasattr(sys, 'ps1'):  # else this is a notebook, which shows figures in its own way
    os.environ['MPLBACKEND'] = 'agg'  # the backend of another environment would stop the import

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pandas import DataFrame, Series
from pandas.api.types import is_integer_dtype, is_numeric_dtype

from support.files import Path, write_atomic
from support.run_folder import log_of

BARS = {'sem': 'one standard error', 'std': 'one standard deviation'}
# Okabe and Ito's colors, which color-blind readers can tell apart, and markers.
COLORS = ('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9', '#000000')
MARKERS = 'osD^vPX'
HATCHES = ('', '///', 'xxx', '...')  # of bars, once all colors are in use
PER_INCH = 13  # characters
MANY = 50  # points of a line, which has no markers then, and a band of errors


def plain(text: object, inches: float = 10) -> str:
    """Return a text in lines of at most this length. It holds no formula, which two dollar signs in
    the name of a folder would enclose."""
    text = str(text).encode(errors='backslashreplace').decode()  # a folder's name may be no UTF-8
    return textwrap.fill(text, int(inches * PER_INCH)).replace('$', r'\$')


@matplotlib.rc_context({'font.size': 8})
def chart(
    points: DataFrame | list[dict],
    x: str,
    y: str,
    labels: tuple[str, str],
    title: str,
    bars: str = '',
    to_scale: bool = False,
    sharey: bool = True,
    reference: str = '',
) -> Figure:
    """Return a figure of points: a panel for each value of their column `panel`, in it a line for
    each value of `line`, y over x. Where x is a name, there are bars in place of lines, in the
    order in which the names first appear; lines are in the order of their sizes, as in 'L = 2'.

    Further columns are optional: `style` of the line; `color`, equal for lines of one color
    (default: `line`); `n`, the number of seeds: the usual one stands in the title, any other one
    beside its point, or beside the last point of a line with this number everywhere.

    labels: of the axes. bars: the column with the errors, one of BARS. to_scale: if not, the values
    of x are drawn at equal distances. reference: a line that is no model's, drawn thin and gray and
    named last."""
    points = DataFrame(points).reset_index(drop=True)
    for column, default in {'style': '-', 'color': points['line'], 'n': math.nan}.items():
        points = points if column in points else points.assign(**{column: default})
    has_names = not is_numeric_dtype(points[x])
    values = list(points[x].unique()) if has_names else sorted(points[x].unique())
    points['at'] = points[x] if to_scale else points[x].map(values.index)
    points['error'] = points[bars] if bars else math.nan
    base = base_of(points[y], points['error'].fillna(0)) if has_names else 0
    looks = points.drop_duplicates('line').set_index('line')['color']
    numbers = {line: re.findall(r'= (\d+\.?\d*)', line) for line in looks.index}
    lines = sorted(numbers, key=lambda line: [float(x) for x in numbers[line]])
    lines.sort(key=lambda line: line == reference)
    colors = list(looks[lines].unique())
    panels, usual = points.groupby('panel', sort=False), points['n'].mode().max()

    figure, grid, columns = empty_panels(len(panels), lines, sharey)
    handles = {}
    for axes, (panel, part) in zip(grid, panels, strict=True):
        for line, one in part.groupby('line', sort=False):
            k = colors.index(one['color'].iloc[0])
            look = {'color': COLORS[k % len(COLORS)], 'ls': one['style'].iloc[0]}
            if has_names:
                one = one.assign(
                    at=one['at'] + 0.8 * ((lines.index(line) + 0.5) / len(lines) - 0.5)
                )
                size = {'width': 0.8 / len(lines), 'bottom': base}
                hatch = HATCHES[k // len(COLORS) % len(HATCHES)]
                size |= {'hatch': hatch, 'edgecolor': 'white', 'lw': 0}
                handles[line] = axes.bar(one['at'], one[y] - base, color=look['color'], **size)
                look = {'color': 'black', 'ls': 'none'}
            elif line == reference:
                look |= {'color': 'gray', 'lw': 1}
            elif len(one) < MANY:
                look |= {'marker': MARKERS[(k + k // len(COLORS)) % len(MARKERS)], 'ms': 4}
            one = one.sort_values('at')
            errors = {'yerr': one['error'], 'capsize': 2} if one['error'].notna().any() else {}
            if errors and len(one) >= MANY:
                edges = one[y] - one['error'], one[y] + one['error']
                axes.fill_between(one['at'], *edges, color=look['color'], alpha=0.2, lw=0)
                errors = {}
            drawn = axes.errorbar(one['at'], one[y], label=plain(line), **errors, **look)
            handles.setdefault(line, drawn)
            note_seeds(axes, one[['at', y, 'n']], usual, to_scale)
        cut = ' (axis cut)' if base else ''
        axes.set(title=plain(panel, 4), xlabel=labels[0], ylabel=labels[1] + cut)
        if not to_scale:
            axes.set_xticks(range(len(values)), map(plain, values))
        elif is_integer_dtype(points[x]):
            axes.xaxis.get_major_locator().set_params(integer=True)
    names = [plain(line, figure.get_figwidth() - 1) for line in lines]
    shown = [handles[line] for line in lines]
    figure.legend(shown, names, loc='outside lower center', ncols=columns, handlelength=3)
    if bars and points[bars].notna().any():
        title += f'; ± {BARS[bars]}'
    if not math.isnan(usual):
        title += f'; {seeds(usual)} each' + (' unless noted' if points['n'].nunique() > 1 else '')
    figure.suptitle(plain(title, figure.get_figwidth()))
    return figure


def seeds(n: float) -> str:
    """Return '1 seed' or '4 seeds'."""
    return '1 seed' if n == 1 else f'{n:.0f} seeds'


def empty_panels(n: int, lines: list[str], sharey: bool) -> tuple[Figure, list[Axes], int]:
    """Return a figure with n empty panels, at most four side by side, and room for a legend below
    them; the panels; and the number of columns of the legend."""
    rows = math.ceil(n / 4)
    across = math.ceil(n / rows)
    width = 4 * max(across, 1.5)
    columns = max(1, int(16 * width / (max(map(len, lines)) + 8)))  # 16 characters per inch
    lengths = sum(1 + plain(line, width - 1).count('\n') for line in lines)
    height = 4 * rows + 0.16 * math.ceil(lengths / columns)
    figure = Figure(figsize=(width, height), layout='constrained')
    grid = list(figure.subplots(rows, across, squeeze=False, sharey=sharey).flat)
    for axes in grid[n:]:
        axes.remove()
    return figure, grid[:n], columns


def base_of(values: Series, errors: Series) -> float:
    """Return where bars start: at 0, or, if that is far from all values, a little below them."""
    low, high = (values - errors).min(), (values + errors).max()
    base = low - (high - low) / 2
    return 0 if base <= 0 <= high or low == high else base


def note_seeds(axes: Axes, one: DataFrame, usual: float, to_scale: bool) -> None:
    """Note the number of seeds of the points of a line (at, y, n) beside those in which it is not
    the usual one; beside the last of them if the line has many points, or one number."""
    unusual = one[one['n'].notna() & (one['n'] != usual)]
    if to_scale or one['n'].nunique() == 1:
        unusual = unusual[-1:]
    for at, height, n in unusual.itertuples(index=False):
        place = {'xytext': (0, 6), 'textcoords': 'offset points', 'ha': 'center', 'size': 6}
        axes.annotate(seeds(n), (at, height), **place)


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure completely or not at all, in the format that its name ends with, and print its
    path."""
    suffix = pathlib.Path(path).suffix[1:]
    write_atomic(path, lambda file: figure.savefig(file, format=suffix, dpi=150))
    print(path)


# ---- one run ----


def draw_run(folder: Path, name: str, x: str, curves: dict, labels: tuple[str, str]) -> None:
    """Draw entries of a run's log over x in millions. curves: {entry: (panel, line, style)}."""
    log = log_of(folder)
    if log:  # what a random policy does is in the first record only
        log[-1] |= {key: value for key, value in log[0].items() if key.startswith('random_')}
    points = [
        {'panel': panel, 'line': line, 'style': style, 'x': record[x] / 1e6, 'y': record[key]}
        for key, (panel, line, style) in curves.items()
        for record in log
        if record.get(x) is not None and record.get(key) is not None
    ]
    figure = chart(points, 'x', 'y', labels, str(folder), to_scale=True, sharey=False)
    save_figure(figure, pathlib.Path(folder, name))


def plot_losses(folder: Path) -> None:
    """Draw the losses of a language model as folder/loss.png."""
    curves = {'train_loss': ('', 'training', '-'), 'val_loss': ('', 'validation', '-')}
    labels = 'training tokens (millions)', 'loss (nats per token)'
    draw_run(folder, 'loss.png', 'tokens', curves, labels)


def plot_returns(folder: Path) -> None:
    """Draw the returns and the solve rates of an agent as folder/curve.png."""
    curves = {}
    for key, panel in {'return': 'mean episodic return', 'solve_rate': 'levels solved'}.items():
        curves |= {
            f'{key}_1000': (panel, 'training, last 1,000 episodes', '-'),
            f'eval_{key}': (panel, 'evaluation levels, greedy', '-'),
            f'random_{key}': (panel, 'evaluation levels, random policy', '--'),
        }
    draw_run(folder, 'curve.png', 'env_steps', curves, ('environment steps (millions)', ''))

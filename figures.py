"""
Figures and tables of a sweep, from its runs' logs alone, for sweep.py: runs are a list of (Row,
log), a log being the objects of log.jsonl. A single run's curves, for the trainers; trackers; and,
as a script, one self-contained page of a run or of a sweep:

$ python figures.py --report=out/demo                     # writes out/demo/report.html

The value of a language model's run is its last validation loss (nats a token), less is better; that
of a Sokoban run the mean of its final five logged episodic returns, more is better. Bars are one
standard deviation over seeds, or one standard error where the figure says so.
Colours are Okabe and Ito's, which colour-blind readers can tell apart; lines differ in markers too.
"""

import base64
import csv
import html
import io
import json
import math
import os
import statistics
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterable
from functools import partial
from operator import attrgetter as by
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

# before torch: how threads wait
from configurator import Mistake, configure, fail, first_line, read_json, run_script
from configurator import write_atomic, write_text

from common import need_packages

report = ''  # folder of a run or a sweep: its page is written into it

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9', '#000000')
MARKERS = 'osD^vPX'
NAMES = {'transformer': 'Transformer', 'convlstm': 'ConvLSTM', 'convglu': 'ConvGLU'}
NUMBERS = 'seconds tokens env_steps val_loss episodic_return return_1000'.split()  # read of a log
SIZES = {'L': 'levels L', 'E': 'experts E a level'}
SETTINGS = {'radius': 'radius r: preceding experts that each one hears'}
STANDARD_ERROR, DEVIATION = '\nbars: one standard error', '\nbars: one standard deviation'


class Row(NamedTuple):
    """A run of a plan."""

    model: str  # 'transformer', 'convlstm' or 'convglu'
    recurrent: bool
    budget: str  # 'small', ...
    L: int
    E: int
    d: int
    more: tuple[tuple[str, object], ...] = ()  # further settings: ((name, value), ...)
    seed: int = 1

    @property
    def is_text(self) -> bool:
        return self.model == 'transformer'

    @property
    def script(self) -> str:
        return 'train_lm.py' if self.is_text else 'train_sokoban.py'

    @property
    def variant(self) -> str:
        """As the paper's tables call it."""
        return 'recurrent' if self.recurrent else 'feedforward'

    @property
    def name(self) -> str:
        more = ''.join(f'_{k}-{v}' for k, v in self.more)
        return f'{self.model}_{self.variant}_L{self.L}_E{self.E}_d{self.d}{more}_s{self.seed}'

    @property
    def cell(self) -> 'Row':
        """What its seeds have in common."""
        return self._replace(seed=0)


def read_log(folder: str) -> list[dict]:
    """The objects of folder/log.jsonl, but a last line being written. OSError, Mistake."""
    path, records = Path(folder, 'log.jsonl'), []
    for number, line in enumerate(path.read_bytes().split(b'\n')[:-1], 1):
        try:
            record = json.loads(line)
            if type(record['step']) is not int:
                raise ValueError('step is no integer')
            if not all(x is None or math.isfinite(x) for x in map(record.get, NUMBERS)):
                raise ValueError('a number is not finite')
        except (ValueError, TypeError, LookupError, OverflowError, RecursionError) as error:
            raise Mistake(f'{path}:{number}: not a line of a log ({first_line(error)})') from None
        records.append(record)
    return records


# ----------------------------------------------------------------------------- values


def value(log: list[dict]) -> float | None:
    """What a finished run is judged by; None where the log does not have it."""
    returns = [r['episodic_return'] for r in log if r.get('episodic_return') is not None]
    return statistics.fmean(returns[-5:]) if returns else log[-1].get('val_loss')


def summary(values: list[float]) -> tuple[float, float, int]:
    """Mean, standard deviation (N - 1; NaN for one), N."""
    deviation = statistics.stdev(values) if len(values) > 1 else math.nan
    return statistics.fmean(values), deviation, len(values)


def groups(points: dict, key: Callable) -> dict:
    """{row: x} -> {key(row): {row: x}}, in their order."""
    out = {}
    for row, x in points.items():
        out.setdefault(key(row), {})[row] = x
    return out


def cells(runs: list) -> dict:
    """{row.cell: (mean, standard deviation, N)} of runs that all have a value, in their order."""
    values = {}
    for row, log in runs:
        values.setdefault(row.cell, []).append(value(log))
    return {row: summary(x) for row, x in values.items()}


def best(points: dict) -> Row:
    """The cell with the best mean, of those with the most seeds: one lucky seed is no best."""
    most = max(n for _, _, n in points.values())
    whole = [row for row, (_, _, n) in points.items() if n == most]
    return min(whole, key=lambda row: points[row][0] * (1 if row.is_text else -1))


def without(row: Row, name: str) -> Row:
    """The row but for its own setting `name`."""
    return row._replace(more=tuple((k, v) for k, v in row.more if k != name))


def at_best(runs: list, name: str) -> list:
    """The runs of the cells that are best among those which differ in the setting `name` alone."""
    keep = [best(part) for part in groups(cells(runs), partial(without, name=name)).values()]
    return [(row, log) for cell in keep for row, log in runs if row.cell == cell]


def saturation(points: dict) -> dict:
    """{L: the best cell's (mean, standard error, N) with at most L levels}"""
    depths = sorted({row.L for row in points})
    upto = {L: {row: p for row, p in points.items() if row.L <= L} for L in depths}
    return with_errors({L: points[best(part)] for L, part in upto.items()})


def with_errors(points: dict) -> dict:
    """{x: (mean, deviation, N)} -> {x: (mean, standard error, N)}"""
    return {x: (mean, deviation / math.sqrt(n), n) for x, (mean, deviation, n) in points.items()}


def differences(points: dict, default: object) -> dict:
    """{x: (mean, deviation, N)} -> {x: (mean minus that of `default`, standard error of the
    difference, N)}; seeds count as independent."""
    means = with_errors(points)
    base, base_error, N = means[default]
    out = {x: (mean - base, math.hypot(e, base_error), n) for x, (mean, e, n) in means.items()}
    return out | {default: (0.0, math.nan, N)}


def read_csv(path: str | os.PathLike) -> list[dict]:
    with open(path, newline='', encoding='utf-8') as file:
        return list(csv.DictReader(file))


def paper_cells(reference: str, points: Iterable[Row]) -> dict:
    """The paper's returns, as cells() has ours, of our cells' variants and budgets; {} where the
    paper has none."""
    ours, out = {row[:3] for row in points if not row.more}, {}
    for r in read_csv(os.path.join(reference, 'sokoban_returns.csv')) if reference else ():
        sizes = (int(r[k]) for k in 'LEd')
        row = Row('convlstm', r['variant'] == 'recurrent', r['budget'], *sizes, seed=0)
        if row[:3] in ours:
            out[row] = float(r['mean_return']), math.sqrt(float(r['variance'])), int(r['n_seeds'])
    return out


# ----------------------------------------------------------------------------- figures


def new(columns: int, height: float = 2.8, sharey: bool = True) -> tuple:
    """A row of panels with one y axis, unless sharey is off, a column's width each."""
    import matplotlib

    matplotlib.use('Agg')
    import matplotlib.pyplot as plt

    plt.rc('font', size=8)
    plt.rc('axes', titlesize=8, grid=True, axisbelow=True)
    plt.rc('grid', alpha=0.3)
    plt.rc('legend', fontsize=7, frameon=False)
    plt.rc('figure', titlesize=9)
    plt.rc('svg', hashsalt='figures', fonttype='none')  # the same runs, the same file
    size = 3.4 * columns, height  # inches: a column of a paper
    layout = {'figsize': size, 'layout': 'constrained', 'sharey': sharey, 'squeeze': False}
    figure, panels = plt.subplots(1, columns, **layout)
    return figure, panels[0]


def finish(figure: 'Figure', title: str, note: str = '') -> 'Figure':
    """Title, and below the panels, nowhere over them, one legend for all."""
    lines, width = {}, figure.get_figwidth()
    for axes in figure.axes:
        handles, names = axes.get_legend_handles_labels()
        lines |= dict(zip(names, handles, strict=True))
    columns = min(len(lines), int(17 * width / (8 + max(map(len, lines), default=0)))) or 1
    figure.legend(lines.values(), lines, loc='outside lower center', ncols=columns)
    figure.suptitle(textwrap.fill(title, int(14 * width)) + note)
    return figure


def save(figure: 'Figure', into: str, name: str, forms: tuple = ('png', 'svg')) -> list[str]:
    """-> the paths."""
    import matplotlib.pyplot as plt

    paths = [os.path.join(into, f'{name}.{form}') for form in forms]
    for path, form in zip(paths, forms, strict=True):
        more = {'dpi': 200} if form == 'png' else {'metadata': {'Date': None}}
        write_atomic(path, partial(figure.savefig, format=form, **more))
    plt.close(figure)
    return paths


def line(axes: 'Axes', points: dict, i: int, label: str, ours: bool = True, **style) -> None:
    """{x: (mean, deviation, N)} with error bars; the paper's dashed and hollow."""
    xs, theirs = sorted(points), {'ls': '--', 'mfc': 'white', 'alpha': 0.7}
    look = {'color': COLORS[i % 7], 'marker': MARKERS[i % 7], 'ms': 4, 'lw': 1.2, 'capsize': 2}
    look |= {'markevery': max(1, len(xs) // 8), 'errorevery': max(1, len(xs) // 8)}
    means, bars = ([points[x][k] for x in xs] for k in (0, 1))
    known = not all(map(math.isnan, bars))
    style = look | ({} if ours else theirs) | style
    axes.errorbar(xs, means, yerr=bars if known else None, label=label, **style)


def chart(panels: dict, xlabel: str, ylabel: str, title: str, note: str = '') -> 'Figure':
    """{a panel's title: its lines, as (points, i, label, ours)} over powers of two."""
    figure, row = new(len(panels))
    for axes, (name, lines) in zip(row, panels.items(), strict=True):
        for its in lines:
            line(axes, *its)
        xs = sorted({x for points, *_ in lines for x in points})
        axes.set_xscale('log', base=2)
        axes.set_xticks(xs, map(str, xs))
        axes.minorticks_off()
        axes.set(title=name, xlabel=xlabel)
    row[0].set_ylabel(ylabel)
    return finish(figure, title, note)


def size_figure(points: dict, sizes: str, reference: str, title: str, label: str) -> 'Figure':
    """Value by the first of two `sizes`, a line a value of the second, a panel a variant."""
    x, name = sizes
    panels = {}
    for variant, mine in groups(points, by('variant')).items():
        paper, lines = paper_cells(reference, mine), []
        values = sorted({getattr(row, name) for row in (*points, *paper)})
        for data, whose in ((mine, ''), (paper, ', paper')):
            for size, part in groups(data, by(name)).items():
                its = {getattr(row, x): p for row, p in part.items()}
                lines.append((its, values.index(size), f'{name} = {size}{whose}', not whose))
        panels[variant] = lines
    return chart(panels, SIZES[x], label, title, DEVIATION)


def saturation_figure(points: dict, name: str, reference: str, title: str, label: str) -> 'Figure':
    """The best of at most L levels and the paper's: a line a 'variant', or a 'budget' in a panel a
    variant."""
    keys, panels = list(groups(points, by(name))), {}
    parts = groups(points, by('variant')) if name == 'budget' else {'': points}
    for which, mine in parts.items():
        panels[which] = lines = []
        for key, part in groups(mine, by(name)).items():
            i, its = keys.index(key), f'{key} budget' if name == 'budget' else key
            lines.append((saturation(part), i, its))
            if paper := paper_cells(reference, part):
                lines.append((saturation(paper), i, f'{its}, paper', False))
    return chart(panels, 'at most L levels', f'best {label}', title, STANDARD_ERROR)


def curve_figure(runs: list, points: dict, title: str, label: str, token: str) -> 'Figure':
    """Loss (of the last three quarters) or returns over data: each variant's and L's best
    allocation, mean and one deviation."""
    is_text, parts = next(iter(points)).is_text, groups(points, by('variant'))
    data, key = ('tokens', 'val_loss') if is_text else ('env_steps', 'return_1000')
    figure, panels = new(len(parts), 3.2)
    for axes, (variant, mine) in zip(panels, parts.items(), strict=True):
        for i, (_, part) in enumerate(sorted(groups(mine, by('L')).items())):
            row, logs = best(part), []
            for log in (log for run, log in runs if run.cell == row):
                pairs = [(r.get(data), r.get(key)) for r in log]
                logs.append({x / 1e6: y for x, y in pairs if x and y is not None})
            steps = set.intersection(*map(set, logs))  # that all seeds have logged
            if is_text:  # first losses would flatten all differences
                first = max(steps, default=0) / 4
                steps = {x for x in steps if x >= first}
            its = {x: summary([log[x] for log in logs]) for x in steps}
            line(axes, its, i, f'L = {row.L}, E = {row.E}, d = {row.d}')
        axes.set(title=variant, xlabel=f'{token if is_text else "environment step"}s (millions)')
        # its own, below: the other panel's allocations are others
        axes.legend(loc='upper center', bbox_to_anchor=(0.5, -0.22), ncols=2)
    panels[0].set_ylabel(label if is_text else 'return, mean of 1,000 games')
    figure.suptitle(title + DEVIATION)
    return figure


def ablation_figure(points: dict, ways: list, default: tuple, title: str, label: str) -> 'Figure':
    """The value by a setting, a line a cell, and beside it the difference to our default. ways: the
    setting's values, as Row.more has them."""
    figure, panels = new(2, 3.4, sharey=False)
    for i, (cell, part) in enumerate(groups(points, lambda row: row._replace(more=())).items()):
        shift = 0.06 * i  # or bars would cover each other
        mine = {ways.index(row.more) + shift: p for row, p in part.items()}
        name = f'{cell.variant}, L = {cell.L}, E = {cell.E}, d = {cell.d}'
        line(panels[0], with_errors(mine), i, name)
        if (x := ways.index(default) + shift) in mine:
            line(panels[1], differences(mine, x), i, name)
    setting, standard = default[0]
    for axes in panels:
        axes.set_xticks(range(len(ways)), [str(way[0][1]) for way in ways])
        axes.set_xlim(-0.5, len(ways) - 0.5)
        axes.set_xlabel(SETTINGS.get(setting, setting.replace('_', ' ')))
    panels[0].set_ylabel(label)
    panels[1].set_ylabel(f'{label.partition(" (")[0]} minus that of {standard}')
    panels[1].axhline(0, color='black', lw=0.6)
    return finish(figure, title, STANDARD_ERROR)


def draw(what: str, rows: list, runs: list, token: str, reference: str, into: str) -> list[str]:
    """All figures of a plan from its finished runs -> their paths. what: the plan's name, and after
    a comma what a title says of a shrunk one. token: a language model's step, 'token' or 'byte'."""
    plan, comma, scale = what.partition(',')
    paths = []
    for model, points in groups(cells(runs), by('model')).items():
        low, high = (f(n for _, _, n in points.values()) for f in (min, max))
        seeds = f'{low} seed{"s" * (low > 1)}' if low == high else f'{low} to {high} seeds'
        title = f'{NAMES[model]}, {plan.replace("-", " ")}{comma}{scale}, {seeds}'
        row = next(iter(points))
        label = f'validation loss (nats a {token})' if row.is_text else 'return'
        figures = {}
        if plan == 'sokoban':
            figures['budgets'] = saturation_figure(points, 'budget', reference, title, label)
        elif plan == 'scaling':
            figures['scaling'] = size_figure(points, 'EL', '', title, label)
        elif row.more:
            ways = list(dict.fromkeys(row.more for row in rows if row.model == model))
            default = ways[-1 if plan == 'communication' else 0]  # r = E - 1: all are heard
            figures['ablation'] = ablation_figure(points, ways, default, title, label)
        else:
            figures['allocations'] = size_figure(points, 'Ld', reference, title, label)
            figures['saturation'] = saturation_figure(points, 'variant', reference, title, label)
            figures['curves'] = curve_figure(runs, points, title, label, token)
        for name, figure in figures.items():
            paths += save(figure, into, f'{name}_{model}')
    return paths


# ----------------------------------------------------------------------------- tables


def field(x: object) -> str:
    """Five significant digits of a float; nothing for NaN and None."""
    if isinstance(x, float):
        return '' if math.isnan(x) else f'{x:.5g}'
    return '' if x is None else str(x)


def markdown(lines: list) -> str:
    """The first line's texts are the titles."""
    head, *rest = (f'| {" | ".join(line)} |\n' for line in lines)
    return ''.join([head, '| --- ' * len(lines[0]) + '|\n', *rest])


def write_table(rows: list[dict], into: str, name: str) -> list[str]:
    """As name.csv and name.md, the first row's keys as columns; what a row lacks stays empty."""
    lines = [list(rows[0]), *([field(row.get(k)) for k in rows[0]] for row in rows)]
    text = io.StringIO()
    csv.writer(text, lineterminator='\n').writerows(lines)
    paths = [os.path.join(into, f'{name}.{form}') for form in ('csv', 'md')]
    for path, content in zip(paths, (text.getvalue(), markdown(lines)), strict=True):
        write_text(content, path)
    return paths


def cell_fields(rows: Iterable[Row]) -> dict[Row, dict]:
    """What cell a table's line is of; the settings by which the cells differ have a column each."""
    names, out = dict.fromkeys(name for row in rows for name, _ in row.more), {}
    for row in rows:
        out[row] = {name: getattr(row, name) for name in ('variant', 'budget', 'L', 'E', 'd')}
        out[row] |= {name: str(dict(row.more).get(name, '')) for name in names}
    return out


def tables(runs: list, reference: str, into: str, tuned: str) -> list[str]:
    """Mean, variance (N - 1) and N of every cell, a table a model in the paper's layout; beside it
    the paper's own, whose rows have no setting `tuned`."""
    paths = []
    for model, points in groups(cells(runs), by('model')).items():
        body, paper = [], paper_cells(reference, [without(row, tuned) for row in points])
        for row, fields in cell_fields(points).items():
            mean, deviation, n = points[row]
            name = 'mean_loss' if row.is_text else 'mean_return'
            body.append({**fields, name: mean, 'variance': deviation**2, 'n_seeds': n})
            if paper:
                mean, deviation, _ = paper.get(without(row, tuned), (math.nan, math.nan, 0))
                body[-1] |= {'paper_mean': mean, 'paper_variance': deviation**2}
        paths += write_table(body, into, f'table_{model}')
    return paths


def solve_table(rates: dict, levels: str, reference: str, into: str, tuned: str) -> list[str]:
    """rates: {cell: [solve rate of each seed]} on `levels` ('': held-out ones), in the paper's
    layout; on unfiltered-test with the paper's own rows."""
    paths, reference = [], reference if levels else ''
    where = (levels or 'held_out').replace('-', '_')
    for model, rows in groups(rates, by('model')).items():
        body = []
        for row, fields in cell_fields(rows).items():
            mean, deviation, n = summary([100 * rate for rate in rates[row]])
            body.append({**fields, f'{where}_percent': mean, 'std': deviation, 'n_seeds': n})
        ours = {row[:3] for row in rows if not without(row, tuned).more}
        path = 'sokoban_solve_rates.csv'
        for r in read_csv(os.path.join(reference, path)) if reference else ():
            who = 'convlstm', r['variant'] == 'recurrent', r['budget']
            if who in ours or not r['budget']:  # or of others' agents
                body.append(r | {'variant': f'{r["variant"]}, paper'})
        paths += write_table(body, into, f'solve_{model}')
    return paths


# ----------------------------------------------------------------------------- one run


def curve(axes: 'Axes', log: list[dict], x: str, key: str, label: str, **style) -> None:
    """What a log has of `key`, over `x` in millions."""
    points = [(r[x] / 1e6, r[key]) for r in log if None not in (r.get(x), r.get(key))]
    if points:
        axes.plot(*zip(*points, strict=True), label=label, **style)


def run_figure(log: list[dict], title: str, unit: str = '') -> 'Figure':
    """A language model's losses over its `unit`s; an agent's return and solve rate over steps."""
    from matplotlib.ticker import PercentFormatter

    trained, evaluated = {'color': COLORS[0], 'lw': 1}, {'color': COLORS[1], 'marker': 'o', 'ms': 4}
    figure, panels = new(1 if unit else 2, 3.2, sharey=False)
    if unit:
        curve(panels[0], log, 'tokens', 'train_loss', 'train loss', alpha=0.6, **trained)
        curve(panels[0], log, 'tokens', 'val_loss', 'validation loss', **evaluated)
        panels[0].set(xlabel=f'training {unit}s (millions)', ylabel=f'loss (nats a {unit})')
        return finish(figure, title)
    labels = {'return': 'mean episodic return', 'solve_rate': 'levels solved'}
    for axes, (key, label) in zip(panels, labels.items(), strict=True):
        curve(axes, log, 'env_steps', f'{key}_1000', 'training, last 1,000 games', **trained)
        curve(axes, log, 'env_steps', f'eval_{key}', 'held-out levels, greedy', **evaluated)
        if (level := log[0].get(f'random_{key}')) is not None:  # of a log from the start
            axes.axhline(level, color='gray', ls='--', lw=1, label='held-out levels, random')
        axes.set(xlabel='environment steps (millions)', ylabel=label)
    panels[1].yaxis.set_major_formatter(PercentFormatter(1))
    return finish(figure, title)


def plot_losses(out_dir: str, unit: str, title: str) -> str:
    """Loss curves of out_dir/log.jsonl, in nats a `unit`, as out_dir/loss.png -> its path."""
    return save(run_figure(read_log(out_dir), title, unit), out_dir, 'loss', ('png',))[0]


# ----------------------------------------------------------------------------- the report

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; max-width: 60rem; margin: 2rem auto }
h1 { font-size: 1.6rem; overflow-wrap: anywhere }
h2 { font-size: 1.15rem; margin-top: 2.5rem; border-bottom: 1px solid #ddd }
img { max-width: 100%; margin: 0.5rem 1rem 0.5rem 0 }
img[alt$=svg] { height: 24rem; object-fit: contain; object-position: left }
div { overflow-x: auto }
table { font-size: 0.85rem; font-variant-numeric: tabular-nums }
th, td { padding-right: 1.2rem; text-align: right; white-space: nowrap }
pre { font-size: 0.85rem; background: #f6f6f4; padding: 0.8rem; white-space: pre-wrap }
"""
SHOWN = """run step tokens env_steps value train_loss val_loss val_bits_per_byte return_1000
    solve_rate_1000 eval_return eval_solve_rate seconds commit""".split()  # of a log, in a table


def html_of(content: 'Figure | Path | list | dict | str') -> str:
    """A figure, a picture's file, rows of a table (with a column for every key that has a value in
    one), settings, or text."""
    if isinstance(content, list):
        names = dict.fromkeys(k for row in content for k in row)
        names = [k for k in names if any(row.get(k) not in (None, '') for row in content)]
        lines = [('td', [field(row.get(k)) for k in names]) for row in content]
        page = ''
        for tag, texts in [('th', [name.replace('_', ' ') for name in names]), *lines]:
            cells = (f'<{tag}>{html.escape(text)}</{tag}>' for text in texts)
            page += f'<tr>{"".join(cells)}</tr>\n'
        return f'<div><table>{page}</table></div>\n'
    if isinstance(content, dict):
        content = '\n'.join(f'{k} = {x}' for k, x in content.items())
    if isinstance(content, str):
        return f'<pre>{html.escape(content)}</pre>\n'
    name, file = 'curves.svg', io.BytesIO()
    if isinstance(content, Path):
        name, file = content.name, io.BytesIO(content.read_bytes())
    else:
        content.savefig(file, format='svg')
    form = name.rpartition('.')[2].replace('svg', 'svg+xml')
    text = base64.b64encode(file.getvalue()).decode()
    return f'<img src="data:image/{form};base64,{text}" alt="{html.escape(name)}">\n'


def sweep_parts(folder: Path, logs: dict, configs: dict) -> dict[str, object]:
    """A sweep's page: {heading: what html_of takes}: what sweep.py has drawn and listed, and the
    logs."""
    about = read_json(folder / 'runs.json')
    runs, parts = about.pop('runs', []), {'Drawn by': about}
    parts |= {path.stem: path for path in sorted(folder.glob('*.svg'))}
    parts |= {path.stem: read_csv(path) for path in sorted(folder.glob('*.csv'))}
    if logs:
        runs, (figure, (axes,)) = [], new(1, 3.2)
        for path in sorted(logs, key=lambda path: configs[path].get('n_layer', 0)):
            c, log, text = configs[path], logs[path], 'tokens' in logs[path][-1]
            L, recurrent = c.get('n_layer', 0), c.get('recurrent')
            x, y = ('tokens', 'val_loss') if text else ('env_steps', 'return_1000')
            style = {'color': COLORS[L.bit_length() % 7], 'lw': 1, 'ls': '-' if recurrent else ':'}
            name = f'L = {L}' + ', not recurrent' * (not recurrent)
            curve(axes, log[1:], x, y, name, **style)  # not the loss before any update
            axes.set(xlabel=f'{x.replace("_", " ")} (millions)', ylabel=y.replace('_', ' '))
            about = {'run': path.name, 'value': value(log), 'commit': c.get('commit')}
            runs.append({k: (log[-1] | about).get(k) for k in SHOWN})
        parts['Curves'] = finish(figure, '')
    first, *others = configs.values() or [{}]
    common = {k: x for k, x in first.items() if all(c.get(k) == x for c in others)}
    return parts | {'Runs': runs, 'Settings of all runs': common}


def write_report(folder: Path) -> Path:
    """FOLDER/report.html, a page with all its pictures in it -> its path. Mistake."""
    paths = sorted(path.parent for path in (*folder.glob('log.jsonl'), *folder.glob('*/log.jsonl')))
    logs = {path: log for path in paths if (log := read_log(path))}
    if not logs and not (folder / 'runs.json').exists():
        fail(f'report = {str(folder)!r}: no log.jsonl in it or a folder below, and no runs.json')
    configs = {path: read_json(path / 'config.json') for path in logs}
    if log := logs.get(folder):
        unit = {'bytes': 'byte', 'gpt2': 'token'}.get(configs[folder].get('tokenizer'), '')
        evaluated = [r for r in log if 'val_loss' in r or 'eval_return' in r]
        parts = {'Curves': run_figure(log, '', unit)}
        parts['Evaluations'] = [{k: r.get(k) for k in SHOWN} for r in evaluated]
        parts |= {f'Game: {path.stem}': path for path in sorted(folder.glob('eval_*.gif'))}
        if unit and (folder / 'ckpt_last.pt').exists():
            print(f'a sample of {folder / "ckpt_last.pt"}, by sample.py', flush=True)
            line = [sys.executable, 'sample.py', f'--out_dir={folder.resolve()}']
            done = subprocess.run(line, cwd=Path(__file__).parent, capture_output=True, text=True)
            parts['A sample'] = done.stdout or done.stderr
        parts['Settings'] = configs[folder]
    else:
        parts = sweep_parts(folder, logs, configs)
    title = html.escape(str(folder))
    text = f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{title}</title>\n'
    text += f'<style>{STYLE}</style>\n<h1>{title}</h1>\n'
    for heading, content in parts.items():
        text += f'<h2>{html.escape(heading)}</h2>\n{html_of(content)}' if content else ''
    write_text(f'{text}</html>\n', folder / 'report.html')
    return folder / 'report.html'


def main() -> None:
    configure(globals(), quiet=True)
    if not report:
        fail('report is empty: name the folder of a run or a sweep, --report=out/demo')
    need_packages(matplotlib=True)
    print(write_report(Path(report)))


if __name__ == '__main__':
    run_script(main)

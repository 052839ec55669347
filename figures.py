"""
Draw figures, tables and reports from the logs of runs.

For sweep.py: figures and tables of a plan, whose runs are a list of (Row, log); a log is the list
of the objects in log.jsonl. For the trainers: the curves of one run. As a script: one
self-contained page about a run or a sweep, or the solve rates of agents beside published ones.

$ python figures.py --report=out/demo                 # writes out/demo/report.html
$ python figures.py --solve_rates='out/boxoban_*'     # writes out/solve_rates.png, svg, csv and md

A language model's run is judged by its last validation loss (nats per token or byte; lower is
better), a Sokoban run by the mean of its last five logged episodic returns (higher is better).
Error bars are one standard deviation over seeds, or one standard error where the figure says so.
Colors are those of Okabe and Ito, which color-blind readers can tell apart; lines also differ in
their markers.
"""

import base64
import csv
import glob
import io
import json
import math
import os
import re
import statistics
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

# before torch: how threads wait
from configurator import Mistake, configure, fail, first_line, read_json, read_script, run_script
from configurator import write_atomic, write_text

from common import need_packages

# fmt: off
report = ''                    # folder of a run or a sweep: write its report.html
solve_rates = ''               # folders of Sokoban runs, separated by commas; patterns are allowed:
                               # draw and list their solve rates by environment steps
reference = 'results/paper'    # folder with published results to show beside them; '': none
out_dir = 'out'                # solve_rates: where the figure and the table go
# fmt: on

# matplotlib, pandas and jinja2 are imported by the functions that need them: training does without
if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9', '#000000')
MARKERS = 'osD^vPX'
MODELS = {'transformer': 'Transformer', 'convlstm': 'ConvLSTM', 'convglu': 'ConvGLU'}  # of a plan
# by the setting `arch` of a run
ARCHITECTURES = MODELS | {'experts': 'Parallel-Experts Transformer', 'lstm': 'LSTM'}
# numbers that read_log checks
NUMBERS = ('seconds', 'tokens', 'env_steps', 'val_loss', 'episodic_return', 'return_1000')
SIZES = {'L': 'layers L', 'E': 'experts E per layer', 'd': 'width d'}
SETTINGS = {'radius': 'radius r: preceding experts that each expert reads'}
STANDARD_ERROR, STANDARD_DEVIATION = 'bars: one standard error', 'bars: one standard deviation'


# ----------------------------------------------------------------------------- runs and logs


class Row(NamedTuple):
    """One run of a plan."""

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
        return 'recurrent' if self.recurrent else 'non-recurrent'

    @property
    def name(self) -> str:
        """Return the name of the run's folder."""
        variant = self.variant.replace('-', '')
        more = ''.join(f'_{k}-{v}' for k, v in self.more)
        return f'{self.model}_{variant}_L{self.L}_E{self.E}_d{self.d}{more}_s{self.seed}'

    @property
    def cell(self) -> 'Row':
        """Return what the runs of all seeds have in common."""
        return self._replace(seed=0)


class Summary(NamedTuple):
    """Values over seeds. `error` is a standard deviation, or a standard error; NaN for one seed."""

    mean: float
    error: float
    n: int


def read_log(folder: str | os.PathLike) -> list[dict]:
    """Return the objects of folder/log.jsonl, without a last line that is still being written.

    Raises Mistake for a line that is no record of a log, OSError if there is no such file.
    """
    path, records = Path(folder, 'log.jsonl'), []
    for number, line in enumerate(path.read_bytes().split(b'\n')[:-1], 1):
        try:
            record = json.loads(line)
            if type(record['step']) is not int:
                raise ValueError('step is not an integer')
            if not all(x is None or math.isfinite(x) for x in map(record.get, NUMBERS)):
                raise ValueError('a number is not finite')
        except (ValueError, TypeError, LookupError, OverflowError, RecursionError) as error:
            raise Mistake(f'{path}:{number}: not a line of a log ({first_line(error)})') from None
        records.append(record)
    return records


def read_csv(path: str | os.PathLike) -> list[dict]:
    """Return the rows of a CSV file as dicts of strings."""
    with open(path, newline='', encoding='utf-8') as file:
        return list(csv.DictReader(file))


# ----------------------------------------------------------------------------- values


def run_value(log: list[dict]) -> float | None:
    """Return the value that a finished run is judged by, or None if the log does not have it."""
    returns = [r['episodic_return'] for r in log if r.get('episodic_return') is not None]
    return statistics.fmean(returns[-5:]) if returns else log[-1].get('val_loss')


def summarize(values: list[float]) -> Summary:
    """Return mean, standard deviation (N - 1; NaN for one value) and N."""
    deviation = statistics.stdev(values) if len(values) > 1 else math.nan
    return Summary(statistics.fmean(values), deviation, len(values))


def group_by(points: dict, key: Callable) -> dict:
    """Return {key(row): {row: x}} for points {row: x}, in their order."""
    groups = {}
    for row, x in points.items():
        groups.setdefault(key(row), {})[row] = x
    return groups


def summarize_cells(runs: list) -> dict[Row, Summary]:
    """Return {row.cell: Summary} of runs that all have a value, in their order."""
    values = {}
    for row, log in runs:
        values.setdefault(row.cell, []).append(run_value(log))
    return {row: summarize(x) for row, x in values.items()}


def best_cell(points: dict[Row, Summary]) -> Row:
    """Return the cell with the best mean among those with the most seeds.

    A cell with fewer seeds than others could win by one lucky seed.
    """
    most = max(point.n for point in points.values())
    complete = [row for row, point in points.items() if point.n == most]
    return min(complete, key=lambda row: points[row].mean * (1 if row.is_text else -1))


def without_setting(row: Row, name: str) -> Row:
    """Return the row without its setting `name`."""
    return row._replace(more=tuple((k, v) for k, v in row.more if k != name))


def runs_at_best(runs: list, name: str) -> list:
    """Return the runs of the best cell of each group of cells that differ only in `name`."""
    groups = group_by(summarize_cells(runs), partial(without_setting, name=name))
    best = [best_cell(points) for points in groups.values()]
    return [(row, log) for cell in best for row, log in runs if row.cell == cell]


def with_standard_errors(points: dict) -> dict:
    """Return the points with standard errors in place of standard deviations."""
    return {x: Summary(mean, error / math.sqrt(n), n) for x, (mean, error, n) in points.items()}


def saturation(points: dict[Row, Summary]) -> dict[int, Summary]:
    """Return {L: mean, standard error and N of the best cell with at most L layers}."""
    curve = {}
    for L in sorted({row.L for row in points}):
        candidates = {row: point for row, point in points.items() if row.L <= L}
        curve[L] = points[best_cell(candidates)]
    return with_standard_errors(curve)


def differences(points: dict, default: object) -> dict:
    """Return {x: mean minus the mean at `default`, standard error of the difference, N}.

    Seeds count as independent. At `default` itself the difference is 0, without an error.
    """
    points = with_standard_errors(points)
    base = points[default]
    out = {
        x: Summary(mean - base.mean, math.hypot(error, base.error), n)
        for x, (mean, error, n) in points.items()
    }
    return out | {default: Summary(0.0, math.nan, base.n)}


def variant_name(text: str) -> str:
    """Return the name of a variant; published tables and old files say 'feedforward'."""
    return 'non-recurrent' if text == 'feedforward' else text


def paper_cells(reference: str, points: Iterable[Row]) -> dict[Row, Summary]:
    """Return the paper's returns for the variants and budgets of our cells, {} if it has none."""
    known = {row[:3] for row in points if not row.more}
    out = {}
    for r in read_csv(os.path.join(reference, 'sokoban_returns.csv')) if reference else ():
        row = Row(
            model='convlstm',
            recurrent=r['variant'] == 'recurrent',
            budget=r['budget'],
            L=int(r['L']),
            E=int(r['E']),
            d=int(r['d']),
            seed=0,
        )
        if row[:3] in known:
            deviation = math.sqrt(float(r['variance']))
            out[row] = Summary(float(r['mean_return']), deviation, int(r['n_seeds']))
    return out


# ----------------------------------------------------------------------------- drawing


def new_figure(columns: int, height: float = 2.8, sharey: bool = True, width: float = 3.4) -> tuple:
    """Return a figure and its row of panels; in inches, each panel as wide as a paper's column."""
    import matplotlib

    matplotlib.use('Agg')
    import matplotlib.pyplot as plt

    plt.rc('font', size=8)
    plt.rc('axes', titlesize=8, grid=True, axisbelow=True)
    plt.rc('grid', alpha=0.3)
    plt.rc('legend', fontsize=7, frameon=False)
    plt.rc('figure', titlesize=9)
    plt.rc('svg', hashsalt='figures', fonttype='none')  # the same runs give the same file
    figure, panels = plt.subplots(
        1,
        columns,
        figsize=(width * columns, height),
        layout='constrained',
        sharey=sharey,
        squeeze=False,
    )
    return figure, panels[0]


def set_title(figure: 'Figure', title: str, note: str = '') -> None:
    """Set the figure's title, wrapped to its width, and below it a note on a line of its own."""
    characters = int(12 * figure.get_figwidth())  # at 9 points; wide letters still fit
    lines = textwrap.wrap(title, characters) + textwrap.wrap(note, characters)
    figure.suptitle('\n'.join(lines))


def finish_figure(figure: 'Figure', title: str, note: str = '') -> 'Figure':
    """Set the title, and below the panels one legend for all of them; return the figure."""
    handles = {}
    for axes in figure.axes:
        lines, labels = axes.get_legend_handles_labels()
        handles |= dict(zip(labels, lines, strict=True))
    if handles:
        longest = max(map(len, handles))
        columns = int(17 * figure.get_figwidth() / (8 + longest))
        columns = max(1, min(len(handles), columns))
        figure.legend(handles.values(), handles, loc='outside lower center', ncols=columns)
    set_title(figure, title, note)
    return figure


def save_figure(
    figure: 'Figure', folder: str, name: str, forms: tuple[str, ...] = ('png', 'svg')
) -> list[str]:
    """Write folder/name in every form, close the figure and return the paths."""
    import matplotlib.pyplot as plt

    paths = [os.path.join(folder, f'{name}.{form}') for form in forms]
    for path, form in zip(paths, forms, strict=True):
        options = {'dpi': 200} if form == 'png' else {'metadata': {'Date': None}}
        write_atomic(path, partial(figure.savefig, format=form, **options))
    plt.close(figure)
    return paths


def percent_axis(axis: object) -> None:
    """Label an axis of fractions in percent, with a decimal only where less than 5% is shown."""
    from matplotlib.ticker import PercentFormatter

    low, high = axis.get_view_interval()
    axis.set_major_formatter(PercentFormatter(1, decimals=0 if high - low >= 0.05 else 1))


def draw_line(
    axes: 'Axes', points: dict, i: int, label: str, published: bool = False, **style: object
) -> None:
    """Draw {x: Summary} with error bars as line number i; published results dashed and hollow."""
    xs = sorted(points)
    every = max(1, len(xs) // 8)
    look = {
        'color': COLORS[i % len(COLORS)],
        'marker': MARKERS[i % len(MARKERS)],
        'ms': 4,
        'lw': 1.2,
        'capsize': 2,
        'markevery': every,
        'errorevery': every,
    }
    if published:
        look |= {'ls': '--', 'mfc': 'white', 'alpha': 0.7}
    means = [points[x][0] for x in xs]
    errors = [points[x][1] for x in xs]
    known = not all(map(math.isnan, errors))
    axes.errorbar(xs, means, yerr=errors if known else None, label=label, **look | style)


class Line(NamedTuple):
    """A line of a chart: {x: Summary}, its number (color and marker), its label."""

    points: dict
    i: int
    label: str
    published: bool = False


def line_chart(
    panels: dict[str, list[Line]], xlabel: str, ylabel: str, title: str, note: str
) -> 'Figure':
    """Return a figure with a panel for each {title: lines} over powers of two."""
    figure, row = new_figure(len(panels))
    for axes, (name, lines) in zip(row, panels.items(), strict=True):
        for line in lines:
            draw_line(axes, *line)
        xs = sorted({x for line in lines for x in line.points})
        axes.set_xscale('log', base=2)
        axes.set_xticks(xs, map(str, xs))
        axes.minorticks_off()
        axes.set(title=name, xlabel=xlabel)
    row[0].set_ylabel(ylabel)
    return finish_figure(figure, title, note)


# ----------------------------------------------------------------------------- figures of a plan


def size_figure(
    points: dict[Row, Summary], sizes: str, reference: str, title: str, label: str
) -> 'Figure':
    """Return the value by the first of two `sizes`, with a line for each value of the second and a
    panel for each variant."""
    x, line_size = sizes
    panels = {}
    for variant, ours in group_by(points, attrgetter('variant')).items():
        paper = paper_cells(reference, ours)
        values = sorted({getattr(row, line_size) for row in (*ours, *paper)})
        panels[variant] = [
            Line(
                points={getattr(row, x): point for row, point in cells.items()},
                i=values.index(size),
                label=f'{line_size} = {size}' + ', paper' * published,
                published=published,
            )
            for published, source in ((False, ours), (True, paper))
            for size, cells in group_by(source, attrgetter(line_size)).items()
        ]
    return line_chart(panels, SIZES[x], label, title, STANDARD_DEVIATION)


def saturation_figure(
    points: dict[Row, Summary], lines: str, reference: str, title: str, label: str
) -> 'Figure':
    """Return the best value with at most L layers, ours and the paper's: a line for each 'variant',
    or for each 'budget' with a panel for each variant."""
    keys = list(group_by(points, attrgetter(lines)))
    panels = {}
    by_panel = group_by(points, attrgetter('variant')) if lines == 'budget' else {'': points}
    for panel, cells in by_panel.items():
        panels[panel] = []
        for key, part in group_by(cells, attrgetter(lines)).items():
            name = f'{key} budget' if lines == 'budget' else key
            panels[panel].append(Line(saturation(part), keys.index(key), name))
            if paper := paper_cells(reference, part):
                line = Line(saturation(paper), keys.index(key), f'{name}, paper', published=True)
                panels[panel].append(line)
    return line_chart(panels, 'at most L layers', f'best {label}', title, STANDARD_ERROR)


def mean_curve(logs: list[list[dict]], x: str, y: str) -> dict[float, Summary]:
    """Return {x in millions: Summary of y} at the values of x that all logs have."""
    import pandas as pd

    curves = [pd.DataFrame(log).reindex(columns=[x, y]).dropna().astype(float) for log in logs]
    found = pd.concat(curves).groupby(x)[y].agg(['mean', 'std', 'count'])
    found = found[found['count'] == len(logs)]
    return {at / 1e6: Summary(mean, std, int(n)) for at, mean, std, n in found.itertuples()}


def curve_figure(
    runs: list, points: dict[Row, Summary], title: str, label: str, token: str
) -> 'Figure':
    """Return loss or return over training data: for each variant and L the best allocation.

    Of a loss only the last three quarters of training are drawn: the first values would flatten
    all differences.
    """
    is_text = next(iter(points)).is_text
    x, y = ('tokens', 'val_loss') if is_text else ('env_steps', 'return_1000')
    variants = group_by(points, attrgetter('variant'))
    figure, panels = new_figure(len(variants), 3.2)
    for axes, (variant, cells) in zip(panels, variants.items(), strict=True):
        for i, (_, part) in enumerate(sorted(group_by(cells, attrgetter('L')).items())):
            row = best_cell(part)
            curve = mean_curve([log for run, log in runs if run.cell == row], x, y)
            if is_text:
                start = max(curve, default=0) / 4
                curve = {at: point for at, point in curve.items() if at >= start}
            draw_line(axes, curve, i, f'L = {row.L}, E = {row.E}, d = {row.d}')
        unit = f'{token}s' if is_text else 'environment steps'
        axes.set(title=variant, xlabel=f'{unit} (millions)')
        # a legend for each panel: the allocations differ between them
        axes.legend(loc='upper center', bbox_to_anchor=(0.5, -0.22), ncols=2)
    panels[0].set_ylabel(label if is_text else 'return, mean of 1,000 episodes')
    set_title(figure, title, STANDARD_DEVIATION)
    return figure


def ablation_figure(
    points: dict[Row, Summary], values: list, default: tuple, title: str, label: str
) -> 'Figure':
    """Return the value by a setting, with a line for each cell, and beside it the difference from
    the default. `values` are the setting's values, as Row.more has them."""
    figure, panels = new_figure(2, 3.4, sharey=False)
    cells = group_by(points, lambda row: row._replace(more=()))
    for i, (cell, part) in enumerate(cells.items()):
        shift = 0.06 * i  # so that error bars do not cover each other
        by_value = {values.index(row.more) + shift: point for row, point in part.items()}
        name = f'{cell.variant}, L = {cell.L}, E = {cell.E}, d = {cell.d}'
        draw_line(panels[0], with_standard_errors(by_value), i, name)
        if (x := values.index(default) + shift) in by_value:
            draw_line(panels[1], differences(by_value, x), i, name)
    setting, default_value = default[0]
    for axes in panels:
        axes.set_xticks(range(len(values)), [str(value[0][1]) for value in values])
        axes.set_xlim(-0.5, len(values) - 0.5)
        axes.set_xlabel(SETTINGS.get(setting, setting.replace('_', ' ')))
    panels[0].set_ylabel(label)
    panels[1].set_ylabel(f'{label.partition(" (")[0]} minus that of {default_value}')
    panels[1].axhline(0, color='black', lw=0.6)
    return finish_figure(figure, title, STANDARD_ERROR)


def draw_plan(
    description: str, rows: list[Row], runs: list, token: str, reference: str, folder: str
) -> list[str]:
    """Draw all figures of a plan from its finished runs and return their paths.

    description: the plan's name, and after a comma what the title says of a reduced plan. token:
    what a language model reads in a step, 'token' or 'byte'.
    """
    plan, comma, reduced = description.partition(',')
    paths = []
    for model, points in group_by(summarize_cells(runs), attrgetter('model')).items():
        seeds = sorted({point.n for point in points.values()})
        count = f'{seeds[0]} to {seeds[-1]}' if len(seeds) > 1 else f'{seeds[0]}'
        title = f'{MODELS[model]}, {plan.replace("-", " ")}{comma}{reduced}, {count} seed'
        title += 's' * (seeds[-1] > 1)
        row = next(iter(points))
        label = f'validation loss (nats per {token})' if row.is_text else 'return'
        figures = {}
        if plan == 'sokoban':
            figures['budgets'] = saturation_figure(points, 'budget', reference, title, label)
        elif plan.startswith('scaling'):
            figures['scaling'] = size_figure(points, 'EL', '', title, label)
        elif row.more:
            values = list(dict.fromkeys(row.more for row in rows if row.model == model))
            # the communication plan ends with its default, r = E - 1: every expert reads all
            default = values[-1 if plan == 'communication' else 0]
            figures['ablation'] = ablation_figure(points, values, default, title, label)
        else:
            figures['allocations'] = size_figure(points, 'Ld', reference, title, label)
            figures['saturation'] = saturation_figure(points, 'variant', reference, title, label)
            figures['curves'] = curve_figure(runs, points, title, label, token)
        for name, figure in figures.items():
            paths += save_figure(figure, folder, f'{name}_{model}')
    return paths


# ----------------------------------------------------------------------------- tables


def format_number(x: object) -> str:
    """Return five significant digits of a float, nothing for NaN and None, else str(x)."""
    if isinstance(x, float):
        return '' if math.isnan(x) else f'{x:.5g}'
    return '' if x is None else str(x)


def markdown(lines: list[list[str]]) -> str:
    """Return a Markdown table; the first line holds the headings."""
    head, *body = (f'| {" | ".join(line)} |\n' for line in lines)
    return ''.join([head, '| --- ' * len(lines[0]) + '|\n', *body])


def write_table(rows: list[dict], folder: str, name: str) -> list[str]:
    """Write rows as name.csv and name.md and return the paths.

    The columns are the keys of the first row; what another row lacks stays empty.
    """
    lines = [list(rows[0]), *([format_number(row.get(k)) for k in rows[0]] for row in rows)]
    text = io.StringIO()
    csv.writer(text, lineterminator='\n').writerows(lines)
    paths = [os.path.join(folder, f'{name}.csv'), os.path.join(folder, f'{name}.md')]
    write_text(text.getvalue(), paths[0])
    write_text(markdown(lines), paths[1])
    return paths


def cell_fields(rows: Iterable[Row]) -> dict[Row, dict]:
    """Return for each cell the fields that name it in a table.

    Every setting by which the cells differ has a column of its own.
    """
    names = dict.fromkeys(name for row in rows for name, _ in row.more)
    out = {}
    for row in rows:
        out[row] = {name: getattr(row, name) for name in ('variant', 'budget', 'L', 'E', 'd')}
        out[row] |= {name: str(dict(row.more).get(name, '')) for name in names}
    return out


def write_value_tables(runs: list, reference: str, folder: str, tuned: str) -> list[str]:
    """Write mean, variance (N - 1) and N of every cell, one table for each model, and return the
    paths. The paper's values stand beside them; its rows have no setting `tuned`."""
    paths = []
    for model, points in group_by(summarize_cells(runs), attrgetter('model')).items():
        paper = paper_cells(reference, [without_setting(row, tuned) for row in points])
        rows = []
        for row, fields in cell_fields(points).items():
            mean, deviation, n = points[row]
            name = 'mean_loss' if row.is_text else 'mean_return'
            rows.append({**fields, name: mean, 'variance': deviation**2, 'n_seeds': n})
            if paper:
                cell = paper.get(without_setting(row, tuned), Summary(math.nan, math.nan, 0))
                rows[-1] |= {'paper_mean': cell.mean, 'paper_variance': cell.error**2}
        paths += write_table(rows, folder, f'table_{model}')
    return paths


def write_solve_table(
    rates: dict[Row, list[float]], levels: str, reference: str, folder: str, tuned: str
) -> list[str]:
    """Write the solve rates of cells, one table for each model, and return the paths.

    rates: {cell: [solve rate of each seed]} on the split `levels` ('': the runs' evaluation
    levels). On unfiltered-test, the split of all published numbers, the paper's rows of the same
    variants and budgets and published agents follow.
    """
    paths, column = [], f'{(levels or "evaluation_levels").replace("-", "_")}_percent'
    for model, cells in group_by(rates, attrgetter('model')).items():
        rows = []
        for row, fields in cell_fields(cells).items():
            mean, deviation, n = summarize([100 * rate for rate in rates[row]])
            rows.append({**fields, column: mean, 'std': deviation, 'n_seeds': n})
        known = {row[:3] for row in cells if not without_setting(row, tuned).more}
        if levels == 'unfiltered-test' and reference:
            for r in read_csv(os.path.join(reference, 'sokoban_solve_rates.csv')):
                cell = 'convlstm', r['variant'] == 'recurrent', r['budget']
                if cell in known or not r['budget']:  # published agents have no budget
                    rows.append(r | {'variant': f'{variant_name(r["variant"])}, paper'})
            for r in published_agents(reference):
                if r['env_steps'] in (10_014_720, 50_073_600):
                    name = f'{r["agent"]}, {r["env_steps"] / 1e6:.0f}M, published'
                    rates_percent = {column: 100 * r['solve_rate'], 'n_seeds': r['seeds']}
                    rows.append({'variant': name, **rates_percent})
        paths += write_table(rows, folder, f'solve_{model}')
    return paths


# ----------------------------------------------------------------------------- solve rates


def published_agents(reference: str) -> list[dict]:
    """Return published solve rates by environment steps, [] if the file is not there.

    The agents, DRC(3,3), DRC(1,1) and a ResNet, were trained by IMPALA with 256 boards and act
    greedily on Boxoban's unfiltered-test. Keys: agent, env_steps, seeds, solve_rate,
    solve_rate_min, solve_rate_max, return. Source: the data files of
    AlignmentResearch/learned-planner.
    """
    path = Path(reference, 'published_drc_by_steps.csv')
    names = {'drc_33': 'DRC(3,3)', 'drc_11': 'DRC(1,1)', 'resnet': 'ResNet'}
    return [
        {
            'agent': names.get(r['agent'], r['agent']),
            'env_steps': int(r['env_steps']),
            'seeds': int(r['seeds']),
            'solve_rate': float(r['solve_rate_mean']),
            'solve_rate_min': float(r['solve_rate_min']),
            'solve_rate_max': float(r['solve_rate_max']),
            'return': float(r['return_mean']),
        }
        for r in (read_csv(path) if reference and path.exists() else ())
    ]


def describe_model(config: dict) -> str:
    """Return the model of a config.json in words: 'ConvGLU, recurrent, L = 2, E = 4, d = 32'."""
    arch = config.get('arch', 'experts')
    parts = [ARCHITECTURES.get(arch, arch)]
    if arch not in ('transformer', 'lstm') and 'recurrent' in config:
        parts.append('recurrent' if config['recurrent'] else 'non-recurrent')
    for symbol, name in (('L', 'n_layer'), ('E', 'n_expert'), ('d', 'n_embd')):
        if name in config:
            parts.append(f'{symbol} = {config[name]}')
    return ', '.join(parts)


def solve_rate_figure(logs: dict[str, list[dict]], published: list[dict], title: str) -> 'Figure':
    """Return the greedy solve rates {label: log} by environment steps beside published agents'."""
    figure, (axes,) = new_figure(1, 4.4, width=6.8)
    for i, (label, log) in enumerate(logs.items()):
        points = [r for r in log if r.get('eval_solve_rate') is not None]
        xs, ys = [r['env_steps'] / 1e6 for r in points], [r['eval_solve_rate'] for r in points]
        look = {'color': COLORS[i % 7], 'marker': MARKERS[i % 7], 'ms': 3, 'lw': 1.2}
        look |= {'mfc': 'white', 'ls': '--'} if i >= 7 else {}  # colors repeat
        axes.plot(xs, ys, label=label, markevery=max(1, len(xs) // 8), **look)
    longest = max((log[-1].get('env_steps', 0) for log in logs.values()), default=0)
    styles = dict(
        zip(dict.fromkeys(r['agent'] for r in published), ('-.', '--', ':'), strict=False)
    )
    for agent, style in styles.items():
        rows = [r for r in published if r['agent'] == agent and r['env_steps'] <= 1.05 * longest]
        xs, ys = [r['env_steps'] / 1e6 for r in rows], [r['solve_rate'] for r in rows]
        axes.plot(xs, ys, color='gray', ls=style, lw=1.2, label=f'{agent}, published')
    axes.set(xlabel='environment steps (millions)', ylabel='levels solved', ylim=(0, None))
    percent_axis(axes.yaxis)
    return finish_figure(figure, title)


def compare_solve_rates(folders: list[Path]) -> list[str]:
    """Draw and list the solve rates of runs of train_sokoban.py; return the paths."""
    logs, rows, splits = {}, [], {}
    published = published_agents(reference)
    for folder in folders:
        config, log = read_json(folder / 'config.json'), read_log(folder)
        evaluated = [r for r in log if r.get('eval_solve_rate') is not None]
        if not evaluated:
            fail(f'solve_rates: {folder}/log.jsonl has no evaluation of a Sokoban agent')
        label = describe_model(config)
        if label in logs:
            label += f' ({folder.name})'
        logs[label], last = evaluated, evaluated[-1]
        splits[config.get('eval_split', 'unknown levels')] = None
        rows.append(
            {
                'agent': label,
                'environment steps': last['env_steps'],
                'levels': config.get('eval_split', ''),
                'solved, %': 100 * last['eval_solve_rate'],
                'return': last['eval_return'],
                'seeds': 1,
            }
        )
    steps = {row['environment steps'] for row in rows}
    for r in published:  # at the steps nearest to ours
        nearest = {
            min((abs(p['env_steps'] - n), p['env_steps']) for p in published)[1] for n in steps
        }
        if r['env_steps'] in nearest:
            rows.append(
                {
                    'agent': f'{r["agent"]}, published',
                    'environment steps': r['env_steps'],
                    'levels': 'unfiltered-test',
                    'solved, %': 100 * r['solve_rate'],
                    'return': r['return'],
                    'seeds': r['seeds'],
                }
            )
    title = f'greedy, evaluated on {", ".join(splits)}'
    title += '; published agents on unfiltered-test' * bool(published)
    os.makedirs(out_dir, exist_ok=True)
    paths = save_figure(solve_rate_figure(logs, published, title), out_dir, 'solve_rates')
    return paths + write_table(rows, out_dir, 'solve_rates')


# ----------------------------------------------------------------------------- one run


def draw_curve(axes: 'Axes', log: list[dict], x: str, y: str, label: str, **style: object) -> None:
    """Draw the values of y in a log over x in millions, if it has any."""
    points = [(r[x] / 1e6, r[y]) for r in log if r.get(x) is not None and r.get(y) is not None]
    if points:
        axes.plot(*zip(*points, strict=True), label=label, **style)


TRAINING = {'color': COLORS[0], 'lw': 1}
EVALUATION = {'color': COLORS[1], 'lw': 1.5, 'marker': 'o', 'ms': 3}


def draw_losses(axes: 'Axes', log: list[dict], unit: str) -> None:
    """Draw the losses of a language model, in nats per `unit`, over the units it has read."""
    draw_curve(axes, log, 'tokens', 'train_loss', 'training', alpha=0.6, **TRAINING)
    draw_curve(axes, log, 'tokens', 'val_loss', 'validation', **EVALUATION)
    axes.set(xlabel=f'training {unit}s (millions)', ylabel=f'loss (nats per {unit})')


def draw_episodes(axes: 'Axes', log: list[dict], key: str) -> None:
    """Draw an agent's 'return' or 'solve_rate' over environment steps."""
    draw_curve(axes, log, 'env_steps', f'{key}_1000', 'training, last 1,000 episodes', **TRAINING)
    draw_curve(axes, log, 'env_steps', f'eval_{key}', 'evaluation levels, greedy', **EVALUATION)
    if (random := log[0].get(f'random_{key}')) is not None:
        label = 'evaluation levels, random policy'
        axes.axhline(random, color='gray', ls='--', lw=1, label=label)
    axes.set(xlabel='environment steps (millions)')
    if key == 'solve_rate':
        axes.set(ylabel='levels solved', ylim=(0, None))
        percent_axis(axes.yaxis)
    else:
        axes.set(ylabel='mean episodic return')


def run_figure(log: list[dict], title: str, unit: str = '') -> 'Figure':
    """Return a language model's losses over its `unit`s ('token' or 'byte'), or, without a unit, an
    agent's return and solve rate over environment steps."""
    figure, panels = new_figure(1 if unit else 2, 3.2, sharey=False)
    if unit:
        draw_losses(panels[0], log, unit)
    else:
        draw_episodes(panels[0], log, 'return')
        draw_episodes(panels[1], log, 'solve_rate')
    return finish_figure(figure, title)


def plot_losses(out_dir: str, unit: str, title: str) -> str:
    """Draw the losses of out_dir/log.jsonl as out_dir/loss.png and return its path."""
    figure = run_figure(read_log(out_dir), title, unit)
    return save_figure(figure, out_dir, 'loss', ('png',))[0]


# ----------------------------------------------------------------------------- the report

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff;
       max-width: 62rem; margin: 0 auto; padding: 1rem 1.25rem 3rem }
h1 { font-size: 1.6rem; line-height: 1.25; margin-bottom: 0.2rem }
h2 { font-size: 1.15rem; margin: 2.2rem 0 0.8rem; border-bottom: 1px solid #ddd }
h1, p, dd { overflow-wrap: anywhere }
td { overflow-wrap: break-word }
td:first-child { white-space: nowrap }
.folder { color: #666; margin-top: 0 }
dl { display: grid; gap: 0.8rem 1.5rem;
     grid-template-columns: repeat(auto-fill, minmax(13rem, 1fr)) }
dt { color: #666; font-size: 0.85rem }
dd { margin: 0; font-variant-numeric: tabular-nums }
.pictures { display: flex; flex-wrap: wrap; gap: 1rem }
figure { margin: 0; flex: 1 1 20rem; max-width: 30rem }
figure.wide { flex-basis: 100%; max-width: 54rem }
figure.game { flex: 0 1 15rem }
img { width: 100%; height: auto }
figcaption { color: #666; font-size: 0.85rem }
table { border-collapse: collapse; font-size: 0.85rem; font-variant-numeric: tabular-nums }
th, td { padding: 0.25rem 1.2rem 0.25rem 0; text-align: left; vertical-align: top }
th { vertical-align: bottom; border-bottom: 1px solid #999 }
.number { text-align: right }
tr:nth-child(even) td { background: #f7f7f5 }
pre { font-size: 0.85rem; background: #f7f7f5; padding: 0.8rem; white-space: pre-wrap;
      overflow-wrap: anywhere }
summary { cursor: pointer; margin: 0.8rem 0 }
@media (max-width: 40rem) {  /* a phone: each row of a table becomes a block of lines */
  .many, .many tbody, .many tr, .many td { display: block }
  .many thead { display: none }
  .many tr { border-bottom: 1px solid #ddd; padding: 0.4rem 0 }
  .many td { display: flex; justify-content: space-between; gap: 1rem; padding: 0.1rem 0;
             text-align: right; overflow-wrap: anywhere; white-space: normal }
  .many td::before { content: attr(data-heading); color: #666; text-align: left; flex: none;
                     max-width: 60% }
}
</style>
</head>
<body>
<h1>{{ title | replace(' = ', '&nbsp;=&nbsp;' | safe) }}</h1>
<p class="folder">{{ folder }}</p>

{% macro draw_table(rows) %}
<table{% if rows[0] | length > 3 %} class="many"{% endif %}>
<thead><tr>{% for cell in rows[0] -%}
<th{% if cell.is_number %} class="number"{% endif %}>{{ cell.heading }}</th>
{%- endfor %}</tr></thead>
<tbody>
{% for row in rows -%}
<tr>{% for cell in row -%}
<td data-heading="{{ cell.heading }}"{% if cell.is_number %} class="number"{% endif %}>
{{- cell.text }}</td>
{%- endfor %}</tr>
{% endfor -%}
</tbody>
</table>
{% endmacro %}

{% for section in sections %}
<section>
<h2>{{ section.heading }}</h2>
{% if section.facts %}<dl>{% for name, text in section.facts.items() %}
<div><dt>{{ name }}</dt>
<dd>{{ text | replace(' = ', '&nbsp;=&nbsp;' | safe) }}</dd></div>{% endfor %}
</dl>{% endif %}
{% if section.pictures %}<div class="pictures">{% for picture in section.pictures %}
<figure class="{{ picture.kind }}"><img src="{{ picture.source }}" alt="{{ picture.caption }}">
{%- if picture.caption %}<figcaption>{{ picture.caption }}</figcaption>{% endif %}</figure>
{%- endfor %}
</div>{% endif %}
{% if section.rows and section.folded %}<details><summary>{{ section.folded }}</summary>
{{ draw_table(section.rows) }}</details>
{% elif section.rows %}{{ draw_table(section.rows) }}{% endif %}
{% if section.text %}<pre>{{ section.text }}</pre>{% endif %}
</section>
{% endfor %}
</body>
</html>
"""


@dataclass
class Section:
    """A part of a page; everything but the heading may be missing."""

    heading: str
    facts: dict[str, str] = field(default_factory=dict)  # {name: text}
    pictures: list['Picture'] = field(default_factory=list)
    rows: list[list['Cell']] = field(default_factory=list)  # of a table
    folded: str = ''  # hide the table behind this line
    text: str = ''


class Cell(NamedTuple):
    """A cell of a table, with its column's heading."""

    heading: str
    text: str
    is_number: bool


class Picture(NamedTuple):
    source: str  # a data URL
    caption: str
    kind: str = ''  # 'wide': has several panels; 'game': an animation


def figure_picture(figure: 'Figure') -> Picture:
    """Return a figure as a picture without a caption, and close it."""
    import matplotlib.pyplot as plt

    file = io.BytesIO()
    figure.savefig(file, format='svg', metadata={'Date': None})
    plt.close(figure)
    return svg_picture(file.getvalue(), '')


def svg_picture(content: bytes, caption: str) -> Picture:
    """Return a figure's SVG text as a picture; one with several panels is wide."""
    width = re.search(rb'<svg [^>]*?width="([0-9.]+)pt"', content)
    kind = 'wide' if width and float(width[1]) > 300 else ''
    return Picture(data_url(content, 'svg+xml'), caption, kind)


def data_url(content: bytes, form: str) -> str:
    return f'data:image/{form};base64,{base64.b64encode(content).decode()}'


def count(x: float) -> str:
    return f'{x:,.0f}'


def duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def percent(x: float) -> str:
    return f'{x:.1%}'


def loss(x: float) -> str:
    return f'{x:.4f}'


def two_decimals(x: float) -> str:
    return f'{x:.2f}'


def nats(unit: str) -> str:
    """Return 'nats per token' or 'nats per byte', or 'nats' if the unit is not known."""
    return f'nats per {unit}' if unit else 'nats'


# headings and formats of what logs and tables call by short names; {nats}: of nats(unit)
COLUMNS = {
    'step': ('Updates', count),
    'tokens': ('{units} read', count),
    'env_steps': ('Environment steps', count),
    'train_loss': ('Training loss ({nats})', loss),
    'val_loss': ('Validation loss ({nats})', loss),
    'val_bits_per_byte': ('Validation, bits per byte', loss),
    'return_1000': ('Return, last 1,000 training episodes', two_decimals),
    'solve_rate_1000': ('Solved, last 1,000 training episodes', percent),
    'eval_return': ('Return, evaluation levels', two_decimals),
    'eval_solve_rate': ('Solved, evaluation levels', percent),
    'seconds': ('Training time', duration),
    'variant': ('Variant', variant_name),
    'kind': ('Variant', variant_name),
    'model': ('Model', lambda name: MODELS.get(name, name)),
    'budget': ('Budget', str),
    'L': ('Layers L', str),
    'E': ('Experts E', str),
    'd': ('Width d', str),
    'seed': ('Seed', str),
    'n_seeds': ('Seeds', str),
    'value': ('Value', format_number),
    'mean_loss': ('Mean loss ({nats})', format_number),
    'mean_return': ('Mean return', format_number),
    'variance': ('Variance over seeds', format_number),
    'paper_mean': ('Paper: mean', format_number),
    'paper_variance': ('Paper: variance', format_number),
    'unfiltered_test_percent': ('Solved, unfiltered-test (%)', format_number),
    'evaluation_levels_percent': ('Solved, evaluation levels (%)', format_number),
    'held_out_percent': ('Solved, evaluation levels (%)', format_number),
    'std': ('Standard deviation', format_number),
}
LOGGED = ('step', 'tokens', 'env_steps', 'train_loss', 'val_loss', 'val_bits_per_byte')
LOGGED += ('return_1000', 'solve_rate_1000', 'eval_return', 'eval_solve_rate', 'seconds')


def table_rows(records: list[dict], unit: str = '') -> list[list[Cell]]:
    """Return a table of records with a column for every key that has a value in one of them."""
    names = dict.fromkeys(name for record in records for name in record)
    rows = [[] for _ in records]
    for name in names:
        values = [record.get(name) for record in records]
        if all(x is None or x == '' for x in values):
            continue
        heading, form = COLUMNS.get(name, (name.replace('_', ' ').capitalize(), format_number))
        heading = heading.format(nats=nats(unit), units=(unit or 'token').capitalize() + 's')
        is_number = all(x is None or x == '' or is_numeric(x) for x in values)
        for row, x in zip(rows, values, strict=True):
            # a table that was read from a file holds text, which is formatted already
            text = (
                ''
                if x is None
                else form(x)
                if not isinstance(x, str) or form is variant_name
                else x
            )
            row.append(Cell(heading, text, is_number))
    return rows


def is_numeric(x: object) -> bool:
    try:
        float(x)
    except (TypeError, ValueError):
        return False
    return True


def script_of(config: dict) -> str:
    return 'train_sokoban.py' if 'n_envs' in config else 'train_lm.py'


def setting_sections(configs: list[dict]) -> list[Section]:
    """Return what all runs have set alike: first what differs from the script's defaults."""
    if not configs or not configs[0]:
        return []
    common = {k: x for k, x in configs[0].items() if all(c.get(k) == x for c in configs)}
    script = script_of(configs[0])
    defaults = json.loads(json.dumps(read_script(Path(__file__).with_name(script))[0]))
    changed = [
        {'setting': name, 'value': str(x), 'default': str(defaults[name])}
        for name, x in common.items()
        if name in defaults and defaults[name] != x and name != 'out_dir'
    ]
    every = [{'setting': name, 'value': str(x)} for name, x in common.items() if x != '']
    alike = ' of all runs' if len(configs) > 1 else ''
    sections = [Section(f'Settings{alike} that differ from the defaults', rows=table_rows(changed))]
    folded = f'All {len(every)} settings{alike}, and what they ran with'
    sections.append(Section('All settings', rows=table_rows(every), folded=folded))
    return [section for section in sections if section.rows]


def environment(config: dict) -> dict[str, str]:
    """Return the facts that a config.json holds beside the settings."""
    names = {'device_name': 'Device', 'torch': 'torch', 'commit': 'Commit'}
    return {name: str(config[key]) for key, name in names.items() if config.get(key)}


def run_sections(folder: Path, log: list[dict], config: dict, unit: str) -> list[Section]:
    """Return the page of one run."""
    last, facts = log[-1], {}
    evaluated = [r for r in log if r.get('val_loss') is not None or 'eval_return' in r]
    if unit:
        total = config.get('max_iters', last['step'])
        if evaluated:
            best = min(evaluated, key=lambda r: r['val_loss'])
            facts['Validation loss'] = f'{evaluated[-1]["val_loss"]:.4f} nats per {unit}'
            if evaluated[-1].get('val_bits_per_byte') is not None:
                facts['Bits per byte'] = loss(evaluated[-1]['val_bits_per_byte'])
            facts['Best validation loss'] = (
                f'{best["val_loss"]:.4f} at update {count(best["step"])}'
            )
        facts['Trained'] = f'{count(last["step"])} of {count(total)} updates'
        facts[f'{unit.capitalize()}s read'] = count(last.get('tokens', 0))
    else:
        total = config.get('total_steps', last['env_steps'])
        if evaluated:
            final, best = evaluated[-1], max(evaluated, key=lambda r: r['eval_solve_rate'])
            facts['Evaluation levels solved'] = percent(final['eval_solve_rate'])
            facts['Return'] = two_decimals(final['eval_return'])
            at = f'{percent(best["eval_solve_rate"])} at {count(best["env_steps"])} steps'
            facts['Best evaluation'] = at
            if log[0].get('random_solve_rate') is not None:
                facts['A random policy solves'] = percent(log[0]['random_solve_rate'])
        facts['Evaluated on'] = (
            f'{config.get("eval_games", "?")} levels of {config.get("eval_split")}'
        )
        for path in sorted(folder.glob('eval_*.json')):  # of --eval_only, perhaps of other levels
            record = read_json(path)
            if 'solve_rate' in record and 'n' in record:
                solved = f'{percent(record["solve_rate"])} of {count(record["n"])} levels'
                facts[f'Solved, {path.stem.removeprefix("eval_")}'] = solved
        facts['Trained'] = f'{count(last["env_steps"])} of {count(total)} environment steps'
    if last.get('seconds'):
        facts['Training time'] = duration(last['seconds'])
    facts |= environment(config)
    sections = [Section('Summary', facts=facts)]
    if unit:
        figure, (axes,) = new_figure(1, 3.0)
        draw_losses(axes, log, unit)
        curves = [figure_picture(finish_figure(figure, ''))]
    else:
        curves = []
        for key in ('return', 'solve_rate'):
            figure, (axes,) = new_figure(1, 3.0)
            draw_episodes(axes, log, key)
            curves.append(figure_picture(finish_figure(figure, '')))
    sections.append(Section('Curves', pictures=curves))
    games = [
        Picture(data_url(path.read_bytes(), 'gif'), game_caption(path), 'game')
        for path in sorted(folder.glob('eval_*.gif'))
    ]
    if games:
        sections.append(Section('Games', pictures=games))
    changed, *settings = setting_sections([config])
    sections.append(changed)
    if evaluated:
        rows = table_rows([{k: r.get(k) for k in LOGGED} for r in evaluated], unit)
        folded = f'{len(rows)} evaluations' if len(rows) > 20 else ''
        sections.append(Section('Evaluations', rows=rows, folded=folded))
    if unit and (folder / 'ckpt_last.pt').exists():
        sections.append(Section('A sample', text=sample_text(folder)))
    return sections + settings


def game_caption(path: Path) -> str:
    """Return what a game's file name says: eval_NAME_solved.gif, eval_NAME_failed.gif."""
    name, _, end = path.stem.removeprefix('eval_').rpartition('_')
    record = read_json(path.with_name(f'eval_{name}.json'))
    level = f'Level {record[f"{end}_level"]} of {name}' if f'{end}_level' in record else name
    return f'{level}: {"solved" if end == "solved" else "not solved"}'


def sample_text(folder: Path) -> str:
    """Return what sample.py prints for a run's last checkpoint."""
    print(f'sampling from {folder / "ckpt_last.pt"}', flush=True)
    command = [sys.executable, 'sample.py', f'--out_dir={folder.resolve()}']
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    return done.stdout or done.stderr


def sweep_sections(folder: Path, logs: dict, configs: dict) -> list[Section]:
    """Return the page of a sweep: a summary of its tables, what sweep.py has drawn and listed, and
    the logs that are there."""
    about = read_json(folder / 'runs.json')
    runs = about.get('runs', [])
    unit = ''  # a loss without a config says 'nats'
    for config in configs.values():
        unit = 'byte' if config.get('tokenizer') == 'bytes' else 'token'
    tables = {path: read_csv(path) for path in sorted(folder.glob('*.csv'))}
    facts = {}
    for rows in tables.values():
        facts |= best_allocations(rows, unit)
    for key, x in about.items():
        if key.startswith('best_'):  # of sweep.best_depths
            facts['How sure the best depth is'] = str(x).replace('feedforward', 'non-recurrent')
    if not facts:
        for variant in ('recurrent', 'non-recurrent'):
            facts |= best_run(variant, logs, configs)
    facts['Runs'] = str(len(runs or logs))
    if logs:
        facts['Training time in all'] = duration(
            sum(log[-1].get('seconds', 0) for log in logs.values())
        )
    names = {'plan': 'Plan', 'device': 'Device', 'torch': 'torch'}
    names |= {'commit': 'Commit', 'drawn_at_commit': 'Drawn at commit'}
    facts |= {name: str(about[key]) for key, name in names.items() if about.get(key)}
    sections = [Section('Summary', facts=facts, text=about.get('command', ''))]
    drawings = [
        svg_picture(path.read_bytes(), picture_title(path.stem))
        for path in sorted(folder.glob('*.svg'))
    ]
    if drawings:
        sections.append(Section('Figures', pictures=drawings))
    if logs:
        sections.append(Section('Curves', pictures=sweep_curves(logs, configs, unit)))
        runs = [run_record(path, log, configs[path]) for path, log in logs.items()]
    changed, *settings = setting_sections(list(configs.values())) or [None]
    if changed:
        sections.append(changed)
    for path, rows in tables.items():
        sections.append(Section(picture_title(path.stem), rows=table_rows(rows, unit)))
    if runs:
        hidden = ('model', 'reported', 'over_budget', 'device', 'device_name', 'torch')
        records = [{k: x for k, x in run.items() if k not in hidden} for run in runs]
        folded = f'{len(records)} runs' if len(records) > 20 else ''
        sections.append(Section('Runs', rows=table_rows(records, unit), folded=folded))
    return sections + settings


def picture_title(stem: str) -> str:
    """Return a heading for a file that sweep.py wrote: 'allocations_convglu' is 'Allocations,
    ConvGLU'."""
    name, _, model = stem.partition('_')
    return f'{name.capitalize()}, {MODELS[model]}' if model in MODELS else stem.replace('_', ' ')


def best_allocations(rows: list[dict], unit: str) -> dict[str, str]:
    """Return the best allocation of each variant and budget in a table of write_value_tables, and
    the gain from recurrence: the difference between the best losses."""
    key = next((k for k in ('mean_loss', 'mean_return') if rows and k in rows[0]), '')
    best = {}
    for row in rows if key else ():
        group = f'Best {variant_name(row.get("variant", ""))}, {row.get("budget", "")} budget'
        score = float(row[key]) * (1 if key == 'mean_loss' else -1)
        if group not in best or score < best[group][0]:
            best[group] = score, row
    what = nats(unit) if key == 'mean_loss' else 'return'
    facts = {
        group: f'{float(row[key]):.5g} {what}: L = {row["L"]}, E = {row["E"]}, d = {row["d"]}'
        for group, (_, row) in best.items()
    }
    if key == 'mean_loss' and len(best) == 2:
        scores = {variant: score for variant, (score, _) in best.items()}
        gain = sum(-x if 'non-' not in group else x for group, x in scores.items())
        facts['Gain from recurrence'] = f'{loss(gain)} {what}'
    return facts


def best_run(variant: str, logs: dict, configs: dict) -> dict[str, str]:
    """Return the value and the folder of the best run of a variant, {} if there is none."""
    values = {}
    for path, log in logs.items():
        same = configs[path].get('recurrent', True) == (variant == 'recurrent')
        if same and (value := run_value(log)) is not None:
            values[path] = -value if 'tokens' in log[-1] else value
    if not values:
        return {}
    path = max(values, key=values.get)
    what = 'loss' if 'tokens' in logs[path][-1] else 'return'
    return {f'Best {variant} run': f'{what} {run_value(logs[path]):.5g}: {path.name}'}


def run_record(path: Path, log: list[dict], config: dict) -> dict:
    """Return the line of a run in the table of a sweep."""
    last, sizes = log[-1], {'L': 'n_layer', 'E': 'n_expert', 'd': 'n_embd', 'seed': 'seed'}
    record = {'variant': 'recurrent' if config.get('recurrent', True) else 'non-recurrent'}
    record |= {name: config.get(setting) for name, setting in sizes.items()}
    keys = ('tokens', 'env_steps', 'val_loss', 'eval_return', 'eval_solve_rate', 'seconds')
    record |= {key: last.get(key) for key in keys}
    return record | {'folder': path.name}


def sweep_curves(logs: dict, configs: dict, unit: str) -> list[Picture]:
    """Return the curves of all runs, by color of L; non-recurrent runs are dotted."""
    is_text = any('tokens' in log[-1] for log in logs.values())
    figure, (axes,) = new_figure(1, 3.8, width=5)
    x, y = ('tokens', 'val_loss') if is_text else ('env_steps', 'return_1000')
    for path in sorted(logs, key=lambda path: configs[path].get('n_layer', 0)):
        config = configs[path]
        L, recurrent = config.get('n_layer', 0), config.get('recurrent', True)
        color, style = COLORS[L.bit_length() % len(COLORS)], '-' if recurrent else ':'
        label = f'L = {L}, ' + ('recurrent' if recurrent else 'non-recurrent')
        # the first record is from before training
        draw_curve(axes, logs[path][1:], x, y, label, color=color, lw=1, ls=style)
    if is_text:
        axes.set(xlabel=f'{unit}s (millions)', ylabel=f'validation loss (nats per {unit})')
    else:
        axes.set(xlabel='environment steps (millions)', ylabel='return, last 1,000 episodes')
    return [figure_picture(finish_figure(figure, ''))]


def write_report(folder: Path) -> Path:
    """Write FOLDER/report.html, one page with all its pictures in it, and return its path.

    The folder holds a run, or runs in its subfolders, or what sweep.py has drawn. Ends the script
    if it holds none of these; raises Mistake if a log is damaged.
    """
    need_packages(matplotlib=True, jinja2=True)
    import jinja2

    paths = sorted(path.parent for path in (*folder.glob('log.jsonl'), *folder.glob('*/log.jsonl')))
    logs = {path: log for path in paths if (log := read_log(path))}
    if not logs and not (folder / 'runs.json').exists():
        fail(f'report = {str(folder)!r}: no log.jsonl in it or in a subfolder, and no runs.json')
    configs = {path: read_json(path / 'config.json') for path in logs}
    if folder in logs:
        config, log = configs[folder], logs[folder]
        unit = ('byte' if config.get('tokenizer') == 'bytes' else 'token') * ('tokens' in log[-1])
        title, sections = describe_model(config), run_sections(folder, log, config, unit)
    else:
        plan = read_json(folder / 'runs.json').get('plan', folder.name)
        title, sections = f'Sweep: {plan}', sweep_sections(folder, logs, configs)
    template = jinja2.Environment(autoescape=True, trim_blocks=True).from_string(PAGE)
    page = template.render(title=title, folder=str(folder), sections=sections)
    write_text(page, folder / 'report.html')
    return folder / 'report.html'


def main() -> None:
    configure(globals(), quiet=True)
    if bool(report) == bool(solve_rates):
        fail('name one: --report=FOLDER of a run or a sweep, or --solve_rates=FOLDERS of agents')
    need_packages(matplotlib=True)
    if report:
        print(write_report(Path(report)))
        return
    folders = [Path(path) for name in solve_rates.split(',') for path in sorted(glob.glob(name))]
    folders = [path for path in folders if (path / 'log.jsonl').exists()]
    if not folders:
        fail(f'solve_rates = {solve_rates!r}: no such folder holds a log.jsonl')
    print('\n'.join(compare_solve_rates(folders)))


# The names until the scripts that import them have moved to the new ones.
new, finish, save, line, summary, value = (
    new_figure,
    finish_figure,
    save_figure,
    draw_line,
    summarize,
    run_value,
)
cells, groups, best, without, at_best = (
    summarize_cells,
    group_by,
    best_cell,
    without_setting,
    runs_at_best,
)
draw, tables, solve_table = draw_plan, write_value_tables, write_solve_table


if __name__ == '__main__':
    run_script(main)

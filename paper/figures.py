"""
Draw figures and write tables from the logs of runs.

For sweep.py: figures and tables of a plan. Its runs are a list of (Row, log), where a log is the
list of the records in log.jsonl. For the trainers: the curves of one run. As a script: the solve
rates of Sokoban agents by environment steps, beside those of published agents:

$ python figures.py --solve_rates='out/sokoban_*'     # writes out/solve_rates.png, svg, csv and md

report.py writes a page about a run or a sweep.

A language model's run is judged by its last validation loss (nats per token or byte; lower is
better), a Sokoban run by the mean of its last five logged episodic returns (higher is better).
Error bars are one standard deviation over seeds, or one standard error where the figure says so.
Colors are those of Okabe and Ito, which color-blind readers can tell apart; lines also differ in
their markers.
"""

import glob
import json
import math
import os
import statistics
import textwrap
from collections.abc import Callable, Iterable
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from configurator import Mistake, configure, first_line, run_script
from files import read_json, write_atomic, write_text

from common import need_packages

# fmt: off
solve_rates = ''               # folders of Sokoban runs, or patterns, separated by commas
reference = 'results/paper'    # folder with published results to show beside them; '': none
out_dir = 'out'                # folder for the figure and the table
# fmt: on

# matplotlib and pandas are imported by the functions that need them: training works without
if TYPE_CHECKING:
    from types import ModuleType

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9', '#000000')
MARKERS = 'osD^vPX'
# titles of the models of plans, and of the values of the setting `arch`
MODELS = {'transformer': 'Transformer', 'convlstm': 'ConvLSTM', 'convglu': 'ConvGLU'}
ARCHITECTURES = MODELS | {'experts': 'Parallel-Experts Transformer', 'lstm': 'LSTM'}
# keys of a log whose values must be finite numbers or null
NUMBERS = ('seconds', 'tokens', 'env_steps', 'val_loss', 'episodic_return', 'return_1000')
# labels of axes
SIZES = {'L': 'layers L', 'E': 'experts E per layer', 'd': 'width d'}
SETTINGS = {'radius': 'radius r: preceding experts that each expert reads'}
STANDARD_ERROR = 'bars: one standard error'
STANDARD_DEVIATION = 'bars: one standard deviation'
TEST_SPLIT = 'unfiltered-test'  # the split of all published solve rates


# ----------------------------------------------------------------------------- runs and logs


def variant_of(recurrent: bool) -> str:
    """Return the name of a variant in tables and figures."""
    return 'recurrent' if recurrent else 'non-recurrent'


def unit_of(configs: Iterable[dict]) -> str:
    """Return what the language models with these settings read: 'byte' or 'token'."""
    return 'byte' if any(c.get('tokenizer') == 'bytes' for c in configs) else 'token'


class Row(NamedTuple):
    """One run of a plan."""

    model: str  # 'transformer', 'convlstm' or 'convglu'
    recurrent: bool
    budget: str  # 'small', ...
    L: int
    E: int
    d: int
    overrides: tuple[tuple[str, object], ...] = ()  # further settings: ((name, value), ...)
    seed: int = 1

    @property
    def is_text(self) -> bool:
        return self.model == 'transformer'

    @property
    def script(self) -> str:
        return 'train_lm.py' if self.is_text else 'train_sokoban.py'

    @property
    def variant(self) -> str:
        return variant_of(self.recurrent)

    @property
    def name(self) -> str:
        """Return the name of the run's folder."""
        variant = self.variant.replace('-', '')
        overrides = ''.join(f'_{k}-{v}' for k, v in self.overrides)
        return f'{self.model}_{variant}_L{self.L}_E{self.E}_d{self.d}{overrides}_s{self.seed}'

    @property
    def cell(self) -> 'Row':
        """Return the row with seed 0, which the runs of all seeds have in common."""
        return self._replace(seed=0)


class Summary(NamedTuple):
    """Values over n seeds. error: their standard deviation, or the mean's standard error; NaN for
    one seed."""

    mean: float
    error: float
    n: int


def read_log(folder: str | os.PathLike) -> list[dict]:
    """Return the records of folder/log.jsonl. A last line without an end is left out, because it is
    still being written.

    Raises Mistake for a line that is no record, OSError if the file cannot be read.
    """
    path = Path(folder, 'log.jsonl')
    records = []
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


def import_pandas() -> 'ModuleType':
    need_packages(pandas=True)
    import pandas

    return pandas


def read_csv(path: str | os.PathLike) -> list[dict[str, str]]:
    """Return the rows of a CSV file, with all values as text."""
    table = import_pandas().read_csv(path, dtype=str, keep_default_na=False)
    return table.to_dict('records')


# ----------------------------------------------------------------------------- values


def run_value(log: list[dict]) -> float | None:
    """Return the value that a finished run is judged by (see above), None if the log has none."""
    returns = [r['episodic_return'] for r in log if r.get('episodic_return') is not None]
    return statistics.fmean(returns[-5:]) if returns else log[-1].get('val_loss')


def summarize(values: list[float]) -> Summary:
    """Return mean, standard deviation (N - 1; NaN for one value) and N."""
    deviation = statistics.stdev(values) if len(values) > 1 else math.nan
    return Summary(statistics.fmean(values), deviation, len(values))


def group_by(points: dict, key: Callable) -> dict:
    """Return {key(row): {row: x}} for points {row: x}, in the order of the points."""
    groups = {}
    for row, x in points.items():
        groups.setdefault(key(row), {})[row] = x
    return groups


def summarize_cells(runs: list) -> dict[Row, Summary]:
    """Return {cell: Summary over its seeds} of finished runs, in the order of the runs."""
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
    return row._replace(overrides=tuple((k, v) for k, v in row.overrides if k != name))


def runs_at_best(runs: list, name: str) -> list:
    """Return the runs of the best cells: one of each group that differs only in setting `name`."""
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
    """Return the name of a variant that published tables and old files call 'feedforward' or
    'nonrecurrent'."""
    return 'non-recurrent' if text in ('feedforward', 'nonrecurrent') else text


def paper_cells(reference: str, points: Iterable[Row]) -> dict[Row, Summary]:
    """Return the paper's returns for the variants and budgets of our cells, {} if it has none.

    reference: the folder with its tables, '' for none.
    """
    known = {(row.model, row.recurrent, row.budget) for row in points if not row.overrides}
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
        if (row.model, row.recurrent, row.budget) in known:
            deviation = math.sqrt(float(r['variance']))
            out[row] = Summary(float(r['mean_return']), deviation, int(r['n_seeds']))
    return out


# ----------------------------------------------------------------------------- drawing


def new_figure(columns: int, height: float = 2.8, sharey: bool = True, width: float = 3.4) -> tuple:
    """Return a figure and its row of panels. height, width: of a panel, in inches; the default is
    about the width of a column of a paper."""
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
    """Set the figure's title, and a note on a new line below it. Both are wrapped so that they fit
    the figure's width."""
    limit = 0.96 * figure.bbox.width
    title = title.replace(' = ', '\xa0=\xa0')  # 'L = 2' stays on one line
    # from about 18 characters per inch, shorten the lines until they fit
    for characters in range(int(18 * figure.get_figwidth()), 8, -2):
        lines = textwrap.wrap(title, characters) + textwrap.wrap(note, characters)
        text = figure.suptitle('\n'.join(lines))
        if text.get_window_extent(figure.canvas.get_renderer()).width <= limit:
            break


def finish_figure(figure: 'Figure', title: str, note: str = '') -> 'Figure':
    """Set the title, draw one legend for all panels below them, and return the figure."""
    handles = {}
    for axes in figure.axes:
        lines, labels = axes.get_legend_handles_labels()
        handles |= dict(zip(labels, lines, strict=True))
    if handles:
        longest = max(map(len, handles))
        # about 17 characters per inch, of which a line and the space around a label take 8
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
    """Label an axis of fractions in percent, with one decimal if it spans less than 5%."""
    from matplotlib.ticker import PercentFormatter

    low, high = axis.get_view_interval()
    axis.set_major_formatter(PercentFormatter(1, decimals=0 if high - low >= 0.05 else 1))


def draw_line(
    axes: 'Axes', points: dict, i: int, label: str, published: bool = False, **style: object
) -> None:
    """Draw points {x: Summary} with error bars, in the color and marker of line number i. Published
    results are dashed and have hollow markers."""
    xs = sorted(points)
    every = max(1, len(xs) // 8)
    options = {
        'color': COLORS[i % len(COLORS)],
        'marker': MARKERS[i % len(MARKERS)],
        'ms': 4,
        'lw': 1.2,
        'capsize': 2,
        'markevery': every,
        'errorevery': every,
    }
    if published:
        options |= {'ls': '--', 'mfc': 'white', 'alpha': 0.7}
    options |= style
    means = [points[x].mean for x in xs]
    errors = [points[x].error for x in xs]
    has_errors = not all(map(math.isnan, errors))
    axes.errorbar(xs, means, yerr=errors if has_errors else None, label=label, **options)


class Line(NamedTuple):
    """A line of a chart; the arguments of draw_line."""

    points: dict  # {x: Summary}
    i: int
    label: str
    published: bool = False


def line_chart(
    panels: dict[str, list[Line]], xlabel: str, ylabel: str, title: str, note: str
) -> 'Figure':
    """Return a figure with a panel for each {title: lines}, with a logarithmic x axis."""
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
    """Return a figure of the value by one size, with a line for each value of a second size and a
    panel for each variant. sizes: the two letters, such as 'Ld' for the value by L with a line for
    each d."""
    x, line_size = sizes
    panels = {}
    for variant, ours in group_by(points, attrgetter('variant')).items():
        paper = paper_cells(reference, ours)
        values = sorted({getattr(row, line_size) for row in (*ours, *paper)})
        panels[variant] = []
        for source, suffix in ((ours, ''), (paper, ', paper')):
            for size, cells in sorted(group_by(source, attrgetter(line_size)).items()):
                line = Line(
                    points={getattr(row, x): point for row, point in cells.items()},
                    i=values.index(size),
                    label=f'{line_size} = {size}{suffix}',
                    published=source is paper,
                )
                panels[variant].append(line)
    return line_chart(panels, SIZES[x], label, title, STANDARD_DEVIATION)


def saturation_figure(
    points: dict[Row, Summary], lines: str, reference: str, title: str, label: str
) -> 'Figure':
    """Return a figure of the best value with at most L layers, ours and the paper's, with a line
    for each variant (lines = 'variant'), or a panel for each variant and a line for each budget
    (lines = 'budget')."""
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
    """Return {x in millions: Summary of y over the logs} at the values of x that all logs have."""
    pandas = import_pandas()
    curves = [pandas.DataFrame(log).reindex(columns=[x, y]).dropna().astype(float) for log in logs]
    found = pandas.concat(curves).groupby(x)[y].agg(['mean', 'std', 'count'])
    found = found[found['count'] == len(logs)]
    return {at / 1e6: Summary(mean, std, int(n)) for at, mean, std, n in found.itertuples()}


def curve_figure(
    runs: list, points: dict[Row, Summary], title: str, label: str, token: str
) -> 'Figure':
    """Return a figure of loss or return over training data, for the best allocation of each variant
    and L.

    A loss is drawn over the last three quarters of training, because the first values would flatten
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
    """Return a figure of the value by a setting, with a line for each cell, and beside it the
    difference from the value at the default. values, default: in the form of Row.overrides."""
    figure, panels = new_figure(2, 3.4, sharey=False)
    cells = group_by(points, lambda row: row._replace(overrides=()))
    for i, (cell, part) in enumerate(cells.items()):
        shift = 0.06 * i  # so that error bars do not cover each other
        by_value = {values.index(row.overrides) + shift: point for row, point in part.items()}
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
    plan: str,
    changes: str,
    rows: list[Row],
    runs: list,
    token: str,
    reference: str,
    folder: str,
) -> list[str]:
    """Draw all figures of a plan from its finished runs and return their paths.

    changes: from sweep.changes_of_plan. token: what a language model reads, 'token' or 'byte'. For
    a plan of several budgets the figure is the saturation of all of them.
    """
    paths = []
    for model, points in group_by(summarize_cells(runs), attrgetter('model')).items():
        seeds = sorted({point.n for point in points.values()})
        count = f'{seeds[0]} to {seeds[-1]}' if len(seeds) > 1 else f'{seeds[0]}'
        title = f'{MODELS[model]}, {plan.replace("-", " ")}{changes}, {count} seed'
        if seeds[-1] > 1:
            title += 's'
        row = next(iter(points))
        label = f'validation loss (nats per {token})' if row.is_text else 'return'
        budgets = {row.budget for row in rows if row.model == model}
        figures = {}
        if len(budgets) > 1 and not row.overrides:
            figures['budgets'] = saturation_figure(points, 'budget', reference, title, label)
        elif plan.startswith('scaling'):
            figures['scaling'] = size_figure(points, 'EL', '', title, label)
        elif row.overrides:
            values = list(dict.fromkeys(row.overrides for row in rows if row.model == model))
            # the default is the first value, or for the radius the last: every expert reads all
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
    """Return a float with five significant digits, '' for NaN and None, and str(x) otherwise."""
    if isinstance(x, float):
        return '' if math.isnan(x) else f'{x:.5g}'
    return '' if x is None else str(x)


def markdown(lines: list[list[str]]) -> str:
    """Return a Markdown table; the first line holds the headings."""
    head, *body = (f'| {" | ".join(line)} |\n' for line in lines)
    return ''.join([head, '| --- ' * len(lines[0]) + '|\n', *body])


def write_table(rows: list[dict], folder: str, name: str) -> list[str]:
    """Write rows as name.csv and name.md and return the paths.

    The columns are the keys of the first row. A value that another row lacks stays empty.
    """
    table = import_pandas().DataFrame(rows, columns=list(rows[0]), dtype=object)
    table = table.map(format_number)
    paths = [os.path.join(folder, f'{name}.csv'), os.path.join(folder, f'{name}.md')]
    write_text(table.to_csv(index=False, lineterminator='\n'), paths[0])
    write_text(markdown([list(table), *table.values.tolist()]), paths[1])
    return paths


def cell_fields(rows: Iterable[Row]) -> dict[Row, dict]:
    """Return {cell: fields that name it in a table}.

    Every further setting of one of the cells has a column of its own.
    """
    names = dict.fromkeys(name for row in rows for name, _ in row.overrides)
    fields = {}
    for row in rows:
        fields[row] = {name: getattr(row, name) for name in ('variant', 'budget', 'L', 'E', 'd')}
        fields[row] |= {name: str(dict(row.overrides).get(name, '')) for name in names}
    return fields


def write_value_tables(runs: list, reference: str, folder: str, tuned: str) -> list[str]:
    """Write mean, variance (N - 1) and number of seeds of every cell beside the paper's values, one
    table for each model, and return the paths.

    tuned: name of the tuned setting, which the paper's cells do not have; '' for none.
    """
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
    """Write the solve rates of cells, in a table for each model, and return the paths.

    rates: {cell: [solve rate of each seed]} on the split `levels` ('': the runs' evaluation
    levels). On TEST_SPLIT, rows of the paper (for the same variants and budgets) and of published
    agents follow. tuned: as in write_value_tables.
    """
    column = f'{(levels or "evaluation_levels").replace("-", "_")}_percent'
    paths = []
    for model, cells in group_by(rates, attrgetter('model')).items():
        rows = []
        for row, fields in cell_fields(cells).items():
            mean, deviation, n = summarize([100 * rate for rate in rates[row]])
            rows.append({**fields, column: mean, 'std': deviation, 'n_seeds': n})
        known = {
            (row.model, row.recurrent, row.budget)
            for row in cells
            if not without_setting(row, tuned).overrides
        }
        if levels == TEST_SPLIT and reference:
            for r in read_csv(os.path.join(reference, 'sokoban_solve_rates.csv')):
                cell = ('convlstm', r['variant'] == 'recurrent', r['budget'])
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
    if not reference or not path.exists():
        return []
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
        for r in read_csv(path)
    ]


def describe_model(config: dict) -> str:
    """Return the model of a config.json as text: 'ConvGLU, recurrent, L = 2, E = 4, d = 32'."""
    arch = config.get('arch', 'experts')
    parts = [ARCHITECTURES.get(arch, arch)]
    if arch not in ('transformer', 'lstm') and 'recurrent' in config:
        parts.append(variant_of(config['recurrent']))
    for symbol, name in (('L', 'n_layer'), ('E', 'n_expert'), ('d', 'n_embd')):
        if name in config:
            parts.append(f'{symbol} = {config[name]}')
    return ', '.join(parts)


def solve_rate_figure(logs: dict[str, list[dict]], published: list[dict], title: str) -> 'Figure':
    """Return a figure of the greedy solve rates of runs, {label: log}, and of published agents by
    environment steps."""
    figure, (axes,) = new_figure(1, 4.4, width=6.8)
    for i, (label, log) in enumerate(logs.items()):
        points = [r for r in log if r.get('eval_solve_rate') is not None]
        xs, ys = [r['env_steps'] / 1e6 for r in points], [r['eval_solve_rate'] for r in points]
        n = len(COLORS)
        style = {'color': COLORS[i % n], 'marker': MARKERS[i % n], 'ms': 3, 'lw': 1.2}
        if i >= n:  # colors and markers repeat
            style |= {'mfc': 'white', 'ls': '--'}
        axes.plot(xs, ys, label=label, markevery=max(1, len(xs) // 8), **style)
    longest = max((log[-1].get('env_steps', 0) for log in logs.values()), default=0)
    agents = dict.fromkeys(r['agent'] for r in published)
    for agent, style in zip(agents, ('-.', '--', ':'), strict=False):
        rows = [r for r in published if r['agent'] == agent and r['env_steps'] <= 1.05 * longest]
        xs, ys = [r['env_steps'] / 1e6 for r in rows], [r['solve_rate'] for r in rows]
        if xs:
            axes.plot(xs, ys, color='gray', ls=style, lw=1.2, label=f'{agent}, published')
    axes.set(xlabel='environment steps (millions)', ylabel='levels solved', ylim=(0, None))
    percent_axis(axes.yaxis)
    return finish_figure(figure, title)


def compare_solve_rates(folders: list[Path]) -> list[str]:
    """Draw and tabulate the solve rates of runs of train_sokoban.py; return the paths."""
    published = published_agents(reference)
    logs, rows = {}, []
    splits = {}  # the names as keys, in order
    for folder in folders:
        config, log = read_json(folder / 'config.json'), read_log(folder)
        evaluated = [r for r in log if r.get('eval_solve_rate') is not None]
        if not evaluated:
            raise Mistake(f'solve_rates: {folder}/log.jsonl has no evaluation of a Sokoban agent')
        label = describe_model(config)
        if label in logs:
            label += f' ({folder})'
        logs[label] = evaluated
        last = evaluated[-1]
        splits[config.get('eval_split', 'unknown levels')] = None
        row = {
            'agent': label,
            'environment steps': last['env_steps'],
            'levels': config.get('eval_split', ''),
            'solved, %': 100 * last['eval_solve_rate'],
            'return': last['eval_return'],
            'seeds': 1,
        }
        rows.append(row)
    title = f'greedy, evaluated on {", ".join(splits)}'
    if published:
        title += f'; published agents on {TEST_SPLIT}'
        # of each published agent the rows at the numbers of steps nearest to those of the runs
        steps = sorted({r['env_steps'] for r in published})
        nearest = {min(steps, key=lambda x: abs(x - row['environment steps'])) for row in rows}
        for r in published:
            if r['env_steps'] in nearest:
                row = {
                    'agent': f'{r["agent"]}, published',
                    'environment steps': r['env_steps'],
                    'levels': TEST_SPLIT,
                    'solved, %': 100 * r['solve_rate'],
                    'return': r['return'],
                    'seeds': r['seeds'],
                }
                rows.append(row)
    os.makedirs(out_dir, exist_ok=True)
    paths = save_figure(solve_rate_figure(logs, published, title), out_dir, 'solve_rates')
    return paths + write_table(rows, out_dir, 'solve_rates')


# ----------------------------------------------------------------------------- one run


def draw_curve(axes: 'Axes', log: list[dict], x: str, y: str, label: str, **style: object) -> None:
    """Draw the values of y in a log, if there are any, over x in millions."""
    points = [(r[x] / 1e6, r[y]) for r in log if r.get(x) is not None and r.get(y) is not None]
    if points:
        axes.plot(*zip(*points, strict=True), label=label, **style)


TRAINING = {'color': COLORS[0], 'lw': 1}
EVALUATION = {'color': COLORS[1], 'lw': 1.5, 'marker': 'o', 'ms': 3}


def draw_losses(axes: 'Axes', log: list[dict], unit: str) -> None:
    """Draw the losses of a language model over training data. unit: 'token' or 'byte'."""
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
    """Return a figure of one run: losses of a language model, whose unit is 'token' or 'byte', or,
    without a unit, return and solve rate of an agent."""
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


def main() -> None:
    configure(globals(), quiet=True)
    need_packages(matplotlib=True, pandas=True)
    folders = []
    for name in solve_rates.split(','):
        logs = sorted(glob.glob(os.path.join(name.strip(), 'log.jsonl')))
        if not logs:
            raise Mistake(
                f'solve_rates: {name.strip()!r} is no folder with a run of train_sokoban.py'
            )
        folders += [Path(path).parent for path in logs]
    print('\n'.join(compare_solve_rates(folders)))


if __name__ == '__main__':
    run_script(main)

"""
Figures and tables of a sweep, from its runs' logs alone: sweep.py calls `draw`, `tables` and
`solve_table`. Runs come as a list of (Row, log), a log being the objects of log.jsonl. Figures are
written as PNG and SVG, tables as Markdown and CSV. Last, a single run's curves.

The value of a language model's run is its last validation loss (nats a token), less is better; that
of a Sokoban run the mean of its final five logged episodic returns, more is better (design section
5). Bars are one standard deviation over seeds, or one standard error where the figure says so.
Colours are Okabe and Ito's, which colour-blind readers can tell apart; lines differ in markers too.
"""

import csv
import io
import json
import math
import os
import statistics
import textwrap
from collections.abc import Callable, Iterable
from functools import partial
from operator import attrgetter as by
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from configurator import fail, first_line, write_atomic, write_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9', '#000000')
MARKERS = 'osD^vPX'
NAMES = {'transformer': 'Transformer', 'convlstm': 'ConvLSTM', 'convglu': 'ConvGLU'}
NUMBERS = 'seconds tokens env_steps val_loss episodic_return return_1000'.split()  # read of a log
SIZES = {'L': 'levels L', 'E': 'experts E a level'}
SETTINGS = {'radius': 'radius r: preceding experts that each one hears'}
STANDARD_ERROR = '\nbars: one standard error'
COLUMN = 3.4  # inches, a column of a paper


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


class LogError(ValueError):
    """A log cannot be read; the message is one line and names the file."""


def read_log(folder: str) -> list[dict]:
    """The objects of folder/log.jsonl, but a last line being written. FileNotFoundError,
    LogError."""
    path, records = os.path.join(folder, 'log.jsonl'), []
    try:
        with open(path, 'rb') as file:
            lines = file.read().split(b'\n')[:-1]
    except FileNotFoundError:
        raise
    except OSError as error:
        raise LogError(f'{path}: {error.strerror}') from None
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            if type(record['step']) is not int:
                raise ValueError('step is no integer')
            if not all(x is None or math.isfinite(x) for x in map(record.get, NUMBERS)):
                raise ValueError('a number is not finite')
        except (ValueError, TypeError, LookupError, OverflowError, RecursionError) as error:
            raise LogError(f'{path}:{number}: not a line of a log ({first_line(error)})') from None
        records.append(record)
    return records


# ----------------------------------------------------------------------------- values


def value(row: Row, log: list[dict]) -> float | None:
    """What a finished run is judged by; None where the log does not have it."""
    if row.is_text:
        return log[-1].get('val_loss')
    returns = [r['episodic_return'] for r in log if r.get('episodic_return') is not None]
    return statistics.fmean(returns[-5:]) if returns else None


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
        values.setdefault(row.cell, []).append(value(row, log))
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
    return [(row, log) for row, log in runs if row.cell in keep]


def chosen_by_return(runs: list) -> list[Row]:
    """Of each model, budget, variant and L the cell with the highest mean training return."""
    agents = cells([(row, log) for row, log in runs if not row.is_text])
    parts = groups(agents, by('model', 'budget', 'recurrent', 'L'))
    return [best(part) for part in parts.values()]


def saturation(points: dict) -> dict:
    """{L: the best cell's (mean, standard error, N) with at most L levels}, of those with most
    seeds."""
    most = max(n for _, _, n in points.values())
    whole, out = {row: p for row, p in points.items() if p[2] == most}, {}
    for L in sorted({row.L for row in whole}):
        out[L] = whole[best({row: p for row, p in whole.items() if row.L <= L})]
    return with_errors(out)


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


def read_csv(folder: str, name: str, numbers: Iterable[str]) -> list[dict]:
    """A table of the paper, its columns `numbers` as floats (an empty field: NaN)."""
    path = os.path.join(folder, name)
    where = f'reference = {folder!r}: {path}'
    try:
        with open(path, newline='', encoding='utf-8-sig') as file:
            table = list(csv.DictReader(file))
        rows = [row | {k: float(row[k] or 'nan') for k in numbers} for row in table]
        if any(math.isinf(row[k]) for row in rows for k in numbers):
            raise ValueError('an infinite number')
    except OSError as error:
        fail(f'{where}: {error.strerror}')
    except (csv.Error, KeyError, TypeError, ValueError) as error:
        fail(f"{where}: not the paper's table: {first_line(error)}")
    return rows


def paper_rows(reference: str, like: Row, name: str, numbers: Iterable[str]) -> dict:
    """{cell: the paper's} of a row's model, budget and variant; {} where the paper has none."""
    if not reference or like.model != 'convlstm' or like.more:
        return {}
    rows = {}
    for r in read_csv(reference, name, ['L', 'E', 'd', *numbers]):
        ours = (r.get('variant'), r.get('budget')) == (like.variant, like.budget)
        if ours and not math.isnan(r['L'] + r['E'] + r['d']):
            rows[like.cell._replace(**{k: int(r[k]) for k in 'LEd'})] = r
    return rows


def paper_cells(reference: str, points: dict) -> dict:
    """The paper's returns, as `points` has ours."""
    numbers = ('mean_return', 'variance', 'n_seeds')
    rows, out = paper_rows(reference, next(iter(points)), 'sokoban_returns.csv', numbers), {}
    for row, r in rows.items():
        if not math.isnan(r['n_seeds']):
            deviation = math.sqrt(max(0.0, r['variance']))
            out[row] = r['mean_return'], deviation, max(1, int(r['n_seeds']))
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
    layout = {'figsize': (COLUMN * columns, height), 'layout': 'constrained'}
    figure, panels = plt.subplots(1, columns, sharey=sharey, squeeze=False, **layout)
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


def line(axes: 'Axes', points: dict, i: int, label: str, ours: bool = True) -> None:
    """{x: (mean, deviation, N)} with error bars; the paper's dashed and hollow."""
    xs = sorted(points)
    style = {'ls': '-'} if ours else {'ls': '--', 'mfc': 'white', 'alpha': 0.7}
    style |= {'color': COLORS[i % 7], 'marker': MARKERS[i % 7], 'ms': 4, 'lw': 1.2, 'capsize': 2}
    means, bars = ([points[x][k] for x in xs] for k in (0, 1))
    known = not all(map(math.isnan, bars))
    axes.errorbar(xs, means, yerr=bars if known else None, label=label, **style)


def band(axes: 'Axes', points: dict, i: int, label: str | None, **style) -> None:
    """{x: (mean, deviation, N)} as a line within its spread."""
    xs = sorted(points)
    mean, spread, _ = np.array([points[x] for x in xs]).reshape(-1, 3).T
    style = {'lw': 1.2, 'ms': 3, 'markevery': max(1, len(xs) // 8)} | style
    axes.plot(xs, mean, color=COLORS[i % 7], label=label, **style)
    low, high = mean - np.nan_to_num(spread), mean + np.nan_to_num(spread)
    axes.fill_between(xs, low, high, color=COLORS[i % 7], alpha=0.2, lw=0)


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
    return chart(panels, SIZES[x], label, title)


def saturation_figure(points: dict, name: str, reference: str, title: str, label: str) -> 'Figure':
    """The best of at most L levels and the paper's: a line a 'variant', or a 'budget' in a panel a
    variant."""
    keys, panels = list(groups(points, by(name))), {}
    parts = groups(points, by('variant')) if name == 'budget' else {'': points}
    for which, mine in parts.items():
        panels[which] = []
        for key, part in groups(mine, by(name)).items():
            i, its = keys.index(key), f'{key} budget' if name == 'budget' else key
            panels[which].append((saturation(part), i, its))
            if paper := paper_cells(reference, part):
                panels[which].append((saturation(paper), i, f'{its}, paper', False))
    return chart(panels, 'at most L levels', f'best {label}', title, STANDARD_ERROR)


def curve_figure(runs: list, points: dict, title: str) -> 'Figure':
    """Returns over environment steps: each variant's and L's best allocation, mean and one
    deviation."""
    parts = groups(points, by('variant'))
    figure, panels = new(len(parts), 3.2)
    for axes, (variant, mine) in zip(panels, parts.items(), strict=True):
        for i, (_, part) in enumerate(sorted(groups(mine, by('L')).items())):
            row, logs = best(part), []
            for log in (log for run, log in runs if run.cell == row):
                pairs = [(r.get('env_steps'), r.get('return_1000')) for r in log]
                logs.append({x / 1e6: y for x, y in pairs if None not in (x, y)})
            steps = set.intersection(*map(set, logs))  # that all seeds have logged
            its = {x: summary([log[x] for log in logs]) for x in steps}
            label = f'L = {row.L}, E = {row.E}, d = {row.d}'
            band(axes, its, i, label, marker=MARKERS[i % 7])
        axes.set(title=variant, xlabel='environment steps (millions)')
        # its own, below: the other panel's allocations are others
        axes.legend(loc='upper center', bbox_to_anchor=(0.5, -0.22), ncols=2)
    panels[0].set_ylabel('return, mean of 1,000 games')
    figure.suptitle(title)
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
            if not row.is_text:
                figures['curves'] = curve_figure(runs, points, title)
        for name, figure in figures.items():
            paths += save(figure, into, f'{name}_{model}')
    return paths


# ----------------------------------------------------------------------------- tables


def field(x: str | int | float, digits: int) -> str:
    """`digits` decimals, two significant digits where that would hide a small number; nothing for
    NaN."""
    if not isinstance(x, float):
        return str(x)
    if math.isnan(x):
        return ''
    return f'{x:.2g}' if 0 < abs(x) < 10 ** (1 - digits) else f'{x:.{digits}f}'


def write_table(rows: list[dict], into: str, name: str, digits: int = 4) -> list[str]:
    """As name.csv and name.md, the first row's keys as columns; what a row lacks stays empty."""
    lines = [[field(row.get(k, ''), digits) for k in rows[0]] for row in rows]
    text, header = io.StringIO(), list(rows[0])
    csv.writer(text, lineterminator='\n').writerows([header, *lines])
    marks = [f'| {" | ".join(row)} |\n' for row in [header, ['---'] * len(header), *lines]]
    paths = [os.path.join(into, f'{name}.{form}') for form in ('csv', 'md')]
    for path, content in zip(paths, (text.getvalue(), ''.join(marks)), strict=True):
        write_text(content, path)
    return paths


def cell_fields(rows: Iterable[Row]) -> dict[Row, dict]:
    """What cell a table's line is of; the settings by which the cells differ have a column each."""
    names, out = dict.fromkeys(name for row in rows for name, _ in row.more), {}
    for row in rows:
        out[row] = {name: getattr(row, name) for name in ('variant', 'budget', 'L', 'E', 'd')}
        out[row] |= {name: str(dict(row.more).get(name, '')) for name in names}
    return out


def tables(runs: list, reference: str, into: str) -> list[str]:
    """Mean, variance (N - 1) and N of every cell, a table a model in the paper's layout."""
    paths = []
    for model, points in groups(cells(runs), by('model')).items():
        body, paper = [], {}
        for part in groups(points, by('recurrent', 'budget')).values():
            paper |= paper_cells(reference, part)
        for row, fields in cell_fields(points).items():
            mean, deviation, n = points[row]
            name = 'mean_loss' if row.is_text else 'mean_return'
            body.append({**fields, name: mean, 'variance': deviation**2, 'n_seeds': n})
            if paper:
                mean, deviation, _ = paper.get(row, (math.nan, math.nan, 0))
                body[-1] |= {'paper_mean': mean, 'paper_variance': deviation**2}
        paths += write_table(body, into, f'table_{model}')
    return paths


def run_record(row: Row, log: list[dict]) -> dict:
    """A run in runs.json."""
    data = 'tokens' if row.is_text else 'env_steps'
    about = {'name': row.name, 'model': row.model, **cell_fields([row])[row], **dict(row.more)}
    about |= {'seed': row.seed, 'value': value(row, log), 'updates': log[-1]['step']}
    return about | {k: log[-1].get(k) for k in (data, 'seconds')}


def solve_table(rates: dict, levels: str, reference: str, into: str) -> list[str]:
    """rates: {cell: [solve rate of each seed]} on `levels`, in the paper's layout; on
    unfiltered-test with the paper's own rows."""
    paths, reference = [], reference if levels == 'unfiltered-test' else ''
    where = os.path.splitext(os.path.basename(levels or 'held_out'))[0].replace('-', '_')
    name, theirs = f'{where}_percent', ('unfiltered_test_percent', 'std')
    for model, rows in groups(rates, by('model')).items():
        paper, body = {}, []
        for row, fields in cell_fields(rows).items():
            mean, deviation, n = summary([100 * rate for rate in rates[row]])
            paper |= paper_rows(reference, row, 'sokoban_solve_rates.csv', theirs)
            body.append({**fields, name: mean, 'std': deviation, 'n_seeds': n})
        for row, fields in cell_fields(paper).items():
            about = {'variant': f'{row.variant}, paper'} | {k: paper[row][k] for k in theirs}
            body.append(fields | about)
        if reference:
            for r in read_csv(reference, 'sokoban_baselines.csv', theirs):
                about = f'{r["method"]}, {r["training_steps"]}, paper'
                body.append({'variant': about} | {k: r[k] for k in theirs})
        paths += write_table(body, into, f'solve_{model}', 2)
    return paths


# ----------------------------------------------------------------------------- one run


def curve(axes: 'Axes', log: list[dict], x: str, key: str, label: str, **style) -> None:
    """What a log has of `key`, over `x` in millions."""
    points = [(r[x] / 1e6, r[key]) for r in log if None not in (r.get(x), r.get(key))]
    if points:
        axes.plot(*zip(*points, strict=True), label=label, **style)


def plot_losses(out_dir: str, unit: str, title: str) -> str:
    """Loss curves of out_dir/log.jsonl, in nats a `unit`, as out_dir/loss.png -> its path."""
    log, (figure, (axes,)) = read_log(out_dir), new(1)
    curve(axes, log, 'tokens', 'train_loss', 'train loss', color=COLORS[0], lw=1, alpha=0.6)
    curve(axes, log, 'tokens', 'val_loss', 'val loss', color=COLORS[1], marker='o', ms=4)
    axes.set(xlabel=f'training {unit}s (millions)', ylabel=f'loss (nats a {unit})')
    return save(finish(figure, title), out_dir, 'loss', ('png',))[0]


def open_trackers(
    config: dict, tensorboard: bool, wandb_project: str
) -> tuple[Callable[[dict], object], Callable[[], object]]:
    """-> write(record), close() for a run's TensorBoard, and Weights & Biases if a project is
    named."""
    writer, run, out_dir = None, None, config['out_dir']
    if tensorboard:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(out_dir)
    if wandb_project:
        import wandb

        run = wandb.init(project=wandb_project, name=str(out_dir), dir=out_dir, config=config)

    def write(record: dict) -> None:
        for name, x in record.items() if writer else ():
            if name != 'step' and x is not None:
                writer.add_scalar(name, x, record['step'])
        if run:
            run.log(record, step=record['step'])

    def close() -> None:
        if writer:
            writer.close()
        if run:
            run.finish()

    return write, close

"""
Figures and tables of a sweep, from its runs' logs alone. sweep.py calls `draw`, `tables` and `solve_table`; runs come as a list of (row,
log): sweep.Row and the objects of log.jsonl. Every figure is written as PNG and SVG, every table as Markdown and CSV.

The value of a language model's run is its last validation loss (nats a token), less is better; that of a Sokoban run the mean of its final
five logged episodic returns, more is better (design section 5). Bars at points are one standard deviation over seeds; in the figures of the
best allocations and of the ablations they are one standard error, and these say so. Colours are Okabe and Ito's, which colour-blind readers can tell apart; every line has its own marker too.
"""

import csv
import io
import json
import math
import os
import statistics
import textwrap
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING


from configurator import fail, first_line, write_atomic, write_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from sweep import Row

COLORS = ('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9', '#000000')
MARKERS = 'osD^vPX'
KINDS = {True: 'recurrent', False: 'not recurrent'}
NAMES = {'transformer': 'Transformer', 'convlstm': 'ConvLSTM', 'convglu': 'ConvGLU'}
NUMBERS = (
    'seconds',
    'tokens',
    'env_steps',
    'val_loss',
    'episodic_return',
    'return_1000',
)  # what is read of a log line
COLUMN = 3.4  # inches, a column of a paper


class LogError(ValueError):
    """A log cannot be read; the message is one line and names the file."""


def read_log(folder: str) -> list[dict]:
    """The objects of folder/log.jsonl. A last line that is being written does not count. FileNotFoundError, LogError."""
    path = os.path.join(folder, 'log.jsonl')
    try:
        with open(path, 'rb') as file:
            lines = file.read().split(b'\n')[:-1]
    except FileNotFoundError:
        raise
    except OSError as error:
        raise LogError(f'{path}: {error.strerror}') from None
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict) or type(record.get('step')) is not int:
            raise LogError(f'{path}:{number}: not a line of a log')
        for key in NUMBERS:
            if type(record.get(key, 0)) not in (int, float, type(None)) or not math.isfinite(
                record.get(key) or 0
            ):
                raise LogError(f'{path}:{number}: {key} is not a number')
        records.append(record)
    return records


# ----------------------------------------------------------------------------- values


def value(row: 'Row', log: list[dict]) -> float | None:
    """What a finished run is judged by; None where the log does not have it."""
    if row.is_text:
        return log[-1].get('val_loss')
    returns = [r['episodic_return'] for r in log if r.get('episodic_return') is not None][-5:]
    return sum(returns) / len(returns) if returns else None


def summary(values: list[float]) -> tuple[float, float, int]:
    """Mean, standard deviation (N - 1; NaN for one), N."""
    return (
        statistics.fmean(values),
        statistics.stdev(values) if len(values) > 1 else math.nan,
        len(values),
    )


def cells(runs: list) -> dict:
    """{row with seed 0: (mean, standard deviation, N)}, in the order of the runs, which all have a value."""
    values = {}
    for row, log in runs:
        values.setdefault(row._replace(seed=0), []).append(value(row, log))
    return {row: summary(x) for row, x in values.items()}


def best(rows: dict) -> 'Row':
    """The row with the best mean, among those with the most seeds."""
    most = max(n for _, _, n in rows.values())
    return min(
        (row for row in rows if rows[row][2] == most),
        key=lambda row: rows[row][0] if row.is_text else -rows[row][0],
    )


def without(row: 'Row', name: str) -> 'Row':
    """The row but for its own setting `name`."""
    return row._replace(more=tuple((k, v) for k, v in row.more if k != name))


def at_best(runs: list, name: str) -> list:
    """The runs of the cells that are best among those which differ in the setting `name` alone."""
    keep = bests(cells(runs), lambda row: without(row, name))
    return [(row, log) for row, log in runs if row._replace(seed=0) in keep]


def bests(points: dict, key: Callable) -> list:
    """Of the cells that have one `key`, the best."""
    return [best({row: points[row] for row in rows}) for rows in groups(points, key).values()]


def read_csv(folder: str, name: str, numbers: list[str]) -> list[dict]:
    """A table of the paper, its columns `numbers` as floats (an empty field: NaN)."""
    path = os.path.join(folder, name)
    try:
        with open(path, newline='', encoding='utf-8-sig') as file:
            rows = [
                row | {k: float(row[k]) if row[k] else math.nan for k in numbers}
                for row in csv.DictReader(file)
            ]
    except OSError as error:
        fail(f'reference = {folder!r}: {path}: {error.strerror}')
    except (csv.Error, KeyError, TypeError, ValueError) as error:
        fail(f"reference = {folder!r}: {path}: not the paper's table: {first_line(error)}")
    if any(math.isinf(row[k]) for row in rows for k in numbers):
        fail(f'reference = {folder!r}: {path}: holds an infinite number')
    return rows


def paper_rows(reference: str, like: 'Row', name: str, numbers: list[str]) -> dict:
    """{row: the paper's} of a row's model, budget and kind; {} where the paper has none."""
    if not reference or like.model != 'convlstm' or like.more:
        return {}
    table = read_csv(reference, name, ['L', 'E', 'd', *numbers])
    return {
        like._replace(L=int(r['L']), E=int(r['E']), d=int(r['d']), seed=0): r
        for r in table
        if (r.get('variant'), r.get('budget')) == (like.kind, like.budget)
        and r['L'] == r['L']
        and r['E'] == r['E']
        and r['d'] == r['d']
    }


def paper_cells(reference: str, like: 'Row') -> dict:
    """The paper's returns, as `cells` has ours."""
    rows = paper_rows(
        reference, like, 'sokoban_returns.csv', ['mean_return', 'variance', 'n_seeds']
    )
    return {
        row: (r['mean_return'], math.sqrt(max(0.0, r['variance'])), max(1, int(r['n_seeds'])))
        for row, r in rows.items()
        if r['n_seeds'] == r['n_seeds']
    }


# ----------------------------------------------------------------------------- figures


def new(columns: int, height: float = 2.5, sharey: bool = True) -> tuple:
    """A row of panels with one y axis, unless sharey is off, a column's width each."""
    import matplotlib

    matplotlib.use('Agg')
    import matplotlib.pyplot as plt

    plt.rcParams.update(
        {
            'font.size': 8,
            'axes.titlesize': 8,
            'legend.fontsize': 7,
            'svg.hashsalt': 'figures',
            'svg.fonttype': 'none',
        }
    )
    figure, panels = plt.subplots(
        1,
        columns,
        figsize=(COLUMN * columns, height),
        sharey=sharey,
        squeeze=False,
        layout='constrained',
    )
    for axes in panels[0]:
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
    return figure, panels[0]


def save(figure: 'Figure', into: str, name: str) -> list[str]:
    import matplotlib.pyplot as plt

    paths = [os.path.join(into, f'{name}.{kind}') for kind in ('png', 'svg')]
    for path, more in zip(paths, ({'dpi': 200}, {'metadata': {'Date': None}}), strict=True):
        write_atomic(
            path, lambda file, path=path, more=more: figure.savefig(file, format=path[-3:], **more)
        )
    plt.close(figure)
    return paths


def powers(axes: 'Axes', values: list[int], label: str) -> None:
    """A logarithmic x axis with the values that occur."""
    axes.set_xscale('log', base=2)
    axes.set_xticks(sorted(set(values)), [str(v) for v in sorted(set(values))])
    axes.minorticks_off()
    axes.set_xlabel(label)


def line(axes: 'Axes', points: dict, i: int, label: str, ours: bool = True) -> None:
    """{x: (mean, deviation, N)} with error bars; the paper's dashed and hollow."""
    xs = sorted(points)
    style = {'ls': '-'} if ours else {'ls': '--', 'mfc': 'white', 'alpha': 0.7}
    bars = [points[x][1] for x in xs]
    axes.errorbar(
        xs,
        [points[x][0] for x in xs],
        yerr=None if all(map(math.isnan, bars)) else bars,
        label=label,
        ms=4,
        lw=1.2,
        capsize=2,
        color=COLORS[i % 7],
        marker=MARKERS[i % 7],
        **style,
    )


def with_errors(points: dict) -> dict:
    """{x: (mean, deviation, N)} -> {x: (mean, standard error, N)}"""
    return {x: (mean, deviation / math.sqrt(n), n) for x, (mean, deviation, n) in points.items()}


def differences(points: dict, default: object) -> dict:
    """{x: (mean, deviation, N)} -> {x: (mean minus that of `default`, standard error of the difference, N)}; the default's own has no error.
    Seeds count as independent."""
    means = with_errors(points)
    base, base_error, _ = means[default]
    return {
        x: (mean - base, math.nan if x == default else math.hypot(error, base_error), n)
        for x, (mean, error, n) in means.items()
    }


def groups(rows: 'Iterable[Row]', key: Callable) -> dict:
    out = {}
    for row in rows:
        out.setdefault(key(row), []).append(row)
    return out


def seeds_of(points: dict) -> str:
    counts = sorted({n for _, _, n in points.values()})
    return (
        f'{counts[0]} seed{"s" * (counts[0] > 1)}'
        if len(counts) == 1
        else f'{counts[0]} to {counts[-1]} seeds'
    )


def allocation_figure(points: dict, reference: str, title: str, label: str) -> 'Figure':
    """Value by L, a line a width, a panel a kind."""
    kinds = sorted({row.recurrent for row in points}, reverse=True)
    figure, panels = new(len(kinds))
    for axes, recurrent in zip(panels, kinds, strict=True):
        mine = {row: p for row, p in points.items() if row.recurrent == recurrent}
        paper = paper_cells(reference, next(iter(mine)))
        widths = sorted({row.d for row in (*points, *paper)})
        for data, ours in ((mine, True), (paper, False)):
            for d, rows in groups(data, lambda row: row.d).items():
                line(
                    axes,
                    {row.L: data[row] for row in rows},
                    widths.index(d),
                    f'd = {d}' + ('' if ours else ', paper'),
                    ours,
                )
        powers(axes, [row.L for row in (*mine, *paper)], 'levels L')
        axes.set_title(KINDS[recurrent])
        axes.legend(frameon=False, ncols=2 if len(widths) > 3 or paper else 1)
    panels[0].set_ylabel(label)
    figure.suptitle(title, fontsize=9)
    return figure


def saturation(points: dict) -> dict:
    """{L: the best cell's (mean, standard error, N) with at most L levels}, of the cells with the most seeds: one lucky seed is no best."""
    most, out = max(n for _, _, n in points.values()), {}
    whole = {row: p for row, p in points.items() if p[2] == most}
    for L in sorted({row.L for row in whole}):
        out[L] = whole[best({row: p for row, p in whole.items() if row.L <= L})]
    return with_errors(out)


def saturation_figure(points: dict, reference: str, title: str, label: str) -> 'Figure':
    """The best of at most L levels, both kinds, with one standard error."""
    figure, (axes,) = new(1)
    for i, recurrent in enumerate(sorted({row.recurrent for row in points}, reverse=True)):
        mine = {row: p for row, p in points.items() if row.recurrent == recurrent}
        line(axes, saturation(mine), i, KINDS[recurrent])
        if paper := paper_cells(reference, next(iter(mine))):
            line(axes, saturation(paper), i, f'{KINDS[recurrent]}, paper', ours=False)
    powers(axes, [row.L for row in points], 'at most L levels')
    axes.set_ylabel(f'best {label}')
    axes.set_title(f'{title}\nbars: one standard error')
    axes.legend(frameon=False)
    return figure


def curve_figure(runs: list, points: dict, title: str) -> 'Figure':
    """Returns over environment steps: of each kind and L the best allocation, mean and one standard deviation."""
    kinds = sorted({row.recurrent for row in points}, reverse=True)
    figure, panels = new(len(kinds))
    for axes, recurrent in zip(panels, kinds, strict=True):
        for i, (L, rows) in enumerate(
            sorted(
                groups(
                    (row for row in points if row.recurrent == recurrent), lambda row: row.L
                ).items()
            )
        ):
            row = best({r: points[r] for r in rows})
            logs = [
                {
                    r['env_steps']: r['return_1000']
                    for r in log
                    if r.get('return_1000') is not None and r.get('env_steps') is not None
                }
                for r, log in runs
                if r._replace(seed=0) == row
            ]
            common = sorted(set.intersection(*(set(log) for log in logs)))
            means = [summary([log[x] for log in logs]) for x in common]
            xs = [x / 1e6 for x in common]
            axes.plot(
                xs,
                [m for m, _, _ in means],
                color=COLORS[i % 7],
                lw=1.2,
                marker=MARKERS[i % 7],
                markevery=max(1, len(xs) // 8),
                ms=3,
                label=f'L = {L}, E = {row.E}, d = {row.d}',
            )
            axes.fill_between(
                xs,
                [m - s for m, s, _ in means],
                [m + s for m, s, _ in means],
                color=COLORS[i % 7],
                alpha=0.2,
                lw=0,
            )
        axes.set_title(KINDS[recurrent])
        axes.set_xlabel('environment steps (millions)')
        axes.legend(frameon=False)
    panels[0].set_ylabel('return, mean of 1,000 games')
    figure.suptitle(title, fontsize=9)
    return figure


def budget_figure(points: dict, reference: str, title: str, label: str) -> 'Figure':
    """The three budgets joined: the best of at most L levels, a line a budget, a panel a kind, with one standard error."""
    kinds = sorted({row.recurrent for row in points}, reverse=True)
    figure, panels = new(len(kinds))
    for axes, recurrent in zip(panels, kinds, strict=True):
        budgets = groups(
            (row for row in points if row.recurrent == recurrent), lambda row: row.budget
        )
        for i, (budget, rows) in enumerate(budgets.items()):
            line(axes, saturation({row: points[row] for row in rows}), i, f'{budget} budget')
            if paper := paper_cells(reference, rows[0]):
                line(axes, saturation(paper), i, f'{budget}, paper', ours=False)
        powers(axes, [row.L for rows in budgets.values() for row in rows], 'at most L levels')
        axes.set_title(KINDS[recurrent])
        axes.legend(frameon=False, ncols=2 if reference else 1)
    panels[0].set_ylabel(f'best {label}')
    figure.suptitle(f'{title}; bars: one standard error', fontsize=9)
    return figure


def bar_figure(points: dict, ways: list, title: str, label: str) -> 'Figure':
    """An ablation: its cells side by side, a mark a setting of `ways`: the value, and beside it the difference to the first setting, our
    default; with one standard error. Cells without the default are left out."""
    figure, panels = new(2, 3.5, sharey=False)
    by_cell = groups(points, lambda row: row._replace(more=()))
    shown = {
        cell: {row.more: points[row] for row in rows}
        for cell, rows in by_cell.items()
        if cell._replace(more=ways[0]) in points
    }
    for i, way in enumerate(ways):
        there = [(k, mine) for k, mine in enumerate(shown.values()) if way in mine]
        xs = [k + (i - (len(ways) - 1) / 2) * 0.8 / len(ways) for k, _ in there]
        style = {'capsize': 2, 'color': COLORS[i % 7]}
        values = [with_errors(mine)[way] for _, mine in there]
        panels[0].errorbar(
            xs,
            [mean for mean, _, _ in values],
            [error for _, error, _ in values],
            fmt=MARKERS[i % 7],
            ms=5,
            lw=1.2,
            **style,
        )
        values = [differences(mine, ways[0])[way] for _, mine in there]
        panels[1].bar(
            xs,
            [mean for mean, _, _ in values],
            0.75 / len(ways),
            yerr=[error for _, error, _ in values],
            edgecolor='black',
            lw=0.5,
            label=str(way[0][1]),
            **style,
        )
    for axes in panels:
        axes.set_xticks(
            range(len(shown)),
            [f'{KINDS[c.recurrent]}\nL = {c.L}, E = {c.E}\nd = {c.d}' for c in shown],
        )
        axes.set_xlim(-0.6, len(shown) - 0.4)
    panels[1].axhline(0, color='black', lw=0.6)
    panels[0].set_ylabel(label)
    panels[1].set_ylabel(f'{label.partition(" (")[0]} minus that of {ways[0][0][1]}')
    figure.suptitle(f'{title}\nbars: one standard error', fontsize=9)
    figure.legend(
        frameon=False,
        title=ways[0][0][0].replace('_', ' '),
        ncols=len(ways),
        loc='outside lower center',
    )  # nowhere over bars
    return figure


def radius_figure(points: dict, title: str, label: str) -> 'Figure':
    """The value by radius, and beside it the difference to radius E - 1, where every expert hears all: our default; with one standard error."""
    figure, panels = new(2, 2.8, sharey=False)
    for i, (cell, rows) in enumerate(groups(points, lambda row: row._replace(more=())).items()):
        mine, name = (
            {row.more[0][1]: points[row] for row in rows},
            f'{KINDS[cell.recurrent]}, L = {cell.L}, E = {cell.E}, d = {cell.d}',
        )
        line(panels[0], with_errors(mine), i, name)
        if cell.E - 1 in mine:
            line(panels[1], differences(mine, cell.E - 1), i, name)
    panels[1].axhline(0, color='black', lw=0.6)
    panels[0].set_ylabel(label)
    panels[1].set_ylabel(f'{label.partition(" (")[0]} minus that of r = E - 1')
    for axes in panels:
        axes.set_xlabel('radius r: preceding experts that each one hears')
    panels[0].legend(frameon=False)
    figure.suptitle(f'{title}\nbars: one standard error', fontsize=9)
    return figure


def scaling_figure(points: dict, title: str, label: str) -> 'Figure':
    """E on x, a line a number of levels; recurrent beside not."""
    kinds, lines = groups(points, lambda row: row.recurrent), {}
    figure, panels = new(len(kinds), 2.8)
    depths = sorted({row.L for row in points})
    for axes, (recurrent, rows) in zip(panels, kinds.items(), strict=True):
        for L, members in groups(rows, lambda row: row.L).items():
            line(axes, {row.E: points[row] for row in members}, depths.index(L), f'L = {L}')
        powers(axes, [row.E for row in rows], 'experts E a level')
        axes.set_title(KINDS[recurrent])
        lines |= {
            text: handle for handle, text in zip(*axes.get_legend_handles_labels(), strict=True)
        }
    panels[0].set_ylabel(label)
    figure.legend(
        lines.values(), lines, frameon=False, ncols=len(lines), loc='outside lower center'
    )  # nowhere over lines
    figure.suptitle(title, fontsize=9)
    return figure


def draw(
    plan: str, scale: str, all_rows: list, runs: list, token: str, reference: str, into: str
) -> list[str]:
    """All figures of a plan, whose rows are all_rows, from its finished runs -> their paths. scale: what a title says of a shrunk plan. token:
    what a language model's step is, 'token' or 'byte'."""
    points, paths = cells(runs), []
    for model, rows in groups(points, lambda row: row.model).items():
        mine = {row: points[row] for row in rows}
        title = f'{NAMES[model]}, {plan.replace("-", " ")}{scale}, {seeds_of(mine)}'
        narrow, label = (
            textwrap.fill(title, 50),
            f'validation loss (nats a {token})' if rows[0].is_text else 'return',
        )  # a column's title
        if plan == 'communication':
            figures = {f'radius_{model}': radius_figure(mine, title, label)}
        elif plan == 'sokoban':
            figures = {f'budgets_{model}': budget_figure(mine, reference, title, label)}
        elif plan == 'scaling':
            figures = {f'scaling_{model}': scaling_figure(mine, title, label)}
        elif rows[0].more:
            ways = list(dict.fromkeys(row.more for row in all_rows if row.model == model))
            figures = {f'bars_{model}': bar_figure(mine, ways, textwrap.fill(title, 100), label)}
        else:
            figures = {
                f'allocations_{model}': allocation_figure(mine, reference, title, label),
                f'saturation_{model}': saturation_figure(mine, reference, narrow, label),
            }
            if not rows[0].is_text:
                figures[f'curves_{model}'] = curve_figure(runs, mine, title)
        for name, figure in figures.items():
            paths += save(figure, into, name)
    return paths


# ----------------------------------------------------------------------------- tables


def field(x: str | int | float, digits: int) -> str:
    """A table's field: `digits` decimals, two significant digits where that would hide a small number."""
    if not isinstance(x, float):
        return str(x)
    return (
        ''
        if math.isnan(x)
        else f'{x:.2g}'
        if 0 < abs(x) < 10 ** (1 - digits)
        else f'{x:.{digits}f}'
    )


def write_table(
    header: list[str], rows: list[list], into: str, name: str, digits: int = 4
) -> list[str]:
    """As name.csv and name.md; numbers that are missing stay empty."""
    text = io.StringIO()
    shown = [[field(x, digits) for x in row] for row in rows]
    csv.writer(text, lineterminator='\n').writerows([header, *shown])
    marks = '\n'.join(
        '| ' + ' | '.join(row) + ' |' for row in [header, ['---'] * len(header), *shown]
    )
    paths = [os.path.join(into, f'{name}.{kind}') for kind in ('csv', 'md')]
    write_text(text.getvalue(), paths[0])
    write_text(marks + '\n', paths[1])
    return paths


def setting_names(rows: list) -> list[str]:
    """Of the settings by which cells differ, a column each."""
    return list(dict.fromkeys(name for row in rows for name, _ in row.more))


def cell_fields(row: 'Row', names: list[str]) -> list:
    """A table's first fields, which say what cell a line is of."""
    return [
        row.kind,
        row.budget,
        row.L,
        row.E,
        row.d,
        *(str(dict(row.more).get(name, '')) for name in names),
    ]


def tables(runs: list, reference: str, into: str) -> list[str]:
    """Mean, variance (N - 1) and N of every cell, a table a model in the paper's layout."""
    points, paths = cells(runs), []
    for model, rows in groups(points, lambda row: row.model).items():
        names = setting_names(rows)
        value_name = 'mean_loss' if rows[0].is_text else 'mean_return'
        paper = {}
        for like in groups(rows, lambda row: (row.recurrent, row.budget)).values():
            paper |= paper_cells(reference, like[0])
        header = [
            'variant',
            'budget',
            'L',
            'E',
            'd',
            *names,
            value_name,
            'variance',
            'n_seeds',
            *(['paper_mean', 'paper_variance'] if paper else []),
        ]
        body = []
        for row in rows:
            mean, deviation, n = points[row]
            theirs = paper.get(row)
            body.append(
                [
                    *cell_fields(row, names),
                    mean,
                    deviation**2,
                    n,
                    *([theirs[0], theirs[1] ** 2] if theirs else ['', ''] if paper else []),
                ]
            )
        paths += write_table(header, body, into, f'table_{model}')
    return paths


def run_record(row: 'Row', log: list[dict]) -> dict:
    """A run in runs.json."""
    last, data = log[-1], 'tokens' if row.is_text else 'env_steps'
    return {
        'name': row.name,
        'model': row.model,
        'kind': row.kind,
        'budget': row.budget,
        'L': row.L,
        'E': row.E,
        'd': row.d,
        **dict(row.more),
        'seed': row.seed,
        'value': value(row, log),
        'updates': last['step'],
        data: last.get(data),
        'seconds': last.get('seconds'),
    }


def chosen_by_return(runs: list) -> list:
    """Of each model, budget, kind and L the cell with the highest mean training return."""
    return bests(
        cells([(row, log) for row, log in runs if not row.is_text]),
        lambda row: (row.model, row.budget, row.recurrent, row.L),
    )


def solve_table(rates: dict, levels: str, reference: str, into: str) -> list[str]:
    """rates: {cell: [solve rate of each seed]} on `levels`. In the paper's layout; on unfiltered-test with the paper's own and its
    baselines as extra rows, where given."""
    paths, reference = [], reference if levels == 'unfiltered-test' else ''
    name = (
        f'{os.path.splitext(os.path.basename(levels or "held_out"))[0].replace("-", "_")}_percent'
    )
    for model, rows in groups(rates, lambda row: row.model).items():
        paper, body, names = {}, [], setting_names(rows)
        for row in rows:
            mean, deviation, n = summary([100 * rate for rate in rates[row]])
            paper |= paper_rows(
                reference, row, 'sokoban_solve_rates.csv', ['unfiltered_test_percent', 'std']
            )
            body.append([*cell_fields(row, names), mean, deviation, n])
        header = ['variant', 'budget', 'L', 'E', 'd', *names, name, 'std', 'n_seeds']
        for row, r in paper.items():
            body.append(
                [
                    f'{row.kind}, paper',
                    *cell_fields(row, names)[1:],
                    r['unfiltered_test_percent'],
                    r['std'],
                    '',
                ]
            )
        if reference:
            body += [
                [
                    f'{r["method"]}, {r["training_steps"]}, paper',
                    '',
                    '',
                    '',
                    '',
                    *([''] * len(names)),
                    r['unfiltered_test_percent'],
                    r['std'],
                    '',
                ]
                for r in read_csv(
                    reference, 'sokoban_baselines.csv', ['unfiltered_test_percent', 'std']
                )
            ]
        paths += write_table(header, body, into, f'solve_{model}', 2)
    return paths


# ---- one run: its curve, and trackers beside log.jsonl ----


def plot_losses(out_dir: str, unit: str, title: str) -> str:
    """Loss curves of out_dir/log.jsonl, in nats a `unit`, as out_dir/loss.png -> its path."""
    import matplotlib

    matplotlib.use('Agg')
    import matplotlib.pyplot as plt

    records, path = read_log(out_dir), os.path.join(out_dir, 'loss.png')
    figure, axes = plt.subplots(figsize=(5, 3.4), layout='constrained')
    for key, style in (
        ('train_loss', {'lw': 1, 'color': COLORS[0], 'alpha': 0.6}),
        ('val_loss', {'marker': 'o', 'ms': 4, 'color': COLORS[1]}),
    ):
        points = [(r['tokens'] / 1e6, r[key]) for r in records if r.get(key) is not None]
        axes.plot(*zip(*points, strict=True), label=key.replace('_', ' '), **style)
    axes.set(xlabel=f'training {unit}s (millions)', ylabel=f'loss (nats a {unit})', title=title)
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    write_atomic(path, lambda file: figure.savefig(file, dpi=160, format='png'))
    plt.close(figure)
    return path


def open_trackers(
    config: dict, tensorboard: bool, wandb_project: str
) -> tuple[Callable[[dict], object], Callable[[], object]]:
    """-> write(record), close() for a run's trackers beside log.jsonl: TensorBoard, and Weights &
    Biases if a project is named. Imported only here."""
    writes, closes, out_dir = [], [], config['out_dir']
    if tensorboard:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(out_dir)

        def to_tensorboard(record):
            for name, x in record.items():
                if name != 'step' and x is not None:
                    writer.add_scalar(name, x, record['step'])

        writes, closes = [to_tensorboard], [writer.close]
    if wandb_project:
        import wandb

        name = str(out_dir)
        run = wandb.init(project=wandb_project, name=name, dir=out_dir, config=config)
        writes.append(lambda record: run.log(record, step=record['step']))
        closes.append(run.finish)
    return lambda record: [write(record) for write in writes], lambda: [end() for end in closes]

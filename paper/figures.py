"""Draw the paper's figures and write its tables from the folders of finished runs.

    python -m paper.figures out/lm-small                              # all that fits these runs
    python -m paper.figures out/sokoban-* --figure=saturation         # one figure over three plans
    python -m paper.figures out/sokoban-large --levels=unfiltered-test      # and its solve rates

For another figure read the same frame, for example in a notebook in the project's root:

    from paper.figures import curves, runs
    frame = runs('out/lm-small')  # one row per run: settings, last and best values
    frame.pivot_table('loss', 'n_layer', 'kind').plot()

Each figure is a function of such a frame, and returns a figure of matplotlib. `model`, `plan` (the
folder that holds the run) and `kind` (recurrent or not) name what is compared; a setting that
differs between runs of equal size and seed is an ablation; the learning rate is tuned first.

A language model is judged by `loss`, its last validation loss, an agent by `return`, the mean over
the episodes of its last updates (see judged_return).
"""

import argparse
import csv
import math
import os
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from configurator import UserError, run_script

import matplotlib
import numpy as np
import pandas
from matplotlib.figure import Figure
from pandas import DataFrame, Series

from convlstm import load_agent
from levels import load_levels
from paper.sweep import NEUTRAL, Parser, matching, path
from sokoban import evaluate
from support.files import write_text
from support.ranks import pick_device
from support.run_folder import log_of, settings_of

PUBLISHED = Path(__file__).with_name('results') / 'paper'  # results of the paper and of others
MODELS = {'experts': 'Transformer', 'convlstm': 'ConvLSTM', 'convglu': 'ConvGLU', 'lstm': 'LSTM'}
SYMBOLS = {'n_layer': 'L', 'n_expert': 'E', 'n_embd': 'd'}
CELL = ['model', 'plan', 'kind', *SYMBOLS]  # runs that agree in these differ in settings or seed
# Columns that are no settings; neither are last_... and best_...
NO_SETTINGS = (
    'folder loss return step seconds finished seed out_dir resume overwrite script command code '
    'commit torch device_name world rows starts wandb_id'
).split()
BARS = {'sem': 'one standard error', 'std': 'one standard deviation'}
# Okabe and Ito's colors, which color-blind readers can tell apart, and markers.
COLORS = ('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9', '#000000')
MARKERS = 'osD^vPX'
Folders = str | os.PathLike | Iterable


# ---- frames ----


def find_runs(folders: Folders) -> list[Path]:
    """Return the folders of all runs in these folders. Raises UserError for one without a run."""
    found = {}
    for folder in [folders] if isinstance(folders, str | os.PathLike) else folders:
        inside = [path.parent for path in sorted(Path(folder).rglob('log.jsonl'))]
        if not inside:
            raise UserError(f'{folder}: holds no run, a folder with config.json and log.jsonl')
        found |= {path.resolve(): path for path in inside}
    return list(found.values())


def judged_return(log: DataFrame, log_interval: int) -> float:
    """Return the mean return of the episodes in the last lines of the log that cover at least 5 x
    log_interval updates, each episode once. Lines of evaluations alone do not count."""
    lines = log[log['episodes'].notna()]
    start = lines['step'].max() - 5 * log_interval
    lines = lines[lines['step'] > start].dropna(subset='episodic_return')
    total = lines['episodes'].sum()
    return (lines['episodes'] * lines['episodic_return']).sum() / total if total else math.nan


def runs(folders: Folders) -> DataFrame:
    """Return a frame with a row for each run in these folders: its folder, model, plan and kind,
    all settings, `step`, `seconds`, `finished`, `loss` or `return`, the last value of everything
    in the log (last_val_loss, ...) and the best of every evaluation (best_val_loss, ...)."""
    rows = []
    for folder in find_runs(folders):
        settings, log = settings_of(folder), DataFrame(log_of(folder))
        if 'recurrent' not in settings:
            raise UserError(f'{folder}/config.json: damaged, or not the settings of a run')
        row = {
            'folder': str(folder),
            'model': MODELS.get(settings.get('arch'), settings.get('arch')),
            'plan': folder.absolute().parent.name,
            'kind': 'recurrent' if settings['recurrent'] else 'non-recurrent',
            'finished': False,
            'commit': settings.get('code', {}).get('commit'),
            **{k: repr(x) if isinstance(x, list | dict) else x for k, x in settings.items()},
        }
        for last in log.ffill().tail(1).to_dict('records'):  # none if the log is empty
            row |= {f'last_{name}': x for name, x in last.items()}
            row |= log.filter(regex='^val_(loss|bits)').min().add_prefix('best_').to_dict()
            row |= log.filter(regex='^eval_(return|solve)').max().add_prefix('best_').to_dict()
            row |= {'step': last['step'], 'seconds': last.get('seconds')}
            if 'episodes' in log:
                row['return'] = judged_return(log, settings['log_interval'])
            else:
                row['loss'] = last.get('val_loss')
        rows.append(row)
    return DataFrame(rows).sort_values([*CELL, 'seed'], ignore_index=True)


def curves(folders: Folders) -> DataFrame:
    """Return all lines of the logs of all runs in these folders in one frame, with the column
    `folder` to merge it with `runs`."""
    logs = [DataFrame(log_of(folder)).assign(folder=str(folder)) for folder in find_runs(folders)]
    return pandas.concat(logs, ignore_index=True)


def varied(frame: DataFrame) -> list[str]:
    """Return the settings that differ between runs of equal model, plan, kind and size, whatever
    their seeds. Raises UserError for two runs that agree in all settings and in the seed."""
    settings = frame.filter(regex='^(?!last_|best_)').columns
    settings = settings.difference([*CELL, *NO_SETTINGS, *NEUTRAL], sort=False)
    counts = frame.groupby(CELL, dropna=False)[[*settings]].nunique(dropna=False)
    found = [*settings[counts.max() > 1]]
    if (twice := frame.duplicated([*CELL, 'seed', *found])).any():
        folder = frame.loc[twice, 'folder'].iloc[0]
        raise UserError(f'{folder}: another folder holds a run of the same settings and seed')
    return found


def value_of(frame: DataFrame) -> str:
    """Return the column by which runs or points are judged, 'loss' or 'return'. Raises UserError if
    no run has one yet."""
    for value in ('return', 'loss'):
        if value in frame and frame[value].notna().any():
            return value
    raise UserError('no run has a loss, or returns of episodes, to show yet')


def score(frame: DataFrame) -> Series:
    """Return what is judged so that lower is better: the loss, or minus the return."""
    return frame['loss'] if value_of(frame) == 'loss' else -frame['return']


def best_values(frame: DataFrame, over: str = 'learning_rate', by: list[str] = ()) -> DataFrame:
    """Return the runs at the best value of a setting in each group, without the lowest seed, which
    chooses it. A group at whose best value no other seed has run is left out, and named in a
    printed line; if this holds for all groups, return the runs that chose.

    by: columns that name a group (default: sizes, kind and all other varied settings)."""
    by = list(by) or [name for name in [*CELL, *varied(frame)] if name != over]
    chose = frame['seed'] == frame['seed'].min()
    first = frame[chose].dropna(subset=value_of(frame))
    best = first.loc[score(first).groupby([first[name] for name in by], dropna=False).idxmin()]
    others = frame[~chose].merge(best[[*by, over]])
    if others.empty:
        return best
    is_judged = best.set_index(by).index.isin(others.set_index(by).index)
    for _, run in best[~is_judged].iterrows():
        reason = f'no other seed has run with {over} = {run[over]}, which is the best there'
        print(f'left out: the models of {run["folder"]}: {reason}')
    return others


# ---- points: means over seeds ----


def summarize(frame: DataFrame, by: list[str], value: str = '') -> DataFrame:
    """Return the mean of what is judged, or of another column, in each group, under that column's
    name, with its standard deviation `std`, standard error `sem` and number of seeds `n`."""
    value = value or value_of(frame)
    groups = frame.dropna(subset=value).groupby(by, dropna=False, sort=False)[value]
    points = groups.agg(**{value: 'mean', 'std': 'std', 'sem': 'sem', 'n': 'count'})
    return points.reset_index()


def cells(frame: DataFrame) -> DataFrame:
    """Return the points of all allocations. Raises UserError if runs differ in a setting, too: they
    are no seeds of one experiment."""
    if settings := varied(frame):
        advice = 'give runs of one value, or draw --figure=ablation'
        raise UserError(f'these runs differ in {", ".join(settings)}: {advice}')
    return summarize(frame, CELL)


def best_cells(points: DataFrame, by: list[str]) -> DataFrame:
    """Return the best point of each group among those with the most seeds: one with fewer seeds
    could win by one lucky seed."""
    points = points[points['n'] == points.groupby(by)['n'].transform('max')]
    return points.loc[score(points).groupby([points[name] for name in by], sort=False).idxmin()]


def with_published(points: DataFrame, name: str) -> DataFrame:
    """Return points, followed by those of results/paper/NAME.csv for the same plans and kinds, or
    for none; `source` tells them apart."""
    table = pandas.read_csv(PUBLISHED / f'{name}.csv')
    keys = points.set_index(['model', 'plan', 'kind']).index
    is_known = table.set_index(['model', 'plan', 'kind']).index.isin(keys) | table['plan'].isna()
    points = points.assign(source='')
    table = table[is_known].assign(source='published')
    return pandas.concat([points, table], ignore_index=True) if len(table) else points


def best_depths(frame: DataFrame, draws: int = 10_000) -> str:
    """Return a sentence on the best L of recurrent and of non-recurrent models and its certainty;
    '' if one kind is missing, or an allocation has one seed.

    The certainty is computed twice: by bootstrap draws of the seeds (with replacement), and by
    means with errors from a t distribution, which allows for the small number of seeds."""
    rng, t_rng = np.random.default_rng(1), np.random.default_rng(2)
    frame = frame.assign(score=score(frame)).dropna(subset='score').sort_values([*SYMBOLS, 'seed'])
    best, best_by_t, parts = [], [], []
    for kind in ('recurrent', 'non-recurrent'):
        groups = frame[frame['kind'] == kind].groupby([*SYMBOLS])['score']
        if not (groups.count().min() > 1):  # NaN if there are none
            return ''
        means = [rng.choice(x, (draws, len(x))).mean(1) for _, x in groups]
        means_by_t = [x.mean() + x.sem() * t_rng.standard_t(len(x) - 1, draws) for _, x in groups]
        depths = groups.mean().index.get_level_values('n_layer')
        best.append(depths[np.argmin(means, 0)])  # (draws,)
        best_by_t.append(depths[np.argmin(means_by_t, 0)])
        low, high = np.quantile(best[-1], (0.025, 0.975), method='nearest')
        parts.append(f'{kind} {groups.mean().idxmin()[0]} (95%: {low} to {high})')
    (a, b), (a_by_t, b_by_t) = best, best_by_t
    return (
        f'Best L, {draws:,} bootstrap draws of seeds: {", ".join(parts)}, recurrent smaller in '
        f'{(a < b).mean():.1%}, equal in {(a == b).mean():.1%}, with errors of a t distribution '
        f'smaller in {(a_by_t < b_by_t).mean():.1%}.'
    )


# ---- figures ----


# Without parse_math, a dollar sign in a folder's name would start a formula.
@matplotlib.rc_context({'font.size': 8, 'text.parse_math': False})
def chart(
    points: DataFrame,
    x: str,
    y: str,
    labels: tuple[str, str],
    title: str = '',
    bars: str = 'sem',
    to_scale: bool = False,
    sharey: bool = True,
) -> Figure:
    """Return a figure of points: a panel for each value of their column `panel`, in it a line for
    each value of `line`, y over x with error bars, dashed for published results.

    labels: of the axes. title: by default the models and plans. bars: the column with the error.
    to_scale: if not, the values of x are drawn at equal distances."""
    values, handles, panels = sorted(points[x].unique()), {}, points.groupby('panel', sort=False)
    figure = Figure(figsize=(4 * max(len(panels), 1.5), 4), layout='constrained')
    row = figure.subplots(1, len(panels), squeeze=False, sharey=sharey)[0]
    names = list(points['line'].str.removesuffix(', published').unique())
    for axes, (panel, part) in zip(row, panels, strict=True):
        for line, one in part.sort_values(x, kind='stable').groupby('line', sort=False):
            name = line.removesuffix(', published')
            k = names.index(name) % len(COLORS)
            handles[line] = axes.errorbar(
                one[x] if to_scale else one[x].map(values.index),
                one[y],
                one[bars],
                label=line,
                fmt='-' if name == line else '--',
                color=COLORS[k],
                marker=None if to_scale else MARKERS[k],
                capsize=2,
            )
        if not to_scale:
            axes.set_xticks(range(len(values)), values)
        axes.set(title=panel, xlabel=labels[0], ylabel=labels[1])
    figure.legend(handles.values(), handles, loc='outside lower center', ncols=1 + len(panels))
    title = title or ', '.join([*points['model'].unique(), *points['plan'].unique()])
    title += f'; bars: {BARS[bars]}' if points[bars].notna().any() else ''
    figure.suptitle(title, wrap=True)
    return figure


def unit_of(frame: DataFrame) -> str:
    """Return the unit of text of these runs."""
    return 'byte' if 'tokenizer' in frame and (frame['tokenizer'] == 'bytes').any() else 'token'


def label_of(frame: DataFrame) -> str:
    """Return the label of an axis for what is judged."""
    is_return = value_of(frame) == 'return'
    return 'return' if is_return else f'validation loss (nats per {unit_of(frame)})'


def name_cells(points: DataFrame, names: Iterable[str] = SYMBOLS) -> Series:
    """Return 'L = 2, E = 8, d = 64' for each point."""
    parts = [f'{SYMBOLS.get(name, name)} = ' + points[name].astype(str) for name in names]
    return parts[0].str.cat(parts[1:], sep=', ')


def by_size(x: str, line: str, bars: str, frame: DataFrame) -> Figure:
    """Draw the value by one size, with a line for each value of another one."""
    points = with_published(cells(frame), 'sokoban_returns')
    name = name_cells(points, [line]) + ', ' + points['source']
    points = points.assign(
        line=name.str.removesuffix(', '), panel=points['plan'] + ', ' + points['kind']
    )
    labels = {'n_layer': 'layers L', 'n_expert': 'experts E per layer'}[x], label_of(frame)
    return chart(points, x, value_of(frame), labels, bars=bars)


def saturation(frame: DataFrame) -> Figure:
    """Draw the best value with at most L layers: a line for each plan (budget) and kind."""
    points, by = with_published(cells(frame), 'sokoban_returns'), ['plan', 'kind', 'source']
    points = pandas.concat(
        best_cells(part[part['n_layer'] <= L], by).assign(n_layer=L)
        for _, part in points.groupby(by, sort=False)
        for L in part['n_layer'].unique()
    )
    name = points['plan'] + ', ' + points['kind'] + ', ' + points['source']
    points = points.assign(line=name.str.removesuffix(', '), panel='')
    labels = 'at most L layers', f'best {label_of(frame)}'
    return chart(points, 'n_layer', value_of(frame), labels)


def ablation(frame: DataFrame) -> Figure:
    """Draw the value by the first setting that varies, other than a tuned learning rate."""
    if not (settings := varied(frame)):
        raise UserError('ablation: these runs differ in no setting but their sizes and seeds')
    # A tuned learning rate differs with the other settings, so it is no axis.
    x, *others = [name for name in settings if name != 'learning_rate'] or settings
    points = summarize(frame, [*CELL, *settings])
    line = points['kind'] + ', ' + name_cells(points, [*SYMBOLS, *others])
    points = points.assign(line=line, panel=points['plan'])
    return chart(points, x, value_of(frame), (x, label_of(frame)))


def learning(frame: DataFrame) -> Figure:
    """Draw loss or return over training data for the best allocation of each kind and L; of a loss
    the last three quarters, because the first values would flatten all differences."""
    x, y, labels = 'env_steps', 'return_1000', ('environment steps', 'return, 1,000 episodes')
    if value_of(frame) == 'loss':
        x, y, labels = 'tokens', 'val_loss', (f'{unit_of(frame)}s', label_of(frame))
    shown = frame.merge(best_cells(cells(frame), ['plan', 'kind', 'n_layer'])[CELL])
    data = curves(shown['folder'])[['folder', x, y]].dropna().merge(shown[['folder', *CELL]])
    if y == 'val_loss':
        data = data[data[x] >= data[x].max() / 4]
    points = summarize(data, [*CELL, x], y)
    points = points.assign(line=name_cells(points), panel=points['plan'] + ', ' + points['kind'])
    return chart(points, x, y, labels, bars='std', to_scale=True)


FIGURES = {
    'allocations': partial(by_size, 'n_layer', 'n_embd', 'std'),
    'saturation': saturation,
    'scaling': partial(by_size, 'n_expert', 'n_layer', 'sem'),
    'ablation': ablation,
    'learning': learning,
}


def fitting(frame: DataFrame) -> list[str]:
    """Return the names of the figures that fit the runs of one model."""
    if varied(frame):
        return ['ablation']
    experts = frame.groupby(['plan', 'kind', 'n_layer', 'n_embd'])['n_expert'].nunique()
    if (experts > 1).any():
        return ['scaling']
    return ['allocations', 'saturation', 'learning']


# ---- tables ----


def value_table(frame: DataFrame) -> DataFrame:
    """Return mean, errors and number of seeds of every allocation and setting, followed by the
    paper's; `best` marks the best of each plan and kind."""
    points = summarize(frame, [*CELL, *varied(frame)])
    points['best'] = points.index.isin(best_cells(points, ['plan', 'kind']).index)
    return with_published(points, 'sokoban_returns')


def solve_table(frame: DataFrame, split: str) -> DataFrame:
    """Return the greedy solve rates, in percent, of the best allocation of each plan, kind and L on
    a split of Boxoban. On unfiltered-test the paper's and those of published agents follow."""
    shown = frame.merge(best_cells(cells(frame), ['plan', 'kind', 'n_layer'])[CELL])
    device, rates = pick_device('auto'), []
    for run in shown.to_dict('records'):
        print(f'{run["folder"]}: evaluating its best agent on {split}', flush=True)
        levels, _ = load_levels(run['levels_dir'], split)
        agent, limit = load_agent(run['folder'], 'best', device), run['time_limit']
        rates.append(evaluate(agent, levels, device, time_limit=limit)['solve_rate'])
    name = f'{split}, percent'
    table = summarize(shown.assign(**{name: np.multiply(rates, 100)}), CELL, name)
    is_paper = split == 'unfiltered-test'
    return with_published(table, 'sokoban_solve_rates') if is_paper else table


def save_table(table: DataFrame, path: str, note: str = '') -> None:
    """Write a table as path.csv and, with five significant digits and a note, as path.md."""
    write_text(table.to_csv(index=False), f'{path}.csv')
    head = f'{"|".join(table)}\n{"|".join(["---"] * table.shape[1])}\n'
    options = {'float_format': '%.5g', 'quoting': csv.QUOTE_NONE, 'escapechar': '\\'}
    rows = table.to_csv(sep='|', index=False, header=False, **options)
    write_text(f'{head}{rows}\n{note}\n', f'{path}.md')
    print(f'{path}.csv\n{path}.md')


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure as a PNG file."""
    figure.savefig(path, dpi=150)
    print(path)


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = Parser('python -m paper.figures', None, __doc__, formatter_class=form)
    parser.add_argument('folders', nargs='+', metavar='FOLDER', help='runs, or folders of runs')
    parser.add_argument('--figure', choices=[*FIGURES], help='draw this one only')
    parser.add_argument('--only', help='a condition on the runs, as in "residual == \'expert\'"')
    parser.add_argument('--out', type=path, help='folder to write to; default: that of the runs')
    parser.add_argument('--levels', help='split of Boxoban, for a table of solve rates')
    args = parser.parse_args()
    frame = runs(args.folders)
    frame = frame if args.only is None else matching(frame, args.only)
    done = frame[frame['finished']]
    print(f'{len(done)} of {len(frame)} runs have finished')
    if done.empty:
        raise UserError(f'{", ".join(args.folders)}: no run has finished: nothing to draw')
    out = args.out or Path(os.path.commonpath([os.path.abspath(x) for x in args.folders]))
    out.mkdir(parents=True, exist_ok=True)
    write_text(done.to_csv(index=False), out / 'runs.csv')
    for model, part in done.groupby('model'):
        if args.levels and value_of(part) == 'loss':
            raise UserError(f'--levels: {model} is no agent: leave it out by --only')
        tuned = (
            best_values(one) if 'learning_rate' in varied(one) else one
            for _, one in part.groupby('plan', sort=False)
        )
        part = pandas.concat(tuned, ignore_index=True)
        for name in [args.figure] if args.figure else fitting(part):
            save_figure(FIGURES[name](part), out / f'{name}_{model}.png')
        plans = [one for _, one in part.groupby('plan') if not varied(one)]
        sentences = '\n'.join(filter(None, map(best_depths, plans)))
        save_table(value_table(part), f'{out}/table_{model}', sentences)
        if args.levels:
            save_table(solve_table(part, args.levels), f'{out}/solved_{model}')


if __name__ == '__main__':
    run_script(main)

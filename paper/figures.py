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
differs between runs of equal size and seed is an ablation. Learning rates are tuned first, unless
they are the only difference, or the axis of --figure=ablation. Finished runs that are not drawn are
named.

A language model is judged by `loss`, its last validation loss, an agent by `return`, the mean over
the episodes of its last updates (see judged_return).
"""

import argparse
import csv
import math
import os
import sys
from collections.abc import Iterable
from functools import partial
from numbers import Number
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for python PATH/paper/figures.py

from support.script import UserError, run_script

import numpy as np
import pandas
from pandas import DataFrame, Series
from pandas.api.types import is_bool_dtype, is_numeric_dtype

from convlstm import load_agent
from levels import load_levels
from model import RESIDUALS
from paper.plans import AGGREGATIONS, find_runs, read_runs
from paper.sweep import DATA, NEUTRAL, Parser, changed_settings, matching, path
from sokoban import evaluate
from support.files import write_text
from support.plots import Figure, chart, save_figure
from support.ranks import pick_device

PUBLISHED = Path(__file__).with_name('results') / 'paper'  # results of the paper and of others
MODELS = {'experts': 'Transformer', 'convlstm': 'ConvLSTM', 'convglu': 'ConvGLU', 'lstm': 'LSTM'}
SYMBOLS = {'n_layer': 'L', 'n_expert': 'E', 'n_embd': 'd'}
CELL = ['model', 'plan', 'kind', *SYMBOLS]  # runs that agree in these differ in settings or seed
# Columns that are no settings; neither are last_... and best_...
NO_SETTINGS = (
    'folder loss return step seconds finished seed out_dir resume overwrite script script_path '
    'command code commit torch device_name world rows starts run_folder wandb_id wandb_folder '
    'triton_overrides data_checksum init_checksum changed'
).split()
# Columns that should agree within a plan, and what a warning calls their values.
SHOULD_AGREE = {
    'code': 'versions of the code',
    'data_checksum': 'data sets',
    'init_checksum': 'sets of initial weights',
    'device_name': 'kinds of device',
    'torch': 'versions of PyTorch',
}
AXES = {'radius': 'number of neighbors'}  # labels that differ from the setting's name
# Names in the order of the paper's figures; any others follow by alphabet.
ORDER = [*AGGREGATIONS, *RESIDUALS, 'True', 'False']
Folders = str | os.PathLike | Iterable


# ---- frames ----


def judged_return(log: DataFrame, log_interval: int) -> float:
    """Return the mean return of the episodes in the last lines of the log that cover at least 5 x
    log_interval updates, each episode once. Lines of evaluations alone do not count."""
    lines = log[log['episodes'].notna()]
    start = lines['step'].max() - 5 * log_interval
    lines = lines[(lines['step'] > start) & (lines['episodes'] > 0)]
    total = (lines['episodes'] * lines['episodic_return']).sum(skipna=False)
    return total / lines['episodes'].sum() if len(lines) else math.nan


def text_of(value: object) -> str:
    """Return a setting as text, which pandas wants in UTF-8: the name of a folder may be in another
    encoding."""
    text = value if isinstance(value, str) else repr(value)
    return text.encode(errors='backslashreplace').decode()


def versions_of(settings: dict) -> dict[str, str]:
    """Return checksum of the code, device and version of PyTorch of a run, those of several starts
    with ' + ' between them."""
    starts = [settings, *settings.get('starts', [])]
    found = {
        'code': [start.get('code', {}).get('checksum') for start in starts],
        'device_name': [start.get('device_name') for start in starts],
        'torch': [start.get('torch') for start in starts],
    }
    return {name: ' + '.join(filter(None, dict.fromkeys(x))) for name, x in found.items()}


def runs(folders: Folders) -> DataFrame:
    """Return a frame with a row for each run in these folders: its folder, model, plan and kind,
    all settings, `step`, `seconds` (of updates alone: no start, evaluations or checkpoints),
    `finished`, `loss` or `return`, the last value of everything in the log (last_val_loss, ...) and
    the best of every evaluation (best_val_loss, ...). Plans are in the order of these folders, and
    recurrent runs come first."""
    rows, found = [], find_runs(folders)
    for folder, (settings, records) in zip(found, read_runs(found), strict=True):
        if 'recurrent' not in settings:
            raise UserError(f'{folder}/config.json: damaged, or not the settings of a run')
        row = {
            'folder': str(folder),
            'model': MODELS.get(settings.get('arch'), settings.get('arch')),
            'plan': folder.absolute().parent.name,
            'kind': 'recurrent' if settings['recurrent'] else 'non-recurrent',
            'finished': False,
            'commit': settings.get('code', {}).get('commit'),
            **{k: x if isinstance(x, Number | None) else text_of(x) for k, x in settings.items()},
            **versions_of(settings),
            'changed': ', '.join(changed_settings(settings)),
        }
        log, last = DataFrame(records), {}
        for record in records:  # of an evaluation, of an update, or of both
            last |= {name: math.nan if x is None else x for name, x in record.items()}
        if last:
            row |= {f'last_{name}': x for name, x in last.items()}
            row |= log.filter(regex='^val_(loss|bits)').min().add_prefix('best_').to_dict()
            row |= log.filter(regex='^eval_(return|solve)').max().add_prefix('best_').to_dict()
            row |= {'step': last['step'], 'seconds': last.get('seconds')}
            if 'episodes' in log:
                row['return'] = judged_return(log, settings['log_interval'])
            else:
                row['loss'] = last.get('val_loss')
        rows.append(row)
    frame = DataFrame(rows)
    frame['order'] = pandas.factorize(frame['plan'])[0]
    by = ['model', 'order', *CELL[2:], 'seed']
    ascending = [name != 'kind' for name in by]
    return frame.sort_values(by, ascending=ascending, ignore_index=True).drop(columns='order')


def curves(folders: Folders) -> DataFrame:
    """Return all lines of the logs of all runs in these folders in one frame, with the column
    `folder` to merge it with `runs`."""
    found = find_runs(folders)
    logs = (DataFrame(log) for _, log in read_runs(found))
    return pandas.concat(
        [log.assign(folder=str(folder)) for folder, log in zip(found, logs, strict=True)],
        ignore_index=True,
    )


def varied(frame: DataFrame) -> list[str]:
    """Return the settings that differ between runs of equal model, plan, kind and size, whatever
    their seeds. Raises UserError for two runs that agree in all settings and in the seed."""
    settings = frame.filter(regex='^(?!last_|best_)').columns
    settings = settings.difference([*CELL, *NO_SETTINGS, *NEUTRAL], sort=False)
    data = frame.get('data_checksum', Series(index=frame.index))  # earlier runs have none
    if data.notna().all() and data.nunique() == 1:
        settings = settings.drop('data_dir', errors='ignore')  # copies of the same data
    for name in settings.intersection(DATA):  # one folder may be written in several ways
        frame = frame.assign(**{name: frame[name].map(os.path.realpath, na_action='ignore')})
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
    chooses it; if no other seed has run at these values, return the runs that chose. Print the
    values, and which groups are left out because a seed is missing.

    by: columns that name a group (default: sizes, kind and all other varied settings)."""
    by = list(by) or [name for name in [*CELL, *varied(frame)] if name != over]
    lowest, chose, others = frame['seed'].min(), [], {}
    for values, group in frame.groupby(by, dropna=False, sort=False):
        name = ', '.join(
            x if k in CELL[:3] else f'{SYMBOLS.get(k, k)} = {x}'
            for k, x in zip(by, values, strict=True)
        )
        first = group[group['seed'] == lowest].dropna(subset=value_of(frame))
        if first.empty:
            print(f'left out: {name}: seed {lowest}, which chooses {over}, has no result')
            continue
        best = first.loc[[score(first).idxmin()]]
        value, n = best[over].item(), first[over].nunique()
        print(f'{name}: {over} = {value}, the best of {n} for seed {lowest}')
        chose.append(best)
        others[name] = group[(group['seed'] != lowest) & (group[over] == value)]
    if not chose:
        raise UserError(f'seed {lowest} has no result by which to choose {over}')
    if all(rest.empty for rest in others.values()):
        return pandas.concat(chose, ignore_index=True)
    for name, rest in others.items():
        if rest.empty:
            print(f'left out: {name}: no other seed has run with this {over}')
    return pandas.concat(others.values(), ignore_index=True)


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
    """Return the best point of each group, whatever its number of seeds: `n` tells it."""
    return points.loc[score(points).groupby([points[name] for name in by], sort=False).idxmin()]


def with_published(points: DataFrame, name: str) -> DataFrame:
    """Return points, followed by those of results/paper/NAME.csv for the same plans and kinds, or
    for none; `source` tells them apart. Errors follow from the variances over seeds that the paper
    prints."""
    table = pandas.read_csv(PUBLISHED / f'{name}.csv')
    if 'variance' in table:
        table['std'] = table.pop('variance') ** 0.5
        table['sem'] = table['std'] / table['n'] ** 0.5
    keys = points.set_index(['model', 'plan', 'kind']).index
    is_known = table.set_index(['model', 'plan', 'kind']).index.isin(keys) | table['plan'].isna()
    points = points.assign(source='')
    table = table[is_known].assign(source='published')
    return pandas.concat([points, table], ignore_index=True) if len(table) else points


def draw_means(scores: DataFrame, draws: int = 100_000) -> DataFrame:
    """Return a row per draw of the means of the columns. scores: a row per seed, or other block of
    runs, with NaN for a run that is missing; a column has two seeds or more.

    Each draw adds to the means errors from a multivariate t distribution with the covariance of the
    means over seeds, so that what all runs of a seed share cancels in differences. The column with
    the fewest seeds decides its degrees of freedom."""
    n = scores.count()
    errors = (scores - scores.mean()).fillna(0) / np.sqrt(n * (n - 1))
    generator = np.random.default_rng(1)
    scale = np.sqrt(generator.chisquare(n.min() - 1, (draws, 1)) / (n.min() - 1))
    noise = generator.standard_normal((draws, len(scores))) @ errors.to_numpy() / scale
    return DataFrame(scores.mean().to_numpy() + noise, columns=scores.columns)


def best_depths(scores: DataFrame) -> tuple[float, float, str]:
    """Return the shares of draws of the means in which the best L is smaller and larger with
    recurrence, and a sentence about them; NaN and '' if either kind has fewer than two depths with
    several seeds. Allocations with one seed are left out.

    scores: a row per seed and a column per allocation, whose name starts with its kind (recurrent
    or not) and L; lower is better."""
    n = scores.count()
    scores, n_single = scores.loc[:, n > 1], (n == 1).sum()
    is_recurrent = scores.columns.get_level_values(0).isin([True, 'recurrent'])
    all_depths = scores.columns.get_level_values(1).to_numpy()
    compared = [sorted({*all_depths[columns]}) for columns in (is_recurrent, ~is_recurrent)]
    if min(map(len, compared)) < 2:
        return math.nan, math.nan, ''
    means, best, parts = draw_means(scores).to_numpy(), [], []
    for columns, kind in ((is_recurrent, 'with recurrence'), (~is_recurrent, 'without')):
        depths = all_depths[columns]
        best.append(depths[means[:, columns].argmin(1)])  # (draws,)
        low, high = np.quantile(best[-1], (0.025, 0.975), method='nearest')
        parts.append(f'{depths[scores.mean()[columns].argmin()]} {kind} (95%: {low} to {high})')
    smaller, larger = np.mean(best[0] < best[1]), np.mean(best[0] > best[1])
    sentence = f'smaller with recurrence in {smaller:.1%} of draws, larger in {larger:.1%}; best L '
    sentence += ' and '.join(parts)
    of = [', '.join(map(str, depths)) for depths in compared]
    sentence += f'; compared: L = {of[0]} with and {of[1]} without'
    if n_single:
        sentence += f'; allocations with one seed, left out: {n_single}'
    return smaller, larger, sentence


def scores_of(frame: DataFrame) -> DataFrame:
    """Return what is judged as best_depths expects it, lower is better."""
    return frame.assign(score=score(frame)).pivot_table('score', 'seed', ['kind', *SYMBOLS])


# ---- figures ----


def unit_of(frame: DataFrame) -> str:
    """Return the unit of text of these runs: byte (and the end of a document), token or both."""
    is_bytes = frame['tokenizer'] == 'bytes' if 'tokenizer' in frame else Series([False])
    return 'byte' if is_bytes.all() else 'byte or token' if is_bytes.any() else 'token'


def label_of(frame: DataFrame) -> str:
    """Return the label of an axis for what is judged."""
    is_return = value_of(frame) == 'return'
    return 'return' if is_return else f'validation loss (nats per {unit_of(frame)})'


def name_cells(points: DataFrame, names: Iterable[str] = SYMBOLS) -> Series:
    """Return 'L = 2, E = 8, d = 64' for each point."""
    parts = [f'{SYMBOLS.get(name, name)} = ' + points[name].astype(str) for name in names]
    return parts[0].str.cat(parts[1:], sep=', ')


def title_of(points: DataFrame) -> str:
    """Return the title of a figure, its models and plans."""
    return ', '.join([*points['model'].unique(), *points['plan'].unique()])


def with_lines(points: DataFrame, names: Series) -> DataFrame:
    """Return points of `with_published` in lines of these names. Published ones are dashed."""
    is_published = points['source'] == 'published'
    return points.assign(
        line=names.mask(is_published, names + ', published'),
        color=names,
        style=np.where(is_published, '--', '-'),
    )


def by_kind(points: DataFrame) -> DataFrame:
    """Return points with the recurrent ones first, so that panels of a kind stand in a row."""
    return points.sort_values('kind', ascending=False, kind='stable')


def by_size(x: str, line: str, bars: str, frame: DataFrame) -> Figure:
    """Draw the value by one size, with a line for each value of another one, and of the third one,
    too, if it does not follow from these two."""
    points = with_published(cells(frame), 'sokoban_returns')
    names = [line]
    if points.duplicated(['plan', 'kind', 'source', x, line]).any():
        names = [name for name in SYMBOLS if name != x]
    points = with_lines(points, name_cells(points, names))
    points = by_kind(points.assign(panel=points['plan'] + ', ' + points['kind']))
    labels = {'n_layer': 'layers L', 'n_expert': 'experts E per layer'}[x], label_of(frame)
    return chart(points, x, value_of(frame), labels, title_of(points), bars)


def saturation(frame: DataFrame) -> Figure:
    """Draw the best value with at most L layers: a line for each plan (budget) and kind."""
    points, by = with_published(cells(frame), 'sokoban_returns'), ['plan', 'kind', 'source']
    points = pandas.concat(
        best_cells(part[part['n_layer'] <= L], by).assign(n_layer=L)
        for _, part in points.groupby(by, sort=False)
        for L in part['n_layer'].unique()
    )
    points = with_lines(points, points['plan'] + ', ' + points['kind']).assign(panel='')
    labels = 'at most L layers', f'best {label_of(frame)}'
    return chart(points, 'n_layer', value_of(frame), labels, title_of(points), 'sem')


def ablation(frame: DataFrame) -> Figure:
    """Draw the value by the first setting that varies, other than a tuned learning rate: as bars if
    its values are names."""
    if not (settings := varied(frame)):
        raise UserError('ablation: these runs differ in no setting but their sizes and seeds')
    # A tuned learning rate differs with the other settings, so it is no axis.
    x, *others = [name for name in settings if name != 'learning_rate'] or settings
    points = summarize(frame, [*CELL, *settings])
    if x == 'radius':  # -1: all other experts
        points[x] = points[x].where(points[x] >= 0, points['n_expert'] - 1)
    for name in settings:
        if points[name].isna().any():
            points[name] = points[name].astype(object).fillna('unknown')
    line = points['kind'] + ', ' + name_cells(points, [*SYMBOLS, *others])
    points = points.assign(line=line, panel=points['plan'])
    if is_bool_dtype(points[x]) or not is_numeric_dtype(points[x]):
        ranks = {name: i for i, name in enumerate(ORDER)}
        points[x] = points[x].astype(str)
        points = points.sort_values(
            x, key=lambda names: [(ranks.get(name, len(ranks)), name) for name in names]
        )
    labels = AXES.get(x, x), label_of(frame)
    return chart(points, x, value_of(frame), labels, title_of(points), 'sem')


def learning(frame: DataFrame) -> Figure:
    """Draw loss or return over training data for the best allocation of each kind and L; of a loss
    the last three quarters, because the first values would flatten all differences."""
    x, y, labels = 'env_steps', 'return_1000', ('environment steps', 'return, 1,000 episodes')
    if value_of(frame) == 'loss':
        x, y, labels = 'tokens', 'val_loss', (f'{unit_of(frame)}s', label_of(frame))
    best = best_cells(cells(frame), ['plan', 'kind', 'n_layer'])
    sizes = best['n_expert'].astype(str) + 'x' + best['n_embd'].astype(str)
    sizes = sizes.groupby([best['plan'], best['kind']]).agg(', '.join)
    shown = frame.merge(best[CELL])
    data = curves(shown['folder'])[['folder', x, y]].dropna().merge(shown[['folder', *CELL]])
    if y == 'val_loss':
        data = data[data[x] >= data.groupby('plan')[x].transform('max') / 4]
    data[x] /= 1e6
    points = by_kind(summarize(data, [*CELL, x], y))
    points['panel'] = [
        f'{plan}, {kind}; E x d: {sizes[plan, kind]}'
        for plan, kind in zip(points['plan'], points['kind'], strict=True)
    ]
    points['line'] = name_cells(points, ['n_layer'])
    labels = f'{labels[0]} (millions)', labels[1]
    return chart(points, x, y, labels, title_of(points), 'std', to_scale=True)


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
    a split of Boxoban: first of the last agents of its runs, then of their best checkpoints by
    return on the evaluation levels. On unfiltered-test the paper's and those of published agents
    follow."""
    shown = frame.merge(best_cells(cells(frame), ['plan', 'kind', 'n_layer'])[CELL])
    shown = pandas.concat([shown.assign(agent=agent) for agent in ('last', 'best')])
    device, rates = pick_device('auto'), []
    for run in shown.to_dict('records'):
        print(f'{run["folder"]}: evaluating its {run["agent"]} agent on {split}', flush=True)
        levels, _ = load_levels(run['levels_dir'], split)
        agent, limit = load_agent(run['folder'], run['agent'], device), run['time_limit']
        rates.append(evaluate(agent, levels, device, time_limit=limit)['solve_rate'])
    name = f'{split}, percent'
    table = summarize(shown.assign(**{name: np.multiply(rates, 100)}), [*CELL, 'agent'], name)
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


def is_tuned(frame: DataFrame, figure: str | None) -> bool:
    """Return whether the runs of a plan are to be compared at their best learning rates: not if the
    rate is all in which they differ, or the only axis of an ablation that is asked for."""
    settings, cells = varied(frame), frame[CELL].drop_duplicates()
    is_axis = settings == ['learning_rate'] and (len(cells) == 1 or figure == 'ablation')
    return 'learning_rate' in settings and not is_axis


def print_other_differences(frame: DataFrame) -> None:
    """Print the settings in which runs of different sizes of a plan and kind differ, although runs
    of equal size agree: what is drawn over the size may be their effect."""
    for (plan, kind), part in frame.groupby(['plan', 'kind'], sort=False):
        settings = part.filter(regex='^(?!last_|best_)').columns
        known = [*CELL, *NO_SETTINGS, *NEUTRAL, *DATA, *varied(part)]
        counts = part[settings.difference(known, sort=False)].nunique(dropna=False)
        if names := [*counts.index[counts > 1]]:
            print(f'{plan}, {kind}: runs of different sizes also differ in {", ".join(names)}')


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = Parser('python -m paper.figures', None, __doc__, formatter_class=form)
    add = parser.add_argument
    add('folders', nargs='+', type=path, metavar='FOLDER', help='runs, or folders of runs')
    add('--figure', choices=[*FIGURES], help='draw this one only')
    add('--only', help='a condition on the runs, as in "residual == \'expert\'"')
    add('--plan', help='draw all runs as one plan of this name')
    add('--out', type=path, help='folder to write to; default: that of the runs')
    add('--levels', type=path, help='split of Boxoban, for a table of solve rates')
    args = parser.parse_args()
    frame = runs(args.folders)
    frame = frame if args.only is None else matching(frame, args.only)
    frame = frame if args.plan is None else frame.assign(plan=args.plan)
    done = frame[frame['finished']]
    print(f'{len(done)} of {len(frame)} runs have finished')
    if done.empty:
        raise UserError(f'{", ".join(map(str, args.folders))}: no run has finished yet')
    out = args.out or Path(os.path.commonpath([os.path.abspath(x) for x in args.folders]))
    out.mkdir(parents=True, exist_ok=True)
    write_text(done.to_csv(index=False), out / 'runs.csv')
    if args.levels:
        for model, part in done.groupby('model'):
            if value_of(part) == 'loss':
                raise UserError(f'--levels: {model} is no agent: leave it out by --only')
    for model, part in done.groupby('model'):
        for plan, one in part.groupby('plan'):
            for column, noun in SHOULD_AGREE.items():
                values = one.get(column, Series(dtype=str)).dropna().astype(str)
                found = {x for value in values for x in value.split(' + ')} - {''}
                if len(found) > 1:
                    print(f'{plan}: these runs had {len(found)} {noun}, see {column} in runs.csv')
        for run in part[part['changed'] != ''].itertuples():
            print(f'{run.folder} changed {run.changed} when it resumed')
        is_judged = part[value_of(part)].notna()
        for folder in part['folder'][~is_judged]:
            print(f'left out: {folder}: its last {value_of(part)} is not a number')
        print_other_differences(part[is_judged])
        tuned = (
            best_values(one) if is_tuned(one, args.figure) else one
            for _, one in part[is_judged].groupby('plan', sort=False)
        )
        part = pandas.concat(tuned, ignore_index=True)
        for name in [args.figure] if args.figure else fitting(part):
            save_figure(FIGURES[name](part), out / f'{name}_{model}.png')
        plans = [(plan, one) for plan, one in part.groupby('plan') if not varied(one)]
        sentences = [(plan, best_depths(scores_of(one))[-1]) for plan, one in plans]
        notes = [f'{plan}: {sentence}' for plan, sentence in sentences if sentence]
        if args.only is not None:
            notes.append(f'only runs with {args.only}')
        note = '\n'.join(notes)
        save_table(value_table(part), f'{out}/table_{model}', note)
        if args.levels:
            save_table(solve_table(part, str(args.levels)), f'{out}/solved_{model}')


if __name__ == '__main__':
    run_script(main)

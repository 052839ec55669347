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
the episodes of its last updates (see judged_return). Colors are those of Okabe and Ito, which
color-blind readers can tell apart; lines also differ in their markers.
"""

import argparse
import io
import math
import os
import textwrap
import zlib
from collections.abc import Iterable
from pathlib import Path

from configurator import Mistake, first_line, run_script

import matplotlib
import numpy as np
import pandas
from matplotlib.figure import Figure
from pandas import DataFrame, Series

from common import attempt, pick_device
from boxoban import load_levels
from convlstm import load_agent
from files import read_json, write_atomic, write_json, write_text
from hub import export_in, sizes_in
from paper.sweep import BAD_CONDITION
from run import log_of, settings_of
from sokoban import TIME_LIMIT, evaluate

PUBLISHED = Path(__file__).with_name('results') / 'paper'  # results of the paper and of others
MODELS = {'experts': 'Transformer', 'convlstm': 'ConvLSTM', 'convglu': 'ConvGLU', 'lstm': 'LSTM'}
SIZES = {'n_layer': 'L', 'n_expert': 'E', 'n_embd': 'd'}
CELL = ['model', 'plan', 'kind', *SIZES]  # runs that agree in these differ in settings or seed
# Columns that are no settings; neither are last_... and best_...
NO_SETTINGS = (
    'folder loss return step seconds finished seed out_dir resume overwrite script command commit '
    'torch device_name world rows starts wandb_id'
).split()
# The value with which an ablation compares the others, where it is not the first.
REFERENCE = {'aggregation': 'sqrt_sum', 'share_kv': True, 'residual': 'expert'}
COLORS = ('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9', '#000000')
MARKERS = 'osD^vPX'
BARS = {'se': 'one standard error', 'std': 'one standard deviation'}
# Without parse_math a dollar sign in a folder's name would start a formula.
STYLE = matplotlib.rc_context({'font.size': 8, 'legend.fontsize': 7, 'text.parse_math': False})
Folders = str | os.PathLike | Iterable


# ---- frames ----


def find_runs(folders: Folders) -> list[Path]:
    """Return the folders of all runs in these folders. Raises Mistake for one without a run."""
    found = {}
    for folder in [folders] if isinstance(folders, str | os.PathLike) else folders:
        tree = sorted(os.walk(folder))
        inside = [Path(x) for x, _, files in tree if {'config.json', 'log.jsonl'} <= {*files}]
        if not inside:
            raise Mistake(f'{folder}: holds no run, a folder with config.json and log.jsonl')
        found |= {path.resolve(): path for path in inside}
    return list(found.values())


def judged_return(log: DataFrame, log_interval: int) -> float:
    """Return the mean return of the episodes that ended in the last 5 x log_interval updates.

    A line of the log counts by its number of episodes. Of a line that covers earlier updates too,
    the part that lies in these updates counts; lines of evaluations alone do not."""
    lines = log[log['episodes'].notna()]
    step, before = lines['step'], lines['step'].shift(fill_value=0)
    start = step.max() - 5 * log_interval
    share = ((step - before.clip(lower=start)) / (step - before)).clip(lower=0)
    lines = lines.assign(weight=share * lines['episodes']).dropna(subset='episodic_return')
    total = lines['weight'].sum()
    return (lines['weight'] * lines['episodic_return']).sum() / total if total else math.nan


def runs(folders: Folders) -> DataFrame:
    """Return a frame with a row for each run in these folders: its folder, model, plan and kind,
    all settings, `step`, `seconds`, `finished`, `loss` or `return`, the last value of everything
    in the log (last_val_loss, ...) and the best of every evaluation (best_val_loss, ...)."""
    rows = []
    for folder in find_runs(folders):
        settings, log = settings_of(folder), DataFrame(log_of(folder))
        if missing := {'recurrent', 'seed', *SIZES} - settings.keys():
            raise Mistake(f'{folder}/config.json: has no {min(missing)}: not the settings of a run')
        row = {
            'folder': str(folder),
            'model': MODELS.get(settings.get('arch'), settings.get('arch')),
            'plan': folder.absolute().parent.name,
            'kind': 'recurrent' if settings.get('recurrent') else 'non-recurrent',
            'finished': False,
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
    order = ['model', 'plan', 'recurrent', *SIZES, 'seed']
    ascending = [name != 'recurrent' for name in order]  # recurrent runs first
    return DataFrame(rows).sort_values(order, ascending=ascending, kind='stable', ignore_index=True)


def curves(folders: Folders) -> DataFrame:
    """Return all lines of the logs of all runs in these folders in one frame, with the column
    `folder` to merge it with `runs`."""
    logs = [DataFrame(log_of(folder)).assign(folder=str(folder)) for folder in find_runs(folders)]
    return pandas.concat(logs, ignore_index=True)


def varied(frame: DataFrame) -> list[str]:
    """Return the settings that differ between runs of equal model, plan, kind and size, whatever
    their seeds. Raises Mistake for two runs that agree in all settings and in the seed."""
    groups = frame.groupby(CELL, dropna=False)
    settings = frame.filter(regex='^(?!last_|best_)').columns.difference([*CELL, *NO_SETTINGS])
    found = [name for name in settings if (groups[name].nunique(dropna=False) > 1).any()]
    if (twice := frame.duplicated([*CELL, 'seed', *found])).any():
        folder = frame.loc[twice, 'folder'].iloc[0]
        raise Mistake(f'{folder}: another folder holds a run of the same settings and seed')
    return found


def value_of(frame: DataFrame) -> str:
    """Return the column by which runs or points are judged, 'loss' or 'return'. Raises Mistake if
    no run has one yet."""
    for value in ('return', 'loss'):
        if value in frame and frame[value].notna().any():
            return value
    raise Mistake('no run has a loss, or returns of episodes, to show yet')


def score(frame: DataFrame) -> Series:
    """Return what is judged so that lower is better: the loss, or minus the return."""
    return frame['loss'] if value_of(frame) == 'loss' else -frame['return']


def best_values(
    frame: DataFrame,
    over: str = 'learning_rate',
    by: list[str] | None = None,
    seed: int | None = None,
) -> DataFrame:
    """Return the runs at the best value of a setting in each group, without the seed that chose it.

    by: columns that name a group (default: sizes, kind and all other varied settings); seed: the
    one that chooses (default: the lowest). If no other seed has run at a best value, return the
    runs that chose it; a group without other seeds is left out if another group has them."""
    by = by or [name for name in [*CELL, *varied(frame)] if name != over]
    chose = frame['seed'] == (frame['seed'].min() if seed is None else seed)
    scores = score(frame[chose]).dropna()
    best = frame.loc[scores.groupby([frame[name] for name in by], dropna=False).idxmin()]
    others = frame[~chose].merge(best[[*by, over]])
    return others if len(others) else best


# ---- points: means over seeds ----


def summarize(frame: DataFrame, by: list[str], value: str = '') -> DataFrame:
    """Return the mean of what is judged, or of another column, in each group, under that column's
    name, with `variance` (N - 1) and number of seeds `n`."""
    value = value or value_of(frame)
    groups = frame.dropna(subset=value).groupby(by, dropna=False, sort=False)[value]
    columns = {'mean': value, 'var': 'variance', 'count': 'n'}
    return groups.agg([*columns]).rename(columns=columns).reset_index().assign(published=False)


def cells(frame: DataFrame) -> DataFrame:
    """Return the points of all allocations. Raises Mistake if runs differ in a setting, too: they
    are no seeds of one experiment."""
    if settings := varied(frame):
        advice = 'give runs of one value, or draw --figure=ablation'
        raise Mistake(f'these runs differ in {", ".join(settings)}: {advice}')
    return summarize(frame, CELL)


def best_cells(points: DataFrame, by: list[str]) -> DataFrame:
    """Return the best point of each group among those with the most seeds: one with fewer seeds
    could win by one lucky seed."""
    points = points[points['n'] == points.groupby(by)['n'].transform('max')]
    return points.loc[score(points).groupby([points[name] for name in by], sort=False).idxmin()]


def published(name: str, frame: DataFrame) -> DataFrame:
    """Return results/paper/NAME.csv with the columns of points, of the plans and kinds in a frame,
    and the rows that belong to no plan."""
    names = {symbol: name for name, symbol in SIZES.items()}
    names |= {'variant': 'kind', 'mean_return': 'return', 'n_seeds': 'n'}
    table = pandas.read_csv(PUBLISHED / f'{name}.csv').rename(columns=names)
    table = table.assign(model='ConvLSTM', plan='sokoban-' + table['budget'], published=True)
    ours = frame[frame['model'] == 'ConvLSTM'].set_index(['plan', 'kind']).index
    known = table.set_index(['plan', 'kind']).index.isin(ours)
    return table[known | table['plan'].isna()].drop(columns='budget')


def with_paper(points: DataFrame) -> DataFrame:
    """Return points, followed by those of the paper for the same plans and kinds."""
    paper = published('sokoban_returns', points)
    return pandas.concat([points, paper], ignore_index=True) if len(paper) else points


def best_depths(frame: DataFrame, draws: int = 10_000) -> str:
    """Return a sentence on the best L of recurrent and of non-recurrent models and its certainty;
    '' if one kind is missing, or an allocation has one seed.

    The certainty is computed twice: by bootstrap draws of the seeds (with replacement), and by
    means with errors from a t distribution, which allows for the small number of seeds."""
    generator, t_generator = np.random.default_rng(1), np.random.default_rng(2)
    frame = frame.assign(score=score(frame)).dropna(subset='score').sort_values([*SIZES, 'seed'])
    best, best_by_t, parts = [], [], []
    for kind in ('recurrent', 'non-recurrent'):
        groups = frame[frame['kind'] == kind].groupby([*SIZES])['score']
        depths = np.array([L for (L, *_), _ in groups])
        values = [x.to_numpy() for _, x in groups]
        if min(map(len, values), default=0) < 2:
            return ''
        by_draw = [generator.choice(x, (draws, len(x))).mean(1) for x in values]
        by_t = [
            x.mean() + x.std(ddof=1) / len(x) ** 0.5 * t_generator.standard_t(len(x) - 1, draws)
            for x in values
        ]
        best.append(depths[np.argmin(by_draw, 0)])  # (draws,)
        best_by_t.append(depths[np.argmin(by_t, 0)])
        low, high = np.quantile(best[-1], (0.025, 0.975), method='nearest')
        observed = depths[np.argmin([x.mean() for x in values])]
        parts.append(f'{kind} {observed} (95%: {low} to {high})')
    (a, b), (a_by_t, b_by_t) = best, best_by_t
    return (
        f'Best L, {draws:,} bootstrap draws of seeds: {", ".join(parts)}, recurrent smaller in '
        f'{np.mean(a < b):.1%}, equal in {np.mean(a == b):.1%}, with errors of a t distribution '
        f'smaller in {np.mean(a_by_t < b_by_t):.1%}.'
    )


# ---- figures ----


@STYLE
def chart(
    points: DataFrame,
    x: str,
    y: str,
    title: str,
    error: str = 'se',
    values: list | None = None,
    sharey: bool = True,
    **labels: str,
) -> Figure:
    """Return a figure of points: a panel for each value of their column `panel`, in it a line for
    each value of `line`, y over x with error bars, dashed where `published` is true.

    error: 'se' or 'std'. values: those of x, drawn at equal distances (default: all in order); []
    draws x to scale. labels: xlabel and ylabel."""
    values = sorted(points[x].unique()) if values is None else values
    lines, panels = list(points['line'].unique()), list(points['panel'].unique())
    suffix = points['published'].map({True: ', published', False: ''})
    points = points.assign(label=points['line'] + suffix)
    columns = 1 if points['label'].str.len().max() > 23 else 2
    height = 3 + 0.18 * points.groupby('panel')['label'].nunique().max() / columns
    figure = Figure(figsize=(3.8 * max(len(panels), 1.5), height), layout='constrained')
    row = figure.subplots(1, len(panels), sharey=sharey, squeeze=False)[0]
    for axes, panel in zip(row, panels, strict=True):
        part = points[points['panel'] == panel]
        by = ['line', 'label', 'published']
        for (line, label, is_published), one in part.groupby(by, sort=False):
            at = one[x].map(values.index) if values else one[x]
            one = one.assign(at=at).sort_values('at')
            bars = (one['variance'] / (one['n'] if error == 'se' else 1)) ** 0.5
            k, every = lines.index(line), max(1, len(one) // 8)
            axes.errorbar(
                one['at'],
                one[y],
                bars if bars.notna().any() else None,
                label=label,
                color=COLORS[k % len(COLORS)],
                marker=MARKERS[k % len(MARKERS)],
                ls='--' if is_published else '-',
                mfc='white' if is_published else None,
                **{'ms': 4, 'lw': 1.2, 'capsize': 2, 'errorevery': every, 'markevery': every},
            )
        if values:
            axes.set_xticks(range(len(values)), map(str, values))
        axes.grid(alpha=0.3)
        axes.set(title=panel, **labels)
        if sharey:
            axes.label_outer()
        axes.legend(loc='upper center', bbox_to_anchor=(0.5, -0.18), ncols=columns, frameon=False)
    if points['variance'].notna().any():
        title += f'; bars: {BARS[error]}'
    figure.suptitle(textwrap.fill(title, int(15 * figure.get_figwidth())))
    return figure


def title_of(frame: DataFrame) -> str:
    """Return the models, plans and numbers of seeds of these runs."""
    n = sorted(summarize(frame, [*CELL, *varied(frame)])['n'].unique())
    names = [*frame['model'].unique(), *frame['plan'].unique()]
    return f'{", ".join(names)}, seeds: {" to ".join(map(str, {n[0]: 0, n[-1]: 0}))}'


def label_of(frame: DataFrame) -> str:
    """Return the label of an axis for what is judged."""
    if value_of(frame) == 'return':
        return 'return'
    is_bytes = 'tokenizer' in frame and (frame['tokenizer'] == 'bytes').any()
    return f'validation loss (nats per {"byte" if is_bytes else "token"})'


def name_cells(points: DataFrame, names: Iterable[str] = SIZES) -> Series:
    """Return 'L = 2, E = 8, d = 64' for each point."""
    parts = [f'{SIZES.get(name, name)} = ' + points[name].astype(str) for name in names]
    return parts[0].str.cat(parts[1:], sep=', ')


def panels_of(points: DataFrame) -> Series:
    """Return the kind of each point, and its plan if there are several."""
    one_plan = points['plan'].nunique() == 1
    return points['kind'] if one_plan else points['plan'] + ', ' + points['kind']


def by_size(frame: DataFrame, x: str, line: str, error: str) -> Figure:
    """Return a figure of the value by one size, with a line for each value of another one."""
    points = with_paper(cells(frame)).sort_values([line], kind='stable')
    points = points.assign(line=name_cells(points, [line]), panel=panels_of(points))
    labels = {'xlabel': {'n_layer': 'layers L', 'n_expert': 'experts E per layer'}[x]}
    labels['ylabel'] = label_of(frame)
    return chart(points, x, value_of(frame), title_of(frame), error, **labels)


def allocations(frame: DataFrame) -> Figure:
    """Draw the value by L, with a line for each width d."""
    return by_size(frame, 'n_layer', 'n_embd', 'std')


def scaling(frame: DataFrame) -> Figure:
    """Draw the value by E, with a line for each L."""
    return by_size(frame, 'n_expert', 'n_layer', 'se')


def saturation(frame: DataFrame) -> Figure:
    """Draw the best value with at most L layers: a line for each kind, or for several plans (of
    different budgets) a panel for each kind and a line for each plan."""
    points, by = with_paper(cells(frame)), ['published', 'plan', 'kind']
    parts = [
        best_cells(group[group['n_layer'] <= L], by).assign(n_layer=L)
        for _, group in points.groupby(by, sort=False)
        for L in group['n_layer'].unique()
    ]
    points = pandas.concat(parts)
    several = points['plan'].nunique() > 1
    points = points.assign(
        line=points['plan' if several else 'kind'], panel=points['kind'] if several else ''
    )
    labels = {'xlabel': 'at most L layers', 'ylabel': f'best {label_of(frame)}'}
    return chart(points, 'n_layer', value_of(frame), title_of(frame), **labels)


def ablation(frame: DataFrame, setting: str = '') -> Figure:
    """Draw the value by a setting (default: the first that varies), and beside it the difference
    from the reference value. The seeds of both count as independent."""
    y, settings = value_of(frame), varied(frame)
    if not settings:
        raise Mistake('ablation: these runs differ in no setting but their sizes and seeds')
    setting = setting or settings[0]
    others = [name for name in [*CELL, *settings] if name != setting]
    points = summarize(frame, [*others, setting])
    values = sorted(points[setting].unique(), key=lambda x: (isinstance(x, str), x))
    # every expert of the paper reads all others: the largest radius
    first = values[-1 if setting == 'radius' else 0]
    reference = REFERENCE.get(setting) if REFERENCE.get(setting) in values else first
    names = [*SIZES, *(name for name in settings if name != setting)]
    points = points.assign(line=points['kind'] + ', ' + name_cells(points, names), panel='value')
    base = points[points[setting] == reference][[*others, y, 'variance', 'n']]
    change = points.merge(base, on=others, suffixes=('', '_0'))
    change[y] -= change[f'{y}_0']
    change['variance'] += change['variance_0'] * change['n'] / change['n_0']
    change.loc[change[setting] == reference, 'variance'] = math.nan
    points = pandas.concat([points, change.assign(panel=f'minus that of {reference}')])
    labels = {'xlabel': setting, 'ylabel': label_of(frame)}
    return chart(points, setting, y, title_of(frame), values=values, sharey=False, **labels)


def learning(frame: DataFrame, y: str = '') -> Figure:
    """Draw loss or return over training data for the best allocation of each kind and L; of a loss
    the last three quarters, because the first values would flatten all differences.

    y: another column of `curves`; beside 'eval_solve_rate' stand published agents."""
    is_text = value_of(frame) == 'loss'
    x, y = ('tokens', y or 'val_loss') if is_text else ('env_steps', y or 'return_1000')
    best = best_cells(cells(frame), ['plan', 'kind', 'n_layer'])
    shown = frame.merge(best[CELL])[['folder', *CELL]]
    data = curves(shown['folder']).reindex(columns=['folder', x, y]).dropna().merge(shown)
    if data.empty:
        raise Mistake(f'learning: the logs of these runs have no {y}')
    points = summarize(data[data[x] >= data[x].max() / 4 * is_text], [*CELL, x], y)
    points = points[points['n'] == points.groupby(CELL)['n'].transform('max')]
    points = points.assign(line=name_cells(points), panel=panels_of(points))
    title, ylabel = title_of(frame), 'return, mean of 1,000 episodes'
    if y == 'eval_solve_rate':
        ylabel = 'levels solved, greedy actions'
        title += f', on {", ".join(frame["eval_split"].unique())}; published: on unfiltered-test'
        agents = published_agents()
        agents = agents[agents[x] <= 1.05 * points[x].max()]
        panels = [agents.assign(panel=panel) for panel in points['panel'].unique()]
        points = pandas.concat([points, *panels])
    points[x] /= 1e6
    labels = {'xlabel': f'{x.replace("_", " ")} (millions)'}
    labels['ylabel'] = label_of(frame) if is_text else ylabel
    return chart(points, x, y, title, 'std', [], **labels)


def solved(frame: DataFrame) -> Figure:
    """Draw greedy solve rates on the evaluation levels beside those of published agents."""
    return learning(frame, 'eval_solve_rate')


FIGURES = {f.__name__: f for f in (allocations, saturation, scaling, ablation, learning, solved)}


def fitting(frame: DataFrame) -> list[str]:
    """Return the names of the figures that fit the runs of one model."""
    if varied(frame):
        return ['ablation']
    experts = frame.groupby(['plan', 'kind', 'n_layer', 'n_embd'])['n_expert'].nunique()
    if (experts > 1).any():
        return ['scaling']
    has_rates = 'best_eval_solve_rate' in frame and value_of(frame) == 'return'
    return ['allocations', 'saturation', 'learning'] + ['solved'] * has_rates


# ---- tables ----


def value_table(frame: DataFrame) -> DataFrame:
    """Return mean, variance (N - 1) and number of seeds of every allocation and setting, followed
    by the paper's; `best` marks the best of each plan and kind."""
    points = summarize(frame, [*CELL, *varied(frame)])
    points['best'] = points.index.isin(best_cells(points, ['plan', 'kind']).index)
    return with_paper(points)


def published_agents() -> DataFrame:
    """Return solve rates of published agents on unfiltered-test by environment steps: DRC(3,3),
    DRC(1,1) and a ResNet, trained by IMPALA with 256 boards, from the data files of
    AlignmentResearch/learned-planner."""
    table = pandas.read_csv(PUBLISHED / 'published_drc_by_steps.csv')
    names = {'agent': 'line', 'solve_rate_mean': 'eval_solve_rate', 'seeds': 'n'}
    return table.rename(columns=names).assign(variance=math.nan, published=True)


def solve_rate(folder: str, split: str) -> float:
    """Return the greedy solve rate of a run's best agent on a split of Boxoban.

    It is kept in best/eval_SPLIT.json, and taken from there only if it is of the same levels, time
    limit and training step."""
    settings = settings_of(folder)
    levels, _ = load_levels(settings['levels_dir'], split)
    about = {
        'levels': split,
        'n': len(levels),
        'crc32': zlib.crc32(levels),
        'time_limit': settings.get('time_limit', TIME_LIMIT),
        'step': sizes_in(folder)['step'],
    }
    path = export_in(folder) / f'eval_{Path(split).stem}.json'
    saved = read_json(path)
    if not (saved.items() >= about.items() and 'solve_rate' in saved):
        print(f'{folder}: evaluating on {len(levels):,} levels of {split}', flush=True)
        device = pick_device('auto')
        agent = load_agent(folder, 'best', device)
        saved = about | evaluate(agent, levels, device, time_limit=about['time_limit'])
        attempt(path, lambda: write_json(saved, path))  # the folder may be read-only
    return saved['solve_rate']


def solve_table(frame: DataFrame, split: str = '') -> DataFrame:
    """Return the greedy solve rates, in percent, of the best allocation of each plan, kind and L:
    on a split of Boxoban, or without one those on the evaluation levels at the end of training. On
    unfiltered-test the paper's and those of published agents follow."""
    best = best_cells(cells(frame), ['plan', 'kind', 'n_layer'])
    shown = frame.merge(best[CELL])
    if split:
        shown['last_eval_solve_rate'] = [solve_rate(folder, split) for folder in shown['folder']]
    points = summarize(shown, CELL, 'last_eval_solve_rate').rename(columns={'n': 'seeds'})
    table = points.assign(percent=100 * points['last_eval_solve_rate'])
    table['std'] = 100 * table['variance'] ** 0.5
    table = table[[*CELL, 'percent', 'std', 'seeds', 'published']]
    if split == 'unfiltered-test':
        paper = published('sokoban_solve_rates', frame)
        paper = paper.rename(columns={'unfiltered_test_percent': 'percent'})
        agents = published_agents().rename(columns={'line': 'kind', 'n': 'seeds'})
        agents = agents.assign(percent=100 * agents['eval_solve_rate'])
        agents = agents[agents['env_steps'].isin((10_014_720, 50_073_600))]
        columns = ['kind', 'env_steps', 'percent', 'seeds', 'published']
        table = pandas.concat([table, paper, agents[columns]])
    return table.assign(levels=split or ', '.join(frame['eval_split'].unique()))


def save_table(table: DataFrame, path: str, note: str = '') -> None:
    """Write a table as path.csv and, with five significant digits and a note, as path.md."""

    def text(x: object) -> str:
        x = '' if pandas.isna(x) else f'{x:.5g}' if isinstance(x, float) else str(x)
        return x.replace('|', r'\|')

    rows = [[*table], ['---'] * len(table.columns), *table.map(text).values.tolist()]
    lines = [f'| {" | ".join(row)} |\n' for row in rows]
    write_text(table.to_csv(index=False, lineterminator='\n'), f'{path}.csv')
    write_text(''.join([*lines, f'\n{note}\n']), f'{path}.md')
    print(f'{path}.csv\n{path}.md')


@STYLE
def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure; the end of the path chooses the format, such as .png or .svg."""
    picture = io.BytesIO()
    figure.savefig(picture, format=Path(path).suffix[1:], dpi=150, bbox_inches='tight')
    write_atomic(path, lambda file: file.write(picture.getvalue()))
    print(path)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog='python -m paper.figures',
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument('folders', nargs='+', metavar='FOLDER', help='runs, or folders of runs')
    parser.add_argument('--figure', choices=[*FIGURES], help='draw this one only')
    parser.add_argument('--only', help='a condition on the runs, as in "residual == \'expert\'"')
    parser.add_argument('--out', type=Path, help='folder to write to; default: that of the runs')
    parser.add_argument('--levels', default='', help='split of Boxoban for solve rates')
    parser.add_argument('--tuned', default='learning_rate', help="setting to tune first; '': none")
    args = parser.parse_args()
    frame = runs(args.folders)
    try:
        frame = frame.query(args.only) if args.only else frame
    except BAD_CONDITION as error:
        raise Mistake(f'--only={args.only}: {first_line(error)}') from None
    done = frame[frame['finished']]
    print(f'{len(done)} of {len(frame)} runs have finished')
    if done.empty:
        raise Mistake(f'{", ".join(args.folders)}: no run has finished: nothing to draw')
    given = [Path(folder).absolute() for folder in args.folders]
    out = args.out or Path(os.path.commonpath(given))
    out.mkdir(parents=True, exist_ok=True)
    write_text(done.to_csv(index=False, lineterminator='\n'), out / 'runs.csv')
    for model, part in done.groupby('model'):
        part = best_values(part, args.tuned) if args.tuned in varied(part) else part
        for name in [args.figure] if args.figure else fitting(part):
            save_figure(FIGURES[name](part), out / f'{name}_{model}.png')
        plans = [one for _, one in part.groupby('plan') if not varied(one)]
        sentences = '\n'.join(filter(None, map(best_depths, plans)))
        save_table(value_table(part), f'{out}/table_{model}', sentences)
        if 'solved' in fitting(part):
            save_table(solve_table(part, args.levels), f'{out}/solved_{model}')


if __name__ == '__main__':
    run_script(main)

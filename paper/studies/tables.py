"""Print the numbers in README.md and results/README.md and draw the figures of the latter, all from
the tables of runs in results/. A row is a run, with columns as in figures.runs.

    python -m paper.studies.tables

The registered studies come first, by (recurrent, L): losses (depth.py), minus returns
(depth_agents.py), by L returns with the former scale and what it changes (initial_scale.py), losses
at one rate for all (depth_rates.py), and state tracking (states_rates.py, states.py).
Of each other table follow mean, standard error and number of seeds of every model, then those of
all differences, paired by seed. 'r4' is recurrent with L = 4, 'n8' non-recurrent with L = 8.

Of language models, loss_64k is the loss in nats per byte on 65,536 bytes and loss_512k that on
524,288 bytes, both in streams of 512 bytes; to_16, to_32, ... to_4096 are the losses on 524,288
bytes in streams of 4,096, at positions up to 16, from there to 32, and so on, and loss_4096 is
their mean.
"""

import math
from itertools import combinations

import numpy as np
import pandas
from pandas import DataFrame, Series

from data_states import MOVES, likeliest
from model import ModelConfig, build_model
from paper.figures import (
    CELL,
    PUBLISHED,
    best_depths,
    best_values,
    name_cells,
    scores_of,
    summarize,
)
from paper.studies import depth, depth_agents, depth_rates, initial_scale, states, states_rates
from support.plots import chart, save_figure

RESULTS = PUBLISHED.parent
WIDTHS = {f'to_{2 * n}': n for n in (16, 32, 64, 128, 256, 512, 1024, 2048)}  # positions
WIDTHS = {'to_16': 16, **WIDTHS}
VALUES = {
    'loss_64k': '65,536 bytes, streams of 512',
    'loss_512k': '524,288 bytes, streams of 512',
    'loss_4096': '524,288 bytes, streams of 4,096',
}


def read(name: str) -> DataFrame:
    """Return results/NAME.csv."""
    frame = pandas.read_csv(RESULTS / f'{name}.csv')
    if 'seed' in frame and 'name' not in frame:
        frame['name'] = frame['kind'].str[0] + frame['n_layer'].astype(str)
    if 'to_16' in frame:
        frame['loss_4096'] = np.average(frame[[*WIDTHS]], axis=1, weights=[*WIDTHS.values()])
        later = list(WIDTHS)[3:]
        frame['from_65'] = np.average(frame[later], axis=1, weights=[WIDTHS[x] for x in later])
    return frame


def show(title: str, frame: DataFrame, value: str) -> DataFrame:
    """Print means and differences of all names, and if there are several depths, which are best.
    Return the means by depth as points of a chart."""
    seeds = frame.pivot_table(value, 'seed', 'name', sort=False)
    pairs = {f'{b} - {a}': seeds[b] - seeds[a] for a, b in combinations(seeds, 2)}
    rows = pandas.concat([seeds, DataFrame(pairs)], axis=1).agg(['mean', 'sem', 'count'])
    print(f'\n{title}, {value}\n{rows.T.round(4).to_string()}')
    judged = 'loss' if 'loss' in value else 'return'
    frame = frame.assign(**{judged: frame[value]})
    if frame['n_layer'].nunique() > 1:
        print(best_depths(scores_of(frame))[-1])
    points = summarize(frame, CELL, judged)
    return points.assign(panel=VALUES.get(value, value), line=points['kind'], y=points[judged])


def draw(name: str, points: DataFrame, x: str, labels: tuple, title: str, **options) -> None:
    """Draw points as results/NAME.png."""
    figure = chart(points, x, 'y', labels, title, 'sem', sharey=False, **options)
    save_figure(figure, RESULTS / f'{name}.png')


def gain(frame: DataFrame, value: str) -> dict:
    """Return the gain from recurrence, n8 - r4, as a point of a chart."""
    seeds = frame.pivot_table(value, 'seed', 'name')
    x = (seeds['n8'] - seeds['r4']).dropna()
    return {'y': x.mean(), 'sem': x.sem(), 'n': len(x)}


def print_lead(processor: str, ratio: float, behind: float, doubled: float) -> None:
    """Print how far n8 is ahead of r2 after the time of r2. ratio: the time of r2 over that of n8;
    behind: the loss of r2 minus that of n8; doubled: what twice the updates take off that of n8."""
    ahead = [behind + x * doubled for x in (ratio - 1, math.log2(ratio))]
    print(
        f'{processor}: r2 takes {ratio:.2f} times the time of n8; after it, n8 is ahead by', end=' '
    )
    print('{:.4f} (linear), {:.4f} (log)'.format(*ahead))


def language_models() -> None:
    """The studies of language models."""
    # without seed 1, which chose the learning rates
    study = best_values(read('study').assign(loss=lambda x: x['loss_64k']), by=CELL)
    print(study.groupby('name')['learning_rate'].max())
    long = read('study_long').drop(columns='loss_64k')  # as many bytes: its own runs
    runs = pandas.concat([study, long, read('lengths')])
    runs['line'] = (runs['step'] * 10_240 / 1e6).map('{:.3g} MB'.format)
    by_depth, by_length = [], []
    for (step, MB), part in runs.groupby(['step', 'line']):
        for value in VALUES:
            points = show(MB, part, value)
            by_depth += [points] if step == 688 else []
            point = {'panel': 'n8 - r4', 'line': VALUES[value], 'MB': step * 0.01024}
            by_length.append(gain(part, value) | point)
    before = long.assign(loss=long['loss_4096']).query('seed <= 4')
    print(f'\nseeds 2 to 4, loss_4096: {best_depths(scores_of(before))[-1]}')
    blocks = depth.whole_blocks(depth.TABLE, depth.ALLOCATIONS)
    common = [(recurrent, L) for recurrent in (True, False) for L in (2, 4, 8)]
    print(f'registered, L = 2, 4, 8 of both: {best_depths(blocks[common])[-1]}')
    registered = DataFrame({'y': blocks.mean(), 'sem': blocks.sem(), 'n': blocks.count()})
    registered = registered.reset_index(names=['recurrent', 'n_layer'])
    registered['line'] = np.where(registered['recurrent'], 'recurrent', 'non-recurrent')
    registered['panel'] = 'registered: streams of 4,096'
    labels = 'layers L', 'loss, nats/byte'
    points = pandas.concat([registered, *by_depth])
    draw('depth', points, 'n_layer', labels, 'Byte models of equal cost, 7.05 MB')
    labels = 'MB trained on', 'gain from recurrence, nats/byte'
    draw('lengths', DataFrame(by_length), 'MB', labels, 'Gain by length of training', to_scale=True)
    rates = long.groupby('name')['bytes_per_s'].mean()
    ratio = rates['n8'] / rates
    loss = runs.groupby(['name', 'step'])['loss_4096'].mean()
    doubled = loss['n8', 688] - loss['n8', 1376]
    print(f'\nbytes/s of n8 / those of r2, r4: {ratio["r2"]:.2f}, {ratio["r4"]:.2f}')
    print_lead('Xeon', ratio['r2'], loss['r2', 688] - loss['n8', 688], doubled)
    undisturbed = pandas.read_csv(depth.TABLE).query('seed > 11')  # block 11 ran on a busy machine
    seconds = undisturbed.groupby(['recurrent', 'n_layer'])['seconds'].sum()
    r2, n8 = (True, 2), (False, 8)
    means = blocks.mean()
    print_lead('Zen 4', seconds[r2] / seconds[n8], means[r2] - means[n8], doubled)
    pairs = study.merge(read('study_long'), on=['name', 'seed'])
    difference = (pairs['loss_64k_x'] - pairs['loss_64k_y']).abs().max()
    print(f'loss_64k of one seed on a Zen 5 and on a Xeon: at most {difference:.4f} apart')
    models = [
        build_model(ModelConfig(256, L, 16 // L, 48, n_head=2), k) for k, L in depth.ALLOCATIONS
    ]
    counts = [sum(p.numel() for p in model.parameters()) for model in models]
    print(f'parameters of the registered models: {min(counts)} to {max(counts)}')

    other, reset = read('other_text'), read('reset')
    for value in VALUES:
        show('other text', other, value)
    kept = long[(long['kind'] == 'recurrent') | (long['name'] == 'n16')]
    show('one residual per layer', pandas.concat([kept, read('shared')]), 'loss_4096')
    resets = [long.query('name == "r4"'), reset.query('name == "r4"').assign(name='r4, resets')]
    for value in ('to_16', 'from_65'):
        show('reset every 32 updates', pandas.concat(resets), value)
    parts = dict(list(runs.sort_values('step').groupby('line', sort=False)))
    parts |= {
        '7.05 MB of other text': other,
        '7.05 MB, --reset_every=32': pandas.concat([reset, long.query('name == "n8"')]),
    }
    points = DataFrame(
        gain(part, value) | {'line': line, 'x': int(value[3:]), 'panel': 'all positions'}
        for line, part in parts.items()
        for value in WIDTHS
    )
    print(points.round(4).to_string())
    points = pandas.concat([points, points[points['x'] > 16].assign(panel='from byte 17 on')])
    labels = 'bytes of a stream, up to', 'gain from recurrence, nats/byte'
    draw('by_position', points, 'x', labels, 'Gain by position, n8 - r4')

    ablated = read('aggregation').query('seed > 1').fillna({'shared_values': ''})
    ablated['name'] += ablated[['aggregation', 'residual', 'shared_values']].agg(' '.join, axis=1)
    show('aggregation', pandas.concat([study.query('n_layer == 2'), ablated]), 'loss_64k')
    starts = read('init_b')
    show('b', starts.assign(name=starts['name'] + ' ' + starts['init_b']), 'loss_4096')


def agents() -> None:
    """The studies of agents."""
    runs = read('convlstm').query('plan == "convlstm"')
    points = [show('ConvLSTM', runs, value) for value in ('return', 'last_eval_solve_rate')]
    title = 'ConvLSTMs of eight experts on easy levels'
    draw('convlstm', pandas.concat(points), 'n_layer', ('layers L', ''), title)

    runs = read('boxoban')
    runs['line'] = runs['kind'] + ', ' + name_cells(runs, ['n_layer', 'n_expert'])
    p = runs['train_solve_rate']
    runs['error'] = (p * (1 - p) / runs['train_games']) ** 0.5  # from the number of games
    print(runs.filter(regex='^name|solve_rate|_return|seconds|error').to_string())
    runs = runs[runs['start'] == 'easy levels'].set_index('line')
    for column, outer in (('train_solve_rate', np.subtract.outer), ('error', np.hypot.outer)):
        x = runs[column].to_numpy()
        table = DataFrame(outer(x, x), runs.index, runs.index)
        print(f'\n{column}, row minus column\n{table.round(4).to_string()}')
    curves = read('boxoban_curves').melt(['name', 'env_steps'], var_name='panel', value_name='y')
    curves = curves.dropna().merge(runs.reset_index()[['name', 'line']])
    # of DRC(3,3), DRC(1,1) and a ResNet, from the data files of AlignmentResearch/learned-planner
    known = read('paper/published_drc_by_steps').query('env_steps < 10.1e6')
    known = known.assign(line=known['agent'] + ', published', style='--')
    known = known.rename(columns={'solve_rate_mean': 'y'}).assign(panel='eval_solve_rate')
    points = pandas.concat([curves.assign(style='-'), known]).assign(sem=math.nan)
    title = 'ConvGLU on Boxoban, initialized from easy levels, one seed; published: unfiltered-test'
    draw('boxoban', points, 'env_steps', ('environment steps', ''), title, to_scale=True)


def state_tracking() -> None:
    """The study of state tracking: accuracies by number of moves, of the blocks that are judged."""
    table, budgets = states.read_tuned()
    panels = {
        'after 3.3 MB': budgets['equal bytes'],
        'after equal time on one CPU core': budgets['equal seconds'],
    }
    guessing = Series(likeliest(MOVES['S5'], 32), name='y').rename_axis('moves').reset_index()
    points = []
    for panel, updates in panels.items():
        blocks = states.whole_blocks(table, updates).index
        rows = states.rows_of(table, updates).set_index(['seed', 'processor']).loc[blocks]
        for n in range(1, 33):
            means = summarize(rows, ['name'], f'at_{n}').rename(columns={f'at_{n}': 'y'})
            points.append(means.assign(panel=panel, moves=n))
        if len(blocks):
            points.append(guessing.assign(panel=panel, name='guessing'))
    points = pandas.concat(points)
    kinds = {'r': 'recurrent, L = ', 'n': 'non-recurrent, L = '}
    kind, points['color'] = points['name'].str[0].map(kinds), points['name'].str[1:]
    points['line'] = (kind + points['color']).fillna(points['name'].replace('lstm', 'LSTM'))
    points['style'] = points['name'].str[0].map({'n': '--'}).fillna('-')
    labels = 'moves since an arrangement was last shown', 'right answers'
    title = 'State tracking, S5: L layers of 8 / L experts'
    draw('states', points, 'moves', labels, title, to_scale=True, reference='guessing')


def main() -> None:
    for study in (depth, depth_agents, initial_scale, depth_rates, states_rates, states):
        if study.TABLE.exists():  # its first run may still be missing
            study.report()
    language_models()
    agents()
    state_tracking()
    for name in ('probes', 'ppo', 'speed'):
        print(f'\n{name}\n{read(name).to_string()}')
    speed = read('speed').query('d == 256 and dtype == "float32" and mode in ("plain", "fast")')
    speed = speed[speed['unit'] == 'tokens/s'].pivot(
        index=['L', 'E'], columns='mode', values='median'
    )
    print(f'\nfast / plain, d = 256, fp32\n{(speed["fast"] / speed["plain"]).dropna().round(2)}')


if __name__ == '__main__':
    main()

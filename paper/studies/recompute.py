"""Print the numbers in README.md and results/README.md and draw the figures of the latter, all from
the tables of runs in results/. A row is a run, with columns as in figures.runs.

    python -m paper.studies.recompute

Of language models, loss_64k is the loss in nats per byte on 65,536 bytes and loss_512k that on
524,288 bytes, both in streams of 512 bytes; to_16, to_32, ... to_4096 are the losses on 524,288
bytes in streams of 4,096, at positions up to 16, from there to 32, and so on. ± is one standard
error, and the number of seeds follows in parentheses. 'r4' is recurrent with L = 4, 'n8'
non-recurrent with L = 8; differences are paired by seed.
"""

import math

import pandas
from pandas import DataFrame

from paper import figures
from paper.figures import best_cells, best_depths, chart, save_figure, summarize, value_of

RESULTS = figures.PUBLISHED.parent
ENDS = [16, 32, 64, 128, 256, 512, 1024, 2048, 4096]
SPANS = list(zip([0, *ENDS[:-1]], ENDS, strict=True))
GAIN = 'gain from recurrence, nats/byte'
CELL = ['kind', 'n_layer']
UPDATE = 10_240 / 1e6  # MB of text


def read(name: str, judged: str = '', column: str = 'loss') -> DataFrame:
    """Return results/NAME.csv; with `judged`, the runs that have this value, as `column`."""
    frame = pandas.read_csv(RESULTS / f'{name}.csv')
    return frame.assign(**{column: frame[judged]}).dropna(subset=column) if judged else frame


def in_streams(frame: DataFrame, start: int = 0, end: int = 4096) -> DataFrame:
    """Return the runs with the mean loss at the positions from start to end of streams of 4,096."""
    spans = [(b - a, f'to_{b}') for a, b in SPANS if start <= a and b <= end]
    total = sum(n * frame[name] for n, name in spans)
    return frame.assign(loss=total / sum(n for n, _ in spans)).dropna(subset='loss')


def pick(frame: DataFrame, name: str) -> DataFrame:
    """Return the runs of one kind and depth, such as 'r4'."""
    kind = {'r': 'recurrent', 'n': 'non-recurrent'}[name[0]]
    return frame[(frame['kind'] == kind) & (frame['n_layer'] == int(name[1:]))]


def show(title: str, frame: DataFrame, by: list[str] = CELL) -> DataFrame:
    """Print and return the mean of each group; by depth, print the best depths, too."""
    print(f'\n{title}')
    points = summarize(frame, by)
    for p in points.to_dict('records'):
        value, error = p[value_of(points)], math.sqrt(p['variance'] / p['n'])
        print(f'    {", ".join(str(p[name]) for name in by)}: {value:.4f} ± {error:.4f} ({p["n"]})')
    if by == CELL:
        print(f'    {best_depths(frame)}')
    return points.assign(panel=title, line=points[by[0]])


def minus(title: str, a: DataFrame, b: DataFrame, **point: object) -> dict:
    """Print and return the mean of a - b, as a point of a chart."""
    x = (a.set_index('seed')['loss'] - b.set_index('seed')['loss']).dropna()
    print(f'    {title}: {x.mean():.4f} ± {x.sem():.4f} ({len(x)})')
    return {GAIN: x.mean(), 'variance': x.var(), 'n': len(x), 'published': False, **point}


def gain(title: str, frame: DataFrame, a: str = 'n8', b: str = 'r4', **point: object) -> dict:
    return minus(f'{title}, {a} - {b}', pick(frame, a), pick(frame, b), **point)


def draw(name: str, points: DataFrame, x: str, y: str, title: str, **options: object) -> None:
    options = {'ylabel': y, 'sharey': False, **options}
    save_figure(chart(points, x, y, title, **options), RESULTS / f'{name}.png')


def language_models() -> None:
    """The studies `study`, `study_long`, `shared` and `lengths`."""
    # without seed 1, which chose the learning rates
    study = figures.best_values(read('study', 'loss_64k'), by=figures.CELL)
    every = pandas.concat([read('lengths'), read('study_long')])
    long = in_streams(read('study_long'))
    print('learning rates:', study.groupby(CELL, sort=False)['learning_rate'].max().to_dict())
    points = [
        show('65,536 bytes, streams of 512', study),
        show('524,288 bytes, streams of 512', study.assign(loss=study['loss_512k'])),
        show('524,288 bytes, streams of 4,096', long),
    ]
    title = 'Byte models of equal cost, 7.05 MB of speeches'
    draw(
        'depth',
        pandas.concat(points),
        'n_layer',
        'loss',
        title,
        xlabel='layers L',
        ylabel='loss, nats/byte',
    )
    for pair in ('r2 r8', 'n2 n8', 'n1 r1', 'n2 r2', 'n4 r4', 'n8 r8', 'n16 r16', 'n8 r1'):
        gain('streams of 4,096', long, *pair.split())
    shared = [long.query('kind == "recurrent"'), in_streams(read('shared')), pick(long, 'n16')]
    show('one residual per layer without recurrence, streams of 4,096', pandas.concat(shared))

    speed = long.groupby(CELL)['bytes_per_s'].mean()
    ratio = {L: speed['non-recurrent', 8] / speed['recurrent', L] for L in (2, 4)}
    n8, twice, r2 = (
        pick(in_streams(every[every['step'] == step]), name)['loss'].mean()
        for step, name in ((688, 'n8'), (1376, 'n8'), (688, 'r2'))
    )
    ahead = [r2 - n8 + share * (n8 - twice) for share in (ratio[2] - 1, math.log2(ratio[2]))]
    print(f'    bytes/s of n8 / those of r2, r4: {ratio}')
    print(
        f'    after the time of r2, n8 is ahead by {ahead}, interpolated linearly and by logarithm'
    )

    points = []
    for step, runs in every.groupby('step'):
        size, one = f'{step * UPDATE:.3g} MB', study
        if step != 688:
            one = runs.assign(loss=runs['loss_64k']).dropna(subset='loss')
            show(f'{size}, 65,536 bytes, streams of 512', one)
        best = best_cells(summarize(one, CELL), ['kind']).set_index('kind')['n_layer']
        pair = f'n{best["non-recurrent"]}', f'r{best["recurrent"]}'
        gain(f'{size}, 65,536 bytes, streams of 512', one, *pair)
        at = {'MB': step * UPDATE, 'panel': '524,288 bytes'}
        one = one.assign(loss=one['loss_512k'])
        points += [
            gain(f'{size}, streams of 512', one, *pair, line='streams of 512, best depths', **at),
            gain(f'{size}, streams of 4,096', in_streams(runs), line='streams of 4,096', **at),
        ]
    title = 'Gain from recurrence by length of training'
    draw('lengths', DataFrame(points), 'MB', GAIN, title, values=[], xlabel='MB trained on')


def positions() -> None:
    """The studies `other_text` and `reset`, and the gain by position in a stream."""
    other, reset, every = read('other_text'), read('reset'), read('lengths')
    every = pandas.concat([every, read('study_long')])
    show('other text, 524,288 bytes, streams of 512', read('other_text', 'loss_512k'))
    gain('other text, streams of 4,096', in_streams(other))
    long = every[every['step'] == 688]
    for start in (0, 64):
        end = 16 if start == 0 else 4096
        a, b = (pick(in_streams(runs, start, end), 'r4') for runs in (long, reset))
        minus(f'bytes {start + 1} to {end}, r4 - r4 with resets', a, b)
    groups = {f'{step * UPDATE:.3g} MB': runs for step, runs in every.groupby('step')}
    groups['7.05 MB of other text'] = other
    groups['7.05 MB, --reset_every=32'] = pandas.concat([reset, pick(long, 'n8')])
    points = DataFrame(
        gain(f'{line}, bytes {a + 1} to {b}', in_streams(runs, a, b), line=line, position=b)
        for line, runs in groups.items()
        for a, b in SPANS
    )
    later = points[points['position'] > 16].assign(panel='from byte 17 on')
    points = pandas.concat([points.assign(panel='all positions'), later])
    title = 'Gain from recurrence by position (non-recurrent L = 8, recurrent L = 4)'
    draw('by_position', points, 'position', GAIN, title, xlabel='bytes of a stream, up to')


def ablations() -> None:
    """The studies `aggregation`, `init_b` and `demo`."""
    default = figures.best_values(read('study', 'loss_64k'), by=figures.CELL)
    runs = read('aggregation', 'loss_64k').query('seed > 1')
    by = ['kind', 'aggregation', 'residual', 'shared_values']
    show('aggregation and residual, L = 2, 65,536 bytes, streams of 512', runs, by)
    for names, part in runs.groupby(by, sort=False, dropna=False):
        minus(f'{names} - default', part, pick(default, f'{names[0][0]}2'))
    runs = read('init_b', 'loss_4096')
    show('starting scale b, streams of 4,096', runs, ['n_layer', 'init_b'])
    for L, part in runs.groupby('n_layer'):
        one, other = (part[part['init_b'] == name] for name in ('one', 'sqrt_experts'))
        minus(f'L = {L}, sqrt(E) - 1', other, one)
    print('\ndemo\n', read('demo').to_string())


def agents() -> None:
    """The studies `boxoban`, `convlstm`, `probes` and `ppo`."""
    runs = read('convlstm').query('plan == "convlstm"')
    labels = {'return': 'return, sampled actions', 'last_eval_solve_rate': 'solved, greedy actions'}
    points = []
    for column, label in labels.items():
        points.append(show(f'convlstm, {label}', runs.assign(**{'return': runs[column]})))
    title = 'ConvLSTMs of eight experts on easy levels'
    draw(
        'convlstm', pandas.concat(points), 'n_layer', 'return', title, xlabel='layers L', ylabel=''
    )

    runs = read('boxoban')
    print('\nboxoban\n', runs.filter(regex='name|solve_rate|_return|seconds').to_string())
    sized = runs[runs['start'] == 'easy levels'].set_index(['kind', 'n_layer', 'n_expert'])
    p = sized['train_solve_rate']
    variance = p * (1 - p) / sized['train_games']
    for kind in p.index.unique('kind'):
        for E in (4, 1):
            ends = [(kind, 4, 1), (kind, 1, E)]
            error = variance[ends].sum() ** 0.5
            depth = f'{p[ends[0]] - p[ends[1]]:.4f} ± {error:.4f}'
            print(f'    {kind}, solved in training, L = 4, E = 1 - L = 1, E = {E}: {depth}')
    curves = read('boxoban_curves').melt(['name', 'env_steps'], var_name='panel', value_name='y')
    curves = curves.dropna().merge(sized.reset_index()[['name', 'kind', 'n_layer', 'n_expert']])
    curves['line'] = curves['kind'] + ', ' + figures.name_cells(curves, ['n_layer', 'n_expert'])
    curves = curves.assign(variance=math.nan, n=1, published=False)
    agents = figures.published_agents().query('env_steps < 10.1e6')
    agents = agents.assign(panel='eval_solve_rate', y=agents['eval_solve_rate'])
    points = pandas.concat([curves.sort_values(['kind', 'n_layer'], ascending=False), agents])
    points['env_steps'] /= 1e6
    title = 'ConvGLU on Boxoban, initialized from easy levels, one seed; published: unfiltered-test'
    labels = {'values': [], 'xlabel': 'environment steps (millions)', 'ylabel': ''}
    draw('boxoban', points, 'env_steps', 'y', title, **labels)
    for name in ('probes', 'ppo'):
        print(f'\n{name}\n', read(name).to_string())


def main() -> None:
    language_models()
    positions()
    ablations()
    agents()
    print('\nspeed\n', read('speed').to_string())


if __name__ == '__main__':
    main()

"""Study, registered before its first run: does a recurrent layer track states better than layers
without recurrence, and do more recurrent layers help?

The nine models of states_rates.py, at their best rates of its seed 1, on S5 with 1 to 32 moves
between two arrangements (data_states.py). The measure is the mean of the accuracies at 1 to 32
moves, 1,000 chains each, none of whose long ones is in a training text (paper/states.py), after the
last update. Three budgets: equal bytes, 800 updates of 4,096 bytes; twice the bytes; and equal
seconds, for each model as many updates as it makes in the time of 800 of recurrent L = 1, by the
times in states_rates.csv. Seeds 11 to 14: the nine runs of a seed in a budget are a block on one
kind of processor, and a block that a change of processor interrupts starts over. Nothing is added
to this afterwards.

Rules, by 100,000 draws with t-distributed errors (depth.py). Each is confirmed if it holds in at
least 95% of them, refuted if it fails in at least 95% (a: by the same non-recurrent model), and
else undecided:

(a) recurrent L = 1 is above every non-recurrent model;
(b) with recurrence, L = 8 is not above L = 1 by more than 0.05;
(c) without recurrence, L = 8 is above L = 1 by more than 0.05.

(b) and (c) are undecided, too, if both means exceed 0.97. The rules are judged after equal bytes
and after equal seconds; twice the bytes are secondary. So are the LSTM, the largest n such that the
accuracy is at least 0.95 at every number of moves up to n, and the same models on Z5, whose moves
commute, after equal bytes: what belongs to S5 is the difference between S5 and Z5, paired by seed.

Non-recurrent models train on chunks of 256 bytes. They see 93% of the chains whole in training, of
those of 32 moves 84%; in the test, where W = 64 bytes slide, all up to 54 moves.

    python data_states.py
    python data_states.py --moves=Z5
    python -m paper.sweep states --run --workers=2 --only="seed == 11 and max_iters == 800"
    python -m paper.studies.states out/states

The third line runs a block and that of Z5, 40 minutes on two cores. The fourth adds the finished
runs of a folder to paper/results/states.csv, and prints whole blocks; behind the folder, it takes
the name of the processor of runs that did not record it (depth.py). The plan has no runs before
states_rates.csv has the rates of all models.
"""

from pathlib import Path

from support.script import UserError, run_script

import pandas
from pandas import DataFrame, Series

from paper.figures import draw_means
from paper.plans import Plan, Run
from paper.states import score, tracked
from paper.studies import states_rates
from paper.studies.depth import SEEDS, append, arguments, print_commits
from paper.studies.states_rates import KEY, MODELS, UPDATES, new_runs, tuned
from support.loader import read_meta

TABLE = states_rates.TABLE.with_stem('states')
DATA = {'S5': 'data/states_S5', 'Z5': 'data/states_Z5'}
TEXT = {  # entries of meta.json; data_states.py has the same defaults
    'most_moves': 32,
    'lengths': 'log-uniform',
    'seed': 1,
    'train_tokens': 16_000_000,
    'val_tokens': 131_072,
}
CEILING = 0.97  # two means above it cannot be told apart


def runs() -> list[Run]:
    """Return the runs of all models at their best rates; none before these are known."""
    models, found = tuned(), []
    if models.empty:
        return []
    for name, rate, updates in models[['rate', 'updates']].itertuples():
        budgets = sorted({UPDATES, 2 * UPDATES, int(updates)})
        for task, steps in [*(('S5', n) for n in budgets), ('Z5', UPDATES)]:
            axes = {'seed': SEEDS, 'data_dir': [DATA[task]]}
            found += states_rates.runs_of(name, [float(rate)], steps, **axes)
    return found


PLAN = Plan(
    'Study: state tracking, registered',
    runs,
    'python -m paper.studies.states {folders}'
    if len(tuned())
    else 'first, python -m paper.sweep states-rates --run',
)


def add(path: Path, folder: str, processor: str = '') -> None:
    """Score the finished runs in a folder that a table does not have yet, and add them to it.
    Raises UserError if the text of one is not that of the study."""
    for run in new_runs(path, folder, processor).to_dict('records'):
        meta = read_meta(run['data_dir']) or {}
        for name, value in TEXT.items():
            if meta.get(name) != value:
                reason = f'{name} = {meta.get(name)!r}, in the study {value!r}'
                raise UserError(f'{run["data_dir"]}: {reason}: this run is not part of the study')
        print(f'{run["folder"]}: reading', flush=True)
        scores = score(run, 1000, 'last').set_index('length')
        accuracies, is_beyond = scores['accuracy'], scores['beyond']
        row = {name: run[name] for name in (*KEY, 'loss', 'seconds', 'commit')}
        row |= {'task': scores['task'].iloc[0], 'mean': accuracies[~is_beyond].mean()}
        row |= {'tracked': tracked(accuracies), **accuracies.add_prefix('at_')}
        append(DataFrame([row]), path)


def rows_of(table: DataFrame, updates: Series, task: str = 'S5') -> DataFrame:
    """Return the rows of the registered seeds after `updates` of each model."""
    is_run = (table['task'] == task) & (table['step'] == table['name'].map(updates))
    return table[is_run & table['seed'].isin(SEEDS)]


def whole_blocks(
    table: DataFrame, updates: Series, task: str = 'S5', value: str = 'mean'
) -> DataFrame:
    """Return what is judged after `updates` of each model: a row for each (seed, processor) that
    has all models, of each seed the first in the table, and a column for each model."""
    table = rows_of(table, updates, task)
    blocks = table.pivot(index=['seed', 'processor'], columns='name', values=value)
    in_order = table.set_index(['seed', 'processor']).index.unique()
    return blocks.reindex(in_order, columns=[*MODELS]).dropna().groupby('seed').head(1)


def verdicts(blocks: DataFrame) -> list[str]:
    """Return what the rules say. blocks: a row per seed, a column per model."""
    means, found = draw_means(blocks), []
    above = DataFrame({name: means['r1'] > means[name] for name in ('n1', 'n2', 'n4', 'n8')})
    is_no_better = means['r8'] - means['r1'] <= 0.05
    is_better = means['n8'] - means['n1'] > 0.05
    # a rule, the shares of draws in which it holds and in which it fails, and what it compares
    for rule, holds, fails, pair in (
        ('(a) r1 above n1, n2, n4, n8', above.all(axis=1).mean(), 1 - above.mean().min(), []),
        (
            '(b) r8 at most 0.05 above r1',
            is_no_better.mean(),
            1 - is_no_better.mean(),
            ['r1', 'r8'],
        ),
        ('(c) n8 more than 0.05 above n1', is_better.mean(), 1 - is_better.mean(), ['n1', 'n8']),
    ):
        word = 'confirmed' if holds >= 0.95 else 'refuted' if fails >= 0.95 else 'undecided'
        if pair and blocks[pair].mean().min() > CEILING:
            word = f'undecided (both exceed {CEILING})'
        found.append(f'{rule}: {word}, holds in {holds:.1%} of draws, fails in {fails:.1%}')
    return found


def read_tuned(path: Path = TABLE) -> tuple[DataFrame, dict[str, Series]]:
    """Return the runs of a table at the best rates, and by budget the updates of each model."""
    table, models = pandas.read_csv(path), tuned()
    table = table[table['rate'] == table['name'].map(models['rate'])]
    bytes_ = Series(UPDATES, models.index)
    budgets = {
        'equal bytes': bytes_,
        'twice the bytes': 2 * bytes_,
        'equal seconds': models['updates'],
    }
    return table, budgets


def report(path: Path = TABLE) -> None:
    """Print the whole blocks of each budget with means and standard errors, the verdicts once every
    seed has a block, and what is secondary."""
    if not path.exists():
        raise UserError(f'{path}: no run has finished yet')
    table, budgets = read_tuned(path)
    for budget, updates in budgets.items():
        print(f'\nS5, {budget}: mean accuracy over 1 to 32 moves')
        blocks = whole_blocks(table, updates)
        if blocks.empty:
            print(f'0 of {len(SEEDS)} blocks')
            continue
        print(pandas.concat([blocks, blocks.agg(['mean', 'sem'])]).round(3).to_string())
        print_commits(rows_of(table, updates), blocks)
        if len(blocks) < len(SEEDS):
            print(f'{len(blocks)} of {len(SEEDS)} blocks')
        elif budget != 'twice the bytes':
            print(*verdicts(blocks), sep='\n')
        rows = whole_blocks(table, updates, value='tracked')
        print(f'tracked: {rows.mean().round(1).to_dict()}')
    updates = budgets['equal bytes']
    change = whole_blocks(table, updates) - whole_blocks(table, updates, 'Z5')
    print('\nS5 minus Z5, equal bytes')
    change = change.dropna().agg(['mean', 'sem', 'count']).round(3)
    print(change.to_string() if change.loc['count'].any() else 'no whole block')


def main() -> None:
    if arguments():
        add(TABLE, *arguments())
    report()


if __name__ == '__main__':
    run_script(main)

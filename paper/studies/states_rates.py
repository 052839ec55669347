r"""Study: the learning rates and the speed of the models of the registered study of state tracking
(states.py), by seed 1, which has no other use.

Nine models of L x E = 8 experts of width 64: recurrent and non-recurrent L = 1, 2, 4, 8, and an
LSTM with as many parameters as recurrent L = 1. Each trains on 3.3 MB of S5, 800 updates of 4,096
bytes. The best rate has the lowest validation loss after the last update; where it is the lowest or
the highest that was tried, the next one is tried, too, by a factor of two.

    python data_states.py
    python -m paper.sweep states-rates --run --workers=2
    python -m paper.sweep states-rates --run --vary=max_iters=60 \
        --only="learning_rate == 0.02 and arch != 'lstm' or baseline_lr == 0.016"
    python -m paper.studies.states_rates out/states-rates

The second line takes an hour on two cores. The third, with nothing beside it, takes the times from
which the study has its equal seconds: of each model the mean of the fastest 20 of 60 updates. The
last adds the finished runs of a folder to paper/results/states_rates.csv, and prints the best
rates; behind the folder, it takes the name of the processor of runs that did not record it
(depth.py). A rate beyond the edge:
`--vary=learning_rate=0.16 --only="recurrent and n_layer == 1 and arch != 'lstm'"`.
"""

from pathlib import Path

from support.script import UserError, run_script

import pandas
from pandas import DataFrame

from paper.figures import PUBLISHED
from paper.plans import Plan, equal_work, grid
from paper.studies.depth import append, arguments, finished_runs, unlisted
from support.run_folder import log_of

TABLE = PUBLISHED.parent / 'states_rates.csv'
DEPTHS = [1, 2, 4, 8]
MODELS = {f'r{cell["n_layer"]}': {'recurrent': True, **cell} for cell in equal_work(8, DEPTHS)}
MODELS |= {f'n{cell["n_layer"]}': {'recurrent': False, **cell} for cell in equal_work(8, DEPTHS)}
MODELS['lstm'] = {'arch': 'lstm', **MODELS['r1']}
RATES = {'r': [0.02, 0.04, 0.08], 'n': [0.005, 0.01, 0.02], 'l': [0.004, 0.008, 0.016, 0.032]}
UPDATES = 800
TIMED = 60  # updates of a run that only takes the time
KEY = ['name', 'data_dir', 'rate', 'step', 'seed', 'processor']  # a table has each once
COLUMNS = [*KEY, 'loss', 'seconds', 'commit']


def runs_of(name: str, rates: list[float], updates: int, **axes: list) -> list:
    """Return the runs of a model at these rates, with a validation after the last update only."""
    is_recurrent = MODELS[name]['recurrent']
    return grid(
        'train_lm.py',
        f'config/states{"" if is_recurrent else "_nonrecurrent"}.py',
        cells=[MODELS[name]],
        **{'baseline_lr' if name == 'lstm' else 'learning_rate': rates},
        **axes,
        max_iters=[updates],
        eval_interval=updates,
        threads=1,
        dtype='float32',  # of the model; Muon uses bfloat16 where it is fast
    )


PLAN = Plan(
    'Study: learning rates on state tracking',
    [run for name in MODELS for run in runs_of(name, RATES[name[0]], UPDATES, seed=[1])],
    'python -m paper.studies.states_rates {folders}',
)


def new_runs(path: Path, folder: str, processor: str = '') -> DataFrame:
    """Return the finished runs in a folder that a table does not have yet, with the names of their
    models and their rates. Raises UserError if none has finished."""
    table = finished_runs(path, folder, processor)
    is_lstm = table['arch'] == 'lstm'
    name = table['kind'].str[0] + table['n_layer'].astype(str)
    table['name'] = name.where(~is_lstm, 'lstm')
    table['rate'] = table['learning_rate'].where(~is_lstm, table['baseline_lr'])
    return unlisted(table, path, KEY)


def tuned(path: Path = TABLE) -> DataFrame:
    """Return a row for each model: its best `rate`, and in `updates` as many as it makes in the
    time of UPDATES updates of recurrent L = 1. There are no rows until seed 1 has tried all models,
    and their time has been taken, on one kind of processor; of several it is the first in the
    table, so that a repetition on another one changes nothing."""
    table = pandas.read_csv(path) if path.exists() else DataFrame(columns=[*COLUMNS, 'ms'])
    for _, part in table[table['seed'] == 1].groupby('processor', sort=False):
        tried, timed = (part[part['step'] == n] for n in (UPDATES, TIMED))
        if {*tried['name']} == {*timed['name']} == {*MODELS}:
            ms = timed.groupby('name')['ms'].min()
            best = tried.loc[tried.groupby('name')['loss'].idxmin()].set_index('name')
            updates = (UPDATES * ms['r1'] / ms).round().astype(int)
            return best.assign(ms=ms, updates=updates).loc[[*MODELS]]
    return DataFrame()


def report(path: Path = TABLE) -> None:
    """Print the losses by rate and, once all models have been tried and timed, the best rates and
    the updates in equal time."""
    if not path.exists():
        raise UserError(f'{path}: no run has finished yet')
    table, best = pandas.read_csv(path), tuned(path)
    table = table[(table['seed'] == 1) & (table['step'] == UPDATES)]
    if len(best):  # of one kind of processor
        table = table[table['processor'] == best['processor'].iloc[0]]
        print(best.to_string())
    losses = table.pivot_table('loss', 'name', 'rate')
    print(losses.round(4).to_string())
    for name, row in losses.iterrows():
        rates = row.dropna().index
        if row.idxmin() in (rates.min(), rates.max()):
            print(f'{name}: the best rate, {row.idxmin()}, is at the edge: try the next one, too')


def main() -> None:
    for run in new_runs(TABLE, *arguments()).to_dict('records') if arguments() else ():
        fastest = sorted(line['ms'] for line in log_of(run['folder']) if 'ms' in line)[:20]
        ms = sum(fastest) / len(fastest)
        append(DataFrame([{**{x: run[x] for x in COLUMNS}, 'ms': round(ms, 1)}]), TABLE)
    report()


if __name__ == '__main__':
    run_script(main)

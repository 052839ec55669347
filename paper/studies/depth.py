"""Study, registered before its first run: does recurrence make the best depth smaller?

Byte models of L x E = 16 experts of width 48 on 7.05 MB of speeches: recurrent L = 1, 2, 4, 8 and
non-recurrent L = 2, 4, 8, 16, at the learning rates of study_lm.py, which no seed of this study has
chosen. The measure is the loss on 524,288 bytes (twelve speeches) in streams of 4,096 bytes, after
the last update. Seeds 11 to 14: a seed is a block of eight runs on one kind of processor, and a
block that a change of processor interrupts starts over. Nothing is added to this afterwards.

Rule: "the best depth is smaller with recurrence" is confirmed if it is so in at least 95% of draws
with t-distributed errors, refuted if the best depth is larger in at least 95%, and else undecided.

    python data_fineweb.py --demo=True --tokenizer=bytes
    python -m paper.sweep depth --run --workers=2 --only="seed == 11" -- --threads=1
    python -m paper.studies.depth out/depth

The second line runs a block: 70 minutes on two cores of a Zen 4. The third adds the finished runs
of a folder to paper/results/depth.csv, their evaluations to depth_evaluations.csv, and prints whole
blocks. Processor and commit are those in config.json. Runs before 2026-11-28 did not record the
generation of the processor: give its name behind the folder.
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path

from support.script import UserError, run_script

import pandas
from pandas import DataFrame, Series

from paper.figures import PUBLISHED, best_depths, draw_means, runs, score, value_of
from paper.plans import Plan, Run, equal_work, full_settings, grid, read_runs
from paper.plans import runs_of as runs_of_plan
from paper.studies.study_lm import BYTES, CONFIGS, RATES
from paper.sweep import other_setting
from support.run_folder import log_of, settings_of

ALLOCATIONS = [(True, L) for L in (1, 2, 4, 8)] + [(False, L) for L in (2, 4, 8, 16)]
SEEDS = [11, 12, 13, 14]
TABLE = PUBLISHED.parent / 'depth.csv'
# data_checksum of the shards that the first command above prepares
SPEECHES = 1359326212
# A table has each run once, the first that was added.
RUN = ['seed', 'recurrent', 'n_layer', 'processor', 'n_expert', 'learning_rate']


def runs_of(recurrent: bool, L: int, learning_rate: float | list[float]) -> list[Run]:
    """Return the runs of an allocation. learning_rate: one, or a list of them as an axis."""
    return grid(
        'train_lm.py',
        CONFIGS[recurrent],
        cells=equal_work(16, [L]),
        recurrent=[recurrent],
        seed=SEEDS,
        learning_rate=learning_rate,
        dtype='float32',  # of the model; Muon uses bfloat16 where it is fast
        compile=False,
        val_tokens=524_288,
        val_streams=128,
        **{**BYTES, 'eval_interval': BYTES['max_iters']},
    )


PLAN = Plan(
    'Study: depth of language models, registered',
    [run for recurrent, L in ALLOCATIONS for run in runs_of(recurrent, L, RATES[recurrent][L])],
)


def verdict(blocks: DataFrame) -> str:
    """Return what the rule says. blocks: a row per seed and a column (recurrent, L) per allocation;
    lower values are better."""
    smaller, larger, sentence = best_depths(blocks)
    word = 'confirmed' if smaller >= 0.95 else 'refuted' if larger >= 0.95 else 'undecided'
    return f'{word}: {sentence}'


def origin(folder: str, processor: str = '') -> dict[str, str]:
    """Return the processor and the commits of a run, as its config.json tells. processor: its name
    where config.json does not tell the generation. Raises UserError if there is no name, or if the
    run has changed the processor."""
    settings = settings_of(folder)
    starts = settings.get('starts') or [settings]
    names = {start.get('device_name', '').removeprefix('CPU ') for start in starts}
    if len(names) > 1:
        raise UserError(f'{folder}: ran on {" and on ".join(sorted(names))}: run it again, on one')
    (name,) = names
    if settings.get('device', 'cpu') == 'cpu' and not re.search(', (family|implementer) ', name):
        name = processor
    if not name:
        advice = "name it behind the folder, as in 'AMD EPYC, Zen 4'"
        raise UserError(f'{folder}/config.json: tells no generation of the processor: {advice}')
    commits = dict.fromkeys(start.get('code', {}).get('commit', 'unknown') for start in starts)
    return {'processor': name, 'commit': '+'.join(commits)}


def finished_runs(path: Path, folder: str, processor: str = '') -> DataFrame:
    """Return the finished runs in a folder with their `origin`. Only runs of the plan that a table
    is named after count: their parent folder has its name. Raises UserError if there is none, if
    one has changed settings when it resumed, or a number of experts that the plan does not have, or
    if one with the name of a planned run has other settings, but for the data (see `add`)."""
    plan = path.stem.replace('_', '-')
    table = runs([folder]).query('finished and plan == @plan')
    if table.empty:
        raise UserError(f'{folder}: no run of the plan {plan} has finished yet')
    planned = {run.folder.name: run for run in runs_of_plan(plan)}
    totals = {run.axes['n_layer'] * run.axes['n_expert'] for run in planned.values()}
    for run in table[~(table['n_layer'] * table['n_expert']).isin(totals)].itertuples():
        sizes = f'L = {run.n_layer}, E = {run.n_expert}'
        raise UserError(f'{run.folder}: {sizes}: is not in the plan {plan}: move it away')
    for run in table.itertuples():
        if run.changed:
            reason = f'changed {run.changed} when it resumed'
            raise UserError(f'{run.folder}: {reason}: move it away and run it again')
        [(saved, _)] = read_runs([Path(run.folder)])
        if in_plan := planned.get(Path(run.folder).name):
            saved['data_dir'] = full_settings(in_plan)['data_dir']
            if found := other_setting(in_plan, saved):
                raise UserError(f'{run.folder} {found}: is not in the plan {plan}: move it away')
    return table.assign(**DataFrame([origin(x, processor) for x in table['folder']], table.index))


def unlisted(table: DataFrame, path: Path, key: list[str]) -> DataFrame:
    """Return the runs that a table in a file does not have yet. Raises UserError if the code of one
    of them is not that of its commit."""
    if path.exists():
        table = table[~table.set_index(key).index.isin(pandas.read_csv(path).set_index(key).index)]
    for run in table[table['commit'].str.contains('-dirty|unknown')].itertuples():
        advice = 'commit the code, move the folder away and run it again'
        raise UserError(f'{run.folder}: its code is in no commit ({run.commit}): {advice}')
    return table


def append(table: DataFrame, path: Path) -> None:
    """Add rows to a table in a file. Raises UserError if it has other columns."""
    if path.exists():
        columns = [*pandas.read_csv(path, nrows=0)]
        if {*columns} != {*table}:
            found, new = ', '.join(columns), ', '.join(table)
            raise UserError(f'{path}: has the columns {found}, but these runs {new}')
        table = table[columns]
    table.to_csv(path, mode='a', header=not path.exists(), index=False)


def add(path: Path, folder: str, processor: str = '') -> None:
    """Add the finished runs in a folder to a table, except those that it already has, and all their
    evaluations to a second one. Raises UserError if one was trained on other data."""
    table = unlisted(finished_runs(path, folder, processor), path, RUN)
    if table.empty:
        return
    # earlier runs have no checksum
    trained_on = table.get('data_checksum', Series(index=table.index)).fillna(SPEECHES)
    for run_folder in table['folder'][trained_on != SPEECHES]:
        raise UserError(f'{run_folder}: was trained on other data than that of the study')
    columns = [*RUN, 'step', value_of(table), 'seconds', 'commit']
    append(table[columns].round({'seconds': 1}).astype({'step': int}), path)
    for run in table.to_dict('records'):
        log = DataFrame(log_of(run['folder'])).filter(
            regex='^(step|val_loss|eval_.*(return|rate))$'
        )
        log = log.dropna(subset=log.columns.drop('step'))
        key = DataFrame([{name: run[name] for name in RUN}])
        append(key.merge(log, how='cross'), path.with_stem(f'{path.stem}_evaluations'))


def print_commits(table: DataFrame, blocks: DataFrame) -> None:
    """Print a line for each block whose runs have more than one commit. table: rows of runs."""
    commits = table.set_index(['seed', 'processor'])['commit'].str.split('+').explode()
    for block in blocks.index:
        if len(found := commits.loc[[block]].unique()) > 1:
            print(f'seed {block[0]} has runs of {len(found)} commits: {", ".join(found)}')


def read_rows(path: Path, rate: float | None = None) -> DataFrame:
    """Return the rows of the registered seeds in a table of runs, if a learning rate is given those
    at that rate. Raises UserError if there is no table."""
    if not path.exists():
        raise UserError(f'{path}: no run has finished yet')
    table = pandas.read_csv(path).query('seed in @SEEDS')
    return table if rate is None else table[table['learning_rate'] == rate]


def whole_blocks(
    path: Path, allocations: list[tuple[bool, int]], rate: float | None = None
) -> DataFrame:
    """Return the losses, or minus the returns, in a table of runs: a row for each (seed, processor)
    that has all allocations, of each seed the first in the table, and a column for each allocation
    (recurrent, L)."""
    table = read_rows(path, rate)
    blocks = table.assign(score=score(table)).pivot(
        index=['seed', 'processor'], columns=['recurrent', 'n_layer'], values='score'
    )
    in_order = table.set_index(['seed', 'processor']).index.unique()
    blocks = blocks.reindex(in_order, columns=pandas.MultiIndex.from_tuples(allocations))
    return blocks.dropna().groupby('seed').head(1)


def report(
    path: Path = TABLE,
    allocations: list[tuple[bool, int]] = ALLOCATIONS,
    rate: float | None = None,
) -> None:
    """Print the whole blocks in a table of runs, their means with standard errors, and the verdict
    once every seed has a block."""
    blocks = whole_blocks(path, allocations, rate)
    print(f'\n{path.stem}: what is judged (lower is better) by (recurrent, L)')
    print(pandas.concat([blocks, blocks.agg(['mean', 'sem'])]).round(4).to_string())
    print_commits(read_rows(path, rate), blocks)
    if len(blocks) < len(SEEDS):
        print(f'{len(blocks)} of {len(SEEDS)} blocks')
        return
    print(verdict(blocks))
    means = draw_means(blocks)
    for recurrent, kind in ((True, 'with recurrence'), (False, 'without')):
        shares = means[recurrent].idxmin(axis=1).value_counts(normalize=True)
        print(f'best L {kind}: ' + ', '.join(f'{L} in {x:.0%}' for L, x in shares.items()))


def arguments() -> list[str]:
    """Return the arguments of the command line: none, or a folder of runs, or both that and the
    name of the processor of runs that did not record it."""
    if len(sys.argv) > 3:
        raise UserError(f'{sys.argv[3]!r}: expected a folder of runs, or no argument')
    return sys.argv[1:]


def main(path: Path, show: Callable[[], None]) -> None:
    """Add the runs of the folder in the command line, if there is one, to a table; then show it."""
    if arguments():
        add(path, *arguments())
    show()


if __name__ == '__main__':
    run_script(lambda: main(TABLE, report))

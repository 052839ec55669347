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
    python -m paper.studies.depth out/depth 'AMD EPYC, Zen 4'

The second line runs a block: 70 minutes on two cores of a Zen 4. The third adds the finished runs
of a folder, with the name of the processor, to paper/results/depth.csv and prints whole blocks.
"""

import sys
from collections.abc import Callable
from pathlib import Path

from support.script import UserError, run_script

import pandas
from pandas import DataFrame

from paper.figures import PUBLISHED, best_depths, runs, score, value_of
from paper.plans import Plan, equal_work, grid
from paper.studies.study_lm import BYTES, CONFIGS, RATES

ALLOCATIONS = [(True, L) for L in (1, 2, 4, 8)] + [(False, L) for L in (2, 4, 8, 16)]
SEEDS = [11, 12, 13, 14]
TABLE = PUBLISHED.parent / 'depth.csv'
RUN = ['seed', 'recurrent', 'n_layer', 'processor']  # a table has each once: the first added

PLAN = Plan(
    'Study: depth of language models, registered',
    [
        run
        for recurrent, L in ALLOCATIONS
        for run in grid(
            *('train_lm.py', CONFIGS[recurrent]),
            cells=equal_work(16, [L]),
            recurrent=[recurrent],
            seed=SEEDS,
            learning_rate=RATES[recurrent][L],
            dtype='float32',  # of the model; Muon uses bfloat16 where it is fast
            compile=False,
            val_tokens=524_288,
            val_streams=128,
            **{**BYTES, 'eval_interval': BYTES['max_iters']},
        )
    ],
)


def verdict(blocks: DataFrame) -> str:
    """Return what the rule says. blocks: a row per seed and a column (recurrent, L) per allocation;
    lower values are better."""
    smaller, larger, sentence = best_depths(blocks)
    word = 'confirmed' if smaller >= 0.95 else 'refuted' if larger >= 0.95 else 'undecided'
    return f'{word}: {sentence}'


def add(path: Path, folder: str, processor: str) -> None:
    """Add the finished runs in a folder to a table, except those that it already has. Only runs of
    the plan that the table is named after count: their parent folder has its name."""
    plan = path.stem.replace('_', '-')
    table = runs([folder]).query('finished and plan == @plan').assign(processor=processor)
    if table.empty:
        raise UserError(f'{folder}: no run of the plan {plan} has finished yet')
    columns = [*RUN, 'n_expert', 'learning_rate', 'step', value_of(table), 'seconds', 'commit']
    if not (is_new := not path.exists()):
        old = pandas.read_csv(path).set_index(RUN).index
        table = table[~table.set_index(RUN).index.isin(old)]
    table.round({'seconds': 1}).to_csv(path, mode='a', columns=columns, header=is_new, index=False)


def whole_blocks(path: Path, allocations: list[tuple[bool, int]]) -> DataFrame:
    """Return the losses, or minus the returns, in a table of runs: a row for each (seed, processor)
    that has all allocations, of each seed the first in the table, and a column for each allocation
    (recurrent, L)."""
    if not path.exists():
        raise UserError(f'{path}: no run has finished yet')
    table = pandas.read_csv(path).query('seed in @SEEDS')
    blocks = table.assign(score=score(table)).pivot(
        index=['seed', 'processor'], columns=['recurrent', 'n_layer'], values='score'
    )
    in_order = table.set_index(['seed', 'processor']).index.unique()
    blocks = blocks.reindex(in_order, columns=pandas.MultiIndex.from_tuples(allocations))
    return blocks.dropna().groupby('seed').head(1)


def report(path: Path = TABLE, allocations: list[tuple[bool, int]] = ALLOCATIONS) -> None:
    """Print the whole blocks in a table of runs, their means with standard errors, and the verdict
    once every seed has a block."""
    blocks = whole_blocks(path, allocations)
    print(f'\n{path.stem}: what is judged (lower is better) by (recurrent, L)')
    print(pandas.concat([blocks, blocks.agg(['mean', 'sem'])]).round(4).to_string())
    print(verdict(blocks) if len(blocks) == len(SEEDS) else f'{len(blocks)} of {len(SEEDS)} blocks')


def main(path: Path, show: Callable[[], None]) -> None:
    """Add the runs of the folder in the command line, if there is one, to a table; then show it."""
    if len(sys.argv) not in (1, 3):
        raise UserError('expected no argument, or a folder of runs and the name of the processor')
    if sys.argv[1:]:
        add(path, *sys.argv[1:])
    show()


if __name__ == '__main__':
    run_script(lambda: main(TABLE, report))

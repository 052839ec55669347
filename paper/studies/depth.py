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
    python -m paper.studies.depth out/depth 'AMD EPYC, Zen 3'

The second line runs a block: 1.5 hours on two cores of a Zen 3. The third adds the finished runs of
a folder, with the name of the processor, to paper/results/depth.csv, and prints the whole blocks.
"""

import sys
from pathlib import Path

import numpy as np
import pandas
from configurator import Mistake, run_script
from pandas import DataFrame

from paper.figures import PUBLISHED, runs
from paper.plans import Plan, equal_work, grid
from paper.studies.study_lm import BYTES, CONFIGS, RATES

DEPTHS = {True: [1, 2, 4, 8], False: [2, 4, 8, 16]}
ALLOCATIONS = [(recurrent, L) for recurrent in DEPTHS for L in DEPTHS[recurrent]]
SEEDS = [11, 12, 13, 14]
TABLE = PUBLISHED.parent / 'depth.csv'
COLUMNS = ['seed', 'recurrent', 'n_layer', 'n_expert', 'learning_rate', 'step']
RUN = ['seed', 'recurrent', 'n_layer', 'seconds']  # identify a run, whatever the processor

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
            dtype='float32',  # the same on every processor
            compile=False,
            val_tokens=524_288,
            val_streams=128,
            **{**BYTES, 'eval_interval': BYTES['max_iters']},
        )
    ],
)


def verdict(blocks: DataFrame, draws: int = 100_000) -> str:
    """Return what the rule says. blocks: what is judged, lower is better, of each allocation, one
    row per seed, with the columns (recurrent, L).

    Each draw adds to the means an error from a multivariate t distribution with the covariance of
    the mean over blocks. What a block adds to all of its values cancels, because only their order
    counts: so differences are paired within blocks."""
    n = len(blocks)
    errors = (blocks - blocks.mean()).to_numpy() / np.sqrt(n * (n - 1))
    generator = np.random.default_rng(1)
    scale = np.sqrt(generator.chisquare(n - 1, (draws, 1)) / (n - 1))
    means = blocks.mean().to_numpy() + generator.standard_normal((draws, n)) @ errors / scale
    kinds, depths = (blocks.columns.get_level_values(k).to_numpy() for k in (0, 1))
    best, best_without = (depths[kinds == k][means[:, kinds == k].argmin(1)] for k in (True, False))
    smaller, larger = np.mean(best < best_without), np.mean(best > best_without)
    word = 'confirmed' if smaller >= 0.95 else 'refuted' if larger >= 0.95 else 'undecided'
    return f'{word}: smaller with recurrence in {smaller:.1%} of draws, larger in {larger:.1%}'


def add(folder: str, processor: str, path: Path, value: str) -> None:
    """Add the finished runs of a folder to a table, except those that it already has."""
    table = runs([folder]).query('finished').assign(processor=processor)
    table = table.assign(seconds=table['seconds'].round(1)).set_index(RUN)
    is_new = not path.exists()
    if not is_new:
        table = table[~table.index.isin(pandas.read_csv(path, index_col=RUN).index)]
    columns = [*COLUMNS, value, 'seconds', 'processor', 'commit']
    table.reset_index().to_csv(path, mode='a', columns=columns, header=is_new, index=False)


def report(path: Path, allocations: list[tuple], value: str) -> None:
    """Print the whole blocks in a table of runs, their means with standard errors, and the verdict
    if these are all."""
    if not path.exists():
        raise Mistake(f'{path}: no run has finished yet')
    blocks = pandas.read_csv(path).pivot(
        index=['seed', 'processor'], columns=['recurrent', 'n_layer'], values=value
    )
    blocks = blocks.reindex(columns=pandas.MultiIndex.from_tuples(allocations))
    blocks = blocks.dropna().groupby('seed').head(1)  # one per seed
    print(pandas.concat([blocks, blocks.agg(['mean', 'sem'])]).round(4).to_string())
    judged = -blocks if value == 'return' else blocks
    print(verdict(judged) if len(blocks) == len(SEEDS) else f'{len(blocks)} of {len(SEEDS)} blocks')


def study(path: Path, allocations: list[tuple], value: str) -> None:
    """Add the runs of the folder in the command line, if there is one, to a table, and report."""
    if len(sys.argv) not in (1, 3):
        raise Mistake('expected no argument, or a folder of runs and the name of the processor')
    if sys.argv[1:]:
        add(*sys.argv[1:], path, value)
    report(path, allocations, value)


if __name__ == '__main__':
    run_script(lambda: study(TABLE, ALLOCATIONS, 'loss'))

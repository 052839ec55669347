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
COLUMNS = ['seed', 'recurrent', 'n_layer', 'n_expert', 'learning_rate', 'step', 'val_loss']
COLUMNS += ['seconds', 'processor', 'commit']
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
    """Return what the rule says. blocks: the loss of each allocation, one row per seed, with the
    columns (recurrent, L).

    Each draw adds to the mean losses an error from a multivariate t distribution with the
    covariance of the mean over blocks. What a block adds to all of its losses cancels, because only
    their order counts: so differences are paired within blocks."""
    n = len(blocks)
    errors = (blocks - blocks.mean()).to_numpy() / np.sqrt(n * (n - 1))
    generator = np.random.default_rng(1)
    scale = np.sqrt(generator.chisquare(n - 1, (draws, 1)) / (n - 1))
    losses = blocks.mean().to_numpy() + generator.standard_normal((draws, n)) @ errors / scale
    best = {}
    for recurrent, depths in DEPTHS.items():
        columns = [blocks.columns.get_loc((recurrent, L)) for L in depths]
        best[recurrent] = np.array(depths)[losses[:, columns].argmin(1)]
    smaller, larger = np.mean(best[True] < best[False]), np.mean(best[True] > best[False])
    word = 'confirmed' if smaller >= 0.95 else 'refuted' if larger >= 0.95 else 'undecided'
    return f'{word}: smaller with recurrence in {smaller:.1%} of draws, larger in {larger:.1%}'


def add(folder: str, processor: str) -> None:
    """Add the finished runs of a folder to the table, except those that it already has."""
    table = runs([folder]).query('finished').assign(processor=processor)
    table = table.rename(columns={'last_val_loss': 'val_loss'})
    table = table.assign(seconds=table['seconds'].round(1)).set_index(RUN)
    is_new = not TABLE.exists()
    if not is_new:
        table = table[~table.index.isin(pandas.read_csv(TABLE, index_col=RUN).index)]
    table.reset_index().to_csv(TABLE, mode='a', columns=COLUMNS, header=is_new, index=False)


def main() -> None:
    """Print the losses by block, and the verdict if there are all blocks."""
    if len(sys.argv) not in (1, 3):
        raise Mistake('expected no argument, or a folder of runs and the name of the processor')
    if sys.argv[1:]:
        add(*sys.argv[1:])
    if not TABLE.exists():
        raise Mistake(f'{TABLE}: no run has finished yet')
    blocks = pandas.read_csv(TABLE).pivot(
        index=['seed', 'processor'], columns=['recurrent', 'n_layer'], values='val_loss'
    )
    blocks = blocks.reindex(columns=pandas.MultiIndex.from_tuples(ALLOCATIONS))
    blocks = blocks.dropna().groupby('seed').head(1)  # whole blocks, one per seed
    print(blocks.to_string())
    print(verdict(blocks) if len(blocks) == len(SEEDS) else f'{len(blocks)} of 4 blocks')


if __name__ == '__main__':
    run_script(main)

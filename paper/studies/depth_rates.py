r"""Study, registered before its first run: does the learning rate decide the best depth?

The paper trains all depths at one learning rate; depth.py gives each allocation its own. Here all
share one, 0.02 in the first half of the study and 0.08 in the second: L = 1, 2, 4, 8, 16 of both
kinds, seeds 11 to 14. Everything else is as in depth.py. A block is the ten runs of a seed and a
rate on one kind of processor, and a block that a change of processor interrupts starts over.
Nothing is added to this afterwards.

Rules, by 100,000 draws with t-distributed errors, paired by seed:

(a) at each rate, the rule of depth.py: "the best depth is smaller with recurrence";
(b) "the rate decides the best depth" is confirmed if the best recurrent L is larger at 0.02 than at
    0.08 in at least 95% of draws, refuted if it is not in at least 95%, and else undecided. The
    same of non-recurrent models is secondary.

    python data_fineweb.py --demo=True --tokenizer=bytes
    python -m paper.sweep depth-rates --run --workers=2 \
        --only="learning_rate == 0.02 and seed == 11" -- --threads=1
    python -m paper.studies.depth_rates out/depth-rates

The second command runs a block, an hour and three quarters on two cores of a Zen 4. The third adds
the finished runs of a folder to paper/results/depth_rates.csv, and prints whole blocks.
"""

from support.script import run_script

import pandas
from pandas import DataFrame

from paper.figures import draw_means
from paper.plans import Plan
from paper.studies import depth
from paper.studies.depth import SEEDS, read_rows, runs_of, whole_blocks

TABLE = depth.TABLE.with_stem('depth_rates')
RATES = [0.02, 0.08]
ALLOCATIONS = [(recurrent, L) for recurrent in (True, False) for L in (1, 2, 4, 8, 16)]

PLAN = Plan(
    'Study: one learning rate for all depths, registered',
    [run for rate in RATES for cell in ALLOCATIONS for run in runs_of(*cell, [rate])],
    'python -m paper.studies.depth_rates {folders}',
)


def changes(blocks: DataFrame) -> list[str]:
    """Return what rule (b) says of each kind. blocks: a row per seed and a column (rate, recurrent,
    L) per model; lower values are better."""
    means, found = draw_means(blocks), []
    for recurrent, kind in ((True, 'recurrent'), (False, 'non-recurrent (secondary)')):
        low, high = (means[rate][recurrent].idxmin(axis=1) for rate in RATES)
        holds = (low > high).mean()
        word = 'confirmed' if holds >= 0.95 else 'refuted' if holds <= 0.05 else 'undecided'
        rates = f'larger at {RATES[0]} than at {RATES[1]} in {holds:.1%} of draws'
        found.append(
            f'(b) {word}: the best {kind} L is {rates}, smaller in {(low < high).mean():.1%}'
        )
    return found


def report() -> None:
    """Print the whole blocks at each rate with the verdict (a), and the verdict (b) once every seed
    has a block at both rates."""
    rates = [rate for rate in RATES if len(read_rows(TABLE, rate))]
    for rate in rates:
        print(f'\n(a) learning rate {rate}', end='')
        depth.report(TABLE, ALLOCATIONS, rate)
    blocks = {rate: whole_blocks(TABLE, ALLOCATIONS, rate).droplevel(1) for rate in rates}
    both = pandas.concat(blocks, axis=1).dropna() if rates == RATES else DataFrame()
    print(*(changes(both) if len(both) == len(SEEDS) else ['(b) waits for all blocks']), sep='\n')


if __name__ == '__main__':
    run_script(lambda: depth.main(TABLE, report))

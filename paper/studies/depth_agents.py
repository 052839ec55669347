"""Study, registered before its first run: does recurrence lower the return of agents on easy
levels, and does it make their best depth smaller?

ConvGLU agents of L x E = 4 experts of width 32, L = 1, 2, 4, with and without recurrence: the runs
of study_sokoban.py with seeds that none has used. Those runs had found lower returns with
recurrence, when P and R started smaller (initial_scale.py). The measure is the return of the
episodes that end in the last 250 of the 1,800 updates. Seeds and the rule for the best depth are
those of depth.py; a block is the six runs of a seed. All have one learning rate: what comes out
holds for that rate. No seed, allocation or measure is added later.

Rule: recurrence lowers (raises) the return if the difference, averaged over L and paired by seed,
is negative (positive) at 5% in a two-sided t test; else it is undecided.

    python -m paper.sweep depth-agents --run --workers=2 --only="seed == 11" -- --threads=1
    python -m paper.studies.depth_agents out/depth-agents

The first line runs a block: 50 minutes on two cores of a Zen 4. The second adds its finished runs
to paper/results/depth_agents.csv, their evaluations to depth_agents_evaluations.csv.
"""

import math

from support.script import run_script

from pandas import DataFrame

from paper.plans import Plan, equal_work, grid
from paper.studies import depth
from paper.studies.depth import SEEDS, whole_blocks

TABLE = depth.TABLE.with_stem('depth_agents')
AGENTS = {
    'cells': equal_work(4, [1, 2, 4]),
    'seed': SEEDS,
    'dtype': 'float32',  # the same on every processor
}
ALLOCATIONS = [(recurrent, L) for recurrent in (True, False) for L in (1, 2, 4)]

PLAN = Plan(
    'Study: recurrence and depth of agents, registered',
    grid('train_sokoban.py', 'config/sokoban_tiny.py', recurrent=[True, False], **AGENTS),
)


def print_change(a: DataFrame, b: DataFrame) -> None:
    """Print the difference a - b of returns, averaged over L and paired by block, and whether it is
    significant once every seed has a block. a, b: a row per block, a column per L."""
    change = (a.mean(axis=1) - b.mean(axis=1)).dropna()
    errors = change.mean() / change.sem()
    print(change.to_string())
    print(f'{change.mean():.4f} ± {change.sem():.4f}, {errors:.2f} standard errors')
    if len(change) == len(SEEDS):
        x = abs(errors) / 3**0.5  # of Student's distribution with 3 degrees of freedom
        p = 1 - 2 / math.pi * (math.atan(x) + x / (1 + x * x))
        print(f'{"significant" if abs(errors) > 3.18 else "undecided"}, p = {p:.3f}')


def report() -> None:
    """Print the returns of the whole blocks, the verdict, and what recurrence changes."""
    depth.report(TABLE, ALLOCATIONS)
    returns = -whole_blocks(TABLE, ALLOCATIONS)
    print('\ndepth_agents: return with recurrence minus return without')
    print_change(returns[True], returns[False])


if __name__ == '__main__':
    run_script(lambda: depth.main(TABLE, report))

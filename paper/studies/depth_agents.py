"""Study, registered before its first run: does recurrence make the best depth of agents smaller?

ConvGLU agents of L x E = 4 experts of width 32 on easy levels (config/sokoban_demo.py), L = 1, 2, 4
with and without recurrence, 320,000 steps, one learning rate. The measure is the return of the
episodes that end in the last 250 of the 500 updates. Seeds, blocks and rule are those of depth.py.
Nothing is added to this afterwards.

Second question: does the start of P and R matter? Until commit 722027e both started smaller in
recurrent agents, with `fan_in=Z + D` in convlstm.py. The recurrent runs are repeated with that
edit. It matters if the return, averaged over L, differs at 5% (paired by seed, two-sided t test).

    python -m paper.sweep depth-agents --run --workers=2 --only="seed == 11" -- --threads=1
    python -m paper.studies.depth_agents out/depth-agents 'AMD EPYC, Zen 4'

The first line runs a block: 16 minutes on two cores of a Zen 4. The second adds its finished runs
to paper/results/depth_agents.csv. Runs with the former start are in a checkout of their own, with
`--only="recurrent and seed == 11"`, and are added as 'AMD EPYC, Zen 4, former start'.
"""

from configurator import run_script

from paper.plans import Plan, equal_work, grid
from paper.studies.depth import SEEDS, TABLE, study

ALLOCATIONS = [(recurrent, L) for recurrent in (True, False) for L in (1, 2, 4)]

PLAN = Plan(
    'Study: depth of agents, registered',
    grid(
        *('train_sokoban.py', 'config/sokoban_demo.py'),
        cells=equal_work(4, [1, 2, 4]),
        recurrent=[True, False],
        seed=SEEDS,
        total_steps=320_000,
        dtype='float32',  # the same on every processor
        plot=False,
    ),
)

if __name__ == '__main__':
    run_script(lambda: study(TABLE.with_stem('depth_agents'), ALLOCATIONS, 'return'))

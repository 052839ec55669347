"""Study, registered before its first run: does recurrence make the best depth of agents smaller?

ConvGLU agents of L x E = 4 experts of width 32 on easy levels (config/sokoban_demo.py), L = 1, 2, 4
with and without recurrence, 320,000 steps. The measure is the return of the episodes that end in
the last 250 of the 500 updates. Seeds and rule are those of depth.py; a block is the six runs of a
seed. All have one learning rate, which other runs chose for L = 1: what comes out holds for that
rate. No seed, allocation or measure is added later.

    python -m paper.sweep depth-agents --run --workers=2 --only="seed == 11" -- --threads=1
    python -m paper.studies.depth_agents out/depth-agents 'AMD EPYC, Zen 4'

The first line runs a block: 16 minutes on two cores of a Zen 4. The second adds its finished runs
to paper/results/depth_agents.csv.
"""

from configurator import run_script

from paper.plans import Plan, equal_work, grid
from paper.studies.depth import SEEDS, TABLE, main

TABLE = TABLE.with_stem('depth_agents')
AGENTS = {
    'cells': equal_work(4, [1, 2, 4]),
    'seed': SEEDS,
    'total_steps': 320_000,
    'dtype': 'float32',  # the same on every processor
    'plot': False,
}
ALLOCATIONS = [(recurrent, L) for recurrent in (True, False) for L in (1, 2, 4)]

PLAN = Plan(
    'Study: depth of agents, registered',
    grid('train_sokoban.py', 'config/sokoban_demo.py', recurrent=[True, False], **AGENTS),
)

if __name__ == '__main__':
    run_script(lambda: main(TABLE, ALLOCATIONS))

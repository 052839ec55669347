"""Study, registered before its first run: does the initial scale of P and R matter to agents?

Until commit 722027e, `fan_in` of both was Z + D in recurrent ConvGLU agents (wp and wr in
convlstm.py). The recurrent runs of depth_agents.py are repeated with that edit, in today's order of
random draws. It matters if the return, averaged over L, differs at 5% (paired by seed, two-sided t
test).

    python -m paper.sweep initial-scale --run --workers=2 --only="seed == 11" -- --threads=1
    python -m paper.studies.initial_scale out/initial-scale 'AMD EPYC, Zen 4'

The first line, with that edit, runs three agents in 8 minutes on two cores of a Zen 4. The second
adds them to paper/results/initial_scale.csv and compares them with those of depth_agents.csv.
"""

import sys

from configurator import run_script

from paper.plans import Plan, grid
from paper.studies import depth_agents
from paper.studies.depth import SEEDS, add, whole_blocks

TABLE = depth_agents.TABLE.with_stem('initial_scale')
ALLOCATIONS = [(True, L) for L in (1, 2, 4)]

PLAN = Plan(
    'Study: initial scale of agents, registered',
    grid('train_sokoban.py', 'config/sokoban_demo.py', recurrent=[True], **depth_agents.AGENTS),
)


def report() -> None:
    """Print the difference in return of the seeds that both tables have, and what the rule says
    once they have all."""
    former = -whole_blocks(TABLE, ALLOCATIONS)
    today = -whole_blocks(depth_agents.TABLE, depth_agents.ALLOCATIONS)[True]
    change = (former.mean(axis=1) - today.mean(axis=1)).dropna()
    print(f'\ninitial_scale: change of the return\n{change.to_string()}')
    errors = abs(change.mean()) / change.sem()
    print(f'{change.mean():.4f} ± {change.sem():.4f}, {errors:.2f} standard errors')
    if len(change) == len(SEEDS):
        print('it matters' if errors > 3.18 else 'undecided')  # t at 97.5%, 3 degrees of freedom


def main() -> None:
    if sys.argv[1:]:
        add(TABLE, *sys.argv[1:])
    report()


if __name__ == '__main__':
    run_script(main)

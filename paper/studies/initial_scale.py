"""Study, registered before its first run: does the initial scale of P and R matter to agents?

Until commit 722027e, `fan_in` of both was Z + D in recurrent ConvGLU agents (wp and wr in
convlstm.py). The recurrent runs of depth_agents.py are repeated with that edit, which is
tests/hacks/x_former_scale_convlstm.patch, in today's order of random draws. It matters if the
return, averaged over L and paired by seed, differs at 5% in a two-sided t test.

    python -m paper.sweep initial-scale --run --workers=2 --only="seed == 11" -- --threads=1
    python -m paper.studies.initial_scale out/initial-scale

The first line, with that edit, runs three agents in 25 minutes on two cores of a Zen 4. The second
adds them to paper/results/initial_scale.csv and compares them with those of depth_agents.csv.
"""

from support.script import run_script

from paper.plans import Plan, grid
from paper.studies import depth, depth_agents
from paper.studies.depth import print_commits, read_rows, whole_blocks
from paper.studies.depth_agents import AGENTS, print_change

TABLE = depth.TABLE.with_stem('initial_scale')

PLAN = Plan(
    'Study: initial scale of agents, registered',
    grid('train_sokoban.py', 'config/sokoban_tiny.py', recurrent=[True], **AGENTS),
)


def report() -> None:
    """Print the returns with the former scale, and what it changes in the seeds that both tables
    have: by L, and averaged over L."""
    former = -whole_blocks(TABLE, [(True, L) for L in (1, 2, 4)])
    today = -whole_blocks(depth_agents.TABLE, depth_agents.ALLOCATIONS)
    print('\ninitial_scale: return with the former scale by L')
    print(former[True].agg(['mean', 'sem']).round(4).to_string())
    print_commits(read_rows(TABLE), former)
    print('\ninitial_scale: return with the former scale minus return with that of today')
    change = (former[True] - today[True]).agg(['mean', 'sem'])
    print(change.round(4).to_string())
    print_change(former[True], today[True])
    mean, sem = change.loc['mean'].mean(), (change.loc['sem'] ** 2).sum() ** 0.5 / 3
    print(f'if the errors at each L were independent: {mean / sem:.2f} standard errors')


if __name__ == '__main__':
    run_script(lambda: depth.main(TABLE, report))

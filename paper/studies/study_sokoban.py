"""Study: which depth is best for a small Sokoban agent, with and without recurrence.

Goal: ConvGLU agents on easy generated levels, L = 1, 2, 4 at one budget (4 experts of width 32),
three seeds. Expected: returns between -3 and 5, most still climbing: 1.2M steps are few
(paper/results/README.md). Hardware and time: two CPU cores, 18 runs of eight minutes, two at a
time.

    python -m paper.sweep study-sokoban --run --workers=2 -- --threads=1
"""

from paper.plans import Plan, equal_work, grid

PLAN = Plan(
    'Study: depth of ConvGLU agents',
    grid(
        'train_sokoban.py',
        'config/sokoban_tiny.py',
        cells=equal_work(4, [1, 2, 4]),
        recurrent=[True, False],
        seed=[1, 2, 3],
    ),
)

"""Study: ConvLSTM agents on Boxoban's levels, with and without recurrence.

Goal: L = 1, 2, 4 at one budget (4 experts of width 32) with the paper's recipe, except for its
length: 10M environment steps, over which the learning rate is annealed. Expected: few levels
solved; published agents of one layer solve 0.4% after 10M steps (paper/results/paper). Hardware and
time: CPU cores, six runs of 2.2 to 6 hours of one core each, estimated from their first steps; 26
hours in all.

    python levels.py --download=True
    python levels.py --split=unfiltered-valid --download=True
    python -m paper.sweep study-boxoban --run --workers=2 -- --threads=1
"""

from paper.plans import Plan, equal_work, grid

PLAN = Plan(
    "Study: agents on Boxoban's levels",
    grid(
        'train_sokoban.py',
        cells=equal_work(4, [1, 2, 4]),
        recurrent=[True, False],
        seed=[1],
        n_embd=32,
        total_steps=10_000_000,
    ),
)

"""Study: which depth is best for a small ConvLSTM agent, with and without recurrence.

Goal: the paper's agent on easy generated levels, L = 1, 2, 4, 8 at one cost (8 experts of width 12
in all), three seeds. Expected: undecided, because seeds differ more than depths
(paper/results/README.md). Hardware and time: two CPU cores, 75 minutes, 24 runs of four to eight
minutes.

    python -m paper.sweep study-convlstm --run --workers=2 -- --threads=1
"""

from paper.plans import Plan, equal_work, grid

PLAN = Plan(
    'Study: depth of ConvLSTM agents',
    grid(
        'train_sokoban.py',
        'config/convlstm_tiny.py',
        cells=equal_work(8, [1, 2, 4, 8]),
        recurrent=[True, False],
        seed=[1, 2, 3],
    ),
)

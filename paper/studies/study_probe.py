"""Study: two agents for the planning probes on a small machine (config/probe_tiny.py).

Goal: recurrent ConvGLU agents of one and of four layers at the small study's budget, 4,000,000
steps each on its easy levels: a third as many solve a quarter of the levels. Expected: both solve
most of their evaluation levels. Hardware and time: two CPU cores, forty minutes.

    python -m paper.sweep study-probe --run --workers=2 -- --threads=1
    python -m paper.probe config/probe_tiny.py out/study-probe/*
"""

from paper.plans import Plan, equal_work, grid

PLAN = Plan(
    'Study: agents to probe',
    grid(
        'train_sokoban.py',
        'config/sokoban_tiny.py',
        cells=equal_work(4, [1, 4]),
        seed=[1],
        total_steps=4_032_000,
    ),
    'python -m paper.probe {root}config/probe_tiny.py {folders}/*',
)

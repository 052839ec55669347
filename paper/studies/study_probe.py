"""Study: two agents for the planning probes on a small machine (config/probe_tiny.py).

Goal: recurrent ConvGLU agents of one and of four layers at the small study's budget, 4,000,000
steps each on its easy levels. Expected: both solve most of their evaluation levels. Hardware and
time: two CPU cores, forty minutes.

    python sweep.py config/study_probe.py --run
    python probe_sokoban.py config/probe_tiny.py
"""

plan = 'sokoban-small'
base = 'config/sokoban_tiny.py'
width = 0.5  # half the paper's widths: the cost of 4 experts of width 32
length = 3.5  # 1,152,000 -> 4,032,000 steps: with the former, agents solve a quarter of the levels
only = 'model=convglu variant=recurrent d=32 L=1,4'
seeds = 1
workers = 2
out_dir = 'out/study_probe'

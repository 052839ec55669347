"""Study: which depth is best for a small Sokoban agent, with and without recurrence.

Goal: ConvGLU agents on easy generated levels, L = 1, 2, 4 at one budget (4 experts of width 32),
three seeds. Expected: returns between -2 and 2, all still climbing: 1.2M steps are few
(results/README.md). Hardware and time: two CPU cores, 18 runs of eight minutes, two at a time.

    python sweep.py config/study_sokoban.py --run --figure --table
"""

plan = 'sokoban-small'
base = 'config/sokoban_tiny.py'
width = 0.5  # half the paper's widths: the cost of 4 experts of width 32
only = 'model=convglu d=32'
seeds = 3
workers = 2
out_dir = 'out/study'

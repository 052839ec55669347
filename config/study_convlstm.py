"""Study: which depth is best for a small ConvLSTM agent, with and without recurrence.

Goal: the paper's agent on easy generated levels, L = 1, 2, 4, 8 at one cost (8 experts of width 12
in all), three seeds. Expected: see results/README.md. Hardware and time: two CPU cores, 24 runs of
about six minutes, two at a time.

    python sweep.py config/study_convlstm.py --run --figure --table=solve
"""

plan = 'sokoban-eight'
base = 'config/convlstm_tiny.py'
width = 0.1875  # 64 -> 12
only = 'model=convlstm'
also = 'threads=1'
seeds = 3
workers = 2
out_dir = 'out/study'

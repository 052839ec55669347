"""Study: which depth is best for a small ConvLSTM agent, with and without recurrence.

Goal: the paper's agent on easy generated levels, L = 1, 2, 4, 8 at one cost (8 experts of width 12
in all), three seeds. Expected: undecided, because seeds differ more than depths
(results/README.md). Hardware and time: two CPU cores, 75 minutes, 24 runs of four to eight minutes.

    python sweep.py config/study_convlstm.py --run --figure --table
"""

plan = 'sokoban-eight'
base = 'config/convlstm_tiny.py'
width = 0.1875  # 64 -> 12
only = 'model=convlstm'
also = 'threads=1'
seeds = 3
workers = 2
out_dir = 'out/study'

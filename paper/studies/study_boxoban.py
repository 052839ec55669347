"""Study: ConvLSTM agents on Boxoban's levels, with and without recurrence.

Goal: L = 1, 2, 4 at one budget (4 experts of width 32) with the paper's recipe, except for its
length: 10M environment steps, over which the learning rate is annealed. Expected: few levels
solved; published agents of one layer solve 0.4% after 10M steps (results/paper). Hardware and time:
CPU cores, six runs of 2.2 to 6 hours of one core each, estimated from their first steps; 26 hours
in all.

    python sokoban.py --download=True
    python sokoban.py --split=unfiltered-valid --download=True
    python sweep.py config/study_boxoban.py --run --figure --table
"""

plan = 'sokoban-small'
width = 0.5  # d = 32
length = 0.2  # of 50M steps
only = 'model=convlstm d=32'
also = 'threads=1'
seeds = 1
workers = 2
out_dir = 'out/study_boxoban'

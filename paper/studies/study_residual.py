"""Study: the residual rule of a non-recurrent language model of several experts.

Goal: each expert with a residual of its own (the paper's rule) against one shared residual, at L =
2, each at its own learning rate, three seeds. Hardware and time: two CPU cores, 12 runs or more of
about four minutes. Other depths, longer: config/study_lm.py with --residual=shared.

    python sweep.py config/study_residual.py --run --figure --table
"""

plan = 'residual'
base = 'config/tiny_nonrecurrent.py'
width = 0.0625
only = 'model=transformer L=2'
tune = 'learning_rate=0.04,0.08'  # the best two of four for the default (config/study_lm.py)
seeds = 3
workers = 2
out_dir = 'out/study'

"""Study: how the experts of a recurrent language model are aggregated.

Goal: the four aggregations at L = 2, each at its own learning rate, three seeds. Expected:
differences of about 0.01 nats per byte; the plain mean is the best (results/README.md). Hardware
and time: two CPU cores, 24 runs or more of about four minutes.

    python sweep.py config/study_aggregation.py --run --figure --table
"""

plan = 'aggregation'
base = 'config/tiny_lm.py'
width = 0.0625
only = 'model=transformer'
tune = 'learning_rate=0.04,0.08'  # the best two of four for sqrt_sum (config/study_lm.py)
seeds = 3
workers = 2
out_dir = 'out/study'

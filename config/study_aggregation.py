"""The small study: how a recurrent language model's experts are summed, at L = 2, each at its own
learning rate, three seeds.
python sweep.py config/study_aggregation.py --run --figure --table"""

plan = 'aggregation'
base = 'config/tiny_lm.py'
base_ff = 'config/tiny_nonrecurrent.py'
width = 0.0625
only = 'model=transformer'
tune = 'learning_rate=0.04,0.08'  # the best two of four for sqrt_sum (config/study_lm.py)
seeds = 3
workers = 2
out_dir = 'out/study'

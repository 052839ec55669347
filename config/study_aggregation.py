"""The small study: the recurrent language model's aggregations at L = 2. python sweep.py config/study_aggregation.py --run --figure --table"""
plan = 'aggregation'
base = 'config/tiny_lm.py'
base_ff = 'config/tiny_gpt.py'
width = 0.0625
only = 'model=transformer'
seeds = 3
workers = 2
out_dir = 'out/study'

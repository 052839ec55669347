"""The small study: the non-recurrent language model's residual rules at L = 2, 4, 8. python sweep.py config/study_residual.py --run --figure --table"""
plan = 'residual'
base = 'config/tiny_lm.py'
base_ff = 'config/tiny_gpt.py'
width = 0.0625
only = 'model=transformer'
seeds = 3
workers = 2
out_dir = 'out/study'

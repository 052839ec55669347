"""The small study: residual rules of the language model that is not recurrent, at L = 2, each at
its own learning rate, three seeds.
python sweep.py config/study_residual.py --run --figure --table"""

plan = 'residual'
base = 'config/tiny_lm.py'
base_ff = 'config/tiny_nonrecurrent.py'
width = 0.0625
only = 'model=transformer L=2'
tune = 'learning_rate=0.04,0.08'  # the best two of four for the default (config/study_lm.py)
seeds = 3
workers = 2
out_dir = 'out/study'

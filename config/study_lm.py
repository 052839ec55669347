"""The study of language models: recurrent and not, L = 1 to 16 at one budget (16 blocks of width
48), 7.05M bytes each at its own learning rate, searched with seed 1 from 0.02 and 0.04 on, by
factors of two until both neighbours of the best are worse; three further seeds of it are reported.
Some sixty runs of 4 to 25 minutes of one core; --length=1 and --length=2.048: shorter ones.
python sweep.py config/study_lm.py --run --figure --table"""

plan = 'lm-small'
base = 'config/tiny_lm.py'
base_ff = 'config/tiny_nonrecurrent.py'
width = 0.0625  # 768 -> 48
length = 4.0952  # 168 -> 688 updates
only = 'd=48'
tune = 'learning_rate=0.02,0.04'  # one rate for all would decide the order by itself
seeds = 3
workers = 2
out_dir = 'out/study'

"""The small study, language models: recurrent and not, L = 1 to 16 at one budget (16 blocks of
width 48), equal bytes, each at its own learning rate, three seeds besides the one that chose the
rate. Seventy runs of two to six minutes, two at a time on two CPU cores (make demo prepares the
data).
python sweep.py config/study_lm.py --run --figure --table"""

plan = 'lm-small'
base = 'config/tiny_lm.py'
base_ff = 'config/tiny_gpt.py'
width = 0.0625  # 768 -> 48
only = 'd=48'
tune = 'learning_rate=0.02,0.04,0.08,0.16'  # one rate for all would decide the order by itself
seeds = 3
workers = 2
out_dir = 'out/study'

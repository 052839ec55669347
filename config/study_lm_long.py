"""The longer study, language models: study_lm.py with four times the bytes, 7.05M (less than one
epoch). Sixty runs, two at a time on two CPU cores with a thread each.
python sweep.py config/study_lm_long.py --run --figure --table"""

plan = 'lm-small'
base = 'config/tiny_lm.py'
base_ff = 'config/tiny_gpt.py'
also = 'compile=True threads=1 eval_interval=86'
width = 0.0625  # 768 -> 48
length = 688 / 168  # 688 updates of 10,240 bytes
only = 'd=48'
tune = 'learning_rate=0.02,0.04,0.08'
seeds = 3
workers = 2
out_dir = 'out/study_long'

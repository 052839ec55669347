"""Agent of the studies on a small machine (paper/studies/study_sokoban.py).

Goal: easy levels (one box, at most 12 moves), short enough for many runs. The ConvGLUs on easy
levels in paper/results/README.md have these settings, but for sizes, steps and dtype. Hardware and
time: one CPU core, about eight minutes.

    python train_sokoban.py config/sokoban_tiny.py
"""

out_dir = 'out/sokoban_tiny'
split = 'generated'
eval_split = 'generated'
n_boxes = 1
max_moves = 12
eval_interval = 500
eval_games = 512
log_interval = 50
arch = 'convglu'
n_embd = 32
n_envs = 64  # more boards, shorter unrolls than the paper's: more kinds of situations at once
unroll = 10
total_steps = 1152000
learning_rate = 1e-3  # small agents and short runs
compile = False

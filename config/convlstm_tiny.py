"""Agent of paper/studies/study_convlstm.py: a narrow ConvLSTM on easy levels.

Goal: easy levels (one box, at most 8 moves), learned within few environment steps, so that a study
fits on two cores. Expected: it solves a half to three quarters of the levels; a random policy one
in nine. Hardware and time: one CPU core, about six minutes.

    python train_sokoban.py config/convlstm_tiny.py
"""

out_dir = 'out/convlstm_tiny'
split = 'generated'
eval_split = 'generated'
n_boxes = 1
max_moves = 8
n_levels = 20000  # quickly generated
time_limit = 20  # with 120, most steps would be spent on boards whose box is stuck in a corner
eval_interval = 10000  # evaluations and checkpoints only at the start and the end
eval_games = 1000
log_interval = 10
n_layer = 2
n_expert = 4
n_embd = 12
n_envs = 64  # more boards, shorter unrolls than the paper's: more kinds of situations at once
unroll = 10
total_steps = 320000
gamma = 0.9  # a short horizon: solutions have at most 8 moves
entropy_coef = 0.005
value_coef = 0.2  # with 1.0 the value loss dominates the gradient
learning_rate = 2e-3  # a small agent and a short run

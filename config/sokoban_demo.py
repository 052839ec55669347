"""Demo: a small recurrent ConvGLU agent on easy generated Sokoban levels.

Goal: see an agent learn within minutes: one box, levels that are solvable in 8 moves or fewer.
Expected: it solves nine in ten evaluation levels; a random policy solves one in eleven. Hardware
and time: two CPU cores, about three minutes. `make demo-sokoban` does all of it, with a rank per
core; by hand:

    torchrun --standalone --nproc_per_node=2 train_sokoban.py config/sokoban_demo.py --threads=1
    python train_sokoban.py config/sokoban_demo.py --eval_only=True
"""

out_dir = 'out/sokoban_demo'
split = 'generated'
eval_split = 'generated'
n_boxes = 1
max_moves = 8
n_levels = 20000  # quickly generated
time_limit = 20  # with 120, most steps would be spent on boards whose box is stuck in a corner
eval_interval = 400
eval_games = 512
log_interval = 50
plot = True
arch = 'convglu'  # a quarter of a ConvLSTM's work at this width
n_layer = 1
n_embd = 32
n_envs = 64  # more boards, shorter unrolls than the paper's: more kinds of situations at once
unroll = 10
total_steps = 480000
gamma = 0.8  # a short horizon: solutions have at most 8 moves
gae_lambda = 0.9
entropy_coef = 0.005
value_coef = 0.2  # with 1.0 the value loss dominates the gradient
compile = False  # compilation takes half a minute, and would save no more
learning_rate = 2e-3  # a small agent and a short run

"""The Sokoban demo: a small recurrent ConvGLU on easy generated levels (one box, solvable in 12
moves or fewer), minutes on 2 CPU cores. A random policy solves a fifth of them; the agent most.
`make demo-sokoban` runs it and plays the held-out levels."""

out_dir = 'out/sokoban_demo'
split = 'generated'
eval_split = 'generated'
n_boxes = 1
max_moves = 12
eval_interval = 500
eval_games = 512
log_interval = 50
plot = True
arch = 'convglu'  # a quarter of a ConvLSTM's work at this width
n_layer = 1
n_embd = 32
n_envs = 64  # more boards, shorter unrolls than the paper's: more kinds of situations at once
unroll = 10
total_steps = 2000000
learning_rate = 1e-3  # a small agent and a short run

"""The Sokoban demo: a small recurrent agent on easy generated levels (one box), under ten minutes on 2 CPU cores."""
out_dir = 'out/sokoban_demo'
split = 'generated'
eval_split = 'generated'
n_boxes = 1
eval_games = 512
eval_interval = 250
log_interval = 25
n_layer = 2
n_expert = 1
n_embd = 32
total_steps = 1000000
learning_rate = 1e-3
plot = True

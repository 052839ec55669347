"""Not recurrent ConvLSTM, medium budget: L = 8, E = 2, d = 64. 50M steps of unfiltered-train, one GPU; not run by us yet.
The paper: 86.73% of unfiltered-test solved, mean return 8.37."""

out_dir = 'out/sokoban_medium_ff_L8'
recurrent = False
n_layer = 8
n_expert = 2
n_embd = 64

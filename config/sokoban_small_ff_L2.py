"""Not recurrent ConvLSTM, small budget: L = 2, E = 2, d = 64. 50M steps of unfiltered-train, one GPU; not run by us yet.
The paper: 30.50% of unfiltered-test solved, mean return -2.05."""

out_dir = 'out/sokoban_small_ff_L2'
recurrent = False
n_layer = 2
n_expert = 2
n_embd = 64

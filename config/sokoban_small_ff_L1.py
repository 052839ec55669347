"""Not recurrent ConvLSTM, small budget: L = 1, E = 4, d = 64. 50M steps of unfiltered-train, one GPU; not run by us yet.
The paper: 3.20% of unfiltered-test solved, mean return -8.94."""

out_dir = 'out/sokoban_small_ff_L1'
recurrent = False
n_layer = 1
n_expert = 4
n_embd = 64

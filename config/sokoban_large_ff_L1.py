"""Not recurrent ConvLSTM, large budget: L = 1, E = 58, d = 128. 50M steps of unfiltered-train, one GPU; not run by us yet.
The paper: 4.57% of unfiltered-test solved, mean return -8.76."""

out_dir = 'out/sokoban_large_ff_L1'
recurrent = False
n_layer = 1
n_expert = 58
n_embd = 128

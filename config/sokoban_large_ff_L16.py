"""Not recurrent ConvLSTM, large budget: L = 16, E = 13, d = 64. 50M steps of unfiltered-train, one GPU; not run by us yet.
The paper: 93.00% of unfiltered-test solved, mean return 9.42."""

out_dir = 'out/sokoban_large_ff_L16'
recurrent = False
n_layer = 16
n_expert = 13
n_embd = 64

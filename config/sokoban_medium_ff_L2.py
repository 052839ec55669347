"""Not recurrent ConvLSTM, medium budget: L = 2, E = 2, d = 128. 50M steps of unfiltered-train, one GPU; not run by us yet.
The paper: 39.03% of unfiltered-test solved, mean return 0.20."""

out_dir = 'out/sokoban_medium_ff_L2'
recurrent = False
n_layer = 2
n_expert = 2
n_embd = 128

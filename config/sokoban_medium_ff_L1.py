"""Not recurrent ConvLSTM, medium budget: L = 1, E = 4, d = 128. 50M steps of unfiltered-train, one GPU; not run by us yet.
The paper: 3.93% of unfiltered-test solved, mean return -8.83."""

out_dir = 'out/sokoban_medium_ff_L1'
recurrent = False
n_layer = 1
n_expert = 4
n_embd = 128

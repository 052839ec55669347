"""Not recurrent ConvLSTM, medium budget: L = 4, E = 1, d = 128. 50M steps of unfiltered-train, one GPU; not run by us yet.
The paper: 68.93% of unfiltered-test solved, mean return 5.57."""

out_dir = 'out/sokoban_medium_ff_L4'
recurrent = False
n_layer = 4
n_expert = 1
n_embd = 128

"""Not recurrent ConvLSTM, medium budget: L = 16, E = 1, d = 64. 50M steps of unfiltered-train, one GPU; not run by us yet.
The paper: 84.10% of unfiltered-test solved, mean return 7.67."""

out_dir = 'out/sokoban_medium_ff_L16'
recurrent = False
n_layer = 16
n_expert = 1
n_embd = 64

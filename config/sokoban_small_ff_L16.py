"""Not recurrent ConvLSTM, small budget: L = 16, E = 1, d = 32. 50M steps of unfiltered-train, one GPU; not run by us yet.
The paper: 73.23% of unfiltered-test solved, mean return 5.49."""

out_dir = 'out/sokoban_small_ff_L16'
recurrent = False
n_layer = 16
n_expert = 1
n_embd = 32

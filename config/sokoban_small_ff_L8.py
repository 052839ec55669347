"""Not recurrent ConvLSTM, small budget: L = 8, E = 2, d = 32. 50M steps of unfiltered-train, one GPU; not run by us yet.
The paper: 74.63% of unfiltered-test solved, mean return 5.90."""

out_dir = 'out/sokoban_small_ff_L8'
recurrent = False
n_layer = 8
n_expert = 2
n_embd = 32

"""Not recurrent ConvLSTM, large budget: L = 4, E = 4, d = 256. 50M steps of unfiltered-train, one GPU; not run by us yet.
The paper: 78.47% of unfiltered-test solved, mean return 7.29."""

out_dir = 'out/sokoban_large_ff_L4'
recurrent = False
n_layer = 4
n_expert = 4
n_embd = 256

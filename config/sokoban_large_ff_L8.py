"""Not recurrent ConvLSTM, large budget: L = 8, E = 7, d = 128. 50M steps of unfiltered-train, one GPU; not run by us yet.
The paper: 92.00% of unfiltered-test solved, mean return 9.21."""

out_dir = 'out/sokoban_large_ff_L8'
recurrent = False
n_layer = 8
n_expert = 7
n_embd = 128

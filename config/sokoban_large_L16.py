"""Recurrent ConvLSTM, large budget: L = 16, E = 13, d = 64. 50M steps of unfiltered-train, one GPU; not run by us yet.
The paper: 88.57% of unfiltered-test solved, mean return 8.24."""

out_dir = 'out/sokoban_large_L16'
n_layer = 16
n_expert = 13
n_embd = 64

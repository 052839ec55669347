"""Recurrent ConvLSTM, large budget: L = 2, E = 8, d = 256. 50M steps of unfiltered-train, one GPU; not run by us yet.
The paper: 98.47% of unfiltered-test solved, mean return 10.22."""

out_dir = 'out/sokoban_large_L2'
n_layer = 2
n_expert = 8
n_embd = 256

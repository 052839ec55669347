"""Recurrent ConvLSTM, medium budget: L = 1, E = 1, d = 256. 50M steps of unfiltered-train, one GPU; not run by us yet.
The paper: 93.23% of unfiltered-test solved, mean return 8.79."""

out_dir = 'out/sokoban_medium_L1'
n_layer = 1
n_expert = 1
n_embd = 256

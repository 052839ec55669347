"""Recurrent ConvLSTM, large budget: L = 1, E = 4, d = 512. 50M steps of unfiltered-train, one GPU; not run by us yet.
The paper: 96.23% of unfiltered-test solved, mean return 9.50."""

out_dir = 'out/sokoban_large_L1'
n_layer = 1
n_expert = 4
n_embd = 512

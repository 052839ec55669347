"""Recurrent ConvLSTM, small budget: L = 4, E = 1, d = 64. 50M steps of unfiltered-train, one GPU; not run by us yet.
The paper: 92.70% of unfiltered-test solved, mean return 9.21."""

out_dir = 'out/sokoban_small_L4'
n_layer = 4
n_expert = 1
n_embd = 64

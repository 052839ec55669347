"""Recurrent ConvLSTM, small budget: L = 16, E = 1, d = 32. 50M steps of unfiltered-train, one GPU; not run by us yet.
The paper: 79.00% of unfiltered-test solved, mean return 6.30."""

out_dir = 'out/sokoban_small_L16'
n_layer = 16
n_expert = 1
n_embd = 32

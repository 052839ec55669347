"""Recurrent ConvLSTM, small budget: L = 2, E = 2, d = 64. 50M steps of unfiltered-train, one GPU; not run by us yet.
The paper: 91.93% of unfiltered-test solved, mean return 8.95."""

out_dir = 'out/sokoban_small_L2'
n_layer = 2
n_expert = 2
n_embd = 64

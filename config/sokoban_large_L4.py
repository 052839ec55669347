"""Recurrent ConvLSTM, large budget: L = 4, E = 1, d = 512. 50M steps of unfiltered-train, one GPU; not run by us yet.
The paper: 98.70% of unfiltered-test solved, mean return 10.19."""

out_dir = 'out/sokoban_large_L4'
n_layer = 4
n_expert = 1
n_embd = 512

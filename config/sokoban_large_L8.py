"""Recurrent ConvLSTM, large budget: L = 8, E = 7, d = 128. 50M steps of unfiltered-train, one GPU; not run by us yet.
The paper: 95.67% of unfiltered-test solved, mean return 9.55."""

out_dir = 'out/sokoban_large_L8'
n_layer = 8
n_expert = 7
n_embd = 128

"""Recurrent ConvLSTM, small budget: L = 8, E = 2, d = 32. 50M steps of unfiltered-train, one GPU; not run by us yet.
The paper: 86.13% of unfiltered-test solved, mean return 7.93."""

out_dir = 'out/sokoban_small_L8'
n_layer = 8
n_expert = 2
n_embd = 32

"""Recurrent ConvLSTM, small budget: L = 1, E = 1, d = 128. 50M steps of unfiltered-train, one GPU; not run by us yet.
The paper: 86.03% of unfiltered-test solved, mean return 7.75."""

out_dir = 'out/sokoban_small_L1'
n_layer = 1
n_expert = 1
n_embd = 128

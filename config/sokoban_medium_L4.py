"""Recurrent ConvLSTM, medium budget: L = 4, E = 1, d = 128. 50M steps of unfiltered-train, one GPU; not run by us yet.
The paper: 96.67% of unfiltered-test solved, mean return 9.78."""

out_dir = 'out/sokoban_medium_L4'
n_layer = 4
n_expert = 1
n_embd = 128

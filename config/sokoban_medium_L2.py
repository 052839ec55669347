"""Recurrent ConvLSTM, medium budget: L = 2, E = 2, d = 128. 50M steps of unfiltered-train, one GPU; not run by us yet.
The paper: 96.20% of unfiltered-test solved, mean return 9.56."""

out_dir = 'out/sokoban_medium_L2'
n_layer = 2
n_expert = 2
n_embd = 128

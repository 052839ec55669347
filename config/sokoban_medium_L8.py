"""Recurrent ConvLSTM, medium budget: L = 8, E = 2, d = 64. 50M steps of unfiltered-train, one GPU; not run by us yet.
The paper: 93.40% of unfiltered-test solved, mean return 9.07."""

out_dir = 'out/sokoban_medium_L8'
n_layer = 8
n_expert = 2
n_embd = 64

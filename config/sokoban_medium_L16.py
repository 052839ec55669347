"""Recurrent ConvLSTM, medium budget: L = 16, E = 1, d = 64. 50M steps of unfiltered-train, one GPU; not run by us yet.
The paper: 88.67% of unfiltered-test solved, mean return 8.07."""

out_dir = 'out/sokoban_medium_L16'
n_layer = 16
n_expert = 1
n_embd = 64

"""Not recurrent ConvLSTM, large budget: L = 2, E = 2, d = 512. 50M steps of unfiltered-train, one GPU; not run by us yet.
The paper: 52.93% of unfiltered-test solved, mean return 2.36."""

out_dir = 'out/sokoban_large_ff_L2'
recurrent = False
n_layer = 2
n_expert = 2
n_embd = 512

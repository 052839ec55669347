"""Recurrent ConvLSTM, small budget: L = 4, E = 1, d = 64. 50M steps of unfiltered-train, one GPU;
not run by us yet. The paper: 92.70% of unfiltered-test solved, mean return 9.21.
The same row of the medium budget has --n_embd=128, that of the large one --n_embd=512; all rows
that the paper gives are in results/paper/, and sweep.py runs them."""

out_dir = 'out/sokoban_small_L4'
n_layer = 4
n_expert = 1
n_embd = 64

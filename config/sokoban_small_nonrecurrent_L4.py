"""Non-recurrent ConvLSTM agent, small budget: L = 4 layers of one expert of width 64.

Goal: the counterpart of config/sokoban_small_L4.py at the same nominal cost. Expected (the paper):
59.63% of unfiltered-test solved, mean return 3.70. Hardware and time: one GPU, 4.4e16 FLOPs of its
layers (not run by us yet).

    python train_sokoban.py config/sokoban_small_nonrecurrent_L4.py --download=True
"""

out_dir = 'out/sokoban_small_nonrecurrent_L4'
recurrent = False
n_layer = 4
n_expert = 1
n_embd = 64
dtype = 'float32'

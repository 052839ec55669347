"""Recurrent ConvLSTM agent, small budget: L = 4 layers of one expert of width 64.

Goal: the paper's best small agent, 50M steps of unfiltered-train. Expected (the paper): 92.70% of
unfiltered-test solved, mean return 9.21. Hardware and time: one GPU, 4.4e16 FLOPs of its layers
(not run by us yet).

    python train_sokoban.py config/sokoban_small_L4.py --download=True
    python train_sokoban.py config/sokoban_small_L4.py --eval_only=True --levels=unfiltered-test

The same row of the medium budget has --n_embd=128, that of the large one --n_embd=512. All rows of
the paper are in paper/results/paper/; `python -m paper.sweep sokoban-small --run` runs them.
"""

out_dir = 'out/sokoban_small_L4'
n_layer = 4
n_expert = 1
n_embd = 64
dtype = 'float32'

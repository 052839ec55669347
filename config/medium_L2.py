"""Recurrent Transformer, medium budget: 32 blocks of width 768, window 128.

Goal: one row of the paper's FineWeb figure (medium budget), L = 2 layers of E = 16 experts.
Expected: the paper finds the best loss at few layers with recurrence; compare with
medium_nonrecurrent_L2.py, which has the same FLOPs per token. Hardware and time: one or more GPUs
of 80 GB, 1.3B tokens, 2.0e18 FLOPs (not run by us yet). The shards come first:

    python data_fineweb.py --pretokenized=14
    python train_lm.py config/medium_L2.py

Other rows of the budget: --n_layer=4 --n_expert=8, or 1 and 32, 8 and 4, 16 and 2, 32 and 1, each
with an --out_dir of its own; or all of them by `python -m paper.sweep lm-medium --run`.
"""

out_dir = 'out/medium_L2'
recurrent = True
n_layer = 2
n_expert = 16
n_embd = 768
window = 128
block_size = 64

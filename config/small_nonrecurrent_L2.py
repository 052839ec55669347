"""Non-recurrent Transformer, small budget: 16 blocks of width 768.

Goal: one row of the paper's FineWeb figure (small budget), L = 2 layers of E = 8 experts. Expected:
the paper finds that more layers are better without recurrence; compare with small_L2.py, which has
the same FLOPs per token. Hardware and time: one or more GPUs of 80 GB, 1.3B tokens, 1.1e18 FLOPs
(not run by us yet). The shards come first:

    python data_fineweb.py --pretokenized=14
    python train_lm.py config/small_nonrecurrent_L2.py

Other rows of the budget: --n_layer=4 --n_expert=4, or 1 and 16, 8 and 2, 16 and 1, each with an
--out_dir of its own; or all of them by `python -m paper.sweep lm-small --run`.
"""

out_dir = 'out/small_nonrecurrent_L2'
recurrent = False
n_layer = 2
n_expert = 8
n_embd = 768
window = 128
block_size = 256

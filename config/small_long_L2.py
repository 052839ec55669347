"""Recurrent Transformer, small budget with long context: 16 blocks of width 768, window 1,024.

Goal: one row of the paper's FineWeb figure (long context), L = 2 layers of E = 8 experts. Expected:
the paper finds the best loss at few layers with recurrence; compare with
small_long_nonrecurrent_L2.py, which has the same FLOPs per token. Hardware and time: one or more
GPUs of 80 GB, 1.3B tokens, 1.3e18 FLOPs (not run by us yet). The shards come first:

    python data_fineweb.py --pretokenized=14
    python train_lm.py config/small_long_L2.py

Other rows of the budget: --n_layer=4 --n_expert=4, or 1 and 16, 8 and 2, 16 and 1, each with an
--out_dir of its own; or all of them by `python -m paper.sweep lm-small-long --run`.

The state is large: the cached keys and values of all streams take 3.2 GB per layer, and as much of
a checkpoint.
"""

out_dir = 'out/small_long_L2'
recurrent = True
n_layer = 2
n_expert = 8
n_embd = 768
window = 1024
block_size = 64

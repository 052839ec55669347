"""Non-recurrent Transformer, small budget (16 blocks of width 768), long context:
L = 2 levels of E = 8 experts. 1.3B tokens of FineWeb, on GPUs of 80 GB (torchrun for several).
Takes 29 GB on one, 25 GB on each of four (16 rows at a time):
as calculated by model.memory, not measured on a GPU; not run by us yet.
Its other rows: --n_layer=4 --n_expert=4, or 1 and 16, 8 and 2, 16 and 1;
each with an --out_dir of its own, or all of them by sweep.py."""

out_dir = 'out/small_long_nonrecurrent_L2'
recurrent = False
n_layer = 2
n_expert = 8
n_embd = 768
window = 1024
block_size = 2048

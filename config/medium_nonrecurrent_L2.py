"""Non-recurrent Transformer, medium budget (32 blocks of width 768):
L = 2 levels of E = 16 experts. 1.3B tokens of FineWeb, on GPUs of 80 GB (torchrun for several).
Takes 64 GB on one, 51 GB on each of four (128 rows at a time):
as calculated by model.memory, not measured on a GPU; not run by us yet.
Its other rows: --n_layer=4 --n_expert=8, or 1 and 32, 8 and 4, 16 and 2, 32 and 1;
each with an --out_dir of its own, or all of them by sweep.py."""

out_dir = 'out/medium_nonrecurrent_L2'
recurrent = False
n_layer = 2
n_expert = 16
n_embd = 768
window = 128
block_size = 256

"""Recurrent Transformer, small budget (16 blocks of width 768): L = 8 levels of E = 2 experts.
1.3B tokens of FineWeb, on GPUs of 80 GB (torchrun for several). Takes 45 GB on one, 42 GB on each of four (512 rows at a time):
as calculated by model.memory, not measured on a GPU; not run by us yet."""

out_dir = 'out/small_L8'
recurrent = True
n_layer = 8
n_expert = 2
n_embd = 768
window = 128
block_size = 64

"""Recurrent Transformer, medium budget (32 blocks of width 768): L = 16 levels of E = 2 experts.
1.3B tokens of FineWeb, on GPUs of 80 GB (torchrun for several). Takes 82 GB on one, 77 GB on each of four (512 rows at a time):
as calculated by model.memory, not measured on a GPU; not run by us yet."""

out_dir = 'out/medium_L16'
recurrent = True
n_layer = 16
n_expert = 2
n_embd = 768
window = 128
block_size = 64

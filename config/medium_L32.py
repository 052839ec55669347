"""Recurrent Transformer, medium budget (32 blocks of width 768): L = 32 levels of E = 1 experts.
1.3B tokens of FineWeb, on GPUs of 80 GB (torchrun for several). Takes 74 GB on one, 65 GB on each of four (256 rows at a time):
as calculated by model.memory, not measured on a GPU; not run by us yet."""

out_dir = 'out/medium_L32'
recurrent = True
n_layer = 32
n_expert = 1
n_embd = 768
window = 128
block_size = 64

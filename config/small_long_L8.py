"""Recurrent Transformer, small budget (16 blocks of width 768), long context: L = 8 levels of E = 2 experts.
1.3B tokens of FineWeb, on GPUs of 80 GB (torchrun for several). Takes 62 GB on one (128 rows at a time), 73 GB on each of four (256):
as calculated by model.memory, not measured on a GPU; not run by us yet.
The carried keys and values are 25.8 GB over all GPUs, and as much of a checkpoint."""

out_dir = 'out/small_long_L8'
recurrent = True
n_layer = 8
n_expert = 2
n_embd = 768
window = 1024
block_size = 64

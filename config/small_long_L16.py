"""Recurrent Transformer, small budget (16 blocks of width 768), long context: L = 16 levels of E = 1 experts.
1.3B tokens of FineWeb, on GPUs of 80 GB (torchrun for several). Takes 72 GB on one (32 rows at a time), 75 GB on each of four (128):
as calculated by model.memory, not measured on a GPU; not run by us yet.
The carried keys and values are 51.5 GB over all GPUs, and as much of a checkpoint."""

out_dir = 'out/small_long_L16'
recurrent = True
n_layer = 16
n_expert = 1
n_embd = 768
window = 1024
block_size = 64

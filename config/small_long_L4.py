"""Recurrent Transformer, small budget (16 blocks of width 768), long context: L = 4 levels of E = 4 experts.
1.3B tokens of FineWeb, on GPUs of 80 GB (torchrun for several). Takes 53 GB on one (256 rows at a time), 76 GB on each of four (512):
as calculated by model.memory, not measured on a GPU; not run by us yet.
The carried keys and values are 12.9 GB over all GPUs, and as much of a checkpoint."""

out_dir = 'out/small_long_L4'
recurrent = True
n_layer = 4
n_expert = 4
n_embd = 768
window = 1024
block_size = 64

"""Recurrent Transformer, small budget (16 blocks of width 768), long context: L = 1 levels of E = 16 experts.
1.3B tokens of FineWeb. Written for 4 GPUs of 80 GB (torchrun): the carried keys and
values alone take 3.2 GB, by count, over all of them, and as much of a checkpoint. Not run by us yet."""
out_dir = 'out/small_long_L1'
recurrent = True
n_layer = 1
n_expert = 16
n_embd = 768
window = 1024
block_size = 64
batch_size = 512   # rows a GPU runs at a time: 32,768 tokens, a quarter of an update

"""Recurrent Transformer, small budget (16 blocks of width 768): L = 2 levels of E = 8 experts.
1.3B tokens of FineWeb. Written for GPUs of 80 GB, one or more (torchrun); not run by us yet."""
out_dir = 'out/small_L2'
recurrent = True
n_layer = 2
n_expert = 8
n_embd = 768
window = 128
block_size = 64
batch_size = 512   # rows a GPU runs at a time: 32,768 tokens, a quarter of an update

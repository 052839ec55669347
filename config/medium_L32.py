"""Recurrent Transformer, medium budget (32 blocks of width 768): L = 32 levels of E = 1 experts.
1.3B tokens of FineWeb. Written for GPUs of 80 GB, one or more (torchrun); not run by us yet."""
out_dir = 'out/medium_L32'
recurrent = True
n_layer = 32
n_expert = 1
n_embd = 768
window = 128
block_size = 64
batch_size = 512   # rows a GPU runs at a time: 32,768 tokens, a quarter of an update

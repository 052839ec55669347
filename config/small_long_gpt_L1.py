"""Non-recurrent Transformer, small budget (16 blocks of width 768), long context: L = 1 levels of E = 16 experts.
1.3B tokens of FineWeb. Written for GPUs of 80 GB, one or more (torchrun); not run by us yet."""
out_dir = 'out/small_long_gpt_L1'
recurrent = False
n_layer = 1
n_expert = 16
n_embd = 768
window = 1024
block_size = 2048
batch_size = 16   # rows a GPU runs at a time: 32,768 tokens, a quarter of an update

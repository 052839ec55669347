"""Non-recurrent Transformer, small budget (16 blocks of width 768): L = 16 levels of E = 1 experts.
1.3B tokens of FineWeb. Written for GPUs of 80 GB, one or more (torchrun); not run by us yet."""
out_dir = 'out/small_gpt_L16'
recurrent = False
n_layer = 16
n_expert = 1
n_embd = 768
window = 128
block_size = 256
batch_size = 128   # rows a GPU runs at a time: 32,768 tokens, a quarter of an update

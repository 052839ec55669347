"""Non-recurrent Transformer, small budget (16 blocks of width 768), long context: L = 8 levels of E = 2 experts.
1.3B tokens of FineWeb, on GPUs of 80 GB (torchrun for several). Takes 26 GB on one, 24 GB on each of four (16 rows at a time):
as calculated by model.memory, not measured on a GPU; not run by us yet."""

out_dir = 'out/small_long_gpt_L8'
recurrent = False
n_layer = 8
n_expert = 2
n_embd = 768
window = 1024
block_size = 2048

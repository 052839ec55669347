"""Non-recurrent Transformer, medium budget (32 blocks of width 768): L = 1 levels of E = 32 experts.
1.3B tokens of FineWeb, on GPUs of 80 GB (torchrun for several). Takes 47 GB on one (64 rows at a time), 61 GB on each of four (128):
as calculated by model.memory, not measured on a GPU; not run by us yet."""

out_dir = 'out/medium_gpt_L1'
recurrent = False
n_layer = 1
n_expert = 32
n_embd = 768
window = 128
block_size = 256

"""Non-recurrent Transformer, medium budget (32 blocks of width 768): L = 8 levels of E = 4 experts.
1.3B tokens of FineWeb, on GPUs of 80 GB (torchrun for several). Takes 47 GB on one, 43 GB on each of four (128 rows at a time):
as calculated by model.memory, not measured on a GPU; not run by us yet."""

out_dir = 'out/medium_gpt_L8'
recurrent = False
n_layer = 8
n_expert = 4
n_embd = 768
window = 128
block_size = 256

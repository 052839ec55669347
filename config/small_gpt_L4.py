"""Non-recurrent Transformer, small budget (16 blocks of width 768): L = 4 levels of E = 4 experts.
1.3B tokens of FineWeb, on GPUs of 80 GB (torchrun for several). Takes 30 GB on one, 26 GB on each of four (128 rows at a time):
as calculated by model.memory, not measured on a GPU; not run by us yet."""

out_dir = 'out/small_gpt_L4'
recurrent = False
n_layer = 4
n_expert = 4
n_embd = 768
window = 128
block_size = 256

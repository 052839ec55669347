"""The demo: a small recurrent model on the bytes of 233 State of the Union speeches, a few minutes
on 2 CPU cores. `make demo` prepares the data first:
python data_fineweb.py --demo=True --tokenizer=bytes"""

out_dir = 'out/demo'
data_dir = 'data/sotu_bytes'
tokenizer = 'bytes'
n_layer = 2
n_expert = 4
n_embd = 256
window = 128
block_size = 64
tokens_per_step = 4096
max_iters = 200
warmup_iters = 20
eval_interval = 50
val_tokens = 32768
val_streams = 64
log_interval = 10
compile = False  # wins 10 to 40% on a CPU, and costs up to half a minute at the start
plot = True

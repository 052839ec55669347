"""Demo: a small recurrent language model on the bytes of 233 State of the Union speeches.

Goal: see training, resuming and sampling work from nothing. Expected: a validation loss of about
1.3 nats per byte, and text with English words. Hardware and time: two CPU cores, four minutes.
`make demo` does all of it, with a rank per core, which is twice as fast; by hand:

    python data_fineweb.py --demo=True --tokenizer=bytes
    torchrun --standalone --nproc_per_node=2 train_lm.py config/demo.py --threads=1
    python sample.py --out_dir=out/demo --prompt="Fellow citizens"
"""

out_dir = 'out/demo'
data_dir = 'data/sotu_bytes'
tokenizer = 'bytes'
n_layer = 2
n_expert = 4
n_embd = 128
window = 64
block_size = 32  # more streams with shorter blocks: thin products are slow on a CPU
tokens_per_step = 2048
max_iters = 240
warmup_iters = 20
eval_interval = 80
val_tokens = 32768
val_streams = 64
log_interval = 10
compile = False  # it would save 10 to 40% of the time, but take half a minute at the start
plot = True

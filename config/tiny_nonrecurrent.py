"""Non-recurrent language model of the studies on a small machine (paper/studies/study_lm.py).

Goal: the counterpart of config/tiny_lm.py at the same FLOPs per byte: 1.7M bytes of speeches.
Hardware and time: one CPU core, three to six minutes. Prepare the data first:

    python data_fineweb.py --demo=True --tokenizer=bytes
    python train_lm.py config/tiny_nonrecurrent.py
"""

out_dir = 'out/tiny_nonrecurrent'
recurrent = False
data_dir = 'data/sotu_bytes'
tokenizer = 'bytes'
n_layer = 2
n_expert = 8
n_embd = 48
n_head = 2  # two heads at every width
window = 64  # half of the paper's, like the chunk
block_size = 128  # mean context (T + 1) / 2, about the recurrent window: equal cost
tokens_per_step = 10240
max_iters = 168  # 1.72M bytes
warmup_iters = 17
learning_rate = 0.04
embedding_lr = 1.6  # eight times the default, like the next two (LOG.md, 2026-11-23)
head_lr = 0.032
scalar_lr = 0.16
eval_interval = 21
val_tokens = 131072  # in streams of 2,048, as in config/tiny_lm.py
val_streams = 64
log_interval = 12

"""Non-recurrent language model that tracks the state of a stream of permutations (data_states.py).

Goal: the counterpart of config/states.py with as many experts, one above the other. Hardware and
time: one CPU core, three minutes.

    python data_states.py
    python train_lm.py config/states_nonrecurrent.py
    python -m paper.states out/states_S5
"""

out_dir = 'out/states_S5/nonrecurrent'
recurrent = False
data_dir = 'data/states_S5'
tokenizer = 'bytes'
n_layer = 8
n_expert = 1
n_embd = 64
n_head = 2
window = 64
block_size = 256  # so long that 93% of all chains, and 84% of those of 32 moves, are seen whole
tokens_per_step = 4096
max_iters = 800  # 3.3M bytes
warmup_iters = 30
learning_rate = 0.01
embedding_lr = 1.6  # eight times the default, like the next two, as in config/tiny_lm.py
head_lr = 0.032
scalar_lr = 0.16
eval_interval = 200
val_tokens = 65536
val_streams = 64
log_interval = 20
compile = False

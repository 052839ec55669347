"""Recurrent language model that tracks the state of a stream of permutations (data_states.py).

Goal: the smallest run that shows how many permutations a single recurrent layer composes: about
eight after its 800 updates, about thirty after --max_iters=1600. Hardware and time: one CPU core,
four minutes; `make demo-states` trains it beside config/states_nonrecurrent.py. By hand:

    python data_states.py
    python train_lm.py config/states.py
    python train_lm.py config/states.py --arch=lstm --baseline_lr=0.016 --out_dir=out/states_S5/lstm
    python -m paper.states out/states_S5

The third line trains an LSTM at its best rate of four (paper/studies/states_rates.py).
"""

out_dir = 'out/states_S5/recurrent'
data_dir = 'data/states_S5'
tokenizer = 'bytes'
n_layer = 1
n_expert = 8
n_embd = 64
n_head = 2
window = 64
block_size = 32
tokens_per_step = 4096
max_iters = 800  # 3.3M bytes
warmup_iters = 30
learning_rate = 0.02
embedding_lr = 1.6  # eight times the default, like the next two, as in config/tiny_lm.py
head_lr = 0.032
scalar_lr = 0.16
eval_interval = 200
val_tokens = 65536
val_streams = 64
log_interval = 20
compile = False

"""Study: the scale of the embedding in a recurrent language model of several experts.

Goal: all experts start equal, so s is sqrt(E) times as large as the embedding z at the start. Does
it help the wide, shallow models to start with b = sqrt(E) instead of 1? L = 1 and 2, 7.05M bytes,
each at its own learning rate, three seeds, as in config/study_lm.py. Expected: no gain
(results/README.md). Hardware and time: CPU cores, 24 runs of 7 to 10 minutes of one core each.

    python data_fineweb.py --demo=True --tokenizer=bytes
    python sweep.py config/study_init_b.py --run --figure --table
"""

plan = 'init-b'
base = 'config/tiny_lm.py'
width = 0.0625  # 768 -> 48
length = 4.0952  # 168 -> 688 updates
tune = 'learning_rate=0.08,0.16'  # the best for b = 1 at L = 2 and at L = 1
seeds = 3
workers = 2
out_dir = 'out/study'

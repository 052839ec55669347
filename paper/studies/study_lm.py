"""Study: which depth is best for a small language model, with and without recurrence.

Goal: the paper's question at 430,000 parameters: L = 1 to 16 layers at one budget (16 blocks of
width 48), 7.05M bytes, each L with its own learning rate. The rate is searched with seed 1, from
0.02 and 0.04 in factors of two until both neighbors of the best are worse; three further seeds at
the best rate are reported. Expected: the best L is 2 or 4 with recurrence and 8 without
(results/README.md). Hardware and time: CPU cores, 65 runs of 4 to 25 minutes of one core each.

    python data_fineweb.py --demo=True --tokenizer=bytes
    python sweep.py config/study_lm.py --run --figure --table

Shorter: --length=1 (1.7 MB) or --length=2.048. The other residual rule of the non-recurrent
models: --residual=shared --only='variant=nonrecurrent d=48 L=2,4,8'.
"""

plan = 'lm-small'
base = 'config/tiny_lm.py'
base_nonrecurrent = 'config/tiny_nonrecurrent.py'
width = 0.0625  # 768 -> 48
length = 4.0952  # 168 -> 688 updates
only = 'd=48'
tune = 'learning_rate=0.02,0.04'  # with one rate for all, the rate would decide the order
seeds = 3
workers = 2
out_dir = 'out/study'

r"""Planning probes of the paper: recurrent ConvLSTM agents of the large budget, d = 256.

Goal: recall of the planned path by step for L = 1, 2, 4 and 8, each for the best of three seeds.
Expected: the paper's figures, recall over the first 20 steps and the plan on boards at the first
three. Hardware: GPUs of 80 GB for the agents; one for the probes, and 40 GB of memory or more
(paper/probe.py).

    python -m paper.sweep probes --run
    python -m paper.probe config/probe_large.py \
        out/sokoban-large/arch-convlstm_recurrent-True_n_layer-[1248]_*_n_embd-256_* --download=True
"""

out_dir = 'out/probe_large'
levels = 'unfiltered-train'
test_levels = 'unfiltered-test'

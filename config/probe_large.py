"""Planning probes of the paper: recurrent ConvLSTM agents of the large budget, d = 256.

Goal: recall of the planned path by step for L = 1, 2, 4 and 8, each for the best of three seeds.
Expected: the paper's figures, recall over the first 20 steps and the plan on boards at the first
three. Hardware and time: one GPU of 80 GB; the agents take about 57 hours of an H100-class one
(modeled, not measured; not run by us yet), the probes minutes. probe_sokoban.py prints the disk
space that it needs.

    python sweep.py --plan=sokoban-large --run \\
        --only='model=convlstm variant=recurrent d=256 L=1,2,4,8'
    python probe_sokoban.py config/probe_large.py --download=True
"""

out_dir = 'out/probe_large'
models = (
    'out/sweep/sokoban-large/convlstm_recurrent_L1_E15_d256_s*,'
    'out/sweep/sokoban-large/convlstm_recurrent_L2_E8_d256_s*,'
    'out/sweep/sokoban-large/convlstm_recurrent_L4_E4_d256_s*,'
    'out/sweep/sokoban-large/convlstm_recurrent_L8_E2_d256_s*'
)
levels = 'unfiltered-train'
test_levels = 'unfiltered-test'

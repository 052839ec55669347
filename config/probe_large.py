"""The paper's planning analysis: recurrent ConvLSTMs of the large budget, d = 256, the best of
three seeds of each depth. Fetch the levels, and train the agents:
python sokoban.py --download=True
python sokoban.py --split=unfiltered-valid --download=True
python sweep.py --plan sokoban-large --only='model=convlstm variant=recurrent d=256 L=1,2,4,8' --run
Then: python probe_sokoban.py config/probe_large.py --download=True"""

out_dir = 'out/probe_large'
models = (
    'out/sweep/sokoban-large/convlstm_recurrent_L1_E15_d256_s*,out/sweep/sokoban-large/convlstm_recurrent_L2_E8_d256_s*,'
    'out/sweep/sokoban-large/convlstm_recurrent_L4_E4_d256_s*,out/sweep/sokoban-large/convlstm_recurrent_L8_E2_d256_s*'
)
levels = 'unfiltered-train'
test_levels = 'unfiltered-test'

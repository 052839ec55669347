"""The planning analysis on a small machine: agents of one and of four levels, on the easy levels
that they were trained on. Train them, and probe them:
python sweep.py config/study_probe.py --run
python probe_sokoban.py config/probe_tiny.py"""

out_dir = 'out/probe_tiny'
models = (
    'out/study_probe/sokoban-small/convglu_recurrent_L1_E4_d32_s*,'
    'out/study_probe/sokoban-small/convglu_recurrent_L4_E1_d32_s*'
)
causal = True
thinking = True

"""Planning probes on a small machine: agents of one and of four layers on easy levels.

Goal: the whole analysis within an hour: recall by step, arrows on boards, steering, time to think.
Hardware and time: two CPU cores, forty minutes to train the agents, minutes for the probes.

    python sweep.py config/study_probe.py --run
    python probe_sokoban.py config/probe_tiny.py
"""

out_dir = 'out/probe_tiny'
models = (
    'out/study_probe/sokoban-small/convglu_recurrent_L1_E4_d32_s*,'
    'out/study_probe/sokoban-small/convglu_recurrent_L4_E1_d32_s*'
)
causal = True
thinking = True

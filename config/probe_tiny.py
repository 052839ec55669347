"""Planning probes on a small machine: agents of one and of four layers on easy levels.

Goal: the whole analysis within an hour: recall by step, and arrows on boards. Hardware and time:
two CPU cores, forty minutes to train the agents, minutes for the probes.

    python -m paper.sweep study-probe --run
    python -m paper.probe config/probe_tiny.py out/study-probe/*
"""

out_dir = 'out/probe_tiny'

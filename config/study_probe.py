"""Agents for the plan probes on a small machine (config/probe_tiny.py): recurrent ConvGLU of one
and of four levels at the small study's budget, 4,000,000 steps each on its easy levels: forty
minutes, one on each of two CPU cores. python sweep.py config/study_probe.py --run"""

plan = 'sokoban-small'
base = 'config/sokoban_tiny.py'
width = 0.5  # C(128) -> C(64), the cost of 4 experts of width 32
length = 3.5  # of the study's steps, after which they solve a quarter of their levels greedily
only = 'model=convglu variant=recurrent d=32 L=1,4'
seeds = 1
workers = 2
out_dir = 'out/study_probe'

"""The twin of sokoban_small_L4.py that is not recurrent; not run by us yet.
The paper: 59.63% of unfiltered-test solved, mean return 3.70."""

out_dir = 'out/sokoban_small_nonrecurrent_L4'
recurrent = False
n_layer = 4
n_expert = 1
n_embd = 64

"""Renamed: use config/sokoban_small_nonrecurrent_L4.py. This name goes with the next release."""

renamed_to = 'sokoban_small_nonrecurrent_L4.py'
out_dir = 'out/sokoban_small_ff_L4'  # runs begun under this name resume

"""Renamed: use config/sokoban_small_nonrecurrent_L4.py. The next release removes this name."""

renamed_to = 'sokoban_small_nonrecurrent_L4.py'
out_dir = 'out/sokoban_small_ff_L4'  # so that runs started under this name can resume

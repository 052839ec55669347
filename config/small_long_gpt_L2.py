"""Renamed: use config/small_long_nonrecurrent_L2.py. The next release removes this name."""

renamed_to = 'small_long_nonrecurrent_L2.py'
out_dir = 'out/small_long_gpt_L2'  # so that runs started under this name can resume

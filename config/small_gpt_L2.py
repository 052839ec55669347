"""Renamed: use config/small_nonrecurrent_L2.py. The next release removes this name."""

renamed_to = 'small_nonrecurrent_L2.py'
out_dir = 'out/small_gpt_L2'  # so that runs started under this name can resume

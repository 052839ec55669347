"""Renamed: use config/small_nonrecurrent_L2.py. This name goes with the next release."""

renamed_to = 'small_nonrecurrent_L2.py'
out_dir = 'out/small_gpt_L2'  # runs begun under this name resume

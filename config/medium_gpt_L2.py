"""Renamed: use config/medium_nonrecurrent_L2.py. This name goes with the next release."""

renamed_to = 'medium_nonrecurrent_L2.py'
out_dir = 'out/medium_gpt_L2'  # runs begun under this name resume

"""Renamed: use config/tiny_nonrecurrent.py. This name goes with the next release."""

renamed_to = 'tiny_nonrecurrent.py'
out_dir = 'out/tiny_gpt'  # runs begun under this name resume

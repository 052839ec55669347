"""Renamed: use config/tiny_nonrecurrent.py. The next release removes this name."""

renamed_to = 'tiny_nonrecurrent.py'
out_dir = 'out/tiny_gpt'  # so that runs started under this name can resume

"""What the scripts of the root stand on. Nothing here imports one of them."""

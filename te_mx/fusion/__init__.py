"""convert_model(fuse=True): finding out which modules of a model can be computed together, and the
changes, which revert_model takes back."""

"""What convert_model and revert_model decide, and say: which layers are converted, which stay and
why, recipes that are bound, and how much of a model that is."""

"""Autograd: what is quantized, what is saved for backward, and which GEMMs run. One Function a
module family."""

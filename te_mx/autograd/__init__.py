"""Autograd: what is quantized, saved for backward and multiplied. One Function a module family."""

"""Transformer Engine's modules beside the linear ones."""

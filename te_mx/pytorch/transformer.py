"""The layer of ``transformer_engine.pytorch.transformer``."""

from te_mx.te.transformer_layer import TransformerLayer

__all__ = ["TransformerLayer"]

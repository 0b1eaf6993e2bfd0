"""The layer of ``transformer_engine.pytorch.transformer``."""

from te_mx.nn.transformer_layer import TransformerLayer

__all__ = ["TransformerLayer"]

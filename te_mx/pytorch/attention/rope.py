"""Rotary embeddings of ``transformer_engine.pytorch.attention.rope``."""

from te_mx.pytorch.absent import reader
from te_mx.te.rotary import RotaryPositionEmbedding, apply_rotary_pos_emb

__all__ = ["RotaryPositionEmbedding", "apply_rotary_pos_emb"]

__getattr__ = reader(__name__)

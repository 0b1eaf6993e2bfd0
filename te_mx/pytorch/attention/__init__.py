"""Attention of ``transformer_engine.pytorch.attention``."""

from te_mx.nn.dot_product_attention import DotProductAttention
from te_mx.nn.multihead_attention import MultiheadAttention
from te_mx.pytorch.attention.rope import RotaryPositionEmbedding, apply_rotary_pos_emb

__all__ = [
    "DotProductAttention",
    "MultiheadAttention",
    "RotaryPositionEmbedding",
    "apply_rotary_pos_emb",
]

"""Attention of ``transformer_engine.pytorch.attention``."""

from te_mx.pytorch.absent import reader
from te_mx.pytorch.attention.rope import RotaryPositionEmbedding, apply_rotary_pos_emb
from te_mx.te.attention import DotProductAttention
from te_mx.te.multihead_attention import MultiheadAttention

__all__ = [
    "DotProductAttention", "MultiheadAttention", "RotaryPositionEmbedding", "apply_rotary_pos_emb",
]  # fmt: skip

__getattr__ = reader(__name__)

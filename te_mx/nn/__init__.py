"""Modules: they run in MXFP8 under te_mx.autocast and are plain torch modules elsewhere."""

from te_mx.nn.grouped_linear import GroupedLinear
from te_mx.nn.layernorm_linear import LayerNormLinear
from te_mx.nn.layernorm_mlp import LayerNormMLP
from te_mx.nn.linear import Linear

__all__ = ["GroupedLinear", "LayerNormLinear", "LayerNormMLP", "Linear"]

"""Transformer Engine's names for PyTorch: ``import te_mx.pytorch as te`` in the place of
``import transformer_engine.pytorch as te``.

Modules are built as Transformer Engine builds them: its order of arguments, its parameter names
and initialization, on the GPU where there is one. docs/transformer_engine.md says what there is,
what is mapped to something else and what is refused."""

from te_mx.pytorch.absent import reader
from te_mx.pytorch.attention import (
    DotProductAttention,
    MultiheadAttention,
    RotaryPositionEmbedding,
    apply_rotary_pos_emb,
)
from te_mx.pytorch.cross_entropy import parallel_cross_entropy
from te_mx.pytorch.distributed import checkpoint
from te_mx.pytorch.graph import make_graphed_callables
from te_mx.pytorch.module import (
    Fp8Padding,
    Fp8Unpadding,
    GroupedLinear,
    LayerNorm,
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    RMSNorm,
)
from te_mx.pytorch.permutation import (
    moe_permute,
    moe_permute_and_pad_with_probs,
    moe_permute_with_probs,
    moe_sort_chunks_by_index,
    moe_sort_chunks_by_index_with_probs,
    moe_unpermute,
)
from te_mx.pytorch.quantization import (
    autocast,
    fp8_autocast,
    fp8_model_init,
    get_default_recipe,
    is_bf16_available,
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
    quantized_model_init,
)
from te_mx.pytorch.shim import install_shim, remove_shim
from te_mx.pytorch.transformer import TransformerLayer
from te_mx.pytorch.utils import get_device_compute_capability
from te_mx.recipe import QuantizerRole

__all__ = [
    "DotProductAttention", "Fp8Padding", "Fp8Unpadding", "GroupedLinear", "LayerNorm",
    "LayerNormLinear", "LayerNormMLP", "Linear", "MultiheadAttention", "QuantizerRole", "RMSNorm",
    "RotaryPositionEmbedding", "TransformerLayer", "apply_rotary_pos_emb", "autocast",
    "checkpoint", "fp8_autocast", "fp8_model_init", "get_default_recipe",
    "get_device_compute_capability", "install_shim", "is_bf16_available", "is_fp8_available",
    "is_fp8_block_scaling_available", "is_mxfp8_available", "is_nvfp4_available",
    "make_graphed_callables", "moe_permute", "moe_permute_and_pad_with_probs",
    "moe_permute_with_probs", "moe_sort_chunks_by_index", "moe_sort_chunks_by_index_with_probs",
    "moe_unpermute", "parallel_cross_entropy", "quantized_model_init", "remove_shim",
]  # fmt: skip

__getattr__ = reader(__name__)

"""Transformer Engine's names for PyTorch: ``import te_mx.pytorch as te`` in the place of
``import transformer_engine.pytorch as te``.

Modules are built as Transformer Engine builds them: its order of arguments, its parameter names
and initialization, on the GPU where there is one. docs/transformer_engine.md says what there is,
what is mapped to something else and what is refused.
"""

from typing import Any

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

_OPS = "te_mx has no sequences of fusible operations; te_mx.convert_model(fuse=True) fuses models"
_TENSORS = "quantized tensors are te_mx.MXTensor, made by te_mx.quantize"
_USERBUFFERS = "te_mx has no overlapped communication (userbuffers)"
_OFFLOAD = "torch.autograd.graph.save_on_cpu keeps what backward needs on the CPU"
_ABSENT = {
    "ops": _OPS,
    "optimizers": "optimizers of torch take te_mx's parameters as they are",
    "InferenceParams": "te_mx has no cache of keys and values",
    "initialize_ub": _USERBUFFERS,
    "destroy_ub": _USERBUFFERS,
    "UserBufferQuantizationMode": _USERBUFFERS,
    "CudaRNGStatesTracker": "weights and dropout are drawn from torch's generators",
    "get_cpu_offload_context": _OFFLOAD,
    "mark_not_offload": _OFFLOAD,
    "ManualOffloadSynchronizer": _OFFLOAD,
    "onnx_export": "te_mx has no operators of ONNX",
    **dict.fromkeys(
        ("QuantizedTensor", "QuantizedTensorStorage", "Quantizer", "Float8Quantizer",
         "Float8CurrentScalingQuantizer", "MXFP8Quantizer", "Float8BlockQuantizer",
         "NVFP4Quantizer", "Float8Tensor", "MXFP8Tensor", "Float8BlockwiseQTensor",
         "NVFP4Tensor"),
        _TENSORS,
    ),
}  # fmt: skip


def __getattr__(name: str) -> Any:
    reason = f": {_ABSENT[name]}" if name in _ABSENT else ""
    raise AttributeError(f"te_mx.pytorch has no {name}{reason}")

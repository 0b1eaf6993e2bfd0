"""Names of Transformer Engine that te_mx does not have, each with the reason: reading one in
te_mx.pytorch or a module of it raises AttributeError that says so. `from .. import name` raises
Python's ImportError, by which frameworks such as Megatron-LM find out what there is."""

from collections.abc import Callable
from typing import Any

_OPS = "te_mx has no sequences of fusible operations; te_mx.convert_model(fuse=True) fuses models"
_TENSORS = (
    "quantized tensors are te_mx.MXTensor, made by te_mx.quantize, and parameters stay in high "
    "precision"
)
_USERBUFFERS = "te_mx has no overlapped communication (userbuffers)"
_OFFLOAD = "torch.autograd.graph.save_on_cpu keeps what backward needs on the CPU"
_RANDOM = "weights and dropout are drawn from torch's generators"
_RECOMPUTED = "what torch.utils.checkpoint runs again knows the region of its first forward"
_COLLECTIVES = "layers of several ranks run their collectives themselves (docs/distributed.md)"
_CAPTURED = "block scales follow the data of every call: CUDA graphs need no preparation"
_EXTENSIONS = "te_mx's functions are te_mx.quantize, te_mx.gemm and te_mx.grouped_gemm"
_CLASSES = "te_mx's modules are in te_mx.pytorch itself, and have no class of this name above them"
_RANGES = "use torch.cuda.nvtx.range_push and range_pop"

_REASONS: dict[str, dict[str, str]] = {
    "te_mx.pytorch": {
        "ops": _OPS,
        "optimizers": "optimizers of torch take te_mx's parameters as they are",
        "InferenceParams": "te_mx has no cache of keys and values",
        "initialize_ub": _USERBUFFERS,
        "destroy_ub": _USERBUFFERS,
        "UserBufferQuantizationMode": _USERBUFFERS,
        "CudaRNGStatesTracker": _RANDOM,
        "get_cpu_offload_context": _OFFLOAD,
        "mark_not_offload": _OFFLOAD,
        "ManualOffloadSynchronizer": _OFFLOAD,
        "cpu_offload": _OFFLOAD,
        "cpu_offload_v1": _OFFLOAD,
        "onnx_export": "te_mx has no operators of ONNX",
        "ep": "te_mx does not send tokens between ranks; experts take those that a rank was sent",
        "router": "routers run in high precision, in torch's operations",
        "constants": "blocks are those of te_mx.formats.get(name).scaling",
        "cpp_extensions": _EXTENSIONS,
        **dict.fromkeys(
            ("tensor", "quantized_tensor", "float8_tensor", "QuantizedTensor",
             "QuantizedTensorStorage", "Quantizer", "Float8Quantizer",
             "Float8CurrentScalingQuantizer", "MXFP8Quantizer", "Float8BlockQuantizer",
             "NVFP4Quantizer", "Float8Tensor", "MXFP8Tensor", "Float8BlockwiseQTensor",
             "NVFP4Tensor"),
            _TENSORS,
        ),
    },
    "te_mx.pytorch.attention": {
        "_SplitAlongDim": "q, k and v are parts of a tensor, torch.split",
    },
    "te_mx.pytorch.attention.rope": {
        "apply_fused_qkv_rotary_pos_emb": "apply_rotary_pos_emb turns q and k one after the other",
    },
    "te_mx.pytorch.distributed": {
        "CudaRNGStatesTracker": _RANDOM,
        "get_all_rng_states": _RANDOM,
        "activation_recompute_forward": _RECOMPUTED,
        "in_fp8_activation_recompute_phase": _RECOMPUTED,
        "is_fp8_activation_recompute_enabled": _RECOMPUTED,
        "gather_along_first_dim": _COLLECTIVES,
        "reduce_scatter_along_first_dim": _COLLECTIVES,
        "_NVFP4AllGatherAsyncHandle": _COLLECTIVES,
    },
    "te_mx.pytorch.graph": dict.fromkeys(
        ("save_fp8_tensors", "restore_fp8_tensors", "set_capture_start", "set_capture_end"),
        _CAPTURED,
    ),
    "te_mx.pytorch.module": dict.fromkeys(
        ("base", "linear", "layernorm", "layernorm_linear", "_common"), _CLASSES
    ),
    "te_mx.pytorch.utils": {
        "make_weak_ref": "it is of Transformer Engine's own CUDA graphs",
        "nvtx_range_push": _RANGES,
        "nvtx_range_pop": _RANGES,
        "round_up_to_nearest_multiple": "sizes need not divide: te_mx pads nothing",
    },
}  # fmt: skip


def reader(module: str) -> Callable[[str], Any]:
    """The __getattr__ of a module."""
    reasons = _REASONS[module]

    def read(name: str) -> Any:
        reason = f": {reasons[name]}" if name in reasons else ""
        raise AttributeError(f"{module} has no {name}{reason}")

    return read

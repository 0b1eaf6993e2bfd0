"""te_mx.moe: mixtures of experts at inference, in the conventions of serving engines: rows sorted
by expert and cut into blocks, counts that only the device knows, weights quantized.

`fused_experts` is a whole mixture; `align_block_size` and `grouped_gemm` are its steps, with the
arguments that vLLM gives to its own. Gradients do not flow through them: te_mx.grouped_linear and
te_mx.GroupedLinear train."""

from te_mx.moe.alignment import AlignedBlocks, align_block_size, batched_align_block_size
from te_mx.moe.experts import ACTIVATIONS, fused_experts
from te_mx.moe.gemm import grouped_gemm
from te_mx.moe.packed import PackedExperts as PackedExperts
from te_mx.moe.packed import pack_experts

__all__ = [
    "ACTIVATIONS", "AlignedBlocks", "align_block_size",
    "batched_align_block_size", "fused_experts", "grouped_gemm", "pack_experts",
]  # fmt: skip

"""Ops on uint8 codes and scales: what modules, autograd functions and MXTensor are built from.

Each is a thin function over a torch.library op: it compiles, traces, works under modes; on plain
CPU and CUDA tensors it picks a kernel and runs it directly. Gradients do not flow through them."""

import te_mx.backends  # noqa: F401 (registers the kernels)
from te_mx._ops import made_of as _made_of  # noqa: F401 (compiled.follow)
from te_mx._ops.gemm import gemm_2d, kept_form, standing_form, worth_packing
from te_mx._ops.grouped_quantize import quantize_joined_2d
from te_mx._ops.quantize import (
    convert_2d,
    dequantize_2d,
    dequantize_joined_2d,
    quantize_2d,
    quantize_two_2d,
    quantized,
    restored_2d,
    rows_2d,
    rows_call,
)
from te_mx._ops.settled import for_any_rows, held_as, plain, settled
from te_mx.dispatch.calls import FLOAT_DTYPES, Epilogue, GemmParts, Mode, Quantize
from te_mx.dispatch.fused import Target
from te_mx.dispatch.operand_layouts import OperandLayouts, operand_layouts
from te_mx.layouts.operand import Operand, Quantized, Stack, turned
from te_mx.runtime.streams import Made, capturing

__all__ = [
    "FLOAT_DTYPES", "Epilogue", "GemmParts", "Made", "Mode", "Operand", "OperandLayouts",
    "Quantize", "Quantized", "Stack", "Target", "capturing", "convert_2d", "dequantize_2d",
    "dequantize_joined_2d", "for_any_rows", "gemm_2d", "held_as", "kept_form", "operand_layouts",
    "plain", "quantize_2d", "quantize_joined_2d", "quantize_two_2d", "quantized", "restored_2d",
    "rows_2d", "rows_call", "settled", "standing_form", "turned", "worth_packing",
]  # fmt: skip

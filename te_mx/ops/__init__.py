"""Ops on uint8 codes and scales: what modules, autograd functions and MXTensor are built from.

Each is a thin function over a torch.library op of the same name without "_2d", so it compiles,
traces and works under modes; on plain CPU and CUDA tensors the function calls the implementation
directly. Gradients do not flow through them.
"""

from te_mx.backends.base import (
    FLOAT_DTYPES,
    PLAIN,
    GemmParts,
    Operand,
    Quantize,
    QuantizedParts,
)
from te_mx.engine.layout import GemmForm, gemm_form
from te_mx.engine.streams import Made, capturing
from te_mx.ops.dequantize import dequantize_2d
from te_mx.ops.gemm import Mode, gemm_2d
from te_mx.ops.pack import pack_2d, standing_2d
from te_mx.ops.quantize import quantize_2d, quantize_two_2d

__all__ = [
    "FLOAT_DTYPES",
    "PLAIN",
    "GemmForm",
    "GemmParts",
    "Made",
    "Mode",
    "Operand",
    "Quantize",
    "QuantizedParts",
    "capturing",
    "dequantize_2d",
    "gemm_2d",
    "gemm_form",
    "pack_2d",
    "quantize_2d",
    "quantize_two_2d",
    "standing_2d",
]

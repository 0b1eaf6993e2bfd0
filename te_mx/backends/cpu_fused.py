"""Native CPU code of the fused steps: a thin layer over te_mx._native, as backends/cpu.py.

Columnwise codes come in the plain form only, and nothing is packed here: that is what CPUs ask for.
"""

from __future__ import annotations

import torch
from torch import Tensor

from te_mx.backends import cpu, cpu_memory
from te_mx.backends.base import (
    FLOAT_DTYPES,
    FORMATS,
    SCALE_RULES,
    QuantizedParts,
    pointer,
    typed_address,
)
from te_mx.backends.cpu_memory import CPU
from te_mx.backends.fused import ACT_IDS, Activation, ActParts, Norm, NormParts, Wanted
from te_mx.backends.reference_fused import inverse

_U8, _F32 = torch.uint8, torch.float32


def takes(wanted: Wanted) -> bool:
    """Whether the native code makes what is wanted."""
    return wanted.spread < 0 and wanted.columnwise != "transposed"


def _rows(x: Tensor) -> Tensor:
    """x with adjacent elements in each row."""
    return x if x.stride(1) == 1 else x.contiguous()


class _Out:
    """Room for a quantized matrix [rows, cols], and the native tuple of its addresses."""

    __slots__ = ("native", "partial", "parts")

    def __init__(self, rows: int, cols: int, wanted: Wanted) -> None:
        row_codes = row_scales = col_codes = col_scales = sums = self.partial = None
        if wanted.rowwise:
            row_codes = cpu_memory.empty((rows, cols), _U8)
            row_scales = torch.empty((rows, (cols + 31) // 32), dtype=_U8, device=CPU)
        if wanted.columnwise is not None:
            col_codes = cpu_memory.empty((rows, cols), _U8)
            col_scales = torch.empty(((rows + 31) // 32, cols), dtype=_U8, device=CPU)
        if wanted.col_sum:
            sums = torch.empty(cols, dtype=_F32, device=CPU)
            partial_rows = -(-rows // cpu.native().COL_SUM_ROWS)  # type: ignore[union-attr]
            self.partial = torch.empty((partial_rows, cols), dtype=_F32, device=CPU)
        self.parts = QuantizedParts(row_codes, row_scales, col_codes, col_scales, sums)
        self.native = (
            FORMATS[wanted.fmt].native_id, SCALE_RULES[wanted.scale_rule],
            *(pointer(part) for part in self.parts), pointer(self.partial),
        )  # fmt: skip


def _x(x: Tensor) -> tuple[int, int, int, int, int]:
    rows, cols = x.shape
    return x.data_ptr(), rows, cols, x.stride(0), FLOAT_DTYPES[x.dtype]


def normalize(
    x: Tensor, weight: Tensor, bias: Tensor | None, norm: Norm, dtype: torch.dtype, want_z: bool,
    wanted: Wanted,
) -> NormParts:  # fmt: skip
    """As ops.norm_quantize_2d on a non-empty x; weight and bias are fp32."""
    native = cpu.native()
    assert native is not None
    x, weight = _rows(x), weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    rows, cols = x.shape
    rms = norm.kind == "RMSNorm"
    mean = None if rms else torch.empty(rows, dtype=_F32, device=CPU)
    rstd = torch.empty(rows, dtype=_F32, device=CPU)
    z = cpu_memory.empty((rows, cols), dtype) if want_z else None
    out = _Out(rows, cols, wanted)
    status = native.normalize(
        _x(x), rms, norm.eps, inverse(cols), (pointer(weight), pointer(bias)),
        (pointer(mean), pointer(rstd)), (pointer(z), FLOAT_DTYPES[dtype]), out.native,
        torch.get_num_threads(),
    )  # fmt: skip
    cpu.supported(status)
    return NormParts(mean, rstd, z, out.parts)


def normalize_backward(
    dz: Tensor, x: Tensor, weight: Tensor, mean: Tensor | None, rstd: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """As reference_fused.normalize_backward on a non-empty x; weight is fp32."""
    native = cpu.native()
    assert native is not None
    dz, x, weight = dz.contiguous(), _rows(x), weight.contiguous()
    mean, rstd = None if mean is None else mean.contiguous(), rstd.contiguous()
    rows, cols = x.shape
    dx = cpu_memory.empty((rows, cols), dtype)
    dweight = torch.empty(cols, dtype=_F32, device=CPU)
    dbias = torch.empty(cols, dtype=_F32, device=CPU)
    partial = torch.empty(2, -(-rows // native.COL_SUM_ROWS), cols, dtype=_F32, device=CPU)
    status = native.normalize_backward(
        typed_address(dz), _x(x), mean is None, inverse(cols), pointer(weight),
        (pointer(mean), pointer(rstd)), typed_address(dx),
        (pointer(dweight), pointer(dbias), pointer(partial)), torch.get_num_threads(),
    )  # fmt: skip
    cpu.supported(status)
    return dx, dweight, dbias


def activate(
    h: Tensor, grad: Tensor | None, act: Activation, dtype: torch.dtype, want_out: bool,
    wanted: Wanted,
) -> ActParts | None:  # fmt: skip
    """As ops.act_quantize_2d (grad None) and ops.dact_quantize_2d on a non-empty h; None for what
    the native code does not take."""
    native = cpu.native()
    assert native is not None
    h = h.contiguous()
    grad = None if grad is None else grad.contiguous()
    rows, width = h.shape
    cols = width // 2 if act.gated else width
    made = cols if grad is None else width
    out = cpu_memory.empty((rows, made), dtype) if want_out else None
    quantized = _Out(rows, made, wanted)
    status = native.activate(
        (*typed_address(h), rows, cols), typed_address(grad),
        (ACT_IDS[act.base], act.gated, act.limit, act.alpha, act.offset),
        (pointer(out), FLOAT_DTYPES[dtype]), quantized.native, torch.get_num_threads(),
    )  # fmt: skip
    return ActParts(out, quantized.parts) if cpu.supported(status) else None

"""Native CPU code of the fused steps: a thin layer over te_mx._native, as binding.py.

Columnwise codes come in the plain form only, and nothing is packed here: that is what CPUs ask for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_mx.backends.base import (
    FLOAT_DTYPES,
    FORMATS,
    LAYOUTS,
    SCALE_RULES,
    NativeAct,
    NativeNorm,
    QuantizedParts,
    code_bytes,
    pointer,
)
from te_mx.backends.cpu import binding as cpu
from te_mx.backends.native import NativeTarget as Wanted
from te_mx.backends.reference.fused_math import inverse
from te_mx.dispatch.fused import ACT_IDS, Activation, Norm
from te_mx.runtime import cpu_memory
from te_mx.runtime.cpu_memory import CPU

_U8, _F32 = torch.uint8, torch.float32


def takes(wanted: Wanted) -> bool:
    """Whether the native code makes what is wanted."""
    return wanted.spread < 0 and wanted.columnwise != "transposed"


def _rows(x: Tensor) -> Tensor:
    """x with adjacent elements in each row."""
    return x if x.stride(1) == 1 else x.contiguous()


class _Out:
    """Room for a quantized matrix [rows, cols]."""

    __slots__ = ("partial", "parts")

    def __init__(self, rows: int, cols: int, wanted: Wanted) -> None:
        row_codes = row_scales = col_codes = col_scales = sums = self.partial = None
        if wanted.rowwise:
            row_codes = cpu_memory.empty((rows, code_bytes(wanted.fmt, cols)), _U8)
            row_scales = torch.empty((rows, (cols + 31) // 32), dtype=_U8, device=CPU)
        if wanted.columnwise is not None:
            col_codes = cpu_memory.empty((rows, cols), _U8)
            col_scales = torch.empty(((rows + 31) // 32, cols), dtype=_U8, device=CPU)
        if wanted.col_sum:
            sums = torch.empty(cols, dtype=_F32, device=CPU)
            partial_rows = -(-rows // cpu.native().COL_SUM_ROWS)  # type: ignore[union-attr]
            self.partial = torch.empty((partial_rows, cols), dtype=_F32, device=CPU)
        self.parts = QuantizedParts(row_codes, row_scales, col_codes, col_scales, sums)

    def set_in(self, args: Any, wanted: Wanted) -> None:
        """Write addresses and format into a native record."""
        args.element = FORMATS[wanted.fmt]
        args.rule = SCALE_RULES[wanted.scale_rule]
        args.row_codes, args.row_scales = pointer(self.parts[0]), pointer(self.parts[1])
        args.col_codes, args.col_scales = pointer(self.parts[2]), pointer(self.parts[3])
        args.col_layout = LAYOUTS["k_first"]
        args.col_sum, args.col_sum_ws = pointer(self.parts[4]), pointer(self.partial)


def _matrix(native: Any, x: Tensor) -> Any:
    rows, cols = x.shape
    return native.Matrix(
        data=x.data_ptr(), rows=rows, cols=cols, row_stride=x.stride(0),
        dtype=FLOAT_DTYPES[x.dtype],
    )  # fmt: skip


def normalize(
    x: Tensor, weight: Tensor, bias: Tensor | None, norm: Norm, dtype: torch.dtype, want_z: bool,
    wanted: Wanted,
) -> NativeNorm:  # fmt: skip
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
    args = native.NormArgs(
        x=_matrix(native, x), rms=rms, eps=norm.eps, inverse=inverse(cols),
        weight=weight.data_ptr(), bias=pointer(bias), mean=pointer(mean), rstd=rstd.data_ptr(),
        z=pointer(z), z_dtype=FLOAT_DTYPES[dtype],
    )  # fmt: skip
    out.set_in(args, wanted)
    args.threads = torch.get_num_threads()
    status = native.normalize(args)
    cpu.supported(status)
    return NativeNorm(mean, rstd, z, out.parts)


def normalize_backward(
    dz: Tensor, x: Tensor, weight: Tensor, mean: Tensor | None, rstd: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """As fused_math.normalize_backward of the reference on a non-empty x; weight is fp32."""
    native = cpu.native()
    assert native is not None
    dz, x, weight = dz.contiguous(), _rows(x), weight.contiguous()
    mean, rstd = None if mean is None else mean.contiguous(), rstd.contiguous()
    rows, cols = x.shape
    dx = cpu_memory.empty((rows, cols), dtype)
    dweight = torch.empty(cols, dtype=_F32, device=CPU)
    dbias = torch.empty(cols, dtype=_F32, device=CPU)
    partial = torch.empty(2, -(-rows // native.COL_SUM_ROWS), cols, dtype=_F32, device=CPU)
    args = native.NormGradArgs(
        dz=_matrix(native, dz), x=_matrix(native, x), rms=mean is None, inverse=inverse(cols),
        weight=weight.data_ptr(), mean=pointer(mean), rstd=rstd.data_ptr(), dx=dx.data_ptr(),
        dx_dtype=FLOAT_DTYPES[dtype], dweight=dweight.data_ptr(), dbias=dbias.data_ptr(),
        partial=partial.data_ptr(), threads=torch.get_num_threads(),
    )  # fmt: skip
    status = native.normalize_backward(args)
    cpu.supported(status)
    return dx, dweight, dbias


def activate(
    h: Tensor, grad: Tensor | None, act: Activation, dtype: torch.dtype, want_out: bool,
    wanted: Wanted,
) -> NativeAct | None:  # fmt: skip
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
    args = native.ActArgs(
        h=_matrix(native, h), act=ACT_IDS[act.base], gated=act.gated, limit=act.limit,
        alpha=act.alpha, offset=act.offset, out=pointer(out), out_dtype=FLOAT_DTYPES[dtype],
    )  # fmt: skip
    if grad is not None:
        args.grad = _matrix(native, grad)
    quantized.set_in(args, wanted)
    args.threads = torch.get_num_threads()
    status = native.activate(args)
    return NativeAct(out, quantized.parts) if cpu.supported(status) else None

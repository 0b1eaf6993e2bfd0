"""The fused steps on each kind of device: native code where it takes them, else one step after the
other."""

from __future__ import annotations

import torch
from torch import Tensor

from te_mx.backends import cpu, cpu_fused, reference_fused, sm90, sm90_fused
from te_mx.backends.base import FLOAT_DTYPES, QuantizedParts
from te_mx.backends.fused import Activation, ActParts, Norm, NormParts, Wanted
from te_mx.engine.explain import warn_fallback
from te_mx.ops.quantize import quantize_2d

_F32 = torch.float32
_NO_CODES = Wanted("e4m3", False, None, "rceil")


def _native(x: Tensor, what: str, problem: str | None, *dtypes: torch.dtype) -> bool:
    """Whether native code, which has a `problem` or not, does a step on x; warns if it cannot."""
    if x.numel() == 0 or any(dtype not in FLOAT_DTYPES for dtype in (x.dtype, *dtypes)):
        return False
    if problem is not None:
        warn_fallback(f"{what} on {'the CPU' if x.is_cpu else x.device}", problem)
    return problem is None


def _cpu_problem() -> str | None:
    return None if cpu.native() is not None else cpu.missing_reason() or ""


def quantized(values: Tensor, wanted: Wanted) -> QuantizedParts:
    """Quantize [rows, cols] as wanted, in one read."""
    if not (wanted.rowwise or wanted.columnwise):
        sums = values.sum(0, dtype=_F32) if wanted.col_sum else None
        return QuantizedParts(None, None, None, None, sums)
    return quantize_2d(
        values, wanted.fmt, rowwise=wanted.rowwise, columnwise=wanted.columnwise,
        scale_rule=wanted.scale_rule, col_sum=wanted.col_sum, spread=wanted.spread,
    )  # fmt: skip


def norm_composed(
    x: Tensor, weight: Tensor, bias: Tensor | None, norm: Norm, dtype: torch.dtype, want_z: bool,
    wanted: Wanted,
) -> NormParts:  # fmt: skip
    """One step after the other, on any device."""
    mean, rstd, z = reference_fused.normalize(x, weight, bias, norm, dtype)
    return NormParts(mean, rstd, z if want_z else None, quantized(z, wanted))


def norm_on_cpu(
    x: Tensor, weight: Tensor, bias: Tensor | None, norm: Norm, dtype: torch.dtype, want_z: bool,
    wanted: Wanted,
) -> NormParts:  # fmt: skip
    if not _native(x, "normalization", _cpu_problem(), dtype):
        return norm_composed(x, weight, bias, norm, dtype, want_z, wanted)
    if cpu_fused.takes(wanted) and not wanted.col_sum:
        return cpu_fused.normalize(x, weight, bias, norm, dtype, want_z, wanted)
    made = cpu_fused.normalize(x, weight, bias, norm, dtype, True, _NO_CODES)
    assert made.z is not None
    return made._replace(z=made.z if want_z else None, quantized=quantized(made.z, wanted))


def norm_on_cuda(
    x: Tensor, weight: Tensor, bias: Tensor | None, norm: Norm, dtype: torch.dtype, want_z: bool,
    wanted: Wanted,
) -> NormParts:  # fmt: skip
    made, problem = None, sm90.problem(x.device.index)
    if _native(x, "normalization", problem, dtype) and not wanted.col_sum:
        made = sm90_fused.normalize(x, weight, bias, norm, dtype, want_z, wanted)
    return made or norm_composed(x, weight, bias, norm, dtype, want_z, wanted)


def norm_backward_composed(
    dz: Tensor, x: Tensor, weight: Tensor, mean: Tensor | None, rstd: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    return reference_fused.normalize_backward(dz, x, weight, mean, rstd, dtype)


def norm_backward_on_cpu(
    dz: Tensor, x: Tensor, weight: Tensor, mean: Tensor | None, rstd: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    if not _native(x, "normalization", _cpu_problem(), dz.dtype, dtype):
        return norm_backward_composed(dz, x, weight, mean, rstd, dtype)
    return cpu_fused.normalize_backward(dz, x, weight, mean, rstd, dtype)


def norm_backward_on_cuda(
    dz: Tensor, x: Tensor, weight: Tensor, mean: Tensor | None, rstd: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    made, problem = None, sm90.problem(x.device.index)
    if _native(x, "normalization", problem, dz.dtype, dtype):
        made = sm90_fused.normalize_backward(dz, x, weight, mean, rstd, dtype)
    return made or norm_backward_composed(dz, x, weight, mean, rstd, dtype)


def act_composed(
    h: Tensor, grad: Tensor | None, act: Activation, dtype: torch.dtype, want_out: bool,
    wanted: Wanted,
) -> ActParts:  # fmt: skip
    """One step after the other, on any device."""
    if grad is None:
        out = reference_fused.activate(h, act, dtype)
    else:
        out = reference_fused.activate_backward(grad, h, act, dtype)
    return ActParts(out if want_out else None, quantized(out, wanted))


def act_on_cpu(
    h: Tensor, grad: Tensor | None, act: Activation, dtype: torch.dtype, want_out: bool,
    wanted: Wanted,
) -> ActParts:  # fmt: skip
    dtypes = (dtype,) if grad is None else (dtype, grad.dtype)
    if not _native(h, "activation", _cpu_problem(), *dtypes):
        return act_composed(h, grad, act, dtype, want_out, wanted)
    if cpu_fused.takes(wanted):
        made = cpu_fused.activate(h, grad, act, dtype, want_out, wanted)
        if made is not None:
            return made
    # Blocks that straddle the halves of a gated gradient, or packed codes.
    made = cpu_fused.activate(h, grad, act, dtype, True, _NO_CODES)
    assert made is not None and made.out is not None
    return ActParts(made.out if want_out else None, quantized(made.out, wanted))


def act_on_cuda(
    h: Tensor, grad: Tensor | None, act: Activation, dtype: torch.dtype, want_out: bool,
    wanted: Wanted,
) -> ActParts:  # fmt: skip
    dtypes = (dtype,) if grad is None else (dtype, grad.dtype)
    if not _native(h, "activation", sm90.problem(h.device.index), *dtypes):
        return act_composed(h, grad, act, dtype, want_out, wanted)
    if sm90_fused.takes(h, grad, dtype):
        made = sm90_fused.activate(h, grad, act, dtype, want_out, wanted)
        return made or act_composed(h, grad, act, dtype, want_out, wanted)
    # The value in fp32, rounded, quantized.
    whole = None if grad is None else grad.to(_F32)
    made = sm90_fused.activate(h.to(_F32), whole, act, _F32, True, _NO_CODES)
    if made is None or made.out is None:
        return act_composed(h, grad, act, dtype, want_out, wanted)
    out = made.out.to(dtype)
    return ActParts(out if want_out else None, quantized(out, wanted))

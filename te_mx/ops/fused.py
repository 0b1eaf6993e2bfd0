"""te_mx::norm_quantize, norm_backward and act_quantize: steps that end in a quantizer, in one read
of what they start from.

A step's value is computed in fp32, rounded to a dtype and quantized. The bytes are those of the
same steps one after the other (backends/reference_fused.py, then ops.quantize_2d), which is what
runs on devices without a kernel of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from te_mx.backends import sm90
from te_mx.backends.base import QuantizedParts, quantized_shapes
from te_mx.backends.fused import Activation, ActParts, Norm, NormParts, Wanted
from te_mx.ops import checks
from te_mx.ops.fused_run import (
    act_composed,
    act_on_cpu,
    act_on_cuda,
    norm_backward_composed,
    norm_backward_on_cpu,
    norm_backward_on_cuda,
    norm_composed,
    norm_on_cpu,
    norm_on_cuda,
)
from te_mx.ops.library import define, is_direct

_F32 = torch.float32


# ------------------------------------------------------------------------------------ public calls
def norm_quantize_2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: Norm,
    dtype: torch.dtype,
    *,
    want_z: bool,
    wanted: Wanted,
) -> NormParts:
    """Normalize x [rows, cols] over its columns and quantize the result z.

    z = (x - mean) * rstd * weight + bias, rounded to dtype; RMSNorm has neither mean nor bias.

    Args:
        x: fp32, bf16 or fp16, any strides.
        weight, bias: fp32 [cols]. For zero-centered weights pass 1 + weight.
        norm: which, and its eps.
        dtype: of z.
        want_z: also return z.
        wanted: what z is quantized to.
    """
    if is_direct(x, weight, bias):
        checks.norm_step(x, weight, bias, norm, dtype, wanted)
        run = norm_on_cpu if x.is_cpu else norm_on_cuda
        return run(x, weight, bias, norm, dtype, want_z, wanted)
    mean, rstd, z, *parts = _NORM(x, weight, bias, *norm, dtype, want_z, *_flat(wanted))
    return NormParts(
        None if norm.kind == "RMSNorm" else mean, rstd, z if want_z else None,
        _parts(parts, wanted),
    )  # fmt: skip


def norm_backward_2d(
    dz: Tensor,
    x: Tensor,
    weight: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """dx [rows, cols] in dtype, and dweight and dbias [cols] in fp32; see
    reference_fused.normalize_backward for the formulas."""
    if is_direct(dz, x, weight, mean, rstd):
        checks.norm_gradient(dz, x, weight, mean, rstd, dtype)
        run = norm_backward_on_cpu if dz.is_cpu else norm_backward_on_cuda
        return run(dz, x, weight, mean, rstd, dtype)
    return _NORM_BACKWARD(dz, x, weight, mean, rstd, dtype)


def act_quantize_2d(
    h: Tensor, act: Activation, dtype: torch.dtype, *, want_out: bool, wanted: Wanted
) -> ActParts:
    """Activate h [rows, cols], or [rows, 2 cols] for a gated activation, and quantize the result
    [rows, cols], which is rounded to dtype first."""
    return _activation(h, None, act, dtype, want_out, wanted)


def dact_quantize_2d(
    grad: Tensor, h: Tensor, act: Activation, dtype: torch.dtype, *, want_out: bool, wanted: Wanted
) -> ActParts:
    """The gradient of h from that of the activated values [rows, cols], rounded to dtype and
    quantized; `wanted.col_sum` adds its sums over the rows, for a bias gradient."""
    return _activation(h, grad, act, dtype, want_out, wanted)


def _activation(
    h: Tensor, grad: Tensor | None, act: Activation, dtype: torch.dtype, want_out: bool,
    wanted: Wanted,
) -> ActParts:  # fmt: skip
    if is_direct(h, grad):
        checks.act_step(h, grad, act, dtype, wanted)
        run = act_on_cpu if h.is_cpu else act_on_cuda
        return run(h, grad, act, dtype, want_out, wanted)
    out, *parts = _ACT(h, grad, *act, dtype, want_out, *_flat(wanted))
    return ActParts(out if want_out else None, _parts(parts, wanted))


# ---------------------------------------------------------------------------------------------- ops
_WANTED = "str fmt, bool rowwise, str columnwise, str scale_rule, int spread, bool col_sum"


def _flat(wanted: Wanted) -> tuple[Any, ...]:
    return wanted._replace(columnwise=wanted.columnwise or "")


def _wanted(flat: tuple[Any, ...]) -> Wanted:
    wanted = Wanted(*flat)
    return wanted._replace(columnwise=wanted.columnwise or None)


def _parts(parts: list[Tensor], wanted: Wanted) -> QuantizedParts:
    rest = iter(parts)
    asked = (wanted.rowwise,) * 2 + (bool(wanted.columnwise),) * 2 + (wanted.col_sum,)
    return QuantizedParts(*(next(rest) if part else None for part in asked))


def _listed(x: Tensor, first: tuple[Tensor | None, ...], parts: QuantizedParts) -> list[Tensor]:
    """What an op returns: its first results, empty where there is none, then the parts that
    exist."""
    head = [x.new_empty(0) if tensor is None else tensor for tensor in first]
    return head + [part for part in parts if part is not None]


def _fake_parts(x: Tensor, rows: Any, cols: Any, wanted: Wanted) -> QuantizedParts:
    parts: list[Tensor] = []
    if wanted.spread < 0:
        shapes = quantized_shapes(rows, cols, wanted.rowwise, wanted.columnwise)
        parts += [x.new_empty(shape, dtype=torch.uint8) for shape in shapes]
    else:
        for asked, shape in ((wanted.rowwise, (rows, cols)), (wanted.columnwise, (cols, rows))):
            if asked:
                parts += sm90.empty_operand(*shape, x.device)
    if wanted.col_sum:
        parts.append(x.new_empty(cols, dtype=_F32))
    return _parts(parts, wanted)


def _norm_op(run: Callable[..., NormParts]) -> Callable[..., list[Tensor]]:
    def op(
        x: Tensor, weight: Tensor, bias: Tensor | None, kind: str, eps: float, dtype: torch.dtype,
        want_z: bool, *flat: Any,
    ) -> list[Tensor]:  # fmt: skip
        norm, wanted = Norm(kind, eps), _wanted(flat)
        checks.norm_step(x, weight, bias, norm, dtype, wanted)
        made = run(x, weight, bias, norm, dtype, want_z, wanted)
        return _listed(x, made[:3], made.quantized)

    return op


def _norm_fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, norm: Norm, dtype: torch.dtype, want_z: bool,
    wanted: Wanted,
) -> NormParts:  # fmt: skip
    rows, cols = x.shape
    mean = None if norm.kind == "RMSNorm" else x.new_empty(rows, dtype=_F32)
    z = x.new_empty((rows, cols), dtype=dtype) if want_z else None
    return NormParts(mean, x.new_empty(rows, dtype=_F32), z, _fake_parts(x, rows, cols, wanted))


def _norm_backward_op(
    run: Callable[..., tuple[Tensor, Tensor, Tensor]],
) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    def op(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        checks.norm_gradient(*args)
        return run(*args)

    return op


def _norm_backward_fake(
    dz: Tensor, x: Tensor, weight: Tensor, mean: Tensor | None, rstd: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    sums = [x.new_empty(x.shape[1], dtype=_F32) for _ in range(2)]
    return x.new_empty(x.shape, dtype=dtype), sums[0], sums[1]


def _act_op(run: Callable[..., ActParts]) -> Callable[..., list[Tensor]]:
    def op(
        h: Tensor, grad: Tensor | None, name: str, limit: float, alpha: float, offset: float,
        dtype: torch.dtype, want_out: bool, *flat: Any,
    ) -> list[Tensor]:  # fmt: skip
        act, wanted = Activation(name, limit, alpha, offset), _wanted(flat)
        checks.act_step(h, grad, act, dtype, wanted)
        made = run(h, grad, act, dtype, want_out, wanted)
        return _listed(h, (made.out,), made.quantized)

    return op


def _act_fake(
    h: Tensor, grad: Tensor | None, act: Activation, dtype: torch.dtype, want_out: bool,
    wanted: Wanted,
) -> ActParts:  # fmt: skip
    rows, cols = h.shape
    if grad is None and act.gated:
        cols = cols // 2
    out = h.new_empty((rows, cols), dtype=dtype) if want_out else None
    return ActParts(out, _fake_parts(h, rows, cols, wanted))


_NORM = define(
    "norm_quantize(Tensor x, Tensor weight, Tensor? bias, str kind, float eps, ScalarType dtype, "
    f"bool want_z, {_WANTED}) -> Tensor[]",
    cpu=_norm_op(norm_on_cpu),
    cuda=_norm_op(norm_on_cuda),
    other=_norm_op(norm_composed),
    fake=_norm_op(_norm_fake),
)
_NORM_BACKWARD = define(
    "norm_backward(Tensor dz, Tensor x, Tensor weight, Tensor? mean, Tensor rstd, "
    "ScalarType dtype) -> (Tensor, Tensor, Tensor)",
    cpu=_norm_backward_op(norm_backward_on_cpu),
    cuda=_norm_backward_op(norm_backward_on_cuda),
    other=_norm_backward_op(norm_backward_composed),
    fake=_norm_backward_op(_norm_backward_fake),
)
_ACT = define(
    "act_quantize(Tensor h, Tensor? grad, str name, float limit, float alpha, float offset, "
    f"ScalarType dtype, bool want_out, {_WANTED}) -> Tensor[]",
    cpu=_act_op(act_on_cpu),
    cuda=_act_op(act_on_cuda),
    other=_act_op(act_composed),
    fake=_act_op(_act_fake),
)

"""te_mx::norm_quantize, norm_backward and act_quantize: steps that end in a quantizer, in one read
of what they start from.

A step's value is computed in fp32, rounded to a dtype and quantized. The bytes are those of the
same steps one by one, backends/reference/fused.py, for devices without a kernel."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from te_mx._ops import checks
from te_mx._ops.library import define, is_direct
from te_mx._ops.quantize import empty_parts, parts_of, quantized_of
from te_mx.dispatch import run
from te_mx.dispatch.calls import FLOAT_DTYPES
from te_mx.dispatch.fused import (
    Activation,
    ActParts,
    ActStep,
    Norm,
    NormParts,
    NormRows,
    NormStep,
    Target,
)
from te_mx.dispatch.kernels import derived
from te_mx.dispatch.problem import Problem, place_of
from te_mx.dispatch.registry import find
from te_mx.layouts.operand import Quantized

_F32 = torch.float32


# ------------------------------------------------------------------------------------ public calls
def norm_quantize_2d(step: NormStep) -> NormParts:
    """Normalize x [rows, cols] over its columns and quantize the result z.

    z = (x - mean) * rstd * weight + bias, rounded to dtype; RMSNorm has neither mean nor bias. For
    zero-centered weights pass 1 + weight."""
    x, weight, bias, norm, dtype, keep, target = step
    if is_direct(x, weight, bias, target.seed):
        return _run_norm(step)
    mean, rstd, z, *parts = NORM(x, weight, bias, *norm, dtype, keep, *target)
    return NormParts(
        None if norm.kind == "RMSNorm" else mean, rstd, z if keep else None,
        _read(parts, target, x.shape),
    )  # fmt: skip


def _run_norm(step: NormStep) -> NormParts:
    checks.norm_step(step)
    x, target = step.x, step.target
    return _run("norm_quantize", x, target, (x.dtype, step.dtype), step)


def _run(op: str, x: Tensor, target: Target, dtypes: tuple[torch.dtype, ...], *call: Any) -> Any:
    dtype = dtypes[0]
    for one in dtypes:
        if one not in FLOAT_DTYPES:
            dtype = one  # of which kernels say that they do not take it
    return run.run_on(op, x, target.row, target.col, dtype, target.rule, *call)


_NO_CODES = Target("", "", "rceil")


def norm_backward_2d(
    dz: Tensor, x: Tensor, weight: Tensor, mean: Tensor | None, rstd: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """dx [rows, cols] in dtype, and dweight and dbias [cols] in fp32; see
    normalize_backward of reference/fused.py for the formulas."""
    if is_direct(dz, x, weight, mean, rstd):
        return _norm_backward(dz, x, weight, mean, rstd, dtype)
    return _NORM_BACKWARD(dz, x, weight, mean, rstd, dtype)


def act_quantize_2d(step: ActStep) -> ActParts:
    """Activate h [rows, cols], or [rows, 2 cols] for a gated activation, and quantize the result
    [rows, cols]; with grad [rows, cols], quantize the gradient of h. `target.col_sum` adds the sums
    over the rows, for a bias gradient."""
    h, grad, act, dtype, keep, target = step
    if is_direct(h, grad, target.seed):
        return _run_act(step)
    out, *parts = _ACT(h, grad, *act, dtype, keep, *target)
    return ActParts(out if keep else None, _read(parts, target, made_shape(step)))


def _run_act(step: ActStep) -> ActParts:
    checks.act_step(step)
    dtypes = (step.h.dtype, step.dtype) + (() if step.grad is None else (step.grad.dtype,))
    return _run("act_quantize", step.h, step.target, dtypes, step)


def made_shape(step: ActStep) -> tuple[int, int]:
    """The shape of what a step makes."""
    rows, cols = step.h.shape
    return rows, cols // 2 if step.act.gated and step.grad is None else cols


def norm_rows(step: NormRows) -> Tensor | None:
    """z [rows, cols], the bits of norm_quantize_2d; None where no kernel does it alone, or where
    its arguments do not belong together, which the usual way says."""
    x, weight, bias, _, _, dtype = step
    if not is_direct(x, weight, bias) or not x.shape[0]:
        return None
    for vector in (weight, bias):
        if vector is not None and (
            vector.shape != x.shape[1:] or vector.device != x.device or vector.dtype != weight.dtype
        ):
            return None
    known, key = derived(), ("norm_rows", x.device, x.shape, x.dtype, weight.dtype, dtype)
    if key not in known:
        rows, cols = x.shape
        known[key] = [
            find(Problem("norm_rows", place_of(x.device), "", "", rows, cols, dtype=one))
            for one in (x.dtype, weight.dtype, dtype)
        ]
    kernels = known[key]
    return None if any(one is None for one in kernels) else kernels[0].run(step)


# ---------------------------------------------------------------------------------------------- ops
def _read(parts: list[Tensor], target: Target, shape: Sequence[int]) -> Quantized:
    return quantized_of(parts, target.row, target.col, target.col_sum, shape)


def _listed(x: Tensor, first: tuple[Tensor | None, ...], parts: list[Tensor]) -> list[Tensor]:
    """What an op returns: its first results, empty where there is none, then the parts."""
    return [x.new_empty(0) if tensor is None else tensor for tensor in first] + parts


def _fake_parts(x: Tensor, shape: Sequence[int], target: Target) -> list[Tensor]:
    return empty_parts(x, target.row, target.col, shape, _F32 if target.col_sum else None)


def _norm_step(args: tuple[Any, ...]) -> NormStep:
    x, weight, bias, kind, eps, dtype, keep, *target = args
    return NormStep(x, weight, bias, Norm(kind, eps), dtype, keep, Target(*target))


def _norm(*args: Any) -> list[Tensor]:
    made = _run_norm(_norm_step(args))
    return _listed(args[0], made[:3], parts_of(made.quantized))


def _norm_fake(*args: Any) -> list[Tensor]:
    step = _norm_step(args)
    checks.norm_step(step)
    x, _, _, norm, dtype, keep, target = step
    mean = None if norm.kind == "RMSNorm" else x.new_empty(x.shape[0], dtype=_F32)
    z = x.new_empty(x.shape, dtype=dtype) if keep else None
    first = mean, x.new_empty(x.shape[0], dtype=_F32), z
    return _listed(x, first, _fake_parts(x, x.shape, target))


def _norm_backward(
    dz: Tensor, x: Tensor, weight: Tensor, mean: Tensor | None, rstd: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    checks.norm_gradient(dz, x, weight, mean, rstd, dtype)
    call = dz, x, weight, mean, rstd, dtype
    return _run("norm_backward", x, _NO_CODES, (x.dtype, dz.dtype, dtype), *call)


def _norm_backward_fake(
    dz: Tensor, x: Tensor, weight: Tensor, mean: Tensor | None, rstd: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    checks.norm_gradient(dz, x, weight, mean, rstd, dtype)
    sums = [x.new_empty(x.shape[1], dtype=_F32) for _ in range(2)]
    return x.new_empty(x.shape, dtype=dtype), sums[0], sums[1]


def _act_step(args: tuple[Any, ...]) -> ActStep:
    h, grad, name, limit, alpha, offset, dtype, keep, *target = args
    act = Activation(name, limit, alpha, offset)
    return ActStep(h, grad, act, dtype, keep, Target(*target))


def _act(*args: Any) -> list[Tensor]:
    made = _run_act(_act_step(args))
    return _listed(args[0], (made.out,), parts_of(made.quantized))


def _act_fake(*args: Any) -> list[Tensor]:
    step = _act_step(args)
    checks.act_step(step)
    shape = made_shape(step)
    out = step.h.new_empty(shape, dtype=step.dtype) if step.keep else None
    return _listed(step.h, (out,), _fake_parts(step.h, shape, step.target))


_TARGET = "str row, str col, str rule, bool col_sum, Tensor? seed=None"
NORM = define(
    "norm_quantize(Tensor x, Tensor weight, Tensor? bias, str kind, float eps, ScalarType dtype, "
    f"bool keep, {_TARGET}) -> Tensor[]",
    _norm,
    _norm_fake,
)
_NORM_BACKWARD = define(
    "norm_backward(Tensor dz, Tensor x, Tensor weight, Tensor? mean, Tensor rstd, "
    "ScalarType dtype) -> (Tensor, Tensor, Tensor)",
    _norm_backward,
    _norm_backward_fake,
)
_ACT = define(
    "act_quantize(Tensor h, Tensor? grad, str name, float limit, float alpha, float offset, "
    f"ScalarType dtype, bool keep, {_TARGET}) -> Tensor[]",
    _act,
    _act_fake,
)

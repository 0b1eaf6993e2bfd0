"""te_mx::act_quantize_grouped: activations of the tokens of all groups, and their derivatives, that
end in the quantizer of groups."""

from typing import Any

import torch
from torch import Tensor

from te_mx._ops import checks
from te_mx._ops.fused import made_shape
from te_mx._ops.grouped_quantize import ends_of
from te_mx._ops.library import define, is_direct
from te_mx._ops.quantize import empty_parts, parts_of, quantized_of
from te_mx.dispatch import run
from te_mx.dispatch.calls import ActGroups, Groups
from te_mx.dispatch.fused import Activation, ActStep, Target
from te_mx.dispatch.problem import Problem, place_of
from te_mx.layouts.operand import Quantized

_F32 = torch.float32


def act_quantize_grouped(what: ActGroups) -> Quantized:
    """Activate h [R, cols], or [R, 2 cols] where gated, or with grad [R, cols] the gradient of h,
    round to step.dtype and quantize by groups: the bytes of quantize_grouped (which has the words)
    of what act_quantize_2d returns. Nothing is kept besides: step.keep must be False.

    Raises:
        ValueError, TypeError: as act_quantize_2d and quantize_grouped.
    """
    (h, grad, act, dtype, _, target), (offs, capacity) = what
    if is_direct(h, grad, offs, target.seed):
        return _run(what)
    parts = _ACT(h, grad, *act, dtype, offs, capacity, *target)
    return quantized_of(parts, target.row, target.col, target.col_sum, made_shape(what.step))


def _run(what: ActGroups) -> Quantized:
    step, offs = what.step, what.groups.offs
    (h, _, _, dtype, keep, target) = step
    checks.act_step(step)
    if keep:
        raise ValueError("te_mx: act_quantize_grouped keeps no values, got keep=True")
    checks.quantized_groups(h, offs, target.row, target.col)
    rows, cols = h.shape
    problem = Problem(
        "act_quantize_grouped", place_of(h.device), target.row, target.col, rows, cols,
        groups=len(offs), ends=ends_of(offs), dtype=dtype, rule=target.rule,
    )  # fmt: skip
    return run.run(problem, what)


def _read(args: tuple[Any, ...]) -> ActGroups:
    h, grad, name, limit, alpha, offset, dtype, offs, capacity, *target = args
    act = Activation(name, limit, alpha, offset)
    return ActGroups(ActStep(h, grad, act, dtype, False, Target(*target)), Groups(offs, capacity))


def _act(*args: Any) -> list[Tensor]:
    return parts_of(_run(_read(args)))


def _act_fake(*args: Any) -> list[Tensor]:
    step, (offs, _) = _read(args)
    checks.act_step(step)
    checks.offsets(offs, step.h.device)
    target, sums = step.target, _F32 if step.target.col_sum else None
    return empty_parts(step.h, target.row, target.col, made_shape(step), sums, len(offs))


_ACT = define(
    "act_quantize_grouped(Tensor h, Tensor? grad, str name, float limit, float alpha, "
    "float offset, ScalarType dtype, Tensor offs, SymInt capacity, str row, str col, str rule, "
    "bool col_sum, Tensor? seed=None) -> Tensor[]",
    _act,
    _act_fake,
)

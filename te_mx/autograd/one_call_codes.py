"""The backward pass of te_mx.Linear on a weight of which only plain rowwise codes are left, where
the device has a kernel for all of it: what the codes decode to stands for the weight, whose columns
the call quantizes, as the steps do. The same bytes; the host does less.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from te_mx._ops import dequantize_2d
from te_mx._ops.library import is_direct
from te_mx._ops.linear import LinearPlan, LinearProblem, linear_kernel_of
from te_mx.autograd.dgrad_accumulation import passed_on, total
from te_mx.autograd.saved import Kept
from te_mx.autograd.steps import DGRAD, WGRAD, by_steps, quantized_columns
from te_mx.dispatch.linear import Part
from te_mx.runtime.ran import LAST_RUN

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def gradients(
    how: Any, kept: tuple[Kept, Kept], grad: Tensor, need: tuple[bool, ...]
) -> Gradients | None:
    """As `autograd.linear.gradients` (how: its Backward); None where that has to run."""
    settings, (x_kept, w_kept) = how.settings, kept
    if not (settings.one_copy and w_kept.spec and need[0]) or how.sink is not None:
        return None
    if not (by_steps(settings) and settings.is_uniform) or not is_direct(grad, *_tensors(kept)):
        return None
    row = w_kept.as_operand()
    if row.format.is_square or settings.weight_columns_rule != settings.scale_rule:
        return None
    n, k = row.rows, row.k
    m, device, x_dtype = grad.numel() // n if n else 0, grad.device, how.dtypes[0]
    if row.codes.device != device:
        return None
    kernel = linear_kernel_of((m, n, k), device, x_dtype, settings)
    if kernel is None:
        return None
    plan = kernel.plan(LinearProblem(m, n, k, need[1], True, False, settings))
    x_col = _columns(x_kept, plan, settings) if need[1] else None
    if need[1] and x_col is None:
        return None
    w_NK = dequantize_2d(row, row.format.exact_dtype)
    x_dtype, w_dtype, bias_dtype = how.dtypes
    dtypes = x_dtype, w_dtype, bias_dtype if need[2] else None
    made = plan.backward(grad, x_col, w_NK, how.x_shape, dtypes, total(how.among))
    if made is None:
        return None
    if how.tag >= 0:
        for gemm, wanted in ((DGRAD, True), (WGRAD, need[1])):
            if wanted:
                LAST_RUN[how.tag + gemm] = plan.kernel
    return passed_on(how.among, made[0]), *made[1:]


def _tensors(kept: tuple[Kept, Kept]) -> list[Tensor]:
    return [t for one in kept for t in one.tensors if t is not None]


def _columns(kept: Kept, plan: LinearPlan, settings: Any) -> Part | None:
    """The columnwise operand of an input as a plan reads it; None where there is another one."""
    operand = kept.as_operand() if kept.spec else quantized_columns(kept.tensor, "x", settings)
    if operand.spec != plan.col:
        return None
    return plan.as_saved((operand.codes, operand.scales), None)[0]

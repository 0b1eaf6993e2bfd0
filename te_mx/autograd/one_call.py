"""te_mx.Linear as one native call each way, where the device has a kernel for it: the same kernels
on the same bytes as autograd/linear.py, in the same order; only the host does less. It serves the
plain case: weights quantized in this call, gradients that go back to autograd.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_mx.autograd.backward import outputs, run_backward
from te_mx.autograd.saved import NOTHING, Kept
from te_mx.autograd.steps import DGRAD, WGRAD, in_one_call
from te_mx.ops.library import is_direct
from te_mx.ops.linear import LinearKernel, LinearPlan, LinearProblem, infer, linear_kernel
from te_mx.runtime.ran import LAST_RUN

__all__ = ["OneCallLinear", "infer", "kernel_of"]


def kernel_of(
    x: Tensor, weight_NK: Tensor, bias_N: Tensor | None, call: Any
) -> LinearKernel | None:
    """The kernel that takes a call (of autograd/linear.py), or None."""
    settings = call.settings
    if (
        call.kept is not None
        or call.sink is not None
        or call.save_x
        or not in_one_call(settings)
        or not (x.requires_grad or weight_NK.requires_grad)
        or (bias_N is not None and bias_N.device != x.device)
        or not is_direct(x, weight_NK, bias_N)
    ):
        return None
    return linear_kernel(x, weight_NK, settings)


class OneCallLinear(torch.autograd.Function):
    """y = x @ w^T + bias, as LinearFunction."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight_NK: Tensor, bias_N: Tensor | None, call: Any,
        kernel: LinearKernel,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        need_dx, need_dw = ctx.needs_input_grad[:2]
        n, k = weight_NK.shape
        problem = LinearProblem(x.numel() // k, n, k, need_dw, need_dx, call.settings)
        ctx.problem, ctx.plan, ctx.tag = problem, (plan := kernel.plan(problem)), call.tag
        y, saved = plan.forward(x, weight_NK, bias_N, call.out_dtype)
        if call.tag >= 0:
            LAST_RUN[call.tag] = plan.kernel
        ctx.x_shape, ctx.sinks = x.shape, ()
        ctx.dtypes = x.dtype, weight_NK.dtype, None if bias_N is None else bias_N.dtype
        return outputs(ctx, (saved,), y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return run_backward(_backward, "te_mx.Linear", ctx, *grads)


def _backward(ctx: Any, tensors: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor | None, ...]:
    plan: LinearPlan = ctx.plan
    tag: int = ctx.tag
    saved = plan.aligned(tensors[0])
    x_dtype, w_dtype, bias_dtype = ctx.dtypes
    if is_direct(grad, saved) and saved.device == grad.device:
        dtypes = x_dtype, w_dtype, bias_dtype if ctx.needs_input_grad[2] else None
        made = plan.backward(grad, saved, ctx.x_shape, dtypes)
        if made is not None:
            if tag >= 0:
                if made[0] is not None:
                    LAST_RUN[tag + DGRAD] = plan.kernel
                if made[1] is not None:
                    LAST_RUN[tag + WGRAD] = plan.kernel
            return *made, None, None
    # Step by step, through the ops, for somebody who watches them.
    from te_mx.autograd.linear import Backward, gradients  # which calls this module

    held = plan.operands(saved)
    kept = tuple(NOTHING if operand is None else Kept.operand(operand) for operand in held)
    how = Backward(ctx.problem.settings, tag, ctx.x_shape, ctx.dtypes)
    return *gradients(how, kept, grad, ctx.needs_input_grad), None, None  # type: ignore[arg-type]

"""What kernels are that run a linear layer in one call each way, or once without gradients."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_mx.dispatch.problem import Problem
from te_mx.dispatch.registry import Kernel
from te_mx.layouts.operand import Operand


class LinearProblem(NamedTuple):
    """y[m, n] = x[m, k] @ w[n, k]^T, and the operands that backward needs: columns of x for dw, of
    w for dx."""

    m: int
    n: int
    k: int
    x_columns: bool
    w_columns: bool
    settings: Any  # of the recipe


class LinearPlan:
    """Forward and backward of layers of one size, each one call. Quantizes x and w and multiplies;
    what backward needs lies in one buffer."""

    kernel: str  # what te_mx.audit calls it

    def forward(
        self, x: Tensor, w_NK: Tensor, bias_N: Tensor | None, out_dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """(y [..., n], what backward needs as uint8 [bytes])."""
        raise NotImplementedError

    def backward(
        self, grad: Tensor, saved: Tensor, x_shape: torch.Size,
        dtypes: tuple[torch.dtype, torch.dtype, torch.dtype | None],
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None] | None:  # fmt: skip
        """(dx, dw, db), as far as backward needs them; None for what native code does not take."""
        raise NotImplementedError

    def operands(self, saved: Tensor) -> tuple[Operand | None, Operand | None]:
        """The columnwise operands of x and w in the buffer, as views."""
        raise NotImplementedError

    def aligned(self, saved: Tensor) -> Tensor:
        """The buffer as it was saved, whatever hooks made of it."""
        raise NotImplementedError


class LinearKernel(Kernel):
    """A layer as a plan that is made once."""

    op = "linear"

    def plan(self, problem: LinearProblem) -> LinearPlan:
        """The plan of layers of one size."""
        raise NotImplementedError


class InferKernel(Kernel):
    """Quantizes x and w and multiplies; nothing is kept."""

    op = "linear_infer"

    def infer(
        self, p: Problem, x: Tensor, w_NK: Tensor, bias_N: Tensor | None, out_dtype: torch.dtype
    ) -> tuple[Tensor, str] | None:
        """(y [..., n], the name of the kernel that multiplied), or None for what native code does
        not take."""
        raise NotImplementedError

"""What kernels are that run a linear layer in one call each way, or once without gradients, and
that keep weights which stand still."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_mx import layouts
from te_mx.dispatch.kernels import Kernel
from te_mx.layouts import Layout
from te_mx.layouts.base import Parts
from te_mx.layouts.operand import Operand, Quantized, Stack


class Dtypes(NamedTuple):
    """Those of x and dx, of w and dw, of the bias and its gradient if there is one, and of y."""

    x: torch.dtype
    w: torch.dtype
    bias: torch.dtype | None
    y: torch.dtype


class LinearProblem(NamedTuple):
    """y[m, n] = x[m, k] @ w[n, k]^T, and the operands that backward needs: columns of x for dw, of
    w for dx. w_kept: forward makes those of w, and they are kept."""

    m: int
    n: int
    k: int
    x_columns: bool
    w_columns: bool
    w_kept: bool
    settings: Any  # of the recipe
    dtypes: Dtypes
    x_shape: torch.Size  # [..., k]
    need_db: bool = False


# An operand: a buffer of the plan's own, or codes and scales.
Part = tuple[Tensor, Tensor | None]


class Held(NamedTuple):
    """The operands of x; None for what nobody needs."""

    x_row: Part | None
    x_col: Part | None = None


class Weight(NamedTuple):
    """The operands of a weight that was quantized before: for fprop, and for dgrad where the
    problem's w_kept says that there is one."""

    row: Part
    col: Part | None


class Into(NamedTuple):
    """Where backward leaves a weight gradient: in `out`, perhaps added to what is there; without
    one, the columns of the output gradient are left, for `LinearPlan.wgrad`."""

    out: Tensor | None
    accumulate: bool = False


LATER = Into(None)


class LinearPlan:
    """Forward and backward of layers of one size, each one call: quantizes and multiplies. With a
    tag the kernels that ran are recorded in LAST_RUN of runtime/kernel_log.py: fprop, dgrad and
    wgrad at tag, tag + 1 and tag + 2."""

    kernel: "LinearKernel"
    problem: LinearProblem
    row: str  # specs of the operands of x
    col: str
    w_row: str  # and of w
    w_col: str

    def forward(
        self, x: Tensor, w_NK: Tensor, bias_N: Tensor | None, given: Held | None,
        weight: Operand | None = None, keep_row: bool = True, tag: int = -1,
    ) -> tuple[Tensor, Part | None, Part | None, Tensor | None]:  # fmt: skip
        """(y [..., n], the operands of x as of Held, a buffer of the plan's own with the columns of
        w). given: those of x, made before; weight: that of w. keep_row: whether the rowwise operand
        of x is kept, too, for other layers."""
        raise NotImplementedError

    def backward(
        self, grad: Tensor, x_col: Part | None, w: Part | Tensor | None, add_to: Tensor | None,
        into: Into | None = None, tag: int = -1,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None] | None:  # fmt: skip
        """(dx, dw, db), as far as backward needs them; None for what native code does not take.
        w: what was kept of it, or the weight itself. add_to: a dx that this one is added to. into:
        where dw goes; with LATER, the buffer for `wgrad` takes its place."""
        raise NotImplementedError

    def wgrad(
        self, g_col: Tensor, x_col: Part, out: Tensor | None, dtype: torch.dtype, accumulate: bool,
        tag: int = -1,
    ) -> Tensor:  # fmt: skip
        """dw [n, k] of what `backward` left with LATER: in `out`, or new, of a dtype."""
        raise NotImplementedError

    def quantized(self, held: Held) -> Quantized:
        """The operands of x, as views."""
        raise NotImplementedError

    def w_columns(self, w_col: Part) -> Operand:
        """The columnwise operand of w, in a buffer as views."""
        raise NotImplementedError

    def as_saved(self, x_col: Part | None, w_col: Part | None) -> tuple[Part | None, Part | None]:
        """Both as they were saved, whatever hooks made of them."""
        raise NotImplementedError


class LinearKernel(Kernel):
    """A layer by a LinearPlan, which is made of a LinearProblem."""

    op = "linear"

    def plan(self, problem: LinearProblem) -> Any:
        made = super().plan(problem)
        made.kernel, made.problem = self, problem
        return made


class InferKernel(Kernel):
    """Quantizes x and w and multiplies; nothing is kept. A plan takes (x [..., k], w [n, k], bias,
    the dtype of y, a tag as of LinearPlan) and gives y [..., n]."""

    op = "linear_infer"


class Gate(NamedTuple):
    """What stands for act(x) * values, rounded to the dtype of both, in the place of x."""

    values: Tensor  # in the shape of x
    act: str  # by its name in dispatch.fused


class FrozenCall(NamedTuple):
    """act(x [..., k] @ w^T + bias) in out_dtype, of a weight in the form of a kernel, or of the
    weights of groups of rows: `offs` has the ends of these, and rows of no group become 0."""

    x: Tensor
    weight: Operand | Stack
    bias: Tensor | None  # [n], [groups, n]
    out_dtype: torch.dtype
    offs: Tensor | None = None
    act: str | None = None  # one that is not gated, by its name in dispatch.fused
    gate: Gate | None = None  # of x


class FrozenKernel(Kernel):
    """Multiplies few rows with weights that stand still, which lie as other kernels find them or in
    a form of the kernel's own: quantizes the rows and multiplies, without gradients. A plan takes a
    FrozenCall and gives (the result [..., n], the name of the kernel that multiplied). gates: the
    activations of a Gate that it computes as it reads x. as_it_lies: forms of layouts that it reads
    are those weights themselves, whatever their numbers."""

    op = "linear_frozen"
    gates: tuple[str, ...] = ()
    as_it_lies = False

    def reads(self, layout: Layout) -> bool:
        """Whether `form` takes copies in a layout of other kernels, not in "rows" alone."""
        return layout is layouts.ROWS

    def form(self, row: Operand | Stack) -> Operand | Stack | None:
        """The rowwise copy of a weight, or of those of groups, in that form, perhaps itself; None
        for what native code does not take. Waits for the device."""
        raise NotImplementedError


class RestKernel(Kernel):
    """The one copy of a weight, or of those of groups, that the kernels of a device read; problems
    have its format as lhs. layout: where it lies."""

    op = "rest"
    layout = "rows"

    def rest(self, row: Operand | Stack) -> Operand | Stack:
        """Made of rowwise codes and scales. Waits for the device."""
        raise NotImplementedError

    def plain(self, held: Operand | Stack) -> Parts:
        """The codes and scales that it was made of, by rows."""
        raise NotImplementedError

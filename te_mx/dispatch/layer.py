"""What kernels are that run a layer of several steps in one call each way: a normalization or a
quantizer, a product, and perhaps an activation and a second product."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from te_mx.dispatch.fused import Activation, Norm
from te_mx.dispatch.kernels import Kernel
from te_mx.dispatch.linear import Into, Part
from te_mx.layouts.operand import Operand


class Formats(NamedTuple):
    """Specs of the operands of inputs, weights and output gradients, rowwise and columnwise, and
    the rules of their scales: of inputs and weights, of columns of weights, of gradients."""

    x: tuple[str, str]
    w: tuple[str, str]
    g: tuple[str, str]
    rule: str
    w_columns_rule: str
    g_rule: str
    precision: str
    spread: int


class Product(NamedTuple):
    """y[m, n] = x[m, k] @ w[n, k]^T + bias: dtypes of both (None for no bias). given: the operands
    of the weight were made before. kept: its columns are there after forward, made there or given.
    need_dw, need_db: which gradients backward makes."""

    n: int
    k: int
    dtype: torch.dtype
    bias: torch.dtype | None
    given: bool
    kept: bool
    need_dw: bool
    need_db: bool


class LayerProblem(NamedTuple):
    """z = norm(x), or x; h = z @ w1^T + b1; with an activation y = act(h) @ w2^T + b2, else h.

    m: rows of x. x_dtype: of x; dtype: of z, h and y. norm_dtype: of weight and bias of the
    normalization and of their gradients. norm_bias: whether it has one.
    need_dx: whether backward goes through the first product to x, with the gradients of the
    normalization. return_z: whether forward returns z, too."""

    m: int
    x_dtype: torch.dtype
    dtype: torch.dtype
    norm: Norm | None
    norm_dtype: torch.dtype
    norm_bias: bool
    act: Activation | None
    first: Product
    second: Product | None
    need_dx: bool
    return_z: bool
    formats: Formats
    device: torch.device


# Those of x, of weight and bias of the normalization, of both weights (with LATER columns of the
# output gradient in their place) and biases; None for what nobody needs.
Two = tuple[Tensor | None, Tensor | None]
Gradients = tuple[Tensor | None, Two, Sequence[Any], Two]


class Saved(NamedTuple):
    """Views of what forward kept: the statistics of the normalization, h, the columns of the input
    of each product, and those of each weight if forward made them."""

    mean: Tensor | None
    rstd: Tensor | None
    h: Tensor | None
    inputs: tuple[Operand | None, ...]
    weights: tuple[Operand | None, ...]


# What forward keeps, in two buffers: columns of the inputs, for dw, and statistics; all the rest.
Buffers = tuple[Tensor, Tensor | None]


class LayerPlan(Protocol):
    """Forward and backward of layers of one size, each one call."""

    problem: LayerProblem
    products: tuple[Product, ...]
    kernels: tuple[str, ...]  # what multiplies, of every product
    # Likewise backward: the product, its dgrad (1) or wgrad (2), the kernel.
    ran: tuple[tuple[int, int, str], ...]
    seeds: int  # how many backward draws, for gradients that are rounded stochastically

    def forward(
        self, x: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None,
        weights: Sequence[tuple[Tensor | None, Tensor | None]], b1: Tensor | None,
        b2: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:  # fmt: skip
        """(y [..., n], z [..., k] if it is returned, what backward needs) of x [..., k], weight and
        bias of the normalization, and of both products the weight [n, k] and None, or codes and
        scales of its rowwise operand, and the bias."""

    def backward(
        self, g: Tensor, x: Tensor | None, shape: torch.Size, norm_weight: Tensor | None,
        kept: Buffers, weights: Sequence[Tensor | None], into: Sequence[Into | None], seeds: Any,
        apart: bool,
    ) -> Gradients | None:  # fmt: skip
        """Of an output gradient [..., n]. shape: of x. weights: of both products the weight and
        None, or codes and scales of its columns; None for what lies in the buffers. into: as of
        LinearPlan.backward, of both products. apart: dx is the gradient of z, and the normalization
        is left out. None for what native code does not take: nothing ran."""

    def saved(self, columns: Tensor, others: Tensor | None) -> Saved:
        """What lies in the buffers."""

    def given_columns(self, i: int, part: Part) -> Operand:
        """The columns of a weight that was given."""

    def as_saved(self, kept: Sequence[Tensor | None]) -> list[Any]:
        """Buffers and weights as they were saved, whatever hooks made of them."""


class LayerKernel(Kernel):
    """A layer as a LayerPlan of one size; None where a step of it runs otherwise."""

    op = "layer"

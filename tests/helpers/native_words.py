"""The reference in the words of native entry points, which tests of these compare with: formats
"e4m3", "e5m2" and "e2m1", orders "k_last" and "k_first", a [m, k] and b [n, k] for D[n, m].
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_mx import formats
from te_mx.backends.cpu import binding as cpu
from te_mx.backends.cpu.gemm import Products
from te_mx.backends.reference import gemm as torch_gemm
from te_mx.backends.reference.quantize import quantize as quantize_house
from te_mx.dispatch.calls import Epilogue, Mode, Product, Quantize
from te_mx.dispatch.problem import Place, Problem
from te_mx.layouts.operand import Operand as HouseOperand

LAYOUTS = {"k_last": "rows", "k_first": "cols"}


class QuantizedParts(NamedTuple):
    """What one quantize call made of x [rows, cols]; parts that nobody asked for are None.

    row_codes [rows, cols], row_scales [rows, ceil(cols/32)];
    col_codes [rows, cols], col_scales [ceil(rows/32), cols] ("plain"), or
    col_codes [cols, rows], col_scales [cols, ceil(rows/32)] ("transposed");
    col_sum fp32 [cols]: the sum of x over its rows.
    """

    row_codes: Tensor | None
    row_scales: Tensor | None
    col_codes: Tensor | None
    col_scales: Tensor | None
    col_sum: Tensor | None


class Operand(NamedTuple):
    """One side of a GEMM: a logical [rows, k] matrix with one scale for every 32 of k.

    order "k_last": codes [rows, k], scales [rows, ceil(k/32)]. order "k_first": codes [k, rows],
    scales [ceil(k/32), rows]. `packed` is what a kernel packed of the same codes, or None. Codes of
    4 bits lie two a byte in "k_last", and `length` is k then.
    """

    codes: Tensor
    scales: Tensor
    fmt: str
    order: str
    packed: Tensor | None = None
    length: int | None = None

    @property
    def rows(self) -> int:
        return self.codes.shape[1 if self.order == "k_first" else 0]

    @property
    def k(self) -> int:
        if self.length is not None:
            return self.length
        return self.codes.shape[0 if self.order == "k_first" else 1]


def format_of(fmt: str) -> formats.Format:
    """The format that native code calls so."""
    wide = f"fp8_{fmt}" if "x128" in fmt or "128x" in fmt else fmt
    return formats.get("mxfp4" if fmt == "e2m1" else wide)


def house(operand: Operand | HouseOperand) -> HouseOperand:
    """An operand in the words of te_mx._ops."""
    if isinstance(operand, HouseOperand):
        return operand
    spec = f"{format_of(operand.fmt).name}@{LAYOUTS[operand.order]}"
    return HouseOperand(
        operand.codes, operand.scales, spec, operand.rows, operand.k, operand.packed
    )


def quantize(
    x: Tensor, fmt: str, rowwise: bool, columnwise: str | None, rule: str, col_sum: bool
) -> QuantizedParts:
    """Both directions of x [rows, cols]; columnwise "plain", "transposed" or None."""
    name = format_of(fmt).name
    layout = {"plain": "cols", "transposed": "rows"}
    row = f"{name}@rows" if rowwise else ""
    col = f"{name}@{layout[columnwise]}" if columnwise else ""
    made = quantize_house(Quantize(x, row, col, rule, col_sum))
    parts = [t for one in made[:2] for t in ((None, None) if one is None else one[:2])]
    return QuantizedParts(*parts, made.col_sum)


def dequantize(codes: Tensor, scales: Tensor, fmt: str, order: str, dtype: torch.dtype) -> Tensor:
    """The values, as the codes lie."""
    values = house(Operand(codes, scales, fmt, order)).values(dtype)
    return values if order == "k_last" else values.t()


def decode(codes: Tensor, fmt: str) -> Tensor:
    """What codes stand for without scales, fp32."""
    return format_of(fmt).element.decode(codes)


def gemm(
    a: Operand, b: Operand, epilogue: Epilogue, out: Tensor, aux: Tensor | None = None
) -> Tensor | None:
    """Writes out [n, m] and aux; the bias gradient or None."""
    return torch_gemm.gemm(house(b), house(a), epilogue, out, aux)


def relative_matmul(a: Operand, b: Operand) -> Tensor:
    """b @ a^T, which keeps the scales of rows away from fp32's limits."""
    return torch_gemm.relative_matmul(house(b), house(a))


class GemmCall:
    """One product by a CPU kernel, of operands in either words, as far as filling its record."""

    def __init__(
        self, kernel: str, a: Any, b: Any, epilogue: Epilogue, out: Tensor, aux: Tensor | None
    ) -> None:
        rhs, lhs = house(a), house(b)
        problem = Problem(
            "gemm", Place("cpu"), lhs.spec, rhs.spec, lhs.rows, rhs.rows, lhs.k, dtype=out.dtype
        )
        call = Product(lhs, rhs, epilogue, out, aux, Mode())
        self.args, self.bias_grad, self.alive = Products(kernel, problem).filled(call)
        self.alive = self.alive, call

    def workspace_bytes(self) -> int:
        return cpu.native().workspace_bytes(self.args)

    def run(self, scratch: Tensor | None, nbytes: int) -> str | None:
        """The name of the kernel that ran, or None."""
        self.args.workspace = 0 if scratch is None else scratch.data_ptr()
        self.args.workspace_bytes = nbytes
        status, ran = cpu.native().gemm(self.args)
        return cpu.KERNELS[ran] if cpu.supported(status) else None

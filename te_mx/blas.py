"""BLAS letters: every GEMM becomes TN on two operands whose blocks run along k.

Row-major shapes, with BLAS letters as Transformer Engine uses them; D is always [n, m]:

    TN  A[m, k]  B[n, k]  D = B @ A.T    reads A rowwise,    B rowwise
    NN  A[k, m]  B[n, k]  D = B @ A      reads A columnwise, B rowwise
    NT  A[k, m]  B[k, n]  D = B.T @ A    reads A columnwise, B columnwise

Nothing is copied here: kernels take columnwise copies in both layouts, and bits of the result do
not depend on them. Below this file B is lhs and A is rhs: D[m, n] = lhs[m, k] @ rhs[n, k]^T.
"""

from __future__ import annotations

from typing import Any

import torch

from te_mx.arguments import is_one_of, shown
from te_mx.layouts.operand import Operand

USAGES = {
    "TN": ("rowwise", "rowwise"),
    "NN": ("columnwise", "rowwise"),
    "NT": ("columnwise", "columnwise"),
}


def check_layout(layout: str) -> None:
    """Raise ValueError for anything but TN, NN and NT."""
    if not is_one_of(layout, USAGES):
        tt = isinstance(layout, str) and layout == "TT"
        more = " (TT: swap the operands and transpose the result)" if tt else ""
        raise ValueError(f'layout must be "TN", "NN" or "NT", got {shown(layout)}{more}')


def operands(A: Any, B: Any, layout: str) -> tuple[Operand, Operand]:
    """The two operands (logical A [m, k], B [n, k]) that a layout reads from two MXTensors.

    Raises ValueError when a copy is missing, devices differ or the sizes of k differ, TypeError for
    what is no MXTensor.
    """
    check_layout(layout)
    for name, tensor in (("A", A), ("B", B)):
        if not hasattr(tensor, "operand"):
            raise TypeError(
                f"{name} must be an MXTensor, got {type(tensor).__name__}; use te_mx.quantize"
            )
    usage_a, usage_b = USAGES[layout]
    a = operand_of(A, usage_a, "A", layout)
    b = operand_of(B, usage_b, "B", layout)
    check_devices(a.codes.device, b.codes.device)
    if a.k != b.k:
        raise ValueError(
            f"{layout} needs the same k in A {_k_is(usage_a)} and B {_k_is(usage_b)}, got {a.k} "
            f"(A is {A.rows} x {A.cols}) and {b.k} (B is {B.rows} x {B.cols})"
        )
    if a.spec != b.spec and a.format.transform != b.format.transform:
        raise ValueError(
            "A and B must have the same Hadamard transform along k or none, got "
            f"{a.format.name} and {b.format.name}; quantize both with the same one"
        )
    return a, b


def check_devices(a: torch.device, b: torch.device) -> None:
    """Raise ValueError for A and B on two devices."""
    if a != b:
        raise ValueError(f"A is on {a} and B on {b}; move one with .to(device)")


def operand_of(tensor: Any, usage: str, name: str, layout: str) -> Operand:
    """The copy of an MXTensor that a layout reads. Raises ValueError where it has none."""
    operand = tensor.operand(usage)
    if operand is None:
        raise ValueError(
            f"layout {layout} reads the {usage} copy of {name}, but {name} = {tensor!r} has none; "
            f"make it with te_mx.quantize(x, {usage}=True)"
        )
    return operand


def _k_is(usage: str) -> str:
    return "[., k]" if usage == "rowwise" else "[k, .]"

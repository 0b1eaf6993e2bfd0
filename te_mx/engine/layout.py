"""Layouts: every GEMM becomes TN on two operands whose blocks run along k.

Row-major shapes, with BLAS letters as Transformer Engine uses them; D is always [n, m]:

    TN  A[m, k]  B[n, k]  D = B @ A.T    reads A rowwise,    B rowwise
    NN  A[k, m]  B[n, k]  D = B @ A      reads A columnwise, B rowwise
    NT  A[k, m]  B[k, n]  D = B.T @ A    reads A columnwise, B columnwise

Nothing is copied here: a columnwise copy stored transposed is k_last already, one stored as it lies
is k_first, and the kernels take both orders. Bits of the result do not depend on the order.
"""

from __future__ import annotations

from typing import Any

import torch

from te_mx.backends.base import Operand

USAGES = {
    "TN": ("rowwise", "rowwise"),
    "NN": ("columnwise", "rowwise"),
    "NT": ("columnwise", "columnwise"),
}


def check_layout(layout: str) -> None:
    """Raise ValueError for anything but TN, NN and NT."""
    if layout not in USAGES:
        more = " (TT: swap the operands and transpose the result)" if layout == "TT" else ""
        raise ValueError(f'layout must be "TN", "NN" or "NT", got {layout!r}{more}')


def operands(A: Any, B: Any, layout: str) -> tuple[Operand, Operand]:
    """The two operands (logical A [m, k], B [n, k]) that a layout reads from two MXTensors.

    Raises ValueError when a copy is missing, devices differ or the sizes of k differ.
    """
    check_layout(layout)
    usage_a, usage_b = USAGES[layout]
    a = _operand(A, usage_a, "A", layout)
    b = _operand(B, usage_b, "B", layout)
    if a.codes.device != b.codes.device:
        raise ValueError(
            f"A is on {a.codes.device} and B on {b.codes.device}; move one with .to(device)"
        )
    if a.k != b.k:
        raise ValueError(
            f"{layout} needs the same k in A {_k_is(usage_a)} and B {_k_is(usage_b)}, got {a.k} "
            f"(A is {A.rows} x {A.cols}) and {b.k} (B is {B.rows} x {B.cols})"
        )
    return a, b


def _operand(tensor: Any, usage: str, name: str, layout: str) -> Operand:
    operand = tensor.operand(usage)
    if operand is None:
        raise ValueError(
            f"layout {layout} reads the {usage} copy of {name}, but {name} = {tensor!r} has none; "
            f"make it with te_mx.quantize(x, {usage}=True)"
        )
    return operand


def _k_is(usage: str) -> str:
    return "[., k]" if usage == "rowwise" else "[k, .]"


def preferred_columnwise(device: torch.device | str, role: str) -> str:
    """How a columnwise copy should lie for the GEMM of a device: "plain" or "transposed".

    role is "a" or "b", the side of the GEMM. The CPU's packing reads both orders equally well, and
    plain is the cheaper one to write.
    """
    return "plain"


def device_type(device: torch.device | str) -> str:
    """ "cpu", "cuda", ... of a device or its name."""
    return torch.device(device).type

"""te_mx::pack: the form of an operand that a panel kernel reads, made once for an operand that
stands still.
"""

from __future__ import annotations

import torch
from torch import Tensor

from te_mx.backends import cpu
from te_mx.backends.base import Operand
from te_mx.engine import envelopes
from te_mx.engine.layout import preferred_columnwise as _preferred_columnwise
from te_mx.ops.gemm import checked
from te_mx.ops.library import define


def pack_2d(operand: Operand, role: str) -> Tensor | None:
    """The packed form of an operand (uint8, one dimension) for the device's panel kernel, to put
    into Operand.packed.

    role is "a" or "b", the side of gemm_2d that the operand will be. None when there is nothing to
    gain: another device, no native module, an empty operand, a kernel that reads plain codes, or
    under torch.compile (pack before compiling).
    The packed form names its kernel: any other kernel ignores it and reads the codes.
    """
    codes = operand.codes
    if torch.compiler.is_compiling() or codes.device.type != "cpu" or codes.numel() == 0:
        return None
    kernel = envelopes.panel_kernel("cpu")
    if kernel == envelopes.REFERENCE:
        return None
    nbytes = cpu.packed_bytes(kernel, role, operand.rows, operand.k)
    if nbytes == 0:
        return None
    return _OP(codes, operand.scales, operand.fmt, operand.order, role, kernel, nbytes)


def preferred_columnwise(device: torch.device | str, role: str) -> str:
    """The columnwise form ("plain" or "transposed") that the device's GEMM takes best as side role
    ("a", "b").
    """
    return _preferred_columnwise(device, role)


def _on_cpu(
    codes: Tensor, scales: Tensor, fmt: str, order: str, role: str, kernel: str, nbytes: int
) -> Tensor:
    operand = checked(Operand(codes, scales, fmt, order), role)
    if nbytes != cpu.packed_bytes(kernel, role, operand.rows, operand.k):
        raise ValueError(f"nbytes must be what packed_bytes says for {kernel}, got {nbytes}")
    with torch.inference_mode(False):  # a packed form outlives the mode
        packed = torch.empty(nbytes, dtype=torch.uint8)
    if not cpu.pack(operand, kernel, role, packed):
        raise RuntimeError(f"te_mx internal error: {kernel} does not pack {order} operands")
    return packed


def _on_other(
    codes: Tensor, scales: Tensor, fmt: str, order: str, role: str, kernel: str, nbytes: int
) -> Tensor:
    raise NotImplementedError(f"te_mx::pack packs for CPU kernels, got codes on {codes.device}")


def _fake(
    codes: Tensor, scales: Tensor, fmt: str, order: str, role: str, kernel: str, nbytes: int
) -> Tensor:
    return codes.new_empty(nbytes)


_OP = define(
    "pack(Tensor codes, Tensor scales, str fmt, str order, str role, str kernel, SymInt nbytes)"
    " -> Tensor",
    cpu=_on_cpu,
    other=_on_other,
    fake=_fake,
)

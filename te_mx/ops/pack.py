"""te_mx::pack: the form of an operand that a panel kernel reads, made once for an operand that
stands still.
"""

from __future__ import annotations

import torch
from torch import Tensor

from te_mx.backends import cpu, sm90, sm90_layout
from te_mx.backends.base import Operand
from te_mx.engine import envelopes, layout
from te_mx.ops.checks import checked
from te_mx.ops.gemm import Mode
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


def standing_2d(operand: Operand, role: str, mode: Mode) -> Operand:
    """An operand that stands still, in the form that its device's kernel reads: packed beside its
    codes on CPUs, of order "sm90" on Hopper at precision "adaptive"; as it is where there is
    nothing to gain.
    """
    if operand.order == "sm90":
        return operand
    codes = operand.codes
    if codes.is_cuda and not torch.compiler.is_compiling():
        form = layout.gemm_form(codes.device, mode.precision, mode.spread)
        if form.spread < 0 or codes.numel() == 0:
            return operand
        return packed_for_sm90(operand, form.spread)
    return operand._replace(packed=pack_2d(operand, role))


def packed_for_sm90(operand: Operand, spread: int) -> Operand:
    """An operand as one of order "sm90"."""
    if operand.order == "sm90":
        return operand
    plain = (operand.codes, operand.scales, operand.fmt, operand.order)
    packed_codes, words = _OP_SM90(*plain, spread)
    return Operand(packed_codes, words, operand.fmt, "sm90")


def _on_cpu(
    codes: Tensor, scales: Tensor, fmt: str, order: str, role: str, kernel: str, nbytes: int
) -> Tensor:
    operand = checked(Operand(codes, scales, fmt, order), role)
    if nbytes != cpu.packed_bytes(kernel, role, operand.rows, operand.k):
        raise ValueError(f"nbytes must be what packed_bytes says for {kernel}, got {nbytes}")
    with torch.inference_mode(False):  # a packed form outlives the mode
        packed = torch.empty(nbytes, dtype=torch.uint8, device=codes.device)
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
    cuda=_on_other,
    other=_on_other,
    fake=_fake,
)


# ------------------------------------------------------------------------------------------- Hopper
def _sm90_on_cuda(
    codes: Tensor, scales: Tensor, fmt: str, order: str, spread: int
) -> tuple[Tensor, Tensor]:
    operand = checked(Operand(codes, scales, fmt, order), "operand")
    if codes.numel() == 0 or sm90.problem(codes.device.index) is not None:
        return _sm90_on_other(codes, scales, fmt, order, spread)
    with torch.inference_mode(False):
        packed = sm90.pack(operand, spread)
    return packed.codes, packed.scales


def _sm90_on_other(
    codes: Tensor, scales: Tensor, fmt: str, order: str, spread: int
) -> tuple[Tensor, Tensor]:
    if order == "k_first":
        codes, scales = codes.t(), scales.t()
    return sm90_layout.pack(codes, scales, fmt, spread).operand_parts(codes)


def _sm90_fake(
    codes: Tensor, scales: Tensor, fmt: str, order: str, spread: int
) -> tuple[Tensor, Tensor]:
    operand = Operand(codes, scales, fmt, order)
    return sm90.empty_operand(operand.rows, operand.k, codes.device)


_OP_SM90 = define(
    "pack_sm90(Tensor codes, Tensor scales, str fmt, str order, int spread) -> (Tensor, Tensor)",
    cpu=_sm90_on_other,
    cuda=_sm90_on_cuda,
    other=_sm90_on_other,
    fake=_sm90_fake,
)

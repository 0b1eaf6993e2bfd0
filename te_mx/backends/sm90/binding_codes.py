"""Calls of the GEMM that reads plain codes of 4 bits."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from te_mx.backends.base import LAYOUTS, Epilogue, Operand, pointer
from te_mx.backends.sm90 import binding


def gemm(
    a: Operand, b: Operand, epilogue: Epilogue, out: Tensor, aux: Tensor | None, spread: int,
    scratch: Callable[[int], Tensor | None], parts: int = 1,
) -> tuple[bool, Tensor | None]:  # fmt: skip
    """Enqueue out = epilogue(b @ a^T), where a is plain MXFP4: (whether native code took it, the
    bias gradient of the result or None). b is packed before unless it is packed, by native code
    itself where it is plain MXFP4 too."""
    native = binding.native()
    assert native is not None
    args, bias_grad, _alive = binding.gemm_record(a, b, epilogue, out, aux, parts)
    if a.codes.data_ptr() % 16:
        return False, None
    room, scales_at = 0, 0
    if b.order != "sm90" and (b.fmt != "e2m1" or b.order != "k_last"):
        room, scales_at = native.packed_bytes(b.rows, b.k)
        args.lhs = args.lhs.copy(layout=LAYOUTS["sm90"])
    args.workspace_bytes = own = native.codes_workspace_bytes(args)
    if own + room:
        base = pointer(scratch(own + room))
        if room:
            binding.pack_into(b, spread, base, base + scales_at)
            args.lhs = args.lhs.copy(codes=base, scales=base + scales_at)
        args.workspace = base + room
    return binding.supported(native.gemm_codes(args)), bias_grad

"""Calls of the GEMM that reads plain codes of 4 bits."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from te_mx.backends.base import LAYOUTS, Epilogue, Operand, pointer
from te_mx.backends.sm90 import binding

# One block: its steps take longer than those of a packed operand, by less than packing takes.
MOST_IN_LOOP = 128


def gemm(
    a: Operand, b: Operand, epilogue: Epilogue, out: Tensor, aux: Tensor | None, spread: int,
    scratch: Callable[[int], Tensor | None], parts: int = 1,
) -> tuple[bool, Tensor | None]:  # fmt: skip
    """Enqueue out = epilogue(b @ a^T), where a is plain MXFP4: (whether native code took it, the
    bias gradient of the result or None). b is packed before unless it is packed, or plain MXFP4 of
    at most MOST_IN_LOOP rows, which is unpacked in the main loop as well."""
    native = binding.native()
    assert native is not None
    args, bias_grad, _alive = binding.gemm_record(a, b, epilogue, out, aux, parts)
    if a.codes.data_ptr() % 16:
        return False, None
    args.workspace_bytes = own = native.codes_workspace_bytes(args)
    in_loop = b.fmt == "e2m1" and b.order == "k_last" and b.codes.data_ptr() % 16 == 0
    in_loop &= b.rows <= MOST_IN_LOOP
    room, scales_at = 0, 0
    if not in_loop and b.order != "sm90":
        room, scales_at = native.packed_bytes(b.rows, b.k)
    if own + room:
        base = pointer(scratch(own + room))
        if room:
            binding.pack_into(b, spread, base, base + scales_at)
            packed = {"codes": base, "scales": base + scales_at, "layout": LAYOUTS["sm90"]}
            args.lhs = args.lhs.copy(**packed)
        args.workspace = base + room
    return binding.supported(native.gemm_codes(args)), bias_grad

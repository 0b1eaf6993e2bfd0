"""The native module of the CPU backend, te_mx._native: whether it is there, at which level it runs,
and the forms that it packs operands in. It takes records of addresses and sizes and returns a
status; kernels make these beside their envelopes.

Checks live above. Kernels make every tensor contiguous, because addresses forget strides."""

import ctypes
import importlib
import struct
from typing import Any

import torch
from torch import Tensor

from te_mx.backends import base
from te_mx.backends.base import BLOCK_ROWS
from te_mx.backends.native import BLOCKWISE, COLUMNWISE, MX, NVFP4, record_of, unknown
from te_mx.dispatch.problem import Problem
from te_mx.dispatch.registry import forget
from te_mx.layouts.operand import Operand, Stack

ISA_LEVELS = ("portable", "avx2", "avx512", "avx512_bf16", "amx", "amx_emulated")
KERNELS = (
    "wide_f64", "portable_f32", "avx2_f32", "avx512_f32", "avx512_bf16", "amx_bf16",
    "portable_stream", "avx2_stream", "avx512_stream", "avx512_bf16_stream", "amx_stream",
)  # fmt: skip
KERNEL_IDS = {name: i for i, name in enumerate(KERNELS)}
ROLES = {"b": 0, "a": 1}  # the native lhs is B, its rhs is A
_OK, _UNSUPPORTED = 0, 2
_STATUS = {
    1: "a native kernel refused its arguments",
    3: "a native kernel found its workspace too small",
}

# A packed operand starts with this header: magic, kernel, role, rows, k, groups (0: it is none of
# several), bytes. So it is never read by another kernel, and a piece of one by none.
_HEADER = struct.Struct("<8siiqqqq16x")
_MAGIC = b"te_mx.pk"
HEADER_BYTES = _HEADER.size  # 64: keeps the payload on a cache line
WIDE_SPREAD = 83  # as kWideSpread in cpu.h; a test compares them

_native: Any = None
_reason: str | None = None


def native() -> Any:
    """The native module, imported at the first call; None when it was not built (`missing_reason`
    says more).

    Raises ValueError for a TE_MX_CPU_ISA that cannot be followed: here, and not at `import te_mx`.
    """
    global _native, _reason
    if _native is None and _reason is None:
        try:
            module = importlib.import_module("te_mx._native")
        except ImportError as error:
            _reason = (
                f"the native module te_mx._native cannot be imported ({error}); "
                "install te_mx with a C++20 compiler at hand to build it"
            )
            return None
        problem = module.isa_env_error()
        if problem is not None:
            raise ValueError(problem)
        _native = module
    return _native


def missing_reason() -> str | None:
    """Why there is no native backend; None when there is one."""
    native()
    return base.why_forced() or _reason


def isa() -> int:
    """The instruction-set level in use, an index into ISA_LEVELS; -1 without the native module."""
    module = _native or native()
    return -1 if module is None or base.forced else module.isa_current()


def set_isa(level: str) -> None:
    """Use another level in this process (for tests). Raises if the machine lacks it."""
    module = native()
    if level not in ISA_LEVELS:
        raise ValueError(f"level must be one of {', '.join(ISA_LEVELS)}, got {level!r}")
    if module is None:
        raise RuntimeError(_reason)
    if module.set_isa(ISA_LEVELS.index(level)) != _OK:
        raise RuntimeError(f"this CPU cannot run the level {level!r}; available: {available_isa()}")
    forget()  # what was chosen at the old level


def available_isa() -> list[str]:
    """Levels that this machine and build can run."""
    module = native()
    if module is None:
        return []
    return [name for i, name in enumerate(ISA_LEVELS) if module.isa_available(i)]


def kernel_available(kernel: str) -> bool:
    """Whether the kernel runs at the level in use."""
    module = native()
    return module is not None and module.kernel_available(KERNEL_IDS[kernel])


def stream_pays(kernel: str, m: int, n: int, k: int) -> bool:
    """Whether a stream kernel is faster than the panel kernel of its level: native code's choice,
    which groups of rows follow there."""
    module = native()
    return module is not None and module.stream_pays(KERNEL_IDS[kernel], m, n, k)


def supported(status: int) -> bool:
    """True for ok, False for unsupported; anything else is a bug in te_mx and raises."""
    if status == _OK:
        return True
    if status == _UNSUPPORTED:
        return False
    raise RuntimeError(f"te_mx internal error: {_STATUS.get(status, f'native status {status}')}")


# --------------------------------------------------------------------------------------------- pack
def packed_bytes(kernel: str, role: str, rows: int, k: int, fmt: str = "e4m3") -> int:
    """Bytes of the packed form including its header; 0 when the kernel reads plain codes."""
    nbytes = _native.packed_bytes(KERNEL_IDS[kernel], ROLES[role], rows, k, fmt in BLOCK_ROWS)
    return HEADER_BYTES + nbytes if nbytes else 0


def pack(operand: Operand | Stack, kernel: str, role: str, packed: Tensor, stride: int = 0) -> bool:
    """Write the packed form into uint8 [packed_bytes], or those of groups, this many bytes apart,
    behind one header; False when the native code does not."""
    groups = operand.groups if isinstance(operand, Stack) else 0
    kernel_id, native_role = KERNEL_IDS[kernel], ROLES[role]
    address, size = packed.data_ptr(), packed.numel()
    header = _HEADER.pack(_MAGIC, kernel_id, native_role, operand.rows, operand.k, groups, size)
    ctypes.memmove(address, header, HEADER_BYTES)
    args = _native.PackArgs(
        operand=record_of(_native, operand), role=native_role, out_codes=address + HEADER_BYTES,
        kernel=kernel_id, threads=torch.get_num_threads(),
    )  # fmt: skip
    if groups:
        args.groups_count, args.out_stride = groups, stride
    return supported(_native.pack_many(args) if groups else _native.pack(args))


def packed_at(packed: Tensor | None, form: tuple[int, ...]) -> int:
    """Where a packed operand of (kernel, role, rows, k[, number]) lies; 0 for another one's."""
    if packed is None or packed_for(packed) != form:
        return 0
    return packed.data_ptr() + HEADER_BYTES


def packed_for(packed: Tensor) -> tuple[int, ...] | None:
    """What a packed operand is of, in the words of `packed_at`; None when it cannot be used where
    it lies, as after a hook of saved tensors."""
    address = packed.data_ptr()
    if address % HEADER_BYTES or packed.numel() <= HEADER_BYTES or not packed.is_contiguous():
        return None
    magic, *found, groups, size = _HEADER.unpack(ctypes.string_at(address, HEADER_BYTES))
    if magic != _MAGIC or size != packed.numel():
        return None
    return (*found, groups) if groups else tuple(found)


# ---------------------------------------------------------------------------------------- envelope
# What every kernel of the CPU backend asks of a problem.
LAYOUTS = ("rows", "cols")


def why_not(
    problem: Problem, *more: str, blockwise: bool = False, columnwise: bool = False,
    random: bool = False, nvfp4: bool = False,
) -> str | None:  # fmt: skip
    """Why no kernel of this backend runs the problem; None when one may. `more`: layouts that a
    kernel takes beside plain ones; blockwise, columnwise: whether it takes fp32 scales, and those
    of blocks of 128 x 1; random: whether it rounds stochastically and transforms; nvfp4: whether it
    takes a tensor scale."""
    if problem.place.device != "cpu":
        return f"runs on the CPU, the operands are on {problem.place.device}"
    if problem.place.level < 0:
        return base.why_forced() or "needs the native module"
    formats = MX + BLOCKWISE * blockwise + COLUMNWISE * columnwise + NVFP4 * nvfp4
    return unknown(problem, (*LAYOUTS, *more), formats, random)


def why_not_empty(problem: Problem) -> str | None:
    """Why nothing native runs where there is nothing to read."""
    return "takes matrices that are not empty" if problem.empty else None


def why_not_level(kernel: str, level: str, problem: Problem) -> str | None:
    """Why the level in use does not run a kernel."""
    if kernel_available(kernel):
        return None
    if ISA_LEVELS.index(level) <= problem.place.level:
        return "is not in this build of te_mx"
    return f"needs the CPU level {level}, this process runs at {ISA_LEVELS[problem.place.level]}"

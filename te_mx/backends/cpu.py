"""The native CPU backend: a thin layer over te_mx._native, which takes addresses and sizes and
returns a status.

Checks of what a user passes live above. Here every tensor is made contiguous, because addresses
forget strides.
"""

from __future__ import annotations

import ctypes
import importlib
import struct
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from te_mx.backends import cpu_memory
from te_mx.backends.base import (
    BIAS_GRADS,
    FLOAT_DTYPES,
    FORMATS,
    GELUS,
    SCALE_RULES,
    Epilogue,
    Operand,
    QuantizedParts,
    pointer,
    typed_address,
)
from te_mx.backends.cpu_memory import CPU

ISA_LEVELS = ("portable", "avx2", "avx512", "avx512_bf16", "amx", "amx_emulated")
KERNELS = (
    "wide_f64",
    "portable_f32",
    "avx2_f32",
    "avx512_f32",
    "avx512_bf16",
    "amx_bf16",
    "portable_stream",
    "avx2_stream",
    "avx512_stream",
    "avx512_bf16_stream",
    "amx_stream",
)
KERNEL_IDS = {name: i for i, name in enumerate(KERNELS)}
ROLES = {"b": 0, "a": 1}  # the native lhs is B, its rhs is A
_U8 = torch.uint8
_OK, _UNSUPPORTED = 0, 2
_STATUS = {
    1: "a native kernel refused its arguments",
    3: "a native kernel found its workspace too small",
}

# A packed operand starts with this header: magic, kernel, role, rows, k. So it is never read by
# another kernel.
_HEADER = struct.Struct("<8siiqq32x")
_MAGIC = b"te_mx.pk"
HEADER_BYTES = _HEADER.size  # 64: keeps the payload on a cache line
WIDE_SPREAD = 83  # as kWideSpread in cpu.h; a test compares them

_native: Any = None
_reason: str | None = None


def native() -> ModuleType | None:
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
    return _reason


def isa() -> int:
    """The instruction-set level in use, an index into ISA_LEVELS; -1 without the native module."""
    module = _native or native()
    return -1 if module is None else module.isa_current()


def set_isa(level: str) -> None:
    """Use another level in this process (for tests). Raises if the machine lacks it."""
    module = native()
    if level not in ISA_LEVELS:
        raise ValueError(f"level must be one of {', '.join(ISA_LEVELS)}, got {level!r}")
    if module is None:
        raise RuntimeError(_reason)
    if module.set_isa(ISA_LEVELS.index(level)) != _OK:
        raise RuntimeError(f"this CPU cannot run the level {level!r}; available: {available_isa()}")


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


def supported(status: int) -> bool:
    """True for ok, False for unsupported; anything else is a bug in te_mx and raises."""
    if status == _OK:
        return True
    if status == _UNSUPPORTED:
        return False
    raise RuntimeError(f"te_mx internal error: {_STATUS.get(status, f'native status {status}')}")


# ----------------------------------------------------------------------------------------- quantize
def quantize(
    x: Tensor, fmt: str, rowwise: bool, columnwise: str | None, rule: str, col_sum: bool
) -> QuantizedParts | None:
    """As reference.quantize for a non-empty x; None when the native code does not take it."""
    rows, cols = x.shape
    row_stride, col_stride = x.stride()
    if row_stride != 1 and col_stride != 1:
        x = x.contiguous()
        row_stride, col_stride = x.stride()
    row_codes = row_scales = col_codes = col_scales = sums = partial = None
    if rowwise:
        row_codes = cpu_memory.empty((rows, cols), _U8)
        row_scales = torch.empty((rows, (cols + 31) // 32), dtype=_U8, device=CPU)
    if columnwise == "plain":
        col_codes = cpu_memory.empty((rows, cols), _U8)
        col_scales = torch.empty(((rows + 31) // 32, cols), dtype=_U8, device=CPU)
    elif columnwise is not None:
        col_codes = cpu_memory.empty((cols, rows), _U8)
        col_scales = torch.empty((cols, (rows + 31) // 32), dtype=_U8, device=CPU)
    if col_sum:
        sums = torch.empty(cols, dtype=torch.float32, device=CPU)
        partial_rows = -(-rows // _native.COL_SUM_ROWS)
        partial = torch.empty((partial_rows, cols), dtype=torch.float32, device=CPU)
    status = _native.quantize(
        x.data_ptr(), rows, cols, row_stride, col_stride, FLOAT_DTYPES[x.dtype],
        FORMATS[fmt].native_id, SCALE_RULES[rule], pointer(row_codes), pointer(row_scales),
        pointer(col_codes), pointer(col_scales), columnwise == "transposed", pointer(sums),
        pointer(partial), torch.get_num_threads(),
    )  # fmt: skip
    if status and not supported(status):
        return None
    return QuantizedParts(row_codes, row_scales, col_codes, col_scales, sums)


def dequantize(
    codes: Tensor, scales: Tensor, fmt: str, order: str, dtype: torch.dtype
) -> Tensor | None:
    """As reference.dequantize for contiguous codes and a native dtype; or None."""
    rows, cols = codes.shape
    out = cpu_memory.empty((rows, cols), dtype)
    status = _native.dequantize(
        codes.data_ptr(), scales.data_ptr(), rows, cols, order == "k_first",
        FORMATS[fmt].native_id, FLOAT_DTYPES[dtype], out.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return out if supported(status) else None


# --------------------------------------------------------------------------------------------- gemm
class GemmCall:
    """One native GEMM call as integers. It keeps the tensors alive whose addresses it holds."""

    __slots__ = ("bias_grad", "epilogue", "keep", "kernel", "lhs", "rhs")

    def __init__(
        self, kernel: str, a: Operand, b: Operand, epilogue: Epilogue, out: Tensor,
        aux: Tensor | None,
    ) -> None:  # fmt: skip
        self.kernel = KERNEL_IDS[kernel]
        self.lhs = _operand(b, self.kernel, "b")
        self.rhs = _operand(a, self.kernel, "a")
        bias, gelu_in, kind = epilogue.bias, epilogue.gelu_in, epilogue.bias_grad
        if bias is not None:
            bias = bias.contiguous()
        if gelu_in is not None:
            gelu_in = gelu_in.contiguous()
        self.bias_grad = None
        if kind is not None:
            size = out.shape[0] if kind == "operand" else out.shape[1]
            self.bias_grad = torch.empty(size, dtype=torch.float32, device=CPU)
        self.keep = (a, b, bias, gelu_in, out, aux)
        self.epilogue = (
            out.data_ptr(), FLOAT_DTYPES[out.dtype], out.shape[1], epilogue.accumulate,
            *typed_address(bias), GELUS.get(epilogue.gelu or "", 0), *typed_address(aux),
            *typed_address(gelu_in), BIAS_GRADS.get(kind or "", 0),
            pointer(self.bias_grad),
        )  # fmt: skip

    def workspace_bytes(self) -> int:
        """Scratch bytes that `run` needs: the native formula, the only one."""
        return _native.workspace_bytes(self.kernel, self.lhs, self.rhs, self.epilogue)

    def run(self, workspace: Tensor | None, nbytes: int) -> str | None:
        """Run it; the name of the kernel that ran, wide_f64 if the data ask for it; or None."""
        status, ran = _native.gemm(
            self.kernel, self.lhs, self.rhs, self.epilogue, pointer(workspace), nbytes,
            torch.get_num_threads(),
        )  # fmt: skip
        return KERNELS[ran] if supported(status) else None


def _operand(operand: Operand, kernel: int, role: str) -> tuple[int, int, int, int, bool, int, int]:
    """The native tuple of an operand whose codes and scales are contiguous."""
    codes, scales, fmt, order, packed = operand
    first, second = codes.shape
    k_first = order == "k_first"
    rows, k = (second, first) if k_first else (first, second)
    address = 0
    if packed is not None and packed_for(packed) == (kernel, ROLES[role], rows, k):
        address = packed.data_ptr() + HEADER_BYTES
    native_id = FORMATS[fmt].native_id
    return codes.data_ptr(), scales.data_ptr(), rows, k, k_first, native_id, address


# --------------------------------------------------------------------------------------------- pack
def packed_bytes(kernel: str, role: str, rows: int, k: int) -> int:
    """Bytes of the packed form including its header; 0 when the kernel reads plain codes."""
    nbytes = _native.packed_bytes(KERNEL_IDS[kernel], ROLES[role], rows, k)
    return HEADER_BYTES + nbytes if nbytes else 0


def pack(operand: Operand, kernel: str, role: str, packed: Tensor) -> bool:
    """Write the packed form into uint8 [packed_bytes]; False when the native code does not."""
    kernel_id, native_role = KERNEL_IDS[kernel], ROLES[role]
    source = _operand(operand._replace(packed=None), kernel_id, role)
    address = packed.data_ptr()
    header = _HEADER.pack(_MAGIC, kernel_id, native_role, operand.rows, operand.k)
    ctypes.memmove(address, header, HEADER_BYTES)
    status = _native.pack(
        kernel_id, native_role, source, address + HEADER_BYTES, torch.get_num_threads()
    )
    return supported(status)


def packed_for(packed: Tensor) -> tuple[int, int, int, int] | None:
    """(kernel, role, rows, k) of a packed operand; None when it cannot be used where it lies."""
    address = packed.data_ptr()
    if address % HEADER_BYTES or packed.numel() <= HEADER_BYTES or not packed.is_contiguous():
        return None
    magic, *found = _HEADER.unpack(ctypes.string_at(address, HEADER_BYTES))
    return tuple(found) if magic == _MAGIC else None

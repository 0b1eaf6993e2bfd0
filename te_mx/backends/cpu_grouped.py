"""Grouped problems on the native CPU backend: one call, one parallel region for all groups.

Every function returns None (or False) when the native code does not take the problem.
"""

from __future__ import annotations

import struct
from typing import Any

import torch
from torch import Tensor

from te_mx.backends import cpu, cpu_memory
from te_mx.backends.base import (
    FLOAT_DTYPES,
    FORMATS,
    SCALE_RULES,
    Operand,
    QuantizedParts,
    blocks,
    pointer,
    typed_address,
)
from te_mx.backends.cpu import KERNEL_IDS, KERNELS, ROLES, supported
from te_mx.backends.cpu_memory import CPU
from te_mx.backends.grouped import Bounds, StackedOperand, scale_rows

_U8 = torch.uint8
# What the packed forms of several groups start with: magic, kernel, role, groups, rows, k, stride.
_HEADER = struct.Struct("<8siiqqqq16x")
_MAGIC = b"te_mx.pg"
HEADER_BYTES = _HEADER.size  # 64


def _native() -> Any:
    module = cpu.native()
    assert module is not None
    return module


def _strided(x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """x with rows or columns that lie next to each other, as the quantizer reads them, and its
    strides."""
    stride = x.stride()
    if 1 in stride:
        return x, stride
    x = x.contiguous()
    return x, x.stride()


def quantize(
    x: Tensor, bounds: Bounds, fmt: str, rowwise: bool, columnwise: bool, rule: str, col_sum: bool
) -> QuantizedParts | None:
    """As ops.quantize_grouped, for a non-empty x."""
    (rows, cols), groups = x.shape, len(bounds.ends)
    x, stride = _strided(x)
    row_codes = row_scales = col_codes = col_scales = sums = partial = None
    if rowwise:
        row_codes = cpu_memory.empty((rows, cols), _U8)
        row_scales = torch.empty((rows, blocks(cols)), dtype=_U8, device=CPU)
    if columnwise:
        col_codes = cpu_memory.empty((rows, cols), _U8)
        col_scales = torch.empty((scale_rows(rows, groups), cols), dtype=_U8, device=CPU)
    if col_sum:
        sums = torch.empty((groups, cols), dtype=torch.float32, device=CPU)
        partial_rows = rows // _native().COL_SUM_ROWS + groups
        partial = torch.empty((partial_rows, cols), dtype=torch.float32, device=CPU)
    addresses, keep = bounds.addresses()
    problem = (
        x.data_ptr(), rows, cols, *stride, FLOAT_DTYPES[x.dtype], FORMATS[fmt].native_id,
        SCALE_RULES[rule], pointer(row_codes), pointer(row_scales), pointer(col_codes),
        pointer(col_scales), pointer(sums), pointer(partial),
    )  # fmt: skip
    status = _native().quantize_grouped(addresses, problem, torch.get_num_threads())
    del keep
    if not supported(status):
        return None
    return QuantizedParts(row_codes, row_scales, col_codes, col_scales, sums)


def quantize_weights(
    weights: list[Tensor], fmt: str, columnwise: bool, rule: str
) -> list[Tensor] | None:
    """As te_mx::quantize_weights, for weights that are not empty."""
    groups, (rows, cols) = len(weights), weights[0].shape
    parts = [
        cpu_memory.empty((groups, rows, cols), _U8),
        torch.empty((groups, rows, blocks(cols)), dtype=_U8, device=CPU),
    ]
    if columnwise:
        parts += [
            cpu_memory.empty((groups, rows, cols), _U8),
            torch.empty((groups, blocks(rows), cols), dtype=_U8, device=CPU),
        ]
    bases = [part.data_ptr() for part in parts] + [0] * (4 - len(parts))
    steps = [part.stride(0) for part in parts] + [0] * (4 - len(parts))
    sources = [_strided(weight) for weight in weights]
    words = FORMATS[fmt].native_id, SCALE_RULES[rule]
    problems = [
        (w.data_ptr(), rows, cols, *stride, FLOAT_DTYPES[w.dtype], *words,
         *(base + i * step for base, step in zip(bases, steps, strict=True)), 0, 0)
        for i, (w, stride) in enumerate(sources)
    ]  # fmt: skip
    status = _native().quantize_many(problems, torch.get_num_threads())
    return parts if supported(status) else None


# --------------------------------------------------------------------------------------------- pack
def packed_stride(kernel: str, operand: StackedOperand) -> int:
    """Bytes of the packed form of one group; 0 when the kernel reads plain codes."""
    nbytes = _native().packed_bytes(KERNEL_IDS[kernel], ROLES["a"], operand.rows, operand.k)
    return (nbytes + 63) // 64 * 64


def pack(operand: StackedOperand, kernel: str) -> Tensor | None:
    """The packed forms of all groups behind one header, uint8; None when there are none."""
    stride = packed_stride(kernel, operand)
    if stride == 0:
        return None
    groups = operand.groups
    packed = torch.empty(HEADER_BYTES + groups * stride, dtype=_U8, device=CPU)
    head = _HEADER.pack(
        _MAGIC, KERNEL_IDS[kernel], ROLES["a"], groups, operand.rows, operand.k, stride
    )
    packed[:HEADER_BYTES] = torch.frombuffer(bytearray(head), dtype=_U8)
    status = _native().pack_many(
        KERNEL_IDS[kernel], ROLES["a"], _stacked(operand, 0), groups,
        packed.data_ptr() + HEADER_BYTES, stride, torch.get_num_threads(),
    )  # fmt: skip
    return packed if supported(status) else None


def _packed_for(packed: Tensor | None, kernel: int, operand: StackedOperand) -> tuple[int, int]:
    """(address, stride) of packed forms that this kernel reads for this operand, or zeros."""
    if packed is None or packed.data_ptr() % HEADER_BYTES or packed.numel() <= HEADER_BYTES:
        return 0, 0
    if not packed.is_contiguous():  # as a hook of saved tensors may return it
        return 0, 0
    magic, *found, stride = _HEADER.unpack(packed[:HEADER_BYTES].numpy().tobytes())
    if magic != _MAGIC or found != [
        kernel, ROLES["a"], operand.groups, operand.rows, operand.k
    ]:  # fmt: skip
        return 0, 0
    return packed.data_ptr() + HEADER_BYTES, stride


# --------------------------------------------------------------------------------------------- gemm
class GroupedGemmCall:
    """One native grouped GEMM as integers. It keeps the tensors alive whose addresses it holds.

    kernels: the names for groups of many and of few rows of b.
    """

    __slots__ = ("args", "keep")

    def __init__(
        self, kernels: tuple[str, str], a: StackedOperand | Operand, b: Operand, bounds: Bounds,
        out: Tensor, bias: Tensor | None = None, accumulate: bool = False,
    ) -> None:  # fmt: skip
        many, few = (KERNEL_IDS[name] for name in kernels)
        addresses, arrays = bounds.addresses()
        stride, ragged_k = 0, isinstance(a, Operand)
        if isinstance(a, Operand):
            rhs = _plain(a)
        else:
            address, stride = _packed_for(a.packed, many, a)
            rhs = _stacked(a, address)
        if bias is not None:
            bias = bias.contiguous()
        rest = (
            many, few, ragged_k, stride, out.data_ptr(), FLOAT_DTYPES[out.dtype], accumulate,
            *typed_address(bias),
        )  # fmt: skip
        self.keep = (a, b, arrays, out, bias)
        self.args = (addresses, _plain(b), rhs, rest)

    def workspace_bytes(self) -> int:
        """Scratch bytes that `run` needs: the native formula, the only one."""
        return _native().workspace_bytes_grouped(*self.args, torch.get_num_threads())

    def run(self, workspace: Tensor | None, nbytes: int) -> str | None:
        """Run it; the names of the kernels that ran, joined by " + "; or None."""
        status, ran = _native().gemm_grouped(
            *self.args, pointer(workspace), nbytes, torch.get_num_threads()
        )
        if not supported(status):
            return None
        return " + ".join(name for i, name in enumerate(KERNELS) if ran >> i & 1)


def _plain(operand: Operand) -> tuple[int, int, int, int, bool, int, int]:
    return (
        operand.codes.data_ptr(), operand.scales.data_ptr(), operand.rows, operand.k,
        operand.order == "k_first", FORMATS[operand.fmt].native_id, 0,
    )  # fmt: skip


def _stacked(operand: StackedOperand, packed: int) -> tuple[int, int, int, int, bool, int, int]:
    return (
        operand.codes.data_ptr(), operand.scales.data_ptr(), operand.rows, operand.k,
        operand.order == "k_first", FORMATS[operand.fmt].native_id, packed,
    )  # fmt: skip

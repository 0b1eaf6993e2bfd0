"""Grouped problems on the native CPU backend: one call, one parallel region for all groups.

Every function returns None (or False) when the native code does not take the problem.
"""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import torch
from torch import Tensor

from te_mx.backends.base import (
    BLOCK_ROWS,
    FLOAT_DTYPES,
    LAYOUTS,
    SCALE_RULES,
    Operand,
    QuantizedParts,
    StackedOperand,
    code_bytes,
    format_fields,
    pointer,
    scales_of,
    typed_address,
)
from te_mx.backends.cpu import binding as cpu
from te_mx.backends.cpu.binding import KERNEL_IDS, KERNELS, ROLES, supported
from te_mx.backends.native import native_operand, native_stack, transform_of, words_of
from te_mx.dispatch.grouped_calls import QuantizeGroups
from te_mx.dispatch.groups import Bounds, scale_rows
from te_mx.dispatch.moe import RoutedGemm
from te_mx.formats.scaling import split_rule
from te_mx.runtime import cpu_memory, workspace
from te_mx.runtime.cpu_memory import CPU

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


def _set_source(args: Any, x: Tensor, stride: tuple[int, ...], fmt: str, rule: str) -> None:
    """Write what is quantized, and to what format, into a native record."""
    args.x_data, (args.x_rows, args.x_cols) = x.data_ptr(), x.shape
    args.x_row_stride, args.x_col_stride = stride
    args.x_dtype = FLOAT_DTYPES[x.dtype]
    for name, value in format_fields(fmt).items():
        setattr(args, name, value)
    rule, args.amax_epsilon = split_rule(rule)
    args.rule = SCALE_RULES[rule]


def _groups(bounds: Bounds) -> tuple[Any, Any]:
    """The native record of groups, and what it holds the addresses of."""
    (count, starts, ends), keep = bounds.addresses()
    return _native().Groups(count=count, starts=starts, ends=ends), keep


def quantize(what: QuantizeGroups, bounds: Bounds) -> QuantizedParts | None:
    """As ops.quantize_grouped, for a non-empty x."""
    _, _, row, col, rule, col_sum, seed = what
    fmt, (rows, cols), groups = words_of(row or col)[0], what.x.shape, len(bounds.ends)
    x, stride = _strided(what.x)
    scales = scales_of(fmt)
    row_codes = row_scales = col_codes = col_scales = sums = partial = None
    if row:
        row_codes = cpu_memory.empty((rows, code_bytes(fmt, cols)), _U8)
        row_scales = torch.empty(scales.shape(rows, cols), dtype=scales.dtype, device=CPU)
    if col:
        col_codes = cpu_memory.empty((rows, cols), _U8)
        shape = scale_rows(rows, groups, scales.block), cols
        col_scales = torch.empty(shape, dtype=scales.dtype, device=CPU)
    if col_sum:
        sums = torch.empty((groups, cols), dtype=torch.float32, device=CPU)
        partial_rows = rows // _native().COL_SUM_ROWS + groups
        partial = torch.empty((partial_rows, cols), dtype=torch.float32, device=CPU)
    native = _native()
    args = native.GroupedQuantizeArgs()
    _set_source(args, x, stride, fmt, rule)
    args.row_codes, args.row_scales = pointer(row_codes), pointer(row_scales)
    args.col_codes, args.col_scales = pointer(col_codes), pointer(col_scales)
    args.col_layout = LAYOUTS["k_first"]
    args.seed = pointer(seed)
    if row:
        args.row_hadamard, args.row_signs = transform_of(row)
    if col:
        args.col_hadamard, args.col_signs = transform_of(col)
    args.col_sum, args.col_sum_ws = pointer(sums), pointer(partial)
    args.groups, keep = _groups(bounds)
    args.threads = torch.get_num_threads()
    status = native.quantize_grouped(args)
    del keep
    if not supported(status):
        return None
    return QuantizedParts(row_codes, row_scales, col_codes, col_scales, sums)


def quantize_weights(
    weights: list[Tensor], fmt: str, wanted: tuple[bool, bool], rule: str
) -> list[Tensor] | None:
    """As te_mx::quantize_weights, for weights that are not empty; wanted: rowwise, columnwise."""
    groups, (rows, cols) = len(weights), weights[0].shape
    parts: list[Tensor] = []
    bases, steps = [0] * 4, [0] * 4
    scales = scales_of(fmt)
    shapes = scales.shape(rows, cols), scales.shape(cols, rows)[::-1]
    widths = code_bytes(fmt, cols), cols
    for i, (asked, shape, width) in enumerate(zip(wanted, shapes, widths, strict=True)):
        if asked:
            made = [
                cpu_memory.empty((groups, rows, width), _U8),
                torch.empty((groups, *shape), dtype=scales.dtype, device=CPU),
            ]
            bases[2 * i : 2 * i + 2] = [part.data_ptr() for part in made]
            steps[2 * i : 2 * i + 2] = [part.stride(0) * part.element_size() for part in made]
            parts += made
    native = _native()
    problems = []
    sources = [_strided(weight) for weight in weights]
    for i, source in enumerate(sources):
        args = native.QuantizeArgs()
        _set_source(args, *source, fmt, rule)
        args.row_codes, args.row_scales = bases[0] + i * steps[0], bases[1] + i * steps[1]
        args.col_codes, args.col_scales = bases[2] + i * steps[2], bases[3] + i * steps[3]
        args.col_layout = LAYOUTS["k_first"]
        problems.append(args)
    status = native.quantize_many(problems, torch.get_num_threads())
    return parts if supported(status) else None


# --------------------------------------------------------------------------------------------- pack
def packed_stride(kernel: str, operand: StackedOperand) -> int:
    """Bytes of the packed form of one group; 0 when the kernel reads plain codes."""
    nbytes = _native().packed_bytes(
        KERNEL_IDS[kernel], ROLES["a"], operand.rows, operand.k, operand.fmt in BLOCK_ROWS
    )
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
    native = _native()
    args = native.PackArgs(
        operand=_plain(operand), role=ROLES["a"], groups_count=groups,
        out_codes=packed.data_ptr() + HEADER_BYTES, out_stride=stride, kernel=KERNEL_IDS[kernel],
        threads=torch.get_num_threads(),
    )  # fmt: skip
    status = native.pack_many(args)
    return packed if supported(status) else None


def _packed_for(packed: Tensor | None, kernel: int, operand: StackedOperand) -> tuple[int, int]:
    """(address, stride) of packed forms that this kernel reads for this operand, or zeros."""
    if packed is None or packed.data_ptr() % HEADER_BYTES or packed.numel() <= HEADER_BYTES:
        return 0, 0
    if not packed.is_contiguous():  # as a hook of saved tensors may return it
        return 0, 0
    magic, *found, stride = _HEADER.unpack(ctypes.string_at(packed.data_ptr(), HEADER_BYTES))
    if magic != _MAGIC or found != [
        kernel, ROLES["a"], operand.groups, operand.rows, operand.k
    ]:  # fmt: skip
        return 0, 0
    if packed.numel() != HEADER_BYTES + operand.groups * stride:  # a piece of one
        return 0, 0
    return packed.data_ptr() + HEADER_BYTES, stride


# --------------------------------------------------------------------------------------------- gemm
class GroupedGemmCall:
    """One native grouped GEMM. It keeps the tensors alive whose addresses it holds.

    kernels: the names for groups of many and of few rows of b.
    """

    __slots__ = ("args", "keep")

    def __init__(
        self, kernels: tuple[str, str], a: StackedOperand | Operand, b: Operand, bounds: Bounds,
        out: Tensor, bias: Tensor | None = None, accumulate: bool = False,
    ) -> None:  # fmt: skip
        many, few = (KERNEL_IDS[name] for name in kernels)
        args = _native().GroupedGemmArgs()
        args.lhs = _plain(b)
        if isinstance(a, Operand):
            args.along_k, args.rhs = True, _plain(a)
        else:
            args.rhs = _plain(a)
            args.rhs_packed, args.packed_stride = _packed_for(a.packed, many, a)
        if bias is not None:
            bias = bias.contiguous()
        args.out, args.out_dtype = typed_address(out)
        args.ldo, args.accumulate = out.shape[-1], accumulate
        args.bias, args.bias_dtype = typed_address(bias)
        args.groups, arrays = _groups(bounds)
        args.kernel, args.few_rows_kernel = many, few
        args.threads = torch.get_num_threads()
        self.keep = (a, b, arrays, out, bias)
        self.args = args

    def workspace_bytes(self) -> int:
        """Scratch bytes that `run` needs: the native formula, the only one."""
        return _native().workspace_bytes_grouped(self.args)

    def run(self, workspace: Tensor | None, nbytes: int) -> str | None:
        """Run it; the names of the kernels that ran, joined by " + "; or None."""
        args = self.args
        args.workspace, args.workspace_bytes = pointer(workspace), nbytes
        status, ran = _native().gemm_grouped(args)
        if not supported(status):
            return None
        return names_of(ran)


def moe_gemm(p: RoutedGemm, kernels: tuple[str, str]) -> str | None:
    """Write the routed rows of p.out, whose lists the native code reads; the names of the kernels
    that ran. kernels: as of GroupedGemmCall."""
    native = _native()
    ids, experts, count, block_m, a_div, _ = p.routing
    bias = None if p.bias is None else p.bias.contiguous()
    weights = None if p.weights is None else p.weights.contiguous()
    many, few = kernels
    args = native.MoeGemmArgs(
        lhs=_plain(native_operand(p.lhs)), rhs=_plain(native_stack(p.rhs)), experts=p.rhs.groups,
        sorted_token_ids=pointer(ids), expert_ids=experts.data_ptr(),
        num_tokens_post_padded=count.data_ptr(), positions=0 if ids is None else len(ids),
        blocks=len(experts), routed=len(p.out), block_m=block_m, a_div=a_div,
        weights=pointer(weights), out=p.out.data_ptr(), out_dtype=FLOAT_DTYPES[p.out.dtype],
        kernel=KERNEL_IDS[many], few_rows_kernel=KERNEL_IDS[few], threads=torch.get_num_threads(),
    )  # fmt: skip
    args.bias, args.bias_dtype = typed_address(bias)
    nbytes = native.moe_workspace_bytes(args)
    scratch = workspace.acquire(CPU, nbytes)
    args.workspace, args.workspace_bytes = pointer(scratch), nbytes
    status, ran = native.moe_gemm(args)
    workspace.release(scratch, nbytes)
    return names_of(ran) if supported(status) else None


def names_of(ran: int) -> str:
    """The kernels of a mask."""
    return " + ".join(name for i, name in enumerate(KERNELS) if ran >> i & 1)


def _plain(operand: Operand | StackedOperand) -> Any:
    """The native record of an operand, or of the first of all groups'."""
    codes, scales, fmt, order = operand[:4]
    return _native().Operand(
        codes=codes.data_ptr(), scales=scales.data_ptr(), rows=operand.rows, k=operand.k,
        layout=LAYOUTS[order], **format_fields(fmt),
    )  # fmt: skip

"""te_mx::gemm_rows: fprop and dgrad of all groups in one call, groups of rows.

    D[start:end] = b[start:end] @ a_g^T + bias_g

Every group has the bits of its own gemm_2d. Offsets are as for quantize_grouped: `offs` on the CPU
is checked, on a device it is clamped and never waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from te_mx.backends import cpu, cpu_grouped, cpu_memory, reference_grouped, sm90, sm90_grouped
from te_mx.backends import sm90_grouped_layout as packed_layout
from te_mx.backends import sm90_grouped_weights as plain_weights
from te_mx.backends.base import Operand, blocks
from te_mx.backends.grouped import (
    Bounds,
    StackedOperand,
    device_bounds,
    host_bounds,
    known_to_host,
    rows_of,
)
from te_mx.engine import envelopes
from te_mx.engine.explain import LAST_RUN, warn_fallback
from te_mx.ops import checks
from te_mx.ops.gemm import Mode, gemm_2d
from te_mx.ops.grouped_run import NO_KERNEL, Names, kernels
from te_mx.ops.grouped_run import run as run_call
from te_mx.ops.library import define, is_direct
from te_mx.ops.pack import packed_for_sm90

_DEFAULT_MODE = Mode()


def gemm_rows(
    a: StackedOperand,
    b: Operand,
    offs: Tensor,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype,
    capacity: int = 0,
    tag: int = -1,
    mode: Mode = _DEFAULT_MODE,
) -> Tensor:
    """D [R, m]: rows of group g are b @ a_g^T + bias_g; rows of no group are 0.

    Args:
        a: logical [G, m, k], the weights.
        b: logical [R, k], "k_last"; or "sm90_rows", for which an `a` that is plain is packed.
        offs: int [G].
        bias: [G, m].
        out_dtype: fp32, bf16 or fp16.
        capacity: as for quantize_grouped.
        tag: when 0 or more, the names of the kernels that ran are kept in `explain.LAST_RUN[tag]`.
        mode: precision and alignment spread, on GPUs.
    """
    if is_direct(b.codes, a.codes, a.scales, b.scales, offs, bias):
        run = _rows_on_cpu if b.codes.is_cpu else _rows_on_cuda
        return run(a, b, offs, bias, out_dtype, capacity, tag, mode)
    return _OP_ROWS(
        a.codes, a.scales, a.packed, a.fmt, a.order, b.codes, b.scales, b.fmt, b.order, offs,
        bias, out_dtype, capacity, tag, mode.precision, mode.spread,
    )  # fmt: skip


# ----------------------------------------------------------------------------------- groups of rows
def _rows_on_cpu(
    a: StackedOperand, b: Operand, offs: Tensor, bias: Tensor | None, out_dtype: torch.dtype,
    capacity: int, tag: int, mode: Mode,
) -> Tensor:  # fmt: skip
    a, b = _checked_rows(a, b, offs, bias)
    bounds = host_bounds(offs, capacity, b.rows)
    out = cpu_memory.empty((b.rows, a.rows), out_dtype)
    ran = None
    chosen = kernels(a.rows, a.k) if b.order == "k_last" else None
    if chosen is not None and out.numel():
        call = cpu_grouped.GroupedGemmCall(chosen, a, b, bounds, out, bias)
        ran = run_call(call)
    if ran is None:
        if out.numel() and a.k and cpu.native() is None:
            warn_fallback("gemm_rows on the CPU", cpu.missing_reason() or "")
        ran = _rows_loop(a, b, bounds, bias, out, mode)
    if tag >= 0:
        LAST_RUN[tag] = ran or envelopes.ZERO_SIZE
    return out


def _rows_on_cuda(
    a: StackedOperand, b: Operand, offs: Tensor, bias: Tensor | None, out_dtype: torch.dtype,
    capacity: int, tag: int, mode: Mode,
) -> Tensor:  # fmt: skip
    if b.order != "sm90_rows" or sm90.problem(b.codes.device.index) is not None:
        return _rows_on_other(a, b, offs, bias, out_dtype, capacity, tag, mode)
    a, b = _checked_rows(a, b, offs, bias)
    if known_to_host(offs):
        host_bounds(offs, capacity, b.rows)  # says what is wrong with them
    out = b.codes.new_empty((b.rows, a.rows), dtype=out_dtype)
    if a.order != "sm90":
        offs = sm90_grouped.offs_on_device(offs, out.device)  # once for both kernels
        a = plain_weights.pack_weights(a, offs, capacity, b.rows, mode.spread)
    sm90_grouped.gemm_rows(a, b, offs, capacity, bias, out)
    if tag >= 0:
        LAST_RUN[tag] = sm90.ADAPTIVE
    return out


def _rows_on_other(
    a: StackedOperand, b: Operand, offs: Tensor, bias: Tensor | None, out_dtype: torch.dtype,
    capacity: int, tag: int, mode: Mode,
) -> Tensor:  # fmt: skip
    a, b = _checked_rows(a, b, offs, bias)
    out = b.codes.new_empty((b.rows, a.rows), dtype=out_dtype)
    if known_to_host(offs):
        ran = _rows_loop(a, b, host_bounds(offs, capacity, b.rows), bias, out, mode)
    elif a.groups == 0:
        ran = ""
        out.zero_()
    else:
        warn_fallback(f"gemm_rows on {out.device} with splits on the device", NO_KERNEL)
        reference_grouped.gemm_rows(a, b, *device_bounds(offs, capacity, b.rows), bias, out)
        ran = envelopes.REFERENCE
    if tag >= 0:
        LAST_RUN[tag] = ran or envelopes.ZERO_SIZE
    return out


def _rows_loop(
    a: StackedOperand, b: Operand, bounds: Bounds, bias: Tensor | None, out: Tensor, mode: Mode
) -> str:
    """One gemm_2d a group: the specification. Returns the names of the kernels that ran."""
    ran = Names()
    at = 0
    for i, (start, end) in enumerate(zip(*bounds, strict=True)):
        out[at:start].zero_()
        at = end
        if end > start:
            weight, own = a.group(i), b
            if b.order == "k_last":
                own = rows_of(b, start, end)
            else:
                own = packed_layout.rows_of(b, start, end, i)
                weight = packed_for_sm90(weight, mode.spread)
            gemm_2d(
                weight, own, bias=None if bias is None else bias[i],
                out=out[start:end], out_dtype=out.dtype, tag=ran.tag, mode=mode,
            )  # fmt: skip
            ran.note()
    out[at:].zero_()
    return str(ran)


_BESIDE_B = ("the scales of b", "a", "the scales of a", "the packed form of a", "bias")


def _checked_rows(
    a: StackedOperand, b: Operand, offs: Tensor, bias: Tensor | None
) -> tuple[StackedOperand, Operand]:
    """Contiguous operands. Raises ValueError when parts do not belong together."""
    device = b.codes.device
    if a.order == "sm90":
        checks.kinds(a, "a", 3)
    else:
        a = checks.checked_stack(a, "a")
    checks.kinds(b, "b", 2)
    checks.one_device(device, _BESIDE_B, (b.scales, a.codes, a.scales, a.packed, bias))
    groups, first, second = a.codes.shape
    m, k = (second, first) if a.order == "k_first" else (first, second)
    checks.offsets(offs, device, groups)
    if bias is not None and bias.shape != (groups, m):
        raise ValueError(f"bias must be [{groups}, {m}], got {tuple(bias.shape)}")
    if "sm90" in (a.order, b.order[:4]):
        return _checked_packed_rows(a, b)
    rows, b_k = b.codes.shape
    if b.order != "k_last" or b_k != k or b.scales.shape != (rows, blocks(k)):
        raise ValueError(
            f"b must be k_last [R, {k}] with scales [R, {blocks(k)}], got {b.order} "
            f"{tuple(b.codes.shape)} and {tuple(b.scales.shape)}"
        )
    if b.codes.is_contiguous() and b.scales.is_contiguous():
        return a, b
    return a, b._replace(codes=b.codes.contiguous(), scales=b.scales.contiguous())


def _checked_packed_rows(a: StackedOperand, b: Operand) -> tuple[StackedOperand, Operand]:
    """The same of packed tokens, which lie as the quantizer left them, and weights that are packed
    or will be."""
    groups, m, k = a.groups, a.rows, a.k
    codes, words = sm90_grouped.weights_shapes(groups, m, k)
    strides = (codes[1] * codes[2], codes[2], 1)
    lies = (m <= 1 or a.codes.stride() == strides) and a.scales.is_contiguous()
    if a.order == "sm90" and (a.scales.shape != words or not lies):
        raise ValueError(
            f"a must be packed: codes {(groups, m, k)} with strides {strides} and scales {words}, "
            f"got strides {a.codes.stride()} and scales {tuple(a.scales.shape)}"
        )
    row, row_words = packed_layout.shapes_rows(b.rows, k, groups)
    lies = (b.rows <= 1 or b.codes.stride() == (row[1], 1)) and b.scales.is_contiguous()
    if b.order != "sm90_rows" or b.k != k or b.scales.shape != row_words or not lies:
        raise ValueError(
            f"b must be packed in groups: codes {(b.rows, k)} with strides {(row[1], 1)} and "
            f"scales {row_words}, got order {b.order}, codes {tuple(b.codes.shape)} with strides "
            f"{b.codes.stride()} and scales {tuple(b.scales.shape)}"
        )
    return a, b


# ---------------------------------------------------------------------------------------------- ops
def _make_rows(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def op(*args: Any) -> Tensor:
        a_codes, a_scales, a_packed, a_fmt, a_order, b_codes, b_scales, b_fmt, b_order = args[:9]
        offs, bias, out_dtype, capacity, tag, precision, spread = args[9:]
        a = StackedOperand(a_codes, a_scales, a_fmt, a_order, a_packed)
        b = Operand(b_codes, b_scales, b_fmt, b_order)
        return run(a, b, offs, bias, out_dtype, capacity, tag, Mode(precision, spread))

    return op


def _rows_fake(*args: Any) -> Tensor:
    a_codes, a_scales, a_packed, _, a_order, b_codes, b_scales = args[:7]
    offs, bias, out_dtype = args[9:12]
    checks.offsets(offs, b_codes.device)
    beside = b_scales, a_codes, a_scales, a_packed, bias
    checks.one_device(b_codes.device, _BESIDE_B, beside)
    m = a_codes.shape[2 if a_order == "k_first" else 1]
    return b_codes.new_empty((b_codes.shape[0], m), dtype=out_dtype)


_OP_ROWS = define(
    "gemm_rows(Tensor a_codes, Tensor a_scales, Tensor? a_packed, str a_fmt, str a_order, "
    "Tensor b_codes, Tensor b_scales, str b_fmt, str b_order, Tensor offs, Tensor? bias, "
    "ScalarType out_dtype, SymInt capacity, int tag, str precision, int spread) -> Tensor",
    cpu=_make_rows(_rows_on_cpu),
    cuda=_make_rows(_rows_on_cuda),
    other=_make_rows(_rows_on_other),
    fake=_rows_fake,
)


# ----------------------------------------------------------------------------------- standing form
def standing_weights(operand: StackedOperand) -> StackedOperand:
    """Weights that stand still, with the packed form that the CPU's kernel for many rows reads."""
    if torch.compiler.is_compiling() or not operand.codes.is_cpu or operand.codes.numel() == 0:
        return operand
    kernel = envelopes.panel_kernel("cpu")
    if kernel == envelopes.REFERENCE:
        return operand
    with torch.inference_mode(False):  # outlives the mode
        return operand._replace(packed=cpu_grouped.pack(operand, kernel))

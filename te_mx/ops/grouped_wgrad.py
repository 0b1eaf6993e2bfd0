"""te_mx::gemm_k: wgrad of all groups in one call, groups of k.

    D_g = b[:, start:end] @ a[:, start:end]^T

Every group has the bits of its own gemm_2d; offsets are as for quantize_grouped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from te_mx.backends import cpu, cpu_grouped, cpu_memory, reference_grouped, sm90, sm90_grouped
from te_mx.backends import sm90_grouped_layout as packed_layout
from te_mx.backends.base import Operand
from te_mx.backends.grouped import (
    Bounds,
    device_bounds,
    host_bounds,
    k_of,
    known_to_host,
    scale_rows,
)
from te_mx.engine import envelopes
from te_mx.engine.explain import LAST_RUN, warn_fallback
from te_mx.ops import checks
from te_mx.ops.gemm import Mode, gemm_2d
from te_mx.ops.grouped_run import NO_KERNEL, Names, kernels, run
from te_mx.ops.library import define, is_direct

_DEFAULT_MODE = Mode()


def gemm_k(
    a: Operand,
    b: Operand,
    offs: Tensor,
    *,
    out: Tensor | None = None,
    out_dtype: torch.dtype,
    accumulate: bool = False,
    capacity: int = 0,
    rows: int | None = None,
    tag: int = -1,
    mode: Mode = _DEFAULT_MODE,
) -> Tensor:
    """D [G, n, m]: the product over the k of each group; zeros for a group without any.

    Args:
        a, b: logical [m, R] and [n, R], columnwise copies of quantize_grouped with offs: "k_first",
            or both "sm90_k".
        rows: R, which operands of order "sm90_k" do not tell.
        out: contiguous [G, n, m], written in place; its dtype then replaces out_dtype.
        accumulate: add to out.
        offs, out_dtype, capacity, tag, mode: as for gemm_rows.
    """
    direct = is_direct(b.codes, b.scales, a.codes, a.scales, offs, out)
    if out is None:
        shape = (len(offs), b.rows, a.rows)
        if direct and b.codes.is_cpu:
            out = cpu_memory.empty(shape, out_dtype)
        else:
            out = torch.empty(shape, dtype=out_dtype, device=b.codes.device)
        accumulate = False
    rows = a.k if rows is None else rows
    if direct:
        on_device = _k_on_cpu if b.codes.is_cpu else _k_on_cuda
        on_device(a, b, offs, out, accumulate, capacity, rows, tag, mode)
    else:
        checks.writable(out)
        _OP_K(
            a.codes, a.scales, a.fmt, b.codes, b.scales, b.fmt, b.order, offs, out, accumulate,
            capacity, rows, tag, mode.precision, mode.spread,
        )  # fmt: skip
    return out


def gemm_k_into(
    a: Operand, b: Operand, offs: Tensor, outs: Sequence[Tensor], accumulate: bool, *,
    capacity: int = 0, rows: int | None = None, tag: int = -1,
) -> bool:  # fmt: skip
    """gemm_k with a contiguous tensor [n, m] for each group.

    False where no kernel reaches them in one launch, and nothing was done: on anything but Hopper,
    under torch.compile and other watchers, for tensors of several dtypes, and where their addresses
    are not whole rows apart.
    """
    sides = b.scales, a.codes, a.scales, offs
    if not is_direct(b.codes, *sides, *outs) or len({out.dtype for out in outs}) > 1:
        return False
    run = _into_on_cpu if b.codes.is_cpu else _into_on_cuda
    return run(a, b, offs, outs, accumulate, capacity, a.k if rows is None else rows, tag)


def _into_on_cpu(*args: Any) -> bool:
    return False


def _into_on_cuda(
    a: Operand, b: Operand, offs: Tensor, outs: Sequence[Tensor], accumulate: bool, capacity: int,
    rows: int, tag: int,
) -> bool:  # fmt: skip
    if b.order != "sm90_k" or sm90.problem(b.codes.device.index) is not None:
        return False
    places = sm90_grouped.places_of(outs)
    if places is None:
        return False
    a, b = _checked_k(a, b, offs, outs, rows)
    if known_to_host(offs):
        host_bounds(offs, capacity, rows)
    sm90_grouped.gemm_k(a, b, offs, capacity, rows, places[0], accumulate, places[1])
    for out in outs:
        if not out.is_inference():
            torch.autograd.graph.increment_version(out)
    if tag >= 0:
        LAST_RUN[tag] = sm90.ADAPTIVE
    return True


def _k_on_cpu(
    a: Operand, b: Operand, offs: Tensor, out: Tensor, accumulate: bool, capacity: int, rows: int,
    tag: int, mode: Mode,
) -> None:  # fmt: skip
    a, b = _checked_k(a, b, offs, out, rows)
    bounds = host_bounds(offs, capacity, rows)
    ran = None
    chosen = kernels(a.rows, 1) if b.order == "k_first" else None
    if chosen is not None and out.numel():
        ran = run(cpu_grouped.GroupedGemmCall(chosen, a, b, bounds, out, None, accumulate))
        if ran is not None and not out.is_inference():
            torch.autograd.graph.increment_version(out)
    if ran is None:
        if out.numel() and a.k and cpu.native() is None:
            warn_fallback("gemm_k on the CPU", cpu.missing_reason() or "")
        ran = _k_loop(a, b, bounds, out, accumulate, mode)
    if tag >= 0:
        LAST_RUN[tag] = ran or envelopes.ZERO_SIZE


def _k_on_cuda(
    a: Operand, b: Operand, offs: Tensor, out: Tensor, accumulate: bool, capacity: int, rows: int,
    tag: int, mode: Mode,
) -> None:  # fmt: skip
    if b.order != "sm90_k" or sm90.problem(b.codes.device.index) is not None:
        return _k_on_other(a, b, offs, out, accumulate, capacity, rows, tag, mode)
    a, b = _checked_k(a, b, offs, out, rows)
    if known_to_host(offs):
        host_bounds(offs, capacity, rows)  # says what is wrong with them
    sm90_grouped.gemm_k(a, b, offs, capacity, rows, out, accumulate)
    if not out.is_inference():
        torch.autograd.graph.increment_version(out)
    if tag >= 0:
        LAST_RUN[tag] = sm90.ADAPTIVE
    return None


def _k_on_other(
    a: Operand, b: Operand, offs: Tensor, out: Tensor, accumulate: bool, capacity: int, rows: int,
    tag: int, mode: Mode,
) -> None:  # fmt: skip
    a, b = _checked_k(a, b, offs, out, rows)
    if known_to_host(offs):
        ran = _k_loop(a, b, host_bounds(offs, capacity, rows), out, accumulate, mode)
    elif len(offs) == 0:
        ran = ""
    else:
        warn_fallback(f"gemm_k on {out.device} with splits on the device", NO_KERNEL)
        starts, ends = device_bounds(offs, capacity, a.k)
        reference_grouped.gemm_k(a, b, starts, ends, out, accumulate)
        ran = envelopes.REFERENCE
    if tag >= 0:
        LAST_RUN[tag] = ran or envelopes.ZERO_SIZE


def _k_loop(
    a: Operand, b: Operand, bounds: Bounds, out: Tensor, accumulate: bool, mode: Mode
) -> str:
    ran = Names()
    part = k_of if b.order == "k_first" else packed_layout.k_of_packed
    for i, (start, end) in enumerate(zip(*bounds, strict=True)):
        gemm_2d(
            part(a, start, end, i), part(b, start, end, i), out=out[i], out_dtype=out.dtype,
            accumulate=accumulate, tag=ran.tag, mode=mode,
        )  # fmt: skip
        ran.note()
    return str(ran)


_BESIDE_B = ("the scales of b", "a", "the scales of a")


def _checked_k(
    a: Operand, b: Operand, offs: Tensor, out: Tensor | Sequence[Tensor], rows: int
) -> tuple[Operand, Operand]:
    outs = [out] if isinstance(out, Tensor) else out
    device = b.codes.device
    checks.offsets(offs, device, None if isinstance(out, Tensor) else len(out))
    checks.one_device(device, _BESIDE_B, (b.scales, a.codes, a.scales))
    packed = "sm90_k" in (a.order, b.order)
    for name, side in (("a", a), ("b", b)):
        codes: tuple[int, ...] = (rows, side.rows)
        scales: tuple[int, ...] = (scale_rows(rows, len(offs)), side.rows)
        if packed:
            codes, scales = packed_layout.shapes_k(rows, side.rows, len(offs))
        order = "sm90_k" if packed else "k_first"
        checks.kinds(side, name, 2)
        if side.order != order or side.codes.shape != codes or side.scales.shape != scales:
            raise ValueError(
                f"{name} must be {order} with codes {codes} and scales {scales} for {len(offs)} "
                f"groups of {rows} rows, got {side.order}, {tuple(side.codes.shape)} and "
                f"{tuple(side.scales.shape)}"
            )
    if a.k != b.k:
        raise ValueError(f"a and b must have the same k, got {a.k} and {b.k}")
    shape = (len(offs), b.rows, a.rows) if isinstance(out, Tensor) else (b.rows, a.rows)
    for one in outs:
        if one.shape != shape or not one.is_contiguous() or one.device != device:
            raise ValueError(
                f"out must be contiguous {shape} on {device}, got {tuple(one.shape)} with strides "
                f"{one.stride()} on {one.device}"
            )
    a = a._replace(codes=a.codes.contiguous(), scales=a.scales.contiguous())
    return a, b._replace(codes=b.codes.contiguous(), scales=b.scales.contiguous())


def _make_k(run: Callable[..., None]) -> Callable[..., None]:
    def op(*args: Any) -> None:
        a_codes, a_scales, a_fmt, b_codes, b_scales, b_fmt, order = args[:7]
        offs, out, accumulate, capacity, rows, tag, precision, spread = args[7:]
        a = Operand(a_codes, a_scales, a_fmt, order)
        b = Operand(b_codes, b_scales, b_fmt, order)
        run(a, b, offs, out, accumulate, capacity, rows, tag, Mode(precision, spread))

    return op


def _k_fake(*args: Any) -> None:
    a_codes, a_scales, _, b_codes, b_scales = args[:5]
    checks.offsets(args[7], b_codes.device)
    checks.one_device(b_codes.device, (*_BESIDE_B, "out"), (b_scales, a_codes, a_scales, args[8]))


_OP_K = define(
    "gemm_k(Tensor a_codes, Tensor a_scales, str a_fmt, Tensor b_codes, Tensor b_scales, "
    "str b_fmt, str order, Tensor offs, Tensor(a!) out, bool accumulate, SymInt capacity, "
    "SymInt rows, int tag, str precision, int spread) -> ()",
    cpu=_make_k(_k_on_cpu),
    cuda=_make_k(_k_on_cuda),
    other=_make_k(_k_on_other),
    fake=_k_fake,
)

"""te_mx::gemm_k: wgrad of all groups in one call, groups of k.

    D_g = b[:, start:end] @ a[:, start:end]^T

Every group has the bits of its own gemm_2d; offsets are as for quantize_grouped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from te_mx.backends import cpu, cpu_grouped, cpu_memory, reference_grouped
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
from te_mx.ops.gemm import Mode, gemm_2d
from te_mx.ops.grouped_quantize import check_offs
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
    tag: int = -1,
    mode: Mode = _DEFAULT_MODE,
) -> Tensor:
    """D [G, n, m]: the product over the k of each group; zeros for a group without any.

    Args:
        a, b: logical [m, R] and [n, R], "k_first" columnwise copies of quantize_grouped with offs.
        out: contiguous [G, n, m], written in place; its dtype then replaces out_dtype.
        accumulate: add to out.
        offs, out_dtype, capacity, tag, mode: as for gemm_rows.
    """
    direct = is_direct(b.codes)
    if out is None:
        shape = (len(offs), b.rows, a.rows)
        if direct and b.codes.is_cpu:
            out = cpu_memory.empty(shape, out_dtype)
        else:
            out = torch.empty(shape, dtype=out_dtype, device=b.codes.device)
        accumulate = False
    if direct:
        on_device = _k_on_cpu if b.codes.is_cpu else _k_on_other
        on_device(a, b, offs, out, accumulate, capacity, tag, mode)
    else:
        _OP_K(
            a.codes, a.scales, a.fmt, b.codes, b.scales, b.fmt, offs, out, accumulate, capacity,
            tag, *mode,
        )  # fmt: skip
    return out


def _k_on_cpu(
    a: Operand, b: Operand, offs: Tensor, out: Tensor, accumulate: bool, capacity: int, tag: int,
    mode: Mode,
) -> None:  # fmt: skip
    a, b = _checked_k(a, b, offs, out)
    bounds = host_bounds(offs, capacity, a.k)
    ran = None
    chosen = kernels(a.rows, 1)
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


def _k_on_other(
    a: Operand, b: Operand, offs: Tensor, out: Tensor, accumulate: bool, capacity: int, tag: int,
    mode: Mode,
) -> None:  # fmt: skip
    a, b = _checked_k(a, b, offs, out)
    if known_to_host(offs):
        ran = _k_loop(a, b, host_bounds(offs, capacity, a.k), out, accumulate, mode)
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
    for i, (start, end) in enumerate(zip(*bounds, strict=True)):
        gemm_2d(
            k_of(a, start, end, i), k_of(b, start, end, i), out=out[i], out_dtype=out.dtype,
            accumulate=accumulate, tag=ran.tag, mode=mode,
        )  # fmt: skip
        ran.note()
    return str(ran)


def _checked_k(a: Operand, b: Operand, offs: Tensor, out: Tensor) -> tuple[Operand, Operand]:
    check_offs(offs)
    for name, side in (("a", a), ("b", b)):
        expected = (scale_rows(side.k, len(offs)), side.rows)
        if side.order != "k_first" or side.scales.shape != expected:
            raise ValueError(
                f"{name} must be k_first with scales {expected} for {len(offs)} groups, got "
                f"{side.order} and {tuple(side.scales.shape)}"
            )
    if a.k != b.k:
        raise ValueError(f"a and b must have the same k, got {a.k} and {b.k}")
    shape = (len(offs), b.rows, a.rows)
    if out.shape != shape or not out.is_contiguous():
        raise ValueError(f"out must be contiguous {shape}, got {tuple(out.shape)}")
    a = a._replace(codes=a.codes.contiguous(), scales=a.scales.contiguous())
    return a, b._replace(codes=b.codes.contiguous(), scales=b.scales.contiguous())


def _make_k(run: Callable[..., None]) -> Callable[..., None]:
    def op(*args: Any) -> None:
        a_codes, a_scales, a_fmt, b_codes, b_scales, b_fmt = args[:6]
        offs, out, accumulate, capacity, tag, precision, spread = args[6:]
        a = Operand(a_codes, a_scales, a_fmt, "k_first")
        b = Operand(b_codes, b_scales, b_fmt, "k_first")
        run(a, b, offs, out, accumulate, capacity, tag, Mode(precision, spread))

    return op


def _k_fake(*args: Any) -> None:
    return None


_OP_K = define(
    "gemm_k(Tensor a_codes, Tensor a_scales, str a_fmt, Tensor b_codes, Tensor b_scales, "
    "str b_fmt, Tensor offs, Tensor(a!) out, bool accumulate, SymInt capacity, int tag, "
    "str precision, int spread) -> ()",
    cpu=_make_k(_k_on_cpu),
    cuda=_make_k(_k_on_other),
    other=_make_k(_k_on_other),
    fake=_k_fake,
)

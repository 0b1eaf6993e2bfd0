"""te_mx::gemm_rows and te_mx::gemm_k: the GEMMs of all groups in one call. Groups of rows are fprop
and dgrad, groups of k are wgrad.

    gemm_rows  D[start:end] = lhs[start:end] @ rhs_g^T + bias_g
    gemm_k     D_g          = lhs[:, start:end] @ rhs[:, start:end]^T

Every group has the bits of its own gemm_2d. Ends of groups are as for quantize_grouped: those on
the CPU are checked, those on a device clamped and never waited for."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from te_mx._ops import checks
from te_mx._ops.gemm import empty
from te_mx._ops.grouped_quantize import ends_of
from te_mx._ops.library import define, is_direct
from te_mx.dispatch import run
from te_mx.dispatch.calls import GroupedK, GroupedRows, Groups, Mode
from te_mx.dispatch.kernels import derived
from te_mx.dispatch.problem import Problem, place_of
from te_mx.dispatch.registry import find, pick_problem, planned_problem
from te_mx.layouts import spec_of
from te_mx.layouts.operand import Operand, Stack
from te_mx.runtime.kernel_log import LAST_RUN, note_read

_DEFAULT_MODE = Mode()


# ----------------------------------------------------------------------------------- groups of rows
def gemm_rows(
    lhs: Operand, rhs: Stack, groups: Groups, *, bias: Tensor | None = None, out_dtype: torch.dtype,
    tag: int = -1, mode: Mode = _DEFAULT_MODE,
) -> Tensor:  # fmt: skip
    """D [R, n]: rows of group g are lhs @ rhs_g^T + bias_g; rows of no group are 0.

    Args:
        lhs: logical [R, k], tokens as quantize_grouped makes them with the same groups.
        rhs: logical [G, n, k], the weights.
        groups: as for quantize_grouped.
        bias: [G, n].
        out_dtype: fp32, bf16 or fp16.
        tag: when 0 or more, the names of the kernels that ran are kept in `LAST_RUN[tag]`.
        mode: precision and alignment spread, on GPUs.
    """
    if is_direct(lhs.codes, lhs.scales, rhs.codes, rhs.scales, groups.offs, bias):
        return _run_rows(lhs, rhs, groups, bias, out_dtype, tag, mode)
    return GEMM_ROWS(
        lhs.codes, lhs.scales, lhs.spec, lhs.rows, lhs.k, rhs.codes, rhs.scales, rhs.packed,
        rhs.spec, rhs.groups, rhs.rows, *groups, bias, out_dtype, tag, mode.precision, mode.spread,
        lhs.tensor_scale, rhs.tensor_scale,
    )  # fmt: skip


def _run_rows(
    lhs: Operand, rhs: Stack, groups: Groups, bias: Tensor | None, out_dtype: torch.dtype, tag: int,
    mode: Mode,
) -> Tensor:  # fmt: skip
    offs = groups.offs
    checks.grouped_sides(lhs, rhs, offs, rhs.groups, bias)
    checks.tokens("lhs", lhs.spec, "rows")
    rows, n, k = lhs.rows, rhs.rows, rhs.k
    if bias is not None and bias.shape != (rhs.groups, n):
        raise ValueError(f"bias must be [{rhs.groups}, {n}], got {tuple(bias.shape)}")
    lhs = lhs.checked_tokens(rhs.groups, "lhs")
    rhs = rhs.checked("rhs")
    out = empty(lhs.codes, (rows, n), out_dtype)
    problem = Problem(
        "gemm_rows", place_of(out.device), lhs.spec, rhs.spec, rows, n, k, rhs.groups,
        mode.precision, ends_of(offs), out_dtype, mode.spread,
    )  # fmt: skip
    ran = run.run(problem, GroupedRows(lhs, rhs, groups, bias, out, mode))
    if tag >= 0:
        LAST_RUN[tag] = ran
    return out


def _rows_sides(args: tuple[Any, ...]) -> tuple[Operand, Stack]:
    w_codes, w_scales, packed, w_spec, count, n = args[5:11]
    whole, w_whole = (*args[18:], None, None)[:2]
    stack = Stack(w_codes, w_scales, w_spec, count, n, args[4], packed, w_whole)
    codes, scales, spec, rows, k = args[:5]
    return Operand(codes, scales, spec, rows, k, None, whole), stack


def _rows(*args: Any) -> Tensor:
    (lhs, rhs), (offs, capacity, bias, out_dtype, tag) = _rows_sides(args), args[11:16]
    note_read(rhs.codes)
    return _run_rows(lhs, rhs, Groups(offs, capacity), bias, out_dtype, tag, Mode(*args[16:18]))


def _rows_fake(*args: Any) -> Tensor:
    (lhs, rhs), (offs, _, bias, out_dtype) = _rows_sides(args), args[11:15]
    checks.grouped_sides(lhs, rhs, offs, None, bias)
    return lhs.codes.new_empty((lhs.rows, rhs.rows), dtype=out_dtype)


GEMM_ROWS = define(
    "gemm_rows(Tensor lhs_codes, Tensor lhs_scales, str lhs_spec, SymInt lhs_rows, SymInt k, "
    "Tensor rhs_codes, Tensor rhs_scales, Tensor? rhs_packed, str rhs_spec, SymInt groups, "
    "SymInt rhs_rows, Tensor offs, SymInt capacity, Tensor? bias, ScalarType out_dtype, int tag, "
    "str precision, int spread, Tensor? lhs_tensor_scale=None, Tensor? rhs_tensor_scale=None) "
    "-> Tensor",
    _rows,
    _rows_fake,
    lambda args: (args[3], args[10], args[4]),
)


# -------------------------------------------------------------------------------------- groups of k
def gemm_k(
    lhs: Operand, rhs: Operand, groups: Groups, *, out: Tensor | None = None,
    out_dtype: torch.dtype, accumulate: bool = False, tag: int = -1, mode: Mode = _DEFAULT_MODE,
) -> Tensor:  # fmt: skip
    """D [G, m, n]: the product over the k of each group; zeros for a group without any.

    Args:
        lhs, rhs: logical [m, R] and [n, R], columnwise copies of quantize_grouped with the groups.
        out: contiguous [G, m, n], written in place; its dtype then replaces out_dtype.
        accumulate: add to out.
        groups, out_dtype, tag, mode: as for gemm_rows.
    """
    offs = groups.offs
    direct = is_direct(lhs.codes, lhs.scales, rhs.codes, rhs.scales, offs, out)
    if out is None:
        out = empty(lhs.codes, (len(groups.offs), lhs.rows, rhs.rows), out_dtype)
        accumulate = False
    if direct:
        _run_k(lhs, rhs, groups, out, accumulate, tag, mode)
    else:
        checks.writable(out)
        GEMM_K(
            lhs.codes, lhs.scales, lhs.spec, lhs.rows, rhs.codes, rhs.scales, rhs.spec, rhs.rows,
            lhs.k, *groups, out, accumulate, tag, mode.precision, mode.spread, lhs.tensor_scale,
            rhs.tensor_scale,
        )  # fmt: skip
    return out


def _k_problem(p: GroupedK) -> Problem:
    offs = p.groups.offs
    return Problem(
        "gemm_k", place_of(p.lhs.codes.device), p.lhs.spec, p.rhs.spec, p.lhs.rows, p.rhs.rows,
        p.lhs.k, len(offs), p.mode.precision, ends_of(offs), p.out.dtype, p.mode.spread,
    )  # fmt: skip


def _checked_k(
    lhs: Operand, rhs: Operand, groups: Groups, given: int | None
) -> tuple[Operand, Operand]:
    checks.grouped_sides(lhs, rhs, groups.offs, given)
    checks.tokens("lhs", lhs.spec, "k")
    checks.tokens("rhs", rhs.spec, "k")
    count = len(groups.offs)
    return lhs.checked_tokens(count, "lhs"), rhs.checked_tokens(count, "rhs")


def _run_k(
    lhs: Operand, rhs: Operand, groups: Groups, out: Tensor, accumulate: bool, tag: int, mode: Mode
) -> None:
    lhs, rhs = _checked_k(lhs, rhs, groups, None)
    checks.grouped_out(out, (len(groups.offs), lhs.rows, rhs.rows), lhs.codes.device)
    p = GroupedK(lhs, rhs, groups, out, accumulate, mode)
    ran = run.run(_k_problem(p), p)
    if tag >= 0:
        LAST_RUN[tag] = ran


def gemm_k_into(
    lhs: Operand, rhs: Operand, groups: Groups, outs: Sequence[Tensor], accumulate: bool, *,
    tag: int = -1, mode: Mode = _DEFAULT_MODE,
) -> bool:  # fmt: skip
    """gemm_k with a contiguous tensor [m, n] for each group.

    False where no kernel reaches them in one launch, and nothing was done: where the kernel of the
    problem cannot, under torch.compile and other watchers, for tensors of several dtypes, and where
    their addresses are not whole rows apart."""
    sides = lhs.scales, rhs.codes, rhs.scales, groups.offs
    if not is_direct(lhs.codes, *sides, *outs) or len({out.dtype for out in outs}) > 1:
        return False
    p = GroupedK(lhs, rhs, groups, outs[0], accumulate, mode)
    run_into = getattr(planned_problem(_k_problem(p))[0], "run_into", None)
    if run_into is None:
        return False
    lhs, rhs = _checked_k(lhs, rhs, groups, len(outs))
    for out in outs:
        checks.grouped_out(out, (lhs.rows, rhs.rows), lhs.codes.device)
    ran = run_into(p._replace(lhs=lhs, rhs=rhs), outs)
    if ran is not None and tag >= 0:
        LAST_RUN[tag] = ran
    return ran is not None


def _k_sides(args: tuple[Any, ...]) -> tuple[Operand, Operand]:
    codes, scales, spec, m, r_codes, r_scales, r_spec, n, k = args[:9]
    whole, r_whole = (*args[16:], None, None)[:2]
    return (
        Operand(codes, scales, spec, m, k, None, whole),
        Operand(r_codes, r_scales, r_spec, n, k, None, r_whole),
    )


def _k(*args: Any) -> None:
    offs, capacity, out, accumulate, tag, *mode = args[9:16]
    _run_k(*_k_sides(args), Groups(offs, capacity), out, accumulate, tag, Mode(*mode))


def _k_fake(*args: Any) -> None:
    lhs, rhs = _k_sides(args)
    checks.grouped_sides(lhs, rhs, args[9], None)
    checks.one_device(lhs.codes.device, ("out",), (args[11],))


GEMM_K = define(
    "gemm_k(Tensor lhs_codes, Tensor lhs_scales, str lhs_spec, SymInt lhs_rows, Tensor rhs_codes, "
    "Tensor rhs_scales, str rhs_spec, SymInt rhs_rows, SymInt k, Tensor offs, SymInt capacity, "
    "Tensor(a!) out, bool accumulate, int tag, str precision, int spread, "
    "Tensor? lhs_tensor_scale=None, Tensor? rhs_tensor_scale=None) -> ()",
    _k,
    _k_fake,
    lambda args: (args[3], args[7], args[8]),
)


def on_device(offs: Tensor, spec: str, x: Tensor) -> Tensor:
    """Ends of groups where the kernels of tokens with this spec read them, for a whole call."""
    if offs.device == x.device or spec_of(spec).layout.exact or not is_direct(x):
        return offs
    known, key = derived(), ("move_ends", x.device, spec)
    if key not in known:
        known[key] = find(Problem("move_ends", place_of(x.device), spec))
    kernel = known[key]
    return offs if kernel is None else kernel.run(offs, x.device)


# ------------------------------------------------------------------------------ what stands still
def kept_stack(stack: Stack, mode: Mode, other: str = "") -> Stack:
    """Weights of all groups that stand still, in the form that the device's kernel for many rows
    reads without work. other: the spec of the tokens; that of the weights by default."""
    if torch.compiler.is_compiling() or stack.codes.numel() == 0:
        return stack
    problem = Problem(
        "gemm_rows", place_of(stack.codes.device), other or stack.spec, stack.spec, 1 << 10,
        stack.rows, stack.k, stack.groups, mode.precision, "host", spread=mode.spread,
    )  # fmt: skip
    kernel = pick_problem(problem)
    with torch.inference_mode(False):  # outlives the mode
        return kernel.prepare_stack(stack, problem)

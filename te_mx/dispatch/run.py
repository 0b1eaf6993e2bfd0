"""Pick and run: what ops do behind their schemas, and kernels that are made of other ops."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from te_mx.dispatch.calls import Epilogue, Mode, Product, Quantize, Ran
from te_mx.dispatch.fused import Target
from te_mx.dispatch.kernels import Kernel, kernels
from te_mx.dispatch.problem import ENCODED, INVARIANT, NOT_ASKED, Problem, place_of, why_missing
from te_mx.dispatch.registry import choose, pick, planned, planned_problem
from te_mx.layouts import spec_of
from te_mx.layouts.operand import Operand, Quantized
from te_mx.runtime.kernel_log import warn_fallback

REFERENCE, ZERO_SIZE = "reference", "zero_size"
_DEFAULT_MODE = Mode()


def run(problem: Problem, *call: Any) -> Any:
    """The result of the kernel that takes a problem."""
    kernel, plan = planned_problem(problem)
    if kernel.name != REFERENCE:
        made = plan(*call)
        if made is not None:
            return made
    return fall_back(kernel, problem, *call)


def run_on(
    op: str, x: Tensor, row: str, col: str, dtype: torch.dtype, rule: str, *call: Any
) -> Any:  # fmt: skip
    """The same of an op on a matrix x that makes operands of these specs."""
    rows, cols = x.shape
    kernel, plan = planned(op, x.device, row, col, (rows, cols, 1), dtype, rule=rule)
    if kernel.name != REFERENCE:
        made = plan(*call)
        if made is not None:
            return made
    problem = Problem(op, place_of(x.device), row, col, rows, cols, dtype=dtype, rule=rule)
    return fall_back(kernel, problem, *call)


def fall_back(kernel: Kernel, problem: Problem, *call: Any) -> Any:
    """The reference, said aloud: it was picked, or native code refuses all the same. Raises
    RuntimeError where that is a product at a precision that no kernel has."""
    refused = why_refused(problem)
    if refused:
        raise RuntimeError(f"te_mx: {refused}")
    why = "" if kernel.name == REFERENCE else "the native code does not take this problem"
    _warn(problem, why)
    return reference(problem.op).run(*call)


def why_refused(problem: Problem) -> str:
    """Why the reference does not run a problem that no other kernel takes; "" where it does."""
    if problem.empty or problem.ends == "host":
        return ""
    if problem.precision == INVARIANT:
        return (
            f"no kernel for {problem.op} of {problem.lhs} and {problem.rhs} on "
            f"{problem.place.device} gives a row the same bits beside any others, which precision "
            "'invariant' asks for; te_mx.explain says why each declines"
        )
    if problem.precision == ENCODED:
        return (
            f"{problem.op} of {problem.lhs} and {problem.rhs} has no kernel for precision "
            "'fp8', which encodes NVFP4 anew in MXFP8, for products of NVFP4 with NVFP4 or an MX "
            "format, not of groups; run it at precision 'adaptive'"
        )
    return ""


def reference(op: str) -> Kernel:
    """The reference kernel of an op."""
    return kernels(op)[-1]


def _warn(problem: Problem, why: str = "") -> None:
    """Say that the reference runs where a native kernel might. Not of groups that the host knows:
    it loops over ops that say so themselves."""
    device = problem.place.device
    if problem.empty or problem.ends == "host" or device not in ("cpu", "cuda"):
        return
    if not why:
        others = [
            reason for name, reason in choose(problem)[1]
            if not reason.startswith("runs ")  # kernels of other devices, and of empty problems
        ]  # fmt: skip
        if not others:
            return
        asked = [reason for reason in others if not reason.startswith(NOT_ASKED)] or others
        missing = why_missing(problem.place) or NOT_ASKED
        why = asked[0] if missing.startswith(NOT_ASKED) else missing
    where = "the CPU" if device == "cpu" else f"cuda:{problem.place.index}"
    if problem.ends == "device":
        where += " with splits on the device"
        why += "; splits given as a list loop over the groups"
    warn_fallback(f"{problem.op} on {where}", why)


def quantize(what: Quantize) -> Quantized:
    """Both directions of a matrix: in one read, or each in its own where no kernel makes both and
    one makes a single direction."""
    x, row, col, rule = what.x, what.row, what.col, what.rule
    rows, cols = x.shape
    dtype = x.dtype
    kernel, plan = planned("quantize", x.device, row, col, (rows, cols, 1), dtype, rule=rule)
    if kernel.name != REFERENCE:
        made = plan(what)
        if made is not None:
            return made
    elif row and col:
        each = (
            pick("quantize", x.device, *one, (rows, cols, 1), dtype, rule=rule)
            for one in ((row, ""), ("", col))
        )
        if any(one.name != REFERENCE for one in each):
            first = quantize(what._replace(col=""))
            return first._replace(col=quantize(what._replace(row="", col_sum=False)).col)
    problem = Problem("quantize", place_of(x.device), row, col, rows, cols, dtype=dtype, rule=rule)
    return fall_back(kernel, problem, what)


def quantize_joined(parts: Sequence[Tensor], row: str, col: str, rule: str) -> Quantized:
    """Matrices [rows_i, cols] as one, their rows behind each other: where they lie, if the kernel
    of the whole can read them there, else joined first."""
    first, rows = parts[0], sum(part.shape[0] for part in parts)
    sizes = rows, first.shape[1], 1
    plan = planned("quantize", first.device, row, col, sizes, first.dtype, rule=rule)[1]
    joined = getattr(plan, "joined", None)
    made = None if joined is None else joined(parts)
    if made is not None:
        return made
    with torch.no_grad():
        # torch.autocast has its own mind about the dtype of torch.cat.
        whole = first.new_empty(sizes[:2])
        for part, room in zip(parts, whole.split([len(part) for part in parts]), strict=True):
            room.copy_(part)
    return quantize(Quantize(whole, row, col, rule))


def quantized(values: Tensor, target: Target) -> Quantized:
    """Values [rows, cols] as a target says, in one read; perhaps their sums alone."""
    if not target.codes:
        sums = values.sum(0, dtype=torch.float32) if target.col_sum else None
        return Quantized(None, None, sums)
    row, col, rule, col_sum, seed = target
    return quantize(Quantize(values, row, col, rule, col_sum, seed=seed))


def quantize_two(first: Quantize, second: Quantize) -> tuple[Quantized, Quantized] | None:
    """Both in one call, where one kernel takes them so."""
    (kernel, plan), (other, other_plan) = (
        planned("quantize", x.device, row, col, (*x.shape, 1), x.dtype, rule=rule)
        for x, row, col, rule, *_ in (first, second)
    )
    two = getattr(plan, "two", None) if kernel is other else None
    return None if two is None else two(first, other_plan, second)


def dequantize(operand: Operand, dtype: torch.dtype, into: Tensor | None = None) -> Tensor:
    """The values [rows, k] of an operand, in new memory or in `into`."""
    made: Tensor | None = None
    if dtype != torch.float64:  # which is for tests: nothing native gives it
        device, sizes = operand.codes.device, (operand.rows, operand.k, 1)
        kernel, plan = planned("dequantize", device, operand.spec, "", sizes, dtype)
        if kernel.name != REFERENCE:
            made = plan(operand, dtype, into)
        if made is None:
            place = place_of(device)
            problem = Problem("dequantize", place, operand.spec, "", *sizes, dtype=dtype)
            made = fall_back(kernel, problem, operand, dtype)
    if made is None:
        made = reference("dequantize").run(operand, dtype)
    return made if into is None or made is into else into.copy_(made)


def gemm(
    lhs: Operand, rhs: Operand, epilogue: Epilogue, out: Tensor, aux: Tensor | None = None,
    mode: Mode = _DEFAULT_MODE,
) -> Ran:  # fmt: skip
    """out [m, n] = epilogue(lhs @ rhs^T), in place."""
    device, dtype, sizes = out.device, out.dtype, (lhs.rows, rhs.rows, lhs.k)
    kernel, plan = planned("gemm", device, lhs.spec, rhs.spec, sizes, dtype, *mode)
    product = Product(lhs, rhs, epilogue, out, aux, mode)
    if kernel.name != REFERENCE:
        made = plan(product)
        if made is not None:
            return made
    if mode.precision == "exact":
        _refuse_rounded(lhs, rhs)
    problem = Problem(
        "gemm", place_of(device), lhs.spec, rhs.spec, *sizes, 0, mode.precision, "", dtype,
        mode.spread,
    )  # fmt: skip
    return fall_back(kernel, problem, product)


def _refuse_rounded(*sides: Operand) -> None:
    for side in sides:
        if not side.layout.exact:
            raise ValueError(
                "te_mx: precision 'exact' needs plain operands, got one packed for 'adaptive' "
                f"({side.spec}); quantize again with the recipe that runs now"
            )


def convert(operand: Operand, spec: str) -> Operand:
    """An operand in a plain layout, in the layout of another spec of its format."""
    if operand.spec == spec:
        return operand
    if spec_of(spec).format is not operand.format:
        raise ValueError(f"te_mx: a conversion keeps the format, got {operand.spec} to {spec}")
    problem = Problem(
        "convert", place_of(operand.codes.device), operand.spec, spec, operand.rows, operand.k
    )
    return run(problem, operand, spec)

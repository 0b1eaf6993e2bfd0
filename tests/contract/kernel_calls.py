"""Random problems of every op, and calls of one kernel of it.

A case is what the contract needs to know of a call: the problem, how a kernel runs it, and what the
result is compared by.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import strategies
import torch
from hypothesis import strategies as st
from torch import Tensor

from te_mx import formats, layouts
from te_mx.backends import base
from te_mx.backends.reference import gemm as torch_gemm
from te_mx.dispatch.calls import (
    Epilogue,
    GroupedK,
    GroupedRows,
    Groups,
    Mode,
    Product,
    Quantize,
    QuantizeGroups,
    QuantizeWeights,
)
from te_mx.dispatch.fused import ACTIVATIONS, Activation, ActStep, Norm, NormStep, Target
from te_mx.dispatch.kernels import kernels
from te_mx.dispatch.linear import FrozenCall
from te_mx.dispatch.moe import Align, RoutedGemm, Routing
from te_mx.dispatch.problem import Problem, place_of
from te_mx.layouts.operand import Operand, Quantized, Stack

FORMATS = st.sampled_from(formats.names())
# Those whose blocks hold one row: rows of tokens belong to groups.
OF_TOKENS = FORMATS.filter(lambda name: formats.get(name).scaling.block[0] == 1)
NATIVE = st.sampled_from(["mxfp8_e4m3", "mxfp8_e5m2"])
NATIVE_TOKENS = st.sampled_from(["mxfp8_e4m3", "mxfp8_e5m2", "fp8_e4m3_1x128", "fp8_e5m2_1x128"])
FLOATS = strategies.DTYPES
# Triton's interpreter is slow, and its kernels take groups whose ends the device knows.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ENDS = "device" if INTERPRETED else "host"
# On a GPU it compiles, seconds a problem.
EXAMPLES = 40 if INTERPRETED else 10 if base.forced == "triton" else 25
SIZES = st.integers(1, 70) if INTERPRETED else strategies.POSITIVE
LAYOUTS = st.sampled_from(["rows", "cols"])


class Case(NamedTuple):
    """run(kernel) gives tensors, or None where the kernel refuses. `exact`: bytes are compared;
    else the first tensor is near: `bound` holds the largest distance of every element, or
    `relative` that to the result, or to `floor` where it is less."""

    problem: Problem
    run: Callable[[Any], list[Tensor] | None]
    exact: bool = True
    bound: Tensor | None = None
    relative: float = 0.0
    floor: float = 0.0


def reference(op: str) -> Any:
    """The last kernel of every op."""
    return kernels(op)[-1] if kernels(op)[-1].name == "reference" else kernels(op)[-2]


def matrix(data: st.DataObject, rows: int, cols: int, device: torch.device) -> Tensor:
    kind = data.draw(st.sampled_from(["normal", "outliers", "row_scales"]))
    x = torch.from_numpy(strategies.array(kind, rows, cols, data.draw(strategies.SEEDS)))
    x = x.clamp(-(2.0**14), 2.0**14).to(data.draw(FLOATS)).to(device)
    return x.t().contiguous().t() if data.draw(st.booleans()) else x


def rules_of(fmt: str) -> st.SearchStrategy[str]:
    """Two rules of a format."""
    return st.sampled_from(formats.get(fmt).scaling.rules[:2])


def tensors_of(made: Any) -> list[Tensor] | None:
    """All tensors of a result, in order."""
    if made is None or isinstance(made, str):
        return None if made is None else []
    if isinstance(made, Tensor):
        return [made]
    if isinstance(made, Operand | Stack):
        return [made.codes, made.scales]
    found: list[Tensor] = []
    for part in made:
        found += (tensors_of(part) or []) if not isinstance(part, str) else []
    return found


def spec(data: st.DataObject, fmt: str, names: list[str]) -> str:
    layout = data.draw(st.sampled_from(names))
    return "" if layout == "" else f"{fmt}@{layout}"


def packed(device: torch.device, *more: str) -> list[str]:
    """Names of layouts to ask for: those of the GPU only where there is one."""
    return [*more, "sm90:8"] if device.type == "cuda" else list(more)


# ----------------------------------------------------------------------------------------- quantize
def quantize(data: st.DataObject, device: torch.device) -> Case:
    fmt = data.draw(FORMATS)
    row = spec(data, fmt, ["", "rows", "cols"])
    col = spec(data, fmt, ["rows", "cols"] if not row else ["", "rows", "cols"])
    if device.type == "cuda" and fmt.startswith("mxfp8") and data.draw(st.booleans()):
        row = col = f"{fmt}@sm90:{data.draw(st.sampled_from([0, 3, 8]))}"
    x = matrix(data, data.draw(SIZES), data.draw(SIZES), device)
    rule = data.draw(st.sampled_from(formats.get(fmt).scaling.rules))
    what = Quantize(x, row, col, rule)
    rows, cols = x.shape
    problem = Problem("quantize", place_of(device), row, col, rows, cols, dtype=x.dtype, rule=rule)
    return Case(problem, lambda kernel: tensors_of(kernel.make_plan(problem)(what)))


def operand(data: st.DataObject, x: Tensor, fmt: str, layout: str) -> Operand:
    """Rows of x, quantized by the reference."""
    want = f"{fmt}@{layout}"
    rule = formats.get(fmt).scaling.rules[0]
    made = reference("quantize").run(Quantize(x, want, "", rule)).row
    return made


def dequantize(data: st.DataObject, device: torch.device) -> Case:
    fmt = data.draw(FORMATS)
    x = matrix(data, data.draw(SIZES), data.draw(SIZES), device)
    held, dtype = operand(data, x, fmt, data.draw(LAYOUTS)), data.draw(FLOATS)
    problem = Problem("dequantize", place_of(device), held.spec, "", *x.shape, dtype=dtype)
    return Case(problem, lambda kernel: tensors_of(kernel.make_plan(problem)(held, dtype)))


def convert(data: st.DataObject, device: torch.device) -> Case:
    fmt = data.draw(NATIVE)
    x = matrix(data, data.draw(SIZES), data.draw(SIZES), device)
    held = operand(data, x, fmt, data.draw(LAYOUTS))
    to = spec(data, fmt, packed(device, "rows", "cols"))
    problem = Problem("convert", place_of(device), held.spec, to, *x.shape)
    return Case(problem, lambda kernel: tensors_of(kernel.make_plan(problem)(held, to)))


# --------------------------------------------------------------------------------------------- gemm
def bound_of(lhs: Operand, rhs: Operand, out_dtype: torch.dtype, device: torch.device) -> Tensor:
    """4 K 2^-24 sum |a b| and a step of the result; on GPUs what shifted codes are rounded by: 2^-9
    of the largest of a row, a factor."""
    left, right = (side.values(torch.float64).abs() for side in (lhs, rhs))
    step = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}[out_dtype]
    magnitude = left @ right.t()
    sums = 4 * lhs.k * 2.0**-24 * magnitude
    if device.type == "cuda":
        sums = lhs.k * 2.0**-9 * left.amax(1, keepdim=True) * right.amax(1)
    return sums + magnitude * step + 2.0**-24


def gemm(data: st.DataObject, device: torch.device) -> Case:
    m, n, k = (data.draw(SIZES) for _ in range(3))
    lhs = operand(data, matrix(data, m, k, device), data.draw(FORMATS), data.draw(LAYOUTS))
    rhs = operand(data, matrix(data, n, k, device), data.draw(FORMATS), data.draw(LAYOUTS))
    dtype, precision = data.draw(FLOATS), data.draw(st.sampled_from(["adaptive", "exact"]))
    problem = Problem(
        "gemm", place_of(device), lhs.spec, rhs.spec, m, n, k, precision=precision, dtype=dtype
    )

    def run(kernel: Any) -> list[Tensor] | None:
        out = torch.full((m, n), torch.nan, dtype=dtype, device=device)
        made = kernel.make_plan(problem)(Product(lhs, rhs, Epilogue(), out, None, Mode(precision)))
        return None if made is None else [out]

    return Case(problem, run, exact=False, bound=bound_of(lhs, rhs, dtype, device))


def linear_infer(data: st.DataObject, device: torch.device) -> Case:
    m, n, k = (data.draw(SIZES) for _ in range(3))
    x, w = matrix(data, m, k, device), matrix(data, n, k, device)
    fmt, dtype = data.draw(FORMATS), data.draw(FLOATS)
    of_w = data.draw(st.sampled_from([fmt, fmt.replace("_1x128", "_128x128")]))
    rule = data.draw(rules_of(fmt))
    problem = Problem(
        "linear_infer", place_of(device), f"{fmt}@any", f"{of_w}@any", m, n, k, dtype=x.dtype,
        rule=rule,
    )  # fmt: skip

    def run(kernel: Any) -> list[Tensor] | None:
        return [kernel.make_plan(problem)(x, w, None, dtype)]

    sides = [
        reference("quantize").run(Quantize(one, f"{name}@rows", "", rule)).row
        for one, name in ((x, fmt), (w, of_w))
    ]
    case = Case(problem, run, False, bound_of(*sides, dtype, device))
    out = torch.empty((m, n), dtype=dtype, device=device)
    torch_gemm.gemm(*sides, Epilogue(), out, None)
    return case._replace(run=lambda kernel: [out] if kernel is None else run(kernel))


def linear_frozen(data: st.DataObject, device: torch.device) -> Case:
    """On the form that the kernel makes of the weight, where it takes its numbers."""
    m, n, k = (data.draw(SIZES) for _ in range(3))
    x, w = matrix(data, m, k, device), matrix(data, n, k, device)
    of_x, of_w, dtype = data.draw(FORMATS), data.draw(FORMATS), data.draw(FLOATS)
    rule = data.draw(rules_of(of_x))
    problem = Problem(
        "linear_frozen", place_of(device), f"{of_x}@any", f"{of_w}@any", m, n, k, dtype=x.dtype,
        rule=rule,
    )  # fmt: skip
    sides = [
        reference("quantize").run(Quantize(one, f"{name}@rows", "", by)).row
        for one, name, by in ((x, of_x, rule), (w, of_w, data.draw(rules_of(of_w))))
    ]
    out = torch.empty((m, n), dtype=dtype, device=device)
    torch_gemm.gemm(*sides, Epilogue(), out, None)

    def run(kernel: Any) -> list[Tensor] | None:
        form = None if kernel is None else kernel.form(sides[1])
        if form is None:
            return [out]
        made = kernel.make_plan(problem)(FrozenCall(x, form, None, dtype))
        return None if made is None else [made[0]]

    return Case(problem, run, False, bound_of(*sides, dtype, device))


# ----------------------------------------------------------------------------------------- grouped
def split(data: st.DataObject, rows: int, device: torch.device) -> Groups:
    count = data.draw(st.integers(1, 4))
    ends = sorted(data.draw(st.lists(st.integers(0, rows), min_size=count, max_size=count)))
    kind = data.draw(st.sampled_from([torch.int32, torch.int64]))
    return Groups(torch.tensor(ends, dtype=kind, device="cpu"))


def quantize_grouped(data: st.DataObject, device: torch.device) -> Case:
    fmt = data.draw(OF_TOKENS)
    x = matrix(data, data.draw(SIZES), data.draw(SIZES), device)
    groups = split(data, len(x), device)
    row, col = f"{fmt}@rows", f"{fmt}@grouped_cols"
    rule = data.draw(rules_of(fmt))
    what = QuantizeGroups(x, groups, row, col, rule)
    problem = Problem(
        "quantize_grouped", place_of(device), row, col, *x.shape, groups=len(groups.offs),
        ends=ENDS, dtype=x.dtype, rule=rule,
    )  # fmt: skip
    return Case(problem, lambda kernel: tensors_of(kernel.make_plan(problem)(what)))


def quantize_weights(data: st.DataObject, device: torch.device) -> Case:
    fmt = data.draw(FORMATS)
    rows, cols, count = data.draw(SIZES), data.draw(SIZES), data.draw(st.integers(1, 3))
    first = matrix(data, rows, cols, device)
    weights = [first, *(torch.randn_like(first) for _ in range(count - 1))]
    rows_of, cols_of = f"{fmt}@rows", f"{fmt}@cols"
    row, col = data.draw(st.sampled_from([(rows_of, ""), (rows_of, cols_of), ("", cols_of)]))
    rule = data.draw(rules_of(fmt))
    what = QuantizeWeights(weights, row, col, rule)
    problem = Problem(
        "quantize_weights", place_of(device), row, col, rows, cols, groups=count, ends=ENDS,
        dtype=first.dtype, rule=rule,
    )  # fmt: skip
    return Case(problem, lambda kernel: tensors_of(kernel.make_plan(problem)(what)))


def gemm_rows(data: st.DataObject, device: torch.device) -> Case:
    fmt, (rows, n, k) = data.draw(NATIVE_TOKENS), (data.draw(SIZES) for _ in range(3))
    of_weights, rule = fmt.replace("_1x128", "_128x128"), data.draw(rules_of(fmt))
    x = matrix(data, rows, k, device)
    groups = split(data, rows, device)
    count = len(groups.offs)
    weights = [torch.randn(n, k, device=device) for _ in range(count)]
    lhs: Quantized = reference("quantize_grouped").run(
        QuantizeGroups(x, groups, f"{fmt}@rows", "", rule)
    )
    weights_of = QuantizeWeights(weights, f"{of_weights}@rows", "", rule)
    rhs = reference("quantize_weights").run(weights_of)[0]
    assert lhs.row is not None
    problem = Problem(
        "gemm_rows", place_of(device), lhs.row.spec, rhs.spec, rows, n, k, count, ends=ENDS
    )

    def run(kernel: Any) -> list[Tensor] | None:
        out = torch.full((rows, n), torch.nan, device=device)
        call = GroupedRows(lhs.row, rhs, groups, None, out, Mode())
        return None if kernel.make_plan(problem)(call) is None else [out]

    whole = lhs.row.values(torch.float64).abs().sum(1, keepdim=True)
    largest = max(rhs.group(i).values(torch.float64).abs().max() for i in range(count))
    scale = 2.0**-16 if device.type == "cpu" else 2.0**-9
    return Case(problem, run, False, (whole * largest * scale).expand(rows, n) + 2.0**-24)


def gemm_k(data: st.DataObject, device: torch.device) -> Case:
    fmt, (rows, m, n) = data.draw(NATIVE_TOKENS), (data.draw(SIZES) for _ in range(3))
    rule = data.draw(rules_of(fmt))
    groups = split(data, rows, device)
    sides = []
    for cols in (m, n):
        x = torch.randn(rows, cols, device=device)
        what = QuantizeGroups(x, groups, "", f"{fmt}@grouped_cols", rule)
        sides.append(reference("quantize_grouped").run(what).col)
    count = len(groups.offs)
    problem = Problem(
        "gemm_k", place_of(device), sides[0].spec, sides[1].spec, m, n, rows, count, ends=ENDS
    )

    def run(kernel: Any) -> list[Tensor] | None:
        out = torch.full((count, m, n), torch.nan, device=device)
        return (
            None
            if kernel.make_plan(problem)(GroupedK(*sides, groups, out, False, Mode())) is None
            else [out]
        )

    bound = torch.full((count, m, n), 2.0**-12 * (rows + 1), dtype=torch.float64, device=device)
    return Case(problem, run, False, bound)


# ------------------------------------------------------------------------------- routed to experts
def slots(data: st.DataObject, device: torch.device) -> tuple[torch.Tensor, int, int]:
    """(topk_ids, some of no expert, experts, block_m)."""
    experts, block_m = data.draw(st.integers(1, 5)), data.draw(st.sampled_from([1, 4, 6, 16]))
    ids = data.draw(st.lists(st.integers(-1, experts - 1), min_size=1, max_size=40))
    return torch.tensor(ids, dtype=torch.int32, device=device), experts, block_m


def moe_align(data: st.DataObject, device: torch.device) -> Case:
    ids, experts, block_m = slots(data, device)
    local = torch.arange(experts, dtype=torch.int32, device=device) - 1
    what = Align(ids, block_m, experts, data.draw(st.sampled_from([None, local])))
    problem = Problem("moe_align", place_of(device), m=len(ids), n=experts, k=block_m)
    return Case(problem, lambda kernel: tensors_of(kernel.make_plan(problem)(what)))


def moe_gemm(data: st.DataObject, device: torch.device) -> Case:
    fmt, of_w = data.draw(OF_TOKENS), data.draw(FORMATS)
    ids, experts, block_m = slots(data, device)
    n, k, routed = data.draw(SIZES), data.draw(SIZES), len(ids)
    lists = reference("moe_align").run(Align(ids, block_m, experts, None))
    lhs = operand(data, matrix(data, routed, k, device), fmt, "rows")
    each = [operand(data, matrix(data, n, k, device), of_w, "rows") for _ in range(experts)]
    codes, scales = (torch.stack([getattr(w, part) for w in each]) for part in ("codes", "scales"))
    rhs = Stack(codes, scales, each[0].spec, experts, n, k)
    dtype = data.draw(FLOATS)
    weights = torch.rand(routed, device=device) if data.draw(st.booleans()) else None
    problem = Problem(
        "moe_gemm", place_of(device), lhs.spec, rhs.spec, routed, n, k, experts, dtype=dtype
    )

    def run(kernel: Any) -> list[Tensor] | None:
        out = torch.zeros((routed, n), dtype=dtype, device=device)
        call = RoutedGemm(lhs, rhs, Routing(*lists, block_m, 1), None, weights, out, Mode())
        return None if kernel.make_plan(problem)(call) is None else [out]

    bounds = torch.stack([bound_of(lhs, w, dtype, device) for w in each])
    return Case(problem, run, exact=False, bound=bounds.amax(0))


# ------------------------------------------------------------------------------------- fused steps
def target(data: st.DataObject) -> Target:
    fmt = data.draw(FORMATS)
    rule = formats.get(fmt).scaling.rules[0]
    return Target(f"{fmt}@rows", spec(data, fmt, ["", "cols", "rows"]), rule)


def norm_quantize(data: st.DataObject, device: torch.device) -> Case:
    x = matrix(data, data.draw(SIZES), data.draw(SIZES), device)
    weight = torch.randn(x.shape[1], device=device)
    norm = Norm(data.draw(st.sampled_from(["LayerNorm", "RMSNorm"])), 1e-5)
    step = NormStep(x, weight, None, norm, data.draw(FLOATS), True, target(data))
    problem = Problem(
        "norm_quantize", place_of(device), step.target.row, step.target.col, *x.shape,
        dtype=x.dtype, rule=step.target.rule,
    )  # fmt: skip
    return Case(problem, lambda kernel: tensors_of(kernel.make_plan(problem)(step)))


def act_quantize(data: st.DataObject, device: torch.device) -> Case:
    h = matrix(data, data.draw(SIZES), 2 * data.draw(SIZES), device)
    act = Activation(data.draw(st.sampled_from(ACTIVATIONS)))
    step = ActStep(h, None, act, data.draw(FLOATS), True, target(data))
    problem = Problem(
        "act_quantize", place_of(device), step.target.row, step.target.col, *h.shape, dtype=h.dtype,
        rule=step.target.rule,
    )  # fmt: skip
    floor = 2.0**-6 * (1 + float(h.abs().max())) ** 2  # gelu cancels, gates multiply
    # exp and tanh are not the same to the last bit everywhere.
    near = {torch.float32: 2.0**-18, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-9}[step.dtype]
    return Case(
        problem,
        lambda kernel: tensors_of(kernel.make_plan(problem)(step)),
        False,
        None,
        near,
        floor,
    )


CASES = {
    make.__name__: make
    for make in (
        quantize, dequantize, convert, gemm, linear_infer, linear_frozen, quantize_grouped,
        quantize_weights, gemm_rows, gemm_k, moe_align, moe_gemm, norm_quantize, act_quantize,
    )
}  # fmt: skip
# Ops that other tests run, with why.
ELSEWHERE = {
    "layer": "is autograd's: tests/autograd/test_layer_one_call.py and tests/gpu",
    "linear": "is autograd's: tests/autograd/test_linear_one_call.py and tests/gpu",
    "rest": "keeps a weight: tests/gpu/test_sm90_frozen.py",
    "experts": "is a whole mixture, or else steps: tests/gpu/test_sm90_moe_tiles.py",
    "moe_combine": "is the end of mixtures: tests/gpu/test_sm90_moe_tiles.py",
    "act_quantize_grouped": "is act_quantize, then quantize_grouped: tests/gpu/test_sm90_fused.py",
    "norm_rows": "is norm_quantize without codes: tests/gpu/test_sm90_norm_rows.py",
    "norm_backward": "has sums of its own order: tests/backends/reference/test_fused_ops.py",
    "columns_of_weights": "is two other ops: tests/backends/sm90/test_sm90_grouped_plain_path.py",
    "move_ends": "copies a vector to a GPU: tests/gpu/test_sm90_grouped.py",
}

__all__ = ["CASES", "ELSEWHERE", "INTERPRETED", "Case", "layouts", "reference"]

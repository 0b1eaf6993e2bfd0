"""Mixtures on the one copy of MXFP4 and NVFP4 experts on Hopper (layouts/nvfp4.py), for any number
of tokens: slots are sorted by expert, and each product is one of groups of rows (nvfp4.py)."""

from typing import Any

import torch
from torch import Tensor

from te_mx.backends.base import why_not_dtype
from te_mx.backends.native import MX
from te_mx.backends.sm90.envelope import why_not_each
from te_mx.backends.sm90.experts import MOST_EXPERTS, Sorted, put_back, sort_slots
from te_mx.backends.sm90.layouts import SM90_NVFP4
from te_mx.backends.sm90.layouts.nvfp4 import MXFP4
from te_mx.backends.sm90.moe import HopperMoeCombine
from te_mx.backends.sm90.nvfp4 import GATED, PRODUCT, QUANTIZED, FrozenProducts, Product
from te_mx.dispatch import run
from te_mx.dispatch.fused import ActStep, Target
from te_mx.dispatch.kernels import Kernel
from te_mx.dispatch.linear import FrozenCall, Gate
from te_mx.dispatch.moe import Experts, ExpertsKernel, RoutedGemm, in_halves
from te_mx.dispatch.problem import Problem, place_of
from te_mx.dispatch.registry import register
from te_mx.layouts import spec_of
from te_mx.layouts.operand import Stack


def _why_not(problem: Problem) -> str | None:
    reason = why_not_each(problem, ("rows",), (SM90_NVFP4.name,))
    if reason is None and spec_of(problem.rhs).layout is not SM90_NVFP4:
        reason = f"takes weights in the layout {SM90_NVFP4.name}"
    if reason is None and problem.groups > MOST_EXPERTS:
        reason = f"sorts by at most {MOST_EXPERTS} experts, this has {problem.groups}"
    return reason or why_not_dtype(problem)


def _product(
    x: Tensor, weight: Stack, slots: Sorted | Tensor, bias: Tensor | None, dtype: torch.dtype,
    fmt: str = "", rule: str = "rceil", gate: Gate | None = None, gathers: bool = False,
) -> Tensor:  # fmt: skip
    """Sorted rows, quantized to a format or in bf16 as they are, times the weights of experts; or
    rows of slots in their order, each with an expert of its own. gathers: x has the rows of
    tokens."""
    experts, order, ends = (
        (slots, None, None) if isinstance(slots, Tensor) else (None, slots.rows, slots.ends)
    )
    lhs, rows = f"{fmt}@any" if fmt else "", len(slots if order is None else order)
    places = order if gathers and fmt not in ("", MXFP4) else None
    if order is not None and gathers and places is None:
        x = x.index_select(0, order.clamp(0, len(x) - 1))
    problem = Problem(
        "linear_frozen", place_of(x.device), lhs, weight.spec, rows, weight.rows, weight.k,
        weight.groups, dtype=x.dtype, rule=rule,
    )  # fmt: skip
    call = FrozenCall(x, weight, bias, dtype, ends, None, gate)
    each = rows // max(len(x), 1)
    made = FrozenProducts(problem).of_rows(call, places, experts, each, stands=not gathers)
    if made is None:
        raise RuntimeError(f"te_mx internal error: {tuple(x.shape)} times {weight.groups} experts")
    return made[0]


class Mxfp4Experts(ExpertsKernel):
    """Both products, the activation between them as the second one quantizes, or before."""

    name, rank = QUANTIZED, 1

    def accepts(self, problem: Problem) -> str | None:
        return _why_not(problem) if problem.lhs else "quantizes tokens"

    def run(self, what: Experts) -> Tensor:
        first, second, top_k, dtype = what.first, what.second, what.ids.shape[1], what.x.dtype
        how: Any = {"fmt": what.format, "rule": what.rule}
        ids, fused = what.ids.reshape(-1).contiguous(), what.act.base in GATED
        fused = fused and dtype != torch.float32 and what.format not in ("", MXFP4)
        fused = fused and second.k % 8 == 0
        # Where slots hardly share any expert, each is a group of its own.
        slots: Sorted | Tensor = ids
        alone = (fused or not what.format) and what.expert_map is None
        if not alone or 4 * len(ids) > first.groups:
            slots = sort_slots(ids, first.groups, top_k, what.expert_map)
        h = _product(what.x, first, slots, what.biases[0], dtype, gathers=True, **how)
        h = in_halves(h, what.in_pairs)
        values, up = h.chunk(2, 1)
        if fused:
            how["gate"] = Gate(up, what.act.base)
        else:
            step = ActStep(h, None, what.act, dtype, True, Target("", "", what.rule))
            values = run.run_on("act_quantize", h, "", "", dtype, "rceil", step).out
        y = _product(values, second, slots, what.biases[1], torch.float32, **how)
        positions = slots.positions if isinstance(slots, Sorted) else None
        out = HopperMoeCombine().run(y, top_k, dtype, what.weights, positions)
        if out is None:
            raise RuntimeError(f"te_mx internal error: {len(y)} slots, {top_k} a token")
        return out


class WeightOnlyExperts(Mxfp4Experts):
    """The same of tokens as they are."""

    name = PRODUCT

    def accepts(self, problem: Problem) -> str | None:
        reason = Product().accepts(problem)
        if reason is None and spec_of(problem.rhs).layout is not SM90_NVFP4:
            reason = f"takes weights in the layout {SM90_NVFP4.name}"
        if reason is None and problem.dtype == torch.float16 and problem.rhs.startswith(MXFP4):
            reason = f"takes bfloat16 with {MXFP4}"
        if reason is None and problem.groups > MOST_EXPERTS:
            reason = f"sorts by at most {MOST_EXPERTS} experts, this has {problem.groups}"
        return reason


class Mxfp4Routed(Kernel):
    """One product of routed rows, whose codes have values in bf16."""

    op, name = "moe_gemm", QUANTIZED

    def accepts(self, problem: Problem) -> str | None:
        fmt = spec_of(problem.lhs).format.untransformed.name
        return _why_not(problem) or (None if fmt in MX else f"takes tokens in {', '.join(MX)}")

    def prepare_stack(self, stack: Stack, problem: Problem) -> Stack:
        return stack

    def run(self, p: RoutedGemm) -> str:
        experts = p.routing.experts(len(p.out), p.rhs.groups).to(torch.int32)
        slots = sort_slots(experts, p.rhs.groups, p.routing.a_div)
        x = run.dequantize(p.lhs, torch.bfloat16)
        put_back(p, slots, lambda dtype: _product(x, p.rhs, slots, p.bias, dtype, gathers=True))
        return self.name


register(Mxfp4Experts())
register(WeightOnlyExperts())
register(Mxfp4Routed())

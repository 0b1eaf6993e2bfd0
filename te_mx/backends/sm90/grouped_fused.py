"""Activations of groups on Hopper: tiles go to the quantizer of groups without being written."""

from __future__ import annotations

from typing import Any

from te_mx.backends.base import FLOAT_DTYPES as DTYPES
from te_mx.backends.base import matrix, why_not_dtype
from te_mx.backends.native import fields_to
from te_mx.backends.reference.grouped import ActGroupsReference
from te_mx.backends.sm90 import binding
from te_mx.backends.sm90.envelope import why_not
from te_mx.backends.sm90.fused import makes
from te_mx.backends.sm90.grouped import (
    HopperQuantizeGroups,
    check_ends,
    groups_of,
    offs_on_device,
    set_outputs,
)
from te_mx.backends.sm90.grouped_blockwise import BlockwiseQuantizeGroups
from te_mx.dispatch.fused import ACT_IDS
from te_mx.dispatch.grouped_calls import ActGroups
from te_mx.dispatch.kernels import Kernel
from te_mx.dispatch.problem import Problem
from te_mx.dispatch.registry import register
from te_mx.layouts.operand import Quantized

_QUANTIZERS = HopperQuantizeGroups(), BlockwiseQuantizeGroups()


class HopperActGroups(Kernel):
    """In one launch where the fused kernels make what is asked for; else values are written, in
    their dtype, and quantized by groups."""

    op, name = "act_quantize_grouped", "sm90"

    def accepts(self, problem: Problem) -> str | None:
        reason = why_not(problem._replace(lhs="", rhs="", rule="rceil"))
        return reason or why_not_dtype(problem)

    def make_plan(self, problem: Problem) -> Any:
        p = problem
        known = any(kernel.accepts(p) is None for kernel in _QUANTIZERS)
        if known and (p.lhs or p.rhs) and makes(p.lhs, p.rhs, p.rule, p.dtype):
            return ActsOfGroups(p)
        return ActGroupsReference().run


class ActsOfGroups:
    """Activations of groups in matrices of one size, by a record that is made once."""

    __slots__ = ("dtype", "index", "native", "record", "specs")

    def __init__(self, p: Problem) -> None:
        self.native, self.index, self.dtype, self.specs = (
            binding.native(),
            p.place.index,
            p.dtype,
            p[2:4],
        )
        self.record = self.native.ActArgs(
            h_rows=p.m, h_cols=p.n, h_dtype=DTYPES[p.dtype], out_dtype=DTYPES[p.dtype],
            device=self.index, **fields_to(p.lhs, p.rhs, p.rule),
        )  # fmt: skip

    def __call__(self, what: ActGroups) -> Quantized:
        (h, grad, act, dtype, _, target), groups = what
        if h.dtype != dtype or (grad is not None and grad.dtype != dtype):
            return ActGroupsReference().run(what)  # the value in fp32, rounded, quantized
        rows, width = h.shape
        check_ends(groups, rows)
        h, offs = binding.rows_of(h), offs_on_device(groups.offs, h.device)
        cols = width // 2 if act.gated and grad is None else width
        args = self.record.copy(
            h_data=h.data_ptr(), h_row_stride=h.stride(0), act=ACT_IDS[act.base], gated=act.gated,
            limit=act.limit, alpha=act.alpha, offset=act.offset,
            stream=binding.stream(self.index),
        )  # fmt: skip
        if grad is not None:
            grad = binding.rows_of(grad)
            args.grad = matrix(self.native, grad)
        made, _partial = set_outputs(args, *self.specs, (rows, cols), offs, target.col_sum)
        status = self.native.activate_grouped(args, groups_of(offs, groups.capacity, rows))
        if not binding.supported(status):
            return ActGroupsReference().run(what)
        return made


register(HopperActGroups())

"""Groups of rows whose ends the device knows, in Triton. Where the host knows them, groups run one
after the other (backends/reference/grouped.py), each on the kernels of one matrix."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from te_mx.backends.base import why_not_dtype
from te_mx.backends.native import one_read
from te_mx.backends.triton import binding, gemm, tiles
from te_mx.backends.triton.binding import NAME, RANK, cdiv
from te_mx.backends.triton.gemm import GROUP, wholes
from te_mx.backends.triton.quantize import of_rule
from te_mx.dispatch.calls import GroupedK, GroupedRows, QuantizeGroups
from te_mx.dispatch.groups import col_sums_on_device, device_bounds, scale_rows
from te_mx.dispatch.kernels import Kernel, Wants
from te_mx.dispatch.moe import RoutedGemm
from te_mx.dispatch.problem import Problem
from te_mx.dispatch.registry import register
from te_mx.layouts import spec_of
from te_mx.layouts.operand import Operand, Quantized


def _why_not_ends(problem: Problem) -> str | None:
    if problem.ends == "device" and problem.groups:
        return None
    return "is for groups whose ends the device knows; others run one by one"


def _power(groups: int) -> int:
    return 1 << max(groups - 1, 1).bit_length()


class TritonGemmRows(Kernel):
    op, name, rank = "gemm_rows", NAME, RANK

    def accepts(self, problem: Problem) -> str | None:
        return gemm.why_not_pair(problem) or _why_not_ends(problem)

    def wants(self, problem: Problem) -> Wants:
        return Wants("rows", "grouped_cols")

    def run(self, p: GroupedRows) -> str:
        rows, n = p.out.shape
        starts, ends = device_bounds(*p.groups, rows)
        words = gemm.multiplied(p.lhs, p.rhs, cdiv(rows, len(ends)))
        slots = scale_rows(rows, len(ends), words["BM"])
        out = p.out.contiguous().zero_()
        bias = out if p.bias is None else p.bias.contiguous()
        binding.kernels("grouped").gemm_rows[(slots * cdiv(n, words["BN"]),)](
            p.lhs.codes, p.lhs.scales, p.rhs.codes, p.rhs.scales, out, bias, starts, ends,
            len(ends), slots * words["BM"], n, p.lhs.k, b_group=p.rhs.codes.stride(0),
            bs_group=p.rhs.scales.stride(0), **words, BIAS=p.bias is not None, GROUP=GROUP,
            MOST=_power(len(ends)), **wholes(p.lhs, p.rhs),
        )  # fmt: skip
        if out is not p.out:
            p.out.copy_(out)
        return self.name


class TritonGemmK(Kernel):
    op, name, rank = "gemm_k", NAME, RANK

    def accepts(self, problem: Problem) -> str | None:
        return gemm.why_not_pair(problem, "grouped_cols") or _why_not_ends(problem)

    def wants(self, problem: Problem) -> Wants:
        return Wants("rows", "grouped_cols")

    def run(self, p: GroupedK) -> str:
        groups, m, n = p.out.shape
        starts, ends = device_bounds(*p.groups, p.lhs.k)
        words = gemm.multiplied(p.lhs, p.rhs, m) | {"EVEN": False}
        out = p.out.contiguous()
        binding.kernels("grouped").gemm_k[cdiv(m, words["BM"]) * cdiv(n, words["BN"]), groups](
            p.lhs.codes, p.lhs.scales, p.rhs.codes, p.rhs.scales, out, starts, ends, m, n, **words,
            ACCUMULATE=p.accumulate, BLOCK=p.lhs.format.block, GROUP=GROUP,
            **wholes(p.lhs, p.rhs),
        )  # fmt: skip
        if out is not p.out:
            p.out.copy_(out)
        return self.name


class TritonRouted(Kernel):
    """Rows that lists route to experts, in one launch: weights are read once a block of a list."""

    op, name, rank = "moe_gemm", NAME, RANK

    def accepts(self, problem: Problem) -> str | None:
        return gemm.why_not_pair(problem)

    def run(self, p: RoutedGemm) -> str:
        ids, experts, count, block_m, a_div, _ = p.routing
        routed, n = p.out.shape
        # Without a list every row is a block.
        size, blocks = (
            (block_m, len(experts)) if ids is not None else (1, min(routed, len(experts)))
        )
        words = gemm.multiplied(p.lhs, p.rhs, size)
        few = tiles.tile(p.out.device.index or 0, words["MX"], 1).m
        words["BM"] = min(max(words["BM"], 32), max(few, _power(size)))
        grid = blocks * cdiv(size, words["BM"]) * cdiv(n, words["BN"])
        out, experts = p.out.contiguous(), experts.contiguous()
        bias, weights = (out if one is None else one.contiguous() for one in (p.bias, p.weights))
        if grid:
            binding.kernels("grouped").gemm_routed[(grid,)](
                p.lhs.codes, p.lhs.scales, p.rhs.codes, p.rhs.scales, out, bias, weights,
                experts if ids is None else ids, experts, count, p.lhs.rows, routed, blocks,
                0 if ids is None else len(ids), n, p.lhs.k, block_m, size, a_div, p.rhs.groups,
                b_group=p.rhs.codes.stride(0), bs_group=p.rhs.scales.stride(0), **words,
                LISTED=ids is not None, BIAS=p.bias is not None, WEIGHTED=p.weights is not None,
                GROUP=GROUP, **wholes(p.lhs, p.rhs),
            )  # fmt: skip
        if out is not p.out:
            p.out.copy_(out)
        return self.name


class TritonQuantizeGroups(Kernel):
    """Both directions from one read, a program for 32 (blockwise FP8: 128) rows of a group."""

    op, name, rank = "quantize_grouped", NAME, RANK

    def accepts(self, problem: Problem) -> str | None:
        reason = binding.why_not(problem, "grouped_cols") or _why_not_ends(problem)
        if reason is None and not (problem.lhs or problem.rhs):
            reason = "makes codes"
        if reason is None and spec_of(problem.lhs or problem.rhs).format.scaling.block[0] > 1:
            reason = "makes blocks of one row"
        return reason or one_read(problem.lhs, problem.rhs) or why_not_dtype(problem)

    def run(self, what: QuantizeGroups) -> Quantized:
        x = what.x.detach().resolve_neg()
        x = x if x.stride(1) == 1 else x.contiguous()
        (rows, cols), offs = x.shape, what.groups.offs
        starts, ends = device_bounds(*what.groups, rows)
        fmt = spec_of(what.row or what.col).format
        row = _zeros(what.row, rows, cols, len(ends), x) if what.row else None
        col = _zeros(what.col, cols, rows, len(ends), x) if what.col else None
        words: dict[str, Any] = of_rule(fmt, what.rule)
        family = "blockwise" if fmt.scaling.scale == "fp32" else "mx"
        words["HARDWARE"] = binding.casts(fmt.element, x.device)
        kernel = getattr(binding.kernels("quantize"), f"quantize_{family}")
        nothing = x, x
        kernel[cdiv(cols, 128), scale_rows(rows, len(ends), fmt.block)](
            x, *(nothing if row is None else row[:2]), *(nothing if col is None else col[:2]),
            rows, cols, x.stride(0), **words, ROW=row is not None, COL=col is not None,
            TURNED=False, R=fmt.block, C=128, starts=starts, ends=ends, groups=len(offs),
            GROUPS=_power(len(offs)),
        )  # fmt: skip
        sums = col_sums_on_device(x, starts, ends) if what.col_sum else None
        return Quantized(row, col, sums)


def _zeros(spec: str, rows: int, k: int, groups: int, x: Tensor) -> Operand:
    fmt, layout = spec_of(spec)
    codes, scales = layout.grouped_empty(fmt, rows, k, groups, x.device)
    return Operand(codes.zero_(), scales.zero_(), spec, rows, k)


register(TritonGemmRows())
register(TritonGemmK())
register(TritonRouted())
register(TritonQuantizeGroups())

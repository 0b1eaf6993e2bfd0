"""Groups of rows whose ends the device knows, in Triton. Where the host knows them, groups run one
after the other (backends/reference/grouped.py), each on the kernels of one matrix."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from te_mx.backends.base import why_not_dtype
from te_mx.backends.native import one_read
from te_mx.backends.triton import binding, gemm, tiles
from te_mx.backends.triton.binding import NAME, RANK, cdiv
from te_mx.backends.triton.fused import activation
from te_mx.backends.triton.gemm import GROUP, wholes
from te_mx.backends.triton.quantize import launch, rows_of
from te_mx.dispatch.calls import ActGroups, GroupedK, GroupedRows, Quantize, QuantizeGroups
from te_mx.dispatch.groups import col_sums_on_device, device_bounds, scale_rows
from te_mx.dispatch.kernels import Kernel, PreferredLayouts
from te_mx.dispatch.moe import Align, RoutedGemm, capacity
from te_mx.dispatch.problem import Problem
from te_mx.dispatch.registry import register
from te_mx.layouts import spec_of
from te_mx.layouts.operand import Quantized

_SLOTS, _MOST_EXPERTS = 1024, 4096  # that a program reads at a time, and sorts by


def _why_not_ends(problem: Problem) -> str | None:
    if problem.ends == "device" and problem.groups:
        return None
    return "is for groups whose ends the device knows; others run one by one"


def _power(groups: int) -> int:
    return 1 << max(groups - 1, 1).bit_length()


class TritonGemmRows(Kernel):
    op, name, rank = "gemm_rows", NAME, RANK

    def accepts(self, problem: Problem) -> str | None:
        return gemm.why_not_pair(problem, *gemm.VALUES) or _why_not_ends(problem)

    def preferred_layouts(self, problem: Problem) -> PreferredLayouts:
        return PreferredLayouts("rows", "grouped_cols")

    def run(self, p: GroupedRows) -> str:
        rows, n = p.out.shape
        starts, ends = device_bounds(*p.groups, rows)
        words = gemm.multiplied(p.lhs, p.rhs, cdiv(rows, len(ends)))
        slots = scale_rows(rows, len(ends), words["BM"])
        out = p.out.contiguous().zero_()
        bias = out if p.bias is None else p.bias.contiguous()
        binding.kernels("grouped").gemm_rows[(slots * cdiv(n, words["BN"]),)](
            *gemm.read(p.lhs), *gemm.read(p.rhs), out, bias, starts, ends,
            len(ends), slots * words["BM"], n, p.lhs.k, b_group=gemm.read(p.rhs)[0].stride(0),
            bs_group=p.rhs.scales.stride(0), **words, BIAS=p.bias is not None, GROUP=GROUP,
            MOST=_power(len(ends)), **wholes(p.lhs, p.rhs),
        )  # fmt: skip
        if out is not p.out:
            p.out.copy_(out)
        return self.name


class TritonGemmK(Kernel):
    op, name, rank = "gemm_k", NAME, RANK

    def accepts(self, problem: Problem) -> str | None:
        layouts = "grouped_cols", *gemm.VALUES
        return gemm.why_not_pair(problem, *layouts) or _why_not_ends(problem)

    def preferred_layouts(self, problem: Problem) -> PreferredLayouts:
        return PreferredLayouts("rows", "grouped_cols")

    def run(self, p: GroupedK) -> str:
        groups, m, n = p.out.shape
        starts, ends = device_bounds(*p.groups, p.lhs.k)
        words = gemm.multiplied(p.lhs, p.rhs, m) | {"EVEN": False}
        out = p.out.contiguous()
        binding.kernels("grouped").gemm_k[cdiv(m, words["BM"]) * cdiv(n, words["BN"]), groups](
            *gemm.read(p.lhs), *gemm.read(p.rhs), out, starts, ends, m, n, **words,
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
        few = tiles.tile(p.out.device.index or 0, words["MX"], 1, n).m
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


class TritonAlign(Kernel):
    """Slots sorted by expert, in two launches."""

    op, name, rank = "moe_align", NAME, RANK

    def accepts(self, problem: Problem) -> str | None:
        if problem.n > _MOST_EXPERTS:
            return f"knows up to {_MOST_EXPERTS} experts"
        return binding.why_not(problem)

    def run(self, p: Align) -> tuple[Tensor, Tensor, Tensor]:
        ids, (routed, block, experts) = p.topk_ids.contiguous(), (len(p.topk_ids), *p[1:3])
        positions = capacity(routed, block, experts)
        sizes = experts, positions, cdiv(positions, block), 1
        counts, *lists = (torch.empty(n, dtype=torch.int32, device=ids.device) for n in sizes)
        local = ids if p.expert_map is None else p.expert_map.contiguous()
        kernels = binding.kernels("grouped")
        kernels.count_slots[(experts,)](ids, counts, routed, C=_SLOTS)
        kernels.align_slots[(experts,)](
            ids, counts, local, *lists, routed, experts, block, *sizes[1:3],
            MAPPED=p.expert_map is not None, MOST=_power(experts), C=_SLOTS,
        )  # fmt: skip
        return lists[0], lists[1], lists[2]


class _Quantizer(Kernel):
    """Both directions from one read, a program for 32 (blockwise FP8: 128) rows of a group; of
    NVFP4 after one for the largest magnitudes of groups."""

    name, rank = NAME, RANK

    def accepts(self, problem: Problem) -> str | None:
        problem = problem._replace(op="quantize_grouped")
        reason = binding.why_not(problem, "grouped_cols") or _why_not_ends(problem)
        if reason is None and not (problem.lhs or problem.rhs):
            reason = "makes codes"
        if reason is None:
            fmt = spec_of(problem.lhs or problem.rhs).format.untransformed
            if fmt.scaling.block[0] > 1 or fmt.name == "nvfp4_rows":
                reason = "makes blocks of one row, with tensor scales of groups"
        return reason or one_read(problem.lhs, problem.rhs) or why_not_dtype(problem)

    def made(
        self, what: QuantizeGroups, shape: Sequence[int], dtype: torch.dtype, step: dict[str, Any]
    ) -> Quantized:
        """Groups of x or of what a step makes of it, whose values are kept where they are added."""
        x = what.x
        if what.col_sum and "STEP" in step:
            x = step["out"] = torch.zeros(shape, dtype=dtype, device=x.device)
        bounds = device_bounds(*what.groups, shape[0])
        asked = Quantize(what.x, what.row, what.col, what.rule, seed=what.seed)
        made = launch(asked, shape, dtype, step, bounds)
        return Quantized(*made, col_sums_on_device(x, *bounds) if what.col_sum else None)


class TritonQuantizeGroups(_Quantizer):
    op = "quantize_grouped"

    def run(self, what: QuantizeGroups) -> Quantized:
        x = rows_of(what.x)
        return self.made(what, x.shape, x.dtype, {"x": x, "stride": x.stride(0)})


class TritonActGroups(_Quantizer):
    """An activation, or its derivative, in the quantizer's read."""

    op = "act_quantize_grouped"

    def run(self, what: ActGroups) -> Quantized:
        shape, words = activation(what.step)
        row, col, rule, col_sum, seed = what.step.target
        asked = QuantizeGroups(what.step.h, what.groups, row, col, rule, col_sum, seed)
        return self.made(asked, shape, what.step.dtype, words)


register(TritonGemmRows())
register(TritonGemmK())
register(TritonRouted())
register(TritonAlign())
register(TritonQuantizeGroups())
register(TritonActGroups())

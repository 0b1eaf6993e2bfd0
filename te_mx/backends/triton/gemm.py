"""GEMMs in Triton: MX formats by dot_scaled, blockwise FP8 by dot and factors."""

import importlib
import importlib.util
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from te_mx.backends.base import why_not_dtype
from te_mx.backends.native import one_read
from te_mx.backends.triton import binding, tiles
from te_mx.backends.triton.binding import NAME, RANK, cdiv
from te_mx.backends.triton.quantize import activation, launch, rows_of
from te_mx.dispatch.calls import (
    ActGroups,
    GroupedK,
    GroupedRows,
    Product,
    Quantize,
    QuantizeGroups,
    Ran,
)
from te_mx.dispatch.groups import col_sums_on_device, device_bounds, scale_rows
from te_mx.dispatch.kernels import Kernel, PreferredLayouts
from te_mx.dispatch.moe import Align, RoutedGemm, capacity
from te_mx.dispatch.problem import Problem
from te_mx.dispatch.registry import register
from te_mx.layouts import spec_of
from te_mx.layouts.operand import Operand, Quantized, Stack

VALUES = "sm90_bf16", "sm90_bf16_cols"  # codes times block scales, as Hopper quantizes NVFP4
GROUP, _GROUP = 8, 4  # tiles of rows that share columns of b in L2; with tiles by descriptors
_FLAGS = "BIAS", "AUX", "GELU", "DGELU", "ERF", "ACCUMULATE"
_FACTORS = "as_row", "as_k", "bs_row", "bs_k", "A_HEIGHT", "B_HEIGHT"
_ENDS = 16, 128  # rows and columns a program adds up the parts of


def read(operand: Operand | Stack) -> tuple[Tensor, Tensor]:
    """Codes, or values in bf16, and scales, as kernels read them."""
    codes = operand.codes
    return codes.view(torch.bfloat16) if is_values(operand) else codes, operand.scales


def is_values(operand: Operand | Stack) -> bool:
    """Whether it has no codes, but what these stand for without tensor scales."""
    return operand.layout.name in VALUES


def dtype_of(operand: Operand | Stack, decoded: str) -> Any:
    """The element as multiply_mx or multiply_blockwise know it."""
    if is_values(operand):
        return "bf16"
    element, scale = operand.format.element, operand.format.scaling.scale
    if scale != "fp32" or decoded:
        return element.name
    tl = binding.kernels("gemm").tl
    return {
        "e4m3": tl.float8e4nv, "e5m2": tl.float8e5, "e4m3fnuz": tl.float8e4b8,
        "e5m2fnuz": tl.float8e5b16,
    }[element.name]  # fmt: skip


def _is_loose(operand: Operand | Stack) -> bool:
    """Whether codes of 4 bits lie one a byte."""
    return operand.format.element.bits == 4 and operand.layout.k_first


def strides(operand: Operand | Stack) -> tuple[int, ...]:
    """How far apart rows and k lie, of codes (bytes) and of scales."""
    step = -1 if operand.layout.k_first else 1
    codes, scales = read(operand)
    of_scales = (0, 0) if is_values(operand) else scales.stride()[-2:][::step]
    return codes.stride()[-2:][::step] + of_scales


def multiplied(lhs: Operand | Stack, rhs: Operand | Stack, rows: int) -> dict[str, Any]:
    """What kernels ask of two operands; rows: of a product, which tiles are chosen by."""
    a_first, b_first = lhs.layout.k_first, rhs.layout.k_first
    mx = lhs.format.scaling.scale != "fp32"
    decoded = binding.decoded(lhs.format, rhs.format, lhs.codes.device)
    a_row, a_k, as_row, as_k = strides(lhs)
    b_row, b_k, bs_row, bs_k = strides(rhs)
    tile = tiles.tile(lhs.codes.device.index or 0, mx, rows, rhs.rows)
    # Rows that lie behind each other and do not fill a tile are masked.
    ragged = (a_first and lhs.rows % tile.m) or (b_first and rhs.rows % tile.n)
    return {
        "EVEN": not (lhs.k % tile.k or ragged), "A_FIRST": a_first, "B_FIRST": b_first,
        "MX": mx, "DECODED": decoded, "A_BLOCK": lhs.format.block, "B_BLOCK": rhs.format.block,
        "A_LOOSE": _is_loose(lhs), "B_LOOSE": _is_loose(rhs),
        "a_row": a_row, "a_k": a_k, "b_row": b_row, "b_k": b_k, "as_row": as_row, "as_k": as_k,
        "bs_row": bs_row, "bs_k": bs_k, "A": dtype_of(lhs, decoded),
        "B": dtype_of(rhs, decoded),
        "A_HEIGHT": lhs.format.scaling.block[0], "B_HEIGHT": rhs.format.scaling.block[0],
        **tile.options,
    }  # fmt: skip


@lru_cache(maxsize=1)
def _descriptor() -> Any:
    """What makes descriptors of tiles; None in a Triton that has none."""
    name = "triton.tools.tensor_descriptor"
    found = importlib.util.find_spec("triton.tools") and importlib.util.find_spec(name)
    return importlib.import_module(name).TensorDescriptor.from_tensor if found else None


def descriptors(lhs: Operand, rhs: Operand, m: int, decoded: str) -> Any:
    """Both sides of a product of blockwise FP8 as descriptors, what the kernel asks for its tiles,
    and how many programs run; None where a GPU has none, or they do not lie by whole 16 bytes."""
    kind, processors = tiles.target(lhs.codes.device.index or 0)
    sides = lhs, rhs
    if kind not in tiles.BY_TMA or m <= tiles.FEW_ROWS or decoded or _descriptor() is None:
        return None
    for one in sides:
        dtype, row = one.format.element.torch_dtype, one.codes.stride(0)
        fits = one.format.scaling.scale == "fp32" and not one.layout.k_first
        if not (fits and dtype) or row % 16 or one.codes.data_ptr() % 16:
            return None
    tile, each = tiles.BY_TMA[kind]
    made = [
        _descriptor()(one.codes.view(one.format.element.torch_dtype or torch.uint8), [high, tile.k])
        for one, high in zip(sides, (tile.m, tile.n), strict=True)
    ]
    count = cdiv(lhs.rows, tile.m) * cdiv(rhs.rows, tile.n)
    return made, tile.options, min(count, each * processors)


def why_not_pair(problem: Problem, *layouts: str) -> str | None:
    """Why no kernel multiplies two formats or writes a dtype; None when one does."""
    reason = binding.why_not(problem, *layouts) or why_not_dtype(problem, "writes")
    if reason is not None:
        return reason
    lhs, rhs = spec_of(problem.lhs).format, spec_of(problem.rhs).format
    if rhs.name == "nvfp4_rows":
        return "takes tensor scales by rows on the left alone"
    if (lhs.scaling.scale == "fp32") != (rhs.scaling.scale == "fp32") or (
        lhs.transform != rhs.transform
    ):
        return f"multiplies formats of one family, not {lhs} and {rhs}"
    fnuz = ["fnuz" in one.element.name for one in (lhs, rhs)]
    if fnuz[0] != fnuz[1]:
        return f"multiplies elements of one kind, not {lhs} and {rhs}"
    return None


class TritonGemm(Kernel):
    """TN, NN and NT, of every pair of MX formats and of blockwise formats."""

    op, name, rank = "gemm", NAME, RANK

    def accepts(self, problem: Problem) -> str | None:
        return why_not_pair(problem)

    def preferred_layouts(self, problem: Problem) -> PreferredLayouts:
        return PreferredLayouts("rows", "rows")

    def parts(self, problem: Problem) -> int:
        mx = spec_of(problem.lhs).format.scaling.scale != "fp32"
        return tiles.parts(max(problem.place.index, 0), mx, problem.m, problem.n, problem.k)

    def run(self, p: Product) -> Ran:
        (bias, gelu, gelu_in, bias_grad, accumulate), (m, n) = p.epilogue, p.out.shape
        words = multiplied(p.lhs, p.rhs, m)
        # Sums over the rows of a result that is not rounded yet need it in fp32.
        whole = bias_grad == "result" and (p.out.dtype != torch.float32 or accumulate)
        direct = p.out.is_contiguous() and not whole
        out = p.out if direct else torch.empty_like(p.out, dtype=torch.float32).contiguous()
        aux = None if p.aux is None else p.aux.contiguous()  # its own memory, or room for it
        ends = out, _or(bias, out), _or(aux, out), _or(gelu_in, out)
        finish = {
            "BIAS": bias is not None, "AUX": aux is not None,
            "GELU": gelu is not None and gelu_in is None, "DGELU": gelu_in is not None,
            "ERF": gelu == "erf", "ACCUMULATE": accumulate and direct, **wholes(p.lhs, p.rhs),
        }  # fmt: skip
        sides = p.lhs.codes, p.lhs.scales, p.rhs.codes, p.rhs.scales
        count = cdiv(m, words["BM"]) * cdiv(n, words["BN"])
        parts, kernels = 1, binding.kernels("gemm")
        if p.mode.split_k:
            parts = tiles.parts(out.device.index or 0, words["MX"], m, n, p.lhs.k)
        by_tma = None if parts > 1 else descriptors(p.lhs, p.rhs, m, words["DECODED"])
        if by_tma is not None:
            (a, b), options, programs = by_tma
            kernels.gemm_blocks[(programs,)](
                a, sides[1], b, sides[3], *ends, m, n, p.lhs.k,
                **{name: words[name] for name in _FACTORS}, **finish, **options, GROUP=_GROUP,
            )  # fmt: skip
        elif parts == 1:
            kernels.gemm[(count,)](*sides, *ends, m, n, p.lhs.k, **words, **finish, GROUP=GROUP)
        else:
            sums = torch.empty((parts, m, n), dtype=torch.float32, device=out.device)
            kernels.gemm[count, parts](
                *sides, *(sums,) * 4, m, n, p.lhs.k, **words, **dict.fromkeys(_FLAGS, False),
                GROUP=GROUP, SPLIT=True,
            )  # fmt: skip
            kernels.add_parts[cdiv(n, _ENDS[1]), cdiv(m, _ENDS[0])](
                sums, *ends, m, n, parts, **finish, BM=_ENDS[0], BN=_ENDS[1]
            )
        bias_sums = None
        if bias_grad == "result":
            bias_sums = out.sum(0, dtype=torch.float32)
        elif bias_grad == "operand":
            bias_sums = p.lhs.values(torch.float32).sum(1)
        if not direct:
            p.out.copy_(out + p.out.float() if accumulate else out)
        if aux is not None and p.aux is not None and aux is not p.aux:
            p.aux.copy_(aux)
        return Ran(self.name, bias_sums)


def wholes(lhs: Operand, rhs: Operand | Stack) -> dict[str, Any]:
    """The tensor scales of both sides, where one has any: of a stack and of tokens in groups those
    of all groups."""
    a, b = lhs.tensor_scale, rhs.tensor_scale
    if a is None and b is None:
        return {}
    one = torch.ones(1, device=lhs.codes.device)
    a, b = (one if side is None else side.contiguous() for side in (a, b))
    return {"a_whole": a, "b_whole": b, "by_rows": int(a.dim() == 2), "WHOLE": True}


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """What is read, contiguous; where nothing is, something that is not touched."""
    return other if tensor is None else tensor.contiguous()


register(TritonGemm())


# ------------------------------------------------------------------------------------------ groups
# Groups of rows whose ends the device knows, in Triton. Where the host knows them, groups run one
# after the other (backends/reference/grouped.py), each on the kernels of one matrix.
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
        return why_not_pair(problem, *VALUES) or _why_not_ends(problem)

    def preferred_layouts(self, problem: Problem) -> PreferredLayouts:
        return PreferredLayouts("rows", "grouped_cols")

    def run(self, p: GroupedRows) -> str:
        rows, n = p.out.shape
        starts, ends = device_bounds(*p.groups, rows)
        words = multiplied(p.lhs, p.rhs, cdiv(rows, len(ends)))
        slots = scale_rows(rows, len(ends), words["BM"])
        out = p.out.contiguous().zero_()
        bias = out if p.bias is None else p.bias.contiguous()
        binding.kernels("grouped").gemm_rows[(slots * cdiv(n, words["BN"]),)](
            *read(p.lhs), *read(p.rhs), out, bias, starts, ends,
            len(ends), slots * words["BM"], n, p.lhs.k, b_group=read(p.rhs)[0].stride(0),
            bs_group=p.rhs.scales.stride(0), **words, BIAS=p.bias is not None, GROUP=GROUP,
            MOST=_power(len(ends)), **wholes(p.lhs, p.rhs),
        )  # fmt: skip
        if out is not p.out:
            p.out.copy_(out)
        return self.name


class TritonGemmK(Kernel):
    op, name, rank = "gemm_k", NAME, RANK

    def accepts(self, problem: Problem) -> str | None:
        layouts = "grouped_cols", *VALUES
        return why_not_pair(problem, *layouts) or _why_not_ends(problem)

    def preferred_layouts(self, problem: Problem) -> PreferredLayouts:
        return PreferredLayouts("rows", "grouped_cols")

    def run(self, p: GroupedK) -> str:
        groups, m, n = p.out.shape
        starts, ends = device_bounds(*p.groups, p.lhs.k)
        words = multiplied(p.lhs, p.rhs, m) | {"EVEN": False}
        out = p.out.contiguous()
        binding.kernels("grouped").gemm_k[cdiv(m, words["BM"]) * cdiv(n, words["BN"]), groups](
            *read(p.lhs), *read(p.rhs), out, starts, ends, m, n, **words,
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
        return why_not_pair(problem)

    def run(self, p: RoutedGemm) -> str:
        ids, experts, count, block_m, a_div, _ = p.routing
        routed, n = p.out.shape
        # Without a list every row is a block.
        size, blocks = (
            (block_m, len(experts)) if ids is not None else (1, min(routed, len(experts)))
        )
        words = multiplied(p.lhs, p.rhs, size)
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

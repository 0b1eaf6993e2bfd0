"""NVFP4 on Hopper, several matrices at once: quantizers of the tokens and of the weights of groups,
in two launches each, and the products of what they write."""

from typing import Any

import torch
from torch import Tensor

from te_mx.backends.base import FLOAT_DTYPES, pointer, typed_address
from te_mx.backends.reference.grouped import GemmKReference, GemmRowsReference
from te_mx.backends.sm90 import binding, grouped
from te_mx.backends.sm90.layouts.nvfp4 import SM90_VALUES
from te_mx.backends.sm90.nvfp4 import PRODUCT, VALUES, Gemm, HopperNvfp4, is_tall, quantizer_fields
from te_mx.dispatch.calls import (
    GroupedK,
    GroupedRows,
    QuantizeGroups,
    QuantizeWeights,
    StackedParts,
)
from te_mx.dispatch.groups import Bounds, host_bounds
from te_mx.dispatch.kernels import Kernel, PreferredLayouts
from te_mx.dispatch.problem import Problem
from te_mx.dispatch.registry import register
from te_mx.formats.scaling import is_stochastic
from te_mx.layouts import spec_of
from te_mx.layouts.operand import Operand, Quantized, Stack
from te_mx.runtime import workspace


def quantize_groups(what: QuantizeGroups) -> Quantized:
    """The tokens of all groups, which are not empty, each with tensor scales of its own."""
    x, (offs, capacity), row, col, rule, col_sum, seed = what
    grouped.check_ends(what.groups, len(x))
    (rows, cols), groups, device = x.shape, len(offs), x.device
    x, offs = binding.rows_of(x), grouped.offs_on_device(offs, device)
    fields, words = quantizer_fields(row, col, rows, cols, x.dtype, rule)
    amax = torch.empty(words + 2 * groups, dtype=torch.int32, device=device)
    args = binding.native().Nvfp4QuantizeArgs(
        x_data=x.data_ptr(), x_row_stride=x.stride(0), seed=pointer(seed), amax=amax.data_ptr(),
        **fields,
    )  # fmt: skip
    binding.set_execution(args, device.index)
    args.groups = grouped.groups_of(offs, capacity, rows)
    made: dict[str, Operand] = {}
    for side, spec, n, k in (("row", row, rows, cols), ("col", col, cols, rows)):
        if spec:
            fmt, layout = spec_of(spec)
            codes, scales = layout.grouped_empty(fmt, n, k, groups, device)
            shape = fmt.tensor_scale_shape(n) or (groups,)
            whole = torch.empty(shape, dtype=torch.float32, device=device)
            made[side] = Operand(codes, scales, spec, n, k, None, whole)
            _set_side(args, side, made[side])
    status = binding.native().nvfp4_quantize(args)
    binding.expect(status, f"{groups} groups of rows of {tuple(x.shape)}")
    sums = None
    if col_sum:
        sums = grouped.quantize_groups(what._replace(x=x, row="", col="", seed=None)).col_sum
    return Quantized(made.get("row"), made.get("col"), sums)


def _set_side(args: Any, side: str, to: Operand | Stack) -> None:
    """Write where one direction goes into a quantizer's record."""
    setattr(args, f"{side}_k_first", to.layout.k_first)
    setattr(args, f"{side}_codes", to.codes.data_ptr())
    setattr(args, f"{side}_scales", 0 if to.layout in SM90_VALUES else to.scales.data_ptr())
    assert to.tensor_scale is not None
    setattr(args, f"{side}_scale", to.tensor_scale.data_ptr())


def quantize_weights(what: QuantizeWeights) -> StackedParts:
    """The weights of all groups, which are not empty."""
    weights, row, col, rule = what
    groups, (rows, cols), device = len(weights), weights[0].shape, weights[0].device
    addresses, stride, dtype, _alive = grouped.sources(weights)
    fields, words = quantizer_fields(row, col, rows, cols, dtype, rule)
    amax = torch.empty(groups * words, dtype=torch.int32, device=device)
    args = binding.native().Nvfp4QuantizeArgs(x_row_stride=stride, amax=amax.data_ptr(), **fields)
    binding.set_execution(args, device.index)
    made: dict[str, Stack] = {}
    for side, spec, n, k in (("row", row, rows, cols), ("col", col, cols, rows)):
        if not spec:
            continue
        fmt, layout = spec_of(spec)
        of_codes, of_scales = layout.shapes(fmt, n, k)
        codes, scales = (
            torch.empty((groups, *shape), dtype=torch.uint8, device=device)
            for shape in (of_codes, of_scales)
        )
        shape = groups, *fmt.tensor_scale_shape(n)
        whole = torch.empty(shape, dtype=torch.float32, device=device)
        made[side] = Stack(codes, scales, spec, groups, n, k, None, whole)
        _set_side(args, side, made[side])
    status = binding.native().nvfp4_quantize_stacked(args, addresses)
    binding.expect(status, f"{groups} weights of {(rows, cols)}")
    return made.get("row"), made.get("col")


class HopperNvfp4Groups(Kernel):
    """Tokens of groups, in one launch for magnitudes and one for codes."""

    op, name = "quantize_grouped", PRODUCT

    def accepts(self, problem: Problem) -> str | None:
        col = problem.rhs.replace("@grouped_cols", "@cols")
        reason = HopperNvfp4().accepts(problem._replace(rhs=col))
        specs = [spec for spec in (problem.lhs, problem.rhs) if spec]
        if reason is None and any(map(is_tall, specs)):
            reason = "takes blocks of one row"
        return reason or _why_not_columns(problem.rhs, ("grouped_cols", VALUES[1]))

    def run(self, what: QuantizeGroups) -> Quantized:
        return quantize_groups(what)


class HopperNvfp4Weights(Kernel):
    """The weights of all groups, likewise: 64 of them a launch."""

    op, name = "quantize_weights", PRODUCT

    def accepts(self, problem: Problem) -> str | None:
        reason = HopperNvfp4().accepts(problem)
        if reason is None and is_stochastic(problem.rule):
            reason = "rounds weights to nearest even"
        return reason or _why_not_columns(problem.rhs, ("cols", VALUES[1]))

    def run(self, what: QuantizeWeights) -> StackedParts:
        return quantize_weights(what)


def _why_not_columns(spec: str, layouts: tuple[str, ...]) -> str | None:
    """Of several matrices, whose columns lie as they do."""
    if not spec:
        return None
    fmt, layout = spec_of(spec)
    if layout.name not in layouts:
        return f"writes columns as {' and '.join(layouts)}, not as {layout.name}"
    return "has one scale for columns of a group" if fmt.tensor_scale_shape(1) != () else None


def _why_not_each_group(problem: Problem, rhs: str) -> str | None:
    if problem.ends == "device":
        return "multiplies groups one after the other, whose ends the host knows"
    return Gemm().accepts(problem._replace(op="gemm", rhs=rhs))


class _Each:
    """Products of groups one after the other, of values as they lie, by cublasLt."""

    def __init__(self, out: Tensor, lhs: Operand, rhs: Operand | Stack, **fields: Any) -> None:
        self.native, self.device = binding.native(), out.device
        self.lhs, self.rhs, self.nbytes = lhs, rhs, self.native.nvfp4_multiply_workspace()
        wholes = lhs.tensor_scale, rhs.tensor_scale
        self.fits = out.is_contiguous() and all(
            one is not None and one.dim() == 1 for one in wholes
        )
        self.scratch = workspace.acquire(out.device, self.nbytes)
        self.record = self.native.Nvfp4MultiplyArgs(
            n=rhs.rows, ldo=rhs.rows, out_dtype=FLOAT_DTYPES[out.dtype],
            workspace=pointer(self.scratch), workspace_bytes=self.nbytes, **fields,
        )  # fmt: skip
        binding.set_execution(self.record, out.device.index)

    def run(self, groups: list[dict[str, Any]]) -> bool:
        """False where nothing was done: there is a product that cublasLt does not take."""
        of_lhs, of_rhs = pointer(self.lhs.tensor_scale), pointer(self.rhs.tensor_scale)
        calls = [
            self.record.copy(of_lhs=of_lhs + 4 * i, of_rhs=of_rhs + 4 * i, **fields)
            for i, fields in enumerate(groups)
            if fields
        ]
        native, fits = self.native, self.fits
        fits = fits and all(binding.supported(native.nvfp4_multiplies(one)) for one in calls)
        for one in calls if fits else ():
            binding.expect(native.nvfp4_multiply(one), "products of groups")
        workspace.release(self.scratch, self.nbytes)
        return fits


class GemmRows(GemmRowsReference):
    """Groups of tokens one after the other, of values that lie as cuBLAS reads them."""

    name, rank = PRODUCT, 0

    def accepts(self, problem: Problem) -> str | None:
        return _why_not_each_group(problem, problem.rhs)

    def preferred_layouts(self, problem: Problem) -> PreferredLayouts:
        if not all(spec_of(spec).format.tensor_scaled for spec in (problem.lhs, problem.rhs)):
            return super().preferred_layouts(problem)
        return PreferredLayouts(VALUES[0], VALUES[1], "grouped_cols")

    def run(self, p: GroupedRows) -> str:
        lhs, rhs, out, (n, k) = p.lhs, p.rhs, p.out, (p.rhs.rows, p.rhs.k)
        bounds = host_bounds(*p.groups, lhs.rows)
        if lhs.layout is not SM90_VALUES[0] or rhs.layout is not SM90_VALUES[0]:
            return super().run(p)
        bias = None if p.bias is None else p.bias.contiguous()
        of_bias, dtype = typed_address(bias)
        of_one = 0 if bias is None else n * bias.element_size()  # bytes
        left, right, to = (one.data_ptr() for one in (lhs.codes, rhs.codes, out))
        groups: list[dict[str, Any]] = []
        for i, (start, end) in enumerate(zip(*bounds, strict=True)):
            groups.append({} if start == end else {
                "m": end - start, "lhs": left + 2 * start * k, "rhs": right + 2 * i * n * k,
                "out": to + start * n * out.element_size(),
                "bias": of_bias and of_bias + i * of_one,
            })  # fmt: skip
        if not _Each(out, lhs, rhs, k=k, bias_dtype=dtype).run(groups):
            return super().run(p)
        at = 0
        for start, end in (*zip(*bounds, strict=True), (len(out), len(out))):
            if at < start:
                out[at:start].zero_()
            at = end
        return PRODUCT


class GemmK(GemmKReference):
    """The same of groups of k."""

    name, rank = PRODUCT, 0

    def accepts(self, problem: Problem) -> str | None:
        return _why_not_each_group(problem, problem.rhs.replace("@grouped_cols", "@cols"))

    def run(self, p: GroupedK) -> str:
        lhs, rhs, out, m, n = p.lhs, p.rhs, p.out, p.lhs.rows, p.rhs.rows
        bounds = host_bounds(*p.groups, lhs.k)
        if lhs.layout is not SM90_VALUES[1] or rhs.layout.name not in ("grouped_cols", VALUES[1]):
            return super().run(p)
        values = rhs.codes
        if rhs.layout is not SM90_VALUES[1]:
            values = self._values(rhs, bounds)
        left, right, to = (one.data_ptr() for one in (lhs.codes, values, out))
        groups: list[dict[str, Any]] = []
        for i, (start, end) in enumerate(zip(*bounds, strict=True)):
            groups.append({} if start == end else {
                "k": end - start, "lhs": left + 2 * start * m, "rhs": right + 2 * start * n,
                "out": to + i * m * n * out.element_size(),
            })  # fmt: skip
        fields = {"lhs_k_first": True, "rhs_k_first": True, "accumulate": p.accumulate}
        if not _Each(out, lhs, rhs, m=m, **fields).run(groups):
            return super().run(p)
        for i, one in enumerate(groups):
            if not one and not p.accumulate:
                out[i].zero_()
        if not out.is_inference():
            torch.autograd.graph.increment_version(out)
        return PRODUCT

    @staticmethod
    def _values(side: Operand, bounds: Bounds) -> Tensor:
        """bf16 [k, rows] of plain columns, without scales of tensors."""
        native, n = binding.native(), side.rows
        made = torch.empty((side.k, n), dtype=torch.bfloat16, device=side.codes.device)
        record = native.Nvfp4Args(
            n=n, ldo=n, out_dtype=FLOAT_DTYPES[made.dtype], k_first=True
        )  # fmt: skip
        binding.set_execution(record, made.device.index)
        for i, (start, end) in enumerate(zip(*bounds, strict=True)):
            if start < end:
                args = record.copy(
                    k=end - start, w=side.codes.data_ptr() + start * n,
                    w_scales=side.scales.data_ptr() + (start // 16 + i) * n,
                    out=made.data_ptr() + 2 * start * n,
                )  # fmt: skip
                binding.expect(native.nvfp4_from_rows(args), f"columns {(end - start, n)}")
        return made


register(HopperNvfp4Groups())
register(HopperNvfp4Weights())
register(GemmRows())
register(GemmK())

"""Quantized matrices, as ops take and return them."""

from typing import NamedTuple

import torch
from torch import Tensor

from te_mx.formats import Format
from te_mx.layouts.base import Layout, Shape, whole_shapes
from te_mx.layouts.registry import spec_of

# Shapes of codes and scales, the dtype of these, how far apart rows of codes start where they are
# not contiguous, and shapes of tensor scales where there are some, by spec and sizes: what checks
# ask most.
_Expected = tuple[Shape, Shape, torch.dtype, int | None, tuple[Shape, ...]]
_expected: dict[tuple[str, int, int], _Expected] = {}
_MOST_EXPECTED = 4096


class Operand(NamedTuple):
    """A quantized matrix: logical [rows, k] with blocks along k, one side of a GEMM.

    `spec` says what codes and scales are and how they lie, "<format>@<layout>". The sizes are
    stored, never guessed from the shape of the codes. `packed` is a form that a CPU kernel made of
    the same codes for itself, what lies aside of a weight that stands still in its layout, or
    None. `tensor_scale`, of formats that have one and of no others (NVFP4), is fp32 [], or
    [rows, 1] with a scale for every row; of tokens in groups [groups] is one for each of them."""

    codes: Tensor
    scales: Tensor
    spec: str
    rows: int
    k: int
    packed: Tensor | None = None
    tensor_scale: Tensor | None = None

    @property
    def format(self) -> Format:
        return spec_of(self.spec).format

    @property
    def layout(self) -> Layout:
        return spec_of(self.spec).layout

    def values(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """What it stands for, [rows, k]; with a tensor scale codes * scales, which are exact, times
        that are rounded to fp32 (fp64 for that dtype) first."""
        if self.tensor_scale is None:
            return self.unscaled(dtype)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return (self.unscaled(wide) * self.tensor_scale).to(dtype)

    @property
    def unscaled_dtype(self) -> torch.dtype:
        """A dtype that holds `unscaled` exactly: bf16, of every format with a tensor scale."""
        return self.format.exact_dtype if self.tensor_scale is None else torch.bfloat16

    def unscaled(self, dtype: torch.dtype) -> Tensor:
        """What a tensor scale multiplies, [rows, k]: codes * scales."""
        fmt, layout = spec_of(self.spec)
        return layout.values(fmt, self.codes, self.scales, self.k, dtype)[: self.rows]

    def group(self, start: int, end: int, group: int = 0) -> "Operand":
        """The part of group number `group` of tokens, start to end, as a matrix; of rows that lie
        by themselves the number says nothing."""
        fmt, layout = spec_of(self.spec)
        rows, k = (end - start, self.k) if layout.tokens == "rows" else (self.rows, end - start)
        parts = layout.group_of(self, start, end, group)
        whole = self.tensor_scale
        if whole is not None and whole.dim():
            whole = whole[group] if whole.dim() == 1 else whole[start:end]
        return Operand(*parts, f"{fmt.name}@{layout.alone}", rows, k, None, whole)

    def checked(self, name: str) -> "Operand":
        """This operand with parts that lie as kernels read them.

        Raises ValueError when its parts do not belong together."""
        codes, scales, spec, rows, k, _, whole = self
        expected = _expected.get((spec, rows, k))
        if (
            expected is not None
            and codes.shape == expected[0]
            and scales.shape == expected[1]
            and (
                codes.is_contiguous()
                if expected[3] is None
                else codes.stride() == (expected[3], 1) and codes.data_ptr() % 16 == 0
            )
            and scales.is_contiguous()
            and codes.device == scales.device
            and codes.dtype is torch.uint8
            and scales.dtype is expected[2]
            and (
                not expected[4]
                if whole is None
                else whole.shape in expected[4]
                and whole.dtype is torch.float32
                and whole.device == codes.device
                and whole.is_contiguous()
            )
        ):
            return self
        fmt, layout = spec_of(spec)
        made = layout.checked(self, fmt, name)
        apart = layout.row_bytes(k)
        if layout.scale_dtype is None or apart is not None:
            if len(_expected) >= _MOST_EXPECTED:
                _expected.clear()
            wholes = whole_shapes(fmt, rows) if fmt.tensor_scaled else ()
            known = *layout.shapes(fmt, rows, k), layout.scales_dtype(fmt), apart, wholes
            _expected[spec, rows, k] = known
        return made

    def checked_tokens(self, groups: int, name: str) -> "Operand":
        """The same of tokens of so many groups."""
        fmt, layout = spec_of(self.spec)
        return layout.checked_tokens(self, fmt, groups, name)


def turned(operand: Operand) -> Operand:
    """An operand [rows, k] in layout "rows" whose format has square blocks, as operand [k, rows] in
    layout "cols": the same tensors."""
    codes, scales, spec, rows, k = operand[:5]
    return Operand(codes, scales, spec.replace("@rows", "@cols"), k, rows)


class Stack(NamedTuple):
    """The operands of several groups, one behind the other: logical [groups, rows, k]. Codes,
    scales and tensor scales have a first dimension more than those of an Operand."""

    codes: Tensor
    scales: Tensor
    spec: str
    groups: int
    rows: int
    k: int
    packed: Tensor | None = None
    tensor_scale: Tensor | None = None

    @property
    def format(self) -> Format:
        return spec_of(self.spec).format

    @property
    def layout(self) -> Layout:
        return spec_of(self.spec).layout

    def group(self, i: int) -> Operand:
        """The operand of one group, without its packed form."""
        whole = None if self.tensor_scale is None else self.tensor_scale[i]
        return Operand(self.codes[i], self.scales[i], self.spec, self.rows, self.k, None, whole)

    def checked(self, name: str) -> "Stack":
        """As Operand.checked."""
        fmt, layout = spec_of(self.spec)
        return layout.checked_stack(self, fmt, name)


def stacked(operands: list[Operand]) -> Stack:
    """The operands of all groups, one behind the other."""
    first = operands[0]
    codes = torch.stack([one.codes for one in operands])
    if first.scales.dtype == torch.int32 and codes.shape[-1] % 16:  # rows as far apart as packed
        width = codes.shape[-1]
        codes = torch.nn.functional.pad(codes, (0, -width % 16))[..., :width]
    scales = torch.stack([one.scales for one in operands])
    wholes = [one.tensor_scale for one in operands if one.tensor_scale is not None]
    whole = torch.stack(wholes) if wholes else None
    return Stack(codes, scales, first.spec, len(operands), first.rows, first.k, None, whole)


class Quantized(NamedTuple):
    """What one quantize call made of x [rows, cols]; parts that nobody asked for are None.

    row: logical [rows, k = cols]. col: logical [cols, k = rows]. col_sum [cols]: the sum of x over
    its rows."""

    row: Operand | None = None
    col: Operand | None = None
    col_sum: Tensor | None = None

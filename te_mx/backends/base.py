"""Words that every backend shares: element formats, the parts of a quantized matrix, GEMM operands,
epilogues.

Codes and scales are uint8 here; only MXTensor shows them as float8 dtypes. So torch.compile and
older torch releases never meet a float8 kernel.
"""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor

from te_mx.dispatch.calls import Epilogue as Epilogue

BLOCK = 32  # elements that share one scale

_K = TypeVar("_K")
_V = TypeVar("_V")


class Words(dict[_K, _V]):
    """A table of what native code knows; looking up anything else is an error that says so."""

    def __init__(self, what: str, error: type[Exception], words: dict[_K, _V]) -> None:
        super().__init__(words)
        self._what, self._error = what, error

    def __missing__(self, word: Any) -> NoReturn:
        got = repr(word) if isinstance(word, (str, torch.dtype)) else type(word).__name__
        known = ", ".join(map(repr, self))
        raise self._error(f"te_mx: {self._what} must be one of {known}, got {got}")


# Formats in the words of native code, and the number of their element in its table.
FORMATS = Words("the element format", ValueError, {"e4m3": 0, "e5m2": 1, "e2m1": 6})
# The rows of a block of those whose scales are fp32, one for so many rows x 128.
BLOCK_ROWS: dict[str, int] = {}
# And those whose blocks stand upright, 128 x 1: quantized and decoded as 1 x 128 of the columns.
UPRIGHT: list[str] = []
for _number, _element in enumerate(("e4m3", "e5m2", "e4m3fnuz", "e5m2fnuz")):
    for _rows in (1, 128):
        FORMATS[f"{_element}_{_rows}x128"] = _number
        BLOCK_ROWS[f"{_element}_{_rows}x128"] = _rows
    FORMATS[f"{_element}_128x1"] = _number
    UPRIGHT.append(f"{_element}_128x1")
SCALE_RULES = Words(
    "the scale rule", ValueError, {"rceil": 0, "floor": 1, "even": 2, "fp32": 3, "pow2": 4}
)
# What native code calls an order (Layout in csrc/include/te_mx/types.h).
LAYOUTS = {"k_last": 0, "k_first": 1, "sm90": 2, "sm90_rows": 3, "sm90_k": 4}
ALIGNED = {"sm90": 5, "sm90_k": 6}  # of columns in blocks of 1 x 128, as tiles of MX
PLAIN = -1  # in place of a spread: plain MX, not packed for sm_90
GELUS = {"tanh": 1, "erf": 2}
BIAS_GRADS = {"operand": 1, "result": 2}
FLOAT_DTYPES = Words(
    "the dtype", TypeError, {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
)


class Quantize(NamedTuple):
    """One matrix to quantize: the arguments of ops.quantize_2d."""

    x: Tensor
    fmt: str
    rowwise: bool
    columnwise: str | None
    scale_rule: str
    col_sum: bool = False
    sum_dtype: torch.dtype = torch.float32
    spread: int = PLAIN


class QuantizedParts(NamedTuple):
    """What one quantize call made of x [rows, cols]; parts that nobody asked for are None.

    row_codes [rows, cols], row_scales [rows, ceil(cols/32)];
    col_codes [rows, cols], col_scales [ceil(rows/32), cols] ("plain"), or
    col_codes [cols, rows], col_scales [cols, ceil(rows/32)] ("transposed"), or both directions
    as operands of order "sm90" ([rows, cols] and [cols, rows]);
    col_sum fp32 [cols]: the sum of x over its rows.
    """

    row_codes: Tensor | None
    row_scales: Tensor | None
    col_codes: Tensor | None
    col_scales: Tensor | None
    col_sum: Tensor | None


class Operand(NamedTuple):
    """One side of a GEMM: a logical [rows, k] matrix with one scale for every 32 of k.

    order "k_last": codes [rows, k], scales [rows, ceil(k/32)]. order "k_first": codes [k, rows],
    scales [ceil(k/32), rows]. `packed` is what a kernel packed of the same codes, or None. Codes of
    4 bits lie two a byte in "k_last", and `length` is k then.
    order "sm90": packed for Hopper, see sm90/layouts/tiles.py: codes [rows, k] with rows a
    multiple of 16 bytes apart, scales int32 [ceil(k/128), tiles, 132]. "sm90_rows", "sm90_k":
    groups of rows or of k packed for Hopper, see sm90/layouts/groups.py.
    """

    codes: Tensor
    scales: Tensor
    fmt: str
    order: str
    packed: Tensor | None = None
    length: int | None = None

    @property
    def rows(self) -> int:
        return self.codes.shape[1 if self.order == "k_first" else 0]

    @property
    def k(self) -> int:
        if self.length is not None:
            return self.length
        return self.codes.shape[0 if self.order == "k_first" else 1]


class NativeNorm(NamedTuple):
    """What a native normalization made: as dispatch.fused.NormParts, in parts."""

    mean: Tensor | None
    rstd: Tensor
    z: Tensor | None
    quantized: QuantizedParts


class NativeAct(NamedTuple):
    """What a native activation made: as dispatch.fused.ActParts, in parts."""

    out: Tensor | None
    quantized: QuantizedParts


def format_fields(fmt: str) -> dict[str, int]:
    """The fields of a native record that say what a format is."""
    rows, k = (128, 1) if fmt in UPRIGHT else (BLOCK_ROWS.get(fmt), 128)
    if rows is None:
        return {"element": FORMATS[fmt]}
    return {"element": FORMATS[fmt], "scale_type": 1, "block_rows": rows, "block_k": k}


class Scales(NamedTuple):
    """The dtype of a format's scales and the sizes of its blocks, along k and across."""

    dtype: torch.dtype
    block_rows: int
    block: int

    def shape(self, rows: int, k: int) -> tuple[int, int]:
        return -(-rows // self.block_rows), -(-k // self.block)


def scales_of(fmt: str) -> Scales:
    """Those of a format in the words of native code."""
    if fmt in BLOCK_ROWS:
        return Scales(torch.float32, BLOCK_ROWS[fmt], 128)
    return Scales(torch.uint8, 1, BLOCK)


def code_bytes(fmt: str, k: int) -> int:
    """Bytes of k codes that lie by rows."""
    return (k + 1) // 2 if fmt == "e2m1" else k


def pointer(tensor: Tensor | None) -> int:
    """Address as native code takes it, 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def typed_address(tensor: Tensor | None) -> tuple[int, int]:
    """Address and dtype as native code takes them, zeros for None."""
    return (0, 0) if tensor is None else (tensor.data_ptr(), FLOAT_DTYPES[tensor.dtype])


def blocks(size: int) -> int:
    """Number of scale blocks that cover `size` elements; the last one may be shorter."""
    return (size + BLOCK - 1) // BLOCK


class StackedOperand(NamedTuple):
    """The operand of every group, one after another: logical [G, rows, k].

    order "k_last": codes [G, rows, k], scales [G, rows, ceil(k/32)]. order "k_first": codes
    [G, k, rows], scales [G, ceil(k/32), rows]. `packed`: uint8 [G, bytes], or None. order "sm90":
    packed for Hopper, codes [G, rows, k] with padded rows, scales int32 [G, ceil(k/128), tiles,
    132]. `length`: as that of an Operand.
    """

    codes: Tensor
    scales: Tensor
    fmt: str
    order: str
    packed: Tensor | None = None
    length: int | None = None

    @property
    def groups(self) -> int:
        return self.codes.shape[0]

    @property
    def rows(self) -> int:
        return self.codes.shape[2 if self.order == "k_first" else 1]

    @property
    def k(self) -> int:
        if self.length is not None:
            return self.length
        return self.codes.shape[1 if self.order == "k_first" else 2]

    def group(self, i: int) -> Operand:
        """The operand of one group, without its packed form."""
        return Operand(self.codes[i], self.scales[i], self.fmt, self.order, None, self.length)

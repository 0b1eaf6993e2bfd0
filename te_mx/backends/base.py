"""Words of native code that every backend shares: element formats, orders, scale rules, dtypes.

Codes and scales are uint8 there; only MXTensor shows them as float8 dtypes. So torch.compile and
older torch releases never meet a float8 kernel."""

import os
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from te_mx.dispatch.calls import Epilogue
from te_mx.dispatch.problem import NOT_ASKED, Problem

# A backend that TE_MX_BACKEND names runs what it can in place of the native ones.
forced = os.environ.get("TE_MX_BACKEND", "")
_K = TypeVar("_K")
_V = TypeVar("_V")


def why_forced() -> str | None:
    """Why nothing native runs, where TE_MX_BACKEND names another backend.

    Raises ValueError for a name that no backend has."""
    if forced not in ("", "triton", "vendor"):
        raise ValueError(f'TE_MX_BACKEND must be "triton" or "vendor" or not set, got {forced!r}')
    return f"{NOT_ASKED}TE_MX_BACKEND={forced} asks for" if forced else None


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
# Those with E4M3 scales and a tensor scale: the rows of a block, of 16 along k.
SMALL_ROWS = {"nvfp4": 1, "nvfp4_rows": 1, "nvfp4_16x16": 16}
SCALE_RULES = Words(
    "the scale rule", ValueError,
    {"rceil": 0, "floor": 1, "even": 2, "fp32": 3, "pow2": 4, "te": 5, "torchao": 6,
     "modelopt": 7, "compressed_tensors": 8, "te_4over6": 9, "te_4over6_448": 10,
     "te_4over6_mse": 11, "te_4over6_mse_448": 12},
)  # fmt: skip
TENSOR_SCALES = {"all": 0, "rows": 1, "groups": 2}  # for what each of an operand is
# What native code calls an order (Layout in csrc/include/te_mx/types.h). "standing" says of an
# operand that nobody writes it any more: of tiles of 8 bits that alone, of 4 bits how it lies, too.
LAYOUTS = {
    "k_last": 0, "k_first": 1, "sm90": 2, "sm90_rows": 3, "sm90_k": 4, "standing": 7,
    "sm90_nvfp4": 7,
}  # fmt: skip
ALIGNED = {"sm90": 5, "sm90_k": 6}  # of columns in blocks of 1 x 128, as tiles of MX
PLAIN = -1  # in place of a spread: plain MX, not packed for sm_90
GELUS = {"tanh": 1, "erf": 2}
BIAS_GRADS = {"operand": 1, "result": 2}
FLOAT_DTYPES = Words(
    "the dtype", TypeError, {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
)


def why_not_dtype(problem: Problem, does: str = "takes") -> str | None:
    """Why native code does not read or, by another word, write values of a problem's dtype."""
    if problem.dtype in FLOAT_DTYPES:
        return None
    return f"{does} float32, bfloat16 and float16, not {problem.dtype}"


def format_fields(fmt: str) -> dict[str, int]:
    """The fields of a native record that say what a format is."""
    rows, k = (128, 1) if fmt in UPRIGHT else (BLOCK_ROWS.get(fmt), 128)
    if fmt in SMALL_ROWS:
        small = {"scale_type": 2, "block_rows": SMALL_ROWS[fmt], "block_k": 16}
        return {"element": FORMATS["e2m1"], **small}
    if rows is None:
        return {"element": FORMATS[fmt]}
    return {"element": FORMATS[fmt], "scale_type": 1, "block_rows": rows, "block_k": k}


def pointer(tensor: Tensor | None) -> int:
    """Address as native code takes it, 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def typed_address(tensor: Tensor | None) -> tuple[int, int]:
    """Address and dtype as native code takes them, zeros for None."""
    return (0, 0) if tensor is None else (tensor.data_ptr(), FLOAT_DTYPES[tensor.dtype])


def matrix(native: Any, x: Tensor) -> Any:
    """The record of a matrix, of a native module."""
    rows, cols = x.shape
    return native.Matrix(
        data=x.data_ptr(), rows=rows, cols=cols, row_stride=x.stride(0),
        dtype=FLOAT_DTYPES[x.dtype],
    )  # fmt: skip


def set_epilogue(args: Any, epilogue: Epilogue, aux: Tensor | None, alignment: int = 1) -> object:
    """Write bias and GELU of an epilogue into the record of a product. alignment: of what is read
    as gelu_in, in bytes. What is returned must live until the call is enqueued."""
    bias, gelu, gelu_in, *_ = epilogue
    if bias is not None:
        bias = bias.contiguous()
        args.bias, args.bias_dtype = typed_address(bias)
    if gelu is not None:
        args.gelu = GELUS[gelu]
    if aux is not None:
        args.aux, args.aux_dtype = typed_address(aux)
    if gelu_in is not None:
        gelu_in = gelu_in.contiguous()
        if gelu_in.data_ptr() % alignment:  # a view may start between
            gelu_in = gelu_in.clone()
        args.gelu_in, args.gelu_in_dtype = typed_address(gelu_in)
    return bias, gelu_in

"""The native module of the Hopper backend, te_mx._sm90, which takes records of addresses and sizes
and returns a status; and what the calls of all its kernels share. Kernels make their records beside
their envelopes.

Calls are asynchronous on the current stream, allocate results only, and never wait for the device.
Checks of what a user passes live above."""

import importlib
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from te_mx.backends.base import FLOAT_DTYPES, why_forced
from te_mx.backends.sm90.layouts.groups import group_tiles
from te_mx.layouts import spec_of
from te_mx.layouts.operand import Operand, Quantized, Stack
from te_mx.runtime import streams
from te_mx.runtime.streams import stream

PLAIN_LAYOUTS = ("rows", "cols")
_OK, _UNSUPPORTED, _LAUNCH_FAILED = 0, 2, 4

_native: Any = None
_import_error: str | None = None
_problems: dict[int, str | None] = {}


def native() -> Any:
    """The native module, imported at the first call; None when it was not built."""
    global _native, _import_error
    if _native is None and _import_error is None:
        try:
            _native = importlib.import_module("te_mx._sm90")
            streams.capture_number = _native.capture_number
        except ImportError as error:
            _import_error = str(error)
    return _native


def import_error() -> str | None:
    """Why there is no native module; None where there is one."""
    native()
    return _import_error


def problem(index: int) -> str | None:
    """Why the native kernels do not run on CUDA device `index`; None when they do."""
    if index not in _problems:
        _problems[index] = _find_problem(index)
    return why_forced() or _problems[index]


def _find_problem(index: int) -> str | None:
    if torch.version.hip is not None:
        return "needs an NVIDIA Hopper GPU (sm_90), this is an AMD GPU"
    major, minor = torch.cuda.get_device_capability(index)
    if (major, minor) != (9, 0):
        return f"needs a Hopper GPU (sm_90), cuda:{index} is sm_{major}{minor}"
    module = native()
    if module is None:
        return (
            f"the native module te_mx._sm90 cannot be imported ({_import_error}); build te_mx "
            "with TE_MX_CUDA=ON in the environment, where nvcc 12.4 or newer is"
        )
    if not module.available(index):
        return "the driver of this machine cannot describe tensors to the copy engine"
    return None


def set_execution(args: Any, index: int) -> None:
    """Write into a native record where its call runs: on the current stream of a device."""
    args.device, args.stream = index, stream(index)


def supported(status: int) -> bool:
    """True for ok, False for unsupported. Raises where a launch failed, and for what is a bug."""
    if status == _OK:
        return True
    if status == _UNSUPPORTED:
        return False
    if status == _LAUNCH_FAILED:
        raise RuntimeError(
            f"a Hopper kernel of te_mx could not be launched: {_native.error_text()}. If a CUDA "
            "graph is being captured, what failed may have come before: so does a graph that "
            "Python's garbage collector destroys meanwhile (gc.collect() before the capture, "
            "gc.disable() during it)"
        )
    raise RuntimeError(f"te_mx internal error: a Hopper kernel returned status {status}")


def expect(status: int, what: str) -> None:
    """Raise where a kernel does not take what its envelope let through."""
    if not supported(status):
        raise RuntimeError(
            f"te_mx internal error: the Hopper kernels do not take {what}; they count rows, "
            "columns and rows of all weights in 31 bits"
        )


# ----------------------------------------------------------------------------------------- matrices
def rows_of(x: Tensor) -> Tensor:
    """x with adjacent elements in each row."""
    return x if x.stride(1) == 1 else x.contiguous()


@lru_cache(maxsize=4096)
def _room(spec: str, rows: int, k: int) -> tuple[Any, ...]:
    """Shapes of codes, with the padding of their rows, and scales of an operand; how wide its codes
    are without, the dtype of its scales."""
    fmt, layout = spec_of(spec)
    (height, width), scales = layout.shapes(fmt, rows, k)
    ld = width if layout.name in PLAIN_LAYOUTS else (width + 15) & -16
    return (height, ld), scales, width, layout.scales_dtype(fmt)


def empty_operand(
    spec: str, rows: int, k: int, device: torch.device, groups: int | None = None
) -> Operand:
    """An operand to write; with a number of groups, that of tokens in groups."""
    if groups is not None:
        fmt, layout = spec_of(spec)
        return Operand(*layout.grouped_empty(fmt, rows, k, groups, device), spec, rows, k)
    shape, scales, width, dtype = _room(spec, rows, k)
    codes = torch.empty(shape, dtype=torch.uint8, device=device)
    if shape[1] != width:
        codes = codes[:, :width]
    return Operand(codes, torch.empty(scales, dtype=dtype, device=device), spec, rows, k)


def empty_stack(spec: str, groups: int, rows: int, k: int, device: torch.device) -> Stack:
    """The operands of several groups, to write."""
    shape, scales, width, dtype = _room(spec, rows, k)
    codes = torch.empty((groups, *shape), dtype=torch.uint8, device=device)
    made = torch.empty((groups, *scales), dtype=dtype, device=device)
    return Stack(codes[..., :width], made, spec, groups, rows, k)


def empty_like(weight: Operand | Stack, spec: str) -> Any:
    """A weight, or those of groups, to write by another spec."""
    groups = [weight.groups] if isinstance(weight, Stack) else []
    make: Any = empty_stack if groups else empty_operand
    return make(spec, *groups, weight.rows, weight.k, weight.codes.device)


def set_outputs(
    args: Any, row: str, col: str, shape: tuple[int, int], device: torch.device, col_sum: bool,
    sum_dtype: torch.dtype = torch.float32, groups: int | None = None,
) -> tuple[Quantized, Tensor | None]:  # fmt: skip
    """Write into a native record where what is made of a matrix, or of one in so many groups, goes:
    the operands and sums that it fills, and scratch memory. What they are, the record says already
    (`fields_to`)."""
    made_row = made_col = sums = partial = None
    rows, cols = shape
    if row:
        made_row = empty_operand(row, rows, cols, device, groups)
        args.row_codes, args.row_scales = made_row[0].data_ptr(), made_row[1].data_ptr()
    if col:
        made_col = empty_operand(col, cols, rows, device, groups)
        args.col_codes, args.col_scales = made_col[0].data_ptr(), made_col[1].data_ptr()
    if col_sum:
        many, tiles = () if groups is None else (groups,), (rows + 127) // 128
        if groups is None:
            args.col_sum_dtype = FLOAT_DTYPES[sum_dtype]
        else:
            tiles = group_tiles(rows, groups)
        sums = torch.empty((*many, cols), dtype=sum_dtype, device=device)
        partial = torch.empty((tiles, cols), dtype=torch.float32, device=device)
        args.col_sum, args.col_sum_ws = sums.data_ptr(), partial.data_ptr()
    return Quantized(made_row, made_col, sums), partial

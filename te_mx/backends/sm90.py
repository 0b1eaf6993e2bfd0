"""The Hopper backend: a thin layer over te_mx._sm90, which takes addresses and sizes and returns a
status.

Calls are asynchronous on the current stream, allocate results only, and never wait for the device.
Checks of what a user passes live above.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from te_mx.backends import sm90_layout
from te_mx.backends.base import (
    FLOAT_DTYPES,
    FORMATS,
    GELUS,
    SCALE_RULES,
    Epilogue,
    Operand,
    Quantize,
    QuantizedParts,
    pointer,
    typed_address,
)

ADAPTIVE, EXACT = "sm90_adaptive", "sm90_exact"
_U8, _I32, _F32 = torch.uint8, torch.int32, torch.float32
_OK, _UNSUPPORTED, _SMALL_WORKSPACE, _LAUNCH_FAILED = 0, 2, 3, 4
MOST = (1 << 31) - 257  # of any size that the GEMM kernels count
_FORMS = {"transposed": 0, "plain": 2}  # of a columnwise copy; 1 is packed

_native: Any = None
_import_error: str | None = None
_problems: dict[int, str | None] = {}
_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def native() -> ModuleType | None:
    """The native module, imported at the first call; None when it was not built."""
    global _native, _import_error
    if _native is None and _import_error is None:
        try:
            _native = importlib.import_module("te_mx._sm90")
        except ImportError as error:
            _import_error = str(error)
    return _native


def problem(index: int) -> str | None:
    """Why the native kernels do not run on CUDA device `index`; None when they do."""
    if index not in _problems:
        _problems[index] = _find_problem(index)
    return _problems[index]


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


def stream(index: int) -> int:
    """The current stream of a device as the address that native code takes."""
    if _raw_stream is not None:
        return _raw_stream(index)
    return torch.cuda.current_stream(index).cuda_stream


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


# ----------------------------------------------------------------------------------------- operands
def empty_operand(rows: int, k: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Codes [rows, k] and scale words of an operand of order "sm90", uninitialized."""
    ld = (k + 15) & -16
    codes = torch.empty((rows, ld), dtype=_U8, device=device)
    words = torch.empty(
        ((k + 127) >> 7, ((rows + 255) >> 8) << 1, sm90_layout.SCALE_WORDS),
        dtype=_I32,
        device=device,
    )
    return codes if ld == k else codes[:, :k], words


def aligned(operand: Operand) -> Operand:
    """An operand of order "sm90" whose rows lie as the kernels read them."""
    codes, words = operand.codes, operand.scales
    rows, k = codes.shape
    ld = (k + 15) & -16
    lies = codes.stride(0) == ld and codes.stride(1) == 1 and codes.data_ptr() % 16 == 0
    if lies and words.is_contiguous():
        return operand
    if not lies:
        fresh, _ = empty_operand(rows, k, codes.device)
        codes = fresh.copy_(codes)
    return operand._replace(codes=codes, scales=words.contiguous())


def _on_boundary(tensor: Tensor) -> Tensor:
    """A tensor that starts where the kernels read 16 bytes at once: a view may start between."""
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


# ----------------------------------------------------------------------------------------- quantize
def quantize(what: Quantize) -> QuantizedParts | None:
    """As reference.quantize for a non-empty x, or packed operands when spread is 0 or more, with
    col_sum in sum_dtype; None when the native code does not take it.
    """
    call, parts, _alive = _prepare(what)
    index = what.x.device.index
    return parts if supported(_native.quantize(call, stream(index), index)) else None


def quantize_two(first: Quantize, second: Quantize) -> tuple[QuantizedParts, QuantizedParts] | None:
    """Both at the same time where the GPU has room; the first without col_sum."""
    (call, parts, _alive), (call2, parts2, _alive2) = _prepare(first), _prepare(second)
    index = first.x.device.index
    status = _native.quantize_two(call, call2, stream(index), index)
    return (parts, parts2) if supported(status) else None


def _prepare(what: Quantize) -> tuple[tuple[Any, ...], QuantizedParts, tuple[Any, ...]]:
    """The native arguments of a call, the tensors that it fills, and what must live until it is
    enqueued."""
    x = rows_of(what.x)
    rows, cols = x.shape
    words = x.data_ptr(), rows, cols, x.stride(0), FLOAT_DTYPES[x.dtype]
    call, parts, partial = quantize_call(words, x.device, *what[1:])
    return call, parts, (x, partial)


def rows_of(x: Tensor) -> Tensor:
    """x with adjacent elements in each row."""
    return x if x.stride(1) == 1 else x.contiguous()


def quantize_call(
    x: tuple[int, int, int, int, int], device: torch.device, fmt: str, rowwise: bool,
    columnwise: str | None, rule: str, col_sum: bool, sum_dtype: torch.dtype, spread: int,
) -> tuple[tuple[Any, ...], QuantizedParts, Tensor | None]:  # fmt: skip
    """What the native code is told of a matrix x (address, rows, cols, stride, dtype), the tensors
    that it fills, and scratch memory."""
    _, rows, cols, _, _ = x
    row_codes = row_scales = col_codes = col_scales = sums = partial = None
    row: tuple[int, int, int] = (0, 0, 0)
    col: tuple[int, int, int] = (0, 0, 0)
    if rowwise:
        if spread >= 0:
            row_codes, row_scales = empty_operand(rows, cols, device)
        else:
            row_codes = torch.empty((rows, cols), dtype=_U8, device=device)
            row_scales = torch.empty((rows, (cols + 31) // 32), dtype=_U8, device=device)
        row = (row_codes.data_ptr(), row_scales.data_ptr(), int(spread >= 0))
    if columnwise is not None:
        if spread >= 0:
            col_codes, col_scales = empty_operand(cols, rows, device)
            form = 1
        elif columnwise == "plain":
            col_codes = torch.empty((rows, cols), dtype=_U8, device=device)
            col_scales = torch.empty(((rows + 31) // 32, cols), dtype=_U8, device=device)
            form = _FORMS[columnwise]
        else:
            col_codes = torch.empty((cols, rows), dtype=_U8, device=device)
            col_scales = torch.empty((cols, (rows + 31) // 32), dtype=_U8, device=device)
            form = _FORMS[columnwise]
        col = (col_codes.data_ptr(), col_scales.data_ptr(), form)
    if col_sum:
        sums = torch.empty(cols, dtype=sum_dtype, device=device)
        partial = torch.empty(((rows + 127) // 128, cols), dtype=_F32, device=device)
    call = (
        x, FORMATS[fmt].native_id, SCALE_RULES[rule], row, col, max(spread, 0),
        pointer(sums), FLOAT_DTYPES[sum_dtype], pointer(partial),
    )  # fmt: skip
    return call, QuantizedParts(row_codes, row_scales, col_codes, col_scales, sums), partial


def dequantize(
    codes: Tensor, scales: Tensor, fmt: str, order: str, dtype: torch.dtype,
    out: Tensor | None = None,
) -> Tensor | None:  # fmt: skip
    """As reference.dequantize for contiguous codes and a native dtype; or None."""
    rows, cols = codes.shape
    if out is None:
        out = torch.empty((rows, cols), dtype=dtype, device=codes.device)
    index = codes.device.index
    status = _native.dequantize(
        codes.data_ptr(), scales.data_ptr(), rows, cols, order == "k_first",
        FORMATS[fmt].native_id, FLOAT_DTYPES[dtype], out.data_ptr(), stream(index), index,
    )  # fmt: skip
    return out if supported(status) else None


# --------------------------------------------------------------------------------------------- pack
def pack_into(operand: Operand, spread: int, codes: int, words: int) -> None:
    """Pack a plain operand (k_last or k_first, contiguous) to two device addresses."""
    index = operand.codes.device.index
    status = _native.pack(
        operand.codes.data_ptr(), operand.scales.data_ptr(), operand.rows, operand.k,
        operand.order == "k_first", FORMATS[operand.fmt].native_id, spread, codes, words,
        stream(index), index,
    )  # fmt: skip
    if not supported(status):
        raise RuntimeError("te_mx internal error: the Hopper kernels do not pack this operand")


def pack(operand: Operand, spread: int) -> Operand:
    """A plain, non-empty operand as one of order "sm90"."""
    codes, words = empty_operand(operand.rows, operand.k, operand.codes.device)
    pack_into(operand, spread, codes.data_ptr(), words.data_ptr())
    return Operand(codes, words, operand.fmt, "sm90")


# --------------------------------------------------------------------------------------------- gemm
def gemm(
    a: Operand, b: Operand, epilogue: Epilogue, out: Tensor, aux: Tensor | None, spread: int,
    scratch: Callable[[int], Tensor | None], parts: int = 1,
) -> tuple[bool, Tensor | None]:  # fmt: skip
    """Enqueue out = epilogue(b @ a^T) on the current stream: (whether native code took it, the
    bias gradient of the result or None).

    `scratch` gives a workspace of so many bytes. Operands that are not packed yet are packed there
    first. Most problems need none, so the size is asked for only when the kernel refuses. K is cut
    into `parts`, whose sums need some.
    """
    bias, gelu_in = epilogue.bias, epilogue.gelu_in
    device = out.device
    index = device.index
    if bias is not None:
        bias = bias.contiguous()
    if gelu_in is not None:
        gelu_in = _on_boundary(gelu_in.contiguous())
    bias_grad = None
    if epilogue.bias_grad == "result":
        bias_grad = torch.empty(out.shape[1], dtype=_F32, device=device)
    words = (
        out.data_ptr(), FLOAT_DTYPES[out.dtype], out.shape[1], epilogue.accumulate,
        *typed_address(bias), GELUS.get(epilogue.gelu or "", 0), *typed_address(aux),
        *typed_address(gelu_in), pointer(bias_grad),
    )  # fmt: skip
    formats = FORMATS[b.fmt].native_id, FORMATS[a.fmt].native_id
    sizes = b.codes.shape[0], a.codes.shape[0], b.codes.shape[1]
    if a.order == b.order == "sm90":
        lhs = b.codes.data_ptr(), b.scales.data_ptr()
        rhs = a.codes.data_ptr(), a.scales.data_ptr()
        problem = (lhs, formats[0], rhs, formats[1], *sizes)
        status = _SMALL_WORKSPACE
        if parts == 1:
            status = _native.gemm(problem, words, 0, 0, -1, stream(index), index)
        if status == _SMALL_WORKSPACE:
            nbytes = _native.workspace_bytes(problem, words, -1, index, parts)
            address = pointer(scratch(nbytes))
            status = _native.gemm(problem, words, address, nbytes, -1, stream(index), index, parts)
        return supported(status), bias_grad

    sizes = b.rows, a.rows, a.k
    rooms = [
        (0, 0) if operand.order == "sm90" else _native.packed_bytes(operand.rows, operand.k)
        for operand in (b, a)
    ]
    problem = ((0, 0), formats[0], (0, 0), formats[1], *sizes)
    own = _native.workspace_bytes(problem, words, -1, index, parts)
    base = pointer(scratch(own + rooms[0][0] + rooms[1][0]))
    places = []
    for operand, (nbytes, scales_at) in zip((b, a), rooms, strict=True):
        if nbytes == 0:
            places.append((operand.codes.data_ptr(), operand.scales.data_ptr()))
            continue
        places.append((base, base + scales_at))
        pack_into(operand, spread, *places[-1])
        base += nbytes
    problem = (places[0], formats[0], places[1], formats[1], *sizes)
    status = _native.gemm(problem, words, base, own, -1, stream(index), index, parts)
    return supported(status), bias_grad


def operand_sums(operand: Operand, scratch: Callable[[int], Tensor | None]) -> Tensor:
    """fp32 [rows]: the sum over k of an operand's values, in an order that only sizes decide."""
    codes, scales, fmt, order, _ = operand
    if order == "sm90":
        return sm90_layout.packed_values(operand, operand.k, fmt).sum(1).to(_F32)
    rows, k, k_first = operand.rows, operand.k, order == "k_first"
    sums = torch.empty(rows, dtype=_F32, device=codes.device)
    index = codes.device.index
    nbytes = _native.row_sums_workspace_bytes(rows, k, k_first)
    status = _native.row_sums(
        codes.data_ptr(), scales.data_ptr(), rows, k, k_first, FORMATS[fmt].native_id,
        sums.data_ptr(), pointer(scratch(nbytes) if nbytes else None), stream(index), index,
    )  # fmt: skip
    if not supported(status):
        raise RuntimeError("te_mx internal error: the Hopper kernels do not sum this operand")
    return sums

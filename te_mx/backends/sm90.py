"""The Hopper backend: a thin layer over te_mx._sm90, which takes addresses and sizes and returns a
status.

Calls are asynchronous on the current stream, allocate results only, and never wait for the device.
Checks of what a user passes live above.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from te_mx.backends import sm90_layout
from te_mx.backends.base import (
    FLOAT_DTYPES,
    FORMATS,
    GELUS,
    PLAIN,
    SCALE_RULES,
    Epilogue,
    Operand,
    QuantizedParts,
)

ADAPTIVE, EXACT = "sm90_adaptive", "sm90_exact"
_U8, _I32, _F32 = torch.uint8, torch.int32, torch.float32
_OK, _UNSUPPORTED = 0, 2
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
            f"the native module te_mx._sm90 cannot be imported ({_import_error}); install te_mx "
            "where nvcc is found to build it"
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
    """True for ok, False for unsupported; anything else is a bug in te_mx and raises."""
    if status == _OK:
        return True
    if status == _UNSUPPORTED:
        return False
    raise RuntimeError(f"te_mx internal error: a Hopper kernel returned status {status}")


def _pointer(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


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
    if codes.stride() != ((k + 15) & -16, 1) or codes.data_ptr() % 16:
        fresh, _ = empty_operand(rows, k, codes.device)
        codes = fresh.copy_(codes)
    return operand._replace(codes=codes, scales=words.contiguous())


# ----------------------------------------------------------------------------------------- quantize
def quantize(
    x: Tensor, fmt: str, rowwise: bool, columnwise: str | None, rule: str, col_sum: bool,
    spread: int = PLAIN,
) -> QuantizedParts | None:  # fmt: skip
    """As reference.quantize for a non-empty x, or packed operands when spread is 0 or more; None
    when the native code does not take it.
    """
    rows, cols = x.shape
    device = x.device
    if x.stride(1) != 1 or x.is_neg():
        x = x.resolve_neg().contiguous()
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
        sums = torch.empty(cols, dtype=_F32, device=device)
        partial = torch.empty(((rows + 127) // 128, cols), dtype=_F32, device=device)
    index = device.index
    status = _native.quantize(
        (x.data_ptr(), rows, cols, x.stride(0), FLOAT_DTYPES[x.dtype]),
        FORMATS[fmt].native_id, SCALE_RULES[rule], row, col, max(spread, 0),
        _pointer(sums), _pointer(partial), stream(index), index,
    )  # fmt: skip
    if status and not supported(status):
        return None
    return QuantizedParts(row_codes, row_scales, col_codes, col_scales, sums)


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
class GemmCall:
    """One native GEMM call as integers. It keeps the tensors alive whose addresses it holds.

    Operands that are not packed yet are packed into the workspace first.
    """

    __slots__ = ("a", "b", "bias_grad", "epilogue", "index", "keep", "room", "spread", "todo")

    def __init__(
        self, a: Operand, b: Operand, epilogue: Epilogue, out: Tensor, aux: Tensor | None,
        spread: int,
    ) -> None:  # fmt: skip
        bias, gelu_in, kind = epilogue.bias, epilogue.gelu_in, epilogue.bias_grad
        self.index = out.device.index
        if bias is not None:
            bias = bias.contiguous()
        if gelu_in is not None:
            gelu_in = gelu_in.contiguous()
        self.bias_grad = self.todo = None
        result_sums = 0
        if kind == "result":
            self.bias_grad = torch.empty(out.shape[1], dtype=_F32, device=out.device)
            result_sums = self.bias_grad.data_ptr()
        self.a, self.b, self.spread = a, b, spread
        self.room = [0, 0]
        for i, operand in enumerate((b, a)):
            if operand.order != "sm90":
                self.room[i] = _native.packed_bytes(operand.rows, operand.k)[0]
        self.keep = (bias, gelu_in, out, aux)
        self.epilogue = (
            out.data_ptr(), FLOAT_DTYPES[out.dtype], out.shape[1], epilogue.accumulate,
            *_address(bias), GELUS.get(epilogue.gelu or "", 0), *_address(aux),
            *_address(gelu_in), result_sums,
        )  # fmt: skip

    def _problem(self, lhs: tuple[int, int], rhs: tuple[int, int]) -> tuple[Any, ...]:
        a, b = self.a, self.b
        return (
            lhs, FORMATS[b.fmt].native_id, rhs, FORMATS[a.fmt].native_id, b.rows, a.rows, a.k
        )  # fmt: skip

    def workspace_bytes(self) -> int:
        """Scratch bytes that `run` needs: what native code says, for the GEMM and for packing."""
        none = (0, 0)
        nbytes = _native.workspace_bytes(self._problem(none, none), self.epilogue, -1, self.index)
        return nbytes + self.room[0] + self.room[1]

    def run(self, workspace: Tensor | None, nbytes: int) -> str | None:
        """Enqueue it on the current stream; the name of the kernel, or None."""
        base = _pointer(workspace)
        places = []
        for operand, room in zip((self.b, self.a), self.room, strict=True):
            if room:
                place = (base, base + _native.packed_bytes(operand.rows, operand.k)[1])
                pack_into(operand, self.spread, *place)
                base, nbytes = base + room, nbytes - room
            else:
                place = (operand.codes.data_ptr(), operand.scales.data_ptr())
            places.append(place)
        status = _native.gemm(
            self._problem(*places), self.epilogue, base, nbytes, -1, stream(self.index), self.index
        )
        return ADAPTIVE if supported(status) else None


def _address(tensor: Tensor | None) -> tuple[int, int]:
    return (0, 0) if tensor is None else (tensor.data_ptr(), FLOAT_DTYPES[tensor.dtype])


def operand_sums(operand: Operand) -> Tensor:
    """fp32 [rows]: the sum over k of an operand's values, in a fixed order."""
    if operand.order == "sm90":
        return sm90_layout.packed_values(operand, operand.k, operand.fmt).sum(1).to(_F32)
    codes, scales, fmt, order, _ = operand
    values = dequantize(codes, scales, fmt, order, _F32)
    assert values is not None
    return values.sum(1 if order == "k_last" else 0)

"""The Hopper backend: a thin layer over te_mx._sm90, which takes records of addresses and sizes and
returns a status.

Calls are asynchronous on the current stream, allocate results only, and never wait for the device.
Checks of what a user passes live above.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from te_mx.backends.base import (
    BIAS_GRADS,
    FLOAT_DTYPES,
    FORMATS,
    GELUS,
    LAYOUTS,
    SCALE_RULES,
    Epilogue,
    Operand,
    Quantize,
    QuantizedParts,
    code_bytes,
    format_fields,
    pointer,
)
from te_mx.backends.sm90.layouts import tiles as sm90_layout
from te_mx.formats.hadamard import Hadamard
from te_mx.runtime import streams
from te_mx.runtime.streams import stream

ADAPTIVE, EXACT = "sm90_adaptive", "sm90_exact"
_U8, _I32, _F32 = torch.uint8, torch.int32, torch.float32
_OK, _UNSUPPORTED, _SMALL_WORKSPACE, _LAUNCH_FAILED = 0, 2, 3, 4
# Where plain columns lie: those of a matrix [rows, cols] are an operand [cols, rows].
COLUMN_LAYOUTS = {"transposed": LAYOUTS["k_last"], "plain": LAYOUTS["k_first"]}
_TILES = LAYOUTS["sm90"]

_native: Any = None
_import_error: str | None = None
_problems: dict[int, str | None] = {}


def native() -> ModuleType | None:
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


def _on_boundary(tensor: Tensor) -> Tensor:
    """A tensor that starts where the kernels read 16 bytes at once: a view may start between."""
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


# ----------------------------------------------------------------------------------------- quantize
def quantize(what: Quantize) -> QuantizedParts | None:
    """As reference.quantize for a non-empty x, or packed operands when spread is 0 or more, with
    col_sum in sum_dtype; None when the native code does not take it.
    """
    args, parts, _alive = _prepare(what)
    status = _native.quantize(args)
    return parts if status == _OK or supported(status) else None


def quantize_randomly(
    what: Quantize, transforms: Sequence[Hadamard | None], seed: Tensor | None, first: int
) -> QuantizedParts | None:
    """As quantize, of rows and columns after a transform of each, and rounded stochastically where
    there is a seed; None when the native code does not take it."""
    args, parts, _alive = _prepare(what)
    for side, made_by in zip(("row", "col"), transforms, strict=True):
        if made_by is not None:
            setattr(args, f"{side}_hadamard", made_by.size)
            setattr(args, f"{side}_signs", made_by.signs)
    args.seed, args.first = pointer(seed), first
    return parts if supported(_native.quantize(args)) else None


def quantize_two(first: Quantize, second: Quantize) -> tuple[QuantizedParts, QuantizedParts] | None:
    """Both at the same time where the GPU has room; the first without col_sum."""
    (args, parts, _alive), (args2, parts2, _alive2) = _prepare(first), _prepare(second)
    return (parts, parts2) if supported(_native.quantize_two(args, args2)) else None


def quantize_joined(first: Quantize, parts: Sequence[Tensor]) -> QuantizedParts | None:
    """As quantize of all parts as one matrix, of which `first` has the first and says what to make;
    all have its strides. None where the native code does not take them as they lie."""
    x, rows = first.x, [len(part) for part in parts]
    if x.stride(1) != 1 or 0 in rows:
        return None
    (total, cols), device = (sum(rows), x.shape[1]), x.device
    args = _native.QuantizeArgs(
        x_rows=total, x_cols=cols, x_row_stride=x.stride(0), x_dtype=FLOAT_DTYPES[x.dtype]
    )
    set_execution(args, device.index)
    made, _ = set_outputs(args, total, cols, device, first[1:])
    status = _native.quantize_joined(args, [part.data_ptr() for part in parts], rows)
    return made if supported(status) else None


def _prepare(what: Quantize) -> tuple[Any, QuantizedParts, tuple[Any, ...]]:
    """The native record of a call, the tensors that it fills, and what must live until it is
    enqueued."""
    x = what.x if what.x.stride(1) == 1 else what.x.contiguous()
    device = x.device
    rows, cols = x.shape
    args = _native.QuantizeArgs(
        x_data=x.data_ptr(), x_rows=rows, x_cols=cols, x_row_stride=x.stride(0),
        x_dtype=FLOAT_DTYPES[x.dtype],
    )  # fmt: skip
    set_execution(args, device.index)
    parts, partial = set_outputs(args, rows, cols, device, what[1:])
    return args, parts, (x, partial)


def rows_of(x: Tensor) -> Tensor:
    """x with adjacent elements in each row."""
    return x if x.stride(1) == 1 else x.contiguous()


def set_outputs(
    args: Any, rows: int, cols: int, device: torch.device, what: tuple[Any, ...]
) -> tuple[QuantizedParts, Tensor | None]:
    """Write what to make of a matrix (Quantize without its x) into a native record: the tensors
    that it fills, and scratch memory."""
    fmt, rowwise, columnwise, rule, col_sum, sum_dtype, spread = what
    row_codes = row_scales = col_codes = col_scales = sums = partial = None
    packed = spread >= 0
    args.element, args.rule = FORMATS[fmt], SCALE_RULES[rule]
    if packed:
        args.spread = spread
    if rowwise:
        if packed:
            row_codes, row_scales = empty_operand(rows, cols, device)
            args.row_layout = _TILES
        else:
            row_codes = torch.empty((rows, code_bytes(fmt, cols)), dtype=_U8, device=device)
            row_scales = torch.empty((rows, (cols + 31) // 32), dtype=_U8, device=device)
        args.row_codes, args.row_scales = row_codes.data_ptr(), row_scales.data_ptr()
    if columnwise is not None:
        if packed:
            col_codes, col_scales = empty_operand(cols, rows, device)
        elif columnwise == "plain":
            col_codes = torch.empty((rows, cols), dtype=_U8, device=device)
            col_scales = torch.empty(((rows + 31) // 32, cols), dtype=_U8, device=device)
        else:
            col_codes = torch.empty((cols, code_bytes(fmt, rows)), dtype=_U8, device=device)
            col_scales = torch.empty((cols, (rows + 31) // 32), dtype=_U8, device=device)
        args.col_layout = _TILES if packed else COLUMN_LAYOUTS[columnwise]
        args.col_codes, args.col_scales = col_codes.data_ptr(), col_scales.data_ptr()
    if col_sum:
        sums = torch.empty(cols, dtype=sum_dtype, device=device)
        partial = torch.empty(((rows + 127) // 128, cols), dtype=_F32, device=device)
        args.col_sum, args.col_sum_dtype = sums.data_ptr(), FLOAT_DTYPES[sum_dtype]
        args.col_sum_ws = partial.data_ptr()
    return QuantizedParts(row_codes, row_scales, col_codes, col_scales, sums), partial


def values_shape(operand: Operand) -> tuple[int, int]:
    """Shape of the values of a plain operand, as its codes lie."""
    rows, k = operand.rows, operand.k
    return (k, rows) if operand.order == "k_first" else (rows, k)


def dequantize(operand: Operand, dtype: torch.dtype, out: Tensor | None = None) -> Tensor | None:
    """As reference.dequantize for contiguous codes and a native dtype, the result as the codes lie;
    or None."""
    device = operand.codes.device
    if out is None:
        out = torch.empty(values_shape(operand), dtype=dtype, device=device)
    args = _native.DequantizeArgs()
    args.operand = plain_operand(operand)
    args.out, args.out_dtype = out.data_ptr(), FLOAT_DTYPES[dtype]
    set_execution(args, device.index)
    status = _native.dequantize(args)
    return out if supported(status) else None


# --------------------------------------------------------------------------------------------- pack
def plain_operand(operand: Operand) -> Any:
    """The native record of an operand whose codes and scales are contiguous."""
    codes, scales, fmt, order = operand[:4]
    return _native.Operand(
        codes=codes.data_ptr(), scales=scales.data_ptr(), rows=operand.rows, k=operand.k,
        layout=LAYOUTS[order], **format_fields(fmt),
    )  # fmt: skip


def operand_sums(operand: Operand, scratch: Callable[[int], Tensor | None]) -> Tensor:
    """fp32 [rows]: the sum over k of an operand's values, in an order that only sizes decide."""
    rows, k, k_first = operand.rows, operand.k, operand.order == "k_first"
    fp4 = operand.fmt == "e2m1"
    if operand.order == "sm90":
        fmt = "mxfp4" if fp4 else operand.fmt
        return sm90_layout.packed_values(operand, k, fmt).sum(1).to(torch.float32)
    if fp4:
        values = dequantize(operand, torch.float32)
        assert values is not None
        return values.sum(0 if k_first else 1)
    sums = torch.empty(rows, dtype=torch.float32, device=operand.codes.device)
    module = native()
    assert module is not None
    nbytes = module.row_sums_workspace_bytes(rows, k, k_first)
    args = module.RowSumsArgs()
    args.operand, args.out = plain_operand(operand), sums.data_ptr()
    args.workspace, args.workspace_bytes = pointer(scratch(nbytes) if nbytes else None), nbytes
    set_execution(args, operand.codes.device.index)
    status = module.row_sums(args)
    if not supported(status):
        raise RuntimeError("te_mx internal error: the Hopper kernels do not sum this operand")
    return sums


def _pack_record(operand: Operand, spread: int, codes: int, words: int) -> Any:
    args = _native.PackArgs()
    args.operand = plain_operand(operand)
    args.out_codes, args.out_scales, args.out_layout = codes, words, _TILES
    args.spread = spread
    set_execution(args, operand.codes.device.index)
    return args


def pack_into(operand: Operand, spread: int, codes: int, words: int) -> None:
    """Pack a plain operand (k_last or k_first, contiguous) to two device addresses."""
    if not supported(_native.pack(_pack_record(operand, spread, codes, words))):
        raise RuntimeError("te_mx internal error: the Hopper kernels do not pack this operand")


def pack_for_product(sides: Sequence[tuple[Operand, int, int]], spread: int) -> None:
    """Pack plain operands of one product, each to its two device addresses: those of MXFP4 that lie
    by rows in one launch. Their exponents may be others than those of pack(), the product is not.
    """
    fp4: list[Any] = []
    rest: list[Any] = []
    for operand, codes, words in sides:
        nibbles = operand.fmt == "e2m1" and operand.order == "k_last"
        (fp4 if nibbles else rest).append(_pack_record(operand, spread, codes, words))
    unpack = _native.unpack if len(fp4) == 1 else _native.unpack_two
    if fp4 and not supported(unpack(*fp4)):
        rest += fp4
    if not all(supported(_native.pack(record)) for record in rest):
        raise RuntimeError("te_mx internal error: the Hopper kernels do not pack these operands")


def pack(operand: Operand, spread: int) -> Operand:
    """A plain, non-empty operand as one of order "sm90"."""
    codes, words = empty_operand(operand.rows, operand.k, operand.codes.device)
    pack_into(operand, spread, codes.data_ptr(), words.data_ptr())
    return Operand(codes, words, operand.fmt, "sm90")


# --------------------------------------------------------------------------------------------- gemm
def gemm_record(
    a: Operand, b: Operand, epilogue: Epilogue, out: Tensor, aux: Tensor | None, parts: int = 1,
    tile: int = -1,
) -> tuple[Any, Tensor | None, tuple[Tensor | None, ...]]:  # fmt: skip
    """The native record of out = epilogue(b @ a^T) on the current stream, without a workspace; the
    bias gradient of the result that it fills, or None; and what must live until it is enqueued."""
    bias, gelu_in = epilogue.bias, epilogue.gelu_in
    if bias is not None:
        bias = bias.contiguous()
    if gelu_in is not None:
        gelu_in = _on_boundary(gelu_in.contiguous())
    bias_grad = None
    if epilogue.bias_grad == "result":
        bias_grad = torch.empty(out.shape[1], dtype=_F32, device=out.device)
    args = _native.GemmArgs(
        lhs=plain_operand(b), rhs=plain_operand(a), out=out.data_ptr(),
        out_dtype=FLOAT_DTYPES[out.dtype], ldo=out.shape[1], accumulate=epilogue.accumulate,
        parts=parts, kernel=tile,
    )  # fmt: skip
    if bias is not None:
        args.bias, args.bias_dtype = bias.data_ptr(), FLOAT_DTYPES[bias.dtype]
    if epilogue.gelu is not None:
        args.gelu = GELUS[epilogue.gelu]
    if aux is not None:
        args.aux, args.aux_dtype = aux.data_ptr(), FLOAT_DTYPES[aux.dtype]
    if gelu_in is not None:
        args.gelu_in, args.gelu_in_dtype = gelu_in.data_ptr(), FLOAT_DTYPES[gelu_in.dtype]
    if bias_grad is not None:
        args.bias_grad_kind, args.bias_grad = BIAS_GRADS["result"], bias_grad.data_ptr()
    set_execution(args, out.device.index)
    return args, bias_grad, (bias, gelu_in)


def gemm(
    a: Operand, b: Operand, epilogue: Epilogue, out: Tensor, aux: Tensor | None, spread: int,
    scratch: Callable[[int], Tensor | None], parts: int = 1, tile: int = -1,
) -> tuple[bool, Tensor | None]:  # fmt: skip
    """Enqueue out = epilogue(b @ a^T) on the current stream: (whether native code took it, the
    bias gradient of the result or None).

    `scratch` gives a workspace of so many bytes. Operands that are not packed yet are packed there
    first. Most problems need none, so the size is asked for only when the kernel refuses. K is cut
    into `parts`, whose sums need some. tile: the configuration, -1 where native code chooses.
    """
    args, bias_grad, _alive = gemm_record(a, b, epilogue, out, aux, parts, tile)
    if a.order == b.order == "sm90":
        status = _native.gemm(args) if parts == 1 else _SMALL_WORKSPACE
        if status == _SMALL_WORKSPACE:
            args.workspace_bytes = nbytes = _native.workspace_bytes(args)
            args.workspace = pointer(scratch(nbytes))
            status = _native.gemm(args)
        return supported(status), bias_grad

    rooms = [
        (0, 0) if operand.order == "sm90" else _native.packed_bytes(operand.rows, operand.k)
        for operand in (b, a)
    ]
    args.workspace_bytes = own = _native.workspace_bytes(args)
    base = pointer(scratch(own + rooms[0][0] + rooms[1][0]))
    plain = []
    for side, operand, (nbytes, scales_at) in zip(("lhs", "rhs"), (b, a), rooms, strict=True):
        if nbytes:
            plain.append((operand, base, base + scales_at))
            packed = {"codes": base, "scales": base + scales_at, "layout": _TILES}
            setattr(args, side, getattr(args, side).copy(**packed))
            base += nbytes
    pack_for_product(plain, spread)
    args.workspace = base
    return supported(_native.gemm(args)), bias_grad

"""Calls of the native Hopper module on tensors, with poisoned outputs, and data to test them on."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import torch
from torch import Tensor

from te_mx.backends.base import BIAS_GRADS, LAYOUTS, format_fields
from te_mx.backends.sm90.layouts import tiles as layout
from te_mx.backends.sm90.layouts.tiles import PackedOperand

sys.path.append(str(Path(__file__).parents[1] / "helpers"))  # for the scripts of this folder
import emulated_hopper
import native_words as reference

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
FORMATS = {"e4m3": 0, "e5m2": 1}
RULES = {"rceil": 0, "floor": 1}
GELUS = {None: 0, "tanh": 1, "erf": 2}


def native():
    if emulated_hopper.path() is not None:  # also where cases are collected
        return emulated_hopper.native()
    import te_mx._sm90 as module

    return module


def full_configs() -> list[int]:
    """Configurations of the GEMM with every epilogue."""
    return [i for i in range(native().config_count()) if native().config_full(i)]


def stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def address(t: Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()


def poisoned_packed(rows: int, k: int) -> PackedOperand:
    codes, scales = layout.packed_shapes(rows, k)
    return PackedOperand(
        torch.full(codes, 0xA5, dtype=torch.uint8, device="cuda"),
        torch.full(scales, 0x5A5A5A5A, dtype=torch.int32, device="cuda"),
    )


def poisoned_plain(rows: int, k: int) -> PackedOperand:
    return PackedOperand(
        torch.full((rows, k), 0xA5, dtype=torch.uint8, device="cuda"),
        torch.full((rows, -(-k // 32)), 0x5A, dtype=torch.uint8, device="cuda"),
    )


def matrix(x: Tensor):
    """The native record of a matrix."""
    rows, cols = x.shape
    return native().Matrix(
        data=address(x), rows=rows, cols=cols, row_stride=x.stride(0), dtype=DTYPES[x.dtype]
    )


def out_record(out, kind):
    """The native record of an operand to write; kinds are those of quantize(), or an order."""
    if out is None:
        return native().OperandOut()
    order = {"plain": "k_last", "packed": "sm90", "as_x": "k_first"}.get(kind, kind)
    codes, scales = map(address, out)
    return native().OperandOut(codes=codes, scales=scales, layout=LAYOUTS[order])


def side(operand, rows: int, k: int, fmt: str, order: str):
    """The native record of an operand to read."""
    codes, scales = map(address, operand)
    return native().Operand(
        codes=codes, scales=scales, rows=rows, k=k, layout=LAYOUTS[order], **format_fields(fmt)
    )


def groups_record(offs: Tensor, rows: int, capacity: int):
    """The native record of groups."""
    return native().Groups(
        count=len(offs), rows=rows, ends=address(offs), ends_int32=offs.dtype == torch.int32,
        capacity=capacity,
    )  # fmt: skip


def plain_order(k_first: bool) -> str:
    return "k_first" if k_first else "k_last"


def quantize(x, fmt="e4m3", rule="rceil", row="packed", col="packed", spread=8, col_sum=None):
    """Forms are "packed", "plain" or None, and "as_x" for plain columns that are not transposed;
    col_sum is a dtype or None.

    Returns (row, col, col_sum).
    """
    rows, cols = x.shape
    make = {
        "packed": poisoned_packed,
        "plain": poisoned_plain,
        "as_x": lambda *shape: PackedOperand(*(t.t().contiguous() for t in poisoned_plain(*shape))),
        None: lambda *_: None,
    }
    row_out, col_out = make[row](rows, cols), make[col](cols, rows)
    sums = None if col_sum is None else torch.full((cols,), math.nan, dtype=col_sum, device="cuda")
    partial = torch.full((-(-rows // 128), cols), math.nan, device="cuda") if col_sum else None

    args = native().QuantizeArgs(
        x=matrix(x),
        element=FORMATS[fmt],
        rule=RULES[rule],
        row=out_record(row_out, row),
        col=out_record(col_out, col),
        spread=spread,
        col_sum=address(sums),
        col_sum_dtype=0 if col_sum is None else DTYPES[col_sum],
        col_sum_ws=address(partial),
        stream=stream(),
    )
    assert native().quantize(args) == 0
    return row_out, col_out, sums


def pack(codes, scales, fmt, spread=8, k_first=False):
    """codes [rows, k], scales [rows, ceil(k/32)], or both transposed when k_first."""
    rows, k = codes.shape[::-1] if k_first else codes.shape
    out = poisoned_packed(rows, k)
    args = native().PackArgs(
        operand=side((codes, scales), rows, k, fmt, plain_order(k_first)),
        out=out_record(out, "packed"),
        spread=spread,
        stream=stream(),
    )
    assert native().pack(args) == 0
    return out


def row_sums(codes, scales, fmt, k_first=False):
    """Sums over k of the values of an operand, laid out as in pack."""
    rows, k = codes.shape[::-1] if k_first else codes.shape
    out = torch.full((rows,), math.nan, device="cuda")
    size = native().row_sums_workspace_bytes(rows, k, k_first)
    guard = torch.full((size // 4 + 64,), -123.0, device="cuda")
    args = native().RowSumsArgs(
        operand=side((codes, scales), rows, k, fmt, plain_order(k_first)),
        out=address(out),
        workspace=address(guard),
        workspace_bytes=size,
        stream=stream(),
    )
    assert native().row_sums(args) == 0
    torch.cuda.synchronize()
    assert (guard[size // 4 :] == -123.0).all(), "row_sums wrote behind its workspace"
    return out


def dequantize(codes, scales, fmt, dtype, order="k_last"):
    out = torch.full(codes.shape, math.nan, dtype=dtype, device="cuda")
    rows, k = codes.shape[::-1] if order == "k_first" else codes.shape
    args = native().DequantizeArgs(
        operand=side((codes, scales), rows, k, fmt, order),
        out=address(out),
        out_dtype=DTYPES[dtype],
        stream=stream(),
    )
    assert native().dequantize(args) == 0
    return out


def operand(x: Tensor, fmt: str, spread: int = 8) -> PackedOperand:
    """x [R, K] quantized by the reference and packed by the kernel."""
    parts = reference.quantize(x, fmt, True, None, "rceil", False)
    return pack(parts.row_codes, parts.row_scales, fmt, spread)


def gemm(
    lhs,
    rhs,
    shape,
    formats=("e4m3", "e4m3"),
    out_dtype=torch.bfloat16,
    out=None,
    accumulate=False,
    bias=None,
    gelu=None,
    aux=None,
    gelu_in=None,
    bias_grad=None,
    config=-1,
    parts=1,
):
    """D [M, N] = lhs [M, K] @ rhs [N, K].T with the epilogue; shape is (M, N, K), and K is cut into
    parts."""
    m, n, k = shape
    if out is None:
        out = torch.full((m, n), math.nan, dtype=out_dtype, device="cuda")

    def dtype(t):
        return 0 if t is None else DTYPES[t.dtype]

    args = native().GemmArgs(
        lhs=side(lhs, m, k, formats[0], "sm90"),
        rhs=side(rhs, n, k, formats[1], "sm90"),
        out=address(out),
        out_dtype=DTYPES[out.dtype],
        ldo=out.stride(0),
        accumulate=accumulate,
        bias=address(bias),
        bias_dtype=dtype(bias),
        gelu=GELUS[gelu],
        aux=address(aux),
        aux_dtype=dtype(aux),
        gelu_in=address(gelu_in),
        gelu_in_dtype=dtype(gelu_in),
        bias_grad_kind=0 if bias_grad is None else BIAS_GRADS["result"],
        bias_grad=address(bias_grad),
        kernel=config,
        parts=parts,
        stream=stream(),
    )
    size = native().workspace_bytes(args)
    guard = torch.full((size // 4 + 64,), math.nan, device="cuda")
    guard[size // 4 :] = -123.0
    assert native().gemm(args.copy(workspace=address(guard), workspace_bytes=size)) == 0
    torch.cuda.synchronize()
    assert (guard[size // 4 :] == -123.0).all(), "the GEMM wrote behind its workspace"
    return out


def data(rows, cols, kind, dtype=torch.bfloat16, seed=0):
    """Random [rows, cols] of one kind; blocks run along the columns."""
    g = torch.Generator("cuda").manual_seed(seed + 7 * rows + cols)
    x = torch.randn(rows, cols, generator=g, device="cuda")
    blocks = -(-cols // 32)

    def powers(low, high, *shape):
        return torch.exp2(torch.randint(low, high, shape, generator=g, device="cuda").float())

    if kind == "rows":
        x *= powers(-20, 21, rows, 1)
    elif kind == "channels":  # one in a hundred is 100 times larger
        x[:, torch.rand(cols, generator=g, device="cuda") < 0.01] *= 100
    elif kind == "student":
        x /= torch.randn(rows, cols, 3, generator=g, device="cuda").square().mean(-1).sqrt()
    elif kind == "lognormal":
        x = torch.exp2(4 * x) * torch.sign(torch.randn(rows, cols, generator=g, device="cuda"))
    elif kind == "spread":
        x *= powers(-15, 16, rows, blocks).repeat_interleave(32, 1)[:, :cols]
    elif kind == "mixed":  # tiles of several classes
        x *= powers(-20, 21, rows, -(-cols // 128)).repeat_interleave(128, 1)[:, :cols]
        x[:, 32:64] *= 2.0**20
        x[:, : cols // 2] *= powers(-3, 4, rows, 1)
    elif kind == "huge":
        x *= 2.0**80
    elif kind == "ends":  # blocks as large and as small as numbers are, beside each other
        x = x.clamp(-3.9, 3.9) * 2.0**126
        x[1::3] *= 2.0**-220
        x[:, 2::7] *= 2.0**-30
    elif kind == "tiny":
        x *= 1e-37
    elif kind == "sparse":
        x[torch.rand(rows, cols, generator=g, device="cuda") < 0.97] = 0
    elif kind == "nan":
        x[torch.rand(rows, cols, generator=g, device="cuda") < 2e-4] = math.nan
        x[torch.rand(rows, cols, generator=g, device="cuda") < 2e-4] = math.inf
        x[torch.rand(rows, cols, generator=g, device="cuda") < 0.1] = -0.0
    return x.to(dtype)


def ulp(v: Tensor, dtype: torch.dtype) -> Tensor:
    bits = {torch.bfloat16: 7, torch.float16: 10, torch.float32: 23}[dtype]
    least = -14 if dtype is torch.float16 else -126
    return torch.exp2(torch.floor(torch.log2(v.abs().clamp(min=1e-300))).clamp(min=least) - bits)

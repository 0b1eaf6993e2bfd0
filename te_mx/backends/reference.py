"""The reference backend: plain torch, readable, on every device. It is the specification of te_mx's
numbers.

Quantization is integer work on the bits of fp32, so it gives the same bytes on every device and in
every denormal mode.
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from te_mx.backends.base import (
    BLOCK,
    FORMATS,
    ElementFormat,
    Epilogue,
    Operand,
    QuantizedParts,
    blocks,
)
from te_mx.backends.sm90_layout import packed_values

NAN_CODE, NAN_SCALE = 0x7F, 255
_IMPLICIT_BIT, _MANTISSA, _INF = 1 << 23, (1 << 23) - 1, 0x7F800000


# ----------------------------------------------------------------------------------------- quantize
@torch.no_grad()
def quantize(
    x: Tensor, fmt: str, rowwise: bool, columnwise: str | None, rule: str, col_sum: bool
) -> QuantizedParts:
    """Quantize x [rows, cols] along its rows and/or its columns; see QuantizedParts for the shapes.

    Every 32 elements share the scale 2^(byte-127); code = round(x * 2^(127-byte)).
    """
    element = FORMATS[fmt]
    bits = x.detach().to(torch.float32).contiguous().view(torch.int32)
    row_codes = row_scales = col_codes = col_scales = sums = None
    if rowwise:
        row_codes, row_scales = _quantize_last(bits, element, rule)
    if columnwise is not None:
        col_codes, col_scales = _quantize_last(bits.t(), element, rule)
        if columnwise == "plain":
            col_codes, col_scales = col_codes.t().contiguous(), col_scales.t().contiguous()
    if col_sum:
        sums = x.detach().sum(0, dtype=torch.float32)
    return QuantizedParts(row_codes, row_scales, col_codes, col_scales, sums)


def _quantize_last(bits: Tensor, element: ElementFormat, rule: str) -> tuple[Tensor, Tensor]:
    """fp32 bits [rows, k] -> codes [rows, k], scales [rows, ceil(k/32)], blocks along the last
    dimension.
    """
    rows, k = bits.shape
    padded = torch.nn.functional.pad(bits, (0, blocks(k) * BLOCK - k))
    tiles = padded.view(rows, blocks(k), BLOCK)
    magnitude = tiles & 0x7FFFFFFF  # ordered like the absolute values; NaN and Inf come out on top
    amax = magnitude.amax(-1) if tiles.numel() else magnitude.new_zeros(rows, blocks(k))
    scales = scale_bytes(amax, element, rule)
    codes = _encode(magnitude, scales.unsqueeze(-1), element)
    codes |= (tiles >> 24) & 0x80
    codes = torch.where(scales.unsqueeze(-1) == NAN_SCALE, NAN_CODE, codes)
    codes = codes.view(padded.shape)[:, :k].to(torch.uint8).contiguous()
    return codes, scales.to(torch.uint8)


def scale_bytes(amax: Tensor, element: ElementFormat, rule: str) -> Tensor:
    """Scale byte (int32) of blocks whose largest magnitude has the fp32 bits `amax` (int32).

    rceil: q = fp32(amax * fp32(1/max)), the byte is the biased exponent of q rounded up to a power
    of two.
    floor: max(biased exponent of amax - emax, 0).
    """
    if rule == "floor":
        byte = ((amax >> 23) - element.emax).clamp(min=0)
    else:
        q = _multiply_bits(amax, 1.0 / element.max)
        exponent, mantissa = q >> 23, q & _MANTISSA
        # Below the normal range 2^-127 (mantissa 0x400000) is the value of byte 0.
        byte = torch.where(exponent > 0, exponent + (mantissa != 0), (mantissa > 0x400000).int())
    return torch.where(amax >= _INF, NAN_SCALE, byte)


def _multiply_bits(amax: Tensor, factor: float) -> Tensor:
    """Bits of fp32(amax * fp32(factor)) for finite amax >= 0 and factor < 1, to nearest even.

    Done in integers, because a subnormal product is lost where the processor flushes denormals. A
    subnormal amax gives 0: its product lies below 2^-127, which is all that a caller looks at.
    """
    factor_bits = struct.unpack("<i", struct.pack("<f", factor))[0]
    exponent = amax >> 23
    product = ((amax & _MANTISSA) | _IMPLICIT_BIT).long() * (
        factor_bits & _MANTISSA | _IMPLICIT_BIT
    )
    carry = (product >> 47).int()
    q_exponent = exponent + (factor_bits >> 23) - 127 + carry
    subnormal_shift = (1 - q_exponent).clamp(0, 30)
    mantissa = _round_shift(product, (23 + carry + subnormal_shift).long()).int()
    # The implicit bit carries into the exponent.
    q = ((q_exponent.clamp(min=1) - 1) << 23) + mantissa
    return torch.where(exponent > 0, q, 0)


def _encode(magnitude: Tensor, byte: Tensor, element: ElementFormat) -> Tensor:
    """Codes (int32, no sign) of fp32 magnitudes v (int32 bits): round(v * 2^(127-byte))."""
    exponent, mantissa = _normalize(magnitude)
    power = exponent - byte  # exponent of v * 2^(127-byte): 127 cancels
    drop = 23 - element.mantissa_bits + (element.emin - power).clamp(min=0)
    kept = _round_shift(mantissa, drop.clamp(max=30))
    code = ((power.clamp(min=element.emin) - element.emin) << element.mantissa_bits) + kept
    return code.clamp(max=element.max_code)


def _normalize(magnitude: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 magnitude bits -> (biased exponent, 24-bit mantissa): mantissa * 2^(exponent-150).

    A subnormal number is normalized, which makes its exponent 0 or less. Zero has mantissa 0 and an
    exponent below all.
    """
    exponent, mantissa = magnitude >> 23, magnitude & _MANTISSA
    # An integer of up to 23 bits is exact in fp32, and its exponent says where its top bit is.
    as_float = mantissa.to(torch.float32).view(torch.int32)
    subnormal = exponent == 0
    exponent = torch.where(subnormal, (as_float >> 23) - 127 - 22, exponent)
    mantissa = torch.where(subnormal, as_float & _MANTISSA, mantissa) | _IMPLICIT_BIT
    zero = magnitude == 0
    return torch.where(zero, -1000, exponent), torch.where(zero, 0, mantissa)


def _round_shift(value: Tensor, shift: Tensor) -> Tensor:
    """value >> shift, rounded to nearest, ties to even. shift >= 1."""
    odd = (value >> shift) & 1
    one = torch.ones_like(value)
    return (value + (one << (shift - 1)) - 1 + odd) >> shift


# --------------------------------------------------------------------------------------- dequantize
@torch.no_grad()
def dequantize(codes: Tensor, scales: Tensor, fmt: str, order: str, dtype: torch.dtype) -> Tensor:
    """code * 2^(byte-127) in the shape of codes, rounded once to dtype; scale byte 255 gives NaN.

    order "k_last": blocks along the last dimension; "k_first": blocks along the first one. A value
    of 2^128 or more (rounding up the largest fp32 numbers gives one) becomes Inf in dtypes that
    cannot hold it.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    element = decode(codes, fmt).to(wide)
    exponents = _spread(scales, codes.shape, order).int() - 127
    # Two factors, so that neither the factors nor the first product leave the normal range of fp32.
    half = exponents >> 1
    values = element * _pow2(half).to(wide) * _pow2(exponents - half).to(wide)
    return torch.where(exponents == NAN_SCALE - 127, torch.nan, values).to(dtype)


def decode(codes: Tensor, fmt: str) -> Tensor:
    """fp32 values of element codes (uint8), without their scales."""
    element = FORMATS[fmt]
    bits = codes.int()
    exponent = (bits & 0x7F) >> element.mantissa_bits
    mantissa = bits & ((1 << element.mantissa_bits) - 1)
    significand = mantissa + ((exponent > 0).int() << element.mantissa_bits)
    power = exponent.clamp(min=1) - element.bias - element.mantissa_bits
    value = significand.float() * _pow2(power)
    if element.name == "e4m3":
        value = torch.where((bits & 0x7F) == 0x7F, torch.nan, value)
    else:
        special = torch.where(mantissa == 0, torch.inf, torch.nan).float()
        value = torch.where(exponent == 31, special, value)
    return torch.where(bits >= 0x80, -value, value)


def _pow2(exponent: Tensor) -> Tensor:
    """fp32 2^exponent for int32 exponents in [-126, 127]."""
    return ((exponent + 127) << 23).view(torch.float32)


def _spread(scales: Tensor, shape: torch.Size, order: str) -> Tensor:
    """Repeat each scale over its block, so that the result has the shape of the codes."""
    if order == "k_last":
        return scales.repeat_interleave(BLOCK, dim=1)[:, : shape[1]]
    return scales.repeat_interleave(BLOCK, dim=0)[: shape[0]]


# --------------------------------------------------------------------------------------------- gemm
@torch.no_grad()
def gemm(
    a: Operand, b: Operand, epilogue: Epilogue, out: Tensor, aux: Tensor | None
) -> Tensor | None:
    """out [n, m] = epilogue(b [n, k] @ a [m, k]^T); writes out and aux, returns bias_grad.

    On the CPU products are exact and sums are double, rounded once to fp32. Elsewhere (fp64 is slow
    or missing there) the operands are fp32 values relative to the largest scale of their row,
    multiplied by torch.mm without TF32; numbers more than 2^100 below the largest of their row may
    then be lost.
    """
    bias_grad = None
    if epilogue.bias_grad == "operand":
        bias_grad = _values(b).sum(1).to(torch.float32)
    return finish(matmul(a, b), bias_grad, epilogue, out, aux)


@torch.no_grad()
def finish(
    value: Tensor, bias_grad: Tensor | None, epilogue: Epilogue, out: Tensor, aux: Tensor | None
) -> Tensor | None:
    """The epilogue of fp32 sums `value` [n, m]; bias_grad is the one of the operand, if asked."""
    if epilogue.bias is not None:
        value = value + epilogue.bias.to(torch.float32)
    if aux is not None:
        aux.copy_(value)
    approximate = "tanh" if epilogue.gelu == "tanh" else "none"
    if epilogue.gelu_in is not None:
        gelu_in = epilogue.gelu_in.to(torch.float32)
        value = torch.ops.aten.gelu_backward(value, gelu_in, approximate=approximate)
    elif epilogue.gelu is not None:
        value = torch.nn.functional.gelu(value, approximate=approximate)
    if epilogue.bias_grad == "result":
        bias_grad = value.sum(0)
    if epilogue.accumulate:
        value = value + out.to(torch.float32)
    out.copy_(value)
    return bias_grad


def matmul(a: Operand, b: Operand) -> Tensor:
    """fp32 b @ a^T of two operands, without an epilogue."""
    if a.codes.device.type == "cpu" or "sm90" in (a.order, b.order):
        return torch.mm(_values(b).double(), _values(a).double().t()).to(torch.float32)
    return relative_matmul(a, b)


def relative_matmul(a: Operand, b: Operand) -> Tensor:
    """b @ a^T in fp32 on values relative to the largest scale of their row, for devices without
    fast fp64.
    """
    a_values, a_exponent = _relative(a)
    b_values, b_exponent = _relative(b)
    value = _mm_without_tf32(b_values, a_values.t())
    exponent = (b_exponent + a_exponent.t()).clamp(-300, 300)
    # Three factors: 2^exponent itself may be out of fp32's range while the result is not.
    third = exponent // 3
    return value * _pow2(third) * _pow2(third) * _pow2(exponent - 2 * third)


def _values(operand: Operand) -> Tensor:
    """Exact values [rows, k], contiguous whatever the order, so that every layout runs the same
    torch.mm.

    fp64 on the CPU and for operands packed for Hopper, fp32 elsewhere.
    """
    if operand.order == "sm90":
        return packed_values(operand, operand.k, operand.fmt)
    dtype = torch.float64 if operand.codes.device.type == "cpu" else torch.float32
    values = dequantize(operand.codes, operand.scales, operand.fmt, operand.order, dtype)
    return values if operand.order == "k_last" else values.t().contiguous()


def _relative(operand: Operand) -> tuple[Tensor, Tensor]:
    """fp32 values [rows, k] divided by 2^exponent [rows, 1], the largest scale of each row."""
    codes, scales = operand.codes, operand.scales
    if operand.order == "k_first":
        codes, scales = codes.t().contiguous(), scales.t().contiguous()
    bytes_ = scales.int()
    finite = torch.where(bytes_ == NAN_SCALE, 0, bytes_)
    top = finite.amax(1, keepdim=True) if finite.numel() else finite.new_zeros(len(finite), 1)
    power = _spread((finite - top).clamp(min=-100), codes.shape, "k_last")
    nan = _spread(bytes_ == NAN_SCALE, codes.shape, "k_last")
    values = torch.where(nan, torch.nan, decode(codes, operand.fmt) * _pow2(power))
    return values, top - 127


def _mm_without_tf32(left: Tensor, right: Tensor) -> Tensor:
    if left.device.type != "cuda":
        return torch.mm(left, right)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        return torch.mm(left, right)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before

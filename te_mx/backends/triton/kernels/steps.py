"""What a quantizer reads, a tile at a time: a matrix, or what a step makes of one: normalizations,
activations and their derivatives. The formulas are those of backends/reference/fused.py, each
operation rounded, so kernels are compiled without contraction."""

import triton
import triton.language as tl

from te_mx.backends.triton.kernels.encode import bits_of, rounded


@triton.jit
def _read(x, r, c, there, stride):
    """fp32 of a tile; exact."""
    values = tl.load(x + r.to(tl.int64)[:, None] * stride + c[None, :], mask=there, other=0.0)
    return bits_of(values).to(tl.float32, bitcast=True)


@triton.jit
def _sigmoid(x):
    return tl.div_rn(tl.zeros_like(x) + 1.0, 1.0 + tl.exp(-x))


@triton.jit
def _slope(ACT: tl.constexpr, ALPHA: tl.constexpr):
    return 1.702 if ACT == "qgelu" else ALPHA if ACT == "clamped_silu" else 1.0


@triton.jit
def _value(x, ACT: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr):
    if ACT == "gelu":
        return x * _sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    if ACT == "gelu_erf":
        return 0.5 * x * (1.0 + tl.math.erf(x * 0.7071067811865476))
    if ACT == "relu":
        return tl.where(x < 0, 0.0, x)
    if ACT == "srelu":
        y = tl.where(x < 0, 0.0, x)
        return y * y
    if ACT == "sigmoid":
        return _sigmoid(x)
    if ACT == "clamped_silu":
        x = tl.where(x > LIMIT, LIMIT, x)
    return x * _sigmoid(_slope(ACT, ALPHA) * x)


@triton.jit
def _derivative(x, ACT: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr):
    if ACT == "gelu":
        s = _sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        return s + x * (s * (1.0 - s)) * (1.5957691216057308 * (1.0 + 0.134145 * x * x))
    if ACT == "gelu_erf":
        density = 0.3989422804014327 * tl.exp(-0.5 * x * x)
        return 0.5 * (1.0 + tl.math.erf(x * 0.7071067811865476)) + x * density
    if ACT == "relu":
        return tl.where(x > 0, 1.0, 0.0)
    if ACT == "srelu":
        y = 2.0 * x
        return tl.where(y < 0, 0.0, y)
    if ACT == "sigmoid":
        s = _sigmoid(x)
        return s * (1.0 - s)
    limited = tl.where(x > LIMIT, LIMIT, x) if ACT == "clamped_silu" else x
    u = _slope(ACT, ALPHA) * limited
    s = _sigmoid(u)
    slope = u * (s * (1.0 - s)) + s
    return tl.where(x > LIMIT, 0.0, slope) if ACT == "clamped_silu" else slope


@triton.jit
def _gate(b, ACT: tl.constexpr, LIMIT: tl.constexpr, OFFSET: tl.constexpr):
    """The factor that a gate column makes."""
    if ACT != "clamped_silu":
        return b
    return tl.where(b > LIMIT, LIMIT, tl.where(b < -LIMIT, -LIMIT, b)) + OFFSET


@triton.jit
def _normalized(x, r, c, rows, cols, mean, rstd, weight, bias):
    if mean is not None:
        x = x - tl.load(mean + r, mask=r < rows, other=0.0)[:, None]
    x = x * tl.load(rstd + r, mask=r < rows, other=0.0)[:, None]
    x = x * tl.load(weight + c, mask=c < cols, other=0.0)[None, :]
    if bias is not None:
        x = x + tl.load(bias + c, mask=c < cols, other=0.0)[None, :]
    return x


@triton.jit
def _made(
    x, r, c, rows, cols, stride, out, grad, mean, rstd, weight, bias, STEP: tl.constexpr,
    ACT: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr,
    OFFSET: tl.constexpr, TO: tl.constexpr,
):
    """The same of what a step makes of x."""
    there = (r < rows)[:, None] & (c < cols)[None, :]
    if STEP == "norm":
        value = _read(x, r, c, there, stride)
        value = _normalized(value, r, c, rows, cols, mean, rstd, weight, bias)
    elif STEP == "act":
        value = _value(_read(x, r, c, there, stride), ACT, LIMIT, ALPHA)
        if GATED:
            value *= _gate(_read(x, r, cols + c, there, stride), ACT, LIMIT, OFFSET)
    elif GATED:  # half of the columns are those of what was activated, the others of gates
        half = cols // 2
        column = tl.where(c < half, c, c - half)
        a, b = _read(x, r, column, there, stride), _read(x, r, half + column, there, stride)
        g = _read(grad, r, column, there, half)
        d_gate = g * _value(a, ACT, LIMIT, ALPHA)
        if ACT == "clamped_silu":
            d_gate *= tl.where((b > LIMIT) | (b < -LIMIT), 0.0, 1.0)
        d_act = (g * _gate(b, ACT, LIMIT, OFFSET)) * _derivative(a, ACT, LIMIT, ALPHA)
        value = tl.where((c < half)[None, :], d_act, d_gate)
    else:
        value = _read(grad, r, c, there, cols)
        value *= _derivative(_read(x, r, c, there, stride), ACT, LIMIT, ALPHA)
    made = rounded(value, TO)
    if out is not None:
        tl.store(out + r.to(tl.int64)[:, None] * cols + c[None, :], made, mask=there)
    return tl.where(there, bits_of(made), 0)


@triton.jit
def tile(
    x, r, c, rows, cols, stride, out, grad, mean, rstd, weight, bias, STEP: tl.constexpr,
    ACT: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr,
    OFFSET: tl.constexpr, TO: tl.constexpr,
):
    """The bits of fp32 of a tile of what is quantized, [rows, cols]: rows r and columns c of x, or
    of what a step makes of x ("norm", "act" or "dact"), rounded to TO; zeros outside. out: where
    the values go, too; or None."""
    if STEP == "":
        there = (r < rows)[:, None] & (c < cols)[None, :]
        at = x + r.to(tl.int64)[:, None] * stride + c[None, :]
        return bits_of(tl.load(at, mask=there, other=0.0))
    else:
        return _made(
            x, r, c, rows, cols, stride, out, grad, mean, rstd, weight, bias, STEP, ACT, GATED,
            LIMIT, ALPHA, OFFSET, TO,
        )


@triton.jit
def _half(lanes, R: tl.constexpr, WIDTH: tl.constexpr):
    lower, upper = tl.split(tl.permute(tl.reshape(lanes, (R, 2, WIDTH)), (0, 2, 1)))
    return lower + upper


@triton.jit
def _lane_sum(lanes, R: tl.constexpr):
    """The sums of rows [R, 256] of lanes, as lane_sum of reference.fused adds them."""
    lanes = _half(_half(_half(_half(lanes, R, 128), R, 64), R, 32), R, 16)
    return _half(_half(_half(_half(lanes, R, 8), R, 4), R, 2), R, 1)


@triton.jit
def norm_sums(
    x, mean, rstd, rows, cols, stride, inverse, eps, R: tl.constexpr
):
    """mean (None: taken as zero) and 1 / sqrt(variance + eps) of rows."""
    r = tl.program_id(0) * R + tl.arange(0, R)
    center = tl.zeros((R, 1), tl.float32)
    if mean is not None:
        lanes = tl.zeros((R, 256), tl.float32)
        for first in range(0, cols, 256):
            c = first + tl.arange(0, 256)
            lanes += _read(x, r, c, (r < rows)[:, None] & (c < cols)[None, :], stride)
        center = _lane_sum(lanes, R) * inverse
        tl.store(mean + r[:, None], center, mask=(r < rows)[:, None])
    lanes = tl.zeros((R, 256), tl.float32)
    for first in range(0, cols, 256):
        c = first + tl.arange(0, 256)
        there = (r < rows)[:, None] & (c < cols)[None, :]
        off = tl.where(there, _read(x, r, c, there, stride) - center, 0.0)
        lanes += off * off
    root = tl.sqrt_rn(_lane_sum(lanes, R) * inverse + eps)
    root = tl.div_rn(tl.zeros_like(root) + 1.0, root)
    tl.store(rstd + r[:, None], root, mask=(r < rows)[:, None])


@triton.jit
def norm_backward(
    dz, x, weight, mean, rstd, dx, rows, cols, dz_stride, stride, inverse, R: tl.constexpr
):
    """dx of rows."""
    r = tl.program_id(0) * R + tl.arange(0, R)
    center = tl.zeros((R, 1), tl.float32)
    if mean is not None:
        center += tl.load(mean + r, mask=r < rows, other=0.0)[:, None]
    root = tl.load(rstd + r, mask=r < rows, other=0.0)[:, None]
    of_v, of_vh = tl.zeros((R, 256), tl.float32), tl.zeros((R, 256), tl.float32)
    for first in range(0, cols, 256):
        c = first + tl.arange(0, 256)
        there = (r < rows)[:, None] & (c < cols)[None, :]
        h = (_read(x, r, c, there, stride) - center) * root
        v = _read(dz, r, c, there, dz_stride)
        v *= tl.load(weight + c, mask=c < cols, other=0.0)[None, :]
        of_v += v
        of_vh += tl.where(there, v * h, 0.0)
    of_v, of_vh = _lane_sum(of_v, R) * inverse, _lane_sum(of_vh, R) * inverse
    for first in range(0, cols, 256):
        c = first + tl.arange(0, 256)
        there = (r < rows)[:, None] & (c < cols)[None, :]
        drift = ((_read(x, r, c, there, stride) - center) * root) * of_vh
        v = _read(dz, r, c, there, dz_stride)
        v *= tl.load(weight + c, mask=c < cols, other=0.0)[None, :]
        if mean is not None:
            drift = of_v + drift
        made = rounded((v - drift) * root, dx.dtype.element_ty)
        tl.store(dx + r.to(tl.int64)[:, None] * cols + c[None, :], made, mask=there)


@triton.jit
def norm_weights(
    dz, x, mean, rstd, dweight, dbias, rows, cols, dz_stride, stride, share, R: tl.constexpr,
    C: tl.constexpr,
):
    """The sums over `share` rows of dz times what was normalized, and of dz, each [rows / share,
    cols]."""
    c = tl.program_id(0) * C + tl.arange(0, C)
    of_gh, of_g = tl.zeros((R, C), tl.float32), tl.zeros((R, C), tl.float32)
    start = tl.program_id(1) * share
    end = tl.minimum(start + share, rows)
    for first in range(start, end, R):
        r = first + tl.arange(0, R)
        there = (r < end)[:, None] & (c < cols)[None, :]
        g, h = _read(dz, r, c, there, dz_stride), _read(x, r, c, there, stride)
        if mean is not None:
            h -= tl.load(mean + r, mask=r < rows, other=0.0)[:, None]
        h *= tl.load(rstd + r, mask=r < rows, other=0.0)[:, None]
        of_gh += tl.where(there, g * h, 0.0)
        of_g += g
    at = tl.program_id(1).to(tl.int64) * cols + c
    tl.store(dweight + at, tl.sum(of_gh, 0), mask=c < cols)
    tl.store(dbias + at, tl.sum(of_g, 0), mask=c < cols)

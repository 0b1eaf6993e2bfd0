"""GEMMs in Triton: dot_scaled on codes and E8M0 bytes, and dot times fp32 factors.

D[m, n] = epilogue(A[m, k] @ B[n, k]^T), fp32 sums. Tails of k are zeros.
"""

import triton
import triton.language as tl

from te_mx.backends.triton.kernels.encode import rounded


@triton.jit
def _gelu(x, ERF: tl.constexpr):
    if ERF:
        return 0.5 * x * (1.0 + tl.math.erf(x * 0.7071067811865476))
    return x - x / (tl.exp(1.5957691216057308 * (x + 0.044715 * x * x * x)) + 1.0)


@triton.jit
def _gelu_derivative(x, ERF: tl.constexpr):
    if ERF:
        density = 0.3989422804014327 * tl.exp(-0.5 * x * x)
        return 0.5 * (1.0 + tl.math.erf(x * 0.7071067811865476)) + x * density
    t = 1.0 - 2.0 / (tl.exp(1.5957691216057308 * (x + 0.044715 * x * x * x)) + 1.0)
    inner = 0.7978845608028654 * (1.0 + 0.134145 * x * x)
    return 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * inner


@triton.jit
def finish(
    value, out, bias, aux, gelu_in, r, c, m, n, BIAS: tl.constexpr, AUX: tl.constexpr,
    GELU: tl.constexpr, DGELU: tl.constexpr, ERF: tl.constexpr, ACCUMULATE: tl.constexpr,
):
    """The epilogue of fp32 sums: + bias; aux; GELU, or times its derivative; + out."""
    there = (r < m)[:, None] & (c < n)[None, :]
    at = r.to(tl.int64)[:, None] * n + c[None, :]
    if BIAS:
        value += tl.load(bias + c, mask=c < n, other=0.0).to(tl.float32)[None, :]
    if AUX:
        tl.store(aux + at, rounded(value, aux.dtype.element_ty), mask=there)
    if DGELU:
        before = tl.load(gelu_in + at, mask=there, other=0.0).to(tl.float32)
        value *= _gelu_derivative(before, ERF)
    elif GELU:
        value = _gelu(value, ERF)
    if ACCUMULATE:
        value += tl.load(out + at, mask=there, other=0.0).to(tl.float32)
    tl.store(out + at, rounded(value, out.dtype.element_ty), mask=there)


@triton.jit
def tile_of(pid, m, n, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    """The tile of a program, in groups of rows so that B is read again from L2."""
    down, across = tl.cdiv(m, BM), tl.cdiv(n, BN)
    first = pid // (GROUP * across) * GROUP
    high = tl.minimum(down - first, GROUP)
    inside = pid % (GROUP * across)
    return first + inside % high, inside // high


@triton.jit
def _packed(codes, ROWS: tl.constexpr, K: tl.constexpr):
    """Codes of 4 bits, one a byte [ROWS, K], as two a byte."""
    low, high = tl.split(tl.reshape(codes, (ROWS, K // 2, 2)))
    return low | (high << 4)


@triton.jit
def multiply_mx(
    a, a_scales, b, b_scales, r, c, m, n, k, a_row, a_k, b_row, b_k, as_row, as_k, bs_row, bs_k,
    A: tl.constexpr, B: tl.constexpr, A_LOOSE: tl.constexpr, B_LOOSE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):
    """fp32 sums [BM, BN] of rows r of a and rows c of b, by their strides. A, B: elements; LOOSE:
    those of 4 bits lie one a byte."""
    A_PACK: tl.constexpr = 2 if A == "e2m1" and not A_LOOSE else 1
    B_PACK: tl.constexpr = 2 if B == "e2m1" and not B_LOOSE else 1
    ka, kb, ks = tl.arange(0, BK // A_PACK), tl.arange(0, BK // B_PACK), tl.arange(0, BK // 32)
    r64, c64 = r.to(tl.int64), c.to(tl.int64)
    a_at = a + r64[:, None] * a_row + ka[None, :] * a_k
    b_at = b + c64[:, None] * b_row + kb[None, :] * b_k
    as_at = a_scales + r64[:, None] * as_row + ks[None, :] * as_k
    bs_at = b_scales + c64[:, None] * bs_row + ks[None, :] * bs_k
    a_width, b_width, blocks = tl.cdiv(k, A_PACK), tl.cdiv(k, B_PACK), tl.cdiv(k, 32)
    total = tl.zeros((BM, BN), tl.float32)
    for step in range(0, tl.cdiv(k, BK)):
        left = tl.load(
            a_at, mask=(r < m)[:, None] & (ka < a_width - step * (BK // A_PACK))[None, :], other=0
        )
        right = tl.load(
            b_at, mask=(c < n)[:, None] & (kb < b_width - step * (BK // B_PACK))[None, :], other=0
        )
        if A_LOOSE:
            left = _packed(left, BM, BK)
        if B_LOOSE:
            right = _packed(right, BN, BK)
        known = (ks < blocks - step * (BK // 32))[None, :]
        left_scales = tl.load(as_at, mask=(r < m)[:, None] & known, other=0)
        right_scales = tl.load(bs_at, mask=(c < n)[:, None] & known, other=0)
        total = tl.dot_scaled(left, left_scales, A, tl.trans(right), right_scales, B, total)
        a_at += BK // A_PACK * a_k
        b_at += BK // B_PACK * b_k
        as_at += BK // 32 * as_k
        bs_at += BK // 32 * bs_k
    return total


@triton.jit
def multiply_blockwise(
    a, a_scales, b, b_scales, r, c, m, n, k, a_row, a_k, b_row, b_k, as_row, as_k, bs_row, bs_k,
    A: tl.constexpr, B: tl.constexpr, A_HEIGHT: tl.constexpr, B_HEIGHT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):
    """The same of fp32 scales, one for 128 of k and A_HEIGHT or B_HEIGHT rows. A, B: dtypes."""
    ks = tl.arange(0, BK)
    r64, c64 = r.to(tl.int64), c.to(tl.int64)
    a_at = a + r64[:, None] * a_row + ks[None, :] * a_k
    b_at = b + c64[None, :] * b_row + ks[:, None] * b_k
    as_at = a_scales + (r64 // A_HEIGHT) * as_row
    bs_at = b_scales + (c64 // B_HEIGHT) * bs_row
    total = tl.zeros((BM, BN), tl.float32)
    for step in range(0, tl.cdiv(k, BK)):
        inside = ks < k - step * BK
        left = tl.load(a_at, mask=(r < m)[:, None] & inside[None, :], other=0)
        right = tl.load(b_at, mask=(c < n)[None, :] & inside[:, None], other=0)
        left_scales = tl.load(as_at, mask=r < m, other=0.0)
        right_scales = tl.load(bs_at, mask=c < n, other=0.0)
        sums = tl.dot(left.to(A, bitcast=True), right.to(B, bitcast=True))
        total += sums * left_scales[:, None] * right_scales[None, :]
        a_at += BK * a_k
        b_at += BK * b_k
        as_at += as_k
        bs_at += bs_k
    return total


@triton.jit
def multiply(
    a, a_scales, b, b_scales, r, c, m, n, k, a_row, a_k, b_row, b_k, as_row, as_k, bs_row, bs_k,
    MX: tl.constexpr, A: tl.constexpr, B: tl.constexpr, A_LOOSE: tl.constexpr,
    B_LOOSE: tl.constexpr, A_HEIGHT: tl.constexpr, B_HEIGHT: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr,
):
    """The sums of a tile, of either family."""
    if MX:
        return multiply_mx(
            a, a_scales, b, b_scales, r, c, m, n, k, a_row, a_k, b_row, b_k, as_row, as_k, bs_row,
            bs_k, A, B, A_LOOSE, B_LOOSE, BM, BN, BK,
        )
    else:
        return multiply_blockwise(
            a, a_scales, b, b_scales, r, c, m, n, k, a_row, a_k, b_row, b_k, as_row, as_k, bs_row,
            bs_k, A, B, A_HEIGHT, B_HEIGHT, BM, BN, BK,
        )


@triton.jit
def gemm(
    a, a_scales, b, b_scales, out, bias, aux, gelu_in, m, n, k,
    a_row, a_k, b_row, b_k, as_row, as_k, bs_row, bs_k,
    MX: tl.constexpr, A: tl.constexpr, B: tl.constexpr, A_LOOSE: tl.constexpr,
    B_LOOSE: tl.constexpr, A_HEIGHT: tl.constexpr, B_HEIGHT: tl.constexpr,
    BIAS: tl.constexpr, AUX: tl.constexpr, GELU: tl.constexpr, DGELU: tl.constexpr,
    ERF: tl.constexpr, ACCUMULATE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):
    """One product."""
    down, across = tile_of(tl.program_id(0), m, n, BM, BN, GROUP)
    r, c = down * BM + tl.arange(0, BM), across * BN + tl.arange(0, BN)
    total = multiply(
        a, a_scales, b, b_scales, r, c, m, n, k, a_row, a_k, b_row, b_k, as_row, as_k, bs_row,
        bs_k, MX, A, B, A_LOOSE, B_LOOSE, A_HEIGHT, B_HEIGHT, BM, BN, BK,
    )
    finish(total, out, bias, aux, gelu_in, r, c, m, n, BIAS, AUX, GELU, DGELU, ERF, ACCUMULATE)

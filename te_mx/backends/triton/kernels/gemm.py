"""GEMMs in Triton: dot_scaled on codes and E8M0 bytes, and dot times fp32 factors.

D[m, n] = epilogue(A[m, k] @ B[n, k]^T), fp32 sums. Tails of k are zeros.
"""

import triton
import triton.language as tl

from te_mx.backends.triton.kernels.encode import as_bits, as_float, power_of_two, rounded


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
def _decoded(codes, ELEMENT: tl.constexpr):
    """fp32 of codes, exact; NaN codes stand beside scales that are NaN."""
    BITS: tl.constexpr = 4 if ELEMENT == "e2m1" else 8
    FNUZ: tl.constexpr = ELEMENT == "e4m3fnuz" or ELEMENT == "e5m2fnuz"
    E4M3: tl.constexpr = ELEMENT == "e4m3" or ELEMENT == "e4m3fnuz"
    MANTISSA_BITS: tl.constexpr = 1 if BITS == 4 else 3 if E4M3 else 2
    OF_FN: tl.constexpr = 126 if BITS == 4 else 120 if E4M3 else 112
    FACTOR: tl.constexpr = OF_FN - 1 if FNUZ else OF_FN
    code = codes.to(tl.int32)
    SIGN: tl.constexpr = 1 << (BITS - 1)
    bits = ((code & SIGN) << (32 - BITS)) | ((code & (SIGN - 1)) << (23 - MANTISSA_BITS))
    return as_float(bits) * power_of_two(tl.zeros_like(bits) + FACTOR)


@triton.jit
def values(
    codes, scales, ELEMENT: tl.constexpr, PACKED: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, K: tl.constexpr,
):
    """fp32 [ROWS, K] of codes times the scales of their blocks."""
    if PACKED:
        codes = tl.reshape(tl.join(codes & 15, codes >> 4), (ROWS, K))
    scale = scales.to(tl.int32)
    if BLOCK == 16:
        nan = scale == 127
        factor = _decoded(scale, "e4m3")
    else:
        nan = scale == 255
        factor = as_float(tl.where(scale == 0, 1 << 22, scale << 23))
    factor = as_float(tl.where(nan, 0x7FC00000, as_bits(factor)))
    made = tl.reshape(_decoded(codes, ELEMENT), (ROWS, K // BLOCK, BLOCK)) * factor[:, :, None]
    return tl.reshape(made, (ROWS, K))


@triton.jit
def _packed(codes, ROWS: tl.constexpr, K: tl.constexpr):
    """Codes of 4 bits, one a byte [ROWS, K], as two a byte."""
    low, high = tl.split(tl.reshape(codes, (ROWS, K // 2, 2)))
    return low | (high << 4)


@triton.jit
def _of_fp8(codes, ELEMENT: tl.constexpr):
    """Where FP8 lies: bytes that become FP8 behind their load go to tensor cores by registers."""
    if ELEMENT == "e4m3" or ELEMENT == "e5m2":
        codes = codes.to(
            tl.pointer_type(tl.float8e4nv if ELEMENT == "e4m3" else tl.float8e5), bitcast=True
        )
    return codes


@triton.jit
def multiply_mx(
    a, a_scales, b, b_scales, r, c, m, n, k, a_row, a_k, b_row, b_k, as_row, as_k, bs_row, bs_k,
    A: tl.constexpr, B: tl.constexpr, A_LOOSE: tl.constexpr, B_LOOSE: tl.constexpr,
    A_BLOCK: tl.constexpr, B_BLOCK: tl.constexpr, A_HEIGHT: tl.constexpr, B_HEIGHT: tl.constexpr,
    DECODED: tl.constexpr, EVEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr,
):
    """fp32 sums [BM, BN] of rows r of a and rows c of b, by their strides. A, B: elements, or
    "bf16" of values, which have no scales; LOOSE: those of 4 bits lie one a byte. Scales of blocks
    of 32 are E8M0, of 16 E4M3. DECODED: "bf16", in which values that kernels make are exact, "fp32"
    in the interpreter, or "". EVEN: all rows are there, and k ends where a step does."""
    if DECODED == "":
        a, b = _of_fp8(a, A), _of_fp8(b, B)
    A_PACK: tl.constexpr = 2 if A == "e2m1" and not A_LOOSE else 1
    B_PACK: tl.constexpr = 2 if B == "e2m1" and not B_LOOSE else 1
    ka, kb = tl.arange(0, BK // A_PACK), tl.arange(0, BK // B_PACK)
    kas, kbs = tl.arange(0, BK // A_BLOCK), tl.arange(0, BK // B_BLOCK)
    r64, c64 = r.to(tl.int64), c.to(tl.int64)
    a_at = a + r64[:, None] * a_row + ka[None, :] * a_k
    b_at = b + c64[:, None] * b_row + kb[None, :] * b_k
    as_at = a_scales + (r64 // A_HEIGHT)[:, None] * as_row + kas[None, :] * as_k
    bs_at = b_scales + (c64 // B_HEIGHT)[:, None] * bs_row + kbs[None, :] * bs_k
    # Rounded up, so that Triton sees what divides it.
    a_width = k if A_PACK == 1 else k - k // 2
    b_width = k if B_PACK == 1 else k - k // 2
    a_blocks, b_blocks = tl.cdiv(k, A_BLOCK), tl.cdiv(k, B_BLOCK)
    total = tl.zeros((BM, BN), tl.float32)
    for step in range(0, tl.cdiv(k, BK)):
        if EVEN:
            left, right = tl.load(a_at), tl.load(b_at)
            if A != "bf16":
                left_scales = tl.load(as_at)
            if B != "bf16":
                right_scales = tl.load(bs_at)
        else:
            left = tl.load(
                a_at, mask=(r < m)[:, None] & (ka < a_width - step * (BK // A_PACK))[None, :],
                other=0.0,
            )
            right = tl.load(
                b_at, mask=(c < n)[:, None] & (kb < b_width - step * (BK // B_PACK))[None, :],
                other=0.0,
            )
            if A != "bf16":
                left_scales = tl.load(
                    as_at,
                    mask=(r < m)[:, None] & (kas < a_blocks - step * (BK // A_BLOCK))[None, :],
                    other=0,
                )
            if B != "bf16":
                right_scales = tl.load(
                    bs_at,
                    mask=(c < n)[:, None] & (kbs < b_blocks - step * (BK // B_BLOCK))[None, :],
                    other=0,
                )
        if DECODED != "":
            if A != "bf16":
                left = values(left, left_scales, A, A_PACK == 2, A_BLOCK, BM, BK)
            if B != "bf16":
                right = values(right, right_scales, B, B_PACK == 2, B_BLOCK, BN, BK)
            to: tl.constexpr = tl.bfloat16 if DECODED == "bf16" else tl.float32
            left, right = left.to(to), right.to(to)
            total = tl.dot(left, tl.trans(right), total, input_precision="ieee")
        else:
            if A_LOOSE:
                left = _packed(left, BM, BK)
            if B_LOOSE:
                right = _packed(right, BN, BK)
            if A_BLOCK == 16:
                left_scales = left_scales.to(tl.float8e4nv, bitcast=True)
                right_scales = right_scales.to(tl.float8e4nv, bitcast=True)
            total = tl.dot_scaled(left, left_scales, A, tl.trans(right), right_scales, B, total)
        a_at += BK // A_PACK * a_k
        b_at += BK // B_PACK * b_k
        as_at += BK // A_BLOCK * as_k
        bs_at += BK // B_BLOCK * bs_k
    return total


@triton.jit
def multiply_blockwise(
    a, a_scales, b, b_scales, r, c, m, n, k, a_row, a_k, b_row, b_k, as_row, as_k, bs_row, bs_k,
    A: tl.constexpr, B: tl.constexpr, A_HEIGHT: tl.constexpr, B_HEIGHT: tl.constexpr,
    DECODED: tl.constexpr, EVEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr,
):
    """The same of fp32 scales, one for 128 of k and A_HEIGHT or B_HEIGHT rows. A, B: dtypes, or
    elements where these are decoded."""
    ks = tl.arange(0, BK)
    r64, c64 = r.to(tl.int64), c.to(tl.int64)
    if DECODED == "":  # bytes that become FP8 behind their load go through registers
        a = a.to(tl.pointer_type(A), bitcast=True)
        b = b.to(tl.pointer_type(B), bitcast=True)
    a_at = a + r64[:, None] * a_row + ks[None, :] * a_k
    b_at = b + c64[None, :] * b_row + ks[:, None] * b_k
    as_at = a_scales + (r64 // A_HEIGHT) * as_row
    bs_at = b_scales + (c64 // B_HEIGHT) * bs_row
    if B_HEIGHT >= BN:  # one factor for all columns of a tile
        b_scales += (tl.min(c64, 0) // B_HEIGHT) * bs_row
    total = tl.zeros((BM, BN), tl.float32)
    for step in range(0, tl.cdiv(k, BK)):
        if EVEN:
            left, right, left_scales = tl.load(a_at), tl.load(b_at), tl.load(as_at)
        else:
            inside = ks < k - step * BK
            left = tl.load(a_at, mask=(r < m)[:, None] & inside[None, :], other=0.0)
            right = tl.load(b_at, mask=(c < n)[None, :] & inside[:, None], other=0.0)
            left_scales = tl.load(as_at, mask=r < m, other=0.0)
        if DECODED != "":
            left, right = _decoded(left, A), _decoded(right, B)
            if DECODED == "bf16":
                left, right = left.to(tl.bfloat16), right.to(tl.bfloat16)
        sums = tl.dot(left, right)
        if B_HEIGHT >= BN:
            total += sums * (left_scales * tl.load(b_scales + step * bs_k))[:, None]
        else:
            right_scales = tl.load(bs_at, mask=c < n, other=0.0)
            total += sums * left_scales[:, None] * right_scales[None, :]
        a_at += BK * a_k
        b_at += BK * b_k
        as_at += as_k
        bs_at += bs_k
    return total


@triton.jit
def rows_of(r, end, K_FIRST: tl.constexpr):
    """Rows to read for rows r: where k lies behind each other, the last for those behind the
    end, so that nothing is masked where k is EVEN. Nobody sees their sums."""
    return r if K_FIRST else tl.minimum(r, end - 1)


@triton.jit
def multiply(
    a, a_scales, b, b_scales, r, c, m, n, k, a_row, a_k, b_row, b_k, as_row, as_k, bs_row, bs_k,
    MX: tl.constexpr, A: tl.constexpr, B: tl.constexpr, A_LOOSE: tl.constexpr,
    B_LOOSE: tl.constexpr, A_BLOCK: tl.constexpr, B_BLOCK: tl.constexpr, A_HEIGHT: tl.constexpr,
    B_HEIGHT: tl.constexpr, DECODED: tl.constexpr, EVEN: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr,
):
    """The sums of a tile, of either family."""
    if MX:
        return multiply_mx(
            a, a_scales, b, b_scales, r, c, m, n, k, a_row, a_k, b_row, b_k, as_row, as_k, bs_row,
            bs_k, A, B, A_LOOSE, B_LOOSE, A_BLOCK, B_BLOCK, A_HEIGHT, B_HEIGHT, DECODED, EVEN, BM,
            BN, BK,
        )
    else:
        return multiply_blockwise(
            a, a_scales, b, b_scales, r, c, m, n, k, a_row, a_k, b_row, b_k, as_row, as_k, bs_row,
            bs_k, A, B, A_HEIGHT, B_HEIGHT, DECODED, EVEN, BM, BN, BK,
        )


@triton.jit
def whole_of(a_whole, b_whole, r, m, by_rows):
    """The tensor scales of rows r: those of a, one a row where by_rows is 1, times that of b."""
    return tl.load(a_whole + r * by_rows, mask=r < m, other=0.0) * tl.load(b_whole)


@triton.jit
def gemm(
    a, a_scales, b, b_scales, out, bias, aux, gelu_in, m, n, k,
    a_row, a_k, b_row, b_k, as_row, as_k, bs_row, bs_k,
    MX: tl.constexpr, A: tl.constexpr, B: tl.constexpr, A_LOOSE: tl.constexpr,
    B_LOOSE: tl.constexpr, A_BLOCK: tl.constexpr, B_BLOCK: tl.constexpr, A_HEIGHT: tl.constexpr,
    B_HEIGHT: tl.constexpr, DECODED: tl.constexpr, EVEN: tl.constexpr, A_FIRST: tl.constexpr,
    B_FIRST: tl.constexpr, BIAS: tl.constexpr, AUX: tl.constexpr, GELU: tl.constexpr,
    DGELU: tl.constexpr, ERF: tl.constexpr, ACCUMULATE: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    a_whole=None, b_whole=None, by_rows=0, WHOLE: tl.constexpr = False,
    SPLIT: tl.constexpr = False,
):
    """One product. FIRST: whether a side lies [k, rows]. WHOLE: sums times the scales of both
    tensors. SPLIT: k in parts, a program each, whose sums out [parts, m, n] add_parts finishes."""
    down, across = tile_of(tl.program_id(0), m, n, BM, BN, GROUP)
    r, c = down * BM + tl.arange(0, BM), across * BN + tl.arange(0, BN)
    if SPLIT:
        A_PACK: tl.constexpr = 2 if MX and A == "e2m1" and not A_LOOSE else 1
        B_PACK: tl.constexpr = 2 if MX and B == "e2m1" and not B_LOOSE else 1
        part = tl.program_id(1)
        each = tl.cdiv(tl.cdiv(k, BK), tl.num_programs(1)) * BK
        first = part.to(tl.int64) * each
        a += first // A_PACK * a_k
        b += first // B_PACK * b_k
        a_scales += first // A_BLOCK * as_k
        b_scales += first // B_BLOCK * bs_k
        out += part.to(tl.int64) * m * n
        k = tl.minimum(each, k - part * each)
    total = multiply(
        a, a_scales, b, b_scales, rows_of(r, m, A_FIRST), rows_of(c, n, B_FIRST), m, n, k, a_row,
        a_k, b_row, b_k, as_row, as_k, bs_row, bs_k, MX, A, B, A_LOOSE, B_LOOSE, A_BLOCK, B_BLOCK,
        A_HEIGHT, B_HEIGHT, DECODED, EVEN, BM, BN, BK,
    )
    if WHOLE:
        total *= whole_of(a_whole, b_whole, r, m, by_rows)[:, None]
    finish(total, out, bias, aux, gelu_in, r, c, m, n, BIAS, AUX, GELU, DGELU, ERF, ACCUMULATE)


@triton.jit
def gemm_blocks(
    a, a_scales, b, b_scales, out, bias, aux, gelu_in, m, n, k, as_row, as_k, bs_row, bs_k,
    A_HEIGHT: tl.constexpr, B_HEIGHT: tl.constexpr, BIAS: tl.constexpr, AUX: tl.constexpr,
    GELU: tl.constexpr, DGELU: tl.constexpr, ERF: tl.constexpr, ACCUMULATE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):
    """The product of two descriptors [rows, k] of FP8 with fp32 scales, by as many programs as run
    at a time: while one adds up and writes a tile, the memory reads for the next."""
    for pid in tl.range(
        tl.program_id(0), tl.cdiv(m, BM) * tl.cdiv(n, BN), tl.num_programs(0)
    ):
        down, across = tile_of(pid, m, n, BM, BN, GROUP)
        r, c = down * BM + tl.arange(0, BM), across * BN + tl.arange(0, BN)
        as_at = a_scales + tl.minimum(r, m - 1).to(tl.int64) // A_HEIGHT * as_row
        bs_at = b_scales + tl.minimum(c, n - 1).to(tl.int64) // B_HEIGHT * bs_row
        if B_HEIGHT >= BN:
            bs_at = b_scales + (across * BN // B_HEIGHT).to(tl.int64) * bs_row
        total = tl.zeros((BM, BN), tl.float32)
        for step in range(0, tl.cdiv(k, BK)):
            left = a.load([down * BM, step * BK])
            right = b.load([across * BN, step * BK])
            of_left, of_right = tl.load(as_at + step * as_k), tl.load(bs_at + step * bs_k)
            sums = tl.dot(left, right.T)
            if B_HEIGHT >= BN:
                total += sums * (of_left * of_right)[:, None]
            else:
                total += sums * of_left[:, None] * of_right[None, :]
        finish(total, out, bias, aux, gelu_in, r, c, m, n, BIAS, AUX, GELU, DGELU, ERF, ACCUMULATE)


@triton.jit
def add_parts(
    sums, out, bias, aux, gelu_in, m, n, parts,
    BIAS: tl.constexpr, AUX: tl.constexpr, GELU: tl.constexpr, DGELU: tl.constexpr,
    ERF: tl.constexpr, ACCUMULATE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    a_whole=None, b_whole=None, by_rows=0, WHOLE: tl.constexpr = False,
):
    """The end of a product whose sums [parts, m, n] are added up in their order."""
    r = tl.program_id(1) * BM + tl.arange(0, BM)
    c = tl.program_id(0) * BN + tl.arange(0, BN)
    at = sums + r.to(tl.int64)[:, None] * n + c[None, :]
    there = (r < m)[:, None] & (c < n)[None, :]
    total = tl.load(at, mask=there, other=0.0)
    for _ in range(1, parts):
        at += tl.cast(m, tl.int64) * n  # a number where it is 1
        total += tl.load(at, mask=there, other=0.0)
    if WHOLE:
        total *= whole_of(a_whole, b_whole, r, m, by_rows)[:, None]
    finish(total, out, bias, aux, gelu_in, r, c, m, n, BIAS, AUX, GELU, DGELU, ERF, ACCUMULATE)

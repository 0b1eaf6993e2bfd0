"""The five quantizers of torchao's blockwise FP8 training, with its names, layouts and numbers.

=============================  =========  ==========================  =============================
function                       block      codes                       scales (fp32)
=============================  =========  ==========================  =============================
act_quant_lhs                  1 x b      [M, K] row-major            [M, K/b] column-major
act_quant_rhs                  b x 1      [M, K] column-major         [M/b, K] row-major
act_quant_transposed_lhs       b x 1      [K, M] row-major            [K, M/b] column-major
weight_quant_rhs               b x b      [M, N] column-major         [M/b, N/b] column-major
weight_quant_transposed_rhs    b x b      [N, M] column-major         [N/b, M/b] column-major
=============================  =========  ==========================  =============================

factor = fp32(max / max(amax, 1e-12)) with the quotient in fp64, code = x * factor clamped to +-max
and rounded to nearest even, and the scale is the reciprocal of the factor: what torchao's torch
references compute, to the bit. Sizes that do not divide by b, which torchao refuses, have shorter
blocks at their end. NaN makes the scale and the codes of its block NaN; Inf makes the scale Inf and
its own code NaN, so that no value of the block is finite.

te_mx's own formats (te_mx.formats.fp8_blockwise) choose scales as Transformer Engine does.
"""

import torch
from torch import Tensor

from te_mx.formats.format import READ, check_matrix, in_blocks
from te_mx.runtime.arguments import check_size, shown

EPSILON = 1e-12
DTYPES = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)


def act_quant_lhs(
    x: Tensor, block_size: int = 128, dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[Tensor, Tensor]:
    """x [M, K] in blocks along K: codes [M, K], scales [M, ceil(K / b)] column-major."""
    codes, scales = _quantize(x, (1, check_size("block_size", block_size, 1)), dtype)
    return codes, _column_major(scales)


def act_quant_rhs(
    x: Tensor, block_size: int = 128, dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[Tensor, Tensor]:
    """x [M, K] in blocks along M: codes [M, K] column-major, scales [ceil(M / b), K].

    The smallest amax is 1e-12 rounded to the dtype of x, as in torchao's reference; in fp16, where
    that is 0 and torchao makes NaN of blocks of zeros, 1e-12."""
    check_matrix("x", x, *READ)
    epsilon = torch.tensor(EPSILON, dtype=x.dtype, device="cpu").item() or EPSILON
    codes, scales = _quantize(x, (check_size("block_size", block_size, 1), 1), dtype, epsilon)
    return _column_major(codes), scales


def act_quant_transposed_lhs(
    x: Tensor, block_size: int = 128, dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[Tensor, Tensor]:
    """x [M, K] in blocks along M, turned: codes [K, M], scales [K, ceil(M / b)] column-major."""
    codes, scales = _quantize(x, (check_size("block_size", block_size, 1), 1), dtype)
    return codes.t().contiguous(), scales.t()


def weight_quant_rhs(
    x: Tensor, block_size: int = 128, dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[Tensor, Tensor]:
    """x [M, N] in square blocks, column-major: codes [M, N], scales [ceil(M / b), ceil(N / b)]."""
    codes, scales = _quantize(x, (check_size("block_size", block_size, 1),) * 2, dtype)
    return _column_major(codes), _column_major(scales)


def weight_quant_transposed_rhs(
    x: Tensor, block_size: int = 128, dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[Tensor, Tensor]:
    """x [M, N] in square blocks, transposed: codes [N, M], scales [ceil(N / b), ceil(M / b)]."""
    codes, scales = _quantize(x, (check_size("block_size", block_size, 1),) * 2, dtype)
    return codes.t(), scales.t()


@torch.no_grad()
def _quantize(
    x: Tensor, block: tuple[int, int], dtype: torch.dtype, epsilon: float = EPSILON
) -> tuple[Tensor, Tensor]:
    """Codes (dtype) [rows, cols] and scales fp32, one a block, both row-major.

    Raises:
        TypeError: x is no fp32, bf16 or fp16 tensor, or dtype is none of E4M3.
        ValueError: x is no matrix.
    """
    check_matrix("x", x, *READ)
    if dtype not in DTYPES:
        known = " or ".join(map(str, DTYPES))
        raise TypeError(f"dtype must be {known}, got {shown(dtype)}")
    rows, cols = x.shape
    block = min(block[0], max(rows, 1)), min(block[1], max(cols, 1))
    blocks = in_blocks(x.detach().resolve_neg(), block)
    top = torch.finfo(dtype).max
    amax = blocks.abs().amax((1, 3), keepdim=True).double().clamp(min=epsilon)
    factors = (top / amax).float()
    codes = (blocks * factors).clamp(-top, top).to(dtype)
    codes = codes.view(torch.uint8).flatten(2, 3).flatten(0, 1)[:rows, :cols]
    return codes.contiguous().view(dtype), factors.reciprocal()[:, 0, :, 0]


def _column_major(values: Tensor) -> Tensor:
    """The same matrix with its columns behind each other."""
    return values.t().contiguous().t()

"""fp64 values of Hopper operands, and how far a product of them may be off.

Legend: a [m, k] and b [n, k] are fp64 values, D [n, m] = b @ a^T. S is the alignment spread, e the
scale byte of a block, E the one that its codes were shifted to.
"""

from __future__ import annotations

import math

import sm90_calls as calls
import torch
import torch.nn.functional as F
from torch import Tensor

from te_mx._ops import Operand
from te_mx.backends.sm90.layouts import tiles as sm90_tiles

# The FP8 tensor cores line up 32 products and the sum so far at the largest of them and cut off
# what lies 13 bits below it: 33 cuts for every 32 of K.
CUT = 33 * 2.0**-13
# Half of the smallest subnormal code; those of 4 bits are aligned exactly.
HALF_SMALLEST = {"e4m3": 2.0**-10, "e5m2": 2.0**-17, "e2m1": 0.0}
APPROXIMATE = {"tanh": "tanh", "erf": "none"}
KINDS = ("gaussian", "student", "channels", "lognormal", "inverse", "outliers")


def by_rows(operand: Operand) -> Operand:
    """A plain operand with its codes [rows, k]."""
    if not operand.layout.k_first:
        return operand
    fmt = operand.format
    codes, scales = fmt.pack(operand.codes.t().contiguous()), operand.scales.t().contiguous()
    return operand._replace(codes=codes, scales=scales, spec=f"{fmt.name}@rows")


def mx_values(operand: Operand) -> Tensor:
    """fp64 [rows, k]: the exact MX values of a plain operand."""
    return by_rows(operand).values(torch.float64)


def packed(operand: Operand, spread: int) -> Operand:
    """A plain operand packed as plain torch describes it."""
    codes, scales, spec, rows, k = by_rows(operand)[:5]
    codes = operand.format.unpack(codes, k)
    made = sm90_tiles.pack(codes, scales, operand.format.name, spread)
    spec = spec.replace("@rows", f"@sm90:{spread}")
    return Operand(*made.operand_parts(codes), spec, rows, k)


def aligned_values(operand: Operand, spread: int) -> Tensor:
    """fp64 [rows, k]: the values that the adaptive GEMM multiplies."""
    if operand.layout.exact:
        operand = packed(operand, spread)
    return sm90_tiles.packed_values(operand, operand.k, operand.format.name)


def may_move(operand: Operand, spread: int) -> Tensor:
    """fp64 [rows, k]: how far aligning may move each element.

    Only a code that becomes subnormal moves, by half the smallest code at most: with E <= e + S
    that is 2^-10 * 2^(e + S - 127) in E4M3. Without a spread nothing is shifted.
    """
    operand = by_rows(operand)
    scale = torch.exp2(operand.scales.double() - 127).repeat_interleave(32, 1)[:, : operand.k]
    return scale * (HALF_SMALLEST[operand.format.element.name] * 2.0**spread if spread else 0.0)


def accumulation(a: Tensor, b: Tensor) -> Tensor:
    """Bound [n, m] on what the FP8 accumulators lose on values a and b.

    Every 32 of K lose CUT of the largest product or of the sum so far. That sum starts anew every
    128 of K at the latest, where it is added in fp32.
    """
    a, b = a.nan_to_num(0, 0, 0), b.nan_to_num(0, 0, 0)
    n, m, k = b.shape[0], a.shape[0], a.shape[1]
    total = torch.zeros(n, m, dtype=torch.float64, device=a.device)
    for step in range(0, k, 128):
        sums, lost = torch.zeros_like(total), torch.zeros_like(total)
        for i in range(step, min(step + 128, k), 32):
            x, y = a[:, i : i + 32], b[:, i : i + 32]
            largest = y.abs().amax(1)[:, None] * x.abs().amax(1)[None]
            # The sum before is known up to what it lost itself.
            lost += CUT * torch.maximum(largest, sums.abs() + lost)
            sums += y @ x.t()
        total += lost
    fp32 = (k / 32 + 6) * 2.0**-24
    return total * (1 + 2.0**-10) + fp32 * (b.abs() @ a.abs().t()) + 2.0**-140


def fp32_sums(a: Tensor, b: Tensor) -> Tensor:
    """Bound [n, m] of docs/numerics.md on fp32 sums of exact products."""
    a, b = a.nan_to_num(0, 0, 0), b.nan_to_num(0, 0, 0)
    return (a.shape[1] + 2) * 2.0**-24 * (b.abs() @ a.abs().t()) + 2.0**-150


def moved_products(a: Operand, b: Operand, spread: int) -> Tensor:
    """Bound [n, m] on what aligning both operands does to the product of their MX values."""
    va, vb, da, db = (
        mx_values(a).abs(),
        mx_values(b).abs(),
        may_move(a, spread),
        may_move(b, spread),
    )
    va, vb, da, db = (v.nan_to_num(0, 0, 0) for v in (va, vb, da, db))
    return vb @ da.t() + db @ va.t() + db @ da.t()


def half_ulp(v: Tensor, dtype: torch.dtype) -> Tensor:
    """Half the distance of neighbours of dtype at |v|."""
    return 0.5 * calls.ulp(v.double(), dtype)


def assert_close(got: Tensor, want: Tensor, bound: Tensor) -> None:
    """|got - want| <= bound + the rounding of want to the dtype of got; NaN where want is NaN."""
    error = (got.double() - want).abs()
    limit = bound + half_ulp(want.abs() + bound, got.dtype) * (1 + 2.0**-20)
    right = error <= limit
    right |= want.isnan() & got.isnan()
    largest = torch.finfo(got.dtype).max
    right |= (want.abs() + limit > largest) & (got.abs() >= largest * (1 - 2.0**-7))
    if not bool(right.all()):
        at = tuple((~right).nonzero()[0].tolist())
        raise AssertionError(
            f"{int((~right).sum())} of {right.numel()} are off; at {list(at)}: got "
            f"{got[at].item()!r}, want {want[at].item()!r}, limit {limit[at].item()!r}"
        )


def gelu(v: Tensor, form: str) -> Tensor:
    """fp64 GELU, of the form "tanh" or "erf"."""
    return F.gelu(v.double(), approximate=APPROXIMATE[form])


def dgelu(x: Tensor, form: str) -> Tensor:
    """fp64 derivative of gelu(); 0 and 1 at the ends, where torch takes 0 times infinity."""
    leaf = x.double().requires_grad_()
    gelu(leaf, form).sum().backward()
    return torch.where(x.isinf(), (x > 0).double(), leaf.grad)


def summed_as_stored(out: Tensor, gelu_in: Tensor) -> bool:
    """Whether a dGELU GEMM in one piece sums D as it stores it (te_mx/sm90.h: bias_grad)."""
    return out.dtype == gelu_in.dtype != torch.float32 and out.shape[1] % 8 == 0


def assert_bias_gradient(
    got: Tensor, out: Tensor, want: Tensor, slack: Tensor, stored: bool
) -> None:
    """fp32 column sums of D: as stored in `out`, or unrounded and near want."""
    summed = out.double() if stored else want
    limit = (len(want) + 2) * 2.0**-24 * summed.abs().sum(0)
    if not stored:
        limit = limit + slack.sum(0)
    assert got.dtype == torch.float32
    assert ((got.double() - summed.sum(0)).abs() <= limit).all()


def pair(kind: str, m: int, n: int, k: int, dtype: torch.dtype = torch.float32, seed: int = 0):
    """A [m, k] and B [n, k] of one kind of data.

    "inverse" and "outliers": the columns of activations are scaled by s and those of the weights
    by 1/s, so that every k counts the same in the product. s is lognormal over three binades, or
    100 for one column in a hundred.
    """
    if kind not in ("inverse", "outliers"):
        return tuple(calls.data(rows, k, kind, dtype, seed + i) for i, rows in enumerate((m, n)))
    a, b = pair("gaussian", m, n, k, torch.float32, seed)
    g = torch.Generator("cuda").manual_seed(seed + k)
    drawn = torch.randn(k, generator=g, device="cuda")
    s = (
        torch.exp2(3 * drawn).clamp(2.0**-12, 2.0**12)
        if kind == "inverse"
        else 1 + 99 * (drawn > 2.33)
    )
    return (a / s).to(dtype), (b * s).to(dtype)


def nan_like(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.full(shape, math.nan, dtype=dtype, device="cuda")

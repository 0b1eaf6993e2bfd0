"""Normalizations of few rows on Hopper have the bits of those that quantize, and of the CPU."""

from __future__ import annotations

import pytest
import torch

from te_mx._ops.fused import norm_rows
from te_mx.backends.reference import fused
from te_mx.dispatch.fused import NORMS, Norm, NormRows

pytestmark = pytest.mark.usefixtures("poisoned", "direct")

DTYPES = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("cols", [1, 72, 255, 300, 2048, 4097, 8192, 8500])
def test_bits_of_the_cpu(kind, cols):
    torch.manual_seed(cols)
    norm, rows = Norm(kind, 1e-5), 5 if cols < 4097 else 2
    for number in range(9):
        dtype, other = DTYPES[number // 3], DTYPES[number % 3]
        x, weight = torch.randn(rows, cols) * 3, torch.randn(cols).to(other)
        x = (x * torch.exp2(torch.randint(-8, 8, (rows, 1)).float())).to(dtype)
        bias = torch.randn(cols).to(other) if number % 2 and kind == "LayerNorm" else None
        zero_centered, to = number % 4 == 3, DTYPES[(number + 1) % 3]
        factors = weight.float() + 1 if zero_centered else weight.float()
        added = None if bias is None else bias.float()
        expected = fused.normalize(x, factors, added, norm, to)[2]
        there = [None if t is None else t.cuda() for t in (x, weight, bias)]
        wide = torch.full((rows, cols + 3), torch.nan, dtype=dtype, device="cuda")
        wide[:, :cols] = there[0]
        for given in (there[0], wide[:, :cols]):
            got = norm_rows(NormRows(given, *there[1:], norm, zero_centered, to))
            assert torch.equal(got.cpu(), expected)


def test_rows_by_themselves_and_those_that_are_no_numbers():
    norm = Norm("RMSNorm", 1e-6)
    x = torch.randn(64, 4096, device="cuda", dtype=torch.bfloat16)
    x[3, 4000], x[5, 0], x[9] = torch.nan, torch.inf, 0
    weight = torch.randn(4096, device="cuda", dtype=torch.bfloat16)
    z = norm_rows(NormRows(x, weight, None, norm, False, x.dtype))
    expected = fused.normalize(x.cpu(), weight.float().cpu(), None, norm, x.dtype)[2]
    assert torch.equal(z.cpu().nan_to_num(7), expected.nan_to_num(7))
    for i in (0, 3, 9, 63):
        one = norm_rows(NormRows(x[i : i + 1], weight, None, norm, False, x.dtype))
        assert torch.equal(one.nan_to_num(7), z[i : i + 1].nan_to_num(7))


def test_many_rows():
    x, weight = torch.randn(700, 1000, device="cuda"), torch.randn(1000, device="cuda")
    norm = Norm("RMSNorm", 1e-6)
    z = norm_rows(NormRows(x, weight, None, norm, False, torch.bfloat16))
    expected = fused.normalize(x.cpu(), weight.cpu(), None, norm, torch.bfloat16)[2]
    assert torch.equal(z.cpu(), expected)

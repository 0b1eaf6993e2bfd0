"""Products of blocks of 1 x 128 with blocks of 1 x 128 on Hopper: the order in which fp32 factors
are applied, and blocks of both sizes."""

from __future__ import annotations

import math

import pytest
import test_sm90_blockwise as blockwise
import torch

# Exponents of factors of lhs and rhs; whether the codes are the largest of either or the smallest:
# around where factors of columns leave the plain promotion, and factors of rows that are no normal
# numbers or take the sum back into range.
EDGES = (
    *((row, col, True) for row, col in ((-110, 86), (-110, 87), (-110, 88), (-140, 87), (-10, 90))),
    *((row, col, False) for row, col in ((100, -93), (100, -94), (100, -95), (110, -126), (20, 0))),
    (-140, 20, True), (80, 0, True), (-149, 1, True), (126, -94, False),
)  # fmt: skip


@pytest.mark.parametrize("config", [0, 1])
@pytest.mark.parametrize(("row", "col", "largest"), EDGES, ids=str)
def test_factors_lose_nothing_before_the_end(row, col, largest, config):
    m, n, k = 256, 256, 256
    sides = []
    for operand, power, most in zip(
        blockwise.operands(m, n, k, "1x128", elements=("e5m2", "e4m3")), (row, col), (0x7B, 0x7E),
        strict=True,
    ):  # fmt: skip
        code = most if largest else 0x01
        codes = torch.full_like(operand.codes, code)
        if not largest:
            codes[:, torch.arange(k) % 128 != 5] = 0  # one product a step
        # All bits of one factor: what becomes subnormal on the way loses some.
        factor = math.ldexp(1 + 2.0**-23 * (power == col), power)
        scales = torch.full_like(operand.scales, factor)
        sides.append(operand._replace(codes=codes, scales=scales))
    lhs, rhs = sides
    got = blockwise.product(lhs, rhs, config, out_dtype=torch.float32)
    want = rhs.values(torch.float64) @ lhs.values(torch.float64).t()
    assert torch.equal(got, want.t().float())
    added = torch.zeros(m, n, device="cuda")  # what is added may have a last step of its own
    assert torch.equal(blockwise.product(lhs, rhs, config, out=added, accumulate=True), got)


def test_blocks_of_both_sizes_give_the_same_bits():
    """Also where one CTA computes several blocks, with slots of its staging on their way."""
    m, n, k = 2304, 2048, 128
    lhs, rhs = blockwise.operands(m, n, k, "1x128", ("rows", "channels"))
    made = {}
    for name, dtype, start in (
        ("bf16", torch.bfloat16, math.nan),
        ("fp32", torch.float32, math.nan),
        ("+=", torch.float32, 0.0),
    ):
        outs = [torch.full((m, n), start, dtype=dtype, device="cuda") for _ in range(2)]
        for config, out in enumerate(outs):
            blockwise.product(lhs, rhs, config, out=out, accumulate=name == "+=")
        assert torch.equal(*outs)
        made[name] = outs[0]
    assert torch.equal(made["fp32"], made["+="])
    assert torch.equal(made["fp32"].bfloat16(), made["bf16"])
    blockwise.assert_product(made["fp32"], lhs, rhs)


@pytest.mark.parametrize("elements", [("e4m3", "e4m3"), ("e5m2", "e4m3")], ids="-".join)
@pytest.mark.parametrize("shape", [(300, 456, 640), (513, 388, 128), (64, 130, 300)], ids=str)
def test_sums_are_added_to_what_is_there(shape, elements):
    """Rows of 130 numbers are added element by element, the others by the copy engine."""
    m, n, _ = shape
    lhs, rhs = blockwise.operands(*shape, "1x128", ("rows", "channels"), elements)
    sums = blockwise.product(lhs, rhs, 0, out_dtype=torch.float32)
    old = torch.randn(m, n, generator=torch.Generator().manual_seed(m)).cuda()
    for config in (0, 1):
        for _ in range(2):
            out = old.clone()
            blockwise.product(lhs, rhs, config, out=out, accumulate=True)
            assert torch.equal(out, old + sums)
        bias = torch.ones(n, device="cuda")
        again = blockwise.product(lhs, rhs, config, out=old.clone(), accumulate=True, bias=bias)
        assert torch.equal(again, old + (sums + 1))

"""Native GEMM kernels at the edges of the formats: extreme scales, wide rows, NaN, infinities."""

from __future__ import annotations

import numpy as np
import oracles
import pytest
import strategies
import torch
from gemm_calls import ORDERS, Side, packed, random_side, run, shapes
from hypothesis import given, settings
from hypothesis import strategies as st

from te_mx.backends.cpu import binding as cpu
from te_mx.dispatch.calls import Epilogue

pytestmark = pytest.mark.skipif(cpu.native() is None, reason="the native module is not built")


@given(data=st.data(), seed=strategies.SEEDS, byte=st.sampled_from([0, 1, 2, 30, 225, 253, 254]))
@settings(max_examples=15)
def test_scales_at_the_ends_of_the_range(
    kernel: str, data: st.DataObject, seed: int, byte: int
) -> None:
    """Bytes out of bf16's or fp32's range on their own; the other side brings the product back."""
    m, n, k = shapes(data, kernel)
    rng = np.random.default_rng(seed)
    other = min(max(254 - byte - 20, 0), 254)
    a = random_side(rng, m, k, "e4m3", byte, byte + 1)
    b = random_side(rng, n, k, "e5m2", other, other + 1)
    out, _ = run(kernel, a.operand(), b.operand())
    oracles.assert_gemm(out, a.values(), b.values())


@given(data=st.data(), seed=strategies.SEEDS, accumulate=st.booleans())
@settings(max_examples=10)
def test_wide_rows_run_in_double(
    kernel: str, data: st.DataObject, seed: int, accumulate: bool
) -> None:
    """A row spans more exponents than one row exponent carries; accumulation must happen once."""
    m, n, k = shapes(data, kernel)
    k += 33  # two blocks at least
    rng = np.random.default_rng(seed)
    a, b = random_side(rng, m, k, "e4m3"), random_side(rng, n, k, "e4m3")
    wide = data.draw(st.sampled_from([a, b]))
    row = rng.integers(0, len(wide.codes))
    wide.scales[row, :2] = rng.permutation([60, 60 + cpu.WIDE_SPREAD + 1 + rng.integers(0, 30)])
    wide.codes[row, [0, 32]] = 0x38
    operands = a.operand(), b.operand()
    if data.draw(st.booleans()):
        operands = packed(operands[0], kernel, "a"), packed(operands[1], kernel, "b")
    out = torch.ones(n, m)
    # No other block is left for the kernel, or its 24-column panels cannot be cut at every 32nd.
    alone = "stream" in kernel or len(wide.codes) <= 32 or (kernel == "avx2_f32" and wide is a)
    expect = "wide_f64" if alone else None
    run(kernel, *operands, out, epilogue=Epilogue(accumulate=accumulate), expect=expect)
    va, vb = a.values(), b.values()
    exact = vb @ va.T + accumulate
    oracles.assert_gemm(out, va, vb, exact, 2.0**-23 * (np.abs(exact) + accumulate))


@pytest.mark.parametrize("bias_grad", ["operand", "result"])
def test_blocks_with_wide_rows_among_others(kernel: str, bias_grad: str) -> None:
    """Wide rows on both sides of a large problem: every element once, and the sums of all rows."""
    if "stream" in kernel:
        return  # streams do not cut their problem; test_wide_rows_run_in_double has them
    rng = np.random.default_rng(17)
    a, b = random_side(rng, 170, 100, "e4m3"), random_side(rng, 135, 100, "e5m2")
    for side, rows in ((a, (0, 70, 169)), (b, (33, 34, 100))):
        for row in rows:
            side.scales[row] = [20, 125, 122, 40]
            side.codes[row, ::32] = 0x38
    gelu_in = torch.from_numpy(rng.standard_normal((135, 170)).astype(np.float32))
    result = bias_grad == "result"
    epilogue = Epilogue(
        gelu="tanh" if result else None, gelu_in=gelu_in if result else None, bias_grad=bias_grad
    )
    va, vb = a.values(), b.values()
    exact, slack = vb @ va.T, 0.0
    if result:
        exact = exact * oracles.dgelu(gelu_in.double().numpy(), "tanh")
        slack = 0.13 * oracles.gemm_bound(va, vb) + 2.0**-20 * np.abs(vb @ va.T)
    operands = a.operand(), b.operand()
    # Panels of 24 columns cannot be cut at every 32nd.
    expect = "wide_f64" if kernel in ("wide_f64", "avx2_f32") else None
    for sides in (operands, (packed(operands[0], kernel, "a"), packed(operands[1], kernel, "b"))):
        out, sums = run(kernel, *sides, epilogue=epilogue, expect=expect)
        oracles.assert_gemm(out, va, vb, exact, slack)
        wanted = out.double().sum(0).numpy() if result else vb.sum(1)
        size = np.abs(out.double().numpy()).sum(0) if result else np.abs(vb).sum(1)
        assert (np.abs(sums.double().numpy() - wanted) <= 140 * 2.0**-24 * size).all()


def test_largest_spread_stays_on_the_kernel(kernel: str) -> None:
    """The smallest and largest products that the kernel itself must carry, and zero blocks."""
    rng = np.random.default_rng(5)
    a, b = random_side(rng, 40, 160, "e5m2"), random_side(rng, 7, 160, "e5m2")
    for side in (a, b):
        side.scales[:] = 150
        side.scales[:, 1] = 150 - cpu.WIDE_SPREAD
        side.codes[:, 32:64] |= 1
        side.codes[:, 64:96] = 0x80
        side.scales[:, 2] = 0
        side.codes[:, 96:128] &= 0x83  # subnormal codes
    out, _ = run(kernel, a.operand(), b.operand())
    oracles.assert_gemm(out, a.values(), b.values())
    # Only the small blocks: nothing may flush to zero.
    for side in (a, b):
        side.codes[:, :32] = 0
        side.codes[:, 96:] = 0
        side.codes[:, 32:64] = 1
    out, _ = run(kernel, a.operand(), b.operand())
    oracles.assert_gemm(out, a.values(), b.values())
    assert bool((out > 0).all())


@given(data=st.data(), seed=strategies.SEEDS, fmt=strategies.FORMATS)
@settings(max_examples=15)
def test_nan_reaches_its_rows_and_columns_only(
    kernel: str, data: st.DataObject, seed: int, fmt: str
) -> None:
    m, n, k = shapes(data, kernel)
    rng = np.random.default_rng(seed)
    a, b = random_side(rng, m, k, fmt), random_side(rng, n, k, "e4m3")
    for side in (a, b):  # a NaN code among zeros of byte 0 would make the row wide
        side.scales[side.scales == 0] = 112
    a.scales[rng.integers(0, m), rng.integers(0, -(-k // 32))] = 255
    a.codes[rng.integers(0, m), rng.integers(0, k)] = rng.choice([0x7F, 0xFF])
    b.codes[rng.integers(0, n), rng.integers(0, k)] = 0x7F
    if rng.random() < 0.5:
        b.scales[rng.integers(0, n)] = 255  # a row without any number
    order_a = data.draw(ORDERS)
    out, _ = run(kernel, a.operand(order_a), b.operand(data.draw(ORDERS)))
    va, vb = a.values(), b.values()
    assert np.array_equal(out.isnan().numpy(), np.isnan(vb @ va.T))
    rows, columns = ~np.isnan(vb).any(1), ~np.isnan(va).any(1)
    oracles.assert_gemm(out[rows][:, columns], va[columns], vb[rows])


def test_infinite_codes_of_e5m2(kernel: str) -> None:
    """Only hand-made tensors hold them; Inf times a number is Inf and Inf times zero NaN."""
    scales = np.full((2, 1), 125, np.uint8)
    a = Side(np.array([[0x3C, 0x7C], [0x3C, 0xFC]], np.uint8), scales, "e5m2")
    b = Side(np.array([[0x38, 0x38], [0x38, 0x00]], np.uint8), scales, "e4m3")
    out, _ = run(kernel, a.operand(), b.operand())
    expected = torch.tensor([[torch.inf, -torch.inf], [torch.nan, torch.nan]])
    assert torch.equal(out.nan_to_num(7, 8, 9), expected.nan_to_num(7, 8, 9))

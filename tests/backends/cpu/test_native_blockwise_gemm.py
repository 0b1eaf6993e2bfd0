"""Native GEMMs of blockwise FP8 against fp64: 1x128 and 128x128, scales that are powers of two and
scales that are not, every kernel and order.

The bound is oracles.gemm_bound with C = 1, as for MXFP8.
"""

from __future__ import annotations

from typing import NamedTuple

import ml_dtypes
import numpy as np
import oracles
import pytest
import torch
from gemm_calls import drawn, packed, run, run_groups, shapes
from hypothesis import given, settings
from hypothesis import strategies as st
from native_words import GemmCall, Operand
from strategies import DTYPES, SEEDS

from te_mx.backends.cpu import binding as cpu
from te_mx.backends.cpu import grouped as cpu_grouped
from te_mx.backends.cpu.grouped import few_and_many
from te_mx.dispatch.calls import Epilogue
from te_mx.dispatch.groups import Bounds
from te_mx.layouts.operand import Operand as HouseOperand
from te_mx.layouts.operand import Stack
from te_mx.runtime import workspace

pytestmark = pytest.mark.skipif(cpu.native() is None, reason="the native module is not built")
ELEMENTS = {
    "e4m3": (ml_dtypes.float8_e4m3fn, 0x7E),
    "e5m2": (ml_dtypes.float8_e5m2, 0x7B),
    "e4m3fnuz": (ml_dtypes.float8_e4m3fnuz, 0x7F),
    "e5m2fnuz": (ml_dtypes.float8_e5m2fnuz, 0x7F),
}
K_SIZES = st.sampled_from([1, 31, 33, 127, 128, 129, 255, 256, 300, 385, 700])
# Stream kernels on bf16 hand what they do not read to one on fp32, or to the panel kernel of their
# level where the CPU has no AVX-512.
BF16_STREAMS = {"avx512_bf16_stream": "avx512_bf16", "amx_stream": "amx_bf16"}


class Side(NamedTuple):
    """Codes [rows, k], scales [ceil(rows / block_rows), ceil(k / 128)] fp32."""

    codes: np.ndarray
    scales: np.ndarray
    element: str
    block_rows: int

    def values(self) -> np.ndarray:
        """Exact fp64."""
        rows, k = self.codes.shape
        element = self.codes.view(ELEMENTS[self.element][0]).astype(np.float64)
        of_rows = np.repeat(self.scales.astype(np.float64), self.block_rows, 0)[:rows]
        with np.errstate(invalid="ignore"):
            return element * np.repeat(of_rows, 128, 1)[:, :k]

    def operand(self, order: str = "k_last") -> Operand:
        codes, scales = torch.from_numpy(self.codes), torch.from_numpy(self.scales)
        if order == "k_first":
            codes, scales = codes.t().contiguous(), scales.t().contiguous()
        return Operand(codes, scales, f"{self.element}_{self.block_rows}x128", order)


def random_side(
    rng: np.random.Generator, rows: int, k: int, element: str = "e4m3", block_rows: int = 1,
    pow2: bool = False, spread: int = 12,
) -> Side:  # fmt: skip
    """Finite codes; scales of both signs of the exponent; an eighth of the blocks of rows zero."""
    most = ELEMENTS[element][1]
    codes = rng.integers(0, most + 1, (rows, k)) | rng.choice([0, 0x80], (rows, k))
    if "fnuz" in element:
        codes[codes == 0x80] = 0
    scales = np.exp2(rng.integers(-spread, spread + 1, (-(-rows // block_rows), -(-k // 128))))
    if not pow2:
        scales *= rng.uniform(1, 2, scales.shape)
    empty = rng.random((rows, -(-k // 128))) < 0.125
    codes[np.repeat(empty, 128, 1)[:, :k]] = 0
    return Side(codes.astype(np.uint8), scales.astype(np.float32), element, block_rows)


def ran(name: str, *sides: Side) -> str:
    """The kernel that runs where `name` is asked for."""
    factors = any((np.frexp(side.scales)[0] != 0.5).any() for side in sides)
    fnuz = any("fnuz" in side.element for side in sides)
    if name not in BF16_STREAMS or not (factors or fnuz):
        return name
    return "avx512_stream" if cpu.kernel_available("avx512_stream") else BF16_STREAMS[name]


@given(data=st.data(), elements=st.tuples(*[st.sampled_from(list(ELEMENTS))] * 2), k=K_SIZES)
@settings(max_examples=25)
def test_product(kernel: str, data: st.DataObject, elements: tuple[str, str], k: int) -> None:
    m, n, _ = shapes(data, kernel)
    rng = np.random.default_rng(data.draw(SEEDS))
    pow2, blocks = data.draw(st.booleans()), st.sampled_from([1, 128])
    a = random_side(rng, m, k, elements[0], data.draw(blocks), pow2)
    b = random_side(rng, n, k, elements[1], data.draw(blocks), data.draw(st.booleans()))
    a_operand, b_operand = drawn(data, kernel, a, b)
    out = torch.full((n, m), torch.nan, dtype=data.draw(DTYPES))
    kind = data.draw(st.sampled_from([None, "operand", "result"]))
    _, sums = run(
        kernel, a_operand, b_operand, out, epilogue=Epilogue(bias_grad=kind),
        expect=ran(kernel, a, b),
    )  # fmt: skip
    oracles.assert_gemm(out, a.values(), b.values())
    if kind == "operand":
        values = b.values()
        assert sums is not None
        bound = (k + 2) * 2.0**-24 * np.abs(values).sum(1)
        assert (np.abs(sums.double().numpy() - values.sum(1)) <= bound).all()


@pytest.mark.parametrize("pow2", [True, False])
@given(data=st.data(), seed=SEEDS, k=K_SIZES)
@settings(max_examples=6)
def test_bits_do_not_depend_on_threads_orders_or_packing(
    kernel: str, pow2: bool, data: st.DataObject, seed: int, k: int, threads
) -> None:
    m, n, _ = shapes(data, kernel)
    rng = np.random.default_rng(seed)
    a, b = random_side(rng, m, k, block_rows=128, pow2=pow2), random_side(rng, n, k, pow2=pow2)
    expect = ran(kernel, a, b)
    threads(1)
    expected, _ = run(kernel, a.operand(), b.operand(), expect=expect)
    for count in (1, 3):
        threads(count)
        for orders in (("k_last", "k_first"), ("k_first", "k_last"), ("k_first", "k_first")):
            a_operand, b_operand = a.operand(orders[0]), b.operand(orders[1])
            if count == 3:
                a_operand = packed(a_operand, kernel, "a")
                b_operand = packed(b_operand, kernel, "b")
            out, _ = run(kernel, a_operand, b_operand, expect=expect)
            assert torch.equal(out, expected)


@given(data=st.data(), seed=SEEDS, k=K_SIZES)
@settings(max_examples=8)
def test_powers_of_two_give_the_bits_of_mx(
    kernel: str, data: st.DataObject, seed: int, k: int
) -> None:
    m, n, _ = shapes(data, kernel)
    rng = np.random.default_rng(seed)
    a = random_side(rng, m, k, "e4m3", 1, pow2=True)
    b = random_side(rng, n, k, "e5m2", 1, pow2=True)
    mx = []
    for side in (a, b):
        exponents = np.repeat(np.frexp(side.scales)[1] + 126, 4, 1)[:, : -(-k // 32)]
        scales = torch.from_numpy(exponents.astype(np.uint8))
        mx.append(Operand(torch.from_numpy(side.codes), scales, side.element, "k_last"))
    assert torch.equal(run(kernel, a.operand(), b.operand())[0], run(kernel, mx[0], mx[1])[0])


SCALES = {
    "far apart": ([2.0**-70, 1.5, 2.0**30 * 1.25], "wide_f64"),
    "subnormal": ([2.0**-130, 2.0**-149, 1.25 * 2.0**-127], None),
    "zero": ([0.0, 1.5, 3.0], "wide_f64"),
    "negative": ([-1.5, 1.0, 2.5], None),
    "large": ([1.5 * 2.0**90, 1.25 * 2.0**100, 2.0**80], None),
}


@pytest.mark.parametrize("case", SCALES)
def test_scales_that_no_quantizer_makes(kernel: str, case: str) -> None:
    """Up to fp32's limits, without Inf in between: the other side brings the result back."""
    rng = np.random.default_rng(5)
    scales, expect = SCALES[case]
    a, b = random_side(rng, 33, 300), random_side(rng, 5, 300)
    a.scales[:] = np.array(scales, np.float32)
    if case == "large":
        b.scales[:] *= np.float32(2.0**-100)
    a.codes[a.codes == 0] = 1
    out, _ = run(kernel, a.operand(), b.operand(), expect=expect or ran(kernel, a, b))
    oracles.assert_gemm(out, a.values(), b.values())


def test_zero_blocks_do_not_widen_rows(kernel: str) -> None:
    """A block of zeros has scale 1, however small the others are."""
    rng = np.random.default_rng(6)
    a, b = random_side(rng, 20, 384), random_side(rng, 7, 384)
    a.scales[:] *= np.float32(2.0**-95)
    a.codes[:, 128:256], a.scales[:, 1] = 0, 1
    out, _ = run(kernel, a.operand(), b.operand(), expect=ran(kernel, a, b))
    oracles.assert_gemm(out, a.values(), b.values())


@pytest.mark.parametrize("element", ELEMENTS)
def test_nan_is_never_hidden(kernel: str, element: str) -> None:
    rng = np.random.default_rng(7)
    a, b = random_side(rng, 40, 260, element), random_side(rng, 9, 260, element)
    a.codes[:], b.codes[:] = np.maximum(a.codes, 1), np.maximum(b.codes, 1)
    a.codes[3, 200] = 0x80 if "fnuz" in element else 0x7F
    a.scales[17, 2] = np.nan
    b.scales[4, 0] = np.nan
    out, _ = run(kernel, a.operand(), b.operand(), expect=ran(kernel, a, b))
    assert np.isnan(a.values()).any(1).sum() == 2
    assert torch.isnan(out[:, [3, 17]]).all() and torch.isnan(out[4]).all()
    oracles.assert_gemm(out, a.values(), b.values())


# ------------------------------------------------------------------------------------------ groups
COUNTS = [0, 3, 130, 17, 128, 0, 40]


def house(side: Side, layout: str) -> HouseOperand:
    rows, k = side.codes.shape
    plain = side.operand("k_last" if layout == "rows" else "k_first")
    spec = f"fp8_{plain.fmt}@{layout}"
    return HouseOperand(plain.codes, plain.scales, spec, rows, k)


def one(lhs: HouseOperand, rhs: HouseOperand) -> torch.Tensor:
    many, few = few_and_many()
    name = few if lhs.rows <= 16 else many
    out = torch.zeros(lhs.rows, rhs.rows)
    if not lhs.rows or not lhs.k:
        return out
    call = GemmCall(name, rhs, lhs, Epilogue(), out, None)
    nbytes = call.workspace_bytes()
    assert call.run(workspace.acquire(torch.device("cpu"), nbytes), nbytes)
    return out


@pytest.mark.parametrize("pow2", [True, False])
@pytest.mark.parametrize("packs", [True, False])
def test_groups_of_rows_are_the_loop(level: str, pow2: bool, packs: bool) -> None:
    rng = np.random.default_rng(8)
    ends = np.cumsum(COUNTS)
    bounds = Bounds(tuple((ends - COUNTS).tolist()), tuple(ends.tolist()))
    x = house(random_side(rng, int(ends[-1]) + 5, 300, pow2=pow2), "rows")
    weights = [house(random_side(rng, 70, 300, block_rows=128, pow2=pow2), "rows") for _ in COUNTS]
    stack = Stack(
        torch.stack([w.codes for w in weights]), torch.stack([w.scales for w in weights]),
        weights[0].spec, len(COUNTS), 70, 300,
    )  # fmt: skip
    if packs:
        stack = stack._replace(packed=cpu_grouped.pack(stack, few_and_many()[0]))
    out = torch.full((x.rows, 70), torch.nan)
    run_groups(cpu_grouped.GroupedGemmCall(few_and_many(), x, stack, bounds, out))
    for i, (start, end) in enumerate(zip(bounds.starts, bounds.ends, strict=True)):
        assert torch.equal(out[start:end], one(x.group(start, end), weights[i]))
    assert not out[ends[-1] :].any()


@pytest.mark.parametrize("pow2", [True, False])
def test_groups_of_k_are_the_loop(level: str, pow2: bool) -> None:
    rng = np.random.default_rng(9)
    ends = np.cumsum(COUNTS)
    bounds = Bounds(tuple((ends - COUNTS).tolist()), tuple(ends.tolist()))
    rows, blocks = int(ends[-1]) + 5, (int(ends[-1]) + 5) // 128 + len(COUNTS)
    sides = []
    for size in (40, 90):
        side = random_side(rng, size, 128 * blocks, pow2=pow2)
        codes = torch.from_numpy(side.codes[:, :rows]).t().contiguous()
        scales = torch.from_numpy(side.scales).t().contiguous()
        sides.append(HouseOperand(codes, scales, "fp8_e4m3_1x128@grouped_cols", size, rows))
    out = torch.full((len(COUNTS), 40, 90), torch.nan)
    run_groups(cpu_grouped.GroupedGemmCall(few_and_many(), *sides, bounds, out))
    for i, (start, end) in enumerate(zip(bounds.starts, bounds.ends, strict=True)):
        parts = [side.group(start, end, i) for side in sides]
        assert torch.equal(out[i], one(*parts))

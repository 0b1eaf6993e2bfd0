"""Native GEMMs with codes of 4 bits on one or both sides: the bits of the same values in 8 bits.

Products against fp64 are those of test_native_gemm.py, which draws this element too.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gemm_calls import Side, drawn, random_side, run, run_groups, shapes
from hypothesis import given, settings
from hypothesis import strategies as st
from native_words import GemmCall
from strategies import SEEDS

import te_mx
from te_mx.backends.cpu import binding as cpu
from te_mx.backends.cpu import grouped as cpu_grouped
from te_mx.backends.cpu.grouped import few_and_many
from te_mx.dispatch.calls import Epilogue
from te_mx.dispatch.groups import Bounds
from te_mx.layouts.operand import Operand as HouseOperand
from te_mx.layouts.operand import Stack
from te_mx.runtime import workspace

pytestmark = pytest.mark.skipif(cpu.native() is None, reason="the native module is not built")
# 0, .5, 1, 1.5, 2, 3, 4, 6 in E4M3.
E4M3 = np.array([0x00, 0x30, 0x38, 0x3C, 0x40, 0x44, 0x48, 0x4C], np.uint8)


def in_8_bits(side: Side) -> Side:
    codes = E4M3[side.codes & 7] | (side.codes & 8) << 4
    wide = Side(codes, side.scales, "e4m3")
    np.testing.assert_array_equal(wide.values(), side.values())
    return wide


@given(data=st.data(), seed=SEEDS, both=st.booleans())
@settings(max_examples=15)
def test_bits_are_those_of_8_bits(kernel: str, data: st.DataObject, seed: int, both: bool) -> None:
    m, n, k = shapes(data, kernel)
    rng = np.random.default_rng(seed)
    a, b = random_side(rng, m, k, "e2m1"), random_side(rng, n, k, "e2m1" if both else "e5m2")
    a_operand, b_operand = drawn(data, kernel, a, b)
    epilogue = Epilogue(bias_grad=data.draw(st.sampled_from([None, "operand", "result"])))
    made, sums = run(kernel, a_operand, b_operand, epilogue=epilogue)
    wide = in_8_bits(a).operand(), (in_8_bits(b) if both else b).operand()
    expected, its_sums = run(kernel, *wide, epilogue=epilogue)
    assert torch.equal(made, expected)
    assert sums is its_sums is None or torch.equal(sums, its_sums)


def test_the_nibble_behind_an_odd_k_is_not_read(kernel: str) -> None:
    rng = np.random.default_rng(1)
    for k in (33, 65, 127, 129):
        a, b = random_side(rng, 40, k, "e2m1"), random_side(rng, 7, k, "e2m1")
        dirty = [side.operand() for side in (a, b)]
        expected, _ = run(kernel, *dirty)
        for operand in dirty:
            operand.codes[:, -1] |= 0x70
        assert torch.equal(run(kernel, *dirty)[0], expected)


def test_rows_that_span_too_much_and_nan(kernel: str) -> None:
    """Wide rows go to wide_f64, unless what is far below is zero; a scale of 255 is NaN."""
    rng = np.random.default_rng(2)
    a, b = random_side(rng, 40, 100, "e2m1"), random_side(rng, 9, 100, "e2m1")
    a.scales[3], a.codes[3] = (200, 20, 190, 195), a.codes[3] | 1
    b.scales[4, 1] = 255
    names = {kernel, "wide_f64"}
    for zeros, spans in ((False, {"wide_f64"} if "stream" in kernel else names), (True, {kernel})):
        if zeros:
            a.codes[3, 32:64] &= 8
        sides = (a, b), (in_8_bits(a), in_8_bits(b))
        outs = []
        for pair in sides:
            out = torch.full((9, 40), torch.nan)
            call = GemmCall(kernel, *(side.operand() for side in pair), Epilogue(), out, None)
            nbytes = call.workspace_bytes()
            assert call.run(workspace.acquire(torch.device("cpu"), nbytes), nbytes) in spans
            outs.append(out)
        assert torch.equal(outs[0].nan_to_num(7.0), outs[1].nan_to_num(7.0))
        assert outs[0][4].isnan().all() and outs[0].isnan().sum() == 40


# ------------------------------------------------------------------------------------------ groups
COUNTS = [0, 3, 70, 17, 32, 0, 40]
ENDS = np.cumsum(COUNTS)
BOUNDS = Bounds(tuple((ENDS - COUNTS).tolist()), tuple(ENDS.tolist()))
SPECS = {"e4m3": "mxfp8_e4m3", "e2m1": "mxfp4"}


def stack_of(sides: list[Side]) -> Stack:
    parts, fmt = [side.operand() for side in sides], SPECS[sides[0].fmt]
    codes, scales = (torch.stack([part[i] for part in parts]) for i in (0, 1))
    return Stack(codes, scales, f"{fmt}@rows", len(sides), *sides[0].codes.shape)


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("k", [96, 101])
def test_groups_of_rows_have_the_bits_of_8_bits(level: str, packs: bool, k: int) -> None:
    rng = np.random.default_rng(3)
    x, weights = random_side(rng, 170, k, "e2m1"), []
    for _ in COUNTS:
        weights.append(random_side(rng, 70, k, "e2m1"))
    outs = []
    for narrow in (True, False):
        side = x if narrow else in_8_bits(x)
        plain = side.operand()
        held = HouseOperand(plain.codes, plain.scales, f"{SPECS[side.fmt]}@rows", 170, k)
        stack = stack_of(weights if narrow else [in_8_bits(w) for w in weights])
        if packs:
            stack = stack._replace(packed=cpu_grouped.pack(stack, few_and_many()[0]))
        outs.append(torch.full((170, 70), torch.nan))
        call = (few_and_many(), held, stack, BOUNDS, outs[-1])
        run_groups(cpu_grouped.GroupedGemmCall(*call))
    assert torch.equal(*outs) and not outs[0][ENDS[-1] :].any() and outs[0][: ENDS[-1]].any()


def test_groups_of_k_have_the_bits_of_8_bits(level: str) -> None:
    rng = np.random.default_rng(4)
    rows, blocks = 170, 170 // 32 + len(COUNTS)
    outs = []
    sides = [random_side(rng, size, 32 * blocks, "e2m1") for size in (40, 90)]
    for narrow in (True, False):
        held = []
        for side in sides if narrow else [in_8_bits(side) for side in sides]:
            codes = torch.from_numpy(side.codes[:, :rows]).t().contiguous()
            scales = torch.from_numpy(side.scales).t().contiguous()
            spec = f"{SPECS[side.fmt]}@grouped_cols"
            held.append(HouseOperand(codes, scales, spec, len(side.codes), rows))
        outs.append(torch.full((len(COUNTS), 40, 90), torch.nan))
        call = (few_and_many(), *held, BOUNDS, outs[-1])
        run_groups(cpu_grouped.GroupedGemmCall(*call))
    assert torch.equal(*outs) and outs[0].any()


@pytest.mark.parametrize(
    ("x_fmt", "w_fmt", "most"),
    [("mxfp4", "mxfp4", 0.02), ("mxfp8_e4m3", "mxfp4", 0.01), ("mxfp8_e4m3", "mxfp8_e4m3", 0.001)],
)
@pytest.mark.parametrize("m", [1, 128])
def test_difference_to_what_was_not_quantized(m, x_fmt, w_fmt, most):
    """1 - 2 <x, y> / (|x|^2 + |y|^2) against a product in bf16, with DeepGEMM's thresholds: a
    second look beside the bounds of the contract, at the size of numbers as a whole."""
    torch.manual_seed(m)
    x, w = torch.randn(m, 7168).bfloat16(), torch.randn(576, 7168).bfloat16()
    y = te_mx.gemm(te_mx.quantize(w, fmt=w_fmt), te_mx.quantize(x, fmt=x_fmt)).out.double()
    plain = (x @ w.t()).double()
    assert 1 - 2 * (y * plain).sum() / (y.square().sum() + plain.square().sum()) < most

"""The CPU backend as ops call it, at every instruction-set level: bytes of the reference, GEMMs
within the bound.
"""

from __future__ import annotations

import native_words as reference
import numpy as np
import oracles
import pytest
import strategies as our
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_words import Operand, house

from te_mx import _ops as ops
from te_mx.backends.cpu import binding as cpu
from te_mx.dispatch import run
from te_mx.dispatch.calls import Epilogue, Product, Quantize
from te_mx.dispatch.kernels import Kernel
from te_mx.dispatch.problem import Problem, place_of
from te_mx.dispatch.registry import pick

pytestmark = pytest.mark.skipif(cpu.missing_reason() is not None, reason="no native module")


CPU = torch.device("cpu")
LAYOUTS = {"plain": "cols", "transposed": "rows"}


# ----------------------------------------------------------------------------------------- quantize
def assert_quantizes_like_reference(x, fmt, rowwise, columnwise, rule):
    row = f"mxfp8_{fmt}@rows" if rowwise else ""
    col = f"mxfp8_{fmt}@{LAYOUTS[columnwise]}" if columnwise else ""
    what = Quantize(x, row, col, rule)
    got, expected = run.quantize(what), run.reference("quantize").run(what)
    for mine, theirs in zip(got[:2], expected[:2], strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            assert mine[2:] == theirs[2:]
            assert torch.equal(mine.codes, theirs.codes), (tuple(x.shape), x.dtype, mine.spec, rule)
            assert torch.equal(mine.scales, theirs.scales), (tuple(x.shape), x.dtype, mine.spec)


@given(
    x=our.matrices(sizes=our.POSITIVE), fmt=our.FORMATS, rule=our.RULES, rowwise=st.booleans(),
    columnwise=our.FORMS,
)  # fmt: skip
def test_quantize(isa, x, fmt, rule, rowwise, columnwise):
    assert_quantizes_like_reference(x, fmt, rowwise, columnwise, rule)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_quantize_every_kind_of_data(isa, dtype):
    """A size that several threads share."""
    for kind in our.KINDS:
        x = our.tensor(kind, 129, 300, 11, dtype)
        for fmt in ("e4m3", "e5m2"):
            for columnwise in ("plain", "transposed"):
                assert_quantizes_like_reference(x, fmt, True, columnwise, "rceil")


@given(
    rows=our.POSITIVE, k=our.POSITIVE, seed=our.SEEDS, fmt=our.FORMATS,
    layout=st.sampled_from(["rows", "cols"]), dtype=our.DTYPES,
)  # fmt: skip
def test_dequantize(isa, rows, k, seed, fmt, layout, dtype):
    """Random codes and scales, NaN codes and scale 255 among them."""
    generator = torch.Generator().manual_seed(seed)
    blocks = -(-k // 32)
    shapes = ((rows, k), (rows, blocks)) if layout == "rows" else ((k, rows), (blocks, rows))
    codes, scales = (torch.randint(256, s, dtype=torch.uint8, generator=generator) for s in shapes)
    made = ops.Operand(codes, scales, f"mxfp8_{fmt}@{layout}", rows, k)
    got = run.dequantize(made, dtype)
    expected = run.reference("dequantize").run(made, dtype)
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    zeros = expected == 0
    assert torch.equal(got[zeros].signbit(), expected[zeros].signbit())


def test_col_sum_has_the_same_bits_at_every_thread_count(isa, threads):
    x = our.tensor("outliers", 1100, 130, 3, torch.bfloat16)
    what = Quantize(x, "mxfp8_e4m3@rows", "mxfp8_e4m3@cols", "rceil", True)
    sums = []
    for count in (1, 2, 3):
        threads(count)
        sums.append(run.quantize(what).col_sum)
    exact = x.double().sum(0)
    assert ((sums[0] - exact).abs() <= 1100 * 2.0**-24 * x.double().abs().sum(0)).all()
    assert torch.equal(sums[0], sums[1]) and torch.equal(sums[0], sums[2])


# --------------------------------------------------------------------------------------------- gemm
def operand(kind, rows, k, seed, fmt, order) -> Operand:
    x = torch.from_numpy(our.array(kind, rows, k, seed))
    if order == "k_last":
        parts = reference.quantize(x, fmt, True, None, "rceil", False)
        return Operand(parts.row_codes, parts.row_scales, fmt, order)
    parts = reference.quantize(x.t(), fmt, False, "plain", "rceil", False)
    return Operand(parts.col_codes, parts.col_scales, fmt, order)


def exact_values(o: Operand) -> np.ndarray:
    turn = torch.Tensor.t if o.order == "k_first" else torch.clone
    codes, scales = turn(o.codes).contiguous().numpy(), turn(o.scales).contiguous().numpy()
    return oracles.values(codes, scales, o.fmt)


ORDERS = st.sampled_from(["k_last", "k_first"])


def kept(o: Operand, side: str) -> Operand:
    """The operand with the packed form that te_mx._ops makes of what stands still."""
    return o._replace(packed=ops.kept_form(house(o), side, ops.Mode()).packed)


def product(a: Operand, b: Operand, out_dtype: torch.dtype) -> torch.Tensor:
    """D[n, m] through the op."""
    return ops.gemm_2d(house(b), house(a), out_dtype=out_dtype).out


def kernel_of(m: int, n: int, k: int) -> Kernel:
    """The kernel that runs D[n, m] at the level in use."""
    spec = "mxfp8_e4m3@rows"
    return pick("gemm", CPU, spec, spec, (n, m, k))


@given(
    m=our.POSITIVE, n=our.POSITIVE, k=our.POSITIVE, seed=our.SEEDS,
    kinds=st.tuples(st.sampled_from(our.FINITE_KINDS), st.sampled_from(our.FINITE_KINDS)),
    formats=st.tuples(our.FORMATS, our.FORMATS), orders=st.tuples(ORDERS, ORDERS), dtype=our.DTYPES,
    packed=st.tuples(st.booleans(), st.booleans()),
)  # fmt: skip
@settings(max_examples=30)
def test_gemm(isa, guarded, m, n, k, seed, kinds, formats, orders, dtype, packed):
    a = operand(kinds[0], m, k, seed, formats[0], orders[0])
    b = operand(kinds[1], n, k, seed + 1, formats[1], orders[1])
    exact = exact_values(a), exact_values(b)
    if packed[0]:
        a = kept(a, "rhs")
    if packed[1]:
        b = kept(b, "lhs")
    oracles.assert_gemm(product(a, b, dtype), *exact)


@given(
    m=our.POSITIVE, n=our.POSITIVE, k=our.POSITIVE, seed=our.SEEDS,
    gelu=st.sampled_from([None, "tanh", "erf"]),
    backward=st.booleans(), bias=st.booleans(), kind=st.sampled_from([None, "operand", "result"]),
    accumulate=st.booleans(), dtype=our.DTYPES, other=our.DTYPES,
)  # fmt: skip
@settings(max_examples=30)
def test_gemm_epilogue_against_reference(
    isa, guarded, m, n, k, seed, gelu, backward, bias, kind, accumulate, dtype, other
):
    """Every combination, against the reference within a few ulp of the numbers that enter."""
    a = operand("normal", m, k, seed, "e4m3", "k_last")
    b = operand("normal", n, k, seed + 1, "e5m2", "k_last")
    epilogue = Epilogue(
        bias=our.tensor("normal", 1, m, seed + 2, other)[0] if bias else None,
        gelu=gelu,
        gelu_in=our.tensor("normal", n, m, seed + 3, other) if backward and gelu else None,
        bias_grad=kind,
        accumulate=accumulate,
    )
    before = our.tensor("normal", n, m, seed + 4, dtype)
    want_aux = gelu is not None and epilogue.gelu_in is None
    made = []
    native = kernel_of(m, n, k)
    of = Problem("gemm", place_of(CPU), house(b).spec, house(a).spec, n, m, k, dtype=dtype)
    for name, multiply in (
        ("reference", run.reference("gemm").run),
        (native.name, native.plan(of)),
    ):
        out, aux = before.clone(), torch.empty(n, m, dtype=other) if want_aux else None
        ran = multiply(Product(house(b), house(a), epilogue, out, aux, ops.Mode()))
        assert (ran.name == "reference") == (name == "reference")
        made.append((out, aux, ran.bias_grad))
    size = float((k**0.5) * 8 + 16)
    for mine, theirs in zip(made[1], made[0], strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            eps = max(torch.finfo(mine.dtype).eps, (k + n) * 2.0**-23)
            scale = size * (n if mine is made[1][2] and kind == "result" else 1)
            torch.testing.assert_close(mine, theirs, rtol=2 * eps, atol=eps * scale / 8)


def test_panel_and_wide_kernels_agree_on_nan_and_inf(isa):
    """Hand-made codes: E5M2 infinities, NaN codes, scale 255, in every position of a small
    product.
    """
    a = operand("normal", 20, 70, 1, "e5m2", "k_last")
    b = operand("normal", 18, 70, 2, "e5m2", "k_last")
    b.codes[2, 3], b.codes[5, 69], b.codes[7, 0] = 0x7C, 0xFC, 0x7F
    a.codes[4, 4], a.codes[6, 33] = 0xFE, 0x7C
    b.scales[9, 1] = 255
    exact = exact_values(a), exact_values(b)
    for rows in (18, 9):  # a panel kernel and a stream kernel
        few = b._replace(codes=b.codes[:rows].clone(), scales=b.scales[:rows].clone())
        got = product(a, few, torch.float32).double().numpy()
        with np.errstate(invalid="ignore"):
            expected = exact[1][:rows] @ exact[0].T
        np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
        np.testing.assert_array_equal(np.isinf(got), np.isinf(expected))


@pytest.mark.parametrize("spread", [0, 30, 60, 82, 83, 84, 100, 200])
def test_scales_far_apart_in_one_row(isa, spread):
    """Blocks 2^spread apart, the small ones meeting large ones: exact whether the row is wide or
    not.
    """
    for n in (3, 40):
        codes = torch.randint(0, 0x7E, (n, 128), dtype=torch.uint8)
        scales = torch.full((n, 4), 227, dtype=torch.uint8)
        scales[:, 1::2] = 227 - spread
        b = Operand(codes, scales, "e4m3", "k_last")
        a_scales = torch.full((24, 4), 27, dtype=torch.uint8)
        a_scales[:, 1::2] = 27 + min(spread, 200)
        a_codes = torch.randint(0, 0x7E, (24, 128), dtype=torch.uint8)
        a = Operand(a_codes, a_scales, "e4m3", "k_last")
        out = product(a, b, torch.float32)
        oracles.assert_gemm(out, exact_values(a), exact_values(b))


def test_extreme_scales(isa):
    """Bytes at both ends of the range: neither 2^e nor an intermediate may over- or underflow."""
    one = torch.full((20, 32), 0x38, dtype=torch.uint8)  # 1.0 in e4m3
    for byte_a, byte_b in ((254, 0), (0, 254), (240, 20), (127, 127), (60, 60), (0, 127), (1, 100)):
        a = Operand(one, torch.full((20, 1), byte_a, dtype=torch.uint8), "e4m3", "k_last")
        for n in (2, 20):
            scales = torch.full((n, 1), byte_b, dtype=torch.uint8)
            b = Operand(one[:n].clone(), scales, "e4m3", "k_last")
            out = product(a, b, torch.float32)
            assert (out == 32 * 2.0 ** (byte_a + byte_b - 254)).all(), (byte_a, byte_b, n)


@given(m=our.POSITIVE, n=our.POSITIVE, k=our.POSITIVE, seed=our.SEEDS)
@settings(max_examples=15)
def test_bits_depend_neither_on_threads_nor_position_nor_packing(isa, threads, m, n, k, seed):
    a = operand("outliers", m, k, seed, "e4m3", "k_last")
    b = operand("row_scales", n, k, seed + 1, "e4m3", "k_last")
    threads(1)
    expected = product(a, b, torch.float32)
    threads(3)
    assert torch.equal(product(a, b, torch.float32), expected)
    packed = kept(a, "rhs")
    assert torch.equal(product(packed, b, torch.float32), expected)
    shuffle = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    moved = b._replace(codes=b.codes[shuffle], scales=b.scales[shuffle])
    assert torch.equal(product(a, moved, torch.float32), expected[shuffle])
    shuffle = torch.randperm(m, generator=torch.Generator().manual_seed(seed))
    moved = a._replace(codes=a.codes[shuffle], scales=a.scales[shuffle])
    assert torch.equal(product(moved, b, torch.float32), expected[:, shuffle])


def test_packed_size_comes_from_the_native_query(isa):
    kernel = kernel_of(1 << 10, 1 << 10, 1 << 10).name
    for rows, k in ((1, 1), (17, 33), (64, 128)):
        for side, role in (("rhs", "a"), ("lhs", "b")):
            packed = kept(operand("normal", rows, k, 1, "e4m3", "k_last"), side).packed
            nbytes = cpu.packed_bytes(kernel, role, rows, k)
            assert (packed is None) == (nbytes == 0)
            if packed is not None:
                assert packed.numel() == nbytes and packed.data_ptr() % 64 == 0
                number = cpu.KERNELS.index(kernel)
                assert cpu.packed_for(packed) == (number, cpu.ROLES[role], rows, k)
                assert cpu.packed_for(packed[:-64]) is None  # a piece, whose rest would be read

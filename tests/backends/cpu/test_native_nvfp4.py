"""NVFP4 on CPUs at every level: the bytes of the specification, and products of exact values."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from strategies import DTYPES, KINDS, SEEDS, STRIDES, as_strided, tensor

import te_mx
from te_mx import _ops as ops
from te_mx._ops.grouped_gemm import gemm_rows
from te_mx._ops.grouped_quantize import quantize_grouped, quantize_weights
from te_mx.backends.cpu import binding as cpu
from te_mx.backends.cpu import grouped as cpu_grouped
from te_mx.backends.cpu.frozen import MOST_ROWS, stream_for
from te_mx.backends.cpu.grouped import few_and_many
from te_mx.backends.reference import grouped as reference_grouped
from te_mx.backends.reference import quantize as reference
from te_mx.dispatch import run
from te_mx.dispatch.calls import Epilogue, Groups, Quantize, QuantizeGroups, QuantizeWeights
from te_mx.dispatch.registry import pick
from te_mx.layouts.operand import Operand
from te_mx.runtime import workspace
from te_mx.runtime.kernel_log import LAST_RUN

pytestmark = pytest.mark.skipif(cpu.native() is None, reason="the native module is not built")
BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
# One off around codes, blocks, tiles of 16 x 256 and an item of the column sums (256 rows).
SIZES = st.sampled_from([1, 2, 15, 16, 17, 31, 33, 64, 65, 127, 255, 256, 257, 321])
CASES = [("nvfp4", rule) for rule in ("te", "torchao", "modelopt", "compressed_tensors")]
CASES += [("nvfp4", "te_4over6"), ("nvfp4_16x16", "te"), ("nvfp4_rows", "te")]
CASES += [("nvfp4_16x16", "te_4over6_mse_448"), ("nvfp4_rows", "te_4over6_448")]
TARGETS = st.sampled_from([("rows", "cols"), ("rows", "rows"), ("rows", ""), ("", "cols")])


def same(mine, theirs):
    assert (mine is None) == (theirs is None)
    if mine is None:
        return
    assert torch.equal(mine.codes, theirs.codes)
    assert torch.equal(mine.scales, theirs.scales)
    assert mine.tensor_scale.shape == theirs.tensor_scale.shape
    assert torch.equal(mine.tensor_scale.view(torch.int32), theirs.tensor_scale.view(torch.int32))


def check_bytes(x, fmt, rule, targets):
    """The bytes of the specification, and those that they stand for."""
    row, col = (f"{fmt}@{layout}" if layout else "" for layout in targets)
    assert pick("quantize", x.device, row, col, (*x.shape, 1), x.dtype, rule=rule).name == "cpu"
    made = run.quantize(Quantize(x, row, col, rule, col_sum=True))
    expected = reference.quantize(Quantize(x, row, col, rule))
    mx = run.quantize(Quantize(x, "mxfp8_e4m3@rows", "", "rceil", col_sum=True))
    assert torch.equal(made.col_sum.nan_to_num(), mx.col_sum.nan_to_num())  # in the same order
    for side, theirs in zip(made[:2], expected[:2], strict=True):
        same(side, theirs)
        for dtype in (F32, BF16, F16) if side is not None else ():
            got, values = run.dequantize(side, dtype), side.values(dtype)
            assert torch.equal(got.isnan(), values.isnan())
            assert torch.equal(got.nan_to_num(), values.nan_to_num())


@pytest.mark.parametrize(("fmt", "rule"), CASES)
@given(rows=SIZES, cols=SIZES, dtype=DTYPES, targets=TARGETS, data=st.data())
@settings(max_examples=8)
def test_bytes(isa, fmt, rule, rows, cols, dtype, targets, data):
    if rule == "compressed_tensors" and dtype == F16:
        dtype = BF16
    x = tensor(data.draw(st.sampled_from(KINDS)), rows, cols, data.draw(SEEDS), dtype)
    check_bytes(as_strided(x, data.draw(STRIDES)), fmt, rule, targets)


@pytest.mark.parametrize("rule", [rule for _, rule in CASES[:5]])
def test_ends_of_the_range(isa, rule):
    """Denormal tensors, whose scales are 0 or infinite; the largest numbers; zeros of both signs;
    blocks with NaN and Inf; ties between codes; scales below and above E4M3's."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(17, 70, generator=rng)
    tie = torch.randint(-24, 25, (17, 70), generator=rng) / 4
    tie[0, 0] = 2688
    wide = x * torch.exp2(torch.randint(-60, 60, (17, 70), generator=rng).float())
    spoiled = x.clone()
    spoiled[3, 20], spoiled[5, 40], spoiled[16, 69] = torch.nan, torch.inf, -torch.inf
    none = torch.full((17, 70), torch.nan)
    zeros = torch.zeros(17, 70)
    zeros[::2] *= -1
    cases = tie, wide, spoiled, none, zeros, x * 1e-38, x * 1e-42, x * 1e-44, x.clamp(-3, 3) * 1e38
    for case in (*cases, torch.tensor([[2.0**-149]]), torch.full((17, 70), -0.7)):
        for dtype in (F32, BF16):
            check_bytes(case.to(dtype), "nvfp4", rule, ("rows", "cols"))


RHT, RHT_32 = "nvfp4+rht16:0xd7e8d7e8", "nvfp4+rht32:0x1b2d3c4f"


@pytest.mark.parametrize("rule", ["te", "te+sr", "modelopt+sr", "te_4over6_mse+sr"])
@given(
    rows=SIZES, cols=SIZES, dtype=DTYPES, data=st.data(),
    targets=st.sampled_from([("nvfp4@rows", f"{RHT}@cols"), (f"{RHT}@rows", "nvfp4@rows"),
                             (f"{RHT_32}@rows", f"{RHT_32}@cols"), ("", f"{RHT}@rows"),
                             ("nvfp4@rows", f"{RHT_32}@rows"), ("nvfp4@rows", "nvfp4@cols")]),
)  # fmt: skip
@settings(max_examples=8)
def test_rounded_at_random_and_transformed(isa, rule, rows, cols, dtype, data, targets):
    """Each direction has the amax of what it is transformed to; one draw for both directions."""
    x = tensor(data.draw(st.sampled_from(KINDS)), rows, cols, data.draw(SEEDS), dtype)
    seed = torch.tensor([data.draw(SEEDS)]) if rule.endswith("sr") else None
    assert pick("quantize", x.device, *targets, (*x.shape, 1), dtype, rule=rule).name == "cpu"
    what = Quantize(x, *targets, rule, seed=seed, first=7)
    for mine, theirs in zip(run.quantize(what)[:2], reference.quantize(what)[:2], strict=True):
        same(mine, theirs)


@pytest.mark.parametrize("fmt", ["nvfp4", "nvfp4_rows"])
def test_groups(isa, fmt):
    """Each has tensor scales of its own; rows of none, and scales of no block, are 0."""
    x = torch.randn(150, 40) * torch.exp2(torch.arange(150)[:, None] % 7)
    offs = torch.tensor([33, 33, 70, 131])
    cols = "nvfp4@grouped_cols" if fmt == "nvfp4" else ""
    seed = torch.tensor([5])
    rule = "te" if cols else "te_4over6"
    what = QuantizeGroups(x, Groups(offs, 0), f"{fmt}@rows", cols, f"{rule}+sr", True, seed)
    bounds = te_mx.dispatch.groups.host_bounds(offs, 0, 150)
    made, expected = cpu_grouped.quantize(what, bounds), reference_grouped._in_groups(what, bounds)
    same(made.row, expected.row)
    same(made.col, expected.col)
    assert torch.equal(made.col_sum, expected.col_sum)
    weights = QuantizeWeights(torch.randn(3, 33, 50), f"{fmt}@rows", f"{fmt}@cols", "te")
    stacks = cpu_grouped.CpuQuantizeWeights().run(weights)
    for i, weight in enumerate(weights.weights):
        both = reference.quantize(Quantize(weight, weights.row, weights.col, "te"))
        for stack, theirs in zip(stacks, both[:2], strict=True):
            same(stack.group(i), theirs)


# ------------------------------------------------------------------------------------- products
SIDES = ("nvfp4@rows", "nvfp4@cols", "nvfp4_16x16@rows", "nvfp4_16x16@cols", "nvfp4_rows@rows")


def operand(x, spec):
    rule = "te" if "nvfp4" in spec else "fp32" if spec.startswith("fp8") else "rceil"
    if spec.endswith("cols"):
        return ops.quantize_2d(x.t(), "", spec, rule=rule).col
    return ops.quantize_2d(x, spec, rule=rule).row


def values(side):
    if side.tensor_scale is None:
        return side.values(F64)
    return side.unscaled(F64) * side.tensor_scale.double()


def multiply(lhs, rhs, epilogue=None, dtype=F32, into=None, threads=2):
    """D, on a poisoned result, and the bias gradient."""
    out = torch.full((lhs.rows, rhs.rows), torch.nan, dtype=dtype) if into is None else into
    sizes = lhs.rows, rhs.rows, lhs.k
    assert pick("gemm", out.device, lhs.spec, rhs.spec, sizes, dtype).name != "reference"
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    with workspace.guarded():
        made = ops.gemm_2d(lhs, rhs, epilogue or Epilogue(), out=out, out_dtype=dtype)
    torch.set_num_threads(before)
    return out, made.bias_grad


def assert_inside(got, lhs, rhs, bias=0.0, old=0.0):
    """The bound of the contract, c = 1, with two roundings of tensor scales."""
    a, b = values(lhs), values(rhs)
    exact, size = a @ b.T + bias + old, a.abs() @ b.abs().T + abs(bias) + abs(old)
    bound = (lhs.k + 6) * 2.0**-24 * size + torch.finfo(got.dtype).eps / 2 * exact.abs()
    assert ((got.double() - exact).abs() <= bound + 2.0**-149).all()


@given(
    m=st.sampled_from([1, 3, 16, 17, 40, 70]), n=st.sampled_from([1, 17, 33, 64, 70]),
    k=st.sampled_from([1, 15, 16, 17, 31, 33, 64, 129, 300]),
    lhs=st.sampled_from([*SIDES, "mxfp8_e4m3@rows", "mxfp8_e5m2@cols", "mxfp4@rows",
                         "fp8_e4m3_1x128@rows"]),
    rhs=st.sampled_from(SIDES), turned=st.booleans(), seed=SEEDS,
)  # fmt: skip
@example(  # one row lies alike by rows and by k, but for codes of 4 bits
    m=3, n=1, k=33, lhs="nvfp4@rows", rhs="nvfp4@cols", turned=False, seed=0
)  # fmt: skip
@settings(max_examples=25)
def test_products(isa, m, n, k, lhs, rhs, turned, seed):
    rng = torch.Generator().manual_seed(seed)
    x, w = (torch.randn(rows, k, generator=rng) * scale for rows, scale in ((m, 1e-6), (n, 1e9)))
    w[1:2] = 0
    sides = operand(x, lhs), operand(w, rhs)
    a, b = sides[::-1] if turned else sides
    out, sums = multiply(a, b, Epilogue(bias_grad="operand"))
    assert_inside(out, a, b)
    exact = values(a)
    bound = (k + 6) * 2.0**-24 * exact.abs().sum(1)
    assert ((sums.double() - exact.sum(1)).abs() <= bound).all()
    assert torch.equal(multiply(a, b, threads=1)[0], out)
    bias = torch.randn(b.rows, generator=rng)
    made, _ = multiply(a, b, Epilogue(bias, accumulate=True), into=out.clone())
    assert_inside(made, a, b, bias.double(), out.double())
    assert_inside(multiply(a, b, dtype=BF16)[0], a, b)
    gelu, grads = multiply(a, b, Epilogue(bias, "tanh", bias_grad="result"))
    plain = torch.nn.functional.gelu((values(a) @ values(b).T + bias).float(), approximate="tanh")
    size = values(a).abs() @ values(b).abs().T + bias.abs()
    assert ((gelu - plain).abs() <= (k + 40) * 2.0**-23 * size + 1e-6).all()
    torch.testing.assert_close(grads, gelu.sum(0), rtol=1e-5, atol=1e-4 * size.max().item())


def test_scales_of_every_byte(isa):
    """Products of all codes and all scales, signs, 0, denormal numbers and NaN included, and tensor
    scales of every size: values are exact, and so is a product with one."""
    codes = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 8)
    codes = ((codes & 15) * 17).contiguous()
    scales = torch.arange(256, dtype=torch.uint8)[:, None].contiguous()
    one = operand(torch.eye(16)[:3], "mxfp8_e4m3@rows")
    of_rows = torch.exp2(torch.arange(256.0)[:, None] % 99 - 50)  # of weights that were joined
    sizes = (1.0, 3.0, 1e-30, 2.0**-140, -7e25, torch.inf, 0.0)
    for whole in (*map(torch.tensor, sizes), of_rows):
        w = Operand(codes, scales, "nvfp4@rows", 256, 16, None, whole)
        for lhs, rhs in ((one, w), (w, one)):
            out = multiply(lhs, rhs)[0]
            expected = one.values() @ w.unscaled(F32).T * whole.t()
            expected = expected if rhs is w else expected.T
            assert torch.equal(out.isnan(), expected.isnan())
            assert torch.equal(out.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("activations", ["nvfp4", "nvfp4_rows", "mxfp8_e4m3"])
def test_products_of_groups(isa, activations):
    """The bits of one product a group."""
    x = torch.randn(90, 83)
    offs = torch.tensor([3, 3, 40, 88])
    spec = f"{activations}@rows"
    rule = "te" if "nvfp4" in activations else "rceil"
    tokens = quantize_grouped(x, Groups(offs, 0), spec, rule=rule).row
    stacked = quantize_weights(torch.randn(4, 21, 83), "nvfp4_16x16@rows", rule="te")[0]
    bias = torch.randn(4, 21)
    out = gemm_rows(tokens, stacked, Groups(offs, 0), bias=bias, out_dtype=F32, tag=0)
    ran = LAST_RUN[0]
    assert not out[88:].any()
    many, few = few_and_many()
    for i, (start, end) in enumerate(itertools.pairwise([0, 3, 3, 40, 88])):
        if start == end:
            continue
        assert (few if end - start <= 16 else many) in ran
        lhs = tokens.group(start, end, i)
        assert torch.equal(out[start:end], multiply(lhs, stacked.group(i), Epilogue(bias[i]))[0])


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4", "mxfp8_e4m3", "fp8_e4m3_128x128"])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_groups_of_rows_as_they_are(isa, fmt, dtype):
    """Frozen groups whose inputs are not quantized: the bits of the layers one by one."""
    torch.manual_seed(0)
    layer = te_mx.GroupedLinear(3, 130, 21, dtype=dtype)
    te_mx.freeze_weights(layer, drop_master=True, fmt=fmt, activations="bf16")
    rows = min(97, 3 * MOST_ROWS[stream_for(dtype)])
    x, first = torch.randn(rows, 130).to(dtype), rows * 3 // 4
    splits = [first, 0, rows - first]
    with torch.no_grad():
        y = layer(x, splits)
        assert te_mx.audit(layer)["(root)"].fprop == stream_for(dtype)
        for i, (start, end) in enumerate(((0, first), (first, first), (first, rows))):
            for row in range(start, end, 5):
                alone = layer(x[row : row + 1], [int(j == i) for j in range(3)])
                assert torch.equal(alone[0], y[row])

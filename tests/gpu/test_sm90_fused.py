"""Fused steps on Hopper: normalization to the bit, activations against fp64, and of both the bytes
of quantizing what was rounded."""

from __future__ import annotations

import itertools

import pytest
import sm90_calls as calls
import torch

from te_mx._ops import quantized
from te_mx._ops.fused import act_quantize_2d, norm_backward_2d, norm_quantize_2d
from te_mx._ops.grouped_fused import act_quantize_grouped
from te_mx._ops.grouped_quantize import quantize_grouped
from te_mx.backends.reference import fused
from te_mx.dispatch import registry
from te_mx.dispatch.calls import ActGroups, Groups
from te_mx.dispatch.fused import ACTIVATIONS, NORMS, Activation, ActStep, Norm, NormStep, Target
from te_mx.nn import activations

pytestmark = pytest.mark.usefixtures("poisoned")

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = (BF16, F32, F16)
# Whole tiles; tails in both directions; 8 columns that straddle the halves; odd; long rows; one.
SHAPES = ((256, 384), (300, 200), (129, 264), (77, 1001), (33, 9000), (1, 1))
E4M3, E5M2, LOW = "mxfp8_e4m3", "mxfp8_e5m2", "fp8_e4m3_1x128"
TARGETS = (  # what te_mx.Linear asks for, then other forms, single directions, nothing
    Target(f"{E4M3}@sm90:8", f"{E4M3}@sm90:8", "rceil"),
    Target(f"{E5M2}@sm90:0", f"{E5M2}@sm90:0", "floor"),
    Target(f"{E5M2}@rows", f"{E5M2}@rows", "rceil"),
    Target(f"{E4M3}@rows", f"{E4M3}@cols", "floor"),
    Target(f"{E4M3}@sm90:8", "", "rceil"),
    Target("", f"{E4M3}@sm90:8", "rceil"),
    Target("", "", "rceil"),
    # What the recipes with fp32 scales ask for, plain ones, single directions, another element.
    Target(f"{LOW}@sm90_factors", f"{LOW}@sm90:8", "pow2"),
    Target(f"{LOW}@sm90_factors", f"{LOW}@sm90_factors", "fp32:0.0001"),
    Target(f"{LOW}@rows", f"{LOW}@cols", "fp32"),
    Target("", f"{LOW}@sm90:0", "pow2"),
    Target(f"{LOW}@sm90_factors", "", "pow2"),
    Target("fp8_e5m2_1x128@rows", "fp8_e5m2_1x128@rows", "fp32"),
)


def randn(*shape, dtype=BF16, seed=1):
    g = torch.Generator("cuda").manual_seed(seed)
    return (2 * torch.randn(shape, generator=g, device="cuda")).to(dtype)


def same(got, expected):
    """Equal bits where there are any; every NaN is the same."""
    assert (got is None) == (expected is None)
    if got is not None:
        assert got.dtype == expected.dtype and got.shape == expected.shape
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


def same_sides(got, expected):
    """The operands of two quantized matrices, sums aside."""
    for mine, theirs in zip(got[:2], expected[:2], strict=True):
        assert (mine is None) == (theirs is None)
        if theirs is not None:
            assert mine[2:] == theirs[2:]
            same(mine.codes, theirs.codes), same(mine.scales, theirs.scales)


def same_parts(got, values, target):
    """The bytes of quantizing `values`, and sums that are nearly theirs."""
    same_sides(got, quantized(values, target))
    assert (got.col_sum is not None) == target.col_sum
    if target.col_sum:
        exact, size = values.double().sum(0), values.double().abs().sum(0)
        assert ((got.col_sum.double() - exact).abs() <= len(values) * 2.0**-24 * size).all()


def normalize(x, weight, bias, norm, dtype, target, keep=True):
    return norm_quantize_2d(NormStep(x, weight, bias, norm, dtype, keep, target))


def activate(h, act, dtype, target, grad=None, keep=True):
    return act_quantize_2d(ActStep(h, grad, act, dtype, keep, target))


# ------------------------------------------------------------------------------------ normalization
def norm_case(kind, shape, dtype, seed=1):
    x = randn(*shape, dtype=dtype, seed=seed) + 1
    weight = randn(shape[1], dtype=F32, seed=2)
    bias = randn(shape[1], dtype=F32, seed=3) if kind == "LayerNorm" and shape[0] > 32 else None
    return x, weight, bias, Norm(kind, 1e-5)


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtypes", [(a, b) for a in DTYPES for b in DTYPES], ids=str)
def test_normalization_is_the_reference(kind, shape, dtypes):
    call = norm_case(kind, shape, dtypes[0])
    mean, rstd, z = fused.normalize(*call, dtypes[1])
    for i, target in enumerate(TARGETS):
        for keep in (False, True) if i == 0 else (i % 2 == 1,):
            got = normalize(*call, dtypes[1], target, keep)
            same(got.mean, mean), same(got.rstd, rstd)
            same(got.z, z if keep else None)
            same_parts(got.quantized, z, target)


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtypes", [(a, b) for a in DTYPES for b in DTYPES], ids=str)
def test_gradients_of_normalization(kind, shape, dtypes):
    x, weight, _, norm = norm_case(kind, shape, dtypes[0])
    mean, rstd, _ = fused.normalize(x, weight, None, norm, F32)
    dz = randn(*shape, dtype=dtypes[1], seed=4)
    call = (dz, x, weight, mean, rstd, dtypes[0])
    dx, dweight, dbias = norm_backward_2d(*call)
    same(dx, fused.normalize_backward(*call)[0])
    center = 0 if mean is None else mean[:, None]
    h = ((x.float() - center) * rstd[:, None]).double()
    for got, terms in ((dweight, dz.double() * h), (dbias, dz.double())):
        bound = (shape[0] + 2) * 2.0**-24 * terms.abs().sum(0)
        assert ((got.double() - terms.sum(0)).abs() <= bound).all()
    for one, two in zip((dx, dweight, dbias), norm_backward_2d(*call), strict=True):
        same(one, two)


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("shape", [(300, 200), (77, 1001), (1000, 264), (4500, 136), (1, 1)])
def test_gradients_of_normalization_that_count_in_zeros(kind, dtype, shape):
    """As a quantizer left them: the sums come in the launch that makes dx, with the same bits, and
    of a normalization without a bias nothing is written in its place."""
    (rows, cols), native = shape, calls.native()
    x, weight, _, norm = norm_case(kind, shape, dtype)
    mean, rstd, _ = fused.normalize(x, weight, None, norm, F32)
    dz = randn(*shape, dtype=dtype, seed=4)
    expected = norm_backward_2d(dz, x, weight, mean, rstd, dtype)
    words = 1 + -(-rows // 128) + -(-cols // 128)
    other = randn(40, 64)
    left, counters = calls.poisoned_packed(40, 64), torch.full((words + 1,), -1, device="cuda")
    counters = counters.to(torch.int32)
    quantizer = native.QuantizeArgs(
        x=calls.matrix(other), row=calls.out_record(left, "packed"), spread=8,
        workspace=calls.address(counters), workspace_bytes=4 * words, stream=calls.stream(),
    )  # fmt: skip
    assert native.quantize(quantizer) == 0
    alone = calls.quantize(other, col=None)[0]
    same(left.codes, alone.codes), same(left.scales, alone.scales)
    assert counters.tolist() == [0] * words + [-1]
    dx, dweight = torch.full_like(x, torch.nan), torch.full_like(weight, torch.nan)
    dbias = None if kind == "RMSNorm" else torch.full_like(weight, torch.nan)
    parts = native.norm_partial_sums(rows) * 2 * cols
    scratch = torch.full((parts + 2 * rows,), torch.nan, device="cuda")
    record = native.NormGradArgs(
        dz=calls.matrix(dz), x=calls.matrix(x), rms=mean is None, inverse=fused.inverse(cols),
        weight=calls.address(weight), mean=calls.address(mean), rstd=calls.address(rstd),
        dx=calls.address(dx), dx_dtype=calls.DTYPES[dtype], dweight=calls.address(dweight),
        dbias=calls.address(dbias), partial=calls.address(scratch),
        row_sums=calls.address(scratch) + 4 * parts, workspace=calls.address(counters),
        workspace_bytes=4 * words, stream=calls.stream(),
    )  # fmt: skip
    assert native.normalize_backward(record) == 0
    same(dx, expected[0]), same(dweight, expected[1])
    if dbias is not None:
        same(dbias, expected[2])
    assert counters[-1] == -1
    record.workspace_bytes -= 4
    assert native.normalize_backward(record) != 0


@pytest.mark.parametrize("shapes", [((64, 96), (300, 200)), ((129, 264), (7, 8)), ((1, 1), (1, 1))])
def test_two_matrices_in_one_launch(shapes):
    """And without one of them, and in a dtype that has no such launch: the same bytes."""
    native, target = calls.native(), [0x3F] * 3
    for dtype in (BF16, F32):
        made, records = [], []
        zeros = torch.tensor(target, dtype=torch.int32, device="cuda")
        xs = [randn(*shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes)]
        for x in xs:
            out = calls.poisoned_packed(*x.shape), calls.poisoned_packed(*reversed(x.shape))
            sides = {
                s: calls.out_record(o, "packed") for s, o in zip(("row", "col"), out, strict=True)
            }
            made.append(out)
            records.append(native.QuantizeArgs(
                x=calls.matrix(x), spread=8, stream=calls.stream(), **sides
            ))  # fmt: skip
        records[1].workspace, records[1].workspace_bytes = calls.address(zeros), 8
        assert native.quantize_two(*records) == 0
        for x, out in zip(xs, made, strict=True):
            for got, expected in zip(out, calls.quantize(x)[:2], strict=True):
                same(got.codes, expected.codes), same(got.scales, expected.scales)
        assert zeros.tolist() == [0, 0, 0x3F]


# Clusters of every size: one group of rows, several and a part at the end, pieces for some threads.
STRIPS = ((8, 2048), (1544, 2304), (2064, 4096), (200, 4352), (520, 8192), (72, 8448), (96, 14336))


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("shape", STRIPS)
def test_gradients_of_rows_kept_in_shared_memory(kind, shape):
    rows, cols = shape
    x, dz = ((randn(rows, cols + 64, seed=i) + 0.5)[:, 8 : cols + 8] for i in (1, 2))
    weight, norm = randn(cols, dtype=F32, seed=3), Norm(kind, 1e-5)
    mean, rstd, _ = fused.normalize(x, weight, None, norm, F32)
    call = (dz, x, weight, mean, rstd, BF16)
    expected = fused.normalize_backward(*call)[0]
    h = ((x.float() - (0 if mean is None else mean[:, None])) * rstd[:, None]).double()
    made = [norm_backward_2d(*call) for _ in range(3)]
    for dx, dweight, dbias in made:
        same(dx, expected)
        for got, terms in ((dweight, dz.double() * h), (dbias, dz.double())):
            bound = (rows + 2) * 2.0**-24 * terms.abs().sum(0)
            assert ((got.double() - terms.sum(0)).abs() <= bound).all()
        same(dweight, made[0][1]), same(dbias, made[0][2])
    x[3, 5] = torch.nan  # stays in its row
    same(norm_backward_2d(*call)[0], fused.normalize_backward(*call)[0])


@pytest.mark.parametrize("shape", [(2100, 9000), (3000, 136)])
def test_normalization_in_many_bands(shape):
    x, weight, bias, norm = norm_case("LayerNorm", shape, BF16)
    expected = fused.normalize(x, weight, bias, norm, BF16)
    back = x, x, weight, *expected[:2], BF16
    dx = fused.normalize_backward(*back)[0]
    for _ in range(3):
        got = normalize(x, weight, bias, norm, BF16, TARGETS[0])
        same(got.z, expected[2])
        same_parts(got.quantized, expected[2], TARGETS[0])
        same(norm_backward_2d(*back)[0], dx)


def test_normalization_of_rows_apart():
    x = randn(200, 700)
    weight = randn(300, dtype=F32)
    for part in (x[:, :304], x[:, 3:300], x[:, ::2], x.t()[:, :200]):
        w = weight.repeat(3)[: part.shape[1]]
        norm = Norm("LayerNorm", 1e-5)
        got = normalize(part, w, w, norm, BF16, TARGETS[0])
        same(got.z, fused.normalize(part, w, w, norm, BF16)[2])
        same_parts(got.quantized, got.z, TARGETS[0])
        back = (part, part, w, got.mean, got.rstd, BF16)
        same(norm_backward_2d(*back)[0], fused.normalize_backward(*back)[0])


def test_weights_that_lie_anywhere():
    x = randn(150, 648)
    for offset in (0, 1, 2):
        weight, bias = (randn(2, 652, dtype=F32, seed=offset)[i, offset:][:648] for i in (0, 1))
        norm = Norm("LayerNorm", 1e-5)
        mean, rstd, z = fused.normalize(x, weight, bias, norm, BF16)
        same(normalize(x, weight, bias, norm, BF16, TARGETS[0]).z, z)
        back = (x, x, weight, mean, rstd, BF16)
        same(norm_backward_2d(*back)[0], fused.normalize_backward(*back)[0])


def test_normalization_in_a_graph_starts_afresh():
    call = norm_case("LayerNorm", (700, 1024), BF16)
    weight, norm, x = call[1], call[3], call[0]
    run = lambda: normalize(*call, BF16, TARGETS[0])  # noqa: E731
    back = lambda m: norm_backward_2d(x, x, weight, m.mean, m.rstd, BF16)  # noqa: E731
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        back(run())
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = run()
        grads = back(made)
    for seed in (5, 6):
        x.copy_(randn(*x.shape, seed=seed))
        graph.replay()
        expected = fused.normalize(*call, BF16)
        same(made.z, expected[2])
        same(grads[0], fused.normalize_backward(x, x, weight, *expected[:2], BF16)[0])
    assert norm.eps == 1e-5


# -------------------------------------------------------------------------------------- activations
def exact(name, rows, cols, dtype):
    """(activation, h, grad, fp64 value, fp64 gradient of h, what errors are measured by)."""
    act = Activation(name, limit=1.5)
    h = randn(rows, cols * (2 if act.gated else 1), dtype=dtype)
    grad = randn(rows, cols, dtype=dtype, seed=2)
    wide = h.double().requires_grad_()
    value = activations.plain(wide, act)
    (dh,) = torch.autograd.grad(value, wide, grad.double())
    parts = (h.double().abs() + 1).chunk(2, 1) if act.gated else [h.double().abs() + 1]
    size = parts[0] * parts[-1] * (1 + act.offset)
    back = (size * grad.double().abs()).repeat(1, len(parts))
    return act, h, grad, value.detach(), dh, size, back


def assert_close(got, expected, size):
    """Rounded once from a value that is off by a few units of fp32; more where exp is fast."""
    slack = 2.0 ** (-20 if got.dtype is F32 else -18) * size
    bound = slack + 0.5 * calls.ulp(expected.abs() + slack, got.dtype)
    assert ((got.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name, shape, dtype):
    act, h, grad, value, dh, size, back = exact(name, *shape, dtype)
    for i, target in enumerate(TARGETS):
        made = activate(h, act, dtype, target)
        same_parts(made.quantized, made.out, target)
        with_sums = target._replace(col_sum=i % 2 == 0)
        there = activate(h, act, dtype, with_sums, grad)
        same_parts(there.quantized, there.out, with_sums)
        if i == 0:
            first, first_back = made.out, there.out
            assert_close(first, value, size)
            assert_close(first_back, dh, back)
            silent = activate(h, act, dtype, target, keep=False)
            quiet = activate(h, act, dtype, with_sums, grad, keep=False)
            assert silent.out is None and quiet.out is None
            for one, two in ((silent, made), (quiet, there)):
                same_sides(one.quantized, two.quantized)
                same(one.quantized.col_sum, two.quantized.col_sum)
        same(made.out, first), same(there.out, first_back)  # whatever is wanted beside


GROUPED = (  # tokens as recipes ask for them; the last three are quantized in a launch of their own
    Target(f"{E4M3}@sm90_rows:8", f"{E4M3}@sm90_k:8", "rceil", True),
    Target("", f"{E5M2}@sm90_k:0", "floor", True),
    Target(f"{E4M3}@sm90_rows:3", "", "floor"),
    Target("mxfp4@sm90_rows:8", "mxfp4@sm90_k:8", "even", True),
    Target(f"{LOW}@sm90_factors_rows", f"{LOW}@sm90_k:8", "pow2", True),
    Target(f"{LOW}@sm90_factors_rows", f"{LOW}@sm90_factors_k", "fp32:0.0001", True),
    Target("mxfp4@sm90_rows:8", f"{E4M3}@sm90_k:8", "rceil"),
    Target("mxfp4@sm90_rows:8", "mxfp4+rht32:0x1234abcd@sm90_k:8", "rceil", True),
    Target("fp8_e5m2_1x128@sm90_factors_rows", "", "fp32"),
)


@pytest.mark.parametrize("spread", [8, 0, 9])
@pytest.mark.parametrize("name", ["swiglu", "qgeglu", "geglu"])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("rows", [1, 31, 33, 65, 127, 128, 129, 300])
def test_gated_activations_of_rows_alone(rows, dtype, name, spread):
    """The values, and the bytes of quantizing them."""
    for cols, fmt in itertools.product((16, 400, 1024), (E4M3, E5M2)):
        h = randn(rows, 2 * cols, dtype=dtype)
        h[:, :cols] *= torch.randint(-9, 9, (rows, 1), device="cuda").exp2()
        h[rows // 2 :, cols : cols + 32] = 0
        row, act = f"{fmt}@sm90:{spread if fmt == E4M3 else 8}", Activation(name)
        out = act_quantize_2d(ActStep(h, None, act, dtype, True, Target("", "", "rceil"))).out
        theirs = quantized(out, Target(row, "", "rceil")).row
        for keep in (True, False):
            step = ActStep(h, None, act, dtype, keep, Target(row, "", "rceil"))
            alone = act_quantize_2d(step)
            same(alone.out, out if keep else None)
            mine = alone.quantized.row
            assert torch.equal(mine.codes[:, :cols], theirs.codes[:, :cols])
            assert torch.equal(mine.scales, theirs.scales)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cols", [128, 264, 77])
@pytest.mark.parametrize("name", ["swiglu", "srelu", "geglu"])
@pytest.mark.parametrize("splits", [[300, 0, 1, 130], [0, 257], [1] * 5], ids=str)
def test_activations_of_groups(splits, name, cols, dtype):
    """The bytes of the quantizer of groups, where a group has some; ends that the device knows."""
    act, rows = Activation(name), sum(splits) + 3
    h = randn(rows, cols * (2 if act.gated else 1), dtype=dtype)
    ends = torch.tensor(splits).cumsum(0)
    groups = Groups(ends.cuda().int())
    for given in (None, randn(rows, cols, dtype=dtype, seed=2)):
        values = activate(h, act, dtype, TARGETS[6], given).out
        for target in GROUPED:
            step = ActStep(h, given, act, dtype, False, target)
            made = act_quantize_grouped(ActGroups(step, groups))
            row, col, rule, sums, _ = target
            want = quantize_grouped(values, groups, row, col, rule=rule, col_sum=sums)
            same_sides(made, want), same(made.col_sum, want.col_sum)


def small_beside_large(rows, cols, dtype, zeros):
    """Numbers that become subnormal in a tile, in its blocks or in neither, with every last bit:
    the largest of blocks are within 2^8."""
    g = torch.Generator("cuda").manual_seed(7)
    draw = {"generator": g, "device": "cuda"}
    exponent = -torch.randint(0, 30, (rows, cols), **draw).float()
    exponent += torch.randint(-2, 3, (1, cols), **draw)
    large = torch.rand(rows, cols, **draw) < 0.3
    exponent = exponent.where(~large, torch.randint(-3, 1, (rows, cols), **draw).float())
    x = (1 + torch.rand(rows, cols, **draw)) * exponent.exp2()
    x *= torch.randint(0, 2, (rows, cols), **draw) * 2 - 1
    return torch.where(torch.rand(rows, cols, **draw) < zeros, 0.0, x).to(dtype)


@pytest.mark.parametrize("zeros", [0, 0.5])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fmt", [E4M3, E5M2])
def test_small_values_beside_large_ones(fmt, dtype, zeros):
    x = small_beside_large(300, 264, dtype, zeros)
    sides = f"{fmt}@sm90:8"
    both, row, col = (
        Target(sides, sides, "rceil"),
        Target(sides, "", "rceil"),
        Target("", sides, "even"),
    )
    for target in (both, row, col):
        made = activate(x.abs(), Activation("relu"), dtype, target)
        same(made.out, x.abs())
        same_parts(made.quantized, x.abs(), target)
        ones = torch.ones_like(x)
        there = activate(torch.cat((ones, ones), 1), Activation("reglu"), dtype, target, x)
        same(there.out, torch.cat((x, x), 1))
        same_parts(there.quantized, there.out, target)


@pytest.mark.parametrize("name", ["swiglu", "gelu"])
def test_activations_of_mixed_dtypes_and_rows_apart(name):
    act, target = Activation(name), TARGETS[0]
    h = randn(130, 700)
    for part in (h[:, :640], h[:, 4:500], h[:, ::2]):
        made = activate(part, act, BF16, target)
        whole = activate(part.contiguous(), act, BF16, target)
        same(made.out, whole.out)
        same_parts(made.quantized, whole.out, target)
    h, grad = randn(40, 96, dtype=F16), randn(40, 96 // (2 if act.gated else 1), dtype=BF16)
    for got, dtype in (
        (activate(h, act, BF16, target), BF16),
        (activate(h, act, F32, target, grad), F32),
    ):
        assert got.out.dtype == dtype
        same_parts(got.quantized, got.out, target)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_nan_is_never_hidden_and_infinity_is_not_made(name):
    act, target = Activation(name), TARGETS[2]
    h = randn(64, 128)
    h[1, 3], h[5, 7], h[9, 9] = torch.nan, 1e19, -1e19
    grad = torch.ones(64, 64 if act.gated else 128, dtype=BF16, device="cuda")
    made = activate(h, act, BF16, target)
    assert made.out[1, 3].isnan() and made.quantized.row.scales[1, 0] == 255
    assert made.out.isnan().sum() == 1
    assert activate(h, act, BF16, target, grad).out[9, 9] == 0 or act.gated


@pytest.mark.slow
def test_more_than_two_to_the_31_elements():
    act, rows, cols = Activation("swiglu"), 70000, 16384
    h = torch.empty(rows, 2 * cols, dtype=BF16, device="cuda").normal_()
    target = Target(f"{E4M3}@rows", f"{E4M3}@cols", "rceil")
    made = activate(h, act, BF16, target, h[:, :cols], keep=False).quantized
    part = slice(69984, rows)
    last = activate(h[part], act, BF16, target, h[part, :cols], keep=False).quantized
    same(made.row.codes[part], last.row.codes)
    same(made.col.codes[part], last.col.codes)
    same(made.col.scales[-1:], last.col.scales[-1:])
    norm, weight = Norm("RMSNorm", 1e-5), torch.ones(2 * cols, device="cuda")
    got = normalize(h, weight, None, norm, BF16, target)
    expected = fused.normalize(h[part], weight, None, norm, BF16)
    same(got.rstd[part], expected[1]), same(got.z[part], expected[2])
    dx = norm_backward_2d(h, h, weight, None, got.rstd, BF16)[0][part]
    args = h[part], h[part], weight, None, got.rstd[part], BF16
    same(dx, fused.normalize_backward(*args)[0])


def test_the_native_code_runs():
    x, weight = randn(256, 256), torch.ones(256, device="cuda")
    norm = Norm("RMSNorm", 1e-5)
    for target in (TARGETS[0], TARGETS[7], TARGETS[8]):
        for op, step in (
            ("norm_quantize", NormStep(x, weight, None, norm, BF16, False, target)),
            ("act_quantize", ActStep(x, None, Activation("silu"), BF16, False, target)),
        ):
            specs = target.row, target.col, (*x.shape, 1)
            kernel, plan = registry.planned(op, x.device, *specs, BF16, rule=target.rule)
            assert kernel.name == "sm90" and plan.specs(BF16) is not None and plan(step) is not None

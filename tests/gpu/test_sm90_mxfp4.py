"""MXFP4 on Hopper: quantizers and conversions byte for byte, products and layers against fp64 of
the operands that they multiply, and against MXFP8 of the same numbers bit for bit."""

from __future__ import annotations

import math

import pytest
import sm90_bounds as bounds
import sm90_calls as calls
import torch

import te_mx
from te_mx import _ops as ops
from te_mx import formats
from te_mx._ops import Epilogue, Mode, Operand, Quantize
from te_mx._ops.fused import act_quantize_2d, norm_quantize_2d
from te_mx._ops.grouped_quantize import (
    Groups,
    columns_of_weights,
    quantize_grouped,
    quantize_weights,
)
from te_mx.backends.reference.quantize import quantize as reference_quantize
from te_mx.backends.sm90 import binding
from te_mx.backends.sm90.layouts import groups as sm90_groups
from te_mx.backends.sm90.layouts import tiles as sm90_tiles
from te_mx.backends.sm90.nvfp4 import MOST_DENSE
from te_mx.dispatch.fused import Activation, ActStep, Norm, NormStep, Target
from te_mx.recipe import BlockScaling, MXFP4BlockScaling

FP4, E4M3, E5M2 = "mxfp4", "mxfp8_e4m3", "mxfp8_e5m2"
TILES = f"{FP4}@sm90:8"
RULES = ("rceil", "floor", "even")
DTYPES = (torch.bfloat16, torch.float32, torch.float16)
KINDS = ("gaussian", "rows", "spread", "mixed", "huge", "tiny", "sparse", "nan", "lognormal")
# Whole tiles, tails in both directions, an odd number of tiles, odd k, one element.
SHAPES = ((128, 128), (256, 384), (300, 200), (129, 257), (77, 1000), (1, 1))
# Row and column layouts that one call makes.
FORMS = (("sm90:8", "sm90:8"), ("rows", "rows"), ("rows", "cols"), ("sm90:0", ""), ("", "sm90:3"))
PAIRS = ((FP4, FP4), (E4M3, FP4), (FP4, E4M3))
PRODUCTS = ((256, 256, 256), (300, 200, 333), (5, 7, 41), (700, 900, 1536))
M, N, K = 384, 328, 264


def same_operand(got: Operand, want: Operand) -> None:
    assert got[2:5] == want[2:5]
    assert torch.equal(got.codes.cpu(), want.codes) and torch.equal(got.scales.cpu(), want.scales)


def operand(rows: int, k: int, kind: str, fmt: str, seed: int, rule: str = "rceil") -> Operand:
    """Plain, quantized by the reference on the CPU."""
    x = calls.data(rows, k, kind, torch.float32, seed).cpu()
    made = reference_quantize(Quantize(x, f"{fmt}@rows", "", rule)).row
    return made._replace(codes=made.codes.cuda(), scales=made.scales.cuda())


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_quantizer_writes_the_bytes_of_the_format(shape, kind):
    start = SHAPES.index(shape) + KINDS.index(kind)
    for i, dtype in enumerate(DTYPES):
        for j, rule in enumerate(RULES):
            for form in (FORMS[0], FORMS[(start + i + j) % len(FORMS)]):
                row, col = (f"{FP4}@{one}" if one else "" for one in form)
                # Rows that start at 16 bytes, and some that do not.
                x = calls.data(shape[0], shape[1] + 3 * (j % 2), kind, dtype, j)[:, : shape[1]]
                made = ops.quantize_2d(x, row, col, rule=rule)
                want = reference_quantize(Quantize(x.cpu(), row, col, rule))
                for got, expected in zip(made[:2], want[:2], strict=True):
                    if expected is not None:
                        same_operand(got, expected)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", ["gaussian", "rows", "spread", "lognormal", "nan"])
def test_quantizer_of_many_tiles(kind, rule):
    """Large enough for every path through the kernel; directions do not depend on each other."""
    x = calls.data(1024, 768, kind, torch.bfloat16, 5)
    x[:, 300:420] = x[:, 300:420].relu()
    want = reference_quantize(Quantize(x.cpu(), TILES, TILES, rule))
    for row, col in ((TILES, TILES), (TILES, ""), ("", TILES)):
        made = ops.quantize_2d(x, row, col, rule=rule)
        for got, expected in zip(made[:2], want[:2], strict=True):
            if got is not None:
                same_operand(got, expected)


# Row and column formats, and rules: both directions at once, one transformed, one alone.
RANDOM = (
    (FP4, FP4, "rceil+sr"),
    (FP4, FP4, "floor+sr"),
    (FP4, f"{FP4}+rht32:0x1234abcd", "rceil+sr"),
    (FP4, f"{FP4}+rht32:0x1234abcd", "floor"),
    (FP4, f"{FP4}+rht16:0x0badcafe", "even"),
    ("", f"{FP4}+rht16:0x13572468", "rceil+sr"),
    (f"{FP4}+rht16:0xff00ff0f", "", "even+sr"),
    (E4M3, f"{E4M3}+rht32:0x80000001", "rceil"),
    ("", f"{E5M2}+rht16:0x13570000", "floor"),
)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    "layouts", [("sm90:8", "sm90:8"), ("rows", "rows"), ("sm90:8", "cols"), ("rows", "cols")]
)
@pytest.mark.parametrize(("row", "col", "rule"), RANDOM)
@pytest.mark.parametrize("shape", [(256, 384), (300, 200), (129, 257), (77, 1001), (1, 1)], ids=str)
def test_random_quantizer_of_every_backend_is_one(shape, row, col, rule, layouts, recwarn):
    """Transformed in fp32 in a fixed order, rounded by the random words of an element's number."""
    specs = [f"{fmt}@{of}" if fmt else "" for fmt, of in zip((row, col), layouts, strict=True)]
    for i, dtype in enumerate(DTYPES):
        for kind in ("gaussian", "spread", "nan", "tiny", "ends"):
            x = calls.data(shape[0], shape[1] + 3 * (i % 2), kind, dtype, i)[:, : shape[1]]
            seed = torch.tensor([-(1 << 62) + 12345 * i]) if rule.endswith("+sr") else None
            want = reference_quantize(Quantize(x.cpu(), *specs, rule, seed=seed))
            there = None if seed is None else seed.cuda()
            made = ops.quantize_2d(x, *specs, rule=rule, seed=there)
            for got, expected in zip(made[:2], want[:2], strict=True):
                if expected is not None:
                    same_operand(got, expected)
    assert not [w for w in recwarn if issubclass(w.category, te_mx.FallbackWarning)]


@pytest.mark.parametrize("shape", [(4001, 2584), (200, 60008), (3968, 2560)], ids=str)
def test_random_quantizer_of_many_tiles(shape):
    """More tiles than run at once, whole ones too; rows that end before their memory's."""
    x = calls.data(shape[0], shape[1] + 24, "gaussian", torch.bfloat16, 2)[:, : shape[1]]
    specs, seed = (f"{FP4}@rows", f"{FP4}+rht32:0x1234abcd@cols"), torch.tensor([77])
    made = ops.quantize_2d(x, *specs, rule="rceil+sr", seed=seed.cuda())
    want = ops.quantize_2d(x.cpu(), *specs, rule="rceil+sr", seed=seed)
    for got, expected in zip(made[:2], want[:2], strict=True):
        assert torch.equal(got.codes.cpu(), expected.codes)
        assert torch.equal(got.scales.cpu(), expected.scales)


@pytest.mark.parametrize("layouts", [("sm90:8", "cols"), ("rows", "cols"), ("sm90:8", "sm90:8")])
@pytest.mark.parametrize("rule", ["rceil", "rceil+sr"])
def test_one_launch_makes_both_directions(rule, layouts, monkeypatch):
    """The columns transformed, the rows and the sums not."""
    fmts = FP4, f"{FP4}+rht32:0x1234abcd"
    specs = [f"{fmt}@{of}" for fmt, of in zip(fmts, layouts, strict=True)]
    x = calls.data(300, 264, "gaussian", torch.bfloat16, 1)
    seed = torch.tensor([7], device="cuda") if rule.endswith("+sr") else None
    launches, native = [], binding.native().quantize
    monkeypatch.setattr(binding.native(), "quantize", lambda a: launches.append(a) or native(a))
    made = ops.quantize_2d(x, *specs, rule=rule, col_sum=True, seed=seed)
    assert len(launches) == 1
    want = reference_quantize(
        Quantize(x.cpu(), *specs, rule, seed=None if seed is None else seed.cpu())
    )
    same_operand(made.row, want.row), same_operand(made.col, want.col)
    error = (made.col_sum.double() - x.double().sum(0)).abs()
    assert (error <= 300 * 2.0**-24 * x.double().abs().sum(0)).all()


@pytest.mark.parametrize("rule", ["even"])
@pytest.mark.parametrize("fmt", [E4M3, E5M2])
def test_the_rule_even_of_fp8(fmt, rule):
    spec = f"{fmt}@sm90:8"
    for dtype in DTYPES:
        for kind in KINDS:
            x = calls.data(300, 200, kind, dtype)
            made = ops.quantize_2d(x, spec, spec, rule=rule)
            want = reference_quantize(Quantize(x.cpu(), spec, spec, rule))
            for got, expected in zip(made[:2], want[:2], strict=True):
                same_operand(got, expected)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("span", [(0, 256), (100, 115), (100, 116), (120, 140), (253, 256), (0, 8)])
@pytest.mark.parametrize("shape", [(130, 77), (300, 256), (128, 1001), (3, 16)], ids=str)
def test_conversion_takes_any_bytes(shape, span):
    g = torch.Generator().manual_seed(span[0] + shape[1])
    codes = torch.randint(0, 16, shape, generator=g, dtype=torch.uint8)
    codes[torch.rand(shape, generator=g) < 0.5] &= 8
    blocks = -(-shape[1] // 32)
    scales = torch.randint(*span, (shape[0], blocks), generator=g).to(torch.uint8)
    scales[torch.rand(scales.shape, generator=g) < 0.02] = 255
    want = sm90_tiles.pack(codes, scales, FP4).operand_parts(codes)
    rows = formats.get(FP4).pack(codes), scales, f"{FP4}@rows"
    cols = codes.t().contiguous(), scales.t().contiguous(), f"{FP4}@cols"
    for there_codes, there_scales, spec in (rows, cols):
        given = Operand(there_codes.cuda(), there_scales.cuda(), spec, *shape)
        same_operand(ops.convert_2d(given, TILES), Operand(*want, TILES, *shape))


@pytest.mark.parametrize("layout", ["rows", "cols"])
@pytest.mark.parametrize("shape", [(64, 96), (33, 77), (7, 8), (131, 1304)], ids=str)
def test_dequantize(shape, layout):
    x = calls.data(*shape, "rows", torch.float32)
    x[shape[0] // 2, 5] = math.nan
    made = reference_quantize(Quantize(x.cpu().t(), "", f"{FP4}@{layout}", "rceil")).col
    there = made._replace(codes=made.codes.cuda(), scales=made.scales.cuda())
    for dtype in DTYPES:
        got = ops.dequantize_2d(there, dtype).cpu()
        torch.testing.assert_close(got, made.values(dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("precision", ["adaptive", "exact"])
@pytest.mark.parametrize("kind", ["gaussian", "rows", "channels", "lognormal", "spread", "tiny"])
@pytest.mark.parametrize("shape", PRODUCTS, ids=str)
def test_products_against_fp64(shape, kind, precision):
    m, n, k = shape
    for i, fmts in enumerate(PAIRS):
        lhs, rhs = (
            operand(rows, k, kind, fmt, seed)
            for rows, fmt, seed in zip((m, n), fmts, (1, 2), strict=True)
        )
        dtype = (torch.bfloat16, torch.float32, torch.float16)[i]
        if kind == "rows" and dtype == torch.float16:
            dtype = torch.float32
        exact = precision == "exact"
        values = [
            bounds.mx_values(one) if exact else bounds.aligned_values(one, 8) for one in (rhs, lhs)
        ]
        bound = bounds.fp32_sums(*values) if exact else bounds.accumulation(*values)
        mode = Mode(precision, 8)
        given = [(lhs, rhs)]
        if not exact:
            given.append(tuple(ops.convert_2d(x, f"{x.format.name}@sm90:8") for x in (lhs, rhs)))
        found = [ops.gemm_2d(*pair, out_dtype=dtype, mode=mode).out for pair in given]
        bounds.assert_close(found[0], values[1] @ values[0].t(), bound)
        assert torch.equal(found[0], found[-1])


@pytest.mark.parametrize("kind", ["gaussian", "channels", "rows"])
@pytest.mark.parametrize("shape", [(256, 256, 512), (300, 200, 333), (1024, 768, 2048)], ids=str)
def test_products_have_the_bits_of_mxfp8_of_the_same_numbers(shape, kind):
    """E2M1 is part of E4M3: the same numbers in 8 bits, plain and as the tiles of 4 bits."""
    m, n, k = shape
    sides = [operand(rows, k, kind, FP4, seed) for rows, seed in ((m, 1), (n, 2))]
    to_e4m3 = sm90_tiles.shift_table(FP4)[sm90_tiles.FP4_HEADROOM].cuda()
    as_fp8, as_tiles = [], []
    for side in sides:
        codes = to_e4m3[formats.get(FP4).unpack(side.codes, k).long()]
        as_fp8.append(Operand(codes, side.scales, f"{E4M3}@rows", side.rows, k))
        as_tiles.append(ops.convert_2d(side, TILES)._replace(spec=f"{E4M3}@sm90:8"))
        assert torch.equal(as_fp8[-1].values(torch.float64), side.values(torch.float64))
    # Alignment goes over 14 octaves here, over 8 in 8 bits: where a tile is row-shared there, the
    # tensor cores add up other numbers. What those give has its bound above.
    alike = all(
        torch.equal(sm90_tiles.classes(ops.convert_2d(x, f"{E4M3}@sm90:8")), sm90_tiles.classes(t))
        for x, t in zip(as_fp8, as_tiles, strict=True)
    )
    assert alike or kind == "channels"
    pairs = [as_tiles]
    if alike:
        pairs += [as_fp8, (sides[0], as_fp8[1]), (as_fp8[0], sides[1])]
    for epilogue in (Epilogue(), Epilogue(bias=torch.randn(n, device="cuda"))):
        got = ops.gemm_2d(*sides, epilogue, out_dtype=torch.float32).out
        for others in pairs:
            assert torch.equal(ops.gemm_2d(*others, epilogue, out_dtype=torch.float32).out, got)


def test_operands_in_4_bits_may_be_captured():
    lhs, rhs = operand(300, 520, "gaussian", FP4, 1), operand(200, 520, "gaussian", FP4, 2)
    want = ops.gemm_2d(lhs, rhs, out_dtype=torch.bfloat16).out
    side_stream = torch.cuda.Stream()
    with torch.cuda.stream(side_stream):
        ops.gemm_2d(lhs, rhs, out_dtype=torch.bfloat16)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = ops.gemm_2d(lhs, rhs, out_dtype=torch.bfloat16).out
    got.zero_()
    graph.replay()
    assert torch.equal(got, want)


# ------------------------------------------------------------------------------------------ groups
GROUPS = (
    (FP4, "rceil"),
    (E4M3, "rceil"),
    (FP4, "rceil+sr"),
    (f"{FP4}+rht32:0x1234abcd", "even"),
    (f"{FP4}+rht16:0x0badcafe", "rceil+sr"),
    (f"{E4M3}+rht32:0x80000001", "floor"),
)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("kind", ["gaussian", "mixed", "nan"])
@pytest.mark.parametrize("splits", [[40, 0, 3, 90], [0, 0, 300, 0], [129, 63, 191, 193]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("col_format", "rule"), GROUPS)
def test_groups_are_quantized_as_each_alone(splits, kind, col_format, rule, dtype, recwarn):
    """Ends that the device alone knows; both directions in one format, and each in its own; columns
    transformed, codes rounded by the words of an element's number among those of all groups."""
    rows, cols = sum(splits), 200
    x = calls.data(rows, cols, kind, dtype)
    ends = torch.tensor(splits).cumsum(0)
    seed = torch.tensor([1 << 61 | 12345]) if rule.endswith("+sr") else None
    made = quantize_grouped(
        x, Groups(ends.cuda().int()), f"{FP4}@sm90_rows:8", f"{col_format}@sm90_k:8",
        rule=rule, col_sum=True, seed=None if seed is None else seed.cuda(),
    )  # fmt: skip
    assert not [w for w in recwarn if issubclass(w.category, te_mx.FallbackWarning)]
    for i, (end, size) in enumerate(zip(ends.tolist(), splits, strict=True)):
        start = end - size
        if not size:
            continue
        alone = Quantize(
            x[start:end].cpu(), TILES, f"{col_format}@sm90:8", rule, seed=seed, first=start
        )
        want = reference_quantize(alone)
        row = sm90_groups.rows_of(made.row, start, end, i)
        col = sm90_groups.k_of(made.col, start, end, i)
        for got, expected in ((row, want.row), (col, want.col)):
            assert torch.equal(got.codes.cpu(), expected.codes)
            tiles = -(-len(expected.codes) // 128)  # those that pad an odd number are nobody's
            assert torch.equal(got.scales[:, :tiles].cpu(), expected.scales[:, :tiles])
        exact, size_of = x[start:end].double().sum(0), x[start:end].double().abs().sum(0)
        if kind != "nan":
            assert ((made.col_sum[i] - exact).abs() <= size * 2.0**-24 * size_of).all()


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("shape", [(264, 200), (128, 77), (130, 333)], ids=str)
def test_weights_of_groups(shape):
    """Packed, plain, plain that are packed later, and the columns of those that lie by rows."""
    weights = [calls.data(*shape, "gaussian", torch.bfloat16, i) for i in range(3)]
    tiles = quantize_weights(weights, TILES, TILES, rule="rceil")
    plain = quantize_weights(weights, f"{FP4}@rows", f"{FP4}@cols", rule="rceil")
    columns = columns_of_weights(plain[0], TILES, "rceil")
    for i, w in enumerate(weights):
        want = reference_quantize(Quantize(w.cpu(), TILES, TILES, "rceil"))
        by_rows = reference_quantize(Quantize(w.cpu(), f"{FP4}@rows", f"{FP4}@cols", "rceil"))
        for k in range(2):
            same_operand(tiles[k].group(i), want[k])
            same_operand(plain[k].group(i), by_rows[k])
        values = by_rows.row.values(torch.bfloat16)
        again = reference_quantize(Quantize(values, "", TILES, "rceil")).col
        same_operand(columns.group(i), again)


# ----------------------------------------------------------------------------------------- modules
RECIPES = {
    "fp4": BlockScaling(x=FP4, w=FP4),
    "fp8 x fp4": BlockScaling(x=E4M3, w=FP4),
    "all": BlockScaling(x=FP4, w=FP4, g=FP4),
    "random": MXFP4BlockScaling(g=FP4),
}
MODULES = {
    "Linear": lambda: te_mx.Linear(K, N, device="cuda", dtype=torch.bfloat16),
    "LayerNormLinear": lambda: te_mx.LayerNormLinear(K, N, device="cuda", dtype=torch.bfloat16),
    "LayerNormMLP": lambda: te_mx.LayerNormMLP(
        K, N, device="cuda", dtype=torch.bfloat16, activation="swiglu"
    ),
    "GroupedLinear": lambda: te_mx.GroupedLinear(3, K, N, device="cuda", dtype=torch.bfloat16),
}


def gradients(module, x, splits, recipe, *context) -> list[torch.Tensor]:
    module.zero_grad()
    x = x.clone().requires_grad_()
    with te_mx.autocast(recipe=recipe):
        y = module(x, *splits)
    y.backward(torch.sin(torch.arange(y.numel(), device=y.device)).view(y.shape).to(y.dtype))
    return [y.detach(), x.grad, *(p.grad for p in module.parameters())]


@pytest.mark.parametrize("recipe", list(RECIPES))
@pytest.mark.parametrize("kind", list(MODULES))
def test_modules_run_on_the_kernels(kind, recipe, recwarn):
    """Nothing falls back, and results are those of precision "exact" but for the accumulators."""
    torch.manual_seed(0)
    module, x = MODULES[kind](), calls.data(M, K, "gaussian")
    splits = ([100, 0, M - 100],) if kind == "GroupedLinear" else ()
    given = RECIPES[recipe]
    exact = BlockScaling(x=given.x, w=given.w, g=given.g, precision="exact")
    got = gradients(module, x, splits, given)
    assert {kernel for one in te_mx.audit(module) for kernel in one[2:5]} == {"sm90_adaptive"}
    assert not [w for w in recwarn if issubclass(w.category, te_mx.FallbackWarning)]
    if kind == "GroupedLinear" or recipe == "random":
        return  # precision "exact" loops over groups there; gradients differ by chance
    for mine, theirs in zip(got, gradients(module, x, splits, exact), strict=True):
        error = (mine.double() - theirs.double()).norm() / theirs.double().norm()
        assert error < 2e-2, error


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_a_grouped_layer_is_a_loop_of_linear(recipe):
    torch.manual_seed(0)
    layer, x = MODULES["GroupedLinear"](), calls.data(M, K, "gaussian")
    splits = [100, 0, M - 100]
    got = gradients(layer, x, (splits,), RECIPES[recipe])
    start = 0
    for i, size in enumerate(splits):
        one = te_mx.Linear(K, N, device="cuda", dtype=torch.bfloat16)
        with torch.no_grad():
            one.weight.copy_(getattr(layer, f"weight{i}"))
            one.bias.copy_(getattr(layer, f"bias{i}"))
            if size:
                with te_mx.autocast(recipe=RECIPES[recipe]):
                    y = one(x[start : start + size])
                assert torch.equal(got[0][start : start + size], y)
        start += size


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layout", ["sm90:8", "rows"])
def test_fused_steps_end_in_the_same_bytes(layout, dtype):
    """Those of the quantizer of what they compute."""
    x, grad = (calls.data(300, 520, "gaussian", dtype, seed) for seed in (1, 2))
    weight = torch.linspace(-1, 1, 520, device="cuda")
    spec = f"{FP4}@{layout}"
    target = Target(spec, spec, "rceil", False)
    made = [
        norm_quantize_2d(NormStep(x, weight, bias, Norm(kind, 1e-5), dtype, True, target))
        for kind, bias in (("RMSNorm", None), ("LayerNorm", weight))
    ]
    computed = [one.z for one in made]
    for given, act in ((None, "gelu"), (None, "swiglu"), (grad, "silu")):
        step = ActStep(x, given, Activation(act), dtype, True, target)
        made.append(act_quantize_2d(step))
        computed.append(made[-1].out)
    for values, one in zip(computed, made, strict=True):
        want = ops.quantize_2d(values, spec, spec)
        for got, expected in zip(one.quantized[:2], want[:2], strict=True):
            same_operand(
                got, expected._replace(codes=expected.codes.cpu(), scales=expected.scales.cpu())
            )


@pytest.mark.parametrize("kind", ["Linear", "GroupedLinear"])
def test_frozen_weights_of_4_bits(kind, recwarn):
    torch.manual_seed(0)
    module, rows = MODULES[kind](), M if kind == "GroupedLinear" else MOST_DENSE + 1
    x = calls.data(rows, K, "gaussian")
    splits = ([100, 0, M - 100],) if kind == "GroupedLinear" else ()
    recipe = BlockScaling(x=E4M3, w=FP4)
    with torch.no_grad(), te_mx.autocast(recipe=recipe):
        want = module(x, *splits)
    te_mx.freeze_weights(module, drop_master=True, recipe=recipe)
    with torch.no_grad(), te_mx.autocast(recipe=recipe):
        got = module(x, *splits)
    if kind == "Linear":  # unpacked for the same kernel
        assert torch.equal(got, want)
    else:  # groups of so few rows are multiplied in bf16: one rounding of the output may differ
        torch.testing.assert_close(got, want, rtol=2**-7, atol=2**-7 * float(want.abs().max()))
    assert not [w for w in recwarn if issubclass(w.category, te_mx.FallbackWarning)]


def test_gradients_in_4_bits_run_on_the_kernels(recwarn):
    """Rounded stochastically, and transformed on both sides of wgrad."""
    torch.manual_seed(0)
    module, x = MODULES["Linear"](), calls.data(M, K, "gaussian")
    found = [gradients(module, x, (), MXFP4BlockScaling(g=FP4)) for _ in range(2)]
    assert te_mx.audit(module)["(root)"][2:5] == ("sm90_adaptive",) * 3
    assert not [w for w in recwarn if issubclass(w.category, te_mx.FallbackWarning)]
    assert torch.equal(found[0][0], found[1][0])  # forward knows no chance
    assert not torch.equal(found[0][1], found[1][1])
    plain = gradients(module, x, (), BlockScaling(x=FP4, w=FP4, g=E4M3))
    for mine, theirs in zip(found[0][1:3], plain[1:3], strict=True):
        error = (mine.double() - theirs.double()).norm() / theirs.double().norm()
        assert error < 0.3, error

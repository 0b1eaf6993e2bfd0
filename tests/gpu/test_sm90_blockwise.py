"""Blockwise FP8 on Hopper: quantizers bit for bit, products and layers against fp64 of the operands
that they multiply."""

from __future__ import annotations

import math

import pytest
import sm90_bounds as bounds
import sm90_calls as calls
import torch
from test_sm90_gemm import APART, assert_epilogues_of

import te_mx
from te_mx import _ops as ops
from te_mx import formats
from te_mx._ops.quantize import quantize_two_2d
from te_mx.autograd.linear_recipe import roles
from te_mx.backends.sm90.layouts import tiles as sm90_tiles
from te_mx.backends.sm90.layouts.factors import SM90_FACTORS
from te_mx.dispatch.calls import Quantize
from te_mx.recipe import DeepSeekV3, Float8BlockScaling, Format

LAYOUT = SM90_FACTORS.name
# Row and column layouts that one call makes.
FORMS = (
    (LAYOUT, LAYOUT),
    ("rows", "rows"),
    ("rows", "cols"),
    (LAYOUT, "cols"),
    (LAYOUT, ""),
    ("", LAYOUT),
)
SHAPES = ((256, 384), (1, 1), (129, 200), (1000, 264), (64, 8), (383, 640), (300, 133))
RULES = ("pow2", "fp32", "pow2:1e-12", "fp32:0.001")
DTYPES = (torch.bfloat16, torch.float32, torch.float16)
# Blocks of rhs, and the configurations of the GEMM for them: -1 chooses.
CONFIGS = [("128x128", -1), ("128x128", 0), ("128x128", 1), ("1x128", 0), ("1x128", 1)]
every_config = pytest.mark.parametrize(("block", "config"), CONFIGS)
# Exponents of scales of lhs and rhs: products that overflow or vanish beside others in their rows,
# large times small, small times small.
POWERS = (((-120, 120), (-120, 120)), ((60, 120), (-126, 20)), ((-120, -40), (-100, 0)))
PRODUCTS = ((256, 256, 512), (1, 128, 128), (200, 328, 400), (385, 137, 144), (1536, 768, 2048))


def data(rows, cols, kind, dtype, seed=0):
    """As calls.data; "wild" has exponents over much of the range of fp32, and NaN and Inf; "relu"
    is as small as gradients are, with columns of zeros between others."""
    if kind == "relu":
        x = calls.data(rows, cols, "gaussian", torch.float32, seed) * 2.0**-12
        x[:, ::2] *= torch.rand(rows, 1, device="cuda").sub(0.5).sign().relu()
        x[:, 1::3] = 0.0
        return x.to(dtype)
    if kind != "wild":
        return calls.data(rows, cols, kind, dtype, seed)
    g = torch.Generator("cuda").manual_seed(seed)
    x, powers = (torch.randn(rows, cols, generator=g, device="cuda") for _ in range(2))
    x *= torch.exp2(12 * powers)
    x[:, : cols // 3] *= 2.0**-60
    x[: rows // 3] *= 2.0**-70
    x[0], x[:, 0] = 0.0, -0.0
    x[rows // 2, cols // 2], x[-1, -1] = math.nan, -math.inf
    return x.to(dtype)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("kind", ["gaussian", "wild"])
@pytest.mark.parametrize("block", ["1x128", "128x128"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_quantizer_writes_the_bytes_of_the_format(shape, block, kind):
    start = SHAPES.index(shape) + (kind == "wild")
    for i, dtype in enumerate(DTYPES):
        for j, rule in enumerate(RULES):
            fmt = formats.get(f"fp8_{('e4m3', 'e5m2')[(i + j) % 2]}_{block}")
            row, col = (f"{fmt}@{one}" if one else "" for one in FORMS[(start + 5 * i + j) % 6])
            # Rows that start at 16 bytes, and some that do not.
            x = data(shape[0], shape[1] + 3 * (j % 2), kind, dtype, seed=j)[:, : shape[1]]
            sums = kind != "wild"
            made = ops.quantize_2d(x, row, col, rule=rule, col_sum=sums, sum_dtype=torch.float32)
            for operand, of in ((made.row, x), (made.col, x.t())):
                if operand is None:
                    continue
                k = of.shape[1]
                plain = fmt.quantize(of.cpu(), rule)
                want = operand.layout.pack(fmt, *plain, k)
                assert torch.equal(operand.codes.cpu(), want[0])
                # Scales as bits, the padding too; a NaN is a NaN.
                got = operand.scales.cpu()
                same = got.view(torch.int32) == want[1].view(torch.int32)
                assert bool((same | (got.isnan() & want[1].isnan())).all())
                if operand.layout.name != LAYOUT:
                    values = ops.dequantize_2d(operand, dtype).cpu()
                    torch.testing.assert_close(
                        values, fmt.dequantize(*plain, k, dtype), rtol=0, atol=0, equal_nan=True
                    )
            if sums:
                exact, size = x.double().sum(0), x.double().abs().sum(0)
                assert ((made.col_sum - exact).abs() <= shape[0] * 2.0**-24 * size).all()


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("kind", ["gaussian", "channels", "wild", "huge", "sparse", "nan", "relu"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_aligned_columns_have_the_bytes_of_the_layout(shape, kind):
    seen = set()
    for i, dtype in enumerate(DTYPES):
        for j, (rule, spread) in enumerate((("pow2", 8), ("pow2", 0), ("pow2:0.01", 3))):
            fmt = formats.get(f"fp8_{('e4m3', 'e5m2')[(i + j) % 2]}_1x128")
            x = data(shape[0], shape[1] + 3 * (j % 2), kind, dtype, seed=j)[:, : shape[1]]
            row = f"{fmt}@{LAYOUT}" if j != 1 else ""
            made = ops.quantize_2d(x, row, f"{fmt}@sm90:{spread}", rule=rule)
            layout = made.col.layout
            codes, scales = layout.pack(fmt, *fmt.quantize(x.t().cpu(), rule), shape[0])
            assert torch.equal(made.col.scales.cpu(), scales)
            assert torch.equal(made.col.codes.cpu(), codes)
            seen |= set(sm90_tiles.classes(made.col).unique().tolist())
            if row:
                alone = ops.quantize_2d(x, row, rule=rule).row
                assert torch.equal(made.row.codes, alone.codes)
                same = made.row.scales.view(torch.int32) == alone.scales.view(torch.int32)
                assert bool((same | made.row.scales.isnan()).all())
            factors = ops.convert_2d(made.col, f"{fmt}@{LAYOUT}").values(torch.float64)
            torch.testing.assert_close(
                factors, made.col.values(torch.float64), rtol=0, atol=0, equal_nan=True
            )
    assert seen <= {0, 1, 3} and (kind != "gaussian" or 0 in seen)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("columns", [LAYOUT, "sm90:8"])
def test_two_matrices_at_a_time_have_the_bytes_of_one(columns):
    square, low = f"fp8_e4m3_128x128@{LAYOUT}", "fp8_e4m3_1x128"
    x = data(1000, 520, "channels", torch.bfloat16, 1)
    w = data(384, 520, "gaussian", torch.bfloat16, 2)
    calls_of = (
        Quantize(w, square, square, "pow2"),
        Quantize(x, f"{low}@{LAYOUT}", f"{low}@{columns}", "pow2", True),
    )
    both = quantize_two_2d(*calls_of)
    for made, call in zip(both, calls_of, strict=True):
        want = ops.quantize_2d(call.x, call.row, call.col, rule=call.rule, col_sum=call.col_sum)
        for got, one in zip(made[:2], want[:2], strict=True):
            assert torch.equal(got.codes, one.codes) and torch.equal(got.scales, one.scales)
        assert made.col_sum is None or torch.equal(made.col_sum, want.col_sum)


# -------------------------------------------------------------------------------- products
def operands(
    m, n, k, block, kinds=("gaussian", "gaussian"), elements=("e4m3", "e4m3"), rule="fp32"
):
    """lhs [m, k] in blocks of 1 x 128, and rhs [n, k]."""
    x, w = (
        data(rows, k, kind, torch.float32, 1 + rows)
        for rows, kind in zip((m, n), kinds, strict=True)
    )
    specs = f"fp8_{elements[0]}_1x128@{LAYOUT}", f"fp8_{elements[1]}_{block}@{LAYOUT}"
    return tuple(
        ops.quantize_2d(a, spec, rule=rule).row for a, spec in zip((x, w), specs, strict=True)
    )


def product(lhs, rhs, config=-1, **epilogue):
    """The product by the native GEMM, poisoned before and with guards behind its workspace."""
    words = tuple(side.format.name.removeprefix("fp8_") for side in (lhs, rhs))
    sides = [(side.codes, side.scales) for side in (lhs, rhs)]
    return calls.gemm(*sides, (lhs.rows, rhs.rows, lhs.k), words, config=config, **epilogue)


def assert_product(got, lhs, rhs):
    va, vb = rhs.values(torch.float64), lhs.values(torch.float64)
    want, size = vb @ va.t(), vb.abs() @ va.abs().t()
    # Sums of which a part leaves the range of fp32 may become anything.
    fits = ~(size > torch.finfo(torch.float32).max / 2)
    assert bool(fits.any())
    zero = torch.zeros_like(want)
    bounds.assert_close(
        torch.where(fits, got, zero.to(got.dtype)), torch.where(fits, want, zero),
        torch.where(fits, bounds.accumulation(va, vb), zero),
    )  # fmt: skip


@every_config
@pytest.mark.parametrize("shape", PRODUCTS, ids=str)
def test_products_of_quantized_matrices(shape, block, config):
    kinds = (("gaussian", "gaussian"), ("rows", "channels"), ("huge", "tiny"), ("nan", "sparse"))
    elements = (("e4m3", "e4m3"), ("e5m2", "e4m3"))
    for i, kind in enumerate(kinds):
        lhs, rhs = operands(
            *shape, block, kind, elements[(i + shape[0]) % 2], ("pow2", "fp32")[i % 2]
        )
        dtype = (torch.float32, torch.bfloat16)[(i + shape[1] // 128) % 2]
        assert_product(product(lhs, rhs, config, out_dtype=dtype), lhs, rhs)


@every_config
@pytest.mark.parametrize("powers", POWERS, ids=str)
def test_scales_over_the_whole_range_of_fp32(powers, block, config):
    g = torch.Generator("cuda").manual_seed(5)
    m, n, k = 1000, 520, 1000
    sides = []
    for operand, (low, high) in zip(operands(m, n, k, block), powers, strict=True):
        shape = operand.scales.shape
        e = torch.randint(low, high, shape, generator=g, device="cuda").float()
        scales = torch.exp2(e) * (1 + torch.rand(shape, generator=g, device="cuda"))
        sides.append(operand._replace(scales=scales))
    lhs, rhs = sides
    assert_product(product(lhs, rhs, config, out_dtype=torch.float32), lhs, rhs)


@pytest.mark.parametrize(("n", "ldo", "dtype"), APART, ids=str)
@every_config
def test_nothing_beside_the_output_is_written(block, config, n, ldo, dtype):
    m, k = 300, 256
    lhs, rhs = operands(m, n, k, block)
    wide = torch.full((m + 1, ldo), 7.0, dtype=dtype, device="cuda")
    product(lhs, rhs, config, out=wide[:m, :n])
    assert torch.equal(wide[:m, :n], product(lhs, rhs, config, out_dtype=dtype))
    assert (wide[:, n:] == 7.0).all() and (wide[m] == 7.0).all()


@every_config
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(300, 264, 256), (129, 75, 96), (512, 512, 512)], ids=str)
def test_epilogues_are_exact_functions_of_the_fp32_sums(shape, dtype, block, config):
    m, n, k = shape
    lhs, rhs = operands(m, n, k, block)
    assert_epilogues_of(lambda **more: product(lhs, rhs, config, **more), m, n, dtype, config != 1)


# ---------------------------------------------------------------------------------- layers
RECIPES = {
    "pow2": Float8BlockScaling(),
    "fp32": DeepSeekV3(),
    "hybrid": Float8BlockScaling(fp8_format=Format.HYBRID),
    "weights 1x128": Float8BlockScaling(use_f32_scales=True, w_block_scaling_dim=1),
    "one copy": Float8BlockScaling(one_copy_weights=True, amax_epsilon=1e-12),
}


def step(module, x, grad, recipe, *given):
    x = x.detach().requires_grad_()
    with te_mx.autocast(recipe=recipe):
        y = module(x, *given)
    y.backward(grad)
    return y.detach(), x.grad, *(p.grad for p in module.parameters())


@pytest.mark.filterwarnings("error::te_mx.FallbackWarning")
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("shape", [(77, 96, 130), (1, 65, 33), (256, 384, 256)], ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_every_gemm_of_a_step(name, shape, dtype):
    recipe, (m, k, n) = RECIPES[name], shape
    torch.manual_seed(1)
    linear = te_mx.Linear(k, n, device="cuda", dtype=dtype)
    x, grad = data(m, k, "channels", dtype, 3), data(m, n, "rows", dtype, 4)
    y, dx, dw, db = step(linear, x, grad, recipe)
    s = recipe.settings

    # As the layer asks for them: columns that are aligned stand for what the kernel multiplies.
    forms = roles(x.device, s)

    def both(x, form):
        return ops.quantize_2d(x, form.row, form.col, rule=s.scale_rule)[:2]

    w = linear.weight.detach()
    (x_row, x_col), (w_row, w_col), (g_row, g_col) = map(both, (x, w, grad), forms)
    assert (x_col.spec == f"{s.x}@sm90:8") == s.scale_rule.startswith("pow2")
    products = (
        (y, x_row, w_row, linear.bias), (dx, g_row, w_col, None), (dw, g_col, x_col, None),
    )  # fmt: skip
    for got, lhs, rhs, bias in products:
        va, vb = rhs.values(torch.float64), lhs.values(torch.float64)
        want, limit = vb @ va.t(), bounds.accumulation(va, vb)
        if bias is not None:
            want = want + bias.detach().double()
            limit = limit + 2.0**-23 * want.abs()
        bounds.assert_close(got, want, limit)
    size = grad.double().abs().sum(0)
    bounds.assert_close(db, grad.double().sum(0), m * 2.0**-24 * size)
    assert te_mx.audit(linear)["(root)"][2:5] == ("sm90_blockwise",) * 3


@pytest.mark.filterwarnings("error::te_mx.FallbackWarning")
@pytest.mark.parametrize("name", ["pow2", "fp32", "hybrid"])
def test_fused_modules_are_their_parts(name):
    """LayerNormLinear has the bits of Linear on what it normalized; an MLP runs in its kernels."""
    recipe, (m, k, n) = RECIPES[name], (300, 256, 392)
    torch.manual_seed(2)
    whole = te_mx.LayerNormLinear(
        k, n, device="cuda", dtype=torch.bfloat16, return_layernorm_output=True
    )
    linear = te_mx.Linear(k, n, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        linear.weight.copy_(whole.weight), linear.bias.copy_(whole.bias)
    x, grad = data(m, k, "channels", torch.bfloat16, 3), data(m, n, "gaussian", torch.bfloat16, 4)
    with te_mx.autocast(recipe=recipe):
        y, z = whole(x)
        assert torch.equal(y, linear(z))
    mlp = te_mx.LayerNormMLP(k, n, device="cuda", dtype=torch.bfloat16, activation="gelu")
    made = step(mlp, x, data(m, k, "gaussian", torch.bfloat16, 5), recipe)
    assert all(bool(t.isfinite().all()) for t in made) and grad.isfinite().all()
    ran = {kernel for layer in te_mx.audit(mlp) for kernel in layer[2:5]}
    assert ran == {"sm90_blockwise"}


@pytest.mark.filterwarnings("error::te_mx.FallbackWarning")
def test_groups_have_the_bits_of_a_loop():
    m, k, n, splits = 512, 256, 384, [100, 0, 412]
    torch.manual_seed(3)
    grouped = te_mx.GroupedLinear(
        len(splits), k, n, bias=False, device="cuda", dtype=torch.bfloat16
    )
    x, grad = data(m, k, "channels", torch.bfloat16, 3), data(m, n, "gaussian", torch.bfloat16, 4)
    y, dx, *dws = step(grouped, x, grad, DeepSeekV3(), splits)
    start = 0
    for size, weight, dw in zip(splits, grouped.parameters(), dws, strict=True):
        linear = te_mx.Linear(k, n, bias=False, device="cuda", dtype=torch.bfloat16)
        with torch.no_grad():
            linear.weight.copy_(weight)
        rows = slice(start, start + size)
        one = step(linear, x[rows], grad[rows], DeepSeekV3())
        for got, want in zip((y[rows], dx[rows], dw), one, strict=True):
            assert torch.equal(got, want)
        start += size


@pytest.mark.filterwarnings("error::te_mx.FallbackWarning")
@pytest.mark.parametrize("blocks", [("1x128", "128x128"), ("1x128", "1x128")], ids=str)
def test_gemm_of_tensors_in_all_layouts(blocks):
    """te_mx.gemm reorders plain operands, and columnwise ones."""
    m, n, k = 200, 136, 300
    b, a = data(m, k, "gaussian", torch.bfloat16, 1), data(n, k, "channels", torch.bfloat16, 2)
    B, A = (
        te_mx.quantize(x, fmt=f"fp8_e4m3_{block}") for x, block in zip((b, a), blocks, strict=True)
    )
    made = [te_mx.gemm(A, B, out_dtype=torch.float32).out for _ in range(3)]
    va, vb = (t.operand("rowwise").values(torch.float64) for t in (A, B))
    bounds.assert_close(made[0], vb @ va.t(), bounds.accumulation(va, vb))
    assert all(torch.equal(other, made[0]) for other in made[1:])
    assert te_mx.explain(A, B).kernel == "sm90_blockwise"


def test_wgrad_adds_to_main_grad():
    recipe = DeepSeekV3()
    m, k, n = 300, 256, 136
    torch.manual_seed(4)
    linear = te_mx.Linear(
        k, n, bias=False, device="cuda", dtype=torch.bfloat16, fuse_wgrad_accumulation=True
    )
    x, grad = data(m, k, "gaussian", torch.bfloat16, 1), data(m, n, "gaussian", torch.bfloat16, 2)
    linear.weight.main_grad = torch.zeros(n, k, device="cuda")
    for _ in range(2):
        step(linear, x, grad, recipe)
    spec = f"{recipe.settings.x}@{LAYOUT}"
    x_col, g_col = (ops.quantize_2d(t, col=spec, rule="fp32").col for t in (x, grad))
    once = product(g_col, x_col, out_dtype=torch.float32)
    assert torch.equal(linear.weight.main_grad, once + once)


def test_two_streams_and_a_graph_give_the_same_bits():
    m = n = k = 512
    torch.manual_seed(5)
    linear = te_mx.Linear(k, n, device="cuda", dtype=torch.bfloat16)
    x, grad = data(m, k, "gaussian", torch.bfloat16, 1), data(m, n, "gaussian", torch.bfloat16, 2)

    def run():
        linear.zero_grad()
        return step(linear, x, grad, RECIPES["pow2"])

    want = [t.clone() for t in run()]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        on_side = run()
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        in_graph = run()
    graph.replay()
    torch.cuda.synchronize()
    for made in (on_side, in_graph):
        assert all(torch.equal(got, one) for got, one in zip(made, want, strict=True))

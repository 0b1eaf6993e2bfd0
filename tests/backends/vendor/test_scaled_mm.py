"""Calls of torch.nn.functional.scaled_mm and scaled_grouped_mm against stand-ins that check what
ScaledBlas.cpp, GroupedBlas.cpp (pytorch 0174dfabc, 00d4eaf93) and FBGEMM behind them check, and
multiply what they make of the swizzled scales."""

from __future__ import annotations

import pytest
import torch

from te_mx.backends.vendor import gemm
from te_mx.backends.vendor.gemm import SWIZZLED
from te_mx.dispatch.calls import (
    Epilogue,
    GroupedK,
    GroupedRows,
    Groups,
    Mode,
    Product,
    Quantize,
    QuantizeGroups,
    QuantizeWeights,
)
from te_mx.dispatch.problem import Place, Problem
from te_mx.dispatch.run import reference
from te_mx.formats import get

F = torch.nn.functional
ScalingType, SwizzleType = F.ScalingType, F.SwizzleType
KERNEL = gemm.ScaledMM()
E4M3, FP4 = torch.float8_e4m3fn, torch.float4_e2m1fn_x2


def up(value, to):
    return -(-value // to) * to


def in_order(scales, rows, blocks):
    """Scales that lie as cuBLAS says: of row r and block b at (r / 128 * tiles + b / 4) * 512 +
    r % 32 * 16 + r / 32 % 4 * 4 + b % 4."""
    r, b = torch.arange(rows)[:, None], torch.arange(blocks)
    at = (r // 128 * (up(blocks, 4) // 4) + b // 4) * 512 + r % 32 * 16 + r // 32 % 4 * 4 + b % 4
    return scales.view(torch.uint8).flatten()[at]


def one_side(mat, scale, recipe, swizzle, size):
    """Values [size, k], and the tensor's scale, of a side whose rows lie by rows."""
    scale, recipe, swizzle = (
        one if isinstance(one, list) else [one] for one in (scale, recipe, swizzle)
    )
    fp4 = mat.dtype == FP4
    k, (rows, width) = mat.shape[1] * (2 if fp4 else 1), mat.shape
    assert rows == size and mat.stride() == (width, 1) and k % 16 == 0
    whole = 1.0
    if recipe[0] in (ScalingType.BlockWise1x128, ScalingType.BlockWise128x128):
        assert mat.dtype == E4M3 and scale[0].dtype == torch.float32 and swizzle == [None]
        blocks = up(k, 128) // 128
        if recipe[0] == ScalingType.BlockWise1x128:
            assert scale[0].shape == (rows, blocks)
            assert scale[0].stride() in ((1, rows), (1, 1))
            name, scales = "1x128", scale[0]
        else:
            assert scale[0].shape == (up(blocks, 4), up(rows, 128) // 128)
            assert scale[0].stride() in ((1, up(blocks, 4)), (1, 1))
            name, scales = "128x128", scale[0].t()[:, :blocks]
        return get(f"fp8_e4m3_{name}").dequantize(
            mat.view(torch.uint8), scales, k, torch.float64
        ), whole
    assert all(one.is_contiguous() for one in scale)
    if torch.version.hip is not None:
        assert recipe == [ScalingType.BlockWise1x32] and swizzle == [SwizzleType.NO_SWIZZLE]
        assert mat.dtype in (E4M3, FP4) and scale[0].dtype == torch.float8_e8m0fnu
        assert rows % 32 == width % 32 == 0 and scale[0].numel() == up(rows, 32) * k // 32
        name = "mxfp4" if fp4 else "mxfp8_e4m3"
        plain = scale[0].view(torch.uint8).view(rows, k // 32)
        return get(name).dequantize(mat.view(torch.uint8), plain, k, torch.float64), whole
    assert swizzle[0] == SwizzleType.SWIZZLE_32_4_4
    block = 16 if fp4 else 32
    assert scale[0].numel() == up(rows, 128) * up(up(k, block) // block, 4)
    if fp4:
        assert recipe == [ScalingType.BlockWise1x16, ScalingType.TensorWise]
        assert len(swizzle) == 2 and scale[0].dtype == torch.float8_e4m3fn
        assert scale[1].dtype == torch.float32 and scale[1].numel() == 1
        name, whole = "nvfp4", scale[1].double()
    else:
        assert recipe == [ScalingType.BlockWise1x32] and len(swizzle) == 1
        assert mat.dtype == E4M3 and scale[0].dtype == torch.float8_e8m0fnu
        name = "mxfp8_e4m3"
    plain = in_order(scale[0], rows, up(k, block) // block)
    return get(name).dequantize(mat.view(torch.uint8), plain, k, torch.float64), whole


def scaled_mm(
    mat_a, mat_b, scale_a, scale_recipe_a, scale_b, scale_recipe_b, swizzle_a=None,
    swizzle_b=None, bias=None, output_dtype=torch.bfloat16, contraction_dim=(),
    use_fast_accum=False,
):  # fmt: skip
    assert mat_b.stride(0) == 1 and mat_a.shape[1] == mat_b.shape[0] and bias is None
    assert mat_b.shape[1] % 16 == 0
    assert torch.version.hip is None or output_dtype in (torch.bfloat16, torch.float16)
    square = ScalingType.BlockWise128x128
    assert not scale_recipe_a == scale_recipe_b == square
    a, of_a = one_side(mat_a, scale_a, scale_recipe_a, swizzle_a, mat_a.shape[0])
    b, of_b = one_side(mat_b.t(), scale_b, scale_recipe_b, swizzle_b, mat_b.shape[1])
    return (a @ b.t() * (of_a * of_b)).to(output_dtype)


def scaled_grouped_mm(
    mat_a, mat_b, scale_a, scale_recipe_a, scale_b, scale_recipe_b, swizzle_a=None,
    swizzle_b=None, bias=None, offs=None, output_dtype=torch.bfloat16, contraction_dim=(),
    use_fast_accum=False,
):  # fmt: skip
    """Of 2D by 3D; rows behind the last group are what lay in memory. Of 2D by 2D, over k."""
    if mat_b.dim() == 2:
        return grouped_k(mat_a, mat_b.t(), scale_a, scale_b, swizzle_a, swizzle_b, offs.tolist())
    groups, k, n = mat_b.shape
    weights, rows = mat_b.transpose(-2, -1), len(mat_a)
    assert weights.is_contiguous() and mat_a.is_contiguous() and mat_a.shape[1] == k
    assert k % 16 == n % 16 == 0 and bias is None and output_dtype == torch.bfloat16
    assert offs.dtype == torch.int32 and offs.shape == (groups,)
    sides = []
    for given in (scale_a, scale_recipe_a, swizzle_a), (scale_b, scale_recipe_b, swizzle_b):
        sides.append([one if isinstance(one, list) else [one] for one in given])
    fp4 = mat_a.dtype == FP4
    assert mat_b.dtype == mat_a.dtype and (fp4 or mat_a.dtype == E4M3)
    small = fp4 and len(sides[0][0]) == 2
    k, block, factor = k * (2 if fp4 else 1), 16 if small else 32, torch.ones(groups)
    for scales, recipe, swizzle in sides:
        assert swizzle[0] == SwizzleType.SWIZZLE_32_4_4 and scales[0].is_contiguous()
        if small:
            assert recipe == [ScalingType.BlockWise1x16, ScalingType.TensorWise]
            assert scales[0].dtype == E4M3 and scales[1].dtype == torch.float32
            assert scales[1].shape == (groups,)
            factor = factor * scales[1]
        else:
            assert recipe == [ScalingType.BlockWise1x32]
            assert scales[0].dtype == torch.float8_e8m0fnu and len(scales) == 1
    wide, (of_a, of_b) = up(k // block, 4), (side[0][0].view(torch.uint8) for side in sides)
    assert of_a.dim() == 2 and of_a.shape[0] >= rows
    assert of_b.shape == (groups, wide * up(n, 128))
    fmt = get("nvfp4" if small else "mxfp4" if fp4 else "mxfp8_e4m3")
    out, at, start = torch.full((rows, n), torch.nan, dtype=torch.bfloat16), 0, 0
    for g, end in enumerate(offs.tolist()):
        size = up(end - start, 128) * wide
        parts = (mat_a[start:end], of_a.flatten()[at : at + size]), (weights[g], of_b[g])
        a, b = (
            fmt.dequantize(
                mat.contiguous().view(torch.uint8), in_order(scales, len(mat), k // block), k,
                torch.float64,
            )
            for mat, scales in parts
        )  # fmt: skip
        out[start:end] = (a @ b.t() * factor[g].double()).bfloat16()
        at, start = at + size, end
    return out


def grouped_k(mat_a, mat_b, scale_a, scale_b, swizzle_a, swizzle_b, ends):
    """Groups of k start at tiles of scales, and each has its tiles behind each other."""
    assert {mat_a.dtype, mat_b.dtype} == {E4M3} and mat_a.shape[1] == mat_b.shape[1]
    assert {swizzle_a, swizzle_b} == {SwizzleType.SWIZZLE_32_4_4} and ends[-1] <= mat_a.shape[1]
    outs, start, fmt = [], 0, get("mxfp8_e4m3")
    for end in ends:
        assert (end - start) % 128 == 0
        sides = []
        for mat, scale in ((mat_a, scale_a), (mat_b, scale_b)):
            assert mat.is_contiguous() and scale.is_contiguous() and len(mat) % 16 == 0
            assert scale.dtype == torch.float8_e8m0fnu and scale.dim() == 2
            tall, blocks = up(len(mat), 128), (end - start) // 32
            assert scale.shape[0] >= tall
            part = scale.view(torch.uint8).flatten()[tall * start // 32 :]
            codes = mat.view(torch.uint8)[:, start:end].contiguous()
            scales = in_order(part, len(mat), blocks)
            sides.append(fmt.dequantize(codes, scales, end - start, torch.float64))
        empty = torch.full((len(mat_a), len(mat_b)), torch.nan)
        outs.append(empty if start == end else sides[0] @ sides[1].t())
        start = end
    return torch.stack(outs).bfloat16()


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    monkeypatch.setattr(F, "scaled_mm", scaled_mm)
    monkeypatch.setattr(F, "scaled_grouped_mm", scaled_grouped_mm)


def operand(rows, k, fmt):
    x = torch.randn(rows, k) * torch.exp2(torch.randint(-6, 6, (rows, 1)).float())
    rule = get(fmt).scaling.rules[0]
    made = reference("quantize").run(Quantize(x, f"{fmt}@rows", "", rule)).row
    return made


PAIRS = (
    ("mxfp8_e4m3", "mxfp8_e4m3"), ("nvfp4", "nvfp4"),
    ("fp8_e4m3_1x128", "fp8_e4m3_128x128"), ("fp8_e4m3_1x128", "fp8_e4m3_1x128"),
    ("fp8_e4m3_128x128", "fp8_e4m3_1x128"),
)  # fmt: skip


@pytest.mark.parametrize(("left", "right"), PAIRS)
def test_products(left, right):
    torch.manual_seed(0)
    m, n, k = 132, 272, 384
    lhs, rhs = operand(m, k, left), operand(n, k, right)
    bias, before = torch.randn(n), torch.randn(m, n)
    for epilogue in (
        Epilogue(), Epilogue(bias, "tanh"), Epilogue(None, "erf", before, "result"),
        Epilogue(bias_grad="operand", accumulate=True),
    ):  # fmt: skip
        for prepared in (False, True):
            both = []
            for kernel in (KERNEL, reference("gemm")):
                sides = [lhs, rhs]
                if prepared and kernel is KERNEL:
                    sides = [KERNEL.prepare(one, "lhs", None) for one in sides]
                out = before.clone()
                aux = torch.empty(m, n) if epilogue.gelu and epilogue.gelu_in is None else None
                ran = kernel.run(Product(*sides, epilogue, out, aux, Mode()))
                both.append((out, aux, ran.bias_grad))
            for mine, other in zip(*both, strict=True):
                if other is not None:
                    assert (mine - other).norm() < 1e-6 * other.norm()


@pytest.mark.parametrize("fmt", ["mxfp8_e4m3", "mxfp4"])
def test_products_of_amd(monkeypatch, fmt):
    """Scales as they are; fp32 sums, which epilogues want, come from the next kernel."""
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(gemm, "capability", lambda index: gemm.AMD)
    lhs, rhs = operand(96, 192, fmt), operand(64, 192, fmt)
    asked = problem(lhs.spec, rhs.spec, 96, 64, 192)
    plan, both = KERNEL.make_plan(asked), []
    for run in (plan, reference("gemm").run):
        out = torch.empty(96, 64, dtype=torch.bfloat16)
        run(Product(KERNEL.prepare(lhs, "lhs", asked), rhs, Epilogue(), out, None, Mode()))
        both.append(out)
    assert torch.equal(*both)
    monkeypatch.setattr(gemm, "behind", lambda kernel, problem: lambda p: "the next one")
    call = Product(lhs, rhs, Epilogue(accumulate=True), both[0], None, Mode())
    assert KERNEL.make_plan(asked)(call) == "the next one"


GROUPED = gemm.ScaledGroupedMM()


@pytest.mark.parametrize("fmt", ["mxfp8_e4m3", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("capacity", [0, 160])
def test_groups(monkeypatch, fmt, capacity):
    """An empty group, rows of none, and blocks that do not fill a tile of scales."""
    monkeypatch.setattr(gemm, "groups", lambda index: True)
    n, k, rows, rule = 144, 96, 500, get(fmt).scaling.rules[0]
    ends = torch.tensor([140, 160, 470] if capacity else [140, 140, 470])
    groups = Groups(ends, capacity)
    asked = QuantizeGroups(torch.randn(rows, k), groups, f"{fmt}@rows", "", rule)
    tokens = reference("quantize_grouped").run(asked).row
    weights = torch.randn(3, n, k) * torch.exp2(torch.randint(-9, 9, (3, n, 1)).float())
    what = QuantizeWeights(weights, f"{fmt}@rows", "", rule)
    stack, both = reference("quantize_weights").run(what)[0], []
    place = Place("cuda", 0)
    given = Problem(
        "gemm_rows", place, tokens.spec, stack.spec, rows, n, k, 3, ends="device",
        dtype=torch.bfloat16,
    )  # fmt: skip
    assert GROUPED.accepts(given) is None
    for kernel in (GROUPED, reference("gemm_rows")):
        out = torch.full((rows, n), 7.0, dtype=torch.bfloat16)
        kernel.make_plan(given)(GroupedRows(tokens, stack, groups, None, out, Mode()))
        both.append(out.float())
    assert torch.allclose(*both, rtol=2**-7, atol=1e-6)
    for name, value in (
        ("ends", "host"), ("dtype", torch.float32), ("k", 80), ("n", 72),
        ("rhs", "mxfp8_e5m2@rows"), ("rhs", f"{fmt}@cols"), ("place", Place("cpu")),
    ):  # fmt: skip
        assert GROUPED.accepts(given._replace(**{name: value}))
    bias = torch.zeros(3, n)
    monkeypatch.setattr(gemm, "behind", lambda kernel, problem: lambda p: "the next one")
    call = GroupedRows(tokens, stack, groups, bias, both[0], Mode())
    assert GROUPED.make_plan(given)(call) == "the next one"


@pytest.mark.parametrize("capacity", [0, 200])
def test_groups_over_k(monkeypatch, capacity):
    """An empty group, ends between blocks, rows of none, scales of more than a tile."""
    monkeypatch.setattr(gemm, "groups", lambda index: True)
    m, n, rows, fmt = 272, 48, 700, "mxfp8_e4m3"
    ends = torch.tensor([150, 200, 550] if capacity else [150, 150, 550])
    groups, sides = Groups(ends, capacity), []
    for width in (m, n):
        x = torch.randn(rows, width) * torch.exp2(torch.randint(-9, 9, (rows, 1)).float())
        asked = QuantizeGroups(x, groups, "", f"{fmt}@grouped_cols", "rceil")
        sides.append(reference("quantize_grouped").run(asked).col)
    given = Problem(
        "gemm_k", Place("cuda", 0), sides[0].spec, sides[1].spec, m, n, rows, 3, ends="device",
        dtype=torch.bfloat16,
    )  # fmt: skip
    kernel, both = gemm.ScaledGroupedK(), []
    assert kernel.accepts(given) is None
    for run in (kernel.make_plan(given), reference("gemm_k").run):
        out = torch.full((3, m, n), 7.0, dtype=torch.bfloat16)
        run(GroupedK(*sides, groups, out, False, Mode()))
        both.append(out.float())
    assert torch.allclose(*both, rtol=2**-7, atol=1e-6)
    for name, value in (
        ("ends", "host"), ("dtype", torch.float32), ("m", 40), ("n", 72),
        ("rhs", "mxfp8_e5m2@grouped_cols"), ("rhs", f"{fmt}@cols"), ("place", Place("cpu")),
    ):  # fmt: skip
        assert kernel.accepts(given._replace(**{name: value}))
    monkeypatch.setattr(gemm, "behind", lambda kernel, problem: lambda p: "the next one")
    call = GroupedK(*sides, groups, both[0], True, Mode())
    assert kernel.make_plan(given)(call) == "the next one"


def test_scales_lie_as_cublas_says():
    fmt = get("mxfp8_e4m3")
    for rows, k in ((1, 32), (130, 200), (256, 512)):
        x = torch.randn(rows, k) * torch.exp2(torch.randint(-30, 30, (rows, k)).float())
        codes, scales = fmt.quantize(x, "rceil")
        made = SWIZZLED.pack(fmt, codes, scales, k)
        assert torch.equal(in_order(made[1], rows, fmt.blocks(k)), scales)
        assert made[1].shape == SWIZZLED.shapes(fmt, rows, k)[1]
        assert torch.equal(SWIZZLED.unpack(fmt, *made, k)[1], scales)


def problem(lhs="mxfp8_e4m3@rows", rhs="mxfp8_e4m3@rows", m=64, n=64, k=128):
    return Problem("gemm", Place("cuda", 0), lhs, rhs, m, n, k, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("major", "asked", "why"),
    [
        (10, problem(), None),
        (12, problem("nvfp4@rows", "nvfp4@rows"), None),
        (9, problem("fp8_e4m3_1x128@rows", "fp8_e4m3_128x128@rows"), None),
        (9, problem(), "GPUs of other kinds"),
        (10, problem("fp8_e4m3_1x128@rows", "fp8_e4m3_128x128@rows"), "GPUs of other kinds"),
        (None, problem(), "has no scaled_mm"),
        (10, problem(rhs="mxfp8_e5m2@rows"), "by themselves"),
        ("7.12.1", problem("mxfp4@rows", "mxfp4@rows"), None),
        ("7.13.0", problem(), None),
        ("7.13.0", problem("mxfp4@rows", "mxfp4@rows"), "shuffled scales from ROCm 7.13 on"),
        ("8.0.0", problem(), "shuffled scales from ROCm 7.14 on"),
        ("7.0.1", problem("mxfp4@rows", "mxfp4@rows", k=96), "k by 64"),
        ("7.0.1", problem(rhs="mxfp4@rows"), "by themselves"),
        ("7.0.1", problem()._replace(dtype=torch.float32), "writes bfloat16"),
        (10, problem(rhs="mxfp8_e4m3@cols"), "lie by rows"),
        (10, problem(n=72), "divide by 16"),
        (10, problem("mxfp4@rows", "mxfp8_e4m3@rows"), "by themselves"),
        (9, problem("fp8_e4m3_128x128@rows", "fp8_e4m3_128x128@rows"), "on one side"),
        (9, problem("fp8_e4m3_1x128@rows", "fp8_e4m3_1x128@rows", m=66), "m that divides by 4"),
    ],
)  # fmt: skip
def test_what_is_taken(monkeypatch, major, asked, why):
    if isinstance(major, str):  # a ROCm
        monkeypatch.setattr(torch.version, "hip", major)
        major = gemm.AMD
    monkeypatch.setattr(gemm, "capability", lambda index: major)
    found = KERNEL.accepts(asked)
    assert found is None if why is None else why in found

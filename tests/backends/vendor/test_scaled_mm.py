"""Calls of torch.nn.functional.scaled_mm against a stand-in that checks what ScaledBlas.cpp checks
(pytorch 0174dfabc) and multiplies what it makes of the swizzled scales."""

from __future__ import annotations

import pytest
import torch

from te_mx.backends.vendor import gemm
from te_mx.backends.vendor.layouts import SWIZZLED
from te_mx.dispatch.calls import Epilogue, Mode, Product, Quantize
from te_mx.dispatch.problem import Place, Problem
from te_mx.dispatch.run import reference
from te_mx.formats import get

F = torch.nn.functional
ScalingType, SwizzleType = F.ScalingType, F.SwizzleType
KERNEL = gemm.ScaledMM()
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


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
    fp4 = mat.dtype == torch.float4_e2m1fn_x2
    k, (rows, width) = mat.shape[1] * (2 if fp4 else 1), mat.shape
    assert rows == size and mat.stride() == (width, 1) and k % 16 == 0
    whole = 1.0
    if recipe[0] in (ScalingType.BlockWise1x128, ScalingType.BlockWise128x128):
        assert mat.dtype in FP8 and scale[0].dtype == torch.float32 and swizzle == [None]
        blocks = up(k, 128) // 128
        if recipe[0] == ScalingType.BlockWise1x128:
            assert scale[0].shape == (rows, blocks)
            assert scale[0].stride() in ((1, rows), (1, 1))
            name, scales = "1x128", scale[0]
        else:
            assert scale[0].shape == (up(blocks, 4), up(rows, 128) // 128)
            assert scale[0].stride() in ((1, up(blocks, 4)), (1, 1))
            name, scales = "128x128", scale[0].t()[:, :blocks]
        name = f"fp8_{'e4m3' if mat.dtype == FP8[0] else 'e5m2'}_{name}"
        return get(name).dequantize(mat.view(torch.uint8), scales, k, torch.float64), whole
    assert all(one.is_contiguous() for one in scale)
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
        assert mat.dtype in FP8 and scale[0].dtype == torch.float8_e8m0fnu
        name = "mxfp8_e4m3" if mat.dtype == FP8[0] else "mxfp8_e5m2"
    plain = in_order(scale[0], rows, up(k, block) // block)
    return get(name).dequantize(mat.view(torch.uint8), plain, k, torch.float64), whole


def scaled_mm(
    mat_a, mat_b, scale_a, scale_recipe_a, scale_b, scale_recipe_b, swizzle_a=None,
    swizzle_b=None, bias=None, output_dtype=torch.bfloat16, contraction_dim=(),
    use_fast_accum=False,
):  # fmt: skip
    assert mat_b.stride(0) == 1 and mat_a.shape[1] == mat_b.shape[0] and bias is None
    assert mat_b.shape[1] % 16 == 0
    assert not mat_a.dtype == mat_b.dtype == torch.float8_e5m2
    square = ScalingType.BlockWise128x128
    assert not scale_recipe_a == scale_recipe_b == square
    a, of_a = one_side(mat_a, scale_a, scale_recipe_a, swizzle_a, mat_a.shape[0])
    b, of_b = one_side(mat_b.t(), scale_b, scale_recipe_b, swizzle_b, mat_b.shape[1])
    return (a @ b.t() * (of_a * of_b)).to(output_dtype)


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    monkeypatch.setattr(F, "scaled_mm", scaled_mm)


def operand(rows, k, fmt):
    x = torch.randn(rows, k) * torch.exp2(torch.randint(-6, 6, (rows, 1)).float())
    rule = get(fmt).scaling.rules[0]
    made = reference("quantize").run(Quantize(x, f"{fmt}@rows", "", rule)).row
    return made


PAIRS = (
    ("mxfp8_e4m3", "mxfp8_e4m3"), ("mxfp8_e4m3", "mxfp8_e5m2"), ("nvfp4", "nvfp4"),
    ("fp8_e4m3_1x128", "fp8_e4m3_128x128"), ("fp8_e4m3_1x128", "fp8_e5m2_1x128"),
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
        (10, problem("mxfp8_e5m2@rows", "mxfp8_e5m2@rows"), "E5M2 by E5M2"),
        (10, problem(rhs="mxfp8_e4m3@cols"), "lie by rows"),
        (10, problem(n=72), "divide by 16"),
        (10, problem("mxfp4@rows", "mxfp8_e4m3@rows"), "by themselves"),
        (9, problem("fp8_e4m3_128x128@rows", "fp8_e4m3_128x128@rows"), "on one side"),
        (9, problem("fp8_e4m3_1x128@rows", "fp8_e4m3_1x128@rows", m=66), "m that divides by 4"),
    ],
)  # fmt: skip
def test_what_is_taken(monkeypatch, major, asked, why):
    monkeypatch.setattr(gemm, "capability", lambda index: major)
    found = KERNEL.accepts(asked)
    assert found is None if why is None else why in found

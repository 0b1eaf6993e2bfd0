"""NVFP4 weights that stand still on Hopper: products with inputs as they are against fp64, the same
bits for a row whatever is beside it, groups, tails, NaN; what such a weight stands for."""

from __future__ import annotations

import pytest
import torch

import te_mx
from te_mx import formats
from te_mx._ops import quantize_2d
from te_mx.backends.sm90 import binding
from te_mx.backends.sm90.layouts import SM90_NVFP4
from te_mx.backends.sm90.nvfp4 import PRODUCT, Product, Rest
from te_mx.dispatch.linear import FrozenCall
from te_mx.dispatch.problem import Problem, place_of
from te_mx.dispatch.run import dequantize
from te_mx.layouts.operand import Operand, stacked
from te_mx.runtime.kernel_log import LAST_RUN
from te_mx.weights import decode

pytestmark = pytest.mark.usefixtures("poisoned")

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
ULP = {F32: 2.0**-22, BF16: 2.0**-8, F16: 2.0**-11}
SHAPES = [  # m, n, k
    (1, 64, 1),
    (8, 192, 1000),
    (16, 64, 4096),
    (33, 128, 136),
    (64, 320, 500),
    (130, 192, 384),
    (300, 256, 264),
    (16, 2304, 6144),
    (128, 2112, 7168),
]


def weight(n, k, seed=0, fmt="nvfp4"):
    """One with zeros, subnormal and large scales, by rows."""
    g = torch.Generator("cuda").manual_seed(seed)
    w = torch.randn(n, k, generator=g, device="cuda")
    w *= torch.exp2(torch.randint(-9, 9, (n, 1), generator=g, device="cuda").float())
    codes, scales, whole = formats.get(fmt).quantize(w, "te")
    scales.view(-1)[:: 1 + scales.numel() // 7] = 0
    return Operand(codes, scales, f"{fmt}@rows", n, k, None, whole)


def product(x, held, out_dtype=BF16, bias=None, offs=None, act=None):
    groups = 0 if offs is None else len(offs)
    problem = Problem(
        "linear_frozen", place_of(torch.device("cuda", 0)), "", held.spec, len(x), held.rows,
        held.k, groups=groups, dtype=x.dtype,
    )  # fmt: skip
    assert Product().accepts(problem) is None
    made = Product().plan(problem)(FrozenCall(x, held, bias, out_dtype, offs, act))
    assert made is not None
    return made[0]


def check(y, x, w, bias=None, act=None):
    exact, size = x.double() @ w.t(), x.double().abs() @ w.abs().t()
    if bias is not None:
        exact, size = exact + bias.double(), size + bias.double().abs()
    if act is not None:
        exact = act(exact)
    # fp32 sums in any order, of which the tensor cores cut off what is small.
    allowed = ULP[y.dtype] * exact.abs() + 2.0**-17 * size + 1e-7
    assert (y.double() - exact).abs().le(allowed).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_products_are_those_of_the_values(shape, dtype):
    m, n, k = shape
    row = weight(n, k, m)
    held = Rest().rest(row)
    assert held.layout is SM90_NVFP4
    codes, scales = SM90_NVFP4.plain(held.format, held, k)
    assert torch.equal(codes, row.codes) and torch.equal(scales, row.scales)
    w, x = row.values(torch.float64), (torch.randn(m, k, device="cuda") / 64).to(dtype)
    bias = torch.randn(n, device="cuda", dtype=dtype)  # none beyond fp16
    check(product(x, held), x, w)
    check(product(x, held, dtype, bias), x, w, bias)
    check(product(x, held, F32, None, None, "relu"), x, w, None, torch.relu)
    wide = (torch.randn(m, k + 3, device="cuda") / 64).to(dtype)[:, 3:]  # rows that start anywhere
    check(product(wide, held), wide, w)


def test_a_row_has_the_same_bits_beside_any_others():
    held = Rest().rest(weight(192, 1160))
    x = torch.randn(64, 1160, device="cuda", dtype=BF16)
    all_rows = product(x, held, F32)
    for m in (1, 7, 16, 30):
        assert torch.equal(product(x[64 - m :], held, F32), all_rows[64 - m :])


def test_nan_and_scales_of_rows():
    row = weight(128, 256)
    row.scales[70, 3] = 0x7F
    whole = torch.linspace(0.5, 2.0, 128, device="cuda")[:, None]
    row = row._replace(tensor_scale=whole)
    held = Rest().rest(row)
    x = torch.randn(5, 256, device="cuda", dtype=BF16)
    y = product(x, held, F32)
    assert y[:, 70].isnan().all()
    keep = torch.arange(128, device="cuda") != 70
    check(y[:, keep], x, row.values(torch.float64)[keep])
    for dtype in (BF16, F16):
        made = dequantize(held, dtype)
        assert torch.equal(made.nan_to_num(7.0), row.values(dtype).nan_to_num(7.0))


@pytest.mark.parametrize("sizes", [(3, 0, 9, 1), (70, 20, 0), (1,) * 40], ids=str)
def test_groups(sizes):
    n, k, groups = 128, 392, len(sizes)
    rows = [weight(n, k, i) for i in range(groups)]
    held = Rest().rest(stacked(rows))
    ends = torch.tensor(sizes, dtype=torch.int32, device="cuda").cumsum(0, dtype=torch.int32)
    m = sum(sizes) + 4  # rows of no group
    x, bias = torch.randn(m, k, device="cuda", dtype=BF16), torch.randn(groups, n, device="cuda")
    y = product(x, held, F32, bias, ends)
    start = 0
    for i, end in enumerate(ends.tolist()):
        check(y[start:end], x[start:end], rows[i].values(torch.float64), bias[i])
        start = end
    assert not y[start:].any()


@pytest.mark.parametrize("shape", [(64, 128), (192, 1000), (320, 33)], ids=str)
@pytest.mark.parametrize("fmt", ["nvfp4", "nvfp4_16x16"])
def test_values(shape, fmt):
    row = weight(*shape, 3, fmt)
    held = Rest().rest(row)
    for dtype in (BF16, F16, F32):
        assert torch.equal(dequantize(held, dtype), row.values(dtype))


def test_negative_scales_stay_by_rows():
    row = weight(64, 64)
    row.scales[5, 1] |= 0x80
    assert Rest().rest(row) is row
    assert binding.native() is not None


@pytest.mark.usefixtures("direct")
def test_a_frozen_layer_at_any_number_of_rows(monkeypatch):
    n, k = 128, 264
    row = weight(n, k)
    layer = te_mx.nn.Linear(k, n, params_dtype=BF16, device="cuda")
    codes = {
        "weight": row.codes, "weight_scale": row.scales.view(torch.float8_e4m3fn),
        "weight_scale_2": row.tensor_scale,
    }  # fmt: skip
    layer.load_state_dict(codes | {"bias": layer.bias})
    te_mx.freeze_weights(layer, activations="bf16")
    assert "lies as nvfp4@sm90_nvfp4" in repr(layer)
    x = torch.randn(600, k, device="cuda", dtype=BF16)
    monkeypatch.setattr(decode, "capturing", lambda device: True)  # the first call, too
    for m in (1, 65, 600):
        with torch.no_grad():
            y = layer(x[:m])
        assert LAST_RUN[layer._tag_now()] == PRODUCT
        check(y, x[:m], row.values(torch.float64), layer.bias)
    again = layer.state_dict()
    assert all(torch.equal(again[name], codes[name]) for name in codes)


@pytest.mark.parametrize("shape", [(64, 64), (33, 1000), (130, 77), (1, 16), (256, 520)], ids=str)
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize("fmt", ["nvfp4", "nvfp4_16x16"])
def test_quantized_to_the_bytes_of_the_specification(shape, dtype, fmt):
    x = torch.randn(shape, device="cuda") * torch.exp2(
        torch.randint(-20, 12, (shape[0], 1), device="cuda").float()
    )
    x.view(-1)[::97] = 0
    x.view(-1)[1::101] = -0.0
    x = x.clamp(-60000, 60000).to(dtype)
    for case in (x, torch.zeros_like(x), x * 0 + 2.0**-24, (x / 64).round()):
        found = quantize_2d(case, f"{fmt}@rows", f"{fmt}@rows", rule="te")
        for made, of in ((found.row, case), (found.col, case.t())):
            codes, scales, whole = formats.get(fmt).quantize(of, "te")
            assert torch.equal(made.codes, codes) and torch.equal(made.scales, scales)
            assert torch.equal(made.tensor_scale, whole)
    bad = x.clone()
    bad[0, 0], bad[-1, -1] = torch.nan, torch.inf
    made = quantize_2d(bad, f"{fmt}@rows", rule="te").row
    codes, scales, whole = formats.get(fmt).quantize(bad, "te")
    assert torch.equal(made.codes, codes) and torch.equal(made.scales, scales)


@pytest.mark.usefixtures("direct")
def test_experts_are_frozen_without_the_reference():
    layer = te_mx.nn.GroupedLinear(3, 256, 128, params_dtype=BF16, device="cuda")
    weights = [getattr(layer, f"weight{i}").detach().clone() for i in range(3)]
    biases = [getattr(layer, f"bias{i}") for i in range(3)]
    te_mx.freeze_weights(layer, fmt="nvfp4", activations="bf16", drop_master=True)
    x, sizes = torch.randn(20, 256, device="cuda", dtype=BF16), [3, 0, 17]
    with torch.no_grad():
        y = layer(x, sizes)
    start = 0
    for size, w, bias in zip(sizes, weights, biases, strict=True):
        codes, scales, whole = formats.get("nvfp4").quantize(w, "te")
        values = Operand(codes, scales, "nvfp4@rows", 128, 256, None, whole).values(torch.float64)
        check(y[start : start + size], x[start : start + size], values, bias)
        start += size

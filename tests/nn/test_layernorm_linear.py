"""te_mx.LayerNormLinear: numbers, arguments, checkpoints."""

from __future__ import annotations

import copy

import pytest
import torch
from norm_modules import assert_same, filled, gradients, one_after_the_other, relative
from torch import nn

import te_mx
from te_mx.dispatch.fused import NORMS
from te_mx.recipe import (
    Float8BlockScaling,
    Format,
    MXFP4BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)

pytestmark = pytest.mark.filterwarnings("ignore::te_mx.FallbackWarning")  # NVFP4 on the CPU

BF16 = torch.bfloat16
RECIPES = [
    MXFP8BlockScaling(),
    MXFP8BlockScaling(fp8_format=Format.HYBRID),
    MXFP8BlockScaling(scale_rule="floor"),
    MXFP8BlockScaling(backward_override="high_precision"),
    MXFP8BlockScaling(backward_override="dequantized"),
    MXFP8BlockScaling(wgrad_with_hp=True),
    MXFP8BlockScaling(one_copy_weights=True),
    Float8BlockScaling(),
    Float8BlockScaling(use_f32_scales=True, fp8_format=Format.HYBRID, one_copy_weights=True),
    Float8BlockScaling(backward_override="dequantized"),
    MXFP4BlockScaling(w="mxfp8_e4m3"),
    MXFP4BlockScaling(g="mxfp4", stochastic_rounding=False, hadamard=16),
    NVFP4BlockScaling(disable_stochastic_rounding=True),
]


def layer(*args, dtype=BF16, **kwargs):
    return filled(te_mx.LayerNormLinear(*args, dtype=dtype, **kwargs))


def mxfp8(module, recipe=None):
    def run(x, *args):
        with te_mx.autocast(recipe=recipe):
            return module(x, *args)

    return run


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("normalization", NORMS)
def test_it_is_a_normalization_and_a_linear(recipe, normalization):
    m = layer(70, 96, normalization=normalization)
    x, g = torch.randn(3, 11, 70, dtype=BF16), torch.randn(3, 11, 96, dtype=BF16)
    expected = gradients(m, x, te_mx.autocast(recipe=recipe)(one_after_the_other(m)), g)
    assert_same(gradients(m, x, mxfp8(m, recipe), g), expected)


@pytest.mark.parametrize("shape", [(0, 40), (1, 40), (5, 0, 40), (2, 3, 40)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("zero_centered", [True, False])
def test_shapes(shape, bias, zero_centered):
    m = layer(40, 33, bias, zero_centered_gamma=zero_centered)
    x = torch.randn(shape, dtype=BF16)
    got = gradients(m, x, mxfp8(m))
    assert got[0].shape == (*shape[:-1], 33)
    if x.numel():
        high = gradients(m, x, None, torch.ones_like(got[0]))
        low = gradients(m, x, mxfp8(m), torch.ones_like(got[0]))
        for name, value in high[1].items():
            assert relative(low[1][name], value) < 0.1, name


@pytest.mark.parametrize("normalization", NORMS)
def test_high_precision_is_torch(normalization):
    m = layer(70, 96, normalization=normalization, dtype=torch.float32)
    x = torch.randn(5, 70)
    if normalization == "LayerNorm":
        z = nn.functional.layer_norm(x, (70,), m.layer_norm_weight, m.layer_norm_bias, 1e-5)
    else:
        z = nn.functional.rms_norm(x, (70,), m.layer_norm_weight, 1e-5)
    assert torch.equal(m(x), nn.functional.linear(z, m.weight, m.bias))
    assert relative(mxfp8(m)(x), m(x)) < 0.05


def test_what_it_returns():
    m = layer(64, 32, return_bias=True, return_layernorm_output=True)
    x = torch.randn(7, 64, dtype=BF16)
    plain = layer(64, 32)
    plain.load_state_dict(m.state_dict())
    for run in (lambda m, x: m(x), lambda m, x: mxfp8(m)(x)):
        out, bias, z = run(m, x)
        assert bias is m.bias and z.shape == x.shape
        assert relative(out.float() + bias.float(), run(plain, x)) < 5e-3


def test_the_normalized_input_has_a_gradient():
    m = layer(64, 32, return_layernorm_output=True)
    x = torch.randn(7, 64, dtype=BF16)
    g, g_z = torch.randn(7, 32, dtype=BF16), torch.randn(7, 64, dtype=BF16)
    got = {}
    for name, run in (("high", m), ("low", mxfp8(m))):
        leaf = x.clone().requires_grad_()
        y, z = run(leaf)
        got[name] = torch.autograd.grad((y, z), (leaf, *m.parameters()), (g, g_z))
    for low, high in zip(got["low"], got["high"], strict=True):
        assert relative(low, high) < 0.06
    only_z = x.clone().requires_grad_()
    mxfp8(m)(only_z)[1].backward(g_z)
    assert only_z.grad is not None


@pytest.mark.parametrize("frozen", ["x", "weight", "bias", "layer_norm_weight", "all but weight"])
def test_only_what_needs_a_gradient(frozen):
    m = layer(64, 32)
    x = torch.randn(7, 64, dtype=BF16, requires_grad=frozen != "x")
    g = torch.randn(7, 32, dtype=BF16)
    _, full = gradients(m, x, mxfp8(m), g)
    for name, parameter in m.named_parameters():
        kept = name != "weight" if frozen == "all but weight" else name == frozen
        parameter.requires_grad_(not kept)
    x.requires_grad_(not frozen.startswith(("x", "all")))
    mxfp8(m)(x).backward(g)
    for name, parameter in (("x", x), *m.named_parameters()):
        if parameter.requires_grad:
            assert torch.equal(parameter.grad, full[name])
        else:
            assert parameter.grad is None


def test_initialization_and_names_are_transformer_engines():
    m = te_mx.LayerNormLinear(512, 256)
    assert [n for n, _ in m.named_parameters()] == [
        "layer_norm_weight", "layer_norm_bias", "weight", "bias",
    ]  # fmt: skip
    assert abs(m.weight.std().item() - 0.023) < 1e-3
    assert not m.bias.any() and not m.layer_norm_bias.any() and (m.layer_norm_weight == 1).all()
    assert not te_mx.LayerNormLinear(8, 8, zero_centered_gamma=True).layer_norm_weight.any()
    rms = te_mx.LayerNormLinear(8, 8, False, normalization="RMSNorm", init_method=nn.init.ones_)
    assert rms.bias is None and rms.layer_norm_bias is None and (rms.weight == 1).all()
    assert te_mx.LayerNormLinear(8, 8, device="meta", params_dtype=BF16).weight.is_meta


def test_split_parameters():
    whole = layer(64, 96)
    split = te_mx.LayerNormLinear(64, 96, dtype=BF16, parameters_split={"query_": 32, "kv": 64})
    names = [name for name, _ in split.named_parameters()]
    assert names[2:] == ["query_weight", "kv_weight", "query_bias", "kv_bias"]
    with torch.no_grad():
        for kind in ("weight", "bias"):
            getattr(split, f"query_{kind}").copy_(getattr(whole, kind)[:32])
            getattr(split, f"kv_{kind}").copy_(getattr(whole, kind)[32:])
        split.layer_norm_weight.copy_(whole.layer_norm_weight)
        split.layer_norm_bias.copy_(whole.layer_norm_bias)
    x, g = torch.randn(5, 64, dtype=BF16), torch.randn(5, 96, dtype=BF16)
    a, b = gradients(whole, x, mxfp8(whole), g), gradients(split, x, mxfp8(split), g)
    assert torch.equal(a[0], b[0]) and torch.equal(a[1]["x"], b[1]["x"])
    assert torch.equal(a[1]["weight"], torch.cat([b[1]["query_weight"], b[1]["kv_weight"]]))


def test_compiled():
    m = layer(64, 32, return_layernorm_output=True)
    x = torch.randn(6, 64, dtype=BF16, requires_grad=True)
    compiled = torch.compile(m, fullgraph=True, backend="aot_eager")
    results = []
    for module in (m, compiled):
        y, z = mxfp8(module)(x)
        results.append((y, z, *torch.autograd.grad((y, z), (x, *m.parameters()), (y, z))))
    for got, expected in zip(*results, strict=True):
        assert torch.equal(got, expected)


def test_errors():
    m = layer(64, 32, name="qkv")
    with pytest.raises(ValueError, match="LayerNormLinear 'qkv': the last dimension"):
        mxfp8(m)(torch.randn(3, 60))
    with pytest.raises(TypeError, match=r"the recipe in force \(mxfp8_e4m3\) takes dense"):
        mxfp8(m)(torch.randn(3, 64, dtype=torch.float64))
    with pytest.raises(ValueError, match="is on meta"):
        mxfp8(m)(torch.randn(3, 64, device="meta"))
    with pytest.raises(ValueError, match="normalization must be"):
        te_mx.LayerNormLinear(8, 8, normalization="BatchNorm")
    with pytest.raises(ValueError, match="disagree"):
        te_mx.LayerNormLinear(8, 8, dtype=BF16, params_dtype=torch.float16)
    with pytest.raises(NotImplementedError, match="ub_overlap_ag"):
        te_mx.LayerNormLinear(8, 8, ub_overlap_ag=True)
    with pytest.raises(TypeError, match="unexpected keyword"):
        te_mx.LayerNormLinear(8, 8, no_such=1)
    with pytest.raises(NotImplementedError, match="fp8_output"):
        m(torch.randn(3, 64, dtype=BF16), fp8_output=True)
    assert "normalization='LayerNorm'" in repr(m)


def test_audit():
    model = nn.Sequential(layer(64, 32), nn.ReLU())
    assert te_mx.audit(model)["0"].fprop == "never ran"
    x = torch.randn(6, 64, dtype=BF16)
    mxfp8(model)(x).sum().backward()
    row = te_mx.audit(model)["0"]
    assert row.kind == "te_mx.LayerNormLinear"
    assert "never ran" not in row and "high precision" not in row
    model(x)
    assert te_mx.audit(model)["0"].dgrad == "high precision"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_gradients_in_high_precision_are_those_of_torch_up_to_rounding(dtype, normalization):
    """No further from fp64 than those of the module outside autocast, whose rounding differs."""
    layer = te_mx.LayerNormLinear(96, 80, dtype=dtype, normalization=normalization)
    for p in layer.parameters():
        torch.nn.init.normal_(p, 0, 0.5)
    x, grad = torch.randn(50, 96, dtype=dtype), torch.randn(50, 80, dtype=dtype)
    high = te_mx.recipe.MXFP8BlockScaling(backward_override="high_precision")

    def gradients(module, region):
        inp = x.to(module.weight.dtype).requires_grad_()
        with region:
            y = module(inp)
        return torch.autograd.grad(y, [inp, *module.parameters()], grad.to(y.dtype))

    fused = gradients(layer, te_mx.autocast(recipe=high))
    plain = gradients(layer, te_mx.autocast(enabled=False))
    exact = gradients(copy.deepcopy(layer).double(), te_mx.autocast(enabled=False))
    for got, torchs, wanted in zip(fused, plain, exact, strict=True):
        error, theirs = ((g.double() - wanted).norm() / wanted.norm() for g in (got, torchs))
        assert error <= 1.5 * theirs + 2.0**-24


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("given", [BF16, torch.float32])
def test_dtypes_outside_of_a_region_are_those_inside(normalization, dtype, given):
    """Under torch.autocast, where torch's layer_norm mixes no bf16 parameters with fp32."""
    m = layer(64, 32, dtype=dtype, normalization=normalization, return_layernorm_output=True)
    x = torch.randn(6, 64, dtype=given, requires_grad=True)
    with torch.autocast("cpu", BF16):
        plain, quantized = m(x), mxfp8(m)(x)
    for one, other in zip(plain, quantized, strict=True):
        assert one.dtype == other.dtype == BF16
        assert relative(one, other) < 0.1
    (grad,) = torch.autograd.grad(plain[0].sum() + plain[1].sum(), x)
    assert grad.dtype == given

"""LayerNormLinear, LayerNormMLP, and Linear with several formats, as one native call each way: the
bits of one step after the other. Without a GPU: fake_sm90.py stands in for the native module.
"""

from __future__ import annotations

import as_on_hopper
import pytest
import torch
from one_call import RECIPES, check, passes

import te_mx
from te_mx.autograd.norm import NormStep
from te_mx.backends.sm90 import layer as sm90_layer
from te_mx.dispatch.fused import Norm

F32, BF16 = torch.float32, torch.bfloat16
MIXED = "mxfp4", "mxfp4_all"


@pytest.fixture(autouse=True)
def hopper(threads):
    threads(1)  # many small operators
    with as_on_hopper.hopper():
        yield


def module(dtype=BF16, **fields) -> te_mx.LayerNormLinear:
    torch.manual_seed(0)
    made = te_mx.LayerNormLinear(70, 33, dtype=dtype, **fields)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return made


def mlp(activation="gelu", dtype=BF16, ffn=112, **fields) -> te_mx.LayerNormMLP:
    torch.manual_seed(0)
    made = te_mx.LayerNormMLP(70, ffn, activation=activation, dtype=dtype, **fields)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return made


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"bias": False, "normalization": "RMSNorm", "zero_centered_gamma": True},
        {"return_layernorm_output": True, "return_bias": True},
        {"fuse_wgrad_accumulation": True},
        {"delay_wgrad_compute": True},
        {"fuse_wgrad_accumulation": True, "delay_wgrad_compute": True},
        {"parameters_split": ("query", "key", "value")},
    ],
    ids=str,
)
def test_bits_of_one_step_after_the_other(fields, recipe, monkeypatch):
    layer = module(**fields)
    x = torch.randn(3, 25, 70, dtype=BF16, requires_grad=True)
    check(layer, x, recipe, monkeypatch, (None, True, False))


def test_a_bias_beside_transformed_columns_in_fp32():
    """And nothing else: no launch makes both, and no sequence."""
    layer = module(F32)
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(name in ("weight", "bias"))
    x = torch.randn(40, 70)
    assert passes(layer, x, "mxfp4_all")[0] == "LayerFunctionBackward"


@pytest.mark.parametrize("trains", ["input", "norm", "weight", "weight and bias"])
def test_what_needs_no_gradient(trains, monkeypatch):
    layer = module(F32)
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(
            name in ("layer_norm_weight",) if trains == "norm" else name in trains.split()
        )
    x = torch.randn(40, 70, requires_grad=trains == "input")
    check(layer, x, "mxfp8", monkeypatch)


@pytest.mark.parametrize(
    ("columns", "bias", "zero_centered", "taken"),
    [
        (70, BF16, False, BF16),
        (70, F32, False, F32),
        (70, BF16, True, F32),
        (2048, BF16, False, F32),
    ],
)
def test_few_weights_of_a_normalization_are_read_as_they_are(columns, bias, zero_centered, taken):
    """To cast them takes the host longer than their kernels take."""
    step = NormStep(Norm("LayerNorm", 1e-5), zero_centered, BF16)
    weight, bias = torch.ones(columns, dtype=BF16), torch.ones(columns, dtype=bias)
    assert step.kernel_dtype(weight, bias) is taken
    scale, shift = step.as_read(weight, bias, taken)
    assert (scale is weight and shift is bias) == (taken is BF16)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"activation": "swiglu", "bias": False, "normalization": "RMSNorm"},
        {"activation": "srelu", "return_layernorm_output": True, "return_bias": True},
        {"activation": "gelu_erf", "normalization": None, "fuse_wgrad_accumulation": True},
        {"activation": "geglu", "delay_wgrad_compute": True},
        {"fuse_wgrad_accumulation": True, "delay_wgrad_compute": True},
    ],
    ids=str,
)
def test_bits_of_an_mlp_step_by_step(fields, recipe, monkeypatch):
    x = torch.randn(3, 25, 70, dtype=BF16, requires_grad=True)
    check(mlp(**fields), x, recipe, monkeypatch, (None, True, False))


@pytest.mark.parametrize("dtype", [F32, torch.float16])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_an_mlp_in_other_dtypes(activation, dtype, monkeypatch):
    x = torch.randn(40, 70, dtype=dtype, requires_grad=True)
    for recipe in ("mxfp8", "pow2", "mxfp4"):
        check(mlp(activation, dtype, ffn=48), x, recipe, monkeypatch)


@pytest.mark.parametrize(
    "trains", ["input", "layer_norm_bias", "fc1_weight", "fc1_weight fc2_bias", "input fc2_weight"]
)
@pytest.mark.parametrize("activation", ["gelu", "silu"])
def test_what_of_an_mlp_needs_no_gradient(trains, activation, monkeypatch):
    layer = mlp(activation)
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(name in trains.split())
    x = torch.randn(40, 70, dtype=BF16, requires_grad="input" in trains)
    check(layer, x, "mxfp8", monkeypatch)


@pytest.mark.parametrize("recipe", MIXED)
@pytest.mark.parametrize(
    "fields",
    [
        {}, {"bias": False}, {"fuse_wgrad_accumulation": True},
        {"delay_wgrad_compute": True, "return_bias": True},
    ],
    ids=str,
)  # fmt: skip
def test_a_linear_layer_with_several_formats(fields, recipe, monkeypatch):
    torch.manual_seed(0)
    layer = te_mx.Linear(70, 33, dtype=BF16, **fields)
    x = torch.randn(3, 25, 70, dtype=BF16, requires_grad=True)
    check(layer, x, recipe, monkeypatch, (None, True, False), "LinearFunctionBackward")
    with torch.autocast("cpu", torch.bfloat16):
        check(
            layer,
            x.detach().float().requires_grad_(),
            recipe,
            monkeypatch,
            (None,),
            "LinearFunctionBackward",
        )


def test_rows_that_lie_apart(monkeypatch):
    """Of the input, of the output gradient, and of a weight that is computed."""
    layer = mlp("swiglu")
    x = torch.randn(40, 140, dtype=BF16)[:, ::2].requires_grad_()
    check(layer, x, "mxfp8", monkeypatch)
    torch.nn.utils.parametrizations.weight_norm(layer, "fc1_weight")
    torch.nn.utils.parametrizations.weight_norm(layer, "fc2_weight")
    check(layer, x, "mxfp8", monkeypatch)


def test_one_who_watches_the_backward_pass_sees_its_ops():
    layer, x = module(), torch.randn(40, 70, dtype=BF16, requires_grad=True)
    expected = passes(layer, x, "mxfp8")[2:]
    x = x.detach().requires_grad_()
    with te_mx.autocast(recipe=RECIPES["mxfp8"]):
        y = layer(x)
    for parameter in layer.parameters():
        parameter.grad = None
    with torch.profiler.profile() as profile:
        y.backward(y.detach().sin())
    assert any(event.key == "te_mx::gemm" for event in profile.key_averages())
    grads = [x.grad, *(p.grad for p in layer.parameters())]
    for one, other in zip(grads, expected, strict=False):
        assert torch.equal(one, other)


def test_a_gradient_that_is_no_operand_runs_step_by_step(monkeypatch):
    """What native code does not take."""
    layer, x = module(), torch.randn(40, 70, dtype=BF16, requires_grad=True)
    expected = passes(layer, x, "mxfp8")
    monkeypatch.setattr(sm90_layer.Plan, "backward", lambda *call: None)
    for one, other in zip(passes(layer, x, "mxfp8")[1:], expected[1:], strict=True):
        assert torch.equal(one, other) if one is not None else other is None


@pytest.mark.filterwarnings("ignore::te_mx.FallbackWarning")
def test_operands_that_no_kernel_packs_run_step_by_step():
    """MXFP8 gradients rounded stochastically lie plain: their products pack them."""
    recipe = te_mx.recipe.MXFP4BlockScaling(stochastic_rounding=True)
    for layer in (module(), mlp()):
        x = torch.randn(40, 70, dtype=BF16, requires_grad=True)
        with te_mx.autocast(recipe=recipe):
            y = layer(x)
        assert type(y.grad_fn).__name__ == "LayerFunctionBackward"
        y.sum().backward()
        assert x.grad.isfinite().all()

"""Gradients through weights of which only codes are left (freeze_weights(drop_master=True)): they
reach inputs, biases and normalizations.

The oracle of an 8-bit weight is the same module with its masters under one_copy_weights, which
starts dgrad from the same codes; that of any weight-only product is torch on the decoded weight.
"""

from __future__ import annotations

import copy

import pytest
import torch
from norm_modules import filled

import te_mx
from te_mx.recipe import DeepSeekV3, Float8BlockScaling, MXFP4BlockScaling, MXFP8BlockScaling

IN, ROWS = 70, 45
SPLITS = [7, 0, 31]
ONE_COPY = MXFP8BlockScaling(one_copy_weights=True)
FAMILY = {
    "Linear": lambda: te_mx.Linear(IN, 33),
    "LayerNormLinear": lambda: filled(te_mx.LayerNormLinear(IN, 33, return_layernorm_output=True)),
    "RMSNorm": lambda: filled(te_mx.LayerNormLinear(IN, 33, normalization="RMSNorm", bias=False)),
    "LayerNormMLP": lambda: filled(te_mx.LayerNormMLP(IN, 48)),
    "swiglu": lambda: filled(te_mx.LayerNormMLP(IN, 48, activation="swiglu")),
    "no norm": lambda: filled(te_mx.LayerNormMLP(IN, 48, normalization=None, activation="relu")),
    "GroupedLinear": lambda: te_mx.GroupedLinear(3, IN, 33),
    "stacked": lambda: te_mx.GroupedLinear(3, IN, 33, single_grouped_weight=True),
}
every = pytest.mark.parametrize("kind", FAMILY)


def call(module, x):
    y = module(x, SPLITS) if isinstance(module, te_mx.GroupedLinear) else module(x)
    return torch.cat(y, dim=-1) if isinstance(y, tuple) else y


def train_the_rest(module):
    """What is no weight of codes trains."""
    for value in module.parameters():
        value.requires_grad_(True)
    return module


def gradients(module, x, recipe=None):
    """By name: the result, the gradient of x, and those of what trains."""
    x = x.detach().requires_grad_(True)
    with te_mx.autocast(recipe=recipe):
        y = call(module, x)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype))
    trained = {n: p.grad for n, p in module.named_parameters() if p.requires_grad}
    return {"y": y.detach(), "x": x.grad, **trained}


def check_equal(got, expected):
    for name in got:
        assert torch.equal(got[name], expected[name]), name


@every
@pytest.mark.parametrize("backward", [None, "dequantized", "high_precision"])
def test_8_bit_codes_are_one_copy_weights(kind, backward):
    torch.manual_seed(0)
    master, x = FAMILY[kind](), torch.randn(ROWS, IN)
    model = copy.deepcopy(master)
    te_mx.freeze_weights(model, drop_master=True)
    recipe = MXFP8BlockScaling(backward_override=backward)
    # What has no weight has no high-precision one: the values of the codes stand in.
    oracle = ONE_COPY if backward is None else MXFP8BlockScaling(backward_override="dequantized")
    got = gradients(train_the_rest(model), x, recipe)
    check_equal(got, gradients(master, x, oracle))
    assert set(got) - {"y", "x"} == {n for n, _ in model.named_parameters()}


@pytest.mark.filterwarnings("ignore::te_mx.FallbackWarning")  # MXFP6 runs on the reference
@pytest.mark.parametrize("fmt", ["mxfp4", "mxfp6_e2m3"])
@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear", "GroupedLinear", "stacked"])
def test_codes_of_fewer_bits_turn_to_mxfp8(kind, fmt):
    """dgrad multiplies what the codes stand for: it is that of a layer with these values as its
    weight, which MXFP8 holds exactly along either direction."""
    torch.manual_seed(0)
    model, x = FAMILY[kind](), torch.randn(ROWS, IN)
    te_mx.freeze_weights(model, drop_master=True, fmt=fmt)
    values = copy.deepcopy(model)
    te_mx.unfreeze_weights(values, dequantize=True)
    got, expected = (gradients(m, x) for m in (train_the_rest(model), values))
    check_equal(got, {**expected, "y": got["y"]})
    torch.testing.assert_close(got["y"], expected["y"], rtol=0, atol=1e-5)  # other kernels


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_only_is_torch_on_the_values(kind, dtype):
    torch.manual_seed(0)
    model, x = FAMILY[kind]().to(dtype), torch.randn(ROWS, IN, dtype=dtype)
    te_mx.freeze_weights(model, drop_master=True, fmt="mxfp4", activations="bf16")
    values = copy.deepcopy(model)
    te_mx.unfreeze_weights(values, dequantize=True)
    got = gradients(train_the_rest(model), x)
    values, x = values.double(), x.double().requires_grad_(True)  # its own are no better than ours
    y = call(values, x)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(dtype).double())
    expected = {"x": x.grad, **{n: p.grad for n, p in values.named_parameters()}}
    for name in set(got) - {"y"}:
        off, size = (got[name] - expected[name]).norm(), expected[name].norm()
        assert off <= (1e-6 if dtype == torch.float32 else 0.01) * size, name  # sums are rounded


def test_weight_only_differentiates_twice():
    layer = te_mx.Linear(IN, 5)
    te_mx.freeze_weights(layer, drop_master=True, activations="bf16")
    x = torch.randn(3, IN, requires_grad=True)
    (dx,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    (twice,) = torch.autograd.grad(dx.sum(), x)
    weight = copy.deepcopy(layer)
    te_mx.unfreeze_weights(weight, dequantize=True)
    expected = 2 * torch.ones(3, IN) @ (weight.weight.T @ weight.weight)
    torch.testing.assert_close(twice, expected.detach())


@pytest.mark.parametrize("recipe, bound", [(DeepSeekV3(), 0.05), (MXFP4BlockScaling(), 0.15)])
def test_other_recipes(recipe, bound):
    torch.manual_seed(0)
    layer, x = te_mx.Linear(256, 128), torch.randn(ROWS, 256)
    weight = layer.weight.detach().clone()
    te_mx.freeze_weights(layer, drop_master=True, recipe=recipe)
    got = gradients(layer, x, recipe)
    g = torch.randn(ROWS, 128, generator=torch.Generator().manual_seed(1))
    error = (got["x"] - g @ weight).norm() / (g @ weight).norm()
    assert error < bound


@pytest.mark.filterwarnings("ignore::te_mx.FallbackWarning")  # MX times blockwise FP8
@pytest.mark.parametrize("kind", ["Linear", "LayerNormMLP", "GroupedLinear"])
@pytest.mark.parametrize("fmt, region", [
    ("mxfp8", Float8BlockScaling()), ("mxfp4", DeepSeekV3()), ("fp8_e4m3_1x128", None),
])  # fmt: skip
def test_a_region_whose_scale_rule_the_codes_do_not_know(kind, fmt, region):
    """dgrad's columns of the weight have a rule of their own, as its codes have."""
    torch.manual_seed(0)
    model, x = FAMILY[kind](), torch.randn(ROWS, IN)
    te_mx.freeze_weights(model, drop_master=True, fmt=fmt)
    values = copy.deepcopy(model)
    te_mx.unfreeze_weights(values, dequantize=True)
    x.requires_grad_()
    (expected,) = torch.autograd.grad(call(values, x).square().sum(), x)
    with te_mx.autocast(recipe=region):
        y = call(model, x)
    (dx,) = torch.autograd.grad(y.square().sum(), x)
    assert (dx - expected).norm() < 0.15 * expected.norm()


@pytest.mark.parametrize("activations", [None, "bf16"])
def test_nothing_but_codes_is_kept_for_backward(activations):
    layer = te_mx.Linear(256, 256, bias=False, dtype=torch.bfloat16)
    te_mx.freeze_weights(layer, drop_master=True, fmt="mxfp4", activations=activations)
    x = torch.randn(32, 256, dtype=torch.bfloat16, requires_grad=True)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: (kept.append(t.untyped_storage().data_ptr()), t)[1], lambda t: t
    ):
        y = layer(x)
    held = {t.untyped_storage().data_ptr() for t in layer.buffers()}
    assert set(kept) <= held | {0}
    y.sum().backward()


@pytest.mark.parametrize("activations", [None, "bf16"])
@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear", "LayerNormMLP", "GroupedLinear"])
def test_compiles_without_a_graph_break(kind, activations):
    torch.manual_seed(0)
    model = FAMILY[kind]()
    te_mx.freeze_weights(model, drop_master=True, activations=activations)
    x = torch.randn(ROWS, IN, requires_grad=True)
    call(model, x).square().sum().backward()
    expected, x.grad = x.grad, None
    torch.compiler.reset()
    compiled = torch.compile(lambda x: call(model, x), fullgraph=True, backend="aot_eager")
    compiled(x).square().sum().backward()
    torch.testing.assert_close(x.grad, expected, rtol=1e-3, atol=1e-3)


@every
def test_checkpointing_recomputes_the_same(kind):
    torch.manual_seed(0)
    model, x = FAMILY[kind](), torch.randn(ROWS, IN)
    te_mx.freeze_weights(model, drop_master=True)
    expected = gradients(model, x)
    x = x.requires_grad_(True)
    with te_mx.autocast():
        y = torch.utils.checkpoint.checkpoint(lambda x: call(model, x), x, use_reentrant=False)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)))
    assert torch.equal(x.grad, expected["x"])

"""convert_model(fuse=True): what MLP blocks of models as they are compute as one step."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from mlp_blocks import BF16, Gated, Joined, Named, Plain, given, run, seeded
from norm_modules import relative
from torch import nn

import te_mx
from te_mx.nn.guards import RAN
from te_mx.recipe import Float8BlockScaling, MXFP8BlockScaling


def as_module(block, recipe, x):
    """The same block as a te_mx.LayerNormMLP without a normalization."""
    first, last = (block.gate_proj, block.up_proj), block.down_proj
    module = te_mx.LayerNormMLP(
        64, 96, last.bias is not None, normalization=None, activation="swiglu", dtype=BF16
    )
    with torch.no_grad():
        module.fc1_weight.copy_(torch.cat([layer.weight for layer in first]))
        module.fc2_weight.copy_(last.weight)
        if last.bias is not None:
            module.fc1_bias.copy_(torch.cat([layer.bias for layer in first]))
            module.fc2_bias.copy_(last.bias)
    y, grads = run(module, x, recipe)
    made = {"x": grads["x"]}
    for kind in ("weight", "bias") if last.bias is not None else ("weight",):
        made[f"gate_proj.{kind}"], made[f"up_proj.{kind}"] = grads[f"fc1_{kind}"].split(96)
        made[f"down_proj.{kind}"] = grads[f"fc2_{kind}"]
    return y, made


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "recipe",
    [
        MXFP8BlockScaling(),
        MXFP8BlockScaling(one_copy_weights=True),
        MXFP8BlockScaling(backward_override="high_precision"),
        MXFP8BlockScaling(backward_override="dequantized"),
        MXFP8BlockScaling(wgrad_with_hp=True),
        Float8BlockScaling(),
        Float8BlockScaling(use_f32_scales=True, one_copy_weights=True),
    ],
    ids=str,
)
def test_bits_of_layernorm_mlp_under_every_recipe(recipe, bias):
    block, x = seeded(Gated, bias=bias), given()
    te_mx.convert_model(block, fuse=True)
    y, grads = run(block, x, recipe)
    assert block.__dict__[RAN] == "fused"
    expected_y, expected = as_module(block, recipe, x)
    assert torch.equal(y, expected_y) and set(grads) == set(expected)
    for name, grad in grads.items():
        assert torch.equal(grad, expected[name]), name
    with te_mx.autocast(recipe=recipe), torch.no_grad():
        assert torch.equal(block(x), y)


@pytest.mark.usefixtures("family")
@pytest.mark.parametrize(
    "make",
    [
        lambda: Gated(),
        lambda: Gated(nn.GELU("tanh"), bias=True, out=32),
        lambda: Gated(nn.ReLU(inplace=True)),
        lambda: Gated(torch.sigmoid),
        lambda: Plain(),
        lambda: Plain(nn.GELU(), bias=False),
        lambda: Plain(nn.SiLU()),
        Joined,
        Named,
    ],
)
def test_no_further_from_exact_than_apart(make):
    """Both are off by the rounding to MXFP8; the step rounds once where the layers round thrice."""
    apart = seeded(make)
    exact = copy.deepcopy(apart).double()
    fused = copy.deepcopy(apart)
    te_mx.convert_model(apart)
    (row,) = [r for r in te_mx.convert_model(fused, fuse=True) if r.status == "fused"]
    assert row.name == "(root)" and " -> 96 -> " in row.shape
    x = given(256)
    y = run(fused, x)
    assert fused.__dict__[RAN] == "fused"
    as_layers = run(apart, x)
    truth = _exact(exact, x)
    for name, got in [("y", y[0]), *y[1].items()]:
        want = truth[0] if name == "y" else truth[1][name]
        other = as_layers[0] if name == "y" else as_layers[1][name]
        assert relative(got, want) <= 1.03 * relative(other, want) + 1e-3, name


def _exact(block, x):
    x = x.double().requires_grad_()
    y = block(x)
    names = [n for n, _ in block.named_parameters()]
    grad = torch.linspace(-1, 1, y.numel()).view(y.shape).to(BF16).double()
    got = torch.autograd.grad(y, [x, *block.parameters()], grad)
    return y.detach(), dict(zip(["x", *names], got, strict=True))


@pytest.mark.usefixtures("family")
def test_only_some_gradients():
    block, x = seeded(Gated, bias=True), given()
    te_mx.convert_model(block, fuse=True)
    _, expected = run(block, x)
    for trains in ("gate_proj.weight", "up_proj.bias", "down_proj.weight", "down_proj.bias"):
        for name, parameter in block.named_parameters():
            parameter.requires_grad_(name == trains)
        with te_mx.autocast():
            y = block(x)
        y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.dtype))
        grads = {n: p.grad for n, p in block.named_parameters() if p.grad is not None}
        assert list(grads) == [trains] and torch.equal(grads[trains], expected[trains])
        block.zero_grad(set_to_none=True)


@pytest.mark.usefixtures("family")
def test_main_grads():
    """Added to main_grad of each parameter, where they lie."""
    block, x = seeded(Gated), given()
    te_mx.convert_model(block, fuse=True)
    _, expected = run(block, x)
    for layer in (block.gate_proj, block.up_proj, block.down_proj):
        layer.fuse_wgrad_accumulation = True
        layer.weight.main_grad = torch.ones(layer.weight.shape)
    with te_mx.autocast():
        y = block(x)
    y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.dtype))
    assert block.__dict__[RAN] == "fused"
    for name in ("gate_proj", "up_proj", "down_proj"):
        weight = getattr(block, name).weight
        assert weight.grad is None
        assert relative(weight.main_grad - 1, expected[f"{name}.weight"]) < 3e-3


def test_nothing_joined_and_no_activation_is_kept():
    """Kept for backward: h, the codes of x, and what the weights keep; never a copy of w1."""
    block, x = seeded(Gated, hidden=128, inner=256), torch.randn(64, 128, dtype=BF16)
    te_mx.convert_model(block, fuse=True)
    kept = []

    def pack(tensor):
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), te_mx.autocast():
        block(x.requires_grad_())
    floats = [tuple(t.shape) for t in kept if t.is_floating_point() and t.numel()]
    own = [tuple(p.shape) for p in block.parameters()]
    assert [shape for shape in floats if shape not in own] == [(64, 512)]
    assert (512, 128) not in floats
    a_codes = [t for t in kept if t.dtype is torch.uint8 and t.numel() == 64 * 256]
    assert not a_codes


@pytest.mark.usefixtures("family")
def test_compiled_in_one_graph():
    block, x = seeded(Gated, bias=True), given()
    te_mx.convert_model(block, fuse=True)
    y, grads = run(block, x)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    got = run(compiled, x)
    assert torch.equal(got[0], y)
    for name, grad in grads.items():
        assert torch.equal(got[1][name if name == "x" else f"_orig_mod.{name}"], grad), name


def test_compiled_code_keeps_no_joined_weight():
    """Where backward reads the weights themselves, it joins them again."""
    block, saved = seeded(Gated, hidden=128, inner=256), []
    te_mx.convert_model(block, fuse=True)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager_decomp_partition")
    x = torch.randn(64, 128, dtype=BF16, requires_grad=True)
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)
    with hooks, te_mx.autocast(recipe=MXFP8BlockScaling(backward_override="high_precision")):
        compiled(x)
    shapes = [tuple(t.shape) for t in saved]
    assert shapes.count((256, 128)) == 2 and (512, 128) not in shapes


@pytest.mark.usefixtures("family")
def test_checkpointed_second_derivatives_and_functional_calls():
    block, x = seeded(Gated), given()
    te_mx.convert_model(block, fuse=True)
    y, grads = run(block, x)
    again = lambda inp: torch.utils.checkpoint.checkpoint(block, inp, use_reentrant=False)  # noqa: E731
    leaf = x.clone().requires_grad_()
    with te_mx.autocast():
        z = again(leaf)
    z.backward(torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.dtype))
    assert torch.equal(z, y) and torch.equal(leaf.grad, grads["x"])
    with te_mx.autocast():
        z = block(leaf)
    (dx,) = torch.autograd.grad(z.sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        dx.sum().backward()
    values = {name: value.detach() * 2 for name, value in block.named_parameters()}
    with te_mx.autocast(), torch.no_grad():
        got = torch.func.functional_call(block, values, (x,))
        assert not torch.equal(got, y)


def test_traced_by_fx_its_layers_are_in_the_graph():
    block, x = seeded(Gated), given()
    te_mx.convert_model(block, fuse=True)
    assert str(inspect.signature(block.forward)) == "(x)"
    graph = torch.fx.symbolic_trace(block)
    assert next(n.target for n in graph.graph.nodes if n.op == "call_module") == "gate_proj"
    with te_mx.autocast(), torch.no_grad():
        assert torch.equal(graph(x), Gated.forward(block, x))

"""What a Function saves comes back as the hooks of saved tensors return it: with other strides, at
another address. Gradients do not depend on it. What it returns may be changed in place.
"""

from __future__ import annotations

import pytest
import torch
from families import FAMILIES, IN, RECIPES, ROWS, in_region, layer
from torch import Tensor, nn

import te_mx

EXACT = {"rtol": 0, "atol": 0}


def every_second(t: Tensor) -> Tensor:
    return torch.stack([t, t], -1)[..., 0]


def transposed(t: Tensor) -> Tensor:
    return t.t().contiguous().t() if t.dim() == 2 else t


def elsewhere(t: Tensor) -> Tensor:
    """Contiguous, as far from an even address as its elements allow."""
    size = t.element_size()
    room = torch.empty(t.numel() * size + size, dtype=torch.uint8)[size:]
    return room.view(t.dtype).view(t.shape).copy_(t)


def gradients(run, module: nn.Module, unpack=None) -> list[Tensor]:
    x = torch.randn(ROWS, IN, generator=torch.Generator().manual_seed(1)).requires_grad_()
    if unpack is None:
        y = run(x)
    else:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
            y = run(x)
    return list(torch.autograd.grad(y.square().sum(), [x, *module.parameters()]))


@pytest.mark.parametrize("recipe", [recipe for recipe in RECIPES if recipe != "off"])
@pytest.mark.parametrize("family", [*FAMILIES, "RMSNorm", "swiglu"])
def test_strides_and_addresses_of_saved_tensors(family, recipe):
    if family == "RMSNorm":
        module = layer("LayerNormLinear", normalization="RMSNorm")
    elif family == "swiglu":
        module = layer("LayerNormMLP", activation="swiglu")
    else:
        module = layer(family)
    run = in_region(recipe, module)
    # torch's own products, of what was saved as it is, sum in another order for other strides.
    exact = {"rtol": 1e-5, "atol": 1e-5} if recipe == "high_precision" else EXACT
    wanted = gradients(run, module)
    for unpack in (every_second, transposed, elsewhere):
        torch.testing.assert_close(gradients(run, module, unpack), wanted, **exact)


@pytest.mark.parametrize("family", ["Linear", "GroupedLinear"])
def test_kept_weights_in_packed_form(family):
    """64 rows of a group, so that the kernel is one that reads weights in its own order."""
    module, x = layer(family), torch.randn(3 * 64, IN)
    inner = getattr(module, "inner", module)
    arguments = ([64, 64, 64],) if family == "GroupedLinear" else ()

    def step(first: bool, unpack=None) -> Tensor:
        z = x.clone().requires_grad_()
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack or (lambda t: t))
        with te_mx.autocast(), hooks:
            y = inner(z, *arguments, is_first_microbatch=first)
        return torch.autograd.grad(y.square().sum(), z)[0]

    wanted = step(True)
    for unpack in (every_second, elsewhere):
        assert torch.equal(step(False, unpack), wanted)


# --------------------------------------------------------------------------- in-place operators
SHAPES = [(IN,), (8, IN), (2, 4, IN), (0, 3, IN), (0, IN)]


@pytest.mark.parametrize("arguments", [{}, {"delay_wgrad_compute": True}])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("family", ["Linear", "LayerNormLinear", "LayerNormMLP", "GroupedLinear"])
def test_outputs_change_in_place(family, recipe, arguments):
    run = in_region(recipe, layer(family, **arguments))
    for shape in SHAPES:
        x = torch.randn(shape, requires_grad=True)
        wanted = run(x)
        (dx,) = torch.autograd.grad(wanted.sum() * 2, x)
        got = run(x)
        got += wanted.detach()
        got *= 2
        assert torch.equal(got, (wanted + wanted.detach()) * 2)
        (changed,) = torch.autograd.grad(got.sum(), x)
        assert torch.equal(changed, dx) and changed.shape == x.shape
        if recipe != "off":  # torch's own gradients and features of no_grad are views
            changed += x
            with torch.no_grad():
                features = run(x)
            features += x.sum()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_normalized_input_in_place(recipe, shape):
    """It is saved where wgrad needs it; then the change is an error, as in torch."""
    module = layer("LayerNormLinear", return_layernorm_output=True)
    x = torch.randn(shape, requires_grad=True)
    y, z = in_region(recipe, module)(x)
    z += 1
    if recipe in ("high_precision", "wgrad_with_hp", "off"):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(y.sum() + z.sum(), module.weight)
    else:
        torch.autograd.grad(y.sum() + z.sum(), [x, module.weight])


def test_relu_in_place_behind_a_converted_layer():
    net = nn.Sequential(nn.Linear(IN, 40), nn.ReLU(inplace=True), nn.Linear(40, 8))
    plain = nn.Sequential(net[0], nn.ReLU(), net[2])
    te_mx.convert_model(net)
    x = torch.randn(2, 4, IN)
    got, wanted = (
        torch.autograd.grad(in_region("default", f)(x).square().sum(), list(net.parameters()))
        for f in (net, plain)
    )
    assert all(torch.equal(g, w) for g, w in zip(got, wanted, strict=True))

"""autocast and fp8_autocast called as Transformer Engine's callers do."""

from __future__ import annotations

import pytest
import test_recipe_objects as objects
import torch

import te_mx
from te_mx.context.region import current_recipe
from te_mx.recipe import Format, MXFP8BlockScaling

HYBRID = MXFP8BlockScaling(fp8_format=Format.HYBRID)
GROUP = object()  # a process group


@pytest.fixture(scope="module", params=["look_alike", "real"])
def te(request):
    return objects.look_alike() if request.param == "look_alike" else objects.real()


@pytest.mark.parametrize(
    "region",
    [
        lambda recipe: te_mx.autocast(True, False, recipe),
        lambda recipe: te_mx.autocast(True, True, recipe, GROUP, True),
        lambda recipe: te_mx.autocast(calibrating=True, recipe=recipe, amax_reduction_group=GROUP),
        lambda recipe: te_mx.fp8_autocast(True, False, recipe),
        lambda recipe: te_mx.fp8_autocast(True, False, recipe, GROUP, False),
        lambda recipe: te_mx.fp8_autocast(enabled=True, fp8_recipe=recipe, fp8_group=GROUP),
        # te_mx's own, with nothing between enabled and the recipe.
        lambda recipe: te_mx.autocast(True, recipe),
        lambda recipe: te_mx.fp8_autocast(True, recipe),
    ],
)
def test_arguments(region, te):
    for recipe in (HYBRID, te.MXFP8BlockScaling(fp8_format=te.Format.HYBRID)):
        with region(recipe):
            assert current_recipe() == HYBRID
    with region(None):
        assert current_recipe() == te_mx.get_default_recipe()


def test_two_recipes_are_one_too_many():
    for call in (te_mx.autocast, te_mx.fp8_autocast):
        with pytest.raises(TypeError, match=r"calibrating must be a bool, got MXFP8BlockScaling"):
            call(True, HYBRID, HYBRID)


def test_the_recipe_of_a_region_that_is_off_is_ignored(te):
    for recipe in (te.DelayedScaling(), te.NVFP4BlockScaling(), te.Format.E4M3, "fp8", object()):
        for region in (
            te_mx.autocast(False, recipe=recipe),
            te_mx.fp8_autocast(False, True, recipe),
        ):
            with te_mx.autocast(), region:
                assert current_recipe() is None


def test_calibrating_changes_nothing():
    layer, x = te_mx.Linear(32, 32), torch.randn(4, 32)
    with te_mx.autocast():
        expected = layer(x)
    with te_mx.autocast(calibrating=True):
        assert torch.equal(layer(x), expected)
    with te_mx.autocast(enabled=False, calibrating=True):
        assert torch.equal(layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias))


def test_their_recipes_inside_compiled_code(te):
    layer, x = te_mx.Linear(64, 32), torch.randn(8, 64) * torch.logspace(-3, 3, 64)
    recipe = te.MXFP8BlockScaling()

    def forward(x):
        with te_mx.autocast(recipe=recipe):
            y = layer(x)
        with te_mx.fp8_autocast(enabled=False, fp8_recipe=recipe):
            return y, layer(x)

    torch.compiler.reset()
    compiled = torch.compile(forward, fullgraph=True, backend="aot_eager")
    results = []
    for format in (te.Format.E4M3, te.Format.HYBRID, te.Format.E4M3):  # their recipes can change
        recipe.fp8_format = format
        inp = x.clone().requires_grad_()
        y, plain = compiled(inp)
        y.backward(torch.ones_like(y) * x[:, :32])
        expected_inp = x.clone().requires_grad_()
        expected, expected_plain = forward(expected_inp)
        expected.backward(torch.ones_like(y) * x[:, :32])
        assert torch.equal(y, expected) and torch.equal(plain, expected_plain)
        assert torch.equal(inp.grad, expected_inp.grad)
        results.append(inp.grad)
    assert torch.equal(results[0], results[2]) and not torch.equal(results[0], results[1])


def test_a_refusal_inside_compiled_code(te):
    recipe = te.DelayedScaling()

    def forward(x):
        with te_mx.autocast(recipe=recipe):
            return x + 1

    torch.compiler.reset()
    with pytest.raises(Exception, match="DelayedScaling of Transformer Engine is not supported"):
        torch.compile(forward, backend="eager")(torch.ones(2))

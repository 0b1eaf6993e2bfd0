"""delay_wgrad_compute when somebody writes to the input or the output gradient between backward and
backward_dw(), as pipelines reuse their buffers: the gradient of what was there, or an error.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from norm_modules import filled
from torch import Tensor, nn

import te_mx
from te_mx.recipe import Float8BlockScaling, MXFP8BlockScaling

IN, OUT, ROWS, SPLITS = 70, 40, 45, [7, 0, 31]
RECIPES = {
    "default": MXFP8BlockScaling(),
    "high_precision": MXFP8BlockScaling(backward_override="high_precision"),
    "dequantized": MXFP8BlockScaling(backward_override="dequantized"),
    "wgrad_with_hp": MXFP8BlockScaling(wgrad_with_hp=True),
    "float8_block": Float8BlockScaling(),
    "outside": None,
}
OWN_INPUT = {"save_original_input": True}
FAMILY: dict[str, Callable[..., nn.Module]] = {
    "Linear": lambda **o: te_mx.Linear(IN, OUT, **o),
    "Linear, own input": lambda **o: te_mx.Linear(IN, OUT, **OWN_INPUT, **o),
    "LayerNormLinear": lambda **o: filled(te_mx.LayerNormLinear(IN, OUT, **o)),
    "LayerNormMLP": lambda **o: filled(te_mx.LayerNormMLP(IN, 48, activation="swiglu", **o)),
    "GroupedLinear": lambda **o: te_mx.GroupedLinear(3, IN, OUT, **o),
    "GroupedLinear, own input": lambda **o: te_mx.GroupedLinear(3, IN, OUT, **OWN_INPUT, **o),
}


def backward(module: nn.Module, recipe: str) -> tuple[Tensor, Tensor]:
    """One forward and backward pass; its input and output gradient."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, IN, generator=generator)
    args = (x, SPLITS) if isinstance(module, te_mx.GroupedLinear) else (x,)
    with te_mx.autocast(enabled=RECIPES[recipe] is not None, recipe=RECIPES[recipe]):
        y = module(*args)
    grad = torch.randn(y.shape, generator=generator)
    y.backward(grad)
    return x, grad


def gradients(module: nn.Module) -> list[Tensor | None]:
    return [p.grad for p in module.parameters() if p.dim() > 1]


@pytest.mark.parametrize("kind", FAMILY)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("victim", ["input", "output gradient"])
def test_the_same_gradient_or_an_error(kind: str, recipe: str, victim: str) -> None:
    module = FAMILY[kind](delay_wgrad_compute=True)
    backward(module, recipe)
    module.backward_dw()
    expected = gradients(module)
    module.zero_grad()
    x, grad = backward(module, recipe)
    (x if victim == "input" else grad).zero_()
    try:
        module.backward_dw()
    except RuntimeError as error:
        for word in (type(module).__name__, f"needs the {victim}", "expected version", "clone"):
            assert word in str(error)
        assert all(g is None for g in gradients(module))
    else:
        for got, wanted in zip(gradients(module), expected, strict=True):
            assert torch.equal(got, wanted)


@pytest.mark.parametrize("kind", ["Linear", "GroupedLinear"])
@pytest.mark.parametrize(
    ("recipe", "kept"),
    [
        ("default", set()),
        ("dequantized", {"output gradient"}),
        ("wgrad_with_hp", {"input", "output gradient"}),
        ("high_precision", {"input", "output gradient"}),
        ("outside", {"input", "output gradient"}),
    ],
)
def test_only_what_is_read_has_to_stay(kind: str, recipe: str, kept: set[str]) -> None:
    refused = set()
    for i, victim in enumerate(("input", "output gradient")):
        module = FAMILY[kind](delay_wgrad_compute=True)
        backward(module, recipe)[i].zero_()
        try:
            module.backward_dw()
        except RuntimeError:
            refused.add(victim)
    assert refused == kept


def test_a_refused_pass_does_not_hold_back_the_next() -> None:
    module = FAMILY["Linear"](delay_wgrad_compute=True)
    backward(module, "outside")[0].zero_()
    backward(module, "outside")
    with pytest.raises(RuntimeError, match="modified"):
        module.backward_dw()
    module.backward_dw()
    assert module.weight.grad is not None


def test_an_output_gradient_of_inference_mode_is_taken() -> None:
    """It has no version, so nothing can be said of it."""
    module = FAMILY["Linear"](delay_wgrad_compute=True)
    x = torch.randn(ROWS, IN)
    with torch.inference_mode():
        grad = torch.randn(ROWS, OUT)
    module(x).backward(grad)
    module.backward_dw()
    torch.testing.assert_close(module.weight.grad, grad.T @ x)

"""Normalized layers, MLPs and layers of several formats on a Hopper GPU, each one native call each
way: the bits of one step after the other."""

from __future__ import annotations

import pytest
import torch
from one_call import RECIPES, check

import te_mx

BF16 = torch.bfloat16
LAYERS = {
    "Linear": lambda **made: te_mx.Linear(320, 264, **made),
    "LayerNormLinear": lambda **made: te_mx.LayerNormLinear(320, 264, **made),
    "gelu": lambda **made: te_mx.LayerNormMLP(320, 264, **made),
    "swiglu": lambda **made: te_mx.LayerNormMLP(
        320, 392, activation="swiglu", normalization="RMSNorm", bias=False, **made
    ),
}  # fmt: skip
# Those of te_mx.Linear in one format: test_sm90_linear_one_call.py.
CASES = [
    (name, recipe)
    for name in LAYERS
    for recipe in RECIPES
    if name != "Linear" or recipe.startswith("mxfp4")
] + [(name, "nvfp4") for name in LAYERS if name != "gelu"]


@pytest.mark.parametrize("trained", [{}, {"fuse_wgrad_accumulation": True}], ids=str)
@pytest.mark.parametrize("name, recipe", CASES)
def test_bits_of_one_step_after_the_other(name, recipe, trained, monkeypatch):
    torch.manual_seed(0)
    layer = LAYERS[name](dtype=BF16, device="cuda", **trained)
    # Products of NVFP4 divide by 8, and have no GELU.
    rows = 64 if recipe == "nvfp4" else 67
    x = torch.randn(3, rows, 320, dtype=BF16, device="cuda").requires_grad_()
    steps = "LinearFunctionBackward" if name == "Linear" else "LayerFunctionBackward"
    check(layer, x, recipe, monkeypatch, (None, True, False), steps)

"""Recipe fields and training knobs of te_mx.Linear on Hopper, against the public functions, plain
torch and the layer without the knob.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from test_knobs_linear import wide_wgrad
from test_knobs_recipe import ALL, HIGH, HP_WGRAD, PLAIN, assert_same, by_hand, run

import te_mx

SHAPES = ((77, 96, 130), (256, 384, 128))  # tokens, in features, out features
DTYPES = [torch.bfloat16, torch.float32]


def case(m, k, n, dtype, **kwargs):
    torch.manual_seed(1)
    layer = te_mx.Linear(k, n, device="cuda", dtype=dtype, **kwargs)
    x = torch.randn(m, k, device="cuda", dtype=dtype)
    return layer, x, torch.randn(m, n, device="cuda", dtype=dtype)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("recipe", ALL, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_are_what_the_recipe_says(shape, recipe, dtype):
    layer, x, grad = case(*shape, dtype)
    got = run(layer, x, grad, recipe)
    for mine, expected in zip(got[1:3], by_hand(layer, x, grad, recipe), strict=True):
        assert torch.equal(mine, expected.to(mine.dtype))
    plain = run(layer, x, grad, dataclasses.replace(PLAIN, scale_rule=recipe.scale_rule))
    torch.testing.assert_close(got[0], plain[0], rtol=0, atol=0)  # fprop does not depend on it
    for first in (True, False):
        assert_same(run(layer, x, grad, recipe, is_first_microbatch=first), got)


@pytest.mark.parametrize("recipe", [PLAIN, HIGH, HP_WGRAD], ids=str)
@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_main_grad(recipe, delay, dtype):
    """fp32 sums of bf16 operands reach main_grad without a rounding on the way."""
    layer, x, grad = case(
        *SHAPES[0], dtype, fuse_wgrad_accumulation=True, delay_wgrad_compute=delay
    )  # fmt: skip
    layer.weight.main_grad = torch.zeros_like(layer.weight, dtype=torch.float32)
    expected = wide_wgrad(layer, x, grad, recipe)
    for step in (1, 2):
        run(layer, x, grad, recipe)
        if delay:
            layer.backward_dw()
        torch.testing.assert_close(layer.weight.main_grad, step * expected, rtol=1e-5, atol=1e-4)
    assert layer.weight.grad is None


@pytest.mark.parametrize("recipe", [PLAIN, *ALL], ids=str)
@pytest.mark.parametrize("knob", ["delay_wgrad_compute", "save_original_input"])
def test_knobs_that_change_no_bit(recipe, knob):
    plain, x, grad = case(*SHAPES[0], torch.bfloat16)
    layer, *_ = case(*SHAPES[0], torch.bfloat16, **{knob: True})
    layer.load_state_dict(plain.state_dict())
    expected, got = run(plain, x, grad, recipe), run(layer, x, grad, recipe)
    assert_same(got[:2], expected[:2])
    layer.backward_dw()
    assert torch.equal(layer.weight.grad, plain.weight.grad)

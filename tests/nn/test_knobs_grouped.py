"""Transformer Engine's training knobs on GroupedLinear: the plain path's bits."""

from __future__ import annotations

import pytest
import torch
from grouped_cases import assert_same_as_loop, equal, loop_of, parameters

import te_mx

pytestmark = pytest.mark.filterwarnings("ignore::te_mx.FallbackWarning")  # NVFP4 on the CPU

SPLITS = [20, 0, 33]


def pair(stacked: bool, **knobs: bool) -> tuple[te_mx.GroupedLinear, te_mx.GroupedLinear]:
    made = [
        te_mx.GroupedLinear(3, 64, 48, dtype=torch.bfloat16, single_grouped_weight=stacked, **more)
        for more in ({}, knobs)
    ]
    made[1].load_state_dict(made[0].state_dict())
    return made[0], made[1]


def step(layer: te_mx.GroupedLinear, seed: int = 0, **options: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(60, 64, generator=generator).bfloat16().requires_grad_()
    with te_mx.autocast():
        y = layer(x, SPLITS, **options)
    y.backward(torch.randn(y.shape, generator=generator).bfloat16())
    return x.grad


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("knob", ["save_original_input", "delay_wgrad_compute"])
def test_same_bits_as_the_plain_path(stacked: bool, knob: str) -> None:
    plain, other = pair(stacked, **{knob: True})
    for seed in range(2):
        equal(step(other, seed), step(plain, seed))
        if knob == "delay_wgrad_compute":
            other.backward_dw()
    for kind in ("weight.grad", "bias.grad"):
        equal(parameters(other, kind), parameters(plain, kind))


@pytest.mark.parametrize("stacked", [False, True])
def test_main_grad(stacked: bool) -> None:
    plain, other = pair(stacked, fuse_wgrad_accumulation=True)
    plain = plain.float()  # its gradients are what the GEMM makes in fp32
    weights = [p for n, p in other.named_parameters() if n.startswith("weight")]
    for p in weights:
        p.main_grad = torch.full(p.shape, 5.0)
    for seed, first in ((0, True), (1, False)):
        step(other, seed, is_first_microbatch=first)
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(60, 64, generator=generator).bfloat16()
        with te_mx.autocast():
            y = plain(x, SPLITS)
        y.backward(torch.randn(y.shape, generator=generator).bfloat16())
        made = [p.main_grad for p in weights]
        got = made[0] if stacked else torch.stack(made)
        torch.testing.assert_close(got, parameters(plain, "weight.grad"), rtol=1e-6, atol=1e-6)
    assert all(p.grad is None for p in weights)


@pytest.mark.parametrize("options", [
    {"backward_override": "high_precision"}, {"backward_override": "dequantized"},
    {"wgrad_with_hp": True}, {"one_copy_weights": True},
])  # fmt: skip
def test_recipes_with_another_backward_are_a_loop(options: dict) -> None:
    layer = te_mx.GroupedLinear(3, 64, 48, dtype=torch.bfloat16)
    x = torch.randn(60, 64, dtype=torch.bfloat16)
    with te_mx.autocast(recipe=te_mx.recipe.MXFP8BlockScaling(**options)):
        assert_same_as_loop(layer, loop_of(layer), x, SPLITS)

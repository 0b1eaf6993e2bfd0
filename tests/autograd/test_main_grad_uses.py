"""A weight that is used more than once, and backward passes that are for some tensors only: where
the gradients are put (main_grad, backward_dw), and which of them overwrites.
"""

from __future__ import annotations

import gc

import pytest
import torch
from test_knobs_family import FAMILY, IN, RECIPES, ROWS, SPLITS, weights_of
from torch import nn
from torch.utils.checkpoint import checkpoint

import te_mx

NAN = float("nan")
every = pytest.mark.parametrize("kind", FAMILY)


def pair(kind: str, **knobs) -> tuple[nn.Module, nn.Module]:
    plain, other = (FAMILY[kind](dtype=torch.float32, **o) for o in ({}, knobs))
    other.load_state_dict(plain.state_dict())
    with_main_grads(other)
    return plain, other


def with_main_grads(module: nn.Module) -> nn.Module:
    for weight in weights_of(module).values():
        weight.main_grad = torch.full_like(weight, NAN)
    return module


def call(module: nn.Module, seed: int, first: bool | None = None, recipe: str = "default"):
    """(the sum of what a forward makes, times what tells its uses apart; its input)"""
    x = torch.randn(ROWS, IN, generator=torch.Generator().manual_seed(seed)).requires_grad_()
    args = (x, SPLITS) if isinstance(module, te_mx.GroupedLinear) else (x,)
    with te_mx.autocast(enabled=RECIPES[recipe] is not None, recipe=RECIPES[recipe]):
        y = module(*args, is_first_microbatch=first)
    return (y * torch.cos(torch.arange(y.numel()).view_as(y) * (seed + 1.0))).sum(), x


def assert_main_grads(other: nn.Module, plain: nn.Module) -> None:
    for (name, ours), theirs in zip(
        weights_of(other).items(), weights_of(plain).values(), strict=True
    ):  # fmt: skip
        torch.testing.assert_close(
            ours.main_grad, theirs.grad, rtol=1e-5, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


@every
@pytest.mark.parametrize("recipe", ["default", "outside"])
@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("firsts", [(True, False), (True, True), (False, True), (None, True)])
def test_a_layer_called_twice(kind, recipe, delay, firsts):
    """One of the two gradients overwrites, in every step again."""
    plain, other = pair(kind, fuse_wgrad_accumulation=True, delay_wgrad_compute=delay)
    for start in (0, 2):
        plain.zero_grad()
        for module, flags in ((plain, (None, None)), (other, firsts)):
            losses = [call(module, start + i, flag, recipe)[0] for i, flag in enumerate(flags)]
            sum(losses).backward()
        if delay:
            other.backward_dw()
            other.backward_dw()
        assert_main_grads(other, plain)


@every
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_micro_batches_in_any_order(kind, order):
    plain, other = pair(kind, fuse_wgrad_accumulation=True)
    for module in (plain, other):
        losses = [call(module, i, i == 0 if module is other else None)[0] for i in range(3)]
        for i in order:
            losses[i].backward()
    assert_main_grads(other, plain)


@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("firsts", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("kinds", [("Linear", "Linear"), ("Linear", "LayerNormLinear"),
                                   ("LayerNormLinear", "GroupedLinear")])  # fmt: skip
def test_tied_weights(kinds, firsts, delay):
    """Modules that share a weight; the grouped one has it as one of its weights."""
    made = []
    for knobs in ({}, {"fuse_wgrad_accumulation": True, "delay_wgrad_compute": delay}):
        torch.manual_seed(3)
        modules = [FAMILY[kind](dtype=torch.float32, **knobs) for kind in kinds]
        name = "weight0" if kinds[1] == "GroupedLinear" else "weight"
        setattr(modules[1], name, modules[0].weight)
        made.append(nn.ModuleList(modules))
    plain, other = made
    with_main_grads(other)
    for weight in weights_of(other[1]).values() if not firsts[1] else ():
        if weight is not other[0].weight:
            weight.main_grad.zero_()  # nobody asks for it to be overwritten
    for modules, flags in ((plain, (None, None)), (other, firsts)):
        calls = enumerate(zip(modules, flags, strict=True))
        sum(call(module, i, first)[0] for i, (module, first) in calls).backward()
    for module in other if delay else ():
        module.backward_dw()
    assert_main_grads(other, plain)


def test_experts_that_share_a_weight():
    """One launch cannot add to one main_grad twice."""
    plain, other = pair("GroupedLinear", fuse_wgrad_accumulation=True)
    for module in (plain, other):
        module.weight2 = module.weight0
        with torch.no_grad():
            module.weight1.copy_(plain.weight1)
            module.weight0.copy_(plain.weight0)
        call(module, 0, True if module is other else None)[0].backward()
        call(module, 1, False if module is other else None)[0].backward()
    assert_main_grads(other, plain)


@every
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("firsts", [(True, False), (True, True)])
def test_recomputed_uses(kind, reentrant, firsts):
    """What a checkpoint runs again asks for nothing more."""
    plain, other = pair(kind, fuse_wgrad_accumulation=True)
    for start in (0, 2):
        plain.zero_grad()
        sum(call(plain, start + i)[0] for i in range(2)).backward()
        on = torch.zeros((), requires_grad=True)  # reentrant ones need an input that trains

        def run(on, seed, first):
            return call(other, seed, first)[0] + on

        losses = [
            checkpoint(run, on, start + i, first, use_reentrant=reentrant)
            for i, first in enumerate(firsts)
        ]
        with te_mx.autocast():
            sum(losses).backward()
        assert_main_grads(other, plain)


@every
@pytest.mark.parametrize("delay", [False, True])
def test_overwrite_main_grad_of_a_layer_called_twice(kind, delay):
    """Each backward pass overwrites once."""
    plain, other = pair(kind, fuse_wgrad_accumulation=True, delay_wgrad_compute=delay)
    for weight in weights_of(other).values():
        weight.overwrite_main_grad = True
    for start in (0, 2):
        plain.zero_grad()
        for module in (plain, other):
            (call(module, start)[0] + call(module, start + 1)[0]).backward()
        if delay:
            other.backward_dw()
            other.backward_dw()
        assert_main_grads(other, plain)


def test_a_first_forward_that_nothing_goes_back_through():
    """It asks for nothing once its graph is gone."""
    plain, other = pair("Linear", fuse_wgrad_accumulation=True)
    other.weight.main_grad.zero_()
    call(other, 0, True)
    with torch.no_grad():
        call(other, 0, True)
    gc.collect()
    for seed in range(2):
        call(other, seed)[0].backward()
        call(plain, seed)[0].backward()
    assert_main_grads(other, plain)


# ------------------------------------------------------- backward passes for some tensors only
@every
@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("delay", [False, True])
def test_input_part_and_weight_part(kind, marked, fuse, delay):
    """As zero-bubble pipelines go back: once for the input, once for the parameters."""
    plain, other = pair(kind, fuse_wgrad_accumulation=fuse, delay_wgrad_compute=delay)
    weights = list(weights_of(other).values())
    for weight in weights:
        weight.main_grad.zero_()
        if marked:
            weight.grad_added_to_main_grad, weight.zero_out_wgrad = False, True
    loss, x = call(plain, 0)
    loss.backward()
    loss, ours = call(other, 0)
    (dx,) = torch.autograd.grad(loss, ours, retain_graph=True)
    assert torch.equal(dx, x.grad)
    assert not any(weight.main_grad.any() for weight in weights)
    assert not other.need_backward_dw() or not other._delayed
    trained = list(other.parameters())
    grads = torch.autograd.grad(loss, trained)
    for parameter, theirs, grad in zip(trained, plain.parameters(), grads, strict=True):
        parameter.grad = grad
        if any(parameter is weight for weight in weights) and (fuse or delay):
            assert grad.shape == parameter.shape and not grad.any()
        else:
            assert torch.equal(grad, theirs.grad)
    if delay:
        other.backward_dw()
        with pytest.raises(RuntimeError, match="no weight gradient is waiting"):
            other.backward_dw()
    for weight, theirs in zip(weights, weights_of(plain).values(), strict=True):
        got = weight.main_grad if fuse else weight.grad
        torch.testing.assert_close(got, theirs.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("kind", ["LayerNormMLP", "GroupedLinear"])
def test_backward_for_one_weight_of_several(kind, delay):
    plain, other = pair(kind, fuse_wgrad_accumulation=True, delay_wgrad_compute=delay)
    for weight in weights_of(other).values():
        weight.main_grad.zero_()
    call(plain, 0)[0].backward()
    for i, (weight, theirs) in enumerate(
        zip(weights_of(other).values(), weights_of(plain).values(), strict=True)
    ):
        call(other, 0)[0].backward(inputs=[weight])
        if delay:
            other.backward_dw()
        torch.testing.assert_close(weight.main_grad, theirs.grad, rtol=1e-5, atol=1e-5)
        assert not any(w.main_grad.any() for w in list(weights_of(other).values())[i + 1 :])

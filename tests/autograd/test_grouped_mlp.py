"""Experts as one autograd function: the bits of two grouped linear layers and an activation."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from as_on_hopper import hide_splits, hopper_with_groups
from torch import Tensor

import te_mx
from te_mx.autograd.activation import activation
from te_mx.autograd.grouped import GroupedCall, grouped_linear, grouped_mlp, runs
from te_mx.autograd.routing import route, take_rows
from te_mx.dispatch.fused import Activation
from te_mx.recipe import DeepSeekV3, Float8BlockScaling, MXFP4BlockScaling, MXFP8BlockScaling

RECIPES = {
    "mxfp8": MXFP8BlockScaling(),
    "one_copy": MXFP8BlockScaling(one_copy_weights=True),
    "float8_block": Float8BlockScaling(),
    "deepseek_v3": DeepSeekV3(),
    "mxfp4": MXFP4BlockScaling(),
    "mxfp4_all": MXFP4BlockScaling(g="mxfp4"),
}
ENDS = torch.tensor([40, 40, 173])
ROWS, K, INNER, N = 180, 72, 136, 40


def layers(stacked: bool, bias: bool) -> list[list[Tensor]]:
    """The parameters of both."""
    torch.manual_seed(1)
    made = []
    for n, k in ((2 * INNER, K), (N, INNER)):
        own = [torch.randn(3, n, k) / 8] + [torch.randn(3, n)] * bias
        made.append(own if stacked else [one for part in own for one in part])
    return [[part.bfloat16().requires_grad_() for part in own] for own in made]


def step(fused: bool, recipe, parts, wanted: str) -> list[Tensor]:
    """y, and gradients of what is wanted: the input, the first layer, the second, by a letter. With
    a t the input is tokens, of two rows each."""
    torch.manual_seed(2)
    to = route(torch.randint(4, (ROWS // 2, 2)), 3) if "t" in wanted else None
    ends = ENDS if to is None else to.offs
    x = torch.randn(ROWS if to is None else ROWS // 2, K).bfloat16().requires_grad_("x" in wanted)
    for own, letter in zip(parts, "12", strict=True):
        for part in own:
            part.requires_grad_(letter in wanted)
    bias = parts[1][-1].dim() < parts[1][0].dim()
    call = GroupedCall(0, recipe._settings, torch.bfloat16, bias)
    act = Activation("swiglu")
    if fused:
        assert runs((call, call), x, parts[0])
        y = grouped_mlp(x, ends, (call, call), act, tuple(parts), to)
    else:
        rows = x if to is None else take_rows(x, to)
        h = activation(grouped_linear(rows, ends, parts[0], call), act)
        y = grouped_linear(h, ends, parts[1], call)
    leaves = [one for one in (x, *parts[0], *parts[1]) if one.requires_grad]
    grads = torch.autograd.grad(y, leaves, torch.randn(y.shape).bfloat16()) if leaves else ()
    return [y.detach(), *grads]


@pytest.mark.parametrize("wanted", ["tx12", "x12", "x", "t1", "2", "12", ""])
@pytest.mark.parametrize("recipe", list(RECIPES))
@pytest.mark.parametrize("where", ["cpu", "hopper"])
def test_one_function_has_the_bits_of_three(where, recipe, wanted, threads):
    threads(1)
    on_hopper = hopper_with_groups() if where == "hopper" else nullcontext([])
    stacked, bias = wanted != "12", wanted in ("tx12", "2", "12")
    with on_hopper as calls:
        parts = layers(stacked, bias)
        want = step(False, RECIPES[recipe], parts, wanted)
        calls.clear()
        got = step(True, RECIPES[recipe], parts, wanted)
        launches = calls.count("activate_grouped")
    assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))
    if where == "hopper":
        dh = any(letter in wanted for letter in "x1")
        # Columns of a are made again of h, where that is kept. Formats that differ by direction,
        # and random ones, take a launch of their own.
        again = dh and "2" in wanted
        apart = {"mxfp4": wanted == "2", "mxfp4_all": dh + again + (wanted == "2")}.get(recipe, 0)
        assert launches == 1 + dh + again - apart


def test_where_the_device_knows_the_splits(threads, monkeypatch, recwarn):
    threads(1)
    with hopper_with_groups():
        parts = layers(True, True)
        want = step(True, RECIPES["float8_block"], parts, "x12")
        hide_splits(monkeypatch)
        got = step(True, RECIPES["float8_block"], parts, "x12")
    assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))
    assert not [w for w in recwarn if issubclass(w.category, te_mx.FallbackWarning)]


@pytest.mark.parametrize("slots", [1, 2])
def test_what_backward_keeps(slots):
    """h, and tokens in place of the codes of their rows where these are more."""
    parts, kept = layers(True, False), []
    call = GroupedCall(0, RECIPES["mxfp8"]._settings, torch.bfloat16, False)
    x, to = torch.randn(64, K).bfloat16(), route(torch.randint(3, (64, slots)), 3)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        grouped_mlp(x, to.offs, (call, call), Activation("swiglu"), tuple(parts), to)
    wide = [t.shape for t in kept if t.dtype == torch.bfloat16 and t.dim() == 2]
    assert wide == [(64, K)] * (slots == 2) + [(64 * slots, 2 * INNER)]
    assert any(t.dtype == torch.uint8 for t in kept) == (slots == 1)


def test_what_takes_steps_of_its_own():
    parts, x = layers(True, True), torch.randn(ROWS, K)
    for fields in ({"wgrad_with_hp": True}, {"backward_override": "dequantized"}):
        call = GroupedCall(0, MXFP8BlockScaling(**fields)._settings, torch.bfloat16, True)
        assert not runs((call, call), x, parts[0])
    call = GroupedCall(0, RECIPES["mxfp8"]._settings, torch.bfloat16, True)
    assert runs((call, call), x, parts[0])
    parts[0][0].requires_grad_(False)  # and of the first layer the bias alone
    assert not runs((call, call), x, parts[0])
    with torch.no_grad():
        assert runs((call, call), x, parts[0])

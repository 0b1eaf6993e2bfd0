"""Input gradients of layers that read one tensor add up in their GEMMs: the same sum, whatever part
of the graph a backward pass runs, and how often."""

from __future__ import annotations

import pytest
import torch
from input_cache_cases import together
from sibling_cases import ALL, BF16, F32, PATHS, Apart, given, qkv, run, running, upstream
from torch.utils.checkpoint import checkpoint

import te_mx
from te_mx.autograd.input_cache import Siblings
from te_mx.recipe import Float8BlockScaling, Format, MXFP4BlockScaling, MXFP8BlockScaling


@pytest.fixture(params=PATHS)
def path(request, threads):
    threads(1)
    with running(request.param):
        yield request.param


@pytest.fixture
def passes(monkeypatch):
    """How many layers were still to come in each backward of one, None where it was alone."""
    seen = []
    enter = Siblings.enter

    def noted(self):
        found = enter(self)
        seen.append(None if found is None else found.left)
        return found

    monkeypatch.setattr(Siblings, "enter", noted)
    return seen


RECIPES = [
    MXFP8BlockScaling(fp8_format=Format.HYBRID, scale_rule="floor"),
    MXFP8BlockScaling(keep_weight_columns=True),
    MXFP8BlockScaling(backward_override="high_precision"),
    MXFP8BlockScaling(backward_override="dequantized"),
    MXFP4BlockScaling(),
    Float8BlockScaling(),
    Float8BlockScaling(use_f32_scales=True, one_copy_weights=True),
]


def check_step(layers, dtype, recipe=None):
    apart, x = Apart(layers, dtype, recipe), given(dtype).requires_grad_()
    outputs = run(layers, x, recipe)
    torch.autograd.backward(outputs, upstream(outputs))
    assert apart.is_sum(x.grad)
    for layer, wanted in zip(layers, apart.held, strict=True):
        for parameter, grad in zip(layer.parameters(), wanted, strict=True):
            assert torch.equal(parameter.grad, grad)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_the_sum_and_the_bits_of_all_others(path, dtype, passes):
    check_step(qkv(dtype, path), dtype)
    assert [left for left in passes if left is not None] == [2, 1, 0]


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_under_every_recipe(recipe, passes):
    check_step(qkv(), F32, recipe)
    assert passes[-3:] == [2, 1, 0]


class Stops(torch.autograd.Function):
    """Passes no gradient on."""

    @staticmethod
    def forward(ctx, y):
        return y * 1

    @staticmethod
    def backward(ctx, g):
        return None


SOME = [(0,), (1,), (2,), (0, 2)]


@pytest.mark.parametrize(
    ("how", "without"),
    [("undefined", ALL), *((h, s) for h in ("unused", "undefined") for s in SOME)],
)
def test_layers_without_a_gradient(path, how, without, passes):
    layers = qkv(path=path)
    apart, x = Apart(layers), given().requires_grad_()
    passes.clear()
    outputs = run(layers, x)
    g = upstream(outputs)
    if how == "unused":
        pairs = [(outputs[i], g[i]) for i in ALL if i not in without]
    else:
        pairs = [(Stops.apply(outputs[i]) if i in without else outputs[i], g[i]) for i in ALL]
    torch.autograd.backward(*zip(*pairs, strict=True))
    rest = [i for i in ALL if i not in without]
    assert (x.grad is None) if not rest else apart.is_sum(x.grad, rest)
    for i, (layer, wanted) in enumerate(zip(layers, apart.held, strict=True)):
        got = [p.grad for p in layer.parameters()]
        if i in without:
            assert got == [None] * len(got)
        else:
            assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    runs = len(rest) if how == "unused" else 3
    assert [p for p in passes if p is not None] == (list(range(runs))[::-1] if runs > 1 else [])


def test_gradients_of_some_inputs(path, passes):
    layers = qkv(path=path)
    apart, x = Apart(layers), given().requires_grad_()
    passes.clear()
    h = x * 1
    outputs = run(layers, h)
    g = upstream(outputs)

    def of(*inputs, some=ALL):
        passes.clear()
        chosen = [outputs[i] for i in some], inputs, [g[i] for i in some]
        return torch.autograd.grad(*chosen, retain_graph=True)

    both = torch.autograd.grad(outputs, (x, h), g, retain_graph=True)
    assert apart.is_sum(both[0]) and torch.equal(*both)
    assert torch.equal(*of(x), both[0]) and passes == [2, 1, 0]
    weight = layers[1].weight
    assert torch.equal(*of(weight), apart.held[1][0]) and passes == [None]
    dw, dy = of(weight, outputs[2])
    assert torch.equal(dw, apart.held[1][0]) and torch.equal(dy, g[2])
    dx, dy, dw = of(h, outputs[0], weight)
    assert torch.equal(dx, both[0]) and torch.equal(dy, g[0])
    assert torch.equal(dw, apart.held[1][0])
    # Two graphs that share a layer, and one of a single layer.
    assert apart.is_sum(*of(x, some=(0, 1)), (0, 1)) and passes == [1, 0]
    assert apart.is_sum(*of(x, some=(1, 2)), (1, 2)) and passes == [1, 0]
    assert apart.is_sum(*of(x, some=(1,)), (1,)) and passes == [None]


def test_create_graph_gives_histories_and_changes_nothing_for_later_passes(path, passes):
    layers = qkv(path=path)
    apart, x = Apart(layers), given().requires_grad_()
    outputs = run(layers, x)
    g, inputs = upstream(outputs), [x, layers[0].weight]
    passes.clear()
    first = torch.autograd.grad(outputs, inputs, g, retain_graph=True)
    assert passes == [2, 1, 0]
    passes.clear()
    with_history = torch.autograd.grad(outputs, inputs, g, create_graph=True)
    assert set(passes) == {None} and apart.is_sum(with_history[0])
    assert torch.equal(with_history[1], first[1])
    for grad in with_history:
        with pytest.raises(RuntimeError, match="differentiate twice"):
            torch.autograd.grad(grad.sum(), x, retain_graph=True)
    again = torch.autograd.grad(outputs, inputs, g, retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed(path, reentrant):
    layers = qkv(path=path)

    def step(call):
        layers.zero_grad()
        x = given().requires_grad_()
        with te_mx.autocast():
            outputs = call(lambda x: tuple(together(layers, x)), x * 1)
        torch.autograd.backward(outputs, upstream(outputs))
        return [x.grad, *(p.grad for p in layers.parameters())]

    plain = step(lambda fn, x: fn(x))
    again = step(lambda fn, x: checkpoint(fn, x, use_reentrant=reentrant))
    assert all(torch.equal(a, b) for a, b in zip(again, plain, strict=True))

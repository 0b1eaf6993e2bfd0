"""Recomputation runs with the recipe of the call that it repeats, whatever ran since and wherever
the backward pass runs, as it does with torch.autocast; where nobody can know it, it is an error.
"""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch
from families import IN, MODULES, RECIPES, ROWS, layer, region
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import te_mx
from te_mx.context import region as context
from te_mx.context import region as recompute
from te_mx.recipe import MXFP8BlockScaling

FLOOR = MXFP8BlockScaling(scale_rule="floor", fp8_format=te_mx.recipe.Format.HYBRID)
BOTH = pytest.mark.parametrize("reentrant", [True, False])


class Rerun(torch.autograd.Function):
    """Somebody's own checkpointing, of which te_mx knows nothing."""

    @staticmethod
    def forward(ctx, fn, x):
        ctx.fn = fn
        ctx.save_for_backward(x)
        with torch.no_grad():
            return fn(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.fn(x)
        torch.autograd.backward(y, grad)
        return None, x.grad


def backward(y: Tensor, x: Tensor, module: nn.Module) -> list[Tensor]:
    x.grad = None
    module.zero_grad()
    y.square().sum().backward()
    return [x.grad, *(p.grad.clone() for p in module.parameters())]


def same(got: list[Tensor], wanted: list[Tensor]) -> bool:
    return all(torch.equal(g, w) for g, w in zip(got, wanted, strict=True))


def leaf() -> Tensor:
    return torch.randn(ROWS, IN, requires_grad=True)


@BOTH
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("family", MODULES)
def test_the_recipe_of_the_call(family, recipe, reentrant):
    module, x = layer(family), leaf()
    with region(recipe):
        wanted = backward(module(x), x, module)
        y = checkpoint(module, x, use_reentrant=reentrant)
    with torch.no_grad():  # what runs meanwhile is another matter
        module(x)
        with te_mx.autocast(recipe=FLOOR):
            module(x)
    assert same(backward(y, x, module), wanted)
    with region(recipe):
        y = checkpoint(module, x, use_reentrant=reentrant)
    with te_mx.autocast(recipe=FLOOR):  # neither does a region around the backward pass count
        assert same(backward(y, x, module), wanted)


@BOTH
def test_the_function_of_groups(reentrant):
    weight, x = torch.randn(2, 40, IN, requires_grad=True), leaf()

    def run(x):
        return te_mx.grouped_linear(x, weight, offs=torch.tensor([1, ROWS]))

    def gradients(y):
        x.grad = weight.grad = None
        y.square().sum().backward()
        return [x.grad, weight.grad]

    with te_mx.autocast(recipe=FLOOR):
        wanted = gradients(run(x))
        y = checkpoint(run, x, use_reentrant=reentrant)
    assert same(gradients(y), wanted)


@BOTH
def test_regions_inside_and_checkpoints_inside(reentrant):
    first, second, x = layer("Linear"), te_mx.Linear(40, 40), leaf()
    both = nn.Sequential(first, second)

    def inner(h):
        with te_mx.autocast(recipe=FLOOR):
            return second(h)

    def outer(x, again):
        return again(inner, first(x))

    with te_mx.autocast():
        wanted = backward(outer(x, lambda fn, h: fn(h)), x, both)

        def nested(x):
            return outer(x, lambda fn, h: checkpoint(fn, h, use_reentrant=reentrant))

        y = checkpoint(nested, x, use_reentrant=reentrant)
    assert same(backward(y, x, both), wanted)


@pytest.mark.parametrize(
    ("recipe", "families"),
    [("default", MODULES[:3]), ("one_copy", MODULES[3:]), ("high_precision", MODULES[:1]),
     ("off", MODULES[:1])],
)  # fmt: skip
def test_compiled_layers(recipe, families):
    torch._dynamo.reset()
    module, x = nn.Sequential(*(layer(family, size=IN) for family in families)), leaf()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    for reentrant in (True, False):
        with region(recipe):
            wanted = backward(module(x), x, module)
            y = checkpoint(compiled, x, use_reentrant=reentrant)
        with torch.no_grad(), te_mx.autocast(recipe=FLOOR):
            module(x)
        assert same(backward(y, x, module), wanted)
    torch._dynamo.reset()


def test_every_entry_to_checkpointing():
    from torch.distributed._composable import checkpoint as composable
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    def by_segments(module, x):
        return checkpoint_sequential(nn.Sequential(module, nn.Identity()), 2, x, use_reentrant=True)

    module, x = layer("Linear"), leaf()
    for entry in (
        lambda module: lambda x: checkpoint_wrapper(module)(x),
        lambda module: composable(copy.deepcopy(module)),
        lambda module: lambda x: by_segments(module, x),
        lambda module: lambda x: torch.utils.checkpoint.CheckpointFunction.apply(module, True, x),
    ):
        made = entry(module)
        with te_mx.autocast(recipe=FLOOR):
            (wanted,) = torch.autograd.grad(module(x).square().sum(), x)
            y = made(x)
        with torch.no_grad():
            module(x), made(x)
        x.grad = None
        y.square().sum().backward()
        assert torch.equal(x.grad, wanted)


@BOTH
def test_threads_that_share_a_layer(reentrant):
    module, wrong = layer("Linear").requires_grad_(False), []
    recipes = list(RECIPES)[:4]
    wanted, inputs, start = {}, {}, threading.Barrier(len(recipes))
    for recipe in recipes:
        x = inputs[recipe] = leaf()
        with region(recipe):
            (wanted[recipe],) = torch.autograd.grad(module(x).square().sum(), x)

    def work(recipe):
        start.wait()
        for _ in range(20):
            x = inputs[recipe].detach().requires_grad_()
            with region(recipe):
                y = checkpoint(module, x, use_reentrant=reentrant)
            y.square().sum().backward()
            if not torch.equal(x.grad, wanted[recipe]):
                wrong.append(recipe)

    threads = [threading.Thread(target=work, args=(recipe,)) for recipe in recipes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# ------------------------------------------------------------------- code that te_mx does not know
def test_other_recomputation_of_a_layer_that_ran_with_one_recipe():
    for recipe in ("default", "high_precision", "off"):
        module, x = layer("LayerNormLinear"), leaf()
        with region(recipe):
            wanted = backward(module(x), x, module)
            y = Rerun.apply(module, x)
        assert same(backward(y, x, module), wanted)


@pytest.mark.parametrize("family", MODULES)
def test_other_recomputation_of_a_layer_that_ran_with_several(family):
    module, x = layer(family), leaf()
    with te_mx.autocast():
        wanted = backward(module(x), x, module)
        y = Rerun.apply(module, x)
    with torch.no_grad():
        module(x)
    with pytest.raises(RuntimeError, match=rf"te_mx.{family}\(.*enter te_mx.autocast inside"):
        backward(y, x, module)
    assert te_mx.audit(module).layers[0].fprop == "high precision"  # what ran last

    def entered(x):  # the remedy
        with te_mx.autocast():
            return module(x)

    assert same(backward(Rerun.apply(entered, x), x, module), wanted)
    fresh = pickle.loads(pickle.dumps(module))  # has run with nothing yet
    with te_mx.autocast():
        y = Rerun.apply(fresh, x)
    assert same(backward(y, x, fresh), wanted)


def test_other_recomputation_of_what_keeps_no_record():
    """Compiled code and functions note nothing of what they ran with."""
    torch._dynamo.reset()
    module, x = layer("Linear"), leaf()
    weight = torch.randn(2, 40, IN, requires_grad=True)
    compiled = torch.compile(module, backend="aot_eager")

    def function(x):
        return te_mx.grouped_linear(x, weight, offs=torch.tensor([1, ROWS]))

    for run in (compiled, function):
        with te_mx.autocast(recipe=FLOOR):
            y = Rerun.apply(run, x)
        with pytest.raises(RuntimeError, match=r"enter te_mx\.autocast inside"):
            backward(y, x, module)
    torch._dynamo.reset()


def test_functions_that_are_part_of_a_backward_pass():
    """grouped_linear and grouped_wgrad are what backward passes of mixtures are written with."""
    weight, offs = torch.randn(2, 40, IN), torch.tensor([1, ROWS])

    class Experts(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return te_mx.grouped_linear(x, weight, offs=offs)

        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            dx = te_mx.grouped_linear(grad, weight.transpose(1, 2), offs=offs)
            return dx, te_mx.grouped_wgrad(grad, x, offs)

    x, w = leaf(), weight.clone().requires_grad_()
    with te_mx.autocast():
        y = Experts.apply(x, w)
    y.sum().backward()
    assert x.grad.abs().sum() > 0 and w.grad.abs().sum() > 0


def test_another_torch_is_left_alone(monkeypatch):
    def forward(ctx, function, preserve, *args): ...
    def init(self, frames): ...

    class Function:
        pass

    class Frame:
        __init__ = init

    Function.forward = staticmethod(forward)
    monkeypatch.setattr(torch.utils.checkpoint, "CheckpointFunction", Function)
    monkeypatch.setattr(torch.utils.checkpoint, "_CheckpointFrame", Frame)
    recompute.install()
    assert Function.forward is forward and Frame.__init__ is init
    monkeypatch.delattr(torch.utils.checkpoint, "_CheckpointFrame")
    recompute.install()


def test_regions_that_are_bound_leave_nothing_behind():
    def fails():
        with te_mx.autocast():
            raise KeyError("inside")

    with te_mx.autocast(recipe=FLOOR):
        run, outside = recompute.bound(context.current_recipe), recompute.bound(fails)
    assert run() == FLOOR and context.current_recipe() is None
    with pytest.raises(KeyError):
        outside()
    assert context.current_recipe() is None
    off = recompute.bound(context.current_recipe)
    with te_mx.autocast():
        assert off() is None and context.current_recipe() == MXFP8BlockScaling()

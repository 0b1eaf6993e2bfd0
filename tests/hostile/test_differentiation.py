"""Whatever way somebody differentiates a layer, the result is that of the plain layer, within what
MXFP8 rounds, or an error that says who raises it and what to do. It is never a wrong number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from families import FAMILIES, IN, MODULES, OUT, RECIPES, ROWS, in_region, layer, region
from torch import Tensor, nn
from torch.autograd import functional
from torch.utils.checkpoint import checkpoint

Run = Callable[[Tensor], Tensor]
Way = Callable[[Run, list[Tensor], Tensor], Any]
NEAR = 0.15  # relative error of whole gradients in MXFP8, which is 0.05; of one left out it is 1
WITHIN = [name for name in RECIPES if name != "mxfp4"]  # whose forward rounds more


def flat(results: Any) -> list[Tensor]:
    """The tensors of nested results; gradients that do not exist are 0."""
    if isinstance(results, tuple | list):
        return [tensor for result in results for tensor in flat(result)]
    return [torch.zeros(()) if results is None else results.detach()]


def near(got: list[Tensor], wanted: list[Tensor]) -> bool:
    return len(got) == len(wanted) and all(
        (g - w).double().norm() <= NEAR * w.double().norm()
        for g, w in zip(got, wanted, strict=True)
    )


def loss_of(run: Run) -> Run:
    return lambda x: run(x).square().sum()


# ---------------------------------------------------------------------- first derivatives
def with_backward(run: Run, weights: list[Tensor], x: Tensor) -> Any:
    for weight in weights:
        weight.grad = None
    z = x.clone().requires_grad_()
    loss_of(run)(z).backward()
    return z.grad, [weight.grad for weight in weights]


def with_grad(run: Run, weights: list[Tensor], x: Tensor, **arguments: Any) -> Any:
    z = x.clone().requires_grad_()
    first, *rest = torch.autograd.grad(loss_of(run)(z), [z, *weights], **arguments)
    return first, rest


def with_a_graph(run: Run, weights: list[Tensor], x: Tensor) -> Any:
    return with_grad(run, weights, x, create_graph=True)


def with_vjp(run: Run, weights: list[Tensor], x: Tensor) -> Any:
    return functional.vjp(loss_of(run), x)[1], with_grad(run, weights, x)[1]


def with_inplace_operators(run: Run, weights: list[Tensor], x: Tensor) -> Any:
    return with_grad(lambda z: run(z).mul_(2).mul_(0.5), weights, x)


def with_leading_dimensions(run: Run, weights: list[Tensor], x: Tensor) -> Any:
    return with_grad(lambda z: run(z.view(ROWS, 1, IN)).add_(0), weights, x)


def with_moved_tensors(run: Run, weights: list[Tensor], x: Tensor) -> Any:
    with torch.autograd.graph.save_on_cpu():
        return with_grad(run, weights, x)


def with_checkpoint(run: Run, weights: list[Tensor], x: Tensor) -> Any:
    return with_grad(lambda z: checkpoint(run, z, use_reentrant=False), weights, x)


def with_old_checkpoint(run: Run, weights: list[Tensor], x: Tensor) -> Any:
    return with_backward(lambda z: checkpoint(run, z, use_reentrant=True), weights, x)


FIRST_ORDER: list[Way] = [
    with_grad, with_a_graph, with_vjp, with_inplace_operators, with_leading_dimensions,
    with_moved_tensors, with_checkpoint, with_old_checkpoint,
]  # fmt: skip


@pytest.mark.parametrize("recipe", WITHIN)
@pytest.mark.parametrize("family", FAMILIES)
def test_first_derivatives_are_those_of_backward(family, recipe):
    module, x = layer(family), torch.randn(ROWS, IN)
    run, weights = in_region(recipe, module), list(module.parameters())
    wanted = flat(with_backward(run, weights, x))
    assert near(wanted, flat(with_backward(in_region("off", module), weights, x)))
    for way in FIRST_ORDER:
        if family == "grouped_linear" and way is with_leading_dimensions:
            continue  # it takes matrices
        got = flat(way(run, weights, x))
        assert all(torch.equal(g, w) for g, w in zip(got, wanted, strict=True)), way.__name__


# ----------------------------------------------------------- everything else that torch can ask for
def penalty(run: Run, x: Tensor) -> tuple[Tensor, Tensor]:
    z = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss_of(run)(z), z, create_graph=True)
    return gradient.square().sum(), z


def penalty_for_x(run: Run, weights: list[Tensor], x: Tensor) -> Any:
    return torch.autograd.grad(*penalty(run, x), allow_unused=True)


def penalty_for_weights(run: Run, weights: list[Tensor], x: Tensor) -> Any:
    return torch.autograd.grad(penalty(run, x)[0], weights, allow_unused=True)


def penalty_backward(run: Run, weights: list[Tensor], x: Tensor) -> Any:
    for weight in weights:
        weight.grad = None
    value, z = penalty(run, x)
    value.backward()
    return z.grad, [weight.grad for weight in weights]


def penalty_on_weights(run: Run, weights: list[Tensor], x: Tensor) -> Any:
    """Through the gradients of the weights, of a loss that is linear: nothing else leads to x."""
    z = (x.clone().requires_grad_() * 1.5).sin()
    made = torch.autograd.grad(run(z).sum(), weights, create_graph=True)
    return torch.autograd.grad(sum(g.square().sum() for g in made), z, allow_unused=True)


def grad_of_grad_output(run: Run, weights: list[Tensor], x: Tensor) -> Any:
    y = run(x.clone().requires_grad_())
    v = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).requires_grad_()
    made = torch.autograd.grad(y, weights, v, create_graph=True)
    return torch.autograd.grad(sum(g.square().sum() for g in made), v, allow_unused=True)


def dual_input(run: Run, weights: list[Tensor], x: Tensor) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(run(forward_ad.make_dual(x, x.flip(0)))).tangent


def dual_gradient(run: Run, weights: list[Tensor], x: Tensor) -> Any:
    z = x.clone().requires_grad_()
    y = run(z)
    with forward_ad.dual_level():
        v = forward_ad.make_dual(y.detach(), y.detach().flip(0))
        return forward_ad.unpack_dual(torch.autograd.grad(y, z, v)[0]).tangent


def batched_gradients(run: Run, weights: list[Tensor], x: Tensor) -> Any:
    z = x.clone().requires_grad_()
    y = run(z)
    v = torch.stack([y.detach(), y.detach().flip(0)])
    return torch.autograd.grad(y, z, v, is_grads_batched=True)


def functional_way(name: str, *more: Any, **arguments: Any) -> Way:
    def way(run: Run, weights: list[Tensor], x: Tensor) -> Any:
        return getattr(functional, name)(loss_of(run), x, *more, **arguments)

    way.__name__ = f"functional.{name} {arguments or ''}"
    return way


def func_way(name: str) -> Way:
    def way(run: Run, weights: list[Tensor], x: Tensor) -> Any:
        return getattr(torch.func, name)(loss_of(run))(x)

    way.__name__ = f"func.{name}"
    return way


def func_jvp(run: Run, weights: list[Tensor], x: Tensor) -> Any:
    return torch.func.jvp(run, (x,), (x.flip(0),))


def func_vjp(run: Run, weights: list[Tensor], x: Tensor) -> Any:
    y, pull = torch.func.vjp(run, x)
    return pull(y)


def func_vmap(run: Run, weights: list[Tensor], x: Tensor) -> Any:
    return torch.vmap(run)(torch.stack([x, x.flip(0)]))


ALONG = torch.linspace(-1, 1, ROWS * IN).view(ROWS, IN)
HIGHER: list[Way] = [
    penalty_for_x, penalty_for_weights, penalty_backward, penalty_on_weights, grad_of_grad_output,
    dual_input, dual_gradient, batched_gradients, func_jvp, func_vjp, func_vmap,
    *(functional_way(name, ALONG) for name in ("hvp", "vhp", "jvp")),
    functional_way("hessian"),
    functional_way("hessian", vectorize=True),
    functional_way("jacobian", vectorize=True),
    functional_way("jacobian", vectorize=True, strategy="forward-mode"),
    *(func_way(name) for name in ("grad", "jacrev", "jacfwd", "hessian")),
]  # fmt: skip


def judge(way: Way, run: Run, plain: Run, weights: list[Tensor], x: Tensor) -> str | None:
    """What is wrong with the results of a way, None if nothing is."""
    try:
        got = flat(way(run, weights, x))
    except Exception as error:
        text = str(error)
        known = isinstance(error, RuntimeError) and "te_mx" in text and "enabled=False" in text
        return None if known else f"{way.__name__}: {type(error).__name__}: {text[:200]}"
    wanted = flat(way(plain, weights, x))
    return None if near(got, wanted) else f"{way.__name__}: a wrong result"


@pytest.mark.parametrize("recipe", WITHIN)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_all_other_derivatives_are_right_or_refused(family, recipe):
    module, x = layer(family), torch.randn(ROWS, IN)
    run, plain = in_region(recipe, module), in_region("off", module)
    weights = list(module.parameters())
    found = [judge(way, run, plain, weights, x) for way in HIGHER]
    if recipe != "off":
        module.requires_grad_(False)  # then autograd sees nothing where x needs no gradient
        found += [judge(way, run, plain, [], x) for way in HIGHER[5:]]
    assert [what for what in found if what is not None] == []


@pytest.mark.parametrize("recipe", WITHIN)
def test_a_layer_between_others_breaks_no_path(recipe):
    """The gradient penalty of a critic, for the layers before and behind one in MXFP8."""
    middle = layer("Linear")
    net = nn.Sequential(nn.Linear(IN, IN), nn.Tanh(), middle, nn.Tanh(), nn.Linear(OUT, 1))
    first, last = net[0].weight, net[4].weight
    for wanted in ([first], [last], [first, last]):
        z = torch.randn(ROWS, IN, requires_grad=True)
        with region(recipe):
            out = net(z).sum()
        (gradient,) = torch.autograd.grad(out, z, create_graph=True)
        value = (gradient.norm(dim=1) - 1).square().mean()
        if recipe == "off":
            torch.autograd.grad(value, wanted)
        else:
            with pytest.raises(RuntimeError, match="differentiate twice"):
                torch.autograd.grad(value, wanted)


@pytest.mark.parametrize("arguments", ["fuse_wgrad_accumulation", "delay_wgrad_compute"])
@pytest.mark.parametrize("recipe", WITHIN)
@pytest.mark.parametrize("family", MODULES)
def test_weight_gradients_that_leave_the_graph(family, recipe, arguments):
    """main_grad, and what backward_dw() makes, have no graph: a pass that asks for one stops."""
    module = layer(family, **{arguments: True})
    for parameter in module.parameters():
        parameter.main_grad = torch.zeros_like(parameter)
    z = torch.randn(ROWS, IN, requires_grad=True)
    loss = loss_of(in_region(recipe, module))(z)
    with pytest.raises(NotImplementedError, match=rf"te_mx.{family}\(.*create_graph=True.*without"):
        torch.autograd.grad(loss, z, create_graph=True)
    assert all(not p.main_grad.any() and p.grad is None for p in module.parameters())

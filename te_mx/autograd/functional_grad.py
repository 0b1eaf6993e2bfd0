"""The gradients of torch.func (grad, grad_and_value, vjp) through MXFP8 code, which saves codes
that autograd does not see: one level of them.

Below the level, on plain tensors, the code runs under ordinary autograd, and its graph is kept. So
every function of te_mx has such gradients, with the bits of ``backward()``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from te_mx.autograd import transforms


class _Graph:
    """What a forward left for its backward: outputs with their graph, and the leaves that gradients
    are wanted of. missing: the places of outputs that are None."""

    __slots__ = ("leaves", "missing", "need", "outputs", "owner", "run")

    def __init__(self, owner: str, run: Callable[..., Any], need: list[bool]) -> None:
        self.owner, self.run, self.need = owner, run, need
        self.leaves: list[Tensor] = []
        self.outputs: list[Tensor] = []
        self.missing: list[int] = []


class _Forward(torch.autograd.Function):
    """(graph, *tensors) -> (*outputs, link). The link is empty, and connects what backward returns
    with all that requires grad, so that a second derivative finds the node that refuses it."""

    @staticmethod
    def forward(graph: _Graph, *tensors: Tensor) -> tuple[Tensor, ...]:
        leaves = [t.detach().requires_grad_(on) for t, on in zip(tensors, graph.need, strict=True)]
        with torch.enable_grad():
            made = graph.run(*leaves)
        outputs = (made,) if isinstance(made, Tensor) else made
        graph.outputs = [out for out in outputs if out is not None]
        graph.missing = [i for i, out in enumerate(outputs) if out is None]
        graph.leaves = [leaf for leaf in leaves if leaf.requires_grad]
        shown = [
            out.clone() if any(out is leaf for leaf in leaves) else out for out in graph.outputs
        ]
        return *(out.detach() for out in shown), leaves[0].new_empty(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.graph = inputs[0]
        ctx.save_for_backward(output[-1])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        graph, (link,) = ctx.graph, ctx.saved_tensors
        pairs = zip(grads, graph.outputs, strict=False)  # an output may be a leaf that needs none
        given = [g is not None and out.requires_grad for g, out in pairs]
        if not any(given):
            return None, *(None for _ in graph.need)
        wanted = (g for g, on in zip(grads, given, strict=False) if on)
        found = iter(_Backward.apply(graph, given, link, *wanted))
        return None, *(next(found) if on else None for on in graph.need)


class _Backward(torch.autograd.Function):
    """(graph, which outputs have a gradient, link, *gradients) -> gradients of the leaves."""

    @staticmethod
    def forward(
        graph: _Graph, given: list[bool], link: Tensor, *grads: Tensor
    ) -> tuple[Tensor, ...]:
        outputs = [out for out, on in zip(graph.outputs, given, strict=True) if on]
        # vjp may be called again, so the graph stays as long as its node.
        return torch.autograd.grad(
            outputs, graph.leaves, grads, retain_graph=True, materialize_grads=True
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.owner = inputs[0].owner

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        _refuse(ctx.owner, "a second derivative")

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Any:
        _refuse(ctx.owner, "a tangent of its gradients")

    @staticmethod
    def vmap(info: Any, in_dims: Any, graph: _Graph, *args: Any) -> Any:
        _refuse(graph.owner, "batched gradients (jacrev, vmap)")


def _refuse(owner: str, what: str) -> NoReturn:
    raise NotImplementedError(
        f"{owner}: got {what} through torch.func, but te_mx has plain first derivatives only; "
        f"{transforms.LAYER}"
    )


def differentiable(owner: str, run: Callable[..., Any], tensors: Sequence[Tensor]) -> Any:
    """run(*tensors), a tensor or a tuple of them and None, with gradients for the transform that is
    active. Called where `transforms.one_gradient()`."""
    graph = _Graph(owner, run, [transforms.requires_grad(tensor) for tensor in tensors])
    outputs: list[Any] = list(_Forward.apply(graph, *tensors)[:-1])
    for i in graph.missing:
        outputs.insert(i, None)
    return outputs[0] if len(outputs) == 1 else tuple(outputs)

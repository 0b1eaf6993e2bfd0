"""What the backward passes of all module families share: what is saved, tags, the place of a
weight gradient, and the refusal of a second derivative.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from te_mx.autograd import transforms
from te_mx.autograd.dgrad_accumulation import apart, settled
from te_mx.autograd.wgrad import WeightGradient, Wgrad, refuse_graph


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Whether a backward pass will want the gradient of one of these."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


# Until 2.13 the Python object of a node did not keep the node alive, which pipelines rely on that
# compute gradients of inputs and of weights apart.
_LOSES_NODES = torch.__version__ < "2.13"


def _refuse_split_backward(node_class: Any) -> None:
    """Have nodes of this class refuse such a pipeline, where it begins with a hook."""
    if "register_prehook" in vars(node_class):
        return
    register = node_class.register_prehook

    def register_prehook(self: Any, hook: Any) -> Any:
        if sys._getframe(1).f_globals["__name__"] == "torch.distributed.pipelining._backward":
            raise NotImplementedError(
                "te_mx in a pipeline that computes gradients of inputs and of weights apart "
                "(zero-bubble schedules) needs PyTorch 2.13 or newer: this one "
                f"({torch.__version__}) loses autograd functions in between; use a newer one, or "
                "another schedule, such as Schedule1F1B or ScheduleInterleaved1F1B"
            )
        return register(self, hook)

    node_class.register_prehook = register_prehook


def outputs(ctx: Any, saved: Sequence[Tensor | None], *made: Tensor) -> tuple[Tensor, ...]:
    """What forward of an autograd function returns: `made`, and the link. Keeps `saved` for
    backward.

    The link is an empty tensor that nobody but backward sees: its grad_fn is the node itself. From
    gradients that depend on it, a path leads to all that the node is a function of, see
    `run_backward`. Compiled code refuses second derivatives itself.
    """
    if torch.compiler.is_compiling():
        ctx.linked = False
        ctx.save_for_backward(*saved)
        return made
    if _LOSES_NODES:
        _refuse_split_backward(type(ctx))
    link = torch.empty(0)
    ctx.save_for_backward(*saved, link)
    if len(made) == 1:
        ctx.set_materialize_grads(False)  # or each backward pass makes zeros for the link
    return *made, link


def run_backward(
    backward: Callable[..., tuple[Tensor | None, ...]], owner: str, ctx: Any, *grads: Tensor | None
) -> tuple[Tensor | None, ...]:
    """backward(ctx, saved tensors, *grads), for a forward that returned `outputs`.

    Under create_graph=True the gradients that it returns are right, but theirs must not be silently
    zero: they come from a node that raises and has an edge to each output gradient and, through the
    link, to each input. Whatever way a second derivative takes, it meets an error.
    """
    saved, link = ctx.saved_tensors, None
    if getattr(ctx, "linked", True):
        saved, link, grads = saved[:-1], saved[-1], grads[:-1]
    if grads[0] is None:
        return settled(getattr(ctx, "siblings", None)), *(None,) * (len(ctx.needs_input_grad) - 1)
    if torch.compiler.is_compiling():
        return backward(ctx, saved, *grads)
    transforms.refuse_gradients(owner, grads)
    if not torch.is_grad_enabled():
        return backward(ctx, saved, *grads)
    refuse_graph(ctx.sinks)
    with torch.no_grad(), apart():
        made = backward(ctx, saved, *grads)
    message = (
        f"{owner}: trying to differentiate twice through a quantized linear layer, which has no "
        "second derivative (its backward quantizes the gradient). Run the layers that need a "
        "double backward in high precision: `with te_mx.autocast(enabled=False):` around their "
        "forward"
    )
    through = [g for g in (*made, *grads, link) if g is not None]
    functions: Any = torch._C._functions
    wrapped = iter(functions.DelayedError(message, len(through))(*through))
    return tuple(None if g is None else next(wrapped) for g in made)


def tag_of(first: int, gemm: int) -> int:
    """The slot of a GEMM in LAST_RUN; -1 where nothing is recorded."""
    return first + gemm if first >= 0 else -1


def place(
    sink: WeightGradient | None, wgrad: Wgrad, dtype: torch.dtype, node: Any = None
) -> Tensor | None:
    """Run the wgrad GEMM, or let its sink decide when and where to. node: of the weight in the
    graph, where the caller knows it."""
    return wgrad(None, dtype, False) if sink is None else sink.take(wgrad, dtype, node)

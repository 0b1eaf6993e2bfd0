"""A te_mx.Linear between the hooks that torch's ColwiseParallel and RowwiseParallel put around it,
as one call.

A hook in front makes a DTensor of what the layer takes, the layer one of what it makes, and the
hook behind a plain tensor of that: half of the host time of a layer, for descriptions of tensors
that nobody reads. Once a layer has run so, calls of it that are like the first one go without: what
comes in and what goes out is the same, in bits and in history. Whenever something is not as it was,
and where somebody watches, the module is called as torch calls it.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from te_mx.autograd.linear import Call, linear
from te_mx.context.region import output_dtype
from te_mx.distributed.hooks import given, hooks_of, same_objects
from te_mx.distributed.inputs import local_of
from te_mx.distributed.nodes import Here, here_of, lends, summed
from te_mx.distributed.plans import COLUMN, ROW, Plan
from te_mx.nn.checks import FLOATS
from te_mx.nn.guards import hooked_everywhere

_CALL = "_call_impl"  # what nn.Module.__call__ calls, of the instance first
_WHOLE, _INNER = (Replicate(),), (Shard(-1),)


def remember(module: Any, plan: Plan) -> None:
    """Have later calls of a module that just ran by a plan go this way, where they may."""
    if _CALL in module.__dict__ or not lends(module) or len(plan.way.kinds) != 1:
        return
    if module._parameters["bias"] is not None or not _between(module, plan):
        return
    here = here_of(module._parameters["weight"], plan.grads["weight"])
    if here is not None and plan.settings is not None and _is_usual(module):
        module.__dict__[_CALL] = BetweenHooks(module, plan, here)


def _between(module: Any, plan: Plan) -> bool:
    """Whether its hooks are those of a style, which move nothing but a sum over the ranks."""
    hooks = hooks_of(module)
    if len(module._forward_pre_hooks) != 1 or len(module._forward_hooks) != 1:
        return False
    into, out = given(hooks[0], "input_fn"), given(hooks[1], "output_fn")
    kind = plan.way.kinds[0]
    if into is None or out is None or len(into.args) != 2 or len(out.args) != 2:
        return False
    if kind not in (COLUMN, ROW):
        return False
    x, y = (_INNER, _WHOLE) if kind == ROW else (_WHOLE, _INNER)
    as_given = tuple(into.args[0]) == tuple(into.args[1]) == x
    return as_given and tuple(out.args[0]) == y and out.args[1] is True


def _is_usual(module: Any) -> bool:
    """Whether a module does nothing but multiply, and its call nothing but run it and its hooks."""
    return not (
        module._frozen is not None
        or module._gathers
        or module._split is not None
        or module._shared is not None
        or module._gathers_inputs
        or module.return_bias
        or module._routed()
        or module._backward_hooks
        or module._backward_pre_hooks
        or module._forward_hooks_with_kwargs
        or module._forward_pre_hooks_with_kwargs
        or "forward" in module.__dict__
        or hooked_everywhere()
    )


class BetweenHooks:
    """What stands for nn.Module._call_impl in one module."""

    def __init__(self, module: Any, plan: Plan, here: Here) -> None:
        self.module: Any = weakref.ref(module)
        self.plan, self.here, self.hooks = plan, here, hooks_of(module)
        self.row, (self.n, self.k) = plan.way.kinds[0] == ROW, here.local.shape

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module()
        if len(args) == 1 and not kwargs and lends(module):
            if not self._serves(module):
                del module.__dict__[_CALL]
            elif (x := self._input(args[0])) is not None:
                return self._made(module, x)
        return type(module)._call_impl(module, *args, **kwargs)

    def _serves(self, module: Any) -> bool:
        """Whether the module is as it was when it was called first."""
        here, weight = self.here, module._parameters["weight"]
        return (
            weight is here.parameter
            and weight._spec is self.plan.specs[0]
            and weight._local_tensor is here.local
            and weight.requires_grad
            and module._parameters["bias"] is None
            and same_objects(hooks_of(module), self.hooks)
            and _is_usual(module)
            and module._settings() is self.plan.settings
        )

    def _made(self, module: Any, x: Tensor) -> Tensor:
        plan, here = self.plan, self.here
        save_x = module.save_original_input or module.keeps_given_input
        call = Call(plan.settings, output_dtype(x), module._tag_now(), save_x=save_x, lent=here)  # type: ignore[arg-type]
        y = linear(x, here.parameter, None, call)
        return summed(y, plan.mesh) if self.row else y

    def _input(self, inp: Any) -> Tensor | None:
        """What this rank has of an input, if it is such as the plan is for."""
        x = inp
        if not self.row:
            if type(inp) is not DTensor or inp.placements != _WHOLE:
                return None
            if inp.device_mesh != self.plan.mesh:
                return None
            x = local_of(inp, self.plan.way.x_grad)
        fits = (
            type(x) is Tensor
            and x.requires_grad
            and x.dim() > 1
            and x.shape[-1] == self.k
            and x.dtype in FLOATS
            and x.device == self.here.local.device
            and x.layout is torch.strided
        )
        return x if fits else None

"""Forward-mode AD and the transforms of torch.func (vmap, grad, jvp, ..): MXFP8 code has no rules
for them, and its ops, which autograd does not see, would drop what they carry. A call that would
drop something is refused, but for one level of gradients, see functional_grad.py.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.autograd import forward_ad

_functorch = torch._C._functorch
_transform = _functorch.peek_interpreter_stack
_is_old_batched = _functorch.is_legacy_batchedtensor  # what autograd's own vmap makes

LAYER = "run it in high precision: `with te_mx.autocast(enabled=False):` around its forward"
FUNCTION = "call it outside of the transform, on plain tensors"


def active() -> bool:
    """Whether a level of forward-mode AD or a transform is active, which few calls see."""
    return forward_ad._current_level >= 0 or _transforming()


def _transforming() -> bool:
    return _transform() is not None


# What torch.compiler.assume_constant_result does, which takes seconds to import. Compiled code
# never runs under other transforms than it was traced under.
_transforming._dynamo_marked_constant = True  # type: ignore[attr-defined]


def one_gradient() -> bool:
    """Whether one level of grad, grad_and_value or vjp is active, and nothing else. Not in code
    that Dynamo traces."""
    if torch.compiler.is_dynamo_compiling() or forward_ad._current_level >= 0:
        return False
    stack = _functorch.get_interpreter_stack()
    return stack is not None and len(stack) == 1 and stack[0].key() == _functorch.TransformType.Grad


def requires_grad(tensor: Tensor) -> bool:
    """Whether a tensor requires grad at the level that is active or below it."""
    while not tensor.requires_grad and _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor.requires_grad


def refuse(
    owner: str, tensors: Iterable[Tensor | None], remedy: str = LAYER, grad: bool | None = None
) -> None:
    """Raise NotImplementedError where one of `tensors` carries what `owner` would drop. Called when
    something is `active`.

    grad: whether gradients that a transform wants count; None where autograd is enabled.
    """
    if torch.compiler.is_dynamo_compiling():  # the tensors cannot be looked at
        carried: str | None = "tensors inside forward-mode AD or a transform of torch.func"
    else:
        look = _carried
        if "torch._dynamo" in sys.modules:  # which would compile it for tensors that carry nothing
            look = torch.compiler.disable(_carried)
        carried = look(tensors, torch.is_grad_enabled() if grad is None else grad)
    if carried is not None:
        raise NotImplementedError(
            f"{owner}: got {carried}, for which te_mx has no rule: the result would "
            f"miss it; {remedy}"
        )


def refuse_gradients(owner: str, grads: Iterable[Tensor | None]) -> None:
    """The same in a backward pass, of gradients that come in: autograd's own vmap batches them
    without being active. Not for compiled code."""
    concerned = active()
    for grad in grads:
        concerned = concerned or (grad is not None and _is_old_batched(grad))
    if concerned:
        refuse(owner, grads)


def _carried(tensors: Iterable[Tensor | None], grad: bool) -> str | None:
    for tensor in tensors:
        if tensor is not None:
            carried = _carried_by(tensor, grad and _transform() is not None)
            if carried is not None:
                return f"{carried} of shape {tuple(tensor.shape)}"
    return None


def _carried_by(tensor: Tensor, grad: bool) -> str | None:
    while True:
        if _functorch.is_batchedtensor(tensor) or _is_old_batched(tensor):
            return "a batched tensor (vmap, is_grads_batched=True, vectorize=True)"
        if grad and tensor.requires_grad:
            return "a tensor that requires grad in a transform of torch.func (grad, vjp, jacrev)"
        if _has_tangent(tensor):
            return "a tensor with a tangent (forward-mode AD, torch.func.jvp, jacfwd, linearize)"
        if not _functorch.is_functorch_wrapped_tensor(tensor):
            return None
        tensor = _functorch.get_unwrapped(tensor)


def _has_tangent(tensor: Tensor) -> bool:
    return (
        forward_ad._current_level >= 0
        and tensor.is_floating_point()
        and forward_ad.unpack_dual(tensor).tangent is not None
    )

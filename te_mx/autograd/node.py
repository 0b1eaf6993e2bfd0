"""What the backward passes of all module families share: what is saved, tags, the place of a
weight gradient, and the refusal of a second derivative.

Forward-mode AD and the transforms of torch.func (vmap, grad, jvp, ..): MXFP8 code has no rules
for them, and its ops, which autograd does not see, would drop what they carry. A call that would
drop something is refused, but for one level of gradients.

The gradients of torch.func (grad, grad_and_value, vjp) through MXFP8 code, which saves codes
that autograd does not see: one level of them.

Below the level, on plain tensors, the code runs under ordinary autograd, and its graph is kept. So
every function of te_mx has such gradients, with the bits of ``backward()``."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import debug_unwrap

from te_mx.autograd.grad_target import WeightGradient, Wgrad, refuse_graph
from te_mx.autograd.input_cache import apart, settled
from te_mx.runtime import compiled
from te_mx.torch_internals import calling_frame, transform

LAYER = "run it in high precision: `with te_mx.autocast(enabled=False):` around its forward"
FUNCTION = "call it outside of the transform, on plain tensors"


@compiled.constant
def transforming() -> bool:
    """Whether a transform is active. Compiled code runs under those of its trace."""
    return transform() is not None


def dual_level() -> bool:
    """Whether a level of forward-mode AD is active: outside of one, torch looks at nothing."""
    try:
        forward_ad.unpack_dual(None)
    except TypeError:
        return True
    return False


def active() -> bool:
    """Whether a level of forward-mode AD or a transform is active, which few calls see."""
    if torch.compiler.is_dynamo_compiling():
        return compiled.transforming() or dual_level()
    if transform() is not None:
        return True
    try:  # as dual_level: every forward and backward asks
        forward_ad.unpack_dual(None)
    except TypeError:
        return True
    return False


def one_gradient() -> bool:
    """Whether one level of grad, grad_and_value or vjp is active alone. Not for traced code."""
    if torch.compiler.is_dynamo_compiling() or dual_level():
        return False
    top = transform()
    return top is not None and top.level() == 1 and top.key().name == "Grad"


def requires_grad(tensor: Tensor) -> bool:
    """Whether a tensor requires grad at the level that is active or below it."""
    return any(one.requires_grad for one in _levels(tensor))


def _levels(tensor: Tensor) -> Iterator[Tensor]:
    """A tensor as transforms see it, from the innermost level to none."""
    inner = debug_unwrap(tensor, recurse=False)
    while inner is not tensor:
        yield tensor
        tensor, inner = inner, debug_unwrap(inner, recurse=False)
    yield tensor


def refuse(
    owner: str, tensors: Iterable[Tensor | None], remedy: str = LAYER, grad: bool | None = None
) -> None:
    """Raise NotImplementedError where one of `tensors` carries what `owner` would drop. Called when
    something is `active`.

    grad: whether gradients that a transform wants count; None where autograd is enabled."""
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
    try:
        for grad in grads:
            if grad is not None:
                grad.untyped_storage()
        if not active():
            return
    except NotImplementedError:  # see _is_batched_by_autograd
        pass
    refuse(owner, grads)


def _carried(tensors: Iterable[Tensor | None], grad: bool) -> str | None:
    for tensor in tensors:
        if tensor is not None:
            carried = _carried_by(tensor, grad and transforming())
            if carried is not None:
                return f"{carried} of shape {tuple(tensor.shape)}"
    return None


def _carried_by(tensor: Tensor, grad: bool) -> str | None:
    outer = None
    for one in _levels(tensor):
        # vmap hides a dimension of what it wraps.
        if _is_batched_by_autograd(one) or (outer is not None and one.dim() != outer.dim()):
            return "a batched tensor (vmap, is_grads_batched=True, vectorize=True)"
        if grad and one.requires_grad:
            return "a tensor that requires grad in a transform of torch.func (grad, vjp, jacrev)"
        if one.is_floating_point() and forward_ad.unpack_dual(one).tangent is not None:
            return "a tensor with a tangent (forward-mode AD, torch.func.jvp, jacfwd, linearize)"
        outer = one
    return None


def _is_batched_by_autograd(tensor: Tensor) -> bool:
    """Whether is_grads_batched=True made it: it shows only in having no memory."""
    try:
        tensor.untyped_storage()
    except NotImplementedError:
        return tensor.layout is torch.strided and debug_unwrap(tensor, recurse=False) is tensor
    return False


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
        f"{LAYER}"
    )


def differentiable(owner: str, run: Callable[..., Any], tensors: Sequence[Tensor]) -> Any:
    """run(*tensors), a tensor or a tuple of them and None, with gradients for the transform that is
    active. Called where `transforms.one_gradient()`."""
    graph = _Graph(owner, run, [requires_grad(tensor) for tensor in tensors])
    outputs: list[Any] = list(_Forward.apply(graph, *tensors)[:-1])
    for i in graph.missing:
        outputs.insert(i, None)
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Whether a backward pass will want the gradient of one of these."""
    for tensor in tensors if torch.is_grad_enabled() else ():
        if tensor is not None and tensor.requires_grad:
            return True
    return False


# Until 2.13 the Python object of a node did not keep the node alive, which pipelines rely on that
# compute gradients of inputs and of weights apart.
_LOSES_NODES = torch.__version__ < "2.13"
_refusing: set[type] = set()  # classes of nodes


def _refuse_split_backward(node_class: Any) -> None:
    """Have nodes of this class refuse such a pipeline, where it begins with a hook."""
    _refusing.add(node_class)
    register = node_class.register_prehook

    def register_prehook(self: Any, hook: Any) -> Any:
        caller = calling_frame(1)
        if caller and caller.f_globals["__name__"].startswith("torch.distributed.pipelining."):
            raise NotImplementedError(
                "te_mx in a pipeline that computes gradients of inputs and of weights apart "
                "(zero-bubble schedules) needs PyTorch 2.13 or newer: this one "
                f"({torch.__version__}) loses autograd functions in between; use a newer one, or "
                "another schedule, such as Schedule1F1B or ScheduleInterleaved1F1B"
            )
        return register(self, hook)

    node_class.register_prehook = register_prehook


def apply_below(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply` without torch's look at every argument for a shell of a transform that ended
    (15 to 21 thousand instructions): of inputs that `has_memory`, outside of transforms."""
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply


def outputs(ctx: Any, saved: Sequence[Tensor | None], *made: Tensor) -> tuple[Tensor, ...]:
    """What forward of a function returns: `made`, and the link. Keeps `saved` for backward.

    The link is an empty tensor that nobody but backward sees: its grad_fn is the node itself. From
    gradients that depend on it, a path leads to all that the node is a function of, see
    `run_backward`. Compiled code refuses second derivatives itself."""
    if torch.compiler.is_compiling():
        ctx.linked = False
        ctx.save_for_backward(*saved)
        return made
    return linked(ctx, saved, torch.empty(0), *made)


# What links of code that nobody watches are detached of, which is faster than making them.
with torch.inference_mode(False):
    NO_LINK = torch.empty(0, device="cpu")


def linked(
    ctx: Any, saved: Sequence[Tensor | None], link: Tensor, *made: Tensor
) -> tuple[Tensor, ...]:
    """The same, of code that is not compiled."""
    if _LOSES_NODES and type(ctx) not in _refusing:
        _refuse_split_backward(type(ctx))
    ctx.linked = True
    ctx.save_for_backward(*saved, link)
    if len(made) == 1:
        ctx.set_materialize_grads(False)  # or each backward pass makes zeros for the link
    return *made, link


class _Once(torch.autograd.Function):
    """(message, *tensors) -> the same tensors, of which there is no derivative."""

    @staticmethod
    def forward(message: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple([tensor.detach() for tensor in tensors])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.message = inputs[0]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> NoReturn:
        raise RuntimeError(ctx.message)


def run_backward(
    backward: Callable[..., tuple[Tensor | None, ...]], owner: str, ctx: Any, *grads: Tensor | None
) -> tuple[Tensor | None, ...]:
    """backward(ctx, saved tensors, *grads), for a forward that returned `outputs`.

    Under create_graph=True the gradients that it returns are right, but theirs must not be silently
    zero: they come from a node that raises and has an edge to each output gradient and, through the
    link, to each input. Whatever way a second derivative takes, it meets an error."""
    saved, link = ctx.saved_tensors, None
    if ctx.linked:
        saved, link, grads = saved[:-1], saved[-1], grads[:-1]
    if grads[0] is None:
        return settled(getattr(ctx, "siblings", None)), *(None,) * (len(ctx.needs_input_grad) - 1)
    if torch.compiler.is_compiling():
        return backward(ctx, saved, *grads)
    refuse_gradients(owner, grads)
    if not torch.is_grad_enabled():
        return backward(ctx, saved, *grads)
    refuse_graph(ctx.grad_targets)
    with torch.no_grad(), apart():
        made = backward(ctx, saved, *grads)
    message = (
        f"{owner}: trying to differentiate twice through a quantized linear layer, which has no "
        "second derivative (its backward quantizes the gradient). Run the layers that need a "
        "double backward in high precision: `with te_mx.autocast(enabled=False):` around their "
        "forward"
    )
    through = [g for g in (*made, *grads, link) if g is not None]
    wrapped = iter(_Once.apply(message, *through))
    return tuple(None if g is None else next(wrapped) for g in made)


def tag_of(first: int, gemm: int) -> int:
    """The slot of a GEMM in LAST_RUN; -1 where nothing is recorded."""
    return first + gemm if first >= 0 else -1


def place(
    grad_target: WeightGradient | None, wgrad: Wgrad, dtype: torch.dtype, node: Any = None
) -> Tensor | None:
    """Run the wgrad GEMM, or let its grad_target decide when and where to. node: of the weight in
    the graph, where the caller knows it."""
    return (
        wgrad(None, dtype, False) if grad_target is None else grad_target.take(wgrad, dtype, node)
    )

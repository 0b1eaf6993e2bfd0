"""What layers that ranks share do between the ranks, with the gradient of each move: for DTensors
and for process groups (tensor_parallel.py)."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from te_mx.autograd import node as transforms
from te_mx.context.region import is_tracing
from te_mx.nn.linear import Linear
from te_mx.torch_internals import dispatch_modes, like
from te_mx.weights.ranks import shard_of


def _sum(x: Tensor, group: Any) -> Tensor:
    """The sum over the ranks of a group."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def sum_here(x: Tensor, group: Any) -> Tensor:
    """The same in the memory of x, which is contiguous and nobody else has; not in a graph."""
    total = x.detach()
    dist.all_reduce(total, group=group)
    return total


def gathered(mine: Tensor, group: Any) -> Tensor:
    """[n, ..] of every rank of a group, one behind the other."""
    made = mine.new_empty(dist.get_world_size(group) * mine.shape[0], *mine.shape[1:])
    dist.all_gather_into_tensor(made, mine.contiguous(), group=group)
    return made


def scattered(partial: Tensor, group: Any) -> Tensor:
    """This rank's part along dimension 0 of the sum over a group."""
    made = partial.new_empty(partial.shape[0] // dist.get_world_size(group), *partial.shape[1:])
    dist.reduce_scatter_tensor(made, partial.contiguous(), group=group)
    return made


def _same(x: Tensor, group: Any) -> Tensor:
    return x.view_as(x)


_MOVES: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "same": _same, "sum": _sum, "sum here": sum_here, "gather": gathered, "scatter": scattered
}  # fmt: skip
# What is made of x, and of the gradient of that.
COPIED = "same", "sum"  # what every rank has, read by its part of a layer
SUMMED = "sum", "same"  # parts of a sum
SUMMED_HERE = "sum here", "same"
GATHERED = "gather", "scatter"  # tokens of all ranks
SCATTERED = "scatter", "gather"  # of a sum, the tokens of this rank


class Moved(torch.autograd.Function):
    """A tensor on its way between the ranks of a group, one of the pairs above."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: str, back: str, group: Any) -> Tensor:
        ctx.back, ctx.group = back, group
        return _MOVES[there](x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _MOVES[ctx.back](grad, ctx.group), None, None, None


class OnOne(torch.autograd.Function):
    """What every rank has and one uses: zeros on those that do not (`uses`), such as a bias of a
    sum. Its gradient passes, or is zero where that of another rank counts (`counts`)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, uses: bool, counts: bool) -> Tensor:
        ctx.counts = counts
        return x.view_as(x) if uses else torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad if ctx.counts else torch.zeros_like(grad), None, None


class Ranks(NamedTuple):
    """The ranks of a group, as autograd/sequence_parallel.py sees them."""

    group: Any
    ranks: int

    def gathered(self, mine: Tensor) -> Tensor:
        """[n, ..] of every rank, [ranks * n, ..]."""
        return gathered(mine, self.group)

    def scattered(self, partial: Tensor) -> Tensor:
        """This rank's part [n, ..] of the sum of [ranks * n, ..]."""
        return scattered(partial, self.group)


# ------------------------------------------------------------------------- between DTensor and rank
# What DTensor.to_local, from_local and redistribute do, where it is known beforehand how gradients
# lie. torch finds that out at every pass, in 40 to 200 us of host time a node, and a layer of a
# transformer has some thirty of them: the GPU waits. Here the description of a gradient is made
# once, and a sum over the ranks is one collective on this stream. Under create_graph, and where
# somebody watches the dispatcher, torch's own functions run.
_SUM, _WHOLE = Partial(), (Replicate(),)
_LOCAL = "_te_mx_local"


def plain(*tensors: Any) -> bool:
    """Whether nodes of this file may stand in for torch's."""
    return not (is_tracing() or dispatch_modes()) and all(type(t) is Tensor for t in tensors)


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides))


class _Kind(NamedTuple):
    """What a contiguous DTensor is. made(local): one without a history."""

    mesh: Any
    placements: tuple[Placement, ...]
    shape: torch.Size
    made: Callable[[Tensor], DTensor]


# A mesh counts by its identity: one of a process group that is gone equals one of its successor.
_known: dict[Any, _Kind] = {}
_MOST_KNOWN = 1024


def _kind(mesh: Any, placements: tuple[Placement, ...], shape: torch.Size, local: Tensor) -> _Kind:
    """The kind of a DTensor of which a rank has something like `local`."""
    key = id(mesh), placements, shape, local.dtype
    found = _known.get(key)
    if found is None or found.mesh is not mesh:
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        first = DTensor.from_local(
            local.detach().new_empty(0), mesh, placements, run_check=False, shape=shape,
            stride=contiguous(shape),
        )  # fmt: skip
        found = _known[key] = _Kind(mesh, placements, shape, like(first))
    return found


# ------------------------------------------------------------------------------------- to this rank
class _Local(torch.autograd.Function):
    """What a rank has; its gradient, if that is contiguous, is a DTensor of a kind. With a group,
    it is summed over the ranks first."""

    @staticmethod
    def forward(ctx: Any, x: DTensor, kind: _Kind, group: Any) -> Tensor:
        ctx.kind, ctx.group = kind, group
        ctx.set_materialize_grads(False)
        local = shard_of(x)
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[DTensor | None, None, None]:
        if grad is None:
            return None, None, None
        kind, group = ctx.kind, ctx.group
        if group is not None and plain(grad) and not torch.is_grad_enabled():
            own = grad.clone(memory_format=torch.contiguous_format)  # somebody else may have grad
            return kind.made(sum_here(own, group)), None, None
        if group is not None:
            partial = [_SUM] * kind.mesh.ndim
            made = DTensor.from_local(grad, kind.mesh, partial, run_check=False)
            return made.redistribute(placements=kind.placements), None, None
        return _gradient(grad, kind), None, None


def _gradient(grad: Tensor, kind: _Kind) -> DTensor:
    """The DTensor of which a rank has this gradient."""
    if type(grad) is Tensor and grad.is_contiguous() and not torch.is_grad_enabled():
        return kind.made(grad)
    strides: dict[str, Any] = {}
    if grad.is_contiguous():
        strides = {"shape": kind.shape, "stride": contiguous(kind.shape)}
    return DTensor.from_local(grad, kind.mesh, kind.placements, run_check=False, **strides)


class Here(NamedTuple):
    """A parameter as the functions of te_mx.autograd take it: without a node of its own."""

    parameter: DTensor
    local: Tensor
    kind: _Kind

    def whole(self, grad: Tensor | None) -> DTensor | None:
        """The gradient of the DTensor."""
        return None if grad is None else _gradient(grad, self.kind)


def lends(module: Any) -> bool:
    """Whether a module takes its weight so, now."""
    usual = torch.is_grad_enabled() and not (
        is_tracing() or dispatch_modes() or transforms.active()
    )
    return usual and type(module) is Linear


def here_of(parameter: DTensor, grads: Sequence[Placement]) -> Here | None:
    """What a rank has of a parameter that trains; None of one that is read through torch alone."""
    local = shard_of(parameter)
    if type(local) is not Tensor or not parameter.requires_grad:
        return None
    kind = _kind(parameter.device_mesh, tuple(grads), parameter.shape, local)
    return Here(parameter, local, kind)


def local_of(x: DTensor, grads: Sequence[Placement], summed: bool = False) -> Tensor:
    """x.to_local(grad_placements=grads); summed: its gradient becomes a sum (`sums_gradient`)."""
    if is_tracing() or dispatch_modes() or not torch.is_grad_enabled():
        return x.to_local(grad_placements=grads)
    wanted, group = (x.placements, x.device_mesh.get_group(0)) if summed else (tuple(grads), None)
    local: Tensor = _Local.apply(x, _kind(x.device_mesh, wanted, x.shape, shard_of(x)), group)
    return local


def sums_gradient(x: DTensor, grads: Sequence[Placement]) -> bool:
    """Whether the gradient of x may be summed where it is made: x is a plain tensor that every rank
    had, and what the ranks have of its gradient goes back to that as a sum."""
    node: Any = x.grad_fn
    if node is None or x.device_mesh.ndim != 1 or not torch.is_grad_enabled():
        return False
    if not _is_of_from_local(node, x.device_mesh) or not plain(shard_of(x)):
        return False
    before = getattr(node, "forward_input_placements", getattr(node, "previous_placement", None))
    if before is None or getattr(node, "grad_placements", None) is not None:
        return False
    return tuple(before) == x.placements == _WHOLE and grads[0] == _SUM


_of_from_local: list[type] = []  # the class of the nodes that DTensor.from_local makes


def _is_of_from_local(node: Any, mesh: Any) -> bool:
    if not _of_from_local:
        probe = torch.empty(0, device=mesh.device_type, requires_grad=True)
        made = DTensor.from_local(probe, mesh, _WHOLE, run_check=False)
        _of_from_local.append(type(made.grad_fn))
    return type(node) is _of_from_local[0]


def placed(x: DTensor, mesh: Any, placements: list[Placement]) -> DTensor:
    """x itself where it is so placed already."""
    if x.device_mesh == mesh and x.placements == tuple(placements):
        return x
    return x.redistribute(mesh, placements)


def local_of_input(x: DTensor, grads: Sequence[Placement]) -> Tensor:
    """x.to_local(grad_placements=..), the same tensor as long as x is what it was: layers that read
    one DTensor quantize it once (autograd/input_cache.py), and their gradients add up on the rank
    before DTensor moves the sum. It is kept by x, and is a view of what x holds."""
    if is_tracing():
        return x.to_local(grad_placements=grads)
    inner = shard_of(x)
    # NOTE: in-place operations change the version of a DTensor, not that of what it holds.
    if x.is_inference() or inner.is_inference():
        return x.to_local(grad_placements=grads)
    if x.requires_grad and x.is_leaf:  # whose gradient's place holds it: it would keep itself alive
        return x.to_local(grad_placements=grads)
    versions = x._version, inner._version
    key = tuple(grads), versions, x.requires_grad, torch.is_grad_enabled()
    held = x.__dict__.get(_LOCAL)
    if held is not None and held[0] == key and held[1] is inner:
        return held[2]
    local = local_of(x, grads, sums_gradient(x, grads))
    if local.data_ptr() == inner.data_ptr():  # not what an asynchronous result becomes
        x.__dict__[_LOCAL] = key, inner, local
    return local


# ------------------------------------------------------------------------------------ to all ranks
class _Spread(torch.autograd.Function):
    """The DTensor of a kind of which a rank has y; its gradient is wanted like it."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, kind: _Kind) -> DTensor:
        ctx.kind = kind
        ctx.set_materialize_grads(False)
        return kind.made(y.view_as(y))

    @staticmethod
    def backward(ctx: Any, grad: DTensor | None) -> tuple[Tensor | None, None]:
        if grad is None:
            return None, None
        wanted = [Replicate() if p.is_partial() else p for p in ctx.kind.placements]
        if grad.placements != tuple(wanted):
            grad = grad.redistribute(placements=wanted)
        return grad.to_local(), None


def spread(y: Tensor, mesh: Any, placements: Sequence[Placement], shape: torch.Size) -> DTensor:
    """DTensor.from_local(y, mesh, placements), of a DTensor of this shape."""
    if not plain(y):
        strides = contiguous(shape)
        return DTensor.from_local(y, mesh, placements, run_check=False, shape=shape, stride=strides)
    kind = _kind(mesh, tuple(placements), shape, y)
    if not (torch.is_grad_enabled() and y.requires_grad):
        return kind.made(y.detach())
    made: DTensor = _Spread.apply(y, kind)
    return made


# ------------------------------------------------------------------------------ sums over the ranks
def may_sum(y: Tensor) -> bool:
    """Whether `summed` writes over y."""
    return plain(y) and torch.is_grad_enabled() and y.requires_grad and y.is_contiguous()


def summed(y: Tensor, group: Any) -> Tensor:
    """The sum over the ranks of y, which a product has just written and nobody else has."""
    total: Tensor = Moved.apply(y, *(SUMMED_HERE if may_sum(y) else SUMMED), group)
    return total


# ------------------------------------------------------------------------- for hooks behind layers
def answers_with(out: DTensor, y: Tensor) -> DTensor:
    """Let out, which is spread(y, ..), give y itself back to the hook that asks for it next, which
    saves a node there and back."""
    whole, version, ndim = out.placements, out._version, out.ndim
    as_it_was = torch.is_grad_enabled()
    own: Any = weakref.ref(out)  # or out would keep itself alive

    def to_local(*, grad_placements: Any = None) -> Tensor:
        same = own()._version == version and as_it_was == torch.is_grad_enabled()
        if grad_placements is None and same:
            return y
        return DTensor.to_local(own(), grad_placements=grad_placements)

    def redistribute(device_mesh: Any = None, placements: Any = None, **given: Any) -> DTensor:
        plainly = device_mesh is None and not given.keys() - {"async_op"}
        if plainly and tuple([_from_front(place, ndim) for place in placements or ()]) == whole:
            return own()
        return DTensor.redistribute(own(), device_mesh, placements, **given)

    out.to_local, out.redistribute = to_local, redistribute  # type: ignore[method-assign]
    return out


def _from_front(place: Placement, ndim: int) -> Placement:
    if type(place) is Shard and place.dim < 0:
        return Shard(place.dim + ndim)
    return place

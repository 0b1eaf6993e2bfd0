"""The seam between the modules and te_mx.distributed, which stands above them: calls that concern
tensors of several ranks are handed up, and weight gradients that belong to several ranks find the
one who puts them together."""

from typing import Any

import torch

from te_mx.autograd.sequence_parallel import Tokens
from te_mx.torch_internals import wrapped


class _Above:
    """Where te_mx.distributed registers itself when it is imported. Its functions for those below:

    run(module, inp, *args): the forward of a module on what this rank has of its tensors.
    run_block(block, x): the result of a fused MLP block whose weights are DTensors, and "fused"; or
    None and why its layers run one by one.
    codes_of(module, settings): the source (weights/source.py) of weights gathered as codes.
    params_of(module): what fully_shard knows of the parameters of a module, by name.
    owners(module, weights): whom the gradients of weights that fully_shard lends belong to.
    attach(module): tells fully_shard again that it gathers the weights of a module as codes.
    join(parts), cut(whole, like): one DTensor of the rows of several, for a state_dict, and back;
    blank(parts): it without values, is_blank(tensor): whether it still is."""

    distributed: Any


above = _Above()
_SPREAD = frozenset(("DTensor", "GatheredWeight"))


def is_gathered(tensor: Any) -> bool:
    """Whether it is a weight that is gathered as codes."""
    return type(tensor).__name__ == "GatheredWeight"


def is_spread(*tensors: Any) -> bool:
    """Whether one of these is a DTensor, or a weight that is gathered as codes. They are known by
    name, because torch.distributed.tensor takes seconds to import."""
    return any(type(tensor).__name__ in _SPREAD for tensor in tensors)


def here(tensor: Any) -> Any:
    """What this rank has of a tensor, without history."""
    if not is_spread(tensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def shard_of(tensor: Any) -> Any:
    """The tensor that has the memory: of a DTensor what this rank has, itself and not a view."""
    if type(tensor).__name__ != "DTensor":
        return tensor
    names, _ = tensor.__tensor_flatten__()  # torch's protocol of tensors around others
    return getattr(tensor, names[0])


class SeveralRanks:
    """Mixin of the modules, beside an nn.Module."""

    # Class attributes, not set in __init__: convert_model gives modules this class in place.
    _local: Any = None  # the module of which this is what one rank sees
    _gathers: dict[str, Any] | None = None  # settings of weights to gather as codes, by name
    _gathered_with: Any = None  # the weights that are quantized for the same forward pass
    _gathers_inputs = False  # sequence parallelism gathers codes of inputs
    _tokens: Tokens | None = None  # the ranks that have the other tokens of an input

    def _is_spread(self, inp: Any) -> bool:
        """Whether a call on this input concerns other ranks."""
        if self._local is not None:
            return False
        if self._shared is not None:  # type: ignore[attr-defined]
            return True
        found = type(inp).__name__ in _SPREAD
        for tensor in self._parameters.values():  # type: ignore[attr-defined]
            found = found or type(tensor).__name__ in _SPREAD
        return found

    def _is_exchanged(self) -> bool:
        """Whether fully_shard puts other parameters into the module for a forward."""
        return bool(wrapped) and bool(above.distributed.params_of(self))

    def _holds_lent(self) -> bool:
        """Whether it has put them there for now."""
        if not self._is_exchanged():
            return False
        held = [p for p in self._parameters.values() if p is not None]  # type: ignore[attr-defined]
        return not all(type(p).__name__ == "DTensor" for p in held)

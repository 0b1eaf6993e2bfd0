"""torchtitan's GroupedExperts: SwiGLU experts on tokens that are sorted by expert already.

    y = (silu(x @ w1[e]^T) * (x @ w3[e]^T)) @ w2[e]^T

w1 and w3 are [E, hidden, dim], w2 is [E, dim, hidden]; later versions call them w1_EFD, w3_EFD and
w2_EDF. Versions that hold one gate-up parameter, choose an activation or dispatch tokens inside of
the module are told apart by parameters, modules and arguments, and are not converted."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from te_mx.autograd import node
from te_mx.dispatch.fused import Activation
from te_mx.fusion.experts import ExpertsModule
from te_mx.integrations.seam import Seam, why_not_in_place, why_not_parameter
from te_mx.nn import activations
from te_mx.runtime.arguments import shown

_NAMES = (("w1", "w3", "w2"), ("w1_EFD", "w3_EFD", "w2_EDF"))  # gate, up, down
_SILU = Activation("silu")


class TitanExperts(ExpertsModule):
    """Mixin before torchtitan's GroupedExperts."""

    @property
    def _weight_keys(self) -> tuple[str, ...]:  # type: ignore[override]
        return _names(self)

    def _stack(self, key: str) -> Tensor:
        # Under expert parallelism parameters are DTensors, and tokens those of the local experts.
        weight = getattr(self, key)
        return weight.to_local() if hasattr(weight, "to_local") else weight

    def _te_mx_forward(self, *args: Any, **kwargs: Any) -> Any:
        """(tokens [R, dim] sorted by expert, how many each expert has [E]) -> [R, dim]; rows behind
        the last expert's are 0."""
        if args and isinstance(args[0], Proxy):
            return self._as_leaf(*args, **kwargs)
        each = self._settings_of_each()
        if self._is_plain(each[0]):
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        experts = self._shape_of(self._weight_keys[0])[0]
        # Versions differ in the names of the two.
        x_RD, counts_E = _checked(self._label(), experts, *args, *kwargs.values())
        if node.active():
            self._refuse_transforms(x_RD)
        offs = counts_E.cumsum(0, dtype=torch.int64)  # counts of torch.histc may be floats
        gate, up, down = self._weight_keys
        h_RF = activations.beside(self._product(x_RD, offs, gate, None, each[0]), _SILU, each[2])
        h_RF = h_RF * self._product(x_RD, offs, up, None, each[1])
        return self._product(h_RF, offs, down, None, each[2]).type_as(x_RD)


def _checked(label: str, experts: int, *given: Any) -> tuple[Tensor, Tensor]:
    """What forward was given, unless that is not tokens [R, dim] and a count for each expert."""
    if len(given) != 2:
        raise TypeError(f"{label}: takes x and num_tokens_per_expert, got {len(given)} arguments")
    x, counts = given
    if not isinstance(x, Tensor) or x.dim() != 2:
        raise ValueError(f"{label}: x must be a tensor [tokens, dim], got {shown(x)}")
    if not isinstance(counts, Tensor) or counts.shape != (experts,):
        raise ValueError(
            f"{label}: num_tokens_per_expert must be a tensor of {experts}, got {shown(counts)}"
        )
    return x, counts


def _names(module: Any) -> tuple[str, ...]:
    """The names of the weights: gate, up, down."""
    # Weights without masters are no parameters any more, but their names are.
    return next((names for names in _NAMES if names[0] in module._parameters), ())


# ------------------------------------------------------------------------------------- recognizing
def _takes(module: nn.Module) -> bool:
    if isinstance(module, TitanExperts):
        return True
    kind = type(module)
    return kind.__name__ == "GroupedExperts" and kind.__module__.partition(".")[0] == "torchtitan"


def _why_not(module: nn.Module) -> str:
    if reason := why_not_in_place(module):
        return reason
    names = _names(module)
    if set(module._parameters) != set(names) or module._modules:
        return "a GroupedExperts of another form: not the parameters w1, w2 and w3 alone"
    given = list(inspect.signature(type(module).forward).parameters)[1:]
    if len(given) != 2 or given[0][0] != "x" or not given[1].startswith("num_tokens_per_expert"):
        return f"its forward takes {given}, not tokens and num_tokens_per_expert"
    if reason := next(filter(None, (why_not_parameter(module, name, 3) for name in names)), ""):
        return reason
    gate, up, down = (tuple(getattr(module, name).shape) for name in names)
    if gate != up or down != (gate[0], gate[2], gate[1]):
        return f"its parameters have shapes {gate}, {up} and {down}, which do not fit"
    return ""


def _shape(module: nn.Module) -> str:
    if isinstance(module, TitanExperts):
        return module._widths()
    names = _names(module)
    if not names or any(getattr(module, name).dim() != 3 for name in names):
        return ""
    experts, hidden, dim = getattr(module, names[0]).shape
    return f"{experts} x {dim} -> {hidden} -> {dim}"


SEAM = Seam(_takes, _why_not, _shape, TitanExperts)

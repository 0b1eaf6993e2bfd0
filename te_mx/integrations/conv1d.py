"""GPT-2's Conv1D of Transformers: ``y = x @ weight + bias`` with a weight [in, out]."""

import sys
from typing import Any

from torch import nn

from te_mx.fusion.transposed_linear import TransposedLinear
from te_mx.integrations.seam import Seam, why_not_in_place, why_not_parameter

_MODULE = "transformers.pytorch_utils"


def _takes(module: nn.Module) -> bool:
    theirs: Any = getattr(sys.modules.get(_MODULE), "Conv1D", None)
    return theirs is not None and isinstance(module, theirs)


def _why_not(module: Any) -> str:
    if reason := why_not_in_place(module):
        return reason
    kind = type(module)
    if kind is not sys.modules[_MODULE].Conv1D:
        return f"its class is {kind.__module__}.{kind.__qualname__}, a subclass of Conv1D"
    return why_not_parameter(module, "weight", 2) or why_not_parameter(module, "bias", 1)


def _shape(module: Any) -> str:
    return f"{module.nx} -> {module.nf}"


class Conv1D(TransposedLinear):
    """Mixin before transformers' Conv1D."""

    nx: int
    nf: int

    def _sizes(self) -> tuple[int, int]:
        return self.nx, self.nf


SEAM = Seam(_takes, _why_not, _shape, Conv1D)

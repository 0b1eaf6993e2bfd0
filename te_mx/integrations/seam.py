"""What convert_model has to know of layers of another library that run in MXFP8 in place
(fusion/class_swap.py): outside of te_mx.autocast their forward is the one that their class had."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn
from torch.nn.utils import parametrize

from te_mx.dispatch.fused import Activation
from te_mx.fusion.class_swap import Reclassed
from te_mx.nn.base import MXModule
from te_mx.nn.checks import FLOATS


class Seam(NamedTuple):
    """One kind of modules: `takes` says whether a module is of it, `why_not` why such a one cannot
    run in te_mx (or ""), `shape` what a report shows of its sizes, `mixin` what its class gets.
    `gate` says which activation ``fuse=True`` may compute in one step, or why none."""

    takes: Callable[[nn.Module], bool]
    why_not: Callable[[nn.Module], str]
    shape: Callable[[nn.Module], str]
    mixin: type[MXModule]
    gate: Callable[[nn.Module], Activation | str] | None = None


def why_not_in_place(module: nn.Module) -> str:
    """What keeps any module from another class, or an empty string."""
    if isinstance(module, Reclassed):
        return "already runs in te_mx"
    if isinstance(module, MXModule):
        return f"already a te_mx.{type(module).__name__}"
    if parametrize.is_parametrized(module):
        return "parametrized, which made its class a subclass: convert first, then parametrize"
    if "forward" in module.__dict__:
        return "its forward was replaced on the instance: convert first, then wrap"
    return ""


def why_not_parameter(module: nn.Module, name: str, dims: int) -> str:
    """Why a parameter of a module cannot be multiplied in MXFP8, or an empty string."""
    value: Any = getattr(module, name, None)
    if type(value) is not nn.Parameter:
        kind = "missing" if value is None else f"a {type(value).__name__}, not a plain parameter"
        return f"its {name} is {kind}"
    if value.dtype not in FLOATS:
        return f"its {name} is {value.dtype}; te_mx takes float32, bfloat16 and float16"
    if value.dim() != dims:
        return f"its {name} must have {dims} dimensions, got shape {tuple(value.shape)}"
    return ""

"""What a normalization of another library's model does once convert_model(fuse=True) has fused it.

It keeps its class as a base. In MXFP8 it is one step (autograd/norm.py), which keeps no copies of
its input for backward and, where linear layers read its result, makes their quantized input in the
same read. Elsewhere its own forward runs, and in compiled code without gradients or such layers."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from te_mx._ops import Target
from te_mx.autograd import linear_recipe
from te_mx.autograd.node import needs_gradient
from te_mx.autograd.norm import NormStep, normalized
from te_mx.context.region import is_tracing, output_dtype
from te_mx.dispatch.fused import Norm
from te_mx.fusion.class_swap import Reclassed
from te_mx.nn.guards import FUSED, RAN, VALUES, changed, why_not_given
from te_mx.nn.linear import Linear
from te_mx.runtime import compiled

ATTRIBUTE = "_te_mx_norm"
READ = "_te_mx_norm_read"  # whether codes that it made were read, once that is known
UNREAD = "fused, without codes: nothing read them"


class NormPlan(NamedTuple):
    """A normalization: what it computes; one of the layers that read its result, or, where none is
    known and nothing is quantized, one beside it whose recipe counts; the fused block where nothing
    else reads it; and what else its forward may read."""

    norm: Norm
    zero_centered: bool
    reader: nn.Linear
    quantizes: bool
    block: nn.Module | None
    around: tuple[tuple[str, Any], ...]


class FusedNorm(Reclassed):
    """Mixin in front of the class of a normalization."""

    def _te_mx_forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the normalization's own forward, up to rounding once."""
        if len(args) == 1 and not kwargs and is_tracing():
            target = self._traced_target(args[0])
            if target is not None:
                return self._run(args[0], target)
        elif len(args) == 1 and not kwargs:
            target, reason = self._target_or_why_not(args[0])
            if target is not None and target.codes and self._read_as_values(args[0]):
                target = target._replace(row="", col="")
            if target is not None:
                reason = UNREAD if self.__dict__.get(READ) is False else FUSED
            self.__dict__[RAN] = reason
            if target is not None:
                return self._run(args[0], target)
        return super().forward(*args, **kwargs)  # type: ignore[misc]

    def _traced_target(self, x: Any) -> Target | None:
        """What compiled code makes in one read, of which backward makes columns again; None where
        its own forward runs."""
        if not self.__dict__[ATTRIBUTE].quantizes or compiled.exporting():
            return None
        if type(x) is not Tensor or not needs_gradient(x, *self._values()):
            return None
        target, _ = self._target_or_why_not(x)
        return target._replace(col="") if target is not None and compiled.follow() else None

    def _target_or_why_not(self, x: Any) -> tuple[Target | None, str]:
        """What the readers ask for; None in high precision, or with why its own forward runs."""
        plan: NormPlan = self.__dict__[ATTRIBUTE]
        reader = plan.reader
        if type(reader) is not Linear:
            return None, "the layer whose recipe counts was reverted"
        if name := changed(self, plan.around):  # type: ignore[arg-type]
            return None, f"{name} was changed"
        if self._own.forward is not self._followed[0]:
            return None, f"{self._own.__name__}.forward was replaced"
        settings = reader._settings()
        if settings is None:
            return None, ""
        weight, bias = self._values()
        if reason := _why_not_these(x, weight, bias):
            return None, reason
        w: Tensor | None = reader._parameters.get("weight")  # None where its master was dropped
        need_dw = torch.is_grad_enabled() and w is not None and w.requires_grad
        target = linear_recipe.plan_input(
            x.device, settings, need_dw, reader.save_original_input
        ).target
        # A block makes columnwise codes again of what is normalized here. It may not run as one
        # step the next time; then its layers quantize for themselves.
        if plan.block is not None and plan.block.__dict__.get(RAN) in (None, "", FUSED):
            target = target._replace(col="")
        if not plan.quantizes or self.__dict__.get(READ) is False:
            target = target._replace(row="", col="")
        return target, ""

    def _read_as_values(self, x: Any) -> bool:
        """Whether the layer that reads the result is frozen and quantizes few rows by itself."""
        reader: Any = self.__dict__[ATTRIBUTE].reader
        if not reader._source.decodes_now(reader, x):
            return False
        settings, tensors = reader._settings(), (x, *self._values())
        if settings is None or output_dtype(x) != x.dtype:
            return False
        if needs_gradient(*tensors):
            return False
        return reader._source.ready(reader, x, settings) is not None

    def _values(self) -> tuple[Any, Any]:
        parameters: Any = self._parameters  # type: ignore[attr-defined]
        return parameters.get("weight"), parameters.get("bias")

    def _run(self, x: Tensor, target: Target) -> Tensor:
        plan: NormPlan = self.__dict__[ATTRIBUTE]
        weight, bias = self._values()
        step, own = NormStep(plan.norm, plan.zero_centered, x.dtype), self.__dict__
        tell = None if READ in own else lambda read: own.__setitem__(READ, read)
        return normalized(x, weight, bias, step, target, tell, plan.quantizes)


def _why_not_these(x: Any, weight: Any, bias: Any) -> str:
    """Why the tensors of this call are not normalized here."""
    if reason := why_not_given(x):
        return reason
    for value in (weight, bias):
        if value is None:
            continue
        if type(value) not in VALUES or value.device != x.device or value.dtype != x.dtype:
            return "its input and its parameters differ in dtype or device"
        if value.dim() != 1 or x.is_nested or x.shape[-1:] != value.shape:
            return "its input has another shape"
    if weight is None:
        return "it has no weight"
    kind = x.device.type
    if x.dtype is not torch.float32 and kind != "meta" and torch.is_autocast_enabled(kind):
        return "torch.autocast decides the dtype of its result"
    return ""

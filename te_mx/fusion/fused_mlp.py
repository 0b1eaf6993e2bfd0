"""What an MLP block of another library's model does once convert_model(fuse=True) has fused it.

The block keeps its class as a base, and its three (or two) linear layers. In MXFP8 it runs as one
step, see autograd/layer.py; whenever that would not be what its own forward does, its own
forward runs, on the very layers."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from te_mx import formats
from te_mx.autograd.layer import Block, Call, Weights, run_block
from te_mx.autograd.norm import NormStep
from te_mx.autograd.weight_parts import of_codes
from te_mx.context.region import is_tracing, output_dtype
from te_mx.dispatch.fused import Activation
from te_mx.fusion.class_swap import Reclassed
from te_mx.nn import norm_base
from te_mx.nn.checks import FLOATS
from te_mx.nn.guards import (
    FUSED,
    ON_FROZEN,
    RAN,
    VALUES,
    changed,
    why_not_given,
    why_not_plain,
    why_not_single,
)
from te_mx.nn.linear import Linear
from te_mx.recipes.settings import Settings
from te_mx.torch_internals import hooked_everywhere
from te_mx.weights.ranks import above, is_gathered

ATTRIBUTE = "_te_mx_block"


class BlockPlan(NamedTuple):
    """A block: the names of the layers that read its input (the activated one first), of the one
    that makes its result, what is between them, and what else its forward may read."""

    first: tuple[str, ...]
    last: str
    act: Activation
    around: tuple[tuple[str, Any], ...]


class FusedBlock(Reclassed):
    """Mixin in front of the class of a block."""

    def _te_mx_forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the block's own forward."""
        if len(args) == 1 and not kwargs and not is_tracing() and self._is_split():
            made, self.__dict__[RAN] = above.distributed.run_block(self, args[0])
            return super().forward(*args) if made is None else made  # type: ignore[misc]
        if len(args) == 1 and not kwargs and (made := self._on_codes(args[0])) is not None:
            self.__dict__[RAN] = ON_FROZEN
            return made
        if len(args) == 1 and not kwargs:
            layers, settings, reason = self.layers_of_step(why_not_plain)
            if settings is not None and not reason:
                reason = why_not_these(args[0], layers) or FUSED
            if not is_tracing():
                self.__dict__[RAN] = reason
            if settings is not None and reason == FUSED:
                return run_as_step(self.__dict__[ATTRIBUTE].act, layers, args[0], settings)
        return super().forward(*args, **kwargs)  # type: ignore[misc]

    def _on_codes(self, x: Any) -> Tensor | None:
        """The block where all its layers are frozen; None where it is not."""
        last: Any = self._modules.get(self.__dict__[ATTRIBUTE].last)  # type: ignore[attr-defined]
        if is_tracing() or type(last) is not Linear or why_not_given(x) or not last._source.decodes:
            return None
        layers, settings, reason = self.layers_of_step(why_not_single)
        if settings is None or reason:
            return None
        return norm_base.run_frozen(self.__dict__[ATTRIBUTE].act, layers, x, settings)

    def _is_split(self) -> bool:
        """Whether its layers are those of several ranks (parallelize_module)."""
        last = self._modules.get(self.__dict__[ATTRIBUTE].last)  # type: ignore[attr-defined]
        return last is not None and type(last._parameters.get("weight")).__name__ == "DTensor"

    def layers_of_step(
        self, why_not: Callable[[str, Any], str]
    ) -> tuple[list[Linear], Settings | None, str]:
        """Its layers, and their settings, None in high precision; and why they are none of one
        step, before any tensor is looked at. `why_not` says that of a layer and its name."""
        plan: BlockPlan = self.__dict__[ATTRIBUTE]
        children: Any = self._modules  # type: ignore[attr-defined]
        names = (*plan.first, plan.last)
        for name in names:
            if reason := why_not(name, children.get(name)):
                return [], None, reason
        if name := changed(self, plan.around):  # type: ignore[arg-type]
            return [], None, f"{name} was changed"
        if hooked_everywhere():
            return [], None, "hooks were registered for all modules"
        if self._own.forward is not self._followed[0]:
            return [], None, f"{self._own.__name__}.forward was replaced"
        layers: list[Linear] = [children[name] for name in names]
        found = [layer._settings() for layer in layers]
        settings = found[0]
        if any(one != settings for one in found[1:]):
            return [], None, "its layers run with different recipes"
        return layers, settings, ""


def run_as_step(act: Activation, layers: list[Linear], x: Tensor, settings: Settings) -> Tensor:
    """A block of these layers, the last one behind the activation, as one step."""
    *first, last = layers
    held = [layer._weight_and_bias() for layer in first]
    w2, b2 = last._weight_and_bias()
    grad_targets: Any = None, None
    if first[0]._routed() or last._routed():
        weights = [weight for weight, _ in held]
        grad_targets = (
            first[0]._source.grad_target(first[0], weights, None) if first[0]._routed() else None,
            last._source.grad_target(last, [w2], None) if last._routed() else None,
        )
    tags = tuple([layer._tag_now() for layer in layers])
    save_x = any(layer.save_original_input for layer in first)
    codes: tuple[Any, ...] = ()
    if is_gathered(w2):
        found = [(layer, above.distributed.codes_of(layer, settings)) for layer in layers]
        how = "weight", settings, None, x.device, False
        codes = tuple([source.operands(layer, *how) for layer, source in found])
        settings = codes[0].settings
    lent: Any = tuple([layer._source.lent for layer in layers])
    if None in lent:
        lent = ()
    else:
        held = [(one.parameter, b) for one, (_, b) in zip(lent, held, strict=False)]
        w2 = lent[-1].parameter
    step, block = NormStep(None, False, output_dtype(x)), Block(save_x, codes, lent)
    call = Call(step, act, settings, False, tags, None, block)
    first_parts = [t for pair in held for t in pair]
    return run_block(x, first_parts, w2, b2, Weights(of_codes(codes, settings), grad_targets), call)


def why_not_these(x: Any, layers: list[Linear]) -> str:
    """Why the tensors of this call do not run as one step: then layers say what is wrong."""
    *first, last = layers
    if reason := why_not_given(x):
        return reason
    if any(layer._routed() != first[0]._routed() for layer in first):
        return "its first layers differ in fuse_wgrad_accumulation"
    if is_tracing() and (first[0]._routed() or last._routed()):
        return "fuse_wgrad_accumulation under torch.compile"
    if reason := _why_not_gathered(layers):
        return reason
    if x.is_nested or not x.dim() or x.shape[-1] != first[0].in_features:
        return "its input has another shape"
    weight, bias = first[0]._weight_and_bias()
    dtypes = weight.dtype, getattr(bias, "dtype", None)
    for layer in layers:
        w, b = layer._weight_and_bias()
        shape = (layer.out_features, layer.in_features)
        for value, size in ((w, shape), (b, shape[:1])):
            if value is not None and (
                not (type(value) in VALUES or is_gathered(value))
                or value.shape != size
                or value.device != x.device
                or value.dtype not in FLOATS
            ):
                return "a parameter of it is not as it was"
        if w is None or (layer is not last and (w.dtype, getattr(b, "dtype", None)) != dtypes):
            return "its first layers are not alike"
    return ""


def _why_not_gathered(layers: list[Linear]) -> str:
    """Why weights that are gathered as codes do not run as one step."""
    found = [is_gathered(layer._weight_and_bias()[0]) for layer in layers]
    if not any(found):
        return ""
    if not all(found):
        return "some of its weights are gathered as codes, others are not"
    if is_tracing() or any(layer._routed() for layer in layers):
        return "weights gathered as codes, in compiled code or with fuse_wgrad_accumulation"
    weights: list[Any] = [layer._weight_and_bias()[0] for layer in layers[:-1]]
    if any(len(w) % formats.get(w.fmt).scaling.block[0] for w in weights):
        return "weights gathered as codes that are not cut between blocks"
    return ""

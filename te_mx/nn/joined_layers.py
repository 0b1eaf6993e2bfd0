"""What an attention of another library's model does once convert_model(fuse=True) has found that q,
k and v all read its input: in compiled code that trains they run as one layer, with one GEMM in
place of three in forward, and one of each kind in backward. Three small ones fill a GPU less well,
and their input gradients are three tensors to add up. In eager mode layers that read one tensor
share what it is quantized to, and add up in the GEMM.

The module keeps its class as a base, its layers and its own forward. That is given, in place of its
input, what carries the results to the layers: so nothing is left behind in a module, and code that
is recomputed is no special case.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from te_mx.autograd.backward import needs_gradient
from te_mx.autograd.joined_linear import Call, joined_linear
from te_mx.context import is_tracing
from te_mx.nn.given_results import Given
from te_mx.nn.linear import Linear
from te_mx.nn.mx_module import output_dtype
from te_mx.nn.reclassed import Reclassed
from te_mx.nn.surroundings import VALUES, hooked_everywhere, why_not_given, why_not_plain

ATTRIBUTE = "_te_mx_readers"
# Rows of weights: whole blocks and tiles in every format. So results and weight gradients have the
# bits of the layers one by one, and kernels read the weights where they lie.
WHOLE = 128


class ReadersPlan(NamedTuple):
    """The names of the layers that read the input of a module and nothing else does, and of that
    argument of its forward, the first one."""

    layers: tuple[str, ...]
    argument: str


class JoinedReaders(Reclassed):
    """Mixin in front of the class of a module."""

    def _te_mx_forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's own forward."""
        if is_tracing():
            name = self.__dict__[ATTRIBUTE].argument
            given = self._given(args[0] if args else kwargs.get(name))
            if given is not None and args:
                return super().forward(given, *args[1:], **kwargs)  # type: ignore[misc]
            if given is not None:
                return super().forward(**{**kwargs, name: given})  # type: ignore[misc]
        return super().forward(*args, **kwargs)  # type: ignore[misc]

    def _given(self, x: Any) -> Given | None:
        """The input with the results of the layers that read it; None where each runs by itself."""
        children: Any = self._modules  # type: ignore[attr-defined]
        names = self.__dict__[ATTRIBUTE].layers
        layers = [children.get(name) for name in names]
        if any(why_not_plain(name, one) for name, one in zip(names, layers, strict=True)):
            return None
        if hooked_everywhere() or self._own.forward is not self._followed[0]:
            return None
        found = [layer._settings() for layer in layers]
        settings = found[0]
        if settings is None or any(one != settings for one in found[1:]):
            return None
        if not _alike(x, layers):
            return None
        held = [t for layer in layers for t in layer._weight_and_bias()]
        if not needs_gradient(*held):
            return None
        return Given(x, layers, joined_linear(x, held, Call(settings, output_dtype(x))))


def _alike(x: Any, layers: list[Linear]) -> bool:
    """Whether the tensors of this call run as one layer; if not, the layers say what is wrong with
    them, if anything is."""
    if why_not_given(x) or x.is_nested or x.dim() < 2:
        return False
    width = x.shape[-1]
    first, bias = layers[0]._weight_and_bias()
    for layer in layers:
        w, b = layer._weight_and_bias()
        plain = type(w) in VALUES and (b is None or type(b) in VALUES)
        if not plain or layer._routed() or layer.save_original_input:
            return False
        if w.shape != (layer.out_features, width) or layer.out_features % WHOLE:
            return False
        if w.device != x.device or w.dtype != first.dtype or (b is None) != (bias is None):
            return False
        if b is not None and (b.device != x.device or b.dtype != bias.dtype or len(b) != len(w)):
            return False
    return True

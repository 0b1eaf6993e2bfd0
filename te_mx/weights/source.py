"""What a weight is in a forward: one class a state, one protocol for all of them.

A module has one source, `_source`, for all its weights; their state it does not know:

==============  ================================================  =================================
state           what is held                                      class
==============  ================================================  =================================
parameter       the parameter, quantized in every call            WeightSource
micro-batches   it, and copies for the calls of one step          Cached
frozen          it, and copies as long as it does not change      weights/frozen.py: Frozen
quantized only  codes and scales (drop_master=True)               weights/frozen.py: QuantizedOnly
weight only     the same, and inputs are not quantized            weights/frozen.py: WeightOnly
gathered        codes that FSDP2 gathered for this forward        Gathered
==============  ================================================  =================================

What is asked in a forward, of a layer and the key of one of its weights:

    inside        the settings that the layer runs with in a region
    check         whether the weight can be read beside an input
    operands      the weight quantized before, None where this call quantizes it
    prepared      the same, with the kernel for few rows, for a step behind a normalization
    linear        x @ weight^T + bias; `grouped`: rows of groups times theirs
    grad_target   the place of the gradient, None where autograd takes it
    lent, owned   the parameter of several ranks that autograd connects to in the place of what is
                  here, and who puts its gradient together

Two things do not depend on the state and are said beside it: how parameters make one weight (one
each; split, weights/split.py; gated halves; stacked or one a group, weights/grouped.py), which the
module family says, and whether code is being compiled, where a state hands its tensors to an op of
the graph that finds the copies when it runs (weights/traced.py).

A source holds no module, so copies of a module share it until they are given one of their own.
Weights are loaded, saved, copied and moved through it: `save`, `forget`, `renewed`,
`without_copies`.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_mx._ops import capturing
from te_mx.autograd.grad_target import Owner, Queue, WeightGradient
from te_mx.autograd.grouped import GroupedCall, grouped_linear
from te_mx.autograd.linear import Call, Lent, linear
from te_mx.autograd.linear_recipe import GEMMS
from te_mx.autograd.node import active, refuse, tag_of
from te_mx.context.region import is_tracing, output_dtype
from te_mx.dispatch.calls import Groups
from te_mx.recipes.settings import Settings
from te_mx.runtime.arguments import check_flag
from te_mx.weights import gradients
from te_mx.weights.formats import NOTHING, Fixed


class Prepared(NamedTuple):
    """A weight for one call: the settings of its steps, what was quantized before, and the product
    of few rows (weights/decode.py: DecodeCall, and what answers as it), or None each."""

    settings: Settings
    kept: Any = None
    product: Any = None


class WeightSource:
    """Parameters that train: quantized in every call. Also the protocol."""

    # What code that is no forward asks: why a layer is not one that trains, or ""; whether few rows
    # have kernels that quantize them; whether inputs are quantized; format and whether inputs are
    # left as they are of the codes that a state_dict has; settings outside of every region.
    standing = ""
    decodes = False
    quantizes_inputs = True
    saved: tuple[str, bool] | None = None
    alone: Settings | None = None
    # What freezing said: settings (None where nothing was frozen), and what of them is fixed.
    settings: Settings | None = None
    fixed: Fixed = NOTHING
    # For weights/ itself: whether `inside` changes settings; whether only codes are left.
    fixes = False
    dropped = False
    fuses_groups = True  # whether `grouped` is always that of `grouped_call`
    joined: Any = None  # the whole of a weight whose parts are gathered as codes
    lent: Lent | None = None
    owned: Mapping[int, Owner] | None = None

    def shared_by(self, lent: Lent | None, owned: Mapping[int, Owner] | None) -> Any:
        """This source in a layer that is what one rank sees of another one; copies are shared."""
        if lent is None and owned is None:
            return self
        other = copy.copy(self)
        other.lent, other.owned = lent, owned
        return other

    # --------------------------------------------------------------------------------- in a forward
    def inside(self, layer: Any, settings: Settings | None) -> Settings | None:
        """The settings that the layer runs with where a region has these; None: high precision."""
        if settings is None:
            layer._warn_plain()
        return settings

    def check(
        self, layer: Any, name: str, weight: Any, shape: tuple[int, ...], device: torch.device
    ) -> None:
        """Raise unless the weight, held under this name, can be read beside an input."""
        layer._check_parameter(name, weight, shape, device)

    def operands(
        self, layer: Any, key: str, settings: Settings, first: bool | None, device: torch.device,
        need_dx: bool,
    ) -> Any:  # fmt: skip
        """A QuantizedWeight that serves these settings, perhaps made now and
        kept; None where the call quantizes. first: is_first_microbatch of the call.

        A CUDA graph is replayed on later weights: only frozen ones may be older than it. Neither it
        nor compiled code keeps anything between its calls."""
        if first is None:
            return None
        if type(first) is not bool:
            refuse_first(layer, first)
        if is_tracing() or capturing(device):
            return None
        owner = layer._local or layer
        cached = owner._source
        if not isinstance(cached, Cached):
            owner.__dict__["_source"] = cached = Cached()
        cached = layer.__dict__["_source"] = cached.shared_by(self.lent, self.owned)
        return cached.operands(layer, key, settings, first, device, need_dx)

    def prepared(
        self, layer: Any, x: Tensor, parameters: Any, settings: Settings, first: bool | None
    ) -> tuple[Prepared, ...] | None:
        """The weights for products, one behind the other, of the rows of x, normalized; None where
        the call quantizes them. parameters: those of the layer, as autograd.layer knows them."""
        if first is None:
            return None
        needs, _ = layer._needs(x, parameters)
        return tuple([
            Prepared(settings, self.operands(layer, key, settings, first, x.device, need_dx))
            for key, need_dx in needs.items()
        ])  # fmt: skip

    def linear(
        self, layer: Any, x: Tensor, weight: Any, bias: Tensor | None, settings: Settings,
        first: bool | None, kept: Any = None, facts: Any = None,
    ) -> Tensor:  # fmt: skip
        """x [..., k] @ weight [n, k]^T + bias of a layer with one weight, checked before.
        kept: `operands`, where these are known; facts: as of autograd.linear.plan_of."""
        tracing, grad_target = is_tracing(), None
        if kept is None and first is not None:
            need_dx = torch.is_grad_enabled() and x.requires_grad
            kept = self.operands(layer, "weight", settings, first, x.device, need_dx)
        tag = layer._tag_now() if tracing or layer._tag < 0 else layer._tag
        if layer.fuse_wgrad_accumulation or layer.delay_wgrad_compute:
            parts = [weight] if layer._split is None else layer._parts("weight")
            # Of the transforms that `grad_target` looks for, the start of the forward asked.
            grad_target = gradients.grad_target(layer, parts, first, None, self.owned)
        save_x = layer.save_original_input or layer.keeps_given_input
        tokens, lent = layer._tokens, self.lent
        call = Call._make((settings, output_dtype(x), tag, kept, save_x, grad_target, tokens, lent))
        return linear(x, weight if lent is None else lent.parameter, bias, call, facts)

    def grouped(
        self, layer: Any, key: str, x: Tensor, groups: Groups, held: tuple[tuple[Tensor, ...], ...],
        settings: Settings, first: bool | None, kept: Any = None,
    ) -> Tensor:  # fmt: skip
        """The rows of every group times its weight. held: the parameters of the weights, and those
        of the biases that are added."""
        call, parts = self.grouped_call(layer, key, x, groups, held, settings, first, kept)
        return grouped_linear(x, groups.offs, parts, call)

    def grouped_call(
        self, layer: Any, key: str, x: Tensor, groups: Groups, held: tuple[tuple[Tensor, ...], ...],
        settings: Settings, first: bool | None, kept: Any = None,
    ) -> tuple[GroupedCall, tuple[Tensor, ...]]:  # fmt: skip
        """What `grouped` calls autograd with. x: the input, or one of its dtype and device that
        requires grad as it does."""
        if kept is None and first is not None:
            need_dx = torch.is_grad_enabled() and x.requires_grad
            kept = self.operands(layer, key, settings, first, x.device, need_dx)
        weights, biases = held
        grad_target = None
        if layer.fuse_wgrad_accumulation or layer.delay_wgrad_compute:
            grad_target = self.grad_target(layer, weights, first)
        added = layer._like_weights(biases)
        call = GroupedCall(
            groups.capacity, settings, output_dtype(x), len(added) > 0, kept, tag_for(layer, key),
            layer.save_original_input, grad_target,
        )  # fmt: skip
        return call, (*weights, *added)

    def grad_target(
        self, layer: Any, parameters: Sequence[Tensor], first: bool | None,
        queue: Queue | None = None,
    ) -> WeightGradient | None:  # fmt: skip
        """The place of the gradient of one weight in this call, of a layer that routes gradients;
        None when there will be none. queue: where a GEMM that waits goes, if not to the layer's."""
        grad_target = gradients.grad_target(layer, parameters, first, queue, self.owned)
        if grad_target is not None and active():
            refuse(layer._label(), parameters)
        return grad_target

    def decodes_now(self, layer: Any, x: Tensor) -> bool:
        """Whether a kernel for few rows may be asked for a product of x."""
        return False

    def ready(self, layer: Any, x: Tensor, settings: Settings) -> Any:
        """What multiplies as many rows as x has, in its dtype and quantized, with the weight of a
        te_mx.Linear (weights/decode.py: DecodeCall); None where nothing does, or where the layer
        has something to say first."""
        return None

    # ----------------------------------------------------------------------------- beside a forward
    def needs_values(self, kind: type[Exception], message: str) -> None:
        """Raise this error where only codes of the weights are left."""

    def codes(self, layer: Any) -> Iterator[tuple[str, Tensor]]:
        """The codes that are the weights of a layer, by key; none where there are parameters."""
        return iter(())

    def values(self, layer: Any, key: str) -> Tensor:
        """What products compute with, in the parameters' dtype, no history: of groups [G, n, k]."""
        each = [weight.detach() for weight in layer._each_of(key)]
        return torch.stack(each) if len(layer._master_shape(key)) > 2 else each[0]

    def dtype(self, layer: Any, key: str) -> torch.dtype:
        """The dtype of `values`."""
        return layer._sample(key).dtype

    def read(self, layer: Any, key: str) -> list[Tensor]:
        """The memory that code which runs a layer reads of a weight."""
        return list(layer._each_of(key))

    def words(self) -> str:
        """For repr and audit; empty where the weights are parameters that train."""
        return ""

    def inputs(self) -> str:
        """In words, what freezing fixed of inputs."""
        return ""

    def copies(self, layer: Any, key: str) -> list[Any]:
        """The copies of a weight that lie somewhere now: the rowwise one or None, and others."""
        return []

    # ------------------------------------------------------------------------ saved, copied, loaded
    def save(self, layer: Any, destination: Any, prefix: str) -> None:
        """Put codes that are the weights into a state_dict."""

    def forget(self) -> None:
        """Drop copies: the weights have other values."""

    def renewed(self, layer: Any) -> None:
        """The parameters were loaded, moved, or copied with their layer: copies are old, and what
        is there now is what the state speaks of."""

    def without_copies(self) -> "WeightSource":
        """For a copy of the layer, whose next forward quantizes again."""
        return PARAMETERS


PARAMETERS = WeightSource()


class Cached(WeightSource):
    """Parameters with copies for the micro-batches of one step (is_first_microbatch)."""

    def __init__(self) -> None:
        self.kept: dict[str, Any] = {}
        self.served: dict[str, Any] = {}  # each with what it served last

    def operands(
        self, layer: Any, key: str, settings: Settings, first: bool | None, device: torch.device,
        need_dx: bool,
    ) -> Any:  # fmt: skip
        if first is None:
            return None
        if type(first) is not bool:
            refuse_first(layer, first)
        tracing = is_tracing()
        capture = not tracing and capturing(device)
        kept, asked = None if first or capture else self.kept.get(key), (settings, device, need_dx)
        if kept is not None and not tracing:
            one, served = self.served.get(key, (None, None))
            if (one is kept and served == asked) or kept.serves(*asked):
                self.served[key] = kept, asked
                return kept.on_current_stream()
        elif kept is not None and kept.serves(*asked):
            return kept
        if tracing or capture:
            return None
        self.kept[key] = made = layer._make_kept(key, settings, need_dx, True)
        self.served.pop(key, None)
        return made

    def forget(self) -> None:
        self.kept.clear()
        self.served.clear()

    def renewed(self, layer: Any) -> None:
        layer.__dict__.pop("_source", None)


class Gathered(WeightSource):
    """Weights that FSDP2 gathered as codes, for one forward of one rank.

    Args:
        kept: a QuantizedWeight for each key that is gathered.
        joined: the whole of one of which the parts are gathered.
        inner: the source of the layer that they were gathered for.
    """

    fixes = True

    def __init__(self, kept: dict[str, Any], joined: Any, inner: WeightSource) -> None:
        self.kept, self.joined = kept, joined
        self.standing = inner.standing
        self.lent, self.owned = inner.lent, inner.owned

    def inside(self, layer: Any, settings: Settings | None) -> Settings | None:
        return next(iter(self.kept.values())).settings

    def operands(self, layer: Any, key: str, *call: Any) -> Any:
        return self.kept[key]

    def prepared(
        self, layer: Any, x: Tensor, parameters: Any, settings: Settings, first: bool | None
    ) -> tuple[Prepared, ...]:
        return tuple([Prepared(settings, self.kept.get(key)) for key in layer._weight_keys])

    def linear(
        self, layer: Any, x: Tensor, weight: Any, bias: Tensor | None, settings: Settings,
        first: bool | None, kept: Any = None, facts: Any = None,
    ) -> Tensor:  # fmt: skip
        return super().linear(layer, x, weight, bias, settings, first, self.kept["weight"])

    def grouped_call(
        self, layer: Any, key: str, x: Tensor, groups: Groups, held: tuple[tuple[Tensor, ...], ...],
        settings: Settings, first: bool | None, kept: Any = None,
    ) -> tuple[GroupedCall, tuple[Tensor, ...]]:  # fmt: skip
        kept = self.kept[key]
        return super().grouped_call(layer, key, x, groups, held, kept.settings, first, kept)


def tag_for(layer: Any, key: str) -> int:
    """The first slot of a weight of a layer in te_mx.runtime.kernel_log.LAST_RUN."""
    return tag_of(layer._tag_now(), len(GEMMS) * layer._weight_keys.index(key))


def refuse_first(layer: Any, first: Any) -> None:
    """Raise for an is_first_microbatch that is no bool."""
    check_flag(f"{layer._label()}: is_first_microbatch", first)


class Sourced:
    """Mixin of the modules, beside an nn.Module."""

    # Class attributes, not set in __init__: convert_model gives modules this class in place.
    _source: WeightSource = PARAMETERS
    _split: dict[str, int] | None = None  # rows of each part of a weight that is split, by name
    fuse_wgrad_accumulation: bool = False
    delay_wgrad_compute: bool = False
    save_original_input: bool = False
    # What made the input keeps it (fusion/in_place.py): then this layer does, too.
    keeps_given_input: bool = False
    # Whether products read the parameters as they are held, and not turned.
    _reads_held = True

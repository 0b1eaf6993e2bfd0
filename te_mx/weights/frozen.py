"""Weights that stand still: the states that `te_mx.freeze_weights` puts a module in. What is asked
of them: weights/source.py.

With the master weights kept, freezing adds quantized and packed copies that no checkpoint sees, and
that are made again when a master changed (weights/changes.py). With the masters dropped the codes
are the weights: for each of them buffers of codes and scales, which a state_dict shows under the
names of weights/state_dict.py."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_mx import layouts
from te_mx._ops import Operand, Stack, capturing, dequantize_2d, for_any_rows, plain
from te_mx._ops.library import is_unwatched
from te_mx.autograd import weight_parts
from te_mx.autograd.grouped import GroupedCall, grouped_on_codes
from te_mx.autograd.linear import Call, linear_on_codes
from te_mx.autograd.linear_recipe import QuantizedWeight, on_codes, serving
from te_mx.autograd.saved import flatten, unflatten
from te_mx.context.region import is_tracing, output_dtype
from te_mx.dispatch.calls import Groups
from te_mx.recipes.resolve import DEFAULT_SETTINGS
from te_mx.recipes.settings import Settings
from te_mx.weights import decode, traced, weight_only
from te_mx.weights import formats as frozen_formats
from te_mx.weights.changes import Sources, register
from te_mx.weights.decode import DecodeCall
from te_mx.weights.formats import Fixed
from te_mx.weights.source import Prepared, WeightSource, refuse_first, tag_for
from te_mx.weights.state_dict import save_codes
from te_mx.weights.traced import Traced


class Frozen(WeightSource):
    """Parameters that stand still: quantized copies beside them, made again when one changed.

    Frozen with `settings`, of which `fixed` says what stays inside of regions.
    `kept` holds the copies by key; what is missing is made again. `sources` says what they were
    made of, `in_graphs` keeps those that a CUDA graph reads. `decode_weights`: for few
    rows.
    `dtypes` and `shapes` (of the weights, by key), `trained` (requires_grad of the parameters, by
    name) and `masters` (numbers of those that were dropped, by name) are what unfreezing restores.
    """

    standing = "frozen"
    decodes = True
    fixes = True
    fuses_groups = False  # few rows have kernels of their own
    _word = "frozen"
    settings: Settings

    def __init__(
        self,
        settings: Settings,
        fixed: Fixed = frozen_formats.NOTHING,
        before: "Frozen | None" = None,
    ) -> None:
        self.settings = settings
        self.fixed = fixed
        self.dtypes: dict[str, torch.dtype] = {} if before is None else dict(before.dtypes)
        self.shapes: dict[str, tuple[int, ...]] = {} if before is None else dict(before.shapes)
        self.trained: dict[str, bool] = {} if before is None else dict(before.trained)
        self.masters: dict[str, int] = {}
        self.kept: dict[str, Any] = {}
        self.sources: dict[str, Sources] = {}
        self.in_graphs: list[Any] = []
        self.decode_weights = decode.DecodeWeights()

    def without_copies(self) -> "Frozen":
        return type(self)(self.settings, self.fixed, self)

    def forget(self) -> None:
        self.kept.clear()

    def renewed(self, layer: Any) -> None:
        register(layer)
        self.kept.clear()
        self.sources = {key: Sources(layer._made_of(key)) for key in layer._weight_keys}

    # --------------------------------------------------------------------------------- in a forward
    def inside(self, layer: Any, settings: Settings | None) -> Settings | None:
        if settings is None or self.fixed == frozen_formats.NOTHING:
            return super().inside(layer, settings)
        return self._fixed_inside(layer, settings)

    def _fixed_inside(self, layer: Any, settings: Settings) -> Settings:
        try:
            return frozen_formats.inside(settings, self.settings, self.fixed, self.dropped)
        except ValueError as error:
            raise ValueError(f"{layer._label()}: {error}") from None

    def current(self, layer: Any, key: str) -> tuple[Any, bool]:
        """The copy of a weight, None where there is none or what it was made of changed; and
        whether a new one is to be kept."""
        sources = self.sources[key]
        owner = layer._local or layer  # the shards of a local layer are new ones each time
        tensors: Any = owner._parameters
        if sources.unchanged(tensors):
            return self.kept.get(key), True
        tensors = owner._made_of(key)  # not all are parameters of the module
        if sources.unchanged(tensors):
            return self.kept.get(key), True
        same = sources.are(tensors)
        if same or sources.gone():
            self.kept.pop(key, None)
        return None, same and sources.follow(tensors)

    def operands(
        self, layer: Any, key: str, settings: Settings, first: bool | None, device: torch.device,
        need_dx: bool,
    ) -> Any:  # fmt: skip
        """Compiled code cannot look here whether a weight changed: ops of its graph do."""
        if first is not None and type(first) is not bool:
            refuse_first(layer, first)
        if is_tracing():
            return None
        capture = capturing(device)
        kept, follows = self.current(layer, key)
        if kept is not None and kept.serves(settings, device, need_dx):
            if capture and all(kept is not old for old in self.in_graphs):
                self.in_graphs.append(kept)
            return kept.on_current_stream()
        if capture or not follows:
            return None
        self.kept[key] = made = self.make_kept(layer, key, settings, need_dx)
        return made

    def make_kept(self, layer: Any, key: str, settings: Settings, need_dx: bool) -> Any:
        """A copy of a weight, which gradients of inputs find by rows."""
        made = layer._make_kept(key, settings, need_dx)
        row = made.row if need_dx else for_any_rows(made.row)
        return made if row is made.row else made._replace(row=row, own=True)

    def prepared(
        self, layer: Any, x: Tensor, parameters: Any, settings: Settings, first: bool | None
    ) -> tuple[Prepared, ...]:
        needs, plain = layer._needs(x, parameters)
        made: list[Prepared] = []
        for key, need_dx in needs.items():
            if is_tracing() and not self.dropped:
                kept = traced.kept(layer, key, settings) if plain else None
            else:
                kept = self.operands(layer, key, settings, first, x.device, need_dx)
            few = plain and not (made and made[-1].product is None)
            product = self._product(layer, key, x, settings, kept) if few else None
            made.append(Prepared(settings, kept, product))
        return _all_or_none(made)

    def _product(
        self, layer: Any, key: str, x: Tensor, settings: Settings, kept: Any
    ) -> DecodeCall | Traced | None:
        """What multiplies few rows of a step inside of a module, as many as x has."""
        if is_tracing():
            return traced.ready(layer, key, x, output_dtype(x), settings, multiplies=True)
        if layer._tokens is not None or kept is None or not self._is_few(layer, x):
            return None
        size = layer._shape_of(key)[-2:]
        return self._ready(layer, key, x, output_dtype(x), settings, kept, size)

    def _ready(
        self, layer: Any, key: str, x: Tensor, dtype: torch.dtype, settings: Settings, kept: Any,
        size: Sequence[int],
    ) -> DecodeCall | None:  # fmt: skip
        if not self._is_few(layer, x) or not is_unwatched(x):
            return None
        given = settings if self.quantizes_inputs else None
        found = decode.ready(x, dtype, self.weight(layer, key, kept, size), given)
        # In front of the GEMM's own kernel a normalization or activation quantizes in its read.
        return found if found is not None and found.kernel.multiplies else None

    def linear(
        self, layer: Any, x: Tensor, weight: Any, bias: Tensor | None, settings: Settings,
        first: bool | None, kept: Any = None, facts: Any = None,
    ) -> Tensor:  # fmt: skip
        dtype, made = output_dtype(x), None
        if is_tracing():
            made = traced.traced(layer, "weight", x, bias, settings, dtype)
            if made is None:
                made = traced.many_rows(layer, "weight", x, bias, settings, dtype)
        else:
            need_dx = torch.is_grad_enabled() and x.requires_grad
            kept = self.operands(layer, "weight", settings, first, x.device, need_dx)
            if kept is not None and self.decodes_now(layer, x):
                form, tag = self.weight(layer, "weight", kept, weight.shape), layer._tag_now()
                made = decode.linear(x, form, bias, settings, dtype, tag)
        if made is not None:
            return made
        first = first if kept is None else None
        return super().linear(layer, x, weight, bias, settings, first, kept, facts)

    def grouped(
        self, layer: Any, key: str, x: Tensor, groups: Groups, held: tuple[tuple[Tensor, ...], ...],
        settings: Settings, first: bool | None, kept: Any = None,
    ) -> Tensor:  # fmt: skip
        if not is_tracing():
            need_dx = torch.is_grad_enabled() and x.requires_grad
            kept = self.operands(layer, key, settings, first, x.device, need_dx)
        made = None
        if kept is not None or is_tracing():
            made = self._few_groups(layer, key, x, groups, held[1], settings, kept)
        if made is not None:
            return made
        return super().grouped(layer, key, x, groups, held, settings, first, kept)

    def _few_groups(
        self, layer: Any, key: str, x: Tensor, groups: Groups, biases: Sequence[Tensor],
        settings: Settings, kept: Any,
    ) -> Tensor | None:  # fmt: skip
        """The result where a kernel for few rows takes it, else None."""
        tracing, (many, n, k) = is_tracing(), layer._shape_of(key)
        # Weights that are read turned lie as they are read where no master is left.
        reads_held = layer._reads_held or not (tracing or self.quantizes_inputs)
        if not reads_held or groups.capacity or not (tracing or self._is_few(layer, x, many)):
            return None
        dtype = output_dtype(x)
        if not self.quantizes_inputs and x.dtype != dtype:  # it is rounded first
            return None
        bias_GN = layer._stacked_bias(biases)
        if bias_GN is not None and (bias_GN.shape != (many, n) or bias_GN.device != x.device):
            return None  # the steps say what is wrong with it
        if tracing:
            return traced.traced(layer, key, x, bias_GN, settings, dtype, groups.offs)
        weight = self.weight(layer, key, kept, (n, k), many)
        quantized = settings if self.quantizes_inputs else None
        return decode.linear(x, weight, bias_GN, quantized, dtype, tag_for(layer, key), groups.offs)

    def decodes_now(self, layer: Any, x: Tensor) -> bool:
        if is_tracing() or layer._tokens is not None or not layer._reads_held:
            return False
        return self.decodes and self._is_few(layer, x)

    def _is_few(self, layer: Any, x: Tensor, groups: int = 0) -> bool:
        lies = [layouts.get(name) for name in layer._lies.values()]
        lies += [kept.row.layout for kept in self.kept.values() if kept.row is not None]
        many = any(layout.any_rows for layout in lies)
        return decode.is_few(x, x.shape[-1], groups, many or not self.quantizes_inputs)

    def weight(
        self, layer: Any, key: str, kept: Any, size: Sequence[int], groups: int = 0
    ) -> decode.Weight:
        """A weight of this size, as kernels for few rows see it. kept: its `operands`."""

        def row() -> "Operand | Stack":
            if given.layout is layouts.ROWS:
                return given
            return layer._plain_codes(key, kept.settings)

        given: Operand | Stack = kept.row
        n, k = size
        return decode.Weight(self.decode_weights, key, n, k, (kept,), given, row, groups)

    def ready(self, layer: Any, x: Tensor, settings: Settings) -> DecodeCall | None:
        if layer._tokens is not None or is_tracing():
            return None
        size = layer.out_features, layer.in_features
        weight, bias = layer._weight_and_bias()
        for value, shape in ((weight, size), (bias, size[:1])):
            if value is not None and (value.shape != shape or value.device != x.device):
                return None
        kept = self.operands(layer, "weight", settings, None, x.device, False)
        if kept is None:
            return None
        return self._ready(layer, "weight", x, x.dtype, settings, kept, size)

    # ----------------------------------------------------------------------------- beside a forward
    def read(self, layer: Any, key: str) -> list[Tensor]:
        kept = self.kept.get(key)
        row = [] if kept is None or kept.row is None else [kept.row.codes]
        return [*layer._each_of(key), *row]

    def words(self) -> str:
        """The format of the weights is named where it is not the usual one."""
        fmt = self.settings.w
        return self._word if fmt == DEFAULT_SETTINGS.w else f"{self._word}, {fmt}"

    def inputs(self) -> str:
        """In words, what freezing fixed of inputs."""
        return f", inputs {self.settings.x}" if self.fixed.x else ""

    def copies(self, layer: Any, key: str) -> list[Any]:
        kept, form = self.kept.get(key), self.decode_weights.made.get(key)
        few = None if form is None else form.weight
        return [getattr(kept, "row", None), getattr(kept, "col", None), few]

    def frozen_to(self, settings: Settings, fixed: Fixed, dropped: bool) -> "Frozen":
        """This one with other settings, and what becomes of it by them."""
        kind = (WeightOnly if fixed.weight_only else QuantizedOnly) if dropped else Frozen
        made = self if kind is type(self) else kind(settings)
        made.__dict__.update(self.__dict__, settings=settings, fixed=fixed)
        return made


class QuantizedOnly(Frozen):
    """Codes and scales, which are the weights: one copy in buffers of the module, as its device
    reads them, and by rows in its state_dict."""

    dropped = True
    _word = "frozen, no master"

    @property
    def alone(self) -> Settings | None:  # type: ignore[override]
        return self.settings

    @property
    def saved(self) -> tuple[str, bool] | None:  # type: ignore[override]
        return self.settings.w, self.fixed.weight_only

    def row(self, layer: Any, key: str, settings: Settings) -> Operand | Stack:
        """The weight for fprop with these settings."""
        return serving(layer._one_copy(key), settings)

    def renewed(self, layer: Any) -> None:
        layer._rest()
        register(layer)

    def save(self, layer: Any, destination: Any, prefix: str) -> None:
        save_codes(layer, destination, prefix)

    # --------------------------------------------------------------------------------- in a forward
    def inside(self, layer: Any, settings: Settings | None) -> Settings | None:
        # There is no high-precision weight to run on. And none that trains, whose bits would have
        # to be those of other numbers of rows: K is cut where few tiles leave the GPU idle.
        made = self.settings if settings is None else self._fixed_inside(layer, settings)
        return made if made.split_k else made._replace(split_k=True)

    def check(
        self, layer: Any, name: str, weight: Any, shape: tuple[int, ...], device: torch.device
    ) -> None:
        self._refuse_given(layer)
        layer._check_codes(layer._weight_keys, device)

    def _refuse_given(self, layer: Any) -> None:
        """Raise RuntimeError where somebody gives a module without masters some for a forward."""
        given = layer._parameters
        for key in layer._weight_keys:
            for name in layer._held_by(key):
                if given.get(name) is not None:
                    raise RuntimeError(
                        f"{layer._label()} was frozen with drop_master=True and runs on its codes, "
                        f"but got a {name} {tuple(given[name].shape)} (functional_call, "
                        "tie_weights, or set by hand); call te_mx.unfreeze_weights(model, "
                        "dequantize=True) first, which keeps this one and drops the codes"
                    )

    def operands(self, layer: Any, key: str, settings: Settings, *call: Any) -> Any:
        held = layer._one_copy(key)
        own = held.layout.any_rows
        return QuantizedWeight(settings, held if own else serving(held, settings), None, own=own)

    def prepared(
        self, layer: Any, x: Tensor, parameters: Any, settings: Settings, first: bool | None
    ) -> tuple[Prepared, ...]:
        self._refuse_given(layer)
        return super().prepared(layer, x, parameters, on_codes(settings), first)

    def linear(
        self, layer: Any, x: Tensor, weight: Any, bias: Tensor | None, settings: Settings,
        first: bool | None, kept: Any = None, facts: Any = None,
    ) -> Tensor:  # fmt: skip
        if weight is not None:
            self._refuse_given(layer)
        dtype, tag = output_dtype(x), layer._tag_now()
        if is_tracing():
            made = traced.traced(layer, "weight", x, bias, settings, dtype)
        else:
            made = self._few(layer, x, self.shapes["weight"], bias, settings, tag)
        if made is not None:
            return made
        row = self.row(layer, "weight", settings)
        return self._steps(x, row, bias, Call(settings, dtype, tag, tokens=layer._tokens))

    def _few(
        self, layer: Any, x: Tensor, size: Sequence[int], bias: Tensor | None, settings: Settings,
        tag: int,
    ) -> Tensor | None:  # fmt: skip
        if not self.decodes_now(layer, x):
            return None
        form = self.weight(layer, "weight", None, size)
        return decode.linear(x, form, bias, settings, output_dtype(x), tag)

    def _steps(self, x: Tensor, row: Any, bias: Tensor | None, call: Call) -> Tensor:
        return linear_on_codes(x, row, bias, call)

    def grouped(
        self, layer: Any, key: str, x: Tensor, groups: Groups, held: tuple[tuple[Tensor, ...], ...],
        settings: Settings, first: bool | None, kept: Any = None,
    ) -> Tensor:  # fmt: skip
        layer._check_groups(x.device)
        biases = held[1]
        made = self._few_groups(layer, key, x, groups, biases, settings, None)
        if made is not None:
            return made
        row: Any = self.row(layer, key, settings)
        bias_GN, tag = layer._stacked_bias(biases), tag_for(layer, key)
        call = GroupedCall(groups.capacity, settings, output_dtype(x), bias_GN is not None, tag=tag)
        return self._grouped_steps(x, groups, row, bias_GN, call)

    def _grouped_steps(
        self, x: Tensor, groups: Groups, row: Stack, bias_GN: Tensor | None, call: GroupedCall
    ) -> Tensor:
        return grouped_on_codes(x, groups.offs, row, bias_GN, call)

    def grad_target(self, *call: Any) -> None:
        return None

    def weight(
        self, layer: Any, key: str, kept: Any, size: Sequence[int], groups: int = 0
    ) -> decode.Weight:
        made_of, held = decode.state(*layer._stored(key)), layer._one_copy(key)
        forms, (n, k) = self.decode_weights, size
        return decode.Weight(forms, key, n, k, made_of, held, lambda: plain(held), groups)

    def ready(self, layer: Any, x: Tensor, settings: Settings) -> DecodeCall | None:
        if layer._tokens is not None or is_tracing():
            return None
        self.check(layer, "weight", None, (), x.device)
        size = layer.out_features, layer.in_features
        return self._ready(layer, "weight", x, x.dtype, settings, None, size)

    # ----------------------------------------------------------------------------- beside a forward
    def needs_values(self, kind: type[Exception], message: str) -> None:
        raise kind(message)

    def codes(self, layer: Any) -> Iterator[tuple[str, Tensor]]:
        return ((key, layer._stored(key)[0]) for key in layer._weight_keys)

    def dtype(self, layer: Any, key: str) -> torch.dtype:
        return self.dtypes[key]

    def values(self, layer: Any, key: str) -> Tensor:
        row, dtype = plain(layer._one_copy(key)), self.dtypes[key]
        if isinstance(row, Stack):
            groups = [dequantize_2d(row.group(i), dtype) for i in range(row.groups)]
            return weight_parts.stack(groups)
        return dequantize_2d(row, dtype)

    def read(self, layer: Any, key: str) -> list[Tensor]:
        return [layer._stored(key)[0]]

    def copies(self, layer: Any, key: str) -> list[Any]:
        return [layer._one_copy(key), *super().copies(layer, key)[1:]]


class WeightOnly(QuantizedOnly):
    """The same, and inputs are not quantized: they meet the very values of the codes."""

    decodes = False
    quantizes_inputs = False

    def prepared(self, *call: Any) -> tuple[Prepared, ...]:
        made = super().prepared(*call)
        return tuple([one._replace(product=AsIs(one.product, one.kept.row)) for one in made])

    def _few(
        self, layer: Any, x: Tensor, size: Sequence[int], bias: Tensor | None, settings: Settings,
        tag: int,
    ) -> Tensor | None:  # fmt: skip
        dtype = output_dtype(x)
        if x.dtype != dtype or layer._tokens is not None or not layer._reads_held:
            return None  # such an input is rounded first
        return decode.linear(x, self.weight(layer, "weight", None, size), bias, None, dtype, tag)

    def _steps(self, x: Tensor, row: Any, bias: Tensor | None, call: Call) -> Tensor:
        return weight_only.linear(x, row, bias, call.out_dtype, call.tag)

    def _grouped_steps(
        self, x: Tensor, groups: Groups, row: Stack, bias_GN: Tensor | None, call: GroupedCall
    ) -> Tensor:
        y = weight_only.grouped(flatten(x), groups, row, bias_GN, call.out_dtype, call.tag)
        return unflatten(y, x)

    def inputs(self) -> str:
        return ", inputs as they are"


class AsIs(NamedTuple):
    """The product of rows that are not quantized with a weight: by a kernel for few rows where
    there is one, else of what the codes stand for."""

    few: DecodeCall | Traced | None
    row: Operand

    @property
    def as_is(self) -> bool:
        """As of DecodeCall."""
        return True

    def target(self, device: torch.device) -> None:
        """The rows are not quantized."""

    def run(self, x: Tensor, bias: Tensor | None, out_dtype: torch.dtype, tag: int = -1) -> Tensor:
        """x [..., k] @ w^T + bias [..., n]; differentiable where there is no kernel."""
        made = None if self.few is None else self.few.run(x, bias, out_dtype, tag)
        return weight_only.linear(x, self.row, bias, out_dtype, tag) if made is None else made


def _all_or_none(made: list[Prepared]) -> tuple[Prepared, ...]:
    """Products one behind the other: all run by kernels for few rows, or none."""
    products = [one.product for one in made]
    if None in products:
        return tuple([one._replace(product=None) for one in made])
    if len(made) == 2 and isinstance(products[0], Traced):
        products = list(products[0].together(products[1]))
    return tuple([one._replace(product=p) for one, p in zip(made, products, strict=True)])

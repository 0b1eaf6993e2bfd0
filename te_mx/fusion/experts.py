"""Experts of other libraries' mixtures, whose weights are stacked in parameters [E, ., .]: what
such a module needs to run its products in MXFP8.

The module keeps its class, as a subclass of it, its parameters and its forward outside of
te_mx.autocast."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from te_mx.autograd import grouped
from te_mx.autograd.routing import Route
from te_mx.context.region import output_dtype
from te_mx.dispatch.calls import Groups
from te_mx.dispatch.fused import Activation
from te_mx.formats import Format
from te_mx.fusion.class_swap import LayerInPlace
from te_mx.recipes.settings import Mixed, Settings
from te_mx.weights import missing
from te_mx.weights.grouped import OfGroups
from te_mx.weights.ranks import above, here, is_gathered

# (rows [R, in], ends of the experts) -> what is added to their products, [R, out]
Adapter = Callable[[Tensor, Tensor], Tensor]
# (rows [R, in], ends of the experts, key, bias [E, out] or None) -> [R, out], in high precision
Watched = Callable[[Tensor, Tensor, str, Tensor | None], Tensor]


class ExpertsModule(OfGroups, LayerInPlace):
    """Mixin before the class of an experts module. A key names a parameter [E, out, in], or
    [E, in, out] under `_transposed`."""

    _reads_held = False
    _gate: Activation | None = None  # in the place of the class's own, by convert_model(fuse=True)
    _adapters: Mapping[str, Adapter] | None = None  # of this forward, by key
    _watched: Watched | None = None  # computes the products while te_mx.inspect looks on

    # ------------------------------------------------- what the experts of a library say of theirs
    @property
    def _transposed(self) -> bool:
        return False

    def _stack(self, key: str) -> Tensor:
        """The weights of this key as the products read them, [E, out, in]."""
        weight: Tensor = getattr(self, key)
        return weight.transpose(-2, -1) if self._transposed else weight

    def _widths(self) -> str:
        """E x in -> inner -> out, as a report shows it; also where only codes are left."""
        first, last = (self._shape_of(self._weight_keys[i]) for i in (0, -1))
        return f"{first[0]} x {first[2]} -> {first[1]} -> {last[1]}"

    def _cuts_a_block(self, key: str, fmt: Format) -> bool:
        """Whether a block of the format reaches from one half of the rows into the other. In files
        the halves of such a stack, gate and up, are tensors with scales of their own."""
        height, rows = fmt.scaling.block[0], self._shape_of(key)[-2]
        return key == "gate_up_proj" and height > 1 and (rows // 2) % height != 0

    # ----------------------------------------------------------------------------- as peft sees it
    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """nn.Module's; and outlines of weights of which only codes are left, for peft alone."""
        yield from super().named_parameters(prefix, recurse, remove_duplicate)  # type: ignore[misc]
        if not recurse and missing.is_asked_for_targets():
            for key, codes in self._source.codes(self):
                yield key, nn.Parameter(self._outline(key, codes), requires_grad=False)

    def _outline(self, key: str, codes: Tensor) -> Tensor:
        """A tensor of the shape, dtype and device of a parameter of which only codes are left."""
        dtype, shape = self._source.dtype(self, key), self._shape_of(key)
        made = codes.new_zeros((), dtype=dtype).expand(shape)
        return made.transpose(-2, -1) if self._transposed else made

    # --------------------------------------------------------------------------- running a forward
    def _is_plain(self, settings: Settings | None) -> bool:
        """Whether a forward is that of the class."""
        return settings is None and self._watched is None

    def _settings_of_each(self) -> tuple[Settings | None, ...]:
        """Those of the products, in the order of the keys.

        Raises:
            NotImplementedError: some are in high precision and others are not.
        """
        settings: Any = self._settings()
        if not isinstance(settings, Mixed):
            return (settings,) * len(self._weight_keys)
        if None in settings.each:
            raise NotImplementedError(
                f"{self._label()}: some of its products are quantized and others are not "
                f"({settings.formats}), which is not supported; give all or none of "
                f"{', '.join(self._weight_keys)} a recipe"
            )
        return settings.each

    def _refuse_spread(self: Any) -> None:
        """
        Raises:
            NotImplementedError: a weight is a DTensor, and nobody says which experts are whose.
        """
        for name, parameter in self._parameters.items():
            if type(parameter).__name__ == "DTensor":
                raise NotImplementedError(
                    f"{self._label()}: {name} is a DTensor {tuple(parameter.shape)}, "
                    f"{parameter.placements}, of which a converted experts module does not know "
                    "which tokens go to which rank; shard it with fully_shard, which gathers whole "
                    "weights, or use a te_mx.GroupedLinear(single_grouped_weight=True) with "
                    'te_mx.distributed.ModuleParallel("experts")'
                )

    def _product(
        self, x_RK: Tensor, offs: Tensor, key: str, bias_EN: Tensor | None,
        settings: Settings | None,
    ) -> Tensor:  # fmt: skip
        """The rows of every expert times its weight, [R, out]; rows of no expert are 0.

        Raises:
            TypeError, ValueError: x, the weight or the bias cannot be multiplied in MXFP8.
            RuntimeError: somebody gives weights to experts whose masters were dropped.
        """
        if settings is None:
            assert self._watched is not None
            return self._watched(x_RK, offs, key, bias_EN)
        source, held = self._read(x_RK, key, bias_EN, settings)
        y = source.grouped(self, key, x_RK, Groups(offs), held, settings, None)
        adapters = self._adapters or {}
        return (y + adapters[key](x_RK, offs)).to(y.dtype) if key in adapters else y

    def _both_products(
        self, x_TK: Tensor, to: Route, biases: Sequence[Tensor | None], settings: Settings | None
    ) -> Tensor | None:
        """Both products and the gate between them as one function of tokens on a route, [R, out];
        None where somebody looks between, or a state of the weights has products of its own."""
        first, last = self._weight_keys
        gate, inner = self._gate, self._shape_of(first)[1]
        if gate is None or settings is None or self._adapters or self._watched is not None:
            return None
        if not self._source.fuses_groups or self._shape_of(last)[2] * 2 != inner:
            return None
        read, held = self._read(x_TK, first, biases[0], settings)
        # Of what lies between, whoever reads the second weight sees dtype and device alone.
        like = x_TK.new_empty((0, inner // 2), dtype=output_dtype(x_TK))
        read_last, held_last = self._read(like, last, biases[1], settings)
        groups = Groups(to.offs)
        call, parts = read.grouped_call(self, first, x_TK, groups, held, settings, None)
        other, others = read_last.grouped_call(self, last, like, groups, held_last, settings, None)
        if not grouped.runs((call, other), x_TK, parts):
            return None
        return grouped.grouped_mlp(x_TK, to.offs, (call, other), gate, (parts, others), to)

    def _read(
        self, x_RK: Tensor, key: str, bias_EN: Tensor | None, settings: Settings
    ) -> tuple[Any, tuple[tuple[Any, ...], tuple[Tensor, ...]]]:
        """The source of a weight, and what is held: it and its bias, checked beside an input."""
        experts, rows, k = self._shape_of(key)
        self._check_shape(x_RK, f"the input width of {key}", k)
        self._check_kind(x_RK)
        if bias_EN is not None:
            self._check_parameter(f"{key}_bias", bias_EN, (experts, rows), x_RK.device)
        held_now: dict[str, Any] = self._parameters  # type: ignore[attr-defined]
        weight = None if held_now.get(key, self) is None else self._stack(key)
        source = above.distributed.codes_of(self, settings) if is_gathered(weight) else self._source
        source.check(self, key, weight, (experts, rows, k), x_RK.device)
        return source, ((weight,), () if bias_EN is None else (bias_EN,))

    # ---------------------------------------------------------- weights that stand still, all keys
    def _whole(self, key: str) -> Tensor:
        return self._stack(key)

    def _each_of(self, key: str) -> list[Tensor]:
        return list(here(self._stack(key)).detach().unbind(0))

    def _masters(self, key: str) -> dict[str, Tensor]:
        made = self._source.values(self, key)
        return {key: made.transpose(-2, -1).contiguous() if self._transposed else made}

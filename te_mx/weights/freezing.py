"""What `te_mx.freeze_weights` does to one module, and back: the part of every module that knows its
weights by key."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from te_mx._ops import FLOAT_DTYPES, Operand, Stack, held_as, plain, quantize_2d, settled
from te_mx._ops.quantize import tensors_of
from te_mx.autograd.linear_recipe import kept_weight, plain_spec
from te_mx.layouts import ROWS
from te_mx.recipes.settings import Mixed, Settings
from te_mx.weights import formats as frozen_formats
from te_mx.weights.changes import id_of, register
from te_mx.weights.formats import Fixed
from te_mx.weights.frozen import Frozen, QuantizedOnly
from te_mx.weights.ranks import above, here, is_spread
from te_mx.weights.source import Sourced
from te_mx.weights.split import part_names

_PARTS = "codes", "scale", "aside", "tensor_scale"  # buffers of a weight without a master


def as_buffers(held: Operand | Stack) -> dict[str, Tensor | None]:
    """What a module without a master has of a weight, by the ends of the buffers' names. The
    state_dict has them under other names and dtypes: as integers they pass through .to(dtype)
    unharmed, fp32 scales by their bytes."""
    scales, whole = held.scales, held.tensor_scale
    scales = scales.view(torch.uint8) if scales.is_floating_point() else scales
    if whole is not None:
        whole = whole.view(*whole.shape, 1).view(torch.uint8)
    return dict(zip(_PARTS, (held.codes, scales, held.packed, whole), strict=True))


class Freezable(Sourced):
    """Mixin of the modules, beside an nn.Module. A *key* names a weight of the module as the GEMMs
    see it, whatever parameters hold it: split ones are joined, those of groups stacked."""

    # Class attributes, not set in __init__: convert_model gives modules this class in place.
    _bound: Settings | Mixed | None = None  # what runs outside of regions, given by convert_model
    _bound_plain: bool = False  # the recipe that was bound leaves this module in high precision
    # Endings of the names of codes and scales in a state_dict, where they are not te_mx's.
    _saved_as: tuple[str | None, ...] | None = None
    _saved_with: Mapping[str, Tensor] = MappingProxyType({})  # what came with codes, by name
    _claim: dict[str, Any] | None = (
        None  # the quantization_config that says so (weights/missing.py)
    )
    _weight_keys: tuple[str, ...] = ("weight",)
    _lies: Mapping[str, str] = MappingProxyType({})  # layouts of weights without masters, by key

    # -------------------------------------------------- what a module family says of its weights
    def _whole(self, key: str) -> Tensor:
        """The weight of this key."""
        return getattr(self, key)

    def _sample(self, key: str) -> Tensor:
        """A tensor with the dtype and the device of the weight."""
        return self._whole(key)

    def _master_shape(self, key: str) -> tuple[int, ...]:
        """The shape of the weight, of all groups together."""
        return tuple(self._whole(key).shape)

    def _each_of(self, key: str) -> list[Tensor]:
        """The matrices of the weight that are quantized each by itself."""
        return [self._whole(key)]

    def _held_by(self, key: str) -> tuple[str, ...]:
        """Names of the parameters that hold the weight, as far as it is not computed."""
        return (key,)

    def _parts_of(self, key: str) -> tuple[str, ...]:
        """As `_held_by`, of a weight that is split (parameters_split) its parts."""
        return self._held_by(key) if self._split is None else part_names(self._split, key)

    def _made_of(self: Any, key: str) -> dict[str, Tensor]:
        """All that the weight is computed from, by name."""
        computed = self._modules.get("parametrizations") or {}
        tensors: dict[str, Tensor] = {}
        for name in self._parts_of(key):
            if name in computed:
                tensors |= computed[name].named_parameters(prefix=f"parametrizations.{name}")
                tensors |= computed[name].named_buffers(prefix=f"parametrizations.{name}")
            else:
                tensors[name] = getattr(self, name)
        return tensors

    def _make_kept(
        self, key: str, settings: Settings, need_dx: bool, for_steps: bool = False
    ) -> Any:
        """The weight quantized and packed for several calls; for_steps: of one training step."""
        return kept_weight(here(self._whole(key)), settings, need_dx, for_steps)

    def _plain_codes(self, key: str, settings: Settings) -> Operand | Stack:
        """The weight, quantized rowwise."""
        return rowwise(here(self._whole(key)).detach(), settings)

    def _codes_below(self, key: str, settings: Settings, amax: Tensor) -> Operand:
        """The same of a matrix, with the tensor scale of weights that go up to amax together."""
        weight = here(self._whole(key)).detach()
        n, k = weight.shape
        room = weight.new_zeros(16 + -n % 16, k)  # blocks of their own
        room[-1, 0] = amax
        row = rowwise(torch.cat([weight, room]), settings)
        scales = row.scales[: row.format.scales_shape(n, k)[0]].clone()
        return row._replace(codes=row.codes[:n].clone(), scales=scales, rows=n)

    def _masters(self, key: str) -> dict[str, Tensor]:
        """Values of the codes, by the names of the parameters that take them."""
        return {key: self._source.values(self, key)}

    # -------------------------------------------------------------------------- freezing and back
    def why_not_frozen(self, drop_master: bool) -> str:
        """Why this module cannot be frozen so, or an empty string."""
        if self._source.dropped:
            return ""
        if drop_master and is_spread(*self._parameters.values()):  # type: ignore[attr-defined]
            return (
                "is a DTensor, and codes without a master are no part of one; freeze before it is "
                "sharded, or use drop_master=False"
            )
        for key in self._weight_keys:
            for weight in self._each_of(key):
                if problem := _not_quantizable(here(weight)):
                    return f"{key} {problem}"
            if drop_master and not self._is_held(key):
                return (
                    f"{key} is computed by a parametrization or split into parameters, so there "
                    "is no one master to drop; use drop_master=False"
                )
        return ""

    @torch.no_grad()
    def freeze(
        self, settings: Settings, drop_master: bool = False, fixed: Fixed = frozen_formats.NOTHING,
        amax: Tensor | None = None,
    ) -> None:  # fmt: skip
        """What te_mx.freeze_weights does to this module, or nothing where that raises; frozen
        already, it keeps weights and fresh copies. amax: see `_codes_below`."""
        source = self._source
        frozen = source if isinstance(source, Frozen) else Frozen(settings)
        if not frozen.dropped and drop_master:
            keys, own = self._weight_keys, frozen.settings
            if amax is None:
                made = {key: settled(self._plain_codes(key, own)) for key in keys}
            else:
                made = {key: settled(self._codes_below(key, own, amax)) for key in keys}
            self._mark_frozen(frozen)
            parameters: dict[str, Any] = self._parameters  # type: ignore[attr-defined]
            names = [name for key in made for name in self._held_by(key)]
            frozen.masters = {name: id_of(parameters[name]) for name in names}
            self._drop_masters(frozen, made)
        elif not frozen.dropped:
            made = {}
            for key in () if self._is_exchanged() else self._weight_keys:  # type: ignore[attr-defined]
                copy = frozen.current(self, key)[0] if key in frozen.sources else None
                made[key] = copy or frozen.make_kept(self, key, frozen.settings, False)
            self._mark_frozen(frozen)
            self._source = frozen
            self._forget_copies()
            for key, copy in made.items():
                if frozen.sources[key].follow(self._made_of(key)):
                    frozen.kept[key] = copy
        self._source = frozen.frozen_to(settings, fixed, frozen.dropped or drop_master)

    def _take_codes(
        self, made: dict[str, tuple[Tensor, ...]], settings: Settings, fixed: Fixed | None
    ) -> None:
        """Make codes of a state_dict the weights. fixed: None leaves what freezing fixed."""
        source = self._source
        frozen = source if isinstance(source, Frozen) else Frozen(settings)
        if frozen is not source:
            self._mark_frozen(frozen)
        elif frozen.settings.w != settings.w:
            self._forget_names()
        held: dict[str, Operand | Stack] = {}
        for key, parts in made.items():
            row = held_as(parts, plain_spec(settings.w), frozen.shapes[key])
            held[key] = settled(row)
        self._drop_masters(frozen, held)
        self._source = frozen.frozen_to(settings, frozen.fixed if fixed is None else fixed, True)

    @torch.no_grad()
    def unfreeze(self: Any, living: Mapping[int, nn.Parameter] = MappingProxyType({})) -> None:
        """What te_mx.unfreeze_weights does, with parameters made of codes where there are only
        these: where nobody gave the module one meanwhile, as tying does, and none of the `living`
        ones, by number, is what was dropped."""
        frozen = self._source
        if not isinstance(frozen, Frozen):
            return
        if frozen.dropped:
            masters: dict[str, Tensor] = {}
            for key in self._weight_keys:
                masters |= self._masters(key)
            for name, value in masters.items():
                if self._parameters.get(name) is not None:
                    continue
                tied = living.get(frozen.masters.get(name, 0))
                if tied is None or tied.shape != value.shape:
                    tied = nn.Parameter(value)
                self.register_parameter(name, tied)
            for key in self._weight_keys:
                for part in _PARTS:
                    self._buffers.pop(f"{key}_{part}", None)
            self.__dict__.pop("_lies", None)
        del self._source
        self._forget_names()
        for name, parameter in self.named_parameters():
            if name in frozen.trained:
                parameter.requires_grad_(frozen.trained[name])

    def _forget_names(self) -> None:
        """How codes that are not there any more are saved."""
        self.__dict__.pop("_saved_as", None)
        self.__dict__.pop("_saved_with", None)

    def _mark_frozen(self, frozen: Frozen) -> None:
        """Frozen so, with the masters still there: the parameters stop training."""
        for key in self._weight_keys:
            frozen.dtypes[key] = self._sample(key).dtype
            frozen.shapes[key] = self._master_shape(key)
        for name, value in self.named_parameters():  # type: ignore[attr-defined]
            frozen.trained[name] = value.requires_grad or frozen.trained.get(name, False)
            value.requires_grad_(False)

    def _forget_copies(self) -> None:
        """For parameters that were loaded, or copied with their module: what was kept is old, and
        what is there now is what is frozen."""
        self._mark()  # type: ignore[attr-defined]
        if self.__dict__.get("_gathers"):
            above.distributed.attach(self)
        self._source.renewed(self)

    def _drop_masters(self: Any, frozen: Frozen, made: Mapping[str, Operand | Stack]) -> None:
        """Replace the weights of a module by codes, in the weight format of the settings of
        `frozen`; those of groups have one dimension more."""
        frozen.kept.clear()
        frozen.sources.clear()
        for key, held in made.items():
            for name in self._held_by(key):
                self.register_parameter(name, None)
            self._hold(key, held)
        self._source = frozen.frozen_to(frozen.settings, frozen.fixed, True)
        register(self)

    def _hold(self: Any, key: str, held: Operand | Stack) -> None:
        """Make this the one copy of a weight without a master."""
        for part, tensor in as_buffers(held).items():
            if tensor is None:  # no buffer that is None: torch.export counts them
                self._buffers.pop(f"{key}_{part}", None)
            else:
                self.register_buffer(f"{key}_{part}", tensor, persistent=False)
        self._lies = {**self._lies, key: held.layout.name}

    def _rest(self) -> None:
        """Hold weights without masters as their device, perhaps another one now, keeps them."""
        for key in self._weight_keys:
            held = self._one_copy(key)
            if (made := settled(held)) is not held:
                self._hold(key, made)

    def _held_tensors(self, key: str) -> list[Tensor] | None:
        """What the module holds of a weight: parameters in order, or the buffers of one without a
        master; None where something computes it."""
        if self._source.dropped:
            return list(self._stored(key))
        parameters: dict[str, Any] = self._parameters  # type: ignore[attr-defined]
        held = [parameters.get(name) for name in self._parts_of(key)]
        return None if any(one is None for one in held) else held  # type: ignore[return-value]

    def _is_held(self: Any, key: str) -> bool:
        """Whether parameters hold the weight, so that it has a place of its own."""
        return all(self._parameters.get(name) is not None for name in self._held_by(key))

    # ------------------------------------------------------------------------- without the masters
    @property
    def qweight(self) -> Tensor:
        """The codes of a module without masters, under the name by which peft and others look for
        the device of a quantized weight; no such attribute where there are masters."""
        if not self._source.dropped:
            raise AttributeError("qweight: the module holds its weights")
        return getattr(self, f"{self._weight_keys[0]}_codes")

    def _stored(self, key: str) -> tuple[Tensor, ...]:
        """The buffers of a weight without a master."""
        parts = (getattr(self, f"{key}_{part}", None) for part in _PARTS)
        return tuple([part for part in parts if part is not None])

    def _one_copy(self, key: str) -> Operand | Stack:
        """The one copy of a weight without a master."""
        assert isinstance(self._source, QuantizedOnly)
        spec = f"{self._source.settings.w}@{self._lies.get(key, ROWS.name)}"
        return held_as(self._stored(key), spec, self._source.shapes[key])

    def _codes(self, key: str) -> list[Tensor]:
        """Codes and scales, and the tensor scale, of a weight without a master, by rows."""
        return tensors_of(plain(self._one_copy(key)))

    def _shape_of(self, key: str) -> tuple[int, ...]:
        """The shape of the weight, also where only its codes are left."""
        if isinstance(self._source, QuantizedOnly):
            return self._source.shapes[key]
        return self._master_shape(key)

    def _frozen_repr(self) -> str:
        words = self._source.words()
        return f", {words}{self._source.inputs()}" if words else ""

    def _check_groups(self, device: torch.device) -> None:
        """Check what a forward reads of the weights and biases of every group."""


def lies(module: Freezable, *keys: str) -> str:
    """Where the codes of frozen weights lie now, every copy by its spec, and the bytes of all of
    them: "lies as mxfp8_e4m3@rows + packed for the CPU, 3.05 bytes a parameter"; empty where there
    are none. A master that is kept is no copy."""
    found: list[Operand | Stack] = []
    numbers = 0
    for key in keys:
        copies = module._source.copies(module, key)
        if copies and isinstance(row := copies[0], Operand | Stack):
            numbers += row.rows * row.k * (row.groups if isinstance(row, Stack) else 1)
        for copy in copies:
            # Kernels share copies.
            if isinstance(copy, Operand | Stack) and all(copy.codes is not o.codes for o in found):
                found.append(copy)
    if not numbers:
        return ""
    packed = [copy.packed for copy in found if copy.packed is not None]
    specs = [*dict.fromkeys(copy.spec for copy in found)]
    if any(copy.packed is not None and copy.layout is ROWS for copy in found):
        specs.append("packed for the CPU")
    held = tensors_of(*found) + packed
    each = sum(tensor.nbytes for tensor in held) / numbers
    return f"lies as {' + '.join(specs)}, {each:.2f} bytes a parameter"


def rowwise(weight: Tensor, settings: Settings) -> Operand:
    """A matrix as its codes lie at rest."""
    row = quantize_2d(weight, plain_spec(settings.w), rule=settings.weight_rule).row
    assert row is not None
    return row


def _not_quantizable(weight: Tensor) -> str:
    """Why a weight cannot be quantized, or an empty string."""
    if type(weight) is not Tensor and type(weight) is not nn.Parameter:
        return (
            f"is a {type(weight).__name__}, whose values may lie elsewhere or in another form; "
            "freeze before it is sharded or quantized by others"
        )
    if weight.is_meta:
        return "is on the meta device and has no values; load the weights first"
    if weight.dtype not in FLOAT_DTYPES:
        return f"is {weight.dtype}; te_mx takes float32, bfloat16 and float16"
    return ""

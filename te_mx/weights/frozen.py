"""Weights that stand still: what `te_mx.freeze_weights` does to one module.

With the master weights kept, freezing adds quantized and packed copies that no checkpoint sees, and
that are made again when a master changed (weights/frozen.py). With the masters dropped the codes
are the weights: for each of them buffers of codes and scales, which a state_dict shows under the
names of weights/state_dict.py.

Weights of frozen modules as kernels for few rows see them.

What the quantized copy of a frozen weight was made of, so that a change of it is noticed.

Seen is whatever raises a tensor's version counter (every in-place operation, also through views and
``detach()``: load_state_dict, torch.distributed.checkpoint, most optimizers), another memory, shape
or dtype under the same parameter (``weight.data = ...``), and that a parameter trains.

Not seen are writes that torch does not count: in place through ``weight.data``, NumPy, DLPack or
views made in inference_mode, by the kernels of optimizers with ``fused=True``, and by frameworks
that fill the memory of parameters behind autograd.

Which frozen module holds a tensor: code that got tensors alone finds what is kept of them.
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from te_mx import formats, layouts
from te_mx._ops import FLOAT_DTYPES, Operand, Stack, dequantize_2d, quantize_2d
from te_mx._ops.library import is_direct
from te_mx.autograd.linear_recipe import at_rest, kept_weight
from te_mx.context.region import is_tracing
from te_mx.recipes.resolve import DEFAULT_SETTINGS
from te_mx.recipes.settings import Settings
from te_mx.torch_internals import held_by, is_managed, local_part, storage_id
from te_mx.weights import decode
from te_mx.weights import formats as frozen_formats
from te_mx.weights.decode import Ready
from te_mx.weights.formats import Fixed
from te_mx.weights.ranks import (
    above,
    here,
    is_spread,
)

# Parameters are pickled with their number, which must not be one of another process.
_ids = itertools.count(1 + int.from_bytes(os.urandom(7), "big"))


class Sources:
    """The tensors that one weight is computed from: which ones they were when the weight was
    frozen, and their state when its copy was made.

    Other tensors are never taken for the same weight, whatever they hold: sharded training and
    functional_call lend a module tensors for the time of a forward, and may fill the same memory
    anew for the next one.
    """

    __slots__ = ("_names", "_states", "_storages")

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._names = {name: id_of(tensor) for name, tensor in tensors.items()}
        self._states: list[tuple[Any, ...]] = []
        # Weak, so that they hold no memory; as long as they exist, no other storage takes the
        # place of one that is gone.
        self._storages: list[StorageWeakRef] = []

    def are(self, tensors: Mapping[str, Tensor | None]) -> bool:
        """Whether these are the same tensors."""
        return all(
            getattr(tensors.get(name), "_te_mx_id", 0) == number
            for name, number in self._names.items()
        )

    def gone(self) -> bool:
        """Whether the memory of one was given back."""
        return any(storage.expired() for storage in self._storages)

    def unchanged(self, tensors: Mapping[str, Tensor | None]) -> bool:
        """Whether these are the same tensors in the state of the last `follow`. Half a microsecond
        a tensor: every forward asks."""
        if not self._states:
            return False
        for name, number, version, address, storage, shape, stride, dtype, shard in self._states:
            tensor: Any = tensors.get(name)
            if tensor is None or getattr(tensor, "_te_mx_id", 0) != number:
                return False
            # In-place operations on a DTensor raise its version, not that of its shard.
            held = tensor if shard is None else local_part(tensor)
            if (
                tensor._version != version
                or held.data_ptr() != address
                or storage_id(held.untyped_storage()) != storage
                or tensor.requires_grad
                or held.shape != shape
                or held.stride() != stride
                or tensor.dtype != dtype
                or (shard is not None and held._version != shard)
            ):
                return False
        return True

    def follow(self, tensors: Mapping[str, Tensor]) -> bool:
        """Take their state as that of a copy that is made now; False where a change could not be
        seen, so that no copy may be kept."""
        self._states = []
        if any(tensor.requires_grad for tensor in tensors.values()):
            return False
        held: list[Any] = [held_by(tensor) for tensor in tensors.values()]
        try:
            self._storages = [StorageWeakRef(t.untyped_storage()) for t in held]
            self._states = [
                (
                    name, self._names[name], t._version, h.data_ptr(), storage.cdata, h.shape,
                    h.stride(), t.dtype, None if h is t else h._version,
                )
                for (name, t), h, storage in zip(tensors.items(), held, self._storages, strict=True)
            ]  # fmt: skip
        except RuntimeError:  # tensors of inference_mode count no changes; some have no memory
            return False
        return True


def id_of(tensor: Any) -> int:
    """The number of a tensor. A weak reference would say the same, but keeps
    torch.utils.swap_tensors from working."""
    if not hasattr(tensor, "_te_mx_id"):
        tensor._te_mx_id = next(_ids)
    return tensor._te_mx_id


_owners: dict[int, weakref.ref[Any]] = {}  # by id of the first tensor of a weight


def register(module: Any) -> None:
    """Note a frozen module as the owner of its weights, as they are held now."""
    for key in module._weight_keys:
        held = module._held_tensors(key)
        if held is None:
            continue
        number = id(held[0])

        def gone(owner: weakref.ref[Any], number: int = number) -> None:
            if _owners.get(number) is owner:
                del _owners[number]

        _owners[number] = weakref.ref(module, gone)


def owner_of(tensors: Sequence[Tensor], key: str) -> Any:
    """The frozen module that holds these very tensors as a weight of this key, or None."""
    reference = _owners.get(id(tensors[0]))
    module = None if reference is None else reference()
    if module is None or module._frozen is None or key not in module._weight_keys:
        return None
    held = module._held_tensors(key)
    if held is None or len(held) != len(tensors):
        return None
    return module if all(a is b for a, b in zip(held, tensors, strict=True)) else None


class Frozen:
    """How a module is frozen: with `settings`, of which `fixed` says what stays inside of regions.

    `kept` holds the quantized copies beside kept masters, by key; what is missing is made again.
    `sources` says what they were made of, `in_graphs` keeps those that a CUDA graph reads.
    `few_rows` has the forms of weights for kernels of few rows.
    `dtypes` and `shapes` (of the weights, by key), `trained` (requires_grad of the parameters, by
    name) and `masters` (numbers of those that were dropped, by name) are what unfreezing restores.
    """

    __slots__ = (
        "dropped", "dtypes", "few_rows", "fixed", "in_graphs", "kept", "masters", "settings",
        "shapes", "sources", "trained",
    )  # fmt: skip

    def __init__(
        self, settings: Settings, dropped: bool = False, fixed: Fixed = frozen_formats.NOTHING
    ) -> None:
        self.settings = settings
        self.dropped = dropped
        self.fixed = fixed
        self.dtypes: dict[str, torch.dtype] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.trained: dict[str, bool] = {}
        self.masters: dict[str, int] = {}
        self.kept: dict[str, Any] = {}
        self.sources: dict[str, Sources] = {}
        self.in_graphs: list[Any] = []
        self.few_rows = decode.Forms()

    def without_copies(self) -> Frozen:
        """For a copy of the module, whose next forward quantizes again."""
        other = Frozen(self.settings, self.dropped, self.fixed)
        other.dtypes.update(self.dtypes)
        other.shapes.update(self.shapes)
        other.trained.update(self.trained)
        return other

    def inside(self, settings: Settings) -> Settings:
        """The settings of a region, with what freezing fixed."""
        if not self.dropped and self.fixed == frozen_formats.NOTHING:
            return settings
        return frozen_formats.inside(settings, self.settings, self.fixed, self.dropped)

    def current(self, key: str, module: Freezable) -> tuple[Any, bool]:
        """The copy of a weight of the module, None where there is none or what it was made of
        changed; and whether a new one is to be kept."""
        sources = self.sources[key]
        owner: Any = module
        owner = owner._local or owner  # the shards of a local layer are new ones each time
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


class Freezable:
    """Mixin of the modules, beside an nn.Module. A *key* names a weight of the module as the GEMMs
    see it, whatever parameters hold it: split ones are joined, those of groups stacked."""

    # Class attributes, not set in __init__: convert_model gives modules this class in place.
    _frozen: Frozen | None = None
    _bound: Settings | None = None  # what runs outside of regions, given by convert_model
    # Endings of the names of codes and scales in a state_dict, where they are not te_mx's.
    _saved_as: tuple[str, str] | None = None
    _claim: dict[str, Any] | None = (
        None  # the quantization_config that says so (weights/missing.py)
    )
    _weight_keys: tuple[str, ...] = ("weight",)

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
        split: dict[str, int] | None = getattr(self, "_split", None)
        return self._held_by(key) if split is None else tuple(f"{name}_{key}" for name in split)

    def _made_of(self, key: str) -> dict[str, Tensor]:
        """All that the weight is computed from, by name."""
        assert isinstance(self, nn.Module)
        computed: Any = self._modules.get("parametrizations") or {}
        tensors: dict[str, Tensor] = {}
        for name in self._parts_of(key):
            if name in computed:
                tensors |= computed[name].named_parameters(prefix=f"parametrizations.{name}")
                tensors |= computed[name].named_buffers(prefix=f"parametrizations.{name}")
            else:
                tensors[name] = getattr(self, name)
        return tensors

    def _make_kept(self, key: str, settings: Settings, need_dx: bool) -> Any:
        """The weight quantized, and packed for the kernels, for several calls."""
        return kept_weight(here(self._whole(key)), settings, need_dx)

    def _plain_codes(self, key: str, settings: Settings) -> tuple[Tensor, Tensor]:
        """Rowwise codes and scales of the weight."""
        weight = here(self._whole(key)).detach()
        row = quantize_2d(weight, at_rest(settings.w), rule=settings.weight_rule).row
        assert row is not None
        return row.codes, row.scales

    def _dropped_operand(self, key: str) -> Any:
        """The weight of a module without masters, for fprop."""
        codes, scales = self._codes(key)
        assert self._frozen is not None
        rows, k = self._frozen.shapes[key]
        return Operand(codes, scales, at_rest(self._frozen.settings.w), rows, k)

    def _masters(self, key: str, dtype: torch.dtype) -> dict[str, Tensor]:
        """Values of the codes, by the names of the parameters that take them."""
        return {key: dequantize_2d(self._dropped_operand(key), dtype)}

    # -------------------------------------------------------------------------- freezing and back
    def why_not_frozen(self, drop_master: bool) -> str:
        """Why this module cannot be frozen so, or an empty string."""
        if self._is_dropped():
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
        self, settings: Settings, drop_master: bool = False, fixed: Fixed = frozen_formats.NOTHING
    ) -> None:
        """What te_mx.freeze_weights does to this module, or nothing where that raises; frozen
        already, it keeps its weights, and copies that are not old."""
        frozen = self._frozen
        if frozen is None:
            frozen = Frozen(settings)
        if not frozen.dropped and drop_master:
            made = {key: self._plain_codes(key, frozen.settings) for key in self._weight_keys}
            self._mark_frozen(frozen)
            parameters: dict[str, Any] = self._parameters  # type: ignore[attr-defined]
            names = [name for key in made for name in self._held_by(key)]
            frozen.masters = {name: id_of(parameters[name]) for name in names}
            self._drop_masters(made)
        elif not frozen.dropped:
            made = {}
            lent = is_managed(self)
            for key in () if lent else self._weight_keys:
                copy = frozen.current(key, self)[0] if key in frozen.sources else None
                made[key] = copy or self._make_kept(key, frozen.settings, False)
            self._mark_frozen(frozen)
            self._forget_copies()
            for key, copy in made.items():
                if frozen.sources[key].follow(self._made_of(key)):
                    frozen.kept[key] = copy
        frozen.settings, frozen.fixed = settings, fixed
        self.__dict__.pop("_microbatch", None)

    @torch.no_grad()
    def unfreeze(self, living: Mapping[int, nn.Parameter] = MappingProxyType({})) -> None:
        """What te_mx.unfreeze_weights does, with parameters made of codes where there are only
        these: where nobody gave the module one meanwhile, as tying does, and none of the `living`
        ones, by number, is what was dropped."""
        assert isinstance(self, nn.Module)
        frozen = self._frozen
        if frozen is None:
            return
        if frozen.dropped:
            masters: dict[str, Tensor] = {}
            for key in self._weight_keys:
                masters |= self._masters(key, frozen.dtypes[key])
            for name, value in masters.items():
                if self._parameters.get(name) is not None:
                    continue
                tied = living.get(frozen.masters.get(name, 0))
                if tied is None or tied.shape != value.shape:
                    tied = nn.Parameter(value)
                self.register_parameter(name, tied)
            for key in self._weight_keys:
                delattr(self, f"{key}_codes")
                delattr(self, f"{key}_scale")
        self._frozen = None
        self.__dict__.pop("_saved_as", None)
        for name, parameter in self.named_parameters():
            if name in frozen.trained:
                parameter.requires_grad_(frozen.trained[name])

    def _mark_frozen(self, frozen: Frozen) -> None:
        """Frozen so, with the masters still there: the parameters stop training."""
        for key in self._weight_keys:
            frozen.dtypes[key] = self._sample(key).dtype
            frozen.shapes[key] = self._master_shape(key)
        for name, value in self.named_parameters():  # type: ignore[attr-defined]
            frozen.trained[name] = value.requires_grad or frozen.trained.get(name, False)
            value.requires_grad_(False)
        self._frozen = frozen

    def _forget_copies(self) -> None:
        """For parameters that were loaded, or copied with their module: what was kept is old, and
        what is there now is what is frozen."""
        self.__dict__.pop("_microbatch", None)
        self._mark()  # type: ignore[attr-defined]
        if self.__dict__.get("_gathers"):
            above.distributed.attach(self)
        frozen = self._frozen
        if frozen is not None:
            register(self)
        if frozen is not None and not frozen.dropped:
            frozen.kept.clear()
            frozen.sources = {key: Sources(self._made_of(key)) for key in self._weight_keys}

    def _drop_masters(self, made: dict[str, tuple[Tensor, Tensor]]) -> None:
        """Replace the weights of a frozen module by rowwise codes and scales, in the weight format
        of its settings; those of groups have one dimension more."""
        assert isinstance(self, nn.Module) and self._frozen is not None
        self._frozen.dropped = True
        self._frozen.kept.clear()
        self._frozen.sources.clear()
        for key, (codes, scales) in made.items():
            for name in self._held_by(key):
                self.register_parameter(name, None)
            # The state_dict has them under other names and dtypes. As uint8 they pass through
            # .to(dtype) unharmed, fp32 scales by their bytes.
            self.register_buffer(f"{key}_codes", codes, persistent=False)
            self.register_buffer(f"{key}_scale", scales.view(torch.uint8), persistent=False)
        register(self)

    def _held_tensors(self, key: str) -> list[Tensor] | None:
        """What the module holds of a weight: parameters in order, or the buffers of one without a
        master; None where something computes it."""
        if self._frozen is not None and self._frozen.dropped:
            return list(self._stored(key))
        parameters: dict[str, Any] = self._parameters  # type: ignore[attr-defined]
        held = [parameters.get(name) for name in self._parts_of(key)]
        return None if any(one is None for one in held) else held  # type: ignore[return-value]

    def _is_held(self, key: str) -> bool:
        """Whether parameters hold the weight, so that it has a place of its own."""
        assert isinstance(self, nn.Module)
        return all(self._parameters.get(name) is not None for name in self._held_by(key))

    # ------------------------------------------------------------------------- without the masters
    def _is_dropped(self) -> bool:
        return self._frozen is not None and self._frozen.dropped

    @property
    def qweight(self) -> Tensor:
        """The codes of a module without masters, under the name by which peft and others look for
        the device of a quantized weight; no such attribute where there are masters."""
        if not self._is_dropped():
            raise AttributeError("qweight: the module holds its weights")
        return getattr(self, f"{self._weight_keys[0]}_codes")

    def _is_weight_only(self) -> bool:
        return self._frozen is not None and self._frozen.dropped and self._frozen.fixed.weight_only

    def _stored(self, key: str) -> tuple[Tensor, Tensor]:
        """The buffers of a weight without a master."""
        return getattr(self, f"{key}_codes"), getattr(self, f"{key}_scale")

    def _codes(self, key: str) -> tuple[Tensor, Tensor]:
        assert self._frozen is not None
        codes, scales = self._stored(key)
        return codes, scales.view(formats.get(self._frozen.settings.w).scaling.storage)

    def _shape_of(self, key: str) -> tuple[int, ...]:
        """The shape of the weight, also where only its codes are left."""
        if self._frozen is not None and self._frozen.dropped:
            return self._frozen.shapes[key]
        return self._master_shape(key)

    def _refuse_given(self) -> None:
        """Raise RuntimeError where somebody gives a module without masters some for a forward."""
        given = self._parameters  # type: ignore[attr-defined]
        for key in self._weight_keys:
            for name in self._held_by(key):
                if given.get(name) is not None:
                    raise RuntimeError(
                        f"{self._label()} was frozen with drop_master=True and runs on its codes, "  # type: ignore[attr-defined]
                        f"but got a {name} {tuple(given[name].shape)} (functional_call, "
                        "tie_weights, or set by hand); call te_mx.unfreeze_weights(model, "
                        "dequantize=True) first, which keeps this one and drops the codes"
                    )

    def _frozen_repr(self) -> str:
        if self._frozen is None:
            return ""
        fixed, inputs = self._frozen.fixed, ""
        if fixed.weight_only:
            inputs = ", inputs as they are"
        elif fixed.x:
            inputs = f", inputs {self._frozen.settings.x}"
        return f", {self._how_frozen()}{inputs}"

    def _how_frozen(self) -> str:
        """In words; the format of the weights is named where it is not the usual one."""
        assert self._frozen is not None
        words = "frozen, no master" if self._frozen.dropped else "frozen"
        fmt = self._frozen.settings.w
        return words if fmt == DEFAULT_SETTINGS.w else f"{words}, {fmt}"


def lies(module: Freezable, *keys: str) -> str:
    """Where the codes of frozen weights lie now, every copy by its spec, and the bytes of all of
    them: "lies as mxfp8_e4m3@rows + packed for the CPU, 3.05 bytes a parameter"; empty where there
    are none. A master that is kept is no copy."""
    frozen = module._frozen
    if frozen is None:
        return ""
    found: list[Operand | Stack] = []
    numbers = 0
    for key in keys:
        kept, form = frozen.kept.get(key), frozen.few_rows.made.get(key)
        row = module._dropped_operand(key) if frozen.dropped else getattr(kept, "row", None)
        if isinstance(row, Operand | Stack):
            numbers += row.rows * row.k * (row.groups if isinstance(row, Stack) else 1)
        for copy in (row, getattr(kept, "col", None), None if form is None else form.weight):
            # Kernels share copies.
            if isinstance(copy, Operand | Stack) and all(copy.codes is not o.codes for o in found):
                found.append(copy)
    if not numbers:
        return ""
    packed = [copy.packed for copy in found if copy.packed is not None]
    specs = [
        *dict.fromkeys(copy.spec for copy in found),
        *(["packed for the CPU"] if packed else []),
    ]
    held = [t for copy in found for t in (copy.codes, copy.scales)] + packed
    each = sum(tensor.nbytes for tensor in held) / numbers
    return f"lies as {' + '.join(specs)}, {each:.2f} bytes a parameter"


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


def weight_of(
    module: Freezable, key: str, kept: Any, size: tuple[int, int], groups: int = 0
) -> decode.Weight:
    """A weight of a frozen module, of this size. kept: what is kept of its master (a KeptWeight or
    KeptWeights); of a module without masters it does not matter."""
    frozen = module._frozen
    assert frozen is not None
    given: Operand | Stack
    if frozen.dropped:
        given = module._dropped_operand(key)
        made_of, fmt = decode.state(*module._stored(key)), given.format.name
    else:
        given, made_of, fmt = kept.row, (kept,), kept.settings.w
        if getattr(module, "_gathered", None) is not None:  # for this forward alone
            made_of = ()

    def row() -> Operand | Stack:
        if given.layout is layouts.ROWS:
            return given
        codes, scales = module._plain_codes(key, kept.settings)
        return given._replace(codes=codes, scales=scales, spec=at_rest(fmt), packed=None)

    lies = "any" if given.layout is layouts.ROWS else given.layout.name
    return decode.Weight(frozen.few_rows, key, *size, fmt, made_of, row, groups, lies)


def ready_of(layer: Any, x: Tensor, settings: Settings) -> Ready | None:
    """What multiplies as many rows as x has, in its dtype and quantized, with the weight of a
    frozen te_mx.Linear; None where nothing does, or where the layer has something to say first."""
    if layer._tokens is not None:
        return None
    size, kept = (layer.out_features, layer.in_features), None
    if layer._is_dropped():
        layer._refuse_given()
        layer._check_codes(layer._weight_keys, x.device)
    else:
        weight, bias = layer._weight_and_bias()
        for value, shape in ((weight, size), (bias, size[:1])):
            if value is not None and (value.shape != shape or value.device != x.device):
                return None
        kept = layer._kept_weight("weight", None, settings, x.device, False)
    return ready_weight(layer, "weight", kept, size, x, x.dtype, settings)


def ready_weight(
    module: Freezable, key: str, kept: Any, size: tuple[int, int], x: Tensor, dtype: torch.dtype,
    settings: Settings | None,
) -> Ready | None:  # fmt: skip
    """What multiplies few rows of a step inside of a frozen module, as many as x has, in a dtype,
    with a weight of it; None where nothing does. Compiled code cannot look whether a weight
    changed."""
    frozen = module._frozen
    if frozen is None or (kept is None and not frozen.dropped) or is_tracing():
        return None
    if not decode.is_few(x, x.shape[-1]) or not is_direct(x):
        return None
    found = decode.ready(x, dtype, weight_of(module, key, kept, size), settings)
    # In front of the GEMM's own kernel a normalization or an activation quantizes in its own read.
    return found if found is not None and found.kernel.multiplies else None

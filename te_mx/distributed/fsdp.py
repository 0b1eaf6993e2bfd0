"""FSDP2 (fully_shard) and te_mx modules: weights that are gathered as codes and scales, and the
parameters that weight gradients belong to.

Under `quantized_all_gather` each rank quantizes its rows of a weight and FSDP2 gathers these codes,
1.03 bytes a parameter in MXFP8 where bf16 takes 2. Blocks run along k and shards are rows, so the
codes are those of the whole weight. There is no high-precision copy of the whole weight: dgrad
starts from the rowwise codes, as under the recipe's one_copy_weights, with the same bits."""

import inspect
import weakref
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from te_mx import formats
from te_mx._ops import Operand, Stack, rows_2d, rows_call
from te_mx._ops.grouped_quantize import quantize_weights
from te_mx.autograd import weight_parts
from te_mx.autograd.linear_recipe import QuantizedWeight, plain_spec
from te_mx.context.region import backward_pass_id, is_tracing
from te_mx.distributed.local_layer import call, local_layer
from te_mx.fusion.transposed_linear import TransposedLinear
from te_mx.nn.base import MXModule
from te_mx.nn.grouped_linear import GroupedLinear
from te_mx.recipe import resolve_recipe
from te_mx.recipes.settings import Mixed, Settings
from te_mx.runtime import streams
from te_mx.runtime.arguments import check_module
from te_mx.torch_internals import fsdp_params, gradient_hook, wrapper_of
from te_mx.weights.ranks import shard_of
from te_mx.weights.source import Gathered, WeightSource

# --------------------------------------------------------- the whole weight, as a forward gets it
_aten = torch.ops.aten
_PARTS = "codes", "scales"
# What FSDP2, nn.Parameter and DTensor do to make a parameter of it.
_SAME = {
    _aten.detach.default, _aten.alias.default, _aten.as_strided.default, _aten.view.default
}  # fmt: skip


class GatheredWeight(Tensor):
    """A weight [N, K] or [groups, N, K] that te_mx modules multiply with in MXFP8. Every other
    operation on it is an error: there are no values.

    Args:
        codes, scales: as `fmt` has them at rest, uint8 or what its scales are stored as.
        k: the last size.
        dtype: of the parameter, and so of its gradient.
        fmt: the name of the format.
    """

    codes: Tensor
    scales: Tensor
    fmt: str
    kept: tuple[Any, Any] | None = None  # what stands in for it under some settings, and these

    @staticmethod
    def __new__(cls, codes: Tensor, scales: Tensor, k: int, dtype: torch.dtype, fmt: str) -> Any:
        shape = (*codes.shape[:-1], k)
        made: Any = wrapper_of(cls, shape, dtype=dtype, device=codes.device)
        made.codes, made.scales, made.fmt = codes, scales, fmt
        return made

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return [*_PARTS], (self.shape[-1], self.dtype, self.fmt)

    @staticmethod
    def __tensor_unflatten__(inner: Any, meta: Any, size: Any, stride: Any) -> "GatheredWeight":
        return GatheredWeight(inner["codes"], inner["scales"], *meta)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"GatheredWeight({tuple(self.shape)}, {self.dtype}, {self.fmt})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        weight = args[0]
        if func is _aten.cat.default and all(isinstance(part, GatheredWeight) for part in weight):
            # One weight of the rows of several. Blocks run along k, and no part ends inside of one.
            codes, scales = (torch.cat([getattr(p, of) for p in weight]) for of in _PARTS)
            weight = weight[0]
        elif func is _aten.select.int and weight.dim() == 3 and args[1] == 0:
            codes, scales = weight.codes[args[2]], weight.scales[args[2]]
        elif func in _SAME and isinstance(weight, GatheredWeight):
            codes, scales = weight.codes, weight.scales
        else:
            raise NotImplementedError(
                f"{func} of a weight that fully_shard gathered as {_names(args)}: there are only "
                "its codes, which te_mx modules multiply with under te_mx.autocast; for its values "
                "use the sharded parameter (module.reshard(), then full_tensor())"
            )
        return GatheredWeight(codes, scales, weight.shape[-1], weight.dtype, weight.fmt)


def _names(args: Any) -> str:
    flat = [one for a in args for one in (a if isinstance(a, (list, tuple)) else [a])]
    return next((one.fmt for one in flat if isinstance(one, GatheredWeight)), "codes")


# ------------------------------------------------------------------------------ what a rank sends
Sent = tuple[Tensor, ...]
Sizes = tuple[torch.Size, ...]  # sizes but for the first one

_VECTOR = 128  # bytes; kernels write faster where memory begins with so many


class Ahead(NamedTuple):
    """Codes and scales that were made before they were asked for, and of what."""

    sent: Sent
    version: int
    address: int
    dtype: torch.dtype
    stream: int
    forward: bool  # still to be sent in the forward pass

    def is_of(self, shard: Tensor, dtype: torch.dtype) -> bool:
        """Whether they are what would be made now."""
        made = self.version, self.address, self.dtype, self.stream
        now = shard._version, shard.data_ptr(), dtype, streams.current(shard.device)
        return made == now


class Model:
    """The weights that one call of quantized_all_gather found.

    FSDP2 asks weight by weight, on a stream of its own beside the layers that run, where kernels
    wait for a gap between two products: a layer that quantized its seven weights then got them
    late. So the first weight of a forward pass that is asked for has all quantized, before the
    layers have work. Codes are kept for the backward pass, which gathers again what it still needs,
    and asks for each once: 1.03 bytes for a parameter of this rank. Nothing is kept for longer, for
    layers that keep the whole weight for backward anyway or that do not train, or where the shard
    was written meanwhile. Weights that are gathered together are cast in one call, to memory of all
    of them, and so are their codes. They are sent as bytes: FSDP2 copies bf16 by way of fp32, which
    changes what would be NaN."""

    def __init__(self) -> None:
        self._shards: list[weakref.ref[ShardCodes]] = []

    def add(self, shard: "ShardCodes") -> None:
        self._shards = [ref for ref in self._shards if ref() is not None]
        self._shards.append(weakref.ref(shard))

    def quantize(self) -> None:
        """All weights of modules that train, for a forward pass that begins. Those that are
        gathered together are cast together."""
        batches: dict[Any, list[Due]] = {}
        for ref in self._shards:
            shard = ref()
            if shard is not None:
                shard.join(batches)
        with torch.no_grad():
            for (_, _, dtype, stream), batch in batches.items():
                for due, values, into in zip(
                    batch, _cast(batch, dtype), _memory(batch, dtype), strict=True
                ):
                    due.codes.keep(due, values, into, dtype, stream)


class Due(NamedTuple):
    """A weight that is to be quantized, and what it was when that was known."""

    codes: "ShardCodes"
    shard: Tensor
    version: int


def _cast(batch: list[Due], dtype: torch.dtype) -> list[Tensor]:
    """Shards of one dtype in another, each at the start of a vector: a few launches on GPUs."""
    if batch[0].shard.dtype == dtype:
        return [due.shard for due in batch]
    at, starts = 0, []
    for due in batch:
        starts.append(at)
        at += -(-due.shard.numel() // _VECTOR) * _VECTOR
    memory = torch.empty(at, dtype=dtype, device=batch[0].shard.device)
    made = [
        memory.as_strided(due.shard.shape, due.shard.stride(), start)
        for due, start in zip(batch, starts, strict=True)
    ]
    torch._foreach_copy_(made, [due.shard for due in batch])
    return made


def _memory(batch: list[Due], dtype: torch.dtype) -> Sequence[tuple[Tensor, Tensor] | None]:
    """Memory for what is sent of each, in one piece; None where sizes are not known or do not keep
    the pieces apart by whole vectors."""
    sizes: list[int] = []
    for due in batch:
        known = due.codes.sizes.get(dtype)
        if known is None:
            return [None] * len(batch)
        sizes += known
    memory = torch.empty(sum(sizes), dtype=torch.uint8, device=batch[0].shard.device)
    parts: Any = memory.split(sizes)
    return list(zip(parts[::2], parts[1::2], strict=True))


class Place:
    """Where a weight is: the module that has it, what fully_shard knows of it, and of its group."""

    def __init__(self, module: Any, param: Any, groups: Any) -> None:
        self._module = weakref.ref(module)
        self._param = None if param is None else weakref.ref(param)
        self._group = None if param is None else groups.get(param)

    def trains(self) -> bool:
        """Whether a backward pass will come."""
        module = self._module()
        return module is not None and module.training

    def group(self) -> Any:
        """What fully_shard gathers with it; None where nobody knows."""
        return None if self._group is None else self._group()

    def gathers_again(self) -> bool:
        """Whether the whole weight is given up after the forward pass."""
        group = self.group()
        return group is not None and group.post_forward_mesh_info is not None

    def dtype(self, shard: Tensor) -> torch.dtype | None:
        """In what the module computes; None where nobody knows."""
        param: Any = None if self._param is None else self._param()
        return None if param is None else param.mp_policy.param_dtype or shard.dtype


class ShardCodes:
    """One sharded weight."""

    def __init__(self, shard: Tensor, settings: Settings, place: Place, model: Model) -> None:
        self._shard, self._settings = weakref.ref(shard), settings
        self._plain_spec = plain_spec(settings.w)
        self._place, self._model = place, model
        self._ahead: Ahead | None = None
        self.forms: Sizes = ()
        # Of what is sent, by dtype of the values; None where it is not made in given memory.
        self.sizes: dict[torch.dtype, tuple[int, int] | None] = {}
        model.add(self)

    def sent(self, dtype: torch.dtype | None) -> Sent:
        """What this rank sends now, computed as in dtype; None: in that of the shard."""
        shard: Any = self._shard()
        dtype = dtype or shard.dtype
        going_back = backward_pass_id() != -1
        found, self._ahead = self._ahead, None
        if not going_back and (found is None or not found.forward) and self._may_keep(shard):
            self._model.quantize()
            found, self._ahead = self._ahead, None
        if found is None or not found.is_of(shard, dtype):
            with torch.no_grad():
                return self._sent(shard.to(dtype))
        if not going_back and self._place.gathers_again():
            self._ahead = found._replace(forward=False)
        return found.sent

    def join(self, batches: dict[Any, list[Due]]) -> None:
        """Put this weight where a forward pass will ask for it with others, if it will."""
        shard: Any = self._shard()
        dtype = None if shard is None else self._place.dtype(shard)
        if dtype is None or not self._may_keep(shard):
            return
        group = self._place.group() if shard.is_contiguous() else None
        together = self if group is None else group
        key = together, shard.dtype, dtype, streams.current(shard.device)
        batches.setdefault(key, []).append(Due(self, shard, shard._version))

    def keep(
        self, due: Due, values: Tensor, into: tuple[Tensor, Tensor] | None, dtype: torch.dtype,
        stream: int,
    ) -> None:  # fmt: skip
        """What a forward pass will ask for, of values that were cast; in `into`, if that is given
        and can be written to."""
        sent: Sent | None = None
        if into is not None:
            call = rows_call(values, self._plain_spec, self._settings.scale_rule)
            sent = None if call is None or call(values, into) is None else into
        if sent is None:
            sent = self._sent(values)
        self._ahead = Ahead(sent, due.version, due.shard.data_ptr(), dtype, stream, True)

    def _may_keep(self, shard: Tensor) -> bool:
        counted = not shard.is_inference()  # whose writes have versions
        return self._place.trains() and counted and not streams.capturing(shard.device)

    def _sent(self, values: Tensor) -> Sent:
        spec, rule = self._plain_spec, self._settings.scale_rule
        made: Stack | Operand
        if values.dim() == 3:
            made = quantize_weights(list(values.unbind(0)), spec, rule=rule)[0]
        else:
            made = rows_2d(values, spec, rule)
        codes, scales = made.codes, made.scales
        if not self.forms:
            self.forms = codes.shape[1:], scales.shape[1:]
        sent = codes.view(-1), scales.view(-1)
        dtype = values.dtype
        if dtype not in self.sizes:
            apart = all(t.dtype == torch.uint8 and t.numel() % _VECTOR == 0 for t in sent)
            alone = values.dim() == 2 and rows_call(values, spec, rule) is not None
            known = (sent[0].numel(), sent[1].numel()) if apart and alone else None
            self.sizes[dtype] = known
        return sent


def restored(sent: Sent, forms: Sizes) -> tuple[Tensor, Tensor]:
    """Codes and scales of a whole weight, of what was gathered: the same memory."""
    codes, scales = [flat.view(-1, *rest) for flat, rest in zip(sent, forms, strict=True)]
    return codes, scales


# Of what FSDP2 calls, which asks for it at every gather: that takes 25 us.
SIGNATURE = inspect.signature(lambda mesh, outer_size, outer_stride, module, mp_policy: None)


# -------------------------------------------------------------------------- modules on such weights
def run_on_codes(module: Any, inp: Any, *args: Any) -> Any:
    """The forward of a module with gathered codes as weights."""
    held = module._parameters
    source = source_of(module, held, module._one_settings(), module._source)
    layer = local_layer(module, held, _source=source)
    return call(module, layer, inp, *args)


def source_of(
    module: Any, held: Mapping[str, Any], settings: Settings | None, source: WeightSource
) -> WeightSource:
    """The source of a layer that runs on these parameters: the given one, or that of codes where
    some of them are gathered so.

    Raises:
        RuntimeError: they are of another format than the active recipe wants.
    """
    found = {key: value for key, value in held.items() if isinstance(value, GatheredWeight)}
    if not found:
        return source
    kept: dict[str, Any] = {}
    whole: Any = None
    for key in module._weight_keys:
        names = module._parts_of(key)
        if len(names) == 1 and names[0] in found:
            kept[key] = _kept(found[key], _check(module, key, settings))
        elif names[0] in found:  # parameters_split, or halves of a gated fc1
            wanted = [_check(module, name, settings) for name in names]
            whole = weight_parts.cat([found[name] for name in names])
            kept[key] = _of_codes(whole, wanted[0])
    return Gathered(kept, whole, source)


def codes_of(module: Any, settings: Settings | None) -> WeightSource:
    """The source of a module whose weights are gathered as codes."""
    return source_of(module, module._parameters, settings, module._source)


def _check(module: Any, key: str, settings: Settings | None) -> Settings:
    """Settings that a weight was quantized for; others are refused."""
    wanted = module._gathers[key]
    if settings is None or (settings.w, settings.scale_rule) != (wanted.w, wanted.scale_rule):
        active = "no recipe is active" if settings is None else f"the recipe wants {settings.w}"
        raise RuntimeError(
            f"{module._label()}: {key} was gathered as {wanted.w} ({wanted.scale_rule}) by "
            f"te_mx.distributed.quantized_all_gather, and {active}; run it under "
            "te_mx.autocast with the recipe that was given there"
        )
    return settings


def _kept(weight: GatheredWeight, settings: Settings) -> Any:
    """What stands in for a weight. Made once: FSDP2 gives the same tensors in every pass, filled
    again, and has the current stream wait for them."""
    if is_tracing():
        return _of_codes(weight, settings)
    if weight.kept is None or weight.kept[0] is not settings:
        weight.kept = settings, _of_codes(weight, settings)
    return weight.kept[1]


def _of_codes(weight: GatheredWeight, settings: Settings) -> Any:
    parts, (*groups, rows, k) = (weight.codes, weight.scales, plain_spec(weight.fmt)), weight.shape
    held: Any = Stack(*parts, groups[0], rows, k) if groups else Operand(*parts, rows, k)
    return QuantizedWeight(settings._replace(one_copy=True), held, None)


# ------------------------------------------------------------------------ telling fully_shard of it
def quantized_all_gather(model: nn.Module, *, recipe: Any = None) -> int:
    """Have FSDP2 gather the weights of the te_mx modules in `model` as codes and scales.

    Called after fully_shard, before the first forward. Shards, optimizer states and checkpoints
    stay as they are. The modules then run in MXFP8 only, with weights in the format of `recipe`,
    and dgrad starts from the rowwise codes (``one_copy_weights``), whatever the recipe says.

    Args:
        model: sharded by fully_shard; te_mx modules not sharded, or over one rank, are left alone.
        recipe: its format and its scale rule quantize the weights; None means what
            `te_mx.convert_model` bound to a module, or else the default recipe.

    Returns:
        The number of weights that are gathered as codes.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: there is no te_mx module with sharded weights; or a weight cannot be gathered
            so: it is sharded along another dimension than its rows, in parts of different sizes or
            across blocks, offloaded to the CPU, sharded over fewer ranks after forward, one of
            several of a te_mx.GroupedLinear that are not stacked, a part (parameters_split) beside
            others that are not sharded, or [.., in, out] as those of GPT-2 and gpt-oss are. Nothing
            is changed then.
        RuntimeError: a forward has run already.
    """
    check_module(model)
    given = None if recipe is None else resolve_recipe(recipe)
    found = [
        (*one, settings) for one in _weights(model)
        if (settings := _settings_of(one[0], given)) is not None
    ]  # fmt: skip
    if wrapper_of is None:
        raise NotImplementedError(
            f"quantized_all_gather: this PyTorch ({torch.__version__}) makes no tensors without "
            "values; leave it out, and fully_shard gathers weights in high precision"
        )
    if not found:
        raise ValueError(
            f"no te_mx module in {type(model).__name__} has weights that fully_shard sharded; call "
            "te_mx.convert_model and fully_shard first"
        )
    for module, key, param, chosen in found:
        if problem := _why_not(module, param, chosen):
            raise ValueError(f"{module._label()}: {key} {problem}")
        if gathered_parameter(param) is not None and key not in (module._gathers or {}):
            raise RuntimeError(
                f"{module._label()}: fully_shard has gathered {key} in high precision already; "
                "call te_mx.distributed.quantized_all_gather before the first forward"
            )
    together = Model()
    for module, key, _, chosen in found:
        module.__dict__["_gathers"] = {**(module._gathers or {}), key: chosen}
        module.__dict__["_gathered_with"] = together
    for module in {id(module): module for module, *_ in found}.values():
        attach(module)
    return len(found)


def _settings_of(module: Any, recipe: Any) -> Settings | None:
    """Those that the weights of a module are gathered for; None: in high precision.

    Raises:
        ValueError: its weights have different ones.
    """
    chosen = module._chosen(recipe, "")
    if isinstance(chosen, Mixed):
        raise ValueError(
            f"{module._label()}: its weights have different recipes ({chosen.formats}), and those "
            "of a module are gathered for one; pass recipe="
        )
    return chosen


def attach(module: Any) -> None:
    """Tell FSDP2 how to gather the weights of a module; again after loading or moving it."""
    model = module._gathered_with
    if model is None:
        model = module.__dict__["_gathered_with"] = Model()
    for key, settings in module._gathers.items():
        parameter = module._parameters[key]
        if isinstance(parameter, DTensor) and not isinstance(shard_of(parameter), GatheredWeight):
            known = params_of(module).get(key)
            _extend(shard_of(parameter), settings, Place(module, known, _groups), model)


def _extend(shard: Any, settings: Settings, place: Place, model: Model) -> None:
    """FSDP2's extension of one sharded weight, as attributes of the tensor that it shards: no other
    class of tensor reaches optimizers and checkpoints."""
    codes, held = ShardCodes(shard, settings, place, model), weakref.ref(shard)

    def fsdp_pre_all_gather(
        mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> "tuple[tuple[Tensor, ...], Any]":
        """What this rank sends: codes and scales of its rows, in the dtype of the computation."""
        return codes.sent(mp_policy.param_dtype), codes.forms

    def fsdp_post_all_gather(
        all_gather_outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        """The whole weight as a forward gets it; FSDP2 fills the same memory every time."""
        if out is not None:
            return None
        last: int = held().shape[-1]  # type: ignore[union-attr]
        parts = restored(all_gather_outputs, metadata)
        made = GatheredWeight(*parts, last, param_dtype, settings.w)
        return made, ()  # it has no memory but that of what FSDP2 gathered, which it frees

    fsdp_pre_all_gather.__signature__ = SIGNATURE  # type: ignore[attr-defined]
    shard.fsdp_pre_all_gather = fsdp_pre_all_gather
    shard.fsdp_post_all_gather = fsdp_post_all_gather


# ----------------------------------------------------------------------- parameters of fully_shard
# By module. What fully_shard knows of a parameter holds its module, so neither is held here.
_known: weakref.WeakKeyDictionary[nn.Module, dict[str, weakref.ref[Any]]]
_known = weakref.WeakKeyDictionary()
_at: dict[int, weakref.ref[Any]] = {}  # what it knows of one, by the id of that or of the whole
_groups: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # of its parameters


def params_of(module: nn.Module) -> dict[str, Any]:
    """What fully_shard knows of the parameters of a module, by name; it sits at the module that was
    wrapped, somewhere above."""
    if module not in _known and not _note(module):
        _at.clear()
        for param, group in fsdp_params():
            _groups[param] = weakref.ref(group)
            for held in (param.sharded_param, gathered_parameter(param)):
                if held is not None:
                    _at[id(held)] = weakref.ref(param)
        _note(module)
    found = {name: ref() for name, ref in _known.get(module, {}).items()}
    return {name: param for name, param in found.items() if param is not None}


def _note(module: nn.Module) -> bool:
    """Find those of a module, which holds them sharded or whole, in `_at`."""
    found: dict[str, weakref.ref[Any]] = {}
    for name, held in module._parameters.items():
        ref = None if held is None else _at.get(id(held))
        if ref is None or (param := ref()) is None:
            continue
        if param.sharded_param is held or gathered_parameter(param) is held:
            found[name] = ref
    if found:
        _known[module] = found
    return bool(found)


def gathered_parameter(param: Any) -> Any:
    """The parameter that fully_shard lends to a module for a forward, None before the first."""
    return getattr(param, "unsharded_param", None)


def _weights(model: nn.Module) -> Iterator[tuple[Any, str, Any]]:
    """(module, key, its FSDPParam) of the weights of te_mx modules."""
    _known.clear()
    for module in model.modules():
        if isinstance(module, MXModule):
            params = params_of(module)
            for key in module._weight_keys:
                for name in module._parts_of(key):
                    info = params[name].mesh_info if name in params else None
                    if getattr(info, "shard_mesh_size", 1) > 1:  # replicate's has none
                        yield module, name, params[name]


def _why_not(module: Any, param: Any, settings: Settings) -> str:
    """Why a weight is not gathered as codes, or an empty string."""
    ranks, dim = param.mesh_info.shard_mesh_size, param.fsdp_placement.dim
    sharded = param.sharded_param
    cuts = enumerate(sharded.placements)  # by tensor parallelism too
    sizes = [sharded.device_mesh.size(i) for i, p in cuts if getattr(p, "dim", None) == dim]
    rows = sharded.shape[dim] * ranks // prod(sizes)
    grouped = isinstance(module, GroupedLinear)
    known = params_of(module)
    own = next(name for name, one in known.items() if one is param)
    parts = next(p for p in map(module._parts_of, module._weight_keys) if own in p)
    if rest := [name for name in parts if name not in known]:
        return (
            f"is a part of a weight of which fully_shard does not shard {', '.join(rest)}; have it "
            "shard all of them, or none (ignored_params)"
        )
    if grouped and not module.single_grouped_weight:
        return "is one of several that are not stacked; build it with single_grouped_weight=True"
    if isinstance(module, TransposedLinear) or getattr(module, "_transposed", False):
        return (
            "is held with the inputs of a product in front of its outputs, and blocks run along "
            "the inputs; call quantized_all_gather on the modules beside it, one by one"
        )
    if state := module._source.standing:
        return f"is {state}; unfreeze it first"
    if dim != 0:
        return f"is sharded along dimension {dim}, and blocks run along it; shard dimension 0"
    after = param.post_forward_mesh_info
    if after is not None and after.shard_mesh_size != ranks:
        return (
            f"is sharded over {after.shard_mesh_size} ranks after forward (reshard_after_forward="
            f"{after.shard_mesh_size}), of which FSDP2 gathers values; use "
            "reshard_after_forward=True or False"
        )
    if param.offload_to_cpu:
        return "is offloaded to the CPU, where FSDP2 does not gather codes; use no CPUOffloadPolicy"
    if rows % ranks:
        return (
            f"has {rows} rows, which {ranks} ranks have in parts of different sizes; make it "
            f"{-(-rows // ranks) * ranks}"
        )
    if formats.get(settings.w).tensor_scaled:
        return (
            f"is quantized to {settings.w}, whose tensor scale needs the largest magnitude of all "
            "ranks; FSDP2 gathers its values, without this call"
        )
    height = 1 if sharded.ndim == 3 else formats.get(settings.w).scaling.block[0]
    if rows // ranks % height:
        return (
            f"has {rows // ranks} rows on a rank, which are no whole blocks of {height} rows "
            f"of {settings.w}; use a recipe with weights in blocks of one row"
        )
    return ""


class Sharded:
    """The owner of a weight that fully_shard lends for a forward: the parameter that the optimizer
    has. `before` is the owner of the lent one where tensor parallelism shards it too.

    Raises:
        NotImplementedError: FSDP2 has a hook for gradients, which sees those that it reduces.
    """

    def __init__(self, module: Any, param: Any, before: Any = None) -> None:
        if gradient_hook(_group_of(param)) is not None:
            raise NotImplementedError(
                f"{module._label()}: fully_shard has a hook for gradients "
                "(set_all_reduce_hook), which does not see those that fuse_wgrad_accumulation or "
                "delay_wgrad_compute add to main_grad or grad; build the layer without both, or "
                "use a mesh of two dimensions (HSDP) in place of the hook"
            )
        self.parameter = param.sharded_param
        self._param, self._before, self.reached = param, before, before is None

    def reduced(self, dw: Tensor) -> Tensor:
        """The mean over the ranks of data parallelism, or what FSDP2 was told to make instead, and
        of it the rows of this rank."""
        info, sharded = self._param.mesh_info, self._param.sharded_param
        mesh = info.mesh
        if self._before is not None:
            dw = self._before.reduced(dw).to_local()
        # As FSDP2, whichever collective divides: what set_gradient_divide_factor was given.
        given = getattr(_group_of(self._param), "gradient_divide_factor", None)
        dw = dw / (mesh.size() if given is None else given)
        made = DTensor.from_local(dw, mesh, [Partial()] * mesh.ndim, run_check=False)
        wanted: list[Any] = [Replicate()] * mesh.ndim
        if getattr(info, "shard_mesh_dim", None) is not None:  # else replicate's: each has all
            wanted[info.shard_mesh_dim] = Shard(self._param.fsdp_placement.dim)
        return DTensor.from_local(
            made.redistribute(placements=wanted).to_local(), sharded.device_mesh,
            sharded.placements, run_check=False, shape=sharded.shape, stride=sharded.stride(),
        )  # fmt: skip


def _group_of(param: Any) -> Any:
    """The parameters that are reduced together with one, as FSDP2 knows them."""
    known = _groups.get(param)
    return None if known is None else known()


def owners(module: Any, weights: Any) -> list[Any]:
    """The owners of weights that fully_shard lends to a module now; none where it does not."""
    module = module._local or module
    params = params_of(module)
    made = []
    for weight in weights:
        found = [p for p in params.values() if gathered_parameter(p) is weight]
        if not found:
            return []
        made.append(Sharded(module, found[0]))
    return made

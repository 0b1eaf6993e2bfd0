"""te_mx.rollout: weights from a trainer to the engine that generates, as the codes that the
trainer's next forward would quantize. docs/invariance.md."""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from te_mx import formats
from te_mx._ops import Operand, Stack
from te_mx._ops.quantize import tensors_of
from te_mx._ops.settled import held_as, settled
from te_mx.autograd.linear_recipe import plain_spec
from te_mx.context.region import current_recipe
from te_mx.recipe import Settings, resolve_recipe
from te_mx.runtime.arguments import check_module, is_dense, shown
from te_mx.weights.freezing import Freezable, as_buffers, rowwise
from te_mx.weights.ranks import is_spread
from te_mx.weights.split import part_names
from te_mx.weights.state_dict import codes_without_values, named_codes, saved_codes

__all__ = ["digest", "load_", "snapshot"]

_CHUNK = 1 << 22  # numbers of 8 bytes that a digest looks at together
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)


@torch.no_grad()
def snapshot(
    model: nn.Module, *, recipe: Any = None, like: nn.Module | None = None
) -> dict[str, Tensor]:
    """What a model frozen with drop_master=True would save, of a model that trains.

    Weights of te_mx modules become codes and scales, byte for byte what their next forward
    quantizes: 0.52 of bf16's bytes in 8 bits, 0.27 in 4. Everything else is as in
    ``model.state_dict()``. A weight that fully_shard or tensor parallelism sharded evenly is
    quantized where it lies and its codes are gathered; other DTensors are gathered first. Every
    rank must call it, and gets the whole, or what its part of an engine takes. What
    ``parameters_split`` split is joined, as in an engine without it.

    Args:
        model: plain, sharded by fully_shard or tensor parallel.
        recipe: names the formats; None means what `convert_model` bound to a layer, else the active
            recipe, or the default one.
        like: an engine of other placement: of layers that it shares with other ranks
            (``tp_group=``) the snapshot has this rank's parts, cut from one weight at a time.

    Returns:
        Tensors by the names of a state_dict; ``load_state_dict`` of a te_mx model takes it too.

    Raises:
        TypeError, ValueError: there is no te_mx module, or a weight cannot be quantized so, or cut
            between its blocks.
    """
    return dict(_entries(model, recipe, like))


def _entries(
    model: nn.Module, recipe: Any, like: nn.Module | None = None
) -> Iterator[tuple[str, Tensor]]:
    """What `snapshot` returns, the codes of one weight at a time."""
    shares = {} if like is None else _shares(like)
    ambient = current_recipe() if recipe is None else resolve_recipe(recipe)
    modules, done = _modules(model), set[str]()
    for name, module in modules:
        source, prefix = module._source, f"{name}." if name else ""
        settings = source.settings if source.dropped else module._chosen(ambient, name)
        if settings is None:
            continue
        if not isinstance(settings, Settings):
            raise ValueError(f"{name}: its weights have different recipes; pass recipe=")
        for key in module._weight_keys:
            full = prefix + key
            if source.dropped:
                made = named_codes(module, prefix, key, module._codes(key), settings.w)
            else:
                if name in shares:
                    _check_cut(shares[name], full, key, module._master_shape(key)[-2:], settings)
                made = _codes_of(module, full, key, settings)
            for entry in list(made):
                done.add(entry)
                yield entry, _mine(shares, entry, made.pop(entry))
        if module._split is not None:
            for kind in ("weight", "bias"):
                done |= {prefix + part for part in part_names(module._split, kind)}
            if parts := [_whole(part) for part in module._parts("bias")]:
                yield f"{prefix}bias", _mine(shares, f"{prefix}bias", torch.cat(parts))
    with codes_without_values():
        rest = model.state_dict()
    yield from ((n, _mine(shares, n, _whole(v))) for n, v in rest.items() if n not in done)


def _modules(model: nn.Module) -> list[tuple[str, Any]]:
    check_module(model)
    every = model.named_modules(remove_duplicate=False)  # a state_dict has all names
    found = [(name, one) for name, one in every if isinstance(one, Freezable)]
    if not found:
        raise ValueError(f"{type(model).__name__} has no te_mx module; call te_mx.convert_model")
    return found


def _shares(like: Any) -> dict[str, Any]:
    """The layers of an engine that several ranks share, by name."""
    found = {name: one for name, one in _modules(like) if one._shared is not None}
    for name, module in found.items():
        if module._tp_group is None:
            raise ValueError(f"like: {name} has no tp_group; set_tensor_parallel_group gives one")
    return found


def _halves(module: Any, key: str) -> int:
    """Of how many matrices each rank has a part: gate and up lie one behind the other."""
    return 2 if key.startswith("fc1_") and module._act.gated else 1


def _check_cut(module: Any, full: str, key: str, shape: Any, settings: Settings) -> None:
    dim = module._cut_of(key)
    assert dim is not None
    unit = _halves(module, key) * module._shared.size * formats.get(settings.w).scaling.block[dim]
    if shape[dim] % unit:
        raise ValueError(
            f"{full} {tuple(shape)}: {module._shared.size} ranks cut blocks of {settings.w} along "
            f"dimension {dim}, which must divide by {unit}"
        )


def _mine(shares: Mapping[str, Any], full: str, value: Any) -> Any:
    """This rank's part of a whole entry."""
    name, _, key = full.rpartition(".")
    module: Any = shares.get(name)
    dim = None if module is None else module._cut_of(key)
    if dim is None or value.dim() < ("bias" in key or 2):  # a scale of the whole, too
        return value
    at, rank = -1 if "bias" in key else dim - 2, torch.distributed.get_rank(module._tp_group)
    halves = value.chunk(_halves(module, key), at)
    parts = [half.chunk(module._shared.size, at)[rank] for half in halves]
    return torch.cat(parts, at) if len(parts) > 1 else parts[0].clone()


def _whole(value: Any) -> Any:
    if is_spread(value):
        value = value.full_tensor()
    return value.detach() if isinstance(value, Tensor) else value


def _codes_of(module: Any, full: str, key: str, settings: Settings) -> dict[str, Tensor]:
    """Entries of one weight."""
    names = module._held_by(key)
    weights = [module._parameters.get(name) for name in module._parts_of(key)]
    prefix = full.removesuffix(key)
    if not any(map(is_spread, weights)):
        row = module._plain_codes(key, settings)
        return named_codes(module, prefix, key, tensors_of(row), settings.w)
    if module._split is not None:
        whole = torch.cat([_whole(part) for part in weights])
        return named_codes(module, prefix, key, _quantized(whole, settings), settings.w)
    made: dict[str, Tensor] = {}
    for name, weight in zip(names, weights, strict=True):
        if not is_spread(weight) or module._master_shape(key)[-2:] != weight.shape[-2:]:
            raise ValueError(
                f"{full}: a DTensor {tuple(weight.shape)} that lies [in, out], or in part"
            )
        parts = _gathered(weight, settings)
        named = named_codes(module, prefix, key, parts, settings.w, names=(name,))
        made |= named
    return made


def _gathered(weight: Any, settings: Settings) -> list[Tensor]:
    """The tensors of a quantized DTensor, on every rank."""
    if not _cuts_between_blocks(weight, formats.get(settings.w)):
        return _quantized(weight.full_tensor().detach(), settings)
    parts = _quantized(weight.to_local().detach(), settings)
    mesh, places = weight.device_mesh, weight.placements
    whole = type(weight).from_local
    return [whole(one, mesh, places, run_check=False).full_tensor() for one in parts]


def _cuts_between_blocks(weight: Any, fmt: formats.Format) -> bool:
    if fmt.tensor_scaled:  # by the largest number of all ranks
        return False
    rows, k = fmt.scaling.block
    units = [1] * (weight.dim() - 2) + [rows, k]
    cut = set[int]()
    for place, ranks in zip(weight.placements, weight.device_mesh.shape, strict=True):
        if place.is_replicate():
            continue
        dim = place.dim if type(place).__name__ == "Shard" else -1
        if dim < 0 or dim in cut or weight.shape[dim] % (ranks * units[dim]):
            return False
        cut.add(dim)
    return True


def _quantized(weight: Tensor, settings: Settings) -> list[Tensor]:
    """The tensors of a matrix that is quantized rowwise, or of several."""
    if weight.dim() > 2:
        each = [_quantized(one, settings) for one in weight]
        return [torch.stack(parts) for parts in zip(*each, strict=True)]
    return tensors_of(rowwise(weight, settings))


@torch.no_grad()
def load_(model: nn.Module, given: Mapping[str, Tensor]) -> None:
    """Put a snapshot into a frozen model, where its weights lie: CUDA graphs of the model run on
    the new ones. Nothing lies twice but one weight at a time.

    Args:
        model: frozen by te_mx.freeze_weights(model, drop_master=True, ..), with the formats of the
            snapshot.
        given: what `snapshot` returned, on any device.

    Raises:
        TypeError, ValueError: the model is not frozen so, or names, shapes or dtypes differ.
    """
    modules, taken = _modules(model), set[str]()
    if not isinstance(given, Mapping):
        raise TypeError(f"rollout.load_: given must be a snapshot, got {shown(given)}")
    with codes_without_values():
        held = model.state_dict(keep_vars=True)
    if missing := sorted(held.keys() ^ given.keys(), key=str):
        side = "the snapshot has not" if missing[0] in held else "the model has not"
        raise ValueError(f"rollout.load_: {missing[0]} is an entry that {side}, of {len(missing)}")
    for name, value in held.items():
        if isinstance(value, Tensor) and not _fits(new := given[name], value):
            raise ValueError(
                f"rollout.load_: {name} is {shown(value)}, the snapshot has {shown(new)}"
            )
    for name, module in modules:
        if module._source.standing and not module._source.dropped:
            raise ValueError(
                f"rollout.load_: {name} keeps masters, which would make other codes at the next "
                "forward; freeze with drop_master=True"
            )
    for name, module in modules:
        if module._source.dropped:
            prefix = f"{name}." if name else ""
            for key in module._weight_keys:
                taken |= _replace(module, prefix, key, given)
    for name, value in held.items():
        if name not in taken and isinstance(value, Tensor):
            value.copy_(given[name])


def _fits(new: Any, value: Tensor) -> bool:
    """Whether a tensor of a snapshot can be copied into one of a model."""
    if not isinstance(new, Tensor) or not is_dense(new) or new.is_meta:
        return False
    return new.shape == value.shape and new.dtype == value.dtype


def _replace(module: Any, prefix: str, key: str, given: Mapping[str, Tensor]) -> set[str]:
    """Overwrite the buffers of one weight; the names that it took."""
    source, device = module._source, module._stored(key)[0].device
    with codes_without_values():
        held = saved_codes(module, key)
    names = list(named_codes(module, prefix, key, held, source.settings.w))
    parts = []
    for i, old in enumerate(held):
        each = [given[one].to(device).view(old.dtype) for one in names[i :: len(held)]]
        parts.append((each[0] if len(each) == 1 else torch.stack(each)).reshape(old.shape))
    row: Operand | Stack = held_as(parts, plain_spec(source.settings.w), source.shapes[key])
    for part, new in as_buffers(settled(row)).items():
        if new is None:
            continue
        if part == "aside":  # of which there may be more now: no product reads it
            module.register_buffer(f"{key}_aside", new, persistent=False)
        else:
            getattr(module, f"{key}_{part}").copy_(new)
    return set(names)


@torch.no_grad()
def digest(model: nn.Module | Mapping[str, Tensor], *, recipe: Any = None) -> str:
    """Sixteen bytes, in hex, of a snapshot, a frozen model, or the snapshot of a model that trains
    (`recipe` as of `snapshot`): equal where names, shapes, dtypes and all bytes are. Sums of
    integers on the device of each tensor, of codes of one weight at a time, so it costs one read.
    Raises what `snapshot` does."""
    each = model.items() if isinstance(model, Mapping) else _entries(model, recipe)
    said = sorted(
        f"{name} {value.dtype} {tuple(value.shape)} {_sum(value)}"
        for name, value in each if isinstance(value, Tensor)
    )  # fmt: skip
    return hashlib.sha256("".join(said).encode()).hexdigest()[:32]


def _sum(value: Tensor) -> int:
    """A sum over 8 bytes at a time, each times a number of its place, modulo 2^64."""
    flat = value.contiguous().view(-1).view(torch.uint8)
    flat = nn.functional.pad(flat, (0, -len(flat) % 8)).view(torch.int64)
    total = 0
    for first in range(0, len(flat), _CHUNK):
        part = flat[first : first + _CHUNK]
        places = torch.arange(first + 1, first + 1 + len(part), device=part.device) * _ODD
        mixed = (part ^ (part >> 29) ^ places) * (places | 1)
        total += int((mixed ^ (mixed >> 32)).sum())
    return total % (1 << 64)

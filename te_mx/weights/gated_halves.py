"""fc1 of a gated te_mx.LayerNormMLP as two parameters, for ranks that share it.

A rank has its part of what is activated and the same part of the gate, which are not one run of
rows of fc1. As parameters of their own they are ordinary shards, for whoever saves them, loads them
or cuts them again. A state_dict has the one fc1 of every LayerNormMLP."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from te_mx.autograd import weight_parts
from te_mx.weights.ranks import above, here, is_spread

_HALVES = ("activated", "gate")  # in the order of fc1's rows
KEYS = ("fc1_weight", "fc1_bias")


def names_of(key: str) -> tuple[str, ...]:
    """The names of the halves of one of KEYS."""
    layer, kind = key.split("_")
    return tuple(f"{layer}_{half}_{kind}" for half in _HALVES)


def split(module: Any) -> None:
    """Turn fc1 of a module into its halves, in the same place among its parameters; once."""
    if module._halves:
        return
    held: dict[str, Any] = dict(module._parameters)
    for name in held:
        del module._parameters[name]
    for name, value in held.items():
        if name not in KEYS:
            module.register_parameter(name, value)
            continue
        module.register_parameter(name, None)
        parts = (None, None) if value is None else value.detach().chunk(2)
        for half, part in zip(names_of(name), parts, strict=True):
            made = None if part is None else nn.Parameter(part.clone(), value.requires_grad)
            module.register_parameter(half, made)
    module._halves = True


def joined(module: Any, key: str) -> Tensor | None:
    """What this rank has of one of KEYS, differentiable where it is no DTensor; None without
    biases. A weight whose halves are gathered as codes is joined before the forward."""
    if key == "fc1_weight" and module._source.joined is not None:
        return module._source.joined
    parts = [module._parameters[name] for name in names_of(key)]
    return None if parts[0] is None else weight_parts.cat([here(part) for part in parts])


def _held(module: Any) -> Iterator[tuple[str, list[Any]]]:
    """KEYS that a module has, with their halves."""
    for key in KEYS:
        parts = [module._parameters[name] for name in names_of(key)]
        if parts[0] is not None:
            yield key, parts


class GatedHalves:
    """Mixin of te_mx.LayerNormMLP, whose fc1 may be such halves."""

    _halves = False

    def _all_parameters(self: Any) -> list[Any]:
        """Weight and bias of both layers, whole."""
        held = [*self._held(*self._linear_names)]
        if self._halves:
            held[:2] = [joined(self, key) for key in KEYS]
        return held

    def _parts_of(self, key: str) -> tuple[str, ...]:
        names: tuple[str, ...]
        names = names_of(key) if self._halves and key in KEYS else super()._parts_of(key)  # type: ignore[misc]
        return names

    def _whole(self, key: str) -> Any:
        return joined(self, key) if self._halves and key in KEYS else super()._whole(key)  # type: ignore[misc]

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """nn.Module's. torch.distributed.checkpoint.state_dict asks every module alone (recurse is
        False) for what it is to fill with values of another rank, and finds what is loaded."""
        yield from super().named_buffers(prefix, recurse, remove_duplicate)  # type: ignore[misc]
        for key, parts in _held(self) if self._halves and not recurse else ():
            if is_spread(*parts):
                yield f"{prefix}.{key}" if prefix else key, above.distributed.blank(parts)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """With one fc1 in the place of the halves. Of DTensors it is one whose ranks have runs of
        rows, which is a collective operation and a copy."""
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[misc]
        if not self._halves:
            return
        for key, _ in _held(self):
            found = [destination.pop(prefix + name) for name in names_of(key)]
            destination[prefix + key] = (
                above.distributed.join(found) if is_spread(*found) else weight_parts.cat(found)
            )
        module: Any = self
        for name in module._parameters:  # the order of every LayerNormMLP
            if prefix + name in destination:
                destination[prefix + name] = destination.pop(prefix + name)

    def _adapt_state_dict(self, state_dict: Any, prefix: str, error_msgs: list[str]) -> None:
        """Put halves in the place of the one fc1."""
        for key, parts in _held(self) if self._halves else ():
            whole, names = state_dict.get(prefix + key), [prefix + name for name in names_of(key)]
            if is_spread(whole) and above.distributed.is_blank(whole):  # there was no such key
                del state_dict[prefix + key]
                continue
            if not isinstance(whole, Tensor) or whole.element_size() == 1:  # refused as codes
                continue
            shape = (sum(len(part) for part in parts), *parts[0].shape[1:])
            if tuple(whole.shape) != shape:
                error_msgs.append(
                    f"size mismatch for {prefix + key}: copying a param with shape "
                    f"{tuple(whole.shape)} from checkpoint, the shape in current model is {shape}"
                )
                continue
            del state_dict[prefix + key]
            state_dict.update(zip(names, above.distributed.cut(whole, parts), strict=True))

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool,
        missing_keys: list[str], *others: Any,
    ) -> None:  # fmt: skip
        super()._load_from_state_dict(  # type: ignore[misc]
            state_dict, prefix, local_metadata, strict, missing_keys, *others
        )
        for key, _ in _held(self) if self._halves else ():
            names = [prefix + name for name in names_of(key)]
            if all(name in missing_keys for name in names):
                missing_keys[missing_keys.index(names[0])] = prefix + key
                missing_keys.remove(names[1])

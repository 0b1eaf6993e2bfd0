"""The parameters of all groups of a grouped layer, and its weights as one: how they stand still,
for micro-batches or frozen.

state_dicts of a grouped layer: one stacked entry, or one a group."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from te_mx._ops import Stack
from te_mx._ops.grouped_quantize import quantize_weights
from te_mx.autograd import weight_parts
from te_mx.autograd.grouped import kept_weights
from te_mx.autograd.linear_recipe import QuantizedWeight, plain_spec
from te_mx.recipes.settings import Settings
from te_mx.runtime.arguments import is_dense
from te_mx.weights.freezing import Freezable
from te_mx.weights.ranks import here
from te_mx.weights.state_dict import SCALES, WHOLE


class OfGroups(Freezable):
    """Mixin of modules whose weights are matrices of groups, [G, n, k] without masters."""

    _module_type = "grouped_linear"

    def _make_kept(
        self, key: str, settings: Settings, need_dx: bool, for_steps: bool = False
    ) -> QuantizedWeight:
        # Of groups no copy is wider than its codes, whatever it is for.
        return kept_weights([w.detach() for w in self._each_of(key)], settings, need_dx)

    def _plain_codes(self, key: str, settings: Settings) -> Stack:
        weights = [w.detach() for w in self._each_of(key)]
        return quantize_weights(weights, plain_spec(settings.w), rule=settings.weight_rule)[0]

    def _like_weights(self, biases: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Biases stacked or not as the weights are."""
        return biases

    def _stacked_bias(self, biases: Sequence[Tensor]) -> Tensor | None:
        """[G, N] of the parameters that hold biases."""
        return biases[0] if biases else None


class StackedWeight(OfGroups):
    """Mixin of te_mx.GroupedLinear. Its one key stands for the weights of all groups; without
    masters their codes lie in one buffer, group after group."""

    num_gemms: int
    in_features: int
    out_features: int
    return_bias: bool
    single_grouped_weight: bool
    single_grouped_bias: bool
    _weight_names: tuple[str, ...]
    _bias_names: tuple[str, ...]

    def weights(self) -> list[Tensor]:
        """The weight [out, in] of every group; views of a stacked parameter do not train."""
        return self._each(self._weight_names, self.single_grouped_weight)

    def biases(self) -> list[Tensor]:
        """The bias [out] of every group, or an empty list."""
        return self._each(self._bias_names, self.single_grouped_bias)

    def _each(self, names: tuple[str, ...], stacked: bool) -> list[Tensor]:
        held = [here(getattr(self, name)) for name in names]
        return list(held[0].detach().unbind(0)) if stacked and held else held

    def _master_shape(self, key: str) -> tuple[int, ...]:
        return (self.num_gemms, *self._sample(key).shape)

    def _sample(self, key: str) -> Tensor:
        return self.weights()[0]

    def _each_of(self, key: str) -> list[Tensor]:
        return self.weights()

    def _held_by(self, key: str) -> tuple[str, ...]:
        return self._weight_names

    def _masters(self, key: str) -> dict[str, Tensor]:
        stack = self._source.values(self, key)
        values = [stack] if self.single_grouped_weight else [each.clone() for each in stack]
        return dict(zip(self._weight_names, values, strict=True))

    def _stacked_bias(self, biases: Sequence[Tensor]) -> Tensor | None:
        """[G, N] of the parameters that hold biases."""
        if not biases:
            return None
        return biases[0] if self.single_grouped_bias else weight_parts.stack(biases)


def parameter_names(kind: str, num_gemms: int, stacked: bool) -> tuple[str, ...]:
    """("weight0", ...) or ("weight",)."""
    return (kind,) if stacked else tuple(f"{kind}{i}" for i in range(num_gemms))


def part_names(whole: str, groups: int) -> list[str]:
    """The entries that a stacked one stands for: "weight0" ... of "weight", "weight0_scale" ... of
    "weight_scale"."""
    end = next((end for end in (WHOLE, *reversed(SCALES)) if whole.endswith(end)), "")
    return [f"{whole.removesuffix(end)}{i}{end}" for i in range(groups)]


def convert_state_dict(
    state_dict: Any, whole: str, groups: int, stacked: bool, error_msgs: list[str]
) -> None:
    """Make an entry of a layer in state_dict what it holds, in place: ``whole`` [groups, ...] if
    `stacked`, else one for each group.

    What does not fit is left for load_state_dict to report, but a stack of another number of
    groups, or one of which parts are missing beside scales, is reported here."""
    parts = part_names(whole, groups)
    if not stacked:
        if whole in state_dict and not any(key in state_dict for key in parts):
            value = state_dict[whole]
            count = len(value) if isinstance(value, Tensor) and value.dim() else 0
            if count != groups:
                error_msgs.append(
                    f"{whole} holds {count} groups, got a layer of {groups}: shapes must agree"
                )
                return
            del state_dict[whole]
            state_dict.update(zip(parts, value.unbind(0), strict=True))
        return
    there = [key for key in parts if key in state_dict]
    if whole in state_dict or not there:
        return
    if len(there) < groups:
        if whole.endswith((*SCALES, WHOLE)):
            missing = [key for key in parts if key not in state_dict]
            error_msgs.append(f"{', '.join(missing)}: missing beside {there[0]}")
        return
    held = [state_dict[key] for key in parts]
    if not all(isinstance(part, Tensor) and is_dense(part) for part in held):
        error_msgs.append(f"{parts[0]} ... must be dense tensors, to be stacked")
        return
    for name, kinds in (
        ("shape", [tuple(t.shape) for t in held]),
        ("dtype", [t.dtype if t.element_size() == 1 else "high precision" for t in held]),
    ):
        if len(set(kinds)) > 1:
            error_msgs.append(f"{parts[0]} ... must have one {name} to be stacked, got {kinds}")
            return
    try:
        made = _stack(held)
    except (TypeError, ValueError, RuntimeError) as error:  # of dtypes, devices and subclasses
        error_msgs.append(f"{parts[0]} ... cannot be stacked: {error}")
        return
    for key in parts:
        del state_dict[key]
    state_dict[whole] = made


def _stack(parts: list[Tensor]) -> Tensor:
    """torch.stack, which does not know 8-bit floats everywhere."""
    if parts[0].element_size() > 1:
        return weight_parts.stack(parts)
    return torch.stack([part.view(torch.uint8) for part in parts]).view(parts[0].dtype)

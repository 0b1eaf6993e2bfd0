"""te_mx's linear modules as Transformer Engine builds them: its order of positional arguments, its
initialization (weights normal with standard deviation 0.023, biases 0) and its default device.

Transformer Engine's defaults, where they are others than te_mx's own."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from te_mx.nn import grouped_linear, layernorm_linear, layernorm_mlp, linear
from te_mx.nn.arguments import ABSENT
from te_mx.nn.norm_base import default_init
from te_mx.runtime.arguments import shown


def default_device() -> torch.device:
    """Where modules are made that name no device: on the GPU where there is one, as there. A device
    that is torch's default (``with torch.device("meta")``) goes before, but for the CPU."""
    device = torch.get_default_device()
    if device.type == "cpu" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return device


# The order of the arguments in Transformer Engine.
ORDERS: dict[str, tuple[str, ...]] = {
    "Linear": (
        "in_features", "out_features", "sequence_parallel", "fuse_wgrad_accumulation", "tp_group",
        "tp_size", "get_rng_state_tracker", "rng_tracker_name", "init_method", "bias",
        "return_bias", "params_dtype", "parallel_mode", "parameters_split", "device",
    ),
    "LayerNormLinear": (
        "in_features", "out_features", "eps", "sequence_parallel", "fuse_wgrad_accumulation",
        "tp_group", "tp_size", "get_rng_state_tracker", "init_method", "bias", "normalization",
        "return_bias", "params_dtype", "parallel_mode", "return_layernorm_output",
        "return_layernorm_output_gathered", "parameters_split", "zero_centered_gamma", "device",
    ),
    "LayerNormMLP": (
        "hidden_size", "ffn_hidden_size", "eps", "sequence_parallel", "return_bias",
        "get_rng_state_tracker", "tp_group", "tp_size", "init_method", "bias", "normalization",
        "activation", "activation_params", "output_layer_init_method", "fuse_wgrad_accumulation",
        "params_dtype", "return_layernorm_output", "return_layernorm_output_gathered", "seq_length",
        "micro_batch_size", "set_parallel_mode", "zero_centered_gamma", "device",
    ),
    "GroupedLinear": (
        "num_gemms", "in_features", "out_features", "sequence_parallel", "fuse_wgrad_accumulation",
        "tp_group", "tp_size", "get_rng_state_tracker", "rng_tracker_name", "init_method", "bias",
        "return_bias", "params_dtype", "parallel_mode", "device",
    ),
}  # fmt: skip


def named(kind: str, args: Sequence[Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a constructor by name, with Transformer Engine's default device.

    Raises:
        TypeError: more of them than there are names, a name twice, or sizes that are missing.
    """
    order = ORDERS[kind]
    if len(args) > len(order):
        raise TypeError(
            f"te_mx.{kind} takes {len(order)} positional arguments, {', '.join(order)}, got "
            f"{len(args)}"
        )
    made = dict(zip(order, args, strict=False))
    if twice := [name for name in made if name in given]:
        raise TypeError(
            f"te_mx.{kind}: {twice[0]} is given twice, {shown(given[twice[0]])} by name"
        )
    made |= given
    sizes = order[: 3 if kind == "GroupedLinear" else 2]
    if missing := [name for name in sizes if name not in made]:
        raise TypeError(f"te_mx.{kind}: {', '.join(missing)} must be given")
    if made.get("device") is None:
        made["device"] = default_device()
    return made


def signature(kind: str, base: type) -> inspect.Signature:
    """For help() and editors: the arguments in the order of `ORDERS`, then te_mx's others."""
    theirs = inspect.signature(base).parameters
    keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD
    taken = [
        theirs[name].replace(kind=keyword)
        if name in theirs else inspect.Parameter(name, keyword, default=ABSENT[name].default)
        for name in ORDERS[kind]
    ]  # fmt: skip
    others = [
        one.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for name, one in theirs.items()
        if name not in ORDERS[kind] and one.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    return inspect.Signature([*taken, *others])


class Linear(linear.Linear):
    """te_mx.Linear, built as Transformer Engine's: see te_mx.Linear and docs/transformer_engine.md.

    Arguments come in Transformer Engine's order, weights start normal with standard deviation 0.023
    (or as `init_method` says) and biases at 0, on the GPU where there is one."""

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(**named("Linear", args, given))

    def _initialize(self) -> None:
        _initialize(self._parts("weight"), self._parts("bias"), self.init_method)


class LayerNormLinear(layernorm_linear.LayerNormLinear):
    """te_mx.LayerNormLinear, built as Transformer Engine's: arguments in its order, on the GPU
    where there is one."""

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(**named("LayerNormLinear", args, given))


class LayerNormMLP(layernorm_mlp.LayerNormMLP):
    """te_mx.LayerNormMLP, built as Transformer Engine's: arguments in its order, on the GPU where
    there is one."""

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(**named("LayerNormMLP", args, given))


class GroupedLinear(grouped_linear.GroupedLinear):
    """te_mx.GroupedLinear, built as Transformer Engine's: arguments in its order, weights normal
    with standard deviation 0.023 and biases 0, on the GPU where there is one."""

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(**named("GroupedLinear", args, given))

    def _initialize(self) -> None:
        _initialize(self.weights(), self.biases(), self.init_method)


def _initialize(weights: Sequence[Any], biases: Sequence[Any], init_method: Any) -> None:
    for weight in weights:
        (init_method or default_init)(weight)
    for bias in biases:
        nn.init.zeros_(bias)


for _kind in (Linear, LayerNormLinear, LayerNormMLP, GroupedLinear):
    setattr(_kind, "__signature__", signature(_kind.__name__, _kind.__mro__[1]))  # noqa: B010

"""Registers "te_mx" among the experts implementations of Transformers, when imported:

    import te_mx.integrations.transformers
    model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="te_mx")

Inside te_mx.autocast the experts of such a model run in MXFP8, outside as grouped_mm. For models
that are there already te_mx.convert_model is the simpler way, and remembers what ran before. This
one also reaches experts whose forward expert parallelism has replaced."""

from typing import Any

from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from te_mx.autograd.grouped import GroupedCall, grouped_linear
from te_mx.context import region
from te_mx.context.region import output_dtype
from te_mx.integrations.transformers_experts import (
    TransformersExperts,
    run_experts,
    why_not_experts,
)
from te_mx.recipes.settings import Settings

NAME = "te_mx"
_PLAIN = "grouped_mm"


def te_mx_experts_forward(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The function of the registry: experts of a module that te_mx.convert_model did not meet.

    Raises:
        ValueError: inside te_mx.autocast, weights that cannot be multiplied in MXFP8.
        RuntimeError: a backward pass recomputes it and cannot know the recipe, see te_mx.autocast.
    """
    given = hidden_states, top_k_index, top_k_weights
    # A converted module has asked already, and runs in high precision.
    converted = isinstance(self, TransformersExperts)
    active = None if converted else region.current_settings()
    settings: Any = region.resolved(active, ("",), "grouped_linear")
    if settings is None:
        return ALL_EXPERTS_FUNCTIONS[_PLAIN](self, *given)
    if reason := why_not_experts(self):
        raise ValueError(
            f"{type(self).__name__} cannot run in {settings.formats}: {reason}. Choose another "
            "experts_implementation, or run it under te_mx.autocast(enabled=False)"
        )

    def product(x: Tensor, offs: Tensor, key: str, bias: "Tensor | None") -> Tensor:
        return _product(self, x, offs, key, bias, settings)

    return run_experts(self, product, *given)


def _product(
    module: Any, x: Tensor, offs: Tensor, key: str, bias: Tensor | None, settings: Settings
) -> Tensor:
    weight = getattr(module, key)
    if getattr(module, "is_transposed", False):
        weight = weight.transpose(-2, -1)
    held = (weight,) if bias is None else (weight, bias)
    call = GroupedCall(0, settings, output_dtype(x), bias is not None)
    return grouped_linear(x, offs, held, call)


ALL_EXPERTS_FUNCTIONS.register(NAME, te_mx_experts_forward)

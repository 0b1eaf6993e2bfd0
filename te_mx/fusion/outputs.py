"""The output projection of attentions that keep their result for backward themselves: it keeps the
same tensor instead of codes of it. Compiled code, which keeps less of everything else, keeps codes,
1.03 bytes an element: quantizing 16384 x 2048 takes 36 us in one read and 60 in two (NVIDIA H200,
2026-11-24)."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from te_mx.fusion.sequences import Fusion

# Attentions of Transformers whose backward reads their result, in the memory that the output
# projection is given: (batch, tokens, heads, width), as their kernels write it. Others (eager) keep
# something else, and codes are smaller than a tensor of its own.
_KEEPS = ("sdpa", "flash_attention_2", "flash_attention_3")
_OUTPUT = ("o_proj", "out_proj", "dense")
_INPUT = ("q_proj", "qkv_proj", "query_key_value")


def plan_outputs(
    model: nn.Module, converts: Collection[nn.Module]
) -> tuple[list[Fusion], list[nn.Module]]:
    """The report, and the layers that are to save their input itself."""
    found: list[Fusion] = []
    layers: list[nn.Module] = []
    for prefix, module in model.named_modules():
        children = module._modules
        names = [name for name in _OUTPUT if name in children]
        kind = getattr(getattr(module, "config", None), "_attn_implementation", None)
        if not names or kind is None or not any(name in children for name in _INPUT):
            continue
        layer, name = children[names[0]], f"{prefix}.{names[0]}" if prefix else names[0]
        if not isinstance(layer, nn.Linear) or layer not in converts or kind not in _KEEPS:
            continue
        shape = f"{layer.in_features} -> {layer.out_features}"
        what = f"{type(module).__name__}: keeps the result that {kind} keeps, not codes of it"
        found.append(Fusion(name, shape, what, ""))
        layers.append(layer)
    return found, layers


def save_inputs(layers: list[nn.Module]) -> None:
    """Do what was planned, once the layers are converted."""
    for layer in layers:
        layer.keeps_given_input = True  # type: ignore[assignment]

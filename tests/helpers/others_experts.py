"""Experts modules of Transformers, and what they compute as a loop of te_mx.Linear."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import te_mx

_CLASSES = {
    "gpt_oss": "GptOssExperts", "aria": "AriaExperts", "nemotron_h": "NemotronHExperts",
    "mixtral": "MixtralExperts",
}  # fmt: skip


def stand_alone(
    kind: str, hidden_act: str = "silu", width: int = 64, inner: int = 40, experts: int = 5,
    std: float = 0.2,
) -> nn.Module:  # fmt: skip
    """Experts as the models make them, with values of every sign and size."""
    torch.manual_seed(2)
    config = SimpleNamespace(
        hidden_size=width, intermediate_size=inner, _experts_implementation="grouped_mm",
        num_local_experts=experts, moe_num_experts=experts, n_routed_experts=experts,
        hidden_act=hidden_act, swiglu_alpha=1.7, swiglu_limit=7.0, moe_intermediate_size=inner,
        moe_latent_size=None, mlp_hidden_act="relu2",
    )  # fmt: skip
    file = import_module(f"transformers.models.{kind}.modeling_{kind}")
    made = getattr(file, _CLASSES[kind])(config)
    if not hasattr(made, "has_gate"):
        pytest.skip(f"{_CLASSES[kind]} of this transformers does not ask the registry")
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=std)
    return made


def loop_of_linears(experts: nn.Module, x, index, scores) -> torch.Tensor:
    """The experts one after the other, each product a te_mx.Linear."""
    gated = experts.has_gate
    out = x.new_zeros(*index.shape, x.shape[1])
    for e in range(len(experts.down_proj)):
        token, slot = torch.where(index == e)
        h = x[token]
        for key in ("gate_up_proj" if gated else "up_proj", "down_proj"):
            weight = getattr(experts, key)[e]
            weight = (weight.t() if experts.is_transposed else weight).contiguous()
            layer = te_mx.Linear(weight.shape[1], weight.shape[0], experts.has_bias, "meta")
            held = {"weight": weight}
            if experts.has_bias:
                held["bias"] = getattr(experts, f"{key}_bias")[e]
            h = torch.func.functional_call(layer, held, (h,))
            if key != "down_proj":
                h = experts._apply_gate(h) if gated else experts.act_fn(h)
        out = out.index_put((token, slot), h)
    return (out * scores.unsqueeze(-1)).sum(1).to(x.dtype)

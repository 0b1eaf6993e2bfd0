"""Experts of Transformers under fully_shard, on two ranks against the mean of two passes in one
process."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
import transformers
from data_parallel_cases import RECIPE, equal, gradients, mean_gradients, refused, sharded, step
from tensor_parallel_cases import DEVICE, K, M, N, of
from torch import nn

import te_mx
from te_mx.distributed import quantized_all_gather


class Mixture(nn.Module):
    """Experts of Transformers, stacked [E, out, in] or, as gpt-oss', [E, in, out]."""

    def __init__(self, experts, config):
        super().__init__()
        self.experts = experts(config).to(DEVICE)
        for p in self.parameters():
            nn.init.normal_(p, std=0.1)
        te_mx.convert_model(self, recipe=RECIPE)

    def forward(self, x):
        index = torch.arange(2 * len(x), device=x.device).view(-1, 2) % 3
        return self.experts(x, index, torch.sin(index + 1.0))


def mixture(kind):
    config = getattr(transformers, f"{kind}Config")(
        hidden_size=K,
        intermediate_size=N,
        num_local_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=1,
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    return Mixture(type(model.model.layers[0].mlp.experts), config)


def case_quantized_all_gather_of_experts():
    model = mixture("Mixtral")
    expected = mean_gradients(model, RECIPE)
    sharded(model)
    assert quantized_all_gather(model) == 2
    step(model, dist.get_rank(), RECIPE)
    equal(gradients(model), expected)


def case_quantized_all_gather_of_experts_is_refused():
    model = mixture("GptOss")
    sharded(model)
    refused(ValueError, "gate_up_proj is held with the inputs", lambda: quantized_all_gather(model))
    assert model.experts._gathers is None


def case_freezing_experts_after_sharding():
    for kind in ("Mixtral", "GptOss"):
        model = mixture(kind)
        whole = copy.deepcopy(model)
        sharded(model)
        for one in (model, whole):
            assert te_mx.freeze_weights(one) == 1
        with torch.no_grad():
            assert torch.equal(model(of(M, K)), whole(of(M, K)))

"""Weights in parts (parameters_split) that FSDP2 gathers as codes, on two ranks, against those that
it gathers as values."""

from __future__ import annotations

import torch
import torch.distributed as dist
from data_parallel_cases import (
    FP32,
    KNOBS,
    RECIPE,
    equal,
    give_main_grads,
    gradients,
    mean_gradients,
    refused,
    sharded,
    step,
)
from gathered_codes_cases import trained
from tensor_parallel_cases import DEVICE, K, M, N, built, full, of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import te_mx
from te_mx.distributed import quantized_all_gather

SPLIT = {"query_": N // 2, "key_": N // 4, "value_": N // 4}


def case_weights_in_parts_are_gathered_as_codes():
    """parameters_split: each part as codes, and the bits of what gathers in bf16, in steps, with
    main_grad and delayed gradients, and compiled."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for family in (te_mx.Linear, te_mx.LayerNormLinear):
        made = [built(family, K, N, parameters_split=SPLIT, **FP32) for _ in range(2)]
        plain, codes = (trained(one, i == 1, policy=policy) for i, one in enumerate(made))
        for ours, theirs in zip(codes[0] + codes[1], plain[0] + plain[1], strict=True):
            assert torch.equal(ours, theirs)
        assert codes[2] <= 0.54 * plain[2], (codes[2], plain[2])
        expected = mean_gradients(built(family, K, N, parameters_split=SPLIT, **FP32), RECIPE)
        for fuse, delay in KNOBS:
            knobs = {"fuse_wgrad_accumulation": fuse, "delay_wgrad_compute": delay}
            layer = built(family, K, N, parameters_split=SPLIT, **FP32, **knobs)
            sharded(layer)
            assert quantized_all_gather(layer) == 3
            give_main_grads(layer, fuse)
            step(layer, dist.get_rank(), RECIPE)
            if delay:
                layer.backward_dw()
            equal(gradients(layer), expected)
        layer = built(family, K, N, parameters_split=SPLIT, **FP32)
        sharded(layer)
        quantized_all_gather(layer)
        backend = "eager" if family is te_mx.Linear else "aot_eager"
        step(torch.compile(layer, backend=backend), dist.get_rank(), RECIPE)
        equal(gradients(layer), expected)


def case_weights_in_parts_of_a_transformer_layer():
    """q, k and v of Transformer Engine's layer are parts of one weight unless they are fused."""
    given = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "device": DEVICE}
    for fused, count in ((True, 4), (False, 6)):
        found = []
        for quantized in (False, True):
            torch.manual_seed(1)
            layer = te_mx.pytorch.TransformerLayer(K, N, 4, fuse_qkv_params=fused, **given)
            sharded(layer)
            assert not quantized or quantized_all_gather(layer, recipe=RECIPE) == count
            with te_mx.autocast(recipe=RECIPE):
                y = layer(of(M, 1, K).float())
            y.backward(of(M, 1, K, seed=2).float())
            found.append([y.detach(), *(full(p.grad) for p in layer.parameters())])
        for ours, theirs in zip(*found, strict=True):
            assert torch.equal(ours, theirs)


def case_weights_in_parts_are_refused():
    layer = built(te_mx.Linear, K, N, parameters_split=SPLIT)
    fully_shard(layer, mesh=init_device_mesh(DEVICE, (2,)), ignored_params={layer.key_weight})
    refused(ValueError, "does not shard key_weight", lambda: quantized_all_gather(layer))

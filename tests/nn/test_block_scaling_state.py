"""Weights in formats of the recipe BlockScaling that stand still: frozen ones with and without
their masters, in a state_dict, for micro-batches."""

from __future__ import annotations

import copy
import dataclasses
import io
import pickle

import pytest
import torch
from torch import Tensor

import te_mx
from te_mx.recipe import BlockScaling

pytestmark = pytest.mark.filterwarnings("ignore::te_mx.FallbackWarning")

M, K, N = 37, 70, 41  # no multiple of a block, nor of the codes that share bytes
SPLITS = [5, 0, 32]
FP4 = BlockScaling(x="mxfp8_e4m3", w="mxfp4", g="mxfp8_e5m2", scale_rule="even")
MODULES = {
    "Linear": lambda: te_mx.Linear(K, N),
    "LayerNormLinear": lambda: te_mx.LayerNormLinear(K, N),
    "LayerNormMLP": lambda: te_mx.LayerNormMLP(K, N),
    "GroupedLinear": lambda: te_mx.GroupedLinear(3, K, N),
    "GroupedLinear stacked": lambda: te_mx.GroupedLinear(3, K, N, single_grouped_weight=True),
}
EVERY_MODULE = pytest.mark.parametrize("kind", MODULES)


def run(kind: str, module, x: Tensor, recipe=FP4) -> Tensor:
    with torch.no_grad(), te_mx.autocast(recipe=recipe):
        return module(x, SPLITS) if kind.startswith("Grouped") else module(x)


def through_a_file(state: dict) -> dict:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@EVERY_MODULE
def test_frozen_with_masters(kind):
    module, x = MODULES[kind](), torch.randn(M, K)
    expected = run(kind, module, x)
    te_mx.freeze_weights(module, recipe=FP4)
    for _ in range(2):
        assert torch.equal(run(kind, module, x), expected)
    x.requires_grad_()
    with te_mx.autocast(recipe=FP4):
        y = module(x, SPLITS) if kind.startswith("Grouped") else module(x)
    y.square().sum().backward()
    given, x.grad = x.grad, None
    te_mx.unfreeze_weights(module)
    with te_mx.autocast(recipe=FP4):
        y = module(x, SPLITS) if kind.startswith("Grouped") else module(x)
    y.square().sum().backward()
    assert torch.equal(x.grad, given)


@EVERY_MODULE
def test_dropped_masters_go_through_a_state_dict(kind):
    module, x = MODULES[kind](), torch.randn(M, K)
    masters = {name: p.detach().clone() for name, p in module.named_parameters()}
    expected = run(kind, module, x)
    te_mx.freeze_weights(module, drop_master=True, recipe=FP4)
    assert torch.equal(run(kind, module, x), expected)
    outside = module(x, SPLITS) if kind.startswith("Grouped") else module(x)
    assert torch.equal(outside, expected)
    state = module.state_dict()
    weights = [name.removesuffix("_scale") for name in state if name.endswith("_scale")]
    assert len(weights) == {"LayerNormMLP": 2, "GroupedLinear": 3}.get(kind, 1)
    for name in weights:
        *groups, rows, k = masters[name].shape
        codes, scales = state[name], state[f"{name}_scale"]
        assert codes.dtype == scales.dtype == torch.uint8
        assert codes.shape == (*groups, rows, (k + 1) // 2)
        assert scales.shape == (*groups, rows, -(-k // 32))
        for weight, code, scale in zip(
            masters[name].view(-1, rows, k), codes.view(-1, *codes.shape[-2:]),
            scales.view(-1, *scales.shape[-2:]), strict=True,
        ):  # fmt: skip
            q = te_mx.quantize(weight, fmt="mxfp4", scale_rule="even")
            assert torch.equal(code, q.rowwise_data.view(torch.uint8))
            assert torch.equal(scale, q.rowwise_scale.view(torch.uint8))
    moved = copy.deepcopy(module).bfloat16().state_dict()
    assert all(torch.equal(moved[name], state[name]) for name in weights)
    loaded = through_a_file(state)
    other = MODULES[kind]()
    other.load_state_dict(loaded)
    assert other._source.settings == FP4.settings
    assert torch.equal(run(kind, other, x), expected)
    # Without the metadata shapes tell codes of four bits from others.
    bare = dict(loaded)
    te_mx.freeze_weights(again := MODULES[kind](), drop_master=True, recipe=FP4)
    for taking in (again, MODULES[kind]()):
        taking.load_state_dict(bare)
        assert torch.equal(run(kind, taking, x), expected)
    # And back to parameters, which have the values of the codes.
    te_mx.unfreeze_weights(module, dequantize=True)
    for name in weights:
        master = masters[name]
        values = te_mx.quantize(master, fmt="mxfp4", scale_rule="even").dequantize()
        assert torch.equal(module.get_parameter(name), values)
    assert pickle.loads(pickle.dumps(other)).state_dict().keys() == state.keys()


def test_codes_of_another_format_do_not_load():
    module = te_mx.Linear(K, N)
    te_mx.freeze_weights(module, drop_master=True, recipe=FP4)
    state = module.state_dict()
    state["weight"] = state["weight"][:, :-1]
    with pytest.raises(
        RuntimeError, match=r"shapes must be \(41, 35\) and \(41, 3\).*got \(41, 34\)"
    ):
        te_mx.Linear(K, N).load_state_dict(state)


def test_dropped_codes_meet_inputs_of_the_recipe_that_runs():
    module, x = te_mx.Linear(K, N), torch.randn(M, K)
    te_mx.freeze_weights(module, drop_master=True, recipe=FP4)
    six = BlockScaling(x="mxfp6_e2m3", w="mxfp6_e2m3")
    wq = te_mx.MXTensor(
        (N, K), "mxfp4", rowwise_data=module.weight_codes, rowwise_scale=module.weight_scale
    )
    got = run("Linear", module, x, six)
    xq = te_mx.quantize(x, fmt="mxfp6_e2m3")
    bias = module.bias.detach()
    assert torch.equal(got, te_mx.gemm(wq, xq, bias=bias, out_dtype=torch.float32).out)


def test_kept_for_micro_batches():
    layer, x = te_mx.Linear(K, N), torch.randn(M, K)
    with te_mx.autocast(recipe=FP4):
        first = layer(x, is_first_microbatch=True)
        with torch.no_grad():
            layer.weight.add_(1)
        assert torch.equal(layer(x, is_first_microbatch=False), first)
    with te_mx.autocast(recipe=dataclasses.replace(FP4, w="mxfp6_e2m3")):  # another weight format
        assert not torch.equal(layer(x, is_first_microbatch=False), first)

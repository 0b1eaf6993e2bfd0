"""Inputs of sequence parallelism that are gathered as codes, against those gathered as values."""

from __future__ import annotations

import copy
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from data_parallel_cases import refused
from group_cases import KINDS, compiles, mine
from tensor_parallel_cases import K, N, built, mesh, of
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

import te_mx
from te_mx.distributed import ModuleParallel, quantized_input_gather

KNOBS = {"fuse_wgrad_accumulation": True, "delay_wgrad_compute": True}
SHARING = [(family, kind, given) for family, kind, given in KINDS if kind != "row"]


@contextmanager
def counted():
    """Bytes that this rank sends when it gathers."""
    sent, gather, into = [], collectives.all_gather_tensor, dist.all_gather_into_tensor

    def counting(t, *args, **kwargs):  # DTensor's
        sent.append(t.nbytes)
        return gather(t, *args, **kwargs)

    def counting_into(made, t, **kwargs):  # those of te_mx
        sent.append(t.nbytes)
        return into(made, t, **kwargs)

    collectives.all_gather_tensor, dist.all_gather_into_tensor = counting, counting_into
    try:
        yield sent
    finally:
        collectives.all_gather_tensor, dist.all_gather_into_tensor = gather, into


def passed(layer, x, grad, *args, recipe=None, **given):
    """y, and the gradients of x and of parameters, with those that the trainer sums."""
    x = x.clone().requires_grad_()
    with te_mx.autocast(recipe=recipe):
        y = layer(x, *args, **given)
    y.backward(grad)
    if layer.fuse_wgrad_accumulation:
        layer.backward_dw()
    found = {"y": y.detach(), "dx": x.grad}
    for name, p in layer.named_parameters():
        found[name] = getattr(p, "main_grad", p.grad)
        if getattr(p, "sequence_parallel", False):
            found[name] = found[name].clone()
            dist.all_reduce(found[name])
    return found


def equal(found, expected, normed=False):
    """The same bits; behind a normalization, whose gradients are summed in another order, those of
    fp32 sums."""
    for name, value in expected.items():
        if normed and (name == "dx" or name.startswith("layer_norm")):
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)
        else:
            assert torch.equal(found[name], value), name


def pair(family, given, n=N, dtype=torch.float32):
    """A layer that gathers values, and one that gathers codes."""
    one = built(
        family, K, n, dtype=dtype, sequence_parallel=True, tp_group=dist.group.WORLD, **given
    )
    other = copy.deepcopy(one)
    other.set_tensor_parallel_group(dist.group.WORLD)
    assert quantized_input_gather(other) == 1
    return one, other


def case_inputs_gathered_as_codes():
    recipe = te_mx.recipe
    four = recipe.NVFP4BlockScaling(disable_stochastic_rounding=True)  # gathers values
    recipes = (recipe.MXFP4BlockScaling(), recipe.Float8BlockScaling(), four)
    n = 256
    for family, kind, given in SHARING:
        for tokens, recipe in ((64, None), (24, None), *((256, one) for one in recipes)):
            one, other = pair(family, given, n)
            x = mine(of(tokens, 2, K), 0).float()
            grad = of(tokens // 2 if kind == "both" else tokens, 2, K if kind == "both" else n // 2)
            expected, found = (passed(m, x, grad.float(), recipe=recipe) for m in (one, other))
            equal(found, expected, normed=family is not te_mx.Linear)


def case_bytes_of_gathered_inputs():
    tokens = 128
    for family, _, given in SHARING:
        one, other = pair(family, given, dtype=torch.bfloat16)
        x, sent, kept = mine(of(tokens, K), 0), [], []
        for layer in (one, other):
            its = x.clone().requires_grad_()
            with counted() as nbytes, te_mx.record_saved(layer), te_mx.autocast():
                y = layer(its)
            sent.append(sum(nbytes))
            kept.append(te_mx.audit(layer, memory=True).memory.total)
            if layer is other:
                with counted() as nbytes:
                    y.backward(torch.ones_like(y))
                codes = [n for n in nbytes if n in (x.numel(), x.numel() // 32)]
                assert sum(codes) == sent[-1], nbytes
        assert sent[0] == 2 * x.numel() and sent[1] == x.numel() * 33 // 32
        if family is te_mx.Linear:
            assert kept[0] - kept[1] == x.numel() * 33 // 32


def case_gathered_inputs_and_knobs():
    """main_grad, delayed gradients, kept inputs, micro-batches, frozen weights and codes alone."""
    tokens = 64
    for family, kind, given in SHARING:
        knobs = dict(KNOBS)
        if family is te_mx.Linear:
            knobs["save_original_input"] = True
        one, other = pair(family, given | knobs)
        for layer in (one, other):
            for key in layer._weight_keys:
                p = getattr(layer, key)
                p.main_grad = torch.zeros_like(p)
        x = mine(of(tokens, K), 0).float()
        grad = of(tokens // 2 if kind == "both" else tokens, K if kind == "both" else N // 2)
        expected, found = (passed(m, x, grad.float(), True) for m in (one, other))
        equal(found, expected, normed=family is not te_mx.Linear)
        for how in ({}, {"drop_master": True}, {"drop_master": True, "activations": "bf16"}):
            one, other = pair(family, given)
            for layer in (one, other):
                te_mx.freeze_weights(layer, **how)
            with torch.no_grad(), te_mx.autocast():
                assert torch.equal(other(x), one(x)), (family, how)
            for rows in (x[:2], x):
                x_one, x_other = (rows.clone().requires_grad_() for _ in range(2))
                for layer, its in ((one, x_one), (other, x_other)):
                    with te_mx.autocast():
                        layer(its).sum().backward()
                torch.testing.assert_close(x_other.grad, x_one.grad, rtol=1e-4, atol=1e-5)


def case_gathered_inputs_compiled():
    for family, kind, given in SHARING:
        backend = "aot_eager" if kind == "both" else "eager"  # the graph of "both" has all of it
        compiles(pair(family, given)[1], mine(of(64, K), 0).float(), backend)


def case_dtensors_gathered_as_codes():
    for family in (te_mx.Linear, te_mx.LayerNormLinear, te_mx.LayerNormMLP):
        out = Shard(0) if family is te_mx.LayerNormMLP else None
        results = []
        for codes in (False, True):
            layer = built(family, K, N, dtype=torch.float32)
            style = ModuleParallel(input_layouts=Shard(0), output_layouts=out)
            parallelize_module(layer, mesh(), style)
            if codes:
                quantized_input_gather(layer)
            x = mine(of(64, K), 0).float().requires_grad_()
            with counted() as nbytes, te_mx.autocast():
                y = layer(x)
            assert not codes or sum(nbytes) == x.numel() * 33 // 32
            y.backward(mine(of(64, K), 0).float() if out else mine(of(64, N), 1).float())
            grads = {n: p.grad.full_tensor() for n, p in layer.named_parameters()}
            results.append({"y": y.detach(), "dx": x.grad, **grads})
        equal(results[1], results[0], normed=family is not te_mx.Linear)


def case_gathered_inputs_that_stay_values():
    """Outside of regions, tokens that do not divide, and tokens along another dimension."""
    for layouts, shape, region in (
        (Shard(0), (64, K), False), (Shard(0), (63, K), True), (Shard(1), (2, 64, K), True),
        (Replicate(), (64, K), True),
    ):  # fmt: skip
        results = []
        for codes in (False, True):
            layer = built(te_mx.Linear, K, N, dtype=torch.float32)
            style = ModuleParallel(input_layouts=Replicate(), output_layouts=Replicate())
            parallelize_module(layer, mesh(), style)
            if codes:
                quantized_input_gather(layer)
            x = torch.distributed.tensor.distribute_tensor(of(*shape).float(), mesh(), [layouts])
            with te_mx.autocast(enabled=region):
                results.append(layer(x))
        assert torch.equal(*results)


def case_gathered_inputs_refused():
    refused(ValueError, "no te_mx.Linear", lambda: quantized_input_gather(nn.Linear(32, 32)))
    refused(TypeError, "model must be an nn.Module", lambda: quantized_input_gather("model"))
    layer = te_mx.Linear(32, 32)
    refused(TypeError, "enabled", lambda: quantized_input_gather(layer, enabled=1))
    assert quantized_input_gather(layer, enabled=False) == 1 and not layer._gathers_inputs

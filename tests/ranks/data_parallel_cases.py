"""Data parallelism on two ranks against the mean of two passes in one process: fully_shard, alone
and with gathered codes, HSDP, DistributedDataParallel, and both kinds of parallelism together.
"""

from __future__ import annotations

import contextlib
import copy

import torch
import torch.distributed as dist
from tensor_parallel_cases import DEVICE, PLAN, K, M, N, built, full, mlp, of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

import te_mx
from te_mx.distributed import quantized_all_gather

RECIPE = te_mx.recipe.MXFP8BlockScaling(one_copy_weights=True)
FP32 = {"dtype": torch.float32}


class Model(nn.Module):
    """One layer of a family between plain ones."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        splits = ([M // 2, 0, M // 2],) if isinstance(self.layer, te_mx.GroupedLinear) else ()
        return self.layer(x, *splits)


FAMILIES = {
    "Linear": lambda **given: built(te_mx.Linear, K, N, **given),
    "LayerNormLinear": lambda **given: built(te_mx.LayerNormLinear, K, N, **given),
    "LayerNormMLP": lambda **given: built(te_mx.LayerNormMLP, K, N, **given),
    "GroupedLinear": lambda **given: built(
        te_mx.GroupedLinear, 4, K, N, single_grouped_weight=True, **given
    ),
}


def splits_of(layer):
    return ([10, 0, 14, 24],) if isinstance(layer, te_mx.GroupedLinear) else ()


def step(layer, rank, recipe=None, seed=0):
    """A pass on the data of a rank."""
    x = of(M, K, seed=10 * seed + rank)
    with te_mx.autocast(recipe=recipe):
        y = layer(x, *splits_of(getattr(layer, "module", layer)))
    y.backward(
        torch.sin(torch.arange(y.numel(), device=DEVICE)).view_as(y).to(y.dtype) * (rank + 1)
    )
    return y.detach()


def each_gradients(layer, recipe=None, seed=0):
    """The gradients of each rank."""
    made = []
    for rank in range(2):
        one = copy.deepcopy(layer)
        step(one, rank, recipe, seed)
        made.append({name: p.grad for name, p in one.named_parameters()})
    return made


def mean_gradients(layer, recipe=None, seeds=(0,)):
    """The sum over micro-batches of the mean over the ranks."""
    total = None
    for seed in seeds:
        first, second = each_gradients(layer, recipe, seed)
        mean = {name: g / 2 + second[name] / 2 for name, g in first.items()}
        total = mean if total is None else {n: g + mean[n] for n, g in total.items()}
    return total


def equal(found, expected):
    wrong = {
        n: ((full(found[n]).float() - e.float()).norm() / e.float().norm()).item()
        for n, e in expected.items() if not torch.equal(full(found[n]), e)
    }  # fmt: skip
    assert not wrong, f"differ, by relative norms: {wrong}"


def sharded(layer, hybrid=False):
    shape, names = ((1, 2), ("replicate", "shard")) if hybrid else ((2,), ("shard",))
    return fully_shard(layer, mesh=init_device_mesh(DEVICE, shape, mesh_dim_names=names))


def gradients(layer):
    return {
        name: getattr(p, "main_grad", p.grad) for name, p in layer.named_parameters()
    }  # fmt: skip


def refused(kind, said, call):
    try:
        call()
    except kind as error:
        assert said in str(error), error
    else:
        raise AssertionError(f"not refused: {said}")


def case_fsdp2():
    for family in FAMILIES.values():
        for hybrid in (False, True):
            layer = family(**FP32)
            expected = mean_gradients(layer)
            sharded(layer, hybrid)
            step(layer, dist.get_rank())
            equal(gradients(layer), expected)


def case_convert_after_sharding():
    """Layers inside of what was sharded; a layer that itself was is said to be another class."""
    before, after = fully_shard(mlp()), fully_shard(mlp(False))
    assert te_mx.convert_model(after).count("converted") == 2
    assert quantized_all_gather(after) == quantized_all_gather(before) == 2
    for model in (before, after):
        step(model, dist.get_rank(), RECIPE)
    for ours, theirs in zip(after.parameters(), before.parameters(), strict=True):
        assert torch.equal(full(ours.grad), full(theirs.grad))
    alone = mlp(False)
    fully_shard(alone[1])
    report = te_mx.convert_model(alone)
    assert "FSDPLinear" in report.skipped["1"] and report.count("converted") == 1


def case_freeze_after_sharding():
    for quantized in (False, True):
        whole, model = mlp(), mlp()
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer)
        fully_shard(model)
        if quantized:
            assert quantized_all_gather(model) == 2
        assert te_mx.freeze_weights(model) == 2
        refused(
            ValueError,
            "drop masters before sharding",
            lambda m=model: te_mx.freeze_weights(m, True),
        )
        with torch.no_grad(), te_mx.autocast():
            for _ in range(2):
                assert torch.equal(model(of(M, K)), whole(of(M, K)))
        assert te_mx.unfreeze_weights(model) == 2
        assert all(p.requires_grad for p in model.parameters())
        assert isinstance(model, FSDPModule)


KNOBS = ((True, False), (False, True), (True, True))


def routed(family, fuse, delay, **given):
    return FAMILIES[family](
        fuse_wgrad_accumulation=fuse, delay_wgrad_compute=delay, **FP32, **given
    )


def give_main_grads(layer, fuse):
    for p in layer.parameters() if fuse else ():
        if p.dim() > 1 and not (p.dim() == 2 and p.shape[0] == 4):  # weights, not grouped biases
            p.main_grad = torch.zeros_like(p, dtype=torch.float32)


def case_main_grad_and_delayed_under_fsdp2():
    for family in FAMILIES:
        expected = mean_gradients(FAMILIES[family](**FP32), RECIPE, (0, 1))
        for fuse, delay in KNOBS:
            for hybrid, quantized in ((False, False), (True, False), (False, True)):
                layer = routed(family, fuse, delay)
                sharded(layer, hybrid)
                if quantized:
                    quantized_all_gather(layer)
                give_main_grads(layer, fuse)
                for seed in (0, 1):
                    step(layer, dist.get_rank(), RECIPE, seed)
                    if delay:
                        layer.backward_dw()
                equal(gradients(layer), expected)


def case_divide_factors_of_fsdp2():
    """set_gradient_divide_factor holds for main_grad and delayed gradients as for biases and norms,
    whenever it is set; gloo has no operation that multiplies, so sums are asked for."""
    for family in ("LayerNormMLP", "GroupedLinear"):
        mean = mean_gradients(FAMILIES[family](**FP32))
        for fuse, delay in ((False, False), *KNOBS):
            for factor, hybrid in ((1.0, False), (8.0, False), (1.0, True), (8.0, True)):
                layer = routed(family, fuse, delay)
                sharded(layer, hybrid)
                give_main_grads(layer, fuse)
                layer.set_force_sum_reduction_for_comms(True)
                for given in (4.0, factor):
                    layer.set_gradient_divide_factor(given)
                    step(layer, dist.get_rank())
                    if delay:
                        layer.backward_dw()
                sums = {name: g * 2 for name, g in mean.items()}
                equal(gradients(layer), {n: g / 4 + g / factor for n, g in sums.items()})
        layer = routed(family, True, False)
        sharded(layer)
        give_main_grads(layer, True)
        layer.set_force_sum_reduction_for_comms(True)  # the mean, by another operation
        step(layer, dist.get_rank())
        equal(gradients(layer), mean)


def case_hooks_of_fsdp2_are_not_passed_by():
    layer = routed("LayerNormLinear", False, True)
    sharded(layer)
    layer.set_all_reduce_hook(lambda grads: None)
    refused(NotImplementedError, "set_all_reduce_hook", lambda: step(layer, dist.get_rank()))


def case_main_grad_and_delayed_under_replicate():
    """torch's replicate, which is FSDP2 without shards."""
    from torch.distributed._composable.replicate_with_fsdp import replicate

    expected = mean_gradients(FAMILIES["LayerNormMLP"](**FP32))
    for fuse, delay in ((False, False), *KNOBS):
        layer = routed("LayerNormMLP", fuse, delay)
        replicate(layer, mesh=init_device_mesh(DEVICE, (2,)))
        give_main_grads(layer, fuse)
        step(layer, dist.get_rank())
        if delay:
            layer.backward_dw()
        equal(gradients(layer), expected)
        refused(ValueError, "fully_shard sharded", lambda m=layer: quantized_all_gather(m))


def case_main_grad_and_delayed_under_ddp():
    for family in FAMILIES:
        plain = FAMILIES[family](**FP32)
        expected = mean_gradients(plain, None, (0, 1))
        before, first_two = mean_gradients(plain), each_gradients(plain, None, 1)
        # What is there after the second gradient was added is averaged.
        averaged = {n: sum((before[n] + g[n]) / 2 for g in first_two) for n in before}
        for fuse, delay in KNOBS:
            for accumulate in (False, True):
                layer = routed(family, fuse, delay)
                give_main_grads(layer, fuse)
                ddp = DistributedDataParallel(layer)
                for seed in (0, 1):
                    first = accumulate and seed == 0
                    with ddp.no_sync() if first else contextlib.nullcontext():
                        step(ddp, dist.get_rank(), None, seed)
                        if delay:
                            layer.backward_dw()
                for name, grad in gradients(layer).items():
                    torch.testing.assert_close(grad, expected[name], rtol=2e-6, atol=2e-5)
                    if not accumulate and name in layer._weight_keys:
                        assert torch.equal(grad, averaged[name]), name


def case_fsdp2_with_tensor_parallel():
    """The second dimension of the mesh has one rank, each in turn."""
    for shape in ((1, 2), (2, 1)):
        for fuse in (False, True):
            mesh = init_device_mesh(DEVICE, shape, mesh_dim_names=("dp", "tp"))
            plain, model = mlp(), mlp()
            if shape == (1, 2):
                parallelize_module(plain, init_device_mesh(DEVICE, (2,)), PLAN)
            else:
                fully_shard(plain)
            parallelize_module(model, mesh["tp"], PLAN)
            if fuse:
                for layer in (model[1], model[3]):
                    layer.fuse_wgrad_accumulation = True
            fully_shard(model, mesh=mesh["dp"])
            if fuse:
                for layer in (model[1], model[3]):
                    layer.weight.main_grad = torch.zeros_like(layer.weight, dtype=torch.float32)
            rank = 0 if shape == (1, 2) else dist.get_rank()
            for one in (plain, model):
                step(one, rank)
            for name, p in plain.named_parameters():
                q = dict(model.named_parameters())[name]
                found = getattr(q, "main_grad", q.grad)
                if fuse and hasattr(q, "main_grad"):
                    torch.testing.assert_close(
                        full(found).to(p.dtype), full(p.grad), rtol=1e-2, atol=1e-1
                    )
                else:
                    assert torch.equal(full(found), full(p.grad)), name

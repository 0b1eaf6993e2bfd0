"""Two kinds of parallelism at once on a mesh of 2 x 2: four ranks against the mean, over the data
of each, of what one process computes."""

from __future__ import annotations

import copy
import itertools

import halves
import torch
import torch.distributed as dist
from data_parallel_cases import FAMILIES, FP32, equal, gradients, refused, splits_of, step
from group_cases import KINDS
from tensor_parallel_cases import DEVICE, K, M, N, built, full, of, wholes
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import parallelize_module

import te_mx
from te_mx.distributed import ModuleParallel, quantized_all_gather

RECIPE = te_mx.recipe.MXFP8BlockScaling(one_copy_weights=True)
KNOBS = ((False, False), (True, False), (False, True), (True, True))  # main_grad, delayed
LAYERS = {
    **FAMILIES,
    "gated": lambda **given: built(te_mx.LayerNormMLP, K, N, activation="swiglu", **given),
}


def mesh_of(*names):
    return init_device_mesh(DEVICE, (2, 2), mesh_dim_names=names)


def layer_of(family, fuse=False, delay=False):
    knobs = {"fuse_wgrad_accumulation": fuse, "delay_wgrad_compute": delay}
    return LAYERS[family](**FP32, **knobs)


def is_weight(name):
    return "weight" in name and "norm" not in name


def give_main_grads(module):
    for name, p in module.named_parameters():
        if is_weight(name):
            p.main_grad = torch.zeros_like(p, dtype=torch.float32)


def data(rank, width=K):
    return of(M, width, seed=rank)


def grad_of(y, rank):
    made = torch.sin(torch.arange(y.numel(), device=DEVICE)).view_as(y)
    return made.to(y.dtype) * (rank + 1)


def passed(layer, rank, recipe=None):
    """A pass of a layer that ranks share on the data of one of them."""
    with te_mx.autocast(recipe=recipe):
        y = full(layer(data(rank), *splits_of(layer)))
    y.backward(grad_of(y, rank))
    if layer.delay_wgrad_compute:
        layer.backward_dw()


def whole_gradients(layer, recipe=None):
    """Those of each rank of data parallelism, with two ranks for each layer, halved."""
    kind = "both" if isinstance(layer, te_mx.LayerNormMLP) else "column"
    made = []
    for rank in range(2):
        y = torch.empty(M, K if kind == "both" else N, device=DEVICE, dtype=torch.bfloat16)
        with te_mx.autocast(recipe=recipe):
            one = halves.run(
                copy.deepcopy(layer), kind, data(rank), grad_of(y, rank), *splits_of(layer)
            )
        made.append({name: g / 2 for name, g in one.items() if name not in ("y", "dx")})
    return {name: g + made[1][name] for name, g in made[0].items()}


def shared(layer, codes):
    """Over the ranks of tensor parallelism, then over those of data parallelism."""
    mesh = mesh_of("dp", "tp")
    style = ModuleParallel(use_local_output=False)
    parallelize_module(layer, mesh["tp"], style)
    fully_shard(layer, mesh=mesh["dp"])
    if codes:
        quantized_all_gather(layer, recipe=RECIPE)
    return mesh


def case_fsdp2_with_tensor_parallel():
    """Values and codes of weights, main_grad and delayed gradients, of every family."""
    for family, codes in itertools.product(LAYERS, (False, True)):
        recipe = RECIPE if codes else None
        expected = whole_gradients(layer_of(family), recipe)
        for fuse, delay in KNOBS:
            layer = layer_of(family, fuse, delay)
            mesh = shared(layer, codes)
            if fuse:
                give_main_grads(layer)
            passed(layer, mesh["dp"].get_local_rank(), recipe)
            equal(wholes(gradients(layer)), expected)


def case_hsdp():
    """Two copies of two shards: the mean of four passes, but for the order of the sum."""
    for family, codes in itertools.product(FAMILIES, (False, True)):
        recipe = RECIPE if codes else None
        each = []
        for rank in range(4):
            one = layer_of(family)
            step(one, rank, recipe)
            each.append({name: p.grad / 4 for name, p in one.named_parameters()})
        expected = {n: (each[0][n] + each[1][n]) + (each[2][n] + each[3][n]) for n in each[0]}
        for fuse, delay in KNOBS:
            layer = layer_of(family, fuse, delay)
            fully_shard(layer, mesh=mesh_of("replicate", "shard"))
            if codes:
                quantized_all_gather(layer, recipe=RECIPE)
            if fuse:
                give_main_grads(layer)
            step(layer, dist.get_rank(), recipe)
            if delay:
                layer.backward_dw()
            for name, grad in gradients(layer).items():
                torch.testing.assert_close(full(grad), expected[name], rtol=1e-6, atol=1e-6)


def case_groups_under_fsdp2():
    """Layers of a process group, with its rule of sums, whose weights FSDP2 shards over the other
    dimension, gathered as values or as codes."""
    mesh = mesh_of("dp", "tp")
    group, tp, dp = mesh["tp"].get_group(), mesh["tp"].get_local_rank(), mesh["dp"].get_local_rank()
    for (family, kind, given), sequence, codes in itertools.product(
        KINDS, (False, True), (False, True)
    ):
        how = {name: value for name, value in given.items() if "parallel" not in name}
        whole = built(family, K, N, **FP32, **how)
        layer = built(
            family, K, N, sequence_parallel=sequence, tp_group=group, **FP32, **given
        )  # fmt: skip
        with torch.no_grad():
            for name, value in whole.named_parameters():
                getattr(layer, name).copy_(halves.slices(name, value, whole, kind)[tp])
        marks = {name: dict(vars(p)) for name, p in layer.named_parameters()}
        fully_shard(layer, mesh=mesh["dp"])
        for name, p in layer.named_parameters():
            assert marks[name].items() <= vars(p).items(), (name, marks[name], vars(p))
        if codes:
            assert quantized_all_gather(layer, recipe=RECIPE) == len(layer._weight_keys)
        expected = []
        for rank in range(2):
            y = torch.empty(M, K if kind == "both" else N, device=DEVICE, dtype=torch.bfloat16)
            with te_mx.autocast(recipe=RECIPE):
                expected.append(
                    halves.run(copy.deepcopy(whole), kind, data(rank), grad_of(y, rank))
                )
        x = data(dp)
        x = x.chunk(2, -1)[tp] if kind == "row" else x.chunk(2)[tp] if sequence else x
        with te_mx.autocast(recipe=RECIPE):
            y = layer(x.contiguous())
        wanted, grad = expected[dp]["y"], grad_of(expected[dp]["y"], dp)
        cut = -1 if kind == "column" else 0
        if kind == "column" or sequence:
            wanted, grad = (t.chunk(2, cut)[tp].contiguous() for t in (wanted, grad))
        assert torch.equal(y, wanted)
        y.backward(grad)
        found, mine = {}, {}
        for name, p in layer.named_parameters():
            if getattr(p, "sequence_parallel", False):
                dist.all_reduce(p.grad.to_local(), group=group)  # what the trainer does
            found[name] = p.grad
            mean = expected[0][name] / 2 + expected[1][name] / 2
            mine[name] = halves.slices(name, mean, whole, kind)[tp]
        if sequence:
            for name, value in mine.items():
                torch.testing.assert_close(full(found[name]), value, rtol=1e-5, atol=1e-4)
        else:
            equal(found, mine)


def case_pipeline_with_fsdp2():
    """Two stages, each sharded over two ranks, with micro-batches: the mean of the sums."""
    mesh = mesh_of("pp", "dp")
    stage_at, dp = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()

    def layers(fuse=False, delay=False):
        torch.manual_seed(5)
        given = {"dtype": torch.float32, "device": DEVICE}
        knobs = {"fuse_wgrad_accumulation": fuse, "delay_wgrad_compute": delay}
        return [te_mx.LayerNormLinear(K, K, **given, **knobs) for _ in range(2)]

    def loss_of(y, target):
        return (y - target).float().square().mean() / 2

    target = torch.zeros(M, K, device=DEVICE, dtype=torch.bfloat16)
    each = []
    for rank in range(2):
        made = layers()
        for part, wanted in zip(data(rank).chunk(2), target.chunk(2), strict=True):
            with te_mx.autocast():
                y = made[1](made[0](part))
            loss_of(y, wanted).backward()
        each.append({name: p.grad / 2 for name, p in made[stage_at].named_parameters()})
    expected = {name: g + each[1][name] for name, g in each[0].items()}
    for fuse, delay in KNOBS:
        layer = layers(fuse, delay)[stage_at]
        fully_shard(layer, mesh=mesh["dp"])
        if fuse:
            give_main_grads(layer)
        part = torch.empty(M // 2, K, device=DEVICE, dtype=torch.bfloat16)
        stage = PipelineStage(
            layer, stage_at, 2, torch.device(DEVICE), group=mesh["pp"].get_group(),
            input_args=part.requires_grad_(stage_at == 1),
            output_args=torch.empty_like(part).requires_grad_(),
        )  # fmt: skip
        schedule = Schedule1F1B(stage, 2, loss_fn=loss_of, scale_grads=False)
        with te_mx.autocast():
            schedule.step(data(dp)) if stage_at == 0 else schedule.step(target=target, losses=[])
        for _ in range(2 if delay else 0):
            layer.backward_dw()
        for name, grad in gradients(layer).items():
            # The mean of each micro-batch, or of their sum.
            torch.testing.assert_close(full(grad), expected[name], rtol=1e-5, atol=1e-6)


def case_expert_parallel_with_data_parallel():
    """Two ranks have two of four experts each, two pairs of them have other tokens."""
    mesh, splits = mesh_of("dp", "ep"), [10, 14, 0, 24]
    dp, ep = mesh["dp"].get_local_rank(), mesh["ep"].get_local_rank()
    whole = layer_of("GroupedLinear")
    each = []
    for rank in range(2):
        one = copy.deepcopy(whole)
        with te_mx.autocast(recipe=RECIPE):
            y = one(data(rank), splits)
        y.backward(grad_of(y, rank))
        each.append({name: p.grad / 2 for name, p in one.named_parameters()})
    expected = {name: g + each[1][name] for name, g in each[0].items()}
    rows = slice(0, 24) if ep == 0 else slice(24, 48)
    for codes, (fuse, delay) in itertools.product((False, True), KNOBS):
        layer = layer_of("GroupedLinear", fuse, delay)
        parallelize_module(layer, mesh["ep"], ModuleParallel("experts"))
        fully_shard(layer, mesh=mesh["dp"])
        if codes:
            quantized_all_gather(layer, recipe=RECIPE)
        if fuse:
            give_main_grads(layer)
        with te_mx.autocast(recipe=RECIPE):
            y = layer(data(dp)[rows].clone(), splits[2 * ep :][:2])
        grad = torch.empty(M, N, device=DEVICE, dtype=y.dtype)
        y.backward(grad_of(grad, dp)[rows].clone())
        if delay:
            layer.backward_dw()
        equal(gradients(layer), expected)


def case_a_rank_without_experts():
    """Five experts on four ranks are 2, 2, 1 and 0: it has no rows, and gradients of no size."""
    for fuse, delay in KNOBS:
        for recipe in (None, RECIPE):
            knobs = {"fuse_wgrad_accumulation": fuse, "delay_wgrad_compute": delay}
            whole = built(te_mx.GroupedLinear, 5, K, N, single_grouped_weight=True, **FP32)
            layer = built(te_mx.GroupedLinear, 5, K, N, single_grouped_weight=True, **FP32, **knobs)
            parallelize_module(layer, init_device_mesh(DEVICE, (4,)), ModuleParallel("experts"))
            if fuse:
                give_main_grads(layer)
            splits, x = [8, 4, 12, 0, 24], data(0).to(torch.bfloat16 if recipe else torch.float32)
            mine = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
            rows = slice(sum(splits[: mine.start]), sum(splits[: mine.stop]))
            x_mine = x[rows].clone().requires_grad_()
            region = te_mx.autocast(enabled=recipe is not None, recipe=recipe)
            with region:
                y, made = whole(x, splits), layer(x_mine, splits[mine])
            assert torch.equal(made, y[rows])
            y.backward(grad_of(y, 0))
            made.backward(grad_of(y, 0)[rows].clone())
            if delay:
                layer.backward_dw()
            assert x_mine.grad.shape == x_mine.shape
            equal(gradients(layer), gradients(whole))


def case_widths_that_do_not_divide():
    """In high precision any inner width runs, 6 on four ranks too; regions refuse it by name."""
    for activation, width in itertools.product(("gelu", "swiglu"), (250, 6)):
        whole, layer = (
            built(te_mx.LayerNormMLP, K, width, activation=activation, **FP32) for _ in range(2)
        )
        parallelize_module(layer, init_device_mesh(DEVICE, (4,)), ModuleParallel())
        for one in (whole, layer):
            one(data(0).float()).square().sum().backward()
        found = wholes(gradients(layer))
        for name, p in whole.named_parameters():
            torch.testing.assert_close(full(found[name]), p.grad, rtol=1e-3, atol=1e-2)
        with te_mx.autocast():
            said = f"ffn_hidden_size={width}"
            refused(ValueError, said, lambda one=layer: one(data(0)))


def case_marks_of_parameters():
    """What trainers read of parameters is there when others take their places."""
    mesh = init_device_mesh(DEVICE, (4,))
    norm = te_mx.pytorch.RMSNorm(K, sequence_parallel=True, device=DEVICE)
    delayed, shared = (layer_of("Linear", delay=True) for _ in range(2))
    for module in (norm, delayed):
        fully_shard(module, mesh=mesh)
    parallelize_module(shared, mesh, ModuleParallel())
    assert norm.weight.sequence_parallel is True
    assert all(p.skip_backward_post_hook for m in (delayed, shared) for p in m.parameters())

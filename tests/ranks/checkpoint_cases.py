"""torch.distributed.checkpoint and pipeline schedules with te_mx modules on two ranks."""

from __future__ import annotations

import copy
import itertools
import tempfile
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from data_parallel_cases import FP32, equal, mean_gradients, refused, step
from tensor_parallel_cases import DEVICE, PLAN, K, M, N, built, full, mesh, mlp, of, wholes
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

import te_mx
from te_mx.distributed import ModuleParallel, join_halves, quantized_all_gather, split_halves


def folder():
    """The same new folder on both ranks."""
    made = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(made)
    return Path(made[0])


def model(seed=0, sharded=True, quantized=False):
    made = mlp()
    with torch.no_grad():
        for i, p in enumerate(made.parameters()):
            p.copy_(of(*p.shape, seed=100 * seed + i))
    if sharded:
        for layer in made:
            if isinstance(layer, nn.Linear):
                fully_shard(layer)
        fully_shard(made)
        if quantized:
            quantized_all_gather(made)
    return made


def trained(made, rank=None):
    """After a step on the data of this rank, or of another one."""
    optimizer = torch.optim.AdamW(made.parameters(), lr=0.01)
    step(made, dist.get_rank() if rank is None else rank)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def parameters(made):
    return wholes({name: full(p.detach()) for name, p in made.named_parameters()})


def same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def case_save_and_load():
    """Training goes on where it was, weights gathered in bf16 or as codes, saved now or later."""
    for quantized in (False, True):
        for later in (False, True):
            one = model(quantized=quantized)
            optimizer, path = trained(one), folder()
            state = dict(zip(("model", "optim"), get_state_dict(one, optimizer), strict=True))
            if later:
                dcp.async_save(state, checkpoint_id=path).result()
            else:
                dcp.save(state, checkpoint_id=path)
            other = model(seed=1, quantized=quantized)
            its = torch.optim.AdamW(other.parameters(), lr=0.01)
            state = dict(zip(("model", "optim"), get_state_dict(other, its), strict=True))
            dcp.load(state, checkpoint_id=path)
            set_state_dict(
                other, its, model_state_dict=state["model"], optim_state_dict=state["optim"]
            )
            same(parameters(one), parameters(other))
            for each, opt in ((one, optimizer), (other, its)):
                step(each, dist.get_rank(), seed=1)
                opt.step()
            same(parameters(one), parameters(other))


def case_other_numbers_of_ranks():
    """From shards of two ranks into a whole model, from there into shards by rows, by columns."""
    one, path = model(), folder()
    trained(one)
    dcp.save(get_model_state_dict(one), checkpoint_id=path / "two")
    whole = model(seed=1, sharded=False)
    state = get_model_state_dict(whole)
    dcp.load(state, checkpoint_id=path / "two")
    set_model_state_dict(whole, state)
    same(parameters(whole), parameters(one))
    dcp.save(get_model_state_dict(whole), checkpoint_id=path / "one")
    again = model(seed=2)
    columns = parallelize_module(model(seed=3, sharded=False), mesh(), PLAN)
    for target in (again, columns):
        state = get_model_state_dict(target)
        dcp.load(state, checkpoint_id=path / "one")
        set_model_state_dict(target, state)
        same(parameters(target), parameters(one))


def moments(optimizer, model):
    """Those of an Adam, by the names of parameters, with those of a gated fc1 in one."""
    names = {p: name for name, p in model.named_parameters()}
    return wholes({names[p]: full(state["exp_avg"]) for p, state in optimizer.state.items()})


def gated(seed):
    made = nn.Sequential(built(te_mx.LayerNormMLP, K, N, activation="swiglu", **FP32))
    with torch.no_grad():
        for i, p in enumerate(made.parameters()):
            p.copy_(of(*p.shape, seed=100 * seed + i))
    return made


def case_gated_fc1():
    """Weights and moments of a gated LayerNormMLP from ranks that share it into one process and
    back, sharded and by whole tensors, from every rank or from the first one."""

    def shared(how, seed):
        made = gated(seed)
        if how == "whole":
            return made
        if how == "fsdp":
            return fully_shard(made, mesh=mesh())
        both = init_device_mesh(DEVICE, (1, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(made, both["tp"], {"0": ModuleParallel()})
        return fully_shard(made, mesh=both["dp"]) if how == "2d" else made

    ways = ("whole", "fsdp", "tp", "2d")
    for how, (options, targets) in itertools.product(ways, (
        (StateDictOptions(), ways),
        # What is written and what is read then depend on one way each.
        (StateDictOptions(full_state_dict=True), None),
        (StateDictOptions(flatten_optimizer_state_dict=True), None),
    )):  # fmt: skip
        one, path = shared(how, 0), folder()
        assert list(one.state_dict()) == list(gated(0).state_dict())
        optimizer = trained(one, 0)
        model, optim = get_state_dict(one, optimizer, options=options)
        dcp.save({"model": model, "optim": join_halves(optim)}, checkpoint_id=path)
        for target in targets or [ways[(ways.index(how) + 1) % 4]]:
            other = shared(target, 1)
            its = trained(other, 0)
            model, optim = get_state_dict(other, its, options=options)
            loaded = {"model": model, "optim": join_halves(optim)}
            dcp.load(loaded, checkpoint_id=path)
            set_state_dict(
                other, its, model_state_dict=loaded["model"],
                optim_state_dict=split_halves(other, loaded["optim"]), options=options,
            )  # fmt: skip
            same(parameters(other), parameters(one))
            same(moments(its, other), moments(optimizer, one))
    for how, broadcast, without in itertools.product(ways[1:], *[(False, True)] * 2):
        target, whole = shared(how, 2), gated(3)
        expected = parameters(whole)
        state = whole.state_dict()
        if without:  # as a part of a checkpoint
            expected["0.fc1_weight"] = parameters(target)["0.fc1_weight"]
            del state["0.fc1_weight"]
        given = {"broadcast_from_rank0": broadcast, "strict": not without}
        options = StateDictOptions(full_state_dict=True, **given)
        state = {} if broadcast and dist.get_rank() else state
        set_model_state_dict(target, state, options=options)
        same(parameters(target), expected)


def case_into_a_frozen_model():
    """A training checkpoint into a model that is frozen with its masters, which notices; one that
    has codes only says what to do. At precision "invariant", where frozen layers have the bits of
    others: few rows add up in another order else, on Hopper."""
    one, path = model(), folder()
    recipe = te_mx.recipe.MXFP8BlockScaling(precision="invariant")
    trained(one)
    dcp.save(get_model_state_dict(one), checkpoint_id=path)
    frozen, plain = model(seed=1, sharded=False), model(seed=1, sharded=False)
    te_mx.freeze_weights(frozen, recipe=recipe)
    for target in (frozen, plain):
        with torch.no_grad(), te_mx.autocast(recipe=recipe):
            target(of(M, K))
        state = get_model_state_dict(target)
        dcp.load(state, checkpoint_id=path)
        set_model_state_dict(target, state)
    with torch.no_grad(), te_mx.autocast(recipe=recipe):
        assert torch.equal(frozen(of(M, K)), plain(of(M, K)))
    codes = model(seed=1, sharded=False)
    te_mx.freeze_weights(codes, drop_master=True)
    try:
        set_model_state_dict(codes, state, options=StateDictOptions(strict=False))
    except RuntimeError as error:
        assert "te_mx.unfreeze_weights(model, dequantize=True) before loading" in str(error), error
    else:
        raise AssertionError("values were loaded over codes")


def case_frozen_codes():
    """Codes without masters are saved and loaded as they are."""
    one, other, path = model(sharded=False), model(seed=1, sharded=False), folder()
    for each in (one, other):
        te_mx.freeze_weights(each, drop_master=True)
    dcp.save(get_model_state_dict(one), checkpoint_id=path)
    state = get_model_state_dict(other)
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(other, state)
    with torch.no_grad():
        assert torch.equal(one(of(M, K)), other(of(M, K)))


def case_pipelines():
    """Schedules of stages on two ranks against the same micro-batches in one process."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import (
        Schedule1F1B,
        ScheduleGPipe,
        ScheduleInterleaved1F1B,
        ScheduleInterleavedZeroBubble,
    )
    from torch.utils.checkpoint import checkpoint

    class Again(nn.Module):
        """Recomputed going back."""

        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return checkpoint(self.layer, x, use_reentrant=False)

    def loss_of(y, target):
        return (y - target).float().square().mean()

    rank, x = dist.get_rank(), of(M, K)
    target = torch.zeros_like(x)
    several = (ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble)
    if torch.__version__ < "2.13":  # refused: tests/autograd/test_pipeline_backward.py
        several = (ScheduleInterleaved1F1B,)
    for schedule in (ScheduleGPipe, Schedule1F1B, *several):
        for wrap in (nn.Identity, Again) if schedule is Schedule1F1B else (nn.Identity,):
            count = 4 if schedule in several else 2
            torch.manual_seed(1)
            kind = {"dtype": torch.bfloat16, "device": DEVICE}
            layers = [te_mx.LayerNormLinear(K, K, **kind) for _ in range(count)]
            expected = copy.deepcopy(layers)
            for part in x.chunk(4):
                with te_mx.autocast():
                    y = part
                    for layer in expected:
                        y = layer(y)
                (loss_of(y, torch.zeros_like(y)) / 4).backward()
            mine = range(rank, count, 2)
            stages = [
                PipelineStage(
                    wrap(layers[i]) if wrap is Again else layers[i], i, count, torch.device(DEVICE)
                ) for i in mine
            ]  # fmt: skip
            made = schedule(stages if count > 2 else stages[0], 4, loss_fn=loss_of)
            with te_mx.autocast():
                made.step(x) if rank == 0 else made.step(target=target, losses=[])
            for i in mine:
                for ours, theirs in zip(
                    layers[i].parameters(), expected[i].parameters(), strict=True
                ):
                    close = (ours.grad - theirs.grad).norm() / theirs.grad.norm()
                    assert torch.equal(ours.grad, theirs.grad), (schedule.__name__, i, close)


def case_zero_bubble_pipelines():
    """They go back through a layer twice; a gradient of a weight is counted once."""
    from torch.distributed.pipelining import PipelineStage, schedules
    from torch.distributed.pipelining._backward import stage_backward_input

    def loss_of(y, target):
        return (y - target).square().mean()

    def layers(fuse=False, delay=False):
        torch.manual_seed(1)
        given = {"fuse_wgrad_accumulation": fuse, "delay_wgrad_compute": delay, "device": DEVICE}
        families = (te_mx.LayerNormLinear, te_mx.Linear, te_mx.Linear)
        first = [family(K, K, **given) for family in families]
        return [*first, te_mx.LayerNormMLP(K, K, **given)]

    rank, x = dist.get_rank(), of(M, K).float()
    target, expected = torch.zeros_like(x), layers()
    if torch.__version__ < "2.13":  # refused by every rank, whose schedule would wait for another's
        for layer in layers(True, True):
            inp = x.clone().requires_grad_()
            with te_mx.autocast():
                y = layer(inp)
            part = partial(stage_backward_input, [y], [x], [inp], layer.parameters())
            refused(NotImplementedError, "needs PyTorch 2.13 or newer", part)
        return
    for part in x.chunk(4):
        with te_mx.autocast():
            y = part
            for layer in expected:
                y = layer(y)
        loss_of(y, torch.zeros_like(y)).backward()
    for name in ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"):
        for fuse, delay in ((True, False), (False, True), (True, True)):
            made = layers(fuse, delay)
            mine = (rank, rank + 2) if name.startswith("Inter") else (rank, 3 - rank)
            stages = []
            for i in mine:
                for p in made[i].parameters():
                    if fuse and p.ndim > 1:
                        p.main_grad = torch.zeros_like(p)
                part = torch.empty(M // 4, K, device=DEVICE, requires_grad=i > 0)
                out = torch.empty(M // 4, K, device=DEVICE, requires_grad=True)
                stages.append(
                    PipelineStage(
                        made[i], i, 4, torch.device(DEVICE), input_args=part, output_args=out
                    )
                )
            schedule = getattr(schedules, f"Schedule{name}")(
                stages, 4, loss_fn=loss_of, scale_grads=False
            )
            args = {"target": target, "losses": []} if 3 in mine else {}
            with te_mx.autocast():
                schedule.step(*([x] if 0 in mine else []), **args)
            for i in mine:
                for _ in range(4 if delay else 0):
                    made[i].backward_dw()
                for ours, theirs in zip(
                    made[i].parameters(), expected[i].parameters(), strict=True
                ):
                    got = ours.main_grad if fuse and ours.ndim > 1 else ours.grad
                    close = (got - theirs.grad).norm() / theirs.grad.norm()
                    assert close < 1e-6, (name, fuse, delay, i, close)


def case_parts_of_a_backward_pass_with_dtensors():
    """Only a whole pass is known to be for a weight that is a DTensor."""
    for given in ({"fuse_wgrad_accumulation": True}, {"delay_wgrad_compute": True}):
        layer = built(te_mx.Linear, K, N, **given)
        spread = parallelize_module(layer, mesh(), ModuleParallel("column"))
        for p in spread.parameters():
            p.main_grad = torch.zeros_like(p, dtype=torch.float32)
        x = of(M, K).requires_grad_()
        with te_mx.autocast():
            y = spread(x)
        said = ""
        try:
            torch.autograd.grad(y.sum(), x)
        except NotImplementedError as error:
            said = str(error)
        assert "zero-bubble pipeline" in said and "a DTensor, is one of them" in said, said
        assert not spread.weight.main_grad.to_local().any()


def case_both_wrappers_of_checkpoints():
    """fully_shard around layers that are recomputed."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        apply_activation_checkpointing,
    )

    for quantized in (False, True):
        one = mlp()
        recipe = te_mx.recipe.MXFP8BlockScaling(one_copy_weights=True)
        expected = mean_gradients(one, recipe)
        apply_activation_checkpointing(one, check_fn=lambda m: isinstance(m, te_mx.Linear))
        for layer in one:
            if any(True for _ in layer.parameters()):
                fully_shard(layer)
        fully_shard(one)
        if quantized:
            assert quantized_all_gather(one) == 2
        step(one, dist.get_rank(), recipe)
        plain = "_checkpoint_wrapped_module."
        equal({n.replace(plain, ""): p.grad for n, p in one.named_parameters()}, expected)

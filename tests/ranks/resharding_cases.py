"""Checkpoints from four ranks to two, to one, and back."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint_cases import folder, moments, parameters, same
from data_parallel_cases import FP32, RECIPE, step
from tensor_parallel_cases import DEVICE, K, N, built, of
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import parallelize_module

import te_mx
from te_mx.distributed import ModuleParallel, join_halves, quantized_all_gather, split_halves


def model(how, mesh, seed):
    """A column layer, a gated MLP and a whole layer; sharded twice, once or not at all."""
    made = nn.Sequential(
        built(te_mx.LayerNormLinear, K, K, **FP32),
        built(te_mx.LayerNormMLP, K, N, activation="swiglu", **FP32),
        built(te_mx.Linear, K, K, **FP32),
    )
    with torch.no_grad():
        for i, p in enumerate(made.parameters()):
            p.copy_(of(*p.shape, seed=100 * seed + i) / 8)
    if how in ("tp", "2d"):
        plan = {
            "0": ModuleParallel(output_layouts=Replicate()),
            "1": ModuleParallel(),
            "2": ModuleParallel("row", input_layouts=Replicate()),
        }
        parallelize_module(made, mesh["tp"], plan)
    if how in ("dp", "2d"):
        for layer in made:
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(made, mesh=mesh["dp"])
    return made


def case_from_four_to_two_to_one_and_back():
    """Weights and moments; training goes on with the same bits, also on gathered codes."""
    groups = {n: dist.new_group(list(range(n))) for n in (1, 2, 4)}
    shapes = {4: (2, 2), 2: (1, 2), 1: (1, 1)}
    meshes = {}
    for ranks, shape in shapes.items():
        names = torch.arange(ranks).view(shape)
        meshes[ranks] = DeviceMesh(DEVICE, names, mesh_dim_names=("dp", "tp"))
    shards = DeviceMesh(DEVICE, [[0], [1]], mesh_dim_names=("dp", "tp"))
    stages = (
        ("2d", 4, meshes[4]), ("tp", 2, meshes[2]), ("whole", 1, None), ("dp", 2, shards),
        ("2d", 2, meshes[2]), ("2d", 1, meshes[1]), ("2d", 4, meshes[4]),
    )  # fmt: skip
    path, data_rank = folder(), dist.get_rank() // 2
    expected = None
    for i, (how, ranks, mesh) in enumerate(stages):
        if dist.get_rank() < ranks:
            made = model(how, mesh, i)
            optimizer = torch.optim.AdamW(made.parameters(), lr=0.01)
            if expected is None:
                step(made, data_rank)
                optimizer.step()
                optimizer.zero_grad()
                expected = parameters(made), moments(optimizer, made)
                first = made, optimizer
            state = get_state_dict(made, optimizer)
            if i:
                loaded = {"model": state[0], "optim": join_halves(state[1])}
                dcp.load(loaded, checkpoint_id=path / str(i - 1), process_group=groups[ranks])
                set_state_dict(
                    made, optimizer, model_state_dict=loaded["model"],
                    optim_state_dict=split_halves(made, loaded["optim"]),
                )  # fmt: skip
                same(parameters(made), expected[0])
                same(moments(optimizer, made), expected[1])
                state = get_state_dict(made, optimizer)
            saved = {"model": state[0], "optim": join_halves(state[1])}
            dcp.save(saved, checkpoint_id=path / str(i), process_group=groups[ranks])
        dist.barrier()
    assert quantized_all_gather(made, recipe=RECIPE) == 5
    for one, its in (first, (made, optimizer)):
        step(one, data_rank, RECIPE, seed=1)
        its.step()
    same(parameters(made), parameters(first[0]))

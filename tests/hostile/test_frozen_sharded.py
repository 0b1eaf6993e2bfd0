"""Frozen weights under fully_shard (FSDP2), which puts other parameters into a module at every
forward, in memory that it fills anew without torch counting it.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed.fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import te_mx


@pytest.fixture
def mesh(tmp_path):
    store = f"file://{tmp_path}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def model():
    return nn.Sequential(te_mx.Linear(48, 64), nn.ReLU(), te_mx.Linear(64, 8))


def shard(layers, mesh):
    for layer in (layers[0], layers[2], layers):
        torch.distributed.fsdp.fully_shard(layer, mesh=mesh)


def run(layers, x):
    with torch.no_grad(), te_mx.autocast():
        return layers(x)


@pytest.mark.parametrize("load", [False, True])
def test_a_copy_does_not_outlive_the_shards_it_is_of(mesh, load):
    layers, plain, x = model(), model(), torch.randn(5, 48)
    te_mx.freeze_weights(layers)
    shard(layers, mesh)
    if load:  # what is loaded into the shards is not what a forward runs with either
        layers.load_state_dict(layers.state_dict())
    for _ in range(3):
        with torch.no_grad():
            for mine, theirs in zip(layers.parameters(), plain.parameters(), strict=True):
                mine.to_local().mul_(-1.5)
                theirs.copy_(mine.full_tensor())
        assert torch.equal(run(layers, x), run(plain, x))
    assert not layers[0]._source.kept


def test_dropping_masters_of_what_is_sharded_is_refused(mesh):
    layers = model()
    shard(layers, mesh)
    with pytest.raises(ValueError, match=r"sharded by fully_shard.*drop masters before sharding"):
        te_mx.freeze_weights(layers, True)
    whole = nn.ModuleDict({"block": layers})
    layers[0].unshard()
    with pytest.raises(ValueError, match=r"sharded by fully_shard and not resharded.*reshard\(\)"):
        te_mx.freeze_weights(whole)
    assert not layers[0]._source.standing


def test_freezing_what_is_sharded(mesh):
    """It stops training and quantizes at every forward, as what is frozen before."""
    layers, plain, x = model(), model(), torch.randn(5, 48)
    plain.load_state_dict(layers.state_dict())
    shard(layers, mesh)
    assert te_mx.freeze_weights(layers) == 2
    assert not any(p.requires_grad for p in layers.parameters())
    for _ in range(2):
        assert torch.equal(run(layers, x), run(plain, x))
    assert not layers[0]._source.kept
    te_mx.unfreeze_weights(layers)
    assert all(p.requires_grad for p in layers.parameters())


def test_codes_alone_are_sharded_with_their_biases(mesh):
    layers, x = model(), torch.randn(5, 48)
    te_mx.freeze_weights(layers, drop_master=True)
    expected = run(layers, x)
    shard(layers, mesh)
    assert torch.equal(run(layers, x), expected)

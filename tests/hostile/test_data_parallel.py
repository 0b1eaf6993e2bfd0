"""delay_wgrad_compute and fuse_wgrad_accumulation under torch's data-parallel wrappers: what they
would lose or leave different on every rank is refused at the first forward.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed.device_mesh
import torch.distributed.fsdp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import te_mx

# With one process FullyShardedDataParallel shards nothing, and says so.
pytestmark = pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")

FAMILIES = {
    "Linear": lambda **k: te_mx.Linear(32, 32, **k),
    "parts": lambda **k: te_mx.Linear(32, 32, parameters_split=["q", "k"], **k),
    "LayerNormLinear": lambda **k: te_mx.LayerNormLinear(32, 32, **k),
    "LayerNormMLP": lambda **k: te_mx.LayerNormMLP(32, 32, **k),
    "GroupedLinear": lambda **k: te_mx.GroupedLinear(2, 32, 32, **k),
}


@pytest.fixture(scope="module", autouse=True)
def one_process_group(tmp_path_factory):
    store = f"file://{tmp_path_factory.mktemp('group')}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


class Block(nn.Module):
    """A te_mx layer whose wrapper is somewhere above it."""

    def __init__(self, layer):
        super().__init__()
        self.before = nn.Linear(32, 32)
        self.layer = layer

    def forward(self, x):
        splits = ([3, 5],) if isinstance(self.layer, te_mx.GroupedLinear) else ()
        return self.layer(self.before(x), *splits)


def wrapped(layer, wrapper: str):
    model = Block(layer)
    if wrapper == "ddp":
        return DistributedDataParallel(model)
    if wrapper == "fsdp1":
        fsdp = torch.distributed.fsdp.FullyShardedDataParallel
        return fsdp(model, use_orig_params=True, device_id=torch.device("cpu"))
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    return torch.distributed.fsdp.fully_shard(model, mesh=mesh)


def refused(model, message: str, recipe: bool) -> None:
    x = torch.randn(8, 32)
    with te_mx.autocast(enabled=recipe):
        with torch.no_grad():
            model(x)
        with pytest.raises((NotImplementedError, RuntimeError), match=message):
            model(x)


@pytest.mark.parametrize("recipe", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_delayed_weight_gradients_under_fsdp1(family, recipe):
    layer = FAMILIES[family](name="fc", delay_wgrad_compute=True)
    message = r"'fc': delay_wgrad_compute=True needs .* FullyShardedDataParallel"
    refused(wrapped(layer, "fsdp1"), message, recipe)


@pytest.mark.parametrize("family", FAMILIES)
def test_main_grad_under_fsdp1(family):
    layer = FAMILIES[family](name="fc", fuse_wgrad_accumulation=True)
    for parameter in layer.parameters():
        parameter.main_grad = torch.zeros_like(parameter)
    message = r"'fc': fuse_wgrad_accumulation=True needs .* FullyShardedDataParallel"
    refused(wrapped(layer, "fsdp1"), message, True)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sharded_weight_without_main_grad(family):
    """Said before anything runs; tests/ranks has what works."""
    layer = FAMILIES[family](name="fc", fuse_wgrad_accumulation=True)
    model = wrapped(layer, "fsdp2")
    with te_mx.autocast():
        loss = model(torch.randn(8, 32)).sum()
    with pytest.raises(RuntimeError, match=r"'fc': .* main_grad of the parameter that the optim"):
        loss.backward()
    for sizes in ((3,), None):  # the shape of the whole is not what a plain tensor may have
        model.reshard()
        for parameter in layer.parameters():
            parameter.main_grad = torch.zeros(sizes or (9, *parameter.shape))
        with te_mx.autocast():
            loss = model(torch.randn(8, 32)).sum()
        says = r"main_grad must be like the parameter, a DTensor \(.*a plain tensor \(.*got a plain"
        with pytest.raises(RuntimeError, match=says):
            loss.backward()


def test_weights_that_ddp_ignores():
    """Nobody reduces their gradients but the user, after backward_dw."""
    model = Block(te_mx.Linear(32, 32, delay_wgrad_compute=True))
    ignore = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    ignore(model, ["layer.weight"])
    with te_mx.autocast():
        DistributedDataParallel(model)(torch.randn(8, 32)).square().sum().backward()
    assert model.layer.weight.grad is None
    model.layer.backward_dw()
    assert model.layer.weight.grad.any()


def test_a_wrapper_elsewhere():
    """A layer outside of the wrapper that another part of the model has."""
    layer = te_mx.Linear(32, 32, delay_wgrad_compute=True)
    x = DistributedDataParallel(nn.Linear(32, 32))(torch.randn(8, 32))
    with te_mx.autocast():
        layer(x).sum().backward()
    layer.backward_dw()
    assert layer.weight.grad.any()

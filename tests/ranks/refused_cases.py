"""What four ranks cannot do is refused by name, on every rank, before anything runs."""

from __future__ import annotations

import torch
from data_parallel_cases import FP32, refused
from tensor_parallel_cases import DEVICE, K, M, N, built, of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import te_mx
from te_mx.distributed import quantized_all_gather


def case_codes_of_fewer_ranks_after_forward():
    """fully_shard(reshard_after_forward=2) gathers values of two ranks going back."""
    layer = built(te_mx.Linear, K, N, **FP32)
    fully_shard(layer, mesh=init_device_mesh(DEVICE, (4,)), reshard_after_forward=2)
    refused(ValueError, "reshard_after_forward=2", lambda: quantized_all_gather(layer))
    assert layer._gathers is None
    with te_mx.autocast():
        layer(of(M, K)).sum().backward()  # values run


class Net(nn.Module):
    def __init__(self, **knobs):
        super().__init__()
        self.a, self.b = (built(te_mx.Linear, K, K, **FP32, **knobs) for _ in range(2))

    def forward(self, x, both):
        return self.b(self.a(x)) if both else self.a(x)


def case_layers_that_ranks_leave_out():
    """DistributedDataParallel averages gradients of autograd alone where some have none."""
    rank = torch.distributed.get_rank()
    for knob in ("fuse_wgrad_accumulation", "delay_wgrad_compute"):
        net = Net(**{knob: True})
        for layer in (net.a, net.b):
            layer.weight.main_grad = torch.zeros_like(layer.weight)
        for unused in (True, False):
            ddp = DistributedDataParallel(net, find_unused_parameters=unused)
            with te_mx.autocast():
                if unused:
                    refused(NotImplementedError, knob, lambda ddp=ddp: ddp(of(M, K), rank < 2))
                else:
                    ddp(of(M, K), True)
    ddp = DistributedDataParallel(Net(), find_unused_parameters=True)
    with te_mx.autocast():
        ddp(of(M, K), rank < 2).sum().backward()

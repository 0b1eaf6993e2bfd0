"""Experts of Transformers whose weights are DTensors."""

from __future__ import annotations

from data_parallel_cases import refused
from experts_cases import mixture
from tensor_parallel_cases import DEVICE, K, M, of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor

import te_mx


def case_experts_as_dtensors_are_refused():
    """Nobody says which tokens go to the rank that has an expert."""

    def cut(name, module, mesh):
        for key, p in list(module.named_parameters(recurse=False)):
            made = nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)]))
            module.register_parameter(key, made)

    for kind in ("Mixtral", "GptOss"):
        model = mixture(kind)
        distribute_module(model.experts, init_device_mesh(DEVICE, (4,)), cut)
        with te_mx.autocast():
            refused(NotImplementedError, "gate_up_proj is a DTensor", lambda m=model: m(of(M, K)))

"""The normalized input that a layer returns beside its result on two ranks: its gradient counts
once, however many ranks have it."""

from __future__ import annotations

import copy

import halves
import torch
import torch.distributed as dist
from group_cases import KINDS, close, gradients, mine, shared
from tensor_parallel_cases import K, N, built, full, mesh, of
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

import te_mx
from te_mx.distributed import ModuleParallel


def case_groups():
    for family, kind, given in KINDS[2:]:
        for sequence, codes in ((False, False), (True, False), (True, True)):
            more = {"return_layernorm_output": True, "dtype": torch.float32}
            whole, layer = shared(family, kind, {**given, **more}, sequence)
            if codes:
                te_mx.distributed.quantized_input_gather(layer)
            x, results = of(64, K).float(), []
            for module, rank in ((whole, None), (layer, dist.get_rank())):
                its = x if rank is None or not sequence else mine(x, 0)
                its = its.clone().requires_grad_()
                with te_mx.autocast():
                    y, z = module(its)
                weights = of(*([64, y.shape[-1] * (1 if rank is None or kind == "both" else 2)]))
                if rank is not None and kind == "column":
                    weights = mine(weights, -1)
                of_z = of(64, K, seed=2)
                if rank is not None and sequence:
                    weights = mine(weights, 0) if kind == "both" else weights
                    of_z = mine(of_z, 0)
                assert z.shape == of_z.shape
                ((y * weights).sum() + (z * of_z).sum()).backward()
                results.append({"z": z.detach(), "dx": its.grad, **gradients(module)})
            expected, found = results
            for name, value in expected.items():
                if name in ("z", "dx"):
                    expected[name] = mine(value, 0) if sequence else value
                else:
                    expected[name] = halves.slices(name, value, whole, kind)[dist.get_rank()]
            close(found, expected, 1e-3, 1e-4)


def case_dtensors():
    for family, places in (
        (te_mx.LayerNormLinear, Replicate()), (te_mx.LayerNormLinear, Shard(0)),
        (te_mx.LayerNormMLP, Replicate()),
    ):  # fmt: skip
        given = {"dtype": torch.float32, "return_layernorm_output": True, "return_bias": True}
        whole = built(family, K, N, **given)
        layer = copy.deepcopy(whole)
        style = ModuleParallel(
            input_layouts=places, output_layouts=Replicate(), use_local_output=False
        )
        parallelize_module(layer, mesh(), style)
        te_mx.distributed.quantized_input_gather(layer)
        x = of(64, K).float()
        results = []
        for module in (whole, layer):
            its = x.clone() if module is whole else distribute_tensor(x, mesh(), [places])
            its.requires_grad_()
            with te_mx.autocast():
                y, _, z = module(its)
            y, z = full(y), full(z)
            ((y * of(*y.shape)).sum() + (z * of(64, K, seed=2)).sum()).backward()
            grads = {
                name: full(p.grad) for name, p in module.named_parameters() if p.grad is not None
            }
            results.append({"y": y.detach(), "z": z.detach(), "dx": full(its.grad), **grads})
        for name, value in results[0].items():
            torch.testing.assert_close(results[1][name], value, rtol=1e-3, atol=1e-4, msg=name)

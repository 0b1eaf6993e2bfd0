"""Which part of te_mx.distributed runs a call that concerns tensors of several ranks."""

from typing import Any

import torch

from te_mx.distributed import fsdp, tensor_parallel
from te_mx.distributed.fsdp import GatheredWeight


def run(module: Any, inp: Any, *args: Any) -> Any:
    """The forward of a module on what this rank has of its tensors."""
    if module._shared is not None:
        return tensor_parallel.run_group(module, inp, *args)
    for value in module._parameters.values():
        if isinstance(value, GatheredWeight):
            return fsdp.run_on_codes(module, inp, *args)
    return tensor_parallel.run(module, inp, *args)


if torch.__version__ < "2.12":  # whose Dynamo does not read the attributes of a module one by one
    run = torch.compiler.disable(
        run,
        reason="te_mx modules that several ranks share are compiled from PyTorch 2.12 on; this one "
        "runs them eagerly, between graphs (fullgraph=False)",
    )

"""Everything that MXFP8 changes in a training script: convert, autocast, ask what ran."""

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import te_mx

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def usual_dtype(device: str) -> str:
    """bf16; fp32 on a CPU where torch has no bf16 products but a loop over single numbers."""
    slow = device == "cpu" and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return "fp32" if slow else "bf16"


def convert(model: nn.Module) -> None:
    """Every nn.Linear but the head and routers, which convert_model leaves in high precision.

    fuse: the MLP runs as one step with GELU inside of its GEMMs, and normalizations quantize for
    the layers behind them. Parameters keep their names.
    """
    te_mx.convert_model(model, fuse=True)


def kernels(model: nn.Module) -> dict[str, int]:
    """Which kernels ran, each with its number of linear layers, e.g. {"amx_bf16": 12}."""
    ran: Counter[str] = Counter()
    for layer in te_mx.audit(model):
        if not layer.fprop:  # a fused block or normalization, whose layers have rows of their own
            continue
        gemms = {"fprop": layer.fprop, "dgrad": layer.dgrad, "wgrad": layer.wgrad}
        alike = len(set(gemms.values())) == 1
        ran[layer.fprop if alike else ", ".join(f"{k} {v}" for k, v in gemms.items())] += 1
    return dict(ran)


@contextlib.contextmanager
def forward_precision(device: str, dtype: str, recipe: Any) -> Iterator[None]:
    """fp32 parameters, `dtype` activations by torch.autocast; with a recipe, MXFP8 linears."""
    with contextlib.ExitStack() as stack:
        if dtype != "fp32":
            stack.enter_context(torch.autocast(device.split(":")[0], DTYPES[dtype]))
        if recipe is not None:
            stack.enter_context(te_mx.autocast(recipe=recipe))
        yield

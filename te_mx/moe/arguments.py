"""Checks of what the functions of te_mx.moe are given, before anything runs."""

from typing import Any

import torch
from torch import Tensor

from te_mx._ops import Operand, quantize_2d
from te_mx.api.grouped import tokens_of
from te_mx.api.groups import check_floats
from te_mx.api.tensor import MXTensor
from te_mx.autograd import node
from te_mx.dispatch.groups import INDEX_DTYPES, readable
from te_mx.recipes.settings import Settings
from te_mx.runtime.arguments import check_memory, check_place, shown

_FEW = 1024


def check_ids(name: str, value: Any, device: torch.device, shape: str = "a vector") -> Tensor:
    """Ids as int32. Raises unless they are int32 or int64 on a device, in one dimension, or in two
    where the shape is said to be [M, top_k]."""
    if not isinstance(value, Tensor) or value.dtype not in INDEX_DTYPES:
        raise TypeError(f"{name} must be an int32 or int64 tensor, got {shown(value)}")
    check_memory(name, value)
    dims = 1 if shape == "a vector" else 2
    if value.dim() != dims:
        raise ValueError(f"{name} must be {shape}, got {tuple(value.shape)}")
    check_place(name, value, device, "the weights")
    value = value.resolve_neg()
    if value.dtype is torch.int64:  # what int32 does not hold stays out of every range
        value = value.clamp(-(1 << 31), (1 << 31) - 1)
    return value.to(torch.int32)


def check_range(name: str, ids: Tensor, least: int, end: int, remedy: str) -> None:
    """Raise ValueError for ids out of [least, end), where the host may look at them."""
    if not readable(ids) or ids.numel() == 0:
        return
    if ids.numel() <= _FEW:  # as a list, which costs less than operators of torch
        held = ids.flatten().tolist()
        low, high = min(held), max(held)
    else:
        low, high = (int(one) for one in ids.aminmax())
    if low < least or high >= end:
        got = low if low < least else high
        raise ValueError(f"{name} must be {least} to {end - 1}, got {got}; {remedy}")


def refuse_transforms(owner: str, *tensors: Tensor | None) -> None:
    """Raise NotImplementedError where forward-mode AD or a transform of torch.func follows one."""
    if node.active():
        node.refuse(f"te_mx.moe.{owner}", tensors, node.FUNCTION, grad=True)


def quantized_rows(x: Tensor, settings: Settings) -> Operand:
    """A matrix of tokens in the recipe's format of inputs."""
    made = quantize_2d(x.detach(), f"{settings.x}@rows", rule=settings.scale_rule).row
    assert made is not None
    return made


def rows_of(name: str, a: Any, k: int, device: torch.device, settings: Settings) -> Operand:
    """Tokens [M, K] as ops take them: an MXTensor as it is, a tensor quantized here."""
    if not isinstance(a, MXTensor):
        check_floats(name, a)
    if len(a.shape) != 2 or a.shape[1] != k:
        raise ValueError(f"{name} must be [M, {k}] for these weights, got {tuple(a.shape)}")
    check_place(name, a, device, "the weights")
    return tokens_of(a, name) if isinstance(a, MXTensor) else quantized_rows(a, settings)


def routing_weights(name: str, value: Any, routed: int, device: torch.device) -> Tensor:
    """Routing weights as fp32 [routed]."""
    check_floats(name, value)
    check_place(name, value, device, "the weights")
    if value.numel() != routed:
        raise ValueError(
            f"{name} must hold a number for each of {routed} routed rows, got {tuple(value.shape)}"
        )
    return value.detach().reshape(-1).to(torch.float32)

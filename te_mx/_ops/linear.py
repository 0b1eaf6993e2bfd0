"""Linear layers as one native call each way: for plain tensors, below autograd; no torch op."""

from typing import Any

import torch
from torch import Tensor

from te_mx._ops.library import is_direct
from te_mx.dispatch.kernels import Plan, derive, derived
from te_mx.dispatch.layer import LayerKernel
from te_mx.dispatch.linear import FrozenKernel, LinearKernel
from te_mx.dispatch.problem import MOST, Problem, place_of
from te_mx.dispatch.registry import find


def linear_kernel_of(
    sizes: tuple[int, int, int], device: torch.device, dtype: torch.dtype, settings: Any
) -> LinearKernel | None:
    """The kernel that runs forward and backward of a layer in one call each, or None: of x [m, k]
    of a dtype and a weight [n, k]."""
    m, n, k = sizes
    if 0 in sizes:
        return None
    # Sizes as far as envelopes look at them: those of CPUs take small layers.
    by_size = sizes if device.type == "cpu" else max(sizes) > MOST
    known, key = derived(), ("linear", device, settings, dtype, by_size)
    if key not in known:
        grad = f"{settings.g}@any"
        problem = _problem("linear", device, settings, m, n, k, dtype=dtype, grad=grad)
        if device.type == "cuda" and device.index is None:
            return find(problem)
        return derive(key, find(problem))
    return known[key]


def _problem(
    op: str, device: torch.device, settings: Any, m: int = 1, n: int = 1, k: int = 1, **more: Any
) -> Problem:  # fmt: skip
    """That of a layer under some settings, whose operands are not made yet."""
    return Problem(
        op, place_of(device), f"{settings.x}@any", f"{settings.w}@any", m, n, k,
        precision=settings.precision, spread=settings.spread, rule=settings.scale_rule,
        split_k=settings.split_k, **more,
    )  # fmt: skip


def layer_kernel(device: torch.device, settings: Any) -> LayerKernel | None:
    """The kernel that may run layers under some settings in one call each way, or None."""
    # By the identity of the settings, which lives as long as the entry: a hash costs more.
    key = "layers", device, id(settings)
    found = derived().get(key)
    if found is None:
        problem = _problem("layer", device, settings, grad=f"{settings.g}@any")
        found = derive(key, (find(problem), settings))
    kernel: LayerKernel | None = found[0]
    return kernel


def infer(
    x: Tensor, weight_NK: Tensor, bias_N: Tensor | None, settings: Any, out_dtype: torch.dtype,
    tag: int = -1,
) -> Tensor | None:  # fmt: skip
    """x [..., k] @ w^T + bias without gradients, where one kernel does it all; else None."""
    if not is_direct(x, weight_NK, bias_N) or x.device != weight_NK.device:
        return None
    # By the identity of the settings, which lives as long as the entry: a hash costs more.
    key = x.shape, weight_NK.shape, x.dtype, x.device, id(settings)
    found = derived().get(key)
    if found is None:
        found = derive(key, (_infer_plan(x, weight_NK, settings), settings))
    plan, _ = found
    return None if plan is None else plan(x, weight_NK, bias_N, out_dtype, tag)


def _infer_plan(x: Tensor, weight_NK: Tensor, settings: Any) -> Plan | None:
    n, k = weight_NK.shape
    m = x.numel() // k if k else 0
    problem = _problem("linear_infer", x.device, settings, m, n, k, dtype=x.dtype)
    kernel = find(problem)
    return None if kernel is None else kernel.make_plan(problem)


def frozen_kernel(
    x: tuple[int, torch.dtype, torch.device], weight: tuple[int, int, int],
    specs: tuple[str, str], rule: str, precision: str,
) -> tuple[Problem, FrozenKernel] | None:  # fmt: skip
    """The kernel for inputs and weights that stand still, in a form of its own, with its problem;
    None where there is none. x: rows, dtype, device; weight: groups (0: one weight), n, k. specs:
    of inputs, "" for x as it is, and of the weights as other kernels would find them."""
    key = "frozen", x, weight, specs, rule, precision
    found = derived().get(key)
    if found is None:
        (m, dtype, device), (groups, n, k) = x, weight
        problem = Problem(
            "linear_frozen", place_of(device), *specs, m, n, k, groups,
            precision=precision, dtype=dtype, rule=rule,
        )  # fmt: skip
        found = derive(key, (problem, find(problem)))
    problem, kernel = found
    return None if kernel is None else (problem, kernel)

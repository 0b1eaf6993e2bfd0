"""What the tests of sums over the tokens share: modules, ways to run them, fp64 sums."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

import te_mx
from te_mx.recipe import MXFP4BlockScaling, MXFP8BlockScaling

ROWS, SIZE = 100_000, 8
SPLITS = [60_000, 0, 39_000]  # and rows of no group
LEAST_DB = {torch.float32: 100.0, torch.bfloat16: 50.0, torch.float16: 65.0}  # one rounding
RECIPES = {
    "mxfp8": MXFP8BlockScaling(),
    "mxfp4": MXFP4BlockScaling(),
    "high precision backward": MXFP8BlockScaling(backward_override="high_precision"),
    "dequantized backward": MXFP8BlockScaling(backward_override="dequantized"),
    "high precision wgrad": MXFP8BlockScaling(wgrad_with_hp=True),
    "plain": None,
    "plain into main_grad": None,
}
MODULES = {
    "Linear": te_mx.Linear,
    "LayerNormLinear": te_mx.LayerNormLinear,
    "LayerNormMLP": partial(te_mx.LayerNormMLP, activation="swiglu"),
    "GroupedLinear": partial(te_mx.GroupedLinear, len(SPLITS)),
    "GroupedLinear stacked": partial(te_mx.GroupedLinear, len(SPLITS), single_grouped_weight=True),
}


def gradient(dtype: torch.dtype, size: int = SIZE, device: str = "cpu") -> Tensor:
    """[ROWS, size] with a mean, so that a sum which is rounded on the way stops growing."""
    return (torch.randn(ROWS, size, device=device) + 0.5).to(dtype)


def in_groups(g: Tensor) -> Tensor:
    """fp64 [G, N]: the sums over the rows of every group."""
    return torch.stack([part.double().sum(0) for part in g[: sum(SPLITS)].split(SPLITS)])


def exact_for(kind: str, g: Tensor) -> Tensor:
    """fp64: what the gradients of the biases of a module of MODULES are."""
    return in_groups(g) if "Grouped" in kind else g.double().sum(0)


def assert_summed_in_fp32(got: Tensor, exact: Tensor) -> None:
    """Nothing but one rounding to the dtype of the gradient."""
    error = (got.double() - exact).square().sum()
    db = 10 * torch.log10(exact.square().sum() / error)
    assert db > LEAST_DB[got.dtype], f"{db:.1f} dB"


def biases_of(module: torch.nn.Module) -> Tensor:
    """The gradients of the biases that are added last, [N], or [G, N] of a grouped layer."""
    if isinstance(module, te_mx.GroupedLinear):
        made = [p.grad for name, p in module.named_parameters() if name.startswith("bias")]
        return made[0] if module.single_grouped_bias else torch.stack(made)
    return (module.fc2_bias if isinstance(module, te_mx.LayerNormMLP) else module.bias).grad


def build(
    kind: str, dtype: torch.dtype, fused: bool = False, size: int = SIZE, device: str = "cpu"
) -> torch.nn.Module:
    """A module of MODULES, with main_grads."""
    layer = MODULES[kind](size, size, dtype=dtype, device=device, fuse_wgrad_accumulation=fused)
    for name, parameter in layer.named_parameters():
        if "weight" in name:
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
    return layer


def run(module: torch.nn.Module, recipe, g: Tensor, splits: list[int] | Tensor = SPLITS) -> Tensor:
    """The gradients of the biases of a module, from those of its result."""
    x = torch.randn_like(g)
    splits_if_grouped = (splits,) if isinstance(module, te_mx.GroupedLinear) else ()
    with te_mx.autocast(enabled=recipe is not None, recipe=recipe):
        module(x, *splits_if_grouped).backward(g)
    return biases_of(module)

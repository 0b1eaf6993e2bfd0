"""Splits, layers and the loop of te_mx.Linear that grouped layers are compared with."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

import te_mx
from te_mx.recipe import (
    Float8BlockScaling,
    Format,
    MXFP4BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)

RECIPES = {
    "e4m3": MXFP8BlockScaling(),
    "hybrid": MXFP8BlockScaling(fp8_format=Format.HYBRID),
    "blockwise": Float8BlockScaling(),
    "fp32_scales": Float8BlockScaling(use_f32_scales=True, fp8_format=Format.HYBRID),
    "mxfp4": MXFP4BlockScaling(),
    "mxfp4_all": MXFP4BlockScaling(g="mxfp4", stochastic_rounding=False),
    "floor": MXFP8BlockScaling(scale_rule="floor"),
    "nvfp4": NVFP4BlockScaling(disable_stochastic_rounding=True),
}
# Zeros, the edges of blocks (32) and of kernels for few rows (16), and a group of several blocks.
COUNTS = st.sampled_from([0, 0, 1, 2, 15, 16, 17, 31, 32, 33, 64, 65, 100])
SPLITS = st.one_of(
    st.lists(COUNTS, min_size=1, max_size=6),
    st.tuples(st.integers(0, 5), COUNTS, st.integers(1, 6)).map(  # all in one group
        lambda t: [t[1] if i == t[0] % t[2] else 0 for i in range(t[2])]
    ),
)
FEATURES = st.sampled_from([1, 2, 16, 17, 31, 32, 33, 64, 65, 100])


def parameters(layer: te_mx.GroupedLinear, kind: str) -> Tensor:
    """[groups, ...]: the parameters of a kind, or their gradients for kind "weight.grad"."""
    kind, _, grad = kind.partition(".")
    held = [p for name, p in layer.named_parameters() if name.startswith(kind)]
    values = [p.grad if grad else p.detach() for p in held]
    stacked = layer.single_grouped_weight if kind == "weight" else layer.single_grouped_bias
    return values[0] if stacked else torch.stack(values)


def loop_of(layer: te_mx.GroupedLinear, kind: type[nn.Linear] = te_mx.Linear) -> list[nn.Linear]:
    """A layer for each group, with copies of its parameters."""
    weights = parameters(layer, "weight")
    layers = []
    for i, weight in enumerate(weights):
        one = kind(layer.in_features, layer.out_features, layer.use_bias, dtype=weight.dtype)
        one.weight.data.copy_(weight)
        if layer.use_bias:
            one.bias.data.copy_(parameters(layer, "bias")[i])
        layers.append(one)
    return layers


def run_loop(layers: list[nn.Linear], x: Tensor, splits: list[int]) -> Tensor:
    """Every layer on its rows; zeros behind."""
    total = sum(splits)
    parts = [one(part) for one, part in zip(layers, x[:total].split(splits), strict=True)]
    rest = parts[0].new_zeros(len(x) - total, layers[0].out_features)
    return torch.cat([*parts, rest])


def assert_same_as_loop(
    layer: te_mx.GroupedLinear, layers: list[nn.Linear], x: Tensor, splits: list[int],
    m_splits: list[int] | Tensor | None = None, grad_scale: float = 1.0,
) -> None:  # fmt: skip
    """Result and all gradients of the grouped layer and of the loop, bit for bit."""
    ours, theirs = (x.clone().requires_grad_() for _ in range(2))
    y, expected = (
        layer(ours, splits if m_splits is None else m_splits),
        run_loop(layers, theirs, splits),
    )
    equal(y, expected)
    grad = torch.randn_like(y) * grad_scale
    y.backward(grad)
    expected.backward(grad)
    equal(ours.grad, theirs.grad)
    equal(parameters(layer, "weight.grad"), torch.stack([one.weight.grad for one in layers]))
    if layer.use_bias:
        equal(parameters(layer, "bias.grad"), torch.stack([one.bias.grad for one in layers]))


def equal(got: Tensor | None, expected: Tensor | None) -> None:
    """The same bits, NaN included."""
    assert got is not None and expected is not None
    assert got.dtype == expected.dtype and got.shape == expected.shape
    as_int = {2: torch.int16, 4: torch.int32, 1: torch.uint8}[got.element_size()]
    same = got.detach().contiguous().view(as_int) == expected.detach().contiguous().view(as_int)
    both_nan = got.isnan() & expected.isnan() if got.is_floating_point() else same
    assert bool((same | both_nan).all()), f"{int((~(same | both_nan)).sum())} elements differ"

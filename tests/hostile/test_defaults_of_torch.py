"""torch.set_default_device, `with torch.device(..)` and torch.set_default_dtype are about what
users make: nothing inside te_mx follows them, with native code or without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

import te_mx
from te_mx.backends import reference, reference_grouped, sm90_layout
from te_mx.ops import Operand, quantize
from te_mx.recipe import Format, MXFP8BlockScaling

RECIPES = [
    MXFP8BlockScaling(fp8_format=Format.HYBRID),
    MXFP8BlockScaling(backward_override="dequantized"),
    MXFP8BlockScaling(one_copy_weights=True),
    None,
]
MODULES = {
    "Linear": lambda: te_mx.Linear(40, 48),
    "parts": lambda: te_mx.Linear(40, 48, parameters_split=["q", "k"]),
    "LayerNormLinear": lambda: te_mx.LayerNormLinear(40, 48),
    "LayerNormMLP": lambda: te_mx.LayerNormMLP(40, 48),
    "RMSNorm, swiglu": lambda: te_mx.LayerNormMLP(
        40, 48, normalization="RMSNorm", activation="swiglu"
    ),
    "GroupedLinear": lambda: te_mx.GroupedLinear(2, 40, 48),
    "GroupedLinear stacked": lambda: te_mx.GroupedLinear(2, 40, 48, single_grouped_weight=True),
}


@contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


DEFAULTS = {
    "set_default_device": default_device,
    "with torch.device": lambda: torch.device("meta"),
    "fp64": lambda: default_dtype(torch.float64),
    "fp16": lambda: default_dtype(torch.float16),
}


def same_under(default: str, compute: Callable[[], list[Tensor]]) -> None:
    expected = compute()
    with DEFAULTS[default]():
        got = compute()
    for mine, theirs in zip(got, expected, strict=True):
        assert mine.dtype == theirs.dtype and mine.device == theirs.device
        assert torch.equal(mine, theirs)


def trained(layer: torch.nn.Module, x: Tensor, splits: tuple) -> list[Tensor]:
    made = []
    for recipe in RECIPES:
        layer.zero_grad()
        mine = x.clone().requires_grad_()
        with te_mx.autocast(enabled=recipe is not None, recipe=recipe):
            y = layer(mine, *splits)
        y.backward(y.detach())
        made += [y.detach(), mine.grad, *(p.grad.clone() for p in layer.parameters())]
    te_mx.freeze_weights(layer)
    with torch.no_grad(), te_mx.autocast():
        made.append(layer(x, *splits))
    te_mx.unfreeze_weights(layer)
    return made


@pytest.mark.parametrize("default", DEFAULTS)
@pytest.mark.parametrize("family", MODULES)
def test_modules(family: str, default: str):
    layer, x = MODULES[family](), torch.randn(40, 40)
    splits = ([3, 30],) if "Grouped" in family else ()
    same_under(default, lambda: trained(layer, x, splits))


@pytest.mark.parametrize("default", DEFAULTS)
@pytest.mark.parametrize("native", [True, False], ids=["native", "reference"])
def test_functions(request, native: bool, default: str):
    if not native:
        request.getfixturevalue("no_native")
    x, weight, offs = torch.randn(40, 40), torch.randn(2, 48, 40), torch.tensor([3, 30])
    index = torch.randint(0, 2, (40,))
    whole = torch.randn(4096, 1100)  # results of more than 16 MB have memory of their own

    @torch.no_grad()
    def compute() -> list[Tensor]:
        q = te_mx.quantize(x, columnwise=True)
        made = [q.dequantize(), te_mx.gemm(q, q).out, te_mx.grouped_wgrad(x, x, offs)]
        made.append(te_mx.grouped_linear(x, weight, offs=offs))
        made.append(te_mx.grouped_linear(x, weight, index=index))
        if native:
            made.append(te_mx.quantize(whole).dequantize())
        return made

    with pytest.warns(te_mx.FallbackWarning) if not native else default_dtype(torch.float32):
        same_under(default, compute)


@pytest.mark.parametrize("default", DEFAULTS)
def test_what_runs_on_other_devices(default: str):
    """Plain torch for splits on a device, for GPUs without native code and for packing."""
    x = torch.randn(40, 40)
    starts, ends = torch.tensor([0, 3]), torch.tensor([3, 30])

    def compute() -> list[Tensor]:
        sm90_layout.shift_table.cache_clear()
        sm90_layout.code_values.cache_clear()
        parts = reference_grouped.quantize(x, starts, ends, "e5m2", True, True, "rceil", True)
        packed = quantize._on_other(x, "e5m2", True, "plain", "rceil", False, torch.float32, 8)
        codes, scales = parts.row_codes, parts.row_scales
        operand = Operand(codes, scales, "e5m2", "k_last")
        product = reference.relative_matmul(operand, operand)
        return [*parts, product, *(part for part in packed if part is not None)]

    same_under(default, compute)

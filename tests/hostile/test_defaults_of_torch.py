"""torch.set_default_device, `with torch.device(..)` and torch.set_default_dtype are about what
users make: nothing inside te_mx follows them, with native code or without.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

import te_mx
from te_mx import _ops as ops
from te_mx.backends.reference import gemm
from te_mx.backends.reference import grouped as grouped_reference
from te_mx.backends.sm90.layouts import tiles as sm90_tiles
from te_mx.dispatch.calls import Groups, QuantizeGroups
from te_mx.recipe import BlockScaling, Format, MXFP8BlockScaling

RECIPES = [
    MXFP8BlockScaling(fp8_format=Format.HYBRID),
    MXFP8BlockScaling(backward_override="dequantized"),
    MXFP8BlockScaling(one_copy_weights=True),
    BlockScaling("mxfp4", "mxfp6_e2m3", "mxfp8_e5m2"),
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
    if getattr(layer, "_split", None) is None:
        frozen = copy.deepcopy(layer)
        te_mx.freeze_weights(frozen, drop_master=True, fmt="mxfp4", activations="bf16")
        with torch.no_grad():
            made.append(frozen(x, *splits))
    return made


@pytest.mark.filterwarnings("ignore::te_mx.FallbackWarning")
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
        made = [q.dequantize(), te_mx.grouped_wgrad(x, x, offs)]
        made += [te_mx.gemm(q, q).out for _ in range(3)]  # which are packed from the second on
        made.append(te_mx.grouped_linear(x, weight, offs=offs))
        made.append(te_mx.grouped_linear(x, weight, index=index))
        made.append(te_mx.grouped_linear(x, weight, offs=offs, alignment=8))
        made.append(te_mx.grouped_gemm(q, te_mx.quantize(weight), offs=offs, alignment=8))
        if native:
            made.append(te_mx.quantize(whole).dequantize())
        return made

    with pytest.warns(te_mx.FallbackWarning) if not native else default_dtype(torch.float32):
        same_under(default, compute)


@pytest.mark.parametrize("default", DEFAULTS)
def test_what_runs_in_plain_torch(default: str):
    """Splits on a device, GPUs without native code, packing, and formats without native code."""
    x = torch.randn(40, 40)
    starts, ends = torch.tensor([0, 3]), torch.tensor([3, 30])

    def compute() -> list[Tensor]:
        sm90_tiles.shift_table.cache_clear()
        sm90_tiles.code_values.cache_clear()
        rows, grouped, packed = (f"mxfp8_e5m2@{lie}" for lie in ("rows", "grouped_cols", "sm90:8"))
        tokens = QuantizeGroups(x, Groups(ends), rows, grouped, "rceil", True)
        made = grouped_reference.quantize(tokens, starts, ends)
        product = gemm.relative_matmul(made.row, made.row)
        row, col, _ = ops.quantize_2d(x, packed, packed)
        found = [*made.row[:2], *made.col[:2], made.col_sum, product, *row[:2], *col[:2]]
        small, odd = (
            te_mx.quantize(x, fmt=fmt, columnwise=True, scale_rule="even")
            for fmt in ("mxfp4", "mxfp6_e3m2")
        )
        found += [q.dequantize(usage=u) for q in (small, odd) for u in ("rowwise", "columnwise")]
        return [*found, te_mx.gemm(small, odd, gelu="erf").out]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", te_mx.FallbackWarning)
        same_under(default, compute)

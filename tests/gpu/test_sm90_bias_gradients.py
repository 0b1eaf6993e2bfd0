"""Sums over the tokens are fp32 on Hopper too: in every module, on every path, with splits that the
host knows and with splits that only the device does. 10^5 rows against fp64.
"""

from __future__ import annotations

import pytest
import torch
from bias_sums import (
    MODULES,
    RECIPES,
    SPLITS,
    assert_summed_in_fp32,
    build,
    exact_for,
    gradient,
    run,
)

from te_mx.recipe import MXFP8BlockScaling

SIZE = 256
PATHS = {**RECIPES, "exact": MXFP8BlockScaling(precision="exact")}
ON_DEVICE = ("mxfp8", "plain", "exact")  # others need splits that the host knows


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("module", MODULES)
def test_every_module(module, path, dtype):
    g = gradient(dtype, SIZE, "cuda")
    layer = build(module, dtype, "main_grad" in path, SIZE, "cuda")
    assert_summed_in_fp32(run(layer, PATHS[path], g), exact_for(module, g))


# No kernel but the reference takes them at precision "exact", and te_mx says so once.
@pytest.mark.filterwarnings("ignore:te_mx runs .* with splits on the device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("path", ON_DEVICE)
@pytest.mark.parametrize("module", ["GroupedLinear", "GroupedLinear stacked"])
def test_splits_on_the_device(module, path, dtype):
    g = gradient(dtype, SIZE, "cuda")
    splits = torch.tensor(SPLITS, device="cuda")
    made = run(build(module, dtype, size=SIZE, device="cuda"), PATHS[path], g, splits)
    assert_summed_in_fp32(made, exact_for(module, g))


@pytest.mark.parametrize("splits", ["host", "device"])
@pytest.mark.parametrize("module", ["GroupedLinear", "GroupedLinear stacked"])
def test_plain_results_do_not_depend_on_the_place_of_splits(module, splits):
    """fp32 parameters under torch.autocast: the biases are added in bf16 as elsewhere."""
    layer = build(module, torch.float32, size=SIZE, device="cuda")
    x = torch.randn(sum(SPLITS) + 5, SIZE, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        expected = layer(x, SPLITS)
        got = layer(x, SPLITS if splits == "host" else torch.tensor(SPLITS, device="cuda"))
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)
    assert not got[sum(SPLITS) :].any()

"""NVFP4's bytes against Transformer Engine's own reference in plain torch, from its file."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from unittest.mock import MagicMock

import pytest
import torch
from beside_te import te_files

from te_mx import formats

PACKAGE = "transformer_engine.pytorch"
RECIPES = f"{PACKAGE}.custom_recipes"
RULES = {
    "te": {},
    "te_4over6": {"nvfp4_use_4over6": True, "nvfp4_e4m3_max": 256},
    "te_4over6_mse_448": {"nvfp4_use_4over6": True, "nvfp4_4over6_err_mode": "MSE"},
}


@pytest.fixture(scope="module")
def theirs():
    """Its class of quantizers. What it imports of the package needs CUDA: names alone stand in."""
    files = te_files()
    if files is None or not (files / "pytorch/custom_recipes/reference_nvfp4.py").is_file():
        pytest.skip("transformer_engine is not installed")
    made = {name: ModuleType(name) for name in ("transformer_engine", PACKAGE, RECIPES)}
    made[f"{PACKAGE}.quantized_tensor"] = beside = ModuleType("quantized_tensor")
    beside.Quantizer = type("Quantizer", (), {"__init__": lambda self, **_: None})
    beside.QuantizedTensorStorage = type("QuantizedTensorStorage", (), {})
    made[RECIPES].gemm = MagicMock()
    before = {name: sys.modules.get(name) for name in made}
    sys.modules.update(made)
    try:
        for name in ("reference_utils", "reference_nvfp4"):
            path = files / "pytorch" / "custom_recipes" / f"{name}.py"
            spec = importlib.util.spec_from_file_location(f"{RECIPES}.{name}", path)
            module = importlib.util.module_from_spec(spec)
            sys.modules[f"{RECIPES}.{name}"] = module
            spec.loader.exec_module(module)
            setattr(made[RECIPES], name, module)
    finally:
        for name, module in before.items():
            sys.modules.pop(name)
            if module is not None:
                sys.modules[name] = module
        sys.modules.pop(f"{RECIPES}.reference_utils", None)
        sys.modules.pop(f"{RECIPES}.reference_nvfp4", None)
    return made[RECIPES].reference_nvfp4.NVFP4QuantizerRef


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_16x16", "nvfp4_rows"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_bytes(theirs, name, rule, dtype):
    torch.manual_seed(0)
    x = (torch.randn(64, 256) * torch.exp(2 * torch.randn(64, 1))).to(dtype)
    x[0, :40] = 0
    fmt, rows = formats.get(name), name == "nvfp4_rows"
    codes, scales, whole = fmt.quantize(x, rule)
    amax = x.float().abs().amax(1) if rows else x.float().abs().amax()
    made, of_blocks = theirs._quantize_blockwise_reference(
        x, amax, 16, fmt.scaling.block[0], pow_2_scales=False, row_scaled_nvfp4=rows, eps=0.0,
        **RULES[rule],
    )  # fmt: skip
    assert torch.equal(of_blocks.view(torch.uint8)[:: fmt.scaling.block[0]], scales)
    known = (scales.repeat_interleave(fmt.scaling.block[0], 0) > 0).repeat_interleave(8, 1)
    assert torch.equal(torch.where(known, made, 0), torch.where(known, codes, 0))
    top = torch.full_like(amax, 1536 if rule == "te_4over6" else 2688)
    assert torch.equal(whole.flatten(), (top / amax).reciprocal().flatten())


def test_the_same_transform(theirs):
    x = (torch.randn(32, 64) * torch.exp(torch.randn(32, 1))).bfloat16()
    turned = theirs(dtype=None, with_rht=True)._apply_rht(x)
    made = formats.get("nvfp4+rht16:0xd7e8d7e8").transform.apply(x).to(x.dtype)
    assert ((turned.float() - made.float()).abs() <= 2.0**-7 * made.float().abs()).all()
    assert (turned == made).float().mean() > 0.999

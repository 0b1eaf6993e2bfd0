# pyright: strict
"""A script as users write it, which `make lint` has mypy and pyright check strictly and
test_typed.py runs: what te_mx returns has types, and so have recipes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from typing_extensions import assert_type

import te_mx
from te_mx.pytorch.fp8 import FP8GlobalStateManager, check_fp8_support
from te_mx.recipe import (
    BlockScaling,
    CustomRecipe,
    DeepSeekV3,
    Float8BlockScaling,
    Format,
    MXFP4BlockScaling,
    MXFP8BlockScaling,
    QuantizerRole,
    Recipe,
    overrides,
)


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = te_mx.Linear(width, 2 * width, bias=False)
        self.down = te_mx.Linear(2 * width, width)
        self.norm = te_mx.LayerNormLinear(width, width, normalization="RMSNorm")
        self.mlp = te_mx.LayerNormMLP(width, 2 * width, activation="swiglu")
        self.experts = te_mx.GroupedLinear(2, width, width)
        self.lm_head = nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = assert_type(self.down(nn.functional.gelu(self.up(x))), Tensor)
        return self.mlp(y + self.norm(x)) + self.experts(x, [6, len(x) - 6])


def factory(role: QuantizerRole) -> str | tuple[str, str] | None:
    if role.name == "lm_head":
        return None
    return ("mxfp8", "floor") if role.name == "down" else "mxfp8"


RECIPES: list[Recipe] = [
    MXFP8BlockScaling(fp8_format=Format.HYBRID), Float8BlockScaling(use_f32_scales=True),
    DeepSeekV3(), MXFP4BlockScaling(g="mxfp4"), BlockScaling(x="mxfp4"), CustomRecipe(factory),
    overrides("mxfp4", {"lm_head": None, "*fc2": "mxfp8"}),
]  # fmt: skip


def main() -> Tensor:
    model, x = MLP(64), torch.randn(16, 64, requires_grad=True)
    for recipe in RECIPES:
        with te_mx.autocast(recipe=recipe):
            model(x).sum().backward()
    report = te_mx.convert_model(model, recipe=RECIPES[-1], filter_fn=lambda module, name: True)
    assert_type(report.skipped, dict[str, str])
    for row in te_mx.audit(model):
        assert_type(row.fprop, str)
    assert_type(te_mx.freeze_weights(model, filter_fn=lambda module, name: name == "up"), int)
    for check in (check_fp8_support, FP8GlobalStateManager.is_nvfp4_available):
        available, reason = check()
        assert_type((available, reason), tuple[bool, str])
    assert_type(FP8GlobalStateManager.with_high_precision_init_val(), bool)
    assert_type(FP8GlobalStateManager.get_fp8_recipe(), Recipe)
    quantized = te_mx.quantize(x.detach(), "mxfp8_e4m3")
    assert_type(te_mx.inspect(model, x, "mxfp4", progress=False), te_mx.InspectionReport)
    made = te_mx.gemm(te_mx.quantize(torch.randn(32, 64)), quantized, "TN")
    assert_type(te_mx.explain(m=32, n=16, k=64).kernel, str)
    return assert_type(made.out, Tensor) + quantized.dequantize().sum()


if __name__ == "__main__":
    print(main().shape)

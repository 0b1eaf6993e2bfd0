"""Recipes: which formats and rules a quantized region uses.

A recipe is a validated value. ``te_mx.autocast`` makes active what it is at that moment; the
modules read only its ``settings``, a plain tuple that ``torch.compile`` can guard on by value.
`NAMED` has the recipes that go by a name: ``te_mx.autocast(recipe="mxfp8")``."""

from te_mx.recipes.custom import CustomRecipe, Quantizer, QuantizerRole, overrides
from te_mx.recipes.float8_block import DeepSeekV3, Float8BlockScaling, MMParams
from te_mx.recipes.mxfp4 import MXFP4BlockScaling
from te_mx.recipes.mxfp8 import BlockScaling, Format, FormatRange, MXFP8BlockScaling
from te_mx.recipes.nvfp4 import NVFP4BlockScaling
from te_mx.recipes.resolve import NAMED, get_default_recipe, is_mxfp8_available, resolve_recipe
from te_mx.recipes.settings import Settings
from te_mx.recipes.values import MAX_SPREAD, Recipe, check_precision

__all__ = [
    "MAX_SPREAD", "NAMED", "BlockScaling", "CustomRecipe", "DeepSeekV3", "Float8BlockScaling",
    "Format", "FormatRange", "MMParams", "MXFP4BlockScaling", "MXFP8BlockScaling",
    "NVFP4BlockScaling", "Quantizer", "QuantizerRole", "Recipe", "Settings", "check_precision",
    "get_default_recipe", "is_mxfp8_available", "overrides", "resolve_recipe",
]  # fmt: skip


def __dir__() -> list[str]:
    return __all__

"""What scripts import from ``transformer_engine.pytorch.fp8``, the older name of
``transformer_engine.pytorch.quantization``: its names, the recipes, and checks that answer as the
functions ``is_.._available`` do with ``return_reason=True``."""

from te_mx.common.recipe import *  # noqa: F403
from te_mx.common.recipe import __all__ as _recipes
from te_mx.pytorch.quantization import *  # noqa: F403
from te_mx.pytorch.quantization import FP8GlobalStateManager
from te_mx.pytorch.quantization import __all__ as _names

__all__ = [
    *_names, *_recipes, "check_fp8_block_scaling_support", "check_fp8_support",
    "check_mxfp8_support", "check_nvfp4_support",
]  # fmt: skip

check_fp8_support = FP8GlobalStateManager.is_fp8_available
check_mxfp8_support = FP8GlobalStateManager.is_mxfp8_available
check_fp8_block_scaling_support = FP8GlobalStateManager.is_fp8_block_scaling_available
check_nvfp4_support = FP8GlobalStateManager.is_nvfp4_available

"""What scripts import from ``transformer_engine.pytorch.fp8``, the older name of
``transformer_engine.pytorch.quantization``: its names, the recipes, and checks that answer as the
functions ``is_.._available`` do with ``return_reason=True``.
"""

from te_mx.common.recipe import *  # noqa: F403
from te_mx.common.recipe import __all__ as _recipes
from te_mx.pytorch import quantization
from te_mx.pytorch.quantization import *  # noqa: F403
from te_mx.pytorch.quantization import __all__ as _names

__all__ = [
    *_names,
    *_recipes,
    "check_fp8_block_scaling_support",
    "check_fp8_support",
    "check_mxfp8_support",
    "check_nvfp4_support",
]


def check_fp8_support() -> tuple[bool, str]:
    """(whether FP8 recipes can run here, why not)."""
    return quantization.is_fp8_available(return_reason=True)  # type: ignore[return-value]


def check_mxfp8_support() -> tuple[bool, str]:
    """(whether MXFP8 can run here, why not)."""
    return quantization.is_mxfp8_available(return_reason=True)  # type: ignore[return-value]


def check_fp8_block_scaling_support() -> tuple[bool, str]:
    """(whether Float8BlockScaling can run here, why not)."""
    return quantization.is_fp8_block_scaling_available(  # type: ignore[return-value]
        return_reason=True
    )


def check_nvfp4_support() -> tuple[bool, str]:
    """(whether NVFP4 can run here, why not)."""
    return quantization.is_nvfp4_available(return_reason=True)  # type: ignore[return-value]

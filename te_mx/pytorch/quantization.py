"""Regions and questions of ``transformer_engine.pytorch.quantization``."""

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from te_mx.common.recipe import RecipeWarning
from te_mx.context.region import autocast, current_recipe, fp8_autocast
from te_mx.nn.base import preserves
from te_mx.recipe import Recipe, get_default_recipe, is_mxfp8_available, resolve_recipe
from te_mx.runtime.arguments import check_flag

__all__ = [
    "FP8GlobalStateManager", "autocast", "fp8_autocast", "fp8_model_init", "get_default_recipe",
    "is_bf16_available", "is_fp8_available", "is_fp8_block_scaling_available",
    "is_mxfp8_available", "is_nvfp4_available", "quantized_model_init",
]  # fmt: skip


def quantized_model_init(
    enabled: bool = True, recipe: Any = None, preserve_high_precision_init_val: bool = False
) -> AbstractContextManager[None]:
    """Transformer Engine makes modules inside whose weights are quantized and nothing else. te_mx
    trains from high-precision parameters, so modules made inside are as ever, and a `RecipeWarning`
    says so. For inference `te_mx.freeze_weights(model, drop_master=True)` keeps codes alone.

    Args:
        enabled: False changes nothing, and says nothing.
        recipe: one of te_mx.recipe or te_mx.common.recipe, or Transformer Engine's, of no effect.
        preserve_high_precision_init_val: weights of modules made inside have
            ``get_high_precision_init_val()``, a copy on the CPU of what they started with, and
            ``clear_high_precision_init_val()``, which frees it: what loops make master weights of.

    Raises:
        TypeError: an argument has the wrong type.
        NotImplementedError: a recipe that te_mx does not have.
    """
    check_flag("quantized_model_init: enabled", enabled)
    name = "quantized_model_init: preserve_high_precision_init_val"
    check_flag(name, preserve_high_precision_init_val)
    if enabled:
        resolve_recipe(recipe)
        warnings.warn(
            "quantized_model_init: te_mx trains from high-precision parameters and quantizes them "
            "in each forward, so modules made here keep them; te_mx.freeze_weights(model, "
            "drop_master=True) keeps codes alone, for inference",
            RecipeWarning,
            stacklevel=2,
        )
    return _preserving(enabled and preserve_high_precision_init_val)


@contextmanager
def _preserving(wanted: bool) -> Iterator[None]:
    token = preserves.set(wanted)
    try:
        yield
    finally:
        preserves.reset(token)


def fp8_model_init(
    enabled: bool = True, recipe: Any = None, preserve_high_precision_init_val: bool = False
) -> AbstractContextManager[None]:
    """`quantized_model_init` under Transformer Engine's older name."""
    return quantized_model_init(enabled, recipe, preserve_high_precision_init_val)


def _answer(name: str, yes: bool, reason: str, return_reason: bool) -> bool | tuple[bool, str]:
    check_flag(f"{name}: return_reason", return_reason)
    return (yes, "" if yes else reason) if return_reason else yes


def is_fp8_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Whether FP8 recipes can run here: always True, as `is_mxfp8_available` says of MXFP8, to
    which those with one scale a tensor are mapped (te_mx.common.recipe).

    Returns:
        True, or ``(True, "")`` with ``return_reason=True``.

    Raises:
        TypeError: `return_reason` is no bool.
    """
    return _answer("is_fp8_available", True, "", return_reason)


def is_fp8_block_scaling_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Whether te_mx.recipe.Float8BlockScaling can run here: always True; see `is_fp8_available`."""
    return _answer("is_fp8_block_scaling_available", True, "", return_reason)


def is_nvfp4_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Whether te_mx.recipe.NVFP4BlockScaling can run here: always True; see `is_fp8_available`."""
    return _answer("is_nvfp4_available", True, "", return_reason)


def is_bf16_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Whether bf16 can be computed with here: on CPUs always, on a GPU if torch says so.

    Returns:
        The answer, or ``(answer, reason)`` with ``return_reason=True``, the reason empty for True.

    Raises:
        TypeError: `return_reason` is no bool.
    """
    yes = not torch.cuda.is_available() or torch.cuda.is_bf16_supported()
    reason = "torch says that this GPU does not support bf16"
    return _answer("is_bf16_available", yes, reason, return_reason)


class _Absent(type):
    """Says why FP8GlobalStateManager has no other method of Transformer Engine's."""

    def __getattr__(cls, name: str) -> Any:
        raise AttributeError(
            f"te_mx's {cls.__name__} has no {name}: block scales follow the data of every call, so "
            "there are no histories, buffers or scales that calls share"
        )


class FP8GlobalStateManager(metaclass=_Absent):
    """What scripts ask the state of Transformer Engine for. te_mx has none beside its regions,
    which belong to a thread or task: these answer about the innermost one. Nothing is calibrated or
    reduced over processes, parameters are in high precision, and `reset` has nothing to reset."""

    @staticmethod
    def reset() -> None:
        """Changes nothing: whoever entered a region leaves it."""

    @staticmethod
    def is_fp8_enabled() -> bool:
        """Whether this is inside of an enabled region."""
        return current_recipe() is not None

    @staticmethod
    def is_fp8_calibration() -> bool:
        """False."""
        return False

    @staticmethod
    def with_fp8_parameters() -> bool:
        """False, see `quantized_model_init`."""
        return False

    @staticmethod
    def with_high_precision_init_val() -> bool:
        """Whether modules made here preserve what their weights start with."""
        return preserves.get()

    @staticmethod
    def get_fp8_recipe() -> Recipe:
        """The recipe of the region, or the default one."""
        return current_recipe() or get_default_recipe()

    @staticmethod
    def get_fp8_group() -> None:
        """None."""

    @staticmethod
    def is_fp8_available() -> tuple[bool, str]:
        """(whether FP8 recipes can run here, why not): always, so (True, "")."""
        return True, ""

    @staticmethod
    def is_mxfp8_available() -> tuple[bool, str]:
        """The same of MXFP8."""
        return True, ""

    @staticmethod
    def is_fp8_block_scaling_available() -> tuple[bool, str]:
        """The same of te_mx.recipe.Float8BlockScaling."""
        return True, ""

    @staticmethod
    def is_nvfp4_available() -> tuple[bool, str]:
        """The same of te_mx.recipe.NVFP4BlockScaling."""
        return True, ""

"""Transformer Engine's recipes by its names: ``from te_mx.common.recipe import Format, ..``.

`MXFP8BlockScaling`, `Float8BlockScaling`, `NVFP4BlockScaling` and `CustomRecipe` are te_mx's own.
`DelayedScaling` and `Float8CurrentScaling`, FP8 with one scale a tensor, are mapped to MXFP8, which
has a scale for 32 elements and needs no history, with a `RecipeWarning`."""

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

from te_mx.recipe import (
    CustomRecipe,
    Float8BlockScaling,
    Format,
    MMParams,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)
from te_mx.recipes.float8_block import QParams
from te_mx.recipes.values import check_attention
from te_mx.runtime.arguments import check_flag, check_size, is_one_of, shown

__all__ = [
    "CustomRecipe", "DelayedScaling", "Float8BlockScaling", "Float8CurrentScaling", "Format",
    "MMParams", "MXFP8BlockScaling", "NVFP4BlockScaling", "QParams", "Recipe", "RecipeWarning",
]  # fmt: skip


_FAST, _SPLIT = MMParams(use_split_accumulator=False), MMParams()


class RecipeWarning(UserWarning):
    """A recipe of Transformer Engine stands for another one in te_mx."""


class _Mapped(Recipe):
    """What stands for an MXFP8BlockScaling of the same `fp8_format` and `backward_override`."""

    fp8_format: Format
    backward_override: str | None
    fp8_dpa: bool
    fp8_mha: bool

    def _map(self) -> None:
        """The end of __post_init__: settings of the recipe that runs, and the warning, once."""
        kind = type(self).__name__
        check_attention(self)
        try:
            runs = MXFP8BlockScaling(
                fp8_format=self.fp8_format, backward_override=self.backward_override
            )
        except (TypeError, ValueError) as error:  # by the name of the class that was asked for
            raise type(error)(str(error).replace("MXFP8BlockScaling", kind)) from None
        object.__setattr__(self, "_settings", runs.settings)
        if self.__dict__.get("_told"):  # a field is set
            return
        object.__setattr__(self, "_told", True)
        warnings.warn(
            f"{kind} stands for {runs!r} in te_mx: blocks of 32 elements have scales of their own, "
            "which follow the data of every call; its other fields have no effect",
            RecipeWarning,
            stacklevel=4,
        )


@dataclasses.dataclass(unsafe_hash=True)
class DelayedScaling(_Mapped):
    """FP8 with scales of earlier steps in Transformer Engine; here `MXFP8BlockScaling`, and a
    `RecipeWarning` that says so.

    Args:
        fp8_format, backward_override: as of MXFP8BlockScaling.
        fp8_dpa, fp8_mha: must be False.
        margin, amax_history_len, amax_compute_algo, scaling_factor_compute_algo, reduce_amax: of no
            effect, because there is no history.

    Raises:
        TypeError, ValueError: a field of a wrong type or value.
        NotImplementedError: fp8_dpa or fp8_mha is set.
    """

    _kind = "delayed"

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable[..., Any] = "max"
    scaling_factor_compute_algo: Callable[..., Any] | None = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    def __post_init__(self) -> None:
        if type(self.margin) is not int:
            raise TypeError(f"DelayedScaling.margin must be an int, got {shown(self.margin)}")
        check_size("DelayedScaling.amax_history_len", self.amax_history_len, 1)
        algorithm = self.amax_compute_algo
        if not callable(algorithm) and not is_one_of(algorithm, ("max", "most_recent")):
            raise ValueError(
                "DelayedScaling.amax_compute_algo must be 'max', 'most_recent' or a function, got "
                f"{shown(algorithm)}"
            )
        if self.scaling_factor_compute_algo is not None and not callable(
            self.scaling_factor_compute_algo
        ):
            raise TypeError(
                "DelayedScaling.scaling_factor_compute_algo must be a function or None, got "
                f"{shown(self.scaling_factor_compute_algo)}"
            )
        check_flag("DelayedScaling.reduce_amax", self.reduce_amax)
        self._map()


@dataclasses.dataclass(unsafe_hash=True)
class Float8CurrentScaling(_Mapped):
    """FP8 with one scale a tensor in Transformer Engine; here `MXFP8BlockScaling`, and a
    `RecipeWarning` that says so.

    Args:
        fp8_format, backward_override: as of MXFP8BlockScaling.
        fp8_dpa, fp8_mha: must be False.
        use_power_2_scales, fp8_gemm_fprop, fp8_gemm_dgrad, fp8_gemm_wgrad: of no effect: scales are
            powers of two, and sums fp32.

    Raises:
        TypeError, ValueError: a field of a wrong type or value.
        NotImplementedError: fp8_dpa or fp8_mha is set.
    """

    _kind = "float8_current_scaling"

    use_power_2_scales: bool = False
    fp8_format: Format = Format.HYBRID
    fp8_gemm_fprop: MMParams = _FAST
    fp8_gemm_dgrad: MMParams = _SPLIT
    fp8_gemm_wgrad: MMParams = _SPLIT
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    def __post_init__(self) -> None:
        check_flag("Float8CurrentScaling.use_power_2_scales", self.use_power_2_scales)
        for name in ("fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad"):
            if not isinstance(getattr(self, name), MMParams):
                raise TypeError(
                    f"Float8CurrentScaling.{name} must be MMParams, got "
                    f"{shown(getattr(self, name))}"
                )
        self._map()

"""Values that fields of all recipes take, and their checks."""

import copy
import dataclasses
from collections.abc import Collection
from enum import Enum
from typing import Any

from te_mx import formats
from te_mx.formats.format import every_name
from te_mx.recipes.settings import ByName, Settings
from te_mx.runtime.arguments import check_default, check_flag, check_one_of, shown

PRECISIONS = ("adaptive", "exact", "invariant", "fp8")
MAX_SPREAD = 8
BACKWARD_OVERRIDES = (None, "high_precision", "dequantized")
FLAGS = ("wgrad_with_hp", "one_copy_weights", "split_k", "keep_weight_columns")


class Recipe:
    """What te_mx.autocast takes: a validated value with `settings`.

    Fields may be set (``recipe.backward_override = "dequantized"``): the recipe is then checked as
    a new one is, and what is refused changes nothing. Whoever was given the recipe before, an open
    region, a model it is bound to, goes on with what it was; regions made later take what it is.
    Equality and hash are those of the fields, so one that is a key stays as it is.

    Code for Transformer Engine asks a recipe, or its class, what kind it is: `mxfp8()`,
    `float8_block_scaling()`, `delayed()` and so on. A recipe that Transformer Engine does not have
    is none of them."""

    _settings: Settings | ByName  # made once: look-ups by them are part of every call
    _kind = ""  # the one of these that is true
    _always: tuple[str, ...] = ()  # fields that repr shows at their defaults too

    def __setattr__(self, name: str, value: Any) -> None:
        own = self.__dict__
        being_made = "_settings" not in own
        if being_made or isinstance(getattr(type(self), name, None), property):
            object.__setattr__(self, name, value)
            return
        fields = [field.name for field in dataclasses.fields(self)]  # type: ignore[arg-type]
        if name not in fields:
            raise AttributeError(
                f"{type(self).__name__} has no field {name}; it has {', '.join(fields)}"
            )
        made = copy.copy(self)
        del made.__dict__["_settings"]
        made.__dict__[name] = value
        made.__post_init__()  # type: ignore[attr-defined]
        own.update(made.__dict__)

    def __repr__(self) -> str:
        defaults = {field.name: field.default for field in dataclasses.fields(self)}  # type: ignore[arg-type]
        changed = [name for name, value in defaults.items() if getattr(self, name) != value]
        names = dict.fromkeys((*self._always, *changed))
        said = {name: getattr(self, name) for name in names}
        words = [f"{n}={v.name if isinstance(v, Enum) else repr(v)}" for n, v in said.items()]
        return f"{type(self).__name__}({', '.join(words)})"

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__}: fields cannot be deleted, got {name}")

    def __copy__(self) -> "Recipe":
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__)
        return made

    @property
    def settings(self) -> Settings:
        """The recipe as the plain tuple that modules and ``torch.compile`` guards read.

        Raises:
            ValueError: a CustomRecipe, which has others for each layer.
        """
        if isinstance(self._settings, ByName):
            raise ValueError(
                f"{type(self).__name__} says formats by layer, and here no layer is meant: pass "
                "that of one, recipe.of(name)"
            )
        return self._settings

    @property
    def chosen(self) -> Settings | ByName:
        """`settings`, or what stands for those of each layer."""
        return self._settings

    @classmethod
    def mxfp8(cls) -> bool:
        """Whether this is MXFP8BlockScaling."""
        return cls._kind == "mxfp8"

    @classmethod
    def float8_block_scaling(cls) -> bool:
        """Whether this is Float8BlockScaling."""
        return cls._kind == "float8_block_scaling"

    @classmethod
    def delayed(cls) -> bool:
        """Whether this is DelayedScaling (te_mx.common.recipe)."""
        return cls._kind == "delayed"

    @classmethod
    def float8_current_scaling(cls) -> bool:
        """Whether this is Float8CurrentScaling (te_mx.common.recipe)."""
        return cls._kind == "float8_current_scaling"

    @classmethod
    def float8_per_tensor_scaling(cls) -> bool:
        """Whether this is one of DelayedScaling and Float8CurrentScaling."""
        return cls.delayed() or cls.float8_current_scaling()

    @classmethod
    def nvfp4(cls) -> bool:
        """Whether this is NVFP4BlockScaling."""
        return cls._kind == "nvfp4"

    @classmethod
    def custom(cls) -> bool:
        """Whether this is CustomRecipe."""
        return cls._kind == "custom"


def check_precision(precision: str, alignment_spread: int, owner: str = "") -> None:
    """Raise ValueError or TypeError unless both are values that mean something."""
    check_one_of(f"{owner}precision", precision, PRECISIONS)
    if type(alignment_spread) is not int:
        raise TypeError(f"{owner}alignment_spread must be an int, got {shown(alignment_spread)}")
    if not 0 <= alignment_spread <= MAX_SPREAD:
        raise ValueError(
            f"{owner}alignment_spread must be 0 to {MAX_SPREAD} (powers of two that neighbouring "
            f"scales may differ by), got {alignment_spread}"
        )


def check_common(recipe: Any) -> None:
    """Check the fields that every recipe has: precision, alignment_spread, backward_override and
    the flags. Raises ValueError or TypeError."""
    owner = type(recipe).__name__
    check_precision(recipe.precision, recipe.alignment_spread, f"{owner}.")
    check_one_of(f"{owner}.backward_override", recipe.backward_override, BACKWARD_OVERRIDES)
    for name in FLAGS:
        check_flag(f"{owner}.{name}", getattr(recipe, name))
    if recipe.precision == "invariant" and recipe.split_k:
        raise ValueError(
            f"{owner}.split_k cuts K by the number of rows, which precision 'invariant' forbids; "
            "leave one of them away"
        )
    if recipe.wgrad_with_hp and recipe.backward_override is not None:
        raise ValueError(
            f"{owner}.backward_override={recipe.backward_override!r} already says how wgrad runs; "
            "leave wgrad_with_hp away"
        )


def check_attention(recipe: Any) -> None:
    """Raise NotImplementedError where a recipe asks for FP8 in attention."""
    for name in ("fp8_dpa", "fp8_mha"):
        label = f"{type(recipe).__name__}.{name}"
        reason = "attention runs in the dtype of its inputs"
        check_default(label, getattr(recipe, name), False, reason)


def format_of(name: str, given: Any, among: Collection[str] | None = None) -> str:
    """The name of a registered format, which a field of a recipe gives by name or as an object.
    Raises ValueError for what is none, or none of some, or has a transform."""
    try:
        found = formats.get(given.name if isinstance(given, formats.Format) else given)
    except ValueError:
        found = None
    known = every_name() if among is None else among
    if found is None or found.name not in known or not (found is given or isinstance(given, str)):
        raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {shown(given)}")
    return found.name


def why_not_invariant(x: str) -> str:
    """Why precision "invariant" does not go with inputs in a format, or an empty string."""
    fmt = formats.get(x)
    if not fmt.tensor_scaled or fmt.tensor_scale_shape(1):
        return ""
    return (
        f"inputs in {x} have one tensor scale, so that a row depends on its neighbours, and "
        "precision is 'invariant'; give each row a scale (nvfp4_rows, row_scaled_activation=True)"
    )


def settings_of(recipe: Any, x: str, w: str, g: str) -> Settings:
    """The settings of a recipe with these formats, each of a role. Raises ValueError where rows of
    inputs would depend on their neighbours under precision "invariant"."""
    if recipe.precision == "invariant" and (why := why_not_invariant(x)):
        raise ValueError(f"{type(recipe).__name__}: {why}")
    return Settings(
        x, w, g, recipe.scale_rule, recipe.precision, recipe.alignment_spread,
        recipe.backward_override, recipe.wgrad_with_hp, recipe.one_copy_weights, recipe.split_k,
        recipe.keep_weight_columns,
    )  # fmt: skip

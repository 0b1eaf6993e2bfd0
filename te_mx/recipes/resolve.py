"""What recipe arguments mean: te_mx's, Transformer Engine's, None."""

import dataclasses
from enum import Enum
from typing import Any

from te_mx.recipes import float8_block
from te_mx.recipes.float8_block import DeepSeekV3, Float8BlockScaling
from te_mx.recipes.mxfp4 import MXFP4BlockScaling
from te_mx.recipes.mxfp8 import Format, MXFP8BlockScaling, is_transformer_engines
from te_mx.recipes.nvfp4 import NVFP4BlockScaling
from te_mx.recipes.values import Recipe
from te_mx.runtime.arguments import check_flag, shown

_DEFAULT = MXFP8BlockScaling()  # handed out to nobody who might change it
DEFAULT_SETTINGS = _DEFAULT.settings
NAMED: dict[str, Recipe] = {
    "mxfp8": _DEFAULT, "mxfp8-hybrid": MXFP8BlockScaling(fp8_format=Format.HYBRID),
    "mxfp8-floor": MXFP8BlockScaling(scale_rule="floor"),
    "mxfp8-exact": MXFP8BlockScaling(precision="exact"),
    "mxfp8-invariant": MXFP8BlockScaling(precision="invariant"),
    "float8_block": Float8BlockScaling(), "deepseek_v3": DeepSeekV3(), "mxfp4": MXFP4BlockScaling(),
    "mxfp4_all": MXFP4BlockScaling(g="mxfp4"), "nvfp4": NVFP4BlockScaling(),
}  # fmt: skip
# Recipes of Transformer Engine by name: te_mx's, and its fields. Constants, because Dynamo does not
# trace dataclasses.fields of a class.
_OURS = {
    kind.__name__: (kind, tuple(field.name for field in dataclasses.fields(kind)))
    for kind in (MXFP8BlockScaling, Float8BlockScaling, NVFP4BlockScaling)
}


def get_default_recipe() -> MXFP8BlockScaling:
    """A recipe like that of `te_mx.autocast` when none is given: E4M3 everywhere, scale rule
    "rceil". Another one in every call."""
    return MXFP8BlockScaling()


def resolve_recipe(recipe: Any) -> Recipe:
    """A recipe argument as a te_mx recipe; None is the default recipe, a name one of these:

    ``"mxfp8"``         `MXFP8BlockScaling()`, the default; ``"mxfp8-hybrid"`` with E5M2 gradients,
                        ``"mxfp8-floor"`` with the scale rule of the OCP text, ``"mxfp8-exact"``
                        and ``"mxfp8-invariant"`` with that ``precision``
    ``"float8_block"``  `Float8BlockScaling()`; ``"deepseek_v3"`` is `DeepSeekV3()`
    ``"mxfp4"``         `MXFP4BlockScaling()`, backward in MXFP8; ``"mxfp4_all"`` with ``g="mxfp4"``
    ``"nvfp4"``         `NVFP4BlockScaling()`, Transformer Engine's

    Whoever keeps the result takes a copy, which nobody else changes.

    Transformer Engine's ``MXFP8BlockScaling``, ``Float8BlockScaling`` and ``NVFP4BlockScaling`` are
    accepted and mean the same. They are known by name: nothing is imported.

    Raises:
        TypeError: `recipe` is neither a recipe object nor a name.
        ValueError: a name that is not among these.
        NotImplementedError: a recipe of Transformer Engine, or a field, that te_mx does not have.
    """
    if recipe is None:
        return _DEFAULT
    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, str):
        if recipe not in NAMED:
            known = ", ".join(NAMED)
            raise ValueError(
                f"recipe must be one of {known}, or a recipe object, got {shown(recipe)}"
            )
        return NAMED[recipe]
    if is_transformer_engines(recipe) and not isinstance(recipe, Enum):
        return _translated(recipe)
    is_kind = isinstance(recipe, type) and (issubclass(recipe, Recipe) or recipe.__name__ in _OURS)
    uncalled = is_kind or recipe is DeepSeekV3
    hint = f" (pass an instance: {recipe.__name__}())" if uncalled else ""
    raise TypeError(
        "recipe must be one of te_mx.recipe or its name, Transformer Engine's MXFP8BlockScaling, "
        f"Float8BlockScaling or NVFP4BlockScaling, or None, got {shown(recipe)} of type "
        f"{type(recipe).__name__}{hint}"
    )


def _translated(recipe: Any) -> Recipe:
    """The te_mx recipe that means what a recipe of Transformer Engine means there."""
    kind = type(recipe).__name__
    known = [base.__name__ for base in type(recipe).__mro__ if base.__name__ in _OURS]
    if not known:
        raise NotImplementedError(
            f"the recipe {kind} of Transformer Engine is not supported: te_mx runs MXFP8, "
            "blockwise FP8 and NVFP4; use MXFP8BlockScaling() or Float8BlockScaling() of "
            "Transformer Engine or of te_mx"
        )
    ours, names = _OURS[known[0]]
    given: dict[str, Any] = {}
    for field in dataclasses.fields(recipe):
        value = getattr(recipe, field.name)
        if field.name in names:
            given[field.name] = value
        elif value != field.default:  # a newer Transformer Engine: its meaning is not known here
            raise NotImplementedError(
                f"{kind}.{field.name}={shown(value)} of Transformer Engine is not supported, only "
                f"{field.default!r}"
            )
    if ours is Float8BlockScaling:
        given |= float8_block.fields_of(recipe)
    return ours(**given)


def is_mxfp8_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Whether MXFP8 modules can run here: always True, as every device has the reference backend.

    Whether they run *fast* is another question: see `te_mx.explain`.

    Returns:
        True, or ``(True, "")`` with ``return_reason=True`` (Transformer Engine's signature).
    """
    check_flag("return_reason", return_reason)
    return (True, "") if return_reason else True

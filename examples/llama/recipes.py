"""The recipes that a study of losses compares: those with a name in te_mx, and published cures for
what MXFP4 costs, as recipes whose layers or steps differ."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from te_mx.recipe import NAMED, CustomRecipe, MXFP4BlockScaling, QuantizerRole, overrides


@dataclass(frozen=True)
class Plan:
    """What te_mx.autocast is given: `recipe`, and from a share of the steps on `final`, if any."""

    recipe: Any
    final: Any = None
    final_from: float = 1.0

    def now(self, done: int, steps: int) -> Any:
        ends = self.final is not None and done >= self.final_from * steps
        return self.final if ends else self.recipe


FINAL_SHARE = 0.1  # of the steps, of "final"


def _gradients_of_inputs(role: QuantizerRole) -> Any:
    """MXFP4 in fprop and, after a transform, in wgrad, and MXFP8 in dgrad. A rule of gradients is
    that of both directions, and codes of 8 bits are rounded to nearest."""
    turned = f"mxfp4+rht32:{MXFP4BlockScaling().hadamard_signs:#010x}"
    if role.tensor_type == "weight":
        return ("mxfp4", "", "mxfp8_e4m3")
    return ("mxfp4" if role.tensor_type == "input" else "mxfp8_e4m3", "", turned)


def _even(recipe: MXFP4BlockScaling) -> MXFP4BlockScaling:
    return MXFP4BlockScaling(g=recipe.g, scale_rule="even")


def _ends(layers: int) -> dict[str, Any]:
    return _first(1, None) | {f"*layers.{layers - 1}.*": None}


def _first(count: int, recipe: Any) -> dict[str, Any]:
    return {f"*layers.{i}.*": recipe for i in range(count)}


# What is changed of MXFP4 forward ("mxfp4-..") and of MXFP4 in all three GEMMs ("mxfp4_all-.."); of
# the recipe, its name and the number of layers.
_CURES: dict[str, Callable[[MXFP4BlockScaling, str, int], Plan]] = {
    # fc2, whose input has the outliers of the activation, in MXFP8
    "fc2": lambda _, base, layers: Plan(overrides(base, {"*down_proj": "mxfp8"})),
    # the first and the last layer in high precision
    "ends": lambda _, base, layers: Plan(overrides(base, _ends(layers))),
    # MXFP4 only from a quarter of the layers on, MXFP8 before
    "later": lambda _, base, layers: Plan(overrides(base, _first(max(1, layers // 4), "mxfp8"))),
    # the last tenth of the steps in MXFP8
    "final": lambda _, base, layers: Plan(base, "mxfp8", 1 - FINAL_SHARE),
    # scales that are not rounded up
    "even": lambda recipe, base, layers: Plan(_even(recipe)),
    # "even", "ends" and "fc2" at once
    "sum": lambda recipe, base, layers: Plan(
        overrides(_even(recipe), {**_ends(layers), "*down_proj": "mxfp8"})
    ),
}
_ONLY_ALL: dict[str, Callable[[], Plan]] = {
    "mxfp4_all-dgrad8": lambda: Plan(CustomRecipe(_gradients_of_inputs)),
    "mxfp4_all-rht16": lambda: Plan(MXFP4BlockScaling(g="mxfp4", hadamard=16)),
    "mxfp4_all-rht0": lambda: Plan(MXFP4BlockScaling(g="mxfp4", hadamard=0)),
}
BASES = ("mxfp4", "mxfp4_all")
CURES = (*(f"{base}-{cure}" for base in BASES for cure in _CURES), *_ONLY_ALL)
ALL = (*NAMED, *CURES)
AGAIN = "again"  # no recipe: the plain run from weights a rounding off, how far chance goes


def plan_of(name: str, layers: int) -> Plan:
    """What one of ALL means for a model of so many layers."""
    if name in _ONLY_ALL:
        return _ONLY_ALL[name]()
    base, dash, cure = name.partition("-")
    if dash and cure in _CURES:
        recipe: Any = NAMED[base]
        return _CURES[cure](recipe, base, layers)
    return Plan(name)


def chosen(words: str) -> list[str]:
    """What a list names: "all" are the recipes of te_mx, "cures" the others; AGAIN may be in it.

    Raises ValueError for a word that is none.
    """
    found: dict[str, None] = {}
    for word in words.split(","):
        if word not in ("all", "cures", AGAIN, *ALL):
            raise ValueError(f"recipes are all, cures, {AGAIN}, {', '.join(ALL)}, got {word!r}")
        found |= dict.fromkeys({"all": tuple(NAMED), "cures": CURES}.get(word, (word,)))
    return list(found)

"""In which formats a frozen module runs: what te_mx.freeze_weights fixes for all regions."""

from typing import Any, NamedTuple

from te_mx import formats
from te_mx.dispatch.explain import why_no_product
from te_mx.formats.format import every_name
from te_mx.recipes.settings import Settings
from te_mx.recipes.values import why_not_invariant
from te_mx.runtime.arguments import shown

WEIGHT_ONLY = "bf16"  # as activations: inputs are not quantized


class Fixed(NamedTuple):
    """What stays as it was frozen inside of a region: w, the format of the weights; x, that and all
    other formats and rules. weight_only: inputs are not quantized."""

    w: bool = False
    x: bool = False
    weight_only: bool = False


NOTHING = Fixed()
# What says how a device multiplies and what backward does, which no format depends on.
_OF_REGIONS = (
    "precision", "spread", "backward", "wgrad_hp", "one_copy", "split_k", "keep_columns"
)  # fmt: skip


def fixed_by(
    settings: Settings, fmt: Any, activations: Any, before: Fixed, codes: str = ""
) -> tuple[Settings, Fixed]:
    """Settings with these formats, None for those of the settings, and what that fixes beside what
    was fixed before. `codes`: weights are codes "then" or are so "now", and have a rule of their
    own (Settings.weight_rule).

    Raises:
        ValueError: no such format, one that does not know the scale rule of the settings, or two
            formats that no kernel multiplies.
    """
    if fmt is not None:
        settings, before = settings._replace(w=_name("fmt", fmt), w_col=""), before._replace(w=True)
    if isinstance(activations, str) and activations == WEIGHT_ONLY:
        made = settings if codes else _checked(settings, "w")
        return made, before._replace(x=False, weight_only=True)
    if activations is not None:
        settings = settings._replace(x=_name("activations", activations), x_col="")
        before = before._replace(x=True, weight_only=False)
        if codes:
            settings = _with_rule_of_inputs(settings)
    settings = _checked(settings, *(("x",) if codes else ("x", "w")))
    if settings.precision == "invariant" and (neighbours := why_not_invariant(settings.x)):
        raise ValueError(neighbours)
    if why := why_no_product(settings.x, settings.w):
        raise ValueError(f"no kernel multiplies {settings.x!r} with {settings.w!r}: {why}")
    return settings, before


def _with_rule_of_inputs(settings: Settings) -> Settings:
    """Settings of a module of codes, whose scale rule is one that the format of inputs knows."""
    scaling = formats.get(settings.x).scaling
    if scaling.knows(settings.scale_rule):
        return settings
    return settings._replace(scale_rule=scaling.rules[0], g_rule=settings.gradient_rule)


def inside(settings: Settings, mine: Settings, fixed: Fixed, dropped: bool) -> Settings:
    """The settings of a region for a module that was frozen with `mine`. Without masters there are
    codes of one format only, whatever was fixed.

    Raises:
        ValueError: kept masters cannot be quantized to the fixed format by the region's rule.
    """
    if fixed.x:
        return mine._replace(**{name: getattr(settings, name) for name in _OF_REGIONS})
    if fixed.w or dropped:
        made = settings._replace(w=mine.w, w_col=mine.w_col)
        if not dropped and made.weight_rule != made.scale_rule:
            raise ValueError(
                f"its weight is frozen to {mine.w}, which has the scale rules "
                f"{formats.get(mine.w).scaling.shown_rules}, and the recipe that runs has "
                f"{settings.scale_rule!r}; run a recipe with one of them, or freeze with "
                "drop_master=True, whose codes have a rule of their own"
            )
        return made
    return settings


def _name(name: str, given: Any) -> str:
    try:
        found = formats.get(given).name
    except ValueError:
        found = ""
    if found in every_name():
        return found
    more = f" or {WEIGHT_ONLY!r}" if name == "activations" else ""
    raise ValueError(
        f"{name} must be None, one of {', '.join(every_name())}{more}, got {shown(given)}"
    )


def _checked(settings: Settings, *roles: str) -> Settings:
    """The settings, if they can quantize and multiply these roles."""
    for role in roles:
        fmt = formats.get(getattr(settings, role))
        if not fmt.scaling.knows(settings.scale_rule):
            raise ValueError(
                f"{fmt.name} has the scale rules {fmt.scaling.shown_rules}, not that of the "
                f"recipe, {settings.scale_rule!r}; pass a recipe= with one of them"
                + (", or drop_master=True" if role == "w" else "")
            )
    return settings

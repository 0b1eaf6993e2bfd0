"""BlockScaling: any registered format in any role."""

from __future__ import annotations

import dataclasses

from te_mx import formats
from te_mx.dispatch.explain import why_no_product
from te_mx.recipes.values import MAX_SPREAD, Recipe, check_common, format_of, settings_of
from te_mx.runtime.arguments import shown

ROLES = ("x", "w", "g")


@dataclasses.dataclass(unsafe_hash=True, repr=False)
class BlockScaling(Recipe):
    """A format for each role: inputs x, weights w and output gradients g.

    The three GEMMs of a layer multiply x with w (fprop), g with w (dgrad) and g with x (wgrad).
    Where a device has no native kernel for a pair, the plain torch reference runs, with a warning;
    `te_mx.explain` says why.

    Args:
        x, w, g: names of te_mx.formats.names(), their short names, or te_mx.formats.Format objects.
        scale_rule: a rule that all three formats have: "rceil", "floor" or "even" for MX formats,
            "pow2" or "fp32" for blockwise FP8.
        backward_override, precision, alignment_spread, wgrad_with_hp, one_copy_weights, split_k,
            keep_weight_columns: as of `MXFP8BlockScaling`.

    Raises:
        TypeError: a field has the wrong type.
        ValueError: no such format or rule, or no kernel multiplies two of the formats.
    """

    _always = ROLES

    x: str = "mxfp8_e4m3"
    w: str = "mxfp8_e4m3"
    g: str = "mxfp8_e4m3"
    scale_rule: str = "rceil"
    backward_override: str | None = None
    precision: str = "adaptive"
    alignment_spread: int = MAX_SPREAD
    wgrad_with_hp: bool = False
    one_copy_weights: bool = False
    split_k: bool = False
    keep_weight_columns: bool = False

    def __post_init__(self) -> None:
        for role in ROLES:
            fmt = formats.get(format_of(f"BlockScaling.{role}", getattr(self, role)))
            if not fmt.scaling.knows(self.scale_rule):
                raise ValueError(
                    f"BlockScaling.scale_rule must be one of {fmt.scaling.shown_rules} for "
                    f"{role}={fmt.name!r}, got {shown(self.scale_rule)}"
                )
            object.__setattr__(self, role, fmt.name)
        check_common(self)
        for one, other in (("x", "w"), ("g", "w"), ("g", "x")):
            why = why_no_product(getattr(self, one), getattr(self, other))
            if why is not None:
                raise ValueError(
                    f"BlockScaling: no kernel multiplies {one}={getattr(self, one)!r} with "
                    f"{other}={getattr(self, other)!r}: {why}"
                )

        object.__setattr__(self, "_settings", settings_of(self, self.x, self.w, self.g))

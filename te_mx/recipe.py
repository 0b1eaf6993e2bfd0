"""Recipes: which formats and rules an MXFP8 region uses.

A recipe is an immutable, validated value. ``te_mx.autocast`` makes one active; the modules read
only its ``settings``, a plain tuple of strings that ``torch.compile`` can guard on by value.
"""

from __future__ import annotations

import dataclasses
from enum import Enum
from typing import Any, NamedTuple

from te_mx.arguments import check_flag, is_one_of, shown

SCALE_RULES = ("rceil", "floor")
PRECISIONS = ("adaptive", "exact")
MAX_SPREAD = 8
BACKWARD_OVERRIDES = (None, "high_precision", "dequantized")


class FormatRange(NamedTuple):
    """Value of a `Format` member: element formats and their largest values, forward and
    backward."""

    max_fwd: float
    max_bwd: float
    fwd: str
    bwd: str


class Format(Enum):
    """Element formats of the operands; ``.value.max_fwd`` and ``.value.max_bwd`` are the largest
    values.

    ============  ====================  ==============
    member        inputs and weights    gradients
    ============  ====================  ==============
    ``E4M3``      E4M3 (448)            E4M3 (448)
    ``E5M2``      E5M2 (57344)          E5M2 (57344)
    ``HYBRID``    E4M3 (448)            E5M2 (57344)
    ============  ====================  ==============
    """

    E4M3 = FormatRange(448.0, 448.0, "e4m3", "e4m3")
    E5M2 = FormatRange(57344.0, 57344.0, "e5m2", "e5m2")
    HYBRID = FormatRange(448.0, 57344.0, "e4m3", "e5m2")


class Settings(NamedTuple):
    """What the modules need to know of a recipe: element formats "e4m3" or "e5m2", scale rule
    "rceil" or "floor", precision "adaptive" or "exact" and the alignment spread that goes with the
    first; backward_override, wgrad_with_hp, one_copy_weights and split_k."""

    fwd_fmt: str
    bwd_fmt: str
    scale_rule: str
    precision: str = "adaptive"
    spread: int = MAX_SPREAD
    backward: str | None = None
    wgrad_hp: bool = False
    one_copy: bool = False
    split_k: bool = False


@dataclasses.dataclass(frozen=True, repr=False)
class MXFP8BlockScaling:
    """MXFP8: blocks of 32 elements along the reduction dimension share one E8M0 scale.

    Field names are those of Transformer Engine where it has them.

    Args:
        fp8_format: `Format.E4M3` (default) or `Format.HYBRID` (gradients in E5M2), te_mx's or
            Transformer Engine's. `Format.E5M2` is rejected: two mantissa bits are too few for
            inputs and weights.
        scale_rule: how a block's scale follows from its largest magnitude ``amax``, with ``max``
            the format's largest value and ``emax`` its exponent. ``"rceil"``: ``2^ceil(log2(amax /
            max))``, nothing finite saturates. ``"floor"`` (the OCP text): ``2^(floor(log2(amax)) -
            emax)``, the largest elements may saturate.
        precision: how GPUs without block-scaled tensor cores multiply (sm_90; CPUs are always
            exact). ``"adaptive"``: on FP8 tensor cores, after scales of neighbouring blocks were
            aligned where they differ by at most ``2^alignment_spread``; an element moves by at most
            ``2^(alignment_spread - 17.8)`` of the largest of its block (E4M3). ``"exact"``:
            products of the exact values in bf16, at about bf16's speed.
        alignment_spread: 0 to 8; smaller aligns less, which is more exact and slower.
        margin: must be 0 (block scales follow the data; there is no history to keep a margin for).
        fp8_dpa, fp8_mha: must be False; te_mx has no attention module.
        backward_override: None runs the backward GEMMs in MXFP8. ``"high_precision"`` keeps the
            input and the weight as they are and runs dgrad and wgrad on them, in the dtype of the
            output: the gradients of a plain nn.Linear with that input. What fused modules compute
            around their linear steps (normalization, activation) has the gradients of torch up to
            rounding: te_mx sums them in fp32. ``"dequantized"`` keeps the rowwise codes of input
            and weight, 1.03 bytes an element, and multiplies what these decode to. The output
            gradient is not quantized in either.
        enable_2d_quantization: must be False; weights have 1x32 blocks.
        wgrad_with_hp: run wgrad alone in high precision: the input is kept as it is, and only dgrad
            is MXFP8. Goes with ``backward_override=None``.
        one_copy_weights: quantize weights rowwise only and derive the columnwise operand of dgrad
            from those codes when backward needs it. A weight that is kept (is_first_microbatch,
            te_mx.freeze_weights) then takes 1.03 bytes a parameter instead of 2.06. dgrad sees the
            values of fprop, but for elements far below the largest of their column block
            (docs/numerics.md).
        split_k: let GEMMs at precision ``"adaptive"`` on Hopper GPUs cut K into parts where D is
            too small to fill the chip (``te_mx.explain`` says into how many). Sums then have
            another order, which depends on the sizes and the GPU, so that a layer's bits may differ
            from those of the same layer in a `te_mx.GroupedLinear`, which never cuts. No effect
            elsewhere.

    Raises:
        TypeError: a field has the wrong type.
        ValueError: a field has a value that means nothing.
        NotImplementedError: a field asks for something that te_mx does not do.
    """

    margin: int = 0
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None
    enable_2d_quantization: bool = False
    scale_rule: str = "rceil"
    precision: str = "adaptive"
    alignment_spread: int = MAX_SPREAD
    wgrad_with_hp: bool = False
    one_copy_weights: bool = False
    split_k: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.fp8_format, Format) and _is_transformer_engines(self.fp8_format):
            object.__setattr__(self, "fp8_format", _our_format(self.fp8_format))
        if not isinstance(self.fp8_format, Format):
            raise TypeError(
                "MXFP8BlockScaling.fp8_format must be a te_mx.recipe.Format, got "
                f"{shown(self.fp8_format)}; use Format.E4M3 or Format.HYBRID"
            )
        if self.fp8_format is Format.E5M2:
            raise ValueError(
                "MXFP8BlockScaling.fp8_format=Format.E5M2 is not supported: inputs and weights "
                "need the mantissa of E4M3; use Format.E4M3, or Format.HYBRID for gradients in "
                "E5M2"
            )
        if not is_one_of(self.scale_rule, SCALE_RULES):
            raise ValueError(
                "MXFP8BlockScaling.scale_rule must be one of "
                f"{', '.join(map(repr, SCALE_RULES))}, got {shown(self.scale_rule)}"
            )
        check_precision(self.precision, self.alignment_spread, "MXFP8BlockScaling.")
        if not is_one_of(self.backward_override, BACKWARD_OVERRIDES):
            raise ValueError(
                "MXFP8BlockScaling.backward_override must be None, 'high_precision' or "
                f"'dequantized', got {shown(self.backward_override)}"
            )
        for name in ("wgrad_with_hp", "one_copy_weights", "split_k"):
            check_flag(f"MXFP8BlockScaling.{name}", getattr(self, name))
        if self.wgrad_with_hp and self.backward_override is not None:
            raise ValueError(
                f"MXFP8BlockScaling.backward_override={self.backward_override!r} already says how "
                "wgrad runs; leave wgrad_with_hp away"
            )
        for name, plain, remedy in _ONLY_DEFAULT:
            value = getattr(self, name)
            if type(value) is not type(plain) or value != plain:
                raise NotImplementedError(
                    f"MXFP8BlockScaling.{name}={shown(value)} is not supported, only "
                    f"{plain!r}: {remedy}"
                )

    @property
    def settings(self) -> Settings:
        """The recipe as the plain tuple that modules and ``torch.compile`` guards read."""
        formats = self.fp8_format.value
        return Settings(
            formats.fwd, formats.bwd, self.scale_rule, self.precision, self.alignment_spread,
            self.backward_override, self.wgrad_with_hp, self.one_copy_weights, self.split_k,
        )  # fmt: skip

    def __repr__(self) -> str:
        changed = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in dataclasses.fields(self)
            if field.name not in ("fp8_format", "scale_rule")
            and getattr(self, field.name) != field.default
        ]
        shown = [f"fp8_format={self.fp8_format.name}", f"scale_rule={self.scale_rule!r}", *changed]
        return f"MXFP8BlockScaling({', '.join(shown)})"


def check_precision(precision: str, alignment_spread: int, owner: str = "") -> None:
    """Raise ValueError or TypeError unless both are values that mean something."""
    if not is_one_of(precision, PRECISIONS):
        raise ValueError(
            f"{owner}precision must be one of {', '.join(map(repr, PRECISIONS))}, got "
            f"{shown(precision)}"
        )
    if type(alignment_spread) is not int:
        raise TypeError(f"{owner}alignment_spread must be an int, got {shown(alignment_spread)}")
    if not 0 <= alignment_spread <= MAX_SPREAD:
        raise ValueError(
            f"{owner}alignment_spread must be 0 to {MAX_SPREAD} (powers of two that neighbouring "
            f"scales may differ by), got {alignment_spread}"
        )


_ONLY_DEFAULT: tuple[tuple[str, Any, str], ...] = (
    ("margin", 0, "block scales follow the data of every call"),
    ("fp8_dpa", False, "te_mx has no attention module"),
    ("fp8_mha", False, "te_mx has no attention module"),
    ("enable_2d_quantization", False, "weights have blocks of 1x32"),
)

_DEFAULT = MXFP8BlockScaling()
# A constant, because Dynamo does not trace dataclasses.fields of a class.
_FIELDS = tuple(field.name for field in dataclasses.fields(MXFP8BlockScaling))


def get_default_recipe() -> MXFP8BlockScaling:
    """The recipe of `te_mx.autocast` when none is given: E4M3 everywhere, scale rule "rceil"."""
    return _DEFAULT


def resolve_recipe(recipe: Any) -> MXFP8BlockScaling:
    """The one place where a recipe argument becomes a te_mx recipe; None is the default recipe.

    Transformer Engine's ``MXFP8BlockScaling`` is accepted and means the same. It is known by its
    name, so that nothing of Transformer Engine is imported.

    Raises:
        TypeError: `recipe` is not a recipe object.
        NotImplementedError: a recipe of Transformer Engine for another format, or with a field that
            te_mx does not do.
    """
    if recipe is None:
        return _DEFAULT
    if isinstance(recipe, MXFP8BlockScaling):
        return recipe
    if _is_transformer_engines(recipe) and not isinstance(recipe, Enum):
        return _translated(recipe)
    hint = " (pass an instance: MXFP8BlockScaling())" if isinstance(recipe, type) else ""
    raise TypeError(
        "recipe must be a te_mx.recipe.MXFP8BlockScaling, Transformer Engine's, or None, got "
        f"{shown(recipe)} of type {type(recipe).__name__}{hint}"
    )


def _is_transformer_engines(value: Any) -> bool:
    """Whether the class of a value, or one that it derives from, is Transformer Engine's."""
    return any(
        kind.__module__.partition(".")[0] == "transformer_engine" for kind in type(value).__mro__
    )


def _our_format(theirs: Any) -> Format:
    """The member of the same name."""
    if theirs.name not in Format.__members__:
        raise NotImplementedError(
            f"fp8_format={theirs} of Transformer Engine is not supported; use E4M3 or HYBRID"
        )
    return Format[theirs.name]


def _translated(recipe: Any) -> MXFP8BlockScaling:
    """The te_mx recipe that means what a recipe of Transformer Engine means there."""
    kind = type(recipe).__name__
    if all(base.__name__ != "MXFP8BlockScaling" for base in type(recipe).__mro__):
        raise NotImplementedError(
            f"the recipe {kind} of Transformer Engine is not supported: te_mx runs MXFP8 only; "
            "use MXFP8BlockScaling() of Transformer Engine or of te_mx"
        )
    given: dict[str, Any] = {}
    for field in dataclasses.fields(recipe):
        value = getattr(recipe, field.name)
        if field.name in _FIELDS:
            given[field.name] = value
        elif value != field.default:  # a newer Transformer Engine: its meaning is not known here
            raise NotImplementedError(
                f"{kind}.{field.name}={shown(value)} of Transformer Engine is not supported, only "
                f"{field.default!r}"
            )
    return MXFP8BlockScaling(**given)


def is_mxfp8_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Whether MXFP8 modules can run here: always True, because every device has at least the
    reference backend.

    Whether they run *fast* is another question: see `te_mx.explain`.

    Returns:
        True, or ``(True, "")`` with ``return_reason=True`` (Transformer Engine's signature).
    """
    check_flag("return_reason", return_reason)
    return (True, "") if return_reason else True

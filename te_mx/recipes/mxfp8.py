"""MXFP8 recipes, with the fields of Transformer Engine."""

import dataclasses
from enum import Enum
from typing import Any, NamedTuple

from te_mx import formats
from te_mx.dispatch.explain import why_no_product
from te_mx.recipes.values import (
    MAX_SPREAD,
    Recipe,
    check_attention,
    check_common,
    format_of,
    settings_of,
)
from te_mx.runtime.arguments import check_default, check_one_of, shown

# ----------------------------------------------------------------------------------- block scaling
# BlockScaling: any registered format in any role.
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


SCALE_RULES = ("rceil", "floor")


class FormatRange(NamedTuple):
    """Value of a `Format` member: elements and their largest values, forward and backward."""

    max_fwd: float
    max_bwd: float
    fwd: str
    bwd: str


class Format(Enum):
    """Element formats of the operands; ``.value.max_fwd``, ``.value.max_bwd``: the largest values.

    ============  ====================  ==============
    member        inputs and weights    gradients
    ============  ====================  ==============
    ``E4M3``      E4M3 (448)            E4M3 (448)
    ``E5M2``      E5M2 (57344)          E5M2 (57344)
    ``HYBRID``    E4M3 (448)            E5M2 (57344)
    ``E2M1``      E2M1 (6), of NVFP4    E2M1 (6)
    ============  ====================  ==============
    """

    E4M3 = FormatRange(448.0, 448.0, "e4m3", "e4m3")
    E5M2 = FormatRange(57344.0, 57344.0, "e5m2", "e5m2")
    HYBRID = FormatRange(448.0, 57344.0, "e4m3", "e5m2")
    E2M1 = FormatRange(6.0, 6.0, "e2m1", "e2m1")


_NAMES = tuple(fmt.name for fmt in Format)  # a constant: Dynamo of torch 2.11 reads no __members__


@dataclasses.dataclass(unsafe_hash=True, repr=False)
class MXFP8BlockScaling(Recipe):
    """MXFP8: blocks of 32 elements along the reduction dimension share one E8M0 scale.

    Field names are those of Transformer Engine where it has them.

    Args:
        fp8_format: `Format.E4M3` (default) or `Format.HYBRID` (gradients in E5M2), te_mx's or
            Transformer Engine's. `Format.E5M2` is rejected: two mantissa bits are too few.
        scale_rule: how a block's scale follows from its largest magnitude ``amax``, with ``max``
            the format's largest value and ``emax`` its exponent. ``"rceil"``: ``2^ceil(log2(amax /
            max))``, nothing finite saturates. ``"floor"`` (the OCP text): ``2^(floor(log2(amax)) -
            emax)``, the largest elements may saturate.
        precision: how GPUs without block-scaled tensor cores multiply (CPUs are always
            exact). ``"adaptive"``: on FP8 tensor cores, after scales of neighbouring blocks were
            aligned where they differ by at most ``2^alignment_spread``; an element moves by at most
            ``2^(alignment_spread - 17.8)`` of the largest of its block (E4M3). ``"exact"``:
            products of the exact values in bf16, at about bf16's speed. ``"invariant"``, on CPUs
            too: a row of a forward has the same bits beside any others (docs/invariance.md).
            ``"fp8"``: forwards encode NVFP4 anew, weights or inputs, as `te_mx.gemm`, and have
            to have some.
        alignment_spread: 0 to 8; smaller aligns less, which is more exact and slower.
        margin: must be 0 (block scales follow the data; there is no history to keep a margin for).
        fp8_dpa, fp8_mha: must be False; attention runs in the dtype of its inputs.
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
        split_k: let GEMMs at precision ``"adaptive"`` on GPUs cut K into parts where D is too small
            to fill the chip (``te_mx.explain`` says into how many). Sums then have another order,
            which depends on the sizes and the GPU, so that a layer's bits may differ from those of
            the same layer in a `te_mx.GroupedLinear`, which never cuts.
        keep_weight_columns: make dgrad's operand of a weight in forward, in the read that makes
            fprop's, and keep it for backward: 1.03 bytes a parameter of every layer that waits for
            its backward pass. By default backward quantizes the weight again, to the same bytes,
            and nothing beside the parameter itself is kept. No effect on weights that are kept
            anyway (is_first_microbatch, te_mx.freeze_weights) and under ``one_copy_weights``.

    Raises:
        TypeError: a field has the wrong type.
        ValueError: a field has a value that means nothing.
        NotImplementedError: a field asks for something that te_mx does not do.
    """

    _kind = "mxfp8"
    _always = ("fp8_format", "scale_rule")

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
    keep_weight_columns: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "fp8_format", checked_format(self))
        check_one_of("MXFP8BlockScaling.scale_rule", self.scale_rule, SCALE_RULES)
        check_common(self)
        check_attention(self)
        history = "block scales follow the data of every call"
        check_default("MXFP8BlockScaling.margin", self.margin, 0, history)
        square, why = self.enable_2d_quantization, "weights have blocks of 1x32"
        check_default("MXFP8BlockScaling.enable_2d_quantization", square, False, why)

        formats = self.fp8_format.value
        fwd, bwd = f"mxfp8_{formats.fwd}", f"mxfp8_{formats.bwd}"
        object.__setattr__(self, "_settings", settings_of(self, fwd, fwd, bwd))


def is_transformer_engines(value: Any) -> bool:
    """Whether the class of a value, or one that it derives from, is Transformer Engine's."""
    return any(
        kind.__module__.partition(".")[0] == "transformer_engine" for kind in type(value).__mro__
    )


def checked_format(recipe: Any) -> Format:
    """The `fp8_format` of a recipe as te_mx's.

    Raises:
        TypeError: it is no Format.
        ValueError: E5M2 alone.
        NotImplementedError: a format of Transformer Engine that te_mx does not have.
    """
    owner, given = type(recipe).__name__, as_format(recipe.fp8_format)
    if not isinstance(given, Format):
        raise TypeError(
            f"{owner}.fp8_format must be a te_mx.recipe.Format, got {shown(given)}; use "
            "Format.E4M3 or Format.HYBRID"
        )
    if given is Format.E2M1:
        raise NotImplementedError(
            f"{owner}.fp8_format=Format.E2M1 is not supported; use E4M3 or HYBRID"
        )
    if given is Format.E5M2:
        raise ValueError(
            f"{owner}.fp8_format=Format.E5M2 is not supported: inputs and weights need the "
            "mantissa of E4M3; use Format.E4M3, or Format.HYBRID for gradients in E5M2"
        )
    return given


def as_format(given: Any) -> Any:
    """A format of Transformer Engine as te_mx's; anything else as it is. Raises NotImplementedError
    for one that te_mx does not have."""
    if not isinstance(given, Format) and is_transformer_engines(given):
        if given.name not in _NAMES:
            raise NotImplementedError(
                f"fp8_format={given} of Transformer Engine is not supported; use E4M3 or HYBRID"
            )
        given = Format[given.name]
    return given

"""The MXFP4 recipe: 4-bit operands in the forward pass, or in all three GEMMs."""

import dataclasses

from te_mx.formats.hadamard import SIGNS, SIZES, Hadamard
from te_mx.formats.scaling import MX_RULES, STOCHASTIC
from te_mx.recipes.settings import Settings
from te_mx.recipes.values import MAX_SPREAD, Recipe, check_common, format_of, settings_of
from te_mx.runtime.arguments import check_flag, check_one_of, shown

_FOUR, _EIGHT = "mxfp4", "mxfp8_e4m3"
_FORWARD = (_FOUR, _EIGHT)
_GRADIENTS = (_FOUR, _EIGHT, "mxfp8_e5m2")


@dataclasses.dataclass(unsafe_hash=True, repr=False)
class MXFP4BlockScaling(Recipe):
    """MXFP4 (E2M1 codes, two a byte, and one E8M0 scale for 32 of them) forward, MXFP8 backward; or
    MXFP4 in all three GEMMs.

    fprop multiplies x with w, dgrad g with w, wgrad g with x. With gradients in MXFP8 both backward
    GEMMs are MXFP8, as under `MXFP8BlockScaling`. With ``g="mxfp4"`` all operands are MXFP4,
    gradients are rounded stochastically, so that their mean is right, and both sides of wgrad are
    transformed by a random Hadamard matrix along the tokens, which spreads outliers over their
    block and leaves the product as it is ("Training LLMs with MXFP4", arXiv 2502.20586).

    Seeds are drawn at every backward pass from torch's default generator of the device, so
    torch.manual_seed makes a run reproducible. Forward draws nothing.

    Args:
        x, w: formats of inputs and weights in fprop: "mxfp4" or "mxfp8_e4m3".
        g: format of output gradients: "mxfp8_e4m3", "mxfp8_e5m2" or "mxfp4".
        x_wgrad, w_dgrad: formats of inputs in wgrad and of weights in dgrad: "mxfp4",
            "mxfp8_e4m3", or None for the one of as many bits as g. Columnwise codes lie one a byte
            for the GEMM, so what is kept of an input for backward takes 1.03 bytes an element in
            MXFP4 as in MXFP8; ``backward_override="dequantized"`` keeps rowwise ones, 0.53.
        scale_rule: "rceil" (nothing finite saturates), "floor" (the OCP text) or "even" (that of
            compressed-tensors), of all operands.
        stochastic_rounding: of gradients; None for that of g in MXFP4 alone.
        hadamard: size of the transform of both sides of wgrad, 16 or 32, or 0 for none; None for 32
            where g is MXFP4, else 0.
        hadamard_signs: its random signs, 32 bits: bit i is that of tokens i modulo 32.
        one_copy_weights: derive dgrad's operand from the rowwise codes, so that dgrad multiplies
            the weight that fprop multiplied, up to a second rounding where that is MXFP4.
        backward_override, precision, alignment_spread, wgrad_with_hp, split_k, keep_weight_columns:
            as of `MXFP8BlockScaling`.

    Raises:
        TypeError: a field has the wrong type.
        ValueError: a field has a value that means nothing.
    """

    _always = ("x", "w", "g")

    x: str = _FOUR
    w: str = _FOUR
    g: str = _EIGHT
    x_wgrad: str | None = None
    w_dgrad: str | None = None
    scale_rule: str = "rceil"
    stochastic_rounding: bool | None = None
    hadamard: int | None = None
    hadamard_signs: int = 0x5B39A1C6
    backward_override: str | None = None
    precision: str = "adaptive"
    alignment_spread: int = MAX_SPREAD
    wgrad_with_hp: bool = False
    one_copy_weights: bool = False
    split_k: bool = False
    keep_weight_columns: bool = False

    def __post_init__(self) -> None:
        for name in ("x", "w", "g", "x_wgrad", "w_dgrad"):
            if (given := getattr(self, name)) is not None or name in self._always:
                among = _GRADIENTS if name == "g" else _FORWARD
                found = format_of(f"MXFP4BlockScaling.{name}", given, among)
                object.__setattr__(self, name, found)
        check_one_of("MXFP4BlockScaling.scale_rule", self.scale_rule, MX_RULES)
        if self.stochastic_rounding is not None:
            check_flag("MXFP4BlockScaling.stochastic_rounding", self.stochastic_rounding)
        self._check_hadamard()
        check_common(self)
        object.__setattr__(self, "_settings", self._make_settings())

    def _check_hadamard(self) -> None:
        size, signs = self.hadamard, self.hadamard_signs
        if size is not None and (type(size) is not int or size not in (0, *SIZES)):
            raise ValueError(
                f"MXFP4BlockScaling.hadamard must be 16, 32, 0 for none, or None, got {shown(size)}"
            )
        if type(signs) is not int:
            raise TypeError(f"MXFP4BlockScaling.hadamard_signs must be an int, got {shown(signs)}")
        if not 0 <= signs < 1 << SIGNS:
            raise ValueError(
                f"MXFP4BlockScaling.hadamard_signs must be 32 bits, 0 to 2^32 - 1, got {signs}"
            )

    def _make_settings(self) -> Settings:
        four = self.g == _FOUR
        backward = _FOUR if four else _EIGHT
        x_col, w_col, g_col = self.x_wgrad or backward, self.w_dgrad or backward, self.g
        size = (32 if four else 0) if self.hadamard is None else self.hadamard
        if size:
            suffix = f"+{Hadamard(size, self.hadamard_signs)}"
            x_col, g_col = x_col + suffix, g_col + suffix
        stochastic = four if self.stochastic_rounding is None else self.stochastic_rounding
        made = settings_of(self, self.x, self.w, self.g)
        return made._replace(
            x_col=_unless(x_col, self.x), w_col=_unless(w_col, self.w),
            g_col=_unless(g_col, self.g), g_rule=self.scale_rule + STOCHASTIC if stochastic else "",
        )  # fmt: skip


def _unless(name: str, same: str) -> str:
    """A format's name, "" where it is the one of the role anyway."""
    return "" if name == same else name

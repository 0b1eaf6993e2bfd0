"""The NVFP4 recipe of Transformer Engine: 4-bit operands in all three GEMMs."""

import dataclasses

from te_mx.formats.hadamard import Hadamard
from te_mx.formats.scaling import STOCHASTIC
from te_mx.recipes.float8_block import QParams
from te_mx.recipes.mxfp8 import Format, as_format
from te_mx.recipes.settings import Settings
from te_mx.recipes.values import MAX_SPREAD, Recipe, check_attention, check_common, settings_of
from te_mx.runtime.arguments import check_flag, check_one_of, shown

_FLAGS = (
    "disable_rht", "disable_stochastic_rounding", "disable_2d_quantization",
    "row_scaled_activation",
)  # fmt: skip
SCOPES = ("none", "weights", "activations", "all")
_ERRORS = ("MAE", "MSE")
# Transformer Engine's signs of 16 elements, +1 +1 +1 -1 +1 -1 -1 -1 -1 -1 -1 +1 -1 +1 -1 -1, twice.
SIGNS = 0xD7E8D7E8


@dataclasses.dataclass(unsafe_hash=True, repr=False)
class NVFP4BlockScaling(Recipe):
    """NVFP4 in all three GEMMs: E2M1 codes, an E4M3 scale for 16 of them and an fp32 scale for the
    tensor, with the scales and signs of Transformer Engine ("Pretraining Large Language Models with
    NVFP4", arXiv 2509.25149).

    Weights have a scale for 16 x 16 elements, so that dgrad multiplies the values of fprop.
    Gradients are rounded stochastically, with seeds as `MXFP4BlockScaling` draws them. Both sides
    of wgrad are transformed by a Hadamard matrix of 16 along the tokens; each direction has a
    tensor scale of its own. Products of code * block scale are exact, sums are fp32 and multiplied
    by the tensor scales. Which layers stay in bf16 is for the model to say (`te_mx.convert_model`
    with filter_fn, or `CustomRecipe`). Sizes need not divide by 16. Tokens of every group have a
    tensor scale of their own.

    Field names are Transformer Engine's where it has them; its environment variables are not read.

    Args:
        disable_rht: no Hadamard transform.
        disable_stochastic_rounding: gradients are rounded to nearest.
        disable_2d_quantization: weights have a scale for 16 elements along k, in each direction.
        row_scaled_activation: inputs of fprop have one fp32 scale a row, so that a row does not
            depend on its neighbours.
        nvfp4_4over6: "none", "weights", "activations" or "all": of which operands of fprop (of
            weights in dgrad, of inputs in wgrad) each block takes the better of two scales.
        nvfp4_4over6_e4m3_use_256: of which of these the largest block scale is 256 in place of 448,
            so that both scales fit.
        nvfp4_4over6_err_mode: "MAE" or "MSE".
        fp4_format, fp8_format: `Format.E2M1` and `Format.E4M3`, te_mx's or Transformer Engine's.
        fp8_dpa, fp8_mha: must be False; attention runs in the dtype of its inputs.
        backward_override, precision, alignment_spread, wgrad_with_hp, one_copy_weights, split_k,
            keep_weight_columns: as of `MXFP8BlockScaling`.

    Raises:
        TypeError: a field has the wrong type.
        ValueError: a field has a value that means nothing.
        NotImplementedError: fp8_dpa or fp8_mha is set.
    """

    _kind = "nvfp4"

    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False
    row_scaled_activation: bool = False
    nvfp4_4over6: str = "none"
    nvfp4_4over6_e4m3_use_256: str = "all"
    nvfp4_4over6_err_mode: str = "MAE"
    fp4_format: Format = Format.E2M1
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None
    precision: str = "adaptive"
    alignment_spread: int = MAX_SPREAD
    wgrad_with_hp: bool = False
    one_copy_weights: bool = False
    split_k: bool = False
    keep_weight_columns: bool = False

    def __post_init__(self) -> None:
        for name in _FLAGS:
            check_flag(f"NVFP4BlockScaling.{name}", getattr(self, name))
        for name in ("nvfp4_4over6", "nvfp4_4over6_e4m3_use_256"):
            check_one_of(f"NVFP4BlockScaling.{name}", getattr(self, name), SCOPES)
        check_one_of("NVFP4BlockScaling.nvfp4_4over6_err_mode", self.nvfp4_4over6_err_mode, _ERRORS)
        for name, wanted in (("fp4_format", Format.E2M1), ("fp8_format", Format.E4M3)):
            given = as_format(getattr(self, name))
            if given is not wanted:
                raise ValueError(f"NVFP4BlockScaling.{name} must be {wanted}, got {shown(given)}")
            object.__setattr__(self, name, given)
        check_attention(self)
        check_common(self)
        object.__setattr__(self, "_settings", self._make_settings())

    @property
    def scale_rule(self) -> str:
        """The rule of inputs."""
        return self._rule("activations")

    def _rule(self, scope: str) -> str:
        if self.nvfp4_4over6 not in (scope, "all"):
            return "te"
        error = "" if self.nvfp4_4over6_err_mode == "MAE" else "_mse"
        top = "" if self.nvfp4_4over6_e4m3_use_256 in (scope, "all") else "_448"
        return f"te_4over6{error}{top}"

    def _make_settings(self) -> Settings:
        x = "nvfp4_rows" if self.row_scaled_activation else "nvfp4"
        w = "nvfp4" if self.disable_2d_quantization else "nvfp4_16x16"
        columns = "nvfp4" if self.disable_rht else f"nvfp4+{Hadamard(16, SIGNS)}"
        rule, w_rule = self.scale_rule, self._rule("weights")
        g_rule = "te" if self.disable_stochastic_rounding else "te" + STOCHASTIC
        return settings_of(self, x, w, "nvfp4")._replace(
            x_col="" if columns == x else columns, g_col="" if columns == "nvfp4" else columns,
            g_rule="" if g_rule == rule else g_rule, w_rule="" if w_rule == rule else w_rule,
        )  # fmt: skip

    @property
    def fp4_quant_fwd_inp(self) -> QParams:
        """How inputs are quantized, in Transformer Engine's words."""
        return QParams(random_hadamard_transform=not self.disable_rht)

    @property
    def fp4_quant_fwd_weight(self) -> QParams:
        """How weights are."""
        return QParams(fp4_2d_quantization=not self.disable_2d_quantization)

    @property
    def fp4_quant_bwd_grad(self) -> QParams:
        """How output gradients are."""
        return QParams(
            random_hadamard_transform=not self.disable_rht,
            stochastic_rounding=not self.disable_stochastic_rounding,
        )

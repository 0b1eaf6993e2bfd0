"""Blockwise FP8 recipes: Transformer Engine's Float8BlockScaling, and DeepSeek-V3's."""

import dataclasses
from typing import Any

from te_mx.recipes.mxfp8 import Format, checked_format, is_transformer_engines
from te_mx.recipes.values import MAX_SPREAD, Recipe, check_attention, check_common, settings_of
from te_mx.runtime.arguments import check_flag, check_number, shown

GEMMS = ("fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad")
_DIMS = ("x_block_scaling_dim", "w_block_scaling_dim", "grad_block_scaling_dim")
_LARGEST_EPSILON = 3.4028234663852886e38  # the largest fp32 number


@dataclasses.dataclass(frozen=True)
class MMParams:
    """How a GEMM adds up, as in Transformer Engine.

    Args:
        use_split_accumulator: partial sums go to fp32 every 128 of the reduction dimension.

    Raises:
        TypeError: it is no bool.
    """

    use_split_accumulator: bool = True

    def __post_init__(self) -> None:
        check_flag("MMParams.use_split_accumulator", self.use_split_accumulator)


@dataclasses.dataclass(frozen=True)
class QParams:
    """How one role is quantized, as in Transformer Engine; `Float8BlockScaling` has one for all.

    Args:
        power_2_scale: scales are powers of two.
        amax_epsilon: what amax is raised to.
        random_hadamard_transform, stochastic_rounding, fp4_2d_quantization: of NVFP4 alone.

    Raises:
        TypeError, ValueError: a field of a wrong type or value.
    """

    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    random_hadamard_transform: bool = False
    stochastic_rounding: bool = False
    fp4_2d_quantization: bool = False

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if field.name != "amax_epsilon":
                check_flag(f"QParams.{field.name}", getattr(self, field.name))
        object.__setattr__(self, "amax_epsilon", _epsilon(self.amax_epsilon, "QParams"))


@dataclasses.dataclass(unsafe_hash=True, repr=False)
class Float8BlockScaling(Recipe):
    """FP8 with one fp32 scale for 1 x 128 elements of inputs and output gradients, along the
    reduction dimension of each GEMM, and for 128 x 128 of weights.

    Both directions of an input and of a gradient are quantized from the tensor itself. Square
    blocks of weights are the same in both directions, so dgrad multiplies the values of fprop.
    Field names are those of Transformer Engine where it has them. te_mx does not read its
    environment variables.

    Args:
        use_f32_scales: scales are the fp32 numbers ``1 / fp32(max / amax)``. By default the factor
            ``max / amax`` is cut down to a power of two, and so scales are powers of two.
        fp8_format: `Format.E4M3` (default) or `Format.HYBRID` (gradients in E5M2), te_mx's or
            Transformer Engine's. `Format.E5M2` is rejected.
        x_block_scaling_dim, grad_block_scaling_dim: must be 1, blocks of 1 x 128.
        w_block_scaling_dim: 2 for blocks of 128 x 128, 1 for 1 x 128.
        fp8_gemm_fprop, fp8_gemm_dgrad, fp8_gemm_wgrad: `MMParams`, te_mx's or Transformer Engine's,
            with ``use_split_accumulator=True``: sums are always fp32.
        fp8_dpa, fp8_mha: must be False; attention runs in the dtype of its inputs.
        backward_override: as of `MXFP8BlockScaling`.
        amax_epsilon: what amax is raised to, 0 or more; Transformer Engine's recipe has it in the
            `QParams` of each role. With 0, a block of zeros has scale 1.
        precision, wgrad_with_hp, split_k: as of `MXFP8BlockScaling`.
        alignment_spread: how far GPUs align scales that are powers of two for wgrad, 0 to 8; 0
            aligns nothing and is slower (docs/numerics.md).
        keep_weight_columns: make both operands of a weight in forward, in one read, and keep that
            of dgrad for backward: 1 byte a parameter of every layer that waits for its backward
            pass. By default backward quantizes the weight again, to the same bytes, and nothing
            beside the parameter itself is kept. No effect on weights that are kept anyway and under
            ``one_copy_weights``.
        one_copy_weights: keep weights rowwise only. With 128 x 128 blocks dgrad reads these very
            codes, and nothing is rounded again.

    Raises:
        TypeError: a field has the wrong type.
        ValueError: a field has a value that means nothing.
        NotImplementedError: a field asks for something that te_mx does not do.
    """

    _kind = "float8_block_scaling"
    _always = ("fp8_format",)

    use_f32_scales: bool = False
    fp8_format: Format = Format.E4M3
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1
    fp8_gemm_fprop: MMParams = MMParams()
    fp8_gemm_dgrad: MMParams = MMParams()
    fp8_gemm_wgrad: MMParams = MMParams()
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None
    amax_epsilon: float = 0.0
    precision: str = "adaptive"
    alignment_spread: int = MAX_SPREAD
    wgrad_with_hp: bool = False
    one_copy_weights: bool = False
    split_k: bool = False
    keep_weight_columns: bool = False

    def __post_init__(self) -> None:
        check_flag("Float8BlockScaling.use_f32_scales", self.use_f32_scales)
        object.__setattr__(self, "fp8_format", checked_format(self))
        for name in _DIMS:
            _check_dim(name, getattr(self, name))
        for name in GEMMS:
            object.__setattr__(self, name, _params(name, getattr(self, name)))
        check_attention(self)
        object.__setattr__(self, "amax_epsilon", _epsilon(self.amax_epsilon))
        check_common(self)

        formats = self.fp8_format.value
        x, g = f"fp8_{formats.fwd}_1x128", f"fp8_{formats.bwd}_1x128"
        w = f"fp8_{formats.fwd}_{'128x128' if self.w_block_scaling_dim == 2 else '1x128'}"
        object.__setattr__(self, "_settings", settings_of(self, x, w, g))

    @property
    def scale_rule(self) -> str:
        """The rule of its formats: "pow2" or "fp32", with the epsilon behind a colon."""
        rule = "fp32" if self.use_f32_scales else "pow2"
        return f"{rule}:{self.amax_epsilon!r}" if self.amax_epsilon else rule

    def _quantizes(self) -> QParams:
        return QParams(not self.use_f32_scales, self.amax_epsilon)

    def _refuse_role(self, given: Any) -> None:
        """The fields of Transformer Engine's recipe that quantize each role by itself."""
        if given != self._quantizes():
            raise NotImplementedError(
                "Float8BlockScaling: te_mx quantizes all roles alike, got "
                f"{shown(given)} for one where the recipe has {self._quantizes()}; set "
                "use_f32_scales and amax_epsilon"
            )

    fp8_quant_fwd_inp = property(_quantizes, _refuse_role)
    fp8_quant_fwd_weight = property(_quantizes, _refuse_role)
    fp8_quant_bwd_grad = property(_quantizes, _refuse_role)


def DeepSeekV3() -> Float8BlockScaling:
    """The recipe of DeepSeek-V3: E4M3 everywhere, inputs and gradients in blocks of 1 x 128,
    weights of 128 x 128, fp32 scales. What its checkpoints hold in `weight_scale_inv` are scales of
    such weights."""
    return Float8BlockScaling(use_f32_scales=True)


def _check_dim(name: str, dim: Any) -> None:
    if type(dim) is not int:
        raise TypeError(f"Float8BlockScaling.{name} must be 1 or 2, got {shown(dim)}")
    if dim not in (1, 2):
        raise ValueError(f"Float8BlockScaling.{name} must be 1 or 2, got {dim}")
    if dim == 2 and name != "w_block_scaling_dim":
        raise NotImplementedError(
            f"Float8BlockScaling.{name}=2 is not supported, only 1: blocks of 128 rows would hold "
            "tokens of several groups"
        )


def _params(name: str, given: Any) -> MMParams:
    """How a GEMM adds up, as te_mx's class."""
    if not isinstance(given, MMParams) and not (
        is_transformer_engines(given) and hasattr(given, "use_split_accumulator")
    ):
        raise TypeError(
            f"Float8BlockScaling.{name} must be a te_mx.recipe.MMParams, got {shown(given)}"
        )
    if not given.use_split_accumulator:
        raise NotImplementedError(
            f"Float8BlockScaling.{name}.use_split_accumulator=False is not supported: sums of "
            "blocks are always added up in fp32"
        )
    return MMParams()


def _epsilon(value: Any, owner: str = "Float8BlockScaling") -> float:
    made = check_number(f"{owner}.amax_epsilon", value, 0)
    if made > _LARGEST_EPSILON:
        raise ValueError(f"{owner}.amax_epsilon must be an fp32 number, got {made}")
    return made


def fields_of(theirs: Any) -> dict[str, Any]:
    """What a Float8BlockScaling of Transformer Engine says in the `QParams` of its roles, which its
    quantizers read: fields of te_mx's recipe.

    Its `use_f32_scales` sets these by its default only, so that Transformer Engine overlooks one
    that is passed. Here it counts, unless the QParams were changed as well."""
    roles = ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad")
    params: list[Any] = [getattr(theirs, role, None) for role in roles]
    if any(one is None for one in params):
        return {}
    said = {(bool(one.power_2_scale), float(one.amax_epsilon)) for one in params}
    if len(said) > 1:
        raise NotImplementedError(
            "Float8BlockScaling of Transformer Engine: te_mx has one power_2_scale and "
            f"amax_epsilon for all roles, got {dict(zip(roles, params, strict=True))}"
        )
    ((power_2_scale, epsilon),) = said
    use_f32_scales = not power_2_scale
    field = theirs.__dataclass_fields__.get("use_f32_scales")  # None in old versions
    if field is not None and use_f32_scales == field.default != theirs.use_f32_scales:
        use_f32_scales = theirs.use_f32_scales
    return {"use_f32_scales": use_f32_scales, "amax_epsilon": epsilon}

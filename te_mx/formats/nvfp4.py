"""NVFP4: 4-bit elements, one E4M3 scale for 16 of them, one fp32 scale for the whole tensor.

Four libraries write four streams of bytes for the same numbers: each is a rule by its name."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from te_mx.formats import stochastic
from te_mx.formats.element import INF, MAGNITUDE
from te_mx.formats.format import READ, Format, check_matrix, check_random, in_blocks, register
from te_mx.formats.mxfp4 import E2M1
from te_mx.formats.mxfp8 import E4M3
from te_mx.formats.scaling import STOCHASTIC, Scaling

_TOP = 448.0 * 6.0  # the largest magnitude of a code times a block scale
_SIXTH = 0.16666667163372040  # fp32(1 / 6)
_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True, eq=False)
class TensorScaledFormat(Format):
    """Codes with two levels of scales, for a matrix [rows, k]: value = code * block scale * tensor
    scale. Every code * block scale is exact in bf16.

    ============  =======================  =====================================================
    part          dtype                    shape
    ============  =======================  =====================================================
    codes         uint8, two a byte        [rows, ceil(k / 2)]
    scales        uint8, bytes of E4M3     [ceil(rows / block[0]), ceil(k / block[1])]
    tensor scale  float32                  [], or [rows, 1]: one a row, where `by_rows`
    ============  =======================  =====================================================

    With bamax the largest magnitude of a block, amax that of the tensor (or row), and every
    operation in fp32, rounded to nearest, as written (e4m3: to nearest even, at most 448; quotients
    at most the largest fp32 number):

    ==================  =============================  ===============================  ============
    rule                tensor scale t                 block scale s                    code of
    ==================  =============================  ===============================  ============
    te                  1 / e, e = 2688 / amax         e4m3(bamax * (e * fl(1/6)))      x*(1/(s*t))
    torchao             amax / 2688                    e4m3((bamax/6) / t), >= 2^-6     x*((1/t)/s)
    modelopt            amax / 2688                    e4m3(bamax / (6*t)), >= 2^-9,    x / (s*t)
                                                       1 where the quotient is 0
    compressed_tensors  1 / e, e = (1/amax) * 2688     e4m3(e * (bamax/6)),             x / (s/e)
                        in the dtype of x              0.125 where it is 0; bamax/6
                                                       in the dtype of x
    ==================  =============================  ===============================  ============

    "te_4over6" tries two scales a block, s of bamax and 1.5 times that (e = 1536 / amax, so that
    both are scales; s = e4m3(bamax/6 * e)), and takes the second one where the sum of
    abs(code*s*amax/1536 - x), or of its square under "te_4over6_mse", is less; sums in the order of
    k, then of the rows of a tile as of a tree. With "_448" behind it, 2688 stands for 1536.

    Codes are rounded to nearest even, at most +-6. -0 keeps its sign, but is 0 under "modelopt" and
    "compressed_tensors"; a negative number that rounds to 0 has code 8 under every rule. A tensor
    of zeros has tensor scale 1 (the last three libraries divide 0 by 0 there). A NaN or an Inf
    makes the scale of its block NaN (0x7F) and its codes 0, and does not count for amax.

    With a transform, the transformed matrix is rounded to the dtype of x, as Transformer Engine
    does for bf16; amax is that of the result, so the columns of a matrix have another one.

    Sources: Transformer Engine, common/cast/nvfp4/core_nvfp4.cuh; torchao, prototype/mx_formats/
    nvfp4_tensor.py; ModelOpt, torch/quantization/qtensor/nvfp4_tensor.py; compressed-tensors,
    quantization/utils/helpers.py, whose weight_global_scale is e.
    """

    by_rows: bool = False

    def quantize(self, x: Tensor, rule: str, random: Tensor | None = None) -> tuple[Tensor, ...]:
        """Codes, block scales and tensor scale of x [rows, k], with any strides. Raises as
        `Format.quantize`; TypeError for fp16 under "compressed_tensors", whose e overflows there.
        """
        return self.quantize_parts(x, rule, random)

    def quantize_parts(
        self, x: Tensor, rule: str, random: Tensor | None,
        shared: Callable[[Tensor], Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """The same of a matrix of several parts, as tokens of groups are. shared: of the largest
        magnitudes of blocks, fp32 [down, across], the amax that scales each of them, in a shape
        that goes with theirs; the tensor scale has that shape."""
        self.check_quantizable(x, rule)
        check_random(random, rule, x)
        rows, k = x.shape
        x, dtype = x.detach().resolve_neg().float(), x.dtype
        if self.transform is not None:
            x = self.transform.apply(x).to(dtype).float()
        blocks = in_blocks(x, self.scaling.block)
        bits = blocks.view(torch.int32) & MAGNITUDE
        largest = bits.amax((1, 3))  # NaN and Inf come on top
        finite = largest < INF
        bamax = torch.where(finite, largest, 0).view(torch.float32)
        # The same in both directions: of elements, not of blocks.
        amax = torch.where(bits < INF, bits, 0).amax((1, 3)).view(torch.float32)
        if shared is not None:
            amax = shared(amax)
        elif self.by_rows:
            amax = torch.nn.functional.pad(amax, (0, 1)).amax(1, keepdim=True)  # 0 of nothing
        else:
            amax = torch.nn.functional.pad(amax.flatten(), (0, 1)).amax()
        name = rule.removesuffix(STOCHASTIC)
        scales, tensor_scale, scaled = _WRITERS[name](blocks, bamax, amax, dtype)
        scaled = torch.where(blocks == 0, blocks, scaled)  # where 0 / 0 was computed
        if name in _UNSIGNED_ZERO:
            scaled = torch.where(scaled == 0, 0.0, scaled)
        by_block = None if random is None else in_blocks(random, self.scaling.block)
        codes = _encode(scaled, by_block).masked_fill_(~finite[:, None, :, None], 0)
        codes = codes.flatten(2, 3).flatten(0, 1)[:rows, :k]
        stored = _encode_scales(scales).masked_fill_(~finite, E4M3.nan_code or 0)
        return self.pack(codes).contiguous(), stored, tensor_scale

    def check_quantizable(self, x: Tensor, rule: str) -> None:
        """Raise what `quantize` says it raises."""
        check_matrix("x", x, *READ)
        self.check_rule(rule)
        if rule == "compressed_tensors" and x.dtype == torch.float16:
            raise TypeError(
                f"{self.name}: the rule {rule!r} computes in the dtype of x, and 2688 / amax "
                "overflows in float16; use x.float() or x.bfloat16()"
            )

    def tensor_scale_shape(self, rows: int) -> tuple[int, ...]:
        """Shape of the tensor scale of [rows, k]."""
        return (rows, 1) if self.by_rows else ()

    def dequantize(self, codes: Tensor, scales: Tensor, k: int, dtype: torch.dtype) -> Tensor:
        """code * block scale, [rows, k], which every dtype holds but fp16 below 2^-10: what the
        tensor scale multiplies. Raises as `Format.dequantize`."""
        k = self.check_parts(codes, scales, k, dtype)
        wide = torch.float32 if dtype == torch.float16 else dtype
        of_rows = E4M3.decode(scales).repeat_interleave(self.scaling.block[0], 0)[: len(codes)]
        # The bits of a code, as the upper ones of fp16, are its value times 2^-14.
        pair = torch.nn.functional.pad(codes, (0, self.blocks(k) * 8 - codes.shape[1])).short()
        low, high = (pair & 7) << 9 | (pair & 8) << 12, (pair & 112) << 5 | (pair & 128) << 8
        shape = len(codes), self.blocks(k), self.block
        values = torch.stack((low, high), -1).view(torch.float16).view(shape)
        made = values.to(wide) * (of_rows * 2.0**14).to(wide).unsqueeze(-1)
        return made.flatten(1)[:, :k].contiguous().to(dtype)


# ------------------------------------------------------------------------------------- the writers
# Of blocks [down, height, across, width], their largest magnitudes [down, across] and that of the
# tensor: block scales as fp32, the tensor scale, and blocks as they are rounded to codes. A number
# divided by a tensor, or a tensor by a number, would be a product with a reciprocal on some device.
_Parts = tuple[Tensor, Tensor, Tensor]


def _te(x: Tensor, bamax: Tensor, amax: Tensor, dtype: torch.dtype) -> _Parts:
    encode = _usable(amax, torch.full_like(amax, _TOP) / amax)
    scales = _e4m3(bamax * (encode * _SIXTH))
    scale = encode.reciprocal()
    return scales, scale, x * _over((scales * scale).reciprocal().clamp(max=_LARGEST))


def _torchao(x: Tensor, bamax: Tensor, amax: Tensor, dtype: torch.dtype) -> _Parts:
    scale = _usable(amax, amax / torch.full_like(amax, _TOP))
    scales = _e4m3((bamax / torch.full_like(bamax, 6.0) / scale).clamp(2.0**-6, 448.0))
    return scales, scale, x * _over(scale.reciprocal() / scales)


def _modelopt(x: Tensor, bamax: Tensor, amax: Tensor, dtype: torch.dtype) -> _Parts:
    scale = _usable(amax, amax / torch.full_like(amax, _TOP))
    wanted = bamax / (scale * 6.0)
    scales = _e4m3(torch.where(wanted == 0, 1.0, wanted).clamp(min=2.0**-9))
    return scales, scale, x / _over(scales * scale)


def _compressed_tensors(x: Tensor, bamax: Tensor, amax: Tensor, dtype: torch.dtype) -> _Parts:
    encode = _usable(amax, (amax.to(dtype).reciprocal() * _TOP).float())
    bamax = bamax.to(dtype)
    scales = _e4m3(encode * (bamax / torch.full_like(bamax, 6.0)).float())
    scales = torch.where(scales == 0, 0.125, scales)
    return scales, encode.reciprocal(), x / _over(scales / encode)


def _four_over_six(
    x: Tensor, bamax: Tensor, amax: Tensor, dtype: torch.dtype, bound: float, square: bool
) -> _Parts:
    encode = _usable(amax, torch.full_like(amax, bound) / amax)
    scale = encode.reciprocal()
    base = bamax / torch.full_like(bamax, 6.0) * encode
    whole = _over(amax) if amax.dim() else amax
    made = []
    for factor in (1.5, 1.0):
        scales = _e4m3(base * factor)
        scaled = x * _over((scales * scale).reciprocal().clamp(max=_LARGEST))
        value = E2M1.decode(_encode(scaled)) * _over(scales) * whole
        off = value / torch.full_like(value, bound) - x
        error = _in_order(off * off if square else off.abs())
        made.append((scales, scaled, error))
    (of_4, x_4, error_4), (of_6, x_6, error_6) = made
    four = error_4 < error_6
    return torch.where(four, of_4, of_6), scale, torch.where(_over(four), x_4, x_6)


def _in_order(errors: Tensor) -> Tensor:
    """Sums [down, across] over blocks [down, height, across, width]."""
    total = torch.zeros_like(errors[..., 0])
    for i in range(errors.shape[3]):
        total = total + errors[..., i]
    while total.shape[1] > 1:
        upper, lower = total.chunk(2, 1)
        total = upper + lower
    return total[:, 0]


_WRITERS: dict[str, Callable[[Tensor, Tensor, Tensor, torch.dtype], _Parts]] = {
    "te": _te, "torchao": _torchao, "modelopt": _modelopt,
    "compressed_tensors": _compressed_tensors,
}  # fmt: skip
for _error in ("", "_mse"):
    for _top, _bound in (("", 256 * 6.0), ("_448", _TOP)):
        _WRITERS[f"te_4over6{_error}{_top}"] = partial(
            _four_over_six, bound=_bound, square=bool(_error)
        )
_TE = tuple(name for name in _WRITERS if name.startswith("te"))
_UNSIGNED_ZERO = ("modelopt", "compressed_tensors")


def _usable(amax: Tensor, scale: Tensor) -> Tensor:
    """A scale of the tensor, finite, and 1 where all is zero."""
    return torch.where(amax == 0, 1.0, scale.clamp(max=_LARGEST))


def _over(of_blocks: Tensor) -> Tensor:
    return of_blocks[:, None, :, None]


def _encode(x: Tensor, random: Tensor | None = None) -> Tensor:
    """E2M1 of fp32 numbers, rounded to nearest even or with random bits."""
    bits = x.view(torch.int32)
    if random is not None:
        return stochastic.encode(E2M1, bits, torch.zeros_like(bits), random)
    magnitude = x.abs()
    code = (magnitude > 0.25).to(torch.uint8)
    for step in (1.25, 2.5, 5.0):  # to the even code below
        code += magnitude > step
    for step in (0.75, 1.75, 3.5):
        code += magnitude >= step
    return code | (bits >> 28 & E2M1.sign).to(torch.uint8)


def _encode_scales(x: Tensor) -> Tensor:
    return E4M3.encode(x.view(torch.int32), torch.zeros_like(x, dtype=torch.int32))


def _e4m3(x: Tensor) -> Tensor:
    return E4M3.decode(_encode_scales(x.abs()))  # 0 / 0 is NaN of either sign


nvfp4 = register(TensorScaledFormat("nvfp4", E2M1, Scaling((1, 16), "e4m3", tuple(_WRITERS))))
# Transformer Engine's weights. It stores the scale of a tile once for each of its 16 rows.
nvfp4_16x16 = register(TensorScaledFormat("nvfp4_16x16", E2M1, Scaling((16, 16), "e4m3", _TE)))
# Transformer Engine's row-scaled activations: a row does not depend on its neighbours.
nvfp4_rows = register(
    TensorScaledFormat("nvfp4_rows", E2M1, Scaling((1, 16), "e4m3", _TE), by_rows=True)
)

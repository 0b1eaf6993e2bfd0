"""Blockwise FP8 from OCP's elements ("fn") to those without -0 ("fnuz", AMD's MI300) and back."""

import torch
from torch import Tensor

from te_mx.formats.format import Format, check_matrix, get, in_blocks

_PAIRS = {"e4m3": "e4m3fnuz", "e5m2": "e5m2fnuz", "e4m3fnuz": "e4m3", "e5m2fnuz": "e5m2"}


@torch.no_grad()
def convert(codes: Tensor, scales: Tensor, fmt: str, to: str) -> tuple[Tensor, Tensor]:
    """Codes and scales of format `fmt` as those of `to`, which have the same values.

    The biases of the elements differ by 1, so a byte means half as much in fnuz. From fn to fnuz
    bytes stay and scales double; 0x80, which is -0 there and NaN here, becomes 0, and what is NaN
    or Inf becomes 0x80. From fnuz to fn bytes stay and scales halve; 0x80 becomes the NaN 0x7F.
    fnuz has codes above the largest one of fn (0x7F; 0x7C to 0x7F in E5M2). A block with one of
    these keeps its scale, and its codes are encoded anew: all have their values, but numbers whose
    magnitude is below the normal ones of fn, whose steps are twice as wide there, are rounded to
    nearest even. So has a block whose scale would not be a normal number if halved.

    Args:
        codes: [rows, k], uint8 or the float8 dtype of `fmt`.
        scales: float32, one a block.
        fmt, to: names of te_mx.formats with the same blocks, such as "fp8_e4m3_128x128" and
            "fp8_e4m3fnuz_128x128".

    Returns:
        New codes, uint8 or the float8 dtype of `to` as those given, and new scales.

    Raises:
        TypeError: parts of other dtypes.
        ValueError: formats that are no such pair; parts that do not fit; a scale that cannot be
            doubled, for which the host looks at the scales.
    """
    source, target = get(fmt), get(to)
    if (
        _PAIRS.get(source.element.name) != target.element.name
        or source.scaling != target.scaling
        or source.scaling.scale != "fp32"
    ):
        raise ValueError(
            "a conversion is between the fn and fnuz forms of one blockwise format, such as "
            f"'fp8_e4m3_128x128' and 'fp8_e4m3fnuz_128x128', got {fmt!r} and {to!r}"
        )
    shown_as = source.element.torch_dtype, target.element.torch_dtype
    assert shown_as[0] is not None and shown_as[1] is not None
    check_matrix("codes", codes, torch.uint8, shown_as[0])
    dtype = torch.uint8 if codes.dtype == torch.uint8 else shown_as[1]
    codes = codes.view(torch.uint8)
    source.check_parts(codes, scales, codes.shape[1], torch.float32)
    mine, other = source.element, target.element
    factor = 2.0 ** (other.bias - mine.bias)
    moved = scales * factor
    doubles = factor > 1
    if doubles and not scales.is_meta and bool((moved.isinf() & scales.isfinite()).any()):
        raise ValueError(
            "a scale of 2^127 or more cannot be doubled; its values are out of range: dequantize "
            "these codes and quantize again"
        )

    special = ~mine.decode(codes).isfinite()
    above = ((codes & 0x7F) > other.max_code) & ~special
    again = in_blocks(above, source.scaling.block).any(3).any(1)
    if not doubles:
        again |= moved.abs() < torch.finfo(torch.float32).tiny
    same_bytes = codes if other.has_negative_zero else torch.where(codes == 0x80, 0, codes)
    # The codes of the other element for the same numbers, to nearest even.
    zero = torch.zeros((), dtype=torch.int32, device=codes.device)
    encoded = other.encode(mine.decode(codes).view(torch.int32), zero)
    made = torch.where(_of_elements(again, source, codes), encoded, same_bytes)
    made = torch.where(special, other.nan_code or 0, made).to(torch.uint8)
    return made.view(dtype), torch.where(again, scales, moved)


def _of_elements(blocks: Tensor, fmt: Format, like: Tensor) -> Tensor:
    """What holds for its block, for every element."""
    height, width = fmt.scaling.block
    spread = blocks.repeat_interleave(height, 0).repeat_interleave(width, 1)
    return spread[: like.shape[0], : like.shape[1]]

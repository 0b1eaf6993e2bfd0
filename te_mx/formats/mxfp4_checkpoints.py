"""MXFP4 as others store it: the same codes and scale bytes, in other places.

te_mx holds codes [.., rows, ceil(k/2)], element 2j in the low nibble of byte j, and E8M0 scales
[.., rows, ceil(k/32)], both uint8. With B = k/32:

====================  =========================  ===================================================
functions             their tensors              what is different
====================  =========================  ===================================================
compressed_tensors    weight_packed [.., k/2]    nothing: ``mxfp4-pack-quantized`` has these bytes
                      weight_scale [.., B]       under these names
gpt_oss               ``*_blocks`` [.., B, 16]   the bytes of a block have a dimension of their own
                      ``*_scales`` [.., B]
deep_gemm             codes int8 [.., k/2]       four scales of a row in an int32, the first in its
                      scales int32               lowest byte; zeros behind the last. Column-major:
                      [.., rows, ceil(B/4)]      strides 1 and rows rounded up to a multiple of 4
ggml                  blocks uint8 [.., 17 B]    a block is its scale and 16 bytes: byte j holds
                                                 element j low and element j + 16 high
====================  =========================  ===================================================

Every ``from_..`` returns (codes, scales) for te_mx.MXTensor, for a state_dict (``weight``,
``weight_scale``), or for ``te_mx.formats.get("mxfp4").dequantize``; every ``to_..`` is its inverse,
byte for byte. Results may share memory with what was given. All leading dimensions are kept. Rows
are whole blocks, except that those of deep_gemm may end after any even k: a last block that is
shorter has no place elsewhere.

Scale byte 255 is NaN here and in the OCP specification, and stays 255. ggml reads it as 2^128, so
neither is put in the place of the other: that is an error, for which the host looks at the scales.
"""

from typing import Any

import torch
from torch import Tensor

from te_mx.formats import packing
from te_mx.formats.packing import as_bytes, dense, expect, whole_blocks
from te_mx.formats.scaling import NAN_SCALE
from te_mx.runtime.arguments import check_size

_K = 32  # elements of a block
_BYTES = _K // 2
_INTS = 4  # scales in an int32
_CODES = (torch.uint8, torch.float4_e2m1fn_x2)
_SCALES = (torch.uint8, torch.float8_e8m0fnu)

Parts = tuple[Tensor, Tensor]  # codes, scales


# ------------------------------------------------------------------------------- compressed-tensors
def from_compressed_tensors(weight_packed: Tensor, weight_scale: Tensor) -> Parts:
    """Codes and scales of ``weight_packed`` [.., k/2] and ``weight_scale`` [.., k/32].

    Raises:
        TypeError: they are no dense tensors of bytes.
        ValueError: their shapes do not belong together.
    """
    packed = as_bytes("weight_packed", weight_packed, *_CODES)
    scale = as_bytes("weight_scale", weight_scale, *_SCALES)
    blocks = whole_blocks("weight_packed", packed, _BYTES)
    expect("weight_scale", scale, (*packed.shape[:-1], blocks), "weight_packed", packed)
    return packed, scale


def to_compressed_tensors(codes: Tensor, scales: Tensor, k: int) -> Parts:
    """(weight_packed, weight_scale) of codes and scales of rows of k elements.

    Raises:
        TypeError: a part is no dense tensor of bytes, or k no int.
        ValueError: shapes do not belong together, or k is no multiple of 32.
    """
    return _ours(codes, scales, k, _K)


# ------------------------------------------------------------------------------------------ gpt-oss
def from_gpt_oss(blocks: Tensor, scales: Tensor) -> Parts:
    """Codes and scales of ``*_blocks`` [.., k/32, 16] and ``*_scales`` [.., k/32].

    Raises as from_compressed_tensors."""
    packed = as_bytes("blocks", blocks, *_CODES)
    scale = as_bytes("scales", scales, *_SCALES)
    if packed.dim() < 2 or packed.shape[-1] != _BYTES:
        raise ValueError(f"blocks must be [.., k / 32, {_BYTES}], got {tuple(packed.shape)}")
    expect("scales", scale, tuple(packed.shape[:-1]), "blocks", packed)
    return packed.flatten(-2), scale


def to_gpt_oss(codes: Tensor, scales: Tensor, k: int) -> Parts:
    """(blocks [.., k/32, 16], scales [.., k/32]) of codes and scales of rows of k elements.

    Raises as to_compressed_tensors."""
    codes, scales = _ours(codes, scales, k, _K)
    return codes.unflatten(-1, (scales.shape[-1], _BYTES)), scales


# ----------------------------------------------------------------------------------------- DeepGEMM
def from_deep_gemm(codes: Tensor, scales: Tensor, k: int | None = None) -> Parts:
    """Codes and scales of int8 codes [.., rows, k/2] and int32 scales [.., rows, ceil(k/128)] with
    any strides; k is twice the bytes of a row by default. What lies behind the last scale of a row
    is not looked at.

    Raises:
        TypeError: a part is no dense tensor of such a dtype, or k no int.
        ValueError: shapes do not belong together, or k is odd.
    """
    held, words = as_bytes("codes", codes, torch.int8), dense("scales", scales, torch.int32)
    k = _k(2 * held.shape[-1] if k is None else k, 2)
    blocks = -(-k // _K)
    _expect_codes(held, k)
    expected = (*held.shape[:-1], -(-blocks // _INTS))
    expect("scales", words, expected, "codes", held)
    # A column alone counts as contiguous with any stride, and could not be seen as bytes.
    words = words.clone(memory_format=torch.contiguous_format)
    return held, words.view(torch.uint8)[..., :blocks].contiguous()


def to_deep_gemm(codes: Tensor, scales: Tensor, k: int) -> Parts:
    """(codes int8 [.., rows, k/2], scales int32 [.., rows, ceil(k/128)]) of codes and scales of
    rows of k elements.

    Raises as to_compressed_tensors, where k may be any even number."""
    codes, scales = _ours(codes, scales, k, 2)
    if codes.dim() < 2:
        raise ValueError(f"codes must be [.., rows, k / 2], got {tuple(codes.shape)}")
    *_, rows, blocks = scales.shape
    padded = torch.nn.functional.pad(scales, (0, -blocks % _INTS))
    grouped = padded.unflatten(-1, (padded.shape[-1] // _INTS, _INTS)).contiguous()
    words = grouped.view(torch.int32).squeeze(-1)
    shape = (*scales.shape[:-2], words.shape[-1], rows + -rows % _INTS)
    room = torch.zeros(shape, dtype=torch.int32, device=words.device)
    return codes.view(torch.int8), room.transpose(-2, -1)[..., :rows, :].copy_(words)


# --------------------------------------------------------------------------------------------- ggml
def from_ggml(blocks: Tensor) -> Parts:
    """Codes and scales of rows of 17-byte blocks, uint8 [.., 17 * k/32].

    Raises:
        TypeError: blocks is no dense uint8 tensor.
        ValueError: its rows are no whole blocks, or a scale is 255: 2^128, which E8M0 has not.
    """
    held = as_bytes("blocks", blocks, torch.uint8)
    count = whole_blocks("blocks", held, _BYTES + 1)
    parts = held.unflatten(-1, (count, _BYTES + 1))
    scales, pairs = parts[..., 0].contiguous(), parts[..., 1:]
    _refuse_nan(scales, "stands for 2^128 in ggml and for NaN in MXFP4")
    elements = torch.cat([pairs & 0xF, pairs >> 4], -1)
    return packing.pack(elements, 4).flatten(-2), scales


def to_ggml(codes: Tensor, scales: Tensor, k: int) -> Tensor:
    """Rows of 17-byte blocks, uint8 [.., 17 * k/32], of codes and scales of rows of k elements.

    Raises as to_compressed_tensors, and ValueError for a scale of 255, which is NaN."""
    codes, scales = _ours(codes, scales, k, _K)
    _refuse_nan(scales, "is NaN, which ggml has no byte for")
    pairs = codes.unflatten(-1, (scales.shape[-1], _BYTES))
    elements = packing.unpack(pairs, _K, 4)
    qs = elements[..., :_BYTES] | elements[..., _BYTES:] << 4
    return torch.cat([scales.unsqueeze(-1), qs], -1).flatten(-2)


# ------------------------------------------------------------------------------------------- checks
def _ours(codes: Any, scales: Any, k: Any, multiple: int) -> Parts:
    """Codes and scales of rows of k elements as contiguous bytes, checked."""
    held, scale = as_bytes("codes", codes, *_CODES), as_bytes("scales", scales, *_SCALES)
    k = _k(k, multiple)
    _expect_codes(held, k)
    expect("scales", scale, (*held.shape[:-1], -(-k // _K)), "codes", held)
    return held, scale


def _k(k: Any, multiple: int) -> int:
    k = check_size("k", k)
    if k % multiple:
        raise ValueError(
            f"k must be a multiple of {multiple} in this layout, got {k}: pad the rows with zeros "
            "before they are quantized"
        )
    return k


def _expect_codes(held: Tensor, k: int) -> None:
    if held.shape[-1] != k // 2:
        raise ValueError(
            f"codes must have {k // 2} bytes a row for k = {k}, two elements a byte, got "
            f"{tuple(held.shape)}"
        )


def _refuse_nan(scales: Tensor, why: str) -> None:
    if not scales.is_meta and bool((scales == NAN_SCALE).any()):
        raise ValueError(f"a scale byte is 255, which {why}; repair or leave out this tensor")

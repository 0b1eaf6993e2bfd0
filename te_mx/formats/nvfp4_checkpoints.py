"""NVFP4 as others store it: the same codes and block scales, a tensor scale or its reciprocal.

te_mx holds codes uint8 [.., rows, k/2], element 2j in the low nibble of byte j, scales uint8 (bytes
of E4M3) [.., rows, k/16] and a tensor scale, fp32 [..]; value = code * scale * tensor scale.

====================  ===================================  ===================================
functions             their tensors                        what is different
====================  ===================================  ===================================
modelopt              weight uint8, weight_scale           nothing: these are te_mx's names in
                      float8_e4m3fn, weight_scale_2 fp32   a state_dict, too
compressed_tensors    weight_packed uint8, weight_scale    the reciprocal of the tensor scale
                      float8_e4m3fn, weight_global_scale
                      fp32 [1]
torchao               NVFP4Tensor: qdata, scale,           scales may be swizzled; no
                      per_tensor_scale                     per_tensor_scale is 1
mxfp4                 codes, E8M0 scales [.., k/32]        a scale is a power of two for 32
====================  ===================================  ===================================

``from_..`` returns (codes, scales, tensor scale) for te_mx.MXTensor (format "nvfp4"), ``to_..`` is
its inverse: byte for byte but for weight_global_scale, since a reciprocal is rounded (models that
from_pretrained loaded keep what they read). Results may share memory with what was given.

A file of ModelOpt read as compressed-tensors', or the other way round, gives a tensor scale of 32
and above, where the reciprocal is 2^10 times smaller and no writer's weights are so large: that is
an error which says both readings, and for which the host looks at the scale.
"""

import math
from typing import Any

import torch
from torch import Tensor

from te_mx.formats.mxfp4_checkpoints import from_compressed_tensors as mxfp4_parts
from te_mx.formats.packing import as_bytes, expect, whole_blocks
from te_mx.formats.scaling import NAN_SCALE
from te_mx.runtime.arguments import shown

_CODES = (torch.uint8, torch.float4_e2m1fn_x2)
_SCALES = (torch.uint8, torch.float8_e4m3fn)
_BYTES = 8  # of a block
_IMPLAUSIBLE = 2.0**5  # a tensor scale that lies 2^10 above its reciprocal
_LARGEST = 448.0 * 6.0
_BIAS, _TOP, _LOWEST = 127, 8, -9  # of E8M0; the powers of two that E4M3 holds

Parts = tuple[Tensor, Tensor, Tensor]  # codes, scales, tensor scale


def from_modelopt(weight: Tensor, weight_scale: Tensor, weight_scale_2: Tensor) -> Parts:
    """The parts of ``weight`` [.., rows, k/2], ``weight_scale`` [.., rows, k/16] and
    ``weight_scale_2``, one number a matrix.

    Raises:
        TypeError: no dense tensors, or of other dtypes.
        ValueError: their shapes do not belong together, or weight_scale_2 is no scale, or that of
            compressed-tensors.
    """
    names = "weight", "weight_scale", "weight_scale_2"
    return _parts(names, weight, weight_scale, weight_scale_2, False)


def to_modelopt(codes: Tensor, scales: Tensor, tensor_scale: Tensor) -> Parts:
    """(weight, weight_scale, weight_scale_2) of te_mx's parts. Raises as from_modelopt."""
    codes, scales, whole = _parts(_OURS, codes, scales, tensor_scale, False)
    return codes, scales.view(torch.float8_e4m3fn), whole


def from_compressed_tensors(
    weight_packed: Tensor, weight_scale: Tensor, weight_global_scale: Tensor
) -> Parts:
    """The parts of ``weight_packed`` [.., rows, k/2], ``weight_scale`` [.., rows, k/16] and
    ``weight_global_scale``, 2688 / amax of each matrix. Raises as from_modelopt."""
    names = "weight_packed", "weight_scale", "weight_global_scale"
    return _parts(names, weight_packed, weight_scale, weight_global_scale, True)


def to_compressed_tensors(codes: Tensor, scales: Tensor, tensor_scale: Tensor) -> Parts:
    """(weight_packed, weight_scale, weight_global_scale) of te_mx's; raises as from_modelopt."""
    codes, scales, whole = to_modelopt(codes, scales, tensor_scale)
    whole = whole.reciprocal()
    return codes, scales, whole if whole.dim() else whole.reshape(1)


def from_torchao(tensor: Any) -> Parts:
    """The parts of a torchao NVFP4Tensor [.., rows, k].

    Raises:
        TypeError: it is none.
        ValueError: it is transposed.
    """
    if type(tensor).__name__ != "NVFP4Tensor":
        raise TypeError(f"tensor must be torchao's NVFP4Tensor, got {shown(tensor)}")
    codes, scales, whole = tensor.qdata, tensor.scale, tensor.per_tensor_scale
    if codes.stride(-2) < codes.stride(-1):
        raise ValueError(f"tensor is transposed, {tuple(tensor.shape)}; give tensor.t()")
    *matrices, rows, half = codes.shape
    if tensor.is_swizzled_scales:  # tiles of 128 rows and 4 blocks, in each 32 rows of 16 bytes
        down, across = math.prod(matrices) * rows, half // _BYTES
        tiles = scales.reshape(-(-down // 128), -(-across // 4), 32, 4, 4)
        plain = tiles.permute(0, 3, 2, 1, 4).reshape(-(-down // 128) * 128, -(-across // 4) * 4)
        scales = plain[:down, :across].reshape(*matrices, rows, across)
    if whole is None:
        whole = torch.ones(matrices, device=codes.device)
    return _parts(("qdata", "scale", "per_tensor_scale"), codes, scales, whole, False)


def to_torchao(
    codes: Tensor, scales: Tensor, tensor_scale: Tensor, dtype: torch.dtype = torch.bfloat16
) -> Any:
    """A torchao NVFP4Tensor of this dtype, for weights alone, of te_mx's parts. Raises as
    from_modelopt; ImportError without torchao."""
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor

    codes, scales, whole = to_modelopt(codes, scales, tensor_scale)
    each = whole.reshape(*whole.shape, 1, 1) if whole.dim() else whole
    return NVFP4Tensor(codes, scales, 16, dtype, each)


def from_mxfp4(codes: Tensor, scales: Tensor) -> Parts:
    """The same values in NVFP4, of MXFP4's codes [.., rows, k/2] and E8M0 scales [.., rows, k/32]:
    the codes stay, and with K the largest exponent of a scale of codes that are not all zero, the
    tensor scale is 2^(K - 8) and a block scale 2^(exponent - K + 8), which E4M3 holds down to 2^-9.

    Raises:
        TypeError: the parts are no dense tensors of bytes.
        ValueError: their shapes do not belong together; a scale lies more than 17 powers of two
            below the largest of its matrix.
    """
    codes, scales = mxfp4_parts(codes, scales)
    if scales.dim() < 2:
        raise ValueError(f"codes must be [.., rows, k / 2], got {tuple(codes.shape)}")
    used = (codes & 0x77).unflatten(-1, (scales.shape[-1], 2 * _BYTES)).amax(-1) > 0
    nan = scales == NAN_SCALE
    exponents = scales.int() - _BIAS
    counted = torch.where(used & ~nan, exponents, -_BIAS - 1).flatten(-2)
    top = torch.nn.functional.pad(counted, (0, 1), value=-_BIAS - 1).amax(-1)[..., None, None]
    top = torch.where(top < -_BIAS, _TOP, top)  # nothing but zeros: a tensor scale of 1
    stored = torch.where(used, exponents - top + _TOP, 0)
    if not stored.is_meta and (low := int(((stored < _LOWEST) & ~nan).sum())):
        raise ValueError(
            f"{low} of {stored.numel()} blocks have a scale that lies more than 2^17 below the "
            "largest of their matrix, which NVFP4's scales do not reach: quantize the values "
            "instead, te_mx.quantize(x, 'nvfp4')"
        )
    made = torch.exp2(stored.clamp(_LOWEST, _TOP).float()).to(torch.float8_e4m3fn)
    bytes_ = made.view(torch.uint8).masked_fill(nan, 0x7F)
    whole = torch.ldexp(torch.ones_like(top, dtype=torch.float32), top - _TOP)
    return codes, bytes_.repeat_interleave(2, -1), whole[..., 0, 0]


def tensor_scale(name: str, scale: Any, reciprocal: bool) -> Tensor:
    """The tensor scale, fp32, that a scale of this name gives: itself or its reciprocal.

    Raises:
        TypeError: it is no tensor in fp32, bf16 or fp16.
        ValueError: one is no positive number, or 2^10 above the other reading of it.
    """
    known = (torch.float32, torch.bfloat16, torch.float16)
    if not isinstance(scale, Tensor) or scale.dtype not in known:
        raise TypeError(
            f"{name} must be a tensor of float32, what codes times block scales are "
            f"{'divided' if reciprocal else 'multiplied'} by, got {shown(scale)}"
        )
    plain = scale.detach().float()
    whole = plain.reciprocal() if reciprocal else plain
    if whole.is_meta or whole.numel() == 0:
        return whole
    least, most = (float(one) for one in whole.aminmax())
    if not (least > 0 and math.isfinite(most)):
        wrong = plain[~((plain > 0) & (whole > 0) & plain.isfinite() & whole.isfinite())]
        raise ValueError(f"{name} must be positive and finite, got {wrong.flatten()[0].item()}")
    if why := reciprocal_problem(name, whole, reciprocal):
        raise ValueError(why)
    return whole


def reciprocal_problem(name: str, whole: Tensor, reciprocal: bool = False) -> str:
    """Why a tensor scale, which a number of this name gives, is surely the reciprocal of one; an
    empty string where it may be one."""
    top = float(whole.max()) if whole.numel() else 0.0
    if top < _IMPLAUSIBLE:
        return ""
    other = "ModelOpt's weight_scale_2"
    other = other if reciprocal else "compressed-tensors' weight_global_scale"
    return (
        f"{name} is {1 / top if reciprocal else top:.6g}, with which weights go up to "
        f"{top * _LARGEST:.3g}. Read as {other}, the reciprocal, they go up to "
        f"{_LARGEST / top:.3g}: if that is right, say so, by the names of the tensors and the "
        "quantization_config or by the other function of te_mx.formats.nvfp4_checkpoints"
    )


_OURS = "codes", "scales", "tensor_scale"


def _parts(
    names: tuple[str, str, str], codes: Any, scales: Any, scale: Any, reciprocal: bool
) -> Parts:
    packed, stored = as_bytes(names[0], codes, *_CODES), as_bytes(names[1], scales, *_SCALES)
    blocks = whole_blocks(names[0], packed, _BYTES)
    if stored.shape[-1] * 2 == blocks and stored.shape[:-1] == packed.shape[:-1]:
        raise ValueError(
            f"{names[1]} has one scale for 32 elements, {tuple(stored.shape)} for {names[0]} "
            f"{tuple(packed.shape)}, and NVFP4 has one for 16: if this is MXFP4, "
            "te_mx.formats.mxfp4_checkpoints reads it"
        )
    expect(names[1], stored, (*packed.shape[:-1], blocks), names[0], packed)
    whole = tensor_scale(names[2], scale, reciprocal)
    matrices = packed.shape[:-2]
    if whole.numel() != math.prod(matrices):
        raise ValueError(
            f"{names[2]} must have one number a matrix, {math.prod(matrices)} for {names[0]} "
            f"{tuple(packed.shape)}, got {tuple(scale.shape)}"
        )
    whole = whole.reshape(matrices)
    expect(names[2], whole, tuple(matrices), names[0], packed)
    return packed, stored, whole

"""NVFP4 as ModelOpt and compressed-tensors store it, and MXFP4 as NVFP4: values by the definition,
bytes there and back, and what is refused."""

from __future__ import annotations

import functools

import ml_dtypes
import numpy as np
import nvfp4_oracle as oracle
import pytest
import torch

import te_mx
from te_mx import formats
from te_mx.formats import nvfp4_checkpoints as nv

E4M3 = torch.float8_e4m3fn
SHAPES = [(5, 48), (3, 5, 48), (2, 3, 1, 16)]


def stored(shape, seed=0):
    """Every code, every positive scale, one tensor scale a matrix."""
    rng = torch.Generator().manual_seed(seed)
    *matrices, rows, k = shape
    codes = torch.randint(256, (*matrices, rows, k // 2), generator=rng, dtype=torch.uint8)
    scales = torch.randint(127, (*matrices, rows, k // 16), generator=rng, dtype=torch.uint8)
    return codes, scales.view(E4M3), torch.rand(matrices, generator=rng) / 2688


def values(codes, scales, whole):
    """code * scale * whole in fp64, and nothing of te_mx."""
    pairs = np.stack([codes.numpy() & 15, codes.numpy() >> 4], -1).reshape(*codes.shape[:-1], -1)
    of_blocks = scales.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    made = oracle.VALUES[pairs].astype(np.float64) * of_blocks.repeat(16, -1)
    return torch.from_numpy(made * whole.double().numpy()[..., None, None])


def tensors(codes, scales, whole):
    """Matrices as te_mx's tensors, their values stacked in fp64."""
    *matrices, rows, half = codes.shape
    made = []
    for c, s, t in zip(
        codes.reshape(-1, rows, half), scales.reshape(-1, rows, half // 8), whole.reshape(-1),
        strict=True,
    ):  # fmt: skip
        parts = {"rowwise_data": c, "rowwise_scale": s, "tensor_scale": t}
        made.append(te_mx.MXTensor((rows, 2 * half), "nvfp4", **parts))
    each = [one.operand("rowwise").values(torch.float64) for one in made]
    return torch.stack(each).reshape(*matrices, rows, 2 * half)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_bytes_of_both_writers(shape):
    given = stored(shape)
    parts = nv.from_modelopt(*given)
    assert torch.equal(tensors(*parts), values(*given))
    for one, other in zip(nv.to_modelopt(*parts), given, strict=True):
        assert one.dtype == other.dtype and torch.equal(one.float(), other.float())
    packed, scales, reciprocal = nv.to_compressed_tensors(*parts)
    assert reciprocal.shape == (shape[:-2] or (1,)) and scales.dtype == E4M3
    again = nv.from_compressed_tensors(packed, scales, reciprocal)
    assert torch.equal(again[0], parts[0]) and torch.equal(again[1], parts[1])
    torch.testing.assert_close(again[2], parts[2], rtol=2**-22, atol=0)  # rounded twice


@pytest.mark.parametrize("spread", [0, 17])
def test_mxfp4_is_nvfp4_without_loss(spread):
    rng = torch.Generator().manual_seed(spread)
    codes = torch.randint(256, (2, 7, 48), generator=rng, dtype=torch.uint8)
    scales = 120 - torch.randint(spread + 1, (2, 7, 3), generator=rng, dtype=torch.uint8)
    scales[:, 0, 0], scales[:, 1, 1] = 120, 120 - spread
    scales[0, 2, 2], scales[1, 6, 0] = 255, 3  # NaN; far below, of zeros alone
    codes[1, 6, :16] = 0x80
    made = nv.from_mxfp4(codes, scales)
    assert torch.equal(made[0], codes) and torch.equal(made[2], torch.full((2,), 2.0**-15))
    fmt = formats.get("mxfp4")
    expected = torch.stack(
        [fmt.dequantize(c, s, 96, torch.float32) for c, s in zip(codes, scales, strict=True)]
    )
    got = tensors(*made)
    assert torch.equal(got.isnan(), expected.isnan()) and got.isnan().sum() == 32
    assert torch.equal(got.nan_to_num(), expected.double().nan_to_num())
    codes[1, 6, :16] = 0x81
    with pytest.raises(ValueError, match=r"^1 of 42 blocks have a scale .* 2\^17 below"):
        nv.from_mxfp4(codes, scales)
    nothing = nv.from_mxfp4(torch.zeros_like(codes), torch.zeros_like(scales))
    assert torch.equal(nothing[2], torch.ones(2)) and not tensors(*nothing).any()


@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize("shape", [(130, 96), (2, 128, 32)], ids=str)
def test_tensors_of_torchao(shape, swizzled):
    made = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    x = torch.randn(shape, dtype=torch.bfloat16)
    whole = torch.full((*shape[:-2], 1, 1) if len(shape) > 2 else (), 0.01)
    q = made.NVFP4Tensor.to_nvfp4(x, per_tensor_scale=whole, is_swizzled_scales=swizzled)
    parts = nv.from_torchao(q)
    # torchao rounds scale * scale to fp32 first.
    close = functools.partial(torch.testing.assert_close, rtol=2**-22, atol=0)
    close(tensors(*parts).float(), q.dequantize(torch.float32))
    again = nv.to_torchao(*parts, torch.bfloat16)
    assert torch.equal(again.dequantize(), q.dequantize()) and again.shape == q.shape
    for one, other in zip(nv.from_torchao(again), parts, strict=True):
        assert torch.equal(one, other)
    if len(shape) == 2:
        layer = te_mx.Linear(shape[1], shape[0], bias=False)
        layer.load_state_dict({"weight": q})
        assert layer.state_dict()["weight_scale_2"] == whole
        with pytest.raises(ValueError, match="is transposed"):
            nv.from_torchao(q.t())
        with pytest.raises(TypeError, match="NVFP4Tensor, got"):
            nv.from_torchao(x)
    alone = made.NVFP4Tensor.to_nvfp4(x)  # one level of scales
    close(tensors(*nv.from_torchao(alone)).float(), alone.dequantize(torch.float32))


CODES, SCALES, WHOLE = stored((5, 48))


@pytest.mark.parametrize(
    "name, given, error, match",
    [
        ("modelopt", (CODES.to(torch.int8), SCALES, WHOLE), TypeError, "^weight must be .* uint8"),
        ("modelopt", (CODES, SCALES.float(), WHOLE), TypeError, "^weight_scale must be .*e4m3fn"),
        ("modelopt", (CODES, SCALES, WHOLE.double()), TypeError, "^weight_scale_2 .* multiplied"),
        ("modelopt", (CODES, SCALES, None), TypeError, "^weight_scale_2 must be .* got None"),
        ("compressed_tensors", (CODES, SCALES, None), TypeError, "^weight_global_scale .* divided"),
        ("modelopt", (CODES, SCALES, WHOLE.expand(5)), ValueError, "one number a matrix, 1 for"),
        ("modelopt", (CODES, SCALES, -WHOLE), ValueError, "^weight_scale_2 must be positive"),
        ("modelopt", (CODES, SCALES, WHOLE * torch.nan), ValueError, "and finite, got nan"),
        ("compressed_tensors", (CODES, SCALES, WHOLE * 0), ValueError, "finite, got 0"),
        ("modelopt", (CODES, SCALES[:, :-1], WHOLE), ValueError, "^weight_scale must have shape"),
        ("modelopt", (CODES[:, 1:], SCALES, WHOLE), ValueError, "whole blocks of 8 bytes"),
        (
            "modelopt", (CODES[:, :16], SCALES[:, :1], WHOLE), ValueError,
            r"one scale for 32 elements, .* if this is MXFP4, te_mx\.formats\.mxfp4_checkpoints",
        ),
        (
            "modelopt", (CODES, SCALES, torch.tensor(2688 / 0.5)), ValueError,
            r"is 5376, with which weights go up to 1\.45e\+07\. Read as compressed-tensors' "
            r"weight_global_scale, the reciprocal, they go up to 0\.5: if that is right",
        ),
        (
            "compressed_tensors", (CODES, SCALES, torch.tensor([2.0**-7])), ValueError,
            r"is 0\.0078125, .* up to 3\.44e\+05\. Read as ModelOpt's weight_scale_2, .* to 21:",
        ),
    ],
)  # fmt: skip
def test_what_is_refused(name, given, error, match):
    with pytest.raises(error, match=match):
        getattr(nv, f"from_{name}")(*given)

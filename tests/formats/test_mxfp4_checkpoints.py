"""Converters of MXFP4 layouts: each against bytes placed one by one, and back again."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import te_mx
from te_mx import formats
from te_mx.formats import mxfp4_checkpoints as other

MXFP4 = formats.get("mxfp4")
LEADING = [(), (3,), (5, 3), (2, 0, 3)]
VALUES = [0.0, 0.5, 1, 1.5, 2, 3, 4, 6]
E2M1 = np.array(VALUES + [-value for value in VALUES])


def parts(lead, k, top=255):
    """Every code and every scale byte below top, made by no quantizer; padding is 0."""
    torch.manual_seed(len(lead) + k)
    elements = torch.randint(0, 16, (*lead, k), dtype=torch.uint8)
    scales = torch.randint(0, top, (*lead, -(-k // 32)), dtype=torch.uint8)
    return elements, MXFP4.pack(elements), scales


def same(made, wanted):
    for one, other_one in zip(made, wanted, strict=True):
        assert one.dtype == other_one.dtype and torch.equal(one, other_one)


@pytest.mark.parametrize("lead", LEADING)
@pytest.mark.parametrize("k", [32, 160])
def test_compressed_tensors(lead, k):
    elements, codes, scales = parts(lead, k, 256)
    packed, scale = other.to_compressed_tensors(codes, scales, k)
    assert torch.equal(packed, elements[..., ::2] | elements[..., 1::2] << 4)
    assert torch.equal(scale, scales)
    same(other.from_compressed_tensors(packed, scale), (codes, scales))


@pytest.mark.parametrize("lead", LEADING)
@pytest.mark.parametrize("k", [32, 160])
def test_gpt_oss(lead, k):
    elements, codes, scales = parts(lead, k, 256)
    blocks, own = other.to_gpt_oss(codes, scales, k)
    assert blocks.shape == (*lead, k // 32, 16) and torch.equal(own, scales)
    for i in range(k):
        nibble = blocks[..., i // 32, i % 32 // 2] >> 4 * (i % 2) & 0xF
        assert torch.equal(nibble, elements[..., i])
    same(other.from_gpt_oss(blocks, own), (codes, scales))


def test_gpt_oss_as_transformers_reads_it():
    """Their dequantizer turns the last two dimensions."""
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    _, codes, scales = parts((2, 6), 96, 140)
    scales += 100
    blocks, own = other.to_gpt_oss(codes, scales.clamp(max=150), 96)
    theirs = mxfp4.convert_moe_packed_tensors(blocks, own, dtype=torch.float32)
    codes, scales = other.from_gpt_oss(blocks, own)
    ours = MXFP4.dequantize(codes.flatten(0, 1), scales.flatten(0, 1), 96, torch.float32)
    assert torch.equal(theirs.transpose(-2, -1).contiguous(), ours.view(2, 6, 96))


@pytest.mark.parametrize("lead", [lead for lead in LEADING if lead])
@pytest.mark.parametrize("k", [0, 2, 32, 66, 128, 130, 288])
def test_deep_gemm(lead, k):
    _, codes, scales = parts(lead, k, 256)
    packed, words = other.to_deep_gemm(codes, scales, k)
    assert packed.dtype == torch.int8 and torch.equal(packed.view(torch.uint8), codes)
    blocks, rows = scales.shape[-1], lead[-1]
    assert words.dtype == torch.int32 and words.shape == (*lead, -(-blocks // 4))
    assert words.stride()[-2:] == (1, -(-rows // 4) * 4)
    for i in range(4 * words.shape[-1]):
        byte = words[..., i // 4] >> 8 * (i % 4) & 0xFF
        wanted = scales[..., i] if i < blocks else torch.zeros(lead, dtype=torch.uint8)
        assert torch.equal(byte, wanted.int())
    same(other.from_deep_gemm(packed, words), (codes, scales))
    filled = words | (-1 << 8 * (blocks % 4) if blocks % 4 else 0)  # behind the last scale
    filled[..., :-1] = words[..., :-1]
    same(other.from_deep_gemm(packed, filled, k), (codes, scales))


@pytest.mark.parametrize("lead", LEADING)
@pytest.mark.parametrize("k", [32, 160])
def test_ggml(lead, k):
    elements, codes, scales = parts(lead, k)
    made = other.to_ggml(codes, scales, k)
    assert made.shape == (*lead, 17 * k // 32)
    blocks, own = made.unflatten(-1, (k // 32, 17)), elements.unflatten(-1, (k // 32, 32))
    assert torch.equal(blocks[..., 0], scales)
    for j in range(16):
        assert torch.equal(blocks[..., 1 + j] & 0xF, own[..., j])
        assert torch.equal(blocks[..., 1 + j] >> 4, own[..., j + 16])
    same(other.from_ggml(made), (codes, scales))


def test_values_as_ggml_computes_them():
    """Doubled elements times half of the scale, whose bytes 0 and 1 are subnormal numbers."""
    _, codes, scales = parts((4,), 96, 200)
    scales[0] = torch.tensor([0, 1, 2])
    blocks = other.to_ggml(codes, scales, 96).numpy().reshape(4, 3, 17)
    halves = np.ldexp(1.0, blocks[..., 0].astype(int) - 128)[..., None]
    table = (2 * E2M1).astype(int)
    values = np.concatenate([table[blocks[..., 1:] & 15], table[blocks[..., 1:] >> 4]], -1) * halves
    ours = MXFP4.dequantize(codes, scales, 96, torch.float64)
    np.testing.assert_array_equal(values.reshape(4, 96), ours.numpy())


@pytest.mark.filterwarnings("ignore::te_mx.FallbackWarning")
def test_tensors_of_te_mx():
    """The parts of an MXTensor under torch's names of these dtypes, and back into one."""
    q = te_mx.quantize(torch.randn(2, 5, 64), fmt="mxfp4")
    codes, scales = q.rowwise_data, q.rowwise_scale
    for to, back in (
        (other.to_gpt_oss, other.from_gpt_oss),
        (other.to_compressed_tensors, other.from_compressed_tensors),
        (other.to_deep_gemm, other.from_deep_gemm),
        (other.to_ggml, other.from_ggml),
    ):
        made = to(codes, scales, 64)
        row = back(*made) if isinstance(made, tuple) else back(made)
        again = te_mx.MXTensor(q.shape, "mxfp4", rowwise_data=row[0], rowwise_scale=row[1])
        assert again.equal(q)


def test_nan():
    """255 stays where it is NaN, and does not become the number that it is for ggml."""
    codes, scales = MXFP4.quantize(torch.full((1, 32), torch.nan), "rceil")
    for to in (other.to_compressed_tensors, other.to_gpt_oss):
        assert to(codes, scales, 32)[1].tolist() == [[255]]
    assert other.to_deep_gemm(codes, scales, 32)[1].tolist() == [[255]]
    with pytest.raises(ValueError, match="255, which is NaN, which ggml has no byte for"):
        other.to_ggml(codes, scales, 32)
    with pytest.raises(ValueError, match=r"255, which stands for 2\^128 in ggml"):
        other.from_ggml(torch.full((17,), 255, dtype=torch.uint8))


U8, I8, I32 = torch.uint8, torch.int8, torch.int32
CODES, SCALES = torch.zeros(4, 32, dtype=U8), torch.zeros(4, 2, dtype=U8)  # [4, 64]


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: other.to_gpt_oss(CODES, SCALES, 63), ValueError, "multiple of 32.*got 63"),
        (lambda: other.to_ggml(CODES, SCALES, 48), ValueError, "multiple of 32.*got 48"),
        (lambda: other.to_compressed_tensors(CODES, SCALES, 33), ValueError, "pad the rows"),
        (lambda: other.to_deep_gemm(CODES, SCALES, 63), ValueError, "multiple of 2.*got 63"),
        (lambda: other.to_gpt_oss(CODES, SCALES, 64.0), TypeError, "k must be an int"),
        (lambda: other.to_gpt_oss(CODES, SCALES, 96), ValueError, "48 bytes a row"),
        (lambda: other.to_gpt_oss(CODES, SCALES[:3], 64), ValueError, r"\(4, 2\) for codes"),
        (lambda: other.to_gpt_oss(CODES.int(), SCALES, 64), TypeError, "codes must be a tensor of"),
        (lambda: other.to_gpt_oss(CODES, SCALES.float(), 64), TypeError, "scales must be a tensor"),
        (lambda: other.to_gpt_oss(CODES, SCALES.to("meta"), 64), ValueError, "move one"),
        (lambda: other.to_deep_gemm(CODES[0], SCALES[0], 64), ValueError, r"\[.., rows, k / 2\]"),
        (lambda: other.from_gpt_oss(CODES, SCALES), ValueError, r"k / 32, 16\], got \(4, 32\)"),
        (lambda: other.from_gpt_oss(CODES.view(4, 2, 16), SCALES[:, :1]), ValueError, "have shape"),
        (lambda: other.from_gpt_oss(CODES.view(I8), SCALES), TypeError, "blocks must be a tensor"),
        (lambda: other.from_compressed_tensors(CODES[:, :9], SCALES), ValueError, "of 16 bytes"),
        (lambda: other.from_compressed_tensors(CODES, SCALES.float()), TypeError, "float8_e8m0fnu"),
        (lambda: other.from_compressed_tensors([1], SCALES), TypeError, r"got \[1\]"),
        (lambda: other.from_deep_gemm(CODES, SCALES.int()), TypeError, "tensor of int8"),
        (lambda: other.from_deep_gemm(CODES.view(I8), SCALES), TypeError, "tensor of int32"),
        (lambda: other.from_deep_gemm(CODES.view(I8), SCALES.int()), ValueError, r"\(4, 1\)"),
        (lambda: other.from_deep_gemm(CODES.view(I8), SCALES[:, :1].int(), 62), ValueError, "31"),
        (lambda: other.from_ggml(CODES), ValueError, "whole blocks of 17 bytes"),
        (lambda: other.from_ggml(CODES.to_sparse()), TypeError, "dense tensor"),
        (lambda: other.from_ggml(torch.tensor(1, dtype=U8)), ValueError, "one dimension or more"),
    ],
)
def test_errors_say_what_is_wrong(call, error, says):
    with pytest.raises(error, match=says):
        call()

"""te_mx.formats.blockwise against torchao's torch references, bit for bit."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch

from te_mx import formats
from te_mx.formats import blockwise

torchao = pytest.importorskip("torchao")
BYTE = torch.uint8


def references() -> dict[str, Any]:
    """torchao's torch references. Their module also holds Triton kernels and cannot be imported
    where there is no Triton, so that the functions are taken out of it."""
    path = Path(torchao.__file__).parent / "prototype/blockwise_fp8_training/kernels.py"
    found = [
        node for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("torch_blockwise_scale_")
    ]  # fmt: skip
    fp8 = {"FP8_E4M3_DTYPES": blockwise.DTYPES, "e4m3_dtype": torch.float8_e4m3fn, "EPS": 1e-12}
    names: dict[str, Any] = {"torch": torch, "Tuple": tuple, **fp8}
    exec(compile(ast.Module(found, []), str(path), "exec"), names)
    return names


names = references()
lhs = names["torch_blockwise_scale_act_quant_lhs"]
rhs = names["torch_blockwise_scale_act_quant_rhs"]
weight = names["torch_blockwise_scale_weight_quant"]


def turned(reference):
    """A reference on the transposed matrix."""
    return lambda x, *rest: reference(x.t().contiguous(), *rest)


# function -> torchao's reference, and whether codes and scales lie by columns.
CASES = {
    "act_quant_lhs": (lhs, False, True),
    "act_quant_rhs": (rhs, True, False),
    "act_quant_transposed_lhs": (turned(lhs), False, True),
    "weight_quant_rhs": (weight, True, True),
    "weight_quant_transposed_rhs": (turned(weight), True, True),
}
DTYPES = pytest.mark.parametrize("dtype", blockwise.DTYPES, ids=["fn", "fnuz"])
EVERY = pytest.mark.parametrize("name", CASES)


def matrix(rows, cols, dtype):
    """Rows and columns of many sizes, two blocks of zeros, and the smallest numbers."""
    torch.manual_seed(0)
    x = torch.randn(rows, cols) * torch.exp2(torch.randint(-30, 30, (rows, 1)))
    x = x * torch.exp2(torch.randint(-8, 8, (cols,)))
    x[: rows // 2, : cols // 2] = 0
    x[rows // 2 :, : cols // 2] *= 1e-30
    return x.to(dtype)


@EVERY
@DTYPES
@pytest.mark.parametrize("given", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("block", [128, 256])
def test_bits_of_torchao(name, dtype, given, block):
    reference, codes_by_columns, scales_by_columns = CASES[name]
    x = matrix(2 * block, 4 * block, given)
    codes, scales = getattr(blockwise, name)(x, block, dtype)
    want, want_scales = reference(x, block, dtype)
    assert codes.dtype == dtype and scales.dtype == torch.float32
    assert torch.equal(codes.view(BYTE), want.view(BYTE))
    assert torch.equal(scales.view(torch.int32), want_scales.view(torch.int32))
    for part, by_columns in ((codes, codes_by_columns), (scales, scales_by_columns)):
        assert (part.t() if by_columns else part).is_contiguous()


@EVERY
@DTYPES
def test_zeros_in_fp16_stay_zeros(name, dtype):
    """1e-12 is 0 in fp16: torchao's reference makes NaN of act_quant_rhs there."""
    x = torch.zeros(256, 128, dtype=torch.float16)
    x[-1, -1] = 2.0**-24
    codes, scales = getattr(blockwise, name)(x, 128, dtype)
    values = codes.float()
    assert scales.isfinite().all() and values.flatten()[:-1].eq(0).all() and values[-1, -1] > 0


@EVERY
@DTYPES
@pytest.mark.parametrize("shape", [(1, 1), (3, 130), (129, 257), (255, 127), (0, 5), (5, 0)])
def test_tails(name, dtype, shape):
    """What lies inside of whole blocks of a matrix with zeros around has the same bytes."""
    x = matrix(*shape, torch.float32) if 0 not in shape else torch.zeros(shape)
    function = getattr(blockwise, name)
    wide, widest = function(x, 300, dtype), function(x, 10**9, dtype)  # wider than any side
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(wide, widest, strict=True))
    whole = torch.zeros(384, 384)
    whole[: shape[0], : shape[1]] = x
    codes, scales = function(x, 128, dtype)
    all_codes, all_scales = function(whole, 128, dtype)
    for part, of in ((codes, all_codes), (scales, all_scales)):
        inside = of[: part.shape[0], : part.shape[1]]
        assert torch.equal(part.float(), inside.float())
    turns = "transposed" in name
    assert codes.shape == (shape[::-1] if turns else shape)


def test_values_are_codes_times_scales():
    """The formats of te_mx decode what torchao's quantizers made."""
    x = torch.randn(200, 300)
    for name, fmt in (("act_quant_lhs", "1x128"), ("weight_quant_rhs", "128x128"),
                      ("act_quant_rhs", "128x1")):  # fmt: skip
        codes, scales = getattr(blockwise, name)(x)
        codes = codes.contiguous().view(BYTE)
        values = formats.get(f"fp8_e4m3_{fmt}").dequantize(codes, scales, 300, torch.float32)
        assert ((values - x).norm() / x.norm()).item() < 0.03


@EVERY
@DTYPES
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_visible(name, dtype, bad):
    x = torch.randn(130, 130)
    x[129, 129] = bad
    codes, scales = getattr(blockwise, name)(x, 128, dtype)
    block = [128 if cut < size else 1 for cut, size in zip(scales.shape, codes.shape, strict=True)]
    factors = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[:130, :130]
    finite = (codes.float() * factors).isfinite()
    inside = torch.ones(130, 130, dtype=torch.bool)  # the last block, cut short
    inside[129 // block[0] * block[0] :, 129 // block[1] * block[1] :] = False
    assert torch.equal(finite, inside)


@EVERY
def test_bad_arguments(name):
    function, x = getattr(blockwise, name), torch.zeros(2, 2)
    with pytest.raises(TypeError, match=r"dtype must be torch.float8_e4m3fn or .*, got"):
        function(x, 128, torch.float8_e5m2)
    with pytest.raises(TypeError, match="block_size must be an int, got"):
        function(x, 128.0)
    with pytest.raises(ValueError, match="block_size must be 1 or more, got 0"):
        function(x, 0)
    with pytest.raises(ValueError, match="x must be a matrix"):
        function(x[0])
    with pytest.raises(TypeError, match="x must be a tensor of"):
        function(x.double())

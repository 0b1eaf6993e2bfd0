"""Matrices that make one, quantized where they lie: the bytes of the joined one."""

from __future__ import annotations

import pytest
import torch

from te_mx import _ops as ops
from te_mx._ops.quantize import parts_of

PACKED = "mxfp8_e4m3@sm90:8"
SPECS = [(PACKED, PACKED), (PACKED, ""), ("", PACKED), ("mxfp8_e4m3@rows", "mxfp8_e4m3@cols")]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def numbers(shape, dtype, seed):
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator).mul(10.0 ** (seed - 1)).to(dtype).to("cuda")


@pytest.mark.parametrize("specs", SPECS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [(128, 256, 40), (384, 77)], ids=str)
def test_behind_each_other(rows, dtype, specs):
    parts = [numbers((n, 200), dtype, i) for i, n in enumerate(rows)]
    got = ops.quantize_joined_2d(parts, *specs)
    want = ops.quantize_2d(torch.cat(parts), *specs)
    assert all(map(torch.equal, parts_of(got), parts_of(want)))

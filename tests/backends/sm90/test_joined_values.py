"""Values of several operands of codes, written behind each other."""

import pytest
import torch
from as_on_hopper import hopper

from te_mx import _ops as ops

K = 160


@pytest.mark.parametrize(
    ("fmt", "rule"), [("mxfp8_e4m3", "rceil"), ("mxfp4", "even"), ("fp8_e4m3_1x128", "pow2:0")]
)
def test_values_of_codes_behind_each_other(fmt, rule):
    with hopper():
        parts = [torch.randn(rows, K, dtype=torch.bfloat16) for rows in (96, 32, 64)]
        quantized = [ops.quantize_2d(part, f"{fmt}@rows", rule=rule).row for part in parts]
        want = torch.cat([ops.dequantize_2d(one, torch.float32) for one in quantized])
        assert torch.equal(ops.dequantize_joined_2d(quantized, torch.float32), want)

"""GELU' of every 16-bit number, wherever a GEMM may meet it: the ways to compute it differ by place
in the block, by dtype, and with K in parts."""

from __future__ import annotations

import pytest
import sm90_bounds as bounds
import sm90_calls as calls
import torch

PLACES = ((0, 0), (0, 1), (1, 0), (1, 1))
HOW = [{"config": config} for config in calls.full_configs()] + [{"parts": 2}]


def every_number(dtype):
    """[1024, 256] with all numbers of a 16-bit dtype in each of four places of a 16x16 block."""
    bits = torch.arange(-(2**15), 2**15, device="cuda").to(torch.int16).view(dtype).view(256, 256)
    return torch.cat([bits.roll((8 * down, 8 * right), (0, 1)) for down, right in PLACES])


@pytest.mark.parametrize("form", ["tanh", "erf"])
@pytest.mark.parametrize("how", HOW, ids=str)
@pytest.mark.parametrize("carried", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_derivative_of_every_number(dtype, carried, how, form):
    x = every_number(dtype)
    shape = (*x.shape, 1024)
    a, b = (calls.data(r, shape[2], "gaussian", torch.float32, 3) for r in shape[:2])
    sides = calls.operand(a, "e4m3"), calls.operand(0.05 * b, "e4m3")
    sums = calls.gemm(*sides, shape, out_dtype=torch.float32, **how)
    got = calls.gemm(
        *sides,
        shape,
        out_dtype=dtype if carried else torch.float32,
        gelu=form,
        gelu_in=x,
        **how,
    )
    number = ~x.isnan()
    assert got[~number].isnan().all()
    want = sums.double() * bounds.dgelu(x, form)
    bounds.assert_close(got[number], want[number], 2e-6 * sums.double().abs()[number])

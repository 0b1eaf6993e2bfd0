"""Frozen layers that torch.compile compiled: the decode kernel and the bits of eager code, in CUDA
graphs too."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import te_mx

BF16 = torch.bfloat16
K, N = 512, 384


def frozen(drop):
    torch.manual_seed(0)
    model = nn.Sequential(
        te_mx.Linear(K, N, dtype=BF16, device="cuda"),
        te_mx.LayerNormLinear(N, K, dtype=BF16, device="cuda", normalization="RMSNorm"),
        te_mx.LayerNormMLP(K, N, dtype=BF16, device="cuda"),
    )
    te_mx.freeze_weights(model, drop_master=drop)
    return model


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("drop", [False, True])
def test_the_kernels_and_the_bits_of_eager(drop, mode):
    torch._dynamo.reset()
    model = frozen(drop)
    compiled = torch.compile(model, fullgraph=True, mode=mode)
    with torch.no_grad(), te_mx.autocast():
        for rows in (1, 24):
            x = torch.randn(rows, K, dtype=BF16, device="cuda")
            got = [compiled(x).clone() for _ in range(4)]  # the first ones keep, then it captures
            ran = {layer.fprop for layer in te_mx.audit(model).layers}
            assert ran == {"sm90_decode"}
            expected = model(x)
            assert all(torch.equal(one, expected) for one in got)


@pytest.mark.parametrize("rows", [3, 200])  # 200: by the GEMM
@pytest.mark.parametrize("drop", [False, True])
def test_a_changed_weight_is_seen(drop, rows):
    torch._dynamo.reset()
    model, x = frozen(drop), torch.randn(rows, K, dtype=BF16, device="cuda")
    first = model[0]
    run = model if rows == 3 else first
    compiled = torch.compile(run, fullgraph=True)
    with torch.no_grad(), te_mx.autocast():
        before = compiled(x)
        (first.weight_codes.bitwise_xor_(0x80) if drop else first.weight.mul_(2))
        after = compiled(x)
        assert not torch.equal(after, before) and torch.equal(after, run(x))

"""torch's FlopCounterMode counts te_mx's GEMMs as it counts torch's."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import te_mx


def counted(run) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def step(module, x, *rest):
    x = x.clone().requires_grad_()
    module(x, *rest).sum().backward()


@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_counts_as_nn_linear(bias):
    plain, ours = (kind(70, 33, bias=bias) for kind in (nn.Linear, te_mx.Linear))
    x = torch.randn(2, 5, 70)
    with te_mx.autocast():
        assert counted(lambda: step(ours, x)) == 3 * 2 * 10 * 70 * 33
        assert counted(lambda: step(plain, x)) == 3 * 2 * 10 * 70 * 33
        with torch.no_grad():
            assert counted(lambda: ours(x)) == 2 * 10 * 70 * 33


def test_fused_layers_count_their_gemms():
    mlp = te_mx.LayerNormMLP(64, 96)
    x = torch.randn(12, 64)
    with te_mx.autocast():
        assert counted(lambda: step(mlp, x)) == 3 * 2 * (2 * 12 * 64 * 96)


def test_groups_count_all_rows():
    layer = te_mx.GroupedLinear(3, 64, 40)
    x = torch.randn(20, 64)
    with te_mx.autocast():
        assert counted(lambda: step(layer, x, [5, 0, 15])) == 3 * 2 * 20 * 64 * 40


def test_gemm_and_gemm_into():
    A, B = te_mx.quantize(torch.randn(24, 96)), te_mx.quantize(torch.randn(17, 96))
    out = torch.zeros(17, 24)
    for _ in range(3):  # however often: a short way would not be counted
        assert counted(lambda: te_mx.gemm(A, B)) == 2 * 24 * 17 * 96
        assert counted(lambda: te_mx.gemm(A, B, out=out, accumulate=True)) == 2 * 24 * 17 * 96


def test_mixtures_count_all_routed_rows():
    experts, tokens, top_k, hidden, inner = 4, 6, 2, 64, 32
    w13 = te_mx.quantize(torch.randn(experts, 2 * inner, hidden))
    w2 = te_mx.quantize(torch.randn(experts, hidden, inner))
    x, (scores, ids) = torch.randn(tokens, hidden), torch.rand(tokens, experts).topk(top_k)
    blocks = te_mx.moe.align_block_size(ids, 4, experts)
    one = 2 * tokens * top_k * 2 * inner * hidden
    sizes = {"top_k": top_k, "block_m": 4}
    assert counted(lambda: te_mx.moe.grouped_gemm(x, w13, *blocks, **sizes)) == one
    assert counted(lambda: te_mx.moe.fused_experts(x, w13, w2, scores, ids)) == one + one // 2

"""Routed rows take the Hopper kernels: lists, products and whole mixtures, and what sends them
elsewhere."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from emulated_hopper import called

sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))

from moe import ROUTINGS, aligned, poisoned, product

import te_mx
from te_mx.backends.sm90 import binding
from te_mx.backends.sm90.moe import HopperMoeGemm
from te_mx.dispatch import registry
from te_mx.dispatch.problem import Place, Problem

pytestmark = pytest.mark.usefixtures("on_hopper")

HERE = Place("cuda", 0)


def calls():
    """Names of the native calls of routed rows so far."""
    return called("moe_gemm", "moe_align", "moe_combine")


@pytest.mark.parametrize("routing", list(ROUTINGS))
@pytest.mark.parametrize("fmt", ["e4m3", "mxfp4"])
def test_products_and_lists_are_native_calls(routing, fmt):
    r = ROUTINGS[routing]
    lists = te_mx.moe.align_block_size(r.topk_ids, r.block_m, r.experts, r.expert_map)
    for mine, theirs in zip(lists, aligned(r), strict=True):
        assert torch.equal(mine, theirs)
    x, w = torch.randn(r.routed, 64), te_mx.quantize(torch.randn(r.local, 48, 64), fmt=fmt)
    a, weights, bias = te_mx.quantize(x), torch.rand(r.routed), torch.randn(r.local, 48)
    out = torch.full((r.routed, 48), 7.0)
    te_mx.moe.grouped_gemm(
        a, w, *poisoned(aligned(r), r.block_m, 2), top_k=1, block_m=r.block_m, out=out,
        mul_weight_by=weights, bias=bias,
    )  # fmt: skip
    want, _, hit = product(r, a.dequantize(), w.dequantize(), 1, weights, bias)
    torch.testing.assert_close(out[hit].double(), want[hit], rtol=1e-6, atol=1e-6)
    assert bool((out[~hit] == 7.0).all())
    assert calls() == ["moe_align", "moe_gemm"]


def test_plain_tokens_are_quantized_first():
    r = ROUTINGS["many tokens"]
    x = torch.randn(65, 64, dtype=torch.bfloat16)
    w = te_mx.quantize(torch.randn(6, 96, 64))
    call = {"top_k": 4, "block_m": r.block_m, "out_dtype": torch.float32}
    made = te_mx.moe.grouped_gemm(x, w, *aligned(r), **call)
    assert torch.equal(made, te_mx.moe.grouped_gemm(te_mx.quantize(x), w, *aligned(r), **call))
    assert calls() == ["moe_gemm", "moe_gemm"]


@pytest.mark.parametrize("fmt", ["e4m3", "mxfp4"])
@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_many_rows_an_expert_go_in_tiles(interleaved, elsewhere, fmt):
    """The steps of a mixture, its products in tiles; beside the reference of other devices."""
    torch.manual_seed(1)
    tokens, experts, hidden, inner = 150, 4, 64, 48
    x = torch.randn(tokens, hidden, dtype=torch.bfloat16)
    w13 = te_mx.quantize(torch.randn(experts, 2 * inner, hidden) / 8, fmt=fmt)
    w2 = te_mx.quantize(torch.randn(experts, hidden, inner) / 8, fmt=fmt)
    local = torch.tensor([2, -1, 0, 1, 3]) if elsewhere else None
    ids = torch.rand(tokens, 4 + elsewhere).argsort(1)[:, :2]
    ids[3, 1] = -1
    scores, biases = torch.rand(tokens, 2), (torch.randn(4, 2 * inner), torch.randn(4, hidden))
    how = {"interleaved": interleaved, "expert_map": local, "biases": biases}
    call = (x, w13, w2, scores, ids, "swigluoai")
    made = te_mx.moe.fused_experts(*call, **how)
    assert calls() == ["moe_align", "moe_combine"]
    binding._problems[0] = "is not there"
    registry.forget()
    with pytest.warns(te_mx.FallbackWarning):
        want = te_mx.moe.fused_experts(*call, **how).float()
    assert float((made.float() - want).norm()) <= 2.0**-6 * float(want.norm())


def test_a_product_of_many_rows_goes_in_tiles():
    x, w = torch.randn(150, 70), te_mx.quantize(torch.randn(3, 20, 70))
    ids = torch.rand(150, 3).argsort(1)[:, :2].int()
    ids[4, 1] = -1
    lists = te_mx.moe.align_block_size(ids, 8, 3)
    scores, out = torch.rand(150, 2), torch.full((300, 20), 7.0)
    a = te_mx.quantize(x)
    te_mx.moe.grouped_gemm(a, w, *lists, top_k=2, block_m=8, out=out, mul_weight_by=scores)
    assert calls() == ["moe_align", "moe_align"]
    values, flat = w.dequantize(), ids.flatten().long()
    want = (a.dequantize().repeat_interleave(2, 0).unsqueeze(1) @ values[flat].mT).squeeze(1)
    want = want * scores.view(-1, 1)
    want[9] = 7.0
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"lhs": "mxfp4@rows"}, "takes tokens in"),
        ({"rhs": "mxfp6_e3m2@rows"}, "not mxfp6_e3m2"),
        ({"rhs": "fp8_e4m3_128x128@rows"}, "not fp8_e4m3_128x128"),
        ({"k": 70}, "multiples of 32"),
        ({"n": 15}, "16 rows or more"),
        ({"dtype": torch.float64}, "not torch.float64"),
        ({"place": Place("cpu", -1, 3)}, "runs on CUDA"),
        ({}, None),
    ],
)
def test_envelope(change, said):
    problem = Problem("moe_gemm", HERE, "mxfp8_e4m3@rows", "mxfp4@rows", 8, 48, 64, 4)
    reason = HopperMoeGemm().accepts(problem._replace(**change))
    assert reason is None if said is None else said in reason


@pytest.mark.parametrize("tokens", [2, 20])
def test_slots_of_no_expert_add_nothing_and_need_no_zeros(tokens, monkeypatch):
    """What nobody writes is NaN here; on a device no kernel fills anything before the products."""
    x = torch.randn(tokens, 64, dtype=torch.bfloat16)
    w13, w2 = te_mx.quantize(torch.randn(16, 96, 64)), te_mx.quantize(torch.randn(16, 64, 48))
    ids = torch.rand(tokens, 16).argsort(1)[:, :2].int()
    ids[0, 1], ids[1, 0] = -1, 16
    call = (x, w13, w2, torch.rand(tokens, 2), ids)
    with monkeypatch.context() as host:
        host.setattr("te_mx.moe.experts.check_range", lambda *args: None)
        want = te_mx.moe.fused_experts(*call)
        host.setattr("te_mx.moe.experts.known_to_host", lambda ids: False)
        torch.use_deterministic_algorithms(True)
        try:
            made = te_mx.moe.fused_experts(*call)
        finally:
            torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(made, want, rtol=2**-7, atol=2**-7 * float(want.abs().max()))
    assert calls()[-1] == "moe_combine"

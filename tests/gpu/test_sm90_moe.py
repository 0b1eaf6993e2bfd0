"""Routed rows on Hopper: the conformance set of tests/contract/moe.py against fp64, inside of the
contract's bound; bits that do not depend on the lists; graphs; scales at the ends of a range."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "contract"))

from moe import ROUTINGS, aligned, in_turns, poisoned, product

import te_mx
from te_mx.recipe import MXFP8BlockScaling

STEPS = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
DEVICE = "cuda"
FORMATS = ("e4m3", "mxfp4")
every_routing = pytest.mark.parametrize("routing", list(ROUTINGS))


def there(lists):
    return tuple(None if one is None else one.to(DEVICE) for one in lists)


def quantized(*shape: int, fmt: str = "e4m3") -> te_mx.MXTensor:
    return te_mx.quantize(torch.randn(shape, device=DEVICE), fmt=fmt)


def grouped(a, w, lists, r, a_div, **more):
    return te_mx.moe.grouped_gemm(
        a, w, *there(lists), top_k=r.topk_ids.shape[1], block_m=r.block_m, a_div=a_div, **more
    )


@every_routing
def test_lists(routing):
    r = ROUTINGS[routing]
    local = None if r.expert_map is None else r.expert_map.to(DEVICE)
    made = te_mx.moe.align_block_size(r.topk_ids.to(DEVICE), r.block_m, r.experts, local)
    for mine, theirs in zip(made, aligned(r), strict=True):
        assert torch.equal(mine.cpu(), theirs)


@every_routing
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(("n", "k"), [(40, 64), (16, 32), (200, 768), (130, 2880), (24, 4128)])
def test_products(routing, fmt, n, k):
    r = ROUTINGS[routing]
    lists, top_k = aligned(r), r.topk_ids.shape[1]
    w = quantized(r.local, n, k, fmt=fmt)
    for a_div, out_dtype, given in (
        (top_k, torch.bfloat16, lists),
        (1, torch.float32, poisoned(lists, r.block_m, 3)),
        (1, torch.float16, in_turns(lists, r)),
    ):
        a = quantized(r.routed // a_div, k, fmt="e5m2" if a_div == top_k else "e4m3")
        weights = torch.rand(r.routed, device=DEVICE) if a_div == 1 else None
        bias = torch.randn(r.local, n, device=DEVICE) if out_dtype == torch.float32 else None
        out = torch.full((r.routed, n), torch.nan, dtype=out_dtype, device=DEVICE)
        grouped(a, w, given, r, a_div, out=out, mul_weight_by=weights, bias=bias)
        cpu = (one if one is None else one.cpu() for one in (weights, bias))
        want, magnitude, hit = product(r, a.dequantize().cpu(), w.dequantize().cpu(), a_div, *cpu)
        bound = (k + 4) * 2.0**-24 * magnitude + want.abs() * STEPS[out_dtype] + 2.0**-24
        got = out.cpu().double()
        assert bool(((got - want).abs() <= bound)[hit].all())
        assert bool(got[~hit].isnan().all())


@pytest.mark.parametrize("fmt", FORMATS)
def test_bits_do_not_depend_on_the_lists(fmt):
    r = ROUTINGS["many tokens"]
    a, w = quantized(65, 768), quantized(6, 200, 768, fmt=fmt)
    lists = aligned(r)
    one = grouped(a, w, lists, r, 4, out_dtype=torch.float32)
    assert torch.equal(one, grouped(a, w, in_turns(lists, r), r, 4, out_dtype=torch.float32))
    slots = r.topk_ids.reshape(-1)
    count = torch.tensor([len(slots) * r.block_m], dtype=torch.int32)
    assert torch.equal(one, grouped(a, w, (None, slots, count), r, 4, out_dtype=torch.float32))
    alone = r._replace(topk_ids=r.topk_ids[7:8])  # one token, whatever lies beside it
    x = te_mx.quantize(a.dequantize()[7:8])
    assert torch.equal(one[28:32], grouped(x, w, aligned(alone), alone, 4, out_dtype=torch.float32))


@pytest.mark.parametrize("fmt", FORMATS)
def test_bits_do_not_depend_on_the_number_of_items(fmt):
    """304 items, for which 132 multiprocessors have three CTAs each, and 16."""
    experts, n, k = 16, 19 * 128, 160
    ids = torch.randperm(experts, device=DEVICE).int()[None]
    lists = te_mx.moe.align_block_size(ids, 8, experts)
    a, plain = quantized(1, k), torch.randn(experts, n, k, device=DEVICE)
    w, few = (te_mx.quantize(one.contiguous(), fmt=fmt) for one in (plain, plain[:, 128:256]))
    how = {"top_k": experts, "block_m": 8, "out_dtype": torch.float32, "a_div": experts}
    out = te_mx.moe.grouped_gemm(a, w, *lists, **how)
    assert torch.equal(out[:, 128:256], te_mx.moe.grouped_gemm(a, few, *lists, **how))
    x, rows = a.dequantize().double(), w.dequantize().double()[ids[0].long()]
    want, magnitude = (x @ rows.mT)[:, 0], (x.abs() @ rows.abs().mT)[:, 0]
    assert bool(((out - want).abs() <= (k + 4) * 2.0**-24 * magnitude).all())


@pytest.mark.parametrize("fmt", FORMATS)
def test_scales_at_both_ends(fmt):
    """Products of tiny and huge scales that meet in range; NaN scales make their rows NaN."""
    r, k, n = ROUTINGS["no power of two"], 128, 32
    x = torch.randn(13, k, device=DEVICE) * 2.0**60
    w = torch.randn(7, n, k, device=DEVICE) * 2.0**-60
    x[3, 40], w[2, 5, 100] = torch.nan, torch.inf
    a, b = te_mx.quantize(x), te_mx.quantize(w, fmt=fmt)
    out = grouped(a, b, aligned(r), r, 3, out_dtype=torch.float32).cpu()
    want, magnitude, _ = product(r, a.dequantize().cpu(), b.dequantize().cpu(), 3, None, None)
    assert torch.equal(out.isnan(), want.isnan())
    fine = ~want.isnan()
    assert bool(((out - want).abs() <= (k + 4) * 2.0**-23 * magnitude + 2.0**-24)[fine].all())


def test_a_graph_is_replayed_with_other_ids():
    torch.manual_seed(0)
    experts, tokens, hidden, inner = 16, 8, 256, 128
    w13 = quantized(experts, 2 * inner, hidden, fmt="mxfp4")
    w2 = quantized(experts, hidden, inner)
    x = torch.randn(tokens, hidden, device=DEVICE, dtype=torch.bfloat16)
    scores = torch.rand(tokens, 4, device=DEVICE)
    ids = torch.stack([torch.randperm(experts)[:4] for _ in range(tokens)]).to(DEVICE).int()
    call = (x, w13, w2, scores, ids)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        te_mx.moe.fused_experts(*call)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = te_mx.moe.fused_experts(*call)
    for seed in range(3):
        torch.manual_seed(seed)
        ids.copy_(torch.stack([torch.randperm(experts)[:4] for _ in range(tokens)]))
        x.copy_(torch.randn(tokens, hidden))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, te_mx.moe.fused_experts(*call))


def test_a_mixture_is_that_of_the_cpu():
    torch.manual_seed(0)
    x = torch.randn(9, 256, dtype=torch.bfloat16)
    w13, w2 = (te_mx.quantize(torch.randn(*s) / 16) for s in ((6, 256, 256), (6, 256, 128)))
    scores, ids = torch.rand(9, 2), torch.stack([torch.randperm(6)[:2] for _ in range(9)])
    want = te_mx.moe.fused_experts(x, w13, w2, scores, ids).float()
    made = te_mx.moe.fused_experts(
        x.to(DEVICE), w13.to(DEVICE), w2.to(DEVICE), scores.to(DEVICE), ids.to(DEVICE)
    )
    assert float((made.cpu().float() - want).norm()) <= 2.0**-6 * float(want.norm())


def test_what_the_kernel_does_not_take_runs_elsewhere():
    r = ROUTINGS["one token"]
    a, w = quantized(1, 70), quantized(8, 40, 70)  # k that is no multiple of 32
    exact = {"out_dtype": torch.float32, "recipe": MXFP8BlockScaling(precision="exact")}
    with warnings.catch_warnings():  # by Triton where it is installed, else by the reference
        warnings.simplefilter("ignore", te_mx.FallbackWarning)
        out = grouped(a, w, aligned(r), r, 2, **exact)
    want, _, hit = product(r, a.dequantize().cpu(), w.dequantize().cpu(), 2, None, None)
    torch.testing.assert_close(out.cpu()[hit].double(), want[hit], rtol=2e-2, atol=2e-2)

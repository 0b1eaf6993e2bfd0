"""The Hopper kernel that unpacks codes of 4 bits in its main loop: bit for bit the product of
operands that were packed before, with as many parts of k."""

from __future__ import annotations

import pytest
import sm90_codes_products as products
import torch
from sm90_codes_products import E4M3, E5M2, EPILOGUES, FP4, SPANS

from te_mx import _ops as ops
from te_mx._ops import Mode
from te_mx.backends.sm90 import codes
from te_mx.backends.sm90.gemm import Adaptive
from te_mx.runtime.kernel_log import LAST_RUN

DTYPES = (torch.bfloat16, torch.float32, torch.float16)
LHS = (FP4, E4M3, E5M2)
# Whole blocks, tails, odd k, many blocks a CTA, k with scales that are no whole 16 bytes.
SHAPES = (
    (128, 2048, 7168), (128, 24576, 1536), (512, 7168, 2048), (1000, 5000, 544),
    (77, 200, 1055), (1, 1, 32), (129, 257, 352), (64, 130, 4096),
)  # fmt: skip


def pair(m, n, k, fmt, kinds, seed=0):
    lhs = products.operand(m, k, fmt, kinds[0], "cuda", seed)
    return (
        lhs if fmt == FP4 else products.in_tiles(lhs),
        products.operand(n, k, FP4, kinds[1], "cuda", seed + 1),
    )


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("fmt", LHS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_of_packing_before(shape, fmt, monkeypatch):
    kinds = list(SPANS)
    for i, parts in enumerate((1, 2, 3, 6, 8)):
        if parts <= -(-shape[2] // 128):
            both = pair(*shape, fmt, (kinds[i], kinds[(2 * i + 1) % len(kinds)]), i)
            products.check(*both, "bias", parts, DTYPES[i % 3], monkeypatch)


def test_seven_parts_go_elsewhere(monkeypatch):
    """Two of seven CTAs would be sent more than their stages hold."""
    monkeypatch.setattr(codes, "best_parts", lambda *sizes: 7)
    monkeypatch.setattr(codes, "faster_before", lambda *sizes: False)
    lhs, rhs = pair(128, 128, 1024, E4M3, list(SPANS)[:2])
    epilogue = products.epilogue_of("bias", lhs.rows, rhs.rows, "cuda", torch.float32)
    assert products.run(codes.Codes(), lhs, rhs, epilogue, torch.float32, True)[0] != codes.CODES


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("kinds", [(a, b) for a in SPANS for b in SPANS], ids=str)
def test_every_pair_of_classes(kinds, monkeypatch):
    for fmt in LHS:
        products.check(*pair(300, 260, 1024, fmt, kinds), "plain", 1, torch.float32, monkeypatch)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    "shape", [(300, 260, 1024), (129, 257, 352), (77, 200, 1055), (1, 1, 32), (520, 640, 1152)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("kinds", [(a, b) for a in SPANS for b in SPANS], ids=str)
def test_bits_of_operands_that_one_launch_unpacks(kinds, shape):
    """Each in a launch of its own, or both in one."""
    for fmt in LHS:
        both = pair(*shape, fmt, kinds)
        packed = [x if x.layout.name.startswith("sm90") else products.in_tiles(x) for x in both]
        epilogue = products.epilogue_of("bias", *shape[:2], "cuda", torch.float32)
        for split_k in (False, True):
            got, want = (
                products.run(Adaptive(), *sides, epilogue, torch.float32, split_k)
                for sides in (both, packed)
            )
            assert products.same_bits(got[1], want[1])


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("name", EPILOGUES)
@pytest.mark.parametrize("shape", [(300, 256, 1536), (77, 133, 1055), (128, 136, 512)], ids=str)
def test_epilogues(shape, name, monkeypatch):
    """A bias gradient is added up as that of k in parts, whose order one part does not have."""
    for i, parts in enumerate((1, 2, 4)):
        if parts > 1 or name not in ("dgelu", "result"):
            both = pair(*shape, LHS[i], ("shared", "rows"), i)
            for dtype in DTYPES:
                products.check(*both, name, parts, dtype, monkeypatch)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bias_gradients_of_k_in_one_piece(dtype):
    lhs, rhs = pair(300, 260, 1024, FP4, ("shared", "shared"))
    epilogue = products.epilogue_of("result", 300, 260, "cuda", dtype)
    _, out, _, sums = products.run(codes.Codes(), lhs, rhs, epilogue, torch.float32, False)
    exact = out.double().sum(0)
    assert ((sums - exact).abs() <= 300 * 2.0**-24 * out.double().abs().sum(0)).all()


def test_it_may_be_captured(monkeypatch):
    lhs, rhs = pair(130, 520, 2048, FP4, ("shared", "shared"))
    mode = Mode(split_k=True)
    want = ops.gemm_2d(lhs, rhs, out_dtype=torch.bfloat16, mode=mode).out
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = ops.gemm_2d(lhs, rhs, out_dtype=torch.bfloat16, mode=mode).out
    got.zero_()
    graph.replay()
    graph.replay()
    assert torch.equal(got, want)


@pytest.mark.parametrize("split_k", [True, False])
@pytest.mark.parametrize("shape", [(512, 2048, 7168), (130, 260, 288)], ids=str)
@pytest.mark.parametrize("kinds", [("rows", "shared"), ("shared", "rows")], ids=str)
def test_runs_repeat(kinds, shape, split_k, monkeypatch):
    """What differs from run to run is read before it is there, or after it was written over."""
    lhs, rhs = pair(*shape, FP4, kinds)
    monkeypatch.setattr(codes, "faster_before", lambda *sizes: False)
    if not split_k:
        monkeypatch.setattr(codes, "best_parts", lambda *sizes: 1)
    mode, tag = Mode(split_k=split_k), 1 << 40  # no module's
    first = ops.gemm_2d(lhs, rhs, out_dtype=torch.float32, mode=mode, tag=tag).out
    assert LAST_RUN.pop(tag) == codes.CODES
    for _ in range(20):
        again = ops.gemm_2d(lhs, rhs, out_dtype=torch.float32, mode=mode).out
        assert torch.equal(again, first)

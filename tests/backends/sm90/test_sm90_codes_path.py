"""Products with plain weights of 4 bits on Hopper, unpacked in the main loop: when that kernel
runs, what it is told, and that nothing changes but the time."""

from __future__ import annotations

import fake_sm90
import pytest
import torch
from as_on_hopper import hopper

from te_mx import _ops as ops
from te_mx._ops import Epilogue, Mode
from te_mx.backends.base import LAYOUTS
from te_mx.backends.sm90 import codes
from te_mx.dispatch import registry
from te_mx.dispatch.explain import explain_problem
from te_mx.dispatch.problem import Problem, place_of

FP4, E4M3, E5M2 = "mxfp4", "mxfp8_e4m3", "mxfp8_e5m2"
M, N, K = 100, 72, 416
LHS = {"fp4": f"{FP4}@rows", "tiles": f"{E4M3}@sm90:8", "e5m2": f"{E5M2}@rows"}
NONE, WHOLE, SPLIT = Epilogue(), Mode(), Mode(split_k=True)


CALLS = []  # records of its calls
UNPACKED = []  # how many operands each launch unpacked before a product


@pytest.fixture(autouse=True)
def on_hopper():
    gemm_codes, unpack = fake_sm90.gemm_codes, fake_sm90.unpack
    CALLS.clear()
    with hopper() as patch:
        patch.setattr(fake_sm90, "gemm_codes", lambda a: CALLS.append(a) or gemm_codes(a))
        for name in ("unpack", "unpack_two"):
            patch.setattr(fake_sm90, name, lambda *a: UNPACKED.append(len(a)) or unpack(*a))
        yield


def operands(lhs, m=M, n=N, k=K, rhs=f"{FP4}@rows"):
    generator = torch.Generator().manual_seed(m + n + k)
    x, w = (torch.randn(rows, k, generator=generator) for rows in (m, n))
    return ops.quantize_2d(x, lhs).row, ops.quantize_2d(w, rhs).row


def multiplied(lhs, rhs, epilogue=NONE, out=None, mode=WHOLE, **kwargs):
    return ops.gemm_2d(lhs, rhs, epilogue, out=out, out_dtype=torch.float32, mode=mode, **kwargs)


def packed_before(monkeypatch, call):
    with monkeypatch.context() as patch, hopper():
        patch.setattr(codes.Codes, "accepts", lambda self, problem: "is left out")
        return call()


@pytest.mark.parametrize("lhs", list(LHS))
@pytest.mark.parametrize("accumulate", [False, True])
def test_it_gives_what_packing_before_gives(lhs, accumulate, monkeypatch):
    both = operands(LHS[lhs])
    bias, pre = torch.randn(N), torch.randn(M, N)
    for epilogue in (
        Epilogue(bias, accumulate=accumulate),
        Epilogue(bias, "tanh"),
        Epilogue(gelu="erf", gelu_in=pre, bias_grad="result"),
        Epilogue(bias_grad="operand"),
    ):

        def product(epilogue=epilogue):
            out = torch.ones(M, N) if epilogue.accumulate else None
            return multiplied(*both, epilogue, out, SPLIT, want_aux=True)

        before = len(CALLS)
        got, want = product(), packed_before(monkeypatch, product)
        assert len(CALLS) == before + 1
        for mine, theirs in zip(got[:3], want[:3], strict=True):
            assert (mine is None) == (theirs is None)
            assert mine is None or torch.equal(mine, theirs)


@pytest.mark.parametrize(
    ("shape", "rhs", "reason"),
    [
        ((513, N, K), f"{FP4}@rows", "at most 512 rows"),
        ((M, N, K + 2), f"{FP4}@rows", "whole 16 bytes"),
        ((M, N, K), f"{E4M3}@rows", "weights in mxfp4 that lie by rows"),
        ((M, N, K), f"{FP4}@cols", "weights in mxfp4 that lie by rows"),
    ],
)
def test_its_envelope(shape, rhs, reason):
    m, n, k = shape
    problem = Problem("gemm", place_of(torch.device("cpu")), f"{FP4}@rows", rhs, m, n, k)
    said = explain_problem(problem, "a product")
    assert said.kernel == "sm90_adaptive" and reason in dict(said.declined)[codes.CODES]
    inside = explain_problem(problem._replace(rhs=f"{FP4}@rows", m=128, k=K - 1), "a product")
    assert inside.kernel == codes.CODES and "in the main loop" in inside.note


def test_sizes_beside_each_other_get_their_own_kernel():
    """Kernels are remembered by classes of sizes: these differ by what its envelope looks at."""
    for m, k in ((64, 128), (64, 130), (64, 160), (16, 128), (16, 130)):
        CALLS.clear()
        multiplied(*operands(f"{FP4}@rows", m=m, k=k))
        assert len(CALLS) == (k % 32 == 0)


def test_inputs_of_4_bits_are_unpacked_by_native_code_and_others_packed_before():
    for lhs in LHS:
        CALLS.clear()
        multiplied(*operands(LHS[lhs]))
        assert [(call.lhs.layout == LAYOUTS["k_last"]) for call in CALLS] == [lhs == "fp4"]


def test_operands_of_4_bits_are_unpacked_in_one_launch(monkeypatch):
    monkeypatch.setattr(codes, "faster_before", lambda *sizes: True)
    for lhs, rhs, sides in (
        (LHS["fp4"], f"{FP4}@rows", [2]),
        (LHS["tiles"], f"{FP4}@rows", [1]),
        (LHS["e5m2"], f"{FP4}@rows", [1]),
        (LHS["fp4"], f"{E4M3}@rows", [1]),
    ):
        both = operands(lhs, rhs=rhs)
        packed = [ops.convert_2d(x, f"{x.format.name}@sm90:8") for x in both]
        want = multiplied(*packed)
        UNPACKED.clear()
        got = multiplied(*both)
        assert sides == UNPACKED and not CALLS
        assert torch.equal(got.out, want.out)


def test_operands_unpacked_before_have_parts_of_their_own(monkeypatch):
    told, gemm = [], fake_sm90.gemm
    monkeypatch.setattr(fake_sm90, "gemm", lambda args: told.append(args.parts) or gemm(args))
    monkeypatch.setattr(codes, "faster_before", lambda *sizes: True)
    monkeypatch.setattr(codes, "parts_before", lambda *sizes: 3)
    for mode, parts in ((SPLIT, 3), (WHOLE, 1)):
        multiplied(*operands(LHS["fp4"]), mode=mode)
        assert told.pop() == parts and not CALLS


def test_where_codes_are_unpacked_follows_from_sizes():
    """One block of rows unpacks every code once, wherever; of more each does so in the loop."""
    for shape, cut, fp4, before in (
        ((128, 2048, 7168), True, False, False),
        ((128, 2048, 7168), True, True, False),
        ((128, 2048, 7168), False, True, True),
        ((128, 24576, 1536), True, False, False),
        ((128, 24576, 1536), True, True, False),
        ((512, 2048, 7168), True, False, False),
        ((512, 2048, 7168), True, True, False),
        ((512, 7168, 2048), True, False, False),
        ((384, 7168, 2048), True, False, True),
        ((512, 7168, 2048), True, True, True),
        ((512, 7168, 2048), False, True, True),
        ((256, 7168, 2048), True, True, False),
    ):
        assert codes.faster_before(*shape, 132, cut, fp4) == before
    assert codes.parts_before(512, 2048, 7168, 132) == 2  # measured
    assert codes.parts_before(512, 2048, 5120, 132) == codes.parts_before(640, 2048, 7168, 132) == 1


def test_codes_that_start_between_16_bytes_are_packed():
    lhs, rhs = operands(LHS["fp4"])
    room = torch.empty(rhs.codes.numel() + 16, dtype=torch.uint8)
    start = -room.data_ptr() % 16 + 1
    moved = room[start : start + rhs.codes.numel()].view_as(rhs.codes).copy_(rhs.codes)
    want = multiplied(lhs, rhs)
    assert len(CALLS) == 1
    got = multiplied(lhs, rhs._replace(codes=moved))
    assert len(CALLS) == 1 and torch.equal(got.out, want.out)


@pytest.mark.parametrize("sms", [132, 114, 8, 1])
def test_parts_follow_from_sizes(sms):
    for m, n, k in ((128, 2048, 7168), (1, 1, 32), (512, 2048, 7168), (512, 7168, 2048)):
        parts = codes.best_parts(m, n, k, sms)
        assert 1 <= parts <= min(6, -(-k // 128))
    assert codes.best_parts(128, 2048, 7168, 132) == 6
    assert codes.best_parts(512, 2048, 7168, 132) == 2
    assert codes.best_parts(512, 7168, 2048, 132) == 1
    # Clusters are launched anew for every wave of them.
    assert codes.best_parts(128, 24576, 1536, 132) == 1


def test_k_is_cut_only_where_that_is_allowed():
    """Few blocks take longer in one piece than unpacked before."""
    both = operands(LHS["fp4"], 32, 40, 2048)
    before = multiplied(*both)
    assert not CALLS
    after = multiplied(*both, mode=SPLIT)
    torch.testing.assert_close(before.out, after.out)
    multiplied(*operands(LHS["fp4"], 32, 40, 256))
    assert [call.parts for call in CALLS] == [6, 1]


@pytest.mark.parametrize(("k", "note"), [(256, "in the main loop"), (2048, "which split_k allows")])
def test_explain_says_where_codes_are_unpacked(k, note):
    place = place_of(torch.device("cpu"))
    problem = Problem("gemm", place, f"{FP4}@rows", f"{FP4}@rows", 32, 40, k)
    assert note in explain_problem(problem, "a product").note
    allowed = explain_problem(problem._replace(split_k=True), "a product").note
    assert "are unpacked in the main loop" in allowed


def test_explain_says_the_parts_of_the_kernel_that_runs():
    place = place_of(torch.device("cpu"))
    for (m, n, k), lhs, where, parts in (
        ((512, 2048, 7168), f"{FP4}@rows", "in the main loop", 2),
        ((384, 7168, 2048), f"{E4M3}@sm90:8", "before the product", 1),
        ((512, 2048, 7168), f"{E4M3}@sm90:8", "in the main loop", 2),
        ((256, 2048, 7168), f"{FP4}@rows", "in the main loop", 3),
        ((512, 7168, 2048), f"{FP4}@rows", "before the product", 1),
    ):
        problem = Problem("gemm", place, lhs, f"{FP4}@rows", m, n, k, split_k=True)
        said = explain_problem(problem, "a product", split_k=True)
        assert where in said.note and said.parts == parts


def test_blocks_behind_the_launch_that_unpacks(monkeypatch):
    """Where blocks are few the microseconds of a step count, of k in one piece."""
    assert codes.blocks_before(512, 7168, 132) == "tile 128x128"
    assert codes.blocks_before(4096, 4096, 132) == ""
    told, gemm = [], fake_sm90.gemm
    monkeypatch.setattr(fake_sm90, "gemm", lambda args: told.append(args.kernel) or gemm(args))
    monkeypatch.setattr(codes, "faster_before", lambda *sizes: True)
    for blocks, parts, kernel in (("tile 128x128", 1, 2), ("tile 128x128", 3, -1), ("", 1, -1)):
        monkeypatch.setattr(codes, "blocks_before", lambda *sizes, blocks=blocks: blocks)
        monkeypatch.setattr(codes, "parts_before", lambda *sizes, parts=parts: parts)
        registry.forget()
        multiplied(*operands(LHS["fp4"]), mode=SPLIT)
        assert told.pop() == kernel

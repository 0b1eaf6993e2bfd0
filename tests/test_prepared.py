"""te_mx.gemm of tensors that stand still takes a short way from the third call on: with the same
bits, and only while nothing has changed. The Hopper kernels run on a stand-in, on any machine."""

from __future__ import annotations

import as_on_hopper
import pytest
import torch

import te_mx
from te_mx import prepared

BF16 = torch.bfloat16


@pytest.fixture
def taken(monkeypatch):
    """How often the short way gave the result."""
    count = []
    run = prepared.run

    def counted(*args):
        made = run(*args)
        if made is not None:
            count.append(1)
        return made

    monkeypatch.setattr(prepared, "run", counted)
    return count


@pytest.fixture(autouse=True)
def hopper():
    with as_on_hopper.hopper():
        yield


def sides(m=40, n=70, k=96, **more):
    torch.manual_seed(1)
    A = te_mx.quantize(torch.randn(n, k), rowwise=True, columnwise=True, **more)
    B = te_mx.quantize(torch.randn(m, k), rowwise=True, columnwise=True, **more)
    return A, B


def repeated(A, B, times=4, **more):
    return [te_mx.gemm(A, B, **more).out for _ in range(times)]


@pytest.mark.parametrize("layout", ["TN", "NN", "NT"])
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_bits_of_the_long_way(taken, layout, dtype):
    shapes = {"TN": ((70, 96), (40, 96)), "NN": ((96, 70), (40, 96)), "NT": ((96, 70), (96, 40))}
    A, B = (te_mx.quantize(torch.randn(s), columnwise=True) for s in shapes[layout])
    first, *later = repeated(A, B, layout=layout, out_dtype=dtype)
    assert len(taken) == 2 and all(torch.equal(first, one) for one in later)
    assert first.dtype == dtype and first.shape == (40, 70)


def test_out_is_written_and_counted(taken):
    A, B = sides()
    want = repeated(A, B)[0]
    out = torch.full((40, 70), torch.nan, dtype=BF16)
    version = out._version
    assert te_mx.gemm(A, B, out=out).out is out
    assert len(taken) == 3 and torch.equal(out, want) and out._version > version


@pytest.mark.parametrize(
    "wrong",
    [
        torch.empty(40, 71, dtype=BF16),
        torch.empty(70, 40, dtype=BF16).t(),
        torch.empty(40, 70, dtype=torch.int32),
    ],
    ids=["shape", "strides", "dtype"],
)
def test_a_wrong_out_is_refused_as_at_first(taken, wrong):
    A, B = sides()
    repeated(A, B)
    before = len(taken)
    with pytest.raises((ValueError, TypeError), match="out"):
        te_mx.gemm(A, B, out=wrong)
    assert len(taken) == before


def test_an_out_that_shares_memory_is_refused(taken):
    A, B = sides(m=40, n=48, k=96)
    repeated(A, B)
    memory = A.rowwise_data.view(torch.uint8).view(-1)[: 40 * 48 * 2].view(BF16).view(40, 48)
    with pytest.raises(ValueError, match="share memory"):
        te_mx.gemm(A, B, out=memory)
    out = torch.empty(40, 48, dtype=BF16, requires_grad=True)
    with pytest.raises(RuntimeError, match="requires grad"):
        te_mx.gemm(A, B, out=out)


@pytest.mark.parametrize(
    "wrong",
    [
        {"split_k": 1},
        {"alignment_spread": 8.0},
        {"accumulate": 0},
        {"grad": 0},
        {"layout": ["TN"]},
        {"out_dtype": "bfloat16"},
    ],
    ids=str,
)
def test_what_is_only_equal_to_an_argument_is_refused(taken, wrong):
    A, B = sides()
    repeated(A, B)
    before = len(taken)
    with pytest.raises((TypeError, ValueError)):
        te_mx.gemm(A, B, **wrong)
    assert len(taken) == before


def test_a_write_to_the_codes_is_seen(taken):
    A, B = sides()
    old = repeated(A, B)[0]
    A.rowwise_data.view(torch.uint8).zero_()
    before = len(taken)
    assert bool((te_mx.gemm(A, B).out == 0).all()) and len(taken) == before
    assert not torch.equal(old, torch.zeros_like(old))


def test_another_tensor_of_the_same_kind_has_its_own_codes(taken):
    A, B = sides()
    repeated(A, B)
    other = te_mx.quantize(torch.randn(40, 96), columnwise=True)
    want = te_mx.gemm(A, other).out
    assert all(torch.equal(want, one) for one in repeated(A, other))
    assert not torch.equal(want, te_mx.gemm(A, B).out)


def test_other_tensors_and_watchers_take_the_long_way(taken):
    from torch.utils.flop_counter import FlopCounterMode

    A, B = sides()
    want = repeated(A, B)[0]
    before = len(taken)
    with FlopCounterMode(display=False):
        assert torch.equal(te_mx.gemm(A, B).out, want)
    with pytest.raises(TypeError, match="MXTensor"):
        te_mx.gemm(A, torch.empty(40, 96))
    made = te_mx.gemm(A, B, bias=torch.ones(70), gelu="tanh")
    assert made.aux is not None and len(taken) == before

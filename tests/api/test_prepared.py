"""te_mx.gemm of tensors that stand still takes a short way from the third call on: with the same
bits, and only while nothing has changed. The Hopper kernels run on a stand-in, on any machine."""

from __future__ import annotations

import as_on_hopper
import fake_sm90
import pytest
import torch
import torch.utils.flop_counter

import te_mx
from te_mx import _ops as ops
from te_mx.api import gemm
from te_mx.runtime import streams
from te_mx.runtime.kernel_log import LAST_RUN, new_tags

BF16 = torch.bfloat16


@pytest.fixture
def taken(monkeypatch):
    """How often the short way gave the result."""
    count = []
    run = gemm.run

    def counted(*args):
        made = run(*args)
        if made is not None:
            count.append(1)
        return made

    monkeypatch.setattr(gemm, "run", counted)
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


# ------------------------------------------------------------------------- products of operands
def operands(rows="mxfp8_e4m3@rows", m=40, n=70, k=96):
    x, w = torch.randn(m, k, dtype=BF16), torch.randn(n, k, dtype=BF16)
    return ops.quantize_2d(x, "mxfp8_e4m3@sm90:8").row, ops.quantize_2d(w, rows).row


@pytest.mark.parametrize("rows", ["mxfp8_e4m3@rows", "mxfp8_e4m3@sm90:8", "mxfp4@rows"])
@pytest.mark.parametrize("biased", [False, True])
def test_a_product_without_an_epilogue(rows, biased):
    """In the shape that is asked for, with the bits of one that is written to a given tensor,
    whether an operand lies plain or is packed already, or no call is made once for it."""
    x, w = operands(rows)
    epilogue, tag = ops.Epilogue(torch.randn(70) if biased else None), new_tags(torch.nn.Identity())
    given = torch.empty(40, 70, dtype=BF16)
    expected = ops.gemm_2d(x, w, epilogue, out=given, out_dtype=BF16, tag=tag).out
    ran = LAST_RUN.pop(tag)
    for shape in ((2, 20, 70), (2, 20, 70), None):
        made = ops.gemm_2d(x, w, epilogue, out_dtype=BF16, tag=tag, shape=shape).out
        assert made.shape == (shape or (40, 70)) and not made._is_view()
        assert torch.equal(made.view(40, 70), expected)
        assert LAST_RUN.pop(tag) == ran


def test_who_watches_sees_a_product():
    x, w = operands()
    expected = ops.gemm_2d(x, w, out_dtype=BF16).out
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        made = ops.gemm_2d(x, w, out_dtype=BF16, shape=(2, 20, 70)).out
    assert torch.equal(made.view(40, 70), expected) and not made._is_view()
    assert counter.get_total_flops() == 2 * 40 * 70 * 96


def test_a_product_is_not_made_of_operands_that_do_not_fit():
    x, w = operands()
    none = x._replace(codes=x.codes[:0], rows=0, spec="mxfp8_e4m3@rows", scales=w.scales[:0])
    assert ops.gemm_2d(none, w, out_dtype=BF16).out.shape == (0, 70)
    with pytest.raises(ValueError, match="rhs"):
        ops.gemm_2d(x, w._replace(codes=w.codes[:, 1:]), out_dtype=BF16)
    longer = operands(k=128)[1]
    for _ in range(2):  # known by the second time
        with pytest.raises(ValueError, match=r"96.*128|128.*96"):
            ops.gemm_2d(x, longer, out_dtype=BF16)


# ------------------------------------------------------------------- codes and values, made alone
SPECS = ["mxfp8_e4m3@rows", "mxfp8_e5m2@rows", "mxfp4@rows"]


@pytest.mark.parametrize("spec", [*SPECS, "mxfp8_e4m3@sm90:8", "fp8_e4m3_1x128@rows"])
@pytest.mark.parametrize("k", [96, 70])
def test_rows_of_many_matrices(spec, k):
    """The bytes of quantize_2d, also of an x with strides and where no call is made once."""
    rule = "pow2" if "1x128" in spec else "rceil"
    for x in (torch.randn(40, k), torch.randn(40, k, dtype=BF16), torch.randn(40, 200)[:, :k]):
        expected = ops.quantize_2d(x, spec, rule=rule).row
        for _ in range(2):
            made = ops.rows_2d(x, spec, rule)
            assert made[2:] == expected[2:]
            assert torch.equal(made.codes, expected.codes)
            assert torch.equal(made.scales, expected.scales)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_values_of_many_operands(spec, dtype):
    operand = ops.quantize_2d(torch.randn(40, 96), spec).row
    expected = operand.values(torch.float64).to(dtype)
    for _ in range(2):
        assert torch.equal(ops.dequantize_2d(operand, dtype), expected)
    with pytest.raises(ValueError, match="the matrix"):
        ops.dequantize_2d(operand._replace(codes=operand.codes[:, 1:]), dtype)


# -------------------------------------------------------------------------------------- prepacked
@pytest.fixture
def packs(monkeypatch):
    """The operands that kernels packed, by their rows and k, and in a capture those that a graph
    packs at every replay."""
    found = []
    pack = fake_sm90.pack

    def noted(args):
        found.append((args.operand.rows, args.operand.k))
        return pack(args)

    monkeypatch.setattr(fake_sm90, "pack", noted)
    return found


def recording(monkeypatch):
    monkeypatch.setattr(streams, "capturing", lambda device: True)


@pytest.mark.parametrize("m", [3, 40])
@pytest.mark.parametrize("fmt", ["mxfp8_e4m3", "mxfp4"])
def test_a_graph_reads_what_was_prepacked(packs, monkeypatch, fmt, m):
    A, B = sides(m=m, fmt=fmt)
    expected = te_mx.gemm(A, B).out
    standing = te_mx.MXTensor(
        A.shape, fmt, rowwise_data=A.rowwise_data, rowwise_scale=A.rowwise_scale
    )
    assert te_mx.prepack(standing) is standing
    del packs[:]
    recording(monkeypatch)
    assert torch.equal(te_mx.gemm(standing, B).out, expected)
    assert (70, 96) not in packs
    assert torch.equal(te_mx.gemm(A, B).out, expected)


def test_both_sides_of_a_product_and_both_copies(packs, monkeypatch):
    A, B = sides(packed=True)
    plain = sides()
    square = te_mx.quantize(torch.randn(96, 96), columnwise=True, packed=True)
    products = [te_mx.gemm(*plain).out, te_mx.gemm(square, plain[1], layout="NN").out]
    del packs[:]
    recording(monkeypatch)
    made = [te_mx.gemm(A, B).out, te_mx.gemm(square, B, layout="NN").out]
    assert packs == []
    assert torch.equal(made[0], products[0]) and torch.equal(made[1], products[1])


def test_outside_of_graphs_the_short_way_is_taken_at_once(taken):
    A, B = sides(packed=True)
    first, *later = repeated(A, B)
    assert len(taken) == 3 and all(torch.equal(first, one) for one in later)


def test_a_write_to_what_was_prepacked_is_an_error():
    A, B = sides()
    te_mx.prepack(A)
    te_mx.gemm(A, B)
    A.rowwise_data.view(torch.uint8)[0, 0] ^= 1
    with pytest.raises(RuntimeError, match=r"written to after te_mx.prepack.*make a new MXTensor"):
        te_mx.gemm(A, B)


def test_prepacking_during_a_capture_and_of_something_else(monkeypatch):
    A, _ = sides()
    recording(monkeypatch)
    with pytest.raises(RuntimeError, match="pack before the capture"):
        te_mx.prepack(A)
    with pytest.raises(RuntimeError, match="pack before the capture"):
        te_mx.quantize(torch.randn(4, 32), packed=True)
    with pytest.raises(TypeError, match="q must be an MXTensor, got Tensor"):
        te_mx.prepack(torch.randn(4, 32))


def test_another_precision_reads_the_codes(monkeypatch):
    A, B = sides()
    expected = te_mx.gemm(A, B, precision="exact").out
    te_mx.prepack(A)
    assert torch.equal(te_mx.gemm(A, B, precision="exact").out, expected)
